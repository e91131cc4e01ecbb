"""Writes metrics to disk from the first step, with the same tags in JSONL and TensorBoard. Usable outside a recipe."""

import atexit
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, SupportsFloat, TextIO

from trainworthy.core.base.files import write_whole

# Rows are written together: one by one between training steps, with cold caches, a row takes three times as long.
ROWS, SECONDS = 50, 1.0


class MetricsTracker:
    """Writes step_metrics.jsonl, epoch_metrics.jsonl and tb/ into `out_dir`.

    Values are numbers (or 0-d tensors, but reading one waits for the device). Rows reach the files after one second or
    50 steps, at every epoch, and on `flush`, `close` and process exit. A non-finite value is written as a word ("nan",
    "inf"), so that the files stay valid JSON. `also` receives every row with its step, for another tracker.
    """

    def __init__(
        self,
        out_dir: str | Path,
        run_name: str = "",
        use_tensorboard: bool = True,
        also: Callable[[dict, int], None] | None = None,
    ):
        self.out_dir = Path(out_dir)
        self.out_dir.mkdir(parents=True, exist_ok=True)
        self._files = {name: self._open(name) for name in ("step", "epoch")}
        self._rows: list[tuple[float, int, dict[str, Any]]] = []  # unwritten (time, step, values)
        self._flushed = time.time()
        atexit.register(self.close)
        self._tb, self._also = None, also
        if use_tensorboard:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter

            folder = self.out_dir / "tb" / run_name
            folder.mkdir(parents=True, exist_ok=True)
            # Not tensorboard's EventFileWriter: passing each row to its thread takes 200 us of CPU time per step.
            self._tb = RecordWriter((folder / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}").open("wb"))
            self._Event, self._Summary, self._SessionLog = Event, Summary, SessionLog
            self._tb.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def _open(self, name: str) -> TextIO:
        return open(self.out_dir / f"{name}_metrics.jsonl", "a")

    def log_step(self, step: int, **values: SupportsFloat) -> None:
        """Write one row per optimiser step, tagged `step/<name>`."""
        self._rows.append((time.time(), step, {k: _number(v) for k, v in values.items()}))
        if len(self._rows) >= ROWS or self._rows[-1][0] - self._flushed > SECONDS:
            self.flush()

    def _write_steps(self) -> None:
        rows, self._rows = self._rows, []
        for wall, step, values in rows:
            self._write("step", wall, step, {f"step/{k}": v for k, v in values.items()})

    def log_epoch(
        self,
        *,
        epoch: float,
        train: Mapping[str, SupportsFloat],
        val: Mapping[str, SupportsFloat],
        extra: Mapping[str, Any],
    ) -> None:
        """Write one row per evaluation, tagged `train/<name>` and `val/<name>`; `extra` keeps its own names
        (global_step, lr)."""
        extra = {k: _number(v) for k, v in extra.items()}
        row = {f"train/{k}": _number(v) for k, v in train.items()} | {f"val/{k}": _number(v) for k, v in val.items()}
        self._write_steps()
        self._write("epoch", time.time(), int(extra.get("global_step", epoch)), {"epoch": epoch, **row, **extra})
        self.flush()

    def _write(self, name: str, wall: float, step: int, row: dict[str, Any]) -> None:
        words = {k: (v if not isinstance(v, float) or math.isfinite(v) else str(v)) for k, v in row.items()}
        self._files[name].write(json.dumps({"step": step, **words}) + "\n")
        if self._also:
            self._also(row, step)
        if self._tb:  # one event with all values, since five separate scalars take 66 us per step
            numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
            scalars = [self._Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
            event = self._Event(wall_time=wall, step=step, summary=self._Summary(value=scalars))
            self._tb.write(event.SerializeToString())

    def truncate(self, *, after_step: int) -> None:
        """Remove rows after `after_step`: a resumed run writes them again."""
        self._write_steps()
        for name, file in self._files.items():
            file.flush()
            path = self.out_dir / f"{name}_metrics.jsonl"
            rows = [line for line in path.read_text().splitlines() if _step_of(line) <= after_step]
            file.close()
            write_whole(path, "".join(r + "\n" for r in rows))
            self._files[name] = self._open(name)
        if self._tb:  # TensorBoard drops what an earlier process wrote from this step on
            start = self._SessionLog(status=self._SessionLog.START)
            event = self._Event(wall_time=time.time(), step=after_step + 1, session_log=start)
            self._tb.write(event.SerializeToString())

    def flush(self) -> None:
        """Write all rows so far to the files."""
        self._flushed = time.time()
        self._write_steps()
        for file in self._files.values():
            file.flush()
        if self._tb:
            self._tb.flush()

    def close(self) -> None:
        """Flush and close every file; safe to call twice."""
        self._write_steps()
        atexit.unregister(self.close)
        for file in self._files.values():
            file.close()
        if self._tb:
            self._tb.close()
            self._tb = None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file, without a half-written line (of a killed run) or a line that is no row."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [json.loads(line) for line in lines if _step_of(line) < math.inf]


def _step_of(line: str) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, (int, float)) and math.isfinite(step) else math.inf


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
