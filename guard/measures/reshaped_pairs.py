"""Finds rows of pairs (edges, coordinates) that are reshaped to two rows where a transpose is meant."""

import ast

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import Source, tail

ROWS_OF = ("argwhere",)
SAME = ("tensor", "as_tensor", "from_numpy", "array", "asarray", "LongTensor", "to", "long", "int", "contiguous",
        "copy", "numpy", "astype")  # fmt: skip
"""Calls that keep the layout of what they are given."""


def mixed(source: Source) -> Fault | None:
    """Find `pairs.reshape(2, -1)` of an array whose rows are pairs: it pairs other entries than those of the rows."""
    made: dict[str, list[ast.expr]] = {}
    for _, node in source.nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            made.setdefault(node.targets[0].id, []).append(node.value)
    pairs = {name for name, values in made.items() if all(is_rows(v) for v in values)}
    for file, node in source.nodes:
        base = reshaped(node)
        inner = core(base) if base is not None else None
        if inner is not None and (is_rows(inner) or getattr(inner, "id", "") in pairs):
            return (
                f"line {node.lineno} of {file} reshapes `{ast.unparse(base)}` to two rows, and its rows are pairs",  # type: ignore[attr-defined, arg-type]
                "a transpose (.T) is meant: reshape() puts the first half of all entries beside the second half",
            )
    return None


def is_rows(value: ast.AST) -> bool:
    """Return whether an expression is `argwhere(...)`: a row of indices for each entry."""
    value = core(value)
    return isinstance(value, ast.Call) and tail(value.func) in ROWS_OF


def core(value: ast.AST) -> ast.AST:
    """Return what an expression is made of without changes of type and without slices of its rows."""
    while True:
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice):
            value = value.value
        elif isinstance(value, ast.Call) and tail(value.func) in SAME:
            method = isinstance(value.func, ast.Attribute) and tail(value.func.value) not in (
                "np",
                "numpy",
                "torch",
                "jnp",
            )
            if not method and not value.args:
                return value
            value = value.func.value if method else value.args[0]  # type: ignore[attr-defined]
        else:
            return value


def reshaped(node: ast.AST) -> ast.expr | None:
    """Return what `x.reshape(2, -1)`, `x.view(2, -1)` or `reshape(x, (2, -1))` is called on."""
    if (
        not isinstance(node, ast.Call)
        or tail(node.func) not in ("reshape", "view")
        or not isinstance(node.func, ast.Attribute)
    ):
        return None
    given: list[ast.expr] = list(node.args)
    base = node.func.value
    if tail(base) in ("np", "numpy", "torch") and given:
        base = given.pop(0)
    sizes = [
        ast.unparse(n)
        for n in (given[0].elts if len(given) == 1 and isinstance(given[0], (ast.Tuple, ast.List)) else given)
    ]
    return base if sizes == ["2", "-1"] else None
