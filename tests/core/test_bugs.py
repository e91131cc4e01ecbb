"""bugs: what a mutant is, what counts as harm, and the command as a user types it."""

import ast
import contextlib
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from trainworthy.core.base.errors import UserError
from trainworthy.core.bugs import campaign, mutation, outcomes, page, short_run, suite

from tests.conftest import ROOT, Done
from tests.helpers.commands import environment, execute, holds

RECIPE = '''
"""A recipe."""
import torch
from torch import Tensor


def toy(cfg, run, previous=None):
    x, y = torch.rand(8, 3), torch.rand(8)

    def loss(model, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """2 + 2."""
        logits = model(batch["x"][:, 1:]).log_softmax(1)
        if cfg.odd and not cfg.even:
            logits = logits * 2
        if cfg.even:
            raise ValueError("1 + 1")
        with torch.no_grad():
            weight = torch.where(batch["y"] > 0.5, batch["y"] - logits.detach().mean(0), batch["y"])
        return {"ce": -(weight * logits.exp()).sum()}

    def evaluate(model, data):
        model.train()
        return {"right": float(model(x[0]) == y[0])}

    def preview(batch):
        return 1 + 1

    return core.Stage(loss=loss, evaluate=evaluate, preview=preview, data={"train": x})


STAGES = [toy]


def train(cfg, run, stage):
    for step in run.steps(stage):
        run.update(stage, step.batches)
'''


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(RECIPE)
    return path


def test_every_kind_of_mutant(recipe: Path):
    """Each compiles, differs in one place, has a name of its own, and lies where a bug of training can be."""
    found = mutation.mutants(recipe)
    assert {m.kind for m in found} >= {"operator", "constant", "arguments", "index", "dimension", "sign", "detach", "mode",
                                       "condition", "dropped-call"}  # fmt: skip
    assert len({m.id for m in found}) == len(found)
    assert {m.part for m in found} == {"loss", "evaluate", "train", "data"}
    lines = RECIPE.splitlines()
    assert not [
        m
        for m in found
        if "raise" in lines[m.line - 1] or lines[m.line - 1].strip() in ('"""2 + 2."""', "return 1 + 1")
    ]
    for m in found:
        changed = m.applied(RECIPE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(RECIPE))
        assert m.patch(RECIPE).startswith("@@")
    patches = " ".join(m.patch(RECIPE) for m in found)
    holds(patches, "batch['y'] + logits", "torch.enable_grad()", "model.eval()", '["x"][:, :]', "log_softmax(0)",
                  "batch['y'], batch['y'] - logits", "(not (cfg.odd", "pass")  # fmt: skip


def test_settings_and_checks_of_the_input_are_not_mutated_in_a_helper(tmp_path: Path):
    """Another default is another setting, and a check of the input with another test raises at once, or never."""
    helper = tmp_path / "helper.py"
    helper.write_text(
        "@dataclass(frozen=True)\nclass Settings:\n    ratio: float = 0.5\n\n    def kept(self, n):\n        return n * 3\n\n"
        "def split(cfg, n):\n    if cfg.ratio < 1:\n        raise ValueError('ratio')\n    if n > 4:\n        n = 4\n    return n\n"
    )
    assert {m.line for m in mutation.mutants(helper, helper=True)} == {6, 11, 12}


@pytest.mark.parametrize("recipe", ["llm/sft", "llm/dpo", "llm/reward", "rl/grpo", "diffusion/flow"])
def test_data_loss_and_evaluation_are_mutated_also_if_a_trainer_has_the_loss(recipe: str):
    """hosted.host(trainer, ...) makes these stages, and not Stage(...)."""
    found = mutation.mutants(ROOT / "recipes" / f"{recipe}.py")
    of = {part: sum(m.part == part for m in found) for part in ("data", "loss", "evaluate")}
    assert min(of.values()) >= 5, of


def test_a_larger_sample_contains_a_smaller_one(recipe: Path):
    found = mutation.mutants(recipe)
    assert mutation.drawn(found)[:5] == mutation.drawn(found[::-1])[:5]
    line = next(i for i, text in enumerate(RECIPE.splitlines(), 1) if "log_softmax" in text)
    assert {m.line for m in mutation.reached(found, {str(recipe): [line]})} == {line}


# Five healthy runs: 95% of single runs lie in 0.9 +- 0.048.
REFERENCE = {"metric": "accuracy", "higher": True, "floor": 0.1, "ceiling": 1.0, "values": [0.88, 0.89, 0.9, 0.91, 0.92],
             "first": {"losses": [2.0, 1.0], "metrics": {"accuracy": 0.88, "nll": 0.5}, "weights": "a"}}  # fmt: skip


def ran(
    accuracy: float, *, weights: str = "b", nll: float = 0.5, losses=(2.0, 1.5), crashed: str = "", stopped: str = ""
) -> dict:
    metrics = {"accuracy": accuracy, "nll": nll}
    return {"losses": list(losses), "metrics": metrics, "weights": weights, "crashed": crashed, "stopped": stopped}


@pytest.mark.parametrize(
    ("runs", "part", "outcome", "words"),
    [
        ([ran(0.88, weights="a", losses=(2.0, 1.0))], "loss", "equal", "last bit"),
        ([ran(0.88, weights="a", losses=(2.0, 1.0), nll=0.5 + 1e-7)], "loss", "equal", "rounding"),
        ([ran(0.88, weights="a", losses=(2.0, 1.0), nll=0.25)], "evaluate", "harmful", "nll 0.5 -> 0.25"),
        ([ran(0.88, crashed="KeyError: 'x'")], "loss", "crashed", "KeyError"),
        ([ran(0.88, stopped="10 non-finite steps")], "loss", "harmful", "stops itself"),
        ([ran(0.86)], "loss", "harmless", "0.86"),
        ([ran(0.8), ran(0.86)], "loss", "harmless", "0.8"),
        ([ran(0.8), ran(0.84)], "loss", "harmful", "0.8"),
        ([ran(math.nan), ran(0.9)], "loss", "harmful", "nan"),
        ([ran(0.99), ran(0.99)], "loss", "harmless", "0.99"),
        ([ran(0.99), ran(0.99)], "evaluate", "harmful", "too good"),
    ],
)
def test_the_rule_of_harm(runs: list[dict], part: str, outcome: str, words: str):
    found, why = outcomes.classify(runs, REFERENCE, part)
    assert (found, words in why) == (outcome, True), why


def test_cause_named_first_and_intervals():
    rows = [{"kind": "planted", "recipe": "a/b", "case": str(i), "seed": 0, "commit": "c", "row": "C1", "gate": "wiring", "note": "",
             "outcome": "caught" if i < 9 else "missed", "first": "wiring" if i < 8 else "data", "named": i < 7} for i in range(10)]  # fmt: skip
    found = page.summary(rows, [])
    assert page.words(found["caught"]) == "9 of 10: 0.900 [0.596, 0.982]"
    assert found["named_first"]["hits"] == 7
    assert found["by_row"]["C1"]["caught"]["of"] == 10
    assert "missed    a/b 9" in "\n".join(page.summary_lines(found))


def test_the_page_of_mutants_shows_survivors_first_and_every_change(tmp_path: Path):
    """It has no tables about planted bugs, which were not run, and no mutants of an earlier run with other steps."""
    row = {"kind": "mutants", "recipe": "a/b", "seed": 0, "commit": "c", "first": "", "part": "data", "mutation": "index", "row": "",
           "note": "", "patch": "@@ -1 +1 @@\n-    x[i]\n+    x[i - 1]"}  # fmt: skip
    rows = [row | {"case": "one", "key": "1", "outcome": "survived", "harm": "accuracy 0.2"},
            row | {"case": "two", "key": "2", "outcome": "equal", "note": "same losses"},
            row | {"case": "earlier", "key": "0", "outcome": "stopped", "harm": "accuracy 0.1"}]  # fmt: skip
    runs = [{"recipe": "a/b", "found": 9, "executed": 3, "run": 2, "steps": 5, "metric": "accuracy", "healthy": [0.9],
             "rule": "below 0.8 at both seeds", "keys": ["1", "2"]}]  # fmt: skip
    found = page.summary(rows, runs)
    assert page.words(found["mutants_stopped"]).startswith("0 of 1")
    text = page.write(tmp_path, found).read_text()
    assert text.index("Survivors") < text.index("Every mutant") < text.index("- x[i]\n+ x[i - 1]")
    assert "earlier" not in text
    assert "false alarm" not in text


def test_without_a_checkout_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    with pytest.raises(UserError, match="come with the source code"):
        suite.cases([], ["planted"])


def test_a_planted_bug_through_the_command_and_again(launch, tmp_path: Path):
    """It is caught with its cause; the same command then finds it in the journal and runs nothing."""
    argv = ("bugs", "vision/classify", "--kind", "planted", "--sample", "1", "--to", "found")
    done: Done = launch(*argv, code=0)
    assert "planted bugs caught      1 of 1" in done.stdout
    found = json.loads((tmp_path / "found" / "bugs.json").read_text())
    by_recipe = found["by_recipe"]["vision/classify"]
    assert by_recipe["caught"]["hits"] == 1
    assert f"cause named first      {by_recipe['named_first']['hits']} of 1" in done.stdout
    assert found["commits"] == [suite.commit()]
    assert "<h1>" in (tmp_path / "found" / "bugs.html").read_text()
    journal = (tmp_path / "found" / "journal.jsonl").read_text()
    launch(*argv, code=0)
    assert (tmp_path / "found" / "journal.jsonl").read_text() == journal


@pytest.mark.parametrize("asked", [("vision/classify", "--kind", "planted", "--sample", "2"), ("--mutate", "vision/classify", "--sample", "1")],
                         ids=["in-a-thread", "in-the-main-thread"])  # fmt: skip
def test_ctrl_c_pressed_several_times_ends_with_one_message(asked: tuple[str, ...], tmp_path: Path):
    """No traceback, exit code 5, and no child is left. Children have groups of their own, so only the command gets the signal."""
    with (tmp_path / "said").open("w") as said:
        command = subprocess.Popen([sys.executable, "-m", "trainworthy", "bugs", *asked, "--to", "found"], cwd=tmp_path, stdout=said,
                                   stderr=subprocess.STDOUT, env=environment())  # fmt: skip
    deadline, children = time.monotonic() + 60, []
    while not children and time.monotonic() < deadline and command.poll() is None:
        time.sleep(0.05)
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended since it was listed
            found = {p: p.cmdline() for p in psutil.Process(command.pid).children()}
            # torch's import starts programs: before its own command line, such a child has the parent's
            children = [p for p, line in found.items() if line[:2] == [sys.executable, "-m"] and line != command.args]
    assert children, (tmp_path / "said").read_text()
    for _ in range(4):
        command.send_signal(signal.SIGINT)
        time.sleep(0.02)
    assert command.wait(20) == 5, (tmp_path / "said").read_text()
    text = (tmp_path / "said").read_text()
    assert text.count("interrupted: 0 results are kept") == 1, text
    assert "Traceback" not in text, text
    assert not [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_short_run_evaluates_the_test_split():
    """A mutant of that split alone changes neither losses nor weights nor a number of the validation split."""
    found = short_run.short_run("vision/classify", 0, 2, ["--widths", "8", "8", "8"], [])
    assert not found.crashed
    assert {"accuracy", "test/accuracy", "test/nll"} <= set(found.metrics)


@pytest.mark.verify
def test_mutants_through_the_command(launch, tmp_path: Path):
    """Two mutants of a small net: each gets an outcome, and the page counts all that there are."""
    argv = (
        "bugs",
        "--mutate",
        "vision/classify",
        "--sample",
        "2",
        "--steps",
        "20",
        "--to",
        "found",
        "--widths",
        "8",
        "8",
        "8",
    )
    done: Done = launch(*argv, timeout=600)
    assert done.returncode in (0, 3), done.shown
    found = json.loads((tmp_path / "found" / "bugs.json").read_text())
    [run] = found["mutant_runs"]
    assert run["found"] > run["executed"] > run["run"] == 2
    outcomes = [row["outcome"] for row in found["rows"] if row["kind"] == "mutants"]
    assert len(outcomes) == 2
    assert set(outcomes) <= {"crashed", "equal", "harmless", "stopped", "survived"}
    assert (done.returncode == 3) == ("survived" in outcomes)


def test_a_mutated_helper_takes_the_place_of_the_original(tmp_path: Path):
    helper = ROOT / "recipes" / "vision" / "data" / "mixing.py"
    one = mutation.mutants(helper, helper=True)[0]
    file = campaign.mutated("vision/classify", one, tmp_path)
    code = (f"from trainworthy.core.recipe import loading; m = loading.load({str(file)!r}).module; print(m.mixing.__file__);"
            "from trainworthy.recipes.vision.data import mixing; print(mixing.__file__)")  # fmt: skip
    done = execute(sys.executable, "-c", code, cwd=ROOT)
    assert done.stdout.split() == [str(tmp_path / "mixing.py")] * 2, done.stderr
    assert (tmp_path / "mixing.py").read_text() == one.applied(helper.read_text())


def test_break_shows_the_bug_and_the_gate(launch, tmp_path: Path):
    done: Done = launch(
        "break", "vision/classify", "--bug", "no-zero-grad", "--steps", "12", "--yes", timeout=300, code=0
    )
    holds(done.stdout, "* with the bug", "the bug: no-zero-grad", "stopped by the gate `wiring`", "zero_grad() is missing",
                  "+        loss.backward()", "likely causes")  # fmt: skip
    assert "no update" not in done.stdout
    assert (tmp_path / "runs" / "break" / "vision-classify" / "curves.png").read_bytes().startswith(b"\x89PNG")
