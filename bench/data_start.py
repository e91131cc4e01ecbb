"""From the command to the first gate on many samples: cold, and once more with what the first process left in the cache.

    python bench/data_start.py KIND ... [--samples 100000] [--json FILE]

KIND: pairs, conversations, preferences, pictures, coco. Synthetic data of that size are written into a temporary folder, the cache is an
empty folder beside them. Each measurement is a process of its own: `trainworthy check RECIPE --only data` on a tiny model, until it prints
its first verdict. Seconds of the clock, and of the processor until then, with its children.
"""

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
WORDS = [
    a + b + c
    for a in ("ba", "ke", "lo", "mi", "nu", "ras")
    for b in ("d", "f", "gl", "nd", "st")
    for c in ("a", "en", "ir", "o", "um")
]


def said(draws: random.Random, n: int) -> str:
    return " ".join(draws.choices(WORDS, k=n))


def pairs(home: Path, n: int) -> list[str]:
    """Prompts of 20 words, answers of 30."""
    draws = random.Random(0)
    rows = ({"prompt": f"{i} {said(draws, 20)}", "completion": said(draws, 30)} for i in range(n))
    return ["llm/sft", *written(home, rows)]


def conversations(home: Path, n: int) -> list[str]:
    """Two questions and two answers."""
    draws = random.Random(0)
    rows = ({"messages": [{"role": role, "content": f"{i} {said(draws, k)}"} for role, k in (("user", 15), ("assistant", 20)) * 2]}
            for i in range(n))  # fmt: skip
    return ["llm/sft", *written(home, rows)]


def preferences(home: Path, n: int) -> list[str]:
    """A prompt of 20 words with two answers of 20 to 40."""
    draws = random.Random(0)
    rows = ({"prompt": f"{i} {said(draws, 20)}", **{k: said(draws, draws.randint(20, 40)) for k in ("chosen", "rejected")}}
            for i in range(n))  # fmt: skip
    return ["llm/reward", *written(home, rows)]


def written(home: Path, rows) -> list[str]:
    from tests.helpers import language

    file = home / "rows.jsonl"
    with file.open("w") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    model = home / "net"
    model.mkdir()
    language.write(model)
    return ["--model", str(model), "--lora-rank", "4", "--data.path", str(file), "--data.max-length", "640"]


def pictures(home: Path, n: int) -> list[str]:
    """JPEG files of 40 to 60 pixels in ten class folders."""
    for i in range(n):
        folder = home / "pictures" / f"class{i % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.jpg").write_bytes(jpeg(i, 40 + i % 20, 50))
    return ["vision/classify", "--data.path", str(home / "pictures"), "--image-size", "32", "--loader.workers", "0"]


def coco(home: Path, n: int) -> list[str]:
    """Seven boxes a picture, as many as COCO has."""
    draws, images, boxes = random.Random(0), [], []
    folder = home / "coco" / "train"
    folder.mkdir(parents=True)
    for i in range(n):
        (folder / f"{i}.jpg").write_bytes(jpeg(i, 40, 50))
        images.append({"id": i, "file_name": f"{i}.jpg", "height": 40, "width": 50})
        for _ in range(7):
            at = [draws.randint(0, 30), draws.randint(0, 20), draws.randint(5, 18), draws.randint(5, 18)]
            boxes.append(
                {"id": len(boxes), "image_id": i, "category_id": 1 + draws.randrange(80), "bbox": at, "iscrowd": 0}
            )
    names = [{"id": k, "name": f"thing{k}"} for k in range(1, 81)]
    (home / "coco" / "train.json").write_text(json.dumps({"images": images, "annotations": boxes, "categories": names}))
    return ["vision/detect", "--data.path", str(home / "coco"), "--loader.workers", "0"]


def jpeg(seed: int, high: int, wide: int) -> bytes:
    import numpy as np
    from PIL import Image

    draws = np.random.default_rng(seed)
    small = draws.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize((wide, high)).save(out, "jpeg")
    return out.getvalue()


KINDS: dict[str, Callable[[Path, int], list[str]]] = {
    f.__name__: f for f in (pairs, conversations, preferences, pictures, coco)
}


def first_gate(argv: list[str], home: Path) -> dict[str, float]:
    """Seconds until the command prints its first verdict."""
    settings = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "",
                             "TRAINWORTHY_CACHE": str(home / "cache")}  # fmt: skip
    started = time.monotonic()
    command = [sys.executable, "-m", "trainworthy", "check", *argv, "--only", "data"]
    with subprocess.Popen(
        command, cwd=home, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        heard = []
        for line in running.stdout:
            heard.append(line)
            if line.split()[:1] in (["pass"], ["fail"], ["skip"]):
                seconds = time.monotonic() - started
                every = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
                processor = sum(p.cpu_times().user + p.cpu_times().system for p in every)
                running.kill()
                return {"seconds": round(seconds, 1), "processor": round(processor, 1)}
    sys.exit("".join(heard[-30:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    args, found = parser.parse_args(), {}
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as name:
            argv = KINDS[kind](Path(name), args.samples)
            found[kind] = {state: first_gate(argv, Path(name)) for state in ("cold", "warm")}
            kept = sum(f.stat().st_size for f in (Path(name) / "cache").rglob("*") if f.is_file())
            found[kind] |= {"samples": args.samples, "cache_mb": round(kept / 1e6, 1)}
            print(kind, found[kind], flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
