"""Runs a script's file as Python would, in this process; functions that return batches may be wrapped on the way."""

import ast
import builtins
import os
import sys
import types
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from typing import Any

from trainworthy.guard.hooks.streams import generates, iterations, looped, stream
from trainworthy.guard.rehearsals.target import Target


def run(target: Target, seen: Any, control: Any) -> None:
    """The script as `python train.py ARGS` or `python -m pkg.train ARGS` would run it, its batch functions wrapped."""
    in_for: set[str] = set()
    builtins.__trainworthy_batches__ = lambda function: batches(function, seen, control)
    builtins.__trainworthy_stream__ = lambda function: stream(function, seen, in_for)
    code = marked(target.path.read_bytes(), str(target.path), target.batches, in_for)
    own, get_code = (f"{target.path.parent}/", f"{os.getcwd()}/"), SourceFileLoader.get_code

    def imported(self: SourceFileLoader, name: str) -> Any:
        """Modules beside the script, and below the working directory, may hold its batch function; compiled files would not be marked."""
        path = self.get_filename(name)
        if path.startswith(own) and "site-packages" not in path and not name.startswith("trainworthy"):
            return marked(self.get_data(path), path, target.batches, in_for)
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


def marked(source: bytes, path: str, names: tuple[str, ...], in_for: set[str]) -> types.CodeType:
    """The code of a file, its batch functions and generators decorated. `in_for`: gets the functions that `for` iterates over."""
    tree = ast.parse(source, path)
    in_for |= looped(tree)
    own = iterations(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (node in own or generates(node) or node.name in names):
            mark = "__trainworthy_stream__" if node in own or generates(node) else "__trainworthy_batches__"
            node.decorator_list.append(ast.copy_location(ast.Name(mark, ast.Load()), node))
    return compile(ast.fix_missing_locations(tree), path, "exec")


def batches(function: Any, seen: Any, control: Any) -> Any:
    """`function`, its results as batches of this rehearsal."""
    import functools

    from trainworthy.guard.measures.records import fingerprint

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seen.batch_calls += 1
        batch = function(*args, **kwargs)
        if seen.ranks > 1 and len(seen.batch_prints) < 64:
            seen.batch_prints.append(fingerprint(batch))
        batch = control.intervene(hash((function.__name__, str(args)[:200])), batch)
        seen.drawn(batch)
        return batch

    return wrapped
