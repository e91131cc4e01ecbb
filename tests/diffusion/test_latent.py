"""diffusion/latent: factors, cache and round trip of its latents, its export in a clean process, bad input, two processes."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL
from safetensors.torch import load_file
from trainworthy.core import gates
from trainworthy.core.base import config
from trainworthy.core.recipe import loading
from trainworthy.core.session import stages
from trainworthy.recipes.diffusion.data import pictures
from trainworthy.recipes.diffusion.gates import latent
from trainworthy.recipes.diffusion.models import latents, nets, pipeline
from trainworthy.recipes.diffusion.models.noise import Noise, Process
from trainworthy.recipes.shared import digits

from tests.helpers.commands import environment, equal_but_rounding, losses, read, run_folder, trainworthy

SHORT = ("--autoencoder.epochs", "0.2", "--latent.epochs", "0.2", "--sampling.every", "50", "--sampling.num-inference-steps", "4",
         "--gates.no-enabled", "--run.no-tensorboard")  # fmt: skip


@pytest.fixture
def vae() -> AutoencoderKL:
    """Small, untrained, with a decoder that says something."""
    torch.manual_seed(0)
    net = nets.autoencoder(1, 4, 16, (8, 8), 1).eval().requires_grad_(False)
    torch.nn.init.normal_(net.decoder.conv_out.weight, std=0.1)
    net.quant_conv.bias += 0.7  # latents that are not centred
    return net


@pytest.fixture
def images() -> torch.Tensor:
    return digits.small(digits.load()[0][::100], 16)


# ------------------------------------------------------------------------------------------------------------- latents
def test_latents_are_centred_and_scaled_by_their_own_factors(vae: AutoencoderKL, images: torch.Tensor):
    """Where diffusers looks for them; a new autoencoder has Stable Diffusion's factor."""
    assert vae.config.scaling_factor == 0.18215
    raw = latents.cached(vae, images)
    z = pipeline.scaled(latents.measured(vae, raw), raw)
    assert vae.config.scaling_factor == pytest.approx(1 / raw.std().item(), rel=1e-5)
    assert vae.config.shift_factor == pytest.approx(raw.mean().item(), rel=1e-5)
    assert z.mean().item() == pytest.approx(0, abs=1e-5)
    assert z.std().item() == pytest.approx(1, rel=1e-5)


def test_the_way_there_and_back_is_the_autoencoders_own(vae: AutoencoderKL, images: torch.Tensor):
    raw = latents.cached(vae, images)
    z = pipeline.scaled(latents.measured(vae, raw), raw)
    with torch.no_grad():
        own = vae(images, sample_posterior=False).sample
    assert torch.allclose(pipeline.decode(vae, z), own, atol=1e-5)


def test_pictures_are_encoded_once_for_each_autoencoder(vae: AutoencoderKL, images: torch.Tensor):
    latents.KEPT.clear()
    seen = []
    hook = vae.encoder.register_forward_hook(lambda *_: seen.append(1))
    first = latents.cached(vae, images)
    assert latents.cached(vae, images) is first
    assert len(seen) == 1
    vae.quant_conv.bias += 1
    assert torch.allclose(latents.cached(vae, images)[:, :4], first + 1, atol=1e-5)
    assert not torch.equal(latents.cached(vae, -images), first)
    assert len(seen) == 3
    hook.remove()


def test_draws_are_in_the_sample(images: torch.Tensor):
    """A latent is drawn with a noise of its own while the autoencoder trains, and is the middle where it is evaluated."""
    data = latents.Pictures(images, torch.zeros(len(images), dtype=torch.long), ("0",), (4, 8, 8))
    first, again = (data.get(3, torch.Generator().manual_seed(1))["noise"] for _ in range(2))
    assert torch.equal(first, again)
    assert 0.8 < first.std() < 1.2
    assert not data.get(3, None)["noise"].any()


def test_peak_signal_to_noise_ratio():
    """Pictures in [-1, 1] have a peak of 2: an rms of 0.2 is 20 dB."""
    assert latents.psnr(0.2**2) == pytest.approx(20)


def test_latents_that_do_not_vary_are_refused(vae: AutoencoderKL):
    with pytest.raises(Exception, match="all the same"):
        latents.measured(vae, torch.ones(8, 4, 8, 8))


# --------------------------------------------------------------------------------------------------------------- export
def test_the_export_loads_with_diffusers_alone(vae: AutoencoderKL, images: torch.Tensor, tmp_path: Path):
    """From a folder that knows nothing of this project; it makes what the path that was measured makes."""
    raw = latents.cached(vae, images)
    latents.measured(vae, raw)
    model = nets.unet(4, 10, 8, (8, 16), 1, False).eval()
    torch.nn.init.normal_(model.conv_out.weight, std=0.1)
    sampler = Process(Noise()).sampler()
    pictures.save_pipeline(tmp_path / "export", model, sampler, vae)
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    how = {"null": 10, "guidance_scale": 2.0, "num_inference_steps": 5}
    made = pipeline.decode(vae, pipeline.sample(model, sampler, torch.tensor([3, 7]), noise, **how))
    script = """
import sys, torch
from diffusers import AutoencoderKL, DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained("export", trust_remote_code=True)
made = pipe([3, 7], guidance_scale=2.0, num_inference_steps=5, generator=torch.Generator().manual_seed(5), output_type="pt")
own = AutoencoderKL.from_pretrained("export", subfolder="vae")
print(pipe([1], num_inference_steps=2).images[0].size, own.config.scaling_factor)
assert not {"core", "recipes"} & sys.modules.keys()
torch.save(made.images, "made.pt")
"""
    env = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"(16, 16) {vae.config.scaling_factor}"
    assert torch.allclose(torch.load(tmp_path / "made.pt"), (made / 2 + 0.5).clamp(0, 1), atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------- gates
@pytest.mark.verify
def test_an_autoencoder_below_the_bar_is_refused_once_it_is_trained(tmp_path: Path):
    """An untrained one, as what stage one left and as what eight samples made of it: only the first can be evaluated."""
    loaded, accelerator = loading.load("diffusion/latent"), Accelerator(cpu=True)
    first, second = stages.specs(
        loaded, config.parse(loaded.module, ["--sampling.num-inference-steps", "4"], prog="test")[0]
    )
    before, found = first.untrained(accelerator), {}
    for follows in ("trained", "rehearsed"):
        context = gates.GateContext(second.cfg, accelerator, second.maker(lambda: before), loaded.module.train, tmp_path, {}, {},
                            follows=follows)  # fmt: skip
        found[follows] = next(g for g in context.look()[1].gates if g.id == "round-trip").check(context)
    assert not found["trained"].ok
    assert "not good enough" in found["trained"].remedy
    assert found["rehearsed"].ok, found["rehearsed"].measured
    assert "not evaluated yet" in found["rehearsed"].measured


# ------------------------------------------------------------------------------------------------------- through the command
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--data.image-size", "20"), ("do not fit the strides", "20 pixels", "multiple of 8")),
        pytest.param(("--data.image-size", "8"), ("do not fit the strides", "at least 16"), marks=pytest.mark.verify),
        pytest.param(("--data.image-size", "18"), ("does not fit", "multiple of 4"), marks=pytest.mark.verify),
        pytest.param(("--widths", "32", "64", "64", "64"), ("do not fit the strides", "halves"), marks=pytest.mark.verify),
        pytest.param(("--vae.widths", "12", "24"), ("does not fit the pictures", "of 8"), marks=pytest.mark.verify),
        pytest.param(("--vae.path", "nowhere"), ("no autoencoder there", "nowhere"), marks=pytest.mark.verify),
        pytest.param(("--vae.path", "rgb"), ("does not fit", "3 channels of pictures", "needed"), marks=pytest.mark.verify),
        pytest.param(("--vae.path", "grey", "--vae.channels", "8"), ("4 of latents", "1 and 8"), marks=pytest.mark.verify),
        pytest.param(("--noise.beta-schedule", "flow"), ("squaredcos_cap_v2",), marks=pytest.mark.verify),
        pytest.param(("--noise.shift", "3"), ("noise.shift",), marks=pytest.mark.verify),
    ],
)  # fmt: skip
def test_bad_settings(argv: tuple[str, ...], words: tuple[str, ...], tmp_path: Path):
    for name, channels in (("rgb", 3), ("grey", 1)):
        if name in argv:
            nets.autoencoder(channels, 4, 16, (8, 8), 1).save_pretrained(tmp_path / name)
    done = trainworthy("run", "diffusion/latent", *SHORT, *argv, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not [w for w in words if w not in done.stderr], done.stderr


@pytest.mark.verify
def test_a_run_leaves_both_nets_with_one_factor(tmp_path: Path):
    """Stage one's own export and the pipeline's hold one autoencoder, factors and all; a second run starts from it."""
    done = trainworthy("run", "diffusion/latent", *SHORT, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = run_folder(tmp_path)
    first, shipped = folder / "stages" / "autoencoder" / "export", folder / "export" / "vae"
    assert read(first / "config.json")["scaling_factor"] == read(shipped / "config.json")["scaling_factor"] != 0.18215
    a, b = (load_file(f / "diffusion_pytorch_model.safetensors") for f in (first, shipped))
    assert all(torch.equal(a[k], b[k]) for k in a)
    rows = read(folder / "summary.json")["figures"]["Samples by guidance scale"]["rows"]
    assert rows[0] == "average weights, guidance 1"
    (tmp_path / "again").mkdir()
    done = trainworthy("run", "diffusion/latent", *SHORT, "--vae.path", str(shipped), cwd=tmp_path / "again")
    assert done.returncode == 0, done.stdout + done.stderr
    again, fresh = (losses(f / "stages" / "autoencoder")[0] for f in (run_folder(tmp_path / "again"), folder))
    assert again < 0.5 * fresh


@pytest.mark.verify
def test_two_processes_train_what_one_does(tmp_path: Path):
    folders = []
    for name, more in (("one", ()), ("two", ("-n", "2"))):
        (tmp_path / name).mkdir()
        done = trainworthy("run", "diffusion/latent", *SHORT, *more, cwd=tmp_path / name)
        assert done.returncode == 0, done.stdout + done.stderr
        folders.append(run_folder(tmp_path / name))
    one, two = (losses(f) for f in folders)
    equal_but_rounding(one, two)
    assert math.isfinite(one[-1])


@pytest.mark.parametrize(("axes", "share"), [((), 0.0), ((-1,), 0.5), ((-2, -1), 0.5)])
def test_latents_that_are_mirrored_after_encoding(axes: tuple[int, ...], share: float):
    fresh = torch.randn(64, 4, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    cached = 1.4 * fresh - 0.1
    cached[::2] = cached[::2].flip(axes)
    assert latent._mirrored(cached, fresh) == share
    assert (latent._fit_line(cached, fresh)[2] > latent.FRESH) == (share > 0)
