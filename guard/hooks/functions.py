"""The loss and dropout functions, differences and likelihoods of torch, as events."""

import functools
import inspect
import itertools
import linecache
import random
import re
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import distributions, nn
from trainworthy.guard.hooks.patches import after, before

LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy", "kl_div")
COMPARED = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "triplet_margin_loss", "cosine_embedding_loss",
            "triplet_margin_with_distance_loss", "margin_ranking_loss")  # fmt: skip
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def losses(seen: Any) -> None:
    def loss(name: str, out: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        if not seen.busy:
            seen.loss(name, input, target, out, {**dict(zip(("weight",), args, strict=False)), **kwargs})

    def ctc(out: Any, log_probs: Any, targets: Any, *args: Any, **kwargs: Any) -> None:
        if not seen.busy:
            blank = args[2] if len(args) > 2 else kwargs.get("blank", 0)
            seen.loss("ctc_loss", log_probs, targets, out, {"blank": blank})

    def compared(name: str, out: Any, *args: Any, **kwargs: Any) -> None:
        if seen.busy:
            return
        given = (*args, *(v for k, v in kwargs.items() if k != "weight"))
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        seen.compared(name, tensors)
        if len(tensors) > 1 and (name.endswith("1_loss") or name in ("mse_loss", "huber_loss")):
            seen.regressed(*tensors[:2], name)
            if tensors[0].shape != tensors[1].shape:
                seen.difference(*tensors[:2], out, name)

    after(F, "ctc_loss", ctc)
    for name in LOSSES:
        after(F, name, functools.partial(loss, name))
    for name in COMPARED:
        after(F, name, functools.partial(compared, name))


ALWAYS_ON = re.compile(r"training\s*=\s*True\b|,\s*True\s*[,)]")


@functools.lru_cache(1024)
def always_on(code: CodeType, instruction: int) -> bool:
    """Return whether `training=True` is written in this call of dropout: it is meant to stay on (Tacotron's prenet, Monte-Carlo dropout).
    Without an argument, True is only the default."""
    first, last, _, _ = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    lines = range(first, last + 1) if first and last else ()
    return bool(ALWAYS_ON.search("".join(linecache.getline(code.co_filename, i) for i in lines)))


def layers(seen: Any) -> None:
    def normalize(input: Any, p: float = 2.0, dim: int = 1, *_: Any, **__: Any) -> None:
        if not seen.busy:
            seen.evidence.normalized(input, dim)

    def dropout(input: Any, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> None:
        if training and p:
            caller: Any = inspect.currentframe().f_back.f_back  # type: ignore[union-attr]
            seen.drops += not always_on(caller.f_code, caller.f_lasti)
            seen.evidence.shares.called(p, caller)

    def made(_: None, module: nn.Module, *__: Any, **___: Any) -> None:
        seen.evidence.shares.layer(getattr(module, "p", getattr(module, "dropout", None)), inspect.currentframe())

    def embedding(input: Any, weight: Any, *args: Any, **kwargs: Any) -> None:
        if seen.busy:
            return
        padding = args[0] if args else kwargs.get("padding_idx")
        seen.evidence.padded(input, weight, padding, torch.is_grad_enabled())
        if torch.is_grad_enabled():
            seen.evidence.looked_up(input, weight)
            seen.evidence.items(input, weight)

    def sigmoid(input: Any, *_: Any, **__: Any) -> None:
        if not torch.is_grad_enabled() and not seen.busy:
            seen.evidence.squashed(input)
            seen.evidence.decided(input)

    def argmax(input: Any, *_: Any, **__: Any) -> None:
        if not torch.is_grad_enabled() and not seen.busy:
            seen.evidence.decided(input)

    def one_hot(out: Any, *_: Any, **__: Any) -> None:
        if torch.is_grad_enabled() and not seen.busy:
            seen.evidence.one_hot(out, inspect.currentframe().f_back.f_back)  # type: ignore[union-attr]

    after(F, "one_hot", one_hot)
    for cls in (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention):
        after(cls, "__init__", made)
    before(F, "normalize", normalize)
    before(F, "embedding", embedding)
    for owner in (torch, torch.Tensor, F):
        before(owner, "sigmoid", sigmoid)
    for owner in (torch, torch.Tensor):
        before(owner, "argmax", argmax)
    for name in DROPOUTS:
        before(F, name, dropout)


def attention(seen: Any) -> None:
    def masked(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0):
            seen.drops += 1
        if not seen.busy:
            seen.attended(kwargs.get("attn_mask", args[3] if len(args) > 3 else None), keeps=True)

    def padded(*_: Any, **kwargs: Any) -> None:
        if not seen.busy:
            seen.attended(kwargs.get("key_padding_mask"), keeps=False)

    def weighed(scores: Any, *_: Any, **__: Any) -> None:
        if not seen.busy:
            seen.attended(scores, keeps=True)

    def similar(out: Any, a: Any, b: Any, *_: Any, **__: Any) -> None:
        if not seen.busy and torch.is_grad_enabled():
            seen.evidence.attracted(a, b, out)

    for owner in (torch, F):
        after(owner, "cosine_similarity", similar)
    for owner in (torch, torch.Tensor, F):
        before(owner, "softmax", weighed)
    before(F, "scaled_dot_product_attention", masked)
    before(F, "multi_head_attention_forward", padded)


def sequences(seen: Any) -> None:
    def pack(out: Any, input: Any, lengths: Any, batch_first: bool = False, *_: Any, **__: Any) -> None:
        if not seen.busy:
            seen.evidence.pack(input, batch_first, out)

    after(nn.utils.rnn, "pack_padded_sequence", pack)


def differences(seen: Any) -> None:
    def difference(out: Any, one: torch.Tensor, other: Any) -> None:
        if isinstance(other, torch.Tensor) and not seen.busy:
            if one.dim() and one.shape != other.shape:
                seen.difference(one, other, out)
            if one.requires_grad != other.requires_grad and one.dim():
                seen.regressed(one, other)

    for name in ("__sub__", "__rsub__"):
        after(torch.Tensor, name, difference)


def likelihoods(seen: Any) -> None:
    def probability(out: Any, _: Any, value: Any) -> None:
        if not seen.busy and torch.is_grad_enabled():
            seen.log_prob(out, value)

    def logarithms(out: Any, *_: Any, **__: Any) -> None:
        if not seen.busy:
            seen.log_softmax(out)

    def draw(out: Any, *_: Any, **__: Any) -> None:
        if not seen.busy:
            seen.evidence.drew(out)

    def seed(of: str, *args: Any, **kwargs: Any) -> None:
        if not seen.busy:
            seen.seeded(of, str(args or kwargs))

    for owner, name in ((torch, "manual_seed"), (np.random, "seed"), (random, "seed")):
        before(owner, name, functools.partial(seed, owner.__name__))
    for name in ("randn", "randn_like"):
        after(torch, name, draw)
    for owner in (F, torch.Tensor):
        after(owner, "log_softmax", logarithms)
    for cls in (distributions.Categorical, distributions.Normal, distributions.MultivariateNormal):
        after(cls, "log_prob", probability)
