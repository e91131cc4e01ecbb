"""Bugs of class-conditional diffusion, planted in a fork of diffusion/pixel; the words were fixed before the gates were run."""

from tests.helpers.plant import Plant

PIXEL = "diffusion/pixel"
UPDATED = '            stage.state["ema"].update(stage.model)\n'
EVALUATE = "            run.evaluate(stage)\n"
STAGES = "STAGES = [generate]\n"
HIDDEN = "condition = torch.tensor(self.null) if hidden else label\n"
TIMESTEP = "timestep = torch.randint(self.process.noise.num_train_timesteps, (), generator=generator)\n"
TARGET = 'target = process.target(batch["image"], batch["noise"], t)\n'
ASKED = 'prediction = model(batch["noisy"], t, batch["condition"]).sample.float()\n'
EXPORTED = "pictures.save_pipeline(folder, (ema.model if ema else model).eval().cpu(), process.sampler())\n"
SAMPLER = "return pipeline.sample(model, process.sampler(sampler), classes, noise, **how).clamp(-1, 1)\n"


def staged(body: str) -> str:
    """STAGES replaced by one stage that calls generate() and then changes what it returned."""
    head = "def changed(cfg: Config, run: core.Run, previous=None) -> core.Stage:\n    stage = generate(cfg, run, previous)\n"
    return f"{head}    {body}\n    return stage\n\n\nSTAGES = [changed]\n"


PLANTS = [
    Plant("dif-01-average-never-stepped", "ema", "DF2", UPDATED, "            pass\n", ("average", "not updated"), recipe=PIXEL,
          source="huggingface/diffusers#5783", harm="what is sampled and exported is the initial weights"),
    Plant("average-ramp-never-advances", "ema", "DF2", UPDATED, '            stage.state["ema"].updates = 0\n' + UPDATED,
          ("stays at 0.10", "ramp", "counter"), recipe=PIXEL, harm="the average is the newest weights, under another name"),
    Plant("average-forgets-too-soon", "ema", "DF2", "ema = core.Ema(model, cfg.ema) if cfg.ema else None\n",
          "ema = core.Ema(model, min(cfg.ema, 0.9)) if cfg.ema else None\n", ("1,500 updates", "0.9000", "stops below --ema"),
          recipe=PIXEL, harm="ten steps are averaged, not a thousand"),
    Plant("fresh-net-exported-without-average", "ema", "DF2", EXPORTED, EXPORTED.replace(
              "(ema.model if ema else model)", "make_model(cfg, images.shape[1], n)"), ("differ", "newly built"), recipe=PIXEL,
          argv=("--ema", "0"), harm="what is shipped was never trained"),
    Plant("dif-02-average-stays-in-the-model", "evaluation", "C12", EVALUATE,
          EVALUATE + "            stage.model.load_state_dict(stage.ema_model.state_dict())\n",
          ("other weights than before the evaluation", "average"), recipe=PIXEL,
          source="huggingface/diffusers PR#7599", harm="training jumps back at every evaluation"),
    Plant("dif-08-another-scale", "classifier", "DF3", "found = pictures.read(cfg.data)\n",
          "found = pictures.read(cfg.data)\n    found = found._replace(images=(found.images + 1) / 2)\n",
          ("real pictures", "[-1, 1]"), recipe=PIXEL, source="mlcommons/training#721", harm="washed-out samples",
          before=("noise-process",), why="the sampler clips at another end than the pictures have"),
    Plant("raw-weights-sampled", "ema", "DF2", STAGES,
          staged("own = stage.evaluate\n    stage.evaluate = lambda model, data: own(stage.model, data)"),
          ("evaluation", "raw weights"), recipe=PIXEL, harm="the number is of other weights than the export's"),
    Plant("raw-weights-exported", "ema", "DF2", EXPORTED, EXPORTED.replace("(ema.model if ema else model)", "model"),
          ("exported", "not the average"), recipe=PIXEL, harm="what is shipped is not what was measured"),
    Plant("dif-04-condition-never-dropped", "hidden-class", "DF5", HIDDEN, "condition = label\n", ("dropped in 0.0%", "drop mask"),
          recipe=PIXEL, source="lucidrains/DALLE2-pytorch#144", harm="guidance pushes away from what was never learnt"),
    Plant("class-never-reaches-the-net", "hidden-class", "DF5", ASKED,
          ASKED.replace('batch["condition"]', '0 * batch["condition"]'), ("class", "never reaches"),
          recipe=PIXEL, harm="samples of any class, whatever was asked for"),
    Plant("null-is-a-class", "hidden-class", "DF5", HIDDEN, HIDDEN.replace("torch.tensor(self.null)", "torch.tensor(0)"),
          ("null class", "real class"), recipe=PIXEL, harm="guidance pushes away from a class"),
    Plant("dif-05-constant-timestep", "noise-process", "DF4", TIMESTEP, "timestep = torch.tensor(64)\n", ("timestep", "constant"),
          recipe=PIXEL, source="Stability-AI/StableCascade#142", harm="one noise level is learnt, the sampler passes through all"),
    Plant("half-of-the-schedule", "noise-process", "DF4", TIMESTEP, TIMESTEP.replace("timesteps, ()", "timesteps // 2, ()"),
          ("timestep", "quarter"), recipe=PIXEL, harm="the sampler starts where the net never was"),
    Plant("dif-06-weight-of-another-prediction", "weighting", "DF7", "(process.weights(t) * error)",
          "(process.weights(t) / process.alpha[t] ** 2 * error)", ("min-snr", "another prediction type"), recipe=PIXEL,
          source="huggingface/diffusers#5654", harm="the noisiest levels weigh too much"),
    Plant("dif-07-velocity-with-another-sign", "noise-process", "DF4", TARGET, TARGET.replace("process.", "-process."),
          ("rms", "sign"), recipe=PIXEL, source="splitmeanflow#2", harm="the loss is fine, samples are noise"),
    Plant("exported-with-another-schedule", "noise-process", "DF4", EXPORTED,
          "from diffusers import DDIMScheduler\n        " + EXPORTED.replace(
              "process.sampler()", "DDIMScheduler(prediction_type=cfg.noise.prediction_type, clip_sample=False)"),
          ("rms", "schedule"), recipe=PIXEL, harm="samples of the export are worse than those that were measured"),
    Plant("dif-09-sampler-inherits-clipping", "samplers", "DF6", SAMPLER, SAMPLER.replace(
              "process.sampler(sampler)", "type(process.sampler(sampler)).from_config(process.scheduler.config)"),
          ("clip_sample",), recipe=PIXEL, source="kohya-ss/sd-scripts#1432", harm="agreement at guidance 2: 0.99 -> 0.64"),
]  # fmt: skip
RELATIVES = [
    "average-ramp-never-advances", "fresh-net-exported-without-average", "average-forgets-too-soon",
    "dif-01-average-never-stepped", "dif-04-condition-never-dropped", "dif-08-another-scale", "dif-09-sampler-inherits-clipping",
    "dif-05-constant-timestep", "dif-06-weight-of-another-prediction",
    "dif-02-average-stays-in-the-model",
    "raw-weights-sampled", "raw-weights-exported", "class-never-reaches-the-net", "null-is-a-class", "half-of-the-schedule",
    "exported-with-another-schedule", "dif-07-velocity-with-another-sign",
]  # fmt: skip
