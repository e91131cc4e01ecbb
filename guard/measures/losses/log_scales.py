"""Finds a learnable number that is stored as a logarithm and used as it is: CLIP's `logit_scale`, a temperature, a variance.

Its first value tells: it is the logarithm of a round number and no round number itself (2.6593 is that of 1 / 0.07).
"""

import math
from typing import Any

from torch import Tensor
from trainworthy.guard.measures.models.autograd import nodes

NODES = 4000
GRAPHS = 2
EXACT = 1e-6
STRAIGHT = ("MulBackward0", "DivBackward0")
PASSED = ("View", "Reshape", "Expand", "Unsqueeze", "Squeeze", "Clamp", "Clone", "ToCopy", "Alias", "Minimum",
          "Maximum")  # fmt: skip


class LogScales:
    """Numbers among the parameters, and what the graph does with them first."""

    def __init__(self) -> None:
        self.graphs = 0
        self.first: dict[int, float] = {}
        self.used: dict[int, set[str]] = {}

    def look(self, root: Tensor) -> None:
        """Read the graph of a loss."""
        if self.graphs >= GRAPHS or root.grad_fn is None:
            return
        self.graphs += 1
        users: dict[Any, list[Any]] = {}
        found = list(nodes(root.grad_fn, most=NODES))
        single: list[Any] = []
        for node in found:
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaf.numel() == 1:
                single.append(node)
            for below, _ in node.next_functions:
                if below is not None:
                    users.setdefault(below, []).append(node)
        for node in single if len(found) < NODES else ():
            self.first.setdefault(id(node.variable), float(node.variable.detach()))
            self.used.setdefault(id(node.variable), set()).update(after(node, users))

    def fault(self, names: dict[int, str]) -> tuple[str, str] | None:
        """Return what was measured and its cause. `names`: of the parameters."""
        for key, value in self.first.items():
            if not self.used[key] or not self.used[key] <= set(STRAIGHT) or round_number(value):
                continue
            meant = next((x for x in (math.exp(value), math.exp(-value)) if round_number(x)), None)
            if meant is not None and abs(value) < 20:
                return (
                    f"{names.get(key, 'a learnable number')} begins at {value:.4f}, the logarithm of {math.exp(value):.4g}, and multiplies as it is",
                    "exp() is missing: the logarithm of the scale is used as the scale",
                )
        return None


def after(node: Any, users: dict[Any, list[Any]]) -> set[str]:
    """Return the names of the first nodes that compute something of a value; views and limits do not."""
    found, todo = set(), list(users.get(node, ()))
    while todo:
        one = todo.pop()
        if any(word in one.name() for word in PASSED):
            todo += users.get(one, ())
        else:
            found.add(one.name())
    return found


def round_number(x: float) -> bool:
    """Return whether a number has at most two significant digits."""
    return x == 0 or abs(float(f"{x:.1e}") - x) <= EXACT * abs(x)
