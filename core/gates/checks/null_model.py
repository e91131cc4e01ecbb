"""Null model of tiny-data: the held-out score of a model that was trained on other samples' inputs.

A model trained on shuffled labels gives similar samples the same answer, so each group of similar samples is right or
wrong as a whole. With ten such groups it reaches 20% or more by luck in one draw of four. Therefore the null is
measured over relabellings of whole classes and, if there are too few classes, by a second training on permuted inputs.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor
from trainworthy.core.recipe.stage import Data, Metric, View

MANY = 7  # classes whose relabellings are a null distribution. Of n classes 1 +- 1 keep their place in a random relabelling, so a right
# model scores a/n +- a/n with permuted classes: three of these are 0.6 of its accuracy a for five classes, 0.43 for seven
CLEAR = 0.3  # fraction of the range from chance to the ceiling: a continuous target predicted this well needs no second training
FASTER = 0.05  # fraction of the first loss: mean advantage of right labels over shuffled ones in the later half, and
TIMES = 1.5  # factor over the progress on shuffled labels (between two shuffles: up to 1.3, measured)


def distinct(data: Data, indices: Sequence[int]) -> tuple[str, list[int]] | None:
    """Return (name, values) of the first target that takes only a few whole numbers in these samples, declared or
    not."""
    for key, entry in data.fields.items():
        if entry.role != "target" or not _whole(data.peek(indices[0], key)):
            continue
        seen = [data.peek(i, key) for i in indices]
        values = sorted({int(v) for v in seen if _whole(v)})
        if all(map(_whole, seen)) and 2 <= len(values) <= len(seen) // 4:
            return key, values
    return None


def reaches(metric: Metric, value: float, bar: float) -> bool:
    """Return whether `value` is as good as `bar`."""
    return value >= bar if metric.higher_is_better else value <= bar


def known_by_size(metric: Metric, own: float, without_input: float, blank: View) -> bool:
    """Return whether blank inputs differ in length, and no more is answered from them than samples have different lengths."""
    samples = [blank.get(i, None) for i in range(len(blank))]
    shapes = {tuple(tuple(getattr(one[k], "shape", ())) for k in blank.blank) for one in samples}
    share = len(shapes) / len(samples)
    return len(shapes) > 1 and (
        share == 1 or not metric.better(without_input, metric.floor + share * (own - metric.floor))
    )


def _whole(value: Any) -> bool:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    return isinstance(value, (bool, int)) or (isinstance(value, float) and value.is_integer())


@dataclass
class Retrained:
    """The same training on inputs that were permuted over the samples."""

    own: float
    """Loss of some training samples with their own inputs: the mean over the later half of the evaluations that both
    runs made, because a model may start slowly."""
    shuffled: float
    """The same with other samples' inputs."""
    first: float
    """The same for the untrained model."""
    gap: float
    """How much better the held-out metric is with a sample's own input than with another's: the part due to luck."""

    @classmethod
    def of(cls, own: Sequence[float], shuffled: Sequence[float], gap: float) -> "Retrained":
        """`own` begins with the untrained model."""
        n = max(1, min(len(own) - 1, len(shuffled)))
        late = n // 2
        return cls(statistics.mean(own[1 + late : n + 1]), statistics.mean(shuffled[late:n]), own[0], gap)

    @property
    def belongs(self) -> bool:
        """Return whether the samples' own inputs are learnt clearly faster than others' inputs."""
        saved, learnt = self.shuffled - self.own, self.first - self.shuffled
        return math.isfinite(self.own) and saved > max(FASTER * abs(self.first), (TIMES - 1) * learnt)

    def __str__(self) -> str:
        return f"mean loss {self.own:.3g}, {self.shuffled:.3g} on permuted inputs"


def late_gain(curve: list[float], metric: Metric) -> tuple[float, float]:
    """(improvement between the halves of the last third of the evaluations, what a plateau allows: the noise, or a
    tenth of the total gain; a linear climb gives a sixth). The noise is estimated from differences of neighbours, which
    a trend hardly changes."""
    last = curve[-(len(curve) // 3) :]
    half = len(last) // 2
    late = statistics.mean(last[-half:])
    gain = late - statistics.mean(last[:half])
    noise = statistics.pstdev(b - a for a, b in pairwise(last)) / math.sqrt(2)
    allowed = max(3 * noise * math.sqrt(2 / half), 0.1 * abs(late - metric.floor))
    return gain if metric.higher_is_better else -gain, allowed
