"""Images by class, resized to one size in [-1, 1], and the export of a generator."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
import torchvision
from diffusers.utils import logging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary
from torchvision.transforms import v2
from trainworthy.core import Tile
from trainworthy.core.base import seeds
from trainworthy.core.data import assets
from trainworthy.recipes.diffusion.models import pipeline
from trainworthy.recipes.shared import classifier as classifiers
from trainworthy.recipes.shared import digits, further_digits
from trainworthy.recipes.vision.data import pictures as labelled

logging.disable_progress_bar()  # progress bars for two small files are noise
LEAST = 5000
"""Pictures; fewer are decoded again in each process."""
REDUCED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Pictures: what they were, and the reduced ones."""


@dataclass
class Source(labelled.Source):
    """Which images, and who evaluates samples."""

    image_size: int = 16
    """Side in pixels, of training images and of samples."""
    classifier: str = "digits"
    """Model that classifies samples: `digits` (trained on first use, by vision/classify), or the export of a vision/classify run on the same
    classes."""


def read(source: Source) -> labelled.Labelled:
    """Every image (N, C, H, W) float32 in [-1, 1] with its label, and the rows of each split. They are decoded once per process."""
    return _read(type(source), astuple(source))


@lru_cache(2)
def _read(kind: type[Source], settings: tuple) -> labelled.Labelled:
    source = kind(*settings)
    if source.path == "digits":
        images, labels = digits.load()
        learn, held_out = digits.split(labels)
        images, labels, test = further_digits.appended(images, labels)
        every = digits.small(images, source.image_size)
        return labelled.Labelled(every, labels, digits.CLASSES, learn, held_out, test=test)
    found = labelled.load(source)
    return found._replace(images=_resized(found.images, source.image_size, len(found.labels)).float() / 127.5 - 1)


def _resized(images: labelled.Pictures, side: int, n: int) -> Tensor:
    """Return every image (n, C, side, side) as bytes; of many, those that an earlier process left in the cache."""
    fit = v2.Compose([v2.Resize(side), v2.CenterCrop(side)])
    digests = [images.digest(i) for i in range(n)] if n >= LEAST else []
    if not digests or None in digests:
        return torch.stack([fit(images[i]) for i in range(n)])

    def build(folder: Path) -> None:
        first = fit(images[0])
        kept = np.lib.format.open_memmap(folder / "pictures.npy", mode="w+", dtype=np.uint8, shape=(n, *first.shape))
        for i in range(n):
            kept[i] = fit(images[i]).numpy()
        kept.flush()

    mark = blake2b("\0".join(digests).encode(), digest_size=16).hexdigest()
    folder = assets.built(
        "pictures", {"files": mark, "side": side, "torchvision": torchvision.__version__}, build, sources=[__file__]
    )
    return torch.from_numpy(np.load(folder / "pictures.npy", mmap_mode="c"))


class Rows:
    """Some rows of a tensor without a copy of them: every split of every build reads the same memory."""

    def __init__(self, whole: Tensor, chosen: Tensor):
        self.whole, self.chosen = whole, chosen

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.chosen), *self.whole.shape[1:]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Tensor:
        return self.whole[self.chosen[index]]


def small(images: Tensor | Rows, side: int = 32) -> Tensor | Rows:
    """Return images (N, C, H, H) reduced to `side` pixels if they are larger: enough to classify them. Of rows, all are reduced once."""
    if images.shape[-1] <= side:
        return images
    if not isinstance(images, Rows):
        return F.adaptive_avg_pool2d(images, side)
    whole = images.whole
    owner = whole if whole._base is None else whole._base  # grey pictures are expanded anew in each build
    key = (whole._version, whole.shape, side)
    if owner not in REDUCED or REDUCED[owner][0] != key:
        REDUCED[owner] = (key, F.adaptive_avg_pool2d(whole, side))
    return Rows(REDUCED[owner][1], images.chosen)


def fixed_draws(split: str, index: int) -> torch.Generator:
    """Return the generator of one evaluation sample's noise and timestep: always the same, but different for each split."""
    return torch.Generator().manual_seed(seeds.derive("noise", *([] if split == "val" else [split]), index))


def classifier(source: Source, classes: Sequence[str]) -> classifiers.Classifier:
    """Return the model that classifies samples. It must know the data's classes, in their order."""
    return classifiers.chosen("--data.classifier", source.classifier, source.path, classes, source.image_size)


def tiles(pictures: Tensor, captions: list[str], good: list[float] | None = None) -> list[Tile]:
    """Return images (B, C, H, W) in about [-1, 1] as pictures to show."""
    rows = zip(captions, (pictures + 1) / 2, good or [None] * len(captions), strict=True)
    return [Tile(c, x, g) for c, x, g in rows]


def save_pipeline(folder: Path, unet: nn.Module, scheduler, vae: nn.Module | None = None) -> None:
    """Save what `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)` loads: parts, index and the pipeline's source."""
    kind = pipeline.LatentPipeline if vae else pipeline.ClassConditionalPipeline
    kind(unet, scheduler, *([vae] if vae else [])).save_pretrained(folder)
    shutil.copy(pipeline.__file__, folder / "pipeline.py")
    index = folder / "model_index.json"
    config = json.loads(index.read_text()) | {"_class_name": ["pipeline", kind.__name__]}
    index.write_text(json.dumps(config, indent=2))
