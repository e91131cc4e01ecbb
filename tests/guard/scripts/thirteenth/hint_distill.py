"""Distillation in a plain loop: soft labels at a temperature, a hint from the teacher's features, few hard labels."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

T, ALPHA, BETA = 4.0, 0.3, 0.1


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.2),
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Linear(256, 10)

    def forward(self, x):
        h = self.features(x)
        return self.classifier(h), h


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU())
        self.classifier, self.hint = nn.Linear(40, 10), nn.Linear(40, 256)

    def forward(self, x):
        h = self.features(x)
        return self.classifier(h), self.hint(h)


def accuracy(net, loader):
    net.eval()
    hits = sum((net(x)[0].argmax(-1) == y).sum().item() for x, y in loader)
    return hits / len(loader.dataset)


def main():
    torch.manual_seed(3)
    raw = load_digits()
    x, y = torch.tensor(raw.images).float().unsqueeze(1) / 16, torch.tensor(raw.target)
    perm = torch.randperm(len(x))
    train, test = TensorDataset(x[perm[:1400]], y[perm[:1400]]), TensorDataset(x[perm[1400:]], y[perm[1400:]])
    train_loader, test_loader = DataLoader(train, 50, shuffle=True), DataLoader(test, 100)

    teacher = Teacher()
    opt = torch.optim.Adam(teacher.parameters(), 2e-3)
    for _ in range(4):
        teacher.train()
        for a, b in train_loader:
            opt.zero_grad()
            F.cross_entropy(teacher(a)[0], b).backward()
            opt.step()
    with torch.no_grad():
        print(f"teacher {accuracy(teacher, test_loader):.4f}")
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad = False

    student = Student()
    opt = torch.optim.Adam(student.parameters(), 3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=15)
    for epoch in range(15):
        student.train()
        for a, b in train_loader:
            with torch.no_grad():
                soft, target_hint = teacher(a)
            logits, hint = student(a)
            kd = F.kl_div(F.log_softmax(logits / T, dim=1), F.softmax(soft / T, dim=1), reduction="batchmean") * T * T
            loss = ALPHA * F.cross_entropy(logits, b) + (1 - ALPHA) * kd + BETA * F.mse_loss(hint, target_hint)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        with torch.no_grad():
            print(f"epoch {epoch} loss {loss.item():.3f} student {accuracy(student, test_loader):.4f}")
    with torch.no_grad():
        print(f"FINAL accuracy={accuracy(student, test_loader):.4f}")


if __name__ == "__main__":
    main()
