"""Finds values that are computed and lost: never read, dropped, replaced before they are read, or where another input is meant."""

import ast
from collections.abc import Iterator

from trainworthy.core.base.names import words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import loaded, stored, variables
from trainworthy.guard.source.calls import calls, is_call, methods, owner, trains
from trainworthy.guard.source.nodes import FUNCTIONS, LOOPS, inside, nested, number, only, tail, variable
from trainworthy.guard.source.reading import Source
from trainworthy.guard.source.splits import read_names

CHANGED = {"aug", "augmented", "augs", "noisy", "noised", "masked", "mixed", "jittered", "cropped", "flipped", "perturbed", "corrupted",
           "shifted", "smoothed", "normalized", "normalised", "standardized", "standardised", "scaled", "rescaled", "clipped",
           "shuffled", "packed"}  # fmt: skip
IDLE = {"mask", "masks", "label", "labels", "target", "targets", "y", "length", "lengths", "epoch", "step", "index", "idx", "key", "info", "state",
        "args", "config", "device"}  # fmt: skip
"""Words of arguments that a function may get for the sake of its callers."""
SAME = {"abs", "cat", "clamp", "concat", "concatenate", "cos", "dot", "einsum", "exp", "expand", "float", "int", "len", "log", "log2", "matmul",
        "max", "maximum", "mean", "min", "minimum", "norm", "permute", "pow", "reshape", "round", "sin", "softmax", "sqrt", "square", "squeeze",
        "stack", "sum", "tanh", "transpose", "unsqueeze", "view", "where", "zip"}  # fmt: skip
"""Functions and methods that change nothing."""
TABLES = {"drop_duplicates", "dropna", "fillna", "reset_index", "set_index", "sort_values", "sort_index"}
"""Methods of pandas that return a changed copy."""
TENSORS = {"clamp", "index_add", "index_fill", "masked_fill", "masked_scatter", "mul", "permute", "scatter_add", "softmax",
           "unsqueeze"}  # fmt: skip
"""Methods of tensors that return a new one; with `_` at the end they change it."""
EFFECTS = (ast.AugAssign, ast.Raise, ast.Assert, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Delete, ast.With, ast.For,
           ast.While, ast.Try, ast.Pass, ast.NamedExpr, ast.Import, ast.ImportFrom, *FUNCTIONS)  # fmt: skip
PHASES = {"theta", "thetas", "freq", "freqs", "angle", "angles", "phase", "phases", "emb", "pos"}
"""Rotary ones are doubled."""
HOLDERS = ("parameters", "named_parameters", "buffers", "named_buffers", "state_dict")
MOVES = ("to", "cuda", "float", "half")


def idle_values(source: Source) -> Iterator[tuple[str, ast.AST, ast.Assign, str]]:
    """Yield (file, loop, statement, name) of each name that a training loop computes and that nothing reads."""
    for file, scope in source.plain_scopes:
        found = [(loop, n) for loop in training_loops(scope) for n in ast.walk(loop) if isinstance(n, ast.Assign)]
        known = read_names(source, scope) if found else set()
        for loop, node in found:
            name = variable(node.targets[0])
            computed = isinstance(node.value, (ast.Call, ast.BinOp)) and loaded(node.value)
            if name and computed and not name.startswith("_") and name not in known:
                yield file, loop, node, name


def training_loops(scope: ast.AST) -> list[ast.AST]:
    """Return the outermost loops of a scope in which `backward()` is called."""
    found = [n for n in inside(scope) if isinstance(n, LOOPS) and trains(n)]
    within = set().union(*map(nested, found))
    return [n for n in found if id(n) not in within]


def lost_input(source: Source) -> Fault | None:
    """Find a changed copy of an input (`x_aug`, `noisy_x`) that nothing reads, while a later call gets the input itself."""
    for file, loop, node, name in idle_values(source):
        rest = [w for w in words(name) if w not in CHANGED]
        for base in loaded(node.value) if len(rest) < len(words(name)) else ():
            later = [n for n in ast.walk(loop) if isinstance(n, ast.Call) and n.lineno > node.lineno]
            used = next((n for n in later if base in map(variable, n.args)), None)
            if used is not None and rest and rest == words(base):
                return (
                    f"line {node.lineno} of {file} computes `{name}` from `{base}`, and nothing reads it; line {used.lineno} uses `{base}`",
                    f"`{name}` is meant in the later lines, or the line that computes it has no effect",
                )
    return None


def unread(source: Source) -> str:
    """Return as a remark which values of the training loop are computed and never read."""
    found = list(dict.fromkeys(f"{name} (line {node.lineno} of {file})" for file, _, node, name in idle_values(source)))
    return f"; computed in the training loop and never read: {', '.join(found[:3])}" if found else ""


def same_input(source: Source) -> Fault | None:
    """Find `a, b = net(x1), net(x1)` in a function of (x1, x2) that does nothing with x2."""
    for file, function in source.functions:
        if len(names := required(function)) != 2 or function.name == "__init__":  # layers of one size are equal calls
            continue
        read = loaded(function)
        lost = [n for n in names if n not in read]
        if len(lost) != 1 or lost[0].startswith("_") or set(words(lost[0])) & IDLE:
            continue
        used = next(n for n in names if n not in lost)
        lines = only(ast.walk(function), (ast.Assign, ast.AugAssign))
        changed = {name for n in lines for name in stored(n)}
        given = [n for n in inside(function) if isinstance(n, ast.Call) and used in map(variable, n.args)]
        seen: dict[str, int] = {}
        for call in sorted(given, key=lambda n: (n.lineno, n.col_offset)):
            text = ast.unparse(call)
            if used not in changed and not loaded(call) & changed and text in seen:
                return (
                    f"line {call.lineno} of {file} calls {text} as line {seen[text]} does, and {function.name}() never reads `{lost[0]}`",
                    f"{ast.unparse(call.func)}({lost[0]}) is meant: the second input has no effect",
                )
            seen[text] = call.lineno
    return None


def required(function: ast.AST) -> list[str]:
    """Return the names of the parameters that have no default, without the object; nothing if there are others, too."""
    match function.args:
        case ast.arguments(defaults=[], kwonlyargs=[], vararg=None, kwarg=None, posonlyargs=first, args=rest):
            return [a.arg for a in (*first, *rest) if a.arg not in ("self", "cls")]
    return []


def unused(source: Source) -> Fault | None:
    """Find a statement that calls a function or method for its result alone."""
    # A call in try or with may be there to see whether it raises, and one that a loop repeats as it is to take its time
    tried = {id(n) for _, t in source.of(ast.Try, ast.With) for n in ast.walk(t)}
    tried |= {id(n) for _, t in source.of(ast.For) for n in t.body if variable(t.target) == "_"}
    lines = {id(n.value) for _, n in source.of(ast.Expr) if id(n) not in tried}
    given = {n.arg for _, n in source.of(ast.arg)}
    for file, call, function, _ in source.calls.reached:
        if id(call) not in lines or variable(call.func) in given or not changes_nothing(function):
            continue
        # What is passed is read later; else the line only shows something
        if any(read_after(source, call, name) for name in loaded(call) - {variable(call.func)}):
            return (
                f"line {call.lineno} of {file} calls {ast.unparse(call.func)}() and drops what it returns; {function.name}() in line "
                f"{function.lineno} changes nothing else",
                "the result must be assigned: as it is, the line has no effect",
            )
    pandas = any("pandas" in ast.unparse(n) for _, n in source.of(ast.Import, ast.ImportFrom))
    own = {n.name for _, n in source.functions}  # `net.clamp(-1, 1)` may change its weights
    for file, call in source.of(ast.Call):
        if id(call) not in lines or not isinstance(call.func, ast.Attribute) or (name := call.func.attr) in own:
            continue
        keys = {k.arg for k in call.keywords}
        table = pandas and name in TABLES and "inplace" not in keys
        if table or (name in TENSORS and "out" not in keys and (call.args or keys)):
            return (
                f"line {call.lineno} of {file} calls {ast.unparse(call.func)}() and drops what it returns",
                f"`{name}` returns a changed copy: assign it, or use {'inplace=True' if table else name + '_'}",
            )
    return None


def changes_nothing(function: ast.AST) -> bool:
    """Return whether a function only computes what it returns, from its arguments, without a call that could do anything else."""
    returns = 0
    for node in inside(function):
        match node:
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                returns += 1
            case ast.Call(func=func, keywords=keys) if tail(func) not in SAME or any(k.arg == "out" for k in keys):
                return False
            case ast.Assign(targets=made) if not all(isinstance(t, ast.Name) for t in made):
                return False
            case ast.AnnAssign(target=made) if not isinstance(made, ast.Name):
                return False
        if isinstance(node, EFFECTS):
            return False
    return returns > 0 and not function.decorator_list and isinstance(function, ast.FunctionDef)


def rebound(source: Source) -> Fault | None:
    """Find a loop over parameters or tensors that binds its own variable to a new value and never reads it."""
    for file, loop in source.of(ast.For):
        own = variables(loop.target)
        held = any(calls(ast.walk(loop.iter), *HOLDERS))
        if isinstance(loop.body[-1], ast.Break):  # one batch, to look at
            continue
        for at, line in enumerate(loop.body):
            match line:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in own:
                    moved = is_call(value, *MOVES) and owner(value) == name
                    read = any(name in loaded(s) for s in loop.body[at + 1 :])
                    if (held or moved) and not read and not read_after(source, loop, name):
                        return (
                            f"line {line.lineno} of {file} sets the loop's `{name}` to a new value, and nothing reads it",
                            f"the assignment binds the name anew and leaves {'the parameter' if held else 'the tensor'} as it is: "
                            f"change it in place (`{name}.data.copy_(...)`), or store the new one",
                        )
    return None


def read_after(source: Source, loop: ast.stmt | ast.expr, name: str) -> bool:
    """Return whether a name is read behind a loop or a call, in any function, before it is bound again: what holds it may be a closure."""
    within, last = {id(n) for n in ast.walk(loop)}, loop.end_lineno or loop.lineno
    behind = [n for _, n in source.of(ast.Name) if n.id == name and n.lineno > last]
    bound = min((n.lineno for n in behind if isinstance(n.ctx, ast.Store)), default=float("inf"))
    return any(isinstance(n.ctx, ast.Load) and id(n) not in within and n.lineno < bound for n in behind)


def replaced(source: Source) -> Fault | None:
    """Find `loss = 0`, then a loop that sets `loss = ...` without reading it, then `loss.backward()`."""
    for file, block in source.blocks:
        for i, start in enumerate(block):
            match start:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if number(value) == 0:
                    at = next((k for k, n in enumerate(block) if k > i and isinstance(n, ast.For)), None)
                case _:
                    continue
            backwards = [c for s in block[at + 1 :] for c in methods(ast.walk(s), "backward")] if at else []
            if not any(variable(c.func.value) == name for c in backwards):
                continue
            lines = [n for n in block[at].body if name in stored(n)]
            read = any(name in loaded(n) for n in block[i + 1 : at + 1])
            if len(lines) == 1 and isinstance(lines[0], ast.Assign) and not read and not carries(block[at], name):
                return (
                    f"line {start.lineno} of {file} sets `{name}` to 0, and line {lines[0].lineno} replaces it in each turn of its loop: "
                    f"{name}.backward() gets the last one alone",
                    f"`{name} += ...` is meant",
                )
    return None


def carries(loop: ast.For, name: str) -> bool:
    """Return whether a turn of a loop hands another value on to the next one (a refinement whose last loss counts), may end the loop, or sets the
    loss under a condition."""
    made = {k for n in ast.walk(loop) for k in stored(n)} - {name} - set(stored(loop))
    for statement in loop.body:
        if loaded(statement) & made:
            return True
        made -= stored(statement).keys()
    return any(isinstance(n, (ast.Break, ast.Continue, ast.If)) for n in ast.walk(loop))


def carried(source: Source) -> Fault | None:
    """Find a value that a loop carries from one turn to the next, and replaces before it is read: `after = row[-1]`, then a loop over `i` with
    `after = i` before `x[k] = i` and `y[k] = after`."""
    for file, block in source.blocks:
        for at, loop in enumerate(block):
            match loop:
                case ast.For(target=ast.Name(id=turn)) if found := early(loop, turn, block[:at]):
                    name, line, begun = found
                    return (
                        f"line {line} of {file} sets `{name}` to `{turn}` before `{name}` is read: both are stored as one",
                        f"`{name} = {turn}` is meant for the next turn, after the lines that store `{name}`: its first value "
                        f"(line {begun}) is never used",
                    )
    return None


def early(loop: ast.For, turn: str, block: list[ast.stmt]) -> tuple[str, int, int] | None:
    """Return (name, its line, line of its first value) of an entry from before the loop that a turn replaces by its own variable before it is
    read."""
    entries = [(i, s) for i, s in enumerate(block) if isinstance(s, ast.Assign) and isinstance(s.value, ast.Subscript)]
    begun = {name: i for i, s in entries for name in stored(s)}
    for k, line in enumerate(loop.body):
        match line:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=value)) if value == turn and name in begun:
                read = any(name in loaded(s) for s in (*block[begun[name] + 1 :], *loop.body[:k]))
                again = any(name in stored(s) for s in loop.body if s is not line)
                if not read and not again and kept(loop.body[k + 1 :], name) and kept(loop.body, turn):
                    return name, line.lineno, block[begun[name]].lineno
    return None


def kept(statements: list[ast.stmt], name: str) -> bool:
    """Return whether statements store a value in a place of an array or append it."""
    for s in statements:
        match s:
            case ast.Assign(targets=[ast.Subscript(), *_], value=ast.Name(id=value)) if value == name:
                return True
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append"), args=[ast.Name(id=one)])) if one == name:
                return True
    return False


def lost_bias(source: Source) -> Fault | None:
    """Find a class that adds a bias to the product of two of its layers in `forward`, and leaves it out of the same product in another method."""
    for file, kind in source.of(ast.ClassDef):
        methods_of = {f.name: f for f in kind.body if isinstance(f, FUNCTIONS)}
        forward = methods_of.get("forward")
        if forward is None:
            continue
        own = {name: members(f) for name, f in methods_of.items()}
        biases = {m for m in own["forward"] if "bias" in words(m) and not {"user", "global"} & set(words(m))}
        rest = own["forward"] - biases
        for name, function in methods_of.items():
            used = own[name]
            lost = biases - used
            whole = any("bias" in words(m) for m in used) or used & methods_of.keys() or own["forward"] & {name}
            if name.startswith("_") or name == "forward" or whole or not lost:
                continue
            if rest != used or len(rest) < 2 or not product(function):
                continue
            line, bias = function.lineno, min(lost)
            return (
                f"forward() of {kind.name} adds `{bias}`, and {name}() in line {line} of {file} multiplies the same layers without it",
                f"what {name}() ranks by is not what is trained: add `self.{bias}` there, too",
            )
    return None


def members(function: ast.AST) -> set[str]:
    """Return the attributes of `self` that a function reads."""
    return {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute) and variable(n.value) == "self"}


def product(function: ast.AST) -> bool:
    """Return whether a function returns a matrix product, or a sum of products."""
    found = [n.value for n in only(inside(function), ast.Return) if n.value is not None]
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult) for v in found for n in ast.walk(v)) or any(
        any(calls(ast.walk(v), "matmul", "mm", "einsum", "linear")) for v in found
    )


def doubled(source: Source) -> Fault | None:
    """Find `torch.cat([x, x], 1)` in a class: one of two tensors was meant (a skip connection)."""
    for file, kind in source.of(ast.ClassDef):
        for call in calls(ast.walk(kind), "cat", "concat", "concatenate"):
            axis = [*call.args[1:2], *(k.value for k in call.keywords if k.arg in ("dim", "axis"))]
            match call.args:
                case [
                    ast.List(elts=[ast.Name(id=one), ast.Name(id=other)])
                    | ast.Tuple(elts=[ast.Name(id=one), ast.Name(id=other)]),
                    *_,
                ]:
                    if one == other and [number(a) for a in axis] == [1] and not PHASES & set(words(one)):
                        return (
                            f"line {call.lineno} of {file} joins `{one}` with itself on the axis of channels",
                            "another tensor is meant in one of the two places: as it is, half of the channels add nothing new",
                        )
    return None
