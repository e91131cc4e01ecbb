"""Write dates in ISO form: a small BART from a config, tokens are characters, Seq2SeqTrainer with generation."""

import datetime
import random

import numpy as np
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

SEED = 0
FORMS = ["%d %B %Y", "%B %d, %Y", "%b %d %y", "%d.%m.%Y", "%A, %d %b %Y"]


def load():
    draw = random.Random(4)
    days = draw.sample(range(datetime.date(1980, 1, 1).toordinal(), datetime.date(2020, 1, 1).toordinal()), 2400)
    rows = []
    for day in days:
        date = datetime.date.fromordinal(day)
        rows.append({"source": date.strftime(draw.choice(FORMS)), "target": date.isoformat()})
    return Dataset.from_list(rows[:2200]), Dataset.from_list(rows[2200:])


def make_tokenizer():
    symbols = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.,- "
    vocab = {s: i for i, s in enumerate(["<pad>", "<s>", "</s>", "<unk>", *symbols])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=40,
    )


def make_trainer():
    set_seed(SEED)
    train_rows, test_rows = load()
    tokenizer = make_tokenizer()

    def preprocess(batch):
        model_inputs = tokenizer(batch["source"], max_length=40, truncation=True)
        labels = tokenizer(text_target=batch["target"], max_length=16, truncation=True)
        model_inputs["labels"] = labels["input_ids"]
        return model_inputs

    train_set = train_rows.map(preprocess, batched=True, remove_columns=train_rows.column_names)
    test_set = test_rows.map(preprocess, batched=True, remove_columns=test_rows.column_names)
    config = BartConfig(
        vocab_size=len(tokenizer), d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=48, dropout=0.0,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id, forced_eos_token_id=None,
    )  # fmt: skip
    model = BartForConditionalGeneration(config)

    def compute_metrics(eval_preds):
        preds, labels = eval_preds
        preds = np.where(preds != -100, preds, tokenizer.pad_token_id)
        labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
        said = tokenizer.batch_decode(preds, skip_special_tokens=True)
        wanted = tokenizer.batch_decode(labels, skip_special_tokens=True)
        return {"exact_match": float(np.mean([s.strip() == w.strip() for s, w in zip(said, wanted)]))}

    args = Seq2SeqTrainingArguments(
        output_dir="dates-out",
        num_train_epochs=6,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=200,
        learning_rate=3e-3,
        warmup_steps=40,
        label_smoothing_factor=0.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="exact_match",
        greater_is_better=True,
        predict_with_generate=True,
        generation_max_length=16,
        logging_steps=50,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    return Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=test_set,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute_metrics,
    )


def main():
    trainer = make_trainer()
    trainer.train()
    print(f"FINAL exact_match={trainer.evaluate()['eval_exact_match']:.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
