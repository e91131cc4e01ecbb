"""Finds masked entries that always win: filled with what the following minimum, maximum or softmax prefers."""

import ast

from trainworthy.core.base.names import words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import targets
from trainworthy.guard.source.calls import is_call, subject
from trainworthy.guard.source.nodes import tail, variable, written
from trainworthy.guard.source.reading import Source

LEAST, MOST = ("min", "amin", "argmin"), ("max", "amax", "argmax")
DISTANCES = {"dist", "dists", "distance", "distances", "cdist", "pdist"}
HUGE = 1e4  # what people write for infinity


def preferred(source: Source) -> Fault | None:
    """Find `distance.masked_fill(same, 0).min()`, `scores.masked_fill(mask, inf).max()` and `scores.masked_fill(mask, 0).softmax(-1)`."""
    for file, scope in source.scopes:
        made = {}
        for node in sorted(ast.walk(scope), key=lambda n: getattr(n, "lineno", 0)):
            for target in targets(node) if isinstance(node, ast.Assign) else ():
                made[variable(target)] = node.value
            match node:
                case ast.Call(func=ast.Attribute(attr=attr)) if attr in (*LEAST, *MOST, "softmax", "log_softmax"):
                    filled = of_masked(subject(node, "torch", "F", "functional"), made)
                case _:
                    continue
            if filled is None or filled.lineno > node.lineno:
                continue
            base, value = filled.func.value, written(filled.args[1])
            if value is not None and (why := wins(attr, base, value, made)):
                return (
                    f"line {node.lineno} of {file}: entries that line {filled.lineno} fills with {ast.unparse(filled.args[1])} {why}",
                    f"{'-' * (attr not in LEAST)}float('inf') is meant, so that masked entries are left out",
                )
    return None


def of_masked(value: ast.AST, made: dict[str, ast.expr]) -> ast.Call | None:
    """Return the call of masked_fill() that makes a value, directly or by the name that holds it."""
    value = made.get(variable(value), value)
    return value if is_call(value, "masked_fill", "masked_fill_") and len(value.args) > 1 else None


def wins(attr: str, base: ast.AST, value: float, made: dict[str, ast.expr]) -> str:
    """Return how filled entries win; empty if they do not, or if this cannot be seen."""
    if attr in LEAST and value <= -HUGE:
        return "are always the least"
    if attr in MOST and value >= HUGE:
        return "are always the largest"
    if attr in LEAST and value == 0 and is_distance(base, made):
        return "are always the least distance"
    if "softmax" in attr and abs(value) < 1e-3:
        return "keep their share of the softmax: exp(0) is 1"
    return ""


def is_distance(base: ast.AST, made: dict[str, ast.expr]) -> bool:
    """Return whether a value is named a distance, or made by a function of that name."""
    source = made.get(variable(base), base)
    return any(DISTANCES & set(words(tail(n))) for n in (base, source, getattr(source, "func", None)) if n is not None)
