"""Distil a picture classifier into a smaller one through its logits (Hinton 2015), with few labels, and compare with the same
student without a teacher.

tiny  MNIST-5k, 200 of its 4,000 training images labelled; the teacher is this project's digit classifier; two CPU cores.
full  MobileNetV3 from a vision/classify run on `--data.path FOLDER` or `hub:owner/name`; an accelerator. The same code path.

The control without a teacher is its own stage, so the teacher's effect is measured. The teacher is frozen, in eval mode, and gets
the student's image at its own scale and size. The divergence is a sum over classes, times T squared, so that its gradient does
not shrink with the temperature. Theory gives the first loss.
"""

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base import seeds
from trainworthy.core.base.config import Loader, Optim, Phase, RunSettings, Train
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.distill.gates import logits as targets
from trainworthy.recipes.shared import classifier as teachers
from trainworthy.recipes.shared.reported import reported
from trainworthy.recipes.vision import classify
from trainworthy.recipes.vision.data import pictures
from trainworthy.recipes.vision.models import zoo

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of distill/logits."""

    data: pictures.Source = field(default_factory=pictures.Source)
    SEARCH_RANGES = "temperature=1:8 weight=0.3:1"
    alone: Phase = field(default_factory=Phase)
    distilled: Phase = field(default_factory=Phase)
    labelled: float = 0.05
    """Fraction of the training images with a known label; the teacher labels all of them."""
    teacher: str = "digits"
    """`digits` (trained on first use, by vision/classify), or the export folder of a vision/classify run on the same classes."""
    temperature: float = 2.0
    """Temperature that softens both distributions; above 1, unlikely classes count more."""
    weight: float = 0.9
    """Weight of the teacher's loss; the labels' loss has 1 - weight."""
    model: str = "small"
    """The student: `small` (the ResNet of vision/classify with the widths below), or any classifier of torchvision by name."""
    weights: str = "none"
    """Pretrained weights of a torchvision student: DEFAULT or a name, or `none`."""
    image_size: int = 0
    """Side in pixels of a torchvision student's input; 0: the size that its weights were trained with."""
    widths: tuple[int, ...] = (8, 16, 32)
    """Channels of each stage of the small student; multiples of 8."""
    augment: bool = True
    """As in vision/classify, on the training path only; student and teacher get the same image."""


def tiny() -> Config:
    """MNIST-5k on two CPU cores; both stages take 1,250 steps."""
    return Config(
        alone=Phase(epochs=400, eval_every=80, save_every=80),
        distilled=Phase(epochs=20, eval_every=4, save_every=4),
        train=Train(batch_size=64),
        optim=Optim(lr=1e-2, warmup=0.1, clip=5.0),
        loader=Loader(workers=1),
        run=RunSettings(threads=1),
    )


def full() -> Config:
    """A larger student on your own images, with a teacher from a run of vision/classify."""
    return Config(
        data=pictures.Source(path="hub:ethz/food101"),
        alone=Phase(epochs=100),
        distilled=Phase(epochs=20),
        labelled=0.2,
        teacher="runs/vision-classify/export",
        model="mobilenet_v3_small",
        weights="DEFAULT",
        train=Train(batch_size=256, precision="bf16"),
        optim=Optim(lr=5e-4, weight_decay=0.05, warmup=0.05),
        loader=Loader(workers=8, eval_workers=8),
    )


# ----------------------------------------------------------------------------------------------------------------- data
class Pictures(classify.Images):
    """The images of vision/classify; a sample also has whether its label is known, bool."""

    known: Tensor

    @property
    def classes(self) -> tuple[str, ...]:
        return self.fields["label"].classes

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {**super().get(index, generator), "known": self.known[index]}


def some(labels: Tensor, share: float) -> Tensor:
    """Return which labels are known, (N,) bool: a share of each class, independent of the run's seed, so that results are comparable."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        mine = (labels == label).nonzero().flatten()
        chosen[mine[seeds.permutation(len(mine), "labelled", label)][: max(1, round(share * len(mine)))]] = True
    return chosen


def read(cfg: Config) -> dict[str, Pictures]:
    """Return all splits; the test split only if the data have one."""
    images, labels, classes, learn, held_out, notes, tested = classify.read(cfg)
    fit, augment = classify.preprocessing(cfg)
    rows = {"train": learn, "val": held_out} | ({} if tested is None else {"test": tested})
    data = {name: Pictures(images[i], labels[i], classes) for name, i in rows.items()}
    for name, split in data.items():
        split.fit, split.known = fit, some(split.labels, cfg.labelled if name == "train" else 1.0)
    train_data = data["train"]
    train_data.augment = augment if cfg.augment else None
    train_data.notes = {**notes, "labelled": f"{int(train_data.known.sum()):,} of {len(learn):,} training pictures"}
    return data


# --------------------------------------------------------------------------------------------------------------- stages
def alone(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The control: the student on the labelled images, without a teacher, for the same number of steps."""
    data = read(cfg)
    train_data = data["train"]
    data["train"] = View(train_data, train_data.known.nonzero().flatten().tolist())
    data["train"].notes = train_data.notes
    return make_stage(cfg, run, "alone", data, classify.make_model(cfg, train_data, train_data.classes), weight=0.0)


def distilled(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The same student from the same start, trained on every image."""
    data = read(cfg)
    start = classify.make_model(cfg, data["train"], data["train"].classes)
    return make_stage(cfg, run, "distilled", data, start, weight=cfg.weight, control=previous)


def make_stage(cfg: Config, run: core.Run, name: str, data: dict[str, core.Data], start: zoo.Start, *, weight: float,
               control: core.Stage | None = None) -> core.Stage:  # fmt: skip
    """Build either stage; `weight` is the weight of the teacher's loss."""
    (model, started_from, fresh), val_data = start, data["val"]
    classes, temperature = val_data.classes, cfg.temperature
    teacher = teachers.chosen("--teacher", cfg.teacher, cfg.data.path, classes, 16)
    before = control and copy.deepcopy(control.eval_model)

    def soft(logits: Tensor) -> Tensor:
        """Return log-probabilities at the temperature, (B, n_classes)."""
        return (logits.float() / temperature).log_softmax(1)

    def answers(images: Tensor) -> Tensor:
        """Return the teacher's logits for (B, C, H, W) in [0, 1], which it reads in [-1, 1]."""
        return teacher.logits(images * 2 - 1)

    def taught(images: Tensor) -> Tensor:
        """The same at the temperature."""
        return soft(answers(images))

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        logits, known, terms = model(batch["image"]), batch["known"], {}
        if weight < 1:
            terms["ce"] = (1 - weight) * F.cross_entropy(logits[known], batch["label"][known], reduction="sum")
        if weight > 0:  # a sum over classes; T^2 keeps the gradient's size at any temperature
            kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)
            terms["kl"] = weight * temperature**2 * kl
        return terms

    def counts(batch: dict) -> dict[str, float]:
        return {"ce": batch["known"].sum(), "*": len(batch["known"])}

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        predicted, truth, agree = [], [], []
        for batch in run.batches(data):
            logits = model(batch["image"]).float()
            predicted.append(logits)
            truth.append(batch["label"])
            agree.append(logits.argmax(1) == answers(batch["image"]).argmax(1))
        predicted, truth, agree = (run.gather(torch.cat(part)) for part in (predicted, truth, agree))
        right = predicted.argmax(1) == truth
        return {"accuracy": right.float().mean().item(), "nll": F.cross_entropy(predicted, truth).item(),
                "agreement": agree.float().mean().item()}  # fmt: skip

    def baselines() -> dict[str, dict[str, float]]:
        majority = (val_data.labels == val_data.labels.mode().values).float().mean().item()
        found = {"majority class": {"accuracy": majority}, "the teacher": evaluate(answers, val_data)}
        if before is not None:
            found["the same student alone"] = evaluate(before.to(run.device), val_data)
        return found

    def preview(batch: dict) -> list[core.Tile]:
        probabilities = taught(batch["image"].to(run.device)).exp().cpu()
        captions = [f"{classes[y]}{'' if k else ' ?'}: {classes[p.argmax()]} {p.max():.2f}" for y, k, p in zip(
            batch["label"].tolist(), batch["known"].tolist(), probabilities, strict=True)]  # fmt: skip
        return [core.Tile(text, image) for text, image in zip(captions, batch["image"], strict=True)]

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        p = model(batch["image"]).float().softmax(1)
        right = p.gather(1, batch["label"][:, None])[:, 0].tolist()
        return [core.Tile(classes[i], score=r) for i, r in zip(p.argmax(1).tolist(), right, strict=True)]

    def export(folder: Path) -> None:
        """model.safetensors + config.json, and a program that runs without this project (torch.export)."""
        shape = tuple(val_data.get(0, None)["image"].shape)
        small = cfg.model == "small"
        config = {"architecture": "ResNet" if small else cfg.model, "classes": classes, "widths": cfg.widths if small else None,
                  "preprocessing": val_data.fit and val_data.fit.plain(), "teacher": teacher.description,
                  "input": f"float32 (B, {str(shape)[1:]} in [0, 1]; normalised inside the model"}  # fmt: skip
        core.save_export(folder, model, config, torch.zeros(2, *shape), weights=model if small else model.net)

    def first_loss(batch: dict) -> float:
        """Return the losses of uniform predictions: ln N, and T^2 (ln N - entropy of the softened teacher)."""
        if not weight:
            return math.log(len(classes))
        log_p = taught(batch["image"])
        unsure = -(log_p.exp() * log_p).sum(1).mean().item()
        return (1 - weight) * math.log(len(classes)) + weight * temperature**2 * (math.log(len(classes)) - unsure)

    def goal(batch: dict) -> float:
        """The teacher's own metrics, an upper limit for the student."""
        return (taught(batch["image"]).argmax(1) == batch["label"]).float().mean().item() if weight else 1.0

    def floor(batch: dict) -> float:
        """The lowest loss that any student has: labels that the teacher contradicts leave more than 0."""
        known, label = batch["known"], batch["label"]
        return targets.least_loss(taught(batch["image"]), label, known, weight, temperature) if weight else 0.0

    return core.Stage(
        name=name,
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data=data,
        loss=loss,
        counts=counts,
        evaluate=evaluate,
        metric=core.Metric("accuracy", "which class does the picture show?", floor=1 / len(classes), ceiling=1.0),
        frozen_modules=teacher.frozen_modules,
        expect=core.Expect(initial_loss=first_loss, loss_floor=floor, overfit_metric=goal, new_parameters=fresh, overfit_steps=200),
        pretrained=started_from,
        baselines=baselines,
        upper_bounds=("the teacher",),
        preview=preview,
        predict=predict,
        export=export,
        gates=[reported(lambda images, student_logits: {"agreement": targets.agreement(teacher, images, student_logits)}),
               *([targets.teacher(teacher), targets.divergence(teacher)] if weight else [])],
    )  # fmt: skip


STAGES = [alone, distilled]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop of either stage; the gates rehearse this very function."""
    for step in run.steps(stage):
        run.update(stage, step.batches)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)


if __name__ == "__main__":
    core.main(__file__)
