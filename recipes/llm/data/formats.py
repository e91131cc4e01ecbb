"""Rows as people have them, in one form: `messages` (with `tools`), or texts in named columns; what is wrong with the others.

Known: OpenAI's `messages`, ShareGPT (`conversations` of `from` and `value`), Alpaca (`instruction`, `input`, `output`), prompts
with a completion as texts or as turns, preferences with a prompt, without one (what both answers begin with), or as turns.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from trainworthy.recipes.llm.data import column_names

from trainworthy import core

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
         "assistant": "assistant", "system": "system", "developer": "system", "tool": "tool", "observation": "tool",
         "function": "tool", "function_response": "tool", "ipython": "tool"}  # fmt: skip
CALLS = ("function_call", "tool_call")  # ShareGPT's turns that call tools
WEIGHTS = ("weight", "train")  # keys of a turn: 0 or false: not to be learnt (OpenAI, axolotl)
UNSCORED = "unscored"  # the same in what is read
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys of a turn; templates differ in which they read
LOOKS = {"completion": "prompts with one completion (SFT)", "chosen": "preferences (DPO)", "rejected": "preferences (DPO)",
         "messages": "whole conversations", "conversations": "whole conversations", "output": "instructions (Alpaca)",
         "text": "plain text (pretraining)"}  # fmt: skip


MISSING = {"nan", "NaN", "<NA>"}  # as pandas writes them; `None` and `null` may be answers
UNWANTED = "its answer is marked as one not to give"


class BadRow(Exception):
    """A row that cannot be used: why, in words that other such rows share, and what was seen in it."""

    def __init__(self, why: str, seen: str = ""):
        super().__init__(f"{why}: {seen}" if seen else why)
        self.why, self.seen = why, seen


class Unread(dict):
    """A line that holds no row, in the place of one without columns: it is counted with the bad rows."""

    def __init__(self, why: str, seen: str = ""):
        super().__init__()
        self.fault = BadRow(why, seen)


class Rows(list):
    """Rows of a file with the line of each, where every line is a row."""

    def __init__(self, rows: Iterable[Any], lines: list[int] | None = None):
        super().__init__(rows)
        self.lines = lines


def place(rows: list[Any], i: int) -> str:
    """Return where the row `i` of a file is, counted from 1: its line if every line is a row, else its number."""
    lines = getattr(rows, "lines", None)
    return f"line {lines[i]}" if lines else f"row {i + 1}"


# ----------------------------------------------------------------------------------------------------------- conversations
def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """A row of one of the known forms as `messages` (`tools`, `source`), or as `prompt`, `completion` and `source`, all text."""
    if row.get("label") is False and "completion" in row:
        raise BadRow(f"{UNWANTED} (label is false, as in KTO's data)")
    extra = {k: row[k] for k in ("source",) if row.get(k)}
    if "messages" in row or "conversations" in row:
        return {"messages": turns(row), **tools(row), **extra}
    if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
        return {"messages": turns({"messages": row["prompt"] + row["completion"]}), **tools(row), **extra}
    if "instruction" in row and "output" in row and "completion" not in row:
        return alpaca(row) | extra
    found = texts(row, ("prompt", "completion"))
    if not is_conversation(row):
        return found
    pair = ({"role": "user", "content": found["prompt"]}, {"role": "assistant", "content": found["completion"]})
    return {"messages": turns({"messages": [*pair], "system": row["system"]}), **tools(row), **extra}


def is_conversation(row: dict[str, Any]) -> bool:
    """Return whether a row is more than a question and its answer, or its two answers."""
    lists = any(isinstance(row.get(key), list | dict) for key in ("prompt", "chosen"))
    old = row.get("history") and ("output" in row or "chosen" in row)
    long = any(isinstance(row.get(key), str) and "\n\nAssistant:" in row[key] for key in ("prompt", "chosen"))
    return (
        "messages" in row
        or "conversations" in row
        or lists
        or bool(old or has_system(row) or ("chosen" in row and long))
    )


def has_system(row: dict[str, Any]) -> bool:
    """Return whether a row has a system turn in a column of its own."""
    return isinstance(row.get("system"), str) and bool(row["system"].strip())


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    """A question and its answer as turns; a conversation as it is."""
    if "messages" in row:
        return row
    question, answer = ({"role": r, "content": row[k]} for r, k in (("user", "prompt"), ("assistant", "completion")))
    return {"messages": [question, answer], "source": row["source"]}


def turns(row: dict[str, Any]) -> Any:
    """The turns of a row in OpenAI's form: roles by their usual other names, parts of text joined, arguments as values."""
    found = row["messages"] if "messages" in row else row["conversations"]
    found = _parsed(found)
    if not isinstance(found, list) or not all(isinstance(t, dict) for t in found):
        return found
    made = [_turn(t) for t in found]
    if not has_system(row):
        return made
    if not made or made[0].get("role") != "system":
        return [{"role": "system", "content": row["system"]}, *made]
    if made[0].get("content") != row["system"]:
        raise BadRow("its column `system` and its first turn are two system turns", repr(row["system"][:60]))
    return made


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    name = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if name in CALLS:
        calls = _parsed(content)
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": "assistant", "content": "", "tool_calls": [_call(c) for c in calls]}
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(p.get("text") or "" for p in content)
    more = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value", *WEIGHTS, *THOUGHTS)}
    if weight := next((k for k in WEIGHTS if turn.get(k) is not None), ""):
        if turn[weight] not in (0, 1):  # True and False, too
            raise BadRow(
                f"the key {weight} of a turn is neither 0 nor 1: an answer is scored or not", repr(turn[weight])[:60]
            )
        more |= {} if turn[weight] else {UNSCORED: True}
    if call := _parsed(more.pop("function_call", None)):  # OpenAI's older form
        more.setdefault("tool_calls", [call])
    if calls := _parsed(more.get("tool_calls")):
        if not isinstance(calls, list):
            raise BadRow(f"tool_calls: {type(calls).__name__}, not a list of calls", repr(calls)[:60])
        more["tool_calls"] = [_call(c) for c in calls]
    thought = next((turn[k] for k in THOUGHTS if turn.get(k)), None)
    more |= {k: thought for k in THOUGHTS[:2] if thought}
    known = ROLES.get(name.strip().lower(), name) if isinstance(name, str) else name
    return {"role": known, "content": content, **more}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text") or "", str)


def _call(call: Any) -> dict[str, Any]:
    """A tool call, its arguments as values (OpenAI sends them as a text of JSON)."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("a tool call is no function with a name", repr(call)[:60])
    function = dict(function)
    function["arguments"] = given = _parsed(function.get("arguments") or {})
    if isinstance(given, str):
        raise BadRow("the arguments of a tool call are not JSON", repr(given)[:60])
    kept = {k: v for k, v in call.items() if k in ("id", "type")}
    return {"type": "function", **kept, "function": {k: function[k] for k in ("name", "arguments") if k in function}}


def tools(row: dict[str, Any]) -> dict[str, Any]:
    """The tools of a row, in OpenAI's form."""
    found = _parsed(row.get("tools") or row.get("functions"))
    if not found:
        return {}
    if not isinstance(found, list) or not all(isinstance(t, dict) for t in found):
        raise BadRow(f"tools: {type(found).__name__}, not a list of functions", repr(found)[:60])
    return {"tools": [t if "function" in t else {"type": "function", "function": t} for t in found]}


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text; anything else unchanged."""
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def alpaca(row: dict[str, Any]) -> dict[str, Any]:
    """Instruction and input are one question; `history` is a list of (question, answer), `system` a system turn."""
    try:
        found = texts(
            {"prompt": row["instruction"], "completion": row["output"], "source": row.get("source")},
            ("prompt", "completion"),
        )
    except BadRow as fault:
        raise BadRow(fault.why.replace("prompt", "instruction").replace("completion", "output")) from None
    if isinstance(row.get("input"), str) and row["input"].strip():
        found["prompt"] = f"{found['prompt']}\n{row['input']}"
        found["source"] = str(row.get("source") or found["prompt"])  # one instruction is often that of all rows
    if not row.get("history") and not row.get("system"):
        return found
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(h, list) and len(h) == 2 for h in history):
        raise BadRow("history is no list of questions with their answers", repr(history)[:60])
    earlier = [t for q, a in history for t in ({"from": "user", "value": q}, {"from": "assistant", "value": a})]
    whole = [*earlier, {"from": "user", "value": found["prompt"]}, {"from": "assistant", "value": found["completion"]}]
    return {"messages": turns({"conversations": whole, "system": row.get("system")}), "source": found["source"]}


def question(row: dict[str, Any]) -> dict[str, Any]:
    """What is asked in a row of any form, as `messages` (`tools`; `prompt`, where that is all there is). Answers at its end, which a
    held-out file has, are left off."""
    if "messages" in row or "conversations" in row:
        found = turns(row)
        if isinstance(found, list) and all(isinstance(t, dict) for t in found):
            while found and found[-1].get("role") == "assistant":
                found = found[:-1]
        return {"messages": found, **tools(row)}
    if isinstance(row.get("prompt"), list):
        return {"messages": turns({"messages": row["prompt"], "system": row.get("system")}), **tools(row)}
    if "prompt" not in row and isinstance(row.get("instruction"), str):
        row = alpaca(row | {"output": "?"}) | {}
        if "messages" in row:
            return {"messages": row["messages"][:-1]}
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadRow("prompt is empty" if isinstance(prompt, str) else
                     f"prompt: {type(prompt).__name__ if 'prompt' in row else 'missing'}", "")  # fmt: skip
    asking = [{"role": "user", "content": prompt}]
    return {"messages": turns({"messages": asking, "system": row.get("system")}), "prompt": prompt}


def reference(row: dict[str, Any]) -> str:
    """The answer that a row of any form has already, as text; empty: none."""
    found = turns(row) if "messages" in row or "conversations" in row else row.get("completion")
    if isinstance(found, list) and found and isinstance(found[-1], dict):
        found = found[-1].get("content") if found[-1].get("role") == "assistant" else None
    for value in (found, row.get("output"), row.get("answer"), row.get("chosen")):
        if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
            return str(value)
    return ""


# ------------------------------------------------------------------------------------------------------------------- texts
def texts(row: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, str]:
    """The `wanted` columns of a row as text, none empty, and its `source` (else the prompt)."""
    wrong = [
        f"{k}: {type(row[k]).__name__ if k in row else 'missing'}" for k in wanted if not isinstance(row.get(k), str)
    ]
    wrong += [f"{k} is empty" for k in wanted if not wrong and not row[k].strip()]
    if wrong:
        wrong += [f"these look like {LOOKS[k]}" for k in row if k in LOOKS and k not in wanted][:1]
        raise BadRow("; ".join(wrong))
    if missing := [k for k in wanted if row[k].strip() in MISSING]:
        raise BadRow(f"{missing[0]} is a missing value that was written as text", row[missing[0]].strip())
    return {k: row[k] for k in wanted} | {"source": str(row.get("source") or row["prompt"])}


def preference(row: dict[str, Any]) -> dict[str, Any]:
    """A preference in one of its usual shapes: `prompt` (or `messages` before the answers), `chosen`, `rejected`, `source`."""
    if "chosen" not in row and isinstance(row.get("label"), bool):
        raise BadRow("one answer with a label (KTO), where two answers to one prompt are compared")
    row = _asked_first(row)
    question = row.get("prompt")
    marked = (
        isinstance(question, str)
        and question.lstrip().startswith("Human:")
        and question.rstrip().endswith("\n\nAssistant:")
    )
    if (question is None or marked) and all(isinstance(row.get(key), str) for key in ("chosen", "rejected")):
        row = _dialogue(row)
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if None not in (chosen, rejected) and isinstance(chosen, list) != isinstance(rejected, list):
        kinds_of = f"chosen: {type(chosen).__name__}, rejected: {type(rejected).__name__}"
        raise BadRow(f"{kinds_of}; needed: both as text, or both as lists of turns")
    if isinstance(chosen, list) and isinstance(rejected, list):
        prompt = row["prompt"] if isinstance(row.get("prompt"), list) else []
        prompt = [] if chosen[: len(prompt)] == prompt else prompt  # the answers have them, too
        whole = [turns({"messages": [*prompt, *side], "system": row.get("system")}) for side in (chosen, rejected)]
        if not all(side and isinstance(turn, dict) for side in whole for turn in side or [None]):
            raise BadRow("chosen and rejected are lists, but not of turns (role, content)")
        n = next((i for i, (a, b) in enumerate(zip(*whole, strict=False)) if a != b), min(map(len, whole)))
        n = min(n, *(len(side) - 1 for side in whole))
        if any(len(side) != n + 1 or side[-1].get("role") != "assistant" for side in whole):
            raise BadRow("chosen and rejected differ in more than their last turn, an answer each")
        if n == 0 and isinstance(row.get("prompt"), str):
            whole, n = [[{"role": "user", "content": row["prompt"]}, side[-1]] for side in whole], 1
        answers = {k: side[-1].get("content") or "" for k, side in zip(("chosen", "rejected"), whole, strict=True)}
        before = whole[0][:n]
        if not before or any(not isinstance(t.get("content"), str) for t in before):
            raise BadRow("no prompt before chosen and rejected")
        plain = len(before) == 1 and before[0]["role"] == "user"
        # The last turn alone would put every conversation that goes on with `yes` in one group.
        source = row.get("source") or "\n".join(turn["content"] for turn in before)
        found = texts({"prompt": before[-1]["content"], "source": source, **answers}, ("prompt", "chosen", "rejected"))
        return found if plain else found | {"messages": before, **tools(row)}
    return texts(row, ("prompt", "chosen", "rejected"))


def _asked_first(row: dict[str, Any]) -> dict[str, Any]:
    """A preference in a shape of LLaMA-Factory or axolotl with its `prompt`: the turns before both answers in `messages` or
    `conversations`, an instruction, a system turn in a column; each answer alone as one turn."""
    turn = {key: [row[key]] for key in ("chosen", "rejected") if isinstance(row.get(key), dict)}
    row = row | turn
    before = next((row[key] for key in ("messages", "conversations") if isinstance(row.get(key), list)), None)
    plain = all(isinstance(row.get(key), str) for key in ("chosen", "rejected"))
    if "prompt" not in row and isinstance(row.get("instruction"), str):
        found = alpaca({k: v for k, v in row.items() if k != "system"} | {"output": "?"})
        before = found["messages"][:-1] if "messages" in found else None
        row |= {} if before else {"prompt": found["prompt"]}
    if "prompt" not in row and before and not _answered(before):
        row |= {"prompt": before}
    if plain and has_system(row) and isinstance(row.get("prompt"), str):
        row |= {"prompt": [{"role": "user", "content": row["prompt"]}]}
    if plain and isinstance(row.get("prompt"), list):
        row |= {key: [{"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")}
    return row


def _answered(turns: list[Any]) -> bool:
    last = turns[-1] if isinstance(turns[-1], dict) else {}
    return ROLES.get(str(last.get("role", last.get("from"))).strip().lower()) == "assistant"


def _dialogue(row: dict[str, Any]) -> dict[str, Any]:
    """A preference written as dialogues (Anthropic's hh-rlhf) in turns: what both answers begin with, up to the last `Assistant:`, is the
    prompt; or the column `prompt` ends with it."""
    mark, prompt, sides = "\n\nAssistant:", row.get("prompt"), {key: row[key] for key in ("chosen", "rejected")}
    if prompt is None:
        at = sides["chosen"].rfind(mark) + len(mark)
        if at < len(mark) or sides["chosen"][:at] != sides["rejected"][:at]:
            raise BadRow("prompt: missing")
        prompt, sides = sides["chosen"][:at], {key: text[at:] for key, text in sides.items()}
    *said, _, _ = re.split(r"(?:^|\n\n)(Human|Assistant):", f"\n\n{prompt.strip()}")
    first, said = said[0].strip(), said[1:]
    before = [
        {"role": ROLES.get(who.lower(), who.lower()), "content": text.strip()}
        for who, text in zip(said[::2], said[1::2], strict=True)
    ]
    before = [{"role": "user", "content": first}] * bool(first) + before
    return (
        row
        | {"prompt": before}
        | {key: [{"role": "assistant", "content": text.strip()}] for key, text in sides.items()}
    )


# --------------------------------------------------------------------------------------------------------------- a whole file
def system(wanted: str, path: str, own: str) -> str:
    """The system turn: `auto` is the packaged task's `own`, and none for a user's data."""
    return (own if path == "docstrings" else "") if wanted == "auto" else wanted


def mapping(columns: str) -> dict[str, str]:
    """{name that is read: name in the file} of `prompt=question,completion=answer`."""
    pairs = [one.strip().partition("=") for one in columns.split(",") if one.strip()]
    if any(not (a.strip() and b.strip()) for a, _, b in pairs):
        raise core.UserError(f"--data.columns {columns}: not a list of names", needed="name=COLUMN, with commas between them",
                             next="--data.columns prompt=question,completion=answer")  # fmt: skip
    return {a.strip(): b.strip() for a, _, b in pairs}


def renamed(rows: list[dict[str, Any]], columns: str, where: str) -> list[dict[str, Any]]:
    """The rows with the columns of a file under the names that are read."""
    names = mapping(columns)
    first = next((row for row in rows if not isinstance(row, Unread)), None)
    if lost := sorted({b for b in names.values() if first is not None and b not in first}):
        raise core.UserError(f"--data.columns {columns}: {where} has no column {', '.join(lost)}", got=", ".join(first),
                             needed="columns of the file")  # fmt: skip
    return Rows(
        (row if isinstance(row, Unread) else
         {k: v for k, v in row.items() if k not in names} | {a: row.get(b) for a, b in names.items()} for row in rows),
        getattr(rows, "lines", None),
    )  # fmt: skip


@dataclass
class Sorted:
    """The rows of a file, `good` as they are read, `bad` by what is wrong with them: {why: (place, what was seen) of each}."""

    where: str
    rows: list[dict[str, Any]]
    good: list[dict] = field(default_factory=list)
    bad: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    first: int = -1
    """The first bad row."""

    @property
    def wrong(self) -> int:
        """Number of rows that cannot be used."""
        return sum(map(len, self.bad.values()))

    @property
    def summary(self) -> str:
        """Return a note on these rows."""
        return f"{self.wrong} of {len(self.rows)} rows of {self.where}"

    @property
    def split(self) -> str:
        """Return a note if there are more rows than conversations; else an empty text."""
        n = len(self.rows) - self.wrong
        why = "one for each answer, since the template changes an answer once another turn follows"
        return f"{n:,} conversations of {self.where} are {len(self.good):,} rows, {why}" if len(self.good) > n else ""


def sorted_out(files: Iterable[tuple[str, list[dict[str, Any]]]], one: Callable[[dict], list[dict]], *, what: str, needed: str,
               max_bad: float = 0.0) -> tuple[list[list[dict]], list[str]]:  # fmt: skip
    """(what `one` makes of the rows that it takes, for each of the (name, rows) in `files`; what to say of the others). All that is
    wrong with them is said at once: more bad rows of a file than the share `max_bad` are refused."""
    found = [_sorted(where, rows, one) for where, rows in files]
    refused = [f for f in found if f.wrong > max_bad * len(f.rows)]
    if not refused:
        notes = [f"{f.summary} left out: {'; '.join(kinds(f.bad))}" for f in found if f.wrong]
        return [f.good for f in found], notes + [f.split for f in found if f.split]
    first = refused[0].rows[refused[0].first]
    share = max(f.wrong / len(f.rows) for f in refused)
    faults = [f"{f.where}: " * (len(refused) > 1) + kind for f in refused for kind in kinds(f.bad)]
    raise core.UserError(
        f"{' and '.join(f.summary for f in refused)}: no {what}",
        got=", ".join(f"{k} ({type(v).__name__})" for k, v in first.items()) or str(getattr(first, "fault", "no columns")),
        needed=f"{needed}; at most {max_bad:.1%} of other rows (--data.max-bad)", cause="\n".join(faults),
        next=f"--data.max-bad {share + 0.001:.3f} leaves them out" if share < 0.5 or all(UNWANTED in k for k in faults)
        else _remedy(refused, first, needed),
    )  # fmt: skip


def _remedy(refused: list["Sorted"], first: dict[str, Any], needed: str) -> str:
    """What helps where most rows are bad."""
    why = " ".join(kind for each in refused for kind in each.bad)
    if found := column_names.mapped(first, needed):
        return found
    if "--data.style chat" in why:
        return "--data.style chat"
    if "the chat template does not take" in why or "the chat template drops" in why:
        return "--chat-template FILE with one that takes these turns, or a model that has one; or convert the rows"
    named = "missing" in why or "no role" in why
    return "--data.columns NAME=COLUMN, or convert the rows" if named else "correct or convert these rows"


def together(each: Iterable[Callable[[], Any]]) -> list[Any]:
    """Return the result of each function. If several raise, one error has all messages."""
    found, refused = [], []
    for one in each:
        try:
            found.append(one())
        except core.UserError as fault:
            refused.append(fault)
    if len(refused) == 1:
        raise refused[0]
    if refused:
        raise core.UserError("\n".join(map(str, refused)))
    return found


def _sorted(where: str, rows: list[dict[str, Any]], one: Callable[[dict], list[dict]]) -> Sorted:
    found = Sorted(where, rows)
    for i, row in enumerate(rows):
        try:
            if isinstance(row, Unread):
                raise row.fault
            found.good += one(row)
        except BadRow as fault:
            found.first = i if found.first < 0 else found.first
            found.bad.setdefault(fault.why, []).append((place(rows, i), fault.seen))
    return found


def kinds(bad: dict[str, list[tuple[str, str]]]) -> list[str]:
    """What to say of bad rows, {why: (place, what was seen) of each}, the commonest first."""
    return [_kind(why, found) for why, found in sorted(bad.items(), key=lambda item: -len(item[1]))]


def _kind(why: str, found: list[tuple[str, str]]) -> str:
    where, seen = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{where}{more}: {why}" + (f" ({seen})" if seen else "")
