"""Bugs of compression, planted in a fork of distill/compress; the words were fixed before the gates were run."""

from tests.helpers.plant import Plant

COMPRESS, FEW = "distill/compress", ("--data.sentences", "60")
EVENLY = "return [round(i * (layers - 1) / max(1, kept - 1)) for i in range(kept)]"
LOADED = "    model.load_state_dict(start)\n"
APART = 'F.kl_div(soft, hard, reduction="sum", log_target=True)'
HEARD = 'heard = teacher.encode(batch["mel"])\n'
SPLIT = "    learn, held_out, notes = source.split(cfg.data.max_wer)\n"
NOTES = '    data["train"].notes = notes\n'
OPTIMIZER = 'optimizers={"main": core.make_optimizer(model, cfg.optim)},\n'
UPDATE = "        run.update(stage, step.batches)\n"
WHOLE = '    whole = () if cfg.encoder else ("model.encoder",)\n'


def bug(id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], **more: str) -> Plant:
    """One of this recipe."""
    return Plant(f"compress-{id}", gate, row, old, new, words, recipe=COMPRESS, argv=FEW, **more)


PLANTS = [
    bug("first-layers", "copied", "C14", EVENLY, "return list(range(kept))", ("encoder 0, 1 of 4", "evenly spaced"),
        harm="the last layers, which the head was trained on, are gone"),
    bug("layers-drawn-anew", "copied", "C14", LOADED,
        '    model.load_state_dict({k: v for k, v in start.items() if ".layers." not in k}, strict=False)\n',
        ("no layer", "strict=False"), harm="a net from scratch that is thought to be pruned"),
    bug("pruned-and-frozen", "copied", "C14", WHOLE, '    whole = ("model.encoder",)\n', ("encoder lacks 2 of 4 layers", "frozen"),
        source="Distil-Whisper, whose encoder is whole", harm="what is left of the encoder never learns to do without its other layers"),
    bug("mean-over-vocabulary", "divergence", "C1", APART, APART.replace('"sum"', '"mean"') + " * len(ours)",
        ("kl is", "mean over the vocabulary"), source="DST-03 LD#74", harm="the teacher has 1/51,864 of its weight"),
    bug("temperature-not-squared", "divergence", "C1", "cfg.kl * temperature**2 * kl", "cfg.kl * kl",
        ("kl is", "T is not squared"), harm="the teacher has a quarter of its weight"),
    bug("divergence-turned-round", "divergence", "C1", APART, APART.replace("soft, hard", "hard, soft"),
        ("kl is", "exchanged"), harm="the student is sure of one of the teacher's words instead of weighing all"),
    bug("pads-counted", "divergence", "W2", '(place < batch["words"][:, None])', '(place < 99 + 0 * batch["words"][:, None])',
        ("pads", "by its formula"), source="DST-04 optipfair#34", harm="ends are learnt after the end"),
    bug("prompt-counted", "divergence", "W2", "(place >= len(teacher.prompt))", "(place >= 1)", ("prompt", "by its formula"),
        harm="a constant is learnt beside the words"),
    bug("labels-shifted-twice", "divergence", "C4", "F.cross_entropy(ours, ids[:, 1:][scored]",
        "F.cross_entropy(ours, ids[:, 1:].roll(-1, 1)[scored]", ("ce is", "shifted twice"),
        source="DST-07 huggingface/transformers PR#46895", harm="the target is the token after the next"),
    bug("teacher-in-another-scale", "teacher", "V1", HEARD, 'heard = teacher.encode(batch["mel"] * 4 - 4)\n',
        ("another scale",), source="DST-05 Deci-AI/super-gradients PR#183", harm="targets of a half-deaf teacher"),
    bug("teacher-hears-another", "teacher", "V1", HEARD, 'heard = teacher.encode(batch["mel"].roll(1, 0))\n',
        ("another recording",), harm="every recording is taught what the neighbour's sounds like"),
    bug("teacher-wavers", "teacher", "C12", HEARD, 'heard = F.dropout(teacher.encode(batch["mel"]), 0.1)\n',
        ("train mode", "dropout"), source="DST-01 neuralmagic/sparseml PR#2191", harm="targets that change from call to call"),
    bug("teacher-in-train-mode", "teacher", "C12", NOTES,
        NOTES + "    teacher.model.eval = teacher.model.train  # core sets what stands beside a model to eval mode\n"
        "    teacher.model.model.decoder.dropout = 0.1\n", ("in train mode", "dropout"),
        source="DST-01 neuralmagic/sparseml PR#2191", harm="targets that change from call to call"),
    bug("teacher-trains-too", "wiring", "C3", OPTIMIZER,
        OPTIMIZER.replace("(model,", "(nn.ModuleList([model, teacher.model.requires_grad_()]),"), ("not part of the model",),
        harm="the teacher follows its student"),
    bug("labels-unfiltered", "labels", "W6", SPLIT, SPLIT.replace("cfg.data.max_wer", "9.9"), ("not filtered",),
        harm="a tenth of the labels are misheard"),
    bug("labels-of-another", "labels", "W6", SPLIT, SPLIT + "    source.wrote.insert(0, source.wrote.pop())\n",
        ("other recordings",), harm="every recording is labelled with its neighbour's words"),
    bug("ids-of-another-tokenizer", "vocabulary", "W5", NOTES,
        NOTES + "    for one in data.values():\n        one.ids = [[i + 1 for i in ids] for ids in one.ids]\n",
        ("other tokenizer",), source="DST-06 huggingface/transformers#29973", harm="every word has its neighbour's id"),
    bug("exports-its-start", "exported-weights", "C18", "whisper.save(replace(student, model=model), folder)",
        "before = copy.deepcopy(model)\n        before.load_state_dict(start)\n"
        "        whisper.save(replace(student, model=before), folder)", ("trained tensors differ", "weights that training began with"),
        harm="the copied layers are shipped, untrained"),
    bug("updated-twice", "schedule", "C9", UPDATE, 2 * UPDATE, ("stepped 2 times in iteration 1",)),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS if p.id not in ("compress-first-layers", "compress-temperature-not-squared")]
