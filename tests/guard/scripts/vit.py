"""A vision transformer: class token, dropout, AdamW with groups, warm-up and cosine by step, clipping, label smoothing."""

import copy
import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

EPOCHS = 10


class ViT(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 2, 2)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 17, dim))
        self.drop = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(dim, 4, 96, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        x = self.drop(x + self.pos)
        return self.head(self.norm(self.blocks(x))[:, 0])


def main():
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16 - 0.3, torch.tensor(y))
    train_set, val_set = random_split(data, [1500, 297], generator=torch.Generator().manual_seed(1))
    train_loader = DataLoader(train_set, 64, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, 64)
    model = ViT()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=2e-3
    )
    total, warmup = EPOCHS * len(train_loader), len(train_loader)

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    best, best_state = 0.0, None
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in train_loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.inference_mode():
            hits = sum((model(a).argmax(1) == b).sum().item() for a, b in val_loader)
        acc = hits / len(val_set)
        print(f"epoch {epoch}: val accuracy {acc:.4f}")
        if acc >= best:
            best, best_state = acc, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_state)
    torch.save(best_state, "vit.pt")


if __name__ == "__main__":
    main()
