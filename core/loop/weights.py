"""Weights as safetensors: tied tensors once, loaded strictly, hashed."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from trainworthy.core.base.dtensor import like
from trainworthy.core.base.errors import UserError

UNSTEADY = re.compile(r"'_name_or_path': '[^']*'| at 0x[0-9a-f]+")
"""What differs between two equal models in a text about them: the folder that they were loaded from, addresses in memory."""


def weights(module: nn.Module, *, without: Collection[str] = ()) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (tensors by name, aliases). Tied parameters occur once; `aliases` maps their other names."""
    tensors, aliases, seen = {}, {}, {}
    for name, tensor in module.state_dict().items():
        if name in without:
            continue
        key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        if key in seen:
            aliases[name] = seen[key]
        else:
            seen[key] = name
            tensors[name] = tensor.detach()
    return tensors, aliases


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names and values."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def sketch(module: nn.Module) -> str:
    """Return a hash of a module's structure, of the configs of its parts (transformers, diffusers), and of all bits of its tensors.
    It reads weights at the speed of memory, so that it can tell at every start whether they are those of the last one."""
    said = [repr(module)]
    for name, part in module.named_modules():
        if (config := getattr(part, "config", None)) is not None:
            said.append(f"{name} {config.to_dict() if hasattr(config, 'to_dict') else config}")
    found = hashlib.blake2b(UNSTEADY.sub("", "\n".join(said)).encode(), digest_size=16)
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.numel():
            bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            words = nn.functional.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            some = words[:: max(1, len(words) // 64)]  # torch's hash does not see an exchange of values
            for part in (torch.hash_tensor(words)[None], some):
                found.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save_weights(path: Path, tensors: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Write safetensors with the aliases in the metadata."""
    save_file(
        {k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt", "aliases": json.dumps(aliases)}
    )


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a full state dict from a file of `save_weights`, with aliases expanded."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
    return tensors | {name: tensors[target] for name, target in aliases.items()}


def load_into(module: nn.Module, state: dict[str, Tensor], *, where: str, without: Collection[str] = ()) -> None:
    """Load a full state dict, except the names in `without`; a sharded module takes its parts. A missing or an
    unexpected name raises an error."""
    own = module.state_dict()
    state = {name: like(value, own[name]) if name in own else value for name, value in state.items()}
    missing, unexpected = module.load_state_dict(state, strict=False)
    missing = [name for name in missing if name not in without]
    if missing or unexpected:
        raise UserError(f"the weights in {where} are not those of this model",
                        got=f"{len(unexpected)} unexpected names, e.g. {unexpected[:3]}",
                        needed=f"{len(missing)} missing names, e.g. {missing[:3]}",
                        cause="the recipe's model changed since they were saved")  # fmt: skip
