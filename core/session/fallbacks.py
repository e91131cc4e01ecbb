"""Fallbacks: stages that a recipe offers to continue a finished run. `FALLBACKS` declares them as STAGES does the others, each
with a `Phase` of its name in Config. `trainworthy resume RUN --fallback NAME` continues from RUN's weights.

A fallback is trained in its own run with that one stage, with gates, folder and report. `under/` in its folder holds the
weights that it continues from: those of the recipe's last stage and of each earlier fallback. So RUN may be deleted.
"""

import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop.checkpoint import Checkpoints
from trainworthy.core.loop.run import Run
from trainworthy.core.loop.weights import digest, load_into, load_weights
from trainworthy.core.recipe.loading import Recipe
from trainworthy.core.recipe.stage import Stage
from trainworthy.core.session import stages
from trainworthy.core.session.session import Session


def offered(recipe: Recipe) -> dict[str, stages.Maker]:
    """Return {name on the command line: function of the stage}."""
    return {make.__name__.replace("_", "-"): make for make in getattr(recipe.module, "FALLBACKS", ())}


def recipe_of(recipe: Recipe, names: Sequence[str], files: list[Path]) -> Recipe:
    """Return `recipe` with one stage: the last fallback of `names`. `files` hold the weights of the recipe's last
    stage, then of each earlier fallback. Raises UserError for a fallback that the recipe does not offer."""
    known = offered(recipe)
    if not known:
        needed = "`FALLBACKS` in the recipe's file"
        raise UserError(f"{recipe.id} has no fallbacks", got=f"--fallback {names[-1]}", needed=needed)
    for name in names:
        if name not in known:
            raise config.unknown(f"fallback '{name}'", name, known)

    def fallback(cfg: config.Config, run: Run, previous: None = None) -> Stage:
        return build_last(recipe, names, files, cfg, run)

    fallback.__name__ = known[names[-1]].__name__
    module = ModuleType(recipe.module.__name__)
    vars(module).update(vars(recipe.module), STAGES=[fallback])
    start = digest({f"{i}.{name}": t for i, file in enumerate(files) for name, t in load_weights(file).items()})
    return replace(recipe, module=module, fallbacks=tuple(names), start=start)


def build_last(recipe: Recipe, names: Sequence[str], files: list[Path], cfg: config.Config, run: Run) -> Stage:
    """Build the stage of the last fallback as it starts (without a fallback: the recipe's last stage, untrained)."""
    if not names:
        stage = None
        for spec in stages.specs(recipe, cfg):
            stage = spec.make(spec.cfg, run, stage)
        return stage
    previous, file = build_last(recipe, names[:-1], files, cfg, run), files[len(names) - 1]
    load_into(previous.eval_model, load_weights(file), where=str(file), without=previous.not_saved)
    make = offered(recipe)[names[-1]]
    return make(config.of_stage(cfg, make.__name__, 1), run, previous)


def final_weights(folder: Path, recipe: Recipe, cfg: config.Config) -> Path:
    """Return the file with the weights that the run in `folder` passes on: its newest checkpoint, or its best
    evaluation if its Phase sets that. They are the model's weights; an EMA starts anew."""
    last = stages.specs(recipe, cfg)[-1]
    home = folder / "checkpoints" / last.name
    phase = config.phases(cfg).get(last.name)
    best = phase is not None and phase.hand_on == "best"
    with closing(Checkpoints(home)) as checkpoints:
        found = next(home.glob("best_val_*/"), None) if best else checkpoints.newest()
        if not found:
            raise UserError(f"{folder} has no weights to continue from", got=f"no checkpoint of its last stage, '{last.name}'",
                            needed="a run that has saved one", next=f"trainworthy resume {folder}")  # fmt: skip
        return checkpoints.best_weights(found.name.removeprefix("best_val_")) if best else found / "model.safetensors"


def start_files(folder: Path) -> list[Path]:
    """Return the files in `under/` of a run folder, lowest first."""
    return sorted((folder / "under").glob("*.safetensors"), key=lambda p: int(p.stem))


def copy_start_files(session: Session, files: list[Path]) -> None:
    """Copy the weights there, so that the run no longer needs the original."""
    if session.main:
        (session.folder / "under").mkdir()
        for i, file in enumerate(files):
            shutil.copy(file, session.folder / "under" / f"{i}.safetensors")
