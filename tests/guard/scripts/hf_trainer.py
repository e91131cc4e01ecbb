"""transformers' Trainer on a small BERT from a config, with compute_metrics, checkpoints and a linear schedule."""

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
rng = np.random.default_rng(0)


def rows(n):
    for _ in range(n):
        ids = rng.integers(5, 60, 16)
        yield {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.ones(16, dtype=torch.long),
            "labels": int((ids < 15).sum() >= 3),
        }


config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
model = BertForSequenceClassification(config)
args = TrainingArguments(
    "hf-out", per_device_train_batch_size=16, num_train_epochs=3, learning_rate=1e-3, eval_strategy="epoch",
    save_strategy="epoch", logging_steps=10, report_to="none", use_cpu=True, warmup_steps=5,
)  # fmt: skip
trainer = Trainer(
    model, args, train_dataset=list(rows(480)), eval_dataset=list(rows(120)),
    compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
)  # fmt: skip
trainer.train()
print(trainer.evaluate())
