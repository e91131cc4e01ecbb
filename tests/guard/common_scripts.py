"""Bugs and healthy variants of ten scripts of common kinds, by somebody who had not read the checks (2026-11-23, the fourth such set).

Half A, split by sha256(id): open while checks are mended.
"""

from tests.helpers.patches import ScriptPatch


def case(id: str, old: str, new: str, cause: str) -> ScriptPatch:
    """One bug or healthy variant; the script's name is the first part of its id."""
    return ScriptPatch(id, f"{id.partition('--')[0]}.py", old, new, "outside", "common_scripts.py", cause)


BUGS = [
    case("keras_trainer--best_mode", 'monitor="val_acc", mode="max"',
         'monitor="val_acc"',
         "the worst epoch's weights are kept (pyg-team/pytorch_geometric#6306)"),
    case("keras_trainer--shuffled_apart", "    x_train = x_train / 16.0\n",
         "    np.random.shuffle(x_train)\n"
         "    np.random.shuffle(y_train)\n"
         "    x_train = x_train / 16.0\n",
         "pictures and labels are shuffled separately (StackOverflow)"),
    case("keras_trainer--test_scale", "    x_test = x_test / 16.0\n",
         "    x_test = x_test / 255.0\n",
         "the test pictures are divided by 255, the training pictures by 16 (common)"),
    case("skipgram--neg_sign", "F.logsigmoid(-neg).sum(1)",
         "F.logsigmoid(neg).sum(1)",
         "the minus of the negatives is missing (kefirski/pytorch_NEG_loss#5)"),
    case("skipgram--pairs_reshaped", "center, context = batch[:, 0], batch[:, 1]",
         "center, context = batch.reshape(2, -1)",
         "pairs are cut by reshape instead of by column (StackOverflow)"),
    case("lstm_windows--first_step", "self.fc(out[:, -1, :])",
         "self.fc(out[:, 0, :])",
         "the output of the first time step is read (common: out[0] or out[:, 0] for out[-1])"),
    case("lstm_windows--scaler_refit", "val_x = scaler.transform(val_df[FEATURES])\n"
         "test_x = scaler.transform(test_df[FEATURES])",
         "val_x = scaler.fit_transform(val_df[FEATURES])\n"
         "test_x = scaler.fit_transform(test_df[FEATURES])",
         "the scaler is fitted again on validation and test rows (common)"),
    case("kfold_tabular--optimizer_once", "        optimizer = torch.optim.AdamW(model.parameters(), lr=CFG.lr, weight_decay=CFG.weight_decay)\n",
         "        if fold == 0:\n"
         "            optimizer = torch.optim.AdamW(model.parameters(), lr=CFG.lr, weight_decay=CFG.weight_decay)\n",
         "the optimiser belongs to the first fold's model (common)"),
    case("kfold_tabular--onecycle_epochs", "optimizer, max_lr=1e-2, epochs=CFG.epochs, steps_per_epoch=len(trainloader)",
         "optimizer, max_lr=1e-2, epochs=CFG.epochs, steps_per_epoch=len(trainloader.dataset)",
         "steps per epoch counted in samples: the rate never comes down (PyTorch forums)"),
    case("ddpm--other_noise", "        x_noisy = self.q_sample(x0, t, noise)\n",
         "        x_noisy = self.q_sample(x0, t, torch.randn_like(x0))\n",
         "noise is drawn a second time (common)"),
    case("ddpm--predict_x", "F.mse_loss(model(x_noisy, t), noise)",
         "F.mse_loss(model(x_noisy, t), x0)",
         "trained to predict the picture, sampled as if noise was predicted (issues of lucidrains/denoising-diffusion-pytorch: objective)"),
    case("ddpm--time_unused", "        h = h + self.time_mlp(temb)[:, :, None, None]\n",
         "        self.time_mlp(temb)\n",
         "the time is embedded and not added (common)"),
    case("cgan--other_labels", "adversarial_loss(discriminator(gen_imgs, gen_labels), valid)",
         "adversarial_loss(discriminator(gen_imgs, labels), valid)",
         "the generator is judged with the labels of the real pictures (issues of conditional GANs)"),
    case("cgan--range", "x = (x - 0.5) / 0.5\n",
         "x = x * 16\n",
         "pictures in 0 to 16, samples from tanh (common)"),
    case("multitask--no_penalty", " * loss + 0.5 * self.log_vars[i]",
         " * loss",
         "the weights' own term is missing: all weights go to zero (issues on uncertainty weighting)"),
    case("multitask--wrong_head", 'self.mse(out["ink"], batch["ink"])',
         'self.mse(out["slant"], batch["ink"])',
         "copy and paste: two losses pull at one head (common)"),
    case("multitask--backbone_missing", '{"params": model.parameters(), "weight_decay": cfg["weight_decay"]},',
         '{"params": [p for n, p in model.named_parameters() if "head" in n], "weight_decay": cfg["weight_decay"]},',
         "parameter groups by name leave the trunk out (PyTorch forums)"),
    case("sentiment--sorted_lengths", "    padded = pad_sequence(texts",
         "    lengths, order = lengths.sort(descending=True)\n"
         "    texts = [texts[i] for i in order]\n"
         "    padded = pad_sequence(texts",
         "sorted by length for packing, labels stay where they were (PyTorch forums)"),
    case("sentiment--vocab_again", "test_iterator = DataLoader(ReviewDataset(test_reviews, vocab)",
         "test_iterator = DataLoader(ReviewDataset(test_reviews, build_vocab(test_reviews))",
         "test reviews get their own vocabulary (StackOverflow)"),
    case("sentiment--no_sigmoid", "torch.round(torch.sigmoid(preds))",
         "torch.round(preds)",
         "logits are rounded for the accuracy (issues of bentrevett/pytorch-sentiment-analysis)"),
]  # fmt: skip
HEALTHY = [
    case("keras_trainer--grad_none", "                self.optimizer.zero_grad()\n",
         "                for param in self.network.parameters():\n"
         "                    param.grad = None\n",
         "gradients are set to None by the loop"),
    case("skipgram--sparse_adam", "    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)\n",
         "    model.in_embed.sparse = model.out_embed.sparse = True\n"
         "    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=args.lr)\n",
         "sparse gradients and SparseAdam"),
    case("skipgram--tied", "        self.out_embed = nn.Embedding(vocab_size, dim)\n",
         "        self.out_embed = self.in_embed\n",
         "one table for words and contexts (udacity/deep-learning-v2-pytorch#199)"),
    case("lstm_windows--residual", "        out = self.fc(out[:, -1, :])\n",
         "        out = self.fc(out[:, -1, :]) + x[:, -1, 3:]\n",
         "the net predicts the difference from the last value"),
    case("kfold_tabular--no_decay_groups", "        optimizer = torch.optim.AdamW(model.parameters(), lr=CFG.lr, weight_decay=CFG.weight_decay)\n",
         "        decay = [p for p in model.parameters() if p.ndim > 1]\n"
         "        rest = [p for p in model.parameters() if p.ndim == 1]\n"
         "        optimizer = torch.optim.AdamW(\n"
         '            [{"params": decay, "weight_decay": CFG.weight_decay}, {"params": rest, "weight_decay": 0.0}], lr=CFG.lr\n'
         "        )\n",
         "no weight decay for biases and norms"),
    case("ddpm--min_snr", "        return F.mse_loss(model(x_noisy, t), noise)\n",
         "        snr = self.alphas_cumprod[t] / (1 - self.alphas_cumprod[t])\n"
         "        weight = snr.clamp(max=5) / snr\n"
         '        error = F.mse_loss(model(x_noisy, t), noise, reduction="none").mean((1, 2, 3))\n'
         "        return (weight * error).mean()\n",
         "min-SNR weights of the times"),
    case("cgan--no_detach", "discriminator(gen_imgs.detach(), gen_labels)",
         "discriminator(generator(z, gen_labels), gen_labels)",
         "no detach() in the critic's step: the generator's gradients are zeroed before its own step"),
    case("cgan--soft_labels", "        valid = torch.ones(n, 1)\n",
         "        valid = torch.empty(n, 1).uniform_(0.8, 1.0)\n",
         "noisy labels for real pictures (ganhacks)"),
    case("sentiment--sorted_batch", "    texts, labels = zip(*batch)\n",
         "    texts, labels = zip(*sorted(batch, key=lambda item: len(item[0]), reverse=True))\n",
         "the batch is sorted by length, labels with it"),
]  # fmt: skip
