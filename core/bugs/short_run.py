"""`python -m trainworthy.core.bugs.short_run JOB.json`: short runs of recipes without gates, in a process of its own.

A job names recipes, seeds, steps and settings. A result has the loss of every step, every metric of the last evaluation and of the
test split, a hash of the weights, and how the run ended. It comes from the recipe's own `train()` on all of its data, at the configured batch size.
"""

import json
import math
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from trainworthy.core.base import config
from trainworthy.core.base.errors import Stop
from trainworthy.core.loop.run import Run
from trainworthy.core.loop.weights import digest
from trainworthy.core.recipe import loading
from trainworthy.core.session import stages


@dataclass
class Result:
    """What a short run did."""

    losses: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    metric: str = ""
    higher_is_better: bool = True
    floor: float = math.nan
    ceiling: float = math.nan
    weights: str = ""
    """Hash of the weights that were evaluated."""
    crashed: str = ""
    """The exception, if one ended the run."""
    stopped: str = ""
    """Why the run stopped itself, if it did: a monitor, non-finite steps."""
    lines: dict[str, list[int]] = field(default_factory=dict)
    """Executed lines of the traced files."""


@contextmanager
def backward_losses() -> Iterator[list[float]]:
    """Record every loss that `backward()` is called on: a fork with a loop of its own logs none."""
    seen: list[float] = []
    original = torch.Tensor.backward

    def backward(self, *args: Any, **words: Any) -> None:
        seen.append(float(self.detach().sum()))
        original(self, *args, **words)

    with mock.patch.object(torch.Tensor, "backward", backward):
        yield seen


class Lines:
    """Notes which lines of some files are executed."""

    def __init__(self, files: list[str]):
        self.lines: dict[str, set[int]] = {str(Path(f).resolve()): set() for f in files}

    def __enter__(self) -> "Lines":
        if self.lines:
            threading.settrace(self._call)
            sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        if self.lines:
            sys.settrace(None)
            threading.settrace(None)

    def _call(self, frame: Any, event: str, value: Any) -> Any:
        lines = self.lines.get(frame.f_code.co_filename)
        if lines is None:
            return None

        def trace_line(frame: Any, event: str, value: Any) -> Any:
            lines.add(frame.f_lineno)
            return trace_line

        return trace_line(frame, event, value)


def short_run(recipe: str, seed: int, steps: int, settings: list[str], trace: list[str]) -> Result:
    """Train every stage of a recipe for a few steps and evaluate the last one once, at the end."""
    result, logged = Result(), []
    tracker = mock.Mock(log_step=lambda step, **values: logged.append(values["loss"]))  # in place of metrics files
    words = [*settings, "--max-steps", str(steps), "--loader.workers", "0", "--run.seed", str(seed)]
    with Lines(trace) as lines, backward_losses() as own:
        try:
            loaded = loading.load(recipe)
            cfg, _ = config.parse(loaded.module, words, prog="trainworthy bugs")
            cfg.train.eval_every, cfg.train.patience = 1e9, 0.0
            torch.set_num_threads(cfg.run.threads or int(os.environ.get("OMP_NUM_THREADS", "1")))
            accelerator, previous = Accelerator(), None
            for spec in stages.specs(loaded, cfg):
                run = Run(spec.cfg, accelerator, tracker=tracker)
                stage = spec.build(run, previous)
                result.metric, result.higher_is_better = stage.metric.name, stage.metric.higher_is_better
                result.floor, result.ceiling = float(stage.metric.floor), float(stage.metric.ceiling)
                loaded.module.train(spec.cfg, run, stage)
                run.end(stage)
                previous = stage
            history = run.journal.history
            if history and history[-1]["step"] == run.step:
                result.metrics = {k[4:]: float(v) for k, v in history[-1].items() if k.startswith("val/")}
            else:  # the loop does not evaluate at its end
                result.metrics = {k: float(v) for k, v in run.measure(stage, stage.data["val"]).items()}
            if "test" in stage.data:  # as a run does at its end: a fault of that split alone changes no other number
                result.metrics |= {f"test/{k}": float(v) for k, v in run.measure(stage, stage.data["test"]).items()}
            result.weights = digest(stage.eval_model.state_dict())
        except Stop as stop:
            result.stopped = str(stop).splitlines()[0]
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            message = str(error).splitlines()[0][:200] if str(error) else ""
            result.crashed = f"{type(error).__name__}: {message} ({frame.name})"
    result.losses = logged or own
    result.lines = {name: sorted(found) for name, found in lines.lines.items()}
    return result


def inside(result: Result, low: float, high: float) -> bool:
    """Return whether the run ended with a metric in the range of healthy runs."""
    return low <= result.metrics.get(result.metric, math.nan) <= high


def main(job: Path) -> None:
    """Run a job and write its results next to it: {recipe: {seed: result}}."""
    plan = json.loads(job.read_text())
    found: dict[str, dict[str, dict]] = {}
    with redirect_stdout(sys.stderr):
        for recipe in plan["recipes"]:
            found[recipe] = {}
            settings = [*plan["own"].get(recipe, ()), *plan["settings"]]
            for seed in plan["seeds"]:
                trace = plan["trace"] if seed == plan["seeds"][0] else []
                one = short_run(recipe, seed, plan["steps"], settings, trace)
                found[recipe][str(seed)] = asdict(one)
                same = (one.losses, one.metrics) == (plan["same_as"].get("losses"), plan["same_as"].get("metrics"))
                if one.crashed or same or (plan["healthy"] and inside(one, *plan["healthy"])):
                    break  # one seed settles it
    job.with_suffix(".result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
