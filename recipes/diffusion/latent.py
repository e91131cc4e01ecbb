"""Generate images of a class in the latents of an autoencoder trained here, with classifier-free guidance, evaluated on samples.

tiny  real handwritten digits (MNIST-5k: 4,000 for training, 1,000 to validate; test: others, with other noise) at 32x32, five minutes.
full  256x256 images of your own classes, `--data.path FOLDER` or `hub:owner/name`; an accelerator. The same code path.

Latent diffusion (Rombach 2022): stage `autoencoder` learns to encode an image as a small latent and to decode it. Stage `latent`
is diffusion/pixel on those latents; `diff` shows all changes.

The factors that normalise latents to mean 0 and deviation 1 are measured after the autoencoder's training, because they drift
during it, and stored in its config. Each image is encoded once, without sampling. An autoencoder with unreadable reconstructions
is refused. Guidance, sampling and export are those of diffusion/pixel. Samples are evaluated as images.

On digits, min-SNR weights reduced agreement without guidance (83% against 91% with `--noise.snr-gamma inf`, 3 seeds). The EMA had
no effect. Stable Diffusion's factor, 0.18215, gave better agreement and a slightly larger distance (3 seeds, half the training).
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from trainworthy.core.base.config import Optim, Phase, RunSettings, Train
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.diffusion.data import pictures
from trainworthy.recipes.diffusion.evaluation.scores import Sampling, Scores
from trainworthy.recipes.diffusion.gates import latent as latent_gates
from trainworthy.recipes.diffusion.gates import samples
from trainworthy.recipes.diffusion.models import latents, nets, pipeline, usage
from trainworthy.recipes.diffusion.models.noise import Noise, Process

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of diffusion/latent."""

    data: pictures.Source = field(default_factory=lambda: pictures.Source(image_size=32))
    autoencoder: Phase = field(default_factory=Phase)
    latent: Phase = field(default_factory=Phase)
    vae: latents.Vae = field(default_factory=latents.Vae)
    noise: Noise = field(default_factory=Noise)
    SEARCH_RANGES = "noise.snr_gamma=1:20 conditioning_dropout_prob=0.05:0.2"
    sampling: Sampling = field(default_factory=Sampling)
    conditioning_dropout_prob: float = 0.1
    """Fraction of samples without a class, so that one net learns both predictions of guidance; 0: no guidance."""
    ema: float = 0.999
    """Decay of the EMA that is sampled and exported; 0: none."""
    widths: tuple[int, ...] = (32, 64)
    """Channels of the diffusion net at each resolution of a latent; every one after the first halves it. Multiples of 8."""
    layers: int = 1
    """Residual blocks at each resolution."""
    attention: bool = False
    """Self-attention at the lowest resolution."""


def tiny() -> Config:
    """MNIST-5k at 32x32 on one CPU core."""
    return Config(
        autoencoder=Phase(epochs=8, eval_every=2, lr=2e-3),
        latent=Phase(epochs=16, eval_every=4, lr=2e-3),
        train=Train(batch_size=64),
        optim=Optim(warmup=0.05),
        run=RunSettings(threads=1, save_every=4),
    )


def small() -> Config:
    """`full` at 128x128 with fewer epochs, for one GPU of 24 GB: planned as 40 minutes, not trained yet."""
    cfg = full()
    cfg.data.image_size, cfg.widths = 128, (128, 256, 384)
    cfg.autoencoder.epochs, cfg.latent.epochs, cfg.latent.eval_every = 5, 100, 10
    return cfg


def full() -> Config:
    """Images of your own classes at 256x256 on an accelerator; your own classifier's export evaluates guidance."""
    return Config(
        data=pictures.Source(path="hub:ethz/food101", image_size=256, classifier="runs/vision-classify/export"),
        sampling=Sampling(num_inference_steps=50),
        vae=latents.Vae(widths=(64, 128, 256, 256), layers=2, kl=1e-6),
        widths=(128, 256, 384, 512),
        layers=2,
        attention=True,
        ema=0.9999,
        autoencoder=Phase(epochs=20, batch_size=64, eval_every=2, lr=2e-4),
        latent=Phase(epochs=400, batch_size=256, eval_every=20, lr=2e-4),
        train=Train(precision="bf16", eval_batch_size=64),
        optim=Optim(weight_decay=0.0, warmup=0.02),
    )


# ----------------------------------------------------------------------------------------------------------------- data
class Noised(core.Data):
    """Latents (N, c, h, w) of `images` with labels (N,) and noise of a random timestep. In training the class may be dropped.

    In evaluation each latent always has the same noise and timestep, and no class is dropped.
    """

    split = "val"
    """Each split has its own evaluation noise."""

    def __init__(
        self, latents: Tensor, images: Tensor, labels: Tensor, classes: tuple[str, ...], process: Process, drop: float
    ):
        self.latents, self.images, self.labels = latents, images, labels
        self.small = pictures.small(
            images
        )  # splits are compared by images: latents of different images may be near each other
        self.process, self.drop, self.null = process, drop, len(classes)
        self.fields = {
            "small": core.Field("source", low=-1.0, high=1.0),
            "latent": core.Field("target", computed=True),
            "noisy": core.Field("input"),
            "timestep": core.Field("input", low=0, high=process.noise.num_train_timesteps - 1),
            "condition": core.Field("input", low=0, high=self.null),
            "label": core.Field("target", classes=classes),
        }

    def __len__(self) -> int:
        return len(self.labels)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        training = generator is not None
        generator = generator or pictures.fixed_draws(self.split, index)
        latent, label = self.latents[index], self.labels[index]
        timestep = torch.randint(self.process.noise.num_train_timesteps, (), generator=generator)
        noise = torch.randn(latent.shape, generator=generator)
        hidden = torch.rand((), generator=generator) < self.drop and training
        noisy = self.process.add(latent[None], noise[None], timestep[None])[0]
        condition = torch.tensor(self.null) if hidden else label
        drawn = {"noise": noise, "noisy": noisy, "timestep": timestep, "condition": condition}
        return {"small": self.small[index], "latent": latent, **drawn, "label": label}

    def peek(self, index: int, key: str):
        return self.labels[index] if key == "label" else super().peek(index, key)


# --------------------------------------------------------------------------------------------------------------- stages
def autoencoder(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """Stage one: images to latents and back."""
    found, side = pictures.read(cfg.data), cfg.data.image_size
    images, labels, classes, learn, held_out, notes, tested = found
    model = latents.make(cfg.vae, images.shape[1], side)
    shape = latents.shape(model, side, len(cfg.widths) - 1)
    rows = {"train": learn, "val": held_out} | ({} if tested is None else {"test": tested})
    data = {name: latents.Pictures(pictures.Rows(images, i), labels[i], classes, shape) for name, i in rows.items()}
    classifier = pictures.classifier(cfg.data, found.classes)
    data["train"].notes = {**notes, "classifier": classifier.description}
    trip = latents.RoundTrip(run, classifier, found)

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        posterior, back = latents.there_and_back(model, batch)
        wrong = (back - batch["target"]).flatten(1)
        return {
            "mse": wrong.square().mean(1).sum(),
            "l1": cfg.vae.l1 * wrong.abs().mean(1).sum(),
            "kl": cfg.vae.kl * posterior.kl().sum() / math.prod(shape),
        }

    def initial_loss(batch: dict) -> float:
        """Every latent decodes to 0."""
        return (batch["target"].square().mean() + cfg.vae.l1 * batch["target"].abs().mean()).item()

    def export(folder: Path) -> None:
        """Save the AutoencoderKL with its own factors in its config."""
        latents.measured(model.eval(), latents.cached(model, images)[learn]).save_pretrained(folder)

    return core.Stage(
        name="autoencoder",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        shard_units=latents.units,
        data=data,
        loss=loss,
        evaluate=trip.evaluate,
        metric=core.Metric("psnr", "how well does a picture come back (dB)?", floor=trip.floor, ceiling=40.0),
        frozen_modules=classifier.frozen_modules,
        expect=core.Expect(initial_loss=None if cfg.vae.path else initial_loss, overfit_steps=300, overfit_metric=18.0,
                           small_terms=("kl",)),
        baselines=trip.blank,
        upper_bounds=("real pictures",),
        preview=lambda batch: pictures.tiles(batch["image"], [classes[c] for c in batch["label"].tolist()]),
        predict=trip.tiles,
        pretrained={k: v.clone() for k, v in model.state_dict().items()} if cfg.vae.path else None,
        export=export,
        gates=[latent_gates.AUTOENCODER],
    )  # fmt: skip


def latent(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """Stage two: diffusion of latents that the frozen autoencoder has encoded once."""
    found = pictures.read(cfg.data)
    images, labels, classes, learn, held_out, notes, tested = found
    process, n, sampling = Process(cfg.noise, "latent", math.inf), len(classes), cfg.sampling
    vae = previous.eval_model.to(run.device).eval()
    middles = latents.cached(vae, images)
    z = pipeline.scaled(latents.measured(vae, middles[learn]), middles)
    z = latents.shared(z)

    def part(chosen: Tensor) -> Noised:
        rows, own = pictures.Rows(z, chosen), pictures.Rows(images, chosen)
        return Noised(rows, own, labels[chosen], classes, process, cfg.conditioning_dropout_prob)

    train_data, val_data = part(learn), part(held_out)
    data = {"train": train_data, "val": val_data}
    if tested is not None:
        data["test"] = part(tested)
        data["test"].split = "test"

    def make_model() -> nn.Module:
        return nets.unet(z.shape[1], n, z.shape[2], cfg.widths, cfg.layers, cfg.attention)

    model = make_model()
    ema = core.Ema(model, cfg.ema) if cfg.ema else None
    classifier = pictures.classifier(cfg.data, found.classes)
    train_data.notes = {**notes, "latents": latents.describe_scaling(vae), "classifier": classifier.description}

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        t = batch["timestep"]
        prediction = model(batch["noisy"], t, batch["condition"]).sample.float()
        target = process.target(batch["latent"], batch["noise"], t)
        error = (prediction - target).square().mean((1, 2, 3))  # (B,)
        return {"mse": (process.weights(t) * error).sum()}

    def sample(model: nn.Module, classes: Tensor, noise: Tensor, scale: float, sampler: str = "ddim") -> Tensor:
        """Return images (B, C, H, W) in [-1, 1], from the functions that the exported pipeline calls."""
        how = {"null": n, "guidance_scale": scale, "num_inference_steps": sampling.num_inference_steps}
        made = pipeline.sample(model, process.sampler(sampler), classes, noise, **how)
        return pipeline.decode(vae, made).clamp(-1, 1)

    scores = Scores(run, classifier, found, sample, sampling.every)

    def denoise(model: nn.Module, data: core.Data) -> dict[str, float]:
        """Denoise every sample in one step from its own noise level."""
        return process.seen(run.gather(torch.cat([process.look(model, b) for b in run.batches(data)])))

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        subset, scale, differences = View(data, range(min(16, len(data)))), sampling.guidance_scale, []
        for b in run.batches(subset):
            first, second = (sample(model, b["condition"], b["noise"], scale, name) for name in ("ddim", "dpm++"))
            differences.append((first - second).square().mean((1, 2, 3)))
        rms = run.gather(torch.cat(differences)).mean().sqrt().item()
        return {**scores.measured(model, data, scale), **denoise(model, data), "sampler_difference": rms}

    def figures(at_hand: nn.Module, data: core.Data) -> dict:
        return {
            "Samples by guidance scale": scores.curve(ema.model if ema else None, model, data, sampling.scales),
            "Samples": scores.grid(at_hand, data, sampling.guidance_scale),
        }

    def baselines() -> dict[str, dict[str, float]]:
        untrained = make_model().to(run.device).eval()
        plain = scores.measured(ema.model if ema else model, val_data, 1.0)
        return {
            "untrained net": scores.measured(untrained, val_data, sampling.guidance_scale),
            "without guidance": plain,
        }

    def preview(batch: dict) -> list[core.Tile]:
        conditions = zip(batch["condition"].tolist(), batch["timestep"].tolist(), strict=True)
        seen = pipeline.decode(vae, batch["noisy"].to(run.device))
        return pictures.tiles(seen, [f"{'none' if c == n else classes[c]}, t {t}" for c, t in conditions])

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        return scores.make_tiles(sample(model, batch["label"], batch["noise"], sampling.guidance_scale), batch["label"])

    def export(folder: Path) -> None:
        """Save a DiffusionPipeline: unet/, scheduler/, vae/ with its factors, and the pipeline's own source."""
        pictures.save_pipeline(folder, (ema.model if ema else model).eval().cpu(), process.sampler(), vae)

    thing = "digit" if cfg.data.path == "digits" else "class"
    return core.Stage(
        name="latent",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data=data,
        loss=loss,
        evaluate=evaluate,
        metric=core.Metric("agreement", f"do the samples show the requested {thing}?", floor=1 / n, ceiling=1.0),
        probe=core.Probe(core.Metric("denoised", "how much of a latent is seen through its noise?", 0.0, 1.0), denoise),
        ema_model=ema.model if ema else None,
        state={"ema": ema} if ema else {},
        frozen_modules={"vae": vae, **classifier.frozen_modules},
        expect=core.Expect(initial_loss=process.initial_loss, overfit_steps=200, overfit_metric=0.95),
        baselines=baselines,
        preview=preview,
        predict=predict,
        figures=figures,
        export=export,
        model_card=usage.card(classes, cfg.data.path, scale=sampling.guidance_scale, steps=sampling.num_inference_steps),
        gates=latent_gates.of(classifier, vae, cfg.vae.needed),
        monitors=[samples.samples, samples.light, samples.samplers],
    )  # fmt: skip


STAGES = [autoencoder, latent]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop of both stages; the gates rehearse this very function."""
    for step in run.steps(stage):
        run.update(stage, step.batches)
        if "ema" in stage.state:
            stage.state["ema"].update(stage.model)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)


if __name__ == "__main__":
    core.main(__file__)
