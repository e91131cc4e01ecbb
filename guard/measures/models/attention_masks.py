"""Masks of attention against the tokens that they hide: of models of transformers (1 is for tokens, 0 for padding), and those that torch's own
attention gets."""

from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.guard.hooks.trees import tensors

CALLS = 3  # calls with padding that must agree
DIFFERENT = 5  # ids at hidden places: padding is one id
LOW = -1e4  # what a mask of numbers adds to hidden places, at most
MOST = 200  # calls of torch's attention that are read


class Masks:
    """Calls whose mask hides one id, or everything but one."""

    def __init__(self) -> None:
        self.right = self.inverted = 0
        self.kept = self.turned = self.seen = 0  # the same of torch's attention

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Note a model's call with ids and a mask of their shape. Other models may give `attention_mask` another meaning."""
        mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids", args[0] if args else None)
        known = hasattr(getattr(getattr(module, "module", module), "config", None), "model_type")
        if not known or not isinstance(mask, Tensor) or not isinstance(ids, Tensor) or mask.shape != ids.shape:
            return
        right, inverted = of_tokens(ids, ~mask.bool())
        self.inverted += inverted
        self.right += right

    def keys(self, mask: Any, given: Any, *, keeps: bool) -> None:
        """Note a mask that torch's attention gets within a model's call with the arguments `given`, or the scores that a softmax gets. `keeps`:
        what is True is read (scaled dot products), and not hidden (key_padding_mask)."""
        if not isinstance(mask, Tensor) or self.seen >= MOST or (hidden := hidden_keys(mask, keeps=keeps)) is None:
            return
        self.seen += 1
        ids = [x for x in tensors(given) if x.dtype == torch.int64 and x.dim() == 2]
        found = [of_tokens(x, hidden) for x in ids if x.shape == hidden.shape]
        found += [of_tokens(x.t(), hidden) for x in ids if x.shape != hidden.shape and x.t().shape == hidden.shape]
        self.kept += any(right for right, _ in found)
        self.turned += any(inverted for _, inverted in found)

    def fault(self) -> tuple[str, str] | None:
        if self.inverted >= CALLS and not self.right:
            return (f"the attention mask hides all tokens but one id in all {self.inverted} calls with padding",
                    "the mask is inverted: models of transformers want 1 for tokens and 0 for padding; torch's own layers (key_padding_mask) want "
                    "True for padding")  # fmt: skip
        if self.turned >= CALLS and not self.kept:
            return (f"the attention mask hides all tokens but one id in all {self.turned} calls with padding",
                    "the mask is inverted: key_padding_mask of torch's layers wants True for padding; attn_mask of "
                    "scaled_dot_product_attention wants True for what may be read; masked_fill() fills where it is True")  # fmt: skip
        return None


def of_tokens(ids: Tensor, hidden: Tensor) -> tuple[bool, bool]:
    """Return whether a mask leaves several ids, and whether it leaves one and hides several."""
    if not bool(hidden.any()) or bool(hidden.all()):
        return False, False
    kept, away = ids[~hidden].unique().numel(), ids[hidden].unique().numel()
    return kept > 1, kept == 1 and away >= DIFFERENT


def hidden_keys(mask: Tensor, *, keeps: bool) -> Tensor | None:
    """Return which keys (N, S) no query of a sample may read; None: the mask, or the scores, are not of samples."""
    if mask.dim() not in ((3, 4) if keeps else (2,)):
        return None
    if mask.dtype == torch.bool:
        hidden = ~mask if keeps else mask
    elif mask.is_floating_point():
        hidden = mask <= LOW
    else:
        return None
    return hidden.flatten(1, -2).all(1) if keeps else hidden
