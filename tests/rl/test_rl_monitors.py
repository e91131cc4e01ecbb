"""Monitors of the control recipes: quiet over healthy curves, each with something to say of its own fault, and of no other's."""

import math
from pathlib import Path

import pytest
from trainworthy.core.monitoring.monitors import _own
from trainworthy.recipes.rl.control.gates import monitors

from tests.conftest import ROOT, patched
from tests.helpers.commands import read

FLOOR, CEILING, ACTIONS, CAPACITY = 20.0, 500.0, 2, 50
OFF = ("--gates.no-enabled", "--run.no-tensorboard", "--eval-episodes", "5")


def history(n: int = 10, **changed) -> list[dict[str, float]]:
    """Evaluations of a healthy run; `changed`: {key: function of how far the run is, in (0, 1]}."""
    healthy = {
        "val/return": lambda p: FLOOR + min(1.0, 1.5 * p) * 400,
        "val/return_sd": lambda p: 30.0,
        "train/policy/explained_variance": lambda p: 0.9 * p,
        "train/policy/entropy": lambda p: math.log(ACTIONS) * (1 - 0.7 * p),
        "train/policy/approx_kl": lambda p: 0.01,
        "train/policy/clip_fraction": lambda p: 0.1,
        "train/policy/replay_age": lambda p: min(p * 40, CAPACITY / 2),
    }
    curves = healthy | {next(k for k in healthy if k.endswith(f"/{name}")): curve for name, curve in changed.items()}
    return [{"step": 10.0 * i, "epoch": 10.0 * i, **{k: f(i / n) for k, f in curves.items()}} for i in range(1, n + 1)]


def advised(rows: list[dict[str, float]], ceiling: float = CEILING) -> list[str]:
    found = monitors.monitors(FLOOR, ceiling, ratio=True, actions=ACTIONS, capacity=CAPACITY)
    return [m.id for m in found if not m.check(rows).ok]


@pytest.mark.parametrize("ceiling", [CEILING, math.inf])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"return": lambda p: FLOOR + 480 - 150 * (p > 0.9)},  # an evaluation that dips
        {"return": lambda p: FLOOR - 10 * p},  # nothing learnt yet, so nothing lost
        {"entropy": lambda p: 0.5 * (p < 0.6)},  # decided once it knows
        {"return": lambda p: FLOOR + 480 * p, "entropy": lambda p: 0.01},  # decided, and still getting better
    ],
)
def test_quiet(changed: dict, ceiling: float):
    assert advised(history(**changed), ceiling) == []


@pytest.mark.parametrize("ceiling", [CEILING, math.inf])
@pytest.mark.parametrize(
    ("monitor", "changed"),
    [
        ("return", {"return": lambda p: FLOOR + 400 * (p < 0.6)}),
        ("values", {"explained_variance": lambda p: -0.5}),
        ("entropy", {"entropy": lambda p: 0.01, "return": lambda p: FLOOR + 80}),
        ("policy-steps", {"approx_kl": lambda p: 0.01 + (p == 0.5)}),
        ("policy-steps", {"clip_fraction": lambda p: 0.7}),
        ("policy-steps", {"approx_kl": lambda p: 0.0, "clip_fraction": lambda p: 0.0}),
        ("replay", {"replay_age": lambda p: 100 * p}),
    ],
)
def test_told(monitor: str, changed: dict, ceiling: float):
    assert advised(history(**changed), ceiling) == [monitor]


def test_one_evaluation_says_nothing_of_the_values():
    """A run of five iterations was advised to change its rate."""
    rows = history(1, explained_variance=lambda p: 0.1, **{"return": lambda p: FLOOR})
    found = {
        v.id: v.verdict
        for v in (
            _own(m, rows) for m in monitors.monitors(FLOOR, CEILING, ratio=True, actions=ACTIONS, capacity=CAPACITY)
        )
    }
    assert found["values"] == "skip", found


def test_what_cannot_be_beaten_excuses_a_policy_that_has_decided_and_values_that_are_all_alike():
    best = {"return": lambda p: CEILING, "entropy": lambda p: 0.0, "explained_variance": lambda p: 0.0}
    assert advised(history(**best)) == []


def told(folder: Path) -> dict[str, str]:
    return {v["id"]: v["verdict"] for v in read(folder / "monitors.json")["monitors"]}


@pytest.mark.parametrize(("argv", "code"), [((), 4), (("--no-stop-lost",), 0)])
def test_a_rate_that_kills_the_policy_is_told(argv: tuple[str, ...], code: int, launch):
    """Through the real command: at a rate a hundred times too high the first updates leave nothing of the old policy."""
    done = launch("run", "rl/ppo", *OFF, "--train.epochs", "6", "--train.eval-every", "1", "--optim.lr", "0.1", *argv)
    assert done.returncode == code, done.shown
    assert ("--no-stop-lost: continue anyway" in done.stderr + done.stdout) == bool(code), done.shown
    found = told(done.folder())
    assert found["policy-steps"] == "advice", done.shown
    assert "fewer --update-epochs" in done.stdout
    assert found["return"] == "pass"


@pytest.mark.parametrize(
    "full", ["replay.add(whole, step.index)", "len(replay) < replay.steps and replay.add(whole, step.index)"]
)
def test_a_replay_that_is_full_for_ever_is_told(full: str, tmp_path: Path, launch):
    source = (ROOT / "recipes" / "rl" / "dqn.py").read_text()
    (tmp_path / "mine.py").write_text(patched(source, ("replay.add(whole, step.index)", full)))
    small = (
        "--buffer-size",
        "512",
        "--learning-starts",
        "128",
        "--gradient-steps",
        "2",
        "--train.epochs",
        "20",
        "--train.eval-every",
        "10",
    )
    done = launch("run", "mine.py", *OFF, *small)
    assert done.returncode == 0, done.shown
    assert told(done.folder())["replay"] == ("advice" if "len" in full else "pass")
