"""Estimates what a stage needs, without its weights: memory by kind, floating-point operations, bytes of a checkpoint.

The recipe's own factory builds the stage with fake parameters, which have a shape and no values. Its own `train()` then
makes two optimiser steps on them, and every storage counts from the operation that makes it until it is freed. What a
program reads from a fake tensor is 1 (a number), true (a condition) or zeros (an array).
"""

import contextlib
import importlib.util
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from trainworthy.core.base import planning
from trainworthy.core.base.errors import Stop
from trainworthy.core.base.live_bytes import LiveBytes
from trainworthy.core.loop import shard
from trainworthy.core.loop.run import Plan, Run
from trainworthy.core.recipe.loading import Recipe
from trainworthy.core.recipe.stage import Stage, View
from trainworthy.core.session import rows, stages

STEPS = 2  # the second one finds the optimiser's state
LONGEST, LONGEST_EVALUATION = 120.0, 30.0  # seconds of a simulation
aten = torch.ops.aten
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
}
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: 0,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 1,
}
"""The CPU's attention, of which torch's table has no formula, and where the queries are among its arguments. Two products forward, four
backward; what a kernel computes again does not count."""


class TooLong(Exception):
    """The simulation takes longer than it may."""


@dataclass
class Estimate:
    """What one stage needs on one process; bytes, unless another unit is named."""

    stage: str
    parameters: int
    """Numbers, in the model."""
    trained: int
    """Numbers, in its optimisers."""
    weights: int
    """Of the model, with its buffers."""
    average: int
    """Of the EMA."""
    frozen: int
    """Of teacher, reference and other modules outside the model."""
    gradients: int
    optimizer: int
    micro_batch: int
    """Samples."""
    micro_batches: int
    """Of an optimiser step, on each process."""
    training: int
    """Peak of an optimiser step, with all of the above."""
    largest: tuple[tuple[int, ...], str, int]
    """Shape, type and bytes of the largest tensor that the steps make."""
    flops: float
    """Floating-point operations of an optimiser step of all processes, in products and convolutions."""
    steps: int | None
    """Optimiser steps of the whole stage; None: the number of its samples is not known."""
    checkpoint: int
    best: int
    """Weights of one kept evaluation."""
    evaluation: int | None = None
    """Peak of an evaluation of one batch; None: it cannot be simulated."""
    cache: int = 0
    """Keys and values of a generation in the evaluation."""
    tokens: int = 0
    """Positions of a sample that the model reads, where samples are rows of tokens (`input_ids`)."""
    gate_batch: int = 0
    """Largest batch of a gate, in samples."""
    unit: int = 0
    """Parameters of the largest unit that `--shard` gathers at once; 0: the recipe names none."""
    outside: int = 0
    """Parameters in no such unit: embeddings, head."""
    halves: int = 0
    """Bytes of the units' weights in bf16, if `--shard` gathers them so and autocast makes no copies of them."""
    missing: list[str] = field(default_factory=list)
    """What could not be simulated, and why."""

    @property
    def activations(self) -> int:
        """What is left of the peak: activations, and what operations need for a moment."""
        held = self.weights + self.average + self.frozen + self.gradients + self.optimizer
        return max(0, self.training - held)


# ------------------------------------------------------------------------------------------------------------ simulating
class Simulation(LiveBytes):
    """Counts bytes and floating-point operations of fake tensors, and answers what only values could."""

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self.mode, self.flops, self.largest = mode, 0.0, ((), "", 0)
        self.ends = time.monotonic() + LONGEST

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if time.monotonic() > self.ends:
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
        out = super().__torch_dispatch__(func, types, args, kwargs)
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
        size = tensor.numel() * tensor.element_size()
        if size > self.largest[2]:
            self.largest = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), size)

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
                        known[id(p)] = p if new.dtype == p.dtype else nn.Parameter(new, p.requires_grad)
                    one._parameters[name] = known[id(p)]
            for name, buffer in one._buffers.items():
                if buffer is not None:
                    one._buffers[name] = fn(buffer)
        return module

    def numpy(tensor: Tensor, **how: Any) -> np.ndarray:
        if not isinstance(tensor, FakeTensor):
            return own_numpy(tensor, **how)
        return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.object(nn.Module, "register_parameter", register),
            mock.patch.object(nn.Module, "_apply", apply),
            mock.patch.object(Tensor, "numpy", numpy),
            mock.patch.object(planning, "active", True),
            *_unread(),
        ):
            stack.enter_context(patch)
        yield stack.enter_context(Simulation(mode))


def _unread() -> list[Any]:
    """Return the patches under which the libraries build a model from its configuration and read no weights."""
    patches = []
    if importlib.util.find_spec("transformers"):
        from transformers import PreTrainedModel

        patches.append(mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(_from_config)))
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


# ------------------------------------------------------------------------------------------------------------- estimates
def estimates(
    recipe: Recipe, cfg: Any, *, processes: int = 1, longest: bool = False, samples: int | None = None
) -> list[Estimate]:
    """Estimate every stage of a recipe, in order. `longest`: the data are a stand-in, so every text is as long as the
    settings allow; `samples`: how many the real training set has."""
    accelerator, found = Accelerator(cpu=True), []
    with simulated() as memory:
        previous = None
        for part in stages.parts(recipe, cfg):
            previous, one = _estimate(recipe, part, previous, memory, accelerator, processes, longest, samples)
            found.append(one)
    return found


def _estimate(
    recipe: Recipe,
    part: stages.Part,
    previous: Stage | None,
    memory: Simulation,
    accelerator: Accelerator,
    processes: int,
    longest: bool,
    samples: int | None,
) -> tuple[Stage, Estimate]:
    t, missing = part.cfg.train, []
    micro = max(1, -(-t.batch_size // (processes * t.accumulate)))
    pieces = min(2, t.accumulate)  # the second one finds the first one's gradients
    plan = Plan(steps=STEPS, batch_size=pieces * micro, sizes=[micro] * pieces)
    run = Run(part.cfg, accelerator, plan=plan)
    memory.ends = time.monotonic() + LONGEST
    stage = part.build(run, previous)
    shard.assert_supported(recipe.id, [stage], part.cfg, precision=run.precision)
    limit = getattr(getattr(part.cfg, "data", None), "max_length", 0)
    reads = "train" in stage.data
    if longest and limit and reads:
        stage.data["train"] = rows.Longest(stage.data["train"], limit)
    if not reads:
        plan.sizes = None
    total = _steps(part.cfg, run, stage, samples, known=not longest)
    memory.flops, memory.largest = 0.0, ((), "", 0)
    memory.restart()
    try:
        with without_evaluation(stage):
            recipe.module.train(part.cfg, run, stage)
    except Stop:
        raise
    except Exception as error:
        missing.append(f"a training step: {_said(error)}")
    memory.ends = math.inf
    training, flops, largest = memory.peak, memory.flops, memory.largest
    tokens = rows.tokens(stage.data["train"], micro) if reads else 0
    ours = _size([*stage.model.state_dict().values(), *stage.model.buffers()])
    average = 0 if stage.ema_model is None else _size(stage.ema_model.state_dict().values())
    frozen = _size(t for m in stage.frozen_modules.values() for t in m.state_dict().values())
    trained = list(stage.parameters().values())
    state = _size(x for o in stage.optimizers.values() for x in tree_leaves(list(o.state.values())))
    buckets = processes > 1 and part.cfg.run.shard == shard.NONE  # DDP's copy of the gradients
    gradients = _size(trained) * (2 if buckets else 1)
    least = ours + average + frozen + gradients + state
    for p in trained:
        p.grad = None
    evaluation = _evaluation(run, stage, memory, t.eval_batch_size, missing)
    kept = _size(v for n, v in stage.model.state_dict().items() if n not in stage.not_saved)
    inside = _size(x for s in stage.state.values() for x in tree_leaves(s.state_dict()))
    return stage, Estimate(
        stage=part.name, parameters=sum(p.numel() for p in stage.model.parameters()), trained=sum(p.numel() for p in trained),
        weights=ours, average=average, frozen=frozen, gradients=gradients, optimizer=state, micro_batch=micro,
        micro_batches=t.accumulate if reads else 1, training=max(least, training + (_size(trained) if buckets else 0)), largest=largest,
        flops=processes * flops / STEPS * (t.accumulate / pieces if reads else 1), steps=total, tokens=tokens,
        gate_batch=stage.expect.gate_batch_size or t.batch_size, **_units(stage, run), checkpoint=kept + state + inside, best=kept,
        evaluation=evaluation, cache=_cache(stage, part.cfg), missing=missing,
    )  # fmt: skip


def _evaluation(run: Run, stage: Stage, memory: Simulation, batch_size: int, missing: list[str]) -> int | None:
    """Return the peak memory of evaluating one batch; None if there is nothing to evaluate on or it failed (then `missing` says why)."""
    val, peak = stage.data.get("val"), None
    if val is None or not len(val):
        return None
    memory.restart()
    memory.ends = time.monotonic() + LONGEST_EVALUATION
    try:
        run.measure(stage, View(val, range(min(len(val), batch_size))))
        peak = memory.peak
    except TooLong:  # a generation: its later steps need what its first ones do, and their keys and values
        peak = memory.peak
    except Exception as error:
        missing.append(f"the evaluation: {_said(error)}")
    memory.ends = math.inf
    return peak


@contextlib.contextmanager
def without_evaluation(stage: Stage) -> Iterator[None]:
    """Leave the evaluation out of `train()`: it is simulated alone."""
    own, stage.evaluate = stage.evaluate, lambda model, data: {stage.metric.name: stage.metric.floor}
    try:
        yield
    finally:
        stage.evaluate = own


def _steps(cfg: Any, run: Run, stage: Stage, samples: int | None, *, known: bool) -> int | None:
    if "train" in stage.data and samples is None and not known:
        return None
    plan, run.plan = run.plan, None
    try:
        if samples is not None and "train" in stage.data:
            steps = max(1, -(-int(cfg.train.epochs * samples) // cfg.train.batch_size))
            return min(steps, cfg.train.max_steps) if cfg.train.max_steps else steps
        return run.total_steps(stage)
    finally:
        run.plan = plan


def _units(stage: Stage, run: Run) -> dict[str, int]:
    """Bytes of the largest unit of `--shard`, of the parameters in none, and of all units in bf16 if they are gathered so; zeros if
    the stage is not to be sharded."""
    if stage.shard_units is None:
        return {"unit": 0, "outside": 0}
    units = [list(unit.parameters()) for unit in stage.shard_units(stage.model)]
    inside = {id(p) for unit in units for p in unit}
    within = _size(p for p in stage.model.parameters() if id(p) in inside)
    halves = run.cfg.run.shard != shard.NONE and shard.gathers_halves(stage, run.precision)
    return {
        "unit": max(map(_size, units), default=0),
        "outside": _size(p for p in stage.model.parameters() if id(p) not in inside),
        "halves": within // 2 if halves else 0,
    }


def _size(tensors: Any) -> int:
    """Bytes of tensors, each storage once."""
    once = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
    return sum(once.values())


def _cache(stage: Stage, cfg: Any) -> int:
    """Bytes of the keys and values of one batch that the evaluation generates."""
    config = getattr(stage.model, "config", None)
    new = getattr(cfg, "max_new_tokens", 0)
    if not new or not hasattr(config, "num_hidden_layers"):
        return 0
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    data = getattr(cfg, "data", None)
    prompt = getattr(data, "max_prompt", 0) or getattr(data, "max_length", 0) or 0
    length = min(prompt + new, getattr(config, "max_position_embeddings", None) or prompt + new)
    each = next(stage.model.parameters()).element_size()
    return 2 * config.num_hidden_layers * heads * width * each * length * cfg.train.eval_batch_size


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
