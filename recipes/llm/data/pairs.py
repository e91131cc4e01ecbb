"""Prompts with the completion that is wanted: where they come from, and how a chat model reads one."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch.nn.utils.rnn import pad_sequence
from trainworthy.recipes.llm.data import conversations, docstrings, mixture
from trainworthy.recipes.shared import hub

from trainworthy import core

IGNORED = -100
VALIDATION = ("validation", "val", "test")
COLUMNS = ("prompt", "completion")
SCHEMAS = {"completion": "prompts with one completion (SFT)",
           "chosen": "preferences (DPO)", "rejected": "preferences (DPO)", "messages": "whole conversations",
           "conversations": "whole conversations", "text": "plain text (pretraining)"}  # fmt: skip


@dataclass
class Source:
    """Where the pairs come from."""

    path: str = "docstrings"
    """`docstrings` (the standard library's), a .jsonl, .json, .csv or .parquet file, or `hub:owner/name`: columns `prompt` and
    `completion`, both text, or whole conversations as `messages` (and `tools`); a column `source`, if there is one, is what the
    split must not cut through. Several with commas between them, a weight behind `*`: `a.jsonl,b.jsonl*2,hub:owner/name*0.5`."""
    system: str = "You name Python functions."
    """System turn of every chat; empty: none (some templates then put their own)."""
    max_length: int = 96
    """Tokens of prompt and completion together."""
    max_bad: float = 0.01
    """Share of pairs that may be longer; they are left out, counted and named, never cut."""
    held_out: int = 128
    """Validation pairs that are read, evenly spaced: generating answers takes its time. 0: all there are."""
    every_turn: bool = True
    """Score every answer of a conversation; no: the last one alone."""
    near: float = 0.8
    """A pair of a file goes if an earlier one has this share of its words, in runs of four; 1: only equal pairs go; 0: none."""

    def __post_init__(self):
        self.path = mixture.absolute(self.path)  # resumable from any folder


def chat(tokenizer: Any, source: Source) -> "Chat":
    """How this tokenizer's template puts what stands in `source`."""
    first = (next(iter(_tables(path)["train"]), {}) for path, _ in mixture.parts(source.path) if path != "docstrings")
    return Chat(tokenizer, source.system, any("messages" in row for row in first), source.every_turn)


def read(source: Source, chat: "Chat") -> tuple[list[dict[str, str]], list[dict[str, str]], list[str]]:
    """(train rows of `prompt`, `completion` and `source`, val rows, what to say of what was left out or repeated)."""
    parts, told = [], []
    for path, weight in mixture.parts(source.path):
        train, val = docstrings.load() if path == "docstrings" else read_file(path, chat.rows)
        n = min(source.held_out or len(val), len(val))
        parts.append(mixture.Part(path, weight, train, [val[i * len(val) // n] for i in range(n)]))
    if [p.path for p in parts] == ["docstrings"] and not chat.conversations and parts[0].weight == 1:
        return parts[0].train, parts[0].val, told  # one of each, and split so that nothing is shared
    return mixture.mixed([p.map(chat.row) for p in parts], source.near)


def read_file(path: str, checked: Callable[[Iterable[dict], str], list[dict]]) -> tuple[list[dict], list[dict]]:
    """(train, val) rows of a file or of a data set on the hub, `checked`; what has no split of its own gets one by its `source`."""
    splits = _tables(path)
    held_out = next((splits[k] for k in VALIDATION if k in splits), None)
    train = checked(splits["train"], path)
    if held_out is not None:
        return train, checked(held_out, path)
    apart = [crc32(row["source"].encode()) % 20 == 0 for row in train]  # one in twenty, whatever the seed
    return [r for r, a in zip(train, apart, strict=True) if not a], [r for r, a in zip(train, apart, strict=True) if a]


@cache
def _tables(path: str) -> dict[str, Iterable[dict[str, Any]]]:
    """Splits of a file or of a data set on the hub, as `datasets` reads them."""
    import datasets

    datasets.disable_progress_bars()
    if path.startswith("hub:"):
        found = hub.tables(path)
        held_out = [k for k in VALIDATION if k in found][:1]
        return {split: list(_plain(found[split])) for split in ("train", *held_out)}
    kinds = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    file = Path(path)
    if not file.is_file() or file.suffix not in kinds:
        raise core.UserError(
            f"--data.path {path}: no such file of pairs", needed=f"a {', '.join(kinds)} file, or hub:owner/name"
        )
    if not file.stat().st_size:
        raise core.UserError(f"--data.path {path} is empty", needed="one pair at least", cause="a download that failed")
    try:
        splits = datasets.load_dataset(kinds[file.suffix], data_files={"train": str(file)})
        return {"train": list(_plain(splits["train"]))}
    except (UnicodeDecodeError, datasets.exceptions.DatasetGenerationError) as error:
        raise hub.unreadable(file, error) from None


def _plain(table: Any) -> Iterator[dict[str, Any]]:
    """Rows of a table. What a column holds as a struct (in parquet, tool calls with their arguments) has in every row each key of
    any row: those without a value are left off, or a call would be learnt with arguments that nobody gave."""

    def own(value: Any, kind: Any) -> Any:
        if isinstance(kind, dict) and isinstance(value, dict):
            return {k: own(v, kind.get(k)) for k, v in value.items() if v is not None}
        if isinstance(value, list):
            return [own(v, getattr(kind, "feature", None)) for v in value]
        return value

    for row in table:
        yield {k: own(v, table.features[k]) for k, v in row.items()}


def checked(rows: Iterable[dict[str, Any]], where: str) -> list[dict[str, str]]:
    """Rows with both columns as text; anything else is told by its name and type."""
    return columns(rows, where, COLUMNS, "pair")


def columns(rows: Iterable[dict[str, Any]], where: str, wanted: tuple[str, ...], what: str) -> list[dict[str, str]]:
    """Rows with the `wanted` columns as text, none empty, and their `source` (else the prompt)."""
    found = []
    for i, row in enumerate(rows):
        wrong = [
            f"{k}: {type(row[k]).__name__ if k in row else 'missing'}"
            for k in wanted
            if not isinstance(row.get(k), str)
        ]
        wrong += [f"{k} is empty" for k in wanted if not wrong and not row[k].strip()]
        if wrong:
            wrong += [f"these look like {SCHEMAS[k]}" for k in row if k in SCHEMAS and k not in wanted][:1]
            raise core.UserError(
                f"row {i} of {where} is no {what}", got=", ".join(f"{k} ({type(v).__name__})" for k, v in row.items()),
                needed=f"columns {', '.join(f'{k} (str)' for k in wanted)}, none empty", cause="; ".join(wrong),
                next="rename or convert the columns, then give the file again",
            )  # fmt: skip
        found.append({k: row[k] for k in wanted} | {"source": str(row.get("source") or row["prompt"])})
    return found


@dataclass(frozen=True)
class Chat:
    """How a tokenizer's chat template puts a prompt and a completion; the template is applied once, and nothing is added to it."""

    tokenizer: Any
    system: str
    conversations: bool = False
    """Prompts are conversations up to an answer, as JSON (`recipes/llm/data/conversations.py`); else what a user says."""
    every_turn: bool = True
    """The answers in them are scored, too."""

    def rows(self, table: Iterable[dict[str, Any]], where: str) -> list[dict[str, Any]]:
        """The rows of a file, checked: whole conversations, or pairs."""
        table = list(table)
        if table and "messages" in table[0]:
            return conversations.checked(table, where)
        return checked(table, where)

    def row(self, row: dict[str, Any], where: str) -> dict[str, str]:
        """A checked row as text: `prompt`, `completion` and `source`."""
        if not self.conversations:
            return row
        if "messages" not in row:
            asked, answer = (
                {"role": r, "content": row[k]} for r, k in (("user", "prompt"), ("assistant", "completion"))
            )
            row = {"messages": [asked, answer], "source": row["source"]}
        return conversations.pair(row, self, where)

    def turns(self, prompt: str, shots: list[dict[str, str]] = ()) -> list[dict[str, Any]]:
        """The turns before the answer: the system's, examples of answered prompts, the prompt."""
        found = self._given(prompt)["messages"]
        system = [{"role": "system", "content": self.system}] if self.system and found[0]["role"] != "system" else []
        return [*system, *shots, *found]

    def _given(self, prompt: str) -> dict[str, Any]:
        """`messages`, and `tools` where it has some, of a prompt; a plain one (a gate's blank, too) is what a user says."""
        if self.conversations and prompt.startswith("{"):
            return json.loads(prompt)
        return {"messages": [{"role": "user", "content": prompt}]}

    def shots(self, rows: list[dict[str, str]], n: int) -> list[dict[str, str]]:
        """Turns of `n` answered prompts, evenly spaced in `rows`: a prompt with examples."""
        some = [rows[i * len(rows) // n] for i in range(n)]
        return [
            turn
            for r in some
            for turn in (self.turns(r["prompt"])[-1], {"role": "assistant", "content": r["completion"]})
        ]

    def render(self, turns: list[dict[str, Any]], prompt: str = "", **how: Any) -> Any:
        """What the template makes of `turns`, with the tools that `prompt` brings."""
        return self.tokenizer.apply_chat_template(turns, tools=self._given(prompt).get("tools"), **how)

    def ask(self, turns: list[dict[str, Any]], prompt: str = "") -> list[int]:
        """Ids up to where the answer begins: what generation starts from."""
        return self.render(turns, prompt, add_generation_prompt=True, return_dict=True)["input_ids"]

    def answer(self, completion: str) -> list[int]:
        """Ids of an answer and of the token that ends its turn."""
        return self.tokenizer(completion, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]

    def example(self, prompt: str, completion: str) -> dict[str, list[int]]:
        """Ids and labels of one pair: only answers and the end-of-turn tokens after them are scored."""
        turns = self.turns(prompt)
        asked, answer = self.ask(turns, prompt), self.answer(completion)
        labels = [IGNORED] * len(asked)
        for k in self.answered(turns):
            start = len(self.ask(turns[:k], prompt))  # conversations.pair has seen that the template puts them so
            end = asked.index(self.tokenizer.eos_token_id, start) + 1
            labels[start:end] = asked[start:end]
        return {"input_ids": asked + answer, "labels": labels + answer}

    def answered(self, turns: list[dict[str, Any]]) -> list[int]:
        """Which of the turns before the last answer are scored."""
        return [k for k, turn in enumerate(turns) if turn["role"] == "assistant"] if self.every_turn else []

    def shown(self, prompt: str) -> str:
        """What was said last."""
        return self._given(prompt)["messages"][-1]["content"]

    def saying(self, prompt: str, more: str) -> str:
        """The prompt, with `more` said at its end."""
        found = self._given(prompt)
        last = found["messages"][-1]
        last["content"] = f"{last['content']} {more}"
        return json.dumps(found) if self.conversations else last["content"]


class Pairs(core.Data):
    """Rows of text; `collate` turns some into ids and labels, so that gates can blank or exchange a prompt."""

    collator: Any = None
    """The trainer's, which pads, or packs."""

    def __init__(self, rows: list[dict[str, str]], chat: Chat):
        self.rows, self.chat = rows, chat
        self.fields = {"prompt": core.Field("input"), "completion": core.Field("target"), "source": core.Field("group")}

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, str]:
        return self.rows[index]

    def collate(self, samples: list[dict[str, str]]) -> dict[str, Any]:
        """{input_ids, labels, attention_mask (B, T)} beside the texts as they are; where the trainer packs, what it reads is
        `inputs`, all samples in one row (1, sum of their tokens)."""
        examples = [self.chat.example(s["prompt"], s["completion"]) for s in samples]
        batch = dict(self.collator(examples))
        if "position_ids" in batch:
            batch = {"inputs": batch, **padded(examples, self.chat)}
        return {**batch, **{key: [s[key] for s in samples] for key in self.fields}}


def behind(shots: list[dict[str, str]], batch: dict[str, Any], chat: Chat) -> dict[str, torch.Tensor]:
    """The pairs of a batch behind answered prompts, as `padded`; their own completions alone are scored."""
    parts = [
        (chat.ask(chat.turns(p, shots), p), chat.answer(c)) for p, c in zip(*(batch[k] for k in COLUMNS), strict=True)
    ]
    return padded([{"input_ids": a + b, "labels": [IGNORED] * len(a) + b} for a, b in parts], chat)


def padded(examples: list[dict[str, list[int]]], chat: Chat) -> dict[str, torch.Tensor]:
    """Ids and labels of some examples as {input_ids, labels, attention_mask} (B, T), padded on the right."""
    pad = {"input_ids": chat.tokenizer.pad_token_id, "labels": IGNORED, "attention_mask": 0}
    rows = [{k: torch.tensor(v) for k, v in e.items()} for e in examples]
    rows = [row | {"attention_mask": torch.ones_like(row["labels"])} for row in rows]
    return {k: pad_sequence([row[k] for row in rows], True, value) for k, value in pad.items()}


def short_enough(rows: list[dict[str, str]], chat: Chat, source: Source, name: str) -> tuple[list[dict[str, str]], str]:
    """(rows that fit, what to say of the others). A completion that is cut never ends; one that is cut off teaches nothing."""
    if not rows:
        raise core.UserError(f"{name}: no pair in it", got=f"--data.path {source.path}", cause="too few rows to hold some out: one "
                             "`source` (else prompt) in twenty is", needed="some dozens, or a validation split")  # fmt: skip
    sizes = lengths(tuple((r["prompt"], r["completion"]) for r in rows), chat)
    long = [i for i, n in enumerate(sizes) if n > source.max_length]
    if not long:
        return rows, ""
    told = (
        f"{len(long)} of {len(rows)} pairs are longer than {source.max_length} tokens (row {long[0]}: {sizes[long[0]]})"
    )
    if len(long) > source.max_bad * len(rows):
        enough = len(long) / len(rows) + 0.001
        raise core.UserError(f"{name}: {told}", needed=f"at most {source.max_bad:.1%} (--data.max-bad)",
                             cause="a limit for short texts, or a template that adds much",
                             next=f"--data.max-length {max(sizes)}, or --data.max-bad {enough:.3f}")  # fmt: skip
    return [r for i, r in enumerate(rows) if i not in {*long}], f"{told}: left out"


@cache
def lengths(pairs: tuple[tuple[str, str], ...], chat: Chat) -> list[int]:
    """Tokens of each pair, counted once per process."""
    if chat.conversations:
        return [len(chat.example(p, c)["input_ids"]) for p, c in pairs]
    frame = len(chat.ask(chat.turns("")))
    ids = chat.tokenizer([p + c for p, c in pairs], add_special_tokens=False)["input_ids"] if pairs else []
    return [frame + len(one) + 2 for one in ids]  # two for the end of turn, and for a token that the seam may split
