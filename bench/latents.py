"""What caching latents is worth: CPU time of a training step of diffusion/latent, and of the same step that encodes its pictures.

    python bench/latents.py --steps 12 --rounds 3

The recipe's own stages, data and loss; an untrained autoencoder, which takes as long as a trained one. Rounds are interleaved; the
median counts.
"""

import argparse
import statistics
import time

import torch
from accelerate import Accelerator
from trainworthy.core.base import config
from trainworthy.core.gates.gate import fetch
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe import loading
from trainworthy.core.session import stages
from trainworthy.recipes.diffusion.models import pipeline


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded, accelerator = loading.load("diffusion/latent"), Accelerator(cpu=True)
    cfg, _ = config.parse(loaded.module, [], prog="bench")
    started = time.process_time()
    (_, first), (spec, stage) = stages.untrained(loaded, cfg, accelerator)
    built = time.process_time() - started
    data, size, run = (
        stage.data["train"],
        spec.cfg.train.batch_size,
        Run(spec.cfg, accelerator, rehearsal=Rehearsal(steps=1)),
    )
    seconds: dict[str, list[float]] = {"cached": [], "encoded": []}
    for _ in range(args.rounds):
        for name, taken in seconds.items():
            started = time.process_time()
            for step in range(args.steps):
                chosen = list(range(step * size, (step + 1) * size))
                batch = fetch(data, chosen, 0, run.device)
                if name == "encoded":
                    images = data.images[chosen]
                    batch["latent"] = pipeline.scaled(first.model, pipeline.middle(first.model, images))
                    batch["noisy"] = data.process.add(batch["latent"], batch["noise"], batch["timestep"])
                sum(stage.loss(stage.model, batch).values()).backward()
                stage.optimizers["main"].step()
                stage.model.zero_grad()
            taken.append((time.process_time() - started) / args.steps)
    middle = {name: statistics.median(taken) for name, taken in seconds.items()}
    print(
        f"batches of {size}, {args.rounds} rounds of {args.steps} steps; both stages built, all pictures encoded: {built:.1f} CPU-s"
    )
    for name, taken in middle.items():
        print(f"  {name:<8} {1000 * taken:6.1f} CPU-ms a step  {taken / middle['cached']:.2f}x")


if __name__ == "__main__":
    main()
