"""Finds a scheduler that waits for a score to move in the one direction, while the script keeps the best of it in the other."""

import ast

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.best_start import replaced
from trainworthy.guard.measures.source import Source, tail

DEFAULT = "min"


def plateau(source: Source) -> Fault | None:
    """Find `ReduceLROnPlateau(optimizer, "min")` that is stepped with `score`, where the script keeps `best = score` if it is higher."""
    made = [n for _, n in source.nodes if isinstance(n, ast.Call) and tail(n.func) == "ReduceLROnPlateau"]
    modes = {mode_of(n) for n in made}
    if len(modes) != 1 or (mode := modes.pop()) not in ("min", "max"):
        return None
    kept: dict[str, tuple[str, int, set[bool]]] = {}
    for file, node in source.nodes:
        if isinstance(node, ast.If) and (found := replaced(node)):
            _, new, falls = found
            kept.setdefault(new, (file, node.lineno, set()))[2].add(falls)
    names = {tail(t) for _, n in source.nodes if isinstance(n, ast.Assign) and n.value in made for t in n.targets}
    for file, node in source.nodes:
        step = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args else None
        if step is None or step.attr != "step" or tail(step.value) not in names:
            continue
        value = tail(node.args[0])  # type: ignore[attr-defined]
        where, line, ways = kept.get(value, ("", 0, set()))
        if ways == {mode == "max"}:
            return (
                f"line {node.lineno} of {file} gives `{value}` to a ReduceLROnPlateau that waits for a {mode}imum, and line {line} of {where} "  # type: ignore[attr-defined]
                f"keeps the {'highest' if mode == 'min' else 'lowest'} `{value}` as the best",
                f"mode='{'max' if mode == 'min' else 'min'}' is meant: the rate is cut while `{value}` improves",
            )
    return None


def mode_of(call: ast.Call) -> str:
    """Return the mode of a ReduceLROnPlateau that is written out; empty for one that is computed."""
    given = [k.value for k in call.keywords if k.arg == "mode"] or call.args[1:2]
    if not given:
        return DEFAULT if all(k.arg for k in call.keywords) else ""
    return str(given[0].value) if isinstance(given[0], ast.Constant) else ""
