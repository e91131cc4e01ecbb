"""Torchvision's FCOS, RetinaNet and Faster R-CNN behind one interface: images in, boxes or loss sums out.

Images (B, 3, S, S) come in as [0, 1] and are normalised inside. Boxes are xyxy in their pixels. Labels are 0 to n - 1 (Faster
R-CNN's background class is added and removed here). Nothing is resized here: torchvision's own transform is not used.
"""

import contextlib
import copy
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOS, FCOSHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.ops import MultiScaleRoIAlign, box_iou

Target = dict[str, Tensor]
"""`boxes` (k, 4), `labels` (k,) and, where the loss samples at random (Faster R-CNN), `seed` ()."""


class Detector(nn.Module):
    """A torchvision detector with its normalisation inside.

    With targets it returns {term: sum}. Without, it returns a dict of `boxes` (k, 4), `scores` (k,) and `labels` (k,) for each picture,
    best first."""

    background = 0
    """Number of the net's labels before class 0."""
    near = 0.5
    """Error in pixels of a box's width and height that the overfit gate still accepts; see `lowest`."""

    def __init__(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)
        self._grids: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def features(self, images: Tensor) -> "OrderedDict[str, Tensor]":
        """Return the feature map of every level, (B, C, h, w) each."""
        found = self.net.backbone((images - self.mean) / self.std)
        return found if isinstance(found, dict) else OrderedDict([("0", found)])

    def ghosts(self, shape: Sequence[int]) -> "OrderedDict[str, Tensor]":
        """Return the feature maps of one picture (..., H, W) without values, on the meta device."""
        ghost = copy.deepcopy(self.net.backbone).to("meta").eval()
        found = ghost(torch.zeros(1, len(self.mean), *shape[-2:], device="meta"))
        return found if isinstance(found, dict) else OrderedDict([("0", found)])

    def grids(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return (h, w) of every level for pictures (..., H, W), from a pass on the meta device."""
        size = tuple(shape[-2:])
        if size not in self._grids:
            self._grids[size] = [tuple(m.shape[-2:]) for m in self.ghosts(size).values()]
        return self._grids[size]

    def anchors(self, shape: Sequence[int]) -> Tensor:
        """Return the anchors of one picture, (A, 4). FCOS has one per location: a square as large as the stride."""
        device = self.mean.device
        maps = [torch.empty(1, 1, *g, device=device) for g in self.grids(shape)]
        pictures = ImageList(torch.empty(1, 1, *shape[-2:], device=device), [tuple(shape[-2:])])
        return self.anchor_generator(pictures, maps)[0]

    @property
    def anchor_generator(self) -> AnchorGenerator:
        return self.net.anchor_generator

    @property
    def limits(self) -> nn.Module:
        """The module that has `score_thresh`, `nms_thresh` and `detections_per_img`."""
        return self.net

    def inside(self, targets: list[Target]) -> list[Target]:
        """Return targets with the net's labels."""
        return [{**t, "labels": t["labels"] + self.background} for t in targets]

    def outside(self, detections: list[Target]) -> list[Target]:
        """Return detections with labels from 0."""
        return [{**d, "labels": d["labels"] - self.background} for d in detections]

    def exported(self, shape: Sequence[int]) -> tuple[nn.Module, dict[str, Any]]:
        """Return the program to export for pictures (..., H, W), and what config.json says of it."""
        raise NotImplementedError

    def counts(self, shape: Sequence[int], targets: list[Target]) -> float | Tensor:
        """Return the divisor of the sums: pictures, as in RetinaNet, whose loss is a mean over each picture first."""
        return len(targets)

    def lowest(self, shape: Sequence[int], targets: list[Target], off: float = 0.0) -> float:
        """Return the lowest possible loss on these targets if boxes are `off` pixels too wide and too high."""
        return 0.0


class Dense(Detector):
    """FCOS and RetinaNet: one head, applied at every location."""

    def forward(self, images: Tensor, targets: list[Target] | None = None) -> dict[str, Tensor] | list[Target]:
        maps = list(self.features(images).values())
        outputs = {k: v.float() for k, v in self.net.head(maps).items()}  # (B, A, ...), levels concatenated
        if targets is not None:
            return self.sums(images.shape, outputs, targets)
        anchors, sizes = self.anchors(images.shape), self.level_sizes(images.shape)
        split = {k: list(v.split(sizes, 1)) for k, v in outputs.items()}
        return self.outside(self.net.postprocess_detections(
            split, [list(anchors.split(sizes))] * len(images), [tuple(images.shape[-2:])] * len(images)))  # fmt: skip

    def exported(self, shape: Sequence[int]) -> tuple[nn.Module, dict[str, Any]]:
        output = "boxes (B, A, 4) xyxy in these pixels, scores (B, A, classes) of every location; then torchvision.ops.batched_nms"
        facts = {"level_sizes": self.level_sizes(shape), "topk_candidates": self.net.topk_candidates, "output": output}
        return Raw(self, shape[-1]), facts

    def level_sizes(self, shape: Sequence[int]) -> list[int]:
        """Return the number of anchors of every level for pictures (..., H, W)."""
        places = [h * w for h, w in self.grids(shape)]
        return [n * len(self.anchors(shape)) // sum(places) for n in places]

    def sums(self, shape: Sequence[int], outputs: dict[str, Tensor], targets: list[Target]) -> dict[str, Tensor]:
        """Return the library's loss of these outputs, multiplied by its divisor."""
        means = self.library_loss(shape, outputs, self.inside(targets))
        n = self.divided_by(shape, targets)
        return {k: v * n for k, v in means.items()}

    def divided_by(self, shape: Sequence[int], targets: list[Target]) -> float:
        """Return the divisor that the library uses for a batch."""
        return len(targets)

    def library_loss(
        self, shape: Sequence[int], outputs: dict[str, Tensor], targets: list[Target]
    ) -> dict[str, Tensor]:
        return self.net.compute_loss(targets, outputs, [self.anchors(shape)] * len(targets))

    def ignorant(self, shape: Sequence[int], n: int, prior: float = 0.01) -> dict[str, Tensor]:
        """Return the outputs of an untrained head for `n` pictures: class probabilities `prior`, initial box offsets."""
        a, like, head = len(self.anchors(shape)), self.mean, self.net.head
        logit = -math.log((1 - prior) / prior)
        return {"cls_logits": like.new_full((n, a, head.classification_head.num_classes), logit),
                "bbox_regression": self.offsets().expand(n, a, 4), "bbox_ctrness": like.new_zeros(n, a, 1)}  # fmt: skip

    def offsets(self) -> Tensor:
        """Return the box offsets of an untrained head, (4,)."""
        return self.mean.new_zeros(4)

    def untrained(self, shape: Sequence[int], targets: list[Target]) -> float:
        """Return the loss of an untrained net on these targets."""
        sums = self.sums(shape, self.ignorant(shape, len(targets)), targets)
        return float(sum(sums.values())) / float(self.counts(shape, targets))


class Fcos(Dense):
    """FCOS (Tian 2019). The library divides by the number of locations inside objects in the batch. Here they are counted before the
    forward pass, over the global batch, so that splitting a batch does not change the weight of a location."""

    def matches(self, shape: Sequence[int], targets: list[Target]) -> list[Tensor]:
        """Return for each picture (A,): index of the box assigned to each location, or -1. It is the library's matching."""
        head = SimpleNamespace(compute_loss=lambda targets, outputs, anchors, matched: matched)
        me = SimpleNamespace(center_sampling_radius=self.net.center_sampling_radius, head=head)
        levels = [h * w for h, w in self.grids(shape)]
        return FCOS.compute_loss(me, targets, {}, [self.anchors(shape)] * len(targets), levels)

    def offsets(self) -> Tensor:
        return self.net.head.regression_head.bbox_reg.bias.detach().relu()

    def answering(self, shape: Sequence[int], targets: list[Target]) -> Tensor:
        """Return the number of locations with an assigned box in each picture, (B,)."""
        return torch.stack([(m >= 0).sum() for m in self.matches(shape, targets)])

    def counts(self, shape: Sequence[int], targets: list[Target]) -> Tensor:
        """Return the number of assigned locations. A picture without any counts as one, to avoid division by zero."""
        return self.answering(shape, targets).clamp_min(1).sum().float()

    def divided_by(self, shape: Sequence[int], targets: list[Target]) -> float:
        return max(1, int(self.answering(shape, targets).sum()))

    def library_loss(
        self, shape: Sequence[int], outputs: dict[str, Tensor], targets: list[Target]
    ) -> dict[str, Tensor]:
        levels = [h * w for h, w in self.grids(shape)]
        return self.net.compute_loss(targets, outputs, [self.anchors(shape)] * len(targets), levels)

    def lowest(self, shape: Sequence[int], targets: list[Target], off: float = 0.0) -> float:
        """Return the entropy of centerness, a soft target, plus the loss of inexact boxes."""
        total = 0.0
        for target, matched in zip(targets, self.matches(shape, targets), strict=True):
            mine = matched >= 0
            sides = self.net.box_coder.encode(self.anchors(shape)[mine], target["boxes"][matched[mine]]).view(-1, 2, 2)
            t = (sides.min(1).values / sides.max(1).values).prod(1).sqrt()
            wide, high = (
                target["boxes"][matched[mine]] @ target["boxes"].new_tensor(m) for m in ([-1, 0, 1, 0], [0, -1, 0, 1])
            )
            beside = 1 - wide * high / ((wide + off) * (high + off))
            total += (F.binary_cross_entropy(t, t, reduction="none") + beside).sum().item()
        return total / float(self.counts(shape, targets))


class FasterRcnn(Detector):
    """Faster R-CNN (Ren 2015). The backbone runs on the batch, the two heads on one picture after the other, so that a picture's loss
    does not depend on the rest of the batch. The picture's `seed` determines which anchors and proposals are sampled."""

    background = 1
    # The second stage multiplies box errors by ten, on proposals that the first stage still changes, so the loss keeps moving at the peak
    # learning rate. One pixel on these digits is an IoU of 0.93; the gate needs 0.9.
    near = 1.0

    def lowest(self, shape: Sequence[int], targets: list[Target], off: float = 0.0) -> float:
        """Return the box loss of the second stage, for proposals that match their objects, at the largest sampled share."""
        heads, total = self.net.roi_heads, 0.0
        for target in targets:
            sides = target["boxes"][:, 2:] - target["boxes"][:, :2]
            weights = sides.new_tensor(heads.box_coder.weights).view(2, 2)
            deltas = torch.cat([weights[0] * off / 2 / sides, weights[1] * (1 + off / sides).log()], 1)
            each = F.smooth_l1_loss(deltas, torch.zeros_like(deltas), beta=1 / 9, reduction="none").sum(1)
            total += heads.fg_bg_sampler.positive_fraction * (each.mean().item() if len(each) else 0.0)
        return total / len(targets)

    @property
    def anchor_generator(self) -> AnchorGenerator:
        return self.net.rpn.anchor_generator

    @property
    def limits(self) -> nn.Module:
        return self.net.roi_heads

    def forward(self, images: Tensor, targets: list[Target] | None = None) -> dict[str, Tensor] | list[Target]:
        maps = OrderedDict((k, v.float()) for k, v in self.features(images).items())
        with torch.autocast(images.device.type, enabled=False):  # half precision rounds corners of boxes by pixels
            return self.heads(images, maps, targets)

    def heads(self, images: Tensor, maps: "OrderedDict[str, Tensor]", targets: list[Target] | None):
        """Return what `forward` returns, from the backbone's maps."""
        size = tuple(images.shape[-2:])
        if targets is None:
            pictures = ImageList(images, [size] * len(images))
            proposals, _ = self._as(False, self.net.rpn, pictures, maps)
            return self.outside(self._as(False, self.net.roi_heads, maps, proposals, pictures.image_sizes)[0])
        sums: dict[str, Tensor] = {}
        for i, target in enumerate(self.inside(targets)):
            own = OrderedDict((k, v[i : i + 1]) for k, v in maps.items())
            picture = ImageList(images[i : i + 1], [size])
            with torch.random.fork_rng([images.device] if images.is_cuda else []):
                torch.manual_seed(int(target["seed"]))
                proposals, first = self._as(True, self.net.rpn, picture, own, [target])
                _, second = self._as(True, self.net.roi_heads, own, proposals, [size], [target])
            for k, v in (first | second).items():
                sums[k] = sums[k] + v if k in sums else v
        return sums

    def exported(self, shape: Sequence[int]) -> tuple[nn.Module, dict[str, Any]]:
        """The number of proposals depends on the picture: the program ends with the backbone, and torchvision's net is built around it."""
        rpn, pool = copy.deepcopy(self.net.rpn).eval(), self.net.roi_heads.box_roi_pool
        facts = {
            "levels": list(self.ghosts(shape)), "pooled_levels": pool.featmap_names, "pool_size": pool.output_size[0],
            "sampling_ratio": pool.sampling_ratio, "rpn_pre_nms_top_n": rpn.pre_nms_top_n(),
            "rpn_post_nms_top_n": rpn.post_nms_top_n(), "rpn_nms_thresh": rpn.nms_thresh,
            "rpn_score_thresh": rpn.score_thresh,
            "output": "feature maps of `levels`; torchvision's FasterRCNN with this backbone and the other weights of model.safetensors "
                      "finds the boxes, as in use.py",
        }  # fmt: skip
        return Maps(self), facts

    @staticmethod
    def _as(training: bool, module: nn.Module, *args):
        """Call a module whose return value depends on `training`, with that flag set. Its children keep their modes."""
        kept, module.training = module.training, training
        try:
            return module(*args)
        finally:
            module.training = kept


class Raw(nn.Module):
    """The boxes and scores of every anchor of a dense detector, without threshold and NMS: (B, 3, S, S) in [0, 1] -> boxes (B, A, 4),
    scores (B, A, n)."""

    def __init__(self, detector: Dense, side: int):
        super().__init__()
        self.detector = detector
        self.register_buffer("anchors", detector.anchors((side, side)))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        net = self.detector.net
        outputs = net.head(list(self.detector.features(images).values()))
        offsets, scores = outputs["bbox_regression"], outputs["cls_logits"].sigmoid()
        anchors = self.anchors.expand_as(offsets)
        if "bbox_ctrness" in outputs:
            return net.box_coder.decode(offsets, anchors), (scores * outputs["bbox_ctrness"].sigmoid()).sqrt()
        return net.box_coder.decode_single(offsets.flatten(0, 1), anchors.flatten(0, 1)).view_as(offsets), scores


class Maps(nn.Module):
    """The feature maps of a detector's backbone: (B, 3, S, S) in [0, 1] -> (B, C, h, w) of each level."""

    def __init__(self, detector: Detector):
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.detector.features(images).values())


KINDS: dict[str, type[Detector]] = {"fcos": Fcos, "retinanet": Dense, "faster-rcnn": FasterRcnn}
# Torchvision's values: a higher threshold cuts off the tail of the precision-recall curve.
MIN_SCORES = {"fcos": 0.2, "retinanet": 0.05, "faster-rcnn": 0.05}


# ---------------------------------------------------------------------------------------------------------------- anchors
class Fitted(AnchorGenerator):
    """Anchors of these widths and heights, (k, 2), at every location of every level."""

    def __init__(self, sizes: Tensor, levels: int = 1):
        super().__init__(sizes=((1.0,) * len(sizes),) * levels, aspect_ratios=((1.0,),) * levels)
        self.cell_anchors = [torch.cat([-sizes / 2, sizes / 2], 1)] * levels


def fit(boxes: Tensor, k: int, *, rounds: int = 30) -> Tensor:
    """Return k widths and heights, (k, 2): k-means over the logarithms of the boxes' (N, 4) sides, started at quantiles of their area."""
    sides = (boxes[:, 2:] - boxes[:, :2]).log()
    order = sides.sum(1).argsort()
    centres = sides[order[((torch.arange(k) + 0.5) / k * len(order)).long()]]
    for _ in range(rounds):
        nearest = torch.cdist(sides, centres).argmin(1)
        centres = torch.stack([sides[nearest == i].mean(0) if (nearest == i).any() else centres[i] for i in range(k)])
    return centres.exp()


def best_overlap(anchors: Tensor, boxes: Tensor) -> Tensor:
    """Return the best IoU of each box (k, 4) with any anchor, (k,)."""
    return box_iou(boxes, anchors).max(1).values if len(boxes) else boxes.new_zeros(0)


def turned(anchors: Tensor) -> Tensor:
    """Return anchors (N, 4) with widths and heights exchanged."""
    middle, half = (anchors[:, :2] + anchors[:, 2:]) / 2, (anchors[:, 2:] - anchors[:, :2]).flip(1) / 2
    return torch.cat([middle - half, middle + half], 1)


# --------------------------------------------------------------------------------------------------------------- building
def small(kind: str, backbone: nn.Module, n_classes: int, anchors: Tensor, *, stride: int, limits: dict) -> nn.Module:
    """Return a torchvision detector on a backbone of one level, with heads small enough for two CPU cores."""
    channels = backbone.out_channels
    if kind == "fcos":
        squares = AnchorGenerator(((stride,),), ((1.0,),))
        head = FCOSHead(channels, 1, n_classes, num_convs=2)
        # Sides are the output of a ReLU. Started at 0, a high learning rate can kill it for good (loss stuck at 1.11). Start at the mean side.
        nn.init.constant_(head.regression_head.bbox_reg.bias, anchors.mean().item() / 2 / stride)
        return FCOS(backbone, n_classes, anchor_generator=squares, head=head, **limits)
    fitted = Fitted(anchors)
    if kind == "retinanet":
        norm = lambda c: nn.GroupNorm(8, c)  # noqa: E731
        head = detection.retinanet.RetinaNetHead(channels, len(anchors), n_classes, norm_layer=norm)
        return RetinaNet(backbone, n_classes, anchor_generator=fitted, head=head, **limits)
    rpn = {f"rpn_{k}_nms_top_n_{m}": 200 for k in ("pre", "post") for m in ("train", "test")}
    sampled = {"rpn_batch_size_per_image": 64, "box_batch_size_per_image": 64}
    pool = MultiScaleRoIAlign(["0"], 7, 2)
    head = detection.faster_rcnn.TwoMLPHead(channels * 49, 128)
    predictor = detection.faster_rcnn.FastRCNNPredictor(128, n_classes + 1)
    return detection.FasterRCNN(backbone, rpn_anchor_generator=fitted, box_roi_pool=pool, box_head=head, box_predictor=predictor,
                                **rpn, **sampled, **{f"box_{k}": v for k, v in limits.items()})  # fmt: skip


@contextlib.contextmanager
def without_nms(model: Detector) -> Iterator[None]:
    """Make the model return every box above the score threshold."""
    limits = model.limits
    kept = limits.nms_thresh, limits.detections_per_img
    limits.nms_thresh, limits.detections_per_img = 1.0, 10**6
    try:
        yield
    finally:
        limits.nms_thresh, limits.detections_per_img = kept
