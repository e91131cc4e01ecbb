"""Compares the data of training and of evaluations by a classifier that needs no training: the nearest other sample.

It tells faults of the data from faults of the model, also before the model has learnt anything. Scale and mean of inputs are not compared: a loop
may normalise what its data set does not.
"""

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from trainworthy.core.guard.measures.spaced import spaced

Fault = tuple[str, str]
MOST, READ = 1500, 600  # samples of training, of an evaluation
LEAST = 200
CLASSES = 100
SIDE = 16  # pixels to which pictures are pooled
WORDS = 4096
CLEAR = 0.25  # difference of two shares of right answers
SURE = 4.0  # standard errors


def sample(one: Any) -> tuple[Tensor, int] | None:
    """Return the input and the class of a sample that has one of each."""
    leaves = [torch.as_tensor(x) for x in tree_leaves(one) if isinstance(x, (Tensor, int)) or hasattr(x, "dtype")]
    inputs = [x for x in leaves if x.numel() > 3]
    targets = [x for x in leaves if x.numel() == 1]
    if len(leaves) != 2 or len(inputs) != 1 or len(targets) != 1 or targets[0].dtype != torch.int64:
        return None
    x = inputs[0].detach().cpu()
    if x.is_floating_point() and x.dim() == 3 and min(x.shape[1:]) > SIDE:
        x = F.adaptive_avg_pool2d(x, SIDE)
    if x.dtype == torch.int64 and (x.dim() > 1 or int(x.min()) < 0 or int(x.max()) >= WORDS):
        return None
    return x.float() if x.is_floating_point() else x, int(targets[0])


def read(data: Any, most: int, limit: float) -> tuple[Tensor, Tensor] | None:
    """Return inputs and classes of evenly spaced samples: numbers (N, ...), of texts the counts of their words."""
    found = spaced(data, most, limit, sample)
    inputs, classes = [x for x, _ in found], torch.tensor([y for _, y in found])
    if len(found) < LEAST or len({x.dtype for x in inputs}) > 1 or int(classes.min()) < 0:
        return None
    if not inputs[0].is_floating_point():
        inputs = [F.normalize(torch.bincount(x, minlength=WORDS).float().sqrt(), dim=0) for x in inputs]
    if len({x.shape for x in inputs}) > 1 or inputs[0].numel() > WORDS or not 2 <= len(classes.unique()) <= CLASSES:
        return None
    return torch.stack(inputs), classes


class Nearest:
    """Answers by the class of the nearest of some samples: entries in units of their spread, but texts as they are."""

    def __init__(self, x: Tensor, y: Tensor):
        self.mean, spread = x.mean(0), x.std(0)
        usual = spread.square().mean().sqrt()
        self.spread = usual if x.shape[1:] == (WORDS,) else torch.maximum(spread, 0.1 * usual).clamp_min(1e-12)
        self.x, self.y = self.scaled(x), y

    def scaled(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.spread).flatten(1)

    def answers(self, x: Tensor) -> Tensor:
        """Return the classes of new inputs."""
        return self.y[torch.cdist(self.scaled(x), self.x).argmin(1)]

    def right(self) -> float:
        """Return how often the nearest other sample has the same class."""
        nearest = torch.cdist(self.x, self.x).fill_diagonal_(float("inf")).argmin(1)
        return float((self.y[nearest] == self.y).float().mean())


def chance(y: Tensor) -> float:
    """Return the share of right answers that guessing can reach, and as much above it as is no evidence."""
    share = float((y.bincount() / len(y)).max())
    return share + SURE * (share * (1 - share) / len(y)) ** 0.5


def changes(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield pictures as they would be if their channels or axes had not been exchanged."""
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


def numbered(truth: Tensor, answer: Tensor, classes: int) -> tuple[float, int]:
    """Return how often answers are right with the numbering of classes that fits every other sample best, on the remaining ones, and how many
    classes it moves; (0, 0) where it gives two classes one number."""
    first = torch.arange(len(truth)) % 2 == 0
    table = torch.bincount(truth[first] * classes + answer[first], minlength=classes**2).view(classes, classes)
    known, names = table.sum(1) >= 3, table.argmax(1)
    if len(names[known].unique()) < int(known.sum()) or int(known.sum()) < 2:
        return 0.0, 0
    held = ~first & known[truth]
    return float((names[truth[held]] == answer[held]).float().mean()), int(
        (names != torch.arange(classes))[known].sum()
    )


def check(train: Any, others: list[Any], limit: float) -> Fault | None:
    """Return what is wrong with the classes or the inputs of training or of one of the evaluations."""
    mine = read(train, MOST, limit) if others else None
    if mine is None:
        return None
    model = Nearest(*mine)
    own = model.right()
    for data in others:
        theirs = read(data, READ, limit)
        if theirs is None or theirs[0].shape[1:] != mine[0].shape[1:]:
            continue
        if found := compared(model, own, mine, theirs):
            return found
    return None


def compared(model: Nearest, own: float, mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> Fault | None:
    """`own`: how often the nearest training sample of a training sample has its class."""
    (x, y), among = theirs, Nearest(*theirs).right()
    answer = model.answers(x)
    got = float((answer == y).float().mean())
    told = (
        f"the nearest other sample has the same class for {own:.0%} of {len(mine[1])} training samples and {among:.0%} of {len(y)} of the "
        f"evaluation, the nearest training sample for {got:.0%} of the evaluation"
    )
    for share, other, labels, of in ((own, among, mine[1], "training"), (among, own, y, "the evaluation")):
        if share < chance(labels) < other - CLEAR and got < chance(y):
            return (
                told,
                f"the classes of {of} are not those of its samples: one of the two was sorted or shuffled alone",
            )
    least = min(own, among)
    if got > least - CLEAR or least < max(chance(y), chance(mine[1])):
        return None
    new, moved = numbered(y, answer, int(max(y.max(), answer.max())) + 1)
    if moved > 1 and new > max(got + CLEAR, 0.8 * least):
        return (
            f"{told}; with {moved} classes numbered otherwise {new:.0%}",
            "training and evaluation number their classes differently: use one mapping from names to numbers for both",
        )
    best, how = max(((float((model.answers(v) == y).float().mean()), k) for k, v in changes(x)), default=(0.0, ""))
    if best > max(got + CLEAR, 0.8 * least):
        return (
            f"{told}; {how}, {best:.0%}",
            f"the evaluation's inputs are prepared otherwise than training's: they fit training {how}",
        )
    return None
