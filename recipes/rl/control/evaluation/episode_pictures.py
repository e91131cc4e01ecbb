"""Episodes to look at: frames of one, and traces of observations, actions and rewards."""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from trainworthy.core.base.errors import Stop, UserError
from trainworthy.core.recipe.stage import Tile
from trainworthy.recipes.rl.control.data.environments import first_action, make
from trainworthy.recipes.rl.control.evaluation.episodes import anew, play


def tiles(
    name: str, starts: Tensor, act: Callable[[Tensor], Tensor], *, low: float, high: float, stack: int = 1
) -> list[Tile]:
    """An episode from each of the seeds `starts` (n,) to look at; good is one whose return is nearer `high` than `low`."""
    returned, seen = play(name, starts, act, stack=stack)
    return [Tile(f"{r:g} in {len(o)} steps", trace(o[:, -(o.shape[1] // stack) :]), score=min(max((r - low) / (high - low), 0), 1))
            for r, o in zip(returned.tolist(), seen, strict=True)]  # fmt: skip


def figures(
    name: str, starts: Tensor, act: Callable[[Tensor], Tensor], *, low: float, high: float, stack: int = 1
) -> dict[str, list[Tile]]:
    """For the report: an episode from each of the seeds `starts` (n,) as lines, and the first in pictures where it renders."""
    traces = tiles(name, starts, act, low=low, high=high, stack=stack)
    pictures = strip(name, starts[:1], act, stack=stack)
    found = {"Episodes: each number of the observation over time": traces, "The first of them in pictures": pictures}
    return {title: some for title, some in found.items() if some}


def strip(name: str, start: Tensor, act: Callable[[Tensor], Tensor], *, stack: int = 1, frames: int = 8) -> list[Tile]:
    """`frames` pictures, evenly spaced, of the episode from the seed `start` (1,); none where the environment, or what it needs to
    draw with, cannot."""
    _, [observed] = play(name, start, act, stack=stack)
    last, act = len(observed) - 1, anew(act)
    actions = torch.cat([act(one) for one in observed.split(1)]).numpy()
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # drawn into memory: no display is asked for, none is missed
    chosen, found = {round(i * last / (frames - 1)) for i in range(frames)}, []
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.closing(make(name, stack, render_mode="rgb_array")) as env,
        ):
            env.reset(seed=start.item())
            for t, action in enumerate(actions + first_action(env.action_space)):
                if t in chosen:
                    picture = torch.from_numpy(env.render().copy()).permute(2, 0, 1)[None] / 255  # (1, 3, H, W)
                    size = (80, 80 * picture.shape[3] // picture.shape[2])
                    small = nn.functional.interpolate(picture, size, mode="area")[0]
                    found.append(Tile(f"step {t} of {last}", small))
                env.step(action)
    except UserError:  # an environment whose constructor takes no render_mode
        return []
    except Stop:
        raise
    except Exception:  # drawing fails in as many ways as there are displays: no result hangs on a picture
        return []
    return found


def views(name: str, stack: int) -> tuple[Callable, ...]:
    """`play`, `tiles` and `figures` of one environment."""
    return tuple(functools.partial(f, name, stack=stack) for f in (play, tiles, figures))


def trace(observations: Tensor, height: int = 64, width: int = 250) -> Tensor:
    """A picture (height, width) uint8 of one episode: a line for each number of the observation over time, darkest first."""
    length, n = observations.shape
    # Each in [-1, 1] of its own scale, zero in the middle.
    scaled = observations / observations.abs().amax(0).clamp_min(1e-6)
    x = torch.arange(width)
    t = (x * (length - 1) / (width - 1)).round().long()  # a line, not dots, also where the episode is short
    y = ((1 - scaled) / 2 * (height - 1)).round().long()[t]
    picture = torch.full((height, width), 255, dtype=torch.uint8)
    picture[height // 2] = 225
    for i in reversed(range(min(n, 4))):
        picture[y[:, i], x] = 55 * i
    return picture
