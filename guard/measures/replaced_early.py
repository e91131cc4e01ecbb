"""Finds a value that a loop carries from one turn to the next, and replaces before it is read: a next item that is the present one."""

import ast

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import Source
from trainworthy.guard.measures.splits import loaded, stored


def carried(source: Source) -> Fault | None:
    """Find `after = row[-1]`, then a loop over `i` with `after = i` before `x[k] = i` or `y[k] = after` reads it."""
    for file, node in source.nodes:
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for at, loop in enumerate(block if isinstance(block, list) else ()):
                if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
                    continue
                begun = {k: s.lineno for s in block[:at] for k in stored(s) if computed(s)}  # type: ignore[index]
                for k, line in enumerate(loop.body):
                    name = copied(line, loop.target.id)
                    before, after = loop.body[:k], loop.body[k + 1 :]
                    if name not in begun or any(name in loaded(s) for s in (*before, *between(block, begun[name], at))):  # type: ignore[arg-type]
                        continue
                    if any(name in stored(s) for s in (*before, *after)):
                        continue
                    if kept(after, name) and kept(loop.body, loop.target.id):
                        return (
                            f"line {line.lineno} of {file} sets `{name}` to `{loop.target.id}` before `{name}` is read, so that both are stored as one, "
                            f"and its first value (line {begun[name]}) is never used",
                            f"`{name} = {loop.target.id}` belongs behind the lines that store `{name}`: it is meant for the next turn",
                        )
    return None


def computed(statement: ast.stmt) -> bool:
    """Return whether a statement assigns an entry of something: no number, no empty list."""
    return isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Subscript)


def copied(statement: ast.stmt, turn: str) -> str:
    """Return the name that a statement sets to the loop's variable."""
    plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
    return statement.targets[0].id if plain and getattr(statement.value, "id", "") == turn else ""  # type: ignore[attr-defined]


def kept(statements: list[ast.stmt], name: str) -> bool:
    """Return whether statements store a value in a place of an array or append it."""
    for s in statements:
        if isinstance(s, ast.Assign) and getattr(s.value, "id", "") == name and isinstance(s.targets[0], ast.Subscript):
            return True
        call = s.value if isinstance(s, ast.Expr) else None
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "append" and getattr(call.args[0] if call.args else None, "id", "") == name:
            return True
    return False


def between(block: list[ast.stmt], line: int, at: int) -> list[ast.stmt]:
    """Return the statements between the first value and the loop."""
    return [s for s in block[:at] if s.lineno > line]
