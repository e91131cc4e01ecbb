"""Processes of one machine: what they need, how they are watched, signalled and ended. Nothing here imports torch at its top."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from trainworthy.core.base.errors import SIGNALS, UserError
from trainworthy.core.base.files import read_json
from trainworthy.core.session import nodes


def set_devices(env: dict[str, str], processes: int) -> None:
    """Set what `processes` on this machine need: accelerators or CPUs, and threads.

    On CPU, accelerate runs one process without a warning unless --multi_gpu AND this variable are set (docs/architecture.md)."""
    from trainworthy.core.base.machine import cores

    env.setdefault("ACCELERATE_USE_CPU", "false" if accelerators() >= processes else "true")
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores().allowed // processes)))


def assert_memory(processes: int) -> None:
    """Raise UserError if this machine has no room for as many processes, whatever they train: they would start, and take all of it."""
    from trainworthy.core.base.machine import cores, free_memory

    if processes * LEAST > (free := free_memory()):
        raise UserError(
            f"{processes} processes do not fit on this machine", got=f"{free / 2**30:.1f} GiB of free memory",
            needed=f"about {processes * LEAST / 2**30:.0f} GiB for Python and torch alone",
            next=f"-n {max(1, min(cores().allowed, free // LEAST))}",
        )  # fmt: skip


LEAST = 300 * 2**20  # bytes of a process that has imported torch and a recipe
GRACE = 45.0  # seconds that the other processes get after the first one failed


def supervise(command: list[str], env: dict[str, str]) -> int:
    """Run a launcher of several processes and return the exit code of our rank 0, which the launcher itself would
    replace by 1."""
    import psutil

    mine = psutil.Process()
    env = env | {"TRAINWORTHY_LAUNCHER": f"{mine.pid} {mine.create_time()}"}
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "exit-code"
        # In its own session, Ctrl-C does not reach the launcher, which would kill the ranks. We forward it to them once.
        child = subprocess.Popen(command, env={**env, "TRAINWORTHY_EXIT": str(note)}, start_new_session=True,
                                 preexec_fn=_deaf if os.name == "posix" else None)  # fmt: skip
        launcher, arrived, ranks = psutil.Process(child.pid), [], []

        def forward(number: int, _frame) -> None:
            arrived.append(number)
            nodes.stop_note(note).touch()
            with contextlib.suppress(psutil.Error):
                ranks[:] = launcher.children()
                for process in ranks:
                    process.send_signal(number)
                if not ranks:
                    launcher.terminate()

        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, forward)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(0.1)
                break
            if note.exists() and note.read_text():
                return _reap(launcher, child, note)
            if nodes.RESTARTS in env and ranks and not psutil.wait_procs(ranks, timeout=0)[1] and not note.exists():
                note.write_text(str(128 + arrived[0]))  # a signal before the run began, which torchrun would restart
                return _reap(launcher, child, note)
        if note.exists():
            return int((note.read_text() or "0").split()[0])
        if arrived:
            print(f"interrupted: {signal.Signals(arrived[0]).name}, before the run began", file=sys.stderr)
            return 128 + arrived[0]
        return 128 - code if code < 0 else code


def _deaf() -> None:
    """Ignore these signals in the launcher, which would kill or orphan its ranks. `supervise` forwards them to the
    ranks."""
    for number in set(SIGNALS) - {signal.SIGTERM, signal.SIGINT}:
        signal.signal(number, signal.SIG_IGN)


def _reap(launcher, child: subprocess.Popen, note: Path) -> int:
    """Kill the launcher after a rank has written its exit code, since it would print its own traceback, or kill ranks that
    still write. The other ranks get `GRACE` seconds to end: their connections are closed, or they hang on a device."""
    import psutil

    ranks = []
    with contextlib.suppress(psutil.Error):
        ranks = launcher.children(recursive=True)
    child.kill()
    child.wait()
    for process in psutil.wait_procs(ranks, timeout=GRACE)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(ranks, timeout=5)
    return int(note.read_text().split()[0])


def accelerators() -> int:
    import torch

    return torch.cuda.device_count()


def processes_of(folder: Path) -> str | None:
    """Return the number of processes that a run was started with."""
    found = read_json(folder / "args.json").get("processes")
    return None if found is None else str(found)
