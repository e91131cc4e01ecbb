"""Knowledge distillation: a CNN teacher labels a pool of unlabelled digits, a small MLP student learns from its soft labels."""

import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

SEED = 0
LABELLED = 150
T = 3.0
ALPHA = 0.9


class Digits(Dataset):
    def __init__(self, lo, hi, teacher_logits=None):
        x, y = load_digits(return_X_y=True)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(42))
        self.x = torch.tensor(x, dtype=torch.float32)[order][lo:hi].view(-1, 1, 8, 8) / 16
        self.y = torch.tensor(y)[order][lo:hi]
        self.teacher_logits = teacher_logits

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if self.teacher_logits is None:
            return self.x[i], self.y[i]
        return self.x[i], self.y[i], self.teacher_logits[i]


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(192, 10))

    def forward(self, x):
        return self.classifier(self.features(x))


class Student(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, x):
        return self.net(x)


def accuracy(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()
    return correct / len(loader.dataset)


def train_teacher(train_loader, test_loader, path):
    teacher = Teacher()
    optimizer = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for epoch in range(10):
        teacher.train()
        for x, y in train_loader:
            if torch.rand(1) < 0.5:  # one-pixel shift left or right
                x = torch.roll(x, int(torch.randint(0, 2, (1,))) * 2 - 1, dims=3)
            loss = F.cross_entropy(teacher(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("teacher accuracy", accuracy(teacher, test_loader))
    torch.save(teacher.state_dict(), path)


@torch.no_grad()
def precompute_logits(teacher, dataset):
    teacher.eval()
    loader = DataLoader(dataset, batch_size=100, shuffle=False)
    return torch.cat([teacher(x) for x, _ in loader])


def kd_loss(student_logits, teacher_logits):
    log_p = F.log_softmax(student_logits / T, dim=1)
    q = F.softmax(teacher_logits / T, dim=1)
    return F.kl_div(log_p, q, reduction="batchmean") * T * T


def train_student(student, train_loader, test_loader, epochs=16):
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    for epoch in range(epochs):
        student.train()
        running = 0.0
        for x, y, t_logits in train_loader:
            optimizer.zero_grad()
            out = student(x)
            hard = F.cross_entropy(out, t_logits.argmax(1))
            loss = ALPHA * kd_loss(out, t_logits) + (1 - ALPHA) * hard
            loss.backward()
            optimizer.step()
            running += loss.item()
        if epoch % 4 == 3:
            print(
                f"epoch {epoch + 1} loss {running / len(train_loader):.4f} student accuracy {accuracy(student, test_loader):.4f}"
            )
    return student


if __name__ == "__main__":
    torch.manual_seed(SEED)
    labelled, pool, test = Digits(0, LABELLED), Digits(LABELLED, 1297), Digits(1297, 1797)
    test_loader = DataLoader(test, batch_size=250)
    if not os.path.exists("teacher.pt"):
        train_teacher(DataLoader(labelled, batch_size=16, shuffle=True), test_loader, "teacher.pt")
    teacher = Teacher()
    teacher.load_state_dict(torch.load("teacher.pt"))
    soft = Digits(LABELLED, 1297, precompute_logits(teacher, pool))
    student = train_student(Student(), DataLoader(soft, batch_size=32, shuffle=True), test_loader)
    print(f"FINAL accuracy={accuracy(student, test_loader):.4f}")
