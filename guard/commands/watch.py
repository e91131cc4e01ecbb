"""usage: trainworthy watch SCRIPT.py [-- its arguments]

Runs a training script unchanged and logs its steps.

  trainworthy watch train.py -- --epochs 10      the real run, with all its effects
  trainworthy watch --stop -m pkg.train          end the run (exit 4) when its loss stays non-finite

Loss and learning rate of every step go to runs/watch-<script>/<time>/step_metrics.jsonl. At the end, the checks of
`trainworthy guard` that need no rehearsal are reported as advice. In code: `with trainworthy.watch("folder"): train()`.
Exit codes: the script's own; 4 with --stop."""

import contextlib
import multiprocessing
import os
import shlex
import signal
import sys
import traceback
from pathlib import Path

from trainworthy.core.base.errors import USAGE, UserError
from trainworthy.core.base.files import stamp


class _Plain:
    """Changes nothing."""

    @staticmethod
    def intervene(source: int, batch: object) -> object:
        return batch


def end_workers() -> None:
    """End the script's loader workers. Python terminates them at its exit and waits, for ever where they ignore SIGTERM."""
    with contextlib.suppress(ValueError):  # torch raises when a worker is killed; not in the main thread: it cannot
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def main(argv: list[str]) -> None:
    """Entry point of `trainworthy watch`."""
    words = argv[1:]
    stop = words[:1] == ["--stop"]
    words = words[1:] if stop else words
    if words and words[0].startswith("-") and words[0] not in ("-m", "--"):
        raise UserError(
            f"unknown option {words[0]}", needed="the script's own arguments after --", next="trainworthy watch --help"
        )
    from trainworthy.guard.hooks import patches
    from trainworthy.guard.rehearsals import rehearsal, running

    target = rehearsal.locate(words, command="watch")
    from trainworthy.guard.watching import summary, watch

    name = (target.module or target.path.stem).rpartition(".")[2]
    out = (Path("runs") / f"watch-{name}" / stamp()).absolute()
    print(f"watch  {target.path.name} {' '.join(target.argv)} into {out}", file=sys.stderr)
    tell = lambda text: print(text, file=sys.stderr)  # noqa: E731
    target.batches = ()
    code: object = 0
    try:
        with watch(out, stop=stop, say=tell) as seen:
            patches.watched_script = lambda text: tell(f"  watch: {text}")
            try:
                running.run(target, seen, _Plain())
            except SystemExit as leave:
                code = leave.code
            finally:
                patches.watched_script = None
                end_workers()
    except KeyboardInterrupt:
        tell(f"watch  until here: {out / 'report.html'}")
        raise
    except Exception as error:
        if not (shown := of_script(error, target.path)):
            raise
        tell(shown)
        tell(f"watch  the script raised at step {seen.steps:,}; until here: {out / 'report.html'}")
        sys.exit(1)
    if code == USAGE and not seen.steps:
        name = shlex.quote(os.path.relpath(target.path))
        tell(
            f"watch  it ended with exit code 2 before it trained; with arguments: trainworthy watch {name} -- ARGUMENTS"
        )
        sys.exit(code)
    tell(f"watch  {seen.steps:,} steps; {summary(seen.verdicts)}; {out / 'report.html'}")
    if isinstance(code, str):
        tell(code)
        code = USAGE - 1
    sys.stdout.flush()
    sys.exit(code)


def of_script(error: Exception, path: Path) -> str:
    """Return the traceback as plain Python prints it, from the script's own first frame on; empty if the script has none."""
    left = error.__traceback__
    while left is not None and left.tb_frame.f_code.co_filename != str(path):
        left = left.tb_next
    return "".join(traceback.format_exception(type(error), error, left)).rstrip() if left else ""
