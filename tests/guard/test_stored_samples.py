"""Samples that an augmentation changes where they are stored, and a loop that never steps."""

import numpy as np
import pytest
import torch
from trainworthy.guard.measures.data.stored_samples import Stored

from tests.guard.guarding import guard

SCRIPT = """
import numpy as np, torch
from torch import nn
rng = np.random.default_rng(0)
torch.manual_seed(0)
labels = rng.integers(0, 2, 256)
pictures = [(rng.random((8, 8)) + k).astype(np.float32) for k in labels]

class Cut(torch.utils.data.Dataset):
    def __init__(self):
        self.pictures, self.labels = pictures, labels
        self.read = np.zeros((256, 2), np.int64)  # a cache may be filled
    def __len__(self):
        return 256
    def __getitem__(self, i):
        x = self.pictures[i].copy()
        self.read[i] = i, 1
        top = rng.integers(0, 5)
        x[top : top + 4, top : top + 4] = 0
        return torch.from_numpy(x), int(self.labels[i])

net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for epoch in range(3):
    for i, (a, b) in enumerate(torch.utils.data.DataLoader(Cut(), 32, shuffle=True)):
        (nn.functional.cross_entropy(net(a), b) / STEPS).backward()
        if (i + 1) % STEPS == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(("copied", "steps"), [(True, 1), (False, 1), (True, 4), (True, 16)])
def test_in_place_and_without_a_step(copied: bool, steps: int, tmp_path):
    script = SCRIPT.replace("STEPS", str(steps))
    found, printed, _ = guard(script if copied else script.replace(".copy()", ""), tmp_path, interventions=False)
    assert {k for k, v in found.items() if v.blocks} == (
        {"samples"} if not copied else {"wiring"} if steps > 8 else set()
    ), printed
    assert copied or "`pictures` of the data set has changed" in found["samples"].measured
    assert steps < 8 or "24 backward() calls in 3 whole passes" in found["wiring"].measured


def test_what_may_be_set():
    """Targets, a cache, another array of that name, and what is no array."""

    class Data(torch.utils.data.Dataset):
        def __init__(self):
            self.x, self.y, self.cache = torch.rand(64, 8), torch.zeros(64), np.full((64, 8), np.nan)
            self.rows = [np.arange(8).reshape(2, 4) for _ in range(64)]

    data, one = Data(), Stored()
    one.note(torch.utils.data.Subset(data, range(32)))
    data.y[:], data.cache[:], data.x = 1, 0.5, torch.rand(64, 8)
    assert one.fault() is None
    data.rows[5][1, 2] = -1
    assert "`rows`" in one.fault()[0]
