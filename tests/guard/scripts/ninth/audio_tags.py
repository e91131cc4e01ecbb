"""Audio tagging: which of eight sounds are in a noisy clip? Log-mel spectrogram, small CNN, one sigmoid per tag."""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.metrics import average_precision_score
from torch.utils.data import DataLoader, Dataset

SEED = 0
torch.manual_seed(SEED)
np.random.seed(SEED)

SR, DURATION, N_FFT, HOP, N_MELS = 4000, 0.6, 256, 100, 32
TAGS = ["low_hum", "beep", "siren", "chirp_up", "chirp_down", "clicks", "tremolo", "chord"]
cfg = {"epochs": 9, "batch_size": 32, "lr": 3e-3}


def make_sound(tag):
    t = torch.arange(int(SR * DURATION)) / SR
    f = 300 + 500 * np.random.rand()
    if tag == "low_hum":
        return torch.sin(2 * math.pi * (60 + 30 * np.random.rand()) * t)
    if tag == "beep":
        return torch.sin(2 * math.pi * (f + 600) * t) * ((t * 6).floor() % 2)
    if tag == "siren":
        return torch.sin(2 * math.pi * f * t + 20 * torch.sin(2 * math.pi * 3 * t))
    if tag == "chirp_up":
        return torch.sin(2 * math.pi * (f * t + 600 * t**2))
    if tag == "chirp_down":
        return torch.sin(2 * math.pi * ((f + 800) * t - 600 * t**2))
    if tag == "clicks":
        return 4.0 * (torch.rand(len(t)) < 0.005).float()
    if tag == "tremolo":
        return torch.sin(2 * math.pi * f * t) * (0.5 + 0.5 * torch.sin(2 * math.pi * 12 * t))
    return sum(torch.sin(2 * math.pi * f * k * t) for k in (1, 1.25, 1.5)) / 2


def mel_filters():
    def mel(hz):
        return 2595 * math.log10(1 + hz / 700)

    points = torch.linspace(mel(40), mel(SR / 2), N_MELS + 2)
    hz = 700 * (10 ** (points / 2595) - 1)
    bins = torch.linspace(0, SR / 2, N_FFT // 2 + 1)
    up = (bins - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    down = (hz[2:, None] - bins) / (hz[2:] - hz[1:-1])[:, None]
    return torch.minimum(up, down).clamp(min=0)


FILTERS = mel_filters()


def log_mel(wave):
    spec = torch.stft(wave, N_FFT, HOP, window=torch.hann_window(N_FFT), return_complex=True).abs() ** 2
    return torch.log(FILTERS @ spec + 1e-4)


class TagDataset(Dataset):
    def __init__(self, n):
        self.features, self.targets = [], []
        for _ in range(n):
            target = (torch.rand(len(TAGS)) < 0.25).float()
            wave = 0.5 * torch.randn(int(SR * DURATION))
            for k in target.nonzero().flatten().tolist():
                wave += (0.15 + 0.5 * np.random.rand()) * make_sound(TAGS[k])
            self.features.append(log_mel(wave))
            self.targets.append(target)

    def __len__(self):
        return len(self.features)

    def __getitem__(self, i):
        return self.features[i].unsqueeze(0), self.targets[i]


class TagCNN(nn.Module):
    def __init__(self, n_tags):
        super().__init__()
        self.bn0 = nn.BatchNorm1d(N_MELS)
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(12), nn.BatchNorm2d(24)
        self.fc = nn.Linear(24 * 8, n_tags)

    def forward(self, x):  # (batch, 1, mels, frames)
        x = self.bn0(x.squeeze(1)).unsqueeze(1)
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = x.mean(dim=3)
        return self.fc(x.flatten(1))


train_ds, test_ds = TagDataset(1000), TagDataset(400)
train_dl = DataLoader(train_ds, cfg["batch_size"], shuffle=True)
test_dl = DataLoader(test_ds, 100)
model = TagCNN(len(TAGS))
optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
criterion = nn.BCEWithLogitsLoss()


def evaluate():
    model.eval()
    scores, truth = [], []
    with torch.no_grad():
        for x, target in test_dl:
            scores.append(torch.sigmoid(model(x)))
            truth.append(target)
    scores, truth = torch.cat(scores).numpy(), torch.cat(truth).numpy()
    return average_precision_score(truth, scores, average="macro"), ((scores > 0.5) == truth).mean()


for epoch in range(cfg["epochs"]):
    model.train()
    running = 0.0
    for x, target in train_dl:
        optimizer.zero_grad()
        loss = criterion(model(x), target)
        loss.backward()
        optimizer.step()
        running += loss.item()
    m_ap, tag_acc = evaluate()
    print(f"[{epoch + 1}/{cfg['epochs']}] loss {running / len(train_dl):.4f} mAP {m_ap:.4f} tag accuracy {tag_acc:.4f}")

print(f"FINAL map={m_ap:.4f}")
