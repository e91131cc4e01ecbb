"""Whole conversations: a row of `messages` (and `tools`, if it has any) becomes a prompt (everything before the last answer) and that
answer, both rendered by the tokenizer's own template. Tool calls are passed to the template unchanged."""

import json
import re
from typing import Any

from trainworthy.recipes.llm.data.formats import UNSCORED, BadRow

ROLES = ("system", "user", "assistant", "tool")


def checked(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `messages`, `tools` and `source`. Its last message is an answer that is scored; messages after it are left out."""
    turns = row.get("messages")
    if wrong := fault(turns):
        raise BadRow(wrong)
    # Without what only other rows have; templates add to a content, so there is one.
    turns = [{"content": ""} | {k: v for k, v in turn.items() if v is not None} for turn in turns]
    last = answers(turns)[-1]
    question = next(turn["content"] for turn in turns if turn["role"] == "user")
    tools = {"tools": row["tools"]} if row.get("tools") else {}
    return {"messages": turns[: last + 1], **tools, "source": str(row.get("source") or question)}


def fault(turns: Any) -> str:
    """What keeps `turns` from being a conversation with an answer; empty: nothing."""
    if wrong := unreadable(turns):
        return wrong
    roles = [turn["role"] for turn in turns]
    if "user" not in roles or "assistant" not in roles[roles.index("user") :]:
        reason = f"its turns are {', '.join(dict.fromkeys(roles))}" if roles else "it has no turns"
        return f"no answer to learn: {reason}"
    return "" if answers(turns) else "no answer to learn: each has a weight of 0"


def unasked(turns: Any) -> str:
    """What keeps `turns` from being a conversation that can be gone on with; empty: nothing."""
    if wrong := unreadable(turns):
        return wrong
    roles = [turn["role"] for turn in turns]
    return "" if "user" in roles else f"no question: its turns are {', '.join(dict.fromkeys(roles)) or 'none'}"


def unreadable(turns: Any) -> str:
    """What is wrong with one of these turns; empty: nothing."""
    if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
        return f"messages: {type(turns).__name__}, not a list of turns" if turns is not None else "messages: missing"
    for k, turn in enumerate(turns):
        if turn.get("role") not in ROLES:
            if turn.get("role") is None:
                return "a turn has no role: needed are the keys role and content, or from and value (ShareGPT)"
            return f"a turn has the role {turn.get('role')!r}, not one of {', '.join(ROLES)}"
        if not isinstance(turn.get("content") or "", str):
            pictures = ": pictures are for vlm/instruct" if isinstance(turn["content"], list) else ", not text"
            return f"a content is {type(turn['content']).__name__}{pictures}"
        if (
            not (turn.get("content") or "").strip()
            and not turn.get("tool_calls")
            and turn["role"] in ("user", "assistant")
        ):
            last = k == len(turns) - 1 and turn["role"] == "assistant"
            return "its last answer is empty" if last else f"a turn of the {turn['role']} is empty"
    return ""


def rows(row: dict[str, Any], chat: Any) -> list[dict[str, str]]:
    """A conversation as `prompt` (JSON), `completion` (text) and `source`: one row where each answer that is scored looks in the
    whole as it looked when it was the last one; else a row for each answer, up to it. Raises `BadRow`."""
    row = checked(row)
    turns = row["messages"]
    whole, found = _upto(row, chat, len(turns) - 1)
    earlier = [_upto(row, chat, k) for k in answers(turns[:-1])] if chat.every_turn else []
    if all(whole.startswith(text) for text, _ in earlier):
        return [found]
    each = [one for _, one in (*earlier, (whole, found))]
    return [one | {"prompt": as_prompt(json.loads(one["prompt"]) | {"alone": True})} for one in each]


def as_prompt(conversation: dict[str, Any]) -> str:
    """The turns before an answer as the text that `Chat.given` reads. Letters stay letters: rows are compared, counted and shown by it."""
    return json.dumps({"messages": conversation["messages"]} | conversation, ensure_ascii=False)


def is_prompt(text: str) -> bool:
    """Return whether a prompt is one of `as_prompt`: a plain one may also begin with a brace."""
    return text.startswith('{"messages": ')


def answers(turns: list[dict[str, Any]]) -> list[int]:
    """The turns of the assistant that are scored: those after the first question, unless the row says no."""
    first = next((k for k, turn in enumerate(turns) if turn["role"] == "user"), len(turns))
    return [k for k, turn in enumerate(turns) if turn["role"] == "assistant" and k > first and not turn.get(UNSCORED)]


def _upto(row: dict[str, Any], chat: Any, k: int) -> tuple[str, dict[str, str]]:
    """(text up to the end of the answer in turn k, the row in which it is the last one)."""
    turns = row["messages"]
    prompt = as_prompt({key: row[key] for key in ("messages", "tools") if key in row} | {"messages": turns[:k]})
    try:
        opening, answer = chat.spoken(chat.turns(prompt), turns[k], prompt)
    except BadRow as fault:
        raise BadRow(fault.why, f"turn {k}: {fault.seen}") from None
    return opening + answer, {"prompt": prompt, "completion": chat.bare(answer), "source": row["source"]}


def dropped(text: str, turns: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first turn of the system or the user whose words are not in `text`. (Templates write what a tool returns as JSON.)"""
    heard = (t for t in turns if t["role"] in ("system", "user") and isinstance(t.get("content"), str))
    return next((t for t in heard if t["content"].strip() not in text), None)


def says(text: str, turn: dict[str, Any]) -> bool:
    """Is what an assistant thinks, says and calls in `text`? Of arguments the values count: templates write them as JSON."""
    calls = [call.get("function", call) for call in turn.get("tool_calls", ())]
    values = [v for call in calls if isinstance(call.get("arguments"), dict) for v in call["arguments"].values()]
    wanted = [
        *re.split(
            r"<[^<>\s]+>", turn["content"]
        ),  # templates put reasoning that stands in a content as they put their own
        turn.get("reasoning_content") or "",
        *(call.get("name", "") for call in calls),
        *(v for v in values if isinstance(v, str)),
    ]
    return bool(text.strip()) and all(part.strip() in text for part in wanted)
