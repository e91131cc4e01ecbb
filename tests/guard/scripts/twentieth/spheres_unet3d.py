"""3D segmentation of spheres in noisy volumes, after MONAI's tutorials: random crops, Dice loss, sliding window inference."""

import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

SEED = 0
SIZE, ROI = 40, (24, 24, 24)
EPOCHS, VAL_INTERVAL = 20, 5


def set_determinism(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def create_test_image_3d(size, rng, num_objs=6, rad_max=8, rad_min=4, noise_max=0.4):
    """A volume with bright spheres, some dark ones that do not count, and noise; and the mask of the bright ones."""
    image, label = np.zeros((size, size, size), np.float32), np.zeros((size, size, size), np.uint8)
    grid = np.stack(np.meshgrid(*[np.arange(size)] * 3, indexing="ij"))
    for i in range(num_objs):
        centre = rng.integers(rad_max, size - rad_max, 3)
        inside = ((grid - centre[:, None, None, None]) ** 2).sum(0) < rng.integers(rad_min, rad_max + 1) ** 2
        bright = i % 2 == 0
        image[inside], label[inside] = rng.uniform(0.5, 1.0) if bright else rng.uniform(-1.0, -0.5), bright
    image += rng.normal(0, noise_max, image.shape)
    # a scanner's own scale
    return image * rng.uniform(80, 120) + 300, label


class ScaleIntensity:
    """To zero mean and unit deviation of the volume."""

    def __call__(self, data):
        image = data["image"]
        data["image"] = (image - image.mean()) / image.std()
        return data


class RandCropByPosNegLabel:
    def __init__(self, roi, pos=1, neg=1):
        self.roi, self.pos_ratio = roi, pos / (pos + neg)

    def __call__(self, data):
        image, label = data["image"], data["label"]
        wanted = label[0] > 0 if random.random() < self.pos_ratio else label[0] == 0
        places = wanted.nonzero()
        centre = places[random.randrange(len(places))].tolist()
        window = [slice(None)]
        for c, r, s in zip(centre, self.roi, label.shape[1:]):
            start = min(max(c - r // 2, 0), s - r)
            window.append(slice(start, start + r))
        data["image"], data["label"] = image[tuple(window)], label[tuple(window)]
        return data


class RandRotate90:
    def __init__(self, prob=0.5, spatial_axes=(0, 2)):
        self.prob, self.axes = prob, spatial_axes

    def __call__(self, data):
        if random.random() < self.prob:
            k = random.randint(1, 3)
            for key in ("image", "label"):
                data[key] = torch.rot90(data[key], k, [a + 1 for a in self.axes])
        return data


class RandFlip:
    def __init__(self, prob=0.5):
        self.prob = prob

    def __call__(self, data):
        for axis in (1, 2, 3):
            if random.random() < self.prob:
                data["image"] = data["image"].flip(axis)
                data["label"] = data["label"].flip(axis)
        return data


class VolumeDataset(Dataset):
    def __init__(self, volumes, transforms):
        self.volumes, self.transforms = volumes, transforms

    def __len__(self):
        return len(self.volumes)

    def __getitem__(self, index):
        image, label = self.volumes[index]
        data = {"image": torch.from_numpy(image)[None], "label": torch.from_numpy(label)[None].float()}
        for transform in self.transforms:
            data = transform(data)
        return data


def block(cin, cout):
    return nn.Sequential(nn.Conv3d(cin, cout, 3, padding=1), nn.InstanceNorm3d(cout, affine=True), nn.PReLU())


class UNet(nn.Module):
    def __init__(self, channels=(8, 16, 32)):
        super().__init__()
        a, b, c = channels
        self.down1, self.down2, self.bottom = block(1, a), block(a, b), block(b, c)
        self.up2, self.up1 = nn.ConvTranspose3d(c, b, 2, stride=2), nn.ConvTranspose3d(b, a, 2, stride=2)
        self.dec2, self.dec1 = block(2 * b, b), block(2 * a, a)
        self.out = nn.Conv3d(a, 1, 1)

    def forward(self, x):
        x1 = self.down1(x)
        x2 = self.down2(F.max_pool3d(x1, 2))
        x3 = self.bottom(F.max_pool3d(x2, 2))
        y2 = self.dec2(torch.cat([x2, self.up2(x3)], dim=1))
        y1 = self.dec1(torch.cat([x1, self.up1(y2)], dim=1))
        return self.out(y1)


class DiceLoss(nn.Module):
    def __init__(self, sigmoid=False, smooth=1e-5):
        super().__init__()
        self.sigmoid, self.smooth = sigmoid, smooth

    def forward(self, input, target):
        if self.sigmoid:
            input = torch.sigmoid(input)
        dims = list(range(2, input.ndim))
        intersection = (input * target).sum(dims)
        denominator = input.sum(dims) + target.sum(dims)
        return (1 - (2 * intersection + self.smooth) / (denominator + self.smooth)).mean()


def sliding_window_inference(inputs, roi_size, predictor, overlap=0.25):
    """Predictions on overlapping windows, averaged where windows overlap."""
    shape = inputs.shape[2:]
    output, count = torch.zeros_like(inputs), torch.zeros_like(inputs)
    starts = []
    for size, roi in zip(shape, roi_size):
        step = int(roi * (1 - overlap))
        places = list(range(0, size - roi, step)) + [size - roi]
        starts.append(places)
    for i in starts[0]:
        for j in starts[1]:
            for k in starts[2]:
                at = (..., *(slice(s, s + r) for s, r in zip((i, j, k), roi_size)))
                output[at] += predictor(inputs[at])
                count[at] += 1
    return output / count


class DiceMetric:
    def __init__(self):
        self.values = []

    def __call__(self, y_pred, y):
        for p, t in zip(y_pred, y):
            self.values.append((2 * (p * t).sum() / (p.sum() + t.sum()).clamp(min=1)).item())

    def aggregate(self):
        return float(np.mean(self.values))

    def reset(self):
        self.values = []


def main():
    set_determinism(SEED)
    rng = np.random.default_rng(7)
    volumes = [create_test_image_3d(SIZE, rng) for _ in range(30)]
    train_transforms = [ScaleIntensity(), RandCropByPosNegLabel(ROI), RandRotate90(), RandFlip()]
    val_transforms = [ScaleIntensity()]
    train_ds = VolumeDataset(volumes[:-8], train_transforms)
    val_ds = VolumeDataset(volumes[-8:], val_transforms)
    train_loader = DataLoader(train_ds, batch_size=2, shuffle=True)
    val_loader = DataLoader(val_ds, batch_size=1)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = UNet().to(device)
    loss_function = DiceLoss(sigmoid=True)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    dice_metric = DiceMetric()

    for epoch in range(EPOCHS):
        model.train()
        epoch_loss = 0
        for batch_data in train_loader:
            inputs, labels = batch_data["image"].to(device), batch_data["label"].to(device)
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = loss_function(outputs, labels)
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item()
        print(f"epoch {epoch + 1} average loss: {epoch_loss / len(train_loader):.4f}")

        if (epoch + 1) % VAL_INTERVAL == 0:
            model.eval()
            with torch.no_grad():
                for val_data in val_loader:
                    val_inputs, val_labels = val_data["image"].to(device), val_data["label"].to(device)
                    val_outputs = sliding_window_inference(val_inputs, ROI, model)
                    val_outputs = (torch.sigmoid(val_outputs) > 0.5).float()
                    dice_metric(y_pred=val_outputs, y=val_labels)
            metric = dice_metric.aggregate()
            dice_metric.reset()
            print(f"current epoch: {epoch + 1} current mean dice: {metric:.4f}")
    print(f"FINAL mean_dice={metric:.4f}")


if __name__ == "__main__":
    main()
