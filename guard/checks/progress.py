"""Compares the scores that a script prints with those of the same run whose weights stay as they were drawn: training must not make
the script's own score worse. A score that does not get better either is looked at once more where the whole script takes a short time:
it runs uncut, and at its end the score must be better than untrained.

The comparison decides only where the direction of a score is known by its name (`readings`). A failure is measured twice, with two seeds.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from torch import nn
from trainworthy.guard.checks.ending import cut_short
from trainworthy.guard.checks.results import ENDED, finding, skip
from trainworthy.guard.measures.scores.printed_scores import BOUNDED, OBJECTIVES, Series, comparable, series

if TYPE_CHECKING:
    from trainworthy.guard.rehearsals.rehearsal import Outcome

SHARE, PART = 0.05, 0.1  # least difference of scores from 0 to 1; of other numbers, as a part of the untrained one
DECIBELS = 0.4  # least difference of a PSNR
LOW, FEW = 0.2, 0.005  # below LOW a score has to lose half, and at least FEW
NOISE = 4.0  # deviations of the untrained score between its evaluations
FITTED = 0.5  # correlation of an evaluation's outputs with their targets
UNIT = 50.0  # ratio of targets to inputs of the same shape
STEPS = 100  # optimiser steps before a run that was cut short says anything
READINGS = 3
PERPLEXITY = re.compile(r"\b(?:ppl|perplexity)\b")
WHOLE = 90.0  # seconds that a script may take uncut
NOT_LEARNT = (*BOUNDED, "score", "fit")  # others may end where they began: noise that nothing predicts, a short game
GOOD = 0.6  # untrained weights may be good already (the distance of an anomaly, one frequent class)
LONGER = "--seconds 30 follows the script for longer"
AGAINST = (
    "the loss falls while the score gets worse: a sign is wrong in the loss or in one of its terms, or its targets, pairs or margin are "
    "reversed"
)
UPHILL = "the loss itself rises above that of untrained weights: the step goes uphill (a missing minus, maximize=True)"
APART = (
    "the loss falls, and what is learnt does not hold in the evaluation: targets that belong to other rows (shuffled, sorted or cut apart from "
    "their inputs), inputs or targets that the evaluation prepares differently, or outputs that it decodes wrongly"
)
GUESS = (
    "probabilities that are not normalised over the tokens (a softmax over another dimension), or tokens, targets or a mask that the evaluation "
    "prepares differently"
)
NOTHING = "the loss does not fall either: a gradient that does not reach the model, a rate that is far off, or targets without relation to the inputs"
BESIDE = "the loss does not follow what the score measures (a wrong target, a gradient that does not reach a part of the model)"


@dataclass
class Row:
    """A printed score, trained and untrained."""

    one: Series
    trained: list[float]
    held: list[float]

    @property
    def gains(self) -> list[float]:
        """By how much each value is better than untrained."""
        return [self.one.sign * (a - b) for a, b in zip(self.trained, self.held, strict=True)]

    @property
    def margin(self) -> float:
        """The least difference that counts."""
        kind, held = self.one.kind, abs(fmean(self.held))
        least = PART * held
        if kind in (*BOUNDED, "fit"):
            least = SHARE if kind in BOUNDED else max(SHARE, least)
        elif "snr" in self.one.name:
            least = DECIBELS
        elif kind == "score" and held < LOW:  # hits of a random order: a few samples decide
            least = max(FEW, held / 2)
        elif kind == "return" and len(self.held) < READINGS:  # how noisy it is, is unknown
            least *= 5
        return max(least, NOISE * pstdev(self.held) if self.one.kind not in OBJECTIVES else 0.0)

    @property
    def gain(self) -> float:
        """Mean gain over the last third of the values."""
        rows = self.gains
        return fmean(rows[-max(1, len(rows) // 3) :])

    @property
    def learnt(self) -> float:
        """The gain; none for an R² or a correlation that is not above 0: the mean of the targets is as good."""
        now = fmean(self.trained[-max(1, len(self.trained) // 3) :])
        return min(self.gain, 0.0) if self.one.kind == "fit" and now <= 0 else self.gain

    @property
    def worse(self) -> bool:
        """Clearly worse at the end, and better at no time."""
        return self.gain < -self.margin and max(self.gains) <= self.margin / 2

    def __str__(self) -> str:
        last = max(1, len(self.trained) // 3)
        trained, held = (fmean(x[-last:]) for x in (self.trained, self.held))
        return f"{self.one.name} {trained:.3g}, untrained {held:.3g}"


def facts(seen: Any) -> dict:
    """Return what the comparison needs of a run, beside what it printed."""
    spans = sorted((r[1], r[2]) for r in seen.trainings.values() if r[1] is not None)
    moved = 0.0
    between = {id(p): value for p, value in seen.kept}  # stopped within a step: LBFGS moves the weights to and fro
    for p, _ in seen.leaves.values():
        start = seen.snap.get(id(p), (p, None))[1]
        if start is not None:
            now = between.get(id(p), p).detach().flatten()[:256].float()
            moved = max(moved, float((now - start.float()).norm() / start.float().norm().clamp_min(1e-3)))
    n = max(1, len(seen.losses) // 8)
    return {
        "lengths": [p.got if p.was_cut else 0 for p in seen.passes],
        "cut": any(p.was_cut and p.training for p in seen.passes),
        "several": any(a[1] > b[0] for a, b in pairwise(spans)),
        "whole": cut_short(seen)[1] / max(1, seen.steps),  # steps of the script uncut; 0: unknown
        "tokens": max(
            (m.num_embeddings for root in seen.roots.values() for m in root.modules() if isinstance(m, nn.Embedding)),
            default=0,
        ),
        "from_file": seen.from_file,
        "moved": moved if seen.holding else 0.0,
        "losses": [math.fsum(seen.losses[-n:]) / n, pstdev(seen.losses[-n:])] if seen.losses else [],
    }


def check(
    ended: "Outcome",
    rehearse: "Callable[..., list[Outcome]]",
    limit: float,
    facts: dict[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict:
    """Return the verdict on a script that was followed to its end. `rehearse`: runs plans side by side, each given by its name and its
    other fields; `limit`: seconds that the script was followed; `facts`: those of the watched run; `say`: prints what takes long."""
    why = unsuitable(ended)
    if why:
        return skip("progress", why)
    if measured := above_uniform(ended):
        return finding("progress", measured, GUESS)
    if measured := improved(ended):
        return finding("progress", measured)
    lengths = ended.record["progress"]["lengths"]
    (held,) = rehearse(("held", {"lengths": lengths, "limit": 1.5 * limit}))
    found = compare(ended, held)
    if not isinstance(found, list):
        return not_learnt(ended, held, rehearse, say) or found
    more = {"lengths": [2 * n for n in lengths], "limit": 3 * limit, "reseed": 1}
    again = compare(*rehearse(("trained", more), ("held", more)))
    if not isinstance(again, list) or not {r.one.name for r in found} & {r.one.name for r in again}:
        return skip("progress", f"{'; '.join(map(str, found))}: not so at another seed. {LONGER}")
    measured = f"training makes the script's own score worse: {'; '.join(map(str, found))}; at another seed {'; '.join(map(str, again))}"
    return finding("progress", measured, _misread(facts or {}) or cause(ended, held))


def not_learnt(
    ended: "Outcome", held: "Outcome", rehearse: "Callable[..., list[Outcome]]", say: Callable[[str], None]
) -> dict | None:
    """Run a short script uncut, and once more at another seed. Return a finding if no score is better than untrained at its end."""
    record = ended.record
    factor = record.get("progress", {}).get("whole", 0.0)
    seconds = record.get("lasted", 0.0) * factor
    if record["why"] != ENDED or not factor or seconds > WHOLE or not level(ended, held):
        return None
    rows: list[list[Row]] = []
    for seed in range(2):
        more = {"lengths": [0] * 2 * len(record["progress"]["lengths"]), "limit": 30 + 2 * seconds, "reseed": seed}
        if seed or factor > 1:
            say(
                f"  no score has changed clearly: the whole script is run with and without training, seed {seed + 1} of 2"
            )
            ended, held = rehearse(("trained", more), ("held", more))
        rows.append(level(ended, held, uncut=True))
        if not rows[-1]:
            return None
    kept = {r.one.name for r in rows[0]} & {r.one.name for r in rows[1]}
    if not kept or ended.record["progress"]["several"]:
        return None
    measured = [f"{r}, at another seed {s}" for r, s in zip(*rows, strict=False) if r.one.name in kept]
    return finding(
        "progress",
        f"the whole script was run, and at its end its own score is no better than with untrained weights: {'; '.join(measured[:3])}",
        APART if loss_changed(ended, held) < 0 else NOTHING,
    )


def level(trained: "Outcome", held: "Outcome", *, uncut: bool = False) -> list[Row]:
    """Return the scores of two runs that are no better than untrained; none if one is, or if they say nothing."""
    for one in (trained, held):
        if not one.record or one.record["why"] != ENDED or one.record.get("exit") or "progress" not in one.record:
            return []
    now = trained.record["progress"]
    if held.record["progress"]["moved"] > 1e-3 or now["from_file"] or (uncut and now["cut"]):
        return []
    if uncut and max(trained.record["steps"], trained.record["backwards"]) < STEPS:
        return []
    rows = [Row(*x) for x in comparable(scored(series(trained.output)), scored(series(held.output)))]
    rows = [r for r in rows if r.one.kind in NOT_LEARNT]
    if any(r.one.kind in BOUNDED and fmean(r.held) > GOOD for r in rows):
        return []
    part = {True: 1.0, False: 0.5}  # a net that was drawn answers one class, whose share differs from seed to seed
    return [] if any(r.learnt > max(r.margin * part[uncut and r.one.kind in BOUNDED], 1e-12) for r in rows) else rows


def unsuitable(ended: "Outcome") -> str:
    """Return why the scores of a run say nothing; empty if they may."""
    record = ended.record
    if ended.late and not record:
        return f"the script did not come back within its time (one long step, or a library at work). {LONGER}"
    if not record or record.get("error") or record["why"] == "it raised" or "progress" not in record:
        return "the script could not be followed"
    if not scored(series(ended.output)):
        when = (
            "the script prints" if record["why"] == ENDED else f"until its time was over ({LONGER}) the script printed"
        )
        return f"{when} no score whose name says which way is better (accuracy, AUC, RMSE, return, val loss ...)"
    if record["progress"]["from_file"]:
        return "the weights were loaded: a short training may make them worse for a while"
    return ""


def above_uniform(ended: "Outcome") -> str:
    """Return which perplexity a whole training ends at that is above that of an even guess; empty if none is."""
    record = ended.record
    tokens = record["progress"]["tokens"]
    if record["why"] != ENDED or record["progress"]["cut"] or record["steps"] < STEPS or not tokens:
        return ""
    for one in series(ended.output).values():
        if PERPLEXITY.search(one.name) and min(one.values) > 2 * tokens:
            return f"{one.name} {one.values[-1]:.3g} after the whole training; a uniform guess among all {tokens:,} tokens has {tokens:,}"
    return ""


def scored(found: dict[str, Series]) -> dict[str, Series]:
    """Return the scores; the losses of held-out data where there are none."""
    scores = {k: s for k, s in found.items() if s.kind not in OBJECTIVES}
    return scores or {k: s for k, s in found.items() if s.held_out}


def improved(ended: "Outcome") -> str:
    """Return what got better from its first value to its last ones; empty if nothing did."""
    for one in scored(series(ended.output)).values():
        row = Row(one, one.shares, one.shares[:1] * len(one.values))
        if len(one.values) >= READINGS and all(map(math.isfinite, one.values)) and row.gain > row.margin:
            last = fmean(row.trained[-max(1, len(row.trained) // 3) :])
            return f"{one.name} {row.trained[0]:.3g} -> {last:.3g}, printed {len(one.values)} times"
    return ""


def compare(trained: "Outcome", held: "Outcome") -> list[Row] | dict:
    """Return the scores that got worse, if no other one got better; else the verdict."""
    for one in (trained, held):
        if not one.record or one.record["why"] == "it raised" or "progress" not in one.record:
            return skip("progress", "with weights held at their initial values the script could not be followed")
    if held.record["progress"]["moved"] > 1e-3:
        return skip("progress", "the weights move without an optimiser, and could not be held at their initial values")
    rows = [Row(*x) for x in comparable(scored(series(trained.output)), scored(series(held.output)))]
    better = [r for r in rows if r.learnt > max(r.margin / 2, 1e-12)]
    if better:
        return finding("progress", f"{better[0]} (the same run without steps)")
    worse = [r for r in rows if r.worse and decides(r, trained.record, held.record)]
    if worse:
        return worse
    if not rows:
        return skip("progress", nothing(scored(series(trained.output)), scored(series(held.output))))
    return skip("progress", f"{'; '.join(map(str, rows[:3]))}: too early or too few values to say. {LONGER}")


def nothing(ours: dict[str, Series], others: dict[str, Series]) -> str:
    """Return why no score of two runs could be compared."""
    both = [ours[k] for k in ours if k in others]
    if not both and ours:
        return (
            f"the run without steps had not printed {next(iter(ours.values())).name} when its time was over. {LONGER}"
        )
    once = [s for s in both if len(s.values) == 1]
    if once and len(once) == len(both):
        return f"{once[0].name} was printed once before the time was over, and does not differ from untrained. {LONGER}"
    return "no printed score depends on the weights, or it is not finite"


def decides(row: Row, trained: dict, held: dict) -> bool:
    """Return whether a worse score of this kind says that something is wrong. At the script's own end, trained in full, all do. Earlier
    some fall in healthy runs, too: overlaps while a net answers "background", accuracy above that of the most frequent class, returns
    of a policy that explores, samples of a generator."""
    kind, now = row.one.kind, fmean(row.trained[-max(1, len(row.trained) // 3) :])
    whole = all(r["why"] == ENDED and not r.get("exit") for r in (trained, held)) and not trained["progress"]["cut"]
    if kind == "accuracy" and now > 0.5 * fmean(row.held):
        return False
    if kind == "ranking" and now > 0.45:
        return False
    if kind in OBJECTIVES and (len(row.trained) < READINGS or trained["progress"]["several"]):
        return False
    early = kind in ("overlap", "return") or trained["progress"]["several"]
    early = early or (kind == "accuracy" and fmean(row.held) > 0.6)
    steps = max(trained["steps"], trained["backwards"])  # no optimiser: weights that are moved by hand
    return whole or (not early and steps >= STEPS)


def _misread(facts: dict[str, Any]) -> str:
    """Return the cause if targets have another unit than the inputs that they are shaped like, or if outputs and targets of the watched run's
    last evaluation fit: then the score is wrong, not the model."""
    unit = facts.get("unit", 1.0)
    if unit > UNIT or 0 < unit < 1 / UNIT:
        return (f"the targets of training are {unit:.3g} times as large as the inputs, which have their shape: another unit (0 to 255 for 0 to 1), "
                "in which the score does not expect the outputs")  # fmt: skip
    fitted = facts.get("eval_correlation") or []
    if not fitted or fitted[-1][0] < FITTED:
        return ""
    return (f"the model's outputs in the evaluation fit their targets (correlation {fitted[-1][0]:.2f}): the score gets them in another order "
            "(a loader that shuffles, labels in their own order), or upside down")  # fmt: skip


def cause(trained: "Outcome", held: "Outcome") -> str:
    """Return what the losses of both runs say about the cause."""
    changed = loss_changed(trained, held)
    if trained.record["progress"]["several"] or math.isnan(changed):
        return f"{AGAINST}\n{UPHILL}"
    return AGAINST if changed < 0 else UPHILL if changed else BESIDE


def loss_changed(trained: "Outcome", held: "Outcome") -> float:
    """Return -1 if the loss ends clearly below that of untrained weights, 1 if above, 0 if neither, NaN if that is unknown."""
    ours, others = (one.record["progress"]["losses"] for one in (trained, held))
    if not ours or not others or not math.isfinite(ours[0] - others[0]):
        return math.nan
    least, change = max(PART * abs(others[0]), 2 * others[1] / 3), ours[0] - others[0]
    return math.copysign(1.0, change) if abs(change) > least else 0.0
