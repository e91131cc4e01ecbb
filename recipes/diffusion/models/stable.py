"""Models in Stable Diffusion's layout: frozen text encoder and autoencoder, and a denoising net. Loading, assembling, saving."""

import copy
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.utils import convert_state_dict_to_diffusers
from tokenizers import processors
from torch import Tensor, nn
from trainworthy.core import Expect, UserError
from trainworthy.core.data import assets
from trainworthy.recipes.diffusion.models import latents
from trainworthy.recipes.diffusion.models.noise import Noise, Process
from trainworthy.recipes.shared import exports, hub, smollm
from transformers import AutoConfig, AutoModel, AutoTokenizer, CLIPTextModel
from transformers.utils import logging as bars

bars.disable_progress_bar()
# It logs every cut caption, batch by batch; the data report counts them instead.
logging.getLogger("diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion").setLevel(logging.ERROR)
# It expects CLIP, but loads any text model that its index names.
logging.getLogger("diffusers.pipelines.pipeline_utils").setLevel(logging.ERROR)
LAYERS = 8  # of SmolLM2's 30: later layers specialise in predicting the next word
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
READ: dict[tuple, Tensor] = {}
"""Cached hidden states of the last captions: gates rebuild the stage with the same frozen encoder."""


@dataclass
class New:
    """A net trained from scratch and its frozen parts. Not used with --model, which has its own."""

    vae: str = "digits"
    """`digits` (built on first use by diffusion/latent), or a folder or hub name of an AutoencoderKL."""
    text: str = "smollm2"
    """The frozen text encoder: `smollm2` (the first eight layers of SmolLM2-135M), a folder or hub name of CLIP or of any
    decoder or encoder of transformers that has a tokenizer."""
    tokens: int = 77
    """Tokens per caption; longer captions are cut, shorter ones padded."""
    widths: tuple[int, ...] = (32, 64)
    """Channels at each resolution of a latent; each further one halves the resolution. Multiples of 8. The first has no attention."""
    layers: int = 1
    """Residual blocks at each resolution."""

    def __post_init__(self):
        self.vae, self.text = resolved(self.vae), resolved(self.text)


def resolved(name: str) -> str:
    """Return the absolute path of a folder, so that a run can be resumed from anywhere; any other name unchanged."""
    packaged = name in ("", "digits", "smollm2")
    return str(Path(name).resolve()) if not packaged and Path(name).is_dir() else name


@dataclass
class Parts:
    """The parts of a pipeline."""

    vae: AutoencoderKL
    encoder: nn.Module
    tokenizer: object
    unet: UNet2DConditionModel
    noise: Noise
    """The training objective: a model's own prediction type and number of timesteps."""
    scheduler: DDPMScheduler
    """The training noise schedule. (StableDiffusionPipeline sets steps_offset to 1 if it is not.)"""
    description: str

    def read(self, captions: tuple[str, ...], device: torch.device) -> Tensor:
        """Return the hidden states of each caption and, last, of the empty caption: (n + 1, tokens, D), computed by the exported pipeline."""
        key = (id(self.encoder), captions)
        if key not in READ:
            READ.clear()
            pipe, every = assembled(self, self.unet, None), [*captions, ""]
            self.encoder.to(device)
            with torch.no_grad():
                rows = [pipe.encode_prompt(every[i : i + 32], device, 1, False)[0] for i in range(0, len(every), 32)]
            READ[key] = torch.cat(rows).float()
        return READ[key]

    def cut(self, captions: tuple[str, ...]) -> int:
        """Return the number of captions that are cut."""
        lengths = [len(ids) for ids in self.tokenizer(list(captions), verbose=False).input_ids]
        return sum(n > self.tokenizer.model_max_length for n in lengths)


class Captioned(nn.Module):
    """A net whose condition is a caption's index: (noisy (B, c, h, w), timestep (B,), caption (B,), the last index for none) -> prediction."""

    def __init__(self, unet: UNet2DConditionModel, words: Tensor):
        super().__init__()
        # In a list: one table, shared by the net and its EMA, and not in checkpoints.
        self.unet, self.words = unet, [words]

    def forward(self, sample: Tensor, timestep: Tensor, caption: Tensor):
        if self.words[0].device != caption.device:
            self.words[0] = self.words[0].to(caption.device)
        return self.unet(sample, timestep, self.words[0][caption])

    def __deepcopy__(self, memo: dict) -> "Captioned":
        return Captioned(copy.deepcopy(self.unet, memo), self.words[0])


# ------------------------------------------------------------------------------------------------------------- a new net
def new(cfg: New, noise: Noise, channels: int, side: int) -> Parts:
    """Return an untrained net for an existing autoencoder and text encoder."""
    if cfg.text != "smollm2":
        hub.locate(cfg.text, "--new.text", packaged="smollm2")  # before minutes for an autoencoder
    vae, (encoder, tokenizer) = _autoencoder(cfg.vae, channels), _text(cfg.text, cfg.tokens)
    c, h, _ = latents.shape(vae, side, len(cfg.widths) - 1)
    if any(w % 8 for w in cfg.widths) or len(cfg.widths) < 2:
        raise UserError("the net cannot be made", got=f"--new.widths {' '.join(map(str, cfg.widths))}",
                        needed="two or more multiples of 8: the first resolution has no attention to captions")  # fmt: skip
    deep = len(cfg.widths) - 1
    unet = UNet2DConditionModel(
        sample_size=h, in_channels=c, out_channels=c, block_out_channels=cfg.widths, layers_per_block=cfg.layers,
        norm_num_groups=8, attention_head_dim=8, cross_attention_dim=encoder.config.get_text_config().hidden_size,
        down_block_types=("DownBlock2D", *("CrossAttnDownBlock2D",) * deep),
        up_block_types=(*("CrossAttnUpBlock2D",) * deep, "UpBlock2D"),
    )  # fmt: skip
    nn.init.zeros_(unet.conv_out.weight)  # the first prediction is 0: the first loss is the target's second moment
    nn.init.zeros_(unet.conv_out.bias)
    schedule = DDPMScheduler(num_train_timesteps=noise.num_train_timesteps, beta_schedule=noise.beta_schedule, prediction_type=noise.prediction_type,
                             timestep_spacing="trailing", steps_offset=1)  # fmt: skip
    return Parts(vae, encoder, tokenizer, unet, noise, schedule, f"a new net; text: {cfg.text}, autoencoder: {cfg.vae}")


def centred(vae: AutoencoderKL, middles: Tensor) -> AutoencoderKL:
    """Put the standard deviation of the latents (N, c, h, w) into the config of `vae`, and subtract their mean through its weights, because
    Stable Diffusion's pipeline has no shift. Encoding followed by decoding stays the same."""
    mean = latents.measured(vae, middles).config.shift_factor
    with torch.no_grad():
        vae.quant_conv.bias[: vae.config.latent_channels] -= mean
        vae.post_quant_conv.bias += mean * vae.post_quant_conv.weight.sum((1, 2, 3))
    vae.register_to_config(shift_factor=None)
    return vae


def reachable(name: str, setting: str, what: str, file: str) -> None:
    """Raise UserError at once for a name that is neither a folder nor owner/name, or a model that the hub does not give."""
    if Path(name).is_dir():
        return
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise UserError(f"{setting} {name}: no such folder", got="nothing there",
                        needed=f"a folder with a {what}, or owner/name on the hub")  # fmt: skip
    hub.allowed(name, setting, file)


@cache
def _text(name: str, tokens: int) -> tuple[nn.Module, object]:
    """Return (frozen text encoder, its tokenizer, which pads on the right to a fixed number of tokens)."""
    path = str(_smollm()) if name == "smollm2" else hub.locate(name, "--new.text", packaged="smollm2")
    config = AutoConfig.from_pretrained(path)
    if config.is_encoder_decoder:
        raise UserError(f"--new.text {name} has an encoder and a decoder", got=config.model_type, needed="one of the two: CLIP, "
                        "BERT, a language model")  # fmt: skip
    clip = config.model_type in ("clip", "clip_text_model")
    encoder = (CLIPTextModel if clip else AutoModel).from_pretrained(path, dtype=torch.float32)
    tokenizer = begun(AutoTokenizer.from_pretrained(path))
    tokenizer.padding_side = "right"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    context = config.get_text_config().max_position_embeddings
    tokenizer.model_max_length = min(tokens, tokenizer.model_max_length, context)
    return encoder.eval().requires_grad_(False), tokenizer


def begun(tokenizer):
    """Make `tokenizer` put one fixed token before every caption. A decoder's states of the first token hardly depend on that token (distance
    between digits 2.8, after another token 18), so a caption of one word would carry almost no information."""
    first, beginning = {ids[0] for ids in tokenizer(["7", "a"]).input_ids}, tokenizer.bos_token or tokenizer.eos_token
    own = getattr(tokenizer, "backend_tokenizer", None)
    if len(first) > 1 and beginning and own:
        front = [(beginning, tokenizer.convert_tokens_to_ids(beginning))]
        front = processors.TemplateProcessing(single=f"{beginning} $A", pair=f"{beginning} $A $B", special_tokens=front)
        own.post_processor = processors.Sequence([p for p in (own.post_processor, front) if p])
    return tokenizer


def _smollm() -> Path:
    """Return the first layers of SmolLM2 and its tokenizer."""

    def build(folder: Path) -> None:
        model = AutoModel.from_pretrained(smollm.folder(), num_hidden_layers=LAYERS, dtype=torch.float32)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(smollm.folder()).save_pretrained(folder)

    return assets.built("smollm2-text", {"gguf": smollm.SHA256, "layers": LAYERS}, build)


def _autoencoder(path: str, channels: int) -> AutoencoderKL:
    """Return a copy of the autoencoder, for pictures with this number of channels."""
    if path == "digits" and channels != 1:  # before it is trained
        raise UserError("the autoencoder of the digits reads grey pictures", got=f"pictures of {channels} channels",
                        needed="--new.vae with an autoencoder of such pictures: a folder, or a name such as stabilityai/sd-vae-ft-mse",
                        next="or train one, from pictures in class folders: trainworthy run diffusion/latent --data.path FOLDER ..., then "
                        "--new.vae runs/diffusion-latent/RUN/export/vae")  # fmt: skip
    found = _digits() if path == "digits" else path
    return copy.deepcopy(_loaded(str(found), channels, "--new.vae"))


@cache
def _loaded(path: str, channels: int, setting: str) -> AutoencoderKL:
    reachable(path, setting, "AutoencoderKL", "config.json")
    try:
        vae = AutoencoderKL.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{setting} {path}: no autoencoder there", got=str(error).strip().splitlines()[0],
                        needed="`digits`, or a folder or name of an AutoencoderKL") from None  # fmt: skip
    if vae.config.in_channels != channels:
        raise UserError(f"the autoencoder in {path} does not fit the pictures",
                        got=f"it reads {vae.config.in_channels} channels, the pictures have {channels}",
                        needed=f"{setting} that reads {channels}")  # fmt: skip
    return vae.eval().requires_grad_(False)


def _digits() -> Path:
    """Return the digit autoencoder that diffusion/latent trains. The gate `round-trip` checks it at every use."""
    home = Path(__file__).parents[1]
    sources = [home / f"{name}.py" for name in ("latent", "models/latents", "models/nets")]
    settings = [
        "--latent.epochs",
        "0.1",
        "--sampling.every",
        "50",
        "--sampling.num-inference-steps",
        "4",
        "--gates.no-enabled",
    ]

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as out:
            run = exports.made("diffusion/latent", settings, out, what="the autoencoder of digits")
            AutoencoderKL.from_pretrained(run / "export" / "vae").save_pretrained(folder)

    return assets.built("digits-vae", {"settings": settings, "torch": torch.__version__}, build, sources=sources)


# ------------------------------------------------------------------------------------------------------ a model of the hub
def model(name: str, noise: Noise, channels: int, side: int) -> Parts:
    """Return the parts of a StableDiffusionPipeline for pictures with this number of channels, with a copy of its net. `noise` sets the
    weight of timesteps."""
    pipe = _pipeline(name)
    vae, unet, scheduler = pipe.vae, pipe.unet, _trained(name, pipe.scheduler.config)
    kinds = (unet.config.in_channels, vae.config.latent_channels)
    if kinds[0] != kinds[1]:
        raise UserError(f"the autoencoder of {name} does not fit its net",
                        got=f"{kinds[1]} channels of latents, a net that reads {kinds[0]}", needed="as many",
                        cause="an autoencoder of another model was put in; or a net that fills in parts of pictures, which reads "
                        "a mask, too")  # fmt: skip
    if vae.config.in_channels != channels:
        raise UserError(f"the autoencoder of {name} does not fit the pictures", got=f"{vae.config.in_channels} channels",
                        needed=f"{channels}")  # fmt: skip
    if vae.config.shift_factor:
        raise UserError(f"the autoencoder of {name} shifts its latents", got=f"shift_factor {vae.config.shift_factor:g}",
                        needed="none: its pipeline does not undo it", cause="the autoencoder of another model")  # fmt: skip
    latents.shape(vae, side, len(unet.config.block_out_channels) - 1)
    own = replace(
        noise,
        prediction_type=scheduler.config.prediction_type,
        num_train_timesteps=scheduler.config.num_train_timesteps,
    )
    description = f"{name}: {type(pipe.text_encoder).__name__}, predicts {own.prediction_type}, factor {vae.config.scaling_factor:g}"
    return Parts(vae, pipe.text_encoder, pipe.tokenizer, copy.deepcopy(unet), own, scheduler, description)


def channels(name: str, vae: str = "digits") -> int:
    """Return the channels of the pictures of a model, or of an autoencoder's; `digits` are grey."""
    if name:
        return _pipeline(name).vae.config.in_channels
    if vae == "digits":
        return 1
    reachable(vae, "--new.vae", "AutoencoderKL", "config.json")
    return AutoencoderKL.load_config(vae).get("in_channels", 3)


@cache
def _pipeline(name: str) -> StableDiffusionPipeline:
    """Load a pipeline once per process, frozen."""
    reachable(name, "--model", "StableDiffusionPipeline", "model_index.json")
    try:
        kind = StableDiffusionPipeline.load_config(name).get("_class_name")
        if kind != "StableDiffusionPipeline":
            raise UserError(f"--model {name} is of another family", got=str(kind), needed="StableDiffusionPipeline: one text "
                            "encoder, a UNet2DConditionModel, an AutoencoderKL",
                            cause="SDXL has two text encoders, SD3 and FLUX a transformer and a flow")  # fmt: skip
        pipe = StableDiffusionPipeline.from_pretrained(name, safety_checker=None, feature_extractor=None,
                                                       requires_safety_checker=False)  # fmt: skip
    except (OSError, ValueError) as error:
        raise UserError(f"--model {name} cannot be loaded", got=str(error).strip().splitlines()[0][:200],
                        needed="a folder or hub name of a StableDiffusionPipeline, complete",
                        cause="a folder that was copied in part, or a part that the cache lacks and no network",
                        next=f"with a network: hf download {name} --local-dir FOLDER, then --model FOLDER") from None  # fmt: skip
    for part in (pipe.vae, pipe.unet, pipe.text_encoder):
        nn.Module.float(part.eval().requires_grad_(False))  # trained weights in fp32: bf16 loses small updates
    return pipe


def _trained(name: str, config: dict) -> DDPMScheduler:
    """Return the training noise schedule, from the config of the model's sampler."""
    kind, says = config.get("_class_name", "?"), config.get("prediction_type")
    if "beta_schedule" not in config or says not in ("epsilon", "v_prediction"):
        raise UserError(f"the scheduler of {name} is of another family", got=f"{kind}, prediction_type {says}",
                        needed="one with betas that predicts epsilon or v_prediction (DDPM, DDIM, PNDM, Euler, DPM-Solver, ...)",
                        cause="a flow's scheduler, or one of a consistency model, was put in")  # fmt: skip
    return DDPMScheduler.from_config(config, clip_sample=False, steps_offset=1)


def adapted(net: Captioned, rank: int) -> dict[str, Tensor]:
    """Add LoRA (Hu 2021) to the projections of every attention of `net`, as diffusers' scripts do, and freeze the rest. Rank 0 trains the
    whole net. Returns the pretrained weights by their current names."""
    from peft import LoraConfig

    came = {n: p.detach().clone() for n, p in net.named_parameters()}
    net.requires_grad_(not rank)
    if rank:
        net.unet.add_adapter(
            LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=list(ATTENTION))
        )
    return {n: came[n.replace(".base_layer", "")] for n, _ in net.named_parameters() if "lora_" not in n}


def snapshot(net: Captioned) -> Callable[[], Captioned]:
    """Return a function that rebuilds the net as it is now and takes only its trained weights."""
    came = {n: p.detach().clone() for n, p in net.named_parameters() if p.requires_grad}

    def made() -> Captioned:
        other = copy.deepcopy(net)
        other.load_state_dict(came, strict=False)
        return other

    return made


def expected(cfg, net: Captioned, process: Process, loss: Callable) -> Expect:
    """Return the expectations of a new net or, for a pretrained one, that it reaches a tenth of its initial loss on eight samples."""
    fresh = tuple(n for n, _ in net.named_parameters() if "lora_" in n)
    if not cfg.model:
        return Expect(initial_loss=process.initial_loss, overfit_steps=200, overfit_metric=0.95)
    net, kept = snapshot(net), {}

    def before(batch: dict) -> dict:
        if not kept:
            with torch.no_grad():
                own = net().to(batch["noisy"].device).eval()
                kept["loss"] = sum(v.item() for v in loss(own, batch).values()) / len(batch["noisy"])
                kept["seen"] = process.seen(process.look(own, batch))["denoised"]
        return kept

    return Expect(loss_floor=lambda batch: 0.9 * before(batch)["loss"], overfit_metric=lambda batch: before(batch)["seen"],
                  overfit_steps=200, frozen=("unet.",) if cfg.lora_rank else (), new_parameters=fresh)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ export
def assembled(parts: Parts, unet: UNet2DConditionModel, scheduler) -> StableDiffusionPipeline:
    return StableDiffusionPipeline(
        vae=parts.vae, text_encoder=parts.encoder, tokenizer=parts.tokenizer, unet=unet, scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def save(folder: Path, parts: Parts, net: Captioned, scheduler, rank: int) -> None:
    """Save a StableDiffusionPipeline with merged adapters, and the adapters separately for `load_lora_weights`."""
    unet = copy.deepcopy(net.unet).cpu().eval()
    if rank:
        from peft import get_peft_model_state_dict

        own = convert_state_dict_to_diffusers(get_peft_model_state_dict(unet))
        unet.fuse_lora()
        unet.unload_lora()
    assembled(parts, unet, scheduler).save_pretrained(folder)
    if rank:
        StableDiffusionPipeline.save_lora_weights(folder / "lora", unet_lora_layers=own)
