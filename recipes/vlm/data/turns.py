"""Rows of tokens in the turns of a language model's own chat template, for models that were trained on conversations.

The template is applied once, to whole turns, as in llm/sft (`recipes/llm/data/chats.py`). A picture's features take the place of
`<image>` in what it renders; the texts around it are tokenised apart, as LLaVA does.
"""

import json
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.llm.data.chats import Chat
from trainworthy.recipes.llm.data.formats import BadRow
from trainworthy.recipes.vlm.data.rows import IGNORE, IMAGE, PLACE, Question

Part = tuple[str, bool]
"""A piece of a rendered conversation, and whether it is an answer with its end token."""


def chat(tokenizer: Any) -> Chat | None:
    """Return how this tokenizer's template renders a conversation; None if it has no template (a base model)."""
    return Chat(tokenizer, system="", conversations=True) if tokenizer.chat_template else None


def rendered(chat: Chat, system: str, pairs: list[Question]) -> list[Part]:
    """Return a conversation as the template renders it, in pieces: the text before each answer, and the answer with its end token."""
    turns, before, found = [{"role": "system", "content": system}] if system else [], "", []
    for one in pairs:
        turns.append({"role": "user", "content": one.question})
        prompt = json.dumps({"messages": turns})
        turn = {"role": "assistant", "content": one.answer.strip()}
        try:
            opening, answer = chat.spoken(chat.turns(prompt), turn, prompt)
        except BadRow as fault:
            raise UserError(f"the language model's chat template cannot say {one.answer!r:.60}", got=f"{fault.why}: {fault.seen}",
                            needed="the text of each answer in what the template renders",
                            next="--chat-template FILE with one for training, or trl:NAME") from None  # fmt: skip
        if not opening.startswith(before):
            raise UserError("the language model's chat template changes an answer once another question follows it",
                            got=f"{before[-60:]!r}, later {opening[: len(before)][-60:]!r}",
                            needed="a template that leaves earlier turns as they were", cause="reasoning stripped from earlier turns",
                            next="--chat-template trl:qwen3_training for Qwen3, or a FILE of that sort") from None  # fmt: skip
        found += [(opening[len(before) :], False), (answer, True)]
        before = opening + answer
        turns.append(turn)
    return found


def chained(chat: Chat, features: int, system: str, pairs: list[Question]) -> dict[str, Tensor]:
    """Return one row (T,) of each field of a conversation; the fields of `rows.chain`."""
    ids, labels = [], []
    for text, answer in _joined(rendered(chat, system, pairs)):
        places = _places(chat, text, features)
        scored = _behind(chat, text, answer)
        ids += places + scored
        labels += [IGNORE] * len(places) + scored
    return {"ids": torch.tensor(ids), "labels": torch.tensor(labels), "segment": torch.ones(len(ids), dtype=torch.long),
            "position": torch.arange(len(ids))}  # fmt: skip


def packed(chat: Chat, features: int, pairs: list[Question]) -> dict[str, Tensor]:
    """Return one row (T,) of each field, with questions about one image as separate conversations after the same image; the fields of
    `rows.pack`."""
    ids: list[int] = []
    labels, segment, position = [], [], []
    for q, one in enumerate(pairs, 1):
        ((text, answer),) = _joined(rendered(chat, "", [placed(one)]))
        before, after = text.split(PLACE)
        prefix = [*chat.ids(before), *[IMAGE] * features]
        if not ids:
            ids, labels, segment = list(prefix), [IGNORE] * len(prefix), [0] * len(prefix)
            position = list(range(len(prefix)))
        elif ids[: len(prefix)] != prefix:
            raise UserError("the language model's chat template puts other text before a picture for each question",
                            got=repr(before[-80:]), needed="the same for all questions about one picture",
                            next="conversations instead of questions (`messages`), or --chat-template FILE")  # fmt: skip
        question, scored = chat.ids(after), _behind(chat, after, answer)
        ids += question + scored
        labels += [IGNORE] * len(question) + scored
        segment += [q] * (len(question) + len(scored))
        position += range(len(prefix), len(prefix) + len(question) + len(scored))
    return {"ids": torch.tensor(ids), "labels": torch.tensor(labels), "segment": torch.tensor(segment),
            "position": torch.tensor(position)}  # fmt: skip


def placed(one: Question) -> Question:
    """Return a question after its image, as in LLaVA."""
    return one if PLACE in one.question else one._replace(question=f"{PLACE}\n{one.question}")


def _joined(found: list[Part]) -> list[tuple[str, str]]:
    return [(text, answer) for (text, _), (answer, _) in zip(found[::2], found[1::2], strict=True)]


def _places(chat: Chat, text: str, features: int) -> list[int]:
    """Return the ids of a text, with the given number of features for each PLACE."""
    first, *rest = text.split(PLACE)
    found = chat.ids(first) if first else []
    for piece in rest:
        found += [IMAGE] * features + (chat.ids(piece) if piece else [])
    return found


def _behind(chat: Chat, before: str, answer: str) -> list[int]:
    """Return the ids of an answer after its text: some tokenizers put a word-start mark before a text that stands alone."""
    before = before.rpartition(PLACE)[2]
    prompt_ids, whole = chat.ids(before), chat.ids(before + answer)
    return whole[len(prompt_ids) :] if whole[: len(prompt_ids)] == prompt_ids else chat.ids(answer)


def row_of(chat: Chat | None) -> str:
    """Return the description of a row for an export's config: the template's text with {question} and the image's place."""
    if chat is None:
        return "embeddings of bos, those of the picture, those of '\\n' + question; then greedily up to eos"
    return rendered(chat, "", [placed(Question(0, "{question}", "answer"))])[0][0]


def prompt_of(chat: Chat | None, tokenizer: Any) -> str:
    """Return the text that an export's users tokenise: up to the answer, with <image> and {question}."""
    return row_of(chat) if chat else f"{tokenizer.bos_token or ''}{PLACE}\n{{question}}"
