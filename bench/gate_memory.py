"""What gates hold in memory: bytes of live floating-point tensors at every gate, and when the full run is built.

    python bench/gate_memory.py RECIPE [settings of `trainworthy run`] [--json FILE]

Runs the real command in this process, on the CPU, and counts there. How: a dispatch mode sees the output of every operation, a weak
reference to its storage tells when that is freed; the number of bytes is a sum of storages, each once, so it is the same on every
machine. Python's cyclic collector is off except where the code asks for it (`gc.disable()`): what waits for the collector counts as
alive. Left out: integers (pictures as bytes, tokens: the data set), file-backed storages (the system may page them out), the
snapshot that a checkpoint's writer takes on the host, and temporary memory inside one kernel.

The unit of all columns is the model's parameters in their own precision. Training with AdamW takes four (weights, gradient, two
moments) and its activations. `training` is the peak inside the recipe's `train()` of the full run.
"""

import argparse
import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from trainworthy.core import launch
from trainworthy.core.base.live_bytes import LiveBytes
from trainworthy.core.gates import runner
from trainworthy.core.loop import checkpoint
from trainworthy.core.loop.run import Run
from trainworthy.core.recipe.stage import Stage
from trainworthy.core.session import stages


@contextlib.contextmanager
def counted(found: dict) -> Iterator[LiveBytes]:
    """Fill `found`: {"weights", "gates": {id: (live before, peak)}, "start": live when the full run is built, "training"}, in
    bytes."""
    memory = LiveBytes()
    found |= {"gates": {}}
    prove, make, update, snapshot = runner._prove, stages.Part.build, Run.update, checkpoint.snapshot

    def gate(one, proof) -> Any:
        before = memory.restart()
        verdict = prove(one, proof)
        found["gates"][f"{proof.stage}/{one.id}"] = (before, memory.peak)
        return verdict

    def built(part: stages.Part, run: Run, previous: Stage | None) -> Stage:
        if run.plan is not None:
            return make(part, run, previous)
        found.setdefault("start", memory.restart())
        stage = make(part, run, previous)
        found["weights"] = sum(p.numel() * p.element_size() for p in stage.model.parameters())
        memory.restart()
        return stage

    def training(run: Run, *args, **kwargs) -> Any:
        out = update(run, *args, **kwargs)
        if run.plan is None:
            found["training"] = max(found.get("training", 0), memory.peak)
            found["steps"] = found.get("steps", 0) + 1
        return out

    def uncounted(call: Callable) -> Callable:
        def quiet(tree: Any) -> Any:
            with torch.utils._python_dispatch._disable_current_modes():
                return call(tree)

        return quiet

    with (
        mock.patch.object(runner, "_prove", gate),
        mock.patch.object(stages.Part, "build", built),
        mock.patch.object(Run, "update", training),
        mock.patch.object(checkpoint, "snapshot", uncounted(snapshot)),
        memory,
    ):
        gc.collect()
        gc.disable()
        try:
            yield memory
        finally:
            gc.enable()


def measure(argv: list[str]) -> dict:
    """`trainworthy run` of these words, counted."""
    found: dict = {}
    with counted(found):
        code, message, _ = launch.outcome(["run", *argv])
    return found | {"code": code, "message": message}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--json", type=Path)
    args, settings = parser.parse_known_args()
    found = measure([args.recipe, *settings])
    if found["code"]:
        sys.exit(found["message"])
    unit = found["weights"]
    print(f"\n{args.recipe}: weights {unit / 1e6:.1f} MB; in units of them")
    for name, (before, peak) in found["gates"].items():
        print(f"  {name:<32} alive before {before / unit:6.2f}   peak {peak / unit:6.2f}")
    print(f"  {'alive when the full run is built':<32}              {found['start'] / unit:6.2f}")
    print(f"  {'training, peak':<32}                                {found['training'] / unit:6.2f}")
    if found["gates"]:
        worst = max(found["gates"], key=lambda name: found["gates"][name][1])
        print(f"  highest of the gates over training: {found['gates'][worst][1] / found['training']:.2f} ({worst})")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
