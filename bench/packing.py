"""What packing is worth: tokens that are asked for per second of CPU time, over padded batches.

    python bench/packing.py --context 512 --steps 12 --rounds 3

The documents of llm/pretrain and its own model and loss. `random`: documents as they come, padded to the longest of a batch;
`grouped`: documents of like length together; `packed`: the recipe's rows. All three cut documents at a row's length, and a batch
has the same number of rows. Before anything is timed, document 1 of a packed row is exchanged and document 2 must not move.
Rounds are interleaved; the median counts.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from trainworthy.core.base import seeds
from trainworthy.core.loop.run import Rehearsal, evaluating
from trainworthy.recipes.llm import pretrain
from trainworthy.recipes.llm.data.packing import IGNORED, Packed

from trainworthy import core


def padded(data: Packed, chosen: list[int]) -> dict[str, Tensor]:
    """These windows as a batch of a row each, as wide as the longest."""
    rows = [data.documents[w.document][w.start : w.end].astype(np.int64) for w in (data.windows[i] for i in chosen)]
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), data.tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), IGNORED)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = labels[i, : len(row)] = torch.from_numpy(row)
        labels[i, 0] = IGNORED
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(width).expand(len(rows), width)}


def batches(data: Packed, rows: int, steps: int) -> dict[str, list[dict]]:
    """{way: `steps` batches}."""
    order = seeds.permutation(len(data.windows), "bench").tolist()
    by_length = sorted(order, key=lambda i: data.windows[i].end - data.windows[i].start)
    groups = [by_length[i : i + rows] for i in range(0, len(by_length) - rows + 1, rows)]
    picked = [groups[i] for i in seeds.permutation(len(groups), "groups").tolist()[:steps]]
    packs = seeds.permutation(len(data), "packs").tolist()
    return {
        "random": [padded(data, order[i * rows : (i + 1) * rows]) for i in range(steps)],
        "grouped": [padded(data, group) for group in picked],
        "packed": [data.collate([data.get(j, None) for j in packs[i * rows : (i + 1) * rows]]) for i in range(steps)],
    }


def leak(model: torch.nn.Module, data: Packed) -> float:
    """How much exchanging the first of two documents in a row moves the second's logits, over what it moves its own."""
    half = data.context // 2
    a, b, c = (np.resize(d, n) for d, n in zip(data.documents, (half, half, half - 3), strict=False))
    with evaluating(model):
        out = []
        for first in (a, b):
            row = data.among([first, c]).get(0, None)
            out.append(
                model(input_ids=row["input_ids"][None], position_ids=row["position_ids"][None], use_cache=False).logits[
                    0
                ]
            )
    moved = (out[0] - out[1]).abs().amax(-1)
    return (moved[half : 2 * half - 3].max() / moved[:half].max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cfg = pretrain.tiny()
    cfg.data.context, cfg.data.stride = args.context, args.context // 2
    stage = pretrain.pretrain(cfg, core.Run(cfg, Accelerator(cpu=True), rehearsal=Rehearsal(steps=1)))
    with torch.no_grad():  # an untrained model answers the same whatever it reads
        for p in stage.model.parameters():
            p += 0.02 * torch.randn_like(p)
    data = stage.data["train"]
    if (moved := leak(stage.model, data)) > 1e-3:
        raise SystemExit(f"documents leak: {moved:.2g}")
    ways = batches(data, args.rows, args.steps)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, some in ways.items():
            started, tokens = time.process_time(), 0
            for batch in some:
                sum(stage.loss(stage.model, batch).values()).backward()
                stage.optimizers["main"].step()
                stage.model.zero_grad()
                tokens += int(stage.counts(batch)["*"])
            rates[name].append(tokens / (time.process_time() - started))
    middle = {name: statistics.median(r) for name, r in rates.items()}
    full = {
        name: sum(int(stage.counts(b)["*"]) for b in some) / sum(b["labels"].numel() for b in some)
        for name, some in ways.items()
    }
    print(f"context {args.context}, {args.rows} rows, {args.rounds} rounds of {args.steps} steps, leak {moved:.1e}")
    for name, rate in middle.items():
        print(
            f"  {name:<8} {rate:8,.0f} tokens/CPU-s  {rate / middle['random']:.2f}x  {full[name]:.0%} of the places asked for"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"settings": vars(args) | {"json": None}, "rates": rates, "full": full, "leak": moved}, indent=1)
        )


if __name__ == "__main__":
    main()
