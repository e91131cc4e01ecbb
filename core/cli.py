"""The `trainworthy` command. It reads files and starts processes. Only those processes import torch."""

import ast
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

from trainworthy.core.base import interrupts
from trainworthy.core.base.as_json import write as write_json
from trainworthy.core.base.config import take, take_number, unknown
from trainworthy.core.base.console import discard, table, write_anywhere
from trainworthy.core.base.errors import SIGNALS, USAGE, Interrupted, Signalled, Stop, UserError, not_permitted
from trainworthy.core.recipe.registry import Entry, find, recipes
from trainworthy.core.session import launcher as processes
from trainworthy.core.session import nodes

HELP = """\
usage: trainworthy COMMAND ...

Deep-learning training recipes that must pass checks ("gates") before they train. The gates also check your own scripts.

Train
  trainworthy list                          the recipes: task, training time, measured result
  trainworthy run RECIPE [settings]         gates, training, report; RECIPE is an id or the path of a fork
  trainworthy resume RUN_FOLDER             continue a stopped run, or from its weights with --fallback NAME
  trainworthy fork RECIPE FILE.py           copy a recipe to start your own
  trainworthy diff FORK.py                  what a fork changed, and which gates check those parts

Check
  trainworthy check RECIPE [settings]       the gates only
  trainworthy guard SCRIPT.py [-- ARGS]     run an unchanged training script for a few steps; check its loop and data
  trainworthy watch SCRIPT.py [-- ARGS]     run it in full, log step metrics, report the same checks as advice
  trainworthy data RECIPE [settings]        its data: duplicates, classes, ranges, overlap of the splits
  trainworthy doctor                        this machine: packages, devices, memory, who else uses it

Choose settings
  trainworthy plan RECIPE [settings]        estimate memory, time and disk space; what to change if the run does not fit
  trainworthy lr RECIPE [settings]          learning-rate range test on the real data, with plot and suggestion
  trainworthy batch RECIPE [settings]       largest micro-batch that fits, throughput per size
  trainworthy profile RECIPE [settings]     what limits the speed: input, compute, memory, overhead
  trainworthy sweep RECIPE [settings]       search settings: scientific, nuisance or fixed; chosen on validation data
  trainworthy config RECIPE [settings]      all settings as a file, for --config FILE

Look at results
  trainworthy report RUN_FOLDER             write report.html again; also for TensorBoard folders and trainer_state.json
  trainworthy compare RUNS_A RUNS_B         two groups of seeds: the difference and its interval
  trainworthy chat RUN_FOLDER               talk to the language model that a run exported
  trainworthy predict RUN_FOLDER FILE       let the exported model answer prompts, conversations or pictures
  trainworthy board [FOLDER]                TensorBoard on the runs
  trainworthy list --running [FOLDER]       runs that are training now: step, speed, time left, score
  trainworthy repro RUN_FOLDER              versions, settings and data of a run, and what differs on this machine

Test the gates
  trainworthy break RECIPE                  one planted bug: its loss curve, a guess, its patch, the gate that stops it
  trainworthy bugs [RECIPE ...]             planted bugs, healthy variants and mutants, all through the gates
  trainworthy reference RECIPE              measure the curves of healthy runs, for later reports

Options of several commands
  trainworthy COMMAND --help                help of one command
  trainworthy run RECIPE --help             all settings of a recipe
  trainworthy --version                     the installed version
  --seeds 5, --seeds 0,1,2                  several seeds: mean and interval (run), gate failures by seed (check)
  --init-from PATH                          fine-tune: start from these weights (run, check)
  --board                                   show the run in TensorBoard while it trains (run, resume)
  --on-end CMD                              run CMD when the run ends, stops itself or fails a gate (run, resume, check)
  --json                                    the result as JSON on stdout, everything else on stderr
  -n N, --accelerate-config FILE            number of processes, or accelerate's config file
  --nodes N --node-rank I --address H:P     several machines; --restarts N restarts lost processes

exit codes: 0 done · 2 bad usage, setting or data · 3 a gate failed · 4 the run stopped itself · 5 interrupted, saved"""


def main() -> None:
    write_anywhere()
    argv = sys.argv[1:]
    try:
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(HELP)
            sys.exit(0 if argv else USAGE)
        if argv[0] in ("--version", "-V"):
            from importlib.metadata import version

            print(f"trainworthy {version('trainworthy')}")
            return
        commands = {"list": list_recipes, "fork": fork, "report": report}
        commands |= dict.fromkeys(LAUNCHED, launch) | dict.fromkeys(ELSEWHERE, elsewhere)
        if argv[0] not in commands:
            raise unknown(f"command '{argv[0]}'", argv[0], commands, next="trainworthy --help")
        own = argv[1 : argv.index("--")] if "--" in argv else argv[1:]  # behind `--`: a guarded script's
        if {"-h", "--help"} & {*own} and (len(argv) == 2 or argv[0] not in OF_RECIPES):
            print(page(argv[0]))
            return
        # A watched script gets its signals itself. Ctrl-C is KeyboardInterrupt: some commands end with it.
        own_signals = () if argv[0] == "watch" else set(SIGNALS) - {signal.SIGINT}
        with interrupts.raised(own_signals):
            commands[argv[0]](argv)
        sys.stdout.flush()
    except BrokenPipeError:  # `trainworthy list | head -1`: the reader closed the pipe
        discard(sys.stdout)
        sys.exit(128 + signal.SIGPIPE)  # the code that a shell reports
    except (Signalled, KeyboardInterrupt) as arrived:
        code, message = interrupts.ended(arrived, argv)
        print(message, file=sys.stderr)
        sys.exit(code)
    except (Stop, PermissionError) as error:
        stop = error if isinstance(error, Stop) else not_permitted(error)
        print(stop if isinstance(stop, Interrupted) else f"error: {stop}", file=sys.stderr)
        sys.exit(stop.exit_code)


LAUNCHED = ("run", "check", "lr", "resume", "predict", "chat", "data", "batch", "profile")
"""Commands that train or load a model, in a process of their own."""
ELSEWHERE = ("reference", "doctor", "compare", "guard", "watch", "diff", "config", "plan", "repro", "sweep", "board",
             "bugs", "break")  # fmt: skip
OF_GUARD = ("guard", "watch")
OF_RECIPES = ("run", "check", "resume", "data", "lr", "batch", "profile", "plan", "config", "sweep")
"""Commands whose `RECIPE --help` lists the settings of the recipe."""


def page(command: str) -> str:
    """Return what `trainworthy COMMAND --help` prints. The docstring of a command's module is parsed without an import."""
    from trainworthy.core.commands.help import PAGES

    path = Path(__file__).parent.parent / room_of(command) / "commands" / f"{command}.py"
    if command in PAGES or not path.exists():
        return PAGES[command]
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def list_recipes(argv: list[str]) -> None:
    """Print id, summary, time and measured result of every recipe."""
    as_json = "--json" in argv
    if "--running" in argv:
        from trainworthy.core.report.running import show

        show([w for w in argv[1:] if w not in ("--running", "--json")], as_json=as_json)
        return
    if rest := [w for w in argv[1:] if w != "--json"]:
        raise UserError("list takes no arguments", got=" ".join(rest), needed="nothing, --json or --running [FOLDER]")
    if as_json:
        found = [
            {"id": e.id, "summary": e.summary, "path": str(e.path), "measured": e.measured or None} for e in recipes()
        ]
        write_json(found)
        return
    for entry in recipes():
        found = entry.measured
        result = f"{found['result']}; {found['time']}" if found else "not measured yet"
        result += "; gates were off" if entry.gates_off else ""
        print(table([(entry.id, entry.summary)], indent=0) + f"\n    {result}")


def fork(argv: list[str]) -> None:
    """Copy a recipe's file and list the lines to edit first."""
    if len(argv) != 3:
        raise UserError("fork needs a recipe and a new file", got=" ".join(argv[1:]) or "nothing", needed="trainworthy fork RECIPE FILE.py",
                        next="trainworthy fork vision/classify ./mine.py")  # fmt: skip
    from trainworthy.core.recipe.forks import note, places, without_note

    entry, target = find(argv[1]), Path(argv[2])
    if target.is_dir():
        target = target / entry.path.name
    if target.suffix != ".py":
        raise UserError("a fork is one Python file", got=str(target), needed="a name ending in .py")
    if target.exists():
        raise UserError(f"{target} exists", needed="a new name: a fork never overwrites")
    target.parent.mkdir(parents=True, exist_ok=True)
    source = entry.path.read_text()
    today = time.strftime("on %Y-%m-%d")
    target.write_text(without_note(source) + note(entry, source, today))

    lines = "\n".join(f"  line {line:<4} {what}" for what, line in places(source).items())
    print(f"""{target}: a copy of {entry.id}. It runs from any folder, behind the same gates:

  trainworthy check {target}
  trainworthy run {target}

Edit first
{lines}""")


def elsewhere(argv: list[str]) -> None:
    """Run a command that has its own module: core/commands/<name>.py or guard/commands/<name>.py."""
    if argv[0] in ("plan", "config") and len(argv) > 1 and not argv[1].startswith("-"):
        assert_words(find(argv[1]), argv)
    import_module(f"trainworthy.{room_of(argv[0])}.commands.{argv[0]}").main(argv)


def room_of(command: str) -> str:
    """The package that a command belongs to. The one of guard imports this one, so core finds its commands by name."""
    return "guard" if command in OF_GUARD else "core"


def report(argv: list[str]) -> None:
    """Write report.html of a run folder, or of a group of seeds, again."""
    as_json = "--json" in argv
    argv = [w for w in argv if w != "--json"]
    argv, metric = take(argv, "--metric")
    better = [w for w in argv if w in ("--higher-is-better", "--lower-is-better")]
    argv = [w for w in argv if w not in better]
    if len(argv) == 2:
        from trainworthy.core.report import other_tools

        source = other_tools.source_of(Path(argv[1]))
        if source is not None:
            home = other_tools.read_foreign(
                source, metric=metric or "", higher="--higher" in better[0] if better else None
            )
            argv = [argv[0], str(home)]
        elif metric or better:
            raise UserError(
                "--metric and its direction are for runs of other tools",
                got=argv[1],
                needed="a run's own metric is in its summary.json",
            )
    if len(argv) == 2 and (Path(argv[1]) / "seeds.json").is_file():
        from trainworthy.core.report import seeds

        group = seeds.write(Path(argv[1]))
        if as_json:
            write_json(group)
        else:
            print(Path(argv[1]) / "report.html")
        return
    if len(argv) != 2 or not (Path(argv[1]) / "args.json").is_file():
        from trainworthy.core.report.folder import where_runs_are

        raise UserError("report needs a run folder", got=" ".join(argv[1:]) or "nothing",
                        needed="a run's folder, one with TensorBoard's files, or a trainer_state.json",
                        next=where_runs_are(Path(argv[1]), "report") if len(argv) == 2 else "ls -d runs/*/*")  # fmt: skip
    from trainworthy.core.report import write
    from trainworthy.core.report.folder import args_of

    args_of(Path(argv[1]))
    page = write(Path(argv[1]))
    if as_json:
        from trainworthy.core.report.plain import in_short

        write_json(in_short(Path(argv[1])))
        return
    print(page)


TARGETS = {
    "resume": "a run folder",
    "predict": "a run folder and a file of prompts",
    "chat": "a run folder",
    "profile": "a recipe or a run folder",
}
"""What a command works on, if it is not a recipe."""


QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""For torch's profiler, which names missing cards and unknown memory blocks as errors."""


def assert_words(entry: Entry, argv: list[str]) -> None:
    """Raise UserError for misspelled settings and gates, before the slow import of torch."""
    from trainworthy.core.recipe import early

    if argv[0] not in OF_RECIPES or {"-h", "--help"} & {*argv}:
        return
    early.assert_settings(entry, argv[2:], page(argv[0]) + HELP, command=f"trainworthy {argv[0]} {argv[1]}")
    only = take(argv, "--only")[1] if argv[0] == "check" else None
    early.assert_gates(entry, (only or "").replace(",", " ").split())


def launch(argv: list[str]) -> None:
    """Start core.launch, through accelerate if there are several processes or a config file. Returns only from the check of
    a file with a factory."""
    if len(argv) == 1:  # before the slow import of torch
        needed = TARGETS.get(argv[0], "a recipe: an id, or the path of a fork")
        raise UserError(f"{argv[0]} what?", needed=needed, next=f"trainworthy {argv[0]} --help")
    requested = argv
    argv, given = take_number(argv, "-n")
    n = None if given is None else str(given)
    argv, file = take(argv, "--accelerate-config")
    argv, machines = nodes.take(argv)
    nodes.assert_usable(machines, argv, config_file=file)
    of_run = argv[0] == "profile" and len(argv) > 1 and Path(argv[1]).is_dir()
    if len(argv) > 1 and not argv[1].startswith("-") and argv[0] not in ("resume", "predict", "chat") and not of_run:
        entry = find(argv[1])  # reports a typo before the slow import of torch
        assert_words(entry, argv)
        if argv[0] == "check":
            from trainworthy.core.commands import factory

            if factory.offers(entry.path):
                return factory.main(argv)
    saved = processes.processes_of(Path(argv[1])) if n is None and argv[0] == "resume" and len(argv) > 1 else None
    n = n or (None if machines.wanted else saved)
    # PYTHONSAFEPATH: a folder core/ in the working directory must not shadow ours. PYTHONUTF8: files are UTF-8 under any locale.
    env = dict(os.environ, PYTHONSAFEPATH="1", PYTHONUTF8=os.environ.get("PYTHONUTF8", "1"))
    env = (QUIET | env) if argv[0] == "profile" else env
    command = [sys.executable, "-m", "trainworthy.launch", *argv]
    launcher = ["-m", "accelerate.commands.launch"]
    has_seeds = "--seeds" in {w.split("=")[0] for w in argv}
    if argv[0] in ("run", "check") and has_seeds:  # each seed starts its own launcher
        os.execve(sys.executable, [*command[:3], *requested], env)
    if file is not None:
        from trainworthy.core.session.accelerate_config import Setup

        setup = Setup(Path(file))
        n = n or setup.processes
        words = ["--config_file", file]
        if setup.machines > 1:
            print(setup.meeting_message(n), file=sys.stderr, flush=True)
    elif machines.wanted:
        here = nodes.processes_here(machines, n, saved)
        processes.set_devices(env, here)
        n = str(machines.nodes * here)
        if machines.nodes > 1:
            print(machines.meeting_message(int(n)), file=sys.stderr, flush=True)
        env |= machines.variables()
        launcher, words = machines.words(here), []
    elif n is not None and int(n) > 1:
        processes.set_devices(env, int(n))
        words = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    else:
        os.execve(sys.executable, command, env)
    if not machines.wanted:
        words += ["--num_processes", n] if n else []
        if file is None or setup.machines == 1:
            words += ["--main_process_port", "0"]  # any free port; several machines must share one
    processes.assert_memory(here if machines.wanted else int(n or 1) // (setup.machines if file else 1))
    env["TRAINWORTHY_PROCESSES"] = n or ""
    sys.exit(processes.supervise([sys.executable, *launcher, *words, *command[1:]], env))


if __name__ == "__main__":
    main()
