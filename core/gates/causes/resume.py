"""Finds the state that a resumed run lacks, if it differs from the run that was never stopped.

Three short runs are compared at the first step after the checkpoint: what was saved with what came back, variables that no
checkpoint holds, and the samples.
"""

import inspect
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trainworthy.core.gates.fingerprints import fingerprint, fingerprints
from trainworthy.core.loop.run import Run, Step
from trainworthy.core.recipe.stage import Data, Stage

MOST, DEPTH = 64, 3  # entries of a container, and levels, that are compared
OWN = {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}  # of a module, kept by torch
CORE = str(Path(__file__).parents[2])

Place = dict[str, tuple[Any, str]]
"""Name -> (value to compare, how it is shown)."""


class Watch:
    """What one run holds when it begins, and at step `at`."""

    def __init__(self, at: int):
        self.at = at
        self.begun: dict[str, Any] = {}
        self.kept: Place = {}
        self.handed: dict[str, Any] = {}
        self.read: dict[str, Any] = {}
        self.data: Data | None = None

    def __call__(self, run: Run, stage: Stage) -> None:
        """Follow the run through its own `steps` and the stage's loss."""
        own, loss, self.data = run.steps, stage.loss, stage.data.get("train")

        def steps(of: Stage) -> Iterator[Step]:
            for step in own(of):
                self.begun = self.begun or saved(of)
                if step.index == self.at:
                    known = (run, of, of.model, of.ema_model, *of.state.values(), *of.frozen_modules.values())
                    held = {id(one) for one in known}
                    frame = inspect.currentframe().f_back
                    self.kept = _variables(frame, held) | _of_functions(loss, of) | _of_objects(of)
                    self.handed = _entries(step.batches)
                yield step

        def read(model: nn.Module, batch: dict) -> dict[str, Tensor]:
            if run.current and run.current.index == self.at and not self.read:
                self.read = _entries([batch])
            return loss(model, batch)

        run.steps, stage.loss = steps, read


def first_cause(straight: Watch, stopped: dict[str, Any], resumed: Watch) -> str:
    """Return what differs first: a part of the checkpoint, a variable that none holds, the samples. `stopped`: what the
    run that was stopped held at its end."""
    lost = [n for n, v in stopped.items() if resumed.begun.get(n) != v]
    if lost:
        first = next((n for n in lost if n.startswith("state.")), lost[0])
        kind, name, *_ = first.split(".")
        part = f"{kind}.{name}." if kind in ("state", "optimizers") else f"{kind}."
        where = "stage.ema_model" if kind == "average" else f"stage.{kind}"
        where += f"['{name}']" * (kind in ("state", "optimizers"))
        own, some = (sum(n.startswith(part) for n in names) for names in (stopped, lost))
        return (f"{where} is not restored: right after loading, {some} of its {own} values differ from those that were saved (see its "
                "state_dict() and load_state_dict())")  # fmt: skip
    differs = [k for k, (value, _) in straight.kept.items() if k in resumed.kept and resumed.kept[k][0] != value]
    if differs:
        more = f"; also {', '.join(differs[1:3])}" if differs[1:] else ""
        was, now = straight.kept[differs[0]][1], resumed.kept[differs[0]][1]
        values = f"{was} in another state after the restart"
        if was != now:
            values = f"{was} in the run that went on, {now} after the restart"
        return f"no checkpoint holds {differs[0]}: {values}{more}"
    handed = [k for k, v in straight.handed.items() if resumed.handed.get(k) != v]
    if handed:
        moved = _moved_by_get(straight.data)
        return (f"get() returns other samples after the restart: entry '{handed[0]}' of step {straight.at + 1} differs, so it depends on "
                f"more than its index and generator{f': it changes {moved[0]}, which no checkpoint holds' if moved else ''}")  # fmt: skip
    read = [k for k, v in straight.read.items() if resumed.read.get(k) != v]
    if read:
        return (f"the loss reads another '{read[0]}' at step {straight.at + 1} than without the stop: the loop makes or changes it with "
                "something that no checkpoint holds (no variable that the gate can see)")  # fmt: skip
    return ("no experiment explains it: what was saved is restored, and the next samples and all variables that the gate can see are "
            "equal")  # fmt: skip


def saved(stage: Stage) -> dict[str, Any]:
    """Return what a checkpoint holds of a stage, by name: numbers that change with its tensors, and the plain values in `state`."""
    found: dict[str, Any] = {n: t.item() for n, t in fingerprints(stage).items()}
    for key, one in stage.state.items():
        found |= {f"state.{key}.{n}": v for n, v in _plain(one.state_dict())}
    return found


def _plain(tree: Any, *keys: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _plain(value, *keys, key)
    elif isinstance(tree, (list, tuple)) and len(tree) <= MOST:
        for i, value in enumerate(tree):
            yield from _plain(value, *keys, i)
    elif isinstance(tree, (bool, int, float, str)) and tree == tree:
        yield "=" + ".".join(map(str, keys)), tree


def _entries(batches: list[dict]) -> dict[str, Any]:
    found: dict[str, list] = {}
    for batch in batches:
        for key, value in batch.items():
            if isinstance(value, Tensor) and value.numel():
                found.setdefault(key, []).append(fingerprint(value).item())
    return found


# ------------------------------------------------------------------------------------------- what no checkpoint holds
def _variables(frame: Any, held: set[int]) -> Place:
    """Of the functions that iterate over the steps: their local variables, and what objects with a `state_dict` hold that are not among those
    of a checkpoint (`held`, by id)."""
    found: Place = {}
    while frame is not None and not frame.f_code.co_filename.startswith(CORE):
        name = frame.f_code.co_name
        names = {k: f"the local variable `{k}` of {name}()" for k in frame.f_locals}
        found |= _seen({names[k]: v for k, v in frame.f_locals.items()})
        for k, v in frame.f_locals.items():
            if id(v) not in held and not isinstance(v, (type, torch.optim.Optimizer)) and (state := _own_state(v)):
                found[names[k]] = state, _called(v)
        frame = frame.f_back
    return found


def _of_functions(loss: Callable, stage: Stage) -> Place:
    """What loss, counts and evaluation keep in their closures, and global variables that the loss reads."""
    found: Place = {}
    for name, one in (("loss", loss), ("counts", stage.counts), ("evaluate", stage.evaluate)):
        code = getattr(one, "__code__", None)
        if code is None:
            continue
        cells = zip(code.co_freevars, one.__closure__ or (), strict=True)
        found |= _seen({f"`{k}`, which {name}() keeps": c.cell_contents for k, c in cells if _filled(c)})
        known = {k: one.__globals__[k] for k in code.co_names if k in one.__globals__ and not k.isupper()}
        found |= _seen({f"the global variable `{k}` that {name}() reads": v for k, v in known.items()})
    return found


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _of_objects(stage: Stage) -> Place:
    """Attributes of the training set and of modules, and buffers that are not saved."""
    found: Place = {}
    found |= _of_data(stage.data.get("train"))
    kept = stage.model.state_dict()
    for name, buffer in stage.model.named_buffers():
        if name not in kept:
            found |= _seen({f"the buffer `{name}` of the model (persistent=False)": buffer})
    for name, module in stage.model.named_modules():
        own = {k: v for k, v in vars(module).items() if k not in OWN and not k.startswith("_")}
        whose = f"model.{name}" if name else "the model"
        found |= _seen({f"`{k}` of {whose}": v for k, v in own.items() if not isinstance(v, nn.Module)})
    return found


def _of_data(data: Data | None) -> Place:
    own = getattr(data, "__dict__", {})
    return _seen({f"`{k}` of the training set": v for k, v in own.items() if not isinstance(v, Tensor)})


def _moved_by_get(data: Data | None) -> list[str]:
    """Attributes of the training set that `get` changes. Worker processes change copies, which `_of_objects` cannot see."""
    if data is None:
        return []
    before = _of_data(data)
    data.get(0, torch.Generator().manual_seed(0))
    return [k for k, (value, _) in _of_data(data).items() if k in before and before[k][0] != value]


def _seen(values: dict[str, Any]) -> Place:
    """Those that can be compared between two runs."""
    found: Place = {}
    for name, value in values.items():
        state = _state(value)
        if state is not None:
            plain = isinstance(value, (bool, int, float, str))
            found[name] = (state, f"{value!r:.40}" if plain else _called(value))
    return found


def _called(value: Any) -> str:
    if isinstance(value, (torch.Generator, random.Random, np.random.Generator)):
        return "a generator"
    if isinstance(value, Tensor):
        return f"{value.item():.4g}" if value.numel() == 1 else "a tensor"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"


def _state(value: Any, depth: int = DEPTH) -> Any:
    """Return a value that is equal for equal states; None for what is not compared (functions, modules, other objects)."""
    if isinstance(value, (bool, int, float, str)):
        return value if value == value else "nan"
    if isinstance(value, Tensor):
        return (tuple(value.shape), fingerprint(value).item()) if value.numel() else ()
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.dtype != object else None
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()  # a sum would hide a draw: one counter falls as another rises
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if depth and isinstance(value, dict) and len(value) <= MOST:
        return _whole({k: _state(v, depth - 1) for k, v in value.items()})
    if depth and isinstance(value, (list, tuple, deque)) and len(value) <= MOST:
        return _whole(dict(enumerate(_state(v, depth - 1) for v in value)))
    if depth and isinstance(value, torch.optim.Optimizer):
        return _whole({i: _state(s, depth - 1) for i, s in enumerate(value.state.values())}) or {}
    return None


def _own_state(value: Any) -> dict[str, Any]:
    """Return numbers of what an object's `state_dict()` holds: plain values, and tensors of its first level."""
    state = getattr(value, "state_dict", None)
    tree = state() if callable(state) else None
    if not isinstance(tree, dict):
        return {}
    return dict(_plain(tree)) | {str(k): _state(v) for k, v in tree.items() if isinstance(v, Tensor)}


def _whole(found: dict) -> dict | None:
    return found if found and all(v is not None for v in found.values()) else None
