"""The samples and batches of a script's data sets, as core's gates read them: entries by name, every draw seeded."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from trainworthy.core.base import seeds
from trainworthy.core.base.errors import UserError
from trainworthy.core.gates.checks.null_model import distinct
from trainworthy.core.recipe.stage import Data, Field

if TYPE_CHECKING:
    from trainworthy.core.adapters.script_stage import Script


class MapStyle(Protocol):
    """What a data set must offer: `len()` and `[index]`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Samples(Data):
    """A torch data set for core: entries by name. On the training path, every generator that its code may use is
    seeded."""

    def __init__(self, dataset: "MapStyle", collate: Callable[[list], Any], *, fixed: bool):
        self.dataset, self.own_collate, self._fixed = dataset, collate, fixed
        self.example, self.example_batch = dataset[0], collate([dataset[0], dataset[len(dataset) - 1]])
        self.fields = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        if generator is not None:
            seeds.seed_all(generator.initial_seed())
        elif self._fixed:  # augmented data have no evaluation path, so use the same draws every time
            seeds.seed_all(seeds.derive("fixed", index))
        return named(self.dataset[index])

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return named(self.own_collate([like(s, self.example) for s in samples]))

    def batch(self, named: dict[str, Any]) -> Any:
        """Return a batch as the script's own loader does."""
        return like(named, self.example_batch)


class Plain(Dataset):
    """The evaluation path of samples that a gate chose, as the script's own data set returns them."""

    def __init__(self, data: Data, like: Any):
        self.data, self.like = data, like

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return like(self.data.get(index, None), self.like)


def samples(script: "Script", source: Dataset | DataLoader, *, fixed: bool) -> Samples:
    collate = script.collate or default_collate
    if isinstance(source, DataLoader):
        collate = script.collate or source.collate_fn
        source = source.dataset
    if isinstance(source, IterableDataset) or not callable(getattr(source, "__len__", None)):
        raise UserError("a data set must be map-style", got=type(source).__name__, needed="len() and [index]")
    dataset = cast(MapStyle, source)
    if len(dataset) < 2:
        raise UserError("a data set is too small", got=f"{len(dataset)} sample(s)", needed="2 or more")
    data = Samples(dataset, collate, fixed=fixed)
    for key, value in named(data.example).items():
        if not isinstance(value, (Tensor, np.ndarray, np.generic, int, float, str)):
            raise UserError(f"entry '{key}' of a sample cannot be counted", got=type(value).__name__,
                            needed="a tensor, an array, a number or a string: convert it in the data set")  # fmt: skip
    if lost := named(data.example).keys() - named(data.example_batch).keys():
        raise UserError("collate renames entries", got=f"batches of {', '.join(named(data.example_batch))}",
                        needed=f"{', '.join(sorted(lost))} under the same name as in a sample")  # fmt: skip
    return data


def fields(script: "Script", data: Samples) -> dict[str, Field]:
    if script.fields is not None:
        return script.fields
    names = list(named(data.example))
    target = "target" if script.target is None and names == ["input", "target"] else script.target
    target = ("input", "target")[target] if isinstance(target, int) and len(names) == 2 else target
    if len(names) > 1 and str(target) not in names:
        raise UserError("which entry of a sample must be predicted?", got=f"target={script.target!r}",
                        needed="one of: " + ", ".join(names))  # fmt: skip
    return {n: Field("target", classes=classes(script)) if n == str(target) else Field("input") for n in names}


def classes(script: "Script") -> list[str] | None:
    names = range(script.classes) if isinstance(script.classes, int) else script.classes
    return None if names is None else [str(name) for name in names]


def named(entries: Any) -> dict[str, Any]:
    """Return the entries of a sample or batch by name: a mapping's own names, `input` and `target` of a pair, else
    positions."""
    if isinstance(entries, Mapping):
        return dict(entries)
    if not isinstance(entries, (tuple, list)):
        return {"input": entries}
    return dict(zip(("input", "target") if len(entries) == 2 else map(str, range(len(entries))), entries, strict=True))


def like(named: dict[str, Any], example: Any) -> Any:
    """Return the entries in the shape of `example`, the inverse of `_named`."""
    if isinstance(example, Mapping):
        return cast(Any, type(example))(named)
    if not isinstance(example, (tuple, list)):
        return named["input"]
    make = type(example)
    return make(*named.values()) if hasattr(make, "_fields") else make(named.values())


def chance(data: Samples) -> float:
    """Measure chance level from the targets if the number of classes is not declared."""
    found = distinct(data, data.representative(min(len(data), 256)))
    return 1 / len(found[1]) if found else 0.0
