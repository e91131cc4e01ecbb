"""Checks of what the losses ask for: adversaries, perturbed inputs and weights, compared entries, copied and mixed
targets, drawn noise."""

from typing import Any

import torch
from trainworthy.core.base.correlation import spearman
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.checks import forced
from trainworthy.guard.checks.causality import follows_only_the_past
from trainworthy.guard.checks.invariants import names, tops, with_and_without
from trainworthy.guard.checks.policies import advantages
from trainworthy.guard.checks.results import finding, joined, skip
from trainworthy.guard.hooks.parameters import parameters_of
from trainworthy.guard.measures.control import policy_rewards
from trainworthy.guard.measures.losses import class_conditions, collapse, loss_terms, margins, penalties, variational
from trainworthy.guard.measures.losses.regression import unexplained_share


def direction(seen: Any) -> dict:
    """Check that an attack raises the loss, that a generator moves towards what its critic takes for real, and that a
    policy's actions are weighed by the rewards that follow them."""
    one = seen.evidence
    # Where every prediction meets every target, each action's weight is a mean over all.
    weights = (None, "") if one.outer.fault() else policy_rewards.check(one.credit)
    if fault := policy_rewards.unmoved(one.credit):
        weights = (fault, "")
    rows = [attacks(seen), adversaries(seen), class_conditions.check(seen), weights, variational.check(one.latent)]
    penalty = penalties.penalty(one.penalties) or penalties.embeddings(one.penalties)
    rows += [
        (penalty, ""),
        (one.bootstrapped.fault(), ""),
        loss_terms.check(one.loss_terms),
        collapse.check(seen),
        margins.check(seen),
    ]
    rows += [
        (one.attraction.fault(), ""),
        (advantages(seen), ""),
        (one.same_rows.fault(), ""),
        (one.actors.fault(one.bootstrapped.reward_weights), ""),
    ]
    faults, measured = [fault for fault, _ in rows if fault], [text for _, text in rows if text]
    if not faults and not measured:
        return skip(
            "direction",
            "no adversary, no attack on inputs, no policy with log-probabilities in gymnasium, no variational code",
        )
    return joined("direction", faults, "; ".join(measured))


def attacks(seen: Any) -> tuple[Fault | None, str]:
    """Compare the loss before and after inputs were moved along its gradient."""
    rows = seen.evidence.attacks
    if len(rows) < 6:
        return None, ""
    lower = sum(after < before for before, after in rows)
    change = sum(after - before for before, after in rows) / max(1e-12, sum(before for before, _ in rows))
    text = f"moving the inputs along the loss's gradient changes it by {change:+.1%} ({len(rows)} times)"
    if lower >= 0.95 * len(rows) and change < -0.005:
        return (
            text,
            "the sign of the attack's step is wrong: it lowers the loss, so the model trains on easier inputs",
        ), text
    return None, text


def adversaries(seen: Any) -> tuple[Fault | None, str]:
    """Compare in which direction the critic's own steps pull its outputs for real and made inputs, and in which
    direction the generator's steps do."""
    found = seen.evidence.pushes
    for critic, (least, most) in seen.evidence.bounds.items():
        low, high = seen.evidence.ranges.get(critic, [0.0, 0.0])
        if low < least - 0.25 * (most - least) or high > most + 0.25 * (most - least):
            return (
                f"real samples range from {low:.3g} to {high:.3g}, and the generator's last function from {least:g} to {most:g}",
                "real samples are not scaled to the range of tanh or sigmoid: the critic recognises them by their range",
            ), ""
    for (critic, maker), rows in found.items():
        real, fake, made = (
            sign(r) for r in (found.get((critic, 0), {}).get("real", []), rows.get("fake", []), rows.get("made", []))
        )
        if not maker or not (real and fake and made) or real == fake:
            continue
        if made == fake:
            return (
                "the generator's steps move its samples' score the way in which the critic's steps move it, away from "
                "that of real samples",
                "the generator's loss has the wrong sign or label: it is rewarded for what the critic recognises as fake",
            ), ""
        return None, "critic and generator pull in opposite directions"
    return None, ""


def read_apart(seen: Any) -> Fault | None:
    """Find rows of tokens of which each second one is 0: numbers of two bytes that were read as bytes. A row may begin with either
    half; of a text with a symbol between all others, the rows begin alike, or more than one parity is mixed."""
    texts = [x for x in seen.evidence.texts if x.shape[1] >= 16]
    halves = [(x[:, ::2] == 0).all(1).float() - (x[:, 1::2] == 0).all(1).float() for x in texts]
    if sum(map(len, halves)) < 64 or len(torch.cat([x.flatten() for x in texts]).unique()) < 16:
        return None
    parity = torch.cat(halves)
    first, second = (float((parity == k).float().mean()) for k in (1, -1))
    if first + second < 0.99 or min(first, second) < 0.1:
        return None
    return (
        f"in each of {len(parity):,} rows every second token is 0, from the first one in {first:.0%} of them and from the second in the rest",
        "tokens are read from their file in a narrower type than they were written in: the dtype of np.memmap, fromfile or frombuffer",
    )


def sign(rows: list[float]) -> int:
    """Return the sign of at least 90% of these; 0 if they do not agree."""
    clear = [x for x in rows if abs(x) > 0.5]
    if len(rows) < 4 or len(clear) < 0.8 * len(rows):
        return 0
    up = sum(x > 0 for x in clear)
    return 1 if up >= 0.9 * len(clear) else -1 if up <= 0.1 * len(clear) else 0


def exchanged(seen: Any) -> Fault | None:
    """Find losses that compare the entries of a batch in another order in training than in evaluation."""
    train, calm = (seen.evidence.roles[grad] for grad in (True, False))
    for name in train.keys() & calm.keys():
        (a, times), (b, again) = train[name].most_common(1)[0], calm[name].most_common(1)[0]
        alone = times >= 0.9 * train[name].total() and again >= 0.9 * calm[name].total()
        if a != b and set(a) == set(b) and alone and times >= 3 and again >= 2:
            return (
                f"{name} gets the entries {list(a)} of a batch in training and {list(b)} in the evaluation",
                "two arguments of the loss are exchanged (positive and negative, input and target)",
            )
    return None


def copied(seen: Any) -> Fault | None:
    """Find float targets that are the model's own input: one of its columns, or the present value of a series."""
    one = seen.evidence.regression
    if one.leaks >= 3 and one.leaks >= 0.9 * one.pairs:
        return (
            f"the target is entry {one.column} of the model's own input",
            "the column to predict was left among the inputs, or the window ends one step too late (the target begins with its last value)",
        )
    if fault := forced.fault(seen) or forced.copied(seen):
        return fault
    if one.copies < 2 or one.copies < one.pairs or one.copied is None or seen.control is None:
        return None
    if follows_only_the_past(*one.copied):
        return (
            "every target is the input at the same position, and the model sees that position and those before it",
            "the shift by one is missing: the model learns to copy the present value",
        )
    return None


def mixed(seen: Any) -> Fault | None:
    """Find mixed targets that do not fit the mixed inputs."""
    one = seen.evidence.mixing
    if one.right or one.exchanged + one.foreign < 2:
        return None
    if one.exchanged >= one.foreign:
        return (
            "the weights of two mixed targets are those of each other's inputs",
            "lam and 1 - lam are exchanged between inputs and targets",
        )
    return "the inputs are mixed with other samples than the targets", "two permutations are drawn where one is meant"


def dropped_terms(seen: Any) -> Fault | None:
    """Find losses that a model returns, that never reach backward(), with parameters that train by nothing else."""
    called = names(tops())
    ran = {id(p) for m, _, _ in seen.called.values() for p in parameters_of(m, recurse=False)}
    dead = [called.get(id(p), "?") for p in with_and_without(seen, 8)[1] if id(p) in ran]
    lost = [key for (_, key), (times, got) in seen.evidence.terms.items() if times >= 8 and not got]
    if dead and lost:
        return (
            f"the model returns {lost[0]}, which never reaches backward(), and {dead[0]} never gets a gradient",
            "a term of the loss is left out of the sum",
        )
    return None


def unrestored(seen: Any) -> Fault | None:
    """Find perturbed weights that are not brought back before the step."""
    one = seen.evidence
    if one.unrestored >= 4 and not one.restored:
        return (
            f"at {one.unrestored} steps the weights were moved between two backward() calls and were not restored",
            "the ascent step of sharpness-aware minimisation must be subtracted again before the update",
        )
    return None


def noise(seen: Any) -> dict:
    """Check a net that predicts noise: how signal and noise are weighted, and that the net knows how much there is."""
    one = seen.evidence.regression
    foreign = [corr for corr, n in one.strange if abs(corr) < 4 / n**0.5]
    if len(foreign) >= 6 and len(foreign) == len(one.strange) and not one.levels:
        return finding(
            "noise",
            f"the target is drawn noise that is not in the model's input (correlation {sum(foreign) / len(foreign):.3f} in {len(foreign)} calls)",
            "the noise is drawn twice: once for the input and once for the loss",
        )
    apart = [corr for corr, n in one.held if abs(corr) < 4 / n**0.5]
    if len(apart) >= 6 and len(apart) == len(one.held):
        return finding(
            "noise",
            f"the target holds drawn noise that is not in the model's input (correlation {sum(apart) / len(apart):.3f} in {len(apart)} calls)",
            "the noise is drawn twice: once for the input and once for the target",
        )
    if not one.levels and (hidden := one.hidden.check()):
        measured, fault, cause = hidden
        return finding("noise", fault or measured, cause)
    if not one.levels:
        return skip("noise", "no loss whose target is noise that was added to the batch")
    a, b = (torch.cat(x) for x in zip(*one.levels, strict=True))
    measured = f"{len(a)} noisy inputs, share of noise {float(b.min()):.2f} to {float(b.max()):.2f}"
    if len(a) < 64 or float(b.std()) < 0.02:
        return finding("noise", measured)
    healthy = min(unexplained_share(b, a), unexplained_share(b**2, a**2))
    by_noise, by_sample = unexplained_share(b, a**2), unexplained_share(b**2, a)
    if healthy > 0.02 and min(by_noise, by_sample) < 2e-3:
        which = "noise" if by_noise < by_sample else "sample"
        return finding(
            "noise",
            f"{measured}: the {which} is scaled by a variance, the other one by a deviation",
            f"sqrt() is missing at the coefficient of the {which}: the noising is not variance preserving",
        )
    if len(b) >= 256 and float((a**2 + b**2 - 1).abs().max()) < 0.02 and float(b.max()) < 0.5:
        return finding(
            "noise",
            f"{measured}: the noisiest input still has {float(a.min()):.2f} of its sample, and sampling starts from noise alone",
            "the share of noise of one step is used where all steps up to it are meant: alphas_cumprod = torch.cumprod(alphas, 0)",
        )
    levels = [x for x in map(torch.cat, one.conditions.values()) if len(x) == len(b) and len(x.unique()) >= 16]
    best = max((abs(spearman(x, b)) for x in levels), default=1.0)
    if len(b) >= 256 and len(b.unique()) >= 16 and best < 0.3:
        return finding(
            "noise",
            f"{measured}: it has nothing to do with the time that the net gets (rank correlation {best:.2f})",
            "the time step is drawn twice: once to add the noise and once for the net",
        )
    return finding("noise", f"{measured}; the net knows how much" if levels else measured)
