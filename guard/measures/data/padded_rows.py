"""Finds rows of padded numbers (sessions, texts) that are padded at the other end in the evaluation, and next items that are one and the same
in each row.

Read where an embedding with a `padding_idx` is looked up. A model of transformers gets an attention mask, and may be padded on the left where
it writes.
"""

from collections import Counter, deque

from torch import Tensor

ROWS = 16  # padded rows of each side
ONE_SIDED = 0.9
FEWEST = 3  # items of a row that could differ
SAME = 0.95  # of the rows hold one item alone, and of the others this share at most differs
OFTEN = 0.2  # of the lookups next to others: the items to predict, beside those that are not to be
CALLS = 400


class PaddedRows:
    """What was looked up in each table with a padding index, with gradients and without."""

    def __init__(self) -> None:
        self.calls: Counter = Counter()
        # Table, training -> rows padded in front, at the end, at both.
        self.sides: dict[tuple[int, bool], list[int]] = {}
        self.recent: dict[int, deque] = {}  # table -> the last rows of training
        # Lookups next to one with the same padding whose rows vary; those of them whose rows hold one item each, and their rows.
        self.compared, self.alike, self.rows = 0, 0, 0

    def look(self, ids: Tensor, table: Tensor, padding: int | None, training: bool) -> None:
        """Note rows (N, T)."""
        if padding is None or ids.dim() != 2 or ids.is_floating_point() or ids.shape[1] < 4 or not len(ids):
            return
        self.calls[id(table), training] += 1
        if self.calls[id(table), training] > CALLS:
            return
        ids = ids.detach().cpu()
        pad = ids == padding
        padded = ids[pad.any(1) & ~pad.all(1)]
        if len(padded):
            front, end = (padded[:, 0] == padding), (padded[:, -1] == padding)
            counts = self.sides.setdefault((id(table), training), [0, 0, 0])
            for k, rows in enumerate((front & ~end, end & ~front, front & end)):
                counts[k] += int(rows.sum())
        if training:
            recent = self.recent.setdefault(id(table), deque(maxlen=3))
            self._compare(ids, pad, recent)
            recent.append((ids, pad))

    def _compare(self, ids: Tensor, pad: Tensor, recent: deque) -> None:
        """Count rows of one item alone next to rows with the same padding that vary."""
        if not bool(pad.any()):
            return  # an item that was repeated for each place of a history is nowhere padded
        known = (~pad).sum(1) >= FEWEST
        for other, place in recent:
            if other.shape == ids.shape and bool((place == pad).all()):
                mine, theirs = (single(x, pad)[known].float() for x in (ids, other))
                if len(mine) and float(theirs.mean()) < 1 - SAME:
                    single_ones = float(mine.mean()) >= SAME
                    self.compared, self.alike = self.compared + 1, self.alike + single_ones
                    self.rows += len(mine) * single_ones

    def turned(self) -> tuple[str, str] | None:
        """Return the fault if the padding is at the other end in the evaluation."""
        for (table, training), counts in self.sides.items():
            other = self.sides.get((table, False))
            if not training or other is None:
                continue
            for here, there in ((0, 1), (1, 0)):
                sides = ("in front of", "behind")
                if counts[here] >= max(ROWS, ONE_SIDED * sum(counts)) and other[there] >= max(
                    ROWS, ONE_SIDED * sum(other)
                ):
                    return (
                        f"{counts[here]:,} padded rows of training have their padding {sides[here]} the items, {other[there]:,} of the evaluation "
                        f"{sides[there]} them",
                        "the evaluation pads at the other end: the last position holds padding, and positions are counted from another one",
                    )
        return None

    def repeated(self) -> tuple[str, str] | None:
        """Return the fault if the rows of one item alone are rows of targets."""
        if self.rows < 4 * ROWS or self.alike < max(FEWEST, OFTEN * self.compared):
            return None
        return (
            f"{self.rows:,} rows next to the inputs, with the same padding, hold one item alone at all their positions",
            "the next item is not replaced within the loop that fills a row: every position predicts the last item",
        )


def single(ids: Tensor, pad: Tensor) -> Tensor:
    """Return which rows hold one item alone beside padding."""
    low, high = ids.masked_fill(pad, ids.max().item() + 1), ids.masked_fill(pad, -1)
    return low.amin(1) == high.amax(1)
