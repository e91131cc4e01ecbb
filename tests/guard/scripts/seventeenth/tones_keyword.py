"""Keyword spotting: short made-up "words" of gliding tones, log-mel-like spectrograms by torch.fft, a small CNN."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
RATE, LENGTH, FRAME, HOP = 4000, 2048, 128, 64
WORDS = {
    "up": (300, 900),
    "down": (900, 300),
    "left": (500, 500),
    "right": (1200, 1200),
    "stop": (1200, 600),
    "go": (600, 1200),
}
KEYWORDS = list(WORDS)


def speak(word):
    start, end = WORDS[word]
    duration = int(torch.randint(900, 1500, (1,)))
    t = torch.arange(duration) / duration
    shift = 1 + 0.08 * torch.randn(1)
    pitch = (start + (end - start) * t) * shift
    phase = 2 * math.pi * torch.cumsum(pitch, 0) / RATE
    tone = torch.sin(phase) + 0.5 * torch.sin(2 * phase + torch.rand(1))
    wave = torch.zeros(LENGTH)
    at = int(torch.randint(0, LENGTH - duration, (1,)))
    wave[at : at + duration] = tone * torch.hann_window(duration) * (0.2 + torch.rand(1))
    return wave + 0.15 * torch.randn(LENGTH)


def corpus(per_word):
    waves, labels = [], []
    for label, word in enumerate(KEYWORDS):
        for _ in range(per_word):
            waves.append(speak(word))
            labels.append(label)
    return torch.stack(waves), torch.tensor(labels)


def spectrogram(waves):
    frames = waves.unfold(-1, FRAME, HOP) * torch.hann_window(FRAME)
    power = torch.fft.rfft(frames, dim=-1).abs() ** 2
    return torch.log(power + 1e-3).transpose(1, 2)


def augment(spec):
    spec = spec.clone()
    for row in spec:
        f = int(torch.randint(0, row.shape[0] - 6, (1,)))
        row[f : f + int(torch.randint(0, 6, (1,)))] = 0
    return spec


class SpotNet(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(24 * 16 * 2, n_classes)

    def forward(self, x):
        x = self.features(x.unsqueeze(1))
        thirds = torch.stack([part.mean(-1) for part in x.chunk(2, dim=-1)], dim=-1)
        return self.fc(self.dropout(thirds.flatten(1)))


train_waves, train_labels = corpus(80)
test_waves, test_labels = corpus(30)
train_spec, test_spec = spectrogram(train_waves), spectrogram(test_waves)
mean, std = train_spec.mean(), train_spec.std()
train_spec, test_spec = (train_spec - mean) / std, (test_spec - mean) / std
loader = DataLoader(TensorDataset(train_spec, train_labels), batch_size=24, shuffle=True)

model = SpotNet(len(KEYWORDS))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=10 * len(loader))
criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

for epoch in range(10):
    model.train()
    running = 0.0
    for spec, label in loader:
        optimizer.zero_grad()
        loss = criterion(model(augment(spec)), label)
        loss.backward()
        optimizer.step()
        scheduler.step()
        running += loss.item()
    model.eval()
    with torch.no_grad():
        accuracy = (model(test_spec).argmax(1) == test_labels).float().mean().item()
    print(f"epoch {epoch + 1:2d} loss {running / len(loader):.3f} accuracy {accuracy:.3f}")
print(f"FINAL accuracy={accuracy:.3f}")
