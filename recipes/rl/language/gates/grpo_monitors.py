"""Monitors of GRPO: faults that only a whole run shows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainworthy.core.base.verdict import Finding
from trainworthy.core.monitoring.monitors import Monitor, monitor

History = list[dict[str, float]]
AGAIN = 2  # evaluations in a row that end a run
CERTAIN = 0.02  # of the first entropy
GROWN, FAR_OFF = 3.0, 5.0  # times the first length, times the first KL
NEAR, LOST = 1.2, 4.0  # times --target-kl


def monitors(cfg: Any, held_out: int) -> list[Monitor]:
    """What only a whole run shows; each ends the run where it is sure (--no-stop-hacked: it only tells)."""
    noise = 2 * (0.5 / held_out) ** 0.5  # two standard errors of a difference at one half
    found = [hacked(held_out), still_groups, lengths(noise), decided(noise)]
    found += [clipped] * (cfg.num_iterations > 1) + [drift(noise, cfg.target_kl)] * (cfg.beta > 0)
    return found if cfg.stop_hacked else [replace(m, check=_telling(m)) for m in found]


def _telling(one: Monitor) -> Callable[[History], Finding]:
    """Return the monitor's finding without its request to stop the run."""

    def check(history: History) -> Finding:
        found = one.check(history)
        return replace(found, evidence={k: v for k, v in found.evidence.items() if k != "stop"})

    return check


def logged(history: History, name: str) -> list[float]:
    """Return what the trainer logged, averaged over the iterations before each evaluation."""
    return [row[f"train/trainer/{name}"] for row in history if f"train/trainer/{name}" in row]


def lately(values: list[float], wrong: Callable[[float], bool]) -> bool:
    """Return whether the values were wrong at the last evaluations, but not at the first."""
    return len(values) > AGAIN and all(map(wrong, values[-AGAIN:]))


def unpaid(history: History, noise: float) -> bool:
    """Return whether held-out answers are right no more often than at the first evaluation, and not nearly always."""
    right = [row["val/accuracy"] for row in history]
    return right[-1] - right[0] <= noise and right[-1] < 0.9


def hacked(held_out: int) -> Monitor:
    """The training reward also rises if answers only become more certain. So the accuracy of greedy held-out answers must not fall."""
    noise = 2 * (0.5 / held_out) ** 0.5  # two standard errors of a difference at one half

    @monitor("reward", rows="R1", title="answers with higher reward are right more often")
    def check(history: History) -> Finding:
        earned, right = logged(history, "reward"), [row["val/accuracy"] for row in history]
        fell = max(right) - right[-1] > noise
        top = right.index(max(right))
        before = logged(history[: top + 1], "reward")[-1:] or earned[:1]
        stop = lately(right, lambda value: max(right) - value > noise) and earned[-1] > before[0]
        curves = (
            f"training reward {earned[0]:.3g} -> {earned[-1]:.3g}; held-out accuracy {right[0]:.3f} -> {right[-1]:.3f}"
        )
        return Finding(
            not fell, f"{curves}, at best {max(right):.3f}", f"held-out accuracy within {noise:.2f} of its best",
            "the reward can be hacked: read the answers with the highest reward; a lower --optim.lr, --beta above 0, the best weights "
            "(--run.export best)",
            evidence={"reward": earned, "accuracy": right}
            | ({"stop": "the reward rises for something other than right answers"} if stop else {}),
        )  # fmt: skip

    return check


@monitor("groups", rows="R1", title="rewards differ within groups")
def still_groups(history: History) -> Finding:
    """Watches the share of groups whose answers all get the same reward: they teach nothing."""
    share = logged(history, "frac_reward_zero_std")
    stop = len(share) >= AGAIN and min(share[-AGAIN:]) >= 0.999 and history[-1]["val/accuracy"] < 0.9
    return Finding(
        share[-1] <= 0.8, f"all rewards of a group are equal in {share[0]:.0%} of the groups at first, {share[-1]:.0%} at the end",
        "at most 80%",
        "questions are too easy or too hard: use other ones, a larger --num-generations, a higher --temperature",
        evidence={"share": share} | ({"stop": "rewards differ in no group: there is no gradient, nothing is learnt"} if stop else {}),
    )  # fmt: skip


def lengths(noise: float) -> Monitor:
    """Return the monitor of answers that become longer, or are cut, and are right no more often."""

    @monitor("lengths", rows="L3", title="answers end by themselves, and do not grow")
    def check(history: History) -> Finding:
        """Watches the share of answers that are cut at the limit, and the mean length."""
        cut, mean = logged(history, "completions/clipped_ratio"), logged(history, "completions/mean_length")
        endless = cut[0] < 0.5 and lately(cut, lambda value: value > 0.9)
        stop = unpaid(history, noise) and (endless or lately(mean, lambda value: value > GROWN * mean[0]))
        return Finding(
            cut[-1] <= 0.5 and mean[-1] <= GROWN * mean[0], f"{cut[0]:.0%} of the answers cut at the limit at first, {cut[-1]:.0%} at the "
            f"end; mean length {mean[0]:.1f} tokens, then {mean[-1]:.1f}", "at most half of them cut, at most three times as long",
            "--max-new-tokens is too small, or the reward grows with length",
            evidence={"cut": cut, "mean": mean} | ({"stop": "the reward grows with length"} if stop else {}),
        )  # fmt: skip

    return check


def decided(noise: float) -> Monitor:
    """Return the monitor of a policy that becomes certain of its answers before they are right."""

    @monitor("entropy", rows="R1", title="the policy keeps exploring while it learns")
    def check(history: History) -> Finding:
        """Watches the entropy of a token (nats). If it vanishes early, the policy tries nothing new."""
        seen, share = logged(history, "entropy"), logged(history, "frac_reward_zero_std")
        gone = seen[-1] < CERTAIN * seen[0] and history[-1]["val/accuracy"] < 0.9
        stop = gone and unpaid(history, noise) and lately(seen, lambda value: value < CERTAIN * seen[0])
        return Finding(
            not gone, f"entropy {seen[0]:.3g} nats per token, then {seen[-1]:.3g}", "at least 2% of the first, or nearly all answers right",
            "a lower --optim.lr, --beta above 0, a higher --temperature",
            evidence={"entropy": seen, "zero_variance": share}
            | ({"stop": "the rate is too high, or one answer gets the reward for every question"} if stop else {}),
        )  # fmt: skip

    return check


@monitor("clip", rows="R1", title="an iteration's updates stay within the clipping range")
def clipped(history: History) -> Finding:
    """Watches the share of clipped tokens."""
    share = logged(history, "clip_ratio/region_mean")
    return Finding(max(share) <= 0.3, f"up to {max(share):.0%} of the tokens are clipped", "at most 30%",
                   "a lower --optim.lr, fewer --num-iterations", evidence={"share": share})  # fmt: skip


def drift(noise: float, target: float) -> Monitor:
    """A policy that leaves its reference and is right no more often. With a `target` the KL must end near it."""

    @monitor("kl", rows="R2", title="the policy stays near its reference")
    def check(history: History) -> Finding:
        """KL to the reference, nats a token."""
        seen, beta = logged(history, "kl"), logged(history, "beta")
        tail = seen[-max(1, len(seen) // 3) :]
        last, limit = (sum(tail) / len(tail), NEAR * target) if target else (max(seen), 1.0)
        stop = unpaid(history, noise) and lately(
            seen, lambda value: value > (LOST * target if target else max(1.0, FAR_OFF * seen[0]))
        )
        moved = f"; the coefficient {beta[0]:.3g}, then {beta[-1]:.3g}" if beta else ""
        return Finding(
            last <= limit, f"KL {seen[0]:.3g} nats a token at first, {seen[-1]:.3g} at the end, {max(seen):.3g} at most{moved}",
            f"{NEAR:g} x {target:g} or less over the last third" if target else "1 nat a token",
            "a higher --beta or --kl-coef-rate, a lower --optim.lr" if target else "a higher --beta, --target-kl, a lower --optim.lr",
            evidence={"kl": seen, "beta": beta}
            | ({"stop": "--beta is too low for this rate and this reward"} if stop else {}),
        )  # fmt: skip

    return check
