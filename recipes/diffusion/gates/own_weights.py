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
MODES = (-1.0, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 0.8, 1.0, 1.25, 1.29, 1.5, 1.75)
"""Scales of mode sampling, those of the paper among them."""
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


def scaled(weight: Tensor, expected: Tensor) -> tuple[Tensor, str]:
    """Return (expected weights (B,), "" or what they are): measured ones may be the declared ones times a number, which is a rate."""
    factor = (weight / expected.clamp_min(0.01)).median()
    difference = (weight - factor * expected).abs() / (factor * expected).clamp_min(0.01)
    if not 0.1 <= factor <= 10 or (factor - 1).abs() <= 0.02 or difference.max() > 0.02:
        return expected, ""
    return factor * expected, f"the declared ones times {factor:.3g}"


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


def published_levels(values: Tensor, drawn: Tensor, timesteps: int) -> tuple[float, str]:
    """Return (the distance of a flow's noise levels to the nearest published distribution, its name). All but one are symmetric, so none is near a
    logit-normal one of another mean. `values`: timesteps in order; `drawn`: shares that are at most so large."""
    level, even = values.double() / timesteps, torch.linspace(0, 1, 10_001, dtype=torch.float64)
    shares = {"beta of 1.5 and 1 (Black 2024)": level**1.5, "cosmap (Esser 2024)": 1 - 2 / math.pi * (1 / level - 1).atan(),
              "U-shaped of 4 (Lee 2024)": (4 * level - 2).sinh() / 2 / math.sinh(2) + 0.5}  # fmt: skip
    for scale in MODES:
        reached = 1 - even - scale * ((math.pi / 2 * even).cos().square() - 1 + even)
        shares[f"mode sampling of scale {scale:g} (Esser 2024)"] = torch.searchsorted(
            reached.flip(0).contiguous(), level, right=True
        ) / len(even)
    distances = {name: (drawn - share).abs().max().item() for name, share in shares.items()}
    name = min(distances, key=distances.get)
    return distances[name], name


def drawing_sampler(stage: Stage) -> str:
    """Return the name of the exported sampler if it draws noise at every step, else ""."""
    with tempfile.TemporaryDirectory() as folder:
        stage.export(Path(folder))
        file = Path(folder) / "scheduler" / "scheduler_config.json"
        config = json.loads(file.read_text()) if file.exists() else {}
    name = str(config.get("_class_name", ""))
    drawn = any(part in name for part in DRAW_NOISE) or "sde" in str(config.get("algorithm_type", ""))
    return name * drawn
