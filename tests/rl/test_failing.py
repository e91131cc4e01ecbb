"""Environments that fail, by the real command: what raises, something that is not a number, what is not installed, what no seed decides."""

from collections.abc import Callable
from pathlib import Path

import pytest
from trainworthy.core.loop import checkpoint_survey

from tests.conftest import ROOT, Done, run_module
from tests.helpers.commands import assert_same_run

ENV = {"PYTHONPATH": str(ROOT)}
SHORT = (
    "--train.epochs",
    "4",
    "--train.eval-every",
    "4",
    "--eval-episodes",
    "3",
    "--run.save-every",
    "1",
    "--run.no-tensorboard",
)
OFF = "--gates.no-enabled"
CARTPOLE, PENDULUM = "tests.helpers.failing:failing/CartPole-v0", "tests.helpers.failing:failing/Pendulum-v0"
SETTINGS = {
    "rl/ppo": ("--env", CARTPOLE, "--num-steps", "32", "--train.batch-size", "64"),
    "rl/dqn": ("--env", CARTPOLE, "--learning-starts", "128"),
    "rl/sac": ("--env", PENDULUM, "--learning-starts", "128"),
}
HEALTHY_STEPS = {"rl/ppo": "1300", "rl/dqn": "300", "rl/sac": "780"}
"""Some episodes of random actions, the first unit, and half of the second or third."""
WORDS = {
    "raises": ("raised RuntimeError: the motor is off", "failing.py:"),
    "shape": ("raised ValueError",),
    "observation": ("gave a non-finite observation", "steps into the episode with seed"),
    "reward": ("gave a non-finite reward", "steps into the episode with seed"),
}
QUICK = (("rl/ppo", "reward"), ("rl/dqn", "raises"), ("rl/sac", "observation"))


def cases() -> list:
    """Every recipe with every way to fail; three of them in `make test`."""
    every = [(recipe, how) for recipe in SETTINGS for how in WORDS]
    return [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.verify, id="-".join(c)) for c in every]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of the recipe whose environment never failed."""
    made: dict[str, Done] = {}

    def of(recipe: str) -> Path:
        if recipe not in made:
            made[recipe] = run_module(
                "run", recipe, *SHORT, OFF, *SETTINGS[recipe], cwd=tmp_path_factory.mktemp("straight"), **ENV
            )
            assert made[recipe].returncode == 0, made[recipe].shown
        return made[recipe].folder()

    return of


@pytest.mark.parametrize(("recipe", "how"), cases())
def test_a_run_whose_environment_fails_goes_on_once_it_is_mended(recipe: str, how: str, launch, straight):
    """In the middle of a rollout: told with its name, exit 4, the unit before saved; then the run ends as if nothing had been."""
    done = launch("run", recipe, *SHORT, OFF, *SETTINGS[recipe], FAILS=how, HEALTHY_STEPS=HEALTHY_STEPS[recipe], **ENV)
    assert done.returncode == 4, done.shown
    assert "Traceback" not in done.stderr, done.stderr
    words = (*WORDS[how], f"'{SETTINGS[recipe][1]}'", "trainworthy resume")
    assert not [w for w in words if w not in done.stderr], done.stderr
    folder = done.folder()
    (latest,) = folder.glob("checkpoints/*/latest")
    saved = latest.resolve().name
    assert checkpoint_survey.verify(latest.resolve()) == ""
    assert saved in ("step-1", "step-2")
    assert not (folder / "summary.json").exists()
    again = launch("resume", str(folder), **ENV)
    assert again.returncode == 0, again.shown
    assert f"resumed from {saved}" in again.stdout, again.shown
    assert_same_run(folder, straight(recipe))


def test_a_signal_while_an_environment_steps_is_not_its_error(launch):
    asked = ("check", "rl/ppo", *SETTINGS["rl/ppo"], "--only", "environments,resume")
    done = launch(*asked, FAILS="signal", HEALTHY_STEPS="0", **ENV)
    assert done.returncode == 143, done.shown
    assert "interrupted: SIGTERM\n" in done.stderr
    assert "raised" not in done.stderr


@pytest.mark.parametrize(
    ("recipe", "name", "package", "extra"),
    [("rl/ppo", "LunarLander-v3", "Box2D", "box2d"),
     pytest.param("rl/dqn", "LunarLander-v3", "Box2D", "box2d", marks=pytest.mark.verify),
     pytest.param("rl/sac", "HalfCheetah-v5", "mujoco", "mujoco", marks=pytest.mark.verify)],
)  # fmt: skip
def test_an_environment_whose_extra_is_missing_names_it(
    recipe: str, name: str, package: str, extra: str, launch, tmp_path: Path
):
    """Also where the extra is installed: a module of that name before it says that it is not."""
    (tmp_path / f"{package}.py").write_text(
        f'raise ModuleNotFoundError("No module named {package}", name="{package}")\n'
    )
    done = launch("run", recipe, "--env", name, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 2, done.shown
    words = f"'{name}'", "not installed", f"gymnasium[{extra}]"
    assert not [w for w in words if w not in done.stderr], done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "recipe", ["rl/ppo", *(pytest.param(r, marks=pytest.mark.verify) for r in ("rl/dqn", "rl/sac"))]
)
def test_an_environment_with_randomness_of_its_own_is_told_once(recipe: str, launch):
    """A resume cannot be exact there: said before any training, in one verdict; who accepts it waives it, with a reason."""
    asked = ("check", recipe, *SETTINGS[recipe], "--only", "evaluation,accumulation,resume,environments")
    env = {**ENV, "FAILS": "wind", "HEALTHY_STEPS": "0"}
    done = launch(*asked, **env)
    assert done.returncode == 3, done.shown
    verdicts = {v["id"]: v["verdict"] for v in done.verdicts()}
    assert verdicts == {"evaluation": "skip", "accumulation": "skip", "resume": "skip", "environments": "fail"}, (
        done.shown
    )
    assert "observations differ by up to" in done.shown
    assert done.shown.count("a generator that reset(seed=...) does not seed") == 1, done.shown
    waived = launch(*asked, "--gates.waive", "environments", "--gates.because", "it is the weather", **env)
    assert waived.returncode == 0, waived.shown
    (verdict,) = [v for v in waived.verdicts() if v["id"] == "environments"]
    assert (verdict["verdict"], verdict["reason"]) == ("waived", "it is the weather")
