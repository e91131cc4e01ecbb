"""--train.gradient-checkpointing: the gradient of every recipe with blocks stays the same, and less is kept."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from trainworthy.core.base import config, seeds
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.live_bytes import LiveBytes
from trainworthy.core.loop import gradient_checkpointing
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe import loading
from trainworthy.core.session import stages

from tests.helpers import language

FLAG = "--train.gradient-checkpointing"
TEXT = ("--lora-rank", "4", "--data.max-length", "256", "--data.max-bad", "0.02", "--data.held-out", "8")
CASES = {
    "llm/pretrain": ("--hidden-size", "32", "--num-hidden-layers", "4"),
    "vision/classify": ("--widths", "16", "16", "16", "16"),
    "llm/sft": (*TEXT, "--lora-dropout", "0.1"),
}


@pytest.fixture(scope="module")
def net(tmp_path_factory) -> Path:
    return language.write(tmp_path_factory.mktemp("net"))


def built(name: str, *words: str):
    recipe = loading.load(name)
    cfg, _ = config.parse(recipe.module, ["--loader.workers", "0", *words], prog=name)
    run = Run(cfg, Accelerator(cpu=True), rehearsal=Rehearsal(steps=1))
    return run, stages.specs(recipe, cfg)[0].build(run, None)


def step(name: str, *words: str) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of one batch, with the same draws each time, and the bytes kept for the backward pass."""
    _, stage = built(name, *words)
    data = stage.data["train"]
    batch = data.collate([data.get(i, torch.Generator().manual_seed(i)) for i in range(4)])
    stage.model.train()
    with LiveBytes() as memory:
        memory.restart()
        seeds.seed_global(0, "model")
        sum(stage.loss(stage.model, batch).values()).backward()
    found = {n: p.grad for n, p in stage.model.named_parameters() if p.grad is not None}
    return found, memory.peak


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_and_less_is_kept(name, net):
    words = (*CASES[name], *(["--model", str(net)] if name == "llm/sft" else []))
    (plain, before), (again, after) = step(name, *words), step(name, *words, FLAG)
    assert plain.keys() == again.keys()
    assert any(g.any() for g in plain.values())
    for key, grad in plain.items():
        assert torch.equal(grad, again[key]), key
    if name != "vision/classify":  # its first block is larger than all others together
        assert after < before


def test_a_net_of_diffusers_is_checkpointed_inside_another():
    """As in diffusion/text, whose net is wrapped."""
    from trainworthy.recipes.diffusion.models import nets

    grads = []
    for switched in (False, True):
        torch.manual_seed(0)
        unet = nets.unet(1, 10, 16, (8, 16), 1, False)
        torch.nn.init.normal_(unet.conv_out.weight)
        stage = SimpleNamespace(name="one", model=torch.nn.ModuleDict({"unet": unet}), shard_units=None)
        if switched:
            gradient_checkpointing.apply(stage)
            assert unet.is_gradient_checkpointing
        out = unet.train()(torch.ones(2, 1, 16, 16), torch.tensor([3, 7]), torch.tensor([1, 2])).sample
        grads.append(torch.autograd.grad(out.square().sum(), list(unet.parameters()), allow_unused=True))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_copy_of_a_block_runs_its_own_weights():
    block = torch.nn.Linear(2, 2, bias=False)
    stage = SimpleNamespace(name="one", model=block, shard_units=lambda model: [model])
    gradient_checkpointing.apply(stage)
    other = copy.deepcopy(block)
    with torch.no_grad():
        other.weight.zero_()
    assert block(torch.ones(2)).any()
    assert not other(torch.ones(2)).any()


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UserError, match="has no blocks"):
        built("rl/ppo", FLAG)


def test_batch_norm_inside_a_block_is_refused():
    words = ("--model", "resnet18", "--image-size", "32")
    with pytest.raises(UserError, match="statistics twice"):
        built("vision/classify", *words, FLAG)
    built("vision/classify", *words, "--norm", "group", FLAG)
