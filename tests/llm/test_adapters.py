"""Adapters and attention by settings, through the real command, on a language model small enough for a test."""

from pathlib import Path

import pytest
import torch
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.shared import language_models
from trainworthy.recipes.shared.language_models import LoRA

from tests.helpers import language
from tests.helpers.commands import read

SHORT = ("--optim.lr", "3e-3", "--data.held-out", "8", "--data.max-length", "256", "--data.max-bad", "0.02", "--gates.no-enabled",
         "--run.no-tensorboard", "--max-steps", "2")  # fmt: skip
CHOSEN = (
    "--lora-rank",
    "4",
    "--lora-alpha",
    "12",
    "--lora-target-modules",
    "q_proj",
    "down_proj",
    "--use-dora",
    "--use-rslora",
)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.write(tmp_path_factory.mktemp("net"))


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("llm/sft", ("--lora-dropout", "0.1", "--attention", "eager")),
        pytest.param("llm/dpo", (), marks=pytest.mark.verify),
        pytest.param("llm/reward", ("--lora-dropout", "0.1", "--no-merge-adapters"), marks=pytest.mark.verify),
    ],
)
def test_the_settings_reach_the_exported_adapter(recipe: str, more: tuple[str, ...], net: Path, launch):
    done = launch("run", recipe, "--model", str(net), *SHORT, *CHOSEN, *more)
    assert done.returncode == 0, done.shown
    told = read(done.folder() / "export" / "adapter_config.json")
    assert (told["r"], told["lora_alpha"]) == (4, 12)
    assert set(told["target_modules"]) == {"q_proj", "down_proj"}
    assert told["use_dora"]
    assert told["use_rslora"]
    assert told["lora_dropout"] == (0.1 if "--lora-dropout" in more else 0.0)


@pytest.mark.verify
def test_gates_pass_with_dropout_and_dora(net: Path, launch):
    """Those that look at parameters, samples and exports, not at what random weights can learn."""
    only = "init,wiring,schedule,scored,exported"
    done = launch("check", "llm/sft", "--model", str(net), *SHORT[:8], *CHOSEN, "--lora-dropout", "0.1", "--only", only)
    assert done.returncode == 0, done.shown


def test_what_would_do_nothing_is_refused(net: Path, launch):
    done = launch("run", "llm/dpo", "--model", str(net), *SHORT, "--lora-dropout", "0.1")
    assert done.returncode == 2, done.shown
    assert "two forwards of one text" in done.stderr
    model = language.model()
    for wrong, said in (
        (LoRA(lora_rank=0, use_dora=True), "--use-dora"),
        (LoRA(lora_target_modules=("query",)), "q_proj"),
    ):
        with pytest.raises(UserError, match=said):
            language_models.adapted(model, wrong)
    with pytest.raises(UserError, match="accelerator"):
        language_models.attend(model, "flex_attention", torch.device("cpu"))


def test_scale_of_the_adapters():
    """alpha is twice the rank unless told (or the recipe's own), and what is asked for reaches the layer."""
    for lora, how, due in (
        (LoRA(lora_rank=4), {}, 2.0),
        (LoRA(lora_rank=4), {"alpha": 4}, 1.0),
        (LoRA(lora_rank=4, lora_alpha=12), {"alpha": 4}, 3.0),
        (LoRA(lora_rank=4, lora_alpha=12, use_rslora=True), {}, 6.0),
    ):
        net = language_models.adapted(language.model(), lora, **how)
        assert net.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] == due


def test_generated_answers_do_not_depend_on_the_padding():
    """A short prompt is answered next to a long one as it is alone."""
    torch.manual_seed(0)
    net, prompts = language.model().eval(), [[5, 6, 7], list(range(3, 40))]
    how = {"pad": 2, "ends": [2], "most": 8}
    with torch.no_grad():
        both = language_models.generate(net, prompts, **how)
        assert both == [language_models.generate(net, [p], **how)[0] for p in prompts]
