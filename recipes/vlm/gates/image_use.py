"""Gates on what the answers depend on: the image, and not the question alone (X5), from the first step of a later stage on (X2)."""

import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.checks.learning import OVERFIT_SAMPLES
from trainworthy.core.gates.gate import GateContext, fetch, pick
from trainworthy.core.loop.run import Rehearsal, Run, evaluating
from trainworthy.core.recipe.stage import Stage, View
from trainworthy.recipes.vlm.data import questions
from trainworthy.recipes.vlm.gates.towers import BATCH

PRIOR = 0.8  # largest accuracy of an answerer that sees the questions only
PAIRS = 4
SEARCHED = 5000  # samples
HELD_OUT = 200
OTHERS = 4  # other images that a sample is tried with
ERRORS, LEAST = 3.0, 1e-3  # standard errors, and share of the loss, by which a sample's own image must be better


@gate("aligned", rows="X2", title="this stage starts from a trained projector", reads="data model loss")
def aligned(context: GateContext) -> Finding:
    """Before the first step of this stage, the right answers must be likelier with a sample's own image than with another's: on validation
    samples if the previous stage was trained, else on the eight it was rehearsed with. It uses the loss per sample, which shows what a
    projector has learnt long before whole answers are right."""
    run, stage = context.build(Rehearsal(steps=1))
    if context.follows == "none":
        raise Skip("no stage before this one")
    name = "val" if context.follows == "trained" else "train"
    data, most = stage.data[name], HELD_OUT if name == "val" else OVERFIT_SAMPLES
    indices = pick(data, min(most, len(data)), context.cfg.run.seed)
    n = len(indices)
    own = _nats(run, stage, View(data, indices))
    shifts = sorted({1 + k * (n - 1) // OTHERS for k in range(OTHERS)} - {n}) if n > 1 else []
    if not shifts:
        raise Skip("there is only one sample, so no other picture to compare with")
    others = torch.stack(
        [_nats(run, stage, View(data, indices, swap=[(i + k) % n for i in range(n)])) for k in shifts]
    ).mean(0)
    gain = others - own
    spread = (gain.std() / n**0.5).item()
    mean, needed = gain.mean().item(), max(ERRORS * spread, LEAST * own.mean().item())
    return Finding(
        mean > needed, f"before the first step the loss is {own.mean():.3f} nats per answer token; with another sample's picture it "
        f"changes by {mean:+.3f} (+- {spread:.3f}, {n} samples)",
        f"with another sample's picture the loss is higher by more than {needed:.3f}",
        "the stage before was skipped, or ended before its projector learnt anything (--align.epochs)\n"
        "the trained projector was not loaded: other parameter names under strict=False, or a new projector is created after loading\n"
        "the projector was trained for another encoder or language model",
        evidence={"own": own.mean().item(), "gain": mean, "needed": needed},
    )  # fmt: skip


def _nats(run: Run, stage: Stage, view: View) -> Tensor:
    """Return the loss per token of each sample's answers in nats, (N,)."""
    found = []
    with evaluating(stage.eval_model), run.autocast():
        for start in range(0, len(view), BATCH):
            batch = fetch(view, list(range(start, min(start + BATCH, len(view)))), None, run.device)
            lost, tokens = to_double(questions.surprise(stage.eval_model(batch), batch["labels"])).unbind(1)
            found.append((lost / tokens).cpu())
    return torch.cat(found)


@gate("language-prior", rows="X5", title="questions alone do not predict the answers", reads="data")
def language_prior(context: GateContext) -> Finding:
    """Scores the most common training answer to each question on the validation images."""
    _, stage = context.build(Rehearsal(steps=1))
    guess = questions.majority(stage.data["train"].source)
    share = questions.blindly(stage.data["val"].source, guess)
    kinds = ", ".join(f"{k}: {g}" for k, g in list(zip(stage.data["train"].source.kinds, guess, strict=True))[:6])
    return Finding(
        share <= PRIOR, f"the most common answer to each question ({kinds}) is right for {share:.1%} of the held-out questions",
        f"at most {PRIOR:.0%}",
        "the questions are not balanced: ask each one about pictures with different answers, best about counterfactual pairs",
        evidence={"share": share},
    )  # fmt: skip


@gate("pairs", rows="X5", title="the model learns counterfactual pairs, and its answers depend on the image")
def pairs(context: GateContext) -> Finding:
    """Trains on four pairs, each one scene with and without a change, with the recipe's own `train()`. The loss can only close through the
    image. Then each sample gets its counterfactual image: no answer that differs within a pair may stay. Without such pairs, two samples
    with the same first question and different answers are one: with each other's images their loss must rise."""
    _, probe = context.build(Rehearsal(steps=1))
    data = probe.data["train"]
    indices = _some_pairs(data)
    if not indices:
        return _same_questions(context, data)
    found: dict = {"curve": []}

    def closed(stage: Stage, step: int) -> bool:
        if step % 10:
            return False
        found["curve"].append((step, run.measure(stage, View(data, indices)).get("pairs", 0.0)))
        return found["curve"][-1][1] == 1.0

    steps = 2 * probe.expect.overfit_steps
    run, stage = context.build(
        Rehearsal(steps=steps, samples=indices, fixed=True, peak=True, batch_size=len(indices), watch=closed)
    )
    context.train(context.cfg, run, stage)
    partner = [i ^ 1 for i in range(len(indices))]
    own, swapped = (_paired(run, stage, View(data, indices, swap=swap)) for swap in (None, partner))
    done = found["curve"][-1][0]
    return Finding(
        own == 1.0 and swapped <= 0.25, f"{PAIRS} pairs after {done} steps: {own:.0%} of the answers that differ within a pair are right, "
        f"{swapped:.0%} with each other's picture", "100%, and at most 25% with exchanged pictures",
        "the picture does not reach the language model: the projector is frozen or not loaded, or image positions are cut\n"
        "all features of a picture are equal (they are pooled, or the encoder ignores its input)\n"
        "the answer reaches the model without the picture", evidence=found,
    )  # fmt: skip


def _same_questions(context: GateContext, data: questions.Questions) -> Finding:
    """The gate for data without counterfactual pairs."""
    indices = _asked_alike(data)
    if len(indices) < 2 * PAIRS:
        raise Skip(
            "no counterfactual pairs in the data, and too few samples with the same question and different answers"
        )
    n, found = len(indices), {"curve": []}
    partner = [i ^ 1 for i in range(n)]

    def closed(stage: Stage, step: int) -> bool:
        if step and step % 10 == 0:
            own, other = (_nats(run, stage, View(data, indices, swap=swap)) for swap in (None, partner))
            gain = other - own
            found["own"], found["gain"] = own.mean().item(), gain.mean().item()
            found["needed"] = max(ERRORS * gain.std().item() / n**0.5, LEAST * found["own"])
            found["curve"].append((step, found["gain"]))
        return found.get("gain", 0.0) > found.get("needed", 0.0)

    plan = Rehearsal(
        steps=2 * context.look()[1].expect.overfit_steps,
        samples=indices,
        fixed=True,
        peak=True,
        batch_size=n,
        watch=closed,
    )
    run, stage = context.build(plan)
    context.train(context.cfg, run, stage)
    return Finding(
        closed(stage, 10), f"{n} samples, two and two with one question and different answers, after {found['curve'][-2][0]} steps: the loss "
        f"is {found['own']:.3f} nats a token, with each other's picture it changes by {found['gain']:+.3f}",
        f"with each other's picture the loss is higher by more than {found['needed']:.3f}: a smaller difference cannot be distinguished from noise",
        "the picture does not reach the language model: the projector is frozen or not loaded, or image positions are cut\n"
        "all features of a picture are equal (they are pooled, or the encoder ignores its input)\n"
        "the answer reaches the model without the picture\n"
        "not learnt in so few steps: the encoder cannot tell these pictures apart (--encoder cells knows digits only), or the rate is too high "
        "(--language-lr; what range-test suggests)", evidence=found,
    )  # fmt: skip


def _asked_alike(data: questions.Questions) -> list[int]:
    """Return the positions of samples with the same first question and different answers, the two of a pair next to each other."""
    waiting: dict[str, tuple[int, str]] = {}
    found: list[int] = []
    for i in range(min(len(data), SEARCHED)):
        first = data.source.questions(data.kept[i])[0]
        earlier = waiting.get(first.question)
        if earlier is None:
            waiting[first.question] = (i, first.answer)
        elif earlier[1] != first.answer:
            found += [waiting.pop(first.question)[0], i]
        if len(found) == 2 * PAIRS:
            break
    return found


def _some_pairs(data: questions.Questions) -> list[int]:
    """Return the positions of the first pairs, both members of each next to each other."""
    where: dict[int, list[int]] = {}
    for i in range(len(data)):
        for one in data.source.questions(data.kept[i]):
            if one.pair >= 0:
                where.setdefault(one.pair, []).append(i)
        if sum(len(two) == 2 for two in where.values()) == PAIRS:
            break
    return [i for two in where.values() if len(two) == 2 for i in two]


def _paired(run: Run, stage: Stage, view: View) -> float:
    """Return the accuracy on the questions that differ within pairs."""
    batch = fetch(view, list(range(len(view))), None, run.device)
    with evaluating(stage.eval_model), run.autocast():
        found = questions.verdicts(stage.eval_model(batch), batch)
    return to_double(found[found[:, 2] >= 0, 0]).mean().item()
