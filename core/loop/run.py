"""`Run` is what a recipe's `train()` talks to: it hands out steps, makes updates, evaluates, logs and saves.

What has exactly one right answer lives here: the order of samples, the division of the loss over the global batch, clipping,
the finite check, the rate of every step, what a checkpoint holds. The recipe shows the rest.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from trainworthy.core.base import config, seeds
from trainworthy.core.base.console import Console
from trainworthy.core.base.errors import Interrupted, Stop, UserError
from trainworthy.core.base.processes import agreed
from trainworthy.core.data import loader
from trainworthy.core.loop import checkpoint, optim, ranks
from trainworthy.core.loop.journal import Halt, Journal, Logged, finite
from trainworthy.core.monitoring import monitors
from trainworthy.core.monitoring.metrics import MetricsTracker
from trainworthy.core.recipe.stage import Data, Stage, View, batch_size

REHEARSED = 64  # validation samples that an evaluation inside a gate's rehearsal reads
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Plan:
    """How a gate's rehearsal of `train()` differs from the full run."""

    steps: int
    samples: list[int] | None = None
    """Only these training samples."""
    blank: tuple[str, ...] = ()
    """Input fields replaced by zeros."""
    swap: list[int] | None = None
    """Positions (into `samples`) whose inputs each of them gets instead of its own."""
    fixed: bool = False
    """The same draws for a sample every time."""
    batch_size: int | None = None
    sizes: list[int] | None = None
    """Sizes of each rank's micro-batches."""
    peak: bool = False
    """Hold the schedule at the peak rate."""
    due: tuple[int, ...] = ()
    """After these steps (counted from 1) `step.due` is true."""
    stop_after: int | None = None
    """Save and stop after this many steps, as a signal would."""
    watch: Callable[[Stage, int], bool] | None = None
    """Called after each step; true ends the rehearsal."""
    keep_in: Path | None = None
    """Folder for checkpoints, where the rehearsal saves."""
    losses: list[float] = field(default_factory=list)
    """Filled by the run: the loss of every update."""


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
        """Is this the last step of a stretch of `every` epochs, or of the whole run?"""
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
        plan: Plan | None = None,
        tracker: MetricsTracker | None = None,
        console: Console | None = None,
    ):
        self.cfg, self.accelerator, self.folder, self.plan, self.tracker = cfg, accelerator, folder, plan, tracker
        self.home = home or folder  # the run folder, where that of one of several stages lies in it
        self.console = console or Console(quiet=True)
        self.device, self.rank, self.world = accelerator.device, accelerator.process_index, accelerator.num_processes
        self.precision = precision(cfg, accelerator)
        self.signal: str | None = None  # set by the signal handler, read between steps
        self.step = self.total = 0  # optimiser steps done in the present stage, and all it will make
        self.started = 0  # steps that were already done when this process began
        self.seconds = 0.0  # spent training, over all resumes
        self.checkpoints: checkpoint.Checkpoints | None = None
        self.identity: dict[str, Any] = {}  # of the run, in every checkpoint: its recipe and seed
        self.journal = Journal(self)
        self._frozen_hash: str | None = None
        self.finished = False  # the last step was made: a resumed run of a later stage makes no more
        self._saw_bad = False  # on CPU a bad step is known at once
        self._since = self._saved_at = time.monotonic()
        self.current: Step | None = None
        self.used_loss: Callable | None = None  # of the last update, where it was not the stage's own
        self.used_batches: list[dict] = []  # of the last update
        self.after_eval: Callable[[int], None] | None = None
        self.drift = ""  # of a rehearsal on several processes: what differs between them
        self._flags: dist.ProcessGroup | None = None  # for what hosts agree on

    # ---------------------------------------------------------------- data

    def batches(self, data: Data, size: int | None = None) -> Iterator[dict]:
        """The evaluation path over `data`: every sample once, in order, no random draw; each rank gets one stretch."""
        size = size or self.cfg.train.eval_batch_size
        n = len(data)
        mine = range(self.rank * n // self.world, (self.rank + 1) * n // self.world)
        keys = [[(-1, i) for i in mine[s : s + size]] for s in range(0, len(mine), size)]
        settings = replace(self.cfg.loader, workers=0 if self.plan else self.cfg.loader.eval_workers)
        return loader.batches(data, keys, seed=0, settings=settings, device=self.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """Rows (n_rank, ...) of all ranks, in the order of the data set."""
        if self.world == 1:
            return tensor
        sizes = self.accelerator.gather(torch.tensor([len(tensor)], device=self.device)).tolist()
        padded = torch.zeros(max(sizes), *tensor.shape[1:], dtype=tensor.dtype, device=self.device)
        padded[: len(tensor)] = tensor
        rows = self.accelerator.gather(padded).split(max(sizes))
        return torch.cat([r[:n] for r, n in zip(rows, sizes, strict=True)])

    def train_data(self, stage: Stage) -> Data:
        """The stage's training set, or what the plan leaves of it."""
        data, plan = stage.data["train"], self.plan
        if plan and (plan.samples is not None or plan.blank):
            chosen = plan.samples if plan.samples is not None else range(len(data))
            return View(data, chosen, blank=plan.blank, swap=plan.swap)
        return data

    def epoch(self, stage: Stage) -> int:
        """Samples of an epoch; where the loop makes its own, an epoch is a unit of it and counts as one batch."""
        return len(stage.data["train"]) if "train" in stage.data else self.cfg.train.batch_size

    def total_steps(self, stage: Stage) -> int:
        """Units of the whole stage: optimiser steps, unless a unit has several."""
        if self.plan:
            return self.plan.steps
        t = self.cfg.train
        return max(1, math.ceil(t.epochs * self.epoch(stage) / t.batch_size))

    def progress(self, share: float) -> float:
        """How far a ramp over the first `share` of the present stage has come in this step, (0, 1]; outside the loop it is over."""
        return min(1.0, (self.current.index + 1) / max(1.0, share * self.total)) if self.current else 1.0

    def cut(self, batch: dict) -> list[dict]:
        """This process's part of a batch that the loop made, in its micro-batches."""
        sizes = self.plan.sizes if self.plan and self.plan.sizes else [1] * self.cfg.train.accumulate
        n = batch_size(batch)
        ends = [n * sum(sizes[: i + 1]) // sum(sizes) for i in range(len(sizes))]
        if len(ends) == 1:
            return [batch]
        parts = [{k: v[a:b] for k, v in batch.items()} for a, b in zip([0, *ends], ends, strict=False) if b > a]
        return parts or [batch]

    # ---------------------------------------------------------------- the loop

    def steps(self, stage: Stage) -> Iterator[Step]:
        """Optimiser steps from where the last checkpoint ends: order, seeds, rates, bar, logging, saving, clean stop."""
        cfg, plan = self.cfg, self.plan
        reads, total = "train" in stage.data, self.total_steps(stage)
        size = plan.batch_size if plan and plan.batch_size and reads else cfg.train.batch_size
        data = self.train_data(stage) if reads else None
        n = len(data) if reads else size
        stream = loader.Stream(n, cfg.run.seed, fixed=bool(plan and plan.fixed), order=data.order) if reads else None
        if not plan and not stage.expect.loss_may_rise:
            self.journal.live = monitors.Live(cfg.train.batch_size, total)
        self.total = total
        start = self.started = self._restore(stage)
        training_modes(stage)
        cuts = plan.sizes if plan and plan.sizes else cfg.train.accumulate

        def cut(step: int) -> list:
            if not reads:
                return []
            keys = stream.keys(step * size, (step + 1) * size)
            return loader.micro_batches(keys, rank=self.rank, world=self.world, sizes=cuts)

        flat = (micro for step in range(start, total) for micro in cut(step))
        fetched = (
            loader.batches(data, flat, seed=cfg.run.seed, settings=cfg.loader, device=self.device) if reads else flat
        )
        self.console.start_bar(stage.name, total, start)
        self.journal.clock = self._since = self._saved_at = time.monotonic()
        with ranks.Ranks(self, stage) as self._ranks:
            yield from self._each(stage, range(start, total), fetched, cut, n, size)
        self.console.end_bar()

    def _each(
        self, stage: Stage, indices: range, fetched: Iterator, cut: Callable, n: int, size: int
    ) -> Iterator[Step]:
        """A step for each index. `fetched`: micro-batches; `cut`: index -> their keys; `n` samples an epoch, `size` a step."""
        plan, total, per_step = self.plan, self.total, len(cut(0))
        if self.finished or self.journal.out_of_patience(stage):
            return
        for index in indices:
            micro = [next(fetched) for _ in range(per_step)]
            for optimizer in stage.optimizers.values():
                optim.set_rates(optimizer, 1.0 if plan and plan.peak else optim.schedule(index, total, self.cfg.optim))
            seeds.seed_global(self.cfg.run.seed, "model", index, self.rank)

            def due(every: float, done: int = index + 1) -> bool:
                if plan:
                    return done in plan.due
                return done == total or crosses(done, size, n * every)

            self.current = Step(index, index * size // n + 1, micro, due, cut(index))
            yield self.current

            self.step = index + 1
            self.console.tick(self.step, lambda: self.journal.shown)
            if plan:
                if self._rehearsed(stage):
                    return
                continue
            tired = self.step < total and self.journal.out_of_patience(stage)
            last = tired or self.step == total
            save = crosses(self.step, size, n * self.cfg.run.save_every) or self._save_due()
            self._after_step(stage, last=last, save=save)
            if tired:
                self.console.say(
                    f"  stopped early at step {self.step} of {total}: no new best for {self.cfg.train.patience:g} epochs"
                )
                return

    def end(self, stage: Stage) -> None:
        """After `train()`: a loop that was left early gets the log and the checkpoint of its last step."""
        if self.current and self.step <= self.current.index:
            self.step = self.current.index + 1
            self._after_step(stage, last=True, save=True)

    def _after_step(self, stage: Stage, *, last: bool, save: bool) -> None:
        """Read metrics back, save, stop, where it is time to."""
        if drift := self._ranks.drift(self.step):
            self.close()
            raise Stop(drift)
        stop, self.finished = self._stop_asked(), last
        save = bool(self.folder) and (stop or last or save)
        if save or stop or last or self._saw_bad or self.step % self.cfg.run.log_every == 0 or self.journal.late:
            self._flush(stage)
        if save:
            now = time.monotonic()
            self.seconds, self._since = self.seconds + now - self._since, now
            self._save(stage)
        if stop:
            if save:
                self.settle()  # until it is on disk, for all ranks: one that cannot write says so
            self.close()
            raise Interrupted(f"{stop} at step {self.step}: saved\n  next:         trainworthy resume {self.home}")

    def _save_due(self) -> bool:
        """Is it time to save by steps or by the clock? Rank 0's clock decides for all, which saving needs; they agree where metrics
        are read back, so that no step waits for it."""
        settings = self.cfg.run
        if settings.save_steps and self.step % settings.save_steps == 0:
            return True
        if not settings.save_minutes or (self.world > 1 and self.step % settings.log_every):
            return False
        due = time.monotonic() - self._saved_at >= 60 * settings.save_minutes
        return bool(agreed(self.accelerator, due))

    def _rehearsed(self, stage: Stage) -> bool:
        """Has the gate seen enough?"""
        plan = self.plan
        self.drift = self.drift or self._ranks.drift(self.step)
        plan.losses += [float(p.values[0]) for p in self.journal.pending]
        self.journal.pending = []
        if plan.stop_after == self.step:
            self._save(stage)
            return True
        return bool(plan.watch and plan.watch(stage, self.step))

    def update(
        self, stage: Stage, batches: list[dict], *, optimizer: str | None = None, loss: Callable | None = None
    ) -> dict[str, Tensor]:
        """One optimiser step on this rank's micro-batches; returns the means over the GLOBAL batch, still on the device.

        Every term's sum is divided by its denominator over all micro-batches and all ranks, so that no cut of the batch
        changes the gradient. The norm is measured before clipping; a non-finite step never reaches weights or moments.
        """
        name = optimizer or next(iter(stage.optimizers))
        opt = stage.optimizers[name]
        parameters = [p for g in opt.param_groups for p in g["params"]]
        for p in parameters:
            p.grad = None

        self.used_loss, self.used_batches = loss, batches  # what a gate must compare the gradient with
        counts = self._global(summed([stage.counts(b) for b in batches]))
        objective = self._objective(stage, loss)
        wrapped = self.world if loss is None else 1  # DDP averages over ranks: undo it
        sums: dict[str, Tensor] = {}
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with contextlib.nullcontext() if last or wrapped == 1 else objective.no_sync():
                terms = objective(batch)
                # d(mean)/d(sum) = 1 / denominator goes to autograd as it is: no operation in the graph
                learnt = {t: s for t, s in terms.items() if s.requires_grad}
                shares = [_fill(s, wrapped / denominator(t, counts)) for t, s in learnt.items()]
                torch.autograd.backward(list(learnt.values()), self.scaler.scale(shares))
            for term, value in terms.items():
                sums[term] = sums[term] + value.detach() if term in sums else value.detach()

        if wrapped < self.world:  # a loss of its own is not wrapped: its gradients are added here
            for p in parameters:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
        self.scaler.unscale_(opt)
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = optim.clip(grads, self.cfg.optim.clip) if grads else torch.zeros((), device=self.device)
        own = functools.reduce(torch.add, sums.values()) if self.world > 1 else None
        means = {t: s / denominator(t, counts) for t, s in self._global(sums).items()}
        total = functools.reduce(torch.add, means.values())
        values = {"loss": total, **(means if len(means) > 1 else {}), "grad_norm": norm}
        stacked = torch.stack([v.float() for v in values.values()])
        self._guarded_step(opt, stacked)

        self.note(opt, batches, list(values), stacked, own=own)
        return values

    def note(
        self,
        opt: torch.optim.Optimizer,
        batches: list[dict],
        names: list[str],
        values: Tensor,
        *,
        own: Tensor | None = None,
    ) -> None:
        """Keep the metrics (len(names),) of an update on `batches` for the log, still on the device; `update` does, and a loop that
        makes its updates otherwise calls it. `own`: this process's part of the loss."""
        rates = {g.get("name", str(i)): g["lr"] for i, g in enumerate(opt.param_groups)}
        rates = (
            {"lr": next(iter(rates.values()))}
            if len(set(rates.values())) == 1
            else {f"lr/{k}": v for k, v in rates.items()}
        )
        keys = self.current.keys if self.current else []
        self.journal.pending.append(Logged(self.step + 1, keys, [] if keys else batches, names, values, rates, own))

    def log(self, group: str, values: dict[str, float | Tensor]) -> None:
        """More about the present unit than its losses: each value is tagged `step/<group>/<name>`, in the row of that unit."""
        self.journal.tell(self.step + 1, group, values)

    def _guarded_step(self, opt: torch.optim.Optimizer, values: Tensor) -> None:
        """Step if all `values` are finite. Zeroed gradients would still decay weights and move moments, so the step is skipped."""
        if self.scaler.is_enabled():
            self.scaler.step(opt)  # skips by itself where a gradient overflowed
            self.scaler.update()
        elif self.device.type == "cpu":
            if finite(values.tolist()):  # no sync on CPU, and 40 us less than a kernel told to skip
                opt.step()
            else:
                self._saw_bad = True
        elif getattr(opt, "_step_supports_amp_scaling", False):
            found_inf = ~torch.isfinite(values.sum())  # a fused kernel skips on the device, without a sync
            opt.grad_scale, opt.found_inf = None, found_inf.float()
            opt.step()
        elif finite(values.tolist()):  # a sync on an accelerator, for optimisers that cannot skip by themselves
            opt.step()

    # ---------------------------------------------------------------- evaluation

    def evaluate(self, stage: Stage) -> dict[str, float]:
        """The recipe's own evaluation of the validation set, in eval mode and without gradients; logged, best kept."""
        if not self.plan:
            self._flush(stage)  # before the clock runs on through the evaluation
        val = stage.data["val"]
        shown = stage.expect.at_most(REHEARSED)
        if self.plan and len(val) > shown:  # a rehearsal shows the path, not the number
            val = View(val, [i * len(val) // shown for i in range(shown)])
        metrics = self.measure(stage, val)
        self.log_eval(stage, metrics)
        return metrics

    def measure(self, stage: Stage, data: Data, *, probe: bool = False) -> dict[str, float]:
        """`stage.evaluate` (or what stands for it in a `probe`) on `data` in eval mode, without gradients, every mode as it was
        afterwards."""
        model = stage.eval_model
        if self.world > 1:  # each rank's batch norm saw its own batches; what is saved and exported is rank 0's
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
        with evaluating(model), self.autocast():
            return (stage.gate_evaluator if probe else stage).evaluate(model, data)

    def log_eval(self, stage: Stage, metrics: dict[str, float]) -> None:
        """Record an evaluation of the weights as they are: files, line, best and N best."""
        if self.plan:
            return
        step = self.current.index + 1 if self.current else self.step
        self._flush(stage)
        epoch, told = self.journal.evaluated(stage, step, metrics)
        name, best = stage.metric.name, self.journal.best

        def keep_best() -> None:
            if (metrics[name], step) in best:
                info = {"metric": name, "value": metrics[name], "epoch": epoch}
                self.checkpoints.save_best(step, stage.eval_model, info, metric=name, best=[s for _, s in best],
                                           without=stage.not_saved)  # fmt: skip

        if self.checkpoints:
            self._on_rank_0(keep_best)
        if self.after_eval:
            self.after_eval(step)
        self.journal.clock = time.monotonic()  # the evaluation is not part of the next step's rate
        self.console.say(told)
        try:
            self.journal.judge(stage)
        except Halt:  # within a step: there is nothing to save but the best weights, which are
            self.close()
            raise

    # ---------------------------------------------------------------- wrapping

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """Loss scaling for fp16; does nothing in other precisions."""
        if not hasattr(self, "_scaler"):
            scale = 2.0**10 if self.plan else 2.0**16  # a rehearsal of one step has no time to look for its scale
            self._scaler = torch.amp.GradScaler(self.device.type, init_scale=scale, enabled=self.precision == "fp16")
        return self._scaler

    def autocast(self):
        """The forward's precision."""
        return autocast(self.device, self.precision)

    def _objective(self, stage: Stage, loss: Callable | None) -> nn.Module:
        """One module whose forward IS the recipe's loss, wrapped once per stage for several processes."""
        if loss is not None:
            return _Objective(self, stage.model, loss)
        if stage.wrapped is None or stage.wrapped[0] is not stage.model:
            module: nn.Module = _Objective(self, stage.model, stage.loss)
            if self.world > 1:
                module = self.accelerator.prepare_model(module)
            if self.cfg.train.compile and not self.plan:
                module.compile()
            stage.wrapped = (stage.model, module)  # not here: a loss that knows its run would close a circle
        return stage.wrapped[1]

    def _global(self, values: dict[str, Any]) -> dict[str, Any]:
        """Values summed over ranks."""
        if self.world == 1:
            return values
        stacked = torch.stack([torch.as_tensor(v, dtype=torch.float64 if self.device.type == "cpu" else torch.float32,
                                               device=self.device) for v in values.values()])  # fmt: skip
        dist.all_reduce(stacked)
        return dict(zip(values, stacked.unbind(), strict=True))

    # ---------------------------------------------------------------- saving

    def _flush(self, stage: Stage) -> None:
        """Read back what was logged since the last time; what it says may stop the run."""
        try:
            self.journal.read(stage)
        except Halt as halt:
            if self.folder and halt.keep:
                self._save(stage)
                self.settle()
            self.close()
            raise
        self._saw_bad = False

    def _save(self, stage: Stage) -> None:
        """A complete state by rank 0. What is a pure function of seed and step (order, draws, rates) needs no saving."""
        if self.checkpoints is None:
            return

        stateful = {
            k: s.state_dict() for k, s in stage.state.items()
        }  # on every rank: it may gather what each has its part of

        def save() -> None:
            state = {
                "optimizers": {k: o.state_dict() for k, o in stage.optimizers.items()},
                "stateful": stateful,
                "scaler": self.scaler.state_dict(),
            }
            info = {"stage": stage.name, "run": self.identity, **self.journal.state(), "finished": self.finished,
                    "seconds": self.seconds, "frozen": self._frozen(stage)}  # fmt: skip
            if self.tracker:
                self.tracker.flush()
            self.checkpoints.save(self.step, stage.model, state, info, without=stage.not_saved)

        self._on_rank_0(save)
        self._saved_at = time.monotonic()
        if self.plan:  # a rehearsal reads it back at once, on every rank
            self.checkpoints.wait()
            self.accelerator.wait_for_everyone()

    def settle(self) -> None:
        """Until every checkpoint is on disk."""
        self._on_rank_0(self.checkpoints.wait)

    def _frozen(self, stage: Stage) -> str:
        """Hash of the weights that a checkpoint leaves out, taken once: they do not change. Rehearsals build them anew anyway."""
        if self._frozen_hash is None:
            still = {} if self.plan else stage.frozen_tensors
            self._frozen_hash = checkpoint.digest(still) if still else ""
        return self._frozen_hash

    def _on_rank_0(self, job: Callable[[], None]) -> None:
        """Do what only rank 0 does; what stops it (a full disk) stops every rank: alone it would leave them in a collective."""
        problem = None
        if self.rank == 0:
            try:
                job()
            except Stop as stop:
                problem = stop
        if problem := agreed(self.accelerator, problem):
            raise problem

    def _restore(self, stage: Stage) -> int:
        """Load the newest complete checkpoint of this stage, if there is one; returns the steps already done."""
        folder = self.plan.keep_in if self.plan else self.home
        if folder is None:
            return 0
        self.checkpoints = checkpoint.Checkpoints(
            folder / "checkpoints" / stage.name, keep=self.cfg.run.keep_checkpoints, n_best=self.cfg.run.keep_best
        )
        self._on_rank_0(self.checkpoints.clean)
        newest, damaged = self.checkpoints.survey()
        for name, why in damaged.items():
            self.console.say(f"  passed over checkpoint {name}: {why}")
        if self.tracker and newest is None:
            self.tracker.truncate(after_step=0)
        if newest is None:
            return 0
        checkpoint.assert_own(newest, self.identity)
        model, state, info = self.checkpoints.load(newest)
        if info["frozen"] != self._frozen(stage):
            raise UserError(f"the frozen weights are not those of {newest}", needed="the model this run was started with",
                            cause="its files were changed or replaced", next="start a new run")  # fmt: skip
        checkpoint.load_into(stage.model, model, where=str(newest), without=stage.not_saved)
        for name, optimizer in stage.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        for name, stateful in stage.state.items():
            stateful.load_state_dict(state["stateful"][name])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.journal.restore(info)
        self.finished, self.seconds, self.step = info["finished"], info["seconds"], info["step"]
        if self.tracker:
            self.tracker.truncate(after_step=info["step"])
        self.console.say(f"  resumed from {newest.name} ({newest})")
        return info["step"]

    def _stop_asked(self) -> str | None:
        """The signal that asks for a stop, agreed on by all ranks (they may see it at different steps)."""
        if self.world == 1:
            return self.signal
        if self._flags is None:  # hosts agree without waiting for their devices
            self._flags = dist.new_group(backend="gloo")
        asked = torch.tensor(float(self.signal is not None))
        dist.all_reduce(asked, group=self._flags)
        return (self.signal or "a signal on another rank") if asked.item() else None

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """What was saved and logged so far is on disk, whatever ends the loop."""
        try:
            yield
        except BaseException:
            for close in (self.console.end_bar, *(x.close for x in (self.checkpoints, self.tracker) if x)):
                with contextlib.suppress(Exception):  # a full disk must not hide why the run stopped
                    close()
            raise

    def close(self) -> None:
        """End the bar, finish writing checkpoints and metrics."""
        self.console.end_bar()
        if self.checkpoints:
            self.checkpoints.close()
        if self.tracker:
            self.tracker.close()


class _Objective(nn.Module):
    """A module whose forward is the recipe's loss: what DDP wraps, in the run's precision."""

    def __init__(self, run: Run, model: nn.Module, loss: Callable):
        super().__init__()
        self.model, self._loss = model, loss
        self._device, self._precision = run.device, run.precision

    def forward(self, batch: dict) -> dict[str, Tensor]:
        with autocast(self._device, self._precision):
            return self._loss(self.model, batch)


def autocast(device: torch.device, precision: str):
    """The forward's precision."""
    if precision not in AUTOCAST:
        return contextlib.nullcontext()  # entering a disabled autocast costs 3 us
    return torch.autocast(device.type, dtype=AUTOCAST[precision])


def precision(cfg: config.Config, accelerator: Accelerator) -> str:
    """fp32, bf16 or fp16: the setting, else what the launcher was told."""
    asked = cfg.train.precision
    if asked == "launcher":
        asked = {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    return asked


def training_modes(stage: Stage) -> None:
    """What trains is in train mode, what is frozen in eval mode (its dropout and batch norm must not move)."""
    trained = {id(p) for p in stage.parameters().values()}
    for parameter in stage.model.parameters():
        parameter.requires_grad_(id(parameter) in trained)

    def walk(module: nn.Module, above: bool) -> None:
        own = list(module.parameters())
        module.training = any(id(p) in trained for p in own) if own else above  # dropout follows what it stands in
        for child in module.children():
            walk(child, module.training)

    walk(stage.model, True)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside; every module's own mode restored after."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def crosses(step: int, size: int, stretch: float) -> bool:
    """Does the `step`-th batch of `size` samples end or pass a multiple of `stretch` samples?"""
    return math.floor(step * size / stretch + 1e-9) > math.floor((step - 1) * size / stretch + 1e-9)


def _fill(like: Tensor, value: float | Tensor) -> Tensor:
    """`value` with the shape, type and device of `like`; no transfer from the host."""
    return value.to(like).expand_as(like) if isinstance(value, Tensor) else like.new_full(like.shape, value)


def summed(counts: list[dict[str, float]]) -> dict[str, float]:
    return {t: sum(c[t] for c in counts) for t in counts[0]}


def denominator(term: str, counts: dict[str, Any]) -> Any:
    """What the sum of `term` is divided by; a batch without a single count contributes its sum of nothing, 0 / 1."""
    if term not in counts and "*" not in counts:
        raise UserError(f"the loss term '{term}' has no denominator", got=", ".join(counts),
                        needed=f"'{term}' or '*' in what the stage's counts return")  # fmt: skip
    count = counts.get(term, counts.get("*"))
    return count.clamp_min(1e-12) if isinstance(count, Tensor) else count or 1.0
