"""Pictures with questions of one's own: a folder with train.jsonl and val.jsonl, a line for each question.

{"image": "photos/0001.jpg", "question": "how many cats?", "answer": "two"}; lines about one picture become one sample. A line may
have "pair": a name that two lines share which ask the same about a picture and its counterfactual.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import Tensor

from core.errors import UserError
from recipes.vision.pictures import decode
from recipes.vlm.rows import Asked

COLUMNS = ("image", "question", "answer")
SORTS = 20  # different questions up to which each is a kind of its own in the tables


@dataclass
class Where:
    """Which pictures and questions."""

    path: str = "scenes"
    """`scenes` (composites of digits, made here), or a folder with train.jsonl and val.jsonl."""
    pairs: int = 3000
    """Scenes to learn from, each with its counterfactual."""
    held_out: int = 250
    """Scenes of other digits to judge by, each with its counterfactual."""
    longest: int = 128
    """Tokens of a sample, those of the picture included; longer samples are left out whole and counted, never cut."""

    def __post_init__(self):
        if self.path != "scenes" and Path(self.path).exists():
            self.path = str(Path(self.path).resolve())  # resumable from any folder


class Folder:
    """Pictures of one split with their questions."""

    def __init__(self, root: Path, lines: list[dict[str, str]], texts: list[str]):
        by_picture: dict[str, list[dict[str, str]]] = {}
        for line in lines:
            by_picture.setdefault(line["image"], []).append(line)
        names = list(dict.fromkeys(line["pair"] for line in lines if "pair" in line))
        each, pair = len(texts) <= SORTS, {name: i for i, name in enumerate(names)}
        self.kinds = tuple(texts) if each else ("question",)
        self.paths = [root / name for name in by_picture]
        self.lines = [[Asked(texts.index(x["question"]) if each else 0, x["question"], x["answer"], pair.get(x.get("pair"), -1))
                       for x in found] for found in by_picture.values()]  # fmt: skip
        with ThreadPoolExecutor(8) as pool:
            bad = [why for why in pool.map(unreadable, self.paths) if why]
        if bad:
            raise UserError(f"{len(bad):,} of {len(self.paths):,} pictures in {root} cannot be read", got=bad[0],
                            needed="a picture that Pillow opens; paths are the folder's")  # fmt: skip

    def __len__(self) -> int:
        return len(self.paths)

    def asked(self, index: int) -> list[Asked]:
        """The questions about a picture."""
        return self.lines[index]

    def image(self, index: int) -> Tensor:
        """(3, H, W) of 0-255."""
        path = self.paths[index]
        try:
            return decode(Image.open(path))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the picture {path}", got=error, needed="a whole picture",
                            cause="a file that was cut off") from None  # fmt: skip


def unreadable(path: Path) -> str:
    """Why a file is no picture; empty if it is one."""
    try:
        with Image.open(path) as image:
            image.verify()
    except Exception as error:  # Pillow's readers raise whatever they meet in a broken file
        return f"{path.name}: {error}"
    return ""


def load(path: str, split: str) -> Folder:
    """`train` or `val` of a folder; a question is of one kind in both."""
    both = {name: read(Path(path) / f"{name}.jsonl") for name in ("train", "val")}
    texts = list(dict.fromkeys(line["question"] for found in both.values() for line in found))
    return Folder(Path(path), both[split], texts)


def read(file: Path) -> list[dict[str, str]]:
    """The lines of one file, each with its columns."""
    if not file.is_file():
        raise UserError(f"there is no {file}", needed="a folder with train.jsonl and val.jsonl, pictures beside them",
                        next='a line: {"image": "a.jpg", "question": "how many cats?", "answer": "two"}')  # fmt: skip
    lines = []
    for number, text in enumerate(file.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"line {number} of {file} is no JSON", got=f"{error}: {text[:60]}") from None
        columns = line.keys() if isinstance(line, dict) else ()
        if not {*COLUMNS} <= {*columns} or not all(isinstance(line[c], str) and line[c].strip() for c in COLUMNS):
            wrong = [c for c in COLUMNS if c in columns and not (isinstance(line[c], str) and line[c].strip())]
            raise UserError(f"line {number} of {file} is no question about a picture", needed=", ".join(COLUMNS) + ", each a text",
                            got=f"{wrong[0]} {line[wrong[0]]!r}" if wrong else ", ".join(columns))  # fmt: skip
        lines.append(line)
    if not lines:
        raise UserError(f"{file} is empty", needed="a line for each question")
    return lines
