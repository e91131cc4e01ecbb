"""Recurrent layers that are called step by step with the same state: the new state is thrown away, and each step is the first."""

from typing import Any

from torch import Tensor, nn
from trainworthy.guard.hooks.addresses import address_of
from trainworthy.guard.hooks.trees import tensors

CELLS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
STEPS = 4  # calls between two backward() from which on they are steps of one series
WINDOWS = 3  # backward() calls that must agree


class States:
    """The states that each recurrent layer was given between two calls of `backward()`."""

    def __init__(self) -> None:
        self.window = -1
        self.given: dict[int, tuple[nn.Module, list[list[Tensor]]]] = {}  # layer -> it, its states
        self.found: dict[str, list[int]] = {}  # name of a layer's kind -> windows with and without the fault

    def call(self, module: nn.Module, given: Any, window: int) -> None:
        """Note a call of a layer within a model's call with gradients."""
        if not isinstance(module, (nn.RNNBase, *CELLS)):
            return
        if window != self.window:
            self.close()
            self.window = window
        state = tensors(given[1:])
        computed = bool(state) and all(x.grad_fn is not None for x in state)
        if not computed or not one_step(module, given[0]):
            return
        # The states are kept until the next backward(), so that no later one gets their address.
        _, states = self.given.setdefault(id(module), (module, []))
        states.append(state)

    def close(self) -> None:
        """Judge the calls before a backward()."""
        for module, states in self.given.values():
            if len(states) < STEPS or len({len(s) for s in states}) > 1:
                continue
            same = any(len({(address_of(x), x._version) for x in part}) == 1 for part in zip(*states, strict=True))
            self.found.setdefault(type(module).__name__, [0, 0])[not same] += 1
        self.given = {}

    def fault(self) -> str:
        """Return which layer got the same state at every step; empty if none did."""
        self.close()
        return next((name for name, (same, other) in self.found.items() if same >= WINDOWS and not other), "")


def one_step(module: nn.Module, x: Any) -> bool:
    """Return whether an input is one step of a series."""
    if not isinstance(x, Tensor) or isinstance(module, CELLS):
        return isinstance(x, Tensor)
    return x.dim() == 3 and x.shape[1 if module.batch_first else 0] == 1
