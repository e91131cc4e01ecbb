"""Proximal policy optimisation (Schulman 2017): learn to act in a gymnasium environment.

tiny  CartPole-v1, two CPU cores, less than a minute of training.
full  LunarLander-v3 (needs gymnasium[box2d]), or any id by `--env`; more environments, more steps. The same code path.

A truncated episode is bootstrapped with the value of its last observation; a terminated one is not. Advantages are normalised in
every minibatch. Observations and returns are normalised with statistics stored in the model, which are updated once per rollout
and never in an evaluation. The result is the return of evaluation episodes with the most likely actions. Actions are discrete or
continuous: the environment selects one of `HEADS`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn
from trainworthy.core.base import seeds
from trainworthy.core.base.config import Optim, RunSettings, Train
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.rl.control.data import environments
from trainworthy.recipes.rl.control.data.environments import Environments, Episodes
from trainworthy.recipes.rl.control.evaluation import episode_pictures, episodes
from trainworthy.recipes.rl.control.gates import agents as gates
from trainworthy.recipes.rl.control.gates import definitions, formulas, monitors
from trainworthy.recipes.rl.control.models import usage
from trainworthy.recipes.rl.control.models.heads import HEADS
from trainworthy.recipes.rl.control.models.memory import Memory, Remembering, fits, player
from trainworthy.recipes.rl.control.models.nets import Running, built_again, mlp

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of rl/ppo. An iteration, which counts as an epoch, is one rollout and the updates on it: --train.epochs counts
    rollouts, --train.batch-size the samples per update, --train.eval-batch-size the parallel evaluation episodes."""

    SEARCH_RANGES = "gamma=0.9:0.9999 gae_lambda=0.8:1 clip_range=0.1:0.4 ent_coef=1e-5:0.1 vf_coef=0.2:1 update_epochs=1:20"  # fmt: skip
    env: str = "CartPole-v1"
    """Id of a gymnasium environment with discrete actions, or with continuous ones of finite range (`module:Name-v0` imports the
    module first)."""
    frame_stack: int = 1
    """Number of recent observations that the policy reads; more than 1 if the newest is not sufficient."""
    rnn_hidden_size: int = 0
    """Size of a recurrent net's hidden state; 0: no recurrent net. Minibatches then hold whole environments."""
    num_envs: int = 16
    """Parallel environments, over all processes."""
    num_steps: int = 128
    """Steps of every environment per rollout."""
    update_epochs: int = 4
    """Passes over each rollout."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """GAE parameter: 0 uses the value function alone, 1 the rewards alone (Schulman 2016)."""
    clip_range: float = 0.2
    """Clipping range of the probability ratio of an action."""
    clip_range_vf: float = 0.2
    """Clipping range of the value, relative to the return scale; `inf` disables it."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    ent_coef: float = 0.01
    """Coefficient of the entropy bonus."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Hidden units of the policy net and of the value net."""
    eval_episodes: int = 100
    """Episodes per evaluation."""
    stop_lost: bool = True
    """End a run that clearly failed: it lost nearly all of its return, or its updates have no effect."""


def tiny() -> Config:
    """CartPole-v1 on two CPU cores. The discount covers 333 steps: a drifting cart takes 250 to leave its track."""
    return Config(
        gamma=0.997,
        train=Train(epochs=80, batch_size=256, eval_every=10),
        optim=Optim(lr=1e-3, weight_decay=0.0, clip=0.5, schedule="linear", warmup=0.0),
        run=RunSettings(threads=1, save_every=10),
    )


def full() -> Config:
    """LunarLander-v3, solved at a return of 200."""
    return Config(
        env="LunarLander-v3",
        num_steps=512,
        update_epochs=6,
        gamma=0.999,
        gae_lambda=0.98,
        train=Train(epochs=120, batch_size=512, eval_every=15),
        optim=Optim(lr=1e-3, weight_decay=0.0, clip=0.5, schedule="linear", warmup=0.0),
        run=RunSettings(threads=1, save_every=15),
    )


# ------------------------------------------------------------------------------------------------------------- rollouts
@torch.no_grad()
def collect(cfg: Config, run: core.Run, policy: "Policy", envs: Environments, iteration: int) -> dict[str, Tensor]:
    """Collect one rollout of the current policy: (num_steps, envs of this process, ...) each. Draws depend on (seed, iteration)
    alone."""
    draws = torch.Generator().manual_seed(seeds.derive(cfg.run.seed, "actions", iteration))
    noise = policy.head.noise(cfg.num_steps, envs.n, generator=draws)[:, envs.mine.start : envs.mine.stop].to(run.device)  # fmt: skip
    steps = []
    for t in range(cfg.num_steps):
        observation = envs.observation.to(run.device)
        action, log_prob = policy.sample(observation, noise[t])
        followed = {k: v.to(run.device) for k, v in envs.step(action).items()}
        steps.append({"observation": observation, "action": action, "log_prob": log_prob, **followed})
    rollout = {k: torch.stack([s[k] for s in steps]) for k in steps[0]}
    value, next_value = policy.value(rollout["observation"]), policy.value(rollout["next_observation"])
    done = rollout["terminated"] | rollout["truncated"]
    advantage = gae(rollout["reward"], value, next_value, rollout["terminated"], done, cfg.gamma, cfg.gae_lambda)
    return rollout | {"advantage": advantage, "return": advantage + value, "value": value}


def gae(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: float, lam: float
) -> Tensor:
    """Generalised advantage estimates (Schulman 2016), all (steps, envs). The value after a termination is zero, after a
    truncation the critic's. No estimate crosses an episode's end."""
    delta, goes_on = reward + gamma * next_value * ~terminated - value, gamma * lam * ~done
    advantage, later = torch.zeros_like(delta), torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        later = delta[t] + goes_on[t] * later
        advantage[t] = later
    return advantage


def minibatches(
    cfg: Config, run: core.Run, policy: "Policy", envs: Environments, rollout: dict, iteration: int
) -> Iterator[dict]:
    """Yield the rollout in minibatches, in a new order each pass. Advantages are normalised in each; values are relative to the
    return scale."""
    size, whole = policy.returns.rms, cfg.num_steps if cfg.rnn_hidden_size else 1  # steps that stay together
    rows = {k: rollout[k].flatten(0, 1) for k in ("observation", "action", "log_prob", "advantage")}
    rows |= {k: rollout[k].flatten() / size for k in ("return", "value")}
    for i in range(cfg.update_epochs):
        order = seeds.permutation(cfg.num_steps * cfg.num_envs // whole, cfg.run.seed, "minibatches", iteration, i)
        for chosen in order.split(cfg.train.batch_size // whole):
            own = envs.rows(chosen)
            batch = {k: v[own] for k, v in rows.items()}
            everyone = run.gather(batch["advantage"])  # the minibatch over all processes
            batch["advantage"] = (batch["advantage"] - everyone.mean()) / (everyone.std() + 1e-8)
            yield batch


# ---------------------------------------------------------------------------------------------------------------- model
class Policy(nn.Module):
    """Two tanh nets: raw observations (B, n_obs) -> inputs of `head`, which makes actions; value (B,), relative to the return
    scale. It owns the normalisation statistics of observations and returns; only `observe` updates them."""

    def __init__(self, n_obs: int, head: nn.Module, widths: tuple[int, ...], memory: int = 0):
        super().__init__()
        self.head = head
        self.observations, self.returns = Running(n_obs), Running(1)
        self.memory = Memory(n_obs, memory)
        self.actor, self.critic = (mlp(n_obs + memory, *widths, n) for n in (head.n, 1))
        nn.init.orthogonal_(self.actor[-1].weight, 0.01)  # nearly uniform actions

    def scaled(self, observation: Tensor) -> Tensor:
        return ((observation - self.observations.mean) / self.observations.std).clamp(-10, 10)

    def forward(self, observation: Tensor, through: bool = False) -> tuple[Tensor, ...]:
        x = self.memory(observation, self.scaled, through)
        return self.head(self.actor(x)), self.critic(x).squeeze(-1), *self.memory.carried(x)

    def outputs(self, observation: Tensor) -> Tensor:  # for `head`; the critic is not evaluated
        return self.head(self.actor(self.memory(observation, self.scaled)))

    def sample(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the actions for `noise`, their log-probability (B,))."""
        outputs = self.outputs(observation)
        action = self.head.draw(outputs, noise)
        return action, self.head.log_prob(outputs, action)

    def act(self, observation: Tensor) -> Tensor:
        """Return the most likely actions."""
        return self.head.best(self.outputs(observation))

    def value(self, observation: Tensor) -> Tensor:
        """Expected return, in units of the reward."""
        return self.critic(self.memory(observation, self.scaled)).squeeze(-1) * self.returns.rms

    def near(self, observation: Tensor, best: Tensor) -> Tensor:
        """1 where the policy takes the best action."""
        return self.head.near(self.outputs(observation), best)

    def observe(self, observation: Tensor, returned: Tensor) -> None:
        """Update the statistics with one rollout's observations and returns, over all processes: (n, n_obs) and (n,)."""
        self.observations.update(observation[:, : self.memory.n_obs])
        self.returns.update(returned[:, None])


# ---------------------------------------------------------------------------------------------------------------- stage
def ppo(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    if cfg.num_steps * cfg.num_envs % cfg.train.batch_size:
        raise UserError("a rollout is not cut evenly into minibatches", needed="--train.batch-size that divides --num-steps x --num-envs",
                        got=f"{cfg.num_steps} steps x {cfg.num_envs} environments, {cfg.train.batch_size} to an update")  # fmt: skip
    n_obs, size, space = environments.sizes(cfg.env, Discrete, Box, stack=cfg.frame_stack)
    solved, ceiling = environments.limits(cfg.env)
    fits(cfg.rnn_hidden_size, cfg.frame_stack, cfg.num_steps, cfg.train.batch_size, run.world)
    policy = Policy(n_obs, HEADS[space](size), cfg.hidden_sizes, cfg.rnn_hidden_size)
    envs = Environments(cfg.env, cfg.num_envs, seed=cfg.run.seed, stack=cfg.frame_stack, rank=run.rank, world=run.world)
    play, tiles, draw = episode_pictures.views(cfg.env, cfg.frame_stack)

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        outputs, value, *_ = model(batch["observation"], through=True)
        ratio = (policy.head.log_prob(outputs, batch["action"]) - batch["log_prob"]).exp()
        gain = torch.min(
            ratio * batch["advantage"], ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range) * batch["advantage"]
        )
        near = batch["value"] + (value - batch["value"]).clamp(-cfg.clip_range_vf, cfg.clip_range_vf)
        error = torch.max((value - batch["return"]).square(), (near - batch["return"]).square())
        return {
            "policy": -gain.sum(),
            "value": cfg.vf_coef * 0.5 * error.sum(),
            "entropy": -cfg.ent_coef * policy.head.entropy(outputs).sum(),
        }

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        returns = [play(b["seed"], player(act, model))[0] for b in run.batches(data)]
        return episodes.metrics(run.gather(torch.cat(returns).to(run.device)), solved)

    def act(model: nn.Module, observation: Tensor) -> Tensor:
        return model.act(observation.to(run.device)).cpu()

    def baselines() -> dict[str, dict[str, float]]:
        make = lambda: Policy(n_obs, HEADS[space](size), cfg.hidden_sizes, cfg.rnn_hidden_size)  # noqa: E731
        returned, _ = play(val_data.starts, player(act, built_again(make, cfg.run.seed).to(run.device)))
        return {"random actions": {"return": floor}, "untrained policy": {"return": returned.mean().item()}}

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        return tiles(batch["seed"], player(act, model), low=floor, high=ceiling)

    def export(folder: Path) -> None:
        """model.safetensors + config.json, and a program that runs without this project (torch.export)."""
        says = {Discrete: f"log-probabilities (B, {size}): act by argmax",
                Box: f"means and log deviations (B, {2 * size}): act by low + (1 + mean) / 2 * (high - low), clipped"}  # fmt: skip
        config = {"architecture": "Policy", "env": cfg.env, "n_obs": n_obs, "stack": cfg.frame_stack, "n_actions": size,
                  "memory": cfg.rnn_hidden_size, "widths": cfg.hidden_sizes, "first_action": envs.first_action, "low": envs.low, "high": envs.high,
                  **policy.memory.describe(environments.seen(n_obs, cfg.frame_stack), f"{says[space]}; value / return scale (B,)")}  # fmt: skip
        core.save_export(folder, policy, config, torch.zeros(2, policy.memory.row))

    val_data = Episodes(cfg.env, cfg.eval_episodes)
    floor = episodes.at_random(cfg.env, cfg.eval_episodes)
    return core.Stage(
        name="ppo",
        model=policy,
        optimizers={"main": core.make_optimizer(policy, cfg.optim)},
        shard_units=None,  # a process acts as long as its episodes last
        data={"val": val_data, "test": Episodes(cfg.env, cfg.eval_episodes, "test")},
        loss=loss,
        evaluate=evaluate,
        metric=core.Metric("return", f"what does the policy earn in an episode of {cfg.env}?", floor=floor, ceiling=ceiling,
                           best_known=environments.BEST_KNOWN.get(cfg.env, "")),
        counts=lambda batch: {"*": batch["advantage"].numel()},
        state={"environments": Remembering(envs, policy, cfg.num_steps) if cfg.rnn_hidden_size else envs},
        expect=environments.expect(cfg.env, "entropy"),
        baselines=baselines,
        predict=predict,
        figures=lambda model, data: draw(data.starts[:8], player(act, model), low=floor, high=ceiling),
        export=export,
        model_card=usage.card(cfg.env, discrete=space is Discrete, stack=cfg.frame_stack, memory=cfg.rnn_hidden_size, several=True),
        monitors=monitors.monitors(floor, ceiling, ratio=True, actions=size if space is Discrete else 0, stop=cfg.stop_lost),
        gates=gates.gates(gates.Subject(ppo, settings={}, exact={"gae_lambda": 1.0}, box=space is Box, formula=formulas.ppo,
                                        targets=definitions.ppo, unread=unread), on_policy=True),
    )  # fmt: skip


def unread(cfg: Config) -> dict[str, str]:
    """Entries of a batch that the loss ignores, with reasons."""
    return {"value": "--clip-range-vf inf"} if math.isinf(cfg.clip_range_vf) else {}


STAGES = [ppo]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop; the gates rehearse this very function."""
    policy, envs = stage.model, stage.state["environments"]
    for step in run.steps(stage):
        with run.autocast():  # as in the loss, so that the first ratio is 1
            rollout = collect(cfg, run, policy, envs, step.index)
        for minibatch in minibatches(cfg, run, policy, envs, rollout, step.index):
            run.update(stage, run.micro_batches(minibatch))
        with run.autocast():
            run.log("policy", moved(cfg, run, policy, rollout))
        policy.observe(run.gather(rollout["observation"].flatten(0, 1)), run.gather(rollout["return"].flatten()))
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)
            monitors.halt(
                run, stage, actions=getattr(policy.head, "n", 0) if isinstance(policy.head, HEADS[Discrete]) else 0
            )


@torch.no_grad()
def moved(cfg: Config, run: core.Run, policy: Policy, rollout: dict[str, Tensor]) -> dict[str, Tensor]:
    """Statistics of a rollout's updates and returns."""
    outputs = policy.outputs(rollout["observation"])
    log_ratio = policy.head.log_prob(outputs, rollout["action"]) - rollout["log_prob"]
    ratio, finished = log_ratio.exp(), run.gather(rollout["finished"].flatten())
    rows = {"approx_kl": ratio - 1 - log_ratio,  # Schulman, "Approximating KL divergence", 2020: the k3 estimate
            "clip_fraction": ((ratio - 1).abs() > cfg.clip_range).float(),
            "entropy": policy.head.entropy(outputs)}  # fmt: skip
    unexplained = run.gather((rollout["return"] - rollout["value"]).flatten()).var()
    metrics = {k: run.gather(v.flatten()).mean() for k, v in rows.items()}
    metrics["explained_variance"] = 1 - unexplained / run.gather(rollout["return"].flatten()).var().clamp_min(1e-12)
    if not finished.isnan().all():
        metrics["training_return"] = finished.nanmean()
    return metrics


if __name__ == "__main__":
    core.main(__file__)
