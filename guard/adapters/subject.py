"""What the gates test if it is not a recipe."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from trainworthy.core.base import config
from trainworthy.core.loop.run import Run
from trainworthy.core.recipe.stage import Stage


@dataclass
class Subject:
    """A script or a library's trainer under test: how its stage is built and trained."""

    cfg: config.Config
    device: torch.device
    make: Callable[[Run], Stage]
    train: Callable[[config.Config, Run, Any], None]
    """(settings, run, stage that `make` built)."""
    skips: dict[str, str]
    """Gate id -> why it does not apply."""
    own_loop: bool
    """Its own loop clips gradients, at a norm that is not declared."""
    objective: str = ""
    """Recognised properties of its loss."""
    see: Callable[[str], dict] | None = None
    """Id of a check of `guard` -> what it found in the subject's own loop."""
    causes: dict[str, str] = field(default_factory=dict)
    """Gate id -> the cause that was measured, should it fail."""
