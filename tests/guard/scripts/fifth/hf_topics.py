"""Text classification with transformers' Trainer: which topic of Python's documentation does a sentence come from?"""

import re
from pydoc_data.topics import topics

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

LABELS = ["import", "debugger", "formatstrings", "specialnames", "compound"]
MAX_LENGTH = 24
SEED = 0


def read_split():
    texts, labels = [], []
    for name in LABELS:
        for sentence in re.split(r"\.\s|\n\s*\n", topics[name]):
            words = re.findall(r"[A-Za-z_]+|[^\sA-Za-z_]", sentence)
            if len(words) >= 5:
                texts.append([w.lower() for w in words])
                labels.append(name)
    order = np.random.RandomState(13).permutation(len(texts))
    cut = int(0.8 * len(order))
    return [([texts[i] for i in part], [labels[i] for i in part]) for part in (order[:cut], order[cut:])]


class Vocab:
    def __init__(self, texts, min_count=2):
        counts = {}
        for text in texts:
            for w in text:
                counts[w] = counts.get(w, 0) + 1
        self.ids = {w: i + 3 for i, w in enumerate(sorted(w for w, c in counts.items() if c >= min_count))}

    def __call__(self, text):
        ids = ([2] + [self.ids.get(w, 1) for w in text])[:MAX_LENGTH]
        mask = [1] * len(ids) + [0] * (MAX_LENGTH - len(ids))
        return {"input_ids": ids + [0] * (MAX_LENGTH - len(ids)), "attention_mask": mask}


class TopicDataset(Dataset):
    def __init__(self, texts, labels, vocab, label2id):
        self.encodings = [vocab(t) for t in texts]
        self.labels = [label2id[name] for name in labels]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        item = {k: torch.tensor(v) for k, v in self.encodings[idx].items()}
        item["labels"] = torch.tensor(self.labels[idx])
        return item


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


def main():
    set_seed(SEED)
    (train_texts, train_labels), (test_texts, test_labels) = read_split()
    vocab = Vocab(train_texts)
    label2id = {name: i for i, name in enumerate(sorted(set(train_labels)))}
    train_set = TopicDataset(train_texts, train_labels, vocab, label2id)
    test_set = TopicDataset(test_texts, test_labels, vocab, label2id)
    config = BertConfig(
        vocab_size=len(vocab.ids) + 3,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=MAX_LENGTH,
        num_labels=len(label2id),
        pad_token_id=0,
    )
    model = BertForSequenceClassification(config)
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=4,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=128,
        learning_rate=2e-3,
        warmup_steps=10,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=50,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = Trainer(
        model=model, args=args, train_dataset=train_set, eval_dataset=test_set, compute_metrics=compute_metrics
    )
    trainer.train()
    print(f"FINAL accuracy={trainer.evaluate()['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()
