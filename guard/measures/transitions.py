"""Finds loops over an environment's steps that act on the first observation for ever, and Q-learning that never reads the actions."""

import ast
from collections.abc import Iterator

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import Source, assigned, inside, tail, words
from trainworthy.guard.measures.splits import Scope, loaded, scopes, stored, trains

RESULTS = 3  # that a step of an environment returns, at least
ACTIONS, REWARDS = {"action", "actions", "act", "acts"}, {"reward", "rewards", "rew", "rews"}
HIGHEST = ("max", "amax")


def first_kept(source: Source) -> Fault | None:
    """Find a loop that chooses its actions by what `reset()` returned, and never replaces it by what `step()` returns."""
    for file, scope in scopes(source):
        starts = {name: where for node in inside(scope) for name, where in begun(node)}
        loops = [n for n in inside(scope) if isinstance(n, (ast.For, ast.While))] if starts else []
        for loop in loops:
            for node, call, found in steps(loop):
                made = [n for n in ast.walk(loop) if isinstance(n, ast.Assign) and set(stored(n)) & loaded(call)]
                read = loaded(call).union(*(loaded(n.value) for n in made)) & starts.keys()
                kept = [n for n in read if starts[n] == receiver(call) and not changed(loop, n)]
                if kept and found not in kept and not found.startswith("_"):
                    return (
                        f"line {node.lineno} of {file} returns `{found}` from {starts[kept[0]]}.step(), and the actions of the loop are chosen "
                        f"by `{kept[0]}`, which keeps what {starts[kept[0]]}.reset() returned",
                        f"the new observation is never made the current one: `{kept[0]} = {found}` is missing after step()",
                    )
    return None


def receiver(call: ast.Call) -> str:
    """Return the text of the object whose method is called."""
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def begun(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that a statement gives to the result of an environment's `reset()`, with the environment's."""
    for one, made in assigned(node):
        one = one.elts[0] if isinstance(one, ast.Tuple) and one.elts else one  # observation, info = env.reset()
        calls = [n for n in ast.walk(made) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "reset"]
        if isinstance(one, ast.Name) and len(calls) == 1:
            yield one.id, receiver(calls[0])


def steps(loop: ast.AST) -> Iterator[tuple[ast.Assign, ast.Call, str]]:
    """Yield (statement, call, name of the first result) of `observation, reward, done, ... = env.step(action)`, of no loop within this one."""
    within = {
        id(n) for m in ast.walk(loop) if m is not loop and isinstance(m, (ast.For, ast.While)) for n in ast.walk(m)
    }
    for node in ast.walk(loop):
        if not isinstance(node, ast.Assign) or id(node) in within or not isinstance(node.value, ast.Call):
            continue
        target, call = node.targets[0], node.value
        if not isinstance(target, ast.Tuple) or len(target.elts) < RESULTS or getattr(call.func, "attr", "") != "step":
            continue
        if isinstance(target.elts[0], ast.Name):
            yield node, call, target.elts[0].id


def changed(loop: ast.AST, name: str) -> bool:
    """Return whether a loop assigns a name or may change its value in place: an entry is set, or one of its methods is a statement."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            return True
        if (
            isinstance(node, (ast.Subscript, ast.Attribute))
            and not isinstance(node.ctx, ast.Load)
            and name in loaded(node.value)
        ):
            return True
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and receiver(node.value).split(".")[0] == name
        ):
            return True
        if isinstance(node, ast.Call) and any(k.arg == "out" and name in loaded(k.value) for k in node.keywords):
            return True
    return False


def unread_actions(source: Source) -> Fault | None:
    """Find an update that unpacks the actions of stored transitions, never reads them, and differentiates the highest value of an output."""
    for file, scope in scopes(source):
        lines = [n for n in inside(scope) if isinstance(n, ast.Assign)] if trains(scope) else []
        for node in lines:
            names = stored(node) if isinstance(node.targets[0], ast.Tuple) else {}
            actions = [n for n in names if set(words(n)) & ACTIONS and not set(words(n)) & {"next", "new"}]
            if len(names) <= RESULTS or len(actions) != 1 or not any(set(words(n)) & REWARDS for n in names):
                continue
            own = {id(x) for n in lines if actions[0] in stored(n) for x in ast.walk(n)}
            if any(isinstance(n, ast.Name) and n.id == actions[0] and id(n) not in own for n in ast.walk(scope)):
                continue
            if (line := highest(scope)) is not None:
                return (
                    f"line {node.lineno} of {file} unpacks `{actions[0]}`, which nothing reads, and line {line} takes the highest value of a net's "
                    "outputs, with their gradient",
                    f"the values of the actions that were taken are meant: values.gather(1, {actions[0]})",
                )
    return None


def highest(scope: Scope) -> int | None:
    """Return the line in which an update takes the highest output of a net, outside of `no_grad()` and without `detach()`."""
    calm = {
        id(n)
        for block in ast.walk(scope)
        if isinstance(block, ast.With) and any("no_grad" in ast.unparse(i.context_expr) for i in block.items)
        for n in ast.walk(block)
    }
    for node in inside(scope):
        if not isinstance(node, ast.Assign) or id(node) in calm or "detach" in ast.unparse(node.value):
            continue
        for call in ast.walk(node.value):
            of = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
            if isinstance(of, ast.Call) and getattr(call.func, "attr", "") in HIGHEST and (call.args or call.keywords):  # type: ignore[attr-defined]
                text = ast.unparse(of.func)
                if not set(words(text)) & {"target", "tgt", "next", "old"} and not set(words(ast.unparse(of))) & {
                    "next",
                    "new",
                }:
                    return node.lineno
    return None


NEXT = {"next", "new", "n"}


def successor(name: str) -> str:
    """Return the name of what a name is the next one of: `obs` of `next_obs`, `s` of `s_`; empty for any other."""
    if name.endswith("_") and name.rstrip("_"):
        return name.rstrip("_")
    found = words(name)
    rest = [w for w in found if w not in NEXT]
    return "_".join(rest) if rest and len(rest) < len(found) else ""


def overwritten(source: Source) -> Fault | None:
    """Find `obs = next_obs`, and behind it, in the same block, a call that gets both: they are one."""
    for file, node in source.nodes:
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            for at, line in enumerate(block if isinstance(block, list) else ()):
                one = next(
                    ((t.id, v.id) for t, v in assigned(line) if isinstance(t, ast.Name) and isinstance(v, ast.Name)),
                    ("", ""),
                )
                if not one[0] or successor(one[1]) != "_".join(words(one[0])):
                    continue
                for later in block[at + 1 :]:  # type: ignore[index]
                    if isinstance(later, (ast.For, ast.While, ast.If)) or set(one) & stored(later).keys():
                        break
                    if (call := with_both(later, set(one))) is not None:
                        return (
                            f"line {call.lineno} of {file} stores `{one[0]}` and `{one[1]}`, and line {line.lineno} has set `{one[0]} = {one[1]}`: "
                            "they are one",
                            f"`{one[0]} = {one[1]}` belongs behind the line that stores the transition",
                        )
    return None


def with_both(statement: ast.stmt, names: set[str]) -> ast.Call | None:
    """Return the call of a statement that gets several names as they are, by themselves or in one tuple."""
    for call in ast.walk(statement):
        if isinstance(call, ast.Call):
            given = [*call.args, *(k.value for k in call.keywords)]
            given += [e for a in given if isinstance(a, (ast.Tuple, ast.List)) for e in a.elts]
            if names <= {getattr(a, "id", "") for a in given}:
                return call
    return None


def other_state(source: Source) -> Fault | None:
    """Find a value of the next state and an action that was drawn for the present one: `q(batch.next_obs, policy(batch.obs))`."""
    for file, scope in scopes(source):
        drawn: dict[str, tuple[str, int]] = {}  # action -> state that it was drawn for
        for node in sorted((n for n in inside(scope) if isinstance(n, ast.Assign)), key=lambda n: n.lineno):
            target, call = node.targets[0], node.value
            first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
            if not isinstance(first, ast.Name) or not isinstance(call, ast.Call):
                continue
            drawn.pop(first.id, None)
            if set(words(first.id)) & ACTIONS and set(words(first.id)) & NEXT and len(call.args) == 1:
                drawn[first.id] = (ast.unparse(call.args[0]), node.lineno)
        for call in (n for n in inside(scope) if isinstance(n, ast.Call) and len(n.args) == 2 and not n.keywords):
            state, action = call.args
            of, line = drawn.get(getattr(action, "id", ""), ("", 0))
            if (
                of
                and line < call.lineno
                and tail(state)
                and successor(tail(state)) == "_".join(words(of.rpartition(".")[2]))
            ):
                return (
                    f"line {call.lineno} of {file} takes the value of `{ast.unparse(state)}` and `{tail(action)}`, and line {line} draws that action "
                    f"for `{of}`",
                    f"the action of the next state is meant: pass `{ast.unparse(state)}` in line {line}",
                )
    return None
