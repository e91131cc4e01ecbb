"""`trainworthy run`: the gates, then the full run."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.commands import open_recipe, prints_json, take_flag
from trainworthy.core.commands.help import RUN_OPTIONS
from trainworthy.core.monitoring import board
from trainworthy.core.monitoring.trackers import tracked
from trainworthy.core.report.plain import in_short
from trainworthy.core.session import multi_seed
from trainworthy.core.session.checking import check_stages
from trainworthy.core.session.session import Interrupts, Session, open_session, reported, session_lock, write_start
from trainworthy.core.session.training import train


@prints_json
def main(argv: list[str], found: dict[str, Any]) -> None:
    """Run one seed or several; put what `report --json` says into `found`, also if a gate fails."""
    argv, wanted = take_flag(argv, "--board")
    argv, given = multi_seed.take_seeds(argv)
    if given is not None:
        multi_seed.run(argv, given, with_board=wanted, found=found)
    loaded, cfg, preset = open_recipe("run", argv, options=RUN_OPTIONS)
    assert_boardable(cfg, wanted)
    folder = os.environ.pop("TRAINWORTHY_FOLDER", None)  # set for one of several seeds
    session = open_session(loaded, cfg, preset, argv, folder=Path(folder) if folder else None)
    check_and_train(session, found, cfg.run.out if wanted else None, start=lambda: write_start(session))


def check_and_train(
    session: Session,
    found: dict[str, Any],
    board_on: Path | None,
    *,
    start: Callable[[], None],
    ready: contextlib.AbstractContextManager = contextlib.nullcontext(),  # noqa: B008
) -> None:
    """Run the gates, then train. `start` is called first; `ready` is entered before anything changes in the run folder. `board_on`:
    the folder of a TensorBoard."""
    track = tracked(session.accelerator, session.cfg, session.folder, project=session.recipe.slug)
    wanted = session.main and board_on is not None
    running_board = board.during_run(board_on, wanted=wanted, say=session.console.say)
    interrupts = Interrupts()
    with (
        session_lock(session),
        ready,
        interrupts.handled(),
        in_short_at_the_end(session, found),
        reported(session),
        track,
        running_board as board_is_up,
    ):
        start()
        check_stages(session, only=(), deep=False)
        board_is_up()
        train(session, interrupts)


@contextlib.contextmanager
def in_short_at_the_end(session: Session, found: dict[str, Any]) -> Iterator[None]:
    """Put what the run's page says into `found`, however the run ends."""
    try:
        yield
    finally:
        if session.main and (session.folder / "args.json").is_file():
            found |= in_short(session.folder)


def assert_boardable(cfg: config.Config, wanted: bool) -> None:
    """Raise UserError if --board has nothing to show."""
    if wanted:
        board.assert_installed()
        if not cfg.run.tensorboard:
            raise UserError("--board shows TensorBoard's files", got="--run.no-tensorboard", needed="one of them")
