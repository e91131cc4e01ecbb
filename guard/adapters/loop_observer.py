"""What only a `Loop` shows to an observer: which models and optimisers it has, weights that move without a step of a torch
optimiser, and what it declares."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainworthy.core.base.console import list_names
from trainworthy.core.base.errors import UserError
from trainworthy.guard.checks import invariants
from trainworthy.guard.checks.results import finding
from trainworthy.guard.measures.records import Pass, alive, spots
from trainworthy.guard.observing.observer import Observer
from trainworthy.guard.rehearsals.control import Control

if TYPE_CHECKING:
    from trainworthy.guard.adapters.loop import Loop


def named(given: Any, kind: type, what: str) -> dict[str, Any]:
    """Return models or optimisers by name."""
    if isinstance(given, kind):
        return {"": given}
    found = dict(given) if isinstance(given, Mapping) else None
    if found is None and isinstance(given, Iterable) and not isinstance(given, str):
        found = {str(i): x for i, x in enumerate(given)}
    wrong = [x for x in (found or {}).values() if not isinstance(x, kind)]
    if found is None or wrong:
        raise UserError(f"{what} of a Loop", got=type(wrong[0] if wrong else given).__name__,
                        needed=f"a {kind.__module__.partition('.')[0]} {kind.__name__}, or a list or dict of them")  # fmt: skip
    return found


def modules(loop: "Loop") -> dict[str, nn.Module]:
    """Return its models by name."""
    return named(loop.models, nn.Module, "models")


def parameters(loop: "Loop") -> dict[str, nn.Parameter]:
    """Return every parameter of its models by name; with several models, the model's name comes first."""
    found = modules(loop)
    return {f"{key}.{name}".lstrip("."): p for key, m in found.items() for name, p in m.named_parameters()}


class Watcher(Observer):
    """Also sees weights that move without a step of a torch optimiser, and those that an optimiser moves within a closure."""

    def __init__(self, control: Control):
        super().__init__(control)
        self.loop: Loop | None = None
        self.scores: list[float] = []
        self.iterators: list[Any] = []
        self.first: dict[str, tuple] = {}
        self.marks: list[tuple[Tensor, Tensor, Tensor]] = []
        self.moves = self.leftover = 0

    def new_pass(self, loader: DataLoader, source: Any) -> Pass:
        self.iterators.append(source)
        return super().new_pass(loader, source)

    def before_backward(self, tensors: Any) -> None:
        moved = [p for p, where, old in self.marks if not torch.equal(p.detach().flatten()[where], old)]
        self.moves += bool(moved)
        self.leftover += any(alive(p) for p in moved)
        if moved and not self.groups:  # a step by hand
            self.steps += 1
            self.gaps.append([])
            for one in self.recent:
                one.steps += one.backwards > 0
        self.marks = []
        super().before_backward(tensors)

    def backward(self) -> None:
        own = not self.groups or any(g.closure for g in self.groups.values())
        if own and self.loop is not None and (self.backwards < 64 or not self.groups):
            live = [(name, p) for name, p in parameters(self.loop).items() if p.grad is not None and alive(p)]
            dense = [(name, p) for name, p in live if p.grad is not None and not p.grad.is_sparse]
            self.marks = [spots(p) for _, p in dense[:3]]
            for name, p in dense[:100]:
                if name not in self.first:
                    self.first[name] = spots(p)
        super().backward()

    def close(self) -> None:
        """End the workers of its loaders, also those that ignore SIGTERM: Python would wait for them at its exit."""
        for one in self.iterators:
            workers = getattr(one, "_workers", ())
            if workers:
                one._shutdown_workers()  # torch asks them to end, and waits some seconds
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
                    worker.join()
        for one in self.passes:  # persistent workers are gone, too
            if getattr(one.loader, "_iterator", None) is not None:
                one.loader._iterator = None
        self.iterators = []


def declared(seen: Watcher, findings: list[dict]) -> list[dict]:
    """Return the findings, with those that need to know the loop's own parameters or declarations."""
    loop = seen.loop
    assert loop is not None
    own = {"wiring": by_hand, "gradients": leftovers, "frozen": frozen}
    out = []
    for one in findings:
        better = own[one["id"]](seen, loop) if one["id"] in own and ("skip" in one or one["ok"]) else None
        out.append(better or one)
    return out


def by_hand(seen: Watcher, loop: "Loop") -> dict | None:
    """Without an optimiser: check that what gets a gradient moves."""
    if invariants.stepped(seen) or seen.backwards < 8:
        return None
    calm = (*loop.expect.frozen, *loop.expect.no_gradient)
    rows = {name: row for name, row in seen.first.items() if not name.startswith(calm)}
    unchanged = [name for name, (p, where, old) in rows.items() if torch.equal(p.detach().flatten()[where], old)]
    if not rows:
        return finding(
            "wiring",
            "no parameter of the models gets a gradient",
            "the loss is computed by other models, or cut off by detach() or no_grad()",
        )
    cause = "p = p - lr * p.grad makes a new tensor: p -= lr * p.grad, under torch.no_grad(); or no step is made at all"
    text = f"{len(unchanged)} of {len(rows)} tensors get a gradient and never move: {list_names(unchanged, 3)}"
    return finding("wiring", text if unchanged else f"{len(rows)} tensors get gradients and move, without an optimiser",
                              cause if unchanged else "")  # fmt: skip


def leftovers(seen: Watcher, loop: "Loop") -> dict | None:
    """Check that gradients are cleared between an update and the next backward(), where no step() of an optimiser tells them
    apart."""
    if not seen.moves:
        return None
    where = "in the closure" if invariants.stepped(seen) else "by hand"
    if seen.leftover >= max(2, 0.5 * seen.moves):
        return finding(
            "gradients", f"after {seen.leftover} of {seen.moves} updates {where} the next backward() adds to their gradients",
            "the gradients are not cleared before backward(): optimizer.zero_grad(), model.zero_grad() or p.grad = None",
        )  # fmt: skip
    if invariants.stepped(seen):
        return None
    return finding("gradients", f"{seen.moves} updates {where}, each with its own gradients")


def frozen(seen: Watcher, loop: "Loop") -> dict | None:
    """With `expect.frozen`: check that what it names stays as it is, and that nothing else is frozen."""
    if not loop.expect.frozen:
        return None
    rows = parameters(loop)
    mine = {name: p for name, p in rows.items() if name.startswith(loop.expect.frozen)}
    moved = [name for name, p in mine.items() if invariants.moved_now(seen, p)]
    fixed = [name for name, p in rows.items() if not p.requires_grad and not invariants.moved_now(seen, p)]
    others = [name for name in fixed if name not in mine]
    wrong = [f"{len(moved)} of {len(mine)} tensors declared frozen moved: {list_names(moved, 3)}"] * bool(moved)
    wrong += [f"{len(others)} tensors are frozen and not declared: {list_names(others, 3)}"] * bool(others)
    causes = ["requires_grad was switched on again, or freezing has no effect: p.requires_grad_(False)"] * bool(moved)
    causes += ["a prefix is missing in expect.frozen, or too much was frozen"] * bool(others)
    return finding(
        "frozen", "; ".join(wrong) or f"{len(mine)} tensors declared frozen stay as they are", "\n".join(causes)
    )
