"""Estimates of `trainworthy plan` beside measured peaks: the same two optimiser steps, on fake and on real tensors, on the CPU.

    python bench/plan.py RECIPE ... [--json FILE] [--stand-in FOLDER]

Both count the bytes of live floating-point storages. The measured steps read the recipe's real weights and data; with `--stand-in` the
smoke tests' tiny models in place of large ones, which are written into FOLDER.
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accelerate import Accelerator
from trainworthy.core.base import config
from trainworthy.core.base.live_bytes import LiveBytes
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe import loading
from trainworthy.core.session import estimate, stages

from bench import gate_memory


def measured(recipe: loading.Recipe, cfg: config.Config) -> list[int]:
    """Peak of live bytes in two optimiser steps of each stage. A later one starts from what the one before has become by then."""
    peaks, stage = [], None
    with LiveBytes() as memory:
        for spec in stages.specs(recipe, cfg):
            t = spec.cfg.train
            micro, pieces = max(1, -(-t.batch_size // t.accumulate)), min(2, t.accumulate)
            plan = Rehearsal(steps=estimate.STEPS, batch_size=pieces * micro, sizes=[micro] * pieces)
            run = Run(spec.cfg, Accelerator(cpu=True), rehearsal=plan)
            before = stage  # a run holds it, too, while the next one trains
            stage = spec.build(run, before)
            if "train" not in stage.data:
                plan.sizes = None
            frozen = (p for m in stage.frozen_modules.values() for p in m.parameters())
            for parameter in (*stage.model.parameters(), *frozen):
                memory.count(parameter.data)
            memory.restart()
            with estimate.without_evaluation(stage):
                recipe.module.train(spec.cfg, run, stage)
            peaks.append(memory.peak)
            for parameter in stage.parameters().values():
                parameter.grad = None
    return peaks


def apart(name: str, words: list[str]) -> list[int]:
    """The same in a new process: data that this one has read already would not be counted again."""
    recipe = loading.load(name)
    return measured(recipe, config.parse(recipe.module, words, prog=name)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+", help="id, or 'id settings' in quotes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stand-in", type=Path)
    args, rows = parser.parse_args(), []
    for name, *words in map(str.split, args.recipes):
        recipe = loading.load(name)
        if args.stand_in:
            words = [*gate_memory.stand_in(name, args.stand_in.absolute()), *words]
        cfg, _ = config.parse(recipe.module, words, prog=name)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as new:
            real = new.submit(apart, name, words).result()
        started = time.perf_counter()
        found = estimate.estimates(recipe, cfg)
        seconds = time.perf_counter() - started
        for one, size in zip(found, real, strict=True):
            rows.append(
                {"recipe": name, "stage": one.stage, "measured": size, "estimated": one.training, "seconds": seconds}
            )
            off = one.training / size - 1
            print(f"{name:<18} {one.stage:<12} measured {size / 1e6:9.2f} MB  estimated {one.training / 1e6:9.2f} MB  {off:+.1%}  "
                  f"{seconds:.1f} s  {'; '.join(one.missing)}", flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
