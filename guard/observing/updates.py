"""Records gradients and weight updates: backward passes, clipping, optimiser steps. A part of `observer.Observer`."""

import gc
import inspect
import weakref
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.guard.hooks import events
from trainworthy.guard.hooks.parameters import parameters_of
from trainworthy.guard.hooks.trees import floats, tensors
from trainworthy.guard.measures.data.scales import Measures
from trainworthy.guard.measures.models.autograd import nodes
from trainworthy.guard.measures.records import (
    CLOSE,
    EPOCHS,
    STEPS,
    Call,
    Group,
    alive,
    named,
    on_gradient,
    rate_functions,
    scopes_of,
    spots,
    values,
    weights,
)
from trainworthy.guard.measures.trainers.at_work import trainer_of

COLUMNS = 8  # of an input without a loader, from which on its scale is compared
READS = 40  # such inputs that are read
UNDECIDED = 2000  # calls in eval mode that are kept until the next step
LAST = 4  # optimisers of a whole run that are kept for the checks at its end
CALM = 64  # calls of a model without gradients whose weights are compared with the initial ones


class Updates:
    """The events between the loss and the new weights. `Observer` holds the attributes."""

    def before_backward(self, tensors: Any) -> None:
        roots = [t for t in ([tensors] if isinstance(tensors, Tensor) else list(tensors)) if isinstance(t, Tensor)]
        value = float(roots[0].detach().float().sum()) if roots else 0.0
        self.losses.append(value)
        if value != value or abs(value) == float("inf"):
            self.nonfinite.append(self.backwards)
        if self.restart is not None and not self.backwards:
            self.restart.backward(self)
        if not self.snap and self.steps == 0:
            self._snapshot()
        if self.ranks > 1 and not self.trace:
            self._trace()
        for group in self.groups.values():
            if group.consumed and not any(alive(p) for p in group.probe):
                group.consumed = False
        if self._last and not self.since_step:
            untouched = all(p._version == v for p, v in self._last)
            if untouched and not any(alive(p) for p, _ in self._last):
                self.wasted += 1
        if not self.groups and self.leaves:
            self.cleared += not alive(next(iter(self.leaves.values()))[0])
        self._plain_leaf = self.backwards >= 2 * CLOSE  # a graph that was not walked may hold an input's gradient
        self.busy = True
        self.evidence.broadcast(roots)
        if self.control is not None:
            self.evidence.look(roots)
        self.busy = False
        self.evidence.before_backward(list(self.groups.values()), self.steps)
        if self.backwards < 2 * CLOSE:
            self._walk(roots)

    def _walk(self, roots: list[Tensor]) -> None:
        """Record every leaf of the graph that requires a gradient."""
        plain = []
        for node in nodes(*(t.grad_fn for t in roots)):
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter):
                self.leaves[id(leaf)] = (leaf, self.leaves.get(id(leaf), (leaf, 0))[1] + 1)
            elif leaf is not None:
                self._plain_leaf = True
                plain.append(leaf)
                kept = self.others.get(id(leaf))
                self.others[id(leaf)] = (leaf, kept[1] + 1, kept[2]) if kept else (leaf, 1, leaf._version)
        self.input_differentiated(plain)

    def backward(self) -> None:
        self.backwards += 1
        self.since += 1
        self.since_step = False
        self._last = []
        if not self._plain_leaf:
            for group in self.groups.values():
                self._last += [(p, p._version) for p in self._live(group)]
        for group in self.groups.values():
            group.backwards += 1
            if group.reached < CLOSE:
                group.reached += bool(self._live(group))
            if self._scaler is not None:
                group.scaled, group.unscaled = True, False
        for one in self.recent:
            if one.calls:
                one.backwards += 1
        if self.control is not None:
            self.control.backward(self)

    since_step = True
    in_use: list[torch.optim.Optimizer]
    """Optimisers that made a step since the newest one was first seen. The list keeps them alive until the checks run."""

    def perhaps_evaluation(self, row: Call, given: tuple, out: Any) -> None:
        """A model was called with gradients. In eval mode, and if no `backward()` reaches its outputs until the next step, that is an
        evaluation without `no_grad()`."""
        if row[1]:
            self.gaps.trained(given)
        if row[2]:
            self.dropping.add(row[0])
        outs = [x for x in tensors(out) if x.grad_fn is not None][:8]
        if row[1] or self.control is None or not outs or len(self.undecided) >= UNDECIDED:
            return
        reached: list[bool] = []
        for x in outs:
            on_gradient(x, lambda _: reached.append(True))
        self.undecided.append((row, reached, len(self.grad_modes) - 1))

    def unloaded(self, module: nn.Module, given: tuple, grad: bool) -> None:
        """Note the inputs of a loop without a loader: of training batches, and of calls on a whole split. Of few columns an evaluation may
        show more than training had (a function that is drawn beyond its data)."""
        x = next(iter(floats(given)), None)
        if self.control is None or x is None or x.dim() < 2 or not len(x) or x[0].numel() < COLUMNS:
            return
        kind = "train" if grad and module.training else "eval" if len(self.gaps) - 1 in self.gaps.large else ""
        if kind and len((rows := self.inputs[kind].setdefault(id(module), Measures())).rows) < READS:
            rows.read(x)

    def _decide(self) -> None:
        """Before a step is counted: put these calls where those without gradients are."""
        for row, reached, place in reversed(self.undecided):
            if not reached:
                self.gaps[-1].append(row)
                del self.grad_modes[place]
        self.undecided = []

    def _live(self, group: Group) -> list[Tensor]:
        """Return up to three parameters with a non-zero gradient, from a few candidates."""
        return list(islice(filter(alive, group.parameters[:40]), 3))

    def clip(self, parameters: list[Tensor]) -> None:
        live = [p for p in parameters if p.grad is not None]
        ids = {id(p) for p in parameters}
        for group in self.groups.values():
            if not ids:
                group.clipped.append("none")
            if ids & {id(p) for p in group.parameters}:
                state = "late" if group.consumed and not self.since else "ok"
                if not any(alive(p) for p in live):
                    state = "empty"
                if group.scaled and not group.unscaled and self._scaler and self._scaler > 1:
                    state = "scaled"
                group.clipped.append(state)

    # --- optimisers

    def built(self, it: torch.optim.Optimizer) -> None:
        """The script built an optimiser: a later training may begin with it. Environments step before a model is called."""
        self.evidence.environments(events.replace)
        if self.control is not None:
            self.control.another(self.steps)
            if self.control.arrives():
                self.forget()
        self.optimizer(it)

    def optimizer(self, it: torch.optim.Optimizer) -> None:
        params = [p for g in it.param_groups for p in g["params"]]
        asleep = {id(p) for m in gc.get_objects() if issubclass(type(m), nn.Module)
                  for p in m._parameters.values() if p is not None and not p.requires_grad}  # fmt: skip
        own = {id(p) for p in params if not p.requires_grad}
        self.groups[id(it)] = Group(
            weakref.ref(it), own, asleep, built=tuple(float(g.get("lr", 0.0)) for g in it.param_groups)
        )
        self.in_use = []

    def scaled(self, factor: float) -> None:
        self._scaler = factor

    def unscale(self, it: Any) -> None:
        group = self.groups.get(id(it))
        if group:
            group.unscaled = True

    def scaler_step(self) -> None:
        self._last = []  # a skipped step is the scaler's own decision
        self.since_step = True

    def before_step(self, it: torch.optim.Optimizer, closure: Any) -> None:
        if id(it) not in self.groups:
            self.optimizer(it)
        group = self.groups[id(it)]
        group.closure = group.closure or closure is not None
        group.before, group.held = [], []
        self.evidence.before_step(group, self)
        if closure is not None:
            return
        params = group.parameters
        if group.steps < CLOSE:
            ready = [p for p in params if p.grad is not None]
            group.received |= {id(p) for p in ready}
            live = [p for p in ready if alive(p)]
            if live and self._lossy():
                unreached = {id(p) for p in ready} - {id(p) for p in live}
                group.zero = unreached if not group.steps else group.zero & unreached
            else:
                group.zero = set()
            group.empty += not live and self._lossy()
            group.flat += not live and bool(ready) and self._lossy()
            group.silent += not live and not self._lossy()
            group.nonfinite += any(not bool(torch.isfinite(values(p)).all()) for p in live)
            sizes = [float(values(p).abs().max()) for p in live[:40]]
            # Without a bias before a norm
            loud = [p for p, size in zip(live, sizes, strict=False) if size > 1e-4 * max(sizes)]
            group.before = [spots(p) for p in loud if not p.grad.is_sparse]
            group.held = [(p, p.detach().clone()) for p in params if not p.requires_grad and p.numel() < 10**7][:100]
        else:
            group.received |= {id(p) for p in params if p.grad is not None and id(p) not in group.received}
            group.empty += not self._live(group) and self._lossy()
        group.looked += 1
        group.stale += group.consumed and group.backwards > 0
        group.probe = self._live(group)
        group.last_live = group.steps + 1 if group.probe else group.last_live
        marks = [values(p).detach().flatten()[:64].clone() for p in group.probe]  # a loop may set gradients itself
        same = len(marks) == len(group.marks) and all(map(torch.equal, marks, group.marks))
        group.twice += group.consumed and group.backwards == 0 and same
        group.marks = marks
        if marks and not same and group.backwards == 0:  # by torch.autograd.grad
            for one in self.recent:
                one.backwards += 1

    def _lossy(self) -> bool:
        """Return whether the loss is above zero: a hinge loss of zero has no gradient."""
        return not self.losses or self.losses[-1] != 0

    def step(self, it: torch.optim.Optimizer) -> None:
        group = self.groups[id(it)]
        if not any(one is it for one in self.in_use):
            self.in_use.append(it)
            if self.control is None:  # of a whole run: the checks at its end need them, and folds may build many
                del self.in_use[:-LAST]
        rates = [float(g.get("lr", 0.0)) for g in it.param_groups]
        group.rates.append(max(rates, default=0.0))
        group.levelled += len(rates) == len(group.built) and len(set(rates)) == 1 < len(set(group.built))
        for p, where, old in group.before:
            share = float((p.detach().flatten()[where] != old).float().mean()) if len(where) else 1.0
            group.moved.setdefault(id(p), []).append(share)
        group.frozen_moved |= {id(p) for p, old in group.held if not torch.equal(p.detach(), old)}
        if group.closure:
            group.received |= {id(p) for p in group.parameters if p.grad is not None}
        group.before, group.held = [], []
        group.windows.append(group.backwards)
        group.backwards, group.consumed = 0, not group.closure
        group.span = (group.span[0] if group.steps else self.steps, self.steps)
        group.steps += 1
        if (
            group.steps == 1 and self.control is not None
        ):  # a script's main() may end within a rehearsal, and its trainer with it
            self.trainer = trainer_of({id(p) for p in group.parameters}) or self.trainer
        self._decide()
        self.steps += 1
        self.since, self.since_step = 0, True
        self._last = []
        if self.control is not None:
            self.indexed.step()
        self.gaps.append([])
        self.evidence.step(group)
        if self.steps == CLOSE and self.control is not None:
            scopes = scopes_of(inspect.currentframe())
            self.epochs = named(scopes, EPOCHS)
            self.planned = named(scopes, STEPS)
            self.rates_by_hand = rate_functions(scopes)
        if self.ranks > 1 and self.steps <= CLOSE:
            self._trace()
        for one in self.recent:
            one.steps += one.backwards > 0
        if self.control is not None:
            self.control.step(self)

    def evaluated_with(self, module: nn.Module) -> None:
        """Count the calls without gradients, and those of them in which the weights are the initial ones."""
        row = self.resting.setdefault(id(module), [0, 0])
        if self.steps >= CLOSE and row[0] < CALM and self.control is not None:
            known = [self.snap[id(p)] for p in parameters_of(module) if id(p) in self.snap and p.requires_grad]
            row[0] += bool(known)
            row[1] += bool(known) and all(torch.equal(p.detach().flatten()[:256], old) for p, old in known)

    def _trace(self) -> None:
        self.trace.append(weights(list(self.groups.values())))

    def _snapshot(self) -> None:
        """Copy every parameter before training (large ones in part), to detect changes later."""
        for module in [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]:
            for p in module._parameters.values():
                if p is None:
                    continue
                self.snap.setdefault(id(p), (p, p.detach().flatten()[:256].clone()))
