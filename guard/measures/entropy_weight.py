"""Finds the loss of an entropy's weight (soft actor-critic) with the wrong sign: the weight grows where the entropy is too high already."""

import ast

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import Source, tail, words

CALM = ("mean", "sum", "detach", "exp", "float", "squeeze", "unsqueeze")


def turned(source: Source) -> Fault | None:
    """Find `alpha_loss = (alpha * (log_pi + target_entropy)).mean()`, which is minimised: the target entropy must lower the loss's slope."""
    for file, node in source.nodes:
        if not isinstance(node, ast.Assign) or not {"alpha", "temperature", "ent", "entropy"} & set(
            words(tail(node.targets[0]))
        ):
            continue
        if "loss" not in words(tail(node.targets[0])):
            continue
        if sign(node.value) > 0 and not mixed(node.value):
            return (
                f"line {node.lineno} of {file}: the derivative of `{tail(node.targets[0])}` by its weight grows with the target entropy: "
                f"{ast.unparse(node.value)}",
                "the sign is turned: `-(alpha * (log_pi + target_entropy).detach()).mean()` lowers the weight where the entropy is above its target",
            )
    return None


def sign(node: ast.AST) -> int:
    """Return the sign with which an expression holds the target entropy times the weight; 0: it does not, or this cannot be seen."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return sign(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in CALM:
            inner = node.func.value
            if tail(inner) == "torch" and len(node.args) >= 1:
                inner = node.args[0]
            return sign(inner)
        return 0
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = sign(node.left), sign(node.right)
        return left * outer(node.right) if left and not right else right * outer(node.left) if right and not left else 0
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        left, right = sign(node.left), sign(node.right)
        right = -right if isinstance(node.op, ast.Sub) else right
        return left or right if not (left and right) else 0
    return 1 if {"target", "entropy"} <= set(words(tail(node))) else 0


def outer(node: ast.AST) -> int:
    """Return the sign of a factor by its leading minus signs; 0 for one that is not named as the entropy's weight."""
    turns = 1
    while True:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            turns, node = -turns, node.operand
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALM:
            node = node.args[0] if tail(node.func.value) == "torch" and node.args else node.func.value
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value > 0:
            return turns
        else:
            named = set(words(tail(node))) & {"alpha", "temperature", "temp", "coef", "log"}
            return turns if named else 0


def mixed(node: ast.AST) -> bool:
    """Return whether an expression names its target entropy more than once, or a function that this cannot follow."""
    return sum({"target", "entropy"} <= set(words(tail(n))) for n in ast.walk(node)) != 1
