"""Everyday bugs in scripts of the shape of well-known public ones (scripts/twentieth): the closed half (2026-11-29).

See twentieth_set.py.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("espcn_photos--nearest-in-training",
         "        input = target.resize((small, small), Image.BICUBIC)\n",
         "        input = target.resize((small, small), Image.NEAREST if self.augment else Image.BICUBIC)\n",
         "training pictures are made small by another filter than those of the test"),
    case("ppo_cartpole--done-of-this-step",
         "                    nextnonterminal = 1.0 - dones[t + 1]\n",
         "                    nextnonterminal = 1.0 - dones[t]\n",
         "the episode's end is that of the step before"),
    case("awd_lstm--batchify-in-rows",
         "    data = data.view(bsz, -1).t().contiguous()\n",
         "    data = data.view(-1, bsz).contiguous()\n",
         "the text runs along the batch: the next row is 20 words later"),
    case("awd_lstm--rate-not-restored",
         "        optimizer.param_groups[0][\"lr\"] = lr2\n",
         "",
         "the rate that was scaled by the length is scaled again at the next step"),
    case("awd_lstm--batch-first-logits",
         "        decoded = self.decoder(output.reshape(-1, output.size(2)))\n",
         "        decoded = self.decoder(output.transpose(0, 1).reshape(-1, output.size(2)))\n",
         "logits are flattened batch first, targets time first"),
    case("awd_lstm--dropout-in-evaluation",
         "        if not self.training or not dropout:\n",
         "        if not dropout:\n",
         "locked dropout is active in the evaluation"),
    case("reference_digits--warmup-in-iterations",
         "        optimizer, start_factor=args.lr_warmup_decay, total_iters=args.lr_warmup_epochs\n"
         "    )\n"
         "    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(\n"
         "        optimizer, schedulers=[warmup_lr_scheduler, main_lr_scheduler], milestones=[args.lr_warmup_epochs]\n"
         "    )\n",
         "        optimizer, start_factor=args.lr_warmup_decay, total_iters=args.lr_warmup_epochs * len(data_loader)\n"
         "    )\n"
         "    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(\n"
         "        optimizer,\n"
         "        schedulers=[warmup_lr_scheduler, main_lr_scheduler],\n"
         "        milestones=[args.lr_warmup_epochs * len(data_loader)],\n"
         "    )\n",
         "the warm-up is counted in batches, and the scheduler is stepped once per epoch"),
    case("reference_digits--mixup-shares-exchanged",
         "        target = target.mul(lambda_param).add(target_rolled.mul(1.0 - lambda_param))\n",
         "        target = target.mul(1.0 - lambda_param).add(target_rolled.mul(lambda_param))\n",
         "the labels of mixed pictures have each other's share"),
    case("reference_digits--test-not-normalised",
         "v2.Compose([v2.CenterCrop(crop_size), v2.Normalize(mean=mean, std=std)])",
         "v2.Compose([v2.CenterCrop(crop_size)])",
         "the evaluation's preset does not normalise"),
    case("reference_digits--buffers-not-averaged",
         "ema_avg, use_buffers=True)",
         "ema_avg)",
         "the averaged model keeps the first statistics of its batch norms"),
    case("reference_digits--last-module-only",
         "        params[key] += [p for",
         "        params[key] = [p for",
         "= in place of +=: only the last modules' parameters reach the optimiser"),
    case("spheres_unet3d--dice-of-logits",
         "    loss_function = DiceLoss(sigmoid=True)\n",
         "    loss_function = DiceLoss()\n",
         "the Dice loss gets logits"),
    case("spheres_unet3d--skip-is-itself",
         "        y1 = self.dec1(torch.cat([x1, self.up1(y2)], dim=1))\n",
         "        y1 = self.up1(y2)\n"
         "        y1 = self.dec1(torch.cat([y1, y1], dim=1))\n",
         "the last skip connection joins the decoder with itself"),
    case("sasrec_sessions--input-is-target",
         "            seq[idx] = i\n"
         "            pos[idx] = nxt\n"
         "            neg[idx] = random_neq(1, self.itemnum + 1, ts)\n"
         "            nxt = i\n",
         "            seq[idx] = i\n"
         "            nxt = i\n"
         "            pos[idx] = nxt\n"
         "            neg[idx] = random_neq(1, self.itemnum + 1, ts)\n",
         "the next item is updated too early: each position predicts its own item"),
    case("sasrec_sessions--test-item-in-history",
         "        seq[idx] = valid[u][0]\n",
         "        seq[idx] = test[u][0]\n",
         "the history ends with the item that is to be predicted, in place of the one before"),
    case("sasrec_sessions--padding-scored",
         "        indices = np.where(pos != 0)\n",
         "        indices = np.where(pos >= 0)\n",
         "padding counts as a position of the loss"),
    case("forecast_exp--known-hours-predicted",
         "                batch_y = batch_y[:, -self.args.pred_len :, :]\n",
         "                batch_y = batch_y[:, : self.args.pred_len, :]\n",
         "the first hours of the target are the last ones of the input"),
    case("forecast_exp--reshaped-not-permuted",
         "        x = (seasonal_output + trend_output).permute(0, 2, 1)\n",
         "        x = (seasonal_output + trend_output).reshape(-1, self.pred_len, self.channels)\n",
         "reshape() in place of permute() mixes channels and hours"),
    case("forecast_exp--target-not-scaled",
         "        self.data_y = data[border1:border2]\n",
         "        self.data_y = df[border1:border2]\n",
         "inputs are scaled, targets are not"),
    case("forecast_exp--worst-kept",
         "        score = -val_loss\n",
         "        score = val_loss\n",
         "early stopping keeps the weights with the highest loss"),
    case("supcon_digits--views-interleaved",
         "        f1, f2 = torch.split(features, [bsz, bsz], dim=0)\n"
         "        features = torch.cat([f1.unsqueeze(1), f2.unsqueeze(1)], dim=1)\n",
         "        features = features.view(bsz, 2, -1)\n",
         "view() pairs the crops of different pictures"),
]  # fmt: skip

HEALTHY = [
    case("espcn_photos--residual",
         "        x = self.relu(self.conv1(x))\n"
         "        x = self.relu(self.conv2(x))\n"
         "        x = self.relu(self.conv3(x))\n"
         "        x = self.pixel_shuffle(self.conv4(x))\n"
         "        return x\n",
         "        y = self.relu(self.conv1(x))\n"
         "        y = self.relu(self.conv2(y))\n"
         "        y = self.relu(self.conv3(y))\n"
         "        y = self.pixel_shuffle(self.conv4(y))\n"
         "        return y + nn.functional.interpolate(x, scale_factor=self.pixel_shuffle.upscale_factor, mode=\"bicubic\")\n",
         "the net adds to the bicubic picture"),
    case("ppo_cartpole--target-kl",
         "    target_kl: float | None = None\n",
         "    target_kl: float | None = 0.03\n",
         "epochs end early by the KL divergence"),
    case("awd_lstm--activation-penalties",
         "parser.add_argument(\"--alpha\", type=float, default=0.0, help=\"activation regularization\")\n"
         "parser.add_argument(\"--beta\", type=float, default=0.0,",
         "parser.add_argument(\"--alpha\", type=float, default=2.0, help=\"activation regularization\")\n"
         "parser.add_argument(\"--beta\", type=float, default=1.0,",
         "AR and TAR are on: the trained loss is larger than the logged one"),
    case("awd_lstm--embedding-dropout",
         "        output = self.lockdrop(self.encoder(input), self.dropout)\n",
         "        weight = self.encoder.weight\n"
         "        if self.training:\n"
         "            weight = weight * weight.new_empty(len(weight), 1).bernoulli_(0.9) / 0.9\n"
         "        output = self.lockdrop(F.embedding(input, weight), self.dropout)\n",
         "whole words are dropped from the embedding"),
    case("reference_digits--zero-init-residual",
         "        self.relu = nn.ReLU(inplace=True)\n"
         "        self.downsample = None\n",
         "        nn.init.zeros_(self.bn2.weight)\n"
         "        self.relu = nn.ReLU(inplace=True)\n"
         "        self.downsample = None\n",
         "the last norm of each block begins at zero"),
    case("sasrec_sessions--bpr",
         "        loss = bce_criterion(pos_logits[indices], pos_labels[indices])\n"
         "        loss += bce_criterion(neg_logits[indices], neg_labels[indices])\n",
         "        loss = -torch.nn.functional.logsigmoid(pos_logits[indices] - neg_logits[indices]).mean()\n",
         "a loss of pairs"),
    case("forecast_exp--individual",
         "    individual = False\n",
         "    individual = True\n",
         "a layer for each channel"),
    case("supcon_digits--simclr",
         "default=\"SupCon\"",
         "default=\"SimCLR\"",
         "no labels in the first stage"),
]  # fmt: skip

HARMFUL = {
    "awd_lstm--batch-first-logits",
    "awd_lstm--batchify-in-rows",
    "awd_lstm--rate-not-restored",
    "espcn_photos--nearest-in-training",
    "forecast_exp--known-hours-predicted",
    "forecast_exp--reshaped-not-permuted",
    "forecast_exp--target-not-scaled",
    "ppo_cartpole--done-of-this-step",
    "reference_digits--last-module-only",
    "reference_digits--test-not-normalised",
    "sasrec_sessions--input-is-target",
    "sasrec_sessions--test-item-in-history",
    "spheres_unet3d--dice-of-logits",
    "supcon_digits--views-interleaved",
}

HONEST: dict[str, str] = {}

SOURCES = {
    "awd_lstm--dropout-in-evaluation": "https://github.com/karpathy/nanoGPT/pull/240",
    "reference_digits--buffers-not-averaged": "https://github.com/pytorch/pytorch/issues/84053",
    "spheres_unet3d--dice-of-logits": "https://github.com/MIC-DKFZ/nnUNet/issues/108",
}
"""Where the same mistake was found in public code."""
