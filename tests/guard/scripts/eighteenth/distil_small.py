"""Knowledge distillation: a large network is trained on labelled digits, a small one learns from it on digits without labels."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
T = 3.0


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.3),
        )
        self.classifier = nn.Sequential(nn.Linear(64 * 16, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc(x.flatten(1))


digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
images, labels = images[order], labels[order]
labelled = TensorDataset(images[:500], labels[:500])
unlabelled = TensorDataset(images[500:1300])
test_set = TensorDataset(images[1300:], labels[1300:])
labelled_loader = DataLoader(labelled, batch_size=32, shuffle=True)
unlabelled_loader = DataLoader(unlabelled, batch_size=32, shuffle=True)
test_loader = DataLoader(test_set, batch_size=128, shuffle=False)


def train(model, loader, epochs, learning_rate):
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.Adam(model.parameters(), lr=learning_rate)
    model.train()
    for epoch in range(epochs):
        running_loss = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Epoch {epoch + 1}/{epochs}, Loss: {running_loss / len(loader):.4f}")


def train_knowledge_distillation(teacher, student, loader, epochs, learning_rate):
    optimizer = optim.Adam(student.parameters(), lr=learning_rate)
    teacher.eval()
    student.train()
    for epoch in range(epochs):
        running_loss = 0.0
        for (inputs,) in loader:
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = F.softmax(teacher_logits / T, dim=-1)
            soft_prob = F.log_softmax(student_logits / T, dim=-1)
            loss = F.kl_div(soft_prob, soft_targets, reduction="batchmean") * T**2
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Epoch {epoch + 1}/{epochs}, Loss: {running_loss / len(loader):.4f}")


def test(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for inputs, targets in loader:
            correct += (model(inputs).argmax(dim=1) == targets).sum().item()
    accuracy = 100 * correct / len(loader.dataset)
    print(f"Test Accuracy: {accuracy:.2f}%")
    return accuracy


teacher = Teacher()
train(teacher, labelled_loader, epochs=10, learning_rate=0.001)
test(teacher, test_loader)
student = Student()
train_knowledge_distillation(teacher, student, unlabelled_loader, epochs=16, learning_rate=0.005)
print(f"FINAL student_acc={test(student, test_loader):.2f}")
