"""Reads a run folder in any state for the report."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trainworthy.core.base import masking
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.files import read_json
from trainworthy.core.monitoring.metrics import read_rows
from trainworthy.core.recipe.forks import NOTE
from trainworthy.core.recipe.registry import find


@dataclass
class Folder:
    """Content of a run folder; missing or half-written parts are empty."""

    path: Path
    args: dict[str, Any]
    environment: dict[str, Any]
    data: dict[str, Any]
    gates: dict[str, Any]
    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    monitors: list[dict[str, Any]]
    reference: dict[str, Any]
    """Content of the recipe's results/NAME.band.json: the band of its healthy runs."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the stage whose curves these are."""
        own, last = (self.args.get(k) for k in ("settings", "last_stage"))
        return {**(own if isinstance(own, dict) else {}), **(last if isinstance(last, dict) else {})}

    @property
    def arguments(self) -> list[str]:
        """The command line after the verb, without secrets."""
        return masking.words(self.args.get("argv", []))

    @property
    def own_samples(self) -> bool:
        """Does it train on samples that it makes itself?"""
        return "val" in (split := self.data.get("splits", {})) and "train" not in split

    @property
    def n_val(self) -> int:
        return self.data.get("splits", {}).get("val", {}).get("samples", 0)

    @property
    def finished(self) -> bool:
        return bool(self.summary) and not self.summary.get("unfinished")

    @property
    def val_loss(self) -> str:
        """Tag of the loss on held-out data, if the recipe reports one."""
        return next((k for k in ("val/loss", "val/nll") if self.rows and k in self.rows[-1]), "")

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """Failures first, then in the order of the run."""
        return worst_first(self.gates.get("gates", []))

    @property
    def failed(self) -> list[str]:
        return [v["id"] for v in self.verdicts if v["verdict"] == "fail"]

    @property
    def only_checked(self) -> bool:
        return self.path.absolute().parent.name == "checks"

    @property
    def only_described(self) -> bool:
        return self.args.get("command") == "data"

    @property
    def stages(self) -> "list[Folder]":
        """Earlier stages, in order; each has a folder like this one."""
        found = [read(p.parent) for p in self.path.glob("stages/*/args.json")]
        order = [v["stage"] for v in self.gates.get("gates", [])]
        return sorted(found, key=lambda f: order.index(f.path.name) if f.path.name in order else len(order))


def worst_first(verdicts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rank = {"fail": 0, "waived": 1, "advice": 1}
    return sorted(verdicts, key=lambda v: rank.get(v["verdict"], 2))


def where_runs_are(folder: Path, command: str = "") -> str:
    """Return the next step for a folder that is not a run: `command`, or a sentence, with the newest run in it that trained, if --run.out
    or a recipe's folder was named."""
    found = [p.parent for depth in ("*", "*/*") for p in folder.glob(f"{depth}/args.json")]
    # names begin with the time
    runs = sorted((run for run in found if run.parent.name != "checks"), key=lambda run: run.name)
    if command == "resume":
        runs = [run for run in runs if not (run / "summary.json").exists()] or runs
    trained = [run for run in runs if (run / "checkpoints").exists() or (run / "summary.json").exists()]
    newest = (trained or runs or [None])[-1]
    if newest is None:
        return "ls -d runs/*/*"
    return f"trainworthy {command} {newest}" if command else f"the newest run in it: {newest}"


def args_of(folder: Path, **kinds: type) -> dict[str, Any]:
    """Return args.json of a run folder. UserError: it does not name its recipe, or lacks a field of `kinds`."""
    path = folder / "args.json"
    if path.is_file():
        path.open().close()  # raises where this user may not read it: that is no file cut off
    args = read_json(path)
    if not all(isinstance(args.get(k), kind) for k, kind in {"recipe": str, **kinds}.items()):
        raise UserError(f"{folder} is not a run folder of trainworthy",
                        got=f"no whole args.json with {', '.join(['recipe', *kinds])}",
                        needed="the folder that a run printed",
                        next=where_runs_are(folder))  # fmt: skip
    return args


def number(value: Any) -> float:
    """Return a value of a metrics row as a number; "nan" and "inf" become floats, anything else nan."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


TEXTS = ("stage", "rows", "title", "measured", "needed", "remedy", "reason")
VERDICT = {"id": "?", "verdict": "?", "seconds": 0.0, **dict.fromkeys(TEXTS, "")}
ENDED = "ended.json"
"""How the newest attempt ended, if not by finishing: `exit_code` and `message`."""
FINISHED = ("metric", "steps", "epochs", "train_seconds", "reported", "metrics", "final")
"""Keys of every summary.json. A file without them is another tool's, and the run counts as unfinished."""


def verdicts(found: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the verdicts of gates.json or monitors.json, with missing fields filled in."""
    rows = found.get(key)
    return [{**VERDICT, **row} for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return summary.json if it is ours."""
    name = found.get("metric")
    inner = [found.get(k) for k in ("reported", "metrics", "final")]
    if not (all(k in found for k in FINISHED) and isinstance(name, str) and all(isinstance(x, dict) for x in inner)):
        return {}
    return found if {name, "step"} <= found["reported"].keys() and name in found["metrics"] else {}


def splits(found: dict[str, Any]) -> dict[str, Any]:
    """Return data.json without splits that are not counted."""
    every = found.get("splits")
    every = every if isinstance(every, dict) else {}
    whole = {k: s for k, s in every.items() if isinstance(s, dict) and isinstance(s.get("samples"), int)}
    return {**found, "splits": whole}


def read(path: Path) -> Folder:
    """Read what exists. Without a summary.json, the metric's name and direction come from the best checkpoint."""
    names = ("args", "environment", "data", "gates", "summary")
    steps, rows = (read_rows(path / f"{n}_metrics.jsonl") for n in ("step", "epoch"))
    args, environment, data, gates, end = (read_json(path / f"{n}.json") for n in names)
    monitors = worst_first(verdicts(read_json(path / "monitors.json"), "monitors"))
    gates = {**gates, "gates": verdicts(gates, "gates")} if gates else gates
    band = {} if "stage" in args else reference_of(str(args.get("recipe", "")))  # the band belongs to the last stage
    found = Folder(path, args, environment, splits(data), gates, summary(end), steps, rows, monitors, band)
    if not found.summary:
        noted = read_json(path / "metric.json")
        best = [read_json(p) for p in path.glob("checkpoints/*/best_val_*/info.json")]
        best = [b for b in best if {"metric", "value"} <= b.keys()]
        tags = [k.removeprefix("val/") for k in (rows[-1] if rows else {}) if k.startswith("val/")]
        name = best[0]["metric"] if best else next(iter(tags), None)
        if name:
            values = series(rows, "val/" + name)[1]
            higher = not best or not len(values) or best[0]["value"] >= np.nanmax(values) > np.nanmin(values)
            found.summary = {"metric": name, "higher_is_better": bool(higher), "unfinished": True}
        if isinstance(noted.get("metric"), str) and any(f"val/{noted['metric']}" in r for r in rows):
            found.summary = {**noted, "unfinished": True}
    return found


def reference_of(target: str) -> dict[str, Any]:
    """Return the reference next to the recipe or, if it has none, next to the recipe it was forked from; none if that
    recipe is not here."""
    try:
        entry = find(target)
        own = read_json(entry.reference)
        parent = forked_from(entry.path.read_text(encoding="utf-8"))
        if own or not parent:
            return own
        theirs = read_json(find(parent).reference)
        return {**theirs, "of": parent} if theirs else {}
    except (UserError, OSError):
        return {}


def forked_from(source: str) -> str:
    """Return the recipe named in the last line of a fork."""
    found = NOTE.search(source)
    return found["recipe"] if found else ""


def series(rows: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of the rows with `key`; "nan" and "inf" become floats."""
    kept = [(r["step"], number(r[key])) for r in rows if key in r]
    return (np.array([k[0] for k in kept], float), np.array([k[1] for k in kept], float))


def references(s: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the values to compare the result with: every baseline with the metric, and chance level."""
    found = [(k, float(m[s["metric"]])) for k, m in s.get("baselines", {}).items() if s["metric"] in m]
    return [*found, *([("chance", float(s["floor"]))] if s.get("floor") is not None else [])]
