"""Column names of public data sets, and the setting or the recipe that reads them."""

from collections.abc import Iterable
from typing import Any

OTHER_TURNS = ("conversation", "dialog", "dialogue", "chat", "turns")
OTHER_PAIRS = (("prompt", "answer"), ("question", "answer"), ("question", "completion"), ("query", "response"), ("query", "answer"),
               ("prompt", "response"), ("instruction", "response"), ("input", "output"), ("user", "assistant"), ("source", "target"),
               ("question", "response"), ("problem", "solution"), ("article", "highlights"), ("text", "summary"))  # fmt: skip
"""Columns of public data sets that a person would map."""
OTHER_SIDES = (("better", "worse"), ("preferred", "dispreferred"), ("winner", "loser"), ("accepted", "rejected"),
               ("chosen_response", "rejected_response"), ("response_chosen", "response_rejected"))  # fmt: skip


TWO_ANSWERS = (("a", "b"), ("A", "B"), ("1", "2"), ("0", "1"))
"""How two answers to one prompt are numbered in names of columns: `response_a` and `response_b`."""
VERDICTS = ("winner", "preference", "preferred", "better", "choice", "label", "preference_strength")
READ = {"prompt", "completion", "messages", "conversations", "instruction", "input", "output", "history", "system", "tools", "source",
        "chosen", "rejected", "answer", "id"}  # fmt: skip
SHOWN = 8  # columns that a note names


def not_read(rows: list[dict[str, Any]], path: str, needed: str, renamed: Iterable[str] = ()) -> str:
    """Return a note on columns that no format of `needed` reads; empty if there are none. Scores of two answers are read, and what
    --data.columns has `renamed`."""
    pair = "chosen" in needed
    names = list(dict.fromkeys(k for row in rows[:100] for k in row))
    others = [k for k in names if k not in READ | {*renamed} and not (pair and ("chosen" in k or "rejected" in k))]
    if not others:
        return ""
    more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
    return f"columns of {path} that are not read: {', '.join(others[:SHOWN])}{more}"


def _rated(row: dict[str, Any]) -> str:
    """Return how `chosen` and `rejected` are made of a row with two answers and which is better; empty if it is no such row."""
    for one, other in TWO_ANSWERS:
        both = [
            (k, k[: -len(one)] + other) for k in row if k.endswith(one) and len(k) > 1 and k[: -len(one)] + other in row
        ]
        answers = [names for names in both if all(isinstance(row[k], str | list) for k in names)]
        scores = [names for names in both if all(isinstance(row[k], int | float) for k in names)]
        verdict = next((k for k in VERDICTS if k in row), "")
        if answers and (scores or verdict):
            which = f"has the better {scores[0][0]} or {scores[0][1]}" if scores else f"{verdict} names"
            a, b = answers[0]
            return f"write `chosen` and `rejected` into the file: chosen is that of {a} and {b} which {which}; leave ties out"
    return ""


def mapped(row: dict[str, Any], needed: str) -> str:
    """Return the setting that reads a row whose columns have other usual names; empty if there is none."""
    for column in OTHER_TURNS:
        if isinstance(row.get(column), list) and "messages" in needed and "messages" not in row:
            return f"--data.columns messages={column}"
    if row.keys() <= {"text", "id", "source", "meta"} and isinstance(row.get("text"), str) and "messages" in needed:
        return "llm/pretrain, which reads plain text, or rows of prompt and completion"
    if isinstance(row.get("input_ids"), list):
        return "rows of text: the recipe tokenizes them, and puts the labels, itself"
    if {"instruction", "context", "response"} <= row.keys() and "output" in needed:
        return "--data.columns input=context,output=response"
    for better, worse in OTHER_SIDES if "chosen" in needed else ():
        if better in row and worse in row:
            return f"--data.columns chosen={better},rejected={worse}"
    if {"chosen", "rejected"} <= row.keys() and "messages" in needed:
        return "llm/dpo or llm/reward, which read preferences"
    if "chosen" in needed and "chosen" not in row and (rated := _rated(row)):
        return rated
    question = next((k for k in ("question", "query", "input", "context") if k in row), "")
    if {"chosen", "rejected"} <= row.keys() and "prompt" not in row and question and "chosen" in needed:
        return f"--data.columns prompt={question}"
    if isinstance(row.get("label"), bool) and "chosen" in needed:
        return "rows of prompt, chosen (the answer whose label is true) and rejected (false), where a prompt has both; KTO's own loss is not offered"
    if row.keys() & {"messages", "conversations"} and "chosen" in needed:
        return "llm/sft, which reads conversations"
    answers = [k for k in ("completion", "answer") if f"{k} (str)" in needed]
    for question, answer in OTHER_PAIRS if answers else ():
        others = [f"{a}={b}" for a, b in (("prompt", question), (answers[0], answer)) if a != b]
        if question in row and answer in row and others:
            return f"--data.columns {','.join(others)}"
    return ""
