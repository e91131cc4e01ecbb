"""Bugs of the twelve scripts in scripts/ninth, the half kept away from whoever changes checks: ids whose CRC-32 is odd.

A bug counts if the script's own final number is at least 1% worse at both of two seeds: `python -m tests.guard.harm churn_embed ...`.
"seen often" is the writer's own experience; no source was looked up.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("finetune_groups--split_twice",
         "train_x, val_x, train_y, val_y = train_test_split(new_x, new_y, train_size=64, test_size=300, random_state=SEED)\n",
         "train_x, val_x = train_test_split(new_x, train_size=64, test_size=300)\n"
         "train_y, val_y = train_test_split(new_y, train_size=64, test_size=300)\n",
         "pictures and labels are split by two calls without a common random_state: no picture has its own label (seen often)"),
    case("finetune_groups--step_in_batches",
         "                    optimizer.step()\n"
         "            running_loss += loss.item() * inputs.size(0)\n"
         "            running_corrects += torch.sum(preds == labels).item()\n"
         "        if phase == \"train\":\n"
         "            exp_lr_scheduler.step()\n",
         "                    optimizer.step()\n"
         "                    exp_lr_scheduler.step()\n"
         "            running_loss += loss.item() * inputs.size(0)\n"
         "            running_corrects += torch.sum(preds == labels).item()\n",
         "StepLR, whose step size counts epochs, is stepped after each batch: the rate is gone within the first epoch (seen often)"),
    case("vit_mixup--softmax_over_queries",
         "attn.softmax(dim=-1)",
         "attn.softmax(dim=-2)",
         "the attention's softmax runs over the queries, not over the keys (seen in own implementations)"),
    case("vit_mixup--heads_not_moved_back",
         "(attn @ v).transpose(1, 2).reshape(B, N, C)",
         "(attn @ v).reshape(B, N, C)",
         "heads are merged without moving them back behind the tokens: reshape mixes heads and tokens (seen often)"),
    case("vit_mixup--second_label_lost",
         "return mixed_x, y, y[index], lam",
         "return mixed_x, y, y, lam",
         "mixup of the pictures only: the second label of the loss is the first (seen in code reviews)"),
    case("vit_mixup--positions_not_assigned",
         "        x = x + self.pos_embed\n",
         "        x + self.pos_embed\n",
         "the sum with the positions is not assigned (seen often)"),
    case("gpt_memmap--targets_not_shifted",
         "data[i + 1 : i + 1 + block_size]",
         "data[i : i + block_size]",
         "the targets are the inputs themselves (seen often)"),
    case("hf_modules--ids_by_appearance",
         "        self.labels = [label2id[name] for _, name in examples]\n",
         "        label2id = {name: i for i, name in enumerate(dict.fromkeys(name for _, name in examples))}\n"
         "        self.labels = [label2id[name] for _, name in examples]\n",
         "each split numbers the classes by their first appearance in it (seen often)"),
    case("hf_modules--mask_inverted",
         "(ids != PAD).long()",
         "(ids == PAD).long()",
         "the attention mask is 1 where the padding is (seen often: torch's own layers want it so)"),
    case("accelerate_pieces--schedule_of_one_epoch",
         " // ACCUMULATION_STEPS * NUM_EPOCHS\n",
         " // ACCUMULATION_STEPS\n",
         "the schedule's length is that of one epoch: the rate is zero for all the others (seen often)"),
    case("flow_digits--ema_of_long_run",
         "64, 1500, 0.995",
         "64, 1500, 0.9999",
         "the averaging of a long run: after 1500 steps the averaged weights are still the first ones for the most part (seen often)"),
    case("clip_halves--scale_not_exp",
         "self.logit_scale.exp() * u",
         "self.logit_scale * u",
         "the logarithm of the scale is used as the scale (seen in own implementations)"),
    case("a2c_cartpole--values_detached",
         "(returns - values).pow(2)",
         "(returns - values.detach()).pow(2)",
         "detach() on the critic's values instead of on their target: the critic learns nothing (seen often)"),
    case("a2c_cartpole--observation_kept",
         "            obs, reward, terminated, truncated, _ = envs.step(action.numpy())\n",
         "            next_obs, reward, terminated, truncated, _ = envs.step(action.numpy())\n",
         "the new observation is never made the current one: the net sees the first for ever (seen often)"),
    case("audio_tags--cross_entropy",
         "criterion = nn.BCEWithLogitsLoss()",
         "criterion = nn.CrossEntropyLoss()",
         "cross-entropy takes rows of zeros and ones as probabilities of classes that exclude each other (seen often)"),
    case("audio_tags--cleared_once_an_epoch",
         "    for x, target in train_dl:\n"
         "        optimizer.zero_grad()\n"
         "        loss = criterion(model(x), target)\n",
         "    optimizer.zero_grad()\n"
         "    for x, target in train_dl:\n"
         "        loss = criterion(model(x), target)\n",
         "gradients are cleared once an epoch and add up in between (seen often)"),
]  # fmt: skip
HEALTHY = [
    case("finetune_groups--frozen_batch_norm",
         "        model.train(phase == \"train\")\n",
         "        model.train(phase == \"train\")\n"
         "        for m in model.modules():\n"
         "            if isinstance(m, nn.BatchNorm2d):\n"
         "                m.eval().requires_grad_(False)\n",
         "batch norm stays as it was pretrained"),
    case("seq2seq_dates--scheduled_sampling",
         "model(src, trg, teacher_forcing_ratio)",
         "model(src, trg, 1 - 0.8 * step / STEPS)",
         "teacher forcing fades out"),
    case("hf_modules--recipe",
         "    warmup_steps=40,\n",
         "    warmup_steps=20,\n"
         "    lr_scheduler_type=\"cosine\",\n"
         "    gradient_accumulation_steps=2,\n"
         "    max_grad_norm=0.5,\n"
         "    label_smoothing_factor=0.1,\n",
         "cosine, accumulation, a lower bound of clipping, label smoothing"),
    case("accelerate_pieces--buckets",
         "train_dataloader = DataLoader(train_sentences, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate_fn)\n",
         "\n"
         "\n"
         "class Buckets(torch.utils.data.Sampler):\n"
         "    def __init__(self, data, size):\n"
         "        self.data, self.size = data, size\n"
         "\n"
         "    def __len__(self):\n"
         "        return len(self.data) // self.size\n"
         "\n"
         "    def __iter__(self):\n"
         "        order = sorted(range(len(self.data)), key=lambda i: len(self.data[i]) + 4 * random.random())\n"
         "        batches = [order[k * self.size : (k + 1) * self.size] for k in range(len(self))]\n"
         "        random.shuffle(batches)\n"
         "        yield from batches\n"
         "\n"
         "\n"
         "train_dataloader = DataLoader(train_sentences, batch_sampler=Buckets(train_sentences, BATCH_SIZE), collate_fn=collate_fn)\n",
         "batches of sentences of nearly the same length, in an order of their own each epoch"),
    case("flow_digits--logit_normal_times",
         "    t = torch.rand(BATCH_SIZE, 1)\n",
         "    t = torch.sigmoid(torch.randn(BATCH_SIZE, 1))\n",
         "times in the middle are drawn more often"),
    case("clip_halves--scale_clamped",
         "            scheduler.step()\n",
         "            scheduler.step()\n"
         "            with torch.no_grad():\n"
         "                model.logit_scale.clamp_(0, np.log(100))\n",
         "the scale is clamped after each step, as CLIP does"),
    case("a2c_cartpole--two_rates",
         "    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)\n",
         "    optimizer = torch.optim.Adam(\n"
         "        [{\"params\": model.actor.parameters(), \"lr\": 2e-3}, {\"params\": model.critic.parameters(), \"lr\": 5e-3}], eps=1e-5\n"
         "    )\n",
         "rates of their own for actor and critic"),
    case("audio_tags--spec_augment",
         "    for x, target in train_dl:\n"
         "        optimizer.zero_grad()\n",
         "    for x, target in train_dl:\n"
         "        band, moment = np.random.randint(0, N_MELS - 3), np.random.randint(0, x.size(3) - 3)\n"
         "        x = x.clone()\n"
         "        x[:, :, band : band + 3] = x.mean()\n"
         "        x[..., moment : moment + 3] = x.mean()\n"
         "        optimizer.zero_grad()\n",
         "a band and a moment of the spectrogram are hidden"),
]  # fmt: skip
HARMFUL: set[str] = {
    "finetune_groups--split_twice",
    "finetune_groups--step_in_batches",
    "vit_mixup--second_label_lost",
    "vit_mixup--positions_not_assigned",
    "gpt_memmap--targets_not_shifted",
    "hf_modules--ids_by_appearance",
    "hf_modules--mask_inverted",
    "accelerate_pieces--schedule_of_one_epoch",
    "flow_digits--ema_of_long_run",
    "clip_halves--scale_not_exp",
    "a2c_cartpole--values_detached",
    "a2c_cartpole--observation_kept",
    "audio_tags--cross_entropy",
    "audio_tags--cleared_once_an_epoch",
}
"""Bugs with a final number at least 1% worse at both seeds."""
HONEST: dict[str, str] = {
    "gpt_memmap--targets_not_shifted": """

def right_batch(split):
    ix = torch.randint(len(val_data) - block_size - 1, (batch_size,))
    rows = torch.stack([torch.from_numpy(val_data[i : i + block_size + 1].astype(np.int64)) for i in ix])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


get_batch = right_batch
print(f"FINAL val_loss={estimate_loss()['val']:.4f}")
""",
}  # fmt: skip
"""Code that is run after the script, where its own evaluation is wrong."""
