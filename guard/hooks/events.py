"""Hooks in torch that report a training script's actions to an observer.

The script itself is not changed. The patches cover what every loop uses, with any library: `DataLoader.__iter__`,
`nn.Module.__call__`, `torch.autograd.backward`, `Optimizer`, gradient clipping, `GradScaler`, the schedulers, the loss
and dropout functions, `state_dict` and `load_state_dict`. Patch before the script is imported: `from
torch.nn.functional import cross_entropy` must import the patched function.
"""

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.optim.lr_scheduler as schedulers
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as loading
from trainworthy.core.base.errors import UserError
from trainworthy.guard.hooks import functions, initial_weights, patches
from trainworthy.guard.hooks.patches import after, before, imported_by_name
from trainworthy.guard.hooks.patches import remove as remove
from trainworthy.guard.hooks.patches import replace as replace
from trainworthy.guard.hooks.shield import Shield, recorders
from trainworthy.guard.hooks.streams import line_of

_depth = threading.local()


def install(seen: Any, *, losses: bool = True) -> None:
    """Report everything to `seen`, an object with the methods of `Observer`. `losses`: also the loss and dropout functions."""
    if patches.installed():
        raise UserError("torch is observed already", cause="trainworthy.watch() inside a `with trainworthy.watch():`")
    seen = Shield(seen)
    recorders(seen)
    _data(seen)
    _modules(seen)
    _gradients(seen)
    _optimizers(seen)
    _schedules(seen)
    initial_weights.install(seen.drawn_weights)
    if losses:
        for part in (
            functions.losses,
            functions.layers,
            functions.attention,
            functions.sequences,
            functions.differences,
            functions.likelihoods,
        ):
            part(seen)
        _states(seen)
    imported_by_name()


def _data(seen: Any) -> None:
    def iterate(original: Callable) -> Callable:
        def __iter__(self: DataLoader) -> Any:
            return Batches(self, original(self), seen)

        return __iter__

    replace(DataLoader, "__iter__", iterate)
    after(loading._BaseDataLoaderIter, "_next_index", lambda found, source: seen.index(source, found))


class Batches:
    """An iterator of a DataLoader whose batches pass through the observer."""

    def __init__(self, loader: DataLoader, source: Any, seen: Any):
        self._source, self._seen = source, seen
        self._pass = seen.new_pass(loader, source)

    def __iter__(self) -> "Batches":
        return self

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_source"], name)

    def __next__(self) -> Any:
        if self._seen.cut(self._pass):
            raise StopIteration
        self._seen.fetching = True
        try:
            batch = next(self._source)
        except StopIteration:
            self._seen.exhausted(self._pass)
            raise
        finally:
            self._seen.fetching = False
        return self._seen.batch(self._pass, batch)


def _modules(seen: Any) -> None:
    def call(original: Callable) -> Callable:
        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(_depth, "inside", False) or seen.busy:
                return original(self, *args, **kwargs)
            _depth.inside = True
            try:
                token = seen.before_root(self, args, kwargs)
                out = original(self, *args, **kwargs)
            finally:
                _depth.inside = False
            seen.root(self, args, kwargs, out, token)
            return seen.answer(self, args, kwargs, out)

        return __call__

    replace(nn.Module, "__call__", call)


def _gradients(seen: Any) -> None:
    def backward(original: Callable) -> Callable:
        def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if seen.busy:
                return original(tensors, *args, **kwargs)
            seen.before_backward(tensors)
            out = original(tensors, *args, **kwargs)
            seen.backward()
            return out

        return run

    def clip(original: Callable) -> Callable:
        def run(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            seen.clip(parameters)
            return original(parameters, *args, **kwargs)

        return run

    def derivative(original: Callable) -> Callable:
        def run(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not seen.busy:
                seen.differentiated(inputs)
            out = original(outputs, inputs, *args, **kwargs)
            if not seen.busy and kwargs.get("create_graph"):
                seen.evidence.derived(out)
            return out

        return run

    replace(torch.autograd, "grad", derivative)
    replace(torch.autograd, "backward", backward)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        replace(nn.utils, name, clip)
        replace(nn.utils.clip_grad, name, lambda _, name=name: getattr(nn.utils, name))


def _optimizers(seen: Any) -> None:
    def scale(_: Any, scaler: Any, *__: Any, **___: Any) -> None:
        if scaler.is_enabled():
            seen.scaled(float(scaler.get_scale()))

    after(torch.optim.Optimizer, "__init__", lambda _, optimizer, *__, **___: seen.built(optimizer))
    handles: list[Any] = []

    def hook() -> None:
        handles.append(
            register_optimizer_step_pre_hook(lambda o, a, k: seen.before_step(o, (*a, None)[1] or k.get("closure")))
        )
        handles.append(register_optimizer_step_post_hook(lambda o, a, k: seen.step(o)))

    def unhook() -> None:
        while handles:
            handles.pop().remove()

    patches.change(hook, unhook)
    scaler = torch.amp.GradScaler
    before(scaler, "step", lambda *_, **__: seen.scaler_step())
    after(scaler, "unscale_", lambda _, one, optimizer: seen.unscale(optimizer))
    after(scaler, "scale", scale)


def _schedules(seen: Any) -> None:
    def step(original: Callable) -> Callable:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            inside, seen.scheduling = seen.scheduling, True
            try:
                out = original(self, *args, **kwargs)
            finally:
                seen.scheduling = inside
            if not inside:
                waits = isinstance(self, schedulers.ReduceLROnPlateau)
                if waits:
                    seen.plateau(self, line_of(inspect.currentframe()))
                seen.schedule(self, placed=not waits and bool(args or kwargs))
            return out

        return run

    def made(original: Callable) -> Callable:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            inside, seen.scheduling = seen.scheduling, True
            try:
                return original(self, *args, **kwargs)
            finally:
                seen.scheduling = inside
                if not inside:
                    seen.scheduler(self, inspect.currentframe())

        return run

    for cls in {c for c in vars(schedulers).values() if isinstance(c, type) and issubclass(c, schedulers.LRScheduler)}:
        if "step" in vars(cls):
            replace(cls, "step", step)
        if "__init__" in vars(cls):
            replace(cls, "__init__", made)


def _states(seen: Any) -> None:
    def state(out: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not args and "destination" not in kwargs:
            seen.state(module, out)

    def load(original: Callable) -> Callable:
        def load_state_dict(self: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
            seen.before_load(self, state)
            out = original(self, state, *args, **kwargs)
            seen.load(self, state, out)
            return out

        return load_state_dict

    def save(obj: Any, *args: Any, **kwargs: Any) -> None:
        seen.save(obj, args[0] if args else kwargs.get("f"))

    def update_bn(original: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.refreshing = True
            try:
                return original(*args, **kwargs)
            finally:
                seen.refreshing = False

        return run

    after(nn.Module, "state_dict", state)
    replace(nn.Module, "load_state_dict", load)
    before(torch, "save", save)
    after(torch, "load", lambda out, *_, **__: seen.read(out))
    replace(torch.optim.swa_utils, "update_bn", update_bn)
