"""GRPO's loss of each token as the trainer's arguments declare it, written from the papers, independently of TRL.

`objective` and `formula` compare the loss with it. Clip and KL coefficient are settings of the recipe, so they are read from there; the rest
only the trainer's arguments know.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Skip

SURROGATES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # they differ in what the sum over tokens is divided by
UNSTATED = {
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
}


@dataclass(frozen=True)
class Loss:
    """The declared loss of a token."""

    kind: str
    """`clip` (Schulman 2017), `cispo` (MiniMax 2025) or `sapo` (Gao 2025)."""
    low: float
    high: float
    """Distance of the clip from 1, below and above (DAPO, Yu 2025, has another one above). CISPO: the largest ratio."""
    delta: float
    """Largest ratio of a negative advantage (INTELLECT-2); infinite if there is none."""
    whole: bool
    """Whether all tokens of an answer share one ratio, the geometric mean of theirs (GSPO, Zheng 2025)."""
    temperatures: tuple[float, float]
    """Of SAPO's sigmoid, for positive and other advantages."""
    beta: float
    corrected: bool
    """Whether the KL is weighted by the ratio. Else its gradient on older samples is not that of the KL (DeepSeek-V3.2)."""

    def mean(self, each: Tensor, mask: Tensor) -> Tensor:
        """Return the loss of a batch from that of its tokens (B, T): a mean over all tokens (DAPO), or in SAPO over answers of theirs."""
        if self.kind == "sapo":
            return ((each * mask).sum(1) / mask.sum(1).clamp_min(1)).mean()
        return (each * mask).sum() / mask.sum()

    @property
    def name(self) -> str:
        known = {
            "clip": f"min(ratio A, clip(ratio) A), clip {self.low:g}",
            "cispo": f"min(ratio, {self.high:g}) A log p",
            "sapo": "sigmoid(temperature (ratio - 1)) A",
        }[self.kind]
        known += f" below and {self.high:g} above" * (self.kind == "clip" and self.high != self.low)
        return known + ", one ratio for each answer" * self.whole

    def log_ratio(self, new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        """Return the logarithm of the ratio (..., T) of log-probabilities `new` and `old`; `mask`: tokens of the answer."""
        each = new - old
        if not self.whole:
            return each
        return ((each * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)).expand_as(each)

    def held(self, ratio: Tensor, gain: Tensor) -> Tensor:
        """Return the clipped surrogate of a ratio and advantages of one shape."""
        bounded = ratio.clamp(1 - self.low, 1 + self.high)
        return torch.min(ratio.clamp_max(self.delta) * gain, bounded * gain)

    def per_token(self, new: Tensor, old: Tensor, ref: Tensor | None, gain: Tensor, mask: Tensor) -> Tensor:
        """Return the loss of each token (..., T). `ref`: log-probabilities of the reference; `gain`: advantages, of a shape that expands."""
        ratio, gain = self.log_ratio(new, old, mask).exp(), gain.expand_as(new)
        if self.kind == "cispo":
            loss = -ratio.clamp_max(self.high).detach() * gain * new
        elif self.kind == "sapo":
            steep = torch.where(gain > 0, *(torch.full_like(gain, t) for t in self.temperatures))
            loss = -(steep * (ratio - 1)).sigmoid() * 4 / steep * gain
        else:
            loss = -self.held(ratio, gain)
        if not self.beta or ref is None:
            return loss
        gap = ref - new  # Schulman's k3 (2020)
        return loss + self.beta * (ratio if self.corrected else 1.0) * (gap.exp() - gap - 1)


def declared(cfg: Any, args: Any, beta: float) -> Loss:
    """Return the loss that the recipe's settings and the trainer's arguments declare; Skip if no formula is written for it."""
    kind = "clip" if args.loss_type in SURROGATES else args.loss_type
    unstated = [f"{k}={v!r}" for k, off in UNSTATED.items() if (v := getattr(args, k, off)) != off]
    if kind not in ("clip", "cispo", "sapo") or unstated:
        raise Skip(f"no formula is written for {', '.join([f'loss_type={args.loss_type!r}', *unstated])}")
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return Loss(
        kind, cfg.epsilon, cfg.epsilon if high == args.epsilon else high, args.delta or float("inf"), args.importance_sampling_level == "sequence",
        (args.sapo_temperature_pos, args.sapo_temperature_neg), beta, bool(args.use_bias_correction_kl),
    )  # fmt: skip
