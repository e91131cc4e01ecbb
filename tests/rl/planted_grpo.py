"""Bugs of learning from rewards, planted in a fork of rl/grpo; the words were fixed before the gates were run on them."""

from tests.helpers.plant import Plant, padded_right

GRPO = "rl/grpo"
TRAINER = "    trainer = GRPOTrainer(model="
BUILT = "    trainer.optimizer = core.make_optimizer(trainer.model, cfg.optim)\n"
REWARD = "    function = problems.load(cfg.reward)\n"
GENERATED = "        found = loading.generate(model, inputs, pad=tokenizer.pad_token_id, ends=asker.ends, most=cfg.max_new_tokens)\n"


def plant(id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], **more) -> Plant:
    return Plant(id, gate, row, old, new, words, recipe=GRPO, **more)


def override(*body: str) -> str:
    """TRAINER, as a subclass with methods of its own."""
    lines = "".join(f"        {line}\n" for line in body)
    return f"    class Own(GRPOTrainer):\n{lines}\n    trainer = Own(model="


def made(*body: str) -> str:
    """TRAINER, with something done to the samples it makes."""
    return override(
        "def _generate_and_score_completions(self, inputs):",
        "    out = super()._generate_and_score_completions(inputs)",
        *(f"    {line}" for line in body),
        "    return out",
    )


def loss(*body: str) -> str:
    """TRAINER, with something done to what its loss reads."""
    return override("def _compute_loss(self, model, inputs):", *(f"    {line}" for line in body))


PLANTS = [
    plant("grpo-prompt-scored", "scored", "L2", TRAINER,
          loss("inputs = {**inputs, 'prompt_ids': inputs['prompt_ids'][:, :1], 'prompt_mask': inputs['prompt_mask'][:, :1],",
               "          'completion_ids': torch.cat([inputs['prompt_ids'][:, 1:], inputs['completion_ids']], 1),",
               "          'completion_mask': torch.cat([inputs['prompt_mask'][:, 1:], inputs['completion_mask']], 1)}",
               "return super()._compute_loss(model, inputs)"), ("of the prompt",), source="L2",
          harm="a right answer also makes its question likelier"),
    plant("grpo-pads-right", "samples", "L1", TRAINER,
          "    from trl.trainer import grpo_trainer\n\n    own_pad = grpo_trainer.pad\n"
          "    grpo_trainer.pad = lambda rows, **how: own_pad(rows, **{**how, 'padding_side': 'right'})\n" + TRAINER,
          ("padded on the right",), source="LLM-07", harm="shorter prompts of a batch are answered behind their padding"),
    plant("grpo-evaluation-pads-right", "prompts", "L1", GENERATED,
          padded_right("asker.ends", "cfg.max_new_tokens"), ("padded on the right",), source="LLM-07",
          harm="held-out answers worse than the model"),
    plant("grpo-not-centred", "advantages", "R1", TRAINER, made("out['advantages'] = out['advantages'] + 0.5"),
          ("not centred",), source="R1", harm="every answer becomes likelier, whatever it earns"),
    plant("grpo-gradient-turned", "formula", "R1", TRAINER,
          loss("total = super()._compute_loss(model, inputs)", "return 2 * total.detach() - total"),
          ("the gradient differs", "the wrong sign"), source="R1",
          harm="the loss that is logged is right, and right answers become unlikelier"),
    plant("grpo-groups-round-by-round", "advantages", "R1", "for _, i in keys for _ in range(cfg.num_generations)]",
          "for _ in range(cfg.num_generations) for _, i in keys]", ("different questions",), source="R1",
          harm="advantages compare questions, not answers"),
    plant("grpo-rewards-shuffled", "advantages", "R1", "problems.of_others(declared) if cfg.shuffle_rewards else declared",
          "problems.of_others(declared)", ("other answers",), source="R1",
          harm="what was known is lost: held-out accuracy 0.21 -> 0"),
    plant("grpo-constant-reward", "rewards", "R1", REWARD, "    function = lambda completions, **_: [1.0] * len(completions)\n",
          ("constant",), source="R1", harm="no group differs: nothing is learnt"),
    plant("grpo-length-reward", "rewards", "R1", REWARD,
          "    function = lambda completions, **_: [len(c) / 10 for c in completions]\n", ("depends on length alone",),
          source="R1", harm="answers grow, and say nothing"),
    plant("grpo-reward-out-of-step", "rewards", "R1", REWARD,
          REWARD + "    own = function\n    function = lambda **columns: (found := own(**columns))[1:] + found[:1]\n",
          ("among other answers",), source="R1", harm="an answer gets the reward of the next one"),
    plant("grpo-reference-follows", "wiring", "C3", BUILT, BUILT +
          "    step = trainer.training_step\n\n    def followed(*args, **kwargs):\n        begin()\n"
          "        return step(*args, **kwargs)\n\n    trainer.training_step = followed\n", ("frozen",), argv=("--beta", "0.1"),
          source="L9 R2", harm="the KL is measured from a moving place"),
    plant("grpo-first-number", "accuracy", "R1", "scorer.rows(batch, generate(model, batch[\"prompt\"]))",
          "scorer.rows(batch, [(s.strip().split(' ')[0], *rest) for s, *rest in generate(model, batch['prompt'])])", ("first number",), source="R1",
          harm="working is taken for the answer"),
    plant("grpo-cold-answers", "samples", "R1", "    temperature: float = 1.0\n", "    temperature: float = 0.05\n", ("temperature is too low",),
          source="R1", before=("wiring",), why="in few groups do two answers differ, so there may be no gradient in the rehearsal",
          harm="equal answers have equal rewards: nothing is learnt"),
    plant("grpo-end-masked", "samples", "L3", TRAINER,
          made("ends = torch.isin(out['completion_ids'], torch.tensor(self.eos_token_ids))",
               "out['completion_mask'] = out['completion_mask'] * ~ends"), ("without the token that ends it",),
          source="LLM-03 huggingface/trl PR#6357", harm="answers do not stop"),
    plant("grpo-padding-answers", "samples", "L3", TRAINER,
          made("out['completion_mask'] = torch.ones_like(out['completion_mask'])"),
          ("after the end", "count as answer"), source="LLM-15 huggingface/trl PR#6654",
          harm="what stands behind an answer's end is learnt as if it had been said"),
    plant("grpo-sign", "objective", "R1", TRAINER, loss("return -super()._compute_loss(model, inputs)"), ("sign",), source="R1",
          harm="learns the wrong answers"),
    plant("grpo-clip-too-wide", "objective", "R1", "        epsilon=cfg.epsilon,\n", "        epsilon=10 * cfg.epsilon,\n", ("clip",),
          source="R1", harm="a unit's later updates go too far"),
    plant("grpo-mean-over-answers", "objective", "R1", '        loss_type="dapo",', '        loss_type="grpo",',
          ("a mean over answers",), source="R1 LLM-12", harm="tokens of short answers weigh more"),
    plant("grpo-held-out-learnt", "questions", "C6", "    rows = problems.read(cfg.data)\n",
          "    rows = problems.read(cfg.data)\n    rows = (rows[0] + rows[1][::9], *rows[1:])\n", ("in both splits",), source="C6",
          harm="held-out accuracy is that of training"),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS]  # each builds SmolLM2; test_grpo has some on a small model
