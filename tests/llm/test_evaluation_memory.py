"""Evaluations need no more memory than a training step."""

import pytest
import torch
from trainworthy.core.base.live_bytes import LiveBytes
from trainworthy.core.recipe import loading
from trainworthy.recipes.diffusion.models import latents
from trainworthy.recipes.shared import language_models


def test_log_probabilities_are_taken_row_by_row():
    logits, labels = torch.randn(8, 16, 1000).bfloat16(), torch.randint(-1, 1000, (8, 16))
    whole = logits.float().log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    with LiveBytes() as memory:
        found = language_models.log_probs(logits, labels)
    assert torch.equal(found, whole)
    row = 16 * 1000 * 4
    assert memory.peak - logits.nbytes < 3 * row  # of 8 rows in fp32


@pytest.mark.parametrize("recipe", ["llm/sft", "vlm/instruct", "diffusion/text"])
def test_a_large_models_evaluation_takes_few_samples_at_once(recipe):
    """Sequences of hundreds of tokens over a whole vocabulary, or pictures of 512 pixels."""
    assert loading.load(recipe).module.full().train.eval_batch_size <= 16


@pytest.mark.parametrize(("side", "n"), [(16, 1024), (32, 256), (64, 64), (512, 1), (1024, 1)])
def test_an_autoencoder_encodes_as_many_pixels_at_once(side, n):
    assert latents.at_once(torch.empty(5000, 3, side, side, device="meta")) == n


def test_latents_are_encoded_once_and_pictures_read_once(monkeypatch):
    reads: list = []
    own = latents.digest
    monkeypatch.setattr(latents, "digest", lambda tensors: reads.append([*tensors]) or own(tensors))
    torch.manual_seed(0)
    vae, images = latents.nets.autoencoder(1, 2, 16, (8, 8), 1).eval(), torch.rand(40, 1, 16, 16) * 2 - 1
    first = latents.cached(vae, images)
    assert latents.cached(vae, images) is first
    assert sum("pictures" in names for names in reads) == 1
    images[0] = 0.0  # other pictures in the same memory
    assert not torch.equal(latents.cached(vae, images)[0], first[0])
