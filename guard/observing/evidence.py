"""Records what a script's losses do: which entries of a batch they compare, which terms reach `backward()`, what a
critic's gradients want from another model, how inputs and weights are perturbed.

Only the first calls are recorded. `objectives` draws the conclusions.
"""

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from trainworthy.core.adapters.dropped_rows import DroppedRows
from trainworthy.guard.hooks.addresses import address_of, home_of
from trainworthy.guard.hooks.parameters import parameters_of
from trainworthy.guard.hooks.trees import floats, tensors
from trainworthy.guard.measures.control.actors import Actors
from trainworthy.guard.measures.control.advantages import Values
from trainworthy.guard.measures.control.bootstrapping import Bootstrapped
from trainworthy.guard.measures.control.policy_rewards import Credit
from trainworthy.guard.measures.control.same_rows import SameRows
from trainworthy.guard.measures.data.packed import Packed
from trainworthy.guard.measures.data.padded_rows import PaddedRows
from trainworthy.guard.measures.data.stored_samples import Stored
from trainworthy.guard.measures.data.unknown_tokens import Lookups
from trainworthy.guard.measures.data.views import Views
from trainworthy.guard.measures.losses.attraction import Attraction
from trainworthy.guard.measures.losses.broadcasting import Outer
from trainworthy.guard.measures.losses.class_conditions import Conditions
from trainworthy.guard.measures.losses.log_scales import LogScales
from trainworthy.guard.measures.losses.logits import Logits
from trainworthy.guard.measures.losses.loss_terms import Terms
from trainworthy.guard.measures.losses.mixing import Mixing
from trainworthy.guard.measures.losses.moved_classes import MovedClasses
from trainworthy.guard.measures.losses.multi_hot import MultiHot
from trainworthy.guard.measures.losses.next_items import NextItems
from trainworthy.guard.measures.losses.output_ranges import OutputRanges
from trainworthy.guard.measures.losses.overlaps import Overlaps
from trainworthy.guard.measures.losses.penalties import Penalties
from trainworthy.guard.measures.losses.regression import Regression
from trainworthy.guard.measures.losses.targets import fits
from trainworthy.guard.measures.losses.variational import Latent
from trainworthy.guard.measures.models.attention_masks import Masks
from trainworthy.guard.measures.models.autograd import beyond
from trainworthy.guard.measures.models.dropped_shares import Shares
from trainworthy.guard.measures.models.kept_states import States
from trainworthy.guard.measures.models.made_anew import MadeAnew
from trainworthy.guard.measures.models.pulled import Pulled, probe
from trainworthy.guard.measures.records import CLOSE, Group, fingerprint, on_gradient, used
from trainworthy.guard.measures.scores.undefined import Undefined

CALLS = 200  # recorded calls of each model, with gradients and without
TEXTS = 64
BACKWARDS = 600  # after so many nothing is recorded any more


def harmless(method: Callable) -> Callable:
    """Record nothing more after an error, or once enough was seen: the script goes on."""

    @functools.wraps(method)
    def run(self: Any, *args: Any) -> None:
        if self.open:
            try:
                method(self, *args)
            except Exception as error:
                self.open = False
                self.error = f"{type(error).__name__}: {error}"

    return run


def passed_to(part: str, event: str) -> Callable:
    """Return an event of `Evidence` that one of its parts gets as it is."""
    return harmless(lambda self, *args: getattr(getattr(self, part), event)(*args))


def if_readable(part: str, event: str) -> Callable:
    """Return an event of a part that leaves out what cannot be read: values under vmap or of a fake tensor."""

    def run(self: Any, *args: Any) -> None:
        with contextlib.suppress(Exception):
            getattr(getattr(self, part), event)(*args)

    return harmless(run)


class Evidence:
    """Gets these events from `observer.Observer`."""

    pack = passed_to("packed", "pack")
    squashed = passed_to("multi_hot", "sigmoid")
    criterion = if_readable("overlaps", "called")
    one_hot = if_readable("moved_classes", "note")
    decided = if_readable("undefined", "read")
    looked_up = passed_to("lookups", "look")
    items = if_readable("next_items", "look")
    padded = if_readable("padded_rows", "look")
    drew = passed_to("regression", "drew")
    attracted = if_readable("attraction", "compared")
    derived = passed_to("penalties", "gradient")
    normalized = passed_to("penalties", "normalized")
    environments = passed_to("credit", "install")
    log_prob = passed_to("credit", "log_prob")

    def __init__(self) -> None:
        self.open, self.error, self.backwards = True, "", 0
        self.calls: Counter = Counter()
        self.made_anew, self.states, self.masks = MadeAnew(), States(), Masks()
        self.batches: deque = deque(maxlen=4)
        self.places: deque = deque(maxlen=4)  # of these batches: address of a tensor -> which entry it is
        self.current: list[Tensor] = []  # the batch that a model was last called with: loops may fetch ahead
        self.kept: list[Tensor] = []  # outputs of this batch: while they exist, their addresses are theirs
        self.sources: dict[int, int] = {}  # address of a tensor -> entry of the batch that it is, or was computed from
        self.made: set[int] = set()  # without a loader: what models were called with
        # Those of them that got a gradient, and how many inputs were made so far.
        self.trained: list[tuple[int, int]] = []
        self.roles: dict[bool, dict[str, Counter]] = {True: {}, False: {}}  # with gradients: loss -> order of entries
        self.terms: dict[tuple[int, str], list[int]] = {}  # scalar outputs of a model: calls, calls that got a gradient
        self.outputs: dict[int, Tensor] = {}  # model -> its last output
        self.pulls: list[tuple[int, int, bool, float, float]] = []
        """Since the last optimiser step: model, model that made its input (0: none), whether the gradient reaches that
        one, sum and absolute sum of the gradient of the model's output."""
        self.pushes: dict[tuple[int, int], dict[str, list[float]]] = {}
        self.ranges: dict[int, list[float]] = {}  # critic -> least and greatest value of samples that no model made
        self.bounds: dict[int, tuple[float, float]] = {}  # critic -> range of the function that makes the others
        self.attacked: tuple[float, int, int] | None = None
        self.attacks: list[tuple[float, float]] = []  # loss before and after the input was moved along its gradient
        self.pulled, self.attraction = Pulled(), Attraction()
        self.starts: dict[int, Tensor] = {}  # weights after each optimiser's last step
        self.windows: dict[int, tuple[int, list[Tensor]]] = {}
        self.restored, self.unrestored = 0, 0
        self.regression, self.output_ranges, self.packed = Regression(), OutputRanges(), Packed()
        self.mixing, self.undefined, self.next_items = Mixing(), Undefined(), NextItems()
        self.padded_rows, self.dropped_rows = PaddedRows(), DroppedRows()
        self.credit, self.values = Credit(), Values()
        self.latent, self.penalties, self.views = Latent(), Penalties(), Views()
        self.outer, self.shares, self.moved_classes = Outer(), Shares(), MovedClasses()
        self.bootstrapped, self.same_rows, self.actors = Bootstrapped(), SameRows(), Actors()
        self.loss_terms, self.conditions = Terms(), Conditions()
        self.multi_hot, self.lookups, self.log_scales = MultiHot(), Lookups(), LogScales()
        self.stored, self.logits, self.overlaps = Stored(), Logits(), Overlaps()
        self.store = self.stored.note
        self.texts: list[Tensor] = []  # batches of tokens, time last
        self.turned: Counter = Counter()  # binary losses whose target has the gradient, and not their input

    def close(self) -> None:
        """Record nothing more."""
        self.open, self.kept, self.outputs = False, [], {}
        self.batches.clear()
        self.current = []

    # --- data and models

    @harmless
    def batch(self, batch: Any) -> None:
        """Note where the entries of a batch are."""
        leaves = tree_leaves(batch)
        self.batches.append([x for x in leaves if isinstance(x, Tensor)])
        self.places.append({address_of(x): i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.numel()})
        self.kept, self.current = [], self.batches[-1]
        self.lookups.entries(self.batches[-1])
        self.views.batch(leaves)
        self.sources = {at: i for places in self.places for at, i in places.items()}

    @harmless
    def root(self, seen: Any, module: nn.Module, args: tuple, kwargs: dict, out: Any, grad: bool) -> None:
        """Note a model's call."""
        self.calls[id(module), grad] += 1
        (seen.fits if grad else self.multi_hot).answered(out)
        if args and isinstance(args[0], Tensor):
            self.bootstrapped.root(args[0], out, self.credit)
            self.values.root(module, args[0], out, self.credit)
            self.same_rows.root(args[0], grad)
            if grad:
                self.actors.root(args, out, self.credit)
                self.credit.asked = (args[0],)
                self.credit.guess(args[0], out)
        if self.calls[id(module), grad] > CALLS:
            return
        self.masks.call(module, args, kwargs)
        if grad and module.training:
            self.current = used(self.batches, (args, kwargs)) or self.current
            self.next_items.root(module, args, kwargs)
            self._terms(module, out)
            self.views.root(tensors((args, kwargs)), floats(out), self.places)
            self.latent.root(out)
            self.loss_terms.root(out)
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        first = next(iter(floats(out)), None)
        if given is None or first is None:
            return
        if grad:
            self.credit.root(given, out)
            if module.training and given.dim() and first.dim() and len(given) == len(first):
                self.mixing.output(out, given, self.batches)
            if not seen.passes and first.requires_grad:
                mark = fingerprint((args, kwargs))
                self.made.add(mark)
                on_gradient(first, lambda _: self.trained.append((mark, len(self.made))))
        if address_of(given) in self.sources and first.dim():
            self.sources[address_of(first)] = self.sources[address_of(given)]
            self.kept.append(first.detach())
        if len(seen.groups) > 1:
            if grad and first.requires_grad:
                self.conditions.root(module, args, kwargs, out, self._pull(module, given, first))
            self.outputs[id(module)] = first.detach()

    def _terms(self, module: nn.Module, out: Any) -> None:
        """Watch which scalars of a returned dict get a gradient."""
        if not isinstance(out, Mapping):
            return
        found = {k: x for k, x in out.items() if isinstance(x, Tensor) and x.requires_grad and not x.dim()}
        for key, x in found.items() if len(found) > 1 else ():
            row = self.terms.setdefault((id(module), str(key)), [0, 0])
            row[0] += 1

            def reached(_: Tensor, row: list[int] = row) -> None:
                row[1] += 1

            on_gradient(x, reached)

    def _pull(self, module: nn.Module, given: Tensor, out: Tensor) -> int:
        """Record in which direction a loss moves a model's output. Return the model that made its input, if the gradient
        reaches that one."""
        homes = {i: home_of(x) for i, x in self.outputs.items() if i != id(module)}
        maker = next((i for i, home in homes.items() if home == home_of(given)), 0)
        attached = given.requires_grad
        if (attached and given.is_leaf) or (attached and not maker):  # a penalty's own point, or made by other code
            return 0
        if not attached and not maker:
            low, high = self.ranges.get(id(module), [0.0, 0.0])
            self.ranges[id(module)] = [min(low, float(given.min())), max(high, float(given.max()))]
        elif attached and (bound := bounded(given)):
            self.bounds[id(module)] = bound

        def pulled(grad: Tensor) -> None:
            self.pulls.append((id(module), maker, attached, float(grad.sum()), float(grad.abs().sum())))

        on_gradient(out, pulled)
        return maker if attached else 0

    # --- losses

    @harmless
    def headed(self, scores: Tensor, target: Tensor) -> None:
        """Note the targets of a class loss: those of a critic's classes belong to the generator's."""
        self.conditions.loss(scores, target)
        self.logits.contrasts.note(scores, target)

    @harmless
    def several_labels(self, target: Tensor, exclusive: bool) -> None:
        (self.multi_hot.target if exclusive else self.multi_hot.steps)(target)

    @harmless
    def compared(self, name: str, tensors: tuple, grad: bool) -> None:
        """Note which entries of the batch a loss function compares."""
        found = tuple(self.sources.get(address_of(x), -1) for x in tensors if isinstance(x, Tensor))
        if len(set(found)) == len(found) > 1 and min(found) >= 0:
            self.roles[grad].setdefault(name, Counter())[found] += 1

    @harmless
    def scored(self, value: float, target: Tensor, steps: int) -> None:
        """Note a class loss: after the gradient of an input, the next one on the same targets shows what was made of it."""
        if self.attacked is not None and len(self.attacks) < 64:
            before, home, at = self.attacked
            if home == address_of(target) and at == steps:
                self.attacks.append((before, value))
        self.attacked = None

    @harmless
    def input_gradient(self, value: float, home: int, steps: int) -> None:
        """Note that a class loss was differentiated by an input."""
        self.attacked = (value, home, steps)

    @harmless
    def regressed(self, prediction: Tensor, target: Tensor, root: tuple | None, inner: list[tuple]) -> None:
        """Note a difference of a prediction and a float target."""
        self.regression.add(prediction, target, root, self.batches, inner)
        if prediction.requires_grad != target.requires_grad and prediction.dim() and target.dim():
            pair = (prediction, target) if prediction.requires_grad else (target, prediction)
            self.bootstrapped.compared(*pair, self.credit)
            self.same_rows.compared(*pair)

    @harmless
    def similar(self, logits: Tensor) -> None:
        """Note the logits of a cross-entropy."""
        self.penalties.scored(logits)
        self.logits.note(logits)

    @harmless
    def read(self, ids: Tensor | None, target: Tensor) -> None:
        """Note a batch of tokens whose targets are the next ones."""
        if ids is None or len(self.texts) >= TEXTS or ids.numel() != target.numel():
            return
        if fits(ids, target.view(ids.shape), 1, -100):
            self.texts.append(ids.detach().cpu())
        elif fits(ids.t(), target.view(ids.shape).t(), 1, -100):
            self.texts.append(ids.t().detach().cpu())

    @harmless
    def mixed(self, target: Tensor, given: Tensor) -> None:
        """Note soft targets, and the input that they are for."""
        self.mixing.add(target, given, self.batches)

    @harmless
    def term(self, logits: Tensor, target: Tensor, out: Any, given: Tensor) -> None:
        """Note a loss with class targets, that may be one of two on a mixed input."""
        self.mixing.term(logits, target, out, given, self.batches)

    @harmless
    def softened(self, out: Tensor, root: tuple) -> None:
        """Record log-probabilities: their gradient is the target of a cross-entropy that the script writes out."""
        given = next((x for x in root[1] if isinstance(x, Tensor)), None)
        if given is not None and len(given) == len(out) and len(self.batches):
            self.mixing.logarithms(out, given, self.batches)

    # --- gradients and steps

    @harmless
    def step(self, group: Group) -> None:
        """Note the weights after a step."""
        if group.steps < 2 * CLOSE:
            self.starts[id(group)] = probe(group.parameters)

    @harmless
    def look(self, roots: list[Tensor]) -> None:
        """Compare the KL term of a variational loss with its formula, before backward()."""
        if len(roots) == 1:
            self.latent.look(roots[0])
            with contextlib.suppress(Exception):  # of a kind of graph that has no terms
                self.attraction.look(roots[0])
                self.log_scales.look(roots[0])
                self.loss_terms.look(roots[0], self.current)

    @harmless
    def broadcast(self, roots: list[Tensor]) -> None:
        """Search a loss's graph for a broadcast of (N, 1) and (N,) to all pairs."""
        if len(roots) == 1:
            with contextlib.suppress(Exception):  # of a kind of graph that cannot be read
                self.outer.look(roots[0])

    @harmless
    def before_backward(self, groups: list[Group], steps: int) -> None:
        """Keep a few weights at the first and the last backward() of each optimiser's step."""
        self.backwards += 1
        if self.backwards > BACKWARDS:
            self.close()
            return
        for group in groups:
            if group.steps < 2 * CLOSE and group.parameters:
                at, rows = self.windows.get(id(group), (steps, []))
                rows = rows if at == steps else []
                self.windows[id(group)] = (steps, [*rows[:1], probe(group.parameters)])

    @harmless
    def before_step(self, group: Group, seen: Any) -> None:
        """Compare these weights, and sort the pulls by whose step they lead to."""
        if group.steps < 2 * CLOSE and (start := self.starts.get(id(group))) is not None:
            self.pulled.between(group.parameters, start, probe(group.parameters), seen.roots.values())
        at, rows = self.windows.pop(id(group), (0, []))
        if at == seen.steps and len(rows) == 2 and not group.closure:
            first, last, now = *rows, probe(group.parameters)
            moved = float((last - first).abs().max())
            if moved > 0:
                starts = (first, self.starts.get(id(group), first))
                back = min(float((now - x).abs().max()) for x in starts) < 0.1 * moved
                self.restored += back
                self.unrestored += not back and not torch.equal(now, last)
        pulls, self.pulls = self.pulls, []
        if not pulls or group.steps > CALLS:
            return
        owned = {id(p) for p in group.parameters}
        sums: dict[tuple[int, int, str], list[float]] = {}
        for critic, maker, attached, total, size in pulls:
            models = (seen.roots.get(i) for i in (critic, maker))
            mine, its = (m is not None and any(id(p) in owned for p in parameters_of(m)) for m in models)
            kind = ""
            if mine and not its:
                kind = "fake" if maker else "real"
            elif its and not mine and attached:
                kind = "made"
            row = sums.setdefault((critic, maker, kind), [0.0, 0.0])
            row[0] += total
            row[1] += size
        for (critic, maker, kind), (total, size) in sums.items():
            if kind and size > 0:
                self.pushes.setdefault((critic, maker), {}).setdefault(kind, []).append(total / size)


BOUNDED = {"TanhBackward0": (-1.0, 1.0), "SigmoidBackward0": (0.0, 1.0)}
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward1")


def bounded(x: Tensor) -> tuple[float, float] | None:
    """Return the range of the function whose values these are, if it has one."""
    node = beyond(x.grad_fn, VIEWS)
    return BOUNDED.get(node.name()) if node is not None else None
