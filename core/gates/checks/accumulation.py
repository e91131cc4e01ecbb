"""The gate on the division of a batch into micro-batches and over processes."""

import json
import math
import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from trainworthy.core.base import seeds
from trainworthy.core.base.modes import without_random_hooks
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data.loader import cut
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.gradient import multiple
from trainworthy.core.gates.causes.named import explain_micro_batches
from trainworthy.core.gates.causes.prepared import cut_rows, joined, prepared_batches
from trainworthy.core.gates.gate import GateContext, fetch, own_size
from trainworthy.core.loop.optim import exact
from trainworthy.core.loop.precision import precision
from trainworthy.core.loop.run import Rehearsal, evaluating
from trainworthy.core.loop.update import denominator, summed
from trainworthy.core.recipe.stage import Stage

DRAWN = ", in eval mode: the model draws at random as it trains"
MIXES = (
    "samples of a batch are mixed while training (a flip, roll or permutation over the batch): in eval mode the gradients agree. On purpose: "
    "give the reason in `batch_dependence` of core.Expect"
)
MADE = ", of the loss on the batch that the loop makes: every micro-batch is made by itself"


@gate(
    "accumulation",
    rows="C10",
    title="the division into micro-batches does not change the gradient",
    reads="data model loss counts expect train",
    compares_ranks=True,
)
def accumulation(context: GateContext) -> Finding:
    """Run one step of `train()` on one global batch, whole and in equal and unequal micro-batches: the optimiser gets one gradient."""
    world, probe = context.accelerator.num_processes, context.peek()
    if probe.expect.batch_dependence:
        raise Skip(f"by design: {probe.expect.batch_dependence}")
    if probe.expect.nondeterministic:
        raise Skip(probe.expect.nondeterministic)
    each = _undivided(context, probe)
    one, even, cuts = _divisions(each, few=bool(probe.expect.gate_batch_size), alike=_alike(context, probe))
    limit = 1e-3 if precision(context.cfg, context.accelerator) == "fp32" else 5e-2

    def gradient(name: str, **how) -> list[Tensor]:
        plan = Rehearsal(steps=1, batch_size=each * world, sizes=cuts[name], peak=True, fixed=True)
        return _first_gradient(context, plan, made=made[name], **how)

    whole: list[Tensor] = []
    made: dict[str, list[dict]] = {name: [] for name in cuts}  # batches that the loop makes of the step's
    faults, stepped, moved = [], [], []

    def measure(**how) -> dict[str, float]:
        """Compare each division with the whole batch before the next one is made."""
        faults.clear()
        gaps: dict[str, float] = {}
        for name in cuts:
            grads = gradient(name, **how)
            stepped.append(bool(grads))
            moved.append(any(bool(g.any()) for g in grads))
            if name == one:
                whole[:] = [g.cpu() for g in grads]
            if len(grads) == len(whole):
                gaps[name] = _difference(grads, whole)
            else:
                faults.append(f"{name}: {len(grads)} gradients instead of {len(whole)}")
            del grads
        return gaps

    gaps, draws, mixed = measure(), False, False
    if not any(moved):
        idle = "the gradient is zero" if any(stepped) else "no optimiser stepped"
        raise Skip(f"{idle}, however the batch is split: nothing to compare (see wiring)")
    if not faults and max(gaps.values()) > limit and world == 1 and all(made.values()):
        gaps, mixed = _gaps_of_loss(context, joined(made[one]), cuts), True
    if not faults and max(gaps.values()) > limit and not mixed:
        draws = any(_difference(gradient(one, draws=k), whole) > limit for k in range(16))
        gaps = measure(in_eval=True) if draws else gaps
    ok, shape = not faults and max(gaps.values()) <= limit, max(gaps, key=lambda k: gaps[k], default=one)
    measured = ", ".join(f"{k} {v:.1e}" for k, v in gaps.items() if k != one)
    measured += DRAWN * draws + MADE * mixed
    if context.deep and world == 1 and ok and not draws and not mixed:
        gap = _from_two_processes(context, 2 * each)
        ok, measured = gap <= limit, f"{measured}, 2 processes {gap:.1e}"
    over = f" over {world} processes ({' + '.join(map(str, cut(each * world, world)))})" if world > 1 else ""
    return Finding(
        ok, "; ".join(faults) if faults else f"gradient against the whole batch{over}: {measured} (relative)", f"at most {limit:g}",
        "the loss returns a mean, or its counts are not those of the terms: return SUMS and count what they sum over\n"
        "micro-batches are averaged, or their gradients are not added\na loop of your own ignores step.batches[1:]",
        evidence={"gaps": gaps, "digest": _digest(whole)},
        cause="" if ok or faults or draws or mixed or world > 1 else
        _why_divided(context, [g.cpu() for g in gradient(shape)], whole, cuts[shape], equal_agree=gaps.get(even, 1.0) <= limit)
        or MIXES * (max(measure(in_eval=True).values(), default=1.0) <= limit),
    )  # fmt: skip


def _gaps_of_loss(context: GateContext, batch: dict, cuts: dict[str, list[int]]) -> dict[str, float]:
    """Return the differences between the gradient of `batch`, which the loop made, and of its divisions, without the loop: what it draws
    for a micro-batch (a mixup) depends on the division."""
    run, stage = context.build(Rehearsal(steps=1, fixed=True))
    _remove_randomness(stage.model, in_eval=True)
    stage.model.eval()
    weights = list(stage.parameters().values())

    def gradient(parts: list[dict]) -> list[Tensor]:
        total = [torch.zeros_like(w) for w in weights]
        counts = summed([stage.counts(part) for part in parts])
        for part in parts:
            with run.autocast():
                terms = stage.loss(stage.model, part)
            mean = sum(s / denominator(t, counts) for t, s in terms.items())
            for to, grad in zip(total, torch.autograd.grad(mean, weights, allow_unused=True), strict=True):
                if grad is not None:
                    to.add_(grad)
        return total

    whole = gradient([batch])
    return {name: _difference(gradient(cut_rows(batch, sizes)), whole) for name, sizes in cuts.items()}


def _alike(context: GateContext, stage: Stage) -> bool:
    """Return whether all micro-batches of the run have one size: a trainer that makes its own samples may weigh each alike."""
    train = context.cfg.train
    parts = train.accumulate * context.accelerator.num_processes
    return getattr(stage, "ask", None) is not None and train.batch_size % parts == 0


def _undivided(context: GateContext, probe: Stage) -> int:
    """Return the samples of the undivided batch: no more than the run takes at once, and so no more memory. A user's own loop states no size."""
    most = own_size(context) if context.sized else 8
    return max(4, min(probe.expect.at_most(8, times=2), most))


def _divisions(size: int, *, few: bool, alike: bool) -> tuple[str, str, dict[str, list[int]]]:
    """Return the names of the undivided and of the evenly divided batch, and the sizes of all three divisions by name; with `few` without
    the even one, because the uneven division finds the same faults; with `alike` without the uneven one."""
    half, most = size // 2, size // 2 + 1
    one, even = f"1x{size}", f"2x{half}"
    cuts = {one: [size], even: [half, half], f"{most}+{size - most}": [most, size - most]}
    if alike:
        return one, even, {name: cuts[name] for name in (one, even)}
    return one, even, {name: sizes for name, sizes in cuts.items() if not few or name != even}


def _why_divided(
    context: GateContext, got: list[Tensor], whole: list[Tensor], sizes: list[int], *, equal_agree: bool
) -> str:
    """Return the cause that fits a gradient `got` of micro-batches of `sizes`, which is not that of the `whole` batch."""
    first = _first_gradient(context, Rehearsal(steps=1, batch_size=sizes[0], sizes=sizes[:1], peak=True, fixed=True))
    run, stage = context.look()
    means = False
    if "train" in stage.data:
        data = stage.data["train"]
        with evaluating(stage.model), run.autocast():
            sums = [stage.loss(stage.model, fetch(data, [0] * n, 0, run.device)) for n in (2, 4)]
        means = all(abs(float(sums[1][k]) - float(v)) <= 1e-3 * abs(float(v)) for k, v in sums[0].items())
    return explain_micro_batches(
        _difference(got, first), multiple(got, whole), len(sizes), mean=means, equal_agree=equal_agree
    )


def _difference(grads: list[Tensor], whole: list[Tensor]) -> float:
    """Norm of the difference over the norm of `whole`; inf if one of them holds no gradient."""
    if not grads or not any(w.any() for w in whole):
        return math.inf if grads or any(w.any() for w in whole) else 0.0
    difference = sum(
        (exact(a) - exact(b.to(a.device))).square().sum().cpu() for a, b in zip(grads, whole, strict=True)
    ).sqrt()
    return (difference / sum(exact(g).square().sum() for g in whole).sqrt()).item()


def _first_gradient(
    context: GateContext,
    plan: Rehearsal,
    *,
    draws: int | None = None,
    in_eval: bool = False,
    made: list[dict] | None = None,
) -> list[Tensor]:
    """Return the optimiser's gradient at the first step of `train()` under `plan`; with the model's `draws` of that
    number, or (`in_eval`) with the whole model in eval mode. `made` gets the batches that the loop made of the step's."""
    run, stage = context.build(plan)
    run.cfg = replace(run.cfg, optim=replace(run.cfg.optim, clip=math.inf))  # a clipped gradient hides its scale
    _remove_randomness(stage.model, in_eval)
    if draws is not None:
        own = stage.loss

        def draw(*_) -> None:
            seeds.seed_global(context.cfg.run.seed, "draws", draws)

        def drawn(model: nn.Module, batch: dict) -> dict[str, Tensor]:
            draw()
            return own(model, batch)

        stage.loss = drawn
        stage.model.register_forward_pre_hook(draw)  # a hosted trainer has its own loss
    grads: list[Tensor] = []

    def keep(optimizer, _args, _kwargs) -> None:
        if not grads:
            every = [p for g in optimizer.param_groups for p in g["params"]]
            grads.extend(torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in every)

    quiet = without_random_hooks(stage.model.parameters()) if in_eval else nullcontext()
    with quiet, register_optimizer_step_pre_hook(keep):
        context.train(context.cfg, run, stage)
    if made is not None:
        made[:] = prepared_batches(run, stage)
    return grads


def _digest(grads: list[Tensor]) -> list[float]:
    """Four random projections of a gradient, comparable across processes."""
    out = [0.0] * 4
    for i, grad in enumerate(grads):
        signs = torch.randn(4, grad.numel(), generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        out = [o + d for o, d in zip(out, (signs @ grad.cpu().double().flatten()).tolist(), strict=True)]
    return out


def over_two_processes(context: GateContext, gate: str) -> dict:
    """Return the verdict of one gate over two real processes, started with -n 2."""
    command = [sys.executable, "-m", "trainworthy", "check", *context.argv, "-n", "2", "--only", gate]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
    lines = [line for line in done.stdout.splitlines() if line.strip().startswith("evidence in ")]
    if done.returncode or not lines:
        raise RuntimeError(f"`{shlex.join(command[2:])}` failed: {done.stderr.strip()[-500:]}")
    return json.loads(Path(lines[0].split()[2]).read_text())["gates"][0]


def _from_two_processes(context: GateContext, size: int) -> float:
    """Relative difference between the gradient of `size` samples on this process and over two real processes."""
    theirs = torch.tensor(over_two_processes(context, "accumulation")["evidence"]["digest"])
    ours = torch.tensor(
        _digest(_first_gradient(context, Rehearsal(steps=1, batch_size=size, sizes=[size], peak=True, fixed=True)))
    )
    return ((theirs - ours).norm() / ours.norm()).item()


def _stay_in_eval(module: nn.Module, _: tuple) -> None:
    module.eval()


def _remove_randomness(model: nn.Module, in_eval: bool) -> None:
    """Switch off dropout, whose draws differ between divisions, and batch norm's batch statistics, which depend on the
    micro-batch. Both are healthy differences. `in_eval`: put every module in eval mode."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if in_eval or isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.register_forward_pre_hook(_stay_in_eval)  # the loop sets train mode again
