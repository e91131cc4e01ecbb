"""Assignments: what they assign to, the values, and the variables that are read."""

import ast
from collections.abc import Iterable, Iterator


def variables(node: ast.AST) -> set[str]:
    """Return the variables that occur in a node, read or assigned."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def loaded(node: ast.AST) -> set[str]:
    """Return the variables that a node reads."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def stored(node: ast.AST) -> dict[str, int]:
    """Return the variables that a statement assigns, with their lines."""
    names = [n for t in targets(node) for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return {n.id: n.lineno for n in names}


def targets(node: ast.AST) -> list[ast.expr]:
    """Return what a node assigns to: `a` and `b` of `a = b = 0`, the variable of a loop."""
    found = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [t for t in found if t is not None]


def assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return (target, value) of a statement with one target; `x, y = a(), b()` has two."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(names) == len(values):
            return list(zip(names, values, strict=True))
        case ast.Assign(targets=[target], value=value):
            return [(target, value)]
    return []


def paired(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return (target, value) for each of the targets that have a value of their own, as far as both go."""
    match target, value:
        case ast.Tuple(elts=names), ast.Tuple(elts=values):
            return list(zip(names, values, strict=False))
    return [(target, value)]


def named(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int, ast.expr]]:
    """Yield (name, line, value) of the assignments among nodes whose first target is a variable."""
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name), *_], value=value):
                yield name, node.lineno, value
