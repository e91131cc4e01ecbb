"""trainworthy plan: its estimates are the peaks of real steps; what cannot fit is refused before it begins."""

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.commands import plan
from trainworthy.core.recipe import loading, registry
from trainworthy.core.session import estimate, spread
from trainworthy.core.session.simulation import simulated

from tests.conftest import ROOT
from tests.helpers.commands import holds, trainworthy

FEW = {
    "vision/classify": ["--train.batch-size", "32", "--loader.workers", "0"],
    "llm/pretrain": ["--train.batch-size", "8", "--train.accumulate", "4"],
    "rl/ppo": ["--num-steps", "32", "--train.batch-size", "64", "--update-epochs", "2"],
}


def parsed(name: str, *words: str):
    recipe = loading.load(name)
    return recipe, config.parse(recipe.module, list(words), prog=name)[0]


@pytest.mark.parametrize("name", FEW)
def test_the_estimate_is_the_peak_of_real_steps(name):
    from bench.plan import measured

    recipe, cfg = parsed(name, *FEW[name])
    (found,) = estimate.estimates(recipe, cfg)
    assert found.missing == []
    assert [found.training] == pytest.approx(measured(recipe, cfg), rel=0.15)
    kinds = found.weights + found.average + found.frozen + found.gradients + found.optimizer + found.activations
    assert kinds == found.training > 3 * found.weights
    assert found.optimizer >= 2 * found.gradients * 0.99  # AdamW


@pytest.mark.verify
@pytest.mark.parametrize("name", ["diffusion/latent", "diffusion/text", "rl/sac", "vision/detect"])
def test_the_estimate_is_the_peak_of_real_steps_in_each_stage(name, tmp_path):
    """These copy a model to the device `meta`, or read it by diffusers."""
    words = [name, "--stand-in", str(tmp_path / "models"), "--json", str(tmp_path / "found")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "plan.py"), *words], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    for row in json.loads((tmp_path / "found").read_text()):
        assert row["estimated"] == pytest.approx(row["measured"], rel=0.15), row


def test_a_stand_in_for_weights_has_the_shape_of_a_copy_on_meta():
    """Detectors ask such a copy for the sizes of their feature maps."""
    with simulated():
        net = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        ghost = copy.deepcopy(net).to("meta")
        assert ghost(torch.zeros(1, 3, 32, 20, device="meta")).shape == (1, 8, 16, 10)
        assert net.weight.device.type == "cpu"


def test_what_does_not_fit_gets_settings_that_help(tmp_path):
    """A batch of 4096 pictures: its activations do not fit into half of what they need, in micro-batches they do."""
    words = ["--train.batch-size", "4096", "--widths", "64", "128", "256", "--loader.workers", "0", "--no-augment"]
    recipe, cfg = parsed("vision/classify", *words)
    (whole,) = estimate.estimates(recipe, cfg)
    found = plan.plan(recipe, cfg, memory=(whole.training / 2 + 1e9) / 1e9, samples=10_000)
    (stage,) = found["stages"]
    assert stage["fits"] == "no"
    assert stage["steps"] == 30 * 10_000 // 4096 + 1
    first = next(c for c in stage["change"] if c["setting"].startswith("--train.accumulate"))
    assert first["fits"] != "no"
    assert first["needs"] < whole.training / 1.8
    assert not any("lora" in c["setting"] for c in stage["change"])  # this recipe has no such setting


@pytest.mark.verify
def test_the_command_prints_each_kind_as_text_and_json(tmp_path, capsys):
    words = [
        "plan",
        "vision/classify",
        "--preset",
        "full",
        "--device",
        "A100",
        "--samples",
        "75750",
        "--gates.jobs",
        "2",
        "--json",
    ]
    done = trainworthy(*words, cwd=tmp_path, code=0)
    assert not list(tmp_path.iterdir())
    found = json.loads(done.stdout)
    (stage,) = found["stages"]
    assert stage["parameters"] == pytest.approx(23.5e6, rel=0.01)  # ResNet-50 with ten classes
    assert stage["micro_batch"] == 256
    # 4.1 GFLOP-MAC a picture (He 2016), two operations each, forward and twice that backward
    assert stage["flops"] == pytest.approx(3 * 2 * 4.1e9 * 256, rel=0.1)
    plan.show(found)
    text = capsys.readouterr().out
    holds(text, "optimiser",
        "activations",
        "gates",
        "fits into 80 GB",
        "5,918 steps",
        "A100, 40%",
        "in each of 2 processes (--gates.jobs)",
        "not on this machine")  # fmt: skip


# ----------------------------------------------------------------------------------------------------- several processes
SMALL = (
    "--hidden-size",
    "64",
    "--num-hidden-layers",
    "4",
    "--data.context",
    "64",
    "--data.stride",
    "32",
    "--train.accumulate",
    "2",
)


def test_processes_share_the_operations_and_with_shard_the_memory():
    recipe, cfg = parsed("llm/pretrain", *SMALL, "--train.batch-size", "16")
    (one,), (two,) = (estimate.estimates(recipe, cfg, processes=n) for n in (1, 2))
    assert two.flops == pytest.approx(one.flops, rel=0.01)  # of the whole step, whoever computes it
    assert (one.micro_batch, two.micro_batch, one.tokens) == (8, 4, 64)
    assert two.gradients == 2 * one.gradients  # DDP's buckets
    recipe, cfg = parsed("llm/pretrain", *SMALL, "--train.batch-size", "16", "--shard", "full")
    (whole,) = estimate.estimates(recipe, cfg, processes=2)
    assert whole.gradients == one.gradients
    blocks = whole.weights - whole.outside
    assert whole.unit == pytest.approx(
        blocks / 4, rel=0.01
    )  # four equal blocks; embedding, head and last norm are outside
    cut = spread.cut(whole, 2, "full")
    assert [getattr(cut, k) for k in ("weights", "gradients", "optimizer")] == [
        getattr(whole, k) // 2 for k in ("weights", "gradients", "optimizer")
    ]
    held = (whole.weights + whole.gradients + whole.optimizer) // 2 + whole.computing
    assert (
        cut.training == held + (whole.outside + 2 * whole.unit) + whole.gradients
    )  # two micro-batches: whole gradients wait
    assert spread.cut(replace(whole, micro_batches=1), 2, "full").training == held + 2 * (
        whole.outside + 2 * whole.unit
    )
    assert spread.exchanged(whole, 2, "full") == (2 * 2 * whole.weights + 4 * whole.trained) / 2
    assert spread.exchanged(whole, 2, "grad") == (2 * whole.weights + 4 * whole.trained) / 2
    assert spread.exchanged(whole, 2, "none") == 4 * whole.trained


def test_activations_count_at_their_peak_if_gradients_are_in_shards():
    """Short rows and wide blocks: gradients outgrow the activations, so the whole model's peak is after the backward pass, when no
    activation is left. A shard's peak is before it."""
    wide = ("--hidden-size", "256", "--num-hidden-layers", "6", "--data.context", "16", "--data.stride", "8")
    recipe, cfg = parsed("llm/pretrain", *wide, "--train.batch-size", "8", "--shard", "full")
    (one,) = estimate.estimates(recipe, cfg, processes=8)
    kept = 6 * 16 * 256 * 4  # at least the input of each block, of one row
    assert one.activations < one.gradients / 4
    assert one.computing > max(kept, 1.2 * one.activations)
    cut = spread.cut(one, 8, "full")
    assert cut.training > (one.weights + one.gradients + one.optimizer) // 8 + one.computing


def test_an_evaluation_in_shards_holds_no_copies_of_all_weights_in_bf16():
    """Autocast keeps one of each weight of a whole model; shards are gathered in bf16."""
    recipe, cfg = parsed("llm/pretrain", *SMALL, "--train.batch-size", "16", "--shard", "full", "--train.precision", "bf16",
                         "--train.eval-batch-size", "1")  # fmt: skip
    (one,) = estimate.estimates(recipe, cfg, processes=2)
    assert one.halves > 0
    held = one.weights + one.optimizer
    assert one.evaluation > held + one.halves
    cut = spread.cut(one, 2, "full")
    assert cut.evaluation == one.evaluation - one.halves - held + held // 2 + one.outside + one.unit


def test_weights_in_16_bits_are_not_halved_again():
    """A frozen base under adapters: it is gathered as it is."""
    model = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)).bfloat16(), nn.Sequential(nn.Linear(4, 4))])
    stage = SimpleNamespace(model=model, shard_units=lambda net: [*net], data={"train": []})
    run = SimpleNamespace(cfg=SimpleNamespace(run=SimpleNamespace(shard="full")), precision="bf16")
    assert estimate._units(stage, run)["halves"] == 20 * 4 // 2


def test_a_recipe_that_cannot_be_sharded_is_not_planned_so():
    recipe, cfg = parsed("rl/ppo", *FEW["rl/ppo"], "--shard", "full")
    with pytest.raises(UserError, match="rl/ppo cannot be sharded"):
        estimate.estimates(recipe, cfg, processes=2)


# --------------------------------------------------------------------------------------------------------------- on paper
PAPER = re.findall(r"^trainworthy (plan .*?[^\\])$", (ROOT / "docs" / "scale.md").read_text(), re.M | re.S)
PUBLISHED = 24_000
"""Tokens a second that TinyLlama reached on each A100, at 56% of its data sheet (github.com/jzhang38/TinyLlama)."""


def words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


@pytest.mark.parametrize("command", PAPER)
def test_a_plan_of_the_page_is_understood(command: str, monkeypatch):
    monkeypatch.chdir(ROOT)
    rest, own = plan.take_options(words(command)[1:])
    cfg, _ = config.parse(loading.load(rest[0]).module, rest[1:], prog="trainworthy plan")
    assert own["device"] in plan.DEVICES
    model = getattr(cfg, "model", "")
    assert not model or (Path(model) / "config.json").is_file()


def test_the_page_has_a_plan():
    assert len(PAPER) >= 2


@pytest.mark.verify
def test_the_plan_of_a_published_run_is_near_its_throughput():
    (command,) = (c for c in PAPER if "tinyllama" in c)
    done = trainworthy(*words(command), "--json", cwd=ROOT, code=0)
    found = json.loads(done.stdout)
    (stage,) = found["stages"]
    assert stage["parameters"] == pytest.approx(1.1e9, rel=0.01)
    assert stage["tokens_per_second"] / found["processes"] == pytest.approx(PUBLISHED, rel=0.15)
    assert stage["fits_without_gates"] != "no"


def test_a_model_larger_than_the_device_is_refused_before_anything_runs(tmp_path, monkeypatch):
    from accelerate import Accelerator
    from trainworthy.core.base.errors import UserError
    from trainworthy.core.session import memory_check, stages

    recipe, cfg = parsed("vision/classify")
    accelerator = Accelerator(cpu=True)
    built = [(spec.name, stage) for spec, stage in stages.untrained(recipe, cfg, accelerator)]
    size = sum(p.numel() * 4 for p in built[0][1].model.parameters())
    assert memory_check.at_least(built[0][1]) == 4 * size  # weights, gradients, two moments
    memory_check.check(recipe, cfg, accelerator, built)
    monkeypatch.setattr(memory_check, "memory", lambda device: 4 * size - 1)
    with pytest.raises(UserError, match="cannot fit into the memory of cpu"):
        memory_check.check(recipe, cfg, accelerator, built)
    cfg.run.check_memory = False
    memory_check.check(recipe, cfg, accelerator, built)


def test_full_on_a_cpu_is_refused_once_all_else_is_there(tmp_path):
    from tests.helpers import pictures

    pictures.write_folder(tmp_path / "data", per_class=8, held_out=4)
    words = ["vision/classify", "--preset", "full", "--model", "small", "--weights", "none", "--data.path", str(tmp_path / "data"),
             "--optim.layer-decay", "1", "--loader.workers", "0"]  # fmt: skip
    done = trainworthy("run", *words, cwd=tmp_path, code=2)
    assert "--run.no-check-memory starts here" in done.stderr + done.stdout
    assert not (tmp_path / "runs").exists()


def test_full_on_a_cpu_says_so_before_it_begins(tmp_path):
    done = trainworthy("run", "vision/classify", "--preset", "full", "--data.path", "none", cwd=tmp_path, code=2)
    holds(done.stdout, "made for an accelerator", "trainworthy run vision/classify (the preset tiny")
    assert "there is no data folder none" in done.stderr + done.stdout


@pytest.mark.parametrize("words", [(), ("--alone.epochs", "0", "--distilled.accumulate", "2")], ids=["both", "second"])
def test_a_stage_without_own_batch_size_is_planned_with_that_of_train(words, tmp_path):
    """Stages of distill/logits leave `batch_size` out; a stage of 0 epochs has no line and lends its settings to no other."""
    words = ["--train.batch-size", "32", *words, "--memory", "0.001", "--json"]
    found = json.loads(trainworthy("plan", "distill/logits", *words, cwd=tmp_path, code=0).stdout)["stages"]
    assert [row["batch"] for row in found] == [32] * (1 if "0" in words else 2)
    assert found[-1]["micro_batch"] == (16 if "0" in words else 32)
    assert found[-1]["gate_flops"] > 0


@pytest.mark.verify
def test_latents_are_planned_from_one_picture(monkeypatch):
    """The plan of diffusion/latent took six minutes: it simulated the encoder on every picture of the data set."""
    from trainworthy.recipes.diffusion.models import pipeline

    sizes, middle = [], pipeline.middle
    monkeypatch.setattr(pipeline, "middle", lambda vae, images: sizes.append(len(images)) or middle(vae, images))
    recipe, cfg = parsed("diffusion/latent")
    assert len(estimate.estimates(recipe, cfg)) == 2
    assert 1 in sizes
    assert sum(sizes) < 1000


SMALL_PRESETS = {
    "llm/pretrain": 1_000_000,
    "diffusion/pixel": 75_750,
    "diffusion/flow": 75_750,
    "diffusion/latent": 75_750,
}
"""Rows of 512 tokens in TinyStories, training pictures of Food-101."""


def test_small_is_a_preset_of_its_own():
    for name in SMALL_PRESETS:
        recipe, small = parsed(name, "--preset", "small")
        assert [
            config.to_dict(small) == config.to_dict(getattr(recipe.module, other)()) for other in ("tiny", "full")
        ] == [
            False,
            False,
        ]
    with pytest.raises(UserError, match="preset 'small'"):
        parsed("vision/classify", "--preset", "small")


@pytest.mark.verify
@pytest.mark.parametrize("name", SMALL_PRESETS)
def test_small_is_planned_as_less_than_an_hour_on_24_gb(name, tmp_path):
    words = ["--preset", "small", "--device", "RTX4090", "--samples", str(SMALL_PRESETS[name]), "--json"]
    stages = json.loads(trainworthy("plan", name, *words, cwd=tmp_path, code=0).stdout)["stages"]
    assert [row["fits"] for row in stages] == ["yes"] * len(stages)
    assert sum(row["seconds"] for row in stages) < 3600


# ------------------------------------------------------------------------------------------------------- what is kept
KEPT = """
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from trainworthy.core.base import planning
from trainworthy.core.data import assets
from trainworthy.core.session.simulation import simulated


def build(folder: Path) -> None:
    assert not planning.active
    assets.built("inner", {}, lambda inner: (inner / "x").write_text(""))
    assert not planning.active
    save_file({"x": nn.Linear(3, 2)(torch.ones(1, 3)).detach()}, folder / "x.safetensors")


def fail(folder: Path) -> None:
    raise ZeroDivisionError


with simulated():
    made = assets.built("kept", {}, build)
    assert planning.active
    assert isinstance(nn.Linear(3, 2).weight.data, FakeTensor)
    try:
        assets.built("failed", {}, fail)
    except ZeroDivisionError:
        print("failed")
    assert planning.active
    assert isinstance(nn.Linear(3, 2)(torch.ones(1, 3)), FakeTensor)
assert not planning.active
print(float(load_file(made / "x.safetensors")["x"].abs().min()) > 0)
"""


def test_what_a_recipe_computes_once_and_keeps_is_not_simulated(tmp_path):
    """A plan of distill/compress kept transcripts of a teacher without weights, and every later run read them."""
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | {"TRAINWORTHY_CACHE": str(tmp_path)})  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["failed", "True"]), done.stderr


@pytest.mark.verify
@pytest.mark.parametrize("name", [one.id for one in registry.recipes()])
def test_every_recipe_is_planned_from_its_packaged_data(name, tmp_path):
    found = json.loads(trainworthy("plan", name, "--json", cwd=tmp_path, code=0).stdout)
    assert all(row["training"] > row["weights"] > 0 and not row["missing"] for row in found["stages"])
