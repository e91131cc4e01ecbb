"""A search over settings: what it declares, what it finds, and that several processes lose and repeat nothing."""

import json
import math
import shlex
import signal
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from trainworthy.core.base import config, settings_check
from trainworthy.core.base.errors import UserError
from trainworthy.core.commands import sweep
from trainworthy.core.recipe import loading
from trainworthy.core.recipe.registry import recipes
from trainworthy.core.report.folder import Folder
from trainworthy.core.report.folder import read as read_folder
from trainworthy.core.sweep import diagnosis, findings, ranges
from trainworthy.core.sweep import space as spaces
from trainworthy.core.sweep.space import Range, Space

from tests.core.test_curves import CURVES, curve
from tests.helpers.commands import assert_refused, environment, holds, read, run_folder, start, trainworthy, wait_until
from tests.vision.planted_classify import LOSS

pytest.importorskip("optuna")
TINY = ("--train.epochs", "0.05", "--train.batch-size", "16", "--gates.no-enabled", "--run.no-tensorboard")
WORKER = """\
import json, math, os, sys, time
from pathlib import Path
from trainworthy.core.commands import sweep
from trainworthy.core.sweep import trials

def run(recipe, words, seeds, folder, **_):
    with open("begun", "a") as log:
        log.write(f"{folder.name} {words[words.index('--optim.lr') + 1]}\\n")
    time.sleep(float(os.environ.get("TRIAL_SECONDS", "0")))
    lr, best = float(words[words.index("--optim.lr") + 1]), float(os.environ.get("BEST", "1e-2"))
    if lr > float(os.environ.get("DIVERGES", "inf")):
        return trials.Outcome(kind="stopped", reason="seed 0, exit 4: 10 non-finite steps in a row")
    worse = 0.2 if "sgd" in words else 0.0
    noise = [0.001 * i for i in seeds]
    return trials.Outcome(values=[1 - worse - 0.1 * (math.log10(lr) - math.log10(best)) ** 2 + n for n in noise], diagnosis="Continue")

trials.run = run
plan = json.loads(Path("plan.json").read_text())
found = sweep.work(Path("sweep"), plan)
Path("found.json").write_text(json.dumps(found, default=str))
"""


def plan(
    home: Path, *, low: float = 1e-4, high: float = 1.0, trials: int = 12, scientific: Any = None, seeds: int = 1,
    bayes: bool = False, storage: str = "",
) -> Space:  # fmt: skip
    """What `make_plan` would write, for a recipe whose runs are a formula."""
    space = Space(tuple((scientific or {}).items()), (Range("optim.lr", low, high, log=True),))
    declared = {"recipe": "vision/classify", "fixed": ["--gates.no-enabled"], **space.plain(), "trials": trials, "seeds": seeds,
                "bayes": bayes, "metric": "accuracy", "higher_is_better": True}  # fmt: skip
    (home / "plan.json").write_text(json.dumps({"declared": declared, "storage": storage, "name": "test"}))
    return space


def worker(home: Path, **env: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", WORKER], cwd=home, env=environment(**env), stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)  # fmt: skip


def searched(home: Path, **env: str) -> dict[str, Any]:
    child = worker(home, **env)
    out = child.communicate(timeout=120)[0]
    assert child.returncode == 0, out
    return read(home / "found.json") | {"out": out}


# --------------------------------------------------------------------------------------------------------- declarations
def test_points_are_spread_paired_and_a_function_of_the_number():
    space = Space(
        (("optim.name", ("adamw", "sgd")),), (Range("optim.lr", 1e-4, 1e-1, log=True), Range("k", 1, 8, whole=True))
    )
    points = [space.point(n) for n in range(40)]
    assert points == [space.point(n) for n in range(40)]
    for a, b in zip(points[::2], points[1::2], strict=True):  # the same conditions for both compared values
        assert (a.pop("optim.name"), b.pop("optim.name")) == ("adamw", "sgd")
        assert a == b
    exponents = sorted(math.log10(p["optim.lr"]) for p in points[::2])
    assert max(b - a for a, b in pairwise(exponents)) < 0.6  # three decades, 20 points: 0.15 on average
    assert {p["k"] for p in points[::2]} == set(range(1, 9))
    assert len({p["optim.lr"] for p in points[::2]}) == 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nuisance", "optim.lrr=1:2"), "unknown setting optim.lrr"),
        (("--nuisance", "optim.lr=1e-1:1e-4"), "is empty"),
        (("--nuisance", "optim.lr=0:1"), "low > 0 on a log scale"),
        (("--nuisance", "optim.lr="), "needs a setting and its values"),
        (("--scientific", "optim.lr"), "needs a setting and its values"),
        (("--nuisance", "train.batch_size"), "no range is known for train.batch_size"),
        (("--nuisance", "optim.warmup", "--range-test"), "--range-test gives the range of a peak rate"),
        (("--nuisance", "optim.lr=a:b"), "the range of optim.lr cannot be read"),
        (("--scientific", "optim.name=adamw"), "has nothing to compare with"),
        (("--scientific", "optim.lr=1,2", "--nuisance", "optim.lr=1:2"), "declared twice"),
        (("--optim.lr", "1", "--nuisance", "optim.lr=1:2"), "is fixed and searched"),
        (("--run.seed", "3"), "a sweep sets run.seed itself"),
        (("--trials", "none"), "--trials needs a number"),
        (("--space", "none.yaml"), "cannot read the settings in none.yaml"),
        (("--nuisance", "optim.clip=-2:-1"), "--optim.clip must be positive"),
    ],
)
def test_bad_declarations_get_one_message(words: tuple[str, ...], message: str, tmp_path: Path):
    assert_refused(trainworthy("sweep", "vision/classify", *words, cwd=tmp_path), message)
    assert not list(tmp_path.rglob("sweep-*"))


def test_a_file_declares_roles(tmp_path: Path):
    (tmp_path / "s.yaml").write_text("scientific: {optim.name: [adamw, sgd]}\nnuisance:\n  optim.lr: {low: 1e-4, high: 1e-1}\n"
                                     "fixed: {train.epochs: 0.1}\ntrials: 6\n")  # fmt: skip
    found = spaces.read_file(tmp_path / "s.yaml")
    assert spaces.words(found["fixed"]) == ["--train.epochs", "0.1"]
    for text, words in (("nuisances: {}", "unknown entry nuisances"), ("trials: many", "trials in .* needs a number"),
                        ("seeds: 0", "seeds in .* needs a number"), ("fixed: 3", "fixed in .* is not a mapping")):  # fmt: skip
        (tmp_path / "s.yaml").write_text(f"{text}\n")
        with pytest.raises(UserError, match=words):
            spaces.read_file(tmp_path / "s.yaml")


def test_ranges_that_are_known_are_listed_and_used_without_being_typed(tmp_path: Path):
    found = json.loads(trainworthy("sweep", "rl/ppo", "--ranges", "--json", cwd=tmp_path).stdout)
    assert (found["optim.lr"]["low"], found["optim.lr"]["high"], found["optim.lr"]["log"]) == (3.3e-5, 3e-2, True)
    assert (found["clip_range"]["low"], found["clip_range"]["high"], found["clip_range"]["log"]) == (0.1, 0.4, False)
    assert found["ent_coef"]["log"]
    assert found["update_epochs"]["whole"]
    shown = trainworthy("sweep", "rl/ppo", "--ranges", cwd=tmp_path)
    holds(shown.stdout, "clip_range", "next   trainworthy sweep rl/ppo --nuisance optim.lr")
    _, plan = sweep.make_plan(["rl/ppo", "--nuisance", "optim.lr", "--nuisance", "ent_coef"])
    assert [(r["name"], r["low"], r["high"]) for r in plan["declared"]["nuisance"]] == [
        ("optim.lr", 3.3e-5, 3e-2),
        ("ent_coef", 1e-5, 0.1),
    ]


def test_a_file_of_settings_is_spelled_out_in_the_plan(tmp_path: Path):
    """It may change while the study goes on. What it says of a searched setting gives way to the range."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "settings: {optim: {lr: 0.01, betas: [0.8, 0.9], clip: .inf}, train: {epochs: 2}, augment: false}\n"
    )
    _, plan = sweep.make_plan(
        ["vision/classify", "--config", str(file), "--model", "small", "--nuisance", "optim.lr=1e-4:1e-1"]
    )
    fixed = plan["declared"]["fixed"]
    file.unlink()
    cfg, _ = config.parse(loading.load("vision/classify").module, fixed, prog="test")
    assert (cfg.optim.lr, cfg.optim.betas, cfg.optim.clip) == (0.003, (0.8, 0.9), math.inf)
    assert (cfg.train.epochs, cfg.augment) == (2, False)


@pytest.mark.parametrize("recipe", [e.id for e in recipes()])
def test_the_ranges_of_a_recipe_are_of_its_settings_and_both_ends_can_be_run(recipe: str):
    """Each with the settings of `tiny`. Stages of several have the rates that they are trained with."""
    loaded = loading.load(recipe)
    cfg, _ = config.parse(loaded.module, [], prog="test")
    known = ranges.known(cfg)
    assert set(ranges.rates(cfg)) <= set(known)
    assert {n for n in ranges.declared(type(cfg)) if not n.startswith("optim.")} <= set(known)
    for name, given in known.items():
        one = spaces.ranged(cfg, name, given)
        for end in (one.at(0.0), one.at(1.0)):
            changed, _ = config.parse(loaded.module, spaces.words({name: end}), prog="test")
            settings_check.check_values(changed, processes=1)


def test_wider_ranges_stay_possible():
    assert Range("drop", 0.0, 0.2).wider(up=True).words() == "drop=0:0.3"
    assert Range("gamma", 0.9, 0.9999).wider(up=True).high == 1.0
    assert Range("warmup", 0.0, 0.2).wider(up=False) == Range("warmup", 0.0, 0.2)  # no room, so nothing is offered
    assert Range("k", 1, 8, whole=True).wider(up=True).words() == "k=1:12"
    assert Range("optim.lr", 0.1, 1.0, log=True).wider(up=True).words() == "optim.lr=0.1:3.16"
    assert Range("scale", 1.0, 8.0, log=True).words() == "scale=1:8:log"
    assert Range("name", values=("a", "b")).words() == "name=a,b"


def test_a_best_trial_inside_its_range_but_beyond_every_other_is_said_so():
    one = Range("optim.lr", 1e-4, 1e-1, log=True)
    rows = [findings.Row(n, {"optim.lr": lr}, "done", lr) for n, lr in enumerate((1e-3, 2e-4, 4e-3, 2e-2))]
    assert (
        findings.at_edge(one, rows[3], rows)
        .words()
        .startswith("The best trial has optim.lr 0.02, the highest tried: the best value")
    )
    rows[3].point["optim.lr"] = 9e-2
    assert "optim.lr 0.09, at the upper end of its range" in findings.at_edge(one, rows[3], rows).words()
    assert findings.at_edge(one, rows[0], rows) is None


def folder_of(facts: dict, rows: list[dict], steps: list[dict]) -> Folder:
    split = {"val": {"samples": facts["n_val"]}} | ({} if facts["own_samples"] else {"train": {}})
    return Folder(
        Path("run"), {"settings": facts["settings"]}, {}, {"splits": split}, {}, facts["summary"], steps, rows, [], {}
    )


@pytest.mark.parametrize("path", CURVES, ids=lambda p: p.stem)
def test_what_is_wrong_with_recorded_curves(path: Path):
    """Beside the advice: healthy, noisy and saturated runs have nothing; the rate that jumped and the plateau do."""
    facts, rows = curve(path)
    found = "; ".join(diagnosis.faults(folder_of(facts, rows, [])))
    wanted = {"collapsed-rate-jump": ("the training loss rises", "evaluations jump", "the rate is too high late"),
              "plateau-adamw": ("the training loss rises", "the rate is too high late")}  # fmt: skip
    assert bool(found) is (path.stem in wanted), found
    assert all(words in found for words in wanted.get(path.stem, ())), found


def test_noise_from_step_to_step_is_seen_in_a_real_run_whose_rate_stays_high(tmp_path: Path):
    """rl recipes are left out; a healthy run of the same length has none."""
    words = (
        "run",
        "vision/classify",
        "--max-steps",
        "60",
        "--train.batch-size",
        "2",
        "--gates.no-enabled",
        "--run.no-tensorboard",
    )
    trainworthy(
        *words, "--optim.schedule", "constant", "--optim.warmup", "0", "--optim.lr", "0.1", cwd=tmp_path, code=0
    )
    found = diagnosis.faults(read_folder(run_folder(tmp_path)))
    assert any("noisy steps" in w for w in found), found
    assert any("the rate is too high late: still 100% of its peak" in w for w in found), found


# ------------------------------------------------------------------------------------------------------------- findings
@pytest.mark.slow
def test_a_planted_best_rate_is_found_and_infeasible_trials_have_no_score(tmp_path: Path):
    plan(tmp_path, scientific={"optim.name": ("adamw", "sgd")}, trials=24, seeds=2)
    found = searched(tmp_path, BEST="1e-2", DIVERGES="0.2")
    best = found["best"]
    assert best["point"]["optim.name"] == "adamw"
    assert abs(math.log10(best["point"]["optim.lr"]) + 2) < 0.4  # four decades, twelve points each
    assert not found["edges"], found["edges"]
    lost = [t for t in found["trials"] if t["state"] == "infeasible"]
    assert lost
    assert all(t["value"] is None and t["point"]["optim.lr"] > 0.2 for t in lost)
    assert "optim.name adamw is ahead of optim.name sgd" in found["compared"][0]
    assert "excludes 0" in found["compared"][0]
    page = (tmp_path / "sweep" / "report.html").read_text()
    holds(page, "Isolation plots", "non-finite steps", "trial 23")


@pytest.mark.slow
def test_the_bayesian_search_begins_evenly_and_then_stays_near_the_best(tmp_path: Path):
    """In a SQLite file, which a second process joins."""
    space = plan(tmp_path, trials=24, bayes=True, storage="study.db")
    found = searched(tmp_path, BEST="1e-2")
    assert (tmp_path / "study.db").stat().st_size > 0
    rates = [t["point"]["optim.lr"] for t in found["trials"]]
    assert rates[:8] == [space.point(n)["optim.lr"] for n in range(8)]
    assert rates[8:] != [space.point(n)["optim.lr"] for n in range(8, 24)]
    early, late = (statistics.fmean(abs(math.log10(r) + 2) for r in part) for part in (rates[:8], rates[-8:]))
    assert late < early, rates
    assert searched(tmp_path)["trials"] == found["trials"]


@pytest.mark.slow
def test_a_range_that_was_cut_too_short_is_said(tmp_path: Path):
    plan(tmp_path, low=1e-5, high=1e-3)
    found = searched(tmp_path, BEST="1e-1")
    (edge,) = found["edges"]
    assert edge["up"]
    assert edge["wider"] == "optim.lr=1e-05:0.01"
    assert "the best value may be beyond it" in found["out"]
    command = "trainworthy sweep vision/classify --gates.no-enabled --nuisance optim.lr=1e-05:0.01 --trials 12"
    assert found["wider_command"] == command
    assert f"next   {command}" in found["out"]
    assert command in (tmp_path / "sweep" / "report.html").read_text()
    _, again = sweep.make_plan(shlex.split(command)[2:])  # it can be typed as it is
    (searched_again,) = again["declared"]["nuisance"]
    assert (searched_again["low"], searched_again["high"], searched_again["log"]) == (1e-5, 1e-2, True)


# ---------------------------------------------------------------------------------------------------- several processes
@pytest.mark.slow
def test_three_processes_killed_and_resumed_lose_no_trial_and_repeat_none(tmp_path: Path):
    plan(tmp_path, trials=12)
    workers = [worker(tmp_path, TRIAL_SECONDS="0.5") for _ in range(3)]
    log = tmp_path / "begun"
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= 4)
    workers[0].send_signal(signal.SIGKILL)
    workers[1].send_signal(signal.SIGKILL)
    out = workers[2].communicate(timeout=120)[0]
    for one in workers[:2]:
        one.communicate()
    assert workers[2].returncode == 0, out
    found = searched(tmp_path)  # resumed: whatever is left
    assert [t["number"] for t in found["trials"]] == list(range(12))
    assert {t["state"] for t in found["trials"]} == {"done"}
    rates = [t["point"]["optim.lr"] for t in found["trials"]]
    assert len(set(rates)) == 12
    begun = [row.split() for row in log.read_text().splitlines()]
    assert len(begun) <= 12 + 2  # those that were killed in the middle began twice, with the settings they had
    for number, rate in begun:
        assert float(rate) == rates[int(number)]


@pytest.mark.verify
def test_a_real_sweep_its_page_and_a_study_with_changed_settings(tmp_path: Path):
    command = ("sweep", "vision/classify", *TINY, "--nuisance", "optim.lr=1e-4:1e-1", "--name", "mine", "--trials")
    done = trainworthy(*command, 2, "--json", cwd=tmp_path, code=0)
    found = json.loads(done.stdout)
    assert [t["state"] for t in found["trials"]] == ["done", "done"]
    home = tmp_path / "runs" / "vision-classify" / "sweep-mine"
    scores = [read(home / "trials" / f"{n:04d}" / "seed-0" / "summary.json")["reported"]["accuracy"] for n in (0, 1)]
    assert found["best"]["value"] == max(scores)
    told = read(home / "trials" / f"{found['best']['number']:04d}" / "seed-0" / "summary.json")["test"]["metrics"][
        "accuracy"
    ]
    assert f"On the test split (1,000 samples), read once, for this trial alone: {told:.4f}" in " ".join(
        found["summary"]
    )
    assert "test" not in found["trials"][0]
    assert (home / "report.html").is_file()
    for trial in found["trials"]:
        assert trial["cost"]["device_hours"] > 0
    assert found["cost"]["device_hours"] == pytest.approx(sum(t["cost"]["device_hours"] for t in found["trials"]))
    changed = trainworthy(*command, 2, "--optim.clip", "2", cwd=tmp_path)
    assert (changed.returncode, "was made with other settings" in changed.stderr) == (2, True), changed.stderr
    assert "--optim.clip" in changed.stderr
    again = trainworthy("sweep", home, "--json", cwd=tmp_path)  # nothing is left to do
    assert json.loads(again.stdout)["trials"] == found["trials"]
    more = trainworthy(
        "sweep", home, "--trials", 3, "--json", cwd=tmp_path, code=0
    )  # a longer study goes on in the sequence
    longer = json.loads(more.stdout)["trials"]
    assert (longer[:2], len(longer)) == (found["trials"], 3)
    assert "takes no settings" in trainworthy("sweep", home, "--optim.clip", "2", cwd=tmp_path).stderr
    (home / "study.journal").write_text("not a journal\n")
    assert_refused(trainworthy("sweep", home, cwd=tmp_path), "cannot be opened")
    (home / "sweep.json").write_text('{"declared": {"rec')
    assert_refused(trainworthy("sweep", home, cwd=tmp_path), "is not a sweep folder")


@pytest.mark.verify
def test_each_structure_passes_its_gates_once_and_trials_of_one_that_fails_are_infeasible(fork, tmp_path: Path):
    """A fork whose loss is wrong with one of two compared optimisers: its trials have no score and are not run."""
    fork((LOSS, LOSS.replace('"sum"', '"mean" if cfg.optim.name == "sgd" else "sum"')))
    space = ("--scientific", "optim.name=adamw,sgd", "--nuisance", "optim.lr=1e-3:1e-2", "--trials", 4)
    done = trainworthy(
        "sweep",
        "mine.py",
        "--train.epochs",
        "0.3",
        "--run.no-tensorboard",
        *space,
        "--name",
        "both",
        "--json",
        cwd=tmp_path,
        code=0,
    )
    found = json.loads(done.stdout)
    assert [(t["point"]["optim.name"], t["state"]) for t in found["trials"]] == [
        ("adamw", "done"),
        ("sgd", "infeasible"),
    ] * 2
    assert found["best"]["point"]["optim.name"] == "adamw"
    home = next(tmp_path.glob("runs/*/sweep-both"))
    verdicts = {path.stem: read(path)["failed"] for path in (home / "gates").glob("*.json")}
    assert (len(verdicts), verdicts["optim.name=adamw"]) == (2, "")
    assert verdicts["optim.name=sgd"].startswith("initial-loss")
    assert len(list((home / "gates").rglob("gates.json"))) == 2, "a structure was checked twice"
    assert all("gate failed: initial-loss" in t["reason"] for t in found["trials"] if t["state"] == "infeasible")
    assert not list((home / "trials").glob("000[13]/seed-*"))
    assert "gate failed: initial-loss" in (home / "report.html").read_text()


def test_a_sweep_without_a_feasible_trial_runs_its_command_and_exits_3(tmp_path: Path):
    """The verdict of the only structure is there already, as another process would have left it."""
    home = tmp_path / "runs" / "vision-classify" / "sweep-none"
    (home / "gates").mkdir(parents=True)
    (home / "gates" / "as_the_preset.json").write_text(json.dumps({"structure": {}, "failed": "overfit"}))
    done = trainworthy("sweep", "vision/classify", "--trials", 2, "--name", "none", "--on-end", "env | grep ^TRAINWORTHY_ > ended; exit 7",
                       cwd=tmp_path, code=3)  # fmt: skip
    assert "no trial of 2 is feasible, first: gate failed: overfit" in done.stderr
    assert not (home / "trials" / "0000" / "seed-0").exists()
    said = dict(line.split("=", 1) for line in (tmp_path / "ended").read_text().splitlines())
    assert (said["TRAINWORTHY_EXIT_CODE"], said["TRAINWORTHY_ENDED"]) == ("3", "gate failed")
    wrong = trainworthy("sweep", "vision/classify", "--nuisance", "none=1:2", "--on-end", "touch wrong", cwd=tmp_path)
    assert (wrong.returncode, (tmp_path / "wrong").exists()) == (2, False)


@pytest.mark.verify
def test_three_real_commands_killed_and_resumed(tmp_path: Path):
    """Three processes work on one study by its name; two are killed in the middle of a trial, runs and all. Whoever comes next
    goes on with their trials: same numbers, same settings."""
    command = ("sweep", "vision/classify", *TINY, "--nuisance", "optim.lr=1e-4:1e-1", "--trials", 5, "--name", "shared")
    workers = [start(*command, cwd=tmp_path) for _ in range(3)]
    home = tmp_path / "runs" / "vision-classify" / "sweep-shared"
    wait_until(lambda: len(list(home.glob("trials/*/seed-0/args.json"))) >= 3, seconds=400)
    begun = {p.parts[-3]: read(p)["argv"] for p in home.glob("trials/*/seed-0/args.json")}
    for one in workers[:2]:
        for process in (*psutil.Process(one.pid).children(recursive=True), psutil.Process(one.pid)):
            process.kill()
        one.communicate()
    out = workers[2].communicate(timeout=500)[0]
    assert workers[2].returncode == 0, out
    done = trainworthy("sweep", home, "--json", cwd=tmp_path, code=0)
    found = json.loads(done.stdout)
    assert [(t["number"], t["state"]) for t in found["trials"]] == [(n, "done") for n in range(5)]
    assert len({t["point"]["optim.lr"] for t in found["trials"]}) == 5
    for number, argv in begun.items():
        assert float(argv[argv.index("--optim.lr") + 1]) == found["trials"][int(number)]["point"]["optim.lr"]


@pytest.mark.verify
def test_the_range_test_gives_the_range_of_the_rate(tmp_path: Path):
    command = ("sweep", "vision/classify", *TINY, "--range-test", "--trials", 1, "--name", "tested", "--json")
    done = trainworthy(*command, cwd=tmp_path, code=0)
    assert "the range test of optim.lr suggests" in done.stderr
    plot = next(tmp_path.glob("runs/vision-classify/checks/*/plots/range_test_classify.json"))
    suggestion = read(plot)["suggestion"]
    (searched_over,) = read(tmp_path / "runs" / "vision-classify" / "sweep-tested" / "sweep.json")["declared"][
        "nuisance"
    ]
    assert searched_over["low"] == pytest.approx(suggestion / 30, rel=0.05)
    assert searched_over["low"] < suggestion < searched_over["high"] <= 31 * suggestion
    trainworthy(*command, cwd=tmp_path, code=0)  # joins without testing again
    assert len(list(tmp_path.glob("runs/vision-classify/checks/*"))) == 1
