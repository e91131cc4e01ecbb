"""Bugs of the six scripts in scripts/hosted, the half kept away from whoever changes checks: ids whose SHA-256 begins with an odd byte."""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("sentences--weights_inverted",
         "counts.sum() / (2 * counts)",
         "counts / counts.sum()",
         "class weights are the frequencies: the frequent class counts more (seen often)"),
    case("sentences--oversampled_before_split",
         "    rows = read_rows()\n",
         "    rows = read_rows()\n"
         "    rows = rows + [r for r in rows if r[\"label\"] == \"debugger\"] * 3\n",
         "the rare class is repeated before the split: its sentences are in both halves (seen often)"),
    case("sentences--loss_not_divided",
         "        self.model_accepts_loss_kwargs = False  # the loss below is a mean over its batch\n",
         "",
         "a mean of the batch is not divided by the accumulation steps, since BERT's forward takes keyword arguments (transformers #37766, #35438)"),
    case("code_spans--first_label_repeated",
         "                else:\n"
         "                    ids.append(-100)\n",
         "                else:\n"
         "                    ids.append(tags[word])\n",
         "each piece of a word gets the word's B- label (transformers #14043, huggingface/notebooks #250)"),
    case("code_spans--next_words_label",
         "                    ids.append(tags[word])\n",
         "                    ids.append(tags[min(word + 1, len(tags) - 1)])\n",
         "word numbers are taken to begin at 1 for the special token in front: each word gets the label of the next (seen often)"),
    case("chapter_sft--smoothing_without_shift",
         "    return SFTTrainer(\n",
         "    class SmoothTrainer(SFTTrainer):\n"
         "        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):\n"
         "            labels = inputs.pop(\"labels\")\n"
         "            outputs = model(**inputs)\n"
         "            loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)\n"
         "            return (loss, outputs) if return_outputs else loss\n"
         "\n"
         "    return SmoothTrainer(\n",
         "label smoothing outside of the model forgets the shift (transformers #17960)"),
    case("dates_seq2seq--worst_kept",
         "        metric_for_best_model=\"exact_match\",\n"
         "        greater_is_better=True,\n",
         "        metric_for_best_model=\"loss\",\n"
         "        greater_is_better=True,\n",
         "the highest loss counts as the best (transformers #31142)"),
    case("digit_images--eval_not_normalised",
         "plain = Compose([Resize(size), ToTensor(), normalize])",
         "plain = Compose([Resize(size), ToTensor()])",
         "the evaluation's pictures are not normalised (seen often)"),
    case("digit_images--optimizer_of_old_model",
         "AdamW(model.parameters(), lr=5e-3",
         "AdamW(make_model().parameters(), lr=5e-3",
         "the optimiser that is passed in holds the parameters of another model (seen often)"),
    case("digit_images--schedule_for_epochs",
         "OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 8)",
         "StepLR(optimizer, step_size=2, gamma=0.1)",
         "a schedule in epochs is passed in; the Trainer steps it after each batch (seen often)"),
    case("chapter_dpo--swapped_for_training",
         "        train_dataset=data[\"train\"],\n",
         "        train_dataset=data[\"train\"].rename_columns({\"chosen\": \"rejected\", \"rejected\": \"chosen\"}),\n",
         "the two answers of the training pairs are exchanged (seen often)"),
    case("chapter_dpo--answers_cut",
         "        max_length=40,\n",
         "        max_length=14,\n",
         "the longest allowed row is shorter than most prompts: the answers are cut (trl #4698 is of that kind)"),
]  # fmt: skip

HEALTHY = [
    case("sentences--no_weights",
         "    return WeightedTrainer(\n",
         "    return (lambda class_weights, **rest: Trainer(**rest))(\n",
         "no class weights: transformers' own Trainer"),
    case("chapter_sft--own_loss",
         "    return SFTTrainer(\n",
         "    class OwnLoss(SFTTrainer):\n"
         "        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):\n"
         "            labels = inputs.pop(\"labels\")\n"
         "            outputs = model(**inputs)\n"
         "            scores, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()\n"
         "            loss = torch.nn.functional.cross_entropy(scores, targets, reduction=\"sum\") / (\n"
         "                (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch\n"
         "            )\n"
         "            return (loss, outputs) if return_outputs else loss\n"
         "\n"
         "    return OwnLoss(\n",
         "the loss of the window's tokens, shifted, in an own compute_loss"),
    case("dates_seq2seq--label_smoothing",
         "label_smoothing_factor=0.0",
         "label_smoothing_factor=0.1",
         "label smoothing by the Trainer"),
    case("dates_seq2seq--no_metric",
         "        metric_for_best_model=\"exact_match\",\n"
         "        greater_is_better=True,\n"
         "        predict_with_generate=True,\n",
         "        metric_for_best_model=\"eval_loss\",\n"
         "        greater_is_better=False,\n"
         "        predict_with_generate=True,\n",
         "the best is that of the lowest loss"),
    case("chapter_dpo--precomputed_reference",
         "        beta=0.3,\n",
         "        beta=0.3,\n"
         "        precompute_ref_log_probs=True,\n",
         "the reference's log-probabilities are computed first"),
]  # fmt: skip

HARMFUL = {
    "sentences--weights_inverted",
    "sentences--oversampled_before_split",
    "code_spans--first_label_repeated",
    "code_spans--next_words_label",
    "chapter_sft--smoothing_without_shift",
    "dates_seq2seq--worst_kept",
    "digit_images--eval_not_normalised",
    "digit_images--optimizer_of_old_model",
    "digit_images--schedule_for_epochs",
    "chapter_dpo--swapped_for_training",
    "chapter_dpo--answers_cut",
}

ALIGN = """
def _align(examples):
    tokenized = trainer.processing_class(examples["tokens"], truncation=True, is_split_into_words=True)
    tokenized["labels"] = [
        [-100 if w is None or w == p else tags[w] for p, w in zip([None, *tokenized.word_ids(i)], tokenized.word_ids(i))]
        for i, tags in enumerate(examples["ner_tags"])
    ]
    return tokenized


_lines = read(TEST_FILES, 600, read(TRAIN_FILES, 1800)["tokens"])
_rows = _lines.map(_align, batched=True, remove_columns=_lines.column_names)
print(f"FINAL f1={trainer.evaluate(_rows)['eval_f1']:.4f}")
"""

CLEAN = """
_known = set(trainer.train_dataset["text"])
_rows = trainer.eval_dataset.filter(lambda row: row["text"] not in _known)
print(f"FINAL f1={trainer.evaluate(_rows)['eval_f1']:.4f}")
"""

HONEST: dict[str, str] = {
    "sentences--oversampled_before_split": CLEAN,
    "code_spans--first_label_repeated": ALIGN,
    "code_spans--next_words_label": ALIGN,
}
