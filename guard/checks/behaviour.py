"""Checks of what changes over time: freezing, modes, the evaluated model, saved weights."""

import re
from collections.abc import Callable

import torch
from torch import nn
from trainworthy.core.base.console import list_names
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.checks.invariants import moved_now, names, stepped, tops
from trainworthy.guard.checks.results import finding, skip
from trainworthy.guard.hooks import initial_weights
from trainworthy.guard.hooks.parameters import named_parameters_of, parameters_of
from trainworthy.guard.measures.data.scales import (
    DIFFERENT,
    SCALE,
    UNITS,
    begins_otherwise,
    fault,
    flat,
    goes_on,
    pooled,
)
from trainworthy.guard.measures.models.averages import share_left
from trainworthy.guard.measures.models.statistics import has_statistics, reads_its_mode
from trainworthy.guard.measures.records import DROPS, NORMS, Call
from trainworthy.guard.observing.observer import Observer, kept_by_reference


def frozen(seen: Observer) -> dict:
    """Check that frozen parameters stay and others train, and find ways of freezing that have no effect."""
    modules = tops()
    called, wrong, causes = names(modules), [], []
    for m in modules:
        for name, sub in m.named_modules():
            off = vars(sub).get("requires_grad") is False
            if off and any(p.requires_grad for p in parameters_of(sub)):
                wrong.append(
                    f"requires_grad = False was set on the module {name or type(sub).__name__}: its parameters train"
                )
                causes.append("a module has no such attribute: module.requires_grad_(False)")
        for name, p in named_parameters_of(m):
            odd = [k for k in vars(p) if re.fullmatch("requires?grad(ient)?", k.replace("_", ""))]
            if odd:
                wrong.append(f"{name} has an attribute {odd[0]}, which freezes nothing")
                causes.append("p.requires_grad = False, or p.requires_grad_(False)")
                break
    groups = stepped(seen)
    thawed = [p for g in groups for p in g.parameters if id(p) in g.frozen and id(p) in g.received]
    thawed = [called.get(id(p), "?") for p in thawed if moved_now(seen, p)]
    if thawed:
        wrong.append(
            f"{len(thawed)} tensors were frozen when the optimiser was built, and train: {list_names(thawed, 3)}"
        )
        causes.append(
            "something sets requires_grad back to True (the model's own train() or init), or the freezing comes after the optimiser was built"
        )
    moved = [called.get(i, "?") for g in groups for i in g.frozen_moved]
    if moved:
        wrong.append(f"{len(moved)} frozen tensors moved at step(): {list_names(moved, 3)}")
        causes.append("the optimiser still holds their gradient or momentum: leave frozen parameters out of it")
    received = {i for g in groups for i in g.received}
    for measure in (initial_weights.frozen_base, initial_weights.frozen_head):
        if not wrong and (fault := measure(seen.drawn_weights, list(seen.roots.values()), received)):
            wrong, causes = [fault[0]], [fault[1]]
    held = {id(p): p for m in modules for p in parameters_of(m) if not p.requires_grad}
    if not wrong and not held:
        return skip("frozen", "nothing is frozen")
    averaged = sum(moved_now(seen, p) for p in held.values())
    measured = f"{len(held) - averaged} frozen tensors stay as they are"
    measured += f"; {averaged} are changed by the script, without gradients (an average)" * bool(averaged)
    return finding("frozen", "; ".join(wrong) or measured, "\n".join(causes))


LAGS = 0.3  # share of the initial weights in an average that is evaluated
EACH = "between the steps"
LEFT = 20  # steps in eval mode
ENOUGH = 12  # gaps between steps with a call of a teacher
SUMMED = 1.8  # factor of a sum of two models' weights over one of them, about


def evaluations(seen: Observer) -> list[tuple[str, list[Call]]]:
    """Return the model calls of each evaluation: passes without gradients, and gaps with more calls than usual."""
    found = []
    for i, p in enumerate(seen.passes):
        if p.modes and not p.backwards and p.started and not p.refreshing:
            found.append((f"pass {i + 1}", p.modes))
    if not found:  # without the calls of the next step, of a reference or a target
        usual = seen.gaps.usual()
        found = [(f"after step {i}", seen.gaps[i][: -usual or None]) for i in seen.gaps.evaluations()]
    if not found:  # one call after every step: an evaluation where it is in eval mode
        calm = [c for g in seen.gaps[1:] for c in g if not c[1]]
        found = [(EACH, calm)] if len(calm) >= 4 else []
    if not found:  # one call on a whole split, after every epoch
        found = [(f"after step {i}", seen.gaps[i]) for i in seen.gaps.whole()]
    return found


def mostly(calls: list[Call], of: Callable[[Call], bool]) -> list[Call]:
    """Return the calls for which `of` holds, of the first model for which it holds in more than half of its calls. A head that is called by
    itself beside its body is a model of its own."""
    for model in dict.fromkeys(c[0] for c in calls):
        own = [c for c in calls if c[0] == model]
        if len(found := [c for c in own if of(c)]) > 0.5 * len(own):
            return found
    return []


def modes(seen: Observer) -> dict:
    """Check for train mode in training and eval mode in evaluation, if the mode makes a difference."""
    wrong, causes = [], []
    evals = evaluations(seen)
    # Dropout is the noise of a conditional generator (pix2pix): it stays on while pictures are sampled.
    makers = {maker for (_, maker), rows in seen.evidence.pushes.items() if maker and "made" in rows}
    for name, calls in evals:
        dropped = mostly(calls, lambda c: bool(c[2]) and not (c[1] and c[0] in makers))
        normed = mostly(calls, lambda c: bool(c[3]))
        if dropped:
            in_train = sum(c[1] for c in dropped)
            mode, cause = "eval", "F.dropout without training=self.training, or attention's dropout_p without it"
            if in_train:
                mode, cause = "train", "model.eval() is missing before the evaluation"
            wrong.append(f"dropout is active in the evaluation ({name}), model in {mode} mode")
            causes.append(cause)
        elif normed:
            wrong.append(f"batch norm uses and updates batch statistics in the evaluation ({name})")
            causes.append("model.eval() is missing before the evaluation")
        if wrong:
            break
    before = {i for s, i, mode in seen.grad_modes if mode and s < 3}
    first_eval = min((p.started for p in seen.passes if p.modes and not p.backwards and p.started), default=None)
    if first_eval is None:
        each = bool(evals) and evals[0][0] == EACH
        many = (
            i
            for i, g in enumerate(seen.gaps)
            if i and evals and (len(g) > 1 or i in seen.gaps.large or (each and any(not c[1] for c in g)))
        )
        first_eval = next(many, None)
    late = [(i, mode) for s, i, mode in seen.grad_modes if first_eval is not None and s > first_eval and i in before]
    off = [i for i, mode in late if not mode and matters(seen, i)]
    if late and len(off) > 0.9 * len(late):
        wrong.append("after the first evaluation the model trains in eval mode")
        causes.append("model.train() is missing at the start of the epoch, or eval() is not undone")
    elif again := resumed_in_eval(seen, before):
        wrong.append(f"after {again} evaluations within an epoch the model trains in eval mode")
        causes.append("model.train() is missing after the evaluation: the next epoch begins with it, too late")
    elif since := left_in_eval(seen):
        wrong.append(f"from step {since} on the model trains in eval mode")
        causes.append("eval() is not undone: model.train() is missing after what needed it")
    early = {i for i, mode, _, _ in seen.gaps[0] if not mode}
    never = [i for i in early if not before and all(not mode for _, j, mode in seen.grad_modes if j == i)]
    if any(drops(seen.roots[i]) and sum(j == i for _, j, _ in seen.grad_modes) > 3 for i in never):
        wrong.append("after an evaluation before the first step the model trains in eval mode")
        causes.append("model.train() is missing after it")
    for found in (seen.evidence.shares.fault(), wavering(seen)):
        if found:
            wrong, causes = [*wrong, found[0]], [*causes, found[1]]
    if wrong:
        return finding("modes", "; ".join(wrong), "\n".join(causes))
    if not evals:
        return skip("modes", "no evaluation was seen")
    if not any(matters(seen, i) for i in seen.roots):
        return finding("modes", "no dropout and no batch norm: the mode makes no difference")
    return finding("modes", "train mode while training, eval mode in evaluation")


def resumed_in_eval(seen: Observer, before: set[int]) -> int:
    """Return after how many evaluations the next step trained models in eval mode alone; 0 unless it was so after most of them."""
    ends = {p.started for p in seen.passes if p.calls and p.no_grad_calls == p.calls and 0 < p.started < seen.steps}
    following: dict[int, list[bool]] = {}
    for step, i, mode in seen.grad_modes:
        if step in ends and i in before and matters(seen, i):
            following.setdefault(step, []).append(mode)
    off = [step for step, found in following.items() if not any(found)]
    return len(off) if len(off) >= 2 and len(off) > 0.5 * len(following) else 0  # after others a new epoch began


def wavering(seen: Observer) -> Fault | None:
    """Find a teacher or reference whose dropout is active: between most steps it is called once without gradients, and its weights do not
    change. A moving average that answers with dropout (mean teacher) is meant."""
    trained = {i for _, i, _ in seen.grad_modes}
    gaps = [g for g in seen.gaps if g]
    for i, module in seen.roots.items():
        calls = [[c for c in g if c[0] == i] for g in gaps]
        once = sum(len(own) == 1 and own[0][1] and own[0][2] > 0 for own in calls)
        if i in trained or len(gaps) < ENOUGH or once < 0.8 * len(gaps) or not drops(module):
            continue
        known = [p for p in parameters_of(module) if id(p) in seen.snap]
        if known and not any(moved_now(seen, p) for p in known):
            return (
                f"a model that does not train ({type(module).__name__}) is called between the steps in train mode, with dropout",
                "eval() is missing for a teacher or a reference: its answers differ each time",
            )
    return None


def drops(module: nn.Module) -> bool:
    """Return whether it has dropout."""
    return any((isinstance(m, DROPS) and m.p > 0) for m in module.modules())


def matters(seen: Observer, root: int) -> bool:
    """Return whether a model's mode makes a difference: by its modules, or by F.dropout that was seen in its calls."""
    return root in seen.dropping or any(
        (isinstance(m, DROPS) and m.p > 0) or has_statistics(m) or reads_its_mode(type(m))
        for m in seen.roots[root].modules()
    )


def left_in_eval(seen: Observer) -> int:
    """Return the step from which on a model trains in eval mode alone, after it had begun in train mode; 0 if there is none."""
    for root in {i for _, i, mode in seen.grad_modes if not mode and i in seen.roots}:
        calls = [(step, mode) for step, i, mode in seen.grad_modes if i == root]
        on = [step for step, mode in calls if mode]
        off = [step for step, mode in calls if not mode]
        if on and min(off) > max(on) and len(off) >= LEFT and len(on) <= len(off) and matters(seen, root):
            return min(off)
    return 0


def lagging(seen: Observer) -> tuple[float, int] | None:
    """Return the share of the initial weights in an evaluated average that has not caught up with the weights, and how often its first
    tensor was changed in place (0: not known; `p.data.mul_()` does not count)."""
    for other in {c[0] for _, calls in evaluations(seen) for c in calls}:
        mine = list(parameters_of(seen.roots[other]))
        for model in seen.roots.values():
            pairs = list(zip(mine, parameters_of(model), strict=False))
            alike = [a.shape == b.shape and a is not b and b.requires_grad and id(b) in seen.snap for a, b in pairs]
            if len(mine) != len(list(parameters_of(model))) or not all(alike):
                continue
            firsts = [seen.snap[id(b)][1] for _, b in pairs]
            now, last = (
                [x.detach().flatten()[: len(f)] for x, f in zip(side, firsts, strict=True)]
                for side in zip(*pairs, strict=True)
            )
            if (left := share_left(torch.cat(now), torch.cat(last), torch.cat(firsts))) is not None and left > LAGS:
                return left, mine[0]._version
    return None


def evaluated(seen: Observer) -> dict:
    """Check that the evaluated model, including running statistics, has changed since training began, and that its
    inputs have the scale of training's."""
    if padded := seen.generations.fault():
        return finding("evaluated", *padded)
    generates = any(hasattr(m, "generate") and hasattr(m, "config") for m in seen.roots.values())
    if not generates and (turned := seen.evidence.padded_rows.turned()):
        return finding("evaluated", *turned)
    received = {i for g in seen.groups.values() for i in g.received} | seen.leaves.keys()
    trained = {
        i for i in {i for _, i, _ in seen.grad_modes} if any(id(p) in received for p in parameters_of(seen.roots[i]))
    }
    rows = {c[0] for _, calls in evaluations(seen) for c in calls}
    if not rows:
        return skip("evaluated", "no evaluation with a model call was seen")
    learner = [seen.roots[i] for i in trained if any(p.requires_grad for p in parameters_of(seen.roots[i]))]
    copies = {c[0] for name, calls in evaluations(seen) if name != EACH for c in calls}  # each step's is a reference
    if not copies and not rows & trained:
        return skip("evaluated", "no evaluation was seen; a model that does not train is called in each step")
    beside = references([[c[0] for c in calls] for _, calls in evaluations(seen)], trained)
    for i in copies - trained - beside:
        other = seen.roots[i]
        shape = [tuple(p.shape) for p in parameters_of(other)]
        alike = [m for m in learner if [tuple(p.shape) for p in parameters_of(m)] == shape]
        if not alike or {id(p) for p in parameters_of(other)} & {id(p) for p in parameters_of(alike[0])}:
            continue
        kept = [seen.snap[id(p)] for p in parameters_of(other) if id(p) in seen.snap]
        steps = max((g.steps for g in stepped(seen)), default=0)
        if (
            kept
            and steps >= 8
            and not any(moved_now(seen, p) for p, _ in kept)
            and any(moved_now(seen, p) for p in parameters_of(alike[0]))
        ):
            return finding(
                "evaluated",
                "the evaluated model is a copy that has not moved since training began",
                "an average (EMA) is never updated, or the evaluation uses another object than the one that trains",
            )
        bare = [m for m in tracking(other) if initial(m)]
        full = [m for m in tracking(alike[0]) if int(m.num_batches_tracked) > 3]
        if bare and full and not any(m.training for m in bare):
            return finding(
                "evaluated",
                "the evaluated average holds batch norm's initial statistics, the trained model does not",
                "the average (EMA) copies parameters and forgets buffers",
            )
        if (times := larger(other, alike)) > SUMMED and any(moved_now(seen, p) for p, _ in kept):
            return finding(
                "evaluated",
                f"the weights of the evaluated model are at least {times:.2g} times as large as those of the models that train",
                "an average of weights is a sum: the division by their number is missing, or is outside of the loop over the entries",
            )
    for i in rows & trained:
        calls, resting = seen.resting.get(i, [0, 0])
        if calls >= 2 and resting == calls and any(moved_now(seen, p) for p in parameters_of(seen.roots[i])):
            return finding(
                "evaluated",
                f"in all {calls} calls of the evaluation the model had its initial weights, and trained on with others",
                "an average (EMA) that is never updated is copied into the model for the evaluation",
            )
    return scales(seen, rows & trained)


def references(evaluations: list[list[int]], trained: set[int]) -> set[int]:
    """Return the models that are called beside a trained one, batch by batch, and never alone: DPO compares with a reference."""
    alone, beside = set(), set()
    for calls in evaluations:
        for i in set(calls) - trained:
            places = [k for k, j in enumerate(calls) if j == i]
            near = sum(not trained.isdisjoint(calls[max(0, k - 1) : k + 2]) for k in places)
            (beside if near > 0.8 * len(places) else alone).add(i)
    return beside - alone


def initial(norm: nn.Module) -> bool:
    """Return whether a batch norm's statistics are those that it began with. Its count alone says nothing: a decay of 0.99 rounds it down to 0."""
    mean = getattr(norm, "running_mean", None)
    return not int(norm.num_batches_tracked) and (mean is None or not bool(mean.any()))  # type: ignore[arg-type]


def tracking(model: nn.Module) -> list:
    """Return its batch norms with running statistics."""
    return [m for m in model.modules() if isinstance(m, NORMS) and m.track_running_stats]


def larger(model: nn.Module, others: list[nn.Module]) -> float:
    """Return by which factor each weight matrix of a model is larger than that of all others, at least."""
    rows = [x for x in zip(*(parameters_of(m) for m in (model, *others)), strict=True) if x[0].dim() > 1]
    norms = ([x.detach().norm() for x in row] for row in rows)
    return min((float(a / max(rest).clamp_min(1e-12)) for a, *rest in norms), default=0.0)


def scales(seen: Observer, both: set[int]) -> dict:
    """Compare a model's inputs in training and in evaluation."""
    for i in both & seen.inputs["train"].keys():
        if constant := flat(seen.inputs["train"][i]):
            return finding("evaluated", constant, UNITS)
    for i in both & seen.inputs["train"].keys() & seen.inputs["eval"].keys():
        ours, theirs = seen.inputs["train"][i], seen.inputs["eval"][i]
        a, b = ([row for row in one.rows if row[1] == row[1]] for one in (ours, theirs))
        other = fault(ours, theirs)
        if len(a) < 3 or not b:
            if other:
                return finding("evaluated", other, DIFFERENT)
            continue
        (mean_a, std_a), (mean_b, std_b) = pooled(a), pooled(b)
        spread = max(std_a, std_b)
        measured = (
            f"inputs: mean {mean_a:.3g}, std {std_a:.3g} in training; mean {mean_b:.3g}, std {std_b:.3g} in evaluation"
        )
        ratio = 1.9 if ours.dim == 4 else SCALE  # images of one kind have one scale; a time series may drift
        far = spread > ratio * min(std_a, std_b) or abs(mean_a - mean_b) > 2 * spread
        read = [(p.loader, p.got) for p in seen.passes if p.calls and not p.backwards]
        if far and not goes_on(ours, theirs) and not begins_otherwise(read, ours.dim):
            other = measured
        if other:
            return finding("evaluated", other, DIFFERENT)
        return finding("evaluated", f"the trained model; {measured}")
    return finding("evaluated", "the trained model is evaluated")


def state(seen: Observer) -> dict:
    """Find state_dicts that share memory with the weights while training continues, and loads that load nothing."""
    if seen.self_loads:
        return finding(
            "state",
            "load_state_dict() got the model's own tensors: nothing was restored",
            "the best weights were kept as references, not copies: use copy.deepcopy(model.state_dict())",
        )
    step = seen.by_reference or kept_by_reference(seen)
    if step is not None:
        return finding(
            "state",
            f"a state_dict taken after step {step} is still held and changes with the weights",
            "state_dict() returns references, not copies: use copy.deepcopy(model.state_dict())",
        )
    if seen.empty_saves:
        return finding(
            "state",
            "torch.save() got an empty dict after training began",
            "no name matches the filter of what is saved (a prefix or suffix was renamed)",
        )
    if seen.partial_loads:
        return finding("state", *seen.partial_loads[0])
    if exchanged := seen.evidence.pulled.fault(lambda p: id(p) not in seen.snap or moved_now(seen, p)):
        return finding("state", *exchanged)
    if not seen.held and not seen.loaded:
        return skip("state", "no state_dict was taken or loaded")
    return finding("state", "no state_dict is kept by reference")
