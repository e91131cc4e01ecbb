"""Rows of tokens: all questions about an image in one row, masked from one another, never truncated.

A row is a prefix (one position per image feature) and then each question with its answer. A question attends to the prefix and to itself:
attention is masked in blocks and positions restart, so each answer is the same as if its question were alone.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

PLACE = "<image>"  # in a question: the place of an image
IMAGE = -200  # in a row: the place of one image feature (LLaVA's number)
IGNORE = -100  # a label that is not scored
FILL = {"ids": 0, "labels": IGNORE, "segment": -1, "position": 0}  # padding of rows


class Question(NamedTuple):
    """One question about an image."""

    kind: int
    """Kind of question, for the tables."""
    question: str
    answer: str
    pair: int = -1
    """Shared with the same question about the counterfactual image, if there is one."""


def pack(tokenizer: Any, prefix: Sequence[int], pairs: list[Question]) -> dict[str, Tensor]:
    """Return one row (T,) of each: `ids`; `labels` (answers and their end, not shifted); `segment` (0: prefix, q: question q); `position`
    (each question's starts after the prefix)."""
    ids, labels, segment = list(prefix), [IGNORE] * len(prefix), [0] * len(prefix)
    position = list(range(len(prefix)))
    for q, one in enumerate(pairs, 1):
        question, answer = (
            tokens(tokenizer, "\n" + one.question),
            [*tokens(tokenizer, " " + one.answer), tokenizer.eos_token_id],
        )
        ids += [*question, *answer]
        labels += [IGNORE] * len(question) + answer
        length = len(question) + len(answer)
        segment += [q] * length
        position += range(len(prefix), len(prefix) + length)
    return {"ids": torch.tensor(ids), "labels": torch.tensor(labels), "segment": torch.tensor(segment),
            "position": torch.tensor(position)}  # fmt: skip


def chain(tokenizer: Any, start: Sequence[int], features: int, system: str, pairs: list[Question]) -> dict[str, Tensor]:
    """Return one row (T,) of each field of a conversation. Each turn sees all before it, and an image's features take the place of PLACE. A
    single turn that starts with its image gives the same row as `pack`."""
    ids, labels = list(start), [IGNORE] * len(start)
    for text, answer in [(system, ""), *((one.question, one.answer) for one in pairs)]:
        for i, piece in enumerate(text.split(PLACE)):
            pieces = [
                *([IMAGE] * features if i else []),
                *(tokens(tokenizer, "\n" + piece.strip()) if piece.strip() else []),
            ]
            ids += pieces
            labels += [IGNORE] * len(pieces)
        scored = [*tokens(tokenizer, " " + answer), tokenizer.eos_token_id] if answer else []
        ids += scored
        labels += scored
    return {"ids": torch.tensor(ids), "labels": torch.tensor(labels), "segment": torch.ones(len(ids), dtype=torch.long),
            "position": torch.arange(len(ids))}  # fmt: skip


@cache
def tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the ids of a text, without special tokens."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def together(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows padded to the longest: (B, T) each."""
    return {k: pad_sequence([r[k] for r in rows], batch_first=True, padding_value=v) for k, v in FILL.items()}


def seen(segment: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, 1, T, T) from (B, T), to add to attention scores: 0 where a token sees another, else the lowest number."""
    earlier = torch.ones(segment.shape[1], segment.shape[1], dtype=torch.bool, device=segment.device).tril()
    same = (segment[:, :, None] == segment[:, None]) | (segment == 0)[:, None]
    allowed = earlier & same & (segment >= 0)[:, None]
    return torch.zeros(allowed.shape, dtype=dtype, device=segment.device).masked_fill(~allowed, torch.finfo(dtype).min)[
        :, None
    ]


def answer(model: nn.Module, embeds: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return logits (B, T, V) of a causal language model of transformers on rows of embeddings (B, T, d)."""
    mask = seen(batch["segment"], embeds.dtype)
    return model(inputs_embeds=embeds, attention_mask=mask, position_ids=batch["position"], use_cache=False).logits


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of -log p over the scored tokens, each predicted by the token before it in its row: (B, T, V) and (B, T)."""
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def scored(labels: Tensor) -> int:
    """Return the number of tokens that `nll` sums over."""
    return int((labels[:, 1:] != IGNORE).sum())


def numbered(labels: Tensor) -> Tensor:
    """Return the number of the answer that each scored token belongs to, from 1; 0: not scored. (B, T) or (T,). There is always an unscored
    token between two answers."""
    scored = (labels != IGNORE).long()
    return (scored.diff(dim=-1, prepend=torch.zeros_like(scored[..., :1])) > 0).cumsum(-1) * scored


def right(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return whether greedy decoding would give each answer, (B, Q): every token of it, its end included, is the most likely one after the
    right tokens before it."""
    number = numbered(batch["labels"])[:, 1:]
    missed = (logits[:, :-1].argmax(-1) != batch["labels"][:, 1:]) & (number > 0)
    wrong = torch.zeros(len(logits), batch["kind"].shape[1] + 1, device=logits.device)
    wrong.scatter_add_(1, number, missed.float())
    return wrong[:, 1:] == 0
