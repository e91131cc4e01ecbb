"""The small language model: four layers, trained on text descriptions of scenes with the questions that are asked about images.

A built asset in the hub's layout: trained on first use, cached under a hash of what it depends on. It is trained without images.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base import planning
from trainworthy.core.base.errors import UserError
from trainworthy.core.data import assets
from trainworthy.recipes.shared import composites
from trainworthy.recipes.vlm.data import rows, scenes
from trainworthy.recipes.vlm.data.rows import Question
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WIDTH, LAYERS, HEADS = 128, 4, 4
STEPS, BATCH, PEAK = 400, 32, 2e-3
NEEDED = 0.95  # a language model that cannot answer about described scenes cannot answer about seen ones


@cache
def folder() -> Path:
    """Return the folder of the small language model in the hub's layout; trained on first use, untrained to describe data."""
    sources = [scenes.__file__, rows.__file__, composites.__file__, __file__]
    name, make, takes = ("vlm-words", build, "1 to 2 min")
    if planning.is_describing_data:
        name, make, takes = ("vlm-words-untrained", save_untrained, "")
    return assets.built(name, {"torch": torch.__version__}, make, sources=sources, takes=takes)


def save_untrained(target: Path) -> None:
    """Save the model with random weights: its tokenizer and sizes are all that a description of data reads."""
    words = vocabulary()
    untrained(words).save_pretrained(target)
    words.save_pretrained(target)
    (target / "result.json").write_text("null")


def untrained(words: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the model with random weights."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(words), hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=256, bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id))  # fmt: skip


def build(target: Path) -> None:
    """Train on described scenes with the questions that are asked about images; evaluate on other scenes."""
    with torch.random.fork_rng(devices=[]):  # callers that need randomness are seeded already
        torch.manual_seed(0)
        words = vocabulary()
        model = untrained(words)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, STEPS, pct_start=0.1)
        for step in range(STEPS):
            batch = stories(words, "train", range(step * BATCH, (step + 1) * BATCH))
            logits = rows.answer(model, model.get_input_embeddings()(batch["ids"]), batch)
            loss = rows.nll(logits, batch["labels"]) / rows.scored(batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        share = measure(model.eval(), words)
    if share < NEEDED:
        raise UserError("the language model did not learn to answer", got=f"{share:.1%} right", needed=f"{NEEDED:.0%}")
    model.save_pretrained(target)
    words.save_pretrained(target)
    (target / "result.json").write_text(json.dumps(share))


def vocabulary() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(scenes.WORDS)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def stories(words: Any, split: str, indices: Sequence[int]) -> dict[str, Tensor]:
    """Return rows whose prefix is the description of the scene."""
    found = []
    for index in indices:
        items, _ = scenes.draw(composites.generator(split, "story", index), split)
        items = scenes.by_x(items)
        questions = [
            Question(i, q, a)
            for i, (q, a) in enumerate(zip(scenes.QUESTIONS.values(), scenes.answers(items), strict=True))
        ]
        prefix = [words.bos_token_id, *rows.tokens(words, scenes.describe(items))]
        row = rows.pack(words, prefix, questions)
        found.append(row | {"kind": torch.arange(len(questions))})
    return rows.together(found) | {"kind": torch.stack([r["kind"] for r in found])}


@torch.no_grad()
def measure(model: nn.Module, words: Any, n: int = 500) -> float:
    """Return the accuracy on scenes of the other split."""
    batch = stories(words, "val", range(n))
    return (
        rows.right(rows.answer(model, model.get_input_embeddings()(batch["ids"]), batch), batch).double().mean().item()
    )
