"""Finds lines that are valid Python and do nothing, or not what they say: a method without its call, an attribute that nothing reads,
a comparison in place of an assignment, a condition that is always true."""

import ast
from collections.abc import Iterator

import torch
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import stored, targets
from trainworthy.guard.source.calls import calls, is_call, methods, passed
from trainworthy.guard.source.nodes import inside, tail, variable
from trainworthy.guard.source.reading import Source

VERBS = {"backward", "eval", "requires_grad_", "reset_parameters", "step", "train", "zero_grad"}
MISSPELT = {f"{a}_{b}" for a in ("require", "required", "requires") for b in ("grad", "grads", "gradient", "gradients")}
SEEDS = {"torch.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all", "np.random.seed", "numpy.random.seed",
         "random.seed"}  # fmt: skip
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.MatMult)
OPTIMIZERS = tuple(k for k in vars(torch.optim) if k[:1].isupper() and k != "Optimizer")
SHOWN = ("print", "info", "debug", "str", "repr", "pprint")
"""Calls that only show the options."""
OFF = {"False", "false", "FALSE", "0", "no", "No", "off", "f", "F", "n"}


def uncalled(source: Source) -> Fault | None:
    """Find `optimizer.zero_grad` as a statement: the method is named and not called."""
    for file, node in source.of(ast.Expr):
        match node.value:
            case ast.Attribute(attr=name) if name in VERBS:
                text = ast.unparse(node.value)
                return (
                    f"line {node.lineno} of {file} is `{text}`, without parentheses",
                    f"`{text}()` is meant: as it is, the line has no effect",
                )
    return None


def compared(source: Source) -> Fault | None:
    """Find `p.requires_grad == False` as a statement."""
    for file, node in source.of(ast.Expr):
        match node.value:
            case ast.Compare(
                left=ast.Attribute(attr="requires_grad"), ops=[ast.Eq()], comparators=[ast.Constant(value=bool())]
            ):
                text = ast.unparse(node.value)
                return (
                    f"line {node.lineno} of {file} is `{text}`: it compares, and sets nothing",
                    f"`{text.replace('==', '=')}` is meant",
                )
    return None


def dropped(source: Source) -> Fault | None:
    """Find a statement of a function that only adds or multiplies: `x + positions`."""
    for file, function in source.functions:
        # A line in try or with may be there to see whether it raises
        tried = {id(n) for t in ast.walk(function) if isinstance(t, (ast.Try, ast.With)) for n in ast.walk(t)}
        for node in inside(function):
            match node:
                case ast.Expr(value=ast.BinOp(op=op, left=ast.Name(id=name)) as sum) if (
                    isinstance(op, ARITHMETIC) and id(node) not in tried
                ):
                    return (
                        f"line {node.lineno} of {file} computes `{ast.unparse(sum)}` and drops it",
                        f"`{name} = {ast.unparse(sum)}` is meant: as it is, the line has no effect",
                    )
    return None


def attributes(source: Source) -> Iterator[tuple[str, ast.Attribute, ast.Assign | ast.AugAssign]]:
    """Yield (file, attribute, statement) of the attributes that statements set."""
    for file, node in source.of(ast.Assign, ast.AugAssign):
        for target in targets(node):
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute):
                    yield file, one, node


def misspelt(source: Source) -> Fault | None:
    """Find `p.require_grad = False` of a parameter: an attribute that nothing reads, where `requires_grad` is meant."""
    read = {n.attr for _, n in source.of(ast.Attribute) if isinstance(n.ctx, ast.Load)} | {"requires_grad"}
    loops = [n for _, n in source.of(ast.For) if any(calls(ast.walk(n.iter), "parameters", "named_parameters"))]
    parameters = {id(t): name for n in loops for name in stored(n) for t in ast.walk(n) if variable(t) == name}
    for file, target, _ in attributes(source):
        # Of a table of positions that is no parameter, the line is superfluous and harmless
        held = id(target.value) in parameters or tail(target.value) in ("weight", "bias")
        if held and target.attr in MISSPELT - read:
            return (
                f"line {target.lineno} of {file} sets `{ast.unparse(target)}`, which nothing reads",
                "`requires_grad` is meant: as it is, the line has no effect",
            )
    return None


def unread_rate(source: Source) -> Fault | None:
    """Find `optimizer.lr = ...` or `optimizer.defaults["lr"] = ...` of an optimiser of torch: its rates are in param_groups."""
    if not any(n.name.startswith("torch") for _, n in source.of(ast.alias)):
        return None  # those of another library
    made = {ast.unparse(t) for _, n in source.of(ast.Assign) if is_call(n.value, *OPTIMIZERS) for t in n.targets}
    read = {ast.unparse(n) for _, n in source.of(ast.Attribute) if isinstance(n.ctx, ast.Load)}
    for file, node in source.of(ast.Assign, ast.AugAssign):
        for target in targets(node):
            match target:
                case ast.Attribute(attr="lr" | "learning_rate", value=holder) if ast.unparse(target) not in read:
                    name = ast.unparse(holder)
                case ast.Subscript(value=ast.Attribute(attr="defaults", value=holder), slice=ast.Constant(value="lr")):
                    name = ast.unparse(holder)
                case _:
                    continue
            if name in made and f"{name}.add_param_group" not in read:
                return (
                    f"line {node.lineno} of {file} sets `{ast.unparse(target)}`, and torch's optimisers read their rates from `param_groups`",
                    f"the rate does not change: for group in {name}.param_groups: group['lr'] = ...",
                )
    return None


def replaced_seed(source: Source) -> Fault | None:
    """Find `torch.manual_seed = 0`, which replaces the function and seeds nothing."""
    for file, target, node in attributes(source):
        text = ast.unparse(target)
        if text in SEEDS and isinstance(node.value, (ast.Constant, ast.Attribute, ast.Name)):
            return (
                f"line {node.lineno} of {file} is `{ast.unparse(node)}`: it replaces the function, and seeds nothing",
                f"`{text}({ast.unparse(node.value)})` is meant",
            )
    return None


def always_true(source: Source) -> Fault | None:
    """Find `if mode == "train" or "val":`, whose second half is a text and so always true."""
    for file, node in source.of(ast.If, ast.IfExp, ast.While):
        match node.test:
            case ast.BoolOp(op=ast.Or(), values=[ast.Compare(left=left, ops=[ast.Eq()]), *others]):
                for other in others:
                    if isinstance(other, ast.Constant) and isinstance(other.value, str) and other.value:
                        return (
                            f"line {node.lineno} of {file} tests `{ast.unparse(node.test)}`, which is always true: its last part is a text",
                            f"`{ast.unparse(left)} == {other.value!r}` is meant in place of `{other.value!r}`",
                        )
    return None


def text_for_a_flag(source: Source) -> Fault | None:
    """Find `add_argument("--shuffle", type=bool)` of a script that is started with `--shuffle False`: bool("False") is true."""
    given = dict(zip(source.argv, source.argv[1:], strict=False))
    given |= dict(word.split("=", 1) for word in source.argv if word.startswith("--") and "=" in word)
    for file, call in source.of(ast.Call):
        kinds = [k.value for k in call.keywords if k.arg == "type"]
        if tail(call.func) != "add_argument" or not any(isinstance(k, ast.Name) and k.id == "bool" for k in kinds):
            continue
        for name in (a.value for a in call.args if isinstance(a, ast.Constant)):
            if given.get(name) in OFF:
                return (
                    f"{name} {given[name]} is read as True: line {call.lineno} of {file} gives it type=bool, and bool({given[name]!r}) is True",
                    "action=argparse.BooleanOptionalAction is meant (then --no-... switches it off)",
                )
    return None


def unread_option(source: Source) -> Fault | None:
    """Find an option that the script is started with, and whose value nothing reads."""
    parses = [n for _, n in source.of(ast.Assign) if is_call(n.value, "parse_args", "parse_known_args")]
    parsed = {ast.unparse(t) for n in parses for t in n.targets}
    known = {id(call) for _, call, _, _ in source.calls.reached}
    for _, call in source.of(ast.Call):
        passes = any(ast.unparse(a) in parsed for a in passed(call))
        if passes and id(call) not in known and tail(call.func) not in SHOWN:
            return None  # a library may read them
    given = {word.split("=")[0] for word in source.argv}
    for file, call in source.of(ast.Call):
        names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        own = any(k.arg in ("dest", "action") for k in call.keywords)
        long = next((n for n in names if n.startswith("--")), "")
        if tail(call.func) != "add_argument" or own or not long or not given & set(names):
            continue
        field = long.lstrip("-").replace("-", "_")
        if not any(field in word for word in source.known if word not in names):
            return (
                f"the script is started with {long}, and nothing reads `{field}` (defined in line {call.lineno} of {file})",
                "the option has no effect: pass its value to what it should set",
            )
    return None


def unmerged(source: Source) -> Fault | None:
    """Find `model = model.unload()` of an adapter of peft (LoRA) in a script that trains it, and neither saves it before nor merges: what was
    trained is taken away."""
    merges = any("merge" in n.attr for _, n in source.of(ast.Attribute))
    trained = any(methods((n for _, n in source.of(ast.Call)), "train", "backward"))
    if merges or not trained or "LoraConfig" not in source.known:
        return None
    saved = [
        n.lineno for _, n in source.of(ast.Attribute) if n.attr in ("save_pretrained", "save_model", "push_to_hub")
    ]
    for file, node in source.of(ast.Assign):
        match node:
            case ast.Assign(
                targets=[target], value=ast.Call(func=ast.Attribute(attr="unload", value=base), args=[], keywords=[])
            ) if tail(target) in source.known and min(saved, default=node.lineno) >= node.lineno:
                return (
                    f"line {node.lineno} of {file} sets `{ast.unparse(target)}` to `{ast.unparse(base)}.unload()`, and nothing is merged",
                    "unload() returns the base model without its adapter: merge_and_unload() is meant",
                )
    return None
