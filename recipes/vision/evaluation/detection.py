"""Metrics of detections, a baseline without a net, and pictures of boxes."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.utils import draw_bounding_boxes
from trainworthy.recipes.vision.data import pasted
from trainworthy.recipes.vision.data.boxes import Annotated


# ------------------------------------------------------------------------------------------------------------------- scores
def scores(found: Tensor, truth: Tensor, n: int, classes: Sequence[str]) -> dict[str, float]:
    """Return COCO's average precision. `found` (N, 7): image, label, score, box; `truth` (M, 6): image, label, box; images 0 to n - 1, boxes
    xyxy in the images' own pixels. Without objects, no detections score 1."""
    from torchmetrics.detection import MeanAveragePrecision

    if not len(truth):
        return dict.fromkeys(("map", "map_50", "map_75"), float(not len(found)))
    metric = MeanAveragePrecision(backend="faster_coco_eval", extended_summary=True, sync_on_compute=False)

    def by_image(rows: Tensor) -> tuple[Tensor, ...]:
        return rows[rows[:, 0].argsort(stable=True)].split(rows[:, 0].long().bincount(minlength=n).tolist())

    metric.update([{"labels": r[:, 1].long(), "scores": r[:, 2], "boxes": r[:, 3:]} for r in by_image(found)],
                  [{"labels": r[:, 1].long(), "boxes": r[:, 2:]} for r in by_image(truth)])  # fmt: skip
    got = metric.compute()
    # At IoU 0.5, all sizes, 100 boxes per image; -1: there is no such object.
    recall = got["recall"][0, :, 0, -1].tolist()
    sizes = {k: float(got[f"map_{k}"]) for k in ("small", "medium", "large")}
    return {
        **{k: max(0.0, float(got[k])) for k in ("map", "map_50", "map_75")},
        **{f"map/{k}": v for k, v in sizes.items() if v >= 0},
        **{f"recall/{classes[int(c)]}": r for c, r in zip(got["classes"].view(-1), recall, strict=True) if r >= 0},
    }


def listed(data: Annotated, rows: Sequence[int]) -> Tensor:
    """Return the ground truth as `scores` reads it, (M, 6): image (position in `rows`), label, box."""
    each = [torch.cat([torch.full((len(data.boxes[row]), 1), float(i)), data.labels[row][:, None], data.boxes[row]], 1)
            for i, row in enumerate(rows)]  # fmt: skip
    return torch.cat(each)


def baseline(data: Annotated) -> dict[str, float]:
    """Return the scores of pasted.by_hand on the validation scenes, with the threshold that is best on 100 training scenes."""

    def scores_of(rows: Sequence[int], threshold: int) -> dict[str, float]:
        found, _ = pasted.by_hand([data.pictures.scenes[i] for i in rows], threshold)
        return scores(found, listed(data, rows), len(rows), data.classes)

    best = max(pasted.THRESHOLDS, key=lambda t: scores_of(data.learn[:100], t)["map"])
    return scores_of(data.held_out, best)


def overlap_share(found: Tensor, truth: Tensor) -> float:
    """Return the objects (m, 5: label, box) that were found (k, 5) at an IoU of 0.5, divided by the larger number of objects or detections."""
    from torchvision.ops import box_iou

    if not len(found) or not len(truth):
        return float(len(found) == len(truth))
    same = found[:, None, 0] == truth[None, :, 0]
    hit = ((box_iou(found[:, 1:], truth[:, 1:]) >= 0.5) & same).any(0).sum()
    return float(hit) / max(len(found), len(truth))


# ----------------------------------------------------------------------------------------------------------------- pictures
HUES = ("white", "yellow", "cyan", "magenta", "lime", "orange", "red", "deepskyblue")


def drawn(image: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
    """Return an image in [0, 1] as uint8-rounded (3, H, W) with boxes drawn around their objects, one colour per label."""
    picture = (image.detach().float().cpu() * 255).round().clamp(0, 255).to(torch.uint8).expand(3, -1, -1)
    if len(boxes):
        edges = boxes.detach().float().cpu() + torch.tensor([-1, -1, 0, 0])
        edges[:, 2:] = torch.maximum(edges[:, 2:], edges[:, :2])
        picture = draw_bounding_boxes(picture, edges, colors=[HUES[int(c) % len(HUES)] for c in labels])
    return picture.float() / 255
