"""What a loss between a student's and a teacher's scores must do, whatever its formula: no other scores may give less than the teacher's own."""

from collections.abc import Callable

import torch
from torch import Tensor

OTHERS = 16  # random scores near the teacher's
# Times the teacher's scores: a temperature on one side alone moves the least value there
SCALED = (0.5, 0.8, 1.25, 2.0)
# In a term's name: the divergence in the student's own expectation is meant (MiniLLM, Gu 2024)
REVERSED = ("rev", "rkl")
EQUAL = 1e-3  # relative to the others; scores that are standardised (Sun 2024) give the same at every scale, but for what is added to the deviation


@torch.no_grad()
def least_at_teacher(value: Callable[[Tensor], float], theirs: Tensor) -> tuple[str, str]:
    """Return (what is wrong, what was measured). `value` computes the loss of scores (..., classes) of a student; `theirs` are the
    teacher's."""
    draws = torch.Generator().manual_seed(0)
    least, others = value(theirs), []
    for _ in range(OTHERS):
        others.append(value(theirs + 0.3 * theirs.std() * torch.randn(theirs.shape, generator=draws).to(theirs)))
    if less := sum(not other > least for other in others):
        fault = f"{less} of {OTHERS} scores near the teacher's give no more than the teacher's own"
        return f"{fault} ({min(others):.4g}, {least:.4g})", ""
    slack = EQUAL * max(abs(least), *map(abs, others))
    for factor in SCALED:
        if (other := value(factor * theirs)) < least - slack:
            fault = f"{factor:g} times the teacher's scores give less than the teacher's own"
            return f"{fault} ({other:.4g}, {least:.4g})", ""
    return "", f"minimal at the teacher's scores ({least:.2g}, near them {min(others):.2g} to {max(others):.2g})"


def far(values: Tensor, of: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return ((values - of).abs().max() / of.abs().max().clamp_min(1e-12)).item()


def proportional(values: Tensor, to: Tensor, near: float) -> bool:
    """Return whether `values` are `to` times a factor."""
    return far(values, (values @ to) / to.square().sum().clamp_min(1e-12) * to) <= near
