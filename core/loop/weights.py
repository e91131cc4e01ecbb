"""Weights as safetensors: tied tensors once, loaded strictly, hashed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from trainworthy.core.base.dtensor import is_sharded, like
from trainworthy.core.base.errors import UserError

if TYPE_CHECKING:
    from trainworthy.core.loop.run import Run
    from trainworthy.core.recipe.stage import Stage

UNSTEADY = re.compile(r"'_name_or_path': '[^']*'| at 0x[0-9a-f]+")
"""Parts of a model's text that differ between equal models: the folder that it was loaded from, addresses in memory."""


def weights(
    module: nn.Module, *, without: Collection[str] = (), sharded: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (tensors by name, aliases). Tied parameters occur once; `aliases` maps their other names. In a `sharded` module they are
    found by identity, because memory addresses differ between ranks."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in module.state_dict(keep_vars=sharded).items():
        if name in without:
            continue
        address = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() and not sharded else name
        key = id(tensor) if sharded else address
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
    texts = [repr(module)]
    for name, part in module.named_modules():
        if (config := getattr(part, "config", None)) is not None:
            texts.append(f"{name} {config.to_dict() if hasattr(config, 'to_dict') else config}")
    found = hashlib.blake2b(UNSTEADY.sub("", "\n".join(texts)).encode(), digest_size=16)
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
    metadata = {"format": "pt", "aliases": json.dumps(aliases)}
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata=metadata)


def stream_weights(path: Path | None, tensors: dict[str, Tensor], aliases: dict[str, str]) -> OSError | None:
    """As `save_weights`, of sharded tensors: one after the other is gathered, so that no process holds all. Every rank calls it;
    those without a path write nothing. Return what went wrong."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "aliases": json.dumps(aliases)}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)  # as safetensors aligns its data
    file, problem = None, None
    try:
        file = open(path, "wb") if path else None  # noqa: SIM115
    except OSError as error:
        problem = error

    def put(data: Any) -> None:
        nonlocal problem
        try:
            if file and not problem:
                file.write(data)
        except OSError as error:  # the other ranks wait for the next tensor
            problem = error

    put(len(words).to_bytes(8, "little") + words)
    for tensor in tensors.values():
        whole: Any = tensor
        whole = whole.full_tensor() if is_sharded(tensor) else whole
        if file and not problem:
            put(whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    try:
        if file:
            file.close()
    except OSError as error:
        problem = problem or error
    return problem


KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of types in safetensors files."""


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


def frozen_digest(run: Run, stage: Stage) -> str:
    """Return the hash of the weights that a checkpoint leaves out. It is computed once, since they do not change."""
    if run.frozen_hash is None:
        frozen = run.mode.frozen(stage)
        run.frozen_hash = digest(frozen) if frozen else ""
    return run.frozen_hash
