"""Gates on learning: initial loss, dependency, overfit-then-evaluate, input-independent baseline."""

import math

import torch
from torch import Tensor

from core.gates import Finding, Proof, Skip, agreed, fetch, gate, pick, total_loss
from core.gates.recorder import rehearsed
from core.run import Plan, Run, evaluating
from core.stage import Metric, Stage, View

OVERFIT_SAMPLES = 8


@gate("initial-loss", rows="C1", title="the untrained loss is what the output head implies")
def initial_loss(proof: Proof) -> Finding:
    """Mean loss of the untrained model on 256 training samples, against the value the recipe derives from theory."""
    run, stage = proof.build(Plan(steps=1))
    expected = stage.expect.initial_loss
    if expected is None:
        raise Skip("the recipe expects no particular initial loss")
    if stage.pretrained is not None and not stage.expect.fresh:
        raise Skip("started from trained weights: the head is not an untrained one")
    batch = fetch(
        stage.data["train"], pick(stage.data["train"], 256, proof.cfg.run.seed), proof.cfg.run.seed, run.device
    )
    with evaluating(stage.model):
        measured = total_loss(run, stage, batch).item()
    tolerance = 0.1 * expected
    return Finding(
        abs(measured - expected) <= tolerance, f"loss {measured:.3f} before training", f"{expected:.3f} within {tolerance:.2f}",
        "the last layer starts too large: logits are far from even (zero or small initialisation)\n"
        "the number of outputs is not the number of classes\nthe loss sums where it should average, or the other way round",
        evidence={"measured": measured, "expected": expected},
    )  # fmt: skip


@gate("dependency", rows="C2", title="samples of a batch do not see each other")
def dependency(proof: Proof) -> Finding:
    """Backpropagation: the gradient of the batch's loss with respect to input j equals that of sample j's own loss, and the
    batch's loss is the sum over its rows. On the rehearsed model: a head that starts at zero hides everything."""
    run, stage, _ = rehearsed(proof)
    if stage.expect.couplings:
        raise Skip(f"declared: {stage.expect.couplings}")
    data, seed = stage.data["train"], proof.cfg.run.seed
    limit = 1e-3 if run.precision == "fp32" else 5e-2
    picked = pick(data, 12, seed)
    trials = []
    for indices in (picked[0:4], picked[4:8], picked[8:12]):
        batch = fetch(data, indices, seed, run.device)
        together = _input_gradients(run, stage, batch)
        if _apart(together[1], _input_gradients(run, stage, batch)[1]) > limit:
            raise Skip(
                "the loss of one batch differs from call to call in eval mode (see evaluation): nothing to compare"
            )
        alone = [_input_gradients(run, stage, fetch(data, [i], seed, run.device)) for i in indices]
        loss, rows = together[0], sum(a[0] for a in alone)
        gap = abs(loss - rows) / max(abs(loss), 1e-8)
        leak = _apart(together[1], {k: torch.cat([a[1][k] for a in alone]) for k in together[1]})
        mean = gap > limit and abs(loss * len(indices) - rows) <= limit * abs(rows)
        trials.append((max(gap, leak), gap, leak, mean))
    # The middle one of three: rounding can flip one ReLU of one sample (seen: 1.6e-3), a mixture shows in every draw.
    _, gap, leak, mean = sorted(trials)[1]
    return Finding(
        gap <= limit and leak <= limit,
        f"loss of a batch differs from the sum over its samples by {gap:.1e}, input gradients by {leak:.1e} (relative)",
        f"both at most {limit:g}",
        ("the loss is a MEAN over the batch: return the SUM, core divides it by the counts\n" if mean else "")
        + "statistics over the batch axis (own normalisation, x.mean(0)), or a reshape that mixes samples\n"
        "a (B, 1) against (B,) broadcast in the loss\nthe batch is flattened before a shift",
        evidence={"loss_gap": gap, "gradient_gap": leak},
    )  # fmt: skip


def _apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest relative difference of two sets of gradients. Relative to the larger: `x - x.mean(0)` has none for a batch of one."""
    gaps = [0.0]
    for key, one in a.items():
        size = max(one.norm().item(), b[key].norm().item())
        if one.shape == b[key].shape and size > 0:
            gaps.append((one - b[key]).norm().item() / size)
    return max(gaps)


def _input_gradients(run: Run, stage: Stage, batch: dict) -> tuple[float, dict[str, Tensor]]:
    """(sum of the loss terms, gradient with respect to every floating-point input) in eval mode."""
    inputs = {k: batch[k].detach().clone().requires_grad_() for k, f in stage.data["train"].fields.items()
              if f.role == "input" and isinstance(batch[k], Tensor) and batch[k].is_floating_point()}  # fmt: skip
    with evaluating(stage.model), torch.enable_grad(), run.autocast():
        loss = sum(stage.loss(stage.model, {**batch, **inputs}).values())
        grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True) if inputs else []
    return loss.item(), {k: torch.zeros_like(batch[k]) if g is None else g for k, g in zip(inputs, grads, strict=True)}


def _train_on_eight(proof: Proof, blank: tuple[str, ...] = ()) -> tuple[Run, Stage, dict]:
    """The recipe's own `train()` on eight fixed samples with fixed draws at the peak rate, until loss and metric close."""
    _, probe = proof.build(Plan(steps=1))
    expect, metric = probe.expect, probe.metric
    expect.overfit_steps *= 1 if probe.pretrained is None else 2  # the rate of fine-tuning is 5 to 10 times smaller
    indices = pick(probe.data["train"], OVERFIT_SAMPLES, proof.cfg.run.seed)
    goal = metric.ceiling if expect.overfit_metric is None else expect.overfit_metric
    found: dict = {"indices": indices, "curve": [], "goal": goal, "blank": blank}

    def check(stage: Stage, step: int) -> bool:
        if step % 10 and step != expect.overfit_steps:
            return False
        with evaluating(stage.model):
            loss = agreed(proof.accelerator, total_loss(run, stage, batch).item())
        untrained = max(
            found["initial"], expect.initial_loss or -math.inf
        )  # pretrained weights start part of the way down
        found["needed_loss"] = expect.loss_floor + 0.03 * abs(untrained - expect.loss_floor)
        value = (
            run.measure(stage, view)[metric.name]
            if loss <= found["needed_loss"] or step == expect.overfit_steps
            else None
        )
        found["curve"].append((step, loss, value))
        found.update(loss=loss, metric=value, steps=step)
        closed = value is not None and loss <= found["needed_loss"] and not metric.better(goal, value)
        return agreed(proof.accelerator, closed)

    plan = Plan(
        steps=expect.overfit_steps,
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
    with evaluating(stage.model):
        found["initial"] = total_loss(run, stage, batch).item()
    proof.train(proof.cfg, run, stage)
    found["batch"] = batch
    return run, stage, found


def overfitted(proof: Proof) -> tuple[Run, Stage, dict]:
    """The overfit model that several gates judge."""
    return proof.once("overfit", lambda: _train_on_eight(proof))


@gate("overfit", rows="C4", title="eight fixed samples are learnt, through the real loop and the real evaluation")
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
    reached = found["metric"] is not None and not stage.metric.better(found["goal"], found["metric"])
    metric = "-" if found["metric"] is None else f"{found['metric']:.3f}"
    remedy = (
        "evaluation reads other inputs, labels or classes than training (order, shift, transform)"
        if closed
        else "wrong formula or target: softmax before cross-entropy, labels that do not belong to their inputs\n"
        "gradients do not arrive (see wiring), or the rate is far too low or too high for 8 samples\n"
        "a loss floor that the recipe does not declare (expect.loss_floor)"
    )
    name, sign = stage.metric.name, ">=" if stage.metric.higher_is_better else "<="
    return Finding(
        closed and reached,
        f"loss {found['initial']:.2f} -> {found['loss']:.3f}, {name} {metric} on 8 samples in {found['steps']} steps",
        f"loss <= {found['needed_loss']:.3f} and {name} {sign} {found['goal']:g}",
        remedy,
        evidence={"curve": [(0, found["initial"], None), *found["curve"]], "needed_loss": found["needed_loss"],
                  "samples": found["indices"]},
        batch=found["batch"],
    )  # fmt: skip


@gate("baseline", rows="C5", title="without its input the model knows nothing")
def baseline(proof: Proof) -> Finding:
    """The overfit model on the inputs of other samples, and a model trained on blank inputs: both must be clearly worse."""
    run, stage, found = overfitted(proof)
    if "loss" not in found or found["metric"] is None:
        raise Skip("the overfit gate did not get far enough to compare")
    inputs = tuple(k for k, f in stage.data["train"].fields.items() if f.role == "input")
    indices, metric = found["indices"], stage.metric
    turned = [(i + 1) % len(indices) for i in range(len(indices))]  # a derangement: no sample keeps its own input
    swapped = run.measure(stage, View(stage.data["train"], indices, swap=turned, draws=proof.cfg.run.seed))[metric.name]
    _, _, blind = _train_on_eight(proof, blank=inputs)
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
