"""Checks that the loss depends on every entry of a batch that it should depend on."""

import math
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base import seeds
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data.loader import to_device
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import GateContext, fetch, pick
from trainworthy.core.gates.recorder import Record, rehearsed
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.recipe.stage import Data, Stage, View, batch_size

SAMPLES = 16
ROUNDING = {"fp32": 1e-6}  # relative change of the loss that rounding alone may cause
COARSE = 1e-4  # the same in 16 bits
Path = tuple[str, ...]


class Reads(dict):
    """A batch that notes which entries are read by name."""

    def __init__(self, batch: dict, read: set[str]):
        super().__init__(batch)
        self.read = read

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        if key in self:
            self.read.add(key)
        return super().get(key, default)


@gate(
    "entries",
    rows="C7 C16",
    title="the loss depends on every entry of the batch that it reads or should read",
    reads="data model loss evaluate expect train",
    explains=True,
)
def entries(context: GateContext) -> Finding:
    """Change one entry of a real batch at a time: add noise of its own size to floats, and for other types give every second
    sample another sample's value. The loss must change
    - with an entry that is declared as input or target, unless the loss or the evaluation reads it by name (labels that
      a mask hides in these samples are no fault);
    - with a declared input and with any float that the loss reads by name (by any bit, or by more than rounding), unless another
      entry that matters is made from it (the clean image under the noise, where the noise is predicted).
    Uses the rehearsed model, because an untrained head may hide the input."""
    run, stage, record = rehearsed(context)
    if stage.expect.random_loss:
        raise Skip(f"by design: {stage.expect.random_loss}")
    batch, roles = _batch(run, stage, record)
    loss = Loss(run, stage)
    before = loss.of(batch)
    if not math.isfinite(before) or abs(loss.of(batch) - before) > _limit(run) * abs(before):
        raise Skip("the loss of one batch differs from call to call in eval mode (see evaluation)")
    changes = loss.changes(batch, before)
    named = stage.expect.unused_fields
    silent = {p for p, change in changes.items() if change <= _limit(run) and not {p[0], ".".join(p)} & {*named}}
    unused = {*_read_by_evaluation(run, stage), *named} if silent else set()
    wrong = _faults(silent, changes, batch, roles, loss.read, unused)
    data = stage.data.get("train")
    if wrong and data is not None and _samples(stage) < len(data) and not stage.expect.gate_batch_size:
        wrong = _confirm(wrong, loss, data)
    if wrong and _limit(run) > ROUNDING["fp32"]:
        finer = _in_single_precision(silent, loss, batch)
        changes |= finer
        silent -= {p for p, change in finer.items() if change > ROUNDING["fp32"]}
        wrong = {p: why for p, why in wrong.items() if p in silent}
    changes = {".".join(p): v for p, v in changes.items()}
    measured = ", ".join(f"{k} {v:.1g}" for k, v in changes.items())
    spare = [".".join(p) for p in sorted(silent - set(wrong))]
    measured += f"; not needed for the loss: {', '.join(spare)}" if spare else ""
    return Finding(
        not wrong, "; ".join(f"{'.'.join(p)}: {why}" for p, why in wrong.items()) or f"relative change of the loss by entry: {measured}",
        f"the loss changes by more than {_limit(run):g} (relative) when an entry is changed",
        "the entry cancels out (divided by itself, subtracted from itself), or is overwritten before it is used\n"
        "a weight, a mask or a condition is put in the batch and never used\n"
        "on purpose: leave it out of the batch or out of `fields`, or name it in expect.unused_fields",
        evidence={"changes": changes, "silent": sorted(".".join(p) for p in silent)},
        batch={k: v for k, v in batch.items() if isinstance(v, Tensor)},
    )  # fmt: skip


def _samples(stage: Stage) -> int:
    return min(stage.expect.at_most(SAMPLES), len(stage.data["train"]))


def _batch(run: Run, stage: Stage, record: Record) -> tuple[dict, dict[str, str]]:
    """Return a batch of real samples, with the declared role of its entries."""
    data, seed = stage.data.get("train"), run.cfg.run.seed
    if data is not None:
        batch = fetch(data, pick(data, _samples(stage), seed), seed, run.device)
        roles = {k: f.role for k, f in data.fields.items()}
    elif record.batch:
        batch, roles = to_device(record.batch, run.device), {}
    else:
        raise Skip("the loop makes its own samples and updates by itself: nothing to read (see wiring)")
    if batch_size(batch) < 2:
        raise Skip("there is only one sample, so nothing can be exchanged")
    return batch, roles


class Loss:
    """The loss of a batch with the same draws each time, and the names of the entries that it reads."""

    def __init__(self, run: Run, stage: Stage):
        self.run, self.stage, self.seed = run, stage, run.cfg.run.seed
        self.loss, self.read, self.autocast = run.used_loss or stage.loss, set(), run.autocast

    def of(self, batch: dict) -> float:
        seeds.seed_global(self.seed, "entries")
        with evaluating(self.stage.model), self.autocast():
            return sum(float(v) for v in self.loss(self.stage.model, Reads(batch, self.read)).values())

    def changes(self, batch: dict, before: float, paths: Collection[Path] | None = None) -> dict[Path, float]:
        """{entry: relative change of the loss}, of all entries or of `paths`."""
        draws, found = torch.Generator().manual_seed(self.seed), {}
        for path, tensor in _tensors(batch):
            other = _other(tensor, draws) if paths is None or path in paths else None
            if other is None:
                continue  # the same in every sample: nothing to exchange
            try:
                found[path] = abs(self.of(_replaced(batch, path, other)) - before) / max(abs(before), 1e-12)
            except (RuntimeError, ValueError, IndexError, KeyError, AssertionError):
                found[path] = math.inf  # a length that no longer fits its row: it is read
        return found


def _faults(
    silent: set[Path], changes: dict[Path, float], batch: dict, roles: dict[str, str], read: set[str], excused: set[str]
) -> dict[Path, str]:
    """{entry: what is wrong} of entries whose change leaves the loss as it is."""
    wrong = {}
    for path in silent:
        name, role = path[-1], roles.get(path[-1])
        value = batch[name] if len(path) == 1 else None
        cancels = value is not None and (value.is_floating_point() or (role == "input" and not changes[path]))
        if name in read and cancels and not _carried(batch, name, changes, silent):
            wrong[path] = "the loss reads it, and its value makes no difference"
        elif role in ("input", "target") and name not in {*read, *excused}:
            wrong[path] = f"declared as {role}, and neither the loss nor the evaluation reads it"
    return wrong


def _carried(batch: dict, name: str, changes: dict[Path, float], silent: set[Path]) -> bool:
    """Whether an entry that matters is, sample by sample, a sum of this one and others of the same shape."""
    floats = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.is_floating_point()}
    same = [k for k, v in floats.items() if v.shape == batch[name].shape and v[0].numel() > 8]
    for whole in (k for k in same if k != name and (k,) in changes and (k,) not in silent):
        parts = [k for k in same if k != whole]
        columns = torch.stack([to_double(batch[k]).flatten(1) for k in parts], -1)  # (B, D, parts)
        rows = to_double(batch[whole]).flatten(1)
        shares = torch.linalg.lstsq(columns, rows[..., None]).solution  # (B, parts, 1)
        left = (columns @ shares)[..., 0] - rows
        sums = left.norm(dim=1) <= 1e-3 * rows.norm(dim=1)
        if sums.all() and (shares[:, parts.index(name)].abs() > 0.01).any():
            return True
    return False


def _confirm(wrong: dict[Path, str], loss: Loss, data: Data) -> dict[Path, str]:
    """Return what is still wrong with four times as many other samples: a mask may hide all of a few."""
    indices = pick(data, min(4 * _samples(loss.stage), len(data)), loss.seed + 1)
    more = fetch(data, indices, loss.seed, loss.run.device)
    again = loss.changes(more, loss.of(more), wrong)
    return {p: why for p, why in wrong.items() if again.get(p, 0.0) <= _limit(loss.run)}


def _in_single_precision(silent: Collection[Path], loss: Loss, batch: dict) -> dict[Path, float]:
    """Relative changes of the loss by those entries without autocast, or none if the weights are in 16 bits. Early in
    training, a head that started at zero passes on less of an input than 16 bits resolve."""
    if any(p.dtype != torch.float32 for p in loss.stage.model.parameters()):
        return {}
    loss.autocast = nullcontext
    try:
        return loss.changes(batch, loss.of(batch), silent)
    except (RuntimeError, ValueError):  # a kernel for 16 bits only
        return {}


def _limit(run: Run) -> float:
    return ROUNDING.get(run.precision, COARSE)


def _tensors(batch: dict, above: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Tensors with one row per sample. Where a trainer gets a batch of its own inside, only that one's."""
    n, nested = batch_size(batch), {k: v for k, v in batch.items() if isinstance(v, dict)}
    for key, value in nested.items():
        if any(isinstance(v, Tensor) for v in value.values()):
            yield from _tensors(value, (*above, key))
    inside = {k for v in nested.values() for k in v}
    for key, value in batch.items():
        if isinstance(value, Tensor) and value.dim() and len(value) == n and key not in inside:
            yield (*above, key), value


def _other(tensor: Tensor, draws: torch.Generator) -> Tensor | None:
    """Return the entry with noise of its own spread added; for integers with every second row replaced by its
    neighbour's, so that a sum over the batch changes, too. None: all rows are equal."""
    if tensor.is_floating_point():
        spread = tensor.float().std().item() or 1.0
        return tensor + spread * torch.randn(tensor.shape, generator=draws).to(tensor)
    for step in range(1, len(tensor)):
        moved = tensor.roll(step, 0)
        other = tensor.clone()
        other[::2] = moved[::2]
        if not torch.equal(other, tensor):
            return other
    return None


def _replaced(batch: dict, path: Path, other: Tensor) -> dict:
    if len(path) == 1:
        return {**batch, path[0]: other}
    return {**batch, path[0]: _replaced(batch[path[0]], path[1:], other)}


class _Watched(View):
    """Samples whose batches note what is read of them."""

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return Reads(self.data.collate(samples), self.seen)


def _read_by_evaluation(run: Run, stage: Stage) -> set[str]:
    """Names of entries that `evaluate` reads."""
    read: set[str] = set()
    data = stage.data["val"]
    view = _Watched(data, range(min(stage.expect.at_most(8), len(data))))
    view.seen = read
    own = run.batches

    def batches(data: Any, size: int | None = None) -> Iterator[dict]:
        for batch in own(data, size):
            yield Reads(batch, read)

    run.batches = batches
    try:
        run.measure(stage, view)
    finally:
        del run.batches
    return read
