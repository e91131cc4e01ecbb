"""Loads an exported language model as a user does, with transformers and peft alone. Gates run this file in a fresh process."""

from functools import cache
from pathlib import Path
from typing import Any

import torch


def load(folder: str) -> Path:
    """Return the folder: an adapter's base comes with the sample."""
    return Path(folder)


@cache
def model(folder: Path, base: str) -> Any:
    """Return a whole model, or an adapter on its base (the name in its file may be one of the hub)."""
    from transformers import AutoModelForCausalLM

    if not (folder / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder).eval()


def answer(folder: Path, sample: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return log-probabilities (tokens, vocabulary) of the next token, and the ids of a text."""
    from transformers import AutoTokenizer

    logits = model(folder, sample["base"])(input_ids=torch.tensor([sample["ids"]]), use_cache=False).logits[0]
    ids = AutoTokenizer.from_pretrained(folder)(sample["text"])["input_ids"]
    return {"log-probabilities": logits.float().log_softmax(-1), "tokens": torch.tensor(ids)}
