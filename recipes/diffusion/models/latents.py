"""Latents of an autoencoder: its measured scaling factors, encoding each picture once, and reconstruction quality."""

import math
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn
from trainworthy.core import Data, Field, Run, Tile, UserError
from trainworthy.core.base import planning
from trainworthy.core.base.doubles import to_double
from trainworthy.core.loop.weights import digest
from trainworthy.core.recipe.stage import rows
from trainworthy.recipes.diffusion.data import pictures
from trainworthy.recipes.diffusion.models import nets, pipeline
from trainworthy.recipes.shared import hub
from trainworthy.recipes.shared.classifier import Classifier
from trainworthy.recipes.vision.data.pictures import Labelled


@dataclass
class Vae:
    """The autoencoder."""

    path: str = ""
    """Folder or hub name of an AutoencoderKL to start stage one from; empty: a new one."""
    widths: tuple[int, ...] = (16, 32, 32)
    """Channels of a new autoencoder at each resolution; each further one halves the resolution. Multiples of 8."""
    layers: int = 1
    """Residual blocks of a new autoencoder at each resolution."""
    channels: int = 4
    """Channels of a latent."""
    l1: float = 0.5
    """Weight of the mean absolute error, added to the mean square error."""
    kl: float = 1e-3
    """Weight of the KL divergence of latents from a standard normal, in nats per value."""
    needed: float = 20.0
    """Smallest PSNR of reconstructed validation pictures in dB; below it stage two refuses the autoencoder."""


AT_ONCE = 256 * 32 * 32  # pixels encoded together: 256 small pictures, or one of 512 x 512
KEPT: dict[str, Tensor] = {}
"""Cached latents by (autoencoder, pictures): gates rebuild the stage with the same autoencoder."""
MARKS: dict[tuple, tuple[Tensor, str]] = {}
"""Digests of pictures by their place in memory."""
SHARED: list[weakref.ref[Tensor]] = []
"""Scaled latents that a stage still reads."""


def make(cfg: Vae, channels: int, side: int) -> AutoencoderKL:
    """Return a new autoencoder for pictures with this number of channels, or the requested one."""
    if not cfg.path:
        return nets.autoencoder(channels, cfg.channels, side, cfg.widths, cfg.layers)
    if not Path(cfg.path).is_dir() and cfg.path.count("/") == 1 and not cfg.path.startswith((".", "/")):
        hub.allowed(cfg.path, "--vae.path")
    try:
        vae = AutoencoderKL.from_pretrained(cfg.path)
    except OSError as error:
        raise UserError("no autoencoder there", got=str(error).strip().splitlines()[0],
                        needed="a folder or name of an AutoencoderKL",
                        next="the vae/ of an earlier run's export; or leave --vae.path out: one is trained") from None  # fmt: skip
    got = (vae.config.in_channels, vae.config.latent_channels)
    if got != (channels, cfg.channels):
        raise UserError(f"the autoencoder in {cfg.path} does not fit", got=f"{got[0]} channels of pictures and {got[1]} of latents",
                        needed=f"{channels} and {cfg.channels} (--vae.channels)")  # fmt: skip
    return vae


def shape(vae: nn.Module, side: int, strides: int) -> tuple[int, int, int]:
    """Return the shape (c, h, w) of latents of pictures of `side` pixels. The net must be able to halve it `strides` times."""
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    least = factor * 2**strides
    if side % least or side < 2 * least:
        raise UserError("the pictures do not fit the strides of the nets", got=f"{side} pixels, {side / factor:g} of a latent",
                        needed=f"a multiple of {least} and at least {2 * least}: the autoencoder makes one of {factor}, the net "
                        f"halves those {strides} time(s)",
                        next="another --data.image-size, fewer --vae.widths or fewer --widths")  # fmt: skip
    return vae.config.latent_channels, side // factor, side // factor


def at_once(images: Tensor) -> int:
    """Return how many of these images (N, C, H, W) are encoded together."""
    return max(1, AT_ONCE // (images.shape[-1] * images.shape[-2]))


def _mark(images: Tensor) -> str:
    """Return the digest of all pictures, read once where every build gets the same memory."""
    own = (images.data_ptr(), images.shape, images.stride(), images._version)
    if own not in MARKS:
        while len(MARKS) > 1:
            MARKS.pop(next(iter(MARKS)))
        MARKS[own] = (images, digest({"pictures": images}))  # kept, so that no other tensor gets its address
    return MARKS[own][1]


@torch.no_grad()
def cached(vae: nn.Module, images: Tensor) -> Tensor:
    """Return the unscaled latents of all pictures, (N, c, h, w), on the CPU. Encoded once per autoencoder."""
    if planning.active:  # one picture has the shape of all
        return pipeline.middle(vae, images[:1]).cpu().repeat(len(images), 1, 1, 1)
    key = digest(vae.state_dict()) + _mark(images)
    if key not in KEPT:
        while len(KEPT) > 1:
            KEPT.pop(next(iter(KEPT)))
        device = next(vae.parameters()).device
        KEPT[key] = torch.cat([pipeline.middle(vae, x.to(device)).cpu() for x in images.split(at_once(images))])
    return KEPT[key]


def shared(z: Tensor) -> Tensor:
    """Return the scaled latents of an earlier build if they are the same and in use, so that all builds hold them once; else `z`."""
    for ref in SHARED:
        if (known := ref()) is not None and known.shape == z.shape and torch.equal(known, z):
            return known
    SHARED[:] = [*(ref for ref in SHARED if ref() is not None), weakref.ref(z)]
    return z


def measured(vae: nn.Module, middles: Tensor) -> nn.Module:
    """Put mean and standard deviation of the latents (N, c, h, w) into the config of `vae` as shift_factor and scaling_factor (1 /
    deviation). Call it after training: both drift while the autoencoder learns."""
    mean, std = to_double(middles).mean().item(), to_double(middles).std().item()
    if not (math.isfinite(std) and std > 1e-6):
        raise UserError("the autoencoder's latents are all the same", got=f"a deviation of {std:g}", needed="latents that vary",
                        cause="the divergence weighs too much (--vae.kl), or it was not trained")  # fmt: skip
    vae.register_to_config(shift_factor=mean, scaling_factor=1 / std)
    return vae


def units(vae: nn.Module) -> list[nn.Module]:
    """Return the modules that `--shard` gathers at once: blocks, and the halves, which are called without the whole."""
    ends = (vae.encoder, vae.quant_conv, vae.post_quant_conv, vae.decoder)
    return [*rows(vae), *(module for module in ends if module is not None)]


def describe_scaling(vae: nn.Module) -> str:
    """Return the line of the data report."""
    mean, std = vae.config.shift_factor or 0.0, 1 / vae.config.scaling_factor
    return f"each picture is encoded once; mean {mean:.3f} is subtracted, then divided by the deviation {std:.3f}"


class Pictures(Data):
    """Pictures (N, C, H, W) in [-1, 1] with labels (N,). In training each has the noise (c, h, w) for sampling its latent; in evaluation
    none."""

    def __init__(self, images: Tensor, labels: Tensor, classes: tuple[str, ...], shape: tuple[int, ...]):
        self.images, self.labels, self.shape = images, labels, shape
        self.small = pictures.small(images)
        self.fields = {
            "small": Field("source", low=-1.0, high=1.0),
            "image": Field("input", low=-1.0, high=1.0),
            "target": Field("target", low=-1.0, high=1.0),
            "noise": Field("input"),  # it also makes eight samples distinguishable
            "label": Field("target", classes=classes),
        }

    def __len__(self) -> int:
        return len(self.labels)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        image = self.images[index]
        noise = torch.zeros(self.shape) if generator is None else torch.randn(self.shape, generator=generator)
        return {
            "small": self.small[index],
            "image": image,
            "target": image,
            "noise": noise,
            "label": self.labels[index],
        }

    def peek(self, index: int, key: str):
        return self.labels[index] if key == "label" else super().peek(index, key)


class RoundTrip:
    """Reconstruction quality of an autoencoder."""

    def __init__(self, run: Run, classifier: Classifier, found: Labelled):
        self.run, self.classifier, self.found = run, classifier, found
        mean = found.images[found.learn].mean(0)
        self.mean = mean
        self.floor = psnr((found.images[found.held_out] - mean).square().mean().item())
        """PSNR of the mean picture as a constant prediction, in dB."""

    def evaluate(self, vae: nn.Module, data: Data) -> dict[str, float]:
        """Return the PSNR over all pixels (dB), the share of pictures whose class the classifier still recognises, the KL divergence per
        latent value (nats), and mean and deviation of the latents."""
        rows = []
        for b in self.run.batches(data):
            posterior, back = there_and_back(vae, b)
            right = (self.classifier(back)[0] == b["label"]).float()
            z = posterior.mean.flatten(1)
            error = (back - b["target"]).square().mean((1, 2, 3))
            rows.append(torch.stack([error, right, posterior.kl() / z.shape[1], z.mean(1), z.square().mean(1)], 1))
        error, right, kl, mean, square = to_double(self.run.gather(torch.cat(rows))).mean(0).tolist()
        std = math.sqrt(max(square - mean**2, 0.0))
        return {"psnr": psnr(error), "read": right, "kl": kl, "latent_mean": mean, "latent_std": std}

    def blank(self) -> dict[str, dict[str, float]]:
        """Return the scores of the mean picture and of real pictures."""
        held_out = self.found.held_out
        truth = self.found.labels[held_out]
        real = torch.cat(
            [
                self.classifier(self.found.images[i].to(self.run.device))[0].cpu()
                for i in held_out.split(at_once(self.found.images))
            ]
        )
        always = self.classifier(self.mean[None].to(self.run.device))[0].item()
        return {"the mean picture": {"psnr": self.floor, "read": (truth == always).float().mean().item()},
                "real pictures": {"read": (real == truth).float().mean().item()}}  # fmt: skip

    def tiles(self, vae: nn.Module, batch: dict) -> list[Tile]:
        """Return tiles: each picture's reconstruction and whether the classifier still recognises its class."""
        _, back = there_and_back(vae, batch)
        right = (self.classifier(back)[0] == batch["label"]).float().tolist()
        return pictures.tiles(back, [self.found.classes[c] for c in batch["label"].tolist()], right)


def there_and_back(vae: nn.Module, batch: dict) -> tuple[DiagonalGaussianDistribution, Tensor]:
    """Return the posterior of each latent and its reconstruction (B, C, H, W), sampled with the sample's noise; without noise in evaluation.
    Memorised samples are read with the noise that they were trained with."""
    posterior = vae.encode(batch["image"]).latent_dist
    return posterior, vae.decode(posterior.mean + posterior.std * batch["noise"]).sample.float()


def psnr(error: float) -> float:
    """Return the PSNR in dB of a mean square error of pictures in [-1, 1]."""
    return 10 * math.log10(4 / max(error, 1e-12))
