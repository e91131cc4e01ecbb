"""The loss and dropout functions, differences and likelihoods of torch, as events."""

import functools
import inspect
import itertools
import linecache
import random
import re
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import distributions, nn
from trainworthy.guard.hooks.patches import replace

LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy", "kl_div")
COMPARED = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "triplet_margin_loss", "cosine_embedding_loss",
            "triplet_margin_with_distance_loss", "margin_ranking_loss")  # fmt: skip
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def losses(seen: Any) -> None:
    def loss(original: Callable, name: str) -> Callable:
        def run(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(input, target, *args, **kwargs)
            if not seen.busy:
                seen.loss(name, input, target, out, {**dict(zip(("weight",), args, strict=False)), **kwargs})
            return out

        return run

    def ctc(original: Callable) -> Callable:
        def run(log_probs: Any, targets: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(log_probs, targets, *args, **kwargs)
            if not seen.busy:
                blank = args[2] if len(args) > 2 else kwargs.get("blank", 0)
                seen.loss("ctc_loss", log_probs, targets, out, {"blank": blank})
            return out

        return run

    def compared(original: Callable, name: str) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            if not seen.busy:
                given = (*args, *(v for k, v in kwargs.items() if k != "weight"))
                tensors = [x for x in given if isinstance(x, torch.Tensor)]
                seen.compared(name, tensors)
                if len(tensors) > 1 and (name.endswith("1_loss") or name in ("mse_loss", "huber_loss")):
                    seen.regressed(*tensors[:2], name)
                    if tensors[0].shape != tensors[1].shape:
                        seen.difference(*tensors[:2], out, name)
            return out

        return run

    replace(F, "ctc_loss", ctc)
    for name in LOSSES:
        replace(F, name, functools.partial(loss, name=name))
    for name in COMPARED:
        replace(F, name, functools.partial(compared, name=name))


ALWAYS_ON = re.compile(r"training\s*=\s*True\b|,\s*True\s*[,)]")


@functools.lru_cache(1024)
def always_on(code: CodeType, instruction: int) -> bool:
    """Return whether `training=True` is written in this call of dropout: it is meant to stay on (Tacotron's prenet, Monte-Carlo dropout).
    Without an argument, True is only the default."""
    first, last, _, _ = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    lines = range(first, last + 1) if first and last else ()
    return bool(ALWAYS_ON.search("".join(linecache.getline(code.co_filename, i) for i in lines)))


def layers(seen: Any) -> None:
    def normalize(original: Callable) -> Callable:
        def run(input: Any, p: float = 2.0, dim: int = 1, *args: Any, **kwargs: Any) -> Any:
            if not seen.busy:
                seen.evidence.normalized(input, dim)
            return original(input, p, dim, *args, **kwargs)

        return run

    def dropout(original: Callable) -> Callable:
        def run(input: Any, p: float = 0.5, training: bool = True, *args: Any, **kwargs: Any) -> Any:
            if training and p:
                caller: Any = inspect.currentframe().f_back  # type: ignore[union-attr]
                seen.drops += not always_on(caller.f_code, caller.f_lasti)
                seen.dropout_called(p, caller)
            return original(input, p, training, *args, **kwargs)

        return run

    def made(original: Callable) -> Callable:
        def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            seen.dropout_made(getattr(self, "p", getattr(self, "dropout", None)), inspect.currentframe())

        return __init__

    def embedding(original: Callable) -> Callable:
        def run(input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not seen.busy:
                seen.evidence.looked_up(input, weight)
            return original(input, weight, *args, **kwargs)

        return run

    def sigmoid(original: Callable) -> Callable:
        def run(input: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() and not seen.busy:
                seen.evidence.squashed(input)
            return original(input, *args, **kwargs)

        return run

    for cls in (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention):
        replace(cls, "__init__", made)
    replace(F, "normalize", normalize)
    replace(F, "embedding", embedding)
    for owner in (torch, torch.Tensor, F):
        replace(owner, "sigmoid", sigmoid)
    for name in DROPOUTS:
        replace(F, name, dropout)


def attention(seen: Any) -> None:
    def masked(original: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0):
                seen.drops += 1
            if not seen.busy:
                seen.attended(kwargs.get("attn_mask", args[3] if len(args) > 3 else None), keeps=True)
            return original(*args, **kwargs)

        return run

    def padded(original: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not seen.busy:
                seen.attended(kwargs.get("key_padding_mask"), keeps=False)
            return original(*args, **kwargs)

        return run

    replace(F, "scaled_dot_product_attention", masked)
    replace(F, "multi_head_attention_forward", padded)


def sequences(seen: Any) -> None:
    def pack(original: Callable) -> Callable:
        def run(input: Any, lengths: Any, batch_first: bool = False, *args: Any, **kwargs: Any) -> Any:
            out = original(input, lengths, batch_first, *args, **kwargs)
            if not seen.busy:
                seen.evidence.pack(input, batch_first, out)
            return out

        return run

    replace(nn.utils.rnn, "pack_padded_sequence", pack)


def differences(seen: Any) -> None:
    def difference(original: Callable) -> Callable:
        def run(self: torch.Tensor, other: Any) -> Any:
            out = original(self, other)
            if isinstance(other, torch.Tensor) and not seen.busy:
                if self.dim() and self.shape != other.shape:
                    seen.difference(self, other, out)
                if self.requires_grad != other.requires_grad and self.dim():
                    seen.regressed(self, other)
            return out

        return run

    for name in ("__sub__", "__rsub__"):
        replace(torch.Tensor, name, difference)


def likelihoods(seen: Any) -> None:
    def probability(original: Callable) -> Callable:
        def run(self: Any, value: Any) -> Any:
            out = original(self, value)
            if not seen.busy and torch.is_grad_enabled():
                seen.log_prob(out, value)
            return out

        return run

    def logarithms(original: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            if not seen.busy:
                seen.log_softmax(out)
            return out

        return run

    def draw(original: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            if not seen.busy:
                seen.evidence.drew(out)
            return out

        return run

    def seed(original: Callable, of: str) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not seen.busy:
                seen.seeded(of, str(args or kwargs))
            return original(*args, **kwargs)

        return run

    for owner, name in ((torch, "manual_seed"), (np.random, "seed"), (random, "seed")):
        replace(owner, name, functools.partial(seed, of=owner.__name__))
    for name in ("randn", "randn_like"):
        replace(torch, name, draw)
    for owner in (F, torch.Tensor):
        replace(owner, "log_softmax", logarithms)
    for cls in (distributions.Categorical, distributions.Normal, distributions.MultivariateNormal):
        replace(cls, "log_prob", probability)
