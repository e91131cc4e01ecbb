"""Several machines and restarts, by the real command: two launchers with folders of their own, and ranks that are killed."""

import os
import random
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.recipe import loading
from trainworthy.core.session import environment, nodes

from tests.conftest import ROOT
from tests.helpers import namespaces
from tests.helpers.commands import (
    QUICK,
    assert_refused,
    assert_same_run,
    final_weights,
    holds,
    losses,
    machines,
    run_folder,
    same,
    trainworthy,
)
from tests.vision.planted_classify import LOOP

KILL = """        if run.rank == 1 and step.index + 1 == {step} and not Path("killed").exists():
            import os
            import signal

            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
"""Rank 1 is killed once, as by a system without memory."""
EACH = ("--run.log-every", "1", "--run.save-steps", "4")


# ---------------------------------------------------------------------------------------------------------- the command
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("run", "vision/classify", "--nodes", "2"), ("must know where to meet", "--node-rank, --address")),
        (("run", "vision/classify", "--nodes", "2", "--node-rank", "2", "--address", "a:1"), ("2 of 2 machines", "0 to 1")),
        (("run", "vision/classify", "--nodes", "2", "--node-rank", "0", "--address", "a"), ("HOST:PORT", "10.0.0.1:29500")),
        (("data", "vision/classify", "--restarts", "1"), ("data does not take --restarts", "resume")),
        (("run", "vision/classify", "--restarts", "1", "--seeds", "2"), ("--seeds does not work with --restarts",)),
        (("run", "vision/classify", "--restarts", "1", "--accelerate-config", "a.yaml"), ("settings twice", "--restarts")),
    ],
)  # fmt: skip
def test_machines_that_cannot_meet_are_refused(argv: tuple, words: tuple, launch, tmp_path: Path):
    assert_refused(launch(*argv), *words)
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_is_divided_over_the_machines():
    two = nodes.Nodes(nodes=2, rank=1, host="::1", port=29500)
    assert nodes.processes_here(two, None, "8") == 4
    assert nodes.processes_here(two, "3", "8") == 3
    with pytest.raises(UserError, match="cannot be divided"):
        nodes.processes_here(two, None, "5")
    assert "[::1]:29500" in two.meeting_message(8)


def test_an_unknown_machine_is_refused(monkeypatch):
    monkeypatch.setattr(nodes, "NAME_SECONDS", 0.0)
    with pytest.raises(UserError, match="cannot meet"):
        nodes.own_address("no-such-machine.invalid", 29500)
    assert nodes.own_address("127.0.0.1", 29500) == "127.0.0.1"


# ---------------------------------------------------------------------------------------------------------- two machines
def test_machines_with_unequal_numbers_of_processes_are_refused_with_that_cause(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("TRAINWORTHY_PROCESSES", "4")
    environment.assert_processes(4)
    with pytest.raises(UserError, match="not started with the same number of processes") as refused:
        environment.assert_processes(3)
    assert "another -n on another machine" in str(refused.value)


def two_machines(cwd: Path, *argv: str) -> list[tuple[int, str]]:
    """The same command on two machines that meet by `--nodes`: (exit code, output) of each. Python files in `cwd` are on both."""

    def settings(rank: int, port: int, own: Path) -> tuple[str, ...]:
        for file in cwd.glob("*.py"):
            shutil.copy(file, own)
        return ("--nodes", "2", "--node-rank", str(rank), "--address", f"127.0.0.1:{port}")

    return machines(cwd, *argv, settings=settings, seconds=150)


@pytest.mark.slow
@pytest.mark.verify
def test_two_machines_without_a_shared_folder_are_told_so(tmp_path: Path):
    for code, said in two_machines(tmp_path, "run", "vision/classify", *QUICK):
        assert code == 2, said
        holds(said, "the run folder is not shared by all machines", "--run.out")
        assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.verify
def test_two_machines_train_what_two_processes_train(tmp_path: Path):
    shared = tmp_path / "shared"
    first, second = two_machines(tmp_path, "run", "vision/classify", *QUICK, *EACH, "--run.out", str(shared))
    assert first[0] == second[0] == 0, first[1] + second[1]
    assert "result which digit was written?" in first[1]
    assert "node 1 of 2, 2 processes in all" in second[1]
    trainworthy("run", "vision/classify", *QUICK, *EACH, "-n", 2, cwd=tmp_path, code=0)
    ours, theirs = run_folder(shared, "*/2*"), run_folder(tmp_path)
    assert_same_run(ours, theirs)


@pytest.mark.slow
@pytest.mark.verify
@pytest.mark.skipif(not namespaces.can(), reason="needs root and network namespaces")
@pytest.mark.parametrize("more", [(), ("--shard", "full")])
def test_two_hosts_with_a_network_between_them_train_what_two_processes_train(more: tuple[str, ...], tmp_path: Path):
    """Network namespaces joined by a cable: other host names, a /tmp and a working folder of their own; the run folder is shared."""
    how = ("run", "vision/classify", *QUICK, *EACH, *more)
    first, second = namespaces.together(tmp_path / "shared", *how, "--run.out", namespaces.SHARED)
    assert first[0] == second[0] == 0, first[1] + second[1]
    assert "node 1 of 2, 2 processes in all" in second[1]
    trainworthy(*how, "-n", 2, cwd=tmp_path, code=0)
    ours, theirs = run_folder(tmp_path, "shared/*/2*"), run_folder(tmp_path)
    assert_same_run(ours, theirs)


# -------------------------------------------------------------------------------------------------------------- restarts
@pytest.mark.slow
@pytest.mark.verify
def test_a_killed_rank_is_started_again_and_nothing_changes(fork, tmp_path: Path):
    """At a random step of 20. A checkpoint that was still being written is not used, so the one before counts, too."""
    trainworthy("run", "vision/classify", *QUICK, *EACH, "-n", 2, "--run.out", "straight", cwd=tmp_path, code=0)
    step = random.randint(9, 20)
    fork((LOOP, LOOP + KILL.format(step=step)))
    done = trainworthy("run", "mine.py", *QUICK, *EACH, "-n", 2, "--restarts", 1, cwd=tmp_path, code=0)
    assert (tmp_path / "killed").exists()
    newest = (step - 1) // 4 * 4
    shown = f"killed at step {step}: {done.stdout}{done.stderr}"
    assert any(f"resumed from step-{n} " in done.stdout for n in (newest, newest - 4)), shown
    folder, other = run_folder(tmp_path), run_folder(tmp_path, "straight/*/2*")
    assert losses(folder) == losses(other), f"killed at step {step}"
    assert same(final_weights(folder), final_weights(other)), f"killed at step {step}"


@pytest.mark.slow
@pytest.mark.verify
@pytest.mark.parametrize(("restarts", "code"), [(1, 0), (0, 1)])
def test_a_rank_killed_before_the_first_checkpoint_begins_again(restarts: int, code: int, fork, tmp_path: Path):
    fork((LOOP, LOOP + KILL.format(step=2)))
    done = trainworthy("run", "mine.py", *QUICK, *EACH, "-n", 2, "--restarts", restarts, cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("result which digit was written?" in done.stdout) == (code == 0)


@pytest.mark.slow
@pytest.mark.verify
def test_a_rank_killed_on_another_machine_is_started_again(fork, tmp_path: Path):
    shared = tmp_path / "shared"
    fork((LOOP, LOOP + KILL.format(step=random.randint(9, 20))))
    both = two_machines(tmp_path, "run", "mine.py", *QUICK, *EACH, "--restarts", "2", "--run.out", str(shared))
    assert [code for code, _ in both] == [0, 0], both[0][1] + both[1][1]
    assert any("resumed from step-" in said for _, said in both)
    trainworthy("run", "vision/classify", *QUICK, *EACH, "-n", 2, cwd=tmp_path, code=0)
    assert losses(run_folder(shared, "*/2*")) == losses(run_folder(tmp_path))


@pytest.mark.slow
@pytest.mark.verify
def test_what_ended_as_planned_is_not_started_again(fork, tmp_path: Path):
    """A failed gate, and a signal of the user during the run."""
    fork((LOOP, LOOP.replace("step.batches", "step.batches[:1]")))
    done = trainworthy("check", "mine.py", "--only", "accumulation", "-n", 2, "--restarts", 3, cwd=tmp_path, code=3)
    assert done.stdout.count("gates  before training") == 1
    done = trainworthy("run", "vision/classify", *QUICK, *EACH, "-n", 2, "--restarts", 3, cwd=tmp_path,
                       once="runs/vision-classify/2*/checkpoints/*/step-4", code=5)  # fmt: skip
    assert "resumed from" not in done.stdout
    assert "trainworthy resume" in done.stderr


# -------------------------------------------------------------------------------------------------------------- examples
def assert_understood(argv: list[str], rank: int, address: str) -> None:
    """The command of an example names its machine, and a recipe with settings that this version has."""
    argv, n = config.take(argv, "-n")
    argv, found = nodes.take(argv)
    nodes.assert_usable(found, argv, config_file=None)
    assert (found.nodes, found.rank, f"{found.host}:{found.port}", found.restarts, n) == (2, rank, address, 3, "8")
    assert argv[:2] == ["run", "llm/pretrain"]
    cfg, preset = config.parse(loading.load(argv[1]).module, argv[2:], prog="trainworthy run")
    assert (preset, cfg.run.shard, cfg.train.compile) == ("full", "full", False)


def test_the_slurm_script_starts_continues_and_requeues(tmp_path: Path):
    """With `srun`, `scontrol` and `trainworthy` that only note what they are asked."""
    commands = {
        "srun": 'for i in 0 1; do SLURM_NODEID=$i "$@" || code=$?; done; exit ${code:-0}',
        "scontrol": 'case $1 in show) printf "node-a\\nnode-b\\n";; *) echo "$@" >> scontrol.log;; esac',
        "trainworthy": 'printf "%s\\n" "$*" >> asked.log; exit ${CODE:-0}',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SHARED": str(tmp_path), "SLURM_JOB_ID": "7",
           "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_GPUS_ON_NODE": "8"}  # fmt: skip

    def submit(code: int) -> list[list[str]]:
        (tmp_path / "asked.log").unlink(missing_ok=True)
        done = subprocess.run(["bash", str(ROOT / "examples" / "slurm.sh")], cwd=tmp_path, env={**env, "CODE": str(code)},
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == code, done.stderr
        return [shlex.split(line) for line in (tmp_path / "asked.log").read_text().splitlines()]

    for rank, argv in enumerate(submit(0)):
        assert_understood(argv, rank, "node-a:29500")
    assert not (tmp_path / "scontrol.log").exists()
    folder = tmp_path / "job-7" / "llm-pretrain" / "20260101-120000-ab12"
    (folder / "checkpoints" / "pretrain" / "step-5").mkdir(parents=True)
    (folder / "checkpoints" / "pretrain" / "step-5" / "manifest.json").touch()
    asked = submit(5)
    assert [argv[:2] for argv in asked] == [["resume", f"{folder}/"]] * 2
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"


def test_the_kubernetes_example_names_its_pods():
    service, _, job = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (train,) = pod["containers"]
    assert {m["name"] for m in train["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    *shell, script = train["command"]
    assert shell == ["sh", "-c"]
    words = shlex.split(script.replace("$JOB_COMPLETION_INDEX", "1"))
    assert words[:2] == ["exec", "trainworthy"]
    assert_understood(words[2:], 1, f"{job['metadata']['name']}-0.{pod['subdomain']}:29500")
