"""The gate of sharded runs: a short `train()` with a sharded model must do what it does with the whole model, which the
other gates check."""

import torch
from torch import Tensor
from trainworthy.core.base.dtensor import is_sharded
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.gates.recorder import STEPS
from trainworthy.core.loop.optim import exact
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.loop.shard import gathered
from trainworthy.core.recipe.stage import Stage, View

LOSS, WEIGHTS = 1e-3, 2e-2  # relative differences in fp32; AdamW turns rounding of tiny gradients into whole steps
COARSE = 20  # times that in bf16


@gate(
    "sharding",
    rows="C13",
    title="the sharded model trains and evaluates as the unsharded one",
    reads="data model loss counts optimizers evaluate metric state expect shard_units train",
    compares_ranks=True,
)
def sharding(context: GateContext) -> Finding:
    """Train four steps of two unequal micro-batches at the peak rate twice: with the whole model in each process, and
    sharded. Losses, evaluation, weights and EMA must agree to rounding, and every trained parameter must be sharded."""
    if context.expect.nondeterministic or context.expect.random_loss:
        raise Skip(context.expect.nondeterministic or context.expect.random_loss)
    world, most = context.accelerator.num_processes, max(2, context.expect.at_most(8))
    sizes = [most // 2 + 1, most - most // 2 - 1] if most > 2 else [1, 1]

    def trained(*, sharded: bool) -> tuple[Run, Stage, dict[str, float], dict[str, Tensor]]:
        plan = Rehearsal(steps=STEPS, batch_size=sum(sizes) * world, sizes=sizes, peak=True, due=(2,), shard=sharded)
        run, stage = context.build(plan)
        context.train(context.cfg, run, stage)
        val = stage.data["val"]
        some = View(val, range(min(len(val), stage.expect.at_most(64, times=8))))
        metrics = run.measure(stage, some, probe=True)
        weights = {f"model.{n}": t for n, t in gathered(stage.model, keep=True).state_dict().items()}
        if stage.ema_model is not None:
            weights |= {f"average.{n}": t for n, t in gathered(stage.ema_model, keep=True).state_dict().items()}
        return run, stage, metrics, weights

    before = {n: t.detach().cpu() for n, t in context.look()[1].model.state_dict().items()}
    first, _, metrics, weights = trained(sharded=False)
    run, stage, metrics_now, weights_now = trained(sharded=True)
    losses, losses_now = first.rehearsal.losses, run.rehearsal.losses
    times = 1 if run.precision == "fp32" else COARSE
    wrong = []
    whole = [n for n, p in stage.parameters().items() if not is_sharded(p)]
    if whole:
        wrong.append(f"{len(whole)} trained parameters are not sharded but whole in each process, e.g. {whole[0]}")
    loss_gap = max((abs(a - b) / max(abs(a), 1e-6) for a, b in zip(losses, losses_now, strict=False)), default=0.0)
    if len(losses) != len(losses_now) or not loss_gap <= LOSS * times:
        wrong.append(f"losses differ: whole {_short(losses)}, sharded {_short(losses_now)}")
    moved = {n: weights[f"model.{n}"] for n in before if f"model.{n}" in weights}
    distance = _norm([exact(t) - exact(before[n]) for n, t in moved.items() if t.is_floating_point()])
    gaps = {n: _norm([exact(t) - exact(weights_now[n])]) for n, t in weights.items() if t.is_floating_point()}
    gap = _norm([torch.tensor(v) for v in gaps.values()]) / max(distance, 1e-30)
    if not gap <= WEIGHTS * times:
        worst = max(gaps, key=gaps.__getitem__)
        wrong.append(f"weights differ by {gap:.1%} of the distance that they moved, most in {worst}")
    name = stage.gate_evaluator.metric.name
    off = abs(metrics[name] - metrics_now[name])
    if not off <= 0.02 * times * max(1.0, abs(metrics[name])):
        wrong.append(f"{name} {metrics[name]:.4f} of the whole model, {metrics_now[name]:.4f} of the sharded one")
    count = sum(p.numel() for p in stage.parameters().values())
    measured = (
        f"{count:,} parameters on {world} processes, {STEPS} steps: losses differ by {loss_gap:.0e}, weights by {gap:.1e} of "
        "the distance that they moved"
    )
    return Finding(
        not wrong, "; ".join(wrong) or measured,
        f"losses within {LOSS * times:g}, weights within {WEIGHTS * times:g} of their movement, the same {name}; all parameters sharded",
        "train() computes with the local shard of weights or gradients (a norm, a mean, an all_reduce, p.data)\n"
        "train() or the optimiser kept parameters from before they were sharded\n"
        "the loss or evaluate() calls a submodule of a unit of Stage.shard_units, and not the unit",
        evidence={"whole": losses, "sharded": losses_now, "gap": gap, "metrics": [metrics, metrics_now]},
    )  # fmt: skip


def _norm(tensors: list[Tensor]) -> float:
    return sum(t.double().square().sum().item() for t in tensors) ** 0.5


def _short(values: list[float]) -> str:
    return " ".join(f"{v:.5f}" for v in values)
