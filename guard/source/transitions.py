"""Finds what reinforcement learning takes from another step: an observation, an action, the end of an episode."""

import ast
from collections.abc import Iterator

from trainworthy.core.base.names import words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import assigned, loaded, stored, variables
from trainworthy.guard.source.calls import methods, owner, passed, trains
from trainworthy.guard.source.nodes import LOOPS, blocks, inside, nested, only, tail, variable
from trainworthy.guard.source.reading import Source

ACTIONS, REWARDS = {"action", "actions", "act", "acts"}, {"reward", "rewards", "rew", "rews"}
ENDS = {"done", "dones", "terminal", "terminals", "terminated", "terminations", "ends"}
NEXT = {"next", "new", "n"}


def first_kept(source: Source) -> Fault | None:
    """Find a loop that chooses its actions by what `reset()` returned, and never replaces it by what `step()` returns."""
    for file, scope in source.plain_scopes:
        starts = {name: where for node in inside(scope) for name, where in begun(node)}
        for loop in only(inside(scope), LOOPS) if starts else ():
            for node, call, found in steps(loop):
                made = [n for n in ast.walk(loop) if isinstance(n, ast.Assign) and stored(n).keys() & loaded(call)]
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
    for target, value in assigned(node):
        match target, list(methods(ast.walk(value), "reset")):
            case ((ast.Name(id=name) | ast.Tuple(elts=[ast.Name(id=name), *_])), [call]):
                yield name, receiver(call)  # observation, info = env.reset()


def steps(loop: ast.AST) -> Iterator[tuple[ast.Assign, ast.Call, str]]:
    """Yield (statement, call, name of the first result) of `observation, reward, done, ... = env.step(action)`, of no loop within this one."""
    within = nested(loop)
    for node in ast.walk(loop):
        match node:
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(id=name), _, _, *_]), *_],
                value=ast.Call(func=ast.Attribute(attr="step")) as call,
            ) if id(node) not in within:
                yield node, call, name


def changed(loop: ast.AST, name: str) -> bool:
    """Return whether a loop assigns a name or may change its value in place: an entry is set, or one of its methods is a statement."""
    for node in ast.walk(loop):
        match node:
            case ast.Name(id=one, ctx=ast.Store() | ast.Del()) if one == name:
                return True
            case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
                if name in loaded(node.value):
                    return True
            case ast.Expr(value=ast.Call() as call) if receiver(call).split(".")[0] == name:
                return True
            case ast.Call(keywords=keys) if any(k.arg == "out" and name in loaded(k.value) for k in keys):
                return True
    return False


def unread_actions(source: Source) -> Fault | None:
    """Find an update that unpacks the actions of stored transitions, never reads them, and differentiates the highest value of an output."""
    for file, scope in source.plain_scopes:
        lines = only(inside(scope), ast.Assign) if trains(scope) else []
        for node in lines:
            names = stored(node) if isinstance(node.targets[0], ast.Tuple) else {}
            actions = [n for n in names if set(words(n)) & ACTIONS and not set(words(n)) & {"next", "new"}]
            if len(names) < 4 or len(actions) != 1 or not any(set(words(n)) & REWARDS for n in names):
                continue
            own = {id(x) for n in lines if actions[0] in stored(n) for x in ast.walk(n)}
            if any(variable(n) == actions[0] and id(n) not in own for n in ast.walk(scope)):
                continue
            if (line := highest(scope)) is not None:
                return (
                    f"line {node.lineno} of {file} unpacks `{actions[0]}`, which nothing reads, and line {line} takes the highest value of a net's "
                    "outputs, with their gradient",
                    f"the values of the actions that were taken are meant: values.gather(1, {actions[0]})",
                )
    return None


def highest(scope: ast.AST) -> int | None:
    """Return the line in which an update takes the highest output of a net, outside of `no_grad()` and without `detach()`."""
    withs = [(w, i.context_expr) for w in only(ast.walk(scope), ast.With) for i in w.items]
    calm = {id(n) for w, context in withs if "no_grad" in ast.unparse(context) for n in ast.walk(w)}
    for node in only(inside(scope), ast.Assign):
        if id(node) in calm or "detach" in ast.unparse(node.value):
            continue
        for call in methods(ast.walk(node.value), "max", "amax"):
            of = call.func.value
            if isinstance(of, ast.Call) and (call.args or call.keywords):
                net, whole = set(words(ast.unparse(of.func))), set(words(ast.unparse(of)))
                if not net & {"target", "tgt", "next", "old"} and not whole & {"next", "new"}:
                    return node.lineno
    return None


def successor(name: str) -> str:
    """Return the name of what a name is the next one of: `obs` of `next_obs`, `s` of `s_`; empty for any other."""
    if name.endswith("_") and name.rstrip("_"):
        return name.rstrip("_")
    found = words(name)
    rest = [w for w in found if w not in NEXT]
    return "_".join(rest) if rest and len(rest) < len(found) else ""


def overwritten(source: Source) -> Fault | None:
    """Find `obs = next_obs`, and behind it, in the same block, a call that gets both: they are one."""
    for file, block in source.blocks:
        for at, line in enumerate(block):
            pairs = [(t.id, v.id) for t, v in assigned(line) if isinstance(t, ast.Name) and isinstance(v, ast.Name)]
            if not pairs or successor(pairs[0][1]) != "_".join(words(pairs[0][0])):
                continue
            one, new = pairs[0]
            for later in block[at + 1 :]:
                if isinstance(later, (*LOOPS, ast.If)) or {one, new} & stored(later).keys():
                    break
                if (call := with_both(later, {one, new})) is not None:
                    return (
                        f"line {call.lineno} of {file} stores `{one}` and `{new}`, and line {line.lineno} has set `{one} = {new}`: they are one",
                        f"`{one} = {new}` belongs after the line that stores the transition",
                    )
    return None


def with_both(statement: ast.stmt, names: set[str]) -> ast.Call | None:
    """Return the call of a statement that gets several names as they are, by themselves or in one tuple."""
    for call in only(ast.walk(statement), ast.Call):
        given = passed(call)
        given += [e for a in given if isinstance(a, (ast.Tuple, ast.List)) for e in a.elts]
        if names <= set(map(variable, given)):
            return call
    return None


def other_state(source: Source) -> Fault | None:
    """Find a value of the next state and an action that was drawn for the present one: `q(batch.next_obs, policy(batch.obs))`."""
    for file, scope in source.plain_scopes:
        drawn: dict[str, tuple[str, int]] = {}  # action -> state that it was drawn for
        for node in sorted(only(inside(scope), ast.Assign), key=lambda n: n.lineno):
            match node.targets[0], node.value:
                case ((ast.Name(id=name) | ast.Tuple(elts=[ast.Name(id=name), *_])), ast.Call(args=given)):
                    drawn.pop(name, None)
                    if set(words(name)) & ACTIONS and set(words(name)) & NEXT and len(given) == 1:
                        drawn[name] = (ast.unparse(given[0]), node.lineno)
        for call in inside(scope) if drawn else ():
            match call:
                case ast.Call(args=[state, ast.Name(id=action)], keywords=[]) if action in drawn and tail(state):
                    of, line = drawn[action]
                    if line < call.lineno and successor(tail(state)) == "_".join(words(of.rpartition(".")[2])):
                        return (
                            f"line {call.lineno} of {file} takes the value of `{ast.unparse(state)}` and `{action}`, and line {line} draws "
                            f"that action for `{of}`",
                            f"the action of the next state is meant: pass `{ast.unparse(state)}` in line {line}",
                        )
    return None


def shifted(source: Source) -> Fault | None:
    """Find advantages that mask the next value by the end of another step.

    Some loops store, for each step, whether the observation before it began an episode (`dones[t] = next_done`, then `env.step()`): the next
    value is then masked by `dones[t + 1]`. Others store what the step returned: it is masked by `dones[t]`.
    """
    for file, scope in source.scopes:
        ends = dict(rollouts(scope))
        for block in (b for n in ast.walk(scope) for b in blocks(n)) if ends else ():
            parts = [n for s in block if isinstance(s, (ast.Assign, ast.AugAssign, ast.Expr)) for n in ast.walk(s)]
            parts = [n for n in parts if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Load)]
            read = [(tail(n.value), ast.unparse(n.slice), n.lineno) for n in parts]
            ahead = {at.removesuffix(" + 1") for name, at, _ in read if at.endswith(" + 1") and name not in ends}
            for name, at, line in read:
                step = at.removesuffix(" + 1")
                if name not in ends or step not in ahead or {a for n, a, _ in read if n == name} != {at}:
                    continue
                began = at == step
                if ends[name] == began:
                    return (
                        f"line {line} of {file} masks the value of step {step} + 1 by `{name}[{at}]`, which is "
                        f"whether step {step} {'began an episode' if began else '+ 1 ended one'}",
                        f"`{name}[{step}{' + 1' if began else ''}]` is meant: `{name}` is stored {'before' if began else 'after'} env.step() "
                        "for each step",
                    )
    return None


def rollouts(scope: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield (array, whether it holds what was known before the step) of the ends that a loop around `env.step()` stores."""
    for loop in only(ast.walk(scope), ast.For):
        places = [k for k, s in enumerate(loop.body) for c in methods(ast.walk(s), "step") if "env" in owner(c).lower()]
        for k, s in enumerate(loop.body) if len(set(places)) == 1 else ():
            match s:
                case ast.Assign(targets=[ast.Subscript(value=base)], value=value) if k != places[0]:
                    later = {n.id for one in loop.body[places[0] :] for n in ast.walk(one)
                             if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}  # fmt: skip
                    ends = any(set(words(v)) & ENDS for v in variables(value) & later)
                    if ends and set(words(tail(base))) & ENDS:
                        yield tail(base), k < places[0]
