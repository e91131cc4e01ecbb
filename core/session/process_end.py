"""How a process ends: which of several processes reports the reason, what a crash leaves on disk, and an exit that no
thread can disturb."""

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from trainworthy.core.base.errors import DISK_FULL, DONE, INTERRUPTED, STOPPED_ITSELF, USAGE, Stop, not_permitted
from trainworthy.core.base.origin import frames
from trainworthy.core.loop import checkpoint_survey
from trainworthy.core.session import nodes, stopped_processes

PATIENCE = 2.0  # seconds that other ranks wait for rank 0's message if all stop for the same reason
LOST = re.compile(r"gloo|nccl|connection (was )?(closed|reset)|broken pipe|socket", re.IGNORECASE)
KINDS = {2: "error", 3: "stopped before training", 4: "stopped", 5: "interrupted", nodes.RESTART: "restart"}


class Crashed(Stop):
    """An unexpected error, with what is saved and how to continue. `trace`: Python's traceback, if code is wrong."""

    def __init__(self, message: str, *, code: int, trace: str = ""):
        super().__init__(message)
        self.exit_code, self.trace = code, trace


class Restarted(Stop):
    """The end of a process that torchrun will start again, with all others (`--restarts`)."""

    exit_code = nodes.RESTART

    def __init__(self, stop: Stop):
        trace = stop.trace if isinstance(stop, Crashed) else ""
        next = f"torchrun starts all processes again (restarts left: {nodes.restarts_left()})"
        super().__init__(f"{str(stop).splitlines()[0]}\n{trace}  next:         {next}")


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of the newest stage in a run folder."""
    found = sorted(folder.glob("checkpoints/*/step-*/manifest.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    return next((p.parent for p in found if not checkpoint_survey.verify(p.parent)), None)


def signalled(name: str, folder: Path, again: str) -> tuple[str, int]:
    """Return (message, exit code) of a run that a signal ended between two steps: 5 if something is saved, else the
    shell's code."""
    saved = newest(folder)
    if saved is not None:
        return f"{name}: {saved.name} is saved\n  next:         trainworthy resume {folder}", INTERRUPTED
    return f"{name}: nothing was saved yet\n  next:         {again}", 128 + signal.Signals[name]


def crashed(error: Exception | SystemExit, folder: Path, again: str) -> Crashed:
    """Turn `error` into the planned end of the run in `folder`. `again`: the command that starts it anew."""
    saved = newest(folder)
    full = isinstance(error, OSError) and error.errno in DISK_FULL
    memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
    gone = dist.is_initialized() and is_connection(error)
    planned = full or memory or gone
    resume = f"trainworthy resume {folder}"
    if full:
        what = f"the disk is full, or a limit of file sizes is reached ({error.filename or folder})"
        mend = "free some space, then: "
    elif memory:
        frame, words = frames(error)[0], str(error) or "MemoryError"
        what = f"out of memory: {words.splitlines()[0]} ({frame.filename}:{frame.lineno})"
        mend = "end what else uses the memory, then: "
        again = "trainworthy batch RECIPE finds what fits; then --train.accumulate N (smaller micro-batches, the same batch)"
    elif gone:
        what = f"another process of this run is gone: {str(error).splitlines()[0][:150]}"
        mend = ""
    else:
        what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        mend = "correct what the traceback shows, then: "
        resume += "   (--force where the recipe's file has changed)"
    kept = f"{saved.name}, complete: {saved}" if saved else "nothing: no checkpoint was written yet"
    lines = [what, f"  saved:        {kept}"]
    if gone:
        killed = "it was killed (by the system, out of memory?), or its machine was lost"
        lines.append(f"  likely cause: {'; '.join(stopped_processes.found) or killed}")
    lines.append(f"  report:       {folder / 'report.html'}")
    if gone and (folder / "summary.json").is_file():
        lines.append("  next:         nothing: training had ended, and its result and export are written")
    else:
        lines.append(f"  next:         {mend + resume if saved else (mend if not memory else '') + again}")
    code = STOPPED_ITSELF if full else INTERRUPTED if saved else STOPPED_ITSELF if memory else 1
    trace = "" if planned else "".join(traceback.format_exception(error))
    stop = Crashed("\n".join(lines), code=code, trace=trace)
    stop.restart = not full
    return stop


def before_run(error: Exception) -> tuple[int, str, bool]:
    """Return (exit code, message, whether the end is planned) of an error before there is a run folder."""
    if is_connection(error) and nodes.restarts_left():
        return nodes.RESTART, f"restart: {error}", True
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        where = error.filename or "run folder"
        return STOPPED_ITSELF, f"\nstopped: the disk is full ({where}): free some space, then resume", True
    if isinstance(error, PermissionError):
        return USAGE, f"error: {not_permitted(error)}", True
    return 1, "".join(traceback.format_exception(error)), False


def is_connection(error: Exception) -> bool:
    """Return whether `error` says that another process of the run cannot be reached."""
    return isinstance(error, (RuntimeError, ConnectionError)) and bool(LOST.search(str(error)))


def rank() -> int:
    """Return this process's number among all of the run."""
    return int(os.environ.get("RANK", "0"))


def speaks(code: int, *, planned: bool = True) -> bool:
    """Return whether this process reports why the run ended. `trainworthy -n` keeps a note from the first process that
    failed; later errors of others (a closed connection) are consequences. Without a note, rank 0 and each crashed
    process report."""
    if "TRAINWORTHY_EXIT" not in os.environ:
        return rank() == 0 or not planned
    note, mine = Path(os.environ["TRAINWORTHY_EXIT"]), f"{code} {os.getpid()}"
    deadline = time.monotonic() + (PATIENCE if rank() and planned else 0.0)
    while time.monotonic() < deadline and not note.exists():
        time.sleep(0.02)
    own = note.with_name(f"{note.name}-{os.getpid()}")
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # exclusive, so only the first process writes
        own.write_text(mine)
        os.link(own, note)
    try:
        first = note.read_text()
    except OSError:  # the supervisor has ended and removed the folder
        return True
    return first in ("", mine)  # empty: another process ended well


def leave(
    code: int, message: str = "", planned: bool = True, then: Callable[[int, str], None] = lambda code, message: None
) -> None:
    """Print `message` if this process reports, call `then` in one process of the run, and exit. With several processes, exit at once: the threads of
    interrupted collectives would abort a normal shutdown of Python."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if code == nodes.RESTART:
        if message and os.environ.get("LOCAL_RANK") == "0":
            print(message, file=sys.stderr, flush=True)
        os._exit(code)
    if code != DONE:
        if speaks(code, planned=planned):
            if message:
                print(message, file=sys.stderr, flush=True)
            then(code, message)
    elif "TRAINWORTHY_EXIT" in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(FileNotFoundError):
            Path(os.environ["TRAINWORTHY_EXIT"]).touch()  # empty: done
    if code == DONE and rank() == 0:
        then(code, message)
    with contextlib.suppress(Exception):  # a peer may be gone
        if dist.is_initialized() and code == DONE:
            dist.destroy_process_group()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for every worker that is killed
    for worker in multiprocessing.active_children():  # loader workers ignore SIGTERM, and Python would wait for them
        worker.kill()
    if not several:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # For any other code, launchers print a traceback; `trainworthy -n` reads ours from the note.
    os._exit(DONE if "TRAINWORTHY_EXIT" in os.environ else code)
