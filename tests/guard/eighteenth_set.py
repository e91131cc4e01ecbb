"""Everyday bugs in everyday scripts (scripts/eighteenth), written by someone who had read no check: the open half (2026-11-29).

Eight short scripts as tutorials have them, each with four bugs and two healthy variants. Halves: the last hexadecimal digit of the SHA-256 sum of
the id; odd ones are in eighteenth_set_heldout.py. HARMFUL: the last number of the script is clearly worse, or clearly wrong, at seed 0.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("stdlib_chars--mask-upside-down",
         "torch.tril(torch.ones(block_size, block_size))",
         "torch.triu(torch.ones(block_size, block_size))",
         "each position attends to itself and to what follows"),
    case("module_sentences--vocabulary-per-split",
         "    train_set, test_set = Sentences(train_rows, vocab), Sentences(test_rows, vocab)\n",
         "    test_counts = Counter(t for s, _ in test_rows for t in tokenize(s))\n"
         "    test_vocab = {t: i + 2 for i, (t, n) in enumerate(test_counts.most_common(3000)) if n > 1}\n"
         "    train_set, test_set = Sentences(train_rows, vocab), Sentences(test_rows, test_vocab)\n",
         "the test has a vocabulary of its own"),
    case("module_sentences--sorted-without-labels",
         "        self.labels = [label for _, label in rows]\n",
         "        self.labels = [label for _, label in rows]\n"
         "        self.ids.sort(key=len)\n",
         "sentences are sorted by length, their labels are not"),
    case("power_lstm--series-reshaped",
         "series = np.stack([demand, temperature]).T\n",
         "series = np.stack([demand, temperature]).reshape(-1, 2)\n",
         "reshape() in place of a transpose mixes the two series"),
    case("distil_small--softmax-over-batch",
         "soft_targets = F.softmax(teacher_logits / T, dim=-1)\n",
         "soft_targets = F.softmax(teacher_logits / T, dim=0)\n",
         "the teacher's probabilities are normalised over the batch"),
    case("finetune_head--backbone-not-loaded",
         "    model.load_state_dict(torch.load(CHECKPOINT)[\"model\"])\n",
         "    model.load_state_dict(torch.load(CHECKPOINT), strict=False)\n",
         "no key of the file is one of the model's, and strict=False accepts that"),
    case("finetune_head--not-divided-by-16",
         "    x, y = images[target], labels[target] - 6\n",
         "    x, y = images[target] * 16.0, labels[target] - 6\n",
         "the pictures of the fine-tuning are not scaled as those of the pretraining were"),
    case("maze_dqn--state-by-reference",
         "    def observation(self):\n"
         "        state = np.zeros(25, dtype=np.float32)\n"
         "        state[self.pos[0] * 5 + self.pos[1]] = 1.0\n"
         "        return state\n",
         "    state = np.zeros(25, dtype=np.float32)\n"
         "\n"
         "    def observation(self):\n"
         "        self.state[:] = 0.0\n"
         "        self.state[self.pos[0] * 5 + self.pos[1]] = 1.0\n"
         "        return self.state\n",
         "each stored observation is the same array, which changes"),
    case("maze_dqn--max-of-own-values",
         "        q_values = self.q(states).gather(1, actions).squeeze(1)\n",
         "        q_values = self.q(states).max(dim=1).values\n",
         "the highest value is trained in place of the chosen action's"),
    case("maze_dqn--state-kept",
         "        state = next_state\n",
         "",
         "the loop keeps the first observation"),
]  # fmt: skip

HEALTHY = [
    case("digits_checkpoint--autocast",
         "        loss = criterion(model(images), labels)\n"
         "        loss.backward()\n",
         "        with torch.autocast(device_type=device.type, dtype=torch.bfloat16):\n"
         "            loss = criterion(model(images), labels)\n"
         "        loss.backward()\n",
         "mixed precision"),
    case("module_sentences--class-weights",
         "    criterion = nn.CrossEntropyLoss()\n",
         "    per_class = torch.bincount(torch.tensor(train_set.labels), minlength=len(TOPICS)).float()\n"
         "    criterion = nn.CrossEntropyLoss(weight=per_class.sum() / (len(TOPICS) * per_class))\n",
         "class weights"),
    case("module_sentences--max-pooled",
         "        mask = mask.unsqueeze(-1)\n"
         "        pooled = (x * mask).sum(1) / mask.sum(1)\n"
         "        return self.head(pooled)\n",
         "        x = x.masked_fill(mask.unsqueeze(-1) == 0, float(\"-inf\"))\n"
         "        return self.head(x.max(dim=1).values)\n",
         "the maximum over the words"),
    case("power_lstm--gru",
         "        self.lstm = nn.LSTM(n_features, hidden, batch_first=True)\n",
         "        self.lstm = nn.GRU(n_features, hidden, num_layers=2, batch_first=True, dropout=0.1)\n",
         "a GRU of two layers"),
    case("distil_small--logits-by-mse",
         "            soft_targets = F.softmax(teacher_logits / T, dim=-1)\n"
         "            soft_prob = F.log_softmax(student_logits / T, dim=-1)\n"
         "            loss = F.kl_div(soft_prob, soft_targets, reduction=\"batchmean\") * T**2\n",
         "            loss = 0.1 * F.mse_loss(student_logits, teacher_logits)\n",
         "the logits are matched"),
    case("finetune_head--flips-off-bn-frozen",
         "    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)\n",
         "    for m in model.modules():\n"
         "        if isinstance(m, nn.BatchNorm2d):\n"
         "            m.momentum = 0.0\n"
         "    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)\n",
         "the statistics of the batch norms are kept in the fine-tuning"),
    case("maze_dqn--double",
         "            next_q = self.target(next_states).max(dim=1).values\n",
         "            best = self.q(next_states).argmax(dim=1, keepdim=True)\n"
         "            next_q = self.target(next_states).gather(1, best).squeeze(1)\n",
         "double DQN"),
    case("maze_dqn--soft-updates",
         "        if self.updates % self.sync_every == 0:\n"
         "            self.target.load_state_dict(self.q.state_dict())\n",
         "        with torch.no_grad():\n"
         "            for slow, fast in zip(self.target.parameters(), self.q.parameters()):\n"
         "                slow.lerp_(fast, 0.01)\n",
         "soft updates of the target network"),
]  # fmt: skip

HARMFUL = {
    "finetune_head--backbone-not-loaded",
    "maze_dqn--max-of-own-values",
    "maze_dqn--state-by-reference",
    "maze_dqn--state-kept",
    "module_sentences--sorted-without-labels",
    "module_sentences--vocabulary-per-split",
    "stdlib_chars--mask-upside-down",
}

HONEST: dict[str, str] = {}
