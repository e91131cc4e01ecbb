"""PPO, DQN and SAC as single files have them that people copy (after CleanRL): one function each, everything in view, nothing
logged, nothing saved. What `bench/rl.py` compares with; settings come from the recipes.

`clock(steps)` is called before every stretch of environment steps with how many were made so far; true ends the run. What is
returned acts: observations (n, n_obs) -> actions (n,) or, where they are numbers, (n, n_act) in [-1, 1].
"""

from collections.abc import Callable

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

Clock = Callable[[int], bool]


def make_envs(cfg) -> SyncVectorEnv:
    """Ordinary vector environments; the true last observation of an episode is in `infos["final_obs"]`."""
    made = [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(cfg.env)) for _ in range(cfg.num_envs)]
    return SyncVectorEnv(made, autoreset_mode=AutoresetMode.SAME_STEP)


def true_next(observations: np.ndarray, infos: dict) -> np.ndarray:
    """What followed each action, also where an episode ended."""
    if "final_obs" not in infos:
        return observations
    following = observations.copy()
    for i in np.flatnonzero(infos["_final_obs"]):
        following[i] = infos["final_obs"][i]
    return following


def layer(n_in: int, n_out: int, std: float = 2**0.5) -> nn.Linear:
    made = nn.Linear(n_in, n_out)
    nn.init.orthogonal_(made.weight, std)
    nn.init.zeros_(made.bias)
    return made


def net(n_in: int, widths: tuple[int, ...], n_out: int, activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(n_in, width), activation()]
        n_in = width
    return nn.Sequential(*layers, nn.Linear(n_in, n_out))


# ------------------------------------------------------------------------------------------------------------------ PPO
class Agent(nn.Module):
    """Two nets of tanh layers."""

    def __init__(self, n_obs: int, n_actions: int, widths: tuple[int, ...]):
        super().__init__()
        a, b = widths
        self.critic = nn.Sequential(layer(n_obs, a), nn.Tanh(), layer(a, b), nn.Tanh(), layer(b, 1, 1.0))
        self.actor = nn.Sequential(layer(n_obs, a), nn.Tanh(), layer(a, b), nn.Tanh(), layer(b, n_actions, 0.01))

    def get_value(self, x: Tensor) -> Tensor:
        return self.critic(x)

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def ppo(cfg, seed: int, clock: Clock) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(seed)
    np.random.seed(seed)
    envs = make_envs(cfg)
    n_obs, n_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    agent = Agent(n_obs, n_actions, cfg.hidden_sizes)
    optimizer = torch.optim.Adam(agent.parameters(), lr=cfg.optim.lr, eps=1e-5)
    obs = torch.zeros(cfg.num_steps, cfg.num_envs, n_obs)
    actions, logprobs, rewards, dones, values = (torch.zeros(cfg.num_steps, cfg.num_envs) for _ in range(5))
    next_obs = torch.Tensor(envs.reset(seed=seed)[0])
    next_done = torch.zeros(cfg.num_envs)
    batch_size, n_units = cfg.num_steps * cfg.num_envs, round(cfg.train.epochs)
    for unit in range(n_units):
        if clock(unit * batch_size):
            break
        optimizer.param_groups[0]["lr"] = (1.0 - unit / n_units) * cfg.optim.lr
        for t in range(cfg.num_steps):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[t] = value.flatten()
            actions[t], logprobs[t] = action, logprob
            observed, reward, terminations, truncations, _ = envs.step(action.numpy())
            next_done = np.logical_or(terminations, truncations)
            rewards[t] = torch.tensor(reward).view(-1)
            next_obs, next_done = torch.Tensor(observed), torch.Tensor(next_done)
        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages, lastgaelam = torch.zeros_like(rewards), 0
            for t in reversed(range(cfg.num_steps)):
                nextnonterminal = 1.0 - (next_done if t == cfg.num_steps - 1 else dones[t + 1])
                nextvalues = next_value if t == cfg.num_steps - 1 else values[t + 1]
                delta = rewards[t] + cfg.gamma * nextvalues * nextnonterminal - values[t]
                advantages[t] = lastgaelam = delta + cfg.gamma * cfg.gae_lambda * nextnonterminal * lastgaelam
            returns = advantages + values
        b_obs, b_logprobs, b_actions = obs.reshape(-1, n_obs), logprobs.reshape(-1), actions.reshape(-1)
        b_advantages, b_returns = advantages.reshape(-1), returns.reshape(-1)
        b_inds = np.arange(batch_size)
        for _ in range(cfg.update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, batch_size, cfg.train.batch_size):
                mb_inds = b_inds[start : start + cfg.train.batch_size]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions.long()[mb_inds])
                ratio = (newlogprob - b_logprobs[mb_inds]).exp()
                mb_advantages = b_advantages[mb_inds]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - cfg.clip_range, 1 + cfg.clip_range)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()
                v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb_inds]) ** 2).mean()
                loss = pg_loss - cfg.target_entropy * entropy.mean() + v_loss * cfg.vf_coef
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), cfg.optim.clip)
                optimizer.step()
    else:
        clock(n_units * batch_size)
    envs.close()
    return lambda observation: agent.actor(observation).argmax(-1)


# -------------------------------------------------------------------------------------------------------------- off-policy
class ReplayBuffer:
    """A ring of numpy arrays."""

    def __init__(self, size: int, n_obs: int, action_shape: tuple[int, ...], action_type: type):
        self.size, self.filled, self.at = size, 0, 0
        self.obs, self.next_obs = (np.zeros((size, n_obs), np.float32) for _ in range(2))
        self.actions = np.zeros((size, *action_shape), action_type)
        self.rewards, self.dones = (np.zeros(size, np.float32) for _ in range(2))

    def add(self, obs, next_obs, actions, rewards, dones) -> None:
        where = (self.at + np.arange(len(obs))) % self.size
        self.obs[where], self.next_obs[where], self.actions[where] = obs, next_obs, actions
        self.rewards[where], self.dones[where] = rewards, dones
        self.at, self.filled = (self.at + len(obs)) % self.size, min(self.filled + len(obs), self.size)

    def sample(self, batch_size: int) -> tuple[Tensor, ...]:
        inds = np.random.randint(0, self.filled, size=batch_size)
        return tuple(torch.tensor(a[inds]) for a in (self.obs, self.next_obs, self.actions, self.rewards, self.dones))


def stretches(cfg) -> tuple[int, int]:
    """(units before learning starts, all units); a unit is `cfg.num_steps` steps of every environment."""
    before = -(-cfg.learning_starts // (cfg.num_envs * cfg.num_steps))
    return before, before - 1 + round(cfg.train.epochs)


def dqn(cfg, seed: int, clock: Clock) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(seed)
    np.random.seed(seed)
    envs = make_envs(cfg)
    n_obs, n_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    q_network, target_network = (net(n_obs, cfg.hidden_sizes, n_actions, nn.ReLU) for _ in range(2))
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=cfg.optim.lr)
    rb = ReplayBuffer(cfg.buffer_size, n_obs, (), np.int64)
    obs, _ = envs.reset(seed=seed)
    before, n_units = stretches(cfg)
    updates = 0
    for unit in range(n_units):
        if clock(unit * cfg.num_steps * cfg.num_envs):
            break
        share = min(max(unit - before, 0) / (n_units - before) / cfg.exploration_fraction, 1)
        epsilon = 1 - (1 - cfg.exploration_final_eps) * share
        optimizer.param_groups[0]["lr"] = (1.0 - max(unit - before, 0) / (n_units - before)) * cfg.optim.lr
        for _ in range(cfg.num_steps):
            with torch.no_grad():
                greedy = q_network(torch.Tensor(obs)).argmax(dim=1).numpy()
            random = np.random.randint(0, n_actions, size=cfg.num_envs)
            actions = np.where(np.random.random(cfg.num_envs) < epsilon, random, greedy)
            next_obs, rewards, terminations, _, infos = envs.step(actions)
            rb.add(obs, true_next(next_obs, infos), actions, rewards, terminations)
            obs = next_obs
        if unit + 1 < before:
            continue
        for _ in range(cfg.gradient_steps):
            observations, next_observations, acted, rewarded, dones = rb.sample(cfg.train.batch_size)
            with torch.no_grad():
                target_max, _ = target_network(next_observations).max(dim=1)
                td_target = rewarded + cfg.gamma * target_max * (1 - dones)
            old_val = q_network(observations).gather(1, acted[:, None]).squeeze()
            loss = F.smooth_l1_loss(old_val, td_target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(q_network.parameters(), cfg.optim.clip)
            optimizer.step()
            updates += 1
            if updates % cfg.target_update_interval == 0:
                target_network.load_state_dict(q_network.state_dict())
    else:
        clock(n_units * cfg.num_steps * cfg.num_envs)
    envs.close()
    return lambda observation: q_network(observation).argmax(-1)


class SoftQNetwork(nn.Module):
    def __init__(self, n_obs: int, n_act: int, widths: tuple[int, ...]):
        super().__init__()
        self.net = net(n_obs + n_act, widths, 1, nn.ReLU)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        return self.net(torch.cat([x, a], 1))


class Actor(nn.Module):
    """A Gaussian through tanh, scaled to the range of the actions."""

    def __init__(self, n_obs: int, space: gym.spaces.Box, widths: tuple[int, ...]):
        super().__init__()
        self.net = net(n_obs, widths, 2 * space.shape[0], nn.ReLU)
        self.action_scale = torch.tensor((space.high - space.low) / 2.0, dtype=torch.float32)
        self.action_bias = torch.tensor((space.high + space.low) / 2.0, dtype=torch.float32)

    def get_action(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.net(x).chunk(2, -1)
        normal = Normal(mean, log_std.clamp(-5, 2).exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return y_t * self.action_scale + self.action_bias, log_prob.sum(1, keepdim=True)


def sac(cfg, seed: int, clock: Clock) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(seed)
    np.random.seed(seed)
    envs = make_envs(cfg)
    envs.action_space.seed(seed)
    space = envs.single_action_space
    n_obs, n_act = envs.single_observation_space.shape[0], space.shape[0]
    actor = Actor(n_obs, space, cfg.hidden_sizes)
    qf1, qf2, qf1_target, qf2_target = (SoftQNetwork(n_obs, n_act, cfg.hidden_sizes) for _ in range(4))
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    q_optimizer = torch.optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=cfg.optim.lr)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=cfg.optim.lr)
    target_entropy = cfg.target_entropy * n_act
    log_alpha = torch.tensor([np.log(cfg.init_temperature)], dtype=torch.float32, requires_grad=True)
    a_optimizer = torch.optim.Adam([log_alpha], lr=cfg.optim.lr)
    rb = ReplayBuffer(cfg.buffer_size, n_obs, (n_act,), np.float32)
    obs, _ = envs.reset(seed=seed)
    before, n_units = stretches(cfg)
    for unit in range(n_units):
        if clock(unit * cfg.num_steps * cfg.num_envs):
            break
        for optimizer in (q_optimizer, actor_optimizer, a_optimizer):
            optimizer.param_groups[0]["lr"] = (1.0 - max(unit - before, 0) / (n_units - before)) * cfg.optim.lr
        for _ in range(cfg.num_steps):
            if unit < before:
                actions = envs.action_space.sample()
            else:
                with torch.no_grad():
                    actions = actor.get_action(torch.Tensor(obs))[0].numpy()
            next_obs, rewards, terminations, _, infos = envs.step(actions)
            rb.add(obs, true_next(next_obs, infos), actions, rewards, terminations)
            obs = next_obs
        if unit + 1 < before:
            continue
        for _ in range(cfg.gradient_steps):
            observations, next_observations, acted, rewarded, dones = rb.sample(cfg.train.batch_size)
            with torch.no_grad():
                alpha = log_alpha.exp()
                next_actions, next_log_pi = actor.get_action(next_observations)
                following = torch.min(
                    qf1_target(next_observations, next_actions), qf2_target(next_observations, next_actions)
                )
                following = following - alpha * next_log_pi
                next_q_value = rewarded + (1 - dones) * cfg.gamma * following.view(-1)
            qf_loss = F.mse_loss(qf1(observations, acted).view(-1), next_q_value) + F.mse_loss(
                qf2(observations, acted).view(-1), next_q_value
            )
            q_optimizer.zero_grad()
            qf_loss.backward()
            q_optimizer.step()
            pi, log_pi = actor.get_action(observations)
            actor_loss = (alpha * log_pi - torch.min(qf1(observations, pi), qf2(observations, pi))).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
            with torch.no_grad():
                _, log_pi = actor.get_action(observations)
            alpha_loss = (-log_alpha.exp() * (log_pi + target_entropy)).mean()
            a_optimizer.zero_grad()
            alpha_loss.backward()
            a_optimizer.step()
            for one, target in ((qf1, qf1_target), (qf2, qf2_target)):
                for param, target_param in zip(one.parameters(), target.parameters(), strict=True):
                    target_param.data.copy_(cfg.tau * param.data + (1 - cfg.tau) * target_param.data)
    else:
        clock(n_units * cfg.num_steps * cfg.num_envs)
    envs.close()
    return lambda observation: actor.net(observation).chunk(2, -1)[0].tanh()
