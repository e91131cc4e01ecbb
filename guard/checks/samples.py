"""Checks of the data's path into the loop: order, coverage, samples in both splits, unused batches."""

import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import SequentialSampler
from trainworthy.guard.checks.results import finding, joined, skip
from trainworthy.guard.hooks.trees import entries
from trainworthy.guard.measures.data import (
    clocks,
    columns,
    neighbours,
    overlapping_windows,
    repeated_rows,
    restored,
    token_pairs,
)
from trainworthy.guard.measures.data.alignment import turned_apart
from trainworthy.guard.measures.data.collating import mispaired
from trainworthy.guard.measures.data.drawn_apart import drawn_apart
from trainworthy.guard.measures.losses.supervision import sampler_weights
from trainworthy.guard.measures.records import Pass
from trainworthy.guard.observing.observer import Observer

SECONDS = 3.0  # reading samples of both splits
READ = 4000  # training samples
EPOCHS = 6  # that are drawn, until one of them
NEW = 0.02  # has at most this share of samples that none before it drew
REPEATED = 0.5  # of the rows of tokens: short texts and made-up ones occur in both splits by chance
STOCK = ("RandomSampler", "SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler")


def samples(seen: Observer) -> dict:
    """Check the order of two epochs, indices that no epoch draws, samples in both splits, and workers that yield the
    same."""
    train = [p for p in seen.passes if p.training]
    if not train:
        return skip("samples", "no DataLoader feeds the loop")
    rehearsed = seen.control is not None  # after a real run nothing is drawn or read again
    checks = (same_order, workers, never, collated, both_splits)[: 5 if rehearsed else 2]
    found = [sampler_weights(train), seen.evidence.lookups.fault(), seen.evidence.stored.fault(), seen.graphs.fault()]
    found = [fault for fault in (*found, *(check(seen, train) for check in checks)) if fault]
    if found:
        return joined("samples", found, "")
    loader = train[0].loader
    size = "a stream" if isinstance(loader.dataset, IterableDataset) else f"{len(loader.dataset):,} samples"
    again = [p for p in train if p.loader is loader and p.order]
    order = ", another order in the second epoch" if len(again) > 1 and again[0].order[:8] != again[1].order[:8] else ""
    return finding("samples", f"{size}{order}")


def same_order(seen: Observer, train: list[Pass]) -> tuple[str, str] | None:
    """Find a shuffled order that is the same in two epochs."""
    mine = [p for p in train if p.loader is train[0].loader and len(p.order) >= 16]
    if len(mine) < 2:
        return None
    n = min(len(mine[0].order), len(mine[1].order), 512)
    a, b = mine[0].order[:n], mine[1].order[:n]
    if a != b or a == sorted(a) or len(set(a)) < 8:
        return None
    sampler = mine[0].loader.sampler
    why = "the sampler's generator or the global seed is set again in every epoch"
    if isinstance(sampler, DistributedSampler):
        why = "sampler.set_epoch(epoch) is missing"
    return f"the order is shuffled, and the same in both epochs (first: {a[:6]})", why


def collated(seen: Observer, train: list[Pass]) -> tuple[str, str] | None:
    """Find a collate function that gives samples the entries of others."""
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):  # it may be made for whole batches alone
        return mispaired(train[0].loader, time.monotonic() + SECONDS)
    return None


def never(seen: Observer, train: list[Pass]) -> tuple[str, str] | None:
    """Return indices that no epoch draws: whole epochs are drawn until one brings no new ones."""
    loader = train[0].loader
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return None
    sampler, total = loader.sampler, len(loader.dataset)
    if type(sampler).__name__ in STOCK[2:] or isinstance(sampler, SequentialSampler) or total < 32:
        return None
    if isinstance(sampler, DistributedSampler):
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else seen.ranks
        if sampler.num_replicas > world:
            return (
                f"the sampler deals for {sampler.num_replicas} processes, and there are {world}: the rest is never seen",
                "DistributedSampler without a process group, or with a wrong num_replicas",
            )
        return None
    limit, drawn, count = time.monotonic() + 1.0, set(), 0
    epoch: set = set()
    for count in range(1, EPOCHS + 1):
        drawn, epoch = drawn | epoch, set()
        for batch in loader.batch_sampler:
            epoch.update(batch)
            if time.monotonic() > limit:
                return None
        if count > 1 and len(epoch - drawn) <= NEW * len(epoch):
            break
    else:
        return None  # each epoch draws others: all of them may come
    drawn |= epoch
    split_by_samplers = any(p.loader is not loader and p.loader.dataset is loader.dataset for p in seen.passes)
    if len(drawn) <= 0.75 * total and not split_by_samplers:
        return (
            f"{count} epochs draw {len(drawn):,} of {total:,} samples: {total - len(drawn):,} are never seen",
            f"the sampler {type(sampler).__name__} leaves them out",
        )
    return None


def both_splits(seen: Observer, train: list[Pass]) -> tuple[str, str] | None:
    """Find validation samples that are training samples, by index if both are parts of one data set, else by
    content."""
    evals: dict[int, DataLoader] = {}
    for p in seen.passes:
        if (
            p.calls
            and not p.backwards
            and p.loader is not train[0].loader
            and not p.refreshing
            and (seen.trainer is not None or not features(p, train[0]))
        ):
            evals[id(p.loader)] = p.loader
    data = train[0].loader.dataset
    if any(v.dataset is not data for v in evals.values()):  # the score on the training samples, beside another's
        evals = {k: v for k, v in evals.items() if v.dataset is not data or indices(v) != indices(train[0].loader)}
    limit = time.monotonic() + SECONDS
    mine = content(train[0].loader, READ, limit)
    shares = {}
    for key, loader in evals.items():
        shares[key] = shared(train[0].loader, loader, mine, limit + SECONDS)
    known = [s for s in shares.values() if s is not None]
    if not known or min(known) < 0.1:
        later = of_other_models(seen, train[0].loader)
        others = [v for k, v in evals.items() if v.dataset is not data and k not in later]
        outputs = next((r["classes"] for r in seen.calls if "classes" in r), 0)
        return (
            partners(train[0].loader, evals, mine, limit + 2 * SECONDS)
            or drawn_apart(seen, train[0].loader, time.monotonic() + SECONDS)
            or turned_apart(train[0].loader, evals, limit + 3 * SECONDS)
            or restored.apart(train[0].loader, evals, time.monotonic() + SECONDS)
            or columns.check(data, [v.dataset for v in others], time.monotonic() + SECONDS)
            or repeated_rows.check(train[0].loader, others, time.monotonic() + SECONDS)
            or clocks.check(data, [v.dataset for v in others], time.monotonic() + SECONDS)
            or overlapping_windows.check(train[0].loader, others, time.monotonic() + SECONDS)
            or token_pairs.check(data, [v.dataset for v in others], time.monotonic() + SECONDS)
            or neighbours.check(data, [v.dataset for v in others], time.monotonic() + SECONDS, outputs)
        )
    share = min(known)
    return (
        f"{share:.0%} of the validation samples are training samples",
        "the training loader reads the unsplit data, or the split is made twice with different seeds",
    )


def features(one: Pass, trained: Pass) -> bool:
    """Return whether a pass without gradients has no targets, where training has some: it computes features (of all samples, to cluster them
    or to search in them), and scores nothing."""
    if one.seen or one.pairs or not one.recent or not trained.recent:
        return False
    return len(tree_leaves(one.recent[-1])) < len(tree_leaves(trained.recent[-1]))


def of_other_models(seen: Observer, first: DataLoader) -> set[int]:
    """Return the loaders that evaluate none but models which were trained on other data than those of `first`: another fold, the task
    after a pretraining."""
    trained: dict[bool, set[int]] = {True: set(), False: set()}
    used: dict[int, set[int]] = {}
    for p in seen.passes:
        if p.training:
            trained[p.loader is first].update(row[0] for row in p.modes)
        elif p.calls:
            used.setdefault(id(p.loader), set()).update(row[0] for row in p.modes)
    others = trained[False] - trained[True]
    return {key for key, models in used.items() if models and models <= others}


def partners(
    train: DataLoader, evals: dict[int, DataLoader], mine: dict[int, int], limit: float
) -> tuple[str, str] | None:
    """Find a second entry of validation samples (a positive, a negative, another view) that is a training sample."""
    for loader in evals.values():
        data, counts = loader.dataset, Counter()
        if not mine or isinstance(data, IterableDataset):
            continue
        total = 0
        for i in range(0, len(data), max(1, len(data) // 200)):
            if time.monotonic() > limit:
                break
            leaves = [x for x in entries(data[i]) if x.numel() >= 8]
            total += 1
            counts.update(k for k, x in enumerate(leaves) if k and x.shape == leaves[0].shape and x.dtype == leaves[0].dtype
                          and hash(x.detach().cpu().numpy().tobytes()) in mine)  # fmt: skip
        covered = min(1.0, sum(mine.values()) / max(1, len(train.dataset)))
        if total >= 20 and counts and (top := counts.most_common(1)[0])[1] > 0.5 * covered * total:
            return (
                f"entry {top[0]} of {top[1] / total:.0%} of the validation samples is a training sample",
                "an index into one split is used on the whole data, or the pool that partners are drawn from is not split",
            )
    return None


def indices(loader: DataLoader) -> tuple[int, set[int]] | None:
    """The data set below Subsets and the indices a loader reads of it."""
    data = loader.dataset
    if isinstance(data, IterableDataset):
        return None
    own = getattr(loader.sampler, "indices", None)
    chosen = [int(i) for i in own] if type(loader.sampler).__name__ == "SubsetRandomSampler" else None
    if chosen is None:
        chosen = list(range(len(data)))
    while isinstance(data, Subset):
        chosen = [int(data.indices[i]) for i in chosen]
        data = data.dataset
    return id(data), set(chosen)


def shared(train: DataLoader, val: DataLoader, mine: dict[int, int], limit: float) -> float | None:
    """Return the fraction of validation samples that are training samples; None if unknown."""
    a, b = indices(train), indices(val)
    if a and b and a[0] == b[0] and b[1]:
        return len(a[1] & b[1]) / len(b[1])
    theirs = content(val, 500, limit)
    if not mine or len(theirs) < 20:
        return None
    total = sum(theirs.values())
    if len(theirs) < 0.95 * total or len(mine) < 0.9 * sum(mine.values()):  # samples repeat by nature
        return None
    covered = min(1.0, sum(mine.values()) / max(1, len(train.dataset)))
    found = len(mine.keys() & theirs.keys()) / len(theirs)
    if found < REPEATED and _tokens(val.dataset[0]):
        return 0.0
    return min(1.0, found / covered) if found > 0.02 else 0.0


def content(loader: DataLoader, most: int, limit: float) -> dict[int, int]:
    """Hash the inputs of up to `most` evenly spaced samples."""
    data, found = loader.dataset, {}
    if isinstance(data, IterableDataset):
        return {}
    step = max(1, len(data) // most)
    for i in range(0, len(data), step):
        if time.monotonic() > limit:
            break
        try:
            key = _key(data[i])
        except Exception:
            return {}
        if key is None:
            return {}
        found[key] = found.get(key, 0) + 1
    return found


def _key(sample: Any) -> int | None:
    for x in tree_leaves(sample):
        if isinstance(x, Tensor) and x.numel() >= 8:
            return hash(x.detach().cpu().numpy().tobytes())
        if hasattr(x, "tobytes") and getattr(x, "size", 0) and not isinstance(x, Tensor):
            raw = x.tobytes()
            return hash(raw) if len(raw) >= 8 else None
    return hash(tuple(ids)) if (ids := _tokens(sample)) else None


def _tokens(sample: Any) -> list | None:
    """Return the tokens of a row of a data set of `datasets`, else its first list of numbers that is long enough."""
    lists = [sample.get("input_ids"), *sample.values()] if isinstance(sample, Mapping) else ()
    return next((v for v in lists if isinstance(v, list) and len(v) >= 8 and isinstance(v[0], (int, float))), None)


def workers(seen: Observer, train: list[Pass]) -> tuple[str, str] | None:
    """Find workers that yield the same batches."""
    for p in train:
        n, prints = p.loader.num_workers, p.prints
        if n > 1 and len(prints) >= 2 * n:
            twice = len(prints) - len(set(prints))
            if twice >= 0.4 * len(prints):
                return (
                    f"{twice} of {len(prints)} batches repeat another one: each of {n} workers yields the same samples",
                    "an iterable data set does not call get_worker_info(), or a generator is copied into every worker",
                )
    return None


def passes(seen: Observer) -> dict:
    """Find batches that are drawn but not used, and epochs that stop after one batch."""
    train = [p for p in seen.passes if p.training]
    if not train:
        n = len(seen.evidence.trained)
        batch, most = Counter(mark for mark, _ in seen.evidence.trained).most_common(1)[0] if n else (0, 0)
        made = [count for mark, count in seen.evidence.trained if mark == batch]
        # full-batch training makes no other inputs, and PPO makes them before and after its epochs on one rollout
        if n >= 24 and most > 0.6 * n and made[-1] - made[0] >= 16:
            return finding(
                "passes",
                f"{most} of {n} model calls in training got the same batch, while other inputs are made all the time",
                "the buffer's first entries are taken and not a random draw, or the batch is drawn before the loop",
            )
        often = max((n for _, n in seen.seeds.values()), default=0)
        if n >= 24 and most > 0.6 * n and often > 0.6 * seen.backwards:
            return finding(
                "passes",
                f"{most} of {n} model calls in training got the same batch, and the same seed was set before {often} of {seen.backwards} "
                "backward() calls",
                "the seed is set where batches are drawn, so every draw is the same: set it once, before the loop",
            )
        return skip("passes", "no DataLoader feeds the loop")
    done = [p for p in train[:-1] if not p.was_cut]
    short = [p for p in done if p.got == 1 and (p.length or 0) >= 4]
    others = [p for p in seen.passes if p.calls and not p.backwards]
    if len(short) >= 2 and len(short) == len(done):
        first = [tuple(p.order[: p.loader.batch_size or 1]) for p in short if p.order]
        if len(first) >= 3 and len(set(first)) == 1:
            return finding(
                "passes",
                f"{len(short)} passes over the loader took one batch each, always the same",
                "next(iter(loader)) starts anew every time, and the loader does not shuffle",
            )
        if len(others) >= len(short) - 1:
            return finding(
                "passes",
                f"each of {len(short)} epochs ended after 1 of {short[0].length} batches",
                "a return or break is inside the loop over batches",
            )
    one = train[0]
    if one.backwards >= 8 and one.got >= 1.9 * one.backwards and one.calls <= 0.6 * one.got:
        return finding(
            "passes",
            f"{one.got} batches were drawn, and {one.backwards} led to a backward()",
            "the loop advances its iterator twice per step, or skips batches",
        )
    return finding(
        "passes", f"{one.got} batches drawn, {one.backwards} backward() calls, {one.steps} steps in the first pass"
    )
