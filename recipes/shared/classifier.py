"""A scoring model for generated digits, trained on real digits only: the export of vision/classify, trained also on
small images.

The real recipe makes it on first use, behind its own gates. It is cached under a hash of what it depends on.
"""

import errno
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base import planning
from trainworthy.core.base.errors import UserError
from trainworthy.core.data import assets
from trainworthy.core.recipe.registry import find
from trainworthy.recipes.shared import digits, exports, other_recipes
from trainworthy.recipes.vision.classify import ResNet

EPOCHS = 24
NEEDED = 0.98  # a less accurate model cannot distinguish 99% from 97%


@dataclass
class Classifier:
    """Classifies images (B, C, H, W) in [-1, 1] of any size."""

    body: nn.Module
    """Images (B, C, side, side) in [0, 1] -> features (B, D)."""
    head: nn.Module
    """Features -> (B, n_classes)."""
    shape: tuple[int, int]
    """Channels and side that `body` reads."""
    description: str
    """Its origin and its own accuracy, for display."""
    classes: tuple[str, ...] = digits.CLASSES

    @property
    def frozen_modules(self) -> dict[str, nn.Module]:
        """Its modules that core must keep frozen; an exported program is constant anyway."""
        return {"classifier": nn.Sequential(self.body, self.head)} if isinstance(self.body, ResNet) else {}

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(class (B,), features (B, D))."""
        features = self.features(images)
        return self.head(features).argmax(1), features

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """(B, n_classes)."""
        return self.head(self.features(images))

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """(B, D)."""
        channels, side = self.shape
        images = F.interpolate((images.float().clamp(-1, 1) + 1) / 2, size=side, mode="bilinear", align_corners=False)
        if channels == 1:
            images = images.mean(1, keepdim=True)  # a generator may produce colour images
        return self.body.to(images.device)(images.expand(-1, channels, -1, -1))


@cache
def load(side: int) -> Classifier:
    """Load the scoring model for digits of `side` pixels; its features are the input of its last layer. From 16 pixels
    on, it is the same net."""
    # The hash excludes core: a change of core that alters the result of vision/classify fails that recipe's tests, and the scoring model
    # is measured at every use.
    recipe = find("vision/classify").path
    through = min(side, 16)  # a net trained on full and on 16-pixel digits also handles sizes between
    key = {"settings": _settings(through), "torch": torch.__version__}
    folder = assets.built(f"judge-{through}", key, lambda folder: _build(folder, through), takes="2 to 3 min",
                          sources=[recipe, recipe.parent / "data" / "pictures.py", digits.__file__])  # fmt: skip
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    net = ResNet(state["mean"], state["std"], config["widths"], len(config["classes"])).eval().requires_grad_(False)
    net.load_state_dict(state)
    head, net.head = net.head, nn.Identity()
    classifier = Classifier(net, head, (1, 28), "")
    images, labels = digits.load()
    _, held_out = digits.split(labels)
    right = (classifier(digits.small(images[held_out], side))[0] == labels[held_out]).float().mean().item()
    if right < NEEDED:
        raise UserError("the classifier that scores generated digits is not accurate enough", got=f"{right:.1%} of real ones right",
                        needed=f"{NEEDED:.0%}", next=f"remove {folder}; it is then trained again")  # fmt: skip
    seconds = json.loads((folder / "seconds.json").read_text())
    classifier.description = (
        f"vision/classify, itself right on {right:.1%} of held-out digits at {side} pixels; built once, {seconds:.0f} s"
    )
    return classifier


def chosen(setting: str, value: str, path: str, classes: Sequence[str], side: int) -> Classifier:
    """Return the classifier that `setting` names: `digits`, or a vision/classify run or its export folder.

    It must know the classes of the data at `path`, in their order, else UserError. To describe data (`trainworthy data`) that of digits
    is not built.
    """
    again = f"trainworthy run vision/classify --data.path {path}, then {setting} RUN/export"
    if planning.is_describing_data and value == "digits":
        return Classifier(nn.Identity(), nn.Identity(), (1, 28), value)
    if value == "digits":
        known, scoring = digits.CLASSES, None
    else:
        scoring = _exported(Path(value), setting, again)
        known = scoring.classes
    if tuple(classes) != known and not planning.active:
        raise UserError(f"{setting} {value}: a classifier of other classes", got=f"{len(known)} classes: {_first(known)}",
                        needed=f"those of --data.path {path}, in this order: {_first(classes)}", next=again)  # fmt: skip
    return scoring or load(side)


def _first(classes: Sequence[str]) -> str:
    return ", ".join(classes[:9]) + ", ..." * (len(classes) > 9)


@cache
def _exported(path: Path, setting: str, again: str) -> Classifier:
    """Load the model of an export; its features are its logits."""
    folder = path / "export" if (path / "export").is_dir() else path
    try:
        config = json.loads((folder / "config.json").read_text())
        if not (folder / "model.pt2").is_file():  # torch.export would print a traceback
            raise FileNotFoundError(errno.ENOENT, "no such file", str(folder / "model.pt2"))
        program = torch.export.load(folder / "model.pt2").module()
        fit, classes = config["preprocessing"], tuple(config["classes"])
    except (FileNotFoundError, KeyError) as error:
        got = f"no {error.filename}" if isinstance(error, FileNotFoundError) else f"no {error} in its config.json"
        raise UserError(
            f"{setting} {path}: no classifier there",
            got=got,
            needed="the export folder of a vision/classify run",
            cause=other_recipes.that_read(folder, "pictures"),
            next=again,
        ) from None
    return Classifier(program, nn.Identity(), (3, fit["crop"]) if fit else (1, 28), f"the export in {folder}", classes)


def _settings(through: int) -> list[str]:
    return ["--data.through", str(through), "--train.epochs", str(EPOCHS), "--train.eval-every", str(EPOCHS)]


def _build(folder: Path, through: int) -> None:
    """Run vision/classify and keep its export."""
    with tempfile.TemporaryDirectory() as out:
        run = exports.made("vision/classify", _settings(through), out, what="the scoring model of generated digits")
        for file in ("config.json", "model.safetensors"):
            os.replace(run / "export" / file, folder / file)
