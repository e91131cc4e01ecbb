"""Bugs of the ten scripts in scripts/tenth, the half kept away from whoever changes checks: ids whose CRC-32 is odd.

A bug counts if the script's own final number is at least 1% worse at both of two seeds: `python -m tests.guard.harm two_tower ...`.
"seen often" is the writer's own experience; no source was looked up. Eight of the scripts have a `make_script()` for `trainworthy.check`.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("digits_aug--factor_times_rate",
         "    return factor\n",
         "    return lambda step: args.lr * factor(step)\n",
         "LambdaLR's function returns a rate, which is multiplied by the rate again (seen often)"),
    case("digits_aug--softmax_over_batch",
         "F.log_softmax(self.fc(x), dim=1)",
         "F.log_softmax(self.fc(x), dim=0)",
         "log-softmax over the batch in place of the classes (seen often)"),
    case("finetune_docs--vocabulary_rebuilt",
         "    vocab, _ = pretrain()\n    _, labelled = read()\n",
         "    _, labelled = read()\n    vocab = build_vocab([s for s, _ in labelled[:600]])\n",
         "the vocabulary is built again from the new texts: ids no longer fit the pretrained embedding (seen often)"),
    case("finetune_docs--padding_pooled",
         "        mean = (out * mask).sum(1) / mask.sum(1)\n        top = out.masked_fill(~mask, -1e4).max(1).values\n",
         "        mean = out.mean(1)\n        top = out.max(1).values\n",
         "mean and maximum run over the padding, too (seen often)"),
    case("finetune_docs--initialised_again",
         "nn.Linear(2 * DIM, 64), nn.ReLU(), nn.Linear(64, n_classes))\n",
         "nn.Linear(2 * DIM, 64), nn.ReLU(), nn.Linear(64, n_classes))\n"
         "        for p in self.parameters():\n"
         "            if p.dim() > 1:\n"
         "                nn.init.xavier_uniform_(p)\n",
         "the classifier's own initialisation runs over the pretrained encoder, too (seen often: self.apply(init_weights))"),
    case("tumour_regression--one_mean_for_all",
         "a.mean(axis=0), a.std(axis=0) + 1e-8",
         "a.mean(), a.std() + 1e-8",
         "axis=0 is missing: one mean and deviation for all columns, of which the largest drowns the others (seen often)"),
    case("names_tcn--logits_not_transposed",
         "logits.transpose(1, 2).reshape(-1, logits.size(1))",
         "logits.reshape(-1, logits.size(1))",
         "reshape in place of transpose: a row of logits holds one class at many places (seen often)"),
    case("names_tcn--padded_on_both_sides",
         "F.pad(x, (self.pad, 0))",
         "F.pad(x, (self.pad // 2, self.pad // 2))",
         "\"same\" padding: the convolution sees the characters that it has to tell (seen often)"),
    case("names_tcn--end_not_learnt",
         "y[len(ix) + 1 :] = -1",
         "y[len(ix) :] = -1",
         "one off in the mask: the end of a word is never scored (seen often)"),
    case("names_tcn--sorted_split",
         "    random.Random(SEED).shuffle(words)\n",
         "",
         "words are in alphabetical order when they are split: the test has other beginnings (seen often)"),
    case("slots_intent--intents_in_sorted_order",
         "        packed = pack_padded_sequence(emb, lengths, batch_first=True, enforce_sorted=False)\n"
         "        out, (h, _) = self.lstm(packed)\n"
         "        out, _ = pad_packed_sequence(out, batch_first=True)\n",
         "        lengths, order = lengths.sort(descending=True)\n"
         "        packed = pack_padded_sequence(emb[order], lengths, batch_first=True)\n"
         "        out, (h, _) = self.lstm(packed)\n"
         "        out = pad_packed_sequence(out, batch_first=True)[0][order.argsort()]\n",
         "sentences are sorted by length for packing; outputs are put back, the last states are not (seen often)"),
    case("slots_intent--last_place",
         "sentence = torch.cat([h[0], h[1]], dim=1)",
         "sentence = out[:, -1]",
         "the sentence is read at the last place, which is padding for all but the longest (seen often)"),
    case("cells_seg--momentum_of_keras",
         "BN_MOMENTUM = 0.1",
         "BN_MOMENTUM = 0.99",
         "batch norm's momentum as Keras counts it: the statistics are those of the last batch (seen often in ports)"),
    case("cells_seg--mask_not_turned",
         "image, mask = np.rot90(image, k), np.rot90(mask, k)",
         "image = np.rot90(image, k)",
         "the image is turned, its mask is not (seen often)"),
    case("cells_seg--brightness_wraps",
         "    return 255.0 * (image / 255.0) ** gamma, mask\n",
         "    return image + np.uint8(random.randint(0, 100)), mask\n",
         "brightness is added to bytes: bright pixels run over 255 and become dark (seen often)"),
    case("two_tower--no_temperature",
         " @ self.item_tower(item).T / self.temperature",
         " @ self.item_tower(item).T",
         "cosines go into the softmax without a temperature (seen often)"),
    case("two_tower--stale_index",
         "    items = torch.cat([model.item_tower(i) for _, i in loader])\n",
         "    if not hasattr(model, \"index\"):\n"
         "        model.index = torch.cat([model.item_tower(i) for _, i in loader])\n"
         "    items = model.index\n",
         "the index of the items is built once and not again when the tower has changed (seen often)"),
    case("two_tower--query_tower_alone",
         "torch.optim.AdamW(model.parameters(), lr=4e-3",
         "torch.optim.AdamW(model.query_tower.parameters(), lr=4e-3",
         "the optimiser has one of the two towers (seen often)"),
    case("cvae_digits--mean_of_pixels",
         "F.mse_loss(recon_x, x, reduction=\"sum\") / x.size(0) / (2 * SIGMA**2)",
         "F.mse_loss(recon_x, x) / (2 * SIGMA**2)",
         "the reconstruction is a mean over pixels, the KL term a sum over dimensions: the posterior collapses (seen very often)"),
    case("cvae_digits--uniform_noise",
         "eps = torch.randn_like(std)",
         "eps = torch.rand_like(std)",
         "rand for randn: the noise is uniform in [0, 1) (seen often)"),
    case("catch_dqn--board_not_copied",
         "        return self.board.copy()\n",
         "        return self.board\n",
         "the environment returns its own array and writes into it again: all states of the memory are the last one (seen often)"),
    case("catch_dqn--best_not_taken",
         "q = policy_net(states).gather(1, actions).squeeze(1)",
         "q = policy_net(states).max(1).values",
         "the best action's value is trained towards the reward of the action that was taken (seen often)"),
    case("load_forecast--scaled_with_future",
         "loc, scale = np.nanmean(past), np.nanstd(past) + 1e-3",
         "loc, scale = np.nanmean(self.series[k, t - CONTEXT : t + HORIZON]), np.nanstd(self.series[k, t - CONTEXT : t + HORIZON]) + 1e-3",
         "a window is scaled with its future (seen often)"),
]  # fmt: skip
HEALTHY = [
    case("digits_aug--averaged",
         "    for epoch in range(1, args.epochs + 1):\n"
         "        train(model, optimizer, train_loader, scheduler)\n"
         "        acc = test(model, test_loader)\n"
         "        print(f\"Epoch {epoch}: accuracy {100 * acc:.1f}%\")\n",
         "    swa_model = optim.swa_utils.AveragedModel(model)\n"
         "    for epoch in range(1, args.epochs + 1):\n"
         "        train(model, optimizer, train_loader, scheduler)\n"
         "        if epoch > args.epochs // 2:\n"
         "            swa_model.update_parameters(model)\n"
         "        print(f\"Epoch {epoch}: accuracy {100 * test(model, test_loader):.1f}%\")\n"
         "    optim.swa_utils.update_bn(train_loader, swa_model)\n"
         "    acc = test(swa_model, test_loader)\n",
         "weights of the last epochs are averaged, batch norm is computed again"),
    case("finetune_docs--smoothing",
         "criterion = nn.CrossEntropyLoss()",
         "criterion = nn.CrossEntropyLoss(label_smoothing=0.1)",
         "label smoothing"),
    case("tumour_regression--squared_error",
         "nn.functional.smooth_l1_loss(pred, y, beta=1.0)",
         "nn.functional.mse_loss(pred, y)",
         "another loss"),
    case("slots_intent--class_weights",
         "batch[\"tags\"].flatten(), ignore_index=PAD_TAG)",
         "batch[\"tags\"].flatten(), torch.tensor([0.5] + [1.0] * (len(TAGS) - 1)), ignore_index=PAD_TAG)",
         "the tag O counts half"),
    case("slots_intent--word_dropout",
         "        emb = self.drop(self.embedding(ids))\n",
         "        if self.training:\n"
         "            ids = ids.masked_fill((torch.rand(ids.shape) < 0.05) & (ids > 0), 1)\n"
         "        emb = self.drop(self.embedding(ids))\n",
         "words are made unknown at random in training"),
    case("cells_seg--accumulation",
         "\"batch_size\": 8, \"accumulate\": 1",
         "\"batch_size\": 4, \"accumulate\": 2",
         "batches of half the size, two a step"),
    case("two_tower--learnt_temperature",
         "        self.temperature = temperature\n",
         "        self.temperature = nn.Parameter(torch.tensor(temperature))\n",
         "the temperature is learnt"),
    case("cvae_digits--free_bits",
         "return RECON + beta * KLD, RECON, KLD",
         "return RECON + beta * KLD.clamp(min=1.0), RECON, KLD",
         "the first nat of the KL term is free"),
    case("catch_dqn--soft_update",
         "            if steps_done % TARGET_UPDATE == 0:\n                target_net.load_state_dict(policy_net.state_dict())\n",
         "            with torch.no_grad():\n"
         "                for p_target, p in zip(target_net.parameters(), policy_net.parameters()):\n"
         "                    p_target.lerp_(p, 0.01)\n",
         "the target net follows a little at each step"),
    case("load_forecast--jitter",
         "    for batch in loader:\n        optimizer.zero_grad()\n",
         "    for batch in loader:\n"
         "        batch = {**batch, \"past\": batch[\"past\"] + 0.03 * torch.randn_like(batch[\"past\"])}\n"
         "        optimizer.zero_grad()\n",
         "noise on the inputs in training"),
]  # fmt: skip
HARMFUL: set[str] = {
    "digits_aug--factor_times_rate",
    "finetune_docs--padding_pooled",
    "tumour_regression--one_mean_for_all",
    "names_tcn--logits_not_transposed",
    "names_tcn--padded_on_both_sides",
    "names_tcn--end_not_learnt",
    "names_tcn--sorted_split",
    "slots_intent--intents_in_sorted_order",
    "slots_intent--last_place",
    "cells_seg--mask_not_turned",
    "cells_seg--brightness_wraps",
    "two_tower--no_temperature",
    "two_tower--stale_index",
    "two_tower--query_tower_alone",
    "cvae_digits--mean_of_pixels",
    "cvae_digits--uniform_noise",
    "catch_dqn--board_not_copied",
    "catch_dqn--best_not_taken",
    "load_forecast--scaled_with_future",
}
"""Bugs with a final number at least 1% worse at both seeds, by an honest measure where the script's own is wrong."""
HONEST: dict[str, str] = {
    "names_tcn--padded_on_both_sides": """

model, test_set = main()
nll = count = 0
with torch.no_grad():
    for word in test_set.words:
        ids = [0] + [test_set.stoi[ch] for ch in word] + [0]
        for t in range(1, len(ids)):
            logits = model.eval()(torch.tensor([ids[:t]]))[0][0, :, -1]
            nll, count = nll - logits.log_softmax(0)[ids[t]].item(), count + 1
print(f"FINAL nll={nll / count:.4f}")
""",
    "names_tcn--end_not_learnt": """

model, test_set = main()
nll = count = 0
with torch.no_grad():
    for word in test_set.words:
        ids = torch.tensor([0] + [test_set.stoi[ch] for ch in word] + [0])
        logits = model.eval()(ids[None, :-1])[0][0].T
        nll, count = nll + F.cross_entropy(logits, ids[1:], reduction="sum").item(), count + len(ids) - 1
print(f"FINAL nll={nll / count:.4f}")
""",
    "names_tcn--logits_not_transposed": """

model, test_set = main()
nll = count = 0
with torch.no_grad():
    for word in test_set.words:
        ids = torch.tensor([0] + [test_set.stoi[ch] for ch in word] + [0])
        logits = model.eval()(ids[None, :-1])[0][0].T
        nll, count = nll + F.cross_entropy(logits, ids[1:], reduction="sum").item(), count + len(ids) - 1
print(f"FINAL nll={nll / count:.4f}")
""",
    "cvae_digits--mean_of_pixels": """

model = main().eval()
c, x, right = one_hot(torch.tensor(y_test)), torch.tensor(X_test), 0
with torch.no_grad():
    for _ in range(10):
        mu, logvar = model.encode(x, c)
        recon = model.decode(mu + torch.randn_like(mu) * (logvar / 2).exp(), c)
        right += (((recon - x) ** 2).sum() / (2 * SIGMA**2) - 0.5 * (1 + logvar - mu**2 - logvar.exp()).sum()).item() / len(x) / 10
print(f"FINAL nelbo={right:.4f}")
""",
    "cvae_digits--uniform_noise": """

model = main().eval()
c, x, right = one_hot(torch.tensor(y_test)), torch.tensor(X_test), 0
with torch.no_grad():
    for _ in range(10):
        mu, logvar = model.encode(x, c)
        recon = model.decode(mu + torch.randn_like(mu) * (logvar / 2).exp(), c)
        right += (((recon - x) ** 2).sum() / (2 * SIGMA**2) - 0.5 * (1 + logvar - mu**2 - logvar.exp()).sum()).item() / len(x) / 10
print(f"FINAL nelbo={right:.4f}")
""",
    "load_forecast--scaled_with_future": """

model, val = main()


class Honest(Windows):
    def __getitem__(self, i):
        k, t = self.index[i]
        past, future = self.series[k, t - CONTEXT : t], self.series[k, t : t + HORIZON]
        loc, scale = np.nanmean(past), np.nanstd(past) + 1e-3
        past, future = (past - loc) / scale, (future - loc) / scale
        item = {
            "past": np.stack([np.nan_to_num(past), ~np.isnan(past)], axis=-1),
            "past_time": calendar(np.arange(t - CONTEXT, t)),
            "future_time": calendar(np.arange(t, t + HORIZON)),
            "mask": ~np.isnan(future),
            "future": np.nan_to_num(future),
        }
        return {name: torch.tensor(value, dtype=torch.float32) for name, value in item.items()}


val.__class__ = Honest
print(f"FINAL mae={validate(model, DataLoader(val, 256)):.4f}")
""",
}  # fmt: skip
"""Code that is run after the script, where its own evaluation is wrong."""
