"""Checks whether a run can continue from its checkpoints: they must be complete, and of the same recipe, seed and settings."""

import json
from pathlib import Path
from typing import Any

from trainworthy.core.base.config import MAY_CHANGE, flat
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop.checkpoint_survey import LATEST, SAVED, Readers, put_back, survey, verify

VARIABLES = "environment."
"""Prefix of environment variables among the settings of a checkpoint; their values are hashes."""


def assert_resumable(run_folder: Path, identity: dict[str, Any], readers: Readers, *, forced: bool) -> list[str]:
    """Raise UserError if a stage of the run has checkpoints but no complete one, or if the newest belongs to another
    run or (unless `forced`) to other settings. It changes nothing, since a restart at step 0 would overwrite them.
    Return what to say of it: environment variables whose values have changed, and that there is no checkpoint yet."""
    variables: set[str] = set()
    home = run_folder / "checkpoints"
    problem = None
    if readers.rank == 0:
        try:
            for folder in (p for p in home.glob("*") if p.is_dir()):
                put_back(folder)
        except UserError as error:
            problem = error
    if wrong := readers.gather(problem)[0]:
        raise wrong
    found = False
    for name in readers.gather(sorted(p.name for p in home.glob("*") if p.is_dir()))[0]:
        folder = home / name
        newest, damaged = survey(folder, readers)
        found |= newest is not None
        if newest:
            variables |= {*assert_settings(newest, assert_own(newest, identity), identity, forced=forced)}
        elif damaged or (folder / LATEST).is_symlink():
            named = "; ".join(f"{name}: {why}" for name, why in damaged.items()) or "they were removed"
            raise UserError(f"no checkpoint in {folder} is complete", got=named, needed="one whose files match their hashes",
                            cause="a disk that lost data, or a copy that was not complete",
                            next="put a complete checkpoint back, or start a new run"
                                 + f" (--init-from {run_folder} takes its best weights)" * any(map(_whole, folder.glob("best-step-*"))))  # fmt: skip
    metrics = run_folder / "step_metrics.jsonl"
    begun = metrics.is_file() and metrics.stat().st_size > 0
    if begun and (not home.is_dir() or (not found and (home / SAVED).is_file())):
        raise UserError(f"{run_folder} has no checkpoints", got=f"metrics of steps, and no checkpoint in {home}",
                        needed="the checkpoints that the run saved", cause="they were removed, or not copied with the run",
                        next="put them back, or start a new run")  # fmt: skip
    changed = (
        f"environment variables that the recipe reads have changed since the run began: {', '.join(sorted(variables))}"
    )
    return [changed] * bool(variables) + ["no checkpoint was saved yet: training begins again at step 0"] * (
        begun and not found
    )


def _whole(folder: Path) -> bool:
    try:
        return not verify(folder)
    except UserError:
        return False


def assert_own(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint says of its run. Raise UserError if that had another recipe or seed."""
    run = json.loads((folder / "info.json").read_text()).get("run", {})
    wrong = {k: (v, identity[k]) for k, v in run.items() if k in identity and v != identity[k]}
    wrong.pop("settings", None)  # see `assert_settings`
    if wrong:
        raise UserError(f"the checkpoint {folder} is of another run", got=", ".join(f"{k} {a}" for k, (a, _) in wrong.items()),
                        needed=", ".join(f"{k} {b}" for k, (_, b) in wrong.items()),
                        cause="it was copied here from another run's folder",
                        next="move it away, then the same command again")  # fmt: skip
    return run


def assert_settings(folder: Path, run: dict[str, Any], identity: dict[str, Any], *, forced: bool) -> list[str]:
    """Raise UserError if a checkpoint's run had other settings, unless `forced`. Settings that exist in only one
    of the two belong to another version and are ignored. Return the environment variables that have other values: a job's number or
    a host's name may change."""
    then = flat(run.get("settings", {}))
    now = flat(identity.get("settings", {}))
    other = [k for k, v in then.items() if k in now and v != now[k] and not MAY_CHANGE.fullmatch(k)]
    variables = [k.removeprefix(VARIABLES) for k in other if k.startswith(VARIABLES)]
    changed = [f"{k} is {now[k]}, was {then[k]}" for k in other if not k.startswith(VARIABLES)]
    if changed and not forced:
        home = folder.parents[2]
        raise UserError(f"the settings are not those of the checkpoint {folder}", got="; ".join(changed),
                        needed="the settings that the run was started with, or --force if the change is meant",
                        cause=f"{home / 'args.json'} was edited", next=f"trainworthy resume {home} --force")  # fmt: skip
    return variables
