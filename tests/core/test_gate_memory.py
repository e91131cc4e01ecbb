"""Memory of the gates, counted by bench/gate_memory.py through the real command."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.helpers.commands import environment

SMALL = {
    "vision/classify": "--loader.workers 0 --ema 0.99 --widths 32 64 --train.max-steps 6",
    "rl/ppo": "--num-steps 32 --train.batch-size 64 --train.max-steps 6",
}
GATES = "wiring,accumulation,resume,average"
PEAK, LEFT, KEPT = 1.1, 0.02, 2.2
"""Highest gate over training; and, in units of the model's weights, what is alive at the start of training and before a gate.
Bytes are counted, so the same run gives the same numbers on every machine."""


@pytest.mark.parametrize("recipe", SMALL)
def test_gates_take_as_much_memory_as_training_and_leave_none(recipe, tmp_path):
    """In a new process, with Python's collector off but where the code asks for it."""
    words = (
        f"{recipe} {SMALL[recipe]} --gates.no-remember --run.out {tmp_path}/runs --only {GATES} --json {tmp_path}/found"
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "gate_memory.py"), *words.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "found").read_text())
    worst = max(found["gates"], key=lambda name: found["gates"][name][1])
    assert found["gates"][worst][1] <= PEAK * found["training"], f"{worst}: {found['gates'][worst][1]:,} bytes"
    assert max(before for before, _ in found["gates"].values()) <= KEPT * found["weights"]
    assert found["start"] <= LEFT * found["weights"]
