"""Without a network: models and data sets by hub name, by the real command."""

from pathlib import Path

import pytest
from trainworthy.core.base import network
from trainworthy.core.data import assets

Refused = type("ConnectError", (Exception,), {"__module__": "httpx"})  # as such clients have them: no OSError

CASES = [
    pytest.param(("llm/sft", "--preset", "full"), "1", "HuggingFaceTB/SmolLM2-360M-Instruct --local-dir", id="sft"),
    pytest.param(("llm/sft", "--data.path", "hub:trl-lib/tldr"), "0", "--repo-type dataset", id="sft-data",
                 marks=pytest.mark.verify),  # 40 s: its client tries five times
    pytest.param(("vision/classify", "--preset", "full"), "1", "--repo-type dataset", id="classify"),
    pytest.param(("diffusion/text", "--model", "someone/pipeline"), "0", "hf download someone/pipeline", id="text",
                 marks=pytest.mark.verify),
    pytest.param(("diffusion/latent", "--vae.path", "someone/vae"), "0", "hf download someone/vae", id="latent",
                 marks=pytest.mark.verify),
    pytest.param(("llm/pretrain", "--preset", "full"), "0", "hf download", id="pretrain", marks=pytest.mark.verify),
    pytest.param(("rl/grpo", "--model", "someone/model"), "0", "hf download someone/model", id="grpo",
                 marks=pytest.mark.verify),
    pytest.param(("vlm/instruct", "--encoder", "someone/clip"), "0", "hf download someone/clip", id="vlm",
                 marks=pytest.mark.verify),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "offline", "how"), CASES)
def test_a_hub_that_cannot_be_reached_is_one_message_with_the_way_round(
    argv: tuple[str, ...], offline: str, how: str, launch, tmp_path: Path
):
    """Told to stay offline, and with a hub that does not answer."""
    done = launch(
        "check", *argv, HF_HUB_OFFLINE=offline, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "hf")
    )
    assert done.returncode == 2, done.shown
    assert "Traceback" not in done.stderr
    message = done.stderr[done.stderr.index("error: ") :]  # behind what the hub's client logs of its retries
    assert "no network" in message
    assert how in message, message
    assert len(message.splitlines()) < 15, message
    assert not (tmp_path / "runs").exists()


def test_an_error_of_the_connection_is_known_behind_what_it_caused():
    error = RuntimeError("the library gave up")
    error.__cause__ = Refused("refused")
    assert network.unreachable(error)
    assert not network.unreachable(KeyError("loss"))
    assert not network.unreachable(FileNotFoundError(2, "No such file", "mine.csv"))


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
