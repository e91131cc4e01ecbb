"""Checks that a checkpoint brings a run back: what the script holds when it saves, and what it holds when it trains again after
a start from that file."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.checks.ranks import difference
from trainworthy.guard.checks.results import finding, skip
from trainworthy.guard.measures.records import PARAMETERS, VALUES, weights

SAVES = 8  # snapshots that are kept: the last ones
EXACT = 1e-3  # relative; a checkpoint may be written in bf16 or fp16
CAUSES = {
    "weights": "the checkpoint is not loaded, is loaded before the model is replaced, or was written before the last update",
    "buffers": "batch norm's statistics are not saved, or not loaded (parameters() has no buffers)",
    "moments": "the optimiser's state is not saved, not loaded, or loaded before the optimiser is built anew",
    "rates": "the scheduler's state is not saved or not loaded: the schedule begins again",
}


class Restart:
    """Snapshots of one rehearsal."""

    def __init__(self) -> None:
        self.saves: list[dict[str, Any]] = []
        self.begin: dict[str, Any] = {}
        self.calls: list[list[list[float]]] = []

    def saved(self, seen: Any, path: str) -> None:
        """Note the state at which a file was saved."""
        if seen.steps:
            at = [len(g.rates) for g in seen.groups.values()]
            self.saves = [*self.saves[1 - SAVES :], {"path": path, "steps": seen.steps, "at": at, **snapshot(seen)}]

    def called(self, seen: Any, module: nn.Module) -> None:
        """Note the batch statistics before a call in training: the call itself changes them."""
        self.calls = [*self.calls[-3:], buffers([*seen.roots.values(), module])]

    def backward(self, seen: Any) -> None:
        """Note the state at the first backward()."""
        self.begin = snapshot(seen) | {"buffers": self.calls}

    def facts(self, seen: Any) -> dict[str, Any]:
        """Return what `check` compares between two processes."""
        for one in self.saves:
            groups = zip(seen.groups.values(), one["at"], strict=False)
            one["next"] = [g.rates[i] if i < len(g.rates) else None for g, i in groups]
        return {"saves": self.saves, "begin": self.begin}


def snapshot(seen: Any) -> dict[str, Any]:
    """Return some values of weights, optimiser state and batch statistics, the learning rates and the schedulers' positions."""
    groups = list(seen.groups.values())
    its = [g.ref() for g in groups]
    return {
        "weights": weights(groups) or [],
        "moments": [list(moments(it)) for it in its if it is not None],
        "buffers": buffers(list(seen.roots.values())),
        "rates": [max((float(g["lr"]) for g in it.param_groups), default=0.0) for it in its if it is not None],
        "clocks": [int(getattr(s.it, "last_epoch", 0)) for s in seen.schedulers],
    }


def moments(it: torch.optim.Optimizer) -> Iterator[list[float]]:
    """Yield some values of an optimiser's state tensors."""
    for p in [p for g in it.param_groups for p in g["params"]][:PARAMETERS]:
        state = it.state.get(p, {})
        found = [state[k] for k in sorted(state) if isinstance(state[k], Tensor) and state[k].numel()]
        yield [v for x in found for v in to_double(x.detach().flatten()[:VALUES]).tolist()]


def buffers(modules: list[nn.Module]) -> list[list[float]]:
    """Return some values of the running statistics."""
    seen = {id(b): b for m in modules for n, b in m.named_buffers() if n.rpartition(".")[2].startswith("running_")}
    return [to_double(b.detach().flatten()[:VALUES]).tolist() for b in list(seen.values())[:PARAMETERS]]


def check(watch: dict[str, Any], again: dict[str, Any], words: str) -> dict[str, Any]:
    """Compare the state after the restart with each state that was saved."""
    begin = again.get("restart", {}).get("begin")
    if again.get("why") == "it raised" and "No such file" not in again["raised"]:
        text = f"started again with {words}, the script fails: {again['raised'][:300]}"
        cause = (
            "what was saved does not fit what is loaded (names, shapes, types), or --restart names the wrong argument"
        )
        return finding("resume", text, cause)
    if not begin:
        why = again.get("raised") or again.get("why") or "no record"
        return skip("resume", f"started again with {words}, the script did not train: {why}"[:300])
    rows = [(wrong(one, begin), one) for one in watch["restart"]["saves"]]
    faults, one = min(reversed(rows), key=lambda row: (sum(k in ("weights", "buffers") for k in row[0]), len(row[0])))
    measured = f"saved after step {one['steps']}, started again with {words}"
    if not faults:
        kinds = ["weights", *["batch statistics"] * bool(one["buffers"]), "optimiser state", "rate"]
        return finding("resume", f"{measured}: the same {', '.join(kinds)}")
    return finding("resume", f"{measured}: {'; '.join(faults.values())}", "\n".join(CAUSES[k] for k in faults))


def wrong(kept: dict[str, Any], begin: dict[str, Any]) -> dict[str, str]:
    """Return what differs, as text."""
    found = {}
    if state_difference(kept["weights"], begin["weights"]) > EXACT:
        found["weights"] = f"the weights differ by {state_difference(kept['weights'], begin['weights']):.2g} (relative)"
    if (
        kept["buffers"]
        and begin["buffers"]
        and min(state_difference(kept["buffers"], b) for b in begin["buffers"]) > EXACT
    ):
        found["buffers"] = "the running statistics of batch norm differ"
    if [len(m) for m in kept["moments"]] == [len(m) for m in begin["moments"]]:
        for a, b in zip(kept["moments"], begin["moments"], strict=True):
            if any(a) and not any(b):
                found["moments"] = "the optimiser's state is empty"
            elif state_difference(a, b) > EXACT:
                found["moments"] = f"the optimiser's state differs by {state_difference(a, b):.2g} (relative)"
    for now, then, later in zip(begin["rates"], kept["rates"], kept["next"], strict=False):
        if not any(x is not None and abs(now - x) <= EXACT * max(abs(x), 1e-12) for x in (then, later)):
            found["rates"] = f"the learning rate is {now:.3g}, and was {then:.3g}"
    if len(begin["clocks"]) == len(kept["clocks"]):
        for now, then in zip(begin["clocks"], kept["clocks"], strict=True):
            if now not in (then, then + 1):
                found.setdefault("rates", f"a scheduler is at step {now}, and was at {then}")
    return found


def state_difference(a: list[list[float]], b: list[list[float]]) -> float:
    """Return the largest relative difference; 0 where the lists have different shapes and cannot be compared."""
    return difference(a, b) if [len(x) for x in a] == [len(x) for x in b] else 0.0
