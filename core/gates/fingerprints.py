"""Numbers that change with a tensor, and the tensors of a stage by name: what gates compare before and after."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from trainworthy.core.base.dtensor import local
from trainworthy.core.loop.checkpoint import Segment
from trainworthy.core.recipe.stage import Stage


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a number () that changes as soon as an optimiser or an EMA changes the tensor. Copies of large tensors
    cost too much memory."""
    flat = tensor.detach().contiguous().view(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64)
    return flat.view(whole).sum(dtype=torch.int64)


def tensors(stage: Stage, kinds: tuple[str, ...] = ("optimizers", "state")) -> dict[str, Tensor]:
    """Return what is trained, and its state, by name; of what is sharded, this process's part."""
    out = {f"model.{n}": local(t) for n, t in stage.model.state_dict().items()}
    if stage.ema_model is not None:
        out |= {f"average.{n}": local(t) for n, t in stage.ema_model.state_dict().items()}
    for kind in kinds:
        for key, one in getattr(stage, kind).items():
            leaves = [x for x in tree_leaves(_read(one.state_dict())) if isinstance(x, Tensor)]
            out |= {f"{kind}.{key}.{i}": local(t) for i, t in enumerate(leaves)}
    return out


def _read(state: Any) -> Any:
    """Load `state` with all segments read. Consecutive ones are joined: their borders depend only on when they were saved."""
    if not isinstance(state, dict):
        return state
    parts = [one.read() for one in state.values() if isinstance(one, Segment)]
    names = sorted(parts[0]) if parts else ()  # safetensors files order names themselves
    whole = {k: torch.cat([part[k] for part in parts]) for k in names}
    return [{k: _read(v) for k, v in state.items() if not isinstance(v, Segment)}, whole]


def fingerprints(stage: Stage) -> dict[str, Tensor]:
    """Return a number for each of `tensors` that changes with the tensor."""
    return {n: fingerprint(t) for n, t in tensors(stage).items()}
