"""llm/reward through the real command, on a language model small enough for a test: loss, export, calibration, bad input."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from trainworthy.recipes.llm.data import pairs
from trainworthy.recipes.llm.evaluation import calibration
from trainworthy.recipes.llm.gates import reward
from trainworthy.recipes.llm.models import loading

from tests.helpers import language
from tests.helpers.commands import environment, losses, read, run_folder, trainworthy
from tests.llm.test_sft import written

SMALL = (
    "--lora-rank",
    "4",
    "--optim.lr",
    "3e-3",
    "--data.held-out",
    "8",
    "--data.max-length",
    "256",
    "--data.max-bad",
    "0.02",
)
QUICK = (*SMALL, "--gates.no-enabled", "--run.no-tensorboard", "--train.epochs", "0.012")  # 13 steps of 4 pairs
ASKED = [("getcwd", "Return the directory."), ("walk", "Generate the file names in a tree, top-down or bottom-up.")]
OWN = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
net, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
batch = tokenizer.pad({"input_ids": json.loads(sys.argv[2])}, return_tensors="pt")
with torch.no_grad():
    print(json.dumps(net.eval()(**batch).logits.squeeze(-1).tolist()))
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.write(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="module")
def straight(net: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("straight")
    done = trainworthy("run", "llm/reward", "--model", net, *QUICK, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return run_folder(cwd)


def test_what_a_run_leaves(straight: Path):
    assert losses(straight)[0] == pytest.approx(0.693147, abs=1e-6)
    assert len({round(value, 3) for value in losses(straight)}) > 8  # it trains; random weights learn nothing general
    summary = read(straight / "summary.json")
    assert {"accuracy", "nll", "ece", "margin", "follows_length"} <= summary["metrics"].keys()
    assert {"the answer with more tokens", "this model, input zeroed"} <= summary["baselines"].keys()
    assert "length" in {m["id"] for m in read(straight / "monitors.json")["monitors"]}
    assert (straight / "plots" / "calibration-on-held-out-pairs.png").read_bytes().startswith(b"\x89PNG")
    assert "Expected calibration error" in (straight / "report.html").read_text()


def test_the_export_gives_the_same_rewards_in_a_process_without_this_project(net: Path, straight: Path):
    """Answers of different lengths in one padded batch there, each alone here, from the weights that training saved."""
    chat = pairs.Chat(loading.scoring_tokenizer(str(net)), "You say what a Python function does.")
    model = loading.adapted(loading.scorer(str(net), torch.float32), loading.LoRA(lora_rank=4), head="score").eval()
    trained = load_file(straight / "checkpoints" / "reward" / "latest" / "model.safetensors")
    assert "base_model.model.score.modules_to_save.default.weight" in trained
    assert not model.load_state_dict(trained, strict=False).unexpected_keys
    with torch.no_grad():
        due = [reward.alone(model, chat, *asked, torch.device("cpu")).item() for asked in ASKED]
    ids = [chat.ask(chat.turns(prompt)) + chat.answer(answer) for prompt, answer in ASKED]
    command = [sys.executable, "-c", OWN, str(straight / "export"), json.dumps(ids)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == pytest.approx(due, abs=1e-6)
    assert abs(due[0] - due[1]) > 1e-4


MORE = {
    "lora": (),
    "centered": ("--center-rewards-coefficient", "0.1"),
    "whole": ("--lora-rank", "0"),
    "adapters": ("--no-merge-adapters",),
}


@pytest.mark.parametrize(
    "more", [pytest.param(v, id=k, marks=[pytest.mark.verify] * (k != "centered")) for k, v in MORE.items()]
)
def test_the_loss_is_the_formula_s(more: tuple[str, ...], net: Path, launch):
    """Bradley and Terry's, written apart from TRL's, of rewards that are read alone, at the last token, without padding."""
    only = "schema,data,leakage,initial-loss,init,wiring,schedule,dependency,accumulation"
    only += ",lengths,template,place,bradley-terry,exported"
    done = launch("check", "llm/reward", "--model", str(net), *SMALL, *more, "--only", only)
    assert done.returncode == 0, done.shown
    found = {v["id"]: v for v in done.verdicts()}
    assert max(found["bradley-terry"]["evidence"]["gaps"].values()) < 1e-6, done.shown
    assert max(found["exported"]["evidence"]["gaps"].values()) < 1e-6, done.shown


def test_the_pad_is_never_the_end_of_an_answer(net: Path):
    assert loading.tokenizer(str(net)).pad_token_id == loading.tokenizer(str(net)).eos_token_id
    assert loading.scoring_tokenizer(str(net)).pad_token_id not in (None, loading.tokenizer(str(net)).eos_token_id)


# ----------------------------------------------------------------------------------------------------------- calibration
def drawn(scale: float, n: int = 20_000) -> Tensor:
    """Margins of a judge whose true log-odds are `margin / scale`."""
    generator = torch.Generator().manual_seed(0)
    odds = 1.5 * torch.randn(n, generator=generator)
    right = torch.rand(n, generator=generator) < odds.abs().sigmoid()
    return scale * odds.abs() * (2 * right.double() - 1)


def test_calibration():
    assert calibration.error(drawn(1.0)) < 0.015
    assert calibration.error(drawn(4.0)) > 0.1  # four times as sure
    sure = calibration.bins(drawn(4.0))[-1]
    assert sure[0] > sure[1]
    assert calibration.preferred(torch.tensor([1.0, 0.0, -1.0, 2.0])) == pytest.approx(0.625)
    assert calibration.error(torch.zeros(4)) == 0.0  # untrained: half sure, half right


def test_a_reward_that_counts_tokens_is_told():
    """With and without a preference for length in the data, and beside a reward that knows what is preferred."""
    generator = torch.Generator().manual_seed(0)
    sizes = (12 + 6 * torch.randn(200, 2, generator=generator).abs()).round()
    noise = torch.randn(200, 2, generator=generator)
    wanted = torch.tensor([1.0, -1.0])

    def judged(rewards: Tensor, sizes: Tensor) -> bool:
        history = [{"val/follows_length": calibration.follows(rewards, sizes)}]
        return reward.follows_length.check(history).ok

    longer = sizes.sort(1, descending=True).values  # what is preferred is longer in every pair
    assert calibration.follows(0.3 * sizes, sizes) == pytest.approx(1.0)
    for n in (sizes, longer):
        assert not judged(0.3 * n + 0.5 * noise, n)
        assert not judged(-0.3 * n + 0.5 * noise, n)
        assert not judged(3 * (n - 14).tanh() + 0.5 * noise, n)  # saturates
        assert judged(wanted + noise, n)
        assert judged(wanted + 0.05 * n + noise, n)  # a little
    assert judged(torch.zeros(200, 2), sizes)


# ------------------------------------------------------------------------------------------------------------- bad input
BAD = {
    "pairs": ([{"prompt": "a", "completion": "b"}], ("chosen: missing", "prompts with one completion (SFT)")),
    "empty": ([{"prompt": "a", "chosen": "b", "rejected": " "}], ("rejected is empty",)),
    "same": (
        [{"prompt": f"n {i}", "chosen": "b", "rejected": "b"} for i in range(80)],
        ("one answer twice", "one column"),
    ),
}


@pytest.mark.parametrize(
    ("rows", "words"), [pytest.param(*v, id=k, marks=[pytest.mark.verify] * (k != "same")) for k, v in BAD.items()]
)
def test_rows_that_prefer_nothing(rows: list[dict], words: tuple[str, ...], net: Path, launch, tmp_path: Path):
    path = str(written(tmp_path / "rows.jsonl", rows))
    done = launch("check", "llm/reward", "--model", str(net), "--data.path", path, "--data.max-length", "200")
    assert done.returncode == 2, done.shown
    assert "Traceback" not in done.stderr
    assert not [w for w in words if w not in done.stderr], done.stderr


def test_margins_of_the_pairs_own_belong_to_the_first_loss():
    """TRL's column `margin`. One margin for all pairs shifts every difference, and is no margin of a pair."""
    margins = torch.tensor([0.0, 1.0, 3.0])
    due = torch.nn.functional.softplus(margins).mean().item()
    assert reward.first_loss({"inputs": {"margin": margins}}) == pytest.approx(due)
    for inputs in ({}, {"margin": torch.ones(3)}):
        assert reward.first_loss({"inputs": inputs}) == pytest.approx(math.log(2))
        assert reward.own_margins({"inputs": inputs}) is None
