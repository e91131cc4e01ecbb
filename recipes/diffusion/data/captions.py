"""Images with captions: phrases that contain the name of their class, or captions from files."""

import csv
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchvision.transforms import v2
from trainworthy.core import Data, Field, Run, UserError
from trainworthy.core.base import seeds
from trainworthy.core.data.validation_split import parse_val as held_out_by
from trainworthy.recipes.diffusion.data import pictures as source
from trainworthy.recipes.diffusion.models.noise import Process
from trainworthy.recipes.vision.data import pictures

SPOKEN = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PHRASES = ("a photo of the digit {}", "a handwritten {}", "the number {}", "a picture of the numeral {}", "{}", "the digit {}",
           "somebody wrote a {}", "an image of the number {}")  # fmt: skip
UNSEEN = ("a scan of the figure {}", "a drawing of the number {}", "the numeral {}, written by hand")
"""Phrases for held-out digits: requests in words that no training image had."""


@dataclass
class Source(source.Source):
    """Which images, who evaluates samples, and which captions."""

    captions: str = ""
    """Empty: phrases with the name of each image's class. `txt`: a text file of the same name next to each image. Else a file in the folder,
    .jsonl or .csv, with file_name and text columns, as in the hub's metadata.jsonl."""
    phrase: str = "a photo of {}"
    """Phrase around a class's name, for your own images without --data.captions."""


class Captioned(NamedTuple):
    """Images (N, C, H, W) in [-1, 1], their caption indices, and the rows of each split."""

    images: Tensor
    labels: Tensor
    """Classes (N,); 0 if captions come from files, because then there are none."""
    classes: tuple[str, ...]
    learn: Tensor
    held_out: Tensor
    notes: dict
    captions: tuple[str, ...]
    """All different captions."""
    caption_ids: Tensor
    """Indices into `captions`, (N,)."""
    test: Tensor | None = None
    """Rows of the test split, which is evaluated once, at the end."""


def read(cfg: Source) -> Captioned:
    """Return every image with its caption. Images without any colour have one channel, whatever their files have."""
    if cfg.captions:
        return _read_cached(astuple(cfg))
    _refuse_unread(Path(cfg.path))
    found = source.read(cfg)
    found = found._replace(images=without_colour(found.images))
    if cfg.path == "digits":
        names = [(c, SPOKEN[int(c)]) for c in found.classes]
        return _phrased(
            found, [[[p.format(n) for p in some for n in pair] for pair in names] for some in (PHRASES, UNSEEN)]
        )
    phrases = [[cfg.phrase.format(c.replace("_", " "))] for c in found.classes]
    return _phrased(found, [phrases, phrases])


def _refuse_unread(root: Path) -> None:
    """Raise UserError for pictures next to captions that no setting names: they are in no class folder."""
    files = [p for p in root.iterdir() if p.is_file()] if root.is_dir() else []
    if not any(p.suffix.lower() in SUFFIXES for p in files):
        return
    names = {p.name for p in files}
    texts = any(p.suffix == ".txt" and names & {p.stem + s for s in SUFFIXES} for p in files)
    found = next((n for n in ("metadata.jsonl", "metadata.csv") if n in names), "txt" if texts else "")
    if found:
        raise UserError(f"{root} has pictures with captions and no class folders", got="a text file for each" if texts else found,
                        needed="--data.captions, which reads them", next=f"--data.captions {found}")  # fmt: skip


def without_colour(images: Tensor) -> Tensor:
    """Return images (N, C, H, W) with one channel if all of their channels are equal."""
    grey = all(torch.equal(some, some[:, :1].expand_as(some)) for some in images.split(256))
    return images[:, :1].contiguous() if grey and images.shape[1] > 1 else images


def in_channels(found: Captioned, channels: int) -> Captioned:
    """Return grey images with as many channels as an autoencoder reads."""
    return found._replace(images=found.images.expand(-1, channels, -1, -1)) if found.images.shape[1] == 1 else found


def _phrased(found: pictures.Labelled, phrases: list[list[list[str]]]) -> Captioned:
    """Return each image with a phrase of its class, from those for training or those for evaluation: [split][class]. The test split uses the
    same phrases as the validation split."""
    texts = [""] * len(found.labels)
    parts = [part for part in (found.learn, found.held_out, found.test) if part is not None]
    for split, chosen in zip((*phrases, phrases[1]), parts, strict=False):
        for i in chosen.tolist():
            own = split[int(found.labels[i])]
            texts[i] = own[seeds.derive("caption", i) % len(own)]
    return Captioned(*found[:5], dict(found.notes), *numbered(texts, parts), test=found.test)


def numbered(texts: list[str], parts: Sequence[Tensor]) -> tuple[tuple[str, ...], Tensor]:
    """Return (all different captions, caption index (N,) of each image). Indices of each split are spread evenly, because a gate compares
    the scale of inputs between splits."""
    place: dict[str, float] = {}
    for part in parts:
        own = list(dict.fromkeys(texts[i] for i in part.tolist()))
        for i, text in enumerate(own):
            place.setdefault(text, (i + 0.5) / len(own))
    captions = sorted(place, key=lambda text: (place[text], text))
    number = {text: i for i, text in enumerate(captions)}
    return tuple(captions), torch.tensor([number[text] for text in texts])


# ------------------------------------------------------------------------------------------------------ captions next to pictures
@lru_cache(2)
def _read_cached(settings: tuple) -> Captioned:
    """The same, decoded once per process."""
    return read_captioned(Source(*settings))


def read_captioned(cfg: Source) -> Captioned:
    """Return the images of a folder with their own captions, a fifth held out, independent of the run's seed."""
    root = Path(cfg.path)
    if not root.is_dir():
        raise UserError(
            f"there is no folder {cfg.path}", got="nothing there", needed="a folder of pictures with their captions"
        )
    texts = _texts(root) if cfg.captions == "txt" else _table(root / cfg.captions)
    paths = sorted(p for p in root.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    names = [p.relative_to(root).as_posix() for p in paths]
    gaps = [n for n in names if not texts.get(n)]
    if gaps or not names:
        raise UserError(f"{len(gaps):,} of {len(names):,} pictures have no caption", got=_shorten(gaps) or f"no picture in {root}",
                        needed="a caption for each; the empty caption means no caption, learnt by dropping others (--conditioning-dropout-prob)",
                        cause="a caption file of another or an older set, or names without their folder",
                        next="write them, or move the pictures away")  # fmt: skip
    if lost := sorted(set(texts) - set(names)):
        raise UserError(f"{len(lost):,} of {len(texts):,} captions have no picture", got=_shorten(lost), needed="a picture for each",
                        cause="a download that was cut off, or names without their folder")  # fmt: skip
    encoded = pictures.Files(root, paths)
    facts = pictures.survey(encoded, len(paths))
    good, notes = pictures.readable(encoded, facts, where=str(root), max_bad=cfg.max_bad)
    every, fit = (
        pictures.Pictures(encoded, good),
        v2.Compose([v2.Resize(cfg.image_size), v2.CenterCrop(cfg.image_size)]),
    )
    images = without_colour(torch.stack([fit(every[i]) for i in range(len(good))])).float() / 127.5 - 1
    captions = [texts[names[i]] for i in good.tolist()]
    marks = [facts[i][2] for i in good.tolist()]
    first = {mark: i for i, mark in reversed(list(enumerate(marks)))}  # copies of an image go to one split
    owner = torch.tensor([first[mark] for mark in marks])
    alone = owner.unique()
    wanted = held_out_by(cfg.val)
    if isinstance(wanted, Path):
        raise UserError("--data.val of captioned pictures is a share", got=wanted, needed="a share such as 0.2")
    size = max(1, round(wanted * len(alone)) if wanted else len(alone) // 5)
    held = torch.isin(owner, alone[seeds.permutation(len(alone), "captions", "split")][:size])
    if len(alone) < 5:
        raise UserError(f"{root} has too few pictures", got=f"{len(alone)} different ones", needed="five or more")
    learn, held_out = (~held).nonzero().flatten(), held.nonzero().flatten()
    labels = torch.zeros(len(captions), dtype=torch.long)
    return Captioned(images, labels, (), learn, held_out, notes, *numbered(captions, (learn, held_out)))


SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _texts(root: Path) -> dict[str, str]:
    """Return {image: text of the file with the same name}. A text without an image has its own name as the key."""
    found = {}
    for path in sorted(root.rglob("*.txt")):
        own = [p for p in path.parent.glob(f"{path.stem}.*") if p.suffix.lower() in SUFFIXES]
        for picture in own or [path]:
            found[picture.relative_to(root).as_posix()] = path.read_text(encoding="utf-8-sig").strip()
    return found


def _table(path: Path) -> dict[str, str]:
    """Return {image: text} of a .jsonl or .csv file."""
    if not path.is_file() or path.suffix not in (".jsonl", ".csv"):
        raise UserError(f"--data.captions {path.name}: no such file in the folder", got=f"{path}",
                        needed="`txt`, or a .jsonl or .csv file next to the pictures")  # fmt: skip
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file)) if path.suffix == ".csv" else [json.loads(x) for x in file if x.strip()]
    except (ValueError, csv.Error) as error:
        raise UserError(
            f"{path.name} cannot be read", got=str(error), needed="a JSON object a line, or CSV with a header"
        ) from None
    found: dict[str, str] = {}
    for i, row in enumerate(rows, start=1):
        name, text = (row.get(k) if isinstance(row, dict) else None for k in ("file_name", "text"))
        if not name or not isinstance(text, str):
            raise UserError(
                f"{path.name}: row {i} is not complete", got=str(row)[:120], needed="file_name and text, both filled in"
            )
        if name in found:
            raise UserError(
                f"{path.name}: {name} has two captions", got=f"row {i} again", needed="one for each picture"
            )
        found[name] = text.strip()
    return found


def describe_data(found: Captioned, parts, classifier) -> dict[str, str]:
    """Return the lines of the data report."""
    notes = {**found.notes, "model": parts.description, "captions": f"{len(found.captions):,} different ones"}
    if cut := parts.cut(found.captions):
        notes["captions cut"] = f"{cut:,} of {len(found.captions):,} after {parts.tokenizer.model_max_length} tokens"
    return notes | {
        "classifier": classifier.description if classifier else "none, because captions of your own name no class"
    }


def matched(run: Run, process: Process, model: nn.Module, data: Data) -> float:
    """Return the share of samples that one step denoises better with their own caption than with another one, drawn once for each (for
    digits one in ten has the same class). 0.5 by chance."""
    rows = []
    for b in run.batches(data):
        own, wrong = (process.look(model, {**b, "condition": b[key]})[:, 1] for key in ("caption_ids", "other"))
        rows.append((own < wrong).float() + 0.5 * (own == wrong).float())
    return run.gather(torch.cat(rows)).mean().item()


# ------------------------------------------------------------------------------------------------------------------- samples
class Noised(Data):
    """Latents (N, c, h, w) of `found` with noise of a random timestep. In training the caption may be dropped.

    In evaluation each latent always has the same noise and timestep, and no caption is dropped.
    """

    split = "val"
    """Each split has its own evaluation noise."""

    def __init__(self, latents: Tensor, found: Captioned, chosen: Tensor, process: Process, drop: float):
        self.latents, self.images = source.Rows(latents, chosen), source.Rows(found.images, chosen)
        self.labels, self.caption_ids, self.captions = found.labels[chosen], found.caption_ids[chosen], found.captions
        self.small = source.small(self.images)
        self.process, self.drop, self.null = process, drop, len(found.captions)
        self.fields = {
            "small": Field("source", low=-1.0, high=1.0),
            "latent": Field("target", computed=True),
            "noisy": Field("input"),
            "timestep": Field("input", low=0, high=process.noise.num_train_timesteps - 1),
            "condition": Field("input", low=0, high=self.null),
        }
        if found.classes:
            self.fields["label"] = Field("target", classes=found.classes)

    def __len__(self) -> int:
        return len(self.caption_ids)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        training = generator is not None
        generator = generator or source.fixed_draws(self.split, index)
        latent, caption = self.latents[index], self.caption_ids[index]
        timestep = torch.randint(self.process.noise.num_train_timesteps, (), generator=generator)
        noise = torch.randn(latent.shape, generator=generator)
        hidden = torch.rand((), generator=generator) < self.drop and training
        noisy = self.process.add(latent[None], noise[None], timestep[None])[0]
        condition = torch.tensor(self.null) if hidden else caption
        drawn = {"noise": noise, "noisy": noisy, "timestep": timestep, "condition": condition}
        other = (caption + 1 + seeds.derive("other", index) % max(1, self.null - 1)) % self.null
        entries = {"caption_ids": caption, "other": other, "label": self.labels[index]}
        return {"small": self.small[index], "latent": latent, **drawn, **entries}

    def peek(self, index: int, key: str):
        own = {"label": self.labels, "caption_ids": self.caption_ids}
        return own[key][index] if key in own else super().peek(index, key)
