"""Records what happens in a training script for the checks: passes over loaders, model calls, gradients, steps.

The observer keeps counts and references, and measures only during the first steps of a phase.
"""

import gc
import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from trainworthy.core.guard.records import (
    CLOSE,
    NORMS,
    Group,
    Pass,
    Sched,
    alive,
    alone,
    bare,
    class_target,
    epochs_of,
    fingerprint,
    logits_of,
    point,
    spots,
    used,
    values,
    weights,
)


class Observer:
    """Receives the events of `events.install`."""

    def __init__(self, control: Any = None):
        self.control = control  # decides about batches and the end; None: only observe
        self.busy = self.scheduling = self.refreshing = False
        self.drops = 0
        self.passes: list[Pass] = []
        self.recent: list[Pass] = []
        self.groups: dict[int, Group] = {}
        self.schedulers: list[Sched] = []
        self.roots: dict[int, nn.Module] = {}
        self.called: dict[int, tuple[nn.Module, int, bool]] = {}  # modules called in training: order, grad mode
        self.owner: dict[int, set[int]] = {}  # root -> modules called within it
        self.plain: dict[tuple[int, str], Tensor] = {}  # tensors that are plain attributes of a model
        self.leaves: dict[int, tuple[Tensor, int]] = {}
        self.others: dict[int, tuple[Tensor, int, int]] = {}  # leaves that are no parameter: count, version
        self.loaded: set[int] = set()
        self.backwards = self.steps = self.since = self.wasted = self.scaler_skips = 0
        self.losses: list[float] = []
        self.nonfinite: list[int] = []
        self.calls: list[dict] = []  # loss functions, in training
        self.eval_calls: list[dict] = []
        self.gaps: list[list[tuple[int, bool, int, int]]] = [[]]  # model calls under no_grad between optimiser steps
        self.snap: dict[int, tuple[Tensor, Tensor]] = {}
        self.inputs: dict[str, list[tuple[int, int, float, float]]] = {"train": [], "eval": []}
        self.evaluated: dict[int, int] = {}
        self.grad_modes: list[tuple[int, int, bool]] = []
        self.held: list[tuple[Any, Any, int]] = []
        self.saved: set[int] = set()
        self.self_loads = 0
        self.partial_loads: list[str] = []
        self.notes: list[str] = []
        self.pairs: list[str] = []
        self.last_root: tuple | None = None
        self.places: dict[int, int] = {}  # where in its batch a loss's target was
        self.batch_calls = 0
        self.labels: list[dict] = []  # labels that a model got as an argument
        self.counts: dict[int, int] = {}  # calls of each module within the first call of its root
        self.train_prints: list[int] = []  # what models were called with: in training
        self.calm_prints: set[int] = set()  # and without gradients
        self.together: dict[int, float] = {}  # root -> change of its outputs without the other samples of the batch
        self.epochs = 0  # of the run, by the script's own variable
        self.points: list[tuple[Tensor, Tensor]] = []  # inputs and classes of the first pass, for their neighbours
        self.ranks = 1  # processes that train together
        self.trace: list = []  # the weights at the first steps, to compare ranks
        self.batch_prints: list[int] = []
        self._last: list[tuple[Tensor, int]] = []
        self._plain_leaf = False
        self._hook: Any = None
        self._scaler: Any = None

    # --- data

    def new_pass(self, loader: DataLoader, source: Any) -> Pass:
        try:
            length = len(loader)
        except TypeError:
            length = None
        one = Pass(loader, length, self.steps, refreshing=self.refreshing)
        one.source = source
        self.passes.append(one)
        return one

    def index(self, source: Any, found: Any) -> None:
        for one in reversed(self.passes[-4:]):
            if one.source is source and isinstance(found, (list, int)) and len(one.order) < 100_000:
                one.order.extend(found if isinstance(found, list) else [found])
                return

    def cut(self, one: Pass) -> bool:
        if self.control is not None and self.control.cut(one, self):
            one.was_cut = True
            self.exhausted(one)
            return True
        return False

    def exhausted(self, one: Pass) -> None:
        one.ended = True
        if self.control is not None:
            self.control.ended(one)
        if one.calls or one.was_cut or not one.got:  # else its batches were listed first, and the loop is still to come
            self.recent = [p for p in self.recent if p is not one]

    def batch(self, one: Pass, batch: Any) -> Any:
        one.got += 1
        if self.control is not None:
            batch = self.control.batch(one, batch, self)
        self.recent = [p for p in self.recent if not p.ended and p is not one] + [one]
        one.recent.append(batch)
        if (one.loader.num_workers > 1 or self.ranks > 1) and one.got <= 64:
            one.prints.append(fingerprint(batch))
        return batch

    # --- models

    def before_root(self, module: nn.Module, args: tuple, kwargs: dict) -> int | None:
        if self.control is not None:
            self.control.tick(self)
        if next(module.parameters(), None) is None:
            return None
        self.last_root = (module, args, kwargs)
        first = id(module) not in self.roots
        if first:
            self.roots[id(module)] = module
            for m in module.modules():
                for name, value in vars(m).items():
                    if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
                        self.plain[id(m), name] = value
        if (first or self.backwards < CLOSE) and torch.is_grad_enabled():
            inside = self.owner.setdefault(id(module), set())

            def note(m: nn.Module, _: Any) -> None:
                inside.add(id(m))
                if first:
                    self.counts[id(m)] = self.counts.get(id(m), 0) + 1
                self.called.setdefault(id(m), (m, len(self.called), torch.is_grad_enabled()))

            if self._hook is not None:  # of a call that raised
                self._hook.remove()
            self._hook = register_module_forward_pre_hook(note)
        return self.drops

    def root(self, module: nn.Module, args: tuple, kwargs: dict, out: Any, token: int | None) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if token is None:
            return
        grad = torch.is_grad_enabled()
        drops = self.drops - token
        norms = sum(m.training and m.track_running_stats for m in module.modules() if isinstance(m, NORMS))
        row = (id(module), module.training, drops, norms)
        if grad:
            self.grad_modes.append((self.steps, id(module), module.training))
        else:
            self.gaps[-1].append(row)
        for one in self.recent:
            one.calls += 1
            one.no_grad_calls += not grad
            if len(one.modes) < 200:
                one.modes.append(row)
        if not self.passes and len(self.train_prints) < 64:
            mark = fingerprint((args, kwargs))
            self.train_prints.append(mark) if grad else self.calm_prints.add(mark)
        if grad and isinstance(kwargs.get("labels"), Tensor) and len(self.labels) < 100:
            from trainworthy.core.guard.targets import argument

            self.labels.append(argument(module, args, kwargs))
        self._measure(module, args, kwargs, out, grad)

    def _measure(self, module: nn.Module, args: tuple, kwargs: dict, out: Any, grad: bool) -> None:
        one = self.recent[-1] if self.recent else None
        if one is None or one.calls > 40:
            return
        kind = "train" if one.backwards or (grad and not one.no_grad_calls) else "eval"
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()), None)
        if x is not None and x.dim() >= 2 and len(x.detach().flatten()[:4096].unique()) > 16:  # no mask
            self.inputs[kind].append(
                (id(module), x.dim(), float(x.detach().float().mean()), float(x.detach().float().std()))
            )
        if not grad or kind == "eval":
            self.evaluated[id(module)] = self.evaluated.get(id(module), 0) + 1
            self._score(one, module, args, kwargs, out)

    def _score(self, one: Pass, module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        """Count the samples of an evaluation that the model classifies correctly; with batch norm, also with batch
        statistics."""
        target = class_target(used(one.recent, (*args, *kwargs.values())), out)
        if target is None:
            return
        logits = logits_of(out)
        one.seen += len(target)
        hits = int((logits.argmax(1) == target).sum())
        one.right += hits
        if id(module) not in self.together and not module.training and len(target) >= 4:
            self.busy = True
            try:
                change = alone(bare(module), args, kwargs, logits)
            finally:
                self.busy = False
            if change is not None:
                self.together[id(module)] = change
        norms = [m for m in module.modules() if isinstance(m, NORMS) and not m.training and m.track_running_stats]
        if not norms:
            one.right_batch += hits
            return
        self.busy = True
        inner = bare(module)  # the other ranks do not call it now
        momenta = [m.momentum for m in norms]
        try:
            for m in norms:
                m.training, m.momentum = True, 0.0
            with torch.no_grad():
                again = logits_of(inner(*args, **kwargs))
            one.right_batch += int((again.argmax(1) == target).sum())
        except Exception:
            one.right_batch += hits
        finally:
            for m, momentum in zip(norms, momenta, strict=True):
                m.training, m.momentum = False, momentum
                m.num_batches_tracked.sub_(1)
            self.busy = False

    # --- gradients

    def before_backward(self, tensors: Any) -> None:
        roots = [t for t in ([tensors] if isinstance(tensors, Tensor) else list(tensors)) if isinstance(t, Tensor)]
        value = float(roots[0].detach().float().sum()) if roots else 0.0
        self.losses.append(value)
        if value != value or abs(value) == float("inf"):
            self.nonfinite.append(self.backwards)
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
        self._plain_leaf = self.backwards >= 2 * CLOSE  # a graph that was not walked may hold an input's gradient
        if self.backwards < 2 * CLOSE:
            self._walk(roots)

    def _walk(self, roots: list[Tensor]) -> None:
        """Record every leaf of the graph that requires a gradient."""
        stack, done = [t.grad_fn for t in roots if t.grad_fn is not None], set()
        while stack:
            node = stack.pop()
            if node in done:
                continue
            done.add(node)
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter):
                self.leaves[id(leaf)] = (leaf, self.leaves.get(id(leaf), (leaf, 0))[1] + 1)
            elif leaf is not None:
                self._plain_leaf = True
                kept = self.others.get(id(leaf))
                self.others[id(leaf)] = (leaf, kept[1] + 1, kept[2]) if kept else (leaf, 1, leaf._version)
            stack.extend(n for n, _ in node.next_functions if n is not None)

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
            if self._scaler is not None:
                group.scaled, group.unscaled = True, False
        for one in self.recent:
            if one.calls:
                one.backwards += 1
        if self.control is not None:
            self.control.backward(self)

    since_step = True

    def _live(self, group: Group, n: int = 3) -> list[Tensor]:
        """Return up to three parameters with a non-zero gradient, from a few candidates."""
        found: list[Tensor] = []
        for p in group.parameters[:40]:
            if alive(p):
                found.append(p)
                if len(found) == n:
                    break
        return found

    def clip(self, parameters: list[Tensor], limit: Any) -> None:
        live = [p for p in parameters if p.grad is not None]
        ids = {id(p) for p in parameters}
        for group in self.groups.values():
            if ids & {id(p) for p in group.parameters}:
                state = (
                    "empty"
                    if not any(alive(p) for p in live)
                    else "late"
                    if group.consumed and not self.since
                    else "ok"
                )
                if group.scaled and not group.unscaled and self._scaler and self._scaler > 1:
                    state = "scaled"
                group.clipped.append(state)

    # --- optimisers

    def optimizer(self, it: torch.optim.Optimizer) -> None:
        params = [p for g in it.param_groups for p in g["params"]]
        asleep = {id(p) for m in gc.get_objects() if issubclass(type(m), nn.Module)
                  for p in m._parameters.values() if p is not None and not p.requires_grad}  # fmt: skip
        own = {id(p) for p in params if not p.requires_grad}
        self.groups[id(it)] = Group(weakref.ref(it), own, asleep)

    def scaled(self, factor: float) -> None:
        self._scaler = factor

    def unscale(self, it: Any) -> None:
        group = self.groups.get(id(it))
        if group:
            group.unscaled = True

    def scaler_step(self, scaler: Any, it: Any) -> None:
        self._last = []  # a skipped step is the scaler's own decision
        self.since_step = True

    def before_step(self, it: torch.optim.Optimizer, closure: Any) -> None:
        if id(it) not in self.groups:
            self.optimizer(it)
        group = self.groups[id(it)]
        group.closure = group.closure or closure is not None
        group.before, group.held = [], []
        if closure is not None:
            return
        params = group.parameters
        if group.steps < CLOSE:
            ready = [p for p in params if p.grad is not None]
            group.received |= {id(p) for p in ready}
            live = [p for p in ready if alive(p)]
            if live and self._lossy():
                still = {id(p) for p in ready} - {id(p) for p in live}
                group.zero = still if not group.steps else group.zero & still
            else:
                group.zero = set()
            group.empty += not live and self._lossy()
            group.silent += not live and not self._lossy()
            group.nonfinite += any(not bool(torch.isfinite(values(p)).all()) for p in live)
            sizes = [float(values(p).abs().max()) for p in live[:40]]
            loud = [
                p for p, size in zip(live, sizes, strict=False) if size > 1e-4 * max(sizes)
            ]  # not a bias before a norm
            group.before = [spots(p) for p in loud if not p.grad.is_sparse]
            group.held = [(p, p.detach().clone()) for p in params if not p.requires_grad and p.numel() < 10**7][:100]
        else:
            group.received |= {id(p) for p in params if p.grad is not None and id(p) not in group.received}
            group.empty += not self._live(group) and self._lossy()
        group.stale += group.consumed and group.backwards > 0
        group.twice += group.consumed and group.backwards == 0
        group.probe = self._live(group)

    def _lossy(self) -> bool:
        """Return whether there is anything to learn: a satisfied hinge loss has no gradient."""
        return not self.losses or self.losses[-1] != 0

    def step(self, it: torch.optim.Optimizer) -> None:
        group = self.groups[id(it)]
        rate = max((float(g.get("lr", 0.0)) for g in it.param_groups), default=0.0)
        group.rates.append(rate)
        for p, where, old in group.before:
            share = float((p.detach().flatten()[where] != old).float().mean()) if len(where) else 1.0
            group.moved.setdefault(id(p), []).append(share)
        group.frozen_moved |= {id(p) for p, old in group.held if not torch.equal(p.detach(), old)}
        if group.closure:
            group.received |= {id(p) for p in group.parameters if p.grad is not None}
        group.before, group.held = [], []
        group.windows.append(group.backwards)
        group.backwards, group.consumed = 0, not group.closure
        group.steps += 1
        self.steps += 1
        self.since, self.since_step = 0, True
        self._last = []
        self.gaps.append([])
        if self.steps == CLOSE and self.control is not None:
            self.epochs = epochs_of(inspect.currentframe())
        if self.ranks > 1 and self.steps <= CLOSE:
            self._trace()
        for one in self.recent:
            one.steps += one.backwards > 0
        if self.control is not None:
            self.control.step(self)

    def _trace(self) -> None:
        self.trace.append(weights(list(self.groups.values())))

    def _snapshot(self) -> None:
        """Copy every parameter before training (large ones in part), to detect changes later."""
        for module in [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]:
            for p in module._parameters.values():
                if p is None:
                    continue
                self.snap.setdefault(id(p), (p, p.detach().flatten()[:256].clone()))

    # --- schedulers, losses, states

    def scheduler(self, it: Any) -> None:
        if any(s.it is it for s in self.schedulers):
            return
        self.schedulers.append(Sched(it, getattr(it, "optimizer", None)))

    def schedule(self, it: Any) -> None:
        for one in self.schedulers:
            if one.it is it:
                one.at.append((self.steps, sum(p.training for p in self.passes)))

    def loss(self, name: str, input: Any, target: Any, out: Any, kwargs: dict) -> None:
        if not isinstance(input, Tensor) or not isinstance(target, Tensor):
            return
        train = torch.is_grad_enabled() and input.requires_grad
        rows = self.calls if train else self.eval_calls
        if len(rows) >= 400:
            return
        from trainworthy.core.guard.targets import describe

        if train and len(rows) < CLOSE:
            self._place(target)
        if train and len(self.points) < 24 and sum(p.training for p in self.passes) <= 1 and self.last_root is not None:
            self.points += point(target, (*self.last_root[1], *self.last_root[2].values()))
        self.busy = True
        try:
            with torch.no_grad():
                rows.append(
                    {"step": self.steps, **describe(name, input.detach(), target.detach(), kwargs, self.last_root)}
                )
        finally:
            self.busy = False

    def _place(self, target: Tensor) -> None:
        home = target.untyped_storage().data_ptr()
        for batch in reversed(self.recent[-1].recent if self.recent else ()):
            for i, x in enumerate(tree_leaves(batch)):
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() == home:
                    self.places[i] = self.places.get(i, 0) + 1
                    return

    def difference(self, a: Tensor, b: Tensor) -> None:
        """Detect (N, 1) minus (N,) of a prediction and a target, which broadcasts to (N, N)."""
        if a.dim() < b.dim():
            a, b = b, a
        if (
            a.dim() == 2
            and a.shape[1] == 1
            and b.shape == a.shape[:1]
            and len(b) > 1
            and a.requires_grad != b.requires_grad
        ):
            self.pairs.append(f"a difference of {tuple(a.shape)} and {tuple(b.shape)} became {(len(b), len(b))}")

    def state(self, module: nn.Module, state: Any) -> None:
        if self.steps and module.training is not None:
            try:
                self.held.append((weakref.ref(state), weakref.ref(module), self.steps))
            except TypeError:
                return

    def save(self, obj: Any) -> None:
        todo = [obj]
        while todo:
            one = todo.pop()
            self.saved.add(id(one))
            if isinstance(one, dict) and len(one) < 200:
                todo.extend(v for v in one.values() if isinstance(v, dict))

    def before_load(self, module: nn.Module, state: Any) -> None:
        if self.steps and isinstance(state, dict):
            own = {k: v.data_ptr() for k, v in module.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
            same = [k for k, v in state.items() if isinstance(v, Tensor) and v.numel() and own.get(k) == v.data_ptr()]
            self.self_loads += bool(own) and len(same) == len(own)

    def load(self, module: nn.Module, state: Any, out: Any) -> None:
        missing = set(getattr(out, "missing_keys", ()))
        names = dict(module.named_parameters())
        self.loaded |= {id(p) for n, p in names.items() if n not in missing}
        if names and missing >= names.keys() and len(state):
            self.partial_loads.append(
                f"{len(state)} entries, first {next(iter(state))}; the model has {next(iter(names))}"
            )
