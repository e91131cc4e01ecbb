"""Torchvision's classifiers, segmentation nets and detectors by name, with their weights and preprocessing and a new head."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.ops import FrozenBatchNorm2d
from torchvision.transforms import v2
from trainworthy.core import Run, UserError
from trainworthy.core.base import network
from trainworthy.core.base.config import unknown
from trainworthy.recipes.vision.models import detectors

# These have three heads
NAMES = [n for n in models.list_models(module=models) if n not in ("googlenet", "inception_v3")]
SEGMENTERS = models.list_models(module=models.segmentation)
# Our name: prefix of torchvision's names
DETECTORS = {"fcos": "fcos", "retinanet": "retinanet", "faster-rcnn": "fasterrcnn"}
Norm = Literal["own", "batch", "group", "frozen"]


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of a net: one object for both paths, the model's normalisation and the exported config.

    Called with (1 or 3, H, W) in [0, 1], it returns (3, crop, crop) in [0, 1], as in evaluation.
    """

    resize: int
    """Pixels of the shorter side after resizing."""
    crop: int
    """Pixels of the centre crop after that."""
    interpolation: v2.InterpolationMode
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: Tensor) -> Tensor:
        image = v2.functional.resize(image, [self.resize], interpolation=self.interpolation, antialias=True)
        return self.coloured(v2.functional.center_crop(image, [self.crop]))

    def augmented(self) -> nn.Module:
        """Return the training transform: a random crop, mirroring (Szegedy 2015), and one of fourteen changes of colour or shape
        (TrivialAugment, Mueller & Hutter 2021), to the same size with the same interpolation."""
        return v2.Compose([
            v2.RandomResizedCrop(self.crop, interpolation=self.interpolation, antialias=True), v2.Lambda(self.coloured),
            v2.RandomHorizontalFlip(), v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR),
        ])  # fmt: skip

    def plain(self) -> dict:
        """Return the preprocessing for the exported config."""
        return {**asdict(self), "interpolation": self.interpolation.value}

    @staticmethod
    def coloured(image: Tensor) -> Tensor:
        """Return three channels in [0, 1]: bicubic interpolation can leave that range."""
        return image.expand(3, -1, -1).clamp(0, 1)


class Normalised(nn.Module):
    """A net with its normalisation inside: images come in as [0, 1]."""

    def __init__(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.net((images - self.mean) / self.std)


class Segmenting(Normalised):
    """A net that predicts every pixel: (B, 3, H, W) in [0, 1] -> (B, n_classes, H, W)."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images)["out"]


def find(model: str, weights: str, names: Sequence[str] = NAMES) -> models.WeightsEnum:
    """Return the weights `weights` of `model` (a member's name or DEFAULT), with their metadata. Downloads nothing."""
    if model not in names:
        kind = "classifier" if names is NAMES else "segmentation net" if names is SEGMENTERS else "detector"
        raise unknown(f"model '{model}'", model, names, cause=f"--model is `small` or the name of a torchvision {kind}")
    offered = models.get_model_weights(model)
    if weights not in ("none", "DEFAULT", *offered.__members__):
        raise unknown(f"weights '{weights}' of {model}", weights, ["none", "DEFAULT", *offered.__members__])
    return offered.DEFAULT if weights in ("none", "DEFAULT") else offered[weights]


def check_weights(model: str, weights: str) -> None:
    """Raise UserError for weights of the net that has none."""
    if model == "small" and weights != "none":
        raise UserError(f"--weights {weights}: the net `small` has none", needed="--weights none, or another --model with it",
                        next=f"--model resnet18 --weights {weights}")  # fmt: skip


def preprocessing(model: str, weights: str, image_size: int = 0) -> Preprocessing:
    """Return the preprocessing of the weights, scaled to `image_size` pixels if that is not 0. The `small` net has no weights and uses 64
    pixels."""
    check_weights(model, weights)
    p = find("resnet18" if model == "small" else model, weights).transforms()
    crop, resize = (64, 72) if model == "small" else (p.crop_size[0], p.resize_size[0])
    if image_size < 0:
        raise UserError("--image-size is a number of pixels", got=image_size, needed="> 0, or 0 for the weights' own")
    if image_size:
        crop, resize = image_size, round(image_size * resize / crop)
    return Preprocessing(resize, crop, p.interpolation, tuple(p.mean), tuple(p.std))


class Start(NamedTuple):
    """A model, the tensors that it started from (None: from scratch), and the names of the new ones (its head)."""

    model: nn.Module
    pretrained: dict[str, Tensor] | None = None
    fresh: tuple[str, ...] = ()


def build(model: str, weights: str, n_classes: int, prepare: Preprocessing) -> Start:
    """Return the net with a head for `n_classes` that starts at zero, so that all classes are equally likely. Downloads only requested
    weights that are not cached ($TORCH_HOME)."""
    sized = {}
    if model.startswith("vit_"):
        sized = {"image_size": prepare.crop}
    elif model == "maxvit_t":
        sized = {"input_size": (prepare.crop, prepare.crop)}
    try:
        net = models.get_model(model, weights=None, num_classes=n_classes, **sized)
    except (AssertionError, ValueError) as error:
        raise UserError(f"{model} cannot be built for pictures of {prepare.crop} pixels", got=error,
                        next="another --image-size (vision transformers: a multiple of their patches)") from None  # fmt: skip
    # RegNets compute their widths with tensors, which must have values.
    with torch.device("cpu" if model.startswith("regnet") else "meta"):
        other = models.get_model(model, weights=None, num_classes=n_classes + 1, **sized).eval()
        try:
            with torch.no_grad():
                other(torch.empty(1, 3, prepare.crop, prepare.crop))
        except RuntimeError as error:
            raise UserError(f"pictures of {prepare.crop} pixels are too small for {model}", got=str(error).splitlines()[0],
                            needed="something left behind its last stride", next="a larger --image-size") from None  # fmt: skip
    head, started = _loaded(net, other, model, weights, NAMES)
    for name, parameter in net.named_parameters():
        if name in head and net.get_submodule(name.rpartition(".")[0]).__class__ is nn.Linear:
            nn.init.zeros_(parameter)  # squeezenet's head is a convolution before a ReLU, which would stay at zero
    return Start(Normalised(net, prepare.mean, prepare.std), started, tuple(f"net.{n}" for n in head))


def segmenter(model: str, weights: str, n_classes: int) -> Start:
    """Return a segmentation net in the same way, without the auxiliary head of some weights."""
    p = find(model, weights, SEGMENTERS).transforms()
    net = models.get_model(model, weights=None, weights_backbone=None, num_classes=n_classes)
    with torch.device("meta"):
        other = models.get_model(model, weights=None, weights_backbone=None, num_classes=n_classes + 1)
    head, started = _loaded(net, other, model, weights, SEGMENTERS)
    for name, parameter in net.named_parameters():
        if name in head:  # 1x1 convolutions, the last layer
            nn.init.zeros_(parameter)
    return Start(Segmenting(net, p.mean, p.std), started, tuple(f"net.{n}" for n in head))


def detector(model: str, backbone: str, weights: str, n_classes: int, limits: dict[str, float]) -> Start:
    """Return torchvision's detector `model` on `backbone`, with a head for `n_classes` and the thresholds in `limits`. With weights, batch
    norm keeps its statistics (frozen, as in torchvision), because batches in detection are small."""
    made = models.list_models(module=models.detection, include=f"{DETECTORS[model]}_*")
    offered = [n.removeprefix(f"{DETECTORS[model]}_") for n in made]
    if backbone not in offered:
        raise unknown(f"backbone '{backbone}' of {model}", backbone, ["small", *offered])
    name, kind = f"{DETECTORS[model]}_{backbone}", detectors.KINDS[model]
    find(name, weights, made)
    build = lambda n: models.get_model(name, weights=None, weights_backbone=None, num_classes=n + kind.background)  # noqa: E731
    net = build(n_classes)
    with torch.device("meta"):
        other = build(n_classes + 1)
    head, started = _loaded(net, other, name, weights, made)
    if weights != "none":
        # The first ResNet-50 weights were trained without an epsilon in their norms; torchvision does the same.
        eps = 0.0 if name in ("fasterrcnn_resnet50_fpn", "retinanet_resnet50_fpn") else 1e-5
        _replace(net, nn.BatchNorm2d, lambda norm: frozen(norm, eps))
    mean, std = net.transform.image_mean, net.transform.image_std
    model = kind(net, mean, std)
    for key, value in limits.items():
        setattr(model.limits, key, value)
    return Start(model, started, tuple(f"net.{n}" for n in head))


def normed(start: Start, norm: Norm, run: Run) -> Start:
    """Replace the norms of a net: `batch` or `group` (from scratch), `frozen` (fixed statistics and weights of the file), or its `own`.
    Batch norm is synchronised over processes if the accelerator supports it."""
    model, scratch = start.model, start.pretrained is None
    if norm == "frozen" and scratch:
        raise UserError("--norm frozen has no statistics to keep", got="a net from scratch: mean 0 and variance 1 of no picture",
                        needed="--weights, whose statistics they are", next="--weights DEFAULT, or --norm group")  # fmt: skip
    if norm in ("batch", "group") and not scratch:
        raise UserError(f"--norm {norm} does not fit the weights", got="a net tuned to the norms it was trained with",
                        needed="own or frozen", next="--norm frozen, or --weights none")  # fmt: skip
    if norm == "frozen":
        _replace(model, nn.BatchNorm2d, lambda old: frozen(old, old.eps))
    elif norm == "group":
        _replace(model, nn.BatchNorm2d, grouped)
    elif norm == "batch":
        _replace(model, nn.GroupNorm, lambda old: nn.BatchNorm2d(old.num_channels))
    if run.world > 1 and run.device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return start._replace(model=model)


def frozen(norm: nn.BatchNorm2d, eps: float) -> FrozenBatchNorm2d:
    """Fixed statistics and weights, in any mode."""
    fixed = FrozenBatchNorm2d(norm.num_features, eps=eps)
    fixed.load_state_dict({k: v for k, v in norm.state_dict().items() if k != "num_batches_tracked"})
    return fixed


def grouped(norm: nn.BatchNorm2d) -> nn.GroupNorm:
    """GroupNorm (Wu & He 2018) with at least four channels per group: a single channel at 1x1 would always be 0."""
    groups = math.gcd(32, norm.num_features)
    while groups > 1 and norm.num_features // groups < 4:
        groups //= 2
    return nn.GroupNorm(groups, norm.num_features)


def _replace(module: nn.Module, kind: type, by: Callable) -> None:
    """Replace every module of that type inside `module` by the result of `by`."""
    for name, child in module.named_children():
        if isinstance(child, kind):
            if type(child) is not kind and type(child).__module__.startswith("timm"):  # with its activation inside
                raise UserError(
                    "the norms of this net cannot be exchanged", got=type(child).__name__, needed="--norm own"
                )
            setattr(module, name, by(child))
        else:
            _replace(child, kind, by)


def _loaded(
    net: nn.Module, other: nn.Module, model: str, weights: str, names: Sequence[str]
) -> tuple[list[str], dict | None]:
    """Load `weights` into `net`. Returns (tensors that depend on the number of classes, found with `other`, which has one class more; loaded
    tensors by their name in the started model)."""
    shapes = {n: t.shape for n, t in other.state_dict().items()}
    head, started = [n for n, t in net.state_dict().items() if t.shape != shapes[n]], None
    if weights != "none":
        found = find(model, weights, names)
        try:
            with network.time_limit():
                state = found.get_state_dict(progress=False, check_hash=True, weights_only=True)
        except (OSError, RuntimeError) as error:
            raise UserError(f"cannot get the weights {model} {found.name}", got=str(error).splitlines()[0], needed=found.url,
                            cause="no network, or a damaged file in the cache",
                            next=f"put the file into {torch.hub.get_dir()}/checkpoints, or start from scratch with --weights none",
                            ) from None  # fmt: skip
        state = {re.sub(r"(denselayer\d+\.(?:norm|conv))\.(\d\.)", r"\1\2", k): v for k, v in state.items()
                 if not k.startswith("aux_classifier.")}  # fmt: skip
        wanted = {
            n: t.shape for n, t in net.state_dict().items() if n not in head and not n.endswith("num_batches_tracked")
        }
        wrong = [n for n in wanted if n not in state or state[n].shape != wanted[n]]
        wrong += [n for n in state if n not in net.state_dict()]
        if wrong:
            raise UserError(f"the weights {found.name} do not fit {model}", got=f"{len(wrong)} tensors differ, e.g. {wrong[0]}",
                            needed="every tensor but the head's, of its shape",
                            cause="another --image-size than the weights' own, for a net that cannot do without, or another file "
                            f"under that name in {torch.hub.get_dir()}/checkpoints")  # fmt: skip
        net.load_state_dict({n: state[n] for n in wanted}, strict=False)
        started = {f"net.{n}": state[n] for n in wanted}
    return head, started
