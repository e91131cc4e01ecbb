"""Fields (user, item, ...) that are numbered from 0 each and share one table: without offsets, users and items have the same rows."""

import torch
from torch import Tensor

CALLS = 10
NEAR = 0.98  # the table has a row for each value of each field, but for values that were not drawn
LEAST = 0.1  # of the table, of the second largest field
FREE = 0.1  # of the table, above the largest number


class Fields:
    """The largest number of each column of what is looked up."""

    def __init__(self) -> None:
        # Calls, rows of the table, largest number of each column (F,)
        self.tables: dict[int, tuple[int, int, Tensor]] = {}

    def look(self, ids: Tensor, table: Tensor) -> None:
        """Note numbers (N, F) that are looked up in a table (V, D)."""
        if ids.dim() != 2 or not 1 < ids.shape[1] < 100 or not len(ids):
            return
        calls, _, largest = self.tables.get(id(table), (0, 0, ids.new_zeros(ids.shape[1])))
        if len(largest) == ids.shape[1]:
            self.tables[id(table)] = (calls + 1, len(table), torch.maximum(largest, ids.detach().amax(0)))

    def fault(self) -> tuple[str, str] | None:
        """Return what was measured and its cause."""
        for calls, rows, largest in self.tables.values():
            sizes = sorted((largest + 1).tolist())
            if (
                calls < CALLS
                or not NEAR * rows <= sum(sizes) <= rows
                or sizes[-1] > (1 - FREE) * rows
                or sizes[-2] < LEAST * rows
            ):
                continue
            return (
                f"the {len(sizes)} columns of what is looked up have {sum(sizes):,} values together, as many as the table has rows ({rows:,}), but "
                f"the largest number is {sizes[-1] - 1:,}",
                "each column is numbered from 0, and different ones share rows: the offsets of the columns are not added",
            )
        return None
