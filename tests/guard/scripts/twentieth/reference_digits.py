"""Classification in the style of torchvision's references: presets, mixup, warm-up, EMA, no decay of norms."""

import argparse
import time

import torch
import torch.nn as nn
import torch.utils.data
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data.dataloader import default_collate
from torchvision.transforms import v2

MEAN, STD = (0.3053,), (0.3760,)


class ClassificationPresetTrain:
    def __init__(self, *, crop_size, mean=MEAN, std=STD, random_erase_prob=0.0):
        trans = [v2.Pad(1), v2.RandomCrop(crop_size), v2.ColorJitter(brightness=0.2)]
        trans.append(v2.Normalize(mean=mean, std=std))
        if random_erase_prob > 0:
            trans.append(v2.RandomErasing(p=random_erase_prob, scale=(0.02, 0.15)))
        self.transforms = v2.Compose(trans)

    def __call__(self, img):
        return self.transforms(img)


class ClassificationPresetEval:
    def __init__(self, *, crop_size, mean=MEAN, std=STD):
        self.transforms = v2.Compose([v2.CenterCrop(crop_size), v2.Normalize(mean=mean, std=std)])

    def __call__(self, img):
        return self.transforms(img)


class DigitsDataset(torch.utils.data.Dataset):
    def __init__(self, images, labels, transform):
        self.images = torch.tensor(images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels, self.transform = labels.tolist(), transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.transform(self.images[i]), self.labels[i]


class RandomMixUp(nn.Module):
    def __init__(self, num_classes, p=0.5, alpha=1.0):
        super().__init__()
        self.num_classes, self.p, self.alpha = num_classes, p, alpha

    def forward(self, batch, target):
        target = nn.functional.one_hot(target, self.num_classes).to(batch.dtype)
        if torch.rand(1).item() >= self.p:
            return batch, target
        # It's faster to roll the batch by one instead of shuffling it to create image pairs
        batch_rolled = batch.roll(1, 0)
        target_rolled = target.roll(1, 0)
        lambda_param = float(torch._sample_dirichlet(torch.tensor([self.alpha, self.alpha]))[0])
        batch = batch.mul(lambda_param).add(batch_rolled.mul(1.0 - lambda_param))
        target = target.mul(lambda_param).add(target_rolled.mul(1.0 - lambda_param))
        return batch, target


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay, device="cpu"):
        def ema_avg(avg_model_param, model_param, num_averaged):
            return decay * avg_model_param + (1 - decay) * model_param

        super().__init__(model, device, ema_avg, use_buffers=True)


def set_weight_decay(model, weight_decay, norm_weight_decay):
    norm_classes = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
    params = {"other": [], "norm": []}
    for module in model.modules():
        key = "norm" if isinstance(module, norm_classes) else "other"
        params[key] += [p for p in module.parameters(recurse=False) if p.requires_grad]
    decays = {"other": weight_decay, "norm": norm_weight_decay}
    return [{"params": params[key], "weight_decay": decays[key]} for key in params if params[key]]


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + identity)


def resnet_tiny(num_classes):
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        BasicBlock(16, 16),
        BasicBlock(16, 32, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema=None):
    model.train()
    total, seen, start = 0.0, 0, time.time()
    for i, (image, target) in enumerate(data_loader):
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)

        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()

        if model_ema and i % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                # Reset ema buffer to keep copying weights during warmup period
                model_ema.n_averaged.fill_(0)
        total, seen = total + loss.item() * len(image), seen + len(image)
    lr = optimizer.param_groups[0]["lr"]
    print(f"Epoch: [{epoch}]  lr: {lr:.4f}  loss: {total / seen:.4f}  img/s: {seen / (time.time() - start):.0f}")


def evaluate(model, criterion, data_loader, device, log_suffix=""):
    model.eval()
    correct, seen, total = 0, 0, 0.0
    with torch.inference_mode():
        for image, target in data_loader:
            image, target = image.to(device), target.to(device)
            output = model(image)
            total += criterion(output, target).item() * len(image)
            correct += (output.argmax(dim=1) == target).sum().item()
            seen += len(image)
    print(f"Test: {log_suffix} Acc@1 {100 * correct / seen:.3f} loss {total / seen:.3f}")
    return 100 * correct / seen


def main(args):
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = load_digits()
    x_train, x_test, y_train, y_test = train_test_split(
        digits.images, digits.target, test_size=0.35, random_state=1, stratify=digits.target
    )
    dataset = DigitsDataset(
        x_train, y_train, ClassificationPresetTrain(crop_size=8, random_erase_prob=args.random_erase)
    )
    dataset_test = DigitsDataset(x_test, y_test, ClassificationPresetEval(crop_size=8))
    num_classes = len(digits.target_names)

    mixup = RandomMixUp(num_classes, p=0.5, alpha=args.mixup_alpha)
    data_loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=torch.utils.data.RandomSampler(dataset),
        collate_fn=lambda batch: mixup(*default_collate(batch)),
        drop_last=True,
    )
    data_loader_test = torch.utils.data.DataLoader(dataset_test, batch_size=args.batch_size)

    model = resnet_tiny(num_classes).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    parameters = set_weight_decay(model, args.weight_decay, args.norm_weight_decay)
    optimizer = torch.optim.SGD(parameters, lr=args.lr, momentum=args.momentum, nesterov=True)

    main_lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=args.epochs - args.lr_warmup_epochs, eta_min=args.lr_min
    )
    warmup_lr_scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=args.lr_warmup_decay, total_iters=args.lr_warmup_epochs
    )
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer, schedulers=[warmup_lr_scheduler, main_lr_scheduler], milestones=[args.lr_warmup_epochs]
    )
    # Decay adjustment that aims to keep the decay independent of other hyper-parameters
    adjust = args.batch_size * args.model_ema_steps / args.epochs
    alpha = min(1.0, (1.0 - args.model_ema_decay) * adjust)
    model_ema = ExponentialMovingAverage(model, device=device, decay=1.0 - alpha)

    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema)
        lr_scheduler.step()
        evaluate(model, criterion, data_loader_test, device=device)
        accuracy = evaluate(model_ema, criterion, data_loader_test, device=device, log_suffix="EMA")
    print(f"FINAL ema_acc1={accuracy:.2f}")


def get_args_parser():
    parser = argparse.ArgumentParser(description="PyTorch Classification Training")
    parser.add_argument("--epochs", default=14, type=int, metavar="N")
    parser.add_argument("--batch-size", default=32, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--weight-decay", default=1e-3, type=float)
    parser.add_argument("--norm-weight-decay", default=0.0, type=float)
    parser.add_argument("--label-smoothing", default=0.1, type=float)
    parser.add_argument("--mixup-alpha", default=0.2, type=float)
    parser.add_argument("--random-erase", default=0.1, type=float)
    parser.add_argument("--lr-warmup-epochs", default=2, type=int)
    parser.add_argument("--lr-warmup-decay", default=0.01, type=float)
    parser.add_argument("--lr-min", default=0.0, type=float)
    parser.add_argument("--clip-grad-norm", default=None, type=float)
    parser.add_argument("--model-ema-steps", default=4, type=int)
    parser.add_argument("--model-ema-decay", default=0.97, type=float)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
