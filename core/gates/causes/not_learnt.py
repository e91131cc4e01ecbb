"""Why a short training on a few hundred samples did not carry over, or did not even learn them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainworthy.core.gates.checks.null_model import Retrained
    from trainworthy.core.gates.checks.tiny_data import Skill

RATES = (1 / 30, 30)  # multiples of the rate that are tried where not even the training samples were learnt


def by_rate(found: dict[str, Any], again: Callable[..., dict[str, Any]]) -> str:
    """Return that the rate is wrong, if at another one the samples are learnt that were not; else "". `again(rate=...)` trains with a
    factor of the rate."""
    if found["train"].clear or not found["in_time"]:
        return ""
    for factor in RATES:
        other = again(rate=factor)
        if other["train"].clear and other["held_out"].clear:
            low = "low" if factor > 1 else "high"
            return (f"the rate is far too {low}: at {factor:.3g} times the rate, {other['steps']} steps give {other['train'].own:.3f} on the "
                    f"training samples and {other['held_out'].own:.3f} on held-out ones")  # fmt: skip
    return ""


def why(learnt: "Skill", carried: "Skill", retrained: "Retrained | None", hardly: Callable[[], bool]) -> str:
    """Likely causes. The second training decides which comes first: a net that memorises (`hardly`: it does not) learns right labels
    faster than shuffled ones."""
    shuffled = (
        "labels shuffled before the split, or read in another order than their inputs: they do not belong together\n"
    )
    val = "val is read differently: another order of classes, other labels, scale or transform"
    if retrained and not retrained.belongs and hardly():
        return (
            f"eight fixed samples are not memorised either: see `overfit`, often the rate is far off\n{shuffled}{val}"
        )
    if retrained and not retrained.belongs:
        return (f"{shuffled.strip()} (permuted inputs are learnt as fast: {retrained})\nthe rate is far off, or the schedule of a "
                "short run never leaves its warm-up\nthe augmentation leaves nothing of the input\n" + val)  # fmt: skip
    if learnt.clear and not carried.clear:
        return (f"the labels belong to their inputs (permuted ones are learnt more slowly: {retrained}), but what is learnt "
                f"does not carry to unseen samples (an absurd generalisation gap): {val}\n"
                "too few samples to learn this from scratch: more data or augmentation, a smaller or pretrained model")  # fmt: skip
    if not learnt.clear:
        return "the rate is far off, or the schedule of a short run never leaves its warm-up\n" + shuffled + (
            "the augmentation leaves nothing of the input")  # fmt: skip
    return "more epochs are needed than the schedule gives, or the rate is too low"
