"""One optimiser step on micro-batches: the loss over the global batch, its gradient, clipping and the finite check."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trainworthy.core.base import seeds
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop import optim, shard
from trainworthy.core.loop.journal import finite
from trainworthy.core.loop.precision import autocast
from trainworthy.core.recipe.stage import Stage

if TYPE_CHECKING:
    from trainworthy.core.loop.run import Run


SUMS = "{name: sum over the batch's samples}, e.g. by `.sum()`; core divides it by the stage's counts"


def take(
    run: Run, stage: Stage, batches: list[dict], *, optimizer: str | None = None, loss: Callable | None = None
) -> dict[str, Tensor]:
    """Take the step that `Run.update` documents."""
    steppers = [stage.optimizers[optimizer]] if optimizer else [*stage.optimizers.values()]
    parameters = [p for o in steppers for g in o.param_groups for p in g["params"]]
    for p in parameters:
        p.grad = None

    run.used_loss, run.used_batches, run.used_optimizers = loss, batches, steppers  # a gate compares the gradient
    run.used_draws = seeds.state() if run.rehearsal else None
    counts = over_ranks(run, summed([stage.counts(b) for b in batches]))
    objective = objective_of(run, stage, loss)
    sharded = run.shard != shard.NONE
    wrapped = run.world if loss is None and not sharded else 1  # undoes DDP's average over ranks
    sums: dict[str, Tensor] = {}
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        if sharded:
            stage.model.set_requires_gradient_sync(last)  # type: ignore[operator]  # FSDP's
        with contextlib.nullcontext() if last or wrapped == 1 else objective.no_sync():  # type: ignore[operator]  # DDP's
            terms = _sums(objective(batch))
            # d(mean)/d(sum) = 1 / denominator is passed to autograd directly, without an operation in the graph
            learnt = {t: s for t, s in terms.items() if s.requires_grad}
            shares = [_fill(s, wrapped / denominator(t, counts)) for t, s in learnt.items()]
            torch.autograd.backward(list(learnt.values()), run.scaler.scale(shares))
        for term, value in terms.items():
            sums[term] = sums[term] + value.detach() if term in sums else value.detach()

    if wrapped < run.world and not sharded:  # DDP does not wrap a custom loss, so sum its gradients here
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
    for stepper in steppers:
        run.scaler.unscale_(stepper)
    grads = [p.grad for p in parameters if p.grad is not None]
    clip = shard.clip if sharded else optim.clip
    norm = clip(grads, run.cfg.optim.clip) if grads else torch.zeros((), device=run.device)
    own = functools.reduce(torch.add, sums.values()) if run.world > 1 else None
    means = {t: s / denominator(t, counts) for t, s in over_ranks(run, sums).items()}
    total = functools.reduce(torch.add, means.values())
    values = {"loss": total, **(means if len(means) > 1 else {}), "grad_norm": norm}
    stacked = torch.stack([v.float() for v in values.values()])
    _guarded_step(run, steppers, stacked)

    run.log_update(steppers, batches, list(values), stacked, own=own)
    return values


def _sums(terms: Any) -> Mapping[str, Tensor]:
    """Return what a loss returned if it is sums by name, else raise."""
    refuse_unnamed(terms)
    for term, value in terms.items():
        if value.ndim:
            raise UserError(f"the loss term '{term}' is not one number", got=f"shape {tuple(value.shape)}", needed=SUMS)
    return terms


def refuse_unnamed(terms: Any) -> None:
    if not isinstance(terms, Mapping):
        raise UserError("the stage's loss returns no terms", got=type(terms).__name__, needed=SUMS)


def _guarded_step(run: Run, steppers: list[torch.optim.Optimizer], values: Tensor) -> None:
    """Step if all `values` are finite. Zeroed gradients would still decay weights and change moments, so the step
    is skipped."""
    if run.scaler.is_enabled():
        for opt in steppers:
            run.scaler.step(opt)  # the scaler skips a step with an overflowed gradient
        run.scaler.update()
    elif run.device.type != "cpu" and all(getattr(opt, "_step_supports_amp_scaling", False) for opt in steppers):
        found_inf = ~torch.isfinite(values.sum())  # a fused kernel skips on the device, without a sync
        for opt in steppers:
            opt.grad_scale, opt.found_inf = None, found_inf.float()  # type: ignore[attr-defined]  # as GradScaler does
            opt.step()
    elif finite(values.tolist()):  # no sync on a CPU, and 40 us faster than a kernel with found_inf; elsewhere a sync
        for opt in steppers:
            opt.step()
    elif run.device.type == "cpu":
        run.saw_bad = True


def objective_of(run: Run, stage: Stage, loss: Callable | None) -> nn.Module:
    """Return one module whose forward IS the recipe's loss, wrapped once per stage for several processes."""
    if loss is not None:
        return Objective(run, stage.model, loss)
    if stage.wrapped is None or stage.wrapped[0] is not stage.model:
        module: nn.Module = Objective(run, stage.model, stage.loss)
        if run.world > 1 and run.shard == shard.NONE:
            module = run.accelerator.prepare_model(module)
        if run.cfg.train.compile and run.mode.compiles:
            module.compile()
        # Stored in the stage: a loss that refers to its run would close a reference cycle
        stage.wrapped = (stage.model, module)
    return stage.wrapped[1]


def over_ranks(run: Run, values: dict[str, Any]) -> dict[str, Any]:
    if run.world == 1:
        return values
    stacked = torch.stack([torch.as_tensor(v, dtype=torch.float64 if run.device.type == "cpu" else torch.float32,
                                           device=run.device) for v in values.values()])  # fmt: skip
    dist.all_reduce(stacked)
    return dict(zip(values, stacked.unbind(), strict=True))


class Objective(nn.Module):
    """A module whose forward is the recipe's loss in the run's precision; DDP wraps it."""

    def __init__(self, run: Run, model: nn.Module, loss: Callable):
        super().__init__()
        self.model, self._loss = model, loss
        self._device, self._precision = run.device, run.precision

    def forward(self, batch: dict) -> dict[str, Tensor]:
        with autocast(self._device, self._precision):
            return self._loss(self.model, batch)


def _fill(like: Tensor, value: float | Tensor) -> Tensor:
    """Return `value` with shape, type and device of `like`, without a transfer from the host."""
    return value.to(like).expand_as(like) if isinstance(value, Tensor) else like.new_full(like.shape, value)


def summed(counts: Sequence[Mapping[str, float | Tensor]]) -> dict[str, float | Tensor]:
    return {t: sum(c[t] for c in counts) for t in counts[0]}


def denominator(term: str, counts: Mapping[str, Any]) -> Any:
    """Return the denominator for the sum of `term`; a batch without any count contributes 0 / 1."""
    if term not in counts and "*" not in counts:
        raise UserError(f"the loss term '{term}' has no denominator", got=", ".join(counts),
                        needed=f"'{term}' or '*' in what the stage's counts return")  # fmt: skip
    count = counts.get(term, counts.get("*"))
    return count.clamp_min(1e-12) if isinstance(count, Tensor) else count or 1.0


def training_modes(stage: Stage) -> None:
    """Set trained modules to train mode and frozen ones to eval mode (their dropout and batch norm must not be
    active)."""
    trained = {id(p) for p in stage.parameters().values()}
    for parameter in stage.model.parameters():
        parameter.requires_grad_(id(parameter) in trained)

    def walk(module: nn.Module, above: bool) -> None:
        own = list(module.parameters())
        module.training = any(id(p) in trained for p in own) if own else above  # dropout follows its parent
        for child in module.children():
            walk(child, module.training)

    walk(stage.model, True)
