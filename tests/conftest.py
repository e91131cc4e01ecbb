"""Fixtures every test file may use: the real command in a process of its own, and forks of a recipe to break."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.commands import THREADS, trainworthy

pytest_plugins = ["tests.helpers.record", "tests.helpers.sampling"]
torch.set_num_threads(
    int(THREADS)
)  # two workers of two threads on two cores wait for each other: a check took 25 s instead of 5

ROOT = Path(__file__).resolve().parent.parent
Hunk = tuple[str, str]


@dataclass
class Done:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str
    cwd: Path

    @property
    def shown(self) -> str:
        """All it printed, for a failing assertion."""
        return f"exit {self.returncode}\n{self.stdout}\n{self.stderr}"

    def folder(self) -> Path:
        """The newest run (or check) folder under its working directory."""
        found = [p.parent for p in self.cwd.glob("runs/**/args.json") if p.parent.parent.name != "stages"]
        assert found, self.shown
        return max(found, key=lambda p: p.stat().st_mtime_ns)

    def verdicts(self) -> list[dict]:
        """What gates.json says, in the order of the gates."""
        return json.loads((self.folder() / "gates.json").read_text())["gates"]


def collected(pattern: str, name: str) -> list:
    """The lists called `name` of every module under tests/ that matches `pattern`, joined: a file is used by existing."""
    files = sorted((ROOT / "tests").rglob(pattern))
    modules = [import_module(".".join(p.relative_to(ROOT).with_suffix("").parts)) for p in files]
    return [item for m in modules for item in vars(m).get(name, ())]


def run_module(*argv: str, cwd: Path, code: int | None = None, timeout: float = 300, **env: str) -> Done:
    """`trainworthy ARGV` on the CPU, from `cwd`, its lines as wide as they come; `code`: the exit code that it must have."""
    done = trainworthy(*argv, cwd=cwd, code=code, timeout=timeout, COLUMNS="200", **env)
    return Done(done.returncode, done.stdout, done.stderr, cwd)


def patched(source: str, *hunks: Hunk) -> str:
    """`source` with every (old, new) applied; each `old` must occur exactly once, so that a plant cannot rot unseen."""
    for old, new in hunks:
        assert source.count(old) == 1, f"the hunk occurs {source.count(old)} times instead of once:\n{old}"
        source = source.replace(old, new)
    return source


@pytest.fixture(autouse=True)
def _equal_draws(request: pytest.FixtureRequest) -> None:
    """Begin a module's generator anew for each test, whatever other tests this worker ran before."""
    for name in ("DRAW", "DRAWS"):
        if isinstance(draws := getattr(getattr(request, "module", None), name, None), torch.Generator):
            draws.manual_seed(0)


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Done]:
    """`launch("check", "mine.py", code=3, cwd=..., timeout=...)`; the working directory is the test's own by default."""

    def start(*argv: str, cwd: Path | None = None, **more: Any) -> Done:
        return run_module(*argv, cwd=cwd or tmp_path, **more)

    return start


@pytest.fixture
def fork(tmp_path: Path) -> Callable[..., Path]:
    """`fork((old, new), ..., recipe="vision/classify", name="mine.py")`: a patched copy of a recipe in the test's folder."""

    def write(*hunks: Hunk, recipe: str = "vision/classify", name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.write_text(patched((ROOT / "recipes" / f"{recipe}.py").read_text(), *hunks))
        return path

    return write


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of small models that smoke tests share (tests/helpers/smoke.py)."""
    return tmp_path_factory.mktemp("stand-ins")
