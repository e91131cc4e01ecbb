"""Gates of diffusion in latents (DF3): the scale of the net's latents, cached against fresh latents, decoding back to images.

The gates call the autoencoder itself, without its scaling factors, to encode and decode an image. Latents, samples and the export
are compared with the result.
"""

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.named import order_causes
from trainworthy.core.gates.checks import formula
from trainworthy.core.gates.gate import Gate, GateContext, fetch, pick
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.diffusion.data import pictures as source
from trainworthy.recipes.diffusion.gates import samples, walks
from trainworthy.recipes.diffusion.gates.averages import ema
from trainworthy.recipes.diffusion.gates.objective import Knowing, Objective, clean_key, objective
from trainworthy.recipes.diffusion.models import latents, pipeline
from trainworthy.recipes.shared.classifier import Classifier

FEW = 64  # samples whose latents are encoded again, and number of least noisy samples out of LEVELS
MEAN = 0.25  # mean of latents at the net's input: many autoencoders have a factor and no shift
STD = (0.8, 1.25)
FRESH = 5e-3  # rms between cached and newly encoded latents, in deviations
ALIKE = 0.98  # cosine of two latents that are the same but for their scale
FACTOR = 0.01  # relative difference between a measured factor and the declared one
BACK = 0.05  # rms between pictures in [-1, 1] that should be equal
TRIED = 4  # pictures sampled on each path
TRIED_STEPS = 10
READ = 0.95  # the classifier must recognise this share of what it recognises among real pictures


@gate(
    "latent-scale",
    rows="DF3",
    title="the net's latents have mean 0 and standard deviation 1, and come from this autoencoder",
    reads="data model loss counts frozen_modules",
)
def latent_scale(context: GateContext) -> Finding:
    """Measures the scale of the net's input at the least noisy levels, minus the noise. Then it encodes 64 pictures of each split again:
    cached latents must be a linear function of the new ones, with the slope and offset in the autoencoder's config."""
    aim, (run, stage) = objective(context), context.look()
    calm = aim.sigma.argsort()[:FEW]
    noise = aim.batch["noise"][calm]
    there = aim.noisy[calm] - aim.sigma[calm].view(-1, 1, 1, 1).float() * noise
    mean, std = there.mean().item(), there.std().item()
    config = stage.frozen_modules["vae"].config
    read = {name: _both(context, run, stage, name) for name in stage.data}
    lines = {name: _fit_line(*both) for name, both in read.items()}
    off, mirrored = max(line[2] for line in lines.values()), max(_mirrored(*both) for both in read.values())
    slope, offset = lines["train"][:2]
    due = config.scaling_factor, -config.scaling_factor * (config.shift_factor or 0.0)
    same = all(abs(a - due[0]) <= FACTOR * due[0] and abs(b - due[1]) <= 5 * FACTOR for a, b, _ in lines.values())
    return Finding(
        abs(mean) <= MEAN and STD[0] <= std <= STD[1] and off <= FRESH and same,
        f"mean {mean:+.3f}, deviation {std:.3f} at the net; cached latents differ from fresh ones by {off:.1e}"
        f"{f', and {mirrored:.0%} of them are their mirror images' if mirrored else ''}; made with factor "
        f"{slope:.4g} and offset {offset:+.3f}, by its config {due[0]:.4g} and {due[1]:+.3f}",
        f"a mean within {MEAN:g}, a deviation of {STD[0]:g} to {STD[1]:g}; a difference of at most {FRESH:g}; factor and offset as in its "
        "config",
        order_causes(
            (mirrored > 0, "latents are mirrored, and a mirrored latent is not that of the mirrored picture: augment pictures before they are "
             "encoded"),
            (same and off <= FRESH, "another autoencoder's factor (0.18215 is Stable Diffusion's, and what diffusers assumes of any), or "
             "measured before training ended: 1 / deviation of its own latents, now"),
            (not same and off <= FRESH, "multiplied where it should divide, or twice; a shift that is not subtracted"),
            (off > FRESH and not mirrored, "cached with a random draw instead of the mode, from pictures of another range, or by an autoencoder that "
             "trained on")),
        evidence={"mean": mean, "std": std, "apart": off, "used": [slope, offset], "declared": due},
    )  # fmt: skip


def _both(context: GateContext, run: Run, stage: Stage, split: str) -> tuple[Tensor, Tensor]:
    """Return cached latents of a split and newly encoded ones (N, C, H, W)."""
    data, seed = stage.data[split], context.cfg.run.seed
    some = pick(data, min(FEW, len(data)), seed)
    cached = fetch(data, some, seed if split == "train" else None, run.device)[clean_key(data)]
    pictures = torch.stack([data.images[i] for i in some]).to(run.device)
    return to_double(cached), to_double(pipeline.middle(stage.frozen_modules["vae"], pictures))


def _fit_line(cached: Tensor, fresh: Tensor) -> tuple[float, float, float]:
    """Return (slope, offset, remaining rms) of a linear fit of cached latents to newly encoded ones."""
    x, y = (z.flatten() - z.mean() for z in (fresh, cached))
    slope = ((x @ y) / (x @ x).clamp_min(1e-30)).item()
    left = ((y - slope * x).norm() / y.norm().clamp_min(1e-30)).item()
    return slope, (cached.mean() - slope * fresh.mean()).item(), left


def _mirrored(cached: Tensor, fresh: Tensor) -> float:
    """Return the share of cached latents (N, C, H, W) that are the mirror images of newly encoded ones, and not the same."""

    def like(other: Tensor) -> Tensor:
        return torch.cosine_similarity(*((z - z.mean()).flatten(1) for z in (cached, other)))

    turned = torch.stack([like(fresh.flip(axes)) for axes in ((-1,), (-2,), (-2, -1))]).amax(0)
    return ((turned > ALIKE) & (like(fresh) < ALIKE)).double().mean().item()


def round_trip(classifier: Classifier | None, needed: float, ask: walks.Ask = walks.by_class) -> Gate:
    """Return the gate on encoding and decoding; without a classifier, pictures are not classified."""

    @gate(
        "round-trip",
        rows="DF3",
        title="latents decode back to their images, in the evaluation and in the export",
        reads="data model loss counts frozen_modules predict export",
    )
    def check(context: GateContext) -> Finding:
        """Checks PSNR and recognisability of reconstructed validation pictures. Then it compares samples of a net that knows one latent,
        from predict() and from the exported pipeline, with the autoencoder's own reconstruction."""
        aim, (run, stage) = objective(context), context.build(Rehearsal(steps=1))
        val, vae = stage.data["val"], stage.frozen_modules["vae"]
        some = pick(val, min(samples.KNOWN, len(val)), context.cfg.run.seed)
        batch = fetch(val, some, None, run.device)
        pictures = torch.stack([val.images[i] for i in some]).to(run.device)
        batch["picture"], back = pictures, _through(vae, pictures)
        psnr = latents.psnr((back - pictures).square().mean().item())
        read, real = _read(classifier, (back, pictures), batch["label"])
        ways = _sampling_paths(aim, run, stage, batch, ask)
        shipped = ways["the export"].factor
        good = psnr >= needed and read >= READ * real
        evaluated = context.follows != "rehearsed"
        off = {n for n, w in ways.items() if w.pictures > BACK or w.latents > FACTOR}
        return Finding(
            (good or not evaluated) and all(w.pictures <= BACK and w.latents <= FACTOR for w in ways.values()),
            f"{psnr:.1f} dB, the classifier reads {read:.1%} of {len(some)} reconstructions and {real:.1%} of the pictures"
            + ("" if evaluated else " (the autoencoder has seen eight pictures: not evaluated yet)")
            + "".join(f"; {n} {w.pictures:.3f} from the reconstruction, its latents {w.latents:.1%}" for n, w in ways.items())
            + f"; exported scaling_factor {shipped:.4g}",
            f"{needed:g} dB, {READ:.0%} of what it reads of the pictures; rms of pictures at most {BACK:g}, of what is decoded "
            f"{FACTOR:.0%}",
            order_causes(
                (evaluated and not good, "the autoencoder is not good enough: --autoencoder.epochs, wider --vae.widths, more --vae.channels, "
                 "less --vae.kl"),
                (bool(off - {"the export"}), "latents are decoded without dividing by the scaling factor, or with the shift at another "
                 "place"),
                (bool(off - {"the export"}), "clip_sample: latents are not in [-1, 1], and a sampler that clips them ruins them"),
                (off == {"the export"}, "exported with another autoencoder, or without its own factors in the config")),
            evidence={"psnr": psnr, "read": read, "real": real, "ways": {n: vars(w) for n, w in ways.items()}},
        )  # fmt: skip

    return check


@torch.no_grad()
def _through(vae: nn.Module, pictures: Tensor) -> Tensor:
    """Return the autoencoder's own reconstructions, without its scaling factors."""
    return torch.cat(
        [vae.decode(pipeline.middle(vae, x)).sample for x in pictures.split(latents.at_once(pictures))]
    ).float()


@dataclass
class Way:
    """Largest differences between one path from latents to pictures and the autoencoder's own."""

    pictures: float = 0.0
    """Rms of pictures in [-1, 1]."""
    latents: float = 0.0
    """Rms of the decoder's input, in deviations. A decoder with normalisation can hide a wrong factor in its pictures."""
    factor: float = 0.0
    """The scaling_factor in the decoding autoencoder's config."""


def _read(classifier: Classifier | None, seen: tuple[Tensor, ...], labels: Tensor) -> list[float]:
    """Return the share of each set of pictures that the classifier recognises."""
    return [1.0 if classifier is None else to_double(classifier(x)[0] == labels).mean().item() for x in seen]


def _sampling_paths(aim: Objective, run: Run, stage: Stage, batch: dict, ask: walks.Ask) -> dict[str, Way]:
    """Return the differences of predict() and of the exported pipeline, with a net that knows one latent."""
    with tempfile.TemporaryDirectory() as name:
        stage.export(Path(name))
        pipe = DiffusionPipeline.from_pretrained(name, trust_remote_code=True).to(run.device)
    pipe.set_progress_bar_config(disable=True)
    val, vae = stage.data["val"], stage.frozen_modules["vae"]
    found = {
        "predict()": Way(factor=vae.config.scaling_factor),
        "the export": Way(factor=pipe.vae.config.scaling_factor),
    }
    for i in range(TRIED):
        one = {k: v[i : i + 1] for k, v in batch.items()}
        # The same answer for every condition, so that guidance changes nothing.
        knowing = Knowing(aim, one[clean_key(val)], [])
        due, given = _decoded(vae, lambda one=one: _through(vae, one["picture"]))
        for way, net, make in (
            (found["predict()"], vae, lambda one=one, knowing=knowing: stage.predict(knowing, one)[0].image),
            (found["the export"], pipe.vae, lambda one=one, knowing=knowing: ask(pipe, one, knowing, TRIED_STEPS)),
        ):  # fmt: skip
            made, took = _decoded(net, make)
            way.pictures = max(way.pictures, (made - due).div(127.5).square().mean().sqrt().item())
            off = math.inf if took is None else ((took - given).norm() / given.norm()).item()
            way.latents = max(way.latents, off)
    return found


def _decoded(vae: nn.Module, make: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return (the picture that `make` makes, in 0 .. 255; the last input of the decoder of `vae`, if it ran)."""
    given: list[Tensor] = []
    with vae.decoder.register_forward_pre_hook(lambda _, args: given.append(args[0].detach()[:1])):
        made = make()
    pixels = source.tiles(made.clamp(-1, 1), [""])[0].image if made.is_floating_point() else made
    return pixels.float(), given[-1] if given else None


def decoding(
    classifier: Classifier | None, vae: nn.Module
) -> Classifier | Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    """Return `classifier` for latents."""
    return classifier and (lambda z: classifier(pipeline.decode(vae, z)))


def reconstruction(context: GateContext, stage: Stage, batch: dict) -> formula.Statements:
    """Squared and absolute error of a picture that was encoded, drawn with the sample's noise and decoded, and the divergence of its
    latents from a normal distribution (Kingma 2013, appendix B), per latent entry."""
    cfg, posterior = context.cfg.vae, stage.model.encode(batch["image"]).latent_dist
    mean, spread = posterior.mean.float(), posterior.logvar.float()
    back = stage.model.decode(mean + (spread / 2).exp() * batch["noise"]).sample.float()
    gap = (back - batch["target"]).flatten(1)
    kl = (mean**2 + spread.exp() - 1 - spread).flatten(1) / 2
    return {
        "mse": formula.Statement({"mean squared error": gap.pow(2).mean(1)}, {"a sum over the pixels": gap.pow(2).sum(1)}),
        "l1": formula.Statement({"mean absolute error": cfg.l1 * gap.abs().mean(1)}, optional=not cfg.l1, setting="vae.l1"),
        "kl": formula.Statement(
            {"divergence per latent entry": cfg.kl * kl.mean(1)},
            {"a sum over the latent's entries": cfg.kl * kl.sum(1),
             "the sign of the logarithm of the variance": cfg.kl * (mean**2 + spread.exp() - 1 + spread).flatten(1).mean(1) / 2},
            optional=not cfg.kl, setting="vae.kl",
        ),
    }  # fmt: skip


AUTOENCODER = formula.gate_of(
    reconstruction, rows="DF3",
    causes="another target than the picture itself\na mean over pixels that should be a sum, or the reverse\n"
    "latents are not drawn with the sample's noise",
)  # fmt: skip


def of(classifier: Classifier, vae: nn.Module, needed: float) -> list[Gate]:
    """Return the gates of a recipe in the latents of `vae`, whose decoded samples `classifier` classifies."""
    process = samples.noise_process(decoding(classifier, vae))
    own = [latent_scale, round_trip(classifier, needed), process]
    return [*own, samples.hidden_class, ema, samples.weighting, samples.two_samplers]
