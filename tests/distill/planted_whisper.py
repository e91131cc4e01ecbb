"""Bugs planted in a fork of distill/whisper. A small set of recordings shows them all; those of the first stage need nothing else."""

from tests.helpers.plant import Plant

RECIPE, FEW = "distill/whisper", ("--data.sentences", "60")
FIRST, SECOND = (*FEW, "--stage", "features"), (*FEW, "--stage", "task")
OPTIMIZER = """        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data=data,
        frozen_modules={"teacher": teacher.model},
        loss=loss,
        evaluate=evaluate,
"""
LOADED = "    learn, held_out = ((source.held_out"
SPEECH = "speech = self.offset[: x.shape[1]] + self.scale * x"
SCORED = 'logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)'
PREVIOUS = "model = heads.taught(previous)\n"
UPDATE = "        run.update(stage, step.batches)\n"
GOT = "        (envelope, heard), ids = got, self.ids[i]\n"
FASTER = (
    GOT
    + """        if generator is not None:  # speed perturbation (Ko 2015)
            rate, spoken = 0.85 + 0.3 * torch.rand((), generator=generator).item(), int(envelope.any(-1).sum())
            size = min(len(envelope), round(spoken / rate))
            other = F.interpolate(envelope[:spoken].mT[None], size=size, mode="linear")[0].mT
            envelope = F.pad(other, (0, 0, 0, len(envelope) - size))
"""
)
BOTH = (
    FASTER
    + """            most = min(self.shape[0][0], round(size / spoken * len(heard)))
            heard = F.interpolate(heard.mT[None], size=most, mode="linear")[0].mT
"""
)


def bug(
    id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], *, task: bool = False,
    more: tuple[str, ...] = (), **others: str | tuple[str, ...],
) -> Plant:  # fmt: skip
    """One of this recipe's."""
    return Plant(id, gate, row, old, new, words, recipe=RECIPE, argv=(*(SECOND if task else FIRST), *more), **others)


PLANTS = [
    bug("features-of-another-recording", "transcripts", "W6", "(envelope, heard), ids = got, self.ids[i]",
        "(envelope, heard), ids = (got[0], self.read(index - 1)[1]), self.ids[i]", ("transcribed wrongly", "not filtered"),
        harm="the student is taught other words than were said"),
    bug("exports-the-stage-before", "exported-weights", "C18", "heads.export(folder, model, teacher, cfg",
        "heads.export(folder, before, teacher, cfg", ("trained tensors differ", "weights that training began with"), task=True,
        harm="what stage two learnt is not in the files"),
    bug("silent-recordings", "transcripts", "W6", '"envelope": envelope, ',
        '"envelope": envelope if i % 3 else -13.8 * (envelope != 0), ', ("silent",),
        harm="a third of the lessons are words out of nothing"),
    bug("start-twice", "vocabulary", "W5", "self.ids = [teacher.ids(text) for text in source.texts]",
        "self.ids = [teacher.prompt[:1] + teacher.ids(text) for text in source.texts]", ("start", "twice"),
        source="DST-06 huggingface/transformers#29973", harm="the first steps of every decode are off"),
    bug("language-left-out", "vocabulary", "W5", "self.ids = [teacher.ids(text) for text in source.texts]",
        "self.ids = [ids[:1] + ids[3:] for ids in map(teacher.ids, source.texts)]", ("begins with", "multilingual"),
        more=("--data.teacher", "base"), harm="a multilingual teacher guesses the language of every sentence"),
    bug("pads-in-one-term", "loss-terms", "W2", ".square().mean(-1) * mask).sum()", ".square().mean(-1)).sum()",
        ("padding", "not masked"), source="DST-04 optipfair#34", harm="silence is learnt"),
    bug("cosine-alone", "loss-terms", "W2", '"mse": cfg.mse * ', '"mse": 0 * ', ("1.5 times as large", "cosine alone"),
        harm="the size of the features is free"),
    bug("error-alone", "loss-terms", "W2", '"cosine": cfg.cosine * ', '"cosine": 0 * ', ("wrong direction", "squared error alone"),
        harm="none that 150 steps could show"),
    bug("scale-of-a-fresh-layer", "magnitude", "W3", "nn.Parameter(std.clone())", "nn.Parameter(0.02 * std)",
        ("around the mean", "standard deviation"), harm="features in the right direction, fifty times too small"),
    bug("no-offset", "magnitude", "W3", "nn.Parameter(mean.clone())", "nn.Parameter(0 * mean)",
        ("before training", "offset for each position"), harm="centred cosine after 150 steps 0.42 instead of 0.54"),
    bug("stretched-over-the-canvas", "alignment", "W4", SPEECH,
        f"x = F.interpolate(x.mT, size=len(self.rest)).mT[:, : x.shape[1]]\n        {SPEECH}",
        ("per second of input", "from 20 to 50 frames per second"), harm="every recording is heard slower than it was spoken"),
    bug("another-speed-in-training", "alignment", "W4", GOT, FASTER, ("the augmentation changes the length of the input",),
        harm="features belong to other moments than the sound"),
    bug("transcript-shifted-twice", "head", "C4", SCORED,
        SCORED.replace("logits.", "logits[:, :-1].").replace("1:]", "2:]") + "\n        wrong = F.pad(wrong, (1, 0))",
        ("nats per token", "shifted twice"), task=True, source="DST-07 huggingface/transformers PR#46895",
        harm="the target is the token after the next"),
    bug("task-from-random-features", "collapse", "W1", PREVIOUS,
        "previous.eval_model.apply(lambda m: m.reset_parameters() if isinstance(m, (nn.Linear, nn.Conv1d)) else None)\n    " + PREVIOUS,
        ("centred cosine", "the first stage did not learn"), task=True, harm="one output for all inputs (1 of 64)"),
    bug("decoder-trains-too", "wiring", "C3", OPTIMIZER,
        OPTIMIZER.replace("optimizer(model,", "optimizer(nn.ModuleList([model, teacher.model.requires_grad_()]),"),
        ("not part of the model", "frozen teacher"), task=True, harm="the exported decoder is not the one that was trained with"),
    bug("teacher-drifts", "wiring", "C3", UPDATE,
        UPDATE + "        with torch.no_grad():\n            stage.frozen_modules[\"teacher\"].proj_out.weight.mul_(0.999)\n",
        ("frozen tensors moved", "teacher", "no optimiser steps any"), task=True, harm="the exported decoder is not the one that was trained with"),
    bug("teacher-in-train-mode", "evaluation", "C12", LOADED,
        "    teacher.model.eval = teacher.model.train  # core sets what stands beside a model to eval mode\n"
        "    teacher.model.model.decoder.dropout = 0.1\n" + LOADED, ("two evaluations", "dropout"),
        task=True, source="DST-01 neuralmagic/sparseml PR#2191", harm="targets that change from call to call", before=("overfit",),
        why="the loss is drawn anew with every mask, so eight samples do not close it"),
    bug("letters-stay-blank", "blanks", "W1", "return ctc.task(cfg, run, previous, measures)",
        "stage = ctc.task(cfg, run, previous, measures)\n        stage.model.letters.bias.data[0] = 1e3\n        return stage",
        ("100% of the frames blank", "what ctc learns first"), task=True, more=("--decoder", "ctc", "--task.lr", "2e-3"),
        before=("wiring", "dependency", "overfit", "baseline"), why="nothing but blanks has a gradient, so nothing is learnt",
        harm="every transcript is empty"),
    # The second stage's samples are dear: what its gates leave out must not be where these three show.
    bug("task-updated-twice", "schedule", "C9", UPDATE, 2 * UPDATE, ("stepped 2 times in iteration 1",), task=True),
    bug("task-loses-a-micro-batch", "accumulation", "C10", UPDATE,
        "        run.update(stage, step.batches[:1] if stage.name == \"task\" else step.batches)\n",
        ("step.batches[1:]",), task=True, harm="half of every batch is never learnt from"),
    bug("task-counts-for-itself", "resume", "C13", "    for step in run.steps(stage):\n",
        "    seen = 0\n    for step in run.steps(stage):\n        seen += stage.name == \"task\"\n        for b in step.batches:\n"
        "            b[\"envelope\"] = b[\"envelope\"] * (1 + 1e-3 * seen)\n",
        ("local variable",), task=True, harm="what grew with the steps begins anew in a resumed run"),
]  # fmt: skip
RELATIVES = [
    "letters-stay-blank",  # test_whisper has it without the command
    "language-left-out",
    "exports-the-stage-before",
    "silent-recordings", "cosine-alone", "error-alone", "no-offset", "task-from-random-features", "decoder-trains-too",
    "teacher-drifts", "teacher-in-train-mode", "transcript-shifted-twice", "scale-of-a-fresh-layer", "stretched-over-the-canvas",
    "task-updated-twice", "task-loses-a-micro-batch", "task-counts-for-itself",
]  # fmt: skip
