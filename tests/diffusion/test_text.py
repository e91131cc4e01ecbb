"""diffusion/text: captions and gaps in them, text encoders, models of the hub whole and by LoRA, the export in a clean process."""

import copy
import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
)
from PIL import Image
from torch import nn
from trainworthy.core import UserError
from trainworthy.recipes.diffusion.data import captions
from trainworthy.recipes.diffusion.models import latents, nets, stable
from trainworthy.recipes.diffusion.models.noise import Noise, Process
from trainworthy.recipes.shared import digits
from transformers import AutoTokenizer

from tests.helpers import stable as make
from tests.helpers.commands import environment, holds, read, run_folder, trainworthy

SHORT = ("--train.epochs", "0.2", "--train.eval-every", "0.2", "--sampling.every", "50", "--sampling.num-inference-steps", "4",
         "--gates.no-enabled", "--run.no-tensorboard")  # fmt: skip
LORA = ("--model", "sd", "--lora-rank", "4", "--ema", "0", "--data.image-size", "16")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make.write(tmp_path_factory.mktemp("models") / "sd")


def coloured(folder: Path, n: int = 12) -> dict[str, str]:
    """Pictures of one colour each, some in a folder, and what they show."""
    said = {}
    for i in range(n):
        name = f"{'more/' if i % 2 else ''}{i}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + i, 18), (20 * i, 255 - 20 * i, 128)).save(folder / name)
        said[name] = f"a {'red' if i > 6 else 'green'} square"
    return said


def table(folder: Path, rows: dict[str, str], name: str = "metadata.jsonl") -> None:
    with (folder / name).open("w", newline="") as file:
        if name.endswith("csv"):
            csv.writer(file).writerows([("file_name", "text"), *rows.items()])
        else:
            file.writelines(json.dumps({"file_name": k, "text": v}) + "\n" for k, v in rows.items())


# ------------------------------------------------------------------------------------------------------------ captions
@pytest.mark.parametrize(("colour", "channels"), [(False, 1), (True, 3)])
def test_grey_pictures_of_your_own_fit_the_grey_autoencoder(tmp_path: Path, colour: bool, channels: int):
    """They were read as three channels and refused with "it reads grey pictures"."""
    for i in range(8):
        Image.new("RGB", (16, 16), (20 * i, 20 * i, 20 * i + colour * (i == 7))).save(tmp_path / f"{i}.png")
    table(tmp_path, {f"{i}.png": f"picture {i}" for i in range(8)})
    found = captions.read_captioned(captions.Source(path=str(tmp_path), captions="metadata.jsonl", max_bad=0))
    assert found.images.shape == (8, channels, 16, 16)
    assert captions.in_channels(found, 3).images.shape == (8, 3, 16, 16)


@pytest.mark.parametrize("how", ["metadata.jsonl", "txt"])
def test_captions_that_no_setting_names_are_found(tmp_path: Path, how: str):
    for i in range(3):
        Image.new("L", (16, 16), 20 * i).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text("one") if how == "txt" else table(tmp_path, {"0.png": "one"})
    with pytest.raises(UserError, match=f"--data.captions {how}"):
        captions.read(captions.Source(path=str(tmp_path)))


@pytest.mark.parametrize("how", ["metadata.jsonl", "metadata.csv", "txt"])
def test_captions_beside_pictures(how: str, tmp_path: Path):
    said = coloured(tmp_path)
    if how == "txt":
        for name, text in said.items():
            (tmp_path / name).with_suffix(".txt").write_text(text + "\n")
    else:
        table(tmp_path, said, how)
    found = captions.read(captions.Source(path=str(tmp_path), captions=how, image_size=16))
    assert found.images.shape == (12, 3, 16, 16)
    assert sorted(found.captions) == ["a green square", "a red square"]
    reds = [found.captions[i] == "a red square" for i in found.caption_ids.tolist()]
    assert reds == (found.images[:, 0, 0, 0] > 0).tolist()
    assert len(found.held_out) == 2
    assert sorted([*found.learn.tolist(), *found.held_out.tolist()]) == list(range(12))


def test_held_out_digits_are_asked_for_in_other_words():
    found = captions.read(captions.Source(image_size=8))
    learnt, asked = (
        {found.captions[i] for i in found.caption_ids[part].tolist()} for part in (found.learn, found.held_out)
    )
    assert not learnt & asked
    assert len(learnt) == 160
    assert len(asked) == 60
    i = found.held_out[-1]
    assert found.classes[found.labels[i]] == "9"
    assert any(w in found.captions[found.caption_ids[i]] for w in ("9", "nine"))
    assert captions.in_channels(found, 3).images.shape[1:] == (3, 8, 8)


# --------------------------------------------------------------------------------------------------------------- parts
def test_a_mean_is_taken_out_by_the_autoencoders_own_weights():
    """No shift is left in its config, and what it makes of a picture is what it was."""
    torch.manual_seed(0)
    vae = nets.autoencoder(1, 4, 16, (8, 8), 1).eval().requires_grad_(False)
    nn.init.normal_(vae.decoder.conv_out.weight, std=0.1)
    vae.quant_conv.bias += 0.7
    images = digits.small(digits.load()[0][::100], 16)
    before, raw = vae(images).sample, latents.cached(vae, images)
    stable.centred(vae, raw)
    z = latents.cached(vae, images)
    assert vae.config.shift_factor is None
    assert vae.config.scaling_factor == pytest.approx(1 / raw.std().item(), rel=1e-4)
    assert z.mean().item() == pytest.approx(0, abs=1e-4)
    assert torch.allclose(vae(images).sample, before, atol=1e-5)


@pytest.mark.parametrize(("kind", "says"), [(PNDMScheduler, "epsilon"), (EulerDiscreteScheduler, "v_prediction")])
def test_a_model_keeps_what_is_its_own(kind, says: str, tmp_path: Path):
    schedule = kind(
        beta_start=0.001, beta_end=0.02, beta_schedule="scaled_linear", prediction_type=says, steps_offset=1
    )
    found = stable.model(str(make.write(tmp_path / "own", scheduler=schedule)), Noise(), 3, 16)
    process = Process(found.noise, "latent", float("inf"), found.scheduler)
    assert found.vae.config.scaling_factor == 1.7
    assert (found.noise.prediction_type, found.noise.num_train_timesteps) == (says, 1000)
    assert torch.allclose(process.sampler().alphas_cumprod, schedule.alphas_cumprod)
    assert not process.sampler().config.clip_sample
    assert process.sampler().config.prediction_type == says


def test_captions_are_read_as_the_pipeline_reads_them(model: Path):
    """The empty one last; a net and its average share one table, which no checkpoint holds."""
    found = stable.model(str(model), Noise(), 3, 16)
    words = found.read(("a red square", "7"), torch.device("cpu"))
    pipe = StableDiffusionPipeline.from_pretrained(model, safety_checker=None)
    asked, empty = pipe.encode_prompt(["a red square", "7"], "cpu", 1, True)
    assert torch.equal(words[:2], asked)
    assert torch.equal(words[2], empty[0])
    net = stable.Captioned(found.unet, words)
    assert copy.deepcopy(net).words[0] is words
    assert all(k.startswith("unet.") for k in net.state_dict())
    assert found.cut(("a red square", "one with far more letters than are read")) == 1


@pytest.mark.verify
def test_a_caption_of_one_figure_says_which(tmp_path: Path):
    """A decoder's first states hardly depend on their token: nothing to learn from, unless another one stands in front, in the
    export's own tokenizer, too."""
    encoder, tokenizer = stable._text("smollm2", 16)
    tokenizer.save_pretrained(tmp_path)
    figures = [str(i) for i in range(10)]
    ids = AutoTokenizer.from_pretrained(tmp_path)(figures, return_tensors="pt").input_ids
    assert ids.tolist() == tokenizer(figures).input_ids
    assert ids.shape == (10, 2)
    with torch.no_grad():
        bare, behind = (torch.pdist(encoder(x).last_hidden_state[:, -1]).mean().item() for x in (ids[:, 1:], ids))
    assert behind > 5 * bare, (bare, behind)


def test_adapters_are_merged_and_kept_as_the_librarys_own_file(model: Path, tmp_path: Path):
    found = stable.model(str(model), Noise(), 3, 16)
    net = stable.Captioned(found.unet, found.read(("a red square",), torch.device("cpu")))
    came = stable.adapted(net, 4)
    trained = [n for n, p in net.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in n for n in trained)
    for name, p in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.2)
    stable.save(tmp_path, found, net, Process(found.noise, scheduler=found.scheduler).sampler(), 4)
    x, t = torch.randn(2, 4, 8, 8), torch.tensor([3, 700])
    caption = torch.tensor([0, 1])
    with torch.no_grad():
        due = net(x, t, caption).sample
        merged = DiffusionPipeline.from_pretrained(tmp_path).unet
        plain = StableDiffusionPipeline.from_pretrained(model, safety_checker=None)
        before = plain.unet(x, t, net.words[0][caption]).sample
        plain.load_lora_weights(tmp_path / "lora")
        assert torch.allclose(merged(x, t, net.words[0][caption]).sample, due, atol=1e-5)
        assert torch.allclose(plain.unet(x, t, net.words[0][caption]).sample, due, atol=1e-5)
    assert not torch.allclose(before, due, atol=1e-2)
    assert torch.equal(
        came[next(n for n in came if "to_q" in n)], dict(net.named_parameters())[next(n for n in came if "to_q" in n)]
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"latent_channels": 8}, ("does not fit its net", "8 channels of latents", "reads 4")),
        ({"net_channels": 9}, ("does not fit its net", "a mask")),
        ({"channels": 1}, ("does not fit the pictures", "1 channels")),
        ({"shift": 0.1}, ("shifts its latents",)),
        ({"scheduler": FlowMatchEulerDiscreteScheduler()}, ("scheduler", "another family", "FlowMatchEulerDiscreteScheduler")),
    ],
)  # fmt: skip
def test_a_model_of_other_parts_is_refused(how: dict, words: tuple[str, ...], tmp_path: Path):
    with pytest.raises(UserError) as error:
        stable.model(str(make.write(tmp_path / "odd", **how)), Noise(), 3, 16)
    assert not [w for w in words if w not in str(error.value)], error.value


# ------------------------------------------------------------------------------------------------------- through the command
def gap(folder: Path) -> None:
    rows = coloured(folder / "own")
    table(folder / "own", {k: v for k, v in rows.items() if k not in ("0.png", "more/3.png")})


def empty(folder: Path) -> None:
    table(folder / "own", coloured(folder / "own") | {"4.png": "  "})


def lost(folder: Path) -> None:
    table(folder / "own", coloured(folder / "own") | {"99.png": "a square"})


def twice(folder: Path) -> None:
    coloured(folder / "own")
    (folder / "own" / "metadata.jsonl").write_text('{"file_name": "0.png", "text": "a"}\n' * 2)


def broken(folder: Path) -> None:
    coloured(folder / "own")
    (folder / "own" / "metadata.jsonl").write_text('{"file_name": "0.png", "text": \n')


def channels(folder: Path) -> None:
    make.write(folder / "sd", latent_channels=8)


def flow(folder: Path) -> None:
    make.write(folder / "sd", scheduler=FlowMatchEulerDiscreteScheduler())


def family(folder: Path) -> None:
    (folder / "sd").mkdir()
    (folder / "sd" / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')


def nothing(folder: Path) -> None:
    pass


OWN = ("--data.path", "own", "--data.captions", "metadata.jsonl")


@pytest.mark.parametrize(
    ("prepare", "argv", "words"),
    [
        (gap, (*OWN, *LORA), ("2 of 12 pictures have no caption", "0.png, more/3.png", "a caption for each")),
        pytest.param(empty, (*OWN, *LORA), ("1 of 12 pictures have no caption", "4.png", "--conditioning-dropout-prob"), marks=pytest.mark.verify),
        pytest.param(lost, (*OWN, *LORA), ("1 of 13 captions have no picture", "99.png"), marks=pytest.mark.verify),
        pytest.param(twice, (*OWN, *LORA), ("0.png has two captions",), marks=pytest.mark.verify),
        pytest.param(broken, (*OWN, *LORA), ("metadata.jsonl cannot be read", "JSON"), marks=pytest.mark.verify),
        pytest.param(nothing, ("--data.path", ".", "--data.captions", "notes.xml"), ("no such file",), marks=pytest.mark.verify),
        pytest.param(channels, LORA, ("does not fit its net", "8 channels of latents"), marks=pytest.mark.verify),
        pytest.param(flow, LORA, ("of another family", "FlowMatchEulerDiscreteScheduler"), marks=pytest.mark.verify),
        pytest.param(family, LORA, ("of another family", "StableDiffusionXLPipeline"), marks=pytest.mark.verify),
        pytest.param(nothing, LORA, ("--model sd: no such folder", "StableDiffusionPipeline"), marks=pytest.mark.verify),
        pytest.param(nothing, ("--lora-rank", "4"), ("adapters are of a pretrained net", "--ema 0"), marks=pytest.mark.verify),
        pytest.param(nothing, ("--new.vae", "nowhere"), ("--new.vae nowhere: no such folder",), marks=pytest.mark.verify),
        pytest.param(nothing, ("--new.text", "nowhere"), ("--new.text nowhere", "no such folder"), marks=pytest.mark.verify),
    ],
)  # fmt: skip
def test_bad_input(prepare, argv: tuple[str, ...], words: tuple[str, ...], tmp_path: Path):
    (tmp_path / "own").mkdir()
    prepare(tmp_path)
    done = trainworthy("run", "diffusion/text", *SHORT, *argv, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not [w for w in words if w not in done.stderr], done.stderr


@pytest.mark.verify
@pytest.mark.parametrize("how", [("--lora-rank", "4", "--ema", "0"), ("--optim.lr", "1e-4")], ids=["lora", "whole"])
def test_a_model_learns_captions_beside_pictures(how: tuple[str, ...], model: Path, tmp_path: Path):
    """Its export loads with diffusers alone and samples; what is not trained is what it was."""
    (tmp_path / "own").mkdir()
    table(tmp_path / "own", coloured(tmp_path / "own", 40))
    done = trainworthy("run", "diffusion/text", *SHORT, *OWN, "--model", str(model), "--data.image-size", "16", *how,
                       "--train.batch-size", "8", "--train.epochs", "3", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    folder = run_folder(tmp_path)
    assert read(folder / "summary.json")["metric"] == "denoised"
    script = """
import sys, torch
from diffusers import DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained(sys.argv[1])
print(pipe(["a red square"] * 2, num_inference_steps=2).images[0].size, pipe.vae.config.scaling_factor)
assert not {"core", "recipes"} & sys.modules.keys()
"""
    env = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", script, str(folder / "export")], cwd=tmp_path, env=env, capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(16, 16) 1.7"
    assert (folder / "export" / "lora").is_dir() == ("--lora-rank" in how)
    was, now = (DiffusionPipeline.from_pretrained(f, safety_checker=None) for f in (model, folder / "export"))
    assert all(
        torch.equal(a, b) for a, b in zip(was.text_encoder.parameters(), now.text_encoder.parameters(), strict=True)
    )
    assert not all(torch.equal(a, b) for a, b in zip(was.unet.parameters(), now.unet.parameters(), strict=True))


def test_coloured_pictures_name_the_setting_of_another_autoencoder():
    """Before, the cached autoencoder of the digits was trained first and then "did not fit", without a next step."""
    with pytest.raises(UserError) as refused:
        stable._autoencoder("digits", 3)
    holds(str(refused.value), "reads grey pictures", "pictures of 3 channels", "--new.vae", "diffusion/latent")
