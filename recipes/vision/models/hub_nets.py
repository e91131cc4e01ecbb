"""Nets of transformers by folder or hub id.

Classifiers: every model that has an image classifier there (ResNet, ConvNeXt, ViT, Swin, EfficientNet, DINOv2, ...), and timm's, where the
package timm is installed. Segmentation, each as a net that predicts every pixel: models with a class map (SegFormer, BEiT, DPT, UperNet,
MobileViT, ...) and those that classify masks (Mask2Former, MaskFormer, EoMT).
"""

import copy
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import v2
from trainworthy.core import UserError
from trainworthy.recipes.shared import hub, other_recipes
from trainworthy.recipes.vision.models.zoo import NAMES, SEGMENTERS, Normalised, Preprocessing, Start

QUERIES = ("mask2former", "maskformer", "eomt", "eomt_dinov3")
LEAST = 1e-6  # lower limit of a class's share at a pixel, so that its logarithm is finite
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


def named(model: str) -> bool:
    """Return whether `name` is a folder or owner/name, and not the name of a built-in net."""
    return model not in ("small", *NAMES, *SEGMENTERS) and ("/" in model or Path(model).is_dir())


class Semantic(Normalised):
    """Map (B, 3, H, W) in [0, 1] to logits (B, n, H, W), enlarged from about a quarter of that size."""

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.net(pixel_values=(images - self.mean) / self.std)
        logits = (
            outputs.logits
            if "logits" in outputs
            else by_queries(outputs.class_queries_logits, outputs.masks_queries_logits)
        )
        return F.interpolate(logits, images.shape[-2:], mode="bilinear")


def by_queries(classes: Tensor, masks: Tensor) -> Tensor:
    """Combine (B, Q, n + 1), the class of each of Q masks with the last meaning none, and (B, Q, h, w), the masks, into (B, n, h, w): the
    logarithm of each class's share (MaskFormer's semantic inference; Cheng 2021)."""
    share = torch.einsum("bqc,bqhw->bchw", classes.float().softmax(-1)[..., :-1], masks.float().sigmoid())
    return share.clamp_min(LEAST).log()


class Classifier(Normalised):
    """Map (B, 3, H, W) in [0, 1] to logits (B, n)."""

    def __init__(self, net: nn.Module, prepare: Preprocessing, *, interpolated: bool):
        super().__init__(net, prepare.mean, prepare.std)
        self.prepare = prepare
        self.more = {"interpolate_pos_encoding": True} if interpolated else {}
        """For pictures of another size than the weights' own."""

    def forward(self, images: Tensor) -> Tensor:
        return self.net(pixel_values=(images - self.mean) / self.std, **self.more).logits


def preprocessing(model: str, weights: str, image_size: int = 0) -> Preprocessing:
    """Return the preprocessing of the weights, or without them ImageNet's for the size of the configuration, scaled to `image_size` pixels if
    that is not 0. Pictures are always cropped, where some processors change their proportions."""
    path, config = _located(model, weights), None
    mean, std, crop, resize, by = MEAN, STD, 0, 0, 3
    if weights != "none":
        found = _processor(path, model)
        if timm := getattr(found, "data_config", None):
            mean, std, crop = timm["mean"], timm["std"], timm["input_size"][-1]
            resize, by = round(crop / timm.get("crop_pct", 0.875)), {"bilinear": 2}.get(timm["interpolation"], 3)
        else:
            mean, std, by = found.image_mean, found.image_std, int(found.resample)
            resize = _side(found.size)
            if share := getattr(found, "crop_pct", None):  # ConvNeXt; large pictures are not cropped
                crop, resize = resize, round(resize / share) if resize < 384 else resize
            else:
                crop = _side(found.crop_size) if getattr(found, "do_center_crop", False) and found.crop_size else resize
    else:
        config = _configuration(path)
        side = getattr(_seeing(config), "image_size", None) or 224
        crop = side if isinstance(side, int) else side[0]
        resize = round(crop * 256 / 224)
    if image_size < 0:
        raise UserError("--image-size is a number of pixels", got=image_size, needed="> 0, or 0 for the weights' own")
    if image_size:
        crop, resize = image_size, round(image_size * resize / crop)
    way = v2.InterpolationMode.BILINEAR if by == 2 else v2.InterpolationMode.BICUBIC
    return Preprocessing(resize, crop, way, tuple(mean), tuple(std))


def _side(size: Any) -> int:
    """Return the pixels of a processor's `size`: {"shortest_edge": 256}, {"height": 224, "width": 224}."""
    size = dict(size)
    return size.get("shortest_edge") or size["height"]


def classifier(model: str, weights: str, classes: Sequence[str], prepare: Preprocessing) -> Start:
    """Return a classifier with a head for `classes` that starts at zero, so that all classes are equally likely. `weights`: none, or
    DEFAULT for those of the folder or the hub."""
    from transformers import AutoModelForImageClassification as Auto

    path = _located(model, weights)
    config = _configuration(path, classes)
    if type(config) not in Auto._model_mapping:
        raise UserError(f"--model {model} does not classify pictures", got=f"a model of type {config.model_type}",
                        cause=other_recipes.that_read(path, "pictures"),
                        needed="resnet, convnext, vit, swin, efficientnet, dinov2, ..., or one of timm")  # fmt: skip
    sees = _seeing(config)
    patch, side, own = (getattr(sees, k, None) for k in ("patch_size", "image_size", "num_channels"))
    if isinstance(patch, int) and prepare.crop % patch:
        raise UserError(f"{model} cannot be built for pictures of {prepare.crop} pixels", needed=f"a multiple of its patches of {patch}",
                        next=f"--image-size {max(1, round(prepare.crop / patch)) * patch}")  # fmt: skip
    if own not in (None, 3):
        raise UserError(f"--model {model} does not read pictures of three colours", got=f"{own} channels", needed="3")
    other = isinstance(side, int) and side != prepare.crop
    if other and weights == "none":
        sees.image_size, other = prepare.crop, False
    start = _started(Auto, config, path, model, weights, prepare.crop)
    takes = "interpolate_pos_encoding" in inspect.signature(start.model.forward).parameters
    net = Classifier(start.model, prepare, interpolated=other and takes)
    return start._replace(model=net)


def segmenter(model: str, weights: str, classes: Sequence[str], window: int = 64) -> Start:
    """Return a segmentation net in the same way, for windows of that many pixels."""
    path = _located(model, weights)
    config = _configuration(path, classes)
    kind = _kind(config, model)
    for head in ("use_auxiliary_head", "auxiliary_head"):  # a second head that only the library's own loss uses
        if hasattr(config, head):
            setattr(config, head, False)
    side = getattr(config, "image_size", None)
    if side is not None and weights == "none":
        config.image_size = side = window
    start = _started(kind, config, path, model, weights, window)
    if side not in (None, window):
        _reads(start.model, model, side, window)
    mean, std = _normalisation(path, model) if weights != "none" else (MEAN, STD)
    return start._replace(model=Semantic(start.model, mean, std))


@torch.no_grad()
def _reads(net: nn.Module, model: str, side: Any, window: int) -> None:
    """Check that a net whose positions were learnt for pictures of `side` pixels reads windows of another size."""
    try:
        net(pixel_values=torch.zeros(1, 3, window, window))
    except RuntimeError as error:
        own = side if isinstance(side, int) else max(side)
        raise UserError(f"--model {model} does not read windows of {window} pixels", got=str(error).splitlines()[0],
                        needed=f"windows of {own} pixels, for which its positions were learnt", next=f"--window {own}") from None  # fmt: skip


def _located(model: str, weights: str) -> str:
    """Return the folder or hub id of `model`, as `from_pretrained` takes it."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # the head is replaced on purpose
    logging.disable_progress_bar()
    if weights not in ("none", "DEFAULT"):
        raise UserError(f"--weights {weights} of {model}", needed="DEFAULT (those of the folder or the hub) or none")
    needs = ("config.json",) if weights == "none" else ("preprocessor_config.json",)
    if weights != "none" and _of_timm(Path(model)):
        needs = ()  # it is in config.json
    return hub.locate(model, "--model", packaged="small, a net of torchvision", needs=needs, weights=weights != "none")


def _of_timm(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and "pretrained_cfg" in json.loads(file.read_text())


def _configuration(path: str, classes: Sequence[str] = ()) -> Any:
    """Return the model's configuration, with `classes` if there are any."""
    from transformers import AutoConfig

    named = {"id2label": dict(enumerate(classes)), "label2id": {c: i for i, c in enumerate(classes)}} if classes else {}
    try:
        config = AutoConfig.from_pretrained(path, **named)
        if classes:
            config.num_labels = len(classes)  # a file may have another number of its own (PVT, timm)
            config.id2label, config.label2id = named["id2label"], named["label2id"]
        if classes and hasattr(config, "label_names"):  # timm's names of the classes, which a reader prefers
            config.label_names = list(classes)
        return config
    except ImportError as error:
        raise _without_timm(path, error) from None


def _without_timm(path: str, error: ImportError) -> UserError:
    """Return the error of a net whose package is missing: timm is an extra of transformers."""
    return UserError(
        f"--model {path} needs another package", got=str(error).strip().splitlines()[0], next="pip install timm"
    )


def _started(kind: Any, config: Any, path: str, model: str, weights: str, side: Any) -> Start:
    """Return the library's net of `config` with its weights and a head at zero, before it is wrapped as `net`; names are those after it.
    What its answer does not depend on is frozen. `side`: of a picture that it can read."""
    try:
        net, missing = kind.from_config(config), []
    except ImportError as error:
        raise _without_timm(path, error) from None
    takes = inspect.signature(net.forward).parameters
    if "pixel_values" not in takes or "spatial_shapes" in takes:  # SigLIP 2 reads patches that its processor made
        raise UserError(
            f"--model {model} does not read pictures",
            got=type(net).__name__,
            needed="a net that takes pixel_values (B, 3, H, W)",
        )
    if weights != "none":
        net, found = kind.from_pretrained(path, config=config, ignore_mismatched_sizes=True, dtype=torch.float32,
                                          output_loading_info=True)  # fmt: skip
        missing = sorted(found["missing_keys"])
    larger = _larger(kind, config)
    head, unused = _head(larger, net), _unused(larger, side)
    for name, parameter in net.named_parameters():
        if name in head:
            nn.init.zeros_(parameter)
        if name in unused:
            parameter.requires_grad_(False)
    state = net.state_dict()
    began = {
        k: v.clone() for k, v in state.items() if k not in (*head, *missing) and not k.endswith("num_batches_tracked")
    }
    if 2 * sum(v.numel() for v in began.values()) < sum(v.numel() for v in state.values()):
        raise UserError(f"the weights of {model} do not fit its configuration", needed="most of the net",
                        got=f"{len(missing)} tensors are not in the file, e.g. {missing[0]}", cause="another model's")  # fmt: skip
    started = None if weights == "none" else {f"net.{k}": v for k, v in began.items()}
    return Start(net, started, tuple(f"net.{k}" for k in (*head, *missing)))


def configured(model: nn.Module) -> dict[str, Any] | None:
    """Return what config.json of an export needs for from_pretrained, or None for nets that are not from transformers."""
    if not isinstance(model, (Semantic, Classifier)):
        return None
    theirs = json.loads(model.net.config.to_json_string(use_diff=False))
    normalised = {"image_mean": model.mean.flatten().tolist(), "image_std": model.std.flatten().tolist()}
    interpolated = {"interpolated": bool(getattr(model, "more", {}))}
    if "pretrained_cfg" in theirs and isinstance(model, Classifier):  # timm's image processor reads it
        fit = model.prepare
        theirs["pretrained_cfg"] |= {"mean": fit.mean, "std": fit.std, "interpolation": fit.interpolation.value, "crop_mode": "center",
                                     "crop_pct": fit.crop / fit.resize, "input_size": (3, fit.crop, fit.crop)}  # fmt: skip
    return theirs | normalised | interpolated | {"architectures": [type(model.net).__name__], "library": "transformers"}


def write_processor(folder: Path, model: nn.Module) -> None:
    """Write preprocessor_config.json next to the weights of a classifier of transformers, for `pipeline` and `AutoImageProcessor`: a resize
    of the shorter side and a crop, as in training. timm's nets have theirs in config.json."""
    if not isinstance(model, Classifier) or hasattr(model.net.config, "pretrained_cfg"):
        return
    from transformers import BitImageProcessor

    fit = model.prepare
    BitImageProcessor(
        size={"shortest_edge": fit.resize}, crop_size={"height": fit.crop, "width": fit.crop}, image_mean=list(fit.mean),
        image_std=list(fit.std), resample=2 if fit.interpolation is v2.InterpolationMode.BILINEAR else 3,
    ).save_pretrained(folder)  # fmt: skip


def _kind(config: Any, model: str) -> Any:
    """Return the class that predicts pixels."""
    from transformers import AutoModelForSemanticSegmentation as Maps
    from transformers import AutoModelForUniversalSegmentation as Masks

    if type(config) in Maps._model_mapping:
        return Maps
    if config.model_type in QUERIES:
        return Masks
    raise UserError(f"--model {model} does not answer for pixels", got=f"a model of type {config.model_type}",
                    needed=f"semantic segmentation (segformer, beit, dpt, upernet, ...) or {', '.join(QUERIES)}")  # fmt: skip


def _seeing(config: Any) -> Any:
    """Return the part of a configuration that is about pictures: CLIP's is of two towers."""
    return getattr(config, "vision_config", None) or config


def _larger(kind: Any, config: Any) -> nn.Module:
    """Return the same net without memory, with one class more."""
    more = copy.deepcopy(config)
    more.num_labels = config.num_labels + 1
    with torch.device("meta"):
        return kind.from_config(more)


def _head(larger: nn.Module, net: nn.Module) -> list[str]:
    """Return the tensors that depend on the number of classes."""
    shapes = {k: v.shape for k, v in larger.state_dict().items()}
    return [k for k, v in net.state_dict().items() if shapes[k] != v.shape]


def _unused(net: nn.Module, side: Any) -> set[str]:
    """Return the parameters of a net without memory that its answer does not depend on: a mask token of pretraining, the last norm of a
    backbone whose earlier layers are read."""
    pictures = torch.zeros(2, 3, *((side, side) if isinstance(side, int) else side), device="meta")
    try:
        found = net.train()(pixel_values=pictures)
        (
            found.logits.sum()
            if "logits" in found
            else found.class_queries_logits.sum() + found.masks_queries_logits.sum()
        ).backward()
    except Exception:  # an operation that needs values: what the known nets do not use
        return {
            n
            for n, _ in net.named_parameters()
            if n.endswith(("mask_token", "swin.layernorm.weight", "swin.layernorm.bias"))
        }
    return {n for n, p in net.named_parameters() if p.grad is None}


def _normalisation(path: str, model: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return mean and standard deviation of the weights' preprocessing."""
    found = _processor(path, model)
    return found.image_mean, found.image_std


def _processor(path: str, model: str) -> Any:
    """Return the image processor of the weights."""
    from transformers import AutoImageProcessor

    try:
        found = AutoImageProcessor.from_pretrained(path)
        _ = getattr(found, "data_config", None) or (found.image_mean, found.image_std)
        return found
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"--model {model} does not say how its pictures are normalised", got=str(error).splitlines()[0],
                        needed="preprocessor_config.json with image_mean and image_std") from None  # fmt: skip
