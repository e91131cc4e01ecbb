"""Gates of control recipes on the configured run: the loss against its formula, training targets against their definition, batch
entries that the loss ignores, and the update rate of the target network.

They require what recipes/rl/control/gates.py requires, and a `Subject` with `formula`, `targets` and `lag`.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import formula as stated_by
from trainworthy.core.gates import gate
from trainworthy.core.gates.formula import limit
from trainworthy.core.gates.gate import Gate, Proof
from trainworthy.core.loop.run import Plan, Run
from trainworthy.core.recipe.stage import Stage, batch_size
from trainworthy.recipes.rl.control import formulas
from trainworthy.recipes.rl.control.environments import Environments
from trainworthy.recipes.rl.control.memory import Remembering
from trainworthy.recipes.rl.control.nets import Running

ROWS = 64  # samples of a batch that are compared one by one
ON_PURPOSE = (
    "on purpose: add what is new as a loss term with a name of its own, state your own formula (`formula=` of gates.Subject, a "
    'function like those of recipes/rl/control/formulas.py), or accept it: --gates.waive formula --gates.because "..."'
)


# ------------------------------------------------------------------------------------------------------ what is rehearsed
@dataclass
class Seen:
    """Two rollouts of the recipe's own `train()` at its own settings."""

    run: Run
    stage: Stage
    steps: dict[str, Tensor] = field(default_factory=dict)
    """Steps of the environments, (steps, environments, ...) on the CPU: observation, action, reward, ..."""
    unit: list[int] = field(default_factory=list)
    """The rollout of each step."""
    begins: list[nn.Module] = field(default_factory=list)
    """The model at the start of the second rollout, and of each later pass over its samples."""
    batch: dict[str, Any] = field(default_factory=dict)
    """The last batch, as the loss gets it,"""
    model: nn.Module | None = None
    """the model at that time,"""
    target: nn.Module | None = None
    """its target network at that time,"""
    sampled: tuple[Tensor, ...] = ()
    """and the last inputs and outputs of `model.sample` without gradients: observation, action, log-probability."""


def seen(proof: Proof) -> Seen:
    """Return the recording that `formula`, `returns` and `entries` use."""
    return proof.once("rl-seen", lambda: _rehearse(proof))


def stepped_in(stage: Stage) -> Environments | Remembering:
    """Return the environments that the loop steps."""
    found = next((s for s in stage.state.values() if isinstance(s, Environments | Remembering)), None)
    if found is None:
        raise Skip("no environments in stage.state (see environments)")
    return found


def _rehearse(proof: Proof) -> Seen:
    run, stage = proof.build(Plan(steps=2, peak=True))
    for net in (stage.model, getattr(stage.state.get("target"), "net", None)):
        _sized(net)
    out, rows, envs, own, answered = Seen(run, stage), [], stepped_in(stage), stage.loss, []
    plain, step = getattr(stage.model, "sample", None), envs.step
    per_pass, learnt = proof.cfg.num_steps * len(envs.mine), [0]

    def stepped(actions: Tensor) -> dict[str, Tensor]:
        before = envs.observation.clone()
        followed = step(actions)
        out.unit.append(run.step)
        rows.append(
            {
                "observation": before,
                "action": actions.detach().cpu().clone(),
                **{k: v.cpu() for k, v in followed.items()},
            }
        )
        return followed

    def sample(observation: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        answer = plain(observation, noise)
        if not torch.is_grad_enabled():
            answered[:] = [observation.detach().clone(), *(a.detach().clone() for a in answer)]
        return answer

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        if run.step == 1 and torch.is_grad_enabled():
            out.batch = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in batch.items()}
            out.model, target, out.sampled = _copy(model), stage.state.get("target"), tuple(answered)
            out.target = _copy(target.net) if hasattr(target, "net") else None
            if learnt[0] % per_pass == 0:
                out.begins.append(out.model)
            learnt[0] += out.batch["return"].numel() if "return" in out.batch else batch_size(batch)
        return own(model, batch)

    envs.step, stage.loss = stepped, loss
    if plain is not None:
        stage.model.sample = sample
    try:
        proof.train(proof.cfg, run, stage)
    finally:
        stage.loss = own
        stage.model.__dict__.pop("sample", None)
    if not out.batch:
        raise Skip("no update in the second iteration (see wiring)")
    out.steps = {k: _everywhere(run, torch.stack([r[k] for r in rows])) for k in rows[0]}
    return out


def _sized(net: nn.Module | None) -> None:
    """Statistics of rewards and returns start at 1, which hides wrong units: let them start at about 2."""
    for module in net.modules() if net is not None else ():
        if isinstance(module, Running) and len(module.rms) == 1 and module.count == 0:
            module.update(2 + torch.linspace(-1, 1, 8, device=module.mean.device)[:, None])


def _everywhere(run: Run, steps: Tensor) -> Tensor:
    """Return (steps, environments of all processes, ...), because a replay buffer holds steps of all processes."""
    if run.world == 1:
        return steps
    return run.gather(steps.to(run.device).transpose(0, 1).contiguous()).transpose(0, 1).cpu()


def _copy(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model).eval().requires_grad_(False)
    made.__dict__.pop("sample", None)
    return made


# --------------------------------------------------------------------------------------------------------------- formula
def formula_gate(formula: Callable | None) -> Gate:
    title = "each term of the loss is its formula, sample by sample, with the formula's gradient"

    @gate("formula", rows="R3 R5", title=title, explains=True)
    def prove(proof: Proof) -> Finding:
        """Compares the last batch of two rollouts with recipes/rl/control/formulas.py: the value of each sample and the gradient of the sum.
        Stored numbers get noise, so that old and new policy differ and every clip is active."""
        if formula is None:
            raise Skip("no formula is stated for this objective (`formula=` of gates.Subject)")
        one, run = compared(proof, formula), seen(proof).run
        exact, own = limit(run, 1e-4), f"; of the recipe's own: {', '.join(one.own)}" if one.own else ""
        return Finding(
            not one.wrong, "; ".join(one.wrong) or f"{one.samples} samples: {', '.join(one.said)}{own}",
            f"the formula within {exact:g}, its gradient within {10 * exact:g}",
            "\n".join([*dict.fromkeys(one.causes), ON_PURPOSE]),
            evidence={"compared": one.said, "own": one.own}, batch=one.batch,
        )  # fmt: skip

    return prove


@dataclass
class Comparison:
    """Differences of a loss from its formula."""

    batch: dict[str, Any]
    samples: int = 0
    wrong: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    """Terms without a formula."""
    forms: dict[str, str] = field(default_factory=dict)
    """Term -> the published form that it equals."""


def compared(proof: Proof, formula: Callable) -> Comparison:
    """Compare the loss of a real batch with its formula."""
    return proof.once("rl-formula", lambda: _compared(proof, formula))


def _compared(proof: Proof, formula: Callable) -> Comparison:
    found = seen(proof)
    run, stage, batch = found.run, found.stage, _moved(found.batch, proof.cfg.run.seed)
    if stage.expect.couplings:
        raise Skip(f"declared: {stage.expect.couplings}")
    model, out = stage.model.eval(), Comparison(batch)
    with run.autocast():
        one_by_one = [stage.loss(model, stated_by.row(batch, i)) for i in range(batch_size(batch))]
        got = {k: torch.stack([one[k].detach() for one in one_by_one]).float() for k in one_by_one[0]}
        whole = stage.loss(model, batch)
        due = _stated(formula, proof.cfg, model, batch, got)
    got, whole, due, out.own = stated_by.paired(got, whole, due)
    out.samples = batch_size(batch)
    for term, statement in due.items():
        fault, said, cause, form = stated_by.compare(term, statement, got[term], whole[term], model, limit(run, 1e-4))
        out.wrong += [fault] * bool(fault)
        out.said += [said] * bool(said)
        out.causes += [cause] * bool(cause)
        out.forms[term] = form
    return out


def _stated(formula: Callable, cfg: Any, model: nn.Module, batch: dict, got: dict) -> formulas.Statements:
    try:
        return {k: stated_by.summed(s) for k, s in formula(cfg, model, batch, got).items()}
    except (KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise Skip(f"the formula does not read this model or batch ({said}); {ON_PURPOSE}") from None


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
    def prove(proof: Proof) -> Finding:
        """Changes one entry of a real batch at a time: noise of its own scale for floats, exchange between samples for others."""
        found = seen(proof)
        run, stage, batch, why = found.run, found.stage, found.batch, unread(proof.cfg)
        draws, model = torch.Generator().manual_seed(proof.cfg.run.seed), stage.model.eval()

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
            if change <= 1e-5 and not _spare(proof, formula, batch, key, other):
                silent.append(key)
        shown = ", ".join(f"{k} {v:.2g}" for k, v in moved.items()) + (
            f"; declared: {', '.join(declared)}" if declared else ""
        )
        return Finding(
            not silent, f"nothing depends on: {', '.join(silent)} ({shown})" if silent else f"the loss changes with each: {shown}",
            "a change of a term by more than 1e-5 of it when an entry is another",
            f"`{silent[0] if silent else ''}` is put in the batch and never read, or cancels out (a number over itself)\n"
            "on purpose: leave it out of the batch, or say why in `unread=` of gates.Subject",
            evidence={"change": moved}, batch=batch,
        )  # fmt: skip

    return prove


def _spare(proof: Proof, formula: Callable | None, batch: dict, key: str, other: Tensor) -> bool:
    """Return whether the loss is a published form that does not use this entry either."""
    if formula is None:
        return False
    run, model = seen(proof).run, seen(proof).stage.model
    try:
        one = compared(proof, formula)
    except Skip:
        return False
    if one.wrong:
        return False
    with torch.no_grad(), run.autocast():
        before, after = (_stated(formula, proof.cfg, model, b, {}) for b in (batch, batch | {key: other}))
    forms = [(term, form) for term, form in one.forms.items() if form in before[term].right]
    return all(torch.allclose(before[t].right[form], after[t].right[form]) for t, form in forms)


def _other(value: Tensor, draws: torch.Generator) -> Tensor:
    """Return `value` with noise of its own standard deviation, or exchanged between samples if it is no float."""
    if value.is_floating_point():
        spread = value.float().std().item() or 1.0
        return value + spread * torch.randn(value.shape, generator=draws).to(value)
    return value.roll(1, 0) if not torch.equal(value.roll(1, 0), value) else value


# --------------------------------------------------------------------------------------------------------------- returns
def returns_gate(targets: Callable | None) -> Gate:
    title = "training targets equal their definition, computed step by step from the played transitions"

    @gate("returns", rows="R4 R5", title=title, explains=True)
    def prove(proof: Proof) -> Finding:
        """Searches rows of the last batch of two rollouts, at the run's own settings, among the steps of the environments."""
        if targets is None:
            raise Skip("no definition is stated for these targets (`targets=` of gates.Subject)")
        found = seen(proof)
        try:
            compared = targets(proof.cfg, found)
        except (KeyError, AttributeError, TypeError) as error:
            raise Skip(f"the definition does not read this model or batch ({type(error).__name__}: {error})") from None
        exact = limit(found.run, 1e-3)
        wrong = [f"{k} up to {v:.2g} off" for k, (v, _) in compared.items() if not v <= exact]
        causes = [cause for v, cause in compared.values() if not v <= exact]
        return Finding(
            not wrong, "; ".join(wrong) or ", ".join(f"{k} within {v:.1e}" for k, (v, _) in compared.items()),
            f"within {exact:g} of the largest", "\n".join([*causes, "on purpose: --gates.waive returns --gates.because \"...\""]),
            evidence={k: v for k, (v, _) in compared.items()}, batch=found.batch,
        )  # fmt: skip

    return prove


# ----------------------------------------------------------------------------------------------------------- target-rate
FEWEST, LOOK = 3.0, 12  # times that the target must be replaced in a run; rollouts that are watched at most
SHORT = 1000  # updates: shorter runs are only trials


def target_rate_gate(lag: Callable[[Any], float] | None) -> Gate:
    title = "the target network is updated more than once in the run, and less often than the online network"

    @gate("target-rate", rows="R5", title=title, explains=True)
    def prove(proof: Proof) -> Finding:
        """Measures how far the target network moves towards the net in each update, over a few rollouts at the run's own settings (the probe
        gates use others), and scales it to the updates of the whole run."""
        if lag is None:
            raise Skip("no target network")
        return _renewed(proof, lag(proof.cfg))

    return prove


def _renewed(proof: Proof, due: float) -> Finding:
    run, stage = proof.build(Plan(steps=1))
    total = Run(proof.cfg, proof.accelerator).total_steps(stage)
    units = min(LOOK, total)
    run, stage = proof.build(Plan(steps=units, peak=True, watch=lambda stage, unit: enough(stage, unit)))
    target, own = stage.state.get("target"), stage.loss
    if not hasattr(target, "net"):
        raise Skip("no 'target' in what is saved")
    shares, last, seen_units = [], {}, [0]

    def watch(model: nn.Module) -> None:
        """Return the share by which the target moved towards the net since the previous update."""
        now, net = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (target.net, model))
        if last and torch.equal(net, last["net"]):
            return  # another part of the same batch
        if last:
            way = net - last["target"]  # the copy contains the net after its update
            shares.append(((now - last["target"]) @ way / (way @ way).clamp_min(1e-30)).item())
        last.update(target=now, net=net)

    def enough(_stage: Stage, unit: int) -> bool:
        seen_units[0] = unit
        return len(shares) >= 4 * due or sum(s > 0 for s in shares) >= 16

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        if torch.is_grad_enabled():
            watch(model)
        return own(model, batch)

    stage.loss = loss
    proof.train(proof.cfg, run, stage)
    if not shares:
        raise Skip("no updates to watch (see wiring)")
    updates = (len(shares) + 1) / seen_units[0]  # updates per rollout
    found = sum(shares) / len(shares)
    copies = [i for i, share in enumerate(shares) if share > 0.5]
    if len(copies) > 1:  # between the first and the last copy: steps before and after them carry no information
        found = (len(copies) - 1) / (copies[-1] - copies[0])
    rate = found if found > 0 else 1 / due  # no copy in these rollouts: use the settings
    times = rate * updates * total
    told = 1 / due
    plain = len(shares) * told >= 2 or found * len(shares) >= 2  # enough was watched
    other = plain and not 0.5 <= (found / told if told else math.inf) <= 2
    every = f"once in {1 / rate:.4g} updates" if rate < 0.5 else f"{rate:.0%} of the way with every update"
    seen_now = "" if found > 0 else f" by the settings (none in the {len(shares)} updates that were watched)"
    wrong, causes = [], []
    if rate >= 0.9:
        wrong.append("the target is the net itself after every update")
        causes.append(
            "--target-update-interval 32 or more, --tau 0.05 or less (tau is the share taken from the net, not the share kept)"
        )
    if other:
        wrong.append(f"the settings say once in {due:.4g} updates")
        causes.append("units are counted where updates are meant, or the other way round; or the setting is not read")
    if times < FEWEST and updates * total >= SHORT:
        wrong.append(f"the target is renewed {times:.2g} times in the whole run")
        causes.append("what is earned k steps later is learnt after the k-th renewal: a longer run, or "
                      f"--target-update-interval {max(1, updates * total / 300):.0f} (--tau 0.005)")  # fmt: skip
    measured = f"{every}{seen_now}: {times:.3g} times in {updates * total:,.0f} updates of {total:,} units"
    return Finding(
        not wrong, f"{'; '.join(wrong)}: {measured}" if wrong else measured,
        f"{FEWEST:g} times in a run or more, not with every update, as often as the settings say",
        "\n".join([*causes, 'on purpose: --gates.waive target-rate --gates.because "..."']),
        evidence={"way": shares[:200], "times": times, "updates": updates * total},
    )  # fmt: skip
