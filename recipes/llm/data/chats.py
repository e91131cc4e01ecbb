"""How a tokenizer's chat template renders a prompt and its answer, for training, evaluation and generation."""

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
    """Renders prompts and completions with a tokenizer's chat template. The template is applied once and nothing is added.

    A completion is what the model writes up to the token that ends its turn, without what the template puts around every answer.
    """

    tokenizer: Any
    system: str
    conversations: bool = False
    """Prompts are conversations up to an answer, as JSON (`recipes/llm/data/conversations.py`), not plain user texts."""
    every_turn: bool = True
    """Answers inside the prompt are scored, too."""

    @property
    def form(self) -> templates.Form:
        """How the template renders an answer."""
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
        """Return a row of a file as rows of `prompt`, `completion` and `source`: several if the template changes an answer once another turn
        follows it. Raises `BadRow`."""
        row = formats.conversation(row)
        if not self.conversations and "messages" not in row:
            self.unmarked(*(row[k] for k in COLUMNS))
            return [self.pair(row)]
        row = formats.as_messages(row)
        turns = row["messages"] if isinstance(row.get("messages"), list) else []
        self.unmarked(*(t["content"] for t in turns if isinstance(t, dict) and isinstance(t.get("content"), str)))
        return conversations.rows(row, self)

    def unmarked(self, *texts: str) -> None:
        """Raise BadRow if a text has a token that ends a turn. The template adds it, and the tokenizer reads it as that token anywhere."""
        ends = {self.form.end, self.form.call_end, self.tokenizer.eos_token} - {"", None}
        for text in texts:
            if found := next((end for end in ends if end in text), ""):
                raise BadRow(f"a text has {found!r} in it, which ends a turn: the template adds it", repr(text[-40:]))

    def pair(self, row: dict[str, str]) -> dict[str, str]:
        """Return a row of two texts, with the completion as the template renders it."""
        plain = not self.form.fault and not any("<" in row[k] or "[" in row[k] for k in COLUMNS)
        if plain:
            return row
        turns = self.turns(row["prompt"])
        answer = self.spoken(turns, {"role": "assistant", "content": row["completion"]}, row["prompt"])[1]
        return row | {"completion": self.bare(answer)}

    def turns(self, prompt: str, shots: list[dict[str, str]] = ()) -> list[dict[str, Any]]:
        """Return the turns before the answer: the system turn, examples of answered prompts, the prompt."""
        found = self.given(prompt)["messages"]
        system = [{"role": "system", "content": self.system}] if self.system and found[0]["role"] != "system" else []
        turns = [*system, *shots, *found]
        if turns[0]["role"] == "system" and not self.form.system and len(turns) > 1:
            first, question, *rest = turns  # the template has no system role: its text goes before the first question
            text = "\n\n".join(t["content"] for t in (first, question) if t["content"])
            return [question | {"content": text}, *rest]
        return turns

    def given(self, prompt: str) -> dict[str, Any]:
        """Return `messages`, and `tools` if there are any, of a prompt. A plain prompt is a user turn."""
        if self.conversations and conversations.is_prompt(prompt):
            return json.loads(prompt)
        return {"messages": [{"role": "user", "content": prompt}]}

    def shots(self, rows: list[dict[str, str]], n: int) -> list[dict[str, str]]:
        """Return the turns of `n` answered prompts, evenly spaced in `rows`, as examples for a prompt."""
        some = [rows[i * len(rows) // n] for i in range(n)]
        questions = ((r, {"role": "user", "content": r["prompt"]}) for r in some)
        return [turn for r, one in questions for turn in (one, {"role": "assistant", "content": r["completion"]})]

    def render(self, turns: list[dict[str, Any]], prompt: str = "", **how: Any) -> Any:
        """Return the template's rendering of `turns`, with the tools of `prompt`."""
        return templates.render(self.tokenizer, turns, self.form, self.given(prompt).get("tools"), **how)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a rendered text."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def opening(self, turns: list[dict[str, Any]], prompt: str = "") -> str:
        """Return the text up to the start of the answer."""
        return self.render(turns, prompt, add_generation_prompt=True, tokenize=False)

    def ask(self, turns: list[dict[str, Any]], prompt: str = "") -> list[int]:
        """Return the ids up to the start of the answer, from which generation continues."""
        return self.ids(self.opening(turns, prompt))

    def spoken(self, before: list[dict[str, Any]], turn: dict[str, Any], prompt: str = "") -> tuple[str, str]:
        """Return (text up to the answer, the answer with the token that ends it) of an assistant's turn as the last one."""
        try:
            opening = self.opening(before, prompt)
            whole = self.render([*before, turn], prompt, tokenize=False)
        except templates.REFUSED as error:
            raise BadRow("the chat template does not take its turns", str(error)) from None
        if not whole.startswith(opening):
            fault = self.form.fault or "the template changes what stood before an answer once the answer is there"
            raise BadRow(fault, repr(whole[-120:]))
        if lost := conversations.dropped(opening, before):
            raise BadRow(f"the chat template drops what the {lost['role']} says", repr(lost["content"])[:120])
        answer = whole[len(opening) :]
        if not conversations.says(answer, turn):
            calls = "; the template knows no tool calls" if turn.get("tool_calls") else ""
            raise BadRow(f"the chat template drops or changes the assistant's turns{calls}", repr(answer[:120]))
        return opening, self.ended(answer)

    def ended(self, answer: str) -> str:
        """Return a rendered answer up to and including the token that ends it."""
        form, text = self.form, answer.rstrip()
        if form.borrowed:
            return text + form.end
        for end in filter(None, (form.end, form.call_end)):
            if end in text:
                return text[: text.rindex(end) + len(end)]
        raise BadRow(f"the chat template does not end this answer with {form.end!r}", repr(text[-60:]))

    def bare(self, answer: str) -> str:
        """Return an answer from `ended` without what the template puts around every answer."""
        form = self.form
        return answer.removesuffix(form.end).removesuffix(form.close).removeprefix(form.lead)

    def framed(self, completion: str) -> str:
        """Return an answer's text as the template renders it, with the token that ends it."""
        form = self.form
        if form.call_end and completion.endswith(form.call_end):
            return completion
        # the answer has its own reasoning or channel
        own = any(tag in completion for tag in templates.tags(form.lead + form.close))
        text = completion.strip() if form.trims and not own else completion
        return (text if own else form.lead + text + form.close) + form.end

    def answer(self, completion: str, opening: str = "") -> list[int]:
        """Return the ids of an answer and of the token that ends its turn, after the text that opens it."""
        text = self.framed(completion)
        if opening:  # some tokenizers put a word-start mark before a text that stands alone
            before, whole = self.ids(opening), self.ids(opening + text)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self.ids(text)

    def reply(self, text: str) -> str:
        """Return an answer without its reasoning and without what the template puts around it."""
        marks = templates.tags(self.form.lead)[-1:] or ["</think>"]
        text = text.removeprefix(self.form.lead).rpartition(marks[0])[2]
        return (text.partition(self.form.close)[0] if self.form.close else text).strip()

    def example(self, prompt: str, completion: str) -> dict[str, list[int]]:
        """Return ids and labels of one pair: only answers and their end-of-turn tokens are scored."""
        turns = self.turns(prompt)
        opening = self.opening(turns, prompt)
        prompt_ids, answer = self.ids(opening), self.answer(completion, opening)
        labels = [IGNORED] * len(prompt_ids)
        for k in self.answered(turns, prompt):
            # `conversations.rows` has checked that it is in `prompt_ids`
            before, text = self.spoken(turns[:k], turns[k], prompt)
            start, stop = len(self.ids(before)), len(self.ids(before + text))
            labels[start:stop] = prompt_ids[start:stop]
        return {"input_ids": prompt_ids + answer, "labels": labels + answer}

    def answered(self, turns: list[dict[str, Any]], prompt: str = "") -> list[int]:
        """Return which turns before the last answer are scored: no greeting, which answers nothing."""
        if not self.every_turn or self.given(prompt).get("alone"):
            return []
        return conversations.answers(turns)

    def last_text(self, prompt: str) -> str:
        """Return the last turn's text."""
        return self.given(prompt)["messages"][-1]["content"]

    def asking(self, prompt: str, text: str) -> str:
        """Return the prompt with another text in its last turn."""
        if not (self.conversations and conversations.is_prompt(prompt)):
            return text
        found = self.given(prompt)
        found["messages"][-1]["content"] = text
        return conversations.as_prompt(found)


def any_conversation(rows: Iterable[dict[str, Any]]) -> bool:
    """Return whether any row is more than a question and its answer."""
    return any(formats.is_conversation(row) for row in rows)
