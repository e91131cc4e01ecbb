"""Checks how samples are read: once per epoch, in a new order each time, with new draws, in every process."""

import json
import os
import random
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from trainworthy.core.base import config
from trainworthy.core.base.processes import gathered
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data import loader
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.named import order_causes
from trainworthy.core.gates.checks.accumulation import over_two_processes
from trainworthy.core.gates.gate import GateContext, build
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.run import Rehearsal, Run, Step
from trainworthy.core.recipe.stage import Data, Stage, View

STORED = "get() stores augmented samples and returns them again: a sample is the same under two generators, another one in another process"
SAMPLES, FEWEST, REREAD, WORKERS = 32, 8, 16, 2


@dataclass
class Read:
    """One call of `get`."""

    worker: int
    """Worker id; -1: the main process."""
    index: int
    """Position among the samples that are read."""
    seed: int
    """Seed of the generator that it was given."""
    output: str
    """Digest of the returned sample."""
    drew: dict[str, str]
    """Final state of each generator that changed."""


@dataclass
class Watched(View):
    """Samples of a data set. Every read, in whichever process, is appended to the file `log`."""

    log: str = ""
    bare: bool = False
    """Return empty batches: only the reads matter."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        if generator is None:
            return super().get(index, generator)
        seed, before = generator.initial_seed(), _states(generator)
        sample = super().get(index, generator)
        drew = {name: state for name, state in _states(generator).items() if state != before[name]}
        info = get_worker_info()
        read = [info.id if info else -1, index, seed, _digest([sample[k] for k in self.fields]), drew]
        # One write per line, so that lines of several processes do not mix
        file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, (json.dumps(read) + "\n").encode())
        os.close(file)
        return sample

    def order(self, *parts: int | str) -> Tensor:
        """The whole set's order restricted to these samples; samples that it names too seldom are repeated."""
        place = {index: i for i, index in enumerate(self.indices)}
        found = [place[i] for i in self.data.order(*parts).tolist() if i in place] or list(place.values())
        return torch.tensor((found * len(place))[: len(place)])

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {} if self.bare else super().collate(samples)

    def reads(self) -> list[Read]:
        """All reads so far, in the order in which they ended."""
        return [Read(*json.loads(line)) for line in Path(self.log).read_text().splitlines()]


def _states(handed: torch.Generator) -> dict[str, str]:
    numpy = np.random.get_state()
    return {
        "torch": _digest([torch.default_generator.get_state()]),
        "handed": _digest([handed.get_state()]),
        "numpy": _digest([torch.from_numpy(numpy[1].astype(np.int64)), str(numpy[2:])]),
        "random": str(hash(random.getstate())),
    }


def _digest(entries: list[Any]) -> str:
    digest = blake2b(digest_size=12)
    for value in entries:
        if isinstance(value, str):
            digest.update(value.encode())
            continue
        tensor = torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.as_tensor(value)
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@gate(
    "loader",
    rows="C15",
    title="every epoch reads each sample once, in a new order, with new random draws",
    reads="data loss expect train",
    compares_ranks=True,
)
def reading(context: GateContext) -> Finding:
    """Run two epochs of `train()` over a few samples with two loader workers. Record the arguments and results
    of `get`, and which samples reach the loss. Then read the same keys twice, the second time in the other worker and in
    reverse: a sample must depend on its key alone. Then check the data set as a second process would build it, and
    which samples two processes would read."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        # Two workers on one core are intended here; they run for seconds.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return _check_reading(context, Path(name))


def _check_reading(context: GateContext, folder: Path) -> Finding:
    world, seed = context.accelerator.num_processes, context.cfg.run.seed
    run = Run(context.cfg, context.accelerator, rehearsal=Rehearsal(steps=1))
    stage = build(run, context.make)
    data = stage.data.get("train")
    if data is None or len(data) < FEWEST * world:
        raise Skip("no training set to read" if data is None else f"{len(data)} training samples are too few to tell")
    size = world * (min(stage.expect.at_most(SAMPLES, times=4) * world, len(data)) // (4 * world))
    whole = data.order(seed, "read")
    indices = list(dict.fromkeys(whole.tolist()))[: 4 * size]
    n, wrong = len(indices), []
    if not torch.equal(whole, data.order(seed, "read")):
        again = "after a stop some samples are read twice, others never"
        wrong.append(f"the order of an epoch differs from call to call: {again}")

    watched = Watched(data, indices, log=str(folder / "rehearsal"))
    workers = _workers(context.cfg, data)
    steps = _rehearse(context, run, stage, watched, size, workers)
    sampling = stage.expect.sampling  # train() may have set it
    everyone = gathered(context.accelerator, steps)
    order = [i for step in zip(*everyone, strict=True) for rank in step for i in rank]
    wrong += [] if sampling else _order_faults(order, n)
    twice = _first_and_second(watched.reads())
    fresh = sum(a.output != b.output for a, b in twice)
    wrong += _draw_faults(twice, fresh)
    differ, total, repeated = _read_twice(folder, context, data, indices[:REREAD], workers)
    if differ:
        where = " in another worker" * bool(workers) + "; both workers repeat one sequence of draws" * repeated
        wrong.append(f"{differ} of {total} samples differ when read again under the same key{where}")
    wrong += _processes(context, data, indices, size)
    if context.deep and world == 1 and not wrong:
        over_two_processes(context, "loader")
    faults = "; ".join(wrong)
    usual = f"{n} samples once per epoch, in another order in the second"
    order_shown = f"declared: {sampling}" if sampling else usual
    random_part = f"new random draws for {fresh} of {len(twice)}" if fresh else "no random part"
    read_by = f"{workers} workers" if workers else "one process"
    return Finding(
        not wrong, "; ".join(wrong) or f"{order_shown}; {random_part}; equal samples from {read_by} and for two processes",
        "each sample once per epoch, in another order each time; its random draws depend on (seed, epoch, index) alone and differ "
        "between epochs and samples; every process has the same data set and reads its own part",
        order_causes(
            (repeated, "get() draws from a generator of its own (made in __init__ or at import, numpy's): every worker has a copy and "
             "repeats it"),
            ("the same in both epochs" in faults or "random streams" in faults or bool(differ and not repeated),
             "get() seeds a generator itself, or stores augmented samples and returns them again, or draws from one that all share "
             "(numpy's)"),
            ("differs from call to call" in faults, "order() draws from a generator that its arguments do not seed"),
            ("the order of the first" in faults or "is repeated after" in faults, "order() ignores the epoch (set_epoch), or the loop reads "
             "data itself: the same batch again and again, or the same in all processes"),
            ("sees another data set" in faults, "the data set is split by process, and core splits it again"),
            ("is repeated after" in faults, "on purpose (drawn with replacement, a curriculum): give the reason in expect.sampling")),
        evidence={"order": order[: 2 * n], "drawn_anew": fresh, "read_twice": len(twice), "differ": differ, "reread": total},
        cause=STORED if differ and _stored(data, indices[-FEWEST:]) else "",
    )  # fmt: skip


def _order_faults(order: list[int], n: int) -> list[str]:
    """Faults of the order in which two epochs of `n` samples were read."""
    once = _until_a_repeat(order)
    again = order[len(once) : 2 * len(once)]
    if len(once) < min(0.9 * n, len(order)):
        return [f"a sample is repeated after {len(once)} others, but an epoch has {n}"]
    if len(again) >= FEWEST and once[: len(again)] == again:
        return ["the second epoch has the order of the first"]
    return []


def _draw_faults(twice: list[tuple[Read, Read]], fresh: int) -> list[str]:
    """Faults of the random draws of samples that were read in both epochs, `fresh` of them with another result."""
    wrong = []
    same = [{name: state for name, state in a.drew.items() if b.drew.get(name) == state} for a, b in twice]
    if same and not fresh and all(same):
        everyone = len(set(map(str, same))) == 1
        wrong.append("a sample's draws are the same in both epochs" + (", and those of every other sample" * everyone))
    drawn = [str(a.drew) for a, _ in twice if a.drew]
    if fresh and len(set(drawn)) < 0.9 * len(drawn):
        wrong.append(f"{len(drawn)} samples of one epoch share {len(set(drawn))} random streams")
    return wrong


def _stored(data: Data, indices: list[int]) -> bool:
    """Return whether each sample is the same under two generators."""
    first, second = (View(data, indices, draws=seed) for seed in (1, 2))
    both = [[_digest([v.get(i, None)[k] for k in data.fields]) for i in range(len(indices))] for v in (first, second)]
    return both[0] == both[1]


def _workers(cfg: config.Config, data: Data) -> int:
    """At least two; none if samples are on an accelerator, which a forked process cannot access."""
    sample = data.get(0, None)
    far = any(isinstance(v, Tensor) and v.device.type != "cpu" for v in sample.values())
    return 0 if far else max(WORKERS, cfg.loader.workers)


def _rehearse(
    context: GateContext, run: Run, stage: Stage, watched: Watched, size: int, workers: int
) -> list[list[int]]:
    """Run two epochs of `train()` over the watched samples. Return which samples reached the loss at each step, or
    which were read, if collate leaves no trace of single samples."""
    run.cfg = replace(
        run.cfg, loader=replace(run.cfg.loader, workers=workers), train=replace(run.cfg.train, batch_size=size)
    )
    handed: list[list[int]] = []
    own_steps = run.steps

    def steps(stage: Stage) -> Iterator[Step]:
        for step in own_steps(stage):  # a loop may take several before it learns from the first
            handed.append([i for micro in step.keys for _, i in micro])
            yield step

    run.steps = steps  # type: ignore[method-assign]
    run.rehearsal = Rehearsal(steps=2 * len(watched) // size, batch_size=size)
    stage.data = {**stage.data, "train": watched}
    learnt: list[dict[str, None]] = [{} for _ in range(run.rehearsal.steps)]
    own = stage.loss

    def loss(model: torch.nn.Module, batch: dict) -> dict[str, Tensor]:
        if torch.is_grad_enabled():
            learnt[run.current.index] |= dict.fromkeys(_rows(batch, watched))
        return own(model, batch)

    stage.loss = loss
    context.train(run.cfg, run, stage)
    known: dict[str, list[int]] = {}
    for read in watched.reads():
        if read.index not in known.setdefault(read.output, []):
            known[read.output].append(read.index)
    if not any(learnt) or any(row not in known for step in learnt for row in step):
        return handed
    for same in known.values():  # identical samples are assigned in turn
        same.reverse()
    return [[_next(known[row]) for row in step] for step in learnt]


def _next(turns: list[int]) -> int:
    turns.insert(0, turns.pop())
    return turns[0]


def _rows(batch: dict, data: Data) -> list[str]:
    """Digest of each sample in a batch, as `Watched` writes it."""
    entries = [batch.get(k) for k in data.fields]
    entries = [v.detach().cpu() if isinstance(v, Tensor) else v for v in entries]
    if any(not isinstance(v, (Tensor, list)) or len(v) != len(entries[0]) for v in entries):
        return ["?"]
    return [_digest(list(row)) for row in zip(*entries, strict=True)]


def _until_a_repeat(order: list[int]) -> list[int]:
    seen: set[int] = set()
    for place, index in enumerate(order):
        if index in seen:
            return order[:place]
        seen.add(index)
    return order


def _first_and_second(reads: list[Read]) -> list[tuple[Read, Read]]:
    by_index: dict[int, list[Read]] = {}
    for read in reads:
        by_index.setdefault(read.index, []).append(read)
    return [(rows[0], rows[1]) for rows in by_index.values() if len(rows) > 1]


def _read_twice(
    folder: Path, context: GateContext, data: Data, indices: list[int], workers: int
) -> tuple[int, int, bool]:
    """(keys whose two reads differ, keys, whether both workers return the same sequence when they read one key
    repeatedly). Two epochs are read forwards, then backwards, so that each batch goes to the other worker."""

    def read(name: str, batches: list[list[loader.Key]]) -> list[Read]:
        watched = Watched(data, indices, log=str(folder / name), bare=True)
        settings = replace(context.cfg.loader, workers=workers)
        for _ in loader.batches(
            watched, batches, seed=context.cfg.run.seed, settings=settings, device=torch.device("cpu")
        ):
            pass
        return watched.reads()

    keys = [(epoch, i) for epoch in (0, 1) for i in range(len(indices))]
    batches = [keys[s : s + 4] for s in range(0, len(keys), 4)]
    outputs: dict[int, set[str]] = {}
    for one in read("twice", [*batches, *reversed(batches)]):
        outputs.setdefault(one.seed, set()).add(one.output)
    differ = sum(len(found) > 1 for found in outputs.values())
    repeated = False
    if differ and workers:
        reads = read("one-key", [keys[:1] * 4] * 8)
        first, second = ([r.output for r in reads if r.worker == w] for w in (0, 1))
        repeated = first == second and len(set(first)) > 1
    return differ, len(outputs), repeated


def _processes(context: GateContext, data: Data, indices: list[int], size: int) -> list[str]:
    """Return what is wrong with the data sets and sample subsets of several processes: the real ones, or two that are
    simulated one after the other."""
    world = context.accelerator.num_processes

    def read_digests(data: Data) -> tuple[int, list[str]]:
        found = [data.get(i, None) for i in indices if i < len(data)]
        return len(data), [_digest([s[k] for k in data.fields]) for s in found]

    if world > 1:
        seen = gathered(context.accelerator, read_digests(data))
    else:
        cfg = replace(context.cfg, loader=replace(context.cfg.loader, workers=0))
        run = Run(cfg, context.accelerator, rehearsal=Rehearsal(steps=len(indices) // size, batch_size=size))
        run.rank, run.world = 1, 2
        try:
            stage = build(run, context.make)
        except (RuntimeError, ValueError) as error:
            if "process group" not in str(error):
                raise
            return []  # its construction communicates with the other processes
        seen = [read_digests(data), read_digests(stage.data["train"])]
    if any(one != seen[0] for one in seen):
        rank = next(r for r, one in enumerate(seen) if one != seen[0])
        return [
            f"process {rank + 1} of {len(seen)} sees another data set: {seen[rank][0]:,} samples, the first {seen[0][0]:,}"
        ]
    if world > 1:
        return []
    stage.data = {**stage.data, "train": View(stage.data["train"], indices)}
    shares = []
    for rank in range(run.world):
        run.rank = rank
        shares += [i for step in run.steps(stage) for micro in step.keys for _, i in micro]
    whole = sorted(shares) == list(range(len(indices)))
    return [] if whole else ["two processes do not share an epoch: samples twice or never"]


@gate(
    "new-samples",
    rows="C15",
    title="each iteration reads other samples than the one before",
    reads="data train",
    compares_ranks=True,
)
def new_samples(context: GateContext) -> Finding:
    """If the loop makes its own samples from a data set (answers to prompts): over the four rehearsed iterations, most
    of what it reads must be new. Draws with replacement repeat some; an iterator that restarts repeats all."""
    _, stage, record = rehearsed(context)
    wrong, measured = [], []
    for name, steps in record.read.items():
        sizes = [len(s) for s in steps.values()]
        others = (len(d) for k, d in stage.data.items() if k not in ("val", "test"))
        n = len(stage.data[name]) if name in stage.data else sum(others)
        if len(steps) < 2 or n < 2 * max(sizes):
            continue  # as many as there are: each iteration may read all
        new = len(set().union(*steps.values()))
        measured.append(
            f"{name}: {new} different samples of {sum(sizes)} that were read in {len(steps)} iterations ({n:,} in the data set)"
        )
        if new < 0.5 * min(sum(sizes), n):
            wrong.append(measured[-1])
    if not measured:
        raise Skip("the loop reads no data set of its own, or all of it in each iteration")
    return Finding(
        not wrong, "; ".join(wrong or measured), "at least half of the samples are new",
        "the iterator or the generator restarts in each iteration\nthe same slice, or the same seed, in each iteration",
        evidence={k: {str(i): len(s) for i, s in v.items()} for k, v in record.read.items()},
    )  # fmt: skip
