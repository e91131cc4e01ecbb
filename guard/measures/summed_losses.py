"""Finds a loss that begins at 0, and that a loop over its parts replaces where it should add."""

import ast

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import Source, tail
from trainworthy.guard.measures.splits import loaded, stored


def replaced(source: Source) -> Fault | None:
    """Find `loss = 0`, then a loop that sets `loss = ...` without reading it, then `loss.backward()`."""
    for file, node in source.nodes:
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for i, start in enumerate(block if isinstance(block, list) else ()):
                name = zero(start)
                later = block[i + 1 :]  # type: ignore[index]
                loop = next((n for n in later if isinstance(n, ast.For)), None)
                if not name or loop is None or not differentiated(later[later.index(loop) + 1 :], name):
                    continue
                between = later[: later.index(loop)]
                lines = [n for n in loop.body if name in stored(n)]
                if (
                    len(lines) == 1
                    and not any(name in loaded(n) for n in (*between, loop))
                    and not carried(loop, name)
                    and isinstance(lines[0], ast.Assign)
                ):
                    return (
                        f"line {start.lineno} of {file} sets `{name}` to 0, and line {lines[0].lineno} replaces it in each turn of its loop: "
                        f"{name}.backward() gets the last one alone",
                        f"`{name} += ...` is meant",
                    )
    return None


def zero(node: ast.AST) -> str:
    """Return the name that a statement sets to 0."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
        return ""
    value = node.value
    return (
        node.targets[0].id
        if isinstance(value, ast.Constant) and type(value.value) in (int, float) and not value.value
        else ""
    )


def differentiated(after: list[ast.stmt], name: str) -> bool:
    """Return whether `name.backward()` is called in these statements."""
    calls = [n for s in after for n in ast.walk(s) if isinstance(n, ast.Call) and tail(n.func) == "backward"]
    return any(isinstance(n.func, ast.Attribute) and getattr(n.func.value, "id", "") == name for n in calls)


def carried(loop: ast.For, name: str) -> bool:
    """Return whether a turn of a loop hands another value on to the next one (a refinement whose last loss counts), may end the loop, or sets the
    loss under a condition."""
    made = {k for n in ast.walk(loop) for k in stored(n)} - {name} - set(stored(loop))
    first: set[str] = set()
    for statement in loop.body:
        first |= loaded(statement) & (made - {k for s in loop.body[: loop.body.index(statement)] for k in stored(s)})
    return bool(first) or any(isinstance(n, (ast.Break, ast.Continue, ast.If)) for n in ast.walk(loop))
