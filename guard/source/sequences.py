"""Finds steps that are summed, traced or drawn in another order than they are used: returns, best paths, log-probabilities of actions."""

import ast
from collections.abc import Iterator
from typing import Any

from trainworthy.core.base.names import words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import loaded, named, stored, variables
from trainworthy.guard.source.calls import calls, is_call, methods, owner
from trainworthy.guard.source.nodes import LOOPS, only, tail
from trainworthy.guard.source.reading import Source

DISCOUNT = {"gamma", "discount"}
TURNS = ("reverse", "reversed", "flip", "flipud", "appendleft", "insert")
STACKS = ("stack", "cat", "tensor", "as_tensor", "array", "Tensor", "FloatTensor")
BEST = ("max", "argmax", "topk")


def reverses(node: ast.AST) -> bool:
    """Return whether an expression is read or put in reversed order."""
    match node:
        case ast.Subscript(slice=index):
            return "::-1" in ast.unparse(index).replace(" ", "")
        case ast.Attribute(attr=name):
            return name in ("reverse", "flip", "insert", "appendleft", "flipud")
    return is_call(node, "reversed")


def returns_in_wrong_order(source: Source) -> Fault | None:
    """Find a sum of discounted rewards that runs from the first step on and is put before those of earlier steps, and one that runs from the
    last step and is never turned around."""
    for file, scope in source.scopes:
        for loop, total, call in sums(scope):
            backwards, front = reverses(loop.iter), call.func.attr == "insert"
            filled = ast.unparse(call.func.value)
            if not backwards and front and is_call(loop.iter, "range") and len(loop.iter.args) < 3:
                return (
                    f"line {loop.lineno} of {file} sums `{total}` from the first step on, and line {call.lineno} puts each before those of earlier "
                    "steps",
                    "returns are summed from the last step to the first: reversed(...) is missing in the loop",
                )
            stacked = any(c.args and ast.unparse(c.args[0]) == filled for c in calls(ast.walk(scope), *STACKS))
            if backwards and not front and stacked and not turned(scope, loop, filled):
                return (
                    f"line {loop.lineno} of {file} sums `{total}` from the last step to the first, line {call.lineno} appends it to `{filled}`, and "
                    "nothing turns that around",
                    f"each step gets the return of another one: {filled}.insert(0, {total}), or {filled}[::-1] after the loop",
                )
    return None


def sums(scope: ast.AST) -> Iterator[tuple[ast.For, str, Any]]:
    """Yield (loop, name of the sum, the call that stores it) where a loop computes total = reward + gamma * total."""
    for loop in only(ast.walk(scope), ast.For):
        for node in loop.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=total)], value=ast.BinOp(op=ast.Add()) as value):
                    names = [tail(n) for n in ast.walk(value)]
                    if names.count(total) == 1 and any(set(words(n)) & DISCOUNT for n in names):
                        for call in methods((n.value for n in only(loop.body, ast.Expr)), "insert", "append"):
                            kind = [call.func.attr, *map(ast.unparse, call.args)]
                            if kind in (["insert", "0", total], ["append", total]):
                                yield loop, total, call


def turned(scope: ast.AST, loop: ast.For, filled: str) -> bool:
    """Return whether a function turns anything around besides what a loop runs over, or the loop fills other lists, too, which may be in the
    same order."""
    lists = {ast.unparse(c.func.value) for c in methods(ast.walk(loop), "append")}
    own = {id(n) for n in ast.walk(loop.iter)}
    others = [n for n in ast.walk(scope) if id(n) not in own]
    slices = any(isinstance(n, ast.Slice) and n.step is not None for n in others)
    return slices or any(calls(others, *TURNS)) or lists != {filled}


def path_in_wrong_order(source: Source) -> Fault | None:
    """Find a function that keeps the best predecessor of each step (Viterbi) and follows them from the front, or returns them back to front."""
    for file, function in source.functions:
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


def walks(function: ast.AST) -> Iterator[tuple[ast.For, str, str, bool]]:
    """Yield the loops that trace a path: (loop, list of the path, list of the pointers, whether from the last step)."""
    kept = pointer_lists(function)
    for loop in only(ast.walk(function), ast.For) if kept else ():
        backwards = reverses(loop.iter)
        pointers = next(iter(loaded(loop.iter) & kept), "")
        if pointers and (backwards or isinstance(loop.iter, ast.Name)):
            for call in appends(loop):
                if (path := owner(call)) and traces(loop, call.args[0], path):
                    yield loop, path, pointers, backwards


def traces(loop: ast.For, value: ast.expr, path: str) -> bool:
    """Return whether what a loop appends is looked up in its step by the state before: `step[path[-1]]`, or `best = step[best]`."""
    lines = [n for n in ast.walk(loop) if isinstance(n, ast.Assign) and stored(n).keys() & loaded(value)]
    looked_up = [value, *(n.value for n in lines)]
    last = any(is_last(n, path) for v in looked_up for n in ast.walk(v))
    before = last or any(stored(n).keys() & loaded(n.value) for n in lines)
    return before and any(variables(loop.target) & loaded(v) for v in looked_up)


def pointer_lists(function: ast.AST) -> set[str]:
    """Return the lists that get the places of maxima, step by step, at their ends."""
    nodes = list(ast.walk(function))
    best = [n for n in nodes if isinstance(n, ast.Assign) and is_best(n.value)]
    places = {name for line in best for target in line.targets for name in variables(target)}
    filled = [c for n in nodes if isinstance(n, LOOPS) for c in appends(n)]
    for _ in range(2):  # a list of the states' pointers is the step's entry in the list of the steps
        places |= {owner(c) for c in filled if is_best(c.args[0]) or loaded(c.args[0]) & places}
    turned = {tail(n.value) for n in nodes if isinstance(n, ast.Attribute) and n.attr in ("reverse", "insert")}
    return (places & set(map(owner, filled))) - turned - {""}


def appends(loop: ast.AST) -> list[ast.Call]:
    """Return the calls `name.append(value)` in a loop."""
    return [c for c in methods(ast.walk(loop), "append") if len(c.args) == 1]


def is_best(value: ast.AST) -> bool:
    """Return whether an expression is a maximum over states, with or without its place: `x.max(dim=0)`, `torch.max(x, 1)[1]`."""
    while isinstance(value, (ast.Subscript, ast.Attribute)):
        value = value.value
    return is_call(value, *BEST) and bool(value.args or value.keywords)


def is_last(node: ast.AST, name: str) -> bool:
    """Return whether a node is `name[-1]`."""
    return isinstance(node, ast.Subscript) and tail(node.value) == name and ast.unparse(node.slice) == "-1"


def redrawn(source: Source) -> Fault | None:
    """Find the log-probability of a fresh draw in a function that gives an earlier draw of that distribution to an environment."""
    for file, scope in source.scopes:
        nodes = list(ast.walk(scope))
        drawn = {home: name for name, _, value in named(nodes) if (home := drawn_from(value))}  # distribution -> draw
        acted = {name for c in calls(nodes, "step") for a in c.args for name in variables(a)} if drawn else set()
        for node in nodes if acted else ():
            match node:
                case ast.Call(func=ast.Attribute(value=base, attr="log_prob"), args=[value]):
                    home = ast.unparse(base)
                    if drawn_from(value) == home and drawn.get(home) in acted:
                        return (
                            f"line {node.lineno} of {file} takes the log-probability of another draw than `{drawn[home]}`, which the environment got",
                            f"{home}.log_prob({drawn[home]}) is meant",
                        )
    return None


def drawn_from(node: ast.AST) -> str:
    """Return the text of the distribution of `distribution.sample()`; empty for anything else."""
    match node:
        case ast.Call(func=ast.Attribute(value=home, attr="sample"), args=[]):
            return ast.unparse(home)
    return ""
