"""`python -m trainworthy.launch [run|check|resume] ...`: one run, from the command line to the report.

settings -> data report -> gates -> training -> evaluation -> export -> report
"""

import sys
from importlib import import_module

from trainworthy.core.base import interrupts, masking
from trainworthy.core.base.console import outlast_readers
from trainworthy.core.base.errors import DONE, Signalled, Stop, UserError
from trainworthy.core.cli import HELP
from trainworthy.core.session import nodes, on_end, process_end

VERBS = ("run", "check", "resume", "lr", "data", "batch", "profile", "predict", "chat")  # core/commands/<verb>.py


def main(target: str | None = None, argv: list[str] | None = None) -> None:
    """Run the command in `argv` (default: the process's), with `target` as its recipe if a file starts itself; then
    exit."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if target is not None:
        argv = ["run", target, *argv]
    outlast_readers()
    process_end.leave(*outcome(argv), then=on_end.run)


def outcome(argv: list[str]) -> tuple[int, str, bool]:
    """Run `argv`; return (exit code, message, whether it stopped as planned and not by a bug)."""
    try:
        with interrupts.raised():
            command(nodes.continued(on_end.take(argv)))
    except (Signalled, KeyboardInterrupt) as arrived:
        return *interrupts.ended(arrived, argv), True
    except process_end.Crashed as crash:
        return crash.exit_code, f"{crash.trace}\n{'crashed' if crash.trace else 'stopped'}: {crash}", not crash.trace
    except Stop as stop:
        kind, message = process_end.KINDS.get(stop.exit_code, "interrupted"), masking.hide(str(stop))
        return stop.exit_code, f"\n{kind}: {message}" if kind != "error" else f"{kind}: {message}", True
    except SystemExit as left:  # the parser (help, a wrong type), or a recipe that is being imported
        if isinstance(left.code, int | None):
            return left.code or DONE, "", True
        return 1, f"error: {masking.hide(str(left.code))}", True
    except Exception as error:  # an error before there is a run folder
        return process_end.before_run(error)
    return DONE, "", True


def command(argv: list[str]) -> None:
    if argv and argv[0] in ("-h", "--help"):
        print(HELP)
        return
    verb = argv[0] if argv[:1] and argv[0] in VERBS else "run"
    rest = argv[1:] if argv[:1] == [verb] else argv
    if not rest and verb in VERBS[:4]:
        raise UserError(f"{verb} what?", needed="a run folder" if verb == "resume" else "a recipe: an id, or the path of a fork",
                        next=f"trainworthy {verb} --help")  # fmt: skip
    import_module(f"trainworthy.core.commands.{verb}").main(rest if verb in VERBS[:4] else argv)


if __name__ == "__main__":
    main()
