"""How a tokenizer's chat template puts a prompt and its answer: one place for training, evaluation and generation."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainworthy.recipes.llm.data import conversations, formats, templates
from trainworthy.recipes.llm.data.formats import BadRow

IGNORED = -100
COLUMNS = ("prompt", "completion")


@dataclass(frozen=True)
class Chat:
    """How a tokenizer's chat template puts a prompt and a completion; the template is applied once, and nothing is added to it.

    A completion is what the model writes up to the token that ends its turn, without what the template puts around every answer.
    """

    tokenizer: Any
    system: str
    conversations: bool = False
    """Prompts are conversations up to an answer, as JSON (`recipes/llm/data/conversations.py`); else what a user says."""
    every_turn: bool = True
    """The answers in them are scored, too."""

    @property
    def form(self) -> templates.Form:
        """What the template does with an answer."""
        return templates.form(self.tokenizer)

    @property
    def end(self) -> int:
        """Id of the token that ends an answer."""
        return self.tokenizer.convert_tokens_to_ids(self.form.end)

    @property
    def ends(self) -> list[int]:
        """Ids that generation stops at."""
        own = self.tokenizer.convert_tokens_to_ids([t for t in (self.form.end, self.form.call_end) if t])
        return sorted({*own, self.tokenizer.eos_token_id})

    def rows(self, row: dict[str, Any]) -> list[dict[str, str]]:
        """A row of a file as `prompt`, `completion` and `source`; several where a template changes an answer once another turn
        follows it. Raises `BadRow`."""
        row = formats.conversation(row)
        if not self.conversations and "messages" not in row:
            return [self.pair(row)]
        return conversations.rows(formats.as_messages(row), self)

    def pair(self, row: dict[str, str]) -> dict[str, str]:
        """A row of two texts, as it is; its completion as the template changes it."""
        plain = not self.form.fault and not any("<" in row[k] or "[" in row[k] for k in COLUMNS)
        if plain:
            return row
        turns = self.turns(row["prompt"])
        said = self.spoken(turns, {"role": "assistant", "content": row["completion"]}, row["prompt"])[1]
        return row | {"completion": self.bare(said)}

    def turns(self, prompt: str, shots: list[dict[str, str]] = ()) -> list[dict[str, Any]]:
        """The turns before the answer: the system's, examples of answered prompts, the prompt."""
        found = self.given(prompt)["messages"]
        system = [{"role": "system", "content": self.system}] if self.system and found[0]["role"] != "system" else []
        turns = [*system, *shots, *found]
        if turns[0]["role"] == "system" and not self.form.system and len(turns) > 1:
            first, asked, *rest = turns  # the template has no such role: its text goes before the first question
            text = "\n\n".join(t["content"] for t in (first, asked) if t["content"])
            return [asked | {"content": text}, *rest]
        return turns

    def given(self, prompt: str) -> dict[str, Any]:
        """`messages`, and `tools` where it has some, of a prompt; a plain one (a gate's blank, too) is what a user says."""
        if self.conversations and prompt.startswith("{"):
            return json.loads(prompt)
        return {"messages": [{"role": "user", "content": prompt}]}

    def shots(self, rows: list[dict[str, str]], n: int) -> list[dict[str, str]]:
        """Turns of `n` answered prompts, evenly spaced in `rows`: a prompt with examples."""
        some = [rows[i * len(rows) // n] for i in range(n)]
        asked = ((r, {"role": "user", "content": r["prompt"]}) for r in some)
        return [turn for r, one in asked for turn in (one, {"role": "assistant", "content": r["completion"]})]

    def render(self, turns: list[dict[str, Any]], prompt: str = "", **how: Any) -> Any:
        """What the template makes of `turns`, with the tools that `prompt` brings."""
        return templates.render(self.tokenizer, turns, self.form, self.given(prompt).get("tools"), **how)

    def ids(self, text: str) -> list[int]:
        """Ids of a text that the template has rendered."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def opening(self, turns: list[dict[str, Any]], prompt: str = "") -> str:
        """The text up to where the answer begins."""
        return self.render(turns, prompt, add_generation_prompt=True, tokenize=False)

    def ask(self, turns: list[dict[str, Any]], prompt: str = "") -> list[int]:
        """Ids up to where the answer begins: what generation starts from."""
        return self.ids(self.opening(turns, prompt))

    def spoken(self, before: list[dict[str, Any]], turn: dict[str, Any], prompt: str = "") -> tuple[str, str]:
        """(text up to where the answer begins, the answer with the token that ends it) of an assistant's turn, as the last one."""
        try:
            opening = self.opening(before, prompt)
            whole = self.render([*before, turn], prompt, tokenize=False)
        except templates.REFUSED as error:
            raise BadRow("the chat template does not take its turns", str(error)) from None
        if not whole.startswith(opening):
            fault = self.form.fault or "the template changes what stood before an answer once the answer is there"
            raise BadRow(fault, repr(whole[-120:]))
        said = whole[len(opening) :]
        if not conversations.says(said, turn):
            calls = "; the template knows no tool calls" if turn.get("tool_calls") else ""
            raise BadRow(f"the chat template drops or changes what the assistant says{calls}", repr(said[:120]))
        return opening, self.ended(said)

    def ended(self, said: str) -> str:
        """What was rendered as an answer, up to the token that ends it and with it."""
        form, text = self.form, said.rstrip()
        if form.borrowed:
            return text + form.end
        for end in filter(None, (form.end, form.call_end)):
            if end in text:
                return text[: text.rindex(end) + len(end)]
        raise BadRow(f"the chat template does not end this answer with {form.end!r}", repr(text[-60:]))

    def bare(self, said: str) -> str:
        """An answer as `ended` gives it, without what the template puts around every answer."""
        form = self.form
        return said.removesuffix(form.end).removesuffix(form.close).removeprefix(form.lead)

    def framed(self, completion: str) -> str:
        """The text of an answer as the template renders it, with the token that ends it."""
        form = self.form
        if form.call_end and completion.endswith(form.call_end):
            return completion
        own = any(tag in completion for tag in templates.tags(form.lead + form.close))  # its own reasoning or channel
        text = completion.strip() if form.trims and not own else completion
        return (text if own else form.lead + text + form.close) + form.end

    def answer(self, completion: str, opening: str = "") -> list[int]:
        """Ids of an answer and of the token that ends its turn, behind the text that opens it."""
        text = self.framed(completion)
        if opening:  # some tokenizers put a mark of a word's begin before a text that stands alone
            asked, whole = self.ids(opening), self.ids(opening + text)
            if whole[: len(asked)] == asked:
                return whole[len(asked) :]
        return self.ids(text)

    def said(self, text: str) -> str:
        """What an answer says: without its reasoning and without what the template puts around it."""
        marks = templates.tags(self.form.lead)[-1:] or ["</think>"]
        text = text.removeprefix(self.form.lead).rpartition(marks[0])[2]
        return (text.partition(self.form.close)[0] if self.form.close else text).strip()

    def example(self, prompt: str, completion: str) -> dict[str, list[int]]:
        """Ids and labels of one pair: only answers and the end-of-turn tokens after them are scored."""
        turns = self.turns(prompt)
        opening = self.opening(turns, prompt)
        asked, answer = self.ids(opening), self.answer(completion, opening)
        labels = [IGNORED] * len(asked)
        for k in self.answered(turns, prompt):
            before, said = self.spoken(
                turns[:k], turns[k], prompt
            )  # `conversations.rows` has seen that it stands so in `asked`
            start, stop = len(self.ids(before)), len(self.ids(before + said))
            labels[start:stop] = asked[start:stop]
        return {"input_ids": asked + answer, "labels": labels + answer}

    def answered(self, turns: list[dict[str, Any]], prompt: str = "") -> list[int]:
        """Which of the turns before the last answer are scored in place."""
        if not self.every_turn or self.given(prompt).get("alone"):
            return []
        return [k for k, turn in enumerate(turns) if turn["role"] == "assistant"]

    def shown(self, prompt: str) -> str:
        """What was said last."""
        return self.given(prompt)["messages"][-1]["content"]

    def saying(self, prompt: str, more: str) -> str:
        """The prompt, with `more` said at its end."""
        found = self.given(prompt)
        last = found["messages"][-1]
        last["content"] = f"{last['content']} {more}"
        return json.dumps(found) if self.conversations else last["content"]


def any_conversation(rows: Iterable[dict[str, Any]]) -> bool:
    """Is one of the rows more than a question and its answer?"""
    return any(formats.is_conversation(row) for row in rows)
