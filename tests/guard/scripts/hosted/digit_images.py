"""Classify pictures of digits with a small ResNet from a config: an image processor, torchvision's transforms, `with_transform`."""

import numpy as np
import torch
from datasets import ClassLabel, Dataset
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.transforms import Compose, Normalize, RandomAffine, Resize, ToTensor
from transformers import (
    DefaultDataCollator,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
    ViTImageProcessor,
    set_seed,
)

SEED = 0
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
processor = ViTImageProcessor(size={"height": 16, "width": 16}, image_mean=[0.3] * 3, image_std=[0.37] * 3)


def load():
    digits = load_digits()
    pictures = [Image.fromarray((v / 16 * 255).astype(np.uint8)).convert("RGB") for v in digits.images]
    data = Dataset.from_dict({"image": pictures, "label": [NAMES[t] for t in digits.target]})
    data = data.cast_column("label", ClassLabel(names=NAMES))
    return data.train_test_split(test_size=0.3, seed=5, stratify_by_column="label")


size = (processor.size["height"], processor.size["width"])
normalize = Normalize(mean=processor.image_mean, std=processor.image_std)
augment = Compose([Resize(size), RandomAffine(degrees=10, translate=(0.08, 0.08)), ToTensor(), normalize])
plain = Compose([Resize(size), ToTensor(), normalize])


def train_transforms(batch):
    batch["pixel_values"] = [augment(image.convert("RGB")) for image in batch["image"]]
    del batch["image"]
    return batch


def eval_transforms(batch):
    batch["pixel_values"] = [plain(image.convert("RGB")) for image in batch["image"]]
    del batch["image"]
    return batch


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": float((np.argmax(logits, axis=1) == labels).mean())}


def make_model():
    config = ResNetConfig(
        num_channels=3, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", downsample_in_first_stage=False,
        num_labels=10, id2label=dict(enumerate(NAMES)), label2id={n: i for i, n in enumerate(NAMES)},
    )  # fmt: skip
    return ResNetForImageClassification(config)


def make_trainer():
    set_seed(SEED)
    data = load()
    train_set = data["train"].with_transform(train_transforms)
    eval_set = data["test"].with_transform(eval_transforms)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    args = TrainingArguments(
        output_dir="digits-out",
        remove_unused_columns=False,
        num_train_epochs=4,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        warmup_steps=10,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=20,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    steps = len(data["train"]) // 32 * 4
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 8)
    return Trainer(
        model=model,
        args=args,
        data_collator=DefaultDataCollator(),
        train_dataset=train_set,
        eval_dataset=eval_set,
        compute_metrics=compute_metrics,
        optimizers=(optimizer, scheduler),
    )


def main():
    trainer = make_trainer()
    trainer.train()
    print(f"FINAL accuracy={trainer.evaluate()['eval_accuracy']:.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
