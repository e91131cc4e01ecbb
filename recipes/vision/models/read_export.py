"""Reads the exports of classify, segment and detect as a user would: json, torch and torchvision, nothing of this project.

`model.pt2` is a program that needs only torch. If config.json has `"library": "torchvision"`, `model.safetensors` is also a state
dict of torchvision's own classifier; with `"library": "transformers"`, `from_pretrained` reads the folder.
"""

import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision import models
from torchvision.transforms import v2


def load(folder: str) -> tuple[dict, dict]:
    """Return (config.json, {name: function of a batch of images (B, C, H, W) in [0, 1]})."""
    config = json.loads((Path(folder) / "config.json").read_text())
    ways = {"model.pt2": torch.export.load(Path(folder) / "model.pt2").module()}
    if config.get("library") == "torchvision" and config.get("preprocessing") and config["norm"] in ("own", "frozen"):
        ways["torchvision"] = _classifier(config, Path(folder) / "model.safetensors")
    if config.get("library") == "transformers" and config.get("preprocessing"):
        ways["transformers"] = _pretrained(config, folder)
    return config, ways


def _classifier(config: dict, file: Path):
    """Return torchvision's net with the exported weights, after the normalisation in config.json."""
    from safetensors.torch import load_file

    name, size = config["architecture"], config["preprocessing"]["crop"]
    sized = (
        {"image_size": size} if name.startswith("vit_") else {"input_size": (size, size)} if name == "maxvit_t" else {}
    )
    net = models.get_model(name, weights=None, num_classes=config["num_classes"], **sized).eval()
    missing, extra = net.load_state_dict(load_file(file), strict=False)
    if extra or any(not n.endswith("num_batches_tracked") for n in missing):
        raise ValueError(f"model.safetensors is not a state dict of {name}: {[*missing, *extra][:3]}")
    mean, std = (torch.tensor(config["preprocessing"][k]).view(-1, 1, 1) for k in ("mean", "std"))
    return lambda pictures: net((pictures - mean) / std)


def _pretrained(config: dict, folder: str):
    """Return the classifier of transformers in the folder, after the normalisation in config.json."""
    from transformers import AutoModelForImageClassification

    net = AutoModelForImageClassification.from_pretrained(folder).eval()
    mean, std = (torch.tensor(config["preprocessing"][k]).view(-1, 1, 1) for k in ("mean", "std"))
    other = {"interpolate_pos_encoding": True} if config["interpolated"] else {}
    return lambda pictures: net(pixel_values=(pictures - mean) / std, **other).logits


def answer(loaded: tuple[dict, dict], sample: dict) -> dict[str, Tensor]:
    """Return {name: its output} for one image (C, H, W) in 0-255."""
    config, ways = loaded
    if "ready" in sample:
        return {way: flat(net(sample["ready"][None]), sample["ready"]) for way, net in ways.items()}
    picture = sample["picture"].float() / 255
    if "shorter" in config:
        picture = canvas(picture, config)
    elif "ignore_index" in config:
        picture = window(picture, config, sample["window"])
    elif config.get("preprocessing"):
        picture = prepared(picture, config["preprocessing"])
    return {way: flat(net(picture[None]), picture) for way, net in ways.items()}


def prepared(picture: Tensor, how: dict) -> Tensor:
    """Resize the shorter side, crop the centre, return three channels."""
    by = v2.InterpolationMode(how["interpolation"])
    picture = v2.functional.resize(picture, [how["resize"]], interpolation=by, antialias=True)
    return v2.functional.center_crop(picture, [how["crop"]]).expand(3, -1, -1).clamp(0, 1)


def window(picture: Tensor, config: dict, place: list[int]) -> Tensor:
    """Return the window (left, top, side) of an image, resized as config.json says; zeros beyond its edges."""
    left, top, side = place
    if config["resize"]:
        h, w = picture.shape[1:]
        size = [max(1, round(s * config["resize"] / min(h, w))) for s in (h, w)]
        picture = v2.functional.resize(picture, size, antialias=True)
    part = picture[:, top : top + side, left : left + side]
    return F.pad(part, (0, side - part.shape[2], 0, side - part.shape[1]))


def canvas(picture: Tensor, config: dict) -> Tensor:
    """Resize as config.json says and pad on the right and below with its fill (or black)."""
    side, (h, w) = config["image_size"], picture.shape[1:]
    shorter = config["shorter"]
    by = (shorter, min(h, w)) if shorter and shorter * max(h, w) < side * min(h, w) else (side, max(h, w))
    to = [max(1, round(s * by[0] / by[1])) for s in (h, w)]
    if to != [h, w]:
        picture = v2.functional.resize(picture, to, antialias=True)
    whole = torch.zeros(3, side, side) + torch.tensor(config["fill"] or [0.0]).view(-1, 1, 1)
    whole[:, : to[0], : to[1]] = picture.clamp(0, 1)
    return whole


def flat(said: Tensor | tuple[Tensor, Tensor], picture: Tensor) -> Tensor:
    """Return one tensor for one image: logits, or (A, 4 + n) boxes as shares of the canvas next to the scores of every class."""
    if isinstance(said, Tensor):
        return said[0]
    boxes, scores = said
    return torch.cat([boxes[0] / picture.shape[-1], scores[0]], 1)
