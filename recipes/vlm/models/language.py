"""Language models, all in classes of transformers, so that one code path trains, saves and loads them. `words` is the model of
small_language_model.py; any other name is the hub's, or a folder in its layout."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.llm.models import loading
from trainworthy.recipes.shared import hub, language_models
from trainworthy.recipes.vlm.data import folders
from trainworthy.recipes.vlm.models import small_language_model

UNKNOWN, LOOKED_AT = 0.01, 2000  # share of answers that may have a word without a token; samples that are looked at
USAGE = """import sys

sys.path.insert(0, "export")  # the run's folder export/, wherever it is now
import use  # export/use.py needs torch, torchvision, transformers and Pillow

ask = use.open_export("export")
print(ask("picture.jpg", "What is in the picture?"))"""


def load(name: str, lora: language_models.LoRA) -> nn.Module:
    """Return a causal language model with the adapters of `lora`."""
    model = language_models.load(path(name), torch.float32)
    return language_models.adapted(model, lora, alpha=lora.lora_rank, task=None)


def whole(name: str) -> nn.Module:
    """Return a causal language model as it is in its file."""
    return language_models.load(path(name), torch.float32)


def tokenizer(name: str, chat_template: str = "", eos_token: str = "") -> Any:
    """Return its tokenizer; if it has or gets a chat template, also how its turns end."""
    found = language_models.tokenizer(path(name))
    if not (chat_template or eos_token or found.chat_template):
        return found
    return loading.tokenizer(path(name), chat_template, eos_token)


def knowing(words: tuple[str, str, str], source: Any) -> Any:
    """Return the tokenizer of `words` (see `tokenizer`). Raise a UserError if it has no tokens for words of the answers of `source`."""
    found = tokenizer(*words)
    assert_known(words[0], found, source)
    return found


def assert_readable(cfg: Any) -> None:
    """Raise the errors of the user's own lines and answers before a model is trained, fetched or loaded for them, which can take minutes."""
    data = cfg.data
    if data.path == "scenes":
        return
    source = folders.load(data.path, "train", data.val, data.max_bad, data.images)
    if cfg.language == "words" and not cfg.model:
        assert_known(cfg.language, small_language_model.vocabulary(), source)


def assert_known(name: str, tokenizer: Any, source: Any) -> None:
    """Raise a UserError if the tokenizer of the model `name` has no tokens for words of the answers of `source`: they would be learnt as its
    unknown token."""
    unknown, step = {tokenizer.pad_token_id, tokenizer.unk_token_id} - {None}, -(-len(source) // LOOKED_AT)
    answers = [q.answer for i in range(0, len(source), step) for q in source.questions(i)]
    lost = [text for text in answers if unknown & set(tokenizer.encode(text, add_special_tokens=False))]
    if len(lost) > UNKNOWN * len(answers):
        only = "; it knows the words of its own scenes only" if name == "words" else ""
        raise UserError(f"--language {name} has no tokens for words of the answers{only}",
                        got=f"{len(lost):,} of {len(answers):,} answers, the first: {lost[0]!r}",
                        needed="a language model whose tokenizer knows them",
                        next="--language NAME_OR_FOLDER of a causal language model (--preset full has one)")  # fmt: skip


def folder(name: str) -> str:
    """Return a model's folder with its absolute path, so that a run can be resumed and asked from anywhere; another name unchanged."""
    return name if name in ("", "words", "cells") else hub.folder(name)


def path(name: str) -> str:
    """Return what `from_pretrained` reads."""
    return str(small_language_model.folder()) if name == "words" else hub.locate(name, "--language", packaged="words")


def weights(name: str, model: nn.Module) -> dict[str, Tensor]:
    """Return the file of our own model by the names of `model`, which adapters change; None for hub models."""
    file = load_file(small_language_model.folder() / "model.safetensors") if name == "words" else {}
    plain = {k: k.removeprefix("base_model.model.").replace(".base_layer", "") for k in model.state_dict()}
    return {k: file[v] for k, v in plain.items() if v in file}


def notes(cfg: Any, encoder: str, chat: bool) -> dict[str, str]:
    """Return notes for the report on both towers; of a model of the hub there are none."""
    turns = ", in the turns of its chat template" * chat
    return {} if cfg.model else {"vision encoder": encoder, "language model": describe(cfg.language) + turns}


def card(cfg: Any) -> dict[str, Any]:
    """Return the header of an export's model card, and what it says of the parts that the model was made of."""
    name = cfg.model or cfg.language
    known = None if name == "words" else language_models.base(name)
    licence = (known and known.license) or "not stated in its files; see its own model card"
    facts = [
        f"Base model: {known.name}. Its licence: {licence}."
        if known
        else "Language model: `words`, trained by this project."
    ]
    facts += (
        []
        if cfg.model
        else [f"Vision encoder: {Path(cfg.encoder).name}, with its own licence. `config.json` says how a row is made."]
    )
    source = "pictures of digits, made here" if cfg.data.path == "scenes" else Path(cfg.data.path).name
    known_header = (
        {**language_models.named_base(known), **({"license": known.license} if known.license else {})} if known else {}
    )
    return known_header | {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "facts": facts,
        "data": source,
        "usage": USAGE,
        "script": Path(__file__).with_name("use_export.py"),
    }


def describe(name: str) -> str:
    """Return its source, and its own accuracy."""
    if name != "words":
        return name
    share, seconds = (
        json.loads((small_language_model.folder() / f"{n}.json").read_text()) for n in ("result", "seconds")
    )
    if share is None:
        return "`words`, which the first check or run trains once, in 1 to 2 min of CPU time"
    return f"answers {share:.1%} of the questions about scenes described in words; built once, {seconds:.0f} s"
