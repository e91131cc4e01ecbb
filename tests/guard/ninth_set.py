"""Bugs of the twelve scripts in scripts/ninth, everyday training code, by an outsider to the checks (2026-11-26): ids whose CRC-32 is even.

A bug counts if the script's own final number is at least 1% worse at both of two seeds: `python -m tests.guard.harm churn_embed ...`.
"seen often" is the writer's own experience; no source was looked up.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("finetune_groups--prefix_kept",
         "{k.replace(\"module.\", \"\"): v for k, v in state.items()",
         "{k: v for k, v in state.items()",
         "the names of the checkpoint keep DataParallel's \"module.\"; with strict=False nothing is loaded and nothing raises (seen often)"),
    case("gpt_memmap--read_as_bytes",
         "train_data = np.memmap(\"train.bin\", dtype=np.uint16, mode=\"r\")\n"
         "val_data = np.memmap(\"val.bin\", dtype=np.uint16, mode=\"r\")\n",
         "train_data = np.memmap(\"train.bin\", dtype=np.uint8, mode=\"r\")\n"
         "val_data = np.memmap(\"val.bin\", dtype=np.uint8, mode=\"r\")\n",
         "ids are written in two bytes each and read in one: every second token is 0, which makes the loss look better (seen with nanoGPT's data)"),
    case("gpt_memmap--seed_in_get_batch",
         "    data = train_data if split == \"train\" else val_data\n",
         "    torch.manual_seed(seed)\n"
         "    data = train_data if split == \"train\" else val_data\n",
         "the seed is set \"for reproducibility\" where batches are drawn: each batch is the first one (seen often)"),
    case("seq2seq_dates--attention_over_batch",
         "F.softmax(scores, dim=1)",
         "F.softmax(scores, dim=0)",
         "the attention's softmax runs over the batch (seen often after a change to batch_first)"),
    case("seq2seq_dates--state_not_kept",
         "output, hidden = self.gru(torch.cat([embedded, context], dim=2), hidden)",
         "output, _ = self.gru(torch.cat([embedded, context], dim=2), hidden)",
         "the decoder's new state is thrown away: each step starts from the encoder's (seen often)"),
    case("seq2seq_dates--answer_as_input",
         "            output, hidden = self.decoder(token, hidden, encoder_outputs, mask)\n"
         "            outputs.append(output)\n"
         "            teacher_force = random.random() < teacher_forcing_ratio\n"
         "            token = trg[:, t] if teacher_force else output.argmax(1)\n",
         "            teacher_force = random.random() < teacher_forcing_ratio\n"
         "            token = trg[:, t] if teacher_force else token\n"
         "            output, hidden = self.decoder(token, hidden, encoder_outputs, mask)\n"
         "            outputs.append(output)\n"
         "            token = output.argmax(1)\n",
         "with teacher forcing the decoder is given the very character that it has to tell (seen often: targets without SOS)"),
    case("hf_modules--warmup_of_long_run",
         "    warmup_steps=40,\n",
         "    warmup_steps=5000,\n",
         "the warm-up of a long run is kept in a short one: the rate never comes near its value (seen often with Trainer)"),
    case("accelerate_pieces--labels_one_off",
         "    ids, word_ids = ids + [SEP], word_ids + [None]\n",
         "    ids, word_ids = ids + [SEP], word_ids[1:] + [None, None]\n",
         "no label for [CLS]: all labels are one place early (seen often)"),
    case("accelerate_pieces--vocabulary_of_words",
         "{p for s in train_sentences for w, _ in s for p in pieces_of(w)}",
         "{w for s in train_sentences for w, _ in s}",
         "the vocabulary is one of words, the ids are looked up by pieces: most are unknown (seen when a tokeniser is exchanged)"),
    case("forecast_scaled--reshape_for_permute",
         "x = x.permute(0, 2, 1)",
         "x = x.reshape(x.size(0), x.size(2), x.size(1))",
         "time and features are exchanged by reshape, which mixes them (seen often)"),
    case("forecast_scaled--inverse_of_first_column",
         "values * scaler.scale_[-1] + scaler.mean_[-1]",
         "values * scaler.scale_[0] + scaler.mean_[0]",
         "predictions are scaled back with the numbers of the first column, not the target's (seen often)"),
    case("forecast_scaled--horizon_lost",
         "self.series[i + LOOKBACK + HORIZON - 1, -1]",
         "self.series[i + LOOKBACK - 1, -1]",
         "the target is the window's own last value; predictions are compared with the value six hours later (seen often)"),
    case("churn_embed--codes_per_split",
         "    cat = torch.tensor(encode(names[idx], codes))\n",
         "    cat = torch.tensor(encode(names[idx], [fit_codes(column) for column in names[idx].T]))\n",
         "the encoder is fitted again on each split: the same city has another code in the test (seen often: fit_transform on the test)"),
    case("churn_embed--sigmoid_twice",
         "return self.layers(x).squeeze(1)",
         "return torch.sigmoid(self.layers(x)).squeeze(1)",
         "the model ends in a sigmoid, the loss and the prediction have another (seen often)"),
    case("churn_embed--pos_weight_inverted",
         "torch.tensor(n_neg / n_pos, dtype",
         "torch.tensor(n_pos / n_neg, dtype",
         "pos_weight is positives by negatives: the few positives count even less (seen often)"),
    case("flow_digits--time_along_pixels",
         "    t = torch.rand(BATCH_SIZE, 1)\n"
         "    xt = (1 - t) * x0 + t * x1\n"
         "    target = x1 - x0\n"
         "    loss = F.mse_loss(net(xt, t), target)\n",
         "    t = torch.rand(BATCH_SIZE)\n"
         "    xt = (1 - t) * x0 + t * x1\n"
         "    target = x1 - x0\n"
         "    loss = F.mse_loss(net(xt, t[:, None]), target)\n",
         "times of shape (64,) times pictures of shape (64, 64): a time per pixel, not per picture (seen often)"),
    case("flow_digits--sampled_backwards",
         "torch.full((n, 1), i / steps)",
         "torch.full((n, 1), 1 - i / steps)",
         "time runs from 1 to 0 in sampling, as in diffusion, and from noise (0) to data (1) in training (seen often)"),
    case("clip_halves--normalised_over_batch",
         "F.normalize(self.encode_upper(upper), dim=-1)\n"
         "        v = F.normalize(self.encode_lower(lower), dim=-1)\n",
         "F.normalize(self.encode_upper(upper), dim=0)\n"
         "        v = F.normalize(self.encode_lower(lower), dim=0)\n",
         "features are normalised over the batch, not over each vector (seen often)"),
    case("clip_halves--positives_at_zero",
         "labels = torch.arange(len(logits_per_upper))",
         "labels = torch.zeros(len(logits_per_upper), dtype=torch.long)",
         "labels of MoCo's loss, where the positive comes first, for a matrix of pairs (seen often)"),
    case("a2c_cartpole--ends_ignored",
         "alive = 1.0 - dones[t]",
         "alive = torch.ones_like(dones[t])",
         "values and advantages run on over the end of an episode (seen often)"),
    case("audio_tags--one_target_for_all",
         "        for _ in range(n):\n"
         "            target = (torch.rand(len(TAGS)) < 0.25).float()\n",
         "        target = torch.zeros(len(TAGS))\n"
         "        for _ in range(n):\n"
         "            target.copy_(torch.rand(len(TAGS)) < 0.25)\n",
         "one tensor is filled again for each clip and stored without a copy: all clips have the last one's tags (seen often)"),
]  # fmt: skip
HEALTHY = [
    case("finetune_groups--adamw_cosine",
         "optimizer = optim.SGD([{\"params\": base, \"lr\": 1e-3}, {\"params\": head, \"lr\": 1e-2}], momentum=0.9, weight_decay=1e-4)\n"
         "criterion = nn.CrossEntropyLoss()\n"
         "exp_lr_scheduler = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3)\n",
         "optimizer = optim.AdamW([{\"params\": base, \"lr\": 3e-4}, {\"params\": head, \"lr\": 3e-3}], weight_decay=1e-2)\n"
         "criterion = nn.CrossEntropyLoss(weight=torch.tensor(len(train_y) / 4 / np.bincount(train_y), dtype=torch.float32))\n"
         "exp_lr_scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_EPOCHS)\n",
         "AdamW, cosine by epochs, class weights"),
    case("vit_mixup--smoothing",
         "criterion = nn.CrossEntropyLoss()",
         "criterion = nn.CrossEntropyLoss(label_smoothing=0.1)",
         "label smoothing beside mixup"),
    case("vit_mixup--mean_pooling",
         "self.head(self.norm(x)[:, 0])",
         "self.head(self.norm(x)[:, 1:].mean(dim=1))",
         "mean of the patches in place of the class token, which stays"),
    case("gpt_memmap--tied",
         "        self.apply(self._init_weights)\n",
         "        self.lm_head.weight = self.wte.weight\n"
         "        self.apply(self._init_weights)\n",
         "input and output embeddings are one"),
    case("forecast_scaled--change_since_last",
         "return self.head(self.conv(x)).squeeze(-1)",
         "return x[:, -1, -1] + self.head(self.conv(x)).squeeze(-1)",
         "the net predicts the change since the last value"),
    case("churn_embed--balanced_sampler",
         "criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(n_neg / n_pos, dtype=torch.float32))\n",
         "weights = torch.where(train_dl.dataset.tensors[2] == 1, n_neg / n_pos, 1.0)\n"
         "sampler = torch.utils.data.WeightedRandomSampler(weights.double(), len(weights))\n"
         "train_dl = DataLoader(train_dl.dataset, batch_size=128, sampler=sampler, drop_last=True)\n"
         "criterion = nn.BCEWithLogitsLoss()\n",
         "a balancing sampler in place of pos_weight; the last batch is dropped"),
]  # fmt: skip
HARMFUL: set[str] = {
    "gpt_memmap--read_as_bytes",
    "gpt_memmap--seed_in_get_batch",
    "seq2seq_dates--attention_over_batch",
    "seq2seq_dates--state_not_kept",
    "seq2seq_dates--answer_as_input",
    "hf_modules--warmup_of_long_run",
    "accelerate_pieces--labels_one_off",
    "accelerate_pieces--vocabulary_of_words",
    "forecast_scaled--inverse_of_first_column",
    "forecast_scaled--horizon_lost",
    "churn_embed--codes_per_split",
    "churn_embed--sigmoid_twice",
    "churn_embed--pos_weight_inverted",
    "flow_digits--time_along_pixels",
    "flow_digits--sampled_backwards",
    "clip_halves--positives_at_zero",
    "a2c_cartpole--ends_ignored",
    "audio_tags--one_target_for_all",
}
"""Bugs with a final number at least 1% worse at both seeds."""
HONEST: dict[str, str] = {
    "gpt_memmap--read_as_bytes": """
val_data = np.memmap("val.bin", dtype=np.uint16, mode="r")
print(f"FINAL val_loss={estimate_loss()['val']:.4f}")
""",
    "gpt_memmap--seed_in_get_batch": """

def right_batch(split):
    ix = torch.randint(len(val_data) - block_size - 1, (batch_size,))
    rows = torch.stack([torch.from_numpy(val_data[i : i + block_size + 1].astype(np.int64)) for i in ix])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


get_batch = right_batch
print(f"FINAL val_loss={estimate_loss()['val']:.4f}")
""",
    "audio_tags--one_target_for_all": """

truth = []
torch.manual_seed(SEED)
np.random.seed(SEED)
for n in (1000, 400):
    truth = []
    for _ in range(n):
        truth.append((torch.rand(len(TAGS)) < 0.25).float())
        torch.randn(int(SR * DURATION))
        for k in truth[-1].nonzero().flatten().tolist():
            np.random.rand()
            make_sound(TAGS[k])
with torch.no_grad():
    scores = torch.cat([torch.sigmoid(model(x)) for x, _ in test_dl]).numpy()
print(f"FINAL map={average_precision_score(torch.stack(truth).numpy(), scores, average='macro'):.4f}")
""",
}  # fmt: skip
"""Code that is run after the script, where its own evaluation is wrong."""
