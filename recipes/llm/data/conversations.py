"""Whole conversations: rows of `messages` (and `tools`, where they have some) as a prompt, all that stands before the last answer,
and that answer as the tokenizer's own template puts it; tool calls are the template's affair and stay what they are."""

import json
from collections.abc import Iterable
from typing import Any

from jinja2 import TemplateError

from trainworthy import core

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked(rows: Iterable[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Rows of `messages`, the last of them an answer (what follows it teaches nothing and is left off), `tools` and `source`."""
    found = []
    for i, row in enumerate(rows):
        turns = row.get("messages")
        wrong = _wrong(turns)
        if wrong:
            raise core.UserError(
                f"row {i} of {where} is no conversation", got=", ".join(f"{k} ({type(v).__name__})" for k, v in row.items()),
                needed=f"messages: a list of turns, each with a role of {', '.join(ROLES)} and a content (str) or tool_calls; one "
                "of the assistant's, after one of the user's", cause=wrong,
                next="convert the rows, then give the file again",
            )  # fmt: skip
        # Without what only other rows have; templates add to a content, so there is one.
        turns = [{"content": ""} | {k: v for k, v in turn.items() if v is not None} for turn in turns]
        last = max(k for k, turn in enumerate(turns) if turn["role"] == "assistant")
        asked = next(turn["content"] for turn in turns if turn["role"] == "user")
        tools = {"tools": row["tools"]} if row.get("tools") else {}
        found.append({"messages": turns[: last + 1], **tools, "source": str(row.get("source") or asked)})
    return found


def _wrong(turns: Any) -> str:
    """What keeps `turns` from being a conversation; empty: nothing."""
    if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
        return f"messages: {type(turns).__name__}, not a list of turns" if turns is not None else "messages: missing"
    for k, turn in enumerate(turns):
        if turn.get("role") not in ROLES:
            return f"turn {k} has the role {turn.get('role')!r}" + "; from, value: ShareGPT's names" * ("from" in turn)
        if not isinstance(turn.get("content") or "", str):
            return f"turn {k}: content is {type(turn['content']).__name__}; pictures and parts are for vlm/instruct"
        if not (turn.get("content") or turn.get("tool_calls")) and turn["role"] in ("user", "assistant"):
            return f"turn {k} ({turn['role']}) is empty"
    roles = [turn["role"] for turn in turns]
    if "user" not in roles or "assistant" not in roles[roles.index("user") :]:
        return f"no answer to learn: its turns are {', '.join(roles) or 'none'}"
    return ""


def pair(row: dict[str, Any], chat: Any, where: str) -> dict[str, str]:
    """A checked row as `prompt` (JSON), `completion` (text) and `source`.

    Raises `UserError` where the template refuses the turns, or does not put each answer that is scored whole behind the very text
    that it was given to.
    """
    prompt = json.dumps({k: row[k] for k in ("messages", "tools") if k in row} | {"messages": row["messages"][:-1]})
    turns = [*chat.turns(prompt), row["messages"][-1]]
    scored = [*chat.answered(turns[:-1]), len(turns) - 1]
    try:
        whole = chat.render(turns, prompt, tokenize=False)
        given = [chat.render(turns[:k], prompt, add_generation_prompt=True, tokenize=False) for k in scored]
    except (TemplateError, TypeError) as error:
        raise core.UserError(f"the chat template does not take {where}", got=error, cause="turns in an order it does not know",
                             next="put a chat_template.jinja for training into the model's folder") from None  # fmt: skip
    for k, before in zip(scored, given, strict=True):
        answer = whole[len(before) :].partition(chat.tokenizer.eos_token)
        if not whole.startswith(before) or not answer[1] or not _says(answer[0], turns[k]):
            last, calls = k == scored[-1], turns[k].get("tool_calls")
            raise core.UserError(
                f"the chat template drops or changes what the assistant says in turn {k} of {where}",
                got=repr(whole[max(0, len(before) - 60) :][:300]),
                needed=f"its content and tool calls, then {chat.tokenizer.eos_token!r}, behind the very text that it was given to",
                cause="a template that knows no tool calls" if calls else
                      "a template for generation alone" if last else "a template that takes thoughts out of earlier turns",
                next="put a chat_template.jinja for training into the model's folder" if last or calls else
                     "--data.no-every-turn  (the last answer alone is scored)",
            )  # fmt: skip
    return {"prompt": prompt, "completion": answer[0].strip(), "source": row["source"]}


def _says(text: str, turn: dict[str, Any]) -> bool:
    """Is what an assistant says and calls in `text`? Arguments are told by their values, which every template puts as JSON."""
    calls = [call.get("function", call) for call in turn.get("tool_calls", ())]
    values = [v for call in calls if isinstance(call.get("arguments"), dict) for v in call["arguments"].values()]
    wanted = [
        turn["content"].strip(),
        *(call.get("name", "") for call in calls),
        *(v for v in values if isinstance(v, str)),
    ]
    return bool(text.strip()) and all(part in text for part in wanted)
