"""How fast samples arrive that wait for a slow disk, while the training computes.

    python bench/loader.py --latency 20 --compute 15 --json docs/loader.json

Every sample is one .npy file of 64 KB on this disk; each read sleeps `--latency` milliseconds first, as a network file system does.
Training is matrix products for `--compute` milliseconds a batch on one thread, or with `--wait` a wait of as long, as for a device.
The ways, in shuffled order each round:

window    core's loader with `--threads` threads: a sliding window of reads
chunks    chunk-prefetch: read a chunk of `--chunk` files by as many threads, hand it out, read the next (a common recipe);
          and with chunks of 500 files
workers   torch's DataLoader with 8 workers, 4 batches ahead each; and with as many workers as there are threads
plain     torch's DataLoader without workers

Printed, medians of the rounds: samples a second from the second batch on, their share of the limit threads / latency, seconds
until the first batch from a loader that exists, and the largest number of samples in hand (workers: batches asked for).
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from trainworthy.core.base.config import Loader
from trainworthy.core.data import loader
from trainworthy.core.recipe.stage import Data, Field

SHAPE = (128, 128)  # float32: 64 KB
PRODUCT = 512  # side of the matrices whose product stands for training


class Files(Data, Dataset):
    """Arrays of a folder; reading one takes `latency` seconds."""

    def __init__(self, folder: Path, n: int, latency: float):
        self.folder, self.n, self.latency = folder, n, latency
        self.fields = {"x": Field("input")}

    def __len__(self) -> int:
        return self.n

    def read(self, index: int) -> np.ndarray:
        time.sleep(self.latency)
        return np.load(self.folder / f"{index % 64}.npy")

    def make(self, index: int, got: np.ndarray, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {"x": torch.from_numpy(got)}

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return self.make(index, self.read(index), generator)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.get(index, None)


def by_window(data: Files, size: int, args: argparse.Namespace) -> Iterator[dict]:
    keys = ([(0, i) for i in range(s, s + size)] for s in range(0, len(data), size))
    settings = Loader(threads=args.threads, window=args.window)
    return loader.batches(data, keys, seed=0, settings=settings, device=torch.device("cpu"))


def by_chunks(data: Files, size: int, args: argparse.Namespace, chunk: int) -> Iterator[dict]:
    """A chunk is read whole before its first sample is handed out, and nothing is read meanwhile."""
    ready: list[dict] = []
    for start in range(0, len(data), chunk):
        with ThreadPoolExecutor(args.threads) as pool:
            ready += pool.map(data.__getitem__, range(start, min(start + chunk, len(data))))
        while len(ready) >= size:
            yield data.collate(ready[:size])
            ready = ready[size:]


def by_torch(data: Files, size: int, args: argparse.Namespace, workers: int) -> Iterator[dict]:
    return iter(DataLoader(data, size, num_workers=workers, prefetch_factor=4 if workers else None))


def ways(args: argparse.Namespace) -> dict[str, tuple[Callable, int]]:
    """{name: (batches of a data set, samples it holds at most)}."""
    size = args.batch_size
    return {
        "window": (by_window, args.window),
        f"chunks of {args.chunk}": (lambda *a: by_chunks(*a, args.chunk), args.chunk + size),
        "chunks of 500": (lambda *a: by_chunks(*a, 500), 500 + size),
        "8 workers": (lambda *a: by_torch(*a, 8), 8 * 4 * size),
        f"{args.threads} workers": (lambda *a: by_torch(*a, args.threads), args.threads * 4 * size),
        "plain": (lambda *a: by_torch(*a, 0), size),
    }


def compute(seconds: float, a: Tensor, wait: bool) -> None:
    """Matrix products for so long, or nothing."""
    if wait:
        time.sleep(seconds)
        return
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        a @ a


def measure(batches: Callable, data: Files, args: argparse.Namespace) -> tuple[float, float]:
    """(samples a second from the second batch on, seconds until the first)."""
    a, started, n = torch.randn(PRODUCT, PRODUCT), time.perf_counter(), 0
    for batch in batches(data, args.batch_size, args):
        if n == 0:
            first = time.perf_counter()
        n += len(batch["x"])
        compute(args.compute / 1000, a, args.wait)
        if n >= args.samples:
            break
    return (n - args.batch_size) / (time.perf_counter() - first - args.compute / 1000), first - started


def main() -> None:
    """Every way in every round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("latency", 20.0), ("compute", 15.0)):
        parser.add_argument(f"--{name}", type=float, default=default, help="milliseconds")
    for name, default in (
        ("threads", 16),
        ("window", 64),
        ("batch-size", 16),
        ("chunk", 64),
        ("samples", 1600),
        ("rounds", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    limit, found = args.threads / (args.latency / 1000), {name: [] for name in ways(args)}
    with tempfile.TemporaryDirectory() as name:
        for i in range(64):
            np.save(Path(name) / f"{i}.npy", np.random.default_rng(i).standard_normal(SHAPE).astype(np.float32))
        for seed in range(args.rounds):
            order = list(found)
            random.Random(seed).shuffle(order)
            for way in order:
                n = args.samples if way != "plain" else min(args.samples, 20 * args.batch_size)
                data = Files(Path(name), n, args.latency / 1000)
                found[way].append(measure(ways(args)[way][0], data, args))
    rows = []
    for way, rounds in found.items():
        rate, first = (statistics.median(r[k] for r in rounds) for k in (0, 1))
        rows.append({"way": way, "samples_per_second": round(rate, 1), "share_of_limit": round(rate / limit, 3),
                     "first_batch_ms": round(1000 * first, 1), "in_hand": ways(args)[way][1],
                     "rounds": [round(r[0], 1) for r in rounds]})  # fmt: skip
        print(f"{way:16} {rate:7.0f} samples/s  {rate / limit:5.2f} of the limit  first batch {1000 * first:6.0f} ms  "
              f"at most {rows[-1]['in_hand']} in hand", flush=True)  # fmt: skip
    if args.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        settings = {k: v for k, v in vars(args).items() if k != "json"}
        args.json.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "versions": versions, "settings": settings,
                                         "limit": limit, "rows": rows}, indent=1) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
