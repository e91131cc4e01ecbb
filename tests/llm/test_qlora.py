"""llm/sft on a base in four bits, through the real command, on a language model small enough for a test."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.llm.models import loading, quantized

from tests.helpers import language
from tests.helpers.commands import assert_same_run, final_weights, run_folder, same, trainworthy
from tests.helpers.plant import Plant
from tests.llm.planted_sft import FOUR, LOADED, MODEL, PLANTS, SFT

CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "intermediate_size": 128}  # rows of whole blocks
SMALL = ("--lora-rank", "4", "--optim.lr", "3e-3", "--data.held-out", "8", "--data.max-length", "256",
         "--train.batch-size", "4", "--run.no-tensorboard")  # fmt: skip
PLANTED = [p for p in PLANTS if p.gate in ("four-bit", "merged") or {*FOUR} & {*p.argv}]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.write(tmp_path_factory.mktemp("net"), **WIDE)


@pytest.fixture(scope="module")
def straight(net: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 steps, a checkpoint every eighth, the whole model merged."""
    cwd = tmp_path_factory.mktemp("straight")
    done = trainworthy("run", SFT, "--model", net, *SMALL, *FOUR, "--merge-adapters", "--gates.no-enabled", "--train.epochs", "0.02",
                       "--run.save-every", "0.007", cwd=cwd)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return run_folder(cwd)


# ------------------------------------------------------------------------------------------------------------------ gates
def test_no_gate_cries_wolf(net: Path, launch):
    done = launch("check", SFT, "--model", str(net), *SMALL, *FOUR, "--merge-adapters",
                  "--only", "init,wiring,schedule,dependency,evaluation,accumulation,resume,four-bit,padding,merged")  # fmt: skip
    assert done.returncode == 0, done.shown
    verdicts = {v["id"]: v for v in done.verdicts()}
    assert {v["verdict"] for v in verdicts.values()} == {"pass"}, done.shown
    assert verdicts["four-bit"]["evidence"]["share"] == 1
    assert verdicts["init"]["evidence"]["share"] == 1
    assert not done.stderr.strip(), done.stderr


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(
            p, id=p.id, marks=[pytest.mark.verify] * (p.id in ("qlora-merged-and-packed-again", "lora-merged-twice"))
        )
        for p in PLANTED
    ],
)
def test_caught_on_a_small_model(plant: Plant, net: Path, launch, fork):
    """The same plants as on SmolLM2 (tests/core/test_gates.py)."""
    fork(plant.hunk, recipe=plant.recipe)
    done = launch("check", "mine.py", "--model", str(net), *SMALL, *plant.argv, "--only", plant.gate)
    assert done.returncode == 3, done.shown
    (verdict,) = done.verdicts()
    assert plant.row in verdict["rows"].split()
    said = " ".join((verdict["measured"], verdict["needed"], verdict["remedy"])).lower()
    assert not [w for w in plant.words if w.lower() not in said], said


def test_another_model_under_the_same_names_is_caught(net: Path, launch, fork, tmp_path: Path):
    other = language.write(tmp_path / "other", seed=1, **WIDE)
    fork((LOADED, f"quantized.load({str(other)!r}, dtype, run.device)\n"), recipe=SFT)
    done = launch("check", "mine.py", "--model", str(net), *SMALL, *FOUR, "--only", "four-bit")
    assert done.returncode == 3, done.shown
    assert "scales are off" in done.verdicts()[0]["measured"]


def test_rows_that_bitsandbytes_misreads_on_a_cpu_are_refused(launch, tmp_path: Path):
    """On every processor: which kernels misread them, raise, or get them right differs from one to the next."""
    odd = str(language.write(tmp_path / "odd"))  # rows of 48
    done = launch("check", SFT, "--model", odd, *SMALL, *FOUR)
    assert done.returncode == 2, done.shown
    assert "rows of 48 weights" in done.stderr
    assert "scales of other rows" in done.stderr


def test_rows_with_the_scales_of_other_rows_would_be_caught(net: Path, launch, fork):
    """What such a kernel does, done to the scales themselves: a row of 64 is one block."""
    roll = "        state = layer.weight.quant_state\n        state.absmax.copy_(state.absmax.roll(1))\n"
    fork((MODEL, f"    for layer in quantized.packed(model).values():\n{roll}{MODEL}"), recipe=SFT)
    done = launch("check", "mine.py", "--model", str(net), *SMALL, *FOUR, "--only", "four-bit")
    assert done.returncode == 3, done.shown
    (verdict,) = done.verdicts()
    assert "scales are off" in verdict["measured"]
    assert "rows that are no multiple of 64" in verdict["remedy"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("draw", ["normal", "heavy", "sparse", "large"])
def test_what_bitsandbytes_rounds_is_within_the_bounds_and_a_scale_of_one_block_is_not(draw: str, dtype: torch.dtype):
    from bitsandbytes import functional

    g = torch.Generator().manual_seed(0)
    weights = {
        "normal": lambda: torch.randn(320, 192, generator=g) * 0.02,
        "heavy": lambda: torch.randn(320, 192, generator=g) ** 5,  # scales orders of magnitude apart
        "sparse": lambda: torch.randn(320, 192, generator=g) * (torch.rand(320, 192, generator=g) > 0.99),
        "large": lambda: torch.randn(64, 4096, generator=g) + 3,
    }[draw]().to(dtype)
    codes, state = functional.quantize_4bit(weights, quant_type="nf4", compress_statistics=True)
    value, scale = quantized.errors(functional.dequantize_4bit(codes, state), weights)
    assert value <= quantized.HALF_GAP
    assert scale <= 0
    if draw == "normal":
        state.absmax[7] += 32  # of 256 steps
        assert quantized.errors(functional.dequantize_4bit(codes, state), weights)[1] > 0.02


def test_the_widest_gaps_are_those_of_the_library():
    from bitsandbytes import functional

    for values, half in ((functional.get_4bit_type("nf4", device="cpu"), quantized.HALF_GAP),
                         (functional.create_dynamic_map(), quantized.HALF_STEP)):  # fmt: skip
        values = values.sort().values
        widest = values[1:].sub(values[:-1]).max().item()
        assert 0.98 * half < widest / 2 < half


# -------------------------------------------------------------------------------------------------- checkpoints and resuming
def test_adapters_alone_are_saved_and_a_resumed_run_is_the_straight_one(straight: Path, tmp_path: Path):
    assert all("lora_" in name for name in final_weights(straight))
    folder = tmp_path / "runs" / straight.parent.name / straight.name
    shutil.copytree(straight, folder, symlinks=True)
    (folder / "summary.json").unlink()  # as if it had been killed before its last checkpoint
    last = (straight / "checkpoints" / "sft" / "latest").resolve().name
    shutil.rmtree(folder / "checkpoints" / "sft" / last)
    shutil.rmtree(folder / "export")
    done = trainworthy("resume", folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resumed from step-" in done.stdout
    assert f"resumed from {last}" not in done.stdout
    assert_same_run(folder, straight)


# ------------------------------------------------------------------------------------------------------------------ export
def said(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 40)[None]).logits.float().log_softmax(-1)


def test_the_merged_model_is_the_trained_one_and_the_file_s_weights_would_not_be(net: Path, straight: Path):
    """The exported adapters on the base in four bits, as training had them; merged into what that stands for; and into the file."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trained = PeftModel.from_pretrained(quantized.load(str(net), torch.float32, CPU), straight / "export")
    merged = AutoModelForCausalLM.from_pretrained(straight / "export" / "merged", dtype=torch.float32)
    assert "quantization_config" not in json.loads((straight / "export" / "merged" / "config.json").read_text())
    with trained.disable_adapter():
        before = said(trained)
    due = said(trained)
    learnt = (due - before).norm()
    assert (said(merged) - due).norm() < 0.02 * learnt
    assert (said(loading.merged(str(net), straight / "export")) - due).norm() > 0.1 * learnt


# --------------------------------------------------------------------------------------------------------- the model itself
def test_an_evaluation_leaves_the_weights_of_a_cpu_with_bf16_as_they_are(net: Path, monkeypatch: pytest.MonkeyPatch):
    """There bitsandbytes would pack them anew, for a kernel without gradients."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    model = quantized.load(str(net), torch.bfloat16, CPU)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        model.eval()(ids)
    assert same(model.state_dict(), before)


def test_adapters_are_fp32_and_every_one_gets_a_gradient(net: Path):
    """Without peft's `prepare_model_for_kbit_training`."""
    model = loading.adapted(quantized.load(str(net), torch.bfloat16, CPU), loading.LoRA(lora_rank=4))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for n, p in trained.items():
        torch.nn.init.normal_(p) if "lora_B" in n else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.arange(3, 40)[None]).logits.float().logsumexp(-1).sum().backward()
    assert len(trained) == 28
    assert all(p.dtype == torch.float32 and p.grad.abs().max() > 0 for p in trained.values())


# -------------------------------------------------------------------------------------------------------------- bad settings
def test_without_adapters_there_is_nothing_to_train(net: Path, launch):
    done = launch("check", SFT, "--model", str(net), *FOUR, "--lora-rank", "0")
    assert done.returncode == 2, done.shown
    assert "--lora-rank 8" in done.stderr


def test_without_bitsandbytes_its_extra_is_named(net: Path, monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else found(name, *a)
    )
    with pytest.raises(UserError, match=r"trainworthy\[llm,qlora\]"):
        quantized.load(str(net), torch.float32, CPU)


def test_a_model_in_few_bits_already_is_refused(net: Path, tmp_path: Path):
    packed = tmp_path / "packed"
    shutil.copytree(net, packed)
    quantized.load(str(net), torch.float32, CPU).save_pretrained(packed)
    with pytest.raises(UserError, match="is already quantised"):
        quantized.load(str(packed), torch.float32, CPU)
