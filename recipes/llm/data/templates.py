"""Properties of a tokenizer's chat template, measured by rendering short conversations. No model is known by its name.

Templates differ in the token that ends a turn (often not the tokenizer's eos), in what they put around an answer (reasoning blocks,
channels), in the system role, in whether content is a text or a list of parts, and in whether an answer looks the same once another turn
follows it. `form` measures these properties; `read` loads a template that a user names.
"""

import datetime
import importlib.util
import json
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
"""Exceptions that templates raise for turns they do not support."""
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False})
"""Template arguments that are tried, in this order: some templates open a reasoning block in the prompt by default."""
PACKAGED = "trl:"
DATE = datetime.date(2024, 7, 26)
"""Today in a template that asks for it: the date that Llama 3.2's own falls back to."""
MACRO = "{%- macro strftime_now(format) -%}"


@dataclass(frozen=True)
class Form:
    """How a template renders an answer."""

    end: str = ""
    """The token that ends an assistant's turn."""
    borrowed: bool = False
    """No token ends the last answer; `end` is the token that opens the next user turn, and is appended."""
    lead: str = ""
    """Text between the generation prompt and the answer."""
    close: str = ""
    """Text between the answer and `end`."""
    trims: bool = False
    """White space around content is removed."""
    system: bool = True
    """There is a system role; else a system text is put before the first user text."""
    parts: bool = False
    """Content is a list of parts, `[{"type": "text", "text": ...}]`."""
    call_end: str = ""
    """The token that ends a turn with a tool call, if it is another one."""
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    """Arguments for rendering."""
    fault: str = ""
    """Why answers without reasoning cannot be trained with it; empty if they can."""


def packaged() -> Path:
    """Return the folder of the templates that TRL ships."""
    return Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"


def read(name: str) -> str:
    """Return the template in a file, or TRL's template `trl:NAME`."""
    if name.startswith(PACKAGED):
        folder = packaged()
        path = folder / f"{name.removeprefix(PACKAGED)}.jinja"
        known = ", ".join(sorted(p.stem for p in folder.glob("*.jinja")))
    else:
        path, known = Path(name), "a file with a Jinja template, or trl:NAME for one that TRL ships"
    if not path.is_file():
        raise core.UserError(f"--chat-template {name}: no such template", needed=known)
    return path.read_text(encoding="utf-8-sig")


def dated(template: Any) -> str:
    """Return a template that asks for today's date (Llama 3.2, gpt-oss) with one date instead, so that the same rows are the same tokens on every
    day and in the export; empty if it asks for none, or in a format that is computed."""
    formats = set(re.findall(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)", template)) if isinstance(template, str) else set()
    if not formats or MACRO in template:
        return ""
    known = {how: DATE.strftime(how) for _, how in sorted(formats)}
    return f"{MACRO}{{{{- {json.dumps(known)}[format] }}}}{{%- endmacro %}}{template}"


def markers(tokenizer: Any) -> set[str]:
    """Return tokens that were added to the vocabulary, special or not. The tokens between turns are among them."""
    return {*tokenizer.all_special_tokens, *(t.content for t in tokenizer.added_tokens_decoder.values())}


def tags(text: str) -> list[str]:
    """Return the tags in angle brackets."""
    return re.findall(r"<[^<>\s]+>", text)


def render(tokenizer: Any, turns: list[dict[str, Any]], form: Form, tools: Any = None, **how: Any) -> Any:
    """Return the template's rendering of `turns`."""
    if form.parts:
        turns = [
            t | {"content": [{"type": "text", "text": t["content"]}]} if isinstance(t.get("content"), str) else t
            for t in turns
        ]
    return tokenizer.apply_chat_template(turns, tools=tools, **form.arguments, **how)


def form(tokenizer: Any) -> Form:
    """Return the properties of this tokenizer's template. Raises `UserError` if it cannot be used for texts."""
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
    """Return whether content must be a list of parts."""
    rendered = []
    for parts in (False, True):
        try:
            text = render(tokenizer, ANSWERED, Form(parts=parts), tokenize=False)
        except REFUSED as error:
            rendered.append(f"{type(error).__name__}: {error}")
            continue
        if ASKED in text and ANSWER in text:
            return parts
        rendered.append(repr(text[-120:]))
    raise core.UserError("the chat template does not render a question and its answer", got=rendered[0],
                         needed="both texts in what it renders", cause=_missing(rendered[0]),
                         next="--chat-template FILE with one for conversations")  # fmt: skip


def shows_end(tokenizer: Any, found: Form) -> bool:
    """Return whether the end of an answer follows it at once: else it may be the start of the next turn."""
    return ANSWER + found.end in render(tokenizer, ANSWERED, found, tokenize=False)


def foreign(tokenizer: Any) -> str:
    """Return the cause of a template that ends no answer, if what it writes around turns is no token of this tokenizer."""
    text = render(tokenizer, ANSWERED, Form(parts=_reads_parts(tokenizer)), tokenize=False)
    unknown = [tag for tag in dict.fromkeys(tags(text)) if tag not in tokenizer.get_vocab()]
    return f"a template of another family of models: {unknown[0]} is no token of this tokenizer" if unknown else ""


def _missing(message: str) -> str:
    """Return the likely cause of a template that does not render, by what it said."""
    if found := re.search(r"'(\w+_token)' is undefined", message):
        return f"a template of another family of models: it writes a {found[1]}, which this tokenizer does not have"
    return "a template for something else (retrieval, tools alone)"


def _has_system(tokenizer: Any, found: Form) -> bool:
    try:
        return SYSTEM in render(tokenizer, [{"role": "system", "content": SYSTEM}, *ANSWERED], found, tokenize=False)
    except REFUSED:
        return False


def _call_end(tokenizer: Any, found: Form) -> str:
    """Return the token that ends a turn with a tool call; empty if it is the same as for an answer, or if calls are not supported."""
    function = {"name": "look", "arguments": {"at": "it"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    try:
        given = render(tokenizer, [QUESTION], found, add_generation_prompt=True, tokenize=False)
        whole = render(tokenizer, [QUESTION, call], found, tokenize=False)
    except REFUSED:
        return ""
    rendered = whole[len(given) :].rstrip()
    last = (in_order(rendered, markers(tokenizer)) or [""])[-1]
    ends = "look" in rendered and found.end not in rendered and not found.borrowed and last and rendered.endswith(last)
    return last if ends else ""


def _answer(tokenizer: Any, found: Form) -> Form:
    """Return `found` with the text around an answer."""
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
        # In GLM's template an answer ends where the next turn opens. An eos that opens no turn is not what such a model writes.
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
    """Return the common prefix of two texts."""
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def in_order(text: str, known: set[str]) -> list[str]:
    """Return the `known` tokens in `text`, in order."""
    if not known:
        return []
    return re.findall("|".join(map(re.escape, sorted(known, key=len, reverse=True))), text)
