"""The net of these recipes."""

from diffusers import UNet2DModel
from torch import nn

from core import UserError


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
