"""card.md: what this model is, which weights these are, the baselines, the number of seeds."""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import yaml
from trainworthy.core.base import config, masking
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.files import write_whole
from trainworthy.core.monitoring import cost
from trainworthy.core.recipe.registry import find
from trainworthy.core.report.intervals import noise

CHOSEN = {
    "final": "not chosen on the validation set",
    "best": "chosen on the same validation set, so the number is optimistic",
}

FAMILY = 4  # columns of one family (`recall/...`) in the table of results
BOOTSTRAP = "95% interval over the held-out samples (bootstrap; Wilson's of shares), which does not cover other seeds"


def measured(summary: dict) -> list[tuple[str, ...]]:
    """The result next to its baselines, with a header: the metric, then other numbers that a baseline has of it, but for those of each
    of many classes (`recall/cat`), which would make the table as wide as there are classes."""
    name, own, against = summary["metric"], summary["metrics"], summary["baselines"]
    columns = list(dict.fromkeys([name, *(k for m in against.values() for k in m if k in own)]))
    families = Counter(k.partition("/")[0] for k in columns if "/" in k)
    columns = [k for k in columns if k == name or "/" not in k or families[k.partition("/")[0]] <= FAMILY]
    model = f"{summary['recipe']}, step {summary['reported']['step']}"
    ranges = summary.get("intervals", {})
    test = {}
    if summary.get("test"):
        test = {f"the same on the test split ({summary['test']['samples']:,})": summary["test"]["metrics"]}
    rows = {model: own, **test, **{k: m for k, m in against.items() if name in m}}
    known = {model: ranges.get("val", {}), **dict.fromkeys(test, ranges.get("test", {}))}

    def cell(row: str, m: dict, column: str) -> str:
        if column not in m:
            return ""
        return f"{m[column]:.4f}{between(known.get(row, {}).get(column)) if column == name else ''}"

    return [("", *columns), *((k, *(cell(k, m, c) for c in columns)) for k, m in rows.items())]


def between(limits: list[float] | None) -> str:
    """An interval, behind its number."""
    return f" [{limits[0]:.4f}, {limits[1]:.4f}]" if limits else ""


def _read(folder: Path) -> list[dict[str, Any]]:
    """Summary, arguments, gates and data of a finished run folder."""
    return [json.loads((folder / f"{n}.json").read_text()) for n in ("summary", "args", "gates", "data")]


def write_card(folder: Path, usage: str = "") -> Path:
    """Write card.md from the files of a finished run folder. `usage`: Python code that uses the export."""
    summary, args, gates, data = _read(folder)
    metric, reported = summary["metric"], summary["reported"]
    name = plain(metric)
    limits = between(summary.get("intervals", {}).get("val", {}).get(metric))
    lines = [
        f"# {plain(summary['recipe'])}: {plain(summary['question'])}",
        "",
        f"**{name} {reported[metric]:.4f}**{limits} on {data['splits']['val']['samples']:,} held-out samples: the {reported['weights']} "
        f"weights, step {reported['step']:,}, seed {args['settings']['run']['seed']}."
        + ("" if gates["enabled"] else " **Gates were off: nothing about this run was checked.**"),
        *tested(summary),
        *_warned(summary),
        "",
        one_seed(args["recipe"], summary, metric),
        "",
        f"| weights | step | {name} | where |",
        "|---|---|---|---|",
        *_weights(summary, metric),
        "",
        *against(summary),
        "",
        *([f"In brackets: {BOOTSTRAP}.", ""] if limits else []),
        f"Best known: {plain(summary['best_known'] or 'not stated')}.",
        "",
        *_origin(args, summary),
        f"{summary['parameters']:,} parameters, {summary['trained_parameters']:,} trained"
        + (f" ({summary['parameters_per_sample']} per training sample), " if summary["parameters_per_sample"] else ", ")
        + f"{summary['steps']:,} "
        + (f"of {summary['planned_steps']:,} steps (stopped early), " if summary["steps"] < summary["planned_steps"] else "steps, ")
        + f"{summary['train_seconds']:.0f} s of training, {len(summary['skipped_steps'])} non-finite steps skipped.",
        *([f"Cost of the run: {plain(spent)}."] if (spent := cost.words(cost.of_run(folder))) else []),
        *(f"Data, {plain(split)}: {plain(k)}: {plain(v)}." for split, d in data["splits"].items() for k, v in d["notes"].items()),
        "",
        *_use(usage),
        "## Gates",
        "",
    ]  # fmt: skip
    if not gates["enabled"]:
        lines.append("**Switched off: nothing about this run was checked.**")
    for v in gates["gates"]:
        line = f"{v['verdict']}: {v['id']} ({v['rows']}): {v['measured'] or v['reason']}"
        line += f"; waived: {v['reason']}" if v["verdict"] == "waived" else ""
        lines.append(f"- {plain(line)}")
    path = folder / "card.md"
    write_whole(path, page(lines, kept=usage))
    return path


def _use(usage: str) -> list[str]:
    return ["## Use", "", "```python", usage.strip(), "```", ""] if usage else []


def _warned(summary: dict) -> list[str]:
    """The warning that the run printed of its result, if there is one."""
    return ["", f"**{plain(warning)}**"] if (warning := summary.get("warning")) else []


def tested(summary: dict) -> list[str]:
    """The number on the test split, or a note that there is none."""
    metric, test = summary["metric"], summary.get("test")
    if not test:
        return ["There is no test split: settings may have been chosen on the same held-out samples."]
    limits = between(summary.get("intervals", {}).get("test", {}).get(metric))
    return [
        f"{plain(metric)} {test['metrics'][metric]:.4f}{limits} on the {test['samples']:,} samples of the test split, evaluated once, at the end."
    ]


def one_seed(recipe: str, summary: dict, name: str) -> str:
    """State how large a difference to another single seed is due to chance. It gives a number only if several seeds of
    this length were run."""
    off = ""
    try:
        entry = find(recipe)
        known = entry.measured
        off = ", with gates off" if entry.gates_off else ""
    except UserError:  # the fork was moved
        known = {}
    values = [r[name] for r in known.get("per_seed", []) if name in r]
    if len(values) < 2 or known["steps"] != summary["steps"]:
        return "One seed: differences between single seeds are not results (`--seeds 5` runs several)."
    return (f"One seed: differences below {noise(values):.4f} between two single runs are noise ({len(values)} seeds of this "
            f"recipe ranged from {min(values):.4f} to {max(values):.4f}{off}).")  # fmt: skip


def _weights(summary: dict, name: str) -> list[str]:
    """A row for each set of weights, with its use."""
    chosen, final, stage = summary["reported"]["weights"], summary["final"], summary["stage"]
    mine, home = f"exported and reported ({CHOSEN[chosen]}): export/", f"checkpoints/{stage}"
    last = mine if chosen == "final" else ""
    rows = [f"| final: after the last step | {final['step']:,} | {final['val/' + name]:.4f} | {last} |"]
    for i, b in enumerate(summary["n_best"]):
        where = f"{home}/best_val_{name}" if i == 0 else f"{home}/best-step-{b['step']}"
        rows.append(f"| {'best' if i == 0 else f'{i + 1}. best'} of {summary['evaluations']} evaluations | {b['step']:,} "
                    f"| {b[name]:.4f} | {plain(where)}{'; ' + mine if i == 0 and chosen == 'best' else ''} |")  # fmt: skip
    rows.append(f"| latest: complete state, to resume from | {summary['steps']:,} | | {home}/latest |")
    return rows


def _origin(args: dict, summary: dict) -> list[str]:
    """State what the run started from, and whether it finished as planned."""
    found = []
    if start := args.get("start"):
        fresh = len(start["missing"]) + len(start["mismatched"])
        file = plain(start["file"])
        found += [f"Fine-tuned from {file} (sha256 {start['sha256'][:12]}): {start['share']:.1%} of the parameters were "
                  f"loaded, {fresh} tensors left fresh, {len(start['unexpected'])} of the file not used.", ""]  # fmt: skip
    if summary["steps"] < summary["planned_steps"]:
        found += [f"Stopped early: after {summary['steps']:,} of {summary['planned_steps']:,} planned steps.", ""]
    return found


def against(summary: dict) -> list[str]:
    """`measured` as Markdown, with chance level."""
    head, model, *rows = measured(summary)
    chance = ("chance", f"{summary['floor']:.4f}", *[""] * (len(head) - 2))
    own = [("this model", *model[1:])] * (len(head) > 2)
    lines = [("against", *head[1:]), ("---",) * len(head), *own, *rows, chance]
    return [f"| {' | '.join(map(plain, cells))} |" for cells in lines]


def write_model_card(folder: Path, about: Mapping[str, Any]) -> Path:
    """Write README.md of a finished run's export, as the hub reads it. It is meant to leave this machine, so of a path it has the
    last part only."""
    summary, args, gates, data = _read(folder)
    about, samples = dict(about), data["splits"]["val"]["samples"]
    if script := about.pop("script", None):
        shutil.copyfile(script, folder / "export" / "use.py")
    usage, facts, source = about.pop("usage", ""), about.pop("facts", ()), about.pop("data", "data of the user's own")
    limits, settings = summary.get("intervals", {}).get("val", {}), masking.settings(args["settings"])
    values = [{"type": k, "value": round(v, 6)} for k, v in summary["metrics"].items() if math.isfinite(v)]
    base = str(about.pop("called", "") or about.get("base_model") or summary["recipe"]).rstrip("/").rpartition("/")[2]
    name = base if base == summary["stage"] else f"{base}-{summary['stage']}"
    dataset = {"name": f"{source}: {samples} held-out samples", "type": (about.get("datasets") or ["own"])[0]}
    recipe = Path(args["recipe"]).name if args["recipe"].endswith(".py") else args["recipe"]
    task = {"type": about.get("pipeline_tag", "other")}
    header = {**about, "metrics": [v["type"] for v in values], "tags": [*about.get("tags", ()), "trainworthy"],
              "model-index": [{"name": name, "results": [{"task": task, "dataset": dataset, "metrics": values}]}]}  # fmt: skip
    lines = [
        f"# {plain(name)}",
        "",
        f"Trained with the recipe `{plain(recipe)}` of Trainworthy, whose gates check a training run before it begins.",
        "",
        *[f"- {plain(line)}" for line in facts],
        "",
        "## Result",
        "",
        f"{plain(summary['question'][:1].upper() + summary['question'][1:])} Measured with the {summary['reported']['weights']} weights, "
        f"step {summary['reported']['step']:,}, seed {settings['run']['seed']}" + (f". In brackets: {BOOTSTRAP}." if limits else "."),
        *_warned(summary),
        "",
        *_metrics(summary, samples),
        "",
        "Next to other ways to answer, on the validation samples:",
        "",
        *against(summary),
        "",
        *_use(usage),
        "## Data",
        "",
        *[f"- {split}: {d['samples']:,} samples" for split, d in data["splits"].items()],
        *[f"- {split}: {plain(k)}: {plain(v)}" for split, d in data["splits"].items() for k, v in d["notes"].items()],
        "",
        "## Gates",
        "",
        *([] if gates["enabled"] else ["**Switched off: nothing about this run was checked.**"]),
        *[f"- {v['verdict']}: {plain(v['id'])}: {plain(v['title'] if v['verdict'] == 'pass' else v['reason'] or v['measured'])}"
          for v in gates["gates"]],
        "",
        "## Settings",
        "",
        *[f"- `{k}`: {plain(v)}" for k, v in config.flat(settings).items()],
    ]  # fmt: skip
    return _write_beside_weights(folder / "export" / "README.md", header, page(lines, kept=usage))


def _metrics(summary: dict, samples: int) -> list[str]:
    """The table of all metrics, on the validation samples and on the test split if there is one."""
    test, ranges = summary.get("test") or {"samples": 0, "metrics": {}}, summary.get("intervals", {})
    of_test = [f"{test['samples']:,} test samples"] if test["samples"] else []
    head = ("metric", f"{samples:,} validation samples", *of_test)

    def row(name: str, value: float) -> str:
        cells = [name, f"{value:.4f}{between(ranges.get('val', {}).get(name))}"]
        if test["samples"]:
            of_it = test["metrics"].get(name)
            cells.append("" if of_it is None else f"{of_it:.4f}{between(ranges.get('test', {}).get(name))}")
        return f"| {' | '.join(map(plain, cells))} |"

    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *[row(k, v) for k, v in summary["metrics"].items()]]


def _write_beside_weights(path: Path, header: dict[str, Any], text: str) -> Path:
    """Write a card to `path`, and next to each merged copy of the model, which has its own."""
    for file in (path, *(p.with_name("README.md") for p in path.parent.glob("*/config.json"))):
        kind = {"library_name": "transformers"} if file != path and "library_name" in header else {}
        front = yaml.safe_dump(masked(header | kind), sort_keys=False, allow_unicode=True, width=10_000)
        file.write_text(f"---\n{without_folders(front)}---\n\n{without_folders(text)}", encoding="utf-8")
    return path


def masked(value: Any) -> Any:
    """Plain values without secrets."""
    if isinstance(value, dict):
        return {k: masked(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(v) for v in value]
    return masking.hide(value) if isinstance(value, str) else value


def without_folders(text: str) -> str:
    """A text whose absolute paths are their last part."""
    return re.sub(r"(?<![\w.:/<])/(?:[^\s/'\"`,;|]+/)+([^\s/'\"`,;|)]+)", r"\1", text)


def plain(text: object) -> str:
    """Return text from data, settings or metric names for one line or table cell."""
    return re.sub(r"\s*\n\s*", " ", str(text)).replace("|", "\\|")


def page(lines: list[str], kept: str = "") -> str:
    """Return the card's text without secrets, and without lines that Markdown would take as markup, but for the code `kept`."""
    text = _escaped(masking.hide("\n".join(lines))) + "\n"
    return text.replace(_escaped(kept.strip()), kept.strip()) if kept.strip() else text


def _escaped(text: str) -> str:
    """Escape what Markdown would take as markup. An arrow is none, and is read in a terminal."""
    return escape(text, quote=False).replace("-&gt; ", "-> ")
