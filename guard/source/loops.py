"""Finds loops whose iterations share what each should have: one net for all folds, a count that is reset in each iteration or never, a return in the
first one."""

import ast

from trainworthy.core.base.names import words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import loaded, named, stored, targets, variables
from trainworthy.guard.source.calls import methods, trains
from trainworthy.guard.source.nodes import inside, number, only, tail, variable
from trainworthy.guard.source.reading import Source

ANEW = ("load_state_dict", "deepcopy", "apply", "set_weights")
"""Calls that may give a net new weights."""
SEEDING = {"torch.manual_seed", "manual_seed", "np.random.seed", "numpy.random.seed", "random.seed", "set_seed", "transformers.set_seed",
           "seed_everything", "L.seed_everything", "pl.seed_everything"}  # fmt: skip
RIGHT = {"correct", "corrects", "hits"}
"""Words of the names of counts of right answers."""


def same_net(source: Source) -> Fault | None:
    """Find a loop over the folds of a cross-validation that trains one net in all of them."""
    splitters = {ast.unparse(t) for _, n in source.of(ast.Assign) if is_splitter(n.value) for t in n.targets}
    nets = {ast.unparse(c.func.value) for c in methods((n for _, n in source.of(ast.Call)), "parameters")}
    for file, loop in source.of(ast.For):
        if not any(over_folds(n, splitters) for n in ast.walk(loop.iter)):
            continue
        nodes = list(ast.walk(loop))
        called = [tail(n.func) for n in only(nodes, ast.Call)]
        if any(name in ANEW or "init" in name or "reset" in name for name in called):
            continue
        made = {ast.unparse(t) for n in nodes for t in targets(n)}
        for call in (n for n in only(nodes, ast.Call) if tail(n.func).startswith(("train", "fit"))):
            owner = [call.func.value] if isinstance(call.func, ast.Attribute) and not call.args else []
            for net in map(ast.unparse, [*owner, *call.args]):
                if net in nets - made:
                    return (
                        f"line {loop.lineno} of {file} runs over the folds, and line {call.lineno} trains `{net}`, which is made before it",
                        f"from the second fold on, `{net}` was trained on what it is evaluated on: make it and its optimiser inside the loop",
                    )
    return None


def is_splitter(value: ast.AST) -> bool:
    """Return whether a value is `KFold(5)`, or another splitter that holds out each sample in turn."""
    return isinstance(value, ast.Call) and tail(value.func).endswith(("KFold", "LeaveOneOut", "LeaveOneGroupOut"))


def over_folds(node: ast.AST, splitters: set[str]) -> bool:
    """Return whether a node is `folds.split(...)` of a splitter."""
    match node:
        case ast.Call(func=ast.Attribute(attr="split", value=held)):
            return ast.unparse(held) in splitters or is_splitter(held)
    return False


def counted(loop: ast.AST) -> dict[str, ast.AugAssign]:
    """Return the variables that a loop adds to, with the first of these lines."""
    found = [n for n in only(inside(loop), ast.AugAssign) if isinstance(n.op, ast.Add) and variable(n.target)]
    return {variable(n.target): n for n in reversed(found)}


def first_turn(source: Source) -> Fault | None:
    """Find a loop over batches that ends in its first iteration: `return correct / total` or `break` stands within it."""
    for file, loop in source.of(ast.For):
        if any(isinstance(n, ast.Continue) for n in ast.walk(loop)):
            continue  # it looks for the first of some kind
        for line in loop.body:
            match line:
                case ast.Return(value=ast.expr() as value) if sums := counted(loop).keys() & loaded(value):
                    return (
                        f"line {line.lineno} of {file} returns `{min(sums)}` within the loop of line {loop.lineno}, in its first iteration",
                        "the rest is never counted: the return belongs after the loop",
                    )
                case ast.Break() if trains(loop):
                    return (
                        f"line {line.lineno} of {file} ends the training loop of line {loop.lineno} in its first iteration",
                        "it trains on the first batch alone: is the break left over from a trial?",
                    )
    return None


def begun_in_each_turn(source: Source) -> Fault | None:
    """Find `correct = 0` in a loop over batches that adds to it, while it is read only after the loop."""
    for file, scope in source.scopes:
        read = [n for n in only(inside(scope), ast.Name) if isinstance(n.ctx, ast.Load)]
        for loop in only(inside(scope), ast.For):
            begun = {name: n for n in only(loop.body, ast.Assign) if number(n.value) == 0 for name in stored(n)}
            added = {variable(n.target) for n in only(loop.body, ast.AugAssign)}
            within = {n.id for n in only(ast.walk(loop), ast.Name) if isinstance(n.ctx, ast.Load)}
            for name in (begun.keys() & added) - within:
                if behind := [n for n in read if n.id == name and n.lineno > (loop.end_lineno or loop.lineno)]:
                    return (
                        f"line {begun[name].lineno} of {file} sets `{name}` to 0 in each iteration of the loop of line {loop.lineno}, and line "
                        f"{behind[0].lineno} reads it after the loop",
                        f"it holds the last iteration alone: `{name} = 0` belongs before the loop",
                    )
    return None


def never_begun_again(source: Source) -> Fault | None:
    """Find `correct = 0` before the loop over epochs, and `correct / total` in it: the accuracy is that of all epochs so far."""
    for file, scope in source.scopes:
        lines = list(inside(scope))
        for epochs in filter(over_epochs, only(lines, ast.For)):
            again = {name for n in only(ast.walk(epochs), ast.Assign) for name in stored(n)}
            added = {name: n for loop in only(epochs.body, ast.For) for name, n in counted(loop).items()}
            for name in (n for n in added.keys() - again if set(words(n)) & RIGHT):
                ratios = [
                    n for n in only(ast.walk(epochs), ast.BinOp) if isinstance(n.op, ast.Div) and name in loaded(n.left)
                ]
                begun = [n for n in only(lines, ast.Assign) if n.lineno < epochs.lineno and name in stored(n)]
                if ratios and begun:
                    return (
                        f"line {added[name].lineno} of {file} adds to `{name}` in every epoch of the loop of line {epochs.lineno}, and only line "
                        f"{begun[-1].lineno}, before it, sets it to 0",
                        f"the ratio in line {ratios[0].lineno} counts all epochs so far: `{name} = 0` belongs inside the loop",
                    )
    return None


def over_epochs(loop: ast.For) -> bool:
    """Return whether the names in the head of a loop tell that it runs over epochs."""
    return any({"epoch", "epochs"} & set(words(name)) for name in variables(loop.target) | variables(loop.iter))


def reseeded(source: Source) -> Fault | None:
    """Find `torch.manual_seed(SEED)` in a loop over epochs that trains: each epoch draws the same order, noise and dropout. One that puts the
    generator's state back draws on."""
    if source.known & {"set_rng_state", "fork_rng", "setstate", "set_state"}:
        return None
    for file, loop in source.of(ast.For):
        train = trains(loop) or any(tail(n.func).startswith("train") for n in ast.walk(loop) if isinstance(n, ast.Call))
        changed = {name for n in ast.walk(loop) for name in stored(n)}
        for line in loop.body if train and over_epochs(loop) else ():
            match line:
                case ast.Expr(value=ast.Call(args=[seed], keywords=[]) as call) if ast.unparse(call.func) in SEEDING:
                    if not loaded(seed) & changed:
                        return (
                            f"line {line.lineno} of {file} is `{ast.unparse(line)}`, in each epoch of the loop of line {loop.lineno}",
                            "each epoch draws the same order, noise and dropout as the one before: set the seed once, before the loop",
                        )
    return None


ONCE = ("iter", "zip", "map", "enumerate", "filter", "reversed")


def used_up(source: Source) -> Fault | None:
    """Find `batches = iter(loader)` before the loop over epochs, and `for batch in batches` in it: from the second epoch on it is empty."""
    for file, scope in source.scopes:
        lines = list(inside(scope))
        made = {name: line for name, line, value in named(lines) if once(value)}
        for outer in only(lines, ast.For):
            again = {name for n in ast.walk(outer) for name in stored(n)} | {variable(outer.iter)}
            for inner in only(ast.walk(outer), ast.For):
                name = variable(inner.iter)
                parts = any(
                    isinstance(n, (ast.Break, ast.Return)) for n in ast.walk(inner)
                )  # it goes on where it stopped
                if (
                    inner is not outer
                    and made.get(name, outer.lineno) < outer.lineno
                    and name not in again
                    and not parts
                ):
                    return (
                        f"line {made[name]} of {file} makes the iterator `{name}` once; the loop of line {outer.lineno} iterates over it each time "
                        f"(line {inner.lineno})",
                        f"from the second time on it is empty: iterate over what `{name}` is made of, or make it inside the loop",
                    )
    return None


def once(value: ast.AST) -> bool:
    """Return whether a value can be run over a single time."""
    return isinstance(value, ast.GeneratorExp) or (
        isinstance(value, ast.Call) and variable(value.func) in ONCE and bool(value.args)
    )


def stale(source: Source) -> Fault | None:
    """Find an evaluation that computes `val_loss` and adds up `loss`, the last one of training."""
    for file, scope in source.scopes:
        loops, read = only(inside(scope), ast.For), loaded(scope)
        training = [loop for loop in loops if trains(loop)]
        for loop in (n for n in loops if not trains(n)):
            before = [n for n in training if (n.end_lineno or n.lineno) < loop.lineno]
            made, old = computed(loop), {name: n for n in before for name in computed(n)}
            for name in made.keys() - read:
                for other in loaded(loop) & old.keys() - made.keys():
                    if words(name)[-1:] == words(other)[-1:] and len(words(name)) > len(words(other)):
                        return (
                            f"line {made[name].lineno} of {file} computes `{name}`, which nothing reads, and the loop of line {loop.lineno} uses "
                            f"`{other}` of the training loop in line {old[other].lineno}",
                            f"`{name}` is meant: `{other}` is that of the last training batch",
                        )
    return None


def computed(loop: ast.AST) -> dict[str, ast.Assign]:
    """Return the variables that a loop assigns the result of a call, with the statements."""
    return {name: n for n in only(ast.walk(loop), ast.Assign) if isinstance(n.value, ast.Call) for name in stored(n)}


def state_dropped(source: Source) -> Fault | None:
    """Find `out, _ = rnn(x[:, t], hidden)` in a loop over steps, after which `backward()` is called: each step begins with the same `hidden`."""
    for file, function in source.functions:
        for loop in only(inside(function), ast.For):
            if not isinstance(loop.target, ast.Name) or trains(loop) or not trains(function):
                continue
            changed = {name for n in ast.walk(loop) for name in stored(n)}
            for line in only(ast.walk(loop), ast.Assign):
                match line:
                    case ast.Assign(
                        targets=[ast.Tuple(elts=[ast.Name(id=out), ast.Name(id=dropped)])],
                        value=ast.Call(args=[ast.Subscript(slice=at), ast.Name(id=state)]),
                    ) if (
                        dropped.startswith("_")
                        and state not in changed
                        and loop.target.id in variables(at)
                        and out in loaded(loop)
                    ):
                        return (
                            f"line {line.lineno} of {file} drops the second result, and each turn of the loop of line {loop.lineno} passes the same "
                            f"`{state}`",
                            f"the state is not carried from step to step: `{out}, {state} = ...`",
                        )
    return None
