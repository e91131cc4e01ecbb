"""TensorBoard on a folder of runs, in a process of its own that ends with the one that started it.

`python -m trainworthy.core.monitoring.board FOLDER HOST PORT PARENT` is that process: it prints its address, then serves.
"""

import contextlib
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from trainworthy.core.base.errors import UserError

PATIENCE = 60.0
"""Seconds to wait for TensorBoard to answer."""


def assert_installed() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        needed = "the package 'tensorboard'"
        raise UserError("TensorBoard is not installed", needed=needed, next="pip install tensorboard")


class Board:
    """A TensorBoard, used as a context manager. `ready(url)` is called by a thread as soon as the board answers."""

    def __init__(self, folder: Path, *, host: str = "localhost", port: int | None = None, ready: Callable[[str], None]):
        assert_installed()
        self.folder, self.host, self.port, self.ready = Path(folder), host, port, ready
        self.url, self.problem = "", ""
        self._settled = threading.Event()

    def __enter__(self) -> "Board":
        words = [sys.executable, "-m", "trainworthy.core.monitoring.board", str(self.folder), self.host, str(self.port or ""),
                 str(os.getpid())]  # fmt: skip
        self._errors = tempfile.TemporaryFile()
        env = dict(os.environ, PYTHONSAFEPATH="1", CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")
        self.child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=env,
                                      start_new_session=True)  # fmt: skip
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def _watch(self) -> None:
        """Wait for its address, then for its answer."""
        assert self.child.stdout  # piped
        url = self.child.stdout.readline().strip()
        deadline = time.monotonic() + PATIENCE
        while url and time.monotonic() < deadline and self.child.poll() is None:
            if answers(url):
                self.url = url
                self.ready(url)
                break
            time.sleep(0.1)
        else:
            if self.child.poll() is None:
                self.child.terminate()
            self.child.wait()
            self._errors.seek(0)
            lines = [x.strip() for x in self._errors.read().decode(errors="replace").splitlines() if x.strip()]
            self.problem = lines[-1] if lines else "it ended, or did not answer in time"
        self._settled.set()

    def wait(self) -> str:
        """Wait until it answers or is given up; return the problem, or ""."""
        self._settled.wait(PATIENCE + 5)
        return self.problem

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self.child.terminate()
        try:
            self.child.wait(5)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


@contextlib.contextmanager
def during_run(folder: Path, *, wanted: bool, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Serve TensorBoard during a run, if `wanted` (set on rank 0 only). Yields a function that waits until it answers."""
    if not wanted:
        yield lambda: None
        return
    with Board(folder, ready=lambda url: say(f"board  {url}")) as board:

        def up() -> None:
            if problem := board.wait():
                say(f"board  TensorBoard did not start ({problem}); the run continues without it")

        try:
            yield up
        finally:
            if board.url:
                say(f"board  ended with the run; again: trainworthy board {shlex.quote(str(folder))}")


def answers(url: str) -> bool:
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine, whatever proxy is set
        with opener.open(url, timeout=2) as page:
            return page.status == 200
    except OSError:
        return False


def serve(folder: str, host: str, port: str, parent: str) -> None:
    """TensorBoard until the parent is gone. Without a port: 6006, or the next free one."""
    from tensorboard import program

    board = program.TensorBoard()
    words = ["tensorboard", "--logdir", folder, "--host", host, "--reload_interval", "5"]
    board.configure(argv=[*words, "--port", port] if port else words)
    print(board.launch(), flush=True)
    while os.getppid() == int(parent):
        time.sleep(0.5)


if __name__ == "__main__":
    serve(*sys.argv[1:5])
