"""Finds training labels that contradict their neighbours where held-out labels do not: a table of labels that lost a row, labels of one
annotator, a noisy source.

Each sample's label is compared with those of its nearest training samples, where these agree. Held-out samples with the same labels
contradict them as often. No model is trained.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from trainworthy.core.data.inventory import Scan
from trainworthy.core.recipe.stage import Data, categorical

NEAREST = 10  # training samples that vote
WINNER, OTHER = 0.5, 0.2  # share of the votes that the most frequent class must have, and that the next one may have
LEAST = 10  # samples of a class with a clear vote, in either split
COVERED = 0.4  # share of either split's samples that must have a clear vote
OFTEN, RARE = 0.15, 0.1  # share of contradicted labels: in training at least, in the held-out data at most
TIMES = 3  # and by so much more often in training
SURE = 5.0  # standard errors between the two


@dataclass
class Contradicted:
    """Labels against which the nearest training samples vote."""

    target: str
    training: float
    """Share of the training labels, as a mean over classes."""
    held_out: float
    of: tuple[int, int]
    """Samples with a clear vote."""

    def words(self) -> str:
        return (f"{self.training:.0%} of the training labels '{self.target}' contradict the training samples that are most like theirs, of the "
                f"held-out ones {self.held_out:.1%} ({self.of[0]:,} and {self.of[1]:,} samples whose nearest {NEAREST} clearly agree)")  # fmt: skip


CAUSE = (
    "training labels belong to other samples, although held-out labels do not: a table of labels that lost a row, or was joined or sorted "
    "otherwise, or wrong labels of one source"
)


def contradicted(scans: dict[str, Scan], data: Data) -> Contradicted | None:
    """Return how often labels contradict their neighbours if they do so in training alone. `data`: the training set."""
    train, val, target = scans["train"], scans["val"], categorical(data)
    if target is None:
        return None
    n, labels = len(data.fields[target].classes or ()), (_labels(train, target), _labels(val, target))
    if n < 3 or labels[0] is None or labels[1] is None or train.contents.shape[1] != val.contents.shape[1]:
        return None
    own, other = (_votes(s.contents, train.contents, labels[0], n, same=s is train) for s in (train, val))
    found = [_rates(vote, y, n) for vote, y in zip((own, other), labels, strict=True)]
    of = tuple(int(clear.sum()) for clear, _, _ in found)
    if any(k < COVERED * len(y) for k, y in zip(of, labels, strict=True)):
        return None
    both = (found[0][1] >= LEAST) & (found[1][1] >= LEAST)
    if not both.any():
        return None
    a, b = (found[i][2][both] / found[i][1][both] for i in (0, 1))
    training, held_out = a.mean().item(), b.mean().item()
    spread = [(p * (1 - p) + 1 / k).div(k).sum().item() for p, k in ((a, found[0][1][both]), (b, found[1][1][both]))]
    error = math.sqrt(sum(spread)) / len(a)
    if training < max(OFTEN, TIMES * held_out) or held_out > RARE or training - held_out < SURE * error:
        return None
    return Contradicted(target, training, held_out, of)


def _labels(scan: Scan, target: str) -> Tensor | None:
    known = scan.targets.get(target)
    if scan.contents is None or not known or len(scan.kept) < NEAREST * LEAST:
        return None
    found = [known[i] for i in scan.kept]
    return torch.tensor(found) if all(isinstance(y, int) and y >= 0 for y in found) else None


def _votes(samples: Tensor, known: Tensor, labels: Tensor, n: int, *, same: bool) -> Tensor:
    """Return the share of each class among the nearest training samples, (N, n). `same`: a sample does not vote for itself."""
    alike = samples @ known.T
    if same:
        alike.fill_diagonal_(-2.0)
    near = labels[alike.topk(NEAREST, dim=1).indices]
    return torch.nn.functional.one_hot(near, n).float().mean(1)


def _rates(votes: Tensor, labels: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (which samples have a clear vote, their number for each class, how many of them contradict their label)."""
    first, second = votes.topk(2, dim=1).values.unbind(1)
    clear = (first >= WINNER) & (second <= OTHER)
    wrong = clear & (votes.argmax(1) != labels)
    count = lambda mask: labels[mask].bincount(minlength=n)[:n].double()  # noqa: E731
    return clear, count(clear), count(wrong)
