"""How a script's source builds a scheduler and calls its `step()`."""

import ast
import sys
from pathlib import Path
from typing import Any

from trainworthy.guard.measures.records import SETTINGS
from trainworthy.guard.source.calls import calls, is_call, methods, owner
from trainworthy.guard.source.nodes import FUNCTIONS, tail


def calls_of_step(file: str, line: int) -> list[tuple[ast.Call, list[ast.AST]]]:
    """Return the calls of `step()` of what is assigned or returned in that line, in this file or in a module next to it, each with the nodes of
    its file."""
    names = names_of(syntax(file), line)
    beside = [getattr(m, "__file__", None) or "" for m in list(sys.modules.values())]
    files = {file, *(f for f in beside if f.startswith(f"{Path(file).parent}/") and "site-packages" not in f)}
    found = []
    for nodes in (syntax(one) for one in files):
        found += [(n, nodes) for n in methods(nodes, "step") if owner(n) in names]
    return found


def names_of(nodes: list[ast.AST], line: int) -> set[str]:
    """Return the names that a file gives to what is made in that line: by an assignment, or of what a function returns there."""
    here = [n for n in nodes if isinstance(n, (ast.Assign, ast.Return)) and n.lineno <= line <= (n.end_lineno or 0)]
    found = {tail(t) for n in here if isinstance(n, ast.Assign) for t in n.targets}
    for given in (n.value for n in here if isinstance(n, ast.Return)):
        parts = given.elts if isinstance(given, ast.Tuple) else [given]
        place = next(
            (i for i, p in enumerate(parts) if isinstance(p, ast.Call) and p.lineno <= line <= (p.end_lineno or 0)),
            None,
        )
        makers = {f.name for f in nodes if isinstance(f, FUNCTIONS) and f.lineno <= line <= (f.end_lineno or 0)}
        for target in (n.targets[0] for n in nodes if isinstance(n, ast.Assign) and is_call(n.value, *makers)):
            several = isinstance(given, ast.Tuple) and isinstance(target, ast.Tuple) and len(target.elts) == len(parts)
            if place is not None:
                found.add(tail(target.elts[place] if several and isinstance(target, ast.Tuple) else target))
    return found - {""}


def options_of(file: str, line: int) -> list[str]:
    """Return the conditions, each of settings and constants alone, under which a scheduler is stepped; nothing if a call of its `step()`
    has another condition or none. What settings decide does not change while the script runs."""
    found = []
    for call, nodes in calls_of_step(file, line):
        around = [n for n in nodes if isinstance(n, ast.If) and any(x is call for x in ast.walk(n))]
        if not around or not all(settled(n.test) for n in around):
            return []
        found.append(ast.unparse(around[0].test))
    return list(dict.fromkeys(found))


def settled(test: ast.AST) -> bool:
    """Whether a condition reads attributes of settings, names in capitals, and constants alone."""
    parents = {id(n.value): n for n in ast.walk(test) if isinstance(n, ast.Attribute)}
    names = [n for n in ast.walk(test) if isinstance(n, ast.Name)]
    held = [n.id.isupper() or (n.id.lower() in SETTINGS and id(n) in parents) for n in names]
    return bool(held) and all(held) and not any(isinstance(n, ast.Call) for n in ast.walk(test))


def syntax(file: str) -> list[ast.AST]:
    """Return the nodes of a file's syntax tree; none if it cannot be read."""
    try:
        return list(ast.walk(ast.parse(Path(file).read_text())))
    except (OSError, SyntaxError, ValueError):
        return []


def length_argument(one: Any) -> Any:
    """Return what the script gives a scheduler as its length, as a syntax tree. A number (200 epochs of 40 batches) was not computed
    from the length of a loader, of which it may be a multiple by chance."""
    file, line = one.place
    for call in calls(syntax(file), type(one.it).__name__):
        if call.lineno <= line <= (call.end_lineno or 0):
            named: list[ast.AST] = [k.value for k in call.keywords if k.arg in ("T_max", "total_steps")]
            named += [k for k in call.keywords if k.arg == "steps_per_epoch"]  # whatever its value, steps are meant
            place = 2 if tail(call.func) == "OneCycleLR" else 1
            return next(iter(named or call.args[place : place + 1]), None)
    return None


def counts(given: Any) -> bool:
    """Return whether a length is computed with `len()`, as that of a loader is."""
    return given is not None and any(calls(ast.walk(given), "len"))
