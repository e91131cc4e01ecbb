"""Resources that this process may use: cores, memory, accelerators. Reads the system without importing torch."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from trainworthy.core.base import masking

GROUPS = Path("/proc/self/cgroup")
DIFF = 50_000
"""Characters of uncommitted changes that environment.json keeps."""
DEVICES = {
    "H200": (141, 989e12, 67e12),
    "H100": (80, 989e12, 67e12),
    "A100": (80, 312e12, 19.5e12),
    "L40S": (48, 362e12, 91.6e12),
    "A10G": (24, 70e12, 35e12),
    "L4": (24, 121e12, 30.3e12),
    "RTX4090": (24, 165e12, 82.6e12),
}
"""GB, and dense FLOP/s in bf16 and in fp32 without TF32, from the makers' data sheets."""


@dataclass
class Cores:
    present: int
    affinity: int
    """Cores on which the scheduler may put this process."""
    quota: float | None
    """CPU time limit of the control group, in cores."""

    @property
    def allowed(self) -> int:
        """Number of cores that can work at once."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))


@dataclass
class Gpu:
    """One accelerator, as reported by the driver's own tool; memory in bytes."""

    name: str
    driver: str
    total: int
    used: int
    processes: list[str] = field(default_factory=list)
    """`pid name, memory` of each process that uses it."""


def cores() -> Cores:
    """Count the cores present, and those allowed by affinity and control group."""
    present = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if sys.platform == "linux" else present
    quotas = [int(q) / int(p) for q, p in map(str.split, _limits("cpu", "cpu.max")) if q != "max"]
    periods = [int(p) for p in _limits("cpu", "cpu.cfs_period_us")]
    quotas += [int(q) / p for q, p in zip(_limits("cpu", "cpu.cfs_quota_us"), periods, strict=True) if int(q) > 0]
    return Cores(present, affinity, min(quotas, default=None))


def free_memory() -> int:
    """Return the bytes that this process could still allocate: the system's available memory, within every control
    group's limit."""
    free = [psutil.virtual_memory().available]
    for limit, used, detail in (("memory.max", "memory.current", "inactive_file"),
                                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):  # fmt: skip
        rows = zip(_limits("memory", limit), _limits("memory", used), _limits("memory", "memory.stat"), strict=False)
        for most, now, stat in rows:
            if most != "max":
                cached = re.search(rf"^{detail} (\d+)", stat, re.M)  # the kernel frees the cache on demand
                free.append(int(most) - int(now) + (int(cached[1]) if cached else 0))
    return max(0, min(free))


def _limits(controller: str, name: str) -> Iterator[str]:
    """Yield the file `name` of this process's control group and of those above it (versions 1 and 2)."""
    for line in GROUPS.read_text().splitlines() if GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = Path("/sys/fs/cgroup") / controllers
            here = root / path.lstrip("/")
            for folder in (here, *(p for p in here.parents if p == root or root in p.parents)):
                if (folder / name).is_file():
                    yield (folder / name).read_text().strip()


def gpus() -> tuple[list[Gpu], str]:
    """Return the accelerators with their processes, and the newest CUDA version of the driver; ([], "") without
    nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return [], ""
    found = {}
    for uuid, name, driver, total, used in _ask("--query-gpu=uuid,name,driver_version,memory.total,memory.used"):
        of_all, in_use = (int(float(x) * 2**20) if x[:1].isdigit() else 0 for x in (total, used))
        found[uuid] = Gpu(name, driver, of_all, in_use)
    for uuid, pid, used, name in _ask("--query-compute-apps=gpu_uuid,pid,used_memory,process_name"):
        if uuid in found:
            found[uuid].processes.append(f"{pid} {Path(name).name}, {used} MiB")
    version = re.search(r"CUDA Version: *([\d.]+)", _smi()) if found else None
    return list(found.values()), version[1] if version else ""


def _ask(query: str) -> list[list[str]]:
    lines = _smi(query, "--format=csv,noheader,nounits").splitlines()
    return [[cell.strip() for cell in line.split(",")] for line in lines if line.count(",") == query.count(",")]


def _smi(*words: str) -> str:
    """Return nvidia-smi's output; empty if it fails (a machine with the tool but no driver)."""
    return _output("nvidia-smi", *words, seconds=10) or ""


def git(folder: Path, *words: str) -> str | None:
    """Return the output of a git command; None if it fails, or if this machine has no git."""
    return _output("git", "-C", str(folder), *words)


def _output(*command: str, seconds: float | None = None) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def checkout() -> dict[str, str]:
    """Return the commit of this checkout and its uncommitted changes of core/ and recipes/, without secrets; both empty elsewhere."""
    home = Path(__file__).resolve().parents[2]
    diff = (git(home, "diff", "HEAD", "--", "core", "recipes") or "").strip()
    return {"commit": (git(home, "rev-parse", "HEAD") or "").strip(), "diff": masking.source(diff)[:DIFF]}
