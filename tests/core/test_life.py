"""The life of a run, through the real commands: processes, stops, kills, resumes, forks, and no trace of the gates."""

import random
import signal
import sys
from pathlib import Path

import pytest
import torch
from trainworthy.core.base.errors import UserError
from trainworthy.core.report.folder import args_of

from tests.helpers.commands import (
    BIN,
    QUICK,
    assert_refused,
    assert_same_run,
    environment,
    equal_but_rounding,
    execute,
    final_weights,
    holds,
    killed,
    losses,
    read,
    run_folder,
    same,
    start,
    stop,
    trainworthy,
)
from tests.vision.planted_classify import LOOP


def test_run_folder_is_complete(quick_run: Path):
    for name in ("args.json", "environment.json", "data.json", "gates.json", "step_metrics.jsonl", "epoch_metrics.jsonl",
                 "summary.json", "card.md", "report.html", "recipe.py", "export/model.safetensors"):  # fmt: skip
        assert (quick_run / name).stat().st_size > 0, name
    rows = read(quick_run / "step_metrics.jsonl")
    assert [r["step"] for r in rows] == list(range(1, 21))
    assert {"step/loss", "step/grad_norm", "step/lr", "step/samples_per_sec"} <= rows[0].keys()
    assert rows[-1]["step/loss"] < rows[0]["step/loss"]
    assert "OFF" in (quick_run / "card.md").read_text().upper()


def test_gates_leave_no_trace(quick_run: Path, tmp_path: Path):
    settings = [a for a in QUICK if a != "--gates.no-enabled"]
    done = trainworthy("run", "vision/classify", *settings, "--gates.no-remember", cwd=tmp_path, code=0)
    assert "gates passed" in done.stdout
    assert_same_run(run_folder(tmp_path), quick_run)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.verify), 2])
def test_workers_change_nothing(workers: int, quick_run: Path, tmp_path: Path):
    trainworthy("run", "vision/classify", *QUICK, "--loader.workers", workers, cwd=tmp_path, code=0)
    assert same(final_weights(run_folder(tmp_path)), final_weights(quick_run))


def test_micro_batches_change_nothing_but_rounding(quick_run: Path, tmp_path: Path):
    trainworthy("run", "vision/classify", *QUICK, "--train.accumulate", 3, cwd=tmp_path, code=0)
    equal_but_rounding(losses(run_folder(tmp_path)), losses(quick_run))


@pytest.mark.slow
def test_two_processes_train_like_one(quick_run: Path, tmp_path: Path):
    trainworthy("run", "vision/classify", "-n", 2, *QUICK, cwd=tmp_path, code=0)
    folder = run_folder(tmp_path)
    assert read(folder / "args.json")["processes"] == 2
    equal_but_rounding(losses(folder), losses(quick_run))
    one, two = read(quick_run / "summary.json")["final"], read(folder / "summary.json")["final"]
    assert two["val/nll"] == pytest.approx(one["val/nll"], abs=2e-2)


@pytest.mark.slow
def test_two_processes_pass_the_gates_and_keep_exit_codes(tmp_path: Path):
    trainworthy("check", "vision/classify", "-n", 2, cwd=tmp_path, code=0)
    assert_refused(trainworthy("check", "vision/classify", "-n", 2, "--optim.lrr", 1, cwd=tmp_path), "--optim.lrr")


@pytest.mark.verify
def test_deep_check_uses_new_processes(tmp_path: Path):
    done = trainworthy("check", "vision/classify", "--deep", cwd=tmp_path, code=0)
    holds(done.stdout, "in a new process", "2 processes")


def test_a_launcher_that_starts_too_few_is_refused(tmp_path: Path):
    words = ("launch", "--cpu", "--num_processes", "2", "-m", "core.launch", "vision/classify", *QUICK)
    done = execute(BIN / "accelerate", *words, cwd=tmp_path)
    assert done.returncode != 0
    assert "did not start as many processes" in done.stderr
    assert not (tmp_path / "runs").exists()


ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: {precision}
num_machines: 1
num_processes: {processes}
use_cpu: true
"""


def test_an_accelerate_config_is_followed_or_refused(tmp_path: Path):
    config = tmp_path / "accelerate.yaml"
    config.write_text(ACCELERATE.format(kind="'NO'", precision="bf16", processes=1))
    argv = ("check", "vision/classify", "--only", "initial-loss", "--accelerate-config", config)
    done = trainworthy(*argv, cwd=tmp_path, code=0)
    assert "bf16" in done.stdout.splitlines()[0]
    config.write_text(ACCELERATE.format(kind="MULTI_CPU", precision="'no'", processes=2))  # starts one, says nothing
    assert_refused(trainworthy(*argv, cwd=tmp_path), "did not start as many processes")


def test_accelerate_launch_is_the_same_path(quick_run: Path, tmp_path: Path):
    (tmp_path / "core").mkdir()  # a folder of this name where the user stands must do no harm
    (tmp_path / "core" / "__init__.py").write_text("raise RuntimeError('the wrong core')\n")
    words = ("launch", "-m", "trainworthy.launch", "vision/classify", *QUICK)
    execute(BIN / "accelerate", *words, cwd=tmp_path, code=0)
    assert same(final_weights(run_folder(tmp_path)), final_weights(quick_run))
    without = {k: v for k, v in environment().items() if k != "PYTHONSAFEPATH"}
    bad = execute(BIN / "trainworthy", "run", "vision/classify", "--preset", "none", cwd=tmp_path, env=without)
    assert_refused(bad, "unknown preset")  # our core answered, not the one in the folder


# ------------------------------------------------------------------------------------------------------ stop and resume
def _stop_at(cwd: Path, step: int, *argv: object, how: int = signal.SIGTERM) -> tuple[int, Path, str]:
    """A run stopped once its checkpoint `step` exists: (exit code, run folder, output)."""
    code, output = stop(*argv, cwd=cwd, once=f"runs/*/*/checkpoints/*/step-{step}", how=how)
    return code, run_folder(cwd), output


LONG = ("--train.epochs", "2", "--run.save-every", "0.1", "--gates.no-enabled", "--run.no-tensorboard")  # 125 steps


@pytest.fixture(scope="module")
def long_straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("long")
    trainworthy("run", "vision/classify", *LONG, cwd=cwd, code=0)
    return run_folder(cwd)


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.verify)])
def test_a_signal_saves_and_resume_is_bitwise(how: int, long_straight: Path, tmp_path: Path):
    code, folder, output = _stop_at(tmp_path, 19, "run", "vision/classify", *LONG, how=how)
    assert code == 5, output
    assert f"trainworthy resume {folder.relative_to(tmp_path)}" in output
    assert not (folder / "summary.json").exists()
    done = trainworthy("resume", folder, cwd=tmp_path, code=0)
    assert "resumed from step-" in done.stdout
    assert_same_run(folder, long_straight)
    dropped = ("seconds", "time")
    one, two = (read(f / "epoch_metrics.jsonl") for f in (folder, long_straight))
    assert [{k: v for k, v in r.items() if not k.endswith(dropped)} for r in one] == two


@pytest.mark.slow
@pytest.mark.verify
def test_two_processes_stop_and_resume(tmp_path: Path):
    code, folder, output = _stop_at(tmp_path, 19, "run", "vision/classify", "-n", 2, *LONG)
    assert code == 5, output
    trainworthy("resume", folder, cwd=tmp_path, code=0)
    assert [r["step"] for r in read(folder / "step_metrics.jsonl")] == list(range(1, 126))


# Runs of many seconds in short steps, a checkpoint every few of them; the replays of rl go round many times.
CONTROL = ("--eval-episodes", "4", "--num-envs", "4", "--train.batch-size", "32", "--run.save-every", "3", "--gates.no-enabled",
           "--run.no-tensorboard")  # fmt: skip
REPLAY = (
    "--num-steps",
    "8",
    "--gradient-steps",
    "8",
    "--learning-starts",
    "64",
    "--buffer-size",
    "256",
    "--train.eval-every",
    "100",
)
KILLED = {
    "vision/classify": (*LONG, "--train.epochs", "8"),
    "rl/ppo": (*CONTROL, "--num-steps", "32", "--train.epochs", "250", "--train.eval-every", "100"),
    "rl/dqn": (*CONTROL, *REPLAY, "--train.epochs", "300", "--prioritized-replay-alpha", "0.6", "--n-step", "3"),
    "rl/sac": (*CONTROL, *REPLAY, "--train.epochs", "200"),
}


def _survive_kills(cwd: Path, kills: int, recipe: str, *settings: str, seed: int) -> None:
    """SIGKILL at random moments of one run; every resume must go on, and the end must be the uninterrupted run's."""
    draw = random.Random(seed)
    argv: tuple[object, ...] = ("run", recipe, *KILLED[recipe], *settings)
    (cwd / "straight").mkdir()
    trainworthy(*argv, cwd=cwd / "straight", code=0)
    reference = run_folder(cwd / "straight")
    for _ in range(kills):
        killed(*argv, cwd=cwd, lives=draw.uniform(0.0, 0.35))
        folder = run_folder(cwd)
        assert not (folder / "summary.json").exists()  # it was killed in the middle
        argv = ("resume", folder)
    trainworthy("resume", folder, cwd=cwd, code=0)
    assert_same_run(folder, reference)


@pytest.mark.slow
def test_kill_and_resume(tmp_path: Path):
    _survive_kills(tmp_path, 2, "vision/classify", "--train.epochs", "2", seed=0)


@pytest.mark.verify
@pytest.mark.parametrize("recipe", KILLED)
def test_twenty_kills_and_resumes(recipe: str, tmp_path: Path):
    _survive_kills(tmp_path, 20, recipe, seed=1)


def test_slow_steps_are_seen_before_ten_of_them_are_over(launch, fork):
    """Where a step takes longer than core waits, its row is in the file when the next one begins."""
    look = "        print('rows', len((run.folder / 'step_metrics.jsonl').read_text().splitlines()))\n"
    imports = "from trainworthy import core\nfrom trainworthy.core.loop import journal\nfrom trainworthy.core.monitoring import metrics\n"
    waits = imports + "journal.SECONDS = metrics.SECONDS = 0.0\n"
    fork((LOOP, look.join(LOOP.splitlines(keepends=True))), ("from trainworthy import core\n", waits))
    done = launch("run", "mine.py", *QUICK, "--run.log-every", "1000", code=0)
    rows = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("rows ")]
    assert rows[:5] == [0, 1, 2, 3, 4], rows


def test_a_damaged_checkpoint_is_passed_over(long_straight: Path, tmp_path: Path):
    code, folder, output = _stop_at(tmp_path, 32, "run", "vision/classify", *LONG)
    assert code == 5, output
    newest = (folder / "checkpoints" / "classify" / "latest").resolve()
    weights = newest / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    done = trainworthy("resume", folder, cwd=tmp_path, code=0)
    assert f"skipped checkpoint {newest.name}: model.safetensors does not match its hash" in done.stdout
    assert same(final_weights(folder), final_weights(long_straight))


def test_resume_refuses_what_it_cannot_resume(quick_run: Path, tmp_path: Path):
    assert_refused(trainworthy("resume", quick_run, cwd=tmp_path), "has finished", "--init-from")
    assert_refused(trainworthy("resume", tmp_path, cwd=tmp_path), "is not a run folder")


def test_a_folder_around_runs_names_its_newest_run(tmp_path: Path):
    """What --run.out named: `chat lora` said "next: ls -d runs/*/*", which are other runs."""
    for run in ("sft/20260101-1", "sft/20260102-1", "sft/checks/20260103-1"):
        (tmp_path / "lora" / run).mkdir(parents=True)
        (tmp_path / "lora" / run / "args.json").write_text('{"recipe": "llm/sft"}')
    for around in (tmp_path / "lora", tmp_path / "lora" / "sft"):
        with pytest.raises(UserError, match=f"next: +the newest run in it: {tmp_path}/lora/sft/20260102-1"):
            args_of(around)
    assert_refused(
        trainworthy("resume", "lora", cwd=tmp_path), "is not a run folder", "trainworthy resume lora/sft/20260102-1"
    )


def test_a_changed_fork_needs_force(tmp_path: Path):
    trainworthy("fork", "vision/classify", "mine.py", cwd=tmp_path, code=0)
    code, folder, output = _stop_at(tmp_path, 7, "run", "mine.py", *LONG)
    assert code == 5, output
    fork = tmp_path / "mine.py"
    fork.write_text(fork.read_text() + "\n# another version\n")
    assert_refused(trainworthy("resume", folder, cwd=tmp_path), "changed: mine.py")
    trainworthy("resume", folder, "--force", cwd=tmp_path, code=0)


def test_a_fork_that_was_renamed_is_named_with_the_run_s_copy(tmp_path: Path):
    """The next step was another fork of the packaged recipe."""
    trainworthy("fork", "vision/classify", "mine.py", cwd=tmp_path, code=0)
    code, folder, output = _stop_at(tmp_path, 7, "run", "mine.py", *LONG)
    assert code == 5, output
    (tmp_path / "mine.py").rename(tmp_path / "yours.py")
    assert_refused(trainworthy("resume", folder, cwd=tmp_path), "is gone", f"cp {folder}/recipe.py")


def test_a_run_in_use_is_not_resumed_twice(tmp_path: Path):
    child = start("run", "vision/classify", *LONG, cwd=tmp_path)
    for line in child.stdout:
        if line.startswith("train "):
            break
    second = trainworthy("resume", run_folder(tmp_path), cwd=tmp_path)
    assert f"kill {child.pid}, which saves and ends it" in second.stderr
    child.kill()
    child.communicate()
    assert second.returncode == 2
    assert "in use by another process" in second.stderr


# --------------------------------------------------------------------------------------------------------------- results
@pytest.mark.slow
def test_tiny_reaches_its_result_and_its_export_stands_alone(tmp_path: Path):
    trainworthy("run", "vision/classify", cwd=tmp_path, code=0)
    folder = run_folder(tmp_path)
    summary = read(folder / "summary.json")
    assert summary["reported"]["accuracy"] >= 0.975
    assert summary["metrics"]["macro_recall"] >= 0.97
    assert summary["baselines"]["nearest neighbour on pixels"]["accuracy"] == pytest.approx(0.946)
    assert summary["baselines"]["this model, input zeroed"]["accuracy"] == pytest.approx(0.1)
    script = (
        "import sys, torch\n"
        "program = torch.export.load(sys.argv[1]).module()\n"
        "images, labels = torch.load(sys.argv[2], weights_only=True)\n"
        "print((program(images).argmax(1) == labels).double().mean().item())\n"
        "assert not {'core', 'recipes', 'trainworthy'} & set(sys.modules)\n"
    )
    from trainworthy.recipes.shared import digits

    images, labels = digits.load()
    held_out = digits.split(labels)[1]
    torch.save((images[held_out].float() / 255, labels[held_out]), tmp_path / "held_out.pt")
    files = (folder / "export" / "model.pt2", tmp_path / "held_out.pt")
    alone = execute(sys.executable, "-c", script, *files, cwd=tmp_path, code=0)
    assert float(alone.stdout) == pytest.approx(summary["reported"]["accuracy"], abs=1e-9)


CHOICES = [
    pytest.param(("--optim.name", "sgd", "--optim.lr", "0.1"), marks=pytest.mark.verify),
    pytest.param(("--optim.name", "adafactor", "--optim.lr", "0.1"), marks=pytest.mark.verify),
    pytest.param(("--optim.name", "muon"), marks=pytest.mark.verify),
    pytest.param(("--train.precision", "bf16"), marks=pytest.mark.verify),
    pytest.param(("--train.precision", "fp16"), marks=pytest.mark.verify),  # a minute: processors emulate it
    ("--optim.schedule", "wsd", "--run.export", "best"),
]


@pytest.mark.parametrize("settings", CHOICES, ids=" ".join)
def test_every_choice_learns(settings: tuple[str, ...], tmp_path: Path):
    long = ("--train.epochs", "2", "--gates.no-enabled", "--run.no-tensorboard")
    trainworthy("run", "vision/classify", *long, *settings, cwd=tmp_path, code=0)
    seen = losses(run_folder(tmp_path))
    assert sum(seen[-5:]) < 0.95 * sum(seen[:5]), seen
