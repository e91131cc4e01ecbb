"""Double DQN on Catch: a ball falls, the paddle below has to be there. Written after the PyTorch DQN tutorial."""

import copy
import random
from collections import deque, namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim

SEED = 0
random.seed(SEED)
torch.manual_seed(SEED)

Transition = namedtuple("Transition", ("state", "action", "reward", "next_state", "done"))

ROWS, COLS = 9, 7
BATCH_SIZE = 64
GAMMA = 0.97
EPS_START, EPS_END, EPS_DECAY = 1.0, 0.05, 1200
TARGET_UPDATE = 100
N_EPISODES = 350


class Catch:
    """Windy: now and then the ball drifts by one column. Several balls an episode."""

    n_actions = 3

    def __init__(self, seed, balls=3):
        self.rng = random.Random(seed)
        self.balls = balls
        self.board = np.zeros((ROWS, COLS), dtype=np.float32)

    def _draw(self):
        self.board[:] = 0
        self.board[self.ball_y, self.ball_x] = 1
        self.board[-1, self.paddle] = 1
        return self.board.copy()

    def _new_ball(self):
        self.ball_y, self.ball_x = 0, self.rng.randrange(COLS)

    def reset(self):
        self.left, self.paddle = self.balls, COLS // 2
        self._new_ball()
        return self._draw()

    def step(self, action):
        self.paddle = min(max(self.paddle + action - 1, 0), COLS - 1)
        self.ball_y += 1
        if self.rng.random() < 0.2:
            self.ball_x = min(max(self.ball_x + self.rng.choice((-1, 1)), 0), COLS - 1)
        reward, done = 0.0, False
        if self.ball_y == ROWS - 1:
            reward = 1.0 if self.ball_x == self.paddle else -1.0
            self.left -= 1
            done = self.left == 0
            obs = self._draw()
            if not done:
                self._new_ball()
                obs = self._draw()
            return obs, reward, done
        return self._draw(), reward, done


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        batch = Transition(*zip(*random.sample(self.memory, batch_size)))
        states = torch.from_numpy(np.stack(batch.state))
        actions = torch.tensor(batch.action).unsqueeze(1)
        rewards = torch.tensor(batch.reward)
        next_states = torch.from_numpy(np.stack(batch.next_state))
        dones = torch.tensor(batch.done, dtype=torch.float32)
        return states, actions, rewards, next_states, dones

    def __len__(self):
        return len(self.memory)


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(ROWS * COLS, 96),
            nn.ReLU(),
            nn.Linear(96, 96),
            nn.ReLU(),
            nn.Linear(96, Catch.n_actions),
        )

    def forward(self, x):
        return self.layers(x)


def select_action(net, state, eps):
    if random.random() < eps:
        return random.randrange(Catch.n_actions)
    with torch.no_grad():
        return net(torch.from_numpy(state).unsqueeze(0)).argmax(1).item()


def optimize_model(policy_net, target_net, optimizer, memory):
    states, actions, rewards, next_states, dones = memory.sample(BATCH_SIZE)
    q = policy_net(states).gather(1, actions).squeeze(1)
    with torch.no_grad():
        best = policy_net(next_states).argmax(1, keepdim=True)
        next_q = target_net(next_states).gather(1, best).squeeze(1)
        target = rewards + GAMMA * next_q * (1 - dones)
    loss = nn.functional.smooth_l1_loss(q, target)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(policy_net.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def evaluate(net, episodes=60):
    env = Catch(seed=12345)
    total = 0.0
    for _ in range(episodes):
        state, done = env.reset(), False
        while not done:
            state, reward, done = env.step(select_action(net, state, eps=0.0))
            total += reward
    return total / episodes


def main():
    env = Catch(SEED)
    policy_net = QNet()
    target_net = copy.deepcopy(policy_net)
    optimizer = optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
    memory = ReplayMemory(10000)
    steps_done, losses = 0, []
    for episode in range(N_EPISODES):
        state, done = env.reset(), False
        while not done:
            eps = EPS_END + (EPS_START - EPS_END) * np.exp(-steps_done / EPS_DECAY)
            action = select_action(policy_net, state, eps)
            next_state, reward, done = env.step(action)
            memory.push(state, action, reward, next_state, done)
            state = next_state
            steps_done += 1
            if len(memory) >= 500 and steps_done % 2 == 0:
                losses.append(optimize_model(policy_net, target_net, optimizer, memory))
            if steps_done % TARGET_UPDATE == 0:
                target_net.load_state_dict(policy_net.state_dict())
        if episode % 50 == 49:
            print(f"episode {episode + 1}: loss {np.mean(losses[-200:]):.4f}, return {evaluate(policy_net, 20):.2f}")
    print(f"FINAL return={evaluate(policy_net):.4f}")


if __name__ == "__main__":
    main()
