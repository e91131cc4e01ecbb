"""Loads the export of vlm/instruct as a user does, with torch and transformers alone. A gate runs this file in a fresh process."""

from pathlib import Path
from typing import Any

import torch


def load(folder: str) -> tuple[Any, Any]:
    """Return the vision encoder with its projector, and the language model."""
    from transformers import AutoModelForCausalLM

    eyes = torch.export.load(Path(folder) / "vision.pt2").module()
    return eyes, AutoModelForCausalLM.from_pretrained(Path(folder) / "language", dtype=torch.float32).eval()


def answer(loaded: tuple[Any, Any], sample: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the log-probabilities (tokens, vocabulary) of an answer's tokens, and the embeddings of its pictures (n, features, d).

    `ids`: the prompt (negative: the place of an image's feature) and the answer; `images`: (n, 3, side, side) in [0, 1]; `scored`: number of
    the answer's tokens.
    """
    eyes, language = loaded
    ids = torch.tensor(sample["ids"])
    row = language.get_input_embeddings()(ids.clamp_min(0))
    seen = torch.stack([eyes(one[None])[0] for one in sample["images"]]) if len(sample["images"]) else row[:0, None]
    row[ids < 0] = seen.flatten(0, 1).to(row.dtype)
    logits = language(inputs_embeds=row[None], use_cache=False).logits[0, -sample["scored"] - 1 : -1]
    return {"log-probabilities": logits.float().log_softmax(-1), "embeddings": seen}
