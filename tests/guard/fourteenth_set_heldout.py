"""The closed half of the fourteenth set: see fourteenth_set.py."""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("tumour_table--tumour-codes-per-split",
         "    val_set = TumourDataset(numbers[val_rows], val_codes, labels[val_rows], mean, std, vocabularies)\n",
         "    val_set = TumourDataset(numbers[val_rows], val_codes, labels[val_rows], mean, std, build_vocabularies(val_codes))\n",
         "the held-out rows get vocabularies of their own: the same code has another number"),
    case("nuclei_unet--nuclei-instance-ids",
         "        self.mask = (instances > 0).astype(np.float32)\n",
         "        self.mask = instances / instances.max()\n",
         "the mask holds instance numbers, scaled to 0..1, and not 0 and 1"),
    case("punctuation_tagger--tagger-words-sorted-alone",
         "    batch = sorted(batch, key=lambda item: len(item[0]), reverse=True)\n"
         "    words, tags = zip(*batch)\n",
         "    words, tags = zip(*batch)\n"
         "    words = sorted(words, key=len, reverse=True)\n",
         "the collate sorts the words by length, and not the tags"),
    case("punctuation_tagger--tagger-padding-counted",
         "    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=IGNORE), lengths\n",
         "    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True), lengths\n",
         "tags are padded with 0, a real tag: padding is learnt, and counted as right in the reported accuracy"),
    case("char_lm--char-batch-first",
         "        self.gru = nn.GRU(64, hidden, num_layers=1, batch_first=True)\n",
         "        self.gru = nn.GRU(64, hidden, num_layers=1)\n",
         "batch_first=True is missing: the GRU walks along the batch"),
    case("char_lm--char-warmup-epochs",
         "            scheduler.step()\n"
         "            if step % 50 == 0:\n"
         "                print(f\"  step {step} loss {loss.item():.3f}\")\n",
         "            if step % 50 == 0:\n"
         "                print(f\"  step {step} loss {loss.item():.3f}\")\n"
         "        scheduler.step()\n",
         "a schedule of steps is stepped once per epoch: the rate stays at the warm-up's beginning"),
    case("char_lm--char-perplexity-twice-averaged",
         "    return math.exp(total / batches)\n",
         "    return math.exp(total / len(loader.dataset))\n",
         "a sum of batch means is divided by the number of samples: the reported perplexity is near 1"),
    case("diabetes_uncertainty--diabetes-sigma-unscaled",
         "        mean, sigma = mean * y_scale.std + y_scale.mean, sigma * y_scale.std\n",
         "        mean, sigma = mean * y_scale.std + y_scale.mean, sigma\n",
         "the mean is scaled back and the deviation is not: the reported interval is too narrow"),
    case("diabetes_uncertainty--diabetes-variance-as-sigma",
         "    return 0.5 * (log_variance + (y - mean) ** 2 / log_variance.exp() + math.log(2 * math.pi)).mean()\n",
         "    return 0.5 * (log_variance + (y - mean) ** 2 / log_variance.exp() ** 2 + math.log(2 * math.pi)).mean()\n",
         "the second head's output is a variance in one place and a deviation in the other"),
    case("digits_transfer--transfer-prefix-lost",
         "    torch.save(model.state_dict(), args.checkpoint)\n",
         "    torch.save({'module.' + k: v for k, v in model.state_dict().items()}, args.checkpoint)\n",
         "names in the file have a prefix; with strict=False nothing is loaded"),
    case("digits_transfer--transfer-unfrozen-not-optimised",
         "            optimizer.add_param_group({\"params\": model.unfreeze_last_block(), \"lr\": 1e-3})\n",
         "            model.unfreeze_last_block()\n",
         "the last block is unfrozen and not given to the optimiser"),
    case("cartpole_reinforce--cartpole-done-ignored",
         "            running = reward + gamma * running * (1.0 - done)\n",
         "            running = reward + gamma * running\n",
         "returns run on over the end of an episode"),
    case("digits_transfer--transfer-head-after-optimiser",
         "    model.fc = nn.Linear(48, args.classes)\n"
         "    model.freeze_backbone()\n"
         "    optimizer = optim.Adam(model.fc.parameters(), lr=3e-3)\n",
         "    model.freeze_backbone()\n"
         "    optimizer = optim.Adam(model.fc.parameters(), lr=3e-3)\n"
         "    model.fc = nn.Linear(48, args.classes)\n",
         "the head is replaced after the optimiser was built"),
]  # fmt: skip

HEALTHY = [
    case("char_lm--char-tied-lstm",
         "        self.embedding = nn.Embedding(vocab_size, 64)\n"
         "        self.gru = nn.GRU(64, hidden, num_layers=1, batch_first=True)\n"
         "        self.drop = nn.Dropout(0.1)\n"
         "        self.head = nn.Linear(hidden, vocab_size)\n",
         "        self.embedding = nn.Embedding(vocab_size, hidden)\n"
         "        nn.init.normal_(self.embedding.weight, std=0.05)\n"
         "        self.gru = nn.LSTM(hidden, hidden, batch_first=True)\n"
         "        self.drop = nn.Dropout(0.1)\n"
         "        self.head = nn.Linear(hidden, vocab_size)\n"
         "        self.head.weight = self.embedding.weight\n",
         "an LSTM whose embedding is also its output layer"),
    case("punctuation_tagger--tagger-weighted",
         "    criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)\n",
         "    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.5, 1.0]), ignore_index=IGNORE)\n",
         "tags are weighted"),
    case("diabetes_uncertainty--diabetes-torch-nll",
         "            loss = gaussian_nll(mean, log_variance, yb.unsqueeze(1))\n",
         "            loss = nn.functional.gaussian_nll_loss(mean, yb.unsqueeze(1), log_variance.exp(), full=True)\n",
         "torch's Gaussian NLL"),
    case("cartpole_reinforce--cartpole-rmsprop",
         "    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)\n",
         "    optimizer = torch.optim.RMSprop(policy.parameters(), lr=args.lr / 3)\n",
         "RMSprop, and a smaller rate"),
]  # fmt: skip

HARMFUL = {
    "cartpole_reinforce--cartpole-done-ignored",
    "char_lm--char-batch-first",
    "char_lm--char-perplexity-twice-averaged",
    "char_lm--char-warmup-epochs",
    "diabetes_uncertainty--diabetes-sigma-unscaled",
    "digits_transfer--transfer-head-after-optimiser",
    "digits_transfer--transfer-prefix-lost",
    "digits_transfer--transfer-unfrozen-not-optimised",
    "nuclei_unet--nuclei-instance-ids",
    "punctuation_tagger--tagger-padding-counted",
    "punctuation_tagger--tagger-words-sorted-alone",
    "tumour_table--tumour-codes-per-split",
}

HONEST: dict[str, str] = {}
