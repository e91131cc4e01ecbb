"""rl/ppo by what can be computed by hand, and through the real command: estimates, statistics, environments, bad input, export."""

import importlib
import importlib.util
import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete
from safetensors.torch import load_file
from trainworthy.core.base.errors import UserError
from trainworthy.core.data.inventory import scan
from trainworthy.recipes.rl import ppo
from trainworthy.recipes.rl.control.data import arrays, environments, probes
from trainworthy.recipes.rl.control.data.environments import Environments
from trainworthy.recipes.rl.control.evaluation import episode_pictures, episodes
from trainworthy.recipes.rl.control.models.heads import Categorical, Gaussian
from trainworthy.recipes.rl.control.models.memory import Remembering, player
from trainworthy.recipes.rl.control.models.nets import Running, mlp

from tests.conftest import ROOT
from tests.helpers.cards import printed
from tests.helpers.commands import losses, read
from tests.helpers.control import mean_return, two_like_one

SHORT = (
    "--train.epochs",
    "4",
    "--train.eval-every",
    "2",
    "--eval-episodes",
    "6",
    "--gates.no-enabled",
    "--run.no-tensorboard",
)


# ------------------------------------------------------------------------------------------------------------- by hand
def test_gae_by_hand():
    """Against the definition: sum over the episode of (gamma lambda)^k delta, one row of six steps with both kinds of end."""
    draws = torch.Generator().manual_seed(0)
    reward, value, following = torch.randn(3, 6, 1, generator=draws)
    terminated = torch.tensor([0, 0, 1, 0, 0, 0]).bool()[:, None]
    done = torch.tensor([0, 0, 1, 0, 1, 0]).bool()[:, None]
    gamma, lam = 0.9, 0.8
    found = ppo.gae(reward, value, following, terminated, done, gamma, lam)
    for t in range(6):
        total, weight = 0.0, 1.0
        for k in range(t, 6):
            alive = 0.0 if terminated[k] else 1.0
            total += weight * float(reward[k] + gamma * alive * following[k] - value[k])
            weight *= gamma * lam
            if done[k]:
                break
        assert found[t].item() == pytest.approx(total, abs=1e-6)


def test_running_statistics_are_those_of_all_rows():
    draws = torch.Generator().manual_seed(0)
    rows = 5 + 3 * torch.randn(1000, 4, generator=draws)
    running = Running(4)
    assert running.std.tolist() == [1.0] * 4
    for part in rows.split([1, 9, 500, 490]):
        running.update(part)
    torch.testing.assert_close(running.mean, rows.mean(0))
    torch.testing.assert_close(running.var, rows.var(0, correction=0))
    torch.testing.assert_close(running.rms, rows.square().mean(0).sqrt())


def test_a_constant_observation_does_not_explode():
    running = Running(1)
    running.update(torch.full((100, 1), 7.0))
    assert running.std.item() == 1.0


def test_layers_are_a_sequence_whose_hooks_are_called():
    net, x, seen = mlp(3, 8, 8, 2), torch.randn(5, 3), []
    plain = torch.nn.Sequential(*net)
    assert torch.equal(net(x), plain(x))
    net[2].register_forward_hook(lambda _layer, _args, out: seen.append(out) or 2 * out)
    assert torch.equal(net(x), plain(x))
    assert len(seen) == 2


# --------------------------------------------------------------------------------------------------------- environments
@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("CartPole-v1", 1),
        ("CartPole-v1", 3),
        ("Acrobot-v1", 1),
        ("MountainCar-v0", 1),
        ("Taxi-v4", 1),
        ("probe/limit-v0", 1),
    ],
)
def test_environments_go_on_where_they_were_saved(name: str, stack: int):
    """Seven steps after a save are bitwise those of fresh environments that replay what was saved, in one process or as two."""
    draws = torch.Generator().manual_seed(1)
    envs = Environments(name, 5, seed=3, stack=stack)
    actions = torch.randint(environments.sizes(name, Discrete)[1], (230, 5), generator=draws)
    for row in actions[:223]:
        envs.step(row)
    saved = envs.state_dict()
    straight = [envs.step(row) for row in actions[223:]]
    parts = [Environments(name, 5, seed=3, stack=stack, rank=r, world=2) for r in range(2)]
    for whole in (Environments(name, 5, seed=3, stack=stack), *parts):
        whole.load_state_dict(saved)
        for row, expected in zip(actions[223:], straight, strict=True):
            found = whole.step(row[whole.mine.start : whole.mine.stop])
            for key, value in found.items():
                torch.testing.assert_close(
                    value, expected[key][whole.mine.start : whole.mine.stop], rtol=0, atol=0, equal_nan=True
                )


def upright(observation: torch.Tensor) -> torch.Tensor:
    """Holds CartPole's pole until the time limit, most of the time."""
    return (observation[:, 2] + observation[:, 3] + 0.1 * observation[:, 1] > 0).long()


def test_an_array_of_cartpoles_is_bitwise_as_many_ordinary_ones(monkeypatch):
    """Three thousand steps of each of four with both kinds of end, and whole evaluations."""

    def played() -> tuple[type, dict[str, torch.Tensor], list]:
        draws = torch.Generator().manual_seed(1)
        envs, steps = Environments("CartPole-v1", 4, seed=3), []
        for t in range(3000):
            drawn = torch.randint(2, (4,), generator=draws)
            steps.append(envs.step(drawn if t % 1000 < 300 else upright(envs.observation)))
        rows = {k: torch.stack([s[k] for s in steps]) for k in steps[0]}
        return type(envs.vector), rows, episodes.play("CartPole-v1", torch.arange(9), upright)[1]

    array, together, seen = played()
    monkeypatch.setattr(arrays, "known", lambda name: False)
    ordinary, one_by_one, known = played()
    assert (array, ordinary) == (arrays.CartPoles, gym.vector.SyncVectorEnv)
    assert one_by_one["terminated"].sum() > 100
    assert one_by_one["truncated"].sum() >= 10
    torch.testing.assert_close(together, one_by_one, rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(a, b) for a, b in zip(seen, known, strict=True))


def test_an_array_is_of_gymnasiums_cartpole_alone():
    gym.register("Heavy-v0", "gymnasium.envs.classic_control.cartpole:CartPoleEnv", kwargs={"sutton_barto_reward": True},
                 vector_entry_point="gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv")  # fmt: skip
    try:
        found = {
            name: arrays.known(name) for name in ("CartPole-v1", "CartPole-v0", "Heavy-v0", "Acrobot-v1", "nothing")
        }
    finally:
        del gym.registry["Heavy-v0"]
    assert found == {"CartPole-v1": True, "CartPole-v0": True, "Heavy-v0": False, "Acrobot-v1": False, "nothing": False}


def test_frames_are_the_last_of_their_own_episode():
    """Against the same episodes unstacked: oldest first, an episode's first observation in place of what was before it."""
    draws = torch.Generator().manual_seed(2)
    one, three = Environments("CartPole-v1", 3, seed=0), Environments("CartPole-v1", 3, seed=0, stack=3)
    past = [[row] * 3 for row in one.observation]
    begun = 0
    for _ in range(150):
        actions = torch.randint(2, (3,), generator=draws)
        single, stacked = one.step(actions), three.step(actions)
        done = single["terminated"] | single["truncated"]
        for i in range(3):
            past[i] = [*past[i][1:], single["next_observation"][i]]
            assert torch.equal(stacked["next_observation"][i], torch.cat(past[i]))
            if done[i]:
                past[i], begun = [one.observation[i]] * 3, begun + 1
            assert torch.equal(three.observation[i], torch.cat(past[i]))
    assert begun > 10


def test_what_is_remembered_is_of_the_running_episode():
    """Nothing at its beginning; what a stretch makes anew is what was carried; alone an episode is played as beside others."""
    policy = ppo.Policy(2, Categorical(2), (8,), memory=5)
    one = Environments(probes.HIDDEN, 3, seed=0)
    envs, draws, steps = Remembering(one, policy, 80), torch.Generator().manual_seed(0), []
    for _ in range(80):
        row = envs.observation
        steps.append({"row": row, **envs.step(torch.randint(2, (3,), generator=draws))})
    rows, after = (torch.stack([s[k] for s in steps]) for k in ("row", "next_observation"))  # (80, 3, 8)
    done = torch.stack([s["terminated"] | s["truncated"] for s in steps])
    assert done.sum() > 5
    begins = rows[1:][done[:-1]]
    assert (begins[:, 2] == 1).all()
    assert (begins[:, 3:] == 0).all()
    going = ~done[:-1]
    assert torch.equal(rows[1:][going], after[:-1][going])
    with torch.no_grad():
        anew = policy(rows.transpose(0, 1), through=True)[2].transpose(0, 1)
        torch.testing.assert_close(anew, after[..., 3:])
        act = player(lambda model, rows: model.act(rows), policy)
        starts = torch.tensor([11, 12, 13])
        together, _ = episodes.play(probes.HIDDEN, starts, act)
        alone = [episodes.play(probes.HIDDEN, starts[i : i + 1], act)[0].item() for i in range(3)]
    assert together.tolist() == alone
    saved = envs.state_dict()
    again = Remembering(Environments(probes.HIDDEN, 3, seed=0), policy, 80)
    again.load_state_dict(saved)
    assert torch.equal(again.observation, envs.observation)


def test_pictures_of_an_episode_where_it_renders():
    """Eight of it at most, from its first step to its last."""
    pictures = episode_pictures.strip("CartPole-v1", torch.tensor([3]), upright)
    assert [p.caption for p in pictures][:2] == ["step 0 of 499", "step 71 of 499"]
    assert {tuple(p.image.shape) for p in pictures} == {(80, 120, 3)}
    assert len({p.image.numpy().tobytes() for p in pictures}) == len(pictures) == 8


def test_the_end_of_an_episode_is_its_own_last_observation():
    """The observation of the step that ends an episode is not that of the reset; the returns are those of whole episodes."""
    envs = Environments("CartPole-v1", 3, seed=0)
    lengths = torch.zeros(3)
    ended = 0
    for _ in range(200):
        followed = envs.step(torch.ones(3, dtype=torch.int64))
        lengths += 1
        done = followed["terminated"] | followed["truncated"]
        for i in done.nonzero().flatten().tolist():
            assert followed["next_observation"][i].abs().max() > 0.2  # fallen
            assert envs.observation[i].abs().max() <= 0.05  # begun again
            assert followed["finished"][i] == lengths[i]
            lengths[i] = 0
            ended += 1
        assert followed["finished"][~done].isnan().all()
    assert ended > 30


def test_rows_of_two_processes_are_the_rows_of_one():
    order = torch.randperm(4 * 6, generator=torch.Generator().manual_seed(0))
    whole = torch.arange(24).view(4, 6)  # (steps, environments)
    for chosen in order.split(8):
        found = []
        for rank in range(2):
            part = Environments("CartPole-v1", 6, seed=0, rank=rank, world=2)
            found += whole[:, part.mine.start : part.mine.stop].flatten()[part.rows(chosen)].tolist()
        assert sorted(found) == sorted(chosen.tolist())


def test_an_episode_depends_on_its_seed_alone():
    starts = torch.tensor([11, 12, 13, 14])
    act = lambda observation: (observation[:, 2] > 0).long()  # noqa: E731
    together, _ = episodes.play("CartPole-v1", starts, act)
    alone = [episodes.play("CartPole-v1", starts[i : i + 1], act)[0].item() for i in range(4)]
    assert together.tolist() == alone


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CartPol-v1", ("CartPol-v1", "CartPole-v1")),
        ("CartPole-v9", ("CartPole-v9", "CartPole-v1")),
        ("LunarLander-v3", ("LunarLander-v3", "not installed")),
        ("nowhere:CartPole-v1", ("nowhere",)),
    ],
)
def test_environments_that_cannot_be_used(name: str, words: tuple[str, ...]):
    if name == "LunarLander-v3" and importlib.util.find_spec("Box2D"):
        pytest.skip("box2d is installed")
    with pytest.raises(UserError) as error:
        environments.make(name)
    assert all(w in str(error.value) for w in words), str(error.value)


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
def test_a_band_is_that_of_its_environment(name: str):
    """Episodes of another environment are other data, so reports do not judge them by the band that ships."""
    recipe = importlib.import_module(f"trainworthy.recipes.rl.{name}")
    band, cfg = read(ROOT / "recipes" / "rl" / "results" / f"{name}.band.json"), recipe.tiny()
    known = {
        env: scan("val", environments.Episodes(env, cfg.eval_episodes)).fingerprint for env in (cfg.env, "Acrobot-v1")
    }
    assert band["settings"]["env"] == cfg.env
    assert band["data"] == known[cfg.env] != known["Acrobot-v1"]


def test_heads_are_the_distributions_of_torch():
    """Log-probability and entropy of what was drawn; draws as often as they should be."""
    draws = torch.Generator().manual_seed(0)
    raw = torch.randn(5, 3, generator=draws)
    gaussian = Gaussian(3)
    gaussian.log_std.data.copy_(torch.tensor([-1.0, 0.0, 0.5]))
    normal = torch.distributions.Independent(torch.distributions.Normal(raw, gaussian.log_std.detach().exp()), 1)
    for head, known in ((Categorical(3), torch.distributions.Categorical(logits=raw)), (gaussian, normal)):
        outputs = head(raw).detach()
        action = head.draw(outputs, head.noise(4000, 5, generator=draws))  # (4000, 5) or (4000, 5, 3)
        torch.testing.assert_close(head.log_prob(outputs.expand(4000, *outputs.shape), action), known.log_prob(action))
        torch.testing.assert_close(head.entropy(outputs), known.entropy())
        seen = torch.nn.functional.one_hot(action).float() if action.ndim == 2 else action
        expected = known.probs if action.ndim == 2 else raw
        torch.testing.assert_close(seen.mean(0), expected, atol=0.1, rtol=0)
    assert torch.equal(
        gaussian.best(gaussian(torch.tensor([[-3.0, 0.2, 3.0]])).detach()), torch.tensor([[-1.0, 0.2, 1.0]])
    )


# -------------------------------------------------------------------------------------------------- by the real command
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--env", "CartPol-v1"), ("knows no environment 'CartPol-v1'", "CartPole-v1")),
        (("--train.batch-size", "300"), ("cut evenly", "--train.batch-size")),
        (("--frame-stack", "0"), ("nothing would be observed", "--frame-stack 0")),
        (
            ("--rnn-hidden-size", "8", "--frame-stack", "4"),
            ("recurrent state or stacked frames", "--rnn-hidden-size 8 --frame-stack 4"),
        ),
        (("--rnn-hidden-size", "8", "--train.batch-size", "64"), ("whole rollouts", "multiple of --num-steps 128")),
    ],
)
def test_bad_input_is_one_message(argv: tuple[str, ...], words: tuple[str, ...], launch):
    done = launch("run", "rl/ppo", *argv)
    assert done.returncode == 2, done.shown
    assert all(w in done.stderr for w in words), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("CartPole-v1", 0),
        pytest.param("Pendulum-v1", 0, marks=pytest.mark.verify),
        pytest.param("CartPole-v1", 8, marks=pytest.mark.verify),
    ],
)
def test_a_run_leaves_what_the_ecosystem_loads(name: str, memory: int, launch, tmp_path: Path):
    """The export alone, without this project, acts as the recipe says it does; the tags of a policy are in the metrics."""
    done = launch("run", "rl/ppo", *SHORT, "--env", name, "--rnn-hidden-size", str(memory))
    assert done.returncode == 0, done.shown
    folder = done.folder()
    row = read(folder / "step_metrics.jsonl")[-1]
    assert {
        "step/policy",
        "step/value",
        "step/entropy",
        "step/policy/approx_kl",
        "step/policy/clip_fraction",
    } <= row.keys()
    assert [r["step"] for r in read(folder / "step_metrics.jsonl")] == [1, 2, 3, 4]
    config = json.loads((folder / "export" / "config.json").read_text())
    program = torch.export.load(folder / "export" / "model.pt2").module()
    env = gym.make(config["env"])

    state = None

    def act(observation: torch.Tensor):
        nonlocal state
        if memory:
            begun = env.get_wrapper_attr("_elapsed_steps") == 0
            before = torch.zeros(1, memory) if begun else state
            observation = torch.cat([observation, torch.tensor([[float(begun)]]), before], 1)
            state = program(observation)[2].detach()
        said = program(observation)[0][0].detach()
        if config["low"] is None:
            return int(said.argmax()) + config["first_action"]
        low, high = (np.float32(config[k]) for k in ("low", "high"))
        return low + (1 + said[: config["n_actions"]].clamp(-1, 1).numpy()) / 2 * (high - low)

    assert mean_return(env, act) == pytest.approx(read(folder / "summary.json")["metrics"]["return"], rel=0.02)
    if not memory:
        assert printed(folder, tmp_path).startswith("return ")
    weights = load_file(folder / "export" / "model.safetensors")
    assert weights["observations.count"] == 4 * 128 * 16


@pytest.mark.verify
def test_two_processes_learn_like_one(launch, tmp_path):
    """The same episodes, draws and minibatches: equal to rounding as long as rounding has turned no action."""
    two_like_one(launch, tmp_path, "run", "rl/ppo", *SHORT, "--train.epochs", "2", "--num-steps", "32", within=1e-3)


@pytest.mark.verify
def test_accumulation_changes_nothing_but_rounding(launch, tmp_path):
    found = []
    for n in (1, 3):
        cwd = tmp_path / str(n)
        cwd.mkdir()
        done = launch("run", "rl/ppo", *SHORT, "--train.epochs", "2", "--train.accumulate", str(n), cwd=cwd)
        assert done.returncode == 0, done.shown
        found.append(losses(done.folder()))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_a_step_of_max_steps_is_a_rollout_with_all_its_updates(launch):
    """The gate's words name both: 20 rehearsed rollouts of 32 updates, 3 rollouts in the run. So does the help."""
    done = launch("check", "rl/ppo", "--only", "schedule", "--max-steps", "3", code=0)
    assert "640 optimiser steps as scheduled; in the full run 0 of 3 iterations of warm-up" in done.stdout, done.shown
    assert "(of a recipe that makes its own samples: iterations)" in launch("run", "rl/ppo", "--help", code=0).stdout


@pytest.mark.verify
def test_tiny_is_solved(launch):
    """At least 475 over 100 episodes, in under two minutes of training, far above what knows nothing."""
    done = launch("run", "rl/ppo", "--gates.no-enabled", timeout=600)
    assert done.returncode == 0, done.shown
    summary = read(done.folder() / "summary.json")
    assert summary["metrics"]["return"] >= 475
    assert summary["baselines"]["random actions"]["return"] < 50


@pytest.mark.verify
@pytest.mark.parametrize(("stack", "solved"), [(4, True), (1, False)])
def test_velocities_that_are_hidden_are_read_from_frames(stack: int, solved: bool, launch):
    """CartPole by its two positions alone: four observations hold the pole, one cannot."""
    done = launch(
        "run", "rl/ppo", "--env", "hidden/CartPole-v1", "--frame-stack", str(stack), "--gates.no-enabled", timeout=900
    )
    assert done.returncode == 0, done.shown
    earned = read(done.folder() / "summary.json")["metrics"]["return"]
    assert earned >= 475 if solved else earned < 100, earned
