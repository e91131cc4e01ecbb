"""Healthy variants of diffusion/pixel, among them those that look like bugs."""

from tests.helpers.plant import Healthy

PIXEL = "diffusion/pixel"
VARIANTS = [
    Healthy("epsilon", ("--noise.prediction-type", "epsilon"), recipe=PIXEL),
    Healthy("ok-12-unconditional", ("--conditioning-dropout-prob", "0", "--sampling.guidance-scale", "1"), recipe=PIXEL,
            naive="the condition is never dropped", may_skip=("terms", "init", "fabricated", "hidden-class")),
    Healthy("no-average", ("--ema", "0"), recipe=PIXEL, naive="raw weights are sampled",
            may_skip=("terms", "init", "fabricated", "ema")),
    Healthy("uniform-weights", ("--noise.snr-gamma", "inf"), recipe=PIXEL, naive="no min-SNR weighting"),
    Healthy("linear-schedule", ("--noise.beta-schedule", "linear"), recipe=PIXEL),
    Healthy("ok-26-few-timesteps", ("--noise.num-train-timesteps", "100"), recipe=PIXEL, naive="timesteps are missing"),
    Healthy("pixel-power-average", recipe=PIXEL, naive="the decay is no setting, and small at first (Karras 2024)",
            hunk=('            stage.state["ema"].update(stage.model)\n', '            average = stage.state["ema"]\n'
                  "            average.decay = (1 - 1 / (average.updates + 1)) ** 7.94\n            average.update(stage.model)\n")),
    Healthy("pixel-own-weights", recipe=PIXEL, naive="weights that no setting declares, smooth over the timesteps",
            hunk=("process.weights(t) * error", "(1 + 0.5 * torch.cos(torch.pi * t / 1000)) * error")),
    Healthy("pixel-logit-normal-times", recipe=PIXEL, naive="the middle timesteps are drawn more often (Esser 2024)",
            hunk=("timestep = torch.randint(self.process.noise.num_train_timesteps, (), generator=generator)\n",
                  "timestep = (torch.randn((), generator=generator).sigmoid() * self.process.noise.num_train_timesteps).long()\n")),
]  # fmt: skip
SAMPLED = ()
