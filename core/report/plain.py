"""What a run's page says, as JSON: for scripts, dashboards and agents."""

import json
import math
from pathlib import Path
from typing import Any

from trainworthy.core.monitoring import cost
from trainworthy.core.report.advice import advise, against_healthy
from trainworthy.core.report.folder import read
from trainworthy.core.report.sections import verdict


def in_short(page: Path) -> str:
    """The text of `report RUN --json`, from the run folder whose page was written to `page`."""
    f = read(page.parent)
    s = f.summary
    advice = advise(f.rows, s, f.settings, f.n_val, own_samples=f.own_samples) if s.get("metric") else []
    beyond = against_healthy(f)
    found = {
        "run": str(f.path), "page": str(page), "recipe": f.args.get("recipe"), "finished": f.finished, "verdict": verdict(f)[1],
        "metric": s.get("metric"), "value": s["reported"][s["metric"]] if f.finished else None, "metrics": s.get("metrics"),
        "test": s.get("test"), "baselines": s.get("baselines"), "steps": s.get("steps"), "seconds": s.get("train_seconds"),
        "cost": cost.of_run(f.path) or None,
        "gates": {v["id"]: v["verdict"] for v in f.gates.get("gates", [])},
        "gates_enabled": f.gates.get("enabled"),
        "monitors": {v["id"]: v["verdict"] for v in f.monitors},
        "advice": [{"title": a.title, "evidence": a.evidence, "urgent": a.urgent} for a in [*([beyond] if beyond else []), *advice]],
        "files": sorted(str(p) for p in (f.path / "export").glob("*")) if f.finished else [],
    }  # fmt: skip
    return json.dumps(_finite(found), indent=1, default=str)


def _finite(value: Any) -> Any:
    """JSON has no infinity and no nan."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
