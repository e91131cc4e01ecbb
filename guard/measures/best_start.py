"""Finds a best value that begins where nothing is ever better: no checkpoint is written, and early stopping counts from the start."""

import ast
import math

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.best_weights import LOWER
from trainworthy.guard.measures.source import Source, tail

HUGE = 1e6  # what people write for infinity


def unbeatable(source: Source) -> Fault | None:
    """Find `best = 0`, then `if loss < best: best = loss`, or a best of minus infinity that is to fall, one of infinity that is to rise."""
    starts: dict[str, list[tuple[str, int, float | None]]] = {}
    for file, node in source.nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                for one, value in (
                    zip(target.elts, node.value.elts, strict=False) if several else [(target, node.value)]
                ):
                    starts.setdefault(tail(one), []).append((file, node.lineno, number(value)))
    for file, node in source.nodes:
        if not isinstance(node, ast.If) or not (found := replaced(node)):
            continue
        best, new, falls = found
        begun = [s for s in starts.get(best, []) if s[2] is not None]
        if len(begun) != 1:  # set again for each fold or run: read as one value only
            continue
        where, line, value = begun[0]
        worst = value <= -HUGE if falls else value >= HUGE
        if worst or (falls and value == 0 and (LOWER.search(best) or LOWER.search(new))):
            return (
                f"`{best}` begins at {value:g} (line {line} of {where}), and line {node.lineno} of {file} sets it where `{new}` is "
                f"{'below' if falls else 'above'} it: that never happens",
                f"`{best} = {'' if falls else '-'}float('inf')` is meant, or {'>' if falls else '<'} in place of {'<' if falls else '>'}",
            )
    return None


def replaced(node: ast.If) -> tuple[str, str, bool] | None:
    """Return (best, new, whether lower is better) of `if new < best: best = new`."""
    test = node.test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], (ast.Lt, ast.Gt)):
        return None
    below = isinstance(test.ops[0], ast.Lt)
    sides = tail(test.left), tail(test.comparators[0])
    for new, best, falls in ((*sides, below), (*sides[::-1], not below)):
        sets = [n for n in node.body if isinstance(n, ast.Assign) and any(tail(t) == best for t in n.targets)]
        if new and best and len(sets) == 1 and new in {tail(n) for n in ast.walk(sets[0].value)}:
            return best, new, falls
    return None


def number(node: ast.expr) -> float | None:
    """Return the number that a line begins with: 0, -1e9, float("inf"), -math.inf, np.inf."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.Attribute) and node.attr.lower() in ("inf", "infinity"):
        return math.inf
    if (
        isinstance(node, ast.Call)
        and tail(node.func) == "float"
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Constant)
    ):
        try:
            return float(node.args[0].value)
        except (TypeError, ValueError):
            return None
    return None
