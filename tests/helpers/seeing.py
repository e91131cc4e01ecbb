"""Tiny random models as the hub keeps them (vision, a model with a vision part, language), and a folder of pictures."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from trainworthy.recipes.vlm.models import words


def write(home: Path) -> Path:
    """clip/, llama/ and data/ in a folder that exists."""
    from transformers import (
        CLIPConfig,
        CLIPImageProcessor,
        CLIPModel,
        CLIPTextConfig,
        CLIPVisionConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**small, image_size=32, patch_size=8)
    CLIPModel(CLIPConfig(text_config=CLIPTextConfig(**small, vocab_size=99).to_dict(), vision_config=vision.to_dict(),
                         projection_dim=16)).save_pretrained(home / "clip")  # fmt: skip
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(home / "clip")
    tokenizer = words.vocabulary()
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **small, eos_token_id=2)).save_pretrained(home / "llama")
    tokenizer.save_pretrained(home / "llama")
    data = home / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    for split, n in (("train", 24), ("val", 8)):
        lines = []
        for i in range(n):
            name = f"{split}-{i}.{'png' if i % 2 else 'jpg'}"
            red = i // 2 % 2
            pixels = rng.integers(0, 120, (40 + i, 50, 3), dtype=np.uint8)
            pixels[..., 0] += 130 * red
            Image.fromarray(pixels).save(data / name)
            told = {"answer": "yes" if red else "no", "pair": f"{split}{i % 2}{i // 4}"}
            lines.append({"image": name, "question": "any red ?", **told})
            lines.append({"image": name, "question": "left colour ?", "answer": "red" if red else "blue"})
        (data / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return home


def settings(home: Path) -> tuple[str, ...]:
    """vlm/instruct on these."""
    return ("--preset", "full", "--encoder", str(home / "clip"), "--language", str(home / "llama"), "--data.path", str(home / "data"),
            "--lora-rank", "2", "--train.precision", "fp32", "--loader.workers", "0", "--loader.eval-workers", "0",
            "--run.no-tensorboard", "--run.threads", "1", "--align.batch-size", "8", "--instruct.batch-size", "8",
            "--projector-width", "32")  # fmt: skip
