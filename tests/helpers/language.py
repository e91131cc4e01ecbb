"""A language model of 60,000 parameters as `from_pretrained` reads it: bytes for tokens, a chat template, random weights."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def tokenizer(template: bool = True) -> Any:
    """One token for each byte, and the three of SmolLM2's chats; the end of a turn is also the pad."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    one = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*special, *letters])}, merges=[]))
    one.pre_tokenizer, one.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found = PreTrainedTokenizerFast(
        tokenizer_object=one, unk_token=special[0], bos_token=special[1], eos_token=special[2], pad_token=special[2]
    )
    found.chat_template = TEMPLATE if template else None
    return found


SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model(**settings: Any) -> Any:
    """Two layers of Llama, from torch's present seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    return LlamaForCausalLM(
        LlamaConfig(tie_word_embeddings=True, **{"vocab_size": len(tokenizer()), **SIZES, **ids, **settings})
    )


def qwen(folder: Path, seed: int = 0) -> Path:
    """A folder as people have it from the hub: Qwen3's architecture, chat template and end of a turn, 67,000 random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.llm import chat_models

    words = chat_models.tokenizer("qwen3")
    torch.manual_seed(seed)
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(words), head_dim=12, tie_word_embeddings=True, max_position_embeddings=512, **SIZES, **ids
        )
    ).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def write(folder: Path, *, template: bool = True, seed: int = 0, **settings: Any) -> Path:
    """Both, as a folder."""
    torch.manual_seed(seed)
    model(**settings).save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder
