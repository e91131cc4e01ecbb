"""Finds channels that a view turns into places: `conv(x).view(n, c, h * r, w * r)` puts the channels of a pixel into rows of their own."""

import ast

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Source, inside, tail

PLAIN = ("contiguous", "relu", "sigmoid", "tanh", "float", "detach", "clone")
OTHERS = ("torch", "np", "numpy", "F", "functional", "einops")


def larger(source: Source) -> Fault | None:
    """Find a view of a layer's output whose last two sizes are both multiplied by one factor."""
    for file, scope in source.nodes:
        if not isinstance(scope, FUNCTIONS):
            continue
        values: dict[str, list[ast.expr]] = {}
        nodes = sorted(inside(scope), key=lambda n: getattr(n, "lineno", 0))
        for n in nodes:
            if isinstance(n, ast.Assign) and len(n.targets) == 1:
                pairs = [(n.targets[0], n.value)]
                if isinstance(n.targets[0], ast.Tuple) and isinstance(n.value, ast.Tuple):
                    pairs = list(zip(n.targets[0].elts, n.value.elts, strict=False))
                for target, value in pairs:
                    values.setdefault(tail(target), []).append(value)
        for n in nodes:
            if (
                not isinstance(n, ast.Call)
                or tail(n.func) not in ("view", "reshape")
                or not isinstance(n.func, ast.Attribute)
            ):
                continue
            sizes = (
                list(n.args[0].elts)
                if len(n.args) == 1 and isinstance(n.args[0], (ast.Tuple, ast.List))
                else list(n.args)
            )
            base = n.func.value
            if len(sizes) != 4 or not (factor := common(sizes[2], sizes[3])) or not layer(base, values, n.lineno):
                continue
            return (
                f"line {n.lineno} of {file} views `{ast.unparse(base)[:60]}` as pictures {factor} times as high and wide",
                "view() puts the channels of a pixel one behind the other and not next to each other: nn.PixelShuffle is meant",
            )
    return None


def common(one: ast.expr, other: ast.expr) -> str:
    """Return the factor of two different products; empty if there is none."""
    sides = [
        {ast.unparse(x.left), ast.unparse(x.right)}
        if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mult)
        else set()
        for x in (one, other)
    ]
    both = sides[0] & sides[1]
    return both.pop() if len(both) == 1 and len(sides[0] | sides[1]) == 3 else ""


def layer(value: ast.expr, values: dict[str, list[ast.expr]], line: int) -> bool:
    """Return whether a value in a line is the output of a layer: `self.conv(x)`, perhaps through functions that keep its places."""
    if isinstance(value, ast.Name):
        made = [v for v in values.get(value.id, []) if v.lineno < line]
        return bool(made) and layer(made[-1], values, made[-1].lineno)
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Attribute) and value.func.attr in PLAIN:
        library = tail(value.func.value) in (*OTHERS, "self")
        inner = value.args[0] if library and value.args else value.func.value
        return layer(inner, values, line)
    return (
        isinstance(value.func, ast.Attribute) and tail(value.func.value) == "self" and "conv" in value.func.attr.lower()
    )
