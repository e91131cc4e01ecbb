"""Runs a few iterations of the recipe's own `train()` and records them through torch's hooks on forwards and optimiser
steps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from trainworthy.core.base import seeds
from trainworthy.core.base.dtensor import local
from trainworthy.core.base.verdict import Skip
from trainworthy.core.gates.causes.frozen import contents, explain_moved
from trainworthy.core.gates.causes.gradient import Candidates, Experiment, against, experiments, rolled, sample, small
from trainworthy.core.gates.causes.perturbed import Perturbed
from trainworthy.core.gates.causes.prepared import Made, prepared_batches
from trainworthy.core.gates.causes.shared_memory import shared
from trainworthy.core.gates.fingerprints import fingerprint, fingerprints
from trainworthy.core.gates.gate import GateContext, micro_batch_sizes
from trainworthy.core.loop.init_from import equal, holds_state, match
from trainworthy.core.loop.run import Rehearsal, Run, Step
from trainworthy.core.loop.update import denominator, over_ranks, summed
from trainworthy.core.recipe.stage import Data, Stage

STEPS, BATCH = 4, 16
SPOTS, SHARE = 4096, 16  # entries of a tensor that must move: a sixteenth (64 or more), at most so many


@dataclass
class Record:
    """What the hooks recorded during `train()`."""

    gradients: list[dict[str, float]] = field(default_factory=list)
    """Per optimiser step: cosine and relative norm of the optimiser's gradient against the loss's own."""
    steppers: set[int] = field(default_factory=set)
    """Ids of the optimisers that stepped."""
    received: dict[str, float] = field(default_factory=dict)
    """Largest gradient of each trained parameter; no entry: it never got one."""
    silent: list[bool] = field(default_factory=list)
    """Per optimiser step: whether there were gradients, each of them exactly 0."""
    moved: dict[str, float] = field(default_factory=dict)
    """Largest fraction, over the steps, of entries with a gradient that really changed."""
    evaluating: list[int] = field(default_factory=list)
    """Steps (from 1) with a training forward while the model was in eval mode."""
    batch: dict = field(default_factory=dict)
    """Batch of the last update, if the loop made it."""
    experiments: list[Experiment] = field(default_factory=list)
    """For the first step whose gradient was not the loss's own: the candidates that were compared, best fit first."""
    between: dict[int, list[str]] = field(default_factory=dict)
    """Step -> trained parameters that changed between the end of that step and the next optimiser step."""
    frozen_moved: list[str] = field(default_factory=list)
    frozen_cause: str = ""
    """What changed them."""
    loaded_itself: list[str] = field(default_factory=list)
    """Parameters that `load_state_dict` got from their own memory: the saved state was not copied."""
    read: dict[str, dict[int, set]] = field(default_factory=dict)
    """If the loop makes its own samples from a data set (prompts): data set -> step -> what it read of it to train."""
    nonfinite: list[str] = field(default_factory=list)
    dropped: float = 0.0
    """Largest drop probability of dropout in a training forward."""
    start: tuple[float, list[str], list[str]] | None = None
    """Before the first optimiser step of a pretrained model: fraction of its parameters equal to the file's, names that
    differ from the file, kinds of state that an optimiser already held."""
    shared: dict[str, str] = field(default_factory=dict)
    """Object that the stage keeps -> trained parameters that share its memory, at the end of the rehearsal."""
    left: dict[str, Tensor] = field(default_factory=dict)
    """Fingerprints of everything that a checkpoint must restore, at the end of the rehearsal; only if samples are
    expensive."""


class Recorder:
    """Hooks on every module forward and optimiser step of one rehearsal."""

    def __init__(self, run: Run, stage: Stage):
        self.run, self.stage, self.record = run, stage, Record()
        self._names = {id(p): n for n, p in stage.model.named_parameters()}
        self._busy = False
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._last: tuple[list[str], Tensor] | None = None  # names, entries of the last step's gradient
        self._previous: Step | None = None
        self._draws: list[Tensor] | None = None  # states of the generators before the last update
        self._wrapped: list[Data] = []
        self._ask = getattr(stage, "ask", None) if "train" not in stage.data else None
        self._perturbed = Perturbed()
        self._left: dict[str, list[Tensor]] = {}  # fingerprints of the parameters after each of their optimiser's steps
        self._stepped: set[int] = set()  # addresses of what an optimiser stepped with a gradient

    def __enter__(self) -> Record:
        self._frozen = self._fingerprints()
        self._hooks = [
            register_module_forward_pre_hook(self._forward),
            register_optimizer_step_pre_hook(self._pre_step),
            register_optimizer_step_post_hook(self._post_step),
            self.stage.model.register_load_state_dict_pre_hook(self._loading),
        ]
        self._dropout, F.dropout = F.dropout, self._drop  # nn.Dropout looks it up by this name, too
        if "train" not in self.stage.data:
            self._listen()
        return self.record

    def __exit__(self, *_) -> None:
        F.dropout = self._dropout
        for hook in self._hooks:
            hook.remove()
        for one in self._wrapped:
            del one.get
        if self._ask is not None:
            self.stage.ask = self._ask
        after = self._fingerprints()
        moved = [n for n, t in self._frozen.items() if not torch.equal(t, after[n])]
        if moved:
            tensors, earlier = self._watched(), contents(self._left, self.stage.parameters())
            # An average of weights may move; a copy of them is a reference that follows what it is compared with.
            kept = {
                n: tensors[n]
                for n in moved
                if not self.stage.follows(n) or (tensors[n].numel(), int(after[n])) in earlier
            }
            self.record.frozen_moved = list(kept)
            self.record.frozen_cause = explain_moved(kept, after, self._stepped, earlier)

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Note the share, and drop it."""
        if training and torch.is_grad_enabled():
            self.record.dropped = max(self.record.dropped, float(p))
        return self._dropout(input, p, training, inplace)

    def _listen(self) -> None:
        """Note the samples that the loop itself reads on the training path, by step."""

        def noted(name: str, own: Callable) -> Callable:
            def get(index: int, generator: torch.Generator | None) -> dict[str, Any]:
                if generator is not None:
                    self.record.read.setdefault(name, {}).setdefault(self.run.step, set()).add(index)
                return own(index, generator)

            return get

        for name, data in self.stage.data.items():
            if name not in ("val", "test") and "get" not in vars(data):
                data.get = noted(name, data.get)
                self._wrapped.append(data)
        if self._ask is not None:  # a hosted trainer's rows

            def recording(step: int) -> list[dict]:
                rows = self._ask(step)
                self.record.read.setdefault("rows", {}).setdefault(step, set()).update(map(repr, rows))
                return rows

            self.stage.ask = recording

    def _watched(self) -> dict[str, Tensor]:
        """Tensors that must not change: parameters in no optimiser, buffers of modules without trained parameters, and
        `frozen_modules`."""
        trained = self.stage.parameters()
        out = self.stage.frozen_tensors
        for prefix, module in self.stage.model.named_modules():
            own = [n for n, _ in module.named_parameters(prefix=prefix)]
            if own and not any(n in trained for n in own):
                out |= dict(module.named_buffers(prefix=prefix, recurse=False))
        return out

    def _fingerprints(self) -> dict[str, Tensor]:
        return {n: fingerprint(t) for n, t in self._watched().items()}

    def _loading(self, module: nn.Module, state: dict, *_) -> None:
        """Note trained parameters that are loaded from their own memory, after it has changed."""
        if self._left:
            self.record.loaded_itself += [
                n
                for n in self.stage.parameters()
                if n in state and state[n].data_ptr() == module.get_parameter(n).data_ptr()
            ]

    def _forward(self, module: nn.Module, _args) -> None:
        if module is self.stage.model and torch.is_grad_enabled() and not self._busy:
            self._perturbed.forward(self.stage.parameters())
            self.record.evaluating += [self.run.step + 1] * (not module.training)

    def _pre_step(self, optimizer, _args, _kwargs) -> None:
        mine = {self._names[id(p)]: p for g in optimizer.param_groups for p in g["params"] if id(p) in self._names}
        self.record.steppers.add(id(optimizer))
        if self.record.start is None and self.stage.pretrained is not None:
            self.record.start = self._first(optimizer)
        self._before = {}
        moved = [n for n, p in mine.items() if n in self._left and not torch.equal(fingerprint(p), self._left[n][-1])]
        self.record.between.setdefault(self.run.step, []).extend(moved)
        for name, p in mine.items():
            if p.grad is None:
                continue
            size = p.grad.abs().max().item()
            if size != size or size == float("inf"):
                self.record.nonfinite.append(name)
            self.record.received[name] = max(self.record.received.get(name, 0.0), size)
            # The largest entry: a regular grid can hit only kernel corners, which get no gradient on a 1x1 map
            if size > 0:
                count = min(p.numel(), SPOTS, max(64, p.numel() // SHARE))
                grad, spots = p.grad.flatten().abs().topk(count)
                live = spots[grad > 1e-3 * grad[0]]
                self._before[name] = (live, p.detach().flatten()[live].clone())
        self.record.silent.append(not self._before and any(p.grad is not None for p in mine.values()))
        batches = self.run.current and (self.run.current.batches or self.run.used_batches)
        if "train" not in self.stage.data and batches:
            self.record.batch = batches[0]
        expect = self.stage.expect
        # With expensive samples, compare only step 2 (stale gradients of step 1) and step 3 (after the evaluation).
        needed = not expect.gate_batch_size or self.run.step in (1, 2)
        together = self.run.used_optimizers if optimizer in self.run.used_optimizers else [optimizer]
        # The first compares for all that step on one gradient: after it the weights are others, and one norm is clipped
        if not expect.random_loss and batches and needed and optimizer is together[0]:
            held = {id(p) for o in together for g in o.param_groups for p in g["params"]}
            given = {n: p for n, p in self.stage.parameters().items() if id(p) in held and p.grad is not None}
            if given:
                # GradScaler's scale, by which a fused optimiser divides gradients.
                scale = getattr(optimizer, "grad_scale", None)
                self.record.gradients.append(self._compare(given, 1.0 if scale is None else float(scale)))
        self._previous = self.run.current

    def _first(self, optimizer: torch.optim.Optimizer) -> tuple[float, list[str], list[str]]:
        stage = self.stage
        old = {k for o in (optimizer, *stage.optimizers.values()) for k in holds_state(o)}
        pairs = match(stage.model, stage.pretrained).pairs
        return *equal(stage.model, pairs, fresh=stage.expect.new_parameters), sorted(old)

    def _post_step(self, optimizer, _args, _kwargs) -> None:
        self._perturbed.stepped()
        for g in optimizer.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    self._stepped.add(local(p).data_ptr())
                name = self._names.get(id(p))
                if name is not None:
                    self._left.setdefault(name, []).append(fingerprint(p))
                if name in self._before:
                    live, old = self._before[name]
                    share = (p.detach().flatten()[live] != old).float().mean().item() if len(live) else 0.0
                    self.record.moved[name] = max(self.record.moved.get(name, 0.0), share)

    def _compare(self, params: dict[str, nn.Parameter], scale: float) -> dict[str, float]:
        """Compare the optimiser's gradient, divided by `scale`, with a fresh one of the same loss on the same global
        batch and the same draws."""
        run, stage, step = self.run, self.stage, self.run.current
        batches = step.batches or run.used_batches
        weights = list(params.values())
        got_now = [p.grad.detach() if scale == 1 else p.grad.detach() / scale for p in weights]
        (fresh,) = self._own(batches, weights, step)
        local = [f.clone() for f in fresh] if run.world > 1 else None
        found, odd = self._against(fresh, weights, scale)
        for own in self._as_the_loop(batches, weights, step) if odd else ():
            better, odd = self._against(own, weights, scale)
            if not odd:
                found = better
                break
        self._draws = run.used_draws
        if odd and not self.record.experiments and small(fresh):
            same = self._last is not None and self._last[0] == list(params)
            last = self._last[1] if same else None
            stale = None  # with step() first, the weights have not changed since that batch
            if self._previous and self._previous.batches and self._previous is not step:
                (stale,) = self._own(self._previous.batches, weights, self._previous)
            fields = stage.data["train"].fields if "train" in stage.data else {}
            targets = [k for k, f in fields.items() if f.role == "target"]
            moved = [rolled(b, targets) for b in batches]

            def neighbours() -> list[Tensor] | None:
                if run.world > 1 or None in moved:
                    return None
                return self._own(moved, weights, step)[0]

            some = self._own(batches, weights, step, each=True) if len(batches) > 1 and run.world == 1 else []
            self.record.experiments = experiments(Candidates(got_now, fresh, last, stale, some, local, neighbours))
        self._last = (list(params), sample(got_now).cpu())
        return found

    def _as_the_loop(self, batches: list[dict], weights: list[nn.Parameter], step: Step) -> Iterator[list[Tensor]]:
        """Yield the gradient after what a loop may do before its update: draw and make batches, or change the weights and set them back."""
        run, stage, before, draws = self.run, self.stage, self._draws, self.run.used_draws
        if draws and not (before and torch.equal(before[0], draws[0])):
            yield self._own(prepared_batches(run, stage) or batches, weights, step, draws)[0]
        if self._perturbed.set_back(stage.parameters()):
            with self._perturbed.again(stage.parameters()):
                (own,) = self._own(batches, weights, step)
            yield own

    def _against(self, fresh: list[Tensor], weights: list[nn.Parameter], scale: float) -> tuple[dict[str, float], bool]:
        """Return (cosine and norms of the optimiser's gradient and of `fresh`, whether these differ). On several processes `fresh` becomes
        their sum."""
        if self.run.world > 1:
            for f in fresh:
                dist.all_reduce(f)
        return against([p.grad for p in weights], fresh, scale, self.run.cfg.optim.clip)

    def _own(
        self,
        batches: list[dict],
        weights: list[nn.Parameter],
        step: Step,
        draws: list[Tensor] | None = None,
        *,
        each: bool = False,
    ) -> list[list[Tensor]]:
        """Return the gradient of the step's mean loss; with `each`, that of each micro-batch. `draws`: state of the generators (`take`), for
        a loop that draws before its update; default: as the step begins."""
        run, stage = self.run, self.stage
        self._busy, loop = True, seeds.state()
        buffers = {n: b.clone() for n, b in stage.model.named_buffers()}
        parts = []
        try:
            seeds.seed_global(run.cfg.run.seed, "model", step.index, run.rank)
            if draws is not None:
                seeds.restore(draws)
            counts = over_ranks(run, summed([stage.counts(b) for b in batches]))
            scale = run.scaler.get_scale()  # as in the step: without it small gradients are zero in fp16
            with torch.enable_grad():
                for batch in batches:
                    with run.autocast():
                        terms = (run.used_loss or stage.loss)(stage.model, batch)
                    mean = scale * sum(s / denominator(t, counts) for t, s in terms.items())
                    grads = torch.autograd.grad(mean, weights, allow_unused=True)
                    grads = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, grads, strict=True)]
                    if scale != 1:
                        grads = [g / scale for g in grads]
                    if parts and not each:
                        for i, grad in enumerate(grads):  # not in place: two weights may have got the same tensor
                            parts[0][i], grads[i] = parts[0][i] + grad, None
                    else:
                        parts.append(grads)
                    del grads, terms, mean
        finally:
            with torch.no_grad():
                for name, buffer in stage.model.named_buffers():
                    buffer.copy_(buffers[name])
            seeds.restore(loop)  # or every update of an iteration would draw the same
            self._busy = False
        return parts


def rehearse(context: GateContext, plan: Rehearsal) -> tuple[Run, Stage, Record]:
    """Run the recipe's `train()` under `plan` with the recorder on."""
    run, stage = context.build(plan)
    with Recorder(run, stage) as record:
        context.train(context.cfg, run, stage)
    record.shared = shared(stage)  # now: later its weights are moved (`GateContext.put_away`)
    if stage.expect.gate_batch_size:
        record.left = fingerprints(stage)
    return run, stage, record


def rehearsed(context: GateContext) -> tuple[Run, Stage, Record]:
    """Return the rehearsal that several gates share: four steps of sixteen samples at the peak rate, an evaluation after the second."""
    return context.once("rehearsal", lambda: rehearse(context, rehearsal_plan(context)))


def rehearsal_plan(context: GateContext, **how: Any) -> Rehearsal:
    """Return the plan of that rehearsal. Its micro-batches are no larger than the run's own."""
    world = context.accelerator.num_processes
    size = max(context.expect.at_most(BATCH), 2 * world, context.cfg.train.accumulate * world)
    return Rehearsal(steps=STEPS, batch_size=size, sizes=micro_batch_sizes(context, size), peak=True, due=(2,), **how)


def training_samples(context: GateContext) -> Data:
    """Return what the loss reads: the training set, or the samples of the rehearsed loop's last update."""
    _, stage, record = rehearsed(context)
    if "train" not in stage.data and not record.batch:
        raise Skip("the loop makes its own samples and updates by itself: nothing to read (see wiring)")
    return stage.data["train"] if "train" in stage.data else Made(record.batch)
