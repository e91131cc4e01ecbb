"""Chat models by name, folder or hub id: templates, ends of turns, reward heads. What all language models share is in
recipes/shared/language_models.py."""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trainworthy.core.base.machine import DEVICES
from trainworthy.recipes.llm.data import templates
from trainworthy.recipes.shared import hub, language_models, smollm
from trainworthy.recipes.shared.language_models import Attention as Attention  # "as": for those who import this module
from trainworthy.recipes.shared.language_models import LoRA as LoRA
from trainworthy.recipes.shared.language_models import adapted as adapted
from trainworthy.recipes.shared.language_models import attend as attend
from trainworthy.recipes.shared.language_models import backends as backends
from trainworthy.recipes.shared.language_models import complete_export as complete_export
from trainworthy.recipes.shared.language_models import export as export
from trainworthy.recipes.shared.language_models import exported as exported
from trainworthy.recipes.shared.language_models import frozen as frozen
from trainworthy.recipes.shared.language_models import generate as generate
from trainworthy.recipes.shared.language_models import kept_in as kept_in
from trainworthy.recipes.shared.language_models import load as load
from trainworthy.recipes.shared.language_models import log_probs as log_probs
from trainworthy.recipes.shared.language_models import merged as merged
from trainworthy.recipes.shared.language_models import model_card as model_card
from trainworthy.recipes.shared.language_models import name_base as name_base
from trainworthy.recipes.shared.language_models import rate_notes as rate_notes
from trainworthy.recipes.shared.language_models import tokenizer as plain

from trainworthy import core


def locate(name: str) -> str:
    """`smollm2`, a folder or a hub id as what `from_pretrained` takes."""
    return str(smollm.folder()) if name == "smollm2" else hub.locate(name, "--model", packaged="smollm2")


@cache
def tokenizer(path: str, chat_template: str = "", eos_token: str = "") -> Any:
    """The tokenizer, with a chat template (its own, or the one named) whose answers end with a token."""
    found = plain(path)
    if chat_template or eos_token:
        found = copy.deepcopy(found)
    if chat_template:
        found.chat_template = templates.read(chat_template)
    if eos_token:
        if eos_token not in found.get_vocab():
            raise core.UserError(f"--eos-token {eos_token}: no token of {path}", needed="a token of its vocabulary",
                                 got=", ".join(found.all_special_tokens[:12]))  # fmt: skip
        found.eos_token = eos_token
    if found.chat_template is None:
        raise core.UserError(f"the tokenizer of {path} has no chat template", needed="a chat_template", cause="a base model",
                             next="take its instruct version, or --chat-template FILE")  # fmt: skip
    if set_date := templates.dated(found.chat_template):
        found = copy.deepcopy(found)
        found.chat_template = set_date
    form = templates.form(found)
    if eos_token and form.end not in ("", eos_token) and templates.shows_end(found, form):
        raise core.UserError(f"--eos-token {eos_token}: the chat template ends answers with {form.end}", needed="no --eos-token, or "
                             "--chat-template FILE with one that ends answers otherwise",
                             cause="the token is only added where a template ends no answer")  # fmt: skip
    if not form.end:
        raise core.UserError(
            f"the chat template of {path} does not end an answer", got=form.fault, needed="a token that ends a turn",
            cause=templates.foreign(found) or "a template for generation alone",
            next="--chat-template FILE with one for training, or --eos-token TOKEN",
        )  # fmt: skip
    return found


def context(path: str) -> float:
    """Tokens that the model was made to read at once; infinite where its configuration says nothing."""
    from transformers import AutoConfig

    return language_models.context(AutoConfig.from_pretrained(path))


def fits(path: str, max_length: int) -> None:
    """Check that the model supports this length. It was never trained beyond its positions, and no library warns."""
    if max_length > (limit := context(path)):
        raise core.UserError(f"--data.max-length {max_length}: longer than the model's context", got=f"{path}: {limit} positions",
                             needed=f"at most {limit}", next=f"--data.max-length {limit}")  # fmt: skip


@cache
def scoring_tokenizer(path: str, chat_template: str = "", eos_token: str = "") -> Any:
    """The tokenizer with a pad that ends no answer. A sequence-classification head is read at the last token that is not the pad:
    where the pad is the end of a turn (SmolLM2, and whoever sets pad = eos), at the one before it."""
    found = copy.deepcopy(tokenizer(path, chat_template, eos_token))
    ends = {found.eos_token, templates.form(found).end}
    if found.pad_token in ends:
        others = [t for t in (found.unk_token, *found.all_special_tokens) if t not in (None, *ends)]
        if not others:
            raise core.UserError(f"the tokenizer of {path} has no special token but its eos", needed="a separate pad token",
                                 cause="pad = eos: the reward would be read before the end of the answer")  # fmt: skip
        found.pad_token = others[0]
    return found


def without_positions(model: nn.Module) -> str:
    """The likely cause, with its line's end, of a leak between packed texts in a model that takes no position ids; else empty."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        return ""
    return f"{type(model).__name__} takes no position ids, and so cannot separate texts that share a row\n"


def ends_with(model: nn.Module, ends: list[int]) -> None:
    """What is exported stops where a turn ends: `generate` reads these ids from the model's own files."""
    known = model.generation_config.eos_token_id
    known = known if isinstance(known, list) else [known]
    if missing := [i for i in ends if i not in known]:
        model.generation_config.eos_token_id = [*(i for i in known if i is not None), *missing]


def scorer(path: str, dtype: torch.dtype, tokens: Any = None) -> nn.Module:
    """The model with a head of one number in place of its words, fp32, on the CPU. A new one is zero: every text the same."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    if type(config := AutoConfig.from_pretrained(path)) not in AutoModelForSequenceClassification._model_mapping:
        raise core.UserError(f"{path}: transformers has no sequence classifier of this kind, whose head would be the reward's",
                             got=f"a model of type {config.model_type}", needed="llama, qwen3, gemma3, mistral, phi3, gpt_oss, ...",
                             next="--model with one of another kind; llm/dpo learns preferences without a reward model")  # fmt: skip
    tokens = tokens or scoring_tokenizer(path)
    model, missing = language_models.read(AutoModelForSequenceClassification, path, dtype, len(tokens), num_labels=1)
    model.config.get_text_config().pad_token_id = tokens.pad_token_id
    model.score.float()
    if "score.weight" in missing:
        nn.init.zeros_(model.score.weight)
    return model


def merged_scorer(path: str, adapter: Path, dtype: torch.dtype, tokens: Any) -> nn.Module:
    """The model at `path`, its weights as training had them (`dtype`), exported adapters merged into them, and their head; fp32."""
    from peft import PeftModel

    return PeftModel.from_pretrained(scorer(path, dtype, tokens).float(), adapter).merge_and_unload()


def score_what_counts() -> None:
    """TRL's fused head reads logits at labelled positions alone where Triton runs, at every position elsewhere: nine in ten for
    nothing here, and a third of a step on a CPU. The same sums, by the path it takes on an accelerator."""
    from trl.trainer import utils

    utils._use_triton = lambda device: device.type in ("cpu", "cuda", "xpu")  # it decides nothing else there


def from_file(model: nn.Module, path: str) -> dict[str, torch.Tensor]:
    """What the file at `path` says of the weights of `model`, by the model's own names: read apart from `from_pretrained`, unless the file
    has other names (Pythia, mixtures of experts), which transformers translates. Rows of tokens that were added after pretraining are
    the model's: the file says nothing of them."""
    from safetensors.torch import load_file

    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, local_files_only=True, allow_patterns="*.safetensors"))
    tensors = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    names = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): name for name, _ in model.named_parameters()
    }
    if tensors.keys() - names.keys() and any(
        n not in tensors for n in names if not ("lora_" in n or n.startswith("score."))
    ):
        tensors = _translated(model, path)
    found = {own: tensors[name] for name, own in names.items() if name in tensors}
    rows, own = model.get_input_embeddings().num_embeddings, dict(model.named_parameters())
    short = {n: t for n, t in found.items() if len(t) < len(own[n]) == rows}
    return found | {n: torch.cat([t, own[n].detach()[len(t) :].to(t)]) for n, t in short.items()}


def _translated(model: nn.Module, path: str) -> dict[str, torch.Tensor]:
    """The weights of a file by the names of the architecture, without those that it lacks."""
    bare = model.get_base_model() if hasattr(model, "peft_config") else model
    read, found = type(bare).from_pretrained(path, dtype="auto", output_loading_info=True)
    return {n: t.detach() for n, t in read.named_parameters() if n not in found["missing_keys"]}


@contextmanager
def exchanged(model: nn.Module, other: dict[str, torch.Tensor]) -> Iterator[None]:
    """Other values for some parameters inside, their own again afterwards."""
    own = {n: p for n, p in model.named_parameters() if n in other}
    kept = {n: p.detach().clone() for n, p in own.items()}
    try:
        for n, p in own.items():
            p.data.copy_(other[n])
        yield
    finally:
        for n, p in own.items():
            p.data.copy_(kept[n])


def fitted(config: Any, cfg: Any) -> Any:
    """The configuration of `--model` for rows of `--data.context` tokens: it has as many positions, or `--rope` scales those it has."""
    own, rows = language_models.context(config), cfg.data.context
    if cfg.rope != "default":
        if any(isinstance(v, dict) for v in (getattr(config, "rope_parameters", None) or {"": {}}).values()):
            raise core.UserError(f"--rope {cfg.rope}: not for --model {cfg.model}", got=f"rope_parameters {config.rope_parameters}",
                                 needed="rotary positions of one kind for all layers")  # fmt: skip
        config.max_position_embeddings = rows
        extend(config, cfg.rope, cfg.original_context or own)
    elif own < rows:
        raise core.UserError(f"--model {cfg.model} reads fewer tokens than a row has", got=own, needed=f"{rows} (--data.context)",
                             next=f"--rope yarn, which scales its {own} positions")  # fmt: skip
    return config


def extend(config: Any, rope: str, learnt: int) -> None:
    """Positions up to the context of `config` by those up to `learnt` tokens, scaled as `rope` says; in place."""
    context = config.max_position_embeddings
    if not 0 < learnt < context:
        raise core.UserError(f"--rope {rope} extends a context", got=f"--original-context {learnt}, --data.context {context}",
                             needed="--original-context: the shorter context of the run in --init-from")  # fmt: skip
    scaled = {"rope_type": rope, "factor": context / learnt, "original_max_position_embeddings": learnt}
    config.rope_parameters |= scaled
    if rope == "dynamic":  # takes this for the original context, whatever stands above
        config.max_position_embeddings = learnt


def flops(model: nn.Module, context: int) -> float:
    """Floating-point operations that a trained token costs: six for each weight that multiplies, 12 x layers x width x context for
    attention over a whole row (PaLM, Chowdhery 2022, appendix B). Rows of short packed documents need less."""
    config, embedding = model.config.get_text_config(), model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    weights = sum(p.numel() for p in model.parameters()) - (0 if tied else embedding.numel())
    heads = getattr(config, "num_attention_heads", 0)  # Mamba and RWKV have none
    width = heads and heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 6 * weights + 12 * config.num_hidden_layers * width * context


def utilisation(achieved: float, device: torch.device) -> dict[str, float]:
    """Tera-operations per second and device, and their share of what the device can do at most (MFU) where that is known."""
    name = torch.cuda.get_device_name(device).replace(" ", "") if device.type == "cuda" else ""
    peak = next((peak for known, (_, peak, _) in DEVICES.items() if known in name), None)
    return {"tflops_per_sec": achieved / 1e12} | ({"mfu": achieved / peak} if peak else {})
