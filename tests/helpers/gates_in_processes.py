"""Gates of recipes in several processes (gloo) that are forked after all imports: `python -m tests.helpers.gates_in_processes FILE`.

FILE is JSON: {"processes": 2, "gates": ["sharding"], "shard": "full", "recipes": {id: settings}}. Of every stage it prints a line with what the
gates measured, and which metrics are not those that one process computes from the same weights and samples.
"""

import functools
import importlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from trainworthy.core.base import config
from trainworthy.core.base.verdict import Skip
from trainworthy.core.gates import order
from trainworthy.core.gates.gate import Gate, GateContext
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe import loading
from trainworthy.core.recipe.stage import Stage, View
from trainworthy.core.session import stages

SAMPLES = 11  # of the validation set: an odd number, so that parts are of unequal size


def every_metric(run: Run, stage: Stage) -> dict[str, list[float]]:
    """Return {metric: [of one process, of all together]} where the two differ by more than rounding."""
    val = stage.data["val"]
    some = View(val, range(min(SAMPLES, len(val))))
    world, rank = run.world, run.rank
    run.world, run.rank = 1, 0
    alone = run.measure(stage, some)
    run.world, run.rank = world, rank
    together = run.measure(stage, some)
    assert alone.keys() == together.keys()
    eps = 64 * torch.finfo(torch.float32).eps
    near = lambda a, b: a == b or (a != a and b != b) or abs(a - b) <= eps * max(1.0, abs(a))  # noqa: E731
    return {k: [v, together[k]] for k, v in alone.items() if not near(v, together[k])}


def print_stages(recipe: str, argv: list[str], accelerator: Accelerator, request: dict[str, Any], folder: Path) -> None:
    """Print a line for each stage of a recipe."""
    loaded, before = loading.load(recipe), None
    cfg = config.parse(loaded.module, [*argv, "--shard", request["shard"]], prog="parts")[0]
    for spec in stages.specs(loaded, cfg):
        context = GateContext(spec.cfg, accelerator, spec.factory(before), loaded.module.train, folder / spec.name, {}, {},
                      stage=spec.name, follows="rehearsed" if before else "none")  # fmt: skip
        context.folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {}
        started = time.process_time()
        run, stage = context.look()
        if request.get("metrics", True):
            found["metrics"] = outcome_of(lambda run=run, stage=stage: every_metric(run, stage))
        if stage.shard_units is not None:
            for one in order.of_stage(stage, sharded=request["shard"] != "none"):
                if one.id in request["gates"]:
                    context.put_away()
                    found[one.id] = outcome_of(functools.partial(verdict_of, one, context))
        before = functools.cache(lambda context=context: context.build(Rehearsal(steps=1))[1])
        found["cpu_s"] = round(time.process_time() - started, 1)
        if accelerator.is_main_process:
            print(json.dumps({"recipe": recipe, "stage": spec.name, **found}), flush=True)


def verdict_of(one: Gate, context: GateContext) -> str:
    finding = one.check(context)
    return ("pass: " if finding.ok else "fail: ") + finding.measured


def outcome_of(measure: Any) -> Any:
    try:
        return measure()
    except Skip as skip:
        return f"skip: {skip}"
    except Exception as error:
        return f"{type(error).__name__}: {error}\n" + "".join(traceback.format_tb(error.__traceback__)[-6:])


def process(rank: int, port: int, request: dict[str, Any], folder: Path) -> None:
    """One of the processes."""
    world = request["processes"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}  # fmt: skip
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world
    for recipe, argv in request["recipes"].items():
        print_stages(recipe, argv, accelerator, request, folder / recipe.replace("/", "-"))


def main(request: dict[str, Any]) -> int:
    """Import what the recipes import, then fork."""
    for recipe in request["recipes"]:
        importlib.import_module("trainworthy.recipes." + recipe.replace("/", "."))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forked = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            forked.Process(target=process, args=(r, port, request, Path(folder))) for r in range(request["processes"])
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
    return max(abs(one.exitcode or 0) for one in ranks)


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text())))
