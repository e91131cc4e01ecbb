"""Estimates of `trainworthy plan` beside measured peaks: the same two optimiser steps, on fake and on real tensors, on the CPU.

    python bench/plan.py RECIPE ... [--json FILE]

Both count the bytes of live floating-point storages. The measured steps read the recipe's real weights and data.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""

from accelerate import Accelerator
from trainworthy.core.base import config
from trainworthy.core.base.live_bytes import LiveBytes
from trainworthy.core.loop.run import Plan, Run
from trainworthy.core.recipe import loading
from trainworthy.core.session import estimate, stages


def measured(recipe: loading.Recipe, cfg: config.Config) -> int:
    """Peak of live bytes in two optimiser steps of the first stage."""
    part = stages.parts(recipe, cfg)[0]
    t = part.cfg.train
    micro, pieces = max(1, -(-t.batch_size // t.accumulate)), min(2, t.accumulate)
    plan = Plan(steps=estimate.STEPS, batch_size=pieces * micro, sizes=[micro] * pieces)
    run = Run(part.cfg, Accelerator(cpu=True), plan=plan)
    with LiveBytes() as memory:
        stage = part.build(run, None)
        if "train" not in stage.data:
            plan.sizes = None
        for parameter in (
            *stage.model.parameters(),
            *(p for m in stage.frozen_modules.values() for p in m.parameters()),
        ):
            memory.count(parameter.data)
        memory.restart()
        with estimate.without_evaluation(stage):
            recipe.module.train(part.cfg, run, stage)
    return memory.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+", help="id, or 'id settings' in quotes")
    parser.add_argument("--json", type=Path)
    args, rows = parser.parse_args(), []
    for words in map(str.split, args.recipes):
        recipe = loading.load(words[0])
        cfg, _ = config.parse(recipe.module, words[1:], prog=words[0])
        real = measured(recipe, cfg)
        started = time.perf_counter()
        found = estimate.estimates(recipe, cfg)[0]
        seconds = time.perf_counter() - started
        rows.append({"recipe": " ".join(words), "measured": real, "estimated": found.training, "seconds": seconds})
        off = found.training / real - 1
        print(f"{' '.join(words):<20} measured {real / 1e6:9.2f} MB  estimated {found.training / 1e6:9.2f} MB  {off:+.1%}  "
              f"{seconds:.1f} s  {'; '.join(found.missing)}", flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
