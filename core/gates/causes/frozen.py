"""Finds what wrote to frozen tensors: an optimiser, batch norm in train mode, or the loop, which copies trained weights there."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from trainworthy.core.base.dtensor import local

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
Content = tuple[int, int]  # number of entries, fingerprint


def explain_moved(
    moved: Mapping[str, Tensor], now: Mapping[str, Tensor], stepped: set[int], earlier: Mapping[Content, str]
) -> str:
    """Return what changed the frozen tensors `moved`; empty if there are none.

    `now`: their fingerprints () after the rehearsal; `stepped`: addresses of all tensors that an optimiser has stepped; `earlier`: contents that
    trained parameters had after an optimiser's step -> the parameter's name.
    """
    if not moved:
        return ""
    some = f"of {len(moved)} frozen tensors that moved"
    if n := sum(local(t).data_ptr() in stepped for t in moved.values()):
        return f"an optimiser steps {n} {some}: it was built over more than the part that trains"
    if all(name.rpartition(".")[2] in STATISTICS for name in moved):
        return f"batch norm of a frozen part runs in train mode: all {len(moved)} tensors that moved are its statistics"
    pairs = [(name, earlier.get((t.numel(), int(now[name])))) for name, t in moved.items()]
    copied = [(name, source) for name, source in pairs if source]
    if 2 * len(copied) > len(moved):
        return (f"the loop copies trained weights into frozen ones: {len(copied)} {some} hold what a trained one held after a step "
                f"({copied[0][0]}: {copied[0][1]}); a reference that must not follow is copied once, before the first step")  # fmt: skip
    return f"the loop, a hook or an average writes to frozen tensors: no optimiser steps any {some}"


def limits(parameters: Mapping[str, Tensor]) -> str:
    """Return how the frozen part of a model can be the reason why its samples are not memorised; empty if less than half is frozen.
    `parameters`: all of the model's by name."""
    kept = {name: p.numel() for name, p in parameters.items() if not p.requires_grad}
    trained = {name: p.numel() for name, p in parameters.items() if p.requires_grad}
    total = sum(kept.values()) + sum(trained.values())
    if 2 * sum(kept.values()) < total or not trained:
        return ""
    learns, rest = (", ".join(_parts(found)) for found in (trained, kept))
    return (f"only {sum(trained.values()) / total:.1%} of the weights train ({learns}), and the frozen rest ({rest}) cannot give these answers: "
            "it never learnt such texts or inputs, or its weights were not loaded")  # fmt: skip


def _parts(sizes: Mapping[str, int]) -> list[str]:
    """Return the largest parts of a model, by the first words of its parameters' names."""
    found: dict[str, int] = {}
    for name, size in sizes.items():
        found[name.split(".")[0]] = found.get(name.split(".")[0], 0) + size
    return sorted(found, key=lambda part: -found[part])[:3]


def contents(history: Mapping[str, Sequence[Tensor]], parameters: Mapping[str, Tensor]) -> dict[Content, str]:
    """Return what trained parameters held after each optimiser step -> their names. `history`: fingerprints () by name."""
    return {(parameters[n].numel(), int(one)): n for n, many in history.items() if n in parameters for one in many}
