"""Prompts with the completion that is wanted: where they come from, and how a chat model reads one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

import core
from recipes.llm import docstrings

IGNORED = -100
COLUMNS = ("prompt", "completion")
SCHEMAS = {"completion": "prompts with one completion (SFT)",
           "chosen": "preferences (DPO)", "rejected": "preferences (DPO)", "messages": "whole conversations",
           "conversations": "whole conversations", "text": "plain text (pretraining)"}  # fmt: skip


@dataclass
class Source:
    """Where the pairs come from."""

    path: str = "docstrings"
    """`docstrings` (the standard library's), a .jsonl, .json, .csv or .parquet file, or `hub:owner/name`: columns `prompt` and
    `completion`, both text; a column `source`, if there is one, is what the split must not cut through."""
    system: str = "You name Python functions."
    """System turn of every chat; empty: none (some templates then put their own)."""
    max_length: int = 96
    """Tokens of prompt and completion together."""
    max_bad: float = 0.01
    """Share of pairs that may be longer; they are left out, counted and named, never cut."""
    held_out: int = 128
    """Validation pairs that are read, evenly spaced: generating answers takes its time. 0: all there are."""


def read(source: Source) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(train, val) rows of `prompt`, `completion` and `source`."""
    train, val = docstrings.load() if source.path == "docstrings" else read_file(source.path, checked)
    n = min(source.held_out or len(val), len(val))
    return train, [val[i * len(val) // n] for i in range(n)]


def read_file(path: str, checked: Callable[[Iterable[dict], str], list[dict]]) -> tuple[list[dict], list[dict]]:
    """(train, val) rows of a file or of a data set on the hub, `checked`; what has no split of its own gets one by its `source`."""
    splits = _tables(path)
    held_out = next((splits[k] for k in ("validation", "val", "test") if k in splits), None)
    train = checked(splits["train"], path)
    if held_out is not None:
        return train, checked(held_out, path)
    apart = [crc32(row["source"].encode()) % 20 == 0 for row in train]  # one in twenty, whatever the seed
    return [r for r, a in zip(train, apart, strict=True) if not a], [r for r, a in zip(train, apart, strict=True) if a]


def _tables(path: str) -> dict[str, Iterable[dict[str, Any]]]:
    """Splits of a file or of a data set on the hub, as `datasets` reads them."""
    import datasets

    datasets.disable_progress_bars()
    if path.startswith("hub:"):
        return datasets.load_dataset(path.removeprefix("hub:"))
    kinds = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    file = Path(path)
    if not file.is_file() or file.suffix not in kinds:
        raise core.UserError(
            f"--data.path {path}: no such file of pairs", needed=f"a {', '.join(kinds)} file, or hub:owner/name"
        )
    return datasets.load_dataset(kinds[file.suffix], data_files={"train": str(file)})


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

    def turns(self, prompt: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": prompt}]

    def shots(self, rows: list[dict[str, str]], n: int) -> list[dict[str, str]]:
        """Turns of `n` answered prompts, evenly spaced in `rows`: a prompt with examples."""
        some = [rows[i * len(rows) // n] for i in range(n)]
        return [
            turn
            for r in some
            for turn in (self.turns(r["prompt"])[-1], {"role": "assistant", "content": r["completion"]})
        ]

    def ask(self, turns: list[dict[str, str]]) -> list[int]:
        """Ids up to where the answer begins: what generation starts from."""
        return self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]

    def answer(self, completion: str) -> list[int]:
        """Ids of an answer and of the token that ends its turn."""
        return self.tokenizer(completion, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]

    def example(self, prompt: str, completion: str) -> dict[str, list[int]]:
        """Ids and labels of one pair: only the completion and the end-of-turn token after it are scored."""
        asked = self.ask(self.turns(prompt))
        answer = self.answer(completion)
        return {"input_ids": asked + answer, "labels": [IGNORED] * len(asked) + answer}


class Pairs(core.Data):
    """Rows of text; `collate` turns some into ids and labels, so that gates can blank or exchange a prompt."""

    collator: Any = None
    """The trainer's, which pads."""

    def __init__(self, rows: list[dict[str, str]], chat: Chat):
        self.rows, self.chat = rows, chat
        self.fields = {"prompt": core.Field("input"), "completion": core.Field("target"), "source": core.Field("group")}

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, str]:
        return self.rows[index]

    def collate(self, samples: list[dict[str, str]]) -> dict[str, Any]:
        """{input_ids, labels, attention_mask (B, T)} beside the texts as they are."""
        batch = self.collator([self.chat.example(s["prompt"], s["completion"]) for s in samples])
        return {**batch, **{key: [s[key] for s in samples] for key in self.fields}}


def short_enough(rows: list[dict[str, str]], chat: Chat, source: Source, name: str) -> tuple[list[dict[str, str]], str]:
    """(rows that fit, what to say of the others). A completion that is cut never ends; one that is cut off teaches nothing."""
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
    frame = len(chat.ask(chat.turns("")))
    ids = chat.tokenizer([p + c for p, c in pairs], add_special_tokens=False)["input_ids"] if pairs else []
    return [frame + len(one) + 2 for one in ids]  # two for the end of turn, and for a token that the seam may split
