"""Questions with one right answer: their sources, prompts, the parsing of answers, and rewards."""

import inspect
import json
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import torch
from trainworthy.recipes.llm.data import conversations, formats, pairs
from trainworthy.recipes.llm.models import loading
from trainworthy.recipes.shared import functions, hub

from trainworthy import core

COLUMNS = ("prompt", "answer")
OTHERS = "columns"
"""Where a row keeps its other columns, as JSON; empty: it has none."""
TRAINERS = ("prompt", "prompts", "completion", "completions", "completion_ids", "question", "trainer_state",
            "log_extra", "log_metric")  # fmt: skip
"""What a reward function gets under these names comes from the trainer, not from the file."""
UNWORKED = re.compile(r"(?<=[\w)}\]])\s*(?:[-+*^×·÷]|\\cdot|\\times)\s*(?=[\w({\\])")
"""A sign between two parts of an expression."""
WORKED = re.compile(r"\n|=|(?<![\\A-Za-z])[A-Za-z]{2,}")
"""What an answer with its calculation, or in words, has: a line's end, an equals sign, a word that is no LaTeX command."""
NUMBER = re.compile(r"(?<![\d.])-?\d[\d,]*(?:\.\d+)?")

Reward = Callable[..., list[float]]


@dataclass
class Source:
    """Where the questions come from."""

    path: str = "sums"
    """`sums` (of two two-digit numbers), a .jsonl, .json, .csv or .parquet file, or `hub:owner/name`: columns `prompt` (a text, or turns
    with `--data.style chat`) and `answer` (see `--reward`); a column `source`, if there is one, is what the split must not cut through.
    Reward functions get the others, too."""
    val: str = ""
    """Validation questions: a file like `path`, or a share of the rows (`0.1`); empty: the data set's own split, else 0.05."""
    columns: str = ""
    """Names of columns that are called otherwise in the file: `prompt=question,answer=solution`."""
    style: Literal["lines", "chat"] = "lines"
    """`lines`: some solved questions, a line each, then the question; the answer ends with its line. `chat`: the tokenizer's chat
    template; the answer ends with its turn."""
    shots: int = 1
    """Solved questions before each question."""
    system: str = ""
    """System turn of every chat; empty: none (some templates then put their own)."""
    max_prompt: int = 0
    """Tokens of a prompt, the solved questions included; 0: as few as leave out no more than 1% of the questions, or `max_bad` if less."""
    max_bad: float = 0.01
    """Share of questions that may be longer; they are left out, counted and named."""
    held_out: int = 200
    """Validation questions that are read, evenly spaced. 0: all there are."""

    def __post_init__(self):
        self.path, self.val = hub.absolute(self.path), hub.absolute(self.val)  # resumable from any folder


def read(source: Source) -> tuple[pairs.Rows, pairs.Rows, pairs.Rows, list[str]]:
    """Return (train, val, test) rows of `prompt`, `answer` and `source`, and notes on rows that were left out."""
    if source.path == "sums":
        train, val, notes = *sums(), []
    else:
        one = partial(checked, chat=source.style == "chat")
        train, val, notes = pairs.read_file(source.path, one, source, what="question with an answer", every_column=True,
                                           needed="prompt (str) and answer (str), or a number")  # fmt: skip
        names = dict.fromkeys(k for row in (*train, *val) for k in row[OTHERS])
        for row in (*train, *val):
            row[OTHERS] = json.dumps(names | row[OTHERS], default=str) if names else ""
    return train, *pairs.spaced(val, source.held_out), notes


def checked(row: dict[str, Any], chat: bool = True) -> list[dict[str, Any]]:
    """Return a row with both columns as text, and the others under `OTHERS`; the answer may also be a number. Turns before the answer are
    text as `Chat.given` reads it."""
    answer = row.get("answer")
    number = isinstance(answer, int | float) and not isinstance(answer, bool)
    talk = formats.has_system(row) or any(isinstance(row.get(k), list) for k in ("prompt", "messages"))
    asked = {"prompt": turns(row, chat)} if talk else {}
    found = formats.texts(row | asked | ({"answer": str(answer)} if number else {}), COLUMNS)
    return [found | {OTHERS: {k: v for k, v in row.items() if k not in (*found, *TRAINERS, "messages")}}]


def turns(row: dict[str, Any], chat: bool) -> str:
    """The turns of a row as a prompt: the text of a single question, else JSON. Raises `BadRow`."""
    found = formats.question(row)
    if wrong := conversations.unasked(found["messages"]):
        raise formats.BadRow(wrong)
    roles = [turn["role"] for turn in found["messages"]]
    if found.get("tools"):
        raise formats.BadRow("it has tools, which this recipe lets no answer call")
    if roles[-1] != "user":
        raise formats.BadRow(f"its last turn is not the user's but the {roles[-1]}'s")
    if roles == ["user"]:
        return found["messages"][0]["content"]
    if not chat:
        raise formats.BadRow("its prompt is a conversation, which --data.style chat reads", ", ".join(roles))
    return conversations.as_prompt(found)


def columns(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    """What a guarded reward function gets of some rows besides prompts and completions."""
    return {k: [r[k] for r in rows] for k in ("answer", "source", OTHERS) if k in rows[0]}


def sums() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return every sum of two two-digit numbers as (train, val). One in ten is held out, together with the sum in the other order, because a
    model that has seen 34 + 12 knows 12 + 34."""
    rows = []
    for a in range(10, 100):
        for b in range(10, 100):
            twin = f"{min(a, b)} and {max(a, b)}"
            rows.append({"prompt": f"{a} + {b} =", "answer": str(a + b), "source": twin})
    rows.sort(key=lambda r: crc32(r["prompt"].encode()))
    held_out = [crc32(r["source"].encode()) % 10 == 0 for r in rows]
    return [r for r, a in zip(rows, held_out, strict=True) if not a], [
        r for r, a in zip(rows, held_out, strict=True) if a
    ]


# -------------------------------------------------------------------------------------------------------------- answers
def number(text: str) -> float | None:
    """Return the last number in a text (earlier ones are part of the calculation); None if there is none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


@lru_cache(65_536)
def right(text: str, answer: str) -> bool:
    """Return whether a text gives the answer. Numbers and formulas are compared by `math-verify` (the last one of the text; 1/2 equals 0.5),
    other answers as whole texts, ignoring case. An expression that is not evaluated (34 + 12 for 46) is wrong."""
    due = _parsed(answer)
    if not due:
        return text.strip().casefold() == answer.strip().casefold()
    found = _parsed(text)
    if not found or (UNWORKED.search(str(found[-1])) and not UNWORKED.search(answer)):
        return False
    import math_verify

    return bool(math_verify.verify(due, found, timeout_seconds=_limit()))


def _parsed(text: str) -> list[Any]:
    """Return what `math-verify` finds in a text: the last expression and its notation; empty if there is none."""
    import math_verify

    bare = "$" not in text and "\n" not in text.strip() and len(text) < 80 and ("\\" in text or "^" in text)
    return math_verify.parse(f"${text.strip()}$" if bare else text, parsing_timeout=_limit())


def _limit() -> int | None:
    """Return the seconds that one expression may take (9^9^9^9). A signal enforces it, so other threads than the main one have no limit."""
    return 5 if threading.current_thread() is threading.main_thread() else None


def differ(a: str, b: str) -> bool:
    """Return whether two answers surely differ: plain numbers and fractions by value, other texts by their letters, and calculations by
    their last numbers, too: two of them may have one result. Gates choose wrong answers with it, independently of the reward's own
    comparison."""
    values = [_value(text) for text in (a, b)]
    if None not in values:
        return values[0] != values[1]
    ends = [number(text) for text in (a, b)]
    if None not in ends and ends[0] == ends[1] and any(WORKED.search(text) for text in (a, b)):
        return False
    return "".join(a.casefold().split()) != "".join(b.casefold().split())


def _value(text: str) -> Fraction | None:
    plain = re.sub(r"^\\d?frac\{(-?\d+)\}\{(\d+)\}$", r"\1/\2", text.strip().strip("$")).replace(",", "")
    try:
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return None


def one_digit_off(answer: str) -> str:
    """The answer with its first digit changed, or with that of every number if there is a calculation: as long, and wrong. Empty: it has
    none, or is worth the same."""
    worked = WORKED.search(answer) is not None
    other = re.sub(r"(?<![\d.,])\d", lambda at: str(int(at[0]) % 9 + 1), answer, count=0 if worked else 1)
    return other if differ(other, answer) else ""


def one_digit_more(answer: str) -> str:
    """A whole number with one digit more, in which the answer is: wrong. Empty: the answer is no whole number."""
    return f"{answer}7" if re.fullmatch(r"-?\d+", answer) else ""


def exact(completions: list[str], answer: list[str], **_) -> list[float]:
    """1 for the right answer, 0 for any other."""
    return [float(right(text, due)) for text, due in zip(completions, answer, strict=True)]


def majority(train: list[dict[str, str]], val: list[dict[str, str]]) -> float:
    """Share of `val` that the commonest answer of `train` gets right."""
    counts: dict[str, int] = {}
    for r in train:
        counts[r["answer"]] = counts.get(r["answer"], 0) + 1
    most = max(counts, key=counts.__getitem__)
    return sum(right(most, r["answer"]) for r in val) / len(val)


# -------------------------------------------------------------------------------------------------------------- rewards
def load(names: str) -> Reward:
    """Load `exact`, or a function of your own as `module:function` or `file.py:function`. Several names, separated by commas and each with an
    optional `=weight`, give their weighted sum."""
    each = [_weighted(name) for name in names.split(",")]
    return _one(names) if len(each) == 1 and "=" not in names else Weighted(each)


def _weighted(name: str) -> tuple[str, float]:
    """Return name and weight of `function=0.5`; the default weight is 1."""
    own, sign, weight = name.strip().rpartition("=")
    if not sign:
        return name.strip(), 1.0
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not value:
        raise core.UserError(f"--reward {name.strip()}: {weight!r} is no weight", needed="function=NUMBER, and not 0",
                             next="exact=1,rewards.py:short=0.2")  # fmt: skip
    return own, value


class Weighted:
    """A weighted sum of rewards, as TRL's `reward_weights`; the mean of each is logged separately."""

    def __init__(self, names: list[tuple[str, float]]):
        self.parts = [
            (name.rpartition(":")[2], weight, guarded(_one(name), name, ValueError)) for name, weight in names
        ]
        self.means: dict[str, float] = {}
        called = [name for name, _, _ in self.parts]
        if len(set(called)) < len(called):
            raise core.UserError(
                "--reward names a function twice", got=", ".join(called), needed="each once, with one weight"
            )

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        total = [0.0] * len(completions)
        for name, weight, function in self.parts:
            values = function(completions=completions, **columns)
            self.means[name] = sum(values) / max(1, len(values))
            total = [t + weight * v for t, v in zip(total, values, strict=True)]
        return total


def _one(name: str) -> Reward:
    """One function by its name."""
    return (
        exact if name == "exact" else functions.imported(name, "--reward", "exact, module:function or file.py:function")
    )


def guarded(function: Reward, name: str, fail: Callable[[str], Exception]) -> Reward:
    """`function` as TRL calls it: texts for chats, and one finite number for each completion or what `fail` makes of the reason."""

    def reward(prompts: list, completions: list, **given: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        questions = [p if isinstance(p, str) else p[-1]["content"] for p in prompts]
        prefix = f"the reward function {name} "
        own = {k: v for k, v in given.items() if k not in (*TRAINERS, OTHERS)}
        more = [json.loads(text) for text in given.get(OTHERS, ()) if text]
        own |= {k: [row[k] for row in more] for k in more[0]} if more else {}
        try:
            found = function(prompts=questions, completions=texts, **own)
        except Exception as error:
            at = inspect.trace()[-1]
            raise fail(
                f"{prefix}raised {type(error).__name__}: {error} ({at.filename}:{at.lineno}), for e.g. {texts[0]!r}"
            ) from error
        if not isinstance(found, list | tuple) or len(found) != len(texts):
            got = f"{len(found)} rewards" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
            raise fail(
                f"{prefix}returned {got} for {len(texts)} completions: it must return a list of one number for each"
            )
        for text, value in zip(texts, found, strict=True):
            if not isinstance(value, bool | int | float) or not math.isfinite(value):
                raise fail(
                    f"{prefix}returned {value!r} for the completion {text[:60]!r}: it must return a finite number"
                )
        if log := given.get("log_metric"):
            for key, mean in getattr(function, "means", {}).items():
                log(f"rewards/{key}", mean)
        return [float(v) for v in found]

    return reward


def tried(reward: Reward, rows: list[dict[str, str]]) -> None:
    """The function on a right answer, none, a long one and that of another question, before anything is built."""
    group = [rows[i % len(rows)] for i in range(4)]
    texts = [group[0]["answer"], "", "no idea " * 20, group[0]["answer"]]
    reward(prompts=[r["prompt"] for r in group], completions=texts, **columns(group))


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
        self.chat = pairs.Chat(tokenizer, source.system, conversations=True)
        self.ends = [tokenizer.eos_token_id]
        if source.style == "chat":
            self.ends = [*(i for i in self.chat.ends if i != self.chat.end), self.chat.end]
        else:
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
        answered = [{"prompt": self.chat.last_text(r["prompt"]), "completion": r["answer"]} for r in self.solved]
        return self.chat.turns(prompt, self.chat.shots(answered, len(answered)) if answered else ())

    def after(self, solved: dict[str, str], prompt: str) -> str:
        """Return the prompt with a solved question before what is asked."""
        text = f"{self.chat.last_text(solved['prompt'])} {solved['answer']}\n{self.chat.last_text(prompt)}"
        return self.chat.asking(prompt, text)

    def ids(self, prompt: str) -> list[int]:
        """Return the tokens before the answer."""
        messages = self.put(prompt)
        return self.tokenizer(messages)["input_ids"] if isinstance(messages, str) else self.chat.ask(messages)

    def answer(self, text: str) -> list[int]:
        """Return the tokens of an answer and its end."""
        if self.source.style == "chat":
            return self.chat.answer(text)
        return [*self.tokenizer(f" {text}", add_special_tokens=False)["input_ids"], self.ends[-1]]


def asker_of(folder: Path, source: Source) -> Asker:
    """Return the prompts' renderer for an exported model in `folder`."""
    tokenizer = (loading.tokenizer if source.style == "chat" else loading.plain)(str(folder))
    return Asker(tokenizer, source, read(source)[0] if source.shots else [])


def usable(rows: list[dict[str, str]], asker: Asker, name: str, *, context: float, new: int) -> tuple[list[dict], str]:
    """Return (rows whose prompt fits, a note on the others). Long prompts are not cut, because a cut prompt is another question."""
    source = asker.source
    frame = len(asker.ids("")) + 1  # a token that the seam may split
    sizes = [frame + n for n in lengths(tuple(r["prompt"] for r in rows), asker.tokenizer)]
    sizes = [
        len(asker.ids(r["prompt"])) if conversations.is_prompt(r["prompt"]) else n
        for r, n in zip(rows, sizes, strict=True)
    ]
    most = min(source.max_prompt or pairs.enough(sizes, source.max_bad), context - new)
    long = [i for i, n in enumerate(sizes) if n > most]
    if not long:
        return rows, ""
    measured = f"{len(long)} of {len(rows)} prompts are longer than {most} tokens (one has {sizes[long[0]]}: {rows[long[0]]['prompt'][:60]!r})"
    if len(long) > source.max_bad * len(rows):
        beyond = max(sizes) + new > context
        raise core.UserError(
            f"{name}: {measured}", needed=f"at most {source.max_bad:.1%} (--data.max-bad)",
            got=f"a context of {context} tokens, {new} of them for the answer" if beyond else "",
            cause="a prompt longer than the model's context" if beyond else "a limit for short questions, or many --data.shots",
            next="a model with a longer context, fewer --data.shots, or --data.max-bad" if beyond
            else f"--data.max-prompt {max(sizes)}",
        )  # fmt: skip
    return [r for i, r in enumerate(rows) if i not in {*long}], f"{measured}: left out"


def answer_notes(data: "Problems", asker: Asker, new: int) -> dict[str, str]:
    """Return notes on the lengths of right answers, without any calculation before them, and on what else a reward function gets."""
    sizes = [len(asker.answer(r["answer"])) for r in data.rows]
    found = {"answers": pairs.spread(sizes)}
    if OTHERS in data.fields:
        found["the reward function also gets"] = ", ".join(json.loads(data.rows[0][OTHERS]))
    if long := sum(n > new for n in sizes):
        found["cut by --max-new-tokens"] = (
            f"{long} of {len(sizes)} right answers ({long / len(sizes):.0%}) are longer than {new} tokens and can never be given: "
            f"--max-new-tokens {max(sizes)}, more with working before them"
        )
    return found


@cache
def lengths(prompts: tuple[str, ...], tokenizer: Any) -> list[int]:
    """Return the number of tokens of each prompt alone, counted once per process."""
    return [len(ids) for ids in tokenizer(list(prompts), add_special_tokens=False)["input_ids"]]


class Problems(core.Data):
    """Rows of text."""

    def __init__(self, rows: list[dict[str, str]]):
        self.rows = rows
        self.fields = {"prompt": core.Field("input"), "answer": core.Field("target"), "source": pairs.group_field(rows)}
        if rows and rows[0].get(OTHERS):
            self.fields[OTHERS] = core.Field("extent")

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, str]:
        return self.rows[index]

    def collate(self, samples: list[dict[str, str]]) -> dict[str, list[str]]:
        """The columns, (B,) texts each."""
        return {k: [s[k] for s in samples] for k in self.fields}
