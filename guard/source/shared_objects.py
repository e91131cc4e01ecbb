"""Finds objects that are made once where several are meant: a layer that a list repeats, lists in a list, a variable that lambdas share; and
arguments that land in another parameter than it looks like."""

import ast

from torch import nn
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import named, stored, variables
from trainworthy.guard.source.calls import is_call, methods
from trainworthy.guard.source.nodes import inside, only, tail, variable
from trainworthy.guard.source.reading import Source

WEIGHTLESS = ("Module", "Identity", "ReLU", "LeakyReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "ELU", "Softmax", "Dropout", "Dropout2d",
              "MaxPool2d", "AvgPool2d", "Flatten")  # fmt: skip
LAYERS = tuple(k for k in vars(nn) if k[:1].isupper() and k not in WEIGHTLESS)
TIME_FIRST = ("LSTM", "GRU", "RNN", "MultiheadAttention")


def repeated_layer(source: Source) -> Fault | None:
    """Find `nn.Sequential(*[Block(64)] * 4)`: one block, four times. A list whose entries do not follow each other may share one on purpose."""
    kinds = source.calls.classes.items()
    own = {name for name, found in kinds if any("Module" in map(tail, kind.bases) for kind in found)}
    stacks = followed(source)
    rows = [n.args for _, n in source.of(ast.Call) if is_call(n, "Sequential")]
    rows += [[n.value] for _, n in source.of(ast.Assign) if {tail(t) for t in n.targets} & stacks]
    within = {id(n) for given in rows for one in given for n in ast.walk(one)}
    for file, node in source.of(ast.BinOp):
        match node:
            case ast.BinOp(left=ast.List(elts=[made]), op=ast.Mult()) if id(node) in within and is_call(
                made, *LAYERS, *own
            ):
                text = ast.unparse(made)
                return (
                    f"line {node.lineno} of {file} repeats `{text}` by `*`: all entries are one layer with the same weights",
                    f"one layer for each is meant: [{text} for _ in range({ast.unparse(node.right)})]",
                )
    return None


def followed(source: Source) -> set[str]:
    """Return the names of lists whose layers follow each other: `for layer in self.layers: x = layer(x)`."""
    found = set()
    for _, loop in source.of(ast.For):
        for name, _, value in named(ast.walk(loop)):
            applied = isinstance(value, ast.Call) and variable(value.func) in stored(loop)
            if applied and name in {variable(a) for a in value.args}:
                found |= {tail(n) for n in ast.walk(loop.iter)}
    return found


def repeated_list(source: Source) -> Fault | None:
    """Find `rows = [[]] * n`, then `rows[i].append(x)`: all entries are one list."""
    for file, node in source.of(ast.Assign):
        match node:
            case ast.Assign(
                targets=[target],
                value=ast.BinOp(left=ast.List(elts=[ast.List(elts=[]) | ast.Dict(keys=[])]), op=ast.Mult()),
            ):
                name = ast.unparse(target)
                for _, call in source.of(ast.Call):
                    match call.func:
                        case ast.Attribute(attr="append" | "extend" | "update", value=ast.Subscript(value=base)) if (
                            ast.unparse(base) == name
                        ):
                            return (
                                f"line {node.lineno} of {file} repeats one list by `*`; line {call.lineno} fills `{ast.unparse(call.func.value)}`",
                                "all entries are the same list, and each gets what is meant for all: [[] for _ in range(...)]",
                            )
    return None


def late_bound(source: Source) -> Fault | None:
    """Find `[lambda x: f(x, k) for k in ks]`: each of the functions reads the last k."""
    for file, node in source.of(ast.ListComp, ast.DictComp):
        made = node.value if isinstance(node, ast.DictComp) else node.elt
        if not isinstance(made, ast.Lambda):
            continue
        turns = {name for g in node.generators for name in variables(g.target)}
        own = {a.arg for a in (*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs)}
        if late := variables(made.body) & turns - own:
            name = min(late)
            return (
                f"line {node.lineno} of {file} makes a function for each `{name}`, and all of them read the last one",
                f"a lambda reads `{name}` when it is called: `lambda ..., {name}={name}: ...` keeps each of them",
            )
    return None


def misplaced(source: Source) -> Fault | None:
    """Find `nn.LSTM(8, 16, 2, True)`, whose fourth argument is the bias, and `SGD(parameters, 0.1, 1e-4)`, whose third is the momentum."""
    for file, call in source.of(ast.Call):
        keys, cause = {k.arg for k in call.keywords}, ""
        match tail(call.func), call.args:
            case name, [_, _, _, ast.Constant(value=True)] if name in TIME_FIRST and "batch_first" not in keys:
                cause = "the fourth argument is `bias`, so batches are read as (time, batch, ...): batch_first=True is meant"
            case "SGD", [_, _, ast.Constant(value=float() as third)] if 0 < third < 0.01 and "momentum" not in keys:
                cause = f"the third argument is `momentum`: weight_decay={third} is meant"
            case "StepLR", [_, ast.Constant(value=float() as second), *_] if 0 < second < 1:
                cause = f"the second argument is `step_size`, a number of epochs: gamma={second} is meant"
        if cause:
            return f"line {call.lineno} of {file} is `{ast.unparse(call)}`", cause
    return None


def assigned_weights(source: Source) -> Fault | None:
    """Find `copy.load_state_dict(model.state_dict(), assign=True)`: the copy gets the tensors themselves, and both models train as one."""
    for file, scope in source.plain_scopes:
        nodes = list(inside(scope))
        for call in methods(nodes, "load_state_dict"):
            given = any(k.arg == "assign" and getattr(k.value, "value", None) is True for k in call.keywords)
            match call.args:
                case [ast.Call(func=ast.Attribute(attr="state_dict", value=base)), *_] if given:
                    other, name = ast.unparse(call.func.value), ast.unparse(base)
                    roots = variables(base)
                    later = any(n.lineno > call.lineno and n.id in roots for n in only(nodes, ast.Name))
                    if other != name and later:
                        return (
                            f"line {call.lineno} of {file} gives `{other}` the tensors of `{name}` (assign=True), and `{name}` is used after that",
                            "both models hold the same tensors, and one changes with the other: leave assign=True out, or copy the model",
                        )
    return None
