"""Machines and places on which a run must not fail for reasons that are none of its own: no git, no home, streams that were closed,
a locale without UTF-8, odd names of folders."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from trainworthy.core.loop.weights import sketch

from tests.helpers.commands import BIN, QUICK, environment, execute, read, run_folder

ODD = "my 'own' \"run\" \u00e9\u4e2d $HOME;#"


def shell(command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    """Run a shell command with the real `trainworthy` as $TW."""
    known = {k: v for k, v in environment(TW=str(BIN / "trainworthy"), **env).items() if v}
    return execute("/bin/sh", "-c", command, cwd=cwd, env=known)


def test_a_bare_container_without_git_home_utf8_or_open_streams(tmp_path: Path):
    """As `docker run -u 12345` has it, started by a service that closes what it does not need."""
    cwd = tmp_path / ODD
    cwd.mkdir()
    cache = os.environ.get("TRAINWORTHY_CACHE") or str(Path.home() / ".cache" / "trainworthy")
    bare = {"PATH": str(tmp_path), "HOME": "", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "TRAINWORTHY_CACHE": cache}
    done = shell(f"exec $TW run vision/classify {shlex.join(QUICK)} >&- 2>&-", cwd, **bare)
    assert done.returncode == 0, done.stderr
    folder = run_folder(cwd)
    assert read(folder / "summary.json")["steps"] == 20
    assert read(folder / "environment.json")["commit"] == ""
    assert "vision/classify" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["$TW list", "$TW data vision/classify"])
def test_output_that_cannot_show_a_character_shows_another(command: str, tmp_path: Path):
    done = shell(command, tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert len(done.stdout) > 200


def test_a_user_without_a_home_gets_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch):
    from trainworthy.core.data.assets import cache_dir

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("TRAINWORTHY_CACHE", "/some/where")
    assert cache_dir() == Path("/some/where")
    monkeypatch.delenv("TRAINWORTHY_CACHE")
    assert cache_dir().name == f"trainworthy-{os.getuid()}"


def test_weights_are_known_by_all_of_their_bits():
    torch.manual_seed(0)
    odd = nn.Module()
    for i, kind in enumerate((torch.float8_e4m3fn, torch.complex64, torch.uint16, torch.bool, torch.bfloat16)):
        odd.register_buffer(f"kind{i}", torch.ones(3, 3).to(kind))
    odd.register_buffer("nothing", torch.empty(0))
    known = sketch(odd)
    odd.kind0[1, 1] = 2
    assert sketch(odd) != known
    one = nn.Sequential(nn.Linear(300, 300), nn.GELU(), nn.Linear(300, 2), nn.Dropout(0.1))
    found = sketch(one)
    assert sketch(one) == found
    with torch.no_grad():
        one[0].weight[17, 5] += 1e-6
        changed = sketch(one)
        one[0].weight[17, 5] -= 1e-6
    assert changed != found
    one[3].p = 0.2
    assert sketch(one) != found
    one.config = {"rms_norm_eps": 1e-5, "_name_or_path": "/here"}
    first = sketch(one)
    one.config = {"rms_norm_eps": 1e-5, "_name_or_path": "/there"}
    assert sketch(one) == first, "the same model in another folder"
    one.config = {"rms_norm_eps": 1e-6, "_name_or_path": "/here"}
    assert sketch(one) != first
