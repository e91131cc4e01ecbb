"""Generate images from captions, with a frozen text encoder and autoencoder; or train a LoRA of a hub model.

tiny  real handwritten digits (MNIST-5k) with captions, encoded by SmolLM2's first layers; held-out digits use other
      wordings than training. One CPU core, minutes.
full  LoRA of Stable Diffusion (`--model`) on images of your own classes, or with your own captions.

The exported pipeline itself encodes the captions; the empty caption is the unconditional one. A model keeps its own autoencoder,
scaling factor, noise schedule and prediction type. Missing and truncated captions are reported. The export is diffusers' own
StableDiffusionPipeline, and generates from a caption what was measured.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from trainworthy.core.base.config import Optim, RunSettings, Train
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.diffusion.data import captions, pictures
from trainworthy.recipes.diffusion.evaluation.scores import Sampling, Scores
from trainworthy.recipes.diffusion.gates import samples
from trainworthy.recipes.diffusion.gates import text as text_gates
from trainworthy.recipes.diffusion.models import latents, pipeline, stable
from trainworthy.recipes.diffusion.models.noise import Noise, Process

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of diffusion/text."""

    data: captions.Source = field(default_factory=lambda: captions.Source(image_size=32))
    model: str = ""
    """Folder or hub name of a StableDiffusionPipeline to fine-tune; empty: a new net (--new.*)."""
    lora_rank: int = 0
    """Rank of LoRA adapters on the attention projections of --model; 0 trains the whole net."""
    new: stable.New = field(default_factory=stable.New)
    noise: Noise = field(default_factory=Noise)
    SEARCH_RANGES = "noise.snr_gamma=1:20 conditioning_dropout_prob=0.05:0.2"
    sampling: Sampling = field(default_factory=Sampling)
    conditioning_dropout_prob: float = 0.1
    """Fraction of samples with the empty caption, so that one net learns both predictions of guidance."""
    ema: float = 0.999
    """Decay of the EMA that is sampled and exported; 0: none."""
    needed: float = 20.0
    """Minimum PSNR in dB of held-out images after encoding and decoding by the autoencoder."""

    def __post_init__(self):
        self.model = stable.resolved(self.model)
        if self.lora_rank and (self.ema or not self.model):
            raise core.UserError("adapters are of a pretrained net, and no average is made of them",
                                 got=f"--lora-rank {self.lora_rank} --ema {self.ema:g} --model {self.model or '(none)'}",
                                 needed="--model FOLDER --lora-rank RANK --ema 0")  # fmt: skip


def tiny() -> Config:
    """MNIST-5k at 32x32 on one CPU core."""
    return Config(
        new=stable.New(tokens=16),
        train=Train(epochs=16, batch_size=64, eval_every=4),
        optim=Optim(lr=2e-3, warmup=0.05),
        run=RunSettings(threads=1, save_every=4),
    )


def full() -> Config:
    """LoRA of Stable Diffusion on images of your own classes, evaluated by your own classifier's export."""
    return Config(
        data=captions.Source(path="hub:ethz/food101", image_size=512, classifier="runs/vision-classify/export"),
        model="stable-diffusion-v1-5/stable-diffusion-v1-5",
        lora_rank=16,
        ema=0.0,
        sampling=Sampling(guidance_scale=5.0, num_inference_steps=50, every=50, scales=(1.0, 3.0, 5.0, 7.5)),
        train=Train(epochs=4, batch_size=16, accumulate=4, eval_batch_size=8, precision="bf16"),
        optim=Optim(lr=1e-4, weight_decay=0.01, warmup=0.03),
    )


# ---------------------------------------------------------------------------------------------------------------- model
def make_parts(cfg: Config, found: captions.Captioned) -> stable.Parts:
    """Return text encoder, autoencoder and net: those of a model, or a new net for existing encoders."""
    channels, side = found.images.shape[1:3]
    if cfg.model:
        return stable.model(cfg.model, cfg.noise, channels, side)
    parts = stable.new(cfg.new, cfg.noise, channels, side)
    stable.centred(parts.vae, latents.cached(parts.vae, found.images)[found.learn])
    return parts


# ---------------------------------------------------------------------------------------------------------------- stage
def text(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    found = captions.in_channels(captions.read(cfg.data), stable.channels(cfg.model, cfg.new.vae))
    parts, sampling, labelled = make_parts(cfg, found), cfg.sampling, bool(found.classes)
    process = Process(parts.noise, "latent", float("inf"), parts.scheduler)
    process.condition_key = "caption_ids"
    vae = parts.vae.to(run.device).eval()
    z = latents.shared(pipeline.scaled(vae, latents.cached(vae, found.images)))
    train_data, val_data = (
        captions.Noised(z, found, i, process, cfg.conditioning_dropout_prob) for i in (found.learn, found.held_out)
    )
    data = {"train": train_data, "val": val_data}
    if found.test is not None:
        data["test"] = captions.Noised(z, found, found.test, process, cfg.conditioning_dropout_prob)
        data["test"].split = "test"
    words = parts.read(found.captions, run.device)
    model = stable.Captioned(parts.unet, words)
    came = stable.adapted(model, cfg.lora_rank)
    untrained = stable.snapshot(model)
    ema = core.Ema(model, cfg.ema) if cfg.ema else None
    classifier = pictures.classifier(cfg.data, found.classes) if labelled else None
    train_data.notes = captions.describe_data(found, parts, classifier)

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        t = batch["timestep"]
        prediction = model(batch["noisy"], t, batch["condition"]).sample.float()
        target = process.target(batch["latent"], batch["noise"], t)
        error = (prediction - target).square().mean((1, 2, 3))  # (B,)
        return {"mse": (process.weights(t) * error).sum()}

    def sample(model: nn.Module, captions: Tensor, noise: Tensor, scale: float, sampler: str = "ddim") -> Tensor:
        """Return images (B, C, H, W) in [-1, 1]. The gate `prompt` checks that the exported pipeline makes the same ones."""
        how = {"null": val_data.null, "guidance_scale": scale, "num_inference_steps": sampling.num_inference_steps}
        return pipeline.decode(vae, pipeline.sample(model, process.sampler(sampler), captions, noise, **how)).clamp(
            -1, 1
        )

    scores = Scores(run, classifier, found, sample, sampling.every) if classifier else None

    def denoise(model: nn.Module, data: core.Data) -> dict[str, float]:
        """Denoise every sample in one step from its own noise level."""
        return process.seen(run.gather(torch.cat([process.look(model, b) for b in run.batches(data)])))

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        subset, scale, differences = View(data, range(min(16, len(data)))), sampling.guidance_scale, []
        for b in run.batches(subset):
            first, second = (sample(model, b["condition"], b["noise"], scale, name) for name in ("ddim", "dpm++"))
            differences.append((first - second).square().mean((1, 2, 3)))
        rms = run.gather(torch.cat(differences)).mean().sqrt().item()
        matched = {"matched": captions.matched(run, process, model, data), "sampler_difference": rms}
        return {**(scores.measured(model, data, scale) if scores else {}), **denoise(model, data), **matched}

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        made = sample(model, batch["caption_ids"], batch["noise"], sampling.guidance_scale)
        right = (classifier(made)[0] == batch["label"]).float().tolist() if classifier else None
        return pictures.tiles(made, [found.captions[i] for i in batch["caption_ids"].tolist()], right)

    def figures(at_hand: nn.Module, data: core.Data) -> dict:
        some = View(data, range(0, len(data), max(1, len(data) // 40)))
        grid = {"Samples": [tile for b in run.batches(some) for tile in predict(at_hand, b)]}
        curve = scores and scores.curve(ema.model if ema else None, model, data, sampling.scales)
        return {"Samples by guidance scale": curve, **grid} if scores else grid

    def baselines() -> dict[str, dict[str, float]]:
        first, at_hand = untrained().to(run.device).eval(), ema.model if ema else model
        if not scores:
            return {"untrained net": denoise(first, val_data)}
        learnt = View(train_data, range(0, len(train_data), max(1, len(train_data) // len(val_data))))
        return {"untrained net": scores.measured(first, val_data, sampling.guidance_scale),
                "without guidance": scores.measured(at_hand, val_data, 1.0),
                "in words it learnt": scores.measured(at_hand, learnt, sampling.guidance_scale)}  # fmt: skip

    def preview(batch: dict) -> list[core.Tile]:
        conditions = zip(batch["condition"].tolist(), batch["timestep"].tolist(), strict=True)
        seen = pipeline.decode(vae, batch["noisy"].to(run.device))
        return pictures.tiles(seen, [f"{(*found.captions, '(empty)')[c]}, t {t}" for c, t in conditions])

    def export(folder: Path) -> None:
        """Save diffusers' own StableDiffusionPipeline, with adapters merged and also separate in lora/."""
        stable.save(folder, parts, ema.model if ema else model, process.sampler(), cfg.lora_rank)

    agreement = core.Metric("agreement", "do the samples show what new captions request?", floor=1 / max(1, len(found.classes)),
                        ceiling=1.0)  # fmt: skip
    seen = core.Metric("denoised", "how much of a latent is seen through its noise?", 0.0, 1.0)
    return core.Stage(
        name="text",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data=data,
        loss=loss,
        evaluate=evaluate,
        metric=agreement if scores else seen,
        probe=core.Probe(seen, denoise),
        ema_model=ema.model if ema else None,
        state={"ema": ema} if ema else {},
        frozen_modules={"vae": vae, "text": parts.encoder, **(classifier.frozen_modules if classifier else {})},
        expect=stable.expected(cfg, model, process, loss),
        baselines=baselines,
        upper_bounds=("in words it learnt",),
        preview=preview,
        predict=predict,
        figures=figures,
        pretrained=came if cfg.model else None,
        export=export,
        gates=text_gates.of(classifier, vae, cfg.needed, found.captions),
        monitors=[*([samples.samples, samples.light] if scores else []), samples.samplers, text_gates.captions_matter],
    )  # fmt: skip


STAGES = [text]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop; the gates rehearse this very function."""
    for step in run.steps(stage):
        run.update(stage, step.batches)
        if "ema" in stage.state:
            stage.state["ema"].update(stage.model)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)


if __name__ == "__main__":
    core.main(__file__)
