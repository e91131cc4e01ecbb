"""The forward's precision: fp32, bf16 or fp16."""

import contextlib

import torch
from accelerate import Accelerator
from trainworthy.core.base import config

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str):
    """The forward's precision."""
    if precision not in AUTOCAST:
        return contextlib.nullcontext()  # entering a disabled autocast costs 3 us
    return torch.autocast(device.type, dtype=AUTOCAST[precision])


def precision(cfg: config.Config, accelerator: Accelerator) -> str:
    """Return fp32, bf16 or fp16: the setting, else the launcher's value."""
    asked = cfg.train.precision
    if asked == "launcher":
        asked = {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    return asked
