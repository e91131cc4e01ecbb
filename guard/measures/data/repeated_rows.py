"""Finds rare classes that were multiplied before the split: copies of one row are in training and in the evaluation.

A row that occurs several times is no fault by itself. It is one where rows of one class hardly ever repeat, those of another class are nearly
all copies of training rows, and the classes are of equal size, as they are after random oversampling.
"""

from collections import Counter
from typing import Any

from torch.utils.data import DataLoader
from trainworthy.guard.measures.data.spaced import as_tensors, spaced

MOST = 20_000  # rows of training
READ = 2000  # of an evaluation
ROWS = 50  # of a class in an evaluation
NUMBERS, WIDEST = 4, 1024  # of a row: pictures are compared elsewhere
COPIED, UNIQUE = 0.5, 0.02  # shares of evaluation rows that are in training: of the multiplied class, of another one
DISTINCT = 10
EVEN = 1.15  # largest class by smallest
Row = tuple[int, float]


def row_of(sample: Any) -> Row | None:
    """Return content and class of a row of numbers; None of anything else."""
    parts = as_tensors(sample)
    numbers = [x.flatten() for x in parts if x.is_floating_point() and x.numel() > 1]
    labels = [float(x) for x in parts if x.numel() == 1]
    if len(labels) != 1 or labels[0] != int(labels[0]) or not NUMBERS <= sum(map(len, numbers)) <= WIDEST:
        return None
    return hash(b"".join(x.numpy().tobytes() for x in numbers)), labels[0]


def check(train: DataLoader, others: list[DataLoader], limit: float) -> tuple[str, str] | None:
    """Return what was multiplied, and its cause."""
    mine = spaced(train.dataset, MOST, limit, row_of, whole=True)
    if len(mine) < ROWS:
        return None
    known, sizes = {content for content, _ in mine}, Counter(label for _, label in mine)
    for other in others:
        theirs = spaced(other.dataset, READ, limit, row_of)
        total = sizes + Counter(label for _, label in theirs)
        classes = [k for k in sizes if sum(label == k for _, label in theirs) >= ROWS]
        if len(classes) < 2 or len(sizes) > 20:
            continue
        if max(total[k] for k in classes) > EVEN * min(total[k] for k in classes):
            continue
        share = {k: [content in known for content, label in theirs if label == k] for k in classes}
        part = {k: sum(x) / len(x) for k, x in share.items()}
        copied = [k for k in classes if part[k] > COPIED]
        if not copied or min(part.values()) > UNIQUE:
            continue
        first = max(copied, key=lambda k: part[k])
        if len({content for content, label in theirs if label == first}) < DISTINCT:
            continue
        return (
            f"{part[first]:.0%} of the evaluation's rows of class {first:g} are copies of training rows, {min(part.values()):.0%} of another class",
            "a rare class was oversampled before the split: split first, then repeat the training rows alone",
        )
    return None
