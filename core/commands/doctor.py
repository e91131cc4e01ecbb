"""usage: trainworthy doctor [--json]

Checks whether this machine can train, and which domains: versions, devices and who else uses them, memory, disk, cores, threads.

  trainworthy doctor           before the first run, and whenever an import fails
  trainworthy doctor --json    the same as JSON

For each domain that is not ready it prints what is missing and the command that installs it. It imports no large library, so it
answers at once; an error during a library's import is not found here.

A line that starts with ! needs your attention. Exit codes: 0 the core can run, 2 something that it needs is missing."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import textwrap
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trainworthy.core.base.as_json import write as write_json
from trainworthy.core.base.errors import DONE, USAGE, UserError
from trainworthy.core.data.assets import cache_dir
from trainworthy.core.recipe.loading import version
from trainworthy.core.recipe.registry import recipes

HOME = Path(__file__).resolve().parents[2]
# Reported if installed.
BESIDE = ("torchvision", "transformers", "trl", "peft", "diffusers", "datasets", "gymnasium", "scikit-learn")
SHM = 2**30  # bytes of shared memory below which workers' batches may not fit; containers get 64 MiB by default
DISK = 5 * 2**30  # bytes of free disk below which checkpoints soon fill it


@dataclass
class Fact:
    """One line of output: what was found and, if it matters, what it means."""

    group: str
    name: str
    value: str
    level: Literal["ok", "mind", "missing"] = "ok"
    """`missing`: the core cannot run."""
    meaning: str = ""
    next: str = ""


def main(argv: list[str]) -> None:
    if argv[1:] not in ([], ["--json"]):
        raise UserError("doctor takes no arguments but --json", got=" ".join(argv[1:]), next="trainworthy doctor")
    try:
        import packaging  # noqa: F401
        import psutil  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"the core needs '{error.name}', which is not installed", next=install("")) from None
    facts = [*packages(), *domains(), *machine()]
    fit = not any(f.level == "missing" for f in facts)
    if argv[1:]:
        write_json({"fit": fit, "facts": [asdict(f) for f in facts]})
    else:
        show(facts, fit)
    sys.exit(DONE if fit else USAGE)


def show(facts: list[Fact], fit: bool) -> None:
    """Print aligned lines of at most 80 columns."""
    width = max(len(f.name) for f in facts)
    for i, f in enumerate(facts):
        if i == 0 or f.group != facts[i - 1].group:
            print(f"{'' if i == 0 else chr(10)}{f.group}")
        mark, indent = " " if f.level == "ok" else "!", " " * (width + 4)
        print(textwrap.fill(f.value, 80, initial_indent=f"{mark} {f.name:<{width}}  ", subsequent_indent=indent))
        for text in filter(None, (f.meaning, f.next and f"next: {f.next}")):
            print(textwrap.fill(text, 80, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False))
    missing, mind = ([f.name for f in facts if f.level == level] for level in ("missing", "mind"))
    print(f"\nthe core {'can run' if fit else 'CANNOT run: ' + ', '.join(missing)}"
          + (f"; to mind: {', '.join(mind)}" if mind else ""))  # fmt: skip
    if fit:
        print("next: trainworthy list")


# -------------------------------------------------------------------------------------------------------------- packages
def packages() -> list[Fact]:
    """Return facts on Python, core's dependencies, and other libraries that affect results."""
    facts = []
    oldest, needed = declared()
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    good = SpecifierSet(oldest).contains(platform.python_version(), prereleases=True)
    where = f"{platform.python_version()} ({sys.executable})"
    facts.append(Fact("packages", "python", where, "ok" if good else "missing", "" if good else f"needed: {oldest}"))
    facts.append(Fact("packages", "trainworthy", f"{version('trainworthy') or 'not installed'} ({HOME})"))
    for requirement in map(Requirement, needed[""]):
        problem = lacking(requirement)
        found = version(requirement.name)
        if requirement.name == "torch" and found:
            tag = built_for("torch")
            found += f", built for {tag}" if tag else ""
        facts.append(Fact("packages", requirement.name, found or "not installed", "missing" if problem else "ok", problem,
                          install("") if problem else ""))  # fmt: skip
    facts += [Fact("packages", name, found) for name in BESIDE if (found := version(name))]
    return [pair(f) if f.name == "torchvision" else f for f in facts]


def pair(fact: Fact) -> Fact:
    """Add to the fact on torchvision whether its build matches the installed torch."""
    from packaging.requirements import Requirement

    torch = version("torch")
    wants = next((r for r in map(Requirement, importlib.metadata.requires(fact.name) or ()) if r.name == "torch"), None)
    tags = built_for("torch"), built_for(fact.name)
    if wants and torch and not wants.specifier.contains(torch, prereleases=True):
        wrong = f"made for torch {wants.specifier}, installed is {torch}"
    elif all(tags) and tags[0] != tags[1]:
        wrong = f"built for {tags[1]}, torch for {tags[0]}"
    else:
        return Fact(**{**asdict(fact), "value": f"{fact.value}, belongs to this torch"})
    return Fact(fact.group, fact.name, fact.value, "mind", f"{wrong}: its compiled operators are not found (\"operator "
                f"{fact.name}::nms does not exist\"), also by libraries that import it",
                f"pip install -U torch {fact.name}")  # fmt: skip


def domains() -> list[Fact]:
    from packaging.requirements import Requirement

    facts = []
    for extra, needed in declared()[1].items():
        own = ", ".join(e.id for e in recipes() if e.id.startswith(f"{extra}/"))
        if not own:
            continue
        problems = [p for r in map(Requirement, needed) if (p := lacking(r))]
        facts.append(Fact("domains", extra, own, "mind" if problems else "ok", "; ".join(problems),
                          install(extra) if problems else ""))  # fmt: skip
    return facts


def declared() -> tuple[str, dict[str, list[str]]]:
    """Return the supported versions of Python and {extra: requirements}, with "" for core's own.

    In a checkout they come from pyproject.toml, because installed metadata may be out of date; else from the metadata.
    """
    if (HOME / "pyproject.toml").is_file():
        project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
        return project["requires-python"], {"": project["dependencies"], **project["optional-dependencies"]}
    found = importlib.metadata.metadata("trainworthy")
    extras: dict[str, list[str]] = {"": [], **{e: [] for e in found.get_all("Provides-Extra", [])}}
    for line in found.get_all("Requires-Dist", []):
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"](.+?)['\"]", marker)
        extras[extra[1] if extra else ""].append(requirement.strip())
    return found["Requires-Python"], extras


def lacking(requirement) -> str:
    """Return what is wrong with an installed package, or ""."""
    found = version(requirement.name)
    if found is None:
        return f"{requirement} is not installed"
    fits = requirement.specifier.contains(found, prereleases=True)
    return "" if fits else f"{requirement} is needed, this is {found}"


def built_for(name: str) -> str:
    """Return the build tag in a wheel's version (`cu130`, `cpu`), read from its version.py without an import."""
    spec = importlib.util.find_spec(name)
    path = Path(spec.submodule_search_locations[0]) / "version.py" if spec and spec.submodule_search_locations else None
    tag = re.search(r"^__version__ = ['\"][^+'\"]+\+(\w+)", path.read_text(), re.M) if path and path.is_file() else None
    return tag[1] if tag else ""


def install(extra: str) -> str:
    """Return the command that installs a domain's packages (with "": core's own)."""
    if (HOME / "pyproject.toml").is_file():
        return f"cd {HOME} && pip install -c constraints.txt -e '.{f'[{extra}]' if extra else ''}'"
    return f"pip install 'trainworthy{f'[{extra}]' if extra else ''}'"


# --------------------------------------------------------------------------------------------------------------- machine
def machine() -> list[Fact]:
    return [*accelerators(), *processors(), *space()]


def accelerators() -> list[Fact]:
    """Return which devices the driver sees, whether this torch can use them, and which other processes use them."""
    from trainworthy.core.base.machine import gpus

    found, cuda = gpus()
    tag = built_for("torch")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not found:
        return [Fact("machine", "accelerator", "none that nvidia-smi knows: on this machine the CPU trains")]
    facts = []
    for i, gpu in enumerate(found):
        free_now = f"{gpu.name}, {size(gpu.total - gpu.used)} of {size(gpu.total)} free"
        fact = Fact("machine", f"accelerator {i}", free_now)
        if gpu.processes or gpu.used > gpu.total / 20:
            who = "; ".join(gpu.processes) or "processes outside this container"
            fact.level = "mind"
            fact.meaning = (f"shared with {who}. Timings are not yours, an out-of-memory may be another's, and what fits now may "
                            "not fit later")  # fmt: skip
            free = [j for j, g in enumerate(found) if not g.processes and g.used <= g.total / 20]
            fact.next = "wait, or ask whose they are"
            if free:
                fact.next = f"CUDA_VISIBLE_DEVICES={free[0]} trainworthy run RECIPE"
        facts.append(fact)
    driver = Fact("machine", "driver", found[0].driver + (f", up to CUDA {cuda}" if cuda else ""))
    built = re.fullmatch(r"cu(\d+)\d", tag)
    if tag == "cpu":
        driver.level, driver.meaning = "mind", "this torch is built for the CPU alone: it will not use the accelerator"
        driver.next = "install torch from an index of CUDA builds (pytorch.org/get-started)"
    elif built and cuda and int(cuda.split(".")[0]) < int(built[1]):
        driver.level = "mind"
        driver.meaning = f"torch is built for CUDA {built[1]}: with this driver it falls back to the CPU"
        driver.next = f"a newer driver, or a torch built for CUDA {cuda.split('.')[0]}"
    facts.append(driver)
    if hidden is not None:
        facts.append(Fact("machine", "visible", f"CUDA_VISIBLE_DEVICES={hidden or '(none)'}", "ok" if hidden else "mind",
                          "" if hidden else "every accelerator is hidden: the CPU trains",
                          "" if hidden else "unset CUDA_VISIBLE_DEVICES"))  # fmt: skip
    kernels = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    facts.append(Fact("machine", "determinism", f"CUBLAS_WORKSPACE_CONFIG={kernels}" if kernels else
                      "kernels may differ in the last bits: a resumed run is as close as two straight ones"))  # fmt: skip
    return facts


def processors() -> list[Fact]:
    from trainworthy.core.base.machine import cores

    c, load = cores(), os.getloadavg()[0]
    limit = "" if c.quota is None else f" (the container may use {c.quota:g})"
    fact = Fact("machine", "cores", f"{c.allowed} of {c.present} allowed{limit}, load {load:.1f}")
    if load > c.allowed / 2:
        fact.level, fact.meaning = "mind", "something else computes here: timings are not yours"
    facts = [fact]
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdigit() else c.affinity
    source = f"OMP_NUM_THREADS={given}" if given else f"OMP_NUM_THREADS is not set: torch takes {threads}"
    fact = Fact("machine", "threads", f"{source}; bitwise on the CPU at one number of threads (--run.threads)")
    if threads > c.allowed:
        fact.level = "mind"
        fact.meaning = f"{threads} threads on {c.allowed} cores wait for each other: many times slower"
        fact.next = f"export OMP_NUM_THREADS={c.allowed}, or --run.threads {c.allowed}"
    return [*facts, fact]


def space() -> list[Fact]:
    import psutil
    from trainworthy.core.base.machine import free_memory

    facts = [Fact("machine", "memory", f"{size(free_memory())} free of {size(psutil.virtual_memory().total)}")]
    if Path("/dev/shm").is_dir():
        shm = shutil.disk_usage("/dev/shm")
        room = f"{size(shm.free)} free of {size(shm.total)}: loader workers hand batches over here"
        fact = Fact("machine", "/dev/shm", room)
        if shm.free < SHM:
            fact.level, fact.meaning = "mind", "workers may die of a bus error"
            fact.next = "--loader.workers 0, or docker run --shm-size=8g"
        facts.append(fact)
    for name, folder, other in (("disk: runs", Path("runs"), "--run.out FOLDER"),
                                ("disk: cache", cache_dir(), "TRAINWORTHY_CACHE=FOLDER")):  # fmt: skip
        folder = folder.absolute()
        there = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(there).free
        fact = Fact("machine", name, f"{size(free)} free in {folder}")
        if not os.access(there, os.W_OK):
            fact.level, fact.meaning, fact.next = "mind", f"{there} cannot be written", f"choose another with {other}"
        elif free < DISK:
            fact.level, fact.meaning = "mind", "two checkpoints and the best weights must fit"
            fact.next = f"make room, or {other}"
        facts.append(fact)
    return facts


def size(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"
