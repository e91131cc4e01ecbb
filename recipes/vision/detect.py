"""Find objects: torchvision's FCOS, RetinaNet or Faster R-CNN, on a small backbone from scratch or from COCO weights.

tiny  real handwritten digits pasted on real photos, exact boxes; other digits and other photos held out; two CPU cores.
full  FCOS on ResNet-50 from its COCO weights on `--data.path FOLDER` (COCO's JSON, its images); an accelerator. Same code.

Boxes are xyxy in pixels everywhere after reading. One transform moves image and boxes. Average precision is computed in the
original image's pixels. Each loss term is a sum with its own denominator, counted before the forward. Anchors, if any, are fitted
to the boxes. Normalisation happens once, inside the model.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torchvision.transforms import v2
from trainworthy.core.base.config import Loader, Optim, RunSettings, Train
from trainworthy.core.base.doubles import to_double
from trainworthy.recipes.vision.classify import Block
from trainworthy.recipes.vision.data import boxes
from trainworthy.recipes.vision.evaluation import detection
from trainworthy.recipes.vision.gates import detect as detect_gates
from trainworthy.recipes.vision.gates import pictures
from trainworthy.recipes.vision.models import detectors, exporting, zoo

from trainworthy import core

IMAGENET = (0.485, 0.456, 0.406)  # mean colour that torchvision's nets are normalised by
SURE = 0.3  # score of the boxes that the pictures of the report show


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of vision/detect."""

    data: boxes.Source = field(default_factory=boxes.Source)
    SEARCH_RANGES = "nms_thresh=0.4:0.7"
    model: Literal["fcos", "retinanet", "faster-rcnn"] = "fcos"
    """FCOS (no anchors), RetinaNet (anchors, one stage) or Faster R-CNN (anchors, two stages)."""
    backbone: str = "small"
    """`small` (the one below), or torchvision's for this model: resnet50_fpn, resnet50_fpn_v2, mobilenet_v3_large_fpn, ..."""
    weights: str = "none"
    """Pretrained weights of a torchvision net: DEFAULT or a name (downloaded and cached), or `none`."""
    image_size: int = 96
    """Side in pixels of the net's square input. An image's longer side fills it, or is smaller with --min-size."""
    min_size: int = 0
    """Length in pixels of an image's shorter side, if the longer one fits into the square (800 in torchvision's transform, with
    which COCO weights were trained); 0: the longer side fills the square."""
    widths: tuple[int, ...] = (32, 64, 64)
    """Channels of each stage of the small backbone; each halves the resolution."""
    anchors: int = 4
    """Anchors at every location of the small RetinaNet and Faster R-CNN, fitted to the training boxes (k-means)."""
    score_thresh: float | None = None
    """Minimum score of a box; unset: torchvision's default, 0.2 for FCOS, 0.05 for RetinaNet and Faster R-CNN."""
    nms_thresh: float = 0.6
    """IoU above which NMS drops the lower-scored of two boxes of one class."""
    detections_per_img: int = 100
    """Maximum number of boxes per image; COCO scores 100."""
    augment: bool = True
    """Random brightness, contrast and colours, with --hflip and --crop if set. Training only."""
    hflip: bool = False
    """Mirror half of the images horizontally; unsuitable for digits."""
    crop: bool = False
    """Random crops that keep some objects, and images shrunk into a larger frame (SSD; Liu 2016)."""


def tiny() -> Config:
    """Digits on photos on two CPU cores: one thread for the net, pictures drawn in the same process."""
    return Config(
        train=Train(epochs=4, batch_size=16, eval_batch_size=50),
        optim=Optim(lr=3e-3, weight_decay=0.01, warmup=0.1),
        run=RunSettings(threads=1),
    )


def full() -> Config:
    """Fine-tune from COCO weights on your own images; bf16."""
    return Config(
        data=boxes.Source(path="coco"),
        backbone="resnet50_fpn",
        weights="DEFAULT",
        image_size=1344,
        min_size=800,
        hflip=True,
        crop=True,
        train=Train(epochs=12, batch_size=16, precision="bf16", eval_batch_size=16),
        optim=Optim(lr=1e-4, weight_decay=0.01, warmup=0.03),
        loader=Loader(workers=8, eval_workers=8),
    )


# ----------------------------------------------------------------------------------------------------------------- data
def augmentation(cfg: Config) -> nn.Module:
    """The training path, over picture, boxes and labels alike."""
    steps: list[nn.Module] = [v2.RandomPhotometricDistort()]
    if cfg.crop:
        # The frame is grey, about as bright as the pictures. With a black one, inputs would have another scale than in the evaluation.
        steps += [v2.RandomZoomOut(fill=0.45, side_range=(1.0, 2.0)), v2.RandomIoUCrop()]
    if cfg.hflip:
        steps.append(v2.RandomHorizontalFlip())
    # A crop may leave nothing of a box. Then box and label are removed together.
    return v2.Compose([*steps, v2.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[2])])


# ---------------------------------------------------------------------------------------------------------------- model
class Backbone(nn.Sequential):
    """A stem and a block per width, each of stride 2, and one more block: (B, 3, S, S) -> (B, C, S/8, S/8) with three widths."""

    def __init__(self, widths: tuple[int, ...]):
        pairs = pairwise(widths)
        stem = [nn.Conv2d(3, widths[0], 5, 2, 2, bias=False), nn.GroupNorm(8, widths[0]), nn.ReLU()]
        super().__init__(*stem, *[Block(a, b, stride=2) for a, b in pairs], Block(widths[-1], widths[-1], stride=1))
        self.out_channels = widths[-1]


def limits(cfg: Config) -> dict[str, float]:
    """Which boxes are kept, by torchvision's names."""
    return {"score_thresh": cfg.score_thresh, "nms_thresh": cfg.nms_thresh,
            "detections_per_img": cfg.detections_per_img}  # fmt: skip


def make_model(cfg: Config, data: boxes.Annotated) -> zoo.Start:
    """One of the three on the backbone above, or torchvision's own: a detectors.Detector."""
    stride = 2 ** len(cfg.widths) if cfg.backbone == "small" else 32
    if cfg.image_size % stride or cfg.image_size < 4 * stride:
        raise core.UserError("--image-size does not fit the net's strides", got=f"{cfg.image_size} pixels",
                             needed=f"a multiple of {stride}, at least {4 * stride}",
                             next=f"--image-size {max(4, -(-cfg.image_size // stride)) * stride}")  # fmt: skip
    if cfg.backbone != "small":
        return zoo.detector(cfg.model, cfg.backbone, cfg.weights, len(data.classes), limits(cfg))
    some = data.learn[:100]  # training pictures alone
    pixels = torch.cat([data.pictures[i].double().flatten(1) for i in some], 1) / 255
    to = [boxes.ratio(data.sizes[i], cfg.image_size, cfg.min_size) for i in data.learn]
    seen = torch.cat([data.boxes[i] * s for i, s in zip(data.learn, to, strict=True)])
    net = detectors.small(cfg.model, Backbone(cfg.widths), len(data.classes), detectors.fit(seen, cfg.anchors), stride=stride,
                          limits=limits(cfg))  # fmt: skip
    kind = detectors.KINDS[cfg.model]
    return zoo.Start(kind(net, pixels.mean(1).tolist(), pixels.std(1).tolist()))


# ---------------------------------------------------------------------------------------------------------------- stage
def detect(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    cfg = replace(cfg, score_thresh=detectors.MIN_SCORES[cfg.model] if cfg.score_thresh is None else cfg.score_thresh)
    data = boxes.load(cfg.data)
    classes, embedded = data.classes, cfg.data.path == "digits"
    train_data = boxes.Boxed(data, data.learn, side=cfg.image_size, augment=augmentation(cfg) if cfg.augment else None)
    val_data = boxes.Boxed(data, data.held_out, side=cfg.image_size)
    test_data = {"test": boxes.Boxed(data, data.test, side=cfg.image_size)} if data.test else {}
    for part in (train_data, val_data, *test_data.values()):
        # Torchvision's nets were trained with zeros after the normalisation, the mean colour, around a picture.
        part.shorter, part.fill = cfg.min_size, () if cfg.backbone == "small" else IMAGENET
    model, started_from, fresh = make_model(cfg, data)

    def counts(batch: dict) -> dict[str, float | Tensor]:
        """Locations inside objects for FCOS, pictures for the others."""
        return {"*": model.counts(batch["image"].shape, boxes.targets(batch))}

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        return model(batch["image"], boxes.targets(batch))

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        found, truth = answers(model, data)
        return detection.scores(found, truth, len(data), classes)

    def answers(model: nn.Module, data: core.Data) -> tuple[Tensor, Tensor]:
        """((N, 7) picture, label, score, box of all that was found; (M, 6) picture, label, box of all there is), own pixels."""
        found, truth, i = [torch.zeros(0, 7)], [torch.zeros(0, 6)], run.rank * len(data) // run.world
        for batch in run.batches(data):
            for j, predicted in enumerate(model(batch["image"])):
                own = boxes.to_own(predicted["boxes"], batch["scale"][j], batch["size"][j])
                here = lambda n, i=i: torch.full((n, 1), float(i))  # noqa: E731
                labelled = torch.cat([predicted["labels"][:, None], predicted["scores"][:, None], own], 1).cpu()
                found.append(torch.cat([here(len(own)), labelled], 1))
                real = batch["labels"][j] >= 0
                there = torch.cat([batch["labels"][j][real, None], batch["truth"][j][real]], 1).cpu()
                truth.append(torch.cat([here(len(there)), there], 1))
                i += 1
        gather = lambda rows: run.gather(to_double(torch.cat(rows))).cpu()  # noqa: E731
        return gather(found).float(), gather(truth).float()

    def baselines() -> dict[str, dict[str, float]]:
        truth = detection.listed(data, data.held_out)
        known = {"nothing found": detection.scores(torch.zeros(0, 7), truth, len(val_data), classes)}
        if not embedded:
            return known
        return {**known, "vivid pixels, read by logistic regression": detection.baseline(data)}

    def names(labels: Tensor) -> str:
        class_names = [classes[c] for c in labels.tolist()]
        return ", ".join(class_names[:6]) + (", ..." if len(class_names) > 6 else "") if class_names else "nothing"

    def preview(batch: dict) -> list[core.Tile]:
        seen = zip(batch["image"], batch["boxes"], batch["labels"], strict=True)
        return [core.Tile(names(y[y >= 0]), detection.drawn(x, b[y >= 0], y[y >= 0])) for x, b, y in seen]

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        tiles = []
        for x, b, y, predicted in zip(
            batch["image"], batch["boxes"], batch["labels"], model(batch["image"]), strict=True
        ):
            got = {k: v[predicted["scores"] >= SURE] for k, v in predicted.items()}
            share = detection.overlap_share(*(torch.cat([i[:, None], j], 1) for i, j in
                                          ((got["labels"], got["boxes"]), (y[y >= 0], b[y >= 0]))))  # fmt: skip
            tiles.append(core.Tile(names(got["labels"]), detection.drawn(x, got["boxes"], got["labels"]), score=share))
        return tiles

    def figures(model: nn.Module, data: core.Data) -> dict:
        batch = data.collate([data.get(i, None) for i in range(min(6, len(data)))])
        images, tiles = batch["image"].to(run.device), []
        with detectors.without_nms(model):
            before = model(images)
        for x, b, y, all_, kept in zip(
            batch["image"], batch["boxes"], batch["labels"], before, model(images), strict=True
        ):
            sets = {"objects": {"boxes": b[y >= 0], "labels": y[y >= 0]}, "boxes before NMS": all_, "boxes after": kept}
            for what, objects in sets.items():
                caption = f"{len(objects['labels'])} {what}"
                tiles.append(core.Tile(caption, detection.drawn(x, objects["boxes"], objects["labels"])))
        return {"Held-out pictures: truth, boxes before and after NMS": tiles}

    def export(folder: Path) -> None:
        """model.safetensors, config.json, and a program that runs without this project (torch.export)."""
        config = {"classes": classes, "architecture": cfg.model, "backbone": cfg.backbone, "image_size": cfg.image_size,
                  "background_first": bool(model.background), "nms_thresh": cfg.nms_thresh, "score_thresh": cfg.score_thresh,
                  "detections_per_img": cfg.detections_per_img,
                  "shorter": cfg.min_size, "fill": list(val_data.fill),
                  "input": "float32 (B, 3, image_size, image_size) in [0, 1]: resized by min(image_size / longer side, shorter / "
                           "shorter side) (the first alone where shorter is 0), fill (or black) right and below",
                  "mean": model.mean.flatten().tolist(), "std": model.std.flatten().tolist()}  # fmt: skip
        if cfg.backbone != "small":  # models.detection has the constructor that loads them
            config |= {"library": "torchvision", "num_classes": len(classes) + model.background}
        elif cfg.model != "fcos":  # (w, h) in pixels: not in the weights, but needed to decode boxes
            config["anchors"] = (model.anchor_generator.cell_anchors[0][:, 2:] * 2).tolist()
        example = torch.zeros(2, 3, cfg.image_size, cfg.image_size)
        program, facts = model.exported(example.shape)
        core.save_export(folder, program, config | facts, example, weights=model.net)

    # The other models' initial offsets are random, and too large a part of the loss for theory to give its first value.
    scratch, foretold = started_from is None, isinstance(model, detectors.Fcos) and started_from is None
    expect = core.Expect(
        initial_loss=(lambda b: model.untrained(b["image"].shape, boxes.targets(b))) if foretold else None,
        loss_floor=(lambda b: model.lowest(b["image"].shape, boxes.targets(b), off=model.near)) if scratch else 0.0,
        overfit_metric=0.9,
        overfit_steps=300,
        new_parameters=fresh,
    )
    question = "which digits are where?" if embedded else f"which of {len(classes)} kinds of objects are where?"
    return core.Stage(
        name="detect",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data={"train": train_data, "val": val_data, **test_data},
        loss=loss,
        counts=counts,
        evaluate=evaluate,
        metric=core.Metric("map", question, floor=0.0, ceiling=1.0),
        expect=expect,
        pretrained=started_from,
        baselines=baselines,
        preview=preview,
        predict=predict,
        figures=figures,
        export=export,
        model_card=exporting.card("detect", cfg),
        # The boxes of Faster R-CNN are those of its proposals, which rounding can exchange.
        exported=exporting.of_boxes(run, classes, limits(cfg)) if isinstance(model, detectors.Dense) else None,
        gates=detect_gates.DETECTING,
        monitors=[pictures.forgotten_box],
    )  # fmt: skip


STAGES = [detect]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop; the gates rehearse this very function."""
    for step in run.steps(stage):
        run.update(stage, step.batches)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)


if __name__ == "__main__":
    core.main(__file__)
