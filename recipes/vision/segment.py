"""Segment images: a class for every pixel, by a small U-Net from scratch, or a net of torchvision or the hub.

tiny  the nuclei of one real microscope image: the left two thirds for training, the right third held out; two CPU cores.
      One image of 125 nuclei has no third part: what is reported was also used to choose settings, and there is no test set.
      `--data.path digits`: real handwritten digits pasted on real photos, with void blended edges, and a test set.
full  DeepLabV3 from its COCO weights on `--data.path FOLDER` (images/, masks/, classes.txt); an accelerator. The same code path.

Loss, metric, padding and augmentation share one `IGNORE` id. One transform moves image and mask, with nearest neighbour for ids.
Losses are sums over pixels and over (image, class), never means of means. IoU per class comes from counts over the whole set.
Every held-out pixel is scored once, with its surroundings, at its image's own size. Normalisation happens once, inside the model.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import tv_tensors
from torchvision.transforms import v2
from trainworthy.core.base.config import Loader, Optim, RunSettings, Train
from trainworthy.recipes.vision.data import masks
from trainworthy.recipes.vision.data.masks import IGNORE
from trainworthy.recipes.vision.evaluation import mask_expectations, segmentation
from trainworthy.recipes.vision.gates import pictures
from trainworthy.recipes.vision.models import exporting, hub_nets, zoo

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of vision/segment."""

    data: masks.Source = field(default_factory=masks.Source)
    SEARCH_RANGES = "dice=0:2 focal=0:3"
    model: str = "small"
    """`small` (the U-Net below), a segmentation net of torchvision (deeplabv3_resnet50, fcn_resnet50, lraspp_...), or one of
    transformers by folder or owner/name (SegFormer, Mask2Former, ...)."""
    weights: str = "none"
    """Pretrained weights of such a net: DEFAULT or a name (downloaded and cached), or `none`."""
    norm: zoo.Norm = "own"
    """GroupNorm for `small`, batch norm for most others; `batch` or `group` from scratch, `frozen`: the pretrained statistics,
    fixed."""
    window: int = 64
    """Side in pixels of the net's input window; smaller images are padded with void."""
    step: int = 32
    """Maximum distance in pixels between evaluation windows; a training epoch draws one random window for each."""
    resize: int = 0
    """Resize images to this length of the shorter side, in pixels; 0: no resizing."""
    widths: tuple[int, ...] = (8, 16, 32)
    """Channels of each stage of the U-Net; every stage after the first halves the resolution."""
    fold: int = 1
    """The U-Net folds squares of this side into channels, and unfolds its output; at 2, a quarter of the computation."""
    dice: float = 1.0
    """Coefficient of the Dice loss (Milletari 2016), added to the cross-entropy; 0: none."""
    focal: float = 0.0
    """Gamma of the focal loss (Lin 2017), which gives confident pixels less weight; 0: plain cross-entropy."""
    augment: bool = True
    """Random windows and mirroring, with --scale and --upright if set. Training only."""
    scale: float = 1.0
    """Largest factor of random shrinking and enlarging, relative to --resize; 1: none."""
    upright: bool = False
    """Do not mirror vertically (streets, people); switch off where up has no meaning (cells, maps)."""


def tiny() -> Config:
    """The nuclei on two CPU cores: one thread for the net, windows cut in the same process."""
    return Config(
        train=Train(epochs=30, batch_size=16),
        optim=Optim(lr=1e-2, warmup=0.1),
        run=RunSettings(threads=1, save_every=5),
    )


def full() -> Config:
    """Fine-tune a larger net on your own images; bf16."""
    return Config(
        data=masks.Source(path="photos"),
        model="deeplabv3_resnet50",
        weights="DEFAULT",
        window=480,
        step=480,
        resize=520,
        scale=2.0,
        upright=True,
        train=Train(epochs=30, batch_size=32, precision="bf16", eval_batch_size=32),
        optim=Optim(lr=2e-4, weight_decay=0.01, warmup=0.03, layer_decay=0.9),
        loader=Loader(workers=8, eval_workers=8),
    )


# ----------------------------------------------------------------------------------------------------------------- data
def augmentation(cfg: Config) -> nn.Module:
    """Transforms of the training path, for picture and mask together: random scale, random window, random mirroring."""
    steps: list[nn.Module] = []
    if cfg.scale != 1:
        steps.append(v2.RandomResize(round(cfg.resize / cfg.scale), round(cfg.resize * cfg.scale) + 1))
    outside = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORE}
    steps += [v2.RandomCrop(cfg.window, pad_if_needed=True, fill=outside)]
    if cfg.data.path != "digits":  # a mirrored digit is not a digit
        steps += [v2.RandomHorizontalFlip()]
        steps += [] if cfg.upright else [v2.RandomVerticalFlip()]
    return v2.Compose(steps)


# ---------------------------------------------------------------------------------------------------------------- model
class Double(nn.Sequential):
    """Two 3x3 convolutions with GroupNorm (Wu & He 2018): (B, n_in, H, W) -> (B, n_out, H, W).

    Leaky: behind a plain ReLU a class can be where every feature is 0, and only a bias of the head is left to learn it."""

    def __init__(self, n_in: int, n_out: int):
        layers: list[nn.Module] = []
        for a in (n_in, n_out):
            layers += [nn.Conv2d(a, n_out, 3, 1, 1, bias=False), nn.GroupNorm(4, n_out), nn.LeakyReLU(0.1)]
        super().__init__(*layers)


class UNet(nn.Module):
    """U-Net (Ronneberger 2015): down by maxima, up by interpolation. It owns its normalisation: images come in as [0, 1]."""

    def __init__(self, mean: Tensor, std: Tensor, widths: tuple[int, ...], n_classes: int, fold: int = 1):
        super().__init__()
        self.fold = fold
        self.register_buffer("mean", mean.view(-1, 1, 1))
        self.register_buffer("std", std.view(-1, 1, 1))
        pairs = list(zip((len(mean) * fold**2, *widths), widths, strict=False))
        self.down = nn.ModuleList([Double(a, b) for a, b in pairs])
        self.up = nn.ModuleList([Double(a + b, a) for a, b in reversed(pairs[1:])])
        self.head = nn.Conv2d(widths[0], n_classes * fold**2, 1)
        nn.init.zeros_(self.head.weight)  # every class equally likely: the first loss is known, no first steps lost
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = (images - self.mean) / self.std  # (B, C, H, W)
        x, seen = F.pixel_unshuffle(x, self.fold), []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool2d(x, 2))  # (B, widths[i], H / 2^i, W / 2^i)
            seen.append(x)
        for block, fine in zip(self.up, reversed(seen[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), fine], 1))
        return F.pixel_shuffle(self.head(x), self.fold)  # (B, n_classes, H, W)


def make_model(cfg: Config, data: masks.Annotated) -> zoo.Start:
    """The net above, or another's: images (B, C, H, W) in [0, 1] -> (B, n_classes, H, W)."""
    if hub_nets.named(cfg.model):
        return hub_nets.segmenter(cfg.model, cfg.weights, data.classes, cfg.window)
    if cfg.model != "small":
        return zoo.segmenter(cfg.model, cfg.weights, len(data.classes))
    zoo.check_weights(cfg.model, cfg.weights)
    stride = cfg.fold * 2 ** (len(cfg.widths) - 1)
    if cfg.window % stride or cfg.window < 4 * stride:
        raise core.UserError("--window does not fit the U-Net", got=f"{cfg.window} pixels",
                             needed=f"a multiple of {stride}, at least {4 * stride}: it halves {len(cfg.widths) - 1} times",
                             next=f"--window {max(4, math.ceil(cfg.window / stride)) * stride}, or fewer --widths")  # fmt: skip
    some = data.learn[:100]  # training pictures alone
    pixels = torch.cat([data.pairs[i][0].double().flatten(1) for i in some], 1) / 255
    return zoo.Start(UNet(pixels.mean(1).float(), pixels.std(1).float(), cfg.widths, len(data.classes), cfg.fold))


# ---------------------------------------------------------------------------------------------------------------- stage
def segment(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    if cfg.scale != 1 and not cfg.resize:
        raise core.UserError("--scale has nothing to start from", got=f"{cfg.scale:g}", needed="--resize PIXELS")
    data = masks.load(cfg.data)
    classes, n, embedded = data.classes, len(data.classes), cfg.data.path in masks.EMBEDDED
    cut = {"window": cfg.window, "step": cfg.step, "resize": cfg.resize}
    train_data = masks.Windows(data, data.learn, **cut, augment=augmentation(cfg) if cfg.augment else None)
    val_data = masks.Windows(data, data.held_out, **cut)
    test_data = {"test": masks.Windows(data, data.test, **cut)} if data.test else {}

    model, started_from, fresh = zoo.normed(make_model(cfg, data), cfg.norm, run)

    def present(mask: Tensor) -> Tensor:
        """(B, n) pixels of each class in each window; void is none."""
        return torch.stack([(mask == c).flatten(1).sum(1) for c in range(n)], 1)

    def counts(batch: dict) -> dict[str, Tensor]:
        """Pixels that are scored; (window, class) pairs that occur."""
        pixels = present(batch["mask"])
        return {"ce": pixels.sum(), "dice": (pixels > 0).sum()}

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        logits, mask = model(batch["image"]).float(), batch["mask"]  # (B, n, H, W), (B, H, W)
        ce = F.cross_entropy(logits, mask, ignore_index=IGNORE, reduction="none")  # (B, H, W), 0 where void
        terms = {"ce": (ce * (1 - (-ce).exp()) ** cfg.focal if cfg.focal else ce).sum()}
        if cfg.dice:
            terms["dice"] = cfg.dice * dice(logits.softmax(1), mask)
        return terms

    def dice(p: Tensor, mask: Tensor) -> Tensor:
        """1 - Dice, summed over the classes that occur in each window: a window's value does not depend on the rest of the batch."""
        scored, truth = mask != IGNORE, present(mask)
        own = p.gather(1, mask.where(scored, 0)[:, None])[:, 0] * scored  # (B, H, W) probability of the true class
        both = torch.zeros_like(truth, dtype=p.dtype).scatter_add(1, mask.where(scored, 0).flatten(1), own.flatten(1))
        predicted = (p * scored[:, None]).flatten(2).sum(2)  # (B, n)
        return ((1 - 2 * both / (predicted + truth).clamp_min(1)) * (truth > 0)).sum()

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        return segmentation.scores(confusion_matrix(model, data), classes)

    def confusion_matrix(model: nn.Module, data: core.Data) -> Tensor:
        """(n, n) pixels with truth in rows, over the whole of `data`; void is in no row."""
        total = torch.zeros(n, n, dtype=torch.long, device=run.device)
        for batch in run.batches(data):
            total += segmentation.scored(batch, model(batch["image"]), n)
        return run.gather(total[None]).sum(0)

    def constant(c: int) -> Tensor:
        """The confusion matrix of predicting class `c` everywhere in the held-out pictures."""
        return F.one_hot(torch.tensor(c), n) * data.pixels[data.held_out].sum(0)[:n, None]

    def baselines() -> dict[str, dict[str, float]]:
        most = int(data.pixels[data.learn].sum(0)[:n].argmax())
        known = {"most frequent class everywhere": segmentation.scores(constant(most), classes)}
        return known | segmentation.baselines(data) if embedded else known

    def preview(batch: dict) -> list[core.Tile]:
        tiles = []
        for image, mask, pixels in zip(batch["image"], batch["mask"], present(batch["mask"]), strict=True):
            most = [f"{classes[c]} {pixels[c] / pixels.sum():.0%}" for c in pixels.topk(min(3, n)).indices if pixels[c]]
            tiles.append(core.Tile(", ".join(most) or "all void", segmentation.side_by_side(image, mask)))
        return tiles

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        answer, mask = model(batch["image"]).argmax(1), batch["mask"]
        right = (((answer == mask) & (mask != IGNORE)).flatten(1).sum(1) / present(mask).sum(1).clamp_min(1)).tolist()
        rows = zip(right, batch["image"], mask, answer, strict=True)
        return [core.Tile(f"{r:.1%} right", segmentation.side_by_side(x, y, a), score=r) for r, x, y, a in rows]

    def figures(model: nn.Module, data: core.Data) -> dict:
        confusion = confusion_matrix(model, data)
        matrix = core.Matrix(confusion, rows=classes, columns=classes, axes=("truth", "prediction"))
        whole = segmentation.stitched(data, lambda images: model(images.to(run.device)).argmax(1).cpu())
        return {"Held-out pictures: picture, truth, prediction": whole, "Confusion matrix, in pixels": matrix,
                "Each class, in percent of its pixels": segmentation.table(confusion, classes)}  # fmt: skip

    def export(folder: Path) -> None:
        """model.safetensors + config.json, and a program that runs without this project (torch.export), for pictures of any size."""
        shape = tuple(val_data.get(0, None)["image"].shape)
        config = {"classes": classes, "ignore_index": IGNORE, "norm": cfg.norm, "shape": shape, **cut}
        config["input"] = f"float32 (B, {str(shape)[1:]} in [0, 1]; normalised inside the model"
        if cfg.model == "small":
            config |= {"architecture": "UNet", "widths": cfg.widths, "fold": cfg.fold}
            core.save_export(folder, model, config, torch.zeros(2, *shape), any_size=(2, 3))
        else:  # their own names: models.get_model(architecture, num_classes=...), or from_pretrained, loads it
            config |= exporting.library(model, cfg.model, n)
            sides = () if hub_nets.named(cfg.model) else (2, 3)  # some of the hub's have positions for one size
            core.save_export(folder, model, config, torch.zeros(2, *shape), weights=model.net, any_size=sides)

    # Pixels around an outline that a net cannot know; hub nets predict at 1/4 or 1/8 of the resolution.
    reach = cfg.fold if cfg.model == "small" else 4
    of_terms = {"focal": cfg.focal, "dice": cfg.dice}
    expect = core.Expect(
        initial_loss=lambda b: mask_expectations.answered(
            b["mask"], mask_expectations.unsure(b["mask"], n), n, **of_terms
        ),
        loss_floor=lambda b: mask_expectations.answered(
            b["mask"], mask_expectations.sure_inside(b["mask"], reach), n, **of_terms
        ),
        overfit_metric=lambda b: mask_expectations.close(b["mask"], n, reach)[int(n == 2) :].nanmean().item(),
        overfit_steps=120 if n == 2 else 300,
        new_parameters=fresh,
        frozen=tuple(k for k, p in model.named_parameters() if not p.requires_grad),
    )
    name = "iou" if n == 2 else "miou"
    question = masks.QUESTIONS.get(cfg.data.path, f"which of {n} classes does each pixel belong to?")
    floor = max(segmentation.scores(constant(c), classes)[name] for c in range(n))
    return core.Stage(
        name="segment",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data={"train": train_data, "val": val_data, **test_data},
        loss=loss,
        counts=counts,
        evaluate=evaluate,
        metric=core.Metric(name, question, floor=floor, ceiling=1.0),
        expect=expect,
        pretrained=started_from,
        baselines=baselines,
        preview=preview,
        predict=predict,
        figures=figures,
        export=export,
        model_card=exporting.card("segment", cfg),
        confusion=confusion_matrix,
        exported=exporting.of_masks(run, classes, name),
        gates=pictures.SEGMENTING,
        monitors=[pictures.forgotten],
    )  # fmt: skip


STAGES = [segment]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop; the gates rehearse this very function."""
    for step in run.steps(stage):
        run.update(stage, step.batches)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)


if __name__ == "__main__":
    core.main(__file__)
