"""Bugs of text-conditional diffusion, planted in a fork of diffusion/text; the words were fixed before the gates were run."""

from tests.plants import Plant
from tests.plants_diffusion import ASKED

TEXT = "diffusion/text"
WORDS = "words = parts.read(found.captions, run.device)\n"
CENTRED = "    stable.centred(parts.vae, latents.cached(parts.vae, found.images)[found.learn])\n"
DATA = "captions.Noised(z, found, i, process, cfg.drop) for i"
EXPORTED = "stable.save(folder, parts, ema.model if ema else model, process.sampler(), cfg.lora)\n"
OPTIMIZER = 'optimizers={"main": core.make_optimizer(model, cfg.optim)},\n'
LATENTS = "z = pipeline.scaled(vae, latents.cached(vae, found.images))\n"
NULL = 'how = {"null": val_data.null, '


def bug(id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], **more: str) -> Plant:
    return Plant(f"text-{id}", gate, row, old, new, words, recipe=TEXT, **more)


PLANTS = [
    bug("captions-of-others", "prompt", "DF5", WORDS, WORDS.rstrip() + ".roll(1, 0)\n", ("what the net was told", "captions"),
        harm="asked for a seven, the export shows what was learnt for another caption"),
    bug("none-is-zeros", "prompt", "DF5", WORDS, WORDS.rstrip() + ".clone()\n    words[-1] = 0\n",
        ("of the empty one", "is not the empty one"), harm="the export guides away from a caption that was never learnt"),
    bug("pads-cut-off", "prompt", "DF5", WORDS, WORDS.rstrip() + "[:, :8]\n", ("another padding, length",),
        harm="the export reads other words than were learnt"),
    bug("guided-away-from-a-caption", "prompt", "DF5", NULL, 'how = {"null": 0, ', ("from the same noise", "guidance"),
        harm="what is measured is not what the export makes"),
    bug("caption-never-dropped", "hidden-class", "DF5", DATA, DATA.replace("cfg.drop", "0.0"), ("hidden from 0.0%", "drop mask"),
        source="lucidrains/DALLE2-pytorch#144", harm="guidance pushes away from what was never learnt"),
    bug("caption-never-reaches-the-net", "hidden-class", "DF5", ASKED, ASKED.replace('batch["cond', '0 * batch["cond'),
        ("class", "never reaches"), harm="samples of anything, whatever was asked for"),
    bug("factor-of-another-autoencoder", "latent-scale", "DF3", CENTRED,
        "    parts.vae.register_to_config(scaling_factor=0.18215)\n", ("0.18215",), source="hpcaitech/Open-Sora#493",
        harm="noise is too strong for what it covers"),
    bug("scaled-twice", "latent-scale", "DF3", LATENTS, LATENTS.replace("z = ", "z = vae.config.scaling_factor * "), ("or twice",),
        source="hpcaitech/Open-Sora#493", harm="latents of another scale than the way back undoes"),
    bug("exported-with-another-prediction", "noise-process", "DF4", EXPORTED, EXPORTED.replace(
            "process.sampler()", 'type(process.sampler()).from_config(process.sampler().config, prediction_type="epsilon")'),
        ("rms", "prediction type"), harm="what is shipped samples noise"),
    bug("raw-weights-exported", "average", "DF2", EXPORTED, EXPORTED.replace("ema.model if ema else model", "model"),
        ("exported", "not the average"), harm="what is shipped is not what was measured"),
    bug("text-encoder-trains-along", "wiring", "C3", OPTIMIZER, OPTIMIZER.replace(
            "optimizer(model,", "optimizer(nn.ModuleList([model, parts.encoder.requires_grad_()]),"),
        ("no part of the model", "frozen"), harm="captions that were read before are another encoder's"),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS]
