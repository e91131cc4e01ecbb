"""Finds training labels that contradict their neighbours where held-out labels do not: a table of labels that lost a row, labels of one
annotator, a noisy source. Wrong labels that are scattered over the rows are noise: that is reported, and is no fault.

Each sample's label is compared with those of its nearest training samples, where these agree. Held-out samples with the same labels
contradict them as often. No model is trained.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.data.alike import nearest
from trainworthy.core.data.inventory import Scan
from trainworthy.core.recipe.stage import Data, categorical

ROWS = 4000  # samples of a split that are compared, each with each
NEAREST = 10  # training samples that vote
WINNER, OTHER = 0.5, 0.2  # share of the votes that the most frequent class must have, and that the next one may have
LEAST = 10  # samples of a class with a clear vote, in either split
COVERED = 0.4  # share of either split's samples that must have a clear vote
OFTEN, RARE = 0.15, 0.1  # share of contradicted labels: in training at least, in the held-out data at most
TIMES = 3  # and by so much more often in training
SURE = 5.0  # standard errors between the two
# How much likelier than by chance, of what is possible, a label must be among the nearest samples of one split, and the most of that
# excess which the other split may have left
RELATED, LOST = 0.25, 0.15
PAIRED = 100  # samples of a split whose class has another one there
HALF = 0.5  # the same, where a training has failed already
FARTHER = 1.5  # times the other split's distance to the nearest samples; beyond, the splits are not compared


@dataclass
class Contradicted:
    """Labels against which the nearest training samples vote."""

    target: str
    training: float
    """Share of the training labels, as a mean over classes."""
    held_out: float
    of: tuple[int, int]
    """Samples with a clear vote."""
    scattered: bool = False
    """Whether a contradicted label says nothing about that of the next row: noise."""

    def words(self) -> str:
        noise = "scattered over the rows, as noise is: " * self.scattered
        named = f"training labels '{self.target}' contradict the training samples that are most like theirs"
        return (f"{noise}{self.training:.0%} of the {named}, of the held-out ones {self.held_out:.1%} ({self.of[0]:,} and {self.of[1]:,} samples "
                f"whose nearest {NEAREST} clearly agree)")  # fmt: skip


CAUSE = (
    "training labels belong to other samples, although held-out labels do not: a table of labels that lost a row, or was joined or sorted "
    "otherwise, or wrong labels of one source"
)


def contradicted(scans: dict[str, Scan], data: Data) -> Contradicted | None:
    """Return how often labels contradict their neighbours if they do so in training alone. `data`: the training set."""
    train, val, target = scans["train"], scans["val"], categorical(data)
    if target is None:
        return None
    n = len(data.fields[target].classes or ())
    ours, theirs = _labelled(train, target, n), _labelled(val, target, n)
    if n < 3 or ours is None or theirs is None or ours[0].shape[1] != theirs[0].shape[1]:
        return None
    (a, y), (b, truth) = ours, theirs
    votes_a = _votes(a, a, y, n, same=True)
    clear, votes, wrong = _rates(votes_a, y, n)
    clear_b, votes_b, wrong_b = _rates(_votes(b, a, y, n, same=False), truth, n)
    of = int(clear.sum()), int(clear_b.sum())
    both = (votes >= LEAST) & (votes_b >= LEAST)
    if of[0] < COVERED * len(y) or of[1] < COVERED * len(truth) or not both.any():
        return None
    shares, spread = [], 0.0
    for voted, against in ((votes[both], wrong[both]), (votes_b[both], wrong_b[both])):
        share = against / voted
        spread += ((share * (1 - share) + 1 / voted) / voted).sum().item()
        shares.append(share.mean().item())
    training, held_out = shares
    sure = SURE * math.sqrt(spread) / int(both.sum())
    if training < max(OFTEN, TIMES * held_out) or held_out > RARE or training - held_out < sure:
        return None
    return Contradicted(target, training, held_out, of, scattered(clear, votes_a.argmax(1), y))


def scattered(clear: Tensor, voted: Tensor, labels: Tensor) -> bool:
    """Return whether contradicted labels are independent from one row to the next, compared with others of the class that the vote has: rows
    may be in the order of their classes, and some classes are harder than others."""
    wrong, kind = (voted != labels)[clear].double(), voted[clear]
    seen = kind.bincount().clamp_min(1)
    left = wrong - (torch.zeros_like(seen, dtype=wrong.dtype).index_add_(0, kind, wrong) / seen)[kind]
    beside = (left[1:] * left[:-1]).sum() / left.square().sum().clamp_min(1e-12)  # correlation of neighbours
    return bool(beside * math.sqrt(len(left)) < SURE)


def relation(scans: dict[str, Scan], data: Data) -> dict[str, dict[str, float]] | None:
    """Return for `train` and `val` how often a sample's nearest samples of the same split have its label, of as many as its class has
    (`own`), how often they would in any order (`chance`), the standard error of the first, and the mean distance of these samples (`far`,
    1 minus the cosine). None if hardly a class has two samples in a split."""
    target = categorical(data)
    n = len(data.fields[target].classes or ()) if target else 0
    out: dict[str, dict[str, float]] = {}
    for name in ("train", "val"):
        if target is None or n < 2 or (found := _labelled(scans[name], target, n)) is None:
            return None
        samples, labels = found
        others = labels.bincount(minlength=n)[labels] - 1
        possible = others.clamp(max=NEAREST).double() / NEAREST
        closeness = samples @ samples.T
        near = nearest(closeness, NEAREST, own=True)
        own = ((labels[near] == labels[:, None]).float().mean(1) / possible)[others > 0]
        if len(own) < PAIRED:
            return None
        chance = (labels.bincount(minlength=n).double() / len(labels)).square().sum().item()
        far = 1 - closeness.gather(1, near).mean().item()
        out[name] = {
            "own": own.mean().item(),
            "chance": chance,
            "error": own.std().item() / math.sqrt(len(own)),
            "far": far,
        }
    return out


def lost(report: dict[str, Any], most: float) -> tuple[str, str]:
    """Return (what was measured, the cause) of labels that are hardly likelier among the nearest samples of a split than anywhere, with at
    most a share of `most` of the excess that the other split has; empty texts if there are none. Labels that are wrong at random in half
    of the rows, on purpose, keep a quarter of that excess."""
    for name, other in (("train", "val"), ("val", "train")) if report.get("label_relation") else ():
        here, there = (report["label_relation"][k] for k in (name, other))
        usual = there["own"] - there["chance"]
        if here["far"] > FARTHER * there["far"]:
            continue  # bursts of one scene are near each other in one split alone
        if (
            usual >= RELATED * (1 - there["chance"])
            and here["own"] - here["chance"] + SURE * here["error"] <= most * usual
        ):
            return (
                f"{name}: the samples most like a sample have its label in {here['own']:.1%}, by chance {here['chance']:.1%}; in {other} "
                f"in {there['own']:.0%}",
                f"labels of {name} are not those of its samples: one of the two was sorted, shuffled, filtered or joined without the other",
            )
    return "", ""


def weaker(report: dict[str, Any]) -> str:
    """Return that labels of one split have lost most of their relation to the samples, for a training that has already failed; else ""."""
    measured, cause = lost(report, HALF)
    return f"{cause} ({measured})" if cause else ""


def faults(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (fault, cause) of what a data report has of labels and their neighbours."""
    if (fault := lost(report, LOST))[0]:
        yield fault
    elif (found := report.get("contradicted_labels")) and not found["scattered"]:
        yield Contradicted(**found).words(), CAUSE


def _labelled(scan: Scan, target: str, n: int) -> tuple[Tensor, Tensor] | None:
    """Return the content (N, D) and the labels (N,) of at most `ROWS` evenly spaced samples."""
    known = scan.targets.get(target)
    if scan.contents is None or not known or len(scan.kept) < NEAREST * LEAST:
        return None
    rows = list(range(0, len(scan.kept), -(-len(scan.kept) // ROWS)))
    found = [known[scan.kept[r]] for r in rows]
    fits = all(isinstance(y, int) and 0 <= y < n for y in found)
    return (scan.contents[rows], torch.tensor(found)) if fits else None


def _votes(samples: Tensor, known: Tensor, labels: Tensor, n: int, *, same: bool) -> Tensor:
    """Return the share of each class among the nearest training samples, (N, n). `same`: a sample does not vote for itself."""
    near = labels[nearest(samples @ known.T, NEAREST, own=same)]
    return torch.nn.functional.one_hot(near, n).float().mean(1)


def _rates(votes: Tensor, labels: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (which samples have a clear vote, their number for each class, how many of them contradict their label)."""
    first, second = votes.topk(2, dim=1).values.unbind(1)
    clear = (first >= WINNER) & (second <= OTHER)
    wrong = clear & (votes.argmax(1) != labels)
    count = lambda mask: labels[mask].bincount(minlength=n)[:n].double()  # noqa: E731
    return clear, count(clear), count(wrong)
