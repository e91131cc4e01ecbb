"""Healthy forks, settings and own data that must not be stopped, from outside: the open half of the fifteenth set.

The half is the last hex digit of the id's SHA-256, modulo 2. The other half is held out in fifteenth_set_heldout.py. The author of
the set had read the recipes, not the gates. It has no bugs. Run by `python -m tests.helpers.set_run --set fifteenth --kind healthy`.
"""

import random
from pathlib import Path

import torch

from tests.helpers.set_cases import Case, class_folders, digits, lines, picture, rows_of_docstrings

GRID = '''class Grid(gymnasium.Env):
    """Walk to a goal on five times five fields."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (4,), np.float32)
    action_space = Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        start, goal = self.np_random.choice(25, 2, replace=False)
        self.at, self.goal = np.array(divmod(start, 5)), np.array(divmod(goal, 5))
        return self.seen(), {}

    def seen(self):
        return (np.concatenate([self.at, self.goal]) / 4).astype(np.float32)

    def step(self, action):
        move = [(1, 0), (-1, 0), (0, 1), (0, -1)][int(action)]
        self.at = np.clip(self.at + move, 0, 4)
        there = bool((self.at == self.goal).all())
        return self.seen(), 1.0 if there else -0.02, there, False, {}


gymnasium.register("Grid-v0", entry_point=Grid, max_episode_steps=50, reward_threshold=0.9)


'''
BANDIT = '''class Bandit(gymnasium.Env):
    """A contextual bandit: an episode is one choice, right for the largest of three numbers."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.context = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return self.context, {}

    def step(self, action):
        return self.context, float(int(action) == int(self.context.argmax())), True, False, {}


gymnasium.register("Bandit-v0", entry_point=Bandit, max_episode_steps=1, reward_threshold=0.95)


'''
POINT = '''class Point(gymnasium.Env):
    """Move a point in the plane to a goal; the reward is minus the distance."""

    observation_space = gymnasium.spaces.Box(-2.0, 2.0, (4,), np.float32)
    action_space = Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        return self.seen(), {}

    def seen(self):
        return np.concatenate([self.at, self.goal]).astype(np.float32)

    def step(self, action):
        self.at = np.clip(self.at + 0.1 * np.asarray(action), -2, 2)
        return self.seen(), -float(np.linalg.norm(self.at - self.goal)), False, False, {}


gymnasium.register("Point-v0", entry_point=Point, max_episode_steps=50)


'''
SHARED = (
    (
        "        self.actor, self.critic = (mlp(n_obs + memory, *widths, n) for n in (head.n, 1))\n",
        "        self.trunk = nn.Sequential(mlp(n_obs + memory, *widths), nn.Tanh())\n"
        "        self.actor, self.critic = (mlp(widths[-1], n) for n in (head.n, 1))\n",
    ),
    (
        "        return self.head(self.actor(x)), self.critic(x).squeeze(-1), *self.memory.carried(x)\n",
        "        h = self.trunk(x)\n"
        "        return self.head(self.actor(h)), self.critic(h).squeeze(-1), *self.memory.carried(x)\n",
    ),
    (
        "        return self.head(self.actor(self.memory(observation, self.scaled)))\n",
        "        return self.head(self.actor(self.trunk(self.memory(observation, self.scaled))))\n",
    ),
    (
        "        return self.critic(self.memory(observation, self.scaled)).squeeze(-1) * self.returns.rms\n",
        "        return self.critic(self.trunk(self.memory(observation, self.scaled))).squeeze(-1) * self.returns.rms\n",
    ),
)


def sixty(root: Path) -> tuple[str, ...]:
    """Three classes of twenty grey pictures."""
    class_folders(root, 0, {3: 20, 5: 20, 8: 20})
    return ("--data.path", str(root))


def large_pictures(root: Path) -> tuple[str, ...]:
    """Four classes of forty coloured JPEG files of 250 to 1,200 pixels a side, wide and high."""
    images, labels = digits()
    draws = torch.Generator().manual_seed(5)
    for label in (0, 1, 4, 7):
        for i in (labels == label).nonzero().flatten()[:40].tolist():
            height, width = torch.randint(250, 1201, (2,), generator=draws).tolist()
            low, high = torch.rand(3, 1, 1, generator=draws) * 90, 160 + torch.rand(3, 1, 1, generator=draws) * 95
            shape = torch.nn.functional.interpolate(
                images[i][None, None].float() / 255, (height, width), mode="bilinear"
            )[0]
            noise = 8 * torch.randn(3, height, width, generator=draws)
            picture((low + (high - low) * shape + noise).clamp(0, 255).byte(), root / str(label) / f"{i}.jpg")
    return ("--data.path", str(root))


def short_and_long(root: Path) -> tuple[str, ...]:
    """Conversations of one to six questions, about names in one word or about what a function does in a sentence."""
    rows, draws, talks = rows_of_docstrings(1500), random.Random(4), []
    while len(rows) > 6:
        turns = [{"role": "system", "content": "You help with Python."}] if draws.random() < 0.3 else []
        for _ in range(draws.choice((1, 1, 1, 2, 3, 6))):
            row = rows.pop()
            long = draws.random() < 0.5
            question = f"What does {row['completion']} do?" if long else f"Which function is it? {row['prompt']}"
            answer = f"`{row['completion']}` is a function. {row['prompt']}" if long else row["completion"]
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        talks.append({"messages": turns})
    lines(root / "chats.jsonl", talks)
    return ("--data.path", str(root / "chats.jsonl"))


BUGS: list[Case] = []

HEALTHY = [
    Case(
        "classify~plain-constant",
        "vision/classify",
        "settings",
        "the plainest recipe: no smoothing, no decay, no warm-up, a constant rate, and an average of the weights",
        "right: AdamW at 1e-3 on a small net with GroupNorm needs none of them",
        "by argument: usual values of a first experiment",
        argv=(
            "--label-smoothing",
            "0",
            "--optim.schedule",
            "constant",
            "--optim.warmup",
            "0",
            "--optim.weight-decay",
            "0",
            "--optim.lr",
            "1e-3",
            "--ema",
            "0.99",
            "--run.seed",
            "3",
        ),
    ),
    Case(
        "segment~two-processes",
        "vision/segment",
        "settings",
        "two processes and twice the batch",
        "right: the loss is a sum over the global batch",
        "by argument: the result does not depend on the division",
        argv=("-n", "2", "--train.batch-size", "32"),
    ),
    Case(
        "dpo~low-beta-constant-rate",
        "llm/dpo",
        "settings",
        "beta of 0.05, adapters of rank 4, a constant lower rate",
        "right: usual values (Zephyr: beta 0.01 to 0.1)",
        "by argument: usual values",
        argv=("--beta", "0.05", "--lora-rank", "4", "--optim.schedule", "constant", "--optim.lr", "2e-4"),
    ),
    Case(
        "ppo~defaults-of-stable-baselines",
        "rl/ppo",
        "settings",
        "the defaults of stable-baselines3: one environment, 2,048 steps, ten passes in minibatches of 64, no clipping of the value",
        "right: these solve CartPole in 100,000 steps",
        "by argument: known results of stable-baselines3",
        argv=(
            "--num-envs",
            "1",
            "--num-steps",
            "2048",
            "--update-epochs",
            "10",
            "--train.batch-size",
            "64",
            "--optim.lr",
            "3e-4",
            "--optim.schedule",
            "constant",
            "--gamma",
            "0.99",
            "--ent-coef",
            "0",
            "--clip-range-vf",
            "inf",
        ),
        source="https://github.com/DLR-RM/stable-baselines3",
    ),
    Case(
        "instruct~larger-batch",
        "vlm/instruct",
        "settings",
        "twice the batch in two micro-batches, a narrower projector, lower rates, no decay",
        "right: usual changes for less memory",
        "by argument: usual values",
        argv=(
            "--train.batch-size",
            "32",
            "--train.accumulate",
            "2",
            "--projector-width",
            "128",
            "--instruct.lr",
            "7e-4",
            "--language-lr",
            "3e-4",
            "--optim.weight-decay",
            "0",
        ),
    ),
    Case(
        "classify~auxiliary-head",
        "vision/classify",
        "loss",
        "a second head on the last block but one, with 0.3 of the weight, as in GoogLeNet",
        "right: it is trained alone and not used to predict; the expectation has both terms",
        "by argument: Szegedy 2015",
        edits=(
            (
                "        nn.init.zeros_(self.head.bias)\n",
                "        nn.init.zeros_(self.head.bias)\n"
                "        self.side = nn.Linear(widths[-2], n_classes)\n"
                "        nn.init.zeros_(self.side.weight)\n"
                "        nn.init.zeros_(self.side.bias)\n",
            ),
            (
                "        return self.head(x.mean((2, 3)))  # (B, n_classes)\n",
                "        return self.head(x.mean((2, 3)))  # (B, n_classes)\n\n"
                "    def both(self, images: Tensor) -> tuple[Tensor, Tensor]:\n"
                "        x = (images - self.mean) / self.std\n"
                "        x = self.blocks[:-1](F.relu(self.norm(self.stem(x))))\n"
                "        return self.head(self.blocks[-1](x).mean((2, 3))), self.side(x.mean((2, 3)))\n",
            ),
            (
                '        logits = model(batch["image"])\n'
                '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}\n',
                '        logits, side = model.both(batch["image"])\n'
                '        how = {"label_smoothing": cfg.label_smoothing, "reduction": "sum"}\n'
                '        return {"ce": F.cross_entropy(logits, batch["label"], **how),\n'
                '                "side": 0.3 * F.cross_entropy(side, batch["label"], **how)}\n',
            ),
            (
                "core.Expect(initial_loss=balanced.first_loss, loss_floor=balanced.floor, new_parameters=fresh)",
                "core.Expect(initial_loss=1.3 * balanced.first_loss, loss_floor=1.3 * balanced.floor, new_parameters=fresh)",
            ),
        ),
    ),
    Case(
        "segment~rotations-and-dropout",
        "vision/segment",
        "augmentation",
        "small rotations and changes of brightness, and dropout of channels at the bottom of the U-Net",
        "right: picture and mask are turned together, the corners are void",
        "by argument: usual for microscopy",
        edits=(
            (
                "    steps += [v2.RandomCrop(cfg.window, pad_if_needed=True, fill=outside)]\n",
                "    steps += [v2.RandomCrop(cfg.window, pad_if_needed=True, fill=outside)]\n"
                "    steps += [v2.RandomRotation(15, interpolation=v2.InterpolationMode.BILINEAR, fill=outside)]\n"
                "    steps += [v2.ColorJitter(brightness=0.2, contrast=0.2)]\n",
            ),
            (
                "        for block, fine in zip(self.up, reversed(seen[:-1]), strict=True):\n",
                "        x = F.dropout2d(x, 0.1, self.training)\n"
                "        for block, fine in zip(self.up, reversed(seen[:-1]), strict=True):\n",
            ),
        ),
    ),
    Case(
        "ppo~shaped-reward",
        "rl/ppo",
        "reward",
        "the training reward has a small penalty for the distance from the middle of the track",
        "right: the evaluation has the environment's own reward, and the best policy is the same",
        "by argument: a cart in the middle stays up",
        edits=(
            (
                "        followed = {k: v.to(run.device) for k, v in envs.step(action).items()}\n",
                "        followed = {k: v.to(run.device) for k, v in envs.step(action).items()}\n"
                '        followed["reward"] = followed["reward"] - 0.1 * followed["next_observation"][:, 0].abs()\n',
            ),
        ),
    ),
    Case(
        "ppo~one-trunk",
        "rl/ppo",
        "model",
        "policy and value share their hidden layers",
        "right: as in the Atari nets; the coefficient of the value loss is 0.5",
        "by argument: Mnih 2016",
        edits=SHARED,
    ),
    Case(
        "sac~huber-critic",
        "rl/sac",
        "loss",
        "Huber's loss for the critics, against rare large errors",
        "right: equal to half the square below 1, and returns are relative to the reward scale",
        "by argument: as in DQN",
        edits=(
            (
                '            "critic": 0.5 * error.square().sum(),\n',
                '            "critic": F.huber_loss(error, torch.zeros_like(error), reduction="sum"),\n',
            ),
        ),
    ),
    Case(
        "flow~cosmap",
        "diffusion/flow",
        "loss",
        "uniform times with the cosmap weights of the SD3 script of diffusers",
        "right: the weights are bounded, between 0.6 and 1.3, and the expectation follows from the process",
        "by argument: Esser 2024",
        edits=(
            ("from dataclasses import dataclass, field\n", "import math\nfrom dataclasses import dataclass, field\n"),
            (
                "        logit = self.process.noise.logit_mean + self.process.noise.logit_std * torch.randn((), generator=generator)\n"
                "        timestep = self.process.noise.num_train_timesteps * torch.sigmoid(logit)\n",
                "        timestep = self.process.noise.num_train_timesteps * torch.rand((), generator=generator)\n",
            ),
            (
                "def make_model(cfg: Config, channels: int, n_classes: int)",
                "class Cosmap(Process):\n"
                '    """The same line, with weights for uniform times."""\n\n'
                "    def weights(self, t: Tensor) -> Tensor:\n"
                "        s = t / self.noise.num_train_timesteps\n"
                "        return 2 / (math.pi * (1 - 2 * s + 2 * s**2))\n\n\n"
                "def make_model(cfg: Config, channels: int, n_classes: int)",
            ),
            ("    process, n, sampling = Process(cfg.noise),", "    process, n, sampling = Cosmap(cfg.noise),"),
            ('        return {"mse": error.sum()}\n', '        return {"mse": (process.weights(t) * error).sum()}\n'),
        ),
        source="https://github.com/huggingface/diffusers/blob/main/src/diffusers/training_utils.py",
    ),
    Case(
        "classify~own-sixty",
        "vision/classify",
        "own data",
        "sixty grey pictures of three classes",
        "right: few, but equally many of each class",
        "by argument: three digits can be distinguished after sixteen of each",
        argv=("--image-size", "32", "--train.epochs", "60", "--train.batch-size", "8", "--optim.lr", "1e-3"),
        data=sixty,
    ),
    Case(
        "classify~own-large-pictures",
        "vision/classify",
        "own data",
        "coloured JPEG files of many sizes up to 1,200 pixels, wide and high, with a ResNet-18 of torchvision",
        "right: valid files; each is resized to 64 pixels",
        "by argument: digits in colour",
        argv=(
            "--model",
            "resnet18",
            "--image-size",
            "64",
            "--optim.lr",
            "1e-3",
            "--train.epochs",
            "15",
            "--train.batch-size",
            "16",
        ),
        data=large_pictures,
    ),
    Case(
        "sft~own-short-and-long",
        "llm/sft",
        "own data",
        "conversations of one to six questions with answers of a word or two sentences, a third with a system turn",
        "right: the form of OpenAI's files; no question occurs twice",
        "by argument: usual data",
        argv=("--train.epochs", "1", "--train.batch-size", "4", "--optim.lr", "5e-4"),
        data=short_and_long,
    ),
    Case(
        "dqn~own-grid",
        "rl/dqn",
        "own environment",
        "a grid world with a random goal, registered in the fork",
        "right: every draw is seeded, a time limit of 50 steps",
        "by argument: 600 situations, a reward at the goal",
        edits=(
            (
                "import torch\nfrom gymnasium.spaces import Discrete\n",
                "import gymnasium\nimport numpy as np\nimport torch\nfrom gymnasium.spaces import Discrete\n",
            ),
            (
                '@dataclass\nclass Config(core.Config):\n    """Settings of rl/dqn.',
                GRID + '@dataclass\nclass Config(core.Config):\n    """Settings of rl/dqn.',
            ),
        ),
        argv=("--env", "Grid-v0", "--gamma", "0.95"),
    ),
    Case(
        "ppo~own-bandit",
        "rl/ppo",
        "own environment",
        "a contextual bandit, registered in the fork: every episode has one step",
        "right: every draw is seeded, the reward is 1 for the right of three choices",
        "by argument: a linear decision",
        edits=(
            (
                "import torch\nfrom gymnasium.spaces import Box, Discrete\n",
                "import gymnasium\nimport numpy as np\nimport torch\nfrom gymnasium.spaces import Box, Discrete\n",
            ),
            (
                '@dataclass\nclass Config(core.Config):\n    """Settings of rl/ppo.',
                BANDIT + '@dataclass\nclass Config(core.Config):\n    """Settings of rl/ppo.',
            ),
        ),
        argv=("--env", "Bandit-v0", "--train.epochs", "40"),
    ),
    Case(
        "sac~own-point",
        "rl/sac",
        "own environment",
        "a point that moves to a goal in the plane, registered in the fork",
        "right: every draw is seeded, two actions of finite range, a time limit of 50 steps and no other end",
        "by argument: move towards the goal",
        edits=(
            (
                "import torch\nfrom gymnasium.spaces import Box\n",
                "import gymnasium\nimport numpy as np\nimport torch\nfrom gymnasium.spaces import Box\n",
            ),
            (
                '@dataclass\nclass Config(core.Config):\n    """Settings of rl/sac.',
                POINT + '@dataclass\nclass Config(core.Config):\n    """Settings of rl/sac.',
            ),
        ),
        argv=("--env", "Point-v0", "--train.epochs", "100"),
    ),
]
