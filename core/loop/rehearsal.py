"""What the loop does between its steps: `FullRun` for a run that trains, `Rehearsal` for a gate's rehearsal.

`Run` calls its mode, one of them, wherever the two differ, so gates rehearse the very loop that trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from trainworthy.core.loop import optim, saving
from trainworthy.core.monitoring import monitors
from trainworthy.core.recipe.stage import Data, Stage, View

if TYPE_CHECKING:
    from torch import Tensor
    from trainworthy.core.base import config
    from trainworthy.core.loop.run import Run

REHEARSED = 64  # validation samples per evaluation inside a gate's rehearsal


class FullRun:
    """The full run: all data and steps, the configured rates, logging, saving and clean stop."""

    shard: bool = True
    """Shard the model if `--run.shard` asks for it."""
    fixed: bool = False
    """Use the same random draws for a sample every time."""
    compiles: ClassVar[bool] = True
    loss_scale: ClassVar[float] = 2.0**16
    """The first one in fp16."""

    def data(self, data: Data) -> Data:
        """Return the training set that the loop reads."""
        return data

    def eval_workers(self, cfg: config.Config) -> int:
        return cfg.loader.eval_workers

    def step_size(self, cfg: config.Config) -> int:
        """Return the samples per step of a stage with a training set."""
        return cfg.train.batch_size

    def cuts(self, cfg: config.Config) -> int | list[int]:
        """Return the number of micro-batches, or the size of each."""
        return cfg.train.accumulate

    def total_steps(self, run: Run, stage: Stage) -> int:
        """Return the iterations of the stage."""
        t = run.cfg.train
        planned = max(1, math.ceil(t.epochs * run.samples_per_epoch(stage) / t.batch_size))
        return min(planned, t.max_steps) if t.max_steps else planned

    def checkpoints_in(self, run: Run) -> Path | None:
        """Return the folder whose `checkpoints` are read and written."""
        return run.home

    def frozen(self, stage: Stage) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores as a hash."""
        return stage.frozen_tensors

    def saved(self, run: Run) -> None:
        """Called after each save."""

    def begin(self, run: Run, stage: Stage, total: int) -> None:
        """Called before the first step."""
        if not stage.expect.loss_may_rise:
            run.journal.live = monitors.Live(run.cfg.train.batch_size, total)

    def rate(self, step: int, total: int, settings: config.Optim) -> float:
        """Return the factor of the peak rate at a step."""
        return optim.schedule(step, total, settings)

    def is_due(self, done: int, total: int, size: int, stretch: float) -> bool:
        """Return whether step `done` is the last of a period of `stretch` samples, or of the run."""
        return done == total or crosses(done, size, stretch)

    def after_step(self, run: Run, stage: Stage, size: int, n: int) -> bool:
        """Log, save and stop when due; return whether the loop ends here. `size` samples per step, `n` per epoch."""
        return run.finish_step(stage, size, n)

    def before_evaluation(self, run: Run, stage: Stage) -> None:
        run.flush(stage)  # before, so that step times exclude the evaluation

    def validation(self, stage: Stage) -> Data:
        return stage.data["val"]

    def evaluator(self, stage: Stage) -> Callable:
        """Return the function for evaluations within the loop, which may be a cheaper one."""
        return stage.evaluate_while_training or stage.evaluate

    def record(self, run: Run, stage: Stage, metrics: dict[str, float]) -> None:
        """Write an evaluation of the current weights: files, console line, best and N best."""
        saving.record(run, stage, metrics)


@dataclass
class Rehearsal(FullRun):
    """How a gate's rehearsal of `train()` differs from the full run."""

    steps: int
    samples: list[int] | None = None
    """Use only these training samples."""
    blank: tuple[str, ...] = ()
    """Input fields to replace by zeros."""
    swap: list[int] | None = None
    """For each sample, the position (in `samples`) of the sample whose inputs it gets."""
    fixed: bool = False
    """Use the same random draws for a sample every time."""
    batch_size: int | None = None
    sizes: list[int] | None = None
    """Sizes of each rank's micro-batches."""
    peak: bool = False
    """Keep the learning rate at its peak."""
    due: tuple[int, ...] = ()
    """Steps (counted from 1) after which `step.due` is true."""
    stop_after: int | None = None
    """Save and stop after this many steps, as a signal would."""
    watch: Callable[[Stage, int], bool] | None = None
    """Called after each step; a true result ends the rehearsal."""
    keep_in: Path | None = None
    """Folder for checkpoints, if the rehearsal saves."""
    shard: bool = False
    """Shard the model as the full run does (`--run.shard`)."""
    losses: list[float] = field(default_factory=list)
    """Filled by the run: the loss of every update."""

    compiles: ClassVar[bool] = False
    loss_scale: ClassVar[float] = 2.0**10  # a short rehearsal cannot search for its scale

    def data(self, data: Data) -> Data:
        if self.samples is None and not self.blank:
            return data
        chosen = self.samples if self.samples is not None else range(len(data))
        return View(data, chosen, blank=self.blank, swap=self.swap)

    def eval_workers(self, cfg: config.Config) -> int:
        return 0

    def step_size(self, cfg: config.Config) -> int:
        return self.batch_size or cfg.train.batch_size

    def cuts(self, cfg: config.Config) -> int | list[int]:
        return self.sizes or cfg.train.accumulate

    def total_steps(self, run: Run, stage: Stage) -> int:
        return self.steps

    def checkpoints_in(self, run: Run) -> Path | None:
        return self.keep_in

    def frozen(self, stage: Stage) -> dict[str, Tensor]:
        return {}  # rehearsals build them again

    def saved(self, run: Run) -> None:
        if run.checkpoints:
            run.checkpoints.wait()  # every rank reads it back at once
        run.accelerator.wait_for_everyone()

    def begin(self, run: Run, stage: Stage, total: int) -> None:
        """Watch nothing: gates read the steps themselves."""

    def rate(self, step: int, total: int, settings: config.Optim) -> float:
        return 1.0 if self.peak else super().rate(step, total, settings)

    def is_due(self, done: int, total: int, size: int, stretch: float) -> bool:
        return done in self.due

    def after_step(self, run: Run, stage: Stage, size: int, n: int) -> bool:
        """Record the losses; return whether the gate needs no more steps."""
        run.drift = run.drift or run.ranks.drift(run.step)
        self.losses += [float(p.values[0]) for p in run.journal.pending]
        run.journal.pending = []
        if self.stop_after == run.step:
            run.save(stage)
            return True
        return bool(self.watch and self.watch(stage, run.step))

    def before_evaluation(self, run: Run, stage: Stage) -> None:
        """Keep the losses for `after_step`."""

    def validation(self, stage: Stage) -> Data:
        """Return at most `REHEARSED` samples: a rehearsal only checks that the evaluation runs."""
        val, n = stage.data["val"], stage.expect.at_most(REHEARSED)
        return View(val, [i * len(val) // n for i in range(n)]) if len(val) > n else val

    def evaluator(self, stage: Stage) -> Callable:
        return stage.evaluate

    def record(self, run: Run, stage: Stage, metrics: dict[str, float]) -> None:
        """Record nothing."""


def crosses(step: int, size: int, stretch: float) -> bool:
    """Return whether the `step`-th batch of `size` samples reaches or passes a multiple of `stretch` samples."""
    return math.floor(step * size / stretch + 1e-9) > math.floor((step - 1) * size / stretch + 1e-9)
