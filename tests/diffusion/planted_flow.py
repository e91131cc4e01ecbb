"""Bugs of a rectified flow, planted in a fork of diffusion/flow; the words were fixed before the gates were run."""

from tests.diffusion.planted_pixel import ASKED, EXPORTED, HIDDEN, PIXEL, SAMPLER, STAGES, TARGET, UPDATED, staged
from tests.helpers.plant import Plant

FLOW = "diffusion/flow"
DRAWN = "timestep = self.process.noise.num_train_timesteps * torch.sigmoid(logit)\n"
ADDED = "noisy = self.process.add(image[None], noise[None], timestep[None])[0]\n"
LOSS = 'return {"mse": error.sum()}\n'

PLANTS = [
    Plant("flow-velocity-turned", "noise-process", "DF4", TARGET, TARGET.replace("process.", "-process."),
          ("rms", "the target's sign is reversed"), recipe=FLOW, source="splitmeanflow#2", harm="the loss is fine, samples are noise"),
    Plant("flow-time-reversed", "noise-process", "DF4", ASKED, ASKED.replace(", t,", ", process.noise.num_train_timesteps - t,"),
          ("time reversed",), recipe=FLOW, harm="the sampler tells the net of pure noise that it is a picture"),
    Plant("flow-picture-at-the-noisy-end", "noise-process", "DF4", ADDED, ADDED.replace(
              "image[None], noise[None]", "noise[None], image[None]"), ("rms", "sign"), recipe=FLOW,
          harm="the line is walked the wrong way"),
    Plant("flow-told-a-share", "noise-process", "DF4", ASKED, ASKED.replace(", t,", ", t / process.noise.num_train_timesteps,"),
          ("another scale",), recipe=FLOW, harm="the net learns 0 to 1 and is asked 0 to 1000"),
    Plant("flow-picture-predicted", "noise-process", "DF4", TARGET, 'target = batch["image"]\n', ("target: picture", "rms"),
          recipe=FLOW, harm="samples walk towards minus the picture"),
    Plant("flow-noise-predicted", "noise-process", "DF4", TARGET, 'target = batch["noise"]\n', ("target: noise", "rms"),
          recipe=FLOW, harm="samples keep what they should lose"),
    Plant("flow-velocity-of-a-diffusion", "noise-process", "DF4", TARGET,
          'level = (t / process.noise.num_train_timesteps).view(-1, 1, 1, 1)\n'
          '        target = (1 - level) * batch["noise"] - level * batch["image"]\n', ("target: velocity", "rms"),
          recipe=FLOW, harm="v prediction under a sampler of flows"),
    Plant("flow-one-level", "noise-process", "DF4", DRAWN, "timestep = torch.tensor(500.0)\n", ("timestep", "constant"),
          recipe=FLOW, source="Stability-AI/StableCascade#142", harm="one noise level is learnt"),
    Plant("flow-exported-with-another-shift", "noise-process", "DF4", EXPORTED, EXPORTED.replace(
              "process.sampler()", "type(process.scheduler).from_config(process.scheduler.config, shift=3.0)"),
          ("does not use 24 of the export's timesteps", "shift"), recipe=FLOW,
          harm="samples of the export are others than those that were measured"),
    Plant("flow-exported-with-ddim", "noise-process", "DF4", EXPORTED,
          "from diffusers import DDIMScheduler\n        " + EXPORTED.replace(
              "process.sampler()", "DDIMScheduler.from_config(process.scheduler.config)"),
          ("by DDIMScheduler", "prediction type"), recipe=FLOW, harm="diffusers logs a line and goes on"),
    Plant("flow-predicted-in-a-diffusion", "noise-process", "DF4", TARGET, 'target = batch["noise"] - batch["image"]\n',
          ("target: flow", "rms"), recipe=PIXEL, harm="a flow's target under a sampler of diffusions"),
    Plant("flow-scheduler-exported-of-a-diffusion", "noise-process", "DF4", EXPORTED,
          "from diffusers import FlowMatchEulerDiscreteScheduler as Euler\n        " + EXPORTED.replace(
              "process.sampler()", "Euler.from_config(process.scheduler.config)"),
          ("by FlowMatchEulerDiscreteScheduler", "prediction type"), recipe=PIXEL,
          harm="diffusers logs a line and goes on"),
    Plant("flow-levels-in-the-middle-alone", "noise-process", "DF4", "torch.randn((), generator=generator)",
          "torch.rand((), generator=generator)", ("drawn from another distribution than declared: 0% 0% 100% 0%",), recipe=FLOW,
          harm="the sampler walks over levels that were never trained"),
    Plant("flow-levels-of-another-mean", "weighting", "DF7", DRAWN, DRAWN.replace("(logit)", "(logit - 0.5)"),
          ("drawn from another distribution", "mean"), recipe=FLOW),
    Plant("flow-mean-before-the-square", "weighting", "DF7", "(prediction - target).square().mean((1, 2, 3))",
          "(prediction - target).mean((1, 2, 3)).square()", ("averaged over the picture before it is squared",), recipe=FLOW,
          harm="only the mean brightness is learnt"),
    Plant("flow-weighed-as-a-diffusion", "weighting", "DF7", LOSS,
          'level = t / process.noise.num_train_timesteps\n'
          '        return {"mse": (((1 - level) / level).square().clamp(max=5.0) * error).sum()}\n',
          ("weights differ", "another prediction type"), recipe=FLOW, source="huggingface/diffusers#5654",
          harm="noisy levels are hardly trained"),
    Plant("flow-class-never-dropped", "hidden-class", "DF5", HIDDEN, "condition = label\n", ("dropped in 0.0%", "drop mask"),
          recipe=FLOW, source="lucidrains/DALLE2-pytorch#144", harm="guidance pushes away from what was never learnt"),
    Plant("flow-average-never-stepped", "ema", "DF2", UPDATED, "            pass\n", ("average", "not updated"), recipe=FLOW,
          source="huggingface/diffusers#5783", harm="what is sampled and exported is the initial weights"),
    Plant("flow-raw-weights-sampled", "ema", "DF2", STAGES,
          staged("own = stage.evaluate\n    stage.evaluate = lambda model, data: own(stage.model, data)"),
          ("evaluation", "raw weights"), recipe=FLOW, harm="the number is of other weights than the export's"),
    Plant("flow-raw-weights-exported", "ema", "DF2", EXPORTED, EXPORTED.replace("(ema.model if ema else model)", "model"),
          ("exported", "not the average"), recipe=FLOW, harm="what is shipped is not what was measured"),
    Plant("flow-too-few-steps", "samplers", "DF6", "field(default_factory=Sampling)",
          "field(default_factory=lambda: Sampling(num_inference_steps=3))", ("too few steps",), recipe=FLOW,
          harm="one sampler is far from where the flow leads"),
    Plant("flow-sampler-draws-again", "samplers", "DF6", SAMPLER, SAMPLER.replace(
              "process.sampler(sampler)",
              'process.sampler(sampler) if sampler == "heun" else type(process.scheduler).from_config('
              'process.scheduler.config, stochastic_sampling=True)'), ("option", "inherits"), recipe=FLOW,
          harm="noise is added where none was learnt to be taken away"),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS]
