"""docs/architectures.md: the gates of recipes on the architectures that people load, at tiny size with random weights from their published
configuration classes.

python bench/architectures.py                        every row that has no result yet
python bench/architectures.py --only llama --again   some rows, measured anew
python bench/architectures.py --check                exit 1 if the page is not what it would write

A row runs `trainworthy check RECIPE --model FOLDER` in a process of its own, as a user would. Results are kept in bench/architectures.json."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.helpers import language, tiny_language_models  # noqa: E402
from tests.llm import chat_models  # noqa: E402

PAGE, KEPT = ROOT / "docs" / "architectures.md", Path(__file__).with_suffix(".json")
HEADS = {"head_dim": 12}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4,
          "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}  # fmt: skip
LANGUAGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", "llama3_2", {}),
    "Mistral": ("MistralConfig", "", {"sliding_window": 64}),
    "Qwen2": ("Qwen2Config", "qwen2_5", {}),
    "Qwen3": ("Qwen3Config", "qwen3", HEADS),
    "Gemma 3": ("Gemma3TextConfig", "gemma3", HEADS | {"sliding_window": 64}),
    "Phi-3": ("Phi3Config", "phi3", {}),
    "OLMo 2": ("Olmo2Config", "", {}),
    "GLM-4": ("Glm4Config", "glm4moe", HEADS),
    "SmolLM3": ("SmolLM3Config", "", {}),
    "Qwen3 MoE": (
        "Qwen3MoeConfig",
        "qwen3",
        HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "gpt-oss": ("GptOssConfig", "gptoss", HEADS | EXPERTS | {"sliding_window": 64}),
    "DeepSeek-V3": ("DeepseekV3Config", "", LATENT | {"num_key_value_heads": 4}),
}
"""Name: its configuration class, the chat template of TRL that belongs to it (empty: ChatML), and settings beside those of `language.SIZES`."""
KINDS = {"GPT-2": "gpt2", "Pythia": "gpt_neox", "OPT": "opt", "Phi-2": "phi", "Gemma 2": "gemma2", "Granite": "granite", "StableLM 2": "stablelm",
         "Mixtral": "mixtral", "OLMoE": "olmoe", "Qwen2 MoE": "qwen2_moe", "ERNIE 4.5 MoE": "ernie4_5_moe", "Qwen3-Next": "qwen3_next",
         "Mamba": "mamba", "Jamba": "jamba", "Falcon-H1": "falcon_h1", "Nemotron-H": "nemotron_h", "LFM2": "lfm2"}  # fmt: skip
"""Further ones, by their type in transformers (`tests/helpers/tiny_language_models.py`), on llm/sft alone."""
ON_TEXT = {
    "llm/sft": ("--data.held-out", "8", "--data.max-length", "512", "--train.batch-size", "4"),
    "llm/dpo": ("--data.held-out", "16", "--data.max-length", "512", "--train.batch-size", "4"),
    "llm/reward": ("--data.held-out", "16", "--data.max-length", "512", "--train.batch-size", "4"),
}
REWARD = (
    '"""Right, and a little for its letters, so that groups differ: a random model is never right."""\n\n\n'
    + "def near(completions, answer, **_):\n"
    "    return [10.0 * (c.strip() == a) + sum(x in c for x in set(a)) - 0.01 * len(c) for c, a in zip(completions, answer)]\n"
)
ON_SUMS = ("rl/grpo", "--train.batch-size", "16", "--max-new-tokens", "8", "--reward", "rewards.py:near")
HUB_NETS = ("ResNet", "ConvNeXt", "ViT", "Swin", "EfficientNet", "DINOv2")
"""Image classifiers of transformers, two or four blocks, for pictures of 32 pixels."""
WEIGHTS = ("--lora-rank", "0", "--optim.lr", "3e-3")
NETS = ("resnet18", "convnext_tiny", "efficientnet_b0", "mobilenet_v3_small", "densenet121", "swin_t", "vit_b_16")
ON_IMAGES = ("--weights", "none", "--image-size", "32", "--optim.lr", "1e-3")


def rows() -> dict[str, list[str]]:
    """Every row, `RECIPE ARCHITECTURE`, with its settings; a `--model` that is an architecture's name is written as a folder first."""
    found = {
        f"{recipe} {name}": [recipe, "--model", name, *WEIGHTS, *more]
        for recipe, more in ON_TEXT.items()
        for name in LANGUAGE
    }
    found |= {f"llm/sft {name}": ["llm/sft", "--model", name, *WEIGHTS, *ON_TEXT["llm/sft"]] for name in KINDS}
    eager = {"gpt-oss": ["--attention", "eager"]}  # it has no other on a CPU
    found |= {f"llm/pretrain {name}": ["llm/pretrain", "--model", name, *eager.get(name, [])] for name in LANGUAGE}
    found |= {f"rl/grpo {name}": [ON_SUMS[0], "--model", name, *WEIGHTS, *ON_SUMS[1:]] for name in LANGUAGE}
    found |= {f"vision/classify {net} (transformers)": ["vision/classify", "--model", net, "--weights", "none", "--optim.lr", "1e-3"]
              for net in HUB_NETS}  # fmt: skip
    return found | {f"vision/classify {net}": ["vision/classify", "--model", net, *ON_IMAGES] for net in NETS}


def written(name: str, folder: Path) -> Path:
    """The folder of a language model as the hub has it: configuration, random weights, tokenizer, chat template."""
    import torch
    import transformers

    kind, template, more = LANGUAGE[name]
    words = chat_models.tokenizer(template) if template in chat_models.names() else language.tokenizer()
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    config = getattr(transformers, kind)(vocab_size=len(words), tie_word_embeddings=False, max_position_embeddings=640,
                                         **{**language.SIZES, **ids, **more})  # fmt: skip
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(config)
    net.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def kind(name: str, folder: Path) -> Path:
    """The folder of a further language model."""
    return tiny_language_models.write(KINDS[name], folder)


def hub_net(name: str, folder: Path) -> Path:
    """The folder of an image classifier of transformers with random weights."""
    import torch
    import transformers as t

    config = {
        "ResNet": lambda: t.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 32, 64], depths=[1] * 4, layer_type="basic"),
        "ConvNeXt": lambda: t.ConvNextConfig(hidden_sizes=[16, 24, 32, 48], depths=[1] * 4, image_size=32),
        "ViT": lambda: t.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32,
                                   patch_size=8),
        "Swin": lambda: t.SwinConfig(image_size=32, patch_size=4, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4),
        "EfficientNet": lambda: t.EfficientNetConfig(image_size=32, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320),
        "DINOv2": lambda: t.Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8),
    }[name]()  # fmt: skip
    config.image_size = 32
    torch.manual_seed(0)
    t.AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    return folder


def measured(argv: list[str]) -> dict[str, Any]:
    """What `trainworthy check` says of one row."""
    with tempfile.TemporaryDirectory() as home:
        writers = dict.fromkeys(LANGUAGE, written) | dict.fromkeys(HUB_NETS, hub_net) | dict.fromkeys(KINDS, kind)
        if write := writers.get(argv[2]):
            argv = [*argv[:2], str(write(argv[2], Path(home) / "model")), *argv[3:]]
        (Path(home) / "rewards.py").write_text(REWARD)
        started = time.monotonic()
        settings = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "trainworthy", "check", *argv],
            cwd=home,
            env=settings,
            capture_output=True,
            text=True,
        )
        gates = next(iter(Path(home).glob("runs/*/checks/*/gates.json")), None)
        found = json.loads(gates.read_text())["gates"] if gates else []
        said = [line for line in done.stderr.splitlines() if line.startswith(("error", "stopped", "crashed"))]
        return {
            "exit": done.returncode,
            "passed": sum(g["verdict"] == "pass" for g in found),
            "skipped": sum(g["verdict"] == "skip" for g in found),
            "failed": [g["id"] for g in found if g["verdict"] == "fail"],
            "why": next((g["measured"] for g in found if g["verdict"] == "fail"), said[0] if said else ""),
            "seconds": round(time.monotonic() - started),
        }


HEAD = """# Architectures

Which gates pass on the architectures that people load. A pass shows that a recipe loads, pads, batches, generates, trains, resumes and exports
the architecture correctly. It shows nothing about its published weights, or about an accelerator.

- Each language model is built at tiny size (two layers, about 60,000 weights) with random weights from its published configuration class. It is
  written as a folder in the hub's layout, with the chat template that TRL ships for it (ChatML if it ships none).
- torchvision's nets have their real size, on pictures of 32 pixels. Those of transformers are tiny.
- Then the whole of `trainworthy check` runs on it, with all weights trained.
- The table is made by `python bench/architectures.py`, seed 0, on CPU.

| recipe | architecture | passed | skipped | failed |
|---|---|---|---|---|
"""


TAIL = """
## Other domains

| recipe | model | state |
|---|---|---|
| `diffusion/pixel`, `flow`, `latent` | diffusers' UNet2DModel | their own nets |
| `diffusion/text` | StableDiffusionPipeline: one text encoder, UNet2DConditionModel, AutoencoderKL | tested, tiny (`tests/diffusion/test_text.py`) |
| `diffusion/text` | SDXL, SD3, FLUX | refused with exit code 2: two text encoders, or a transformer and a flow |
| `llm/sft`, `dpo`, `reward`, `rl/grpo`, `rl/rlhf` | 54 kinds of transformers | read as their files say (`tests/llm/test_architectures.py`) |
| `llm/sft` | Llama 4 | its forward raises under TRL's fused head |
| `llm/pretrain` | BLOOM, MPT, OPT, Mamba, RWKV, Bamba, Jamba, Qwen3-Next | mix the documents of a row (`isolation`): `--data.no-packing` |
| `vision/segment --model` | SegFormer, Mask2Former, MaskFormer, EoMT, MobileNetV2 | tested, tiny (`tests/vision/`) |
| `vision/segment --model` | BEiT, Data2Vec, DPT, UPerNet, MobileViT | built and trained one step, tiny, by hand on 2026-11-29 |
| `vision/segment --model` | OneFormer | refused (exit code 2): it needs a task as text |
| `vision/classify --model` | 25 further kinds of transformers | start even, train whole (`make verify`) |
| `vlm/instruct --model` | LLaVA, LLaVA-NeXT, LLaVA-OneVision, Idefics3, SmolVLM | 14 gates pass at tiny size (`tests/vlm/test_instruct_whole.py`) |
| `vlm/instruct --model` | Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Gemma 3, InternVL, Mistral 3 | the same |
| `vlm/instruct --model` | PaliGemma | refused (exit code 2): a prefix language model has no conversations |
| `vlm/instruct --model` | encoder-decoders, models that see by cross-attention | refused (exit code 2): no separate vision and language parts |
| `distill/whisper`, `distill/compress` | Whisper with 80 or 128 mel bins (large-v3) | tested at tiny size; published sizes not tried |
"""


def page(kept: dict[str, dict[str, Any]]) -> str:
    """The page of the rows that have a result."""
    lines = []
    for key in rows():
        if one := kept.get(key):
            recipe, name = key.split(" ", 1)
            ended = f"exit {one['exit']}" if one["exit"] else "none"
            failed = (", ".join(f"`{g}`" for g in one["failed"]) or ended) + (f": {one['why']}" if one["why"] else "")
            lines.append(
                f"| `{recipe}` | {name} | {one['passed']} | {one['skipped']} | {failed.replace('|', chr(92) + '|')} |"
            )
    return HEAD + "\n".join(lines) + "\n" + TAIL


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--again", action="store_true", help="also rows that have a result")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if asked.check:
        sys.exit(int(page(kept) != PAGE.read_text()))
    for key, argv in rows().items():
        if asked.only.lower() in key.lower() and (asked.again or key not in kept):
            kept[key] = measured(argv)
            print(key, kept[key], flush=True)
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
            PAGE.write_text(page(kept))


if __name__ == "__main__":
    main()
