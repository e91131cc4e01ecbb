"""Bugs of preference optimisation, planted in a fork of llm/dpo; the words were fixed before the gates were run on them."""

from tests.helpers.plant import Plant

DPO = "llm/dpo"
TRAINER = "    return DPOTrainer(model=model,"
BUILT = "    trainer.optimizer = core.make_optimizer(trainer.model, cfg.optim)\n"
COLLATOR = "        split.collator = trainer.data_collator\n"
READ = "    data = read(cfg, chat)\n"
COPY = '                    p.data.copy_(own[name.replace(".ref.", ".default.")])\n'


def override(*body: str) -> str:
    """TRAINER, as a subclass with methods of its own."""
    lines = "".join(f"        {line}\n" for line in body)
    return f"    class Own(DPOTrainer):\n{lines}\n    return Own(model=model,"


def own_loss(reduce: str, reference: str) -> str:
    """A loss written by hand: how tokens are reduced, and what the reference's log-probabilities are."""
    return override(
        "def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):",
        "    from trl.trainer.utils import use_adapter",
        "    mask = inputs['completion_mask'][:, 1:]",
        "    ask = {k: inputs[k] for k in ('input_ids', 'attention_mask')}",
        "    def logps(m):",
        "        said = m(**ask, use_cache=False).logits[:, :-1].float().log_softmax(-1)",
        "        said = said.gather(-1, ask['input_ids'][:, 1:, None])[..., 0] * mask",
        f"        return {reduce}",
        "    with torch.no_grad(), use_adapter(self.model, 'ref'):",
        f"        ref = {reference}",
        "    over = (logps(model) - ref).chunk(2)",
        "    return -torch.nn.functional.logsigmoid(self.beta * (over[0] - over[1])).mean()",
    )


SUM, MEAN, FROZEN = "said.sum(1)", "said.sum(1) / mask.sum(1)", "logps(self.model)"

PLANTS = [
    Plant("dpo-attention-drops-out", "preference", "L9", BUILT, BUILT +
          "    for module in trainer.model.modules():\n        if hasattr(module, 'attention_dropout'):\n"
          "            module.attention_dropout = 0.1\n", ("dropout",), recipe=DPO, source="LLM-13 huggingface/trl#2042",
          harm="TRL switches off modules of dropout, and this is an argument: policy and reference differ before any step"),
    Plant("dpo-mean-over-tokens", "preference", "L9", TRAINER, own_loss(MEAN, FROZEN), ("averaged over tokens",), recipe=DPO,
          before=("overfit",), why="margins a twentieth as long hardly close the loss",
          source="LLM-12 minimind#298, huggingface/trl#789", harm="beta is divided by the length; the first loss is still ln 2"),
    Plant("dpo-without-reference", "preference", "L9", TRAINER, own_loss(SUM, "torch.zeros(mask.shape[0])"),
          ("left at zero",), recipe=DPO, before=("initial-loss",), why="the first loss is not ln 2",
          source="LLM-14 linkedin/Liger-Kernel PR#387", harm="another algorithm, free to drift"),
    Plant("dpo-reference-follows", "wiring", "C3", BUILT, BUILT +
          "    step = trainer.training_step\n\n    def followed(*args, **kwargs):\n        begin()\n"
          "        return step(*args, **kwargs)\n\n    trainer.training_step = followed\n", ("frozen",), recipe=DPO,
          source="L9", harm="margins are measured from a moving place"),
    Plant("dpo-evaluated-without-reference", "preference", "L9", "margin = (chosen - ref_chosen) - (rejected - ref_rejected)\n",
          "margin = chosen - rejected\n", ("leaves out the reference",), recipe=DPO,
          harm="the accuracy counts what the initial model preferred already"),
    Plant("dpo-answers-exchanged", "preference", "L9", COLLATOR,
          "        split.collator = lambda rows: trainer.data_collator(\n"
          '            [{**r, "chosen_ids": r["rejected_ids"], "rejected_ids": r["chosen_ids"]} for r in rows])\n',
          ("chosen and rejected are exchanged",), recipe=DPO, before=("overfit", "template", "scored"),
          why="what is learnt is the other answer", source="L9", harm="the model learns what nobody wanted"),
    Plant("dpo-another-beta", "preference", "L9", "        beta=cfg.beta,\n", "        beta=10 * cfg.beta,\n",
          ("beta has another value",), recipe=DPO, source="L9", harm="the policy stays ten times as near to its reference"),
    Plant("dpo-prompt-scored", "scored", "L2", COLLATOR,
          "        def own(rows, collate=trainer.data_collator):\n            batch = collate(rows)\n"
          '            batch["completion_mask"] = batch["attention_mask"].clone()\n            return batch\n\n'
          "        split.collator = own\n", ("tokens of the prompt",), recipe=DPO, source="LLM-04 nanochat PR#582",
          harm="the prompt's tokens cancel in the sums and cost their noise; with a mean they do not cancel"),
    Plant("dpo-end-not-scored", "scored", "L3", READ,
          "    object.__setattr__(chat, 'answer', lambda text, opening='': pairs.Chat.answer(chat, text, opening)[:-1])\n" + READ,
          ("unscored", "ends it"), recipe=DPO, before=("template",), why="the rendered example lacks it, too",
          source="LLM-03 huggingface/trl PR#6357", harm="answers do not stop"),
    Plant("dpo-exchanged-in-training", "sides", "L9", READ, READ +
          "    data['train'].rows = [{**r, 'chosen': r['rejected'], 'rejected': r['chosen']} for r in data['train'].rows]\n",
          ("exchanged in one of the splits",), recipe=DPO, harm="the rejected answer is learnt, in a file of one split alone"),
    Plant("dpo-evaluates-a-place-late", "preference", "L9", "log_probs(logits[:, :-1], labels)", "log_probs(logits[:, 1:], labels)",
          ("the evaluation's log-probability",), recipe=DPO, harm="margins of tokens that the model has already read"),
    Plant("dpo-pairs-interleaved", "preference", "L9", ".sum(1).chunk(2))", ".sum(1).view(-1, 2).unbind(1))",
          ("the evaluation's log-probability",), recipe=DPO, before=("overfit",), why="answers to different prompts are compared",
          source="common (concatenated against interleaved pairs)", harm="held-out accuracy compares two chosen answers"),
    Plant("dpo-margin-adds-the-reference", "preference", "L9", "(chosen - ref_chosen) - (rejected - ref_rejected)",
          "(chosen - ref_chosen) - (rejected + ref_rejected)", ("no difference of the two answers",), recipe=DPO,
          before=("overfit", "tiny-data"), why="both read this accuracy", source="common (brackets)",
          harm="the reported accuracy is another number's; any answer is preferred"),
    Plant("dpo-exports-the-reference", "exported", "C18", "        loading.export(trainer.model, tokenizer, folder)\n",
          "        with reference() as frozen:\n            frozen.save_pretrained(folder, selected_adapters=['ref'])\n"
          "        tokenizer.save_pretrained(folder)\n        for file in (folder / 'ref').iterdir():\n            file.rename(folder / file.name)\n",
          ("weights that training began with",), recipe=DPO, source="common (stale variable)", harm="the untrained model is shipped"),
    Plant("dpo-served-without-its-system", "exported", "L5", "formats.system(cfg.data.system, cfg.data.path, preferences.SYSTEM))", '"")',
          ("asks the export in another way than training",), recipe=DPO, source="common (default system message at serving)",
          harm="the model in use reads other prompts than the model in training"),
    Plant("dpo-reads-ahead", "causal", "L4", BUILT, BUILT + "    trainer.model.get_input_embeddings().register_forward_hook(\n"
          "        lambda module, args, out: out + 0.1 * out.roll(-1, 1))\n", ("exchanging a token changes",), recipe=DPO,
          harm="each token's own target is in its input; the loss and its reference read it alike"),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS]  # each builds a language model several times; test_dpo_lm has them on a small one
