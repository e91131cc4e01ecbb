"""What several processes of one run must agree on."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator


def kind_of(device: torch.device) -> str:
    """Return what computes: two machines that share a home may have different accelerators, or processors of different capabilities."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def gathered(accelerator: Accelerator, value: Any) -> list[Any]:
    """Every rank's `value`, on every rank."""
    if accelerator.num_processes == 1:
        return [value]
    every = [None] * accelerator.num_processes
    dist.all_gather_object(every, value)
    return every


def agreed(accelerator: Accelerator, value: Any) -> Any:
    """Rank 0's `value` on every rank: what decides whether a collective is entered must be the same everywhere."""
    if accelerator.num_processes == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
