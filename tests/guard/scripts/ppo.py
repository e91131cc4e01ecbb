"""CleanRL's PPO: rollouts under no_grad, several epochs of minibatches, one Adam for actor and critic, own annealing."""

import gymnasium as gym
import numpy as np
import torch
from torch import nn, optim
from torch.distributions.categorical import Categorical

num_envs, num_steps, total, epochs, minibatches = 4, 64, 40, 4, 4


def layer_init(layer, std=np.sqrt(2), bias=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(4, 64)), nn.Tanh(), layer_init(nn.Linear(64, 1), 1.0))
        self.actor = nn.Sequential(layer_init(nn.Linear(4, 64)), nn.Tanh(), layer_init(nn.Linear(64, 2), 0.01))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


torch.manual_seed(1)
envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(num_envs)])
agent = Agent()
optimizer = optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
next_obs = torch.Tensor(envs.reset(seed=1)[0])
next_done = torch.zeros(num_envs)
for update in range(total):
    optimizer.param_groups[0]["lr"] = (1.0 - update / total) * 2.5e-4
    obs, actions, logprobs, rewards, dones, values = ([] for _ in range(6))
    for _ in range(num_steps):
        obs.append(next_obs), dones.append(next_done)
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
        o, r, term, trunc, _ = envs.step(action.numpy())
        actions.append(action), logprobs.append(logprob), values.append(value.flatten())
        rewards.append(torch.tensor(r, dtype=torch.float32))
        next_obs, next_done = torch.Tensor(o), torch.Tensor(np.logical_or(term, trunc).astype(np.float32))
    with torch.no_grad():
        last, advantages, following = 0, [], agent.get_value(next_obs).reshape(-1)
        for t in reversed(range(num_steps)):
            mask = 1.0 - (next_done if t == num_steps - 1 else dones[t + 1])
            delta = rewards[t] + 0.99 * following * mask - values[t]
            last = delta + 0.99 * 0.95 * mask * last
            advantages.insert(0, last)
            following = values[t]
    b_obs, b_act, b_log = torch.cat(obs), torch.cat(actions), torch.cat(logprobs)
    b_adv, b_val = torch.cat(advantages), torch.cat(values)
    b_ret = b_adv + b_val
    inds = np.arange(num_envs * num_steps)
    for _ in range(epochs):
        np.random.shuffle(inds)
        for mb in np.array_split(inds, minibatches):
            _, newlog, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_act[mb])
            ratio = (newlog - b_log[mb]).exp()
            adv = (b_adv[mb] - b_adv[mb].mean()) / (b_adv[mb].std() + 1e-8)
            pg = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
            v = 0.5 * ((newvalue.view(-1) - b_ret[mb]) ** 2).mean()
            loss = pg - 0.01 * entropy.mean() + 0.5 * v
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    print(f"update {update} value loss {v.item():.3f}")
