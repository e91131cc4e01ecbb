"""rl/sac by what can be computed by hand, and through the real command: densities, gradients, returns, scaled actions, export."""

import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution
from trainworthy.recipes.rl import sac
from trainworthy.recipes.rl.control.data.environments import Environments

from tests.helpers.cards import printed
from tests.helpers.commands import read
from tests.helpers.control import mean_return, two_like_one

SHORT = ("--train.epochs", "4", "--train.eval-every", "2", "--learning-starts", "128", "--eval-episodes", "6",
         "--gates.no-enabled", "--run.no-tensorboard")  # fmt: skip


def policy(n_act: int = 3, temperature: float = 0.2) -> sac.Policy:
    """One that is not at its beginning."""
    torch.manual_seed(0)
    net = sac.Policy(4, n_act, (16, 16), temperature)
    torch.nn.init.normal_(net.actor[-1].weight, std=0.5)
    return net


# ------------------------------------------------------------------------------------------------------------- by hand
def test_log_probabilities_are_those_of_torch():
    """A Gaussian through tanh, as torch.distributions has it, wherever its own inverse is exact enough."""
    net, observations = policy().double(), torch.randn(200, 4, dtype=torch.float64)
    action, found = net.sample(observations, torch.randn(200, 3, dtype=torch.float64))
    mean, log_std = net.actor(net.scaled(observations)).chunk(2, -1)
    known = TransformedDistribution(Independent(Normal(mean, log_std.clamp(-5, 2).exp()), 1), [TanhTransform()])
    inside = action.abs().amax(-1) < 0.999
    torch.testing.assert_close(found[inside], known.log_prob(action)[inside])


def test_log_probabilities_are_finite_at_the_ends():
    action, log_prob = policy().sample(torch.full((1, 4), 50.0), torch.full((1, 3), 60.0))
    assert action.abs().max() == 1
    assert log_prob.isfinite().all()


def test_every_term_teaches_its_own_part_alone():
    """The critics' term the critics, the policy's the policy, the temperature's the temperature."""
    stage = sac.sac(sac.Config(eval_episodes=1, hidden_sizes=(16,)), run())
    draws = torch.Generator().manual_seed(0)
    batch = {"observation": torch.randn(8, 3, generator=draws), "action": torch.rand(8, 1, generator=draws),
             "noise": torch.randn(8, 1, generator=draws), "return": torch.randn(8, generator=draws)}  # fmt: skip
    for term, part in (("critic", "critics"), ("policy", "actor"), ("temperature", "log_temperature")):
        stage.model.zero_grad()
        stage.loss(stage.model, batch)[term].backward()
        moved = {n.split(".")[0] for n, p in stage.model.named_parameters() if p.grad is not None and p.grad.any()}
        assert moved == {part}


def run():
    """What a stage asks of a run."""
    from accelerate import Accelerator
    from trainworthy.core.loop.run import Run

    return Run(sac.Config(), Accelerator(cpu=True))


def test_the_temperature_falls_where_the_policy_is_too_undecided():
    stage = sac.sac(sac.Config(eval_episodes=1, hidden_sizes=(16,)), run())
    batch = {
        "observation": torch.randn(64, 3),
        "action": torch.zeros(64, 1),
        "noise": torch.randn(64, 1),
        "return": torch.zeros(64),
    }
    stage.loss(stage.model, batch)["temperature"].backward()
    assert stage.model.log_temperature.grad > 0  # entropy about 0.6 nats, told to have -1: gradient descent lowers it


def test_returns_by_hand():
    draws = torch.Generator().manual_seed(0)
    steps = {"reward": torch.randn(20, generator=draws), "next_observation": torch.randn(20, 4, generator=draws)}
    steps |= {"terminated": torch.rand(20, generator=draws) < 0.4}
    net, target, noise = policy(), policy(), torch.randn(20, 3, generator=draws)
    target.rewards.update(torch.full((10, 1), 5.0))
    net.rewards.update(torch.full((10, 1), 2.0))
    with torch.no_grad():
        found = sac.returns(sac.Config(gamma=0.9), net, target, steps, noise)
        for i in range(20):
            action, log_prob = net.sample(steps["next_observation"][i : i + 1], noise[i : i + 1])
            x = torch.cat([steps["next_observation"][i : i + 1], action], -1)
            low = min(float(critic(x)) for critic in target.critics)
            after = 0.0 if steps["terminated"][i] else 0.9 * (5 * low - 0.2 * 2 * float(log_prob))
            assert found[i].item() == pytest.approx(steps["reward"][i].item() + after, abs=1e-4)


# --------------------------------------------------------------------------------------------------------- environments
def test_actions_are_scaled_to_the_environments_range():
    """Pendulum's torque is -2 to 2: ours of 0.5 is its 1."""
    envs, raw = Environments("Pendulum-v1", 1, seed=3), gym.make("Pendulum-v1")
    raw.reset(seed=envs._seed(0))
    for ours in (0.5, -1.0, 0.123):
        seen, reward, *_ = raw.step(np.array([2 * ours], np.float32))
        followed = envs.step(torch.tensor([[ours]]))
        assert np.array_equal(followed["next_observation"][0].numpy(), seen)
        assert followed["reward"].item() == pytest.approx(reward)


@pytest.mark.parametrize("name", ["Pendulum-v1", "MountainCarContinuous-v0", "probe/limit-box-v0"])
def test_environments_go_on_where_they_were_saved(name: str):
    """Float actions are replayed bit for bit, from a state as a checkpoint holds it."""
    draws = torch.Generator().manual_seed(1)
    actions = 2 * torch.rand(230, 4, 1, generator=draws) - 1
    envs = Environments(name, 4, seed=3)
    for row in actions[:223]:
        envs.step(row)
    saved = envs.state_dict()
    fresh = Environments(name, 4, seed=3)
    fresh.load_state_dict(saved)
    for row in actions[223:]:
        for a, b in zip(envs.step(row).values(), fresh.step(row).values(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# -------------------------------------------------------------------------------------------------- by the real command
def test_a_run_leaves_what_the_ecosystem_loads(launch, tmp_path: Path):
    """The export alone, without this project, acts as the recipe says it does."""
    done = launch("run", "rl/sac", *SHORT)
    assert done.returncode == 0, done.shown
    folder = done.folder()
    row = read(folder / "step_metrics.jsonl")[-1]
    assert {
        "step/critic",
        "step/policy",
        "step/temperature",
        "step/policy/temperature",
        "step/policy/spread",
    } <= row.keys()
    config = json.loads((folder / "export" / "config.json").read_text())
    program = torch.export.load(folder / "export" / "model.pt2").module()
    env, low, high = gym.make(config["env"]), np.array(config["low"]), np.array(config["high"])

    def act(observation: torch.Tensor):
        return low + (1 + program(observation)[0].detach().numpy()) / 2 * (high - low)

    assert mean_return(env, act) == pytest.approx(read(folder / "summary.json")["metrics"]["return"], rel=0.02)
    assert printed(folder, tmp_path).startswith("return ")


@pytest.mark.verify
def test_two_processes_learn_like_one(launch, tmp_path):
    """The same episodes, draws and minibatches: equal to rounding."""
    two_like_one(launch, tmp_path, "run", "rl/sac", *SHORT, "--train.epochs", "2", within=1e-2)


@pytest.mark.verify
def test_tiny_is_solved(launch):
    """At least -200 over 100 episodes, far above what knows nothing."""
    done = launch("run", "rl/sac", "--gates.no-enabled", timeout=900)
    assert done.returncode == 0, done.shown
    summary = read(done.folder() / "summary.json")
    assert summary["metrics"]["return"] >= -200
    assert summary["baselines"]["random actions"]["return"] < -1000


def test_an_entropy_that_no_action_can_have_is_refused(launch):
    done = launch("check", "rl/sac", "--only", "schema", "--target-entropy", "1.0")
    assert done.returncode == 2, done.shown
    assert "no action has that entropy" in done.stderr
    assert "--target-entropy 1" in done.stderr
