"""The gate `environments`: different seeds, and exact continuation from a checkpoint."""

from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.loop.run import Rehearsal
from trainworthy.recipes.rl.control.data.environments import Environments, draw
from trainworthy.recipes.rl.control.gates import endings, starts
from trainworthy.recipes.rl.control.gates.learning_probes import (
    environments_of,
)

STEPS = 64  # of two sequences of actions
IDLE = "no action has an effect in this environment: its table of effects has keys of another type, or a wrapper drops the action"


@gate(
    "environments",
    rows="R4 C15",
    title="environments have different seeds, and continue from a checkpoint exactly",
    compares_ranks=True,
)
def replay(context: GateContext) -> Finding:
    """Takes random actions and saves the state half-way. New environments that load it must return the same observations."""
    cfg = context.cfg
    run, stage = context.build(Rehearsal(steps=1))
    envs = environments_of(stage)
    if envs is None:
        return Finding(
            False, "no environments in stage.state", "the environments in stage.state",
            "they are not saved: a resumed run would start new episodes")  # fmt: skip
    n, steps = len(envs.mine), 40
    draws = torch.Generator().manual_seed(cfg.run.seed)
    actions = draw(envs.vector.single_action_space, (2 * steps, n), draws)
    start = envs.observation.clone()
    before = [envs.step(row) for row in actions[:steps]]
    saved = envs.state_dict()
    after = [envs.step(row) for row in actions[steps:]]
    straight = torch.stack([one["next_observation"] for one in after])
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
        step, difference = (used != first).flatten(1).any(1).nonzero()[0].item(), (used - first).abs().max().item()
        wrong.append(
            f"observations {step} steps into an episode depend on the episode before, by up to {difference:.3g}"
        )
    idle = without_effect(new, saved, [draw(envs.vector.single_action_space, (STEPS, n), draws) for _ in range(2)])
    bootstrapped, ends = endings.as_truncations(cfg.env, cfg.frame_stack, before + after, envs.seed)
    fault, remark = starts.shared(new)
    wrong += [one for one in (bootstrapped, fault, idle) if one]
    ended = sum(int((one["terminated"] | one["truncated"]).sum()) for one in before + after)
    measured = f"{n} environments with {len(start.unique(dim=0))} different starts, {ended} episodes ended in {2 * steps} steps"
    measured += f", {ends}" * bool(ends)
    measured += f" ({remark})" * bool(remark)
    return Finding(
        not wrong, "; ".join(wrong) or f"{measured}; continued bit for bit",
        "independent seeds; actions with an effect; the same observations after loading the state",
        "the environment draws from a generator that reset(seed=...) does not seed (numpy's or Python's global one)\n"
        "its state survives a reset, so an episode does not follow from its seed and actions alone\n"
        "stacked observations cross the end of an episode: the first ones must not contain older frames\n"
        "several environments have the same seed", evidence={"episodes": ended},
        cause="a wrapper passes the end of an episode on as a truncation: its last state is bootstrapped as if the episode went on"
        * bool(bootstrapped) or IDLE * bool(idle),
    )  # fmt: skip


def without_effect(envs: Environments, saved: dict[str, Any], actions: list[Tensor]) -> str:
    """Take two sequences of random actions (STEPS, n_mine, ...) from the same starts. Return a fault if observations, rewards and ends are equal."""
    found = []
    for chosen in actions:
        begun(envs, saved, chosen[:0])
        found.append([envs.step(row) for row in chosen])
    kinds = ("next_observation", "reward", "terminated", "truncated")
    if any(not torch.equal(one[k], other[k]) for one, other in zip(*found, strict=True) for k in kinds):
        return ""
    return f"two random sequences of {STEPS} actions give the same observations, rewards and ends"


def begun(envs: Environments, saved: dict[str, Any], actions: Tensor) -> Tensor:
    """Return the observations at the start of the episodes after `saved`, and after each of `actions`: (1 + actions, n_mine, n_obs)."""
    envs.load_state_dict({"episode": [k + 1 for k in saved["episode"]], "actions": [torch.zeros(0)] * envs.n})
    return torch.stack([envs.observation.clone(), *(envs.step(row)["next_observation"] for row in actions)])
