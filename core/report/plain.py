"""What a run's page says, as JSON: for scripts, dashboards and agents."""

from pathlib import Path
from typing import Any

from trainworthy.core.monitoring import cost
from trainworthy.core.report.advice import advise, against_healthy
from trainworthy.core.report.folder import read, read_json
from trainworthy.core.report.sections import verdict


def verdicts_of(folder: Path) -> dict[str, Any]:
    """What `check --json` prints: folder and verdicts."""
    rows = read_json(folder / "gates.json").get("gates", [])
    passed = bool(rows) and not any(v["verdict"] == "fail" for v in rows)
    return {"folder": str(folder), "page": str(folder / "report.html"), "passed": passed, "gates": rows}


def in_short(folder: Path) -> dict[str, Any]:
    """What `report RUN --json` prints, from a run folder."""
    f = read(folder)
    s = f.summary
    advice = advise(f.rows, s, f.settings, f.n_val, own_samples=f.own_samples) if s.get("metric") else []
    beyond = against_healthy(f)
    return {
        "run": str(f.path), "page": str(folder / "report.html"), "recipe": f.args.get("recipe"), "finished": f.finished, "verdict": verdict(f)[1],
        "metric": s.get("metric"), "value": s["reported"][s["metric"]] if f.finished else None, "metrics": s.get("metrics"),
        "test": s.get("test"), "baselines": s.get("baselines"), "steps": s.get("steps"), "seconds": s.get("train_seconds"),
        "cost": cost.of_run(f.path) or None,
        "gates": {v["id"]: v["verdict"] for v in f.gates.get("gates", [])},
        "gates_enabled": f.gates.get("enabled"),
        "monitors": {v["id"]: v["verdict"] for v in f.monitors},
        "advice": [{"title": a.title, "evidence": a.evidence, "urgent": a.urgent} for a in [*([beyond] if beyond else []), *advice]],
        "files": sorted(str(p) for p in (f.path / "export").glob("*")) if f.finished else [],
    }  # fmt: skip
