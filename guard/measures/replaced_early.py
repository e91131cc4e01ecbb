"""Finds a value that a loop carries from one turn to the next, and replaces before it is read: a next item that is the present one."""

import ast

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import Source
from trainworthy.guard.measures.splits import loaded, stored


def carried(source: Source) -> Fault | None:
    """Find `after = row[-1]`, then a loop over `i` with `after = i` before `x[k] = i` and `y[k] = after`."""
    for file, node in source.nodes:
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for at, loop in enumerate(block if isinstance(block, list) else ()):
                if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name):
                    begun = {k: s for s in block[:at] for k in stored(s) if computed(s)}  # type: ignore[index]
                    if found := early(loop, loop.target.id, begun, block[:at]):  # type: ignore[index]
                        name, line = found
                        return (
                            f"line {line} of {file} sets `{name}` to `{loop.target.id}` before `{name}` is read: both are stored as one",
                            f"`{name} = {loop.target.id}` is meant for the next turn, after the lines that store `{name}`: its first value "
                            f"(line {begun[name].lineno}) is never used",
                        )
    return None


def early(loop: ast.For, turn: str, begun: dict[str, ast.stmt], block: list[ast.stmt]) -> tuple[str, int] | None:
    """Return (name, line) of a value from before the loop that a turn replaces by its own variable before it is read."""
    for k, line in enumerate(loop.body):
        name = copied(line, turn)
        if name not in begun:
            continue
        unread = (*block[block.index(begun[name]) + 1 :], *loop.body[:k])
        if any(name in loaded(s) for s in unread) or any(name in stored(s) for s in loop.body if s is not line):
            continue
        if kept(loop.body[k + 1 :], name) and kept(loop.body, turn):
            return name, line.lineno
    return None


def computed(statement: ast.stmt) -> bool:
    """Return whether a statement assigns an entry of something: no number, no empty list."""
    return isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Subscript)


def copied(statement: ast.stmt, turn: str) -> str:
    """Return the name that a statement sets to the loop's variable."""
    plain = (
        isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
    )
    return statement.targets[0].id if plain and getattr(statement.value, "id", "") == turn else ""  # type: ignore[attr-defined]


def kept(statements: list[ast.stmt], name: str) -> bool:
    """Return whether statements store a value in a place of an array or append it."""
    for s in statements:
        if isinstance(s, ast.Assign) and getattr(s.value, "id", "") == name and isinstance(s.targets[0], ast.Subscript):
            return True
        call = s.value if isinstance(s, ast.Expr) else None
        appends = isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "append"
        if appends and [getattr(a, "id", "") for a in call.args] == [name]:  # type: ignore[union-attr]
            return True
    return False
