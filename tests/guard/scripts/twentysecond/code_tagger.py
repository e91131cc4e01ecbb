"""Token classification on Python source: which tokens are a called function, a module, an argument or a definition?

The statements come from the standard library. Words are Python's own tokens. Only the first of a word's pieces has a label.
"""

# fmt: off
import io
import keyword
import os
import sysconfig
import tempfile
import tokenize
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.data.data_collator import DataCollatorForTokenClassification
from transformers.trainer_utils import set_seed

SEED = int(os.environ.get("SEED", 0))
TRAIN_FILES = ["argparse", "ast", "calendar", "cmd", "csv", "dataclasses", "difflib", "dis", "ftplib", "gzip", "imaplib"]
TEST_FILES = ["locale", "pickle", "shutil", "textwrap"]
NAMES = ["O", "B-ARG", "B-CALL", "I-CALL", "B-DEF", "B-MOD", "I-MOD"]
label2id = {name: i for i, name in enumerate(NAMES)}
id2label = dict(enumerate(NAMES))


def statements(module):
    source = (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text()
    words = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            if 4 <= len(words) <= 32:
                yield words
            words = []
        elif token.type == tokenize.STRING:
            words.append("<str>")
        elif token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
            words.append(token.string)


def annotate(words):
    tags = ["O"] * len(words)
    head, depth, i = words[0], 0, 0
    while i < len(words):
        word = words[i]
        depth += (word in "([{") - (word in ")]}")
        if i and words[i - 1] in ("def", "class"):
            tags[i] = "B-DEF"
        elif head == "def" and depth == 1 and word.isidentifier() and words[i - 1] in ("(", ",", "*", "**"):
            tags[i] = "B-ARG"
        elif word.isidentifier() and not keyword.iskeyword(word):
            j = i
            while j + 2 < len(words) and words[j + 1] == "." and words[j + 2].isidentifier():
                j += 2
            is_module = head in ("import", "from") and words[i - 1] in ("import", "from") and not (head == "from" and i > 1 and "import" in words[:i])
            is_call = j + 1 < len(words) and words[j + 1] == "("
            if is_module or is_call:
                kind = "MOD" if is_module else "CALL"
                tags[i : j + 1] = [f"B-{kind}"] + [f"I-{kind}"] * (j - i)
            i = j
        i += 1
    return tags


def read(modules):
    rows = [words for m in modules for words in statements(m)]
    return Dataset.from_dict({"tokens": rows, "tags": [annotate(words) for words in rows]})


def make_tokenizer(lines):
    bpe = Tokenizer(models.BPE(unk_token="[UNK]", continuing_subword_prefix="##"))
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], continuing_subword_prefix="##")
    bpe.train_from_iterator((" ".join(words) for words in lines), trainer)
    bpe.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=64, **special)


def spans(tags):
    found, start = set(), None
    for i, tag in enumerate([*tags, "O"]):
        if start is not None and not tag.startswith("I-"):
            found.add((start, i, tags[start][2:]))
            start = None
        if tag.startswith("B-"):
            start = i
    return found


def compute_metrics(p):
    predictions = np.argmax(p.predictions, axis=2)
    right = n_predicted = n_gold = 0
    for row, labels in zip(predictions, p.label_ids):
        keep = labels != -100
        gold = spans([id2label[x] for x in labels[keep]])
        guess = spans([id2label[x] for x in row[keep]])
        right, n_predicted, n_gold = right + len(gold & guess), n_predicted + len(guess), n_gold + len(gold)
    return {"f1": 2 * right / max(1, n_predicted + n_gold)}


class WeightedTrainer(Trainer):  # most words are outside of any entity: that class gets a smaller weight
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.ones(len(NAMES), device=labels.device)
        weight[label2id["O"]] = 0.5
        loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), weight=weight)
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(SEED)
    raw = DatasetDict(train=read(TRAIN_FILES), test=read(TEST_FILES))
    tokenizer = make_tokenizer(raw["train"]["tokens"])

    def tokenize_and_align_labels(examples):
        encoded = tokenizer(examples["tokens"], is_split_into_words=True, truncation=True)
        encoded["labels"] = []
        for i, tags in enumerate(examples["tags"]):
            previous, labels = None, []
            for word in encoded.word_ids(batch_index=i):
                labels.append(-100 if word is None or word == previous else label2id[tags[word]])
                previous = word
            encoded["labels"].append(labels)
        return encoded

    data = raw.map(tokenize_and_align_labels, batched=True, remove_columns=raw["train"].column_names)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, num_labels=len(NAMES), id2label=id2label, label2id=label2id,
    )
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), learning_rate=2e-3, per_device_train_batch_size=16, per_device_eval_batch_size=64, num_train_epochs=2,
        warmup_steps=0.1, weight_decay=0.01, eval_strategy="epoch", save_strategy="no", logging_steps=25, report_to="none", seed=SEED,
    )
    trainer = WeightedTrainer(
        model=BertForTokenClassification(config), args=args, train_dataset=data["train"], eval_dataset=data["test"],
        data_collator=DataCollatorForTokenClassification(tokenizer), compute_metrics=compute_metrics,
    )
    trainer.train()
    print(f"entity f1 {trainer.evaluate()['eval_f1']:.4f}")


if __name__ == "__main__":
    main()
