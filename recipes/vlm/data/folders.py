"""Pictures with questions of one's own: a folder with train.jsonl and val.jsonl, a line for each question or conversation.

{"image": "photos/0001.jpg", "question": "how many cats?", "answer": "two"}; lines about one picture become one sample. A line may
have "pair": a name that two lines share which ask the same about a picture and its counterfactual. Lines with `conversations` or
`messages` are read by talks.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.vlm.data.conversations import Talk, Talks, Wrong, looked_over, opened, plain, talk
from trainworthy.recipes.vlm.data.rows import PLACE, Asked

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
        self.sizes = [*looked_over(root, list(by_picture)).values()]

    def __len__(self) -> int:
        return len(self.paths)

    def asked(self, index: int) -> list[Asked]:
        """The questions about a picture."""
        return self.lines[index]

    def image(self, index: int) -> Tensor:
        """(3, H, W) of 0-255."""
        return opened(self.paths[index])

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) of the picture."""
        return self.sizes[index]


def load(path: str, split: str) -> Folder | Talks:
    """`train` or `val` of a folder; a question is of one kind in both. One conversation makes all lines conversations."""
    both = {name: read(Path(path) / f"{name}.jsonl") for name in ("train", "val")}
    every = [line for found in both.values() for line in found]
    if any(isinstance(line, Talk) for line in every):
        texts = list(dict.fromkeys(plain(q) for line in every for q, _ in _talk(line).turns))
        kinds = tuple(texts) if len(texts) <= SORTS else ("question",)
        return Talks(Path(path), [_talk(line) for line in both[split]], kinds)
    return Folder(Path(path), both[split], list(dict.fromkeys(line["question"] for line in every)))


def _talk(line: Talk | dict[str, str]) -> Talk:
    return line if isinstance(line, Talk) else Talk((line["image"],), ((PLACE + line["question"], line["answer"]),))


def read(file: Path) -> list[Talk | dict[str, str]]:
    """The lines of one file: conversations, or questions with their columns."""
    if not file.is_file():
        raise UserError(f"there is no {file}", needed="a folder with train.jsonl and val.jsonl, pictures beside them",
                        next='a line: {"image": "a.jpg", "question": "how many cats?", "answer": "two"}')  # fmt: skip
    lines, wrong = [], []
    for number, text in enumerate(file.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"line {number} of {file} is no JSON", got=f"{error}: {text[:60]}") from None
        if not isinstance(line, dict) or not {"conversations", "messages"} & line.keys():
            lines.append(_question(line, f"line {number} of {file}"))
            continue
        try:
            lines.append(talk(line))
        except Wrong as why:
            wrong.append(f"line {number}: {why}")
    if wrong:
        raise UserError(f"{len(wrong):,} of {len(wrong) + len(lines):,} lines of {file} are no conversations about pictures",
                        got="; ".join(wrong[:3]), needed=f"users and answers in turn, a text each, as many {PLACE} as pictures",
                        cause="a picture that is not there, a line converted by halves", next="mend or delete them")  # fmt: skip
    if not lines:
        raise UserError(f"{file} is empty", needed="a line for each question")
    return lines


def _question(line: Any, where: str) -> dict[str, str]:
    columns = line.keys() if isinstance(line, dict) else ()
    if not {*COLUMNS} <= {*columns} or not all(isinstance(line[c], str) and line[c].strip() for c in COLUMNS):
        wrong = [c for c in COLUMNS if c in columns and not (isinstance(line[c], str) and line[c].strip())]
        raise UserError(f"{where} is no question about a picture",
                        needed=", ".join(COLUMNS) + ", each a text; or conversations, or messages",
                        got=f"{wrong[0]} {line[wrong[0]]!r}" if wrong else ", ".join(columns))  # fmt: skip
    question, answer = line["question"], line["answer"]
    if question.count(PLACE) > 1 or PLACE in answer or not plain(question):
        raise UserError(f"{where}: a picture has one place, before its question", got=f"{question!r}, answer {answer!r}"[:120],
                        needed=f"a question, with one {PLACE} or none; several pictures are a conversation",
                        next='{"images": ["a.jpg", "b.jpg"], "messages": [...]}')  # fmt: skip
    return {**line, "question": plain(question)}
