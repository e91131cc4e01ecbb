"""Pictures with questions of one's own: a folder with train.jsonl, a line for each question or conversation, and val.jsonl, or a
share of train.jsonl that is held out. Lines of test.jsonl, if it is there, are evaluated once, at the end. Files may also be one JSON
list (train.json), and the path may be such a file, as LLaVA publishes its data.

{"image": "photos/0001.jpg", "question": "how many cats?", "answer": "two"}; lines about one picture become one sample. A line may
have "pair": a name that two lines share which ask the same about a picture and its counterfactual. Lines with `conversations` or
`messages` are read by conversations.py.
"""

import csv
import hashlib
import io
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor
from trainworthy.core.base.errors import UserError
from trainworthy.core.data.validation_split import absolute, hold_out, parse_share, refuse_training_data
from trainworthy.recipes.llm.data import files
from trainworthy.recipes.shared import hub, mds
from trainworthy.recipes.vlm.data.conversations import (
    BadLine,
    Conversation,
    Conversations,
    conversation,
    examined,
    looked_over,
    opened,
    plain,
)
from trainworthy.recipes.vlm.data.rows import PLACE, Question

COLUMNS = ("image", "question", "answer")
READ = {*COLUMNS, "pair", "images", "conversations", "messages", "id"}
SHOWN = 8  # columns that a note names
HELD_OUT = 0.05  # share of the pictures of a single file, without --data.val
END = 65_536  # bytes at the end of a file by which copies of a picture are found
SORTS = 20  # number of different questions up to which each is a kind of its own in the tables


@dataclass
class Source:
    """Which images and questions."""

    path: str = "scenes"
    """`scenes` (built-in composites of digits), a folder with train.jsonl and val.jsonl, or one file (.jsonl, .csv, or LLaVA's .json)."""
    pairs: int = 3000
    """Number of training scenes, each with its counterfactual."""
    held_out: int = 250
    """Number of validation scenes of other digits, each with its counterfactual."""
    val: str = ""
    """Validation lines of your own folder: a file like train.jsonl, or a share of its images such as 0.1. Default: val.jsonl; 0.05 of
    a single file."""
    max_length: int = 128
    """Largest number of tokens of a sample, its image included. Longer samples are left out whole and counted, never cut."""
    max_bad: float = 0.01
    """Share of a file's lines that may be unusable (no answer, no text, a picture that cannot be read); they are left out, counted and
    named."""
    images: str = ""
    """Folder from which the lines name their pictures. Default: the folder of the lines."""

    def __post_init__(self):
        self.path = absolute(self.path, "scenes")
        self.images = self.images and str(Path(self.images).resolve())
        if self.val and self.path == "scenes":
            raise UserError("--data.val is for pictures of your own", got=self.val, needed="--data.path FOLDER")
        self.val = absolute(self.val)
        if not 0 <= self.max_bad < 1:
            raise UserError("--data.max-bad is a share of the lines", got=self.max_bad, needed="0 to 1")


@dataclass
class Lines:
    """The lines of one file, or the rows of a JSON list: those that can be used, and what is wrong with the others."""

    file: Path
    unit: str = "line"
    good: list[Conversation | dict[str, str]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Of each good line, from 1."""
    wrong: list[tuple[int, str]] = field(default_factory=list)
    """(number of a line, why it cannot be used)."""
    others: dict[str, None] = field(default_factory=dict)
    """Columns that are not read, in the order of the file."""

    @property
    def summary(self) -> str:
        """How many lines cannot be used."""
        return f"{len(self.wrong):,} of {len(self.wrong) + len(self.good):,} {self.unit}s of {self.file}"

    @property
    def kinds(self) -> list[str]:
        """What is wrong with lines, each kind with its first line, the commonest first."""
        each: dict[str, list[tuple[int, str]]] = {}
        for number, why in self.wrong:  # numbers, names and texts of a line do not make another kind
            each.setdefault(re.sub(r"\(.*\)|'[^']*'|\d+", "", why), []).append((number, why))
        return [f"{self.unit} {found[0][0]}{f' and {len(found) - 1:,} more' if len(found) > 1 else ''}: {found[0][1]}"
                for found in sorted(each.values(), key=len, reverse=True)]  # fmt: skip

    @property
    def note(self) -> str:
        """What to report of lines that are left out, and of questions that are."""
        notes = [f"{self.summary} left out: {'; '.join(self.kinds)}"] if self.wrong else []
        talks = [line for line in self.good if isinstance(line, Conversation)]
        if cut := sum(line.unanswered for line in talks):
            notes.append(
                f"{cut:,} of {len(talks):,} conversations of {self.file.name} end with a question that has no answer: it is left off"
            )
        if self.others:
            more = f" and {len(self.others) - SHOWN} more" if len(self.others) > SHOWN else ""
            notes.append(f"columns of {self.file.name} that are not read: {', '.join([*self.others][:SHOWN])}{more}")
        return "; ".join(notes)


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
        self.lines = [[Question(texts.index(x["question"]) if each else 0, x["question"], x["answer"], pair.get(x.get("pair"), -1))
                       for x in found] for found in by_picture.values()]  # fmt: skip
        self.names, self.found = list(by_picture), looked_over(root, list(by_picture))
        self.unopened = self.found.note

    def __len__(self) -> int:
        return len(self.paths)

    def questions(self, index: int) -> list[Question]:
        """Return the questions about an image."""
        return self.lines[index]

    def image(self, index: int) -> Tensor:
        """Return the image, (3, H, W) in 0-255."""
        return opened(self.paths[index])

    def size(self, index: int) -> tuple[int, int]:
        """Return (height, width) of the image."""
        return self.found[self.names[index]]


def load(path: str, split: str, val: str = "", max_bad: float = 0.0, images: str = "") -> Folder | Conversations:
    """Load `train`, `val` or `test` of a folder; all splits share the kinds of questions. One conversation makes all lines conversations.
    `val`, `max_bad`, `images`: see Source."""
    if images and not Path(images).is_dir():
        raise UserError(f"--data.images {images}: there is no such folder", needed="the folder of the pictures")
    root = Path(path)
    pictures = Path(images) if images else root.parent if root.is_file() else root
    both, notes = splits(root, val, max_bad, pictures)
    found = _source(pictures, split, both)
    found.left_out = notes.get(split, "")
    return found


def _source(path: Path, split: str, both: dict[str, list[Conversation | dict[str, str]]]) -> Folder | Conversations:
    every = [line for found in both.values() for line in found]
    if any(isinstance(line, Conversation) for line in every):
        texts = list(dict.fromkeys(plain(q) for line in every for q, _ in _as_conversation(line).turns))
        kinds = tuple(texts) if len(texts) <= SORTS else ("question",)
        return Conversations(path, [_as_conversation(line) for line in both[split]], kinds)
    return Folder(path, both[split], list(dict.fromkeys(line["question"] for line in every)))


def tested(path: str) -> tuple[str, ...]:
    """Return ("test",) if there are samples that no setting was chosen on: further scenes of the held-out digits, or test.jsonl."""
    return ("test",) if path == "scenes" or lines_of(Path(path), "test").is_file() else ()


def lines_of(root: Path, split: str) -> Path:
    """Return the file with the lines of a split: SPLIT.jsonl, or SPLIT.json or SPLIT.csv where only that is in the folder."""
    named = [root / f"{split}.{kind}" for kind in ("jsonl", "json", "csv")]
    return next((p for p in named if p.is_file()), named[0])


@cache
def splits(
    root: Path, val: str, max_bad: float, pictures: Path
) -> tuple[dict[str, list[Conversation | dict[str, str]]], dict[str, str]]:
    """Return the lines of each split, `train`, `val` and, if the folder has it, `test`; and what to report of each split's file."""
    single = root.is_file()
    share = parse_share(val) or (HELD_OUT if single and not val else None)
    files = {"train": root if single else lines_of(root, "train")}
    if not share:
        files["val"] = Path(val) if val else lines_of(root, "val")
        refuse_training_data(files["val"], files["train"])
    if lines_of(root, "test").is_file():
        files["test"] = lines_of(root, "test")
    found = usable(pictures, {split: parse(file) for split, file in files.items()}, max_bad)
    lines, notes = {split: one.good for split, one in found.items()}, {split: one.note for split, one in found.items()}
    if "val" not in lines:
        learn = lines["train"]
        out = held_out(learn, share, copies(pictures, [name for line in learn for name in _pictures(line)]))
        lines["train"] = [x for x, o in zip(learn, out, strict=True) if not o]
        lines["val"] = [x for x, o in zip(learn, out, strict=True) if o]
    return lines, notes


def usable(root: Path, found: dict[str, Lines], max_bad: float) -> dict[str, Lines]:
    """Return the files without lines whose pictures cannot be read. What is wrong with the lines of all files is in one UserError, if it is
    more than the share `max_bad` of a file."""
    names = [_pictures(line) for one in found.values() for line in one.good]
    _, bad = examined(root, list(dict.fromkeys(name for some in names for name in some)))
    for one in found.values():
        at = [next((name for name in _pictures(line) if name in bad), "") for line in one.good]
        one.wrong = sorted([*one.wrong, *((n, f"a picture {'cannot be read' if (root / a).is_file() else 'is not there'} ({bad[a]})")
                                          for n, a in zip(one.numbers, at, strict=True) if a)])  # fmt: skip
        one.good = [line for line, a in zip(one.good, at, strict=True) if not a]
    refused = [one for one in found.values() if len(one.wrong) > max_bad * (len(one.wrong) + len(one.good))]
    if refused:
        share = max(len(one.wrong) / (len(one.wrong) + len(one.good)) for one in refused)
        faults = [f"{one.file.name}, " * (len(refused) > 1) + kind for one in refused for kind in one.kinds]
        lost = bool(bad) and not any(name not in bad for some in names for name in some)
        other = f"--data.images FOLDER: no picture is found from {root}" if lost else "correct or convert them"
        raise UserError(
            f"{' and '.join(one.summary for one in refused)} cannot be used",
            got="\n".join(faults), needed="image, question and answer, each a text; or conversations, or messages, of users and answers in turn; "
            f"pictures that Pillow opens; at most {max_bad:.1%} of other lines (--data.max-bad)",
            next=f"--data.max-bad {math.ceil(1000 * share) / 1000:.3f} leaves them out" if share < 0.5 else other,
        )  # fmt: skip
    return found


def _pictures(line: Conversation | dict[str, str]) -> tuple[str, ...]:
    return line.pictures if isinstance(line, Conversation) else (line["image"],)


def copies(root: Path, names: list[str]) -> dict[str, str]:
    """Return {name: the first name of the same picture} of files with equal bytes. Of files whose size only one has, none is read; of
    others their ends are, which hold the compressed pixels."""
    first: dict[Any, str] = {}
    found = {}
    sizes = {name: (root / name).stat().st_size for name in dict.fromkeys(names)}
    often = Counter(sizes.values())
    for name, size in sizes.items():
        key: Any = size
        if often[size] > 1:
            with (root / name).open("rb") as file:
                file.seek(max(0, size - END))
                key = (size, hashlib.blake2b(file.read()).digest())
        found[name] = first.setdefault(key, name)
    return found


def held_out(
    lines: list[Conversation | dict[str, str]], share: float, same: dict[str, str] | None = None
) -> list[bool]:
    """Return whether each line is held out. Lines with the same image or pair go to one split, by the image's name alone; `same` has the
    names of copies."""
    group: dict[str, str] = {}

    def root(name: str) -> str:
        while group.setdefault(name, name) != name:
            name = group[name]
        return name

    keys = [tuple((same or {}).get(name, name) for name in _pictures(line)) for line in lines]
    for line, pictures in zip(lines, keys, strict=True):
        linked = [
            *pictures,
            *([f"pair {line['pair']}"] if not isinstance(line, Conversation) and "pair" in line else []),
        ]
        roots = sorted({root(name) for name in linked})  # none for a conversation without a picture
        group |= dict.fromkeys(roots[1:], roots[0]) if roots else {}
    sides = iter(hold_out([root(pictures[0]) for pictures in keys if pictures], share) or [])
    out = [bool(pictures) and next(sides, False) for pictures in keys]  # a line without a picture is trained on
    if len(set(out)) < 2:
        raise UserError(f"--data.val {share:g} holds out {sum(out):,} of {len(out):,} lines",
                        got=f"{len({root(p[0]) for p in keys if p}):,} groups of pictures",
                        needed="some dozens of pictures, or --data.val FILE")  # fmt: skip
    return out


def _as_conversation(line: Conversation | dict[str, str]) -> Conversation:
    return (
        line
        if isinstance(line, Conversation)
        else Conversation((line["image"],), ((PLACE + line["question"], line["answer"]),))
    )


def read(file: Path) -> list[Conversation | dict[str, str]]:
    """Return the lines of one file; raises UserError if one cannot be used. Pictures are not looked for."""
    found = parse(file)
    if found.wrong:
        raise UserError(f"{found.summary} cannot be used", got="\n".join(found.kinds))
    return found.good


def parse(file: Path) -> Lines:
    """Return the lines of one file: conversations, or questions with their columns, and what is wrong with the others."""
    if not file.is_file():
        mds.refuse(
            file.parent,
            needed="a folder with train.jsonl and val.jsonl, pictures next to them, or a file",
            pictures=True,
        )
        raise UserError(f"there is no {file}", needed="a folder with train.jsonl and val.jsonl (or --data.val), pictures next to them "
                        "(or in --data.images), or a file",
                        next='a line: {"image": "a.jpg", "question": "how many cats?", "answer": "two"}')  # fmt: skip
    try:
        text = files.text_of(file)
        table, whole = file.suffix.lower() == ".csv", text.lstrip()[:1] == "["
        found = Lines(file, "row" if whole or table else "line")
        rows: list = _table(text) if table else json.loads(text) if whole else text.split("\n")
    except (ValueError, csv.Error) as error:
        raise hub.unreadable(file, error) from None
    for number, row in enumerate(rows, 1):
        if isinstance(row, str) and not row.strip():
            continue
        try:
            line = json.loads(row) if found.unit == "line" else row
            if files.halves(line):
                raise BadLine("a text has half of a character (a lone surrogate)")
            talks = isinstance(line, dict) and {"conversations", "messages"} & line.keys()
            found.good.append(conversation(line) if talks else _question(line))
            found.numbers.append(number)
            found.others |= dict.fromkeys(key for key in line if key not in READ)
        except json.JSONDecodeError as error:
            found.wrong.append((number, f"not JSON ({error.msg} at column {error.colno}: {row[:60]})"))
        except BadLine as why:
            found.wrong.append((number, str(why)))
    if not found.good and not found.wrong:
        raise UserError(f"{file} is empty", needed="a line for each question")
    return found


FURTHER = "further entries"  # of a table's row


def _table(text: str) -> list[dict[str, Any]]:
    """Return the rows of a CSV file with a header, without empty entries."""
    rows = csv.DictReader(io.StringIO(text, newline=""), restkey=FURTHER, strict=True)
    return [{k: v for k, v in row.items() if v} for row in rows]


def _question(line: Any) -> dict[str, str]:
    columns = line.keys() if isinstance(line, dict) else ()
    if FURTHER in columns:
        raise BadLine(f"more entries than columns: quote texts with a comma ({line[FURTHER][0]!r})")
    if missing := [c for c in COLUMNS if c not in columns]:
        raise BadLine(f"no {' and no '.join(missing)} (it has {', '.join(columns) or type(line).__name__})")
    if wrong := [c for c in COLUMNS if not (isinstance(line[c], str) and line[c].strip())]:
        raise BadLine(f"{wrong[0]} is no text, or empty ({wrong[0]} {line[wrong[0]]!r})")
    question, answer = line["question"], line["answer"]
    if question.count(PLACE) > 1 or PLACE in answer or not plain(question):
        raise BadLine(f"a picture has one place, before its question; several pictures are a conversation: images and messages "
                    f"({question!r}, answer {answer!r})"[:260])  # fmt: skip
    return {**line, "question": plain(question)}
