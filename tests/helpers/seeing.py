"""Tiny random models as the hub keeps them (vision, a model with a vision part, language), and a folder of pictures."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from trainworthy.recipes.vlm.models import small_language_model


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
    tokenizer = small_language_model.vocabulary()
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
            answer = {"answer": "yes" if red else "no", "pair": f"{split}{i % 2}{i // 4}"}
            lines.append({"image": name, "question": "any red ?", **answer})
            lines.append({"image": name, "question": "left colour ?", "answer": "red" if red else "blue"})
        (data / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return home


def settings(home: Path) -> tuple[str, ...]:
    """vlm/instruct on these."""
    return ("--preset", "full", "--encoder", str(home / "clip"), "--language", str(home / "llama"), "--data.path", str(home / "data"),
            "--lora-rank", "2", "--train.precision", "fp32", "--loader.workers", "0", "--loader.eval-workers", "0",
            "--run.no-tensorboard", "--run.threads", "1", "--align.batch-size", "8", "--instruct.batch-size", "8",
            "--projector-width", "32")  # fmt: skip


DESCRIBE = "digits left ?"
"""A question whose answer is long: the whole scene in words."""


def talkative(home: Path, *, steps: int = 250, train: int = 256, val: int = 64) -> Path:
    """chat/ and talks/ in a folder: `words` taught to answer in the turns of a chat template, also at length, and conversations about
    scenes as LLaVA writes them."""
    from torchvision.io import write_png
    from trainworthy.recipes.shared import composites
    from trainworthy.recipes.vlm.data import rows, scenes, turns
    from trainworthy.recipes.vlm.data.rows import Question
    from transformers import AutoTokenizer, LlamaForCausalLM

    from tests.helpers import language

    torch.manual_seed(0)
    folder = small_language_model.folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "user", "assistant"]})
    tokenizer.chat_template = language.TEMPLATE
    tokenizer.eos_token = "<|im_end|>"
    model = LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    chat = turns.chat(tokenizer)

    def questions(items: list) -> list[Question]:
        short = [Question(0, q, a) for q, a in zip(scenes.QUESTIONS.values(), scenes.answers(items), strict=True)]
        return [Question(0, DESCRIBE, scenes.describe(items)), *short]

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    for step in range(steps):
        found = []
        for index in range(step * 24, (step + 1) * 24):
            items = scenes.by_x(scenes.draw(composites.generator("train", "chat", index), "train")[0])
            ids = chat.ids(scenes.describe(items))
            row = turns.packed(chat, len(ids), questions(items))
            row["ids"] = row["ids"].masked_scatter(row["ids"] == rows.IMAGE, torch.tensor(ids))
            found.append(row)
        batch = rows.together(found)
        logits = rows.answer(model, model.get_input_embeddings()(batch["ids"]), batch)
        loss = rows.nll(logits, batch["labels"]) / rows.scored(batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(home / "chat")
    tokenizer.save_pretrained(home / "chat")
    talks = home / "talks"
    talks.mkdir()
    for split, n in (("train", train), ("val", val)):
        source, lines = scenes.Scenes(split, n // 2), []
        for i in range(n):
            write_png(source.image(i), str(talks / f"{split}-{i}.png"))
            items = source.pairs[i // 2][i % 2]
            texts = [text for one in questions(items)[: 1 + i % 2] for text in (one.question, one.answer)]
            texts[0] = f"<image>\n{texts[0]}"
            lines.append({"image": f"{split}-{i}.png", "conversations": [
                {"from": ("human", "gpt")[k % 2], "value": text} for k, text in enumerate(texts)]})  # fmt: skip
        (talks / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return home
