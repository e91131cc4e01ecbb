"""Finds evaluations whose scores are NaN in part: a sigmoid and an argmax take them for a low score, and nothing raises."""

import torch
from torch import Tensor

CALLS, FEWEST = 200, 2


class Undefined:
    """What went through a sigmoid or an argmax in evaluations."""

    def __init__(self) -> None:
        self.calls = 0
        self.shares: list[float] = []  # of the inputs with NaN: their share

    def read(self, given: object) -> None:
        """Note one input, read without gradients."""
        if not isinstance(given, Tensor) or not given.is_floating_point() or not given.numel() or self.calls >= CALLS:
            return
        self.calls += 1
        if share := float(torch.isnan(given.detach()).float().mean()):
            self.shares.append(share)

    def fault(self) -> tuple[str, str] | None:
        """Return what was measured and its cause."""
        if len(self.shares) < max(FEWEST, 0.2 * self.calls) or min(self.shares) == 1:
            return None
        return (
            f"{sum(self.shares) / len(self.shares):.0%} of the scores of {len(self.shares)} evaluation batches are NaN",
            "windows or parts that are put together leave places out, and 0 is divided by 0 there\na division by an empty count in the evaluation",
        )
