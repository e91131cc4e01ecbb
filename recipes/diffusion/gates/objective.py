"""Measures a diffusion objective from the loss itself: the target and the weight at each timestep, and a net that knows the answers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import DDIMScheduler, DDPMScheduler, DiffusionPipeline
from torch import Tensor, nn
from trainworthy.core.base.doubles import exact, on_device, to_double
from trainworthy.core.gates.gate import GateContext, fetch, pick
from trainworthy.core.loop.run import Rehearsal
from trainworthy.core.recipe.stage import Data
from trainworthy.recipes.diffusion.gates import walks

LEVELS = 512  # training samples whose timesteps represent the schedule
EDGE = 16  # levels
REDRAWN = 32  # samples that are drawn twice
FEW = 4  # samples drawn from an exported pipeline
HALVED = 26  # bisections: a millionth of the range
EXCESS = 0.25  # of the noise: input perturbation adds 0.1
OWN = 0.3  # share of a target that its own picture and noise may leave: clipped and perturbed ones leave some
CLEAR = 0.99  # share of the entries of a prediction whose gradient must have the sign of the error


class Constant(nn.Module):
    """A net that returns one number everywhere, or always the same (B, C, H, W), and keeps its inputs."""

    def __init__(self, value: float | Tensor):
        super().__init__()
        self.value = value

    def forward(self, sample: Tensor, timestep: Tensor, class_labels: Tensor | None = None) -> SimpleNamespace:
        self.output = (torch.zeros_like(sample) + self.value).requires_grad_()
        self.noisy, self.timestep = sample.detach(), torch.as_tensor(timestep, device=sample.device).expand(len(sample))
        return SimpleNamespace(sample=self.output)


@dataclass
class Objective:
    """The training target and its weight, per sample, as measured from the loss."""

    batch: dict
    clean: Tensor
    """(B, C, H, W) pictures or latents before noise."""
    noisy: Tensor
    """(B, C, H, W) the net's input."""
    timestep: Tensor
    """(B,) the timestep that the net got."""
    target: Tensor
    """(B, C, H, W) the prediction at which the gradient is zero."""
    weight: Tensor
    """(B,) loss per mean square error of 1; of a loss that is not quadratic half of its slope at errors of 1, in the same unit."""
    alpha: Tensor
    sigma: Tensor
    """(B,) noisy = alpha image + sigma noise, as fitted."""
    of_image: Tensor
    of_noise: Tensor
    """(B,) target = of_image image + of_noise noise, as fitted."""
    terms: tuple[str, ...] = ()
    """The loss's terms that target and weight were measured from."""
    others: tuple[str, ...] = ()
    """Its other terms: they are not quadratic in the prediction (a cosine), or draw away from another sample, so their gradient names no target."""
    quadratic: bool = True
    """Whether these terms are quadratic in the prediction; Huber's loss and the absolute error are not."""
    redrawn: float = 1.0
    """Share of samples that get another timestep with other draws, as in another epoch."""
    level_error: Tensor = field(default_factory=lambda: torch.zeros(1))
    """(B,) standard error of log(alpha / sigma): not 0 if the input holds more than picture and noise (input perturbation, Ning 2023)."""

    @property
    def kind(self) -> str:
        """Name of the target, or its shares of picture and noise if it has none."""
        known = {
            "noise": (0.0, 1.0),
            "velocity": (-self.sigma, self.alpha),  # Salimans & Ho 2022
            "flow": (-1.0, 1.0),
            "picture": (1.0, 0.0),
        }
        miss = {
            k: ((self.of_image - x).abs() + (self.of_noise - e).abs()).median().item() for k, (x, e) in known.items()
        }
        kind = min(miss, key=miss.get)
        shares = f"{self.of_image.median():.2g} picture {self.of_noise.median():+.2g} noise"
        return kind if miss[kind] < 0.1 else shares


def clean_key(data: Data) -> str:
    """Return the field that noise is added to."""
    return data.process.clean_key


def condition_field(data: Data) -> tuple[str, int]:
    """Return (field of the condition, number of its values): classes or captions."""
    key = data.process.condition_key
    return key, len(data.fields[key].classes) if key in data.fields else data.null


def objective(context: GateContext) -> Objective:
    """Measure the objective from the loss, on samples of the training path."""

    def read() -> Objective:
        run, stage = context.build(Rehearsal(steps=1))
        data = stage.data["train"]
        batch = fetch(data, pick(data, min(LEVELS, len(data)), context.cfg.run.seed), context.cfg.run.seed, run.device)
        clean = batch[clean_key(data)]
        basis = to_double(torch.stack([clean.flatten(1), batch["noise"].flatten(1)], 2))  # (B, CHW, 2)
        slopes, net, terms, others = slopes_of(stage.loss, batch, basis)
        steep = slopes[1] - slopes[0]
        target = torch.where(steep > 0, -slopes[0] / steep, 0.0)
        searched = None if others else searched_target(stage.loss, batch, clean)
        if searched is not None:
            target, steep = searched
        weight = steep.flatten(1).mean(1) * steep[0].numel() / 2

        def fitted(y: Tensor) -> tuple[Tensor, Tensor]:
            found = torch.linalg.lstsq(basis, to_double(y.flatten(1)[..., None])).solution[..., 0]
            return on_device(found, y.device).unbind(1)

        levels = fitted(net.noisy)
        return Objective(
            batch, clean, net.noisy, net.timestep, target, weight, *levels, *fitted(target), terms, others, searched is None,
            redrawn(stage.loss, data, context.cfg.run.seed, run.device), level_error(basis, net.noisy, *levels),
        )  # fmt: skip

    return context.once("diffusion objective", read)


def level_error(basis: Tensor, noisy: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """Return the standard error (B,) of log(alpha / sigma), from what a fit with the `basis` (B, CHW, 2) leaves of `noisy`: EXCESS of the
    noise at most. More is no perturbation of the input, but another noise than the target's."""
    levels = to_double(torch.stack([alpha, sigma], 1))  # (B, 2)
    left = to_double(noisy.flatten(1)) - (basis @ levels[..., None])[..., 0]
    share = left.square().mean(1).sqrt() / (levels[:, 1].abs() * basis[..., 1].square().mean(1).sqrt()).clamp_min(1e-9)
    spread = torch.linalg.pinv(basis.mT @ basis).diagonal(dim1=1, dim2=2) * left.square().mean(
        1, keepdim=True
    )  # (B, 2) variances
    error = (spread / levels.square().clamp_min(1e-12)).sum(1).sqrt()
    return on_device(error * (share.median() <= EXCESS), noisy.device)


def redrawn(loss: Callable, data: Data, seed: int, device: torch.device) -> float:
    """Return the share of a few training samples that get another timestep with other draws."""
    nets = Constant(0.0), Constant(0.0)
    rows = pick(data, min(REDRAWN, len(data)), seed)
    for i, net in enumerate(nets):
        loss(net, fetch(data, rows, seed + i, device))
    return (nets[0].timestep != nets[1].timestep).float().mean().item()


def slopes_of(
    loss: Callable, batch: dict, basis: Tensor
) -> tuple[list[Tensor], Constant, tuple[str, ...], tuple[str, ...]]:
    """Return (gradients of the quadratic terms at the predictions 0 and 1, the last net, names of these terms, of the others). A term is
    quadratic if its gradients at 0, 1 and 2 are on a line. If none is, all terms count. Of several quadratic terms those count that draw to a
    sum of the sample's own picture and noise (the `basis`, (B, CHW, 2)), if there are any: contrastive flow matching (Stoica 2025) has a term
    that draws away from another sample's velocity."""
    gradients: dict[str, list[Tensor]] = {}
    for value in (0.0, 1.0, 2.0):
        net = Constant(value)
        for name, term in loss(net, batch).items():
            gradient = torch.autograd.grad(term, net.output, retain_graph=True, allow_unused=True)[0]
            if gradient is not None:
                gradients.setdefault(name, []).append(gradient)

    def is_quadratic(name: str) -> bool:
        first, second, third = gradients[name]
        return (third - 2 * second + first).abs().max() <= 1e-3 * torch.stack(gradients[name]).abs().max()

    terms = tuple(filter(is_quadratic, gradients)) or tuple(gradients)
    if len(terms) > 1:
        terms = tuple(name for name in terms if draws_to_its_own(*gradients[name][:2], basis)) or terms
    others = tuple(name for name in gradients if name not in terms)
    return [sum(gradients[name][i] for name in terms) for i in (0, 1)], net, terms, others


def draws_to_its_own(first: Tensor, second: Tensor, basis: Tensor) -> bool:
    """Return whether a quadratic term with these gradients (B, C, H, W) at the predictions 0 and 1 draws predictions, not away, and to a
    sum of the `basis` (B, CHW, 2) of each sample."""
    steep = to_double((second - first).flatten(1))
    if (steep < 0).any() or not (steep > 0).any():
        return False
    target = torch.where(steep > 0, -to_double(first.flatten(1)) / steep.clamp_min(1e-12), 0.0)[..., None]
    left = target - basis @ torch.linalg.lstsq(basis, target).solution
    return bool(left.norm() <= OWN * target.norm()) and bool(target.any())


def searched_target(loss: Callable, batch: dict, clean: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (the prediction at which the gradient of a loss that is not quadratic changes its sign, the mean slope between errors of -1 and
    1), (B, C, H, W) both; None if the loss is quadratic, or if there is no such prediction. The gradient of Huber's loss, of the absolute
    error and of powers of the error has the sign of the error."""

    def gradient(prediction: Tensor) -> Tensor:
        net = Constant(prediction)
        return torch.autograd.grad(sum(loss(net, batch).values()), net.output)[0]

    first, second, third = (gradient(torch.full_like(clean, v)) for v in (0.0, 1.0, 2.0))
    if (third - 2 * second + first).abs().max() <= 1e-3 * max(x.abs().max() for x in (first, second, third)):
        return None
    reach = 4 * (clean.abs().max() + batch["noise"].abs().max()).item()
    low, high = torch.full_like(clean, -reach), torch.full_like(clean, reach)
    for _ in range(HALVED):
        middle = (low + high) / 2
        above = gradient(middle) > 0
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    target = (low + high) / 2
    below, above = gradient(target - 1), gradient(target + 1)
    return (target, (above - below) / 2) if ((below < 0) & (above > 0)).float().mean() >= CLEAR else None


def published_weights(weight: Tensor, kind: str, snr: Tensor) -> str:
    """Return the published weighting that measured weights (B,) of a prediction of this kind follow up to a common factor; "" if none. That
    factor is a rate. Papers state the weight of the noise's error: an error of 1 in the velocity is one of SNR / (SNR + 1) in the noise, an
    error of 1 in the picture one of SNR. Equal weights and min-SNR are settings, so they must be declared."""
    unit = {
        "noise": torch.ones_like(snr),
        "velocity": snr / (snr + 1),
        "picture": snr,
        "flow": torch.ones_like(snr),
    }.get(kind)
    if unit is None:
        return ""
    level = 1 / (1 + snr.sqrt())
    of_flows = {"sigma_sqrt (Esser 2024)": level**-2, "cosmap (Esser 2024)": 1 / (1 - 2 * level + 2 * level**2)}
    of_diffusions = {
        "P2 of gamma 0.5 (Choi 2022)": (1 + snr) ** -0.5,
        "P2 of gamma 1 (Choi 2022)": 1 / (1 + snr),
        "truncated SNR (Salimans & Ho 2022)": snr.clamp_min(1) / snr,
        "soft min-SNR of gamma 5 (Crowson 2024)": 1 / (1 + snr / 5),
        "debiased estimation (Yu 2024)": snr**-0.5,
        "EDM of sigma_data 0.5 (Karras 2022)": (4 + snr) / snr,
    } | {f"sigmoid of bias {b} (Hoogeboom 2024)": 1 / (1 + snr * math.exp(-b)) for b in (-3, -2, -1)}
    known = of_flows if kind == "flow" else of_diffusions
    for name, of_noise in known.items():
        due = unit * of_noise
        due = due * (weight / due.clamp_min(1e-9)).median()
        if weight.max() > 0 and ((weight - due).abs() <= 0.02 * due.clamp_min(0.01 * due.max())).all():
            return name
    return ""


class Knowing(nn.Module):
    """A net that returns the exact answer: one picture for each of `classes` (default: all, in order), and their mean for any other
    condition. Its prediction type is that of the measured objective."""

    def __init__(self, aim: Objective, pictures: Tensor, classes: list[int] | None = None):
        super().__init__()
        order = aim.timestep.argsort()
        self.at = exact(aim.timestep[order])
        self.curves = torch.stack([aim.alpha, aim.sigma, aim.of_image, aim.of_noise])[:, order]
        self.pictures = torch.cat([pictures, pictures.mean(0, keepdim=True)])
        self.row = {c: i for i, c in enumerate(classes if classes is not None else range(len(pictures)))}
        self.met: set[float] = set()
        """Timesteps at which it was called."""
        self.alpha = 1.0
        """Signal level at the last timestep."""
        self.exchanged = False
        """Whether the halves of a batch, with and without the class, get each other's answers."""

    def forward(self, sample: Tensor, timestep: Tensor, class_labels: Tensor) -> SimpleNamespace:
        t = exact(timestep)
        self.met.update(t.tolist())
        right = torch.searchsorted(self.at, t).clamp(1, len(self.at) - 1)
        left = right - 1
        # Beyond the measured levels, extrapolate from the EDGE nearest ones: samplers begin and end there.
        left = torch.where(t > self.at[-1], max(0, len(self.at) - EDGE), left)
        right = torch.where(t < self.at[0], min(EDGE, len(self.at) - 1), right)
        # Equal levels: no slope
        share = ((t - self.at[left]) / (self.at[right] - self.at[left]).clamp_min(1e-9)).clamp(-4, 5)
        level = torch.lerp(self.curves[:, left], self.curves[:, right], share).float()[..., None, None, None]
        alpha, sigma, of_image, of_noise = level.unbind(0)
        sigma = torch.where(sigma.abs() < 1e-3, 1e-3, sigma)
        self.alpha = alpha.abs().median().item()
        picture = self.answer(sample, alpha, sigma, class_labels)
        return SimpleNamespace(sample=of_image * picture + of_noise * (sample - alpha * picture) / sigma)

    def answer(self, sample: Tensor, alpha: Tensor, sigma: Tensor, class_labels: Tensor) -> Tensor:
        """Return the clean pictures."""
        rows = [self.row.get(c, len(self.row)) for c in class_labels.tolist()]
        half = len(rows) // 2
        both = len({r == len(self.row) for r in rows[:half]}) == len({r == len(self.row) for r in rows[half:]}) == 1
        return self.pictures[rows[half:] + rows[:half] if self.exchanged and both else rows]


def undone(scheduler, prediction: Tensor, t: float, noisy: Tensor) -> Tensor:
    """Return the clean picture (C, H, W) that one step of an exported scheduler implies at timestep t. For a flow it is where the step
    would end if it continued in a straight line to zero noise."""
    scheduler.set_timesteps(scheduler.config.num_train_timesteps)
    if not scheduler.timesteps.is_floating_point():
        t = min(max(int(t), 0), scheduler.config.num_train_timesteps - 1)
        if not isinstance(
            scheduler, DDIMScheduler | DDPMScheduler
        ):  # others may return the next sample alone (DPM-Solver++, UniPC)
            scheduler = DDIMScheduler.from_config(scheduler.config, clip_sample=False)
            scheduler.set_timesteps(scheduler.config.num_train_timesteps)
        return scheduler.step(prediction[None], t, noisy[None]).pred_original_sample[0]
    scheduler.set_timesteps(1000)
    i = scheduler.timesteps.sub(t).abs().flip(0).argmin()  # Heun lists each timestep twice; a step starts at the second
    i = len(scheduler.timesteps) - 1 - int(i)
    scheduler.set_begin_index(i)
    moved = scheduler.step(prediction[None], scheduler.timesteps[i], noisy[None]).prev_sample[0] - noisy
    level, after = scheduler.sigmas[i : i + 2].tolist()
    return noisy + moved * level / (level - after)


def walk(aim: Objective, folder: Path, val: Data, ones: dict, ask: walks.Ask, steps: int) -> walks.Walk | None:
    """Return the trajectory of the exported pipeline in `folder` with answering nets, or None if it cannot be called with them."""
    pipe = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True).to(aim.clean.device)
    key = clean_key(val)
    each = [{k: v[i : i + 1] for k, v in ones.items()} for i in range(min(FEW, len(ones[key])))]
    try:
        return walks.walked(pipe, [Knowing(aim, one[key], []) for one in each], each, key, ask, steps)
    except (TypeError, KeyError, AttributeError):  # a fork's pipeline with another signature
        return None
