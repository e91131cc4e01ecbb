"""Records two rollouts of a control recipe's own `train()`, for the gates of its objective."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Skip
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe.stage import Stage, batch_size
from trainworthy.recipes.rl.control.data.environments import Environments
from trainworthy.recipes.rl.control.data.replay import Replay
from trainworthy.recipes.rl.control.models.memory import Remembering
from trainworthy.recipes.rl.control.models.nets import Running


@dataclass
class Seen:
    """Two rollouts of the recipe's own `train()` at its own settings."""

    run: Run
    stage: Stage
    steps: dict[str, Tensor] = field(default_factory=dict)
    """Steps of the environments, (steps, environments, ...) on the CPU: observation, action, reward, ..."""
    iteration: list[int] = field(default_factory=list)
    """The rollout of each step."""
    begins: list[nn.Module] = field(default_factory=list)
    """The model at the start of the second rollout, and of each later pass over its samples; none with a replay buffer."""
    batch: dict[str, Any] = field(default_factory=dict)
    """The last batch, as the loss gets it,"""
    model: nn.Module | None = None
    """the model at that time,"""
    target: nn.Module | None = None
    """its target network at that time,"""
    sampled: tuple[Tensor, ...] = ()
    """and the last inputs and outputs of `model.sample` without gradients: observation, action, log-probability."""
    probability: Tensor | None = None
    """Of each row of the last batch: how likely the replay buffer drew it, relative to uniform sampling. None: rows of another order."""
    misstored: str = ""
    """Which entry of the replay buffer is not what the environments returned, and where; empty if none is."""


def seen(context: GateContext) -> Seen:
    """Return the recording that `formula`, `returns` and `entries` use."""
    return context.once("rl-seen", lambda: _rehearse(context))


def stepped_in(stage: Stage) -> Environments | Remembering:
    """Return the environments that the loop steps."""
    found = next((s for s in stage.state.values() if isinstance(s, Environments | Remembering)), None)
    if found is None:
        raise Skip("no environments in stage.state (see environments)")
    return found


def _rehearse(context: GateContext) -> Seen:
    run, stage = context.build(Rehearsal(steps=2, peak=True))
    for net in (stage.model, getattr(stage.state.get("target"), "net", None)):
        _sized(net)
    out, rows, envs, own, answered = Seen(run, stage), [], stepped_in(stage), stage.loss, []
    plain, step = getattr(stage.model, "sample", None), envs.step
    replay = next((s for s in stage.state.values() if isinstance(s, Replay)), None)
    draw, newest = getattr(replay, "draw", None), []
    per_pass, learnt = context.cfg.num_steps * len(envs.mine), [0]

    def stepped(actions: Tensor) -> dict[str, Tensor]:
        before = envs.observation.clone()
        followed = step(actions)
        out.iteration.append(run.step)
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

    def draws(*args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        newest[:] = draw(*args, **more)
        return tuple(newest)

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        if run.step == 1 and torch.is_grad_enabled():
            out.batch = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in batch.items()}
            out.model, target, out.sampled = _copy(model), stage.state.get("target"), tuple(answered)
            out.target = _copy(target.net) if hasattr(target, "net") else None
            out.probability = _probability(replay, newest, batch)
            if learnt[0] % per_pass == 0 and replay is None:  # with a buffer an iteration has no passes
                out.begins.append(out.model)
            learnt[0] += out.batch["return"].numel() if "return" in out.batch else batch_size(batch)
        return own(model, batch)

    envs.step, stage.loss = stepped, loss
    if replay is not None:
        replay.draw = draws
    if plain is not None:
        stage.model.sample = sample
    try:
        context.train(context.cfg, run, stage)
    finally:
        stage.loss = own
        if replay is not None:
            vars(replay).pop("draw", None)
        stage.model.__dict__.pop("sample", None)
    if not out.batch:
        raise Skip("no update in the second iteration (see wiring)")
    stage.copies = [net for net in {id(n): n for n in (*out.begins, out.model, out.target)}.values() if net is not None]
    out.steps = {k: _everywhere(run, torch.stack([r[k] for r in rows])) for k in rows[0]}
    out.misstored = _misstored(out, replay)
    return out


def _probability(replay: Replay | None, newest: list[Tensor], batch: dict) -> Tensor | None:
    """Return the probability of each row of the batch, if its rows are the last ones of the newest draw."""
    seen_now = batch.get("observation")
    if replay is None or not newest or not isinstance(seen_now, Tensor) or not 0 < len(seen_now) <= len(newest[0]):
        return None
    places, likelier = (v[-len(seen_now) :] for v in newest)
    stored = replay.rows["observation"].flatten(0, 1)[places]
    return likelier.detach().cpu().clone() if torch.equal(stored, seen_now) else None


def _misstored(out: Seen, replay: Replay | None) -> str:
    """Compare the buffer with the steps; empty also if it holds other steps, or the same in another order."""
    steps, n = out.steps, len(out.iteration)
    if replay is None or not replay.rows or not n == replay.added == len(replay):
        return ""

    def other(key: str) -> Tensor:
        """Return whether the entry differs, (steps, environments)."""
        return (replay.rows[key][:n].cpu() != steps[key]).view(*steps["reward"].shape, -1).any(-1)

    if other("observation").any() or other("action").any():
        return ""
    done, last = (
        steps["terminated"] | steps["truncated"],
        torch.tensor(out.iteration).diff(append=torch.tensor([-1])) != 0,
    )
    for key in ("next_observation", "reward", "terminated", "truncated"):
        if (off := other(key)).any():
            ends, lasts = int((off & done).sum()), int((off & ~done & last[:, None]).sum())
            return (
                f"`{key}` in the replay buffer is not what the environment returned, in {int(off.sum()):,} of {off.numel():,} steps: "
                f"{ends} at the end of an episode, {lasts} others at the end of a rollout"
            )
    return ""


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
