"""Collects the metrics of a stage's updates and evaluations. They stay on the device until several steps are read back
together; then they are checked and written. Reading at every step would make the host wait for the device each time.
"""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from trainworthy.core.base.errors import Stop, UserError
from trainworthy.core.base.processes import agreed
from trainworthy.core.data import loader
from trainworthy.core.monitoring import monitors
from trainworthy.core.recipe.stage import Stage

if TYPE_CHECKING:
    from trainworthy.core.loop.run import Run


SECONDS = 5.0  # a run with slow steps reports before `--run.log-every` steps are over


class Halt(Stop):
    """A metric that was read stops the run. `keep`: whether the current weights are worth a checkpoint."""

    def __init__(self, what: str, *, keep: bool):
        super().__init__(what)
        self.keep = keep


@dataclass
class Logged:
    """The metrics of one update, still on the device."""

    step: int
    keys: list[list[loader.Key]]
    made: list[dict]
    """The batches themselves, if the loop made them."""
    names: list[str]
    values: Tensor
    rates: dict[str, float]
    own: Tensor | None = None
    """This process's part of the loss."""


class Journal:
    """Metrics of one stage of a run. Checkpoints store what `state()` returns."""

    def __init__(self, run: "Run"):
        self._run = weakref.ref(run)  # weak, because the run holds this journal: a cycle would keep the weights alive
        self.history: list[dict[str, float]] = []  # one row per evaluation
        self.best: list[tuple[float, int]] = []  # (value, step) of the best evaluations, best first
        self.skipped: list[int] = []  # steps with a NaN or infinite loss or gradient
        self.live: monitors.Live | None = None
        self.pending: list[Logged] = []
        self.progress = ""  # text next to the progress bar
        self._epoch_sums: dict[str, tuple[float, int]] = {}  # (sum, count) since the last evaluation
        self._bad_in_a_row = 0
        self._rates: dict[str, float] = {}
        self._added: dict[int, dict[str, float | Tensor]] = {}  # iteration -> values given to `add`
        self.clock = time.monotonic()
        self.outside = ""  # how the newest evaluation is worse than the band of healthy runs; empty if it is not
        self.healthy: Callable[[list[dict[str, float]]], str] | None = None
        """history -> how it is clearly worse than the healthy runs of this recipe, or "" (`report/bands.py`)."""

    @property
    def run(self) -> "Run":
        return self._run()

    def state(self) -> dict[str, Any]:
        """The state from which a resumed run continues."""
        return {"best": self.best, "history": self.history, "epoch_sums": self._epoch_sums, "skipped": self.skipped,
                "bad_in_a_row": self._bad_in_a_row, "live": self.live and asdict(self.live)}  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        self.best = [(value, step) for value, step in state["best"]]
        self.history, self._epoch_sums, self.skipped = state["history"], state["epoch_sums"], state["skipped"]
        self._bad_in_a_row = state["bad_in_a_row"]
        self.live = monitors.Live(**state["live"]) if state["live"] else None

    # ---------------------------------------------------------------- updates

    def add(self, iteration: int, group: str, values: Mapping[str, float | Tensor]) -> None:
        """Log more values of an iteration than its losses."""
        self._added.setdefault(iteration, {}).update({f"{group}/{k}": v for k, v in values.items()})

    @property
    def late(self) -> bool:
        """Return whether the last read was long ago. For one process only: the clocks of several would make them read
        at different steps."""
        return self.run.world == 1 and time.monotonic() - self.clock > SECONDS

    def read(self, stage: Stage) -> None:
        """Read back the metrics since the last time in one transfer, write and check them. A check may stop the run."""
        if not self.pending:
            return
        pending, self.pending = self.pending, []
        rows = torch.stack([p.values for p in pending]).tolist()
        now = time.monotonic()
        rate = len(rows) * self.run.cfg.train.batch_size / max(now - self.clock, 1e-9)
        self.clock = now
        updates = [(p, dict(zip(p.names, row, strict=True))) for p, row in zip(pending, rows, strict=True)]
        # Several updates in an iteration give one row with their means.
        iterations: dict[int, dict[str, list[float]]] = {}
        for logged, values in updates:
            for k, v in values.items():
                iterations.setdefault(logged.step, {}).setdefault(k, []).append(v)
        for logged, values in updates:
            self._rates = logged.rates
            if whole := iterations.pop(logged.step, None):
                row = {k: sum(v) / len(v) for k, v in whole.items()}
                row |= {k: float(v) for k, v in self._added.pop(logged.step, {}).items()}
                self._write_row(logged, row, rate)
            self._check_finite(stage, logged, values)
            self._check_level(stage, logged, values["loss"])

    def _write_row(self, logged: Logged, row: dict[str, float], rate: float) -> None:
        """Write the metrics of one iteration to the files, and add them to the epoch's means."""
        if self.run.tracker:
            self.run.tracker.log_step(logged.step, **row, **logged.rates, samples_per_sec=rate)
        for k, v in row.items():
            if math.isfinite(v):
                total, n = self._epoch_sums.get(k, (0.0, 0))
                self._epoch_sums[k] = (total + v, n + 1)
        self.progress = f"loss {row['loss']:.4f}  {rate:.0f} samples/s"

    def _check_finite(self, stage: Stage, logged: Logged, values: dict[str, float]) -> None:
        """Count a skipped step, store its batch, and stop after too many in a row."""
        run = self.run
        if finite(values.values()):
            self._bad_in_a_row = 0
            return
        self._bad_in_a_row += 1
        if run.scaler.is_enabled() and math.isfinite(values["loss"]) and self._bad_in_a_row < 20:
            return  # fp16 finds its loss scale by overflowing; report only a bad loss or repeated overflow
        self.skipped.append(logged.step)
        where = self._keep_guilty(stage, logged, values["loss"]) if len(self.skipped) <= 20 else ""
        numbers = ", ".join(f"{k} {v:g}" for k, v in values.items())
        run.console.say(f"  step {logged.step}: {numbers}: skipped, weights untouched{where}")
        if self._bad_in_a_row >= run.cfg.run.max_nonfinite_steps:
            raise Halt(
                f"{self._bad_in_a_row} non-finite steps in a row (C17), the last at step {logged.step}: the run stopped itself\n"
                f"  the weights are those of the last finite step\n"
                f"  likely cause: a rate too high, a division by zero or log(0) in the loss, non-finite values in the data\n"
                f"  next:         look at the batch in {run.folder}/postmortem, then lower --optim.lr",
                keep=True,
            )

    def _check_level(self, stage: Stage, logged: Logged, loss: float) -> None:
        """Report a loss spike and store its batch; stop if the loss is back at its initial level."""
        run, seen = self.run, self.live.see(logged.step, loss) if self.live else ""
        if seen == "spike" and len(self.live.spikes) <= 3:
            where = self._keep_batch(stage, logged)
            run.console.say(f"  step {logged.step}: the loss jumps to {self.live.window[-1]:.3g}{where}")
        if seen == "diverged":
            raise Halt(
                f"diverged (C17): since step {self.live.blown_since} the loss is more than {monitors.BLOWN:g} times that of the "
                f"untrained model, {self.live.first:.3g} (now {self.live.window[-1]:.3g}); the run stopped itself at step "
                f"{logged.step}\n"
                f"  likely cause: a rate far too high (--optim.lr {run.cfg.optim.lr:g}), no clipping (--optim.clip), or a loss "
                f"without a floor\n"
                f"  next:         trainworthy lr, then a new run with --optim.lr {run.cfg.optim.lr / 10:.1g}",
                keep=False,
            )
        if seen == "collapse":
            best = run.checkpoints.folder / f"best_val_{stage.metric.name}" if run.checkpoints else "none"
            raise Halt(
                f"collapse (C17): since step {self.live.lost_since} the loss is that of the untrained model, {self.live.first:.3g} "
                f"(best {self.live.best:.3g}); the run stopped itself at step {logged.step}\n"
                f"  best weights: {best}{f', step {self.best[0][1]}' if self.best else ': no evaluation yet'}\n"
                f"  likely cause: a rate too high, or one bad batch: see {run.folder}/postmortem and step_metrics.jsonl\n"
                f"  next:         a new run with --optim.lr {run.cfg.optim.lr / 3:.1g}",
                keep=False,
            )

    def _keep_guilty(self, stage: Stage, logged: Logged, loss: float) -> str:
        """Store the batch of a non-finite step. With several processes, each one stores its batch if its own part of
        the loss is not finite. If only the exchanged gradient is not finite, all do."""
        run = self.run
        if run.world == 1:
            return self._keep_batch(stage, logged)
        mine = logged.own is None or not math.isfinite(logged.own.item())
        if mine or math.isfinite(loss):
            where = self._keep_batch(stage, logged)
            if where and (run.rank or mine):
                print(f"  step {logged.step}: not finite on rank {run.rank}{where}", flush=True)
        return f"; what was not finite is in {run.folder}/postmortem/step-{logged.step}-rank-*.safetensors"

    def _keep_batch(self, stage: Stage, logged: Logged) -> str:
        """Write the samples of a bad step, read again from their keys, and report step and file."""
        run = self.run
        if not run.folder or not (logged.keys or logged.made):
            return ""
        keyed = loader.Keyed(run.train_data(stage), run.cfg.run.seed) if logged.keys else None
        tensors, suspects = {}, []
        for i, batch in enumerate(logged.made):
            tensors |= {f"{i}/{k}": v.contiguous() for k, v in batch.items() if isinstance(v, Tensor)}
        for i, keys in enumerate(logged.keys):
            samples = keyed.__getitems__(keys)
            suspects += [k[1] for k, s in zip(keys, samples, strict=True) if any(_spoilt(v) for v in s.values())]
            batch = stage.data["train"].collate(samples)
            tensors |= {f"{i}/{k}": v.contiguous() for k, v in batch.items() if isinstance(v, Tensor)}
        which = f"-rank-{run.rank}" if run.world > 1 else ""
        path = run.folder / "postmortem" / f"step-{logged.step}{which}.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, path)
        named = f"; non-finite values in sample {' '.join(map(str, suspects[:5]))}" if suspects else ""
        return f"; its batch is in {path}{named}"

    # ---------------------------------------------------------------- evaluations

    def evaluated(self, stage: Stage, step: int, metrics: dict[str, float]) -> tuple[float, str]:
        """Add an evaluation to the history, the files and the list of best ones; return (its epoch, a message about
        it)."""
        run, name = self.run, stage.metric.name
        if name not in metrics:
            raise UserError("evaluate() does not return its stage's metric", got=", ".join(metrics), needed=name)
        train = {k: total / n for k, (total, n) in self._epoch_sums.items()}
        self._epoch_sums = {}
        passed = step * run.cfg.train.batch_size / run.samples_per_epoch(stage)
        epoch = round(passed, 1 if passed >= 1 else 3)
        values = {f"train/{k}": v for k, v in train.items()} | {f"val/{k}": v for k, v in metrics.items()}
        self.history.append({"epoch": epoch, "step": step, **values})
        if run.tracker:
            run.tracker.log_epoch(epoch=epoch, train=train, val=metrics,
                                  extra={"global_step": step, **self._rates, "skipped_steps": len(self.skipped)})  # fmt: skip
        sign = -1 if stage.metric.higher_is_better else 1
        ranked = sorted([*self.best, (metrics[name], step)], key=lambda b: (math.isnan(b[0]), sign * b[0], b[1]))
        self.best = ranked[: run.cfg.run.keep_best]
        mark = "  best so far" if self.best[0][1] == step else ""
        scores = "  ".join(f"{k} {v:.4f}" for k, v in metrics.items() if "/" not in k)
        return epoch, f"  epoch {epoch:>5g}  train loss {train.get('loss', math.nan):.4f}  {scores}{mark}"

    def check_history(self, stage: Stage) -> None:
        """Stop if the evaluations show that continuing is useless: the model learns nothing, has lost what it had
        learnt, or a monitor of the domain asks to stop (`stop` in its evidence). It depends on the history alone, so
        all ranks and a resumed run agree."""
        run, metric = self.run, stage.metric
        self._compare_with_healthy()
        history = [(row["step"], row[f"val/{metric.name}"]) for row in self.history]
        if history[-1][0] >= run.total:
            return  # stopping would save nothing; the result reports it in its first line
        off = "" if run.cfg.gates.enabled else "labels that do not belong to their inputs (the gates are off), or "
        if monitors.nothing_learnt(metric, [v for _, v in history], self.live):
            raise Halt(
                f"nothing learnt (C11): {metric.name} {history[-1][1]:.4g} at step {history[-1][0]} is chance ({metric.floor:.4g}) "
                f"and the loss that of the untrained model, {self.live.first:.3g}, after a third of the run; the run stopped "
                f"itself\n"
                f"  likely cause: {off}--optim.lr {run.cfg.optim.lr:g} is far too high or too low for the whole run\n"
                f"  next:         trainworthy lr, and the curves in {run.folder}",
                keep=False,
            )
        if gone := monitors.lost(metric, history, run.total):
            best = run.checkpoints.folder / f"best_val_{metric.name}" if run.checkpoints else "none"
            raise Halt(
                f"lost (C17): {gone}; the run stopped itself\n"
                f"  best weights: {best}{f', step {self.best[0][1]}' if self.best else ''}\n"
                f"  likely cause: a rate that is too high for a run of this length, or one bad update: see step_metrics.jsonl around that step\n"
                f"  next:         a new run with --optim.lr {run.cfg.optim.lr / 3:.1g}",
                keep=False,
            )
        for one in stage.monitors:
            if reason := monitors.asks_to_stop(one, self.history):
                raise Halt(f"{one.id} ({one.rows}): {reason}", keep=False)

    def _compare_with_healthy(self) -> None:
        """Compare the metric so far with the healthy runs of this recipe, or of a fork's original, on the same data and budget."""
        run = self.run
        if self.healthy is None:
            return
        if run.rank == 0:
            found = self.healthy(self.history)
            if found and not self.outside:
                run.console.say(f"  OUTSIDE the healthy band: {found}", style="bold red")
            self.outside = found
        self.outside = agreed(run.accelerator, self.outside)
        if self.outside and run.cfg.run.stop_outside_band:
            raise Halt(
                f"outside the band of healthy runs (--run.stop-outside-band): {self.outside}\n"
                f"  likely cause: a change of the recipe: trainworthy diff shows it, and the gates that check it\n"
                f"  next:         trainworthy report {run.home}",
                keep=False,
            )

    def out_of_patience(self, stage: Stage) -> bool:
        """Return whether `--train.patience` epochs have passed since the best evaluation. It depends on the history
        alone, so a resumed run agrees."""
        run, key = self.run, f"val/{stage.metric.name}"
        if not run.cfg.train.patience or run.rehearsal or not self.history:
            return False
        best = self.history[0]
        for row in self.history:
            best = row if stage.metric.better(row[key], best[key]) or math.isnan(best[key]) else best
        passed = (self.history[-1]["step"] - best["step"]) * run.cfg.train.batch_size / run.samples_per_epoch(stage)
        return passed > run.cfg.train.patience - 1e-9


def finite(numbers: Iterable[float]) -> bool:
    return all(map(math.isfinite, numbers))


def _spoilt(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not torch.isfinite(value).all()
