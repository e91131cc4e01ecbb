"""What is wrong with a trial's curves besides its first advice: a rising loss, noisy steps, a rate that is too high late."""

import numpy as np
from trainworthy.core.report.advice import WINDOW, trend
from trainworthy.core.report.folder import Folder, number

BLOCKS = 10
"""The run's steps are averaged in so many blocks of equal length."""
RISEN = 0.1
"""The training loss rises if it ends this fraction of its fall above its lowest block, and more than three standard errors."""
NOISY = 0.25
"""Steps are noisy if the deviation from step to step in the last block is this fraction of the loss's whole fall."""
STILL_HIGH = 0.5
"""A rate is high late if the last step's is this fraction of the peak."""
JUMPS = 3.0
"""Evaluations jump if they scatter this many times as much as their number of samples explains."""


def faults(f: Folder) -> list[str]:
    """Return what is wrong, in words; empty for a curve that only needs the report's advice. Loops that make their own samples (RL)
    have a training loss that says little, so only their evaluations are read."""
    found = []
    if not f.own_samples:
        found += [w for w in (_rising(f), _noisy_steps(f)) if w]
    jumps = _jumping(f)
    found += [jumps] if jumps else []
    share = _rate_at_the_end(f)
    if found and share > STILL_HIGH:
        found.append(f"the rate is too high late: still {share:.0%} of its peak at the last step "
                     "(a schedule that decays, or a lower rate)")  # fmt: skip
    return found


def _losses(f: Folder) -> list[np.ndarray]:
    """Training losses in blocks of steps; of a run with few logged steps, one block for each evaluation."""
    steps = np.array([v for r in f.steps if np.isfinite(v := number(r.get("step/loss")))])
    if len(steps) >= 5 * BLOCKS:
        return np.array_split(steps, BLOCKS)
    return [np.array([v]) for r in f.rows if np.isfinite(v := number(r.get("train/loss")))]


def _rising(f: Folder) -> str:
    blocks = _losses(f)
    if len(blocks) < 4:
        return ""
    means = np.array([b.mean() for b in blocks])
    within = [b.std(ddof=1) / np.sqrt(len(b)) for b in blocks if len(b) > 1]
    error = float(np.median(within)) if within else float(np.median(np.abs(np.diff(means)))) / np.sqrt(2)
    low, end = float(means.min()), float(means[-1])
    if end - low <= max(3 * error * np.sqrt(2), RISEN * float(means[0] - low)):
        return ""
    return f"the training loss rises: {low:.4g} at its lowest, {end:.4g} at the end"


def _noisy_steps(f: Folder) -> str:
    blocks = _losses(f)
    if len(blocks) < BLOCKS or len(blocks[-1]) < 5:
        return ""
    fall = float(blocks[0].mean() - min(b.mean() for b in blocks))
    noise = float(np.std(np.diff(blocks[-1]), ddof=1) / np.sqrt(2))
    if fall <= 0 or noise < NOISY * fall:
        return ""
    return (
        f"noisy steps: the loss still differs by ±{noise:.2g} from step to step, {noise / fall:.0%} of all that it fell"
    )


def _jumping(f: Folder) -> str:
    metric = f.summary.get("metric")
    rows = [r for r in f.rows if np.isfinite(number(r.get(f"val/{metric}")))]
    if len(rows) < WINDOW + 1:
        return ""
    t = trend(rows, f.summary, f.n_val)
    if t.scattered or not t.error:  # the noise of one evaluation is not known apart from the scatter
        return ""
    v, e = t.values[-WINDOW:], t.epochs[-WINDOW:]
    left = v - np.polyval(np.polyfit(e, v, 1), e)
    scatter = float(np.sqrt((left**2).sum() / (len(v) - 2)))
    if scatter < JUMPS * t.error:
        return ""
    return f"evaluations jump by ±{scatter:.2g}, {scatter / t.error:.0f} times what {f.n_val:,} samples explain"


def _rate_at_the_end(f: Folder) -> float:
    for rows in (f.steps, f.rows):
        logged = [[number(v) for k, v in r.items() if k.removeprefix("step/").split("/")[0] == "lr"] for r in rows]
        rates = [max(values, default=0.0) for values in logged]
        if rates and max(rates) > 0:
            return rates[-1] / max(rates)
    return 0.0
