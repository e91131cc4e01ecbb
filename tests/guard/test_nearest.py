"""Which of several failed checks the last lines name."""

import pytest
from trainworthy.core.base.verdict import Verdict
from trainworthy.guard.checks.results import finding, nearest, verdict

NONE = finding("gradients", "at 9 of 9 steps there was no gradient", "zero_grad() between", symptom=True)
STALE = finding(
    "gradients", "at 8 of 9 steps the gradients hold those of the step before", "no zero_grad()", symptom=False
)
DEAD = finding("dependency", "0 of 32 samples reach the outputs", "dead units", symptom=True)


def failures(*found: dict | str) -> list[Verdict]:
    return [verdict(finding(f, "measured", "cause") if isinstance(f, str) else f, "fail") for f in found]


@pytest.mark.parametrize(("found", "first"), [
    (["wiring", "learning"], "wiring"),
    ([NONE, "dependency", "names"], "names"),
    ([NONE, "targets"], "targets"),
    (["finite", "modes"], "modes"),
    ([STALE, DEAD], "gradients"),
    (["learning", "overfit"], "learning"),
    ([NONE, "overfit"], "gradients"),
])  # fmt: skip
def test_a_symptom_does_not_lead(found: list, first: str):
    assert nearest(failures(*found)).id == first
