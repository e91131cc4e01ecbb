"""Gates: checks that must pass before training. `gate.py` defines a gate, `order.py` lists them, `runner.py` runs them; the gates of every
recipe are in `checks`, the experiments that find the cause of a failure in `causes`."""

from trainworthy.core.base.verdict import Finding, Skip, Verdict
from trainworthy.core.gates.gate import (
    PARTS,
    Gate,
    GateContext,
    build,
    categorical,
    fetch,
    gate,
    pick,
    quick_collections,
    total_loss,
    train_set,
)
from trainworthy.core.gates.runner import full_precision, run_gates, write

__all__ = ["PARTS", "Finding", "Gate", "GateContext", "Skip", "Verdict", "build", "categorical", "fetch", "full_precision",
           "gate", "pick", "quick_collections", "run_gates", "total_loss", "train_set", "write"]  # fmt: skip
