"""Several machines, by the real command: two launchers with folders of their own."""

import os
import shlex
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml
from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.recipe import loading
from trainworthy.core.session import nodes

from tests.conftest import ROOT
from tests.helpers.commands import BIN, QUICK, environment, final_weights, losses, run_folder, same, trainworthy

EACH = ("--run.log-every", "1")
TWO = ("--nodes", "2", "--node-rank", "0", "--address", "127.0.0.1:29500")


# ---------------------------------------------------------------------------------------------------------- the command
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("run", "vision/classify", "--nodes", "2"), ("must know where to meet", "--node-rank, --address")),
        (("run", "vision/classify", "--nodes", "2", "--node-rank", "2", "--address", "a:1"), ("2 of 2 machines", "0 to 1")),
        (("run", "vision/classify", "--nodes", "2", "--node-rank", "0", "--address", "a"), ("HOST:PORT", "10.0.0.1:29500")),
        (("data", "vision/classify", *TWO), ("data does not take --nodes", "resume")),
        (("run", "vision/classify", *TWO, "--seeds", "2"), ("--seeds does not work with --nodes",)),
        (("run", "vision/classify", *TWO, "--accelerate-config", "a.yaml"), ("name the machines twice",)),
    ],
)  # fmt: skip
def test_machines_that_cannot_meet_are_refused(argv: tuple, words: tuple, launch, tmp_path: Path):
    done = launch(*argv)
    assert done.returncode == 2, done.shown
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_is_divided_over_the_machines():
    two = nodes.Nodes(nodes=2, rank=1, host="::1", port=29500)
    assert nodes.processes_here(two, None, "8") == 4
    assert nodes.processes_here(two, "3", "8") == 3
    with pytest.raises(UserError, match="cannot be divided"):
        nodes.processes_here(two, None, "5")
    assert "[::1]:29500" in two.line(8)


# ---------------------------------------------------------------------------------------------------------- two machines
def two_machines(cwd: Path, *argv: str) -> list[tuple[int, str]]:
    """The same command on two machines with a working folder and a /tmp of their own: (exit code, output) of each. Files in `cwd`
    are on both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in (0, 1):
        own = cwd / f"machine-{rank}"
        own.mkdir(parents=True, exist_ok=True)
        for file in cwd.glob("*.py"):
            shutil.copy(file, own)
        private = tempfile.mkdtemp(prefix="tw-", dir="/tmp")  # a longer path has no room for the workers' sockets
        where = ("--nodes", "2", "--node-rank", str(rank), "--address", f"127.0.0.1:{port}")
        started.append(subprocess.Popen([str(BIN / "trainworthy"), *argv, *where], cwd=own, stdout=subprocess.PIPE,
                                        env=environment(TMPDIR=private, PYTHONUNBUFFERED="1"), stderr=subprocess.STDOUT,
                                        text=True))  # fmt: skip
    try:
        said = [child.communicate(timeout=150)[0] for child in started]
    finally:
        for child in started:
            child.terminate()
    return [(child.returncode, words) for child, words in zip(started, said, strict=True)]


@pytest.mark.slow
def test_two_machines_without_a_shared_folder_are_told_so(tmp_path: Path):
    for code, said in two_machines(tmp_path, "run", "vision/classify", *QUICK):
        assert code == 2, said
        assert "the run folder is not shared by all machines" in said
        assert "--run.out" in said
        assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.verify
def test_two_machines_train_what_two_processes_train(tmp_path: Path):
    shared = tmp_path / "shared"
    first, second = two_machines(tmp_path, "run", "vision/classify", *QUICK, *EACH, "--run.out", str(shared))
    assert first[0] == second[0] == 0, first[1] + second[1]
    assert "result which digit was written?" in first[1]
    assert "node 1 of 2, 2 processes in all" in second[1]
    done = trainworthy("run", "vision/classify", *QUICK, *EACH, "-n", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours, theirs = run_folder(shared, "*/2*"), run_folder(tmp_path)
    assert losses(ours) == losses(theirs)
    assert same(final_weights(ours), final_weights(theirs))


# -------------------------------------------------------------------------------------------------------------- examples
def assert_understood(argv: list[str], rank: int, address: str) -> None:
    """The command of an example names its machine, and a recipe with settings that this version has."""
    argv, n = config.take(argv, "-n")
    argv, found = nodes.take(argv)
    nodes.assert_usable(found, argv, config_file=None)
    assert (found.nodes, found.rank, f"{found.host}:{found.port}", n) == (2, rank, address, "8")
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
