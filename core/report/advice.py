"""Recommends next steps from the curves, each with its evidence in numbers."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from trainworthy.core.report.bands import healthy, outside
from trainworthy.core.report.folder import Folder, number
from trainworthy.core.report.html import num

FALLS = 0.95  # of a held-out loss two thirds into the run: it still falls
LOSSES = ("val/nll", "val/loss", "val/perplexity")
WINDOW = 5  # evaluations in the trend
NOISY = 0.1  # noise of one evaluation as a fraction of all that was gained, from which on a flat curve is called noisy
NOTHING_FOUND = (
    "Too low or too high a rate (`trainworthy lr`), too little exploration, or rewards that are too rare to be found."
)


@dataclass
class Advice:
    """One recommendation and the numbers that support it."""

    title: str
    evidence: str
    urgent: bool = False


@dataclass
class Trend:
    """The newest evaluations of the metric, and a straight line through the last WINDOW of them. A positive gain is an
    improvement."""

    rows: list[dict[str, Any]]
    name: str
    sign: int
    values: np.ndarray
    epochs: np.ndarray
    slope: float
    end: float
    """Value of the line at the newest epoch."""
    gain: float
    """Change of the line within the window, in the metric's own direction."""
    error: float
    how: str

    @property
    def losses(self) -> np.ndarray:
        """Training loss at each evaluation; nan where it was not logged."""
        return np.array([number(r.get("train/loss")) for r in self.rows])

    @property
    def value(self) -> float:
        return float(self.values[-1])

    @property
    def best(self) -> int:
        return int(np.argmax(self.sign * self.values))

    @property
    def span(self) -> float:
        """Epochs from the first evaluation of the window to the newest."""
        return float(self.epochs[-1] - self.epochs[-WINDOW:][0])

    @property
    def scattered(self) -> bool:
        """Is the noise estimated from the curve itself, which a bend or a jump makes too large?"""
        return not self.how.startswith("binomial")

    @property
    def needed(self) -> float:
        """Gain of the line above which it is a trend. Fractions are of the same samples each time, so they differ by less than their
        standard error. Scatter is what it is: two standard errors of a line's gain."""
        n = min(WINDOW, len(self.values))
        return 2 * self.error * math.sqrt(12 * (n - 1) / (n * (n + 1))) if self.scattered else self.error

    @property
    def levelled(self) -> bool:
        """Has a curve that rose within the window stopped rising, so that the line through it misleads?"""
        if len(self.values) < WINDOW:
            return False
        v = self.sign * self.values[-WINDOW:]
        expected = 1.5 / (WINDOW - 1) * self.sign * self.gain
        bends = np.abs(v[:-2] - 2 * v[1:-1] + v[2:]) / math.sqrt(6)  # noise that a straight slope does not add to
        late = (v[-1] + v[-2]) / 2 - v[-3]
        return expected > 2 * float(np.median(bends)) and late < 0.25 * expected

    def words(self) -> str:
        """Describe the newest evaluation, the one before, the line and the noise."""
        last, n = self.values[-1] - self.values[-2], min(WINDOW, len(self.values))
        step = f"{num(last, '+')} against" if last else "the same as in"
        return (
            f"Epoch {self.epochs[-1]:.4g}: {self.name} {num(self.value)}, {step} the evaluation before. The straight line through "
            f"the last {n} evaluations moves {num(self.gain, '+')} in {self.span:.3g} epochs; noise is ±{num(self.error)} ({self.how})."
        )


def trend(rows: list[dict[str, Any]], summary: dict[str, Any], n_val: int) -> Trend:
    """Fit the line through the last evaluations, and estimate the standard error of one evaluation.

    A fraction of right answers (in [0, 1], higher is better) has the binomial error. Any other metric gets the scatter
    of its last evaluations around their line, the only estimate without more seeds.
    """
    name, higher = summary["metric"], summary.get("higher_is_better", True)
    values, epochs = np.array([[number(r[f"val/{name}"]), _epoch(r)] for r in rows]).T
    v, e = values[-WINDOW:], epochs[-WINDOW:] - epochs[-WINDOW:][0]
    slope, start = (float(c) for c in np.polyfit(e, v, 1))
    ends = [summary[k] for k in ("floor", "ceiling") if summary.get(k) is not None]
    if n_val and higher and all(0 <= x <= 1 for x in [*values, *ends]):
        p = (v[-1] * n_val + 1) / (n_val + 2)  # Laplace's rule: 100% right on n samples still has an error
        error, how = math.sqrt(p * (1 - p) / n_val), f"binomial, {n_val:,} validation samples"
    else:
        error, how = math.sqrt(float(((v - start - slope * e) ** 2).sum()) / (len(v) - 2)), "scatter around the line"
    end = start + slope * float(e[-1])
    rounding = 1e-9 * float(np.abs(values).max())  # equal evaluations have no noise and no trend
    if abs(end - start) < rounding:
        slope, end = 0.0, start
    error = error if error > rounding else 0.0
    return Trend(rows, name, 1 if higher else -1, values, epochs, slope, end, end - start, error, how)


def advise(
    rows: list[dict], summary: dict[str, Any], settings: dict[str, Any], n_val: int, *, own_samples: bool = False
) -> list[Advice]:
    """Return recommendations, most urgent first. A pure function of epoch rows, summary.json (or what is known of it)
    and settings. `own_samples`: it trains on what it makes itself (RL), so its training loss says little."""
    key = f"val/{summary.get('metric')}"
    evaluated = [r for r in rows if key in r]
    rows = [r for r in evaluated if math.isfinite(number(r[key]))]
    ill = _not_finite(evaluated, rows, key) if evaluated and evaluated[-1] not in rows else []
    if len(rows) < 3:
        found = f"{len(rows)} finite evaluation{'s' * (len(rows) != 1)} of the metric; a trend needs 3."
        warning = summary.get("warning", "")
        return [*ill, _no_better(warning, found, own_samples) if warning else Advice("Too early to say", found)]
    t = trend(rows, summary, n_val)
    found = [
        _broken(t, summary, settings, own_samples) or _next(t, summary, settings, own_samples),
        _against_baselines(t, summary),
        _which_weights(t),
    ]
    if found[1].title.startswith("Do not") and not found[0].urgent:
        found.insert(0, found.pop(1))
    return [*ill, *found]


def _no_better(warning: str, found: str, own_samples: bool) -> Advice:
    """Advice if the run ended no better than chance or a baseline, with too few evaluations for a trend."""
    text = f"{warning}. {NOTHING_FOUND if own_samples else 'Too few steps (--train.epochs), or too low or too high a rate (`trainworthy lr`).'}"
    return Advice(
        "It has learnt nothing that validation shows", f"{text} {found} --train.eval-every sets how often.", urgent=True
    )


def _not_finite(evaluated: list[dict], rows: list[dict], key: str) -> list[Advice]:
    """Advice if the newest evaluations are NaN or infinite."""
    last = "no evaluation is finite"
    if rows:
        last = f"the last finite value: {num(number(rows[-1][key]))} at epoch {_epoch(rows[-1]):.4g}"
    text = f"Epoch {_epoch(evaluated[-1]):.4g}: {key.removeprefix('val/')} is {evaluated[-1][key]}, not a number ({last}). "
    text += "Weights or outputs have overflowed: go back to the best weights, lower the rate (--optim.lr) or clip (--optim.clip)."
    return [Advice("Stop: the metric is no longer a number", text, urgent=True)]


def _fallen_loss(t: Trend) -> tuple[str, bool]:
    """State by how much a loss on held-out data fell, if by a tenth or more (else empty), and whether it fell in the last third, too."""
    for key in LOSSES:
        seen = [number(r[key]) for r in t.rows if key in r]
        if len(seen) == len(t.rows) and seen[-1] < 0.9 * seen[0]:
            falls = seen[-1] < FALLS * seen[-1 - max(1, len(seen) // 3)]
            name = key.removeprefix("val/")
            return f"The {name} on held-out data fell from {num(seen[0])} to {num(seen[-1])}.", falls
    return "", False


def _broken(t: Trend, summary: dict[str, Any], settings: dict[str, Any], own_samples: bool) -> Advice | None:
    """Advice if most progress is lost, or the metric shows none."""
    floor, loss = summary.get("floor"), t.losses
    start = float(t.values[0]) if floor is None else float(floor)
    top, now = float(t.values[t.best]), float(np.median(t.values[-2:]))
    learnt, lost = t.sign * (top - start), t.sign * (top - now)
    fell = loss[-1] <= loss[t.best] and not own_samples
    if learnt > 4 * t.error and lost > max(0.5 * learnt, 4 * t.error) and not fell:
        text = f"{t.words()} Since its best, {num(top)} at epoch {t.epochs[t.best]:.4g}, {lost / learnt:.0%} of it is "
        text += f"lost, and the training loss went from {num(float(loss[t.best]))} to {num(float(loss[-1]))}. Start again from the "
        text += "best weights at a lower rate (--optim.lr)."
        return Advice("It collapsed: go back to the best weights", text, urgent=True)
    if floor is None or len(t.values) < 3 or learnt > 3 * t.error:
        return None
    if t.scattered and all(t.sign * (t.values[-WINDOW:] - start) > 0):  # noisy, but always better than chance
        return None
    text = f"{t.words()} No evaluation is better than chance ({num(start)}) by three standard errors"
    if own_samples:
        text += f". {NOTHING_FOUND}"
        return Advice("It has learnt nothing that validation shows", text, urgent=True)
    if not loss[-1] < loss[0]:
        text += f", and the training loss went from {num(float(loss[0]))} to {num(float(loss[-1]))}. Lower the rate (--optim.lr): "
        text += "`trainworthy lr` shows which ones are usable."
        return Advice("It diverged: lower the rate", text, urgent=True)
    held, falls = _fallen_loss(t)  # few samples, or a strict metric: another measure of the same evaluations has learnt
    if held and not falls:
        return None
    if held:
        epochs = 2 * planned_epochs(t.rows[-1], settings.get("train", {}))
        more = f"Train longer, for example --train.epochs {epochs:g}."
        return Advice("Train longer: the metric does not show yet what the loss does", f"{text}. {held} {more}")
    text += f", while the training loss fell from {num(float(loss[0]))} to {num(float(loss[-1]))}. If that is little, the rate "
    text += "is too low, or so high that the model collapsed (`trainworthy lr`); if it is much, what is evaluated is not what is "
    text += "trained on (`trainworthy check`)."
    return Advice("Validation shows no learning", text, urgent=True)


def _epoch(row: dict[str, Any]) -> float:
    """Return the epoch of an evaluation; its step if it has none (rows of another tool)."""
    return number(row.get("epoch", row["step"]))


def planned_epochs(row: dict[str, Any], train: dict[str, Any]) -> float:
    """Return the epochs that a run was to make, from its newest evaluation and its settings: `--max-steps` may cut them."""
    epoch, step = _epoch(row), row.get("step")
    planned = float(train.get("epochs", epoch))
    return min(planned, epoch * train["max_steps"] / step) if train.get("max_steps") and step else planned


def _next(t: Trend, summary: dict[str, Any], settings: dict[str, Any], own_samples: bool) -> Advice:
    """Advice to continue, to stop, or to change the schedule."""
    epoch, seen, improved = float(t.epochs[-1]), t.words(), t.sign * t.gain
    planned = planned_epochs(t.rows[-1], settings.get("train", {}))
    kind = settings.get("optim", {}).get("schedule", "constant")
    ended, decays, over = epoch >= 0.99 * planned, kind in ("cosine", "linear", "wsd"), ""
    if ended and decays:
        over = f" The {kind} schedule has ended: more epochs need a longer schedule, not a longer run."
    longer = f" For example a new run with --train.epochs {2 * planned:g}." if over else ""
    then, now = float(t.losses[t.best]), float(t.losses[-WINDOW:].mean())
    lost = t.sign * (t.values[t.best] - t.values[-WINDOW:].mean())
    if (ceiling := summary.get("ceiling")) is not None and all(v == ceiling for v in t.values[-2:]):
        return Advice("Stop: the metric is at its ceiling", f"{seen} More epochs cannot improve it.")
    worse = improved < -t.needed or (lost > 2 * t.error and improved <= t.needed)
    if worse and not over and (held := _held_out_loss(t)):
        text = f"{seen} That is less than its best, but the loss on held-out data still falls ({held})."
        return Advice("Continue: the held-out loss still falls", text)
    overfits = now < then and t.best < len(t.rows) - 1 and not own_samples and not _held_out_loss(t)
    if worse and overfits:
        text = f"{seen} Since its best, epoch {t.epochs[t.best]:.4g}, the training loss fell from {num(then)} to {num(now)} while "
        text += f"{t.name} went from {num(float(t.values[t.best]))} to {num(t.value)}. Use the best weights (--run.export best), "
        text += "or fine-tune from them with more data or stronger regularisation."
        return Advice("Stop: it is overfitting", text)
    worst = float((t.sign * t.values).min()) * t.sign
    gained = abs(float(t.values[t.best]) - float(summary["floor"] if summary.get("floor") is not None else worst))
    if t.scattered and len(t.values) > 3 and t.error > NOISY * gained and improved <= t.needed:
        share = f"{t.error / gained:.0%} of" if gained else "more than"
        text = f"{seen} The noise is {share} all that was gained: no trend can be seen in it. More held-out samples (episodes, "
        text += "generated samples) per evaluation, or --seeds 5."
        return Advice("Unclear: the evaluations are too noisy for a trend", text)
    if worse and (held := _held_out_loss(t)):
        text = f"{seen} The loss on held-out data still falls ({held}).{over}{longer}"
        return Advice("Change the schedule: it has not finished learning", text)
    if worse:
        why = f" The training loss does not fall ({num(then)} at the best evaluation, {num(now)} now)."
        return Advice("Change the schedule: lower the rate", f"{seen}{'' if own_samples else why}{over}")
    if improved > t.needed and not t.levelled:
        ahead = t.span if ended else min(t.span, planned - epoch)
        text = f"{seen} If that line went on, it would reach {num(landing(t, summary, ahead))} after {ahead:.3g} more epochs "
        text += f"(a direction, not a forecast: curves bend).{over}{longer}"
        title = "Change the schedule" if over else "Continue"
        return Advice(f"{title}: it is still improving", text)
    rates = [max((number(v) for k, v in r.items() if k == "lr" or k.startswith("lr/")), default=0.0) for r in t.rows]
    share = rates[-1] / max(rates) if max(rates) > 0 else 0.0
    if not ended and decays and share > 0.2:
        text = f"{seen} The rate is at {share:.0%} of its highest, and a falling rate often brings the last gain."
        return Advice("Continue: flat, but the rate is still high", text)
    why = "It rose before, but the last evaluations are level." if t.levelled else "That is within noise."
    return Advice("Stop: the curve is flat", f"{seen} {why}{over}")


def _held_out_loss(t: Trend) -> str:
    """The loss on held-out data, if it is logged next to the metric and has fallen since the metric's best; else ""."""
    tag = next((k for k in ("val/loss", "val/nll") if k != f"val/{t.name}" and all(k in r for r in t.rows)), None)
    if tag is None:
        return ""
    loss = np.array([number(r[tag]) for r in t.rows])
    then, now = float(loss[t.best]), float(np.mean(loss[-2:]))
    falls = now < then and loss[-1] <= loss[-WINDOW:].min() * 1.01
    return f"{num(then)} at its best evaluation, {num(now)} now" if falls else ""


def landing(t: Trend, summary: dict[str, Any], ahead: float) -> float:
    """Extrapolate the line by `ahead` epochs, at most as far as it looks back, within the metric's range."""
    low, high = (summary.get(k) for k in (("floor", "ceiling") if t.sign > 0 else ("ceiling", "floor")))
    if low is None and high is None and t.how.startswith("binomial"):
        low, high = 0.0, 1.0
    # Chance is no bound: some runs are worse
    low = -math.inf if low is None else min(low, float(t.values.min()))
    high = math.inf if high is None else max(high, float(t.values.max()))
    return min(max(t.end + t.slope * min(ahead, t.span), low), high)


def _against_baselines(t: Trend, summary: dict[str, Any]) -> Advice:
    """Advice if the model is not clearly better than a simple baseline."""
    bounds = summary.get("bounds", ())
    known = {k: float(m[t.name]) for k, m in summary.get("baselines", {}).items() if t.name in m and k not in bounds}
    if not known and summary.get("unfinished"):
        text = f"{t.name} is {num(t.value)}; baselines are measured after training."
        return Advice("Baselines come at the end", text)
    if not known:
        chance = "" if summary.get("floor") is None else f" Chance is {num(float(summary['floor']))}."
        text = (
            f"{t.name} is {num(t.value)}.{chance} A simple model on the same data would say how much of that was hard."
        )
        return Advice("No baseline to compare with", text)
    best = max(known, key=lambda k: t.sign * known[k])
    lead = t.sign * (t.value - known[best])
    text = f"{t.name} {num(t.value)} against {num(known[best])} of the best baseline ({best}): "
    if lead <= 2 * t.error:
        text += "no better." if lead <= 0 else f"{num(lead, '+')}, less than two standard errors ({num(2 * t.error)})."
        return Advice("Do not use it yet: not clearly better than a baseline", text)
    errors = f", {lead / t.error:,.0f} standard errors" if t.error else ""
    return Advice("It beats every baseline", f"{text}{num(lead, '+')}{errors}.")


def against_healthy(f: Folder) -> Advice | None:
    """Advice if this run is worse than its recipe's healthy runs, with the step since when. Urgent if the newest metric
    is."""
    known = healthy(f)
    worse = [d for d in known.departures(f) if d.worse] if known else []
    metric_left = any(d.lasts and d.tag == f"val/{f.summary['metric']}" for d in worse)
    behind = "" if metric_left else outside(f)
    if not worse and not behind:
        return None
    text = behind[:1].upper() + behind[1:]
    if worse:
        found = "; ".join(d.words for d in worse)
        text += " " * bool(text) + found[0].upper() + found[1:] + f". {known.seeds} healthy runs of {known.date}."
    if not behind:
        same = " All settings are those of these runs: look at what changed in the recipe, the data or the libraries."
        text += known.otherwise or same
    return Advice("It left the band of healthy runs", text, urgent=metric_left or bool(behind))


def _which_weights(t: Trend) -> Advice:
    """Advise on final or best weights. The best of many noisy evaluations is biased upwards, so it must lead by more
    than the noise."""
    top, row = float(t.values[t.best]), t.rows[t.best]
    lead, error = t.sign * (top - t.value), f"two standard errors ({num(2 * t.error)})"
    text = f"Best {num(top)} at epoch {_epoch(row):.4g} (step {row['step']:,}), newest {num(t.value)}: a difference of {num(lead)}, "
    if lead > 2 * t.error:
        return Advice("Fine-tune from the best, not from the last", f"{text}more than {error}.")
    return Advice("The newest weights will do", f"{text}within {error}. The best of many evaluations is partly luck.")
