"""A judge of generated digits that never saw the generator: the export of vision/classify, trained to read small pictures, too.

It is a built asset: made by the real recipe behind its own gates on first use, then cached under what it depends on.
"""

import json
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base.errors import UserError
from trainworthy.core.data import assets
from trainworthy.core.recipe.registry import find
from trainworthy.recipes.shared import digits, exports
from trainworthy.recipes.vision.classify import ResNet

EPOCHS = 24
NEEDED = 0.98  # a judge that is wrong more often cannot tell 99% from 97%


@dataclass
class Judge:
    """Says which class pictures (B, C, H, W) in [-1, 1], of any size, show."""

    body: nn.Module
    """Images (B, C, side, side) in [0, 1] -> features (B, D)."""
    head: nn.Module
    """Features -> (B, n_classes)."""
    shape: tuple[int, int]
    """Channels and side that `body` reads."""
    told: str
    """Where it comes from and how good it is itself."""

    @property
    def frozen_modules(self) -> dict[str, nn.Module]:
        """What core can hold still of it; an exported program is a constant by itself."""
        return {"judge": nn.Sequential(self.body, self.head)} if isinstance(self.body, ResNet) else {}

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
            images = images.mean(1, keepdim=True)  # digits of a generator that makes colours
        return self.body.to(images.device)(images.expand(-1, channels, -1, -1))


@cache
def load(side: int) -> Judge:
    """The judge of digits of `side` pixels; its features are what its last layer reads. From 16 on it is one and the same net."""
    # Core is left out: a change of it that changed what vision/classify trains to would fail that recipe's own tests, and the judge
    # is measured at every use.
    recipe = find("vision/classify").path
    through = min(side, 16)  # a net that reads digits both whole and through 16 pixels reads those between
    key = {"settings": _settings(through), "torch": torch.__version__}
    folder = assets.built(f"judge-{through}", key, lambda folder: _build(folder, through),
                          sources=[recipe, recipe.with_name("pictures.py"), digits.__file__])  # fmt: skip
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    net = ResNet(state["mean"], state["std"], config["widths"], len(config["classes"])).eval().requires_grad_(False)
    net.load_state_dict(state)
    head, net.head = net.head, nn.Identity()
    judge = Judge(net, head, (1, 28), "")
    images, labels = digits.load()
    _, held_out = digits.split(labels)
    right = (judge(digits.small(images[held_out], side))[0] == labels[held_out]).float().mean().item()
    if right < NEEDED:
        raise UserError("the judge of generated digits is not good enough", got=f"{right:.1%} of real ones right",
                        needed=f"{NEEDED:.0%}", next=f"remove {folder}; it is then built anew")  # fmt: skip
    seconds = json.loads((folder / "seconds.json").read_text())
    judge.told = (
        f"vision/classify, itself right on {right:.1%} of held-out digits at {side} pixels; built once, {seconds:.0f} s"
    )
    return judge


@cache
def of(export: Path) -> Judge:
    """The judge in the export folder of a vision/classify run; its features are its logits."""
    try:
        config = json.loads((export / "config.json").read_text())
        program = torch.export.load(export / "model.pt2").module()
    except FileNotFoundError as error:
        raise UserError("no judge there", got=f"no {error.filename}", needed="the export folder of a vision/classify run",
                        next="trainworthy run vision/classify --data.path FOLDER; its run folder has it") from None  # fmt: skip
    fit = config["preprocessing"]
    return Judge(program, nn.Identity(), (3, fit["crop"]) if fit else (1, 28), f"the export in {export}")


def _settings(through: int) -> list[str]:
    return ["--data.through", str(through), "--train.epochs", str(EPOCHS), "--train.eval-every", str(EPOCHS)]


def _build(folder: Path, through: int) -> None:
    """The export of vision/classify is kept."""
    with tempfile.TemporaryDirectory() as out:
        run = exports.made("vision/classify", _settings(through), out, what="the judge of generated digits")
        for file in ("config.json", "model.safetensors"):
            os.replace(run / "export" / file, folder / file)
