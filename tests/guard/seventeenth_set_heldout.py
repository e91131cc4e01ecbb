"""The other half of the seventeenth set (seventeenth_set.py has the rules), kept unread until it was scored."""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("spots_count--density-not-flipped",
         "            density = density[:, ::-1].copy()\n",
         "",
         "the picture is flipped and its density map is not"),
    case("spots_count--bump-not-normalised",
         "density += bump / bump.sum()",
         "density += bump",
         "a cell's bump does not sum to one: the map's sum is no count"),
    case("change_pairs--dice-not-subtracted",
         "    return 1 - ((2 * overlap",
         "    return ((2 * overlap",
         "the Dice coefficient itself is minimised"),
    case("tones_keyword--reshape-for-transpose",
         ".transpose(1, 2)",
         ".reshape(len(waves), FRAME // 2 + 1, -1)",
         "reshape() in place of transpose() mixes time and frequency"),
    case("tones_keyword--test-in-int16-units",
         "spectrogram(train_waves), spectrogram(test_waves)",
         "spectrogram(train_waves), spectrogram(test_waves * 32767)",
         "the test waves are in units of int16, the training waves in -1 to 1"),
    case("tones_keyword--onecycle-per-epoch",
         "        scheduler.step()\n"
         "        running += loss.item()\n",
         "        running += loss.item()\n"
         "    scheduler.step()\n",
         "a schedule in batches is stepped once an epoch: the rate stays in the warm-up"),
    case("crf_tagger--sentences-sorted",
         "    ids = [torch.tensor([vocab.get(w, 1) for w in words]) for words, _ in pairs]\n",
         "    ids = [torch.tensor([vocab.get(w, 1) for w in words]) for words, _ in pairs]\n"
         "    ids.sort(key=len, reverse=True)\n",
         "the sentences of a batch are sorted by length and their tags are not"),
    case("calibrated_digits--fitted-on-train",
         ".fit(x_val, y_val)",
         ".fit(*train_set.tensors)",
         "the temperature is fitted on the training data"),
    case("calibrated_digits--softmax-in-the-test",
         "    logits = scaled(x_test)\n",
         "    logits = scaled(x_test).softmax(1)\n",
         "the test's cross-entropy gets probabilities"),
    case("calibrated_digits--val-not-scaled",
         "x_val, y_val = tensors(x_val, y_val)\n",
         "x_val, y_val = torch.tensor(x_val, dtype=torch.float32), torch.tensor(y_val)\n",
         "the validation pictures are not divided by 16"),
    case("links_gnn--targets-exchanged",
         "target = torch.cat([torch.ones(train_pos.shape[1]), torch.zeros(train_neg.shape[1])])",
         "target = torch.cat([torch.zeros(train_pos.shape[1]), torch.ones(train_neg.shape[1])])",
         "links are trained towards 0, other pairs towards 1"),
    case("links_gnn--edges-not-shuffled",
         "rng.shuffle(edges)\n",
         "",
         "the edges are split in order: the nodes of the test have lost all links"),
    case("links_gnn--test-links-in-graph",
         "adj = adjacency(train_pos)",
         "adj = adjacency(torch.cat([train_pos, test_pos], dim=1))",
         "messages pass along the links of the test"),
    case("hierarchy_words--stream-interleaved",
         ".view(BATCH, -1)",
         ".view(-1, BATCH).t()",
         "the rows of the stream hold every sixteenth word"),
    case("ranknet--ascending",
         "order = scores.argsort(dim=1, descending=True)[:, :k]",
         "order = scores.argsort(dim=1)[:, :k]",
         "the metric takes the lowest scores first"),
    case("beats_unet--val-not-normalised",
         "        signal = (signal - signal.mean()) / signal.std()\n"
         "        if self.augment:\n",
         "        if self.augment:\n"
         "            signal = (signal - signal.mean()) / signal.std()\n",
         "only the training traces are standardised"),
    case("beats_unet--stored-as-integers",
         "return (signal + 0.06 * rng.standard_normal(LENGTH)) * gain, label",
         "return ((signal + 0.06 * rng.standard_normal(LENGTH)) * gain).astype(np.int16), label",
         "the traces are cut to integers at a scale of one"),
    case("beats_unet--milestones-in-batches",
         "        losses.append(loss.item())\n"
         "    scheduler.step()\n",
         "        losses.append(loss.item())\n"
         "        scheduler.step()\n",
         "milestones in epochs are counted in batches"),
    case("tumour_anomaly--classes-exchanged",
         "train_test_split(x[malignant == 0], test_size=0.4",
         "train_test_split(x[data.target == 0], test_size=0.4",
         "the autoencoder is trained on the malignant samples"),
    case("tumour_anomaly--first-rows-only",
         "clean = train[batch]",
         "clean = train[: len(batch)]",
         "every batch is the first 32 rows"),
]  # fmt: skip

HEALTHY = [
    case("ranknet--squeezed-all",
         "return self.net(x).squeeze(-1)",
         "return self.net(x).squeeze()",
         "squeeze() without a dimension; no dimension but the last is 1"),
    case("beats_unet--weights-unused",
         "nn.CrossEntropyLoss(weight=class_weights)",
         "nn.CrossEntropyLoss()",
         "the class weights are computed and not used"),
]  # fmt: skip

HARMFUL = {
    "beats_unet--milestones-in-batches",
    "beats_unet--stored-as-integers",
    "beats_unet--val-not-normalised",
    "calibrated_digits--fitted-on-train",
    "calibrated_digits--softmax-in-the-test",
    "calibrated_digits--val-not-scaled",
    "change_pairs--dice-not-subtracted",
    "crf_tagger--sentences-sorted",
    "hierarchy_words--stream-interleaved",
    "links_gnn--edges-not-shuffled",
    "links_gnn--targets-exchanged",
    "links_gnn--test-links-in-graph",
    "ranknet--ascending",
    "spots_count--bump-not-normalised",
    "spots_count--density-not-flipped",
    "tones_keyword--onecycle-per-epoch",
    "tones_keyword--reshape-for-transpose",
    "tones_keyword--test-in-int16-units",
    "tumour_anomaly--classes-exchanged",
    "tumour_anomaly--first-rows-only",
}

HONEST: dict[str, str] = {
    "links_gnn--test-links-in-graph":
    "\n"
    "adj = adjacency(train_pos)\n"
    "print(f\"FINAL auc={test_auc():.4f}\")\n",
}  # fmt: skip
