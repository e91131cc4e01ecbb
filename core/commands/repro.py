"""usage: trainworthy repro RUN_FOLDER [--no-data] [--diff] [--json]

Shows versions, settings and data of a run, and what differs on this machine.

  trainworthy repro runs/vision-classify/20260101-120000-ab12          the command, and everything that differs here
  trainworthy repro runs/vision-classify/20260101-120000-ab12 --diff > its.patch    the changes it had over its commit
  trainworthy repro runs/vision-classify/20260101-120000-ab12 --no-data    without reading the data again

Compared are: versions of Python and libraries, devices, processes, the commit and its uncommitted changes, every source file of the
recipe and of the core, the settings, and the content of the data (read as far as the run did). Then the command that starts the run
again, from its args.json, and what to do first. `--json` prints the same as JSON. Nothing is changed. Exit codes: 0, whatever
differs; 2 if the folder is no run folder."""

import os
import platform
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainworthy.core.base import config
from trainworthy.core.base.as_json import write as write_json
from trainworthy.core.base.errors import Stop, UserError
from trainworthy.core.base.machine import DIFF, checkout
from trainworthy.core.recipe import loading


@dataclass
class Compared:
    """One thing of a run against the same thing here."""

    what: str
    then: str
    differs: list[str] = field(default_factory=list)
    unknown: str = ""
    """Why it could not be compared."""


def main(argv: list[str]) -> None:
    flags = {w for w in argv[1:] if w.startswith("-")}
    names = [w for w in argv[1:] if not w.startswith("-")]
    if unknown := sorted(flags - {"--no-data", "--diff", "--json"}):
        needed = "--no-data, --diff or --json"
        raise UserError(f"repro has no {unknown[0]}", needed=needed, next="trainworthy repro --help")
    if len(names) != 1:
        raise UserError("repro needs one run folder", got=" ".join(names) or "nothing", next="ls -d runs/*/*")
    folder = Path(names[0])
    args, environment, data = kept(folder)
    if "--diff" in flags:
        show_diff(folder, environment)
        return
    found = [*environment_of(environment, args), sources_of(environment), settings_of(folder, args)]
    found.append(data_of(folder, args, data, read="--no-data" not in flags))
    command = again(folder, args)
    if "--json" in flags:
        commit, compared = environment.get("commit", ""), [vars(c) for c in found]
        write_json({"run": str(folder), "command": command, "commit": commit, "compared": compared})
        return
    show(folder, args, environment, found, command)


def kept(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """args.json, environment.json and data.json. UserError: it is not a run folder of ours; later files may be missing."""
    from trainworthy.core.report.folder import args_of, read_json

    if (folder / "seeds.json").is_file():
        needed = "the folder of one of them"
        raise UserError(f"{folder} is a group of seeds", needed=needed, next=f"ls -d {folder}/seed-*")
    args = args_of(folder, argv=list, settings=dict)
    return args, read_json(folder / "environment.json"), read_json(folder / "data.json")


def show_diff(folder: Path, environment: dict[str, Any]) -> None:
    """The uncommitted changes that the run had, as a patch."""
    diff = str(environment.get("diff", ""))
    if not environment.get("commit"):
        cause = "it did not run from a checkout: its versions say what it was made of"
        raise UserError(f"{folder} names no commit", cause=cause)
    if len(diff) >= DIFF:
        print(f"cut off at {DIFF:,} characters: this patch is not whole", file=sys.stderr)
    print(diff)


# ------------------------------------------------------------------------------------------------------------ comparing
def environment_of(then: dict[str, Any], args: dict[str, Any]) -> list[Compared]:
    if not then:
        return [Compared("environment", "", unknown="environment.json is missing or cut off")]
    import torch

    now, before = loading.versions(), dict(then.get("versions") or {})
    names = [n for n in sorted(before.keys() | now.keys()) if now.get(n) != before.get(n)]
    other = [f"{n} {now.get(n, 'not installed')} instead of {before.get(n, 'none')}" for n in names]
    found = [Compared("versions", ", ".join(f"{k} {v}" for k, v in before.items()), other)]
    # A run with this setting sets it by itself
    threads = ((args.get("settings") or {}).get("run") or {}).get("threads")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"]
    here = {"devices": devices, "platform": platform.platform(), "threads": threads or torch.get_num_threads()}
    other = [f"{k}: {here[k]} instead of {then[k]}" for k in here if k in then and here[k] != then[k]]
    recorded = f"{then.get('devices')}, {then.get('platform')}, {args.get('processes', 1)} process(es), {then.get('threads')} threads"
    found.append(Compared("machine", recorded, other))
    commit, mine = str(then.get("commit", "")), checkout()
    own = mine["commit"]
    if not commit or not own:
        found.append(Compared("commit", commit, unknown=f"no commit {'in the run folder' if not commit else 'here'}"))
        return found
    other = [f"commit {own[:12]} here"] if own != commit else []
    if (then.get("diff") or "") != mine["diff"]:
        other.append("other uncommitted changes than the run had (--diff shows those of the run)")
    changed = f" with {then['diff'].count(chr(10) + 'diff --git') + 1} changed file(s)" if then.get("diff") else ""
    found.append(Compared("commit", f"{commit[:12]}{changed}", other))
    return found


def sources_of(then: dict[str, Any]) -> Compared:
    """Compare the files that the run imported, by content."""
    before = then.get("sources") or {}
    if not before:
        return Compared("sources", "", unknown="environment.json holds none")
    lost = loading.changed(before)
    words = [f"{name}: {'changed' if os.path.exists(name) else 'not there'}" for name in lost]
    more = [f"... and {len(words) - 8} more"] if len(words) > 8 else []
    return Compared("sources", f"{len(before)} files", words[:8] + more)


def settings_of(folder: Path, args: dict[str, Any]) -> Compared:
    """Compare settings: the recipe here must accept them, and the preset must be the same."""
    words = [str(w) for w in args["argv"][1:]]
    then = " ".join(words) or "the preset's"
    try:
        loaded = loading.load(args["recipe"])
        config.read_args(folder / "args.json", loaded.module.Config)
    except Stop as stop:
        first, *more = str(stop).splitlines()
        return Compared("settings", then, ["; ".join([first, *(" ".join(m.split()) for m in more[:2])])])
    try:
        plain, _ = config.parse(loaded.module, words, prog="repro")
    except (Stop, SystemExit):  # a secret, a file that is gone: args.json has what it came to
        return Compared("settings", then, unknown="its command line cannot be read here")
    now, before = config.flat(config.to_dict(plain)), config.flat(args["settings"])
    own = ("run.out", "train.precision")  # where it is written; what the launcher decided
    other = [k for k in before if k in now and now[k] != before[k] and k not in own]
    return Compared("settings", then, [f"{k} is {now[k]} today, was {before[k]}" for k in other])


def data_of(folder: Path, args: dict[str, Any], data: dict[str, Any], *, read: bool) -> Compared:
    """Compare the data of the first stage, read as far as the run read them."""
    before = data.get("identity")
    before = before.get("none") if isinstance(before, dict) else None
    if not before:
        return Compared("data", "", unknown="data.json is missing, or of a version that kept no fingerprint")
    splits = [f"{k}: {s.get('samples', 0):,} samples, {str(s.get('content', ''))[:12]}" for k, s in before.items()]
    then = "; ".join(splits)
    if not read:
        return Compared("data", then, unknown="not read (--no-data)")
    from accelerate import Accelerator
    from trainworthy.core.data import contents, inventory
    from trainworthy.core.session import stages

    try:
        loaded = loading.load(args["recipe"])
        cfg = config.read_args(folder / "args.json", loaded.module.Config)
        stage = stages.specs(loaded, cfg)[0].untrained(Accelerator(cpu=True))
        now = inventory.identity(inventory.read_all(stage.data, before=before))
        return Compared("data", then, contents.changes(before, now))
    except (Stop, OSError, ValueError, KeyError, TypeError) as error:
        why = str(error).splitlines()[0] if str(error) else repr(error)
        return Compared("data", then, unknown=f"cannot be read here: {why}")


# -------------------------------------------------------------------------------------------------------------- output
def again(folder: Path, args: dict[str, Any]) -> str:
    """Return the command that starts the run again. If the fork is gone, it uses the copy in the run folder."""
    recipe = args["recipe"]
    if recipe.endswith(".py") and not Path(recipe).is_file() and (folder / "recipe.py").is_file():
        recipe = str(folder / "recipe.py")
    words = ["trainworthy", "run", recipe, "--config", str(folder / "args.json")]
    several = args.get("processes", 1)
    return shlex.join(words + (["-n", str(several)] if isinstance(several, int) and several > 1 else []))


def show(folder: Path, args: dict[str, Any], environment: dict[str, Any], found: list[Compared], command: str) -> None:
    print(f"{folder}\n  started by   {shlex.join(['trainworthy', 'run', *map(str, args['argv'])])}")
    for one in found:
        result = f"not compared: {one.unknown}" if one.unknown else "DIFFERS" if one.differs else "the same here"
        print(f"  {one.what:<12} {one.then or '-'}\n               {result}")
        for line in one.differs:
            print(f"                 {line}")
    differ = [c.what for c in found if c.differs]
    unknown = [c.what for c in found if c.unknown]
    print(f"\nresult {'differs here: ' + ', '.join(differ) if differ else 'nothing that was compared differs'}"
          + (f"; not compared: {', '.join(unknown)}" if unknown else ""))  # fmt: skip
    if "commit" in differ:
        patch = f" && trainworthy repro {shlex.quote(str(folder))} --diff | git apply" * bool(environment.get("diff"))
        print(f"first  git checkout {environment['commit'][:12]}{patch}")
    if "versions" in differ:
        lines = next(c.differs for c in found if c.what == "versions")
        before = {k: v for k, v in environment["versions"].items() if k != "python"}
        wanted = [f"{k}=={v}" for k, v in before.items() if any(line.startswith(f"{k} ") for line in lines)]
        print(f"first  pip install {' '.join(shlex.quote(w) for w in wanted)}" if wanted else "first  another Python")
    print(f"next   {command}")
