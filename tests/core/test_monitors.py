"""Monitors: quiet on healthy curves, loud on planted ones; early stopping; a run that collapses stops itself."""

import json
import math
import random

import pytest
from safetensors.torch import load_file
from trainworthy.core.monitoring import monitors
from trainworthy.core.recipe.stage import Metric

from tests.helpers.commands import assert_same_run, holds, read, run_folder, trainworthy

SETTINGS = {"train": {"batch_size": 64}, "optim": {"clip": 1.0, "warmup": 0.1}}


def rows(loss, *, steps: int = 1000, norm=lambda i: 0.5 + (i % 10) / 9, noise: float = 0.03, seed: int = 0, **terms):
    """Step rows of a run with 10% warm-up and a cosine, whose loss is a function of the share of the run."""
    draw = random.Random(seed)
    found = []
    for i in range(steps):
        t = i / steps
        lr = 1e-3 * (t / 0.1 if t < 0.1 else 0.5 * (1 + math.cos(math.pi * (t - 0.1) / 0.9)))
        row = {"step": i + 1, "step/loss": loss(t) + noise * draw.gauss(0, 1), "step/grad_norm": norm(i), "step/lr": lr}
        found.append(row | {f"step/{k}": v for k, v in terms.items()})
    return found


def healthy(t: float) -> float:
    return 0.5 + 1.8 * math.exp(-8 * t)


def judged(found, **more) -> dict[str, str]:
    """{monitor: verdict}"""
    return {v.id: v.verdict for v in monitors.check_rows(found, SETTINGS, total=len(found), **more)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.003, 0.03, 0.2])
def test_healthy_curves_are_quiet(seed: int, noise: float):
    found = judged(
        rows(healthy, noise=noise, seed=seed), gap=monitors.Gap(Metric("accuracy", "", 0.1, 1.0), 0.99, 0.98)
    )
    assert found == {
        "spike": "pass",
        "collapse": "pass",
        "plateau": "pass",
        "clipped": "pass",
        "terms": "skip",
        "gap": "pass",
    }


def test_a_solved_task_that_stays_flat_is_no_plateau():
    """Learnt in the warm-up, flat at its floor ever after: nothing says that the rate is too high."""
    assert judged(rows(lambda t: 0.5 + 1.8 * math.exp(-60 * t)))["plateau"] == "pass"


@pytest.mark.parametrize("seed", range(3))
def test_spikes_are_counted_and_placed(seed: int):
    def spiky(t: float) -> float:
        return healthy(t) + (3.0 if 0.5 <= t < 0.51 or 0.8 <= t < 0.805 else 0.0)

    spike = monitors.check_rows(rows(spiky, seed=seed), SETTINGS, total=1000)[0]
    assert (spike.verdict, spike.evidence["spikes"]) == ("advice", [501, 801])
    assert len(spike.evidence["back"]) == 2
    assert "recovered from all" in spike.measured


def test_a_collapse_is_told_from_a_spike():
    def lost(t: float) -> float:
        return healthy(t) if t < 0.5 else 2.31

    assert judged(rows(lost))["collapse"] == "fail"
    assert judged(rows(lambda t: healthy(t) if not 0.5 < t < 0.55 else 2.31))["collapse"] == "pass", "it came back"
    assert judged(rows(lambda t: 2.3))["collapse"] == "pass", "what never learnt anything has nothing to lose"
    assert judged(rows(lost), loss_may_rise="targets move")["collapse"] == "skip"


@pytest.mark.parametrize("seed", range(3))
def test_a_peak_rate_too_high_shows_its_evidence(seed: int):
    """Falls in the warm-up, jumps up at the peak, falls again with the rate."""

    def high(t: float) -> float:
        return 2.3 - 5 * t if t < 0.08 else 2.25 if t < 0.6 else 2.25 - 2 * (t - 0.6)

    plateau = monitors.check_rows(rows(high, seed=seed), SETTINGS, total=1000)[2]
    assert plateau.verdict == "advice"
    assert "too high" in plateau.measured
    assert "--optim.lr" in plateau.remedy


@pytest.mark.parametrize(("norm", "verdict"), [(5.0, "advice"), (0.05, "advice"), (0.5, "pass"), (None, "pass")])
def test_clipping_always_or_out_of_reach_is_advised_on(norm, verdict: str):
    clipped = monitors.check_rows(rows(healthy, norm=lambda i: norm or 0.5 + i % 3), SETTINGS, total=1000)[3]
    assert clipped.verdict == verdict
    assert verdict == "pass" or f"--optim.clip {norm:g}" in clipped.remedy


def test_clipping_switched_off_is_not_judged():
    off = {**SETTINGS, "optim": {"clip": "inf", "warmup": 0.1}}
    skipped = monitors.check_rows(rows(healthy), off, total=1000)[3]
    assert (skipped.verdict, skipped.reason) == ("skip", "clipping is off")
    assert "fewer than 20 steps" in monitors.check_rows(rows(healthy)[:10], SETTINGS, total=10)[3].reason


def test_a_term_without_a_share_is_advised_on():
    found = rows(healthy, ce=2.0, aux=1e-4)
    assert judged(found)["terms"] == "advice"
    assert judged(found, small_terms=("aux",))["terms"] == "pass"
    assert judged(rows(healthy, ce=2.0, aux=0.1))["terms"] == "pass"


def test_a_term_that_was_learnt_is_not_small():
    """The value loss of a policy whose task is solved is 60,000 times smaller than at first."""
    found = rows(healthy, policy=0.004)
    for i, row in enumerate(found):
        row["step/value"] = 0.2 * math.exp(-14 * i / len(found))
    assert judged(found)["terms"] == "pass"


@pytest.mark.parametrize(("metric", "train", "val", "verdict"), [
    (Metric("accuracy", "", 0.1, 1.0), 1.0, 0.8, "advice"),
    (Metric("accuracy", "", 0.1, 1.0), 0.8, 0.9, "pass"),
    (Metric("error", "", 4.0, 0.0, higher_is_better=False), 0.1, 1.0, "advice"),
    (Metric("return", "", 0.0, math.inf), 100.0, 95.0, "pass"),
])  # fmt: skip
def test_generalisation_gap(metric: Metric, train: float, val: float, verdict: str):
    assert monitors.Gap(metric, train, val).verdict().verdict == verdict


def test_a_gap_within_the_noise_of_few_samples_is_no_advice():
    accuracy = Metric("agreement", "", 1 / 3, 1.0)
    assert monitors.Gap(accuracy, 0.4, 0.3, samples=48).verdict().verdict == "pass"
    assert monitors.Gap(accuracy, 0.4, 0.3, samples=1000).verdict().verdict == "advice"
    assert monitors.Gap(accuracy, 1.0, 0.6, samples=48).verdict().verdict == "advice"
    assert monitors.Gap(Metric("psnr", "", 10.0, 40.0), 30.0, 20.0, samples=4).verdict().verdict == "advice"


def test_live_resumes_from_its_state():
    """What a checkpoint keeps is enough: cut anywhere, the same spikes are seen."""
    found = rows(lambda t: healthy(t) + 3.0 * (0.7 <= t < 0.71))
    straight, cut = monitors.Live(16, 1000), monitors.Live(16, 1000)
    for row in found:
        straight.see(row["step"], row["step/loss"])
        cut.see(row["step"], row["step/loss"])
        cut = monitors.Live(**json.loads(json.dumps(vars(cut))))
    assert len(straight.spikes) == 1
    assert vars(cut) == vars(straight)


# -------------------------------------------------------------------------------------------------------- the real command
FAST = ("--gates.no-enabled", "--run.no-tensorboard", "--loader.workers", "0", "--no-augment")
UPDATE = "        run.update(stage, step.batches)\n"
BOMB = ('        if run.step == 150 and not run.rehearsal:\n'
        "            for p in stage.model.parameters():\n                p.data.mul_(0.0)\n"
        '        if run.step >= 150 and not run.rehearsal:\n            stage.optimizers["main"].param_groups[0]["lr"] = 0.0\n'
        '            stage.optimizers["main"].param_groups[1]["lr"] = 0.0\n' + UPDATE)  # fmt: skip


def test_a_collapse_stops_the_run(fork, launch):
    """All weights zero from step 150 on: exit 4, with the row, the best weights and the next command."""
    fork((UPDATE, BOMB))
    done = launch("run", "mine.py", *FAST, "--train.epochs", "8", "--optim.lr", "0.01", code=4)
    holds(done.stderr, "collapse (C17): since step 151", "best_val_accuracy", "--optim.lr 0.003")
    found = {v["id"]: v["verdict"] for v in read(done.folder() / "monitors.json")["monitors"]}
    assert found["collapse"] == "fail"
    end = read(done.folder() / "ended.json")
    assert end["exit_code"] == 4
    assert "collapse (C17)" in end["message"]
    page = (done.folder() / "report.html").read_text()
    holds(page, "Stopped itself", "collapse (C17): since step 151")
    assert "it can be resumed" not in page


def test_a_spike_is_named_and_the_run_goes_on(fork, launch):
    """One batch with forty times the loss, late in the run: its step is told, its samples are kept."""
    fork((UPDATE, "        once = 40.0 if step.index == 199 and not run.rehearsal else 1.0\n"
          "        scaled = lambda m, b: {k: v * once for k, v in stage.loss(m, b).items()}\n"
          "        run.update(stage, step.batches, loss=scaled)\n"))  # fmt: skip
    done = launch("run", "mine.py", *FAST, "--train.epochs", "3.5", "--optim.lr", "0.01", code=0)
    assert "step 200: the loss jumps to" in done.stdout
    assert load_file(done.folder() / "postmortem" / "step-200.safetensors")["0/label"].shape == (64,)
    spike = next(m for m in read(done.folder() / "monitors.json")["monitors"] if m["id"] == "spike")
    assert spike["evidence"]["spikes"] == [200]
    assert "advice spike" in done.stdout


def test_patience_ends_the_run_and_survives_a_resume(tmp_path, fork):
    """A metric that stands still: half an epoch after its first value the run ends cleanly, resumed or not."""
    stop = 'run.signal = "SIGTERM" if __import__("os").environ.get("STOP") else None'
    fork(('"accuracy": (table.diag().sum() / table.sum()).item()', '"accuracy": 0.5'),
         (UPDATE, f"        if run.step == 20 and not run.started:\n            {stop}\n{UPDATE}"))  # fmt: skip
    words = "--train.epochs 3 --train.eval-every 0.2 --train.patience 0.55"
    settings = ("mine.py", *FAST, *words.split())
    whole = trainworthy("run", *settings, "--run.out", "whole", cwd=tmp_path, code=0)
    straight = run_folder(tmp_path, "whole/*/2*")
    summary = read(straight / "summary.json")
    assert (summary["steps"], summary["planned_steps"]) == (50, 188)
    assert "stopped early at step 50 of 188" in whole.stdout
    assert "50 of 188 steps (stopped early)" in (straight / "card.md").read_text()
    assert (straight / "checkpoints/classify/step-50").is_dir()

    trainworthy("run", *settings, "--run.out", "cut", cwd=tmp_path, STOP="1", code=5)
    resumed = run_folder(tmp_path, "cut/*/2*")
    trainworthy("resume", resumed, cwd=tmp_path, code=0)
    assert read(resumed / "summary.json")["steps"] == 50
    assert_same_run(resumed, straight)


def test_a_fork_s_monitor_that_raises_is_told_and_costs_nothing():
    def judge(history):
        return history[0]["val/nothing"]

    own = monitors.monitor("mine", rows="", title="what I think")(judge)
    found = monitors._own(own, [{"step": 1.0}])
    assert (found.id, found.verdict) == ("mine", "advice")
    assert "KeyError" in found.measured
