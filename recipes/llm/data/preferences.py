"""Prompts with two answers, one of them preferred: where they come from, and how a chat model reads them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from trainworthy.recipes.llm.data import docstrings, pairs
from trainworthy.recipes.shared import hub

from trainworthy import core

COLUMNS = ("prompt", "chosen", "rejected")


@dataclass
class Source:
    """Where the preferences come from."""

    path: str = "docstrings"
    """`docstrings` (constructed from the standard library's), a .jsonl, .json, .csv or .parquet file, or `hub:owner/name`: columns
    `prompt`, `chosen` and `rejected`, all text; a column `source`, if there is one, is what the split must not cut through."""
    system: str = "You say what a Python function does."
    """System turn of every chat; empty: none (some templates then put their own)."""
    max_length: int = 96
    """Tokens of prompt and answer together."""
    max_bad: float = 0.01
    """Share of preferences that may be longer, or whose two answers are the same; they are left out, counted and named."""
    held_out: int = 128
    """Validation preferences that are read, evenly spaced. 0: all there are."""

    def __post_init__(self):
        self.path = hub.absolute(self.path)  # resumable from any folder


def read(source: Source) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(train, val) rows of `prompt`, `chosen`, `rejected` and `source`."""
    train, val = constructed() if source.path == "docstrings" else pairs.read_file(source.path, checked)
    n = min(source.held_out or len(val), len(val))
    return train, [val[i * len(val) // n] for i in range(n)]


def constructed() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """A function's name, the first sentence of its docstring preferred to that of another function, of the same module where there
    is one. Nobody preferred anything: these are constructed. No name stands in both splits."""
    train, val = (_against_others(rows) for rows in docstrings.load())
    known = {row["prompt"] for row in val}
    return [row for row in train if row["prompt"] not in known], val


def _against_others(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    order = sorted(rows, key=lambda r: (r["source"], crc32(r["prompt"].encode())))
    found = []
    for i, row in enumerate(order):
        after = (order[(i + k) % len(order)] for k in range(1, len(order)))
        other = next(o for o in after if o["completion"] != row["completion"] and o["prompt"] != row["prompt"])
        found.append(
            {"prompt": row["completion"], "chosen": row["prompt"], "rejected": other["prompt"], "source": row["source"]}
        )
    return sorted(found, key=lambda r: crc32(r["chosen"].encode()))


def checked(rows: Iterable[dict[str, Any]], where: str) -> list[dict[str, str]]:
    """Rows with all three columns as text; anything else is told by its name and type."""
    return pairs.columns(rows, where, COLUMNS, "preference")


def usable(
    rows: list[dict[str, str]], chat: pairs.Chat, source: Source, name: str
) -> tuple[list[dict[str, str]], list[str]]:
    """(rows that fit and say something, what to say of the others). Two answers that are the same prefer nothing."""
    sizes = [pairs.lengths(tuple((r["prompt"], r[k]) for r in rows), chat) for k in ("chosen", "rejected")]
    long = {i: max(n) for i, n in enumerate(zip(*sizes, strict=True)) if max(n) > source.max_length}
    same = {i for i, r in enumerate(rows) if r["chosen"].strip() == r["rejected"].strip()}
    told = []
    if long:
        told.append(f"{len(long)} of {len(rows)} preferences are longer than {source.max_length} tokens (row {min(long)}: "
                    f"{long[min(long)]})")  # fmt: skip
    if same:
        told.append(f"{len(same)} of {len(rows)} preferences have one answer twice (row {min(same)}: "
                    f"{rows[min(same)]['chosen'][:40]!r})")  # fmt: skip
    if len({*long, *same}) > source.max_bad * len(rows):
        raise core.UserError(f"{name}: {'; '.join(told)}", needed=f"at most {source.max_bad:.1%} (--data.max-bad)",
                             cause="a limit for short texts" if long else "chosen and rejected filled from one column",
                             next=f"--data.max-length {max(map(max, sizes))}" if long and not same else "look at these rows, "
                                  "then give the file again or raise --data.max-bad")  # fmt: skip
    return [r for i, r in enumerate(rows) if i not in long and i not in same], told


def shared_words(rows: list[dict[str, str]]) -> Tensor:
    """How many more words of its prompt the chosen answer has than the rejected one, (N,); a word's first four letters count."""

    def stems(text: str) -> set[str]:
        return {w.lower()[:4] for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", text)}

    return torch.tensor([len(stems(r["prompt"]) & stems(r["chosen"])) - len(stems(r["prompt"]) & stems(r["rejected"]))
                         for r in rows])  # fmt: skip


def longer(rows: list[dict[str, str]]) -> Tensor:
    """How many more letters the chosen answer has than the rejected one, (N,)."""
    return torch.tensor([len(r["chosen"]) - len(r["rejected"]) for r in rows])


def more_tokens(rows: list[dict[str, str]], chat: pairs.Chat) -> Tensor:
    """How many more tokens the chosen answer has than the rejected one, (N,)."""
    ids = [chat.tokenizer([r[k] for r in rows], add_special_tokens=False)["input_ids"] for k in ("chosen", "rejected")]
    return torch.tensor([len(a) - len(b) for a, b in zip(*ids, strict=True)])


class Preferences(core.Data):
    """Rows of text; `collate` turns some into what the trainer reads, so that gates can blank or exchange a prompt."""

    collator: Any = None
    """The trainer's, which pads."""

    def __init__(self, rows: list[dict[str, str]], chat: pairs.Chat):
        self.rows, self.chat = rows, chat
        self.fields = {"prompt": core.Field("input"), "chosen": core.Field("target"), "rejected": core.Field("target"),
                       "source": core.Field("group")}  # fmt: skip

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, str]:
        return self.rows[index]

    def row(self, sample: dict[str, str]) -> dict[str, list[int]]:
        """What the trainer's collator gets of a sample: the answers apart from their prompt."""
        asked = self.chat.ask(self.chat.turns(sample["prompt"]))
        return {"prompt_ids": asked, **{f"{k}_ids": self.chat.answer(sample[k]) for k in ("chosen", "rejected")}}

    def answered(self, inputs: dict[str, Tensor], rows: list[dict[str, list[int]]]) -> Tensor:
        """Which tokens are an answer's, (2B, T)."""
        return inputs["completion_mask"]

    def collate(self, samples: list[dict[str, str]]) -> dict[str, Any]:
        """`inputs` of the trainer, (2B, T): the B chosen answers behind their prompts, then the B rejected ones; the same as
        {input_ids, attention_mask, labels} (B, 2, T), and the texts."""
        rows = [self.row(s) for s in samples]
        inputs = dict(self.collator(rows))
        labels = inputs["input_ids"].masked_fill(self.answered(inputs, rows) == 0, pairs.IGNORED)
        seen = {k: inputs[k] for k in ("input_ids", "attention_mask")} | {"labels": labels}
        seen = {k: v.unflatten(0, (2, -1)).transpose(0, 1) for k, v in seen.items()}
        return {"inputs": inputs, **seen, **{key: [s[key] for s in samples] for key in self.fields}}


class Whole(Preferences):
    """The same for a trainer that reads each answer and its prompt as one text."""

    def row(self, sample: dict[str, str]) -> dict[str, list[int]]:
        row = super().row(sample)
        asked = row.pop("prompt_ids")
        return {k: asked + answer for k, answer in row.items()} | {"asked": [len(asked)]}

    def answered(self, inputs: dict[str, Tensor], rows: list[dict[str, list[int]]]) -> Tensor:
        asked = torch.tensor([r["asked"] for r in rows] * 2)  # (2B, 1) tokens of the prompt, whichever side is padded
        return (inputs["attention_mask"].cumsum(1) > asked) & (inputs["attention_mask"] > 0)
