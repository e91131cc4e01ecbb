"""Checks what a script's own loop does with changed data: eight samples repeatedly, and these with each other's inputs."""

import math

from trainworthy.guard.checks.results import LEARNING, finding, skip
from trainworthy.guard.measures.losses.float_targets import BINARY
from trainworthy.guard.measures.scores.printed_scores import printed, printed_between, scores

LEARNT = 0.8  # of the loss that is left without the input
IDLE = 25  # steps at the loss of the best constant within which a model may be about to use its input
SOON = 200  # steps on eight samples before which a failure is tried again with more
FEW = 30  # losses on eight samples from which on one that does not close is a fault
SELDOM = 0.25  # changes of an average of weights for each step: fewer are none after every step
CONSTANT = "the input does not reach the output (overwritten, zeroed, averaged over the batch)"


def check(watch: dict, eight: dict, others: dict, output: str = "") -> list[dict]:
    """Compare the records of three rehearsals."""
    facts = watch.get("facts", {})
    why = unsuitable(facts)
    fit = facts.get("fit") or {}
    if fit.get("spread") and len(fit["spread"]) >= 12 and max(fit["spread"]) < 1e-6 and not facts.get("declared"):
        measured = f"{fit['kind']}: in {len(fit['spread'])} calls the outputs were the same for all samples of a batch"
        why = "the input does not reach the output"
        return [finding("overfit", measured, CONSTANT), skip("signal", why), skip("metric", why)]
    if why:
        found = none(why)
        if eight and eight.get("why") != "it raised" and eight.get("facts"):
            found[-1] = against(eight["facts"], output) or found[-1]
        return found
    for name, one in (("eight", eight), ("others", others)):
        if not one or one.get("why") == "it raised":
            return none(f"the rehearsal '{name}' did not run: {one.get('raised', 'no record')}"[:200])
    if unfit := eight["facts"].get("unfit"):
        return none(unfit)
    if not others["facts"].get("changed"):
        return none("it is not clear which entry of a batch is the target and which are inputs")
    if facts.get("fit") and not facts.get("declared"):
        own, exchanged = eight["facts"], others["facts"]
        if not own.get("fit") or not exchanged.get("fit"):
            return none("on eight samples the loss gets other targets than those of the batch")
        return [closing(own["fit"], exchanged["fit"]), response(facts, own), agreement(own, output)]
    return [overfit(eight["facts"], others["facts"]), signal(facts, eight["facts"]), metric(eight["facts"], output)]


def none(why: str) -> list[dict]:
    """Return the results where none of the three applies."""
    return [skip(id, why) for id in LEARNING]


def unsuitable(facts: dict) -> str:
    """Return why the three cannot be compared; empty if they can."""
    own_tokens = "the targets are the input's own tokens, so inputs cannot be exchanged"
    if not facts.get("loss_calls") and not facts.get("declared"):  # declared: the caller named the target
        if facts.get("token_shift"):
            return own_tokens
        fit = facts.get("fit") or {}
        if fit.get("own"):
            return "the target, or the steps before it, are the model's own input, so inputs cannot be exchanged"
        if fit and not fit["inputs"]:
            return "the model's input is not an entry of the batch: the loop changed it"
        if not fit:
            return "no loss was seen whose targets are classes or an entry of the batch, so it is unknown which data the loss compares"
    if facts.get("optimizers", 0) != 1 and not facts.get("one_loss") and not facts.get("successive"):
        return f"{facts.get('optimizers', 0)} optimisers: it is unknown which loss should fall"
    if facts.get("token_shift"):
        return own_tokens
    if not facts.get("loader"):
        return "no DataLoader feeds the loop (name the function that returns a batch: --batches NAME)"
    return ""


def tail(rows: list[float]) -> float:
    """Mean of the last eighth."""
    k = max(3, len(rows) // 8)
    return sum(rows[-k:]) / max(1, len(rows[-k:]))


def falling(rows: list[float]) -> bool:
    """Return whether a loss falls on, as an exponential whose time constant is longer than what was seen: in its last quarter by more
    than a quarter of the whole fall (a third on a straight line)."""
    k = len(rows) // 4
    if not k:
        return False
    first, third, last = (sum(part) / k for part in (rows[:k], rows[-2 * k : -k], rows[-k:]))
    return third - last > 0.25 * (first - last) > 0


def parting(own: list[float], others: list[float]) -> bool:
    """Return whether a loss has just begun to fall below another: in the last eighth by twice as much as in the eighth before, and by a
    twentieth or more. On eight samples a net of small weights gives all of them one answer for long, then tells them apart."""
    k = len(own) // 8
    if not k:
        return False
    gaps = [b - a for a, b in zip(own, others, strict=False)][: len(own)]
    before, last = (sum(part) / k for part in (gaps[-2 * k : -k], gaps[-k:]))
    return last > max(0.05 * others[-1], 2 * before) and own[-1] < min(own[-2 * k : -k])


def at_constant(losses: list[float], constant: list[float]) -> int:
    """Return for how many steps a loss has been that of the best constant; 0 where it is lower at the end, or the constant unknown."""
    if len(losses) != len(constant) or tail(losses) < 0.9 * tail(constant):
        return 0
    rows = [a <= 1.1 * b for a, b in zip(losses, constant, strict=True)]
    return len(rows) - next((i for i in range(len(rows)) if all(rows[i : i + 3])), len(rows) - 1)


def overfit(own: dict, others: dict) -> dict:
    """Compare training on eight samples with training on the same eight with each other's inputs."""
    a, b = own["nll"], others["nll"]
    n = min(len(a), len(b))
    if n < 12:
        return skip("overfit", f"only {n} losses on eight samples")
    # After as many steps: two runs side by side make different numbers of them.
    start, end, late, exchanged = a[0], tail(a[:n]), tail(a), tail(b[:n])
    right = tail(own["train_accuracy"])
    measured = f"loss {start:.3g} -> {end:.3g} on eight samples, {exchanged:.3g} with each other's inputs"
    measured += f"; {right:.2f} right" if own["train_accuracy"] else ""
    # Nothing more is memorised: half of the labels are wrong, for one.
    stalled = n >= 100 and 0 < right < 0.9 and not falling(a)
    if end < (0.7 if stalled else 0.8) * exchanged or late < 0.5 * exchanged or late < 0.1 * start:
        return finding("overfit", measured, own=a[:500], others=b[:500])
    if n < FEW or (n < 2 * FEW and late < 0.8 * exchanged):
        return skip("overfit", f"{measured}: {n} steps are too few to decide")
    if own.get("contrasted"):
        return skip(
            "overfit",
            f"{measured}: the loss compares samples with each other, and repetitions of the same eight look alike",
        )
    if own.get("forced"):
        return skip(
            "overfit", f"{measured}: the decoder gets the targets so far, and can memorise them without the input"
        )
    if own.get("mixed") and end < 0.95 * exchanged:
        return skip("overfit", f"{measured}: each sample has two targets, so the loss does not close")
    if not math.isfinite(end) or end > 3 * start:
        return skip(
            "overfit", f"{measured}: the rehearsal on eight samples diverged, so it shows nothing about their labels"
        )
    idle = at_constant(a, own.get("constant", []))
    if n < 100 and 0 < idle < IDLE:
        return skip(
            "overfit",
            f"{measured}: for {idle} steps the loss is that of the best constant, which is too short to decide",
        )
    if end > 0.9 * start and n < 100:
        return skip("overfit", f"{measured}: the rate is too low for {n} steps to say")
    if parting(a[:n], b[:n]):
        return skip(
            "overfit",
            f"{measured}: the loss begins to fall below the other after {n} steps; train longer with --seconds 30",
        )
    if end > LEARNT * start and falling(a):  # hardly anything is learnt so far
        return skip("overfit", f"{measured}: the loss still falls after {n} steps; train longer with --seconds 30")
    if end > 0.95 * start and exchanged > 0.95 * start:
        return skip("overfit", f"{measured}: nothing is learnt in {n} steps, the rate may still be rising")
    cause = f"labels do not belong to their inputs inside the loop (shuffled, rolled or mixed wrongly)\n{CONSTANT}"
    return finding("overfit", measured, cause, own=a[:500], others=b[:500])


def hasty(found: dict, eight: dict) -> int:
    """Return the number of steps of a second try where `overfit` failed in few: a slow net learns the best constant first. 0: no second try."""
    steps = len(eight.get("facts", {}).get("nll", ()))
    slow = found["id"] == "overfit" and found.get("cause") and "own" in found["evidence"] and FEW <= steps < SOON
    return 3 * steps if slow else 0


def signal(watch: dict, eight: dict) -> dict:
    """If the script memorises eight samples in fewer steps than it trained on its own data, new samples must score
    above chance."""
    memorised = tail(eight["train_accuracy"]) > 0.9 and tail(eight["nll"]) < 0.3 * eight["nll"][0]
    enough = watch["epochs"] >= 2 and watch["steps"] >= max(60, 0.8 * eight["steps"])
    if not memorised or not enough or not watch["eval_seen"] or watch["majority"] > 0.5:
        why = f"{watch['steps']} steps, {watch['epochs']:.1f} epochs: too early to say, or not evaluated by class"
        return skip("signal", why)
    n, chance = watch["eval_seen"][-1], watch["majority"]
    got = max(watch["eval_right"][-1], watch["eval_right_batch"][-1]) / n
    error = (chance * (1 - chance) / n) ** 0.5
    measured = f"{got:.3f} of {n} evaluated samples right after {watch['epochs']:.1f} epochs, the most frequent class has {chance:.3f}"
    if got > chance + 3 * error:
        return finding("signal", measured)
    if behind := averaged("signal", measured, watch):
        return behind
    near = watch.get("neighbours") or [0.0, 1, 1.0]
    late = tail(watch["train_accuracy"])
    if near[0] > near[2] + 3 * (near[2] * (1 - near[2]) / near[1]) ** 0.5 and late < chance + 0.15:
        return skip(
            "signal",
            f"{measured}; the labels do belong to the inputs (the nearest other input has the same class in "
            f"{near[0]:.2f}): the model learns slowly; train longer with --steps 400 --seconds 30",
        )
    cause = (
        "labels do not belong to their inputs in the data (one of both was sorted, shuffled or filtered alone)\n"
        "training and validation number their classes differently"
    )
    return finding("signal", f"{measured}; eight samples were memorised in {eight['steps']} steps", cause)


def averaged(check: str, measured: str, facts: dict) -> dict | None:
    """Return the verdict of a low score that is an average's which has not caught up with the weights: no fault of the evaluation."""
    if not facts.get("average"):
        return None
    left, changes = facts["average"]
    measured += f": its weights are an average that is {left:.0%} the initial ones"
    if not 0 < changes < SELDOM * facts["steps"]:
        return skip(check, f"{measured}, so this rehearsal cannot decide")
    cause = "the average of weights (EMA) is updated once an epoch with a decay meant for steps: update it after optimizer.step()"
    return finding(check, f"{measured}, changed {changes} times in {facts['steps']} steps", cause)


def metric(own: dict, output: str) -> dict:
    """Check the evaluation of eight memorised samples, by the model's own outputs and by the script's printed
    metric."""
    seen = own["eval_seen"]
    known = own["before_eval"][-1] if seen else []
    if not own["one_source"]:
        return skip(
            "metric", "the evaluation reads batches of another form, so it cannot be given the memorised samples"
        )
    if not known or known[0] < 0.99 or known[1] > 0.2 * own["nll"][0]:
        return skip("metric", "the eight samples were not memorised, or not evaluated")
    got = own["eval_right"][-1] / seen[-1]
    settled = own["eval_right_batch"][-1] / seen[-1]
    words = f"{got:.2f} right in the evaluation of the eight memorised samples"
    if max(got, settled) < 0.7:
        cause = "the evaluation prepares its inputs differently from training (transform, scale, channel order, mode)"
        return averaged("metric", words, own) or finding("metric", words, cause)
    printed_score = printed(output, own.get("output_span", []))
    if printed_score is None or got < 0.95:
        return finding("metric", words)
    if printed_score < got - 0.25:
        cause = "the script computes its score wrongly (another axis, shifted labels, a wrong denominator)"
        return finding("metric", f"{words}, and the script prints an accuracy of {printed_score:.3g}", cause)
    return finding("metric", f"{words}; printed: {printed_score:.3g}")


def repeatable(facts: dict, output: str) -> bool:
    """Return whether a rehearsal on eight samples says something although it is unknown which loss should close: the script
    prints a score whose best value is known."""
    other = facts.get("token_shift") or facts.get("loss_calls")
    return bool(facts.get("loader")) and not other and "auc" in scores(output)


def closing(own: dict, others: dict) -> dict:
    """`overfit` for losses without class numbers. A loss that closes slowly is no fault: only outputs that are the same for all
    inputs are, and outputs that follow the inputs as well as they follow each other's."""
    a, b = own["left"], others["left"]
    n = min(len(a), len(b))
    if n < 12:
        return skip("overfit", f"only {n} losses on eight samples")
    ctc = own["kind"] == "ctc_loss"
    constant = math.inf if ctc else tail(own["blind"])
    start, end, exchanged = min(a[0], constant), tail(a), tail(b)
    measured = f"{own['kind']}: {a[0]:.3g} -> {end:.3g} on eight samples, {exchanged:.3g} with each other's inputs"
    measured += "" if ctc else f", {constant:.3g} with the best constant"
    if not math.isfinite(start + end + exchanged) or not constant > 1e-12:
        return skip("overfit", f"{measured}: the eight targets are the same, or the loss is not finite")
    if end < LEARNT * min(exchanged, constant) or end < 0.1 * start:
        return finding("overfit", measured, own=a[:500], others=b[:500])
    if max(own["spread"]) < 1e-6:
        measured += "; the outputs are the same for all eight samples"
        return finding("overfit", measured, CONSTANT, own=a[:500], others=b[:500])
    if end < LEARNT * exchanged:
        return skip("overfit", f"{measured}: hardly learnt in {n} steps; train longer with --seconds 30")
    if ctc or n < 100 or end > 1.1 * constant or tail(own["spread"]) < 0.05 or end < 0.95 * exchanged:
        return skip("overfit", f"{measured}: it learns too slowly to decide in {n} steps")
    cause = "targets do not belong to their inputs inside the loop (shuffled, rolled or mixed wrongly)"
    return finding("overfit", measured, cause, own=a[:500], others=b[:500])


def response(watch: dict, eight: dict) -> dict:
    """`signal` for losses without class numbers: if the loop memorises eight samples, then after two epochs the evaluation's outputs
    must follow their targets."""
    fit, closed = watch["fit"], eight["fit"]
    a = closed["left"]
    if fit["kind"] == "ctc_loss" or len(a) < 12 or tail(a) > 0.3 * min(a[0], tail(closed["blind"])):
        return skip("signal", "eight samples were not memorised: too early to say")
    half = len(fit["left"]) // 2
    own, other = (sum(fit[k][half:]) / max(1, len(fit[k][half:])) for k in ("left", "other"))
    measured = f"{fit['kind']} {own:.3g} in training, {other:.3g} with other rows' targets"
    if not watch["eval_correlation"]:
        return skip("signal", f"{measured}; no evaluation was seen whose outputs could be compared with targets")
    found, n = watch["eval_correlation"][-1]
    measured += f"; in the evaluation outputs and targets of {n} samples correlate by {found:.2f}"
    error = 3 / max(1, n) ** 0.5
    if found > error:
        return finding("signal", measured)
    early = watch["epochs"] < 2 or watch["steps"] < max(60, 0.8 * eight["steps"])
    if early or found > error / 2 or abs(found) + error > 0.3 or own < 0.85 * other:
        why = f"{watch['steps']} steps, {watch['epochs']:.1f} epochs and these samples are too few to say"
        return skip("signal", f"{measured}: {why}")
    cause = "targets do not belong to their inputs in the data (one of both was sorted, shuffled or filtered alone)"
    return finding("signal", f"{measured}; eight samples were memorised in {eight['steps']} steps", cause)


def agreement(own: dict, output: str) -> dict:
    """`metric` for losses without class numbers: what the script prints of eight memorised samples agrees with the model's own
    outputs in its evaluation."""
    fit = own["fit"]
    close = tail(fit["left"]) < 0.2 * min(fit["left"][0], tail(fit["blind"])) if fit["kind"] != "ctc_loss" else False
    got = own["eval_binary"] if fit["kind"] in BINARY else own["eval_r2"]
    what = "right" if fit["kind"] in BINARY else "of the variance explained"
    if not close or not own["one_source"] or not got or got[-1] is None:
        return against(own, output) or skip("metric", "the eight samples were not memorised, or not evaluated")
    words = f"{got[-1]:.2f} {what} in the evaluation of the eight memorised samples"
    printed = own.get("output_span") and scores(printed_between(output, own["output_span"]))
    score = printed and printed.get("acc" if fit["kind"] in BINARY else "r2")
    if got[-1] < 0.8 or score is None or not printed:
        return against(own, output) or finding("metric", words)
    name = "an accuracy" if fit["kind"] in BINARY else "an R2"
    if score < got[-1] - 0.4:
        cause = "the script computes its score from other numbers (another unit or scale, other rows, another threshold or axis)"
        return finding("metric", f"{words}, and the script prints {name} of {score:.3g}", cause)
    return finding("metric", f"{words}; printed: {score:.3g}")


def against(own: dict, output: str) -> dict | None:
    """Find a ranking score that is far below chance on samples whose loss has closed; None where nothing is known."""
    if (own.get("fit") or {}).get("own") or not all(own.get(k) for k in ("closed", "one_source", "output_span")):
        return None
    auc = scores(printed_between(output, own["output_span"])).get("auc")
    if auc is None:
        return None
    measured = f"the loss on eight samples has closed, and the script prints an AUC of {auc:.3g} for them"
    if auc > 0.25:
        return finding("metric", measured) if auc > 0.9 else None
    return finding(
        "metric",
        measured,
        "labels mean the opposite in the loss and in the evaluation, or the score has the wrong sign",
    )
