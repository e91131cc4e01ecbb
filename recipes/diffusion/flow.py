"""Generate images of a class: a small rectified flow in pixel space with classifier-free guidance, evaluated on its samples.

tiny  real handwritten digits (MNIST-5k: 4,000 for training, 1,000 to validate; test: other digits, other noise) at 16x16; six minutes.
full  64x64 images of your own classes, `--data.path FOLDER` or `hub:owner/name`; an accelerator. The same code path.

A straight line leads from each image to noise, x_t = (1 - s) image + s noise with s = t / 1000. The net predicts its direction,
noise - image (Liu 2022), and a sampler integrates it backwards. `diff` with diffusion/pixel shows all changes.

A scoring model that was not trained on the generator's images evaluates the samples; the loss is not the result. Samples and
export use the EMA. The condition is dropped for one sample in ten, which guidance needs. Noise levels are logit-normal (Esser
2024), so that training concentrates on the middle of the line, where the error is largest. The net accepts the timesteps of its
samplers, integer or not. Noise, timestep and drop are drawn per sample, so that the division of a batch does not matter.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from trainworthy.core.base.config import Optim, RunSettings, Train
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.diffusion.data import pictures
from trainworthy.recipes.diffusion.evaluation.scores import Sampling, Scores
from trainworthy.recipes.diffusion.gates import samples
from trainworthy.recipes.diffusion.models import nets, pipeline, usage
from trainworthy.recipes.diffusion.models.flow_noise import Noise, Process

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of diffusion/flow."""

    data: pictures.Source = field(default_factory=pictures.Source)
    noise: Noise = field(default_factory=Noise)
    SEARCH_RANGES = "noise.logit_mean=-1:1 noise.logit_std=0.5:1.5 conditioning_dropout_prob=0.05:0.2"
    sampling: Sampling = field(default_factory=Sampling)
    conditioning_dropout_prob: float = 0.1
    """Fraction of samples without a class, so that one net learns both predictions of guidance; 0: no guidance."""
    ema: float = 0.999
    """Decay of the EMA that is sampled and exported; 0: none."""
    widths: tuple[int, ...] = (16, 32)
    """Channels at each resolution; every one after the first halves it. Multiples of 8."""
    layers: int = 1
    """Residual blocks at each resolution."""
    attention: bool = False
    """Self-attention at the lowest resolution."""


def tiny() -> Config:
    """MNIST-5k at 16x16 on one CPU core."""
    return Config(
        train=Train(epochs=12, batch_size=64, eval_every=3),
        optim=Optim(lr=2e-3, warmup=0.05),
        run=RunSettings(threads=1, save_every=2),
    )


def small() -> Config:
    """`full` at 32x32 with a smaller net, for one GPU of 24 GB: planned as 40 minutes, not trained yet."""
    cfg = full()
    cfg.data.image_size, cfg.widths, cfg.train.epochs, cfg.train.eval_every = 32, (128, 256, 256), 60, 6
    return cfg


def full() -> Config:
    """Images of your own classes at 64x64 on an accelerator; your own classifier's export evaluates guidance."""
    return Config(
        data=pictures.Source(path="hub:ethz/food101", image_size=64, classifier="runs/vision-classify/export"),
        sampling=Sampling(num_inference_steps=50),
        widths=(128, 256, 256, 512),
        layers=2,
        attention=True,
        ema=0.9999,
        train=Train(epochs=400, batch_size=256, eval_every=20, precision="bf16"),
        optim=Optim(lr=2e-4, weight_decay=0.0, warmup=0.02),
    )


# ----------------------------------------------------------------------------------------------------------------- data
class Noised(core.Data):
    """Images (N, C, H, W) in [-1, 1] with labels (N,) and noise of a random timestep. In training the class may be dropped.

    In evaluation each image always has the same noise and timestep, and no class is dropped.
    """

    split = "val"
    """Each split has its own evaluation noise."""

    def __init__(
        self, images: Tensor | pictures.Rows, labels: Tensor, classes: tuple[str, ...], process: Process, drop: float
    ):
        self.images, self.labels, self.process, self.drop, self.null = images, labels, process, drop, len(classes)
        self.fields = {
            "image": core.Field("source", low=-1.0, high=1.0),
            "noisy": core.Field("input"),
            "timestep": core.Field("input", low=0, high=process.noise.num_train_timesteps),
            "condition": core.Field("input", low=0, high=self.null),
            "label": core.Field("target", classes=classes),
        }

    def __len__(self) -> int:
        return len(self.labels)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        training = generator is not None
        generator = generator or pictures.fixed_draws(self.split, index)
        image, label = self.images[index], self.labels[index]
        logit = self.process.noise.logit_mean + self.process.noise.logit_std * torch.randn((), generator=generator)
        timestep = self.process.noise.num_train_timesteps * torch.sigmoid(logit)
        noise = torch.randn(image.shape, generator=generator)
        hidden = torch.rand((), generator=generator) < self.drop and training
        noisy = self.process.add(image[None], noise[None], timestep[None])[0]
        condition = torch.tensor(self.null) if hidden else label
        return {
            "image": image,
            "noise": noise,
            "noisy": noisy,
            "timestep": timestep,
            "condition": condition,
            "label": label,
        }

    def peek(self, index: int, key: str):
        return self.labels[index] if key == "label" else super().peek(index, key)


# ---------------------------------------------------------------------------------------------------------------- model
def make_model(cfg: Config, channels: int, n_classes: int) -> nn.Module:
    """diffusers' UNet (Ho 2020): (noisy, timestep, class or null) -> prediction, (B, C, H, W), 0 before training."""
    return nets.unet(channels, n_classes, cfg.data.image_size, cfg.widths, cfg.layers, cfg.attention)


# ---------------------------------------------------------------------------------------------------------------- stage
def generate(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    found = pictures.read(cfg.data)
    images, labels, classes, learn, held_out, notes, tested = found
    process, n, sampling = Process(cfg.noise), len(classes), cfg.sampling
    train_data = Noised(pictures.Rows(images, learn), labels[learn], classes, process, cfg.conditioning_dropout_prob)
    val_data = Noised(
        pictures.Rows(images, held_out), labels[held_out], classes, process, cfg.conditioning_dropout_prob
    )
    data = {"train": train_data, "val": val_data}
    if tested is not None:
        data["test"] = Noised(
            pictures.Rows(images, tested), labels[tested], classes, process, cfg.conditioning_dropout_prob
        )
        data["test"].split = "test"

    model = make_model(cfg, images.shape[1], n)
    ema = core.Ema(model, cfg.ema) if cfg.ema else None
    # After the model: building a classifier draws random numbers and takes a minute, which a wrong setting should not cost.
    classifier = pictures.classifier(cfg.data, found.classes)
    train_data.notes = {**notes, "classifier": classifier.description}

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        t = batch["timestep"]
        prediction = model(batch["noisy"], t, batch["condition"]).sample.float()
        target = process.target(batch["image"], batch["noise"], t)
        error = (prediction - target).square().mean((1, 2, 3))  # (B,)
        return {"mse": error.sum()}

    def sample(model: nn.Module, classes: Tensor, noise: Tensor, scale: float, sampler: str = "euler") -> Tensor:
        """Return images (B, C, H, W) in [-1, 1], from the function that the exported pipeline calls."""
        how = {"null": n, "guidance_scale": scale, "num_inference_steps": sampling.num_inference_steps}
        return pipeline.sample(model, process.sampler(sampler), classes, noise, **how).clamp(-1, 1)

    scores = Scores(run, classifier, found, sample, sampling.every)

    def denoise(model: nn.Module, data: core.Data) -> dict[str, float]:
        """Denoise every sample in one step from its own noise level."""
        return process.seen(run.gather(torch.cat([process.look(model, b) for b in run.batches(data)])))

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        subset, scale, differences = View(data, range(min(16, len(data)))), sampling.guidance_scale, []
        for b in run.batches(subset):
            first, second = (sample(model, b["condition"], b["noise"], scale, name) for name in ("euler", "heun"))
            differences.append((first - second).square().mean((1, 2, 3)))
        rms = run.gather(torch.cat(differences)).mean().sqrt().item()
        return {**scores.measured(model, data, scale), **denoise(model, data), "sampler_difference": rms}

    def figures(at_hand: nn.Module, data: core.Data) -> dict:
        return {
            "Samples by guidance scale": scores.curve(ema.model if ema else None, model, data, sampling.scales),
            "Samples": scores.grid(at_hand, data, sampling.guidance_scale),
        }

    def baselines() -> dict[str, dict[str, float]]:
        untrained = make_model(cfg, images.shape[1], n).to(run.device).eval()
        plain = scores.measured(ema.model if ema else model, val_data, 1.0)
        return {
            "untrained net": scores.measured(untrained, val_data, sampling.guidance_scale),
            "without guidance": plain,
        }

    def preview(batch: dict) -> list[core.Tile]:
        conditions = zip(batch["condition"].tolist(), batch["timestep"].tolist(), strict=True)
        return pictures.tiles(batch["noisy"], [f"{'none' if c == n else classes[c]}, t {t:.0f}" for c, t in conditions])

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        return scores.make_tiles(sample(model, batch["label"], batch["noise"], sampling.guidance_scale), batch["label"])

    def export(folder: Path) -> None:
        """Save a DiffusionPipeline: unet/, scheduler/ and the pipeline's own source."""
        pictures.save_pipeline(folder, (ema.model if ema else model).eval().cpu(), process.sampler())

    thing = "digit" if cfg.data.path == "digits" else "class"
    return core.Stage(
        name="generate",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data=data,
        loss=loss,
        evaluate=evaluate,
        metric=core.Metric("agreement", f"do the samples show the requested {thing}?", floor=1 / n, ceiling=1.0),
        probe=core.Probe(core.Metric("denoised", "how much of a picture is seen through its noise?", 0.0, 1.0), denoise),
        ema_model=ema.model if ema else None,
        state={"ema": ema} if ema else {},
        frozen_modules=classifier.frozen_modules,
        expect=core.Expect(initial_loss=process.initial_loss, overfit_steps=200, overfit_metric=0.95),
        baselines=baselines,
        preview=preview,
        predict=predict,
        figures=figures,
        export=export,
        model_card=usage.card(classes, cfg.data.path, scale=sampling.guidance_scale, steps=sampling.num_inference_steps),
        gates=samples.of(classifier),
        monitors=[samples.samples, samples.light, samples.samplers],
    )  # fmt: skip


STAGES = [generate]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop; the gates rehearse this very function."""
    for step in run.steps(stage):
        run.update(stage, step.batches)
        if cfg.ema:
            stage.state["ema"].update(stage.model)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)


if __name__ == "__main__":
    core.main(__file__)
