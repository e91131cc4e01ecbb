"""Monitors of RLHF for faults that show only in a whole run: KL divergence, texts, values."""

from trainworthy.core.base.verdict import Finding
from trainworthy.core.monitoring.monitors import Monitor, monitor
from trainworthy.recipes.rl.control.gates.monitors import curve, far
from trainworthy.recipes.rl.language.kl_control import Watch

BEYOND = 1.2  # relative to the target, over the last third
LESS = 0.7  # distinct tokens, relative to the start
SHORT = 0.4  # tokens
DECIDED = 0.2  # entropy
EXPLAINED = (
    # share of the returns' variance over the second half; if the reward is nearly always 1, little variance is left
    0.02
)

Rows = list[dict[str, float]]


def of(target: float, watch: Watch) -> list[Monitor]:
    """Return the monitors of RLHF. `watch` has recorded the first rollout."""
    return [held(target), texts(watch), undecided, values, far()]


def late(history: Rows, key: str, share: int) -> float:
    """Return the mean of the last 1 / `share` of the curve."""
    seen = curve(history, key)
    tail = seen[-max(1, len(seen) // share) :] or [0.0]
    return sum(tail) / len(tail)


def held(target: float) -> Monitor:
    """Return the monitor of the KL divergence from the reference at the end."""

    @monitor("kl", rows="R2", title="the policy's KL to its reference stays near the target")
    def check(history: Rows) -> Finding:
        last, most = late(history, "kl", 3), max(curve(history, "kl"), default=0.0)
        return Finding(
            last <= BEYOND * target, f"KL {last:.3g} nats a completion over the last third, {most:.3g} at most",
            f"{BEYOND:g} x {target:g} or less",
            "the KL coefficient starts too low or adapts too slowly (0.05 and 4% have almost no effect): --init-kl-coef 0.2 --kl-coef-rate 0.1",
            evidence={"kl": curve(history, "kl")},
        )  # fmt: skip

    return check


def texts(watch: Watch) -> Monitor:
    """Return the monitor of repetition and length while the reward rises."""

    @monitor("hacking", rows="R1", title="completions with higher reward are still meaningful text")
    def check(history: Rows) -> Finding:
        reward, distinct, tokens = watch.first.tolist()
        now = {k: late(history, k, 5) for k in ("reward", "distinct", "tokens")}
        wrong = [f"{k} {now[k]:.3g} instead of {start:.3g}" for k, start, share in
                 (("distinct", distinct, LESS), ("tokens", tokens, SHORT)) if now[k] < share * start]  # fmt: skip
        return Finding(
            not wrong or now["reward"] <= reward,
            f"reward {reward:.3g} -> {now['reward']:.3g}, distinct share {distinct:.2f} -> {now['distinct']:.2f}, "
            f"{tokens:.3g} -> {now['tokens']:.3g} tokens",
            f"{LESS:.0%} of the start's distinct share and {SHORT:.0%} of its tokens, or a reward that does not rise",
            "a reward with a hole: read the samples and correct it, or use a lower --target-kl", evidence=now,
        )  # fmt: skip

    return check


@monitor("entropy", rows="R1", title="the policy keeps exploring until the end")
def undecided(history: Rows) -> Finding:
    """Return the monitor of the next token's entropy relative to the first evaluation."""
    seen = curve(history, "entropy") or [0.0]
    return Finding(
        seen[-1] >= DECIDED * seen[0], f"entropy {seen[0]:.3g} nats a token at first, {seen[-1]:.3g} at the end",
        f"{DECIDED:.0%} of the first or more", "a lower --target-kl or --optim.lr, fewer --update-epochs", evidence={"entropy": seen},
    )  # fmt: skip


@monitor("values", rows="R3", title="the value function explains the returns")
def values(history: Rows) -> Finding:
    """Return the monitor of the explained variance; the value loss has moving targets and need not fall."""
    share = late(history, "explained_variance", 2)
    return Finding(
        share >= EXPLAINED, f"{share:.0%} of the variance of the returns explained in the second half", f"{EXPLAINED:.0%} or more",
        "a larger --vf-coef, larger rollouts; a head that gets no gradient (see wiring)",
        evidence={"explained_variance": curve(history, "explained_variance")},
    )  # fmt: skip
