"""Finds a process of the run that was stopped (SIGSTOP) and kills it. Without this, the others wait for it in a collective until
torch's time limit: 30 minutes with gloo. Once it is gone, they report it like any other process that was killed.

Only processes of the same machine are watched. A process that hangs without being stopped is not found.
"""

import contextlib
import os
import socket
import threading
import time

import psutil
from accelerate import Accelerator
from trainworthy.core.base.processes import gathered

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
    if peers:
        threading.Thread(target=_look, args=(peers,), name="stopped-processes", daemon=True).start()


def _look(peers: dict[int, psutil.Process]) -> None:
    stopped = dict.fromkeys(peers, 0)
    while peers:
        time.sleep(1.0)
        for rank, process in list(peers.items()):
            try:
                stopped[rank] = stopped[rank] + 1 if process.status() == psutil.STATUS_STOPPED else 0
                if stopped[rank] >= SECONDS:
                    what = f"rank {rank} (process {process.pid})"
                    found.append(f"{what} was stopped for {SECONDS} s (SIGSTOP) and was ended")
                    process.kill()
            except psutil.Error:  # it has ended
                del peers[rank]


def _machine() -> str:
    """Return what identifies a space of process ids: host and PID namespace, because a container has its own ids."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return f"{socket.gethostname()} {numbers}"
