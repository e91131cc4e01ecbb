"""One digit somewhere in a picture: a CNN with two heads predicts its class and its box (corners, divided by the picture's size)."""

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

SEED = 0
np.random.seed(SEED)
torch.manual_seed(SEED)

SIZE = 32
EPOCHS = 7


def make_data(n):
    digits = load_digits()
    data = []
    for _ in range(n):
        i = np.random.randint(len(digits.images))
        fy, fx = np.random.randint(1, 3, 2)
        ink = digits.images[i] / 16
        ink = ink[np.ix_(ink.any(1), ink.any(0))]
        patch = np.kron(ink, np.ones((fy, fx)))
        h, w = patch.shape
        top, left = np.random.randint(0, SIZE - h + 1), np.random.randint(0, SIZE - w + 1)
        image = np.random.rand(SIZE, SIZE) * 0.2
        image[top : top + h, left : left + w] += patch
        data.append((image.astype(np.float32), digits.target[i], [left, top, left + w, top + h]))
    return data


class BoxDataset(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        image, label, box = self.data[i]
        box = torch.tensor(box, dtype=torch.float32) / SIZE
        return torch.from_numpy(image).unsqueeze(0), int(label), box


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        layers = []
        for cin, cout in ((1, 16), (16, 32), (32, 48)):
            layers += [nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(), nn.MaxPool2d(2)]
        self.backbone = nn.Sequential(*layers, nn.Flatten())
        self.classifier = nn.Sequential(nn.Linear(48 * 16, 64), nn.ReLU(), nn.Linear(64, 10))
        self.regressor = nn.Sequential(nn.Linear(48 * 16, 64), nn.ReLU(), nn.Linear(64, 4), nn.Sigmoid())

    def forward(self, x):
        features = self.backbone(x)
        return self.classifier(features), self.regressor(features)


def box_iou(a, b):
    tl, br = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
    inter = (br - tl).clamp(min=0).prod(1)
    area_a, area_b = (a[:, 2:] - a[:, :2]).clamp(min=0).prod(1), (b[:, 2:] - b[:, :2]).prod(1)
    return inter / (area_a + area_b - inter)


train_loader = DataLoader(BoxDataset(make_data(1500)), batch_size=32, shuffle=True)
test_loader = DataLoader(BoxDataset(make_data(400)), batch_size=100)

model = Detector()
optimizer = torch.optim.Adam(
    [
        {"params": model.backbone.parameters()},
        {"params": model.classifier.parameters()},
        {"params": model.regressor.parameters()},
    ],
    lr=1e-3,
)
class_loss_func, bbox_loss_func = nn.CrossEntropyLoss(), nn.SmoothL1Loss(beta=0.1)

for epoch in range(EPOCHS):
    model.train()
    total_loss = 0
    for images, labels, boxes in train_loader:
        logits, predicted = model(images)
        loss = class_loss_func(logits, labels) + 5 * bbox_loss_func(predicted, boxes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item()

    model.eval()
    found, iou_sum = 0, 0.0
    with torch.no_grad():
        for images, labels, boxes in test_loader:
            logits, predicted = model(images)
            iou = box_iou(predicted, boxes)
            iou_sum += iou.sum().item()
            found += ((logits.argmax(1) == labels) & (iou > 0.5)).sum().item()
    n = len(test_loader.dataset)
    print(
        f"[INFO] EPOCH: {epoch + 1}/{EPOCHS} loss {total_loss / len(train_loader):.4f} mean IoU {iou_sum / n:.4f} found {found / n:.4f}"
    )

print(f"FINAL iou={iou_sum / n:.4f}")
