"""A process that has imported everything and forks one child per command: `trainworthy` without its five seconds of imports.

A child is a process of its own, with the working directory, environment, output files and arguments of the command; it runs
`trainworthy.core.cli.main`, and where that becomes `python -m trainworthy.launch`, what this module runs. The installed command,
with its imports, is tested in test_cli, and wherever a test starts it in the background or with several processes.
"""

import ast
import atexit
import contextlib
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path

from tests.helpers.fresh import Reader


class Server:
    """The parent's side: one request at a time."""

    def __init__(self, env: dict[str, str]):
        command = [sys.executable, "-m", "tests.helpers.server"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=Path(__file__).parents[2], text=True
        )

    def run(
        self,
        argv: list[str],
        *,
        cwd: Path,
        env: dict[str, str],
        timeout: float,
        lives: float | None = None,
        once: str = "",
    ) -> subprocess.CompletedProcess:
        """`trainworthy ARGV` in `cwd`, output captured. `lives`: it is killed so many seconds after it began to train. `once`: it
        is sent SIGTERM once a complete checkpoint matches. The result's `cpu`: seconds of CPU time of all its processes."""
        with tempfile.TemporaryDirectory() as name:
            out, err = Path(name) / "out", Path(name) / "err"
            request = {
                "argv": argv,
                "cwd": str(cwd),
                "env": env,
                "timeout": timeout,
                "lives": lives,
                "once": once,
                "out": str(out),
                "err": str(err),
            }
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            code, cpu = self._process.stdout.readline().split()
            if int(code) == TIMED_OUT:
                raise subprocess.TimeoutExpired(argv, timeout)
            done = subprocess.CompletedProcess(argv, int(code), out.read_text(), err.read_text())
            done.cpu = float(cpu)
            return done

    def close(self) -> None:
        """End the process: its standard input ends."""
        self._process.stdin.close()
        self._process.wait(60)


TIMED_OUT = 1000
LATE = ("torchvision", "trainworthy.core.launch", "trainworthy.core.commands.run", "trainworthy.core.commands.resume",
        "trainworthy.core.commands.check", "trainworthy.core.gates.checks.rehearsal", "trainworthy.core.report",
        "torch.export._trace", "sympy.tensor.tensor", "matplotlib.figure", "matplotlib.backends.backend_agg",
        "matplotlib.backends.backend_svg", "PIL.GifImagePlugin", "sklearn.linear_model")  # fmt: skip
"""What nearly every command imports, or imports inside a function."""
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
# Read once, so that each value needs a server of its own:
AT_IMPORT = ("PYTHONPATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


KEPT = 3
"""Servers of a test process; each has half a gigabyte. Fifteen in each of two processes used up 24 GB."""
_servers: dict[tuple[tuple[str, str], ...], Server] = {}


def server(env: dict[str, str]) -> Server:
    """A server whose imports saw this environment, started on first use. The least recently used one ends where there are too many."""
    seen = tuple(sorted((k, v) for k, v in env.items() if k in AT_IMPORT or k.startswith("HF_")))
    if seen not in _servers:
        rest = {k: v for k, v in os.environ.items() if k not in AT_IMPORT and not k.startswith("HF_")}
        _servers[seen] = Server({**rest, "PYTHONSAFEPATH": "1", **dict(seen)})
    _servers[seen] = _servers.pop(seen)  # the last one of the dict is the one in use
    while len(_servers) > KEPT:
        _servers.pop(next(iter(_servers))).close()
    return _servers[seen]


def serve() -> None:
    """The server's side: answer each line of JSON with an exit code."""
    for name in LATE:
        importlib.import_module(name)
    from trainworthy.core.gates.checks import exported

    exported.subprocess = Reader(dict(os.environ)).subprocess()
    for line in sys.stdin:
        request = json.loads(line)
        preload(request)
        gc.freeze()  # a collection in a child need not look at what was imported
        child = os.fork()
        if child == 0:
            end(obey, request)
        deadline, lives, once = time.monotonic() + request["timeout"], request["lives"], request["once"]
        while True:
            if lives is not None and training(Path(request["out"])):
                deadline, lives = time.monotonic() + lives, None
            if once and any(Path(request["cwd"]).glob(f"{once}/manifest.json")):
                with contextlib.suppress(ProcessLookupError):  # it has just ended, or has not yet a group of its own
                    os.killpg(child, signal.SIGTERM)
                    once = ""
            done, status, used = os.wait4(child, os.WNOHANG)
            if done:
                print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)
                break
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                print(TIMED_OUT, 0, flush=True)
                break
            time.sleep(0.01)


def training(output: Path) -> bool:
    """Has it said that it trains, or goes on training?"""
    return output.exists() and any(line.startswith(("train ", "  resumed")) for line in output.read_text().splitlines())


def preload(request: dict) -> None:
    """Import the libraries that the recipe of this command and its nouns import, once for all commands that follow. Nothing of
    recipes/: what a process has loaded of it is part of a run's sources."""
    for word in request["argv"]:
        _preload(Path(request["cwd"], word) if word.endswith(".py") else RECIPES / f"{word}.py")


def _preload(path: Path) -> None:
    try:
        body = ast.parse(path.read_text()).body
    except (OSError, SyntaxError, ValueError):
        return
    for node in body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        for name in names:
            _import(name)


@cache
def _import(name: str) -> None:
    if name.startswith("trainworthy.recipes"):
        _preload(RECIPES.parent.joinpath(*name.split(".")[1:]).with_suffix(".py"))
        return
    with contextlib.suppress(ImportError):  # a name in a module, or what the child will say
        if importlib.util.find_spec(name):
            importlib.import_module(name)


def obey(request: dict) -> None:
    """Be the command; never returns."""

    from trainworthy.core import cli, launch

    os.setsid()
    for number, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    execute = os.execve

    def become(path: str, command: list[str], env: dict[str, str]) -> None:
        if command[1:3] != ["-m", "trainworthy.launch"]:
            execute(path, command, env)
        environ(env)
        launch.main(argv=command[3:])

    os.execve = become
    environ(request["env"])
    sys.argv = ["trainworthy", *request["argv"]]
    cli.main()
    sys.exit()


def end(function, *args) -> None:
    """Call it and end as Python does, but for the second that taking all modules down costs."""
    code = 0
    try:
        function(*args)
    except SystemExit as asked:
        code = asked.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def environ(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


if __name__ == "__main__":
    serve()
