"""Gates on learning: overfit with evaluation, input-independent baseline."""

import dataclasses
import math
import time
from typing import Any

from torch import nn
from trainworthy.core.base.processes import agreed
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data.loader import cut
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes import named
from trainworthy.core.gates.causes.dependence import UNTRAINED, explain_answers_without_input
from trainworthy.core.gates.causes.frozen import limits
from trainworthy.core.gates.causes.scores import Smoothed, explain_bounded_scores, smoothed_floor
from trainworthy.core.gates.causes.weights import entries, explain_step_size, explain_unslowed, has_no_floor
from trainworthy.core.gates.checks import class_means
from trainworthy.core.gates.checks.batch_norm import layers
from trainworthy.core.gates.checks.null_model import known_by_size, reaches
from trainworthy.core.gates.gate import GateContext, fetch, pick, total_loss, train_set
from trainworthy.core.loop.optim import scale_peaks
from trainworthy.core.loop.run import Rehearsal, Run, evaluating
from trainworthy.core.recipe.stage import Expect, Metric, Stage, View, categorical

OVERFIT_SAMPLES = 8
NEAR = 0.03, 0.06  # of the way to its floor: where training stops, and what is enough with right answers
LEFT = 0.7  # of its first value: a loss that may stay above its floor while all answers are right
PATIENCE = 30.0  # seconds of the first training of eight samples above which no other rate is tried
RATES = (30, 1 / 30, 3000, 1 / 1000)  # multiples of the rate that are tried where eight samples were not memorised


def _train_on_eight(
    context: GateContext, blank: tuple[str, ...] = (), most: int = 0, times: int = 1, rate: float = 1.0
) -> tuple[Run, Stage, dict]:
    """Run the recipe's own `train()` on eight fixed samples with fixed draws at `rate` times the peak rate, until loss and
    metric reach their targets, or for `most` steps."""
    probe = context.peek()
    expect, metric = dataclasses.replace(probe.expect), probe.gate_evaluator.metric
    # Fine-tuning uses a 5 to 10 times smaller rate
    expect.overfit_steps *= times if probe.pretrained is None else 2 * times
    indices = pick(train_set(probe), expect.at_most(OVERFIT_SAMPLES, times=2), context.cfg.run.seed)
    if most:
        expect.overfit_steps = min(expect.overfit_steps, most)
    found: dict = {"indices": indices, "curve": [], "blank": blank, "closing": False}

    def closing() -> bool:
        """Return whether the last update's loss is low enough for the first time; then stop early, since steps are
        expensive."""
        last = run.rehearsal.losses[-1:] if expect.gate_batch_size and not found["closing"] else []
        low = agreed(context.accelerator, bool(last) and last[0] <= found["needed_loss"])
        found["closing"] |= low
        return low

    def check(stage: Stage, step: int) -> bool:
        if step % (5 if expect.gate_batch_size else 10) and step != expect.overfit_steps and not closing():
            return False
        with evaluating(stage.model):
            loss = agreed(context.accelerator, total_loss(run, stage, batch).item())
        due = loss <= found["needed_loss"] or step == expect.overfit_steps
        value = run.measure(stage, view, probe=True)[metric.name] if due else None
        found["curve"].append((step, loss, value))
        found.update(loss=loss, metric=value, steps=step)
        closed = value is not None and loss <= found["needed_loss"] and not metric.better(goal, value)
        return agreed(context.accelerator, closed)

    sizes = _micro_batches(context, len(indices)) if layers(probe.model) else None
    run, stage = context.build(
        Rehearsal(steps=expect.overfit_steps, sizes=sizes, samples=indices, fixed=True, peak=True, batch_size=len(indices),
             blank=blank, watch=check))  # fmt: skip
    scale_peaks(stage.optimizers.values(), rate)
    # The evaluation reads exactly the trained inputs: eight images do not teach invariance to augmentation.
    found["view"] = view = View(stage.data["train"], indices, blank=blank, draws=context.cfg.run.seed)
    batch = fetch(view, list(range(len(indices))), context.cfg.run.seed, run.device)
    due = stage.expect  # the probe's functions may read its own model, which is on the host
    floor, goal = _on(batch, due.loss_floor), _on(batch, due.overfit_metric)
    goal = found["goal"] = metric.ceiling if goal is None else goal
    for module in stage.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = max(module.momentum or 0.0, 0.1)  # slower statistics need more steps (see batch-norm)
    found["initial"], floor = _start_and_floor(run, stage, batch, floor)
    untrained = max(found["initial"], _on(batch, due.initial_loss) or -math.inf)  # pretrained: starts lower
    found["needed_loss"], found["enough"] = (floor + share * abs(untrained - floor) for share in NEAR)
    started, before = time.monotonic(), entries(stage)
    context.train(context.cfg, run, stage)
    found.update(batch=batch, seconds=time.monotonic() - started, trained=run.rehearsal.losses[-1:])
    found["step_size"] = explain_step_size(before, entries(stage), found.get("steps", 0))
    return run, stage, found


def _start_and_floor(run: Run, stage: Stage, batch: dict, declared: float) -> tuple[float, float]:
    """Return the loss now, and the floor: the declared one, or that of labels which the loss smooths, whatever the recipe declares."""
    with evaluating(stage.model):
        with Smoothed() as labels:
            initial = total_loss(run, stage, batch).item()
        return initial, max(
            declared, smoothed_floor(lambda: total_loss(run, stage, batch))
        ) if labels.found else declared


def _micro_batches(context: GateContext, samples: int) -> list[int]:
    """Return the cut of `samples` into micro-batches of the run's size; as many parts as the run has could leave one in
    each."""
    cfg, world = context.cfg.train, context.accelerator.num_processes
    mine, micro = samples // world, cfg.batch_size // (world * cfg.accumulate)
    return cut(mine, max(1, mine // max(1, micro)))


def _on(batch: dict, value: Any) -> Any:
    """Return what a recipe expects on this batch."""
    return value(batch) if callable(value) else value


def overfitted(context: GateContext) -> tuple[Run, Stage, dict]:
    """Return the overfit model that several gates use. If its loss still falls at the last step (a pretrained model at
    a small rate starts slowly), it may get four times as many (`Expect.overfit_longer`). Twice as many if the loss is
    already low enough for right answers: then only the metric misses its goal, and it may follow the loss."""

    def train() -> tuple[Run, Stage, dict]:
        first, expect = _train_on_eight(context), context.expect
        longer = expect.overfit_longer
        if longer is None:
            longer = expect.overfit_steps == Expect.overfit_steps and not expect.gate_batch_size
        times = 4 if longer else 2 if _metric_lags(first[1].gate_evaluator.metric, first[2]) else 1
        if times == 1 or not _falls(first[2]):
            return first
        del first  # before the next one is built
        return _train_on_eight(context, times=times)

    return context.once("overfit", train)


def _metric_lags(metric: Metric, found: dict) -> bool:
    """Return whether the loss is low enough for right answers, and the metric misses its goal."""
    value = found.get("metric")
    return value is not None and found["loss"] <= found["enough"] and metric.better(found["goal"], value)


def not_memorised(context: GateContext) -> bool:
    """Return whether the loss of eight fixed samples stays above what right answers have."""
    found = overfitted(context)[2]
    return "loss" in found and found["loss"] > found["enough"]


def _falls(found: dict) -> bool:
    """Return whether the last third of the steps closed a fifth of the remaining distance."""
    losses = [loss for _, loss, _ in found["curve"]]
    if len(losses) < 6 or found["loss"] <= found["needed_loss"]:
        return False
    before = losses[-1 - len(losses) // 3]
    return found["loss"] - found["needed_loss"] < 0.8 * (before - found["needed_loss"])


@gate(
    "overfit",
    rows="C4",
    title="the model memorises eight fixed samples, through the real loop and the real evaluation",
    reads="data model loss counts evaluate metric probe optimizers state expect train",
    symptom=True,
)
def overfit(context: GateContext) -> Finding:
    """The loss must be near its floor AND the metric at its ceiling on the same samples, read again through the
    evaluation path. The loss alone cannot show a shifted label or a wrong transform."""
    run, stage, found = overfitted(context)
    if "loss" not in found:
        made, due = "train() made no step", "steps from run.steps(stage)"
        return Finding(False, made, due, "train() does not iterate over run.steps(stage)")
    used = stage.gate_evaluator.metric
    reached = found["metric"] is not None and not used.better(found["goal"], found["metric"])
    fell = found["loss"] < LEFT * found["initial"]
    # Running statistics of eight samples, and unbiased variances, are not those that batch norm trains with
    by_batch = bool(layers(stage.model)) and bool(found["trained"]) and found["trained"][0] <= found["enough"]
    closed = found["loss"] <= found["enough"] or (
        reached and fell and (not stage.expect.floor_known or has_no_floor(found) or by_batch)
    )
    metric = "-" if found["metric"] is None else f"{found['metric']:.3f}"
    lags = "the average that is evaluated is not updated, or lags too far behind the weights\n"
    remedy = (
        lags * (stage.ema_model is not None)
        + "evaluation reads other inputs, labels or classes than training (order, shift, transform)"
        if closed
        else "wrong formula or target: softmax before cross-entropy, labels that do not belong to their inputs\n"
        "gradients do not arrive (see wiring), or the rate is far too low or too high for 8 samples\n"
        "a loss floor that the recipe does not declare (expect.loss_floor)"
    )
    near = found["metric"] is not None and reaches(
        used, found["metric"], used.floor + 0.9 * (found["goal"] - used.floor)
    )
    if near and not closed and stage.expect.frozen:
        reason = (
            "the frozen head was never trained on them, or too few weights train (--lora-rank 0 trains all weights)"
        )
        remedy = f"answers are right or nearly, but their scores are too small: {reason}\n{remedy}"
    elif not closed and _falls(found):
        remedy = f"the loss still falls at the last step: the weights were never trained, or the rate is low for this net (--optim.lr)\n{remedy}"
    if not closed and (limit := limits(dict(stage.model.named_parameters()))):
        remedy += f"\n{limit}"
    name, sign = used.name, ">=" if used.higher_is_better else "<="
    share = class_means.share(run, stage, found) if closed and not reached else ""
    return Finding(
        (closed and reached) or bool(share),
        f"loss {found['initial']:.2f} -> {found['loss']:.3f}, {name} {metric} on {len(found['indices'])} samples "
        f"in {found['steps']} steps{share}",
        f"loss <= {found['enough']:.3f} and {name} {sign} {found['goal']:g}",
        remedy,
        evidence={"curve": [(0, found["initial"], None), *found["curve"]], "needed_loss": found["enough"],
                  "samples": found["indices"]},
        batch=found["batch"],
        cause="" if share else _opposed(context, used, found) if closed else _why_not(context, stage, found),
    )  # fmt: skip


def _opposed(context: GateContext, metric: Metric, found: dict) -> str:
    """Return the cause of a metric that is far below its goal although the loss is at its floor."""
    run, stage = context.look()
    value, lowest = found["metric"], metric.floor - 0.5 * (found["goal"] - metric.floor)
    if value is None or not metric.better(found["goal"], value):
        return ""
    if found["initial"] == 0:
        return f"the loss of these {len(found['indices'])} samples is 0 before training: a mask leaves none of them to learn from"
    targets = [k for k, f in stage.data["train"].fields.items() if f.role == "target"] * (run.world == 1)
    with evaluating(stage.model):
        why = named.explain_unread_places(lambda b: total_loss(run, stage, b), found["batch"], targets)
    if why or not metric.better(lowest, value):
        return why
    return (f"loss and metric want opposite answers: {metric.name} is {value:.3g} where the loss is at its floor, far worse than chance "
            f"({metric.floor:.3g}); 1 and 0, or a sign, are exchanged in one of them")  # fmt: skip


def _why_not(context: GateContext, stage: Stage, found: dict) -> str:
    """Return the cause, supported by an experiment, of a loss that did not reach its floor: inputs that do not arrive, a known floor,
    or another rate at which the same samples are memorised."""
    if context.accelerator.num_processes > 1:  # all ranks must run the same code
        return ""
    run, fields, why = context.look()[0], stage.data["train"].fields, ""
    if stage.pretrained and stage.expect.frozen:
        why = named.explain_untrained_base(context.look()[1].model, found["batch"])
    why = why or named.explain_redrawn(stage.model, lambda b: total_loss(run, stage, b), found["batch"])
    why = why or found["step_size"] or _ignored(context, run, stage, found["batch"])
    target = categorical(stage.data["train"])
    if not why and target:
        smoothing = float(getattr(context.cfg, "label_smoothing", 0.0))
        why = named.explain_double_softmax(found["loss"], len(fields[target].classes), smoothing)
    if why:
        return why
    if context.expect.gate_batch_size or found["seconds"] > PATIENCE:  # expensive samples: no further training
        return explain_unslowed(found)
    for factor in RATES:
        again = _train_on_eight(context, rate=factor)[2]
        if again.get("loss", math.inf) <= again["needed_loss"]:
            low = "low" if factor > 1 else "high"
            return (f"the rate is far too {low} for 8 samples: at {factor:g} times the rate they are memorised in {again['steps']} steps "
                    f"(loss {again['loss']:.3f})")  # fmt: skip
    with evaluating(stage.model):
        return explain_bounded_scores(
            stage.model, lambda m: stage.loss(m, found["batch"]), found["loss"], found["needed_loss"]
        )


def _ignored(context: GateContext, run: Run, stage: Stage, batch: dict) -> str:
    """Return that the input does not arrive, if it does not before the training either: a rate that is too high kills units."""
    inputs = [k for k, f in stage.data["train"].fields.items() if f.role == "input"]

    def explained(one: Stage) -> str:
        return named.explain_ignored_input(one.model, lambda b: total_loss(run, one, b), batch, inputs)

    if not stage.expect.floor_known:  # the input is read as the target, too
        return ""
    return (why := explained(stage)) and explained(context.look()[1]) and why


@gate(
    "baseline",
    rows="C5",
    title="the model cannot answer without its input",
    reads="data model loss counts evaluate metric probe optimizers state expect train",
    symptom=True,
)
def baseline(context: GateContext) -> Finding:
    """Score the overfit model on other samples' inputs, and train a model on blank inputs: both must be clearly
    worse."""
    if context.expect.solvable_without_input:
        raise Skip(f"by design: {context.expect.solvable_without_input}")
    run, stage, found = overfitted(context)
    metric = stage.gate_evaluator.metric
    if "loss" not in found or found["metric"] is None or _hardly_memorised(run, stage, found):
        value = "no steps" if found.get("metric") is None else f"{metric.name} {found['metric']:.2f}"
        raise Skip(f"the overfit gate did not get far enough to compare: {value}")
    inputs = tuple(k for k, f in stage.data["train"].fields.items() if f.role == "input")
    indices = found["indices"]
    turned = [(i + 1) % len(indices) for i in range(len(indices))]  # a derangement: none keeps its own input
    others = View(stage.data["train"], indices, swap=turned, draws=context.cfg.run.seed)
    swapped = run.measure(stage, others, probe=True)[metric.name]
    # For a continuous target, the mean of eight values fits those eight better than the data (var8 < 0.5 var in one draw of five).
    bar = metric.floor + (0.5 if categorical(stage.data["train"]) else 0.9) * (found["metric"] - metric.floor)
    why = ""
    if reaches(metric, swapped, bar):
        why = _why_blind(context, run, stage, View(others.data, indices, draws=others.draws), found, bar)
    context.put_away()  # before another one is trained
    most = found["steps"] * (1 if stage.expect.gate_batch_size else 4)
    try:
        blank_run, blank_stage, without_input = _train_on_eight(context, blank=inputs, most=most)
    except (ArithmeticError, ValueError, IndexError, RuntimeError) as error:  # for example a metric that counts tokens
        if reaches(metric, swapped, bar):
            raise
        measured = f"{metric.name} {found['metric']:.2f} with its input, {swapped:.2f} with another sample's"
        raise Skip(f"{measured}; blank inputs raise {type(error).__name__}: {error}") from error
    blind_metric = without_input["metric"] if without_input["metric"] is not None else metric.floor
    blank = View(others.data, indices, blank=inputs, draws=others.draws)
    answered = reaches(metric, blind_metric, bar) and not known_by_size(metric, found["metric"], blind_metric, blank)
    ok = not reaches(metric, swapped, bar) and not answered
    if not ok and not why:
        why = _why_blind(context, blank_run, blank_stage, blank, without_input, bar)
    if not ok and why.startswith(UNTRAINED):
        _skip_if_more_samples_tell(context, metric, found["metric"], bar)
    return Finding(
        ok, f"{metric.name} {found['metric']:.2f} with its input, {swapped:.2f} with another sample's, "
        f"{blind_metric:.2f} trained on blank inputs",
        f"both {'below' if metric.higher_is_better else 'above'} {bar:.2f}",
        "the target reaches the model by another way (an index, a file name, the sample's position in the batch)\n"
        "the input is overwritten before it reaches the net",
        evidence={"swapped": swapped, "blind": blind_metric, "blind_loss": without_input["loss"]},
        batch=found["batch"], cause=why,
    )  # fmt: skip


def _skip_if_more_samples_tell(context: GateContext, metric: Metric, own: float, bar: float) -> None:
    """Skip if only eight samples are too few for the metric (a recall among ten candidates): on more, an untrained model is worse."""
    run, stage = context.build(Rehearsal(steps=1))
    indices = pick(stage.data["train"], stage.expect.at_most(256, times=16), context.cfg.run.seed)
    many = run.measure(stage, View(stage.data["train"], indices, draws=context.cfg.run.seed), probe=True)[metric.name]
    if not reaches(metric, many, bar):
        raise Skip(f"{metric.name} cannot tell on eight samples: an untrained model has {own:.2f} there, "
                   f"and {many:.2f} on {len(indices)}")  # fmt: skip


def _hardly_memorised(run: Run, stage: Stage, found: dict) -> bool:
    """Return whether the overfit model's right answers are so few that chance, or one answer to all, may give as many without the
    input. The gate `overfit` says why they are few."""
    metric = stage.gate_evaluator.metric
    half = metric.floor + 0.5 * (found["goal"] - metric.floor)
    return not reaches(metric, found["metric"], half) and not class_means.share(run, stage, found)


def _why_blind(context: GateContext, run: Run, stage: Stage, view: View, found: dict, bar: float) -> str:
    """Return where a model that answers without its input has its answers from, and whether the input reaches the loss at all."""
    if context.accelerator.num_processes > 1:  # all ranks must run the same code
        return ""
    metric = stage.gate_evaluator.metric

    def measure(one: View) -> float:
        return run.measure(stage, one, probe=True)[metric.name]

    def untrained() -> float:
        fresh_run, fresh = context.build(Rehearsal(steps=1))
        return fresh_run.measure(fresh, view, probe=True)[metric.name]

    why = explain_answers_without_input(view, measure, untrained, lambda value: reaches(metric, value, bar))
    inputs = [k for k, f in view.fields.items() if f.role == "input"]
    lost = ""
    if not view.blank:
        lost = named.explain_ignored_input(stage.model, lambda b: total_loss(run, stage, b), found["batch"], inputs)
    return f"{why}; {lost}" if why and lost else why or lost
