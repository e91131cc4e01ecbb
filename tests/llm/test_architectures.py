"""The page of architectures, and what mixtures of experts need."""

import json
from pathlib import Path

import pytest
import torch
from trainworthy.recipes.llm.models import loading

from bench import architectures


def test_the_page_is_what_the_command_writes():
    assert architectures.PAGE.read_text() == architectures.page(json.loads(architectures.KEPT.read_text()))


@pytest.mark.parametrize("name", ["Qwen3 MoE", "DeepSeek-V3", "gpt-oss"])
def test_the_file_of_a_mixture_of_experts_is_read_by_the_names_of_its_parameters(name, tmp_path: Path):
    """The file has an entry for each expert, the model one parameter for all of them (gpt-oss: the file as well)."""
    model = loading.load(str(architectures.written(name, tmp_path)), torch.float32)
    found = loading.from_file(model, str(tmp_path))
    own = dict(model.named_parameters())
    assert found.keys() == own.keys()
    assert all(torch.equal(found[n], p) for n, p in own.items())


def test_the_loss_of_a_mixture_of_experts_does_not_depend_on_the_cut(tmp_path: Path, launch):
    """TRL adds the router's auxiliary loss by default, a mean over a micro-batch; its fused head cannot compute it on scored rows."""
    net = architectures.written("Qwen3 MoE", tmp_path / "net")
    settings = architectures.ON_TEXT["llm/sft"]
    done = launch(
        "check",
        "llm/sft",
        "--model",
        str(net),
        *architectures.WEIGHTS,
        *settings,
        "--only",
        "schema,init,dependency,objective",
    )
    assert done.returncode == 0, done.shown
    assert [v["verdict"] for v in done.verdicts()] == ["pass"] * 4


@pytest.mark.verify
def test_answers_of_any_length_are_generated_whole(tmp_path: Path, launch):
    """A tokenizer of bytes needs more than the few tokens that a function name has in most vocabularies."""
    net = architectures.written("Llama", tmp_path / "net")
    settings = architectures.ON_TEXT["llm/sft"]
    done = launch("check", "llm/sft", "--model", str(net), *architectures.WEIGHTS, *settings, "--only", "overfit")
    assert done.returncode == 0, done.shown
    assert "cut by" not in done.stdout
