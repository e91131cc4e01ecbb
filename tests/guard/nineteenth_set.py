"""Everyday bugs in everyday scripts (scripts/nineteenth), written by someone who had read no check: the open half (2026-11-29).

Eight short scripts as people write them, with three or four bugs each and two healthy variants. Halves: the last hexadecimal digit of the SHA-256
sum of the id; odd ones are in nineteenth_set_heldout.py. HARMFUL: the last number of the script is clearly worse at seed 0.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("house_numbers--last-head-only",
         "            loss = loss + criterion(logits, numbers[:, k])\n",
         "            loss = criterion(logits, numbers[:, k])\n",
         "= in place of +=: only the last place's loss is trained"),
    case("house_numbers--columns-reshaped",
         "f.permute(0, 3, 1, 2).reshape(len(x), PLACES, -1)",
         "f.reshape(len(x), PLACES, -1)",
         "reshape() without the permute: each head gets a quarter of the channels in place of its column"),
    case("house_numbers--flipped",
         "            picture = picture + 0.1 * torch.randn_like(picture)\n",
         "            picture = picture + 0.1 * torch.randn_like(picture)\n"
         "            if torch.rand(1) < 0.5:\n"
         "                picture = picture.flip(-1)\n",
         "horizontal flips, but the order of the digits is the label"),
    case("photo_deblur--scheduler-per-batch",
         "            losses.append(loss.item())\n"
         "        scheduler.step()\n",
         "            losses.append(loss.item())\n"
         "            scheduler.step()\n",
         "the rate is halved every second batch in place of every second epoch"),
    case("shapes_multilabel--softmax-loss",
         "criterion = nn.BCEWithLogitsLoss(pos_weight=pos_weight)",
         "criterion = nn.CrossEntropyLoss(weight=pos_weight)",
         "cross entropy of a softmax on several labels for each picture"),
    case("shapes_multilabel--uint8-wraps",
         "            self.images[i] = noisy.clip(0, 255).astype(np.uint8)\n",
         "            self.images[i] = noisy.astype(np.int64).astype(np.uint8)\n",
         "values outside of 0 to 255 wrap around"),
    case("activity_sensors--plateau-mode",
         "mode=\"max\", factor",
         "mode=\"min\", factor",
         "the rate falls while the F1 score improves"),
    case("activity_sensors--rare-drawn-less",
         "    class_weights = 1.0 / np.bincount(y_train)\n",
         "    class_weights = np.bincount(y_train) / len(y_train)\n",
         "frequent classes are drawn more often, rare ones less"),
    case("molecules_mpnn--no-offset",
         "        edges.append(edge_index + offset)\n",
         "        edges.append(edge_index)\n",
         "all bonds of a batch are between the atoms of its first molecules"),
    case("molecules_mpnn--attributes-interleaved",
         "F.one_hot(torch.tensor(kinds), 2).float().repeat(2, 1)",
         "F.one_hot(torch.tensor(kinds), 2).float().repeat_interleave(2, dim=0)",
         "repeat_interleave() in place of repeat(): bonds get the kind of others"),
    case("fruit_a2c--returns-in-order",
         "        for t in reversed(range(n_steps)):\n",
         "        for t in range(n_steps):\n",
         "returns are accumulated from the first step on"),
    case("fruit_a2c--returns-appended",
         "            returns.insert(0, R)\n",
         "            returns.append(R)\n",
         "returns are appended from the last to the first and never turned around"),
    case("fruit_a2c--entropy-sign",
         "- entropy_coef * entropy",
         "+ entropy_coef * entropy",
         "the entropy is punished"),
    case("digits_trainer--factor-is-rate",
         "        return 0.5 * (1 + math.cos(math.pi * progress))\n",
         "        return self.config.lr * 0.5 * (1 + math.cos(math.pi * progress))\n",
         "LambdaLR multiplies, so the rate is squared after the warm-up"),
    case("digits_trainer--noise-in-place",
         "            image = image + 0.15 * torch.randn(image.shape)\n",
         "            image += 0.15 * torch.randn(image.shape)\n",
         "the noise is added to the stored picture, more in each epoch"),
]  # fmt: skip

HEALTHY = [
    case("house_numbers--one-head",
         "        self.heads = nn.ModuleList([nn.Linear(48 * 2 * 2, n_classes) for _ in range(PLACES)])\n",
         "        self.heads = nn.ModuleList([nn.Linear(48 * 2 * 2, n_classes)] * PLACES)\n",
         "all places share one head"),
    case("roman_transformer--noisy-decoder-input",
         "        logits = model(src, tgt_in)\n",
         "        noise = torch.randint(3, 3 + len(LETTERS), tgt_in.shape)\n"
         "        swap = (torch.rand(tgt_in.shape) < 0.02) & (tgt_in > EOS)\n"
         "        logits = model(src, torch.where(swap, noise, tgt_in))\n",
         "some letters of the decoder's input are replaced by random ones"),
    case("roman_transformer--tied-and-smoothed",
         "criterion = nn.CrossEntropyLoss(ignore_index=PAD)\n",
         "model.generator.weight = model.tgt_embed.weight\n"
         "criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.05)\n",
         "tied embeddings and label smoothing"),
    case("photo_deblur--charbonnier-and-edges",
         "            loss = criterion(model(blurred), sharp)\n",
         "            output = model(blurred)\n"
         "            loss = ((output - sharp) ** 2 + 1e-6).sqrt().mean()\n"
         "            loss = loss + 0.1 * criterion(output.diff(dim=-1), sharp.diff(dim=-1))\n",
         "Charbonnier's loss and a term of edges"),
    case("photo_deblur--cropped-border",
         "            loss = criterion(model(blurred), sharp)\n",
         "            loss = criterion(model(blurred)[..., 4:-4, 4:-4], sharp[..., 4:-4, 4:-4])\n",
         "the loss leaves out the border"),
    case("shapes_multilabel--focal",
         "        loss = criterion(model(x), y)\n",
         "        bce = nn.functional.binary_cross_entropy_with_logits(model(x), y, reduction=\"none\")\n"
         "        loss = ((1 - torch.exp(-bce)) ** 2 * bce).sum(dim=1).mean()\n",
         "focal loss, summed over the classes"),
    case("activity_sensors--mean-pooled",
         "        return self.head(self.encoder(x)[:, 0])\n",
         "        return self.head(self.encoder(x)[:, 1:].mean(dim=1))\n",
         "the mean over time in place of the class token, which stays as a place to attend to"),
    case("molecules_mpnn--gated",
         "            h = h + F.relu(update(torch.cat([h, gathered], dim=-1)))\n",
         "            new = torch.tanh(update(torch.cat([h, gathered], dim=-1)))\n"
         "            h = h + F.dropout(new, 0.05, self.training)\n",
         "bounded updates with dropout"),
    case("digits_trainer--swapped-order",
         "                self.optimizer.step()\n"
         "                self.optimizer.zero_grad(set_to_none=True)\n"
         "                self.scheduler.step()\n"
         "                self.ema.update(self.model)\n",
         "                self.optimizer.step()\n"
         "                self.ema.update(self.model)\n"
         "                self.scheduler.step()\n"
         "                self.optimizer.zero_grad(set_to_none=True)\n",
         "the average first, gradients cleared last"),
    case("digits_trainer--ragged-accumulation",
         "            if (i + 1) % self.config.accumulate == 0:\n",
         "            if (i + 1) % self.config.accumulate == 0 or i + 1 == len(self.train_loader):\n",
         "the last batch of an epoch is stepped alone"),
]  # fmt: skip

HARMFUL = {
    "digits_trainer--factor-is-rate",
    "digits_trainer--noise-in-place",
    "fruit_a2c--returns-in-order",
    "house_numbers--columns-reshaped",
    "house_numbers--flipped",
    "house_numbers--last-head-only",
    "molecules_mpnn--no-offset",
    "photo_deblur--scheduler-per-batch",
    "shapes_multilabel--softmax-loss",
    "shapes_multilabel--uint8-wraps",
}

HONEST: dict[str, str] = {}
