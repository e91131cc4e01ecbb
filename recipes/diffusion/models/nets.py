"""The nets of these recipes."""

from diffusers import AutoencoderKL, UNet2DModel
from torch import nn
from trainworthy.core import UserError


def unet(
    channels: int, n_classes: int, side: int, widths: tuple[int, ...], layers: int, attention: bool
) -> UNet2DModel:
    """diffusers' UNet (Ho 2020): (noisy (B, C, side, side), timestep (B,), class (B,), `n_classes` for none) -> a prediction of the
    same shape, 0 before training. `layers` residual blocks at each of the `widths`, self-attention at the last."""
    depth = len(widths)
    if side % 2 ** (depth - 1) or any(w % 8 for w in widths):
        raise UserError("the net does not fit the pictures", got=f"{side} pixels, --widths {' '.join(map(str, widths))}",
                        needed=f"a multiple of {2 ** (depth - 1)} pixels, and multiples of 8 channels")  # fmt: skip
    attended = [attention and i == depth - 1 for i in range(depth)]
    model = UNet2DModel(
        sample_size=side, in_channels=channels, out_channels=channels, block_out_channels=widths,
        layers_per_block=layers, norm_num_groups=8, add_attention=attention, num_class_embeds=n_classes + 1,
        down_block_types=tuple("AttnDownBlock2D" if a else "DownBlock2D" for a in attended),
        up_block_types=tuple("AttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attended)),
    )  # fmt: skip
    nn.init.zeros_(model.conv_out.weight)  # the first prediction is 0: the first loss is the target's second moment
    nn.init.zeros_(model.conv_out.bias)
    return model


def autoencoder(channels: int, latent_channels: int, side: int, widths: tuple[int, ...], layers: int) -> AutoencoderKL:
    """diffusers' KL autoencoder (Rombach 2022) without attention: pictures (B, C, side, side) to latents (B, c, side / f, side / f)
    and back, f = 2 ** (len(widths) - 1). Untrained it decodes to 0. The scaling_factor in its config is Stable Diffusion's, not its
    own."""
    factor = 2 ** (len(widths) - 1)
    if side % factor or any(w % 8 for w in widths):
        raise UserError("the autoencoder does not fit the pictures",
                        got=f"{side} pixels, --vae.widths {' '.join(map(str, widths))}",
                        needed=f"a multiple of {factor} pixels, and multiples of 8 channels")  # fmt: skip
    model = AutoencoderKL(
        in_channels=channels, out_channels=channels, latent_channels=latent_channels, block_out_channels=widths,
        layers_per_block=layers, norm_num_groups=8, sample_size=side, mid_block_add_attention=False,
        down_block_types=("DownEncoderBlock2D",) * len(widths), up_block_types=("UpDecoderBlock2D",) * len(widths),
    )  # fmt: skip
    nn.init.zeros_(model.decoder.conv_out.weight)
    nn.init.zeros_(model.decoder.conv_out.bias)
    return model
