"""Finds faults of the data by nearest neighbours: each sample is answered with the target of the nearest other sample.

It tells faults of the data from faults of the model, also before the model has learnt anything. Scale and mean of inputs are not compared: a loop
may normalise what its data set does not.
"""

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.core.base.correlation import pearson
from trainworthy.core.base.verdict import Fault
from trainworthy.core.data.alike import nearest
from trainworthy.guard.measures.data import class_numbers
from trainworthy.guard.measures.data.spaced import as_tensors, spaced

MOST, READ = 1500, 600  # most samples that are read of training, of an evaluation
LEAST = 200
CLASSES = 100
SIDE = 16  # pixels to which pictures are pooled
WORDS = 4096
CLEAR = 0.25  # least difference between two shares of right answers
SURE = 4.0  # standard errors above guessing that are evidence
COLUMNS = 128
GOOD = 0.7  # least share of right answers at which two classes that are confused are exchanged, and not only alike
UNSEEN = 0.3  # least share of an evaluation's samples whose class is not in training


def sample(one: Any) -> tuple[Tensor, Tensor] | None:
    """Return the input and the target (a class or a number) of a sample that has one of each. A text becomes counts of its words."""
    leaves = as_tensors(one)
    if len(leaves) != 2 or leaves[0].numel() < 4 or leaves[1].numel() != 1:
        return None
    x, y = leaves[0], leaves[1].flatten()[0]
    if x.dim() == 3 and min(x.shape[1:]) > SIDE:
        x = F.adaptive_avg_pool2d(x.float(), SIDE)
    if x.dtype == torch.int64 and x.dim() == 1:
        if int(x.min()) < 0 or int(x.max()) >= WORDS:
            return None
        x = F.normalize(torch.bincount(x, minlength=WORDS).float().sqrt(), dim=0)
    return x.float(), y.float() if y.is_floating_point() else y.long()


def read(data: Any, most: int, limit: float) -> tuple[Tensor, Tensor] | None:
    """Return inputs (N, ...) and targets (N,) of evenly spaced samples."""
    found = spaced(data, most, limit, sample)
    if len(found) < LEAST or len({(x.shape, y.dtype) for x, y in found}) > 1 or found[0][0].numel() > WORDS:
        return None
    x, y = (torch.stack(v) for v in zip(*found, strict=True))
    varied = len(y.unique())
    fits = varied > CLASSES if y.is_floating_point() else 2 <= varied <= CLASSES and int(y.min()) >= 0
    return (x, y) if fits else None


class Nearest:
    """A nearest-neighbour classifier. Entries are divided by their standard deviation, except those of texts."""

    def __init__(self, x: Tensor, y: Tensor):
        self.mean, spread = x.mean(0), x.std(0)
        usual = spread.square().mean().sqrt()
        self.spread = usual if x.shape[1:] == (WORDS,) else torch.maximum(spread, 0.1 * usual).clamp_min(1e-12)
        self.x, self.y = self.scaled(x), y

    def scaled(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.spread).flatten(1)

    def answers(self, x: Tensor) -> Tensor:
        """Return the targets of new inputs."""
        return self.y[nearest(-torch.cdist(self.scaled(x), self.x))]

    def right(self) -> float:
        """Return the score of leave-one-out answers."""
        return score(self.y[nearest(-torch.cdist(self.x, self.x), own=True)], self.y)


def score(answer: Tensor, y: Tensor) -> float:
    """Return the share of right classes, or the correlation with the numbers."""
    return pearson(answer, y) if y.is_floating_point() else float((answer == y).float().mean())


def chance(y: Tensor) -> float:
    """Return the score of guessing plus a margin for chance."""
    if y.is_floating_point():
        return SURE / len(y) ** 0.5
    share = float((y.bincount() / len(y)).max())
    return share + SURE * (share * (1 - share) / len(y)) ** 0.5


def changes(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the pictures with exchanged channels, turned and flipped."""
    if x.dim() < 4:
        return
    if x.shape[1] == 3:
        for order in list(permutations(range(3)))[1:]:
            yield f"with their channels in the order {order}", x[:, list(order)]
    yield from (("upside down", x.flip(2)), ("mirrored", x.flip(3)), ("turned by 180 degrees", x.flip(2, 3)))
    if x.shape[2] == x.shape[3]:
        over = x.transpose(2, 3)
        yield from (
            ("transposed", over),
            ("turned by 90 degrees", over.flip(2)),
            ("turned by 270 degrees", over.flip(3)),
        )


def reordered(mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield a table whose columns are reordered so that each relates to the target as in training."""
    if mine[0].dim() != 2 or mine[0].shape[1] > COLUMNS:
        return

    def related(x: Tensor, y: Tensor) -> Tensor:
        """(columns, targets or classes): how each column goes with them."""
        goals = y[:, None] if y.is_floating_point() else F.one_hot(y, int(mine[1].max()) + 1).float()
        x, goals = (v - v.mean(0) for v in (x, goals))
        return (x / x.std(0).clamp_min(1e-12)).T @ goals / len(x)

    if not theirs[1].is_floating_point() and int(theirs[1].max()) > int(mine[1].max()):
        return
    known = related(*mine)
    distances = torch.cdist(known / known.std(), related(*theirs) / known.std())
    order = torch.zeros(len(distances), dtype=torch.long)
    for _ in range(len(distances)):  # the most alike first
        a, b = divmod(int(distances.argmin()), len(distances))
        order[a] = b
        distances[a], distances[:, b] = float("inf"), float("inf")
    if moved := int((order != torch.arange(len(order))).sum()):
        yield f"with {moved} of {len(order)} columns in another order", theirs[0][:, order]


def check(train: Any, others: list[Any], limit: float, outputs: int = 0) -> Fault | None:
    """Return what is wrong with the targets or the inputs of training or of one of the evaluations. `outputs`: classes that the training loss
    scores; 0 where it scores none (a metric, a ranking)."""
    mine = read(train, MOST, limit) if others else None
    if mine is None:
        return None
    model = Nearest(*mine)
    own = model.right()
    for data in others:
        theirs = read(data, READ, limit)
        if theirs is None or theirs[0].shape[1:] != mine[0].shape[1:] or theirs[1].dtype != mine[1].dtype:
            continue
        if found := compared(model, own, mine, theirs, outputs):
            return found
    return None


def cut_by_class(mine: Tensor, theirs: Tensor, outputs: int) -> bool:
    """Return whether rows sorted by class were split at one place: all classes of one part come before those of the other. The model must have
    outputs for the other part's classes; otherwise they are new on purpose (metric learning), or trained on later."""
    apart = int(mine.max()) <= int(theirs.min()) or int(theirs.max()) <= int(mine.min())
    unseen = float((~torch.isin(theirs, mine)).float().mean())
    return unseen > UNSEEN and apart and int(theirs.max()) < outputs


def compared(
    model: Nearest, own: float, mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], outputs: int
) -> Fault | None:
    """`own`: how well the nearest other training sample answers a training sample."""
    (x, y), among = theirs, Nearest(*theirs).right()
    answer = model.answers(x)
    got = score(answer, y)
    kind = "correlation with the target" if y.is_floating_point() else "right classes"
    measured = (
        f"{kind} if the target of the nearest other sample is taken: {own:.2f} among {len(mine[1])} training samples, "
        f"{among:.2f} among {len(y)} of the evaluation, {got:.2f} from training to evaluation"
    )
    for share, other, labels, of in ((own, among, mine[1], "training"), (among, own, y, "the evaluation")):
        if share < chance(labels) < other - CLEAR and got < chance(y):
            return (
                measured,
                f"the targets of {of} are not those of its samples: one of the two was sorted or shuffled alone",
            )
    least = min(own, among)
    if not y.is_floating_point() and float((unseen := ~torch.isin(y, mine[1])).float().mean()) > UNSEEN:
        if cut_by_class(mine[1], y, outputs):
            return (
                f"{int(unseen.sum())} of {len(y)} samples of the evaluation are of classes that none of {len(mine[1])} training samples has",
                "the rows were in the order of their classes when they were split: shuffle them first",
            )
        return None
    new = None if y.is_floating_point() else class_numbers.numbering(y, answer)
    if new and new.moved > 1 and ((new.exchanged and least > GOOD) or new.right > max(got + CLEAR, 0.8 * least)):
        return f"{measured}; {new.right:.2f} with {new.moved} classes numbered differently", class_numbers.CAUSE
    if got > least - CLEAR or least < max(chance(y), chance(mine[1])):
        return None
    if y.is_floating_point() and got < -max(0.6 * least, chance(y)):
        return measured, "the targets of training and evaluation have opposite signs"
    changed = [*changes(x), *reordered(mine, theirs)]
    best, how = max(((score(model.answers(v), y), k) for k, v in changed), default=(0.0, ""))
    if best > max(got + CLEAR, 0.8 * least):
        return (
            f"{measured}; {best:.2f} {how}",
            f"the evaluation's inputs are prepared differently from training's: they fit training {how}",
        )
    return None
