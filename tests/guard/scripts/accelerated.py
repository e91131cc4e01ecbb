"""An Accelerate loop: prepare, accumulate, clipping through the accelerator, gathered metrics, a distilled student."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
train_loader = DataLoader(TensorDataset(x[:1400], y[:1400]), 32, shuffle=True)
val_loader = DataLoader(TensorDataset(x[1400:], y[1400:]), 64)
teacher = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).eval()
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8 * len(train_loader))
model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, val_loader, scheduler
)
for epoch in range(8):
    model.train()
    for a, b in train_loader:
        with accelerator.accumulate(model):
            with torch.no_grad():
                soft = teacher(a)
            out = model(a)
            loss = F.cross_entropy(out, b) + 0.1 * F.kl_div(out.log_softmax(1), soft.softmax(1), reduction="batchmean")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    hits = 0
    for a, b in val_loader:
        with torch.no_grad():
            out = model(a)
        out, b = accelerator.gather_for_metrics((out, b))
        hits += (out.argmax(1) == b).sum().item()
    accelerator.print(f"epoch {epoch} accuracy {hits / 397:.3f}")
