"""The special tokens that models publish with the chat templates which TRL ships, on the tests' tokenizer of bytes."""

import copy
import re
from typing import Any

from trainworthy.recipes.llm.data import templates

from tests.helpers import language

EOS = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "deepseek": "<｜end▁of▁sentence｜>", "diffusion_gemma": "<eos>", "gemma": "<eos>",
    "glm4moe": "<|endoftext|>", "gptoss": "<|return|>", "idefics3": "<|end_of_text|>", "lfm2": "<|im_end|>", "llama3": "<|eot_id|>",
    "llava_next": "</s>", "muse_glimmer": "<|eot|>", "nemotron_3": "<|im_end|>", "phi3": "<|endoftext|>", "qwen": "<|im_end|>",
    "smolvlm": "<end_of_utterance>",
}  # fmt: skip
"""`eos_token` of each family's tokenizer_config.json; where a turn ends otherwise, the template alone says so."""
BOS = {"cohere": "<BOS_TOKEN>", "deepseek": "<｜begin▁of▁sentence｜>", "gemma": "<bos>", "diffusion_gemma": "<bos>", "phi3": "<s>",
       "llama3": "<|begin_of_text|>", "lfm2": "<|startoftext|>", "llava_next": "<s>", "gptoss": "<|startoftext|>"}  # fmt: skip
MARK = re.compile(
    r"<[|｜][^<>'\" ]+[|｜]>|<\|?(?:start_of_turn|end_of_turn|turn|channel|tool_call|tool_response|tool|think|image|sop)"
    r"\|?>|<end_of_utterance>|</?think>|</?tool_call>|</?tool_response>|</s>|\[gMASK\]|\[/?INST\]"
)
"""What the templates write that is one token of their models."""


def names() -> list[str]:
    """Every template that TRL ships."""
    return sorted(p.stem for p in templates.packaged().glob("*.jinja"))


def tokenizer(name: str) -> Any:
    """The tests' tokenizer with the tokens and the template of one of these models."""
    found, text = copy.deepcopy(language.tokenizer()), templates.read(f"trl:{name}")

    def of(table: dict[str, str]) -> str | None:
        return next((token for family, token in table.items() if name.startswith(family)), None)

    tokens = {*MARK.findall(text), of(EOS), of(BOS)} - {None}
    found.add_tokens(sorted(tokens), special_tokens=True)
    found.eos_token, found.bos_token, found.pad_token = of(EOS), of(BOS) or found.bos_token, "<|im_start|>"
    found.chat_template = text
    return found
