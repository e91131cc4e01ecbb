"""Gates on the loop: wiring and resume. They rehearse the recipe's own `train()`."""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from trainworthy.core.base import seeds
from trainworthy.core.base.dtensor import local
from trainworthy.core.base.processes import agreed
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.gradient import diagnosed
from trainworthy.core.gates.causes.loss_weights import explain_lost_weights
from trainworthy.core.gates.causes.named import explain_silent_steps, order_causes
from trainworthy.core.gates.causes.resume import Watch, first_cause, saved
from trainworthy.core.gates.causes.unheard import explain_unheard
from trainworthy.core.gates.causes.unregistered import hidden_parameters, reached
from trainworthy.core.gates.checks.rates import off_schedule
from trainworthy.core.gates.fingerprints import fingerprints
from trainworthy.core.gates.gate import GateContext, fetch, pick, total_loss
from trainworthy.core.gates.recorder import STEPS, Record, rehearsal_plan, rehearsed, training_samples
from trainworthy.core.loop.optim import exact
from trainworthy.core.loop.run import Rehearsal, Run, in_mode
from trainworthy.core.loop.shard import NONE, mode
from trainworthy.core.recipe.stage import Data, Stage

ROUNDING = 1e-6  # of the largest gradient: below it a gradient is what rounding leaves of zero
HIDDEN = (
    "modules are kept in a plain list or dict: no optimiser trains them, no checkpoint or export holds them; "
    "use nn.ModuleList, nn.ModuleDict or nn.ParameterList"
)
IDLE = (
    "train() leaves an optimiser out: run.update(stage, batches) steps all of them, with optimizer=NAME only that one"
)
MOST_DROPPED = 0.8  # by dropout; models in use drop 0.1 to 0.5, a few 0.7


def _gradient_fault(record: Record, clip: float, *, tolerance: float) -> str:
    """Return the first gradient in the optimiser that is not the loss's own (clipped or not); empty if there is
    none."""
    for i, g in enumerate(record.gradients, 1):
        expected = min(g["own_norm"], clip)
        if g["norm"] == g["own_norm"] == 0:
            continue  # a zero gradient has no direction; parameters without gradient are reported separately
        if g["cosine"] < 1 - tolerance:
            return f"at step {i} the optimiser's gradient has another direction than the loss's own (cosine {g['cosine']:.3f})"
        if (
            abs(g["norm"] - expected) > tolerance * expected
            and abs(g["norm"] - g["own_norm"]) > tolerance * g["own_norm"]
        ):
            return f"at step {i} the gradient in the optimiser has norm {g['norm']:.3g}, the loss's own {g['own_norm']:.3g}"
    return ""


def _dropped(record: Record) -> tuple[str, str]:
    """Return (fault, cause) if dropout leaves next to nothing; both empty if it does not."""
    if record.dropped <= MOST_DROPPED:
        return "", ""
    return (f"dropout drops {record.dropped:.0%} of its inputs in training (allowed: {MOST_DROPPED:.0%})",
            f"dropout takes the drop probability: {1 - record.dropped:.2g}, if {record.dropped:.2g} is the keep probability")  # fmt: skip


@gate(
    "wiring",
    rows="C3 C9",
    title="trained parameters get the loss's gradient and change, frozen ones do not",
    reads="model loss counts optimizers expect train",
    compares_ranks=True,
)
def wiring(context: GateContext) -> Finding:
    """Checks several steps at the peak rate, so that a zero-initialised head or a warmup raises no false alarm."""
    run, stage, record = rehearsed(context)
    trained, expect = stage.parameters(), stage.expect
    total = sum(p.numel() for p in stage.model.parameters())
    count = sum(p.numel() for p in trained.values())
    causes = run.drift.splitlines()
    wrong = causes[:1] + [line.removeprefix("  measured:     ") for line in causes if "measured:" in line]
    unlisted = _unlisted(stage)
    hidden = _hidden(context, run, stage)
    wrong += unlisted + hidden
    idle = [k for k, o in stage.optimizers.items() if id(o) not in record.steppers] if len(stage.optimizers) > 1 else []
    if not record.gradients and not record.received:
        wrong.append("no optimiser stepped")
    elif idle:
        wrong.append(f"optimiser {', '.join(map(repr, idle))} never steps")
    untouched = [n for n in trained if record.received.get(n, 0.0) == 0 and not n.startswith(expect.no_gradient)]
    if untouched:
        wrong.append(f"{len(untouched)} of {len(trained)} tensors never got a gradient, e.g. {untouched[0]}")
    noise = ROUNDING * max(record.received.values(), default=0.0)  # a bias before batch norm gets no other gradient
    unmoved = [n for n in trained if n not in untouched and record.received.get(n, 0.0) > noise and record.moved.get(n, 0.0) < 0.5
             and not n.startswith(expect.no_gradient)]  # fmt: skip
    if unmoved:
        worst = min(record.moved.get(n, 0.0) for n in unmoved)
        wrong.append(
            f"{len(unmoved)} of {len(trained)} tensors get a gradient but hardly move ({worst:.0%} of {unmoved[0]})"
        )
    if record.nonfinite:
        wrong.append(f"non-finite gradient in {record.nonfinite[0]}")
    if record.frozen_moved:
        wrong.append(f"{len(record.frozen_moved)} frozen tensors moved, e.g. {record.frozen_moved[0]}")
    fault = _gradient_fault(record, context.cfg.optim.clip, tolerance=0.01 if run.precision == "fp32" else 0.05)
    dropped, kept = _dropped(record)
    lost, falls = _lost_weights(run, stage, trained)
    wrong += [x for x in (fault, dropped, lost) if x]
    named = [(g.get("name", k), g["params"]) for k, o in stage.optimizers.items() for g in o.param_groups]
    groups = ", ".join(f"{name} {sum(p.numel() for p in some):,}" for name, some in named)
    groups = groups if len(named) <= 4 else f"{len(named)} groups, {named[0][0]} to {named[-1][0]}"
    return Finding(
        not wrong, "; ".join(wrong) if wrong else f"{count:,} of {total:,} parameters train ({groups}), all moved in {STEPS} steps",
        "every parameter trains or is declared frozen; gradients present, finite, the loss's own; weights move, frozen ones do not",
        "".join(f"{line.split(':', 1)[-1].strip()}\n" for line in causes[1:] if "measured:" not in line)
        + _likely(unlisted=bool(unlisted or record.frozen_moved), untouched=bool(untouched), added=bool(fault),
                  unmoved=bool(unmoved)),
        evidence={"gradients": record.gradients, "moved": {n: record.moved.get(n, 0.0) for n in trained},
                  "groups": groups, "frozen_moved": record.frozen_moved[:20]},
        cause=(IDLE if idle and record.steppers else "")
              or _measured_causes(record, fault=bool(fault and not causes), untouched=bool(untouched)) or kept or falls
              or (HIDDEN if hidden else "") or (_unheard(run, stage, untouched) if untouched and context.accelerator.num_processes == 1 else "")
              or (off_schedule(context) if unmoved else ""),
    )  # fmt: skip


def _hidden(context: GateContext, run: Run, stage: Stage) -> list[str]:
    """Return what says that the loss uses parameters which modules keep in plain lists or dicts; empty if it does not."""
    held = {id(p) for o in stage.optimizers.values() for g in o.param_groups for p in g["params"]}
    hidden = {k: p for k, p in hidden_parameters(stage.model).items() if id(p) not in held}
    if not hidden:
        return []
    batch = _few(run, stage, training_samples(context))
    with in_mode(stage.model, training=True):
        used = reached(lambda: total_loss(run, stage, batch), hidden)
    return [f"the loss uses {len(used)} parameter tensors that the model does not list, e.g. {used[0]}"] if used else []


def _few(run: Run, stage: Stage, data: Data) -> dict:
    """Return a batch of eight samples, or as many as there are."""
    seed = run.cfg.run.seed
    return fetch(data, pick(data, min(len(data), stage.expect.at_most(8)), seed), seed, run.device)


def _losses(run: Run, stage: Stage, *, training: bool) -> Callable[[], dict[str, float]] | None:
    """Return a function that computes the terms of the loss of one batch with the same draws each time; None without a training set."""
    data = stage.data.get("train")
    if data is None:
        return None
    batch = functools.cache(lambda: _few(run, stage, data))  # most models have no parameter to ask about
    loss = run.used_loss or stage.loss

    def losses() -> dict[str, float]:
        some = batch()
        seeds.seed_global(run.cfg.run.seed, "unheard")
        with in_mode(stage.model, training=training), torch.no_grad(), run.autocast():
            return {k: float(v) for k, v in loss(stage.model, some).items()}

    return losses


def _unheard(run: Run, stage: Stage, names: list[str]) -> str:
    """Return why the loss of a batch does not depend on the parameters `names`; empty if it does, or without a training set."""
    losses = _losses(run, stage, training=True)
    return explain_unheard(stage.model, losses, names) if losses else ""


def _lost_weights(run: Run, stage: Stage, trained: dict) -> tuple[str, str]:
    """Return (fault, cause) of learnt weights of the loss that fall to zero; both empty with several processes."""
    losses = _losses(run, stage, training=False) if run.world == 1 else None
    return explain_lost_weights(stage.model, trained, losses) if losses else ("", "")


def _unlisted(stage: Stage) -> list[str]:
    """Return what does not fit between the model, its optimisers and what is declared frozen."""
    trained, frozen, wrong = stage.parameters(), stage.expect.frozen, []
    names = [n for n, _ in stage.model.named_parameters()]
    stray = [n for n in names if n not in trained and not n.startswith(frozen) and not stage.follows(n)]
    if stray:
        first, trainable = stray[0], {n for n, p in stage.model.named_parameters() if p.requires_grad}
        on_purpose = (
            f" (requires_grad is off; on purpose: {first.rpartition('.')[0] or first!r} in `frozen` of core.Expect)"
        )
        wrong.append(f"{len(stray)} parameter tensors are in no optimiser and not declared frozen, e.g. {first}"
                     + on_purpose * trainable.isdisjoint(stray))  # fmt: skip
    for prefix in frozen:
        if (own := [n for n in names if n.startswith(prefix)]) and all(n in trained for n in own):
            wrong.append(f"{prefix} is declared frozen, and all of its {len(own)} tensors are in an optimiser")
    groups = [(k, i, g) for k, o in stage.optimizers.items() for i, g in enumerate(o.param_groups)]
    empty = [f"{k}[{g.get('name', i)}]" for k, i, g in groups if not g["params"]]
    if empty:
        wrong.append(f"empty optimiser groups: {', '.join(empty)}")
    inside = {id(p) for p in stage.model.parameters()}
    foreign = sum(id(p) not in inside for o in stage.optimizers.values() for g in o.param_groups for p in g["params"])
    if foreign:
        wrong.append(
            f"{foreign} tensors in an optimiser are not part of the model: they train, but are neither saved nor exported"
        )
    return wrong


def _measured_causes(record: Record, *, fault: bool, untouched: bool) -> str:
    """Return the causes that a measurement supports, one per line; empty if there is none."""
    gradient = diagnosed(record.experiments) if fault else explain_silent_steps(record.silent) if untouched else ""
    return "\n".join(one for one in (record.frozen_cause, gradient) if one)


def _likely(*, unlisted: bool, untouched: bool, added: bool, unmoved: bool) -> str:
    """Return the causes of parameters that do not train as they should, first those whose symptom was measured."""
    return order_causes(
        (unlisted, "the optimiser was built over a part of the model, before it was replaced, or over more than it (a frozen teacher)"),
        (untouched, "a detach(), no_grad() or argmax cuts the graph"),
        (added, "zero_grad() is missing: gradients of earlier steps are added"),
        (unmoved, "the rate is too small for the weights' precision (bf16 weights without an fp32 copy)"),
    )  # fmt: skip


NOT_RESUMED = """\
something that changes during training is not in stage.state (EMA, a counter, a generator of your own)
get() keeps its own generator instead of using the one that it receives
train() keeps state in a local variable"""


@gate(
    "resume",
    rows="C13",
    title="a stopped and resumed run equals an uninterrupted one, bit for bit",
    reads="data model loss optimizers state train",
    compares_ranks=True,
)
def resume(context: GateContext) -> Finding:
    """Compare six uninterrupted steps with three steps, a checkpoint, a fresh build, and three more: weights, optimiser
    and losses. With expensive samples, the rehearsal's four steps are the uninterrupted run: two, a checkpoint, and two
    more."""
    if context.expect.nondeterministic:
        raise Skip(context.expect.nondeterministic)
    world = context.accelerator.num_processes
    bitwise = context.accelerator.device.type == "cpu"
    sharded = mode(context.cfg, world) != NONE  # the shards are what is saved and loaded
    expensive = bool(context.expect.gate_batch_size) and not (context.deep or context.half_in)
    short = expensive and bitwise and not sharded
    steps = STEPS if short else 6
    half, size = steps // 2, min(context.cfg.train.batch_size, context.expect.at_most(32) * world)

    def go(folder: Path | None, stop: int | None, watch: Watch | None = None) -> tuple[Run, Stage]:
        how = {"stop_after": stop, "keep_in": folder, "shard": sharded}
        plan = rehearsal_plan(context, **how) if short else Rehearsal(steps=steps, batch_size=size, due=(2,), **how)
        run, stage = context.build(plan)
        if watch:
            watch(run, stage)
        context.train(context.cfg, run, stage)
        return run, stage

    # Ranks on other machines also read rank 0's checkpoint, so use the shared run folder.
    with tempfile.TemporaryDirectory(prefix=".resume-", dir=context.folder if world > 1 else None) as name:
        folder = Path(agreed(context.accelerator, name))
        if context.half_in:
            go(context.half_in, half)
            return Finding(True, f"the first {half} steps of {steps}, in a process of their own", "a checkpoint")
        if short:
            straight_run, straight, record = rehearsed(context)
            left = record.left
        else:
            straight_run, straight = go(None, None)
            left = fingerprints(straight)
        bound = None if bitwise else _weights(straight)
        del straight  # before the next one is built
        if context.deep and world == 1:
            _in_a_new_process(context, folder)
        else:
            go(folder, half)
        resumed_run, resumed = go(folder, None)
        resumed_run.close()
    differ, started = _differences(left, fingerprints(resumed)), resumed_run.started
    reached = None if bitwise else _weights(resumed)
    again = resumed_run.rehearsal.losses
    del resumed, resumed_run
    losses = straight_run.rehearsal.losses[-len(again) :]  # an iteration may have several
    wrong = [f"{len(differ)} tensors differ, e.g. {differ[0]}"] if differ else []
    wrong += _loss_differences(losses, again)
    if not bitwise:  # kernels vary: allow the difference between two uninterrupted runs
        noise = _largest_difference(bound, _weights(go(None, None)[1]))
        wrong = wrong if _largest_difference(bound, reached) > 2 * noise + 1e-6 else []
    why = ""
    if started != half:
        wrong.append(f"the second half began at step {started}, not at {half}: nothing was restored")
    elif wrong and world == 1:
        why = _why_not_resumed(go, half)
    return Finding(
        not wrong, "; ".join(wrong) or f"{steps} steps = {half} + {steps - half} {'in a new process' if context.deep else 'after a restart'}: "
        "weights, optimiser and losses are the same", "bitwise equal" if bitwise else "no larger difference than between two uninterrupted runs",
        NOT_RESUMED, evidence={"straight": losses, "resumed": again, "differ": differ[:20]}, cause=why,
    )  # fmt: skip


def _why_not_resumed(go: Callable[..., tuple[Run, Stage]], half: int) -> str:
    """Return the cause that three more short runs support: one that goes on after step `half`, one that stops there, one that resumes."""
    straight, resumed = Watch(half), Watch(half)
    go(None, half + 1, straight)
    with tempfile.TemporaryDirectory(prefix=".resume-") as name:
        stopped = saved(go(Path(name), half)[1])
        go(Path(name), half + 1, resumed)[0].close()
    return first_cause(straight, stopped, resumed)


def _in_a_new_process(context: GateContext, folder: Path) -> None:
    command = [sys.executable, "-m", "trainworthy.launch", "check", *context.argv, "--only", "resume"]
    env = {**os.environ, "TRAINWORTHY_HALF": str(folder), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"the first half failed in its own process: {done.stderr.strip()[-500:]}")


def _differences(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    return [n for n in first if n not in second or not torch.equal(first[n], second[n])] + [
        n for n in second if n not in first
    ]


def _weights(stage: Stage) -> dict[str, Tensor]:
    """Return the model's state dict on the host; of what is sharded, this process's part."""
    return {n: local(t).detach().cpu() for n, t in stage.model.state_dict().items()}


def _largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((exact(t) - exact(b[n])).abs().max().item() for n, t in a.items() if t.numel())


def _loss_differences(straight: list[float], resumed: list[float]) -> list[str]:
    """Return what differs, with the three losses from there on; empty if nothing does."""
    if straight == resumed:
        return []
    i = next((i for i, (a, b) in enumerate(zip(straight, resumed, strict=False)) if a != b), 0)
    return [f"losses differ: straight {_short(straight[i : i + 3])}, resumed {_short(resumed[i : i + 3])}"]


def _short(values: list[float]) -> str:
    return " ".join(f"{v:.4f}" for v in values)
