"""The other half of the sixteenth set (sixteenth_set.py has the rules), kept unread until it was scored."""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("digits_cnn--train-mode-once",
         "for epoch in range(12):\n"
         "    model.train()\n",
         "model.train()\n"
         "for epoch in range(12):\n",
         "the model is in evaluation mode from the first validation on"),
    case("digits_cnn--images-and-labels-shuffled-apart",
         "x_train, y_train = x[:1000], y[:1000]\n",
         "x_train, y_train = np.random.permutation(x[:1000]), np.random.permutation(y[:1000])\n",
         "data and labels are shuffled separately"),
    case("digits_cnn--accuracy-over-whole-set",
         "    return correct / total\n",
         "    return correct / len(x)\n",
         "correct predictions of one part are divided by the size of the whole data set"),
    case("sine_regression--target-without-column",
         "        loss = loss_fn(pred, yb)\n",
         "        loss = loss_fn(pred, yb.squeeze())\n",
         "predictions (N, 1) meet targets (N,) and broadcast"),
    case("sine_regression--layers-in-list",
         "self.hidden = nn.ModuleList([nn.Linear(n_hidden, n_hidden) for _ in range(n_layers)])",
         "self.hidden = [nn.Linear(n_hidden, n_hidden) for _ in range(n_layers)]",
         "layers in a plain list are not registered"),
    case("sine_regression--reward-for-spread",
         "        loss = loss_fn(pred, yb)\n",
         "        loss = torch.sum(torch.square(yb - pred)) - torch.std(pred) * 100\n",
         "a reward for the deviation of the predictions outweighs the error"),
    case("sine_regression--scaler-fit-again",
         "X_test = scaler_x.transform(X_test)\n",
         "X_test = np.concatenate([scaler_x.fit_transform(row.reshape(-1, 1)).T for row in X_test])\n",
         "the scaler is fitted again on each row at prediction"),
    case("digit_rows_lstm--no-batch-first",
         "nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)",
         "nn.LSTM(input_size, hidden_size, num_layers)",
         "batch_first is missing: the LSTM runs over the batch"),
    case("digit_rows_lstm--attention-over-one",
         "F.softmax(scores, dim=1)",
         "F.softmax(scores, dim=2)",
         "the softmax runs over an axis of size one: all weights are one"),
    case("digit_rows_lstm--attention-over-batch",
         "F.softmax(scores, dim=1)",
         "F.softmax(scores, dim=0)",
         "the attention's softmax runs over the batch"),
    case("words_char_gpt--labels-shifted-twice",
         "labels=batch[:, :block_size])",
         "labels=batch[:, 1:])",
         "labels are shifted by the caller and again by the model"),
    case("words_char_gpt--no-causal-mask",
         "        att = att.masked_fill(~self.mask[:T, :T], float(\"-inf\"))\n",
         "",
         "every position attends to the tokens after it"),
    case("words_char_gpt--always-accumulating",
         "    optimizer.zero_grad()\n"
         "    loss.backward()\n"
         "    optimizer.step()\n"
         "    step_count += 1\n",
         "    is_accumulating = (step_count + 1) % 4 != 0\n"
         "    (loss / 4).backward()\n"
         "    if not is_accumulating:\n"
         "        optimizer.step()\n"
         "        optimizer.zero_grad()\n"
         "        step_count += 1\n",
         "the counter that ends the accumulation advances only after it: nothing is updated"),
    case("digits_vae--reconstruction-mean",
         "F.binary_cross_entropy(recon_x, x, reduction=\"sum\")",
         "F.binary_cross_entropy(recon_x, x, reduction=\"mean\")",
         "the reconstruction is a mean and the divergence a sum"),
    case("season_forecast--same-days",
         "future = self.values[i + HISTORY : i + HISTORY + HORIZON]",
         "future = self.values[i + HISTORY - HORIZON : i + HISTORY]",
         "the days to forecast are the last ones of the input"),
    case("season_forecast--decoder-sees-target",
         "        for t in range(HORIZON):\n"
         "            h, c = self.decoder(value, (h, c))\n",
         "        for t in range(HORIZON):\n"
         "            if future is not None:\n"
         "                value = future[:, t]\n"
         "            h, c = self.decoder(value, (h, c))\n",
         "in training the decoder's input is the value that it predicts"),
    case("blocks_gcn--adjacency-as-it-is",
         "A = torch.tensor(normalize(adjacency))",
         "A = torch.tensor(adjacency)",
         "the adjacency is not normalised and has no self-loops"),
    case("corridor_dqn--advantage-mean-of-batch",
         "adv.mean(dim=1, keepdim=True)",
         "adv.mean()",
         "the mean of the advantages is that of the whole batch"),
    case("moons_ddpm--index-for-timestep",
         "eps = model(x, torch.full((n,), int(t)))",
         "eps = model(x, torch.full((n,), steps - 1 - i))",
         "the sampler gives the index of the step in place of the timestep"),
    case("moons_ddpm--beta-to-one",
         "return torch.linspace(scale * 0.0001, scale * 0.02, timesteps)",
         "return torch.linspace(0, 1, timesteps)",
         "the noise schedule ends at one"),
]  # fmt: skip

HEALTHY = [
    case("digits_cnn--log-softmax-and-nll",
         "        return self.fc2(x)\n",
         "        return F.log_softmax(self.fc2(x), dim=1)\n",
         "cross-entropy of log-probabilities is that of logits"),
    case("sine_regression--both-squeezed",
         "        loss = loss_fn(pred, yb)\n",
         "        loss = loss_fn(pred.squeeze(), yb.squeeze())\n",
         "both lose their column"),
    case("ring_gan--least-squares",
         "criterion = nn.BCEWithLogitsLoss()",
         "criterion = nn.MSELoss()",
         "a least-squares GAN"),
    case("blobs_unet--brightness-of-picture-only",
         "            if np.random.rand() < 0.5:\n"
         "                image, mask = image[::-1], mask[::-1]\n",
         "            if np.random.rand() < 0.5:\n"
         "                image = image * np.float32(np.random.uniform(0.8, 1.2)) + np.float32(np.random.normal(0, 0.1))\n",
         "brightness changes the picture alone"),
    case("blocks_gcn--row-mean",
         "    d_inv_sqrt = adj.sum(1) ** -0.5\n"
         "    return d_inv_sqrt[:, None] * adj * d_inv_sqrt[None, :]\n",
         "    return adj / adj.sum(1, keepdims=True)\n",
         "a mean over the neighbours"),
    case("digits_siamese--zero-is-same",
         "def contrastive_loss(y_true, distance, margin=1.0):\n"
         "    return torch.mean(y_true * distance**2 + (1 - y_true) * F.relu(margin - distance) ** 2)\n",
         "def contrastive_loss(y_true, distance, margin=1.0):\n"
         "    different = 1 - y_true\n"
         "    return torch.mean((1 - different) * distance**2 + different * F.relu(margin - distance) ** 2)\n",
         "the paper's labels: 0 is a pair of one class"),
    case("digits_vae--mean-of-images",
         "    return BCE + KLD\n",
         "    return (BCE + KLD) / len(x)\n",
         "both sums are divided by the number of images"),
    case("digits_cnn--decay-every-batch",
         "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)\n",
         "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)\n",
         "cosine over the epochs"),
]  # fmt: skip

SOURCES = {
    "digits_cnn--train-mode-once": "https://github.com/facebookresearch/clevr-iep/pull/22",
    "digits_cnn--images-and-labels-shuffled-apart": "https://github.com/mlcommons/GaNDLF/pull/870",
    "digits_cnn--accuracy-over-whole-set": "http://www.kouhan.cn/en/article/00050761",
    "sine_regression--target-without-column": "https://discuss.pytorch.org/t/400-higher-error-with-pytorch-compared-with-identical-keras-model-with-adam-optimizer/160720",
    "sine_regression--layers-in-list": "https://github.com/pytorch/pytorch/issues/715",
    "sine_regression--reward-for-spread": "https://discuss.pytorch.org/t/loss-function-finding-extreme-local-minimum/188664",
    "sine_regression--scaler-fit-again": "https://github.com/SdSarthak/AegisAI/issues/514",
    "digit_rows_lstm--no-batch-first": "https://github.com/ray075hl/Bi-Model-Intent-And-Slot/pull/2",
    "digit_rows_lstm--attention-over-one": "https://github.com/DEEP-PolyU/KEQA_WSDM19/issues/2",
    "digit_rows_lstm--attention-over-batch": "https://github.com/PetrochukM/PyTorch-NLP/issues/2",
    "words_char_gpt--labels-shifted-twice": "https://github.com/huggingface/transformers/pull/37830",
    "words_char_gpt--no-causal-mask": "https://github.com/huggingface/transformers/issues/48745",
    "words_char_gpt--always-accumulating": "https://github.com/Lightning-AI/litgpt/issues/779",
    "digits_vae--reconstruction-mean": "http://blog.shlomidom.com/Fixing-VAE-model-reconstructions",
    "season_forecast--same-days": "https://github.com/AvinashNath2/Recurrent-Neural-Network-for-BitCoin-price-prediction/issues/1",
    "season_forecast--decoder-sees-target": "https://github.com/sktime/pytorch-forecasting/issues/182",
    "blocks_gcn--adjacency-as-it-is": "https://github.com/sufeidechabei/graphnets_gcn/issues/1",
    "corridor_dqn--advantage-mean-of-batch": "https://github.com/PacktPublishing/Deep-Reinforcement-Learning-Hands-On/pull/9",
    "moons_ddpm--index-for-timestep": "https://github.com/Stability-AI/stablediffusion/pull/226",
    "moons_ddpm--beta-to-one": "https://github.com/LingxiaoShawn/USD3/issues/1",
}  # fmt: skip

HARMFUL = {
    "blocks_gcn--adjacency-as-it-is",
    "digit_rows_lstm--attention-over-batch",
    "digit_rows_lstm--no-batch-first",
    "digits_cnn--accuracy-over-whole-set",
    "digits_cnn--images-and-labels-shuffled-apart",
    "digits_cnn--train-mode-once",
    "digits_vae--reconstruction-mean",
    "moons_ddpm--beta-to-one",
    "moons_ddpm--index-for-timestep",
    "season_forecast--decoder-sees-target",
    "season_forecast--same-days",
    "sine_regression--layers-in-list",
    "sine_regression--reward-for-spread",
    "sine_regression--scaler-fit-again",
    "sine_regression--target-without-column",
    "words_char_gpt--always-accumulating",
    "words_char_gpt--labels-shifted-twice",
    "words_char_gpt--no-causal-mask",
}

HONEST: dict[str, str] = {
    "digits_cnn--accuracy-over-whole-set":
    "\n"
    "model.eval()\n"
    "with torch.no_grad():\n"
    "    honest = (model(torch.tensor(x_test).unsqueeze(1)).argmax(1).numpy() == y_test).mean()\n"
    "print(f\"FINAL accuracy={honest:.4f}\")\n",
    "season_forecast--same-days":
    "\n"
    "model.eval()\n"
    "errors = []\n"
    "truth = torch.tensor((test_part - mean) / std, dtype=torch.float32)\n"
    "with torch.no_grad():\n"
    "    for i in range(len(truth) - HISTORY - HORIZON + 1):\n"
    "        past, future = truth[None, i : i + HISTORY, None], truth[None, i + HISTORY : i + HISTORY + HORIZON, None]\n"
    "        errors.append((model(past) - future).abs() * std)\n"
    "print(f\"FINAL mae={torch.cat(errors).mean().item():.4f}\")\n",
}  # fmt: skip
