"""Checks of what a policy's actions are weighed by: the ends of episodes, and a critic that learns."""

from typing import Any

from trainworthy.guard.checks.invariants import names, tops, with_and_without
from trainworthy.guard.hooks.parameters import parameters_of
from trainworthy.guard.measures.control.advantages import Sums

ENDED = 3  # steps that ended an episode: each follows the sum by chance in one of a thousand
STEPS = 8  # updates


def advantages(seen: Any) -> tuple[str, str] | None:
    """Return what is wrong with the advantages of a policy, and its cause."""
    credit = seen.evidence.credit
    if not credit.batches or credit.again > 0.05 * max(1, len(credit.where)):
        return None
    sums = Sums(credit, seen.evidence.values)
    if sums.on >= ENDED and sums.masked <= 0.05 * sums.on:
        return (
            f"at {sums.on} of {sums.on + sums.masked} steps that ended an episode, the advantage goes on with the next episode's value and "
            f"advantage, by the same sum as at {sums.exact:,} steps within episodes",
            "the ends of episodes are ignored: multiply the next value and the next advantage by (1 - done)",
        )
    if sums.based >= STEPS and (dead := untaught(seen)):
        return (
            f"the critic's values are subtracted from the returns in {sums.based} updates, and {dead[0]} and {len(dead) - 1} more of its "
            "tensors never get a gradient",
            "the values are detached in the critic's own loss, or it is left out: detach the returns, not the values",
        )
    return None


def untaught(seen: Any) -> list[str]:
    """Return the names of tensors in an optimiser that never got a gradient although their modules ran in training."""
    called = names(tops())
    ran = {id(p) for m, _, graded in seen.called.values() if graded for p in parameters_of(m, recurse=False)}
    dead = [called.get(id(p), "a tensor") for p in with_and_without(seen, STEPS)[1] if id(p) in ran]
    return dead if len(dead) > 1 else []
