"""PixelCNN after the usual small re-implementations (jzbontar/pixelcnn-pytorch): masked convolutions on digits of four grey levels."""

import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import optim
from torch.utils import data

SEED = 0
torch.manual_seed(SEED)
LEVELS = 4


class MaskedConv2d(nn.Conv2d):
    def __init__(self, mask_type, *args, **kwargs):
        super().__init__(*args, **kwargs)
        assert mask_type in {"A", "B"}
        self.register_buffer("mask", self.weight.data.clone())
        _, _, kH, kW = self.weight.size()
        self.mask.fill_(1)
        self.mask[:, :, kH // 2, kW // 2 + (mask_type == "B") :] = 0
        self.mask[:, :, kH // 2 + 1 :] = 0

    def forward(self, x):
        self.weight.data *= self.mask
        return super().forward(x)


class GreyDigits(data.Dataset):
    """Pixels as classes 0 to 3."""

    def __init__(self, part):
        images = torch.tensor(load_digits().images)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(6))
        chosen = order[:1300] if part == "train" else order[1300:]
        self.levels = (images[chosen] / 16 * (LEVELS - 1)).round().long()

    def __len__(self):
        return len(self.levels)

    def __getitem__(self, i):
        return self.levels[i]


def to_input(levels):
    return 2 * levels[:, None].float() / (LEVELS - 1) - 1


fm = 24
net = nn.Sequential(
    MaskedConv2d("A", 1, fm, 5, 1, 2, bias=False), nn.BatchNorm2d(fm), nn.ReLU(True),
    MaskedConv2d("B", fm, fm, 3, 1, 1, bias=False), nn.BatchNorm2d(fm), nn.ReLU(True),
    MaskedConv2d("B", fm, fm, 3, 1, 1, bias=False), nn.BatchNorm2d(fm), nn.ReLU(True),
    nn.Conv2d(fm, LEVELS, 1),
)  # fmt: skip
tr = data.DataLoader(GreyDigits("train"), batch_size=50, shuffle=True)
te = data.DataLoader(GreyDigits("test"), batch_size=100, shuffle=False)
optimizer = optim.Adam(net.parameters(), lr=5e-3)
scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[4, 5], gamma=0.3)
for epoch in range(6):
    err_tr = []
    time_tr = time.time()
    net.train(True)
    for levels in tr:
        loss = F.cross_entropy(net(to_input(levels)), levels)
        err_tr.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    time_tr = time.time() - time_tr
    scheduler.step()

    err_te = []
    net.train(False)
    with torch.no_grad():
        for levels in te:
            logits = net(to_input(levels))
            err_te.append(F.cross_entropy(logits, levels, reduction="sum").item() / levels[0].numel())
    bits = sum(err_te) / len(te.dataset) / math.log(2)
    print(f"epoch={epoch}; nll_tr={sum(err_tr) / len(err_tr):.4f}; bits_te={bits:.4f}; time_tr={time_tr:.1f}s")

sample = torch.zeros(10, 8, 8, dtype=torch.long)
with torch.no_grad():
    for i in range(8):
        for j in range(8):
            probs = F.softmax(net(to_input(sample))[:, :, i, j], dim=1)
            sample[:, i, j] = torch.multinomial(probs, 1)[:, 0]
print("\n".join("".join(" .+#"[v] for v in row) for row in sample[0].tolist()))
print(f"FINAL bits={bits:.4f}")
