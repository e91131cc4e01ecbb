"""Optimiser, parameter groups and schedule. The schedule is a function of the step, so it has no state to save."""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from trainworthy.core.base import config
from trainworthy.core.base.doubles import NO_DOUBLES as NO_DOUBLES
from trainworthy.core.base.doubles import exact as exact
from trainworthy.core.base.errors import UserError

WEIGHED = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention,
           nn.RNNBase)  # fmt: skip
"""Modules whose matrices and kernels get weight decay."""
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
NAMED = re.compile(r"weight|proj|kernel|experts|^w\d*$|^original1$")
"""Names of matrices in other modules (GPT-2's Conv1D, experts, weight norm's direction). Position embeddings, class
tokens, layer scales and temperatures can also have two axes, but do not match."""


def decays(name: str, owner: nn.Module | None, parameter: nn.Parameter) -> bool:
    """Return whether the parameter `name` of the module `owner` is a matrix or a kernel."""
    if isinstance(owner, NORMS):
        return False
    return parameter.ndim >= 2 and (isinstance(owner, WEIGHED) or bool(NAMED.search(name.rpartition(".")[2])))


def decaying(model: nn.Module) -> set[int]:
    """Return id() of the parameters of `model` with weight decay; a tied parameter decays if one of its modules uses it
    as a weight."""
    return {id(p) for m in model.modules() for n, p in m.named_parameters(recurse=False) if decays(n, m, p)}


def decay_groups(
    parameters: dict[str, nn.Parameter], weight_decay: float, weights: set[int] | None = None
) -> list[dict]:
    """Return two parameter groups. Matrices and kernels (`weights`, by id; without it, by name) decay; norms, biases,
    scales, tokens, position embeddings and temperatures do not.

    Decay would pull gains to zero without better generalisation (Loshchilov & Hutter 2019; nanoGPT; ViT, Swin and
    ConvNeXt exclude tables, tokens and layer scales).
    """
    mine = lambda n, p: decays(n, None, p) if weights is None else id(p) in weights  # noqa: E731
    decay = {n: p for n, p in parameters.items() if mine(n, p)}
    rest = {n: p for n, p in parameters.items() if n not in decay}
    groups = [("decay", decay, weight_decay), ("no_decay", rest, 0.0)]
    return [{"name": name, "params": list(ps.values()), "weight_decay": wd} for name, ps, wd in groups if ps]


def layer_rates(names: Iterable[str], decay: float) -> dict[str, float]:
    """Return {layer: factor on the peak rate}, first layer first. The last layer has the full rate (ELECTRA, Clark
    2020; BEiT, Bao 2022).

    A parameter's layer is its name up to the first part with a number, where models number their blocks (`layer1`,
    `encoder.layers.encoder_layer_0`). Without a number it is the module's name.
    """
    layers = list(dict.fromkeys(map(layer_of, names)))
    return {layer: decay ** (len(layers) - 1 - i) for i, layer in enumerate(layers)}


def layer_of(name: str) -> str:
    numbered = re.match(r"[^\d]*\d[^.]*(?=\.)", name)
    return numbered.group() if numbered else name.rpartition(".")[0] or name


def make_optimizer(model: nn.Module, settings: config.Optim, rates: Mapping[str, float] | None = None) -> Optimizer:
    """Build the optimiser over every parameter of `model` that requires a gradient; freeze parameters first. `rates`:
    {first word of parameter names: peak rate}; all other parameters use `settings.lr`.

    It is fused if torch supports that: one kernel for all tensors, and a non-finite step is skipped on the device
    without a sync.
    """
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise UserError("nothing to train", got="no parameter requires a gradient", cause="the whole model was frozen")
    weights = decaying(model)
    if rates is None:
        groups = _groups(trainable, settings, settings.lr, weights)
    else:
        groups = []
        if idle := [n for n in trainable if n.split(".")[0] not in rates]:
            needed = f"one of {', '.join(rates)}"
            raise UserError("trainable parameters have no learning rate", got=idle[0], needed=needed)
        for part, rate in rates.items():
            own = {n: p for n, p in trainable.items() if n.split(".")[0] == part}
            groups += [{**g, "name": f"{part}.{g['name']}"} for g in _groups(own, settings, rate, weights)]
    if settings.name == "sgd":
        nesterov = settings.momentum > 0
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=nesterov, fused=True)
    if settings.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=settings.lr)
    if settings.name == "adamw8bit":
        return _of_8_bits(groups, settings)
    if settings.name == "muon":
        names = {id(p): n for n, p in trainable.items()}
        return Muon(list(_split(groups, lambda p: p.ndim == 2 and re.search(r"\d", names[id(p)]))), settings)
    return AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)


def _of_8_bits(groups: list[dict], settings: config.Optim) -> Optimizer:
    """AdamW with moments of 8 bits in blocks (Dettmers 2022)."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise UserError("--optim.name adamw8bit needs the package bitsandbytes", got=error,
                        next="pip install 'trainworthy[qlora]', or --optim.name adafactor, which needs even less memory") from None  # fmt: skip
    return AdamW8bit(groups, lr=settings.lr, betas=settings.betas)


def _groups(parameters: dict[str, nn.Parameter], settings: config.Optim, lr: float, weights: set[int]) -> list[dict]:
    """Groups with and without decay, separate for each layer if layers have their own rates."""
    if settings.layer_decay == 1:
        return [{**g, "lr": lr} for g in decay_groups(parameters, settings.weight_decay, weights)]
    groups = []
    for layer, factor in layer_rates(parameters, settings.layer_decay).items():
        own = {n: p for n, p in parameters.items() if layer_of(n) == layer}
        groups += [{**g, "name": f"{layer}.{g['name']}", "lr": lr * factor}
                   for g in decay_groups(own, settings.weight_decay, weights)]  # fmt: skip
    return groups


def _split(groups: list[dict], hidden: Callable[[nn.Parameter], object]) -> Iterator[dict]:
    """Split each group into the parameters for which `hidden` is true and the others."""
    for group in groups:
        for own, name in ((True, f"{group['name']}.muon"), (False, group["name"])):
            params = [p for p in group["params"] if bool(hidden(p)) == own]
            if params:
                yield {**group, "name": name, "params": params}


TORCHS_STEP = Optimizer.profile_hook_step(torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step)))


ONE = torch.tensor(1.0)


class AdamW(torch.optim.AdamW):
    """torch's AdamW with bitwise equal results and less overhead. In a small net, torch's fused step spends more time
    around its kernel than in it."""

    def step(self, closure: Callable | None = None) -> Any:
        """Call the kernel directly if all tensors are float32 on the CPU with gradient and state, and no hook is
        registered; else call torch's own step."""
        alike: dict[tuple, list[nn.Parameter]] = {}  # one call for groups with equal settings
        for g in self.param_groups:
            alike.setdefault((g["lr"], *g["betas"], g["weight_decay"], g["eps"]), []).extend(g["params"])
        known = [(p.grad, self.state.get(p)) for some in alike.values() for p in some]
        plain = all(state and g is not None and g.is_cpu and g.dtype is torch.float32 for g, state in known)
        other = closure or any(g["amsgrad"] or g["maximize"] for g in self.param_groups) or hooked(self)
        if not plain or other or getattr(self, "found_inf", None) is not None:
            return TORCHS_STEP(self, closure)
        for (lr, beta1, beta2, weight_decay, eps), some in alike.items():
            state = [self.state[p] for p in some]
            average, square, steps = ([s[k] for s in state] for k in ("exp_avg", "exp_avg_sq", "step"))
            with torch.no_grad():
                torch._foreach_add_(steps, ONE, alpha=1.0)  # a number would become a tensor per counter
                torch._fused_adamw_(some, [p.grad for p in some],  # type: ignore[arg-type, misc]  # `plain`: all have one
                                    average, square, [], steps, lr=lr, beta1=beta1, beta2=beta2,
                                    weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False)  # fmt: skip
        return None

    step.hooked = True  # type: ignore[attr-defined]  # without this mark torch wraps the step, which adds a third to its time in a small net


def hooked(optimizer: Optimizer) -> bool:
    """Return whether the step has hooks or a profiler is active."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    of_all = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return bool(before or after or of_all or torch.autograd._profiler_enabled())


@torch.no_grad()
def clip(grads: list[Tensor], most: float) -> Tensor:
    """Scale the gradients so that their common norm is at most `most`; return the norm before, on their device."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    on_host = norm.device.type == "cpu"  # on an accelerator, reading the norm would be a sync
    if math.isfinite(most) and not (on_host and norm.item() <= 0.99 * most):
        torch._foreach_mul_(grads, (most / (norm + 1e-6)).clamp_max(1.0))
    return norm


class Muon(Optimizer):
    """Muon (Jordan 2024) for the groups marked for it, AdamW for the others, behind the interface of one optimiser.

    torch's two optimisers share its groups and state. Muon's updates are scaled to the size of AdamW's (Liu 2025, arXiv
    2502.16982), so that one learning rate and one decay fit both. Muon orthogonalises matrices of hidden layers.
    Embeddings and heads, whose rows are tokens or classes, use AdamW, as its authors recommend.
    """

    def __init__(self, groups: list[dict], settings: config.Optim):
        self.settings = settings
        super().__init__(groups, {"lr": settings.lr})
        self._share()

    def _share(self) -> None:
        hidden = [g for g in self.param_groups if g["name"].endswith(".muon")]
        rest = [g for g in self.param_groups if not g["name"].endswith(".muon")]
        lr, self.parts = self.settings.lr, list[Optimizer]()
        if hidden:
            self.parts.append(torch.optim.Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw"))
        if rest:
            self.parts.append(torch.optim.AdamW(rest, lr=lr, betas=self.settings.betas))
        for part in self.parts:
            part.state = self.state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step of both. Like torch's optimisers, it first computes the loss if it gets a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def schedule(step: int, total: int, settings: config.Optim) -> float:
    """Return the factor on the peak rate for 0-based optimiser `step` of `total`.

    Linear warmup ends just below 1 and never starts at 0, since a step at rate 0 trains nothing. Cosine and linear
    reach their end one step after the last, so the last step still has an effect.
    """
    warmup = round(settings.warmup * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * _fall(step - warmup, total - warmup, total, settings)


def _fall(step: int, left: int, total: int, settings: config.Optim) -> float:
    """Return the part of the way from the peak to the end that is left at 0-based `step` after the warmup."""
    if settings.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step / max(left, 1))))
    if settings.schedule == "linear":
        return 1 - step / max(left, 1)
    if settings.schedule == "wsd":
        decay = min(round(settings.decay * total), left)
        return 1.0 if step < left - decay else (left - step) / max(decay, 1)
    return 1.0


def scale_peaks(optimizers: Iterable[Optimizer], factor: float) -> None:
    """Multiply the peak rate of every group of optimisers that have made no step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = factor * group.get("peak_lr", group["lr"])


def set_rates(optimizer: Optimizer, factor: float) -> None:
    """Set every group's rate to its own peak times `factor`."""
    for group in optimizer.param_groups:
        group.setdefault("peak_lr", group["lr"])
        group["lr"] = group["peak_lr"] * factor
