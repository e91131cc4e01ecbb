"""The gate on the untrained loss."""

import math
from collections.abc import Mapping
from itertools import combinations

from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes import named, place_weights
from trainworthy.core.gates.causes.gradient import ratio
from trainworthy.core.gates.causes.scores import noted_ranges
from trainworthy.core.gates.gate import GateContext, fetch, loss_of_parts, pick, split_evenly, total_loss, train_set
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.loop.update import denominator
from trainworthy.core.recipe.stage import Stage, categorical

EQUAL = 1e-6  # largest difference of outputs that are all equal


@gate(
    "initial-loss",
    rows="C1",
    title="the untrained loss is what the output head implies",
    reads="data model loss counts expect pretrained",
    symptom=True,
)
def initial_loss(context: GateContext) -> Finding:
    """Compare the mean loss of the untrained model on 256 training samples (or 16 times `gate_batch_size`) with the
    recipe's theoretical value."""
    run, stage = context.look()
    expected = stage.expect.initial_loss
    if expected is None:
        raise Skip("no theory says what the initial loss must be")
    if stage.pretrained is not None and not stage.expect.new_parameters:
        raise Skip("the run starts from trained weights, so the head is not untrained")
    data = train_set(stage)
    indices = pick(data, stage.expect.at_most(256, times=16), context.cfg.run.seed)
    # no more at once than evaluations
    most = len(indices) if stage.expect.batch_dependence else run.cfg.train.eval_batch_size
    parts = split_evenly(indices, most)
    with evaluating(stage.model), noted_ranges(stage.model) as ranges:
        measured = loss_of_parts(run, stage, lambda some: fetch(data, some, context.cfg.run.seed, run.device), parts)
    if callable(expected):
        expected = expected(fetch(data, indices, context.cfg.run.seed, run.device))
    tolerance, n = 0.1 * expected, len(parts[0])
    factors = {
        f"the loss is summed over the {n} samples of the batch: it is not divided": n,
        f"the loss is divided by the {n} samples of the batch twice": 1 / n,
        "the loss is in bits, not in nats: a logarithm to base 2": 1 / math.log(2),
    }
    wrong = abs(measured - expected) > tolerance
    known = named.published_loss(measured, expected) if wrong and categorical(data) else ""
    if wrong and not known:
        known = _without_added(
            _terms(run, stage, fetch(data, parts[0], context.cfg.run.seed, run.device)),
            expected,
            stage.expect.small_terms,
        )
    wrong &= not known
    why, of_half = ratio(measured, expected, factors) if wrong else "", None
    if wrong and not why:
        half = fetch(data, indices[: max(1, n // 2)], context.cfg.run.seed, run.device)
        with evaluating(stage.model):
            of_half = total_loss(run, stage, half).item()
        why = named.explain_uniform_outputs(measured, of_half, expected, n)
    equal = bool(ranges) and max(ranges) <= EQUAL
    if wrong and not why and equal:
        batch = fetch(data, parts[0], context.cfg.run.seed, run.device)
        of = max(float(v) for v in stage.counts(batch).values())
        why = place_weights.left_out(stage.model, lambda: total_loss(run, stage, batch), of, measured / expected)
    if wrong and not why and equal:
        known = named.compared_by_a_gate(stage.gates, measured, expected)
        wrong = not known
    return Finding(
        not wrong, f"loss {measured:.3f} before training{f': that of {known}' * bool(known)}", f"{expected:.3f} within {tolerance:.2f}",
        named.initial_loss_causes(measured, of_half, equal=equal),
        evidence={"measured": measured, "expected": expected}, cause=why,
    )  # fmt: skip


def _terms(run: Run, stage: Stage, batch: dict) -> dict[str, float]:
    """Return the mean of each term of the loss on a batch."""
    counts = stage.counts(batch)
    with evaluating(stage.model), run.autocast():
        return {t: (s / denominator(t, counts)).item() for t, s in stage.loss(stage.model, batch).items()}


def _without_added(terms: Mapping[str, float], expected: float, small: tuple[str, ...]) -> str:
    """Return which terms a fork has added, if the others have the expected value. `small`: terms that must be small, and so are not
    left out."""
    named_terms = [t for t in terms if t not in small]
    for n in range(1, len(named_terms)):
        for some in combinations(named_terms, n):
            rest = sum(v for t, v in terms.items() if t not in some)
            if abs(rest - expected) <= 0.1 * expected:
                more = ", ".join(f"`{t}` ({terms[t]:.3f})" for t in some)
                return f"the declared terms and of {more}, which other gates check"
    return ""
