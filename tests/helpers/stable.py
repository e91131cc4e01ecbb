"""Tiny models in Stable Diffusion's layout, with random weights, for tests without a network."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer


def tokenizer(folder: Path, length: int = 16) -> CLIPTokenizer:
    """Letters and digits, each at the end of a word or not; no merges."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789,"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{c}</w>" for c in letters)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=length)


def clip(vocabulary: int, length: int = 16, width: int = 32) -> CLIPTextModel:
    return CLIPTextModel(CLIPTextConfig(vocab_size=vocabulary, hidden_size=width, intermediate_size=32, num_hidden_layers=2,
                                        num_attention_heads=2, max_position_embeddings=length, bos_token_id=0, eos_token_id=1,
                                        pad_token_id=1))  # fmt: skip


def write(folder: Path, *, scheduler=None, latent_channels: int = 4, net_channels: int = 4, channels: int = 3, factor: float = 1.7,
          shift: float | None = None, side: int = 16) -> Path:  # fmt: skip
    """A StableDiffusionPipeline of half a million weights, with a factor of its own; pictures of `side` pixels."""
    torch.manual_seed(0)
    vae = AutoencoderKL(
        in_channels=channels, out_channels=channels, latent_channels=latent_channels, block_out_channels=(8, 16), norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=side,
        scaling_factor=factor, shift_factor=shift,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=side // 2, in_channels=net_channels, out_channels=4, block_out_channels=(16, 32), layers_per_block=1,
        norm_num_groups=8, attention_head_dim=8, cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    words = tokenizer(folder.with_name(f"{folder.name}-words"))
    schedule = scheduler or DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
                                          set_alpha_to_one=False, steps_offset=1, prediction_type="epsilon")  # fmt: skip
    StableDiffusionPipeline(vae, clip(len(words)), words, unet, schedule, None, None,
                            requires_safety_checker=False).save_pretrained(folder)  # fmt: skip
    return folder
