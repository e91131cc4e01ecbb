"""The denoising net of Stable Diffusion XL, to plan a fine-tune of all its weights: `trainworthy plan examples/plans/sdxl.py`.

The shape is that of the published configuration (stabilityai/stable-diffusion-xl-base-1.0, unet/config.json). Latents and captions'
states are noise, as if they had been computed before the training, so autoencoder and text encoders are not in memory. It plans memory
and time; a real fine-tune needs real pictures in place of `Latents`.
"""

from dataclasses import dataclass

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from trainworthy import core

SDXL = {
    "sample_size": 128,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [320, 640, 1280],
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
SMALL = SDXL | {
    "sample_size": 16,
    "block_out_channels": [32, 64, 64],
    "transformer_layers_per_block": [1, 1, 1],
    "attention_head_dim": [2, 4, 4],
    "cross_attention_dim": 64,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
}
TOKENS, STEPS = 77, 1000


@dataclass
class Config(core.Config):
    """Settings of this plan. --train.batch-size counts pictures of an optimiser step, over all processes."""

    resolution: int = 1024
    """Side of a picture in pixels; a latent has an eighth of it."""
    small: bool = False
    """Use a net of the same kind with 0.1% of the weights."""


def tiny() -> Config:
    return Config(resolution=128, small=True, train=core.Train(epochs=1, batch_size=8), optim=core.Optim(lr=1e-5))


def full() -> Config:
    return Config(
        train=core.Train(epochs=1, batch_size=64, eval_batch_size=1, precision="bf16", gradient_checkpointing=True),
        optim=core.Optim(lr=1e-5),
    )


class Latents(core.Data):
    """Noise in the shape of noised latents, of the text encoders' states, and of the sizes that SDXL is told."""

    def __init__(self, side: int, config: dict, n: int):
        self.side, self.n = side, n
        self.width = config["cross_attention_dim"]
        self.pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        self.fields = {"noisy": core.Field("input"), "noise": core.Field("target")}

    def __len__(self) -> int:
        return self.n

    def get(self, index: int, generator: torch.Generator | None) -> dict:
        draws = generator or torch.Generator().manual_seed(index)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draws)

        return {"noisy": noise(4, self.side, self.side), "noise": noise(4, self.side, self.side),
                "timestep": torch.randint(STEPS, (), generator=draws), "states": noise(TOKENS, self.width),
                "pooled": noise(self.pooled), "sizes": torch.full((6,), 8.0 * self.side)}  # fmt: skip


def sdxl(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    config = SMALL if cfg.small else SDXL
    model = UNet2DConditionModel.from_config(config)

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        told = {"text_embeds": batch["pooled"], "time_ids": batch["sizes"]}
        found = model(batch["noisy"], batch["timestep"], batch["states"], added_cond_kwargs=told).sample.float()
        return {"mse": (found - batch["noise"]).square().mean((1, 2, 3)).sum()}

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        errors = [loss(model, batch)["mse"][None] / len(batch["noisy"]) for batch in run.batches(data)]
        return {"error": run.gather(torch.cat(errors)).mean().item()}

    return core.Stage(
        name="sdxl",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data={"train": Latents(cfg.resolution // 8, config, 64), "val": Latents(cfg.resolution // 8, config, 8)},
        loss=loss,
        evaluate=evaluate,
        metric=core.Metric("error", "how far is the predicted noise from the noise?", floor=1.0, ceiling=0.0),
    )


STAGES = [sdxl]


def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    for step in run.steps(stage):
        run.update(stage, step.batches)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)
