"""Bugs in recipes that no gate was designed for, and healthy variants that look like bugs: the open half of the twelfth set.

The half is the first byte of the id's SHA-256, modulo 2. The other half is held out in twelfth_set_heldout.py. The author of the set had read the
recipes, not the gates. Run by `python -m tests.helpers.set_run --set twelfth`.
"""

from tests.helpers.set_cases import Case

BUGS = [
    Case(
        "classify~erased-in-place",
        "vision/classify",
        "augmentation",
        "a square of each training picture is erased (cutout, DeVries 2017)",
        "the square is erased in the stored picture: each epoch erases one more, and the picture goes black",
        "by argument: after ten epochs little is left of a digit; validation pictures are whole",
        edits=(
            (
                "        image = self.images[index].float() / 255\n",
                (
                    "        image = self.images[index]\n"
                    "        if generator is not None and self.augment is not None:\n"
                    "            y, x = torch.randint(image.shape[-1] - 8, (2,), generator=generator).tolist()\n"
                    "            image[:, y : y + 8, x : x + 8] = 0\n"
                    "        image = image.float() / 255\n"
                ),
            ),
        ),
    ),
    Case(
        "classify~easy-ones-first",
        "vision/classify",
        "data pairing",
        "pictures are sorted by their ink, so that a curriculum can begin with the light ones",
        "the pictures are sorted, their labels are not",
        "by argument: labels of other pictures",
        edits=(
            (
                "    train_data = Images(images[learn], labels[learn], classes, augment if cfg.augment else None)\n",
                (
                    "    light_first = learn[images[learn].float().flatten(1).mean(1).argsort()]\n"
                    "    train_data = Images(images[light_first], labels[learn], classes, augment if cfg.augment else None)\n"
                ),
            ),
        ),
    ),
    Case(
        "segment~outline-pixels-alone",
        "vision/segment",
        "loss",
        "pixels at an outline get more weight, as in the U-Net paper",
        "the weight is 1 at an outline and 0 elsewhere; 1 was to be added",
        "by argument: the inside of a nucleus is in no cross-entropy; without Dice nothing else scores it",
        edits=(
            (
                '        terms = {"ce": (ce * (1 - (-ce).exp()) ** cfg.focal if cfg.focal else ce).sum()}\n',
                (
                    "        wide = F.max_pool2d(mask[:, None].float(), 3, 1, 1) + F.max_pool2d(-mask[:, None].float(), 3, 1, 1)\n"
                    "        ce = ce * (wide[:, 0] > 0)  # two classes within one pixel\n"
                    '        terms = {"ce": (ce * (1 - (-ce).exp()) ** cfg.focal if cfg.focal else ce).sum()}\n'
                ),
            ),
        ),
        argv=("--dice", "0"),
    ),
    Case(
        "ppo~coefficients-exchanged",
        "rl/ppo",
        "settings",
        "the two coefficients, copied from another script's positional arguments",
        "0.5 is the entropy's and 0.01 the value's",
        "none measured: return 500, as without it (seed 0)",
        argv=("--ent-coef", "0.5", "--vf-coef", "0.01"),
    ),
    Case(
        "dqn~best-action-of-the-present",
        "rl/dqn",
        "target",
        "double Q-learning: the online network selects the action",
        "it selects for the present observation, and the target network evaluates that action in the following one",
        "by argument: the target is not the value of the best next action",
        edits=(
            (
                '    best = (policy(rows["following"]) if cfg.double else worth).argmax(-1, keepdim=True)\n',
                '    best = (policy(rows["observation"]) if cfg.double else worth).argmax(-1, keepdim=True)\n',
            ),
        ),
    ),
    Case(
        "sac~density-before-tanh",
        "rl/sac",
        "loss",
        "the Gaussian's own log-density",
        "it is that of the number before tanh: the slope is missing",
        "by argument: the entropy of another distribution is rewarded",
        edits=(
            (
                "        return u.tanh(), (log_normal - log_slope).sum(-1)\n",
                "        return u.tanh(), log_normal.sum(-1)\n",
            ),
            ("        log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))\n", ""),
            ("from torch.nn import functional as F\n", ""),
        ),
        source="https://github.com/automl/Mighty/pull/117",
    ),
    Case(
        "sac~gain-of-stored-actions",
        "rl/sac",
        "loss",
        "the critics are asked for what the batch holds",
        "the policy's gain is the value of the stored action: no gradient of it reaches the policy",
        "by argument: the policy maximises its entropy alone",
        edits=(
            (
                '        gain = model.worth(batch["observation"], action, frozen=True).amin(0)\n',
                '        gain = model.worth(batch["observation"], batch["action"], frozen=True).amin(0)\n',
            ),
            (
                '        action, log_prob = model.sample(batch["observation"], batch["noise"])\n',
                '        _, log_prob = model.sample(batch["observation"], batch["noise"])\n',
            ),
        ),
    ),
    Case(
        "pretrain~first-half-of-each-row",
        "llm/pretrain",
        "data",
        "training on half of the context saves memory; the evaluation has all of it",
        "the second half of every row is read by nobody: half of the text is lost, and positions of its documents",
        "by argument: half of the tokens at the same number of steps",
        edits=(
            (
                "        nll, log_z, scored = scores(model, batch)\n        terms",
                (
                    "        half = cfg.data.context // 2\n"
                    '        nll, log_z, scored = scores(model, {k: batch[k][:, :half] for k in ("input_ids", "position_ids", "labels")})\n'
                    "        terms"
                ),
            ),
            (
                '        return {"*": (batch["labels"][:, 1:] != IGNORED).sum()}\n',
                '        return {"*": (batch["labels"][:, 1 : cfg.data.context // 2] != IGNORED).sum()}\n',
            ),
        ),
    ),
    Case(
        "pretrain~queries-and-keys-from-zero",
        "llm/pretrain",
        "initialisation",
        "attention begins uniform: queries and keys start at zero",
        "each is the other's gradient, so both stay zero: attention is a mean for ever",
        "by argument: no token is found by its content",
        edits=(
            (
                "        nn.init.zeros_(block.mlp.down_proj.weight)\n",
                (
                    "        nn.init.zeros_(block.mlp.down_proj.weight)\n"
                    "        nn.init.zeros_(block.self_attn.q_proj.weight)\n"
                    "        nn.init.zeros_(block.self_attn.k_proj.weight)\n"
                ),
            ),
        ),
    ),
    Case(
        "logits~divergence-of-known-alone",
        "distill/logits",
        "masks",
        "one mask for both losses",
        "the teacher is asked for the few labelled pictures alone: 3,800 of 4,000 are used by nothing",
        "by argument: the control's 95.8% instead of 98.3%, whose pictures it has",
        edits=(
            (
                '            kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)\n',
                '            kl = F.kl_div(soft(logits[known]), taught(batch["image"][known]), reduction="sum", log_target=True)\n',
            ),
            (
                '        return {"ce": batch["known"].sum(), "*": len(batch["known"])}\n',
                '        return {"*": batch["known"].sum()}\n',
            ),
        ),
    ),
    Case(
        "flow~one-step",
        "diffusion/flow",
        "settings",
        "one step of the sampler, as published for distilled flows",
        "this one is not distilled: a single step gives the mean of all pictures of a class",
        "by argument: one step leads to the mean of the pictures of a class",
        argv=("--sampling.num-inference-steps", "1"),
    ),
    Case(
        "latent~latents-mirrored",
        "diffusion/latent",
        "augmentation",
        "half of the latents are mirrored, which costs nothing after caching",
        "a mirrored latent is no latent of a mirrored picture, and a mirrored digit is no digit",
        "by argument: half of what is learnt decodes to no digit",
        edits=(
            (
                "        latent, label = self.latents[index], self.labels[index]\n",
                (
                    "        latent, label = self.latents[index], self.labels[index]\n"
                    "        if training and torch.rand((), generator=generator) < 0.5:\n"
                    "            latent = latent.flip(-1)\n"
                ),
            ),
        ),
    ),
    Case(
        "text~noise-for-a-velocity",
        "diffusion/text",
        "target",
        "the loss of most example scripts: the net predicts the noise",
        "the samplers read its prediction as a velocity",
        "by argument: another prediction than the sampler's",
        edits=(
            (
                '        target = process.target(batch["latent"], batch["noise"], t)\n        error',
                '        target = batch["noise"]\n        error',
            ),
        ),
    ),
    Case(
        "rlhf~whitened-within-each-completion",
        "rl/rlhf",
        "target",
        "advantages are normalised row by row, as rows have different lengths",
        "a completion's own mean is subtracted: no completion is better than another",
        "by argument: the reward of a whole completion is in its mean",
        edits=(
            (
                ("    some = x[valid]\n    return (x - some.mean()) / (some.std() + 1e-8) * valid\n"),
                (
                    "    n = valid.sum(1, keepdim=True)\n"
                    "    mean = (x * valid).sum(1, keepdim=True) / n\n"
                    "    std = (((x - mean) * valid).square().sum(1, keepdim=True) / n).sqrt()\n"
                    "    return (x - mean) / (std + 1e-8) * valid\n"
                ),
            ),
        ),
    ),
    Case(
        "grpo~two-token-answers",
        "rl/grpo",
        "settings",
        "an answer has two digits, so two tokens",
        "sums reach 198 and an answer ends with a token of its own: long sums can never be right",
        "by argument: an answer of three tokens is cut",
        argv=("--max-new-tokens", "2"),
    ),
    Case(
        "sft~served-without-its-system",
        "llm/sft",
        "generation",
        "the export is asked as any chat model",
        "it was trained behind a system message, which `chat` and `predict` now leave out",
        "by argument: prompts in use are not those of training",
        edits=(
            (
                "    return speaking.chatting(cfg, export, formats.system(cfg.data.system, cfg.data.path, pairs.SYSTEM))\n",
                '    return speaking.chatting(cfg, export, "")\n',
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "classify~padded-crop",
        "vision/classify",
        "augmentation",
        "the crop of CIFAR scripts: two pixels of padding",
        "right: a shift by at most two pixels",
        "trains: weaker than the default",
        edits=(
            (
                (
                    "        return None, v2.RandomAffine(12, translate=(0.1, 0.1), scale=(0.85, 1.15), shear=10,\n"
                    "                                     interpolation=v2.InterpolationMode.BILINEAR)  # fmt: skip\n"
                ),
                "        return None, v2.RandomCrop(28, padding=2)\n",
            ),
        ),
    ),
    Case(
        "segment~bilinear-and-outlines",
        "vision/segment",
        "loss",
        "pixels at an outline count four times, and features are enlarged bilinearly",
        "right: every pixel has a weight, and the weights' sum is what the loss is divided by",
        "trains: the U-Net paper's own idea",
        edits=(
            (
                '        terms = {"ce": (ce * (1 - (-ce).exp()) ** cfg.focal if cfg.focal else ce).sum()}\n',
                (
                    "        ce = ce * weights(mask)\n"
                    '        terms = {"ce": (ce * (1 - (-ce).exp()) ** cfg.focal if cfg.focal else ce).sum()}\n'
                ),
            ),
            (
                '        return {"ce": pixels.sum(), "dice": (pixels > 0).sum()}\n',
                (
                    '        scored = batch["mask"] != IGNORE\n'
                    '        return {"ce": (weights(batch["mask"]) * scored).sum(), "dice": (pixels > 0).sum()}\n'
                    "\n"
                    "    def weights(mask: Tensor) -> Tensor:\n"
                    '        """4 where two classes meet within a pixel, else 1."""\n'
                    "        seen = mask[:, None].float()\n"
                    "        return 1 + 3 * (F.max_pool2d(seen, 3, 1, 1) + F.max_pool2d(-seen, 3, 1, 1) > 0)[:, 0].float()\n"
                ),
            ),
            (
                "F.interpolate(x, scale_factor=2.0), fine]",
                'F.interpolate(x, scale_factor=2.0, mode="bilinear"), fine]',
            ),
        ),
    ),
    Case(
        "dqn~three-steps-without-double",
        "rl/dqn",
        "settings",
        "n-step returns, one network head, no double estimate",
        "right: settings of the recipe",
        "trains: as in Rainbow's ablations",
        argv=("--n-step", "3", "--no-double", "--no-dueling"),
    ),
]
