"""`trainworthy.check` of a `Loop`: healthy loops of many shapes are quiet, planted bugs are stopped with their cause."""

import copy
import multiprocessing
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainworthy.core.base.errors import GateFailed, UserError
from trainworthy.core.recipe.stage import Expect

import trainworthy
from tests.conftest import ROOT
from tests.guard import loops
from tests.guard.loops import BUGS, LOOPS
from tests.helpers.commands import environment, read

QUICK = {"seconds": 0.3}


def check(name: str, bug: str = "", *, only: str = "", waive: dict[str, str] | None = None, seed: int = 0, **more):
    """The result of one of the loops."""
    options = {**QUICK, **more}
    return trainworthy.check(lambda: LOOPS[name](bug=bug, **options), only=only, waive=waive, seed=seed, raises=False)


@pytest.mark.parametrize("name", LOOPS)
def test_a_healthy_loop_is_quiet(name: str):
    result = check(name)
    assert result.ok, result.table()
    passed = {v.id for v in result.verdicts if v.verdict == "pass"}
    assert {"finite", "gradients", "wiring"} <= passed, result.table()
    whole = [v for v in result.verdicts if v.id in ("ending", "progress")]
    assert [v.verdict for v in whole] == ["skip", "skip"]
    assert all("a Loop is one epoch" in v.reason for v in whole)  # and not that a script had no time


@pytest.mark.parametrize(("name", "bug"), BUGS, ids=lambda x: x)
def test_a_bug_in_a_loop_is_stopped(name: str, bug: str):
    result = check(name, bug)
    id, words = BUGS[name, bug]
    assert id in [v.id for v in result.failed], result.table()
    assert words in result.table(result.failed)


@pytest.mark.verify
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", LOOPS)
def test_a_healthy_loop_is_quiet_at_other_seeds(name: str, seed: int):
    result = check(name, seed=seed, seconds=2.0)
    assert result.ok, result.table()


def test_expect_passes_on_what_a_loop_has():
    """Reasons become skips, `overfit_metric` judges evaluate() after training on eight samples."""
    expect = Expect(batch_dependence="batch statistics on purpose", overfit_metric=0.95, overfit_steps=300)
    result = check("generator", only="dependency,metric", expect=expect)
    rows = {v.id: v for v in result.verdicts}
    assert rows["dependency"].verdict == "skip"
    assert rows["dependency"].reason == "by design: batch statistics on purpose"
    assert rows["metric"].verdict == "pass", result.table()
    assert "at least 0.95 is declared" in rows["metric"].measured
    expect = Expect(overfit_metric=0.3, overfit_steps=300)
    assert check("regression", only="metric", expect=expect).ok
    result = check("regression", "scaled", only="metric", expect=expect)
    assert [v.id for v in result.failed] == ["metric"], result.table()


def test_frozen_is_enforced_in_both_directions():
    def factory(declared: tuple[str, ...], really: str):
        loop = loops.by_hand(expect=Expect(frozen=declared), **QUICK)
        model = loop.models
        for name, p in model.named_parameters():
            p.requires_grad_(not (really and name.startswith(really)))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)

        def run(batches) -> None:
            for x, y in batches:
                optimizer.zero_grad()
                loops.cross_entropy(model(x), y).backward()
                optimizer.step()

        loop.run, loop.optimizers = run, optimizer
        return loop

    def verdict(declared: tuple[str, ...], really: str):
        (found,) = trainworthy.check(lambda: factory(declared, really), only="frozen", raises=False).verdicts
        return found

    assert verdict(("0.",), "0.").verdict == "pass"
    assert "2 of 2 tensors declared frozen moved: 0.weight, 0.bias" in verdict(("0.",), "").measured
    assert "frozen and not declared: 0.bias" in verdict(("0.weight",), "0.").measured
    with pytest.raises(UserError, match="no parameter begins with 'body'"):
        verdict(("body",), "0.")


def broken(**parts):
    """A factory of the loop by hand with other parts."""

    def factory():
        loop = loops.by_hand(**QUICK)
        for name, value in parts.items():
            setattr(loop, name, value)
        return loop

    return factory


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"models": [nn.Linear, 3]}, "models of a Loop"),
        ({"models": nn.ReLU()}, "have no parameters"),
        ({"optimizers": "adam"}, "optimizers of a Loop"),
        ({"run": 3}, "run of a Loop must be a function"),
        ({"batches": 3}, "cannot be iterated over"),
        ({"batches": None, "run": lambda: None}, "the loop made no backward()"),
        ({"eval_batches": [], "evaluate": None}, "eval_batches without evaluate"),
        ({"target": "nothing"}, "a batch has no such entry"),
        ({"models": nn.Linear(2, 2)}, "the same model twice"),
        ({"batches": iter([])}, "the same generator twice"),
        ({"expect": Expect(range_test="none")}, "no check of a Loop reads expect.range_test"),
        ({"expect": Expect(loss_floor=lambda _: 0.0)}, "must be a number"),
        ({"expect": Expect(overfit_metric=1.0), "evaluate": None}, "overfit_metric without evaluate"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_rehearsed_is_one_message(parts: dict, words: str):
    with pytest.raises(UserError) as caught:
        trainworthy.check(broken(**parts))
    assert words in str(caught.value)


def test_unknown_checks_and_a_factory_that_changes_its_mind():
    with pytest.raises(UserError, match="check 'overfitt'"):
        check("gan", only="overfitt")
    built = [loops.gan(**QUICK)]
    with pytest.raises(UserError, match=r"must return a trainworthy\.Loop every time"):
        trainworthy.check(lambda: built.pop() if built else None)


def test_the_loops_own_exception_keeps_its_traceback_and_torch_is_restored():
    def run(batches) -> None:
        for _ in batches:
            raise ValueError("mine")

    before = nn.functional.cross_entropy, nn.Module.__call__, DataLoader.__iter__, torch.save, torch.compile
    with pytest.raises(ValueError, match="mine") as caught:
        trainworthy.check(broken(run=run))
    assert any(entry.name == "run" for entry in caught.traceback)
    after = nn.functional.cross_entropy, nn.Module.__call__, DataLoader.__iter__, torch.save, torch.compile
    assert before == after
    assert loops.cross_entropy is before[0]


def test_generators_and_files_are_as_before(tmp_path: Path):
    """Random states come back, and a rehearsal replaces no checkpoint."""
    path = tmp_path / "best.pt"
    torch.save({"precious": 1}, path)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    loaded = []

    def factory():
        loop = loops.by_hand(**QUICK)
        first = loop.evaluate

        def evaluate() -> float:
            torch.save(loop.models.state_dict(), path)
            loaded.append(torch.load(path))
            return first()

        loop.evaluate = evaluate
        return loop

    result = trainworthy.check(factory, raises=False)
    assert result.ok, result.table()
    assert "0.weight" in loaded[0]
    assert torch.load(path) == {"precious": 1}
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()
    assert states[2] == random.getstate()


def deaf(_: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def test_workers_end_with_the_check_even_if_they_ignore_sigterm():
    """The loop raises while it holds the iterator, and its caller keeps the exception: nothing would end the workers."""
    kept = []

    def run(batches) -> None:
        kept.append(iter(batches))
        next(kept[0])
        raise ValueError("mine")

    data = DataLoader(loops.LEARN, 64, num_workers=2, worker_init_fn=deaf)
    before = set(multiprocessing.active_children())
    with pytest.raises(ValueError, match="mine"):
        trainworthy.check(broken(run=run, batches=data))
    assert kept
    assert not set(multiprocessing.active_children()) - before


FILE = """
import sys
import trainworthy
from tests.guard.loops import {name}

def factory():
    return {name}(bug="{bug}", seconds=0.2)

if __name__ == "__main__":
    trainworthy.check(factory, folder="evidence")
"""


@pytest.mark.parametrize(("bug", "code"), [("", 0), ("generator-detached", 3)], ids=["healthy", "bug"])
def test_the_command_on_a_file_with_a_factory(bug: str, code: int, launch, tmp_path: Path):
    """`trainworthy check file.py`: verdicts, evidence, exit code."""
    (tmp_path / "mine.py").write_text(FILE.format(name="gan", bug=bug))
    done = launch("check", "mine.py", PYTHONPATH=str(ROOT))
    assert done.returncode == code, done.shown
    assert ("FAIL   gradients" in done.stdout) == bool(bug), done.shown
    assert "no step was made" not in done.stdout


def test_a_program_ends_with_the_gates_exit_code_and_writes_evidence(tmp_path: Path):
    (tmp_path / "mine.py").write_text(FILE.format(name="gan", bug="generator-detached"))
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 3 or "GateFailed" in done.stderr, done.stdout + done.stderr
    verdicts = {v["id"]: v["verdict"] for v in read(tmp_path / "evidence" / "gates.json")["gates"]}
    assert verdicts["gradients"] == "fail"
    assert "checks failed" in (tmp_path / "evidence" / "report.html").read_text()


def test_the_pytest_fixture_fails_with_the_table(trainworthy_check, tmp_path: Path):
    assert trainworthy_check(lambda: loops.vae(**QUICK)).ok
    with pytest.raises(pytest.fail.Exception, match="in no optimiser"):
        trainworthy_check(lambda: loops.vae(bug="decoder-left-out", **QUICK))
    with pytest.raises(GateFailed, match="checks failed"):
        trainworthy.check(lambda: loops.vae(bug="decoder-left-out", **QUICK))
    assert trainworthy.check(lambda: loops.vae(bug="decoder-left-out", **QUICK), waive={"wiring": "on purpose"}).ok


def _denoising(twice: bool) -> trainworthy.Loop:
    """A diffusion model of a few layers: the noise level is one more column of a flat input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(65, 128), nn.SiLU(), nn.Linear(128, 64))
    optimizer, kept = (
        torch.optim.AdamW(model.parameters(), 1e-3),
        torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0),
    )

    def run(batches: Any) -> None:
        for (x,) in batches:
            t, noise = torch.randint(0, 1000, (len(x),)), torch.randn_like(x)
            share = kept[t][:, None]
            noisy = share.sqrt() * x + (1 - share).sqrt() * noise
            target = torch.randn_like(x) if twice else noise
            optimizer.zero_grad()
            nn.functional.mse_loss(model(torch.cat([noisy, t[:, None] / 1000], 1)), target).backward()
            optimizer.step()

    rows = torch.randn(1024, 1).sin() * torch.randn(1, 64)
    return trainworthy.Loop(
        models=model, optimizers=optimizer, batches=DataLoader(TensorDataset(rows), 64, shuffle=True), run=run
    )


def test_noise_in_an_input_that_holds_its_level_too():
    healthy, twice = (
        trainworthy.check(lambda t=t: _denoising(t), raises=False, only=["noise"]).verdicts for t in (False, True)
    )
    assert healthy[0].verdict == "pass"
    assert "noisy inputs" in healthy[0].measured
    assert twice[0].verdict == "fail"
    assert "the noise is drawn twice" in twice[0].remedy


def test_an_average_that_has_not_caught_up_is_no_fault_of_the_evaluation():
    """Its decay is that of a run of a thousand steps, and the loop is watched for some hundred."""

    def factory() -> trainworthy.Loop:
        torch.manual_seed(0)
        x = torch.randn(1024, 16)
        y = (x @ torch.randn(16, 4)).argmax(1)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        average = copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)

        def run(batches: Any) -> None:
            for some, goals in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(some), goals).backward()
                optimizer.step()
                with torch.no_grad():
                    for a, p in zip(average.parameters(), model.parameters(), strict=True):
                        a.lerp_(p, 0.001)

        def evaluate() -> float:
            with torch.no_grad():
                return sum((average(some).argmax(1) == goals).sum().item() for some, goals in held_out) / 512

        held_out = DataLoader(TensorDataset(x[:512], y[:512]), 128)
        return trainworthy.Loop(models={"net": model, "average": average}, optimizers=optimizer, run=run, evaluate=evaluate,
                                batches=DataLoader(TensorDataset(x[512:], y[512:]), 16, shuffle=True))  # fmt: skip

    found = trainworthy.check(factory, raises=False, only=["learning"])
    assert found.verdicts[0].verdict == "pass", found.verdicts
