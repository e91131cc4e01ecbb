"""Finds a process of the run that was stopped (SIGSTOP) and kills it. Without this, the others wait for it in a collective until
torch's time limit: 30 minutes with gloo. Once it is gone, they report it like any other process that was killed.

If the `trainworthy` that started the processes is gone (kill -9), each ends itself as if it had got its SIGTERM: saved, and resumable. They
would go on unseen, and hold the run folder.

Only processes of the same machine are watched. A process that hangs without being stopped is not found.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
from accelerate import Accelerator
from trainworthy.core.base.processes import gathered
from trainworthy.core.session import nodes

SECONDS = 30
"""How long a process may be stopped. Ctrl-Z and `fg` stop all of them, this watch with them, so that time does not count."""
found: list[str] = []
"""What this watch has ended."""


def watch(accelerator: Accelerator) -> None:
    """Check the other processes of this machine once a second, until this process ends."""
    if accelerator.num_processes == 1:
        return
    every = gathered(accelerator, (_machine(), os.getpid()))
    peers = {}
    for rank, (machine, pid) in enumerate(every):
        if machine == _machine() and pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                peers[rank] = psutil.Process(pid)
    if (starter := _starter()) or peers:
        threading.Thread(target=_look, args=(peers, starter), name="stopped-processes", daemon=True).start()


def _starter() -> psutil.Process | None:
    """The process that started the launcher, if it was ours."""
    pid, _, created = os.environ.get("TRAINWORTHY_LAUNCHER", "").partition(" ")
    if not pid:
        return None
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(int(pid))
        if abs(found.create_time() - float(created)) < 1:  # else the number is another process's by now
            return found
    return None


def _look(peers: dict[int, psutil.Process], starter: psutil.Process | None) -> None:
    stopped = dict.fromkeys(peers, 0)
    while peers or starter:
        time.sleep(1.0)
        if starter and not _lives(starter):
            starter = None
            if nodes.NOTE in os.environ:  # else torchrun would start the run again
                nodes.stop_note(Path(os.environ[nodes.NOTE])).touch()
            os.kill(os.getpid(), signal.SIGTERM)
        for rank, process in list(peers.items()):
            try:
                stopped[rank] = stopped[rank] + 1 if process.status() == psutil.STATUS_STOPPED else 0
                if stopped[rank] >= SECONDS:
                    what = f"rank {rank} (process {process.pid})"
                    found.append(f"{what} was stopped for {SECONDS} s (SIGSTOP) and was ended")
                    process.kill()
            except psutil.Error:  # it has ended
                del peers[rank]


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _machine() -> str:
    """Return what identifies a space of process ids: host and PID namespace, because a container has its own ids."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return f"{socket.gethostname()} {numbers}"
