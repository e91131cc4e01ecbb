"""Finds minibatches whose tensors are taken by shuffled indices, and one of them by the slice of those indices: its rows belong to others."""

import ast
from collections.abc import Iterator

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Source, tail

DRAWN = ("randperm", "permutation")


def apart(source: Source) -> Fault | None:
    """Find `rows = order[a:b]` of a shuffled order, then `x[rows]` and `y[a:b]`."""
    for file, scope in source.nodes:
        if not isinstance(scope, (*FUNCTIONS, ast.Module)):
            continue
        nodes = list(ast.walk(scope))
        orders = set(shuffled(nodes))
        for loop in (n for n in nodes if isinstance(n, (ast.For, ast.While))) if orders else ():
            for name, cut in batches(loop, orders):
                rows, slices = [], []
                for n in ast.walk(loop):
                    if not isinstance(n, ast.Subscript) or not isinstance(n.ctx, ast.Load) or not tail(n.value):
                        continue
                    if tail(first(n.slice)) == name:
                        rows.append(tail(n.value))
                    elif ast.unparse(n.slice) == cut and tail(n.value) not in orders:
                        slices.append(n)
                for n in slices:
                    base = tail(n.value)
                    if rows and base not in rows and not ordered(nodes, base, cut, {*orders, name}):
                        return (
                            f"line {n.lineno} of {file} takes the rows `{cut}` of `{base}`, and of `{rows[0]}` the rows `{name}`, which are shuffled",
                            f"`{base}[{name}]` is meant: each row is joined with that of another sample",
                        )
    return None


def shuffled(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names of shuffled indices."""
    for n in nodes:
        if (
            isinstance(n, ast.Call)
            and tail(n.func) == "shuffle"
            and len(n.args) == 1
            and isinstance(n.args[0], ast.Name)
        ):
            yield n.args[0].id
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name):
            calls = [c for c in ast.walk(n.value) if isinstance(c, ast.Call) and tail(c.func) in DRAWN]
            # randperm(n) holds indices; permutation(x) may be the shuffled rows themselves
            if any(c.args and not isinstance(c.args[0], (ast.List, ast.Tuple)) for c in calls):
                yield n.targets[0].id


def batches(loop: ast.AST, orders: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, slice) of `rows = order[a:b]` in a loop."""
    for n in ast.walk(loop):
        if not isinstance(n, ast.Assign) or len(n.targets) != 1 or not isinstance(n.targets[0], ast.Name):
            continue
        value = n.value
        if (
            not isinstance(value, ast.Subscript)
            or not isinstance(value.slice, ast.Slice)
            or tail(value.value) not in orders
        ):
            continue
        if value.slice.lower is not None and value.slice.upper is not None:
            yield n.targets[0].id, ast.unparse(value.slice)


def first(index: ast.AST) -> ast.AST:
    """Return the first of several indices."""
    return index.elts[0] if isinstance(index, ast.Tuple) and index.elts else index


def ordered(nodes: list[ast.AST], base: str, cut: str, indices: set[str]) -> bool:
    """Return whether a tensor is in the shuffled order already: it was filled by that slice, or made by the shuffled indices."""
    for n in nodes:
        if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store) and tail(n.value) == base:
            return True
        if isinstance(n, (ast.Assign, ast.AnnAssign)) and n.value is not None:
            targets = n.targets if isinstance(n, ast.Assign) else [n.target]
            named = {tail(t) for one in targets for t in ast.walk(one)}
            if base in named and indices & {tail(x) for x in ast.walk(n.value)}:
                return True
        grown = isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("append", "extend")
        if grown and tail(n.func.value) == base:  # type: ignore[attr-defined]
            return True
    return False
