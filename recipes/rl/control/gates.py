"""Gates of reinforcement learning: environments with analytically known answers, learnt by the recipe's own code; the inputs of
the loss; environments that can be saved.

A recipe passes its stage function, and settings under which it learns a probe. Required: settings `env`, `stack`, `envs`,
`rollout` and `gamma`; a model with `value(observations)` in units of the reward and `near(observations, best)`, 1 where it acts
best; batches with `observation` and `return`; its environments in `stage.state`.
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
UNITS = 60  # of 8 environments x 16 steps
# Looked at after every third, and close four times in a row: a value on its way elsewhere passes by.
EVERY, IN_A_ROW = 3, 4
CLOSE = 0.1  # of the largest value: how near the learnt values must come
EARNED = 0.4  # by best actions that are taken with 0.7
LIMIT = 1e-3
FALL = 1000.0  # far below everything that is learnt on a probe
GAMMA = 0.5  # discounts are told from none within two steps


# ---------------------------------------------------------------------------------------------------------------- probes
@dataclass
class Subject:
    """What is judged, and how to make it learn a probe."""

    make: Make
    settings: dict[str, Any]
    """Under which a probe of 8 environments x 16 steps is learnt within 60 units."""
    exact: dict[str, Any] = field(default_factory=dict)
    """Under which value targets are returns alone, with nothing estimated in them, for as long as an episode lasts; none: the
    recipe always estimates what follows a step."""
    estimated: dict[str, Any] = field(default_factory=dict)
    """Under which every target holds the value of the next step."""
    box: bool = False
    """Does it act by numbers?"""
    formula: Callable | None = None
    """What each term of the loss is, per sample (see formulas.py); none: nothing is compared. A fork that changes its objective
    states its own."""
    targets: Callable | None = None
    """What is learnt from, by its definition (see definitions.py)."""
    unread: Callable[[Any], dict[str, str]] = lambda cfg: {}
    """Settings -> entries of a batch that the loss does not depend on, and why."""
    lag: Callable[[Any], float] | None = None
    """Settings -> updates in which the target network is renewed once; none: there is no such network."""


@dataclass
class Learnt:
    """What the recipe's own `train()` made of a probe."""

    run: Run
    stage: Stage
    batches: list[dict] = field(default_factory=list)
    """Of one unit, just before the loss."""
    values: list[Tensor] = field(default_factory=list)
    """What the model says the probe's observations are worth at each of these."""
    rewards: dict[int, list[Tensor]] = field(default_factory=dict)
    """By unit, of every step."""
    gradient: list[Tensor] = field(default_factory=list)
    """Of the policy's term on the first of them."""


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
    """The recipe's own `train()` on a probe, at a rate of the probe's own; fewer units are made to the last. Batches are kept of
    the unit `noted`; of the first of them `look` is given the loss, the model and the batch. `before` may change the stage before
    anything is learnt. Every probe but one tells all by its newest observation."""
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
            ends = batch["return"].ndim - 1  # of whole environments, where something is remembered
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
    """Those in the stage's state."""
    inner = (s.envs if isinstance(s, Remembering) else s for s in stage.state.values())
    return next((s for s in inner if isinstance(s, Environments)), None)


def off(subject: Subject, stage: Stage, name: str, stack: int = 1) -> float:
    """Distance from the known answer: of a value, as a share of the largest; of the probability of a best action, from 1."""
    observations, values, best = known(subject, stage.model, name, stack)
    observations = observations.to(next(stage.model.parameters()).device)
    with torch.no_grad():
        if best is not None:
            near = stage.model.near(observations, best.to(observations.device))
            return (1 - near).max().item() / 3  # 0.7 of the best action is near enough
        found = stage.model.value(observations).cpu()
    return (found - values).abs().max().item() / max(values.abs().max().item(), 1e-9)


def answers(subject: Subject, name: str, stack: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
    """(the last `stack` observations of every step, their values under the best policy, their best actions where it matters what is
    done), by hand: the rules are played to their end for every signal and step."""
    probe = PROBES[name]
    rule, length, limited = probe["rule"], probe.get("length", 1), probe.get("limited", False)
    n_actions, brief = probe.get("actions", 1), probe.get("brief", False)
    shift, scale = probe.get("shift", 0.0), probe.get("scale", 1.0)
    rows, values, best = [], [], []
    for signal in (-1, 1) if probe.get("random") else (0,):
        later = rule(signal, 0, 0) / (1 - GAMMA) if limited else 0.0  # a time limit is not seen: it goes on for ever
        for step in reversed(range(1 if limited else length)):
            rewards = [float(rule(signal, a, step)) for a in range(n_actions)]
            later = max(rewards) + GAMMA * later
            if n_actions > 1 and len(set(rewards)) == 1:
                continue  # nothing to choose
            past = [(0 if brief and t else signal, 0 if limited else t) for t in range(step + 1)]
            rows.append([shift + scale * x for seen in ([past[0]] * stack + past)[-stack:] for x in seen])
            values.append(later)
            best.append(rewards.index(max(rewards)))
    chosen = 2 * torch.tensor(best)[:, None] - 1 if subject.box else torch.tensor(best)
    return torch.tensor(rows), torch.tensor(values), chosen if n_actions > 1 else None


def known(subject: Subject, model: torch.nn.Module, name: str, stack: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """`answers`, their observations as the model takes them: with what it remembers of the step before, where it does."""
    if not getattr(getattr(model, "memory", None), "size", 0):
        return answers(subject, name, stack)
    frames, values, best = answers(subject, name, 2)  # no probe is longer
    earlier, newest = frames.chunk(2, -1)
    state, rows = after(model, beginning(model, earlier)), beginning(model, newest)
    second = (earlier != newest).any(-1)
    rows[second, newest.shape[1] :] = torch.cat([torch.zeros(len(state), 1), state], -1)[second]
    return rows, values, best


def probe_gate(subject: Subject, name: str, rows: str, title: str, remedy: str) -> Gate:
    """Is the probe solved, through the recipe's own loop?"""

    @gate(f"probe-{name}", rows=rows, title=title, symptom=True)
    def prove(proof: Proof) -> Finding:
        stack = proof.cfg.frame_stack if name == "memory" else 1
        if name == "memory" and stack == 1 and not getattr(proof.cfg, "rnn_hidden_size", 0):
            raise Skip("the newest observation alone is seen (--frame-stack 1)")
        result = learnt(proof, subject, name, stack=stack)
        run, stage = result.run, result.stage
        observations, values, best = known(subject, stage.model, name, stack)
        with torch.no_grad():
            found = stage.model.value(observations.to(run.device)).tolist()
            near = None if best is None else stage.model.near(observations.to(run.device), best.to(run.device))
        apart = off(subject, stage, name, stack)
        shown = f"values {few(found)}" if near is None else f"best actions taken with {few(near)}"
        earned = 1.0
        if name == "memory":  # the frames above are by hand: what the environment really stacks, only its episodes show
            with evaluating(stage.eval_model):
                earned = stage.evaluate(stage.eval_model, stage.data["val"])["return"]
            shown += f", {earned:.2f} of 1 earned in an episode"
        needed = (
            f"{few(values)} within {CLOSE:.0%} of the largest"
            if best is None
            else f"each with {1 - 3 * CLOSE:.1f} or more" + f", and {EARNED:g} earned" * (name == "memory")
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
    """Do the first rollout's value targets equal the returns that follow from the rules?"""

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
                    f"{name}: targets such as {few(got[gap > LIMIT][:3])}, by hand only {few(sorted(known.tolist()))}"
                )
        rule = PROBES["both"]["rule"]
        for batch in learnt(proof, subject, "both", units=1, **subject.exact).batches:
            action = (1 + batch["action"].flatten().clamp(-1, 1)) / 2 if subject.box else batch["action"]
            rows = torch.stack([batch["observation"][:, 0], action, batch["return"]], 1).tolist()
            if bad := [got for signal, chosen, got in rows if abs(rule(round(signal), chosen, 0) - got) > LIMIT]:
                wrong.append(
                    f"both: {len(bad)} of {len(rows)} targets are not the reward of their action, e.g. {bad[0]:.2f}"
                )
                break
        return Finding(
            not wrong, "; ".join(wrong) or f"as by hand: {'; '.join(shown)}", f"within {LIMIT:g}" + f", at {under}" * bool(under),
            "an estimate reaches from one episode into the next: the mask of the ends is missing or one step off\n"
            "rewards, observations and ends of a step do not belong to one another (stored before or after the step)\n"
            "what is learnt from are other actions than those taken\n"
            "the discount is missing, or applied twice", evidence={"known": shown},
        )  # fmt: skip

    return prove


def lag_gate(subject: Subject) -> Gate:
    """Do targets stand still, or move slowly, while the net that learns from them moves?"""

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
            apart >= 0.2 * moved, f"the net's own values spread by {moved:.2g}, their distance from the targets by {apart:.2g}",
            "a distance that changes: a fifth of that or more, as targets lag behind the net",
            "the target network is the net itself, not a copy (or is copied after every update)\n"
            "the value in the target is taken from the net that learns, not from the target network",
            evidence={"targets": targets.tolist(), "values": values.tolist()},
        )  # fmt: skip

    return prove


def exploration_gate(subject: Subject) -> Gate:
    """Rewards of the steps taken while training: at first from trying, at last from what was learnt."""

    @gate(
        "exploration", rows="R4", title="actions in training move from exploration to the learnt policy", symptom=True
    )
    def prove(proof: Proof) -> Finding:
        rewards = learnt(proof, subject, "action", units=20).rewards
        share = {unit: (torch.cat(some) > 0).double().mean().item() for unit, some in rewards.items()}
        first, last = share[0], share[max(share)]
        return Finding(
            0.02 <= first <= 0.98 and last >= 0.75,
            f"the better of two actions is taken in {first:.0%} of the first iteration's steps and in {last:.0%} of the last's",
            "2% to 98% of the first, 75% or more of the last",
            f"{_why_unexplored(first, last)}\n"
            "what is stored is not what was done\n"
            "the better action is not learnt at all (see probe-action)", evidence={"share": list(share.values())},
        )  # fmt: skip

    return prove


def _why_unexplored(first: float, last: float) -> str:
    """What the shares of the better of two actions say: an untrained net that is never overruled always takes the same one, actions
    at random take each half of the time."""
    greedy, random = not 0.02 <= first <= 0.98, 0.3 <= last <= 0.7
    if greedy and random:
        return "the chance of a random action is turned round, 1 - epsilon: greedy at first, at random at the end"
    if greedy:
        return "nothing is ever tried at random: the untrained net's own action is taken from the start"
    return "the chance of a random action does not fall: its schedule is stuck at its start, or not told how far the run is"


def next_action_gate(subject: Subject) -> Gate:
    """Two steps, of which the second's action alone is rewarded: what the first is worth does not depend on its own action."""

    @gate("next-action", rows="R5", title="a target uses the value of the next action")
    def prove(proof: Proof) -> Finding:
        batches = learnt(proof, subject, "later", units=12, noted=11, **subject.estimated).batches
        rows = {k: torch.cat([b[k] for b in batches]).cpu().double() for k in ("observation", "action", "return")}
        first = (rows["observation"] == 0).all(-1)
        action, found = rows["action"].view(len(first), -1)[first, 0], rows["return"][first]
        slope = (torch.cov(torch.stack([action, found]))[0, 1] / action.var()).item()
        share = abs(slope) * (action.max() - action.min()).item() / max(rows["return"].abs().max().item(), 1e-9)
        return Finding(
            share <= 0.25, f"targets of the first step change with its own action, by {share:.0%} of the largest",
            "25% or less: no action is better than another there",
            "the value in the target is taken at the action of the step before (the stored one), not at the next one",
            evidence={"slope": slope, "rows": len(found)},
        )  # fmt: skip

    return prove


def lower_gate(subject: Subject) -> Gate:
    """One critic at a time says far less than it did: by as much fall the targets, and what the policy gains."""

    @gate("lower-critic", rows="R5", title="targets and policy use the lowest of several critics")
    def prove(proof: Proof) -> Finding:
        def fall(critics: Any, i: int) -> None:
            with torch.no_grad():
                critics[i][-1].bias -= FALL

        def target(i: int | None = None) -> float:
            """Of the first of two steps, in the first update, when critic `i` of the target has fallen."""
            lowered = None if i is None else lambda stage: fall(stage.state["target"].net.critics, i)
            result = learnt(proof, subject, "delay", units=1, before=lowered)
            rows = {k: result.run.gather(result.batches[0][k]).cpu() for k in ("observation", "return")}
            return rows["return"][(rows["observation"] == answers(subject, "delay")[0][1]).all(-1)].mean().item()

        result = learnt(proof, subject, "constant", units=1)
        model, batch = result.stage.model, result.batches[0]
        if not hasattr(model, "critics") or "target" not in result.stage.state:
            raise Skip("no `critics` in the model, or no 'target' in what is saved")
        targets, gains, whole = [], [], target()
        for i in range(len(model.critics)):
            targets.append((whole - target(i)) / (GAMMA * FALL))
            was = result.stage.loss(model, batch)["policy"].item()
            fall(model.critics, i)
            gains.append((result.stage.loss(model, batch)["policy"].item() - was) / (FALL * len(batch["action"])))
            with torch.no_grad():
                model.critics[i][-1].bias += FALL
        return Finding(
            min(targets + gains) >= 0.95, f"of one critic's fall the targets take {few(targets)}, the policy {few(gains)}",
            "all of it (0.95 or more), whichever falls",
            "a target from one critic alone, from their mean or the highest: values grow that nothing earns\n"
            "the policy asks one critic alone", evidence={"targets": targets, "policy": gains},
        )  # fmt: skip

    return prove


@gate("density", rows="R5", title="an action's log-probability includes the transforms of the drawn number")
def density(proof: Proof) -> Finding:
    """`sample(observations, noise)` of the rehearsed model: the log-density of its actions against that of the noise, divided by
    the volume that noise is stretched to (the determinant of the Jacobian), in double precision."""
    _, stage, record = rehearsed(proof)
    model = copy.deepcopy(stage.model).cpu().double().eval()  # there every device can
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
        apart <= LIMIT, f"log-densities of {len(known)} actions are up to {apart:.2g} off the change of variables", f"{LIMIT:g}",
        "tanh's slope is missing: log(1 - a^2) of every number of an action has to be subtracted\n"
        "a mean over the numbers of an action instead of a sum, or another axis\n"
        "the Gaussian has another width than the one that is drawn from",
        evidence={"found": found.tolist(), "known": known.tolist()},
    )  # fmt: skip


def entropy_gate(subject: Subject) -> Gate:
    """Where every action earns the same, a policy that is paid for its entropy stays wide."""

    @gate("entropy", rows="R5", title="a policy without rewards keeps its entropy")
    def prove(proof: Proof) -> Finding:
        result = learnt(proof, subject, "constant", units=20)
        observations = known(subject, result.stage.model, "constant", 1)[0].expand(512, -1).to(result.run.device)
        noise = torch.randn(512, 1, generator=torch.Generator().manual_seed(0)).to(result.run.device)
        with torch.no_grad():
            entropy = -result.stage.model.sample(observations, noise)[1].mean().item()
        return Finding(
            entropy >= -1, f"its actions have an entropy of {entropy:.2g} nats", "-1 or more (evenly drawn: 0.69)",
            "the sign of the entropy in the policy's loss: it is paid for being sure of itself\n"
            "the temperature goes the wrong way, or below 0",
        )  # fmt: skip

    return prove


def whitening_gate(subject: Subject) -> Gate:
    """Mean and spread of the advantages in every minibatch; and the gradient of the policy's term on one rollout whose rewards are
    a thousand times those of another, the same in all else."""

    @gate("whitening", rows="R3", title="advantages are whitened just before the loss, at any reward scale")
    def prove(proof: Proof) -> Finding:
        loud, louder = (learnt(proof, subject, name, units=1, batch=64) for name in ("loud", "louder"))
        if not loud.gradient or "advantage" not in loud.batches[0]:
            raise Skip("no loss term 'policy', or batches without an entry 'advantage'")
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
            f"mean up to {worst:.2g} off, standard deviation {least:.2g} to {most:.2g} over {len(means)} minibatches; rewards a "
            f"thousand times larger make the policy's gradient {ratio:.4g} times as long (cosine {cosine:.3f})",
            "mean 0 (within 0.5), standard deviation 1 (0.5 to 1.5), a gradient that does not know the size of the rewards (5%)",
            "advantages are not whitened, or something is added or multiplied afterwards\n"
            "whitened over padding, along another axis, or with the statistics of another batch",
            evidence={"means": means, "standard_deviations": spreads, "ratio": ratio, "cosine": cosine},
        )  # fmt: skip

    return prove


def memory_gate(subject: Subject) -> Gate:
    """On a learnt probe: is the loss given the probabilities that actions had in the rollout, and is the value at an episode's
    beginning that of what is observed, whatever was before?"""

    @gate(
        "memory",
        rows="R4 R5",
        title="recurrent state is reset between episodes, and sequences keep their order in time",
    )
    def prove(proof: Proof) -> Finding:
        if not getattr(proof.cfg, "rnn_hidden_size", 0):
            raise Skip("nothing is remembered (--rnn-hidden-size 0)")
        ratios: list[Tensor] = []

        def look(loss: Callable, model: torch.nn.Module, batch: dict) -> None:
            """Before the first update of a unit: what one more of an advantage changes in the policy's term is its ratio."""
            one = torch.ones_like(batch["advantage"]).requires_grad_()
            term = loss(model, batch | {"advantage": one})["policy"]
            ratios.append(torch.autograd.grad(-term, one)[0])

        result = learnt(proof, subject, "memory", units=13, noted=12, look=look)
        batches, limit = result.batches, 1e-4 if result.run.precision == "fp32" else 5e-2
        apart = ratios[0].log().abs().max().item()
        rows, value = (torch.cat([b[k] for b in batches]) for k in ("observation", "value"))
        first = {signal: value[(rows[:, 0] == signal) & (rows[:, 1] == 0)] for signal in (-1, 1)}  # steps of an episode
        spread = max((v.max() - v.min()).item() for v in first.values())
        return Finding(
            apart <= limit and spread <= limit,
            f"log-probabilities in the first update are up to {apart:.2g} off those of the rollout; values of one observation at "
            f"an episode's beginning spread by {spread:.2g}", f"{limit:g} or less",
            "the state is not set to zero where an episode ended: in the rollout, or where it is made anew for the update\n"
            "the steps of a minibatch are not in the order of time, or of several environments\n"
            "the state before the first step of a rollout is not the one it was collected from",
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
    """Random actions, the state saved half-way; fresh environments that load it must see the very same observations after."""
    cfg = proof.cfg
    run, stage = proof.build(Plan(steps=1))
    envs = environments_of(stage)
    if envs is None:
        return Finding(
            False, "no environments in what is saved", "the environments in stage.state",
            "they are not in stage.state: a resumed run would begin new episodes")  # fmt: skip
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
    wrong = [] if again else ["the same seeds give other first observations"]
    if not torch.equal(straight, resumed):
        wrong.append(f"observations differ by up to {(straight - resumed).abs().max():.3g} after the replay")
    new = Environments(cfg.env, envs.n, seed=envs.seed, stack=cfg.frame_stack, rank=run.rank, world=run.world)
    used, first = (begun(some, saved, actions[:8]) for some in (envs, new))
    if not torch.equal(used, first):
        step, apart = (used != first).flatten(1).any(1).nonzero()[0].item(), (used - first).abs().max().item()
        wrong.append(f"what is seen {step} steps into an episode depends on the episode before, by up to {apart:.3g}")
    fault, remark = starts.shared(new)
    wrong += [fault] * bool(fault)
    told = f"{n} environments with {len(start.unique(dim=0))} beginnings, {sum(envs.episode)} episodes over in {2 * steps} steps"
    told += f" ({remark})" * bool(remark)
    return Finding(
        not wrong, "; ".join(wrong) or f"{told}; replayed bit for bit", "independent seeds; the same observations after a replay",
        "the environment draws from a generator that reset(seed=...) does not seed (numpy's or Python's global one)\n"
        "its state goes on over a reset: what is left of an earlier episode is not in its seed and actions\n"
        "observations are stacked over the end of an episode: at its beginning there are none from before\n"
        "several environments were given the same seed", evidence={"episodes": sum(envs.episode)},
    )  # fmt: skip


def begun(envs: Environments, saved: dict[str, Any], actions: Tensor) -> Tensor:
    """What is seen at the beginning of the episodes after `saved`, and after each of `actions`: (1 + actions, n_mine, n_obs)."""
    envs.load_state_dict({"episode": [k + 1 for k in saved["episode"]], "actions": [torch.zeros(0)] * envs.n})
    return torch.stack([envs.observation.clone(), *(envs.step(row)["next_observation"] for row in actions)])


def gates(subject: Subject, *, on_policy: bool) -> list[Gate]:
    """All of them, for the stage that `subject.make(cfg, run)` builds."""
    probes = [
        ("constant", "R5", "one step, reward 1: the value is 1",
         "the value of what follows is added although the episode terminated (bootstrapped past the end)\n"
         "the value's loss or its optimiser: wrong target, sign, no gradient (see wiring), or another term that moves it"),
        ("observation", "R5", "the reward is what is observed: the value follows the observation",
         "observations do not reach the value function, or are stored beside another step's reward (before or after the step)\n"
         "samples are shuffled apart: observation, action and return each in an order of their own\n"
         "what is stored are views of a buffer that is overwritten"),
        ("delay", "R5", "a reward that comes one step later is discounted",
         "the discount is missing, or the value of the next observation does not reach this one's target\n"
         "a target network that is never updated\n"
         "episodes are cut at the wrong step (the mask is one off)"),
        ("limit", "R5", "a time limit is no end: the value of the last observation counts",
         "truncation is treated as termination: bootstrap where only the time limit ended the episode\n"
         "the value is taken from the observation after the reset, not from the last one of the episode\n"
         "what follows n rewards is not discounted n times"),
        ("action", "R5", "the better of two actions is taken",
         "the loss: its sign, its ratio, or values and log-probabilities of other actions than those taken\n"
         "advantages that do not belong to their actions\n"
         "a temperature that rises where it should fall keeps the policy undecided, so does its term where it reaches the policy"),
        ("both", "R5", "the better action depends on the observation",
         "observations do not reach the policy, or advantages are mixed up between samples\n"
         "observations are those of another step than the action's"),
        ("memory", "R5", "the better action depends on the observation before",
         "what is stacked are not the last observations: the newest again and again, or views of one array\n"
         "they are stored with another step's action, or the policy reads the newest alone"),
        ("scale", "R3", "the same with observations of 299.7 and 300.3, rewards of 1000",
         "observations are not brought to scale by running statistics\n"
         "returns of this size swamp the value's loss: bring them to scale, too"),
    ]  # fmt: skip
    *found, scale = [probe_gate(subject, *one) for one in probes]
    gates_of = (whitening_gate, memory_gate) if on_policy else (lag_gate, next_action_gate, exploration_gate)
    own = [f(subject) for f in gates_of]
    own += [lower_gate(subject)] if subject.box and not on_policy else []
    own += [density, entropy_gate(subject)] if subject.box else []
    configured = [entries_gate(subject.unread, subject.formula), returns_gate(subject.targets)]
    configured += [target_rate_gate(subject.lag)] if subject.lag else []
    return [formula_gate(subject.formula), targets_gate(subject), *found, *own, scale, *configured, replay]
