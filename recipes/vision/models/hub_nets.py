"""Segmentation models of transformers by folder or hub id, each as a net that predicts every pixel: those with a class map (SegFormer, BEiT,
DPT, UperNet, MobileViT, ...) and those that classify masks (Mask2Former, MaskFormer, EoMT)."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core import UserError
from trainworthy.recipes.shared import hub
from trainworthy.recipes.vision.models.zoo import SEGMENTERS, Normalised, Start

QUERIES = ("mask2former", "maskformer", "eomt")
LEAST = 1e-6  # lower limit of a class's share at a pixel, so that its logarithm is finite
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


def named(model: str) -> bool:
    """Return whether `name` is a folder or owner/name, and not the name of a built-in net."""
    return model not in ("small", *SEGMENTERS) and ("/" in model or Path(model).is_dir())


class Semantic(Normalised):
    """Map (B, 3, H, W) in [0, 1] to logits (B, n, H, W), enlarged from about a quarter of that size."""

    def forward(self, images: Tensor) -> Tensor:
        said = self.net(pixel_values=(images - self.mean) / self.std)
        logits = said.logits if "logits" in said else by_queries(said.class_queries_logits, said.masks_queries_logits)
        return F.interpolate(logits, images.shape[-2:], mode="bilinear")


def by_queries(classes: Tensor, masks: Tensor) -> Tensor:
    """Combine (B, Q, n + 1), the class of each of Q masks with the last meaning none, and (B, Q, h, w), the masks, into (B, n, h, w): the
    logarithm of each class's share (MaskFormer's semantic inference; Cheng 2021)."""
    share = torch.einsum("bqc,bqhw->bchw", classes.float().softmax(-1)[..., :-1], masks.float().sigmoid())
    return share.clamp_min(LEAST).log()


def segmenter(model: str, weights: str, classes: Sequence[str]) -> Start:
    """Return the net with a head for `classes` that starts at zero, so that all classes are equally likely. `weights`: none, or DEFAULT for
    those of the folder or the hub."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # the head is replaced on purpose
    logging.disable_progress_bar()
    if weights not in ("none", "DEFAULT"):
        raise UserError(f"--weights {weights} of {model}", needed="DEFAULT (those of the folder or the hub) or none")
    needs = ("config.json",) if weights == "none" else ("preprocessor_config.json",)
    path = hub.locate(model, "--model", packaged="small, a net of torchvision", needs=needs, weights=weights != "none")
    config = AutoConfig.from_pretrained(
        path, id2label=dict(enumerate(classes)), label2id={c: i for i, c in enumerate(classes)}
    )
    kind = _kind(config, model)
    for head in ("use_auxiliary_head", "auxiliary_head"):  # a second head that only the library's own loss uses
        if hasattr(config, head):
            setattr(config, head, False)
    net, missing = kind.from_config(config), []
    if weights != "none":
        net, found = kind.from_pretrained(path, config=config, ignore_mismatched_sizes=True, dtype=torch.float32,
                                          output_loading_info=True)  # fmt: skip
        missing = sorted(found["missing_keys"])
    head = _head(kind, config, net)
    for name, module in net.named_modules():
        if name.endswith("swin.layernorm"):  # Swin's last norm, after the layers that masks are made from
            module.requires_grad_(False)
    for name, parameter in net.named_parameters():
        if name in head:
            nn.init.zeros_(parameter)
    state = net.state_dict()
    began = {
        k: v.clone() for k, v in state.items() if k not in (*head, *missing) and not k.endswith("num_batches_tracked")
    }
    if 2 * sum(v.numel() for v in began.values()) < sum(v.numel() for v in state.values()):
        raise UserError(f"the weights of {model} do not fit its configuration", needed="most of the net",
                        got=f"{len(missing)} tensors are not in the file, e.g. {missing[0]}", cause="another model's")  # fmt: skip
    mean, std = _normalisation(path, model) if weights != "none" else (MEAN, STD)
    started = None if weights == "none" else {f"net.{k}": v for k, v in began.items()}
    return Start(Semantic(net, mean, std), started, tuple(f"net.{k}" for k in (*head, *missing)))


def configured(model: nn.Module) -> dict[str, Any] | None:
    """Return what config.json of an export needs for from_pretrained, or None for nets that are not from transformers."""
    if not isinstance(model, Semantic):
        return None
    theirs = json.loads(model.net.config.to_json_string(use_diff=False))
    normalised = {"image_mean": model.mean.flatten().tolist(), "image_std": model.std.flatten().tolist()}
    return theirs | normalised | {"architectures": [type(model.net).__name__], "library": "transformers"}


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


def _head(kind: Any, config: Any, net: nn.Module) -> list[str]:
    """Return the tensors that depend on the number of classes, found with a net that has one class more."""
    more = copy.deepcopy(config)
    more.num_labels = config.num_labels + 1
    with torch.device("meta"):
        shapes = {k: v.shape for k, v in kind.from_config(more).state_dict().items()}
    return [k for k, v in net.state_dict().items() if shapes[k] != v.shape]


def _normalisation(path: str, model: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return mean and standard deviation of the weights' preprocessing."""
    from transformers import AutoImageProcessor

    try:
        found = AutoImageProcessor.from_pretrained(path)
        return found.image_mean, found.image_std
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"--model {model} does not say how its pictures are normalised", got=str(error).splitlines()[0],
                        needed="preprocessor_config.json with image_mean and image_std") from None  # fmt: skip
