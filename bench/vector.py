"""CartPole-v1 in one array beside the same as ordinary copies: steps a CPU second, through the recipes' own Environments.

    python bench/vector.py

Both ways in turn, three times, the best of each; every step is compared, bit for bit.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from trainworthy.recipes.rl.control.data import arrays
from trainworthy.recipes.rl.control.data.environments import Environments
from trainworthy.recipes.rl.control.evaluation import episodes

ENV = "CartPole-v1"


def at_random(observation: Tensor) -> Tensor:
    """Falls after 22 steps: much of the time goes into beginnings."""
    return torch.randint(2, (len(observation),))


def upright(observation: Tensor) -> Tensor:
    """Stands until the time limit, most of the time."""
    return (observation[:, 2] + observation[:, 3] + 0.1 * observation[:, 1] > 0).long()


def timed(n: int, steps: int, act: Callable[[Tensor], Tensor]) -> tuple[float, Tensor]:
    """(steps a second of CPU time, all observations)."""
    torch.manual_seed(0)
    envs, seen = Environments(ENV, n, seed=0), []
    start = time.process_time()
    for _ in range(steps):
        seen.append(envs.step(act(envs.observation))["next_observation"])
    return n * steps / (time.process_time() - start), torch.stack(seen)


def main() -> None:
    """A line for each number of copies and each way to act, and one for an evaluation."""
    known = arrays.known
    ways = {"ordinary": lambda name: False, "array": known}
    print(f"{ENV}: steps per second of CPU time        ordinary     array")
    for act in (at_random, upright):
        for n in (8, 16, 64):
            best, seen = dict.fromkeys(ways, 0.0), {}
            for _ in range(3):
                for way, asked in ways.items():
                    arrays.known = asked
                    rate, seen[way] = timed(n, 8000 // n, act)
                    best[way] = max(best[way], rate)
            assert torch.equal(*seen.values())
            print(f"{n:3} side by side, {act.__name__:9} {best['ordinary']:26,.0f} {best['array']:9,.0f}"
                  f"   x{best['array'] / best['ordinary']:.1f}")  # fmt: skip
    spent = {}
    for way, asked in ways.items():
        arrays.known = asked
        start = time.process_time()
        episodes.play(ENV, torch.arange(100), upright)
        spent[way] = time.process_time() - start
    print(f"an evaluation of 100 episodes     {spent['ordinary']:17.2f} s {spent['array']:7.2f} s"
          f"   x{spent['ordinary'] / spent['array']:.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
