"""Bugs of distillation through logits, planted in a fork of distill/logits; the words were fixed before the gates were run."""

from tests.helpers.plant import Plant

LOGITS, SECOND = "distill/logits", ("--stage", "distilled")
TAUGHT = "return soft(answers(images))\n"
APART = 'kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)\n'
ASKED = 'logits, known, terms = model(batch["image"]), batch["known"], {}\n'
SAVED = "core.save_export(folder, model, config, torch.zeros(2, *shape), weights=model if small else model.net)\n"
OPTIMIZER = 'optimizers={"main": core.make_optimizer(model, cfg.optim)},\n'


def bug(id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], **more: str) -> Plant:
    """One of this recipe's second stage."""
    return Plant(id, gate, row, old, new, words, recipe=LOGITS, argv=SECOND, **more)


PLANTS = [
    Plant("student-switched-with-its-teacher", "evaluation", "C12", ASKED,
          "model.eval()  # a body that both stand on\n        " + ASKED,
          ("eval mode",), recipe=LOGITS, source="DST-02 huggingface/trl PR#5862", harm="the student learns without its dropout"),
    bug("mean-over-classes", "divergence", "C1", APART,
        APART.replace('reduction="sum"', 'reduction="mean"').replace("log_target=True)", "log_target=True) * len(logits)"),
        ("kl: it is a mean over classes",), source="DST-03 LD#74", harm="the teacher has a tenth of its weight"),
    bug("temperature-not-squared", "divergence", "C1", "weight * temperature**2 * kl\n", "weight * kl\n",
        ("kl: T^2 is missing",), harm="the teacher has a quarter of its weight, less at higher temperatures"),
    bug("labels-softened", "divergence", "C1", "F.cross_entropy(logits[known], ", "F.cross_entropy(logits[known] / temperature, ",
        ("ce: the scores are softened",), harm="the labels' term is flatter; the first loss is the same"),
    bug("teacher-softened-twice", "divergence", "C1", "return teacher.logits(images * 2 - 1)\n",
        "return teacher.logits(images * 2 - 1).softmax(1)\n", ("teacher's probabilities go through a second softmax",),
        before=("tiny-data",), why="nearly equal targets teach little", source="the tenth set from outside",
        harm="targets between 0.09 and 0.15 for every class"),
    bug("teacher-in-the-students-scale", "teacher", "V1", TAUGHT, "return soft(teacher.logits(images))\n",
        ("normalisation", "scale"),
        source="DST-05 Deci-AI/super-gradients PR#183", harm="targets of a half-blind teacher"),
    bug("teacher-wavers", "teacher", "C12", TAUGHT, "return soft(F.dropout(answers(images), 0.1))\n",
        ("train mode", "dropout"), source="DST-01 neuralmagic/sparseml PR#2191", harm="targets that change from call to call"),
    bug("teacher-sees-another-picture", "teacher", "V1", APART, APART.replace('batch["image"]', 'batch["image"].roll(1, 0)'),
        ("different pictures",), harm="every picture is taught its neighbour's class"),
    bug("agreement-inverted", "reported", "C12", "agree.append(logits.argmax(1) == answers", "agree.append(logits.argmax(1) != answers",
        ("1 minus its definition",), source="a mutant", harm="the share of disagreement is reported as agreement"),
    bug("nll-of-a-second-softmax", "reported", "C12", '"nll": F.cross_entropy(predicted, truth).item()',
        '"nll": F.cross_entropy(predicted.softmax(1), truth).item()', ("nll is",), harm="the number beside the accuracy is not what it is called"),
    bug("exports-a-new-net", "exported-weights", "C18", SAVED,
        "net = classify.make_model(cfg, data['train'], classes)[0]\n        "
        + SAVED.replace("model", "net"),
        ("trained tensors differ", "built anew"), harm="0.1 where 0.9 was reported"),
    bug("teacher-trains-too", "wiring", "C3", OPTIMIZER,
        OPTIMIZER.replace("(model,", "(nn.ModuleList([model, teacher.body.requires_grad_()]),"), ("not part of the model",),
        harm="the teacher follows its student"),
]  # fmt: skip
RELATIVES = [
    "agreement-inverted",  # its stage needs a trained teacher: 78 s
    "nll-of-a-second-softmax",
    "mean-over-classes",
    "temperature-not-squared",
    "teacher-in-the-students-scale",
    "teacher-wavers",
    "teacher-sees-another-picture",
    "teacher-trains-too",
    "student-switched-with-its-teacher",
    "labels-softened",
    "teacher-softened-twice",
    "exports-a-new-net",
]
