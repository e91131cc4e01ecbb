"""Two processes with DistributedDataParallel and DistributedSampler, as the PyTorch tutorial starts them with torchrun."""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)
        self.bn = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(16 * 9, 10)

    def forward(self, x):
        return self.fc(self.drop(F.max_pool2d(F.relu(self.bn(self.conv(x))), 2).flatten(1)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    train_set, val_set = TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 32, sampler=sampler)
    val_loader = DataLoader(val_set, 64)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for epoch in range(int(os.environ.get("EPOCHS", "12"))):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(())
        for a, b in train_loader:
            loss = F.cross_entropy(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        scheduler.step()
        dist.all_reduce(total)
        if rank == 0:
            model.eval()
            right = 0
            with torch.no_grad():
                for a, b in val_loader:
                    right += (model.module(a).argmax(1) == b).sum().item()
            print(f"epoch {epoch} loss {total / len(train_loader) / world:.3f} accuracy {right / len(val_set):.3f}")
            torch.save(model.module.state_dict(), "ddp.pt")
        dist.barrier()
    state = torch.load("ddp.pt")  # written by rank 0
    model.module.load_state_dict(state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
