"""One rehearsal of a script in a child process with sandbox, observers and a plan. The record comes back as JSON.

Children are forked from a process that has imported torch and run nothing, so a rehearsal takes only the script's own
time.
"""

import difflib
import fcntl
import json
import math
import os
import shlex
import signal
import sys
import termios
import time
import traceback
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainworthy.core.base import clock
from trainworthy.core.base.errors import SIGNALS, UserError
from trainworthy.guard.rehearsals.target import Target


@dataclass
class Outcome:
    """Result of one rehearsal."""

    record: dict[str, Any] = field(default_factory=dict)
    code: int | None = None
    signal: int = 0
    late: bool = False
    seconds: float = 0.0
    output: str = ""
    folder: Path | None = None


def locate(words: list[str], *, command: str = "guard") -> Target:
    """`train.py ARGS` or `-m pkg.train ARGS`; a `--` between is left out. `command`: for the error."""
    words = list(words)
    if words and words[0] == "--":
        words = words[1:]
    if not words:
        raise UserError(
            f"{command} what?", needed="a script", next=f"trainworthy {command} train.py -- --its --arguments"
        )
    if words[0] == "-m":
        name = words[1] if len(words) > 1 else ""
        sys.path.insert(0, os.getcwd())
        try:
            spec = find_spec(name) if name else None
            if spec is not None and spec.submodule_search_locations:
                name, spec = f"{name}.__main__", find_spec(f"{name}.__main__")
        except ImportError:
            spec = None
        finally:
            sys.path.pop(0)
        if spec is None or not spec.origin:
            raise UserError(f"no module '{name}'", cause="-m looks from the working directory", next="ls")
        return Target(Path(spec.origin), script_arguments(words[2:]), name)
    path = Path(words[0])
    if not path.is_file():
        raise _no_script(path, command)
    if path.suffix not in (".py", ""):
        following = {
            ".ipynb": f"jupyter nbconvert --to script {path}",
            ".sh": f"grep -n python {path}    # guard the script that it starts",
        }
        raise UserError("guard needs a Python script", got=str(path), needed="a file ending in .py, or -m package.module",
                        next=following.get(path.suffix, ""))  # fmt: skip
    return Target(path.absolute(), script_arguments(words[1:]))


def _no_script(path: Path, command: str) -> UserError:
    """Return the message for a path that is no file: the nearest scripts, by their names."""
    if path.is_dir():
        inside = sorted(p for p in path.iterdir() if p.suffix == ".py" and not p.name.startswith("_"))
        first = next((p for p in inside if "train" in p.stem), inside[0] if len(inside) == 1 else None)
        names = ", ".join(p.name for p in inside[:5]) + ", ..." * (len(inside) > 5)
        return UserError(f"{path} is a folder", got=names or "no Python file", needed="the script that trains",
                         next=f"trainworthy {command} {shlex.quote(str(first))}" if first else f"ls {path}")  # fmt: skip
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 1, 0.7)
    return UserError(f"no script {path}", needed="the path of a Python file, or -m and a module",
                     next=f"trainworthy {command} {shlex.quote(str(path.parent / near[0]))}" if near else "ls *.py")  # fmt: skip


def script_arguments(words: list[str]) -> list[str]:
    """The script's own arguments."""
    return words[1:] if words[:1] == ["--"] else words


def start(target: Target, plan: Any, folder: Path, below: Path | None = None) -> int:
    """Fork a child that rehearses `target`; return its process id. `below`: files that an earlier rehearsal wrote
    before its first step."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("first-step", "record.json"):  # of an earlier rehearsal under this name
        (folder / name).unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        out = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        quiet = silence()
        os.dup2(out, 1), os.dup2(out, 2), os.dup2(quiet, 0)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  whatever the parent has put there
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        from trainworthy.guard.rehearsals.child import Rehearsal

        code = Rehearsal(plan, folder).run(target, below)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def silence() -> int:
    """Return the script's standard input: one that is at its end. Where the guard was started in a terminal, it is a terminal of its
    size, because some scripts ask for that (`stty size`)."""
    if not os.isatty(0):
        return os.open(os.devnull, os.O_RDONLY)
    keys, screen = os.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, fcntl.ioctl(0, termios.TIOCGWINSZ, b"\0" * 8))
    os.write(keys, b"\x04" * 64)  # the end of the input, as often as it is read
    return screen


def wait(pid: int, folder: Path, *, load: float, limit: float, say: Any = None) -> Outcome:
    """Wait for a child. Kill its process group after `load` seconds without a first step, or `limit` seconds after
    it, in which the child did not wait for a processor."""
    began, reported, waited = time.monotonic(), 0.0, 0.0
    first = math.inf  # when the first step was seen: by this clock, because the system's may be set meanwhile
    out, late = Outcome(folder=folder), False
    mark = folder / "first-step"
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        spent = time.monotonic() - began
        if found:
            break
        if first == math.inf and mark.exists():
            first = time.monotonic()
        if first == math.inf:
            stepped, waited = None, clock.waited(pid)
        else:
            stepped = time.monotonic() - first - max(0.0, clock.waited(pid) - waited)
        if (stepped is None and spent > load) or (stepped is not None and stepped > limit):
            late = True
            kill(pid)
            _, status = os.waitpid(pid, 0)
            break
        if say and stepped is None and spent - reported > 20:
            reported = spent
            say(f"  no optimiser step yet after {spent:.0f} s; guard waits up to {load:.0f} s (--load-seconds)")
        time.sleep(0.02)
    kill(pid)  # what it has started
    out.late, out.seconds = late, time.monotonic() - began
    out.code = os.waitstatus_to_exitcode(status)
    out.signal = -out.code if out.code < 0 else 0
    out.output = (folder / "output.txt").read_text(errors="replace") if (folder / "output.txt").exists() else ""
    from trainworthy.guard.checks.ranks import merged

    record = folder / "record.json"
    out.record = merged(folder, json.loads(record.read_text()) if record.exists() else {})
    return out


def kill(pid: int) -> None:
    """Kill a child's process group, including workers that ignore SIGTERM."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
