"""The learning rate of a `Trainer` over its whole run, found without training: its scheduler is stepped and put back."""

import copy
import warnings

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from trainworthy.core.base.verdict import Fault, Skip
from transformers import Trainer, get_scheduler

POINTS, MOST = 1000, 50_000  # of a schedule by a formula; steps of any other
FEWEST = 10  # steps of a run whose schedule says anything
LATEST = 0.6  # share of the run until the peak; schedules in use: up to 0.45
LOW, LONG = 1e-3, 0.5  # of the peak; share of the run in which a schedule may be below it


def over_the_run(trainer: Trainer, epochs: float) -> tuple[list[float], int]:
    """Return (rates of the first group at evenly spaced steps, relative to the configured one if the trainer makes the schedule; number of
    steps). Raises Skip."""
    if type(trainer).create_scheduler is not Trainer.create_scheduler:
        raise Skip("the trainer makes its scheduler by a method of its own")
    args = copy.copy(trainer.args)
    args.num_train_epochs = epochs
    total = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
    if total < FEWEST:
        raise Skip(f"the run has {total} steps")
    if trainer.lr_scheduler is None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            args.get_warmup_steps(total),
            total,
            args.lr_scheduler_kwargs,
        )
    else:
        scheduler = trainer.lr_scheduler
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise Skip("its scheduler reads what the evaluation measures")
    if isinstance(scheduler, LambdaLR):
        points = min(POINTS, total)
        return [scheduler.lr_lambdas[0](i * total // points) for i in range(points)], total
    if total > MOST:
        raise Skip(f"the run has more than {MOST:,} steps")
    return _stepped(scheduler, total), total


def _stepped(scheduler: LRScheduler, total: int) -> list[float]:
    state, groups = copy.deepcopy(scheduler.state_dict()), scheduler.optimizer.param_groups
    before = [{k: v for k, v in g.items() if k != "params"} for g in groups]
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch expects a step of the optimiser before each
        try:
            for _ in range(total):
                rates.append(float(groups[0]["lr"]))
                type(scheduler).step(scheduler)  # the instance's own may be held at a gate's rate
        except ValueError as error:  # OneCycleLR
            raise Skip(f"the scheduler raises after {len(rates)} of {total} steps: {error}"[:300]) from None
        finally:
            scheduler.load_state_dict(state)
            for group, kept in zip(groups, before, strict=True):
                group.update(kept)
    return rates


def fault(rates: list[float], total: int, *, own: bool) -> Fault | None:
    """Return (measured, cause) of a rate that never reaches its peak, or is next to nothing for most of the run. `own`: the trainer made
    the schedule, so that 1 is the configured rate."""
    top = max(rates)
    at, low = rates.index(top) / len(rates), sum(r < LOW * top for r in rates) / len(rates)
    if (own and top < LATEST) or at > LATEST:
        reached = f"{top:.0%} of the configured rate" if own else f"{top:.3g}"
        return (f"in {total:,} steps the rate rises until step {round(at * total):,}, to {reached}",
                "the warm-up is longer than the run (warmup_steps counts optimiser steps of this run, not of a longer one)")  # fmt: skip
    if low > LONG:
        first = (max(i for i, r in enumerate(rates) if r >= LOW * top) + 1) % len(rates)  # 0: it rises again
        return (f"in {low:.0%} of {total:,} steps the rate is below {LOW:.1%} of its peak, from step {round(first / len(rates) * total):,} on",
                "the schedule counts epochs, and the trainer steps it after every batch")  # fmt: skip
    return None
