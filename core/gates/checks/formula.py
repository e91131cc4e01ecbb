"""Compares a loss with an independently written formula: each term, sample by sample, and the gradient of the whole.

For each term, a recipe's gates give the formula, other published forms that a fork may use on purpose, and the values that known
mistakes would give, so that a failure can name the mistake. `gate_of` makes the gate for recipes that train on a data set.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.modes import in_mode, without_random_hooks
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes import place_weights
from trainworthy.core.gates.gate import Gate, GateContext, fetch, pick
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.recipe.stage import Stage, batch_size

WEIGHT = 1e-2  # relative: a weight is a setting's
SAMPLES = 8  # compared one by one
TITLE = "each term of the loss is its formula, sample by sample, with the formula's gradient"
UNKNOWN = "no known mistake fits: compare the term with its formula line by line"
UNKNOWN_GRADIENT = "the gradient is not that of the value: a detach() is missing or too many"
ON_PURPOSE = (
    "on purpose: add what is new as one more loss term, with a name of its own, or accept it: "
    '--gates.waive formula --gates.because "..."'
)


@dataclass
class Statement:
    """The independent formula of one loss term, per sample (B,)."""

    right: dict[str, Tensor]
    """The formula first, then other published forms."""
    wrong: dict[str, Tensor] = field(default_factory=dict)
    """{name of a known mistake: the values that it gives}."""
    optional: bool = False
    """Whether the term may be zero, because its weight is a setting that may be 0."""
    own: Callable[[], str] | None = None
    """Check for an objective of the recipe's own, called if no form fits: returns what is wrong, or an empty string. Without it, an
    unknown form fails."""
    setting: str = ""
    """The setting that is the term's weight."""


Statements = dict[str, Statement]


def gate_of(state: Callable[[GateContext, Stage, dict], Statements], *, rows: str, causes: str) -> Gate:
    """Return the gate `formula` of a recipe with a training set. `state(context, stage, batch)` computes the formula of each term from
    the model's outputs. The gate uses the rehearsed model, because zero-initialised layers hide most mistakes at the start."""

    @gate("formula", rows=rows, title=TITLE, reads="data model loss counts train", explains=True, compares_loss=True)
    def check(context: GateContext) -> Finding:
        run, stage, _ = rehearsed(context)
        if stage.expect.batch_dependence:
            raise Skip(f"by design: {stage.expect.batch_dependence}")
        data, seed = stage.data["train"], context.cfg.run.seed
        batch = fetch(data, pick(data, stage.expect.at_most(SAMPLES), seed), seed, run.device)
        one = compared(run, stage, batch, lambda: state(context, stage, batch))
        return finding(run, one, batch, (*causes.splitlines(), ON_PURPOSE))

    return check


@dataclass
class Comparison:
    """Result of comparing a loss with its formula."""

    samples: int = 0
    wrong: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    """Loss terms without a formula."""
    forms: dict[str, str] = field(default_factory=dict)
    """{term: the published form that it equals, or ""}."""


def finding(run: Any, one: Comparison, batch: dict, causes: tuple[str, ...]) -> Finding:
    """Return the finding on a comparison. `causes`: likely ones, after those that the comparison found."""
    exact, own = limit(run, 1e-4), f"; of the recipe's own: {', '.join(one.own)}" if one.own else ""
    return Finding(
        not one.wrong, "; ".join(one.wrong) or f"{one.samples} samples: {', '.join(one.remarks)}{own}",
        f"the formula within {exact:g}, its gradient within {10 * exact:g}", "\n".join([*dict.fromkeys(one.causes), *causes]),
        evidence={"compared": one.remarks, "own": one.own}, batch=batch if one.wrong else None, cause=known(one.causes),
    )  # fmt: skip


def known(causes: list[str]) -> str:
    """Return the first cause that is a known mistake."""
    return next((c for c in causes if not c.endswith((UNKNOWN, UNKNOWN_GRADIENT))), "")


def compared(
    run: Any, stage: Stage, batch: dict, state: Callable[[], Statements], *, training: bool = False
) -> Comparison:
    """Compare the stage's loss of a batch, and of each of its samples alone, with the statements. `training`: in train mode, for trainers
    whose loss depends on the mode."""
    got, whole = each_alone(run, stage, batch, training=training)
    with run.autocast(), in_mode(stage.model, training=False):
        due = {k: summed(s) for k, s in state().items()}
    again = lambda: stage.loss(stage.model, batch)  # noqa: E731
    return of_terms(run, stage.model, got, whole, due, lambda term: _places(run, stage, batch, term, state), again)


def each_alone(run: Any, stage: Stage, batch: dict, *, training: bool = False) -> tuple[dict, dict]:
    """Return the loss terms of each sample alone, (B,), and those of the batch."""
    model = stage.model
    with run.autocast(), in_mode(model, training=training):
        singles = [stage.loss(model, row(batch, i)) for i in range(batch_size(batch))]
        got = {k: torch.stack([one[k].detach() for one in singles]).float() for k in singles[0]}
        del singles
        return got, stage.loss(model, batch)


def of_terms(
    run: Any, model: nn.Module, got: dict, whole: dict, due: Statements, places: Callable[[str], str] = lambda _: "",
    again: Callable[[], dict] | None = None,
) -> Comparison:  # fmt: skip
    """Compare each term. `places`: says where the output is weighed otherwise than by the formula, if no known mistake fits. `again`: the
    loss of the batch, to see what it makes of a setting."""
    got, whole, due, own = paired(got, whole, due)
    out = Comparison(len(next(iter(got.values()))), own=own)
    for term, statement in due.items():
        with without_random_hooks(model.parameters()):
            fault, remark, cause, out.forms[term] = compare(
                term, statement, got[term], whole[term], model, limit(run, 1e-4)
            )
        if again and statement.setting and out.forms[term]:
            factor = _gap(got[term], statement.right[out.forms[term]].detach())[1]
            doubled = _doubled(run, statement.setting, again, term)
            if doubled and (weight := _weighed(statement.setting, doubled, factor)):
                fault = cause = f"{term}: {weight}"
        if fault and cause == f"{term}: {UNKNOWN}" and (found := places(term)):
            cause = f"{term}: {found}"
        out.wrong += [fault] * bool(fault)
        out.remarks += [remark] * bool(remark)
        out.causes += [cause] * bool(cause)
    return out


def _places(run: Any, stage: Stage, batch: dict, term: str, state: Callable[[], Statements]) -> str:
    """Which places of the output a term weighs otherwise than its formula, or nothing."""

    def total() -> Tensor:
        return stage.loss(stage.model, batch)[term].float()

    def due() -> Tensor:
        return next(iter(state()[term].right.values())).float().sum()

    try:
        with run.autocast():
            return place_weights.named(stage.model, total, due, limit(run, 1e-4))
    except KeyError:  # the loss names its terms otherwise than the formula
        return ""


def row(batch: dict, i: int) -> dict:
    """Sample `i` of a batch, as a batch of one."""
    return {k: v[i : i + 1] if isinstance(v, Tensor) and v.dim() else v for k, v in batch.items()}


def limit(run: Any, exact: float) -> float:
    """`exact` in fp32, wider in 16 bits."""
    return exact if run.precision == "fp32" else max(exact, 5e-2)


def summed(s: Statement) -> Statement:
    """Reduce every form to one number per sample (sequences are summed)."""

    def rows(forms: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v.float().flatten(1).sum(1) if v.ndim > 1 else v.float() for k, v in forms.items()}

    return replace(s, right=rows(s.right), wrong=rows(s.wrong))


def term_of(terms: dict[str, Tensor], name: str, stated: Collection[str]) -> Tensor:
    """Return a term of a loss, or the sum of those that no formula states by name: what `paired` compares in its place."""
    return terms[name] if name in terms else sum(v for k, v in terms.items() if k not in stated)  # type: ignore[return-value]


def paired(got: dict, whole: dict, due: dict) -> tuple[dict, dict, dict, list[str]]:
    """Match terms by name. One term in the place of one that may have another form is compared with that. If more terms have other names, their
    sum is compared with the sum of the formulas that no name fits."""
    free, extra = [k for k, s in due.items() if k not in got and s.own is not None], [k for k in got if k not in due]
    if [len(free), len(extra)] == [1, 1] and len(due) > 1:
        got, whole = ({free[0] if k == extra[0] else k: v for k, v in terms.items()} for terms in (got, whole))
        extra = []
    missing = [k for k, s in due.items() if k not in got and not s.optional]
    if len(missing) == len(due) or (missing and extra and {*missing} <= {*free}):
        kept = {k: s for k, s in due.items() if k in got}
        own = [due[k].own for k in missing if due[k].own is not None]
        right = {"the sum of its terms": sum(next(iter(due[k].right.values())) for k in missing)}
        together = Statement(right, own=(lambda: next(filter(None, (check() for check in own)), "")) if own else None)
        got, whole = ({**{k: terms[k] for k in kept}, "loss": sum(terms[k] for k in extra)} for terms in (got, whole))
        return got, whole, {**kept, "loss": together}, []
    if missing:
        zero = torch.zeros_like(next(iter(got.values())))
        got, whole = got | dict.fromkeys(missing, zero), whole | dict.fromkeys(missing, zero.sum())
    return got, whole, {k: s for k, s in due.items() if k in got}, [k for k in got if k not in due]


def compare(
    term: str, s: Statement, got: Tensor, whole: Tensor, model: nn.Module, exact: float
) -> tuple[str, str, str, str]:
    """Compare one term; return (what is wrong, what was found, the cause that fits, the published form that fits), each may be ""."""
    if s.optional and not got.any():
        return "", "", "", ""
    gaps = {name: _gap(got, form.detach()) for name, form in s.right.items()}
    fit = {name: factor for name, (gap, factor) in gaps.items() if gap <= exact and 0.1 <= factor <= 10}
    first = next(iter(s.right.values())).detach()
    if not fit:
        size = first.abs() + first.abs().mean()
        far = (got - first).abs() / size.clamp_min(1e-30)
        i = far.argmax().item()
        cause = _cause(s, got, exact)
        if s.own is not None and cause == UNKNOWN:
            fault = s.own()
            remark = f"{term}: a form of the recipe's own, which pulls each sample to its target" if not fault else ""
            return (f"{term}: {fault}" if fault else ""), remark, f"{term}: {fault or UNKNOWN}", ""
        fault = f"{term}: {int((far > exact).sum())} of {len(got)} samples differ, e.g. {got[i]:.4g}, by the formula {first[i]:.4g}"
        return fault, "", f"{term}: {cause}", ""
    name, factor = next(iter(fit.items()))
    due, total = (factor * s.right[name].sum()).detach(), whole.detach()
    if abs(total - due) > 10 * exact * got.abs().sum():
        mean = len(got) * total.abs() < 1.5 * due.abs()
        part = (
            "the loss is a mean: return the SUM, core divides it" if mean else "samples see each other (see dependency)"
        )
        fault = f"{term}: each sample equals the formula, but the batch gives {total:.4g} and the sum of its samples {due:.4g}"
        return fault, "", f"{term}: {part}", ""
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
    mine, far = _gradient(whole, weights), []
    for name, factor in fit.items():
        theirs = _gradient(factor * s.right[name].sum(), weights)
        size, error = _norm(theirs), _norm({n: mine[n] - theirs[n] for n in weights})
        if error <= 10 * exact * max(size, 1e-12) or (s.optional and size == 0):
            times = f" (times {factor:.3g})" if abs(factor - 1) > 1e-3 else ""
            return "", f"{term}: {name} within {gaps[name][0]:.1e}{times}", "", name
        far.append((error / max(size, 1e-12), theirs))
    fault = f"{term}: the value equals the formula's, but the gradient differs by {far[0][0]:.2g} of its length"
    return fault, "", f"{term}: {_gradient_cause(s, got, weights, mine, far[0][1], exact)}", ""


def _doubled(run: Any, setting: str, loss: Callable[[], dict], term: str) -> float:
    """Return how many times as large a term of the loss is with twice the setting; 0 if the loss has no such term."""
    group, _, name = setting.rpartition(".")
    cfg = attrgetter(group)(run.cfg) if group else run.cfg
    own = getattr(cfg, name)
    with torch.no_grad(), run.autocast():
        before = loss().get(term)
        setattr(cfg, name, 2 * own)
        try:
            return (loss()[term] / before).item() if before is not None and before else 0.0
        finally:
            setattr(cfg, name, own)


def _weighed(setting: str, doubled: float, factor: float) -> str:
    """Return what is wrong with the weight of a term that is `factor` times its formula; "" for a weight of the fork's own, which the setting
    does not change, and for half or twice the setting's: a squared error has its 0.5 or not."""
    if abs(doubled - 1) <= WEIGHT:
        return ""
    if abs(doubled / 2 - 1) > WEIGHT:
        return f"with twice the setting {setting} the term is {doubled:.3g} times as large: it is applied more than once, or divides"
    if min(abs(factor / usual - 1) for usual in (0.5, 1, 2)) <= WEIGHT:
        return ""
    return f"its weight follows the setting {setting}, and is {factor:.3g} times what that says"


def _gradient_cause(s: Statement, got: Tensor, weights: dict, mine: dict, theirs: dict, exact: float) -> str:
    """Return the cause that fits if the values are right and the gradients are not."""
    for name, form in s.wrong.items():
        gap, factor = _gap(got, form.detach())
        if gap <= 10 * exact:
            other = _gradient(factor * form.sum(), weights)
            if _norm({n: mine[n] - other[n] for n in mine}) <= 10 * exact * _norm(mine):
                return name
    along = sum((mine[n] * theirs[n]).sum() for n in mine).item()
    if along < -0.99 * _norm(mine) * _norm(theirs):
        return "its gradient has the wrong sign"
    deaf = sorted({n.split(".")[0] for n in mine if theirs[n].any() and not mine[n].any()})
    reached = sorted({n.split(".")[0] for n in mine if mine[n].any() and not theirs[n].any()})
    if deaf:
        return f"a detach() or no_grad() in the term: {', '.join(deaf)} gets no gradient from it"
    if reached:
        return f"a detach() is missing: {', '.join(reached)} must get no gradient from the term"
    return UNKNOWN_GRADIENT


def _norm(parts: dict[str, Tensor]) -> float:
    return sum(g.square().sum() for g in parts.values()).sqrt().item()


def _gap(got: Tensor, due: Tensor) -> tuple[float, float]:
    """(largest difference of a sample, as a share of its size and the mean size, after a constant factor, that factor)."""
    if not due.any():
        return (0.0, 1.0) if not got.any() else (math.inf, 1.0)
    factor = ((got @ due) / (due @ due)).item()
    factor = 1.0 if abs(factor - 1) < 1e-3 else factor
    size = (factor * due).abs()
    return ((got - factor * due).abs() / (size + size.mean()).clamp_min(1e-30)).max().item(), factor


def _cause(s: Statement, got: Tensor, exact: float) -> str:
    """Return the known mistake that fits. Where another objective may be right, only exactly: with nearly equal outputs it is close to a
    multiple of some other one."""
    near = 10 * exact if s.own is None else exact
    for name, form in s.wrong.items():
        gap, factor = _gap(got, form.detach())
        if gap <= near and 0.1 <= factor <= 10:
            return name
    if not got.any():
        return "it is zero, or missing"
    for name, form in s.right.items():
        gap, factor = _gap(got, form.detach())
        if gap <= near:
            return f"its sign is wrong ({name})" if factor < 0 else f"{factor:.3g} times {name}"
    return UNKNOWN


def _gradient(total: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    given: Any = [None] * len(weights)
    if total.requires_grad:
        given = torch.autograd.grad(total, list(weights.values()), retain_graph=True, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(weights.items(), given, strict=True)}
