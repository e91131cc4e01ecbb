"""A stand-in for an accelerator: host memory behind a wrapper, for which meeting a host tensor is an error.

It sees a host tensor of one or more axes in an operation with a device tensor, `.numpy()` of a device tensor, and `float64`,
which devices such as Apple's MPS lack. It cannot see what takes time (a host sync, a missing pin), kernels that differ or are not
deterministic, TF32 and 16 bits, fused optimisers, memory, streams, or code that does not pass through torch's dispatcher.
"""

import contextlib
import functools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from trainworthy.core.base import config
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import order
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.loop import optim
from trainworthy.core.loop.run import Rehearsal, evaluating
from trainworthy.core.recipe import loading
from trainworthy.core.session import stages
from transformers import TrainingArguments

NAME = "standin"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
MAY_MIX = (
    "copy_",
    "_to_copy",
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
)  # values from the host, or indices


class OnDevice(torch.Tensor):
    """A tensor of the device; `host` is what is in it."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=DEVICE,
            requires_grad=False,
        )  # fmt: skip
        made.host = host
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.host})"

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {NAME} tensor to numpy: use Tensor.cpu() first")

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def __format__(self, spec: str) -> str:
        return format(self.host, spec)

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def __deepcopy__(self, memo: dict) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone()
            memo[id(self)] = torch.nn.Parameter(copied) if isinstance(self, torch.nn.Parameter) else copied
            memo[id(self)].requires_grad_(self.requires_grad)
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return on_device(func, args, kwargs or {})


def is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def on_device(func, args: tuple, kwargs: dict) -> Any:
    """`func` on what is behind the wrappers; its result is on the device if an argument, or the device asked for, is."""
    leaves = tree_leaves((args, kwargs))
    ours = [x for x in leaves if isinstance(x, OnDevice)]
    name = func.overloadpacket.__name__
    hosts = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice) and x.ndim]
    if ours and hosts and name not in MAY_MIX:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {NAME}:0 and cpu! ({name})")
    if ours and name == "index" and not isinstance(args[0], OnDevice) and args[0].ndim:
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    asked = kwargs.get("device")
    goes = is_ours(asked) if asked is not None else bool(ours)
    if is_ours(asked):
        kwargs = kwargs | {"device": torch.device("cpu")}
    if kwargs.get("dtype") is torch.float64 and goes:
        raise TypeError(f"Cannot convert a {NAME} Tensor to float64: the framework doesn't support float64")
    out = func(*tree_map(_host, args), **tree_map(_host, kwargs))
    if name in ("item", "_local_scalar_dense", "equal", "is_same_size"):
        return out
    if func._schema.is_mutable:  # what was written to is what is returned
        first = next((x for x in tree_leaves(args) if isinstance(x, torch.Tensor)), None)
        return first if isinstance(out, torch.Tensor) else out
    return tree_map(lambda x: OnDevice(x) if isinstance(x, torch.Tensor) else x, out) if goes else out


def _host(x: Any) -> Any:
    return x.host if isinstance(x, OnDevice) else x


class Factories(TorchDispatchMode):
    """What asks for the device by name, without a tensor of it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_ours(kwargs.get("device")) or any(isinstance(x, OnDevice) for x in tree_leaves((args, kwargs))):
            return on_device(func, args, kwargs)
        return func(*args, **kwargs)


class Builders(TorchFunctionMode):
    """What makes a tensor of Python's numbers there: torch does that below every dispatcher."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and is_ours(kwargs.get("device")):
            return (
                args[0].to(**kwargs)
                if isinstance(args[0], torch.Tensor)
                else func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
            )
        if func is torch.Tensor.new_tensor and isinstance(args[0], OnDevice):
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(DEVICE)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], OnDevice):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            listed = tuple(
                torch.tensor(p) if isinstance(p, list) and p and isinstance(p[0], (int, bool)) else p for p in parts
            )
            args = (args[0], listed if isinstance(args[1], tuple) else listed[0], *args[2:])
        return func(*args, **kwargs)


@contextmanager
def stand_in() -> Iterator[Accelerator]:
    """An Accelerator whose device is the stand-in."""
    accelerator = Accelerator(cpu=True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    optim.NO_DOUBLES.add(NAME)
    with contextlib.ExitStack() as stack:
        # A trainer's arguments set up the shared state anew: there the host would be the device.
        for kind in (Accelerator, TrainingArguments):
            own = kind.device
            here = property(lambda self, own=own: (own.fget(self), DEVICE)[1])
            stack.enter_context(mock.patch.object(kind, "device", here))
        stack.enter_context(mock.patch.object(torch.accelerator, "synchronize"))  # the backend of a stand-in lacks it
        stack.enter_context(Factories())
        stack.enter_context(Builders())
        try:
            yield accelerator
        finally:
            optim.NO_DOUBLES.discard(NAME)
            torch.__future__.set_swap_module_params_on_conversion(False)


LEFT_OUT = ("overfit", "baseline", "tiny-data", "range-test", "data", "fabricated", "leakage")
"""Gates that train to a goal (the rehearsal and others run the same code), and gates that read data on the host alone."""


def outcomes(recipe: str, argv: list[str], ids: tuple[str, ...] = ()) -> dict[str, str]:
    """Gates of every stage of a recipe there (`ids`, else all but LEFT_OUT): passed, skipped, measured, or what was raised."""
    loaded, found = loading.load(recipe), {}
    cfg = config.parse(loaded.module, argv, prog="stand-in")[0]
    with stand_in() as accelerator, tempfile.TemporaryDirectory() as folder:
        before = None
        for spec in stages.specs(loaded, cfg):
            context = GateContext(spec.cfg, accelerator, spec.factory(before), loaded.module.train, Path(folder) / spec.name, {}, {},
                          stage=spec.name, follows="rehearsed" if before else "none")  # fmt: skip
            context.folder.mkdir(parents=True)
            if "finish" in ids:
                found[f"{spec.name} finish"] = outcome_of(finish, context)
            for one in order.of_stage(context.look()[1]):
                if one.id in ids or (not ids and one.id not in LEFT_OUT):
                    assert context.look()[0].device == DEVICE
                    assert all(isinstance(p, OnDevice) for p in context.look()[1].model.parameters())
                    context.put_away()
                    started = time.process_time()
                    found[f"{spec.name} {one.id}"] = outcome = outcome_of(one.check, context)
                    if os.environ.get("STAND_IN_TRACE"):
                        print(
                            f"{spec.name} {one.id}: {outcome[:300]} ({time.process_time() - started:.1f} s)",
                            file=sys.stderr,
                            flush=True,
                        )
            before = functools.cache(lambda context=context: context.build(Rehearsal(steps=1))[1])
    return found


def finish(context: GateContext) -> None:
    """What a run does after its last step, without the export: figures, baselines, the training samples' score."""
    run, stage = context.build(Rehearsal(steps=1))
    with evaluating(stage.eval_model), run.autocast():
        if stage.figures:
            stage.figures(stage.eval_model, stage.data["val"])
        stage.baselines()
    if "test" in stage.data:
        run.measure(stage, stage.data["test"])


def outcome_of(check: Callable[[GateContext], Finding | None], context: GateContext) -> str:
    try:
        finding = check(context)
        return "pass" if finding is None or finding.ok else f"fail: {finding.measured}"
    except Skip as skip:
        return f"skip: {skip}"
    except Exception as error:
        if os.environ.get("STAND_IN_TRACE"):
            print("".join(traceback.format_tb(error.__traceback__)[-8:]), file=sys.stderr)
        at = [
            f for f in traceback.extract_tb(error.__traceback__) if "/core/" in f.filename or "/recipes/" in f.filename
        ][-1]
        return f"{type(error).__name__}: {str(error).splitlines()[0]} ({Path(at.filename).name}:{at.lineno}: {at.line})"


if __name__ == "__main__":
    own = sys.argv[2:]
    only = own.pop(0).removeprefix("--only=") if own and own[0].startswith("--only=") else ""
    print(json.dumps(outcomes(sys.argv[1], own, tuple(filter(None, only.split(","))))))
