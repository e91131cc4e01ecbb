"""Samples that wait for a disk: read ahead by threads, in a window that slides. The same samples in the same order, no more of
them in hand than the window holds, read while the training computes."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from trainworthy.core.base.config import Loader
from trainworthy.core.base.errors import UserError
from trainworthy.core.data import loader
from trainworthy.core.recipe.stage import Data, Field, View

from tests.helpers.commands import wait_until

CPU = torch.device("cpu")
PATIENCE = 20  # seconds a test waits for threads before it fails


class Slow(Data):
    """Numbers that take their time; a sample adds a draw, and half of it comes from the global generator."""

    def __init__(self, n: int, seconds: float = 0.0, missing: int = -1):
        self.n, self.seconds, self.missing = n, seconds, missing
        self.fields = {"x": Field("input")}
        self.begun: list[int] = []
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return self.n

    def read(self, index: int) -> float:
        with self.lock:
            self.begun.append(index)
        time.sleep(self.seconds * (1 + index % 3))  # they do not end in the order in which they begin
        if index == self.missing:
            raise UserError(f"no file {index}")
        return float(index)

    def make(self, index: int, got: float, generator: torch.Generator | None) -> dict:
        drawn = 0.0 if generator is None else torch.rand((), generator=generator) + torch.rand(())
        return {"x": torch.tensor(got) + drawn}

    def get(self, index: int, generator: torch.Generator | None) -> dict:
        return self.make(index, self.read(index), generator)


def read(data: Data, start: int = 0, stop: int = 12, **settings: int) -> Iterator[dict]:
    """Batches of five from step `start` on."""
    stream = loader.Stream(len(data), seed=3)
    keys = (stream.keys(5 * s, 5 * s + 5) for s in range(start, stop))
    return loader.batches(data, keys, seed=3, settings=Loader(**settings), device=CPU)


def values(batches: Iterator[dict]) -> list[list[float]]:
    return [b["x"].tolist() for b in batches]


@pytest.mark.parametrize("window", [4, 7, 64])
def test_threads_change_nothing(window: int):
    """Nor does where a resumed run enters."""
    whole = values(read(Slow(17)))
    assert values(read(Slow(17, 0.001), threads=4, window=window)) == whole
    assert values(read(Slow(17, 0.001), start=7, threads=4, window=window)) == whole[7:]
    swapped = View(Slow(17), range(17), swap=[(i + 1) % 17 for i in range(17)], draws=1)
    assert values(read(swapped, threads=4, window=window)) == values(read(swapped))


def test_no_more_in_hand_than_the_window_and_reading_goes_on_meanwhile():
    data = Slow(500)
    batches = read(data, stop=90, threads=3, window=8)
    for done in range(1, 6):
        next(batches)
        begun = 5 * done - 1 + 8  # what was taken last makes room when the next is asked for
        wait_until(lambda n=begun: len(data.begun) == n, seconds=PATIENCE, pause=0.001)
        time.sleep(0.02)
        assert len(data.begun) == begun


def test_the_first_batch_waits_for_one_file_not_for_all():
    """Five files at once: with one thread after the other they would take five times as long."""
    started, together = threading.Barrier(5), []

    def wait(item: int) -> int:
        together.append(started.wait(PATIENCE))
        return item

    assert list(loader.ahead(wait, range(5), threads=5, window=5)) == [0, 1, 2, 3, 4]
    assert sorted(together) == [0, 1, 2, 3, 4]


def test_a_file_that_cannot_be_read_ends_the_run_in_its_turn():
    order = [i for _, i in loader.Stream(17, seed=3).keys(0, 17)]
    missing = order[11]
    batches = read(Slow(17, missing=missing), threads=4, window=16)
    assert len(next(batches)["x"]) == len(next(batches)["x"]) == 5
    with pytest.raises(UserError, match=f"no file {missing}"):
        next(batches)


def test_who_stops_early_waits_for_nobody():
    data = Slow(500, 0.01)
    batches = read(data, stop=90, threads=2, window=32)
    next(batches)
    batches.close()
    time.sleep(0.05)
    begun = len(data.begun)
    time.sleep(0.1)
    assert len(data.begun) == begun < 32


def test_workers_read_by_themselves():
    assert values(read(Slow(17), workers=1, threads=4)) == values(read(Slow(17)))


def test_a_window_smaller_than_its_threads():
    with pytest.raises(UserError, match=r"--loader\.window(?s:.*)8(?s:.*)16 or more"):
        Loader(threads=16, window=8)
