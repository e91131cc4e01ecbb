"""rl/dqn by what can be computed by hand, and through the real command: returns, replay, target, odd environments, export."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from trainworthy.core.base.errors import UserError
from trainworthy.core.gates.fingerprints import fingerprints
from trainworthy.core.loop.checkpoint import Checkpoints
from trainworthy.recipes.rl import dqn, sac
from trainworthy.recipes.rl.control.data import environments
from trainworthy.recipes.rl.control.data.replay import KEPT, Replay, Target

from tests.conftest import ROOT
from tests.helpers.cards import printed
from tests.helpers.commands import read
from tests.helpers.control import mean_return, two_like_one

SHORT = ("--train.epochs", "4", "--train.eval-every", "2", "--learning-starts", "128", "--eval-episodes", "6",
         "--gates.no-enabled", "--run.no-tensorboard")  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- by hand
@pytest.mark.parametrize("double", [True, False])
def test_returns_by_hand(double: bool):
    """Against the definition, step by step: 40 stretches of three steps with both kinds of end in them."""
    draws = torch.Generator().manual_seed(0)
    steps = {"reward": torch.randn(3, 40, generator=draws), "next_observation": torch.randn(3, 40, 4, generator=draws)}
    steps |= {"observation": steps["next_observation"], "action": steps["reward"]}  # handed through
    steps |= {k: torch.rand(3, 40, generator=draws) < 0.3 for k in ("terminated", "truncated")}
    cfg = dqn.Config(gamma=0.9, n_step=3, double=double)
    policy, target = (dqn.Policy(4, 3, (8,), dueling=True) for _ in range(2))
    target.returns.update(torch.full((10, 1), 5.0))
    with torch.no_grad():
        found = dqn.returns(cfg, policy, target, dqn.ahead(cfg, steps))
        for i in range(40):
            total = 0.0
            for k in range(3):
                total += 0.9**k * steps["reward"][k, i].item()
                if steps["terminated"][k, i] or steps["truncated"][k, i] or k == 2:
                    after = steps["next_observation"][k, i][None]
                    best = (policy if double else target)(after).argmax().item()
                    total += 0.0 if steps["terminated"][k, i] else 0.9 ** (k + 1) * 5.0 * target(after)[0, best].item()
                    break
            assert found[i].item() == pytest.approx(total, abs=1e-5)


def test_exploration_is_a_function_of_the_progress():
    cfg = dqn.Config(exploration_fraction=0.5, exploration_final_eps=0.1)
    assert [dqn.epsilon(cfg, p) for p in (0.0, 0.25, 0.5, 0.9)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert dqn.epsilon(dqn.Config(exploration_fraction=0.0, exploration_final_eps=0.1), 0.5) == pytest.approx(0.1)


# --------------------------------------------------------------------------------------------------------------- replay
def filled(capacity: int, lengths: tuple[int, ...], n: int = 3) -> Replay:
    """A ring whose transitions say when they were made: reward = step * 10 + environment."""
    ring, made = Replay(capacity, n, torch.device("cpu")), 0
    for unit, length in enumerate(lengths):
        reward = (torch.arange(made, made + length)[:, None] * 10 + torch.arange(n)).float()
        ring.add({k: reward.clone() for k in KEPT}, unit)
        made += length
    return ring


@pytest.mark.parametrize("lengths", [(4,), (7, 7), (7, 9, 2), (35,)])
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_draws_are_whole_stretches_of_what_is_held(lengths: tuple[int, ...], alpha: float):
    """Every stretch that is held can be drawn, none over the seam of the ring or beyond the newest step."""
    ring, made, n = filled(10, lengths), sum(lengths), 3
    places, likelier = ring.draw(4000, n, torch.Generator().manual_seed(0), alpha)
    reward = ring.stretch(places, n)["reward"]
    assert (reward.diff(dim=0) == 10).all()
    held = range(max(0, made - 10), made - n + 1)
    assert set(reward[0].tolist()) == {s * 10.0 + e for s in held for e in range(3)}
    torch.testing.assert_close(likelier, torch.ones(4000))


def test_surprising_transitions_are_drawn_in_proportion():
    ring = filled(10, (14,))
    ring.priority[:] = torch.rand(10, 3, generator=torch.Generator().manual_seed(1)) + 0.1
    places, likelier = ring.draw(200_000, 1, torch.Generator().manual_seed(0), 0.5)
    share = torch.bincount(places, minlength=30) / len(places)
    expected = ring.priority.flatten().sqrt() / ring.priority.flatten().sqrt().sum()
    torch.testing.assert_close(share, expected, atol=3e-3, rtol=0)
    torch.testing.assert_close(likelier, 30 * expected[places])


@pytest.mark.parametrize("prioritised", [False, True])
def test_a_ring_is_saved_in_segments_and_goes_on_from_them(prioritised: bool, tmp_path: Path):
    """Through real checkpoints, before the ring is full and after it went round: each writes what is new and links the rest; a
    ring that was loaded draws, holds and saves what the saved one does, bit for bit."""
    store, ring, net = Checkpoints(tmp_path, keep=9), filled(10, ()), nn.Linear(1, 1)
    for save in range(6):
        made = ring.added
        reward = (torch.arange(made, made + 4)[:, None] * 10 + torch.arange(3)).float()
        ring.add({k: reward.clone() for k in KEPT}, save)
        if prioritised:
            ring.priority[: len(ring)] = torch.rand(len(ring), 3, generator=torch.Generator().manual_seed(save))
        store.save(save, net, {"stateful": {"replay": ring.state_dict()}}, {})
        store.wait()
        files = sorted(
            (tmp_path / f"step-{save}").glob("*replay*"), key=lambda f: int(f.name.split(".")[3].split("-")[0])
        )
        assert [f.name for f in files] == [f"stateful.replay.segments.{a}-{a + 4}.safetensors" for a in
                                           range(max(0, (made + 4 - 10) // 4 * 4), made + 4, 4)]  # fmt: skip
        assert [f.stat().st_nlink for f in files[-2:]] == [2, 1][-len(files) :]  # the newest alone was written
        fresh, other = Checkpoints(tmp_path, keep=9), Replay(10, 3, torch.device("cpu"))
        _, state, _ = fresh.load(fresh.newest())
        other.load_state_dict(state["stateful"]["replay"])
        for name in KEPT:
            assert torch.equal(other.rows[name][: len(ring)], ring.rows[name][: len(ring)])
        assert torch.equal(other.priority, ring.priority)
        assert other.age(save) == ring.age(save)
        assert other.cuts == ring.cuts
        drawn = [one.draw(50, 2, torch.Generator().manual_seed(0), 0.6 * prioritised)[0] for one in (ring, other)]
        assert torch.equal(*drawn)
        if save == 3:  # goes on as a resumed run would
            store, ring = fresh, other
    inodes = {f.stat().st_ino for f in tmp_path.glob("step-*/*replay*")}
    assert len(inodes) == 6  # written once each, whatever is kept


def test_a_state_that_nobody_keeps_changes_nothing_that_is_kept(tmp_path: Path):
    """Question for its state at moments of which no checkpoint is made, a ring cuts more segments and holds the same."""
    stores, rings = [Checkpoints(tmp_path / name) for name in ("asked", "left")], [filled(10, ()), filled(10, ())]
    for step in range(8):
        for ring in rings:
            ring.add({k: (torch.arange(3)[:, None] * 10.0 + torch.arange(3) + 100 * step) for k in KEPT}, step)
        names = [[*rings[0].state_dict()["segments"]] for _ in range(2)]
        assert names[0] == names[1]  # asked twice, it says the same
        if step % 3 == 2:
            for store, ring in zip(stores, rings, strict=True):
                store.save(step, nn.Linear(1, 1), {"replay": ring.state_dict()}, {})
    again = [Replay(10, 3, torch.device("cpu")) for _ in rings]
    for store, ring in zip(stores, again, strict=True):
        store.close()
        fresh = Checkpoints(store.folder)
        ring.load_state_dict(fresh.load(fresh.newest())[1]["replay"])
    asked, left = again
    assert len(asked.cuts) > len(left.cuts)
    assert (asked.added, asked.age(9)) == (left.added, left.age(9))
    assert all(torch.equal(asked.rows[k], left.rows[k]) for k in KEPT)


def test_what_lies_in_segments_is_compared_wherever_it_was_cut():
    """The rows a resume gate compares are those of the ring, whenever it was saved; one that differs is seen."""

    def seen(ring: Replay) -> dict[str, torch.Tensor]:
        return fingerprints(SimpleNamespace(model=nn.Identity(), ema_model=None, optimizers={}, state={"replay": ring}))

    straight, saved = filled(10, (4, 5, 4)), filled(10, ())
    for unit in range(3):
        made = saved.added
        reward = (torch.arange(made, made + (4, 5, 4)[unit])[:, None] * 10 + torch.arange(3)).float()
        saved.add({k: reward.clone() for k in KEPT}, unit)
        saved.state_dict()
    assert len(saved.cuts) > len(straight.cuts)
    names = [n for n in seen(straight) if n.startswith("state")]
    assert len(names) == 2 + len(KEPT) + 1  # priorities aside: which step, of which unit, what happened
    assert [seen(straight)[n] for n in names] == [seen(saved)[n] for n in names]
    saved.born[2] += 1
    assert sum(seen(straight)[n] != seen(saved)[n] for n in names) == 1


def test_a_damaged_segment_passes_to_the_checkpoint_before(tmp_path: Path):
    store, ring = Checkpoints(tmp_path), filled(10, (4,))
    for step in (1, 2):
        store.save(step, nn.Linear(1, 1), {"replay": ring.state_dict()}, {})
        ring.add({k: torch.ones(3, 3) for k in KEPT}, step)
    store.wait()
    newest = tmp_path / "step-2" / "replay.segments.4-7.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    assert store.survey() == (tmp_path / "step-1", {"step-2": f"{newest.name} does not match its hash"})
    newest.unlink()
    assert store.newest() == tmp_path / "step-1"


def test_segments_are_copied_where_files_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    store, ring = Checkpoints(tmp_path), filled(10, (4,))
    for step in (1, 2, 3):
        store.save(step, nn.Linear(1, 1), {"replay": ring.state_dict()}, {})
    store.close()
    assert [p.name for p in store.steps()] == ["step-2", "step-3"]
    assert not store.survey()[1]
    assert len({f.stat().st_ino for f in tmp_path.glob("step-*/*replay*")}) == 2


def test_a_target_shares_nothing_and_follows():
    net = nn.BatchNorm1d(2)
    target = Target(net, torch.device("cpu"))
    with torch.no_grad():
        net.weight += 1
        net.running_mean += 1
    assert target.net.weight.tolist() == [1, 1]
    target.follow(net, 0.25)
    assert target.net.weight.tolist() == [1.25, 1.25]
    assert target.net.running_mean.tolist() == [1, 1]  # statistics are copied whole
    target.follow(net)
    assert torch.equal(target.net.weight, net.weight)


def test_what_scales_the_outputs_of_a_target_follows_as_its_weights_do():
    """Copied, it let returns grow with their own scale: no finite loss at step 18 with a share of 0.08."""
    net = nn.ModuleDict({"seen": nn.BatchNorm1d(2), "returns": nn.BatchNorm1d(2)})
    target = Target(net, torch.device("cpu"), scale="returns")
    for part in net.values():
        part.running_var += 4
        part.num_batches_tracked += 1
    target.follow(net, 0.25)
    seen, returns = target.net["seen"], target.net["returns"]
    assert returns.running_var.tolist() == [2, 2]
    assert seen.running_var.tolist() == [5, 5]
    assert returns.num_batches_tracked == seen.num_batches_tracked == 1


# ------------------------------------------------------------------------------------------ environments that cannot be used
@pytest.mark.parametrize(
    ("recipe", "space", "words"),
    [
        (gym.spaces.Discrete, gym.spaces.Box(-1, 1, (2,)), ("rl/sac",)),
        (gym.spaces.Discrete, gym.spaces.MultiBinary(3), ("number the combinations", "Discrete(8)")),
        (gym.spaces.Box, gym.spaces.Discrete(3), ("rl/ppo or rl/dqn",)),
        (gym.spaces.Box, gym.spaces.Box(-np.inf, np.inf, (2,)), ("cannot be scaled", "finite")),
    ],
)
def test_an_unsupported_space_names_what_supports_it(recipe: type, space: gym.Space, words: tuple[str, ...]):
    class Odd(gym.Env):
        observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), space

    gym.register("Odd-v0", entry_point=Odd)
    try:
        with pytest.raises(UserError) as error:
            environments.sizes("Odd-v0", recipe)
    finally:
        del gym.registry["Odd-v0"]
    assert not [w for w in words if w not in str(error.value)], str(error.value)
    assert str(space) in str(error.value)


ODD = """
import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class Unlicensed(CartPoleEnv):
    def __init__(self, **settings):
        raise RuntimeError("no licence")


class Narrow(CartPoleEnv):
    def reset(self, **settings):
        observation, told = super().reset(**settings)
        return observation[:3], told


for made in (Unlicensed, Narrow):
    gym.register(f"{made.__name__}-v0", entry_point=made, max_episode_steps=500)
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("odd:Unlicensed-v0", ("cannot be made", "RuntimeError: no licence", "odd.py:")),
        ("odd:Narrow-v0", ("shape (3,)", "shape (4,)", "observation_space")),
        ("MountainCarContinuous-v0", ("a Discrete action space", "use rl/ppo or rl/sac for these actions")),
    ],
)
def test_an_environment_that_cannot_be_learnt_is_one_message(name: str, words: tuple[str, ...], launch, tmp_path: Path):
    (tmp_path / "odd.py").write_text(ODD)
    done = launch("run", "rl/dqn", "--env", name, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 2, done.shown
    assert not [w for w in words if w not in done.stderr], done.stderr
    assert "Traceback" not in done.stderr


def test_a_unit_shorter_than_its_returns_is_one_message():
    with pytest.raises(UserError, match="--n-step <= --num-steps"):
        dqn.dqn(dqn.Config(n_step=20), run=None)


@pytest.mark.parametrize(
    "build",
    [lambda: dqn.dqn(dqn.Config(buffer_size=200), run=None), lambda: sac.sac(sac.Config(buffer_size=200), run=None)],
)
def test_a_buffer_that_is_counted_in_episodes_is_one_message(build):
    with pytest.raises(UserError, match="forgets transitions before the first update"):
        build()


# -------------------------------------------------------------------------------------------------- by the real command
def test_a_run_leaves_what_the_ecosystem_loads(launch, tmp_path: Path):
    """The export alone, without this project, acts as the recipe says it does; with everything switched on."""
    done = launch("run", "rl/dqn", *SHORT, "--prioritized-replay-alpha", "0.6", "--n-step", "3")
    assert done.returncode == 0, done.shown
    folder = done.folder()
    row = read(folder / "step_metrics.jsonl")[-1]
    assert {"step/loss", "step/policy/epsilon", "step/policy/value", "step/policy/explained_variance"} <= row.keys()
    config = json.loads((folder / "export" / "config.json").read_text())
    program = torch.export.load(folder / "export" / "model.pt2").module()
    env = gym.make(config["env"])

    def act(observation: torch.Tensor):
        return int(program(observation).argmax()) + config["first_action"]

    assert mean_return(env, act) == pytest.approx(read(folder / "summary.json")["metrics"]["return"], rel=0.02)
    assert printed(folder, tmp_path).startswith("return ")


@pytest.mark.verify
@pytest.mark.parametrize("more", [(), ("--prioritized-replay-alpha", "0.6", "--n-step", "3")])
def test_two_processes_learn_like_one(more: tuple[str, ...], launch, tmp_path):
    """The same episodes, draws and minibatches: equal to rounding as long as rounding has turned no action."""
    two_like_one(launch, tmp_path, "run", "rl/dqn", *SHORT, "--train.epochs", "2", *more, within=1e-3)


@pytest.mark.verify
def test_tiny_is_solved(launch):
    """At least 475 over 100 episodes, far above what knows nothing."""
    done = launch("run", "rl/dqn", "--gates.no-enabled", timeout=900)
    assert done.returncode == 0, done.shown
    summary = read(done.folder() / "summary.json")
    assert summary["metrics"]["return"] >= 475
    assert summary["baselines"]["random actions"]["return"] < 50


def test_dropout_is_drawn_anew_in_every_update_of_an_iteration(fork, launch):
    """The gate that computes gradients again leaves the generators as the loop had them."""
    fork(
        ("        x = self.body(x)\n", "        x = F.dropout(self.body(x), 0.05, self.training)\n"),
        recipe="rl/dqn",
    )
    launch("check", "mine.py", "--only", "wiring", code=0)
