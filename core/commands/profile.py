"""usage: trainworthy profile RECIPE|RUN_FOLDER [--steps 10] [--json] [settings]

Reports what limits the speed of training.

  trainworthy profile vision/classify                       warm-up, timed steps, profiled steps; then a verdict
  trainworthy profile ./mine.py --train.precision bf16      with settings as `trainworthy run` takes them
  trainworthy profile runs/vision-classify/20260101-120000-ab12    with the recipe and the settings of a run
  trainworthy profile vision/classify -n 2                  two processes: how much of a step is exchange between them

The recipe's own train() makes real steps on real data: 5 to warm up, N that are only timed, N under torch's profiler. The time of a
step is split into waiting for data, large products and convolutions (compute), other large operations (memory traffic), exchange
between processes, and the rest: many small operations, Python and an idle device (overhead). The largest share is the verdict, with
what to try first and the largest possible gain. The largest operations and the largest modules (forward and backward together) are
listed. Nothing that is trained here is saved.
`--json` prints the verdict and the times as JSON.

Kept in runs/<recipe>/checks/<time>/: profile.json, trace.json.gz for https://ui.perfetto.dev, and memory.json: bytes allocated over
time. Model FLOPs count products and convolutions of one step, forward and backward; their utilisation is against the fastest large
product that this device does here. Exit codes: 0, or 2 for bad usage."""

import contextlib
import gzip
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from trainworthy.core.base import config
from trainworthy.core.base.as_json import write as write_json
from trainworthy.core.base.console import Console, bar, table
from trainworthy.core.base.errors import UserError
from trainworthy.core.commands import open_recipe, take_flag, take_number
from trainworthy.core.data import loader
from trainworthy.core.loop.precision import precision
from trainworthy.core.loop.run import Rehearsal
from trainworthy.core.monitoring import module_times
from trainworthy.core.monitoring.bottlenecks import Measured, Operation, Settings, exchange_on_cpu, find_bottleneck
from trainworthy.core.report.folder import args_of
from trainworthy.core.session import stages
from trainworthy.core.session.session import Session, open_session, session_lock, write_start

WARM, STEPS = 5, 10


# ------------------------------------------------------------------------------------------------------------ measuring
class Watch:
    """Called after each step of train(): warm-up, then timed steps, then profiled ones."""

    def __init__(self, steps: int, device: Any, trace: Path | None):
        self.steps, self.device, self.trace = steps, device, trace
        self.waited, self.since, self.step, self.profiled = 0.0, 0.0, 0.0, 0.0
        self.wait_timed = 0.0
        self.profiling = False
        self.profiler: Any = None
        self.counter: Any = None

    def __call__(self, _stage: Any, step: int) -> bool:
        from torch.utils.flop_counter import FlopCounterMode

        if step == WARM:
            synchronize(self.device)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.since, self.waited = time.perf_counter(), 0.0
        elif step == WARM + self.steps:
            synchronize(self.device)
            self.step, self.wait_timed = (time.perf_counter() - self.since) / self.steps, self.waited / self.steps
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self.profiler = torch.profiler.profile(activities=kinds, with_flops=True, profile_memory=True)
            self.profiler.start()
            self.profiling = True
            self.since = time.perf_counter()
        elif step == WARM + 2 * self.steps:
            synchronize(self.device)
            self.profiled = (time.perf_counter() - self.since) / self.steps
            self.profiler.stop()
            self.profiling = False
            self.counter = FlopCounterMode(display=False)
            self.counter.__enter__()  # for the one step that is left; the mode itself costs time
        elif step == WARM + 2 * self.steps + 1:
            self.counter.__exit__(None, None, None)
            return True
        return False

    @contextlib.contextmanager
    def timed_data(self) -> Iterator[None]:
        """Every wait for a batch is counted, and is a bar in the trace."""
        plain = loader.batches

        def batches(*args: Any, **kw: Any) -> Iterator[dict]:
            source = iter(plain(*args, **kw))
            while True:
                before = time.perf_counter()
                with torch.profiler.record_function("trainworthy::wait_for_data"):
                    batch = next(source, None)
                self.waited += time.perf_counter() - before
                if batch is None:
                    return
                yield batch

        with mock.patch.object(loader, "batches", batches):
            yield

    def measured(self) -> Measured:
        """What the profiler saw. On an accelerator the times are those of its kernels."""
        on_device = self.device.type == "cuda"
        own_time = "self_device_time_total" if on_device else "self_cpu_time_total"
        marks = ("trainworthy::", "ProfilerStep", "cuda", "Optimizer.", "enumerate(DataLoader)")
        rows = [r for r in self.profiler.key_averages() if not r.key.startswith(marks)]
        events = self.profiler.events()
        modules = module_times.of_events(events, on_device=on_device)
        found = [Operation(r.key, r.count, getattr(r, own_time) / 1e6) for r in rows]
        if not on_device and (exchange := exchange_on_cpu(events)):
            found = [o for o in found if o.kind != "communication"] + [exchange]
        found = sorted((o for o in found if o.seconds > 0), key=lambda o: -o.seconds)
        m = Measured(self.step, self.wait_timed, found, self.steps, self.device.type, float(self.counter.get_total_flops()) if self.counter else 0.0,
                     profiled=self.profiled, modules=modules)  # fmt: skip
        if on_device:
            m.peak_memory = torch.cuda.max_memory_allocated()
        m.idle = max(0.0, 1 - sum(o.seconds for o in found) / self.steps / self.profiled)
        if self.trace is not None:
            self.profiler.export_chrome_trace(str(self.trace))
            memory = self.trace.with_name(self.trace.name.replace("trace", "memory").removesuffix(".gz"))
            memory.write_text(json.dumps(memory_timeline(self.trace)))
        return m


def synchronize(device: Any) -> None:
    """Wait until a CUDA device has computed everything."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def memory_timeline(trace: Path) -> dict[str, Any]:
    """Bytes allocated over time, from the profiler's trace: {device: {peak, [[microseconds, bytes], ...]}}."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    found: dict[str, list[list[float]]] = {}
    for e in events:
        if e.get("name") == "[memory]" and "Total Allocated" in (a := e.get("args", {})):
            device = "cpu" if a.get("Device Type") == 0 else f"cuda:{a.get('Device Id', 0)}"
            found.setdefault(device, []).append([float(e["ts"]), int(a["Total Allocated"])])
    first = min((ts for rows in found.values() for ts, _ in rows), default=0.0)
    return {device: {"peak_bytes": max(b for _, b in rows), "timeline": [[round(ts - first, 1), b] for ts, b in sorted(rows)]}
            for device, rows in found.items()}  # fmt: skip


def attainable(device: Any, precision: str) -> float:
    """FLOP/s of one large square product here: what a step's products are compared with."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    side = 4096 if device.type == "cuda" else 1024
    x, best = torch.randn(side, side, device=device).to(dtype), 0.0
    for _ in range(4):
        synchronize(device)
        since = time.perf_counter()
        x @ x
        synchronize(device)
        best = max(best, 2 * side**3 / (time.perf_counter() - since))
    return best


def main(argv: list[str]) -> None:
    rest, steps = take_number(argv[1:], "--steps")
    rest, as_json = take_flag(rest, "--json")
    if not rest:
        raise UserError("profile what?", needed="a recipe or a run folder", next="trainworthy profile vision/classify")
    rest = of_run(rest)
    loaded, cfg, preset = open_recipe("profile", rest)
    config.assert_whole(cfg, "profile")
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        s = open_session(loaded, cfg, preset, rest, kind="checks")
        with session_lock(s):
            write_start(s)
            found = [one(s, spec, context, steps or STEPS) for spec, context in stages.contexts(s)]
        if s.main:
            (s.folder / "profile.json").write_text(json.dumps(found, indent=1))
            s.console.say(
                f"\nkept   {s.folder / 'profile.json'}\n       {s.folder}/trace*.json.gz (open in https://ui.perfetto.dev)"
                f"\n       {s.folder}/memory*.json (bytes allocated over time)"
            )
    if as_json and s.main:
        write_json(found)


def of_run(rest: list[str]) -> list[str]:
    """A run folder is its recipe with its settings."""
    folder = Path(rest[0])
    if not folder.is_dir():
        return rest
    return [args_of(folder)["recipe"], "--config", str(folder / "args.json"), *rest[1:]]


def one(s: Session, spec: stages.StageSpec, context: Any, steps: int) -> dict[str, Any]:
    name = f"-{spec.name}" if spec.of > 1 else ""
    watch = Watch(steps, s.accelerator.device, s.folder / f"trace{name}.json.gz" if s.main else None)
    with watch.timed_data(), contextlib.ExitStack() as stack:
        run, stage = context.build(Rehearsal(steps=WARM + 2 * steps + 1, watch=watch))
        if not spec.cfg.train.compile:  # hooks would cut the compiled graph
            roots = {"model": stage.model, **stage.frozen_modules}
            stack.enter_context(module_times.marked(roots, lambda: watch.profiling))
        s.recipe.module.train(spec.cfg, run, stage)
    if not watch.profiled or watch.counter is None:
        needed = f"{WARM + 2 * steps + 1} steps of its train()"
        raise UserError(f"{spec.name} ended before the profiled steps", needed=needed)
    m = watch.measured()
    if m.flops:
        m.attainable = attainable(s.accelerator.device, precision(spec.cfg, s.accelerator))
    own, cfg = "train" not in stage.data, spec.cfg
    settings = Settings(cfg.loader.workers, cfg.train.accumulate, cfg.train.compile, precision(cfg, s.accelerator),
                        getattr(cfg, "num_envs", 0), own_samples=own)  # fmt: skip
    verdict = find_bottleneck(m, settings)
    if s.main:
        show(s.console, spec.name, m, verdict, 0 if own else cfg.train.batch_size)
    total = sum(o.seconds for o in m.operations) or 1.0
    top = [{**asdict(o), "kind": o.kind, "share": o.seconds / total} for o in m.operations[:20]]
    modules = [{"name": name, "seconds": v} for name, v in m.modules[:20]]
    return {"stage": spec.name, **verdict, **asdict(m), "operations": top, "modules": modules}


def show(console: Console, name: str, m: Measured, verdict: dict[str, Any], samples: int) -> None:
    """The verdict first, then the shares and the largest operations."""
    speed = f"ms a step, {samples / m.step:,.0f} samples a second" if samples else "ms an iteration of its loop"
    per = f"{m.step * 1e3:,.1f} {speed} on {m.device}"
    console.say(f"\nprofile {name}: {verdict['verdict']}: {verdict['words']}\n  {per}")
    if m.flops:
        share = ""
        if m.attainable:
            share = f", {m.flops / m.step / m.attainable:.0%} of what one large product reaches here"
        console.say(f"  {m.flops / m.step / 1e9:,.1f} model GFLOP/s (products and convolutions){share}")
    if m.idle is not None:
        memory = f", peak memory {m.peak_memory / 2**30:.2f} GiB" if m.peak_memory else ""
        console.say(f"  device idle {m.idle:.0%} of a profiled step{memory}")
    shares = sorted(m.shares.items(), key=lambda kv: -kv[1])
    console.say(table([(k, f"{v:.0%}", bar(v, 30).ljust(30)) for k, v in shares], indent=4))
    total = sum(o.seconds for o in m.operations) or 1.0
    rows = [("largest operations", "share", "calls a step", "mean")]
    rows += [(o.name[:48], f"{o.seconds / total:.0%}", f"{o.calls / m.steps:,.0f}", f"{o.seconds / o.calls * 1e6:,.0f} us")
             for o in m.operations[:8]]  # fmt: skip
    console.say(table(rows, indent=4))
    if m.modules:
        every = sum(v for _, v in m.modules)
        rows = [("largest modules, forward and backward", "share", "a step")]
        rows += [(name[:70], f"{v / every:.0%}", f"{v / m.steps * 1e3:,.2f} ms") for name, v in m.modules[:8]]
        console.say(table(rows, indent=4))
    console.say(f"  try first     {verdict['try']}\n  could give    {verdict['most']}")
