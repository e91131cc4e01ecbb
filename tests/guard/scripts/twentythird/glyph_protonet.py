"""Prototypical networks: episodes of 10 characters, one font image as support and three as queries. Tested on characters that training never had."""

import os
import pathlib

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

import trainworthy

SEED = int(os.environ.get("SEED", "0"))
WAY, SHOT, QUERY, EPISODES, EPOCHS = 10, 1, 3, 50, 5
FONTS = ["Sans", "Sans-Bold", "Sans-Oblique", "SansMono", "SansMono-BoldOblique", "Serif", "Serif-Bold", "Serif-Italic"]
CHARACTERS = [
    chr(c)
    for first, last in ((0x41, 0x5B), (0x61, 0x7B), (0x391, 0x3A2), (0x3B1, 0x3CA), (0x410, 0x450))
    for c in range(first, last)
]


def draw_glyphs():
    """Images (characters x fonts, 1, 28, 28) in 0 to 1, and the number of each one's character."""
    folder = pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [ImageFont.truetype(str(folder / f"DejaVu{name}.ttf"), 20) for name in FONTS]
    images = []
    for character in CHARACTERS:
        for font in fonts:
            image = Image.new("L", (28, 28))
            ImageDraw.Draw(image).text((14, 14), character, fill=255, font=font, anchor="mm")
            images.append(np.asarray(image, dtype=np.float32) / 255)
    labels = torch.arange(len(CHARACTERS)).repeat_interleave(len(FONTS))
    return torch.from_numpy(np.stack(images))[:, None], labels


class EpisodeSampler(Sampler):
    """Index lists of WAY characters with SHOT + QUERY different images each, one character after the other."""

    def __init__(self, labels, episodes, seed=None):
        self.labels, self.episodes, self.seed = labels, episodes, seed

    def __len__(self):
        return self.episodes

    def __iter__(self):
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        classes = self.labels.unique()
        for _ in range(self.episodes):
            picked = classes[torch.randperm(len(classes), generator=generator)[:WAY]]
            batch = []
            for c in picked:
                places = (self.labels == c).nonzero().flatten()
                batch.append(places[torch.randperm(len(places), generator=generator)[: SHOT + QUERY]])
            yield torch.cat(batch).tolist()


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))


def make_encoder():
    return nn.Sequential(block(1, 24), block(24, 32), block(32, 32), block(32, 32), nn.Flatten())


def jitter(x):
    """A random affine map of each image: the episodes of training are augmented."""
    theta = torch.eye(2, 3).repeat(len(x), 1, 1) + 0.15 * torch.randn(len(x), 2, 3)
    return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)


def episode_logits(encoder, x):
    """Negative squared distances of the queries to the prototypes, and the number of each query's class in the episode."""
    z = encoder(x).view(WAY, SHOT + QUERY, -1)
    prototypes = z[:, :SHOT].mean(1)
    queries = z[:, SHOT:].reshape(WAY * QUERY, -1)
    logits = -torch.cdist(queries, prototypes).pow(2)
    return logits, torch.arange(WAY).repeat_interleave(QUERY)


images, labels = draw_glyphs()
order = torch.from_numpy(np.random.RandomState(23).permutation(len(CHARACTERS)))
novel = torch.isin(labels, order[:40])
train_set, test_set = TensorDataset(images[~novel], labels[~novel]), TensorDataset(images[novel], labels[novel])
train_loader = DataLoader(train_set, batch_sampler=EpisodeSampler(labels[~novel], EPISODES))
test_loader = DataLoader(test_set, batch_sampler=EpisodeSampler(labels[novel], 100, seed=1))


def build():
    encoder = make_encoder()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    return encoder, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def train_epoch(encoder, optimizer, loader):
    encoder.train()
    for x, _ in loader:
        logits, target = episode_logits(encoder, jitter(x))
        loss = F.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(encoder, loader):
    encoder.eval()
    right = []
    for x, _ in loader:
        logits, target = episode_logits(encoder, x)
        right.append((logits.argmax(1) == target).float().mean())
    return torch.stack(right).mean().item()


def make_loop():
    encoder, optimizer, _ = build()
    return trainworthy.Loop(
        models=encoder,
        optimizers=optimizer,
        batches=train_loader,
        run=lambda batches: train_epoch(encoder, optimizer, batches),
        evaluate=lambda: evaluate(encoder, test_loader),
    )


def main():
    torch.manual_seed(SEED)
    encoder, optimizer, scheduler = build()
    for epoch in range(EPOCHS):
        train_epoch(encoder, optimizer, train_loader)
        scheduler.step()
        print(f"epoch {epoch} accuracy {evaluate(encoder, test_loader):.4f}")
    print(f"accuracy {evaluate(encoder, test_loader):.4f}")


if __name__ == "__main__":
    main()
