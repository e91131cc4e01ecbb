"""A Loop's batches as those of a DataLoader, and its training and evaluation in turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset
from trainworthy.guard.adapters.loop_observer import Watcher
from trainworthy.guard.rehearsals.control import Control

if TYPE_CHECKING:
    from trainworthy.guard.adapters.loop import Loop


class _Stream(IterableDataset):
    """Batches of anything that iterates, as they are."""

    def __init__(self, source: Any):
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        again = callable(self.source) and not hasattr(self.source, "__iter__")
        return iter(self.source() if again else self.source)


class _Sized(_Stream):
    def __len__(self) -> int:
        return len(self.source)


def _same(batch: Any) -> Any:
    return batch


class Feed(DataLoader):
    """Anything that iterates over batches, as a DataLoader: the events of a loader are then those of its batches."""

    def __init__(self, source: Any):
        super().__init__((_Sized if hasattr(source, "__len__") else _Stream)(source), batch_size=None, collate_fn=_same)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["dataset"].source, name)


def feed(source: Any) -> DataLoader | None:
    """Return the batches that the loop gets."""
    return source if source is None or isinstance(source, DataLoader) else Feed(source)


def drive(loop: Loop, seen: Watcher, control: Control) -> str:
    """Train and evaluate in turns until the rehearsal has seen enough; return why it ended."""
    batches, held_out = feed(loop.batches), feed(loop.eval_batches)
    once = isinstance(loop.batches, Iterator)
    watch, epochs = control.plan.name == "watch", 0
    while True:
        before = seen.backwards
        loop.run(*([] if batches is None else [batches]))
        epochs += 1
        if seen.backwards == before:
            return "the loop makes no more backward()"
        if loop.evaluate is not None:
            score = loop.evaluate(*([] if held_out is None else [held_out]))
            seen.scores += [] if score is None else [float(score)]
        if control.enough(seen) and (epochs >= 3 or not watch or (loop.evaluate is None and epochs >= 2)):
            return "enough"
        last = next((p for p in reversed(seen.passes) if p.loader is batches), None)
        if once and last is not None and last.ended and not last.was_cut:
            return "its batches are used up"
