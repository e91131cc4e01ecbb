"""Healthy runs, among them those that look like bugs: no gate may fail one."""

import pytest

from tests.conftest import collected
from tests.helpers.plant import Healthy

VARIANTS: list[Healthy] = collected("healthy_*.py", "VARIANTS")
SAMPLED: list[str] = collected("healthy_*.py", "SAMPLED")


def quiet(healthy: Healthy, launch, fork, seed: int) -> None:
    """Check the healthy variant: exit 0, not one failing gate; only what has nothing to judge skips."""
    fork(*([healthy.hunk] if healthy.hunk else []), recipe=healthy.recipe)
    done = launch("check", "mine.py", "--run.seed", str(seed), *healthy.argv, code=0)
    skipped = {v["id"] for v in done.verdicts() if v["verdict"] == "skip"}
    assert {v["verdict"] for v in done.verdicts()} <= {"pass", "skip"}, done.shown
    assert skipped <= {*healthy.may_skip, "batch-norm"}, done.shown
    assert not done.stderr.strip(), done.stderr


def cases(chosen) -> list:
    return [
        pytest.param(h, id=h.id, marks=[pytest.mark.xfail(strict=True, reason=h.alarm)] if h.alarm else [])
        for h in chosen
    ]


@pytest.mark.parametrize("healthy", cases(h for h in VARIANTS if h.id in SAMPLED))
def test_quiet(healthy: Healthy, launch, fork):
    quiet(healthy, launch, fork, seed=0)


@pytest.mark.verify
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("healthy", cases([Healthy("as-it-is"), *VARIANTS]))
def test_quiet_at_every_seed(healthy: Healthy, seed: int, launch, fork):
    quiet(healthy, launch, fork, seed)
