"""Typing errors in settings and gates are refused from the source alone, before torch is imported."""

import json
import re
import subprocess
import sys

import pytest
from trainworthy.core.base import config
from trainworthy.core.recipe import early, loading, registry

from tests.conftest import ROOT

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from trainworthy.core.cli import main; main()"
ENTRIES = registry.recipes()


def command(*words: str, cwd: object = None) -> subprocess.CompletedProcess:
    """Run a command where an import of torch fails."""
    argv = [sys.executable, "-c", WITHOUT_TORCH, *words]
    return subprocess.run(argv, capture_output=True, text=True, cwd=cwd, check=False)


@pytest.mark.parametrize("entry", ENTRIES, ids=[e.id for e in ENTRIES])
def test_names_in_the_source_are_those_of_the_loaded_recipe(entry):
    try:
        module = loading.load(entry.id).module
    except config.UserError as missing:
        pytest.skip(str(missing))
    assert set(early.names(entry.path)) == set(config.flags(module.Config))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run vision/classify --train.epoch 3", "such as --train.epochs"),
        ("run vision/classify --data-path x", "such as --data.path"),
        ("data rl/ppo --learning-rate=1", "--optim.lr"),
        ("run vision/classify --optim.lr fast", "--optim.lr needs a number"),
        ("run vision/classify --max-steps abc", "--max-steps needs a whole number"),
        ("run vision/classify --train.batch-size=1.5", "--train.batch-size needs a whole number"),
        ("check vision/classify --only overfitt", "such as overfit"),
        ("check rl/ppo --only data,probe-constnt", "such as probe-constant"),
        ("check vision/detect --only labels", "unknown gate 'labels'"),
        ("plan vision/classify --train.epoch 3", "such as --train.epochs"),
    ],
)
def test_typing_errors_need_no_torch(words, expected):
    found = command(*words.split())
    assert found.returncode == 2, found.stderr
    assert expected in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--optim.schedule foo",
            r"--optim.schedule has a value that is not offered\n  got: +'foo'\n  needed: +'cosine' \| 'wsd'",
        ),
        ("--train.max-steps", r"--train.max-steps needs a value"),
        ("--widths a b", r"--widths cannot be read\n  got: .*'a', 'b'"),
        ("--max-steps 4 5", r"words that belong to no setting\n  got: +5\n  needed: +each value behind its --setting"),
    ],
)
def test_what_the_parser_refuses_reads_like_other_errors(words, expected):
    """The parser's own frame had no next command, and broke long lines."""
    module = loading.load("vision/classify").module
    with pytest.raises(config.UserError) as refused:
        config.parse(module, words.split(), prog="trainworthy run vision/classify")
    assert re.search(expected, str(refused.value)), refused.value
    assert "next:         trainworthy run vision/classify --help" in str(refused.value)


@pytest.mark.parametrize("entry", ENTRIES, ids=[e.id for e in ENTRIES])
def test_gates_of_the_record_are_known(entry):
    """Gates that stopped a planted bug of a recipe, by their names in the record of all planted bugs."""
    rows = [json.loads(line) for line in (ROOT / "docs" / "verify.jsonl").read_text().splitlines()]
    stopped = {
        gate
        for row in rows
        if row["recipe"] == entry.id
        for seed in row["seeds"].values()
        if (gate := seed.get("first"))
    }
    early.assert_gates(entry, stopped)


FORK = """
from dataclasses import dataclass, field
from trainworthy import core
from neighbour import Mine
import numpy as np

@dataclass
class Config(core.Config):
    mine: Mine = field(default_factory=Mine)
    size: float = 1.0
    names: tuple[str, ...] = ()

STAGES = []
"""


def test_settings_of_a_fork_are_known(tmp_path):
    (tmp_path / "neighbour.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Mine:\n    deep: int = 3\n"
    )
    (tmp_path / "fork.py").write_text(FORK)
    entry = registry.find(str(tmp_path / "fork.py"))
    good = [
        "--mine.deep",
        "4",
        "--size=inf",
        "--train.epochs",
        "1e1",
        "--names",
        "a",
        "--optim.lr",
        "3e-3",
        "--max_steps",
        "3",
    ]
    early.assert_settings(entry, good, "--only", command="trainworthy run fork.py")
    early.assert_settings(entry, [], "", command="trainworthy run fork.py")
    with pytest.raises(config.UserError, match=r"mine\.deep"):
        early.assert_settings(entry, ["--mine.dep", "4"], "", command="trainworthy run fork.py")
    early.assert_gates(entry, ["a-gate-of-its-own"])
    (tmp_path / "quoted.py").write_text(FORK.replace("mine: Mine", 'mine: "Mine"'))
    early.assert_settings(registry.find(str(tmp_path / "quoted.py")), good, "", command="trainworthy run quoted.py")


@pytest.mark.parametrize(
    "mine",
    [
        "from elsewhere import *",
        "from dataclasses import make_dataclass\nMine = make_dataclass('Mine', ['dep'])",
        "import elsewhere\nMine = elsewhere.Mine",
        "from elsewhere import Mine",
        "try:\n    from a import Mine\nexcept ImportError:\n    Mine = None",
    ],
)
def test_what_the_source_does_not_show_is_left_to_the_command(mine, tmp_path):
    (tmp_path / "fork.py").write_text(FORK.replace("from neighbour import Mine", mine))
    entry = registry.find(str(tmp_path / "fork.py"))
    early.assert_settings(entry, ["--mine.dep", "4"], "", command="trainworthy run fork.py")


@pytest.mark.parametrize("name", ["run", "check", "data", "lr", "batch", "profile", "plan"])
def test_every_option_of_a_command_is_on_its_page(name):
    """An option that the page leaves out would be refused as an unknown setting."""
    import re
    from pathlib import Path

    from trainworthy.core import cli

    source = (Path(cli.__file__).parent / "commands" / f"{name}.py").read_text()
    options = set(re.findall(r"""take(?:_flag|_number)?\([\w\[\]:]+, ["'](--[a-z-]+)""", source))
    assert options <= set(re.findall(r"--[a-z-]+[a-z]", cli.page(name) + cli.HELP)), name
