"""A small ResNet on scikit-learn's 8x8 digits, in the style of the image-classification example (with_transform)."""

# fmt: off
import os
import tempfile

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage
from sklearn.datasets import load_digits
from torchvision.transforms import Compose, Normalize, RandomAffine, Resize, ToTensor
from transformers import (
    EarlyStoppingCallback,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def get_data():
    bunch = load_digits()
    pictures = [PILImage.fromarray((im * 15.9).astype(np.uint8)) for im in bunch.images]
    features = Features({"image": Image(), "label": ClassLabel(names=NAMES)})
    ds = Dataset.from_dict({"image": pictures, "label": [NAMES[t] for t in bunch.target]}, features=features)
    first = ds.train_test_split(test_size=0.3, seed=1, stratify_by_column="label")
    second = first["test"].train_test_split(test_size=0.5, seed=1, stratify_by_column="label")
    return first["train"], second["train"], second["test"]


def collate_fn(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    labels = torch.tensor([example["label"] for example in examples])
    return {"pixel_values": pixel_values, "labels": labels}


def compute_metrics(eval_pred):
    predictions = np.argmax(eval_pred.predictions, axis=1)
    return {"accuracy": float((predictions == eval_pred.label_ids).mean())}


def main():
    set_seed(int(os.environ.get("SEED", 0)))
    train_ds, val_ds, test_ds = get_data()

    pixels = np.stack([np.asarray(im) for im in train_ds["image"]]) / 255
    normalize = Normalize(mean=[float(pixels.mean())], std=[float(pixels.std())])
    train_transforms = Compose([Resize((32, 32)), RandomAffine(degrees=10, translate=(0.08, 0.08)), ToTensor(), normalize])
    val_transforms = Compose([Resize((32, 32)), ToTensor(), normalize])

    def preprocess_train(batch):
        batch["pixel_values"] = [train_transforms(image.convert("L")) for image in batch["image"]]
        return batch

    def preprocess_val(batch):
        batch["pixel_values"] = [val_transforms(image.convert("L")) for image in batch["image"]]
        return batch

    train_ds = train_ds.with_transform(preprocess_train)
    val_ds = val_ds.with_transform(preprocess_val)
    test_ds = test_ds.with_transform(preprocess_val)

    config = ResNetConfig(
        num_channels=1, embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 1, 1], layer_type="basic",
        num_labels=10, id2label=dict(enumerate(NAMES)), label2id={n: i for i, n in enumerate(NAMES)},
    )
    model = ResNetForImageClassification(config)

    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            remove_unused_columns=False,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=128,
            num_train_epochs=8,
            weight_decay=0.05,
            label_smoothing_factor=0.05,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            greater_is_better=True,
            report_to="none",
            use_cpu=True,
            seed=int(os.environ.get("SEED", 0)),
        )
        trainer = Trainer(
            model=model,
            args=args,
            data_collator=collate_fn,
            train_dataset=train_ds,
            eval_dataset=val_ds,
            compute_metrics=compute_metrics,
            callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
        )
        trainer.train()
        metrics = trainer.predict(test_ds).metrics
    print("accuracy", round(metrics["test_accuracy"], 4))


if __name__ == "__main__":
    main()
