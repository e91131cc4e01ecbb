"""Compares the share that dropout drops with what the script calls it: `nn.Dropout` takes the share to drop, TensorFlow's first
versions took the share to keep.

A layer that drops most of its input may be meant. It counts only if the script has a name for the rest of that share, none for the
share itself, and no other layer drops the rest.
"""

import re
from typing import Any

from trainworthy.guard.measures.records import own_frames, scopes_of

DROP = re.compile(
    r"(?i)drop_?(out)?s?_?(rate|prob|probability|p|ratio)?|p_?drop(out)?|[a-z0-9_]+_drop(out)?(_?(rate|prob|p|ratio))?"
)
KEEP = re.compile(
    r"(?i)(p_?)?(keep|retain)_?(rate|prob|probability|p|ratio)?(_[a-z0-9]+)?|[a-z0-9_]+_keep_?(rate|prob|probability|p)"
)
LAYERS = 256  # whose shares are noted


class Shares:
    """Shares that dropout layers were made with, and what the script's variables of these values are called."""

    def __init__(self) -> None:
        self.made: set[float] = set()
        self.alive: set[float] = set()  # shares that were dropped in training
        self.names: dict[float, dict[str, float]] = {}  # share above one half -> variables that name shares

    def layer(self, p: Any, frame: Any) -> None:
        """Note a layer, or a call of `F.dropout` in the script itself."""
        if not isinstance(p, float) or not 0 < p < 1 or len(self.made) >= LAYERS:
            return
        self.made.add(p)
        if p > 0.5 and p not in self.names:
            self.names[p] = {
                k: v
                for scope in scopes_of(frame)
                for k, v in list(scope.items())
                if isinstance(k, str) and type(v) is float and 0 < v < 1 and (DROP.fullmatch(k) or KEEP.fullmatch(k))
            }

    def called(self, p: Any, frame: Any) -> None:
        """Note a call of a dropout function in training; `frame`: its caller's."""
        if isinstance(p, float) and p not in self.alive and len(self.alive) < LAYERS:
            self.alive.add(p)
            if next(own_frames(frame), None) is frame:
                self.layer(p, frame)

    def fault(self) -> tuple[str, str] | None:
        """Return what was measured and its cause."""
        for p, names in self.names.items():
            dropped = {k: v for k, v in names.items() if DROP.fullmatch(k)}
            if p not in self.alive:
                continue
            if any(near(v, p) for v in dropped.values()) or any(near(q, 1 - p) for q in self.made):
                continue
            kept = next((k for k, v in names.items() if k not in dropped and near(v, p)), None)
            rest = next((k for k, v in dropped.items() if near(v, 1 - p)), None)
            if kept or rest:
                measured = (
                    f"'{kept}', the share to keep, is {p:g}" if kept else f"'{rest}', the share to drop, is {1 - p:g}"
                )
                return (
                    f"dropout drops {p:.0%} of its inputs in training, and {measured}",
                    "dropout gets the keep probability, but takes the drop probability",
                )
        return None


def near(a: float, b: float) -> bool:
    """Return whether two shares are equal but for rounding."""
    return abs(a - b) < 1e-6
