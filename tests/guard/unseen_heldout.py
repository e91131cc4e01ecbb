"""Held out: developers, please do not read this file before the first score on it is logged in LOG.md.

The other half of tests/guard/unseen.py.
"""

from tests.helpers.patches import ScriptPatch

BUGS = [
    ScriptPatch(
        "zero-grad-per-micro-batch",
        "accumulation.py",
        '        with torch.autocast("cpu", dtype=torch.bfloat16):',
        '        optimizer.zero_grad()\n        with torch.autocast("cpu", dtype=torch.bfloat16):',
        "loop",
        "common (forum threads on accumulation)",
        "gradients are cleared before every micro-batch: only the last one of a window is stepped",
    ),
    ScriptPatch(
        "box-term-dropped",
        "detect.py",
        "loss = sum(model(list(images), list(targets)).values())",
        'loss = model(list(images), list(targets))["loss_label"]',
        "loss",
        "common",
        "one term of the dict of losses is left out: the box head never trains",
    ),
    ScriptPatch(
        "noise-without-root",
        "diffusion.py",
        "(1 - a).sqrt() * noise",
        "(1 - a) * noise",
        "loss",
        "common (own DDPM code)",
        "the noise is scaled by its variance instead of its deviation: training and sampler disagree",
    ),
    ScriptPatch(
        "schedule-in-both-phases",
        "frozen.py",
        '        if phase == "train":\n            scheduler.step()\n',
        "        scheduler.step()\n",
        "schedule",
        "common (after PyTorch's transfer-learning tutorial)",
        (
            "the scheduler is stepped after the training phase and after the validation phase: the rate "
            "falls twice as fast"
        ),
    ),
    ScriptPatch(
        "optimiser-of-the-old-head",
        "frozen.py",
        (
            "model.fc = nn.Linear(16, 10)\n"
            "criterion = nn.CrossEntropyLoss()\n"
            "optimizer = optim.SGD(model.fc.parameters(), lr=0.1, momentum=0.9)"
        ),
        (
            "optimizer = optim.SGD(model.fc.parameters(), lr=0.1, momentum=0.9)\n"
            "model.fc = nn.Linear(16, 10)\n"
            "criterion = nn.CrossEntropyLoss()"
        ),
        "state",
        "common",
        "the head is replaced after the optimiser was built: the new head never moves",
    ),
    ScriptPatch(
        "edges-on-the-wrong-axis",
        "gnn.py",
        ".scatter_(1, near, 1 / 6)",
        ".scatter_(0, near, 1 / 6)",
        "axis",
        "common",
        "neighbours are scattered along the other axis: only six columns of the adjacency are filled",
    ),
    ScriptPatch(
        "target-is-the-input",
        "lbfgs.py",
        "torch.from_numpy(data[3:, :-1]), torch.from_numpy(data[3:, 1:])",
        "torch.from_numpy(data[3:, :-1]), torch.from_numpy(data[3:, :-1])",
        "data",
        "common (time-series forecasting)",
        "the training target is not shifted: the net learns to copy the present value",
    ),
    ScriptPatch(
        "adapter-file-empty",
        "lora.py",
        'if k.endswith((".a", ".b"))',
        'if k.endswith((".lora_a", ".lora_b"))',
        "export",
        "common (key filters after a rename)",
        "no key matches the filter: the saved adapter holds nothing",
    ),
    ScriptPatch(
        "token-zero-ignored",
        "mingpt.py",
        "ignore_index=-1",
        "ignore_index=0",
        "loss",
        "common (padding id 0 of another tokenizer)",
        "id 0 is a real character here (the newline): it is never scored and never predicted",
    ),
    ScriptPatch(
        "heads-by-reshape",
        "nanogpt.py",
        "t.view(B, T, 4, C // 4).transpose(1, 2)",
        "t.reshape(B, 4, T, C // 4)",
        "axis",
        "common (own attention code)",
        (
            "heads are cut with reshape instead of transpose: time and channels mix and the causal mask no "
            "longer hides the future"
        ),
    ),
    ScriptPatch(
        "cosine-below-zero",
        "nanogpt.py",
        "coeff = 0.5 * (1.0 + math.cos(",
        "coeff = 0.5 * (math.cos(",
        "schedule",
        "common (own cosine schedules)",
        "1 + is missing in the cosine: the rate turns negative in the second half and the loss is climbed",
    ),
    ScriptPatch(
        "rebound-not-updated",
        "plain_sgd.py",
        "p -= 0.5 * p.grad",
        "p = p - 0.5 * p.grad",
        "loop",
        "common (torch forums)",
        "the assignment binds a new local tensor: no parameter changes",
    ),
    ScriptPatch(
        "advantages-backwards",
        "ppo.py",
        "advantages.insert(0, last)",
        "advantages.append(last)",
        "loop",
        "common (own GAE code)",
        "advantages are collected in reversed time: each action gets the credit of another step",
    ),
    ScriptPatch(
        "critic-learns-advantages",
        "ppo.py",
        "b_ret = b_adv + b_val",
        "b_ret = b_adv",
        "loss",
        "common",
        "the critic is trained on advantages instead of returns",
    ),
    ScriptPatch(
        "best-by-reference",
        "regression.py",
        "copy.deepcopy(model.state_dict())",
        "model.state_dict()",
        "state",
        "common (PyTorch early-stopping snippets)",
        "the best weights are a reference to the live ones: the end restores the last epoch",
    ),
    ScriptPatch(
        "perturbation-doubled",
        "sam.py",
        'p.sub_(self.state[p]["e"])',
        'p.add_(self.state[p]["e"])',
        "sign",
        "common (own SAM code)",
        "the ascent step is added once more instead of taken back: weights drift uphill",
    ),
    ScriptPatch(
        "encoder-detached",
        "seq2seq.py",
        "criterion(decoder(hidden, target)",
        "criterion(decoder(hidden.detach(), target)",
        "loss",
        "common (leftover of truncated backpropagation)",
        "the encoder's state is detached: the encoder never trains",
    ),
    ScriptPatch(
        "triplet-order",
        "triplet.py",
        "loss = criterion(model(a), model(p), model(n))",
        "loss = criterion(model(a), model(n), model(p))",
        "loss",
        "common",
        "positive and negative are passed in the wrong order in training",
    ),
    ScriptPatch(
        "negatives-of-the-other-split",
        "triplet.py",
        "self.x[pick(other)]",
        "pictures[pick(other)]",
        "data",
        "common (global and local indices)",
        (
            "an index into the split is used on the whole data: validation negatives have any class, and "
            "come from training"
        ),
    ),
    ScriptPatch(
        "kl-without-exp",
        "vae.py",
        "logvar - mu.pow(2) - logvar.exp())",
        "logvar - mu.pow(2) - logvar)",
        "loss",
        "common",
        "the exponential is missing in the KL term: the variance is free and shrinks to nothing",
    ),
    ScriptPatch(
        "generator-flees-critic",
        "wgan_gp.py",
        "loss_g = -critic(generator(torch.randn(64, 16))).mean()",
        "loss_g = critic(generator(torch.randn(64, 16))).mean()",
        "sign",
        "common",
        "the generator lowers the critic's score of its samples",
    ),
]


HEALTHY = [
    ScriptPatch(
        "linear-by-epoch",
        "resnet.py",
        "optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)",
        "optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=20)",
        "schedule",
        "common",
        "a linear schedule by epochs",
    ),
    ScriptPatch(
        "bf16-autocast",
        "vit.py",
        "            loss = criterion(model(images), labels)\n",
        (
            '            with torch.autocast("cpu", dtype=torch.bfloat16):\n'
            "                loss = criterion(model(images), labels)\n"
        ),
        "precision",
        "common",
        "bf16 autocast around forward and loss",
    ),
    ScriptPatch(
        "tied-embedding",
        "seq2seq.py",
        "nn.GRU(48, 48, batch_first=True), nn.Linear(48, 20)",
        (
            "nn.GRU(48, 48, batch_first=True), nn.Linear(48, 20)\n"
            "        nn.init.normal_(self.embedding.weight, std=0.15)\n"
            "        self.out.weight = self.embedding.weight"
        ),
        "sharing",
        "Press & Wolf 2017",
        "the output layer shares the embedding's weight",
    ),
    ScriptPatch(
        "one-sided-smoothing",
        "gan.py",
        "label = torch.full((len(real),), 1.0)",
        "label = torch.full((len(real),), 0.9)",
        "loss",
        "Salimans 2016",
        "real samples have the label 0.9; the generator still aims at 1",
    ),
    ScriptPatch(
        "decay-after-warmup",
        "diffusion.py",
        "lambda s: min(1.0, (s + 1) / 100)",
        "lambda s: min(1.0, (s + 1) / 100) * (1 - 0.9 * s / 280)",
        "schedule",
        "common",
        "a linear decay over the run is added to the warm-up",
    ),
    ScriptPatch(
        "larger-micro-batch",
        "accumulation.py",
        "TensorDataset(x[:1400], y[:1400]), 8, shuffle=True",
        "TensorDataset(x[:1400], y[:1400]), 12, shuffle=True",
        "settings",
        "common",
        "another micro-batch size; the last window is shorter",
    ),
]
