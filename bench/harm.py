"""What goes wrong without each safeguard, in numbers: bugs planted in vision/classify, gates off, trained to the end.

    python bench/harm.py --seeds 0 1 2 --to docs/recipes/vision-classify.harm.json

`reported` is what the run itself says; `honest` is the exported weights on the untouched 1,000 held-out images, all at once.
The same three seeds for every case, two runs side by side. About 25 minutes on two cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.plants import CLIP, IMAGE, MEAN_LOSS, PLANTS, UPDATE, own_loop  # noqa: E402

LOADING = threading.Lock()  # torch.export.load keeps global state
BY_ID = {p.id: p for p in PLANTS}


@dataclass
class Case:
    """One way to train without a safeguard."""

    id: str
    rows: str
    what: str
    hunks: list[tuple[str, str]] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)


def planted(id: str, what: str, *settings: str) -> Case:
    """A case from the suite of planted bugs."""
    return Case(id, BY_ID[id].row, what, [BY_ID[id].hunk], list(settings))


MIXED = "        train_data, val_data = mixing.Mixed(train_data, cfg.mix, near), mixing.Mixed(val_data, cfg.mix)\n"
CLIPPED = (
    """        def clipped(image, other, lam, generator):
            n, half = image.shape[-1], int(image.shape[-1] * (1 - lam).sqrt()) // 2
            y, x = torch.randint(n, (2,), generator=generator).tolist()
            image, box = image.clone(), (slice(max(0, y - half), y + half), slice(max(0, x - half), x + half))
            image[:, *box] = other[:, *box]
            return image, lam

        mixing.pasted = clipped
"""
    + MIXED
)  # as the paper's own code before it corrected the share by what the border had cut off

CASES = [
    Case("healthy", "", "nothing changed"),
    Case("no-augmentation", "default", "no augmentation", settings=["--no-augment"]),
    Case("no-smoothing", "default", "no label smoothing", settings=["--label-smoothing", "0"]),
    planted("loud-head", "output layer starts with std 2"),
    planted("centred-on-batch", "inputs centred on their batch"),
    planted("head-only", "optimiser over the head alone"),
    planted("no-zero-grad", "zero_grad missing"),
    planted("softmax-twice", "softmax before cross-entropy"),
    planted("normalised-twice-in-training", "training images divided by 255 twice"),
    planted("noisy-copies", "validation made of training images with faint noise"),
    planted("functional-dropout", "dropout 0.2 without its training flag"),
    Case("decay-everywhere", "C3", "weight decay on norms, biases and the head's offsets, too",
         [("core.make_optimizer(model, cfg.optim)",
           "torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr, weight_decay=cfg.optim.weight_decay)")]),
    Case("cutmix", "", "healthy with CutMix", settings=["--mix.cutmix", "1"]),
    Case("cutmix-share-as-drawn", "", "CutMix whose label has the drawn share, not the pasted area's",
         [(MIXED, CLIPPED)], ["--mix.cutmix", "1"]),
    Case("rate-1e-5", "", "healthy at a rate of 1e-5", settings=["--optim.lr", "1e-5"]),
    planted("bf16-weights", "bf16 weights at a rate of 1e-5", "--optim.lr", "1e-5"),
    Case("nan-unguarded", "C17", "41 training images with a NaN pixel, a loop without the finite check",
         [(IMAGE, IMAGE + "        if generator is not None and index % 97 == 5:\n            image[0, 3, 3] = torch.nan\n"),
          (UPDATE, own_loop("optimizer.zero_grad()", MEAN_LOSS, "loss.backward()", CLIP, "optimizer.step()"))]),
    Case("nan-guarded", "C17", "5 training images with a NaN pixel, run.update as it is",
         [(IMAGE, IMAGE + "        if generator is not None and index % 971 == 5:\n            image[0, 3, 3] = torch.nan\n")]),
]  # fmt: skip


def honest(folder: Path) -> float:
    """Accuracy of the exported program on the held-out images, read without the recipe."""
    import torch

    from recipes.shared import digits

    images, labels = digits.load()
    held_out = digits.split(labels)[1]
    with LOADING:
        program = torch.export.load(folder / "export" / "model.pt2").module()
    with torch.no_grad():
        right = program(images[held_out].float() / 255).argmax(1) == labels[held_out]
    return right.float().mean().item()


def measure(case: Case, seed: int) -> dict[str, float]:
    """Train one case with one seed; accuracies as shares."""
    source = (ROOT / "recipes" / "vision" / "classify.py").read_text()
    for old, new in case.hunks:
        assert source.count(old) == 1, (case.id, source.count(old))
        source = source.replace(old, new)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "mine.py").write_text(source)
        command = [sys.executable, "-m", "core.launch", "mine.py", "--gates.no-enabled", "--run.no-tensorboard",
                   "--loader.workers", "0", "--run.seed", str(seed), "--train.eval-every", "30", *case.settings]  # fmt: skip
        env = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=name, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{case.id}, seed {seed}: exit {done.returncode}\n{done.stderr[-2000:]}")
        folder = next(Path(name).glob("runs/mine/*"))
        summary = json.loads((folder / "summary.json").read_text())
        return {"reported": summary["reported"]["accuracy"], "honest": honest(folder)}


def main() -> None:
    """Every case with every seed; a table and a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--to", type=Path)
    args = parser.parse_args()
    chosen = [c for c in CASES if not args.only or c.id in args.only]
    jobs = [(c, s) for c in chosen for s in args.seeds]
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip([(c.id, s) for c, s in jobs], pool.map(lambda j: measure(*j), jobs), strict=True))
    rows = {}
    for case in chosen:
        values = {k: [round(found[case.id, s][k], 4) for s in args.seeds] for k in ("reported", "honest")}
        rows[case.id] = {"rows": case.rows, "what": case.what, "seeds": args.seeds, **values}
        spread = ", ".join(f"{k} {statistics.mean(v):.3f} [{min(v):.3f}-{max(v):.3f}]" for k, v in values.items())
        print(f"{case.id:<30} {spread}")
    if args.to:
        from core.recipe import versions

        args.to.write_text(
            json.dumps({"date": time.strftime("%Y-%m-%d"), "versions": versions(), "cases": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
