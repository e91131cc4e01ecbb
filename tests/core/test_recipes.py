"""Every recipe on disk, by existing: found, healthy, stopped and resumed bit for bit, told about. One more touches nothing."""

import ast
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file
from trainworthy.core.recipe.registry import HOME, Entry, recipes

from tests.conftest import ROOT
from tests.helpers.commands import holds, losses, read, run_folder, same, stop, trainworthy
from tests.helpers.settings import SHORT
from tests.helpers.smoke import complete

OURS = [e for e in recipes() if HOME in e.path.parents]
CHECKED_QUICKLY = ("rl/ppo",)
STOPPED_QUICKLY = ("rl/ppo", "rl/sac")
"""Of these `make test` has the healthy check, and the stop and resume; of all others, which cost up to four minutes of CPU time
each, `make verify`. (vision/classify is stopped and resumed in test_life, two stages in a row in test_stages; the smoke tests run most recipes
with small stand-ins in `make test`.)"""
ALWAYS = ("--gates.no-enabled", "--run.no-tensorboard", "--run.keep-checkpoints", "1000")


def stages(entry: Entry) -> list[str]:
    """Names in STAGES, read without importing the recipe."""
    tree = ast.parse(entry.path.read_text())
    found = next(
        n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "STAGES"
    )
    return [n.id for n in found.elts]


def argv(entry: Entry) -> tuple[str, ...]:
    return ("run", entry.id, *ALWAYS, *SHORT.get(entry.id, ("--train.epochs", "0.5", "--run.save-every", "0.1")))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory):
    """`straight(entry)`: the folder of a short run that nobody stopped, made once."""

    @cache
    def made(recipe: str) -> Path:
        cwd = tmp_path_factory.mktemp("straight")
        trainworthy(*argv(next(e for e in OURS if e.id == recipe)), cwd=cwd, code=0)
        return run_folder(cwd)

    return lambda entry: made(entry.id)


def grouped(entry: Entry):
    """Tests that share a straight run belong to one worker."""
    return pytest.mark.xdist_group(entry.id)


@pytest.mark.parametrize(
    ("entry", "stage"),
    [
        pytest.param(e, s, id=f"{e.id}-{s}", marks=[grouped(e)] + [pytest.mark.verify] * (e.id not in STOPPED_QUICKLY))
        for e in OURS
        for s in stages(e)
    ],
)
def test_stopped_in_any_stage_and_resumed_is_the_same_run(entry: Entry, stage: str, straight, tmp_path: Path):
    whole = straight(entry)
    code, said = stop(*argv(entry), cwd=tmp_path, once=f"runs/*/*/checkpoints/{stage}/step-*", seconds=400)
    assert code == 5, said
    folder = run_folder(tmp_path)
    assert len(losses(home(folder, entry, stage))) < len(losses(home(whole, entry, stage))), "it was stopped too late"
    trainworthy("resume", folder, cwd=tmp_path, code=0)
    for name in stages(entry):
        assert same(*(load_file(f / "checkpoints" / name / "latest" / "model.safetensors") for f in (folder, whole)))
        assert losses(home(folder, entry, name)) == losses(home(whole, entry, name))
    kept = [read(f / "summary.json")["metrics"] for f in (folder, whole)]
    assert kept[0] == kept[1]


def home(folder: Path, entry: Entry, stage: str) -> Path:
    """Where the files of a stage lie."""
    return folder if stage == stages(entry)[-1] else folder / "stages" / stage


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.id, marks=[grouped(e)] + [pytest.mark.verify] * (e.id not in STOPPED_QUICKLY)) for e in OURS],
)
def test_a_short_run_leaves_what_a_run_leaves(entry: Entry, straight):
    complete(straight(entry))


CHECKED = [
    pytest.param(e, seed, id=f"{e.id}-{seed}", marks=[pytest.mark.verify] * (seed > 0 or e.id not in CHECKED_QUICKLY))
    for e in OURS
    if e.id != "vision/classify"
    for seed in range(3)
]


@pytest.mark.parametrize(("entry", "seed"), CHECKED)
def test_no_gate_fails_a_healthy_recipe(entry: Entry, seed: int, launch):
    """vision/classify has tests/core/test_quiet.py."""
    done = launch("check", entry.id, "--run.seed", str(seed), timeout=600, code=0)
    assert {v["verdict"] for v in done.verdicts()} == {"pass", "skip"}, done.shown
    assert not [v for v in done.verdicts() if v["verdict"] == "skip" and not v["reason"]]


@pytest.mark.parametrize("entry", OURS, ids=lambda e: e.id)
def test_it_is_told_about(entry: Entry):
    """A page with its result; one file of a length that can be read."""
    assert (ROOT / "docs" / "recipes" / f"{entry.id.replace('/', '-')}.md").is_file()
    assert 100 <= len(entry.path.read_text().splitlines()) <= 320
    assert entry.summary


def test_a_seventh_domain_touches_nothing_outside_its_folder(tmp_path: Path, launch):
    """A package that brings `sound/tones` through the entry point is listed, explained, checked and run like ours."""
    site = tmp_path / "site"
    domain = site / "other_recipes" / "sound"
    domain.mkdir(parents=True)
    source = (HOME / "vision" / "classify.py").read_text().splitlines(keepends=True)
    (domain / "tones.py").write_text('"""Tell tones apart.\n' + "".join(source[1:]))
    (site / "other_recipes" / "__init__.py").touch()
    info = site / "other_recipes-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-recipes\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[trainworthy.recipes]\nother = other_recipes\n")
    env = {"PYTHONPATH": f"{ROOT}:{site}"}
    listed = launch("list", **env)
    holds(listed.stdout, "sound/tones", "Tell tones apart")
    done = launch("check", "sound/tones", "--only", "schema,initial-loss", **env, code=0)
    launch("run", "sound/tones", "--train.epochs", "0.1", *ALWAYS, **env, code=0)
    assert done.folder().relative_to(tmp_path).parts[1] == "sound-tones"
    launch("fork", "sound/tones", "./mine.py", **env, code=0)
