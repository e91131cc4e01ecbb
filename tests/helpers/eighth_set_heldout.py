"""The half of the eighth set that is held out: its misses are counted, never mended. See eighth_set.py."""

from tests.helpers.set_cases import Case

BUGS = [
    Case(
        "classify~smoothing-decays-by-calls",
        "vision/classify",
        "state",
        "label smoothing decays while training goes on",
        "it counts calls of the loss: the count is in no checkpoint, and a resumed run starts it again",
        "by argument: after a resume the loss is that of the first step",
        edits=(
            (
                (
                    "    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:\n"
                    '        logits = model(batch["image"])\n'
                    '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}\n'
                ),
                (
                    "    calls = []\n"
                    "\n"
                    "    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:\n"
                    '        logits = model(batch["image"])\n'
                    "        calls.append(1)\n"
                    "        eps = cfg.label_smoothing * 0.999 ** len(calls)\n"
                    '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=eps, reduction="sum")}\n'
                ),
            ),
        ),
    ),
    Case(
        "classify~nll-of-probabilities",
        "vision/classify",
        "evaluation",
        "probabilities are collected, for a plot of confidence",
        "cross_entropy takes logits: the reported nll is that of a second softmax, at least 1.46 for ten classes",
        "by argument: a perfect answer has an nll of 1.46",
        edits=(
            (
                '            logits.append(model(batch["image"]).float())\n',
                '            logits.append(model(batch["image"]).float().softmax(1))\n',
            ),
        ),
    ),
    Case(
        "segment~dice-of-the-argmax",
        "vision/segment",
        "loss",
        "Dice of the mask that is predicted, as it is measured",
        "argmax has no gradient: the term is reported and trains nothing",
        "by argument: the gradient of the term is zero",
        edits=(
            (
                '            terms["dice"] = cfg.dice * dice(logits.softmax(1), mask)\n',
                (
                    "            hard = F.one_hot(logits.argmax(1), n).movedim(-1, 1).float()\n"
                    '            terms["dice"] = cfg.dice * dice(hard, mask)\n'
                ),
            ),
        ),
    ),
    Case(
        "detect~first-class-is-padding",
        "vision/detect",
        "evaluation",
        "class 0 is the background, as in torchvision's targets",
        "labels are padded with -1 and class 0 is the first digit: its objects are left out of the truth",
        "by argument: every zero that is found counts as false, and its recall has no objects",
        edits=(
            ('                real = batch["labels"][j] >= 0\n', '                real = batch["labels"][j] > 0\n'),
        ),
    ),
    Case(
        "pixel~samples-clamped-to-zero-one",
        "diffusion/pixel",
        "sampling",
        "samples are pictures, and pictures are clamped to 0 to 1",
        "pictures are -1 to 1 here: the black background becomes grey",
        "by argument: half of the range is lost",
        edits=(
            (
                "        return pipeline.sample(model, process.sampler(sampler), classes, noise, **how).clamp(-1, 1)\n",
                "        return pipeline.sample(model, process.sampler(sampler), classes, noise, **how).clamp(0, 1)\n",
            ),
        ),
    ),
    Case(
        "flow~labels-unsplit",
        "diffusion/flow",
        "pairing",
        "labels of the training pictures, cut to their number",
        "pictures are chosen by the split's indices, labels are the first ones: most pictures have another's label",
        "by argument: the condition carries no information",
        edits=(
            (
                (
                    "    train_data = Noised(pictures.Rows(images, learn), labels[learn], classes, process, cfg"
                    ".conditioning_dropout_prob)\n"
                ),
                (
                    "    train_data = Noised(\n"
                    "        pictures.Rows(images, learn), labels[: len(learn)], classes, process, cfg.conditioning_dropout_prob\n"
                    "    )\n"
                ),
            ),
        ),
    ),
    Case(
        "ppo~ratio-to-itself",
        "rl/ppo",
        "detach",
        "the old log-probability is computed where it is needed, without a gradient",
        "it is that of the current policy: the ratio is always 1 and clipping never acts",
        "by argument: later passes over a rollout are not limited",
        edits=(
            (
                '        ratio = (policy.head.log_prob(outputs, batch["action"]) - batch["log_prob"]).exp()\n',
                (
                    '        log_prob = policy.head.log_prob(outputs, batch["action"])\n'
                    "        ratio = (log_prob - log_prob.detach()).exp()\n"
                ),
            ),
        ),
    ),
    Case(
        "dqn~exploration-over-in-one-iteration",
        "rl/dqn",
        "schedule",
        "epsilon by the step's index",
        "it expects the share of the run: after one iteration exploration is at its end",
        "by argument: 0.04 from the second iteration on",
        edits=(
            (
                "collect(cfg, run, policy, envs, step.index, epsilon(cfg, progress))",
                "collect(cfg, run, policy, envs, step.index, epsilon(cfg, step.index))",
            ),
        ),
    ),
    Case(
        "dqn~advantage-mean-of-the-batch",
        "rl/dqn",
        "axis",
        "the advantage's mean is subtracted",
        "over the batch instead of the actions: an action's value depends on the other observations",
        "by argument: a single observation has no advantage at all",
        edits=(
            (
                "advantage - advantage.mean(-1, keepdim=True) if self.dueling",
                "advantage - advantage.mean(0, keepdim=True) if self.dueling",
            ),
        ),
    ),
    Case(
        "dqn~bootstrap-undiscounted",
        "rl/dqn",
        "indices",
        "gamma to the number of the last step",
        "steps are counted from 0: the value after one step is not discounted",
        "by argument: values of states that do not end grow without limit",
        edits=(
            (
                '    counts = cfg.gamma ** (last + 1) * ~steps["terminated"][last, n]\n',
                '    counts = cfg.gamma**last * ~steps["terminated"][last, n]\n',
            ),
        ),
    ),
    Case(
        "sac~entropy-without-gradient",
        "rl/sac",
        "detach",
        "the entropy bonus is a reward: its log-probability is detached, like the temperature",
        "the policy's loss has no gradient of the entropy: the policy becomes deterministic whatever the temperature",
        "by argument: the temperature grows, and nothing follows it",
        edits=(
            (
                "(model.log_temperature.detach().exp() * log_prob - gain).sum()",
                "(model.log_temperature.detach().exp() * log_prob.detach() - gain).sum()",
            ),
        ),
    ),
    Case(
        "sft~perplexity-unshifted",
        "llm/sft",
        "evaluation",
        "logits and labels of the same places, as the loss of transformers takes them",
        "it shifts them itself, this line does not: each token is scored by the logits that already saw it",
        "by argument: the reported perplexity is that of repeating the token",
        edits=(
            (
                "logits_to_keep=labels.shape[1] - first + 1).logits[:, :-1]",
                "logits_to_keep=labels.shape[1] - first).logits",
            ),
        ),
    ),
    Case(
        "dpo~pairs-interleaved",
        "llm/dpo",
        "pairing",
        "chosen and rejected answers alternate",
        "the collator puts all chosen before all rejected: margins are between two chosen, or two rejected, answers",
        "by argument: accuracy is about a half, whatever was learnt",
        edits=(
            (
                "(each * (labels != pairs.IGNORED)).sum(1).chunk(2))",
                "(each * (labels != pairs.IGNORED)).sum(1).unflatten(0, (-1, 2)).unbind(1))",
            ),
        ),
    ),
    Case(
        "reward~ties-are-right",
        "llm/reward",
        "evaluation",
        "right where the chosen answer is not worth less",
        "equal rewards count as right: a model that gives 0 to everything has an accuracy of 1",
        "by argument: the untrained model is perfect",
        edits=(('"accuracy": calibration.hits(margin), "nll"', '"accuracy": (margin >= 0).double(), "nll"'),),
    ),
    Case(
        "pretrain~bits-per-token",
        "llm/pretrain",
        "scale",
        "the loss in bits",
        "divided by tokens instead of bytes: about three times the bits per byte that baselines are given in",
        "by argument: another number is reported as bits per byte",
        edits=(
            (
                '            "bits_per_byte": nll / math.log(2) / size,\n',
                '            "bits_per_byte": nll / math.log(2) / tokens,\n',
            ),
        ),
    ),
    Case(
        "logits~ce-over-all-pictures",
        "distill/logits",
        "reduction",
        "both terms are divided by the batch",
        "only a twentieth of the pictures have labels: the cross-entropy counts a twentieth",
        "by argument: labels hardly train the student",
        edits=(
            (
                '        return {"ce": batch["known"].sum(), "*": len(batch["known"])}\n',
                '        return {"*": len(batch["known"])}\n',
            ),
        ),
    ),
    Case(
        "compress~scored-one-late",
        "distill/compress",
        "mask",
        "places of the logits are counted from 0",
        "logits of place 0 answer token 1: the first word is never scored, and a place of padding is",
        "by argument: the first word has no gradient",
        edits=(
            (
                'torch.arange(1, batch["ids"].shape[1], device=batch["ids"].device)',
                'torch.arange(batch["ids"].shape[1] - 1, device=batch["ids"].device)',
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "classify~macro-recall",
        "vision/classify",
        "evaluation",
        "checkpoints are chosen by the mean recall of the classes",
        "right: it is reported already",
        "trains: nothing else changes",
        edits=(('metric=core.Metric("accuracy", question,', 'metric=core.Metric("macro_recall", question,'),),
    ),
    Case(
        "classify~poly-loss",
        "vision/classify",
        "loss",
        "PolyLoss (Leng 2022): cross-entropy plus 1 - p",
        "right: the first loss is declared anew, without smoothing",
        "trains: the paper's epsilon of 1",
        edits=(
            (
                (
                    '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}\n'
                    "\n"
                    "    def mixed_loss"
                ),
                (
                    '        ce = F.cross_entropy(logits, batch["label"], reduction="none")  # (B,)\n'
                    '        return {"ce": (ce + 1 - (-ce).exp()).sum()}\n'
                    "\n"
                    "    def mixed_loss"
                ),
            ),
            (
                "core.Expect(initial_loss=balanced.first_loss,",
                "core.Expect(initial_loss=balanced.first_loss + 1 - 1 / n,",
            ),
        ),
        argv=("--label-smoothing", "0"),
        source="https://arxiv.org/abs/2204.12511",
    ),
    Case(
        "classify~head-at-its-own-rate",
        "vision/classify",
        "optimiser",
        "the head learns at twice the rate",
        "right: every part has a rate",
        "trains: a usual group",
        edits=(
            (
                (
                    "core.make_optimizer(model, cfg.optim)},\n"
                    '        data={"train": train_data, "val": val_data, **test_data},\n'
                ),
                (
                    'core.make_optimizer(model, cfg.optim, {k: cfg.optim.lr * (1 + (k == "head")) for k in ("st'
                    'em", "norm", "blocks", "head")})},\n'
                    '        data={"train": train_data, "val": val_data, **test_data},\n'
                ),
            ),
        ),
    ),
    Case(
        "dqn~half-the-square",
        "rl/dqn",
        "loss",
        "squared error instead of Huber's",
        "right: errors are relative to the return scale, gradients are clipped",
        "trains: half the square, as Huber's near 0",
        edits=(
            (
                '        error = F.smooth_l1_loss(model.of(batch["observation"], batch["action"]), batch["return"], reduction="none")\n',
                '        error = 0.5 * (model.of(batch["observation"], batch["action"]) - batch["return"]).square()\n',
            ),
        ),
    ),
    Case(
        "sac~wide-deviations",
        "rl/sac",
        "model",
        "log deviations of -20 to 2, as in Haarnoja's code",
        "right: the log-density stays finite",
        "trains: Stable-Baselines3's limits",
        edits=(("        log_std = log_std.clamp(-5, 2)\n", "        log_std = log_std.clamp(-20, 2)\n"),),
        source="https://stable-baselines3.readthedocs.io/en/master/modules/sac.html",
    ),
    Case(
        "flow~pseudo-huber",
        "diffusion/flow",
        "loss",
        "pseudo-Huber loss of the direction (Lee 2024) instead of the square",
        "right: the first loss is declared anew",
        "trains: the paper's constant",
        edits=(
            (
                (
                    "        error = (prediction - target).square().mean((1, 2, 3))  # (B,)\n"
                    '        return {"mse": error.sum()}\n'
                ),
                (
                    '        return {"mse": huber(prediction - target).sum()}\n'
                    "\n"
                    "    def huber(d: Tensor) -> Tensor:\n"
                    '        """(B,) of (B, C, H, W)."""\n'
                    "        c = 0.00054 * d[0].numel() ** 0.5\n"
                    "        return (d.square().sum((1, 2, 3)) + c**2).sqrt() - c\n"
                    "\n"
                    "    def first(batch: dict) -> float:\n"
                    '        return huber(process.target(batch["image"], batch["noise"], batch["timestep"])).mean().item()\n'
                ),
            ),
            ("expect=core.Expect(initial_loss=process.initial_loss,", "expect=core.Expect(initial_loss=first,"),
        ),
        source="https://arxiv.org/abs/2405.20320",
    ),
    Case(
        "logits~targets-as-probabilities",
        "distill/logits",
        "loss",
        "the teacher's probabilities instead of their logarithms",
        "right: kl_div without log_target",
        "trains: the same number",
        edits=(
            (
                '            kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)\n',
                '            kl = F.kl_div(soft(logits), taught(batch["image"]).exp(), reduction="sum")\n',
            ),
        ),
    ),
    Case(
        "grpo~unscaled-rewards",
        "rl/grpo",
        "loss",
        "advantages are not divided by the group's deviation (Dr. GRPO, Liu 2025)",
        "right: TRL's own setting",
        "trains: the paper's advantage",
        edits=(('        scale_rewards="group",\n', "        scale_rewards=False,\n"),),
        source="https://arxiv.org/abs/2503.20783",
    ),
]
