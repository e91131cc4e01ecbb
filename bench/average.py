"""CPU microseconds of one update of an average of weights: core's beside diffusers' EMAModel and torch's AveragedModel.

    python bench/average.py [--rounds N] [--json FILE]

Three nets: that of diffusion/latent, a convolutional one of 25 million weights, a transformer of 40 million. Decay 0.999, past the
ramp, weights fp32 on the CPU, one thread. Each round times all three on every net, in shuffled order; a ratio is of one round.
CPU time (`time.process_time`), so that a machine which others keep busy matters little. Each is checked to give the same average.
"""

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from diffusers.training_utils import EMAModel
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainworthy.recipes.diffusion.models import nets

from trainworthy import core

DECAY = 0.999
AFTER = 100_000  # updates: every ramp has ended


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(640, 10, 2560, batch_first=True)
    return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)


NETS: dict[str, Callable[[], nn.Module]] = {
    "the net of diffusion/latent": lambda: nets.unet(4, 10, 8, (32, 64), 1, False),
    "ResNet-50": torchvision.models.resnet50,
    "a transformer of eight layers": transformer,
}


def averages(net: nn.Module) -> dict[str, tuple[Callable[[], None], Callable[[], list[torch.Tensor]]]]:
    """{name: (one update, the averaged parameters)}, each of its own copy."""
    ours = core.Ema(net, DECAY)
    ours.updates = AFTER
    theirs = EMAModel(net.parameters(), decay=DECAY, use_ema_warmup=False)
    theirs.optimization_step = AFTER
    swa = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    swa.n_averaged.fill_(AFTER)
    return {
        "core.Ema": (lambda: ours.update(net), lambda: list(ours.model.parameters())),
        "diffusers EMAModel": (lambda: theirs.step(net.parameters()), lambda: list(theirs.shadow_params)),
        "torch AveragedModel": (lambda: swa.update_parameters(net), lambda: list(swa.module.parameters())),
    }


def agree(net: nn.Module) -> None:
    """All of them are one formula."""
    every = averages(copy.deepcopy(net))
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    made = averages(other)
    for name, (update, now) in made.items():
        for shadow, start in zip(now(), every[name][1](), strict=True):
            shadow.data.copy_(start)
        update()
    first, *rest = [now() for _, now in made.values()]
    assert all(torch.allclose(a, b, atol=1e-6) for r in rest for a, b in zip(first, r, strict=True))


def main() -> None:
    """Time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    draw, kept = random.Random(0), {}
    for name, make in NETS.items():
        net = make()
        agree(net)
        weights, tensors = sum(p.numel() for p in net.parameters()), len([*net.parameters(), *net.buffers()])
        every, n = averages(net), max(3, int(2e7 / sum(p.numel() for p in net.parameters())))
        taken: dict[str, list[float]] = {k: [] for k in every}
        for i in range(args.rounds + 1):  # the first warms up
            for key in draw.sample(list(every), len(every)):
                started = time.process_time()
                for _ in range(n):
                    every[key][0]()
                if i:
                    taken[key].append((time.process_time() - started) / n * 1e6)
        print(f"{name}: {weights:,} weights, {tensors} tensors; {args.rounds} rounds of {n} updates")
        for key, values in taken.items():
            ratios = [v / o for v, o in zip(values, taken["core.Ema"], strict=True)]
            middle, ratio = statistics.median(values), statistics.median(ratios)
            print(f"  {key:<20} {middle:9.0f} us  {ratio:5.2f}x ({min(ratios):.2f}-{max(ratios):.2f})")
            kept.setdefault(name, {})[key] = {"us": round(middle, 1), "ratio": round(ratio, 3)}
    if args.json:
        args.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
