"""Losses that are a mean with weights (class weights of tokens or pixels), alone or next to a plain mean of other terms."""

import math
from collections.abc import Callable, Sequence

VARIED, MOST = 0.2, 7.0
"""Absolute log of the weights' ratio: below it, a product of any two numbers would fit, too; above it, a maximum."""
CLEAR = 50  # times the rounding error: a difference from the plain mean that can be explained
EXACT = 0.02  # of that difference, which the explanation may leave
ENOUGH = 2  # pairs of samples with different weights


def is_weighted_mean(loss: Callable[[Sequence[int]], float], indices: Sequence[int], rounding: float) -> bool:
    """Return whether the loss of samples i, j is (m W_i a_i + n W_j a_j) / (m W_i + n W_j) + (m b_i + n b_j) / (m + n) where i is repeated m
    times and j n times. `loss`: the mean of a batch; `rounding`: its relative error.

    The weights follow from two such batches, and must explain the others. For models that treat samples independently: nothing but the
    loss can mix them there."""
    own = {i: loss([i]) for i in indices}
    noise = rounding * max(map(abs, own.values()))
    found = 0
    for i, j in zip(indices, [*indices[1:], indices[0]], strict=True):

        def excess(*some: int) -> float:
            return loss(some) - sum(own[k] for k in some) / len(some)

        one, two = excess(i, j), excess(i, i, j)
        if abs(excess(j, i) - one) > 2 * noise:  # a place in the batch counts, not a sample
            return False
        if abs(one) < CLEAR * noise or abs(4 * one - 6 * two) < CLEAR * noise:
            continue  # equal weights or losses, or a ratio beyond all limits
        ratio = (3 * two - 4 * one) / (4 * one - 6 * two)
        if ratio <= 0 or abs(math.log(ratio)) > MOST:
            return False
        if abs(math.log(ratio)) < VARIED:
            continue
        apart = one / (ratio / (ratio + 1) - 1 / 2)  # a_i - a_j
        for m, n in ((3, 1), (1, 2), (1, 3), (2, 3)):
            due = apart * (m * ratio / (m * ratio + n) - m / (m + n))
            if abs(excess(*[i] * m, *[j] * n) - due) > EXACT * abs(one) + 2 * noise:
                return False
        found += 1
    return found >= ENOUGH
