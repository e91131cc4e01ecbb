"""Finds discounted returns that a script sums in the wrong order, and log-probabilities of actions that no environment got."""

import ast
from collections.abc import Iterator

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.backtracking import reverses
from trainworthy.guard.measures.source import FUNCTIONS, Source, tail, words

DISCOUNT = {"gamma", "discount"}
TURNS = {"reverse", "reversed", "flip", "flipud", "appendleft", "insert"}


def wrong_order(source: Source) -> Fault | None:
    """Find a sum of discounted rewards that runs from the first step on and is put before those of earlier steps, and one that runs from the
    last step and is never turned around."""
    for file, function in source.nodes:
        if not isinstance(function, (*FUNCTIONS, ast.Module)):
            continue
        for loop, total, call in sums(function):
            backwards, front = reverses(loop.iter), tail(call.func) == "insert"
            filled = ast.unparse(call.func.value)  # type: ignore[attr-defined]
            if not backwards and front and forward(loop.iter):
                return (
                    f"line {loop.lineno} of {file} sums `{total}` from the first step on, and line {call.lineno} puts each before those of earlier "
                    "steps",
                    "returns are summed from the last step to the first: reversed(...) is missing in the loop",
                )
            if backwards and not front and stacked(function, filled) and not turned(function, loop, filled):
                return (
                    f"line {loop.lineno} of {file} sums `{total}` from the last step to the first, line {call.lineno} appends it to `{filled}`, and "
                    "nothing turns that around",
                    f"each step gets the return of another one: {filled}.insert(0, {total}), or {filled}[::-1] after the loop",
                )
    return None


def sums(function: ast.AST) -> Iterator[tuple[ast.For, str, ast.Call]]:
    """Yield (loop, name of the sum, the call that stores it) where a loop computes total = reward + gamma * total."""
    for loop in (n for n in ast.walk(function) if isinstance(n, ast.For)):
        for node in loop.body:
            if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
                continue
            total, value = node.targets[0].id, node.value
            names = [tail(n) for n in ast.walk(value) if isinstance(n, (ast.Name, ast.Attribute))]
            if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add) or names.count(total) != 1:
                continue
            if not any(set(words(n)) & DISCOUNT for n in names):
                continue
            for call in (n.value for n in loop.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)):
                name, given = tail(call.func), [ast.unparse(a) for a in call.args]
                if (name == "insert" and given == ["0", total]) or (name == "append" and given == [total]):
                    yield loop, total, call


def forward(iterated: ast.AST) -> bool:
    """Return whether a loop surely runs from the first step on: over a range without a step, or a name that is no other loop's result."""
    if isinstance(iterated, ast.Call) and tail(iterated.func) == "range":
        return len(iterated.args) < 3
    return False


def stacked(function: ast.AST, filled: str) -> bool:
    """Return whether a function makes a tensor of a list."""
    made = ("stack", "cat", "tensor", "as_tensor", "array", "Tensor", "FloatTensor")
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and tail(n.func) in made and n.args]
    return any(ast.unparse(n.args[0]) == filled for n in calls)


def turned(function: ast.AST, loop: ast.For, filled: str) -> bool:
    """Return whether a function turns anything around besides what a loop runs over, or the loop fills other lists, too, which may be in the
    same order."""
    lists = {ast.unparse(n.func.value) for n in ast.walk(loop) if isinstance(n, ast.Call) and tail(n.func) == "append"}  # type: ignore[attr-defined]
    own = {id(n) for n in ast.walk(loop.iter)}
    others = [n for n in ast.walk(function) if id(n) not in own]
    slices = any(isinstance(n, ast.Slice) and n.step is not None for n in others)
    calls = any(isinstance(n, ast.Call) and tail(n.func) in TURNS for n in others)
    return slices or calls or lists != {filled}


def redrawn(source: Source) -> Fault | None:
    """Find the log-probability of a fresh draw in a function that gives an earlier draw of that distribution to an environment."""
    for file, function in source.nodes:
        if not isinstance(function, (*FUNCTIONS, ast.Module)):
            continue
        nodes = list(ast.walk(function))
        drawn = {
            ast.unparse(n.value.func.value): n.targets[0].id
            for n in nodes
            if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and draws(n.value)
        }  # fmt: skip
        acted = {x.id for n in nodes if isinstance(n, ast.Call) and tail(n.func) == "step" for a in n.args for x in ast.walk(a)
                 if isinstance(x, ast.Name)}  # fmt: skip
        for n in nodes:
            if not isinstance(n, ast.Call) or tail(n.func) != "log_prob" or len(n.args) != 1 or not draws(n.args[0]):
                continue
            home = ast.unparse(n.func.value)  # type: ignore[attr-defined]
            if ast.unparse(n.args[0].func.value) == home and drawn.get(home) in acted:  # type: ignore[attr-defined]
                return (
                    f"line {n.lineno} of {file} takes the log-probability of another draw than `{drawn[home]}`, which the environment got",
                    f"{home}.log_prob({drawn[home]}) is meant",
                )
    return None


def draws(node: ast.AST) -> bool:
    """Return whether an expression is `distribution.sample()`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "sample"
        and not node.args
    )
