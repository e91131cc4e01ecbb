"""Rotary phases in half precision: right at small positions, wrong at the longest one in use."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from trainworthy.recipes.llm.data import prose
from trainworthy.recipes.llm.gates import numerics

from tests.helpers import language

MODEL = "    start_at_frequencies(model, log_p)\n    return model\n"
HALF = """    start_at_frequencies(model, log_p)
    rotary = model.model.rotary_emb

    def half(x, position_ids):
        angles = position_ids[..., None].to(torch.bfloat16) * rotary.inv_freq.to(torch.bfloat16)
        both = torch.cat([angles, angles], -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    rotary.forward = half
    return model
"""
SMALL = (
    "--data.vocabulary",
    "300",
    "--data.context",
    "512",
    "--data.stride",
    "256",
    "--train.batch-size",
    "4",
    "--hidden-size",
    "32",
    "--num-hidden-layers",
    "2",
)


def half(rotary: torch.nn.Module):
    """`forward` with phases in bf16."""

    def forward(x: torch.Tensor, position_ids: torch.Tensor):
        angles = position_ids[..., None].bfloat16() * rotary.inv_freq.bfloat16()
        both = torch.cat([angles, angles], -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    return forward


def test_a_shift_changes_nothing_unless_phases_lose_their_digits():
    torch.manual_seed(0)
    model = language.model(max_position_embeddings=4096, initializer_range=0.2).eval()
    ids = torch.randint(3, 200, (1, numerics.WINDOW))
    for far in (112, 1008, 4000):
        gaps = numerics.moved(model, ids, far)
        assert gaps["far"] < numerics.LIMIT / 10, gaps
    assert numerics.turns(model)
    model.model.rotary_emb.forward = half(model.model.rotary_emb)
    gaps = numerics.moved(model, ids, 1008)
    assert gaps["far"] > max(10 * numerics.LIMIT, 10 * gaps["one"]), gaps


@pytest.mark.parametrize("broken", [True, False], ids=["bf16", "healthy"])
def test_phases_in_bf16_are_stopped_at_the_context_that_is_used(broken: bool, tmp_path: Path, fork, launch):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i, (_, text) in enumerate(islice(prose.manual(), 240)):
        (texts / f"{i:03}.txt").write_text(text[:1500])
    asked = ("--data.path", str(texts), *SMALL, "--only", "phases")
    if not broken:
        done = launch("check", "llm/pretrain", *asked)
        assert done.returncode == 0, done.shown
        assert "pass   phases" in done.stdout
        return
    fork((MODEL, HALF), recipe="llm/pretrain")
    done = launch("check", "mine.py", *asked)
    assert done.returncode == 3, done.shown
    assert "FAIL   phases" in done.stdout
    assert "bf16" in done.stdout
