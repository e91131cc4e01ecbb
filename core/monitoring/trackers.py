"""`--track`: writes the same tags also to wandb, mlflow or trackio, through Accelerate's trackers.

Keys and addresses come from the environment, as those tools document; none of them is a setting here.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from accelerate import Accelerator
from trainworthy.core.base import config, masking
from trainworthy.core.base.console import Console
from trainworthy.core.base.errors import UserError

KNOWN = ("wandb", "mlflow", "trackio")


def names(cfg: config.Config) -> list[str]:
    """Return the requested trackers. An unknown or missing one raises before anything is trained."""
    requested = list(dict.fromkeys(cfg.track.replace(",", " ").split()))
    for name in requested:
        if name not in KNOWN:
            raise config.unknown(f"tracker '{name}'", name, KNOWN)
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--track {name}: not installed", next=f"pip install {name}")
    return requested


@contextlib.contextmanager
def tracked(accelerator: Accelerator, cfg: config.Config, folder: Path, *, project: str) -> Iterator[None]:
    """Open a run in every requested tracker, named after the run folder, and end it however the run ends."""
    requested = names(cfg)
    if not requested:
        yield
        return
    key = {"wandb": "name", "mlflow": "run_name", "trackio": "name"}
    group = folder.absolute().parent.name  # the group of seeds, or the recipe
    name = folder.name if group == project else f"{group}-{folder.name}"
    settings = config.flat(masking.settings(config.to_dict(cfg)))  # trackers take no nested values, and no lists
    settings = {k: v if isinstance(v, (str, int, float, bool)) else str(v) for k, v in settings.items()}
    try:
        accelerator.init_trackers(project, config=settings, init_kwargs={n: {key[n]: name} for n in requested})
    except Exception as error:  # an external service: no key, no network, a wrong address
        raise UserError(f"--track {cfg.track}: a tracker cannot start", got=f"{type(error).__name__}: {error}",
                        next="set it up as its own pages say (wandb login, MLFLOW_TRACKING_URI), or leave --track out"
                        ) from None  # fmt: skip
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # our own files are complete in any case
            accelerator.end_training()


def mirror(accelerator: Accelerator, console: Console) -> Callable[[dict, int], None] | None:
    """Return (row, step) -> every tracker; None if there is none. A failing service is reported and dropped; training
    continues."""
    if not accelerator.trackers:
        return None
    failed = []

    def log(row: dict, step: int) -> None:
        if failed:
            return
        try:
            accelerator.log(row, step=step)
        except Exception as error:  # an external service must not end the run
            failed.append(error)
            console.say(f"  --track stopped at step {step} ({type(error).__name__}: {error}); our own files continue")

    return log
