"""Checks that training and evaluation read the same data: by content (each channel against its own), by the class names
of the sources, by performance (the same samples scored through both paths), and by confusions between held-out
classes."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.monitoring.monitors import verdict
from trainworthy.core.recipe.stage import Data, Stage, View, categorical

if TYPE_CHECKING:
    from trainworthy.core.base.verdict import Verdict

CHANNELS = 4  # more channels are no colours, and have too many permutations
SURE = 5.0  # standard errors by which another channel order must fit better
BEHIND, QUARTERS = 0.1, 4  # fraction of the range from chance to the ceiling; parts whose spread estimates the noise
# Standard errors: held-out fit after relabelling, training fit without it; evaluate more samples from here
CLEAR, FITS, DOUBT = (4.0, 2.0, 2.0)
MOST = 1000  # samples per split
SAME = ("classes", "C7", "class names mean the same in training and held-out data")


# ----------------------------------------------------------------------------------------------------------------- content
def exchanged_channels(drawn: Tensor, plain: Tensor) -> tuple[int, ...] | None:
    """Return the channel order in which the training path (N, C, ...) matches the evaluation path, if an order other
    than the identity fits clearly better. It compares each channel's mean per sample, which augmentation changes less
    than samples differ."""
    if drawn.ndim < 3 or drawn.shape[1] != plain.shape[1] or not 2 <= drawn.shape[1] <= CHANNELS:
        return None
    a, b = (to_double(x).flatten(2).mean(2) for x in (drawn, plain))  # (N, C)
    a, b = (x - x.mean(1, keepdim=True) for x in (a, b))  # brightness is the same in every order
    own = (a - b).square().sum(1)  # (N,)
    for order in list(permutations(range(a.shape[1])))[1:]:
        other = (a[:, order] - b).square().sum(1)
        gain = own - other
        error = gain.std() / math.sqrt(len(gain))
        if other.mean() < 0.5 * own.mean() and gain.mean() > SURE * error:
            return order
    return None


def differently_named(stage: Stage) -> list[str]:
    """Return classes whose source (a folder) has another id in another split, and class lists that differ."""
    wrong: list[str] = []
    known: dict[str, tuple[int, str]] = {}
    listed: tuple[list[str], str] | None = None
    for split, data in stage.data.items():
        key = categorical(data)
        if key is None:
            continue
        classes = list(map(str, data.fields[key].classes))
        if listed and listed[0] != classes:
            wrong.append(
                f"{split} lists its classes differently from {listed[1]}: {_shorten(classes)} and {_shorten(listed[0])}"
            )
        listed = listed or (classes, split)
        ids: dict[str, Counter] = {}
        for i in data.representative(min(MOST, len(data))):
            name = data.source_class(i)
            if name is None:
                break
            ids.setdefault(name, Counter())[int(data.peek(i, key))] += 1
        for name, found in ids.items():
            label = found.most_common(1)[0][0]
            before, where = known.setdefault(name, (label, split))
            if before != label:
                wrong.append(f"samples of folder '{name}' have class {before} in {where} and class {label} in {split}")
    return wrong


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


# -------------------------------------------------------------------------------------------------------------- performance
def compare_scores(run: Run, stage: Stage, indices: list[int], evaluated: float) -> str:
    """Return a message if the evaluation path scores the training samples `indices` clearly worse (`evaluated`) than
    the augmented training path; else empty."""
    metric, seed = stage.gate_evaluator.metric, run.cfg.run.seed
    sign, span = (1 if metric.higher_is_better else -1), abs(metric.ceiling - metric.floor)
    data, name = stage.data["train"], stage.gate_evaluator.metric.name

    def scored(some: list[int], draws: int | None) -> float:
        return run.measure(stage, View(data, some, draws=draws), probe=True)[name]

    drawn = scored(indices, seed)
    if not sign * (drawn - evaluated) > BEHIND * span:
        return ""
    parts = [indices[i::QUARTERS] for i in range(QUARTERS)]
    gaps = torch.tensor([sign * (scored(p, seed) - scored(p, None)) for p in parts], dtype=torch.float64)
    if gaps.min() <= 0 or gaps.mean() < 3 * gaps.std() / math.sqrt(QUARTERS):
        return ""
    return f"{name} {drawn:.3f} on the training samples as training reads them, {evaluated:.3f} as evaluation does"


# ----------------------------------------------------------------------------------------------------------------- classes
@dataclass
class Exchange:
    """A cycle of held-out classes that are predicted as each other, while training samples are not."""

    classes: list[int]
    held_out: float
    """Standard errors by which held-out samples fit better after the relabelling."""
    training: float
    """Standard errors by which training samples fit better without it."""

    @property
    def sure(self) -> bool:
        return self.held_out > CLEAR and self.training > FITS

    def words(self, names: Sequence[str]) -> str:
        following = [*self.classes[1:], self.classes[0]]
        pairs = ", ".join(f"{names[a]} for {names[b]}" for a, b in zip(self.classes, following, strict=True))
        return (f"held-out classes are taken for each other ({pairs}: {self.held_out:.1f} standard errors better after a "
                f"relabelling), training samples are not ({self.training:.1f} better without it)")  # fmt: skip


def exchanges(training: Tensor, held_out: Tensor) -> list[Exchange]:
    """From two tables (n, n) of samples, true classes in rows: cycles of classes, each mostly predicted as the next."""
    n = len(held_out)
    following = [int(row.argmax()) if row.sum() else i for i, row in enumerate(held_out)]
    found, seen = [], set()
    for first in range(n):
        walk = []
        at = first
        while at not in seen:
            seen.add(at)
            walk.append(at)
            at = following[at]
        circle = walk[walk.index(at) :] if at in walk else []
        if len(circle) > 1:
            found.append(Exchange(circle, _gain(held_out, circle), -_gain(training, circle)))
    return found


def _gain(table: Tensor, circle: list[int]) -> float:
    """Return by how many standard errors a table fits better if each class of the cycle gets the next one's name."""
    own = sum(float(table[c, c]) for c in circle)
    other = sum(float(table[a, b]) for a, b in zip(circle, [*circle[1:], circle[0]], strict=True))
    return (other - own) / math.sqrt(max(own + other, 1.0))


def confused(run: Run, stage: Stage, data: Data) -> Tensor:
    """`stage.confusion` (n, n), scaled to samples: pixels of one image are not independent."""
    with evaluating(stage.eval_model), run.autocast():
        table = to_double(stage.confusion(stage.eval_model, data))
    return table * min(1.0, len(data) / float(table.sum().clamp_min(1)))


def find_exchanges(
    run: Run, stage: Stage, learn: list[int] | None = None, held_out: list[int] | None = None
) -> list[Exchange]:
    """Return exchanges among up to `MOST` samples of each split, or among the given ones."""
    if stage.confusion is None or "train" not in stage.data:
        return []
    train, val = stage.data["train"], stage.data["val"]
    learn = list(train.representative(min(MOST, len(train)))) if learn is None else learn
    held_out = list(val.representative(min(MOST, len(val)))) if held_out is None else held_out
    tables = [confused(run, stage, View(d, i)) for d, i in ((train, learn), (val, held_out))]
    return exchanges(*tables)


def names_of(stage: Stage, n: int) -> Sequence[str]:
    key = categorical(stage.data["val"])
    return stage.data["val"].fields[key].classes if key else [str(i) for i in range(n)]


def check_classes(run: Run, stage: Stage) -> "Verdict | None":
    """Return the verdict of the monitor `classes` for the current weights; None if the stage has no confusion table."""
    if stage.confusion is None or "train" not in stage.data:
        return None
    found = [e for e in find_exchanges(run, stage) if e.sure]
    names = names_of(stage, 1 + max((c for e in found for c in e.classes), default=0))
    needed = f"no relabelling that fits held-out samples better by {CLEAR:g} standard errors and training samples worse by {FITS:g}"
    if not found:
        return verdict(SAME, "pass", "no two held-out classes have exchanged names", needed)
    return verdict(
        SAME, "fail", "; ".join(e.words(names) for e in found), needed, REMEDY, exchanged=[e.classes for e in found]
    )


REMEDY = (
    "class ids mean other classes in the held-out split: ids built for each split (a sorted list of what occurs there), "
    "or labels changed in one split only"
)
