"""Deep Q-learning (Mnih 2015): learn the value of each action in a gymnasium environment with discrete actions.

tiny  CartPole-v1, two CPU cores, about a minute of training.
full  LunarLander-v3 (needs gymnasium[box2d]), or any id by `--env`; more steps, three-step returns. The same code path.

A truncated episode is bootstrapped with the value of its last observation; a terminated one is not. Targets use a target network
that is updated rarely, at the action that the online network selects (double DQN, van Hasselt 2016). No n-step return crosses the
end of an episode. Observations and returns are normalised with statistics stored in the model, which are updated once per
iteration and never in an evaluation. Replay buffer, target network and environments are in the checkpoint. The result is the
return of evaluation episodes with greedy actions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base import seeds
from trainworthy.core.base.config import Optim, RunSettings, Train
from trainworthy.recipes.rl.control.data import environments
from trainworthy.recipes.rl.control.data.environments import Environments, Episodes
from trainworthy.recipes.rl.control.data.replay import Replay, Target, fits
from trainworthy.recipes.rl.control.evaluation import episode_pictures, episodes
from trainworthy.recipes.rl.control.gates import agents as gates
from trainworthy.recipes.rl.control.gates import definitions, formulas, monitors
from trainworthy.recipes.rl.control.models import usage
from trainworthy.recipes.rl.control.models.nets import Layers, Running, built_again, mlp

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of rl/dqn. An iteration, which counts as an epoch, is some environment steps and the updates after them:
    --train.epochs counts iterations, --train.batch-size the samples per update, --train.eval-batch-size the parallel evaluation
    episodes."""

    SEARCH_RANGES = "gamma=0.9:0.9999 exploration_fraction=0.05:0.5 exploration_final_eps=0.01:0.2 gradient_steps=4:128"
    env: str = "CartPole-v1"
    """Id of a gymnasium environment with discrete actions (`module:Name-v0` imports the module first)."""
    frame_stack: int = 1
    """Number of recent observations that the policy reads; more than 1 if the newest is not sufficient."""
    num_envs: int = 8
    """Parallel environments, over all processes."""
    num_steps: int = 16
    """Steps of every environment per iteration."""
    gradient_steps: int = 32
    """Updates per iteration."""
    gamma: float = 0.99
    """Discount factor."""
    n_step: int = 1
    """Rewards in an n-step return before it bootstraps from the target network (Sutton 1988); at most `num_steps`."""
    double: bool = True
    """Double DQN: the online network selects the action that the target network evaluates (van Hasselt 2016)."""
    dueling: bool = True
    """Dueling network: Q is the state's value plus the action's advantage (Wang 2016)."""
    prioritized_replay_alpha: float = 0.0
    """Exponent of prioritised replay: 0 draws uniformly; Schaul 2016 uses 0.6."""
    prioritized_replay_beta: float = 0.4
    """Initial exponent of the importance weights that correct prioritised replay; it rises to 1."""
    buffer_size: int = 100_000
    """Transitions in the replay buffer, over all environments."""
    learning_starts: int = 1000
    """Transitions before the first update."""
    exploration_fraction: float = 0.2
    """Fraction of the run in which the probability of a random action falls to `exploration_final_eps`."""
    exploration_final_eps: float = 0.04
    """Probability of a random action after that."""
    target_update_interval: int = 32
    """Updates between two copies of the network to the target network."""
    hidden_sizes: tuple[int, ...] = (128, 128)
    """Hidden units."""
    eval_episodes: int = 100
    """Episodes per evaluation."""
    stop_lost: bool = True
    """End a run that clearly failed: it lost nearly all of its return, or its updates have no effect."""


def tiny() -> Config:
    """CartPole-v1 on two CPU cores."""
    return Config(
        train=Train(epochs=320, batch_size=128, eval_every=40),
        optim=Optim(lr=1e-3, weight_decay=0.0, clip=10.0, schedule="linear", warmup=0.0),
        run=RunSettings(threads=1, save_every=40),
    )


def full() -> Config:
    """LunarLander-v3, solved at a return of 200."""
    return Config(
        env="LunarLander-v3",
        n_step=3,
        learning_starts=2000,
        target_update_interval=250,
        hidden_sizes=(256, 256),
        train=Train(epochs=1200, batch_size=128, eval_every=100),
        optim=Optim(lr=5e-4, weight_decay=0.0, clip=10.0, schedule="linear", warmup=0.0),
        run=RunSettings(threads=1, save_every=100),
    )


# ------------------------------------------------------------------------------------------------------------- rollouts
@torch.no_grad()
def collect(cfg: Config, run: core.Run, policy: "Policy", envs: Environments, iteration: int, epsilon: float) -> dict:
    """Collect one iteration's steps with the current policy: (steps, envs of this process, ...) each. Draws depend on (seed, iteration)
    alone."""
    length = cfg.num_steps if iteration else max(cfg.num_steps, cfg.learning_starts // cfg.num_envs)
    draws = torch.Generator().manual_seed(seeds.derive(cfg.run.seed, "actions", iteration))
    at_random = torch.randint(policy.n_actions, (length, envs.n), generator=draws)[:, envs.mine.start : envs.mine.stop]
    chance = torch.rand(length, envs.n, generator=draws)[:, envs.mine.start : envs.mine.stop]
    steps = []
    for t in range(length):
        observation = envs.observation.to(run.device)
        greedy = policy(observation).argmax(-1)
        action = torch.where((chance[t] < epsilon).to(run.device), at_random[t].to(run.device), greedy)
        followed = {k: v.to(run.device) for k, v in envs.step(action).items()}
        steps.append({"observation": observation, "action": action, **followed})
    return {k: torch.stack([s[k] for s in steps]) for k in steps[0]}


def epsilon(cfg: Config, progress: float) -> float:
    """Return the probability of a random action after this share of the run."""
    return 1 - (1 - cfg.exploration_final_eps) * min(progress / max(cfg.exploration_fraction, 1e-9), 1)


def ahead(cfg: Config, steps: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split `steps` (n_step, B, ...), without a net: `earned` rewards in the first step's episode, the observation `following`, and its
    weight `counts`."""
    done = steps["terminated"] | steps["truncated"]
    own = (done.cumsum(0) - done.long()) == 0  # steps of the first step's episode
    last, n = own.sum(0) - 1, torch.arange(done.shape[1], device=done.device)
    discount = cfg.gamma ** torch.arange(len(done), device=done.device)[:, None]
    counts = cfg.gamma ** (last + 1) * ~steps["terminated"][last, n]
    return {"observation": steps["observation"][0], "action": steps["action"][0], "counts": counts,
            "earned": (discount * own * steps["reward"]).sum(0), "following": steps["next_observation"][last, n]}  # fmt: skip


@torch.no_grad()
def returns(cfg: Config, policy: "Policy", target: "Policy", rows: dict[str, Tensor]) -> Tensor:
    """Return the targets: earned rewards plus the weighted value of the following observation from the target network, (B,), in units of the
    reward."""
    worth = target(rows["following"])
    best = (policy(rows["following"]) if cfg.double else worth).argmax(-1, keepdim=True)
    return rows["earned"] + rows["counts"] * (worth.gather(-1, best).squeeze(-1) * target.returns.rms)


@torch.no_grad()
def minibatches(
    cfg: Config, run: core.Run, policy: "Policy", target: "Policy", replay: Replay, iteration: int, progress: float
) -> Iterator[dict]:
    """Yield minibatches from the replay buffer with their current targets, relative to the return scale."""
    draws = torch.Generator().manual_seed(seeds.derive(cfg.run.seed, "minibatches", iteration))
    size = cfg.train.batch_size
    at_once = 1 if cfg.prioritized_replay_alpha else cfg.gradient_steps  # errors change what is drawn next
    mine = slice(run.rank * size // run.world, (run.rank + 1) * size // run.world)
    for i in range(cfg.gradient_steps):
        if i % at_once == 0:
            places, likelier = replay.draw(at_once * size, cfg.n_step, draws, cfg.prioritized_replay_alpha)
            weight = likelier ** -(cfg.prioritized_replay_beta + (1 - cfg.prioritized_replay_beta) * progress)
            drawn = {**ahead(cfg, replay.stretch(places, cfg.n_step)), "weight": weight / weight.max()}
            drawn = {k: v.unflatten(0, (at_once, size))[:, mine].unbind() for k, v in drawn.items()}
        rows = {k: v[i % at_once] for k, v in drawn.items()}
        with run.autocast():
            batch = {k: rows[k] for k in ("observation", "action", "weight")}
            batch["return"] = returns(cfg, policy, target, rows) / policy.returns.rms
            if cfg.prioritized_replay_alpha:
                error = policy.of(batch["observation"], batch["action"]) - batch["return"]
                # the offset keeps every transition in the draw
                replay.priority.view(-1)[places] = run.gather(error).abs() + 1e-3
        yield batch


# ---------------------------------------------------------------------------------------------------------------- model
class Policy(nn.Module):
    """Raw observations (B, n_obs) -> action values (B, n_actions), relative to the return scale. It owns the normalisation statistics of
    observations and returns; only `observe` updates them."""

    def __init__(self, n_obs: int, n_actions: int, widths: tuple[int, ...], dueling: bool):
        super().__init__()
        self.n_actions, self.dueling = n_actions, dueling
        self.observations, self.returns = Running(n_obs), Running(1)
        self.body = Layers(mlp(n_obs, *widths, activation=nn.ReLU), nn.ReLU())
        self.advantage = mlp(widths[-1], n_actions)
        if dueling:
            self.state = mlp(widths[-1], 1)

    def forward(self, observation: Tensor) -> Tensor:
        x = ((observation - self.observations.mean) / self.observations.std).clamp(-10, 10)
        x = self.body(x)
        advantage = self.advantage(x)
        return self.state(x) + advantage - advantage.mean(-1, keepdim=True) if self.dueling else advantage

    def of(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the values of the actions (B,) that were taken, relative to the return scale."""
        return self(observation).gather(-1, action[:, None]).squeeze(-1)

    def value(self, observation: Tensor) -> Tensor:
        """Expected return, in units of the reward."""
        return self(observation).amax(-1) * self.returns.rms

    def near(self, observation: Tensor, best: Tensor) -> Tensor:
        """Return how close its action is to `best` (B,): 0 to 1."""
        return (self(observation).argmax(-1) == best).float()

    def observe(self, observation: Tensor, returned: Tensor) -> None:
        """Update the statistics with one iteration's observations and returns, over all processes: (n, n_obs) and (n,)."""
        self.observations.update(observation)
        self.returns.update(returned[:, None])


# ---------------------------------------------------------------------------------------------------------------- stage
def dqn(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    fits(cfg.n_step, cfg.num_steps, cfg.buffer_size, cfg.num_envs, cfg.learning_starts)
    n_obs, n_actions, _ = environments.sizes(cfg.env, Discrete, stack=cfg.frame_stack)
    solved, ceiling = environments.limits(cfg.env)
    policy = Policy(n_obs, n_actions, cfg.hidden_sizes, cfg.dueling)
    envs = Environments(cfg.env, cfg.num_envs, seed=cfg.run.seed, stack=cfg.frame_stack, rank=run.rank, world=run.world)
    play, tiles, draw = episode_pictures.views(cfg.env, cfg.frame_stack)

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        error = F.smooth_l1_loss(model.of(batch["observation"], batch["action"]), batch["return"], reduction="none")
        return {"value": (batch["weight"] * error).sum()}

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        returns = [play(b["seed"], lambda o: act(model, o))[0] for b in run.batches(data)]
        return episodes.metrics(run.gather(torch.cat(returns).to(run.device)), solved)

    def act(model: nn.Module, observation: Tensor) -> Tensor:
        """Return the action with the highest value (n,)."""
        return model(observation.to(run.device)).argmax(-1).cpu()

    def baselines() -> dict[str, dict[str, float]]:
        make = lambda: Policy(n_obs, n_actions, cfg.hidden_sizes, cfg.dueling)  # noqa: E731
        untrained = built_again(make, cfg.run.seed).to(run.device)
        returned, _ = play(val_data.starts, lambda o: act(untrained, o))
        return {"random actions": {"return": floor}, "untrained policy": {"return": returned.mean().item()}}

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        return tiles(batch["seed"], lambda o: act(model, o), low=floor, high=ceiling)

    def export(folder: Path) -> None:
        """model.safetensors + config.json, and a program that runs without this project (torch.export)."""
        config = {"architecture": "Policy", "env": cfg.env, "n_obs": n_obs, "stack": cfg.frame_stack, "widths": cfg.hidden_sizes,
                  "dueling": cfg.dueling, "first_action": envs.first_action, "input": environments.seen(n_obs, cfg.frame_stack),
                  "n_actions": n_actions, "output": f"(B, {n_actions}) relative to the return scale: act by argmax"}  # fmt: skip
        core.save_export(folder, policy, config, torch.zeros(2, n_obs))

    val_data = Episodes(cfg.env, cfg.eval_episodes)
    floor = episodes.at_random(cfg.env, cfg.eval_episodes)
    return core.Stage(
        name="dqn",
        model=policy,
        optimizers={"main": core.make_optimizer(policy, cfg.optim)},
        shard_units=None,  # a process acts as long as its episodes last
        data={"val": val_data, "test": Episodes(cfg.env, cfg.eval_episodes, "test")},
        loss=loss,
        evaluate=evaluate,
        metric=core.Metric("return", f"what does the policy earn in an episode of {cfg.env}?", floor=floor, ceiling=ceiling,
                           best_known=environments.BEST_KNOWN.get(cfg.env, "")),
        state={"environments": envs, "replay": Replay(cfg.buffer_size // cfg.num_envs, cfg.num_envs, run.device),
               "target": Target(policy, run.device, scale="returns")},
        expect=environments.expect(cfg.env),
        baselines=baselines,
        predict=predict,
        figures=lambda model, data: draw(data.starts[:8], lambda o: act(model, o), low=floor, high=ceiling),
        export=export,
        model_card=usage.card(cfg.env, discrete=True, stack=cfg.frame_stack),
        monitors=monitors.monitors(floor, ceiling, capacity=cfg.buffer_size // (cfg.num_steps * cfg.num_envs)),
        gates=gates.gates(gates.Subject(dqn, settings={"gradient_steps": 32, "learning_starts": 128, "buffer_size": 4096,
                                                       "target_update_interval": 16},
                                        exact={"n_step": 3}, estimated={"n_step": 1}, formula=formulas.dqn,
                                        targets=definitions.dqn, lag=lambda cfg: cfg.target_update_interval), on_policy=False),
    )  # fmt: skip


STAGES = [dqn]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop; the gates rehearse this very function."""
    policy, envs, replay, target = stage.model, *(stage.state[k] for k in ("environments", "replay", "target"))
    for step in run.steps(stage):
        progress = step.index / run.total_steps(stage)
        rollout = collect(cfg, run, policy, envs, step.index, epsilon(cfg, progress))
        whole = {k: run.gather(v.transpose(0, 1)).transpose(0, 1) for k, v in rollout.items()}  # of all processes
        replay.add(whole, step.index)
        for i, minibatch in enumerate(minibatches(cfg, run, policy, target.net, replay, step.index, progress), 1):
            run.update(stage, run.micro_batches(minibatch))
            if (step.index * cfg.gradient_steps + i) % cfg.target_update_interval == 0:
                target.follow(policy)
        metrics, returned = learnt(cfg, policy, target.net, whole)
        run.log("policy", {"epsilon": epsilon(cfg, progress), "replay_age": replay.age(step.index), **metrics})
        policy.observe(whole["observation"].flatten(0, 1), returned)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)
            monitors.halt(run, stage)


@torch.no_grad()
def learnt(cfg: Config, policy: Policy, target: Policy, rollout: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Statistics of an iteration's updates, and of its returns (n,)."""
    one = ahead(cfg, {k: v.flatten(0, 1)[None] for k, v in rollout.items()})
    returned = returns(cfg, policy, target, one)
    value, finished = policy.value(one["observation"]), rollout["finished"]
    row = {"value": value.mean(), "explained_variance": 1 - (returned - value).var() / returned.var().clamp_min(1e-12)}
    if not finished.isnan().all():
        row["training_return"] = finished.nanmean()
    return row, returned


if __name__ == "__main__":
    core.main(__file__)
