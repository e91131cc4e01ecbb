"""What an evaluation of preferences says of pairs whose two answers are exchanged: the opposite."""

from typing import Any

import torch
from trainworthy.core.loop.run import Run
from trainworthy.core.recipe.stage import Data, Stage, View

OPPOSITE = {"accuracy": 1.0, "likelier": 1.0, "margin": 0.0}
"""Sum of each metric in order and exchanged."""
CAUSE = "the evaluation's {name} is no difference of the two answers: a term has the wrong sign, or is that of one answer alone"


class Turned(View):
    """Pairs whose chosen and rejected answers are exchanged."""

    def make(self, index: int, got: Any, generator: torch.Generator | None) -> dict[str, Any]:
        sample = super().make(index, got, generator)
        return {**sample, "chosen": sample["rejected"], "rejected": sample["chosen"]}


def astray(run: Run, stage: Stage, data: Data, order: dict[str, float], limit: float) -> tuple[str, str]:
    """Return (what was measured, the cause) of the first metric that does not turn when the answers of every pair are exchanged; empty texts
    if there is none. `order`: the metrics of `data` as it is."""
    turned = run.measure(stage, Turned(data, range(len(data))))
    for name, due in OPPOSITE.items():
        a, b = order.get(name), turned.get(name)
        if a is None or b is None or abs(a + b - due) <= limit * max(1.0, abs(a)):
            continue
        return (
            f"{name} of the evaluation is {a:.4f}, and {b:.4f} with the answers exchanged (due {due - a:.4f})",
            CAUSE.format(name=name),
        )
    return "", ""
