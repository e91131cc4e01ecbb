"""Gates of control recipes on the configured run: the loss against its formula, training targets against their definition, and
batch entries that the loss ignores.

They require what recipes/rl/control/gates/agents.py requires, and a `Subject` with `formula` and `targets`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.checks import formula as stated_by
from trainworthy.core.gates.checks.formula import limit
from trainworthy.core.gates.gate import Gate, GateContext
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.rl.control.data.replay import Replay
from trainworthy.recipes.rl.control.gates import definitions, formulas, own_forms, soft_forms
from trainworthy.recipes.rl.control.gates.recording import Seen, seen

ROWS = 64  # samples of a batch that are compared one by one
NEAR = 2e-3  # distance at which statistics are equal, as a share of the standard deviation or variance
ON_PURPOSE = (
    "on purpose: add what is new as a loss term with a name of its own, state your own formula (`formula=` of gates.Subject, a "
    'function like those of recipes/rl/control/gates/formulas.py), or accept it: --gates.waive formula --gates.because "..."'
)

OVERWEIGHTED = (
    "the exponent of the importance weights has the wrong sign: weight = (probability relative to uniform) ** -beta (Schaul 2016), so that "
    "transitions which are drawn more often count less"
)

TARGETS_ON_PURPOSE = (
    "on purpose (soft or Munchausen targets): state your own definition (`targets=` of gates.Subject, a function like those of "
    'recipes/rl/control/gates/definitions.py; None: not compared), or accept it: --gates.waive returns --gates.because "..."'
)


# --------------------------------------------------------------------------------------------------------------- formula
def formula_gate(formula: Callable | None) -> Gate:
    title = "each term of the loss is its formula, sample by sample, with the formula's gradient"

    @gate("formula", rows="R3 R5", title=title, explains=True, compares_loss=True)
    def check(context: GateContext) -> Finding:
        """Compares the last batch of two rollouts with recipes/rl/control/gates/formulas.py: the value of each sample and the gradient of the sum.
        Stored numbers get noise, so that old and new policy differ and every clip is active. A policy's or value's term of another form passes
        if it draws every sample along its advantage, or to its target (own_forms.py)."""
        if formula is None:
            raise Skip("there is no formula for this objective (`formula=` of gates.Subject)")
        found = stated_by.finding(seen(context).run, *compared(context, formula), (ON_PURPOSE,))
        if not found.ok and not found.cause and (ignored := _ignored(context, formula)):
            found.cause = f"the loss never reads `{ignored}`, on which its formula depends: it is the same with other samples' entries"
        return found

    return check


def _ignored(context: GateContext, formula: Callable) -> str:
    """Return the first entry of a batch that changes the formula and not the loss; empty if there is none."""
    found, draws = seen(context), torch.Generator().manual_seed(context.cfg.run.seed)
    run, stage, model = found.run, found.stage, found.stage.model.eval()

    def terms(one: dict) -> Tensor:
        with torch.no_grad(), run.autocast():
            return torch.stack([v.float() for v in stage.loss(model, one).values()])

    before = terms(found.batch)
    for key, value in found.batch.items():
        if not isinstance(value, Tensor) or len(value) < 2 or torch.equal(other := _other(value, draws), value):
            continue
        if not torch.equal(terms(found.batch | {key: other}), before):
            continue
        with torch.no_grad(), run.autocast():
            due = [_stated(formula, context.cfg, model, one, {}) for one in (found.batch, found.batch | {key: other})]
        declared = [[next(iter(statement.right.values())) for statement in one.values()] for one in due]
        if not all(map(torch.equal, *declared)):
            return key
    return ""


def compared(context: GateContext, formula: Callable) -> tuple[stated_by.Comparison, dict]:
    """Compare the loss of a real batch with its formula; return the differences, and the batch."""
    return context.once("rl-formula", lambda: _compared(context, formula))


def _compared(context: GateContext, formula: Callable) -> tuple[stated_by.Comparison, dict]:
    found = seen(context)
    run, stage, batch = found.run, found.stage, _moved(found.batch, context.cfg.run.seed)
    if stage.expect.batch_dependence:
        raise Skip(f"by design: {stage.expect.batch_dependence}")
    model = stage.model.eval()
    got, whole = stated_by.each_alone(run, stage, batch)
    with run.autocast():
        due = _stated(formula, context.cfg, model, batch, got)
    for term, own in _own(context.cfg, lambda one: stage.loss(model, one), model, batch, due).items():
        due[term].own = own
    return stated_by.of_terms(run, model, got, whole, due, again=lambda: stage.loss(model, batch)), batch


def _own(cfg: Any, loss: Callable, model: nn.Module, batch: dict, due: formulas.Statements) -> dict[str, Callable]:
    """Return the check of each term that may have another form."""
    if due.keys() == {"critic", "policy", "temperature"} and {"noise", "return"} <= batch.keys():
        return soft_forms.checks(cfg, loss, model, batch)
    return own_forms.checks(loss, model, batch, due)


def _stated(formula: Callable, cfg: Any, model: nn.Module, batch: dict, got: dict) -> formulas.Statements:
    try:
        return {k: stated_by.summed(s) for k, s in formula(cfg, model, batch, got).items()}
    except (KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        remark = f"{type(error).__name__}: {error}"
        raise Skip(f"the formula does not fit this model or batch ({remark}); {ON_PURPOSE}") from None


def _moved(batch: dict, seed: int) -> dict:
    """Return at most ROWS rows with noise on stored numbers and on the weights of samples."""
    draws = torch.Generator().manual_seed(seed)
    out = {k: v[:ROWS].clone() if isinstance(v, Tensor) else v for k, v in batch.items()}
    for key, size in formulas.MOVES.items():
        if key in out:
            out[key] = out[key] + size * torch.randn(out[key].shape, generator=draws).to(out[key])
    if "weight" in out:
        out["weight"] = out["weight"] * (0.2 + 0.8 * torch.rand(out["weight"].shape, generator=draws).to(out["weight"]))
    return out


# --------------------------------------------------------------------------------------------------------------- entries
def entries_gate(unread: Callable[[Any], dict[str, str]], formula: Callable | None) -> Gate:
    @gate("entries", rows="R5", title="the loss depends on every entry of the batch")
    def check(context: GateContext) -> Finding:
        """Changes one entry of a real batch at a time: noise of its own scale for floats, exchange between samples for others."""
        found = seen(context)
        run, stage, batch, why = found.run, found.stage, found.batch, unread(context.cfg)
        draws, model = torch.Generator().manual_seed(context.cfg.run.seed), stage.model.eval()

        def terms(one: dict) -> Tensor:
            with torch.no_grad(), run.autocast():
                return torch.stack([v.float() for v in stage.loss(model, one).values()])

        before = terms(batch)
        if not torch.equal(before, terms(batch)):
            raise Skip("the loss of one batch differs from call to call (see dependency)")
        moved, silent, declared = {}, [], []
        for key, value in batch.items():
            if not isinstance(value, Tensor) or len(value) < 2:
                continue
            if key in why:
                declared.append(f"{key} ({why[key]})")
                continue
            other = _other(value, draws)
            if torch.equal(other, value):
                continue  # equal in all samples: nothing to exchange
            change = ((terms(batch | {key: other}) - before).abs() / before.abs().clamp_min(1e-6)).max().item()
            moved[key] = change
            if change <= 1e-5 and not _spare(context, formula, batch, key, other):
                silent.append(key)
        measured = ", ".join(f"{k} {v:.2g}" for k, v in moved.items()) + (
            f"; declared: {', '.join(declared)}" if declared else ""
        )
        return Finding(
            not silent, f"the loss does not depend on {', '.join(silent)} ({measured})" if silent
            else f"relative change of the loss by entry: {measured}",
            "a term changes by more than 1e-5 (relative) when an entry is changed",
            f"`{silent[0] if silent else ''}` is put in the batch and never read, or cancels out (divided by itself)\n"
            "on purpose: leave it out of the batch, or give the reason in `unread=` of gates.Subject",
            evidence={"change": moved}, batch=batch,
        )  # fmt: skip

    return check


def _spare(context: GateContext, formula: Callable | None, batch: dict, key: str, other: Tensor) -> bool:
    """Return whether the loss is a published form that does not use this entry either."""
    if formula is None:
        return False
    run, model = seen(context).run, seen(context).stage.model
    try:
        one, _ = compared(context, formula)
    except Skip:
        return False
    if one.wrong:
        return False
    with torch.no_grad(), run.autocast():
        before, after = (_stated(formula, context.cfg, model, b, {}) for b in (batch, batch | {key: other}))
    forms = [(term, form) for term, form in one.forms.items() if form in before[term].right]
    return all(torch.allclose(before[t].right[form], after[t].right[form]) for t, form in forms)


def _other(value: Tensor, draws: torch.Generator) -> Tensor:
    """Return `value` with noise of its own standard deviation, or exchanged between samples if it is no float."""
    if value.is_floating_point():
        spread = value.float().std().item() or 1.0
        return value + spread * torch.randn(value.shape, generator=draws).to(value)
    return value.roll(1, 0) if not torch.equal(value.roll(1, 0), value) else value


# --------------------------------------------------------------------------------------------------------------- returns
def returns_gate(targets: Callable | None, reward_scale: Callable[[GateContext], float]) -> Gate:
    title = "training targets equal their definition, computed step by step from the played transitions"

    @gate("returns", rows="R4 R5", title=title, explains=True)
    def check(context: GateContext) -> Finding:
        """Searches rows of the last batch of two rollouts, at the run's own settings, among the steps of the environments."""
        if targets is None:
            raise Skip("there is no definition of these targets (`targets=` of gates.Subject)")
        found, times = seen(context), reward_scale(context)
        if times != 1:
            found = replace(found, steps=found.steps | {"reward": times * found.steps["reward"]})
        try:
            compared = targets(context.cfg, found)
        except (KeyError, AttributeError, TypeError) as error:
            raise Skip(f"the definition does not fit this model or batch ({type(error).__name__}: {error})") from None
        exact = limit(found.run, 1e-3)
        wrong = [f"{k} differ by up to {v:.2g}" for k, (v, _) in compared.items() if not v <= exact]
        causes = [cause for v, cause in compared.values() if not v <= exact]
        if short := too_small(found.stage, context.cfg):
            wrong, causes = (
                [short, *wrong],
                ["the replay buffer is built with another capacity than the setting's", *causes],
            )
        forgotten = newest_only(found)
        if forgotten:
            wrong, causes = [*wrong, forgotten], [*causes, "running statistics start anew with each rollout: the net reads every observation "
                                                  "in new units; add the rollout to all earlier ones"]  # fmt: skip
        if weighed := misweighted(found):
            wrong, causes = [weighed, *wrong], [OVERWEIGHTED, *causes]
        return Finding(
            not wrong, "; ".join(wrong) or ", ".join(f"{k} within {v:.1e}" for k, (v, _) in compared.items())
            + f", every reward times {times:.4g}" * (times != 1),
            f"within {exact:g} of the largest" + ", and room for --buffer-size transitions" * bool(short)
            + ", and statistics of all rollouts" * bool(forgotten) + ", and weights that fall as probabilities rise" * bool(weighed),
            "\n".join([*causes, TARGETS_ON_PURPOSE]),
            evidence={k: v for k, (v, _) in compared.items()}, batch=found.batch,
            cause=OVERWEIGHTED if weighed else definitions.measured(compared),
        )  # fmt: skip

    return check


def misweighted(found: Seen) -> str:
    """Return how the importance weights of prioritised replay follow the probabilities of its draw, if they rise with them. Weights that
    are all equal are no fault: the correction is left out (Schaul 2016, beta = 0)."""
    likely, weight = found.probability, found.batch.get("weight")
    if likely is None or not isinstance(weight, Tensor) or weight.shape != likely.shape or len(likely) < 16:
        return ""
    likely, weight = likely.double(), weight.detach().cpu().double()
    if min((v.max() - v.min()).item() / v.abs().max().clamp_min(1e-12).item() for v in (likely, weight)) < 1e-3:
        return ""
    together = torch.corrcoef(torch.stack([ranks(likely), ranks(weight)]))[0, 1].item()
    if together < 0.5:
        return ""
    return f"importance weights rise with the probability of the draw (rank correlation {together:+.2f} over {len(likely)} rows)"


def ranks(values: Tensor) -> Tensor:
    """Return the rank of each value; equal values share one."""
    return values.unique(return_inverse=True)[1].double()


def newest_only(found: Seen) -> str:
    """Return which statistics of observations are those of the newest rollout alone, from the played steps of two rollouts. Statistics
    of all rollouts, running averages, and statistics that do not change are no fault."""
    rows = found.steps["observation"].flatten(0, 1).cpu().double()
    wide, newest = found.steps["observation"].shape[1], max(found.iteration)
    last = rows[torch.tensor(found.iteration).repeat_interleave(wide) == newest]
    for name, module in found.stage.model.named_modules():
        mean, var = (getattr(module, k, None) for k in ("mean", "var"))
        if not (isinstance(mean, Tensor) and isinstance(var, Tensor)) or mean.ndim != 1 or mean.shape != var.shape:
            continue
        if not 1 < len(mean) <= rows.shape[1] or newest == min(found.iteration):
            continue
        some, every = last[:, : len(mean)], rows[:, : len(mean)]
        unit = every.std(0).clamp_min(1e-6)
        for what, kept, own, due in (
            ("mean", mean, some.mean(0), every.mean(0)),
            ("variance", var, some.var(0), every.var(0)),
        ):
            scale = unit if what == "mean" else unit.square()
            near, far = (((kept.cpu().double() - x).abs() / scale).max().item() for x in (own, due))
            if near <= NEAR and far > 10 * NEAR:
                return (f"the {what} in `{name}` is that of the newest rollout alone ({len(some):,} of {len(rows):,} played steps; "
                        f"{far:.2g} {'standard deviations' if what == 'mean' else 'of the variance'} from that of all)")  # fmt: skip
    return ""


def too_small(stage: Stage, cfg: Any) -> str:
    """Return what a replay buffer lacks that has less room than the run asks for; empty if it has that room, or there is none."""
    replay = next((s for s in stage.state.values() if isinstance(s, Replay)), None)
    room, size = replay.steps * replay.n if replay else 0, getattr(cfg, "buffer_size", 0)
    if replay is None or room > size - replay.n:
        return ""
    return f"the replay buffer has room for {room:,} transitions, --buffer-size is {size:,}"
