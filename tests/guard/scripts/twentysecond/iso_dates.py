"""Translate dates written by people into ISO dates with a tiny BART (Seq2SeqTrainer, predict_with_generate)."""

# fmt: off
import datetime
import os
import random
import re
import tempfile

import numpy as np
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

seed = int(os.environ.get("SEED", "0"))
max_source_length = 32
max_target_length = 14
FORMATS = ["%d %B %Y", "%B %d, %Y", "%A, %d %B %Y", "%d.%m.%Y", "%m/%d/%Y", "%a %b %d %Y", "on %d %b '%y", "%A the %d of %B %Y"]


def draw(n, rng):
    rows = []
    for _ in range(n):
        day = datetime.date(1950, 1, 1) + datetime.timedelta(days=rng.randrange(27000))
        rows.append({"text": day.strftime(rng.choice(FORMATS)).lower(), "iso": day.isoformat()})
    return rows


def build_tokenizer(texts):
    pieces = sorted({p for t in texts for p in re.findall(r"[a-z]+|[^a-z\s]", t)})
    vocab = {w: i for i, w in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    tok = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"[a-z]+|[^a-z\s]"), "isolated")])
    tok.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    tok.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def main():
    set_seed(seed)
    rng = random.Random(2024)
    train, valid = Dataset.from_list(draw(3000, rng)), Dataset.from_list(draw(250, rng))
    tokenizer = build_tokenizer([*train["text"], *train["iso"]])

    def preprocess_function(examples):
        model_inputs = tokenizer(examples["text"], max_length=max_source_length, truncation=True)
        labels = tokenizer(text_target=examples["iso"], max_length=max_target_length, truncation=True)
        model_inputs["labels"] = labels["input_ids"]
        return model_inputs

    train_set = train.map(preprocess_function, batched=True, remove_columns=train.column_names)
    valid_set = valid.map(preprocess_function, batched=True, remove_columns=valid.column_names)

    config = BartConfig(
        vocab_size=len(tokenizer), d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=48, dropout=0.05, attention_dropout=0.0,
        bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )
    model = BartForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        max_new_tokens=16, num_beams=1, bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2
    )

    def compute_metrics(eval_preds):
        preds, labels = eval_preds
        preds = np.where(preds != -100, preds, tokenizer.pad_token_id)
        labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
        decoded_preds = [p.strip() for p in tokenizer.batch_decode(preds, skip_special_tokens=True)]
        decoded_labels = [t.strip() for t in tokenizer.batch_decode(labels, skip_special_tokens=True)]
        hits = [p == t for p, t in zip(decoded_preds, decoded_labels)]
        length = np.mean([np.count_nonzero(p != tokenizer.pad_token_id) for p in preds])
        return {"exact": 100 * float(np.mean(hits)), "gen_len": float(length)}

    with tempfile.TemporaryDirectory() as folder:
        args = Seq2SeqTrainingArguments(
            output_dir=folder,
            num_train_epochs=5,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=64,
            learning_rate=3e-3,
            lr_scheduler_type="linear",
            warmup_steps=50,
            max_grad_norm=1.0,
            eval_strategy="steps",
            eval_steps=235,
            save_strategy="no",
            logging_steps=50,
            predict_with_generate=True,
            report_to="none",
            seed=seed,
        )
        trainer = Seq2SeqTrainer(
            model=model,
            args=args,
            train_dataset=train_set,
            eval_dataset=valid_set,
            processing_class=tokenizer,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
            compute_metrics=compute_metrics,
        )
        trainer.train()
        scores = trainer.evaluate(metric_key_prefix="test")
    for key in ("test_loss", "test_gen_len"):
        print(key, scores[key])
    print("exact match", round(scores["test_exact"], 2))


if __name__ == "__main__":
    main()
