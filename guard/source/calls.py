"""Calls: those of some names among nodes, what they pass, and what they are called on."""

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from trainworthy.guard.source.nodes import tail


def calls(nodes: Iterable[ast.AST], *names: str) -> Iterator[Any]:
    """Yield the calls among nodes whose last name is one of these: `cat(...)` and `torch.cat(...)` for `cat`."""
    return (n for n in nodes if isinstance(n, ast.Call) and tail(n.func) in names)


def methods(nodes: Iterable[ast.AST], *names: str) -> Iterator[Any]:
    """Yield the calls among nodes that are of something's method: `x.append(...)`."""
    return (n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in names)


def is_call(node: ast.AST | None, *names: str) -> bool:
    """Return whether a node is a call whose last name is one of these."""
    return isinstance(node, ast.Call) and tail(node.func) in names


def owner(call: ast.Call) -> str:
    """Return the last name of the object whose method is called: `b` of `a.b.f()`."""
    return tail(getattr(call.func, "value", None))


def passed(call: ast.Call) -> list[ast.expr]:
    """Return what a call passes, by place and by keyword."""
    return [*call.args, *(k.value for k in call.keywords)]


def subject(call: ast.Call, *libraries: str) -> ast.expr:
    """Return what `x.relu()` works on, or `torch.relu(x)` of these libraries."""
    base = call.func.value
    return call.args[0] if tail(base) in libraries and call.args else base


def unwrapped(value: ast.AST, *names: str) -> ast.AST:
    """Return a value without methods of these names that end it: `x` of `x.to(device).float()`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in names:
        value = value.func.value
    return value


def unrolled(sizes: list[ast.expr]) -> list[ast.expr]:
    """Return sizes that are passed one by one or as one tuple: `x.view(2, -1)`, `x.view((2, -1))`."""
    match sizes:
        case [ast.Tuple(elts=given) | ast.List(elts=given)]:
            return given
    return sizes


def trains(node: ast.AST) -> bool:
    """Return whether `backward()` is called in a node."""
    return any(methods(ast.walk(node), "backward"))
