"""Feature extraction: a loaded base is frozen, its batch norm moves in train mode, a new head trains."""

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
dataloaders = {
    "train": DataLoader(TensorDataset(x[:1400], y[:1400]), 32, shuffle=True),
    "val": DataLoader(TensorDataset(x[1400:], y[1400:]), 32, shuffle=True),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.fc = nn.Linear(16, 2)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


pretrained = Net()
torch.save(pretrained.state_dict(), "base.pt")
model = Net()
model.load_state_dict(torch.load("base.pt"))
for param in model.parameters():
    param.requires_grad = False
model.fc = nn.Linear(16, 10)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(model.fc.parameters(), lr=0.1, momentum=0.9)
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
for epoch in range(10):
    for phase in ["train", "val"]:
        model.train() if phase == "train" else model.eval()
        running_loss, running_corrects = 0.0, 0
        for inputs, labels in dataloaders[phase]:
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                outputs = model(inputs)
                loss = criterion(outputs, labels)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            running_loss += loss.item() * inputs.size(0)
            running_corrects += torch.sum(outputs.argmax(1) == labels.data)
        if phase == "train":
            scheduler.step()
        n = len(dataloaders[phase].dataset)
        print(f"{phase} Loss: {running_loss / n:.4f} Acc: {running_corrects.double() / n:.4f}")
