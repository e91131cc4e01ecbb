"""Checks of the graph and its optimisers: which parameters get gradients, which change, and whether each step uses its
own gradients, once."""

import re

import torch
from torch import nn
from trainworthy.core.base.console import list_names
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.checks.invariants import moved_now, names, stepped, tops, with_and_without
from trainworthy.guard.checks.objectives import dropped_terms, unrestored
from trainworthy.guard.checks.results import finding, skip
from trainworthy.guard.hooks.parameters import parameters_of
from trainworthy.guard.measures.models.missing_gradients import swept, without
from trainworthy.guard.measures.records import CLOSE, Group, pretrained
from trainworthy.guard.observing.observer import Observer

POSITIONS = re.compile(r"pos(ition(s|al)?)?(_?(emb(ed(ding)?s?)?|enc(oding)?s?))?", re.IGNORECASE)
"""Names of parameters that hold positions."""


def wiring(seen: Observer) -> dict:
    """Compare the graph's leaves with the optimisers, both ways. Find parameters without gradients although their
    module ran, and lost updates."""
    groups = stepped(seen)
    if not groups:
        return unmoved_by_hand(seen)
    if any(swept(g) for g in groups):
        return skip("wiring", "all gradients are set to zero before the step")
    owned = {id(p) for g in seen.groups.values() for p in g.parameters}
    called = names(modules := tops())
    wrong, causes = [], []
    missing = [(i, p) for i, (p, n) in seen.leaves.items() if i not in owned and p.requires_grad and n >= 2]
    lost = [(i, p) for i, p in missing if fault(seen, i, modules, owned)]
    if lost:
        lost_names = [called.get(i, f"a parameter {tuple(p.shape)} of no module") for i, p in lost]
        wrong.append(f"{len(lost)} tensors get gradients and are in no optimiser: {list_names(lost_names, 3)}")
        causes.append(
            "the optimiser was built before these were added, replaced or unfrozen, or over a part of the model; "
            "or their modules are kept in a list or dict, not in a ModuleList"
        )
    for text, cause in without_gradients(seen, groups, called, missing, bool(lost)):
        wrong.append(text)
        causes += [cause] * bool(cause)
    if not wrong and (term := dropped_terms(seen)):
        wrong, causes = [term[0]], [term[1]]
    if flat := zeroed(seen, groups):
        wrong.append(
            f"the gradient of {len(flat)} tensors is exactly zero at each of the first {CLOSE} steps: "
            f"{list_names([called.get(i, '?') for i in flat], 3)}"
        )
        causes.append(
            "a loss with the weight 0 in the sum, factors of one product that all start at zero, a mask that is always 0, dead activations"
        )
    if called_twice := twins(seen):
        wrong += called_twice
        causes.append("copied code: a layer is called in place of its neighbour")
    if unmoved := [called.get(i, "?") for g in groups for i in standing(g)]:
        wrong.append(f"{len(unmoved)} tensors get a gradient and do not move: {list_names(unmoved, 3)}")
        causes.append("updates are lost to rounding (weights in bf16 or fp16 without an fp32 copy), or a zero rate")
    for text, cause in untrained(seen, modules):
        wrong.append(text)
        causes.append(cause)
    return finding(
        "wiring",
        "; ".join(wrong) or healthy(groups),
        "\n".join(causes),
        missing=[called.get(i) for i, _ in missing][:20],
    )


def without_gradients(
    seen: Observer, groups: list[Group], called: dict[int, str], missing: list, lost: bool
) -> list[tuple[str, str]]:
    """Find tensors in an optimiser that never got a gradient. `missing`: parameters with gradients that are in none; `lost`: whether that is
    a mistake."""
    dead, share, cut = unreached(seen, called)
    if dead and share > 0.999:
        cause = "the optimiser holds a copy of the model's parameters, or of a model that was replaced afterwards"
        return [(f"none of the {len(dead)} tensors in the optimiser ever got a gradient", cause)]
    if lost:
        return [(f"{len(dead)} tensors in an optimiser never got a gradient: {list_names(dead, 3)}", "")] * bool(dead)
    if text := shut(groups, missing):
        return [(text, "the optimiser was built over a part that was frozen or replaced afterwards")]
    if dead and cut:
        held = f"{share:.0%} of what the optimiser holds"
        text = f"{len(dead)} tensors ({held}) never got a gradient although their modules ran: {list_names(dead, 3)}"
        return [(text, "a detach(), no_grad(), argmax or .data cuts the graph above them")]
    if places := [name for name in dead if POSITIONS.fullmatch(name.rpartition(".")[2])]:
        cause = "their sum with the input is not assigned (x + self.pos_embed): the model does not know the order of its tokens"
        return [
            (f"the positions {list_names(places, 3)} never got a gradient, although the optimiser holds them", cause)
        ]
    if dead and seen.fits.shared >= CLOSE:
        text = f"one output is compared with two entries of the batch, and {len(dead)} tensors never got a gradient: {list_names(dead, 3)}"
        return [(text, "copied code: a loss reads another output than its own")]
    return []


def untrained(seen: Observer, modules: list[nn.Module]) -> list[tuple[str, str]]:
    """Find random weights that nothing trains: plain tensors, and layers that are created at every call. Find states that no step
    hands on."""
    found = []
    if state := seen.evidence.states.fault():
        measured = f"{state} is called step by step, each time with the same state"
        found.append((measured, "its new state is thrown away (output, _ = rnn(x, hidden)): pass it to the next step"))
    if plain := drawn_constants(seen, modules):
        measured = f"a random tensor that is no Parameter and no buffer is used as a weight: {list_names(plain, 3)}"
        cause = "it is neither trained nor saved: make it an nn.Parameter, or a buffer if it must not change"
        found.append((measured, cause))
    if anew := seen.evidence.made_anew.fault():
        measured = f"a layer is created anew, with new random weights, at every call of the model: {anew}"
        found.append((measured, "it is created inside forward(), and no optimiser has it: create it in __init__()"))
    return found


def healthy(groups: list) -> str:
    """What is said of optimisers without a fault."""
    total = sum(p.numel() for g in groups for p in g.parameters)
    nothing = all(g.steps and g.empty >= g.steps for g in groups)
    does = "get no gradient other than zero" if nothing else "get gradients and move"
    return f"{total:,} parameters in {len(groups)} optimiser{'s' if len(groups) > 1 else ''} {does}"


def unmoved_by_hand(seen: Observer) -> dict:
    """Without an optimiser: check that parameters with gradients change between the backward() calls."""
    rows = [p for p, n in seen.leaves.values() if n >= 8]
    if (
        seen.backwards >= 24
        and rows
        and seen.cleared >= 16
        and not any(moved_now(seen, p) for p in rows if id(p) in seen.snap)
    ):
        return finding(
            "wiring",
            f"{len(rows)} parameters got gradients from {seen.backwards} backward() calls, and none of them moved",
            "the update is assigned to a new tensor (p = p - lr * p.grad) and not to the parameter (p -= ... under no_grad)",
        )
    whole = whole_passes(seen)
    if whole >= 2 and any(g.parameters for g in seen.groups.values()) and rows:
        return finding(
            "wiring",
            f"{seen.backwards} backward() calls in {whole} whole passes over the data, and the optimiser made no step",
            "more batches are accumulated than an epoch has, and the count begins again in each; or step() is missing",
        )
    return skip("wiring", "no optimiser of torch.optim made a step")


def whole_passes(seen: Observer) -> int:
    """Count the passes over all of a loader that called backward() a few times."""
    return sum(p.ended and not p.was_cut and p.backwards >= 4 and p.got == p.length for p in seen.passes)


def shut(groups: list[Group], missing: list) -> str:
    """Return whether an optimiser holds frozen tensors alone, while others get gradients and are in no optimiser."""
    for g in groups:
        if (
            missing
            and g.steps >= CLOSE
            and g.parameters
            and not g.received
            and not any(p.requires_grad for p in g.parameters)
        ):
            return (
                f"the {len(g.parameters)} tensors in the optimiser are frozen, and {len(missing)} others get gradients "
                "and are in no optimiser"
            )
    return ""


def fault(seen: Observer, i: int, modules: list[nn.Module], owned: set[int]) -> bool:
    """Return whether it is a mistake that this parameter is in no optimiser. It is one if the parameter was frozen when
    an optimiser of its model was built and is not now, or if it is randomly initialised in a model with other trained
    parts, or in a model of its own at the beginning of the graph or at the end of a class loss: gradients pass through a fixed model, but
    end in a first one. Pretrained parts may stay untrained."""
    if any(i in g.asleep for g in seen.groups.values()):
        return True
    home = next((m for m in modules if any(id(p) == i for p in parameters_of(m))), None)
    moved = i in seen.snap and not torch.equal(seen.snap[i][0].detach().flatten()[:256], seen.snap[i][1])
    if moved or i in seen.loaded or pretrained(home):
        return False
    if home is None:
        return True
    if any(id(p) in owned for p in parameters_of(home)) or any(r.get("root") == id(home) for r in seen.calls):
        return True
    first = id(home) in seen.roots and id(home) not in seen.downstream
    if (
        first
        and not isinstance(home, torch.jit.ScriptModule)
        and not any(id(p) in seen.loaded for p in parameters_of(home))
    ):
        return True
    parts = {id(m) for m in home.modules()}
    inside = [seen.roots[r] for r, ms in seen.owner.items() if parts & ms and r in seen.roots and r not in parts]
    return any(id(p) in owned for m in inside for p in parameters_of(m))


def unreached(seen: Observer, called: dict[int, str]) -> tuple[list[str], float, bool]:
    """Return parameters in an optimiser that never got a gradient: names, their fraction, and whether a cut graph
    explains it."""
    trained, dead = with_and_without(seen, 3)
    total, dead_ids = max(1, sum(p.numel() for p in trained)), {id(p) for p in dead}
    ran = {id(p): order for m, order, _ in seen.called.values() for p in parameters_of(m, recurse=False)}
    whole = {
        id(p) for m, _, _ in seen.called.values() if next(m.children(), None) for p in parameters_of(m, recurse=False)
    }
    rows = [ran[id(p)] for p in dead if id(p) in ran and id(p) not in whole]  # a token of a whole model may go unused
    live = [ran[id(p)] for p in trained if id(p) not in dead_ids and id(p) in ran]
    part = sum(p.numel() for p in dead if id(p) in ran) / total
    cut = bool(rows) and (not live or min(rows) < min(live) or part > 0.5)
    return [called.get(id(p), f"a tensor {tuple(p.shape)}") for p in dead], sum(p.numel() for p in dead) / total, cut


def zeroed(seen: Observer, groups: list[Group]) -> list[int]:
    """Return ids of weights in two or more dimensions whose gradient is exactly zero, unless one of the same shape gets some (an expert that no
    sample was sent to) and the model is not dead as a whole."""
    found, matrices = [], [{id(p) for p in parameters_of(m) if p.dim() >= 2} for m in seen.roots.values()]
    for g in groups:
        if g.steps < CLOSE:
            continue
        mute = [p for p in g.parameters if id(p) in g.zero and p.dim() >= 2 and not moved_now(seen, p)]
        flat = {id(p): tuple(p.shape) for p in mute}
        live = {tuple(p.shape) for p in g.parameters if id(p) in g.received and id(p) not in g.zero}
        dead = set().union(*(m for m in matrices if m <= flat.keys()))
        found += [i for i, shape in flat.items() if shape not in live or i in dead]
    return found if len(found) >= 2 else []


def twins(seen: Observer) -> list[str]:
    """Find modules that are called twice within their parent's call while a neighbour of the same kind is never called."""
    owned = {id(p) for g in seen.groups.values() for p in g.parameters}
    found = []
    for top in seen.roots.values():
        for path, parent in top.named_modules():
            times = seen.counts.get(id(parent), 0)
            if not times or isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                continue
            kinds: dict[tuple, list[tuple[str, int]]] = {}
            for name, child in parent.named_children():
                shapes = tuple(tuple(p.shape) for p in parameters_of(child))
                if shapes and all(id(p) in owned for p in parameters_of(child)):
                    kinds.setdefault((type(child), shapes), []).append((name, seen.counts.get(id(child), 0)))
            for rows in kinds.values():
                twice = [name for name, n in rows if n == 2 * times]
                never = [name for name, n in rows if not n]
                if len(twice) == 1 and len(never) == 1:
                    found.append(f"{path + '.' if path else ''}{twice[0]} is called twice and {never[0]} never")
    return found[:2]


def unmoved(group: Group, rows: list[float]) -> bool:
    """Return whether less than half of the entries with the largest gradients changed, at every step whose rate is no
    longer rising."""
    rates = group.rates[: len(rows)]
    usable = [r for r, rate in zip(rows, rates, strict=False) if rate > 0.5 * max(group.rates)]
    return len(usable) >= 3 and max(usable) < 0.5


def standing(group: Group) -> list[int]:
    """Return the parameters that do not move. A few fp32 tensors whose values are too large for a small rate (norm
    weights of 1 at 4e-8) may wait: their updates are below the rounding of single precision."""
    found = {i for i, rows in group.moved.items() if unmoved(group, rows)}
    sizes = {id(p): p.numel() for p in group.parameters}
    if sum(sizes.get(i, 0) for i in found) > 0.05 * sum(sizes.values()):
        return list(found)
    rate = max(group.rates)
    waits = {id(p) for p in group.parameters if p.dtype == torch.float32 and id(p) in found
             and 0 < rate <= torch.finfo(p.dtype).eps * float(p.detach().abs().max())}  # fmt: skip
    return [i for i in group.moved if i in found - waits]


def drawn_constants(seen: Observer, modules: list[nn.Module]) -> list[str]:
    """Find plain tensor attributes of a trained model that look normally distributed and stay the same object."""
    found = []
    inside = {id(m): (top, name) for top in modules for name, m in top.named_modules()}
    for (i, name), value in seen.plain.items():
        if i not in inside or value.numel() < 16 or value.dim() < 2:
            continue
        top, prefix = inside[i]
        module = dict(top.named_modules())[prefix]
        if vars(module).get(name) is not value:
            continue
        x = to_double(value.detach().flatten()[:4096])
        z = ((x - x.mean()) / x.std().clamp_min(1e-30)).sort().values
        n = len(z)
        gap = (torch.special.ndtr(z) - (torch.arange(n) + 0.5) / n).abs().max().item()
        if float(x.std()) > 0 and gap < 0.9 / n**0.5 and len(z.unique()) > 0.9 * n:
            found.append(f"{prefix}.{name}".lstrip("."))
    return found


def gradients(seen: Observer) -> dict:
    """Find stale, discarded, missing or doubled gradients, and a short first accumulation window."""
    groups = stepped(seen)
    if not groups:
        idle = never_stepped(seen)
        return finding("gradients", *idle) if idle else skip("gradients", "no optimiser of torch.optim made a step")
    wrong, causes, missing = [], [], 0
    for g in groups:
        looked = g.looked or g.steps
        if g.stale >= max(2, 0.5 * (looked - 1)):
            wrong.append(f"at {g.stale} of {looked} steps the gradients hold those of the step before")
            causes.append("zero_grad() is missing, or is not called between step() and the next backward()")
        if g.empty >= max(2, 0.5 * looked) and not g.closure and not beside_the_graph(seen, g, groups):
            flat = g.flat >= min(CLOSE, looked)
            missing += 1
            if g.last_live and looked == g.steps and g.empty == looked - g.last_live:
                wrong.append(f"from step {g.last_live + 1} of {looked} on every gradient was exactly zero")
                causes.append(
                    "the outputs do not depend on the weights any more: dead activations, often of a ReLU at the end of the model"
                )
                continue
            wrong.append(
                f"at {g.empty} of {looked} steps {'every gradient was exactly zero' if flat else 'there was no gradient'}"
            )
            causes.append(without(g, flat))
        if g.silent == min(g.steps, CLOSE) >= 4 and not any(
            id(p) in g.received and moved_now(seen, p) for p in g.parameters
        ):
            missing += 1
            wrong.append(f"the loss is exactly 0 and has no gradient at the first {g.silent} steps: nothing is learnt")
            causes.append("all labels are ignored, all rewards are equal, or a mask removes every term")
        if g.twice >= max(2, 0.3 * looked):
            wrong.append(
                f"{g.twice} of {looked} steps used gradients that had been used already, without a new backward()"
            )
            causes.append("step() is called twice for one backward()")
        if len(groups) == 1 and (fault := unrestored(seen)):
            wrong.append(fault[0])
            causes.append(fault[1])
        short = short_window(g.windows) if len(groups) == 1 else ""
        if short:
            wrong.append(short)
            causes.append("the accumulation steps one batch early: (i + 1) % k is meant, not i % k")
    walked = min(seen.backwards, 2 * CLOSE)
    if seen.wasted >= max(3, 0.4 * walked):
        wrong.append(
            f"the gradients of {seen.wasted} of the first {walked} backward() calls were thrown away before any step"
        )
        causes.append(
            "zero_grad() is called for every batch and step() is not (a step outside the loop, or every k batches)"
        )
    looked = sum(g.looked or g.steps for g in groups)
    some = f", {looked} of them looked at" * (looked < sum(g.steps for g in groups))
    count = f"{seen.backwards} backward() calls, {seen.steps} steps{some}, each with its own gradients"
    windows = [g.windows[:12] for g in groups]
    return finding(
        "gradients", "; ".join(wrong) or count, "\n".join(causes), windows=windows, symptom=missing == len(wrong) > 0
    )


def never_stepped(seen: Observer) -> tuple[str, str] | None:
    """Find an optimiser that the script built and that made no step, while its weights got gradients and are as they were drawn."""
    if seen.steps or seen.backwards < 2 * CLOSE or whole_passes(seen) >= 2:  # `wiring` names the last
        return None
    for group in seen.groups.values():
        reached = [p for p in group.parameters if p.dim() > 1 and p.grad is not None]
        if reached and all(seen.drawn_weights.as_drawn(p) for p in reached):
            return (
                f"{seen.backwards} backward() calls, and {type(group.ref()).__name__} made no step: its weights still have their initial values",
                "step() is missing, or it waits for a condition that never comes (a counter of accumulated batches that only the step "
                "itself advances)",
            )
    return None


def beside_the_graph(seen: Observer, group: Group, groups: list[Group]) -> bool:
    """Return whether no loss depends on an optimiser's one tensor, while other optimisers step with gradients: some libraries make one for
    every parameter (Pyro), those of a fixed model, too. What should get gradients is found by `wiring`."""
    alone = len(group.parameters) == 1 and id(group.parameters[0]) not in seen.leaves
    return alone and any(g is not group and g.empty < 0.5 * g.steps for g in groups)


def short_window(windows: list[int]) -> str:
    """Return whether the first accumulation window has fewer batches than all others."""
    later = windows[1:4]
    if len(later) < 3 or len(set(later)) != 1 or later[0] < 2 or windows[0] >= later[0]:
        return ""
    return f"the first step came after {windows[0]} backward() calls, the next ones after {later[0]} each"


def clipping(seen: Observer) -> dict:
    """Check that clipping happens between backward and step."""
    calls = [c for g in stepped(seen) for c in g.clipped]
    if not calls:
        return skip("clipping", "nothing is clipped")
    words = {
        "none": (
            "clipping got no parameters",
            "clipping gets an iterator (filter(), model.parameters()) that the optimiser has already read to its end: make it a list",
        ),
        "empty": ("clipping found no gradients", "it is called before backward(), or after zero_grad()"),
        "late": ("clipping came after step()", "it is called after step(): nothing that trains is clipped"),
        "scaled": ("scaled gradients were clipped", "scaler.unscale_(optimizer) is missing before clip_grad_norm_"),
    }
    for state, (what, cause) in words.items():
        if calls.count(state) > 0.5 * len(calls):
            measured = f"{what} at {calls.count(state)} of {len(calls)} calls"
            return finding("clipping", measured, cause, symptom=state == "empty")
    return finding("clipping", f"{len(calls)} calls, between backward() and step()")
