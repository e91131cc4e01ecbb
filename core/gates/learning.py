"""Gates on learning: initial loss, dependency, overfit-then-evaluate, input-independent baseline, tiny data."""

import contextlib
import copy
import dataclasses
import math
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base import seeds
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data.loader import cut
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Proof, agreed, categorical, fetch, pick, total_loss, train_set
from trainworthy.core.gates.norms import layers
from trainworthy.core.gates.recorder import learnt_from, rehearsed
from trainworthy.core.loop.run import Plan, Run, evaluating
from trainworthy.core.recipe.stage import Data, Metric, Stage, View

OVERFIT_SAMPLES = 8
TINY, HELD_OUT, FEWEST = 256, 250, 32  # samples to learn from, to score on, and what is too few of either
PERMUTATIONS, ENOUGH = 10, 4  # and how many do where they leave no doubt: twice what is needed
TINY_STEPS = 120
SECONDS = 60.0  # of this process; a tiny-data run that takes more ends there


@gate(
    "initial-loss",
    rows="C1",
    title="the untrained loss is what the output head implies",
    reads="data model loss counts expect pretrained",
)
def initial_loss(proof: Proof) -> Finding:
    """Mean loss of the untrained model on 256 training samples (16 times `dear`) against what the recipe derives from theory."""
    run, stage = proof.look()
    expected = stage.expect.initial_loss
    if expected is None:
        raise Skip("the recipe expects no particular initial loss")
    if stage.pretrained is not None and not stage.expect.new_parameters:
        raise Skip("started from trained weights: the head is not an untrained one")
    data = train_set(stage)
    batch = fetch(
        data, pick(data, stage.expect.at_most(256, times=16), proof.cfg.run.seed), proof.cfg.run.seed, run.device
    )
    with evaluating(stage.model):
        measured = total_loss(run, stage, batch).item()
    expected = _on(batch, expected)
    tolerance = 0.1 * expected
    return Finding(
        abs(measured - expected) <= tolerance, f"loss {measured:.3f} before training", f"{expected:.3f} within {tolerance:.2f}",
        "the last layer starts too large: logits are far from even (zero or small initialisation)\n"
        "the number of outputs is not the number of classes\nthe loss sums where it should average, or the other way round",
        evidence={"measured": measured, "expected": expected},
    )  # fmt: skip


@gate("dependency", rows="C2", title="samples of a batch do not see each other", reads="data model loss counts expect")
def dependency(proof: Proof) -> Finding:
    """Backpropagation: the gradient of the batch's loss with respect to input j equals that of sample j's own loss, and the
    batch's loss is the sum over its rows. On the rehearsed model: a head that starts at zero hides everything."""
    run, stage, _ = rehearsed(proof)
    if stage.expect.couplings:
        raise Skip(f"declared: {stage.expect.couplings}")
    limit = 1e-3 if run.precision == "fp32" else 5e-2
    data = learnt_from(proof)
    gap, leak, mean = _mixture(run, stage, data, proof.cfg.run.seed, limit)
    if max(gap, leak) > limit and run.precision == "fp32" and run.device.type != "mps":
        # Rounding flips a ReLU that stands at zero, and in a flat region many at once (seen: 2e-2); in double only a mixture stays.
        with contextlib.suppress(RuntimeError):  # a loss that holds fp32 tensors of its own: the verdict in fp32 stands
            exact = dataclasses.replace(stage, model=copy.deepcopy(stage.model).double())
            gap, leak, mean = _mixture(run, exact, data, proof.cfg.run.seed, limit, double=True)
    return Finding(
        gap <= limit and leak <= limit,
        f"loss of a batch differs from the sum over its samples by {gap:.1e}, input gradients by {leak:.1e} (relative)",
        f"both at most {limit:g}",
        ("the loss is a MEAN over the batch: return the SUM, core divides it by the counts\n" if mean else "")
        + "statistics over the batch axis (own normalisation, x.mean(0)), or a reshape that mixes samples\n"
        "a (B, 1) against (B,) broadcast in the loss\nthe batch is flattened before a shift",
        evidence={"loss_gap": gap, "gradient_gap": leak},
    )  # fmt: skip


def _mixture(
    run: Run, stage: Stage, data: Data, seed: int, limit: float, *, double: bool = False
) -> tuple[float, float, bool]:
    """(gap of the loss, gap of the input gradients, is the loss a mean?) of the middle one of three draws of four samples."""

    def read(indices: list[int]) -> dict:
        batch = fetch(data, indices, seed, run.device)
        floating = lambda v: double and isinstance(v, Tensor) and v.is_floating_point()  # noqa: E731
        return {k: v.double() if floating(v) else v for k, v in batch.items()}

    size = max(2, stage.expect.at_most(4))
    picked = pick(data, 3 * size, seed)
    trials = []
    for indices in (picked[i : i + size] for i in range(0, len(picked), size)):
        batch = read(indices)
        together = _input_gradients(run, stage, data, batch)
        if _apart(together[1], _input_gradients(run, stage, data, batch)[1]) > limit:
            raise Skip(
                "the loss of one batch differs from call to call in eval mode (see evaluation): nothing to compare"
            )
        alone = [_input_gradients(run, stage, data, read([i])) for i in indices]
        loss, rows = together[0], sum(a[0] for a in alone)
        gap = abs(loss - rows) / max(abs(loss), 1e-8)
        leak = _apart(together[1], {k: _rows([a[1][k] for a in alone], whole) for k, whole in together[1].items()})
        mean = gap > limit and abs(loss * len(indices) - rows) <= limit * abs(rows)
        trials.append((max(gap, leak), gap, leak, mean))
        if len(trials) == 2 and (trials[0][0] > limit) == (trials[1][0] > limit):
            break  # the third would not change which side the middle one is on
    return sorted(trials)[len(trials) // 2][1:]  # a mixture shows in every draw; where samples are few there is but one


def _rows(alone: list[Tensor], whole: Tensor) -> Tensor:
    """Gradients of batches of one as rows of the whole batch's; a shorter sample was padded there, which is no part of its own."""
    rows = torch.zeros_like(whole)
    for row, own in zip(rows, alone, strict=True):
        row[tuple(map(slice, own.shape[1:]))] = own[0]
    return rows


def _apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest relative difference of two sets of gradients. Relative to the larger: `x - x.mean(0)` has none for a batch of one."""
    gaps = [0.0]
    for key, one in a.items():
        size = max(one.norm().item(), b[key].norm().item())
        if one.shape == b[key].shape and size > 0:
            gaps.append((one - b[key]).norm().item() / size)
    return max(gaps)


def _input_gradients(run: Run, stage: Stage, data: Data, batch: dict) -> tuple[float, dict[str, Tensor]]:
    """(sum of the loss terms, gradient with respect to every floating-point input) in eval mode."""
    inputs = {k: batch[k].detach().clone().requires_grad_() for k, f in data.fields.items()
              if f.role == "input" and isinstance(batch[k], Tensor) and batch[k].is_floating_point()}  # fmt: skip
    with evaluating(stage.model), torch.set_grad_enabled(bool(inputs)), run.autocast():
        loss = sum(stage.loss(stage.model, {**batch, **inputs}).values())
        grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True) if inputs else []
    return loss.item(), {k: torch.zeros_like(batch[k]) if g is None else g for k, g in zip(inputs, grads, strict=True)}


def _train_on_eight(proof: Proof, blank: tuple[str, ...] = (), patience: int = 0) -> tuple[Run, Stage, dict]:
    """The recipe's own `train()` on eight fixed samples with fixed draws at the peak rate, until loss and metric close; with
    `patience`, for so many times as many steps as that took with the inputs at most."""
    _, probe = proof.look()
    expect, metric = dataclasses.replace(probe.expect), probe.gate_evaluator.metric
    expect.overfit_steps *= 1 if probe.pretrained is None else 2  # the rate of fine-tuning is 5 to 10 times smaller
    indices = pick(train_set(probe), expect.at_most(OVERFIT_SAMPLES, times=2), proof.cfg.run.seed)
    if patience:
        expect.overfit_steps = min(expect.overfit_steps, patience * overfitted(proof)[2]["steps"])
    found: dict = {"indices": indices, "curve": [], "blank": blank, "closing": False}

    def closing() -> bool:
        """Of dear samples no step is made in vain: is the loss of the last update low enough for the first time?"""
        last = run.plan.losses[-1:] if expect.gate_batch_size and not found["closing"] else []
        low = agreed(proof.accelerator, bool(last) and last[0] <= found["needed_loss"])
        found["closing"] |= low
        return low

    def check(stage: Stage, step: int) -> bool:
        if step % (5 if expect.gate_batch_size else 10) and step != expect.overfit_steps and not closing():
            return False
        with evaluating(stage.model):
            loss = agreed(proof.accelerator, total_loss(run, stage, batch).item())
        value = (
            run.measure(stage, view, probe=True)[metric.name]
            if loss <= found["needed_loss"] or step == expect.overfit_steps
            else None
        )
        found["curve"].append((step, loss, value))
        found.update(loss=loss, metric=value, steps=step)
        closed = value is not None and loss <= found["needed_loss"] and not metric.better(goal, value)
        return agreed(proof.accelerator, closed)

    sizes, world = None, proof.accelerator.num_processes
    if layers(probe.model):  # by batches as large as the run's: eight samples cut like a whole batch may be one by one
        mine, micro = len(indices) // world, proof.cfg.train.batch_size // (world * proof.cfg.train.accumulate)
        sizes = cut(mine, max(1, mine // max(1, micro)))
    plan = Plan(
        steps=expect.overfit_steps,
        sizes=sizes,
        samples=indices,
        fixed=True,
        peak=True,
        batch_size=len(indices),
        blank=blank,
        watch=check,
    )
    run, stage = proof.build(plan)
    # The evaluation path reads the very inputs that were trained on: eight pictures do not teach that a shifted 7 is a 7.
    view = View(stage.data["train"], indices, blank=blank, draws=proof.cfg.run.seed)
    batch = fetch(view, list(range(len(indices))), proof.cfg.run.seed, run.device)
    floor, goal = _on(batch, expect.loss_floor), _on(batch, expect.overfit_metric)
    goal = found["goal"] = metric.ceiling if goal is None else goal
    for module in stage.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            # Slower ones arrive later than this trains (see batch-norm).
            module.momentum = max(module.momentum or 0.0, 0.1)
    with evaluating(stage.model):
        found["initial"] = total_loss(run, stage, batch).item()
    untrained = max(found["initial"], _on(batch, expect.initial_loss) or -math.inf)  # pretrained: part of the way down
    found["needed_loss"] = floor + 0.03 * abs(untrained - floor)
    proof.train(proof.cfg, run, stage)
    found["batch"] = batch
    return run, stage, found


def _on(batch: dict, value: Any) -> Any:
    """What a recipe expects on this very batch."""
    return value(batch) if callable(value) else value


def overfitted(proof: Proof) -> tuple[Run, Stage, dict]:
    """The overfit model that several gates judge."""
    return proof.once("overfit", lambda: _train_on_eight(proof))


@gate(
    "overfit",
    rows="C4",
    title="eight fixed samples are learnt, through the real loop and the real evaluation",
    reads="data model loss counts evaluate metric probe optimizers state expect train",
)
def overfit(proof: Proof) -> Finding:
    """Loss near its floor AND the metric at its ceiling on the same samples, read again through the evaluation path: the loss
    alone cannot tell a shifted label or a wrong transform."""
    _, stage, found = overfitted(proof)
    if "loss" not in found:
        return Finding(
            False,
            "train() made no step",
            "steps from run.steps(stage)",
            "train() does not iterate over run.steps(stage)",
        )
    closed = found["loss"] <= found["needed_loss"]
    used = stage.gate_evaluator.metric
    reached = found["metric"] is not None and not used.better(found["goal"], found["metric"])
    metric = "-" if found["metric"] is None else f"{found['metric']:.3f}"
    average = (
        ""
        if stage.ema_model is None
        else "the average that is evaluated is not updated, or lags too far behind the weights\n"
    )
    remedy = (
        average + "evaluation reads other inputs, labels or classes than training (order, shift, transform)"
        if closed
        else "wrong formula or target: softmax before cross-entropy, labels that do not belong to their inputs\n"
        "gradients do not arrive (see wiring), or the rate is far too low or too high for 8 samples\n"
        "a loss floor that the recipe does not declare (expect.loss_floor)"
    )
    name, sign = used.name, ">=" if used.higher_is_better else "<="
    return Finding(
        closed and reached,
        f"loss {found['initial']:.2f} -> {found['loss']:.3f}, {name} {metric} on {len(found['indices'])} samples "
        f"in {found['steps']} steps",
        f"loss <= {found['needed_loss']:.3f} and {name} {sign} {found['goal']:g}",
        remedy,
        evidence={"curve": [(0, found["initial"], None), *found["curve"]], "needed_loss": found["needed_loss"],
                  "samples": found["indices"]},
        batch=found["batch"],
    )  # fmt: skip


@gate(
    "baseline",
    rows="C5",
    title="without its input the model knows nothing",
    reads="data model loss counts evaluate metric probe optimizers state expect train",
)
def baseline(proof: Proof) -> Finding:
    """The overfit model on the inputs of other samples, and a model trained on blank inputs: both must be clearly worse."""
    if proof.expect.solvable_without_input:
        raise Skip(f"declared: {proof.expect.solvable_without_input}")
    run, stage, found = overfitted(proof)
    if "loss" not in found or found["metric"] is None:
        raise Skip("the overfit gate did not get far enough to compare")
    inputs = tuple(k for k, f in stage.data["train"].fields.items() if f.role == "input")
    indices, metric = found["indices"], stage.gate_evaluator.metric
    turned = [(i + 1) % len(indices) for i in range(len(indices))]  # a derangement: no sample keeps its own input
    others = View(stage.data["train"], indices, swap=turned, draws=proof.cfg.run.seed)
    swapped = run.measure(stage, others, probe=True)[metric.name]
    _, _, blind = _train_on_eight(proof, blank=inputs, patience=1 if stage.expect.gate_batch_size else 4)
    blind_metric = blind["metric"] if blind["metric"] is not None else metric.floor
    # The mean of eight real values is a better guess on those eight than on the data (var8 < 0.5 var: one draw in five).
    counted = any(f.role == "target" and f.classes for f in stage.data["train"].fields.values())
    bar = metric.floor + (0.5 if counted else 0.9) * (found["metric"] - metric.floor)
    ok = not _reaches(metric, swapped, bar) and not _reaches(metric, blind_metric, bar)
    return Finding(
        ok, f"{metric.name} {found['metric']:.2f} with its input, {swapped:.2f} with another sample's, "
        f"{blind_metric:.2f} trained blind",
        f"both {'below' if metric.higher_is_better else 'above'} {bar:.2f}",
        "the target reaches the model by another way (an index, a file name, the sample's place in the batch)\n"
        "the input is overwritten before the net",
        evidence={"swapped": swapped, "blind": blind_metric, "blind_loss": blind["loss"]},
        batch=found["batch"],
    )  # fmt: skip


def _reaches(metric: Metric, value: float, bar: float) -> bool:
    return value >= bar if metric.higher_is_better else value <= bar


@dataclass
class Skill:
    """The metric on some samples with their own inputs, against the same samples with the inputs of others."""

    own: float
    others: float
    """Mean over the permutations."""
    spread: float
    """Standard deviation over the permutations."""
    gap: float
    """How much better `own` is than `others`."""
    needed: float

    @property
    def clear(self) -> bool:
        return self.gap > self.needed

    def __str__(self) -> str:
        return f"{self.own:.3f} ({self.others:.3f} +- {self.spread:.3f} with each other's inputs)"


def skill(run: Run, stage: Stage, data: Data, indices: list[int], seed: int) -> Skill:
    """Does the model answer from the input? Inputs are permuted over the samples, so that what it knows of the targets'
    distribution alone scores the same on both sides, whatever the metric."""
    metric = stage.gate_evaluator.metric
    sign = 1 if metric.higher_is_better else -1

    def scored(swap: list[int] | None = None) -> float:
        return run.measure(stage, View(data, indices, swap=swap), probe=True)[metric.name]

    own, others = scored(), []
    for i in range(PERMUTATIONS):
        others.append(scored(seeds.permutation(len(indices), seed, "others", i).tolist()))
        if len(others) < ENOUGH:
            continue
        mean, spread = statistics.mean(others), statistics.stdev(others)
        found = Skill(own, mean, spread, gap=sign * (own - mean),
                      needed=max(3 * spread, 0.05 * abs(metric.ceiling - metric.floor)))  # fmt: skip
        if agreed(run.accelerator, found.gap > 2 * found.needed):
            break
    return found


def _train_on_few(proof: Proof, *, n: int, steps: int, batch: int, every: int) -> dict:
    """The recipe's own `train()`, its draws, rates and schedule, on `n` samples; every `every` steps the held-out metric. In
    budget it ends when that metric has come a third of the way from floor to ceiling."""
    started, seed = time.process_time(), proof.cfg.run.seed
    _, stage = proof.look()
    train, val = stage.data["train"], stage.data["val"]
    key, only = categorical(train), None
    if key:  # a thousand classes: sixteen of them, so that each has samples to learn from
        seen = [int(train.get(i, None)[key]) for i in pick(train, n, seed)]
        only = sorted(set(seen), key=lambda c: (-seen.count(c), c))[:16]
    learn, held_out = pick(train, n, seed, only=only), pick(val, HELD_OUT, seed, only=only)
    if min(len(learn), len(held_out)) < FEWEST:
        raise Skip(f"{len(learn)} training and {len(held_out)} held-out samples: too few to tell skill from luck")
    if not proof.deep:
        _afford(proof, (PERMUTATIONS + 1) * (len(learn) + len(held_out)))
    found: dict = {"samples": len(learn), "held_out_curve": [], "steps": 0, "in_time": True}

    def watch(stage: Stage, step: int) -> bool:
        found["steps"], ended = step, False
        if step % every == 0:
            m = stage.gate_evaluator.metric
            value = run.measure(stage, View(val, held_out), probe=True)[m.name]
            found["held_out_curve"].append(value)
            ended = _reaches(m, value, m.floor + (m.ceiling - m.floor) / 3)
        found["in_time"] = time.process_time() - started <= SECONDS
        return agreed(proof.accelerator, not proof.deep and (ended or not found["in_time"]))

    run, stage = proof.build(Plan(steps=steps, samples=learn, batch_size=batch, watch=watch))
    proof.train(proof.cfg, run, stage)
    found |= {"train": skill(run, stage, stage.data["train"], learn, seed),
              "held_out": skill(run, stage, stage.data["val"], held_out, seed)}  # fmt: skip
    return found


def _afford(proof: Proof, samples: int) -> None:
    """Skip where evaluating so many samples takes longer than the whole gate may (a metric read from generated sequences)."""
    run, stage = proof.build(Plan(steps=1))
    few = View(stage.data["val"], range(min(16, len(stage.data["val"]))))
    started = time.process_time()
    run.measure(stage, few, probe=True)
    needed = agreed(proof.accelerator, (time.process_time() - started) / len(few) * samples)
    if needed > SECONDS:
        raise Skip(f"evaluating {samples:,} samples takes {needed:.0f} s: `check --deep --only tiny-data` has the time")


@gate(
    "tiny-data",
    rows="C19",
    title="a few hundred samples are learnt, and what is learnt carries to unseen ones",
    reads="data model loss counts evaluate metric probe optimizers state train",
)
def tiny_data(proof: Proof) -> Finding:
    """A short run of `train()` on 256 samples, judged on them and on 250 held-out ones: on both the metric must be clearly better
    with a sample's own input than with another's. A pretrained model overfits by design: no distance between the two is judged.
    What is not clear gets four times as many steps. Deep: 250 samples, 30 epochs (120 if need be), and a plateau."""
    probe_run, probe = proof.look()
    train_set(probe)
    if probe.expect.gate_batch_size and not proof.deep:
        raise Skip("a sample is declared dear: `check --deep --only tiny-data` has the time")
    metric, cfg = probe.gate_evaluator.metric, proof.cfg
    span = abs(metric.ceiling - metric.floor)
    if not 0 < span < math.inf:
        raise Skip(f"the metric has no range: floor {metric.floor:g}, ceiling {metric.ceiling:g}")
    world = probe_run.world
    batch = max(min(max(cfg.train.batch_size, 32), TINY), 4 * world)
    flat = True
    for times in (1, 4):
        if proof.deep:
            epochs, per_epoch = 30 * times, math.ceil(250 / 32)
            found = _train_on_few(
                proof, n=250, steps=epochs * per_epoch, batch=max(32, 4 * world), every=times * per_epoch
            )
            gain, allowed = _still_gains(found["held_out_curve"], metric)
            flat = gain <= allowed
        else:
            found = _train_on_few(proof, n=TINY, steps=times * TINY_STEPS, batch=batch, every=20)
        done = found["train"].clear and found["held_out"].clear and flat
        if done or not found["in_time"] or (not proof.deep and found["train"].gap > span / 2):
            break
    learnt, carried, steps = found["train"], found["held_out"], found["steps"]
    if not found["in_time"] and not (learnt.clear and carried.clear):
        raise Skip(
            f"nothing to see after {steps} steps in {SECONDS:.0f} s: `check --deep --only tiny-data` has the time"
        )
    measured = f"{metric.name} after {steps} steps on {found['samples']} samples: {learnt}; on held-out ones: {carried}"
    needed = f"both better by more than {learnt.needed:.3f} and {carried.needed:.3f} (3 sd, 5% of floor to ceiling)"
    if proof.deep:
        late = f"last third of {epochs} epochs: {'a plateau' if flat else 'still better'} ({gain:+.3f})"
        measured += f"; {late} at {carried.own:.3f}"
        needed += f"; a plateau: no gain above {allowed:.3f} within the last third"
    shuffled = (
        "labels shuffled before the split, or read in another order than their inputs: they do not belong together\n"
    )
    if learnt.clear and not carried.clear:
        remedy = ("an absurd generalisation gap: what was learnt does not carry to unseen samples\n" + shuffled
                  + "val is read differently: another order of classes, other labels, scale or transform")  # fmt: skip
    elif not learnt.clear:
        remedy = (shuffled + "the rate is far off, or the schedule of a short run never leaves its warm-up\n"
                  "the augmentation leaves nothing of the input")  # fmt: skip
    else:
        remedy = "more epochs are needed than the schedule gives, or the rate is too low"
    return Finding(
        learnt.clear and carried.clear and flat, measured, needed, remedy,
        evidence={**found, "train": asdict(learnt), "held_out": asdict(carried)},
        batch=fetch(probe.data["val"], pick(probe.data["val"], 16, cfg.run.seed), None, probe_run.device),
    )  # fmt: skip


def _still_gains(curve: list[float], metric: Metric) -> tuple[float, float]:
    """(how much better the second half of the last third of the evaluations is than its first half, what a plateau allows: noise,
    or a tenth of all that was learnt; a straight climb gives a sixth). Noise is taken from differences of neighbours, which a
    trend hardly changes."""
    last = curve[-(len(curve) // 3) :]
    half = len(last) // 2
    late = statistics.mean(last[-half:])
    gain = late - statistics.mean(last[:half])
    noise = statistics.pstdev(b - a for a, b in pairwise(last)) / math.sqrt(2)
    allowed = max(3 * noise * math.sqrt(2 / half), 0.1 * abs(late - metric.floor))
    return gain if metric.higher_is_better else -gain, allowed
