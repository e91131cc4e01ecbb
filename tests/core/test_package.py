"""What an installation adds: `trainworthy` and nothing else. Beside a project's own `core` and `recipes` everything works."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, patched
from tests.helpers.commands import execute, holds

FORK = "mine.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Python of a fresh environment: the built wheel, and the libraries of the one that runs the tests."""
    home = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(home)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    venv.create(home / "env")
    python = home / "env" / "bin" / "python"
    site = next((home / "env" / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(next(home.glob("*.whl"))) as wheel:
        wheel.extractall(site)
        added = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in added if not name.endswith(".dist-info")} == {"trainworthy"}
    (site / "libraries.pth").write_text(str(Path(pytest.__file__).parents[1]) + "\n")
    return python


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with names of its own that are ours, too."""
    for name in ("core", "guard", "recipes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"MINE = '{name}'\n")
    (tmp_path / "core" / "launch.py").write_text("raise SystemExit('this is not the launcher')\n")
    (tmp_path / "test_mine.py").write_text(
        "import core\nimport guard\nimport recipes\n\n\n"
        "def test_mine():\n    assert (core.MINE, guard.MINE, recipes.MINE) == ('core', 'guard', 'recipes')\n"
    )
    return tmp_path


def ran(python: Path, *argv: str, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return execute(python, *argv, cwd=cwd, env=env, code=0).stdout


CHECK = """
import torch, trainworthy, core
from torch.nn import functional as F
assert core.MINE == "core" and trainworthy.core.__name__ == "trainworthy.core"
generator = torch.Generator().manual_seed(0)
x = torch.randn(400, 8, generator=generator)
y = (x @ torch.randn(8, 3, generator=generator)).argmax(1)
data = torch.utils.data.TensorDataset(x, y)
learn, held_out = torch.utils.data.random_split(data, [300, 100], generator)

def accuracy(model, loader):
    right = [(model(x).argmax(1) == y).float() for x, y in loader]
    return torch.cat(right).mean().item()

def factory():
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    return trainworthy.Script(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), train=learn, val=held_out,
        classes=3, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), metric=accuracy)

trainworthy.check(factory, only=("schema", "wiring"))
"""


def test_a_wheel_lives_beside_a_foreign_core(installed: Path, project: Path):
    assert "trainworthy.core" in ran(installed, "-c", "import trainworthy, core; print(trainworthy.core.__name__, core.MINE)",
                                     cwd=project)  # fmt: skip
    assert "1 passed" in ran(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    assert "vision/classify" in ran(installed, "-m", "trainworthy", "list", cwd=project)
    (project / "script.py").write_text(CHECK)
    ran(installed, "script.py", cwd=project)


def test_the_wheel_has_every_file_and_no_other(installed: Path):
    site = next((installed.parents[1] / "lib").glob("python*/site-packages"))

    def files(folder: Path) -> set[str]:
        found = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return {str(p.relative_to(folder)) for p in found}

    homes = {"": ROOT / "trainworthy"} | {f"{name}/": ROOT / name for name in ("core", "guard", "recipes")}
    assert files(site / "trainworthy") == {f"{at}{name}" for at, home in homes.items() for name in files(home)}
    assert (site / "trainworthy" / "py.typed").is_file()
    (info,) = site.glob("trainworthy-*.dist-info")
    assert (info / "licenses" / "LICENSE").is_file()
    metadata = (info / "METADATA").read_text()
    holds(metadata, "License-Expression: Apache-2.0", "Requires-Dist: torch<", "Requires-Python: >=3.11")


def test_a_fork_runs_beside_a_foreign_core(installed: Path, project: Path):
    (project / FORK).write_text(patched((ROOT / "recipes/vision/classify.py").read_text()))
    assert "pass" in ran(installed, "-m", "trainworthy", "check", FORK, "--only", "schema", cwd=project)
    ran(installed, "-m", "trainworthy.launch", "check", FORK, "--only", "schema", cwd=project)


def test_one_copy_of_every_module_in_a_checkout():
    """`python -m core.launch`, `import core` and `import trainworthy.core` are the same modules."""
    code = ("import core, core.loop.ema, recipes, trainworthy.core.loop.ema, sys\n"
            "assert core is trainworthy.core and core.loop.ema is trainworthy.core.loop.ema\n"
            "assert core.Ema is trainworthy.core.loop.ema.Ema is trainworthy.Ema and recipes is trainworthy.recipes\n"
            "files = [m.__file__ for m in set(map(id, sys.modules.values())) and {id(m): m for m in sys.modules.values()}.values()\n"
            "         if getattr(m, '__name__', '').startswith('trainworthy') and getattr(m, '__file__', None)]\n"
            "assert len(files) == len(set(files)), files\n")  # fmt: skip
    ran(Path(sys.executable), "-c", code, cwd=ROOT)
    assert "usage: trainworthy" in ran(Path(sys.executable), "-m", "core.launch", "--help", cwd=ROOT)


def test_the_plugin_imports_nothing_of_ours(installed: Path, project: Path):
    code = ("import sys, trainworthy.pytest_plugin\n"
            "print([m for m in sys.modules if m in ('torch', 'numpy', 'accelerate') or '.core.' in m or '.guard' in m])")  # fmt: skip
    assert ran(installed, "-c", code, cwd=project).strip() == "[]"
