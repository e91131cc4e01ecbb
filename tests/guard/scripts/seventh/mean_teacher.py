"""Semi-supervised digits after CuriousAI/mean-teacher: few labels, two noisy views, an averaged teacher, ramped-up consistency."""

import argparse
import itertools

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.sampler import Sampler

NO_LABEL = -1
parser = argparse.ArgumentParser(description="Mean teacher")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=60)
parser.add_argument("--labeled-batch-size", type=int, default=20)
parser.add_argument("--labels-per-class", type=int, default=5)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--consistency", type=float, default=20.0)
parser.add_argument("--consistency-rampup", type=int, default=6)
parser.add_argument("--ema-decay", type=float, default=0.95)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)
np.random.seed(args.seed)
global_step = 0


class TransformTwice(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def transform(self, image):
        dx, dy = np.random.randint(-1, 2, 2)
        image = torch.roll(image, (int(dx), int(dy)), (1, 2))
        return image + 0.15 * torch.randn_like(image)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return (self.transform(self.images[i]), self.transform(self.images[i])), self.labels[i]


class TwoStreamBatchSampler(Sampler):
    """Batches of unlabelled indices filled up with labelled ones; an epoch goes once through the unlabelled."""

    def __init__(self, primary, secondary, batch_size, secondary_batch_size):
        self.primary, self.secondary = primary, secondary
        self.primary_batch_size, self.secondary_batch_size = batch_size - secondary_batch_size, secondary_batch_size

    def __iter__(self):
        primary = iter(np.random.permutation(self.primary).tolist())
        secondary = itertools.chain.from_iterable(np.random.permutation(self.secondary).tolist() for _ in iter(int, 1))
        for _ in range(len(self)):
            batch = list(itertools.islice(primary, self.primary_batch_size))
            yield batch + list(itertools.islice(secondary, self.secondary_batch_size))

    def __len__(self):
        return len(self.primary) // self.primary_batch_size


def create_model(ema=False):
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10),
    )  # fmt: skip
    if ema:
        for param in model.parameters():
            param.detach_()
    return model


def softmax_mse_loss(input_logits, target_logits):
    num_classes = input_logits.size()[1]
    return F.mse_loss(F.softmax(input_logits, 1), F.softmax(target_logits, 1), reduction="sum") / num_classes


def sigmoid_rampup(current, rampup_length):
    phase = 1.0 - np.clip(current, 0.0, rampup_length) / rampup_length
    return float(np.exp(-5.0 * phase * phase))


def update_ema_variables(model, ema_model, alpha, global_step):
    alpha = min(1 - 1 / (global_step + 1), alpha)
    for ema_param, param in zip(ema_model.parameters(), model.parameters()):
        ema_param.data.mul_(alpha).add_(param.data, alpha=1 - alpha)


def train(train_loader, model, ema_model, optimizer, epoch):
    global global_step
    class_criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=NO_LABEL)
    model.train()
    ema_model.train()
    for (input, ema_input), target in train_loader:
        minibatch_size = len(target)
        with torch.no_grad():
            ema_logit = ema_model(ema_input)
        class_logit = model(input)
        class_loss = class_criterion(class_logit, target) / minibatch_size
        consistency_weight = args.consistency * sigmoid_rampup(epoch, args.consistency_rampup)
        consistency_loss = consistency_weight * softmax_mse_loss(class_logit, ema_logit) / minibatch_size
        loss = class_loss + consistency_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        global_step += 1
        update_ema_variables(model, ema_model, args.ema_decay, global_step)
    print(f"Epoch: [{epoch}]\tClass {class_loss.item():.4f}\tCons {consistency_loss.item():.4f}")


def validate(images, labels, model):
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
labels = torch.tensor(digits.target)
order = np.random.default_rng(5).permutation(len(labels))
train_idx, test_idx = order[:1200], order[1200:]
hidden_labels = torch.full((1200,), NO_LABEL)
labeled_idxs = np.concatenate([np.where(labels[train_idx] == c)[0][: args.labels_per_class] for c in range(10)])
hidden_labels[labeled_idxs] = labels[train_idx][labeled_idxs]
unlabeled_idxs = np.setdiff1d(np.arange(1200), labeled_idxs)
batch_sampler = TwoStreamBatchSampler(unlabeled_idxs, labeled_idxs, args.batch_size, args.labeled_batch_size)
train_loader = DataLoader(TransformTwice(images[train_idx], hidden_labels), batch_sampler=batch_sampler)
model, ema_model = create_model(), create_model(ema=True)
optimizer = torch.optim.Adam(model.parameters(), args.lr)
for epoch in range(args.epochs):
    train(train_loader, model, ema_model, optimizer, epoch)
    if (epoch + 1) % 5 == 0:
        prec1 = validate(images[test_idx], labels[test_idx], model)
        ema_prec1 = validate(images[test_idx], labels[test_idx], ema_model)
        print(f" * Prec@1 {prec1 * 100:.2f} (EMA {ema_prec1 * 100:.2f})")
print(f"FINAL acc={ema_prec1:.4f}")
