"""Regression of the diabetes progression with an own network in the Trainer: numbers and a category, an optimiser and a schedule of its own."""

import numpy as np
import torch
from datasets import Dataset
from sklearn.datasets import load_diabetes
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

SEED = 0
EPOCHS = 30
BATCH = 16


class ProgressionNet(nn.Module):
    def __init__(self, n_numbers):
        super().__init__()
        self.sex = nn.Embedding(2, 4)
        self.body = nn.Sequential(nn.Linear(n_numbers + 4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, numbers, sex=None, labels=None):
        which = self.sex(sex) if sex is not None else torch.zeros(len(numbers), 4)
        predicted = self.body(torch.cat([numbers, which], dim=1)).squeeze(-1)
        loss = nn.functional.mse_loss(predicted, labels) if labels is not None else None
        return {"loss": loss, "logits": predicted} if loss is not None else {"logits": predicted}


def load():
    table = load_diabetes(scaled=False)
    x, y = table.data.astype(np.float32), table.target.astype(np.float32)
    train, test = train_test_split(np.arange(len(y)), test_size=0.25, random_state=3)
    sex = (x[:, 1] > 1).astype(int)
    numbers = np.delete(x, 1, axis=1)
    mean, std = numbers[train].mean(axis=0), numbers[train].std(axis=0)
    numbers = (numbers - mean) / std
    scale = (float(y[train].mean()), float(y[train].std()))
    targets = (y - scale[0]) / scale[1]

    def rows(which):
        return Dataset.from_dict(
            {"numbers": numbers[which].tolist(), "sex": sex[which].tolist(), "labels": targets[which].tolist()}
        )

    return rows(train), rows(test), scale


def make_trainer():
    set_seed(SEED)
    train_set, test_set, (mean, std) = load()
    model = ProgressionNet(len(train_set[0]["numbers"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    steps = EPOCHS * -(-len(train_set) // BATCH)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    def compute_metrics(eval_pred):
        predicted, wanted = eval_pred.predictions * std + mean, eval_pred.label_ids * std + mean
        return {"r2": r2_score(wanted, predicted), "mae": float(np.abs(wanted - predicted).mean())}

    args = TrainingArguments(
        output_dir="diabetes-out",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=64,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=50,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    return Trainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=test_set,
        compute_metrics=compute_metrics,
        optimizers=(optimizer, scheduler),
    )


def main():
    trainer = make_trainer()
    trainer.train()
    print(f"FINAL r2={trainer.evaluate()['eval_r2']:.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
