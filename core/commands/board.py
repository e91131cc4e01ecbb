"""usage: trainworthy board [FOLDER] [--port N] [--host NAME]

Shows the runs in TensorBoard, until Ctrl-C.

  trainworthy board                              every run under runs/
  trainworthy board runs/vision-classify         the runs of one recipe
  trainworthy board runs/vision-classify/20260101-120000-ab12    one run
  trainworthy board --port 7007 --host 0.0.0.0   on this port, visible to other machines
  trainworthy run vision/classify --board        for one run: starts before its first step, ends with it

The address is printed once the board answers. Without --port it is 6006, or the next free one. Runs with `--run.no-tensorboard` have
no files for it. TensorBoard asks for no password: with another --host than localhost, everyone who can reach the port sees the runs.
Exit codes: 0 (Ctrl-C), 2 where there is no TensorBoard, no folder or no free port."""

import contextlib
import signal
import time
from pathlib import Path

from trainworthy.core.base.config import take
from trainworthy.core.base.errors import UserError
from trainworthy.core.commands import take_number
from trainworthy.core.monitoring.board import Board


def main(argv: list[str]) -> None:
    rest, port = take_number(argv[1:], "--port")
    rest, host = take(rest, "--host")
    needed = "a folder with runs (default runs)"
    if len(rest) > 1 or (rest and rest[0].startswith("-")):
        raise UserError("board takes one folder", got=" ".join(rest), needed=needed, next="trainworthy board --help")
    if port is not None and port > 65535:
        raise UserError("--port needs a port", got=port, needed="1 to 65535")
    folder = Path(rest[0] if rest else "runs")
    if rest and not folder.is_dir():
        raise UserError(f"no folder {folder}", needed=needed)
    if not any(folder.rglob("events.out.tfevents.*")):
        print(f"no TensorBoard files under {folder} yet: they appear when a run begins to train", flush=True)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for one in (signal.SIGTERM, signal.SIGINT):  # a background job inherits SIGINT as ignored
        signal.signal(one, stop)

    def ready(url: str) -> None:
        print(f"board  {url}  ({folder}; Ctrl-C ends it)", flush=True)

    with (
        contextlib.suppress(KeyboardInterrupt),
        Board(folder, host=host or "localhost", port=port, ready=ready) as board,
    ):
        if problem := board.wait():
            again = "trainworthy board --port 7007"
            raise UserError("TensorBoard did not start", got=problem, needed="a free port", next=again)
        while board.child.poll() is None:
            time.sleep(0.2)
        raise UserError("TensorBoard ended", got=f"exit code {board.child.returncode}")
