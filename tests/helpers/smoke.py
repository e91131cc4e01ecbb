"""`make smoke`: each recipe of a domain through the real commands, from its gates to its report, made small.

What is run: `check` (gates), `run` (a few steps; SIGTERM once there is a checkpoint: exit code 5), `resume` to its end, which writes
metrics, an export and a report; `report` writes the report again. Bitwise equality of a resumed run, every gate of every recipe and
every planted bug are other tests (tests/core/test_recipes.py, `make verify`).

Gates: all of them for the recipes in WHOLE, whose list takes seconds, within `run` itself. For others a handful (TELLING) that
fails at most mistakes in data and loop and does not train long: what the data are (`schema`, `data`, `leakage`), which parameters
train at which rate and when (`wiring`, `schedule`), whether an output depends on its own input alone (`dependency`), whether
evaluation changes nothing (`evaluation`), and whether a stop loses nothing (`resume`). Left out are gates that train to a goal
(`overfit`, `baseline`, `range-test`, ...): they take minutes, and random stand-ins cannot reach it.

Stand-ins replace what is large or built on first use: language models, Whisper, Stable Diffusion, the classifier that scores
generated digits. They are tiny, have random weights and are read through the recipe's own settings (STAND_INS). A recipe that is
not in a table here is run as it is.

Commands use the accelerator if there is one; CUDA_VISIBLE_DEVICES decides, as for the commands themselves. SMOKE_PRECISION=bf16 (or
fp16, fp32) replaces the recipes' own precision.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainworthy.core.recipe.registry import HOME, recipes

from tests.helpers import commands
from tests.helpers.settings import SHORT

WHOLE = ("rl/ppo", "vision/classify")
TELLING = "schema,data,leakage,wiring,schedule,dependency,evaluation,resume"
LONGER = ("diffusion/flow", "diffusion/latent", "diffusion/text", "vision/detect")
"""Run by `make smoke` and `make verify`. The others, which take less than a minute of CPU time each, also by `make test`."""
PLAIN = ("--run.no-tensorboard", "--run.keep-checkpoints", "1000")
STOPPED, DONE = 5, 0
REWARD = '''"""Rewards for a model of random weights, which is never right."""


def near(completions, answer, **_):
    """Right, and a little for its letters, so that a group differs."""
    return [10.0 * (c.strip() == a) + sum(x in c for x in set(a)) - 0.01 * len(c) for c, a in zip(completions, answer)]
'''


# ------------------------------------------------------------------------------------------------------------ stand-ins
def language(home: Path) -> tuple[str, ...]:
    from tests.helpers import language

    return ("--model", str(once(home / "net", language.write)))


def dialogue(home: Path) -> tuple[str, ...]:
    return (*language(home), "--lora-rank", "4", "--optim.lr", "3e-3", "--data.max-length", "256", "--data.max-bad", "0.02",
            "--data.held-out", "8")  # fmt: skip


def letters(home: Path) -> tuple[str, ...]:
    """Prompts for rl/rlhf are bytes here, so they are longer."""
    return (*language(home), "--reward", "tests.helpers.odd_rewards:letters", "--data.tokens", "40", "--data.max-bad", "1",
            "--rollout-batch-size", "16", "--train.batch-size", "8", "--max-new-tokens", "12", "--data.held-out", "16")  # fmt: skip


def sums(home: Path) -> tuple[str, ...]:
    (home / "rewards.py").write_text(REWARD)
    return (*language(home), "--lora-rank", "4", "--optim.lr", "3e-3", "--train.batch-size", "16", "--max-new-tokens", "8",
            "--reward", f"{home / 'rewards.py'}:near")  # fmt: skip


def narrow(home: Path) -> tuple[str, ...]:
    """Rows stay as long as they are: short ones are the same in both splits here and there, which `leakage` finds."""
    return ("--hidden-size", "32", "--num-hidden-layers", "2")


def scorer(home: Path) -> tuple[str, ...]:
    return ("--data.classifier", str(classifier(home)))


def digit_teacher(home: Path) -> tuple[str, ...]:
    return ("--teacher", str(classifier(home)))


def classifier(home: Path) -> Path:
    """The export of vision/classify after a few steps."""

    def train(folder: Path) -> None:
        argv = ("run", "vision/classify", *PLAIN, "--gates.no-enabled", "--train.epochs", "0.3", "--run.out", folder)
        commands.ended(call(*argv, cwd=home), DONE)

    (export,) = once(home / "classifier", train).glob("*/*/export")
    return export


def captions(home: Path) -> tuple[str, ...]:
    from tests.helpers import stable

    model = once(home / "sd", lambda folder: stable.write(folder, side=32))
    return (*scorer(home), "--model", str(model), "--lora-rank", "4", "--ema", "0")


def seeing(home: Path) -> tuple[str, ...]:
    from tests.helpers import seeing

    return (*seeing.settings(once(home / "hub", seeing.write)), "--align.epochs", "2", "--instruct.epochs", "2",
            "--unfreeze.epochs", "0", "--run.save-every", "0.5")  # fmt: skip


def hearing(home: Path) -> tuple[str, ...]:
    from tests.helpers import hearing

    return hearing.settings(once(home / "hearing", hearing.write))


def features(home: Path) -> tuple[str, ...]:
    return (*hearing(home), "--width", "32", "--depth", "1", "--features.batch-size", "4", "--task.batch-size", "4",
            "--features.epochs", "2", "--task.epochs", "2")  # fmt: skip


def layers(home: Path) -> tuple[str, ...]:
    return (*hearing(home), "--data.max-wer", "9", "--encoder", "1", "--decoder", "1", "--train.batch-size", "4")


STAND_INS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "diffusion/flow": scorer,
    "diffusion/latent": scorer,
    "diffusion/pixel": scorer,
    "diffusion/text": captions,
    "distill/compress": layers,
    "distill/logits": digit_teacher,
    "distill/whisper": features,
    "llm/dpo": dialogue,
    "llm/pretrain": narrow,
    "llm/reward": dialogue,
    "llm/sft": dialogue,
    "rl/grpo": sums,
    "rl/rlhf": letters,
    "vlm/instruct": seeing,
}
"""Settings after those of SHORT that make a recipe's models small, too; they are written into a folder that a session shares."""


def once(folder: Path, write: Callable[[Path], Any]) -> Path:
    """A folder that is written by the first who needs it; anew if that failed."""
    made = folder / ".made"
    if not made.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write(folder)
        made.touch()
    return folder


# ------------------------------------------------------------------------------------------------------------- commands
def call(*argv: object, cwd: Path, stop: str = "") -> subprocess.CompletedProcess:
    """A command on the user's device. On an accelerator each is a process of its own with all its imports: CUDA cannot be used in a
    fork of a process that has looked for devices."""
    if not torch.accelerator.is_available():
        return commands.trainworthy(*argv, cwd=cwd, once=stop)
    every = ",".join(map(str, range(torch.accelerator.device_count())))
    env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", every)}
    if stop:
        code, output = commands.stop(*argv, cwd=cwd, once=stop, **env)
        return subprocess.CompletedProcess(argv, code, output, "")
    return commands.installed(*argv, cwd=cwd, **env)


# ------------------------------------------------------------------------------------------------------------- the test
def cases(domain: str) -> list:
    """A parameter for each recipe in the folder of a domain."""
    found = [e.id for e in recipes() if HOME in e.path.parents and e.id.split("/")[0] == domain]
    return [pytest.param(r, id=r, marks=[pytest.mark.smoke] + [pytest.mark.verify] * (r in LONGER)) for r in found]


def smoke(recipe: str, cwd: Path, stand_ins: Path) -> None:
    """The whole way of one recipe, in an empty folder; `stand_ins` is shared with others."""
    settings = (*SHORT.get(recipe, ("--train.epochs", "0.32", "--run.save-every", "0.1")), *PLAIN)
    settings += STAND_INS.get(recipe, lambda home: ())(stand_ins)
    if precision := os.environ.get("SMOKE_PRECISION"):
        settings += ("--train.precision", precision)
    cost = {}

    def step(name: str, *argv: object, code: int, stop: str = "") -> None:
        started = time.monotonic()
        done = commands.ended(call(*argv, cwd=cwd, stop=stop), code)
        cost[name] = getattr(done, "cpu", time.monotonic() - started)

    gates = ("--gates.no-remember",)
    if recipe not in WHOLE:
        step("check", "check", recipe, *settings, "--only", TELLING, code=DONE)
        passed(commands.run_folder(cwd, "runs/*/checks/2*"))
        gates = ("--gates.no-enabled",)
    step("run", "run", recipe, *settings, *gates, code=STOPPED, stop="runs/*/2*/checkpoints/*/step-*")
    folder = commands.run_folder(cwd)
    assert not (folder / "export").exists(), "it was stopped too late"
    if recipe in WHOLE:
        passed(folder)
    step("resume", "resume", folder, code=DONE)
    assert commands.losses(folder)
    complete(folder)
    (folder / "report.html").unlink()
    step("report", "report", folder, code=DONE)
    assert "<html" in (folder / "report.html").read_text()
    print(f"{recipe}: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in cost.items()), end="; ")
    print(f"{sum(cost.values()):.0f} s of CPU time")


def complete(folder: Path) -> None:
    """A run left the files of the run folder, an export, a page, pictures or words to look at."""
    names = ("args", "environment", "data", "gates", "monitors", "summary")
    assert not [n for n in names if not (folder / f"{n}.json").is_file()]
    summary = commands.read(folder / "summary.json")
    assert summary["metrics"]
    assert summary["baselines"]
    assert summary["question"].endswith("?")
    assert any((folder / "export").iterdir())
    assert (folder / "card.md").is_file()
    assert "<html" in (folder / "report.html").read_text()
    assert any((folder / "previews").rglob("*")) or summary["figures"]


def passed(folder: Path) -> None:
    """Gates passed, or say why they were skipped."""
    verdicts = commands.read(folder / "gates.json")["gates"]
    assert {v["verdict"] for v in verdicts} <= {"pass", "skip"}, verdicts
    assert any(v["verdict"] == "pass" for v in verdicts), verdicts
    assert not [v["id"] for v in verdicts if v["verdict"] == "skip" and not v["reason"]]
