"""usage: trainworthy batch RECIPE [--largest N] [--memory 0.5] [--json] [settings]

Finds a good micro-batch size.

  trainworthy batch vision/classify                         every size until memory or time ends
  trainworthy batch ./mine.py --largest 64 --memory 0.25    at most 64 samples, a quarter of the free memory

It runs the recipe's own train() on real samples, with micro-batches of 1, 2, 4, ..., and prints:

  - samples per second of forward, backward and optimiser step (reading the samples is timed separately), and their memory
  - the largest micro-batch that fits
  - the knee: the smallest size with at least 90% of the best throughput
  - settings that keep the configured global batch

On an accelerator, the command raises the size until memory runs out, then shrinks it by a tenth until it fits. On the CPU it tries
no size that could take more than --memory (default 0.5) of the free memory. It stops at --largest, at the size of the training
set, or when one step takes more than ten seconds.

Plot and numbers are stored in runs/<recipe>/checks/<time>/plots/batch_<stage>.png and .json. `--json` prints the sizes that were tried
and the next command."""

import json
import math
import os
import shlex
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate.utils import find_executable_batch_size
from trainworthy.core.base import config, masking
from trainworthy.core.base.console import bar
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.machine import cores, free_memory
from trainworthy.core.commands import open_recipe, prints_json, take_number
from trainworthy.core.loop.run import Rehearsal, Run, Step
from trainworthy.core.recipe.stage import Data, Stage
from trainworthy.core.recipe.wrapped import Wrapped
from trainworthy.core.session import stages
from trainworthy.core.session.session import Session, explain_data_errors, open_session, session_lock, write_start

WARM, LEAST, MOST = 2, 3, 20  # warmup steps, then the fewest and most timed steps
ENOUGH, SLOW = 0.3, 10.0  # seconds of timed steps that suffice; slowest step allowed
KNEE = 0.9  # fraction of the best throughput
ROOM = 0.9  # safe fraction of the largest size: batches vary, and evaluation also needs memory


@dataclass
class Trial:
    """Measurements of one micro-batch size."""

    size: int
    seconds: float
    """Median time of a step."""
    memory: int
    """Bytes: the device's peak; on the CPU, the process's growth since before the first trial."""

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.size / self.seconds


@prints_json
def main(argv: list[str], output: dict[str, Any]) -> None:
    """Measure the sizes; put them and the recommended settings into `output`."""
    rest, largest = take_number(argv[1:], "--largest")
    rest, share = config.take_float(rest, "--memory", most=0.9)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("batch measures one process", got="several", needed="no -n: a micro-batch is one process's own",
                        next=shlex.join(["trainworthy", "batch", *rest]))  # fmt: skip
    loaded, cfg, preset = open_recipe("batch", rest)
    config.assert_whole(cfg, "batch")
    session = open_session(loaded, cfg, preset, rest, kind="checks")
    load, allowed = os.getloadavg()[0], cores().allowed
    if load > allowed / 2:
        busy = f"the machine is busy (load {load:.1f} on {allowed} cores): these timings are not yours alone"
        session.console.say(f"       {busy}", style="yellow")
    with session_lock(session):
        write_start(session)
        spec = stages.specs(loaded, cfg)[0]
        session = replace(session, cfg=spec.cfg)
        with explain_data_errors(loaded, cfg):
            stage = spec.untrained(session.accelerator)
        if "train" not in stage.data:
            raise UserError("batch measures samples of a training set", got=f"{stage.name}, whose loop makes its own",
                            next="choose by trial: --train.batch-size, --train.accumulate")  # fmt: skip
        kept = Kept(stage.data["train"])
        stage.data = {**stage.data, "train": kept}
        output |= print_results(session, stage, measure(session, stage, largest, share or 0.5), kept)


# ------------------------------------------------------------------------------------------------------------- measuring
class Kept(Wrapped):
    """Training samples that are read once, so that reading is timed here and steps are timed without it."""

    def __init__(self, data: Data):
        super().__init__(data)
        self.samples: dict[int, dict[str, Any]] = {}
        self.seconds = 0.0

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        if index not in self.samples:
            started = time.perf_counter()
            self.samples[index] = self.data.get(index, generator)
            self.seconds += time.perf_counter() - started
        return self.samples[index]


class Timed(Run):
    """Times each step that the loop processes."""

    times: tuple[float, ...] = ()

    def steps(self, stage: Stage) -> Iterator[Step]:
        for step in super().steps(stage):
            self._wait()
            started = time.perf_counter()
            yield step
            self._wait()
            self.times += (time.perf_counter() - started,)

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


class Resident:
    """Peak memory of this process inside the context, sampled every 20 ms."""

    def __enter__(self) -> "Resident":
        self.most, self._over = resident(), threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, resident())

    def __exit__(self, *_) -> None:
        self._over.set()
        self._watch.join()
        self.most = max(self.most, resident())


def resident() -> int:
    """Return this process's resident memory in bytes."""
    return psutil.Process().memory_info().rss


@dataclass
class Measured:
    """All trials of one stage."""

    trials: list[Trial]
    """Sizes that fit, smallest first."""
    ended: str
    """Why no larger size was tried."""
    short: bool
    """Whether the device ran out of memory."""

    @property
    def largest(self) -> int:
        return self.trials[-1].size

    @property
    def best(self) -> Trial:
        return max(self.trials, key=lambda t: t.rate)

    @property
    def knee(self) -> Trial:
        """The smallest trial with at least 90% of the best throughput."""
        return next(t for t in self.trials if t.rate >= KNEE * self.best.rate)

    def cut(self, batch: int) -> tuple[int, float]:
        """Return (micro-batches, samples per second): the fewest micro-batches of a global batch whose speed is within
        a tenth of the best division's."""
        most = max(1, int(ROOM * self.largest)) if self.short else self.largest
        sizes = {k: math.ceil(batch / k) for k in range(1, batch + 1) if math.ceil(batch / k) <= most}
        rates = {k: self.rate(size) for k, size in sizes.items()}
        return next((k, rate) for k, rate in rates.items() if rate >= KNEE * max(rates.values()))

    def rate(self, size: int) -> float:
        """Return samples per second; between two timed sizes, by linear interpolation of their step times."""
        seconds = np.interp(size, [t.size for t in self.trials], [t.seconds for t in self.trials])
        return size / float(seconds)


def measure(session: Session, stage: Stage, largest: int | None, share: float) -> Measured:
    """Try doubled sizes up to the first limit."""
    samples = len(stage.data["train"])
    order = stage.data["train"].order(session.cfg.run.seed, "batch").tolist()
    before, free = resident(), free_memory()
    trials: list[Trial] = []
    most = min(largest or samples, samples)
    size, grown, ended, short = 1, 0, "", False
    session.console.start_bar("micro-batch", math.ceil(math.log2(most)) + 1, 0)
    while not ended:
        if trials and grown * size / trials[-1].size > share * free:
            ended = f"{size:,} could take more than {100 * share:g}% of the {gib(free)} of main memory that were free (--memory)"
            break
        with Resident() as now:
            trial = fitting(session, stage, order, size)
        grown = max(grown, now.most - before)
        if session.accelerator.device.type == "cpu":
            trial.memory = max(0, now.most - before)
        trials.append(trial)
        session.console.tick(len(trials), lambda: "")
        if short := trial.size < size:
            ended = f"{size:,} run out of the device's memory"
        elif size == most:
            ended = "the whole training set" if size == samples else "set by --largest"
        elif trial.seconds > SLOW:
            ended = f"a step takes {trial.seconds:.0f} s"
        size = min(2 * size, most)
    session.console.end_bar()
    fit = sorted({t.size: t for t in trials}.values(), key=lambda t: t.size)
    return Measured(fit, ended, short)


def fitting(session: Session, stage: Stage, order: list[int], size: int) -> Trial:
    """Return a trial of `size`, or of the largest smaller size that fits (to within a tenth)."""

    def attempt(batch_size: int) -> Trial:
        return timed(session, stage, order[:batch_size])

    try:
        return find_executable_batch_size(attempt, starting_batch_size=size)()
    except RuntimeError as error:
        if "reached zero" not in str(error):
            raise
        raise UserError(f"not even one sample fits into the memory of {session.accelerator.device}", needed="a smaller model or "
                        "sample, --train.precision bf16, a device with more", next="trainworthy doctor") from None  # fmt: skip


def timed(session: Session, stage: Stage, indices: list[int]) -> Trial:
    """Run `train()` on batches of these samples until the median step time is known."""
    size, device = len(indices), session.accelerator.device
    cfg = replace(session.cfg, loader=config.Loader(), train=replace(session.cfg.train, batch_size=size, accumulate=1))

    def enough(_stage: Stage, steps: int) -> bool:
        counted = run.times[WARM:]
        return len(counted) >= LEAST and sum(counted) > ENOUGH

    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    plan = Rehearsal(steps=WARM + MOST, samples=indices, fixed=True, batch_size=size, watch=enough)
    run = Timed(cfg, session.accelerator, rehearsal=plan)
    session.recipe.module.train(cfg, run, stage)
    if len(run.times) <= WARM:
        got = f"{len(run.times)} steps"
        raise UserError("train() makes no steps to time", got=got, needed="a loop over run.steps(stage)")
    memory = 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated()
    return Trial(size, statistics.median(run.times[WARM:]), memory)


# --------------------------------------------------------------------------------------------------------------- output
def print_results(session: Session, stage: Stage, found: Measured, kept: Kept) -> dict[str, Any]:
    """Print the measurements and the recommended settings; write plot and numbers, and return them."""
    s, say, batch = session, session.console.say, session.cfg.train.batch_size
    best, knee, (pieces, rate) = found.best, found.knee, found.cut(batch)
    reader = len(kept.samples) / max(kept.seconds, 1e-9)
    plot = draw(s.folder / "plots" / f"batch_{stage.name}.png", found, batch)
    numbers = {"trials": [{**asdict(t), "samples_per_sec": t.rate} for t in found.trials], "largest": found.largest,
               "ended": found.ended, "knee": knee.size, "batch_size": batch, "accumulate": pieces,
               "reader_samples_per_sec": reader}  # fmt: skip
    plot.with_suffix(".json").write_text(json.dumps(numbers, indent=1))

    where = "main memory" if s.accelerator.device.type == "cpu" else "device memory"
    say(f"\nbatch  {stage.name}: forward, backward and step on real samples, one process")
    say(f"  micro-batch  samples/s       step  {where}")
    for t in found.trials:
        marks = " knee" * (t is knee) + " best" * (t is best)
        row = f"  {t.size:>11,}  {per_second(t.rate):>9}  {ms(t.seconds):>9}  {gib(t.memory):>{len(where)}}"
        say(f"{row}  {bar(t.rate / best.rate, 20)}{marks}")
    say(f"  largest      {found.largest:,}: {found.ended}")
    most = f"{KNEE:.0%} of the best throughput ({per_second(best.rate)} samples/s)"
    say(f"  knee         {knee.size:,}: the smallest with {most}")
    workers = math.ceil(rate / reader)
    keep_up = f"--loader.workers {workers} keep{'s' * (workers == 1)} up"
    say(f"  loader       one reader brings {per_second(reader)} samples/s: {keep_up}")
    say(f"  settings     the global batch stays {batch:,}, and so the rate: {pieces:,} x {math.ceil(batch / pieces):,} samples, "
        f"{per_second(rate)} samples/s")  # fmt: skip
    if pieces > 1:
        say("               (several processes share it: divide --train.accumulate by their number)")
    argv = masking.words(s.argv)
    other = str(knee.size) if knee.size > batch and knee.rate > 1.1 * rate else "N"
    faster = f" ({other} samples: {knee.rate / rate:.1f} times as fast)" if other != "N" else ""
    say(f"  larger       another global batch is another training: fewer steps, another rate{faster}. Then first\n"
        f"               {shlex.join(['trainworthy', 'lr', *argv, '--train.batch-size', other])}")  # fmt: skip
    again = ["trainworthy", "run", *argv, "--train.accumulate", str(pieces)]
    say(f"  plot         {plot}\n  next         {shlex.join(again)}")
    return {"folder": str(s.folder), "stage": stage.name, **numbers, "plot": str(plot), "next": shlex.join(again)}


def draw(path: Path, found: Measured, batch: int) -> Path:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    trials, knee, best = found.trials, found.knee.size, found.best.rate
    sizes = [t.size for t in trials]
    axes.plot(sizes, [t.rate for t in trials], "o-", color="tab:blue", linewidth=2, label="samples per second")
    enough = f"{KNEE:.0%} of the best, {best:,.0f}"
    axes.axhline(KNEE * best, color="tab:blue", linestyle=":", linewidth=1, label=enough)
    axes.axvline(knee, color="tab:green", linestyle="--", label=f"knee, {knee:,}")
    axes.axvline(batch, color="black", linestyle=":", label=f"global batch as configured, {batch:,}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=45)
    axes.set(xlabel="micro-batch (samples)", ylabel="samples / s", ylim=(0, 1.15 * best))
    axes.set_title(f"Throughput by micro-batch; largest: {found.largest:,}, {found.ended}", fontsize=9, wrap=True)
    memory = axes.twinx()
    memory.plot(sizes, [t.memory / 2**30 for t in trials], ".-", color="tab:orange", alpha=0.6, label="memory")
    memory.set_ylabel("memory (GiB)")
    memory.set_ylim(bottom=0)
    lines = [*axes.get_legend_handles_labels()[0], *memory.get_legend_handles_labels()[0]]
    axes.legend(handles=lines, loc="upper left", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def per_second(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def gib(n: float) -> str:
    return f"{n / 2**30:.2f} GiB"
