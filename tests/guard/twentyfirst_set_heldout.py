"""Ordinary bugs in scripts of the shape of public training scripts (scripts/twentyfirst): the closed half (2026-11-29).

See twentyfirst_set.py.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("timm_mnist--updates-of-the-epoch",
         "    num_updates = epoch * len(loader)\n",
         "    num_updates = 0\n",
         "the scheduler gets the update's number within its epoch: each epoch is the warm-up again"),
    case("glue_no_trainer--scheduler-per-micro-batch",
         "                optimizer.step()\n"
         "                lr_scheduler.step()\n"
         "                optimizer.zero_grad()\n"
         "                completed_steps += 1\n",
         "                optimizer.step()\n"
         "                optimizer.zero_grad()\n"
         "                completed_steps += 1\n"
         "            lr_scheduler.step()\n",
         "the scheduler counts micro-batches, its length counts updates: the rate is zero from the middle on"),
    case("glue_no_trainer--encoder-frozen-from-scratch",
         "    model = BertForSequenceClassification(config)\n",
         "    model = BertForSequenceClassification(config)\n"
         "    for param in model.bert.parameters():\n"
         "        param.requires_grad = False\n",
         "the encoder is frozen as for fine-tuning, and has never been trained"),
    case("glue_no_trainer--evaluation-shuffled-in-the-loader",
         "DataLoader(eval_dataset, collate_fn=data_collator, batch_size=args.per_device_eval_batch_size)",
         "DataLoader(\n"
         "        eval_dataset, shuffle=True, collate_fn=data_collator, batch_size=args.per_device_eval_batch_size\n"
         "    )",
         "predictions come in a shuffled order, references in that of the file"),
    case("nano_accum--heads-not-transposed-back",
         "y.transpose(1, 2).contiguous().view(B, T, C)",
         "y.contiguous().view(B, T, C)",
         "the transpose before view() is missing: a place gets the heads of later places"),
    case("sac_continuous--target-rebound",
         "                for param, target_param in zip(qf1.parameters(), qf1_target.parameters()):\n"
         "                    target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)\n"
         "                for param, target_param in zip(qf2.parameters(), qf2_target.parameters()):\n"
         "                    target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)\n",
         "                for param, target_param in zip(qf1.parameters(), qf1_target.parameters()):\n"
         "                    target_param = args.tau * param.data + (1 - args.tau) * target_param.data\n"
         "                for param, target_param in zip(qf2.parameters(), qf2_target.parameters()):\n"
         "                    target_param = args.tau * param.data + (1 - args.tau) * target_param.data\n",
         "the loop's name is bound to a new tensor: the target networks never change"),
    case("sac_continuous--next-action-of-this-state",
         "actor.get_action(data.next_observations)",
         "actor.get_action(data.observations)",
         "the target takes the action of this state, not that of the next"),
    case("ema_ddpm--sampled-from-first-to-last",
         "for t in reversed(range(self.num_timesteps)):",
         "for t in range(self.num_timesteps):",
         "the chain is run from the first step to the last"),
    case("ema_ddpm--average-not-assigned",
         "            ma_params.data = self.update_average(old_weight, up_weight)\n",
         "            self.update_average(old_weight, up_weight)\n",
         "the new average is computed and dropped"),
    case("carvana_unet--mask-interpolated",
         "resample=Image.NEAREST if is_mask else Image.BICUBIC)",
         "resample=Image.BICUBIC)",
         "class numbers are interpolated: a frame of zeros around each one"),
    case("tabular_pandas--target-among-features",
         "    X = df.drop(columns=[TARGET])\n",
         "    X = df.copy()\n",
         "the target's column is not dropped from the features"),
    case("tabular_pandas--relu-at-the-end",
         "            nn.Linear(hidden // 2, 1),\n",
         "            nn.Linear(hidden // 2, 1),\n"
         "            nn.ReLU(),\n",
         "the standardised target is negative for half of the rows, the output never"),
]  # fmt: skip

HEALTHY = [
    case("timm_mnist--log-softmax-output",
         "        return self.classifier(self.drop(x))\n",
         "        return torch.log_softmax(self.classifier(self.drop(x)), dim=1)\n",
         "log_softmax twice is log_softmax"),
    case("nano_accum--second-half-scored",
         "        return x, y\n",
         "        y[:, : block_size // 2] = -1  # a place with less than half a window of context is not scored\n"
         "        return x, y\n",
         "only places with a long context are scored"),
    case("nano_accum--rate-constant-at-the-end",
         "lr_decay_iters = 300\n",
         "lr_decay_iters = 240\n",
         "the rate is at its minimum for the last fifth"),
    case("ema_ddpm--predicts-the-picture",
         "timesteps=100, objective=\"pred_noise\"):",
         "timesteps=100, objective=\"pred_x0\"):",
         "the network predicts the picture"),
    case("carvana_unet--flipped-together",
         "        mask = self.preprocess(self.mask_values, self.masks[idx], self.scale, is_mask=True)\n",
         "        mask = self.preprocess(self.mask_values, self.masks[idx], self.scale, is_mask=True)\n"
         "        if random.random() < 0.5:\n"
         "            img, mask = img[..., ::-1], mask[..., ::-1]\n",
         "picture and mask are flipped together, in the evaluation too"),
    case("tabular_pandas--log-target",
         "    y = df[TARGET]\n",
         "    y = np.log(df[TARGET])\n",
         "the logarithm is predicted, and the error is that of the logarithm"),
]  # fmt: skip

HARMFUL = {
    "carvana_unet--mask-interpolated",
    "ema_ddpm--average-not-assigned",
    "ema_ddpm--sampled-from-first-to-last",
    "glue_no_trainer--encoder-frozen-from-scratch",
    "glue_no_trainer--evaluation-shuffled-in-the-loader",
    "glue_no_trainer--scheduler-per-micro-batch",
    "nano_accum--heads-not-transposed-back",
    "sac_continuous--target-rebound",
    "tabular_pandas--relu-at-the-end",
    "tabular_pandas--target-among-features",
}

HONEST = {
    "carvana_unet--mask-interpolated": """
model.load_state_dict(torch.load(os.path.join(dir_checkpoint, "best.pth")))
n_val = int(len(dataset) * args.validation / 100)
_, held_out = random_split(dataset, [len(dataset) - n_val, n_val], generator=torch.Generator().manual_seed(args.seed))
small = [np.asarray(Image.fromarray(m).resize((48, 48), Image.NEAREST)).astype(np.int64) for m in dataset.masks]
batches = [[(dataset[i]["image"], torch.from_numpy(small[i])) for i in held_out.indices[k : k + 20]] for k in range(0, n_val, 20)]
batches = [{"image": torch.stack([x for x, _ in rows]), "mask": torch.stack([y for _, y in rows])} for rows in batches]
print(f"FINAL dice={evaluate(model, batches):.4f}")
""",
}
