"""Bugs of the twelve scripts in scripts/eighth, everyday training code, by an outsider to the checks (2026-11-26): ids whose CRC-32 is even.

A bug counts if the script's own final number is at least 1% worse at both of two seeds: `python -m tests.guard.harm diabetes_mlp ...`.
"seen often" is the writer's own experience; no source was looked up.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("digits_cnn--layers_in_list",
         "nn.ModuleList([nn.Conv2d(16, 16, 3, padding=1) for _ in range(n_blocks)])",
         "[nn.Conv2d(16, 16, 3, padding=1) for _ in range(n_blocks)]",
         "layers in a plain list are no parameters of the module: they keep their first values (seen often)"),
    case("lstm_docs--labels_not_sorted",
         "    texts, labels = texts[order], labels[order]\n",
         "    texts = texts[order]\n",
         "texts are sorted by length for packing, their labels are not (seen often)"),
    case("char_lm--batchify_rows",
         "data.view(bsz, -1).t().contiguous()",
         "data.view(-1, bsz)",
         "neighbouring characters become neighbouring columns: a column holds each 32nd character of the text (seen often)"),
    case("char_lm--keep_probability",
         "self.drop = nn.Dropout(dropout)",
         "self.drop = nn.Dropout(1 - dropout)",
         "the share to keep is passed to Dropout, which takes the share to drop (seen often in ports)"),
    case("lm_transformer--zero_grad_in_window",
         "        loss.backward()\n"
         "        total += loss.item()\n",
         "        optimizer.zero_grad()\n"
         "        loss.backward()\n"
         "        total += loss.item()\n",
         "gradients are cleared before each micro-batch: only the last one of a window counts (seen often)"),
    case("denoise--sigmoid_for_tanh",
         "nn.Tanh()",
         "nn.Sigmoid()",
         "outputs from 0 to 1 for pictures from -1 to 1 (seen often)"),
    case("unet_digits--own_flip_of_mask",
         "                image = TF.hflip(image)\n"
         "                mask = TF.hflip(mask)\n",
         "                image = TF.hflip(image)\n"
         "            if random.random() > 0.5:\n"
         "                mask = TF.hflip(mask)\n",
         "picture and mask draw their flips independently (seen often)"),
    case("unet_digits--mask_of_bytes",
         ".unsqueeze(0).float() / 255\n",
         ".unsqueeze(0).float()\n",
         "masks of 0 and 255 are not divided by 255; BCEWithLogitsLoss takes them without an error (seen often)"),
    case("box_regression--regressor_left_out",
         "        {\"params\": model.regressor.parameters()},\n",
         "",
         "the second head is in no group of the optimiser (seen often)"),
    case("reinforce--returns_appended",
         "        returns.insert(0, R)\n",
         "        returns.append(R)\n",
         "returns are computed from the end and appended: the first action gets the last return (seen often)"),
    case("imbalanced--test_shuffled",
         "batch_size=BATCH_SIZE, shuffle=False)",
         "batch_size=BATCH_SIZE, shuffle=True)",
         "the test's predictions come in a shuffled order and are compared with the labels in their own (seen often)"),
]  # fmt: skip
HEALTHY = [
    case("diabetes_mlp--sgd_plateau",
         "optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)\n",
         "optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4)\n"
         "for p in model.parameters():\n"
         "    p.register_hook(lambda g: g.clamp(-1, 1))\n",
         "SGD with Nesterov's momentum, gradients clamped by hooks"),
    case("digits_cnn--prefetch",
         "    for data, target in loader:\n"
         "        optimizer.zero_grad()\n",
         "    batches = iter(loader)\n"
         "    following = next(batches)\n"
         "    while following is not None:\n"
         "        data, target = following\n"
         "        following = next(batches, None)\n"
         "        optimizer.zero_grad()\n",
         "the next batch is fetched before a step"),
    case("resnet_onecycle--mixed_precision",
         "        loss = criterion(model(images), labels)\n"
         "        loss.backward()\n"
         "        optimizer.step()\n",
         "        with torch.autocast(\"cpu\", dtype=torch.bfloat16):\n"
         "            loss = criterion(model(images), labels)\n"
         "        scaler = globals().setdefault(\"scaler\", torch.amp.GradScaler(\"cpu\"))\n"
         "        scaler.scale(loss).backward()\n"
         "        scaler.unscale_(optimizer)\n"
         "        nn.utils.clip_grad_norm_(model.parameters(), 5.0)\n"
         "        scaler.step(optimizer)\n"
         "        scaler.update()\n",
         "autocast in bf16, GradScaler and clipping"),
    case("lm_transformer--untied",
         "        self.head.weight = self.tok.weight\n",
         "",
         "a head of its own"),
    case("imbalanced--pos_weight",
         "criterion = nn.BCEWithLogitsLoss()\n",
         "train_loader = DataLoader(train_dataset, batch_size=BATCH_SIZE, shuffle=True)\n"
         "criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(5.0))\n",
         "pos_weight in place of the sampler"),
]  # fmt: skip
HARMFUL = {
    "digits_cnn--layers_in_list",
    "lstm_docs--labels_not_sorted",
    "char_lm--batchify_rows",
    "char_lm--keep_probability",
    "lm_transformer--zero_grad_in_window",
    "denoise--sigmoid_for_tanh",
    "unet_digits--own_flip_of_mask",
    "unet_digits--mask_of_bytes",
    "box_regression--regressor_left_out",
    "reinforce--returns_appended",
    "imbalanced--test_shuffled",
}
"""Bugs with a final number at least 1% worse at both seeds."""
HONEST: dict[str, str] = {}
