"""Gates of reinforcement learning: probe environments with known answers that the recipe's own code must learn, the inputs of the loss,
and environments that can be saved.

A recipe passes its stage function and the settings under which it learns a probe. It needs:

- settings `env`, `frame_stack`, `num_envs`, `num_steps` and `gamma`;
- a model with `value(observations)` in units of the reward, and `near(observations, best)`, the probability of a best action;
- batches with `observation` and `return`, and its environments in `stage.state`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, Proof, build
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.run import Plan, Run, evaluating
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.rl.control import starts
from trainworthy.recipes.rl.control.environments import Environments, draw
from trainworthy.recipes.rl.control.memory import Remembering, after, beginning
from trainworthy.recipes.rl.control.objective_gates import entries_gate, formula_gate, returns_gate, target_rate_gate
from trainworthy.recipes.rl.control.probes import PROBES

Make = Callable[[Any, Run], Stage]
UNITS = 60  # rollouts of 8 environments x 16 steps
# Checked after every third rollout; four checks in a row must be close, because a value may only pass by the answer.
EVERY, IN_A_ROW = 3, 4
CLOSE = 0.1  # largest error of a learnt value, as a share of the largest value
EARNED = 0.4  # return of a policy that takes the best action with probability 0.7
LIMIT = 1e-3
FALL = 1000.0  # far more than any value of a probe
GAMMA = 0.5  # low enough to tell a discounted reward from an undiscounted one within two steps


# ---------------------------------------------------------------------------------------------------------------- probes
@dataclass
class Subject:
    """A recipe's stage function, and how it learns a probe."""

    make: Make
    settings: dict[str, Any]
    """Settings under which a probe is learnt within 60 rollouts of 8 environments x 16 steps."""
    exact: dict[str, Any] = field(default_factory=dict)
    """Settings under which value targets are plain returns until the episode ends, without bootstrapping. Empty if the recipe always
    bootstraps."""
    estimated: dict[str, Any] = field(default_factory=dict)
    """Settings under which every target contains the value of the next step."""
    box: bool = False
    """True for continuous actions."""
    formula: Callable | None = None
    """Each term of the loss per sample (see formulas.py); None: no comparison. A fork that changes its objective states its own."""
    targets: Callable | None = None
    """The targets by their definition (see definitions.py)."""
    unread: Callable[[Any], dict[str, str]] = lambda cfg: {}
    """Settings -> {entry of a batch that the loss does not depend on: reason}."""
    lag: Callable[[Any], float] | None = None
    """Settings -> number of updates in which the target network is replaced once; None if there is no target network."""


@dataclass
class Learnt:
    """Result of the recipe's own `train()` on a probe."""

    run: Run
    stage: Stage
    batches: list[dict] = field(default_factory=list)
    """Batches of one rollout, as the loss gets them."""
    values: list[Tensor] = field(default_factory=list)
    """The model's values of the probe's observations, before each of these batches."""
    rewards: dict[int, list[Tensor]] = field(default_factory=dict)
    """Rewards of every step, by rollout."""
    gradient: list[Tensor] = field(default_factory=list)
    """Gradient of the policy term on the first batch."""


def learnt(
    proof: Proof,
    subject: Subject,
    name: str,
    *,
    units: int = UNITS,
    noted: int = 0,
    batch: int = 32,
    stack: int = 1,
    before: Callable[[Stage], None] | None = None,
    look: Callable[[Callable, torch.nn.Module, dict], None] | None = None,
    **settings: Any,
) -> Learnt:
    """Run the recipe's own `train()` on a probe, at a learning rate that suits probes.

    With the default number of `units` (rollouts), training stops as soon as the answer is learnt; with fewer, all are made. Batches of
    rollout `noted` are kept. `look` gets the loss, the model and the first of these batches. `before` may change the stage first.
    Except for the probe "memory", the newest observation determines the answer."""
    cfg, id = proof.cfg, f"probe/{name}{'-box' * subject.box}-v0"
    cfg = replace(cfg, env=id, frame_stack=stack, num_envs=8, num_steps=16, gamma=GAMMA, optim=replace(cfg.optim, lr=3e-3),
                  train=replace(cfg.train, batch_size=batch, accumulate=1), **subject.settings | settings)  # fmt: skip
    close: list[bool] = []

    def enough(stage: Stage, unit: int) -> bool:
        if unit % EVERY == 0 and units == UNITS:
            close.append(off(subject, stage, name, stack) <= CLOSE / 2)
        return len(close) >= IN_A_ROW and all(close[-IN_A_ROW:])

    run = Run(cfg, proof.accelerator, plan=Plan(steps=units, peak=True, watch=enough))
    stage = build(run, lambda run: subject.make(cfg, run))
    if before:
        before(stage)
    own, found, envs = stage.loss, Learnt(run, stage), environments_of(stage)

    def loss(model: torch.nn.Module, batch: dict) -> dict[str, Tensor]:
        terms = own(model, batch)
        if run.step == noted and torch.is_grad_enabled():
            if look and not found.batches:
                look(own, model, batch)
            ends = (
                batch["return"].ndim - 1
            )  # recurrent policies have batches of whole environments: (time, environment)
            found.batches.append({k: v.detach().clone().flatten(0, ends) for k, v in batch.items()})
            with torch.no_grad():
                found.values.append(model.value(known(subject, model, name, stack)[0].to(run.device)))
            if not found.gradient and "policy" in terms:
                weights = [p for p in model.parameters() if p.requires_grad]
                given = torch.autograd.grad(terms["policy"], weights, retain_graph=True, allow_unused=True)
                found.gradient = [g.flatten() for g in given if g is not None]
        return terms

    def watched(stepped: Callable) -> Callable:
        def step(actions: Tensor) -> dict[str, Tensor]:
            followed = stepped(actions)
            found.rewards.setdefault(run.step, []).append(followed["reward"])
            return followed

        return step

    stage.loss = loss
    if envs:
        envs.step = watched(envs.step)
    proof.train(cfg, run, stage)
    return found


def environments_of(stage: Stage) -> Environments | None:
    """Return the environments in the stage's state, or None."""
    inner = (s.envs if isinstance(s, Remembering) else s for s in stage.state.values())
    return next((s for s in inner if isinstance(s, Environments)), None)


def off(subject: Subject, stage: Stage, name: str, stack: int = 1) -> float:
    """Return the distance from the known answer: error of the values as a share of the largest, or 1 - probability of the best action, over 3."""
    observations, values, best = known(subject, stage.model, name, stack)
    observations = observations.to(next(stage.model.parameters()).device)
    with torch.no_grad():
        if best is not None:
            near = stage.model.near(observations, best.to(observations.device))
            return (1 - near).max().item() / 3  # a probability of 0.7 is close enough
        found = stage.model.value(observations).cpu()
    return (found - values).abs().max().item() / max(values.abs().max().item(), 1e-9)


def answers(subject: Subject, name: str, stack: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (the last `stack` observations of every step, their values under the best policy, their best actions or None if actions
    do not matter). They follow analytically from the probe's rule, for every signal and step."""
    probe = PROBES[name]
    rule, length, limited = probe["rule"], probe.get("length", 1), probe.get("limited", False)
    n_actions, brief = probe.get("actions", 1), probe.get("brief", False)
    shift, scale = probe.get("shift", 0.0), probe.get("scale", 1.0)
    rows, values, best = [], [], []
    for signal in (-1, 1) if probe.get("random") else (0,):
        later = (
            rule(signal, 0, 0) / (1 - GAMMA) if limited else 0.0
        )  # a truncated episode counts as if it continued for ever
        for step in reversed(range(1 if limited else length)):
            rewards = [float(rule(signal, a, step)) for a in range(n_actions)]
            later = max(rewards) + GAMMA * later
            if n_actions > 1 and len(set(rewards)) == 1:
                continue  # all actions are equal
            past = [(0 if brief and t else signal, 0 if limited else t) for t in range(step + 1)]
            rows.append([shift + scale * x for seen in ([past[0]] * stack + past)[-stack:] for x in seen])
            values.append(later)
            best.append(rewards.index(max(rewards)))
    chosen = 2 * torch.tensor(best)[:, None] - 1 if subject.box else torch.tensor(best)
    return torch.tensor(rows), torch.tensor(values), chosen if n_actions > 1 else None


def known(subject: Subject, model: torch.nn.Module, name: str, stack: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return `answers` with observations in the form that the model takes; recurrent models get their state after the step before."""
    if not getattr(getattr(model, "memory", None), "size", 0):
        return answers(subject, name, stack)
    frames, values, best = answers(subject, name, 2)  # no probe has more than two steps
    earlier, newest = frames.chunk(2, -1)
    state, rows = after(model, beginning(model, earlier)), beginning(model, newest)
    second = (earlier != newest).any(-1)
    rows[second, newest.shape[1] :] = torch.cat([torch.zeros(len(state), 1), state], -1)[second]
    return rows, values, best


def probe_gate(subject: Subject, name: str, rows: str, title: str, remedy: str) -> Gate:
    """Return the gate that trains a probe with the recipe's own loop and compares what it learnt with the known answer."""

    @gate(f"probe-{name}", rows=rows, title=title, symptom=True)
    def prove(proof: Proof) -> Finding:
        stack = proof.cfg.frame_stack if name == "memory" else 1
        if name == "memory" and stack == 1 and not getattr(proof.cfg, "rnn_hidden_size", 0):
            raise Skip("the policy has no memory (--frame-stack 1)")
        result = learnt(proof, subject, name, stack=stack)
        run, stage = result.run, result.stage
        observations, values, best = known(subject, stage.model, name, stack)
        with torch.no_grad():
            found = stage.model.value(observations.to(run.device)).tolist()
            near = None if best is None else stage.model.near(observations.to(run.device), best.to(run.device))
        apart = off(subject, stage, name, stack)
        shown = f"values {few(found)}" if near is None else f"probabilities of the best actions {few(near)}"
        earned = 1.0
        if (
            name == "memory"
        ):  # the frames above were made analytically; only episodes show what the environment really stacks
            with evaluating(stage.eval_model):
                earned = stage.evaluate(stage.eval_model, stage.data["val"])["return"]
            shown += f", return of an episode {earned:.2f} of 1"
        needed = (
            f"{few(values)}, with errors of at most {CLOSE:.0%} of the largest"
            if best is None
            else f"at least {1 - 3 * CLOSE:.1f} each" + f", and a return of at least {EARNED:g}" * (name == "memory")
        )
        return Finding(
            apart <= CLOSE and earned >= EARNED, f"{shown} after {run.step} rollouts", f"{needed}, within {UNITS} rollouts", remedy,
            evidence={"observations": observations.tolist(), "values": found, "known": values.tolist(), "off": apart},
        )  # fmt: skip

    return prove


def few(values: Any) -> str:
    return " ".join(f"{float(v):.2f}" for v in values)


# ------------------------------------------------------------------------------------------------------- before the loss
def targets_gate(subject: Subject) -> Gate:
    """Return the gate that compares the value targets of a first rollout with the returns that follow from the probe's rule."""

    @gate("targets", rows="R5", title="the value targets of a first rollout equal the analytic returns")
    def prove(proof: Proof) -> Finding:
        wrong, shown, under = [], [], ", ".join(f"{k} {v:g}" for k, v in subject.exact.items())
        for name in ("constant", "delay") if subject.exact else ("constant",):
            batches = learnt(proof, subject, name, units=1, **subject.exact).batches
            got = torch.cat([b["return"] for b in batches]).float().cpu().unique()
            known = answers(subject, name)[1]
            gap = (got[:, None] - known).abs().min(1).values
            cut = (gap > LIMIT).sum().item()
            shown.append(f"{name} {few(sorted(known.tolist()))}")
            if cut:
                wrong.append(
                    f"{name}: targets such as {few(got[gap > LIMIT][:3])}; analytically only {few(sorted(known.tolist()))} occur"
                )
        rule = PROBES["both"]["rule"]
        for batch in learnt(proof, subject, "both", units=1, **subject.exact).batches:
            action = (1 + batch["action"].flatten().clamp(-1, 1)) / 2 if subject.box else batch["action"]
            rows = torch.stack([batch["observation"][:, 0], action, batch["return"]], 1).tolist()
            if bad := [got for signal, chosen, got in rows if abs(rule(round(signal), chosen, 0) - got) > LIMIT]:
                wrong.append(
                    f"both: {len(bad)} of {len(rows)} targets differ from the reward of their action, e.g. {bad[0]:.2f}"
                )
                break
        return Finding(
            not wrong, "; ".join(wrong) or f"equal to the analytic returns: {'; '.join(shown)}", f"within {LIMIT:g}" + f", at {under}" * bool(under),
            "bootstrapping crosses the end of an episode: the mask is missing or one step off\n"
            "reward, observation and end of a step are stored with another step's\n"
            "the stored actions are not those that were taken\n"
            "the discount is missing, or applied twice", evidence={"known": shown},
        )  # fmt: skip

    return prove


def lag_gate(subject: Subject) -> Gate:
    """Return the gate that checks that targets lag behind the net that learns from them."""

    @gate("target", rows="R5", title="targets do not change with every update of the online network")
    def prove(proof: Proof) -> Finding:
        result = learnt(proof, subject, "delay", units=1, **subject.estimated)
        # Its target is the value of the second step, listed before it.
        first = answers(subject, "delay")[0][1].to(result.run.device)
        whole = [{k: result.run.gather(b[k]) for k in ("observation", "return")} for b in result.batches]
        targets = torch.stack([b["return"][(b["observation"] == first).all(-1)].mean() for b in whole])
        values = GAMMA * torch.stack(result.values)[:, 0]
        apart, moved = (targets - values).std().item(), values.std().item()
        return Finding(
            apart >= 0.2 * moved, f"standard deviation over updates: the net's values {moved:.2g}, their distance from the targets {apart:.2g}",
            "a distance that varies by at least a fifth as much as the values, because targets lag behind the net",
            "the target network is the net itself, not a copy, or is copied after every update\n"
            "the target uses the trained net instead of the target network",
            evidence={"targets": targets.tolist(), "values": values.tolist()},
        )  # fmt: skip

    return prove


def exploration_gate(subject: Subject) -> Gate:
    """Return the gate on exploration: rewards in training must change from those of random actions to those of the learnt policy."""

    @gate(
        "exploration", rows="R4", title="actions in training move from exploration to the learnt policy", symptom=True
    )
    def prove(proof: Proof) -> Finding:
        rewards = learnt(proof, subject, "action", units=20).rewards
        share = {unit: (torch.cat(some) > 0).double().mean().item() for unit, some in rewards.items()}
        first, last = share[0], share[max(share)]
        return Finding(
            0.02 <= first <= 0.98 and last >= 0.75,
            f"the better of two actions is taken in {first:.0%} of the steps of the first rollout and {last:.0%} of the last",
            "2% to 98% in the first, at least 75% in the last",
            f"{_why_unexplored(first, last)}\n"
            "the stored actions are not those that were taken\n"
            "the better action is not learnt at all (see probe-action)", evidence={"share": list(share.values())},
        )  # fmt: skip

    return prove


def _why_unexplored(first: float, last: float) -> str:
    """Return the cause that fits the shares of the better action. A greedy untrained net always takes the same one of two actions;
    random actions take each half of the time."""
    greedy, random = not 0.02 <= first <= 0.98, 0.3 <= last <= 0.7
    if greedy and random:
        return "the probability of random actions is inverted, 1 - epsilon: greedy at first, random at the end"
    if greedy:
        return "no action is ever random: the untrained net's own action is taken from the start"
    return "the probability of random actions does not fall: its schedule is not advanced"


def next_action_gate(subject: Subject) -> Gate:
    """Return the gate on targets' actions. Only the second of two steps is rewarded, so targets of the first must not depend on its action."""

    @gate("next-action", rows="R5", title="a target uses the value of the next action")
    def prove(proof: Proof) -> Finding:
        batches = learnt(proof, subject, "later", units=12, noted=11, **subject.estimated).batches
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

    return prove


def lower_gate(subject: Subject) -> Gate:
    """Return the gate that lowers one critic at a time. Targets and policy loss must follow the lowered one."""

    @gate("lower-critic", rows="R5", title="targets and policy use the lowest of several critics")
    def prove(proof: Proof) -> Finding:
        def fall(critics: Any, i: int) -> None:
            with torch.no_grad():
                critics[i][-1].bias -= FALL

        def target(i: int | None = None) -> float:
            """Return the target of the first of two steps, in the first update, after critic `i` of the target network was lowered."""
            lowered = None if i is None else lambda stage: fall(stage.state["target"].net.critics, i)
            result = learnt(proof, subject, "delay", units=1, before=lowered)
            rows = {k: result.run.gather(result.batches[0][k]).cpu() for k in ("observation", "return")}
            return rows["return"][(rows["observation"] == answers(subject, "delay")[0][1]).all(-1)].mean().item()

        result = learnt(proof, subject, "constant", units=1)
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
        return Finding(
            min(targets + gains) >= 0.95, f"share of one critic's change that reaches the targets {few(targets)}, the policy {few(gains)}",
            "at least 0.95, whichever critic is lowered",
            "targets use one critic only, their mean or the highest: values are overestimated\n"
            "the policy loss uses one critic only", evidence={"targets": targets, "policy": gains},
        )  # fmt: skip

    return prove


@gate("density", rows="R5", title="an action's log-probability includes the transforms of the drawn number")
def density(proof: Proof) -> Finding:
    """Compares the log-probabilities of `sample(observations, noise)` with the change of variables: log-density of the noise minus the
    log-determinant of the Jacobian, in double precision, on the rehearsed model."""
    _, stage, record = rehearsed(proof)
    model = copy.deepcopy(stage.model).cpu().double().eval()  # not every device has float64
    observations = record.batch["observation"].flatten(0, -2)[:16].cpu().double()
    noise = torch.randn(
        record.batch["action"].flatten(0, -2)[:16].shape, generator=torch.Generator().manual_seed(proof.cfg.run.seed)
    )
    noise = noise.to(observations).requires_grad_()
    actions, found = model.sample(observations, noise)
    rows = [torch.autograd.grad(actions[:, i].sum(), noise, retain_graph=True)[0] for i in range(actions.shape[1])]
    normal = torch.distributions.Normal(0.0, 1.0).log_prob(noise).sum(-1)
    known = normal - torch.linalg.slogdet(torch.stack(rows, 1)).logabsdet
    apart = (found - known).abs().max().item()
    return Finding(
        apart <= LIMIT, f"log-densities of {len(known)} actions differ from the change of variables by up to {apart:.2g}", f"{LIMIT:g}",
        "the slope of tanh is missing: subtract log(1 - a^2) for every component of an action\n"
        "a mean over the components of an action instead of a sum, or another axis\n"
        "the density has another standard deviation than the sampler",
        evidence={"found": found.tolist(), "known": known.tolist()},
    )  # fmt: skip


def entropy_gate(subject: Subject) -> Gate:
    """Return the gate on the entropy bonus: without differences in reward, the policy must keep its entropy."""

    @gate("entropy", rows="R5", title="a policy without rewards keeps its entropy")
    def prove(proof: Proof) -> Finding:
        result = learnt(proof, subject, "constant", units=20)
        observations = known(subject, result.stage.model, "constant", 1)[0].expand(512, -1).to(result.run.device)
        noise = torch.randn(512, 1, generator=torch.Generator().manual_seed(0)).to(result.run.device)
        with torch.no_grad():
            entropy = -result.stage.model.sample(observations, noise)[1].mean().item()
        return Finding(
            entropy >= -1, f"its actions have an entropy of {entropy:.2g} nats", "at least -1 (uniform actions: 0.69)",
            "the entropy has the wrong sign in the policy's loss: certainty is rewarded\n"
            "the temperature moves in the wrong direction, or below 0",
        )  # fmt: skip

    return prove


def whitening_gate(subject: Subject) -> Gate:
    """Return the gate on whitened advantages: their mean and standard deviation in every minibatch, and the policy gradient on two
    rollouts that differ only in the reward scale, by a factor of 1,000."""

    @gate("whitening", rows="R3", title="advantages are whitened before the loss, at any reward scale")
    def prove(proof: Proof) -> Finding:
        loud, louder = (learnt(proof, subject, name, units=1, batch=64) for name in ("loud", "louder"))
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

    return prove


def memory_gate(subject: Subject) -> Gate:
    """Return the gate on recurrent policies. On a learnt probe, the update must compute the log-probabilities of the rollout, and values
    at the start of an episode must not depend on the episode before."""

    @gate(
        "memory",
        rows="R4 R5",
        title="recurrent state is reset between episodes, and sequences keep their order in time",
    )
    def prove(proof: Proof) -> Finding:
        if not getattr(proof.cfg, "rnn_hidden_size", 0):
            raise Skip("the policy is not recurrent (--rnn-hidden-size 0)")
        ratios: list[Tensor] = []

        def look(loss: Callable, model: torch.nn.Module, batch: dict) -> None:
            """Before the first update of a rollout, keep each sample's importance ratio: the derivative of the policy term by its advantage."""
            one = torch.ones_like(batch["advantage"]).requires_grad_()
            term = loss(model, batch | {"advantage": one})["policy"]
            ratios.append(torch.autograd.grad(-term, one)[0])

        result = learnt(proof, subject, "memory", units=13, noted=12, look=look)
        batches, limit = result.batches, 1e-4 if result.run.precision == "fp32" else 5e-2
        apart = ratios[0].log().abs().max().item()
        rows, value = (torch.cat([b[k] for b in batches]) for k in ("observation", "value"))
        first = {
            signal: value[(rows[:, 0] == signal) & (rows[:, 1] == 0)] for signal in (-1, 1)
        }  # by signal, at the first step of an episode
        spread = max((v.max() - v.min()).item() for v in first.values())
        return Finding(
            apart <= limit and spread <= limit,
            f"log-probabilities in the first update differ from the rollout's by up to {apart:.2g}; values of one observation at "
            f"the start of an episode differ by {spread:.2g}", f"at most {limit:g}",
            "the recurrent state is not reset at the end of an episode, in the rollout or in the update\n"
            "the steps of a minibatch are not in time order, or mix environments\n"
            "the update does not start from the state before the rollout's first step",
            evidence={"off": apart, "spread": spread},
        )  # fmt: skip

    return prove


# ----------------------------------------------------------------------------------------------------------- environments
@gate(
    "environments",
    rows="R4 C15",
    title="environments have different seeds, and continue from a checkpoint exactly",
)
def replay(proof: Proof) -> Finding:
    """Takes random actions and saves the state half-way. New environments that load it must return the same observations."""
    cfg = proof.cfg
    run, stage = proof.build(Plan(steps=1))
    envs = environments_of(stage)
    if envs is None:
        return Finding(
            False, "no environments in stage.state", "the environments in stage.state",
            "they are not saved: a resumed run would start new episodes")  # fmt: skip
    n, steps = len(envs.mine), 40
    draws = torch.Generator().manual_seed(cfg.run.seed)
    actions = draw(envs.vector.single_action_space, (2 * steps, n), draws)
    start = envs.observation.clone()
    for row in actions[:steps]:
        envs.step(row)
    saved = envs.state_dict()
    straight = torch.stack([envs.step(row)["next_observation"] for row in actions[steps:]])
    fresh = Environments(cfg.env, envs.n, seed=envs.seed, stack=cfg.frame_stack, rank=run.rank, world=run.world)
    again = torch.equal(fresh.observation, start)
    fresh.load_state_dict(saved)
    resumed = torch.stack([fresh.step(row)["next_observation"] for row in actions[steps:]])
    wrong = [] if again else ["the same seeds give different first observations"]
    if not torch.equal(straight, resumed):
        wrong.append(f"observations differ by up to {(straight - resumed).abs().max():.3g} after loading the state")
    new = Environments(cfg.env, envs.n, seed=envs.seed, stack=cfg.frame_stack, rank=run.rank, world=run.world)
    used, first = (begun(some, saved, actions[:8]) for some in (envs, new))
    if not torch.equal(used, first):
        step, apart = (used != first).flatten(1).any(1).nonzero()[0].item(), (used - first).abs().max().item()
        wrong.append(f"observations {step} steps into an episode depend on the episode before, by up to {apart:.3g}")
    fault, remark = starts.shared(new)
    wrong += [fault] * bool(fault)
    told = f"{n} environments with {len(start.unique(dim=0))} different starts, {sum(envs.episode)} episodes ended in {2 * steps} steps"
    told += f" ({remark})" * bool(remark)
    return Finding(
        not wrong, "; ".join(wrong) or f"{told}; continued bit for bit", "independent seeds; the same observations after loading the state",
        "the environment draws from a generator that reset(seed=...) does not seed (numpy's or Python's global one)\n"
        "its state survives a reset, so an episode does not follow from its seed and actions alone\n"
        "stacked observations cross the end of an episode: the first ones must not contain older frames\n"
        "several environments have the same seed", evidence={"episodes": sum(envs.episode)},
    )  # fmt: skip


def begun(envs: Environments, saved: dict[str, Any], actions: Tensor) -> Tensor:
    """Return the observations at the start of the episodes after `saved`, and after each of `actions`: (1 + actions, n_mine, n_obs)."""
    envs.load_state_dict({"episode": [k + 1 for k in saved["episode"]], "actions": [torch.zeros(0)] * envs.n})
    return torch.stack([envs.observation.clone(), *(envs.step(row)["next_observation"] for row in actions)])


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
         "the value loss of such large returns dominates: normalise returns, too"),
    ]  # fmt: skip
    *found, scale = [probe_gate(subject, *one) for one in probes]
    gates_of = (whitening_gate, memory_gate) if on_policy else (lag_gate, next_action_gate, exploration_gate)
    own = [f(subject) for f in gates_of]
    own += [lower_gate(subject)] if subject.box and not on_policy else []
    own += [density, entropy_gate(subject)] if subject.box else []
    configured = [entries_gate(subject.unread, subject.formula), returns_gate(subject.targets)]
    configured += [target_rate_gate(subject.lag)] if subject.lag else []
    return [formula_gate(subject.formula), targets_gate(subject), *found, *own, scale, *configured, replay]
