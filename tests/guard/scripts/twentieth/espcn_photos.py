"""Super-resolution of photographs with an efficient sub-pixel convolutional network, as in pytorch/examples."""

import argparse
import random
from math import log10

import numpy as np
import torch
import torch.nn as nn
import torch.nn.init as init
import torch.optim as optim
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description="PyTorch Super Res Example")
parser.add_argument("--upscale_factor", type=int, default=2, help="super resolution upscale factor")
parser.add_argument("--batchSize", type=int, default=16, help="training batch size")
parser.add_argument("--testBatchSize", type=int, default=8, help="testing batch size")
parser.add_argument("--nEpochs", type=int, default=16, help="number of epochs to train for")
parser.add_argument("--lr", type=float, default=2e-3, help="Learning Rate. Default=0.002")
parser.add_argument("--threads", type=int, default=0, help="number of threads for data loader to use")
parser.add_argument("--seed", type=int, default=0, help="random seed to use")
opt = parser.parse_args()
print(opt)

random.seed(opt.seed)
torch.manual_seed(opt.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def to_tensor(img):
    return torch.from_numpy(np.asarray(img, dtype=np.float32) / 255.0).unsqueeze(0)


def tiles(photo, columns, size=56):
    """Square tiles of a photo's Y channel."""
    y, _, _ = Image.fromarray(photo).convert("YCbCr").split()
    for top in range(0, y.height - size + 1, size):
        for left in range(0, y.width - size + 1, size):
            if left // size in columns:
                yield y.crop((left, top, left + size, top + size))


class TileDataset(Dataset):
    def __init__(self, images, crop_size, upscale_factor, augment=False):
        self.images = images
        self.crop_size = crop_size - crop_size % upscale_factor
        self.upscale_factor = upscale_factor
        self.augment = augment

    def __getitem__(self, index):
        target = self.images[index]
        margin = target.width - self.crop_size
        left, top = (random.randint(0, margin), random.randint(0, margin)) if self.augment else (0, 0)
        target = target.crop((left, top, left + self.crop_size, top + self.crop_size))
        small = self.crop_size // self.upscale_factor
        input = target.resize((small, small), Image.BICUBIC)
        input, target = to_tensor(input), to_tensor(target)
        if self.augment and random.random() < 0.5:
            input, target = input.flip(-1), target.flip(-1)
        return input, target

    def __len__(self):
        return len(self.images)


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 32, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(32, 32, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(32, 16, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(16, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        self._initialize_weights()

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        x = self.pixel_shuffle(self.conv4(x))
        return x

    def _initialize_weights(self):
        init.orthogonal_(self.conv1.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv2.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv3.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)


print("===> Loading datasets")
photos = load_sample_images().images
train_set = TileDataset([t for p in photos for t in tiles(p, range(8))], 48, opt.upscale_factor, augment=True)
test_set = TileDataset([t for p in photos for t in tiles(p, range(8, 11))], 56, opt.upscale_factor)
training_data_loader = DataLoader(train_set, num_workers=opt.threads, batch_size=opt.batchSize, shuffle=True)
testing_data_loader = DataLoader(test_set, num_workers=opt.threads, batch_size=opt.testBatchSize, shuffle=False)

print("===> Building model")
model = Net(upscale_factor=opt.upscale_factor).to(device)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=opt.lr)


def train(epoch):
    epoch_loss = 0
    for batch in training_data_loader:
        input, target = batch[0].to(device), batch[1].to(device)
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
    print(f"===> Epoch {epoch} Complete: Avg. Loss: {epoch_loss / len(training_data_loader):.4f}")


def test():
    avg_psnr = 0
    with torch.no_grad():
        for batch in testing_data_loader:
            input, target = batch[0].to(device), batch[1].to(device)
            prediction = model(input)
            mse = criterion(prediction, target)
            psnr = 10 * log10(1 / mse.item())
            avg_psnr += psnr
    print(f"===> Avg. PSNR: {avg_psnr / len(testing_data_loader):.4f} dB")
    return avg_psnr / len(testing_data_loader)


for epoch in range(1, opt.nEpochs + 1):
    train(epoch)
    psnr = test()
print(f"FINAL psnr={psnr:.2f}")
