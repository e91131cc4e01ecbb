# Extractive question answering, after run_qa.py: the context is a signature with the first line of its docstring,
# and the answer is a span of it. The functions are those of numpy, scipy, scikit-learn, torch and the standard library.
# fmt: off
import importlib
import inspect
import os
import random

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

seed = int(os.environ.get("SEED", 0))
max_length = 72
MODULES = ["numpy", "numpy.linalg", "scipy.signal", "scipy.stats", "scipy.linalg", "shutil", "textwrap", "inspect", "random", "statistics",
           "sklearn.metrics", "sklearn.utils", "torch.nn.functional"]


def load_examples():
    rows = []
    for name in MODULES:
        module = importlib.import_module(name)
        for key, f in sorted(vars(module).items()):
            if key.startswith("_") or not callable(f):
                continue
            try:
                parameters = list(inspect.signature(f).parameters.values())
            except (ValueError, TypeError):
                continue
            parts = []
            for p in parameters[:6]:
                has_default = isinstance(p.default, (int, float, str, type(None)))
                parts.append(f"{p.name}={p.default}" if has_default else p.name)
            doc = (inspect.getdoc(f) or "").split("\n")[0][:60].strip()
            if len(parts) < 2 or not doc:
                continue
            context = f"{doc} def {key}({', '.join(parts)})"
            base = context.rindex(" def ") + 5

            def add(question, text, start):
                rows.append({"question": question, "context": context, "answer": text, "start": start})

            add("what is the function called", key, base)
            first = base + len(key) + 1
            add("which argument is the first", parameters[0].name, first)
            last = context.rindex(parts[-1])
            add("which argument is the last", parameters[min(5, len(parameters) - 1)].name, last)
            if "=" in parts[-1] and parts[-1].split("=", 1)[1].strip():
                text = parts[-1].split("=", 1)[1]
                add("what is the default of the last argument", text, len(context) - 1 - len(text))
            add("what does it do first", doc.split()[0], 0)
    return rows


def build_tokenizer(texts):
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.normalizer = normalizers.Lowercase()
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    tok.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=1500, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"]))
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


class Printer(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']}", flush=True)


if __name__ == "__main__":
    set_seed(seed)
    rows = load_examples()
    contexts = sorted({r["context"] for r in rows})
    random.Random(13).shuffle(contexts)
    held_out = set(contexts[: len(contexts) // 6])
    train = Dataset.from_list([r for r in rows if r["context"] not in held_out])
    test = Dataset.from_list([r for r in rows if r["context"] in held_out])
    tokenizer = build_tokenizer([*train["question"], *train["context"]])

    def encode(batch):
        return tokenizer(
            batch["question"], batch["context"], truncation="only_second", max_length=max_length, padding="max_length", return_offsets_mapping=True
        )

    def prepare_train(batch):
        enc = encode(batch)
        offset_mapping = enc.pop("offset_mapping")
        starts, ends = [], []
        for i, offsets in enumerate(offset_mapping):
            start_char = batch["start"][i]
            end_char = start_char + len(batch["answer"][i])
            sequence_ids = enc.sequence_ids(i)
            inside = [k for k, s in enumerate(sequence_ids) if s == 1 and offsets[k][0] < end_char and offsets[k][1] > start_char]
            starts.append(inside[0] if inside else 0)
            ends.append(inside[-1] if inside else 0)
        enc["start_positions"] = starts
        enc["end_positions"] = ends
        return enc

    def prepare_test(batch):
        enc = encode(batch)
        for i in range(len(enc["input_ids"])):
            ids = enc.sequence_ids(i)
            enc["offset_mapping"][i] = [o if ids[k] == 1 else None for k, o in enumerate(enc["offset_mapping"][i])]
        return enc

    train_features = train.map(prepare_train, batched=True, remove_columns=train.column_names)
    test_features = test.map(prepare_test, batched=True, remove_columns=test.column_names)

    model = BertForQuestionAnswering(
        BertConfig(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
                   max_position_embeddings=max_length)
    )
    training_args = TrainingArguments(
        output_dir="runs/signature_qa", learning_rate=2e-3, num_train_epochs=3, per_device_train_batch_size=32, per_device_eval_batch_size=64,
        lr_scheduler_type="cosine", warmup_steps=30, logging_steps=40, save_strategy="no", report_to=[], seed=seed, disable_tqdm=True,
    )
    trainer = Trainer(model, training_args, train_dataset=train_features, data_collator=default_data_collator, callbacks=[Printer()])
    trainer.train()

    output = trainer.predict(test_features.remove_columns("offset_mapping"))
    start_logits, end_logits = output.predictions
    exact = []
    for i, row in enumerate(test):
        offsets = test_features[i]["offset_mapping"]
        best, text = -1e9, ""
        for s in np.argsort(start_logits[i])[-8:]:
            for e in np.argsort(end_logits[i])[-8:]:
                if offsets[s] is None or offsets[e] is None or e < s or e - s > 15:
                    continue
                if start_logits[i][s] + end_logits[i][e] > best:
                    best = start_logits[i][s] + end_logits[i][e]
                    text = row["context"][offsets[s][0] : offsets[e][1]]
        exact.append(text == row["answer"])
    print(f"exact match {np.mean(exact):.4f}")
