"""Weights and timesteps of a fork's own: what they must do if they equal no declared or published ones."""

import json
import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.diffusion.gates.objective import Objective

JUMP = 0.1  # of the largest weight: how far two neighbouring levels' may be from each other
ROUGH = 0.02  # share of the neighbours that may be further
LEAST = 0.01  # a quarter of the levels must have this share of the largest quarter's weight
DRAW_NOISE = ("DDPM", "Ancestral", "LCM", "TCD", "SDE")
"""In the names of diffusers' samplers that draw noise at every step."""


def astray(aim: Objective, wrong: dict[str, Tensor]) -> str:
    """Return what is wrong with measured weights of no known form, else "": they equal one of the known mistakes `wrong` (B,) up to a factor,
    are no smooth positive function of the timestep, or leave out a quarter of the levels."""
    for name, due in wrong.items():
        factor = (aim.weight / due.clamp_min(0.01)).median()
        if ((aim.weight - factor * due).abs() <= 0.03 * factor * due.clamp_min(0.01)).float().mean() >= 0.95:
            return name
    weight = aim.weight[aim.timestep.argsort()]
    if (weight <= 0).any():
        return f"a loss that leaves out {int((weight <= 0).sum())} of {len(weight)} levels"
    if (weight.diff().abs() > JUMP * weight.max()).float().mean() > ROUGH:
        return "no function of the timestep"
    quarters = torch.stack([part.mean() for part in weight.tensor_split(4)])
    if quarters.min() < LEAST * quarters.max():
        return "a loss that gives a quarter of the levels less than 1% of another's weight"
    return ""


def logit_normal(values: Tensor, drawn: Tensor, timesteps: int) -> tuple[float, str]:
    """Return (the distance of a distribution to the logit-normal one with its own quartiles, its name). `values`: timesteps in order;
    `drawn`: shares that are at most so large."""
    values = values.double()
    at = torch.logit((values + 0.5) / timesteps)
    low, middle, high = (at[int((drawn < share).sum())].item() for share in (0.25, 0.5, 0.75))
    deviation = (high - low) / (2 * torch.special.ndtri(torch.tensor(0.75)).item())
    if not 0.3 <= deviation <= 2 or abs(middle) > 2:
        return math.inf, ""
    ends = torch.logit((values + 1).clamp_max(timesteps - 0.5) / timesteps)
    distance = (drawn - torch.special.ndtr((ends - middle) / deviation)).abs().max().item()
    return distance, f"logit-normal of mean {middle:.2g} and deviation {deviation:.2g} (Esser 2024)"


def drawing_sampler(stage: Stage) -> str:
    """Return the name of the exported sampler if it draws noise at every step, else ""."""
    with tempfile.TemporaryDirectory() as folder:
        stage.export(Path(folder))
        file = Path(folder) / "scheduler" / "scheduler_config.json"
        config = json.loads(file.read_text()) if file.exists() else {}
    name = str(config.get("_class_name", ""))
    drawn = any(part in name for part in DRAW_NOISE) or "sde" in str(config.get("algorithm_type", ""))
    return name * drawn
