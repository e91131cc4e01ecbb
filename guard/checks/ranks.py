"""Several processes of one rehearsal: forks the ranks, ends them together, and compares what they did.

Rank 0 is the rehearsal's own process and has its folder; rank i writes to `rank<i>` in it. Only rank 0 decides when a
pass is cut and when the rehearsal ends.
"""

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch
from trainworthy.guard.checks.results import finding, skip
from trainworthy.guard.observing.observer import Observer

GRACE = 1.0  # seconds until a rank ends after another one raised
JOIN = 6.0  # seconds that rank 0 waits for the records of the others


def environment(count: int) -> dict[str, str]:
    """Variables that `torchrun --nproc_per_node COUNT` would set, without the rank."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    found = {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "guard",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    if torch.cuda.device_count() < count:
        found["ACCELERATE_USE_CPU"] = "true"
    return found


def spread(one: Any, count: int, *, launched: bool) -> int:
    """Fork the other ranks of the rehearsal `one`; return this process's rank. `launched`: set the variables that a
    launcher would."""
    home, own, children = one.folder, 0, {}
    if launched:
        os.environ.update(environment(count))
    for rank in range(1, count):
        (home / f"rank{rank}").mkdir(exist_ok=True)
        pid = os.fork()
        if not pid:
            own, children = rank, {}
            out = os.open(home / f"rank{rank}" / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(out, 1), os.dup2(out, 2)
            one.folder, one.process = home / f"rank{rank}", os.getpid()
            break
        children[rank] = pid
    if launched:
        os.environ.update(RANK=str(own), LOCAL_RANK=str(own), ROLE_RANK=str(own))
    one.rank, one.home, one.count = own, home, count
    one.control.rank, one.control.home, one.seen.ranks = own, home, count
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    threading.Thread(target=_watch, args=(one, children), daemon=True).start()
    return own


def _record(home: Path, rank: int) -> Path:
    return (home / f"rank{rank}" if rank else home) / "record.json"


def _watch(one: Any, children: dict[int, int]) -> None:
    """End this rank once another one has raised (rank 0), or once rank 0 has ended (the others)."""
    while not one.done:
        time.sleep(0.1)
        for rank, pid in list(children.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del children[rank]
                if not _record(one.home, rank).exists():
                    code = os.waitstatus_to_exitcode(status)
                    text = {"why": "it raised", "raised": f"its process ended (exit code {code})", "at": time.time()}
                    one.write(_record(one.home, rank), text)
        if one.rank and _record(one.home, 0).exists():
            one.stop("rank 0 ended")
        if not one.rank and any(_load(one.home, rank).get("why") == "it raised" for rank in range(1, one.count)):
            time.sleep(GRACE)
            one.stop("another rank ended")


def join(one: Any) -> None:
    """Wait until every rank has written its record."""
    limit = time.monotonic() + JOIN
    while time.monotonic() < limit and not all(_record(one.home, rank).exists() for rank in range(one.count)):
        time.sleep(0.05)


def _load(home: Path, rank: int) -> dict[str, Any]:
    path = _record(home, rank)
    return json.loads(path.read_text()) if path.exists() else {}


def merged(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's record with those of the other ranks below `ranks`. A rank that raised first is the rehearsal's end."""
    count = sum(1 for p in folder.glob("rank*") if p.is_dir()) + 1
    if count == 1 or not record:
        return record
    every = [record] + [_load(folder, rank) for rank in range(1, count)]
    dated = [(r["at"], rank) for rank, r in enumerate(every) if r]
    first = min(dated)[1]
    record = {**record, "ranks": every[1:]}
    if every[first]["why"] == "it raised":
        keys = ("why", "raised", "where")
        record |= {k: every[first].get(k) for k in keys} | {"rank": first}
    elif record["why"] == "it raised":  # it lost the connection to a rank that ended
        record |= {"why": "another rank ended"}
    return record


# --- what each rank did


def facts(seen: Observer) -> dict[str, Any]:
    """Return what `check` compares between ranks."""
    prints = [x for p in seen.passes if p.training for x in p.prints]
    return {"trace": seen.trace, "prints": (prints or seen.batch_prints)[:32], "nonfinite": seen.nonfinite[:3]}


def check(record: dict[str, Any]) -> dict:
    """Check that all ranks hold the same weights and train on different batches."""
    every = [record, *record["ranks"]]
    found = [r.get("between") or {} for r in every]
    traces = [f.get("trace") or [] for f in found]
    steps = min(len(t) for t in traces)
    if any(None in t for t in traces):
        return skip("ranks", "each rank holds a part of the weights (sharded)")
    if steps < 4:
        return skip("ranks", f"only {max(0, steps - 1)} optimiser steps were seen on every rank")
    wrong, causes = [], []
    differences = [max(difference(traces[0][s], t[s]) for t in traces[1:]) for s in range(steps)]
    off = [s for s, d in enumerate(differences) if d > 1e-6]
    if off and off[-1] == steps - 1 and off == list(range(off[0], steps)) and len(off) >= 3:
        if off[0] == 0:
            wrong.append("the ranks start from different weights, and never hold the same ones")
            causes.append("the model is not wrapped in DistributedDataParallel, or not prepared by accelerate")
        else:
            wrong.append(
                f"from step {off[0]} on the ranks hold different weights (relative difference {differences[-1]:.2g})"
            )
            causes.append(
                "gradients are not averaged over the ranks: the bare model (model.module, or the one from before DDP) is "
                "called, backward() always runs in no_sync(), or weights change outside DDP"
            )
    same = [shared(found[0].get("prints") or [], f.get("prints") or []) for f in found[1:]]
    if same and max(same) >= 0.5:
        wrong.append(f"{max(same):.0%} of the batches are the same on two ranks")
        causes.append(
            "DistributedSampler is missing (or the stream is not split by rank): every rank trains on the same data"
        )
    bad = [rank for rank, f in enumerate(found) if rank and f.get("nonfinite")]
    if bad:
        wrong.append(f"the loss is not finite on rank {bad[0]}")
        causes.append("this rank's part of the data: a logarithm or root of zero, a division by an empty count")
    measured = f"{len(every)} ranks hold the same weights after {steps - 1} steps, and train on different batches"
    return finding("ranks", "; ".join(wrong) or measured, "\n".join(causes), difference=differences)


def difference(a: list[list[float]], b: list[list[float]]) -> float:
    """Return the largest relative difference of two lists of weights."""
    worst = 0.0
    for x, y in zip(a, b, strict=False):
        size = max((abs(v) for v in (*x, *y)), default=0.0)
        if size and len(x) == len(y):
            worst = max(worst, max(abs(v - w) for v, w in zip(x, y, strict=True)) / size)
    return worst


def shared(a: list[int], b: list[int]) -> float:
    """Return the fraction of the first batches that two ranks have in common."""
    n = min(len(a), len(b), 16)
    return len(set(a[:n]) & set(b[:n])) / n if n >= 4 else 0.0
