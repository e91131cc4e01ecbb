"""Batches that a training loop makes: of those that it was given (mixup, CutMix, augmentation on the device), or of its own samples."""

import torch
from torch import Tensor
from trainworthy.core.loop.run import Run
from trainworthy.core.recipe.stage import Data, Field, Stage, batch_size


def prepared_batches(run: Run, stage: Stage) -> list[dict]:
    """Return the batches that the loop passed to its last update, if it made them of the step's. Empty if it passed those, if it updates by
    itself, or if samples or targets are not those of the step (a lost micro-batch, another batch, labels of other samples)."""
    given, used = run.current.batches if run.current else [], run.used_batches
    if not given or not used or (len(given) == len(used) and all(a is b for a, b in zip(given, used, strict=True))):
        return []
    if sum(map(batch_size, given)) != sum(map(batch_size, used)):
        return []
    fields = stage.data["train"].fields if "train" in stage.data else {}
    targets = [k for k, f in fields.items() if f.role == "target" and isinstance(given[0].get(k), Tensor)]
    inputs = [k for k, f in fields.items() if f.role == "input" and isinstance(given[0].get(k), Tensor)]
    if not targets or not all(_keeps(given, used, key) for key in targets):
        return []
    hard = all(_joined(used, k).shape == _joined(given, k).shape for k in targets) and used[0].keys() == given[0].keys()
    return [] if hard and any(_exchanged(given, used, key) for key in inputs) else used


def joined(batches: list[dict]) -> dict:
    """Return the batches as one: tensors with a row for each sample are concatenated, all else is that of the first."""
    sizes = [batch_size(b) for b in batches]

    def is_rows(key: str) -> bool:
        return all(
            isinstance(b.get(key), Tensor) and b[key].dim() and len(b[key]) == n
            for b, n in zip(batches, sizes, strict=True)
        )

    return {k: torch.cat([b[k] for b in batches]) if is_rows(k) else v for k, v in batches[0].items()}


def cut_rows(batch: dict, sizes: list[int]) -> list[dict]:
    """Return the batch cut into micro-batches of `sizes`."""
    n, parts, start = batch_size(batch), [], 0
    for size in sizes:
        some = slice(start, start + size)
        parts.append({k: v[some] if isinstance(v, Tensor) and v.dim() and len(v) == n else v for k, v in batch.items()})
        start += size
    return parts


class Made(Data):
    """Samples that the loop made and trained on, as a data set. Every floating-point entry counts as input."""

    def __init__(self, batch: dict):
        self.batch = batch
        self.fields = {k: Field("input") for k, v in batch.items() if isinstance(v, Tensor) and v.is_floating_point()}

    def __len__(self) -> int:
        return batch_size(self.batch)

    def get(self, index: int, generator: torch.Generator | None) -> dict:
        return {k: v[index] for k, v in self.batch.items()}


def _joined(batches: list[dict], key: str) -> Tensor:
    return torch.cat([b[key] for b in batches])


def _keeps(given: list[dict], used: list[dict], key: str) -> bool:
    """Return whether each sample has its own target: the same one, or a soft one that contains its class."""
    if not all(isinstance(b.get(key), Tensor) for b in used):
        return False
    own, got = _joined(given, key), _joined(used, key)
    if own.shape == got.shape:
        return torch.equal(own, got)
    kinds = [(x.dim(), x.is_floating_point()) for x in (own, got)]
    soft = kinds == [(1, False), (2, True)] and len(own) == len(got)
    if not soft or own.min() < 0 or own.max() >= got.shape[1] or got.min() < 0:
        return False
    return bool((got.gather(1, own[:, None]) > 0).all())


def _exchanged(given: list[dict], used: list[dict], key: str) -> bool:
    """Return whether a sample has the very input of another one."""
    own, got = _joined(given, key), used[0].get(key)
    got = _joined(used, key) if isinstance(got, Tensor) else None
    if got is None or got.shape != own.shape or torch.equal(got, own):
        return False
    own, got = own.flatten(1) if own.dim() > 1 else own[:, None], got.flatten(1) if got.dim() > 1 else got[:, None]
    equal = torch.stack([(own == row).all(1) for row in got])  # (used, given)
    return bool((equal.any(1) & ~equal.diagonal()).any())
