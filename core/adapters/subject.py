"""What is checked when it is not a recipe."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from trainworthy.core.base import config
from trainworthy.core.loop.run import Run
from trainworthy.core.recipe.stage import Stage


@dataclass
class Subject:
    """What is proved, a script or a library's trainer: how its stage is built and trained."""

    cfg: config.Config
    device: torch.device
    make: Callable[[Run], Stage]
    train: Callable[[config.Config, Run, Stage], None]
    skips: dict[str, str]
    """Gate id -> why it has nothing to judge here."""
    own_loop: bool
    """Gradients are clipped where its own loop clips them: at a norm that nobody told."""
    objective: str = ""
    """What was recognised of its loss."""
