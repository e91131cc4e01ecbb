"""The gates on a `Trainer` of transformers: `python examples/hf_trainer.py` checks it, then trains.

Which half of the vocabulary is a sequence drawn from? A tiny BERT from its config class, so that nothing is downloaded.
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import trainworthy

OUT = tempfile.mkdtemp()


def sequences(n: int, seed: int) -> list[dict]:
    """`n` sequences of 12 tokens: of class 0 mostly from the lower half, of class 1 mostly from the upper."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (n,), generator=draws)
    lower = torch.rand(n, 12, generator=draws) < torch.where(labels == 0, 0.8, 0.2)[:, None]
    tokens = torch.where(lower, 5, 25) + torch.randint(20, (n, 12), generator=draws)
    return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


def make_trainer() -> Trainer:
    """A new model and a new trainer at every call."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    args = TrainingArguments(
        OUT, per_device_train_batch_size=32, num_train_epochs=4, learning_rate=2e-3, report_to=[], use_cpu=True,
        logging_steps=50, save_strategy="no",
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    return Trainer(model=model, args=args, train_dataset=sequences(1024, 1), eval_dataset=sequences(256, 2))


if __name__ == "__main__":
    trainworthy.check(make_trainer)
    trainer = make_trainer()
    trainer.train()
    print(trainer.evaluate())
