"""A recipe on a device that is not the host (tests/helpers/stand_in.py, which says what it cannot see). rl/ppo: tests/rl."""

import json
import subprocess
import sys

from tests.conftest import ROOT

GATES = ("schema", "scale", "wiring", "evaluation")


def test_classify_on_a_device_that_is_not_the_host():
    """`wiring` trains four steps there. It evaluated in float64 on the device, which Apple's MPS lacks."""
    argv = ["-m", "tests.helpers.stand_in", "vision/classify", f"--only={','.join(GATES)}", "--train.epochs", "0.32"]
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {f"classify {gate}": "pass" for gate in GATES}
