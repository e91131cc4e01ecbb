"""Gates on learning rates and weights: the schedule that optimisers really use, each term's part of the gradient, the
range test."""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from trainworthy.core.base import config, seeds
from trainworthy.core.base.processes import agreed
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data import loader
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes import own_rates
from trainworthy.core.gates.gate import GateContext, fetch, own_size, pick, split_evenly, total_loss, train_set
from trainworthy.core.gates.recorder import rehearsed, training_samples
from trainworthy.core.loop import optim
from trainworthy.core.loop.lr_finder import Band, LRFinder
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.loop.update import denominator, training_modes
from trainworthy.core.recipe.stage import Stage

UNITS, FEW_UNITS = 20, 12  # iterations of the rehearsal (with expensive samples): enough for warmup, peak and end
CLIP = 1e-4  # maximum norm: low enough to reveal every gradient that is not clipped
SMALL = 1e-3  # fraction of the gradient below which a term has no effect
BELOW = 50.0  # a peak is too low if it is this many times below the first clear fall, or
FALLS = 3.0  # if the whole run's sum of rates is less than this many times the test's up to that fall
CLEAR = 3.0  # factor from either limit of the first batch beyond which a second batch would hardly change the verdict
ABOVE = 2.0  # a peak is too high above this many times the rate at which the test diverged; a warmup tolerates a little more
STEPS, TESTS, DEEP_STEPS = 40, 2, 200
BATCH = (8, 64)  # smallest and largest batch of the range test; between them, the run's own


@dataclass
class Seen:
    """The learning rates of one rehearsal."""

    peaks: dict[str, list[float]]
    """Rate of every group as the recipe built it."""
    units: int
    steps: list[tuple[int, str, list[float]]] = field(default_factory=list)
    """(iteration, optimiser, rate of every group) of each optimiser step of the stage."""
    longest: float = 0.0
    """Largest gradient norm that an optimiser got."""
    made: bool = False
    """Whether the loop makes its own samples. An iteration may then have several updates."""
    own: str = ""
    """Reason why the rates do not follow --optim.schedule, if they do not."""
    losses: list[float] = field(default_factory=list)

    @property
    def peak(self) -> float:
        return max(max(rates) for _, _, rates in self.steps)

    @property
    def top(self) -> list[float]:
        """Highest rate of each step, relative to the peak."""
        return [max(rates) / _peak(self) for _, _, rates in self.steps]

    @property
    def mean(self) -> float:
        """Mean of each step's highest rate."""
        return sum(max(rates) for _, _, rates in self.steps) / len(self.steps)


def _seen(context: GateContext, times: int = 1) -> Seen:
    """Record the rates of all optimiser steps in twenty iterations of `train()` (`times` as many) on small batches, with the
    schedule running and the gradient clipped almost to zero."""

    def rehearse() -> Seen:
        optim = context.cfg.optim
        optim = replace(optim, clip=CLIP if math.isfinite(optim.clip) else math.inf)
        cfg = replace(context.cfg, optim=optim)
        units = times * (FEW_UNITS if context.expect.gate_batch_size else UNITS)
        size = max(1 if context.expect.gate_batch_size else 8, context.accelerator.num_processes * cfg.train.accumulate)
        run, stage = context.build(Rehearsal(steps=units, batch_size=size), cfg)
        names = {id(o): name for name, o in stage.optimizers.items()}
        seen = Seen(
            {n: [float(g.get("peak_lr", g["lr"])) for g in o.param_groups] for n, o in stage.optimizers.items()}, units
        )

        def keep(optimizer, _args, _kwargs) -> None:
            if name := names.get(id(optimizer)):
                seen.steps.append((run.step, name, [float(g["lr"]) for g in optimizer.param_groups]))
                grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
                seen.longest = max(seen.longest, float(nn.utils.get_total_norm(grads)) if grads else 0.0)

        with register_optimizer_step_pre_hook(keep):
            context.train(cfg, run, stage)
        seen.made, seen.losses = "train" not in stage.data, run.rehearsal.losses
        seen.own = stage.expect.schedule  # train() itself may declare it
        return seen

    return context.once("rates" if times == 1 else f"rates of {times} times as many steps", rehearse)


def off_schedule(context: GateContext) -> str:
    """Return how the rate of rehearsed steps differs from the schedule; empty if it does not."""
    seen = _seen(context)
    faults = _own_faults(seen) if _own(context, seen) else _faults(seen, context.cfg.optim)
    return f"the rate is not the schedule's: {faults[0]} (`schedule`)" if faults else ""


@gate(
    "schedule",
    rows="C9 C11",
    title="every optimiser steps once per iteration, at its scheduled rate, with a clipped gradient",
    reads="optimizers expect train",
    compares_ranks=True,
)
def schedule(context: GateContext) -> Finding:
    """Compare the rates of twenty rehearsed iterations with the schedule's formula, and check the formula over the full
    run."""
    stage = context.peek()
    total = Run(context.cfg, context.accelerator).total_steps(stage)
    seen = _seen(context)
    settings, own = context.cfg.optim, _own(context, seen)
    wrong = _own_faults(seen) if own else _faults(seen, settings) + _length_faults(total, settings)
    turned, why = own_rates.exchanged_betas(stage.optimizers)
    if wrong and not (own or why):
        why = own_rates.explain(seen.top, seen.units, seen.losses, total, lambda: _seen(context, 2).top)
    wrong += [turned] if turned else []
    loose = math.isfinite(settings.clip) and seen.longest > 1.05 * CLIP
    if loose:
        wrong.append(f"with clipping at {CLIP:g}, the optimiser got a gradient of norm {seen.longest:.3g}")
    warmup = round(settings.warmup * total)
    measured = f"peak {seen.peak:.3g}, {own}" if own and not wrong else (
        f"{len(seen.steps)} optimiser steps as scheduled; in the full run {warmup:,} of {total:,} {'iterations' if seen.made else 'steps'} "
        f"of warm-up to {_peak(seen):.3g}, "
        f"{settings.schedule} to {optim.schedule(total - 1, total, settings) * _peak(seen):.1e}")  # fmt: skip
    return Finding(
        not wrong, "; ".join(wrong) if wrong else measured,
        "finite rates around the configured peak, gradients clipped at --optim.clip" if own else
        "one optimiser step per iteration, each at peak x schedule(step), the gradient clipped at --optim.clip; a peak that is "
        "reached, an end near zero",
        "gradients are clipped before backward(), after the step, or the loss is clipped (no clipping on purpose: --optim.clip inf)\n" * loose
        + "a scheduler of your own steps more than once per step (once per process, per micro-batch), or once per epoch\n"
        "train() sets the rate although run.steps() sets it\nan optimiser steps twice per iteration, or never\n"
        "on purpose: give the reason in expect.schedule",
        evidence={"steps": seen.steps, "peaks": seen.peaks}, cause=why,
    )  # fmt: skip


def _own(context: GateContext, seen: Seen) -> str:
    """Return why rates beside --optim.schedule are right: declared, or a usual schedule of one optimiser that train() sets; "" if neither."""
    if seen.own:
        return f"declared: {seen.own}"
    one = len(seen.peaks) == 1 and seen.steps and _faults(seen, context.cfg.optim)
    usual = one and own_rates.fits(seen.top, seen.units, lambda: _seen(context, 2).top)
    return "a schedule of train()'s own, which falls with the length of the run" * bool(usual)


def _peak(seen: Seen) -> float:
    return max(max(rates) for rates in seen.peaks.values())


def _own_faults(seen: Seen) -> list[str]:
    """Faults that no schedule may have."""
    rates = [r for _, _, row in seen.steps for r in row]
    if not rates:
        return ["no optimiser stepped"]
    if bad := [r for r in rates if not 0 <= r < math.inf]:
        return [f"a step was made at rate {bad[0]:g}"]
    if not 0 < max(rates) <= 2 * _peak(seen):  # a long warmup may be far below the peak
        return [f"the highest rate is {max(rates):.3g}, the configured one {_peak(seen):.3g}"]
    return []


def _faults(seen: Seen, settings: config.Optim) -> list[str]:
    """Iterations without exactly one step of each optimiser, and steps at a rate other than the schedule's."""
    wrong = []
    for name, peaks in seen.peaks.items():
        rows = [(unit, rates) for unit, owner, rates in seen.steps if owner == name]
        counts = [sum(unit == u for unit, _ in rows) for u in range(seen.units)]
        odd = next((u for u, n in enumerate(counts) if n != 1 and (n < 1 or not seen.made)), None)
        if odd is not None:
            wrong.append(f"optimiser '{name}' stepped {counts[odd]} times in iteration {odd + 1} of {seen.units}")
        for unit, rates in rows:
            due = [p * optim.schedule(unit, seen.units, settings) for p in peaks]
            if len(rates) != len(due) or any(abs(r - d) > 1e-6 * max(peaks) for r, d in zip(rates, due, strict=True)):
                top = [max(r) for _, r in rows]
                after = top[top.index(max(top)) :]
                rises = " and it rises again" if any(b > a for a, b in pairwise(after)) else ""
                zero = next(
                    (f"; it is zero from step {u + 1} on" for (u, _), r in zip(rows, top, strict=True) if r == 0), ""
                )
                wrong.append(
                    f"step {unit + 1} of {seen.units} ran at {max(rates):.3g}, the schedule says {max(due):.3g}{rises}{zero}"
                )
                break
    return wrong


def _length_faults(total: int, settings: config.Optim) -> list[str]:
    """Faults of the full run that follow from the settings alone."""
    factors = [optim.schedule(round(i * (total - 1) / 1000), total, settings) for i in range(1001)]
    if max(factors) < 0.9:
        return [f"in {total:,} steps the rate never gets above {max(factors):.0%} of its peak"]
    if settings.warmup > 0.5:
        return [f"the warm-up takes {settings.warmup:.0%} of {total:,} steps"]
    return []


@gate(
    "terms",
    rows="C16",
    title="every loss term contributes to the gradient",
    reads="model loss counts expect",
    symptom=True,
)
def terms(context: GateContext) -> Finding:
    """Norm of each term's own gradient on the rehearsed model, relative to the sum of the norms. Takes the median of
    three batches that count for the term (a batch without a labelled sample has no supervised term)."""
    run, stage, _ = rehearsed(context)
    norms, values = _of_terms(context, run, stage)
    gradient, share = _shares(norms), _shares(values)
    if not any(gradient.values()):
        return Finding(
            False, f"no term has a gradient: {', '.join(gradient)}", f"every term has at least {SMALL:.1%} of the gradient",
            "the loss does not depend on the net's output: a constant reward or target, a detached input, a mask that excludes "
            "everything\nthe net has converged, and these batches teach it nothing more",
            evidence={"gradient": gradient, "loss": share},
        )  # fmt: skip
    declared = stage.expect.small_terms
    small = [t for t in gradient if gradient[t] < SMALL and t not in declared]
    measured = ", ".join(f"{t} {share[t]:.1%} of the loss and {gradient[t]:.2%} of the gradient" for t in gradient)
    top = max(gradient, key=gradient.get)
    return Finding(
        not small, f"{top} dominates {', '.join(small)}: {measured}" if small else measured,
        f"every term has at least {SMALL:.1%} of the gradient",
        "a mean over classes, pixels or positions where a sum is meant: the term has 1/N of its weight\n"
        "a sum where a mean is meant, or a weight chosen for a loss of another scale\na detach() in the term\n"
        "small on purpose: name it in expect.small_terms",
        evidence={"gradient": gradient, "loss": share}, cause=_lost(context, small) if small and context.accelerator.num_processes == 1 else "",
    )  # fmt: skip


def _of_terms(context: GateContext, run: Run, stage: Stage) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """{term: norms of its gradient in single batches} and {term: its values}."""
    data, seed, size = training_samples(context), context.cfg.run.seed, stage.expect.at_most(16)
    size = max(2, min(size, own_size(context) // 2))  # half of what training takes: each term needs the graph again
    chosen = (pick(data, n * size, seed) for n in (3, 24))
    batches = (some[i : i + size] for some in chosen for i in range(0, len(some), size))
    loss = run.used_loss or stage.loss
    weights = list(stage.parameters().values())
    norms: dict[str, list[float]] = {}
    values: dict[str, list[float]] = {}
    for indices in batches:
        batch = fetch(data, indices, seed, run.device)
        seeds.seed_global(seed, "terms")
        with run.autocast():
            found = loss(stage.model, batch)
        if len(found) == 1:
            raise Skip("the loss has one term")
        counts = stage.counts(batch)
        for name, total in found.items():
            mean = total / denominator(name, counts)
            grads = (
                torch.autograd.grad(mean, weights, retain_graph=True, allow_unused=True) if mean.requires_grad else []
            )
            norm = sum(optim.exact(g).square().sum() for g in grads if g is not None)
            norms.setdefault(name, [])
            values.setdefault(name, [])
            if counts.get(name, counts.get("*")):
                norms[name].append(float(norm) ** 0.5)
                values[name].append(abs(mean.item()))
        if min(map(len, norms.values())) >= 3:  # checked before the next batch, which is not needed then
            break
    return norms, values


def _lost(context: GateContext, small: list[str]) -> str:
    """Say that a term had a gradient before the rehearsal and lost it, if that is so."""
    run, stage = context.build(Rehearsal(steps=1))
    before = _shares(_of_terms(context, run, stage)[0])
    gone = [t for t in small if before.get(t, 0.0) > 10 * SMALL]
    if not gone:
        return ""
    return (f"the rate is too high: '{gone[0]}' had {before[gone[0]]:.1%} of the gradient before training and lost it in a few steps at "
            f"{_peak(_seen(context)):.3g}, as outputs do that saturate")  # fmt: skip


def _shares(numbers: dict[str, list[float]]) -> dict[str, float]:
    """Each name's fraction of the sum over names, from the median of its numbers."""
    middle = {k: sorted(v)[len(v) // 2] if v else 0.0 for k, v in numbers.items()}
    return {k: v / max(sum(middle.values()), 1e-30) for k, v in middle.items()}


def spread(peak: float) -> dict[str, float]:
    """First and last rate of a test: wide enough for a peak that is wrong by orders of magnitude."""
    return {"start": min(peak / 100, 1e-5), "end": max(100 * peak, 10.0)}


def sweep(run: Run, stage: Stage, *, start: float, end: float, steps: int, only: int | None = None) -> LRFinder:
    """Run a range test of the stage's only optimiser on real training batches, with the run's clipping. It leaves no
    trace.

    Each step takes a new batch of the run's size. With `only`, every step takes the batch of that number. Then forty
    steps suffice, because there is no noise between batches; with new batches, only one of seven tests of vision/classify found a usable
    rate.
    """
    (optimizer,) = stage.optimizers.values()
    data, cfg = stage.data["train"], run.cfg
    fresh = only is None
    batch_size = min(max(stage.expect.at_most(cfg.train.batch_size), BATCH[0]), BATCH[1], len(data))
    size = cfg.train.batch_size if fresh else batch_size
    stream = loader.Stream(len(data), cfg.run.seed)
    most = size if stage.expect.batch_dependence else own_size(run)
    cuts = [split_evenly(stream.keys(i * size, (i + 1) * size), most) for i in (range(steps) if fresh else [only])]
    flat = loader.batches(
        data, (keys for cut in cuts for keys in cut), seed=cfg.run.seed, settings=config.Loader(), device=run.device
    )
    batches = ({"parts": [next(flat) for _ in cut]} for cut in cuts)
    training_modes(stage)
    weights = [p for g in optimizer.param_groups for p in g["params"]]

    def clip(*_) -> None:
        nn.utils.clip_grad_norm_(weights, cfg.optim.clip)

    def loss(_model: nn.Module, batch: dict) -> torch.Tensor:
        if not fresh:
            seeds.seed_global(cfg.run.seed, "range-test")  # one dropout mask for all steps removes its noise
        return total_loss(run, stage, *batch["parts"])

    with optimizer.register_step_pre_hook(clip):
        finder = LRFinder(stage.model, optimizer, loss, run.device)
        return finder.range_test(batches if fresh else list(batches), start, end, steps)


@gate(
    "range-test",
    rows="C11",
    title="the peak learning rate is in the range where this data's loss falls",
    reads="data model loss counts optimizers expect train",
    symptom=True,
)
def range_test(context: GateContext) -> Finding:
    """Test forty rates, evenly spaced in log(rate), on one real batch and on a second one (`--deep`: also two hundred
    fresh batches). With expensive samples one batch suffices if the peak is well inside its range. Too high: well above
    the rate at which the loss is back at its start. Too low: the whole run hardly goes further than the first clear
    fall, or its peak is far below that."""
    expect = context.expect
    if expect.range_test:
        raise Skip(f"by design: {expect.range_test}")
    if 0 < expect.gate_batch_size < BATCH[0] and not context.deep:
        raise Skip("one sample takes too long for this check: run `trainworthy check --deep --only range-test`")
    if len(context.peek().optimizers) > 1:
        raise Skip("several optimisers: no single rate to test")
    train_set(context.peek())
    seen = _seen(context)
    if not seen.steps:
        raise Skip("no optimiser stepped (see wiring)")
    run, stage = context.build(Rehearsal(steps=1))
    own = seen.own  # twenty iterations may show neither its peak nor its mean
    peak, mean = (_peak(seen), _peak(seen) / 2) if own else (seen.peak, seen.mean)
    total = Run(context.cfg, context.accelerator).total_steps(stage)
    ends = spread(peak)

    def allowed(band: Band) -> tuple[float, float]:
        lowest = max(band.low / BELOW, FALLS * band.spent / (total * mean / peak))
        return lowest, ABOVE * band.high if band.blew_up else math.inf

    finders: list[LRFinder] = []
    for i in range(TESTS):
        finders.append(sweep(run, stage, **ends, steps=STEPS, only=i))
        one = finders[-1].band()
        lowest, highest = allowed(one) if one and one.blew_up else (math.inf, 0.0)
        if agreed(
            context.accelerator,
            bool(expect.gate_batch_size) and not context.deep and CLEAR * lowest <= peak <= highest / CLEAR,
        ):
            break  # one batch in five misses a rate a hundred times too high, so skip the second only if it is expensive
    bands = [(band, f) for f in finders if (band := f.band())]
    band, finder = min(bands, key=lambda b: b[0].high, default=(None, finders[0]))
    if band:  # the most tolerant limit for too low, the strictest for too high
        first = min((b for b, _ in bands), key=lambda b: b.low)
        band = Band(first.low, band.high, band.blew_up, first.spent)
    if context.deep and band:
        wide = sweep(run, stage, **ends, steps=DEEP_STEPS)
        if (fresh := wide.band()) and fresh.blew_up:
            finder, band = wide, Band(band.low, fresh.high, True, band.spent)
    suggestion = finder.suggested_lr()
    band, suggestion, verdict = agreed(context.accelerator, (band, suggestion, finder.verdict))
    if context.accelerator.is_main_process:
        finder.plot(context.folder / "plots" / "range_test.png", configured=peak)
    if band is None:
        raise Skip(f"no usable rate to compare with: {verdict}")
    lowest, highest = allowed(band)
    top = f"blows up at {band.high:.2g}" if band.blew_up else f"still falls at {band.high:.2g}"
    return Finding(
        lowest <= peak <= highest, f"peak {peak:.3g}; the loss falls from {band.low:.2g} on and {top}, suggestion {suggestion:.2g}",
        f"a peak between {lowest:.2g} and {highest:.2g}",
        ("the rate was chosen for another optimiser, batch size or data set, or for eight samples\n"
         f"try --optim.lr {suggestion:.1g} (a third of the rate of steepest descent)"),
        evidence={"rates": finder.rates, "losses": finder.losses, "smoothed": finder.smoothed, "suggestion": suggestion,
                  "low": band.low, "high": band.high, "plot": "plots/range_test.png"},
    )  # fmt: skip
