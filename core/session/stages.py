"""The stages of a recipe in order, each with its settings, its place in the run folder, and the stage that it starts
from."""

import copy
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import Accelerator
from trainworthy.core import gates
from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.gates.checks import learning
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe.loading import Recipe
from trainworthy.core.recipe.stage import Stage

if TYPE_CHECKING:
    from trainworthy.core.session.session import Session


Maker = Callable[[config.Config, Run, Stage | None], Stage]


@dataclass
class StageSpec:
    """One stage of a recipe, before it is built: its name, settings and stage function."""

    name: str
    make: Maker
    cfg: config.Config
    """The recipe's settings, overridden by this stage's own."""
    index: int
    of: int

    @property
    def last(self) -> bool:
        """Whether its result is the recipe's result."""
        return self.index == self.of - 1

    def folder(self, run_folder: Path) -> Path:
        """Return the folder of its files: a run folder of its own; the last stage uses the whole run's."""
        return run_folder if self.last else run_folder / "stages" / self.name

    def build(self, run: Run, previous: Stage | None) -> Stage:
        return gates.build(run, lambda run: self.make(self.cfg, run, previous))

    def untrained(self, accelerator: Accelerator, previous: Stage | None = None) -> Stage:
        """Build the stage once, for inspection."""
        return self.build(Run(self.cfg, accelerator, rehearsal=Rehearsal(steps=1)), previous)

    def factory(self, previous: Callable[[], Stage] | None) -> Callable[[Run], Stage]:
        """Return the function that builds it for the gates, each time from a fresh copy of the stage before."""
        return lambda run: self.make(self.cfg, run, copied(previous()) if previous else None)


def specs(recipe: Recipe, cfg: config.Config) -> list[StageSpec]:
    """Return the stages in order. With several, each is a function named like its settings in Config. A stage with 0
    epochs is left out."""
    makers = recipe.module.STAGES
    if len(makers) == 1 and makers[0].__name__ not in config.phases(cfg):
        return [StageSpec(makers[0].__name__, makers[0], cfg, 0, 1)]
    known = config.phases(cfg)
    makers = [m for m in makers if m.__name__ not in known or known[m.__name__].epochs != 0]
    if not makers:
        needed = " or ".join(f"--{name}.epochs" for name in known)
        raise UserError("no stage is left", got="0 epochs of each", needed=needed)
    return [StageSpec(m.__name__, m, config.of_stage(cfg, m.__name__, i), i, len(makers)) for i, m in enumerate(makers)]


def untrained(recipe: Recipe, cfg: config.Config, accelerator: Accelerator) -> list[tuple[StageSpec, Stage]]:
    """Build every stage once, each from the untrained stage before."""
    built: list[tuple[StageSpec, Stage]] = []
    for spec in specs(recipe, cfg):
        built.append((spec, spec.untrained(accelerator, built[-1][1] if built else None)))
    return built


def contexts(session: "Session", *, deep: bool = False) -> Iterator[tuple[StageSpec, gates.GateContext]]:
    """Yield every stage with the gates' input. A later stage starts from the one before, trained on eight samples when
    first needed."""
    before: Callable[[], Stage] | None = None
    for spec in specs(session.recipe, session.cfg):
        one = context(session, spec, before, follows="rehearsed" if before else "none", deep=deep)
        yield spec, one
        before = functools.cache(functools.partial(_handed_on, one))


def _handed_on(context: gates.GateContext) -> Stage:
    """Return a stage as the overfit gate trained it. Its gates are done, so their other stages are dropped."""
    stage = learning.overfitted(context)[1]
    context.memo.clear()
    return stage


def context(
    session: "Session", spec: StageSpec, before: Callable[[], Stage] | None, *, follows: str, deep: bool
) -> gates.GateContext:
    """Return the input of one stage's gates."""
    s = session
    half = os.environ.get("TRAINWORTHY_HALF")
    argv = [s.recipe.target, *s.argv[1:]]  # a fork's full path, so that a repro runs from any folder
    argv += ["--stage", spec.name] if spec.of > 1 else []
    again = None
    if s.recipe.fallbacks:  # `check` lacks a fallback's weights
        resume = ["-m", "trainworthy.launch", "resume", str(s.folder.absolute())]
        again = lambda gate: f"sys.exit(subprocess.run([sys.executable, *{resume!r}]).returncode)"  # noqa: E731
    return gates.GateContext(spec.cfg, s.accelerator, spec.factory(before), s.recipe.module.train, spec.folder(s.folder), {}, {}, argv,
                       deep, Path(half) if half else None, again, stage=spec.name, follows=follows)  # fmt: skip


def copied(stage: Stage) -> Stage:
    """Return the same stage with copied weights, which the next stage may train."""
    model = copy.deepcopy(stage.model)
    average = None if stage.ema_model is None else copy.deepcopy(stage.ema_model)
    return replace(stage, model=model, ema_model=average)
