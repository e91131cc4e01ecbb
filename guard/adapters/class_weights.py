"""Finds the class weights by which a trainer's loss is a mean, so that the loss of a batch is the sum over its samples."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from trainworthy.core.adapters.hosted import loss as loss_of
from trainworthy.core.recipe.stage import Data
from transformers import Trainer

FEW = 8  # samples from whose loss its class weights are read

EXACT = 1e-5


def class_weights(loss: Callable[[], Tensor], labels: Any) -> Tensor | None:
    """Return the class weights (C,) if `loss()` returns the weighted mean of one `cross_entropy` over these labels; else None.
    Labels below 0 are ignored."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    own = functional.cross_entropy

    def noted(input: Tensor, target: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        out = own(input, target, weight, *args, **kwargs)
        if isinstance(weight, Tensor) and not args and kwargs.get("reduction", "mean") == "mean":
            found.append((target, weight, out))
        return out

    watched = mock.patch.object(functional, "cross_entropy", noted)
    with watched, torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        value = loss()
        if len(found) != 1 or not isinstance(labels, Tensor):
            return None
        target, weight, mean = found[0]
        if target.is_floating_point() or abs(float(value) - float(mean)) > EXACT * abs(float(mean)):
            return None
        known = [x[x >= 0].flatten().sort().values.cpu() for x in (target, labels)]
        return weight.detach() if torch.equal(*known) else None
    return None


def of_trainer(trainer: Trainer, data: Data) -> Tensor | None:
    """Return the class weights (C,) of a trainer whose loss is such a mean."""
    batch = data.collate([data.get(i, None) for i in range(min(FEW, len(data)))])
    return class_weights(lambda: loss_of(trainer, trainer.model, batch), batch["inputs"].get("labels"))


def total_weight(weights: Tensor, labels: Tensor) -> Tensor:
    """Return the sum () of the class weights of all labels that are not ignored."""
    return weights.to(labels.device)[labels[labels >= 0]].sum()
