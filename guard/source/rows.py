"""Finds rows that are joined with those of other samples, and arrays whose entries a view puts into other places."""

import ast
from collections.abc import Iterator

from trainworthy.core.base.names import words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import loaded, paired, stored, targets
from trainworthy.guard.source.calls import calls, is_call, methods, owner, subject, unrolled, unwrapped
from trainworthy.guard.source.nodes import INPUTS, LABELS, LOOPS, inside, only, tail, variable
from trainworthy.guard.source.reading import Source

DRAWN = ("randperm", "permutation")
JOINS = ("cat", "concat", "concatenate", "vstack")
RESHAPES = ("view", "reshape")
SAME = ("tensor", "as_tensor", "from_numpy", "array", "asarray", "LongTensor", "to", "long", "int", "contiguous",
        "copy", "numpy", "astype")  # fmt: skip
"""Calls that keep the layout of what they are given."""
ARRAYS = ("np", "numpy", "torch", "jnp")
PLAIN = ("contiguous", "relu", "sigmoid", "tanh", "float", "detach", "clone")
OTHERS = ("torch", "np", "numpy", "F", "functional", "einops")


def misaligned(source: Source) -> Fault | None:
    """Find `rows = order[a:b]` of a shuffled order, then `x[rows]` and `y[a:b]`: its rows belong to others."""
    for file, scope in source.scopes:
        nodes = list(ast.walk(scope))
        orders = set(shuffled(nodes))
        for loop in only(nodes, LOOPS) if orders else ():
            for name, cut in batches(loop, orders):
                rows, slices = [], []
                for n in ast.walk(loop):
                    match n:
                        case ast.Subscript(slice=ast.Tuple(elts=[row, *_]) | row, ctx=ast.Load()) if base := tail(
                            n.value
                        ):
                            if tail(row) == name:
                                rows.append(base)
                            elif ast.unparse(n.slice) == cut and base not in orders:
                                slices.append((n.lineno, base))
                for line, base in slices:
                    if rows and base not in rows and not ordered(nodes, base, {*orders, name}):
                        return (
                            f"line {line} of {file} takes the rows `{cut}` of `{base}`, and of `{rows[0]}` the rows `{name}`, which are shuffled",
                            f"`{base}[{name}]` is meant: each row is joined with that of another sample",
                        )
    return None


def shuffled_twice(source: Source) -> Fault | None:
    """Find `np.random.shuffle(images)`, then `np.random.shuffle(labels)`: each gets an order of its own."""
    for file, block in source.blocks:
        before: tuple[int, str] | None = None
        for line in block:
            match line:
                case ast.Expr(
                    value=ast.Call(func=ast.Attribute(attr="shuffle", value=drawer), args=[ast.Name(id=name)])
                ) if tail(drawer):
                    kinds = set(words(name))
                    if before and kinds & LABELS:
                        return (
                            f"lines {before[0]} and {line.lineno} of {file} shuffle `{before[1]}` and `{name}`, each into an order of its own",
                            "samples and labels no longer belong together: index both by one permutation",
                        )
                    before = (line.lineno, name) if kinds & INPUTS and not kinds & LABELS else before
                case _ if before and (
                    before[1] in stored(line) or any("seed" in tail(n) or "state" in tail(n) for n in ast.walk(line))
                ):
                    before = None
    return None


def grouped(source: Source) -> Fault | None:
    """Find a Trainer of transformers that groups rows by length, and predictions that are joined with the rows in their own order."""
    asked = [
        (file, k.value) for file, k in source.of(ast.keyword) if k.arg in ("group_by_length", "train_sampling_strategy")
    ]
    for file, value in asked:
        if not isinstance(value, ast.Constant) or value.value not in (True, "group_by_length"):
            continue
        read = {n.attr for _, n in source.of(ast.Attribute)}
        predicts = [n for _, n in source.of(ast.Call) if isinstance(n.func, ast.Attribute) and n.func.attr == "predict"]
        if predicts and "predictions" in read and "label_ids" not in read:
            return (
                f"line {value.lineno} of {file} groups rows by length, in predict() too, and line {predicts[0].lineno} takes its predictions without "
                "their label_ids",
                "the predictions are in another order than the rows: predict with a Trainer that does not group them",
            )
    return None


def shuffled(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names of shuffled indices."""
    for n in nodes:
        match n:
            case ast.Call(func=func, args=[ast.Name(id=name)]) if tail(func) == "shuffle":
                yield name
            case ast.Assign(targets=[ast.Name(id=name), *_], value=value):
                # randperm(n) holds indices; permutation(x) may be the shuffled rows themselves
                drawn = calls(ast.walk(value), *DRAWN)
                if any(c.args and not isinstance(c.args[0], (ast.List, ast.Tuple)) for c in drawn):
                    yield name


def batches(loop: ast.AST, orders: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, slice) of `rows = order[a:b]` in a loop."""
    for n in ast.walk(loop):
        match n:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Subscript(value=base, slice=ast.Slice(lower=ast.expr(), upper=ast.expr()) as cut),
            ) if tail(base) in orders:
                yield name, ast.unparse(cut)


def ordered(nodes: list[ast.AST], base: str, indices: set[str]) -> bool:
    """Return whether a tensor is in the shuffled order already: it was filled by a slice, or made by the shuffled indices."""
    for n in nodes:
        match n:
            case ast.Subscript(value=filled, ctx=ast.Store()) if tail(filled) == base:
                return True
            case ast.Assign(value=ast.expr() as value) | ast.AnnAssign(value=ast.expr() as value):
                named = {tail(t) for one in targets(n) for t in ast.walk(one)}
                if base in named and indices & {tail(x) for x in ast.walk(value)}:
                    return True
            case ast.Call(func=ast.Attribute(value=grown, attr="append" | "extend")) if tail(grown) == base:
                return True
    return False


def interleaved(source: Source) -> Fault | None:
    """Find `x = torch.cat([a, b])`, then `model(x).view(n, 2, -1)`: the two parts of a row are neighbours in `x`, not `a[i]` and `b[i]`."""
    for file, scope in source.scopes:
        nodes = only(inside(scope), (ast.Assign, ast.Call))
        parts: dict[str, int] = {}  # name -> number of the parts it is made of
        for node in sorted(nodes, key=lambda n: (n.lineno, n.col_offset)):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    pass
                case _:
                    name, value = "", node
            if name and (count := joined(value) or kept(value, parts)):
                parts[name] = count
            elif found := taken(value, parts):
                base, count = found
                return (
                    f"line {node.lineno} of {file} reads `{base}` as rows of {count}, and it holds {count} parts one behind the other",
                    f"each row joins parts of different samples: .view({count}, -1, ...).transpose(0, 1), or torch.stack of its parts on axis 1",
                )
            else:
                parts.pop(name, None)
    return None


def joined(value: ast.AST) -> int:
    """Return how many parts `torch.cat([a, b])` joins on the first axis; 0 for anything else. Slices or rows of one tensor are no parts."""
    match value:
        case ast.Call(func=func, args=[ast.List(elts=given) | ast.Tuple(elts=given), *rest]) if tail(func) in JOINS:
            axis = [*rest[:1], *(k.value for k in value.keywords if k.arg in ("dim", "axis"))]
            on_first = not axis or (isinstance(axis[0], ast.Constant) and axis[0].value == 0)
            plain = all(isinstance(e, (ast.Name, ast.Attribute, ast.Subscript)) for e in given)
            return len(given) if on_first and plain and len(given) > 1 else 0
    return 0


def kept(value: ast.AST, parts: dict[str, int]) -> int:
    """Return how many parts the result of `f(x)` holds, if `x` alone is given to a model or moved."""
    match value:
        case ast.Call(func=ast.Attribute(attr="to" | "cuda" | "float" | "contiguous" | "detach")):
            return parts.get(owner(value), 0)
        case ast.Call(func=ast.Name() | ast.Attribute() as called, args=[given]) if tail(called) not in RESHAPES:
            chosen = tail(called).startswith(("sum", "mean", "split", "chunk"))  # no model: a reduction, a selection
            return 0 if chosen or owner(value) in ("torch", "np", "numpy", "F") else parts.get(tail(given), 0)
    return 0


def taken(value: ast.AST, parts: dict[str, int]) -> tuple[str, int] | None:
    """Return (name, parts) of `x.view(n, parts, ...)`."""
    match value:
        case ast.Call(func=ast.Attribute(value=base, attr="view" | "reshape"), args=given) if tail(base) in parts:
            match unrolled(given):
                case [rows, ast.Constant(value=count), _, *_] if count == parts[tail(base)]:
                    return None if isinstance(rows, ast.Constant) else (tail(base), parts[tail(base)])
    return None


def mixed(source: Source) -> Fault | None:
    """Find `pairs.reshape(2, -1)` of an array whose rows are pairs (edges, coordinates): it pairs other entries than those of the rows."""
    made: dict[str, list[ast.expr]] = {}
    for _, node in source.of(ast.Assign):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                made.setdefault(name, []).append(value)
    pairs = {name for name, values in made.items() if all(is_call(core(v), "argwhere") for v in values)}
    for file, node in source.of(ast.Call):
        base = reshaped(node)
        if base is not None and (is_call(core(base), "argwhere") or variable(core(base)) in pairs):
            return (
                f"line {node.lineno} of {file} reshapes `{ast.unparse(base)}` to two rows, and its rows are pairs",
                "a transpose (.T) is meant: reshape() puts the first half of all entries next to the second half",
            )
    return None


def core(value: ast.AST) -> ast.AST:
    """Return what an expression is made of without changes of type and without slices of its rows."""
    match value:
        case ast.Subscript(value=base, slice=ast.Slice()):
            return core(base)
        case ast.Call(func=ast.Attribute(value=base, attr=name)) if name in SAME and tail(base) not in ARRAYS:
            return core(base)
        case ast.Call(func=func, args=[given, *_]) if tail(func) in SAME:
            return core(given)
    return value


def reshaped(call: ast.Call) -> ast.expr | None:
    """Return what `x.reshape(2, -1)`, `x.view(2, -1)` or `reshape(x, (2, -1))` is called on."""
    match call:
        case ast.Call(func=ast.Attribute(attr="reshape" | "view"), args=given):
            base = subject(call, "np", "numpy", "torch")
            sizes = unrolled([n for n in given if n is not base])
            return base if [ast.unparse(n) for n in sizes] == ["2", "-1"] else None
    return None


def larger(source: Source) -> Fault | None:
    """Find a view of a layer's output whose last two sizes are both multiplied by one factor: `conv(x).view(n, c, h * r, w * r)` puts the
    channels of a pixel into rows of their own."""
    for file, scope in source.functions:
        nodes = sorted(inside(scope), key=lambda n: getattr(n, "lineno", 0))
        values: dict[str, list[ast.expr]] = {}
        for n in nodes:
            match n:
                case ast.Assign(targets=[target], value=value):
                    for one, part in paired(target, value):
                        values.setdefault(tail(one), []).append(part)
        for call in methods(nodes, *RESHAPES):
            match unrolled(call.args):
                case [_, _, high, wide] if factor := common(high, wide):
                    if layer(base := call.func.value, values, call.lineno):
                        return (
                            f"line {call.lineno} of {file} views `{ast.unparse(base)[:60]}` as pictures {factor} times as high and wide",
                            "view() puts the channels of a pixel one behind the other and not next to each other: nn.PixelShuffle is meant",
                        )
    return None


def common(one: ast.expr, other: ast.expr) -> str:
    """Return the factor of two different products; empty if there is none."""
    match one, other:
        case ast.BinOp(op=ast.Mult()), ast.BinOp(op=ast.Mult()):
            sides = [{ast.unparse(x.left), ast.unparse(x.right)} for x in (one, other)]
            both = sides[0] & sides[1]
            return both.pop() if len(both) == 1 and len(sides[0] | sides[1]) == 3 else ""
    return ""


def layer(value: ast.expr, values: dict[str, list[ast.expr]], line: int) -> bool:
    """Return whether a value in a line is the output of a layer: `self.conv(x)`, perhaps through functions that keep its places."""
    match value:
        case ast.Name(id=name):
            made = [v for v in values.get(name, []) if v.lineno < line]
            return bool(made) and layer(made[-1], values, made[-1].lineno)
        case ast.Call(func=ast.Attribute(attr=name)) if name in PLAIN:
            return layer(subject(value, *OTHERS, "self"), values, line)
        case ast.Call(func=ast.Attribute(value=base, attr=name)):
            return tail(base) == "self" and "conv" in name.lower()
    return False


MOVES = ("permute", "transpose", "swapaxes", "movedim", "rearrange", "view", "reshape", "t", "unflatten", "einsum")


def parted(source: Source) -> Fault | None:
    """Find `x.reshape(n * c, -1)`, then `y.reshape(n, -1, c)` with nothing moved between them: the rows are in the order (n, c), so a transpose is
    missing."""
    for file, scope in source.functions:
        moves = sorted(methods(inside(scope), *MOVES), key=lambda n: (n.end_lineno, n.end_col_offset))
        joined_by = [(i, factors) for i, n in enumerate(moves) if (factors := merging(n))]
        for i, (first, second) in joined_by:
            if i + 1 == len(moves) or moves[i + 1].func.attr not in RESHAPES:
                continue
            call = moves[i + 1]
            if not loaded(call.func.value) & derived(scope, moves[i], call):
                continue
            match [ast.unparse(n) for n in unrolled(call.args)]:
                case [start, after, last] if start == first and after != "1" and second not in after.split(" * "):
                    if second in last.split(" * "):
                        return (
                            f"line {moves[i].lineno} of {file} makes rows of `{first} * {second}`, and line {call.lineno} reads them as "
                            f"({start}, {after}, {last})",
                            f"entries of different `{second}` are mixed: .reshape({first}, {second}, -1) first, then .transpose(1, 2)",
                        )
    return None


def derived(scope: ast.AST, start: ast.Call, end: ast.Call) -> set[str]:
    """Return the variables that are computed from the result of the call `start` in the lines up to that of `end`."""
    found: set[str] = set()
    for line in sorted(only(inside(scope), ast.Assign), key=lambda n: n.lineno):
        if any(n is start for n in ast.walk(line.value)):
            found = set(stored(line))
        elif start.lineno < line.lineno < end.lineno:
            found = found | set(stored(line)) if loaded(line.value) & found else found - set(stored(line))
    return found


def merging(call: ast.Call) -> tuple[str, str] | None:
    """Return the names (n, c) of `x.reshape(n * c, ...)`."""
    match call:
        case ast.Call(func=ast.Attribute(attr="view" | "reshape"), args=given):
            match unrolled(given):
                case [ast.BinOp(op=ast.Mult(), left=ast.Name(id=first), right=ast.Name(id=second)), _, *_]:
                    return first, second
    return None


def unpermuted(source: Source) -> Fault | None:
    """Find `self.scores(x).permute(0, 2, 3, 1).reshape(n, -1, 11)` beside `self.boxes(x).reshape(n, -1, 4)`: the one has a row for each place of the
    map, the other one for each channel."""
    for file, scope in source.functions:
        heads: dict[bool, tuple[str, ast.Call]] = {}
        for call in methods(inside(scope), *RESHAPES):
            match [ast.unparse(n) for n in unrolled(call.args)]:
                case [_, "-1", _]:
                    head = unwrapped(call.func.value, "permute", "contiguous")
                    moved = any(methods(ast.walk(call.func.value), "permute"))
                    if isinstance(head, ast.Call) and owner(head) == "self":
                        heads.setdefault(moved, (", ".join(map(ast.unparse, head.args)), call))
        if len(heads) == 2 and heads[True][0] == heads[False][0]:
            call = heads[False][1]
            return (
                f"line {call.lineno} of {file} reads `{ast.unparse(call.func.value)[:60]}` as rows without .permute(0, 2, 3, 1), and line "
                f"{heads[True][1].lineno} reads another layer's output of the same input with it",
                "the rows of both belong together, and those of one are channels: permute first",
            )
    return None
