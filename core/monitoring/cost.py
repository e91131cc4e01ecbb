"""What a run costs: device-hours, peak memory, and energy where the machine counts it. Kept in cost.json of the run folder."""

import contextlib
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from trainworthy.core.base.files import read_json, write_whole

NAME = "cost.json"
RAPL = Path("/sys/class/powercap")
PAUSE = 5.0
"""Seconds between two writes of a running process: after a kill, at most this much is missing."""


class Meter:
    """Counts from its creation. Every process of a run (the first one, each resumed one) has a row of its own in the file."""

    def __init__(self, folder: Path, device: Any, devices: int):
        self.path, self.device, self.devices = Path(folder) / NAME, device, max(1, devices)
        self.begun, self.noted = time.monotonic(), 0.0
        self.before = [row for row in read_json(self.path, list) if isinstance(row, dict)]
        self.joules = Joules(device)

    def note(self, *, now: bool = False) -> None:
        """Write what this process has used so far, at most every few seconds."""
        seconds = time.monotonic() - self.begun
        if not now and seconds - self.noted < PAUSE:
            return
        self.noted = seconds
        row = {"device": self.joules.name, "devices": self.devices, "seconds": round(seconds, 2), "peak_memory": peak(self.device),
               "joules": self.joules.used(), "counted": self.joules.counted}  # fmt: skip
        with contextlib.suppress(OSError):  # a full disk ends a run with its own message
            write_whole(self.path, json.dumps([*self.before, row], indent=1))


class Joules:
    """The energy counters of what computes: NVIDIA's of each card, Intel's and AMD's of each processor (often readable for root only)."""

    def __init__(self, device: Any):
        self.name, self.counted, self._reads = _name(device), "", []
        with contextlib.suppress(Exception):  # no library, no right to read, a card without a counter: no energy
            self._reads = _cards() if device.type == "cuda" else _processors()
            self._start = [read() for read, _ in self._reads]
            self.counted = "" if not self._reads else "whole cards" if device.type == "cuda" else "whole processors"

    def used(self) -> float | None:
        """Since the start, of everything that ran on them; None where nothing can be read."""
        if not self._reads or not self.counted:
            return None
        pairs = zip(self._reads, self._start, strict=True)
        try:
            return round(sum((read() - since) % wrap for (read, wrap), since in pairs), 1)
        except (OSError, ValueError):
            return None


def _name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _cards() -> list[tuple[Any, float]]:
    """(joules so far, where the counter begins again) of each card that this machine's processes of the run use."""
    import torch

    library = ctypes.CDLL("libnvidia-ml.so.1")
    if library.nvmlInit_v2():
        return []
    local, found = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), []
    first = torch.cuda.current_device() if local == 1 else 0
    for index in range(first, first + local):
        handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode()
        if library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) or library.nvmlDeviceGetTotalEnergyConsumption(
            handle, ctypes.byref(millijoules)
        ):
            return []

        def read(handle: Any = handle, value: Any = millijoules) -> float:
            if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value)):
                raise OSError("the card's energy counter cannot be read any more")
            return value.value / 1e3

        found.append((read, float("inf")))
    return found


def _processors() -> list[tuple[Any, float]]:
    """The same of each processor package."""
    found = []
    for zone in sorted(RAPL.glob("intel-rapl:[0-9]*")):
        if zone.name.count(":") == 1:
            wrap = int((zone / "max_energy_range_uj").read_text()) / 1e6
            found.append((lambda path=zone / "energy_uj": int(path.read_text()) / 1e6, wrap))
    return found


def peak(device: Any) -> int | None:
    """Most bytes that this process had at once: allocated on its card, or resident in main memory."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


# -------------------------------------------------------------------------------------------------------------- reading
def of_run(folder: Path) -> dict[str, Any]:
    """Cost of a run over all its processes; {} where none is known (a run of another version, a foreign folder)."""
    found = read_json(Path(folder) / NAME, list)
    rows = [r for r in found if isinstance(r, dict) and isinstance(r.get("seconds"), (int, float))]
    if not rows:
        return {}
    return _total([{**r, "device_hours": r["seconds"] * (r.get("devices") or 1) / 3600} for r in rows])


def together(costs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs: sums, and the highest of their peaks. {} unless all are known."""
    return _total(costs) if costs and all(costs) else {}


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    joules = [r.get("joules") for r in rows]
    return {
        "device": ", ".join(dict.fromkeys(str(r.get("device", "?")) for r in rows)),
        "devices": max(r.get("devices") or 1 for r in rows),
        "seconds": sum(r["seconds"] for r in rows),
        "device_hours": sum(r["device_hours"] for r in rows),
        "peak_memory": max((r["peak_memory"] for r in rows if r.get("peak_memory")), default=None),
        "joules": sum(joules) if all(isinstance(j, (int, float)) for j in joules) else None,
        "counted": next((r["counted"] for r in rows if r.get("counted")), ""),
    }


def words(cost: dict[str, Any]) -> str:
    """0.021 device-hours (NVIDIA H200), peak memory 1.2 GiB, 13 Wh (whole cards)"""
    if not cost:
        return ""
    hours = cost["device_hours"]
    text = f"{hours:.3g} device-hours" if hours >= 0.01 else f"{hours * 3600:.0f} device-seconds"
    text += f" ({cost['device']})"
    if cost["peak_memory"]:
        text += f", peak memory {cost['peak_memory'] / 2**30:.2f} GiB"
    if cost["joules"] is not None:
        text += f", {cost['joules'] / 3600:.3g} Wh ({cost['counted']})"
    return text
