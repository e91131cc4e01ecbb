"""Names and parameters that may be exchanged on purpose: two of one kind, two that a function treats alike."""

import ast
import re

from trainworthy.core.base.names import words
from trainworthy.guard.source.assignments import assigned
from trainworthy.guard.source.nodes import Function, tail

REVERSED = (("in", "out"), ("input", "output"), ("inputs", "outputs"), ("src", "tgt"), ("source", "target"), ("height", "width"),
            ("rows", "cols"), ("real", "fake"), ("prev", "next"), ("start", "end"), ("low", "high"), ("first", "second"), ("left", "right"),
            ("from", "to"), ("encoder", "decoder"), ("up", "down"), ("image", "text"), ("query", "key"), ("old", "new"),
            ("one", "two"), ("one", "other"), ("this", "that"), ("positive", "negative"), ("pos", "neg"), ("min", "max"), ("index", "columns"),
            ("row", "col"))  # fmt: skip
"""Words whose exchange often means the way back (a decoder's sizes, a translation into the other language)."""


def alike(first: str, second: str) -> bool:
    """Return whether two names name two of one kind, whose order may be meant: `x1` and `x2`, `img_a` and `img_b`, `in_dim` and `out_dim`."""
    if min(len(first), len(second)) < 2:
        return True
    one, two = ([re.sub(r"\d+$", "", w) for w in words(n)] for n in (first, second))
    pairs = [(a, b) for a, b in zip(one, two, strict=False) if a != b]
    return len(one) == len(two) and all(
        (a, b) in REVERSED or (b, a) in REVERSED or max(len(a), len(b)) < 2 for a, b in pairs
    )


COMMUTES = (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr)
EVEN = ("abs", "square", "norm", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
PAIRED = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cosine_similarity", "minimum", "maximum", "isclose", "eq", "ne", "logical_and",
          "logical_or", "accuracy_score", "mean_squared_error", "mean_absolute_error", "dot", "cdist")  # fmt: skip


class Normal(ast.NodeTransformer):
    """Rewrites an expression so that exchanged operands of commuting operations give the same text, after the values of local names."""

    def __init__(self, values: dict[str, ast.expr]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.values.get(node.id, node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        node = ast.BinOp(self.visit(node.left), node.op, self.visit(node.right))
        even = isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value in (2, 2.0)
        if even and isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Sub):
            return ast.BinOp(ordered(node.left), node.op, node.right)
        return ordered(node) if isinstance(node.op, COMMUTES) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        node = self.generic_visit(node)  # type: ignore[assignment]
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            pair = sorted([node.left, node.comparators[0]], key=ast.dump)
            return ast.Compare(pair[0], node.ops, pair[1:])
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node = self.generic_visit(node)  # type: ignore[assignment]
        name = tail(node.func)
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None  # (a - b).abs(), a.eq(b)
        args = list(node.args)
        if name in PAIRED and len(args) >= 2:
            args[:2] = sorted(args[:2], key=ast.dump)
        elif name in PAIRED and len(args) == 1 and isinstance(node.func, ast.Attribute):
            inner, args[0] = sorted([node.func.value, args[0]], key=ast.dump)
        even = name in EVEN or (name == "pow" and args and isinstance(args[-1], ast.Constant) and args[-1].value == 2)
        if even and isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub):
            inner = ordered(inner)
        elif even and args and isinstance(args[0], ast.BinOp) and isinstance(args[0].op, ast.Sub):
            args[0] = ordered(args[0])
        func = ast.Attribute(inner, name, ast.Load()) if inner is not None else node.func
        return ast.Call(func, args, node.keywords)


def ordered(node: ast.BinOp) -> ast.BinOp:
    """Put the operands in the order of their text."""
    left, right = sorted([node.left, node.right], key=ast.dump)
    return ast.BinOp(left, node.op, right)


def symmetric(function: Function, first: str, second: str) -> bool:
    """Return whether a function of straight lines gives the same for exchanged parameters, as an accuracy or an overlap does."""
    found = []
    for one, other in ((first, second), (second, first)):
        values: dict[str, ast.expr] = {first: ast.Name(one, ast.Load()), second: ast.Name(other, ast.Load())}
        for line in function.body:
            if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
                continue
            again = ast.parse(ast.unparse(line)).body[0] if not isinstance(line, ast.Return) else line
            if pairs := assigned(again):
                if not all(isinstance(t, ast.Name) for t, _ in pairs):
                    return False
                values |= {t.id: Normal(values).visit(v) for t, v in pairs}  # type: ignore[attr-defined]
            elif isinstance(line, ast.Return) and line.value is not None:
                found.append(ast.dump(Normal(values).visit(ast.parse(ast.unparse(line.value), mode="eval").body)))
                break
            else:
                return False
    return len(found) == 2 and found[0] == found[1]
