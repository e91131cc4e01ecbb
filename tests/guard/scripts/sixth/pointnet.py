"""PointNet after fxia22/pointnet.pytorch: clouds of points, a transform net with its regulariser, jitter and rotation in training."""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data as data

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=32)
parser.add_argument("--num_points", type=int, default=64)
parser.add_argument("--nepoch", type=int, default=8)
parser.add_argument("--feature_transform", action="store_true", default=True)
opt = parser.parse_args()
opt.manualSeed = 0
np.random.seed(opt.manualSeed)
torch.manual_seed(opt.manualSeed)


def shape(kind, n, rng):
    u, v = rng.uniform(0, 2 * np.pi, n), rng.uniform(-1, 1, n)
    if kind == 0:
        points = np.stack([np.sqrt(1 - v**2) * np.cos(u), v, np.sqrt(1 - v**2) * np.sin(u)], 1)
    elif kind == 1:
        points = np.stack([np.cos(u) * 0.6, v, np.sin(u) * 0.6], 1)
    elif kind == 2:
        points = np.stack([np.cos(u) * (1 - v) / 2, v, np.sin(u) * (1 - v) / 2], 1)
    else:
        points = rng.uniform(-0.7, 0.7, (n, 3))
        points[np.arange(n), rng.integers(0, 3, n)] = np.sign(v) * 0.7
    return points * rng.uniform(0.8, 1.2, 3)


class ShapeDataset(data.Dataset):
    def __init__(self, split, npoints, data_augmentation=True):
        self.npoints, self.data_augmentation = npoints, data_augmentation
        rng = np.random.default_rng(0 if split == "train" else 1)
        self.labels = rng.integers(0, 4, 480 if split == "train" else 160)
        self.clouds = [shape(k, 200, rng) for k in self.labels]

    def __getitem__(self, index):
        point_set = self.clouds[index]
        choice = np.random.choice(len(point_set), self.npoints, replace=True)
        point_set = point_set[choice, :]
        point_set = point_set - np.expand_dims(np.mean(point_set, axis=0), 0)
        point_set = point_set / np.max(np.sqrt(np.sum(point_set**2, axis=1)), 0)
        if self.data_augmentation:
            theta = np.random.uniform(0, np.pi * 2)
            rotation_matrix = np.array([[np.cos(theta), -np.sin(theta)], [np.sin(theta), np.cos(theta)]])
            point_set[:, [0, 2]] = point_set[:, [0, 2]].dot(rotation_matrix)
            point_set += np.random.normal(0, 0.02, size=point_set.shape)
        return torch.from_numpy(point_set.astype(np.float32)), torch.tensor(self.labels[index]).long()

    def __len__(self):
        return len(self.labels)


class TNet(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k
        self.conv1, self.conv2 = nn.Conv1d(k, 16, 1), nn.Conv1d(16, 64, 1)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, k * k)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(16), nn.BatchNorm1d(64), nn.BatchNorm1d(32)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = torch.max(x, 2, keepdim=True)[0].view(-1, 64)
        x = self.fc2(F.relu(self.bn3(self.fc1(x))))
        iden = torch.eye(self.k).flatten().view(1, -1).repeat(x.size(0), 1)
        return (x + iden).view(-1, self.k, self.k)


class PointNetCls(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.stn, self.fstn = TNet(3), TNet(16)
        self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 64, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(64)
        self.fc1, self.fc2, self.bn3, self.dropout = (
            nn.Linear(64, 32),
            nn.Linear(32, k),
            nn.BatchNorm1d(32),
            nn.Dropout(0.3),
        )

    def forward(self, x):
        trans = self.stn(x)
        x = torch.bmm(x.transpose(2, 1), trans).transpose(2, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        trans_feat = self.fstn(x)
        x = torch.bmm(x.transpose(2, 1), trans_feat).transpose(2, 1)
        x = self.bn2(self.conv2(x))
        x = torch.max(x, 2, keepdim=True)[0].view(-1, 64)
        x = F.relu(self.bn3(self.dropout(self.fc1(x))))
        return F.log_softmax(self.fc2(x), dim=1), trans, trans_feat


def feature_transform_regularizer(trans):
    identity = torch.eye(trans.size(1))[None]
    return torch.mean(torch.norm(torch.bmm(trans, trans.transpose(2, 1)) - identity, dim=(1, 2)))


dataset = ShapeDataset("train", opt.num_points)
test_dataset = ShapeDataset("test", opt.num_points, data_augmentation=False)
dataloader = torch.utils.data.DataLoader(dataset, batch_size=opt.batchSize, shuffle=True)
testdataloader = torch.utils.data.DataLoader(test_dataset, batch_size=opt.batchSize, shuffle=True)
classifier = PointNetCls(k=4)
optimizer = optim.Adam(classifier.parameters(), lr=0.003, betas=(0.9, 0.999))
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
for epoch in range(opt.nepoch):
    for i, (points, target) in enumerate(dataloader, 0):
        points = points.transpose(2, 1)
        optimizer.zero_grad()
        classifier = classifier.train()
        pred, trans, trans_feat = classifier(points)
        loss = F.nll_loss(pred, target)
        if opt.feature_transform:
            loss += feature_transform_regularizer(trans_feat) * 0.001
        loss.backward()
        optimizer.step()
        correct = pred.data.max(1)[1].eq(target.data).cpu().sum()
        if i % 10 == 0:
            j, (points, target) = next(enumerate(testdataloader, 0))
            classifier = classifier.eval()
            pred, _, _ = classifier(points.transpose(2, 1))
            correct = pred.data.max(1)[1].eq(target.data).cpu().sum()
            print(f"[{epoch}: {i}] test accuracy {correct.item() / len(target):.3f}")
    scheduler.step()
    torch.save(classifier.state_dict(), f"cls_model_{epoch}.pth")
total_correct, total_testset = 0, 0
for points, target in testdataloader:
    classifier = classifier.eval()
    pred, _, _ = classifier(points.transpose(2, 1))
    total_correct += pred.data.max(1)[1].eq(target.data).cpu().sum().item()
    total_testset += points.size()[0]
print(f"FINAL acc={total_correct / total_testset:.4f}")
