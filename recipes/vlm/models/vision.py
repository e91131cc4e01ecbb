"""Vision encoders: images (B, 3, side, side) in [0, 1] -> features (B, n, width), one per patch. They own their normalisation and are never
trained here. `cells` is the encoder of small_vision_encoder.py; any other name is the hub's, or a folder."""

import json

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.shared import hub
from trainworthy.recipes.vlm.models import small_vision_encoder


class Hub(nn.Module):
    """A vision transformer of transformers by name (CLIP, SigLIP, DINOv2, ViT), or the vision part of a multimodal model, without class and
    register tokens."""

    def __init__(self, name: str, layer: int = -2):
        super().__init__()
        from transformers import AutoImageProcessor, AutoModel
        from transformers.utils import logging

        logging.disable_progress_bar()
        path = hub.locate(name, "--encoder", packaged="cells", needs=("preprocessor_config.json",))
        model, processor = AutoModel.from_pretrained(path), AutoImageProcessor.from_pretrained(path)
        self.net = model.vision_model if "vision_config" in model.config.to_dict() else model
        config = self.net.config
        self.side = config.image_size
        self.width = config.hidden_size
        self.n = (config.image_size // config.patch_size) ** 2
        self.layer, depth = layer, getattr(config, "num_hidden_layers", None)
        if not -(depth or 99) <= layer < 0:
            raise UserError(f"--encoder-layer {layer}", needed=f"-1, the last, to -{depth}, the first",
                            got=f"{name} has {depth} layers")  # fmt: skip
        self.register_buffer("mean", torch.tensor(processor.image_mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(processor.image_std).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        pixels = (images - self.mean) / self.std
        if self.layer == -1:
            return self.net(pixel_values=pixels).last_hidden_state[:, -self.n :]
        return self.net(pixel_values=pixels, output_hidden_states=True).hidden_states[self.layer][:, -self.n :]


def load(name: str, layer: int = -2) -> nn.Module:
    """Return the encoder, frozen and in eval mode; for hub models, with the output of that `layer`."""
    if name == "cells":
        encoder = small_vision_encoder.Cells()
        encoder.load_state_dict(weights(name))
    else:
        encoder = Hub(name, layer)
    return encoder.eval().requires_grad_(False)


def weights(name: str) -> dict[str, Tensor]:
    """Return the file of our own encoder; None for hub models."""
    return load_file(small_vision_encoder.folder() / "encoder.safetensors") if name == "cells" else {}


def describe(name: str) -> str:
    """Return its source, and its own accuracy."""
    if name != "cells":
        return name
    share, seconds = (
        json.loads((small_vision_encoder.folder() / f"{n}.json").read_text()) for n in ("result", "seconds")
    )
    if share is None:
        return "`cells`, which the first check or run trains once, in 2 to 3 min of CPU time"
    return (f"reads {share['digit']:.1%} of held-out digits and {share['colour']:.1%} of their colours by itself; "
            f"built once, {seconds:.0f} s")  # fmt: skip
