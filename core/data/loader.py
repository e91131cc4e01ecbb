"""Decides which samples form which step. It is a pure function of the seed, so workers, processes, micro-batches and
resumes cannot change it.

Epochs are concatenated and cut into global batches. Every epoch holds each sample once, every step is full, and no
smaller last batch gets more weight. Step s of a run with batch size G uses positions s*G .. (s+1)*G of that stream.
"""

import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset
from trainworthy.core.base import config, seeds
from trainworthy.core.base.errors import SIGNALS, Stop, UserError
from trainworthy.core.recipe.stage import Data

Key = tuple[int, int]  # (epoch, index); epoch -1 is the evaluation path
Item = TypeVar("Item")
Result = TypeVar("Result")


SOCKET_PATH = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""Longest path of the temporary folder, in bytes, below which multiprocessing can make its sockets."""


@dataclass
class Stream:
    """The endless stream of (epoch, index) of one training set."""

    n: int
    seed: int
    fixed: bool = False
    """For gates: use the same draws for a sample in every epoch (its key has epoch 0)."""
    order: Callable[..., torch.Tensor] | None = None
    """(seed, "order", epoch) -> permutation (n,); default: a uniformly random one."""
    _orders: dict[int, list[int]] = field(default_factory=dict)

    def keys(self, start: int, stop: int) -> list[Key]:
        """Return (epoch, index) at positions start .. stop."""
        found: list[Key] = []
        while start < stop:
            epoch, i = divmod(start, self.n)
            if epoch not in self._orders:
                self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}  # keep at most two epochs
                order = (self.order or partial(seeds.permutation, self.n))(self.seed, "order", epoch).tolist()
                if len(order) != self.n:
                    raise UserError("the order of an epoch has another length than the data set", got=len(order),
                                    needed=f"{self.n} places", cause="order() of the training set")  # fmt: skip
                self._orders[epoch] = order
            part = self._orders[epoch][i : i + stop - start]
            found += zip([0 if self.fixed else epoch] * len(part), part, strict=True)
            start += len(part)
        return found


def cut(n: int, parts: int) -> list[int]:
    """Divide `n` into `parts` sizes, as equal as possible: 8 into 3 is [3, 3, 2]."""
    return [n // parts + (i < n % parts) for i in range(parts)]


def micro_batches(keys: list[Key], *, rank: int, world: int, sizes: list[int] | int) -> list[list[Key]]:
    """Return this rank's micro-batches of one global batch: rank r takes every world-th sample and divides them."""
    mine = keys[rank::world]
    sizes = cut(len(mine), sizes) if isinstance(sizes, int) else sizes
    out, start = [], 0
    for size in sizes:
        out.append(mine[start : start + size])
        start += size
    return [m for m in out if m]


@dataclass
class Keyed(Dataset):
    """A torch Dataset over keys. It seeds each sample's draws from (seed, epoch, index), in whichever process it
    runs."""

    data: Data
    seed: int

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: Key) -> dict:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[Key]) -> list[dict]:
        get = self.data.get
        return [get(key[1], self.draws(key)) for key in keys]

    def draws(self, key: Key) -> torch.Generator | None:
        """Seed every global generator for one sample and return its generator; None on the evaluation path."""
        epoch, index = key
        return None if epoch < 0 else seeds.seed_sample(self.seed, "sample", epoch, index)


class _Worker(Keyed):
    """Data set for torch's loader: collated batches. A planned stop is returned as a value, since torch would wrap it
    in a traceback."""

    def __getitems__(self, keys: list[Key]) -> Any:
        try:
            return self.data.collate(super().__getitems__(keys))
        except Stop as stop:
            return stop


def ahead(read: Callable[[Item], Result], items: Iterable[Item], *, threads: int, window: int) -> Iterator[Result]:
    """Yield `read(item)` for every item, in order, read ahead by `threads` threads. At most `window` results are being
    read or waiting; each result taken starts another read. An exception in `read` is raised at its item's position."""
    pool, under_way = ThreadPoolExecutor(threads, "read"), deque[Future]()
    try:
        for item in items:
            if len(under_way) == window:
                yield under_way.popleft().result()
            under_way.append(pool.submit(read, item))
        while under_way:
            yield under_way.popleft().result()
    finally:  # do not wait for reads that nobody will take
        pool.shutdown(wait=False, cancel_futures=True)


def batches(data: Data, keys: Iterable[list[Key]], *, seed: int, settings: config.Loader,
            device: torch.device) -> Iterator[dict]:  # fmt: skip
    """Yield one collated batch on `device` for each list of keys in `keys`, read ahead by threads or workers."""
    threaded = settings.threads and not settings.workers
    for batch in (_by_threads if threaded else _by_workers)(data, keys, seed, settings, device):
        if isinstance(batch, Stop):
            raise batch
        yield to_device(batch, device)


def _by_threads(data: Data, keys: Iterable[list[Key]], seed: int, settings: config.Loader,
                _: torch.device) -> Iterator[dict]:  # fmt: skip
    """Only `data.read` runs in threads. The main thread makes the sample, because its draws seed torch's global
    generator, which all threads share."""
    keyed, sizes, samples = Keyed(data, seed), deque[int](), []

    def each() -> Iterator[Key]:
        for batch in keys:
            sizes.append(len(batch))
            yield from batch

    def read(key: Key) -> tuple:
        return key, data.read(key[1])

    for key, got in ahead(read, each(), threads=settings.threads, window=settings.window):
        samples.append(data.make(key[1], got, keyed.draws(key)))
        if len(samples) == sizes[0]:
            sizes.popleft()
            yield data.collate(samples)
            samples = []


def _by_workers(data: Data, keys: Iterable[list[Key]], seed: int, settings: config.Loader,
                device: torch.device) -> DataLoader:  # fmt: skip
    workers = settings.workers
    if workers and len(os.fsencode(tempfile.gettempdir())) > SOCKET_PATH:
        raise UserError(
            "worker processes cannot hand over batches: the folder for temporary files has too long a path",
            got=tempfile.gettempdir(),
            needed=f"at most {SOCKET_PATH} bytes (torch puts sockets there, whose paths the system limits)",
            next="TMPDIR=/tmp, or --loader.workers 0",
        )
    return DataLoader(
        _Worker(data, seed),
        batch_sampler=keys,
        collate_fn=as_it_is,
        num_workers=workers,
        prefetch_factor=settings.prefetch if workers else None,
        pin_memory=settings.pin_memory and device.type == "cuda",
        # A recipe run by path cannot be imported in a fresh process, so workers are forked if the system supports it.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        worker_init_fn=start_worker if workers else None,
        generator=torch.Generator().manual_seed(0),  # keeps torch's base seed of workers off the global generator
    )


def as_it_is(batch: Any) -> Any:
    return batch


def start_worker(_: int) -> None:
    """Use one thread in a worker and ignore signals to the process group: the trainer handles them and ends its
    workers."""
    torch.set_num_threads(1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def to_device(batch, device: torch.device):
    """Return a nested batch with its tensors on `device`; copies from pinned memory do not block."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {k: to_device(v, device) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(v, device) for v in batch)
    return batch
