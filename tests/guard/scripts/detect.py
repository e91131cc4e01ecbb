"""Detection's shape: targets as a list of dicts, a model that returns losses in training and boxes in evaluation."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
raw = load_digits()


class Scenes(Dataset):
    def __init__(self, lo, hi):
        self.lo, self.n = lo, hi - lo

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(self.lo + i)
        a, b = torch.randint(0, 9, (2,), generator=draw).tolist()
        picture = torch.zeros(1, 16, 16)
        picture[0, a : a + 8, b : b + 8] = torch.tensor(raw.images[self.lo + i], dtype=torch.float32) / 16
        box = torch.tensor([b, a, b + 8, a + 8], dtype=torch.float32) / 16
        return picture, {"boxes": box[None], "labels": torch.tensor([int(raw.target[self.lo + i])])}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.box, self.label = nn.Linear(512, 4), nn.Linear(512, 10)

    def forward(self, images, targets=None):
        x = self.body(torch.stack(images))
        boxes, logits = self.box(x), self.label(x)
        if self.training:
            goal = torch.cat([t["boxes"] for t in targets])
            names = torch.cat([t["labels"] for t in targets])
            return {"loss_box": F.smooth_l1_loss(boxes, goal), "loss_label": F.cross_entropy(logits, names)}
        return [{"boxes": b[None], "labels": s.argmax()[None]} for b, s in zip(boxes, logits)]


def collate(rows):
    return tuple(zip(*rows))


train_loader = DataLoader(Scenes(0, 1200), 32, shuffle=True, collate_fn=collate)
val_loader = DataLoader(Scenes(1200, 1500), 32, collate_fn=collate)
model = Detector()
optimizer = torch.optim.SGD(
    [p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, weight_decay=5e-4
)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [6, 8], 0.1)
for epoch in range(10):
    model.train()
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=20) if epoch == 0 else None
    for images, targets in train_loader:
        loss = sum(model(list(images), list(targets)).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if warm is not None:
            warm.step()
    scheduler.step()
    model.eval()
    hits = 0
    with torch.inference_mode():
        for images, targets in val_loader:
            hits += sum(int(o["labels"]) == int(t["labels"]) for o, t in zip(model(list(images)), targets))
    print(f"epoch {epoch} acc {hits / 300:.3f}")
