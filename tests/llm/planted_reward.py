"""Bugs of reward models, planted in a fork of llm/reward; the words were fixed before the gates were run on them."""

from tests.helpers.plant import Plant

REWARD = "llm/reward"
TRAINER = "    return RewardTrainer(model=model,"
TOKENS = "processing_class=loading.scoring_tokenizer(path, cfg.chat_template, cfg.eos_token))  # fmt: skip\n"
BUILT = "    trainer.optimizer = core.make_optimizer(trainer.model, cfg.optim)\n"
COLLATOR = "        split.collator = trainer.data_collator\n"
ADAPTED = '    model = loading.adapted(loading.attend(model, cfg.attention, run.device), cfg, head="score")\n'
ROWS = "        kept, notes = preferences.usable(rows, chat, cfg.data, name, limit)\n"
MERGED = "                net.save_pretrained(folder)\n"


def override(*rewards: str) -> str:
    """TRAINER, with rewards (2B,) of a user's own from `said`, the head's numbers at every token (2B, T)."""
    body = (
        "def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):",
        "    ids, mask = inputs['input_ids'], inputs['attention_mask']",
        "    bare = model.get_base_model()",
        "    read = lambda ids, mask: bare.score(",
        "        bare.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state)[..., 0].float()",
        *(f"    {line}" for line in rewards),
        "    chosen, rejected = rewards.chunk(2)",
        "    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()",
    )
    lines = "".join(f"        {line}\n" for line in body)
    return f"    class Own(RewardTrainer):\n{lines}\n    return Own(model=model,"


def exported(change: str) -> str:
    """MERGED, with the model changed before it is saved."""
    return f"                {change}\n{MERGED}"


PLANTS = [
    Plant("reward-splits-in-another-order", "splits", "C6", 'zip(("train", "val", "test"), splits, strict=True)',
          'zip(("val", "train", "test"), splits, strict=True)', ("are exchanged",), recipe=REWARD,
          harm="238 pairs are learnt, 4,278 are evaluated"),
    Plant("reward-pad-is-eos", "place", "L3", TOKENS, TOKENS.replace("scoring_", ""), ("the pad is also the end of a turn",),
          recipe=REWARD, source="RL-08 RLHFlow/RLHF-Reward-Modeling#49", harm="the reward does not know whether the answer ended"),
    Plant("reward-pad-missing", "schema", "C7", BUILT, "    trainer.model.config.pad_token_id = None\n" + BUILT,
          ("padding token",), recipe=REWARD, source="L3", harm="one answer at a time works, at its last token; a batch does not"),
    Plant("reward-padded-with-another-token", "place", "L3", COLLATOR,
          "        trainer.data_collator.pad_token_id = 5\n" + COLLATOR,
          ("of them padding", "not the pad that the collator writes"), recipe=REWARD, before=("dependency",),
          why="the reward of a short answer changes with the longest of its batch",
          source="RLHFlow/RLHF-Reward-Modeling#49", harm="short answers are read at padding, and how much of it there is varies"),
    Plant("reward-last-column", "place", "L3", TRAINER, override("rewards = read(ids, mask)[:, -1]"), ("of them padding",),
          recipe=REWARD, before=("dependency",), why="the reward of a short answer changes with the longest of its batch",
          source="huggingface/trl#3750", harm="as above"),
    Plant("reward-left-padding-read-from-the-right", "bradley-terry", "L1", TRAINER,
          override("n = mask.sum(1)", "turn = lambda x: torch.stack([r.roll(x.shape[1] - int(k)) for r, k in zip(x, n)])",
                   "said = read(turn(ids), turn(mask))", "rewards = said.gather(1, n[:, None] - 1)[:, 0]"),
          ("its side",), recipe=REWARD, source="L1", harm="short answers are read in the middle, or at their prompt"),
    Plant("reward-mean-over-tokens", "place", "L2", TRAINER,
          override("rewards = (read(ids, mask) * mask).sum(1) / mask.sum(1)"), ("averaged over tokens",), recipe=REWARD,
          source="L2", harm="the exported model is read at its last token, which was never trained to say it"),
    Plant("reward-some-pairs-exchanged", "bradley-terry", "R1", COLLATOR,
          "        split.collator = lambda rows: trainer.data_collator(\n"
          '            [{**r, "chosen_ids": r["rejected_ids"], "rejected_ids": r["chosen_ids"]}\n'
          '             if sum(r["chosen_ids"]) % 2 else r for r in rows])\n',
          ("exchanged, in all pairs or in some",), recipe=REWARD, before=("template",), why="the rendered example is the other one",
          source="L9", harm="half of what is learnt is the opposite"),
    Plant("reward-with-a-margin", "bradley-terry", "R1", COLLATOR,
          "        split.collator = lambda rows: trainer.data_collator([{**r, 'margin': 1.0} for r in rows])\n",
          ("the loss has a margin",), recipe=REWARD, before=("initial-loss",), why="the first loss is 1.31", source="R1",
          harm="margins are no longer log-odds: too sure"),
    Plant("reward-head-not-saved", "exported", "L5", ADAPTED,
          "    from peft import LoraConfig, get_peft_model\n\n"
          '    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", exclude_modules=["score"]))\n'
          "    model.base_model.model.score.requires_grad_(True)\n", ("modules_to_save",), recipe=REWARD,
          source="huggingface/peft docs, modules_to_save", harm="the exported rewards are those of a new head"),
    Plant("reward-head-anew", "exported", "L5", MERGED, exported("nn.init.normal_(net.score.weight, std=0.02)"),
          ("initialises it again",), recipe=REWARD, source="L5", harm="the exported rewards are noise"),
    Plant("reward-exported-pad", "exported", "L5", MERGED, exported("net.config.pad_token_id = tokenizer.eos_token_id"),
          ("another one than the exported tokenizer",), recipe=REWARD, source="RLHFlow/RLHF-Reward-Modeling#49",
          harm="right in training, read at padding by everyone else"),
    Plant("reward-head-frozen", "wiring", "C3", BUILT,
          "    for name, p in trainer.model.named_parameters():\n"
          '        if "score.modules_to_save" in name:\n'
          "            nn.init.normal_(p, std=0.02)\n            p.requires_grad_(False)\n" + BUILT,
          ("score", "frozen"), recipe=REWARD, source="huggingface/peft docs, modules_to_save",
          harm="the adapters turn the states towards a direction drawn at random"),
    Plant("reward-length-only", "lengths", "R1", ROWS,
          '        rows = [{**r, "rejected": r["chosen"][: len(r["chosen"]) // 2]} for r in rows]\n' + ROWS,
          ("more tokens in", "counting tokens"), recipe=REWARD, source="R1", harm="a policy trained on it talks without end"),
    Plant("reward-a-mark-decides", "lengths", "R1", ROWS,
          '        rows = [{**r, "chosen": r["chosen"] + "!"} for r in rows]\n' + ROWS,
          ("one mark decides", "has more '!'"), recipe=REWARD, source="common (sides from two sources)",
          harm="the model learns the mark, and nothing of the answers"),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS]  # each builds a language model several times; test_reward has them on a small one
