"""Whether the tokens of preferred answers are those of rejected ones in the other split."""

import math
from collections import Counter
from typing import Any

from trainworthy.guard.measures.trainers.trainer_columns import PAIRS, pair_columns

READ = 2000  # pairs of a split
CERTAIN = 4.0  # standard errors on each side
Counts = list[Counter[Any]]


def exchanged(trainer: Any) -> tuple[str, str] | None:
    """The tokens of chosen answers in one half of the training pairs rank the other half clearly right, and the evaluation's pairs clearly
    wrong."""
    train, val = trainer.train_dataset, getattr(trainer, "eval_dataset", None)
    names = pair_columns(train)
    if names is None or pair_columns(val) != names or min(len(train), len(val)) < PAIRS:
        return None
    pairs = [_differences(rows, names) for rows in (train, val)]
    weights = _weights(pairs[0][::2])
    here, there = _ranked(pairs[0][1::2], weights), _ranked(pairs[1], weights)
    if here[2] < CERTAIN or there[2] > -CERTAIN:
        return None
    return ("by their tokens (weights from half of the training pairs) {} of {} other training pairs are ranked right, and {} of {} of the "
            "evaluation".format(*here[:2], *there[:2]), "chosen and rejected are exchanged in one of the two sets")  # fmt: skip


def _differences(rows: Any, names: tuple[str, str]) -> Counts:
    """Return for each pair how many more of each token, and of all tokens (None), the chosen text has."""
    found = []
    for i in range(0, len(rows), max(1, len(rows) // READ)):
        chosen, rejected = (rows[i][n] for n in names)
        more = Counter(chosen)
        more.subtract(rejected)
        more[None] = len(chosen) - len(rejected)
        found.append(more)
    return found


def _weights(pairs: Counts) -> dict[Any, float]:
    """Return for each token the logarithm of the odds that the chosen text has more of it."""
    up, down = Counter(), Counter()
    for more in pairs:
        up.update(k for k, n in more.items() if n > 0)
        down.update(k for k, n in more.items() if n < 0)
    return {k: math.log((up[k] + 1) / (down[k] + 1)) for k in up.keys() | down.keys()}


def _ranked(pairs: Counts, weights: dict[Any, float]) -> tuple[int, int, float]:
    """Return (pairs that the weights rank right, pairs that they rank, standard errors above half)."""
    scores = [
        sum(weights.get(k, 0.0) * (n > 0) - weights.get(k, 0.0) * (n < 0) for k, n in more.items()) for more in pairs
    ]
    right, wrong = sum(s > 0 for s in scores), sum(s < 0 for s in scores)
    return right, right + wrong, (right - wrong) / math.sqrt(max(1, right + wrong))
