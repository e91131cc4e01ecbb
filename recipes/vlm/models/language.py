"""Language models, all in classes of transformers, so that one code path trains, saves and loads them. `words` is the small one of words.py;
any other name is the hub's, or a folder in its layout."""

import json
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from trainworthy.recipes.llm.models import loading
from trainworthy.recipes.shared import hub, language_models
from trainworthy.recipes.vlm.models import words


def load(name: str, lora: language_models.LoRA) -> nn.Module:
    """Return a causal language model with the adapters of `lora`."""
    model = language_models.load(path(name), torch.float32)
    return language_models.adapted(model, lora, alpha=lora.lora_rank, task=None)


def tokenizer(name: str, chat_template: str = "", eos_token: str = "") -> Any:
    """Return its tokenizer; if it has or gets a chat template, also how its turns end."""
    found = language_models.tokenizer(path(name))
    if not (chat_template or eos_token or found.chat_template):
        return found
    return loading.tokenizer(path(name), chat_template, eos_token)


def path(name: str) -> str:
    """Return what `from_pretrained` reads."""
    return str(words.folder()) if name == "words" else hub.locate(name, "--language", packaged="words")


def weights(name: str, model: nn.Module) -> dict[str, Tensor]:
    """Return the file of our own model by the names of `model`, which adapters change; None for hub models."""
    file = load_file(words.folder() / "model.safetensors") if name == "words" else {}
    plain = {k: k.removeprefix("base_model.model.").replace(".base_layer", "") for k in model.state_dict()}
    return {k: file[v] for k, v in plain.items() if v in file}


def told(name: str) -> str:
    """Return its source, and its own accuracy."""
    if name != "words":
        return name
    share, seconds = (json.loads((words.folder() / f"{n}.json").read_text()) for n in ("result", "seconds"))
    return f"answers {share:.1%} of the questions about scenes described in words; built once, {seconds:.0f} s"
