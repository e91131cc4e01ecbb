"""What limits the speed of a step: its time split by kinds of work, the verdict, and the settings to try first."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

SMALL = 20e-6
"""Seconds below which the mean call of an operation is mostly its own overhead."""
PRODUCTS = ("mm", "conv", "attention", "linear", "gemm", "cutlass", "flash", "einsum", "_lstm", "_gru")
EXCHANGE = ("c10d", "nccl", "gloo", "all_reduce", "allreduce", "all_gather", "allgather", "broadcast_")


@dataclass
class Operation:
    """All calls of one operation in the profiled steps."""

    name: str
    calls: int
    seconds: float
    """On the device that computes, without the operations inside it."""

    @property
    def kind(self) -> str:
        name = self.name.lower()
        if any(w in name for w in EXCHANGE):
            return "communication"
        if self.seconds / max(1, self.calls) < SMALL:
            return "overhead"
        return "compute" if any(w in name for w in PRODUCTS) else "memory"


@dataclass
class Measured:
    """Times of the profiled steps."""

    step: float
    """Seconds of one step, without the profiler."""
    waited: float
    """Of these, seconds spent waiting for data."""
    operations: list[Operation]
    steps: int
    """Number of profiled steps, which `operations` covers."""
    device: str = "cpu"
    flops: float = 0.0
    """Of the products and convolutions of one step, forward and backward, on this process's device."""
    attainable: float = 0.0
    """FLOP/s of one large product on this device, in the type that this run computes in."""
    peak_memory: int | None = None
    idle: float | None = None
    """Share of a profiled step in which the device runs no operation. On a CPU: the training thread."""
    modules: list[tuple[str, float]] = field(default_factory=list)
    """(module, seconds in the profiled steps, forward and backward), the largest first."""
    shares: dict[str, float] = field(default_factory=dict)
    profiled: float = 0.0
    """Seconds of one step under the profiler, which slows small operations down."""

    def split(self) -> dict[str, float]:
        """Shares of a step by what limits it; together 1. Times under the profiler are shares of the profiled step."""
        step = max(self.profiled or self.step, 1e-12)
        found = dict.fromkeys(("input", "compute", "memory", "communication"), 0.0)
        for one in self.operations:
            if one.kind != "overhead":
                found[one.kind] += one.seconds / max(1, self.steps) / step
        found["input"] = min(1.0, self.waited / max(self.step, 1e-12))
        busy = sum(v for k, v in found.items() if k != "input")
        room = 1.0 - found["input"]
        if busy > room:  # data that are made in this process are operations, too
            for k in ("compute", "memory", "communication"):
                found[k] *= room / busy
        found["overhead"] = max(0.0, 1.0 - sum(found.values()))
        self.shares = found
        return found


@dataclass
class Settings:
    """Settings on which the advice depends: what is already set is not advised."""

    workers: int = 0
    accumulate: int = 1
    compile: bool = False
    precision: str = "fp32"
    num_envs: int = 0
    """Number of environments; 0 for a recipe without any."""
    own_samples: bool = False
    """Whether the loop makes its own samples, so nothing is loaded."""


def to_try(kind: str, s: Settings, device: str) -> str:
    """Return settings that may help against the limit `kind`, the likeliest first."""
    half = ["--train.precision bf16"] if s.precision == "fp32" and device != "cpu" else []
    fuse = [] if s.compile else ["--train.compile"]
    batch = ["a larger --train.batch-size"]
    if kind == "input":
        found = [f"--loader.workers {max(2, 2 * s.workers)} (now {s.workers}; for samples that are expensive to make)"]
        found += ["--loader.threads 8 (for files on a slow disk)", "smaller or already decoded files"]
    elif kind == "compute":
        busy = "a faster device or more of them (-n): this one is busy with useful work"
        found = [*half, *fuse, "a smaller model", busy]
    elif kind == "memory":
        found = (
            [f"{w} (fuses neighbouring operations)" for w in fuse] + [f"{w} (half the traffic)" for w in half] + batch
        )
    elif kind == "communication":
        found = ["a larger --train.batch-size for each process", "fewer processes (-n)",
                 "a faster connection between them"]  # fmt: skip
    else:
        envs = [f"--num-envs {2 * s.num_envs} (now {s.num_envs}: more samples for each call of the policy)"]
        fewer = [f"a smaller --train.accumulate (now {s.accumulate})"] if s.accumulate > 1 else []
        found = [*(envs if s.num_envs else []), *batch, *fewer, *fuse]
        if not s.own_samples:
            found.append("`trainworthy batch` shows at which size the speed stops growing")
    return "; ".join(found)


def find_bottleneck(m: Measured, settings: Settings | None = None) -> dict[str, Any]:
    """Return the verdict: the largest share of a step, the settings to try first, and the largest possible gain."""
    shares = m.split()
    kind = max(shares, key=lambda name: shares[name])
    share = shares[kind]
    words = {"input": "waiting for data", "compute": "large products and convolutions", "memory": "moving data in memory",
             "overhead": "starting small operations, Python, and an idle device", "communication": "exchange between processes"}  # fmt: skip
    most = f"at most {1 / (1 - share):.1f} times as fast" if share < 0.99 else "many times as fast"
    most += ", if that share took no time"
    return {
        "verdict": f"{kind}-bound",
        "share": share,
        "words": f"{share:.0%} of a step is {words[kind]}",
        "try": to_try(kind, settings or Settings(), m.device),
        "most": most,
    }


def exchange_on_cpu(events: Iterable[Any]) -> Operation | None:
    """Return the exchange between processes that no computation hides, from the events of torch's profiler; None if there was none. gloo
    works in threads of its own, so the calling operations end long before their exchange does."""
    exchanged, computed = [], []
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if event.is_async and event.name.startswith("gloo:"):
            exchanged.append(span)
        elif event.name.startswith("aten::"):
            computed.append(span)
    if not exchanged:
        return None
    both = _length(_union([*exchanged, *computed])) - _length(_union(computed))
    return Operation("gloo: exchange that no computation hides", len(exchanged), both / 1e6)


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
