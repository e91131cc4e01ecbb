"""Monitors of control recipes for faults that show only in a whole run, from evaluations and from values logged per iteration as
`policy/...`."""

import math
from typing import TYPE_CHECKING

from trainworthy.core.base.errors import Stop
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.monitoring.monitors import Monitor, monitor

if TYPE_CHECKING:
    from trainworthy.core.loop.run import Run
    from trainworthy.core.recipe.stage import Stage

LOST = 0.5  # share of the best evaluation's gain over random actions
DECIDED = 0.05  # share of the entropy of uniform actions
EXPLAINED = 0.2  # share of the returns' variance
RUNAWAY, IN_A_ROW = 10, 3  # KL of RUNAWAY x FAR in so many evaluations: the samples no longer come from the policy
# KL in nats between the policy before and after an iteration's updates; share of its samples at the clip
FAR, CLIPPED = 0.1, 0.4
NOWHERE = 1e-6  # nats
DONE = 0.9  # share of the range from random actions to the best possible return from which monitors stay silent

# Limits of `lost`, which stops a run:
GONE = 0.9  # share of the best gain over random actions that is lost again,
CLEAR = 3.0  # if that gain was so many standard deviations of an episode's return
BEYOND = 10.0  # times FAR
STILL = 0.002  # share of the entropy of uniform actions
AGAIN = 2  # evaluations in a row

Rows = list[dict[str, float]]


def lost(history: Rows, floor: float, ceiling: float, *, over: bool = False, actions: int = 0) -> str:
    """Return why this run has failed beyond doubt, or "". `over`: this was its last evaluation. It depends only on what a checkpoint
    holds, so that a resumed run decides the same."""
    if not history or reached(history, floor, ceiling):
        return ""
    last, rows = history[-1], history[-AGAIN:]
    best = max(history, key=lambda row: row["val/return"])
    peak, now = best["val/return"], last["val/return"]
    clear = peak - floor > CLEAR * max(best["val/return_sd"], 1e-9) or reached([best], floor, ceiling)
    gone = [(peak - row["val/return"]) / (peak - floor) >= GONE for row in rows if clear and row["step"] > best["step"]]
    if gone and gone[-1] and (over or (len(gone) >= AGAIN and all(gone))):
        return _told(
            f"the return was {peak:.4g} at iteration {best['step']:g} and is {now:.4g}: {GONE:.0%} or more of it is lost",
            "the learning rate is too high for what is left to learn, or the values diverged (see value, explained_variance)",
            "the best weights are kept; a new run with a lower --optim.lr",
        )
    kl = [row.get("train/policy/approx_kl", 0.0) for row in rows]
    if len(rows) == AGAIN and min(kl) > BEYOND * FAR and (now < peak or peak <= floor):
        return _told(
            f"KL of at least {min(kl):.3g} nats over an iteration's updates ({FAR:g} is already large), and the return does not rise",
            "the ratio or its clip is not in the loss (see the gate formula), or the learning rate is too high",
            "trainworthy check RECIPE --only formula; a lower --optim.lr, fewer --update-epochs",
        )
    share = [
        row["train/policy/entropy"] / math.log(actions) for row in rows if actions > 1 and "train/policy/entropy" in row
    ]
    poor = not math.isfinite(ceiling) or now < floor + 0.5 * (ceiling - floor)
    if len(share) == AGAIN and max(share) < STILL and not clear and poor:
        return _told(
            f"the policy always takes the same action: entropy {max(share):.1%} of uniform actions, return {now:.4g}; "
            f"random actions have {floor:.4g}",
            "the learning rate is too high, rewards dominate the entropy bonus, or its sign is wrong (see the gate formula)",
            "a lower --optim.lr, a larger --target-entropy",
        )
    return ""


def _told(measured: str, cause: str, next: str) -> str:
    return f"  measured:     {measured}\n  likely cause: {cause}\n  next:         {next}\n"


def halt(run: "Run", stage: "Stage", *, actions: int = 0) -> None:
    """After an evaluation, stop a run that has failed beyond doubt (exit code 4). Rehearsals of gates continue."""
    if run.rehearsal or not getattr(run.cfg, "stop_lost", True):
        return
    over = run.current is not None and run.current.index + 1 == run.total
    if reason := lost(run.journal.history, stage.metric.floor, stage.metric.ceiling, over=over, actions=actions):
        raise Stop(
            f"the policy is lost (R6): the run stopped itself at iteration {run.step + 1} of {run.total}\n{reason}"
            "                (--no-stop-lost: continue anyway)"
        )


def monitors(
    floor: float, ceiling: float, *, ratio: bool = False, actions: int = 0, capacity: int = 0, stop: bool = True
) -> list[Monitor]:
    """Return the monitors of a control recipe.

    `floor`: return of random actions. `ceiling`: the best possible return, or inf. `ratio`: the loss uses importance ratios.
    `actions`: number of discrete actions, 0 for none. `capacity`: iterations that a replay buffer spans, 0 for none.
    `stop`: end the run when updates have no limit."""
    found = [kept(floor), values(floor, ceiling)]
    found += [undecided(floor, ceiling, actions)] if actions else []
    found += [far(stop)] if ratio else []
    return found + ([fresh(capacity)] if capacity else [])


def curve(history: Rows, key: str) -> list[float]:
    """Return the values of `train/policy/<key>` at each evaluation."""
    return [row[f"train/policy/{key}"] for row in history if f"train/policy/{key}" in row]


def reached(history: Rows, floor: float, ceiling: float) -> bool:
    """Return whether the last evaluation is close to the best possible return."""
    return math.isfinite(ceiling) and history[-1]["val/return"] >= floor + DONE * (ceiling - floor)


def kept(floor: float) -> Monitor:
    """Return the monitor of the return after its peak."""

    @monitor("return", rows="R6", title="the policy keeps its best return")
    def check(history: Rows) -> Finding:
        best = max(history, key=lambda row: row["val/return"])
        peak, last = best["val/return"], history[-1]["val/return"]
        learnt = peak - floor > best["val/return_sd"]
        lost = (peak - last) / max(peak - floor, 1e-9)
        return Finding(
            lost <= LOST or not learnt, f"return {peak:.4g} at iteration {best['step']}, {last:.4g} at the end",
            f"at most {LOST:.0%} of the gain lost again",
            "take the best weights (--run.export best); then a lower --optim.lr, or a schedule that ends near zero",
            evidence={"peak": peak, "last": last, "lost": lost},
        )  # fmt: skip

    return check


def values(floor: float, ceiling: float) -> Monitor:
    """Return the monitor of the value function. It uses the explained variance, because the value loss has moving targets and need not
    fall."""

    @monitor("values", rows="R5", title="the value function explains the returns")
    def check(history: Rows) -> Finding:
        seen = curve(history, "explained_variance")
        if len(seen) < 2:
            raise Skip("one evaluation: values follow the returns after some iterations")
        late = seen[len(seen) // 2 :] or [0.0]
        share = sum(late) / len(late)
        return Finding(
            share >= EXPLAINED or reached(history, floor, ceiling),
            f"{share:.0%} of the variance of the returns explained in the second half", f"at least {EXPLAINED:.0%}",
            "values learn too slowly (a larger --optim.lr, a smaller --gamma), are clipped too hard, or share a net that the policy's "
            "term dominates; run the probe gates again", evidence={"explained_variance": seen},
        )  # fmt: skip

    return check


def undecided(floor: float, ceiling: float, actions: int) -> Monitor:
    """Return the monitor of exploration: entropy must not vanish before the policy is good."""

    @monitor("entropy", rows="R1", title="the policy keeps exploring until it has learnt")
    def check(history: Rows) -> Finding:
        rows = [r for r in history if "train/policy/entropy" in r]
        share = [r["train/policy/entropy"] / math.log(actions) for r in rows]
        early = [i for i, r in enumerate(rows) if share[i] < DECIDED and r["epoch"] <= history[-1]["epoch"] / 2]
        earned = [r["val/return"] for r in rows]
        stuck = bool(early) and max(earned) - earned[early[0]] <= 0.1 * max(earned[early[0]] - floor, 1e-9)
        where = (
            f", {share[early[0]]:.1%} already at iteration {rows[early[0]]['step']}, and no better return since"
            if stuck
            else ""
        )
        return Finding(
            not stuck or reached(history, floor, ceiling),
            f"entropy {share[-1]:.0%} of uniform actions at the end{where}" if share else "not logged",
            f"at least {DECIDED:.0%} in the first half, or a return that still rises",
            "a larger --ent-coef, a lower --optim.lr, fewer --update-epochs; or rewards so large that they dominate the entropy bonus",
            evidence={"share": share},
        )  # fmt: skip

    return check


def far(stop: bool = True) -> Monitor:
    """Return the monitor of the policy's change over one iteration's updates (mean over the iterations of an evaluation).

    `stop`: it ends the run when the change has no limit in evaluation after evaluation."""

    @monitor("policy-steps", rows="R3", title="an iteration's updates change the policy, and not too far")
    def check(history: Rows) -> Finding:
        kl, clipped = curve(history, "approx_kl"), curve(history, "clip_fraction")
        most, share = max(kl, default=0.0), sum(clipped) / max(len(clipped), 1)
        nowhere = most < NOWHERE
        runaway = stop and len(kl) >= IN_A_ROW and min(kl[-IN_A_ROW:]) > RUNAWAY * FAR
        return Finding(
            most <= FAR and share <= CLIPPED and not nowhere,
            f"KL of at most {most:.2g} over an iteration's updates, {share:.0%} of the samples at the clip",
            f"KL between {NOWHERE:g} and {FAR:g}, at most {CLIPPED:.0%} at the clip",
            "the policy does not change: --optim.lr, or equal advantages" if nowhere
            else "a lower --optim.lr, fewer --update-epochs, a larger --train.batch-size", evidence={"kl": kl, "clip_fraction": clipped,
                "stop": f"updates without a limit: KL above {RUNAWAY * FAR:g} in {IN_A_ROW} evaluations in a row; is the ratio that "
                "of the new to the old policy, and is it clipped? (--no-stop-lost: continue anyway)" if runaway else ""},
        )  # fmt: skip

    return check


def fresh(capacity: int) -> Monitor:
    """Return the monitor of the replay buffer's mean age. It grows without bound if new transitions are not added."""

    @monitor("replay", rows="R4", title="the replay buffer holds the newest transitions")
    def check(history: Rows) -> Finding:
        age = curve(history, "replay_age")
        oldest = max(age, default=0.0)
        return Finding(
            oldest <= max(capacity, 1), f"transitions {age[-1] if age else 0:.3g} iterations old on average at the end",
            f"at most {capacity} iterations, what a full replay buffer spans",
            "new steps are no longer added (a full buffer must drop the oldest), or are written to another place than they are read from",
            evidence={"age": age},
        )  # fmt: skip

    return check
