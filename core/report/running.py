"""`trainworthy list --running [FOLDER]`: the runs under a folder that a process works on now, from their files alone."""

import contextlib
import time
from pathlib import Path
from typing import Any

from trainworthy.core.base.as_json import write as write_json
from trainworthy.core.base.console import table
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.locks import fcntl
from trainworthy.core.report.folder import Folder, number, read

RECENT = 20  # rows of step metrics that the speed is the median of
STALE = 120.0  # seconds after its last file from which on a run counts as ended, where locks cannot be asked


def show(words: list[str], *, as_json: bool) -> None:
    """Print each live run: step, speed, time left, the newest score, the newest verdict."""
    needed = "a folder with runs (default runs)"
    if len(words) > 1 or (words and words[0].startswith("-")):
        raise UserError("list --running takes one folder", got=" ".join(words), needed=needed)
    home = Path(words[0] if words else "runs")
    if words and not home.is_dir():
        raise UserError(f"no folder {home}", needed=needed)
    found = [state(path) for path in live(home)]
    if as_json:
        write_json(found)
    elif not found:
        print(f"no run under {home} is running")
    else:
        head = ("run", "step", "samples/s", "left", "metric", "gates")
        print(table([head, *(cells(one) for one in found)], indent=0))


def live(home: Path) -> list[Path]:
    """Run folders whose lock a process holds."""
    folders = [p.parent for p in sorted(home.rglob(".lock")) if (p.parent / "args.json").is_file()]
    return [f for f in folders if is_held(f / ".lock")]


def is_held(lock: Path) -> bool:
    """Does another process hold it? Nothing is written."""
    if fcntl is None:
        newest = max((p.stat().st_mtime for p in lock.parent.glob("*")), default=0.0)
        return time.time() - newest < STALE and not (lock.parent / "summary.json").exists()
    # A shared lock needs no right to write: it may be another user's run
    with contextlib.suppress(OSError), open(lock) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def state(path: Path) -> dict[str, Any]:
    """What the files of a run say; what they do not say yet is None."""
    from trainworthy.core.report.sections import total_steps

    f = read(path)
    step = f.steps[-1]["step"] if f.steps else 0
    total = total_steps(f) if isinstance(f.settings.get("train"), dict) else 0
    speeds = sorted(v for r in f.steps[-RECENT:] if (v := number(r.get("step/samples_per_sec"))) > 0)
    speed = speeds[len(speeds) // 2] if speeds else None
    batch = f.settings.get("train", {}).get("batch_size") if total else None
    left = (total - step) * batch / speed if speed and batch and total else None
    name = f.summary.get("metric")
    value = number(f.rows[-1].get(f"val/{name}")) if f.rows and name else None
    return {"run": str(path), "recipe": f.args.get("recipe"), "step": step, "steps": total or None, "samples_per_second": speed,
            "seconds_left": left, "metric": name, "value": value, "gates": last_verdict(f)}  # fmt: skip


def last_verdict(f: Folder) -> str:
    if not f.gates.get("enabled", f.settings.get("gates", {}).get("enabled", True)):
        return "gates off"
    if not f.gates:
        return "at its gates"
    return ", ".join(f"{v} failed" for v in f.failed) or f"{sum(v['verdict'] == 'pass' for v in f.verdicts)} passed"


def cells(one: dict[str, Any]) -> tuple[str, ...]:
    step = f"{one['step']:,}" + (f" of {one['steps']:,}" if one["steps"] else "")
    speed = f"{one['samples_per_second']:,.0f}" if one["samples_per_second"] else ""
    left = "" if one["seconds_left"] is None else f"{one['seconds_left'] / 60:.0f} min" if one["seconds_left"] > 90 else (
        f"{one['seconds_left']:.0f} s")  # fmt: skip
    value = "" if one["value"] is None else f"{one['metric']} {one['value']:.4f}"
    return one["run"], step, speed, left, value, one["gates"]
