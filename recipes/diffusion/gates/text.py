"""Gates of text-conditional diffusion: the exported pipeline generates from a caption what was evaluated (DF3, DF4, DF5).

The net's other gates are those of classes and of latents: a caption is selected by its number.
"""

import tempfile
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, GateContext, fetch, pick
from trainworthy.core.loop.run import evaluating
from trainworthy.core.monitoring.monitors import monitor
from trainworthy.recipes.diffusion.gates import latent, samples, short_run, walks
from trainworthy.recipes.diffusion.gates.averages import ema
from trainworthy.recipes.diffusion.gates.objective import Knowing
from trainworthy.recipes.shared.classifier import Classifier

FEW = 4  # captions whose images are compared
SAME = 1e-3  # relative rms difference of hidden states
ALIKE = 0.01  # rms difference of images in [-1, 1]


@gate(
    "prompt",
    rows="DF5",
    title="the exported pipeline encodes captions and generates images as in training and evaluation",
    reads="data model predict export train",
)
def prompt(context: GateContext) -> Finding:
    """Compares, after sixty steps of train(), the hidden states of the export's own text encoder with the net's conditions, for captions and
    for the empty one. Then it compares latents from the same noise, with guidance, between pipeline and predict()."""
    run, stage, _ = short_run.trained(context)
    val, sampling = stage.data["val"], context.cfg.sampling
    batch = fetch(val, pick(val, min(FEW, len(val)), context.cfg.run.seed), None, run.device)
    texts = [val.captions[i] for i in batch["caption_ids"].tolist()]
    conditions: list[Tensor] = []
    with evaluating(stage.eval_model):
        null = torch.full_like(batch["caption_ids"], val.null)
        with stage.eval_model.unet.register_forward_pre_hook(lambda _, args: conditions.append(args[2])):
            stage.eval_model(batch["noisy"], batch["timestep"], batch["caption_ids"])
            stage.eval_model(batch["noisy"], batch["timestep"], null)
        with tempfile.TemporaryDirectory() as name:
            stage.export(Path(name))
            pipe = DiffusionPipeline.from_pretrained(name).to(run.device)
        pipe.set_progress_bar_config(disable=True)
        read = pipe.encode_prompt(texts, run.device, 1, True)
        words, empty = (_difference(a, b) for a, b in zip(read, conditions, strict=True))
        side = val.images.shape[-1]
        how = {
            "num_inference_steps": sampling.num_inference_steps,
            "guidance_scale": sampling.guidance_scale,
            "height": side,
            "width": side,
        }
        shipped = pipe(texts, latents=batch["noise"].clone(), output_type="pt", **how).images * 255
        own = torch.stack(
            [tile.image.reshape(side, side, -1).permute(2, 0, 1) for tile in stage.predict(stage.eval_model, batch)]
        )
    difference = (shipped.cpu().round() - own.float()).div(127.5).square().mean().sqrt().item()
    return Finding(
        max(words, empty) <= SAME and difference <= ALIKE,
        f"the export's encoding of {len(texts)} captions differs from training's by {words:.1e}, that of the empty one by {empty:.1e}; "
        f"pictures from the same noise at guidance {sampling.guidance_scale:g} differ by {difference:.3f}",
        f"at most {SAME:g}, and rms {ALIKE:g} of pictures in [-1, 1]",
        "captions were encoded with another padding, length or layer than the pipeline uses\n"
        "the caption that replaces dropped ones is not the empty one, which the pipeline uses for guidance\n"
        "guidance by another formula, another scheduler or factor, or the raw weights in place of the average\n"
        "the text encoder was trained, or exported from another copy",
        evidence={"captions": texts, "words": words, "empty": empty, "pictures": difference},
    )  # fmt: skip


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the rms difference relative to `b`; inf for different shapes."""
    return ((a - b).norm() / b.norm()).item() if a.shape == b.shape else float("inf")


def by_caption(captions: tuple[str, ...]) -> walks.Ask:
    """As `walks.by_class`, for a pipeline with captions."""

    def ask(pipe: DiffusionPipeline, one: dict, knowing: Knowing, steps: int = 10) -> Tensor:
        def forward(sample: Tensor, timestep: Tensor, **_: object) -> tuple[Tensor]:
            return (knowing(sample, timestep.expand(len(sample)), torch.zeros(len(sample), dtype=torch.long)).sample,)

        pipe.unet.forward = forward
        side = one["picture"].shape[-1] if "picture" in one else None
        text = captions[one["caption_ids"].item()]
        return (
            pipe(text, num_inference_steps=steps, guidance_scale=1.0, height=side, width=side, output_type="pt").images
            * 2
            - 1
        )

    return ask


def of(classifier: Classifier | None, vae: nn.Module, needed: float, captions: tuple[str, ...]) -> list[Gate]:
    """Return the gates of a recipe in latents of `vae` with these `captions`. Without a classifier, samples are not classified."""
    back = latent.round_trip(classifier, needed, by_caption(captions))
    process = samples.noise_process(latent.decoding(classifier, vae), by_caption(captions))
    own = [latent.latent_scale, back, process, samples.hidden_class, ema, samples.weighting]
    return [*own, samples.two_samplers, prompt]


@monitor("captions", rows="DF5", title="the net's prediction depends on the caption")
def captions_matter(history: list[dict[str, float]]) -> Finding:
    """Measures the share of validation images that one step denoises better with their own caption than with another's."""
    share = history[-1]["val/matched"]
    return Finding(
        share >= 0.55, f"{share:.1%} of held-out pictures are denoised better with their own caption than with another's",
        "55% or more (chance: 50%)",
        "captions that are the same for every picture (then this is no fault), or that describe nothing visible\n"
        "train longer; a text encoder that gives these captions almost equal embeddings",
    )  # fmt: skip
