"""Documents packed into rows. No token is lost, no document is cut if it fits a row, and no document sees or predicts another.

A document longer than a row is read in windows. Each document or window in a row starts at position 0, which isolates it.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainworthy import core

IGNORED = -100


class Window(NamedTuple):
    """A part of a document that is read at once."""

    document: int
    start: int
    end: int
    scored: int
    """Tokens from here on are scored; earlier ones are context."""


def windows(lengths: list[int], context: int, stride: int) -> list[Window]:
    """Return windows of at most `context` tokens, `stride` apart. Each token but a document's first is scored in exactly one window, the
    first that holds it after another token. At a stride of context - 1 consecutive windows share one token."""
    found = []
    for document, n in enumerate(lengths):
        start, scored = 0, 1
        while scored < n:
            end = min(start + context, n)
            found.append(Window(document, start, end, scored))
            start, scored = start + stride, end
    return found


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Return rows of indices: longest first, each into the row with the least sufficient room (best fit, Ding 2024, arXiv 2404.10830)."""
    rows: list[list[int]] = []
    free: list[list[int]] = [[] for _ in range(room + 1)]  # rows by their free room
    some = 0  # bit k is set if a row has free room k
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        n = lengths[i]
        if fitting := some >> n:
            left = n + (fitting & -fitting).bit_length() - 1
            row = free[left].pop()
            if not free[left]:
                some &= ~(1 << left)
            rows[row].append(i)
        else:
            left, row = room, len(rows)
            rows.append([i])
        free[left - n].append(row)
        some |= 1 << left - n
    return rows


@lru_cache(8)
def _laid_out(
    lengths: tuple[int, ...], context: int, stride: int, packing: bool = True
) -> tuple[list[Window], list[list[int]]]:
    """(windows, rows of their indices), found once per process."""
    found = windows(list(lengths), context, stride)
    return found, best_fit([w.end - w.start for w in found], context) if packing else [[i] for i in range(len(found))]


class Packed(core.Data):
    """Rows of packed documents: ids, labels and positions, (context,) each."""

    def __init__(self, documents: list[np.ndarray], *, context: int, stride: int, tokenizer: Any, sizes: np.ndarray,
                 packing: bool = True, some: list[Window] | None = None):  # fmt: skip
        self.documents, self.context, self.stride, self.packing = documents, context, stride, packing
        self.tokenizer, self.sizes = tokenizer, sizes
        if some is None:
            self.windows, self.rows = _laid_out(tuple(map(len, documents)), context, stride, packing)
        else:
            self.windows, self.rows = some, best_fit([w.end - w.start for w in some], context)
        self.fields = {"input_ids": core.Field("input", low=0, high=len(sizes) - 1), "text": core.Field("source"),
                       "labels": core.Field("target", low=IGNORED, high=len(sizes) - 1)}  # fmt: skip
        scored = sum(w.end - w.scored for w in self.windows)
        full = sum(w.end - w.start for w in self.windows) / max(1, len(self.rows) * context)
        cut = sum(len(d) > context for d in documents)
        kind = "packed" if packing else "not packed"
        self.notes = {
            kind: f"{len(documents):,} documents in {len(self.rows):,} rows of {context}, {full:.1%} full; {scored:,} tokens "
            f"asked for, none lost; {cut:,} documents are longer than a row: read in windows {stride} apart"
        }

    def among(self, documents: list[np.ndarray]) -> "Packed":
        """Return other documents, packed in the same way."""
        return type(self)(documents, context=self.context, stride=self.stride, tokenizer=self.tokenizer, sizes=self.sizes,
                          packing=self.packing)  # fmt: skip

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor | str]:
        ids, labels, positions = (torch.zeros(self.context, dtype=torch.long) for _ in range(3))
        labels += IGNORED
        ids += self.tokenizer.pad_token_id
        at = 0
        for window in (self.windows[i] for i in self.rows[index]):
            tokens = torch.from_numpy(self.documents[window.document][window.start : window.end].astype(np.int64))
            end, first = at + len(tokens), window.scored - window.start
            ids[at:end] = tokens
            labels[at + first : end] = tokens[first:]
            positions[at:end] = torch.arange(len(tokens))
            at = end
        # Padding is a document of its own that is not scored.
        positions[at:] = torch.arange(self.context - at)
        size = torch.tensor(int(self.sizes[labels[labels != IGNORED].numpy()].sum()))
        text = self.tokenizer.decode(ids[:at], skip_special_tokens=True)
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "bytes": size, "text": text}
