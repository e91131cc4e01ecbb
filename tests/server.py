"""A process that has imported everything and forks one child per command: the launcher without its five seconds of imports.

A child is a process of its own, with the working directory, environment, output files and arguments of the command; it runs
`core.launch.main`, as `python -m core.launch` does. The command line itself, with its imports, is tested in test_cli and test_life.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path


class Server:
    """The parent's side: one request at a time."""

    def __init__(self, env: dict[str, str]):
        self.env = env
        self._process = subprocess.Popen([sys.executable, "-m", "tests.server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         env=env, cwd=Path(__file__).parent.parent, text=True)  # fmt: skip

    def run(self, argv: list[str], *, cwd: Path, timeout: float, out: Path, err: Path) -> int:
        """Exit code of `python -m core.launch ARGV` in `cwd`; its output is in the files `out` and `err`."""
        request = {"argv": argv, "cwd": str(cwd), "timeout": timeout, "out": str(out), "err": str(err)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        if code == TIMED_OUT:
            raise subprocess.TimeoutExpired(argv, timeout)
        return code


TIMED_OUT = 1000


@cache
def server(env: tuple[tuple[str, str], ...]) -> Server:
    """One server for each environment, started on first use; it ends with its standard input."""
    return Server(dict(env))


def serve() -> None:
    """The server's side: answer each line of JSON with an exit code."""
    import signal
    import time

    import torchvision  # noqa: F401

    import core.gates.rehearsal
    import core.launch
    import core.report

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            for number, path in ((1, request["out"]), (2, request["err"])):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.chdir(request["cwd"])
            core.launch.main(argv=request["argv"])
        deadline = time.monotonic() + request["timeout"]
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                print(os.waitstatus_to_exitcode(status), flush=True)
                break
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                print(TIMED_OUT, flush=True)
                break
            time.sleep(0.01)


if __name__ == "__main__":
    serve()
