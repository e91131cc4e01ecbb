"""Pictures with questions of one's own: a folder with train.jsonl, a line for each question or conversation, and val.jsonl, or a
share of train.jsonl that is held out. Lines of test.jsonl, if it is there, are evaluated once, at the end.

{"image": "photos/0001.jpg", "question": "how many cats?", "answer": "two"}; lines about one picture become one sample. A line may
have "pair": a name that two lines share which ask the same about a picture and its counterfactual. Lines with `conversations` or
`messages` are read by talks.py.
"""

import json
import math
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.vlm.data.conversations import Talk, Talks, Wrong, looked_over, opened, plain, talk
from trainworthy.recipes.vlm.data.rows import PLACE, Asked

COLUMNS = ("image", "question", "answer")
SORTS = 20  # number of different questions up to which each is a kind of its own in the tables


@dataclass
class Where:
    """Which images and questions."""

    path: str = "scenes"
    """`scenes` (built-in composites of digits), or a folder with train.jsonl and val.jsonl."""
    pairs: int = 3000
    """Number of training scenes, each with its counterfactual."""
    held_out: int = 250
    """Number of validation scenes of other digits, each with its counterfactual."""
    val: str = ""
    """Validation lines of your own folder: a file like train.jsonl, or a share of its images such as 0.1. Default: val.jsonl."""
    longest: int = 128
    """Largest number of tokens of a sample, its image included. Longer samples are left out whole and counted, never cut."""

    def __post_init__(self):
        if self.path != "scenes" and Path(self.path).exists():
            self.path = str(Path(self.path).resolve())  # resumable from any folder
        if self.val and self.path == "scenes":
            raise UserError("--data.val is for pictures of your own", got=self.val, needed="--data.path FOLDER")
        if self.val and Path(self.val).exists():
            self.val = str(Path(self.val).resolve())


class Folder:
    """Images of one split with their questions."""

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
        self.names, self.found = list(by_picture), looked_over(root, list(by_picture))
        self.unopened = self.found.note

    def __len__(self) -> int:
        return len(self.paths)

    def asked(self, index: int) -> list[Asked]:
        """Return the questions about an image."""
        return self.lines[index]

    def image(self, index: int) -> Tensor:
        """Return the image, (3, H, W) in 0-255."""
        return opened(self.paths[index])

    def size(self, index: int) -> tuple[int, int]:
        """Return (height, width) of the image."""
        return self.found[self.names[index]]


def load(path: str, split: str, val: str = "") -> Folder | Talks:
    """Load `train`, `val` or `test` of a folder; all splits share the kinds of questions. One conversation makes all lines conversations.
    `val`: see Where."""
    both = splits(Path(path), val)
    every = [line for found in both.values() for line in found]
    if any(isinstance(line, Talk) for line in every):
        texts = list(dict.fromkeys(plain(q) for line in every for q, _ in _talk(line).turns))
        kinds = tuple(texts) if len(texts) <= SORTS else ("question",)
        return Talks(Path(path), [_talk(line) for line in both[split]], kinds)
    return Folder(Path(path), both[split], list(dict.fromkeys(line["question"] for line in every)))


def tested(path: str) -> tuple[str, ...]:
    """Return ("test",) if there are samples that no setting was chosen on: further scenes of the held-out digits, or test.jsonl."""
    return ("test",) if path == "scenes" or (Path(path) / "test.jsonl").is_file() else ()


@cache
def splits(root: Path, val: str) -> dict[str, list[Talk | dict[str, str]]]:
    """Return the lines of each split: `train`, `val` and, if the folder has it, `test`."""
    learn, test = read(root / "train.jsonl"), root / "test.jsonl"
    more = {"test": read(test)} if test.is_file() else {}
    try:
        share = float(val or "nan")
    except ValueError:
        return {"train": learn, "val": read(Path(val)), **more}
    if math.isnan(share):
        return {"train": learn, "val": read(root / "val.jsonl"), **more}
    if not 0 < share < 1:
        raise UserError(
            f"--data.val {val}", needed="a file like train.jsonl, or a share of its pictures between 0 and 1"
        )
    out = held_out(learn, share)
    return {"train": [x for x, o in zip(learn, out, strict=True) if not o],
            "val": [x for x, o in zip(learn, out, strict=True) if o], **more}  # fmt: skip


def held_out(lines: list[Talk | dict[str, str]], share: float) -> list[bool]:
    """Return whether each line is held out. Lines with the same image or pair go to one split, by the image's name alone."""
    group: dict[str, str] = {}

    def root(name: str) -> str:
        while group.setdefault(name, name) != name:
            name = group[name]
        return name

    keys = [line.pictures if isinstance(line, Talk) else (line["image"],) for line in lines]
    for line, pictures in zip(lines, keys, strict=True):
        linked = [*pictures, *([f"pair {line['pair']}"] if not isinstance(line, Talk) and "pair" in line else [])]
        first, *others = sorted({root(name) for name in linked})
        group |= dict.fromkeys(others, first)
    out = [zlib.crc32(root(pictures[0]).encode()) % 1000 < 1000 * share if pictures else False for pictures in keys]
    if len(set(out)) < 2:
        raise UserError(f"--data.val {share:g} holds out {sum(out):,} of {len(out):,} lines",
                        got=f"{len({root(p[0]) for p in keys if p}):,} groups of pictures",
                        needed="some dozens of pictures, or --data.val FILE")  # fmt: skip
    return out


def _talk(line: Talk | dict[str, str]) -> Talk:
    return line if isinstance(line, Talk) else Talk((line["image"],), ((PLACE + line["question"], line["answer"]),))


def read(file: Path) -> list[Talk | dict[str, str]]:
    """Return the lines of one file: conversations, or questions with their columns."""
    if not file.is_file():
        raise UserError(f"there is no {file}", needed="a folder with train.jsonl and val.jsonl (or --data.val), pictures beside them",
                        next='a line: {"image": "a.jpg", "question": "how many cats?", "answer": "two"}')  # fmt: skip
    lines, wrong = [], []
    for number, text in enumerate(file.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"line {number} of {file} is not JSON", got=f"{error}: {text[:60]}") from None
        if not isinstance(line, dict) or not {"conversations", "messages"} & line.keys():
            lines.append(_question(line, f"line {number} of {file}"))
            continue
        try:
            lines.append(talk(line))
        except Wrong as why:
            wrong.append(f"line {number}: {why}")
    if wrong:
        raise UserError(f"{len(wrong):,} of {len(wrong) + len(lines):,} lines of {file} are not conversations about pictures",
                        got="; ".join(wrong[:3]), needed=f"users and answers in turn, a text each, as many {PLACE} as pictures",
                        cause="a picture that is not there, a line converted by halves", next="mend or delete them")  # fmt: skip
    if not lines:
        raise UserError(f"{file} is empty", needed="a line for each question")
    return lines


def _question(line: Any, where: str) -> dict[str, str]:
    columns = line.keys() if isinstance(line, dict) else ()
    if not {*COLUMNS} <= {*columns} or not all(isinstance(line[c], str) and line[c].strip() for c in COLUMNS):
        wrong = [c for c in COLUMNS if c in columns and not (isinstance(line[c], str) and line[c].strip())]
        raise UserError(f"{where} is not a question about a picture",
                        needed=", ".join(COLUMNS) + ", each a text; or conversations, or messages",
                        got=f"{wrong[0]} {line[wrong[0]]!r}" if wrong else ", ".join(columns))  # fmt: skip
    question, answer = line["question"], line["answer"]
    if question.count(PLACE) > 1 or PLACE in answer or not plain(question):
        raise UserError(f"{where}: a picture has one place, before its question", got=f"{question!r}, answer {answer!r}"[:120],
                        needed=f"a question, with one {PLACE} or none; several pictures are a conversation",
                        next='{"images": ["a.jpg", "b.jpg"], "messages": [...]}')  # fmt: skip
    return {**line, "question": plain(question)}
