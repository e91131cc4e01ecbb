"""Bugs of text-conditional diffusion, planted in a fork of diffusion/text; the words were fixed before the gates were run."""

from tests.helpers.plant import Plant

TEXT = "diffusion/text"
WORDS = "words = parts.read(found.captions, run.device)\n"
CENTRED = "    stable.centred(parts.vae, latents.cached(parts.vae, found.images)[found.learn])\n"
DATA = "captions.Noised(z, found, i, process, cfg.conditioning_dropout_prob) for i"
EXPORTED = "stable.save(folder, parts, ema.model if ema else model, process.sampler(), cfg.lora_rank)\n"


def bug(id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], **more: str) -> Plant:
    return Plant(f"text-{id}", gate, row, old, new, words, recipe=TEXT, **more)


PLANTS = [
    bug("captions-of-others", "prompt", "DF5", WORDS, WORDS.rstrip() + ".roll(1, 0)\n", ("differs from training's", "captions"),
        harm="asked for a seven, the export shows what was learnt for another caption"),
    bug("none-is-zeros", "prompt", "DF5", WORDS, WORDS.rstrip() + ".clone()\n    words[-1] = 0\n",
        ("of the empty one", "is not the empty one"), harm="the export guides away from a caption that was never learnt"),
    bug("caption-never-dropped", "hidden-class", "DF5", DATA, DATA.replace("cfg.conditioning_dropout_prob", "0.0"), ("dropped in 0.0%", "drop mask"),
        source="lucidrains/DALLE2-pytorch#144", harm="guidance pushes away from what was never learnt"),
    bug("factor-of-another-autoencoder", "latent-scale", "DF3", CENTRED,
        "    parts.vae.register_to_config(scaling_factor=0.18215)\n", ("0.18215",), source="hpcaitech/Open-Sora#493",
        harm="noise is too strong for what it covers"),
    bug("exported-with-another-prediction", "noise-process", "DF4", EXPORTED, EXPORTED.replace(
            "process.sampler()", 'type(process.sampler()).from_config(process.sampler().config, prediction_type="epsilon")'),
        ("rms", "prediction type"), harm="what is shipped samples noise"),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS]
