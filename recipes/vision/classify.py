"""Classify images: a small GroupNorm ResNet from scratch, or a classifier of torchvision, transformers or timm on your own images.

tiny  real handwritten digits (MNIST-5k: 4,000 for training, 1,000 to validate; 1,000 of MNIST's test set), two CPU cores, a minute.
full  ResNet-50 from its ImageNet weights on `--data.path FOLDER` or `hub:owner/name`; an accelerator. The same code path.

This recipe normalises once, inside the model, with statistics of the training images. It augments on the training path only. The
output layer starts at equal scores (loss ln N). GroupNorm makes a prediction independent of the other samples in the batch.
Recall per class is reported next to accuracy, so that a class that is never predicted is visible.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import v2
from trainworthy.core.base.config import Loader, Optim, RunSettings, Train
from trainworthy.recipes.shared import digits, further_digits, reported
from trainworthy.recipes.vision.data import balancing, mixing, pictures
from trainworthy.recipes.vision.gates import objective, smoothing
from trainworthy.recipes.vision.gates import pictures as gates
from trainworthy.recipes.vision.models import exporting, hub_nets, zoo

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of vision/classify."""

    data: pictures.Source = field(default_factory=pictures.Source)
    SEARCH_RANGES = "label_smoothing=0:0.2 mix.mixup=0:0.4 mix.cutmix=0:1"
    mix: mixing.Mix = field(default_factory=mixing.Mix)
    balance: balancing.Balance = field(default_factory=balancing.Balance)
    model: str = "small"
    """`small` (the net below), any classifier of torchvision by name (resnet50, vit_b_16, convnext_tiny, ...), or one of transformers or
    timm (with the package timm): a folder that `from_pretrained` reads, or `owner/name` on the hub."""
    weights: str = "none"
    """Pretrained weights: DEFAULT (of a torchvision net also a name; downloaded and cached), or `none`."""
    norm: zoo.Norm = "own"
    """GroupNorm for `small`, batch norm for most others; `batch` or `group` from scratch, `frozen`: fixed pretrained statistics."""
    image_size: int = 0
    """Side in pixels of the net's input; 0: the size that the weights were trained with (small: 64; the digits have 28)."""
    ema: float = 0.0
    """Decay of an EMA of the weights that is evaluated and exported (about 0.999); 0: none."""
    widths: tuple[int, ...] = (16, 32, 64)
    """Channels of each stage of the net; every stage after the first halves the resolution."""
    label_smoothing: float = 0.1
    """Fraction of the target spread over all classes (Szegedy 2016). The gates account for its loss floor."""
    augment: bool = True
    """Digits: random rotation, shift, scale and shear; other images: random crop, flip and TrivialAugment. Training only."""


def tiny() -> Config:
    """MNIST-5k on two CPU cores: one thread for the net, one worker for the images."""
    return Config(train=Train(epochs=30, batch_size=64), optim=Optim(lr=3e-3, warmup=0.1), loader=Loader(workers=1),
                  run=RunSettings(threads=1, save_every=5))  # fmt: skip


def full() -> Config:
    """Fine-tune a larger net on your own images, with bf16 and the usual regularisation. No early stopping."""
    return Config(
        data=pictures.Source(path="hub:ethz/food101"),
        mix=mixing.Mix(mixup=0.2, cutmix=1.0),
        model="resnet50",
        weights="DEFAULT",
        ema=0.999,
        train=Train(epochs=20, batch_size=256, precision="bf16"),
        optim=Optim(lr=5e-4, weight_decay=0.05, warmup=0.05, layer_decay=0.75),
        loader=Loader(workers=8, eval_workers=8),
    )


# ----------------------------------------------------------------------------------------------------------------- data
def read(cfg: Config) -> pictures.Labelled:
    """Every picture with its label, and which of them to learn from."""
    if cfg.data.path != "digits":
        return pictures.load(cfg.data)
    images, labels = digits.load()
    learn, held_out = digits.split(labels)
    images, labels, test = further_digits.appended(images, labels)
    return pictures.Labelled(images, labels, digits.CLASSES, learn, held_out, test=test)


def preprocessing(cfg: Config) -> tuple[zoo.Preprocessing | None, nn.Module]:
    """How pictures are fitted to the net (None: they are taken as they are), and the augmentation of the training path."""
    if cfg.data.path == "digits" and cfg.model == "small":
        return None, v2.RandomAffine(12, translate=(0.1, 0.1), scale=(0.85, 1.15), shear=10,
                                     interpolation=v2.InterpolationMode.BILINEAR)  # fmt: skip
    fit = (hub_nets if hub_nets.named(cfg.model) else zoo).preprocessing(cfg.model, cfg.weights, cfg.image_size)
    return fit, fit.augmented()


class Images(core.Data):
    """Images (N, C, H, W) of 0-255 with labels (N,): augmented on the training path, fitted to the net on the other."""

    fit: zoo.Preprocessing | None = None

    def __init__(self, images: Tensor | pictures.Pictures, labels: Tensor, classes: tuple[str, ...],
                 augment: nn.Module | None = None):  # fmt: skip
        self.images, self.labels, self.augment = images, labels, augment
        self.fields = {"image": core.Field("input", low=0.0, high=1.0), "label": core.Field("target", classes=classes)}

    def __len__(self) -> int:
        return len(self.labels)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        image = self.images[index].float() / 255
        if generator is not None and self.augment is not None:
            image = self.augment(image)  # torchvision draws from torch's global generator, which is seeded per sample
        elif self.fit is not None:
            image = self.fit(image)
        return {"image": image, "label": self.labels[index]}

    def identity(self, index: int) -> str | None:
        return self.images.digest(index) if isinstance(self.images, pictures.Pictures) else None

    def source_class(self, index: int) -> str | None:
        return self.images.class_of(index) if isinstance(self.images, pictures.Pictures) else None

    def source_name(self, index: int) -> str | None:
        return self.images.name(index) if isinstance(self.images, pictures.Pictures) else None

    def peek(self, index: int, key: str):
        return self.labels[index] if key == "label" else super().peek(index, key)  # a label costs no decoding


# ---------------------------------------------------------------------------------------------------------------- model
class Block(nn.Module):
    """Basic residual block (He 2016) with GroupNorm (Wu & He 2018): (B, n_in, H, W) -> (B, n_out, H/stride, W/stride)."""

    def __init__(self, n_in: int, n_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, n_out)
        same = stride == 1 and n_in == n_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(n_in, n_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(h)))


class ResNet(nn.Module):
    """Stride-2 stem, one block per width, global average pooling. It owns its normalisation: images come in as [0, 1]."""

    def __init__(self, mean: Tensor, std: Tensor, widths: tuple[int, ...], n_classes: int):
        super().__init__()
        self.register_buffer("mean", mean.view(-1, 1, 1))
        self.register_buffer("std", std.view(-1, 1, 1))
        self.stem = nn.Conv2d(len(mean), widths[0], 5, 2, 2, bias=False)
        self.norm = nn.GroupNorm(8, widths[0])
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.Sequential(*[Block(a, b, stride=1 if i == 0 else 2) for i, (a, b) in enumerate(pairs)])
        self.head = nn.Linear(widths[-1], n_classes)
        nn.init.zeros_(self.head.weight)  # every class equally likely: the first loss is ln N, no first steps lost
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = (images - self.mean) / self.std  # (B, C, H, W)
        x = self.blocks(F.relu(self.norm(self.stem(x))))  # (B, widths[-1], h, w)
        return self.head(x.mean((2, 3)))  # (B, n_classes)


def make_model(cfg: Config, train_data: Images, classes: tuple[str, ...]) -> zoo.Start:
    """The net above, or another's: images (B, C, H, W) in [0, 1] -> (B, n_classes)."""
    if hub_nets.named(cfg.model):
        return hub_nets.classifier(cfg.model, cfg.weights, classes, train_data.fit)
    if cfg.model != "small":
        return zoo.build(cfg.model, cfg.weights, len(classes), train_data.fit)
    zoo.check_weights(cfg.model, cfg.weights)
    if train_data.fit is not None:
        mean, std = torch.tensor(train_data.fit.mean), torch.tensor(train_data.fit.std)
    else:
        pixels = train_data.images.double() / 255  # statistics from the training images alone
        mean, std = pixels.mean((0, 2, 3)).float(), pixels.std((0, 2, 3)).float()
    model = ResNet(mean, std, cfg.widths, len(classes))
    return zoo.Start(model)


# ---------------------------------------------------------------------------------------------------------------- stage
def classify(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    images, labels, classes, learn, held_out, notes, tested = balancing.thinned(read(cfg), cfg.balance.ratio)
    embedded, n, eps = cfg.data.path == "digits", len(classes), balancing.smoothing(cfg)
    fit, augment = preprocessing(cfg)
    if cfg.data.through:
        augment = pictures.through(augment, cfg.data.through, images.shape[-1])
    train_data = Images(images[learn], labels[learn], classes, augment if cfg.augment else None)
    val_data = Images(images[held_out], labels[held_out], classes)
    train_data.fit, val_data.fit, train_data.notes = fit, fit, notes
    if cfg.data.streaming:  # near neighbours lie in one row group: shuffled together, mixed together
        train_data.order, val_data.order = train_data.images.order, val_data.images.order

    test_data = {} if tested is None else {"test": Images(images[tested], labels[tested], classes)}
    for part in test_data.values():  # evaluated once, at the end: no setting is chosen on it
        part.fit = fit

    balanced = balancing.build(cfg.balance, labels[learn], n, eps, mixed=cfg.mix.on)
    model, started_from, fresh = zoo.normed(make_model(cfg, train_data, classes), cfg.norm, run)
    ema = core.Ema(model, cfg.ema) if cfg.ema else None

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        logits = model(batch["image"])
        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}

    def mixed_loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        """The same where pictures are mixed: the target is spread over both classes as the picture is."""
        logits, target = model(batch["image"]), mixing.soft(batch, n)  # (B, n_classes) both
        return {"ce": F.cross_entropy(logits, target, label_smoothing=cfg.label_smoothing, reduction="sum")}

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        table, nll = confusion_matrix(model, data)
        recall = table.diag() / table.sum(1).clamp_min(1)
        seen = table.sum(1) > 0
        return {
            "accuracy": (table.diag().sum() / table.sum()).item(),
            "macro_recall": recall[seen].mean().item(),
            "nll": nll,
            **{f"recall/{c}": recall[i].item() for i, c in enumerate(classes) if seen[i]},
        }

    def confusion_matrix(model: nn.Module, data: core.Data) -> tuple[Tensor, float]:
        """((n_classes, n_classes) counts with truth in rows, mean negative log-likelihood in nats)."""
        logits, truth = [], []
        for batch in run.batches(data):
            logits.append(model(batch["image"]).float())
            truth.append(batch["label"])
        logits, truth = run.gather(torch.cat(logits)), run.gather(torch.cat(truth))
        counts = torch.bincount(truth * n + logits.argmax(1), minlength=n * n).view(n, n).cpu().double()
        return counts, F.cross_entropy(logits, truth).item()

    def baselines() -> dict[str, dict[str, float]]:
        majority = (labels[held_out] == labels[learn].mode().values).float().mean().item()
        if not embedded:
            return {"majority class": {"accuracy": majority}}
        distances = torch.cdist(images[held_out].flatten(1).float(), images[learn].flatten(1).float())
        nearest = (labels[learn][distances.argmin(1)] == labels[held_out]).float().mean().item()
        return {"majority class": {"accuracy": majority}, "nearest neighbour on pixels": {"accuracy": nearest}}

    def preview(batch: dict) -> list[core.Tile]:
        return [core.Tile(classes[y], x) for x, y in zip(batch["image"], batch["label"].tolist(), strict=True)]

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        p = model(batch["image"]).float().softmax(1)
        right = p.gather(1, batch["label"][:, None])[:, 0].tolist()
        return [core.Tile(classes[i], score=r) for i, r in zip(p.argmax(1).tolist(), right, strict=True)]

    def confusion(model: nn.Module, data: core.Data) -> Tensor:
        return confusion_matrix(model, data)[0]

    def figures(model: nn.Module, data: core.Data) -> dict:
        matrix = core.Matrix(confusion(model, data).long(), rows=classes, columns=classes, axes=("truth", "prediction"))
        return {"Confusion matrix": matrix}

    def export(folder: Path) -> None:
        """model.safetensors + config.json, and a program that runs without this project (torch.export)."""
        net, shape = ema.model if ema else model, tuple(val_data.get(0, None)["image"].shape)
        config = {"classes": classes, "preprocessing": fit and fit.plain(), "shape": shape}
        config |= {"norm": cfg.norm, "input": f"float32 (B, {str(shape)[1:]} in [0, 1]; normalised inside the model"}
        if cfg.model == "small":
            core.save_export(folder, net, config | {"architecture": "ResNet", "widths": cfg.widths}, torch.zeros(2, *shape))  # fmt: skip
        else:  # their own names: models.get_model(architecture, num_classes=...), or from_pretrained, loads it
            config |= exporting.library(model, cfg.model, n)
            exporting.write(folder, net, config, torch.zeros(2, *shape))

    expect = core.Expect(initial_loss=balanced.first_loss, loss_floor=balanced.floor, new_parameters=fresh)
    train_data = balancing.repeated(cfg.balance, train_data, labels[learn])
    if cfg.mix.on:  # every draw is made in the sample, so the floor is that of this batch
        near = train_data.images.near if cfg.data.streaming else None
        train_data, val_data = mixing.Mixed(train_data, cfg.mix, near), mixing.Mixed(val_data, cfg.mix)
        expect.loss_floor, expect.overfit_metric = (lambda batch: mixing.floor(batch, n, eps)), mixing.sure
    question = "which digit was written?" if embedded else "which class does the picture show?"
    best_known = "about 99.8% with all 60,000 training images of MNIST" if embedded else ""
    return core.Stage(
        name="classify",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data={"train": train_data, "val": val_data, **test_data},
        loss=balanced.loss or (mixed_loss if cfg.mix.on else loss),
        counts=balanced.counts,
        evaluate=evaluate,
        metric=core.Metric("accuracy", question, floor=1 / n, ceiling=1.0, best_known=best_known),
        ema_model=ema.model if ema else None,
        state={"ema": ema} if ema else {},
        expect=expect,
        pretrained=started_from,
        baselines=baselines,
        preview=preview,
        predict=predict,
        figures=figures,
        export=export,
        model_card=exporting.card("classify", cfg),
        confusion=confusion,
        exported=exporting.of_classes(run),
        gates=[gates.scale, *[gates.balance] * (cfg.balance.by in ("weights", "sampler")), objective.CLASSIFY, smoothing.check, reported.reported()],
        monitors=[gates.forgotten_class(balanced.uneven)],
    )  # fmt: skip


STAGES = [classify]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop; the gates rehearse this very function."""
    for step in run.steps(stage):
        run.update(stage, step.batches)
        if cfg.ema:
            stage.state["ema"].update(stage.model)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)


if __name__ == "__main__":
    core.main(__file__)
