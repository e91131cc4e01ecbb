"""Sampling of a class-conditional diffusion model, and the diffusers pipeline around it.

This file is part of every export: `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)` loads it and needs only diffusers.
Evaluation in training uses the same code, so that the exported model is the measured one.
"""

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput


@torch.no_grad()
def sample(unet, scheduler, class_labels, noise, *, null, guidance_scale, num_inference_steps):
    """Return pictures (B, C, H, W) in about [-1, 1] of `class_labels` (B,), from `noise` (B, C, H, W) with standard deviation 1.

    Classifier-free guidance (Ho & Salimans 2022): unconditional + guidance_scale * (conditional - unconditional), where `null` is the
    class index for no condition. At a scale of 1 the unconditional half is not computed.
    """
    scheduler.set_timesteps(num_inference_steps, device=noise.device)
    # Flow schedulers have neither attribute and do not scale the input.
    sample = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    guided = guidance_scale != 1
    labels = torch.cat([class_labels, torch.full_like(class_labels, null)]) if guided else class_labels
    for t in scheduler.timesteps:
        known = scheduler.scale_model_input(sample, t) if hasattr(scheduler, "scale_model_input") else sample
        prediction = unet(torch.cat([known, known]) if guided else known, t.expand(len(labels)), labels).sample
        if guided:
            conditional, unconditional = prediction.chunk(2)
            prediction = unconditional + guidance_scale * (conditional - unconditional)
        sample = scheduler.step(prediction, t, sample).prev_sample
    return sample


@torch.no_grad()
def middle(vae, images):
    """Return the mode of each picture's latent distribution, (B, c, h, w), for pictures (B, C, H, W) in [-1, 1]."""
    return vae.encode(images).latent_dist.mode()


def scaled(vae, middles):
    """Return latents with mean 0 and deviation 1: shifted and scaled by the autoencoder's measured factors."""
    return (middles - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


@torch.no_grad()
def decode(vae, latents):
    """Return pictures in about [-1, 1] of such latents: the factors are inverted first."""
    return vae.decode(latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)).sample


class ClassConditionalPipeline(DiffusionPipeline):
    """`pipeline([3, 1, 4], guidance_scale=2.0).images`: one picture of each class."""

    def __init__(self, unet, scheduler):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    def to_pictures(self, sample):
        """Return the pictures of samples."""
        return sample

    def __call__(self, class_labels, *, guidance_scale=2.0, num_inference_steps=30, generator=None, output_type="pil"):
        """`output_type`: `pil`, `np` (B, H, W, C) or `pt` (B, C, H, W), the latter two in [0, 1]."""
        config = self.unet.config
        side = (config.sample_size, config.sample_size) if isinstance(config.sample_size, int) else config.sample_size
        labels, null = torch.as_tensor(class_labels, device=self.device).reshape(-1), config.num_class_embeds - 1
        if not len(labels) or labels.is_floating_point() or labels.min() < 0 or labels.max() > null:
            raise ValueError(
                f"class_labels {labels.tolist()}: needed are numbers of classes, 0 to {null - 1}; {null} is no class"
            )
        shape = (len(labels), config.in_channels, *side)
        noise = torch.randn(shape, generator=generator, device=generator.device if generator else self.device)
        images = sample(
            self.unet, self.scheduler, labels, noise.to(self.device, self.unet.dtype),
            null=null, guidance_scale=guidance_scale, num_inference_steps=num_inference_steps,
        )  # fmt: skip
        images = (self.to_pictures(images).float() / 2 + 0.5).clamp(0, 1)
        if output_type == "pt":
            return ImagePipelineOutput(images=images)
        images = images.permute(0, 2, 3, 1).cpu().numpy()
        return ImagePipelineOutput(images=self.numpy_to_pil(images) if output_type == "pil" else images)


class LatentPipeline(ClassConditionalPipeline):
    """The same for a net that makes latents: `vae` decodes them."""

    def __init__(self, unet, scheduler, vae):
        super(ClassConditionalPipeline, self).__init__()
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae)

    def to_pictures(self, sample):
        return decode(self.vae, sample)
