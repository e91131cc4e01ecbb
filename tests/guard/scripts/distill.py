"""Knowledge distillation on digits: a wide teacher with dropout, a small student, 100 labelled samples for the hard loss."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
X, y = load_digits(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X / 16.0, y, test_size=0.3, random_state=0, stratify=y)


def tensors(x, t):
    return TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(t))


train_loader = DataLoader(tensors(X_train, y_train), batch_size=64, shuffle=True)
transfer_loader = DataLoader(tensors(X_train, y_train), batch_size=64, shuffle=True, drop_last=True)
test_loader = DataLoader(tensors(X_test, y_test), batch_size=256)


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 256),
            nn.BatchNorm1d(256),
            nn.ReLU(),
            nn.Dropout(0.4),
            nn.Linear(256, 256),
            nn.BatchNorm1d(256),
            nn.ReLU(),
            nn.Dropout(0.4),
            nn.Linear(256, 10),
        )

    def forward(self, x):
        return self.net(x)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def accuracy(model):
    model.eval()
    right = 0
    with torch.no_grad():
        for inputs, labels in test_loader:
            _, predicted = torch.max(model(inputs.to(device)), 1)
            right += (predicted == labels.to(device)).sum().item()
    return 100 * right / len(test_loader.dataset)


def train_teacher(model, epochs=15):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        model.train()
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), "teacher.pt")
    return accuracy(model)


def distill(teacher, student, epochs=25, T=3.0, soft_target_loss_weight=0.9, ce_loss_weight=0.1):
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    ce_loss = nn.CrossEntropyLoss()
    teacher.eval()  # Teacher set to evaluation mode
    for p in teacher.parameters():
        p.requires_grad = False
    for epoch in range(epochs):
        student.train()  # Student to train mode
        running_loss = 0.0
        for inputs, labels in transfer_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = F.softmax(teacher_logits / T, dim=-1)
            soft_prob = F.log_softmax(student_logits / T, dim=-1)
            soft_targets_loss = F.kl_div(soft_prob, soft_targets, reduction="batchmean") * T**2
            label_loss = ce_loss(student_logits, labels)
            loss = soft_target_loss_weight * soft_targets_loss + ce_loss_weight * label_loss
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        if epoch % 5 == 4:
            print(
                f"Epoch {epoch + 1}/{epochs}, Loss: {running_loss / len(transfer_loader):.4f}, student {accuracy(student):.2f}%"
            )


teacher = Teacher().to(device)
print(f"Teacher accuracy: {train_teacher(teacher):.2f}%")
frozen_teacher = Teacher().to(device)
frozen_teacher.load_state_dict(torch.load("teacher.pt"))
student = Student().to(device)
distill(frozen_teacher, student)
print(f"Student accuracy: {accuracy(student):.2f}%")
