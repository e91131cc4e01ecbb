"""Bugs of the ten scripts in scripts/tenth, everyday training code, by an outsider to the checks (2026-11-26): ids whose CRC-32 is even.

A bug counts if the script's own final number is at least 1% worse at both of two seeds: `python -m tests.guard.harm two_tower ...`.
"seen often" is the writer's own experience; no source was looked up. Eight of the scripts have a `make_script()` for `trainworthy.check`.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("digits_aug--cutout_in_place",
         "        img = img.copy()\n",
         "",
         "the square is cut out of the stored picture itself: with each epoch the data lose more (seen often with numpy augmentations)"),
    case("digits_aug--test_not_normalised",
         "Compose([ToTensor(), Normalize(mean, std)])\n",
         "Compose([ToTensor()])\n",
         "the transforms of the test forget Normalize (seen often)"),
    case("finetune_docs--optimizer_of_head",
         "    model.encoder.requires_grad_(True)\n    optimizer = torch.optim.Adam(param_groups(model))\n",
         "    model.encoder.requires_grad_(True)\n",
         "the encoder is unfrozen, the optimiser still has the head alone (seen often)"),
    case("finetune_docs--split_by_class",
         "    random.Random(SEED + 1).shuffle(labelled)\n",
         "",
         "rows are in the order of the classes when they are split: the last classes are in the validation alone (seen often)"),
    case("tumour_regression--plateau_of_score",
         "mode=\"min\", factor=0.5, patience=4",
         "mode=\"max\", factor=0.5, patience=4",
         "ReduceLROnPlateau waits for a loss to rise: the rate is halved all the time (seen often)"),
    case("tumour_regression--net_kept",
         "    scores = []\n    for fold, (tr, te) in enumerate(KFold(4, shuffle=True, random_state=SEED).split(X)):\n"
         "        reg = TorchRegressor().fit(X[tr], y[tr])\n",
         "    scores = []\n    net = Net(X.shape[1])\n"
         "    for fold, (tr, te) in enumerate(KFold(4, shuffle=True, random_state=SEED).split(X)):\n"
         "        reg = TorchRegressor().fit(X[tr], y[tr], net)\n",
         "the net is built outside the loop over folds: from the second fold on it was trained on the fold that scores it (seen often)"),
    case("tumour_regression--raw_at_prediction",
         "torch.as_tensor(self.x_scaler.transform(X), dtype=torch.float32)",
         "torch.as_tensor(X, dtype=torch.float32)",
         "the scaler is forgotten where the trained net predicts (seen often)"),
    case("tumour_regression--target_not_scaled",
         "return self.x_scaler.transform(X), self.y_scaler.transform(y)",
         "return self.x_scaler.transform(X), y",
         "predictions are scaled back, the targets were never scaled (seen often)"),
    case("slots_intent--plus_after_equals",
         "    loss += nn.functional.cross_entropy(intent",
         "    loss =+ nn.functional.cross_entropy(intent",
         "=+ for +=: the second loss replaces the first (seen often)"),
    case("slots_intent--case_kept",
         "vocab.get(w.lower(), 1)",
         "vocab.get(w, 1)",
         "the vocabulary is in lower case, words are looked up as they are written: names and days are unknown (seen often)"),
    case("cells_seg--mask_to_255",
         "np.ascontiguousarray(mask)).float().unsqueeze(0) / 255",
         "np.ascontiguousarray(mask)).float().unsqueeze(0)",
         "masks of 0 and 255 are not divided: binary cross-entropy takes 255 as a probability (seen often)"),
    case("cells_seg--dice_of_logits",
         "dice_loss(torch.sigmoid(logits), target)",
         "dice_loss(logits, target)",
         "the Dice loss gets logits (seen often)"),
    case("cells_seg--accumulates_for_ever",
         "\"accumulate\": 1",
         "\"accumulate\": 16",
         "more batches are accumulated than an epoch has, and the count begins again each epoch: no step is ever made (seen often)"),
    case("cvae_digits--deviation_not_halved",
         "std = torch.exp(0.5 * logvar)",
         "std = torch.exp(logvar)",
         "the deviation is computed as if it were the variance (seen often)"),
    case("cvae_digits--warmup_in_each_epoch",
         "        sums = np.zeros(3)\n",
         "        sums, global_step = np.zeros(3), 0\n",
         "the step that the warm-up of beta counts begins again with each epoch: beta never comes near 1 (seen often)"),
    case("catch_dqn--state_moved_first",
         "            memory.push(state, action, reward, next_state, done)\n            state = next_state\n",
         "            state = next_state\n            memory.push(state, action, reward, next_state, done)\n",
         "the state is moved on before the transition is stored (seen often)"),
    case("catch_dqn--newest_alone",
         "random.sample(self.memory, batch_size)",
         "list(self.memory)[-batch_size:]",
         "the newest transitions in place of random ones (seen in beginners' code)"),
    case("load_forecast--attention_over_batch",
         "0.1, batch_first=True, norm_first=True",
         "0.1, norm_first=True",
         "batch_first is missing: attention runs over the batch (seen very often)"),
    case("load_forecast--cycle_in_epochs",
         "        fit_epoch(model, optimizer, train_loader, scheduler)\n",
         "        fit_epoch(model, optimizer, train_loader)\n        scheduler.step()\n",
         "OneCycleLR counts batches and is stepped once an epoch: the rate stays at its first value (seen often)"),
    case("load_forecast--filled_before_scaling",
         "        loc, scale = np.nanmean(past)",
         "        past, future = np.nan_to_num(past), np.nan_to_num(future)\n        loc, scale = np.nanmean(past)",
         "missing values are filled with 0 before scaling and count as observed (seen often)"),
]  # fmt: skip
HEALTHY = [
    case("digits_aug--adamw",
         "optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)",
         "optim.AdamW(model.parameters(), lr=args.lr / 4, weight_decay=0.05)",
         "AdamW"),
    case("tumour_regression--median_and_quartiles",
         "self.mean, self.std = a.mean(axis=0), a.std(axis=0) + 1e-8",
         "self.mean = np.median(a, axis=0)\n        self.std = np.subtract(*np.percentile(a, [75, 25], axis=0)).astype(np.float32) + 1e-8",
         "scaling by median and quartiles"),
    case("names_tcn--dropout",
         "return x + self.proj(F.glu(h, dim=1))",
         "return x + F.dropout(self.proj(F.glu(h, dim=1)), 0.1, self.training)",
         "dropout, switched by the mode"),
    case("cells_seg--bf16",
         "        loss = bce_dice(model(images), masks)\n",
         "        with torch.autocast(\"cpu\", dtype=torch.bfloat16):\n"
         "            logits = model(images)\n"
         "        loss = bce_dice(logits.float(), masks)\n",
         "autocast to bf16"),
]  # fmt: skip
HARMFUL: set[str] = {
    "digits_aug--cutout_in_place",
    "digits_aug--test_not_normalised",
    "finetune_docs--optimizer_of_head",
    "finetune_docs--split_by_class",
    "tumour_regression--net_kept",  # reports R2 0.787 and 0.731, nets that never saw the fold 0.705 and 0.655 (seeds 0 and 1)
    "tumour_regression--raw_at_prediction",
    "tumour_regression--target_not_scaled",
    "slots_intent--plus_after_equals",
    "cells_seg--mask_to_255",
    "cells_seg--dice_of_logits",
    "cells_seg--accumulates_for_ever",
    "cvae_digits--deviation_not_halved",
    "cvae_digits--warmup_in_each_epoch",
    "catch_dqn--state_moved_first",
    "catch_dqn--newest_alone",
    "load_forecast--attention_over_batch",
    "load_forecast--cycle_in_epochs",
}
"""Bugs with a final number at least 1% worse at both seeds, by an honest measure where the script's own is wrong."""
HONEST: dict[str, str] = {
    "cvae_digits--deviation_not_halved": """

model = main().eval()
c, x, right = one_hot(torch.tensor(y_test)), torch.tensor(X_test), 0
with torch.no_grad():
    for _ in range(10):
        mu, logvar = model.encode(x, c)
        recon = model.decode(mu + torch.randn_like(mu) * (logvar / 2).exp(), c)
        right += (((recon - x) ** 2).sum() / (2 * SIGMA**2) - 0.5 * (1 + logvar - mu**2 - logvar.exp()).sum()).item() / len(x) / 10
print(f"FINAL nelbo={right:.4f}")
""",
    "load_forecast--filled_before_scaling": """

model, val = main()
total = count = 0
with torch.no_grad():
    for (k, t), item in zip(val.index, DataLoader(val, 1)):
        past, future = val.series[k, t - CONTEXT : t], val.series[k, t : t + HORIZON]
        filled, seen = np.nan_to_num(past), ~np.isnan(future)
        made = forward(model.eval(), item)[0].numpy() * (filled.std() + 1e-3) + filled.mean()
        total += np.abs(made - future)[seen].sum() / (np.nanstd(past) + 1e-3)
        count += seen.sum()
print(f"FINAL mae={total / count:.4f}")
""",
}  # fmt: skip
"""Code that is run after the script, where its own evaluation is wrong."""
