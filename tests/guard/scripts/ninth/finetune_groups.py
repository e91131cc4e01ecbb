"""Fine-tune a small torchvision ResNet: pretrained backbone with a low learning rate, new head with a high one, StepLR."""

import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.transforms.functional import resize

SEED = 0
torch.manual_seed(SEED)
np.random.seed(SEED)

OLD_CLASSES = 6
NUM_EPOCHS = 8
CKPT = "backbone.pth"


def build_model(num_classes):
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=num_classes)


def to_images(x):
    x = torch.tensor(x / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    x = (resize(x, [24, 24], antialias=True) - 0.3) / 0.35
    return x.repeat(1, 3, 1, 1)


def pretrain(x, y, path):
    """The "ImageNet" of this script: the digits 0 to 5. Saved as nn.DataParallel would save it."""
    net = build_model(OLD_CLASSES)
    opt = optim.Adam(net.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(to_images(x), torch.tensor(y)), batch_size=32, shuffle=True)
    for _ in range(2):
        for images, labels in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            opt.step()
    torch.save({"state_dict": {"module." + k: v for k, v in net.state_dict().items()}}, path)


data, target = load_digits(return_X_y=True)
old = target < OLD_CLASSES
if not os.path.exists(CKPT):
    pretrain(data[old], target[old], CKPT)

# the new task: the other four digits, few labels
new_x, new_y = data[~old], target[~old] - OLD_CLASSES
train_x, val_x, train_y, val_y = train_test_split(new_x, new_y, train_size=64, test_size=300, random_state=SEED)
image_datasets = {
    "train": TensorDataset(to_images(train_x), torch.tensor(train_y)),
    "val": TensorDataset(to_images(val_x), torch.tensor(val_y)),
}
dataloaders = {k: DataLoader(d, batch_size=16, shuffle=k == "train") for k, d in image_datasets.items()}

model = build_model(4)
state = torch.load(CKPT)["state_dict"]
state = {k.replace("module.", ""): v for k, v in state.items() if "fc." not in k}
missing = model.load_state_dict(state, strict=False)
print("not in the checkpoint:", missing.missing_keys)

head = list(model.fc.parameters())
head_ids = {id(p) for p in head}
base = [p for p in model.parameters() if id(p) not in head_ids]
optimizer = optim.SGD([{"params": base, "lr": 1e-3}, {"params": head, "lr": 1e-2}], momentum=0.9, weight_decay=1e-4)
criterion = nn.CrossEntropyLoss()
exp_lr_scheduler = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3)

since = time.time()
for epoch in range(NUM_EPOCHS):
    print(f"Epoch {epoch}/{NUM_EPOCHS - 1}")
    for phase in ["train", "val"]:
        model.train(phase == "train")
        running_loss, running_corrects = 0.0, 0
        for inputs, labels in dataloaders[phase]:
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                outputs = model(inputs)
                _, preds = torch.max(outputs, 1)
                loss = criterion(outputs, labels)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            running_loss += loss.item() * inputs.size(0)
            running_corrects += torch.sum(preds == labels).item()
        if phase == "train":
            exp_lr_scheduler.step()
        n = len(image_datasets[phase])
        epoch_loss, epoch_acc = running_loss / n, running_corrects / n
        print(f"{phase} Loss: {epoch_loss:.4f} Acc: {epoch_acc:.4f}")

print(f"Training complete in {time.time() - since:.0f}s")
print(f"FINAL acc={epoch_acc:.4f}")
