"""Finds texts most of whose tokens are one and the same, scattered between others, while most of the vocabulary is never looked up: the words
of the texts are not those of the vocabulary.

Padding at the ends of a row does not count. The background of pictures, and rests in music, come in runs; unknown words do not.
"""

from collections import deque

import torch
from torch import Tensor
from trainworthy.guard.hooks.addresses import home_of
from trainworthy.guard.measures.data.fields import Fields

VOCABULARY = 200  # rows of the table, at least
TOKENS = 2000
SHARE = 0.4  # of one token
USED = 0.5  # of the table's rows
RUNS = 0.4  # how far the token is more frequent after itself, on the way from its share to always
CALLS = 400


class Lookups:
    """Counts of tokens that training looks up in each table."""

    def __init__(self) -> None:
        self.fields = Fields()
        self.batches: deque = deque(maxlen=4)  # loops may fetch ahead
        self.tables: dict[int, list] = {}  # calls, tokens by number (V,), tokens after themselves by number (V,)

    def entries(self, batch: list[Tensor]) -> None:
        """Note a batch: tokens that the loop changes (masks) are not those of the data."""
        self.batches.append([x for x in batch if x.dtype == torch.int64 and x.dim() == 2])

    def look(self, ids: Tensor, table: Tensor) -> None:
        """Note tokens (N, T) of the batch that are looked up in a table (V, D)."""
        self.fields.look(ids, table)
        if ids.dim() != 2 or ids.dtype != torch.int64 or ids.shape[1] < 4 or len(table) < VOCABULARY:
            return
        home = home_of(ids)
        row = self.tables.setdefault(id(table), [0, torch.zeros(len(table)), torch.zeros(len(table))])
        if row[0] >= CALLS or not any(home_of(x) == home for batch in self.batches for x in batch):
            return
        row[0] += 1
        ids = ids.detach().cpu()
        first, last = (ids == ids[:, :1]).cumprod(1).bool(), (ids == ids[:, -1:]).flip(1).cumprod(1).flip(1).bool()
        runs = [m & (m.sum(1, keepdim=True) > 1) for m in (first, last)]
        inner = ~(runs[0] | runs[1])
        row[1] += torch.bincount(ids[inner], minlength=len(table))
        pair = inner[:, 1:] & inner[:, :-1] & (ids[:, 1:] == ids[:, :-1])
        row[2] += torch.bincount(ids[:, 1:][pair], minlength=len(table))

    def fault(self) -> tuple[str, str] | None:
        """Return what was measured and its cause."""
        for _, tokens, again in self.tables.values():
            total, used = float(tokens.sum()), float((tokens > 0).float().mean())
            top = int(tokens.argmax())
            share = float(tokens[top]) / max(1.0, total)
            if total < TOKENS or share < SHARE or used > USED or share > 0.95:
                continue
            if float(again[top]) / float(tokens[top]) > share + RUNS * (1 - share):
                continue
            return (
                f"{share:.0%} of {total:,.0f} tokens inside the texts are token {top}, scattered between others, and {used:.0%} of the "
                f"{len(tokens):,} rows of the embedding are ever looked up",
                "most words are unknown to the vocabulary: it was built from other units than those that are looked up (words and pieces, upper "
                "and lower case, another tokenizer)",
            )
        return self.fields.fault()
