"""Everyday bugs in everyday scripts (scripts/eighteenth), written by someone who had read no check: the closed half (2026-11-29).

See eighteenth_set.py. Nobody who writes checks reads this file before the score.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("digits_checkpoint--relu-on-logits",
         "        return self.fc2(x)\n",
         "        return F.relu(self.fc2(x))\n",
         "a ReLU on the logits"),
    case("digits_checkpoint--never-better",
         "    best_loss = float(\"inf\")\n",
         "    best_loss = 0.0\n",
         "no validation loss is ever below 0: the untrained copy is tested"),
    case("digits_checkpoint--gradients-kept",
         "        optimizer.zero_grad()\n"
         "        loss",
         "        loss",
         "the gradients are never set to zero"),
    case("digits_checkpoint--test-not-normalised",
         "    x_val = (x_val - mean) / std\n"
         "    x_test = (x_test - mean) / std\n",
         "",
         "validation and test pictures are not normalised"),
    case("prices_table--column-against-row",
         "        return self.layers(x).squeeze(-1)\n",
         "        return self.layers(x)\n",
         "the loss compares (N, 1) with (N,)"),
    case("prices_table--metric-in-scaled-units",
         "    return y_scaler.inverse_transform(scaled.reshape(-1, 1)).ravel()\n",
         "    return scaled.ravel()\n",
         "predictions are not scaled back before they are compared with prices"),
    case("prices_table--relu-at-the-end",
         "            nn.Linear(hidden, 1),\n"
         "        )\n",
         "            nn.Linear(hidden, 1),\n"
         "            nn.ReLU(),\n"
         "        )\n",
         "scaled targets are negative in half of the rows, the output never is"),
    case("prices_table--test-not-scaled",
         "X_test = x_scaler.transform(X_test)\n",
         "",
         "the features of the test are not scaled"),
    case("stdlib_chars--targets-not-shifted",
         "    y = torch.stack([source[i + 1 : i + block_size + 1] for i in ix])\n",
         "    y = torch.stack([source[i : i + block_size] for i in ix])\n",
         "the target of each character is the character itself"),
    case("stdlib_chars--heads-viewed",
         "        q = q.view(B, T, n_head, C // n_head).transpose(1, 2)\n"
         "        k = k.view(B, T, n_head, C // n_head).transpose(1, 2)\n"
         "        v = v.view(B, T, n_head, C // n_head).transpose(1, 2)\n",
         "        q = q.reshape(B, n_head, T, C // n_head)\n"
         "        k = k.reshape(B, n_head, T, C // n_head)\n"
         "        v = v.reshape(B, n_head, T, C // n_head)\n",
         "reshape() in place of view() and transpose(): heads and positions mix"),
    case("stdlib_chars--softmax-over-queries",
         "        att = F.softmax(att, dim=-1)\n",
         "        att = F.softmax(att, dim=-2)\n",
         "the attention is normalised over the queries"),
    case("module_sentences--last-is-padding",
         "        mask = mask.unsqueeze(-1)\n"
         "        pooled = (x * mask).sum(1) / mask.sum(1)\n"
         "        return self.head(pooled)\n",
         "        return self.head(x[:, -1])\n",
         "the last position is padding in all but the longest sentence"),
    case("module_sentences--mask-inverted",
         "src_key_padding_mask=mask == 0)\n",
         "src_key_padding_mask=mask.bool())\n",
         "the mask hides the words and leaves the padding"),
    case("power_lstm--first-output",
         "        return self.fc(out[:, -1])\n",
         "        return self.fc(out[:, 0])\n",
         "the output of the first hour in place of the last"),
    case("power_lstm--time-second",
         "        self.lstm = nn.LSTM(n_features, hidden, batch_first=True)\n",
         "        self.lstm = nn.LSTM(n_features, hidden)\n",
         "without batch_first the recurrence runs over the batch"),
    case("power_lstm--test-scaled-by-itself",
         "x_test, y_test = make_windows((test_series - mean) / std)\n",
         "x_test, y_test = make_windows((test_series - test_series.mean(axis=0)) / test_series.std(axis=0))\n",
         "the test is normalised by its own mean and deviation"),
    case("distil_small--kl-exchanged",
         "F.kl_div(soft_prob, soft_targets, reduction=\"batchmean\")",
         "F.kl_div(soft_targets, soft_prob, reduction=\"batchmean\")",
         "input and target of the KL divergence are exchanged"),
    case("distil_small--optimiser-of-teacher",
         "    optimizer = optim.Adam(student.parameters(), lr=learning_rate)\n",
         "    optimizer = optim.Adam(teacher.parameters(), lr=learning_rate)\n",
         "the optimiser holds the teacher"),
    case("distil_small--no-logarithm",
         "soft_prob = F.log_softmax(student_logits / T, dim=-1)\n",
         "soft_prob = F.softmax(student_logits / T, dim=-1)\n",
         "kl_div gets probabilities where it needs their logarithms"),
    case("finetune_head--optimiser-before-head",
         "    model.fc = nn.Linear(model.fc.in_features, 4)\n"
         "    optimizer = optim.Adam(model.fc.parameters(), lr=5e-3)\n"
         "    fit(model, train_loader, optimizer, epochs=3)\n"
         "    print(f\"test accuracy with a frozen backbone: {accuracy(model, test_loader):.3f}\")\n"
         "\n"
         "    print(\"fine-tuning\")\n"
         "    for p in model.parameters():\n"
         "        p.requires_grad = True\n"
         "    backbone = [p for n, p in model.named_parameters() if not n.startswith(\"fc.\")]\n"
         "    optimizer = optim.AdamW([{\"params\": backbone, \"lr\": 3e-4}, {\"params\": model.fc.parameters(), \"lr\": 3e-3}])\n",
         "    optimizer = optim.Adam(model.fc.parameters(), lr=5e-3)\n"
         "    model.fc = nn.Linear(model.fc.in_features, 4)\n"
         "    fit(model, train_loader, optimizer, epochs=3)\n"
         "    print(f\"test accuracy with a frozen backbone: {accuracy(model, test_loader):.3f}\")\n"
         "\n"
         "    print(\"fine-tuning\")\n",
         "the optimiser was built before the head was replaced, and is kept"),
    case("finetune_head--step-after-zeroing",
         "            optimizer.zero_grad()\n"
         "            loss = criterion(model(images), labels)\n"
         "            loss.backward()\n"
         "            optimizer.step()\n",
         "            loss = criterion(model(images), labels)\n"
         "            loss.backward()\n"
         "            optimizer.zero_grad()\n"
         "            optimizer.step()\n",
         "the gradients are set to zero between backward() and step()"),
    case("maze_dqn--no-done-mask",
         "            targets = rewards + self.gamma * next_q * (1 - dones)\n",
         "            targets = rewards + self.gamma * next_q\n",
         "terminal states are bootstrapped"),
]  # fmt: skip

HEALTHY = [
    case("digits_checkpoint--label-smoothing",
         "    criterion = nn.CrossEntropyLoss()\n",
         "    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)\n",
         "smoothed labels"),
    case("prices_table--huber-sgd",
         "criterion = nn.MSELoss()\n"
         "optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)\n",
         "criterion = nn.SmoothL1Loss()\n"
         "optimizer = torch.optim.SGD(model.parameters(), lr=2e-2, momentum=0.9, nesterov=True)\n",
         "another loss and optimiser"),
    case("prices_table--sampled-rows",
         "train_loader = DataLoader(train_ds, batch_size=64, shuffle=True)\n",
         "sampler = torch.utils.data.RandomSampler(train_ds, replacement=True, num_samples=len(train_ds))\n"
         "train_loader = DataLoader(train_ds, batch_size=64, sampler=sampler)\n",
         "rows are drawn with replacement"),
    case("stdlib_chars--accumulated",
         "    xb, yb = get_batch(\"train\")\n"
         "    logits, loss = model(xb, yb)\n"
         "    optimizer.zero_grad(set_to_none=True)\n"
         "    loss.backward()\n"
         "    optimizer.step()\n",
         "    optimizer.zero_grad(set_to_none=True)\n"
         "    for _ in range(2):\n"
         "        xb, yb = get_batch(\"train\")\n"
         "        logits, loss = model(xb, yb)\n"
         "        (loss / 2).backward()\n"
         "    optimizer.step()\n",
         "two micro-batches to a step"),
    case("stdlib_chars--fused-attention",
         "        att = q @ k.transpose(-2, -1) * (C // n_head) ** -0.5\n"
         "        att = att.masked_fill(self.tril[:T, :T] == 0, float(\"-inf\"))\n"
         "        att = F.softmax(att, dim=-1)\n"
         "        y = self.dropout(att) @ v\n",
         "        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout if self.training else 0.0, is_causal=True)\n",
         "torch's own attention"),
    case("power_lstm--change-from-last",
         "        return self.fc(out[:, -1])\n",
         "        return x[:, -1, :1] + self.fc(out[:, -1])\n",
         "the net forecasts the change from the last hour"),
    case("distil_small--average-of-student",
         "student = Student()\n"
         "train_knowledge_distillation(teacher, student, unlabelled_loader, epochs=16, learning_rate=0.005)\n",
         "student = Student()\n"
         "train_knowledge_distillation(teacher, student, unlabelled_loader, epochs=16, learning_rate=0.005)\n"
         "averaged = optim.swa_utils.AveragedModel(student, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.5))\n"
         "for _ in range(6):\n"
         "    train_knowledge_distillation(teacher, student, unlabelled_loader, epochs=1, learning_rate=0.001)\n"
         "    averaged.update_parameters(student)\n"
         "student = averaged.module\n",
         "the average over the last epochs is tested"),
    case("finetune_head--one-cycle",
         "    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)\n",
         "    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[3e-4, 3e-3], total_steps=8)\n",
         "one cycle, stepped per epoch"),
]  # fmt: skip

HARMFUL = {
    "digits_checkpoint--gradients-kept",
    "digits_checkpoint--never-better",
    "digits_checkpoint--test-not-normalised",
    "distil_small--kl-exchanged",
    "distil_small--no-logarithm",
    "distil_small--optimiser-of-teacher",
    "finetune_head--optimiser-before-head",
    "finetune_head--step-after-zeroing",
    "module_sentences--mask-inverted",
    "power_lstm--first-output",
    "power_lstm--time-second",
    "prices_table--column-against-row",
    "prices_table--metric-in-scaled-units",
    "prices_table--relu-at-the-end",
    "prices_table--test-not-scaled",
    "stdlib_chars--heads-viewed",
    "stdlib_chars--softmax-over-queries",
    "stdlib_chars--targets-not-shifted",
}

HONEST: dict[str, str] = {}
