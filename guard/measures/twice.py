"""Finds a function of two inputs that makes the same call on the first of them twice and never reads the second."""

import ast

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Function, Source, inside, words
from trainworthy.guard.measures.splits import loaded, stored

IDLE = {"mask", "masks", "label", "labels", "target", "targets", "y", "length", "lengths", "epoch", "step", "index", "idx", "key", "info", "state",
        "args", "config", "device"}  # fmt: skip
"""Words of arguments that a function may get for the sake of its callers."""


def same_input(source: Source) -> Fault | None:
    """Find `a, b = net(x1), net(x1)` in a function of (x1, x2) that does nothing with x2."""
    for file, function in source.nodes:
        if not isinstance(function, FUNCTIONS) or len(names := required(function)) != 2:
            continue
        nodes = list(ast.walk(function))
        read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        changed = {name for n in nodes if isinstance(n, (ast.Assign, ast.AugAssign)) for name in stored(n)}
        lost = [n for n in names if n not in read]
        if len(lost) != 1 or lost[0].startswith("_") or set(words(lost[0])) & IDLE:
            continue
        used = next(n for n in names if n not in lost)
        calls = [
            n for n in inside(function) if isinstance(n, ast.Call) and used in (getattr(a, "id", "") for a in n.args)
        ]
        seen: dict[str, int] = {}
        for call in sorted(calls, key=lambda n: (n.lineno, n.col_offset)):
            text = ast.unparse(call)
            if used not in changed and not loaded(call) & changed and text in seen:
                return (
                    f"line {call.lineno} of {file} calls {text} as line {seen[text]} does, and {function.name}() never reads `{lost[0]}`",
                    f"{ast.unparse(call.func)}({lost[0]}) is meant: the second input has no effect",
                )
            seen[text] = call.lineno
    return None


def required(function: Function) -> list[str]:
    """Return the names of the parameters that have no default, without the object; nothing if there are others, too."""
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    more = given.defaults or given.kwonlyargs or given.vararg or given.kwarg
    return [] if more else [n for n in names if n not in ("self", "cls")]
