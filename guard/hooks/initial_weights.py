"""Remembers which weights were drawn at random: frozen ones that still are as they were drawn teach nothing."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.guard.hooks.parameters import named_parameters_of, parameters_of
from trainworthy.guard.hooks.patches import after

DRAWS = ("normal_", "uniform_")
VALUES = 16
SHARE = 0.6  # of a model's weights
HEADS = ("classifier", "score", "qa_outputs")
"""Last layers that models of transformers get for a new task."""


class Drawn:
    """Large tensors that were filled with random values, with the first of these values."""

    def __init__(self) -> None:
        self.tensors: dict[int, tuple[Any, Tensor]] = {}

    def note(self, x: Any) -> None:
        if isinstance(x, Tensor) and x.dim() >= 2 and x.device.type != "meta":
            self.tensors[id(x)] = (weakref.ref(x), x.detach().flatten()[:VALUES].clone())

    def as_drawn(self, p: Tensor) -> bool:
        """Return whether a parameter still has the values that it was drawn with."""
        ref, values = self.tensors.get(id(p), (lambda: None, p))
        return ref() is p and torch.equal(p.detach().flatten()[:VALUES].to(values), values)


def install(one: Drawn) -> None:
    """Watch the two methods of tensors that `torch.nn.init` calls."""
    for name in DRAWS:
        after(torch.Tensor, name, lambda _, x, *__, **___: one.note(x))


def split(model: nn.Module) -> bool:
    """Return whether each child is frozen or trains as a whole. Adapters that are spread over a frozen model are often tried on a random one."""
    children = [c for c in model.children() if next(parameters_of(c), None) is not None]
    if len(children) == 1:
        return split(children[0])
    return (
        all(len({p.requires_grad for p in parameters_of(c)}) == 1 for c in children)
        and next(parameters_of(model, recurse=False), None) is None
    )


def frozen_base(one: Drawn, roots: list[nn.Module], received: set[int]) -> tuple[str, str] | None:
    """Find a model that trains in part, and most of whose weights are frozen as they were drawn."""
    for model in roots:
        weights = [(name, p) for name, p in named_parameters_of(model) if p.dim() >= 2]
        as_drawn = [(name, p) for name, p in weights if not p.requires_grad and one.as_drawn(p)]
        share = sum(p.numel() for _, p in as_drawn) / max(1, sum(p.numel() for _, p in weights))
        if len(as_drawn) >= 2 and share > SHARE and any(id(p) in received for _, p in weights) and split(model):
            return (
                f"{share:.0%} of the weights of {type(model).__name__} are frozen, and are random: {len(as_drawn)} tensors, first {as_drawn[0][0]}",
                "the part that is frozen was never loaded: load its pretrained weights, or let it train",
            )
    return None


def frozen_head(one: Drawn, roots: list[nn.Module], received: set[int]) -> tuple[str, str] | None:
    """Find a model that trains in part, and whose last layer for a new task, or whose layer of the scores of tokens, is frozen as it was
    drawn."""
    for model in roots:
        weights = dict(named_parameters_of(model))
        heads = {n: p for n, p in weights.items() if set(n.split(".")) & set(HEADS)}
        if not any(p.requires_grad for p in heads.values()):
            drawn = [n for n, p in heads.items() if one.as_drawn(p)]
            if drawn and any(id(p) in received for p in weights.values()):
                return (
                    f"the last layer of {type(model).__name__} is frozen as it was drawn: {drawn[0]}",
                    "the head of a new task was frozen with the rest: let it train (LoRA: modules_to_save or task_type)",
                )
        scores = getattr(getattr(model, "get_output_embeddings", lambda: None)(), "weight", None)
        if not isinstance(scores, Tensor) or scores.requires_grad or not one.as_drawn(scores):
            continue
        own = [p for p in weights.values() if p.dim() >= 2 and p is not scores]
        if sum(id(p) in received for p in own) > SHARE * len(own):  # not one to which adapters were added
            return (
                f"{type(model).__name__} trains, and its layer of the scores of tokens is frozen as it was drawn",
                "the embeddings were frozen, and the output layer shares their weights (tie_word_embeddings)",
            )
    return None
