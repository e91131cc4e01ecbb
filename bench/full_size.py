"""Recipes' presets `full` on an accelerator: memory beside the estimate of `trainworthy plan`, speed beside a plain loop.

    python bench/full_size.py FOLDER [CASE ...] [--json FILE] [--estimates FILE] [--steps 5] [--small]
    python bench/full_size.py FOLDER --plan --json FILE      # the estimates alone: needs no device

Models have the shape of published ones (ResNet-50, Llama, SmolLM2, CLIP-L, Stable Diffusion 1.5) and random weights; data are
pictures, texts and questions of the usual size, written into FOLDER. Each case runs `trainworthy profile`: the recipe's own train()
on data that its loader reads, checked for nothing. The plain loops have the same net, precision and optimiser, a batch that is
already on the device, and no evaluation, average of weights, clipping or check of finite gradients. `--small`: small models, for a
trial without a device.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.helpers import language, stable  # noqa: E402

WARM = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# ------------------------------------------------------------------------------------------------------------ data on disk
def scenes(n: int, seed: int) -> list[tuple[Image.Image, Image.Image, list[float], int]]:
    """(picture 500 x 375, mask of class ids, box xywh, class): an enlarged handwritten digit on noise."""
    from trainworthy.recipes.shared import digits

    images, labels = digits.load()
    draws, found = np.random.default_rng(seed), []
    for i in draws.permutation(len(labels))[:n].tolist():
        side = int(draws.integers(150, 350))
        x, y = int(draws.integers(0, 500 - side)), int(draws.integers(0, 375 - side))
        ink = Image.fromarray(images[i, 0].numpy()).resize((side, side))
        ground = Image.fromarray(draws.integers(0, 90, (38, 50, 3), dtype=np.uint8)).resize((500, 375))
        colour = tuple(int(c) for c in draws.integers(120, 256, 3))
        ground.paste(colour, (x, y), ink)
        mask = Image.new("L", (500, 375))
        mask.paste(1 + int(labels[i]), (x, y), ink.point(lambda v: 255 * (v > 127)))
        found.append((ground, mask, [x, y, side, side], int(labels[i])))
    return found


def write_data(home: Path, small: bool) -> None:
    """classes/ (folders), masks/, coco/, texts.txt, pairs.jsonl, preferences.jsonl, questions/ in a folder."""
    counts = {"train": 120, "val": 40} if small else {"train": 2000, "val": 200}
    listed: dict[str, Any] = {}
    for seed, (split, n) in enumerate(counts.items()):
        rows: dict[str, list] = {"images": [], "annotations": []}
        asked = []
        for folder in (f"masks/{split}/images", f"masks/{split}/masks", f"coco/{split}2026", "questions"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        for i, (picture, mask, box, label) in enumerate(scenes(n, seed)):
            folder = home / "classes" / split / f"digit {label}"
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{split}-{i}.jpg"
            picture.save(folder / name, quality=90)
            if i < n // 4:
                os.link(folder / name, home / "coco" / f"{split}2026" / name)
                os.link(folder / name, home / f"masks/{split}/images" / name)
                mask.save(home / f"masks/{split}/masks/{split}-{i}.png")
                rows["images"].append({"id": i, "file_name": name, "width": 500, "height": 375})
                rows["annotations"].append({"id": i, "image_id": i, "category_id": 1 + label, "bbox": box, "area": box[2] * box[3],
                                            "iscrowd": 0})  # fmt: skip
            os.link(folder / name, home / "questions" / name)
            side = "left" if box[0] + box[2] / 2 < 250 else "right"
            asked.append({"image": name, "question": "which digit is it?", "answer": str(label)})
            asked.append({"image": name, "question": "on which side is it?", "answer": side})
        listed[split] = rows | {"categories": [{"id": 1 + c, "name": f"digit {c}"} for c in range(10)]}
        (home / "questions" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, asked)))
    (home / "masks" / "classes.txt").write_text("\n".join(["background", *(f"digit {c}" for c in range(10))]))
    (home / "coco" / "annotations").mkdir()
    for split, rows in listed.items():
        (home / "coco" / "annotations" / f"instances_{split}2026.json").write_text(json.dumps(rows))
    library = Path(os.__file__).parent
    files = sorted(library.glob("*.py"))[: 40 if small else None]
    texts = [p.read_text(errors="ignore") for p in files]
    with (home / "texts.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": t}) + "\n" for t in texts)
    lines = [t[i : i + 900] for t in texts for i in range(0, len(t) - 900, 900)]
    pairs = [{"prompt": t[:650], "completion": t[650:]} for t in lines]
    other = [p["completion"] for p in pairs[1:] + pairs[:1]]
    choices = [
        {"prompt": p["prompt"], "chosen": p["completion"], "rejected": o} for p, o in zip(pairs, other, strict=True)
    ]
    for name, rows in (("pairs", pairs), ("preferences", choices)):
        (home / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


# ---------------------------------------------------------------------------------------------------------- models on disk
LLAMAS = {
    "smollm2-360m": (960, 2560, 32, 15, 5, 49152),
    "llama-1b": (2048, 8192, 16, 32, 8, 128256),
    "smollm2-1.7b": (2048, 8192, 24, 32, 32, 49152),
}
"""Width, width between, layers, heads, heads of keys and values, vocabulary: of the models of these names."""


def write_llama(folder: Path, size: tuple[int, ...]) -> None:
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    with torch.device(DEVICE):
        model = language.model(**dict(zip(keys, size, strict=True)), max_position_embeddings=8192)
    model.to(torch.bfloat16).save_pretrained(folder)
    language.tokenizer().save_pretrained(folder)


def write_clip(folder: Path, small: bool) -> None:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336,
             "patch_size": 14}  # fmt: skip
    config = CLIPVisionConfig(**(size if small else large))
    with torch.device(DEVICE):
        model = CLIPVisionModel(config)
    model.save_pretrained(folder)
    side = config.image_size
    CLIPImageProcessor(size={"shortest_edge": side}, crop_size=side).save_pretrained(folder)


def write_diffusion(folder: Path, small: bool) -> None:
    """Stable Diffusion 1.5: 860 million weights in the net, 123 in the text encoder, 84 in the autoencoder."""
    if small:
        stable.write(folder)
        return
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    words = stable.tokenizer(folder.with_name("sd-words"), 77)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    with torch.device(DEVICE):
        vae = AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4, sample_size=512,
                            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4)  # fmt: skip
        unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
        text = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=49408,
                hidden_size=768,
                intermediate_size=3072,
                num_hidden_layers=12,
                num_attention_heads=12,
                **ids,
            )
        )
    schedule = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False,
                             steps_offset=1, prediction_type="epsilon")  # fmt: skip
    pipeline = StableDiffusionPipeline(vae, text, words, unet, schedule, None, None, requires_safety_checker=False)
    pipeline.to(torch.float16).save_pretrained(folder)


def write_scorer(home: Path) -> None:
    """An export of vision/classify that knows the classes of classes/."""
    argv = ["run", "vision/classify", "--data.path", str(home / "classes"), "--image-size", "64", "--train.epochs", "0.5", "--gates.no-enabled",
            "--run.no-tensorboard", "--run.out", str(home / "runs")]  # fmt: skip
    done = command(*argv, cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    (export,) = home.glob("runs/*/*/export")
    export.rename(home / "scorer")


def command(*argv: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "trainworthy", *argv], cwd=cwd, capture_output=True, text=True, env={
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))})  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- the cases
CASES: dict[str, tuple[str, ...]] = {
    "classify": ("vision/classify", "--data.path", "{home}/classes", "--weights", "none", "--optim.layer-decay", "1"),
    "segment": ("vision/segment", "--data.path", "{home}/masks", "--weights", "none", "--optim.layer-decay", "1"),
    "detect": ("vision/detect", "--data.path", "{home}/coco", "--weights", "none"),
    "pixel": ("diffusion/pixel", "--data.path", "{home}/classes", "--data.classifier", "{home}/scorer"),
    "text": ("diffusion/text", "--data.path", "{home}/classes", "--data.classifier", "{home}/scorer", "--model", "{home}/sd"),
    "pretrain": ("llm/pretrain", "--data.path", "{home}/texts.jsonl"),
    "sft": ("llm/sft", "--data.path", "{home}/pairs.jsonl", "--model", "{home}/smollm2-360m"),
    "sft-1b": ("llm/sft", "--data.path", "{home}/pairs.jsonl", "--model", "{home}/llama-1b"),
    "dpo": ("llm/dpo", "--data.path", "{home}/preferences.jsonl", "--model", "{home}/smollm2-360m"),
    "instruct": ("vlm/instruct", "--data.path", "{home}/questions", "--encoder", "{home}/clip", "--language", "{home}/smollm2-1.7b"),
}  # fmt: skip
WRITERS: dict[str, Callable[[Path, bool], None]] = {
    "clip": write_clip,
    "sd": write_diffusion,
    "scorer": lambda folder, small: write_scorer(folder.parent),
    **{
        name: lambda folder, small, size=size: write_llama(folder, (48, 96, 2, 4, 2, 300) if small else size)
        for name, size in LLAMAS.items()
    },
}


def settings(case: str, home: Path, small: bool) -> list[str]:
    """The words after `trainworthy profile`, once what they name is there."""
    recipe, *words = (w.replace("{home}", str(home)) for w in CASES[case])
    for word in words:
        folder = Path(word)
        if folder.parent == home and folder.name in WRITERS and not folder.exists():
            WRITERS[folder.name](folder, small)
    less = ["--train.batch-size", "4", "--train.accumulate", "1"] if small else []
    return [recipe, "--preset", "full", *words, "--run.no-tensorboard", *less * (case != "instruct")]


# ---------------------------------------------------------------------------------------------------------- plain loops
def timed(step: Callable[[], Any], steps: int) -> dict[str, float]:
    """Seconds of a step and the peak of allocated bytes."""
    for _ in range(WARM):
        step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    since = time.perf_counter()
    for _ in range(steps):
        step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - since) / steps
    return {"step": seconds, "peak_memory": torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0}


def loop(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], pieces: int, steps: int) -> dict[str, float]:
    """bf16 autocast, AdamW, `pieces` micro-batches a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")

    def step() -> None:
        for _ in range(pieces):
            with torch.autocast(DEVICE, torch.bfloat16):
                value = loss(model)
            (value / pieces).backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, steps)


def plain_classify(home: Path, steps: int) -> dict[str, float]:
    """torchvision's ResNet-50 on 256 pictures of 224 x 224."""
    from torchvision.models import resnet50

    model = resnet50(num_classes=10).to(DEVICE)
    x, y = torch.randn(256, 3, 224, 224, device=DEVICE), torch.randint(10, (256,), device=DEVICE)
    return loop(model, lambda m: nn.functional.cross_entropy(m(x), y), 1, steps)


def plain_pixel(home: Path, steps: int) -> dict[str, float]:
    """The recipe's UNet2DModel as diffusers' example trains it: 256 pictures of 64 x 64."""
    from trainworthy.core.recipe import loading
    from trainworthy.recipes.diffusion.models.nets import unet

    cfg = loading.load("diffusion/pixel").module.full()
    model = unet(3, 10, 64, cfg.widths, cfg.layers, cfg.attention).to(DEVICE)
    x, t, c = (torch.randn(256, 3, 64, 64, device=DEVICE), torch.randint(1000, (256,), device=DEVICE),
               torch.randint(10, (256,), device=DEVICE))  # fmt: skip
    return loop(model, lambda m: (m(x, t, class_labels=c).sample - x).square().mean(), 1, steps)


def plain_pretrain(home: Path, steps: int) -> dict[str, float]:
    """LlamaForCausalLM of transformers, compiled: 256 rows of 1,024 tokens in 8 micro-batches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(DEVICE):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=16384, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                                             num_attention_heads=12, tie_word_embeddings=True))  # fmt: skip
    compiled, ids = torch.compile(model), torch.randint(16384, (32, 1024), device=DEVICE)
    return loop(model, lambda m: compiled(input_ids=ids, labels=ids).loss, 8, steps)


def plain_sft(home: Path, steps: int) -> dict[str, float]:
    """TRL's SFTTrainer with the settings of the recipe's preset: 64 rows in 4 micro-batches, LoRA of rank 16."""
    import datasets
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    rows = [json.loads(line) for line in (home / "pairs.jsonl").open()][: 64 * (WARM + steps + 1)]
    rows = [
        {k: [{"role": r, "content": row[k]}] for k, r in (("prompt", "user"), ("completion", "assistant"))}
        for row in rows
    ]
    model = AutoModelForCausalLM.from_pretrained(home / "smollm2-360m", dtype=torch.float32)
    trainer = SFTTrainer(
        model, SFTConfig(output_dir=str(home / "trl"), max_steps=WARM + steps, per_device_train_batch_size=16, gradient_accumulation_steps=4,
                         bf16=True, gradient_checkpointing=False, report_to="none", save_strategy="no", max_length=1024, logging_steps=100),
        train_dataset=datasets.Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(home / "smollm2-360m"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"), callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return {"step": (times[-1] - times[WARM - 1]) / (len(times) - WARM), "peak_memory": peak}


PLAIN: dict[str, Callable[[Path, int], dict[str, float]]] = {
    "classify": plain_classify,
    "pixel": plain_pixel,
    "pretrain": plain_pretrain,
    "sft": plain_sft,
}


# -------------------------------------------------------------------------------------------------------------------- main
def planned(words: list[str], home: Path) -> list[dict[str, Any]]:
    done = command("plan", *words, "--json", cwd=home)
    if done.returncode:
        return [{"error": done.stderr[-2000:]}]
    return [
        {k: s[k] for k in ("stage", "training", "evaluation", "gates", "flops")}
        for s in json.loads(done.stdout)["stages"]
    ]


def profiled(words: list[str], home: Path, steps: int) -> list[dict[str, Any]]:
    done = command("profile", *words, "--steps", str(steps), "--json", cwd=home)
    if done.returncode:
        return [{"error": (done.stdout + done.stderr)[-3000:]}]
    keys = ("stage", "verdict", "step", "peak_memory", "idle", "flops", "attainable", "shares", "device")
    return [{k: s.get(k) for k in keys} for s in json.loads(done.stdout)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", default=[])
    parser.add_argument("--json", type=Path, default=Path("full_size.json"))
    parser.add_argument("--plan", action="store_true")
    parser.add_argument(
        "--plain", action="store_true", help=argparse.SUPPRESS
    )  # one case's plain loop, in a process of its own
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_intermixed_args()
    home, found = args.folder.absolute(), {}
    if args.plain:
        print(json.dumps(PLAIN[args.cases[0]](home, args.steps)))
        return
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "texts.jsonl").exists():
        write_data(home, args.small)
    for case in args.cases or CASES:
        since = time.perf_counter()
        words = settings(case, home, args.small)
        found[case] = row = {"settings": words}
        if args.plan:
            row["plan"] = planned(words, home)
        else:
            row["profile"] = profiled(words, home, args.steps)
            if case in PLAIN and not args.small:
                argv = [sys.executable, __file__, str(home), case, "--plain", "--steps", str(args.steps)]
                done = subprocess.run(argv, capture_output=True, text=True)
                row["plain"] = {"error": done.stderr[-2000:]}
                with contextlib.suppress(ValueError, IndexError):
                    row["plain"] = json.loads(done.stdout.splitlines()[-1])
        row["seconds"] = time.perf_counter() - since
        print(case, json.dumps({k: v for k, v in row.items() if k != "settings"}), flush=True)
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
