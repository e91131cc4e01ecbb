"""Everyday bugs in everyday scripts (scripts/nineteenth), written by someone who had read no check: the closed half (2026-11-29).

See nineteenth_set.py.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("house_numbers--labels-from-test",
         "HouseNumbers(d_test, l_test, 800, 2)",
         "HouseNumbers(d_test, l_train, 800, 2)",
         "the test pictures get the labels of the training digits"),
    case("roman_transformer--targets-not-shifted",
         "tgt_in, tgt_out = tgt[:, :-1], tgt[:, 1:]",
         "tgt_in, tgt_out = tgt[:, 1:], tgt[:, 1:]",
         "the decoder's input is its target"),
    case("roman_transformer--no-causal-mask",
         "            tgt_mask=tgt_mask,\n",
         "",
         "the decoder sees what it has to predict"),
    case("roman_transformer--positions-of-batch",
         "x = x + self.pe[: x.size(1)]",
         "x = x + self.pe[: x.size(0)].unsqueeze(1)",
         "the encoding of the place in the batch is added, as in code without batch_first"),
    case("roman_transformer--first-position-decoded",
         "self(src, tgt)[:, -1].argmax",
         "self(src, tgt)[:, 0].argmax",
         "greedy decoding reads the first position's logits"),
    case("photo_deblur--two-crops",
         "        blurred, sharp = self.random_crop(self.blurred[k], self.sharp[k])\n",
         "        (blurred,), (sharp,) = self.random_crop(self.blurred[k]), self.random_crop(self.sharp[k])\n",
         "input and target are cropped at different places"),
    case("photo_deblur--relu-at-the-end",
         "            nn.Conv2d(width, channels, 3, padding=1),\n"
         "        )\n",
         "            nn.Conv2d(width, channels, 3, padding=1),\n"
         "            nn.ReLU(inplace=True),\n"
         "        )\n",
         "a ReLU on a residual that must have both signs"),
    case("photo_deblur--target-not-scaled",
         "        return blurred, sharp\n",
         "        return blurred, sharp * 255.0\n",
         "the target has values to 255, the input to 1"),
    case("shapes_multilabel--sigmoid-twice",
         "        return self.fc(x)\n",
         "        return torch.sigmoid(self.fc(x))\n",
         "a sigmoid in the model, another in BCEWithLogitsLoss"),
    case("shapes_multilabel--last-tag-only",
         "        for name in self.tags[idx]:\n"
         "            target[CLASSES.index(name)] = 1.0\n",
         "        for name in self.tags[idx]:\n"
         "            target = torch.zeros(len(CLASSES))\n"
         "            target[CLASSES.index(name)] = 1.0\n",
         "the target is made anew for each tag: only the last one stays"),
    case("activity_sensors--axes-viewed",
         "self.conv(x.transpose(1, 2))",
         "self.conv(x.view(len(x), 6, -1))",
         "view() in place of a transpose mixes channels and time"),
    case("activity_sensors--test-shuffled",
         "    test_loader = DataLoader(sets[2], batch_size=256)\n",
         "    test_loader = DataLoader(sets[2], batch_size=256, shuffle=True)\n",
         "shuffled predictions are compared with labels in order"),
    case("activity_sensors--weights-of-classes",
         "WeightedRandomSampler(class_weights[y_train], ",
         "WeightedRandomSampler(class_weights, ",
         "one weight for each class in place of one for each window: the first six windows are drawn"),
    case("molecules_mpnn--offset-of-edges",
         "        offset += len(x)\n",
         "        offset += len(edge_attr) // 2\n",
         "the offset counts bonds in place of atoms"),
    case("molecules_mpnn--scaled-twice",
         "        pred = model(x, edge_index, edge_attr, batch)\n"
         "        loss",
         "        pred = model(x, edge_index, edge_attr, batch) * std + mean\n"
         "        loss",
         "predictions are scaled back before they are compared with scaled targets"),
    case("fruit_a2c--log-prob-of-another",
         "            log_probs.append(dist.log_prob(action))\n",
         "            log_probs.append(dist.log_prob(dist.sample()))\n",
         "the log-probability is that of another draw"),
    case("fruit_a2c--mask-inverted",
         "masks.append(torch.from_numpy(1 - done))",
         "masks.append(torch.from_numpy(done))",
         "only the last step of an episode is bootstrapped"),
    case("digits_trainer--buffers-not-averaged",
         "        for slow, fast in zip(self.module.buffers(), model.buffers()):\n"
         "            slow.copy_(fast)\n",
         "",
         "the averaged model keeps the first statistics of its batch norms"),
    case("digits_trainer--average-per-epoch",
         "                self.scheduler.step()\n"
         "                self.ema.update(self.model)\n",
         "                self.scheduler.step()\n"
         "        self.ema.update(self.model)\n",
         "the average is updated once per epoch with a decay meant for steps"),
]  # fmt: skip

HEALTHY = [
    case("house_numbers--moved-and-smoothed",
         "            picture = picture + 0.1 * torch.randn_like(picture)\n",
         "            picture = picture + 0.1 * torch.randn_like(picture)\n"
         "            picture = torch.roll(picture, int(torch.randint(-1, 2, (1,))), dims=-1)\n"
         "            picture = picture * (0.6 + 0.8 * torch.rand(1))\n",
         "pictures are moved by a pixel and made brighter or darker"),
    case("shapes_multilabel--mixed",
         "        loss = criterion(model(x), y)\n",
         "        x = torch.maximum(x, x.roll(1, 0)) if epoch < 4 else x\n"
         "        y = torch.maximum(y, y.roll(1, 0)) if epoch < 4 else y\n"
         "        loss = criterion(model(x), y)\n",
         "two pictures of a batch on top of each other have the labels of both"),
    case("activity_sensors--turned",
         "            optimizer.zero_grad()\n",
         "            x = x * (1 + 0.1 * torch.randn(len(x), 1, 6)) + 0.1 * torch.randn(x.shape)\n"
         "            x = x.roll(int(torch.randint(64, (1,))), dims=1)\n"
         "            optimizer.zero_grad()\n",
         "windows are scaled, made noisy and moved in time"),
    case("molecules_mpnn--mean-of-messages",
         "            gathered = torch.zeros_like(h).index_add_(0, target, m)\n",
         "            degree = torch.bincount(target, minlength=len(h)).clamp(min=1).unsqueeze(1)\n"
         "            gathered = torch.zeros_like(h).index_add_(0, target, m) / degree\n",
         "the mean of the messages"),
    case("fruit_a2c--normalised-advantages",
         "        policy_loss = -(torch.stack(log_probs) * advantages.detach()).mean()\n",
         "        weight = (advantages - advantages.mean()) / (advantages.std() + 1e-5)\n"
         "        policy_loss = -(torch.stack(log_probs) * weight.detach()).mean()\n",
         "advantages are normalised"),
    case("fruit_a2c--gae",
         "        returns, values = torch.stack(returns), torch.stack(values)\n"
         "        advantages = returns - values\n",
         "        gae, after, estimates = 0.0, next_value, []\n"
         "        for t in reversed(range(n_steps)):\n"
         "            delta = rewards[t] + gamma * after * masks[t] - values[t].detach()\n"
         "            gae = delta + gamma * 0.9 * masks[t] * gae\n"
         "            after = values[t].detach()\n"
         "            estimates.insert(0, gae + after)\n"
         "        returns, values = torch.stack(estimates), torch.stack(values)\n"
         "        advantages = returns - values\n",
         "generalised advantage estimation"),
]  # fmt: skip

HARMFUL = {
    "activity_sensors--axes-viewed",
    "activity_sensors--test-shuffled",
    "activity_sensors--weights-of-classes",
    "digits_trainer--average-per-epoch",
    "digits_trainer--buffers-not-averaged",
    "fruit_a2c--log-prob-of-another",
    "fruit_a2c--mask-inverted",
    "house_numbers--labels-from-test",
    "molecules_mpnn--offset-of-edges",
    "molecules_mpnn--scaled-twice",
    "photo_deblur--relu-at-the-end",
    "photo_deblur--target-not-scaled",
    "photo_deblur--two-crops",
    "roman_transformer--first-position-decoded",
    "roman_transformer--no-causal-mask",
    "roman_transformer--positions-of-batch",
    "roman_transformer--targets-not-shifted",
    "shapes_multilabel--sigmoid-twice",
}

HONEST: dict[str, str] = {}
