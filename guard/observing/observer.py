"""Records what happens in a training script for the checks: passes over loaders, model calls, gradients, steps.

The observer keeps counts and references, and measures only during the first steps of a phase.
"""

import contextlib
import os
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.hooks import events
from trainworthy.guard.hooks.addresses import address_of
from trainworthy.guard.hooks.batches import opened
from trainworthy.guard.hooks.initial_weights import Drawn
from trainworthy.guard.hooks.parameters import named_parameters_of, parameters_of
from trainworthy.guard.hooks.trees import first_float, tensors
from trainworthy.guard.measures import records
from trainworthy.guard.measures.data.graphs import Graphs
from trainworthy.guard.measures.data.indexing import Indexed
from trainworthy.guard.measures.data.scales import Measures
from trainworthy.guard.measures.losses.collapse import Collapse
from trainworthy.guard.measures.losses.float_targets import Fits, beside
from trainworthy.guard.measures.losses.pairing import Pairing
from trainworthy.guard.measures.losses.supervision import Soft
from trainworthy.guard.measures.models import partial_loads
from trainworthy.guard.measures.models.generations import Generations
from trainworthy.guard.measures.models.rows import Rows
from trainworthy.guard.measures.models.statistics import has_statistics
from trainworthy.guard.measures.records import CLOSE, NORMS, Group, Pass, Sched, bare, class_target, current, used
from trainworthy.guard.observing.evidence import Evidence
from trainworthy.guard.observing.losses import Losses
from trainworthy.guard.observing.updates import Updates


class Observer(Updates, Losses):
    """Receives the events of `events.install`."""

    def __init__(self, control: Any = None):  # long: one line for each record
        self.control = control  # decides about batches and the end; None: only observe
        self.busy = self.scheduling = self.refreshing = self.fetching = False
        self.drops = self.draws = self.empty_saves = self.cleared = 0
        self.passes: list[Pass] = []
        self.recent: list[Pass] = []
        self.groups: dict[int, Group] = {}
        self.in_use = []
        self.schedulers: list[Sched] = []
        self.plateaus: dict[str, str] = {}  # line that steps a ReduceLROnPlateau -> its mode
        self.roots: dict[int, nn.Module] = {}
        self.downstream: set[int] = set()  # roots whose input had a gradient
        self.called: dict[int, tuple[nn.Module, int, bool]] = {}  # modules called in training: order, grad mode
        self.owner: dict[int, set[int]] = {}  # root -> modules called within it
        self.plain: dict[tuple[int, str], Tensor] = {}  # tensors that are plain attributes of a model
        self.leaves: dict[int, tuple[Tensor, int]] = {}
        self.others: dict[int, tuple[Tensor, int, int]] = {}  # leaves that are no parameter: count, version
        self.loaded: set[int] = set()
        self.backwards = self.steps = self.since = self.wasted = 0
        self.losses: list[float] = []
        self.nonfinite: list[int] = []
        self.calls: list[dict] = []  # loss functions, in training
        self.eval_calls: list[dict] = []
        self.gaps = records.Gaps()
        self.snap: dict[int, tuple[Tensor, Tensor]] = {}
        self.inputs: dict[str, dict[int, Measures]] = {"train": {}, "eval": {}}  # of each model
        self.evaluated: dict[int, int] = {}
        self.grad_modes: list[tuple[int, int, bool]] = []
        self.dropping: set[int] = set()  # roots within whose calls something was dropped
        self.undecided: list[tuple] = []  # calls in eval mode with gradients: evaluations, if no backward() follows
        self.held: list[tuple] = []  # a state_dict, its module, the step, changes of its weights so far
        self.saved: set[int] = set()
        self.self_loads = self.batch_calls = 0
        self.by_reference: int | None = None  # the step after which a state_dict was taken that is held and not copied
        self.partial_loads: list[Fault] = []
        self.trainer: Any = None  # of transformers, in a rehearsal
        self.notes: list[str] = []
        self.last_root: tuple | None = None
        self.first_call: tuple | None = None  # the last call with gradients that got no output of another model
        self.places: dict[int, int] = {}  # where in its batch a loss's target was
        self.labels: list[dict] = []  # labels that a model got as an argument
        self.counts: dict[int, int] = {}  # calls of each module within the first call of its root
        self.calm_prints: set[int] = set()  # what models were called with, without gradients
        self.epochs = self.planned = 0  # epochs and steps of the run, by the script's own variables
        self.rates_by_hand: list = []  # functions of the script that may compute a rate
        self.points: list[tuple[Tensor, Tensor]] = []  # inputs and classes of the first pass, for their neighbours
        self.ranks = 1  # processes that train together
        self.trace: list = []  # the weights at the first steps, to compare ranks
        self.batch_prints: list[int] = []
        self.seeds: dict[tuple, tuple[int, int]] = {}  # seed -> backward() calls before, how often after another one
        self.evidence, self.generations = Evidence(), Generations()
        self.fits, self.pairing, self.rows, self.collapse = Fits(), Pairing(), Rows(), Collapse()
        self.soft, self.drawn_weights, self.indexed, self.graphs = Soft(), Drawn(), Indexed(), Graphs()
        self.restart: Any = None  # a restart.Restart, if one is rehearsed
        self.shifted: tuple | None = None  # a model's call whose targets are the next tokens, and these
        self.scrambled = ""  # a view() that mixes places and channels
        self.inner: list[tuple] = []  # arguments of modules within the last root's call
        self.several: dict[int, tuple] = {}  # calls of models with several inputs
        self.copied: tuple | None = None  # a model's call whose targets are its input tokens
        self.written: list[dict] = []  # shifts of targets in losses that the script writes out
        self.answers: tuple | None = None  # a model's call that is given its targets besides its input, and these
        self.classified: tuple | None = None  # a model's call whose outputs are classified
        self.masked: tuple | None = None  # one of which some tokens are predicted
        self._last: list[tuple[Tensor, int]] = []
        self.resting: dict[int, list[int]] = {}  # root -> calls without gradients after a few steps; on initial weights
        self._plain_leaf, self._soft = False, (0, 0)
        self._hook = self._scaler = None  # type: Any

    def forget(self) -> None:
        """Begin anew, with a later training of the same script."""
        names = ("loaded", "drawn_weights", "notes", "ranks", "restart", "partial_loads")
        kept = {name: getattr(self, name) for name in names}
        self.__init__(self.control)  # type: ignore[misc]
        vars(self).update(kept)

    # --- data

    def new_pass(self, loader: DataLoader, source: Any) -> Pass:
        try:
            length = len(loader)
        except TypeError:
            length = None
        one = Pass(loader, length, self.steps, len(self.passes), refreshing=self.refreshing)
        one.source = source
        self.evidence.store(loader.dataset)
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
        due = one.calls < one.got and (one.ahead or not one.calls)  # batches were fetched ahead, or listed
        if one.was_cut or not due:
            self.recent = [p for p in self.recent if p is not one]

    def batch(self, one: Pass, batch: Any) -> Any:
        one.got += 1
        if self.control is not None:
            batch = self.control.batch(one, opened(batch), self)
        # a loop that was left by `break` drops its iterator, takes it again (persistent workers), or was an evaluation whose iterator is kept
        self.recent = [p for p in self.recent if not (p.ended or p is one or p.left(one.source))] + [one]
        one.recent.append(batch)
        self.drawn(batch)
        if (one.loader.num_workers > 1 or self.ranks > 1) and one.got <= 64:
            one.prints.append(records.fingerprint(batch))
        return batch

    def drawn(self, batch: Any) -> None:
        """Note a batch as the script gets it."""
        self.draws += 1
        self.evidence.batch(batch)
        if self.control is not None:
            self.fits.batch(batch)
            self.pairing.batch()

    # --- models

    def before_root(self, module: nn.Module, args: tuple, kwargs: dict) -> int | None:
        if self.control is not None:
            self.control.tick(self)
        if next(parameters_of(module), None) is None:
            return None
        self.last_root = (module, args, kwargs)
        if torch.is_grad_enabled():
            self._note_inputs(module, args, kwargs)
        if self.restart is not None and not self.backwards and torch.is_grad_enabled():
            self.restart.called(self, module)
        self.evidence.environments(events.replace)
        self.inner = []
        first = id(module) not in self.roots
        if first:
            self.roots[id(module)] = module
            for m in module.modules():
                for name, value in vars(m).items():
                    if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
                        self.plain[id(m), name] = value
        if (first or self.backwards < CLOSE) and torch.is_grad_enabled():
            inside = self.owner.setdefault(id(module), set())

            def note(m: nn.Module, given: Any) -> None:
                inside.add(id(m))
                if m is not module and isinstance(given, tuple) and len(self.inner) < 16:
                    self.inner.append(given)
                if not self.scrambled:
                    self.scrambled = records.scrambled(m, given)
                if first:
                    self.counts[id(m)] = self.counts.get(id(m), 0) + 1
                self.called.setdefault(id(m), (m, len(self.called), torch.is_grad_enabled()))
                self.evidence.made_anew.call(m, module, self.backwards)
                self.evidence.states.call(m, given, self.backwards)

            if self._hook is not None:  # of a call that raised
                self._hook.remove()
            self._hook = register_module_forward_pre_hook(note)
        return self.drops

    def _note_inputs(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Note models whose inputs have a gradient, and the first training call with two inputs of one shape."""
        if any(x.requires_grad for x in tensors((args, kwargs))):
            self.downstream.add(id(module))
        elif self.control is not None:
            self.first_call = self.last_root
        several = sum(isinstance(x, Tensor) and x.dim() > 0 for x in (*args, *kwargs.values())) > 1
        if several and module.training and len(self.several) < 8:
            self.several.setdefault(id(module), (module, args, kwargs))

    def root(self, module: nn.Module, args: tuple, kwargs: dict, out: Any, token: int | None) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        grad = torch.is_grad_enabled()
        if token is None:
            if grad and self.control is not None:
                self.busy = True
                self.evidence.criterion(module, args, kwargs)
                self.busy = False
            return
        drops = records.unintended(self.drops - token, module)
        norms = sum(m.training and has_statistics(m) for m in module.modules())
        row = (id(module), module.training, drops, norms)
        if grad:
            self.grad_modes.append((self.steps, id(module), module.training))
            self.perhaps_evaluation(row, (args, kwargs), out)
        else:
            self.gaps.called(row, (args, kwargs))
            self.evaluated_with(module)
        for one in self.recent:
            one.ahead |= not one.calls and one.got > 1
            one.calls += 1
            one.no_grad_calls += not grad
            if len(one.modes) < 200:
                one.modes.append(row)
        if not self.passes and not grad and len(self.calm_prints) < 4000:
            self.calm_prints.add(mark := records.fingerprint((args, kwargs)))
            self.evidence.made.add(mark)
        if grad and isinstance(kwargs.get("labels"), Tensor) and len(self.labels) < 100:
            from trainworthy.guard.measures.losses.targets import argument

            self.labels.append(argument(module, args, kwargs))
        if grad and self.control is not None and self.first_call is self.last_root:
            self.pairing.root(args, kwargs)
            self.indexed.root(args, kwargs)
            self.graphs.call(args, kwargs)
        if grad and self.control is not None and module.training:
            with contextlib.suppress(Exception):
                size = getattr(self.recent[-1].loader, "batch_size", None) if self.recent else None
                self.rows.root(module, args, kwargs, self.fits.batches, size or 0)
                self.collapse.root(module, args, kwargs, out)
        self._measure(module, args, kwargs, out, grad)
        self.evidence.root(self, module, args, kwargs, out, grad)

    def answer(self, module: nn.Module, args: tuple, kwargs: dict, out: Any) -> Any:
        """Return a model's outputs, or what a rehearsal puts in their place."""
        oracle = getattr(self.control, "oracle", None)
        if oracle is None or next(parameters_of(module), None) is None:
            return out
        return oracle.answer(self, (args, kwargs), out)

    def _measure(self, module: nn.Module, args: tuple, kwargs: dict, out: Any, grad: bool) -> None:
        one = self.recent[-1] if self.recent else None
        if one is None or one.calls > 40:
            return self.unloaded(module, (args, kwargs), grad) if one is None else None
        kind = "train" if one.backwards or (grad and not one.no_grad_calls) else "eval"
        x = first_float(args, kwargs)
        if x is not None:
            self.inputs[kind].setdefault(id(module), Measures()).read(x)
        if not grad or kind == "eval":
            self.evaluated[id(module)] = self.evaluated.get(id(module), 0) + 1
            self._score(one, module, args, kwargs, out)

    def _score(self, one: Pass, module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        """Count the samples of an evaluation that the model classifies correctly; with batch norm, also with batch
        statistics."""
        target = class_target(used(one.recent, (*args, *kwargs.values())), out)
        if target is None:
            pair = beside(out, tree_leaves(current(one, (args, kwargs))), (args, kwargs))
            one.pairs += [pair] if pair is not None and len(one.pairs) < 64 else []
            return
        logits = records.logits_of(out)
        one.seen += len(target)
        if logits.shape[1] <= 100 and len(one.answers) < 200:
            one.answers.append((target.cpu(), logits.argmax(1).cpu()))
        hits = int((logits.argmax(1) == target).sum())
        one.right += hits
        if not module.training and len(target) >= 4:
            self.rows.scored.setdefault(id(module), (module, args, kwargs, len(target)))
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
                again = records.logits_of(inner(*args, **kwargs))
            one.right_batch += int((again.argmax(1) == target).sum())
        except Exception:
            one.right_batch += hits
        finally:
            for m, momentum in zip(norms, momenta, strict=True):
                m.training, m.momentum = False, momentum
                m.num_batches_tracked.sub_(1)
            self.busy = False

    # --- schedulers, losses, states

    def scheduler(self, it: Any, frame: Any = None) -> None:
        if any(s.it is it for s in self.schedulers):
            return
        own = next(records.own_frames(frame), None)
        place = ("", 0) if own is None else (own.f_code.co_filename, own.f_lineno)
        self.schedulers.append(Sched(it, getattr(it, "optimizer", None), place))

    def schedule(self, it: Any, *, placed: bool = False) -> None:
        for one in self.schedulers:
            if one.it is it:
                one.placed |= placed
                one.at.append((self.steps, len(self.gaps[-1])))

    def plateau(self, it: Any, line: str) -> None:
        """ReduceLROnPlateau was stepped in a line of the script."""
        self.plateaus.setdefault(line, it.mode)

    def state(self, module: nn.Module, state: Any) -> None:
        if self.steps and module.training is not None:
            self.by_reference = self.by_reference or kept_by_reference(self)  # before the next one replaces it
            self.held = [row for row in self.held if row[0]() is not None] or self.held[-1:]
            try:
                self.held.append((weakref.ref(state), weakref.ref(module), self.steps, changes(module)))
            except TypeError:
                return

    def save(self, obj: Any, path: Any = None) -> None:
        if self.restart is not None and isinstance(path, (str, os.PathLike)):
            self.restart.saved(self, os.path.abspath(os.fspath(path)))
        self.empty_saves += bool(self.backwards) and isinstance(obj, dict) and not obj
        todo = [obj]
        while todo:
            one = todo.pop()
            self.saved.add(id(one))
            if isinstance(one, dict) and len(one) < 200:
                todo.extend(v for v in one.values() if isinstance(v, dict))

    def read(self, found: Any) -> None:
        """torch.load() returned: a whole model is not at its initial weights."""
        for one in found.values() if isinstance(found, dict) else (found,):
            if isinstance(one, nn.Module):
                self.loaded |= {id(p) for p in parameters_of(one)}

    def before_load(self, module: nn.Module, state: Any) -> None:
        if self.steps and isinstance(state, dict):
            own = {k: address_of(v) for k, v in module.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
            same = [k for k, v in state.items() if isinstance(v, Tensor) and v.numel() and own.get(k) == address_of(v)]
            self.self_loads += bool(own) and len(same) == len(own)

    def load(self, module: nn.Module, state: Any, out: Any) -> None:
        missing = set(getattr(out, "missing_keys", ()))
        names = dict(named_parameters_of(module))
        self.loaded |= {id(p) for n, p in names.items() if n not in missing}
        trained = {id(p) for group in self.groups.values() for p in group.parameters} if self.steps else set()
        self.partial_loads += filter(None, [partial_loads.fault(module, names, state, out, trained)])


def changes(module: nn.Module) -> int:
    """Return how often a module's weights were changed in place."""
    return sum(p._version for p in parameters_of(module))


def kept_by_reference(seen: Observer) -> int | None:
    """Return the step after which a state_dict was taken that is still held, and has changed with the weights."""
    for ref, owner, step, then in seen.held:
        kept, module = ref(), owner()
        if kept is None or module is None or id(kept) in seen.saved or seen.steps - step < 3 or not kept:
            continue
        if changes(module) == then:  # another model trains (clients of one server)
            continue
        own = {address_of(p) for p in (*parameters_of(module), *module.buffers())}
        if all(address_of(v) in own for v in kept.values() if isinstance(v, Tensor) and v.numel()):
            return step
    return None
