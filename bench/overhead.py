"""What the loop costs: CPU microseconds per optimiser step of six training loops, side by side in one process.

    python bench/overhead.py [--json FILE] [--only WORDS] [--rounds N]

Every loop trains the same net on the same batches with AdamW(fused=True), a cosine schedule with warm-up and clipping at 1.
CPU time (`time.process_time`: all threads of this process) rather than wall time, one torch thread, garbage collection on.
Each round runs every loop once, in shuffled order; a loop is compared with the bare loop OF ITS OWN ROUND, so that a slow
minute of the machine hits both. Printed: microseconds (median), and the ratio to bare (median, least, most over the rounds).

Three settings. `batch`: the data set's items are whole batches, so what is measured is the loop. `sample`: 64 samples are
read and collated per step, so the loader is in it. `resnet`: the net of vision/classify, where computing is nearly all.
"""

import argparse
import gc
import importlib.util
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from trainworthy.core.base.config import Loader, Optim, RunSettings, Train
from trainworthy.core.loop.optim import schedule
from trainworthy.core.monitoring.metrics import MetricsTracker
from trainworthy.core.recipe.loading import versions

from trainworthy import core

LR, CLIP, OPTIM = 1e-3, 1.0, Optim(lr=1e-3, warmup=0.06, clip=1.0)
HF = importlib.util.find_spec("transformers") is not None


# ------------------------------------------------------------------------------------------------------------ the settings
@dataclass
class Setting:
    """One net and one way to feed it; `items` are what the data set holds, `per_step` of them make a batch."""

    name: str
    what: str
    net: Callable[[], nn.Module]
    items: list[dict[str, Tensor]]
    per_step: int
    steps: int
    """Measured in each round, after `warm`."""
    rounds: int
    warm: int = 10

    @property
    def total(self) -> int:
        return self.warm + self.steps

    @property
    def collate(self) -> Callable:
        """Ready batches are passed through; samples are stacked."""
        return (lambda items: items[0]) if self.per_step == 1 else torch.utils.data.default_collate


def mlp() -> nn.Module:
    """64-256-256-10: (B, 64) -> (B, 10)."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def resnet() -> nn.Module:
    """The net of vision/classify at its own size: (B, 1, 28, 28) -> (B, 10)."""
    from trainworthy.recipes.vision.classify import ResNet

    return ResNet(torch.full((1,), 0.13), torch.full((1,), 0.31), (16, 32, 64), 10)


def made(n: int, *shape: int) -> list[dict[str, Tensor]]:
    """`n` items {x: (*shape) float32, y: int64}; costs do not depend on values, so these are drawn."""
    g = torch.Generator().manual_seed(0)
    batch = shape[:1] if len(shape) in (2, 4) else ()
    return [{"x": torch.randn(shape, generator=g), "y": torch.randint(10, batch, generator=g)} for _ in range(n)]


def settings() -> list[Setting]:
    return [
        Setting(
            "batch", "MLP 64-256-256-10, batch 64, ready batches (the loop alone)", mlp, made(32, 64, 64), 1, 150, 9
        ),
        Setting(
            "sample", "MLP 64-256-256-10, batch 64, read per sample (loop and loader)", mlp, made(2048, 64), 64, 100, 9
        ),
        Setting(
            "resnet",
            "ResNet of vision/classify, 28x28, batch 64, per sample",
            resnet,
            made(512, 1, 28, 28),
            64,
            8,
            5,
            3,
        ),
    ]


class Items(Dataset):
    """A plain map-style data set over tensors in memory."""

    def __init__(self, items: list[dict[str, Tensor]]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.items[i]


class Ours(core.Data):
    """The same as a `core.Data`."""

    def __init__(self, setting: Setting):
        self.items, self.collate = setting.items, setting.collate
        self.fields = {"x": core.Field("input"), "y": core.Field("target")}

    def __len__(self) -> int:
        return len(self.items)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return self.items[index]


class Clock:
    """Called after every step; CPU seconds between the end of the warm-up and the last step."""

    def __init__(self, setting: Setting):
        self.warm, self.total, self.done, self.start, self.end = setting.warm, setting.total, 0, 0.0, 0.0

    def __call__(self) -> None:
        self.done += 1
        if self.done == self.warm:
            self.start = time.process_time()
        elif self.done == self.total:
            self.end = time.process_time()

    def per_step(self) -> float:
        """Microseconds of CPU time per step."""
        assert self.end, f"{self.done} steps of {self.total}"
        return 1e6 * (self.end - self.start) / (self.total - self.warm)


# --------------------------------------------------------------------------------------------------------------- the loops
def endless(loader: DataLoader) -> Iterator[dict]:
    while True:
        yield from loader


def plain(setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """Net, the same optimiser that ours has (no decay on biases and norms), and a plain DataLoader."""
    net = setting.net()
    loader = DataLoader(
        Items(setting.items), setting.per_step, shuffle=True, drop_last=True, collate_fn=setting.collate
    )
    return net, core.make_optimizer(net, OPTIM), loader


def bare(setting: Setting, clock: Clock, log: TextIO | None = None) -> None:
    """The loop that everybody writes; with `log`, it also reads the loss every step and writes a JSONL row."""
    net, optimizer, loader = plain(setting)
    batches = endless(loader)
    for step in range(setting.total):
        batch = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = LR * schedule(step, setting.total, OPTIM)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(batch["x"]), batch["y"])
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        if log:
            log.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
        clock()


def bare_logged(setting: Setting, clock: Clock) -> None:
    with tempfile.TemporaryFile("w") as file:
        bare(setting, clock, file)


def ours(setting: Setting, clock: Clock, tensorboard: bool = False) -> None:
    """core.Run as a recipe's `train` uses it, everything observed: loss, grad norm, rate, samples/s, finite check, every step."""
    data = Ours(setting)
    cfg = core.Config(
        train=Train(epochs=setting.total * setting.per_step / len(data), batch_size=setting.per_step),
        optim=OPTIM,
        loader=Loader(workers=0),
        run=RunSettings(threads=1),
    )
    net = setting.net()

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        return {"ce": F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")}

    stage = core.Stage("mlp", net, {"main": core.make_optimizer(net, cfg.optim)}, {"train": data, "val": data}, loss,
                       lambda model, data: {}, core.Metric("accuracy", "", 0.1, 1.0))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        tracker = MetricsTracker(folder, use_tensorboard=tensorboard)
        run = core.Run(cfg, Accelerator(cpu=True), tracker=tracker)
        for step in run.steps(stage):
            run.update(stage, step.batches)
            clock()
        run.close()
        rows = (Path(folder) / "step_metrics.jsonl").read_text().count("\n")
        assert rows == setting.total, f"{rows} rows for {setting.total} steps"


def ours_tensorboard(setting: Setting, clock: Clock) -> None:
    ours(setting, clock, tensorboard=True)


def accelerate_loop(setting: Setting, clock: Clock) -> None:
    """As Accelerate's documentation writes it: prepare, accumulate, backward, clip, step, scheduler."""
    accelerator = Accelerator(cpu=True)
    net, optimizer, loader = plain(setting)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, setting.total, OPTIM))
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    while True:
        for batch in loader:
            with accelerator.accumulate(net):
                loss = F.cross_entropy(net(batch["x"]), batch["y"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            clock()
            if clock.done == setting.total:
                return


class WithLoss(nn.Module):
    """What HF Trainer trains: a module that returns its loss."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def hf_trainer(setting: Setting, clock: Clock, logging_on: bool = False) -> None:
    """transformers.Trainer with nothing but training (or a log of every step)."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    class Tick(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            clock()

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=setting.per_step, max_steps=setting.total, learning_rate=LR,
            lr_scheduler_type="cosine", warmup_steps=round(0.06 * setting.total), max_grad_norm=CLIP, weight_decay=1e-4,
            optim="adamw_torch_fused", report_to="none", save_strategy="no", disable_tqdm=True, dataloader_drop_last=True,
            remove_unused_columns=False, dataloader_pin_memory=False, label_names=["y"], logging_steps=1,
            logging_strategy="steps" if logging_on else "no",
        )  # fmt: skip
        trainer = Trainer(WithLoss(setting.net()), args, setting.collate, Items(setting.items), callbacks=[Tick()])
        trainer.remove_callback(PrinterCallback)  # its print would go between our rows
        trainer.train()


def hf_trainer_logging(setting: Setting, clock: Clock) -> None:
    hf_trainer(setting, clock, logging_on=True)


LOOPS: dict[str, Callable[[Setting, Clock], None]] = {
    "bare loop": bare,
    "bare + item() + JSONL": bare_logged,
    "ours, JSONL": ours,
    "ours, JSONL + TensorBoard": ours_tensorboard,
    "Accelerate, plain loop": accelerate_loop,
    "HF Trainer, logging off": hf_trainer,
    "HF Trainer, log every step": hf_trainer_logging,
}


# --------------------------------------------------------------------------------------------------------------- measuring
def one(loop: Callable, setting: Setting) -> float:
    """CPU microseconds a step of one run of one loop."""
    torch.manual_seed(0)
    gc.collect()
    clock = Clock(setting)
    loop(setting, clock)
    return clock.per_step()


def measure(setting: Setting, loops: dict[str, Callable]) -> list[dict]:
    """One row per loop: microseconds and ratio to the bare loop of the same round."""
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        one(loop, setting)  # imports, caches
    for _ in range(setting.rounds):
        for name in rng.sample(list(loops), len(loops)):
            times[name].append(one(loops[name], setting))
    base = times["bare loop"]
    rows = []
    for name, us in times.items():
        ratios = [t / b for t, b in zip(us, base, strict=True)]
        rows.append({
            "loop": name, "us": round(statistics.median(us), 1), "us_min": round(min(us), 1),
            "ratio": round(statistics.median(ratios), 3), "ratio_min": round(min(ratios), 3), "ratio_max": round(max(ratios), 3),
        })  # fmt: skip
    return rows


def show(setting: Setting, rows: list[dict]) -> None:
    print(f"\n{setting.what}; {setting.rounds} rounds of {setting.steps} steps")
    print(f"  {'':<28}{'us/step':>10}{'to bare':>10}   least - most")
    for r in rows:
        print(f"  {r['loop']:<28}{r['us']:>10,.0f}{r['ratio']:>9.2f}x   {r['ratio_min']:.2f} - {r['ratio_max']:.2f}")
    by_name = {r["loop"]: r for r in rows}
    full = by_name.get("ours, JSONL")  # every term, gradient norm, finite check, a row for every step
    rival = by_name.get("HF Trainer, logging off")
    if full:
        print(
            f"  full observability, at most 1.10x: {full['ratio']:.2f}x, {'met' if full['ratio'] <= 1.10 else 'MISSED'}"
        )
    if full and rival:
        apart = full["ratio_max"] < rival["ratio_min"] or rival["ratio_max"] < full["ratio_min"]
        told = ("met" if full["ratio"] < rival["ratio"] else "MISSED") if apart else "no difference beyond the spread"
        print(f"  and below HF Trainer with logging off, {rival['ratio']:.2f}x: {told}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--only", default="", help="only loops whose names hold one of these comma-separated words")
    parser.add_argument("--setting", default="", help="only this setting: batch, sample or resnet")
    parser.add_argument("--rounds", type=int, default=0, help="rounds (default: as many as fit in 90 seconds)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    words = [w.strip().lower() for w in args.only.split(",") if w.strip()]
    loops = {n: f for n, f in LOOPS.items() if n == "bare loop" or not words or any(w in n.lower() for w in words)}
    if not HF:
        loops = {n: f for n, f in loops.items() if not n.startswith("HF")}
        print("transformers is not installed: no rows for HF Trainer  (pip install 'trainworthy[bench]')")
    start, tables = time.monotonic(), []
    for setting in settings():
        if args.setting in ("", setting.name):
            setting.rounds = args.rounds or setting.rounds
            rows = measure(setting, loops)
            show(setting, rows)
            tables.append({"setting": setting.name, "what": setting.what, "steps": setting.steps, "rounds": setting.rounds,
                           "rows": rows})  # fmt: skip
    print(f"\n{time.monotonic() - start:.0f} s")
    if args.json:
        figures = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "threads": 1, "versions": versions(),
                   "unit": "CPU microseconds per optimiser step", "tables": tables}  # fmt: skip
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
