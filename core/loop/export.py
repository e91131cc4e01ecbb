"""Writes a run's export: weights, their config, and a program that runs without this project."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def save_export(folder: Path, net: nn.Module, config: dict[str, Any], example: Tensor, *, weights: nn.Module | None = None,
                any_size: tuple[int, ...] = ()) -> None:  # fmt: skip
    """Write model.safetensors, config.json and model.pt2. `weights`: the submodule to save, if the loading library
    knows only a part of `net`. `any_size`: axes of the input whose size may differ from the example's."""
    save_file((net if weights is None else weights).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    export_program(net, example, folder / "model.pt2", any_size)


def export_program(net: nn.Module, example: Tensor, path: Path, any_size: tuple[int, ...] = ()) -> None:
    """Write the net in eval mode as a torch.export program for CPU, for any batch size with inputs like `example` (B,
    ...). Of the axes `any_size` it takes every size that the net can compute."""
    batch = {0: torch.export.Dim("batch", min=1), **dict.fromkeys(any_size, torch.export.Dim.AUTO)}
    exported = torch.export.export(copy.deepcopy(net).eval().cpu(), (example.cpu(),), dynamic_shapes=(batch,))
    torch.export.save(exported, path)
