"""`token-per-feature` of vlm/instruct on projectors that read all features of a picture at once."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainworthy.recipes.vlm.data import rows
from trainworthy.recipes.vlm.gates import scoring

N, WIDTH, OUT = 9, 6, 12  # features, their width, embeddings of the resampler


class Resampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(OUT, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        queries = self.queries.expand(len(x), -1, -1)
        return queries + self.attention(queries, x, x, need_weights=False)[0]


class Model(nn.Module):
    def __init__(self, project):
        super().__init__()
        self.encoder, self.resampler, self.project = nn.Linear(4, WIDTH), Resampler(), project

    def embedded(self, batch):
        return self.project(self.resampler, self.encoder(batch["image"]))


def finding(project, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model, image = Model(project), torch.randn(1, N, 4)
    places = len(project(model.resampler, torch.randn(1, N, WIDTH))[0])
    monkeypatch.setattr(scoring, "fetch", lambda *_: {"image": image, "ids": torch.full((1, places), rows.IMAGE)})
    run = SimpleNamespace(device="cpu", autocast=contextlib.nullcontext)
    stage = SimpleNamespace(model=model, data={"train": None})
    return scoring.token_per_feature.check(SimpleNamespace(look=lambda: (run, stage)))


def test_a_resampler_may_read_every_feature(monkeypatch):
    found = finding(lambda resampler, x: resampler(x), monkeypatch)
    assert found.ok, found.measured
    assert f"all {N} features for each of {OUT} embeddings" in found.measured


@pytest.mark.parametrize(
    "project",
    [
        lambda resampler, x: resampler(x.mT.reshape(x.shape)),  # channels of many features in each
        lambda resampler, x: x.mT.reshape(x.shape),
        lambda resampler, x: x - x.mean(1, keepdim=True),
        lambda resampler, x: x.mean(1, keepdim=True).expand_as(x),
    ],
)
def test_features_that_are_mixed_by_mistake_are_stopped(project, monkeypatch):
    found = finding(project, monkeypatch)
    assert not found.ok, found.measured
