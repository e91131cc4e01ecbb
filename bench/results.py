"""What a recipe reaches: runs the real command once per seed and adds a file with the figures to the recipe's results/NAME/.

    python bench/results.py vision/classify --seeds 0 1 2
    python bench/results.py vision/classify --seeds 0 1 --to /tmp/quick.json -- --train.epochs 1
    python bench/results.py rl/grpo --seeds 0 --runs /tmp/grpo           # one seed at a time, whenever there is time:
    python bench/results.py rl/grpo --seeds 0 1 2 --runs /tmp/grpo       # those that ended there are not run again

Every run is `python -m trainworthy.launch run RECIPE --run.seed S`, gates proved afresh, in a process of its own and one at a time:
its time is a result too (on a machine that others kept busy, its CPU time).
What follows `--` goes to the recipe and is kept under "settings". `trainworthy list` shows "result" and "time". Three seeds or more
also give the band that reports draw curves over (as `trainworthy reference` does).
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from trainworthy.core.base import masking
from trainworthy.core.base.errors import UserError
from trainworthy.core.commands import reference
from trainworthy.core.commands.reference import run_seed
from trainworthy.core.recipe.registry import find
from trainworthy.core.report import bands, folder
from trainworthy.core.report.groups import QUARTERS
from trainworthy.core.report.intervals import interval, iqm, iqm_interval


def run_once(recipe: str, seed: int, settings: list[str], out: Path) -> dict:
    """One run of the real command; its summary, the seconds of its gates and of the whole command. A run that ended in `out` on
    another day is read again."""
    note = out / "spent.json"
    if not note.exists():
        start, spent = time.monotonic(), cpu_seconds()
        made = run_seed(recipe, seed, settings, out)
        kept = {"wall": time.monotonic() - start, "cpu": cpu_seconds() - spent, "settings": masking.words(settings)}
        note.write_text(json.dumps({**kept, "folder": str(made.relative_to(out))}))
    kept = json.loads(note.read_text())
    if kept["settings"] != masking.words(settings):
        raise UserError(f"{out} was run with other settings", got=kept["settings"], needed=masking.words(settings))
    made = out / kept["folder"]
    read = {name: json.loads((made / f"{name}.json").read_text()) for name in ("summary", "gates", "environment")}
    return {"seed": seed, **kept, "folder": made, **read}


def cpu_seconds() -> float:
    """What processes that were started here, and have ended, spent."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def spread(values: list[float], summary: dict) -> dict[str, float | list[float] | None]:
    """Mean, least, most, and the 95% interval of the mean by Student's t (none for a single value). The interval ends at a perfect
    score: with three seeds near it, t reaches beyond."""
    perfect, chance = summary["ceiling"], summary["floor"]
    low, high = interval(values) if len(values) > 1 else (None, None)
    if None not in (low, perfect, chance):
        low, high = (low, min(high, perfect)) if perfect > chance else (max(low, perfect), high)
    return {
        "mean": statistics.fmean(values),
        "min": min(values),
        "max": max(values),
        "interval_95": None if low is None else [low, high],
    }


def sentence(summary: dict, figures: dict, n: int) -> str:
    """ "99.1% accuracy (mean of 3 seeds, 98.9-99.4%)"; a metric that does not live in 0..1 stays a plain number."""
    ends = (summary["floor"], summary["ceiling"])
    share = None not in ends and min(ends) >= 0 and max(ends) <= 1

    def shown(value: float) -> str:
        return f"{100 * value:.1f}" if share else f"{value:.4g}"

    unit, name = "%" if share else "", summary["metric"].replace("_", " ")
    test = f"; test split {shown(figures['test']['mean'])}{unit}" if figures.get("test") else ""
    if n == 1:
        return f"{shown(figures['mean'])}{unit} {name} (one seed){test}"
    low, high = shown(figures["min"]), shown(figures["max"])
    to = " to " if figures["min"] < 0 else "-"
    return f"{shown(figures['mean'])}{unit} {name} (mean of {n} seeds, {low}{to}{high}{unit}){test}"


def on_test(summaries: list[dict], metric: str) -> dict[str, Any] | None:
    """The same metric on the test split, by which no setting was chosen, if the recipe has one."""
    found = [s["test"]["metrics"][metric] for s in summaries if metric in (s.get("test") or {}).get("metrics", {})]
    if not found or len(found) < len(summaries):
        return None
    return {"samples": summaries[0]["test"]["samples"], **spread(found, summaries[0]), "per_seed": found}


def duration(seconds: float) -> str:
    """40 s, 12 min, 3.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def means(tables: list[dict[str, dict[str, float]]], metric: str) -> dict[str, float]:
    """{baseline: mean of the metric over the seeds}."""
    names = [n for n in tables[0] if metric in tables[0][n]]
    return {n: statistics.fmean(t[n][metric] for t in tables) for n in names}


def all_means(tables: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """{baseline: {metric: mean}} of whatever every seed measured: what a page quotes beside the metric (perplexity, mAP@50) must
    stand in this file, too."""
    found: dict[str, dict[str, float]] = {}
    for name, row in tables[0].items():
        shared = [k for k in row if all(k in t.get(name, {}) for t in tables)]
        found[name] = {k: statistics.fmean(t[name][k] for t in tables) for k in shared}
    return found


def proved(gates: list[dict]) -> dict[str, Any]:
    """Were the gates on, and the median seconds of those runs that proved them. A pass that was remembered from another run (a run
    that was resumed has them) says nothing about what gates cost: where no run proved all of its gates there is no figure."""
    off = not all(g["enabled"] for g in gates)
    spent = [
        g["seconds"] for g in gates if g["enabled"] and g["gates"] and not any(v["remembered"] for v in g["gates"])
    ]
    return {"gates": "off" if off else "on", "gate_seconds": statistics.median(spent) if spent else None}


def place(environment: dict) -> str:
    """Where the time was taken: "2 CPU cores", or the device's name."""
    devices = environment["devices"]
    if devices == ["cpu"]:
        return f"{environment['cores']} CPU cores"
    return f"{len(devices)} x {devices[0]}" if len(devices) > 1 else devices[0]


def collect(runs: list[dict], settings: list[str]) -> dict:
    """What is kept of all runs."""
    first, environment = runs[0]["summary"], runs[0]["environment"]
    metric = first["metric"]
    values = [r["summary"]["reported"][metric] for r in runs]
    figures = spread(values, first) | {"test": on_test([r["summary"] for r in runs], metric)}
    train = statistics.median(r["summary"]["train_seconds"] for r in runs)
    wall, cpu = (statistics.median(r[k] for r in runs) for k in ("wall", "cpu"))
    waited = environment["devices"] == ["cpu"] and wall > 2 * cpu  # for others, most of the time
    middle = {"iqm": iqm(np.array(values)), "iqm_interval_95": iqm_interval(values)} if len(runs) >= QUARTERS else {}
    return {
        "result": sentence(first, figures, len(runs)),
        "time": f"{duration(cpu)} of CPU time" if waited else f"{duration(wall)} on {place(environment)}",
        "metric": metric, **figures, **middle,
        "per_seed": [{"seed": r["seed"], **r["summary"]["metrics"]} for r in runs],
        "curves": {str(r["seed"]): [[row["step"], row[f"val/{metric}"]] for row in folder.read(r["folder"]).rows] for r in runs},
        "baselines": means([r["summary"]["baselines"] for r in runs], metric),
        "means": all_means([{"": r["summary"]["metrics"]} for r in runs])[""],
        "baseline_means": all_means([r["summary"]["baselines"] for r in runs]),
        "train_seconds": train,
        "wall_seconds": round(wall, 1), "cpu_seconds": round(cpu, 1),
        **proved([r["gates"] for r in runs]),
        "steps": first["steps"], "epochs": first["epochs"],
        "date": time.strftime("%Y-%m-%d"),
        "versions": environment["versions"], "cores": environment["cores"], "threads": environment["threads"],
        "settings": masking.words(settings),
    }  # fmt: skip


def rounded(value: Any) -> Any:
    """Floats to six digits, all the way down."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    """Run every seed, say what came out, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--to", type=Path, help="file to write (default: results/NAME/PRESET-DATE.json next to the recipe)"
    )
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs, one per seed (default: a temporary one)")
    own, settings = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, settings = own[:cut], own[cut + 1 :]
    args = parser.parse_args(own)
    if len(set(args.seeds)) < len(args.seeds):
        raise SystemExit("error: a seed is given twice")
    if settings not in ([], ["--preset", "full"]) and args.to is None:
        raise SystemExit("error: figures of changed settings belong in a file of their own\n  needed:       --to FILE")
    runs = []
    with tempfile.TemporaryDirectory() as temporary:
        out = args.runs or Path(temporary)
        try:
            recipe = find(args.recipe)
            for seed in args.seeds:
                runs.append(run_once(args.recipe, seed, settings, out / str(seed)))
                reported, wall = runs[-1]["summary"]["reported"], runs[-1]["wall"]
                print(f"seed {seed}: {reported[runs[-1]['summary']['metric']]:.4f} in {wall:.0f} s", flush=True)
        except UserError as error:
            raise SystemExit(f"error: {error}") from None
        if len(runs) > 2 and not args.to and not settings:  # the band is that of `tiny`
            reference.write(recipe.reference, bands.reference([folder.read(r["folder"]) for r in runs]))
        kept = collect(runs, settings)  # while their folders are there
    to = args.to or recipe.next_result("full" if "full" in settings else "tiny", kept["date"])
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(rounded(kept), indent=1) + "\n")
    print(f"{kept['result']}; {kept['time']}\n{to}")


if __name__ == "__main__":
    main()
