"""Checks before the gates whether a stage fits into the memory of its device: weights, gradients and optimiser state alone.

`trainworthy plan` adds activations and evaluation.
"""

from collections.abc import Iterable

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor
from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.recipe.loading import Recipe
from trainworthy.core.recipe.stage import Stage

MOMENTS = {"AdamW": 2, "Adam": 2, "AdamW8bit": 0.5, "Muon": 1}
"""Copies of the trained weights that an optimiser keeps; for other optimisers the number is unknown and none is counted."""


def at_least(stage: Stage) -> int:
    """Return the bytes of weights, gradients and the optimisers' moments: a lower bound of the memory that training needs."""
    held = _size([*stage.model.parameters(), *(p for m in stage.frozen_modules.values() for p in m.parameters())])
    held += 0 if stage.ema_model is None else _size(stage.ema_model.parameters())
    for o in stage.optimizers.values():
        held += int((1 + MOMENTS.get(type(o).__name__, 0)) * _size(p for g in o.param_groups for p in g["params"]))
    return held


def _size(tensors: Iterable[Tensor]) -> int:
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def memory(device: torch.device) -> int | None:
    """Return the bytes of a device; of a CPU the machine's, with its swap space; None: unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return psutil.virtual_memory().total + psutil.swap_memory().total if device.type == "cpu" else None


def check(recipe: Recipe, cfg: config.Config, accelerator: Accelerator, built: Iterable[tuple[str, Stage]]) -> None:
    """Raise UserError if a stage needs more than its device has, whatever its activations."""
    total = memory(accelerator.device)
    if total is None or not cfg.run.check_memory:
        return
    for name, stage in built:
        least = at_least(stage)
        if least > total:
            raise UserError(f"{name} cannot fit into the memory of {accelerator.device}", needed=f"at most {total / 1e9:.1f} GB",
                            got=f"{least / 1e9:.1f} GB for weights, gradients and the optimiser's state, without any activation",
                            next=f"trainworthy plan {recipe.target} --memory {total / 1e9:.0f} names settings that need less; "
                            + ("--preset small fits 24 GB; " if hasattr(recipe.module, "small") else "")
                            + "--run.no-check-memory starts anyway")  # fmt: skip


def cpu_warning(recipe: Recipe, cfg: config.Config, preset: str, accelerator: Accelerator) -> str:
    """Return a warning if a preset that was made for an accelerator starts on a CPU; empty if not."""
    half = cfg.train.precision in ("bf16", "fp16")
    if preset == "tiny" or accelerator.device.type != "cpu" or not half:
        return ""
    return (
        f"{preset:<6} is made for an accelerator ({cfg.train.precision}), and this process has none: a step may take minutes\n"
        f"       fits here: trainworthy run {recipe.target} (the preset tiny, minutes on a CPU)\n"
        f"       needs: trainworthy plan {recipe.target} --preset {preset} --device H100"
    )


def refuse(recipe: Recipe, cfg: config.Config, preset: str, accelerator: Accelerator) -> None:
    """Raise UserError for a run that `cpu_warning` warned about. Called once weights and data are known to exist."""
    if cfg.run.check_memory and cpu_warning(recipe, cfg, preset, accelerator):
        raise UserError(
            f"the preset {preset} of {recipe.id} is made for an accelerator",
            got=f"a CPU, on which {cfg.train.precision} is slower than fp32 and a step may take minutes",
            needed="an accelerator, or settings for a CPU",
            next=f"trainworthy run {recipe.target} (the preset tiny), or trainworthy plan {recipe.target} --preset {preset} --device H100; "
            "--train.precision fp32 or --run.no-check-memory starts here",
        )
