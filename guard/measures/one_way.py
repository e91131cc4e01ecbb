"""Finds a script that maps its samples from -1..1 back to 0..1, and has a function for the way there that nothing calls."""

import ast
from collections.abc import Iterable

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Source, tail

LIBRARY = ("Normalize", "normalize", "ToTensor", "preprocess", "VaeImageProcessor")
"""Functions that may map the pictures to -1..1 where this cannot see it."""


def back_alone(source: Source) -> Fault | None:
    """Find a function `x * 2 - 1` that nothing names, where one of `(x + 1) / 2` is called and nothing else maps to -1..1."""
    there = [(file, n) for file, n in source.dropped if isinstance(n, FUNCTIONS) and any(map(spreads, returned(n)))]
    if not there or any(spreads(n) or tail(n) in LIBRARY for _, n in source.nodes):
        return None
    called = {tail(n.func) for _, n in source.nodes if isinstance(n, ast.Call)}
    for file, node in source.nodes:
        if isinstance(node, FUNCTIONS) and node.name in called and any(map(gathers, returned(node))):
            where, idle = there[0]
            return (
                f"{node.name}() in line {node.lineno} of {file} maps -1..1 to 0..1 and is called, and nothing calls {idle.name}() in line "  # type: ignore[attr-defined]
                f"{idle.lineno} of {where}, which maps 0..1 to -1..1",
                f"the model trains on values from 0 to 1, and what it makes is taken to lie between -1 and 1: `{idle.name}()` is missing",  # type: ignore[attr-defined]
            )
    return None


def returned(function: ast.AST) -> Iterable[ast.AST]:
    """Return the values that a function returns."""
    return [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]


def spreads(node: ast.AST) -> bool:
    """Return whether an expression is `x * 2 - 1`, `(x - 0.5) * 2` or `(x - 0.5) / 0.5`."""
    if not isinstance(node, ast.BinOp):
        return False
    if isinstance(node.op, ast.Sub) and number(node.right) == 1:
        return isinstance(node.left, ast.BinOp) and scaled(node.left) == 2
    inner = next((v for v in (node.left, node.right) if isinstance(v, ast.BinOp)), None)
    return scaled(node) == 2 and inner is not None and isinstance(inner.op, ast.Sub) and number(inner.right) == 0.5


def gathers(node: ast.AST) -> bool:
    """Return whether an expression is `(x + 1) / 2`, `(x + 1) * 0.5` or `x * 0.5 + 0.5`."""
    if not isinstance(node, ast.BinOp):
        return False
    inner = next((v for v in (node.left, node.right) if isinstance(v, ast.BinOp)), None)
    if inner is None:
        return False
    if isinstance(node.op, ast.Add) and 0.5 in (number(node.left), number(node.right)):
        return scaled(inner) == 0.5
    return scaled(node) == 0.5 and isinstance(inner.op, ast.Add) and 1 in (number(inner.left), number(inner.right))


def scaled(node: ast.BinOp) -> float:
    """Return the number by which an expression multiplies another; 0 if it does not."""
    if isinstance(node.op, ast.Mult):
        return number(node.left) or number(node.right)
    return 1 / number(node.right) if isinstance(node.op, ast.Div) and number(node.right) else 0.0


def number(node: ast.AST) -> float:
    """Return the value of a number; 0 for anything else."""
    return float(node.value) if isinstance(node, ast.Constant) and type(node.value) in (int, float) else 0.0
