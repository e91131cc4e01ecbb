"""Several stages in a row: own settings, gates for each, weights handed on, one resume."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.commands import assert_refused, losses, read, run_folder, same, stop

DATA = "    data: pictures.Source = field(default_factory=pictures.Source)\n"
CONFIG = (
    DATA,
    "    first: core.Phase = field(default_factory=lambda: core.Phase(epochs=0.5, lr=2e-3))\n"
    "    second: core.Phase = field(default_factory=lambda: core.Phase(epochs=0.3, lr=1e-3))\n" + DATA,
)
STAGES = (
    "STAGES = [classify]\n",
    """def first(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    stage = classify(cfg, run)
    stage.name = "first"
    return stage


def second(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    stage = classify(cfg, run)
    stage.name, stage.expect.initial_loss = "second", None
    stage.model.load_state_dict(previous.eval_model.state_dict())
    return stage


STAGES = [first, second]
""",
)
QUICK = ("--gates.no-enabled", "--run.no-tensorboard")


@pytest.fixture
def two(fork: Callable[..., Path]) -> Path:
    """A recipe of two stages: the second goes on with the first one's weights at another rate."""
    return fork(CONFIG, STAGES)


def weights(folder: Path, stage: str, which: str = "latest") -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / stage / which / "model.safetensors")


def test_each_stage_has_its_own_settings_and_files(two, launch):
    """The second starts where the first ended; the last one's result is the recipe's."""
    done = launch("run", "mine.py", *QUICK, "--second.epochs", "0.02", "--optim.schedule", "constant", code=0)
    folder = done.folder()
    first = folder / "stages" / "first"
    assert (read(folder / "summary.json")["stage"], read(first / "summary.json")["stage"]) == ("second", "first")
    assert (len(losses(first)), len(losses(folder))) == (32, 2)
    assert max(r["step/lr"] for r in read(first / "step_metrics.jsonl")) == 2e-3
    assert max(r["step/lr"] for r in read(folder / "step_metrics.jsonl")) == 1e-3
    assert losses(folder)[0] < 2.29 < losses(first)[0]  # it was handed what the first had learnt
    for page in (folder, first):
        assert (page / "report.html").is_file()
        assert (page / "card.md").is_file()
    assert "stages/first/report.html" in (folder / "report.html").read_text()
    assert "32 steps" in done.stdout


def test_a_stage_of_no_epochs_is_left_out(two, launch):
    """The one before it is then the last, and its result the recipe's."""
    done = launch("run", "mine.py", *QUICK, "--first.epochs", "0.02", "--second.epochs", "0", code=0)
    assert read(done.folder() / "summary.json")["stage"] == "first"
    assert not (done.folder() / "stages").exists()


@pytest.mark.verify
def test_a_run_without_any_stage_is_refused(two, launch):
    assert_refused(launch("run", "mine.py", *QUICK, "--first.epochs", "0", "--second.epochs", "0"), "no stage is left")


@pytest.mark.verify
def test_the_best_weights_are_handed_on_where_asked(two, launch):
    """A first stage that ruins itself at the end hands on the weights of its best evaluation."""
    due = "        if step.due(cfg.train.eval_every)"
    ruin = '        if stage.name == "first" and step.index == 31:\n            stage.model.head.weight.data.zero_()\n'
    two.write_text(two.read_text().replace(due, ruin + due))
    argv = ("run", "mine.py", *QUICK, "--second.epochs", "0.02", "--first.eval-every", "0.125")
    assert losses(launch(*argv).folder())[0] > 2.3
    assert losses(launch(*argv, "--first.hand-on", "best").folder())[0] < 2.29


@pytest.mark.parametrize("stage", ["first", pytest.param("second", marks=pytest.mark.verify)])
def test_resume_goes_on_in_the_stage_that_was_stopped(stage: str, two, launch, tmp_path: Path):
    """SIGTERM in the middle of either stage, then resume: bitwise the run that was never stopped."""
    argv = ("run", "mine.py", *QUICK, "--run.save-every", "0.05")
    straight = launch(*argv, code=0)
    once = f"stopped/*/*/checkpoints/{stage}/step-*"
    code, said = stop(*argv, "--run.out", "stopped", cwd=tmp_path, once=once)
    assert code == 5, said
    folder = run_folder(tmp_path, "stopped/*/2*")
    assert (folder / "stages" / "first" / "summary.json").exists() == (stage == "second")
    launch("resume", str(folder), code=0)
    whole = straight.folder()
    for name, home in (("first", Path("stages/first")), ("second", Path("."))):
        assert same(weights(folder, name), weights(whole, name))
        assert losses(folder / home) == losses(whole / home)
    assert_refused(launch("resume", str(folder / "stages" / "first")), "one stage of a run")


def test_gates_prove_each_stage(two, launch):
    """The second is checked from what eight samples taught the first."""
    only = "initial-loss,overfit"
    done = launch("check", "mine.py", "--only", only, code=0)
    assert [(v["stage"], v["id"], v["verdict"]) for v in done.verdicts()] == [
        ("first", "initial-loss", "pass"), ("first", "overfit", "pass"),
        ("second", "initial-loss", "skip"), ("second", "overfit", "pass"),
    ]  # fmt: skip
    assert done.stdout.index("stage  first, 1 of 2") < done.stdout.index("stage  second, 2 of 2")
    one = launch("check", "mine.py", "--only", only, "--stage", "second")
    assert {v["stage"] for v in one.verdicts()} == {"second"}


@pytest.mark.verify
def test_the_second_is_proved_again_before_it_trains(two, launch):
    """A second stage that breaks on a first one that was trained for long: its first proof passes, the later one stops it.
    The model counts its own steps: settings are checked on stages that were never trained, and kept stages lose their optimiser state."""
    update = "        run.update(stage, step.batches)\n"
    count = f"{update}        stage.model.steps_taken = step.index + 1\n"
    spoil = (
        '    if getattr(previous.model, "steps_taken", 0) > 60:\n'
        '        stage.loss = lambda model, batch: {"ce": model(batch["image"]).sum() * 0}\n    return stage\n\n\nSTAGES'
    )
    source = two.read_text()
    assert update in source
    two.write_text(source.replace(update, count).replace("    return stage\n\n\nSTAGES", spoil))
    fails = launch("run", "mine.py", "--run.no-tensorboard", "--first.epochs", "1", code=3)
    assert "from the previous stage, fully trained" in fails.stdout
    assert (fails.folder() / "stages" / "first" / "summary.json").is_file()
    assert not (fails.folder() / "checkpoints" / "second").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--train.epochs", "3"), ("--train.epochs does nothing here", "--first.epochs or --second.epochs")),
        (("--second.lr", "-1"), ("--optim.lr must be positive",)),
        (("--stage", "third"), ("unknown stage 'third'",)),
    ],
    ids=["idle setting", "bad value", "unknown stage"],
)
def test_bad_settings_are_told(argv, words, two, launch):
    done = launch("check", "mine.py", *argv, code=2)
    assert not [w for w in words if w not in done.stderr], done.stderr


def test_a_stage_without_settings_of_its_name_is_told(fork, launch):
    fork(STAGES)
    assert_refused(launch("check", "mine.py"), "the stage 'first' has no settings of its own")


# --------------------------------------------------------------------------------------------------------------- fallbacks
FALLBACKS = (
    STAGES[0],
    """from trainworthy.core.base.verdict import Finding
from trainworthy.core.monitoring.monitors import monitor


def higher(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    stage = classify(cfg, run)
    stage.name, stage.expect.initial_loss = "higher", None
    stage.model.load_state_dict(previous.eval_model.state_dict())
    return stage


def top_most(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    stage = higher(cfg, run, previous)
    stage.name = "top_most"
    return stage


@monitor("low", rows="C11", title="high enough")
def low(history: list[dict]) -> Finding:
    return Finding(False, "low", "high", "climb", evidence={"fallback": "higher"})


def told(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    stage = classify(cfg, run)
    stage.name, stage.monitors = "told", [low]
    return stage


STAGES, FALLBACKS = [told], [higher, top_most]
""",
)
PHASES = (
    DATA,
    "    higher: core.Phase = field(default_factory=lambda: core.Phase(epochs=0.1, lr=1e-3))\n"
    "    top_most: core.Phase = field(default_factory=lambda: core.Phase(epochs=0.1, lr=1e-4))\n" + DATA,
)


@pytest.mark.verify
def test_a_rung_goes_on_from_a_run_and_stands_by_itself(fork, launch, tmp_path: Path):
    """Of a finished run, then of that fallback; stopped and resumed it is the same, though what it stands on is gone."""
    fork(PHASES, FALLBACKS)
    below = launch("run", "mine.py", *QUICK, "--train.epochs", "0.3", code=0)
    ground = below.folder()
    advised = f"trainworthy resume {ground.relative_to(tmp_path)} --fallback higher"
    assert advised in below.stdout
    page = (ground / "report.html").read_text()
    assert page.index(advised) < page.index("Too early to say")
    assert_refused(launch("resume", str(ground), "--fallback", "hihger"), "unknown fallback 'hihger'", "higher")
    assert_refused(launch("resume", str(ground), "--fallback", "higher", "--train.epochs", "3"), "--higher.epochs")
    done = launch("resume", str(ground), "--fallback", "higher", "--higher.schedule", "constant", code=0)
    higher = done.folder()
    assert higher != ground
    assert same(load_file(higher / "under" / "0.safetensors"), weights(ground, "told"))
    assert losses(higher)[0] < losses(ground)[0]
    assert {r["step/lr"] for r in read(higher / "step_metrics.jsonl")[1:]} == {1e-3}
    assert read(higher / "summary.json")["stage"] == "higher"
    argv = ("resume", higher, "--fallback", "top-most", "--run.save-every", "0.01", "--top-most.epochs", "0.2")
    whole = launch(*map(str, argv), code=0)
    code, said = stop(*argv, "--run.out", "stopped", cwd=tmp_path, once="stopped/*/*/checkpoints/top_most/step-*")
    assert code == 5, said
    folder = run_folder(tmp_path, "stopped/*/2*")
    for gone in (ground, higher):
        shutil.rmtree(gone)
    done = launch("resume", str(folder), code=0)
    assert same(weights(folder, "top_most"), weights(whole.folder(), "top_most"))


def test_a_recipe_without_rungs_and_a_run_with_nothing_to_go_on_from(fork, launch):
    fork(PHASES, FALLBACKS)
    checked = launch("run", "mine.py", *QUICK[1:], "--gates.no-enabled", "--train.epochs", "0.05")
    shutil.rmtree(checked.folder() / "checkpoints")
    refused = launch("resume", str(checked.folder()), "--fallback", "higher")
    assert (refused.returncode, "no weights to continue from" in refused.stderr) == (2, True), refused.shown
    fork(name="other.py")
    plain = launch("run", "other.py", *QUICK, "--train.epochs", "0.05")
    assert_refused(launch("resume", str(plain.folder()), "--fallback", "higher"), "has no fallbacks")


def test_a_metric_whose_perfect_score_is_worse_than_chance_fails_schema(fork, launch):
    """The largest loss was kept as the best, and another gate blamed the labels."""
    old = 'core.Metric("accuracy", question, floor=1 / n, ceiling=1.0, best_known=best_known)'
    fork((old, 'core.Metric("nll", question, floor=2.3, ceiling=0.0)'))
    done = launch("check", "mine.py", "--only", "schema")
    assert done.returncode == 3, done.shown
    assert "set higher_is_better=False" in done.verdicts()[0]["measured"]
