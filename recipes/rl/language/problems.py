"""Questions with one right answer: where they come from, how one is put to a language model, what an answer says, what it earns."""

import importlib
import importlib.util
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import torch
from trainworthy.recipes.llm.data import pairs
from trainworthy.recipes.shared import hub

from trainworthy import core

COLUMNS = ("prompt", "answer")
NUMBER = re.compile(r"(?<![\d.])-?\d[\d,]*(?:\.\d+)?")

Reward = Callable[..., list[float]]


@dataclass
class Source:
    """Where the questions come from."""

    path: str = "sums"
    """`sums` (of two two-digit numbers), a .jsonl, .json, .csv or .parquet file, or `hub:owner/name`: columns `prompt` and `answer`
    (its last number, else the text); a column `source`, if there is one, is what the split must not cut through."""
    style: Literal["lines", "chat"] = "lines"
    """`lines`: some solved questions, a line each, then the question; the answer ends with its line. `chat`: the tokenizer's chat
    template; the answer ends with its turn."""
    shots: int = 1
    """Solved questions before each question."""
    system: str = ""
    """System turn of every chat; empty: none (some templates then put their own)."""
    max_prompt: int = 64
    """Tokens of a prompt, the solved questions included."""
    max_bad: float = 0.01
    """Share of questions that may be longer; they are left out, counted and named."""
    held_out: int = 200
    """Validation questions that are read, evenly spaced. 0: all there are."""

    def __post_init__(self):
        self.path = hub.absolute(self.path)  # resumable from any folder


def read(source: Source) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(train, val) rows of `prompt`, `answer` and `source`; no prompt of one split stands in the other."""
    train, val = sums() if source.path == "sums" else pairs.read_file(source.path, checked)
    n = min(source.held_out or len(val), len(val))
    return train, [val[i * len(val) // n] for i in range(n)]


def checked(rows: Any, where: str) -> list[dict[str, str]]:
    """Rows with both columns as text (a number may stand as such); anything else is told by its name and type."""
    plain = ({k: str(v) if k == "answer" and isinstance(v, int | float) else v for k, v in r.items()} for r in rows)
    return pairs.columns(plain, where, COLUMNS, "question with an answer")


def sums() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Every sum of two two-digit numbers; one in ten is held out, together with its twin: who has seen 34 + 12 knows 12 + 34."""
    rows = []
    for a in range(10, 100):
        for b in range(10, 100):
            twin = f"{min(a, b)} and {max(a, b)}"
            rows.append({"prompt": f"{a} + {b} =", "answer": str(a + b), "source": twin})
    rows.sort(key=lambda r: crc32(r["prompt"].encode()))
    apart = [crc32(r["source"].encode()) % 10 == 0 for r in rows]
    return [r for r, a in zip(rows, apart, strict=True) if not a], [r for r, a in zip(rows, apart, strict=True) if a]


# -------------------------------------------------------------------------------------------------------------- answers
def number(text: str) -> float | None:
    """The last number in a text: what stands before it is working. None: there is none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def right(said: str, answer: str) -> bool:
    """Does a text say the answer? Its last number, where the answer is one, else the whole text, whatever the case."""
    due = number(answer)
    return said.strip().casefold() == answer.strip().casefold() if due is None else number(said) == due


def exact(completions: list[str], answer: list[str], **_) -> list[float]:
    """1 for the right answer, 0 for any other."""
    return [float(right(said, due)) for said, due in zip(completions, answer, strict=True)]


def majority(train: list[dict[str, str]], val: list[dict[str, str]]) -> float:
    """Share of `val` that the commonest answer of `train` gets right."""
    counts: dict[str, int] = {}
    for r in train:
        counts[r["answer"]] = counts.get(r["answer"], 0) + 1
    most = max(counts, key=counts.__getitem__)
    return sum(right(most, r["answer"]) for r in val) / len(val)


# -------------------------------------------------------------------------------------------------------------- rewards
def load(name: str) -> Reward:
    """`exact`, or a function of one's own as `module:function` or `file.py:function`."""
    if name == "exact":
        return exact
    where, _, function = name.rpartition(":")
    wanted = "exact, module:function or file.py:function"
    if not where:
        raise core.UserError(f"--reward {name}: no such reward", needed=wanted)
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise core.UserError(f"--reward {name}: there is no file {where}", needed=wanted)
        spec = importlib.util.spec_from_file_location("own_reward", where)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise core.UserError(f"--reward {name}: {error}", needed=wanted,
                                 next="a file's own path (./rewards.py:function) needs no import path") from error  # fmt: skip
    if not callable(found := getattr(module, function, None)):
        raise core.UserError(f"--reward {name}: {where} has no function {function}", needed=wanted)
    return found


def guarded(function: Reward, name: str, fail: Callable[[str], Exception]) -> Reward:
    """`function` as TRL calls it: texts for chats, and one finite number for each completion or what `fail` makes of the reason."""

    def reward(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float]:
        said = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        asked = [p if isinstance(p, str) else p[-1]["content"] for p in prompts]
        told = f"the reward function {name} "
        known = {k: v for k, v in columns.items() if k == "source"}
        try:
            found = function(prompts=asked, completions=said, answer=answer, **known)
        except Exception as error:
            at = inspect.trace()[-1]
            raise fail(
                f"{told}raised {type(error).__name__}: {error} ({at.filename}:{at.lineno}), for e.g. {said[0]!r}"
            ) from error
        if not isinstance(found, list | tuple) or len(found) != len(said):
            got = f"{len(found)} rewards" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
            raise fail(
                f"{told}returned {got} for {len(said)} completions: it must return a list of one number for each"
            )
        for text, value in zip(said, found, strict=True):
            if not isinstance(value, bool | int | float) or not math.isfinite(value):
                raise fail(f"{told}returned {value!r} for the completion {text[:60]!r}: it must return a finite number")
        return [float(v) for v in found]

    return reward


def tried(reward: Reward, rows: list[dict[str, str]]) -> None:
    """The function on a right answer, none, a long one and that of another question, before anything is built."""
    few = [rows[i % len(rows)] for i in range(4)]
    texts = [few[0]["answer"], "", "no idea " * 20, few[0]["answer"]]
    reward(prompts=[r["prompt"] for r in few], completions=texts, answer=[r["answer"] for r in few],
           source=[r["source"] for r in few])  # fmt: skip


def of_others(function: Reward) -> Reward:
    """The control: each completion gets the reward of another one of its batch, drawn from torch's global generator."""

    def reward(**columns: Any) -> list[float]:
        values = function(**columns)
        return [values[i] for i in torch.randperm(len(values))]

    return reward


# -------------------------------------------------------------------------------------------------------------- prompts
class Asker:
    """How a question is put: solved ones before it, as lines of text or as turns of a chat."""

    def __init__(self, tokenizer: Any, source: Source, solved: list[dict[str, str]]):
        self.tokenizer, self.source = tokenizer, source
        self.solved = [solved[i * len(solved) // source.shots] for i in range(source.shots)]
        self.chat = pairs.Chat(tokenizer, source.system)
        self.ends = [tokenizer.eos_token_id]
        if source.style == "lines":
            line = tokenizer("\n", add_special_tokens=False)["input_ids"]
            if len(line) != 1:
                raise core.UserError(
                    "a line's end is not one token of this tokenizer", needed="--data.style chat", got=line
                )
            self.ends += line
        """Ids that end an answer; the last is what an answer is ended with."""

    def put(self, prompt: str) -> str | list[dict[str, str]]:
        """The prompt as TRL takes it: a text, or turns."""
        if self.source.style == "lines":
            return "".join(f"{r['prompt']} {r['answer']}\n" for r in self.solved) + prompt
        turns = self.chat.turns(prompt)
        for r in self.solved:
            answered = ({"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["answer"]})
            turns[-1:-1] = answered
        return turns

    def ids(self, prompt: str) -> list[int]:
        """Tokens up to where the answer begins."""
        asked = self.put(prompt)
        return self.tokenizer(asked)["input_ids"] if isinstance(asked, str) else self.chat.ask(asked)

    def answer(self, text: str) -> list[int]:
        """Tokens of an answer and of what ends it."""
        said = f" {text}" if self.source.style == "lines" else text
        return [*self.tokenizer(said, add_special_tokens=False)["input_ids"], self.ends[-1]]


def usable(rows: list[dict[str, str]], asker: Asker, name: str, *, context: int, new: int) -> tuple[list[dict], str]:
    """(rows whose prompt fits, what to say of the others). A prompt that is cut is another question."""
    source = asker.source
    most = min(source.max_prompt, context - new)
    frame = len(asker.ids("")) + 1  # a token that the seam may split
    sizes = [frame + n for n in lengths(tuple(r["prompt"] for r in rows), asker.tokenizer)]
    long = [i for i, n in enumerate(sizes) if n > most]
    if not long:
        return rows, ""
    told = f"{len(long)} of {len(rows)} prompts are longer than {most} tokens (row {long[0]}: {sizes[long[0]]})"
    if len(long) > source.max_bad * len(rows):
        beyond = max(sizes) + new > context
        raise core.UserError(
            f"{name}: {told}", needed=f"at most {source.max_bad:.1%} (--data.max-bad)",
            got=f"a context of {context} tokens, {new} of them for the answer" if beyond else "",
            cause="a prompt longer than the model's context" if beyond else "a limit for short questions, or many --data.shots",
            next="a model with a longer context, fewer --data.shots, or --data.max-bad" if beyond
            else f"--data.max-prompt {max(sizes)}",
        )  # fmt: skip
    return [r for i, r in enumerate(rows) if i not in {*long}], f"{told}: left out"


@cache
def lengths(prompts: tuple[str, ...], tokenizer: Any) -> list[int]:
    """Tokens of each prompt by itself, counted once per process."""
    return [len(ids) for ids in tokenizer(list(prompts), add_special_tokens=False)["input_ids"]]


class Problems(core.Data):
    """Rows of text."""

    def __init__(self, rows: list[dict[str, str]]):
        self.rows = rows
        self.fields = {"prompt": core.Field("input"), "answer": core.Field("target"), "source": core.Field("group")}

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, str]:
        return self.rows[index]

    def collate(self, samples: list[dict[str, str]]) -> dict[str, list[str]]:
        """The columns, (B,) texts each."""
        return {k: [s[k] for s in samples] for k in self.fields}
