"""Whether a script's own loop computes the loss that the script declares, so that their gradients can be compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.loop.run import Rehearsal
from trainworthy.guard.adapters.script_stage import _ScriptStage
from trainworthy.guard.hooks.trees import tensors

SAMPLES = 16


def other_loss(context: GateContext) -> str:
    """Return why `train_loop` has other gradients than `loss` by intention: it gives the model other inputs (mixup, noise, an attack), or
    calls it more often (SAM, consistency). Empty: it does not."""
    _, stage = context.build(Rehearsal(steps=1))
    if not isinstance(stage, _ScriptStage) or stage.script.train_loop is None:
        return ""
    script, data = stage.script, stage.samples("train")
    some = data.representative(min(SAMPLES, len(data)))
    batch = data.batch(data.collate([data.get(i, None) for i in some]))
    script.model.train()
    with inputs(script.model) as declared:
        script.loss(script.model, batch)
    with inputs(script.model) as own:
        stage.script.train_loop(script.model, script.optimizer, [batch] * script.accumulate)
    if not declared or not own:
        return ""
    if any(not any(_equal(a, b) for b in declared) for a in own):
        return (
            "train_loop gives the model other inputs than loss= does (mixup, noise, an attack): their gradients differ"
        )
    if len(own) > (calls := len(declared) * script.accumulate):
        return f"train_loop calls the model {len(own)} times for a step, loss= {calls}: their gradients differ"
    return ""


@contextmanager
def inputs(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Record what the model is called with where gradients are on."""
    seen: list[list[Tensor]] = []

    def note(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            seen.append([x.detach().clone() for x in tensors((args, kwargs))])

    with model.register_forward_pre_hook(note, with_kwargs=True):
        yield seen


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))
