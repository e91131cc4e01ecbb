"""`--on-end CMD`: a command of the user's, run once when a run (or a process of a sweep) has ended, stopped itself or failed a gate.

It is given on the command line only. Settings travel in files (args.json, --config), and a file must not run commands.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from trainworthy.core.base import config
from trainworthy.core.base.errors import DONE, GATE_FAILED, INTERRUPTED, STOPPED_ITSELF

FLAG = "--on-end"
LOG = "on_end.log"
PATIENCE = 30.0
"""Seconds that the run waits for the command before it exits; the command continues on its own."""
WORDS = {DONE: "done", GATE_FAILED: "gate failed", STOPPED_ITSELF: "stopped itself", INTERRUPTED: "interrupted"}
LAUNCHER = ("TRAINWORTHY_", "ACCELERATE_", "TORCHELASTIC_", "MASTER_")
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")

_command: str | None = None
_folder: Path | None = None


def take(argv: list[str]) -> list[str]:
    """Return `argv` without `--on-end CMD`, and keep the command. Only `run`, `resume` and `check` have runs that end."""
    return argv if argv[:1] and argv[0] in ("data", "lr", "batch", "profile") else take_any(argv)


def take_any(argv: list[str]) -> list[str]:
    """The same for the words of any command."""
    global _command
    argv, _command = config.take(argv, FLAG)
    return argv


def run_folder(folder: Path) -> None:
    """Note where the run is. Before that there is no run to end: a wrong setting runs no command."""
    global _folder
    _folder = folder


def environment(code: int, message: str) -> dict[str, str]:
    """The variables of the command: where the run is and how it ended, without those that start processes of a run."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER) and k not in RANKS}
    kind = WORDS.get(code, "interrupted" if code > 128 else "crashed")
    return own | {"TRAINWORTHY_RUN": str(_folder.absolute()), "TRAINWORTHY_EXIT_CODE": str(code), "TRAINWORTHY_ENDED": kind,
                  "TRAINWORTHY_RESULT": result(code, message)}  # fmt: skip


def result(code: int, message: str) -> str:
    """One line: the reported number of a finished run, else why it ended."""
    from trainworthy.core.report.folder import read_json, summary

    if code == DONE:
        found = summary(read_json(_folder / "summary.json"))
        if found:
            return f"{found['metric']} {found['reported'][found['metric']]:.6g}"
        best = read_json(_folder / "result.json").get("best")  # of a sweep
        if best:
            return f"{read_json(_folder / 'result.json')['metric']} {best['value']:.6g}, trial {best['number']}"
        group = read_json(_folder / "seeds.json")
        if not group.get("values"):
            return "done"
        return f"{group['metric']} {group['mean']:.6g}, mean of {len(group['values'])} seeds"
    lines = [line for line in message.splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith(("crashed: ", "stopped", "interrupted: ", "error: "))]
    return (reasons or lines or [f"exit code {code}"])[-1 if reasons else 0].strip()


def say(text: str) -> None:
    print(f"on-end {text}", file=sys.stderr, flush=True)


def run(code: int, message: str) -> None:
    """Run the command if one was given and there is a run. Whatever becomes of it, the exit code stays the run's."""
    if _command is None or _folder is None or not _folder.is_dir():
        return
    log = _folder / LOG
    try:
        with open(log, "wb") as out:
            child = subprocess.Popen(_command, shell=True, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                     env=environment(code, message), start_new_session=True)  # fmt: skip
        try:
            ended = child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            say(f"still running after {PATIENCE:.0f} s; it continues on its own; its output is in {log}")
            return
    except BaseException as error:  # another Ctrl-C, a full disk: the exit code of the run stays
        with contextlib.suppress(Exception):
            say(f"{type(error).__name__}: {error}")
        return
    text = log.read_text(errors="replace").strip().splitlines()
    if ended:
        say(f"FAILED with exit code {ended}: {text[-1] if text else 'it printed nothing'}\n"
            f"       the run's exit code stays {code}; all output: {log}")  # fmt: skip
    else:
        say(f"exit code 0{': ' + text[-1] if text else ''}")
