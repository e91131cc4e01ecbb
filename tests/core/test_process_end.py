"""How runs end, by the real command: signals, crashes, full memory, lost processes; what is said, kept and exited with."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from trainworthy.core.base import machine
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop import checkpoint_survey
from trainworthy.core.session import launcher, process_end

from tests.helpers.commands import QUICK, assert_same_run, holds, run_folder, start, started, stop, wait_until
from tests.vision.planted_classify import LOOP

SAVING = ("--run.save-every", "0.05")  # a checkpoint every few steps
LONG = ("--train.epochs", "8", "--gates.no-enabled", "--run.no-tensorboard", *SAVING)  # 500 steps
RAISES = LOOP + "        if step.index == 12:\n            "
"""A loop that does the next words in its thirteenth step."""


@pytest.fixture(autouse=True)
def no_nohup():
    """Under nohup tests would start commands that ignore SIGHUP, as they should there."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def resumable(folder: Path) -> Path:
    """The newest checkpoint of the run, which must be whole."""
    (latest,) = folder.glob("checkpoints/*/latest")
    assert checkpoint_survey.verify(latest.resolve()) == ""
    return latest.resolve()


def gone(folder: Path, seconds: float = 60) -> bool:
    """Has every process that works in `folder` ended by then?"""

    def is_empty() -> bool:
        here = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(folder)]
        return all(p.status() == psutil.STATUS_ZOMBIE for p in here)

    return wait_until(is_empty, seconds=seconds, pause=0.2)


# --------------------------------------------------------------------------------------------------------------- signals
@pytest.mark.parametrize("how", [pytest.param(signal.SIGHUP, marks=pytest.mark.verify), signal.SIGUSR1])
def test_a_closed_terminal_and_slurms_warning_save_and_stop(how: int, tmp_path: Path):
    code, said = stop("run", "vision/classify", *LONG, "--run.log-every", "100000", cwd=tmp_path,
                      once="runs/*/*/checkpoints/*/step-*", how=how)  # fmt: skip
    assert code == 5, said
    assert f"{signal.Signals(how).name} at step" in said
    assert f"trainworthy resume {run_folder(tmp_path).relative_to(tmp_path)}" in said
    resumable(run_folder(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGHUP, pytest.param(signal.SIGUSR1, marks=pytest.mark.verify)])
def test_a_signal_to_the_command_alone_ends_both_ranks(how: int, tmp_path: Path):
    """What a closing terminal does: only the command is in its session. No orphan, no launcher's traceback."""
    child = started("run", "vision/classify", "-n", 2, *LONG, "--run.log-every", "100000", cwd=tmp_path)
    child.send_signal(how)
    said = child.communicate(timeout=120)[0]
    assert child.returncode == 5, said
    assert f"{signal.Signals(how).name} at step" in said
    assert "Traceback" not in said
    assert gone(tmp_path)
    resumable(run_folder(tmp_path))


def test_a_signal_before_anything_is_saved_does_not_claim_so(tmp_path: Path):
    child = start("check", "vision/classify", "--gates.no-remember", cwd=tmp_path)
    for line in child.stdout:
        if "initial-loss" in line:
            break
    child.send_signal(signal.SIGTERM)
    said = child.communicate(timeout=120)[0]
    assert child.returncode == 128 + signal.SIGTERM, said
    holds(said, "nothing was saved", "trainworthy check vision/classify --gates.no-remember")
    assert "Traceback" not in said


# --------------------------------------------------------------------------------------------------------------- crashes
def test_a_crash_says_what_is_safe_and_leaves_a_report(launch, fork):
    fork((LOOP, RAISES + "raise RuntimeError('the cat sat on the cable')\n"))
    done = launch("run", "mine.py", *QUICK, *SAVING)
    folder = done.folder()
    saved = resumable(folder)
    assert done.returncode == 5, done.shown
    trace, message = done.stderr.split("\ncrashed: ")
    assert "Traceback" in trace
    assert "mine.py" in trace
    assert "the cat sat on the cable" in message
    assert f"{saved.name}, complete" in message
    assert f"trainworthy resume {folder.relative_to(done.cwd)}" in message
    assert (folder / "report.html").is_file()
    rows = (folder / "step_metrics.jsonl").read_text().splitlines()
    assert len(rows) >= int(saved.name.split("-")[1])


def test_a_crash_before_the_first_checkpoint_is_not_called_saved(launch, fork):
    fork((LOOP, RAISES + "raise RuntimeError('the cat sat on the cable')\n"))
    done = launch("run", "mine.py", *QUICK, code=1)
    holds(done.stderr, "Traceback", "nothing: no checkpoint was written yet", "trainworthy run mine.py")
    assert (done.folder() / "report.html").is_file()


def test_a_recipe_that_leaves_by_itself_is_no_success(launch, fork):
    fork((LOOP, RAISES + "raise SystemExit(0)\n"))
    done = launch("run", "mine.py", *QUICK, *SAVING, code=5)
    holds(done.stderr, "crashed: SystemExit: 0", "trainworthy resume")
    assert (done.folder() / "report.html").is_file()


def test_a_recipe_that_leaves_while_it_is_imported_says_why(launch, fork):
    fork(("import torch\n", "import torch\n\nraise SystemExit('no pictures in /data')\n"))
    done = launch("check", "mine.py", code=1)
    assert done.stderr.strip().splitlines()[-1] == "error: no pictures in /data"


def test_a_crash_while_workers_read_ends(launch, fork):
    fork((LOOP, RAISES + "raise RuntimeError('the cat sat on the cable')\n"))
    launch("run", "mine.py", *QUICK, *SAVING, "--loader.workers", "2", timeout=90, code=5)


def test_out_of_memory_says_what_fits(launch, fork):
    fork((LOOP, RAISES + "import torch\n            torch.empty(2**52)\n"))
    done = launch("run", "mine.py", *QUICK, *SAVING, code=5)
    assert "Traceback" not in done.stderr
    holds(done.stderr, "stopped: out of memory", "trainworthy resume")


def test_a_limit_of_file_sizes_outside_a_checkpoint_is_no_bug(launch, fork):
    fork((LOOP, RAISES + "raise OSError(27, 'File too large', 'big.bin')\n"))
    done = launch("run", "mine.py", *QUICK, *SAVING, code=4)
    assert "Traceback" not in done.stderr
    holds(done.stderr, "big.bin", f"trainworthy resume {done.folder().relative_to(done.cwd)}")
    assert (done.folder() / "report.html").is_file()


@pytest.mark.slow
def test_one_rank_that_crashes_ends_the_run_with_its_own_error(fork, tmp_path: Path):
    fork((LOOP, RAISES + "if run.rank:\n                raise RuntimeError('the cat sat on the cable')\n"))
    child = start("run", "mine.py", "-n", 2, *QUICK, *SAVING, cwd=tmp_path)
    said = child.communicate(timeout=200)[0]
    assert child.returncode == 5, said
    assert said.count("Traceback") == 1, said
    assert said.count("the cat sat on the cable") == 3, said  # its line, the error, the message
    assert (run_folder(tmp_path) / "report.html").is_file()
    assert gone(tmp_path)


@pytest.mark.slow
def test_one_rank_that_is_killed_ends_the_run_with_what_is_safe(tmp_path: Path):
    child = started("run", "vision/classify", "-n", 2, *LONG, cwd=tmp_path)
    (rank,) = [p for p in psutil.Process(child.pid).children(recursive=True) if p.environ().get("RANK") == "1"][:1]
    os.kill(rank.pid, signal.SIGKILL)
    said = child.communicate(timeout=120)[0]
    assert child.returncode == 5, said
    assert "another process of this run is gone" in said
    assert f"trainworthy resume {run_folder(tmp_path).relative_to(tmp_path)}" in said
    assert "ChildFailedError" not in said, said  # the launcher's own
    assert gone(tmp_path)


@pytest.mark.slow
@pytest.mark.verify
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_rank_is_killed_25_times_and_the_run_is_that_without_kills(shard: str, tmp_path: Path):
    """Either rank, up to half a second after the first checkpoint of each start."""
    draw = random.Random(shard)
    settings = ("-n", 2, *LONG, "--train.epochs", "24", "--run.save-steps", "5", "--shard", shard)
    (tmp_path / "straight").mkdir()
    straight = start("run", "vision/classify", *settings, cwd=tmp_path / "straight")
    said = straight.communicate(timeout=600)[0]
    assert straight.returncode == 0, said
    argv: tuple[object, ...] = ("run", "vision/classify", *settings)
    for _ in range(25):
        before = manifests(tmp_path)
        child = start(*argv, cwd=tmp_path)
        wait_until(lambda n=before: manifests(tmp_path) > n, child=child)
        time.sleep(draw.uniform(0, 0.5))
        ranks = [p for p in psutil.Process(child.pid).children(recursive=True) if "RANK" in p.environ()]
        os.kill(draw.choice(ranks).pid, signal.SIGKILL)
        said = child.communicate(timeout=120)[0]
        assert child.returncode == 5, said
        assert gone(tmp_path)
        argv = ("resume", run_folder(tmp_path), "-n", 2)
    child = start(*argv, cwd=tmp_path)
    said = child.communicate(timeout=600)[0]
    assert child.returncode == 0, said
    assert_same_run(run_folder(tmp_path), run_folder(tmp_path / "straight"))


def manifests(cwd: Path) -> set[str]:
    """Checkpoints that are complete."""
    return {p.parent.name for p in cwd.glob("runs/*/*/checkpoints/*/step-*/manifest.json")}


@pytest.mark.slow
@pytest.mark.verify
@pytest.mark.parametrize("number", ["0", "1"])
def test_one_rank_that_is_frozen_ends_the_run_within_a_minute(number: str, tmp_path: Path):
    child = started("run", "vision/classify", "-n", 2, *LONG, cwd=tmp_path)
    (rank,) = [p for p in psutil.Process(child.pid).children(recursive=True) if p.environ().get("RANK") == number][:1]
    os.kill(rank.pid, signal.SIGSTOP)
    begun = time.monotonic()
    said = child.communicate(timeout=120)[0]
    assert time.monotonic() - begun < 60
    assert child.returncode == 5, said
    assert f"rank {number} (process {rank.pid}) was stopped for 30 s (SIGSTOP) and was ended" in said
    assert f"trainworthy resume {run_folder(tmp_path).relative_to(tmp_path)}" in said
    assert "Traceback" not in said, said
    assert gone(tmp_path)
    resumable(run_folder(tmp_path))


@pytest.mark.slow
def test_ranks_end_saved_when_what_started_them_is_killed(tmp_path: Path):
    """They trained on, unseen, and held the run folder."""
    child = started("run", "vision/classify", "-n", 2, *LONG, cwd=tmp_path)
    ranks = [p for p in psutil.Process(child.pid).children(recursive=True) if p.environ().get("RANK")]
    child.kill()
    child.communicate(timeout=60)
    assert not psutil.wait_procs(ranks, timeout=60)[1]
    assert gone(tmp_path)
    resumable(run_folder(tmp_path))


def test_more_processes_than_fit_are_not_started(monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 2**30)
    launcher.assert_memory(2)
    with pytest.raises(UserError, match="100 processes do not fit") as refused:
        launcher.assert_memory(100)
    assert "-n " in str(refused.value)


def test_a_rank_that_is_lost_after_the_end_leaves_nothing_to_resume(tmp_path: Path, monkeypatch):
    """The result is written, so `resume` would refuse."""
    monkeypatch.setattr(process_end.dist, "is_initialized", lambda: True)
    lost = RuntimeError("Connection closed by peer [127.0.0.1]:29500")
    assert "trainworthy run x" in str(process_end.crashed(lost, tmp_path, "trainworthy run x"))
    (tmp_path / "summary.json").write_text("{}")
    said = str(process_end.crashed(lost, tmp_path, "trainworthy run x"))
    assert "nothing: training had ended, and its result and export are written" in said
    assert "trainworthy run x" not in said


def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path):
    """`trainworthy run ... | head -1`: the pipe closes after one line, the run ends as it would have."""
    command = [
        sys.executable,
        "-m",
        "trainworthy",
        "run",
        "vision/classify",
        *QUICK,
        "--gates.no-enabled",
        "--run.out",
        str(tmp_path),
    ]
    with (
        (tmp_path / "stderr").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as running,
    ):
        assert running.stdout.readline()
        running.stdout.close()
        assert running.wait(120) == 0, (tmp_path / "stderr").read_text()
    assert "Traceback" not in (tmp_path / "stderr").read_text()
    assert (run_folder(tmp_path, "*/2*") / "summary.json").is_file()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_description_of_data_with_a_message(how: int, tmp_path: Path):
    """Ctrl-C printed a traceback, the others nothing."""
    child = start("data", "vision/classify", cwd=tmp_path)
    for line in child.stdout:
        if "vision/classify" in line:
            break
    child.send_signal(how)
    said = child.communicate(timeout=120)[0]
    assert child.returncode == 128 + how, said
    holds(said, f"interrupted: {signal.Signals(how).name}", "next:         trainworthy data vision/classify")
    assert "Traceback" not in said
