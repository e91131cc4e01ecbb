"""Assets that another of our recipes exports. The real command makes them, behind the recipe's own gates."""

import os
import subprocess
import sys
from pathlib import Path

from trainworthy.core.base.errors import DONE, UserError

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_",
            "TRAINWORTHY_EXIT")  # fmt: skip


def made(recipe: str, settings: list[str], out: str, *, what: str) -> Path:
    """Run `trainworthy run RECIPE` in its own process, whichever launcher started this one; return its run folder,
    under `out`. Errors name `what` it is for."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER)}
    command = [sys.executable, "-m", "trainworthy.launch", "run", recipe, *settings, "--run.out", out]
    done = subprocess.run(command, env={**env, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True)
    if done.returncode != DONE:
        raise UserError(
            f"{what} could not be trained", got=done.stderr.strip()[-300:], next=f"trainworthy run {recipe}"
        )
    (export,) = Path(out).glob("*/*/export")
    return export.parent
