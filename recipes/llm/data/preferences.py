"""Prompts with two answers, one of them preferred: where they come from, and how a chat model reads them."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from trainworthy.core.data import texts
from trainworthy.recipes.llm.data import conversations, docstrings, formats, pairs
from trainworthy.recipes.llm.evaluation import metrics
from trainworthy.recipes.shared import hub

from trainworthy import core

COLUMNS = ("prompt", "chosen", "rejected")
SCORES = {"score", "rating", "reward", "avg", "average", "mean", "overall"}
"""Words in the name of a column where more is better."""
SCORED = 8  # rows with different scores; fewer say nothing
SYSTEM = "You say what a Python function does."  # for docstrings


@dataclass(unsafe_hash=True)
class Source:
    """Where the preferences come from."""

    path: str = "docstrings"
    """`docstrings` (constructed from the standard library's), a .jsonl, .json, .csv or .parquet file, or `hub:owner/name`:
    `prompt`, `chosen` and `rejected` as texts or as turns, or `chosen` and `rejected` that begin with the same turns; a column
    `source`, if there is one, is what the split must not cut through."""
    val: str = ""
    """Validation rows: a file like `path`, or a share of the rows (`0.1`); empty: the data set's own split, else 0.05."""
    columns: str = ""
    """Names of columns that are called otherwise in the file: `prompt=question,chosen=good,rejected=bad`."""
    system: str = "auto"
    """System turn of every chat; empty: none (some templates then put their own). `auto`: the task for docstrings, else none."""
    max_length: int = 0
    """Tokens of prompt and answer together; 0: as few as leave out no more than 1% of the rows, or `max_bad` if less (docstrings: 96)."""
    max_bad: float = 0.01
    """Share of preferences that may be longer, unusable, or have one answer twice; they are left out, counted and named."""
    held_out: int = 128
    """Validation preferences that are read, evenly spaced. 0: all there are."""

    def __post_init__(self):
        self.path, self.val = hub.absolute(self.path), hub.absolute(self.val)  # resumable from any folder


def chat(tokenizer: Any, source: Source) -> pairs.Chat:
    """Return the renderer of rows of `source` with this tokenizer's template."""
    rows = [] if source.path == "docstrings" else pairs.tables(source.path, source.columns)["train"]
    return pairs.Chat(
        tokenizer,
        formats.system(source.system, source.path, SYSTEM),
        any(formats.is_conversation(r) for r in rows),
        every_turn=False,
    )


def read(source: Source, chat: pairs.Chat) -> tuple[pairs.Rows, pairs.Rows, pairs.Rows, list[str]]:
    """(train, val, test) rows of `prompt`, `chosen`, `rejected` and `source`, and what to say of rows left out. They are prepared once
    per process."""
    return pairs.fresh(_read(source, chat))


@lru_cache(4)
def _read(source: Source, chat: pairs.Chat) -> tuple[pairs.Rows, pairs.Rows, pairs.Rows, list[str]]:
    return pairs.from_files("preferences", [source.path], source, chat, lambda: _sorted_out(source, chat))


def _sorted_out(source: Source, chat: pairs.Chat) -> tuple[pairs.Rows, pairs.Rows, pairs.Rows, list[str]]:
    if source.path == "docstrings":
        train, val, notes = *constructed(), []
        for row in (train[0], val[0]):
            _taken(row, chat)
    else:
        train, val, notes = pairs.read_file(source.path, lambda row: [rendered(row, chat)], source, what="preference",
                                           needed="prompt (str), chosen (str) and rejected (str), or the last two as turns")  # fmt: skip
        if "chosen" not in formats.mapping(source.columns):
            refuse_exchanged(pairs.tables(source.path, source.columns)["train"], source.path)
    return train, *pairs.spaced(val, source.held_out), notes


def refuse_exchanged(rows: list[dict[str, Any]], path: str) -> None:
    """Raise if scores of both answers in the file (`score_chosen`, `chosen-rating`, ...) say that the rejected ones are the better ones."""
    for name in dict.fromkeys(key for row in rows[:100] for key in row):
        other = name.replace("chosen", "rejected")
        words = {*re.split(r"[^a-z]+", name.lower())} - {"", "chosen"}
        if other == name or not words or not words <= SCORES:
            continue
        both = [(row.get(name), row.get(other)) for row in rows]
        differ = [a < b for a, b in both if isinstance(a, int | float) and isinstance(b, int | float) and a != b]
        if len(differ) >= SCORED and sum(differ) > len(differ) / 2:
            raise core.UserError(
                f"the rejected answer has the better score in {sum(differ) / len(differ):.0%} of {len(differ):,} rows of {path}",
                got=f"{name} below {other}", needed="the better answer under `chosen`", cause="chosen and rejected are exchanged",
                next="--data.columns chosen=rejected,rejected=chosen; if low scores are the good ones: --data.columns "
                     "chosen=chosen,rejected=rejected",
            )  # fmt: skip


def _taken(row: dict[str, str], chat: pairs.Chat) -> None:
    try:
        rendered(row, chat)
    except formats.BadRow as fault:
        raise core.UserError("the chat template cannot be trained with", got=fault.seen, cause=fault.why,
                             next="--chat-template FILE with a template for training") from None  # fmt: skip


def rendered(row: dict[str, Any], chat: pairs.Chat) -> dict[str, str]:
    """A row of any shape as three texts; a conversation before the answers is JSON, as `Chat.turns` reads it. Raises `BadRow`."""
    found = formats.preference(row)
    chat.unmarked(*(found[k] for k in COLUMNS))
    if "messages" in found:
        found["prompt"] = conversations.as_prompt({k: found.pop(k) for k in ("messages", "tools") if k in found})
    for key in ("chosen", "rejected"):
        turn = {"role": "assistant", "content": found[key]}
        if chat.form.fault or "<" in found[key] or "messages" in row or conversations.is_prompt(found["prompt"]):
            found[key] = chat.bare(chat.spoken(chat.turns(found["prompt"]), turn, found["prompt"])[1])
    if found["chosen"].strip() == found["rejected"].strip():
        raise formats.BadRow(
            "one answer twice, which prefers nothing (chosen and rejected filled from one column?)",
            repr(found["chosen"][:40]),
        )
    return found


def constructed() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return (train, val) pairs: the prompt is a function's name, `chosen` the first sentence of its docstring, `rejected` that of another
    function, of the same module if there is one. The pairs are constructed, not rated by people. No name is in both splits."""
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


def sizes(rows: list[dict[str, str]], chat: pairs.Chat) -> list[int]:
    """Tokens of each prompt with the longer of its answers."""
    both = (pairs.lengths(tuple((r["prompt"], r[k]) for r in rows), chat) for k in ("chosen", "rejected"))
    return [max(n) for n in zip(*both, strict=True)]


def usable(
    rows: list[dict[str, str]], chat: pairs.Chat, source: Source, name: str, limit: int
) -> tuple[list[dict[str, str]], list[str]]:
    """Return (rows that fit, notes on the others)."""
    if not rows:
        raise core.UserError(f"{name}: no preference in it", got=f"--data.path {source.path}",
                             cause="too few rows to hold some out",
                             needed="some dozens, a validation split, or --data.val FILE")  # fmt: skip
    most = sizes(rows, chat)
    long = {i: n for i, n in enumerate(most) if n > limit}
    if not long:
        return rows, []
    first = min(long)
    measured = f"{len(long)} of {len(rows)} preferences are longer than {limit} tokens (one has {long[first]}: {pairs.beginning(rows[first])})"
    if len(long) > pairs.spared(source.max_bad, len(rows)):
        raise pairs.too_long(f"{name}: {measured}", len(long) / len(rows), max(most), source)
    return [r for i, r in enumerate(rows) if i not in long], [measured]


def described(rows: list[dict[str, str]], chat: pairs.Chat, sizes: list[int], limit: int) -> dict[str, str]:
    """Return notes on a user's data: lengths of rows and of both answers, turns, scripts, repetitions, and what ends an answer."""
    found = {"lengths": pairs.percentiles(sizes, limit)}
    found |= {f"{k} answers": pairs.spread(pairs.answer_tokens(rows, chat, k)) for k in ("chosen", "rejected")}
    if chat.conversations:
        found["turns"] = pairs.turns(tuple(r["prompt"] for r in rows), chat)
    found["scripts"] = metrics.scripts([r["chosen"] for r in rows[:2000]])
    if repeated := len(rows) - len({tuple(texts.normal(r[k]) for k in COLUMNS) for r in rows}):
        found["repeated"] = f"{repeated:,} of {len(rows):,} rows have the words of an earlier one"
    return found | {"scored": f"both answers up to {chat.form.end!r}"} | pairs.echoed(rows, ("chosen", "rejected"))


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
    both = (pairs.plain_tokens(tuple(r[k] for r in rows), chat) for k in ("chosen", "rejected"))
    return torch.tensor([a - b for a, b in zip(*both, strict=True)])


class Preferences(core.Data):
    """Rows of text; `collate` turns some into what the trainer reads, so that gates can blank or exchange a prompt."""

    collator: Any = None
    """The trainer's, which pads."""

    def __init__(self, rows: list[dict[str, str]], chat: pairs.Chat):
        self.rows, self.chat = rows, chat
        self.fields = {"prompt": core.Field("input"), "chosen": core.Field("target"), "rejected": core.Field("target"),
                       "source": pairs.group_field(rows)}  # fmt: skip

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, str]:
        return self.rows[index]

    def row(self, sample: dict[str, str]) -> dict[str, list[int]]:
        """Return a sample as the trainer's collator expects it: prompt and answers in separate columns."""
        opening = self.chat.opening(self.chat.turns(sample["prompt"]), sample["prompt"])
        answers = {f"{k}_ids": self.chat.answer(sample[k], opening) for k in ("chosen", "rejected")}
        return {"prompt_ids": self.chat.ids(opening), **answers}

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
        prompt = row.pop("prompt_ids")
        return {k: prompt + answer for k, answer in row.items()} | {"prompt_length": [len(prompt)]}

    def answered(self, inputs: dict[str, Tensor], rows: list[dict[str, list[int]]]) -> Tensor:
        # (2B, 1) tokens of the prompt, whichever side is padded
        lengths = torch.tensor([r["prompt_length"] for r in rows] * 2)
        return (inputs["attention_mask"].cumsum(1) > lengths) & (inputs["attention_mask"] > 0)
