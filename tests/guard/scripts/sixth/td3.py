"""TD3 after sfujim/TD3: two critics, delayed actor, replay buffer, target policy smoothing, a point that is driven to the origin."""

import copy

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

seed = 0


class Point(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.where, self.speed, self.t = self.np_random.uniform(-1, 1, 2), np.zeros(2), 0
        return self._obs(), {}

    def _obs(self):
        return np.concatenate([self.where, self.speed]).astype(np.float32)

    def step(self, action):
        self.t += 1
        self.speed = 0.8 * self.speed + 0.1 * np.clip(action, -1, 1)
        self.where = self.where + self.speed
        far = float(np.abs(self.where).max()) > 3
        reward = -float(np.square(self.where).sum()) - 0.01 * float(np.square(action).sum()) - 10.0 * far
        return self._obs(), reward, far, self.t >= 40, {}


class ReplayBuffer:
    def __init__(self, state_dim, action_dim, max_size=20000):
        self.max_size, self.ptr, self.size = max_size, 0, 0
        self.state, self.action = np.zeros((max_size, state_dim)), np.zeros((max_size, action_dim))
        self.next_state = np.zeros((max_size, state_dim))
        self.reward, self.not_done = np.zeros((max_size, 1)), np.zeros((max_size, 1))

    def add(self, state, action, next_state, reward, done):
        self.state[self.ptr], self.action[self.ptr], self.next_state[self.ptr] = state, action, next_state
        self.reward[self.ptr], self.not_done[self.ptr] = reward, 1.0 - done
        self.ptr, self.size = (self.ptr + 1) % self.max_size, min(self.size + 1, self.max_size)

    def sample(self, batch_size):
        ind = np.random.randint(0, self.size, size=batch_size)
        return tuple(
            torch.FloatTensor(a[ind]) for a in (self.state, self.action, self.next_state, self.reward, self.not_done)
        )


class Actor(nn.Module):
    def __init__(self, state_dim, action_dim, max_action):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(state_dim, 32), nn.Linear(32, 32), nn.Linear(32, action_dim)
        self.max_action = max_action

    def forward(self, state):
        a = F.relu(self.l2(F.relu(self.l1(state))))
        return self.max_action * torch.tanh(self.l3(a))


class Critic(nn.Module):
    def __init__(self, state_dim, action_dim):
        super().__init__()
        self.q1 = nn.Sequential(
            nn.Linear(state_dim + action_dim, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)
        )
        self.q2 = nn.Sequential(
            nn.Linear(state_dim + action_dim, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)
        )

    def forward(self, state, action):
        sa = torch.cat([state, action], 1)
        return self.q1(sa), self.q2(sa)

    def Q1(self, state, action):
        return self.q1(torch.cat([state, action], 1))


class TD3:
    def __init__(
        self,
        state_dim,
        action_dim,
        max_action,
        discount=0.95,
        tau=0.02,
        policy_noise=0.2,
        noise_clip=0.5,
        policy_freq=2,
    ):
        self.actor = Actor(state_dim, action_dim, max_action)
        self.actor_target = copy.deepcopy(self.actor)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.critic = Critic(state_dim, action_dim)
        self.critic_target = copy.deepcopy(self.critic)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        self.max_action, self.discount, self.tau = max_action, discount, tau
        self.policy_noise, self.noise_clip, self.policy_freq, self.total_it = policy_noise, noise_clip, policy_freq, 0

    def select_action(self, state):
        return self.actor(torch.FloatTensor(state.reshape(1, -1))).data.numpy().flatten()

    def train(self, replay_buffer, batch_size=64):
        self.total_it += 1
        state, action, next_state, reward, not_done = replay_buffer.sample(batch_size)
        with torch.no_grad():
            noise = (torch.randn_like(action) * self.policy_noise).clamp(-self.noise_clip, self.noise_clip)
            next_action = (self.actor_target(next_state) + noise).clamp(-self.max_action, self.max_action)
            target_Q1, target_Q2 = self.critic_target(next_state, next_action)
            target_Q = reward + not_done * self.discount * torch.min(target_Q1, target_Q2)
        current_Q1, current_Q2 = self.critic(state, action)
        critic_loss = F.mse_loss(current_Q1, target_Q) + F.mse_loss(current_Q2, target_Q)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()
        if self.total_it % self.policy_freq == 0:
            actor_loss = -self.critic.Q1(state, self.actor(state)).mean()
            self.actor_optimizer.zero_grad()
            actor_loss.backward()
            self.actor_optimizer.step()
            for param, target_param in zip(self.critic.parameters(), self.critic_target.parameters()):
                target_param.data.copy_(self.tau * param.data + (1 - self.tau) * target_param.data)
            for param, target_param in zip(self.actor.parameters(), self.actor_target.parameters()):
                target_param.data.copy_(self.tau * param.data + (1 - self.tau) * target_param.data)


def eval_policy(policy, seed, eval_episodes=10):
    eval_env, avg_reward = Point(), 0.0
    eval_env.reset(seed=seed + 100)
    for _ in range(eval_episodes):
        (state, _), done = eval_env.reset(), False
        while not done:
            state, reward, terminated, truncated, _ = eval_env.step(policy.select_action(np.array(state)))
            avg_reward, done = avg_reward + reward, terminated or truncated
    print(f"Evaluation over {eval_episodes} episodes: {avg_reward / eval_episodes:.3f}")
    return avg_reward / eval_episodes


env = Point()
env.action_space.seed(seed)
torch.manual_seed(seed)
np.random.seed(seed)
policy = TD3(4, 2, 1.0)
replay_buffer = ReplayBuffer(4, 2)
state, _ = env.reset(seed=seed)
max_timesteps, start_timesteps = 3000, 400
for t in range(max_timesteps):
    if t < start_timesteps:
        action = env.action_space.sample()
    else:
        action = (policy.select_action(np.array(state)) + np.random.normal(0, 0.1, size=2)).clip(-1.0, 1.0)
    next_state, reward, terminated, truncated, _ = env.step(action)
    replay_buffer.add(state, action, next_state, reward, float(terminated))
    state = next_state
    if t >= start_timesteps:
        policy.train(replay_buffer)
    if terminated or truncated:
        state, _ = env.reset()
    if (t + 1) % 1000 == 0:
        eval_policy(policy, seed)
print(f"FINAL return={eval_policy(policy, seed):.3f}")
