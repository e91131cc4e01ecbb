"""Control recipes: objectives against their formulas, targets against their definitions, settings that cannot work, start states,
runs that are lost. Every case through the real command, with the gates that it is about alone."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trainworthy.core.base.errors import Interrupted, Stop
from trainworthy.core.gates import full_precision
from trainworthy.recipes.rl.control.data import environments
from trainworthy.recipes.rl.control.gates import learning_probes, monitors, objective

from tests.conftest import ROOT
from tests.rl.healthy_ppo import VARIANTS
from tests.rl.test_rl_monitors import CEILING, FLOOR, history

OBJECTIVE = "formula,entries,returns"


def failed(done) -> dict[str, dict]:
    return {v["id"]: v for v in done.verdicts() if v["verdict"] == "fail"}


# ------------------------------------------------------------------------------------------------------------ objectives
def test_a_ratio_that_is_always_one_is_stopped_by_its_name(launch, fork):
    """Its return was 162 instead of 500, and every gate passed."""
    fork(
        ('ratio = (policy.head.log_prob(outputs, batch["action"]) - batch["log_prob"]).exp()',
         'lp = policy.head.log_prob(outputs, batch["action"])\n        ratio = (lp - lp.detach()).exp()'),
        recipe="rl/ppo",
    )  # fmt: skip
    done = launch("check", "mine.py", "--only", OBJECTIVE)
    assert done.returncode == 3, done.shown
    found = failed(done)
    assert list(found) == ["formula", "entries"], done.shown
    assert "the ratio is 1 everywhere" in found["formula"]["remedy"].splitlines()[0]
    assert "log_prob" in found["entries"]["measured"]
    assert "--gates.waive formula" in found["formula"]["remedy"]
    assert "formula=" in found["formula"]["remedy"]


def test_an_objective_that_was_changed_on_purpose_is_quiet(launch, fork):
    """A bound for each side, a KL term, values that are not clipped, an entropy bonus that falls: all published, none a bug."""
    fork(
        ("ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range)", "ratio.clamp(1 - cfg.clip_range, 1.28)"),
        ('        return {\n            "policy": -gain.sum(),',
         '        return {\n            "kl": 0.1 * (ratio - 1 - ratio.log()).sum(),\n            "policy": -gain.sum(),'),
        ('error = torch.max((value - batch["return"]).square(), (near - batch["return"]).square())',
         'error = (value - batch["return"]).square()'),
        ("-cfg.ent_coef * policy.head", "-cfg.ent_coef * (1 - 0.5 * run.step / max(run.total, 1)) * policy.head"),
        recipe="rl/ppo",
    )  # fmt: skip
    done = launch("check", "mine.py", "--only", OBJECTIVE)
    assert done.returncode == 0, done.shown
    assert [v["verdict"] for v in done.verdicts()] == ["pass"] * 3, done.shown
    (formula,) = (v for v in done.verdicts() if v["id"] == "formula")
    for word in ("0.80 and 1.28", "not clipped", "times 0.5", "of the recipe's own: kl"):
        assert word in formula["measured"], formula["measured"]


def test_another_loss_that_is_published_is_quiet_and_a_declared_one_skips(launch, fork):
    fork(
        ("error = F.smooth_l1_loss(", "error = 0.5 * F.mse_loss("),
        ("formula=formulas.dqn", "formula=None"),
        recipe="rl/dqn",
    )
    done = launch("check", "mine.py", "--only", OBJECTIVE)
    assert done.returncode == 0, done.shown
    assert {v["id"]: v["verdict"] for v in done.verdicts()} == {"formula": "skip", "entries": "pass", "returns": "pass"}


def test_values_by_huber_are_quiet_in_ppo(launch, fork):
    """A published form (MAPPO), which the statements of DQN and SAC know, too."""
    fork(next(v.hunk for v in VARIANTS if v.id == "ok-rl-values-by-huber"), recipe="rl/ppo")
    done = launch("check", "mine.py", "--only", "formula", code=0)
    assert "Huber" in done.verdicts()[0]["measured"], done.shown


@pytest.mark.parametrize(
    ("penalty", "name"),
    [
        (
            'batch["advantage"].abs() / (2 * cfg.clip_range) * (ratio - 1).square()',
            "2.5 x |advantage| x (ratio - 1)^2 (SPO)",
        ),
        ("0.7 * (ratio - 1 - ratio.log())", "0.7 x KL (k3)"),
    ],
)
def test_a_penalty_in_place_of_the_clip_is_quiet_in_ppo(penalty: str, name: str, launch, fork):
    """SPO's parabola, and the penalty by the KL divergence of PPO's own paper."""
    old = """torch.min(
            ratio * batch["advantage"], ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range) * batch["advantage"]
        )"""
    fork((old, f'ratio * batch["advantage"] - {penalty}'), recipe="rl/ppo")
    done = launch("check", "mine.py", "--only", "formula", code=0)
    assert name in done.verdicts()[0]["measured"], done.shown


UNIT = 'steps.append({"observation": observation, "action": action, "log_prob": log_prob, **followed})'


@pytest.mark.parametrize("times", ["0.1", "0.5"])
def test_rewards_in_another_unit_are_quiet(launch, fork, times):
    """Rewards times 0.1 are usual; values and returns are a tenth, too. 0.5 is also the probes' discount."""
    fork((UNIT, f'followed["reward"] = {times} * followed["reward"]\n        {UNIT}'), recipe="rl/ppo")
    done = launch("check", "mine.py", "--only", "targets,probe-delay,returns", code=0)
    assert f"every reward times {times}" in done.verdicts()[0]["measured"], done.shown


def test_rewards_that_are_discounted_once_too_often_are_stopped(launch, fork):
    fork((UNIT, f'followed["reward"] = cfg.gamma * followed["reward"]\n        {UNIT}'), recipe="rl/ppo")
    done = launch("check", "mine.py", "--only", "targets", code=3)
    assert "targets such as" in failed(done)["targets"]["measured"], done.shown


def test_one_factor_explains_all_targets_or_none():
    """(reward, target): another unit; a bonus, a clip and a wrong action are none."""
    assert learning_probes.common_factor([(1, 0.1), (-1, -0.1), (0, 0.0)]) == pytest.approx(0.1)
    for other in ([(1, 1.1), (-1, -0.9)], [(1, 0.1), (0, 0.1)], [(1, 0.5), (-1, 0.5)], [(2, 1.0), (1, 1.0)], []):
        assert learning_probes.common_factor(other) == 0


# ---------------------------------------------------------------------------------------------------- the settings of the run
@pytest.mark.parametrize(
    ("recipe", "argv", "words"),
    [
        ("rl/dqn", ("--target-update-interval", "10240"), ("updated 1 times in the whole run", "10,240 updates")),
        ("rl/sac", ("--tau", "0.995"), ("equals the net after every update", "not the share kept")),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_number(recipe: str, argv: tuple[str, ...], words, launch):
    """The probes learn under settings of their own, which hid this one."""
    done = launch("check", recipe, "--only", "target-rate", *argv)
    assert done.returncode == 3, done.shown
    verdict = failed(done)["target-rate"]
    said = verdict["measured"] + verdict["remedy"]
    assert not [w for w in words if w not in said], said


FIXED = [
    ("nn.Parameter(torch.tensor(math.log(temperature)))", "nn.Buffer(torch.tensor(math.log(temperature)))"),
    ('            "temperature": (model.log_temperature * surplus).sum(),\n', ""),
]


def test_a_fixed_temperature_has_no_term_in_sac(launch, fork):
    fork(*FIXED, recipe="rl/sac")
    done = launch("check", "mine.py", "--only", "formula", code=0)
    assert "policy: temperature x log-probability" in done.verdicts()[0]["measured"], done.shown


def test_a_temperature_that_should_be_learnt_and_has_no_term_is_stopped(launch, fork):
    fork(FIXED[1], recipe="rl/sac")
    done = launch("check", "mine.py", "--only", "formula", code=3)
    assert "temperature: it is zero, or missing" in failed(done)["formula"]["remedy"]


ENSEMBLE = [
    ("for _ in range(2))", "for _ in range(5))"),
    ("action).amin(0) * target.rewards.rms", "action)[torch.randperm(5)[:2]].amin(0) * target.rewards.rms"),
    ("frozen=True).amin(0)", "frozen=True).mean(0)"),
]


def test_an_ensemble_of_critics_is_quiet_in_sac(launch, fork):
    """REDQ (Chen 2021): the lower of two random target critics of five, the mean of all in the policy's loss."""
    fork(*ENSEMBLE, recipe="rl/sac")
    done = launch("check", "mine.py", "--only", "formula,lower-critic,returns", code=0)
    assert "the mean of all critics (REDQ, DroQ)" in done.verdicts()[0]["measured"], done.shown


def test_a_policy_on_the_mean_of_two_critics_is_quiet_in_sac(launch, fork):
    """DroQ (Hiraoka 2022); the targets keep the lower one."""
    fork(ENSEMBLE[2], recipe="rl/sac")
    done = launch("check", "mine.py", "--only", "formula,lower-critic", code=0)
    assert "the mean of all critics (REDQ, DroQ)" in done.verdicts()[0]["measured"], done.shown


def test_one_critic_of_an_ensemble_is_stopped_in_sac(launch, fork):
    """Targets of one random critic, and a policy that follows one of five."""
    fork(
        ENSEMBLE[0],
        (ENSEMBLE[1][0], ENSEMBLE[1][1].replace("[:2]", "[:1]")),
        ("frozen=True).amin(0)", "frozen=True)[0]"),
        recipe="rl/sac",
    )
    done = launch("check", "mine.py", "--only", "formula,lower-critic,returns", code=3)
    found = failed(done)
    assert list(found) == ["formula", "lower-critic", "returns"], done.shown
    assert "only critic 0" in found["formula"]["remedy"].splitlines()[0]


# ----------------------------------------------------------------------------------------------------------- environments
GRID = '''
import gymnasium as gym
import numpy as np


class Grid(gym.Env):
    """Somebody and a goal in two of 5 x 5 cells: 600 starts."""

    observation_space, action_space = gym.spaces.Box(0, 4, (4,), np.float32), gym.spaces.Discrete(4)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def look(self):
        return np.array([*self.at, *self.goal], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.goal = ([int(k) // 5, int(k) % 5] for k in self.np_random.choice(25, 2, replace=False))
        return self.look(), {}

    def step(self, action):
        move = ((0, 1), (0, -1), (1, 0), (-1, 0))[int(action)]
        self.at = [min(4, max(0, a + b)) for a, b in zip(self.at, move)]
        return self.look(), float(self.at == self.goal), self.at == self.goal, False, {}


gym.register("Grid-v0", entry_point=Grid, max_episode_steps=50)
'''


def test_starts_that_meet_by_chance_are_no_fault(tmp_path: Path):
    """600 starts at 20 seeds: two of 16 environments meet in every fifth run. Shared seeds fail, of few environments, too."""
    (tmp_path / "grid.py").write_text(GRID)
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import grid
        from trainworthy.recipes.rl.control.gates import starts
        from trainworthy.recipes.rl.control.data.environments import Environments
        found = [starts.shared(Environments("Grid-v0", 16, seed=s)) for s in range(20)]
        assert not [fault for fault, _ in found if fault], found
        assert any("no fault" in remark for _, remark in found), found
        own = Environments._seed
        for shared in (lambda self, i: 7, lambda self, i: own(self, 0 if i == 1 else i)):
            Environments._seed = shared
            for s in range(3):
                assert "start from the same observation" in starts.shared(Environments("Grid-v0", 16, seed=s))[0]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_an_environment_is_imported_from_the_working_directory(tmp_path: Path, launch):
    (tmp_path / "grid.py").write_text(GRID)
    done = launch("check", "rl/ppo", "--env", "grid:Grid-v0", "--only", "environments", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.shown


def test_a_signal_inside_an_environment_is_not_its_error():
    with pytest.raises(Interrupted, match="SIGTERM"), environments.blamed("Grid-v0"):
        raise Interrupted("SIGTERM: not at a step boundary")
    with pytest.raises(Stop, match="the environment 'Grid-v0' raised ValueError"), environments.blamed("Grid-v0"):
        raise ValueError("no licence")


# ------------------------------------------------------------------------------------------------------ runs that are lost
def test_a_run_that_is_lost_beyond_doubt_is_told_from_one_that_dips():
    lost = lambda rows, **more: monitors.lost(rows, FLOOR, CEILING, actions=2, **more)  # noqa: E731
    assert not lost(history())
    dipped = history(**{"return": lambda p: FLOOR + (400 if p < 0.9 else 30)})  # two of ten at the end
    assert "likely cause" in lost(dipped)
    assert not lost(dipped[:-1])  # once may be a dip
    assert "or more of it is lost" in lost(dipped[:-1], over=True)  # but not at the end
    assert not lost(history(**{"return": lambda p: FLOOR + 400 - 250 * (p > 0.5)}))
    assert "KL" in lost(history(approx_kl=lambda p: 3.8, **{"return": lambda p: FLOOR + 60 * (p < 0.8)}))
    assert not lost(history(approx_kl=lambda p: 3.8))  # it rises all the same
    assert "always takes the same action" in lost(history(entropy=lambda p: 0.0, **{"return": lambda p: FLOOR - 10}))
    assert not lost(history(entropy=lambda p: 0.0, **{"return": lambda p: CEILING}))


# ------------------------------------------------------------------------------------------------------------- devices
def test_gates_multiply_in_full_precision():
    kinds = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [k.allow_tf32 for k in kinds]
    with full_precision():
        assert [k.allow_tf32 for k in kinds] == [False, False]
    assert [k.allow_tf32 for k in kinds] == before


GATES = ("formula", "targets", "probe-constant", "whitening", "entries", "returns", "environments")


def on_the_stand_in(*code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *code], cwd=ROOT, capture_output=True, text=True)


def test_gates_of_ppo_pass_on_a_device_that_is_not_the_host():
    """A stand-in (tests/helpers/stand_in.py says what it cannot see): a host tensor that meets one of the device is an error there."""
    done = on_the_stand_in("-m", "tests.helpers.stand_in", "rl/ppo", f"--only={','.join(GATES)}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {f"ppo {gate}": "pass" for gate in GATES}


def test_the_stand_in_sees_a_host_tensor():
    code = "import torch; from tests.helpers.stand_in import *\nwith stand_in(): torch.ones(3, device=DEVICE) + torch.ones(3)"
    done = on_the_stand_in("-c", code)
    assert "Expected all tensors to be on the same device" in done.stderr


# -------------------------------------------------------------------------------------------------- causes that numbers support
ADVANTAGE = '    return rollout | {"advantage": advantage, "return": advantage + value, "value": value}\n'
OBSERVED = "        self.observations.update(observation[:, : self.memory.n_obs])\n"
TARGET = "returns(cfg, policy, target, rows) / policy.returns.rms\n"
EXCHANGED = 'rollout["terminated"], done, cfg.gamma, cfg.gae_lambda)'
STORED = "        replay.add(whole, step.index)\n"


@pytest.mark.parametrize(
    ("recipe", "old", "new", "only", "cause"),
    [
        ("rl/ppo", ADVANTAGE, "    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)\n" + ADVANTAGE, "targets",
         "returns are made of advantages that were normalised before"),
        ("rl/ppo", OBSERVED, "        self.observations.count.zero_()\n        self.observations.mean.zero_()\n" + OBSERVED, "returns",
         "running statistics start anew with each rollout"),
        ("rl/ppo", EXCHANGED, EXCHANGED.replace("cfg.gamma, cfg.gae_lambda", "cfg.gae_lambda, cfg.gamma"), "targets",
         "gamma and lambda are exchanged: the discount is 0.95, lambda 0.997"),
        ("rl/dqn", TARGET, TARGET.replace("returns(", "(returns(").replace("rms\n", "rms).clamp(-1, 1)\n"), "returns",
         "the targets are clipped"),
        ("rl/dqn", STORED, '        whole["next_observation"] = whole["observation"].roll(-1, 0)\n' + STORED, "returns",
         "`next_observation` in the replay buffer is not what the environment returned"),
    ],
)  # fmt: skip
def test_a_cause_that_numbers_support_comes_first(recipe, old, new, only, cause, launch, fork):
    """The causes were "bootstrapping crosses the end of an episode", none, and twice "`double` or `n_step` is not applied"."""
    fork((old, new), recipe=recipe)
    done = launch("check", "mine.py", "--only", only)
    assert done.returncode == 3, done.shown
    assert failed(done)[only]["remedy"].startswith(cause), done.shown


def test_importance_weights_of_the_wrong_sign_are_stopped(launch, fork):
    """They passed every gate: the weights of a batch were compared with nothing."""
    fork(("likelier ** -(cfg", "likelier ** (cfg"), recipe="rl/dqn")
    done = launch("check", "mine.py", "--prioritized-replay-alpha", "0.6", "--only", "returns")
    assert done.returncode == 3, done.shown
    assert failed(done)["returns"]["remedy"].startswith("the exponent of the importance weights has the wrong sign"), (
        done.shown
    )


def test_importance_weights_may_fall_be_clipped_or_be_left_out():
    """Only weights that rise with the probability of the draw are a fault."""
    likely = torch.rand(128, generator=torch.Generator().manual_seed(0)) + 0.1
    healthy = (likely**-0.4, likely**-1, (likely**-1).clamp_max(2), torch.ones(128), torch.rand(128))
    for weight in healthy:
        found = SimpleNamespace(probability=likely, batch={"weight": weight / weight.max()})
        assert objective.misweighted(found) == ""
    for found in (
        SimpleNamespace(probability=p, batch={"weight": likely}) for p in (None, torch.ones(128), likely[:64])
    ):
        assert objective.misweighted(found) == ""
    assert "rank correlation +1.00" in objective.misweighted(
        SimpleNamespace(probability=likely, batch={"weight": likely**0.4})
    )


def test_statistics_that_forget_slowly_are_quiet(launch, fork):
    """A running average of each rollout's mean and variance, and statistics of the first rollout alone, are no fault."""
    for update in (
        "        if self.observations.count < 100:\n    " + OBSERVED,
        (
            "        rows = observation[:, : self.memory.n_obs]\n"
            "        self.observations.mean.lerp_(rows.mean(0), 0.3)\n"
            "        self.observations.std.lerp_(rows.std(0), 0.3)\n"
        ),
    ):
        fork((OBSERVED, update), recipe="rl/ppo")
        done = launch("check", "mine.py", "--only", "returns")
        assert done.returncode == 0, done.shown
