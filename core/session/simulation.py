"""Runs a recipe's steps on fake parameters, which have a shape and no values, and counts bytes and floating-point operations."""

import contextlib
import copy
import importlib.util
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import flop_registry
from trainworthy.core.base import planning
from trainworthy.core.base.live_bytes import LiveBytes

LONGEST = 900.0
"""Processor seconds of building a stage and simulating its steps."""
GENERATED = 3
"""Tokens of a generation that are simulated."""
aten = torch.ops.aten
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
           aten._unsafe_index_put.default}  # fmt: skip
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: 0,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 1,
}
"""The CPU's attention, of which torch's table has no formula, and where the queries are among its arguments. Two products forward, four
backward; what a kernel computes again does not count."""


class TooLong(Exception):
    """The simulation takes longer than it may."""


class Simulation(LiveBytes):
    """Counts bytes and floating-point operations of fake tensors, and answers what only values could."""

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self.mode, self.flops, self.largest = mode, 0.0, ((), "", 0)
        self.without_gradients = 0
        """Peak of what is alive besides the gradients of parameters, which fill up while a backward pass frees activations."""
        self._gradients: dict[int, int] = {}  # storages of gradients: bytes
        self._in_gradients = 0
        self.ends = time.process_time() + LONGEST

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if time.process_time() > self.ends:
            raise TooLong("it takes too long")
        if args and isinstance(args[0], FakeTensor):
            if func is aten._local_scalar_dense.default:
                kind = args[0].dtype
                return True if kind is torch.bool else 1.0 if kind.is_floating_point else 1
            if func is aten.nonzero.default:  # at most
                return torch.ones(args[0].shape, dtype=torch.bool).nonzero()
            if func is aten.bincount.default:
                return torch.zeros(max(1, *args[2:], (kwargs or {}).get("minlength", 0)), dtype=torch.int64)
            if func is aten.masked_select.default:  # at most
                return args[0].reshape(-1).clone()
            if func is aten._unique2.default:  # at most
                whole = args[0].reshape(-1).clone()
                return whole, torch.zeros(whole.shape, dtype=torch.int64), torch.ones(whole.shape, dtype=torch.int64)
        if func in INDEXED:
            args = (args[0], self._positions(args[1]), *args[2:])
        if (own := written(func, args, kwargs or {})) is None:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        else:  # of a real tensor that fake ones are written into, torch would return a fake copy, and keep it
            func(*args, **(kwargs or {}))
            out = own
            self.count(own)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        elif func.overloadpacket in ATTENTION:
            q, k = args[ATTENTION[func.overloadpacket] :][:2]  # (B, heads, queries, width), (B, heads, keys, width)
            products = 2 if func.overloadpacket is aten._scaled_dot_product_flash_attention_for_cpu else 4
            self.flops += products * 2 * q.numel() * k.shape[2]
        return out

    def count(self, tensor: Tensor) -> None:
        super().count(tensor)
        self.without_gradients = max(self.without_gradients, self.live - self._in_gradients)
        size = tensor.numel() * tensor.element_size()
        if size > self.largest[2]:
            self.largest = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), size)

    def gradient(self, parameter: Tensor) -> None:
        """Note that a gradient was added to this parameter's: the hook after each accumulation."""
        assert parameter.grad is not None
        key = id(parameter.grad.untyped_storage())
        if key in self.sizes and key not in self._gradients:
            self._gradients[key] = self.sizes[key][1]
            self._in_gradients += self.sizes[key][1]

    def restart(self) -> int:
        self.without_gradients = 0
        return super().restart()

    def _freed(self, key: int, ref: weakref.ref) -> None:
        super()._freed(key, ref)
        if key not in self.sizes:
            self._in_gradients -= self._gradients.pop(key, 0)

    def _positions(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """Return indices without masks: of a real mask its positions, of a fake one all of them (at most)."""
        found: list[Tensor | None] = []
        for one in indices:
            if one is None or one.dtype not in (torch.bool, torch.uint8):
                found.append(one)
                continue
            real = torch.ones(one.shape, dtype=torch.bool) if isinstance(one, FakeTensor) else one
            found += real.nonzero(as_tuple=True)
        return found


def written(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the floating-point tensor that the operation writes into and returns (in place, or by `out=`); None: it makes a new one."""
    returns = func._schema.returns
    if len(returns) != 1 or (alias := returns[0].alias_info) is None or not alias.is_write:
        return None
    for i, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.before_set == alias.before_set:
            found = kwargs.get(one.name) if one.kwarg_only or i >= len(args) else args[i]
            return found if isinstance(found, Tensor) and found.is_floating_point() else None
    return None


@contextlib.contextmanager
def simulated() -> Iterator[Simulation]:
    """Inside, every parameter that a module gets is fake, weights are not read, and operations are counted."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    own_register, own_numpy = nn.Module.register_parameter, Tensor.numpy

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        own_register(module, name, parameter)
        if parameter is not None and not isinstance(parameter.data, FakeTensor):
            made = nn.Parameter(fake(parameter.detach()), requires_grad=parameter.requires_grad)
            module._parameters[name] = made

    def apply(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        """Convert as torch does; it exchanges a fake parameter with its conversion, which fails while a weak reference
        to it is alive."""
        known: dict[int, nn.Parameter] = {}
        for one in module.modules() if recurse else [module]:
            for name, p in one._parameters.items():
                if p is not None:
                    if id(p) not in known:
                        new = fn(p.detach())
                        same = new.dtype == p.dtype and new.device == p.device  # a copy on `meta` only asks for shapes
                        known[id(p)] = p if same else nn.Parameter(new, p.requires_grad)
                    one._parameters[name] = known[id(p)]
            for name, buffer in one._buffers.items():
                if buffer is not None:
                    one._buffers[name] = fn(buffer)
        return module

    def numpy(tensor: Tensor, **how: Any) -> np.ndarray:
        if not isinstance(tensor, FakeTensor):
            return own_numpy(tensor, **how)
        return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    patches = (
        mock.patch.object(nn.Module, "register_parameter", register),
        mock.patch.object(nn.Module, "_apply", apply),
        mock.patch.object(Tensor, "numpy", numpy),
        mock.patch.object(planning, "active", True),
        *_unread(),
    )

    @contextlib.contextmanager
    def paused() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for patch in (simulation, *reversed(patches)):
                patch.__exit__(None, None, None)
                stack.callback(patch.__enter__)
            stack.enter_context(mock.patch.object(planning, "paused", contextlib.nullcontext))  # one may build another
            yield

    with contextlib.ExitStack() as stack:
        for patch in (*patches, mock.patch.object(planning, "paused", paused)):
            stack.enter_context(patch)
        simulation = stack.enter_context(Simulation(mode))
        yield simulation


def _unread() -> list[Any]:
    """Return the patches under which the libraries build a model from its configuration and read no weights."""
    patches = []
    if importlib.util.find_spec("transformers"):
        from transformers import PreTrainedModel

        patches.append(mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(_from_config)))
        patches += _generating()
    if "diffusers" in sys.modules:  # the recipe has imported it
        from diffusers import ModelMixin

        patches.append(mock.patch.object(ModelMixin, "from_pretrained", classmethod(_from_diffusers_config)))
    if importlib.util.find_spec("torchvision"):
        from torchvision import models

        def get_state_dict(weights: Any, *_: Any, **__: Any) -> dict[str, Tensor]:
            name = next(n for n in models.list_models() if models.get_model_weights(n) is type(weights))
            return models.get_model(name, weights=None).state_dict()

        patches.append(mock.patch.object(models.WeightsEnum, "get_state_dict", get_state_dict))
    return patches


def _from_config(cls: type, name: Any, *_: Any, config: Any = None, dtype: Any = None, **how: Any) -> Any:
    """Return what transformers' `from_pretrained` does, with fake weights."""
    if how.get("quantization_config") is not None:
        raise NotImplementedError("weights in 4 or 8 bits")
    config = config or cls.config_class.from_pretrained(name)
    dtype = (config.dtype or torch.float32) if dtype in (None, "auto") else dtype
    model = cls._from_config(config, dtype=dtype).eval()
    model.config.name_or_path = model.name_or_path = str(name)
    nothing = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
    return (model, nothing) if how.get("output_loading_info") else model


def _from_diffusers_config(cls: type, name: Any, *_: Any, torch_dtype: Any = None, **how: Any) -> Any:
    """Return what diffusers' `from_pretrained` does, with fake weights."""
    where = {k: how[k] for k in ("subfolder", "cache_dir", "revision", "local_files_only", "token") if k in how}
    model = cls.from_config(cls.load_config(name, **where))
    return (model.to(torch_dtype) if isinstance(torch_dtype, torch.dtype) else model).eval()


def _generating() -> list[Any]:
    """Return the patches under which every generation has its maximum length. Only its first `GENERATED` tokens are simulated: each
    further step needs the same memory plus one key and value."""
    from transformers import GenerationMixin
    from transformers.generation import MaxLengthCriteria, StoppingCriteriaList

    own = GenerationMixin.generate

    def generate(model: Any, *args: Any, **how: Any) -> Any:
        config = how.get("generation_config") or model.generation_config
        new = how.get("max_new_tokens") or config.max_new_tokens or 0
        if new <= GENERATED:
            return own(model, *args, **how)
        if "generation_config" in how:
            how["generation_config"] = copy.deepcopy(config)
            how["generation_config"].max_new_tokens = GENERATED
        else:
            how["max_new_tokens"] = GENERATED
        made = own(model, *args, **how)
        ids = made if isinstance(made, Tensor) else made.sequences
        whole = torch.cat([ids, ids.new_ones(len(ids), new - GENERATED)], 1)
        if isinstance(made, Tensor):
            return whole
        made.sequences = whole
        return made

    def ended(criteria: Any, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        longest = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        return torch.full((len(input_ids),), input_ids.shape[1] >= min(longest, default=1))

    found = (GenerationMixin, "generate", generate), (StoppingCriteriaList, "__call__", ended)
    return [mock.patch.object(where, name, by) for where, name, by in found]
