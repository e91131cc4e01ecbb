"""diffusion/flow: its formulas against references, its samplers, what the gates read off it. The rest is in test_pixel."""

import math
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDIMScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling
from torch import Tensor
from trainworthy.recipes.diffusion.flow import Noised
from trainworthy.recipes.diffusion.gates import objective, samples, weighting
from trainworthy.recipes.diffusion.models import pipeline
from trainworthy.recipes.diffusion.models.flow_noise import Noise, Process
from trainworthy.recipes.diffusion.models.noise import Noise as Betas
from trainworthy.recipes.diffusion.models.noise import Process as Diffusion
from trainworthy.recipes.shared import digits


# ------------------------------------------------------------------------------------------------------------- formulas
@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.5, 0.6), (-1.0, 1.5)])
def test_the_share_below_a_level_is_the_integral_of_the_logit_normal_density(mean: float, std: float):
    """Esser 2024, equation 19, integrated by midpoints in double precision."""
    n = 100_000
    s = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    density = (-((torch.logit(s) - mean) ** 2) / (2 * std**2)).exp() / (std * math.sqrt(2 * math.pi) * s * (1 - s))
    below = (density.cumsum(0) / n)[999::1000]  # at 0.01, 0.02, ...
    assert torch.allclose(
        Noise(logit_mean=mean, logit_std=std).below(torch.arange(10, 1001, 10).double()), below, atol=1e-5
    )


@pytest.mark.parametrize("where", ["diffusers", "training", "evaluation"])
def test_levels_are_drawn_as_declared(where: str):
    """diffusers' own draws (SD3's), those of the training path and those of the evaluation path, by Kolmogorov and Smirnov."""
    noise, n = Noise(logit_mean=0.3, logit_std=0.8), 1000
    images, labels = digits.load()
    data = Noised(digits.small(images[:n], 16), labels[:n], digits.CLASSES, Process(noise), 0.1)
    generator = torch.Generator().manual_seed(0)
    if where == "diffusers":
        how = {"logit_mean": noise.logit_mean, "logit_std": noise.logit_std, "generator": generator}
        drawn = 1000 * compute_density_for_timestep_sampling("logit_normal", n, **how)
    else:
        drawn = torch.stack([data.get(i, generator if where == "training" else None)["timestep"] for i in range(n)])
    gap = (torch.arange(1, n + 1) / n - noise.below(drawn.sort().values)).abs().max().item()
    assert gap < weighting.DRAWN / math.sqrt(n)


def pictures(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, 1, 4, 4, generator=generator) * 2 - 1, torch.randn(n, 1, 4, 4, generator=generator)


def test_pictures_are_noised_as_the_scheduler_noises_them():
    process, t = Process(Noise()), torch.arange(1.0, 1001, 37)
    image, noise = pictures(len(t))
    assert torch.allclose(process.add(image, noise, t), process.scheduler.scale_noise(image, t, noise), atol=1e-6)


def test_a_perfect_prediction_gives_the_picture_back():
    process, t = Process(Noise(num_train_timesteps=500)), torch.linspace(0.1, 499.9, 40)
    image, noise = pictures(len(t))
    back = process.clean(process.target(image, noise, t), process.add(image, noise, t), t)
    assert torch.allclose(back, image, atol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("name", ["euler", "heun"])
def test_along_a_straight_line_any_steps_lead_to_the_picture(name: str, shift: float):
    """Both samplers, through the function that is shipped; the timesteps they tell the net are those of training."""
    process, told = Process(Noise(shift=shift)), []
    image, noise = pictures(3)

    def unet(sample: Tensor, timestep: Tensor, class_labels: Tensor) -> SimpleNamespace:
        level = (timestep / 1000).view(-1, 1, 1, 1)
        assert torch.allclose(sample, (1 - level) * image + level * noise, atol=1e-5)
        told.append(timestep[0].item())
        return SimpleNamespace(sample=noise - image)

    how = {"null": 10, "guidance_scale": 1.0, "num_inference_steps": 5}
    assert torch.allclose(pipeline.sample(unet, process.sampler(name), torch.zeros(3), noise, **how), image, atol=1e-5)
    assert told[0] == 1000
    assert told[1] == pytest.approx(750.25 * shift / (1 + (shift - 1) * 0.75025), rel=1e-3)
    assert len(told) == (5 if name == "euler" else 9)  # the last of Heun's steps is Euler's


# ---------------------------------------------------------------------------------------------------------------- gates
def asked_for(process: Diffusion, t: Tensor, target: Tensor, image: Tensor, noise: Tensor) -> objective.Objective:
    """What the gates would read off a loss with this target."""
    alpha, sigma = process.levels(t)
    basis = torch.stack([image.flatten(1), noise.flatten(1)], 2)
    fit = torch.linalg.lstsq(basis, target.flatten(1)[..., None]).solution[..., 0].unbind(1)
    return objective.Objective(
        {}, image, process.add(image, noise, t), t, target, torch.ones_like(alpha), alpha, sigma, *fit
    )


@pytest.mark.parametrize("weight", [0.1, 10.0])
def test_the_target_is_read_from_the_quadratic_terms_alone(weight: float):
    target = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def loss(net, batch):
        prediction = net(batch["noisy"], torch.zeros(4)).sample
        apart = 1 - torch.nn.functional.cosine_similarity(prediction.flatten(1), target.flatten(1))
        return {"mse": (prediction - target).square().sum(), "direction": weight * apart.sum()}

    basis = torch.stack([target.flatten(1), torch.ones_like(target).flatten(1)], 2).double()
    (first, second), _, terms, others = objective.slopes_of(loss, {"noisy": target}, basis)
    assert (terms, others) == (("mse",), ("direction",))
    assert torch.allclose(-first / (second - first), target, atol=1e-5)


@pytest.mark.parametrize(("weight", "of"), [(-0.05, 1.0), (0.5, 1.0), (0.1, 0.0)])
def test_a_second_quadratic_term_of_another_target_is_left_out(weight: float, of: float):
    """Away from another sample's velocity (Stoica 2025), to it, and a penalty on predictions."""
    image, noise = torch.randn(2, 4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    target, other = noise - image, (noise - image).roll(1, 0)

    def loss(net, batch):
        prediction = net(batch["noisy"], torch.zeros(4)).sample
        return {"mse": (prediction - target).square().sum(), "more": weight * (prediction - of * other).square().sum()}

    basis = torch.stack([image.flatten(1), noise.flatten(1)], 2).double()
    _, _, terms, others = objective.slopes_of(loss, {"noisy": target}, basis)
    assert (terms, others) == (("mse",), ("more",))


@pytest.mark.parametrize(
    "of",
    [
        lambda x: torch.where(x.abs() < 0.5, x.square(), x.abs() - 0.25).mean((1, 2, 3)),  # Huber
        lambda x: x.abs().mean((1, 2, 3)),
        lambda x: (x.square().sum((1, 2, 3)) + 0.1).sqrt(),  # pseudo-Huber of a whole picture (Song 2023)
        lambda x: x.abs().pow(1.5).mean((1, 2, 3)),
    ],
)
def test_the_target_of_a_loss_that_is_not_quadratic_is_searched(of):
    """Its gradient is not on a line: where the line crosses zero is no target."""
    target, weight = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 2, 3, 4])

    def loss(net, batch):
        return {"robust": (weight * of(net(batch["noise"], torch.zeros(4)).sample - target)).sum()}

    found, steep = objective.searched_target(loss, {"noise": torch.randn_like(target)}, target)
    assert torch.allclose(found, target, atol=1e-4)
    assert torch.allclose(steep.mean((1, 2, 3)) / steep.mean((1, 2, 3))[0], weight, rtol=0.05)


@pytest.mark.parametrize("of", [lambda x: x.square(), lambda x: -x.abs(), lambda x: x])
def test_a_quadratic_loss_is_not_searched_and_one_without_a_least_value_has_no_target(of):
    target = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def loss(net, batch):
        return {"mse": of(net(batch["noise"], torch.zeros(4)).sample - target).sum()}

    assert objective.searched_target(loss, {"noise": torch.randn_like(target)}, target) is None


HUBER = (
    "error = (prediction - target).square().mean((1, 2, 3))  # (B,)",
    'error = torch.nn.functional.smooth_l1_loss(prediction, target, reduction="none", beta=0.5).mean((1, 2, 3))',
)


@pytest.mark.verify
def test_hubers_loss_is_let_through_and_its_wrong_target_is_not(launch, fork):
    expect = ("core.Expect(initial_loss=process.initial_loss, ", "core.Expect(")
    fork(HUBER, expect, recipe="diffusion/flow")
    done = launch("check", "mine.py", "--only", "noise-process,weighting", code=0)
    assert all("target: flow" in v["measured"] for v in done.verdicts()), done.shown
    fork(HUBER, expect, ("target = process.target(", "target = -process.target("), recipe="diffusion/flow")
    done = launch("check", "mine.py", "--only", "noise-process", code=3)
    assert "target: 1 picture -1 noise" in done.verdicts()[0]["measured"], done.shown


def test_targets_are_told_apart():
    """Each by its own name, whatever the process."""
    image, noise = pictures(30)
    flow, line = Process(Noise()), torch.linspace(20, 980, 30)
    for name, target in {
        "flow": noise - image,
        "noise": noise,
        "picture": image,
        "1 picture -1 noise": image - noise,
    }.items():
        assert asked_for(flow, line, target, image, noise).kind == name
    for name, kind in {"v_prediction": "velocity", "epsilon": "noise"}.items():
        process, t = Diffusion(Betas(prediction_type=name)), torch.arange(10, 1000, 33)
        assert asked_for(process, t, process.target(image, noise, t), image, noise).kind == kind


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("name", ["euler", "heun"])
def test_one_step_of_an_exported_scheduler_names_the_picture(name: str, shift: float):
    """Where it undoes what was asked for; another target, or a diffusion's scheduler, is off by far more than the gate allows."""
    process, t = Process(Noise(shift=shift)), torch.tensor([5.0, 250.3, 600.0, 999.9])
    image, noise = pictures(len(t))
    noisy = process.add(image, noise, t)

    def off(scheduler, target: Tensor) -> float:
        back = [objective.undone(scheduler, p, i, x) for p, i, x in zip(target, t.tolist(), noisy, strict=True)]
        return (torch.stack(back) - image).square().mean((1, 2, 3)).sqrt().max().item()

    sampler = process.sampler(name)
    assert off(sampler, noise - image) < samples.EXACT / 4
    assert off(sampler, image - noise) > 1
    assert off(DDIMScheduler.from_config(process.scheduler.config), noise - image) > 0.1


# ------------------------------------------------------------------------------------------- another convention is no bug
TOLD = 'prediction = model(batch["noisy"], t, batch["condition"]).sample.float()\n'
SAMPLED = "return pipeline.sample(model, process.sampler(sampler), classes, noise, **how).clamp(-1, 1)\n"
LAST = "STAGES = [generate]\n"
SHIPPED = """
def backwards(cfg: Config, run: core.Run, previous=None) -> core.Stage:
    stage = generate(cfg, run, previous)
    own = stage.export

    def export(folder: Path) -> None:
        own(folder)
        path = folder / "pipeline.py"
        path.write_text(path.read_text().replace("t.expand(len(labels))", "1000 - t.expand(len(labels))"))

    stage.export = export
    return stage


STAGES = [backwards]
"""
TURNED = SAMPLED.replace("sample(model,", "sample(lambda x, t, c: model(x, 1000 - t, c),")
LOOKED = """class Told(Process):
    def look(self, model, batch):
        return super().look(lambda x, t, c: model(x, self.noise.num_train_timesteps - t, c), batch)
"""
SWAPPED = """class Swapped(Process):
    def levels(self, t):
        return t / self.noise.num_train_timesteps, 1 - t / self.noise.num_train_timesteps
"""


def named(own: str, kind: str, stages: str = SHIPPED) -> tuple[str, str]:
    """A noise process of the fork's own in place of the one that it imports."""
    return LAST, f"{own}\n\nProcess = {kind}\n\n{stages}"


REVERSED = {
    "told-backwards": ((TOLD, TOLD.replace(", t,", ", 1000 - t,")), (SAMPLED, TURNED), named(LOOKED, "Told")),
    "time-runs-from-noise": ((SAMPLED, TURNED), named(SWAPPED, "Swapped")),
}
"""Time reversed in loss, sampler and export alike: what the net is told, or what a timestep means."""
INCONSISTENT = {
    "loss-alone": ((TOLD, TOLD.replace(", t,", ", 1000 - t,")), named(LOOKED, "Told", LAST)),
    "export-left-out": ((SAMPLED, TURNED), named(SWAPPED, "Swapped", LAST)),
    "sampler-left-out": (named(SWAPPED, "Swapped"),),
}


@pytest.mark.verify
@pytest.mark.parametrize("name", REVERSED)
def test_time_reversed_everywhere_is_healthy(name: str, launch, fork):
    """The end-to-end test decides: a net that knows the answer samples it, by evaluate() and by the exported pipeline."""
    fork(*REVERSED[name], recipe="diffusion/flow")
    done = launch("check", "mine.py", "--only", "noise-process,weighting,samplers", timeout=600)
    assert done.returncode == 0, done.shown


@pytest.mark.verify
@pytest.mark.parametrize("name", INCONSISTENT)
def test_time_reversed_in_places_is_stopped(name: str, launch, fork):
    fork(*INCONSISTENT[name], recipe="diffusion/flow")
    done = launch("check", "mine.py", "--only", "noise-process", timeout=600)
    assert done.returncode == 3, done.shown
    assert "time reversed" in done.stdout


@pytest.mark.verify
def test_tiny_data_asks_a_metric_that_does_not_read_the_class(launch):
    """The quick metric is one step of denoising: other class names leave it as it is, other inputs do not."""
    done = launch("check", "diffusion/flow", "--only", "tiny-data", timeout=300)
    assert done.returncode == 0, done.shown
    assert "with each other's inputs); on held-out ones" in done.stdout
    assert "classes permuted" not in done.stdout


class FixedDraws(Noised):
    """Noise and time are the picture's own, in training, too."""

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return super().get(index, None)


class Coupled(Noised):
    """A rectified flow on pairs: each picture keeps its noise, and gets another time in each epoch."""

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        sample, own = super().get(index, generator), super().get(index, None)
        noisy = self.process.add(sample["image"][None], own["noise"][None], sample["timestep"][None])[0]
        return {**sample, "noise": own["noise"], "noisy": noisy}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("kind", "share"), [(Noised, 1.0), (Coupled, 1.0), (FixedDraws, 0.0)])
def test_a_timestep_that_stays_in_all_epochs_is_found(kind: type[Noised], share: float, seed: int):
    images, labels = digits.load()
    data = kind(digits.small(images[:64], 16), labels[:64], digits.CLASSES, Process(Noise()), 0.1)

    def loss(net, batch):
        return {"mse": net(batch["noisy"], batch["timestep"]).sample.square().sum()}

    assert objective.redrawn(loss, data, seed, torch.device("cpu")) == share


@pytest.mark.parametrize(
    ("scale", "blended"), [(0.0, True), (-1.0, True), (0.5, False), (1.0, False), (2.0, False), (7.5, False)]
)
def test_guidance_towards_the_mean_is_found(scale: float, blended: bool):
    """The classifier: which of the clean pictures is the nearest?"""
    images, labels = digits.load()
    first = [int((labels == i).nonzero()[0]) for i in range(10)]
    ones = digits.small(images[first], 16)

    def classifier(x: Tensor) -> tuple[Tensor, None]:
        return torch.cdist(x.flatten(1), ones.flatten(1)).argmin(1), None

    assert bool(samples.guided(classifier, ones, torch.arange(10), scale)[1]) == blended
    assert samples.guided(None, ones, None, scale) == (1.0, "")
