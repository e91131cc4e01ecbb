"""Exchange of values between the processes of one run."""

import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator


def kind_of(device: torch.device) -> str:
    """Return the name of the accelerator or the instruction set of the CPU. Remembered verdicts are valid for one kind of device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def launcher_words(accelerator: Accelerator) -> list[str]:
    """Return the option with which a command starts as many processes again: `-n 2`. With several machines this depends on the machine."""
    count = accelerator.num_processes
    return ["-n", str(count)] if count > 1 and os.environ.get("LOCAL_WORLD_SIZE", str(count)) == str(count) else []


def gathered(accelerator: Accelerator, value: Any) -> list[Any]:
    """Return every rank's `value` on every rank."""
    if accelerator.num_processes == 1:
        return [value]
    every = [None] * accelerator.num_processes
    dist.all_gather_object(every, value)
    return every


def agreed(accelerator: Accelerator, value: Any) -> Any:
    """Return rank 0's `value` on every rank. Decisions about entering a collective must be the same everywhere."""
    if accelerator.num_processes == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
