"""Finds two splits that are slices of one array and overlap: `train = data[:n]` and `val = data[:m]`."""

import ast
from fractions import Fraction

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import Source, assigned, inside
from trainworthy.guard.measures.splits import kind_of, scopes, split_of, stored

HELD_OUT = {"val", "test", "eval"}


def shared(source: Source) -> Fault | None:
    """Find a training split and a held-out one that are overlapping slices of the same array."""
    for file, scope in scopes(source):
        lines = sorted((n for n in inside(scope) if isinstance(n, ast.Assign)), key=lambda n: n.lineno)
        sizes: dict[str, list[ast.expr]] = {}
        for line in lines:
            for target, value in assigned(line):
                sizes.setdefault(getattr(target, "id", ""), []).append(value)
        made: list[tuple[str, ast.Subscript, int]] = []  # name, slice, line
        for line in lines:
            for target, value in assigned(line):
                name, base = getattr(target, "id", ""), getattr(value, "value", None)
                cut = (
                    isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice) and value.slice.step is None
                )
                if not cut or not split_of(name) or not isinstance(base, (ast.Name, ast.Attribute)):
                    continue
                for other, before, at in made:
                    pair = {split_of(name), split_of(other)}
                    same = ast.unparse(before.value) == ast.unparse(base) and kind_of(name) == kind_of(other)
                    again = any(at < n.lineno <= line.lineno and ast.unparse(base) in stored(n) for n in lines)
                    if (
                        same
                        and not again
                        and "train" in pair
                        and pair & HELD_OUT
                        and overlap(before.slice, value.slice, sizes)
                    ):  # type: ignore[arg-type]
                        return (
                            f"`{other}` is {ast.unparse(before)} in line {at} of {file}, and `{name}` is {ast.unparse(value)} in line {line.lineno}: "
                            "they overlap",
                            "the held-out split holds what is trained on: it must begin where the training split ends",
                        )
                made.append((name, value, line.lineno))  # type: ignore[arg-type]
    return None


def overlap(one: ast.Slice, other: ast.Slice, sizes: dict[str, list[ast.expr]]) -> bool:
    """Return whether two slices surely overlap: both begin at the start or end at the end, or the one's share ends behind the other's start."""
    if one.lower is None and other.lower is None:
        return one.upper is not None and other.upper is not None and positive(one.upper) and positive(other.upper)
    if one.upper is None and other.upper is None:
        return one.lower is not None and other.lower is not None and positive(one.lower) and positive(other.lower)
    if one.lower is not None and other.upper is not None:
        one, other = other, one
    if one.lower is not None or other.upper is not None or one.upper is None or other.lower is None:
        return False
    end, start = share(one.upper, sizes), share(other.lower, sizes)
    return end is not None and start is not None and end[1] == start[1] and start[0] < end[0]


def positive(bound: ast.expr) -> bool:
    """Return whether a bound counts from the start."""
    return not isinstance(bound, ast.UnaryOp)


def share(bound: ast.expr, sizes: dict[str, list[ast.expr]], depth: int = 3) -> tuple[Fraction, str] | None:
    """Return (share, text of the whole) of `int(0.9 * len(x))`, or (number, "") of a number; None for anything else."""
    if isinstance(bound, ast.Name) and len(sizes.get(bound.id, ())) == 1 and depth:
        found = share(sizes[bound.id][0], sizes, depth - 1)
        return found or (Fraction(1), bound.id)
    if isinstance(bound, ast.Constant) and type(bound.value) in (int, float):
        return Fraction(str(bound.value)), ""
    if isinstance(bound, ast.Call) and getattr(bound.func, "id", "") in ("int", "round") and len(bound.args) == 1:
        return share(bound.args[0], sizes, depth)
    if isinstance(bound, ast.Call) and getattr(bound.func, "id", "") == "len":
        return Fraction(1), ast.unparse(bound)
    if isinstance(bound, ast.BinOp) and isinstance(bound.op, (ast.Mult, ast.Div, ast.FloorDiv)):
        left, right = share(bound.left, sizes, depth), share(bound.right, sizes, depth)
        if left and right and not (left[1] and right[1]):
            if isinstance(bound.op, ast.Mult):
                return left[0] * right[0], left[1] or right[1]
            return (left[0] / right[0], left[1]) if right[0] and not right[1] else None
    return None
