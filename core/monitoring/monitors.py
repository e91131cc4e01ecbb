"""Monitors find faults that show only during training. They are pure functions from step rows, evaluation rows and
settings to verdicts; `advice` never blocks. `live.py` watches the loss while the run trains."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from trainworthy.core.base import config
from trainworthy.core.base.errors import Interrupted, Stop
from trainworthy.core.base.files import write_whole
from trainworthy.core.base.verdict import Finding, Skip, Verdict
from trainworthy.core.monitoring.live import BLOWN, HEIGHT, SPIKE, WINDOW, Live
from trainworthy.core.monitoring.metrics import read_rows
from trainworthy.core.recipe.stage import Metric, Stage

if TYPE_CHECKING:
    from trainworthy.core.loop.run import Run

GAP = 0.1  # fraction of the range from chance to the ceiling
CHANCE = 0.03  # within this fraction of the range from chance to the ceiling: at chance level
KEPT, EVALUATIONS, SHARE = 0.1, 3, 0.1  # lost: remaining progress, evaluations, fraction of the run


# ------------------------------------------------------------------------------------------------- the metric while training
def is_at_chance(metric: Metric, value: float) -> bool:
    """Return whether `value` is at chance level, within the fraction `CHANCE` of the range."""
    margin = CHANCE * (metric.ceiling - metric.floor)
    return not metric.better(value, metric.floor + (margin if math.isfinite(margin) else 0.0))


def nothing_learnt(metric: Metric, values: list[float], live: Live | None) -> bool:
    """Return whether, after a third of the run, the metric is at chance and the loss at its first value."""
    if not live or live.learns or len(values) < 2:
        return False
    return all(is_at_chance(metric, v) for v in values if not math.isnan(v))


def lost(metric: Metric, history: list[tuple[int, float]], total: int) -> str:
    """From evaluations (step, value): describe what remains of the best one, if almost nothing has for a tenth of the
    run."""
    values = [v if math.isfinite(v) else metric.floor for _, v in history]
    if len(values) <= EVALUATIONS or not math.isfinite(metric.floor):
        return ""
    sign = 1 if metric.higher_is_better else -1
    gained = [sign * (v - metric.floor) for v in values]
    top = max(range(len(values)), key=gained.__getitem__)
    span = abs(metric.ceiling - metric.floor)
    if gained[top] <= (0.2 * span if math.isfinite(span) else 0.2 * abs(metric.floor)):
        return ""
    late = next((i for i in range(top, len(values)) if all(g < KEPT * gained[top] for g in gained[i:])), len(values))
    if len(values) - late < EVALUATIONS or history[-1][0] - history[late][0] < SHARE * total:
        return ""
    share = max(0.0, gained[-1] / gained[top])
    return (f"{metric.name} {values[-1]:.4g} since step {history[late][0]}, {values[top]:.4g} at step {history[top][0]}: "
            f"{share:.0%} of the gain over chance is left")  # fmt: skip


def warning_of_result(metric: Metric, value: float, best: float, others: dict[str, float]) -> str:
    """Return why a result needs a warning; empty if it needs none. `others`: measured baselines that ignore the
    input."""
    if math.isnan(value) or is_at_chance(metric, value):
        return f"{NO_RESULT}: {metric.name} {value:.4g}, chance {metric.floor:.4g}"
    for name, other in others.items():
        if not metric.better(value, other):
            return f"NO BETTER THAN {name.upper()}: {metric.name} {value:.4g}, {name} {other:.4g}"
    left = (value - metric.floor) / (best - metric.floor) if best != metric.floor else 1.0
    if left < 0.5:
        return f"LOST AGAIN: {metric.name} {value:.4g} at the end, {best:.4g} at its best (see --run.export best)"
    return ""


def too_few_steps(metric: Metric, value: float, steps: int, epochs: float, gates: list[dict[str, Any]]) -> str:
    """Return that a result that needs a warning comes from too few steps, if the gate `tiny-data` learnt more in more steps from
    a few hundred of the same samples; else empty."""
    longer, reached = _tiny_data(gates)
    if longer <= 1.5 * steps or not metric.better(value if reached is None else reached, value):
        return ""
    return (f"; likely too few steps: the gate tiny-data reached {reached:.4g} on held-out samples in {longer}, this run had {steps} "
            f"in {epochs:.3g} epochs: {math.ceil(epochs * longer / max(steps, 1))} epochs would be as many")  # fmt: skip


def short_run(steps: int, epochs: float, gates: list[dict[str, Any]]) -> str:
    """Return before training that the run makes fewer steps than the gate `tiny-data` needed for a few hundred of its samples; else
    empty."""
    longer, reached = _tiny_data(gates)
    if reached is None or longer <= 1.5 * steps:
        return ""
    return (f"few steps: the gate tiny-data needed {longer} to reach {reached:.4g} on held-out samples; as many are "
            f"--train.epochs {math.ceil(epochs * longer / max(steps, 1))}")  # fmt: skip


def _tiny_data(gates: list[dict[str, Any]]) -> tuple[int, float | None]:
    """Return (steps, score on held-out samples) of the gate `tiny-data`, if it passed."""
    tiny = next((g["evidence"] for g in gates if g["id"] == "tiny-data" and g["verdict"] == "pass"), {})
    return tiny.get("steps", 0), tiny.get("held_out", {}).get("own")


# ------------------------------------------------------------------------------------------------------------- verdicts
def check_rows(steps: list[dict[str, Any]], settings: dict[str, Any], *, total: int, small_terms: tuple[str, ...] = (),
          loss_may_rise: str = "", gap: "Gap | None" = None,
          no_gap: str = "the run did not finish") -> list[Verdict]:  # fmt: skip
    """Run every monitor on the rows of step_metrics.jsonl and the settings of args.json."""
    rows = [r for r in steps if math.isfinite(float(r["step/loss"]))]
    live = Live(settings["train"]["batch_size"], total)
    ends = [live.see(r["step"], r["step/loss"]) for r in rows]
    return [
        *([_skip(loss_may_rise, one) for one in (SPIKES, COLLAPSE, PLATEAU)] if loss_may_rise else
          (spikes(live), collapse(live, "collapse" in ends, "diverged" in ends), plateau(rows))),
        clipped(rows, settings["optim"], total),
        terms(rows, small_terms),
        gap.verdict() if gap else _skip(no_gap, GAPS),
    ]  # fmt: skip


NO_RESULT = "NO BETTER THAN CHANCE"
SPIKES = ("spike", "C17", "no step's loss is far above those before it")
COLLAPSE = ("collapse", "C17", "the loss does not return to its untrained level")
PLATEAU = ("plateau", "C11", "the loss also falls at the peak learning rate")
CLIPPED = ("clipped", "C9", "only some gradients are clipped")
TERMS = ("terms", "C16", "every term has a share of the loss")
GAPS = ("gap", "C19", "training and validation samples score alike")
NORMS = ("batch-norm", "V7", "batch norm gives the same result with running and with batch statistics")


def _skip(reason: str, which: tuple[str, str, str]) -> Verdict:
    return verdict(which, "skip", reason=reason)


def verdict(which: tuple[str, str, str], kind: str, measured: str = "", needed: str = "", remedy: str = "", *,
             reason: str = "", **evidence: Any) -> Verdict:  # fmt: skip
    return Verdict(*which, kind, measured, needed, remedy, 0.0, reason, evidence=evidence)


def spikes(live: Live) -> Verdict:
    """Report how often the loss spiked, at which steps, and whether it recovered."""
    if live.steps < WINDOW * live.size:
        return _skip(f"needs {WINDOW * live.size} steps", SPIKES)
    n, open_ = len(live.spikes), len(live.spikes) > len(live.back)
    where = ", ".join(map(str, live.spikes[:5])) + (", ..." if n > 5 else "")
    return verdict(
        SPIKES, "advice" if n else "pass",
        f"{n} spikes, at step {where}; {'the loss did not recover from the last' if open_ else 'the loss recovered from all'}" if n else "no spike",
        f"none above {SPIKE:g} robust standard deviations and {HEIGHT:g} times the height of the {WINDOW} blocks before it",
        "look at the batches in postmortem/; a lower --optim.lr, a longer --optim.warmup or a lower --optim.clip" if n else "",
        spikes=live.spikes, back=live.back,
    )  # fmt: skip


def collapse(live: Live, collapsed: bool, diverged: bool = False) -> Verdict:
    """Report whether the loss returned to the untrained level, or rose far above it, and stayed there."""
    if math.isnan(live.first):
        return _skip("no block of steps", COLLAPSE)
    measured = f"untrained {live.first:.3g}, best {live.best:.3g}"
    if collapsed:
        measured += f", back at the untrained level since step {live.lost_since}"
    elif diverged:
        measured += f", more than {BLOWN:g} times the untrained loss since step {live.blown_since}"
    return verdict(
        COLLAPSE, "fail" if collapsed or diverged else "pass", measured,
        f"no {live.patience} steps at the loss of the untrained model",
        "the rate is too high: start again from the best weights with a lower --optim.lr" if collapsed or diverged else "",
    )  # fmt: skip


def plateau(rows: list[dict[str, Any]]) -> Verdict:
    """Detect a peak rate that is too high: the loss falls while the rate rises, stays or rises at the peak, and falls
    again with the rate. Unless all three hold, it reports nothing."""
    loss = np.array([float(r["step/loss"]) for r in rows])
    rate = np.array([max(v for k, v in r.items() if k.split("/")[:2] == ["step", "lr"]) for r in rows])
    if len(rows) < 40:
        return _skip("fewer than 40 steps", PLATEAU)
    top = int(np.argmax(rate >= 0.98 * rate.max()))
    high = np.flatnonzero(rate[top:] >= 0.8 * rate.max()) + top
    if top < 20 or len(high) < 20:
        return _skip("fewer than 20 steps of warm-up or at the peak", PLATEAU)
    block = max(5, top // 5)
    error = float(np.std(np.diff(loss[: high[-1]]))) / math.sqrt(2 * block)  # standard error of a block's mean
    means = loss[: top // block * block].reshape(-1, block).mean(1)
    start, lowest = float(loss[:5].mean()), float(means.min())
    peak, end = float(loss[high[len(high) // 2 :]].mean()), float(loss[-block:].mean())
    fell, rose, again = start - lowest > 4 * error, peak - lowest > 4 * error, peak - end > 4 * error
    most = peak - end > start - peak  # most of the progress is made below the peak
    bad = fell and ((rose and (again or end > lowest)) or (peak > lowest - 2 * error and again and most))
    curve = f"loss {start:.3g} untrained, {lowest:.3g} in the warm-up, {peak:.3g} at the peak, {end:.3g} at the end (±{error:.2g})"
    return verdict(
        PLATEAU, "advice" if bad else "pass", ("the peak rate is too high: " * bad) + curve,
        "a loss at the peak rate below the lowest of the warm-up",
        f"--optim.lr {rate[int(means.argmin()) * block + block // 2]:.1g}, the rate at which it still fell" if bad else "",
    )  # fmt: skip


def clipped(rows: list[dict[str, Any]], settings: dict[str, Any], total: int) -> Verdict:
    """Report the fraction of steps after the warmup with a gradient norm above the limit."""
    limit = float(settings["clip"])
    if not math.isfinite(limit):
        return _skip("clipping is off", CLIPPED)
    after = [r for r in rows if r["step"] > settings["warmup"] * total]
    norms = [float(r["step/grad_norm"]) for r in after if "step/grad_norm" in r]
    if len(norms) < 20:
        return _skip("fewer than 20 steps after the warm-up", CLIPPED)
    share, high = float(np.mean(np.array(norms) > limit)), float(np.quantile(norms, 0.9))
    odd = share > 0.8 or max(norms) < 0.1 * limit  # the limit was probably set for another loss
    return verdict(
        CLIPPED, "advice" if odd else "pass",
        f"{share:.0%} of the steps clipped at {limit:g}; 90th percentile of the norm {high:.2g}",
        "at most 80%, and a limit of at most ten times the largest gradient norm",
        f"--optim.clip {high:.2g} would clip outliers only (always clipped is usual for PPO and diffusion)" if odd else "",
        share=share, p90=high,
    )  # fmt: skip


def terms(rows: list[dict[str, Any]], small: tuple[str, ...]) -> Verdict:
    """Report each term's fraction of the loss over the last tenth of the run. A term that has fallen to a tenth of its own first values is
    small because it was learnt."""
    own = {"step/loss", "step/grad_norm", "step/samples_per_sec", "step/lr"}
    last = rows[-1] if rows else {}
    names = [k for k in last if k.startswith("step/") and k.count("/") == 1 and k not in own]
    if not names:
        return _skip("one term", TERMS)
    tenth = max(1, len(rows) // 10)
    before, sizes = (
        {k.removeprefix("step/"): float(np.mean([abs(float(r[k])) for r in part if k in r] or [0.0])) for k in names}
        for part in (rows[:tenth], rows[-tenth:])
    )
    shares = {k: v / max(sum(sizes.values()), 1e-30) for k, v in sizes.items()}
    low = [k for k, v in shares.items() if v < 1e-3 and k not in small and sizes[k] > before[k] / 10]
    return verdict(
        TERMS, "advice" if low else "pass", ", ".join(f"{k} {v:.1%}" for k, v in shares.items()),
        "0.1% or more of the loss at the end",
        f"{', '.join(low)}: give it more weight, leave it out, or name it in expect.small_terms" if low else "", shares=shares,
    )  # fmt: skip


@dataclass
class Gap:
    """The metric on training samples read through the evaluation path, as many as there are validation samples (at most
    1,000)."""

    metric: Metric
    train: float
    val: float
    because: str = ""
    """The explanation, if another check has found it."""
    samples: int = 0
    """Samples of each side, for the noise of a metric in [0, 1]; 0: no noise is assumed."""

    def noise(self) -> float:
        """Return two standard errors of the difference, an upper bound for means of values in [0, 1]; 0 for other metrics."""
        both = (self.train, self.val)
        if not self.samples or self.metric.ceiling != 1 or not all(0 <= v <= 1 for v in (self.metric.floor, *both)):
            return 0.0
        return 2 * math.sqrt(sum(v * (1 - v) for v in both) / self.samples)

    def verdict(self) -> Verdict:
        """Report how far validation is behind training, as a fraction of the range from chance to the ceiling."""
        return _compare(
            GAPS, self.metric, self.val, self.train,
            f"{self.metric.name} {self.train:.4g} on training samples, {self.val:.4g} on held-out ones",
            self.because
            or "more data or augmentation, stronger regularisation, a smaller model, or the best weights (--run.export best)",
            self.noise(),
        )  # fmt: skip


@dataclass
class Norms:
    """The metric on the same training samples, with batch norm's running statistics and with batch statistics."""

    metric: Metric
    running: float
    by_batch: float

    def verdict(self) -> Verdict:
        """Report how far the evaluation is behind training's batch statistics, as a fraction of the range from chance
        to the ceiling."""
        return _compare(
            NORMS, self.metric, self.running, self.by_batch,
            f"{self.metric.name} {self.running:.4g} on training samples with running statistics, {self.by_batch:.4g} with each batch's own",
            "a higher momentum or more steps for batch norm; larger batches, SyncBatchNorm, GroupNorm, or frozen statistics",
        )  # fmt: skip


def _compare(
    which: tuple[str, str, str],
    metric: Metric,
    value: float,
    other: float,
    measured: str,
    remedy: str,
    noise: float = 0.0,
) -> Verdict:
    """Give advice if `value` is behind `other` by more than the fraction `GAP` of the range from chance to the
    ceiling, and by more than `noise`, in the metric's unit."""
    span = abs(metric.ceiling - metric.floor)
    span = span if math.isfinite(span) and span else max(abs(value - metric.floor), 1e-12)
    behind = (other - value) * (1 if metric.higher_is_better else -1) / span
    far = behind > GAP and abs(other - value) > noise
    needed = f"a difference of at most {GAP:.0%} of the range from chance to the ceiling"
    needed += f", or of {noise:.2g}, two standard errors" if noise > GAP * span else ""
    return verdict(which, "advice" if far else "pass", measured, needed, remedy if far else "", behind=behind)


@dataclass
class Monitor:
    """A domain's own check of a whole run."""

    id: str
    rows: str
    title: str
    check: Callable[[list[dict[str, float]]], Finding]
    """Rows of epoch_metrics (`epoch`, `step`, `train/...`, `val/...`), at least one -> finding; advice if it is not ok.
    The report recommends first the fallback in evidence["fallback"]. A cause in evidence["stop"] stops the run at this
    evaluation (exit 4)."""


def monitor(id: str, *, rows: str, title: str) -> Callable[[Callable[[list[dict]], Finding]], Monitor]:
    """Turn a function of the evaluations so far into a monitor."""
    return lambda check: Monitor(id, rows, title, check)


def _own(one: Monitor, history: list[dict[str, float]]) -> Verdict:
    which = (one.id, one.rows, one.title)
    if not history:
        return _skip("no evaluation yet", which)
    try:
        found = one.check(history)
    except Skip as reason:
        return _skip(str(reason), which)
    except Exception as error:  # an error in a fork's monitor must not lose the trained weights
        raised = f"raised {type(error).__name__}: {error}"
        return verdict(which, "advice", raised, "a finding", "fix the monitor; nothing else is lost")
    kind, remedy = ("pass", "") if found.ok else ("advice", found.remedy)
    return verdict(which, kind, found.measured, found.needed, remedy, **found.evidence)


def asks_to_stop(one: Monitor, history: list[dict[str, float]]) -> str:
    """Return the reason if a domain's monitor asks to stop the run: `stop` in its evidence."""
    verdict = _own(one, history)
    if verdict.verdict != "advice" or not (cause := verdict.evidence.get("stop")):
        return ""
    return (f"{verdict.measured}; the run stopped itself\n  needed:       {verdict.needed}\n  likely cause: {cause}\n"
            f"  next:         {verdict.remedy}")  # fmt: skip


def of(run: "Run", stage: Stage, gap: Gap | None = None, norms: Norms | None = None) -> list[Verdict]:
    """Run every monitor on the current files of a run."""
    own = [_own(one, run.journal.history) for one in stage.monitors] + ([norms.verdict()] if norms else [])
    for v in own:
        if v.verdict == "advice" and (fallback := v.evidence.get("fallback")):
            v.remedy = f"trainworthy resume {run.home} --fallback {fallback}\n{v.remedy}"
    no_gap = {} if "train" in stage.data else {"no_gap": "no training set: the loop makes its own samples"}
    return own + check_rows(
        read_rows(run.folder / "step_metrics.jsonl"), config.to_dict(run.cfg), total=run.total_steps(stage),
        small_terms=stage.expect.small_terms, loss_may_rise=stage.expect.loss_may_rise, gap=gap, **no_gap,
    )  # fmt: skip


def write(run: "Run", found: list[Verdict], *, show: bool = True) -> None:
    """Write monitors.json, and print a line for each monitor with advice. `show` is False where a signal ends the run: it will
    be resumed, and advice on a part of it is too early."""
    found_as_json = json.dumps({"monitors": [asdict(v) for v in found]}, indent=1, default=str)
    write_whole(run.folder / "monitors.json", found_as_json)
    for v in found:
        if show and v.verdict in ("advice", "fail"):
            lines = f"{v.measured}; {v.remedy}".replace("\n", f"\n{'':23}")  # below the first line's text
            run.console.say(f"  {v.verdict:<6} {v.id:<13} {lines}")


@contextlib.contextmanager
def kept(run: "Run", stage: Stage) -> Iterator[None]:
    """Write the monitors also if the run stops early."""
    try:
        yield
    except Stop as stop:
        if run.tracker:
            write(run, of(run, stage), show=not isinstance(stop, Interrupted))
        raise
    except Exception:
        if run.tracker:
            with contextlib.suppress(Exception):  # nothing may hide why the run ended
                write(run, of(run, stage))
        raise
