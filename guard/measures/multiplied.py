"""Finds similarities that a temperature below 1 multiplies, where it should divide: the softmax over them is all but even."""

import ast

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Source, tail, words

PRODUCTS = ("matmul", "mm", "bmm", "einsum", "cosine_similarity")
NAMES = {"temperature", "temp", "tau"}


def temperature(source: Source) -> Fault | None:
    """Find `torch.matmul(a, b.T) * temperature`, where the script sets the temperature to numbers between 0 and 1 alone."""
    numbers: dict[str, list[float]] = {}
    learnt = set()
    for _, node in source.nodes:
        for name, value in settings(node):
            if isinstance(value, ast.Constant) and type(value.value) in (int, float):
                numbers.setdefault(name, []).append(float(value.value))
            elif any(
                isinstance(n, ast.Call) and tail(n.func) in ("Parameter", "ones", "tensor", "exp")
                for n in ast.walk(value)
            ):
                learnt.add(name)
    for file, scope in source.nodes:
        if not isinstance(scope, (*FUNCTIONS, ast.Module)):
            continue
        local = {
            n.targets[0].id: n.value
            for n in ast.walk(scope)
            if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
        }
        for node in ast.walk(scope):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
                continue
            for scores, scale in ((node.left, node.right), (node.right, node.left)):
                name = tail(scale)
                given = numbers.get(name, [])
                if (
                    NAMES & set(words(name))
                    and given
                    and name not in learnt
                    and all(0 < x < 1 for x in given)
                    and product(scores, local)
                ):
                    return (
                        f"line {node.lineno} of {file} multiplies similarities by `{ast.unparse(scale)}`, which is {given[0]:g}",
                        f"similarities are divided by a temperature: `/ {ast.unparse(scale)}` makes the softmax over them sharp",
                    )
    return None


def settings(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """Return (name, value) that a node sets: an assignment, a default, a keyword, an option of argparse."""
    if isinstance(node, ast.Assign):
        return [(tail(t), node.value) for t in node.targets if tail(t)]
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [(tail(node.target), node.value)]
    if isinstance(node, FUNCTIONS):
        named = [*node.args.posonlyargs, *node.args.args][-len(node.args.defaults) or len(node.args.args) :]
        pairs = zip([*named, *node.args.kwonlyargs], [*node.args.defaults, *node.args.kw_defaults], strict=False)
        return [(a.arg, v) for a, v in pairs if v is not None]
    if isinstance(node, ast.Call):
        found = [(k.arg, k.value) for k in node.keywords if k.arg]
        if tail(node.func) == "add_argument" and node.args and isinstance(node.args[0], ast.Constant):
            option = str(node.args[0].value).lstrip("-").replace("-", "_")
            found += [(option, v) for k, v in found if k == "default"]
        return found
    return []


def product(value: ast.AST, local: dict[str, ast.expr]) -> bool:
    """Return whether an expression is a product of all pairs of rows."""
    value = local.get(value.id, value) if isinstance(value, ast.Name) else value
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.MatMult)
    return isinstance(value, ast.Call) and tail(value.func) in PRODUCTS
