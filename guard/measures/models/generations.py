"""Finds prompts that are padded at the end of a row and go to `generate` of a model that reads from left to right."""

from typing import Any

from torch import Tensor, nn
from trainworthy.core.base.verdict import Fault


class Generations:
    """Calls of `generate` of models of transformers."""

    def __init__(self) -> None:
        self.rows = self.padded = self.at_end = 0

    def note(self, model: nn.Module, *_: Any, attention_mask: Any = None, **__: Any) -> None:
        """Count the rows of one call whose mask ends with zeros. A decoder that reads an encoder's states may get such rows."""
        own = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        if own or not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
            return
        mask = attention_mask != 0
        self.rows += len(mask)
        self.padded += int((~mask.all(1)).sum())
        self.at_end += int((~mask[:, -1]).sum())

    def fault(self) -> Fault | None:
        """Return what is wrong with the prompts, and the cause."""
        if not self.at_end:
            return None
        return (
            f"{self.at_end:,} of {self.rows:,} prompts of generate() end with padding",
            "the tokenizer pads on the right: answers continue after pad tokens; padding_side='left' is meant for generation",
        )
