"""One rehearsal of a script in a child process with sandbox, observers and a plan. The record comes back as JSON.

Children are forked from a process that has imported torch and run nothing, so a rehearsal takes only the script's own
time.
"""

import ast
import builtins
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import types
from dataclasses import asdict, dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainworthy.core.base.errors import UserError

BATCHES = ("get_batch", "next_batch", "get_minibatch")
"""Functions of a script whose results count as batches by default."""


@dataclass
class Target:
    """The script or module to guard."""

    path: Path
    argv: list[str]
    module: str = ""
    batches: tuple[str, ...] = BATCHES


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


def locate(words: list[str]) -> Target:
    """`train.py ARGS` or `-m pkg.train ARGS`; a `--` between is left out."""
    words = list(words)
    if words and words[0] == "--":
        words = words[1:]
    if not words:
        raise UserError("guard what?", needed="a script", next="trainworthy guard train.py -- --its --arguments")
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
        return Target(Path(spec.origin), rest(words[2:]), name)
    path = Path(words[0])
    if not path.is_file():
        raise UserError(f"no script {path}", next="ls *.py")
    if path.suffix not in (".py", ""):
        raise UserError(
            "guard needs a Python script", got=str(path), needed="a file ending in .py, or -m package.module"
        )
    return Target(path.absolute(), rest(words[1:]))


def rest(words: list[str]) -> list[str]:
    """The script's own arguments."""
    return words[1:] if words[:1] == ["--"] else words


def start(target: Target, plan: Any, folder: Path, below: Path | None = None) -> int:
    """Fork a child that rehearses `target`; return its process id. `below`: files that an earlier rehearsal wrote
    before its first step."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        out = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        quiet = os.open(os.devnull, os.O_RDONLY)
        os.dup2(out, 1), os.dup2(out, 2), os.dup2(quiet, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        code = _child(target, plan, folder, below)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int, folder: Path, *, load: float, limit: float, say: Any = None) -> Outcome:
    """Wait for a child. Kill its process group after `load` seconds without a first step, or `limit` seconds after
    it."""
    began, told = time.monotonic(), 0.0
    out, late = Outcome(folder=folder), False
    mark = folder / "first-step"
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        spent = time.monotonic() - began
        if found:
            break
        stepped = time.time() - mark.stat().st_mtime if mark.exists() else None
        if (stepped is None and spent > load) or (stepped is not None and stepped > limit):
            late = True
            kill(pid)
            _, status = os.waitpid(pid, 0)
            break
        if say and stepped is None and spent - told > 20:
            told = spent
            say(f"  still before its first optimiser step after {spent:.0f} s (at most {load:.0f} s: --load-seconds)")
        time.sleep(0.02)
    kill(pid)  # what it has started
    out.late, out.seconds = late, time.monotonic() - began
    out.code = os.waitstatus_to_exitcode(status)
    out.signal = -out.code if out.code < 0 else 0
    out.output = (folder / "output.txt").read_text(errors="replace") if (folder / "output.txt").exists() else ""
    record = folder / "record.json"
    out.record = json.loads(record.read_text()) if record.exists() else {}
    return out


def kill(pid: int) -> None:
    """Kill a child's process group, including workers that ignore SIGTERM."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _child(target: Target, plan: Any, folder: Path, below: Path | None) -> int:
    import random

    import numpy as np
    import torch
    from trainworthy.core.guard import events, judging
    from trainworthy.core.guard.control import Control
    from trainworthy.core.guard.observer import Observer
    from trainworthy.core.guard.sandbox import TRACKERS, Sandbox, hold_uploads

    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    (folder / "t").mkdir(exist_ok=True)  # a short name: sockets of worker processes are opened in it
    tempfile.tempdir = str(folder / "t")
    os.environ.update(
        TRACKERS, TMPDIR=str(folder / "t"), MLFLOW_TRACKING_URI=f"file:{scratch}/mlruns", TQDM_DISABLE="1"
    )
    if below is not None and below.is_dir():
        import shutil

        shutil.copytree(below, scratch, dirs_exist_ok=True, symlinks=True)
    sys.dont_write_bytecode = True
    done = False
    main = os.getpid()

    def finish(why: str, **more: Any) -> None:
        """Check, write, exit: nothing of the script runs after this."""
        nonlocal done
        if done or os.getpid() != main:
            return
        done = True
        events.remove()
        try:
            found = judging.judge(seen, plan, folder)
        except Exception:
            found = {"error": traceback.format_exc()}
        held = {"written": sorted(set(sandbox.written))[:200], "escaped": sandbox.escaped}
        facts = {
            "why": why,
            "plan": asdict(plan),
            "steps": seen.steps,
            "backwards": seen.backwards,
            "evaluations": len(control.evaluations(seen)),
            "passes": len(seen.passes),
            "losses": seen.losses[:2000],
            "notes": seen.notes,
            **held,
            **found,
            **more,
        }
        spare = folder / "record.spare"
        with sandbox_open(spare, "w") as file:
            json.dump(facts, file, default=str)
        real_replace(spare, folder / "record.json")

    def stop(why: str) -> None:
        finish(why)
        sys.stdout.flush()
        os._exit(0)

    sandbox_open, real_replace = open, os.replace
    sandbox = Sandbox(scratch)
    control = Control(plan, stop)
    seen = Observer(control)
    mark = folder / "first-step"
    first = control.backward

    def backward(observer: Any) -> None:
        if not mark.exists():
            sandbox.off = True
            mark.touch()
            _keep_preparation(scratch, folder / "prepared")
            sandbox.off = False
        first(observer)

    control.backward = backward
    if plan.seed is not None:
        torch.manual_seed(plan.seed), np.random.seed(plan.seed), random.seed(plan.seed)
    events.install(seen)
    torch.compile = _uncompiled(seen)
    sandbox.install()
    hold_uploads()
    try:
        run(target, seen, control)
        finish("the script ended")
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 0 if leave.code is None else 1
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
        finish("the script ended", exit=code)
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/core/guard/" not in f.filename]
        traceback.print_exc()
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        finish("it raised", raised=f"{type(error).__name__}: {error}"[:2000], where=where)
        code = 1
    return code


def _keep_preparation(scratch: Path, prepared: Path) -> None:
    """Keep files written before the first step (downloads, prepared data) for the next rehearsals."""
    import shutil

    if sum(f.stat().st_size for f in scratch.rglob("*") if f.is_file()) < 2 * 10**9:
        shutil.copytree(scratch, prepared, dirs_exist_ok=True, symlinks=True)


def _uncompiled(seen: Any) -> Any:
    """Make torch.compile return the model unchanged, since compiling takes longer than a rehearsal."""

    def compile(model: Any = None, **kwargs: Any) -> Any:
        seen.notes.append("torch.compile is left out in rehearsals")
        return (lambda m: m) if model is None else model

    return compile


def run(target: Target, seen: Any, control: Any) -> None:
    """Run the script as `python train.py ARGS` or `python -m pkg.train ARGS` would, with its batch functions
    wrapped."""
    builtins.__trainworthy_batches__ = lambda function: batches(function, seen, control)
    code = marked(target.path.read_bytes(), str(target.path), target.batches)
    own, get_code = str(target.path.parent), SourceFileLoader.get_code

    def imported(self: SourceFileLoader, name: str) -> Any:
        """Modules beside the script may hold its batch function; compiled files would not be marked."""
        path = self.get_filename(name)
        if path.startswith(own) and "site-packages" not in path:
            return marked(self.get_data(path), path, target.batches)
        return get_code(self, name)

    if target.batches:
        SourceFileLoader.get_code = imported
    main = types.ModuleType("__main__")
    main.__file__ = str(target.path)
    main.__builtins__ = __builtins__
    sys.argv = [str(target.path), *target.argv]
    if target.module:
        sys.path.insert(0, os.getcwd())
        main.__spec__ = find_spec(target.module)
        main.__package__ = target.module.rpartition(".")[0]
    else:
        sys.path[0:0] = [str(target.path.parent)]
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def marked(source: bytes, path: str, names: tuple[str, ...]) -> types.CodeType:
    """Return the code of a file with its batch functions decorated."""
    tree = ast.parse(source, path)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            mark = ast.copy_location(ast.Name("__trainworthy_batches__", ast.Load()), node)
            node.decorator_list.append(mark)
    return compile(ast.fix_missing_locations(tree), path, "exec")


def batches(function: Any, seen: Any, control: Any) -> Any:
    """`function`, its results as batches of this rehearsal."""
    import functools

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seen.batch_calls += 1
        return control.intervene(hash((function.__name__, str(args)[:200])), function(*args, **kwargs))

    return wrapped
