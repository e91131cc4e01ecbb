"""Bugs and healthy variants of tests/guard/scripts that nobody designed a check for; the open half.

The half is the first byte of the id's SHA-256, modulo 2. The other half is held out in unseen_heldout.py.
"""

from tests.helpers.patches import ScriptPatch

BUGS = [
    ScriptPatch(
        "val-scaled-twice",
        "accelerated.py",
        "val_loader = DataLoader(TensorDataset(x[1400:], y[1400:]), 64)",
        "val_loader = DataLoader(TensorDataset(x[1400:] / 16, y[1400:]), 64)",
        "evaluation",
        "common",
        "validation inputs are divided by 16 a second time, training inputs once",
    ),
    ScriptPatch(
        "attack-descends",
        "adversarial.py",
        "moved = (delta + eps * delta.grad.sign())",
        "moved = (delta - eps * delta.grad.sign())",
        "sign",
        "common (own FGSM code)",
        "the attack lowers the loss: the model trains on easier inputs and robustness is overstated",
    ),
    ScriptPatch(
        "normalise-over-batch",
        "contrastive.py",
        "z = F.normalize(torch.cat([a, b]), dim=1)",
        "z = F.normalize(torch.cat([a, b]), dim=0)",
        "axis",
        "common (own NT-Xent code)",
        "embeddings are normalised over the batch instead of over their channels",
    ),
    ScriptPatch(
        "warmup-never-stepped",
        "detect.py",
        "        if warm is not None:\n            warm.step()\n",
        "",
        "schedule",
        "common (after torchvision's detection references)",
        "the warm-up scheduler is built and never stepped: the rate stays at a hundredth",
    ),
    ScriptPatch(
        "ema-swapped",
        "diffusion.py",
        "zip(self.model.parameters(), model.parameters())",
        "zip(model.parameters(), self.model.parameters())",
        "state",
        "common",
        (
            "the average's update is written to the live model: the average stays the untrained copy and "
            "holds the model back"
        ),
    ),
    ScriptPatch(
        "timestep-drawn-again",
        "diffusion.py",
        "* noise, t), noise)",
        "* noise, torch.randint(0, T, (len(x0),))), noise)",
        "loss",
        "common (own DDPM code)",
        "the net is told another timestep than the one that the input was noised to",
    ),
    ScriptPatch(
        "replay-of-the-oldest",
        "dqn.py",
        "rows = random.sample(memory, 64)",
        "rows = list(memory)[:64]",
        "data",
        "common",
        "every update sees the 64 oldest transitions instead of a random draw",
    ),
    ScriptPatch(
        "generator-wants-fake",
        "gan.py",
        "label.fill_(1.0)",
        "label.fill_(0.0)",
        "sign",
        "common (DCGAN copies)",
        "the generator is rewarded for samples that the discriminator recognises as fake",
    ),
    ScriptPatch(
        "warmup-longer-than-run",
        "hf_trainer.py",
        "warmup_steps=5,",
        "warmup_steps=5000,",
        "schedule",
        "common (transformers scripts, steps of a larger run kept)",
        "the warm-up is longer than the run: the peak rate is never reached",
    ),
    ScriptPatch(
        "both-factors-zero",
        "lora.py",
        "nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)",
        "nn.Parameter(torch.zeros(rank, base.in_features))",
        "model",
        "common (own LoRA layers)",
        "both low-rank factors start at zero: neither ever gets a gradient other than zero",
    ),
    ScriptPatch(
        "visible-tokens-scored",
        "masked_lm.py",
        "labels = ids.masked_fill(~chosen, -100)",
        "labels = ids.masked_fill(chosen, -100)",
        "data",
        "common",
        "the loss scores the visible tokens and ignores the masked ones",
    ),
    ScriptPatch(
        "attention-over-batch",
        "vit.py",
        'nn.TransformerEncoderLayer(dim, 4, 96, 0.1, "gelu", batch_first=True, norm_first=True)',
        'nn.TransformerEncoderLayer(dim, 4, 96, 0.1, "gelu", norm_first=True)',
        "axis",
        "common (torch forums: batch_first)",
        "without batch_first the encoder attends over the samples of a batch instead of the patches of a picture",
    ),
    ScriptPatch(
        "vocabulary-by-hash-order",
        "mingpt.py",
        "enumerate(sorted(set(text)))",
        "enumerate(set(text))",
        "state",
        "common (char-level language models)",
        "the ids of characters follow Python's hash order, another one in every process: a checkpoint cannot be read",
    ),
    ScriptPatch(
        "mixed-targets-exchanged",
        "mixup.py",
        "goal = lam * soft + (1 - lam) * soft[order]",
        "goal = lam * soft[order] + (1 - lam) * soft",
        "loss",
        "common (own mixup code)",
        "the weights of the two targets are exchanged against those of the inputs",
    ),
    ScriptPatch(
        "first-norm-used-twice",
        "resnet.py",
        "return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))",
        "return F.relu(self.bn1(self.conv2(out)) + self.shortcut(x))",
        "model",
        "common (copy and paste)",
        "one batch norm serves two places: its running statistics fit neither in evaluation, and bn2 never trains",
    ),
    ScriptPatch(
        "reconstruction-mean",
        "vae.py",
        'F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")',
        "F.binary_cross_entropy(recon_x, x.view(-1, 64))",
        "reduction",
        "common (VAE reimplementations)",
        "the reconstruction is a mean and the KL term a sum: the posterior collapses",
    ),
    ScriptPatch(
        "horizon-in-samples",
        "vit.py",
        "total, warmup = EPOCHS * len(train_loader), len(train_loader)",
        "total, warmup = EPOCHS * len(train_set), len(train_set)",
        "schedule",
        "common",
        "the schedule counts samples where it is stepped by batches: the run ends inside the warm-up",
    ),
    ScriptPatch(
        "penalty-of-the-batch",
        "wgan_gp.py",
        "grad.norm(2, dim=1)",
        "grad.norm(2)",
        "axis",
        "common (own gradient penalties)",
        "the gradient's norm is taken over the whole batch instead of each sample",
    ),
    ScriptPatch(
        "columns-by-view",
        "word_lm.py",
        "return data[: nbatch * bsz].view(bsz, -1).t().contiguous()",
        "return data[: nbatch * bsz].view(nbatch, bsz).contiguous()",
        "data",
        "common (after pytorch/examples word_language_model)",
        "the text is cut in rows instead of columns: the next time step is eight words later",
    ),
]


HEALTHY = [
    ScriptPatch(
        "nadam",
        "mnist.py",
        "optim.Adadelta(model.parameters(), lr=args.lr)",
        "optim.NAdam(model.parameters(), lr=2e-3)",
        "optimiser",
        "common",
        "another optimiser at its usual rate",
    ),
    ScriptPatch(
        "smooth-by-hand",
        "mnist.py",
        "loss = F.nll_loss(output, target)",
        "loss = 0.9 * F.nll_loss(output, target) - 0.1 * output.mean()",
        "loss",
        "common",
        "label smoothing written out: 0.1 of the target is uniform",
    ),
    ScriptPatch(
        "smooth-l1",
        "regression.py",
        "criterion = nn.MSELoss()",
        "criterion = nn.SmoothL1Loss()",
        "loss",
        "common",
        "a robust regression loss in training and validation",
    ),
    ScriptPatch(
        "tied-decoder",
        "word_lm.py",
        "self.decoder = nn.Linear(32, ntokens)",
        (
            "self.decoder = nn.Linear(32, ntokens)\n"
            "        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)\n"
            "        self.decoder.weight = self.encoder.weight"
        ),
        "sharing",
        "pytorch/examples word_language_model --tied",
        "encoder and decoder share their weight",
    ),
    ScriptPatch(
        "soft-target-copies",
        "dqn.py",
        (
            "        optimizer.step()\n"
            "    if step % 500 == 0:\n"
            "        target_network.load_state_dict(q_network.state_dict())"
        ),
        (
            "        optimizer.step()\n"
            "        for old_p, new_p in zip(target_network.parameters(), q_network.parameters()):\n"
            "            old_p.data.lerp_(new_p.data, 0.01)\n"
            "    if step % 500 == 0:"
        ),
        "state",
        "CleanRL's tau",
        "the target network follows by a hundredth at every update",
    ),
    ScriptPatch(
        "two-rates",
        "lora.py",
        "torch.optim.AdamW(trained, lr=1e-2)",
        'torch.optim.AdamW([{"params": trained[:1], "lr": 5e-3}, {"params": trained[1:], "lr": 2e-2}])',
        "optimiser",
        "LoRA+ (Hayou 2024)",
        "the second factor has four times the rate of the first",
    ),
    ScriptPatch(
        "zero-init-residual",
        "resnet.py",
        "        self.bn2 = nn.BatchNorm2d(cout)\n",
        "        self.bn2 = nn.BatchNorm2d(cout)\n        nn.init.zeros_(self.bn2.weight)\n",
        "model",
        "torchvision's zero_init_residual",
        "every residual branch starts at zero",
    ),
]
