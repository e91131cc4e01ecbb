"""Gates of reinforcement learning: probe environments with known answers that the recipe's own code must learn, the inputs of the loss,
and environments that can be saved.

A recipe passes its stage function and the settings under which it learns a probe. It needs:

- settings `env`, `frame_stack`, `num_envs`, `num_steps` and `gamma`;
- a model with `value(observations)` in units of the reward, and `near(observations, best)`, the probability of a best action;
- batches with `observation` and `return`, and its environments in `stage.state`.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, GateContext
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.recipes.rl.control.gates import definitions
from trainworthy.recipes.rl.control.gates.environments import replay
from trainworthy.recipes.rl.control.gates.exploration import exploration_gate
from trainworthy.recipes.rl.control.gates.learning_probes import (
    GAMMA,
    Subject,
    answers,
    by_definition,
    known,
    learnt,
    measure_reward_scale,
    one_step_targets,
    own_targets,
    probe_gate,
    rounded,
)
from trainworthy.recipes.rl.control.gates.objective import entries_gate, formula_gate, returns_gate
from trainworthy.recipes.rl.control.gates.target_rate import target_rate_gate

LIMIT = 1e-3
FALL = 1000.0  # far more than any value of a probe


# ------------------------------------------------------------------------------------------------------- before the loss
def targets_gate(subject: Subject) -> Gate:
    """Return the gate that compares the value targets of a first rollout with the returns that follow from the probe's rule."""

    @gate("targets", rows="R5", title="the value targets of a first rollout equal the analytic returns")
    def check(context: GateContext) -> Finding:
        wrong, measured, cause, under = [], [], "", ", ".join(f"{k} {v:g}" for k, v in subject.exact.items())
        times = measure_reward_scale(context, subject)
        for name in ("constant", "delay") if subject.exact else ("constant",):
            batches = learnt(context, subject, name, rollouts=1, **subject.exact).batches
            got = torch.cat([b["return"] for b in batches]).float().cpu().unique()
            known = answers(subject, name)[1]
            gap = (got[:, None] - known).abs().min(1).values / max(1.0, times)
            cut = (gap > LIMIT).sum().item()
            measured.append(f"{name} {rounded(sorted(known.tolist()))}")
            if cut:
                wrong.append(
                    f"{name}: targets such as {rounded(got[gap > LIMIT][:3])}; analytically only {rounded(sorted(known.tolist()))} occur"
                )
        pairs = [(times * due, got) for due, got in one_step_targets(context, subject)]
        if bad := [got for due, got in pairs if abs(due - got) > LIMIT * max(1.0, times)]:
            cause = changed_rewards(pairs)
            wrong.append(
                f"both: {len(bad)} of {len(pairs)} targets differ from the reward of their action, e.g. {bad[0]:.2f}"
            )
        measured += [f"every reward times {times:.4g}"] * (times != 1)
        if wrong and (own := own_targets(context, subject)):
            raise Skip(own)
        cause = cause or (definitions.measured(by_definition(context, subject)) if wrong else "")
        return Finding(
            not wrong, "; ".join(wrong) or f"equal to the analytic returns: {'; '.join(measured)}",
            f"within {LIMIT:g}" + f", at {under}" * bool(under),
            "bootstrapping crosses the end of an episode: the mask is missing or one step off\n"
            "reward, observation and end of a step are stored with another step's\n"
            "the stored actions are not those that were taken\n"
            "the discount is missing, or applied twice\n"
            'on purpose (shaped rewards, a bonus in the target): --gates.waive targets --gates.because "..."',
            evidence={"known": measured}, cause=cause,
        )  # fmt: skip

    return check


def changed_rewards(pairs: list[tuple[float, float]]) -> str:
    """Return which change of every reward explains targets of one-step episodes, from (due, target); nothing if none does."""
    added = {round(got - due, 3) for due, got in pairs}
    if len(added) == 1:
        return f"the loop adds {added.pop():+g} to every reward of the environment"
    times = {round(got / due, 3) for due, got in pairs if due}
    if len(times) == 1 and all(abs(got) <= LIMIT for due, got in pairs if not due):
        return f"the loop multiplies every reward of the environment by {times.pop():g}"
    return ""


def lag_gate(subject: Subject) -> Gate:
    """Return the gate that checks that targets lag behind the net that learns from them."""

    @gate("target", rows="R5", title="targets do not change with every update of the online network")
    def check(context: GateContext) -> Finding:
        result = learnt(context, subject, "delay", rollouts=1, **subject.estimated)
        # Its target is the value of the second step, listed before it.
        first = answers(subject, "delay")[0][1].to(result.run.device)
        whole = [{k: result.run.gather(b[k]) for k in ("observation", "return")} for b in result.batches]
        targets = torch.stack([b["return"][(b["observation"] == first).all(-1)].mean() for b in whole])
        values = GAMMA * torch.stack(result.values)[:, 0]
        distance, moved = (targets - values).std().item(), values.std().item()
        return Finding(
            distance >= 0.2 * moved, f"standard deviation over updates: the net's values {moved:.2g}, their distance from the targets {distance:.2g}",
            "a distance that varies by at least a fifth as much as the values, because targets lag behind the net",
            "the target network is the net itself, not a copy, or is copied after every update\n"
            "the target uses the trained net instead of the target network",
            evidence={"targets": targets.tolist(), "values": values.tolist()},
        )  # fmt: skip

    return check


def next_action_gate(subject: Subject) -> Gate:
    """Return the gate on targets' actions. Only the second of two steps is rewarded, so targets of the first must not depend on its action."""

    @gate("next-action", rows="R5", title="a target uses the value of the next action")
    def check(context: GateContext) -> Finding:
        batches = learnt(context, subject, "later", rollouts=12, noted=11, **subject.estimated).batches
        rows = {k: torch.cat([b[k] for b in batches]).cpu().double() for k in ("observation", "action", "return")}
        first = (rows["observation"] == 0).all(-1)
        action, found = rows["action"].view(len(first), -1)[first, 0], rows["return"][first]
        slope = (torch.cov(torch.stack([action, found]))[0, 1] / action.var()).item()
        share = abs(slope) * (action.max() - action.min()).item() / max(rows["return"].abs().max().item(), 1e-9)
        return Finding(
            share <= 0.25, f"targets of the first step depend on its action, by {share:.0%} of the largest target",
            "at most 25%: all actions are equal in that step",
            "the target takes the next value at the stored action instead of the next action",
            evidence={"slope": slope, "rows": len(found)},
        )  # fmt: skip

    return check


def lower_gate(subject: Subject) -> Gate:
    """Return the gate that lowers one critic at a time. Targets and policy loss must follow the lowered one."""

    @gate("lower-critic", rows="R5", title="targets and policy use the lowest of several critics")
    def check(context: GateContext) -> Finding:
        """The policy may use the mean of all critics (REDQ, Chen 2021; DroQ, Hiraoka 2022), and of more than two critics the targets the
        lowest of a random subset (REDQ)."""

        def fall(critics: Any, i: int) -> None:
            with torch.no_grad():
                critics[i][-1].bias -= FALL

        def target(i: int | None = None) -> float:
            """Return the target of the first of two steps, in the first update, after critic `i` of the target network was lowered."""
            lowered = None if i is None else lambda stage: fall(stage.state["target"].net.critics, i)
            result = learnt(context, subject, "delay", rollouts=1, before=lowered)
            rows = {k: result.run.gather(result.batches[0][k]).cpu() for k in ("observation", "return")}
            return rows["return"][(rows["observation"] == answers(subject, "delay")[0][1]).all(-1)].mean().item()

        result = learnt(context, subject, "constant", rollouts=1)
        model, batch = result.stage.model, result.batches[0]
        if not hasattr(model, "critics") or "target" not in result.stage.state:
            raise Skip("the model has no `critics`, or stage.state no 'target'")
        targets, gains, whole = [], [], target()
        for i in range(len(model.critics)):
            targets.append((whole - target(i)) / (GAMMA * FALL))
            was = result.stage.loss(model, batch)["policy"].item()
            fall(model.critics, i)
            gains.append((result.stage.loss(model, batch)["policy"].item() - was) / (FALL * len(batch["action"])))
            with torch.no_grad():
                model.critics[i][-1].bias += FALL
        n = len(gains)
        followed = min(targets) >= 0.95 or (n > 2 and follows_subset(targets))
        led = min(gains) >= 0.95 or all(abs(n * g - 1) <= 0.05 for g in gains)
        return Finding(
            followed and led, f"share of one critic's change that reaches the targets {rounded(targets)}, the policy {rounded(gains)}",
            "at least 0.95, whichever critic is lowered" + "; or targets of the lowest of a subset" * (n > 2)
            + f"; or a policy with {1 / n:.2g} of each",
            "targets use one critic only, their mean or the highest: values are overestimated\n"
            "the policy loss uses one critic only", evidence={"targets": targets, "policy": gains},
        )  # fmt: skip

    return check


def follows_subset(shares: list[float]) -> bool:
    """Return whether targets follow any of two or more critics that is lowered, and none of the others."""
    used = [s for s in shares if s >= 0.95]
    return len(used) >= 2 and all(s >= 0.95 or abs(s) <= 0.05 for s in shares)


@gate("density", rows="R5", title="an action's log-probability includes the transforms of the drawn number")
def density(context: GateContext) -> Finding:
    """Compares the log-probabilities of `sample(observations, noise)` with the change of variables: log-density of the noise minus the
    log-determinant of the Jacobian, in double precision, on the rehearsed model."""
    _, stage, record = rehearsed(context)
    model = copy.deepcopy(stage.model).cpu().double().eval()  # not every device has float64
    observations = record.batch["observation"].flatten(0, -2)[:16].cpu().double()
    noise = torch.randn(
        record.batch["action"].flatten(0, -2)[:16].shape, generator=torch.Generator().manual_seed(context.cfg.run.seed)
    )
    noise = noise.to(observations).requires_grad_()
    actions, found = model.sample(observations, noise)
    rows = [torch.autograd.grad(actions[:, i].sum(), noise, retain_graph=True)[0] for i in range(actions.shape[1])]
    normal = torch.distributions.Normal(0.0, 1.0).log_prob(noise).sum(-1)
    slopes = torch.stack(rows, 1)  # (B, actions, noise)
    known = normal - torch.linalg.slogdet(slopes).logabsdet
    error = (found - known).abs().max().item()
    fixed = to_double(~slopes.any(-1).all(-1)).mean().item()
    return Finding(
        error <= LIMIT, f"log-densities of {len(known)} actions differ from the change of variables by up to {error:.2g}", f"{LIMIT:g}",
        "the slope of tanh is missing: subtract log(1 - a^2) for every component of an action\n"
        "a mean over the components of an action instead of a sum, or another axis\n"
        "the density has another standard deviation than the sampler",
        evidence={"found": found.tolist(), "known": known.tolist()},
        cause=f"{fixed:.0%} of the actions do not move with their noise: they are clipped to their bounds after they were drawn, and have no "
              "density there; clip what the environment gets, and keep the drawn action for the log-probability" if fixed else "",
    )  # fmt: skip


def entropy_gate(subject: Subject) -> Gate:
    """Return the gate on the entropy bonus: without differences in reward, the policy must keep its entropy."""

    @gate("entropy", rows="R5", title="a policy without rewards keeps its entropy")
    def check(context: GateContext) -> Finding:
        result = learnt(context, subject, "constant", rollouts=20)
        observations = known(subject, result.stage.model, "constant", 1)[0].expand(512, -1).to(result.run.device)
        noise = torch.randn(512, 1, generator=torch.Generator().manual_seed(0)).to(result.run.device)
        with torch.no_grad():
            entropy = -result.stage.model.sample(observations, noise)[1].mean().item()
        return Finding(
            entropy >= -1, f"its actions have an entropy of {entropy:.2g} nats", "at least -1 (uniform actions: 0.69)",
            "the entropy has the wrong sign in the policy's loss: certainty is rewarded\n"
            "the temperature moves in the wrong direction, or below 0",
        )  # fmt: skip

    return check


def whitening_gate(subject: Subject) -> Gate:
    """Return the gate on whitened advantages: their mean and standard deviation in every minibatch, and the policy gradient on two
    rollouts that differ only in the reward scale, by a factor of 1,000."""

    @gate("whitening", rows="R3", title="advantages are whitened before the loss, at any reward scale")
    def check(context: GateContext) -> Finding:
        loud, louder = (learnt(context, subject, name, rollouts=1, batch=64) for name in ("loud", "louder"))
        if not loud.gradient or "advantage" not in loud.batches[0]:
            raise Skip("no loss term 'policy', or no 'advantage' in the batches")
        advantages = [loud.run.gather(b["advantage"]) for b in loud.batches]
        means = [a.mean().item() for a in advantages]
        spreads = [a.std().item() for a in advantages]
        one, other = torch.cat(loud.gradient), torch.cat(louder.gradient)
        ratio = (other.norm() / one.norm().clamp_min(1e-30)).item()
        cosine = torch.nn.functional.cosine_similarity(one, other, dim=0).item()
        worst, least, most = max(map(abs, means)), min(spreads), max(spreads)
        white = worst <= 0.5 and least >= 0.5 and most <= 1.5
        same = abs(ratio - 1) <= 0.05 and cosine >= 0.99
        return Finding(
            white and same,
            f"mean at most {worst:.2g} from 0, standard deviation {least:.2g} to {most:.2g} over {len(means)} minibatches; with "
            f"rewards 1,000 times as large the policy's gradient is {ratio:.4g} times as long (cosine {cosine:.3f})",
            "mean 0 (within 0.5), standard deviation 1 (0.5 to 1.5), a gradient that does not depend on the reward scale (5%)",
            "advantages are not whitened, or are changed after it\n"
            "they are whitened over padding, along another axis, or with the statistics of another batch",
            evidence={"means": means, "standard_deviations": spreads, "ratio": ratio, "cosine": cosine},
        )  # fmt: skip

    return check


def memory_gate(subject: Subject) -> Gate:
    """Return the gate on recurrent policies. On a learnt probe, the update must compute the log-probabilities of the rollout, and values
    at the start of an episode must not depend on the episode before."""

    @gate(
        "memory",
        rows="R4 R5",
        title="recurrent state is reset between episodes, and sequences keep their order in time",
    )
    def check(context: GateContext) -> Finding:
        if not getattr(context.cfg, "rnn_hidden_size", 0):
            raise Skip("the policy is not recurrent (--rnn-hidden-size 0)")
        ratios: list[Tensor] = []

        def look(loss: Callable, model: torch.nn.Module, batch: dict) -> None:
            """Before the first update of a rollout, keep each sample's importance ratio: the derivative of the policy term by its advantage."""
            one = torch.ones_like(batch["advantage"]).requires_grad_()
            term = loss(model, batch | {"advantage": one})["policy"]
            ratios.append(torch.autograd.grad(-term, one)[0])

        result = learnt(context, subject, "memory", rollouts=13, noted=12, look=look)
        batches, limit = result.batches, 1e-4 if result.run.precision == "fp32" else 5e-2
        error = ratios[0].log().abs().max().item()
        rows, value = (torch.cat([b[k] for b in batches]) for k in ("observation", "value"))
        first = {
            signal: value[(rows[:, 0] == signal) & (rows[:, 1] == 0)] for signal in (-1, 1)
        }  # by signal, at the first step of an episode
        spread = max((v.max() - v.min()).item() for v in first.values())
        return Finding(
            error <= limit and spread <= limit,
            f"log-probabilities in the first update differ from the rollout's by up to {error:.2g}; values of one observation at "
            f"the start of an episode differ by {spread:.2g}", f"at most {limit:g}",
            "the recurrent state is not reset at the end of an episode, in the rollout or in the update\n"
            "the steps of a minibatch are not in time order, or mix environments\n"
            "the update does not start from the state before the rollout's first step",
            evidence={"off": error, "spread": spread},
        )  # fmt: skip

    return check


# ----------------------------------------------------------------------------------------------------------- environments


def gates(subject: Subject, *, on_policy: bool) -> list[Gate]:
    """Return all gates for the stage that `subject.make(cfg, run)` builds."""
    probes = [
        ("constant", "R5", "one step, reward 1: the value is 1",
         "bootstrapping past the end of a terminated episode\n"
         "the value's loss or optimiser: wrong target, sign, no gradient (see wiring), or another term that changes it"),
        ("observation", "R5", "the reward equals the observation: the value follows it",
         "observations do not reach the value function, or are stored with another step's reward\n"
         "observation, action and return are shuffled in different orders\n"
         "the stored observations are views of a buffer that is overwritten"),
        ("delay", "R5", "a reward one step later is discounted",
         "the discount is missing, or the next observation's value does not reach the target\n"
         "a target network that is never updated\n"
         "episodes are cut at the wrong step (the mask is one off)"),
        ("limit", "R5", "a truncated episode is bootstrapped with the value of its last observation",
         "truncation is treated as termination: bootstrap if only the time limit ended the episode\n"
         "the value is that of the observation after the reset, not of the episode's last one\n"
         "the value after n rewards is not discounted n times"),
        ("action", "R5", "the better of two actions is taken",
         "the loss: its sign, its ratio, or values and log-probabilities of other actions than those that were taken\n"
         "advantages are paired with other actions\n"
         "the temperature rises instead of falling, or its loss term changes the policy"),
        ("both", "R5", "the better action depends on the observation",
         "observations do not reach the policy, or advantages are exchanged between samples\n"
         "observation and action belong to different steps"),
        ("memory", "R5", "the better action depends on the previous observation",
         "the stack does not hold the last observations: the newest is repeated, or all are views of one array\n"
         "they are stored with another step's action, or the policy reads only the newest"),
        ("scale", "R3", "the same with observations 299.7 and 300.3 and rewards of 1000",
         "observations are not normalised by running statistics\n"
         "the value loss of such large returns dominates: normalise returns, too\n"
         "on purpose, because observations and returns of this environment are near 1: --gates.waive probe-scale --gates.because '...'"),
    ]  # fmt: skip
    *found, scale = [probe_gate(subject, *one) for one in probes]
    gates_of = (whitening_gate, memory_gate) if on_policy else (lag_gate, next_action_gate, exploration_gate)
    own = [f(subject) for f in gates_of]
    own += [lower_gate(subject)] if subject.box and not on_policy else []
    own += [density, entropy_gate(subject)] if subject.box else []
    unit = partial(measure_reward_scale, subject=subject)
    configured = [entries_gate(subject.unread, subject.formula), returns_gate(subject.targets, unit)]
    configured += [target_rate_gate(subject.lag)] if subject.lag else []
    return [formula_gate(subject.formula), targets_gate(subject), *found, *own, scale, *configured, replay]
