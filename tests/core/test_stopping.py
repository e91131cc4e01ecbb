"""Runs that are no use stop themselves early, and a result that is worth nothing is never printed without saying so first."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from trainworthy.core.monitoring import monitors
from trainworthy.core.recipe.stage import Metric
from trainworthy.core.report import bands, folder
from trainworthy.recipes.rl.control.gates.monitors import far

from tests.conftest import Done
from tests.core.test_monitors import healthy, rows
from tests.helpers.commands import holds
from tests.vision.planted_classify import POOL, SPLIT

ACCURACY = Metric("accuracy", "", 0.1, 1.0)
RETURN = Metric("return", "", 21.0, 500.0)
BARE = ("--gates.no-enabled", "--no-augment", "--loader.workers", "0")


# ------------------------------------------------------------------------------------------------------- from curves alone
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_far_above_the_untrained_one_is_no_run(seed: int):
    def blown(t: float) -> float:
        return healthy(t) if t < 0.2 else 46.0

    live = monitors.Live(64, 1000)
    found = [live.see(r["step"], r["step/loss"]) for r in rows(blown, seed=seed)]
    assert "diverged" in found
    assert found.index("diverged") < 330, "early"
    settings = {"train": {"batch_size": 64}, "optim": {"clip": 1.0, "warmup": 0.1}}
    verdict = monitors.check_rows(rows(blown, seed=seed), settings, total=1000)[1]
    assert (verdict.id, verdict.verdict) == ("collapse", "fail")
    assert "5 times the untrained loss" in verdict.measured
    quiet = monitors.Live(64, 1000)
    assert {quiet.see(r["step"], r["step/loss"]) for r in rows(lambda t: 8.0 if 0.5 < t < 0.55 else healthy(t))} <= {
        "",
        "spike",
    }


def test_nothing_learnt_needs_both_the_loss_and_the_metric():
    def live(loss: Callable[[float], float]) -> monitors.Live:
        seen = monitors.Live(64, 1000)
        for r in rows(loss)[:400]:
            seen.see(r["step"], r["step/loss"])
        return seen

    flat, falling = live(lambda t: 2.3), live(healthy)
    assert monitors.nothing_learnt(ACCURACY, [0.1, 0.11, 0.1], flat)
    assert not monitors.nothing_learnt(ACCURACY, [0.1, 0.2, 0.1], flat), "it knew something once"
    assert not monitors.nothing_learnt(ACCURACY, [0.1, 0.1, 0.1], falling), "it may show in the metric later"
    assert not monitors.nothing_learnt(ACCURACY, [0.1], flat)
    early = monitors.Live(64, 1000)
    for r in rows(lambda t: 2.3)[:200]:
        early.see(r["step"], r["step/loss"])
    assert not monitors.nothing_learnt(ACCURACY, [0.1, 0.1], early), "a slow start"


@pytest.mark.parametrize(("values", "gone"), [
    ((25, 200, 480, 30, 28, 33, 25), True),  # 3% of the return that was reached
    ((25, 200, 480, 30, 28, 400, 25), False),  # it came back
    ((25, 200, 480, 300, 280, 330, 250), False),  # worse, not lost
    ((25, 22, 30, 24, 21, 22, 20), False),  # nothing to lose
    ((25, 200, 480, 30), False),  # one bad evaluation
])  # fmt: skip
def test_what_was_reached_and_is_lost_for_good(values: tuple[float, ...], gone: bool):
    history = [(10 * (i + 1), float(v)) for i, v in enumerate(values)]
    assert bool(monitors.lost(RETURN, history, total=80)) is gone


def test_a_policy_that_nothing_holds_back_asks_to_stop():
    logged = {"val/return": 100.0, "train/policy/approx_kl": 3.8, "train/policy/clip_fraction": 0.1}
    history = [{"epoch": i, "step": i, **logged} for i in range(4)]
    assert "is the ratio that of the new to the old policy" in monitors.asks_to_stop(far(), history)
    assert not monitors.asks_to_stop(far(), history[:2])
    for row in history:
        row["train/policy/approx_kl"] = 0.2  # advice, no more
    assert not monitors.asks_to_stop(far(), history)


@pytest.mark.parametrize(("value", "best", "others", "said"), [
    (0.101, 0.11, {}, "NO BETTER THAN CHANCE"),
    (math.nan, 0.9, {}, "NO BETTER THAN CHANCE"),
    (0.5, 0.5, {"majority class": 0.6}, "NO BETTER THAN MAJORITY CLASS"),
    (0.3, 0.9, {}, "LOST AGAIN"),
    (0.9, 0.9, {"majority class": 0.6}, ""),
])  # fmt: skip
def test_a_result_that_is_worth_nothing_says_so(value: float, best: float, others: dict, said: str):
    assert monitors.warning_of_result(ACCURACY, value, best, others).startswith(said)
    assert said or not monitors.warning_of_result(ACCURACY, value, best, others)


# --------------------------------------------------------------------------------------------------- through the command
def test_a_run_at_chance_stops_itself_and_one_that_ends_there_says_so_first(
    launch: Callable[..., Done], fork: Callable
):
    mine = fork((SPLIT, "labels = labels[torch.randperm(len(labels))]\n    " + SPLIT))
    flat = ("run", str(mine), *BARE)
    done = launch(*flat, "--train.epochs", "6", code=4)
    holds(done.stderr, "nothing learnt (C11)", "the gates are off")
    assert "report.html" in {p.name for p in done.folder().iterdir()}
    done = launch(*flat, "--train.epochs", "1", code=0)  # too short to be stopped
    told = [line for line in done.stdout.splitlines() if line.startswith(("NO BETTER", "result"))]
    assert told[0].startswith("NO BETTER THAN CHANCE: accuracy"), done.stdout
    assert "next   trainworthy lr" in done.stdout
    for name in ("report.html", "card.md", "export/README.md"):
        assert "NO BETTER THAN CHANCE" in (done.folder() / name).read_text(), name


# ---------------------------------------------------------------------------------------------------- the parent's band
def test_a_fork_is_held_against_the_band_of_its_parent(launch: Callable[..., Done], fork: Callable, tmp_path: Path):
    """A trunk that does not train: it beats the majority class under passed gates, and its parent by far not."""
    parent = fork(name="parent.py")
    budget = (*BARE, "--train.epochs", "4", "--optim.lr", "3e-3")
    done = launch("run", str(parent), *budget, code=0)
    assert "OUTSIDE" not in done.stdout
    healthy_run = folder.read(done.folder())
    band = tmp_path / "results" / "parent.band.json"
    band.parent.mkdir()
    band.write_text(json.dumps(bands.reference([healthy_run])))
    mine = tmp_path / "mine.py"
    done = launch("fork", str(parent), str(mine), code=0)
    source = mine.read_text()
    assert source.count("x = self.blocks(") == 1
    mine.write_text(source.replace(POOL, POOL.replace("x.mean", "x.detach().mean")))
    done = launch("run", str(mine), *budget, code=0)
    told = [
        line for line in done.stdout.splitlines() if line.lstrip().startswith(("OUTSIDE the healthy band", "result"))
    ]
    assert told[0].startswith("  OUTSIDE"), done.stdout
    assert told[-2].startswith("OUTSIDE the healthy band: accuracy"), "first line of the result"
    page = (done.folder() / "report.html").read_text()
    assert "which this was forked from" in page
    assert "It beats every baseline<" not in page
    assert "gates that read what this fork changed" in page or "Gates were OFF" in page
    stopped = launch("run", str(mine), *budget, "--run.stop-outside-band", code=4)
    assert "outside the band of healthy runs" in stopped.stderr
