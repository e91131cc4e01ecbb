"""A process without this project that has imported torch, and forks one child for each export that is read.

A command reads its export in a new process, whose imports cost four to seven seconds. A command that tests/helpers/server.py
forks asks this process instead; what it reads is the same. The installed command (test_cli, tests in the background) starts its own.
"""

import ast
import contextlib
import gc
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Reader:
    """The asking side. Commands ask one after another; one that was killed may leave an answer behind."""

    def __init__(self, env: dict[str, str]):
        env = {k: v for k, v in env.items() if k != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )

    def run(
        self, command: list[str], *, cwd: str, env: dict[str, str], timeout: float, **_: Any
    ) -> subprocess.CompletedProcess:
        """subprocess.run([python, FILE, *ARGUMENTS], ...) with captured output."""
        with tempfile.NamedTemporaryFile("r", suffix=".err") as err:
            request = {"argv": command[1:], "cwd": cwd, "env": env, "err": err.name}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            name, code = "", ""
            while name != err.name:
                name, code = self._process.stdout.readline().rsplit(maxsplit=1)
            return subprocess.CompletedProcess(command, int(code), "", err.read())

    def subprocess(self) -> SimpleNamespace:
        """In place of the module `subprocess`."""
        return SimpleNamespace(run=self.run, TimeoutExpired=subprocess.TimeoutExpired)


def serve() -> None:
    """Answer each line of JSON with an exit code."""
    for line in sys.stdin:
        request = json.loads(line)
        for name in imported(Path(request["argv"][1])):
            with contextlib.suppress(ImportError):  # the child will say it
                importlib.import_module(name)
        gc.freeze()
        child = os.fork()
        if child == 0:
            obey(request)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(request["err"], code, flush=True)


def imported(reader: Path) -> set[str]:
    """What a reader's file imports."""
    names = {"torch.export.pt2_archive._package"}
    with contextlib.suppress(OSError, SyntaxError):
        for node in ast.walk(ast.parse(reader.read_text())):
            if isinstance(node, ast.Import):
                names |= {a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return {n for n in names if importlib.util.find_spec(n.partition(".")[0])}


def obey(request: dict[str, Any]) -> None:
    """Be `python FILE ARGUMENTS`; never returns."""
    code: Any = 1
    with open(request["err"], "w") as err:
        os.dup2(err.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            import torch

            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
            torch.set_num_threads(int(request["env"]["OMP_NUM_THREADS"]))
            sys.argv = request["argv"]
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as asked:
            code = asked.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve()
