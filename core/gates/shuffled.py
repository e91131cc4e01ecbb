"""What a net reaches on held-out samples that was trained on other samples' inputs: the null of tiny-data.

A net that was trained on shuffled labels gives all samples that look alike the same answer. Whether that answer is right is decided
once per look-alike group, not once per sample: with ten such groups it reaches 20% or more in one draw of four, by luck. So luck is
measured over relabellings of whole classes and, where there are too few of those, by training once more on permuted inputs.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from trainworthy.core.recipe.stage import Data, Metric

MANY = 5  # classes whose relabellings are enough for a null of their own (120 of them)
CLEAR = 0.3  # of the range from chance to the ceiling: a continuous target that is followed so well needs no second training
FASTER = 0.05  # of the first loss: what right labels save over shuffled ones, on average over the later half, and
TIMES = 1.5  # times as much as those were learnt (two shuffles: up to 1.3 times, measured)


def distinct(data: Data, indices: Sequence[int]) -> tuple[str, list[int]] | None:
    """(name, values) of the first target that is one of a few whole numbers in every one of these samples, declared or not."""
    for key, entry in data.fields.items():
        if entry.role != "target" or not _whole(data.peek(indices[0], key)):
            continue
        seen = [data.peek(i, key) for i in indices]
        values = sorted({int(v) for v in seen if _whole(v)})
        if all(map(_whole, seen)) and 2 <= len(values) <= len(seen) // 4:
            return key, values
    return None


def reaches(metric: Metric, value: float, bar: float) -> bool:
    """Is `value` as good as `bar`?"""
    return value >= bar if metric.higher_is_better else value <= bar


def _whole(value: Any) -> bool:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    return isinstance(value, (bool, int)) or (isinstance(value, float) and value.is_integer())


@dataclass
class Retrained:
    """The same training on inputs that were permuted over the samples."""

    own: float
    """Loss of some training samples, with each sample's own input: the mean over the later half of the evaluations that both runs
    made (a net may start slowly)."""
    shuffled: float
    """The same with the inputs of others."""
    first: float
    """The same of the untrained model."""
    gap: float
    """How much better its held-out metric is with own inputs than with others': luck."""

    @classmethod
    def of(cls, own: Sequence[float], shuffled: Sequence[float], gap: float) -> "Retrained":
        """`own` begins with the untrained model."""
        n = max(1, min(len(own) - 1, len(shuffled)))
        late = n // 2
        return cls(statistics.mean(own[1 + late : n + 1]), statistics.mean(shuffled[late:n]), own[0], gap)

    @property
    def belongs(self) -> bool:
        """Are the samples' own inputs learnt clearly faster than those of others?"""
        saved, learnt = self.shuffled - self.own, self.first - self.shuffled
        return math.isfinite(self.own) and saved > max(FASTER * abs(self.first), (TIMES - 1) * learnt)

    def __str__(self) -> str:
        return f"mean loss {self.own:.3g}, {self.shuffled:.3g} on permuted inputs"
