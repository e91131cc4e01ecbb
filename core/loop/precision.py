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
    if cfg.train.precision != "launcher":
        return cfg.train.precision
    return {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
