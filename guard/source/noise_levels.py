"""Finds a diffusion script that scales noise by a variance, or a sample and its noise by the levels themselves in place of their roots."""

import ast
import re

from trainworthy.core.base.names import words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import named
from trainworthy.guard.source.calls import is_call, unwrapped
from trainworthy.guard.source.formulas import CHAIN, NOISE
from trainworthy.guard.source.nodes import number, tail
from trainworthy.guard.source.reading import Source

LEVELS = re.compile(r"(?i)alphas?_?(cum_?prod|bars?|hats?)(_t|_prev)?")
ROOTS = ("sqrt", "std", "stddev", "sigma", "sigmas", "exp", "rsqrt")
SHAPED = ("to", "float", "view", "reshape", "unsqueeze", "clamp", "clamp_min", "gather")


def by_variance(source: Source) -> Fault | None:
    """Find `mean + var * torch.randn_like(x)` of a sampling loop: noise has the deviation, and not the variance, as its factor."""
    if not any(CHAIN.fullmatch(tail(n)) for _, n in source.of(ast.Name, ast.Attribute)):
        return None
    for file, scope in source.scopes:
        local = {name: value for name, _, value in named(ast.walk(scope))}
        for node in ast.walk(scope):
            match node:
                case ast.BinOp(left=left, op=ast.Mult(), right=right):
                    for scale, draw in ((left, right), (right, left)):
                        drawn = is_call(unwrapped(draw, "to"), *NOISE)
                        if drawn and is_variance(scale) and not rooted(local.get(tail(core(scale)))):
                            return (
                                f"line {node.lineno} of {file} multiplies noise by `{ast.unparse(scale)}`, a variance",
                                f"noise is scaled by the standard deviation, its root: {ast.unparse(scale)} ** 0.5",
                            )
    return None


def roots_missing(source: Source) -> Fault | None:
    """Find `bar * x0 + (1 - bar) * noise`, where `bar` is the cumulative product of the chain: its roots are meant."""
    for file, scope in source.scopes:
        local = {name: value for name, _, value in named(ast.walk(scope))}
        for node in ast.walk(scope):
            match node:
                case ast.BinOp(
                    left=ast.BinOp(op=ast.Mult()) as one, op=ast.Add(), right=ast.BinOp(op=ast.Mult()) as other
                ):
                    for kept, added in ((one, other), (other, one)):
                        for level in (kept.left, kept.right):
                            rest = [x for x in (added.left, added.right) if complement(x) == ast.unparse(level)]
                            if rest and is_level(level, local):
                                return (
                                    f"line {node.lineno} of {file} mixes a sample and its noise by `{ast.unparse(level)}` and 1 minus it, the levels "
                                    "of a diffusion chain",
                                    "their roots are meant, so that the variance stays what it is: bar ** 0.5 and (1 - bar) ** 0.5",
                                )
    return None


def core(value: ast.AST) -> ast.AST:
    """Return a value without indices and changes of its shape."""
    while True:
        inner = value.value if isinstance(value, ast.Subscript) else unwrapped(value, *SHAPED)
        if inner is value:
            return value
        value = inner


def is_variance(value: ast.AST) -> bool:
    """Return whether a value is named a variance, and is no root of one."""
    name = tail(core(value))
    return bool({"var", "variance", "variances"} & set(words(name))) and not {"log", *ROOTS} & set(words(name))


def rooted(value: ast.AST | None) -> bool:
    """Return whether an expression takes a root, or has one by its name."""
    for node in ast.walk(value) if value is not None else ():
        if tail(node) in ROOTS or set(ROOTS) & set(words(tail(node))):
            return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and number(node.right) == 0.5:
            return True
    return False


def complement(value: ast.AST) -> str:
    """Return `a` of `1 - a` as text; empty for anything else."""
    match value:
        case ast.BinOp(left=ast.Constant(value=1 | 1.0), op=ast.Sub(), right=right):
            return ast.unparse(right)
    return ""


def is_level(value: ast.AST, local: dict[str, ast.expr]) -> bool:
    """Return whether a value is one of the chain's cumulative products."""
    base = core(value)
    if LEVELS.fullmatch(tail(base)):
        return True
    made = local.get(tail(base))
    return made is not None and not rooted(made) and bool(LEVELS.fullmatch(tail(core(made))))
