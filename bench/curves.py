"""Learning curves of the control recipes, as their pages show them: from the figures that bench/results.py kept.

python bench/curves.py        # writes docs/recipes/rl-*.png, for those whose figures there are
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trainworthy.core.recipe.registry import find
from trainworthy.core.report.charts import LIGHT, Chart, render
from trainworthy.core.report.groups import QUARTERS
from trainworthy.core.report.intervals import iqm

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "recipes"


@dataclass(frozen=True)
class Panel:
    """One picture: a recipe in an environment."""

    recipe: str
    env: str
    unit: int
    """Environment steps of a unit of training."""
    aim: float
    """The return to reach."""
    first: int = 0
    """Steps that the first unit has more than the others."""
    episodes: int = 100
    """Of an evaluation."""

    own: bool = False
    """Is it the result that is kept beside the recipe?"""

    @property
    def figures(self) -> Path:
        """What bench/results.py wrote."""
        return find(f"rl/{self.recipe}").results()[-1] if self.own else DOCS / f"{self.name}.json"

    @property
    def name(self) -> str:
        """Of its files."""
        return f"rl-{self.recipe}.{self.env.replace('/', '-')}"


PANELS = (
    Panel("ppo", "CartPole-v1", 16 * 128, 490, own=True),
    Panel("ppo", "Acrobot-v1", 16 * 128, -90),
    Panel("ppo", "LunarLander-v3", 16 * 512, 200),
    Panel("ppo", "hidden/CartPole-v1", 16 * 128, 490),
    Panel("dqn", "CartPole-v1", 8 * 16, 490, first=1000 - 8 * 16, own=True),
    Panel("dqn", "LunarLander-v3", 8 * 16, 200, first=2000 - 8 * 16),
    Panel("sac", "Pendulum-v1", 4 * 16, -200, first=1000 - 4 * 16, own=True),
    Panel("sac", "InvertedPendulum-v5", 4 * 16, 950, first=1000 - 4 * 16, episodes=20),
)


def chart(panel: Panel, kept: dict[str, Any]) -> Chart:
    """Interquartile mean of the seeds, of three or fewer their mean, over the environment's steps; shaded from the
    lowest to the highest seed."""
    curves = np.array([*kept["curves"].values()])  # (seeds, evaluations, 2)
    steps, returns = panel.first + panel.unit * curves[0, :, 0], curves[..., 1]

    def draw(axes: Any, c: dict[str, str]) -> None:
        seeds = len(returns)
        middle = "interquartile mean" if seeds >= QUARTERS else "mean"
        axes.fill_between(
            steps, returns.min(0), returns.max(0), color=c["line"], alpha=0.15, linewidth=0, label="lowest to highest"
        )
        axes.plot(steps, iqm(returns.T), color=c["line"], label=f"{middle} of {seeds} seeds")
        axes.axhline(panel.aim, color=c["second"], linewidth=0.8, linestyle="--", label=f"{panel.aim:g}")
        axes.set_xlabel("steps of the environment", color=c["muted"])
        axes.legend(frameon=False, labelcolor=c["ink"], fontsize=7, loc="lower right")

    return Chart(f"rl-{panel.recipe}", f"rl/{panel.recipe} on {panel.env}: return of {panel.episodes} episodes", draw)


def main() -> None:
    """Every panel whose figures hold curves."""
    for panel in PANELS:
        kept = json.loads(panel.figures.read_text()) if panel.figures.exists() else {}
        if "curves" not in kept:
            print(f"no curves of rl/{panel.recipe} on {panel.env} in {panel.figures.relative_to(ROOT)}")
            continue
        to = DOCS / f"{panel.name}.png"
        to.write_bytes(render(chart(panel, kept), LIGHT, "png"))
        print(to.relative_to(ROOT))


if __name__ == "__main__":
    main()
