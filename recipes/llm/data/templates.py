"""What a tokenizer's chat template does, measured by rendering short conversations: nothing is known by a model's name.

Templates differ in the token that ends a turn (often not the tokenizer's eos), in what they put around an answer (reasoning blocks,
channels), in the system role, in whether a content is a text or a list of parts, and in whether an answer looks the same once
another turn follows it. `form` finds these things out; `read` loads a template that a user names.
"""

import importlib.util
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from trainworthy import core

ASKED, ANSWER, SYSTEM = "What is it, please?", "It is this one.", "Say little."
QUESTION = {"role": "user", "content": ASKED}
ANSWERED = [QUESTION, {"role": "assistant", "content": ANSWER}]
GOES_ON = [*ANSWERED, {"role": "user", "content": "And that?"}]
REFUSED = (TemplateError, TypeError, ValueError, AttributeError, KeyError, IndexError)
"""What a template raises for turns that it does not know."""
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False})
"""Arguments of a template that are tried, in this order: some open a reasoning block in their prompt unless told not to."""
PACKAGED = "trl:"


@dataclass(frozen=True)
class Form:
    """How a template renders an answer."""

    end: str = ""
    """The token that ends an assistant's turn."""
    borrowed: bool = False
    """No token ends the last answer; `end` is the one that opens the next user's turn, and is added."""
    lead: str = ""
    """What the template puts between its generation prompt and the answer."""
    close: str = ""
    """What it puts between the answer and `end`."""
    trims: bool = False
    """White space around a content is left out."""
    system: bool = True
    """It has a system role; else a system's text is put before the first user's."""
    parts: bool = False
    """A content is a list of parts, `[{"type": "text", "text": ...}]`."""
    call_end: str = ""
    """The token that ends a turn which calls a tool, where that is another one."""
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    """Arguments that it is rendered with."""
    fault: str = ""
    """Why an answer without reasoning cannot be trained with it; empty: it can."""


def packaged() -> Path:
    """The folder of the templates that TRL ships."""
    return Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"


def read(name: str) -> str:
    """The template in a file, or `trl:NAME`, one that TRL ships."""
    if name.startswith(PACKAGED):
        folder = packaged()
        path = folder / f"{name.removeprefix(PACKAGED)}.jinja"
        known = ", ".join(sorted(p.stem for p in folder.glob("*.jinja")))
    else:
        path, known = Path(name), "a file with a Jinja template, or trl:NAME for one that TRL ships"
    if not path.is_file():
        raise core.UserError(f"--chat-template {name}: no such template", needed=known)
    return path.read_text(encoding="utf-8")


def markers(tokenizer: Any) -> set[str]:
    """Tokens that were added to the vocabulary, special or not: what templates put between turns is among them."""
    return {*tokenizer.all_special_tokens, *(t.content for t in tokenizer.added_tokens_decoder.values())}


def tags(text: str) -> list[str]:
    """What stands in angle brackets."""
    return re.findall(r"<[^<>\s]+>", text)


def render(tokenizer: Any, turns: list[dict[str, Any]], form: Form, tools: Any = None, **how: Any) -> Any:
    """What the template makes of `turns`."""
    if form.parts:
        turns = [
            t | {"content": [{"type": "text", "text": t["content"]}]} if isinstance(t.get("content"), str) else t
            for t in turns
        ]
    return tokenizer.apply_chat_template(turns, tools=tools, **form.arguments, **how)


def form(tokenizer: Any) -> Form:
    """What this tokenizer's template does; raises `UserError` where it cannot be used for texts at all."""
    return _form(tokenizer, tokenizer.chat_template, tokenizer.eos_token)


@cache
def _form(tokenizer: Any, template: str, eos: str) -> Form:
    parts = _reads_parts(tokenizer)
    found = [_answer(tokenizer, Form(parts=parts, arguments=variant)) for variant in VARIANTS]
    chosen = next((one for one in found if not one.fault), found[0])
    spaced = [QUESTION, {"role": "assistant", "content": f"  {ANSWER}  "}]
    trims = f"  {ANSWER}  " not in render(tokenizer, spaced, chosen, tokenize=False)
    return replace(chosen, trims=trims, system=_has_system(tokenizer, chosen), call_end=_call_end(tokenizer, chosen))


def _reads_parts(tokenizer: Any) -> bool:
    """Is a content a list of parts to it, and not a text?"""
    said = []
    for parts in (False, True):
        try:
            text = render(tokenizer, ANSWERED, Form(parts=parts), tokenize=False)
        except REFUSED as error:
            said.append(f"{type(error).__name__}: {error}")
            continue
        if ASKED in text and ANSWER in text:
            return parts
        said.append(repr(text[-120:]))
    raise core.UserError("the chat template does not render a question and its answer", got=said[0],
                         needed="both texts in what it renders", cause="a template for something else (retrieval, tools alone)",
                         next="--chat-template FILE with one for conversations")  # fmt: skip


def _has_system(tokenizer: Any, found: Form) -> bool:
    try:
        return SYSTEM in render(tokenizer, [{"role": "system", "content": SYSTEM}, *ANSWERED], found, tokenize=False)
    except REFUSED:
        return False


def _call_end(tokenizer: Any, found: Form) -> str:
    """What ends a turn that calls a tool, where that is not what ends an answer; empty: the same, or the template has no calls."""
    function = {"name": "look", "arguments": {"at": "it"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    try:
        given = render(tokenizer, [QUESTION], found, add_generation_prompt=True, tokenize=False)
        whole = render(tokenizer, [QUESTION, call], found, tokenize=False)
    except REFUSED:
        return ""
    said = whole[len(given) :].rstrip()
    last = (in_order(said, markers(tokenizer)) or [""])[-1]
    ends = "look" in said and found.end not in said and not found.borrowed and last and said.endswith(last)
    return last if ends else ""


def _answer(tokenizer: Any, found: Form) -> Form:
    """`found`, with what stands around an answer."""
    last = render(tokenizer, ANSWERED, found, tokenize=False)
    given = render(tokenizer, [QUESTION], found, add_generation_prompt=True, tokenize=False)
    try:
        middle = render(tokenizer, GOES_ON, found, tokenize=False).partition(ANSWER)[2]
    except REFUSED:
        middle = ""
    before, _, tail = last.partition(ANSWER)
    known = markers(tokenizer)
    ends = in_order(tail, known)
    if ends:
        both = in_order(shared(tail, middle), known) if middle else ends
        eos = tokenizer.eos_token
        end = eos if eos in both else both[-1] if both else eos if eos in ends else ends[-1]
        close, borrowed = tail.partition(end)[0], False
    else:
        # As GLM's: an answer ends where the next turn opens. An eos that opens none is not what such a model writes.
        end, close, borrowed = next(iter(in_order(middle, known)), ""), tail.rstrip(), True
    fault = ""
    if not end:
        fault = (f"no token ends an answer: the template puts {tail[:40]!r} behind it, which has none of the tokenizer's special "
                 "tokens; a model would never learn to stop")  # fmt: skip
    elif not before.startswith(given):
        n = len(shared(before, given))
        fault = (f"the generation prompt ends with {given[n:]!r}, where the template renders an answer with {before[n:]!r}: an "
                 "answer would be trained behind another text than it is generated behind")  # fmt: skip
    lead = "" if fault else before[len(given) :]
    return Form(end, borrowed, lead, close, parts=found.parts, arguments=found.arguments, fault=fault)


def shared(a: str, b: str) -> str:
    """What two texts begin with."""
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def in_order(text: str, known: set[str]) -> list[str]:
    """The `known` tokens that stand in `text`, in their order."""
    if not known:
        return []
    return re.findall("|".join(map(re.escape, sorted(known, key=len, reverse=True))), text)
