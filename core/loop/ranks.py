"""Do all processes train one model? Each gets the same gradient, or each trains a model of its own and only rank 0's is kept.

Compared are norms: of every gradient tensor as its optimiser gets it, and of every weight. Where gradients are exchanged they are
equal to the last bit on machines of one kind; on others they differ by rounding.
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

EARLY = 3  # steps after which they are compared each time; then as often as metrics are read
GRADIENTS, WEIGHTS = (
    1e-3,
    1e-4,
)  # relative differences that no rounding makes; of bf16 gradients, eight of its roundings
CAUSES = {
    "gradient": "gradients are not exchanged\n"
    "  likely cause: the loop calls the bare model and not the wrapped one, or a library wraps another copy of it\n"
    "  next:         make updates by run.update(stage, ...), which wraps the loss, or train with one process",
    "weight": "they hold other weights, though gradients are exchanged\n"
    "  likely cause: they began with others (a random start without the run's seed, a file that one rank alone has), or something\n"
    "                beside the optimiser changes them on one rank\n"
    "  next:         build the model from the run's seed alone; average over ranks what a loop changes by itself",
}


class Ranks:
    """Of one stage's loop: a context in which optimiser steps are watched."""

    def __init__(self, run: "Run", stage: Stage):
        self._run, self._stage = weakref.ref(run), weakref.ref(stage)  # the run holds this, and outlives its loop
        self._world = run.accelerator.num_processes  # the real ones: a gate plays others
        self._names = {id(o): name for name, o in stage.optimizers.items()}
        self._seen: dict[str, Tensor] = {}
        self._hook: Any = None

    @property
    def run(self) -> "Run":
        """The run whose loop this watches."""
        return self._run()

    @property
    def stage(self) -> Stage:
        """What that loop trains."""
        return self._stage()

    def __enter__(self) -> "Ranks":
        if self._world > 1:
            self._hook = register_optimizer_step_pre_hook(self._pre_step)
        return self

    def __exit__(self, *_) -> None:
        if self._hook:
            self._hook.remove()

    def due(self, step: int) -> bool:
        """Are they compared after this step, counted from 1? The same on every rank."""
        return self._world > 1 and (
            step - self.run.started <= EARLY or (self.run.plan is None and step % self.run.cfg.run.log_every == 0)
        )

    def _pre_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        name = self._names.get(id(optimizer))
        if name is not None and name not in self._seen and self.due(self.run.step + 1):
            self._seen[name] = _norms([p.grad for g in optimizer.param_groups for p in g["params"]])

    def drift(self, step: int) -> str:
        """Empty if the weights, and the gradients of this step, are the same on all ranks; else what differs and why. A collective
        where it is due: every rank calls it after every step."""
        if not self.due(step):
            return ""
        seen, self._seen = self._seen, {}
        for name, optimizer in self.stage.optimizers.items():
            params = [p for g in optimizer.param_groups for p in g["params"]]
            if not params:
                continue
            # A rank whose optimiser did not step has nothing to show.
            gradients = seen.get(name, torch.full((len(params),), torch.nan, device=self.run.device))
            eps = max(torch.finfo(p.dtype).eps for p in params)
            for kind, mine, limit in (("gradient", gradients, max(GRADIENTS, 8 * eps)),
                                      ("weight", _norms([p.detach() for p in params]), max(WEIGHTS, 8 * eps))):  # fmt: skip
                rank, apart = self._apart(mine.to(self.run.device))
                if apart > limit:
                    return (
                        f"ranks drift apart: {CAUSES[kind]}\n"
                        f"  measured:     after step {step} the {kind}s of optimiser '{name}' on rank {rank} are {apart:.1%} "
                        f"from those on rank 0 (needed: at most {limit:.1g})"
                    )
        return ""

    def _apart(self, mine: Tensor) -> tuple[int, float]:
        """(the rank that is furthest from rank 0, how far relative to that); 0 where either has nothing to show."""
        every = [torch.empty_like(mine) for _ in range(self._world)]
        dist.all_gather(every, mine)
        first = every[0].double()
        apart = [((e.double() - first).norm() / first.norm().clamp_min(1e-30)).item() for e in every]
        apart = [a if a == a else 0.0 for a in apart]
        rank = max(range(len(apart)), key=apart.__getitem__)
        return rank, apart[rank]


def _norms(tensors: list[Tensor | None]) -> Tensor:
    """The norm of each (len(tensors),) fp32; 0 where there is none."""
    given = [t for t in tensors if t is not None]
    device = given[0].device if given else None
    found = iter(torch._foreach_norm([t.to_dense() if t.is_sparse else t for t in given]) if given else ())
    return torch.stack([torch.zeros((), device=device) if t is None else next(found).float() for t in tensors])
