"""Entries of samples and batches by name, where a collate function gives a batch other names than its samples have."""

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base import seeds

OTHERS = 4  # samples whose entries are put into the first one


@dataclass
class Names:
    """{entry of a sample: entry of the batch that is made from it}, where these differ. Gates use the batch's name for both."""

    samples: list[str]
    """Entries of a sample as the data set names them, in order."""
    batch: dict[str, str] = field(default_factory=dict)

    def find(self, key: str | int | None) -> str:
        """Return the name that gates use for an entry given by its name in the batch or in a sample, or by its position in a sample."""
        if key in self.batch.values():
            return str(key)
        if str(key) not in self.samples and str(key).isdigit() and int(str(key)) < len(self.samples):
            key = self.samples[int(str(key))]
        return self.batch.get(str(key), str(key))

    def renamed(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {self.batch.get(k, k): v for k, v in sample.items()}

    def original(self, sample: dict[str, Any]) -> dict[str, Any]:
        back = {new: old for old, new in self.batch.items()}
        return {back.get(k, k): v for k, v in sample.items()}


def named(entries: Any) -> dict[str, Any]:
    """Return the entries of a sample or batch by name: a mapping's own names, `input` and `target` of a pair, else
    positions."""
    if isinstance(entries, Mapping):
        return dict(entries)
    if not isinstance(entries, (tuple, list)):
        return {"input": entries}
    return dict(zip(("input", "target") if len(entries) == 2 else map(str, range(len(entries))), entries, strict=True))


def match(dataset: Any, collate: Callable[[list], Any], batch: Any, named_by_script: Collection[str] = ()) -> Names:
    """Find out which entry of a batch is made from which entry of a sample, by exchanging one entry at a time with another sample's. Several
    may be (a decoder's input and its target): an entry of the batch in `named_by_script` comes first, then one that equals the sample's."""
    first = dataset[0]
    known = Names(list(named(first)))
    lost = [k for k in known.samples if k not in named(batch)]
    free = [k for k in named(batch) if k not in known.samples]
    if not lost or not free or not isinstance(first, (Mapping, tuple, list)):
        return known
    others = [dataset[i * (len(dataset) - 1) // OTHERS] for i in range(1, OTHERS + 1)]
    for key in lost:
        made = [name for name in _changed(first, others, key, collate) if name in free]
        equal = [name for name in made or free if _equal(named(collate([first])).get(name), named(first)[key])]
        if chosen := ([name for name in made if name in named_by_script] or equal or made)[:1]:
            known.batch[key] = chosen[0]
            free.remove(chosen[0])
    return known


def _changed(first: Any, others: list, key: str, collate: Callable[[list], Any]) -> list[str]:
    """Return the entries of a batch of one sample that change with one entry of the sample."""

    def batch(sample: Any) -> dict[str, Any]:
        seeds.seed_all(0)  # a collate that masks tokens draws at random
        return named(collate([sample]))

    own, found = batch(first), set()
    for other in others:
        with contextlib.suppress(Exception):  # entries that belong together, such as tokens and their tags
            changed = batch(like({**named(first), key: named(other)[key]}, first))
            found |= {k for k in own if not _same(own[k], changed.get(k))}
    return [k for k in own if k in found]


def like(entries: dict[str, Any], example: Any) -> Any:
    """Return the entries in the shape of `example`, the inverse of `named`."""
    if not isinstance(example, (Mapping, tuple, list)):
        return entries["input"]
    make: Any = type(example)
    if isinstance(example, Mapping):
        return make(entries)
    return make(*entries.values()) if hasattr(make, "_fields") else make(entries.values())


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def _equal(batch: Any, value: Any) -> bool:
    """Return whether a batch of one holds exactly this entry of its sample."""
    try:
        value = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):  # a text, an object
        return False
    if not isinstance(batch, Tensor) or not batch.ndim or len(batch) != 1:
        return False
    return batch[0].shape == value.shape and bool((batch[0] == value).all())
