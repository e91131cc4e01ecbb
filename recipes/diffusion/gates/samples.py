"""Gates of class-conditional diffusion: the sampler inverts the training target (DF4), EMA (DF2), dropped classes (DF5), two samplers agree
(DF6); and monitors of sample quality (DF1, DF6). weighting.py has that on the weight and frequency of timesteps (DF7).

The gates measure the objective from the loss itself. They pass the output of a constant net to the loss and take its gradient at three
constants. A term whose gradients are on a line is quadratic: the gradient's zero is the target at that timestep, and its slope is the
weight. Other terms (a cosine) are left out. The declaration to compare with is `cfg.noise` (`weights`, `below`); the inverse is the exported
scheduler, of a diffusion or a flow.
"""

import itertools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.named import order_causes
from trainworthy.core.gates.gate import Gate, GateContext, fetch, pick
from trainworthy.core.loop.run import Rehearsal, evaluating
from trainworthy.core.monitoring.monitors import monitor
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.diffusion.gates import drawn_noise, few_steps, own_weights, walks
from trainworthy.recipes.diffusion.gates.averages import ema
from trainworthy.recipes.diffusion.gates.objective import (
    FEW,
    Constant,
    Knowing,
    Objective,
    clean_key,
    condition_field,
    objective,
    undone,
    walk,
)
from trainworthy.recipes.diffusion.gates.short_run import SHORT, trained, watched
from trainworthy.recipes.diffusion.gates.weighting import weighting

EXACT = 0.02  # rms error of a picture in [-1, 1] recovered in one step
WALKED = 0.05  # the same along the trajectory of an exported pipeline, at levels between those that were measured
LEFT = 0.1  # signal left at the noisiest level: cosine 0%, linear with 1,000 steps 0.6%, Stable Diffusion 6.8%, linear with 250 steps 28%
REVERSED = 32  # noise levels at which the negative of the target is inverted
OTHER_IDS = 0.9  # share of the samples whose class id in training is not their own
MANY = 64  # most captions whose picture the answering net knows; there may be as many captions as pictures
KNOWN = 200  # real pictures that the classifier is evaluated on
EARLY = 0.05  # rms between two samplers after SHORT steps: 0.015 healthy, 0.133 with clipping at guidance 2
HALVED = 0.6  # of the difference is left with twice as many steps, if the step length is its cause
ENOUGH = 20  # sampling steps, of which twice as many are tried
LATE = 0.25  # the same at the end of a run
BRIGHT = 0.06  # difference of means, pictures in [-1, 1]
RICH = 0.1  # difference of standard deviations
EXCHANGED = (
    "guidance leads away from the class: the halves of the net's batch, with and without the class, are exchanged (with the answers of one half "
    "for the other: {:.2f}): unconditional + {:g} * (conditional - unconditional)"
)
MIXED = "other samples of the batch are part of a sample's error: return what they add as a term of its own, {'mse': ..., 'contrast': ...}"
INHERITED = (
    "an option that the sampler inherits from the training scheduler (clip_sample clips the picture but keeps the noise of the "
    "unclipped one)\none of them takes too few steps\na scheduler for another objective"
)


def noise_process(
    classifier: Callable[[Tensor], tuple[Tensor, Tensor]] | None, ask: walks.Ask = walks.by_class
) -> Gate:
    """Return the gate that compares training target and sampler.

    `classifier` classifies pictures, and tells which share of the clean ones can be recognised at all. With None, samples are not classified
    and the evaluation is one step of denoising. `ask` calls the exported pipeline."""

    @gate(
        "noise-process",
        rows="DF4",
        title="sampling inverts the training target at every noise level",
        reads="data model loss counts evaluate export train",
        explains=True,
    )
    def check(context: GateContext) -> Finding:
        """Measures the training target at 512 noise levels and checks that sampling inverts it:

        - One step of the exported scheduler from the target must return the clean picture.
        - The evaluation of a net that knows one picture per class must show these pictures.
        - Every step of the exported pipeline with such a net must imply its picture, at timesteps that the evaluation uses, too. If the
          pipeline can be run, this replaces the first check: a recipe may use another convention (time reversed) consistently.
        - The noisiest level must be nearly pure noise, because sampling begins there.
        - train() must draw a timestep for each sample, over the whole schedule, and another one in the next epoch."""
        aim, run, stage = objective(context), *context.build(Rehearsal(steps=1))
        with tempfile.TemporaryDirectory() as name:
            stage.export(Path(name))
            shipped = DiffusionPipeline.from_pretrained(name, trust_remote_code=True).scheduler
            val, steps = stage.data["val"], context.cfg.sampling.num_inference_steps
            rows = fetch(val, pick(val, min(FEW, len(val)), context.cfg.run.seed), None, run.device)
            way = walk(aim, Path(name), val, rows, ask, steps)
        stage.model.to(run.device)
        total, t = shipped.config.num_train_timesteps, aim.timestep.tolist()
        wrong = [
            undone(shipped, p, i, x).sub(clean).square().mean().sqrt().item()
            for p, i, x, clean in zip(aim.target.cpu(), t, aim.noisy.cpu(), aim.clean.cpu(), strict=True)
        ]
        worst = max(range(len(wrong)), key=wrong.__getitem__)
        key, n = condition_field(val)
        n = min(n, MANY)
        first = {int(val.peek(i, key)): i for i in reversed(pick(val, min(4 * n, len(val)), context.cfg.run.seed))}
        classes = sorted(first)
        ones = fetch(val, [first[c] for c in classes], None, run.device)
        one = ones[clean_key(val)]
        knowing = Knowing(aim, one, classes)
        with evaluating(stage.model):
            # The evaluation samples for every `each`-th: repeat, so that two of each class remain
            each = context.cfg.sampling.every
            some = [i for i in pick(val, min(2 * n, len(val)), context.cfg.run.seed) for _ in range(each)]
            some = [i for i in some if int(val.peek(i, key)) in first]
            known = stage.evaluate(knowing, View(val, some))[stage.metric.name]
        shipped.set_timesteps(steps)
        met, left = torch.tensor(sorted(knowing.met)), walks.left_over(shipped)
        strays = sum((met - i).abs().min().item() > 1e-3 for i in (way.met if way else shipped.timesteps.tolist()))
        undoes = way.worst <= WALKED and way.end <= WALKED if way else wrong[worst] <= EXACT
        seen = watched(context)
        spread = torch.histc(seen.timesteps, bins=4, min=0, max=total) / len(seen.timesteps)
        below = val.process.noise.below(torch.arange(1, 4) * total / 4)
        declared = torch.cat([below.new_zeros(1), below, below.new_ones(1)]).diff()
        alone, spread_ok = seen.distinct >= 0.5, (spread >= 0.4 * declared).all() and seen.timesteps.max() <= total
        wide = few_steps.kept(aim, shipped, steps)
        narrow = (
            wide is not None and wide < few_steps.LEAST and wrong[worst] <= EXACT
        )  # else the recipe has a convention of its own
        recognised, blended = guided(classifier, one, ones.get("label"), context.cfg.sampling.guidance_scale)
        along = f"; along the exported pipeline's trajectory {way.worst:.1e}, at its end {way.end:.1e}" if way else ""
        floor = 0.75 * stage.metric.ceiling * recognised
        why, odd = "", drawn_noise.odd(aim)
        if alone and not spread_ok and wrong[worst] <= EXACT:  # trained levels are inverted, others are not trained
            drawn, due = (" ".join(f"{s:.0%}" for s in shares.tolist()) for shares in (spread, declared))
            why = f"timesteps are drawn from another distribution than declared: {drawn} in each quarter, not {due}"
        elif not undoes and wrong[worst] <= EXACT:
            why = walks.untrained(seen.timesteps, way.met if way else set(), total)
        elif not undoes:
            levels = aim.timestep, aim.alpha, aim.sigma
            why = (
                walks.clamped(aim.noisy)
                or walks.bent(aim.kind, *levels)
                or opposite(shipped, aim)
                or (walks.other_timestep(val.process, *levels) if alone else "")
                or MIXED * bool(stage.expect.batch_dependence)
            )
        if known < floor and sum(seen.hidden) > OTHER_IDS * max(1, len(seen.hidden)):
            why = "training gives the net other class ids than those of the samples, with which samples are requested"
        if not why and known < floor:
            knowing.exchanged = True
            with evaluating(stage.model):
                turned = stage.evaluate(knowing, View(val, some))[stage.metric.name]
            why = EXCHANGED.format(turned, context.cfg.sampling.guidance_scale) if turned >= floor else ""
        if aim.redrawn == 0 and alone:
            why = "each sample keeps one timestep in all epochs: get() draws it from the sample's number, not from its generator"
        return Finding(
            undoes and known >= floor and not strays and alone and bool(spread_ok) and left <= LEFT and aim.redrawn > 0
            and not blended and not narrow and not odd,
            f"target: {aim.kind}, inverted in one step by {type(shipped).__name__} to an rms error of at most {wrong[worst]:.1e} "
            f"(t {t[worst]:.0f}){along}; its noisiest level keeps {left:.1%} of the signal; "
            f"samples of a net that knows the answer: {stage.metric.name} {known:.2f} "
            f"(of the pictures it knows: {recognised:.2f}); the evaluation does not use {strays} of the export's timesteps; "
            f"{aim.redrawn:.0%} of the samples get another timestep in the next epoch; {seen.distinct:.0%} of a batch's timesteps differ, "
            f"{' '.join(f'{s:.0%}' for s in spread.tolist())} in each quarter of {total}"
            + f"; {steps} steps keep {wide:.0%} of the data's deviation" * (wide is not None) + f"; {odd}" * bool(odd),
            f"rms at most {WALKED:g} along the exported pipeline's trajectory (if it cannot be run, {EXACT:g} at every level); at "
            f"most {LEFT:.0%} of the signal left where sampling begins; {stage.metric.name} at least {floor:.2f}; the same scheduler "
            "in evaluation and export; a timestep for each sample, at least "
            f"{' '.join(f'{0.4 * s:.0%}' for s in declared.tolist())} in each quarter of the sampler's schedule; steps that keep "
            f"{few_steps.LEAST:.0%} of the deviation",
            order_causes(
                (not alone, "one timestep for the whole batch, or a constant"),
                (not undoes or bool(strays), "the sampler is not built from the training scheduler's config: another schedule, shift, "
                 "number of timesteps or prediction type"),
                (not undoes, "the target has another sign or form than the scheduler inverts"),
                (not undoes or known < floor, "the net gets another timestep in training than in sampling: another scale, or time reversed"),
                (left > LEFT, "the noisiest level is not pure noise, but sampling begins there: --noise.beta-schedule and "
                 "--noise.num-train-timesteps belong together (linear needs 1,000 timesteps)")),
            evidence={"kind": aim.kind, "levels": t, "rms": wrong, "known": known, "quarters": spread.tolist(), "left": left,
                      "walk": way and {"worst": way.worst, "end": way.end, "met": sorted(way.met)}},
            cause=why or blended or drawn_noise.CAUSE * bool(odd) or few_steps.CAUSE.format(steps) * narrow,
        )  # fmt: skip

    return check


def opposite(shipped, aim: Objective) -> str:
    """Return that the target has the sign that the exported scheduler does not invert, if one step from its negative returns the picture."""
    rows = zip(aim.target.cpu(), aim.timestep.tolist(), aim.noisy.cpu(), aim.clean.cpu(), strict=True)
    for p, t, noisy, clean in itertools.islice(rows, REVERSED):
        if undone(shipped, -p, t, noisy).sub(clean).square().mean().sqrt() > EXACT:
            return ""
    return f"the target's sign is reversed: {type(shipped).__name__} inverts its negative"


def guided(
    classifier: Callable[[Tensor], tuple[Tensor, Tensor]] | None, pictures: Tensor, labels: Tensor | None, scale: float
) -> tuple[float, str]:
    """Return (share of `pictures` (B, C, H, W) that show their class where guidance leads, fault or ""). Guidance leads from the mean to the
    picture and, at a scale above 1, beyond it; below 1 it does not reach it."""
    if classifier is None:
        return 1.0, ""
    middle = pictures.mean(0)
    ends = middle + scale * (pictures - middle)
    found, clean = (to_double(classifier(x)[0] == labels).mean().item() for x in (ends, pictures))
    if scale >= 1 or found >= 0.5 * clean:
        return found, ""
    return found, (f"--sampling.guidance-scale {scale:g} leads to the mean of all classes: {found:.0%} of the samples of a net that knows the "
                   f"answer show their class, at 1 {clean:.0%} do")  # fmt: skip


MOST = 0.5  # share of samples without a class, above which most steps teach a net that nobody samples alone (0.1 to 0.2 is usual)


@gate(
    "hidden-class",
    rows="DF5",
    title="the class is dropped at the declared rate, and the net denoises without it",
    reads="data model loss counts optimizers train",
)
def hidden_class(context: GateContext) -> Finding:
    """Counts how often the net gets another class than the sample's in sixty steps of train(), and which value replaces it. Then it
    compares that net's loss and predictions with the class and without it."""
    cfg = context.cfg
    run, stage, seen = trained(context)
    due = cfg.conditioning_dropout_prob
    if due == 0 and cfg.sampling.guidance_scale == 1:
        raise Skip("no class dropout and no guidance: --conditioning-dropout-prob 0 --sampling.guidance-scale 1")
    share, n = sum(seen.hidden) / max(1, len(seen.hidden)), max(1, len(seen.hidden))
    slack = 4 * math.sqrt(max(due * (1 - due), 0.01) / n)
    data = stage.data["val"]
    batch = fetch(data, pick(data, min(128, len(data)), cfg.run.seed), None, run.device)
    key, classes = condition_field(data)
    null = next(iter(seen.null), classes)
    losses, predictions = [], []
    with evaluating(stage.model), run.autocast():
        for condition in (batch[key], torch.full_like(batch[key], null)):
            predictions.append(stage.model(batch["noisy"], batch["timestep"], condition).sample.float())
            total = sum(stage.loss(stage.model, {**batch, "condition": condition}).values())
            losses.append(total.item() / len(condition))
    difference = ((predictions[0] - predictions[1]).norm() / predictions[0].norm().clamp_min(1e-9)).item()
    with evaluating(stage.model), run.autocast(), torch.no_grad():
        enough = 0.7 * sum(stage.loss(Constant(0.0), batch).values()).item() / len(batch[key])
    instead = " ".join(map(str, sorted(seen.null)[:5])) or "nothing"
    hidden = share > 0 and abs(share - due) <= slack and len(seen.null) == 1 and null >= classes
    return Finding(
        hidden and due <= MOST and difference > 1e-3 and losses[1] <= enough,
        f"the class is dropped in {share:.1%} of {n:,} samples (value instead: {instead}); after {SHORT} steps the loss is "
        f"{losses[0]:.3f} with the class and {losses[1]:.3f} without; the predictions differ by {difference:.1%}",
        f"dropped in {due:.0%} +- {slack:.1%} and in at most {MOST:.0%}, always replaced by the same value, which is no class; a loss below "
        f"{enough:.3f} without it; different predictions",
        order_causes(
            (due > MOST, f"the setting names the share that keeps the class: --conditioning-dropout-prob {1 - due:.3g} drops it that often"),
            (difference <= 1e-3 or share > MOST, "the class never reaches the net"),
            (share == 0 or abs(share - due) > slack, "the drop mask is drawn but not applied to the net's input"),
            (bool(seen.null) and null < classes, "the null class is a real class")),
        evidence={"hidden": share, "null": sorted(seen.null), "with": losses[0], "without": losses[1], "apart": difference},
    )  # fmt: skip


@gate(
    "samplers",
    rows="DF6",
    title="two samplers lead from the same noise to the same picture",
    reads="data model loss counts evaluate train",
)
def two_samplers(context: GateContext) -> Finding:
    """Measures `sampler_difference` of evaluate() after sixty steps of train(). A net overshoots under guidance by then. A larger difference
    may come from the step length alone: with twice as many steps it is half as large."""
    run, stage, _ = trained(context)
    val = stage.data["val"]

    def measured() -> float:
        return run.measure(stage, View(val, pick(val, 32, context.cfg.run.seed)))["sampler_difference"]

    difference, sampling, finer = measured(), context.cfg.sampling, ""  # type: ignore[attr-defined]
    ok = difference <= EARLY
    if not ok and (name := own_weights.drawing_sampler(stage)):
        raise Skip(f"{name} draws noise at every step: from the same noise it leads to other pictures")
    if not ok and (steps := getattr(sampling, "num_inference_steps", 0)) >= ENOUGH:
        with mock.patch.object(sampling, "num_inference_steps", 2 * steps):
            again = measured()
        finer, ok = f", {again:.3f} with {2 * steps} sampling steps", again <= EARLY and again < HALVED * difference
    return Finding(
        ok, f"rms difference {difference:.3f} after {SHORT} steps{finer}, pictures in [-1, 1]",
        f"at most {EARLY:g}; with {ENOUGH} sampling steps or more, half as much with twice as many", INHERITED, evidence={"apart": difference},
    )  # fmt: skip


def classifier_gate(classifier: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Gate:
    """Return the gate on the classifier that scores samples."""

    @gate(
        "classifier",
        rows="DF1 DF3",
        title="the scoring model classifies the recipe's real images correctly",
        reads="data",
    )
    def check(context: GateContext) -> Finding:
        """Its accuracy on validation pictures must be at least halfway from chance to 1. A classifier that does not recognise real
        pictures cannot score samples."""
        run, stage = context.look()
        val = stage.data["val"]
        batch = fetch(val, pick(val, min(KNOWN, len(val)), context.cfg.run.seed), None, run.device)
        share = to_double(classifier(batch["image"])[0] == batch["label"]).mean().item()
        needed = (1 + stage.metric.floor) / 2
        return Finding(
            share >= needed, f"right on {share:.1%} of {len(batch['label'])} real pictures", f"{needed:.0%} or more",
            "the classifier expects another scale ([0, 1] instead of [-1, 1], inverted, another normalisation)\n"
            "it was trained with another class order\nit is not accurate enough itself",
            batch={k: v for k, v in batch.items() if isinstance(v, Tensor)},
        )  # fmt: skip

    return check


def of(classifier: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Gate]:
    """Return the gates of a recipe whose samples `classifier` classifies."""
    return [classifier_gate(classifier), noise_process(classifier), hidden_class, ema, weighting, two_samplers]


# ------------------------------------------------------------------------------------------------------------- monitors
@monitor("samples", rows="DF1", title="sample quality follows the loss")
def samples(history: list[dict[str, float]]) -> Finding:
    """Compares one-step denoising and samples of the first and the last evaluation."""
    first, last = history[0], history[-1]
    good, later = last["val/agreement"] >= 0.8, len(history) > 1
    return Finding(
        good,
        f"one step recovers {last['val/denoised']:.0%} of a picture's variance" + f" (first evaluation {first['val/denoised']:.0%})" * later +
        f"; {last['val/agreement']:.1%} of the samples show the requested class, Frechet distance {last['val/frechet']:.2f}"
        + f" (first evaluation {first['val/agreement']:.1%}, {first['val/frechet']:.2f})" * later,
        "the requested class in at least 80% of the samples",
        "train longer; then look at the samples: blurred (use a larger net), other classes (more guidance), saturated (less guidance)",
    )  # fmt: skip


@monitor("light", rows="DF1", title="samples have the brightness and contrast of the data")
def light(history: list[dict[str, float]]) -> Finding:
    """Compares mean and standard deviation of the samples' pixels with validation pictures, at the last evaluation."""
    brighter, richer = history[-1]["val/brighter"], history[-1]["val/richer"]
    return Finding(
        abs(brighter) <= BRIGHT and abs(richer) <= RICH,
        f"the samples' mean differs by {brighter:+.3f}, their standard deviation by {richer:+.3f}, pictures in [-1, 1]",
        f"means within {BRIGHT:g}, standard deviations within {RICH:g}",
        "the schedule does not end at pure noise, but sampling begins there: --noise.beta-schedule, --noise.num-train-timesteps\n"
        "too much guidance (saturated) or too little training (grey): --sampling.guidance-scale, --train.epochs",
    )  # fmt: skip


@monitor("samplers", rows="DF6", title="two samplers lead from the same noise to the same picture")
def samplers(history: list[dict[str, float]]) -> Finding:
    """Rms difference between pictures of the exported sampler and of a second-order sampler."""
    difference = history[-1]["val/sampler_difference"]
    return Finding(
        difference <= LATE, f"rms difference {difference:.3f}, pictures in [-1, 1]", f"at most {LATE:g}", INHERITED,
    )  # fmt: skip
