"""Records where a run happens (versions, devices, source state), and checks that the launcher started the requested
processes."""

import json
import os
import platform
import socket
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.files import read_json, write_whole
from trainworthy.core.base.machine import checkout
from trainworthy.core.base.processes import gathered
from trainworthy.core.recipe.loading import Recipe, changed, sources, versions


def collect(recipe: Recipe, accelerator: Accelerator) -> dict[str, Any]:
    """Return the content of environment.json. It has no environment variables, because they can hold secrets."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "devices": gpus or ["cpu"],
        "processes": accelerator.num_processes,
        **checkout(),
        "sources": sources(recipe),
    }


def changed_sources(folder: Path) -> list[str]:
    """Return the source files that changed since the run in `folder` used them."""
    return sorted(Path(name).name for name in changed(kept(folder).get("sources", {})))


def changed_versions(folder: Path) -> str:
    """Return which packages have another version than when the run in `folder` began; empty if none."""
    now = versions()
    before = kept(folder).get("versions", now)
    names = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    return ", ".join(f"{k} {before.get(k, 'none')} -> {now.get(k, 'none')}" for k in names)


def kept(folder: Path) -> dict[str, Any]:
    """Return environment.json of a run folder; empty if it is missing or no such file."""
    found = read_json(folder / "environment.json")
    return found if isinstance(found.get("sources"), dict) else {}


def note_sources(folder: Path, recipe: Recipe, late: dict[str, str]) -> None:
    """Add to environment.json the sources imported since it was written, and `late`, those that a remembered verdict
    had imported."""
    path = folder / "environment.json"
    found = kept(folder) or {"versions": versions(), "sources": {}}
    home = recipe.entry.path.parent
    more = {str((home / name).resolve()): mark for name, mark in late.items()} | sources(recipe)
    if not more.keys() <= found["sources"].keys():
        found["sources"] = more | found["sources"]
        write_whole(path, json.dumps(found, indent=1))


def assert_shared(folder: Path, accelerator: Accelerator) -> None:
    """Check that every process sees rank 0's run folder: all ranks read checkpoints and exchange files of gates
    there."""
    if accelerator.num_processes == 1:
        return
    every = gathered(accelerator, (folder.is_dir(), socket.gethostname(), str(folder.absolute())))
    unreachable = [f"rank {i} on {host}: no {path}" for i, (sees, host, path) in enumerate(every) if not sees]
    if unreachable:
        raise UserError("the run folder is not shared by all machines", got="; ".join(unreachable[:4]),
                        needed=f"one folder that every process sees under one path; rank 0 made {every[0][2]} on {every[0][1]}",
                        cause="machines with disks of their own, or commands that were started in different folders",
                        next="--run.out /a/shared/folder, the same on every machine")  # fmt: skip


def assert_processes(got: int) -> None:
    """Check that the number of processes is the requested one.

    `accelerate launch --cpu --num_processes 2` and MULTI_CPU configs start one process without a warning.
    """
    needed = os.environ.get("TRAINWORTHY_PROCESSES") or _processes_of_accelerate()
    if needed and int(needed) != got:
        if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:  # torchrun's number of machines
            raise UserError(
                "the machines were not started with the same number of processes", got=f"{got} process(es) on all machines",
                needed=f"{needed} by the command of this machine", cause="another -n on another machine",
                next="the same -n, for the processes of each machine, on every machine",
            )  # fmt: skip
        raise UserError(
            "the launcher did not start as many processes as requested", got=f"{got} process(es)", needed=needed,
            cause="accelerate's --cpu and MULTI_CPU run one process; --multi_gpu on CPU needs ACCELERATE_USE_CPU=true",
            next=f"trainworthy run RECIPE -n {needed}",
        )  # fmt: skip


def _processes_of_accelerate() -> str | None:
    """Return `--num_processes` from the command line of a parent `accelerate launch`."""
    if "LOCAL_RANK" in os.environ:
        return None  # a real distributed start: torch's launcher sets the number
    try:
        words = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return None
    if not any(Path(word).name == "accelerate" for word in words[:3]):
        return None
    return config.take([w.replace("--num_processes", "--num-processes", 1) for w in words], "--num-processes")[1]
