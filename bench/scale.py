"""What several processes cost: ours and plain torch, DDP and FSDP2, the same model on 1, 2 and 4 gloo processes of one CPU.

    python bench/scale.py [--processes 1 2 4] [--rounds N] [--steps N] [--json FILE]

Every loop trains the same transformer on batches of the same size with AdamW(fused=True) and clipping at 1. Plain loops are DDP, or
`fully_shard` over each block and the model, with `clip_grad_norm_` and the loss read each step. They cut their batches from one tensor.
Ours are `Run.update`, as a recipe's `train` uses it: samples read one by one and collated, loss and gradient norm over all processes,
finite check, rate, a row of metrics for each step. Each round runs every loop once, in shuffled order. A loop is compared with the plain
one OF ITS OWN ROUND. Printed for each loop: CPU milliseconds per step over all processes (median), the ratio to plain torch (median,
least, most), wall milliseconds per step (median), and the bytes of parameters, gradients and moments that the fullest process holds
between two steps.

Wall times mean something only on a machine with a free core for each process. CPU times count the copies of gloo, too.
"""

import argparse
import json
import os
import random
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from trainworthy.core.base.config import Loader, Optim, RunSettings, Train
from trainworthy.core.base.dtensor import local
from trainworthy.core.gates.gate import build
from trainworthy.core.monitoring.metrics import MetricsTracker

from trainworthy import core

WIDTH, LAYERS, WORDS, LENGTH, BATCH, WARM = 128, 4, 256, 64, 16, 3
OPTIM = Optim(lr=1e-4, weight_decay=0.0, schedule="constant", warmup=0.0, clip=1.0)


class Net(nn.Module):
    """(B, T) words -> (B, T, words) logits."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)]
        self.blocks, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(words)))


class Words(core.Data):
    """Rows of random words, to be said again."""

    fields = {"words": core.Field("input")}  # noqa: RUF012

    def __init__(self):
        self.rows = torch.randint(WORDS, (256, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {"words": self.rows[index]}


def loss_sum(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten(), reduction="sum")


def held(params: list[Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters, gradients and moments of this process."""
    moments = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    found = [*params, *(p.grad for p in params if p.grad is not None), *moments]
    return sum(local(t).numel() * t.element_size() for t in found)


def plain(world: int, rank: int, steps: int, clock: Callable, shard: bool) -> int:
    """One loop of plain torch; returns the bytes that it holds."""
    torch.manual_seed(0)
    net: nn.Module = Net()
    if shard:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for unit in (*net.blocks, net):
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    elif world > 1:
        net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=OPTIM.lr, fused=True)
    rows = Words().rows
    for step in range(steps + WARM):
        clock(step)
        first = step * BATCH % len(rows)
        mine = rows[first : first + BATCH][rank::world]
        total = loss_sum(net, mine)
        (total * (world if world > 1 and not shard else 1) / BATCH).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        total.item()
        kept = held(list(net.parameters()), optimizer) if step == steps + WARM - 1 else 0
        optimizer.zero_grad()
    clock(steps + WARM)
    return kept


def ours(accelerator: Accelerator, steps: int, clock: Callable, shard: str) -> int:
    """The same through `Run`."""
    data = Words()
    cfg = core.Config(
        train=Train(epochs=(steps + WARM) * BATCH / len(data), batch_size=BATCH),
        optim=OPTIM,
        loader=Loader(workers=0),
        run=RunSettings(threads=1, shard=shard),
    )

    def make(run: core.Run) -> core.Stage:
        net = Net()

        def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
            return {"ce": loss_sum(model, batch["words"])}

        return core.Stage("words", net, {"main": core.make_optimizer(net, cfg.optim)}, {"train": data, "val": data}, loss,
                          lambda model, data: {}, core.Metric("none", "", 0.0, 1.0), shard_units=lambda net: list(net.blocks))  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        tracker = MetricsTracker(Path(folder), use_tensorboard=False) if accelerator.is_main_process else None
        run = core.Run(cfg, accelerator, tracker=tracker)
        stage = build(run, make)
        for step in run.steps(stage):
            clock(step.index)
            run.update(stage, step.batches)
        clock(steps + WARM)
        kept = held(list(stage.model.parameters()), stage.optimizers["main"])
        run.close()
    accelerator.free_memory()
    return kept


def work(rank: int, world: int, port: int, rounds: int, steps: int, out: str) -> None:
    """All loops of one number of processes, in one of them."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # about the logits, which nothing changes in place
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port)}  # fmt: skip
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world
    spent: dict[str, list[float]] = {}
    loops: dict[str, Callable] = {
        "torch": lambda clock: plain(world, rank, steps, clock, shard=False),
        "ours": lambda clock: ours(accelerator, steps, clock, "none"),
    }
    if world > 1:
        loops = {"torch DDP": loops["torch"], "ours DDP": loops["ours"],
                 "torch FSDP2": lambda clock: plain(world, rank, steps, clock, shard=True),
                 "ours FSDP2": lambda clock: ours(accelerator, steps, clock, "full")}  # fmt: skip
    found = []
    for number in range(rounds):
        order = list(loops)
        random.Random(number).shuffle(order)
        row = {}
        for name in order:

            def clock(step: int, name: str = name) -> None:
                now = [time.process_time(), time.perf_counter()]
                if step == WARM:
                    spent[name] = now
                elif step == steps + WARM:
                    spent[name] = [(b - a) * 1e3 / steps for a, b in zip(spent[name], now, strict=True)]

            most = torch.tensor(loops[name](clock))
            cpu, wall = torch.tensor(spent[name][0]), torch.tensor(spent[name][1])
            if world > 1:
                dist.all_reduce(cpu)
                dist.all_reduce(wall, op=dist.ReduceOp.MAX)
                dist.all_reduce(most, op=dist.ReduceOp.MAX)
            row[name] = {"cpu_ms": cpu.item(), "wall_ms": wall.item(), "bytes": int(most)}
        found.append(row)
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    every = {}
    for world in args.processes:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            out = Path(folder) / "found.json"
            mp.spawn(work, (world, port, args.rounds, args.steps, str(out)), world)
            found = every[world] = json.loads(out.read_text())
        for name in found[0]:
            cpu, wall = (statistics.median(row[name][key] for row in found) for key in ("cpu_ms", "wall_ms"))
            other = name.replace("ours", "torch")
            ratios = sorted(row[name]["cpu_ms"] / row[other]["cpu_ms"] for row in found)
            ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if name != other else ""
            held_mb = found[0][name]["bytes"] / 1e6
            times = f"{cpu:7.1f} ms CPU, {wall:7.1f} ms a step"
            print(f"{world} processes  {name:<12} {times}  {held_mb:5.1f} MB  {ratio}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
