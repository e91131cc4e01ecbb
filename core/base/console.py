"""Console output during a run: a progress bar on a terminal, plain lines in a log file, nothing on other ranks."""

import os
import sys
import time
from typing import Any, TextIO

from trainworthy.core.base import masking

QUIET = 10.0  # seconds without output before a log file gets a progress line


def discard(stream: TextIO) -> None:
    """Drop what is written to `stream` from now on; else Python's last flush raises again."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, stream.fileno())
    os.close(sink)


class Outlet:
    """A text stream whose reader may end (`run ... | head`, a killed `tee`). Later output is dropped and the program continues, because
    training matters more than its log lines."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            discard(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def write_anywhere() -> None:
    """Make sure that output never ends the program: a closed stream (`>&-`) is replaced by one that discards, and characters that the
    encoding lacks are printed as `?`."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            sink = os.open(os.devnull, os.O_WRONLY)
            # Else the next file that is opened would get the descriptor, and what libraries print
            if sink != descriptor:
                os.dup2(sink, descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w", encoding="utf-8", closefd=False))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace" if name == "stdout" else "backslashreplace")


def outlast_readers() -> None:
    """As `write_anywhere`; also continue when the reader of a pipe ends."""
    write_anywhere()
    sys.stdout, sys.stderr = Outlet(sys.stdout), Outlet(sys.stderr)


class Console:
    """Lines and one progress bar. `quiet`: no output (other ranks, gates)."""

    def __init__(self, *, quiet: bool = False):
        self.quiet = quiet
        self._bar: Any = None  # of rich, which is imported for a terminal only
        self._task: Any = None
        self._last = time.monotonic()  # time of the last output
        self._line = 0  # the step of the last line in a log file

    def say(self, text: str = "", *, style: str = "") -> None:
        """Print a line at once, above the bar if there is one."""
        if self.quiet:
            return
        self._last = time.monotonic()
        text = masking.hide(text)
        if sys.stdout.isatty():
            from rich.console import Console as Rich

            terminal = self._bar.console if self._bar else Rich()
            terminal.print(text, style=style or None, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def start_bar(self, name: str, total: int, done: int) -> None:
        """Start a bar of `total` steps, `done` of them finished; no bar unless the output is a terminal."""
        if self.quiet or not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                             TextColumn("{task.fields[note]}"), transient=True)  # fmt: skip
        self._bar.start()
        self._task = self._bar.add_task(name, total=total, completed=done, note="")

    def tick(self, done: int, note) -> None:
        """Move the bar, at most ten times per second. Without a terminal, print a line per hundred steps if there was
        no other output for ten seconds. `note()` is called only then."""
        now = time.monotonic()
        if self._bar and now - self._last > 0.1:
            self._last = now
            self._bar.update(self._task, completed=done, note=note())
        elif not self._bar and done - self._line >= 100 and now - self._last > QUIET:
            self._line = done
            self.say(f"  step {done:>7,}  {note()}")

    def end_bar(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None


def table(rows: list[tuple[str, ...]], *, indent: int = 2) -> str:
    """Format rows as aligned columns: the first column left, the others right."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append(" " * indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


def list_names(names: list[str], n: int = 4) -> str:
    """Return the first names, and the number of further ones."""
    return ", ".join(names[:n]) + (f" and {len(names) - n} more" if len(names) > n else "")


def last_line(text: str) -> str:
    """Return the last line of an output that is not blank; "" if there is none."""
    return next((row for row in reversed(text.splitlines()) if row.strip()), "")


def bar(share: float, width: int) -> str:
    """Draw a bar in eighths of a character; a non-zero share is always visible."""
    eighths = max(1, round(share * width * 8)) if share else 0
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
