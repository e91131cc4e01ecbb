"""Silent bugs of one or two lines in the recipes, and healthy forks: the held-out half of the tenth set (see tenth_set.py)."""

from pathlib import Path

from tests.helpers.set_cases import Case


def bonus_reward(root: Path) -> tuple[str, ...]:
    """The built-in reward, and 0.2 for as many digits as the answer has."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "rewards.py").write_text(
        "def long_enough(prompts, completions, answer, **_):\n"
        "    return [float(text.strip().isdigit() and len(text.strip()) == len(due)) for text, due in zip(completions, answer)]\n"
    )
    return ("--reward", f"exact=1,{root / 'rewards.py'}:long_enough=0.2")


BUGS = [
    Case(
        "classify~cosine-head-without-a-scale",
        "vision/classify",
        "model",
        "a cosine classifier, which is common for unbalanced classes",
        "without a temperature: logits are in [-1, 1], so no class ever gets a probability above 0.45",
        "not measured; by argument: cosines in [-1, 1] give no class more than 0.45, so the loss stays above 0.8",
        edits=(
            (
                "        self.head = nn.Linear(widths[-1], n_classes)\n"
                "        nn.init.zeros_(self.head.weight)  # every class equally likely: the first loss is ln N, no first steps lost\n"
                "        nn.init.zeros_(self.head.bias)\n",
                "        self.head = nn.Linear(widths[-1], n_classes, bias=False)\n",
            ),
            (
                "        return self.head(x.mean((2, 3)))  # (B, n_classes)\n",
                "        return F.linear(F.normalize(x.mean((2, 3))), F.normalize(self.head.weight))  # (B, n_classes)\n",
            ),
        ),
    ),
    Case(
        "classify~average-updated-at-evaluations",
        "vision/classify",
        "ema",
        "the average is needed where it is evaluated",
        "it is updated once per evaluation instead of once per step: with a decay of 0.999 it stays at the initial weights",
        "not measured; by argument: 30 updates with a decay of 0.999 leave 97% of the initial weights in what is exported",
        edits=(
            (
                '        if cfg.ema:\n            stage.state["ema"].update(stage.model)\n        if step.due(cfg.train.eval_every):\n',
                '        if step.due(cfg.train.eval_every):\n            if cfg.ema:\n                stage.state["ema"].update(stage.model)\n',
            ),
        ),
        argv=("--ema", "0.999"),
    ),
    Case(
        "classify~rate-halved-every-ten-steps",
        "vision/classify",
        "schedule",
        "the rate of the old script: halved every ten epochs",
        "`step.index` counts steps: after 200 of 1,900 steps the rate is a millionth of its peak",
        "by argument: the sum of all rates is that of 20 steps; 480 steps on 256 samples ended at an accuracy of 0.20 in the gate tiny-data",
        edits=(
            (
                "    for step in run.steps(stage):\n        run.update(stage, step.batches)\n",
                "    for step in run.steps(stage):\n"
                '        for group in stage.optimizers["main"].param_groups:\n'
                '            group["lr"] = cfg.optim.lr * 0.5 ** (step.index // 10)\n'
                "        run.update(stage, step.batches)\n",
            ),
        ),
    ),
    Case(
        "detect~pictures-mirrored-on-the-device",
        "vision/detect",
        "augmentation",
        "mirroring moved from the loader to the device, where it is free",
        "pictures are mirrored, boxes are not",
        "by argument: half of all steps train on boxes where no object is, and on mirrored digits",
        edits=(
            (
                "    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:\n"
                '        return model(batch["image"], boxes.targets(batch))\n',
                "    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:\n"
                '        images = batch["image"].flip(-1) if model.training and torch.rand(()) < 0.5 else batch["image"]\n'
                "        return model(images, boxes.targets(batch))\n",
            ),
        ),
    ),
    Case(
        "detect~map-of-sure-boxes-only",
        "vision/detect",
        "evaluation",
        "unsure boxes only cost time: score those that would be drawn",
        "average precision needs all boxes: what is found with a score below 0.5 counts as missed",
        "by argument: recall beyond the threshold is cut off, so mAP is lower than the model's and the best checkpoint another one",
        edits=(
            (
                '                own = boxes.to_own(predicted["boxes"], batch["scale"][j], batch["size"][j])\n',
                '                predicted = {k: v[predicted["scores"] >= 0.5] for k, v in predicted.items()}\n'
                '                own = boxes.to_own(predicted["boxes"], batch["scale"][j], batch["size"][j])\n',
            ),
        ),
    ),
    Case(
        "latent~kl-summed-over-the-latent",
        "diffusion/latent",
        "loss",
        "the KL divergence of the original paper is a sum",
        "its coefficient was tuned for a mean: it counts as many times as much as a latent has values",
        "not measured; by argument: the divergence counts as many times as much as a latent has values, which collapses the posterior",
        edits=(
            (
                '            "kl": cfg.vae.kl * posterior.kl().sum() / math.prod(shape),\n',
                '            "kl": cfg.vae.kl * posterior.kl().sum(),\n',
            ),
        ),
    ),
    Case(
        "text~unconditional-is-the-first-caption",
        "diffusion/text",
        "guidance",
        "index 0 is the empty caption in the other code base",
        "guidance moves away from the first caption instead of the empty one",
        "by argument: samples of that caption's class are guided by nothing, all others away from one digit; the export uses the empty one",
        edits=(
            (
                '        how = {"null": val_data.null, "guidance_scale": scale,',
                '        how = {"null": 0, "guidance_scale": scale,',
            ),
        ),
    ),
    Case(
        "pretrain~last-chunk-dropped",
        "llm/pretrain",
        "loss",
        "the loss in chunks of 48 places, so that the whole vocabulary is never in memory at once",
        "whole chunks only: the last 31 of a row's 127 targets have no loss, and are counted",
        "not measured; by argument: a quarter of all targets teach nothing, and the mean is divided by all",
        edits=(
            (
                "        nll, log_z, scored = scores(model, batch)\n        terms = {",
                "        nll, log_z, scored = scores(model, batch)\n"
                "        whole = nll.shape[1] // 48 * 48\n"
                "        nll, log_z, scored = nll[:, :whole], log_z[:, :whole], scored[:, :whole]\n"
                "        terms = {",
            ),
        ),
    ),
    Case(
        "sft~own-loss-without-the-shift",
        "llm/sft",
        "loss",
        "an own loss for the trainer, to add terms later",
        "logits are compared with the token that they have read, not with the next one",
        "by argument: the model learns to repeat its input token, and generates nothing else",
        edits=(
            (
                "    return SFTTrainer(model=model, args=args, train_dataset=shape, processing_class=tokenizer)\n",
                "    def token_loss(outputs, labels, num_items_in_batch=None):\n"
                '        summed = F.cross_entropy(outputs.logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")\n'
                "        return summed / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)\n\n"
                "    return SFTTrainer(model=model, args=args, train_dataset=shape, processing_class=tokenizer, compute_loss_func=token_loss)\n",
            ),
        ),
    ),
    Case(
        "dpo~answers-cut-to-save-memory",
        "llm/dpo",
        "truncation",
        "memory: the trainer's own `max_length`",
        "a pair that is longer loses the end of its answers, and with it the end token",
        "not measured; by argument: pairs of 65 to 96 tokens lose their last words, and the two answers may be equal then",
        edits=(
            (
                "        max_length=None,  # what is too long is left out, never cut\n",
                "        max_length=64,\n",
            ),
        ),
    ),
    Case(
        "sac~target-at-the-mean-action",
        "rl/sac",
        "target",
        "the critics' target without its sampling noise, which lowers the variance",
        "the density of a Gaussian is highest at its mean: the bonus is no estimate of the entropy but too low by half a nat",
        "no clear harm in 80 iterations (10,240 steps) at one seed: return -802 and -1,069 at iterations 40 and 80, without the bug -869 and -946",
        edits=(
            (
                '    action, log_prob = policy.sample(steps["next_observation"], noise)\n',
                '    action, log_prob = policy.sample(steps["next_observation"], torch.zeros_like(noise))\n',
            ),
        ),
    ),
    Case(
        "rlhf~rewards-whitened-with-their-mean",
        "rl/rlhf",
        "reward",
        "rewards are whitened before the advantages, as in TRL's option",
        "with the mean taken away: each token costs what it earned on average, so short completions earn more",
        "by argument: a completion's return falls with its length, whatever the reward says",
        edits=(
            (
                '    earned = earnings(reward, kl, valid, stage.state["controller"].value)\n',
                '    earned = whitened(earnings(reward, kl, valid, stage.state["controller"].value), valid)\n',
            ),
        ),
    ),
    Case(
        "whisper~features-matched-after-a-norm",
        "distill/whisper",
        "loss",
        "features are compared after a layer norm, as in data2vec",
        "of the teacher's alone: the student learns normalised features, which the teacher's decoder has never seen",
        "by argument: magnitude and mean of each frame are lost, and the decoder reads them raw",
        edits=(
            (
                '    ours, theirs, mask = ours.float(), batch["features"], speech(batch)\n',
                '    ours, theirs, mask = ours.float(), F.layer_norm(batch["features"], batch["features"].shape[-1:]), speech(batch)\n',
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "classify~random-erasing",
        "vision/classify",
        "augmentation",
        "random erasing (Zhong 2017) behind the usual augmentation",
        "the erased part of a digit is small, and only the training path erases",
        "not trained to the end; a usual augmentation, quiet in the whole check",
        edits=(
            (
                "            image = self.augment(image)  # torchvision draws from torch's global generator, which is seeded per sample\n",
                "            image = v2.RandomErasing(0.3, scale=(0.02, 0.15))(self.augment(image))\n",
            ),
        ),
    ),
    Case(
        "classify~sigmoid-for-each-class",
        "vision/classify",
        "loss",
        "one sigmoid per class (Wightman 2021, ResNet strikes back), with smoothed targets",
        "a standard loss; the fork declares its first loss, N ln 2, and its floor",
        "not trained to the end; published, and eight samples are memorised",
        edits=(
            (
                '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}\n',
                '        target = F.one_hot(batch["label"], n) * (1 - cfg.label_smoothing) + cfg.label_smoothing / n\n'
                '        return {"bce": F.binary_cross_entropy_with_logits(logits, target, reduction="sum")}\n',
            ),
            (
                "    expect = core.Expect(initial_loss=balanced.first_loss, loss_floor=balanced.floor, new_parameters=fresh)\n",
                "    p = torch.tensor([1 - eps + eps / n, *[eps / n] * (n - 1)])\n"
                '    floor = F.binary_cross_entropy(p, p, reduction="sum").item()\n'
                "    expect = core.Expect(initial_loss=n * torch.tensor(2.0).log().item(), loss_floor=floor, new_parameters=fresh)\n",
            ),
        ),
    ),
    Case(
        "detect~shift-and-scale",
        "vision/detect",
        "augmentation",
        "random shift and scale of picture and boxes, a usual multi-scale augmentation",
        "boxes move with the picture, are clamped to it, and vanish with it",
        "by argument: torchvision's own transform, which SSD and YOLO train with",
        edits=(
            (
                "    steps: list[nn.Module] = [v2.RandomPhotometricDistort()]\n",
                "    moved = v2.RandomAffine(0, translate=(0.1, 0.1), scale=(0.8, 1.2), fill=0.45)\n"
                "    steps: list[nn.Module] = [v2.RandomPhotometricDistort(), moved, v2.ClampBoundingBoxes()]\n",
            ),
        ),
    ),
    Case(
        "detect~silu-and-a-deeper-backbone",
        "vision/detect",
        "model",
        "SiLU in the stem, one more block, another optimiser's momentum",
        "usual choices of YOLO's backbones",
        "by argument: the net has the same strides and one more residual block",
        edits=(
            (
                "nn.GroupNorm(8, widths[0]), nn.ReLU()]\n",
                "nn.GroupNorm(8, widths[0]), nn.SiLU()]\n",
            ),
            (
                "Block(widths[-1], widths[-1], stride=1))\n",
                "Block(widths[-1], widths[-1], stride=1), Block(widths[-1], widths[-1], stride=1))\n",
            ),
        ),
        argv=("--optim.betas", "0.9", "0.99", "--optim.clip", "10"),
    ),
    Case(
        "pixel~pseudo-huber",
        "diffusion/pixel",
        "loss",
        "the pseudo-Huber loss of consistency models (Song 2023) instead of squares",
        "near zero it is a square; the fork leaves the first loss open",
        "by argument: diffusers' training scripts offer it",
        edits=(
            (
                '        error = (prediction - target).square().mean((1, 2, 3))  # (B,)\n        return {"mse"',
                '        error = (((prediction - target).square() + 0.1**2).sqrt() - 0.1).mean((1, 2, 3))  # (B,)\n        return {"huber"',
            ),
            ("initial_loss=process.initial_loss, ", ""),
        ),
    ),
    Case(
        "instruct~noise-on-embeddings",
        "vlm/instruct",
        "regularisation",
        "NEFTune (Jain 2023) on the words in training",
        "uniform noise of alpha / sqrt(T d), in training only",
        "by argument: LLaVA-like models are tuned with it at alpha 5",
        edits=(
            (
                '        words = self.language.get_input_embeddings()(batch["ids"].clamp_min(0))\n',
                '        words = self.language.get_input_embeddings()(batch["ids"].clamp_min(0))\n'
                "        if self.training:\n"
                "            words = words + (2 * torch.rand_like(words) - 1) * 5 / (words.shape[1] * words.shape[2]) ** 0.5\n",
            ),
        ),
    ),
    Case(
        "logits~temperature-falls",
        "distill/logits",
        "schedule",
        "the temperature falls from 4 to 2 during the run (annealed distillation, Jafari 2021)",
        "student and teacher share it, and the factor T squared moves with it",
        "by argument: every temperature from 1 to 8 works here, and the gradient's size stays",
        edits=(
            (
                "        return (logits.float() / temperature).log_softmax(1)\n",
                "        return (logits.float() / now()).log_softmax(1)\n",
            ),
            (
                "    def soft(logits: Tensor) -> Tensor:\n",
                "    def now() -> float:\n"
                "        return temperature * (2 - run.progress(1.0))\n\n"
                "    def soft(logits: Tensor) -> Tensor:\n",
            ),
            (
                '            terms["kl"] = weight * temperature**2 * kl\n',
                '            terms["kl"] = weight * now() ** 2 * kl\n',
            ),
        ),
    ),
    Case(
        "compress~hidden-states-too",
        "distill/compress",
        "loss",
        "the student's encoder also matches the teacher's output (TinyBERT, Jiao 2020; an option of Distil-Whisper)",
        "a mean square per recording, with a count of its own",
        "by argument: the decoder reads the teacher's features, and the student's come nearer to them",
        edits=(
            (
                '        ours = own.logits(own.encode(batch["mel"]) if cfg.encoder else heard, ids[:, :-1])[scored].float()\n',
                '        encoded = own.encode(batch["mel"]) if cfg.encoder else heard\n'
                "        ours = own.logits(encoded, ids[:, :-1])[scored].float()\n"
                "        apart = (encoded.float() - heard.float()).square().mean((1, 2))\n",
            ),
            (
                '            "ce": cfg.ce * F.cross_entropy(',
                '            "hidden": 0.1 * apart.sum(),\n            "ce": cfg.ce * F.cross_entropy(',
            ),
            (
                '        counts=lambda batch: {"*": (batch["words"] - len(teacher.prompt)).sum()},\n',
                '        counts=lambda batch: {"hidden": len(batch["words"]), "*": (batch["words"] - len(teacher.prompt)).sum()},\n',
            ),
        ),
    ),
    Case(
        "grpo~partial-credit",
        "rl/grpo",
        "reward",
        "a second reward of 0.2 for an answer that is a number of the right length",
        "the right answer earns most, and groups differ sooner",
        "by argument: format rewards are usual (DeepSeek-R1)",
        data=bonus_reward,
    ),
]
