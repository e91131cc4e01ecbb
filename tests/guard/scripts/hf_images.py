"""transformers' image classification example: a datasets.Dataset with with_transform, an own collator, a ViT from a config."""

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

set_seed(0)
x, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(x))
images = [Image.fromarray((v.reshape(8, 8) * 15).astype(np.uint8)) for v in x[order]]
data = Dataset.from_dict({"image": images, "label": y[order].tolist()}).train_test_split(0.2, seed=0)


def normalise(image):
    return (torch.tensor(np.array(image.convert("L")), dtype=torch.float32)[None] / 255 - 0.3) / 0.36


def train_transforms(examples):
    found = [normalise(image) for image in examples["image"]]
    shifts = torch.randint(-1, 2, (len(found), 2)).tolist()
    examples["pixel_values"] = [torch.roll(v, s, (1, 2)) for v, s in zip(found, shifts)]
    return examples


def val_transforms(examples):
    examples["pixel_values"] = [normalise(image) for image in examples["image"]]
    return examples


def collate_fn(examples):
    return {
        "pixel_values": torch.stack([example["pixel_values"] for example in examples]),
        "labels": torch.tensor([example["label"] for example in examples]),
    }


config = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=64, num_labels=10,
)  # fmt: skip
args = TrainingArguments(
    "vit-out", remove_unused_columns=False, per_device_train_batch_size=32, num_train_epochs=6, learning_rate=3e-3,
    eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="accuracy",
    logging_steps=10, report_to="none", use_cpu=True, seed=0,
)  # fmt: skip
trainer = Trainer(
    model=ViTForImageClassification(config), args=args,
    train_dataset=data["train"].with_transform(train_transforms), eval_dataset=data["test"].with_transform(val_transforms),
    data_collator=collate_fn,
    compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
)  # fmt: skip
trainer.train()
trainer.save_model()
print(trainer.evaluate())
