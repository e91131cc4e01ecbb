"""The gate `boxes`: boxes match their objects, on both paths, and on painted pictures."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchvision.ops import box_iou
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.named import order_causes
from trainworthy.core.gates.gate import GateContext, fetch
from trainworthy.core.recipe.stage import Data
from trainworthy.recipes.vision.data import boxes
from trainworthy.recipes.vision.gates import placement

PAINTED, SAMPLES = 32, 32
BRIGHT = (0.5, 0.65, 0.8, 0.9)  # a grey frame around a darkened picture may be as bright as half of its rectangle
AS_ONE = 0.6  # IoU of a box with the rectangle painted in it (healthy: at least 0.8, one pixel off along every edge)


class Painted(Sequence):
    """Dark pictures with a bright rectangle in each box."""

    def __init__(self, sizes: list[tuple[int, int]], where: list[Tensor]):
        self.sizes, self.where = sizes, where

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, row: int) -> Tensor:
        picture = torch.full((3, *self.sizes[row]), 40, dtype=torch.uint8)
        for x0, y0, x1, y1 in self.where[row].long().tolist():
            picture[:, y0:y1, x0:x1] = 215
        return picture


def painted(data: boxes.Annotated, side: int, n: int, most: int) -> boxes.Annotated:
    """Return `n` painted pictures, one to two times as large as the canvas, wide and high. Each has one to `most` boxes that do not
    overlap, with random labels."""
    draw = torch.Generator().manual_seed(0)
    sizes, where, labels = [], [], []
    for row in range(n):
        h, w = (int(side * (1 + row % 3 / 2 * (d if row % 2 else 1))) for d in (1.0, 0.4))
        sizes.append((h, w))
        found: list[list[int]] = []
        for column in range(1 + row % most):  # one column per box
            wide, high = w // most, int(h * (0.3 + 0.2 * torch.rand((), generator=draw)))
            across = int(wide * (0.25 + 0.15 * torch.rand((), generator=draw)))
            # Off the centre, so that a mirrored box has an IoU of at most 0.5 with the original (20 of 20 seeds).
            left, y0 = (_draw_offset(room, draw) for room in (wide - across, h - high))
            x0 = column * wide + left
            found.append([x0, y0, x0 + across, y0 + high])
        where.append(torch.tensor(found, dtype=torch.float32))
        labels.append(torch.randint(len(data.classes), (len(found),), generator=draw))
    return data._replace(pictures=Painted(sizes, where), sizes=sizes, boxes=where, labels=labels)


def _draw_offset(room: int, draw: torch.Generator) -> int:
    """Return a random offset in `room`, outside its middle third."""
    at = int(torch.randint(max(1, 2 * room // 3), (), generator=draw))
    return at if at < room // 3 else at + room - 2 * room // 3


def twin(data: boxes.Boxed, other: boxes.Annotated) -> boxes.Boxed:
    """Return `data` with other pictures, read in the same way."""
    same = copy.copy(data)
    same.data, same.rows = other, range(len(other.pictures))
    return same


# (box (4,), scale (2,) from picture to canvas, size (2,) of the picture, side of the canvas) -> the box as misread
Change = Callable[[Tensor, Tensor, Tensor, float], Tensor]
MEANINGS: dict[str, Change] = {
    "are in normalised coordinates (0 to 1)": lambda b, scale, size, side: b * (scale * size.flip(0)).repeat(2),
    "are normalised by the canvas": lambda b, scale, size, side: b * side,
    "are xywh, read as xyxy": lambda b, *_: torch.cat([b[:2], b[:2] + b[2:]]),
    "are xyxy, converted as if they were xywh": lambda b, *_: torch.cat([b[:2], b[2:] - b[:2]]),
    "are centre and size, read as corners": lambda b, *_: torch.cat([b[:2] - b[2:] / 2, b[:2] + b[2:] / 2]),
    "were not resized with their picture": lambda b, scale, size, side: b * scale.repeat(2),
    "were resized, their picture was not (or they were twice)": lambda b, scale, size, side: b / scale.repeat(2),
    "are not mirrored with their picture": lambda b, scale, size, side: torch.stack(
        [scale[0] * size[1] - b[2], b[1], scale[0] * size[1] - b[0], b[3]]),
    "have x and y exchanged": lambda b, *_: b[[1, 0, 3, 2]],
}  # fmt: skip


def rectangle(image: Tensor, share: float = 0.5) -> Tensor | None:
    """Return the box (4,) of the bright pixels of a painted canvas, or None if there are none. `share`: brightness from which they are,
    between the darkest and the brightest pixel."""
    grey = image.double().mean(0)
    if grey.max() - grey.min() < 0.15:
        return None
    bright = grey > torch.lerp(grey[grey > 0].min(), grey.max(), share) if (grey > 0).any() else grey > 0
    rows, columns = (bright.any(d).nonzero().flatten() for d in (1, 0))
    return torch.stack([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).float()


def of_one_picture(data: Data, labels: Sequence[Tensor]) -> list[int]:
    """Return which samples show no more objects than their own picture has, whose `labels` are given; mosaics show more."""
    return [i for i, own in enumerate(labels) if int((data.get(i, None)["labels"] >= 0).sum()) <= len(own)]


def iou(a: Tensor, b: Tensor) -> float:
    return box_iou(a[None].float(), b[None].float()).item() if (a[2:] > a[:2]).all() else 0.0


@gate("boxes", rows="V3", title="boxes match their objects, on both paths", reads="data")
def lie_on(context: GateContext) -> Finding:
    """Sends pictures of many sizes, one bright rectangle in each, through the training and the evaluation path. The box must match the
    rectangle. If it does not, the gate tries formats, scales and mirroring that would explain it. If it does, up to 256 real pictures show
    whether their stored boxes belong to another picture, or to a smaller copy of theirs."""
    (run, stage), seed = context.look(), context.cfg.run.seed
    wrong, measured, batch = [], [], None
    for name, data in stage.data.items():
        same = twin(data, painted(data.data, data.side, PAINTED, 1))
        for path, draws in (("training", seed), ("evaluation", None)):
            now = fetch(same, list(range(PAINTED)), draws, run.device)
            batch = batch or now
            objects = (now["labels"] >= 0).sum(1).tolist()  # a mosaic shows several: compared by their pixels
            rows = [i for i in range(PAINTED) if objects[i] == 1 and rectangle(now["image"][i]) is not None]
            several = [i for i in range(PAINTED) if objects[i] > 1]
            if fault := _compare_pixels(now, several):
                wrong.append(f"{name}, {path} path: {fault}")
                batch = now
            for key in ("boxes", "truth"):
                fault, least = _compare_rectangles(now, rows, key, data.side)
                measured += [least]
                if fault:
                    wrong.append(f"{name}, {path} path: {'' if key == 'boxes' else 'truth: '}{fault}")
                    batch = now
    stored = [] if wrong else [(f"{name}: {fault}", cause) for name, data in stage.data.items() if name != "test"
                               for fault, cause in placement.faults(data)]  # fmt: skip
    wrong += [fault for fault, _ in stored]
    faults = "; ".join(wrong)
    return Finding(
        not wrong, faults or f"painted rectangles match their boxes, IoU at least {min(measured):.2f}",
        f"an IoU of at least {AS_ONE} with the painted rectangle for 90% of the boxes; stored boxes that fit their own picture",
        order_causes(
            ("format" in faults or "as x" in faults, "the file has another box format than the reader assumes (COCO has x, y, w, "
             "h); convert once, when the file is read"),
            ("mirrored" in faults or "times as large" in faults, "the picture is resized, mirrored or cropped and its boxes are "
             "not: pass both to one transform (tv_tensors)"),
            ("normalised" in faults, "boxes are divided by the picture's size, but the net expects pixels")),
        batch=batch if wrong and not stored else None, cause=stored[0][1] if stored else "",
    )  # fmt: skip


def _compare_pixels(batch: dict, rows: list[int]) -> str:
    """Return what is wrong with the boxes of painted samples that show several pictures: bright pixels must be in boxes, and fill them. The
    rectangles of pictures that are mixed (mixup) are less bright."""
    bad = []
    for i in rows:
        grey, (y, x) = (
            batch["image"][i].double().mean(0).cpu(),
            (torch.arange(n) + 0.5 for n in batch["image"].shape[-2:]),
        )
        dark, found = grey[grey > 0].min(), batch["boxes"][i][batch["labels"][i] >= 0].cpu()
        down, across = (
            (at[None] >= found[:, k, None]) & (at[None] <= found[:, k + 2, None]) for k, at in ((1, y), (0, x))
        )
        covered = (down[:, :, None] & across[:, None]).any(0)
        bright = [grey > dark + share * (grey.max() - dark) for share in (0.5, 0.05)]
        if all((b & covered).sum() < AS_ONE * (b | covered).sum() for b in bright):
            bad.append(i)
    if len(bad) <= 0.1 * len(rows):
        return ""
    return (f"{len(bad)} of {len(rows)} samples of several pictures do not match their rectangles: pixels are bright outside the boxes, or "
            "dark inside")  # fmt: skip


def _compare_rectangles(batch: dict, rows: list[int], key: str, side: int) -> tuple[str, float]:
    """Return (what is wrong with the boxes of the painted pictures `rows`, the 10% quantile of their IoU)."""
    onto = lambda b, scale: b * scale.repeat(2) if key == "truth" else b  # noqa: E731
    seen, close = [], []
    for i in rows:
        box, scale = batch[key][i][batch["labels"][i] >= 0][0], batch["scale"][i]
        found = [rectangle(batch["image"][i], share) for share in BRIGHT]
        overlaps = [iou(onto(box, scale), r) for r in found]
        best = overlaps.index(max(overlaps))
        seen.append((found[best], box, scale, batch["size"][i]))
        close.append(overlaps[best])
    close = torch.tensor(close)
    bad = [s for s, c in zip(seen, close, strict=True) if c < AS_ONE]
    if len(bad) <= 0.1 * len(seen):
        return "", float(close.quantile(0.1)) if len(close) else 1.0
    fits = {m: sum(iou(onto(f(b, scale, size, side), scale), r) >= AS_ONE for r, b, scale, size in bad)
            for m, f in MEANINGS.items()}  # fmt: skip
    best = max(fits, key=fits.get)
    sides = lambda b: b[2:] - b[:2]  # noqa: E731
    by = torch.stack([sides(r) / sides(onto(b, scale)).clamp_min(1e-6) for r, b, scale, _ in bad]).median()
    means = (
        f"they {best}" if fits[best] > 0.5 * len(bad) else f"the rectangles are {by:.2f} times as large as their boxes"
    )
    r, b, *_ = bad[0]
    measured = (
        f"box {[round(v, 2) for v in b.tolist()]}, rectangle at {[round(v, 2) for v in r.tolist()]} of the canvas"
    )
    return f"{len(bad)} of {len(seen)} boxes do not match their rectangle, e.g. {measured}; {means}", 0.0
