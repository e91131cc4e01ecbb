"""Time of each module in a step, forward and backward, from torch's profiler."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from trainworthy.core.base.modes import hooked

MARK, BACKWARD = "trainworthy::module::", "autograd::engine::evaluate_function"
OUTSIDE = {"trainworthy::wait_for_data": "(waiting for data)", "Optimizer.": "(optimiser)"}
REST = "(loss, loop and everything else outside modules)"


@contextlib.contextmanager
def marked(roots: Mapping[str, nn.Module], active: Callable[[], bool]) -> Iterator[None]:
    """Inside, and while `active`, the profiler sees every call of every module under `roots` by its name. Numbers of repeated layers
    become `*`."""
    handles, open_marks, seen = [], [], set()

    def enter(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any) -> None:
            if active():
                mark = torch.profiler.record_function(MARK + name)
                mark.__enter__()
                open_marks.append((_module, mark))

        return hook

    def leave(module: nn.Module, _args: Any, _output: Any) -> None:
        while open_marks and any(m is module for m, _ in open_marks):  # inner modules that raised never left
            inner, mark = open_marks.pop()
            mark.__exit__(None, None, None)
            if inner is module:
                return

    for root_name, root in roots.items():
        for name, module in root.named_modules():
            if id(module) in seen or isinstance(module, torch.jit.ScriptModule):
                continue
            seen.add(id(module))
            full = ".".join(filter(None, (root_name, name)))
            called = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", full)
            handles.append(module.register_forward_pre_hook(enter(f"{called} {type(module).__name__}")))
            handles.append(module.register_forward_hook(leave, always_call=True))
    with hooked(handles):
        yield


def of_events(events: Iterable[Any], *, on_device: bool) -> list[tuple[str, float]]:
    """Return [(module, seconds)], the largest first: an operation belongs to the innermost module that called it, and a backward operation
    to the module of its forward, which autograd's sequence numbers link. On an accelerator the times are those of kernels."""
    owner: dict[int, str] = {}
    seconds: dict[str, float] = defaultdict(float)
    backward = []
    for event in events:
        if event.name.startswith(BACKWARD):
            backward.append(event)
        elif event.cpu_parent is None:
            _walk(event, REST, owner, seconds, on_device=on_device)
    for event in backward:  # after every forward, whose modules they get
        _walk(event, owner.get(event.sequence_nr, REST), None, seconds, on_device=on_device)
    return sorted(((k, v / 1e6) for k, v in seconds.items() if v > 0), key=lambda pair: -pair[1])


def _walk(root: Any, module: str, owner: dict[int, str] | None, seconds: dict[str, float], *, on_device: bool) -> None:
    """Add the own times of `root` and of what it called. `owner`: gets the module of each operation of a forward."""
    waiting = [(root, module)]
    while waiting:
        event, mine = waiting.pop()
        if event is not root and event.name.startswith(BACKWARD):
            continue  # it is walked by itself
        if event.name.startswith(MARK):
            mine = event.name.removeprefix(MARK)
        else:
            mine = next((words for start, words in OUTSIDE.items() if event.name.startswith(start)), mine)
        if owner is not None and event.sequence_nr >= 0 and not mine.startswith("("):
            owner[event.sequence_nr] = mine
        seconds[mine] += event.self_device_time_total if on_device else event.self_cpu_time_total
        waiting += [(child, mine) for child in event.cpu_children]
