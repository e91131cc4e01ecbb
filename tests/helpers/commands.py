"""The real commands, as a user types them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.helpers.server import server

BIN = Path(sys.executable).parent
QUICK = ("--train.epochs", "0.32", "--train.batch-size", "64", "--gates.no-enabled", "--run.no-tensorboard")  # 20 steps


THREADS = os.environ.get("TEST_THREADS", "1")
"""Of each process that a test starts. Results must not depend on it, nor on ATEN_CPU_CAPABILITY or ONEDNN_MAX_CPU_ISA."""


def environment(**more: str) -> dict[str, str]:
    """No accelerator (tests must give the same everywhere), no shadowing, few threads."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": THREADS, **more}


def trainworthy(
    *argv: object, cwd: Path, code: int | None = None, timeout: float = 600, once: str = "", **env: str
) -> subprocess.CompletedProcess:
    """`trainworthy ...` in `cwd`, output captured; forked from a process that has done the imports (tests/helpers/server.py).
    `code`: the exit code that it must have. `once`: it is sent SIGTERM as soon as a complete checkpoint matches."""
    settings = environment(**env)
    done = server(settings).run([str(a) for a in argv], cwd=cwd, env=settings, timeout=timeout, once=once)
    return ended(done, code)


def ended(done: Any, code: int | None) -> Any:
    """`done`, which must have this exit code (None: any). Bad usage leaves no traceback."""
    assert code in (None, done.returncode), f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert code != 2 or "Traceback" not in done.stderr, done.stderr
    return done


def assert_refused(done: Any, *words: str) -> Any:
    """Bad usage: exit code 2, and a message on stderr that holds `words`. Returns `done`."""
    holds(ended(done, 2).stderr, *words)
    return done


def killed(*argv: object, cwd: Path, lives: float) -> None:
    """The same, sent SIGKILL so many seconds after it began to train; it must not have ended by itself."""
    settings = environment()
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = server(settings).run([str(a) for a in argv], cwd=cwd, env=settings, timeout=600, lives=lives)
        raise AssertionError(f"it ended by itself with {done.returncode}: {done.stdout}{done.stderr}")


def holds(text: str, *words: str) -> None:
    """`text` holds each of `words`."""
    assert not (missing := [word for word in words if word not in text]), f"{missing} not in:\n{text}"


def execute(
    *command: object, cwd: Path, code: int | None = None, timeout: float = 600, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Any program, output captured. `code`: the exit code that it must have. `env` replaces `environment()`."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env or environment(), capture_output=True, text=True, timeout=timeout
    )
    return ended(done, code)


def installed(*argv: object, cwd: Path, code: int | None = None, **env: str) -> subprocess.CompletedProcess:
    """The same by the installed command, imports and all."""
    return execute(BIN / "trainworthy", *argv, cwd=cwd, code=code, env=environment(**env))


def imported(*argv: str, cwd: Path) -> tuple[str, set[str]]:
    """What a command printed, and the modules that its process had imported at its end."""
    code = "import atexit, sys; atexit.register(lambda: print('\\f', *sys.modules)); from trainworthy.core.cli import main; main()"
    done = execute(sys.executable, "-c", code, *argv, cwd=cwd, timeout=100)
    text, _, modules = done.stdout.partition("\f")
    assert modules, done.stderr
    return text.rstrip("\n"), set(modules.split())


def start(*argv: object, cwd: Path, **env: str) -> subprocess.Popen:
    """The same in the background; its output is one pipe. Ctrl-C reaches it, also where the suite itself runs in the background."""
    return subprocess.Popen([str(BIN / "trainworthy"), *map(str, argv)], cwd=cwd, env=environment(PYTHONUNBUFFERED="1", **env),
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip


def wait_until(
    condition: Callable[[], Any], *, child: subprocess.Popen | None = None, seconds: float = 240, pause: float = 0.01
) -> Any:
    """Wait for a true value of `condition` and return it; `child` must go on running meanwhile."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert child is None or child.poll() is None, child.stdout.read()
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(pause)
    return found


def started(
    *argv: object, cwd: Path, once: str = "runs/*/*/checkpoints/*/step-*", seconds: float = 240, **env: str
) -> subprocess.Popen:
    """Start a run and wait until a complete checkpoint matches `once`."""
    child = start(*argv, cwd=cwd, **env)
    wait_until(lambda: list(cwd.glob(f"{once}/manifest.json")), child=child, seconds=seconds, pause=0.005)
    return child


def outputs(children: list[subprocess.Popen], seconds: float) -> list[tuple[int, str]]:
    """(exit code, output) of each; none outlives this."""
    try:
        texts = [child.communicate(timeout=seconds)[0] for child in children]
    finally:
        for child in children:
            child.terminate()
    return [(child.returncode, text) for child, text in zip(children, texts, strict=True)]


def machines(cwd: Path, *argv: str, settings: Callable[[int, int, Path], tuple[str, ...]], seconds: float = 100,
             **env: str) -> list[tuple[int, str]]:  # fmt: skip
    """The same command on two machines with a working folder and a /tmp of their own: (exit code, output) of each.
    `settings(rank, port, folder)`: the words by which a machine finds the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in (0, 1):
        own = cwd / f"machine-{rank}"
        own.mkdir(parents=True, exist_ok=True)
        private = tempfile.mkdtemp(prefix="tw-", dir="/tmp")  # a longer path has no room for the workers' sockets
        children.append(start(*argv, *settings(rank, port, own), cwd=own, TMPDIR=private, **env))
    return outputs(children, seconds)


def stop(*argv: object, how: int = signal.SIGTERM, **more: Any) -> tuple[int, str]:
    """As `started`, then send a signal to all of its processes: (exit code, output)."""
    child = started(*argv, **more)
    process = psutil.Process(child.pid)
    for one in (*process.children(recursive=True), process):  # workers first: they must not die of it
        one.send_signal(how)
    output = child.communicate(timeout=200)[0]
    return child.returncode, output


def run_folder(cwd: Path, pattern: str = "runs/*/2*") -> Path:
    """The newest run folder under `cwd`."""
    return max(cwd.glob(pattern), key=lambda p: p.stat().st_mtime)


def read(path: Path) -> Any:
    """A JSON file, or the rows of a JSONL file."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return json.loads(path.read_text())


def losses(folder: Path) -> list[float]:
    """The loss of every step."""
    return [row["step/loss"] for row in read(folder / "step_metrics.jsonl")]


def equal_but_rounding(one: list[float], other: list[float]) -> None:
    """The same run computed in another order (cut, processes, padding). The first values differ by some roundings of fp32. An
    optimiser that divides by a tiny second moment nearly doubles that at every step, up to 1% on some processors."""
    assert len(one) == len(other)
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        allowed = 64 * 2.0**-23 * 2.0 ** min(step, 10) * max(1.0, abs(a))
        assert abs(a - b) <= allowed, f"step {step + 1}: {a} and {b} differ by {abs(a - b):.1e}, allowed {allowed:.1e}"


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the last full checkpoint, of a run of one stage."""
    (latest,) = folder.glob("checkpoints/*/latest")
    if not (latest / ".metadata").exists():
        return load_file(latest / "model.safetensors")
    with tempfile.NamedTemporaryFile() as whole:  # sharded processes wrote one file each
        dcp_to_torch_save(latest, whole.name)
        state = torch.load(whole.name, weights_only=True)
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bitwise equality of two sets of tensors."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def assert_same_run(folder: Path, other: Path) -> None:
    """Two runs of one stage had bitwise the same losses and end with bitwise the same weights."""
    assert losses(folder) == losses(other)
    assert same(final_weights(folder), final_weights(other))
