"""Bugs and healthy variants of the eight scripts in scripts/fourteenth, everyday training code (2026-11-27): the open half.

Their author had read README.md and docs/own-scripts.md, and no check. Halves: the first hexadecimal digit of the MD5 sum of the part of an id
behind the script's name; even ones are in fourteenth_set_heldout.py. A bug is in HARMFUL if the number that the script prints last is
clearly worse, or clearly wrong where the evaluation has the bug, at both of two seeds: `python -m tests.guard.harm load_forecast ...`.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("tumour_table--tumour-weights-inverted",
         "    weight = counts.sum() / (2 * counts)\n",
         "    weight = 2 * counts / counts.sum()\n",
         "class weights are frequencies and not their inverse"),
    case("nuclei_unet--nuclei-flip-image-only",
         "            image, mask = image[:, ::-1], mask[:, ::-1]\n",
         "            image = image[:, ::-1]\n",
         "the flip moves the picture and not its mask"),
    case("nuclei_unet--nuclei-crop-swapped",
         "        y, x = random.randrange(h - self.size), random.randrange(w - self.size)\n"
         "        image = self.image[y : y + self.size, x : x + self.size]\n"
         "        mask = self.mask[y : y + self.size, x : x + self.size]\n",
         "        y, x = random.randrange(h - self.size), random.randrange(h - self.size)\n"
         "        image = self.image[y : y + self.size, x : x + self.size]\n"
         "        mask = self.mask[x : x + self.size, y : y + self.size]\n",
         "rows and columns are exchanged where the mask is cropped"),
    case("punctuation_tagger--tagger-view-as-classes",
         "        loss = criterion(logits.transpose(1, 2), tags)\n",
         "        loss = criterion(logits.view(len(words), len(TAGS), -1), tags)\n",
         "view() in place of transpose() moves no class to the second axis"),
    case("tumour_table--tumour-labels-by-mask",
         "    train_set = TumourDataset(numbers[train_rows], train_codes, labels[train_rows], mean, std, vocabularies)\n",
         "    train_set = TumourDataset(numbers[train_rows], train_codes, labels[np.isin(rows, train_rows)], mean, std, vocabularies)\n",
         "rows are taken in drawn order and labels by a mask, in the table's order"),
    case("load_forecast--load-window-overlaps",
         "        target = self.values[now : now + self.horizon, 0]\n",
         "        target = self.values[now - 1 : now - 1 + self.horizon, 0]\n",
         "the target begins with the last value of the input (measured with the true target)"),
    case("load_forecast--load-calendar-per-split",
         "    val_set = WindowDataset(scaled[cut:], cut, args.history, args.horizon, stride=12)\n",
         "    val_set = WindowDataset(scaled[cut:], 0, args.history, args.horizon, stride=12)\n",
         "the held-out part counts its hours from its own beginning, which is not midnight"),
    case("load_forecast--load-inverse-other-column",
         "            prediction = scaler.inverse(model(past, future).numpy(), column=0)\n"
         "            actual = scaler.inverse(target.numpy(), column=0)\n",
         "            prediction = scaler.inverse(model(past, future).numpy(), column=1)\n"
         "            actual = scaler.inverse(target.numpy(), column=1)\n",
         "the inverse scaling takes the temperature's mean and deviation: the reported MAE is in another unit"),
    case("diabetes_uncertainty--diabetes-broadcast",
         "            loss = gaussian_nll(mean, log_variance, yb.unsqueeze(1))\n",
         "            loss = gaussian_nll(mean, log_variance, yb)\n",
         "(N, 1) meets (N,): every prediction is compared with every target"),
    case("cartpole_reinforce--cartpole-returns-forward",
         "        for reward, done in zip(reversed(self.rewards), reversed(self.dones)):\n"
         "            running = reward + gamma * running * (1.0 - done)\n"
         "            returns.insert(0, running)\n",
         "        for reward, done in zip(self.rewards, self.dones):\n"
         "            running = reward + gamma * running * (1.0 - done)\n"
         "            returns.append(running)\n",
         "returns are summed from the first step to the last"),
    case("cartpole_reinforce--cartpole-action-redrawn",
         "    policy_loss = -(dist.log_prob(actions) * advantages).mean()\n",
         "    policy_loss = -(dist.log_prob(dist.sample()) * advantages).mean()\n",
         "the log-probability is that of a new sample"),
]  # fmt: skip

HEALTHY = [
    case("tumour_table--tumour-balanced-sampler",
         "    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)\n"
         "    val_loader = DataLoader(val_set, batch_size=128)\n"
         "\n"
         "    model = TabularNet(len(NUMERIC), [len(v) for v in vocabularies])\n"
         "    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)\n"
         "    counts = torch.bincount(train_set.labels).float()\n"
         "    weight = counts.sum() / (2 * counts)\n",
         "    shares = 1.0 / torch.bincount(train_set.labels).float()\n"
         "    sampler = torch.utils.data.WeightedRandomSampler(shares[train_set.labels], len(train_set))\n"
         "    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)\n"
         "    val_loader = DataLoader(val_set, batch_size=128)\n"
         "\n"
         "    model = TabularNet(len(NUMERIC), [len(v) for v in vocabularies])\n"
         "    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)\n"
         "    counts = torch.bincount(train_set.labels).float()\n"
         "    weight = torch.ones_like(counts)  # the sampler balances\n",
         "a sampler balances the classes in place of the weights"),
    case("nuclei_unet--nuclei-bce-dice",
         "            loss = criterion(net(image), mask)\n",
         "            logits = net(image)\n"
         "            p = logits.sigmoid()\n"
         "            dice = 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)\n"
         "            loss = criterion(logits, mask) + dice\n",
         "a Dice term is added"),
    case("load_forecast--load-window-normalised",
         "        _, state = self.encoder(past)\n"
         "        state = state[-1].unsqueeze(1).expand(-1, future.size(1), -1)\n"
         "        return self.decoder(torch.cat([state, future], dim=-1)).squeeze(-1)\n",
         "        level, spread = past[..., :1].mean(dim=1, keepdim=True), past[..., :1].std(dim=1, keepdim=True) + 1e-3\n"
         "        past = torch.cat([(past[..., :1] - level) / spread, past[..., 1:]], dim=-1)\n"
         "        _, state = self.encoder(past)\n"
         "        state = state[-1].unsqueeze(1).expand(-1, future.size(1), -1)\n"
         "        shape = self.decoder(torch.cat([state, future], dim=-1))\n"
         "        return (shape * spread + level).squeeze(-1)\n",
         "each window is scaled by its own mean and deviation"),
    case("digits_transfer--transfer-two-rates",
         "    model.freeze_backbone()\n"
         "    optimizer = optim.Adam(model.fc.parameters(), lr=3e-3)\n"
         "    score = 0.0\n"
         "    for epoch in range(args.epochs):\n"
         "        if epoch == args.unfreeze_at:\n"
         "            optimizer.add_param_group({\"params\": model.unfreeze_last_block(), \"lr\": 1e-3})\n",
         "    groups = [{\"params\": model.backbone.parameters(), \"lr\": 3e-4}, {\"params\": model.fc.parameters(), \"lr\": 3e-3}]\n"
         "    optimizer = optim.Adam(groups)\n"
         "    score = 0.0\n"
         "    for epoch in range(args.epochs):\n",
         "nothing is frozen: the base has a smaller rate"),
]  # fmt: skip

HARMFUL = {
    "cartpole_reinforce--cartpole-action-redrawn",
    "cartpole_reinforce--cartpole-returns-forward",
    "diabetes_uncertainty--diabetes-broadcast",
    "load_forecast--load-calendar-per-split",
    "load_forecast--load-inverse-other-column",
    "load_forecast--load-window-overlaps",
    "nuclei_unet--nuclei-crop-swapped",
    "nuclei_unet--nuclei-flip-image-only",
    "punctuation_tagger--tagger-view-as-classes",
    "tumour_table--tumour-labels-by-mask",
    "tumour_table--tumour-weights-inverted",
}

HONEST: dict[str, str] = {}
