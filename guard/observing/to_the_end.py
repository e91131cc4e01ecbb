"""Follows a script to its end with each pass over a loader cut short. Records its evaluations and the states that it keeps."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from trainworthy.guard.hooks.parameters import parameters_of
from trainworthy.guard.hooks.streams import Generated
from trainworthy.guard.hooks.trees import floats, tensors
from trainworthy.guard.measures.data.row_invariants import Invariants
from trainworthy.guard.measures.data.scales import Measures
from trainworthy.guard.measures.data.token_pairs import known, pairs_of
from trainworthy.guard.measures.models.averages import Trail
from trainworthy.guard.measures.models.dropped_shares import Shares
from trainworthy.guard.measures.models.sampling import Sampling
from trainworthy.guard.measures.records import alive, class_target, fingerprint, pretrained, used
from trainworthy.guard.measures.scores.best_weights import Rounds
from trainworthy.guard.observing.observer import Observer

ANSWERS = 4096  # rows of an evaluation whose answers are kept
TOKENS = 60_000


class Nothing:
    """Accepts every call on it and on its parts: an error there would end the observer's own method, and nothing behind it would be seen."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return self


NOTHING = Nothing()


class Quiet:
    """Replaces the records of a rehearsal that is not followed: only sampling and what dropout drops are recorded."""

    def __init__(self) -> None:
        self.sampling, self.shares = Sampling(), Shares()

    def drew(self, out: Tensor) -> None:
        """Note noise that the script drew."""
        self.sampling.drew(out)

    def __getattr__(self, name: str) -> Any:
        return NOTHING


@dataclass
class Evaluation:
    """Calls of one model on one source of data, without gradients, between two optimiser steps."""

    source: tuple
    model: int
    kind: tuple
    weights: tuple
    step: int
    calls: int = 0
    total: float = 0.0
    losses: int = 0
    right: int = 0
    rows: int = 0
    answers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Classes of the first rows, and what the model takes them for."""

    @property
    def loss(self) -> float:
        return self.total / self.losses if self.losses else float("nan")

    @property
    def accuracy(self) -> float:
        return self.right / self.rows if self.rows else float("nan")


@dataclass
class Load:
    """A state that a model got, or (`path`) a file of the best weights that was written."""

    model: int
    kind: tuple
    weights: tuple
    at: int
    """Evaluations before it."""
    trained: int
    """Calls with gradients before it."""
    path: str = ""


@dataclass
class Scales:
    """Statistics of the inputs of one kind of model."""

    measures: Measures = field(default_factory=lambda: Measures(max_levels=8))
    marks: Invariants = field(default_factory=Invariants)
    calls: int = 0
    losses: int = 0
    pairs: Counter = field(default_factory=Counter)
    """Neighbouring tokens."""
    texts: set[int] = field(default_factory=set)
    fresh: list[tuple[int, int]] = field(default_factory=list)
    """For each call of training: pairs of texts that were new, and how many of these pairs had been seen."""

    def read(self, x: Tensor) -> None:
        """Count the pairs of neighbouring tokens in texts that were not read before."""
        if self.pairs.total() > TOKENS:
            return
        rows = [row for row in x.detach().cpu().tolist() if hash(tuple(row)) not in self.texts]
        self.texts |= {hash(tuple(row)) for row in rows}
        found = pairs_of(rows)
        self.fresh.append((found.total(), known(found, self.pairs)))
        self.pairs += found


class Following(Observer):
    """An observer of the whole script that keeps little of each step."""

    def __init__(self, control: Any = None):
        super().__init__(control)
        self.evidence, self.fits, self.pairing = Quiet(), Quiet(), Quiet()  # type: ignore[assignment]
        self.trained: dict[tuple, Scales] = {}
        self.sources: dict[tuple, Scales] = {}
        self.evaluations: list[Evaluation] = []
        self.loads: list[Load] = []
        self.now: Evaluation | None = None
        self.known: dict[int, int] = {}  # inputs of evaluations -> the step at which they were first seen
        # optimiser -> its last steps without a gradient, while another model of its shapes gets some
        self.streaks: dict[int, int] = {}
        self.trainings: dict[int, list] = {}  # optimiser -> its number, its first and last step, shapes of its tensors
        self.other = ""
        # optimiser -> its step since which tensors of its model get gradients and are in no optimiser, and their names
        self.joined: dict[int, tuple[int, list[str]]] = {}
        self.holding = control is not None and control.plan.name == "held"
        self.kept: list[tuple[Tensor, Tensor]] = []  # weights before an optimiser's step
        self.from_file = False
        self.rounds, self.trail = Rounds(), Trail()

    # --- optimisers

    def optimizer(self, it: torch.optim.Optimizer) -> None:
        super().optimizer(it)
        number = self.control.optimizers if self.control is not None else 0
        self.trainings[id(it)] = [number, None, 0, []]

    # --- model calls

    def before_root(self, module: nn.Module, args: tuple, kwargs: dict) -> int | None:
        if self.control is not None:
            self.control.tick(self)
        if next(parameters_of(module), None) is None:
            return None
        self.last_root = (module, args, kwargs)
        self.roots.setdefault(id(module), module)
        self._input(inside(module), args, kwargs)
        with contextlib.suppress(Exception):
            self.evidence.sampling.call(inside(module), args, kwargs)
        return self.drops

    def _input(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        one = self.recent[-1] if self.recent else None
        x = next(iter(floats((args, kwargs))), None)
        if torch.is_grad_enabled():
            self.now = None
            self.rounds.training()
            self.trail.trains(module)
            rows = self.trained.setdefault(kind(module), Scales())
        elif self.steps and (one is None or (not one.backwards and one.calls < 4 * one.got)):
            self.rounds.evaluation(self.steps)
            rows = self._evaluation(module, one, (args, kwargs))
        else:
            self.now = None
            return
        rows.calls += 1
        tokens = next((x for x in tensors((args, kwargs)) if x.dtype == torch.int64), None)
        if tokens is not None and tokens.dim() == 2 and tokens.shape[1] >= 4:
            rows.read(tokens)
        if x is not None:
            rows.measures.read(x)
            rows.marks.read(x)

    def _evaluation(self, module: nn.Module, one: Any, given: tuple) -> Scales:
        """Note a call without gradients. Without a loader, and with a generator that may read any data, inputs are identified by
        the evaluation that had them first."""
        if one is not None and not isinstance(one.loader.dataset, Generated):
            source = (id(one.loader.dataset),)
        else:
            full = len(self.known) > 10**4
            source = (0, self.steps if full else self.known.setdefault(fingerprint(given), self.steps))
        key, last = (id(module), source, self.steps), self.now
        if last is None or key != (last.model, last.source, last.step):
            again = [e for e in self.evaluations[-8:] if key == (e.model, e.source, e.step)]
            self.now = again[-1] if again else Evaluation(source, id(module), kind(module), some(module), self.steps)
            self.evaluations += [] if again else [self.now]
            if not again:
                twins = [m for m in map(inside, self.roots.values()) if kind(m) == self.now.kind]
                with contextlib.suppress(Exception):
                    self.trail.evaluated(module, twins, self.snap, self.steps)
        self.now.calls += 1  # type: ignore[union-attr]
        return self.sources.setdefault((kind(module), *source), Scales())

    def _measure(self, module: nn.Module, args: tuple, kwargs: dict, out: Any, grad: bool) -> None:
        if not grad:
            with contextlib.suppress(Exception):
                self.evidence.sampling.gave(inside(module), out)
        one = self.recent[-1] if self.recent else None
        if one is None or self.now is None or grad:
            return
        target = class_target(used(one.recent, (*args, *kwargs.values())), out)
        if target is not None:
            logits = out if isinstance(out, Tensor) else tree_leaves(out)[0]
            self._hits(logits, target)

    def _hits(self, logits: Any, target: Tensor) -> None:
        if self.now is not None and isinstance(logits, Tensor) and logits.dim() == 2 and len(logits) == len(target):
            answer = logits.argmax(1)
            self.now.right += int((answer == target).sum())
            self.now.rows += len(target)
            if self.now.rows <= ANSWERS:
                self.now.answers.append((target.detach().cpu(), answer.detach().cpu()))

    def later(self) -> int:
        """Return the number of the last optimiser whose first step came after the last step of all before it, if no earlier one
        had tensors of its shapes (folds, restarts); 0 if there is none."""
        rows = sorted((r for r in self.trainings.values() if r[1] is not None), key=lambda r: r[1])
        alone = [
            r[0]
            for i, r in enumerate(rows)
            if i and r[1] > max(b[2] for b in rows[:i]) and r[2] - r[1] >= 3 and all(r[3] != b[3] for b in rows[:i])
        ]
        return alone[-1] if alone else 0

    # --- losses

    def loss(self, name: str, input: Any, target: Any, out: Any, kwargs: dict) -> None:
        if not torch.is_grad_enabled() and isinstance(out, Tensor) and out.numel() == 1:
            self._note(float(out))
            if not self.recent and isinstance(target, Tensor) and target.dim() == 1 and not target.is_floating_point():
                self._hits(input, target)

    def compared(self, name: str, tensors: tuple) -> None:
        if len(tensors) != 2 or tensors[0].shape != tensors[1].shape:
            return
        if torch.is_grad_enabled():
            with contextlib.suppress(Exception):
                self.evidence.sampling.compared(*tensors)
        else:
            self._note(float((tensors[0].float() - tensors[1].float()).abs().mean()))

    def regressed(self, one: Tensor, other: Tensor) -> None:
        """Note what a loss written as a difference compares with."""
        if torch.is_grad_enabled() and one.shape == other.shape:
            with contextlib.suppress(Exception):
                self.evidence.sampling.compared(one, other)

    def _note(self, value: float) -> None:
        if self.now is not None:
            self.now.total += value
            self.now.losses += 1
            self.sources[(self.now.kind, *self.now.source)].losses += 1

    # --- steps and states

    def before_step(self, it: torch.optim.Optimizer, closure: Any) -> None:
        super().before_step(it, closure)
        group = self.groups[id(it)]
        row = self.trainings[id(it)]
        if row[1] is None:
            row[1], row[3] = self.steps, sorted(p.shape for p in group.parameters)
        row[2] = self.steps
        self.kept = [(p, p.detach().clone()) for p in group.parameters] if self.holding else []
        owned = {id(p) for g in self.groups.values() for p in g.parameters}
        modules = {i: self.roots[i] for step, i, _ in self.grad_modes[-64:] if step == self.steps}.values()
        if closure is not None or any(alive(p) for p in group.parameters):
            self.streaks[id(it)] = 0
            self._joined(group, owned, modules)
            return
        shapes = sorted(p.shape for p in group.parameters)
        for module in modules:
            strangers = [p for p in parameters_of(module) if p.requires_grad and alive(p) and id(p) not in owned]
            if strangers and sorted(p.shape for p in parameters_of(module)) == shapes:
                self.streaks[id(it)] = self.streaks.get(id(it), 0) + 1
                self.other = type(module).__name__
                return

    def _joined(self, group: Any, owned: set[int], modules: Iterable[nn.Module]) -> None:
        """Note since when tensors of an optimiser's model get gradients that no optimiser uses."""
        mine = {id(p) for p in group.parameters}
        for module in modules:
            named = list(module.named_parameters())
            if not any(id(p) in mine for _, p in named):
                continue
            found = [name for name, p in named if id(p) not in owned and p.requires_grad and alive(p)]
            key, since = id(group), self.joined.get(id(group), (0, []))
            if not found:
                self.joined.pop(key, None)
            elif since[1] != found:
                self.joined[key] = (group.steps, found)
            return

    def step(self, it: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for p, value in self.kept:
                p.copy_(value)
        self.kept = []
        super().step(it)
        self.trail.step(self.groups[id(it)].parameters)

    def backward(self) -> None:
        if not self.backwards:
            trained = [p for p, _ in self.leaves.values()]
            self.from_file = any(id(p) in self.loaded for p in trained) or any(map(pretrained, self.roots.values()))
        if self.holding and not self.groups:  # weights are moved by hand: gradients of zero do not move them
            for p in [row[0] for row in (*self.leaves.values(), *self.others.values())]:
                if p.grad is not None:
                    p.grad.zero_()
        super().backward()

    def load(self, module: nn.Module, state: Any, out: Any) -> None:
        super().load(module, state, out)
        if self.steps:
            self._keep(inside(module))

    def save(self, obj: Any, path: Any = None) -> None:
        super().save(obj, path)
        if isinstance(path, (str, os.PathLike)) and "best" in os.path.basename(path).lower() and self.evaluations:
            for model in (inside(m) for m in self.roots.values()):
                if id(model) == self.evaluations[-1].model:
                    self.loads = [one for one in self.loads if one.path != str(path)]
                    self._keep(model, str(path))

    def _keep(self, model: nn.Module, path: str = "") -> None:
        one = Load(id(model), kind(model), some(model), len(self.evaluations), len(self.grad_modes), path)
        self.loads.append(one)


def inside(module: nn.Module) -> nn.Module:
    """Return the model in wrappers (DistributedDataParallel, AveragedModel)."""
    while isinstance(getattr(module, "module", None), nn.Module) and len(list(module.children())) == 1:
        module = module.module  # type: ignore[assignment]
    return module


def kind(module: nn.Module) -> tuple:
    """Return a key that is the same for a model, its copies and the models of other folds."""
    return type(module).__name__, tuple(tuple(p.shape) for p in parameters_of(module))


def some(module: nn.Module) -> tuple:
    """Return a few of a model's weights, which identify the epoch of a training."""
    found = [p for p in parameters_of(module) if p.requires_grad and p.numel()]
    return tuple(v for p in (*found[:3], *found[-3:]) for v in p.detach().flatten()[:4].float().tolist())
