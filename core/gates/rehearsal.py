"""Gates on the loop: wiring, accumulation, resume. They rehearse the recipe's own `train()`."""

import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from trainworthy.core.base import seeds
from trainworthy.core.base.dtensor import local
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data.loader import cut
from trainworthy.core.gates import gate
from trainworthy.core.gates.diagnosis import diagnosed, multiple
from trainworthy.core.gates.gate import GateContext, fetch
from trainworthy.core.gates.named_causes import of_division
from trainworthy.core.gates.recorder import STEPS, Record, bits, four, rehearsed
from trainworthy.core.gates.resume_causes import Watch, first_cause, saved
from trainworthy.core.loop.optim import exact
from trainworthy.core.loop.run import Plan, Run, evaluating, precision
from trainworthy.core.loop.shard import NONE, mode
from trainworthy.core.recipe.stage import Stage


def _gradient_fault(record: Record, clip: float, *, tolerance: float) -> str:
    """Return the first gradient in the optimiser that is not the loss's own (clipped or not); empty if there is
    none."""
    for i, g in enumerate(record.gradients, 1):
        expected = min(g["own_norm"], clip)
        if g["norm"] == g["own_norm"] == 0:
            continue  # a zero gradient has no direction; parameters without gradient are reported separately
        if g["cosine"] < 1 - tolerance:
            return f"at step {i} the gradient in the optimiser points elsewhere than the loss's own (cosine {g['cosine']:.3f})"
        if (
            abs(g["norm"] - expected) > tolerance * expected
            and abs(g["norm"] - g["own_norm"]) > tolerance * g["own_norm"]
        ):
            return f"at step {i} the gradient in the optimiser has norm {g['norm']:.3g}, the loss's own {g['own_norm']:.3g}"
    return ""


def _tolerance(run: Run) -> float:
    return 0.01 if run.precision == "fp32" else 0.05


@gate(
    "wiring",
    rows="C3 C9",
    title="trained parameters get the loss's gradient and change, frozen ones do not",
    reads="model loss counts optimizers expect train",
)
def wiring(proof: GateContext) -> Finding:
    """Checks several steps at the peak rate, so that a zero-initialised head or a warmup raises no false alarm."""
    run, stage, record = rehearsed(proof)
    trained, expect = stage.parameters(), stage.expect
    total = sum(p.numel() for p in stage.model.parameters())
    count = sum(p.numel() for p in trained.values())
    causes = run.drift.splitlines()
    wrong = causes[:1] + [line.removeprefix("  measured:     ") for line in causes if "measured:" in line]
    stray = [
        n for n, _ in stage.model.named_parameters() if n not in trained and not n.startswith(expect.frozen or ("\0",))
    ]
    if stray:
        wrong.append(f"{len(stray)} parameter tensors are in no optimiser and not declared frozen, e.g. {stray[0]}")
    empty = [
        f"{k}[{g.get('name', i)}]"
        for k, o in stage.optimizers.items()
        for i, g in enumerate(o.param_groups)
        if not g["params"]
    ]
    if empty:
        wrong.append(f"empty optimiser groups: {', '.join(empty)}")
    inside = {id(p) for p in stage.model.parameters()}
    foreign = sum(id(p) not in inside for o in stage.optimizers.values() for g in o.param_groups for p in g["params"])
    if foreign:
        wrong.append(
            f"{foreign} tensors in an optimiser are not part of the model: they train, but are neither saved nor exported"
        )
    if not record.gradients and not record.received:
        wrong.append("no optimiser stepped")
    deaf = [n for n in trained if record.received.get(n, 0.0) == 0 and not n.startswith(expect.no_gradient or ("\0",))]
    if deaf:
        wrong.append(f"{len(deaf)} of {len(trained)} tensors never got a gradient, e.g. {deaf[0]}")
    still = [n for n in trained if n not in deaf and n in record.received and record.moved.get(n, 0.0) < 0.5
             and not n.startswith(expect.no_gradient or ("\0",))]  # fmt: skip
    if still:
        worst = min(record.moved.get(n, 0.0) for n in still)
        wrong.append(
            f"{len(still)} of {len(trained)} tensors get a gradient but hardly move ({worst:.0%} of {still[0]})"
        )
    if record.nonfinite:
        wrong.append(f"non-finite gradient in {record.nonfinite[0]}")
    if record.frozen_moved:
        wrong.append(f"{len(record.frozen_moved)} frozen tensors moved, e.g. {record.frozen_moved[0]}")
    fault = _gradient_fault(record, proof.cfg.optim.clip, tolerance=_tolerance(run))
    if fault:
        wrong.append(fault)
    named = [(g.get("name", k), g["params"]) for k, o in stage.optimizers.items() for g in o.param_groups]
    groups = ", ".join(f"{name} {sum(p.numel() for p in some):,}" for name, some in named)
    groups = groups if len(named) <= 4 else f"{len(named)} groups, {named[0][0]} to {named[-1][0]}"
    return Finding(
        not wrong, "; ".join(wrong) if wrong else f"{count:,} of {total:,} parameters train ({groups}), all moved in {STEPS} steps",
        "every parameter trains or is declared frozen; gradients present, finite, the loss's own; weights move, frozen ones do not",
        "".join(f"{line.split(':', 1)[-1].strip()}\n" for line in causes[1:] if "measured:" not in line)
        + "the optimiser was built over a part of the model, before it was replaced, or over more than it (a frozen teacher)\n"
        "a detach(), no_grad() or argmax cuts the graph\nzero_grad() is missing: gradients of earlier steps are added\n"
        "the rate is too small for the weights' precision (bf16 weights without an fp32 copy)",
        evidence={"gradients": record.gradients, "moved": {n: record.moved.get(n, 0.0) for n in trained},
                  "groups": groups, "frozen_moved": record.frozen_moved[:20]},
        cause=diagnosed(record.experiments) if fault and not causes else "",
    )  # fmt: skip


@gate(
    "accumulation",
    rows="C10",
    title="the division into micro-batches does not change the gradient",
    reads="data model loss counts expect train",
)
def accumulation(proof: GateContext) -> Finding:
    """Run one step of `train()` on the same global batch in equal micro-batches, in unequal ones, and undivided. The
    optimiser must get the gradient of the whole batch each time."""
    world = proof.accelerator.num_processes
    faults: list[str] = []
    probe = proof.peek()
    if probe.expect.couplings:
        raise Skip(f"declared: {probe.expect.couplings}")
    if probe.expect.nondeterministic:
        raise Skip(probe.expect.nondeterministic)
    each = max(4, probe.expect.at_most(8, times=2))
    most = each // 2 + 1
    one, even, uneven = f"1x{each}", f"2x{each // 2}", f"{most}+{each - most}"
    cuts = {one: [each], even: [each // 2, each // 2], uneven: [most, each - most]}
    if probe.expect.gate_batch_size:
        del cuts[even]  # the uneven division finds the same faults
    limit = 1e-3 if precision(proof.cfg, proof.accelerator) == "fp32" else 5e-2

    def gradient(name: str, **how) -> list[Tensor]:
        plan = Plan(steps=1, batch_size=each * world, sizes=cuts[name], peak=True, fixed=True)
        return _first_gradient(proof, plan, **how)

    whole: list[Tensor] = []
    stepped, moved = [], []

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
                gaps[name] = _gap(grads, whole)
            else:
                faults.append(f"{name}: {len(grads)} gradients instead of {len(whole)}")
            del grads
        return gaps

    gaps, draws = measure(), False
    if not any(stepped):
        raise Skip("no optimiser stepped, however the batch is split: nothing to compare (see wiring)")
    if not any(moved):
        raise Skip("the gradient is zero, however the batch is split: nothing to compare (see wiring)")
    if not faults and max(gaps.values()) > limit:
        draws = any(_gap(gradient(one, draws=k), whole) > limit for k in range(16))
        gaps = measure(still=True) if draws else gaps
    ok, shape = not faults and max(gaps.values()) <= limit, max(gaps, key=lambda k: gaps[k], default=one)
    shown = ", ".join(f"{k} {v:.1e}" for k, v in gaps.items() if k != one)
    shown += ", in eval mode: the model draws at random as it trains" * draws
    if proof.deep and world == 1 and ok and not draws:
        gap = _from_two_processes(proof, 2 * each)
        ok, shown = gap <= limit, f"{shown}, 2 processes {gap:.1e}"
    over = f" over {world} processes ({' + '.join(map(str, cut(each * world, world)))})" if world > 1 else ""
    return Finding(
        ok, "; ".join(faults) if faults else f"gradient against the whole batch{over}: {shown} (relative)", f"at most {limit:g}",
        "the loss returns a mean, or its counts are not those of the terms: return SUMS and count what they sum over\n"
        "micro-batches are averaged, or their gradients are not added\na loop of your own ignores step.batches[1:]",
        evidence={"gaps": gaps, "digest": _digest(whole)},
        cause="" if ok or faults or draws or world > 1 else
        _why_divided(proof, [g.cpu() for g in gradient(shape)], whole, cuts[shape], equal_agree=gaps.get(even, 1.0) <= limit),
    )  # fmt: skip


def _why_divided(
    proof: GateContext, got: list[Tensor], whole: list[Tensor], sizes: list[int], *, equal_agree: bool
) -> str:
    """Return the cause that fits a gradient `got` of micro-batches of `sizes`, which is not that of the `whole` batch."""
    first = _first_gradient(proof, Plan(steps=1, batch_size=sizes[0], sizes=sizes[:1], peak=True, fixed=True))
    run, stage = proof.look()
    means = False
    if "train" in stage.data:
        data = stage.data["train"]
        with evaluating(stage.model), run.autocast():
            sums = [stage.loss(stage.model, fetch(data, [0] * n, 0, run.device)) for n in (2, 4)]
        means = all(abs(float(sums[1][k]) - float(v)) <= 1e-3 * abs(float(v)) for k, v in sums[0].items())
    return of_division(_gap(got, first), multiple(got, whole), len(sizes), mean=means, equal_agree=equal_agree)


def _gap(grads: list[Tensor], whole: list[Tensor]) -> float:
    """Norm of the difference over the norm of `whole`; inf if one of them holds no gradient."""
    if not grads or not any(w.any() for w in whole):
        return math.inf if grads or any(w.any() for w in whole) else 0.0
    apart = sum(
        (exact(a) - exact(b.to(a.device))).square().sum().cpu() for a, b in zip(grads, whole, strict=True)
    ).sqrt()
    return (apart / sum(exact(g).square().sum() for g in whole).sqrt()).item()


def _first_gradient(proof: GateContext, plan: Plan, *, draws: int | None = None, still: bool = False) -> list[Tensor]:
    """Return the optimiser's gradient at the first step of `train()` under `plan`; with the model's `draws` of that
    number, or (`still`) with the whole model in eval mode."""
    run, stage = proof.build(plan)
    _quiet(stage.model, still)
    if draws is not None:
        own = stage.loss

        def drawn(model: nn.Module, batch: dict) -> dict[str, Tensor]:
            seeds.seed_global(proof.cfg.run.seed, "draws", draws)
            return own(model, batch)

        stage.loss = drawn
    grads: list[Tensor] = []

    def keep(optimizer, _args, _kwargs) -> None:
        if not grads:
            every = [p for g in optimizer.param_groups for p in g["params"]]
            grads.extend(torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in every)

    hook = register_optimizer_step_pre_hook(keep)
    try:
        proof.train(proof.cfg, run, stage)
    finally:
        hook.remove()
    return grads


def _digest(grads: list[Tensor]) -> list[float]:
    """Four random projections of a gradient, comparable across processes."""
    out = [0.0] * 4
    for i, grad in enumerate(grads):
        signs = torch.randn(4, grad.numel(), generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        out = [o + d for o, d in zip(out, (signs @ grad.cpu().double().flatten()).tolist(), strict=True)]
    return out


def over_two_processes(proof: GateContext, gate: str) -> dict:
    """Return the verdict of one gate over two real processes, started with -n 2."""
    command = [sys.executable, "-m", "trainworthy", "check", *proof.argv, "-n", "2", "--only", gate]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
    lines = [line for line in done.stdout.splitlines() if line.strip().startswith("evidence in ")]
    if done.returncode or not lines:
        raise RuntimeError(f"`{shlex.join(command[2:])}` failed: {done.stderr.strip()[-500:]}")
    return json.loads(Path(lines[0].split()[2]).read_text())["gates"][0]


def _from_two_processes(proof: GateContext, size: int) -> float:
    """Relative difference between the gradient of `size` samples on this process and over two real processes."""
    theirs = torch.tensor(over_two_processes(proof, "accumulation")["evidence"]["digest"])
    ours = torch.tensor(
        _digest(_first_gradient(proof, Plan(steps=1, batch_size=size, sizes=[size], peak=True, fixed=True)))
    )
    return ((theirs - ours).norm() / ours.norm()).item()


def _stay_in_eval(module: nn.Module, _: tuple) -> None:
    module.eval()


def _quiet(model: nn.Module, still: bool) -> None:
    """Switch off dropout, whose draws differ between divisions, and batch norm's batch statistics, which depend on the
    micro-batch. Both are healthy differences. `still`: put every module in eval mode."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if still or isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.register_forward_pre_hook(_stay_in_eval)  # the loop sets train mode again


@gate(
    "resume",
    rows="C13",
    title="a stopped and resumed run equals an uninterrupted one, bit for bit",
    reads="data model loss optimizers state train",
)
def resume(proof: GateContext) -> Finding:
    """Compare six uninterrupted steps with three steps, a checkpoint, a fresh build, and three more: weights, optimiser
    and losses. With expensive samples, the rehearsal's four steps are the uninterrupted run: two, a checkpoint, and two
    more."""
    if proof.expect.nondeterministic:
        raise Skip(proof.expect.nondeterministic)
    world = proof.accelerator.num_processes
    bitwise = proof.accelerator.device.type == "cpu"
    sharded = mode(proof.cfg, world) != NONE  # the shards are what is saved and loaded
    short = bool(proof.expect.gate_batch_size) and bitwise and not proof.deep and not proof.half_in and not sharded
    steps = STEPS if short else 6
    half, size = steps // 2, min(proof.cfg.train.batch_size, proof.expect.at_most(32) * world)

    def go(folder: Path | None, stop: int | None, watch: Watch | None = None) -> tuple[Run, Stage]:
        how = {"stop_after": stop, "keep_in": folder, "shard": sharded}
        run, stage = proof.build(four(proof, **how) if short else Plan(steps=steps, batch_size=size, due=(2,), **how))
        if watch:
            watch(run, stage)
        proof.train(proof.cfg, run, stage)
        return run, stage

    # Ranks on other machines also read rank 0's checkpoint, so use the shared run folder.
    with tempfile.TemporaryDirectory(prefix=".resume-", dir=proof.folder if world > 1 else None) as name:
        folder = Path(_from_main(name, proof))
        if proof.half_in:
            go(proof.half_in, half)
            return Finding(True, f"the first {half} steps of {steps}, for the process that asked", "a checkpoint")
        if short:
            straight_run, straight, record = rehearsed(proof)
            left = record.left
        else:
            straight_run, straight = go(None, None)
            left = bits(straight)
        bound = None if bitwise else _weights(straight)
        del straight  # before the next one is built
        if proof.deep and world == 1:
            _in_a_new_process(proof, folder)
        else:
            go(folder, half)
        resumed_run, resumed = go(folder, None)
        resumed_run.close()
    differ, started = _differences(left, bits(resumed)), resumed_run.started
    reached = None if bitwise else _weights(resumed)
    again = resumed_run.plan.losses
    del resumed, resumed_run
    losses = straight_run.plan.losses[-len(again) :]  # an iteration may have several
    wrong = []
    if differ:
        wrong.append(f"{len(differ)} tensors differ, e.g. {differ[0]}")
    if losses != again:
        i = next((i for i, (a, b) in enumerate(zip(losses, again, strict=False)) if a != b), 0)
        wrong.append(f"losses differ: straight {_short(losses[i : i + 3])}, resumed {_short(again[i : i + 3])}")
    if not bitwise:  # non-deterministic kernels: allow the difference between two uninterrupted runs
        noise = _apart(bound, _weights(go(None, None)[1]))
        wrong = wrong if _apart(bound, reached) > 2 * noise + 1e-6 else []
    why = ""
    if started != half:
        wrong.append(f"the second half began at step {started}, not at {half}: nothing was restored")
    elif wrong and world == 1:
        why = _why_not_resumed(go, half)
    where = "in a new process" if proof.deep else "after a restart"
    return Finding(
        not wrong, "; ".join(wrong) or f"{steps} steps = {half} + {steps - half} {where}: weights, optimiser, losses",
        "bitwise equal" if bitwise else "no larger difference than between two uninterrupted runs",
        "something that changes during training is not in stage.state (EMA, a counter, a generator of your own)\n"
        "get() keeps its own generator instead of using the one that it receives\ntrain() keeps state in a local variable",
        evidence={"straight": losses, "resumed": again, "differ": differ[:20]}, cause=why,
    )  # fmt: skip


def _why_not_resumed(go: Callable[..., tuple[Run, Stage]], half: int) -> str:
    """Return the cause that three more short runs support: one that goes on after step `half`, one that stops there, one that resumes."""
    straight, resumed = Watch(half), Watch(half)
    go(None, half + 1, straight)
    with tempfile.TemporaryDirectory(prefix=".resume-") as name:
        stopped = saved(go(Path(name), half)[1])
        go(Path(name), half + 1, resumed)[0].close()
    return first_cause(straight, stopped, resumed)


def _in_a_new_process(proof: GateContext, folder: Path) -> None:
    command = [sys.executable, "-m", "trainworthy.launch", "check", *proof.argv, "--only", "resume"]
    env = {**os.environ, "TRAINWORTHY_HALF": str(folder), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"the first half failed in its own process: {done.stderr.strip()[-500:]}")


def _from_main(name: str, proof: GateContext) -> str:
    """Return rank 0's folder on all ranks."""
    if proof.accelerator.num_processes == 1:
        return name
    box = [name]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _differences(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    return [n for n in first if n not in second or not torch.equal(first[n], second[n])] + [
        n for n in second if n not in first
    ]


def _weights(stage: Stage) -> dict[str, Tensor]:
    """Return the model's state dict on the host; of what is sharded, this process's part."""
    return {n: local(t).detach().cpu() for n, t in stage.model.state_dict().items()}


def _apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((exact(t) - exact(b[n])).abs().max().item() for n, t in a.items() if t.numel())


def _short(values: list[float]) -> str:
    return " ".join(f"{v:.4f}" for v in values)
