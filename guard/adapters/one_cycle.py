"""OneCycleLR in a script's own loop: a gate may take more steps than the run that the schedule was made for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch.optim.lr_scheduler import OneCycleLR


@contextmanager
def keep_last_rate(epoch: int, passes: Callable[[], int]) -> Iterator[None]:
    """Let a OneCycleLR keep its last rate after its last step, where torch raises.

    A schedule that is shorter than one epoch still raises if the loop steps it more than once in a pass: it was made for epochs.

    Args:
        epoch: optimiser steps of one epoch of the script's own loader.
        passes: returns how many passes over the batches the loop has begun.
    """
    own = OneCycleLR.get_lr

    def get_lr(self: OneCycleLR) -> list:
        whole = self.total_steps >= epoch or self.last_epoch <= passes() + 1
        if self.last_epoch > self.total_steps and whole:
            return [group["lr"] for group in self.optimizer.param_groups]
        return own(self)

    with mock.patch.object(OneCycleLR, "get_lr", get_lr):  # a loop keeps its scheduler to itself
        yield
