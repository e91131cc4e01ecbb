"""Loads language models and adapters for every recipe that uses one.

This module decides dtype, pad token, end token, attention implementation and quantisation. Chat templates, ends of turns and reward heads
are in llm/models/loading.py.
"""

import json
import math
import os
import re
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from trainworthy.core.base import planning
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.shared import hub, smollm

# peft 0.21 reads a name that transformers 5.23 deprecates, for every adapter.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

Attention = Literal["auto", "sdpa", "eager", "flex_attention", "flash_attention_2"]


@dataclass
class LoRA:
    """Settings of recipes that may train adapters (Hu 2021) in place of all weights; a `Config` inherits them."""

    SEARCH_RANGES = "lora_rank=4,8,16,32,64"
    lora_rank: int = 8
    """Rank of the LoRA adapters; 0 trains all weights, in fp32. Usual peaks of the rate (--optim.lr) for a pretrained model: 1e-4 to
    2e-4 for adapters, 1e-5 to 2e-5 for all weights."""
    lora_alpha: int = 0
    """Adapters are scaled by alpha / rank. 0: the recipe's default, which is twice the rank (vlm/instruct: the rank)."""
    lora_dropout: float = 0.0
    """Dropout in front of the adapters. Recipes that compare two forwards of one text (DPO, GRPO) refuse it."""
    lora_target_modules: tuple[str, ...] = ()
    """Names of the layers that get adapters, such as q_proj v_proj. Empty: every linear layer but the head."""
    use_rslora: bool = False
    """Scale adapters by alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023)."""
    use_dora: bool = False
    """Train the length of each column of the weights separately from its direction (DoRA, Liu 2024)."""


# --------------------------------------------------------------------------------------------------------------- reading
@cache
def tokenizer(path: str, padding_side: str = "right") -> Any:
    """Return the tokenizer, with an end and a pad token. It is loaded once per process and never changed."""
    from transformers import AutoTokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if (
        planning.active
        and Path(path).is_dir()
        and not any((Path(path) / n).is_file() for n in hub.TOKENIZER.split(" or "))
    ):
        print(f"note   {path} has no tokenizer: {smollm.CALLED}'s is used instead")
        path = str(smollm.folder())
    found = AutoTokenizer.from_pretrained(path, **({"padding_side": "left"} if padding_side == "left" else {}))
    if found.eos_token_id is None:
        raise UserError(f"the tokenizer of {path} has no eos token", needed="the token that ends a turn, as eos_token")
    if found.pad_token_id is None:
        found.pad_token = found.eos_token  # masks and labels are made from lengths, so the eos of an answer stays one
    return found


def load(path: str, dtype: torch.dtype, *, dropout: bool = True, **how: Any) -> nn.Module:
    """Return the causal language model on the CPU. `how` is passed to from_pretrained (quantization_config, device_map). Weights are mapped from
    the file, so a second copy takes no memory until it is trained. Without `dropout` two forwards of a text agree."""
    from transformers import AutoModelForCausalLM

    model, _ = read(AutoModelForCausalLM, path, dtype, len(tokenizer(path)), **how)
    if not dropout:
        _without_dropout(model)
    return model


def read(kind: Any, path: str, dtype: torch.dtype, tokens: int = 0, **how: Any) -> tuple[nn.Module, list[str]]:
    """Return (a model of that class of transformers, the weights that its file lacks). Its embedding has at least `tokens` rows: those of tokens
    that were added after pretraining are new."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, found = kind.from_pretrained(path, dtype=dtype, output_loading_info=True, **how)
    # A plan may read with another tokenizer
    if model.get_input_embeddings().num_embeddings < tokens and not planning.active:
        model.rows_added = tokens - model.get_input_embeddings().num_embeddings
        model.resize_token_embeddings(tokens)
    # Loading forgets which parameters the architecture never trains, such as the bias of ERNIE's router.
    with torch.device("meta"):
        model.fixed = tuple(n for n, p in type(model)(model.config).named_parameters() if not p.requires_grad)
    for name in model.fixed:
        model.get_parameter(name).requires_grad_(False)
    return model, found["missing_keys"]


def _without_dropout(model: nn.Module) -> None:
    """Set every probability of dropout to 0: of its own modules, and of those that a block keeps as a number (`attention_dropout`)."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and name.endswith(("dropout", "layerdrop")):
                setattr(module, name, 0.0)


def context(config: Any) -> float:
    """Return how many tokens a model of this configuration reads at once; infinite where it says nothing (Mamba, BLOOM)."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each label, (B, T) of (B, T, V); of a negative one, that of token 0. One row at a time: in fp32, the
    whole vocabulary at every place of a batch can take more memory than the model."""
    rows = zip(logits, labels.clamp_min(0), strict=True)
    return torch.stack([row.float().log_softmax(-1).gather(-1, own[:, None]).squeeze(-1) for row, own in rows])


def kept_in(lora_rank: int, precision: str) -> torch.dtype:
    """Return the dtype of the weights: frozen ones may be bf16, but trained ones would lose small updates."""
    return torch.float32 if precision == "fp32" or not lora_rank else torch.bfloat16


# -------------------------------------------------------------------------------------------------------------- adapters
def adapted(model: nn.Module, lora: LoRA, *, head: str = "", alpha: int = 0, task: str | None = "CAUSAL_LM",
            exact: bool = False) -> nn.Module:  # fmt: skip
    """Return the model with adapters in fp32, and everything else frozen except a new `head`, given by name, which is fully trained and saved
    with the adapters. With rank 0 every weight trains. `alpha`: default of --lora-alpha; 0: twice the rank. `exact`: two forwards of
    a text must agree, so dropout is refused."""
    from peft import LoraConfig, get_peft_model

    if not lora.lora_rank:
        _idle(lora)
        return model
    if exact and lora.lora_dropout:
        raise UserError(f"--lora-dropout {lora.lora_dropout:g}: this recipe compares two forwards of one text", needed="--lora-dropout 0",
                        cause="dropout would be taken for a difference between the policy and its reference")  # fmt: skip
    if added := getattr(model, "rows_added", 0):
        raise UserError(f"{model.name_or_path}: the tokenizer has {added} tokens that the model lacks", got=f"--lora-rank {lora.lora_rank}",
                        needed="--lora-rank 0: adapters would leave what these tokens mean as it was drawn",
                        cause="tokens that were added after pretraining")  # fmt: skip
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if unknown := [t for t in lora.lora_target_modules if not any(f".{n}".endswith(f".{t}") for n in layers)]:
        names = sorted({name.rpartition(".")[2] for name in layers})
        raise UserError(
            f"--lora-target-modules: no layer is named {' or '.join(unknown)}", needed=f"some of {', '.join(names)}"
        )
    config = LoraConfig(
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha or alpha or 2 * lora.lora_rank,
        lora_dropout=lora.lora_dropout,
        target_modules=list(lora.lora_target_modules) or "all-linear",
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        **({"task_type": "SEQ_CLS", "modules_to_save": [head]} if head else {"task_type": task}),
    )
    return get_peft_model(model, config)


def rate_notes(lora: LoRA, peak: float, usual: str = "1e-5 to 2e-5") -> dict[str, str]:
    """What to say of a rate for adapters that all weights would get, and of adapters whose scale makes it another rate: Adam moves a weight
    by the rate whatever its gradient, and the scale multiplies what that does. `usual`: rates of all weights, from lowest to highest."""
    if not lora.lora_rank:
        return {} if peak <= 1e-4 else {
            "rate": f"all weights train at a peak of {peak:g}; usual for a pretrained model: {usual} (--optim.lr {usual.split()[-1]})"
        }  # fmt: skip
    scale = lora.lora_alpha / lora.lora_rank
    if lora.use_rslora or not lora.lora_alpha or 1 / 8 <= scale <= 16:
        return {}
    return {
        "adapters": f"scaled by {scale:.3g} (--lora-alpha {lora.lora_alpha:g}, rank {lora.lora_rank}); usual: 1 or 2, an alpha of once or twice "
        f"the rank (--lora-alpha {2 * lora.lora_rank})"
    }


def frozen(model: nn.Module, lora: LoRA) -> tuple[str, ...]:
    """Return name prefixes of what does not train on purpose: the base model under adapters, else what its architecture never trains."""
    return ("base_model.",) if lora.lora_rank else model.fixed


def _idle(lora: LoRA) -> None:
    """Raise if settings of adapters are given without adapters, because they would have no effect."""
    given = {"lora_alpha": lora.lora_alpha, "lora_dropout": lora.lora_dropout, "lora_target_modules": lora.lora_target_modules,
             "use_rslora": lora.use_rslora, "use_dora": lora.use_dora}  # fmt: skip
    if idle := [f"--{name.replace('_', '-')}" for name, value in given.items() if value]:
        raise UserError(
            f"{', '.join(idle)}: --lora-rank 0 trains all weights, without adapters", needed="--lora-rank above 0"
        )


def export(model: nn.Module, words: Any, folder: Path) -> None:
    """The model as `from_pretrained` of transformers reads it, or its trained adapter as peft's does, and its tokenizer."""
    from peft import PeftModel

    adapter = {"selected_adapters": ["default"]} if isinstance(model, PeftModel) else {}
    model.save_pretrained(folder, **adapter)
    words.save_pretrained(folder)


def merged(path: str, adapter: Path, *, base: nn.Module | None = None) -> nn.Module:
    """The model at `path` (or the `base` in its place) with an exported adapter merged into its weights; fp32: bf16 rounds off what
    adapters add to a weight."""
    from peft import PeftModel

    base = load(path, torch.float32) if base is None else base
    return PeftModel.from_pretrained(base, adapter).merge_and_unload()


@dataclass(frozen=True)
class Base:
    """The model that training began with, in words that mean something on another machine."""

    name: str
    """Its name on the hub, or that of its folder."""
    known: bool
    """It is a name on the hub."""
    license: str
    """As its model card has it; empty: unknown."""


def base(path: str) -> Base:
    """What `path` (a folder or a hub id) is called: a folder in a cache by its hub id, an export of ours by its run (its weights are no
    longer those of its own base)."""
    folder = Path(path)
    if folder.name.startswith(f"{smollm.BUILT}-"):
        return Base(smollm.CALLED, True, "apache-2.0")
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/", f"{path}/")
    called = f"{cached[1]}/{cached[2]}" if cached else path
    card = _header(folder if folder.is_dir() else _cached(called))
    license = card.get("license") if isinstance(card.get("license"), str) else ""
    if cached or not folder.is_dir():
        return Base(called, True, license)
    folder = folder.resolve()
    outer = folder.parent if folder.name == "merged" else folder
    if outer.name == "export":  # runs/llm-sft/20260101-120000-ab12/export: llm-sft-20260101-120000-ab12
        return Base("-".join(outer.parts[-3:-1]), False, license)
    return Base(folder.name, False, license)


def _cached(name: str) -> Path:
    """The folder of a hub model's card in the cache of this machine; one that is not there if it has none."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "README.md")
    return Path(found).parent if isinstance(found, str) else Path("/nowhere")


def _header(folder: Path) -> dict[str, Any]:
    """The YAML header of a model card; empty: there is none."""
    import yaml

    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
        found = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else {}
    except (OSError, IndexError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def complete_export(folder: Path, path: str, *, ends: list[int], pad: int, most: int) -> None:
    """Add to an export its generation settings (a whole model keeps the end tokens that it was saved with) and the base of its adapters."""
    from transformers import GenerationConfig

    for each in (folder, folder / "merged"):
        file = each / "generation_config.json"
        own = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        stops = ends if len(ends) > 1 else ends[0]
        if each.is_dir():
            how = GenerationConfig(eos_token_id=own or stops, pad_token_id=pad, max_new_tokens=most, do_sample=False)
            how.save_pretrained(each)
    name_base(folder, path)


def name_base(folder: Path, path: str) -> None:
    """Name the base of exported adapters so that others find it: by its name on the hub, not by its path in a cache, as peft does. A
    folder of the user's is named relative to the working directory if it is below it, else by its path."""
    file = folder / "adapter_config.json"
    if file.is_file():
        known, config, here = base(path), json.loads(file.read_text()), Path(path).resolve()
        own = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
        config["base_model_name_or_path"] = known.name if known.known else str(own)
        file.write_text(json.dumps(config, indent=2, sort_keys=True))


def exported(folder: Path, path: str, dtype: torch.dtype, **how: Any) -> nn.Module:
    """Load an export as a user does: an adapter on the base at `path`, or a whole model."""
    if not (folder / "adapter_config.json").is_file():
        return load(str(folder), dtype, **how)
    from peft import PeftModel

    return PeftModel.from_pretrained(load(path, dtype, **how), folder)


def model_card(
    path: str,
    lora_rank: int,
    data: str,
    *,
    chat: bool = True,
    system: str = "",
    arguments: dict[str, Any] | None = None,
    lead: str = "",
) -> dict[str, Any]:
    """The header of an export's model card (`core.Stage.model_card`), and how it is loaded and asked: in turns with a `system` turn
    and the template's `arguments`, or (no `chat`) with a text. `lead`: what the template puts before an answer."""
    known = base(path)
    hub = [
        one.strip().removeprefix("hub:").partition("*")[0].partition(":")[0]
        for one in data.split(",")
        if one.strip()[:4] == "hub:"
    ]
    hub = [name for name in hub if name.count("/") == 1]
    called = known.name if known.known else f"path/to/{known.name}"
    load = f'AutoModelForCausalLM.from_pretrained("{called if lora_rank else "export"}")'
    if lora_rank:
        load = f'PeftModel.from_pretrained({load}, "export")'
    turns = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": "..."}]
    how = "".join(f", {k}={v!r}" for k, v in {"add_generation_prompt": True, **(arguments or {}), "return_tensors": "pt",
                                              "return_dict": True}.items())  # fmt: skip
    ask = f"tokenizer.apply_chat_template({turns!r}{how})" if chat else 'tokenizer("...", return_tensors="pt")'
    usage = "\n".join([
        *["from peft import PeftModel"] * bool(lora_rank), "from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig", "",
        f"model = {load}", 'tokenizer = AutoTokenizer.from_pretrained("export")', f"inputs = {ask}",
        'out = model.generate(**inputs, generation_config=GenerationConfig.from_pretrained("export"))',
        'text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)',
        f"print(text.removeprefix({lead!r}).lstrip())" if lead else "print(text)",
    ])  # fmt: skip
    facts = [f"Base model: {known.name}" + ("." if known.known else ", a local folder: its name on the hub is not known here."),
             f"Licence of the base model: {known.license or 'not stated in its files; see its own model card'}.",
             "Weights: LoRA adapters; load them on the base model." if lora_rank else "Weights: the whole model."]  # fmt: skip
    if known.name == smollm.CALLED and Path(path).is_dir():
        facts.append(
            "Training saw the base model's weights rounded to four bits (a GGUF file of type Q4_1), not the hub's own."
        )
    sets = (one.strip().partition("*")[0] for one in data.split(","))
    source = ", ".join(one.removeprefix("hub:") if one.startswith("hub:") else Path(one).name for one in sets)
    return {
        **({"license": known.license} if known.license else {}), **named_base(known), **({"datasets": hub} if hub else {}),
        "library_name": "peft" if lora_rank else "transformers", "pipeline_tag": "text-generation",
        "usage": usage, "facts": facts, "data": source,
    }  # fmt: skip


def named_base(known: Base) -> dict[str, str]:
    """The base in a card's header: by its name on the hub, which links to it there. A local folder's name would link to somebody else's
    model, and stands in the card's title alone."""
    return {"base_model": known.name} if known.known else {"called": known.name}


# ------------------------------------------------------------------------------------------------------------- attention
def attend(model: nn.Module, how: str, device: torch.device) -> nn.Module:
    """The model with this attention implementation, where it can be trained with; `auto`: transformers' own choice."""
    from transformers.utils import is_flash_attn_2_available

    if how == "auto":
        return model
    if how in ("flex_attention", "flash_attention_2") and device.type != "cuda":
        raise UserError(f"--attention {how} has no backward on this device", got=device.type, needed="an accelerator",
                        next="--attention sdpa")  # fmt: skip
    if how == "flash_attention_2" and not is_flash_attn_2_available():
        raise UserError(f"--attention {how} needs the package 'flash-attn', which is not installed, or a newer device",
                        next="pip install flash-attn --no-build-isolation, or --attention flex_attention")  # fmt: skip
    try:
        model.set_attn_implementation(how)
    except ValueError as error:
        got = str(error).splitlines()[0][:200]
        raise UserError(f"--attention {how}: not for this model", got=got, needed="--attention eager") from None
    return model


def backends(model: nn.Module, device: torch.device) -> list[str]:
    """Attention implementations to ask, of those that the model has: those that run anywhere, what it uses, and on an accelerator flex
    attention."""
    used = model.config._attn_implementation
    found = dict.fromkeys(["sdpa", "eager", used, *["flex_attention"] * (device.type == "cuda")])
    return [one for one in found if one == used or _has_attention(model, one)]


def _has_attention(model: nn.Module, how: str) -> bool:
    used = model.config._attn_implementation
    try:
        model.set_attn_implementation(how)
    except ValueError:
        return False
    model.set_attn_implementation(used)
    return True


# ------------------------------------------------------------------------------------------------------------ generating
def generate(
    model: nn.Module, prompts: list[list[int]], *, pad: int, ends: list[int], most: int
) -> list[tuple[list[int], bool]]:
    """(tokens of the answer without its end, did it end by itself?) to each prompt, greedily. Padded left: every prompt ends where
    its answer begins."""
    width, device = max(map(len, prompts)), next(model.parameters()).device
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False, eos_token_id=ends,
                         pad_token_id=pad)[:, width:].tolist()  # fmt: skip
    at = [next((i for i, token in enumerate(row) if token in ends), None) for row in out]
    return [(row[:end], end is not None) for row, end in zip(out, at, strict=True)]
