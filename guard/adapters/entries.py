"""The samples and batches of a script's data sets, as core's gates read them: entries by name, every draw seeded."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from trainworthy.core.base import seeds
from trainworthy.core.base.errors import UserError
from trainworthy.core.gates.checks.null_model import distinct
from trainworthy.core.recipe.stage import Data, Field
from trainworthy.guard.adapters.renaming import Names, like, match, named

EXAMPLES = 64  # samples whose values decide whether an entry is a mask

if TYPE_CHECKING:
    from trainworthy.guard.adapters.script_stage import Script


class MapStyle(Protocol):
    """What a data set must offer: `len()` and `[index]`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Samples(Data):
    """A torch data set for core: entries by name. On the training path, every generator that its code may use is
    seeded."""

    def __init__(
        self, dataset: "MapStyle", collate: Callable[[list], Any], *, fixed: bool, named_by_script: Collection[str] = ()
    ):
        self.dataset, self.own_collate, self._fixed = dataset, collate, fixed
        self.example, self.example_batch = dataset[0], collate([dataset[0], dataset[len(dataset) - 1]])
        self.across = across(self.example_batch, lambda: collate([dataset[0], dataset[len(dataset) - 1], dataset[0]]))
        self.names: Names = match(dataset, collate, self.example_batch, named_by_script)
        self.fields = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        if generator is not None:
            seeds.seed_all(generator.initial_seed())
        elif self._fixed:  # augmented data have no evaluation path, so use the same draws every time
            seeds.seed_all(seeds.derive("fixed", index))
        return self.names.renamed(named(self.dataset[index]))

    def row(self, sample: dict[str, Any]) -> Any:
        """Return a sample as the script's own data set does."""
        return like(self.names.original(sample), self.example)

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return self.entries(self.own_collate([self.row(s) for s in samples]))

    def entries(self, batch: Any) -> dict[str, Any]:
        """Return the entries of a batch of the script by name, with samples along the first axis."""
        return {k: v.movedim(self.across[k], 0) if k in self.across else v for k, v in named(batch).items()}

    def batch(self, named: dict[str, Any]) -> Any:
        """Return a batch as the script's own loader does."""
        back = {k: v.movedim(0, self.across[k]) if k in self.across else v for k, v in named.items()}
        return like(back, self.example_batch)


def across(two: Any, three: Callable[[], Any]) -> dict[str, int]:
    """Return the axis of the samples for each entry whose first axis is another one (time first, as `pad_sequence` makes it by default), from
    a batch of two samples and one of three."""
    turned = {k: v for k, v in named(two).items() if isinstance(v, Tensor) and v.dim() > 1 and len(v) != 2}
    more, found = named(three()) if turned else {}, {}
    for key, value in turned.items():
        sizes = getattr(more.get(key), "shape", ())
        axes = [a for a, pair in enumerate(zip(value.shape, sizes, strict=False)) if pair == (2, 3)]
        if axes and len(sizes) == value.dim():
            found[key] = axes[0]
    return found


class Plain(Dataset):
    """The evaluation path of samples that a gate chose, as the script's own data set returns them."""

    def __init__(self, data: Data, row: Callable[[dict[str, Any]], Any]):
        self.data, self.row = data, row

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.row(self.data.get(index, None))


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
    named_by_script = {str(script.target), *map(str, script.fields or ())}
    data = Samples(dataset, collate, fixed=fixed, named_by_script=named_by_script)
    for key, value in data.names.renamed(named(data.example)).items():
        plain = isinstance(value, (Tensor, np.ndarray, np.generic, int, float, str))
        if key in named(data.example_batch) and not plain:
            raise UserError(f"entry '{key}' of a sample cannot be counted", got=type(value).__name__,
                            needed="a tensor, an array, a number or a string: convert it in the data set")  # fmt: skip
    return data


def fields(script: "Script", data: Samples) -> dict[str, Field]:
    """Return the script's own description of each entry, or one made from `target` and `classes`.

    Raises:
        UserError: the target, or an entry of `script.fields`, is in no sample or not in the batch.
    """
    sample, batch = data.names.renamed(named(data.example)), data.entries(data.example_batch)
    if script.fields is not None:
        found = {data.names.find(key): field for key, field in script.fields.items()}
        if unknown := [key for key in found if key not in sample]:
            raise UserError(f"fields= names '{unknown[0]}', which is no entry of a sample", needed=", ".join(sample))
        if lost := [key for key in found if key not in batch]:
            raise _dropped(lost[0], batch)
        return found
    names = list(sample)
    given = "target" if script.target is None and names == ["input", "target"] else script.target
    given = 1 if given is None and len(names) == 2 and not isinstance(data.example, Mapping) else given
    target = data.names.find(given)
    if len(names) > 1 and target not in names:
        raise UserError("which entry of a sample must be predicted?", got=f"target={script.target!r}",
                        needed="one of: " + ", ".join(names))  # fmt: skip
    if target in names and target not in batch:
        raise _dropped(target, batch)
    reached = [n for n in names if n in batch]
    masks = extents(script.count, data, batch, [n for n in reached if n != target], target)
    return {n: Field("target", classes=classes(script)) if n == target else Field("extent" if n in masks else "input")
            for n in reached}  # fmt: skip


def _dropped(entry: str, batch: dict[str, Any]) -> UserError:
    return UserError(f"collate drops '{entry}': no entry of the batch depends on it", got=f"batches of {', '.join(batch)}",
                     needed="a batch with this entry, or another target=")  # fmt: skip


def extents(
    count: Callable[[Any], float] | None, data: Samples, batch: dict[str, Any], others: list[str], target: str
) -> list[str]:
    """Return the entries that only say what is scored (a mask of the targets, a length): gates do not blank them, and ask for no
    gradient of them. `others`: all entries but the target; at least one of them is left as input.

    An entry is one if it holds only 0 and 1 in the shape of a target that has axes, or if `count` depends on it and it is a number, holds
    only 0 and 1, or is a weight for each place of the target."""
    sample, found = data.get(0, None), []
    wanted = None if isinstance(sample.get(target, ""), str) else torch.as_tensor(sample[target]).shape
    for name in others if len(others) > 1 else ():
        if isinstance(sample[name], str) or not isinstance(batch[name], Tensor):
            continue
        value = torch.as_tensor(sample[name])
        same, flags = value.shape == wanted, _is_flags(value) and _is_flags(batch[name])
        weights = same and value.is_floating_point()
        may_count = flags or weights or not value.ndim
        if (flags and same and value.ndim) or (may_count and _counts(count, data, batch, name)):
            some = data.representative(min(len(data), EXAMPLES)) if flags and value.ndim else []
            if all(_is_flags(torch.as_tensor(data.get(i, None)[name])) for i in some):
                found.append(name)
    return found if len(found) < len(others) else []


def _is_flags(value: Tensor) -> bool:
    return bool(((value == 0) | (value == 1)).all())


def _counts(count: Callable[[Any], float] | None, data: Samples, batch: dict[str, Any], name: str) -> bool:
    """Return whether `count` depends on an entry of the batch."""
    if count is None:
        return False
    without = {**batch, name: torch.zeros_like(batch[name])}
    try:
        return float(count(data.batch(without))) != float(count(data.batch(batch)))
    except (ArithmeticError, ValueError, RuntimeError):
        return True  # without it there is nothing to count


def classes(script: "Script") -> list[str] | None:
    names = range(script.classes) if isinstance(script.classes, int) else script.classes
    return None if names is None else [str(name) for name in names]


def chance(data: Samples) -> float:
    """Measure chance level from the targets if the number of classes is not declared."""
    found = distinct(data, data.representative(min(len(data), 256)))
    return 1 / len(found[1]) if found else 0.0
