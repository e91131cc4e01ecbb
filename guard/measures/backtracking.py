"""Finds a best path (Viterbi) whose backpointers are followed from the front, or that is returned back to front."""

import ast
from collections.abc import Iterator

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Function, Source, tail
from trainworthy.guard.measures.splits import loaded, stored

BEST = ("max", "argmax", "topk")


def wrong_order(source: Source) -> Fault | None:
    """Find a function that keeps the best predecessor of each step and walks through them in the wrong direction."""
    for file, function in source.nodes:
        if not isinstance(function, FUNCTIONS):
            continue
        for loop, path, pointers, backwards in walks(function):
            if not backwards:
                return (
                    f"line {loop.lineno} of {file} follows `{pointers}` from its first step, and `{path}` begins with the best last state",
                    f"reversed({pointers}) is meant: the path is traced from the last step to the first",
                )
            ends = [n for n in ast.walk(function) if isinstance(n, ast.Return) and path in loaded(n)]
            if ends and not any(reverses(n) for _, n in source.nodes if n is not loop.iter):
                return (
                    f"line {ends[-1].lineno} of {file} returns `{path}`, which line {loop.lineno} fills from the last step to the first",
                    f"{path}[::-1] is meant: the path is back to front",
                )
    return None


def walks(function: Function) -> Iterator[tuple[ast.For, str, str, bool]]:
    """Yield the loops that trace a path: (loop, list of the path, list of the pointers, whether from the last step)."""
    kept = pointer_lists(function)
    for loop in (n for n in ast.walk(function) if isinstance(n, ast.For)):
        backwards = reverses(loop.iter)
        pointers = next(iter(loaded(loop.iter) & kept), "")
        if not pointers or not (backwards or isinstance(loop.iter, ast.Name)):
            continue
        step = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        for call in appends(loop):
            path = tail(call.func.value)  # type: ignore[attr-defined]
            if path and traces(loop, call.args[0], path, step):
                yield loop, path, pointers, backwards


def traces(loop: ast.For, value: ast.expr, path: str, step: set[str]) -> bool:
    """Return whether what a loop appends is looked up in its step by the state before: `step[path[-1]]`, or `best = step[best]`."""
    lines = [n for n in ast.walk(loop) if isinstance(n, ast.Assign) and set(stored(n)) & loaded(value)]
    looked_up = [value, *(n.value for n in lines)]
    before = any(is_last(n, path) for v in looked_up for n in ast.walk(v)) or any(
        set(stored(n)) & loaded(n.value) for n in lines
    )
    return before and any(step & loaded(v) for v in looked_up)


def pointer_lists(function: Function) -> set[str]:
    """Return the lists that get the places of maxima, step by step, at their ends."""
    places = {
        n.id
        for line in ast.walk(function)
        if isinstance(line, ast.Assign) and is_best(line.value)
        for target in line.targets
        for n in ast.walk(target)
        if isinstance(n, ast.Name)
    }
    calls = [c for n in ast.walk(function) if isinstance(n, (ast.For, ast.While)) for c in appends(n)]
    for _ in range(2):  # a list of the states' pointers is the step's entry in the list of the steps
        places |= {tail(c.func.value) for c in calls if is_best(c.args[0]) or loaded(c.args[0]) & places}  # type: ignore[attr-defined]
    filled = {tail(c.func.value) for c in calls}  # type: ignore[attr-defined]
    turned = {
        tail(n.value) for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr in ("reverse", "insert")
    }
    return (places & filled) - turned - {""}


def appends(loop: ast.AST) -> list[ast.Call]:
    """Return the calls `name.append(value)` in a loop."""
    calls = [n for n in ast.walk(loop) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    return [c for c in calls if c.func.attr == "append" and len(c.args) == 1]  # type: ignore[attr-defined]


def is_best(value: ast.AST) -> bool:
    """Return whether an expression is a maximum over states, with or without its place: `x.max(dim=0)`, `torch.max(x, 1)[1]`."""
    while isinstance(value, (ast.Subscript, ast.Attribute)):
        value = value.value
    return isinstance(value, ast.Call) and tail(value.func) in BEST and bool(value.args or value.keywords)


def is_last(node: ast.AST, name: str) -> bool:
    """Return whether a node is `name[-1]`."""
    return isinstance(node, ast.Subscript) and tail(node.value) == name and ast.unparse(node.slice) == "-1"


def reverses(node: ast.AST) -> bool:
    """Return whether an expression is read or put in reversed order."""
    if isinstance(node, ast.Subscript):
        return "::-1" in ast.unparse(node.slice).replace(" ", "")
    if isinstance(node, ast.Attribute):
        return node.attr in ("reverse", "flip", "insert", "appendleft", "flipud")
    return isinstance(node, ast.Call) and tail(node.func) == "reversed"
