"""Checks that all processes train one model. Without gradient exchange, each process trains its own, and only rank 0's
is saved.

The check compares norms of every gradient tensor in the optimiser, and of every weight. With gradient exchange they are
bitwise equal on identical machines; on different ones they differ by rounding.
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from trainworthy.core.recipe.stage import Stage

if TYPE_CHECKING:
    from trainworthy.core.loop.run import Run

EARLY = 3  # compare after each of the first steps, then whenever metrics are read
# Relative differences above rounding; for bf16 gradients, eight roundings
GRADIENTS, WEIGHTS = (1e-3, 1e-4)
CAUSES = {
    "gradient": "gradients are not exchanged\n"
    "  likely cause: the loop calls the bare model and not the wrapped one, or a library wraps another copy of it\n"
    "  next:         make updates by run.update(stage, ...), which wraps the loss, or train with one process",
    "weight": "they hold other weights, though gradients are exchanged\n"
    "  likely cause: they started from different weights (a random start without the run's seed, a file that one rank alone has), or something\n"
    "                other than the optimiser changes them on one rank\n"
    "  next:         build the model from the run's seed alone; average over ranks what a loop changes by itself",
}


class Ranks:
    """Context of one stage's loop that watches optimiser steps."""

    def __init__(self, run: "Run", stage: Stage):
        self._run, self._stage = weakref.ref(run), weakref.ref(stage)  # the run holds this object and outlives its loop
        # The real number, because a gate simulates others; sharded processes hold no copies that could diverge.
        self._world = 1 if run.shard != "none" else run.accelerator.num_processes
        self._names = {id(o): name for name, o in stage.optimizers.items()}
        self._seen: dict[str, Tensor] = {}
        self._hook: Any = None

    @property
    def run(self) -> "Run":
        return self._run()

    @property
    def stage(self) -> Stage:
        return self._stage()

    def __enter__(self) -> "Ranks":
        if self._world > 1:
            self._hook = register_optimizer_step_pre_hook(self._pre_step)
        return self

    def __exit__(self, *_) -> None:
        if self._hook:
            self._hook.remove()

    def due(self, step: int) -> bool:
        """Return whether to compare after this step, counted from 1. The same on every rank."""
        return self._world > 1 and (
            step - self.run.started <= EARLY or (self.run.rehearsal is None and step % self.run.cfg.run.log_every == 0)
        )

    def _pre_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        name = self._names.get(id(optimizer))
        if name is not None and name not in self._seen and self.due(self.run.step + 1):
            self._seen[name] = _norms([p.grad for g in optimizer.param_groups for p in g["params"]])

    def drift(self, step: int) -> str:
        """Return what differs between ranks in the weights or in this step's gradients, and why; empty if nothing does.
        It is a collective when due, so every rank calls it after every step."""
        if not self.due(step):
            return ""
        seen, self._seen = self._seen, {}
        for name, optimizer in self.stage.optimizers.items():
            params = [p for g in optimizer.param_groups for p in g["params"]]
            if not params:
                continue
            # A rank whose optimiser did not step has no norms.
            gradients = seen.get(name, torch.full((len(params),), torch.nan, device=self.run.device))
            eps = max(torch.finfo(p.dtype).eps for p in params)
            for kind, mine, limit in (("gradient", gradients, max(GRADIENTS, 8 * eps)),
                                      ("weight", _norms([p.detach() for p in params]), max(WEIGHTS, 8 * eps))):  # fmt: skip
                rank, difference = self._largest_difference(mine.to(self.run.device))
                if difference > limit:
                    return (
                        f"ranks diverge: {CAUSES[kind]}\n"
                        f"  measured:     after step {step} the {kind}s of optimiser '{name}' on rank {rank} differ by {difference:.1%} "
                        f"from those on rank 0 (needed: at most {limit:.1g})"
                    )
        return ""

    def _largest_difference(self, mine: Tensor) -> tuple[int, float]:
        """Return (the rank with the largest difference from rank 0, that relative difference); 0 if either has no
        norms."""
        every = [torch.empty_like(mine) for _ in range(self._world)]
        dist.all_gather(every, mine)
        first = every[0].double()
        difference = [((e.double() - first).norm() / first.norm().clamp_min(1e-30)).item() for e in every]
        difference = [a if a == a else 0.0 for a in difference]
        rank = max(range(len(difference)), key=difference.__getitem__)
        return rank, difference[rank]


def _norms(tensors: list[Tensor | None]) -> Tensor:
    """Return the norm of each tensor (len(tensors),) in fp32; 0 for None."""
    given = [t for t in tensors if t is not None]
    device = given[0].device if given else None
    found = iter(torch._foreach_norm([t.to_dense() if t.is_sparse else t for t in given]) if given else ())
    return torch.stack([torch.zeros((), device=device) if t is None else next(found).float() for t in tensors])
