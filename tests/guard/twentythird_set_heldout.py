"""The half of twentythird_set.py that is closed to whoever changes checks: ids whose SHA-256 ends with an odd digit."""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("fixmatch_mnist--labelled_in_order",
         'DataLoader(labelled_set, CFG["batch"], shuffle=True, drop_last=True)',
         'DataLoader(labelled_set, CFG["batch"], drop_last=True)',
         "the labelled loader does not shuffle: its rows are sorted by class, and the last four of the last class are always dropped"
         " (seen often)"),
    case("fixmatch_mnist--weak_view_twice",
         "torch.cat([weak(x), weak(u), strong(weak(u))])",
         "torch.cat([weak(x), weak(u), weak(u)])",
         "both views of the unlabelled images are weak: the pseudo-label is learnt from nearly the same image"
         " (seen often)"),
    case("fixmatch_mnist--average_of_a_long_run",
         '    "ema_decay": 0.98,\n',
         '    "ema_decay": 0.9995,\n',
         "the decay of a run of a million steps: after 250 steps the average is nearly the initial weights"
         " (seen often)"),
    case("doc_towers--normalised_over_batch",
         "F.normalize(self.head(self.embed(ids, offsets)), dim=-1)",
         "F.normalize(self.head(self.embed(ids, offsets)), dim=0)",
         "embeddings are normalised over the batch, not each for itself"
         " (seen often)"),
    case("doc_towers--divided_by_scale",
         "    logits = scale * names @ lines.T\n",
         "    logits = names @ lines.T / scale\n",
         "the scale is the inverse temperature already, and the logits are divided by it"
         " (seen often)"),
    case("doc_towers--recall_within_batch",
         "        nearest = (torch.cat(names) @ torch.cat(lines).T).topk(k, dim=1).indices\n"
         "        return (nearest == torch.arange(len(nearest))[:, None]).any(1).float().mean().item()\n",
         "        nearest = [(n @ l.T).topk(k, dim=1).indices for n, l in zip(names, lines)]\n"
         "        hits = [(near == torch.arange(len(near))[:, None]).any(1) for near in nearest]\n"
         "        return torch.cat(hits).float().mean().item()\n",
         "each name is ranked among the lines of its own batch only: the reported recall is too high"
         " (seen often)"),
    case("digit_ssd--easy_negatives",
         "    rank = negatives.argsort(1, descending=True).argsort(1)\n",
         "    rank = negatives.argsort(1).argsort(1)\n",
         "the mining takes the background anchors with the lowest loss"
         " (seen often)"),
    case("digit_ssd--lowest_first",
         "sorted(found, reverse=True)",
         "sorted(found)",
         "the curve of precision and recall begins with the least confident detections"
         " (seen often)"),
    case("ltsf_patch--highest_is_best",
         "        best, waited = math.inf, 0\n"
         "        for epoch in range(self.args.train_epochs):\n"
         "            self.adjust_learning_rate(epoch)\n"
         "            self.train_epoch(loader)\n"
         "            vali_loss = self.vali(vali_loader)\n"
         '            print(f"epoch {epoch} vali {vali_loss:.4f}")\n'
         "            if vali_loss < best:\n",
         "        best, waited = -math.inf, 0\n"
         "        for epoch in range(self.args.train_epochs):\n"
         "            self.adjust_learning_rate(epoch)\n"
         "            self.train_epoch(loader)\n"
         "            vali_loss = self.vali(vali_loader)\n"
         '            print(f"epoch {epoch} vali {vali_loss:.4f}")\n'
         "            if vali_loss > best:\n",
         "early stopping was written for an accuracy: the highest error is the best, and the first epoch is kept"
         " (seen often)"),
    case("ltsf_patch--decay_of_adamw",
         "torch.optim.Adam(self.model.parameters(), lr=args.learning_rate)",
         "torch.optim.Adam(self.model.parameters(), lr=args.learning_rate, weight_decay=0.05)",
         "the weight decay of AdamW in Adam, which adds it to the gradient: the weights become small"
         " (seen often)"),
    case("texture_unet--only_training_normalised",
         "        image = (image - self.mean) / self.std\n"
         "        if self.train:\n",
         "        if self.train:\n"
         "            image = (image - self.mean) / self.std\n",
         "the normalisation is among the augmentations: the images of the test are not normalised"
         " (https://github.com/JeasunLok/ResNet-pytorch/issues/1)"),
    case("texture_unet--dice_score_added",
         "    return ce + 0.5 * (1 - dice.mean())\n",
         "    return ce + 0.5 * dice.mean()\n",
         "the Dice score is added to the loss, not its distance from one: overlap is made small"
         " (seen often)"),
    case("texture_unet--skip_left_out",
         "        d = self.dec2(torch.cat([self.up2(c), b], 1))\n"
         "        return self.out(self.dec1(torch.cat([self.up1(d), a], 1)))\n",
         "        c, d = self.up2(c), self.up1(self.up2(c))\n"
         "        d = self.up1(self.dec2(torch.cat([c, c], 1)))\n"
         "        return self.out(self.dec1(torch.cat([d, d], 1)))\n",
         "the upsampled map is concatenated with itself: no skip connection is used"
         " (seen often)"),
    case("package_text--first_class_ignored",
         'batch["label"], label_smoothing=0.1)',
         'batch["label"], ignore_index=PAD, label_smoothing=0.1)',
         "the padding's number is ignored in the labels, and is that of the first class"
         " (seen often)"),
    case("glyph_protonet--training_scaled_twice",
         "episode_logits(encoder, jitter(x))",
         "episode_logits(encoder, jitter(x / 255))",
         "the images are divided by 255 a second time, in training only"
         " (seen often)"),
]  # fmt: skip

HEALTHY = [
    case("doc_towers--fixed_temperature",
         "nn.Parameter(torch.tensor(10.0).log())",
         "nn.Parameter(torch.tensor(20.0).log(), requires_grad=False)",
         "the temperature is a constant"),
    case("ltsf_patch--all_loaders_shuffle",
         'shuffle=flag == "train", drop_last',
         "shuffle=True, drop_last",
         "the test is shuffled too: its error is a mean over all"),
    case("texture_unet--mean_of_mirrored",
         "        predicted = model(image).argmax(1)\n",
         "        predicted = (model(image) + model(image.flip(-1)).flip(-1)).argmax(1)\n",
         "the evaluation adds the scores of the mirrored image"),
    case("package_text--words_dropped",
         "        padding = ids == PAD\n",
         "        padding = ids == PAD\n"
         "        if self.training:\n"
         "            ids = ids.masked_fill((torch.rand(ids.shape) < 0.1) & ~padding, UNK)\n",
         "a tenth of the words is unknown in training"),
]  # fmt: skip

HARMFUL = {
    "fixmatch_mnist--labelled_in_order",
    "fixmatch_mnist--weak_view_twice",
    "fixmatch_mnist--average_of_a_long_run",
    "doc_towers--normalised_over_batch",
    "doc_towers--divided_by_scale",
    "doc_towers--recall_within_batch",
    "digit_ssd--easy_negatives",
    "digit_ssd--lowest_first",
    "ltsf_patch--highest_is_best",
    "ltsf_patch--decay_of_adamw",
    "texture_unet--only_training_normalised",
    "texture_unet--dice_score_added",
    "texture_unet--skip_left_out",
    "package_text--first_class_ignored",
    "glyph_protonet--training_scaled_twice",
}

HONEST: dict[str, str] = {}
