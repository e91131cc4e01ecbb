"""Environments of users, registered by a module in their folder: habits that the examples of gymnasium do not have."""

import gymnasium as gym
import pytest
import torch
from trainworthy.core.base.errors import Stop, UserError
from trainworthy.recipes.rl.control.data import environments
from trainworthy.recipes.rl.control.evaluation import episodes

MODULE = """
import gymnasium as gym
import numpy as np


class Corridor(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (6,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):  # no render_mode
        self.at = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(0, 3))
        return self.seen(), {}

    def seen(self):
        return np.eye(6, dtype=np.float32)[self.at].tolist()  # a list, not an array

    def step(self, action):
        self.at = min(max(self.at + (1 if action else -1), 0), 5)
        return self.seen(), float(self.at == 5), self.at == 5, False, {}


class Old(Corridor):
    def step(self, action):
        return super().step(action)[:3] + ({},)


gym.register("Corridor-v0", Corridor, max_episode_steps=20)
gym.register("Old-v0", Old, max_episode_steps=20)
class OldReset(Corridor):
    def reset(self, seed=None):
        return super().reset(seed=seed)


class Alone(Corridor):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class Column(Corridor):
    def step(self, action):
        seen, *others = super().step(action)
        return np.array(seen)[:, None], *others


class Rewards(Corridor):
    def step(self, action):
        seen, reward, *others = super().step(action)
        return seen, np.array([reward, 0]), *others


class Unlisted(Corridor):
    pass


class Several(Corridor):
    action_space = gym.spaces.MultiDiscrete([3, 4])


gym.register("Several-v0", Several, max_episode_steps=20)
gym.register("Endless-v0", Corridor)
for one in (OldReset, Alone, Column, Rewards):
    gym.register(f"{one.__name__}-v0", one, max_episode_steps=20)
"""
SHORT = ("--train.epochs", "2", "--train.eval-every", "2", "--eval-episodes", "10", "--run.no-tensorboard")


@pytest.fixture
def corridors(tmp_path):
    (tmp_path / "corridors.py").write_text(MODULE)
    return tmp_path


def test_one_without_render_mode_is_trained_and_exported(corridors, launch):
    """Pictures of an episode are for the report: an environment that cannot draw them loses no result."""
    done = launch("run", "rl/ppo", *SHORT, "--env", "corridors:Corridor-v0", "--gates.no-enabled")
    assert done.returncode == 0, done.shown
    assert (done.folder() / "export" / "model.safetensors").exists()


def test_observations_may_be_lists(corridors, launch):
    done = launch("check", "rl/ppo", *SHORT, "--env", "corridors:Corridor-v0", "--only", "resume,environments")
    assert done.returncode == 0, done.shown


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("--env", "corridors:Old-v0"), 2, ("step() returns four values", "terminated, truncated")),
        (("--env", "corridor:Old-v0"), 2, ("the module of 'corridor:Old-v0' cannot be imported", "gymnasium.register")),
        (("--env", "Corridor-v0"), 2, ("knows no environment", "module:Name-v0")),
        (("--env", "corridors:Corridor"), 0, ()),  # gymnasium takes the newest version
        (
            ("--env", "corridors:Unlisted"),
            2,
            ("'Unlisted' is a class of corridors", "gymnasium.register('Unlisted-v0'", "--env corridors:Unlisted-v0"),
        ),
        (
            ("--env", "corridors:Several-v0"),
            2,
            ("MultiDiscrete([3 4])", "action_space = Discrete(12)", "numpy.unravel_index(action, [3, 4])"),
        ),
        (("--gamma", "1.5"), 2, ("--gamma", "1.5", "0 to 1")),
        (("--num-envs", "0"), 2, ("--num-envs", "1 or more")),
    ],
)
def test_what_cannot_be_used_is_named(argv, code, words, corridors, launch):
    done = launch("run", "rl/ppo", *SHORT, *argv, "--gates.no-enabled")
    assert done.returncode == code, done.shown
    assert all(w in done.stderr for w in words), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Old", ("step() returns four values", "then the same command again")),
        ("OldReset", ("reset() without `seed` and `options`", "options=None")),
        ("Alone", ("reset() of 'corridors:Alone-v0' does not return two values", "a dictionary")),
        ("Column", ("shape (6, 1)", "what its step() returns")),
        ("Rewards", ("the reward of", "shape (2,)", "float(reward)")),
    ],
)
def test_an_environment_is_tried_before_anything_is_trained(name, words, corridors, monkeypatch):
    monkeypatch.chdir(corridors)
    monkeypatch.syspath_prepend(str(corridors))
    with pytest.raises(UserError) as error:
        environments.sizes(f"corridors:{name}-v0", gym.spaces.Discrete)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("corridors:Corridr-v0", ("corridors:Corridor-v0", "import gymnasium, corridors;")),
        ("CartPol-v1", ("CartPole-v1", "import gymnasium;")),
    ],
)
def test_environments_that_a_message_offers_can_be_used(name, words, corridors, monkeypatch):
    monkeypatch.chdir(corridors)
    monkeypatch.syspath_prepend(str(corridors))
    with pytest.raises(UserError) as error:
        environments.make(name)
    assert all(word in str(error.value) for word in words), error.value


def test_an_episode_that_never_ends_is_reported(corridors, monkeypatch):
    """An evaluation would wait for ever where the environment has no time limit and the policy goes round in circles."""
    monkeypatch.chdir(corridors)
    monkeypatch.setattr(environments, "LONGEST", 50)
    backwards = lambda observation: torch.zeros(len(observation), dtype=torch.long)  # noqa: E731
    with pytest.raises(Stop, match="'corridors:Endless-v0' has not ended after 50 steps") as error:
        episodes.play("corridors:Endless-v0", torch.tensor([1]), backwards)
    assert "max_episode_steps" in str(error.value)
    episodes.play("corridors:Corridor-v0", torch.tensor([1]), backwards)  # 20 steps, its own limit
    assert gym.spec("Corridor-v0").max_episode_steps == 20
