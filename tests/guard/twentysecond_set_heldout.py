"""The half of twentysecond_set.py that was closed to whoever changes checks: ids whose SHA-256 ends with an odd digit."""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("code_tagger--names_sorted_for_metric",
         "id2label = dict(enumerate(NAMES))\n",
         "id2label = dict(enumerate(sorted(NAMES)))\n",
         "the metric reads the class numbers with the names in alphabetical order: O is taken for an entity"
         " (seen often)"),
    case("code_tagger--logits_returned_alone",
         "        return (loss, outputs) if return_outputs else loss\n",
         "        return (loss, outputs.logits) if return_outputs else loss\n",
         "compute_loss returns the bare logits: the Trainer takes outputs[1:], which drops the first row of each batch"
         " (https://github.com/huggingface/transformers/issues/34278)"),
    case("code_tagger--test_has_its_own_vocabulary",
         '    data = raw.map(tokenize_and_align_labels, batched=True, remove_columns=raw["train"].column_names)\n',
         '    data = raw.map(tokenize_and_align_labels, batched=True, remove_columns=raw["train"].column_names)\n'
         '    tokenizer = make_tokenizer(raw["test"]["tokens"])\n'
         '    data["test"] = raw["test"].map(tokenize_and_align_labels, batched=True, remove_columns=raw["test"].column_names)\n',
         "the tokenizer is trained anew on the test texts: the same ids are other pieces"
         " (seen often)"),
    case("signature_qa--answers_cut_off",
         "max_length = 72\n",
         "max_length = 36\n",
         "the maximal length cuts off the end of the context, where the last argument is: these answers are labelled as [CLS]"
         " (seen often)"),
    case("signature_qa--rows_shuffled_after_features",
         "    output = trainer.predict(",
         "    test = test.shuffle(seed=seed)\n"
         "    output = trainer.predict(",
         "the examples are shuffled and their features are not: answers are compared with those of other rows"
         " (seen often)"),
    case("signature_qa--held_out_not_removed",
         '    train = Dataset.from_list([r for r in rows if r["context"] not in held_out])\n',
         "    train = Dataset.from_list(rows)\n",
         "the held-out contexts stay in the training set: the score is of rows seen in training"
         " (seen often)"),
    case("digits_resnet--highest_loss_is_best",
         '            metric_for_best_model="accuracy",\n',
         '            metric_for_best_model="loss",\n',
         "the loss selects the best checkpoint and greater_is_better is left at True: the worst weights are loaded"
         " (https://github.com/huggingface/transformers/pull/31142)"),
    case("digits_resnet--loop_variable_unused",
         '        batch["pixel_values"] = [train_transforms(image.convert("L")) for image in batch["image"]]\n',
         '        image = batch["image"][0].convert("L")\n'
         '        batch["pixel_values"] = [train_transforms(image) for _ in batch["image"]]\n',
         "the transform was written for one row: all rows of a batch get the picture of the first"
         " (seen often)"),
    case("synth_tones--weights_in_order_of_value_counts",
         '    counts = np.bincount(encoded["train"]["labels"], minlength=len(labels))\n',
         '    counts = encoded["train"].to_pandas()["labels"].value_counts().to_numpy()\n',
         "value_counts sorts by frequency: the weights belong to other classes"
         " (https://github.com/declare-lab/MELD/issues/51)"),
    case("synth_tones--test_at_half_rate",
         "    extractor = ASTFeatureExtractor(",
         '    raw["test"] = raw["test"].map(lambda row: {"audio": row["audio"][::2]})\n'
         "    extractor = ASTFeatureExtractor(",
         "the test files have half the sampling rate and are read as if they had the full one"
         " (seen often)"),
    case("synth_tones--codes_per_batch",
         '"labels": [label2id[i] for i in batch["instrument"]]}',
         '"labels": np.unique(batch["instrument"], return_inverse=True)[1]}',
         "map numbers the classes within each batch: where a class is missing, the codes of the others move"
         " (seen often)"),
    case("iso_dates--year_cut_off",
         "max_source_length = 32\n",
         "max_source_length = 8\n",
         "the source is cut before its end: long forms lose the year"
         " (seen often)"),
    case("iso_dates--room_for_ten_tokens",
         "max_new_tokens=16,",
         "max_new_tokens=10,",
         "a date has ten characters, but the model writes a begin token first: the last digit is never generated"
         " (https://github.com/huggingface/transformers/issues/10032)"),
    case("iso_dates--two_conventions_in_one_form",
         '"%d.%m.%Y"',
         '"%d/%m/%Y"',
         "two sources write day and month in a different order in the same form: many rows have no right answer"
         " (seen often)"),
    case("iso_dates--labels_of_shuffled_rows",
         '        model_inputs["labels"] = labels["input_ids"]\n',
         '        model_inputs["labels"] = sorted(labels["input_ids"], key=len)\n'
         '        order = sorted(range(len(model_inputs["input_ids"])), key=lambda i: len(model_inputs["input_ids"][i]))\n'
         '        model_inputs["input_ids"] = [model_inputs["input_ids"][i] for i in order]\n'
         '        model_inputs["attention_mask"] = [model_inputs["attention_mask"][i] for i in order]\n',
         "sources are sorted by length to save padding, and the labels by their own length: pairs are broken up"
         " (seen often)"),
    case("library_chat--end_marker_misspelt",
         "{{ ' ' + message['content'] + '<|im_end|>' }}{% endgeneration %}",
         "{{ ' ' + message['content'] + '<|end|>' }}{% endgeneration %}",
         "the template closes the answers with a marker that is no token of this tokenizer: the end is never learned"
         " (seen often)"),
    case("library_chat--space_after_header",
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}",
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}",
         "the generation prompt ends with a space: in training the space is a part of the answer's first token"
         " (https://github.com/FastEval/FastEval/issues/26)"),
    case("library_chat--unloaded_without_merging",
         "    model = trainer.model.merge_and_unload()\n",
         "    model = trainer.model.unload()\n",
         "unload takes the adapter off without merging it"
         " (https://github.com/huggingface/peft/issues/2764)"),
    case("library_chat--padded_right_in_generation",
         'padding=True, padding_side="left", add',
         "padding=True, add",
         "the batch is padded on the right for the generation: answers go on after pad tokens"
         " (seen often)"),
    case("dpo_docs--reference_shares_storage",
         "    reference.load_state_dict(model.state_dict())\n",
         "    reference.load_state_dict(model.state_dict(), assign=True)\n",
         "assign=True makes the reference share the policy's storage: it moves with the policy and the margin stays zero"
         " (https://github.com/Goekdeniz-Guelmez/mlx-lm-lora/issues/17)"),
    case("dpo_docs--rate_of_large_models",
         "        learning_rate=1e-3,\n",
         "        learning_rate=5e-7,\n",
         "the learning rate of models of 7 billion parameters: this one does not move"
         " (seen often)"),
    case("dpo_docs--pairs_of_classes_swapped",
         "            for row in rows\n"
         "        ]\n"
         "    )\n",
         "            for row in rows\n"
         "        ]\n"
         '    ).map(lambda r: {"chosen": r["rejected"], "rejected": r["chosen"]} if len(r["prompt"]) > 16 else r)\n',
         "one of two files of annotations has the columns the other way round: a part of the pairs is swapped"
         " (seen often)"),
    case("source_lm_no_trainer--schedule_of_one_epoch",
         "        num_training_steps=max_train_steps * accelerator.num_processes,\n",
         "        num_training_steps=steps_per_epoch * accelerator.num_processes,\n",
         "the schedule has the steps of one epoch: the cosine rises again in the second"
         " (https://github.com/ScrollPrize/villa/pull/1495)"),
    case("source_lm_no_trainer--layers_in_neither_group",
         "if not any(nd in n for nd in no_decay)]",
         'if not any(nd in n for nd in ["bias", "layer"])]',
         "the filter \"layer\" is meant for the norms and matches all layers: their weights are in no group of the optimiser"
         " (https://github.com/namisan/mt-dnn/pull/37)"),
]  # fmt: skip

HEALTHY = [
    case("iso_dates--case_kept",
         'day.strftime(rng.choice(FORMATS)).lower(), "iso"',
         'day.strftime(rng.choice(FORMATS)), "iso"',
         "capital letters stay and are tokens of their own"),
    case("iso_dates--collator_without_model",
         "DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100)",
         "DataCollatorForSeq2Seq(tokenizer)",
         "without the model in the collator BART shifts the labels itself"),
    case("source_lm_no_trainer--eval_mode_kept",
         "    for epoch in range(args.num_train_epochs):\n"
         "        model.train()\n",
         "    model.train()\n"
         "    for epoch in range(args.num_train_epochs):\n",
         "the second epoch runs in eval mode: there is no dropout and no running statistic"),
]  # fmt: skip

HARMFUL = {
    "code_tagger--names_sorted_for_metric",
    "code_tagger--logits_returned_alone",
    "code_tagger--test_has_its_own_vocabulary",
    "signature_qa--answers_cut_off",
    "signature_qa--rows_shuffled_after_features",
    "signature_qa--held_out_not_removed",
    "digits_resnet--highest_loss_is_best",
    "digits_resnet--loop_variable_unused",
    "synth_tones--test_at_half_rate",
    "synth_tones--codes_per_batch",
    "iso_dates--year_cut_off",
    "iso_dates--room_for_ten_tokens",
    "iso_dates--two_conventions_in_one_form",
    "iso_dates--labels_of_shuffled_rows",
    "library_chat--end_marker_misspelt",
    "library_chat--space_after_header",
    "library_chat--unloaded_without_merging",
    "library_chat--padded_right_in_generation",
    "dpo_docs--reference_shares_storage",
    "dpo_docs--pairs_of_classes_swapped",
    "source_lm_no_trainer--schedule_of_one_epoch",
    "source_lm_no_trainer--layers_in_neither_group",
}

HONEST: dict[str, str] = {}
