"""Soft actor-critic (Haarnoja 2018): learn to act in a gymnasium environment with continuous actions.

tiny  Pendulum-v1, two CPU cores, a few minutes of training.
full  HalfCheetah-v5 (needs gymnasium[mujoco]), or any id by `--env`; more steps, wider nets. The same code path.

The log-probability of an action includes tanh's correction. Targets use slow copies of two critics, the lower of the two, at a
newly drawn action. A truncated episode is bootstrapped with the value of its last observation; a terminated one is not. The
policy loss updates no critic, and the temperature loss no policy. The temperature is learnt. Actions are scaled to the
environment's range. Observations and rewards are normalised with statistics stored in the model, which are updated once per
iteration and never in an evaluation. Replay buffer, targets and environments are in the checkpoint. The result is the return of
evaluation episodes with mean actions.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base import seeds
from trainworthy.core.base.config import Optim, RunSettings, Train
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.rl.control.data import environments
from trainworthy.recipes.rl.control.data.environments import Environments, Episodes
from trainworthy.recipes.rl.control.data.replay import Replay, Target, fits
from trainworthy.recipes.rl.control.evaluation import episode_pictures, episodes
from trainworthy.recipes.rl.control.gates import agents as gates
from trainworthy.recipes.rl.control.gates import definitions, formulas, monitors
from trainworthy.recipes.rl.control.models import usage
from trainworthy.recipes.rl.control.models.nets import Running, Side, built_again, mlp

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of rl/sac. An iteration, which counts as an epoch, is some environment steps and the updates after them:
    --train.epochs counts iterations, --train.batch-size the samples per update, --train.eval-batch-size the parallel evaluation
    episodes."""

    SEARCH_RANGES = "gamma=0.9:0.9999 tau=1e-3:0.1 init_temperature=0.02:2 gradient_steps=4:128"
    env: str = "Pendulum-v1"
    """Id of a gymnasium environment with continuous actions of finite range (`module:Name-v0` imports the module first)."""
    frame_stack: int = 1
    """Number of recent observations that the policy reads; more than 1 if the newest is not sufficient."""
    num_envs: int = 4
    """Parallel environments, over all processes."""
    num_steps: int = 16
    """Steps of every environment per iteration."""
    gradient_steps: int = 32
    """Updates per iteration."""
    gamma: float = 0.99
    """Discount factor."""
    tau: float = 0.01
    """Rate at which the target critics follow the critics after every update."""
    init_temperature: float = 0.2
    """Initial entropy coefficient, relative to the reward scale; it is learnt from there."""
    target_entropy: float = -1.0
    """Target entropy of the policy in nats per action dimension (Haarnoja 2018: -1); the temperature adapts to it."""
    buffer_size: int = 100_000
    """Transitions in the replay buffer, over all environments."""
    learning_starts: int = 1000
    """Transitions before the first update, with actions drawn uniformly from the whole range."""
    hidden_sizes: tuple[int, ...] = (128, 128)
    """Hidden units of the policy net and of each critic."""
    eval_episodes: int = 100
    """Episodes per evaluation."""
    stop_lost: bool = True
    """End a run that clearly failed: it lost nearly all of its return, or its updates have no effect."""


def tiny() -> Config:
    """Pendulum-v1 on two CPU cores."""
    return Config(
        train=Train(epochs=200, batch_size=128, eval_every=40),
        optim=Optim(lr=1e-3, weight_decay=0.0, clip=math.inf, schedule="linear", warmup=0.0),
        run=RunSettings(threads=1, save_every=40),
    )


def full() -> Config:
    """HalfCheetah-v5."""
    return Config(
        env="HalfCheetah-v5",
        tau=0.005,
        gradient_steps=128,
        buffer_size=1_000_000,
        learning_starts=10_000,
        hidden_sizes=(256, 256),
        eval_episodes=20,
        train=Train(epochs=7800, batch_size=256, eval_every=200),
        optim=Optim(lr=3e-4, weight_decay=0.0, clip=math.inf, schedule="constant", warmup=0.0),
        run=RunSettings(save_every=200),
    )


# ------------------------------------------------------------------------------------------------------------- rollouts
@torch.no_grad()
def collect(cfg: Config, run: core.Run, policy: "Policy", envs: Environments, iteration: int) -> dict[str, Tensor]:
    """Collect one iteration's steps with the current policy: (steps, envs of this process, ...) each. Draws depend on (seed, iteration)
    alone."""
    length = cfg.num_steps if iteration else max(cfg.num_steps, cfg.learning_starts // cfg.num_envs)
    draws = torch.Generator().manual_seed(seeds.derive(cfg.run.seed, "actions", iteration))
    even = 2 * torch.rand(length, envs.n, policy.n_act, generator=draws)[:, envs.mine.start : envs.mine.stop] - 1
    noise = torch.randn(length, envs.n, policy.n_act, generator=draws)[:, envs.mine.start : envs.mine.stop]
    steps = []
    for t in range(length):
        observation = envs.observation.to(run.device)
        action = policy.sample(observation, noise[t].to(run.device))[0] if iteration else even[t].to(run.device)
        followed = {k: v.to(run.device) for k, v in envs.step(action).items()}
        steps.append({"observation": observation, "action": action, **followed})
    return {k: torch.stack([s[k] for s in steps]) for k in steps[0]}


@torch.no_grad()
def returns(cfg: Config, policy: "Policy", target: "Policy", steps: dict[str, Tensor], noise: Tensor) -> Tensor:
    """Return the targets of `steps` (B, ...), (B,), in units of the reward: the reward plus, unless the episode terminated, the lower target
    critic's value of an action drawn with `noise` (B, n_act), and its entropy bonus."""
    action, log_prob = policy.sample(steps["next_observation"], noise)
    value = target.worth(steps["next_observation"], action).amin(0) * target.rewards.rms
    value = value - policy.log_temperature.exp() * log_prob * policy.rewards.rms
    return steps["reward"] + cfg.gamma * ~steps["terminated"] * value


@torch.no_grad()
def minibatches(
    cfg: Config, run: core.Run, policy: "Policy", target: "Policy", replay: Replay, iteration: int
) -> Iterator[dict]:
    """Yield minibatches from the replay buffer with their current targets, relative to the reward scale, and their noise."""
    draws = torch.Generator().manual_seed(seeds.derive(cfg.run.seed, "minibatches", iteration))
    size = cfg.train.batch_size
    mine = slice(run.rank * size // run.world, (run.rank + 1) * size // run.world)
    places, noises = [], []
    for _ in range(cfg.gradient_steps):
        places.append(replay.draw(size, 1, draws)[0][mine])
        noises.append(torch.randn(2, size, policy.n_act, generator=draws)[:, mine].to(run.device))
    drawn = {
        k: v[0].unflatten(0, (cfg.gradient_steps, -1)).unbind() for k, v in replay.stretch(torch.cat(places), 1).items()
    }
    for i, (noise, following) in enumerate(noises):
        steps = {k: v[i] for k, v in drawn.items()}
        with run.autocast():
            batch = {k: steps[k] for k in ("observation", "action")} | {"noise": noise}
            batch["return"] = returns(cfg, policy, target, steps, following) / policy.rewards.rms
        yield batch


# ---------------------------------------------------------------------------------------------------------------- model
class Policy(nn.Module):
    """Raw observations (B, n_obs) -> the policy's mean actions (B, n_act) in [-1, 1]. It also holds the critics and the temperature,
    relative to the reward scale, and the normalisation statistics of observations and rewards, which only `observe` updates."""

    def __init__(self, n_obs: int, n_act: int, widths: tuple[int, ...], temperature: float):
        super().__init__()
        self.n_act = n_act
        self.observations, self.rewards = Running(n_obs), Running(1)
        self.actor = mlp(n_obs, *widths, 2 * n_act, activation=nn.ReLU)
        self.critics = Side(mlp(n_obs + n_act, *widths, 1, activation=nn.ReLU) for _ in range(2))
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))
        nn.init.orthogonal_(self.actor[-1].weight, 0.01)  # centred, with a large standard deviation

    def scaled(self, observation: Tensor) -> Tensor:
        return ((observation - self.observations.mean) / self.observations.std).clamp(-10, 10)

    def forward(self, observation: Tensor) -> Tensor:
        return self.actor(self.scaled(observation)).chunk(2, -1)[0].tanh()

    def sample(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return (actions (B, n_act) for standard normal `noise` (B, n_act), their log-density (B,)): a Gaussian through tanh. The density
        is divided by the slope 1 - tanh(u)^2 (Haarnoja 2018, appendix C), in a form that never overflows."""
        mean, log_std = self.actor(self.scaled(observation)).chunk(2, -1)
        log_std = log_std.clamp(-5, 2)
        u = mean + log_std.exp() * noise
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))
        return u.tanh(), (log_normal - log_slope).sum(-1)

    def worth(self, observation: Tensor, action: Tensor, *, frozen: bool = False) -> Tensor:
        """Return the values of all critics (2, B), relative to the reward scale. `frozen`: no gradients for the critics."""
        return self.critics(torch.cat([self.scaled(observation), action], -1), frozen=frozen)

    def value(self, observation: Tensor) -> Tensor:
        """Expected return of the mean action, in units of the reward."""
        return self.worth(observation, self(observation)).amin(0) * self.rewards.rms

    def near(self, observation: Tensor, best: Tensor) -> Tensor:
        """Return how close the mean action is to `best` (B, n_act): 1 there, 0 at the other end of the range."""
        return 1 - (self(observation) - best).abs().amax(-1) / 2

    def observe(self, observation: Tensor, reward: Tensor) -> None:
        """Update the statistics with one iteration's observations and returns, over all processes: (n, n_obs) and (n,)."""
        self.observations.update(observation)
        self.rewards.update(reward[:, None])


# ---------------------------------------------------------------------------------------------------------------- stage
def sac(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    fits(1, cfg.num_steps, cfg.buffer_size, cfg.num_envs, cfg.learning_starts)
    if cfg.target_entropy > math.log(2):  # the uniform density on [-1, 1]
        raise UserError("no action has that entropy: the temperature would grow without end", got=f"--target-entropy {cfg.target_entropy:g}",
                        needed="less than ln 2 = 0.69 nats per action dimension, usually -1")  # fmt: skip
    n_obs, n_act, _ = environments.sizes(cfg.env, Box, stack=cfg.frame_stack)
    solved, ceiling = environments.limits(cfg.env)
    policy = Policy(n_obs, n_act, cfg.hidden_sizes, cfg.init_temperature)
    envs = Environments(cfg.env, cfg.num_envs, seed=cfg.run.seed, stack=cfg.frame_stack, rank=run.rank, world=run.world)
    play, tiles, draw = episode_pictures.views(cfg.env, cfg.frame_stack)

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        error = model.worth(batch["observation"], batch["action"]) - batch["return"]  # (2, B)
        action, log_prob = model.sample(batch["observation"], batch["noise"])
        gain = model.worth(batch["observation"], action, frozen=True).amin(0)
        surplus = -log_prob.detach() - cfg.target_entropy * n_act
        return {
            "critic": 0.5 * error.square().sum(),
            "policy": (model.log_temperature.detach().exp() * log_prob - gain).sum(),
            "temperature": (model.log_temperature * surplus).sum(),
        }

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        returns = [play(b["seed"], lambda o: act(model, o))[0] for b in run.batches(data)]
        return episodes.metrics(run.gather(torch.cat(returns).to(run.device)), solved)

    def act(model: nn.Module, observation: Tensor) -> Tensor:
        """Return the policy's mean action (n, n_act)."""
        return model(observation.to(run.device)).cpu()

    def baselines() -> dict[str, dict[str, float]]:
        make = lambda: Policy(n_obs, n_act, cfg.hidden_sizes, cfg.init_temperature)  # noqa: E731
        untrained = built_again(make, cfg.run.seed).to(run.device)
        returned, _ = play(val_data.starts, lambda o: act(untrained, o))
        return {"random actions": {"return": floor}, "untrained policy": {"return": returned.mean().item()}}

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        return tiles(batch["seed"], lambda o: act(model, o), low=floor, high=ceiling)

    def export(folder: Path) -> None:
        """model.safetensors + config.json, and a program that runs without this project (torch.export)."""
        config = {"architecture": "Policy", "env": cfg.env, "n_obs": n_obs, "stack": cfg.frame_stack, "n_act": n_act,
                  "widths": cfg.hidden_sizes, "low": envs.low, "high": envs.high, "input": environments.seen(n_obs, cfg.frame_stack),
                  "output": f"(B, {n_act}) in [-1, 1]: act by low + (1 + output) / 2 * (high - low)"}  # fmt: skip
        core.save_export(folder, policy, config, torch.zeros(2, n_obs))

    val_data = Episodes(cfg.env, cfg.eval_episodes)
    floor = episodes.at_random(cfg.env, cfg.eval_episodes)
    return core.Stage(
        name="sac",
        model=policy,
        optimizers={"main": core.make_optimizer(policy, cfg.optim)},
        shard_units=None,  # a process acts as long as its episodes last
        data={"val": val_data, "test": Episodes(cfg.env, cfg.eval_episodes, "test")},
        loss=loss,
        evaluate=evaluate,
        metric=core.Metric("return", f"what does the policy earn in an episode of {cfg.env}?", floor=floor, ceiling=ceiling,
                           best_known=environments.BEST_KNOWN.get(cfg.env, "")),
        state={"environments": envs, "replay": Replay(cfg.buffer_size // cfg.num_envs, cfg.num_envs, run.device),
               "target": Target(policy, run.device)},
        expect=environments.expect(cfg.env, "critic", "temperature"),
        baselines=baselines,
        predict=predict,
        figures=lambda model, data: draw(data.starts[:8], lambda o: act(model, o), low=floor, high=ceiling),
        export=export,
        model_card=usage.card(cfg.env, discrete=False, stack=cfg.frame_stack),
        monitors=monitors.monitors(floor, ceiling, capacity=cfg.buffer_size // (cfg.num_steps * cfg.num_envs)),
        gates=gates.gates(gates.Subject(sac, settings={"gradient_steps": 32, "learning_starts": 128, "buffer_size": 4096,
                                                       "tau": 0.05}, box=True, formula=formulas.sac, targets=definitions.sac,
                                        lag=lambda cfg: 1 / max(cfg.tau, 1e-9)), on_policy=False),
    )  # fmt: skip


STAGES = [sac]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop; the gates rehearse this very function."""
    policy, envs, replay, target = stage.model, *(stage.state[k] for k in ("environments", "replay", "target"))
    for step in run.steps(stage):
        rollout = collect(cfg, run, policy, envs, step.index)
        whole = {k: run.gather(v.transpose(0, 1)).transpose(0, 1) for k, v in rollout.items()}  # of all processes
        replay.add(whole, step.index)
        for minibatch in minibatches(cfg, run, policy, target.net, replay, step.index):
            run.update(stage, run.micro_batches(minibatch))
            target.follow(policy, cfg.tau)
        metrics = learnt(cfg, policy, target.net, whole)
        run.log("policy", {"replay_age": replay.age(step.index), **metrics})
        policy.observe(whole["observation"].flatten(0, 1), whole["reward"].flatten())
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)
            monitors.halt(run, stage)


@torch.no_grad()
def learnt(cfg: Config, policy: Policy, target: Policy, rollout: dict[str, Tensor]) -> dict[str, Tensor]:
    """Statistics of an iteration's updates."""
    one = {k: v.flatten(0, 1) for k, v in rollout.items()}
    returned = returns(cfg, policy, target, one, torch.zeros_like(one["action"]))
    value, finished = policy.worth(one["observation"], one["action"]).amin(0) * policy.rewards.rms, rollout["finished"]
    unexplained = (returned - value).var() / returned.var().clamp_min(1e-12)
    metrics = {"temperature": policy.log_temperature.exp(), "value": value.mean(), "explained_variance": 1 - unexplained,
            "spread": one["action"].std(0).mean()}  # fmt: skip
    if not finished.isnan().all():
        metrics["training_return"] = finished.nanmean()
    return metrics


if __name__ == "__main__":
    core.main(__file__)
