"""Several traits of a Unicode character from its name: DistilBERT from a config, several labels a row, class weights, F1 over the traits."""

import unicodedata

import numpy as np
import torch
from datasets import Dataset
from sklearn.metrics import f1_score
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

SEED = 0
TRAITS = {
    "letter": str.isalpha,
    "upper": str.isupper,
    "lower": str.islower,
    "number": str.isnumeric,
    "mark": lambda c: unicodedata.combining(c) > 0,
    "composed": lambda c: unicodedata.decomposition(c) != "",
    "right_to_left": lambda c: unicodedata.bidirectional(c) in ("R", "AL"),
}


def read_rows():
    rows = []
    for i in np.random.default_rng(9).permutation(np.arange(0xA1, 0x3000)):
        name = unicodedata.name(chr(i), "")
        if name and "BRAILLE" not in name and len(rows) < 2000:
            rows.append({"text": name.lower(), "traits": [t for t, holds in TRAITS.items() if holds(chr(i))]})
    return rows


def load():
    names = list(TRAITS)
    table = {"text": [], "labels": []}
    for row in read_rows():
        vector = [0.0] * len(names)
        for trait in row["traits"]:
            vector[names.index(trait)] = 1.0
        table["text"].append(row["text"])
        table["labels"].append(vector)
    return Dataset.from_dict(table).train_test_split(test_size=0.25, seed=6)


def make_tokenizer(texts):
    inner = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.train_from_iterator(
        texts, trainers.WordLevelTrainer(vocab_size=1200, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    predicted = 1 / (1 + np.exp(-logits)) > 0.5
    return {
        "f1": f1_score(labels.astype(int), predicted.astype(int), average="macro", zero_division=0),
        "exact": float((predicted == (labels > 0)).all(axis=1).mean()),
    }


class TraitTrainer(Trainer):
    def __init__(self, *args, pos_weight, **kwargs):
        super().__init__(*args, **kwargs)
        self.pos_weight = pos_weight

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(outputs.logits, labels, pos_weight=self.pos_weight)
        return (loss, outputs) if return_outputs else loss


def make_trainer():
    set_seed(SEED)
    data = load()
    tokenizer = make_tokenizer(data["train"]["text"])
    tokenized = data.map(
        lambda batch: tokenizer(batch["text"], truncation=True, max_length=24), batched=True, remove_columns=["text"]
    )
    labels = np.array(data["train"]["labels"])
    share = labels.mean(axis=0)
    pos_weight = torch.tensor(np.sqrt((1 - share) / share), dtype=torch.float32)
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=48, n_layers=2, n_heads=4, hidden_dim=96, max_position_embeddings=32,
        num_labels=len(TRAITS), problem_type="multi_label_classification", pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir="traits-out",
        num_train_epochs=5,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=2e-3,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=25,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    return TraitTrainer(
        model=DistilBertForSequenceClassification(config),
        args=args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
        pos_weight=pos_weight,
    )


def main():
    trainer = make_trainer()
    trainer.train()
    scores = trainer.evaluate()
    print(f"exact {scores['eval_exact']:.4f}")
    print(f"FINAL f1={scores['eval_f1']:.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
