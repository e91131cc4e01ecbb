"""Handwritten digits with a small ViT in a plain loop under Accelerate: accumulation, a schedule, gathered metrics, the best weights."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification, get_cosine_schedule_with_warmup

SEED = 0
EPOCHS = 8
ACCUMULATE = 2


def make_loaders():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    train, rest = train_test_split(range(len(labels)), test_size=0.3, random_state=0, stratify=labels)
    mean, std = images[train].mean(), images[train].std()
    images = (images - mean) / std
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size=16, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(images[rest], labels[rest]), batch_size=128),
    )


def make_model():
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, num_labels=10, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return ViTForImageClassification(config)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    right = total = 0
    for images, labels in loader:
        predictions = model(pixel_values=images).logits.argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        right += (predictions == labels).sum().item()
        total += len(labels)
    return right / total


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    set_seed(SEED)
    train_loader, test_loader = make_loaders()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    steps = EPOCHS * len(train_loader) // ACCUMULATE
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=20, num_training_steps=steps)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                outputs = model(pixel_values=images, labels=labels)
                accelerator.backward(outputs.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(
            f"epoch {epoch + 1} loss {outputs.loss.item():.4f} accuracy {evaluate(accelerator, model, test_loader):.4f}"
        )
    print(f"FINAL accuracy={evaluate(accelerator, model, test_loader):.4f}")


if __name__ == "__main__":
    main()
