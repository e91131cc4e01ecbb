"""Uses the export of vision/classify, vision/segment or vision/detect. It needs torch, torchvision, Pillow and, for Faster R-CNN, safetensors,
and nothing of Trainworthy.

  python export/use.py picture.jpg more/*.png     one line of JSON for each picture; of vision/segment also NAME.mask.png, with class ids

A run copies this file into its export as `use.py`, and checks with it that the export answers as the evaluated model does. Pictures are
read and prepared as in the evaluation, from config.json. `model.pt2` is a program that normalises its input itself; of Faster R-CNN it is
the backbone, and torchvision's net is built around it. If config.json has `"library": "torchvision"`, `model.safetensors` is also a state
dict of torchvision's own classifier; with `"library": "transformers"`, `from_pretrained` reads the folder.
"""

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F
from torchvision import models
from torchvision.ops import MultiScaleRoIAlign, batched_nms, clip_boxes_to_image
from torchvision.transforms import v2

Net = Callable[[Tensor], Any]


# ------------------------------------------------------------------------------------------------------- one picture
def open_export(folder: str) -> tuple[dict, Net]:
    """Return config.json, and the net as a function of images (B, C, H, W) in [0, 1]."""
    config = json.loads((Path(folder) / "config.json").read_text())
    return config, faster_rcnn(config, folder) if "pooled_levels" in config else program(folder)


def program(folder: str) -> Net:
    """Return the exported program, which runs on the CPU."""
    return torch.export.load(Path(folder) / "model.pt2").module()


class Backbone(torch.nn.Module):
    """The exported program as the backbone of a torchvision net."""

    def __init__(self, folder: str, levels: list[str], channels: int):
        super().__init__()
        self.maps: Net = program(folder).__call__  # no submodule: a program has no train() and eval()
        self.levels, self.out_channels = levels, channels

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.levels, self.maps(images), strict=True))


def faster_rcnn(config: dict, folder: str) -> Net:
    """Return torchvision's Faster R-CNN with the exported weights, on pictures that are on their canvas already."""
    from safetensors.torch import load_file

    detection, side = models.detection, config["image_size"]
    weights = {k: v for k, v in load_file(Path(folder) / "model.safetensors").items() if not k.startswith("backbone.")}
    settings: dict[str, Any] = {
        "min_size": side, "max_size": side, "size_divisible": 1, "image_mean": [0.0] * 3, "image_std": [1.0] * 3,
        "rpn_pre_nms_top_n_test": config["rpn_pre_nms_top_n"], "rpn_post_nms_top_n_test": config["rpn_post_nms_top_n"],
        **{k: config[k] for k in ("rpn_nms_thresh", "rpn_score_thresh")},
        **{f"box_{k}": config[k] for k in ("score_thresh", "nms_thresh", "detections_per_img")},
    }  # fmt: skip
    backbone = Backbone(folder, config["levels"], weights["rpn.head.bbox_pred.weight"].shape[1])
    if "num_classes" in config:  # a net of torchvision
        name = f"fasterrcnn_{config['backbone']}"
        net = models.get_model(name, weights=None, weights_backbone=None, num_classes=config["num_classes"], **settings)
        net.backbone = backbone
    else:
        sizes = torch.tensor(config["anchors"])
        anchors = detection.anchor_utils.AnchorGenerator(((1.0,) * len(sizes),), ((1.0,),))
        anchors.cell_anchors = [torch.cat([-sizes / 2, sizes / 2], 1)]
        n_classes, width = weights["roi_heads.box_predictor.cls_score.weight"].shape
        net = detection.FasterRCNN(
            backbone, rpn_anchor_generator=anchors,
            box_roi_pool=MultiScaleRoIAlign(config["pooled_levels"], config["pool_size"], config["sampling_ratio"]),
            box_head=detection.faster_rcnn.TwoMLPHead(weights["roi_heads.box_head.fc6.weight"].shape[1], width),
            box_predictor=detection.faster_rcnn.FastRCNNPredictor(width, n_classes), **settings,
        )  # fmt: skip
    missing, extra = net.load_state_dict(weights, strict=False)
    if extra or any(not n.startswith("backbone.") and not n.endswith("num_batches_tracked") for n in missing):
        raise ValueError(f"model.safetensors does not fit torchvision's Faster R-CNN: {[*missing, *extra][:3]}")
    return net.eval()


def read(file: str, config: dict) -> Tensor:
    """Return a picture (C, H, W) in 0-255: upright by its EXIF tag, alpha on white, 16 bits kept as fractions."""
    image, channels = ImageOps.exif_transpose(Image.open(file)), config.get("shape", [3])[0]
    if image.mode.startswith("I"):
        grey = torch.from_numpy(np.asarray(image).astype(np.float32)) / 257
        return grey.expand(channels, *grey.shape)
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    pixels = torch.from_numpy(np.array(image.convert("L" if channels == 1 else "RGB")))
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)


@torch.no_grad()
def classify(config: dict, net: Net, picture: Tensor) -> list[tuple[str, float]]:
    """Return (class, probability), the most likely class first."""
    image, size = picture.float() / 255, list(config["shape"][1:])
    if config["preprocessing"]:
        image = prepared(image, config["preprocessing"])
    elif list(image.shape[1:]) != size:
        image = v2.functional.resize(image, size, antialias=True)
    shares = net(image[None])[0].softmax(0).tolist()
    return sorted(zip(config["classes"], shares, strict=True), key=lambda one: -one[1])


@torch.no_grad()
def segment(config: dict, net: Net, picture: Tensor) -> Tensor:
    """Return the class id of every pixel (H, W) of a whole picture of any size.

    The net reads overlapping windows. A pixel gets the answer of the window in which it is farthest from the border. If config.json has a
    `resize`, the net reads the resized picture, and its logits are enlarged to the picture's own pixels."""
    stored, side, image = picture.shape[1:], config["window"], resized(picture.float() / 255, config["resize"])
    mask = torch.zeros(stored, dtype=torch.uint8)
    down, right = (windows(n, side, config["step"]) for n in image.shape[1:])
    for top, *own_rows in down:
        strip = torch.stack([window(image, left, top, side) for left, *_ in right])
        for logits, (left, *own_columns) in zip(net(strip), right, strict=True):
            # Logits between the pixels of the resized picture: bilinear along both axes, exact where it was not resized.
            slices = []
            for axis, start, own in ((1, top, own_rows), (2, left, own_columns)):
                pixels, at = covered(own, start, stored[axis - 1], image.shape[axis], side)
                below = at.floor().long()
                above, share = (below + 1).clamp_max(logits.shape[axis] - 1), at - below
                share = share.view(-1, 1) if axis == 1 else share
                logits = logits.index_select(axis, below).lerp(logits.index_select(axis, above), share)
                slices.append(pixels)
            mask[tuple(slices)] = logits.argmax(0).to(torch.uint8)
    return mask


def windows(length: int, side: int, step: int) -> list[tuple[int, int, int]]:
    """Return (start, first, last) of each window along an axis: it answers for pixels `first` to `last`, up to the middle of its overlap
    with the next window."""
    starts = [*range(0, max(length - side, 0), step), max(length - side, 0)]
    middles = [(a + side + b) // 2 for a, b in pairwise(starts)]
    return list(zip(starts, [0, *middles], [*middles, length], strict=True))


def covered(own: list[int], start: int, stored: int, length: int, side: int) -> tuple[slice, Tensor]:
    """Return the pixels, of `stored`, whose centres are in `own` (first, last) after resizing to `length`, and where they are in the
    window."""
    first, last = (-((length - 2 * edge * stored) // (2 * length)) for edge in own)
    at = (torch.arange(first, last) + 0.5) * (length / stored) - 0.5 - start
    return slice(first, last), at.clamp(0, min(side, length - start) - 1)


@torch.no_grad()
def detect(config: dict, net: Net, picture: Tensor) -> list[tuple[str, float, list[float]]]:
    """Return (class, score, [x1, y1, x2, y2] in the picture's pixels) of each object, best first: scores above `score_thresh`, after NMS."""
    image = canvas(picture.float() / 255, config)[None]
    if "pooled_levels" in config:
        found = net(image)[0]
        box, score, label = found["boxes"], found["scores"], found["labels"] - 1  # 0 is the background
    else:
        box, score, label = most_likely(config, *net(image))
    h, w = picture.shape[1:]
    high, wide = on_canvas(h, w, config)
    own = (box / torch.tensor([wide / w, high / h]).repeat(2)).clamp_min(0).minimum(torch.tensor([w, h, w, h]))
    names = [config["classes"][i] for i in label.tolist()]
    return list(zip(names, score.tolist(), own.tolist(), strict=True))


def most_likely(config: dict, boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return boxes (k, 4), scores and labels of one picture from those of every location: above the threshold, after NMS."""
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    sizes = config["level_sizes"]  # as torchvision does: of each level of the feature pyramid the best candidates
    for box, score in zip(boxes[0].split(sizes), scores[0].split(sizes), strict=True):
        place, label = (score > config["score_thresh"]).nonzero(as_tuple=True)
        best = score[place, label].topk(min(config["topk_candidates"], len(place)))
        place, label = place[best.indices], label[best.indices]
        kept.append((clip_boxes_to_image(box[place], (config["image_size"],) * 2), best.values, label))
    box, score, label = (torch.cat(part) for part in zip(*kept, strict=True))
    some = batched_nms(box, score, label, config["nms_thresh"])[: config["detections_per_img"]]
    return box[some], score[some], label[some]


def described(config: dict, net: Net, file: str) -> dict:
    """Return what is said of one picture file; a mask is written to the current folder."""
    picture = read(file, config)
    if "shorter" in config:
        return {"objects": [{"class": c, "score": s, "box": b} for c, s, b in detect(config, net, picture)]}
    if "ignore_index" in config:
        mask, name = segment(config, net, picture), f"{Path(file).stem}.mask.png"
        Image.fromarray(mask.numpy()).save(name)
        shares = {c: (mask == i).float().mean().item() for i, c in enumerate(config["classes"])}
        return {"mask": name, "shares": {c: share for c, share in shares.items() if share}}
    found = classify(config, net, picture)
    return {"class": found[0][0], "probability": found[0][1], "probabilities": dict(found)}


# ------------------------------------------------------------------------------------------------- for Trainworthy's check
def load(folder: str) -> tuple[dict, dict]:
    """Return (config.json, {name: function of a batch of images (B, C, H, W) in [0, 1]})."""
    config = json.loads((Path(folder) / "config.json").read_text())
    ways = {"model.pt2": program(folder)}
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
        picture = window(resized(picture, config["resize"]), *sample["window"])
    elif config.get("preprocessing"):
        picture = prepared(picture, config["preprocessing"])
    return {way: flat(net(picture[None]), picture) for way, net in ways.items()}


def prepared(picture: Tensor, how: dict) -> Tensor:
    """Resize the shorter side, crop the centre, return three channels."""
    by = v2.InterpolationMode(how["interpolation"])
    picture = v2.functional.resize(picture, [how["resize"]], interpolation=by, antialias=True)
    return v2.functional.center_crop(picture, [how["crop"]]).expand(3, -1, -1).clamp(0, 1)


def resized(picture: Tensor, shorter: int) -> Tensor:
    """Return an image whose shorter side has this many pixels; unchanged if that is 0."""
    if not shorter:
        return picture
    size = [max(1, round(s * shorter / min(picture.shape[1:]))) for s in picture.shape[1:]]
    return v2.functional.resize(picture, size, antialias=True)


def window(picture: Tensor, left: int, top: int, side: int) -> Tensor:
    """Return a square window of an image, with zeros beyond its edges."""
    part = picture[:, top : top + side, left : left + side]
    return F.pad(part, (0, side - part.shape[2], 0, side - part.shape[1]))


def on_canvas(h: int, w: int, config: dict) -> list[int]:
    """Return [height, width] on the net's square canvas."""
    side, shorter = config["image_size"], config["shorter"]
    by = (shorter, min(h, w)) if shorter and shorter * max(h, w) < side * min(h, w) else (side, max(h, w))
    return [max(1, round(s * by[0] / by[1])) for s in (h, w)]


def canvas(picture: Tensor, config: dict) -> Tensor:
    """Resize as config.json says and pad on the right and below with its fill (or black)."""
    to = on_canvas(*picture.shape[1:], config)
    if to != list(picture.shape[1:]):
        picture = v2.functional.resize(picture, to, antialias=True)
    side, colour = config["image_size"], torch.tensor(config["fill"] or [0.0])
    whole = torch.zeros(3, side, side) + colour.view(-1, 1, 1)
    whole[:, : to[0], : to[1]] = picture.clamp(0, 1)
    return whole


def flat(output: Tensor | tuple[Tensor, Tensor], picture: Tensor) -> Tensor:
    """Return one tensor for one image: logits, or (A, 4 + n) boxes as shares of the canvas next to the scores of every class."""
    if isinstance(output, Tensor):
        return output[0]
    boxes, scores = output
    return torch.cat([boxes[0] / picture.shape[-1], scores[0]], 1)


if __name__ == "__main__":
    about, exported = open_export(str(Path(__file__).parent))
    sys.stdout.reconfigure(encoding="utf-8")  # names of files and classes, also in a pipe
    damaged = 0
    for path in sys.argv[1:]:
        try:
            found = described(about, exported, path)
        except (OSError, SyntaxError) as error:  # damaged, or no picture
            found, damaged = {"error": str(error)}, damaged + 1
        print(json.dumps({"picture": path} | found, ensure_ascii=False))
    sys.exit(2 if damaged else 0)
