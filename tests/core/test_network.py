"""Without a network: models and data sets by hub name, by the real command."""

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from trainworthy.core.base import network
from trainworthy.core.base.errors import UserError
from trainworthy.core.data import assets
from trainworthy.recipes.shared import hub

from tests.helpers import pictures, seeing

Refused = type("ConnectError", (Exception,), {"__module__": "httpx"})  # as such clients have them: no OSError

VERIFY = pytest.mark.verify
CASES = [
    pytest.param(("llm/sft", "--preset", "full"), "1", "HuggingFaceTB/SmolLM2-360M-Instruct --local-dir", id="sft"),
    pytest.param(("llm/sft", "--data.path", "hub:trl-lib/tldr"), "0", "--repo-type dataset", id="sft-data", marks=VERIFY),
    pytest.param(("llm/dpo", "--preset", "full"), "1", "then --model FOLDER", id="dpo", marks=VERIFY),
    pytest.param(("llm/reward", "--preset", "full"), "1", "then --model FOLDER", id="reward", marks=VERIFY),
    pytest.param(("llm/pretrain", "--preset", "full"), "0", "hf download", id="pretrain", marks=VERIFY),
    pytest.param(("vision/classify", "--preset", "full"), "1", "--repo-type dataset", id="classify"),
    pytest.param(("vision/classify", "--preset", "full", "--data.path", "{folder}"), "1", "put the file into", id="classify-weights",
                 marks=VERIFY),
    pytest.param(("vision/detect", "--preset", "full", "--data.path", "{coco}"), "1", "put the file into", id="detect"),
    pytest.param(("vision/segment", "--preset", "full", "--data.path", "{masks}"), "1", "put the file into", id="segment", marks=VERIFY),
    pytest.param(("vision/segment", "--preset", "full", "--data.path", "{masks}", "--model", "someone/segformer"), "1",
                 "hf download someone/segformer --local-dir FOLDER, then --model FOLDER", id="segment-hub", marks=VERIFY),
    pytest.param(("diffusion/flow", "--preset", "full"), "1", "then --data.path hub:FOLDER", id="flow", marks=VERIFY),
    pytest.param(("diffusion/pixel", "--preset", "full"), "1", "then --data.path hub:FOLDER", id="pixel", marks=VERIFY),
    pytest.param(("diffusion/latent", "--preset", "full"), "1", "then --data.path hub:FOLDER", id="latent-data", marks=VERIFY),
    pytest.param(("diffusion/latent", "--vae.path", "someone/vae"), "1", "hf download someone/vae --local-dir FOLDER, then --vae.path FOLDER",
                 id="latent"),
    pytest.param(("diffusion/text", "--preset", "full", "--data.path", "{folder}"), "1",
                 "hf download stable-diffusion-v1-5/stable-diffusion-v1-5 --local-dir FOLDER, then --model FOLDER", id="text", marks=VERIFY),
    pytest.param(("diffusion/text", "--model", "someone/pipeline"), "0", "hf download someone/pipeline", id="text-0", marks=VERIFY),
    pytest.param(("diffusion/text", "--new.vae", "someone/vae"), "1", "hf download someone/vae --local-dir FOLDER, then --new.vae FOLDER",
                 id="text-vae", marks=VERIFY),
    pytest.param(("diffusion/text", "--new.text", "someone/clip"), "1",
                 "hf download someone/clip --local-dir FOLDER, then --new.text FOLDER", id="text-encoder", marks=VERIFY),
    pytest.param(("llm/pretrain", "--data.tokenizer", "someone/tok"), "1", "then --data.tokenizer FOLDER", id="tokenizer", marks=VERIFY),
    pytest.param(("vlm/instruct", "--language", "someone/lm"), "1", "then --language FOLDER", id="vlm-language", marks=VERIFY),
    pytest.param(("vlm/instruct", "--model", "someone/vlm"), "1", "then --model FOLDER", id="vlm-model", marks=VERIFY),
    pytest.param(("distill/logits", "--preset", "full"), "1", "then --data.path hub:FOLDER", id="logits", marks=VERIFY),
    pytest.param(("distill/logits", "--preset", "full", "--data.path", "{folder}"), "1", "put the file into", id="logits-weights",
                 marks=VERIFY),
    pytest.param(("distill/whisper", "--preset", "full"), "1", "openai/whisper-base.en --local-dir FOLDER, then --data.teacher", id="whisper",
                 marks=VERIFY),
    pytest.param(("distill/compress", "--preset", "full"), "1", "openai/whisper-medium.en --local-dir FOLDER, then --data.teacher",
                 id="compress", marks=VERIFY),
    pytest.param(("rl/grpo", "--preset", "full"), "1", "then --model FOLDER", id="grpo"),
    pytest.param(("rl/grpo", "--model", "someone/model"), "0", "hf download someone/model", id="grpo-0", marks=VERIFY),
    pytest.param(("rl/rlhf", "--preset", "full", "--model", "someone/model"), "1", "then --model FOLDER", id="rlhf", marks=VERIFY),
    pytest.param(("vlm/instruct", "--preset", "full", "--data.path", "{questions}"), "1", "then --encoder FOLDER", id="vlm"),
    pytest.param(("vlm/instruct", "--encoder", "someone/clip"), "0", "hf download someone/clip", id="vlm-0", marks=VERIFY),
]  # fmt: skip


def write_questions(home: Path) -> Path:
    home.mkdir()
    return seeing.write(home) / "data"


WRITE: dict[str, Callable[[Path], Path]] = {
    "{folder}": lambda home: pictures.write_folder(home, per_class=12, held_out=3),
    "{masks}": pictures.write_masks,
    "{coco}": pictures.write_coco,
    "{questions}": write_questions,
}


@pytest.mark.parametrize(("argv", "offline", "how"), CASES)
def test_a_hub_that_cannot_be_reached_is_one_message_with_the_way_round(
    argv: tuple[str, ...], offline: str, how: str, launch, tmp_path: Path
):
    """Told to stay offline, and with a hub that does not answer. Every preset that names the hub, with data of one's own where the
    data would come first."""
    argv = tuple(str(WRITE[word](tmp_path / word[1:-1])) if word in WRITE else word for word in argv)
    closed = "http://127.0.0.1:9"
    done = launch("check", *argv, HF_HUB_OFFLINE=offline, HF_ENDPOINT=closed, HF_HOME=str(tmp_path / "hf"),
                  TORCH_HOME=str(tmp_path / "torch"), http_proxy=closed, https_proxy=closed, code=2)  # fmt: skip
    message = done.stderr[done.stderr.index("error: ") :]  # behind what the hub's client logs of its retries
    assert "no network" in message
    assert how in message, message
    assert len(message.splitlines()) < 15, message
    assert not (tmp_path / "runs").exists()


NOT_FROM_THE_HUB = {
    "vision/segment": "FOLDER/train/images and FOLDER/train/masks",
    "vision/detect": "FOLDER/annotations/instances_train*.json",
    "vlm/instruct": "a folder with train.jsonl",
}


@pytest.mark.verify
@pytest.mark.parametrize("recipe", NOT_FROM_THE_HUB)
def test_a_recipe_that_reads_no_data_from_the_hub_says_what_it_reads(recipe: str, launch, tmp_path: Path):
    done = launch(
        "check", recipe, "--data.path", "hub:someone/set", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"), code=2
    )
    assert NOT_FROM_THE_HUB[recipe] in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_error_of_the_connection_is_known_behind_what_it_caused():
    error = RuntimeError("the library gave up")
    error.__cause__ = Refused("refused")
    assert network.unreachable(error)
    assert not network.unreachable(KeyError("loss"))
    assert not network.unreachable(FileNotFoundError(2, "No such file", "mine.csv"))


def test_a_hub_that_takes_connections_and_says_nothing_is_given_up_within_seconds(monkeypatch: pytest.MonkeyPatch):
    """huggingface_hub's own client waits for ever. Its libraries are offline then: they read their caches and try nothing again."""
    constants = pytest.importorskip("huggingface_hub.constants")
    config = pytest.importorskip("datasets.config")
    before = os.environ.get("HF_HUB_OFFLINE", "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        for module in (constants, config):
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", before)
        monkeypatch.setattr(network, "ANSWER", 0.3)
        network.hub_silent.cache_clear()
        started = time.monotonic()
        try:
            with pytest.raises(UserError, match="no answer within"):
                hub.allowed("someone/model", "--model")
            assert constants.HF_HUB_OFFLINE
            assert config.HF_HUB_OFFLINE
            assert time.monotonic() - started < 5
        finally:
            network.hub_silent.cache_clear()
            hub.allowed.cache_clear()


def test_the_settings_that_name_the_hub_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    settings = {
        "model": "owner/name",
        "data": {"path": "hub:owner/set:small", "judge": "runs/a"},
        "optim": {"name": "adamw"},
    }
    said = str(network.refusal("the recipe", ConnectionError("no route"), settings))
    assert "--data.path hub:owner/set:small, --model owner/name" in said.splitlines()[0]
    assert "hf download --repo-type dataset owner/set --local-dir FOLDER, then --data.path hub:FOLDER" in said
    assert "runs/a" not in said


def test_built_assets_depend_on_code_and_not_on_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRAINWORTHY_CACHE", str(tmp_path))
    source = tmp_path / "recipe.py"

    def folder(text: str) -> Path:
        source.write_text(text)
        return assets.built("toy", {}, lambda where: (where / "made").write_text("x"), sources=[source])

    plain = folder("def f(x):\n    return x + 1\n")
    assert folder('"""Words."""\ndef f(x):\n    """More words."""\n    return x + 1  # and more\n') == plain
    assert folder("def f(x):\n    return x + 2\n") != plain


def test_an_asset_that_takes_long_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    """Both the process that builds it and the one that waits for it print why."""
    monkeypatch.setenv("TRAINWORTHY_CACHE", str(tmp_path))
    monkeypatch.setattr(assets, "EVERY", 0.05)
    assets.built("toy", {}, lambda where: time.sleep(0.3))
    assert "building toy: 0 s so far" in capfd.readouterr().err
    lock = tmp_path / "a.lock"
    with assets._alone(lock, "toy"):
        waiter = threading.Thread(target=lambda: assets._alone(lock, "toy").__enter__(), daemon=True)
        waiter.start()
        waiter.join(0.3)
    assert "waiting: another process builds toy" in capfd.readouterr().err
