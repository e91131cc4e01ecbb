"""The gate on the weight and the frequency of timesteps (DF7), measured from the loss as samples.py describes."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.named import order_causes
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.loop.run import evaluating
from trainworthy.recipes.diffusion.gates import own_weights
from trainworthy.recipes.diffusion.gates.objective import (
    Objective,
    objective,
    published_weights,
)
from trainworthy.recipes.diffusion.gates.short_run import trained, watched

LEVEL = 1e-4  # standard error of a noise level, above which the input holds more than picture and noise
AVERAGED = "the error is averaged over the picture before it is squared, so that errors of its pixels cancel: square first, then take the mean"
DRAWN = 2.5  # limit of the largest distance between distribution functions times sqrt(n): exceeded by chance 7 times in a million


def declared_weights(noise, kind: str, snr: Tensor) -> Tensor:
    """Return the declared weight of the mean square error for this prediction type at these signal-to-noise ratios.

    Hang 2023: min(SNR, gamma) is the weight of the picture's error. An error of 1 in the noise is one of 1 / SNR in the picture; in the
    velocity, 1 / (SNR + 1). Stated here independently of the recipe. The weight is 1 if no gamma is declared (a flow)."""
    gamma = getattr(noise, "snr_gamma", math.inf)
    if not math.isfinite(gamma):
        return torch.ones_like(snr)
    per = {"noise": snr, "velocity": snr + 1}.get(kind, torch.ones_like(snr))
    return torch.minimum(snr, torch.full_like(snr, gamma)) / per


def _mistaken_weights(aim: Objective, noise, expected: Tensor) -> dict[str, Tensor]:
    """Return {known mistake: the weights (B,) that it gives}, where no declared or published ones fit."""
    snr, at = (aim.alpha / aim.sigma).square(), aim.timestep.double()
    found = {f"min-SNR of {k}": snr.clamp_max(gamma) / per for k, per in (("the noise", snr), ("the velocity", snr + 1), ("the picture", 1))
             for gamma in {5.0, min(getattr(noise, "snr_gamma", 5.0), 1e6)}}  # fmt: skip
    order = at.argsort()
    last = noise.num_train_timesteps - (not aim.timestep.is_floating_point())
    turned = np.interp((last - at).cpu(), at[order].cpu(), expected[order].cpu().double())
    return found | {"the declared ones of the reversed schedule": torch.from_numpy(turned).to(expected)}


def _relative(weight: Tensor, expected: Tensor) -> Tensor:
    return ((weight - expected).abs() / expected.clamp_min(0.01)).cpu()


def within_error(aim: Objective, weights: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the weights (B,) that are due: the measured one where it is due at a signal-to-noise ratio within four standard errors of the
    fitted one."""
    snr, factor = (aim.alpha / aim.sigma).square(), (8 * aim.level_error.clamp_max(1)).exp()
    low, high = torch.stack([weights(snr / factor), weights(snr * factor)]).aminmax(dim=0)
    return torch.where((aim.level_error > LEVEL) & (aim.weight >= low) & (aim.weight <= high), aim.weight, weights(snr))


def _by_formula(context: GateContext, aim: Objective, weight: Tensor) -> tuple[float, float, int]:
    """Return (largest relative difference between a sample's loss and weight * mean((prediction - target)^2), the same of the square of the
    mean, number of samples), for the net after sixty steps of train(), one sample per batch."""
    _, stage, _ = trained(context)
    net, count, outputs = stage.model, min(16, len(aim.timestep)), []
    worst = [0.0, 0.0]
    with (
        net.register_forward_hook(lambda _, args, out: outputs.append(to_double(out.sample.detach()))),
        evaluating(net),
        torch.no_grad(),
    ):
        for i in range(count):
            one = {k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in aim.batch.items()}
            found = stage.loss(net, one)
            loss = sum(found[name] for name in aim.terms).item()
            error = outputs[-1][0] - to_double(aim.target[i])
            for k, one_number in enumerate((error.square().mean(), error.mean().square())):
                due = weight[i].item() * one_number.item()
                worst[k] = max(worst[k], abs(loss - due) / max(abs(due), 1e-4))
    return *worst, count


@gate(
    "weighting",
    rows="DF7",
    title="each timestep has the declared weight and frequency",
    reads="data model loss counts train",
    explains=True,
    compares_loss=True,
)
def weighting(context: GateContext) -> Finding:
    """Compares weights and timesteps with their declaration:

    - The loss's curvature at 512 noise levels with the declared weight (min-SNR for a diffusion, 1 for a flow). Prediction type and SNR
      are measured from the target and the noisy pictures.
    - The loss of each of 16 single samples, after sixty steps of train(), with that weight times the mean square error. Of a loss that
      is not quadratic in the error (Huber's) only weights are compared, up to a common factor. So are other published weights, and a
      fork's own (own_weights.py).
    - The distribution of the net's timesteps with the declared one (Kolmogorov-Smirnov), with an even one (Liu 2022), of a diffusion with a
      logit-normal one (Esser 2024), or of a flow with other published ones."""
    aim, noise = objective(context), context.look()[1].data["train"].process.noise
    expected = within_error(aim, lambda snr: declared_weights(noise, aim.kind, snr))
    expected, named = own_weights.scaled(aim.weight, expected)
    gap, fault = _relative(aim.weight, expected), ""
    if gap.max() > 0.02:
        named = published_weights(aim.weight, aim.kind, (aim.alpha / aim.sigma).square())
        fault = "" if named else own_weights.astray(aim, _mistaken_weights(aim, noise, expected))
        if not fault:
            named, expected = f"{named or 'a form of their own'} up to a factor, not the declared ones", aim.weight
    if not aim.quadratic:  # Huber's loss: weights are compared up to a common factor, values are not
        expected = expected * (aim.weight / expected.clamp_min(0.01)).median()
    apart_from, of_mean, of = _by_formula(context, aim, expected) if aim.quadratic else (0.0, 0.0, 0)
    compared = (
        f"the losses of {of} single samples by at most {apart_from:.1%}"
        if of
        else "the loss is not quadratic in the error"
    )
    gap = _relative(aim.weight, expected)
    t, i = aim.timestep.tolist(), int(gap.argmax())
    values, counts = watched(context).timesteps.unique(return_counts=True)
    n = int(counts.sum())
    drawn, limit, evenly = counts.cumsum(0) / n, DRAWN / math.sqrt(n), ""
    distance, even = (
        (drawn - due).abs().max().item() for due in (noise.below(values), values / noise.num_train_timesteps)
    )
    if distance > limit >= even:
        distance, evenly = even, " (uniform, not the declared ones)"
    elif distance > limit:
        known = own_weights.published_levels if hasattr(noise, "logit_mean") else own_weights.logit_normal
        found, name = known(values, drawn, noise.num_train_timesteps)
        distance, evenly = (found, f" ({name}, not the declared ones)") if found <= limit else (distance, evenly)
    return Finding(
        gap[i].item() <= 0.02 and distance <= limit and apart_from <= 0.02,
        f"target: {aim.kind}; {f'weights: {named}; ' * bool(named)}weights differ by at most "
        f"{gap[i]:.1%} (t {t[i]:.0f}: {aim.weight[i]:.3f}, due {expected[i]:.3f}); {compared}; "
        f"the distribution of {n:,} timesteps{evenly} by at most {distance:.3f}"
        + f"; the weights are those of {fault}" * bool(fault)
        + (f"; not compared, as they name no target of their sample: {', '.join(aim.others)}" if aim.others else ""),
        f"at most 2% at every level and for every sample; at most {limit:.3f} for the distribution",
        order_causes(
            (gap[i].item() > 0.02, "the weight is that of another prediction type: min(SNR, gamma) over SNR is min-SNR for the noise, "
             "over SNR + 1 for the velocity"),
            (apart_from > 0.02, "the weight belongs to another sample's timestep, or to the reversed schedule"),
            (distance > limit, "timesteps are drawn from another distribution than declared: another mean or deviation"))
        + "\n"
        "on purpose: --noise.snr-gamma inf (a diffusion), --noise.logit-mean and --noise.logit-std (a flow); weights or timesteps that no "
        'setting declares: state them in `Noise.weights` or `Noise.below`, or --gates.waive weighting --gates.because "..."',
        cause=f"the weights are those of {fault}" if fault else AVERAGED if apart_from > 0.02 >= of_mean else "",
        evidence={"kind": aim.kind, "levels": t, "weights": aim.weight.tolist(), "expected": expected.tolist(), "apart": distance},
    )  # fmt: skip
