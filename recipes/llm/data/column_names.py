"""Column names of public data sets, and the setting or the recipe that reads them."""

from typing import Any

OTHER_TURNS = ("conversation", "dialog", "dialogue", "chat", "turns")
OTHER_PAIRS = (("prompt", "answer"), ("question", "answer"), ("question", "completion"), ("query", "response"), ("query", "answer"),
               ("prompt", "response"), ("instruction", "response"), ("input", "output"), ("user", "assistant"), ("source", "target"),
               ("question", "response"), ("problem", "solution"), ("article", "highlights"), ("text", "summary"))  # fmt: skip
"""Columns of public data sets that a person would map."""
OTHER_SIDES = (("better", "worse"), ("preferred", "dispreferred"), ("winner", "loser"), ("accepted", "rejected"),
               ("chosen_response", "rejected_response"), ("response_chosen", "response_rejected"))  # fmt: skip


def mapped(row: dict[str, Any], needed: str) -> str:
    """Return the setting that reads a row whose columns have other usual names; empty if there is none."""
    for column in OTHER_TURNS:
        if isinstance(row.get(column), list) and "messages" in needed and "messages" not in row:
            return f"--data.columns messages={column}"
    if {"instruction", "context", "response"} <= row.keys() and "output" in needed:
        return "--data.columns input=context,output=response"
    for better, worse in OTHER_SIDES if "chosen" in needed else ():
        if better in row and worse in row:
            return f"--data.columns chosen={better},rejected={worse}"
    if {"chosen", "rejected"} <= row.keys() and "messages" in needed:
        return "llm/dpo or llm/reward, which read preferences"
    question = next((k for k in ("question", "query", "input", "context") if k in row), "")
    if {"chosen", "rejected"} <= row.keys() and "prompt" not in row and question and "chosen" in needed:
        return f"--data.columns prompt={question}"
    if isinstance(row.get("label"), bool) and "chosen" in needed:
        return "rows of prompt, chosen (the answer whose label is true) and rejected (false), where a prompt has both; KTO's own loss is not offered"
    if row.keys() & {"messages", "conversations"} and "chosen" in needed:
        return "llm/sft, which reads conversations"
    answers = [k for k in ("completion", "answer") if f"{k} (str)" in needed]
    for question, answer in OTHER_PAIRS if answers else ():
        if question in row and answer in row:
            return "--data.columns " + ",".join(
                f"{a}={b}" for a, b in (("prompt", question), (answers[0], answer)) if a != b
            )
    return ""
