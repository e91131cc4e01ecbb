"""usage: trainworthy plan RECIPE [--memory 80] [-n 8] [--shard full] [--device H100 [--mfu 0.4] | --flops 4e14] [--json] [settings]

Estimates memory, time and disk space of a run before it starts.

  trainworthy plan llm/sft --preset full --memory 80        does it fit into 80 GB? if not, which settings change that
  trainworthy plan llm/sft --preset full --device H100 -n 8    memory and time from a table of devices, eight processes
  trainworthy plan vision/classify --json                   the same numbers as JSON, in bytes and seconds
  trainworthy plan ./mine.py --flops 4e14 --samples 100000  time at a throughput that you measured, for your number of samples
  trainworthy plan llm/pretrain --model FOLDER -n 16 --shard full --device A100 --link 200    sharded; FOLDER has a config.json

  --memory 80       GB of one device, 10^9 bytes
  -n 8              processes, one for each device; with --shard, each holds a part (docs/scale.md)
  --device H100     memory and throughput from a table, at --mfu 0.4 of its data sheet; --flops N: operations a second that you reach
  --samples N       samples of the training set
  --link 200        GB a second that a device sends; without it the bytes are printed and no time
  --disk-speed 1    GB a second that checkpoints are written with (default 1)

For each stage it prints:

  - memory by kind (weights, gradients, optimiser, activations), of the evaluation and of the gates
  - time of the steps, samples (and tokens) a second, and what the gates compute
  - bytes that processes exchange; size and time of checkpoints
  - if the memory does not suffice: settings of this recipe that help, each with what it would need

The recipe builds its model without weights and makes two optimiser steps on tensors that have a shape and no values. On a CPU the
peak agrees with real steps within a few percent (docs/performance.md). A model needs its config.json, not its weights. A data set that
is not on this machine is replaced by the preset tiny's, with every text as long as the settings allow. If a model's folder has no
tokenizer, a packaged one is used. What a recipe computes once and keeps for its runs (a teacher's transcripts) is computed, not simulated.

Not estimated: a device's context and fragmentation (10% and 1 GB are added instead), kernels other than the CPU's, data
loading, and how much of the exchange happens while a device computes. Exit codes: 0, or 2 for bad usage."""

import contextlib
import os
import shutil
import sys
import warnings
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from trainworthy.core.base import config, masking, settings_check
from trainworthy.core.base.as_json import write as write_json
from trainworthy.core.base.console import table
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.machine import DEVICES
from trainworthy.core.commands import open_recipe, take_flag, take_number

REACHED = 0.4
"""Of a data sheet's FLOP/s in training: 0.3 to 0.5 are common in reports of large language models (PaLM 0.46, Llama 3 0.38-0.43);
small convolutions reach less."""
MARGIN, CONTEXT = 1.1, 1e9  # fragmentation, and what a device's libraries take


def main(argv: list[str]) -> None:
    rest, own = take_options(argv[1:])
    processes, device, flops = own["processes"] or 1, own["device"], own["flops"]
    memory = own["memory"] or (DEVICES[device][0] if device else None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing here is computed on a device
    recipe, cfg, preset = open_recipe("plan", rest)
    settings_check.check_values(cfg, processes=processes)
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # what libraries say while they build
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        # Torchvision's NMS
        warnings.filterwarnings("ignore", "`create_unbacked_symint` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "This DataLoader will create")  # the run's machine has other cores
        found = plan(recipe, cfg, memory=memory, processes=processes, samples=own["samples"])
        source, rate = _throughput(cfg, flops, device, own["mfu"] or REACHED)
    found |= {"recipe": recipe.id, "preset": preset, "processes": processes, "memory_gb": memory,
              "flops_per_second": {source: rate}, "has_small": preset == "full" and hasattr(recipe.module, "small")}  # fmt: skip
    for stage in found["stages"]:
        timed(stage, rate, processes, link=own["link"], disk=own["disk-speed"] or 1.0)
    if own["json"]:
        write_json(found)
    else:
        show(found)


def take_options(argv: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the recipe with its settings, and the options of this command by their names."""
    rest, processes = take_number(argv, "-n")
    rest, samples = take_number(rest, "--samples")
    found: dict[str, Any] = {"processes": processes, "samples": samples}
    for name in ("memory", "flops", "mfu", "link", "disk-speed"):
        rest, found[name] = config.take_float(rest, f"--{name}")
    rest, found["device"] = config.take(rest, "--device")
    rest, found["json"] = take_flag(rest, "--json")
    device, mfu = found["device"], found["mfu"]
    if not rest or rest[0].startswith("-"):
        again = "trainworthy plan vision/classify --preset full --memory 24"
        raise UserError("plan what?", needed="a recipe", next=again)
    if device is not None and device not in DEVICES:
        raise config.unknown(f"device '{device}'", device, DEVICES, next="--memory GB and --flops N describe any other")
    if mfu is not None and (device is None or mfu > 1):
        raise UserError("--mfu is the share of a device's data sheet that training reaches", got=f"--mfu {mfu:g}" + ("" if device else
                        " without --device"), needed="--device NAME --mfu 0.5, at most 1; --flops N for any other device")  # fmt: skip
    return rest, found


def timed(stage: dict[str, Any], rate: float, processes: int, *, link: float | None, disk: float) -> None:
    """Add what follows from a throughput: seconds of a step, of the stage and of the gates, samples and tokens a second, seconds of the
    exchange (at `link` GB/s) and of a checkpoint (at `disk` GB/s)."""
    step = stage["flops"] / rate / processes
    stage["step_seconds"] = step
    stage["seconds"] = stage["steps"] and stage["steps"] * step
    stage["samples_per_second"] = stage["batch"] / step
    stage["tokens_per_second"] = stage["batch"] * stage["tokens"] / step
    stage["gate_seconds"] = stage["gate_flops"] / rate
    stage["exchange_seconds"] = stage["exchanged"] / (link * 1e9) if link else None
    stage["checkpoint_seconds"] = stage["checkpoint"] / (disk * 1e9)


def _throughput(cfg: Any, flops: float | None, device: str | None, mfu: float) -> tuple[str, float]:
    """Return (where the number comes from, FLOP/s of one device); of this machine that of large products: a recipe reaches less."""
    if flops is not None:
        return "stated", flops
    if device is None:
        import torch
        from trainworthy.core.commands.profile import attainable

        return "here", attainable(torch.device("cpu"), "fp32")
    half = cfg.train.precision in ("bf16", "fp16")
    return f"{device}, {mfu:.0%} of its data sheet", mfu * DEVICES[device][1 if half else 2]


# ----------------------------------------------------------------------------------------------------------------- plan
def plan(
    recipe: Any, cfg: Any, *, memory: float | None = None, processes: int = 1, samples: int | None = None
) -> dict[str, Any]:
    """Estimate every stage; where `memory` (GB) does not suffice, try the settings that this recipe has."""
    from trainworthy.core.session import estimate, spread, stages

    used, replaced = at_hand(recipe, cfg)
    if quarter := getattr(used, "load_in_4bit", False):
        used = replace(used, load_in_4bit=False)
    how = {"processes": processes, "longest": bool(replaced), "samples": samples}
    found = [in_4_bits(one) if quarter else one for one in estimate.estimates(recipe, used, **how)]
    limit = None if memory is None else memory * 1e9
    rows, specs = [], stages.specs(recipe, used)
    for whole, spec in zip(found, specs, strict=True):
        one = spread.cut(whole, processes, cfg.run.shard)
        cut = processes > 1 and cfg.run.shard != "none"
        rest = max(0, whole.computing - whole.halves) if cut else whole.activations
        row = asdict(one) | {"activations": rest, "gates": gates(whole), "fits": None, "change": []}
        batch = spec.cfg.train.batch_size
        row["disk"] = (cfg.run.keep_checkpoints + 1) * one.checkpoint + cfg.run.keep_best * one.best
        row["gate_processes"] = cfg.gates.jobs
        row["batch"] = batch
        row["shard"] = cfg.run.shard if processes > 1 else "none"
        row["exchanged"] = spread.exchanged(whole, processes, row["shard"])
        row["gate_flops"] = spread.GATE_STEPS * min(whole.gate_batch, batch) * whole.flops / batch
        if limit is not None:
            peak = max(one.training, one.evaluation or 0)
            row["fits_without_gates"] = verdict(peak, limit)
            row["fits"] = verdict(max(peak, row["gates"] if cfg.gates.enabled else 0), limit)
        rows.append(row)
    for row, whole, spec in zip(rows, found, specs, strict=True):
        if limit is not None and row["fits"] == "no":
            row["change"] = changes(recipe, used, whole, spec, limit, how, quarter=quarter)
    return {"stages": rows, "replaced": replaced, "disk_free": shutil.disk_usage(Path.cwd()).free}


def gates(one: Any) -> int:
    """Bytes of the gates at their peak: a training step (or a build beside the frozen weights that all builds share), and the trained
    weights of three stages that they keep to compare with."""
    return max(one.training, 2 * (one.weights + one.frozen)) + kept(one)


def kept(one: Any) -> int:
    """Bytes of those three; a gradient is as large as its weights."""
    return 3 * one.gradients


def in_4_bits(one: Any) -> Any:
    """An estimate of a model in bf16 as it is with its frozen weights in four bits, and a scale for each 64: not simulated."""
    saved = int((one.weights - 4 * one.trained) * (1 - 0.5625 / 2))
    evaluation = one.evaluation and one.evaluation - saved
    return replace(one, weights=one.weights - saved, training=one.training - saved, evaluation=evaluation)


def verdict(needed: float, limit: float) -> str:
    """`no` where it cannot fit, `yes` where it does with a margin, else `barely`."""
    if needed > limit:
        return "no"
    return "yes" if MARGIN * needed + CONTEXT <= limit else "barely"


def at_hand(recipe: Any, cfg: Any) -> tuple[Any, list[str]]:
    """Return `cfg` with sources that are on this machine: where a data set is not, the preset tiny's; and what was replaced."""
    tiny, replaced = recipe.module.tiny(), []
    data, other = getattr(cfg, "data", None), getattr(tiny, "data", None)
    path = getattr(data, "path", None)
    here = Path(str(path).removeprefix("hub:")).expanduser().exists()
    if is_dataclass(data) and path is not None and str(path) != str(other.path) and not here:
        texts = {f.name: getattr(other, f.name) for f in fields(data) if isinstance(getattr(data, f.name), (str, Path))}
        cfg = replace(cfg, data=replace(data, **texts))
        replaced.append(f"--data.path {path}: not on this machine; batches are made from {other.path}")
    for f in fields(cfg):
        value = getattr(cfg, f.name)
        if isinstance(value, str) and value.startswith("runs/") and not Path(value).exists():
            cfg = replace(cfg, **{f.name: getattr(tiny, f.name)})
            replaced.append(f"{masking.flag(f.name)} {value}: not on this machine; the preset tiny's in its place")
    return cfg, replaced


def changes(
    recipe: Any, cfg: Any, one: Any, spec: Any, limit: float, how: dict[str, Any], *, quarter: bool = False
) -> list[dict[str, Any]]:
    """Settings of this recipe that lower the peak of the stage `spec`, each estimated like the plan itself."""
    from trainworthy.core.session import estimate, spread

    def highest(whole: Any) -> int:
        part = spread.cut(whole, how["processes"], cfg.run.shard)
        return max(part.training, part.evaluation or 0, gates(whole) if cfg.gates.enabled else 0)

    def again(words: str, changed: Any) -> None:
        whole = estimate.estimates(recipe, changed, **how)[spec.index]
        needed = highest(in_4_bits(whole) if quarter else whole)
        if needed < 0.98 * before:
            found.append({"setting": words, "needs": needed, "fits": verdict(needed, limit)})

    found: list[dict[str, Any]] = []
    before = highest(one)
    group = spec.name if spec.name in config.phases(cfg) else "train"
    phase = getattr(cfg, group)
    accumulate = spec.cfg.train.accumulate
    most = one.micro_batch * accumulate
    held = one.training - one.activations + kept(one)
    if one.micro_batch > 1 and held < limit:
        room = max(1, int(one.micro_batch * (limit / MARGIN - CONTEXT - held) / max(1, one.activations)))
        times = min(most, accumulate * -(-one.micro_batch // room))
        again(f"--{group}.accumulate {times}", replace(cfg, **{group: replace(phase, accumulate=times)}))
    if cfg.train.precision == "fp32" or (cfg.train.precision == "launcher" and limit):
        again("--train.precision bf16", replace(cfg, train=replace(cfg.train, precision="bf16")))
    if getattr(cfg, "lora_rank", None) == 0:
        again("--lora-rank 16", replace(cfg, lora_rank=16))
    if cfg.optim.name == "adamw" and cfg.run.shard == "none" and one.optimizer > 0.02 * before:
        again("--optim.name adafactor", replace(cfg, optim=replace(cfg.optim, name="adafactor")))
    if not cfg.train.gradient_checkpointing:
        with contextlib.suppress(UserError):  # a recipe without blocks
            more = replace(cfg.train, gradient_checkpointing=True)
            again("--train.gradient-checkpointing", replace(cfg, train=more))
    if getattr(cfg, "load_in_4bit", None) is False and getattr(cfg, "lora_rank", 0) and not quarter:
        needed = highest(in_4_bits(one))
        found.append({"setting": "--load-in-4bit", "needs": needed, "fits": verdict(needed, limit)})
    if (one.evaluation or 0) > limit / MARGIN:
        size = max(1, int(cfg.train.eval_batch_size * (limit / MARGIN - held) / max(1, one.evaluation - held)))
        smaller = replace(cfg.train, eval_batch_size=size)
        again(f"--train.eval-batch-size {size}", replace(cfg, train=smaller))
    return sorted(found, key=lambda c: c["needs"])


# --------------------------------------------------------------------------------------------------------------- output
def show(found: dict[str, Any]) -> None:
    n = found["processes"]
    print(f"{found['recipe']} · {found['preset']} · {n} process{'es, memory of each' if n > 1 else ''}")
    for line in found["replaced"]:
        print(f"note   {line}")
    (kind, rate), = found["flops_per_second"].items()  # fmt: skip
    for s in found["stages"]:
        print(f"\nplan   {s['stage']}: {s['parameters']:,} parameters, {s['trained']:,} of them trained; micro-batches of "
              f"{s['micro_batch']:,}")  # fmt: skip
        rows = [("weights", s["weights"]), ("average of the weights", s["average"]), ("frozen modules", s["frozen"]),
                ("gradients", s["gradients"]), ("optimiser", s["optimizer"]), ("activations and the rest", s["activations"])]  # fmt: skip
        if s["shard"] != "none":  # what the processes share out comes and goes
            rest = s["training"] - s["frozen"] - sum(v for k, v in rows if k != "frozen modules")
            rows.append(("gathered, or to be reduced", rest))
        print(table([(k, gb(v)) for k, v in rows if v] + [("training, at its peak", gb(s["training"]))], indent=7))
        shape, dtype, size = s["largest"]
        print(f"       largest tensor of a step: {' x '.join(map(str, shape))} {dtype}, {gb(size)}")
        if s["evaluation"]:
            cache = f", of it keys and values {gb(s['cache'])}" if s["cache"] else ""
            print(f"       evaluation of one batch: {gb(s['evaluation'])}{cache}")
        whole = ", the whole model in each process" if s["shard"] != "none" else ""
        whole += f", in each of {s['gate_processes']} processes (--gates.jobs)" if s["gate_processes"] > 1 else ""
        print(f"       gates: at most about {gb(s['gates'])}{whole}; they compute about as much as {s['gate_flops'] / s['flops']:,.3g} "
              f"steps, {duration(s['gate_seconds'])} on one device")  # fmt: skip
        show_memory(s, found["memory_gb"])
        if s["fits"] == "no" and found["has_small"]:
            print(f"       {'--preset small':<32} is made for 24 GB")
        where = "products on this machine" if kind == "here" else kind
        each = f"{s['flops']:.3g} FLOP a step, {n * rate:.3g} FLOP/s ({where}): {duration(s['step_seconds'])} a step"
        total = f"{duration(s['seconds'])} for {s['steps']:,} steps" if s["steps"] else (
            f"{duration(1000 * s['step_seconds'])} for 1,000 steps (--samples N says how many there are)")  # fmt: skip
        print(f"time   {total}; {each}")
        speed = f"{s['samples_per_second']:,.3g} samples a second"
        if s["tokens"]:
            speed = f"{s['tokens_per_second']:,.0f} tokens a second, {s['tokens_per_second'] / n:,.0f} on each device ({s['tokens']:,} a sample)"
        print(f"       {speed}")
        if n > 1:
            took = f", {duration(s['exchange_seconds'])}" if s["exchange_seconds"] else ""
            print(f"links  each process sends {gb(s['exchanged'])} a step{took}, of it some while it computes")
        print(f"disk   {gb(s['disk'])}: checkpoints of {gb(s['checkpoint'])}, kept weights of {gb(s['best'])} "
              f"({gb(found['disk_free'])} are free here); a checkpoint takes {duration(s['checkpoint_seconds'])}")  # fmt: skip
        for line in s["missing"]:
            print(f"note   could not be simulated: {line}")


def show_memory(s: dict[str, Any], memory: float) -> None:
    """Print whether a stage fits into `memory` GB, and which settings lower what it needs."""
    if s["fits"]:
        words = {
            "yes": "fits into",
            "barely": "hardly fits into (fragmentation, other kernels)",
            "no": "DOES NOT FIT into",
        }
        print(f"memory {words[s['fits']]} {memory:g} GB")
        if s["fits"] == "no" and s["fits_without_gates"] != "no":
            print(f"       training alone {words[s['fits_without_gates']]} it: --gates.no-enabled, after `check` of a smaller copy or on a "
                  "larger device")  # fmt: skip
    for one in s["change"]:
        remark = ", still too much" if one["fits"] == "no" else ""
        print(f"       {one['setting']:<32} needs {gb(one['needs'])}{remark}")
    if s["fits"] == "no" and not s["change"]:
        print("       no setting of this recipe lowers it enough: a smaller model or sample, or a larger device")


def gb(size: float) -> str:
    """Bytes as GB or MB, of powers of ten."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


def duration(seconds: float) -> str:
    """Seconds in the unit that fits."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
