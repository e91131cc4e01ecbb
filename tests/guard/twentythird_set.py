"""Bugs of the scripts in scripts/twentythird: a plain script each, as public repositories have them.

Written on 2026-11-30 by someone who had not read the checks. Ids whose SHA-256 ends with an even digit; the others are in
twentythird_set_heldout.py. A bug counts if its number is at least 1% worse than the unchanged script's, or is wrong itself.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("fixmatch_mnist--cosine_without_total",
         'math.cos(7 * math.pi * s / (16 * CFG["steps"]))',
         "math.cos(7 * math.pi * s / 16)",
         "the number of steps is missing in the cosine: the rate changes its sign every two steps"
         " (seen often)"),
    case("doc_towers--schedule_by_epoch",
         "            self.optimizer.step()\n"
         "            self.schedule.step()\n",
         "            self.optimizer.step()\n"
         "        self.schedule.step()\n",
         "the schedule counts batches and is stepped once an epoch: the rate stays at its start"
         " (seen often)"),
    case("digit_ssd--offsets_not_permuted",
         "        offsets = self.reg(features).permute(0, 2, 3, 1).reshape(n, -1, 4)\n",
         "        offsets = self.reg(features).reshape(n, -1, 4)\n",
         "the offsets are reshaped with the channels first: they belong to other anchors than the scores"
         " (https://github.com/jsbaan/transformer-from-scratch/pull/6)"),
    case("digit_ssd--rows_and_columns",
         "            canvas[:, top : top + side, left : left + side] += digit\n",
         "            canvas[:, left : left + side, top : top + side] += digit\n",
         "the digit is pasted with rows and columns exchanged, its box is not"
         " (seen often)"),
    case("ltsf_patch--scaler_of_each_split",
         '        start, end = BORDERS["train"]\n',
         "        start, end = BORDERS[flag]\n",
         "validation and test are scaled with their own mean and deviation: the input has another scale and the reported error is in other units"
         " (seen often)"),
    case("ltsf_patch--head_reshaped",
         ".reshape(batch, channels, -1).transpose(1, 2)\n"
         "        return",
         ".reshape(batch, -1, channels)\n"
         "        return",
         "the output is reshaped to hours and channels in one step: values of one channel are spread over all"
         " (https://github.com/xieenze/Trans2Seg/issues/4)"),
    case("imports_bpr--seeded_each_epoch",
         "        order = torch.randperm(len(train))\n",
         "        torch.manual_seed(SEED)\n"
         "        order = torch.randperm(len(train))\n",
         "the generator is seeded again in each epoch: order and negatives are the same all the time"
         " (seen often)"),
    case("imports_bpr--whole_tables_penalised",
         "            norms = model.user(user).pow(2) + model.item(positive).pow(2) + model.item(negative).pow(2)\n",
         "            norms = model.user.weight.pow(2).sum() + model.item.weight.pow(2).sum()\n",
         "the penalty is the sum over the whole tables, with the weight that was made for the mean over a batch's rows"
         " (seen often)"),
    case("imports_bpr--ranked_without_bias",
         "        return self.user(user) @ self.item.weight.T + self.bias.weight.squeeze(-1)\n",
         "        return self.user(user) @ self.item.weight.T\n",
         "the scores for the ranking lack the items' bias that the training has"
         " (seen often)"),
    case("imports_bpr--train_items_ranked",
         "model.all_scores(users).masked_fill(seen, -torch.inf)",
         "model.all_scores(users)",
         "the items of the training stay in the ranking and push the held-out one down"
         " (https://github.com/PreferredAI/cornac/pull/523)"),
    case("texture_unet--poly_of_one_epoch",
         "    steps = EPOCHS * len(train_loader)\n",
         "    steps = len(train_loader)\n",
         "the schedule is stepped by the batch and was made for one epoch: the rate is 0 from the second on"
         " (https://github.com/meetps/pytorch-semseg/issues/186)"),
    case("package_text--own_vocabulary_of_test",
         "test_set, val_set = Paragraphs(rows[:n_val], vocab), Paragraphs(rows[n_val : 2 * n_val], vocab)\n",
         "test_set, val_set = (Paragraphs(part, Vocab(part)) for part in (rows[:n_val], rows[n_val : 2 * n_val]))\n",
         "validation and test build vocabularies of their own: a number is another word than in training"
         " (seen often)"),
    case("package_text--noam_times_small_rate",
         "lr=1.0, betas=(0.9, 0.98), eps=1e-9)",
         "lr=1e-3, betas=(0.9, 0.98), eps=1e-9)",
         "the schedule gives the rate itself, and is multiplied by the optimiser's 0.001"
         " (seen often)"),
    case("package_text--gain_in_percent",
         "        if score > best:\n",
         "        if score > best + 0.1:  # at least a tenth of a percent\n",
         "the least gain is a percentage and the accuracy a fraction: gains below ten points are not kept, and the training stops early"
         " (seen often)"),
    case("glyph_protonet--targets_repeated",
         "torch.arange(WAY).repeat_interleave(QUERY)",
         "torch.arange(WAY).repeat(QUERY)",
         "the queries are in the order of their classes, the targets go round all classes"
         " (seen often)"),
    case("glyph_protonet--support_among_queries",
         "z[:, SHOT:].reshape(WAY * QUERY, -1)",
         "z[:, :QUERY].reshape(WAY * QUERY, -1)",
         "the support images are among the queries: their distance is zero and the reported accuracy too high"
         " (seen often)"),
    case("glyph_protonet--never_back_to_train",
         "    encoder.train()\n",
         "",
         "the evaluation leaves the encoder in eval mode for all later epochs"
         " (seen often)"),
]  # fmt: skip

HEALTHY = [
    case("fixmatch_mnist--zeroed_after_step",
         "        optimizer.zero_grad()\n"
         "        loss.backward()\n"
         "        optimizer.step()\n",
         "        loss.backward()\n"
         "        optimizer.step()\n"
         "        optimizer.zero_grad()\n",
         "gradients are cleared behind the step"),
    case("doc_towers--both_directions_added",
         "F.cross_entropy(logits.T, labels)) / 2\n",
         "F.cross_entropy(logits.T, labels))\n",
         "the two directions are added: the loss is twice as large, Adam and the clipping do not mind"),
    case("digit_ssd--one_nms_for_all",
         "batched_nms(predicted, confidence, label, 0.45)",
         "batched_nms(predicted, confidence, torch.zeros_like(label), 0.45)",
         "boxes of different classes suppress each other: digits do not overlap here"),
    case("ltsf_patch--trained_on_absolute_error",
         "        self.criterion = nn.MSELoss()\n",
         "        self.criterion = nn.L1Loss()\n",
         "trained on the absolute error, tested on the squared one"),
    case("imports_bpr--negatives_unchecked",
         "    while (bad := seen[users, items]).any():\n"
         "        items[bad] = torch.randint(seen.shape[1], (int(bad.sum()),))\n",
         "",
         "negatives are uniform: the rare one that the user has does not matter"),
    case("glyph_protonet--plain_distance",
         "torch.cdist(queries, prototypes).pow(2)",
         "torch.cdist(queries, prototypes)",
         "the distance is not squared"),
]  # fmt: skip

HARMFUL = {
    "fixmatch_mnist--cosine_without_total",
    "doc_towers--schedule_by_epoch",
    "digit_ssd--offsets_not_permuted",
    "digit_ssd--rows_and_columns",
    "ltsf_patch--scaler_of_each_split",
    "ltsf_patch--head_reshaped",
    "imports_bpr--seeded_each_epoch",
    "imports_bpr--whole_tables_penalised",
    "imports_bpr--ranked_without_bias",
    "imports_bpr--train_items_ranked",
    "texture_unet--poly_of_one_epoch",
    "package_text--own_vocabulary_of_test",
    "package_text--noam_times_small_rate",
    "package_text--gain_in_percent",
    "glyph_protonet--targets_repeated",
    "glyph_protonet--support_among_queries",
    "glyph_protonet--never_back_to_train",
}

HONEST: dict[str, str] = {}
