"""Where class scores come from, and views of a batch that keep its entries in their places."""

import torch
from torch import nn
from torch.nn import functional as F
from trainworthy.guard.checks.loss import one_class, positive_first
from trainworthy.guard.measures.losses.targets import describe, made_by_the_loop, of_a_layer
from trainworthy.guard.measures.models.rows import crossing


def test_scores_of_a_layer_and_of_embeddings():
    """Targets that are all 0 are a fault for a classifier, and the rule for InfoNCE with its positive in the first column."""
    x, scale = torch.randn(8, 5), nn.Parameter(torch.zeros(()))
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
    pooled = nn.Sequential(nn.Conv1d(1, 3, 2), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    for scores in (net(x), net(x).log_softmax(1), nn.Linear(5, 4, bias=False)(x), pooled(x[:, None])):
        assert of_a_layer(scores)
    query, key = F.normalize(net(x), dim=1), F.normalize(net(x).detach(), dim=1)
    products = torch.cat([(query * key).sum(1, keepdim=True), query @ torch.randn(4, 16)], 1)
    for scores in (products / 0.2, products * scale.exp(), query @ query.t()):
        assert not of_a_layer(scores)
    rows = [{"distinct": [0], "scored": 32}] * 4
    assert one_class([{**r, "layer": True} for r in rows]) is not None
    assert one_class([{**r, "layer": False} for r in rows]) is None


def test_targets_that_count_rows():
    """Right for scores of a batch with itself or with more negatives, wrong where the positive is in the first column."""
    query = F.normalize(torch.randn(16, 24), dim=1)
    key, queue = F.normalize(query + 0.1 * torch.randn(16, 24), dim=1), F.normalize(torch.randn(64, 24), dim=1)
    column = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.t()], 1)
    for scores, wrong in ((column, True), (query @ key.t(), False), (query @ torch.cat([key, queue]).t(), False)):
        rows = [describe("cross_entropy", scores / 0.2, torch.arange(16), {}, None)] * 8
        assert (positive_first(rows) is not None) == wrong


def test_a_view_is_no_transpose():
    points = torch.randn(4, 10, 3)
    assert "view of the batch's" in crossing(points.view(4, 3, 10), points)
    for healthy in (points.transpose(1, 2), points.view(4, 30), points.view(4, 1, 10, 3), points.view(4, 10, 3, 1)):
        assert not crossing(healthy, points)
    series = torch.randn(4, 28, 1)
    assert not crossing(series.view(4, 1, 28), series)


def test_targets_that_the_loop_makes():
    """All the same, the places of rows, or the classes of an episode. Not those of a batch that was drawn."""
    for made in (torch.zeros(9), torch.arange(12), torch.arange(10).repeat_interleave(3), torch.arange(10).repeat(3)):
        assert made_by_the_loop(made.long())
    for drawn in ([0, 0, 0, 1, 1, 1, 1, 1], [2, 0, 1, 1, 0, 2, 2, 0, 1], [0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0]):
        assert not made_by_the_loop(torch.tensor(drawn))
