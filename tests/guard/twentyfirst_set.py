"""Ordinary bugs in scripts of the shape of public training scripts (scripts/twentyfirst): the open half (2026-11-29).

Written by someone who had read no check. Seven scripts in the form of timm's train.py, transformers' run_glue_no_trainer.py, nanoGPT, CleanRL
(SAC), denoising-diffusion-pytorch, milesial/Pytorch-UNet and a notebook with pandas. The bugs are one-line slips as threads and reviews have
them. Halves: the last hexadecimal digit of the SHA-256 sum of the id; odd ones are in twentyfirst_set_heldout.py. HARMFUL: the last number of
the script is clearly worse at seed 0, or better and untrue (of nine bugs measured, of the others assumed). Without harm at seed 0: the action of this
state in SAC (return -171 for -174), a warm-up in each epoch (error 2.4% for 2.8%), a missing train mode (3.4%).
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("timm_mnist--saver-keeps-the-lowest",
         "args.output, decreasing=False)",
         "args.output, decreasing=True)",
         "the checkpoint with the lowest accuracy counts as the best"),
    case("timm_mnist--average-once-per-epoch",
         "        model_ema.update(model)\n",
         "    model_ema.update(model)\n",
         "indentation: the average is updated after the loop over batches"),
    case("timm_mnist--train-mode-missing",
         "    losses_m = AverageMeter()\n"
         "    model.train()\n",
         "    losses_m = AverageMeter()\n",
         "nothing puts the model back into train mode after the first evaluation"),
    case("glue_no_trainer--mask-inverted",
         "(input_ids != tokenizer.pad_token_id).long()",
         "(input_ids == tokenizer.pad_token_id).long()",
         "the mask is one at the padding"),
    case("nano_accum--batch-drawn-once",
         "            X, Y = get_batch(\"train\")\n"
         "            loss.backward()\n",
         "            loss.backward()\n",
         "the next batch is never fetched: all updates use the first one"),
    case("nano_accum--targets-not-shifted",
         "(data[i + 1 : i + 1 + block_size])",
         "(data[i : i + block_size])",
         "the targets are the inputs"),
    case("nano_accum--validation-from-the-training-text",
         "    val_data = data[int(n * 0.9) :]\n",
         "    val_data = data[: int(n * 0.1)]\n",
         "the held-out text is the first tenth of the training text"),
    case("sac_continuous--observation-overwritten",
         "        rb.add(obs, next_obs, action, reward, terminated)\n"
         "        obs = next_obs\n",
         "        obs = next_obs\n"
         "        rb.add(obs, next_obs, action, reward, terminated)\n",
         "the observation is overwritten before it is stored"),
    case("sac_continuous--temperature-sign",
         "(-log_alpha.exp() * (log_pi + target_entropy))",
         "(log_alpha.exp() * (log_pi + target_entropy))",
         "the sign of the temperature's loss"),
    case("ema_ddpm--not-normalised",
         "        img = normalize_to_neg_one_to_one(img)\n",
         "",
         "training pictures stay in 0..1, samples are mapped back from -1..1"),
    case("ema_ddpm--root-missing",
         "register_buffer(\"sqrt_one_minus_alphas_cumprod\", torch.sqrt(1.0 - alphas_cumprod))",
         "register_buffer(\"sqrt_one_minus_alphas_cumprod\", 1.0 - alphas_cumprod)",
         "the noise is added with its variance in place of its deviation"),
    case("carvana_unet--plateau-of-a-loss",
         "ReduceLROnPlateau(optimizer, \"max\", patience=1, factor=0.3)",
         "ReduceLROnPlateau(optimizer, \"min\", patience=1, factor=0.3)",
         "the scheduler waits for the score to fall: the rate is cut while it rises"),
    case("carvana_unet--one-hot-viewed",
         "                F.one_hot(true_masks, model.n_classes).permute(0, 3, 1, 2).float(),\n",
         "                F.one_hot(true_masks, model.n_classes).view(masks_pred.shape).float(),\n",
         "view() in place of permute(): the classes of a pixel get to other pixels"),
    case("carvana_unet--split-drawn-twice",
         "    train_set, val_set = random_split(dataset, [n_train, n_val], generator=torch.Generator().manual_seed(seed))\n",
         "    train_set, _ = random_split(dataset, [n_train, n_val])\n"
         "    _, val_set = random_split(dataset, [n_train, n_val])\n",
         "the data are split twice, by other draws"),
    case("tabular_pandas--only-features-shuffled",
         "    X = df.drop(columns=[TARGET])\n",
         "    X = df.drop(columns=[TARGET]).sample(frac=1, random_state=0)\n",
         "the rows of the features are shuffled, those of the target are not"),
    case("tabular_pandas--keep-probability",
         "hidden=96, p=0.15)",
         "hidden=96, p=0.85)",
         "the probability to keep is given as the probability to drop"),
]  # fmt: skip

HEALTHY = [
    case("timm_mnist--average-with-warm-up",
         "        self._update(model, update_fn=lambda e, m: self.decay * e + (1.0 - self.decay) * m)\n",
         "        self.updates = getattr(self, \"updates\", 0) + 1\n"
         "        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))\n"
         "        self._update(model, update_fn=lambda e, m: decay * e + (1.0 - decay) * m)\n",
         "the average's decay grows"),
    case("glue_no_trainer--smoothed-loss",
         "            loss = outputs.loss\n",
         "            loss = torch.nn.functional.cross_entropy(outputs.logits, batch[\"labels\"], label_smoothing=0.1)\n",
         "the model's own loss is not used"),
    case("glue_no_trainer--embeddings-without-decay",
         "    no_decay = [\"bias\", \"LayerNorm.weight\"]\n",
         "    no_decay = [\"bias\", \"LayerNorm.weight\", \"embeddings\"]\n",
         "embeddings are not decayed either"),
    case("sac_continuous--targets-copied",
         "            if global_step % args.target_network_frequency == 0:\n"
         "                for param, target_param in zip(qf1.parameters(), qf1_target.parameters()):\n"
         "                    target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)\n"
         "                for param, target_param in zip(qf2.parameters(), qf2_target.parameters()):\n"
         "                    target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)\n",
         "            if global_step % 50 == 0:\n"
         "                qf1_target.load_state_dict(qf1.state_dict())\n"
         "                qf2_target.load_state_dict(qf2.state_dict())\n",
         "the targets are copied every 50 steps"),
]  # fmt: skip

HARMFUL = {
    "carvana_unet--one-hot-viewed",
    "carvana_unet--plateau-of-a-loss",
    "carvana_unet--split-drawn-twice",
    "ema_ddpm--not-normalised",
    "ema_ddpm--root-missing",
    "glue_no_trainer--mask-inverted",
    "nano_accum--batch-drawn-once",
    "nano_accum--targets-not-shifted",
    "nano_accum--validation-from-the-training-text",
    "sac_continuous--observation-overwritten",
    "sac_continuous--temperature-sign",
    "tabular_pandas--keep-probability",
    "tabular_pandas--only-features-shuffled",
    "timm_mnist--average-once-per-epoch",
    "timm_mnist--saver-keeps-the-lowest",
}

HONEST: dict[str, str] = {}
