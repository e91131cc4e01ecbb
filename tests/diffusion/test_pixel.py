"""diffusion/pixel: its formulas against references, its sampling path; of it and flow: export, bad input, two processes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, PNDMScheduler, UniPCMultistepScheduler
from diffusers.training_utils import compute_snr
from safetensors.torch import load_file
from trainworthy.core.monitoring.monitors import Monitor
from trainworthy.recipes.diffusion.data import pictures
from trainworthy.recipes.diffusion.evaluation import scores
from trainworthy.recipes.diffusion.gates import samples, text
from trainworthy.recipes.diffusion.gates.objective import undone
from trainworthy.recipes.diffusion.models import flow_noise, pipeline, usage
from trainworthy.recipes.diffusion.models.noise import Noise, Process
from trainworthy.recipes.diffusion.pixel import Noised, make_model, tiny
from trainworthy.recipes.shared import digits

from tests.helpers.commands import environment, equal_but_rounding, losses, read, run_folder, trainworthy
from tests.helpers.pictures import write_folder

SHORT = ("--train.epochs", "0.3", "--sampling.every", "50", "--sampling.num-inference-steps", "4", "--gates.no-enabled",
         "--run.no-tensorboard")  # fmt: skip  # 18 steps


# ------------------------------------------------------------------------------------------------------------- formulas
@pytest.mark.verify
def test_the_clean_picture_may_reach_the_loss_through_the_noisy_one_alone(launch):
    """Where the noise is predicted, the loss has no use for the clean picture: `entries` stopped this objective."""
    done = launch("check", "diffusion/pixel", "--noise.prediction-type", "epsilon", "--only", "entries")
    assert done.returncode == 0, done.shown
    assert "pass   entries       relative change of the loss by entry: image 0," in done.stdout, done.shown


def test_a_dropout_that_is_the_share_to_keep_is_named(launch):
    done = launch(
        "check", "diffusion/flow", "--conditioning-dropout-prob", "0.9", "--only", "hidden-class", timeout=300
    )
    assert done.returncode == 3, done.shown
    assert "the setting names the share that keeps the class: --conditioning-dropout-prob 0.1" in done.stdout


@pytest.mark.parametrize(("prediction", "plus"), [("epsilon", 0), ("v_prediction", 1)])
def test_min_snr_weights_are_those_of_diffusers_examples(prediction: str, plus: int):
    """min(SNR, 5) over SNR for the noise, over SNR + 1 for the velocity (examples/text_to_image/train_text_to_image.py)."""
    process, t = Process(Noise(prediction_type=prediction)), torch.arange(1000)
    snr = compute_snr(process.scheduler, t)
    expected = snr.clamp(max=5.0) / (snr + plus)
    assert torch.allclose(process.weights(t), expected, rtol=1e-3, atol=1e-9)
    assert Process(Noise(prediction_type=prediction, snr_gamma=float("inf"))).weights(t).unique().tolist() == [1.0]


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("schedule", ["squaredcos_cap_v2", "linear"])
def test_a_perfect_prediction_gives_the_picture_back(prediction: str, schedule: str):
    process = Process(Noise(prediction_type=prediction, beta_schedule=schedule))
    t = torch.arange(0, 1000, 37)
    image, noise = torch.rand(len(t), 1, 4, 4) * 2 - 1, torch.randn(len(t), 1, 4, 4)
    back = process.clean(process.target(image, noise, t), process.add(image, noise, t), t)
    assert torch.allclose(back, image, atol=0.02)


@pytest.mark.parametrize("kind", [DPMSolverMultistepScheduler, UniPCMultistepScheduler, PNDMScheduler])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_an_exported_scheduler_that_returns_the_next_sample_alone_names_the_picture(kind: type, prediction: str):
    process = Process(Noise(prediction_type=prediction))
    t = torch.arange(0, 1000, 111)
    image, noise = torch.rand(len(t), 1, 4, 4) * 2 - 1, torch.randn(len(t), 1, 4, 4)
    rows = list(zip(process.target(image, noise, t), t.tolist(), process.add(image, noise, t), strict=True))
    back = torch.stack([undone(kind.from_config(process.scheduler.config), p, i, x) for p, i, x in rows])
    assert torch.allclose(back, image, atol=0.02)
    other = "epsilon" if prediction == "v_prediction" else "v_prediction"
    wrong = kind.from_config(process.scheduler.config, prediction_type=other)
    assert not torch.allclose(torch.stack([undone(wrong, p, i, x) for p, i, x in rows]), image, atol=0.5)


@pytest.mark.parametrize("drawn", [pytest.param("ddim", marks=pytest.mark.verify), "dpm++"])
def test_another_sampler_in_evaluation_and_export_is_quiet(launch, fork, drawn: str):
    """`noise-process` raised an AttributeError: DPM-Solver++ returns the next sample alone. Where DDIM is still evaluated, timesteps differ."""
    evaluated = (
        'scale: float, sampler: str = "ddim") -> Tensor:',
        f'scale: float, sampler: str = "{drawn}") -> Tensor:',
    )
    fork(
        *[evaluated] * (drawn != "ddim"),
        (".cpu(), process.sampler())", '.cpu(), process.sampler("dpm++"))'),
        recipe="diffusion/pixel",
    )
    done = launch("check", "mine.py", "--only", "noise-process", timeout=300)
    assert done.verdicts()[0]["measured"].startswith(
        "target: velocity, inverted in one step by DPMSolverMultistepScheduler"
    ), done.shown
    assert drawn == "ddim" or done.returncode == 0, done.shown


def test_the_samplers_keep_the_training_schedule_and_do_not_clip():
    process = Process(Noise(prediction_type="epsilon", num_train_timesteps=500, beta_schedule="linear"))
    for name in ("ddim", "dpm++"):
        config = process.sampler(name).config
        assert torch.equal(process.sampler(name).alphas_cumprod, process.scheduler.alphas_cumprod)
        assert (config.prediction_type, config.num_train_timesteps) == ("epsilon", 500)
    assert process.sampler().config.clip_sample is False


def test_frechet_distance_of_gaussians():
    """|m1 - m2|^2 + tr(A + B - 2 sqrt(AB)), by hand for diagonal covariances."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(20_000, 3, generator=generator)
    b = torch.randn(20_000, 3, generator=generator) * torch.tensor([1.0, 2.0, 0.5]) + torch.tensor([0.0, 1.0, 0.0])
    assert scores.frechet(a, a) == pytest.approx(0.0, abs=1e-9)
    assert scores.frechet(a, b) == pytest.approx(1 + 1 + 0.25, rel=0.03)


def test_guidance_pushes_away_from_the_unconditional_prediction():
    """The prediction handed to the scheduler is u + scale (c - u); at a scale of 1 the net is not asked without the class."""
    asked, given = [], []

    def unet(sample, timestep, class_labels):
        asked.append(class_labels.tolist())
        return SimpleNamespace(sample=class_labels.float().view(-1, 1, 1, 1).expand_as(sample))

    class Scheduler:
        init_noise_sigma, timesteps = 1.0, torch.tensor([7])
        set_timesteps = lambda self, n, device: None  # noqa: E731
        scale_model_input = lambda self, x, t: x  # noqa: E731

        def step(self, prediction, t, sample):
            given.append(prediction.flatten().tolist())
            return SimpleNamespace(prev_sample=sample)

    for scale in (3.0, 1.0):
        how = {"null": 10, "guidance_scale": scale, "num_inference_steps": 1}
        pipeline.sample(unet, Scheduler(), torch.tensor([4]), torch.zeros(1, 1, 1, 1), **how)
    assert asked == [[4, 10], [4]]
    assert given == [[10 + 3 * (4 - 10)], [4]]


def test_draws_are_in_the_sample():
    """The training path hides about a tenth of the classes; the evaluation path hides none and is always the same."""
    images, labels = digits.load()
    data = Noised(digits.small(images[:1000], 16), labels[:1000], digits.CLASSES, Process(Noise()), 0.1)
    drawn = [data.get(i, torch.Generator().manual_seed(i)) for i in range(1000)]
    hidden = sum(s["condition"].item() == data.null for s in drawn) / 1000
    assert 0.06 < hidden < 0.14
    assert len({s["timestep"].item() for s in drawn}) > 500
    first, again = data.get(3, None), data.get(3, None)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert all(data.get(i, None)["condition"] == labels[i] for i in range(50))


def test_pictures_of_your_own_are_fitted(tmp_path: Path):
    """Folders by class, of many sizes and kinds, as vision/classify reads them: one size, three channels, [-1, 1]."""
    folder = write_folder(tmp_path / "pictures")
    images, labels, classes, learn, held_out, *_ = pictures.read(pictures.Source(path=str(folder), image_size=16))
    assert images.shape == (len(labels), 3, 16, 16)
    assert images.dtype == torch.float32
    assert -1 <= images.min() < -0.9 < 0.9 < images.max() <= 1
    assert len(classes) == labels.max() + 1
    assert not set(learn.tolist()) & set(held_out.tolist())


def test_pictures_of_your_own_need_their_own_classifier(launch, tmp_path: Path):
    """The digits' classifier scored shapes at chance, after minutes of gates. `tiny-data` stopped generators of two to four classes, whose
    metric does not read the class."""
    own = (
        "--data.path",
        str(write_folder(tmp_path / "own", per_class=120, held_out=40, classes=4)),
        "--data.image-size",
        "8",
    )
    done = launch("data", "diffusion/pixel", *own)
    assert done.returncode == 0, done.shown
    done = launch("check", "diffusion/pixel", *own)
    assert done.returncode == 2, done.shown
    assert "--data.classifier digits: a classifier of other classes" in done.stderr
    assert "in this order: digit 0, digit 1" in done.stderr
    done = launch("run", "vision/classify", *own[:2], "--max-steps", "2", "--gates.no-enabled")
    assert done.returncode == 0, done.shown
    scored = ("--data.classifier", str(done.folder()))
    done = launch("check", "diffusion/pixel", *own, *scored, "--only", "tiny-data")
    assert done.returncode == 0, done.shown
    assert "pass   tiny-data" in done.stdout
    three = str(write_folder(tmp_path / "three", per_class=60, held_out=20, classes=3))
    done = launch("check", "diffusion/pixel", "--data.path", three, *scored)
    assert done.returncode == 2, done.shown
    assert "4 classes: digit 0, digit 1" in done.stderr


# --------------------------------------------------------------------------------------------------------------- export
@pytest.mark.parametrize(
    ("process", "scheduler"),
    [
        pytest.param(Process(Noise()), "DDIMScheduler", id="pixel"),
        pytest.param(
            flow_noise.Process(flow_noise.Noise(shift=2.0)),
            "FlowMatchEulerDiscreteScheduler",
            id="flow",
            marks=pytest.mark.verify,
        ),
    ],
)
def test_the_export_loads_with_diffusers_alone(process: Process, scheduler: str, tmp_path: Path):
    """From a folder that knows nothing of this project: the pipeline by its own file, its parts by diffusers' stock classes; both
    make what the path that was measured makes."""
    torch.manual_seed(0)
    model = make_model(tiny(), 1, 10).eval()
    torch.nn.init.normal_(model.conv_out.weight, std=0.1)
    pictures.save_pipeline(tmp_path / "export", model, process.sampler())
    noise = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(5))
    how = {"null": 10, "guidance_scale": 2.0, "num_inference_steps": 5}
    expected = (pipeline.sample(model, process.sampler(), torch.tensor([3, 7]), noise, **how) / 2 + 0.5).clamp(0, 1)
    script = """
import sys, torch
from diffusers import SCHEDULER, DiffusionPipeline, UNet2DModel
pipe = DiffusionPipeline.from_pretrained("export", trust_remote_code=True)
made = pipe([3, 7], guidance_scale=2.0, num_inference_steps=5, generator=torch.Generator().manual_seed(5), output_type="pt")
print(pipe([1], num_inference_steps=2).images[0].size, len(pipe(1, num_inference_steps=2).images))
for wrong in ([11], [-1], [0.5], []):
    try:
        pipe(wrong, num_inference_steps=2)
    except ValueError as error:
        assert "numbers of classes, 0 to 9; 10 is no class" in str(error), error
    else:
        raise AssertionError(wrong)
UNet2DModel.from_pretrained("export", subfolder="unet")
assert SCHEDULER.from_pretrained("export", subfolder="scheduler").config == pipe.scheduler.config
assert not {"core", "recipes"} & sys.modules.keys()
torch.save(made.images, "made.pt")
""".replace("SCHEDULER", scheduler)
    names = [f"class {i}" for i in range(10)]
    script += usage.card(names, "hub:someone/things", scale=2.0, steps=2)["usage"]  # the section *Use* of the card
    env = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(16, 16) 1", "0 class 0 (16, 16)", "9 class 9 (16, 16)"]
    assert torch.allclose(torch.load(tmp_path / "made.pt"), expected, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- monitors
@pytest.mark.parametrize(
    ("monitor", "key", "bad", "words"),
    [
        (
            samples.samples,
            "val/agreement",
            0.1,
            ("one step recovers 97%", "10.0% of the samples show the requested class", "train longer"),
        ),
        (samples.samplers, "val/sampler_difference", 0.6, ("rms difference 0.600", "too few steps")),
        (text.captions_matter, "val/matched", 0.5, ("50.0% of held-out pictures", "text encoder")),
    ],
)
def test_monitors_say_what_only_a_trained_net_shows(monitor: Monitor, key: str, bad: float, words: tuple[str, ...]):
    """Quiet at what the recipes reach; a net whose loss is as low, and whose samples are not as good, is told."""
    good = {
        "val/denoised": 0.97,
        "val/agreement": 0.98,
        "val/frechet": 0.3,
        "val/sampler_difference": 0.03,
        "val/matched": 0.76,
    }
    first = {
        "val/denoised": 0.8,
        "val/agreement": 0.1,
        "val/frechet": 47.0,
        "val/sampler_difference": 0.03,
        "val/matched": 0.5,
    }
    assert monitor.check([first, good]).ok
    found = monitor.check([first, {**good, key: bad}])
    assert not found.ok
    assert not [w for w in words if w not in found.measured + found.remedy], found
    assert "first evaluation" not in monitor.check([{**good, key: bad}]).measured  # it is the only one


# ------------------------------------------------------------------------------------------------------- through the command
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--data.classifier", "nowhere"), ("no classifier there", "config.json", "vision/classify")),
        (("--data.image-size", "15"), ("does not fit the pictures", "multiple of 2")),
        pytest.param(("--data.path", "nowhere"), ("nowhere",), marks=pytest.mark.verify),
        pytest.param(("--widths", "12", "32"), ("does not fit the pictures", "of 8"), marks=pytest.mark.verify),
        pytest.param(("--noise.prediction-type", "velocity"), ("v_prediction",), marks=pytest.mark.verify),
        pytest.param(("--sampling.guidance", "2"), ("sampling.guidance-scale",), marks=pytest.mark.verify),
        pytest.param(("--ema", "1"), ("average", "[0, 1)"), marks=pytest.mark.verify),
    ],
)
def test_bad_settings(argv: tuple[str, ...], words: tuple[str, ...], tmp_path: Path):
    refused("diffusion/pixel", argv, words, tmp_path)


@pytest.mark.verify
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--noise.logit-std", "0"), ("--noise.logit-std 0", "above 0")),
        (("--noise.shift", "-1"), ("--noise.shift -1", "above 0")),
        (("--noise.num-train-timesteps", "1"), ("--noise.num-train-timesteps 1", "100 timesteps or more")),
        (("--noise.prediction-type", "epsilon"), ("noise.prediction-type",)),
        (("--noise.snr-gamma", "5"), ("noise.snr-gamma",)),
    ],
)
def test_bad_settings_of_a_flow(argv: tuple[str, ...], words: tuple[str, ...], tmp_path: Path):
    refused("diffusion/flow", argv, words, tmp_path)


def refused(recipe: str, argv: tuple[str, ...], words: tuple[str, ...], cwd: Path) -> None:
    done = trainworthy("run", recipe, *SHORT, *argv, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not [w for w in words if w not in done.stderr], done.stderr


@pytest.mark.verify
@pytest.mark.parametrize("recipe", ["diffusion/pixel", "diffusion/flow"])
def test_two_processes_train_what_one_does(recipe: str, tmp_path: Path):
    folders = []
    for name, more in (("one", ()), ("two", ("-n", "2"))):
        (tmp_path / name).mkdir()
        done = trainworthy("run", recipe, *SHORT, *more, cwd=tmp_path / name)
        assert done.returncode == 0, done.stdout + done.stderr
        folders.append(run_folder(tmp_path / name))
    one, two = (losses(f) for f in folders)
    equal_but_rounding(one, two)
    a, b = (load_file(f / "export" / "unet" / "diffusion_pytorch_model.safetensors") for f in folders)
    assert all(torch.allclose(a[k], b[k], atol=1e-4) for k in a)


@pytest.mark.verify
def test_the_report_has_the_curve_by_guidance(tmp_path: Path):
    """Raw and average weights at every scale beside real pictures and the untrained net; a grid at every evaluation."""
    done = trainworthy("run", "diffusion/pixel", *SHORT, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = run_folder(tmp_path)
    summary = read(folder / "summary.json")
    rows = [f"{w} weights, guidance {s}" for w in ("average", "raw") for s in ("1", "1.5", "2", "4")]
    table = summary["figures"]["Samples by guidance scale"]
    assert table["rows"] == [*rows, "real pictures"]
    assert table["values"][-1][0] > 0.98
    assert {"untrained net", "without guidance"} <= summary["baselines"].keys()
    assert list((folder / "previews" / "predictions").glob("step-*.png"))
    assert json.loads((folder / "export" / "model_index.json").read_text())["_class_name"][0] == "pipeline"
