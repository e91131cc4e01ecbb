"""Two machines on one: network namespaces that reach each other over a cable (veth) alone, host names, a /tmp and a working folder of
their own. It needs root on Linux."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.commands import BIN, environment, outputs

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SHARED, OWN = "/mnt/shared", "/mnt/own"


def can() -> bool:
    """Whether this machine lets us make them."""
    if sys.platform != "linux" or os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "mount"))):
        return False
    name = f"tw{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return (
        made
        and subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode
        == 0
    )


@contextlib.contextmanager
def cabled() -> Iterator[list[str]]:
    """Names of two network namespaces with a cable between them."""
    names = [f"tw{os.getpid()}-{i}" for i in (0, 1)]
    ends = [f"tw{os.getpid()}e{i}" for i in (0, 1)]
    do = lambda *words: subprocess.run(words, check=True, capture_output=True)  # noqa: E731
    try:
        for name in names:
            do("ip", "netns", "add", name)
        do("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            do("ip", "link", "set", end, "netns", name, "name", "eth0")
            do("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                do("ip", "-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def together(shared: Path, *argv: str, seconds: float = 300) -> list[tuple[int, str]]:
    """`trainworthy ...` with `--nodes 2` on both: (exit code, output) of each. `shared` is SHARED there; nothing else is common
    but the installation."""
    shared.mkdir(parents=True, exist_ok=True)
    env = environment(GLOO_SOCKET_IFNAME="eth0", TMPDIR="/tmp", PYTHONUNBUFFERED="1")
    with cabled() as names:
        children = []
        for rank, name in enumerate(names):
            machine = f"--nodes 2 --node-rank {rank} --address {ADDRESSES[0]}:29500"
            words = [str(BIN / "trainworthy"), *argv, *machine.split()]
            script = (
                f"hostname machine-{rank} && mount -t tmpfs none /mnt && mkdir {SHARED} {OWN}-{rank} && "
                f"mount --bind {shlex.quote(str(shared))} {SHARED} && mount -t tmpfs none /tmp && cd {OWN}-{rank} && exec {shlex.join(words)}"
            )
            inside = ["ip", "netns", "exec", name, "unshare", "-m", "-u", "sh", "-c", script]
            children.append(
                subprocess.Popen(inside, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        return outputs(children, seconds)
