"""Positions that are never added, and a sampler with the weights of classes."""

from tests.guard.guarding import guard

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
torch.manual_seed(0)
x, y = torch.randn(240, 6, 8), torch.randint(0, 2, (240,))
x[y == 1, 2] += 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(8, 64), nn.Linear(64, 2)
        self.pos_embed = nn.Parameter(torch.zeros(1, 6, 64))
        self.mask_token = nn.Parameter(torch.zeros(64))  # is not used without masking
        self.block = nn.TransformerEncoderLayer(64, 4, 64, 0.0, batch_first=True)
    def forward(self, x):
        x = self.inside(x)
        x = x + self.pos_embed
        return self.out(self.block(x).mean(1))

net = Net()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
weights = 1 / y.bincount().double()
sampler = WeightedRandomSampler(weights[y], len(y))
for epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), 16, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(a), b).backward()
        optimizer.step()
"""


def test_positions_and_weights(tmp_path):
    unused = SCRIPT.replace("x = x + self.pos_embed", "x").replace("self.pos_embed", "self.spare_embed")
    for name, script in (("healthy", SCRIPT), ("unused", unused)):
        found, printed, _ = guard(script, tmp_path / name, interventions=False)
        assert not [v for v in found.values() if v.blocks], printed
    wrong = SCRIPT.replace("x = x + self.pos_embed", "x + self.pos_embed").replace(
        "weights[y], len(y)", "weights, len(y)"
    )
    found, printed, _ = guard(wrong, tmp_path / "wrong", interventions=False)
    assert "positions pos_embed never got a gradient" in found["wiring"].measured, printed
    assert "2 weights for 240 samples" in found["samples"].measured, printed
