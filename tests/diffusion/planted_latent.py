"""Bugs of diffusion in latents, planted in a fork of diffusion/latent; the words were fixed before the gates were run."""

from tests.diffusion.planted_pixel import ASKED, HIDDEN, TARGET
from tests.helpers.plant import Plant

LATENT = "diffusion/latent"
SECOND = ("--stage", "latent")
CACHED = "middles = latents.cached(vae, images)\n"
SCALED = "z = pipeline.scaled(latents.measured(vae, middles[learn]), middles)\n"
TAKEN = "latent, label = self.latents[index], self.labels[index]\n"
SAMPLER = "made = pipeline.sample(model, process.sampler(sampler), classes, noise, **how)\n"
DECODED = "return pipeline.decode(vae, made).clamp(-1, 1)\n"
EXPORTED = "pictures.save_pipeline(folder, (ema.model if ema else model).eval().cpu(), process.sampler(), vae)\n"
OPTIMIZER = """        name="latent",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},"""
UPDATED = '            stage.state["ema"].update(stage.model)\n'
EARLY = """early = latents.make(cfg.vae, images.shape[1], cfg.data.image_size).to(run.device)
    early = latents.measured(early, latents.cached(early, images)[learn]).config
    vae.register_to_config(scaling_factor=early.scaling_factor, shift_factor=early.shift_factor)
    z = pipeline.scaled(vae, middles)
"""
OTHER = """import copy

        other = copy.deepcopy(vae)
        other.register_to_config(scaling_factor=0.18215, shift_factor=None)
        """


def bug(id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], **more: str) -> Plant:
    """One of stage two."""
    return Plant(f"latent-{id}", gate, row, old, new, words, recipe=LATENT, argv=SECOND, **more)


PLANTS = [
    bug("factor-five-times", "latent-scale", "DF3", SCALED, SCALED.replace("z = ", "z = 5 * "),
        ("1 / deviation", "factor and offset as in its config"), harm="agreement at guidance 2: 0.99 -> 0.71"),
    bug("dif-03-factor-of-another-autoencoder", "latent-scale", "DF3", SCALED,
        SCALED + "    vae.register_to_config(scaling_factor=0.18215, shift_factor=None)\n    z = pipeline.scaled(vae, middles)\n",
        ("0.18215", "another autoencoder's factor"), source="hpcaitech/Open-Sora#493, huggingface/diffusers#6923",
        harm="none on these digits: a factor that is too small did no harm; noise is then too strong for what it covers"),
    bug("factor-measured-before-training", "latent-scale", "DF3", SCALED, EARLY, ("before training ended",),
        harm="latents drift while the autoencoder learns"),
    bug("shifted", "latent-scale", "DF3", SCALED, SCALED.replace("z = ", "z = 1 + "),
        ("made with", "a shift that is not subtracted"), harm="the sampler starts at a mean of 0"),
    bug("scaled-again-as-they-are-read", "latent-scale", "DF3", TAKEN,
        TAKEN.replace("self.latents[index],", "0.18215 * self.latents[index],"), ("or twice",),
        source="hpcaitech/Open-Sora#493", harm="latents of another scale than the way back undoes"),
    bug("cached-with-a-draw", "latent-scale", "DF3", CACHED,
        "with torch.no_grad():\n"
        "        said = [vae.encode(x.to(run.device)).latent_dist for x in images.split(256)]\n"
        "    middles = torch.cat([x.sample().cpu() for x in said])\n",
        ("from fresh ones", "cached with a random draw"), harm="one noise for ever on each latent"),
    bug("cached-from-another-range", "latent-scale", "DF3", CACHED, CACHED.replace("images", "(images + 1) / 2"),
        ("pictures of another range",), source="mlcommons/training#721", harm="whited-out or washed-out samples"),
    bug("cached-by-another-autoencoder", "latent-scale", "DF3", CACHED,
        "other = latents.make(cfg.vae, images.shape[1], cfg.data.image_size).to(run.device)\n"
        "    " + CACHED.replace("vae,", "other,"), ("from fresh ones", "autoencoder that trained on"),
        harm="latents that this decoder cannot read"),
    bug("decoded-without-dividing", "round-trip", "DF3", DECODED,
        "with torch.no_grad():\n            return vae.decode(made).sample.clamp(-1, 1)\n", ("without dividing", "predict()"),
        source="huggingface/diffusers#6923", harm="washed-out pictures"),
    bug("sampler-clips", "round-trip", "DF3", SAMPLER, SAMPLER.replace(
            "process.sampler(sampler)", "type(process.sampler(sampler)).from_config(process.scheduler.config)"),
        ("clip_sample", "predict()"), harm="agreement 0.15 to 0.19 at every guidance"),
    bug("exported-with-another-factor", "round-trip", "DF3", EXPORTED, OTHER + EXPORTED.replace("vae)", "other)"),
        ("the export", "exported scaling_factor 0.182", "without its own factors"),
        source="diffusers' AutoencoderKL has 0.18215 unless told", harm="what is shipped decodes other latents than were learnt"),
    bug("exported-with-an-untrained-autoencoder", "round-trip", "DF3", EXPORTED,
        "other = type(vae).from_config(vae.config)\n        " + EXPORTED.replace("vae)", "other)"),
        ("the export", "another autoencoder"), harm="what is shipped decodes to noise"),
    bug("autoencoder-trains-on", "wiring", "C3", OPTIMIZER, OPTIMIZER.replace(
            "optimizer(model,", "optimizer(nn.ModuleList([model, vae.requires_grad_()]),"),
        ("not part of the model", "frozen"), harm="cached latents are no longer this autoencoder's"),
    bug("raw-weights-exported", "ema", "DF2", EXPORTED, EXPORTED.replace("(ema.model if ema else model)", "model"),
        ("exported", "not the average"), harm="what is shipped is not what was measured"),
    bug("average-never-stepped", "ema", "DF2", UPDATED, "            pass\n", ("average", "not updated"),
        source="huggingface/diffusers#5783", harm="what is sampled and exported is the initial weights"),
    bug("velocity-turned", "noise-process", "DF4", TARGET.replace('"image"', '"latent"'),
        TARGET.replace('"image"', '"latent"').replace("process.", "-process."), ("rms", "sign"), source="splitmeanflow#2",
        harm="the loss is fine, samples are noise"),
    bug("class-never-dropped", "hidden-class", "DF5", HIDDEN, "condition = label\n", ("dropped in 0.0%", "drop mask"),
        source="lucidrains/DALLE2-pytorch#144", harm="guidance pushes away from what was never learnt"),
    bug("class-never-reaches-the-net", "hidden-class", "DF5", ASKED, ASKED.replace('batch["condition"]', '0 * batch["condition"]'),
        ("class", "never reaches"), harm="samples of any class, whatever was asked for"),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS]
