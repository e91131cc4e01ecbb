"""Finds a formula with the wrong sign, operation or direction: temperatures, the weight of an entropy, maps to -1..1, denoising."""

import ast
import re
from collections.abc import Iterable

from trainworthy.core.base.names import words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import loaded, named, stored
from trainworthy.guard.source.calls import calls, is_call, passed, subject, unwrapped
from trainworthy.guard.source.nodes import FUNCTIONS, number, only, tail, variable
from trainworthy.guard.source.reading import Source

PRODUCTS = ("matmul", "mm", "bmm", "einsum", "cosine_similarity")
TEMPERATURES = {"temperature", "temp", "tau"}
CALM = ("mean", "sum", "detach", "exp", "float", "squeeze", "unsqueeze")
MAPS = ("Normalize", "normalize", "ToTensor", "preprocess", "VaeImageProcessor")
"""Functions that may map the pictures to -1..1 where this cannot see it."""
NOISE = ("randn", "randn_like", "normal")
CHAIN = re.compile(r"(?i)alphas?_?(cum_?prod|bars?|hats?)|posterior_(mean|variance)\w*|sqrt_one_minus\w*")
"""Names of a chain of noise levels. A flow goes from 0 to 1 and has none."""
PROGRESS = ("tqdm", "progress_bar", "track")


def turned_sign(source: Source) -> Fault | None:
    """Find `x =+ y`, which sets x to y."""
    for file, node in source.of(ast.Assign):
        match node:
            case ast.Assign(targets=[*_, target], value=ast.UnaryOp(op=ast.UAdd()) as value):
                beside = target.end_lineno == value.lineno and value.col_offset - (target.end_col_offset or 0) == 2
                if beside and not isinstance(value.operand, ast.Constant):
                    return (
                        f"line {node.lineno} of {file} is `{ast.unparse(target)} =+ ...`: it replaces the value and adds nothing to it",
                        "`+=` is meant",
                    )
    return None


def temperature(source: Source) -> Fault | None:
    """Find `torch.matmul(a, b.T) * temperature`, where the script sets the temperature to numbers between 0 and 1 alone: the softmax over the
    similarities is all but even."""
    numbers: dict[str, list[float]] = {}
    learnt = set()
    for _, node in source.nodes:
        for name, value in settings(node):
            if (given := number(value)) is not None:
                numbers.setdefault(name, []).append(float(given))
            elif any(calls(ast.walk(value), "Parameter", "ones", "tensor", "exp")):
                learnt.add(name)
    below = {n: g for n, g in numbers.items() if TEMPERATURES & set(words(n)) and all(0 < x < 1 for x in g)}
    for file, scope in source.scopes if below.keys() - learnt else ():
        local = {name: value for name, _, value in named(ast.walk(scope))}
        for node in ast.walk(scope):
            match node:
                case ast.BinOp(left=left, op=ast.Mult(), right=right):
                    for scores, scale in ((left, right), (right, left)):
                        if (name := tail(scale)) in below and name not in learnt and product(scores, local):
                            return (
                                f"line {node.lineno} of {file} multiplies similarities by `{ast.unparse(scale)}`, which is {below[name][0]:g}",
                                f"similarities are divided by a temperature: `/ {ast.unparse(scale)}` makes the softmax over them sharp",
                            )
    return None


def settings(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """Return (name, value) that a node sets: an assignment, a default, a keyword, an option of argparse."""
    match node:
        case ast.Assign(targets=made, value=value):
            return [(tail(t), value) for t in made if tail(t)]
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            return [(tail(target), value)]
        case ast.FunctionDef(args=own) | ast.AsyncFunctionDef(args=own):
            last = [*own.posonlyargs, *own.args][-len(own.defaults) or len(own.args) :]
            pairs = zip([*last, *own.kwonlyargs], [*own.defaults, *own.kw_defaults], strict=False)
            return [(a.arg, v) for a, v in pairs if v is not None]
        case ast.Call(func=func, args=given, keywords=keys):
            found = [(k.arg, k.value) for k in keys if k.arg]
            if tail(func) == "add_argument" and given and isinstance(given[0], ast.Constant):
                option = str(given[0].value).lstrip("-").replace("-", "_")
                found += [(option, v) for k, v in found if k == "default"]
            return found
    return []


def product(value: ast.AST, local: dict[str, ast.expr]) -> bool:
    """Return whether an expression is a product of all pairs of rows."""
    value = local.get(variable(value), value)
    return is_call(value, *PRODUCTS) or (isinstance(value, ast.BinOp) and isinstance(value.op, ast.MatMult))


def turned_weight(source: Source) -> Fault | None:
    """Find `alpha_loss = (alpha * (log_pi + target_entropy)).mean()`, which is minimised: the target entropy must lower the loss's slope. As it
    is, the weight grows where the entropy is too high already."""
    for file, node in source.of(ast.Assign):
        name = tail(node.targets[0])
        if "loss" not in words(name) or not {"alpha", "temperature", "ent", "entropy"} & set(words(name)):
            continue
        if sign(node.value) > 0 and sum(map(is_target, ast.walk(node.value))) == 1:
            return (
                f"line {node.lineno} of {file}: the derivative of `{name}` by its weight grows with the target entropy: {ast.unparse(node.value)}",
                "the sign is wrong: `-(alpha * (log_pi + target_entropy).detach()).mean()` lowers the weight where the entropy is above its target",
            )
    return None


def is_target(node: ast.AST) -> bool:
    """Return whether a node names the target entropy."""
    return {"target", "entropy"} <= set(words(tail(node)))


def sign(node: ast.AST) -> int:
    """Return the sign with which an expression holds the target entropy times the weight; 0: it does not, or this cannot be seen."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -sign(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return sign(operand)
        case ast.Call(func=ast.Attribute(attr=name)) if name in CALM:
            return sign(subject(node, "torch"))
        case ast.BinOp(left=one, op=ast.Mult(), right=other):
            left, right = sign(one), sign(other)
            return left * outer(other) if left and not right else right * outer(one) if right and not left else 0
        case ast.BinOp(left=one, op=ast.Add() | ast.Sub() as op, right=other):
            left, right = sign(one), sign(other) * (-1 if isinstance(op, ast.Sub) else 1)
            return 0 if left and right else left or right
    return int(is_target(node))


def outer(node: ast.AST) -> int:
    """Return the sign of a factor by its leading minus signs; 0 for one that is not named as the entropy's weight."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -outer(operand)
        case ast.Call(func=ast.Attribute(attr=name)) if name in CALM:
            return outer(subject(node, "torch"))
        case ast.Constant():
            return int((number(node) or 0) > 0)
    return int(bool(set(words(tail(node))) & {"alpha", "temperature", "temp", "coef", "log"}))


def back_alone(source: Source) -> Fault | None:
    """Find a function `x * 2 - 1` that nothing names, where one of `(x + 1) / 2` is called and nothing else maps to -1..1."""
    there = [(file, n) for file, n in source.dropped if isinstance(n, FUNCTIONS) and any(map(spreads, results(n)))]
    if not there or any(spreads(n) or tail(n) in MAPS for _, n in source.nodes):
        return None
    called = {tail(n.func) for _, n in source.of(ast.Call)}
    for file, node in source.functions:
        if node.name in called and any(map(gathers, results(node))):
            where, idle = there[0]
            return (
                f"{node.name}() in line {node.lineno} of {file} maps -1..1 to 0..1 and is called, and nothing calls {idle.name}() in line "
                f"{idle.lineno} of {where}, which maps 0..1 to -1..1",
                f"the model trains on values from 0 to 1, and its outputs are taken to be between -1 and 1: `{idle.name}()` is missing",
            )
    return None


def results(function: ast.AST) -> Iterable[ast.AST]:
    """Return the values that a function returns."""
    return [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]


def spreads(node: ast.AST) -> bool:
    """Return whether an expression is `x * 2 - 1`, `(x - 0.5) * 2` or `(x - 0.5) / 0.5`."""
    match node:
        case ast.BinOp(left=left, op=ast.Sub(), right=right) if number(right) == 1:
            return scaled(left) == 2
        case ast.BinOp(left=ast.BinOp() as inner) | ast.BinOp(right=ast.BinOp() as inner) if scaled(node) == 2:
            return isinstance(inner.op, ast.Sub) and number(inner.right) == 0.5
    return False


def gathers(node: ast.AST) -> bool:
    """Return whether an expression is `(x + 1) / 2`, `(x + 1) * 0.5` or `x * 0.5 + 0.5`."""
    match node:
        case ast.BinOp(left=ast.BinOp() as inner) | ast.BinOp(right=ast.BinOp() as inner):
            if isinstance(node.op, ast.Add) and 0.5 in (number(node.left), number(node.right)):
                return scaled(inner) == 0.5
            plus_one = isinstance(inner.op, ast.Add) and 1 in (number(inner.left), number(inner.right))
            return scaled(node) == 0.5 and plus_one
    return False


def scaled(node: ast.AST) -> float:
    """Return the number by which an expression multiplies another; 0 if it does not."""
    match node:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return number(left) or number(right) or 0
        case ast.BinOp(op=ast.Div(), right=right) if number(right):
            return 1 / number(right)
    return 0


def forwards(source: Source) -> Fault | None:
    """Find `x = randn(...)`, then `for t in range(T): x = denoise(x, t)`: training reaches this step of the chain last."""
    if not any(CHAIN.fullmatch(tail(n)) for _, n in source.of(ast.Name, ast.Attribute)):
        return None
    for file, function in source.functions:
        made = only(ast.walk(function), ast.Assign)
        noise = [n for n in made if is_call(unwrapped(n.value, "to", "cuda", "float"), *NOISE)]
        drawn = {name for n in noise for name in stored(n)}
        for loop in ast.walk(function) if drawn else ():
            match loop:
                case ast.For(target=ast.Name(id=step), iter=order) if rises(order):
                    given = times(loop, step)
                case _:
                    continue
            for line in only(loop.body, ast.Assign):
                for name in stored(line).keys() & drawn:
                    if denoises(line.value, name, given):
                        return (
                            f"line {loop.lineno} of {file} runs `{step}` from the first step to the last, and line {line.lineno} denoises "
                            f"`{name}`, which begins as noise alone, by it",
                            "noise alone belongs to the last step of the chain: the loop must go backwards, reversed(range(T))",
                        )
    return None


def rises(order: ast.AST) -> bool:
    """Return whether a loop runs over range(T), also with a bar that shows its progress."""
    match order:
        case ast.Call(func=func, args=[inner, *_]) if tail(func) in PROGRESS:
            return rises(inner)
        case ast.Call(func=func, args=[_]):
            return tail(func) in ("range", "trange")
    return False


def times(loop: ast.For, step: str) -> set[str]:
    """Return the loop's variable, and names that are filled with it: `torch.full((n,), t)`, `torch.ones(n) * t`."""
    found = {step}
    for line in loop.body:
        if isinstance(line, ast.Assign) and step in loaded(line.value):
            inverse = any(isinstance(n, (ast.Sub, ast.USub, ast.Subscript, ast.Div)) for n in ast.walk(line.value))
            found = found - {step} if inverse else found | stored(line).keys()
    return found


def denoises(value: ast.AST, name: str, given: set[str]) -> bool:
    """Return whether a call gets the noised sample and the step as they are."""
    if not isinstance(value, ast.Call):
        return False
    noises = "add_noise" in tail(value.func) or tail(value.func).startswith(("q_", "forward"))
    read = set(map(variable, passed(value)))
    return not noises and name in read and bool(read & given)


OVERLAPS = {"dice", "iou", "jaccard", "overlap"}
DECAY = 0.03  # in use with Adam: up to 0.01


def added_score(source: Source) -> Fault | None:
    """Find `loss = ce + dice`, where `dice` is the score itself: `(2 * both + 1) / (one + other + 1)`."""
    for file, function in source.functions:
        nodes = list(ast.walk(function))
        scores = {name for name, _, value in named(nodes) if OVERLAPS & set(words(name)) and is_overlap(value)}
        for value in [n.value for n in nodes if isinstance(n, ast.Return) and n.value] if scores else ():
            for term in added(value):
                core = unwrapped(term, *CALM)
                if variable(core) in scores and not isinstance(value, ast.Name):
                    return (
                        f"line {value.lineno} of {file} adds `{ast.unparse(term)}` to the loss, and `{variable(core)}` is largest where both agree",
                        f"1 minus the score is meant: 1 - {ast.unparse(term)}",
                    )
    return None


def added(value: ast.AST) -> list[ast.AST]:
    """Return the terms of a sum of several, each without its constant factor."""
    terms, due = [], [value]
    while due:
        match due.pop():
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                due += [left, right]
            case (
                ast.BinOp(left=ast.Constant(), op=ast.Mult(), right=term)
                | ast.BinOp(left=term, op=ast.Mult(), right=ast.Constant())
            ):
                terms.append(term)
            case term:
                terms.append(term)
    return terms if len(terms) > 1 else []


def is_overlap(value: ast.AST) -> bool:
    """Return whether a value is a ratio whose numerator holds twice a product, as Dice's is."""
    match value:
        case ast.BinOp(left=above, op=ast.Div()):
            doubled = (n for n in ast.walk(above) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult))
            return any(2 in (number(n.left), number(n.right)) for n in doubled)
    return False


def coupled_decay(source: Source) -> Fault | None:
    """Find `Adam(..., weight_decay=0.05)`: Adam adds the decay to the gradient and divides by its size, so that the usual numbers of AdamW shrink
    all weights."""
    for file, call in source.of(ast.Call):
        if is_call(call, "Adam", "NAdam", "RAdam") and all(k.arg != "decoupled_weight_decay" for k in call.keywords):
            for k in call.keywords:
                if k.arg == "weight_decay" and (given := number(k.value)) is not None and given >= DECAY:
                    return (
                        f"line {call.lineno} of {file} builds {tail(call.func)} with weight_decay={given:g}",
                        f"it is added to the gradient there, and rescaled with it: AdamW is meant, or a far smaller number (below {DECAY:g})",
                    )
    return None
