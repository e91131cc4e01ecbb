"""Causal language models of transformers at tiny size, by type: the sizes of their published configuration class are made small."""

from pathlib import Path

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.helpers import language

SIZES = {
    64: ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "lru_width", "sliding_window", "attention_window_size"),
    96: ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "block_ff_dim"),
    48: ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"),
    640: ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length"),
    16: ("head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head",
         "mamba_head_dim", "mamba_chunk_size", "chunk_size"),
    8: ("qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim", "mamba_d_state", "state_size", "ssm_state_size", "mamba_n_heads",
        "mamba_num_heads", "hidden_size_per_layer_input", "laurel_rank"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts",
        "linear_num_value_heads", "time_step_rank", "attention_heads"),
    2: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_key_value_heads", "num_kv_heads", "num_experts_per_tok",
        "num_experts_per_token", "moe_k", "moe_topk", "linear_num_key_heads", "mamba_expand", "expand"),
    1: ("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "mamba_n_groups", "n_groups"),
    0: ("num_kv_shared_layers",),
    300: ("vocab_size_per_layer_input",),
}  # fmt: skip
OPTIONAL = ("sliding_window", "n_inner", "head_dim", "num_key_value_heads", "q_lora_rank")  # None means without
MORE = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [1, 3]},
    "nemotron_h": {"num_hidden_layers": 4, "hybrid_override_pattern": "M*-E"},
    "qwen3_next": {"num_hidden_layers": 4},
    "recurrent_gemma": {"num_hidden_layers": 4, "block_types": ["recurrent", "recurrent", "attention"]},
}
"""What a hybrid of two kinds of layers needs, so that it has both."""
KINDS = [
    "apertus",
    "arcee",
    "bamba",
    "biogpt",
    "bitnet",
    "bloom",
    "codegen",
    "cohere2",
    "diffllama",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "falcon_h1",
    "falcon_mamba",
    "gemma",
    "gemma2",
    "gemma3n_text",
    "glm",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "helium",
    "jamba",
    "lfm2",
    "mamba",
    "minimax",
    "minimax_m2",
    "mistral",
    "mixtral",
    "mpt",
    "nemotron_h",
    "olmo",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phimoe",
    "qwen2_moe",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "seed_oss",
    "stablelm",
    "starcoder2",
    "xglm",
]


def config(kind: str) -> transformers.PretrainedConfig:
    """The configuration of this type of transformers, small, with the words of `language.tokenizer`."""
    words, cls = language.tokenizer(), CONFIG_MAPPING[kind]
    own = cls()
    sizes = {name: size for size, names in SIZES.items() for name in names if hasattr(own, name)}
    sizes = {k: v for k, v in sizes.items() if not (k in OPTIONAL and getattr(own, k) is None)}
    kept = {"layer_types": None} if "layer_types" in vars(own) else {}  # made anew for so many layers
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    return cls(vocab_size=len(words), tie_word_embeddings=False, **sizes | kept | MORE.get(kind, {}) | ids)


def write(kind: str, folder: Path) -> Path:
    """A folder as the hub has it: configuration, random weights, tokenizer, chat template."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config(kind)).save_pretrained(folder)
    language.tokenizer().save_pretrained(folder)
    return folder
