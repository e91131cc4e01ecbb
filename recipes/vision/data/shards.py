"""Pictures in tar files, as WebDataset packs them: KEY.jpg with its class in KEY.cls or KEY.json, many samples to a file."""

import json
import re
import tarfile
from pathlib import Path
from typing import NamedTuple

from trainworthy.core import UserError
from trainworthy.recipes.vision.data.encoded import Grouped, display_path

PICTURES = {"jpg", "jpeg", "png", "webp", "ppm", "pgm", "bmp", "tif", "tiff"}
CLASS = ("cls", "json")
NAMED = ("label", "cls", "class")  # of the JSON
NEEDED = "samples of one picture (KEY.jpg, .png, ...) and its class (KEY.cls with a number or name, or KEY.json with `label`)"


class Place(NamedTuple):
    """Where a picture's bytes lie in its shard."""

    name: str
    start: int
    size: int


class Shards(Grouped):
    """Uncompressed tar files below `root`. They are indexed by their headers once; a picture is read at its place."""

    def __init__(self, root: Path, paths: list[Path]):
        self.root, self.paths, self.key = root, paths, f"shards {root}"
        self.places: list[Place] = []
        self.labels: list[str] = []
        self.starts = []
        for path in paths:
            self.starts.append(len(self.places))
            for place, label in indexed(path, display_path(path, root)):
                self.places.append(place)
                self.labels.append(label)
        self.stamps = [f"{s.st_size} {s.st_mtime_ns}" for s in (p.stat() for p in paths)]

    def read(self, row: int) -> bytes:
        place = self.places[row]
        # Opened each time: a handle must not be shared with a forked worker.
        with self.paths[self.group(row)].open("rb") as file:
            file.seek(place.start)
            return file.read(place.size)

    def name(self, row: int) -> str:
        return f"{display_path(self.paths[self.group(row)], self.root)}: {self.places[row].name}"

    def stamp(self, row: int) -> str:
        return self.stamps[self.group(row)]


def indexed(path: Path, name: str) -> list[tuple[Place, str]]:
    """Return (place of the picture, class as it is written) of every sample of a shard, in its order."""
    keys: dict[str, None] = {}
    pictures: dict[str, Place] = {}
    labels: dict[str, str] = {}
    try:
        with tarfile.open(path, "r:") as shard:
            for member in shard:
                folder, _, base = member.name.rpartition("/")
                stem, dot, field = base.partition(".")
                if not member.isfile() or not stem or not dot:
                    continue
                key, field = f"{folder}/{stem}", field.lower()
                keys[key] = None
                if field in PICTURES:
                    pictures[key] = Place(member.name, member.offset_data, member.size)
                elif field in CLASS and (label := label_of(field, shard.extractfile(member).read())) is not None:
                    labels[key] = label
            shard.fileobj.seek(shard.offset)
            if not shard.fileobj.read(tarfile.BLOCKSIZE):  # tarfile takes a cut between two members for the end
                raise tarfile.ReadError("it ends without tar's end mark")
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"cannot read the shard {name}", got=error, needed="an uncompressed tar file",
                        cause="an unfinished copy, or compressed (.tar.gz): places in it cannot be found then",
                        next="copy it again, or unpack it into class folders") from None  # fmt: skip
    whole = pictures.keys() & labels.keys()
    lacking = [key.lstrip("/") for key in keys if key not in whole]
    if lacking and {*lacking} != {"_info"}:
        raise UserError(f"{len(lacking):,} of {len(keys):,} samples of the shard {name} lack their picture or class",
                        got=", ".join(lacking[:5]), needed=NEEDED)  # fmt: skip
    return [(pictures[key], labels[key]) for key in keys if key in whole]


def label_of(field: str, content: bytes) -> str | None:
    """Return the class that a .cls or .json member states, or None."""
    try:
        text = content.decode()
        if field == "cls":
            return text.strip() or None
        found = json.loads(text)
        return next((str(found[k]) for k in NAMED if k in found), None) if isinstance(found, dict) else str(found)
    except ValueError:
        return None


def split_of(path: Path, root: Path, validation: tuple[str, ...]) -> str:
    """Return the split that a shard's path names (`train-0007.tar`, `val/0001.tar`): `train` if it names none."""
    words = re.findall(r"[a-z]+", str(path.relative_to(root)).lower())
    return next((v for v in validation if v in words), "train")
