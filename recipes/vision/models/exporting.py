"""How users read the exports of classify, segment and detect (`use_export.py`), and the recipes' answers to the same images.

Images come from the stored files, not from `Data.get`, because the evaluation path's own processing is what is compared.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import batched_nms
from trainworthy.core.gates.checks.exported import Exported
from trainworthy.recipes.vision.data import boxes, masks
from trainworthy.recipes.vision.evaluation import detection, segmentation
from trainworthy.recipes.vision.models import detectors, hub_nets, use_export

from trainworthy import core

READER = Path(use_export.__file__)

START = """import sys

sys.path.insert(0, "export")  # the run's folder export/, wherever it is now
import use  # export/use.py needs torch, torchvision, Pillow, safetensors. `python export/use.py picture.jpg` does the same

config, net = use.open_export("export")
picture = use.read("picture.jpg", config)  # of any size
"""
CLASSIFY = """for name, probability in use.classify(config, net, picture)[:5]:
    print(f"{probability:.4f} {name}")"""
SEGMENT = """mask = use.segment(config, net, picture)  # (H, W) class ids of the whole picture, in windows as in the evaluation
use.Image.fromarray(mask.numpy()).save("mask.png")
for i, name in enumerate(config["classes"]):
    print(f"{(mask == i).float().mean():.4f} of the pixels: {name}")"""
DETECT = """for name, score, (x1, y1, x2, y2) in use.detect(config, net, picture):  # pixels of the picture
    print(f"{score:.4f} {name}: {x1:.1f} {y1:.1f} {x2:.1f} {y2:.1f}")"""
TASKS = {
    "classify": ("image-classification", CLASSIFY),
    "segment": ("image-segmentation", SEGMENT),
    "detect": ("object-detection", DETECT),
}


def card(task: str, cfg: Any) -> dict[str, Any]:
    """Return the header of the export's model card (`core.Stage.model_card`), with code that uses the export."""
    tag, code = TASKS[task]
    name = Path(cfg.model).name if Path(cfg.model).is_dir() else cfg.model
    known = hub_nets.named(cfg.model)
    net = name if task != "detect" else f"{name}, backbone {cfg.backbone}"
    facts = [f"Net: {net}. Pretrained weights: {cfg.weights}."]
    return {
        **({"base_model": name, "library_name": "transformers"} if known else {}), "pipeline_tag": tag, "facts": facts,
        "data": cfg.data.path.removeprefix("hub:") if cfg.data.path.startswith("hub:") else Path(cfg.data.path).name,
        "usage": START + code, "script": READER,
    }  # fmt: skip


def library(model: nn.Module, name: str, n_classes: int) -> dict[str, Any]:
    """Return what config.json of an export says of the library that has this net: transformers, or torchvision."""
    theirs = {"architecture": name, "library": "torchvision", "num_classes": n_classes}
    return hub_nets.configured(model) or theirs


def write(folder: Path, net: nn.Module, config: dict[str, Any], example: Tensor) -> None:
    """Write the export of a net `net` that a library has inside, under the library's own names, with its image processor if it has one."""
    core.save_export(folder, net, config, example, weights=net.net)
    hub_nets.write_processor(folder, net)


def stored(data: core.Data, index: int) -> tuple[core.Data, int]:
    """Return the data set that stores the image, and its index there: below balancing and mixing."""
    while hasattr(data, "data") and isinstance(data.data, core.Data):
        index = data.places[index] if hasattr(data, "places") else index
        data = data.data
    return data, index


def make_answers(run: core.Run, answer: Callable[[nn.Module, Tensor], Tensor]) -> Callable:
    """Return `Exported.answers` of a net whose only input is `image`, four images at a time."""

    def answers(model: nn.Module, data: core.Data, indices: Sequence[int]) -> list[Tensor]:
        found: list[Tensor] = []
        for start in range(0, len(indices), 4):
            images = torch.stack([data.get(i, None)["image"] for i in indices[start : start + 4]])
            found += list(answer(model, images.to(run.device)))
        return found

    return answers


def ready(data: core.Data, index: int) -> dict[str, Tensor]:
    """Return the image as the recipe's own evaluation path gives it."""
    return {"ready": data.get(index, None)["image"]}


def of_classes(run: core.Run) -> Exported:
    """For samples of `images` and `labels`: logits."""

    def sample(data: core.Data, index: int) -> dict[str, Tensor]:
        data, index = stored(data, index)
        return {"picture": data.images[index]}

    def score(data: core.Data, indices: Sequence[int], answers: list[Tensor]) -> float:
        right = [int(a.argmax()) == int(data.peek(i, "label")) for a, i in zip(answers, indices, strict=True)]
        return sum(right) / len(right)

    return Exported(READER, sample, make_answers(run, lambda model, images: model(images)), score, ready, "accuracy")


def of_masks(run: core.Run, classes: Sequence[str], metric: str) -> Exported:
    """For windows of images: logits of every pixel."""

    def sample(data: masks.Windows, index: int) -> dict:
        row, top, left, *_ = data.places[index]
        return {"picture": data.pairs[row][0], "window": [left, top, data.window]}

    def score(data: masks.Windows, indices: Sequence[int], answers: list[Tensor]) -> float:
        n = len(classes)
        counts = [
            segmentation.counted(data.get(i, None)["mask"], a.argmax(0), n)
            for i, a in zip(indices, answers, strict=True)
        ]
        return segmentation.scores(sum(counts), classes)[known]

    known = metric if metric in segmentation.scores(torch.eye(len(classes)), classes) else "miou"
    return Exported(READER, sample, make_answers(run, lambda model, images: model(images)), score, ready, known)


def of_boxes(run: core.Run, classes: Sequence[str], limits: dict[str, float]) -> Exported:
    """For images on a canvas: boxes of every location as shares of the canvas, next to the scores of every class."""

    def sample(data: boxes.Boxed, index: int) -> dict[str, Tensor]:
        return {"picture": data.data.pictures[data.rows[index]]}

    def answer(model: detectors.Dense, images: Tensor) -> Tensor:
        raw = detectors.Raw(model, images.shape[-1]).to(images.device).eval()
        found, scores = raw(images)
        return torch.cat([found / images.shape[-1], scores], 2)

    def score(data: boxes.Boxed, indices: Sequence[int], answers: list[Tensor]) -> float:
        found = [torch.zeros(0, 7)]
        for j, (i, one) in enumerate(zip(indices, answers, strict=True)):
            h, w = data.data.sizes[data.rows[i]]
            where, label = (one[:, 4:] > limits["score_thresh"]).nonzero(as_tuple=True)
            mine, sure = one[where, :4] * data.side, one[where, 4 + label]
            kept = batched_nms(mine, sure, label, limits["nms_thresh"])[: int(limits["detections_per_img"])]
            high, wide = data.resized(h, w)
            scale = torch.tensor([wide / w, high / h])
            own = boxes.to_own(mine[kept], scale, torch.tensor([h, w]))
            found.append(torch.cat([torch.full((len(kept), 1), float(j)), label[kept, None], sure[kept, None], own], 1))
        truth = detection.listed(data.data, [data.rows[i] for i in indices])
        return detection.scores(torch.cat(found), truth, len(indices), classes)["map"]

    return Exported(READER, sample, make_answers(run, answer), score, ready, "map")
