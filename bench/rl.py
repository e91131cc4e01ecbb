"""Environment steps per second of PPO, DQN and SAC: the recipes, Stable-Baselines3, and single files after CleanRL.

    python bench/rl.py [--only ppo] [--rounds N] [--json FILE]            speed
    python bench/rl.py --returns --seeds 0 1 2 3 4 [--json FILE]          whole trainings, and what they earn

The settings are those of the recipes' tiny presets (of DQN without double and dueling, which Stable-Baselines3 does not have): as
many environments in this process, the same nets, rates, steps and updates. Each library as it comes: the recipes through `core.Run`
with everything they log, Stable-Baselines3 with its own monitor and no logger, single files with neither. The recipes step CartPole
in one array where the other programs step copies one after another; a table each says what the recipe does with such copies,
too, which is what it does in every other environment.

Speed: each round runs every program once, in shuffled order, and compares it with the recipe OF ITS OWN ROUND. CPU time
(`time.process_time`), one torch thread, from the first steps that learn on; imports, building and evaluation are not in it.
Returns: every program's own policy, acting for the best, on the same 100 episodes.
"""

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from torch import Tensor
from trainworthy.core.base.console import Console
from trainworthy.core.gates.gate import build
from trainworthy.core.monitoring.metrics import MetricsTracker
from trainworthy.core.recipe.loading import versions
from trainworthy.recipes.rl.control.data import arrays, environments
from trainworthy.recipes.rl.control.evaluation import episodes

from trainworthy import core

sys.path.insert(0, str(Path(__file__).resolve().parent))
import plain_rl

Act = Callable[[Tensor], Tensor]
SB3 = importlib.util.find_spec("stable_baselines3") is not None
EPISODES = 100
PLAIN_DQN = {"double": False, "dueling": False}


# ------------------------------------------------------------------------------------------------------------ the settings
@dataclass
class Task:
    """One recipe's settings, and the stretch of its training that is timed."""

    name: str
    units: int
    """Timed, after `warm`."""
    rounds: int
    settings: dict[str, Any]
    warm: int = 3
    ordinary: bool = False
    """Are environments stepped one after another where the recipe would step them in one array?"""

    @property
    def title(self) -> str:
        """What it is called."""
        cfg = self.config(0)
        array = arrays.known(cfg.env) and not self.ordinary
        return f"{self.name} on {cfg.env}, {cfg.num_envs} environments{' of the recipe in one array' * array}"

    @property
    def recipe(self) -> Any:
        return importlib.import_module(f"trainworthy.recipes.rl.{self.name}")

    def config(self, seed: int) -> Any:
        cfg = replace(self.recipe.tiny(), **self.settings)
        return replace(cfg, run=replace(cfg.run, seed=seed))

    @property
    def stretch(self) -> tuple[int, int]:
        """Environment steps at which the clock starts and ends."""
        cfg = self.config(0)
        unit = cfg.num_envs * cfg.num_steps
        start = getattr(cfg, "learning_starts", 0) + self.warm * unit
        return start, start + self.units * unit

    @property
    def total(self) -> int:
        """Environment steps of a whole training, of the recipe's own."""
        cfg = self.config(0)
        unit = cfg.num_envs * cfg.num_steps
        first = max(unit, getattr(cfg, "learning_starts", 0) // cfg.num_envs * cfg.num_envs)
        return first + (round(cfg.train.epochs) - 1) * unit


TASKS = [Task("ppo", 4, 7, {}), Task("ppo", 4, 7, {}, ordinary=True), Task("dqn", 30, 7, PLAIN_DQN),
         Task("dqn", 30, 7, PLAIN_DQN, ordinary=True), Task("sac", 25, 7, {})]  # fmt: skip


class Clock:
    """Told before every stretch how many steps were made: CPU seconds from `start` steps to `end`. True: enough was seen."""

    def __init__(self, start: int, end: float):
        self.start, self.end = start, end
        self.seen: list[tuple[int, float, float]] = []  # (steps, CPU seconds, seconds)

    def __call__(self, steps: int) -> bool:
        if steps >= self.start:
            self.seen.append((steps, time.process_time(), time.monotonic()))
        return steps >= self.end

    def passed(self) -> tuple[int, float, float]:
        """(steps, CPU seconds, seconds) between the first and the last time it was told."""
        (a, cpu_a, wall_a), (b, cpu_b, wall_b) = self.seen[0], self.seen[-1]
        return b - a, cpu_b - cpu_a, wall_b - wall_a


# ------------------------------------------------------------------------------------------------------------ the programs
class Enough(Exception):
    """The clock has seen what it needs."""


class Ticking(Console):
    """What core tells after every unit goes to the clock."""

    def __init__(self, clock: Clock, steps: Callable[[int], int]):
        super().__init__(quiet=True)
        self.clock, self.steps = clock, steps

    def tick(self, done: int, note: Callable[[], str]) -> None:
        if self.clock(self.steps(done)):
            raise Enough


def ours(task: Task, seed: int, clock: Clock) -> Act:
    """The recipe's stage and `train()` on `core.Run`, a row in its files for every unit."""
    cfg, recipe = task.config(seed), task.recipe
    unit = cfg.num_envs * cfg.num_steps
    first = max(unit, getattr(cfg, "learning_starts", 0) // cfg.num_envs * cfg.num_envs)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        if task.ordinary:
            undo.enter_context(mock.patch.object(arrays, "known", return_value=False))
        tracker = MetricsTracker(folder, use_tensorboard=False)
        console = Ticking(clock, lambda done: first + (done - 1) * unit)
        run = core.Run(cfg, Accelerator(cpu=True), tracker=tracker, console=console)
        stage = build(run, lambda run: recipe.STAGES[0](cfg, run))
        stage.evaluate = lambda model, data: {"return": 0.0}  # all programs are evaluated alike, at the end
        with contextlib.suppress(Enough):
            recipe.train(cfg, run, stage)
        run.close()
    model = stage.model.eval()
    return {"ppo": lambda o: model.act(o), "dqn": lambda o: model(o).argmax(-1), "sac": model}[task.name]


def sb3(task: Task, seed: int, clock: Clock) -> Act:
    """Stable-Baselines3 on what its own `make_vec_env` makes."""
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    cfg = task.config(seed)

    class Tell(BaseCallback):
        over = False

        def _on_rollout_start(self) -> None:
            self.over = clock(self.num_timesteps)

        def _on_training_end(self) -> None:
            if not self.over:
                clock(self.num_timesteps)

        def _on_step(self) -> bool:
            return not self.over

    env = make_vec_env(cfg.env, n_envs=cfg.num_envs, seed=seed)
    common = {"learning_rate": lambda left: cfg.optim.lr * left, "batch_size": cfg.train.batch_size, "gamma": cfg.gamma,
              "seed": seed, "device": "cpu"}  # fmt: skip
    off = {"buffer_size": getattr(cfg, "buffer_size", 0), "learning_starts": getattr(cfg, "learning_starts", 0), "train_freq": cfg.num_steps,
           "gradient_steps": getattr(cfg, "gradient_steps", 0)}  # fmt: skip
    if task.name == "ppo":
        model = stable_baselines3.PPO(
            "MlpPolicy", env, n_steps=cfg.num_steps, n_epochs=cfg.update_epochs, gae_lambda=cfg.gae_lambda, clip_range=cfg.clip_range,
            ent_coef=cfg.ent_coef, vf_coef=cfg.vf_coef, max_grad_norm=cfg.optim.clip,
            policy_kwargs={"net_arch": list(cfg.hidden_sizes)}, **common)  # fmt: skip
    elif task.name == "dqn":
        every = (
            cfg.target_update_interval * cfg.num_steps * cfg.num_envs // cfg.gradient_steps
        )  # it counts environment steps, not updates
        model = stable_baselines3.DQN(
            "MlpPolicy", env, target_update_interval=every, exploration_fraction=cfg.exploration_fraction,
            exploration_final_eps=cfg.exploration_final_eps, max_grad_norm=cfg.optim.clip,
            policy_kwargs={"net_arch": list(cfg.hidden_sizes)}, **common, **off)  # fmt: skip
    else:
        model = stable_baselines3.SAC(
            "MlpPolicy", env, tau=cfg.tau, ent_coef=f"auto_{cfg.init_temperature}",
            target_entropy=cfg.target_entropy * env.action_space.shape[0], policy_kwargs={"net_arch": list(cfg.hidden_sizes)},
            **common, **off)  # fmt: skip
    model.learn(task.total, callback=Tell())

    def act(observation: Tensor) -> Tensor:
        chosen = torch.from_numpy(model.predict(observation.numpy(), deterministic=True)[0])
        if task.name == "sac":
            chosen = chosen / float(env.action_space.high[0])  # our environments take [-1, 1]
        return chosen

    return act


def single_file(task: Task, seed: int, clock: Clock) -> Act:
    """A file after CleanRL."""
    return getattr(plain_rl, task.name)(task.config(seed), seed, clock)


PROGRAMS: dict[str, Callable[[Task, int, Clock], Act]] = {
    "ours": ours,
    "Stable-Baselines3": sb3,
    "single file": single_file,
}


# --------------------------------------------------------------------------------------------------------------- measuring
def one(program: Callable, task: Task, seed: int, *, whole: bool = False) -> tuple[Act, tuple[int, float, float]]:
    """(its policy, (steps, CPU seconds, seconds)) of one training, or of the stretch of it that is timed."""
    gc.collect()
    clock = Clock(0, float("inf")) if whole else Clock(*task.stretch)
    act = program(task, seed, clock)
    return act, clock.passed()


def speed(task: Task, programs: dict[str, Callable]) -> list[dict]:
    """One row for each program: environment steps per CPU second, and the recipe's speed over its own in the same round."""
    rng = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        one(program, replace(task, units=2), 0)  # imports, caches
    for r in range(task.rounds):
        for name in rng.sample(list(programs), len(programs)):
            steps, cpu, _ = one(programs[name], task, r)[1]
            found[name].append(steps / cpu)
    rows = []
    for name, rates in found.items():
        ratios = [o / x for o, x in zip(found["ours"], rates, strict=True)]
        rows.append({"program": name, "steps_per_second": round(statistics.median(rates)), "least": round(min(rates)),
                     "most": round(max(rates)), "ours_over_it": round(statistics.median(ratios), 3),
                     "ratio_min": round(min(ratios), 3), "ratio_max": round(max(ratios), 3)})  # fmt: skip
    return rows


@torch.no_grad()
def earned(task: Task, act: Act) -> float:
    """Mean return of the evaluation's episodes."""
    env = task.config(0).env
    returned, _ = episodes.play(env, environments.Episodes(env, EPISODES).starts, act)
    return returned.mean().item()


def returns(task: Task, programs: dict[str, Callable], seeds: list[int]) -> list[dict]:
    """One row for each program and seed, told as it comes: what a whole training earns, and its time."""
    rows = []
    for seed in seeds:
        for name, program in programs.items():
            act, (steps, cpu, wall) = one(program, task, seed, whole=True)
            row = {"program": name, "seed": seed, "return": round(earned(task, act), 1), "steps": steps,
                   "cpu_seconds": round(cpu, 1), "seconds": round(wall, 1)}  # fmt: skip
            told = f"return {row['return']:>8.1f}  {steps:>8,} steps  {cpu:6.1f} CPU-s"
            print(f"  {name:<20}seed {seed}  {told}", flush=True)
            rows.append(row)
    return rows


def show(task: Task, rows: list[dict]) -> None:
    cfg = task.config(0)
    stretch = task.units * cfg.num_envs * cfg.num_steps
    print(f"\n{task.title}; {task.rounds} rounds of {stretch:,} steps")
    print(f"  {'':<20}{'steps/CPU-s':>12}   least - most    ours over it   least - most")
    for r in rows:
        print(f"  {r['program']:<20}{r['steps_per_second']:>12,}{r['least']:>8,} -{r['most']:>6,}{r['ours_over_it']:>14.2f}x"
              f"    {r['ratio_min']:.2f} - {r['ratio_max']:.2f}")  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--only", default="", help="only these recipes, e.g. ppo,dqn")
    parser.add_argument("--programs", default="", help="beside ours, those whose names hold one of these words")
    parser.add_argument("--rounds", type=int, default=0, help="rounds (default 7)")
    parser.add_argument("--returns", action="store_true", help="whole trainings and their returns instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    words = [w.strip().lower() for w in args.programs.split(",") if w.strip()]
    programs = {n: f for n, f in PROGRAMS.items() if n == "ours" or not words or any(w in n.lower() for w in words)}
    if not SB3 and programs.pop("Stable-Baselines3", None):
        print("stable_baselines3 is not installed: no rows for it  (pip install stable-baselines3)")
    start, tables = time.monotonic(), []
    for task in TASKS:
        if (args.only and task.name not in args.only.split(",")) or (args.returns and task.ordinary):
            continue  # bit for bit the same training
        task.rounds = args.rounds or task.rounds
        if args.returns:
            print(f"\n{task.name} on {task.config(0).env}: whole trainings")
            rows = returns(task, programs, args.seeds)
        else:
            rows = speed(task, programs)
            show(task, rows)
        tables.append({"task": task.name, "env": task.config(0).env, "ordinary": task.ordinary, "rows": rows})
    print(f"\n{time.monotonic() - start:.0f} s")
    if args.json:
        others = {"stable_baselines3": version("stable_baselines3")} if SB3 else {}
        figures = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "threads": 1, "versions": versions() | others,
                   "what": "returns" if args.returns else "environment steps per CPU second", "tables": tables}  # fmt: skip
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
