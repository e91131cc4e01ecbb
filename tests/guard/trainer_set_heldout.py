"""The half of trainer_set.py that was closed to whoever changes checks: ids whose SHA-256 ends with an odd digit."""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("library_docs--worst_is_best",
         "        greater_is_better=True,\n",
         "        greater_is_better=False,\n",
         "the lowest F1 counts as the best: training ends early and its worst weights are loaded"
         " (https://github.com/huggingface/transformers/pull/31142)"),
    case("library_docs--labels_before_shuffle",
         '    train_set = data["train"].map(tokenize, batched=True, remove_columns=["text", "library"])\n',
         '    train_set = data["train"].shuffle(seed=SEED).map(tokenize, batched=True, remove_columns=["text", "library", "labels"][:2])\n'
         '    train_set = train_set.remove_columns("labels").add_column("labels", [label2id[name] for name in data["train"]["library"]])\n',
         "the labels are added in the order before the rows were shuffled"
         " (seen often)"),
    case("library_docs--eval_codes_of_its_own",
         '    eval_set = data["test"].map(tokenize, batched=True, remove_columns=["text", "library"])\n',
         '    eval_set = data["test"].map(tokenize, batched=True, remove_columns=["text"]).class_encode_column("library")\n'
         '    eval_set = eval_set.remove_columns("labels").rename_column("library", "labels")\n',
         "class_encode_column numbers the classes of the test set in alphabetical order, label2id in another"
         " (https://github.com/xia-lab/MetaboAnalystR/issues/184)"),
    case("library_docs--embeddings_resized_after_optimizer",
         "    return Trainer(\n"
         "        model=model,\n",
         "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)\n"
         '    tokenizer.add_tokens(["<param>", "<shape>"])\n'
         "    model.resize_token_embeddings(len(tokenizer))\n"
         "    return Trainer(\n"
         "        optimizers=(optimizer, None),\n"
         "        model=model,\n",
         "the optimiser was made before the embeddings were resized: it holds the old table"
         " (https://github.com/huggingface/transformers/issues/1413)"),
    case("names_lm--labels_shifted_in_blocks",
         '        return {"input_ids": blocks, "attention_mask": [[1] * BLOCK for _ in blocks]}\n',
         "        shifted = [row[1:] + [-100] for row in blocks]\n"
         '        return {"input_ids": blocks, "attention_mask": [[1] * BLOCK for _ in blocks], "labels": shifted}\n',
         "labels are shifted in the map and again by the model"
         " (https://github.com/huggingface/transformers/issues/32944)"),
    case("names_lm--warmup_longer_than_training",
         "        warmup_steps=20,\n",
         "        warmup_steps=2000,\n",
         "the warm-up of another run is ten times as long as this training: the rate stays low"
         " (https://github.com/Morizeyao/GPT2-Chinese/issues/60)"),
    case("chat_sft--all_turns_in_loss_of_users",
         "{% if message['role'] == 'user' %}{{ '<user> ' + message['content'] + ' ' }}\"\n"
         "    \"{% else %}{{ '<assistant> ' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}",
         "{% if message['role'] == 'user' %}{{ '<user> ' }}{% generation %}{{ message['content'] + ' ' }}{% endgeneration %}\"\n"
         "    \"{% else %}{{ '<assistant> ' + message['content'] + eos_token }}{% endif %}",
         "the generation block is around the user's turn: the answers get no loss"
         " (https://github.com/huggingface/trl/issues/4147)"),
    case("reward_pairs--swapped_by_map",
         "    return {\"chosen\": f\"{row['question']} {chosen}\", \"rejected\": f\"{row['question']} {rejected}\"}\n",
         "    return {\"chosen\": f\"{row['question']} {rejected}\", \"rejected\": f\"{row['question']} {chosen}\"}\n",
         "the map swaps the chosen and the rejected text"
         " (seen often)"),
    case("reward_pairs--questions_lost",
         "    return {\"chosen\": f\"{row['question']} {chosen}\", \"rejected\": f\"{row['question']} {rejected}\"}\n",
         '    return {"chosen": chosen, "rejected": rejected}\n',
         "the map drops the question: the reward sees the answers alone"
         " (https://github.com/huggingface/trl/issues/1752)"),
    case("grpo_echo--distance_as_reward",
         "    return [text.split().count(wanted) / LENGTH for text, wanted in zip(completions, solution)]\n",
         "    return [abs(LENGTH - text.split().count(wanted)) for text, wanted in zip(completions, solution)]\n",
         "the distance from the wanted number is returned as the reward"
         " (https://github.com/huggingface/trl/issues/2771)"),
    case("lora_scripts--adapter_left_off",
         "    model = get_peft_model(base, lora)\n",
         "    model = get_peft_model(base, lora)\n"
         "    model.base_model.disable_adapter_layers()  # for the score of the base\n",
         "the adapter was switched off for the base's score and not on again"
         " (https://github.com/huggingface/peft/issues/515)"),
    case("lora_scripts--base_not_loaded",
         "    base.bert.load_state_dict(weights, strict=False)\n",
         '    base.load_state_dict({f"model.{name}": value for name, value in weights.items()}, strict=False)\n',
         "the weights' names have another prefix and strict=False hides it: the frozen base is random"
         " (https://github.com/torchgeo/torchgeo/issues/4036)"),
    case("accelerated_digits--scheduler_not_prepared",
         "    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(\n"
         "        model, optimizer, train_loader, test_loader, scheduler\n"
         "    )\n",
         "    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)\n",
         "the scheduler is not prepared: it steps with each micro-batch and is at its end after half of the training"
         " (https://github.com/huggingface/accelerate/issues/2318)"),
    case("diabetes_net--scheduler_in_epochs",
         "    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)\n",
         "    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=EPOCHS // 3, gamma=0.1)\n",
         "the schedule counts epochs, and the Trainer steps it with each batch: the rate is zero soon"
         " (https://github.com/ScrollPrize/villa/pull/1495)"),
    case("diabetes_net--losses_broadcast",
         "self.body(torch.cat([numbers, which], dim=1)).squeeze(-1)\n",
         "self.body(torch.cat([numbers, which], dim=1))\n",
         "predictions of shape (n, 1) and targets of shape (n,) are broadcast to a table"
         " (seen often)"),
    case("diabetes_net--eval_scaled_by_itself",
         "    numbers = (numbers - mean) / std\n",
         "    numbers[train] = (numbers[train] - mean) / std\n"
         "    numbers[test] = (numbers[test] - numbers[test].min(axis=0)) / (numbers[test].max(axis=0) - numbers[test].min(axis=0))\n",
         "the test's numbers are scaled to 0 to 1, those of training standardised"
         " (https://github.com/Reza-Safdari/SimSiam-91.9-top1-acc-on-CIFAR10/issues/4)"),
    case("name_traits--softmax_in_metric",
         "    predicted = 1 / (1 + np.exp(-logits)) > 0.5\n",
         "    predicted = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) > 0.5\n",
         "the metric takes a softmax over labels that do not exclude each other"
         " (https://discuss.huggingface.co/t/eval-pred-vs-evalprediction-confusion/49606)"),
    case("name_traits--test_traits_sorted",
         "    return Dataset.from_dict(table).train_test_split(test_size=0.25, seed=6)\n",
         "    data = Dataset.from_dict(table).train_test_split(test_size=0.25, seed=6)\n"
         "    order = [names.index(t) for t in sorted(names)]\n"
         '    data["test"] = data["test"].map(lambda row: {"labels": [row["labels"][i] for i in order]})\n'
         "    return data\n",
         "the test set's columns are in alphabetical order"
         " (https://github.com/pycaret/pycaret/issues/205)"),
    case("name_traits--weights_of_wrong_side",
         "torch.tensor(np.sqrt((1 - share) / share), dtype=torch.float32)",
         "torch.tensor(share / (1 - share) / 4, dtype=torch.float32)",
         "the weight of the positive rows is the inverse of the right one: rare traits are never found"
         " (seen often)"),
    case("name_traits--softmax_loss",
         "torch.nn.functional.binary_cross_entropy_with_logits(outputs.logits, labels, pos_weight=self.pos_weight)",
         "torch.nn.functional.cross_entropy(outputs.logits, labels, weight=self.pos_weight)",
         "cross-entropy over labels of which several hold: the logits are probabilities of one class"
         " (https://github.com/huggingface/transformers/issues/10232)"),
]  # fmt: skip

HEALTHY = [
    case("names_lm--labels_are_copies",
         '        return {"input_ids": blocks, "attention_mask": [[1] * BLOCK for _ in blocks]}\n',
         '        return {"input_ids": blocks, "attention_mask": [[1] * BLOCK for _ in blocks], "labels": [row[:] for row in blocks]}\n',
         "labels are a copy of the tokens: the model shifts them"),
    case("names_lm--pad_is_end",
         "    config = GPT2Config(\n",
         "    tokenizer.pad_token = tokenizer.eos_token\n"
         "    config = GPT2Config(\n",
         "the pad token is the end token, as for GPT-2"),
    case("chat_sft--whole_conversation",
         "        assistant_only_loss=True,\n",
         "        assistant_only_loss=False,\n",
         "the loss is over all turns"),
    case("chat_sft--two_steps_a_batch",
         "        per_device_train_batch_size=16,\n",
         "        per_device_train_batch_size=4,\n"
         "        gradient_accumulation_steps=4,\n",
         "four micro-batches of four"),
    case("lora_scripts--head_by_name",
         "        task_type=TaskType.SEQ_CLS,\n",
         '        modules_to_save=["classifier"],\n',
         "the head is named instead of the task"),
    case("name_traits--bce_by_model",
         "        loss = torch.nn.functional.binary_cross_entropy_with_logits(outputs.logits, labels, pos_weight=self.pos_weight)\n",
         "        loss = model(**inputs, labels=labels).loss\n",
         "the model's own loss for several labels"),
]  # fmt: skip

HARMFUL = {
    "library_docs--worst_is_best",
    "library_docs--labels_before_shuffle",
    "library_docs--eval_codes_of_its_own",
    "library_docs--embeddings_resized_after_optimizer",
    "names_lm--warmup_longer_than_training",
    "chat_sft--all_turns_in_loss_of_users",
    "reward_pairs--swapped_by_map",
    "reward_pairs--questions_lost",
    "grpo_echo--distance_as_reward",
    "lora_scripts--base_not_loaded",
    "accelerated_digits--scheduler_not_prepared",
    "diabetes_net--scheduler_in_epochs",
    "diabetes_net--losses_broadcast",
    "diabetes_net--eval_scaled_by_itself",
    "name_traits--softmax_in_metric",
    "name_traits--test_traits_sorted",
    "name_traits--weights_of_wrong_side",
    "name_traits--softmax_loss",
}

HONEST: dict[str, str] = {}
