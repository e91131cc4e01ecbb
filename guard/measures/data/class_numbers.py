"""Finds the numbering of classes with which answers fit their truth best."""

from dataclasses import dataclass

import torch
from torch import Tensor

CAUSE = "training and evaluation number their classes differently: use one mapping from names to numbers for both"
LEAST = 3  # answers for a class whose number is looked for
SEEN = 20  # samples of the classes that are moved
WRONG, RIGHT = 0.3, 0.7  # their share of right answers as it is at most, and with the other numbers at least


@dataclass
class Numbering:
    """Another numbering of classes, found on every other sample and tried on the remaining ones."""

    as_it_is: float
    """Share of right answers without it."""
    right: float
    moved: int
    """Classes that get another number."""
    count: int
    samples: int
    exchanged: bool
    """The classes that are moved are nearly all wrong as it is, and right with their new numbers, however few they are."""


def numbering(truth: Tensor, answer: Tensor) -> Numbering | None:
    """Return the numbering that is most often right; None where it gives two classes one number."""
    classes = int(max(truth.max(), answer.max())) + 1
    first = torch.arange(len(truth)) % 2 == 0
    table = torch.bincount(truth[first] * classes + answer[first], minlength=classes**2).view(classes, classes)
    known, names = table.sum(1) >= LEAST, table.argmax(1)
    count = int(known.sum())
    if len(names[known].unique()) < count:
        return None
    held = ~first & known[truth]
    as_it_is, right = (float((x[held] == answer[held]).float().mean()) for x in (truth, names[truth]))
    other = known & (names != torch.arange(classes))
    mine = ~first & other[truth]
    before, after = (float((x[mine] == answer[mine]).float().mean()) for x in (truth, names[truth]))
    exchanged = int(mine.sum()) >= SEEN and before <= WRONG and after >= RIGHT
    return Numbering(as_it_is, right, int(other.sum()), count, int(held.sum()), exchanged)
