"""doctor, diff and batch through the real command: what they say, and their exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import environment, trainworthy


# ---------------------------------------------------------------------------------------------------------------- doctor
def doctor(tmp_path: Path, *, gpus: str = "", processes: str = "", **env: str) -> dict[str, dict]:
    """The facts of `doctor --json` by name, on a machine whose driver tool says `gpus` and `processes`."""
    if gpus:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        tool.write_text(f"""#!/bin/sh
case "$1" in
--query-gpu*) echo "{gpus}";;
--query-compute*) echo "{processes}";;
*) echo "Driver Version: 535.1   CUDA Version: 12.2";;
esac
""")
        tool.chmod(0o755)
        env["PATH"] = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"
    done = trainworthy("doctor", "--json", cwd=tmp_path, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return {fact["name"]: fact for fact in json.loads(done.stdout)["facts"]}


def test_doctor_reads_at_once_and_imports_nothing_heavy(tmp_path: Path):
    done = trainworthy("doctor", cwd=tmp_path, TRAINWORTHY_CACHE="/tmp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "next:" not in line and "/" not in line)
    for words in ("torch ", "vision/classify", "cores", "/dev/shm", "disk: runs", "the core can run"):
        assert words in done.stdout, words
    code = ("import atexit, sys; sys.argv = ['trainworthy', 'doctor']; atexit.register(lambda: print('torch' in sys.modules));"
            "from core.cli import main; main()")  # fmt: skip
    inside = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert inside.stdout.endswith("False\n"), inside.stderr
    assert not list(tmp_path.iterdir())


def test_doctor_says_who_shares_the_accelerator(tmp_path: Path):
    facts = doctor(tmp_path, gpus="GPU-1, H100, 535.1, 80000, 40000\nGPU-2, H100, 535.1, 80000, 3",
                   processes="GPU-1, 4711, 39000, /usr/bin/python3")  # fmt: skip
    assert facts["accelerator 0"]["level"] == "mind"
    assert "4711 python3" in facts["accelerator 0"]["meaning"]
    assert "CUDA_VISIBLE_DEVICES=1" in facts["accelerator 0"]["next"]
    assert facts["accelerator 1"]["level"] == "ok"
    assert facts["visible"]["level"] == "mind", "the tests hide every accelerator"


def test_doctor_says_what_is_missing_and_how_to_get_it(tmp_path: Path):
    """Another torch and an old tyro, as the metadata in a folder in front of the installed ones say."""
    packages = tmp_path / "packages"
    for name, version in (("torch", "2.12.0"), ("tyro", "0.1.0")):
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = trainworthy("doctor", "--json", cwd=tmp_path, PYTHONPATH=path, OMP_NUM_THREADS="4096")
    assert done.returncode == 2, done.stdout + done.stderr
    found = json.loads(done.stdout)
    facts = {fact["name"]: fact for fact in found["facts"]}
    assert found["fit"] is False
    assert (facts["tyro"]["level"], facts["torch"]["level"], facts["threads"]["level"]) == ("missing", "ok", "mind")
    assert "tyro>=0.9 is needed, this is 0.1.0" in facts["tyro"]["meaning"]
    assert "pip install" in facts["tyro"]["next"]
    assert facts["torchvision"]["level"] == "mind"
    assert "torchvision::nms" in facts["torchvision"]["meaning"]


# ------------------------------------------------------------------------------------------------------------- bad usage
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("doctor", "--jsn"), "doctor takes no arguments but --json"),
    ],
    ids=" ".join,
)
def test_bad_usage(argv: tuple[str, ...], words: str, tmp_path: Path):
    done = trainworthy(*argv, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert words in done.stderr
    assert not list(tmp_path.rglob("args.json"))
