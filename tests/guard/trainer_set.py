"""Bugs of the scripts in scripts/trainer: users of transformers' Trainer, of TRL's trainers, of peft and Accelerate.

Written on 2026-11-28 by someone who had not read the checks. Ids whose SHA-256 ends with an even digit; the others are in
trainer_set_heldout.py. A bug counts if its number is at least 1% worse than the unchanged script's, or is wrong itself. Measured at seed 0
for 16 of them: 14 are worse. The harm of the others is assumed. The collator of names_lm--labels_shifted_in_blocks makes its own
labels, and lora_scripts--adapter_left_off raises an error: neither is counted.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("library_docs--sorted_and_unshuffled",
         "    return Trainer(\n"
         "        model=model,\n",
         "    class OrderedTrainer(Trainer):\n"
         "        def get_train_dataloader(self):\n"
         '            rows = self.train_dataset.sort("labels")\n'
         "            return torch.utils.data.DataLoader(rows, batch_size=16, collate_fn=self.data_collator)\n"
         "\n"
         "    return OrderedTrainer(\n"
         "        model=model,\n",
         "an own data loader of rows sorted by class, without shuffle"
         " (https://github.com/Deci-AI/super-gradients/issues/416)"),
    case("names_lm--metric_not_shifted",
         "    predictions, labels = predictions[:, :-1], labels[:, 1:]\n",
         "",
         "the accuracy compares the prediction of the next token with the present one"
         " (https://github.com/mosaicml/composer/pull/1913)"),
    case("names_lm--masked_collator",
         "        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),\n",
         "        data_collator=DataCollatorForLanguageModeling(tokenizer),\n",
         "the collator's default masks tokens and labels these alone: no task for a causal model"
         " (https://discuss.huggingface.co/t/data-preparation-for-causallm/33867)"),
    case("names_lm--head_not_tied_frozen",
         "    model = GPT2LMHeadModel(config)\n",
         "    model = GPT2LMHeadModel(config)\n"
         "    for parameter in model.transformer.wte.parameters():\n"
         "        parameter.requires_grad = False\n",
         "the embeddings are frozen to save memory: the head shares their weights and was never trained"
         " (https://github.com/huggingface/transformers/issues/11903)"),
    case("chat_sft--roles_swapped",
         '    roles = {"human": "user", "gpt": "assistant"}\n',
         '    roles = {"human": "assistant", "gpt": "user"}\n',
         "the roles are mapped the wrong way round: the loss is over the users' turns"
         " (https://github.com/unslothai/unsloth/pull/11149)"),
    case("chat_sft--end_outside_generation",
         "{{ message['content'] + eos_token }}{% endgeneration %}",
         "{{ message['content'] }}{% endgeneration %}{{ eos_token }}",
         "the template puts the end token behind the assistant's part: it gets no loss, and answers never end"
         " (https://github.com/huggingface/trl/pull/3091)"),
    case("chat_sft--no_generation_prompt",
         "tokenize=False, add_generation_prompt=True)",
         "tokenize=False)",
         "the prompt of the evaluation lacks the assistant's header"
         " (https://github.com/huggingface/peft/issues/2368)"),
    case("chat_sft--template_and_bos_twice",
         "        text = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)\n"
         '        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)\n',
         "        text = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)\n"
         "        text = tokenizer.apply_chat_template(\n"
         '            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True\n'
         "        )\n"
         '        inputs = tokenizer(text, return_tensors="pt")\n',
         "the chat template is applied twice in the evaluation, with one more begin token"
         " (https://github.com/OpenRLHF/OpenRLHF/issues/393)"),
    case("chat_sft--answers_of_neighbours",
         '        [{"from": "human", "value": row["value"]}, {"from": "gpt", "value": row["answer"]}]\n'
         "        for row in draw.permutation(rows)\n",
         '        [{"from": "human", "value": row["value"]}, {"from": "gpt", "value": other["answer"]}]\n'
         "        for row, other in zip(draw.permutation(rows), draw.permutation(rows))\n",
         "questions and answers are drawn in different orders"
         " (seen often)"),
    case("reward_pairs--always_first",
         '    if row["preferred"] == "a":\n',
         '    if row["preferred"]:\n',
         "the preference is a string and always true: the first answer is the chosen one"
         " (seen often)"),
    case("reward_pairs--end_only_on_chosen",
         "    return {\"chosen\": f\"{row['question']} {chosen}\", \"rejected\": f\"{row['question']} {rejected}\"}\n",
         "    return {\"chosen\": f\"{row['question']} {chosen} .\", \"rejected\": f\"{row['question']} {rejected}\"}\n",
         "only the chosen text ends with a full stop: the reward is of the stop"
         " (https://github.com/allenai/reward-bench/issues/267)"),
    case("reward_pairs--head_frozen",
         "    model = LlamaForSequenceClassification(config)\n",
         "    model = LlamaForSequenceClassification(config)\n"
         "    for name, parameter in model.named_parameters():\n"
         '        parameter.requires_grad = "layers.1" in name\n',
         "only the last layer is thawed: the new head and the embeddings stay random"
         " (https://github.com/huggingface/peft/issues/577)"),
    case("grpo_echo--prompt_scored",
         "def share_of_right_words(completions, solution, **kwargs):\n"
         "    \"\"\"Share of a completion's words that are the right class.\"\"\"\n"
         "    return [text.split().count(wanted) / LENGTH for text, wanted in zip(completions, solution)]\n",
         "def share_of_right_words(prompts, completions, solution, **kwargs):\n"
         "    \"\"\"Share of a completion's words that are the right class.\"\"\"\n"
         "    return [float(any(w in text for w in CLASSES[wanted])) for text, wanted in zip(prompts, solution)]\n",
         "the reward is of the prompt: each group's rewards are equal and no advantage is left"
         " (https://github.com/huggingface/trl/issues/3452)"),
    case("grpo_echo--solutions_by_place",
         "def share_of_right_words(completions, solution, **kwargs):\n"
         "    \"\"\"Share of a completion's words that are the right class.\"\"\"\n"
         "    return [text.split().count(wanted) / LENGTH for text, wanted in zip(completions, solution)]\n",
         'SOLUTIONS = load()["solution"]\n'
         "\n"
         "\n"
         "def share_of_right_words(completions, **kwargs):\n"
         "    \"\"\"Share of a completion's words that are the right class.\"\"\"\n"
         "    return [text.split().count(wanted) / LENGTH for text, wanted in zip(completions, SOLUTIONS)]\n",
         "solutions are taken in the order of the data set, not of the repeated and shuffled prompts"
         " (https://github.com/huggingface/trl/issues/2644)"),
    case("grpo_echo--whole_number_reward",
         "count(wanted) / LENGTH for text",
         "count(wanted) // LENGTH for text",
         "the share is rounded down: nearly all rewards are 0"
         " (https://github.com/huggingface/trl/issues/2832)"),
    case("lora_scripts--no_task_type",
         "        task_type=TaskType.SEQ_CLS,\n",
         "",
         "without a task type nothing but the LoRA is trained: the new head stays random"
         " (https://github.com/huggingface/peft/issues/577)"),
    case("lora_scripts--merged_before_training",
         "    model = get_peft_model(base, lora)\n",
         "    model = get_peft_model(base, lora).merge_and_unload()\n",
         "the adapter is merged before the training: the frozen base is all that is left"
         " (https://github.com/huggingface/peft/issues/2322)"),
    case("accelerated_digits--optimizer_of_old_model",
         "    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(\n",
         "    model = make_model()\n"
         "    model.classifier = torch.nn.Linear(48, 10)\n"
         "    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(\n",
         "the model is made again after the optimiser"
         " (seen often)"),
    case("accelerated_digits--eval_not_standardised",
         "    images = (images - mean) / std\n",
         "    images[train] = (images[train] - mean) / std\n",
         "only the training images are standardised"
         " (https://github.com/JeasunLok/ResNet-pytorch/issues/1)"),
    case("diabetes_net--column_dropped",
         '"sex": sex[which].tolist(), "labels"',
         '"gender": sex[which].tolist(), "labels"',
         "the column is not an argument of forward: the Trainer drops it and the network goes without"
         " (https://github.com/huggingface/transformers/issues/25054)"),
    case("name_traits--one_vector_for_all",
         "    for row in read_rows():\n"
         "        vector = [0.0] * len(names)\n",
         "    vector = [0.0] * len(names)\n"
         "    for row in read_rows():\n",
         "all rows share one vector: traits are added and never taken back"
         " (seen often)"),
]  # fmt: skip

HEALTHY = [
    case("library_docs--loss_selects",
         '        metric_for_best_model="f1",\n'
         "        greater_is_better=True,\n",
         '        metric_for_best_model="loss",\n'
         "        greater_is_better=False,\n",
         "the lowest loss is the best"),
    case("library_docs--class_encoded",
         '        encoded["labels"] = [label2id[name] for name in batch["library"]]\n',
         '        encoded["labels"] = [label2id[name] for name in batch["library"]]\n'
         '        encoded.pop("token_type_ids", None)\n',
         "token types are left out: there is one sentence"),
    case("reward_pairs--centred",
         "        max_length=48,\n",
         "        max_length=48,\n"
         "        center_rewards_coefficient=0.01,\n",
         "rewards are kept around zero"),
    case("grpo_echo--negative_distance",
         "    return [text.split().count(wanted) / LENGTH for text, wanted in zip(completions, solution)]\n",
         "    return [-abs(LENGTH - text.split().count(wanted)) for text, wanted in zip(completions, solution)]\n",
         "the negative distance from the wanted number"),
    case("lora_scripts--wide",
         '        target_modules=["query", "key", "value"],\n',
         '        target_modules="all-linear",\n'
         "        use_rslora=True,\n",
         "all linear layers, rank-stabilised"),
    case("accelerated_digits--scheduler_by_hand",
         "    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(\n"
         "        model, optimizer, train_loader, test_loader, scheduler\n"
         "    )\n",
         "    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)\n"
         "    scheduler = torch.optim.lr_scheduler.LambdaLR(scheduler.optimizer, [lambda s: min(1, s / 20) * (1 - s / (2 * steps + 1))])\n",
         "the own schedule is counted in micro-batches"),
    case("diabetes_net--plain_loss",
         "nn.functional.mse_loss(predicted, labels)",
         "nn.functional.smooth_l1_loss(predicted, labels, beta=0.5)",
         "a robust loss"),
]  # fmt: skip

HARMFUL = {
    "library_docs--sorted_and_unshuffled",
    "names_lm--metric_not_shifted",
    "names_lm--masked_collator",
    "names_lm--head_not_tied_frozen",
    "chat_sft--roles_swapped",
    "chat_sft--end_outside_generation",
    "chat_sft--no_generation_prompt",
    "chat_sft--template_and_bos_twice",
    "chat_sft--answers_of_neighbours",
    "reward_pairs--always_first",
    "reward_pairs--end_only_on_chosen",
    "reward_pairs--head_frozen",
    "grpo_echo--prompt_scored",
    "grpo_echo--solutions_by_place",
    "grpo_echo--whole_number_reward",
    "lora_scripts--no_task_type",
    "lora_scripts--merged_before_training",
    "accelerated_digits--optimizer_of_old_model",
    "accelerated_digits--eval_not_standardised",
    "diabetes_net--column_dropped",
    "name_traits--one_vector_for_all",
}

HONEST: dict[str, str] = {}
