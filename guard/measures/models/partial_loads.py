"""Finds states that a model got in part, or not at all: their names are not the model's."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from trainworthy.core.base.verdict import Fault

LIBRARY = (
    "transformers saves some models (ViT, BEiT, SegFormer, Mixtral) under older names, and a Trainer loads its checkpoints without renaming them "
    "(transformers#43701): load the best one by from_pretrained(trainer.state.best_model_checkpoint)"
)


def fault(
    module: nn.Module, own: Mapping[str, nn.Parameter], state: Mapping[str, Any], out: Any, trained: Collection[int]
) -> Fault | None:
    """Return what is wrong with a load of `state` with the result `out`. `own`: the model's parameters; `trained`: ids of those that an
    optimiser has moved."""
    missing, unexpected = (set(getattr(out, name, ())) for name in ("missing_keys", "unexpected_keys"))
    if own and missing >= own.keys() and len(state):
        found = f"{len(state)} entries, first {next(iter(state))}; the model has {next(iter(own))}"
        cause = "a prefix of the names differs (module., model., encoder.)"
        return f"load_state_dict(strict=False) loaded none of the parameters ({found})", cause
    learnt = [name for name, p in own.items() if id(p) in trained]
    lost = [name for name in learnt if name in missing]
    others = sorted(name for name in unexpected if isinstance(state.get(name), Tensor))
    shapes = Counter(tuple(state[name].shape) for name in others)
    if len(lost) < 2 or Counter(tuple(own[name].shape) for name in lost) - shapes:
        return None
    return (
        f"load_state_dict() left {len(lost)} of {len(learnt)} trained tensors as they were ({lost[0]}, ...), which the state has under other "
        f"names ({others[0]}, ...)",
        LIBRARY
        if type(module).__module__.startswith("transformers.")
        else "the names of what was saved are not those of the model",
    )
