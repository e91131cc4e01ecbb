"""Gates of reinforcement learning: environments whose answer is known by hand, learnt through the recipe's own code; what stands
just before the loss; environments that can be saved.

A recipe hands them its stage function. They ask of it: settings `env`, `envs`, `rollout`, `gamma` and `gae_lambda`; a model with
`value(observations)` in units of the reward and logits as the first of what it returns; batches with `advantage` and `return`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from core.gates import Finding, Gate, Proof, Skip, build, gate
from core.run import Plan, Run
from core.stage import Stage
from recipes.rl.environments import Environments
from recipes.rl.probes import PROBES

Make = Callable[[Any, Run], Stage]
UNITS = 60  # of 8 environments x 16 steps
EVERY, IN_A_ROW = (
    3,
    4,
)  # looked at after every third, and close four times in a row: a value on its way elsewhere passes by
CLOSE = 0.1  # of the largest value: how near the learnt values must come
LIMIT = 1e-3
GAMMA = 0.5  # discounts are told from none within two steps


# ---------------------------------------------------------------------------------------------------------------- probes
@dataclass
class Learnt:
    """What the recipe's own `train()` made of a probe."""

    run: Run
    stage: Stage
    batches: list[dict] = field(default_factory=list)
    """Of the first unit, just before the loss."""
    gradient: list[Tensor] = field(default_factory=list)
    """Of the policy's term on the first of them."""


def learnt(proof: Proof, make: Make, name: str, *, units: int = UNITS, batch: int = 32, **settings: Any) -> Learnt:
    """The recipe's own `train()` on a probe, at a rate of the probe's own."""
    cfg = proof.cfg
    cfg = replace(cfg, env=f"probe/{name}-v0", envs=8, rollout=16, gamma=GAMMA, optim=replace(cfg.optim, lr=3e-3),
                  train=replace(cfg.train, batch_size=batch, accumulate=1), **settings)  # fmt: skip
    close: list[bool] = []

    def enough(stage: Stage, unit: int) -> bool:
        if unit % EVERY == 0 and units > 1:
            close.append(off(stage, PROBES[name]) <= CLOSE / 2)
        return len(close) >= IN_A_ROW and all(close[-IN_A_ROW:])

    run = Run(cfg, proof.accelerator, plan=Plan(steps=units, peak=True, watch=enough))
    stage = build(run, lambda run: make(cfg, run))
    own, found = stage.loss, Learnt(run, stage)

    def loss(model: torch.nn.Module, batch: dict) -> dict[str, Tensor]:
        terms = own(model, batch)
        if run.step == 0 and torch.is_grad_enabled():
            found.batches.append({k: v.detach().clone() for k, v in batch.items()})
            if not found.gradient and "policy" in terms:
                weights = [p for p in model.parameters() if p.requires_grad]
                given = torch.autograd.grad(terms["policy"], weights, retain_graph=True, allow_unused=True)
                found.gradient = [g.flatten() for g in given if g is not None]
        return terms

    stage.loss = loss
    proof.train(cfg, run, stage)
    return found


def off(stage: Stage, probe: dict[str, Any]) -> float:
    """Distance from the known answer: of a value, as a share of the largest; of the probability of a best action, from 1."""
    observations, values, best = answers(probe)
    with torch.no_grad():
        device = next(stage.model.parameters()).device
        found, logits = stage.model.value(observations.to(device)).cpu(), stage.model(observations.to(device))[0].cpu()
    apart = (found - values).abs().max().item() / max(values.abs().max().item(), 1e-9)
    if best is None:
        return apart
    return (1 - logits.softmax(-1).gather(-1, best[:, None])).max().item() / 3  # 0.7 of the best action is near enough


def answers(probe: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """(observations, their values under the best policy, their best actions where there is a choice), by hand: the rules are
    played to their end for every signal and step."""
    rule, length, limited = probe["rule"], probe.get("length", 1), probe.get("limited", False)
    n_actions, shift, scale = probe.get("actions", 1), probe.get("shift", 0.0), probe.get("scale", 1.0)
    rows, values, best = [], [], []
    for signal in (-1, 1) if probe.get("random") else (0,):
        later = rule(signal, 0, 0) / (1 - GAMMA) if limited else 0.0  # a time limit is not seen: it goes on for ever
        for step in reversed(range(1 if limited else length)):
            rewards = [float(rule(signal, a, step)) for a in range(n_actions)]
            later = max(rewards) + GAMMA * later
            rows.append([shift + scale * signal, shift + scale * (0 if limited else step)])
            values.append(later)
            best.append(rewards.index(max(rewards)))
    return torch.tensor(rows), torch.tensor(values), torch.tensor(best) if n_actions > 1 else None


def probe_gate(make: Make, name: str, rows: str, title: str, remedy: str) -> Gate:
    """Is the probe solved, through the recipe's own loop?"""

    @gate(f"probe-{name}", rows=rows, title=title)
    def prove(proof: Proof) -> Finding:
        result = learnt(proof, make, name)
        run, stage = result.run, result.stage
        observations, values, best = answers(PROBES[name])
        with torch.no_grad():
            found = stage.model.value(observations.to(run.device)).tolist()
            share = stage.model(observations.to(run.device))[0].softmax(-1).cpu()
        apart = off(stage, PROBES[name])
        shown = (
            f"values {few(found)}"
            if best is None
            else f"best actions taken with {few(share.gather(-1, best[:, None])[:, 0])}"
        )
        needed = (
            f"{few(values)} within {CLOSE:.0%} of the largest"
            if best is None
            else f"each with {1 - 3 * CLOSE:.1f} or more"
        )
        return Finding(
            apart <= CLOSE, f"{shown} after {run.step} rollouts", f"{needed}, within {UNITS} rollouts", remedy,
            evidence={"observations": observations.tolist(), "values": found, "known": values.tolist(), "off": apart},
        )  # fmt: skip

    return prove


def few(values: Any) -> str:
    return " ".join(f"{float(v):.2f}" for v in values)


# ------------------------------------------------------------------------------------------------------- before the loss
def targets_gate(make: Make) -> Gate:
    """Do the first rollout's value targets equal the returns that follow from the rules?"""

    @gate("targets", rows="R5", title="the value targets of a first rollout are the returns known by hand")
    def prove(proof: Proof) -> Finding:
        wrong, shown = [], []
        for name in ("constant", "delay"):
            batches = learnt(proof, make, name, units=1, gae_lambda=1.0).batches
            got = torch.cat([b["return"] for b in batches]).unique()
            known = answers(PROBES[name])[1]
            gap = (got[:, None] - known).abs().min(1).values
            cut = (gap > LIMIT).sum().item()
            shown.append(f"{name} {few(sorted(known.tolist()))}")
            if cut:
                wrong.append(
                    f"{name}: targets such as {few(got[gap > LIMIT][:3])}, by hand only {few(sorted(known.tolist()))}"
                )
        return Finding(
            not wrong, "; ".join(wrong) or f"as by hand: {'; '.join(shown)}", f"within {LIMIT:g}, at gae_lambda 1",
            "an estimate reaches from one episode into the next: the mask of the ends is missing or one step off\n"
            "rewards, observations and ends of a step do not belong to one another (stored before or after the step)\n"
            "the discount is missing, or applied twice", evidence={"known": shown},
        )  # fmt: skip

    return prove


def whitening_gate(make: Make) -> Gate:
    """Mean and spread of the advantages in every minibatch; and the gradient of the policy's term on one rollout whose rewards are
    a thousand times those of another, the same in all else."""

    @gate(
        "whitening", rows="R3", title="advantages are whitened just before the loss, whatever the size of the rewards"
    )
    def prove(proof: Proof) -> Finding:
        loud, louder = (learnt(proof, make, name, units=1, batch=64) for name in ("loud", "louder"))
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


# ----------------------------------------------------------------------------------------------------------- environments
@gate(
    "environments",
    rows="R4 C15",
    title="environments differ from one another, and go on from a checkpoint as if never stopped",
)
def replay(proof: Proof) -> Finding:
    """Random actions, the state saved half-way; fresh environments that load it must see the very same observations after."""
    cfg = proof.cfg
    run, stage = proof.build(Plan(steps=1))
    envs = next((s for s in stage.state.values() if isinstance(s, Environments)), None)
    if envs is None:
        return Finding(
            False, "no environments in what is saved", "the environments in stage.state",
            "they are not in stage.state: a resumed run would begin new episodes")  # fmt: skip
    n, steps = len(envs.mine), 40
    draws = torch.Generator().manual_seed(cfg.run.seed)
    actions = torch.randint(envs.vector.single_action_space.n, (2 * steps, n), generator=draws)
    start = envs.observation.clone()
    for row in actions[:steps]:
        envs.step(row)
    saved = envs.state_dict()
    straight = torch.stack([envs.step(row)["next_observation"] for row in actions[steps:]])
    fresh = Environments(cfg.env, envs.n, seed=envs.seed, rank=run.rank, world=run.world)
    again = torch.equal(fresh.observation, start)
    fresh.load_state_dict(saved)
    resumed = torch.stack([fresh.step(row)["next_observation"] for row in actions[steps:]])
    wrong = [] if again else ["the same seeds give other first observations"]
    if not torch.equal(straight, resumed):
        wrong.append(f"observations differ by up to {(straight - resumed).abs().max():.3g} after the replay")
    vector = envs.vector
    varied = len({vector.envs[0].reset(seed=s)[0].tobytes() for s in range(5)}) > 1  # else every episode begins alike
    if varied and len(start.unique(dim=0)) < n:
        wrong.append(f"{n} environments begin with {len(start.unique(dim=0))} different observations")
    told = f"{n} environments with {len(start.unique(dim=0))} beginnings, {sum(envs.episode)} episodes over in {2 * steps} steps"
    return Finding(
        not wrong, "; ".join(wrong) or f"{told}; replayed bit for bit", "seeds of their own; the same observations after a replay",
        "the environment draws from a generator that reset(seed=...) does not seed (numpy's or Python's global one)\n"
        "its state goes on over a reset: what is left of an earlier episode is not in its seed and actions\n"
        "every environment was seeded alike", evidence={"episodes": sum(envs.episode)},
    )  # fmt: skip


def gates(make: Make) -> list[Gate]:
    """All of them, for the stage that `make(cfg, run)` builds."""
    probes = [
        ("constant", "R5", "one step, reward 1: the value is 1",
         "the value of what follows is added although the episode terminated (bootstrapped past the end)\n"
         "the value's loss or its optimiser: wrong target, sign, or no gradient (see wiring)"),
        ("observation", "R5", "the reward is what is observed: the value follows the observation",
         "observations do not reach the value function, or are stored beside another step's reward (before or after the step)\n"
         "samples of a rollout are shuffled apart: observation, action and return each in an order of their own"),
        ("delay", "R5", "a reward that comes one step later is discounted",
         "the discount is missing, or the value of the next observation does not reach this one's target\n"
         "episodes are cut at the wrong step (the mask is one off)"),
        ("limit", "R5", "a time limit is no end: the value of the last observation counts",
         "truncation is treated as termination: bootstrap where only the time limit ended the episode\n"
         "the value is taken from the observation after the reset, not from the last one of the episode"),
        ("action", "R5", "the better of two actions is taken",
         "the policy's loss: sign, ratio, or log-probabilities of other actions than those taken\n"
         "advantages that do not belong to their actions"),
        ("both", "R5", "the better action depends on the observation",
         "observations do not reach the policy, or advantages are mixed up between samples\n"
         "observations are those of another step than the action's"),
        ("scale", "R3", "the same with observations around 300 and rewards of 1000",
         "observations are not brought to scale by running statistics\n"
         "returns of this size swamp the value's loss: bring them to scale, too"),
    ]  # fmt: skip
    found = [probe_gate(make, *one) for one in probes]
    return [targets_gate(make), *found[:6], whitening_gate(make), found[6], replay]
