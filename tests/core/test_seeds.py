"""Several seeds: side by side through the real command, what they say together, and what single ones may not say."""

import json
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from trainworthy.core.base.console import Console
from trainworthy.core.base.errors import UserError
from trainworthy.core.report import groups, intervals, seeds
from trainworthy.core.session import multi_seed

from tests.helpers.commands import assert_refused, read, run_folder, start, trainworthy, wait_until
from tests.vision.planted_classify import LOOP

TINY = ("--train.epochs", "0.1", "--train.batch-size", "16", "--gates.no-enabled", "--run.no-tensorboard")  # 25 steps


def group(folder: Path, values: list[float], metric: str = "accuracy", *, weights: str = "final") -> Path:
    """A group of finished seeds on disk."""
    folder.mkdir()
    plan = {"recipe": "vision/classify", "argv": [], "seeds": list(range(len(values))), "at_once": 1}
    (folder / "seeds.json").write_text(json.dumps(plan))
    for seed, value in enumerate(values):
        home = folder / f"seed-{seed}"
        home.mkdir()
        summary = {"metric": metric, "question": "which?", "higher_is_better": True, "floor": 0.1, "ceiling": 1.0,
                   "best_known": "", "steps": 10, "epochs": 1, "train_seconds": 1.0, "metrics": {metric: value}, "final": {metric: value},
                   "reported": {"weights": weights, "step": 10, metric: value}, "baselines": {"majority": {metric: 0.1}}}  # fmt: skip
        (home / "summary.json").write_text(json.dumps(summary))
    return folder


# -------------------------------------------------------------------------------------------------------------- numbers
def test_quantiles_are_those_of_the_tables():
    """Two-sided 95%, from any table of Student's t; 2.5 degrees of freedom from scipy."""
    known = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 30: 2.042, 2.5: 3.575}
    assert {k: round(intervals.student(k), 3) for k in known} == known


def test_welch_agrees_with_scipy():
    """scipy.stats.ttest_ind([2, 4, 5, 6], [1, 2, 3], equal_var=False).confidence_interval()"""
    d = intervals.welch([1, 2, 3], [2, 4, 5, 6])
    assert (d.value, round(d.low, 5), round(d.high, 5), d.real) == (2.25, -0.4246, 4.9246, False)
    same = intervals.welch([0.5, 0.5], [0.7, 0.7])
    assert (same.low, same.high, same.real) == (same.value, same.value, True)


def test_interquartile_means_agree_with_scipy():
    """scipy.stats.trim_mean(v, 0.25), and scipy.stats.bootstrap of it (percentile, 20,000 draws)."""
    v = [1.0, 2.0, 3.0, 4.0, 100.0, 7.0, 9.0]
    assert intervals.iqm(np.array(v)) == pytest.approx(5.0)
    assert intervals.iqm_interval(v) == pytest.approx((2.2, 43.8), abs=0.5)
    assert intervals.iqm_interval(v) == intervals.iqm_interval(v)
    assert intervals.iqm_interval([3.0] * 5) == (3.0, 3.0)


def test_a_profile_is_the_share_that_gets_so_far():
    assert intervals.profile([5.0, 1.0, 3.0, 3.0]) == ([1.0, 3.0, 3.0, 5.0], [1.0, 0.75, 0.75, 0.25])


def test_from_four_seeds_on_a_group_says_what_its_middle_is(tmp_path: Path):
    """One seed of five that failed moves the mean, hardly the interquartile mean; the page shows how many reach what."""
    found = seeds.write(group(tmp_path / "a", [0.99, 0.98, 0.97, 0.98, 0.1]))
    assert found["mean"] == pytest.approx(0.804)
    assert found["iqm"] == pytest.approx(0.97667, abs=1e-5)
    low, high = found["iqm_interval_95"]
    assert low < 0.8 < found["iqm"] < high <= 0.99
    assert "interquartile mean" in (tmp_path / "a" / "card.md").read_text()
    assert "Performance profile" in (tmp_path / "a" / "report.html").read_text()
    assert "iqm" not in seeds.write(group(tmp_path / "b", [0.99, 0.98, 0.97]))


def test_a_group_says_what_its_spread_means(tmp_path: Path):
    found = seeds.write(group(tmp_path / "a", [0.994, 0.984, 0.991]))
    assert found["mean"] == pytest.approx(0.98967, abs=1e-5)
    assert found["interval_95"] == pytest.approx((0.97692, 1.00241), abs=1e-5)
    assert found["noise"] == pytest.approx(0.0312, abs=1e-4)
    card = (tmp_path / "a" / "card.md").read_text()
    assert "by 0.0312 by chance" in card
    seeds.write(group(tmp_path / "b", [0.9, 0.8], weights="best"))
    assert "the number is optimistic" in (tmp_path / "b" / "card.md").read_text()


def test_a_group_shows_the_verdicts_of_every_gate_by_seed(tmp_path: Path):
    """Also of a seed that a gate stopped, and that has no score."""
    home = group(tmp_path / "a", [0.9, 0.8, 0.7])
    (home / "seed-2" / "summary.json").unlink()
    for seed, last in enumerate(("pass", "pass", "fail")):
        verdicts = (("schema", "pass"), ("init", "skip"), ("overfit", last))
        rows = [{"id": name, "stage": "classify", "verdict": verdict} for name, verdict in verdicts]
        (home / f"seed-{seed}" / "gates.json").write_text(json.dumps({"enabled": True, "gates": rows}))
    found = seeds.write(home)
    words = "seeds 0, 1: 2 of 3 gates passed, 1 skipped · seed 2: 1 of 3 gates passed, 1 skipped; fail: overfit"
    assert groups.gates_in_words(found) == words
    page = (home / "report.html").read_text()
    assert words in page
    assert words in (home / "card.md").read_text()
    assert words in groups.as_text(found)
    first, same = page.split("2 gates with the same verdict at every seed")
    assert re.search(r"overfit</th><td>pass</td><td>pass</td><td>fail</td>", first)
    assert re.search(r"init</th><td>skip</td><td>skip</td><td>skip</td>", same)


def test_seeds_in_several_words_are_refused_with_the_right_ones():
    with pytest.raises(UserError, match="one word") as error:
        multi_seed.take_seeds(["rl/ppo", "--seeds", "0", "1", "--max-steps", "4"])
    assert "--seeds 0,1" in str(error.value)
    assert multi_seed.take_seeds(["rl/ppo", "--seeds", "5", "--max-steps", "4"]) == (
        ["rl/ppo", "--max-steps", "4"],
        "5",
    )


@pytest.mark.parametrize("asked", ["1", "0", "3,3", "4,", "many", "-2"])
def test_one_seed_is_not_several(asked: str):
    with pytest.raises(UserError, match="--seeds needs"):
        multi_seed._seeds(asked, 0)


# -------------------------------------------------------------------------------------------------------------- compare
def test_compare_gives_an_interval_and_refuses_single_seeds(tmp_path: Path):
    a, b = group(tmp_path / "a", [0.90, 0.91, 0.92]), group(tmp_path / "b", [0.95, 0.96, 0.97])
    said = trainworthy("compare", a, b, cwd=tmp_path, code=0)
    assert re.search(r"difference \+0.0500, 95% interval \+0.02\d\d to \+0.07\d\d", said.stdout), said.stdout
    assert "second is better" in said.stdout
    assert "do not show a difference" in groups.compare(a, group(tmp_path / "c", [0.90, 0.91, 0.93])).words()
    single = tmp_path / "single"
    single.mkdir()
    (single / "args.json").write_text("{}")
    for other, words in ((single, "mostly luck"), (group(tmp_path / "d", [0.9]), "too few"), (tmp_path, "no group"),
                         (group(tmp_path / "e", [0.1, 0.2], "loss"), "different metrics")):  # fmt: skip
        with pytest.raises(UserError, match=words):
            groups.compare(a, other)


# ------------------------------------------------------------------------------------------------------ the real command
@pytest.mark.parametrize(("visible", "each", "places"), [("", 1, ["0", "1", "2", "3"]), ("", 2, ["0,1", "2,3"]), ("", 3, ["0,1,2"]),
                                                         ("4,5,7", 1, ["4", "5", "7"]), ("", 0, [])])  # fmt: skip
def test_seeds_share_out_the_accelerators(visible: str, each: int, places: list[str], tmp_path: Path, monkeypatch):
    """Five seeds on four devices, or on those that are visible: each seed gets as many as it has processes, and no two share one."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(visible.split(",")) if visible else 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert multi_seed.devices(each) == places
    if not each:
        return
    say = "import os, time; time.sleep(0.1); print(os.environ['CUDA_VISIBLE_DEVICES'], time.time())"
    jobs = [multi_seed.Job(seed, tmp_path / f"seed-{seed}", [sys.executable, "-c", say]) for seed in range(5)]
    multi_seed.work(jobs, len(places), [], Console(quiet=True), lambda job: "", each=each)
    used = [job.log.read_text().split()[0] for job in jobs]
    assert {*used} == {*places}
    assert used[: len(places)] == places


def test_a_failing_seed_is_told_and_the_others_go_on(tmp_path: Path, fork):
    fork((LOOP, '    if cfg.run.seed == 7:\n        raise RuntimeError("planted")\n' + LOOP))
    done = trainworthy("run", "mine.py", "--seeds", "0,1,7", *TINY, cwd=tmp_path, code=1)
    folder = run_folder(tmp_path, "runs/mine/seeds-*")
    assert re.search(r"seed 7  exit 1: RuntimeError: planted\n +look at it: tail -n 30 .*seed-7.log", done.stdout), (
        done.stdout
    )
    found = read(folder / "seeds.json")
    assert (found["seeds"], list(found["values"]), found["missing"]) == ([0, 1, 7], ["0", "1"], [7])
    for seed in (0, 1):
        home = folder / f"seed-{seed}"
        assert read(home / "args.json")["settings"]["run"]["seed"] == seed
        assert f"{found['values'][str(seed)]:.4f}" in done.stdout
        assert (home / "report.html").is_file()
    assert found["mean"] == pytest.approx(sum(found["values"].values()) / 2)
    page = (folder / "report.html").read_text()
    assert "1 of 3 seeds did not finish, or have no finite score: 7" in page
    assert page.count("<svg") == 2
    assert not re.search(r'(src|href)="(http|//)', page)
    (folder / "report.html").unlink()
    trainworthy("report", folder, cwd=tmp_path, code=0)
    assert (folder / "report.html").is_file()


def test_a_group_without_any_score_has_a_page_that_says_why(tmp_path: Path, fork):
    fork((LOOP, '    raise RuntimeError(f"planted at seed {cfg.run.seed}")\n' + LOOP))
    done = trainworthy("run", "mine.py", "--seeds", "0,1", *TINY, cwd=tmp_path, code=1)
    folder = run_folder(tmp_path, "runs/mine/seeds-*")
    assert "no seed of 2 has a score" in done.stdout, done.stdout
    assert f"report {folder.relative_to(tmp_path) / 'report.html'}" in done.stdout
    assert f"then: trainworthy resume {folder.relative_to(tmp_path)}" in done.stdout
    for name in ("report.html", "card.md"):
        text = (folder / name).read_text()
        assert "RuntimeError: planted at seed 0" in text, text
        assert "RuntimeError: planted at seed 1" in text
    assert 'href="seed-0/report.html"' in (folder / "report.html").read_text()
    trainworthy("report", folder, cwd=tmp_path, code=0)


@pytest.mark.verify
def test_a_band_names_its_next_step(tmp_path: Path, fork):
    fork()
    done = trainworthy(
        "reference", "mine.py", "--seeds", "3", "--at-once", "1", "--to", "band.json", *TINY, cwd=tmp_path, code=0
    )
    assert (tmp_path / "band.json").is_file()
    last = done.stdout.splitlines()[-1]
    assert last.startswith("next   cp band.json "), done.stdout
    assert "then: trainworthy run mine.py --train.epochs 0.1" in last


@pytest.mark.verify
def test_stopped_seeds_go_on(tmp_path: Path):
    argv = ("run", "vision/classify", "--seeds", "2", *TINY, "--train.epochs", "2", "--loader.workers", "0")
    child = start(*argv, cwd=tmp_path)

    def both_train() -> bool:
        logs = list(tmp_path.glob("runs/*/seeds-*/seed-*.log"))
        return len(logs) == 2 and all("epoch " in log.read_text() for log in logs)

    wait_until(both_train, pause=0.1)
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=120)
    assert child.returncode == 5, said
    folder = run_folder(tmp_path, "runs/vision-classify/seeds-*")
    assert f"trainworthy resume {folder.relative_to(tmp_path)}" in said
    assert len(list(folder.glob("seed-*/checkpoints/classify/latest/info.json"))) == 2
    assert not list(folder.glob("seed-*/summary.json"))
    trainworthy("resume", folder, cwd=tmp_path, code=0)
    assert list(read(folder / "seeds.json")["values"]) == ["0", "1"]
    assert all("resumed from step-" in log.read_text() for log in folder.glob("*.log"))


def test_gates_at_several_seeds_say_which_spoke_at_which(tmp_path: Path, fork):
    fork(("F.cross_entropy(logits, batch", "(1 + (cfg.run.seed == 4)) * F.cross_entropy(logits, batch"))
    done = trainworthy("check", "mine.py", "--seeds", "3,4", "--only", "schema,initial-loss", cwd=tmp_path, code=3)
    assert re.search(r"seed 3  2 of 2 gates passed  \[", done.stdout), done.stdout
    assert re.search(r"seed 4  1 of 2 gates passed, 1 failed: runs/mine/checks/\S+-seed-4/report.html", done.stdout)
    assert re.search(r"FAIL   initial-loss \(\S+\) at 1 of 2 seeds\n +seed 4 +.*4\.6\d*", done.stdout), done.stdout
    assert "\n1 of 2 gates passed at each of 2 seeds, 0 skipped at each" in done.stdout
    assert len(list(tmp_path.glob("runs/mine/checks/*-seed-*/report.html"))) == 2


@pytest.mark.parametrize("verb", ["run", "check"])
def test_seeds_of_what(verb: str, tmp_path: Path):
    assert_refused(trainworthy(verb, "--seeds", "2", cwd=tmp_path), f"{verb} what?")
