"""Checks what a script's own loop does with changed data: eight samples repeatedly, these with each other's inputs, and
without inputs."""

import re

NEEDED = {
    "overfit": "on the same eight samples the loss gets lower than with each other's inputs",
    "signal": "new samples are answered better than by the most frequent class, once eight can be memorised",
    "metric": "eight memorised samples are right in the evaluation, and in the score that the script prints",
}


def judge(watch: dict, eight: dict, others: dict, output: str = "") -> list[dict]:
    """Compare the records of three rehearsals."""
    facts = watch.get("facts", {})
    why = unsuitable(facts)
    if why:
        return [{"id": id, "skip": why} for id in NEEDED]
    for name, one in (("eight", eight), ("others", others)):
        if not one or one.get("why") == "it raised":
            return [
                {"id": id, "skip": f"the rehearsal '{name}' did not run: {one.get('raised', 'no record')}"[:200]}
                for id in NEEDED
            ]
    if not others["facts"].get("changed"):
        return [
            {"id": id, "skip": "which entry of a batch is the target, and which are inputs, is not clear"}
            for id in NEEDED
        ]
    return [overfit(eight["facts"], others["facts"]), signal(facts, eight["facts"]), metric(eight["facts"], output)]


def unsuitable(facts: dict) -> str:
    """Return why the three cannot be compared; empty if they can."""
    if not facts.get("loss_calls") and not facts.get("declared"):  # declared: the caller named the target
        return "no loss over class targets was seen: the data's role in the loss is unknown"
    if facts.get("optimizers", 0) != 1 and not facts.get("one_loss"):
        return f"{facts.get('optimizers', 0)} optimisers: which loss should close is unknown"
    if facts.get("token_shift"):
        return "the targets are the input's own tokens: there are no other inputs to give"
    if not facts.get("loader"):
        return "no DataLoader feeds the loop (name the function that returns a batch: --batches NAME)"
    return ""


def tail(rows: list[float]) -> float:
    """Mean of the last eighth."""
    k = max(3, len(rows) // 8)
    return sum(rows[-k:]) / max(1, len(rows[-k:]))


def overfit(own: dict, others: dict) -> dict:
    """Compare training on eight samples with training on the same eight with each other's inputs."""
    a, b = own["nll"], others["nll"]
    n = min(len(a), len(b))
    if n < 12:
        return {"id": "overfit", "skip": f"only {n} losses on eight samples"}
    start, end, blind = a[0], tail(a), tail(b)
    right = tail(own["train_accuracy"])
    told = f"loss {start:.3g} -> {end:.3g} on eight samples, {blind:.3g} with each other's inputs"
    told += f"; {right:.2f} right" if own["train_accuracy"] else ""
    if end < 0.8 * blind or end < 0.1 * start:
        return {
            "id": "overfit",
            "ok": True,
            "measured": told,
            "cause": "",
            "evidence": {"own": a[:500], "others": b[:500]},
        }
    if end > 0.9 * start and n < 100:
        return {"id": "overfit", "skip": f"{told}: the rate is too low for {n} steps to say"}
    if end > 0.95 * start and blind > 0.95 * start:
        return {"id": "overfit", "skip": f"{told}: nothing is learnt in {n} steps, the rate may still be rising"}
    cause = (
        "labels do not belong to their inputs inside the loop (shuffled, rolled or mixed wrongly)\n"
        "the input does not reach the output (overwritten, zeroed, averaged over the batch)"
    )
    return {
        "id": "overfit",
        "ok": False,
        "measured": told,
        "cause": cause,
        "evidence": {"own": a[:500], "others": b[:500]},
    }


def signal(watch: dict, eight: dict) -> dict:
    """If the script memorises eight samples in fewer steps than it trained on its own data, new samples must score
    above chance."""
    memorised = tail(eight["train_accuracy"]) > 0.9 and tail(eight["nll"]) < 0.3 * eight["nll"][0]
    enough = watch["epochs"] >= 2 and watch["steps"] >= max(60, 0.8 * eight["steps"])
    if not memorised or not enough or not watch["eval_seen"] or watch["majority"] > 0.5:
        return {
            "id": "signal",
            "skip": f"{watch['steps']} steps, {watch['epochs']:.1f} epochs: too early to say, or not evaluated by class",
        }
    n, chance = watch["eval_seen"][-1], watch["majority"]
    got = max(watch["eval_right"][-1], watch["eval_right_batch"][-1]) / n
    error = (chance * (1 - chance) / n) ** 0.5
    told = f"{got:.3f} of {n} evaluated samples right after {watch['epochs']:.1f} epochs, the most frequent class has {chance:.3f}"
    if got > chance + 3 * error:
        return {"id": "signal", "ok": True, "measured": told, "cause": "", "evidence": {}}
    near = watch.get("neighbours") or [0.0, 1, 1.0]
    late = tail(watch["train_accuracy"])
    if near[0] > near[2] + 3 * (near[2] * (1 - near[2]) / near[1]) ** 0.5 and late < chance + 0.15:
        return {
            "id": "signal",
            "skip": f"{told}; the labels do belong to the inputs (the nearest other input has the same class in "
            f"{near[0]:.2f}): the model learns slowly, --steps 400 --seconds 30 looks longer",
        }
    cause = (
        "labels do not belong to their inputs in the data (one of both was sorted, shuffled or filtered alone)\n"
        "training and validation number their classes otherwise"
    )
    return {
        "id": "signal",
        "ok": False,
        "measured": f"{told}; eight samples were memorised in {eight['steps']} steps",
        "cause": cause,
        "evidence": {},
    }


def metric(own: dict, output: str) -> dict:
    """Check the evaluation of eight memorised samples, by the model's own outputs and by the script's printed
    metric."""
    seen = own["eval_seen"]
    known = own["before_eval"][-1] if seen else []
    if not known or known[0] < 0.99 or known[1] > 0.2 * own["nll"][0]:
        return {"id": "metric", "skip": "the eight samples were not memorised, or not evaluated"}
    got = own["eval_right"][-1] / seen[-1]
    settled = own["eval_right_batch"][-1] / seen[-1]
    if max(got, settled) < 0.7:
        return {
            "id": "metric",
            "ok": False,
            "measured": f"{got:.2f} right in the evaluation of the eight memorised samples",
            "cause": "the evaluation feeds its inputs otherwise than training does (transform, scale, channel order, mode)",
            "evidence": {},
        }
    told = printed(output, own.get("said", []))
    words = f"{got:.2f} right in the evaluation of the eight memorised samples"
    if told is None or got < 0.95:
        return {"id": "metric", "ok": True, "measured": words, "cause": "", "evidence": {}}
    if told < got - 0.25:
        return {
            "id": "metric",
            "ok": False,
            "measured": f"{words}, and the script prints an accuracy of {told:.3g}",
            "cause": "the script counts wrongly (another axis, shifted labels, a wrong denominator)",
            "evidence": {},
        }
    return {"id": "metric", "ok": True, "measured": f"{words}; printed: {told:.3g}", "cause": "", "evidence": {}}


def printed(output: str, said: list[int]) -> float | None:
    """The best accuracy, from 0 to 1, in what was printed between the last whole evaluation and the next batch."""
    if not said:
        return None
    text = output.encode()[said[0] : said[1] if said[1] >= 0 else None].decode(errors="replace")
    found = re.findall(r"(?i)\bacc\w*\b[^\d\n]{0,16}(?:(\d+)\s*/\s*(\d+)|(\d+(?:\.\d+)?)\s*(%)?)", text)
    values = []
    for right, of, number, percent in found:
        if right:
            values += [int(right) / int(of)] if int(of) else []
        else:
            values.append(float(number) / 100 if percent or float(number) > 1 else float(number))
    return max(values, default=None)
