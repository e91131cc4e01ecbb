"""Bugs of pretraining on packed documents, planted in a fork of llm/pretrain; the words were fixed before the gates were run."""

from tests.helpers.plant import Plant

PRETRAIN = "llm/pretrain"
POSITIONS = 'position_ids=batch["position_ids"], use_cache=False)'
SHIFTED = 'logits, labels = out.logits[:, :-1].float(), batch["labels"][:, 1:]'
ASKED = "return log_z - own, log_z, labels != IGNORED"
Z = 'terms["z"] = cfg.z_loss * log_z[scored].square().sum()'
TOTAL = "        nll, log_z, tokens, far, there, size = run.gather(torch.cat(rows)).sum(0).tolist()\n"
VAL = "val_data = Packed(corpus.val,"
MODEL = "    start_at_frequencies(model, log_p)\n    return model\n"


def bug(id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], **more: str) -> Plant:
    return Plant(id, gate, row, old, new, words, recipe=PRETRAIN, **more)


def windowed(change: str) -> str:
    """VAL, with windows that are `change` of each window `w` as it should be."""
    return f"""class Own(Packed):
        def get(self, index, generator):
            kept, self.windows = self.windows, [{change} for w in self.windows]
            try:
                return super().get(index, generator)
            finally:
                self.windows = kept

    val_data = Own(corpus.val,"""


PLANTS = [
    bug("positions-run-on", "isolation", "L4", POSITIONS,
        'position_ids=torch.arange(batch["input_ids"].shape[1], device=run.device)[None], use_cache=False)',
        ("document 2", "position ids do not restart"), source="huggingface/nanoVLM PR#204",
        harm="documents read what stands before them"),
    bug("mask-of-ones", "isolation", "L4", POSITIONS, POSITIONS[:-1] + ', attention_mask=torch.ones_like(batch["input_ids"]))',
        ("document 2", "mask of ones"), source="LLM-07 huggingface/trl#3910",
        harm="logits of document 2 move by up to 11; loss of unpacked texts +0.03 to +0.15"),
    bug("a-cache-is-passed", "isolation", "L4", POSITIONS, POSITIONS.replace("False", "True"), ("document 2", "a cache"),
        harm="the same leak, by another way"),
    bug("packed-reads-its-target", "causal", "L4", 'model(input_ids=batch["input_ids"], position_ids',
        'model(input_ids=batch["input_ids"].roll(-1, 1), position_ids', ("reads its own target",),
        harm="training and evaluation read the answer: a splendid score, and a model that copies"),
    bug("labels-cross-documents", "scored", "L2", SHIFTED,
        'logits, labels = out.logits[:, :-1].float(), batch["input_ids"][:, 1:]', ("do not follow there", "mask labels"),
        harm="each document's first token is asked of the one before, and the padding of the padding"),
    bug("packed-labels-shifted-twice", "scored", "L2", SHIFTED,
        'logits, labels = out.logits[:, :-1].float(), F.pad(batch["labels"][:, 2:], (0, 1), value=IGNORED)', ("shifted in the data",),
        source="LLM-01 huggingface/transformers#47394", harm="the model learns token t+2; its loss looks normal"),
    bug("packed-labels-not-shifted", "scored", "L2", SHIFTED, 'logits, labels = out.logits[:, :-1].float(), batch["labels"][:, :-1]',
        ("or not at all",), source="LLM-02 KempnerInstitute/KempnerForge#154", harm="the model learns to copy its input"),
    bug("end-never-trained", "scored", "L3", ASKED,
        "return log_z - own, log_z, (labels != IGNORED) & (labels != tokenizer.eos_token_id)",
        ("the end of a document", "never stops"), source="LLM-03 huggingface/trl PR#6357",
        harm="generations run to the length limit"),
    bug("rare-tokens-clamped", "formula", "L2", '{"ce": nll[scored].sum()}', '{"ce": nll[scored].clamp_max(5.0).sum()}',
        ("the loss is clamped", "get no gradient"), before=("initial-loss",), why="the untrained loss is lower than theory gives",
        harm="78% of held-out tokens begin above 5 nats and are never learnt"),
    bug("z-of-normalised-logits", "z-loss", "L6", "log_z = logits.logsumexp(-1)\n",
        "logits = logits.log_softmax(-1)\n        log_z = logits.logsumexp(-1)\n", ("already normalised",),
        harm="the term is zero and holds nothing"),
    bug("z-as-a-mean", "z-loss", "L6", Z, Z.replace(".sum()", ".mean()"), ("a mean, but the loss is a sum",),
        harm="a thousandth of its weight"),
    bug("z-with-the-wrong-sign", "z-loss", "L6", Z, Z.replace("= cfg", "= -cfg"), ("wrong sign",), harm="log Z is driven away"),
    bug("z-not-squared", "z-loss", "L6", Z, Z.replace(".square()", ".abs()"), ("not squared",), harm="log Z is pulled evenly"),
    bug("perplexity-as-a-mean-of-means", "perplexity", "L7", TOTAL,
        TOTAL + "        nll = sum((r[:, 0].sum() / r[:, 2].sum()).item() for r in rows) / len(rows) * tokens\n",
        ("mean of means",), harm="short rows weigh as much as full ones"),
    bug("stride-tokens-counted-twice", "perplexity", "L7", VAL, windowed("w._replace(scored=w.start + 1)"),
        ("counted twice",), harm="tokens with little before them count twice: the model looks worse"),
    bug("windows-without-what-stands-before", "perplexity", "L7", VAL, windowed("w._replace(start=max(w.start, w.scored - 1))"),
        ("without the tokens before",), harm="as if the stride were the whole row"),
    bug("every-token-beyond", "perplexity", "L7", "beyond = scored & (", "beyond = scored | (",
        ("within the original context count as beyond",), harm="a number for positions that no row has"),
    bug("config-changed-after-building", "export", "L5", MODEL,
        MODEL.replace("    return", "    model.config.rms_norm_eps = 0.1\n    return"), ("settings", "config"),
        harm="who loads the model gets another one"),
    bug("bias-that-is-not-exported", "export", "L5", MODEL,
        MODEL.replace("    return", "    model.lm_head.bias = nn.Parameter(log_p.clone())\n    return"), ("drops", "bias"),
        harm="the exported model lacks what it was trained with"),
    bug("queries-and-keys-from-zero", "wiring", "C3", "        nn.init.zeros_(block.mlp.down_proj.weight)\n",
        "        nn.init.zeros_(block.mlp.down_proj.weight)\n        nn.init.zeros_(block.self_attn.q_proj.weight)\n"
        "        nn.init.zeros_(block.self_attn.k_proj.weight)\n", ("start at zero and are multiplied by each other",),
        source="common (zero initialisation of both factors)", harm="attention is a mean for ever: no token is found by its content"),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS if p.id not in ("labels-cross-documents", "z-as-a-mean")]
