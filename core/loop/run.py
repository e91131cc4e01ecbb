"""`Run` is the object that a recipe's `train()` uses: it yields steps, makes updates, evaluates, logs and saves.

Core does what has exactly one right answer: sample order, division of the loss over the global batch, clipping, the
finite check, the learning rate of every step, checkpoint contents. Everything else is in the recipe.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from trainworthy.core.base import config, seeds
from trainworthy.core.base.console import Console
from trainworthy.core.base.errors import Interrupted, Stop
from trainworthy.core.base.modes import in_mode
from trainworthy.core.base.processes import agreed
from trainworthy.core.data import loader
from trainworthy.core.loop import checkpoint, optim, ranks, saving, shard, update
from trainworthy.core.loop.journal import Halt, Journal, Logged
from trainworthy.core.loop.precision import autocast, precision
from trainworthy.core.loop.rehearsal import FullRun, Rehearsal, crosses
from trainworthy.core.monitoring.metrics import MetricsTracker
from trainworthy.core.recipe.stage import Data, Stage, batch_size


@dataclass
class Step:
    """One optimiser step: its 0-based `index`, 1-based `epoch`, and this rank's micro-batches."""

    index: int
    epoch: int
    batches: list[dict]
    _due: Callable[[float], bool]
    keys: list[list[loader.Key]]
    """(epoch, index) of the samples in each micro-batch."""

    def due(self, every: float) -> bool:
        """Return whether this is the last step of a period of `every` epochs, or of the whole run."""
        return self._due(every)


class Run:
    """One run of one recipe: settings, devices, folder, counters."""

    def __init__(
        self,
        cfg: config.Config,
        accelerator: Accelerator,
        *,
        folder: Path | None = None,
        home: Path | None = None,
        rehearsal: Rehearsal | None = None,
        tracker: MetricsTracker | None = None,
        console: Console | None = None,
    ):
        self.cfg, self.accelerator, self.folder, self.tracker = cfg, accelerator, folder, tracker
        self.rehearsal = rehearsal
        self.home = home or folder  # the run folder, if `folder` is a stage's subfolder
        self.console = console or Console(quiet=True)
        self.device, self.rank, self.world = accelerator.device, accelerator.process_index, accelerator.num_processes
        self.precision = precision(cfg, accelerator)
        self.shard = shard.mode(cfg, self.world, rehearses=not self.mode.shard)
        self.signal: str | None = None  # set by the signal handler, read between steps
        self.step = self.total = 0  # optimiser steps done in this stage, and their planned total
        self.started = 0  # steps already done when this process started
        self.seconds = 0.0  # seconds of training, over all resumes
        self.checkpoints: checkpoint.Checkpoints | None = None
        self.identity: dict[str, Any] = {}  # recipe and seed, stored in every checkpoint
        self.journal = Journal(self)
        self.frozen_hash: str | None = None
        self.finished = False  # the last step is done, so a run resumed in a later stage takes no more
        self.saw_bad = False  # set on CPU, where a bad step is known at once
        self._since = self.saved_at = time.monotonic()
        self.current: Step | None = None
        self.used_loss: Callable | None = None  # loss of the last update, if not the stage's own
        self.used_batches: list[dict] = []  # of the last update
        self.used_optimizers: list[torch.optim.Optimizer] = []  # those that stepped on it
        self.used_draws: list[Tensor] | None = None  # a rehearsal's: states of the generators before the last update
        self.after_eval: Callable[[int], None] | None = None
        self.drift = ""  # rehearsal on several processes: what differs between them
        self._flags: Any = None  # host-side collectives

    @property
    def rehearsal(self) -> Rehearsal | None:
        """The rehearsal that this is; None in a full run."""
        return self.mode if isinstance(self.mode, Rehearsal) else None

    @rehearsal.setter
    def rehearsal(self, rehearsal: Rehearsal | None) -> None:
        self.mode: FullRun = rehearsal or FullRun()

    # ---------------------------------------------------------------- data

    def batches(self, data: Data, size: int | None = None) -> Iterator[dict]:
        """Yield batches of `data` on the evaluation path: every sample once, in order, without random draws. Each rank
        gets a contiguous part."""
        size = size or self.cfg.train.eval_batch_size
        n = len(data)
        mine = range(self.rank * n // self.world, (self.rank + 1) * n // self.world)
        keys = [[(-1, i) for i in mine[s : s + size]] for s in range(0, len(mine), size)]
        if self.shard != shard.NONE:
            ends = itertools.accumulate(shard.even_cut(n, self.rank, self.world, size), initial=0)
            keys = [[(-1, i) for i in mine[a:b]] for a, b in itertools.pairwise(ends)]
        settings = replace(self.cfg.loader, workers=self.mode.eval_workers(self.cfg))
        return loader.batches(data, keys, seed=0, settings=settings, device=self.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """Collect rows (n_rank, ...) of all ranks, in the order of the data set."""
        if self.world == 1:
            return tensor
        sizes = self.accelerator.gather(torch.tensor([len(tensor)], device=self.device)).tolist()
        padded = torch.zeros(max(sizes), *tensor.shape[1:], dtype=tensor.dtype, device=self.device)
        padded[: len(tensor)] = tensor
        rows = self.accelerator.gather(padded).split(max(sizes))
        return torch.cat([r[:n] for r, n in zip(rows, sizes, strict=True)])

    def train_data(self, stage: Stage) -> Data:
        """Return the training set that the loop reads: a rehearsal's is smaller."""
        return self.mode.data(stage.data["train"])

    def samples_per_epoch(self, stage: Stage) -> int:
        """Return the samples per epoch. If the loop makes its own samples, one iteration is an epoch and counts as one
        batch."""
        return len(stage.data["train"]) if "train" in stage.data else self.cfg.train.batch_size

    def total_steps(self, stage: Stage) -> int:
        """Return the iterations of the whole stage: optimiser steps, unless an iteration has several."""
        return self.mode.total_steps(self, stage)

    def progress(self, share: float) -> float:
        """Return the progress (0, 1] of a ramp over the first `share` of this stage; 1 outside the loop."""
        return min(1.0, (self.current.index + 1) / max(1.0, share * self.total)) if self.current else 1.0

    def micro_batches(self, batch: dict) -> list[dict]:
        """Return this process's part of a batch that the loop made, as micro-batches."""
        cuts, n = self.mode.cuts(self.cfg), batch_size(batch)
        sizes = [1] * cuts if isinstance(cuts, int) else cuts
        ends = [n * sum(sizes[: i + 1]) // sum(sizes) for i in range(len(sizes))]
        if len(ends) == 1:
            return [batch]
        parts = [{k: v[a:b] for k, v in batch.items()} for a, b in zip([0, *ends], ends, strict=False) if b > a]
        return parts or [batch]

    # ---------------------------------------------------------------- the loop

    def steps(self, stage: Stage) -> Iterator[Step]:
        """Yield the optimiser steps after the last checkpoint, with order, seeds, rates, progress bar, logging, saving
        and clean stop."""
        cfg, mode = self.cfg, self.mode
        reads, total = "train" in stage.data, self.total_steps(stage)
        size = mode.step_size(cfg) if reads else cfg.train.batch_size
        data = self.train_data(stage) if reads else None
        n = size if data is None else len(data)
        stream = None if data is None else loader.Stream(n, cfg.run.seed, fixed=mode.fixed, order=data.order)
        mode.begin(self, stage, total)
        self.total = total
        start = self.started = saving.restore(self, stage)
        update.training_modes(stage)
        cuts = mode.cuts(cfg)

        def cut(step: int) -> list:
            if stream is None:
                return []
            keys = stream.keys(step * size, (step + 1) * size)
            return loader.micro_batches(keys, rank=self.rank, world=self.world, sizes=cuts)

        flat = (micro for step in range(start, total) for micro in cut(step))
        fetched: Iterator = flat if data is None else loader.batches(
            data, flat, seed=cfg.run.seed, settings=cfg.loader, device=self.device)  # fmt: skip
        self.console.start_bar(stage.name, total, start)
        self.journal.clock = self._since = self.saved_at = time.monotonic()
        with ranks.Ranks(self, stage) as self.ranks:
            yield from self._each(stage, range(start, total), fetched, cut, n, size)
        self.console.end_bar()

    def _each(
        self, stage: Stage, indices: range, fetched: Iterator, cut: Callable, n: int, size: int
    ) -> Iterator[Step]:
        """Yield a step for each index. `fetched`: micro-batches; `cut`: index -> their keys; `n` samples per epoch,
        `size` per step."""
        mode, total, per_step = self.mode, self.total, len(cut(0))
        if self.finished or self.journal.out_of_patience(stage):
            return
        for index in indices:
            micro = [next(fetched) for _ in range(per_step)]
            for optimizer in stage.optimizers.values():
                optim.set_rates(optimizer, mode.rate(index, total, self.cfg.optim))
            seeds.seed_global(self.cfg.run.seed, "model", index, self.rank)

            def due(every: float, done: int = index + 1) -> bool:
                return mode.is_due(done, total, size, n * every)

            self.current = Step(index, index * size // n + 1, micro, due, cut(index))
            yield self.current

            self.step = index + 1
            self.console.tick(self.step, lambda: self.journal.progress)
            if mode.after_step(self, stage, size, n):
                return

    def finish_step(self, stage: Stage, size: int, n: int) -> bool:
        """Log, save and stop when due; return whether patience ends the run. `size` samples per step, `n` per epoch."""
        stops = self.step < self.total and self.journal.out_of_patience(stage)
        last = stops or self.step == self.total
        save = crosses(self.step, size, n * self.cfg.run.save_every) or saving.is_due(self)
        self._after_step(stage, last=last, save=save)
        if stops:
            why = f"no new best for {self.cfg.train.patience:g} epochs"
            self.console.say(f"  stopped early at step {self.step} of {self.total}: {why}")
        return stops

    def end(self, stage: Stage) -> None:
        """Log and save the last step of a loop that `train()` left early."""
        if self.current and self.step <= self.current.index:
            self.step = self.current.index + 1
            self._after_step(stage, last=True, save=True)

    def _after_step(self, stage: Stage, *, last: bool, save: bool) -> None:
        """Read metrics back, save and stop, when due."""
        if drift := self.ranks.drift(self.step):
            self.close()
            raise Stop(drift)
        stop, self.finished = self._requested_stop(), last
        save = self.folder is not None and (stop is not None or last or save)
        if save or stop or last or self.saw_bad or self.step % self.cfg.run.log_every == 0 or self.journal.late:
            self.flush(stage)
        if save:
            now = time.monotonic()
            self.seconds, self._since = self.seconds + now - self._since, now
            self.save(stage)
        if stop:
            if save:
                self.wait_for_checkpoints()  # wait until it is on disk, so that all ranks learn of a write error
            self.close()
            raise Interrupted(f"{stop} at step {self.step}: saved\n  next:         trainworthy resume {self.home}")

    def update(
        self, stage: Stage, batches: list[dict], *, optimizer: str | None = None, loss: Callable | None = None
    ) -> dict[str, Tensor]:
        """Take one step on this rank's micro-batches with one optimiser, or with all of the stage's (the default); return
        the means over the GLOBAL batch, still on the device.

        Every term's sum is divided by its denominator over all micro-batches and ranks, so the division of the batch
        does not change the gradient. The norm is measured before clipping. A non-finite step changes neither weights
        nor moments.
        """
        return update.take(self, stage, batches, optimizer=optimizer, loss=loss)

    def log_update(
        self,
        steppers: Iterable[torch.optim.Optimizer],
        batches: list[dict],
        names: list[str],
        values: Tensor,
        *,
        own: Tensor | None = None,
    ) -> None:
        """Store the metrics (len(names),) of an update on `batches` for the log, still on the device. `update` calls
        it; a loop with its own updates calls it itself. `own`: this process's part of the loss."""
        groups = [g for opt in steppers for g in opt.param_groups]
        own_names = [g.get("name", i) for i, g in enumerate(groups)]
        unique = len({*own_names}) == len(groups)  # several optimisers may have equal ones
        rates = {f"lr/{own_names[i] if unique else i}": g["lr"] for i, g in enumerate(groups)}
        if len(set(rates.values())) == 1:
            rates = {"lr": next(iter(rates.values()))}
        keys = self.current.keys if self.current else []
        self.journal.pending.append(Logged(self.step + 1, keys, [] if keys else batches, names, values, rates, own))

    def log(self, group: str, values: Mapping[str, float | Tensor]) -> None:
        """Log more values of the current iteration than its losses. Each is tagged `step/<group>/<name>`, in the
        iteration's row."""
        self.journal.add(self.step + 1, group, values)

    # ---------------------------------------------------------------- evaluation

    def evaluate(self, stage: Stage) -> dict[str, float]:
        """Run the recipe's evaluation on the validation set, in eval mode and without gradients; log it and keep the
        best."""
        self.mode.before_evaluation(self, stage)
        metrics = self.measure(stage, self.mode.validation(stage), final=False)
        self.mode.record(self, stage, metrics)
        return metrics

    def measure(self, stage: Stage, data: Data, *, probe: bool = False, final: bool = True) -> dict[str, float]:
        """Run `stage.evaluate` (with `probe`: the probe's) on `data` in eval mode, without gradients; restore all modes
        afterwards. Not `final`: an evaluation within the loop, which may be a cheaper one."""
        model = stage.eval_model
        if self.world > 1:  # batch norm statistics differ between ranks; rank 0's are saved and exported
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
        with evaluating(model), self.autocast():
            evaluate = (stage.gate_evaluator if probe else stage).evaluate if final else self.mode.evaluator(stage)
            return evaluate(model, data)

    # ---------------------------------------------------------------- wrapping

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """Loss scaling for fp16; inactive in other precisions."""
        if not hasattr(self, "_scaler"):
            scale = self.mode.loss_scale
            self._scaler = torch.amp.GradScaler(self.device.type, init_scale=scale, enabled=self.precision == "fp16")
        return self._scaler

    def autocast(self):
        """Context with the forward's precision."""
        return autocast(self.device, self.precision)

    # ---------------------------------------------------------------- saving

    def flush(self, stage: Stage) -> None:
        """Read back the metrics logged since the last call, and check them. A failed check stops the run."""
        try:
            self.journal.read(stage)
        except Halt as halt:
            if self.folder and halt.keep:
                self.save(stage)
                self.wait_for_checkpoints()
            self.close()
            raise
        self.saw_bad = False

    def save(self, stage: Stage) -> None:
        """Let rank 0 save a complete state. Order, draws and rates are functions of seed and step, so they need no
        saving."""
        saving.save(self, stage)

    def wait_for_checkpoints(self) -> None:
        """Wait until every checkpoint is on disk."""
        if self.checkpoints is None:
            return
        if self.rank:  # its part of a sharded one; rank 0 reports errors
            with contextlib.suppress(Stop):
                self.checkpoints.wait()
        self.on_rank_0(self.checkpoints.wait)

    def on_rank_0(self, job: Callable[[], None]) -> None:
        """Run a job on rank 0. Its error (a full disk) stops every rank; otherwise the others would wait in a
        collective."""
        problem = None
        if self.rank == 0:
            try:
                job()
            except Stop as stop:
                problem = stop
        if problem := agreed(self.accelerator, problem):
            raise problem

    def _requested_stop(self) -> str | None:
        """Return the signal that asks for a stop, agreed on by all ranks (they may receive it at different steps)."""
        if self.world == 1:
            return self.signal
        if self._flags is None:  # a CPU group, so that hosts do not wait for their devices
            self._flags = dist.new_group(backend="gloo")
        signals = torch.tensor(float(self.signal is not None))
        dist.all_reduce(signals, group=self._flags)
        return (self.signal or "a signal on another rank") if signals.item() else None

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Write everything saved and logged so far to disk, whatever ends the loop."""
        try:
            yield
        except BaseException:
            for close in (self.console.end_bar, *(x.close for x in (self.checkpoints, self.tracker) if x)):
                with contextlib.suppress(Exception):  # a full disk must not hide the first error
                    close()
            raise

    def close(self) -> None:
        """End the progress bar, finish writing checkpoints and metrics."""
        self.console.end_bar()
        if self.checkpoints:
            self.checkpoints.close()
        if self.tracker:
            self.tracker.close()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode and disable gradients inside; restore every module's own mode after."""
    try:
        with in_mode(model, training=False), torch.no_grad():
            yield
    finally:
        shard.reshard(model)
