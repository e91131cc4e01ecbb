"""How rows and answers of a chat are rendered, to compare what a trainer reads with, and to show."""

from itertools import groupby
from typing import Any

from torch import Tensor
from trainworthy.recipes.llm.data.pairs import IGNORED, Chat
from trainworthy.recipes.llm.data.templates import REFUSED, shared

ENDS = 300  # characters


def rows_of(batch: dict) -> dict:
    """Return the tensors of a batch with one text per row. Of (B, 2, T), two answers to each prompt, all first answers come before all
    second ones."""
    return {
        k: v.transpose(0, 1).flatten(0, 1) if v.dim() == 3 else v for k, v in batch.items() if isinstance(v, Tensor)
    }


def mark_scored(tokenizer: Any, batch: dict) -> list[str]:
    """Return the rows of a batch as text without padding; scored tokens are in [[double brackets]]."""
    batch = rows_of(batch)
    rows = zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True)
    return [_marked(tokenizer, ids[mask].tolist(), (labels[mask] != IGNORED).tolist()) for ids, labels, mask in rows]


def _marked(tokenizer: Any, ids: list[int], scored: list[bool]) -> str:
    """Runs of tokens are decoded together: one sign may be several tokens."""
    runs = groupby(zip(ids, scored, strict=True), key=lambda pair: pair[1])
    texts = [(tokenizer.decode([token for token, _ in run]), inside) for inside, run in runs]
    return "".join(f"[[{text}]]" if inside else text for text, inside in texts)


def excerpt(text: str) -> str:
    """A rendered example for a message: of a long one both ends, where the roles and the end of the answer are."""
    return text if len(text) <= 2 * ENDS else f"{text[:ENDS]} ... {text[-ENDS:]}"


def reference(chat: Chat, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Return (ids before the answer, ids of the answer with the token that ends it), from the tokenizer's own template."""
    turns = chat.turns(prompt)
    opening = chat.render(turns, prompt, add_generation_prompt=True, tokenize=False)
    rendered = _rendered(chat, turns, prompt, opening, completion)
    before, whole = chat.ids(opening), chat.ids(opening + rendered)
    return before, whole[len(before) :] if whole[: len(before)] == before else chat.ids(rendered)


def _rendered(chat: Chat, turns: list[dict], prompt: str, opening: str, completion: str) -> str:
    """Return what the template appends to `opening` for an assistant turn `completion`, up to the token that ends it. If the prompt opens a
    block that the answer closes, the turn's content is both together. A tool call that only `tool_calls` can express was rendered by
    `conversations.rows`."""
    for content in (completion, opening[opening.rfind("<") :] + completion):
        try:
            whole = chat.render([*turns, {"role": "assistant", "content": content}], prompt, tokenize=False)
        except REFUSED:
            continue
        if whole.startswith(opening) and completion.strip() in whole[len(opening) :]:
            return chat.ended(whole[len(opening) :])
    return chat.framed(completion)


def answered(chat: Chat, prompt: str, before: list[int]) -> set[int]:
    """Return the positions in `before`, the ids of a conversation, that belong to assistant turns, with the tokens that end them: the
    difference between the template with the turn and without it."""
    turns, found = chat.turns(prompt), set()
    for k in chat.answered(turns, prompt):
        opening = chat.render(turns[:k], prompt, add_generation_prompt=True, tokenize=False)
        whole = chat.render(turns[: k + 1], prompt, tokenize=False)
        start, end = len(chat.ids(opening)), len(chat.ids(whole)) + chat.form.borrowed
        found |= set(range(start, 1 + max(i for i in range(start, end) if before[i] in chat.ends)))
    return found


def quoting(chat: Chat, sample: dict[str, str], answer: str) -> dict[str, str]:
    """Return the sample with the assistant's role marker and the answer quoted in its prompt. A search for them as text then finds two
    places."""
    turns = chat.turns(sample["prompt"])
    plain = chat.render(turns, sample["prompt"], tokenize=False)
    opening = chat.opening(turns, sample["prompt"])
    marker = opening[len(shared(plain, opening)) :]
    whole = f"{chat.last_text(sample['prompt'])} {marker}{sample[answer]}"
    return {**sample, "prompt": chat.asking(sample["prompt"], whole)}


def rows(samples: dict[str, dict[str, str]], answers: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Return (name, prompt, answer) of each row of their batch."""
    named = {k: f" ({k})" if len(answers) > 1 else "" for k in answers}
    return [(name + named[k], sample["prompt"], sample[k]) for k in answers for name, sample in samples.items()]


def difference(tokenizer: Any, ids: list[int], due: list[int]) -> str:
    """Return from which token on the ids of a row are not those of the template, with the text around it."""
    at = next((k for k, (a, b) in enumerate(zip(ids, due, strict=False)) if a != b), min(len(ids), len(due)))
    here, there = (tokenizer.decode(x[max(0, at - 4) : at + 6]) for x in (ids, due))
    return f"from token {at} on: {here!r}, the template gives {there!r}"


def why_other(ids: list[int], before: list[int], answer: list[int]) -> str:
    """Return how the ids of a row come from those of its prompt and its answer as the template renders them; "" if that is not clear."""
    due = before + answer
    if ids == answer:
        return "the prompt is left out: the row holds the answer alone"
    if ids and len(ids) < len(due) and due[-len(ids) :] == ids:
        return f"the row begins {len(due) - len(ids)} tokens late: it is cut on the left"
    if due[: len(ids)] == ids:
        return f"the row ends {len(due) - len(ids)} tokens early: it is cut (--data.max-length), or its last tokens are not added"
    if len(ids) > len(due) and ids[len(ids) - len(due) :] == due:
        return (
            "special tokens are added to a text that has them (a second BOS): add_special_tokens=False after a template"
        )
    return ""
