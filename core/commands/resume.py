"""`trainworthy resume`: go on from the newest complete checkpoint, or with a fallback from a run's weights."""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainworthy.core.base import config, masking
from trainworthy.core.base.errors import STOPPED_ITSELF, UserError
from trainworthy.core.base.processes import gathered
from trainworthy.core.commands import prints_json
from trainworthy.core.commands.run import assert_boardable, check_and_train
from trainworthy.core.loop.checkpoint_survey import Readers
from trainworthy.core.loop.resumable import assert_resumable
from trainworthy.core.recipe import loading as recipes
from trainworthy.core.report.folder import ENDED, read_json, where_runs_are
from trainworthy.core.session import environment, fallbacks, multi_seed
from trainworthy.core.session.session import Session, open_session, together, write_start


@prints_json
def main(argv: list[str], found: dict[str, Any]) -> None:
    """Continue from the newest complete checkpoint of a run folder, with settings that may change; with `--fallback`, train
    that stage of its recipe from its weights. Put what `report --json` says of the run into `found`."""
    force, wanted = "--force" in argv, "--board" in argv
    rest, fallback = config.take([a for a in argv if a not in ("--force", "--board")], "--fallback")
    if "--rung" in rest:
        raise UserError("--rung has a new name", needed="--fallback", next="docs/migration.md")
    if not rest:
        raise UserError("resume what?", needed="a run folder", next="ls -d runs/*/*")
    folder, (secrets, others) = Path(rest[0]), masking.given(rest[1:]) if fallback is None else ({}, [])
    several = (folder / multi_seed.NAME).is_file()
    if others and (several or not others[0].startswith("--")):
        raise UserError("resume takes one run folder" + ", and of several seeds no settings" * several, got=others[0])
    if several and fallback is None:
        multi_seed.resume(folder, force=force, given=secrets, with_board=wanted, found=found)
    saved = begun(folder)
    if (folder / "summary.json").exists() and fallback is None:
        raise UserError(f"{folder} has finished", got="a summary.json", needed="a run that was interrupted",
                        next=f"trainworthy run {saved['recipe']} --init-from {folder} (a new run from its weights), or open "
                        f"{folder / 'report.html'}")  # fmt: skip
    assert_recipe(folder, saved["recipe"])
    plain = recipes.load(saved["recipe"])
    cfg = config.read_args(folder / "args.json", plain.module.Config)
    names = saved.get("fallbacks", saved.get("rungs", []))
    command = f"trainworthy resume {folder}" + (f" --fallback {fallback}" if fallback else "")
    if fallback is None:
        own = config.to_dict(getattr(plain.module, saved["preset"])())
        secrets = masking.defaults(own, saved["argv"]) | secrets
        cfg = config.complete(cfg, where=str(folder / "args.json"), command=command, secrets=secrets)
        cfg = config.changed(plain.module, cfg, others, prog=command) if others else cfg
    if not force:
        assert_same_sources(folder, command)
    loaded, words = fallbacks.recipe_of(plain, names, fallbacks.start_files(folder)) if names else plain, saved["argv"]
    if fallback is not None:
        fallbacks.recipe_of(plain, [*names, fallback], [])  # reports an unknown fallback before it looks for weights
        files = [*fallbacks.start_files(folder), fallbacks.final_weights(folder, loaded, cfg)]
        loaded, words = fallbacks.recipe_of(plain, [*names, fallback], files), [plain.target, *rest[1:]]
        cfg, _ = config.parse(loaded.module, ["--config", str(folder / "args.json"), *rest[1:]], prog=command)
        cfg.init_from = None
    session = open_session(loaded, cfg, saved["preset"], words, folder=folder if fallback is None else None)
    session.resumes = "" if fallback is not None else "forced" if force else "as it was"
    if session.resumes and (other := environment.changed_versions(folder)):
        session.console.say(f"packages have changed since the run began: {other}", style="yellow")
    assert_boardable(cfg, wanted)

    def start() -> None:
        if fallback is not None:
            write_start(session)
            fallbacks.copy_start_files(session, files)

    board_on = session.folder.parent.parent if wanted else None
    check_and_train(session, found, board_on, start=start, ready=resumable(session))


def assert_same_sources(folder: Path, command: str) -> None:
    """Raise UserError unless the recipe's sources are those that the run in `folder` was started with."""
    if not environment.kept(folder):
        raise UserError(f"{folder / 'environment.json'} cannot be read, so nobody knows with which sources this run was started",
                        needed="the file that the run wrote when it began, or --force", cause="it was removed, edited, or not copied "
                        "with the run", next=f"{command} --force")  # fmt: skip
    if changed := environment.changed_sources(folder):
        raise UserError("the recipe is not the one this run was started with", got="changed: " + ", ".join(changed),
                        needed="the same sources, or --force if the change does not matter",
                        next=f"{command} --force")  # fmt: skip


@contextlib.contextmanager
def resumable(session: Session) -> Iterator[None]:
    """Check, before anything changes, that a continued run has a complete checkpoint of its own."""
    problem, one = None, session.accelerator
    readers = Readers(one.process_index, one.num_processes, functools.partial(gathered, one))
    if session.resumes:
        try:
            remarks = assert_resumable(session.folder, session.identity, readers, forced=session.resumes == "forced")
            if (end := read_json(session.folder / ENDED)).get("exit_code") == STOPPED_ITSELF:
                remarks.insert(0, f"the run stopped itself: {end['message']}")
            for remark in remarks:
                session.console.say(remark, style="yellow")
        except UserError as error:
            problem = error
    together(session.accelerator, problem)
    yield


def assert_recipe(folder: Path, recipe: str) -> None:
    """Raise UserError if the fork that the run was started with is no longer there; the run has a copy."""
    copy = folder / "recipe.py"
    if recipe.endswith(".py") and not Path(recipe).is_file() and copy.is_file():
        raise UserError(f"the recipe of {folder} is gone", got=f"no file {recipe}", needed="the file that the run was started with",
                        cause="it was renamed, moved or deleted", next=f"cp {copy} {recipe}, or move it back")  # fmt: skip


def begun(folder: Path) -> dict[str, Any]:
    """Return args.json of a run folder."""
    args = folder / "args.json"
    if folder.resolve().parent.name == "stages":
        raise UserError(f"{folder} is one stage of a run", needed="the run's folder",
                        next=f"trainworthy resume {folder.parent.parent}")  # fmt: skip
    if not args.is_file() or folder.resolve().parent.name == "checks":
        raise UserError(f"{folder} is not a run folder", got="no args.json in it", needed="a folder under runs/<recipe>/",
                        next=where_runs_are(folder, "resume"))  # fmt: skip
    try:
        saved = json.loads(args.read_text())
        return {**saved, **{k: saved[k] for k in ("recipe", "preset", "argv")}}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{args} cannot be read", got=f"{type(error).__name__}: {error}", needed="the file this run began with",
                        cause="it was edited, or the run was killed while it began", next="start a new run") from None  # fmt: skip
