"""Forks and settings that are wrong, and healthy variants, from outside: the open half of the sixteenth set.

The half is the last hex digit of the id's SHA-256, modulo 2: even here. The other half is held out in sixteenth_set_heldout.py. The author
of the set had read the recipes, not the gates. Run by `python -m tests.helpers.set_run --set sixteenth`.
"""

from tests.helpers.set_cases import Case

BUGS = [
    Case(
        "classify~gradients-kept",
        "vision/classify",
        "loop",
        "the loop in plain torch, to add own logging",
        "zero_grad() stands before the loop instead of in it: every step goes along the sum of all gradients so far",
        "by argument: after a hundred steps one batch is a hundredth of the gradient; the direction hardly changes any more",
        edits=(
            (
                "    for step in run.steps(stage):\n        run.update(stage, step.batches)\n",
                '    optimizer = stage.optimizers["main"]\n'
                "    optimizer.zero_grad()\n"
                "    for step in run.steps(stage):\n"
                "        for batch in step.batches:\n"
                '            (stage.loss(stage.model, batch)["ce"] / len(batch["label"])).backward()\n'
                "        nn.utils.clip_grad_norm_(stage.model.parameters(), cfg.optim.clip)\n"
                "        optimizer.step()\n",
            ),
        ),
    ),
    Case(
        "segment~softmax-over-rows",
        "vision/segment",
        "loss",
        "the Dice loss was moved over from code whose logits have the classes last but one",
        "the softmax is over the rows of the picture, not over the classes: Dice compares other numbers than probabilities",
        "by argument: the Dice term pulls the logits of each column apart and knows nothing of the classes",
        edits=(("dice(logits.softmax(1), mask)", "dice(logits.softmax(2), mask)"),),
    ),
    Case(
        "detect~labels-of-dropped-boxes",
        "vision/detect",
        "boxes",
        "behind the crops, boxes of which too little is left are dropped",
        "the boxes are chosen by a mask, the labels by its sum: behind a dropped box every label belongs to the box before",
        "by argument: in a picture with a dropped box the labels of the boxes behind it are wrong",
        edits=(
            (
                "def augmentation(cfg: Config) -> nn.Module:\n",
                "class Visible(nn.Module):\n"
                '    """Drop boxes that are thinner than 14 pixels."""\n\n'
                "    def forward(self, image, found, labels):\n"
                "        plain = found.as_subclass(Tensor)\n"
                "        keep = (plain[:, 2:] - plain[:, :2]).amin(1) >= 14\n"
                "        return image, boxes.canonical(plain[keep], tuple(image.shape[-2:])), labels[: int(keep.sum())]\n\n\n"
                "def augmentation(cfg: Config) -> nn.Module:\n",
            ),
            (
                "v2.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[2])])",
                "v2.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[2]), Visible()])",
            ),
        ),
        argv=("--crop",),
    ),
    Case(
        "pretrain~one-epoch-of-warmup",
        "llm/pretrain",
        "setting",
        "a warm-up of one epoch was wanted",
        "--optim.warmup is a fraction of all steps: with 1 the rate rises until the last step and never falls",
        "by argument: half of the mean rate, and the last steps are made at the peak, without the decay that brings the gain",
        argv=("--optim.warmup", "1.0"),
    ),
    Case(
        "sft~noise-in-answers-too",
        "llm/sft",
        "regularisation",
        "NEFTune by an own forward hook on the embedding",
        "the hook does not look at module.training: noise is added when answers are generated and evaluated, too",
        "by argument: one token at a time the noise is five over the root of the width, and answers change with every draw",
        edits=(
            (
                "def make_trainer(cfg: Config, run: core.Run, path: str):\n",
                "def noised(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:\n"
                '    """Noise on embeddings (Jain 2023), alpha 5."""\n'
                "    size = 5 / (output.shape[1] * output.shape[2]) ** 0.5\n"
                "    return output + torch.empty_like(output).uniform_(-size, size)\n\n\n"
                "def make_trainer(cfg: Config, run: core.Run, path: str):\n",
            ),
            (
                "    model = loading.adapted(loading.attend(model, cfg.attention, run.device), cfg)\n",
                "    model = loading.adapted(loading.attend(model, cfg.attention, run.device), cfg)\n"
                "    model.get_input_embeddings().register_forward_hook(noised)\n",
            ),
        ),
    ),
    Case(
        "dpo~rate-of-zephyr",
        "llm/dpo",
        "setting",
        "the learning rate of Zephyr's DPO",
        "5e-7 is for all weights of a 7B model; adapters that start at zero do not move in 60 steps",
        "by argument: a thousandth of the recipe's rate; the margins remain about zero and the accuracy is that of the start",
        argv=("--optim.lr", "5e-7"),
    ),
    Case(
        "ppo~density-of-the-clipped-action",
        "rl/ppo",
        "policy",
        "Pendulum: actions are clipped to their range where they are drawn",
        "the log-probability and the gradient are those of the clipped action, which the Gaussian did not draw",
        "by argument: half of Pendulum's best actions are at the bound; there the gradient pulls the mean back inside",
        edits=(
            (
                "        action = self.head.draw(outputs, noise)\n",
                "        action = self.head.draw(outputs, noise).clamp(-1, 1)\n",
            ),
        ),
        argv=("--env", "Pendulum-v1"),
    ),
    Case(
        "dqn~returns-across-episodes",
        "rl/dqn",
        "returns",
        "three-step returns, the sum written without the mask",
        "an n-step return goes on behind the end of its episode, with rewards and the value of the next one",
        "by argument: the two last steps before a fall are worth as much as any other",
        edits=(("    own = (done.cumsum(0) - done.long()) == 0", "    own = torch.ones_like(done)"),),
        argv=("--n-step", "3"),
    ),
    Case(
        "rlhf~divergence-turned",
        "rl/rlhf",
        "reward",
        "the KL penalty per token, reference first",
        "the difference has the wrong sign: tokens that the reference thinks unlikely are rewarded",
        "by argument: the penalty becomes a bonus for leaving the reference",
        edits=(
            (
                "    kl = (log_prob - scored(reference, seen, slices(cfg, run))[0]) * valid\n",
                "    kl = (scored(reference, seen, slices(cfg, run))[0] - log_prob) * valid\n",
            ),
        ),
    ),
    Case(
        "flow~branches-exchanged",
        "diffusion/flow",
        "sampling",
        "an own copy of the sampler, with the unconditional half first, as in diffusers",
        "the halves of the prediction are still named in the old order: guidance leads away from the class",
        "by argument: at a scale of 2 samples are pushed from the requested class",
        edits=(
            (
                "def generate(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:\n",
                "@torch.no_grad()\n"
                "def walk(unet, scheduler, class_labels, noise, *, null, guidance_scale, num_inference_steps):\n"
                '    """Samples, as pipeline.sample makes them."""\n'
                "    scheduler.set_timesteps(num_inference_steps, device=noise.device)\n"
                "    labels = torch.cat([torch.full_like(class_labels, null), class_labels])\n"
                "    for t in scheduler.timesteps:\n"
                "        prediction = unet(torch.cat([noise, noise]), t.expand(len(labels)), labels).sample\n"
                "        conditional, unconditional = prediction.chunk(2)\n"
                "        prediction = unconditional + guidance_scale * (conditional - unconditional)\n"
                "        noise = scheduler.step(prediction, t, noise).prev_sample\n"
                "    return noise\n\n\n"
                "def generate(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:\n",
            ),
            (
                "return pipeline.sample(model, process.sampler(sampler), classes, noise, **how).clamp(-1, 1)",
                "return walk(model, process.sampler(sampler), classes, noise, **how).clamp(-1, 1)",
            ),
        ),
    ),
    Case(
        "flow~middle-levels-alone",
        "diffusion/flow",
        "setting",
        "training where the error is: in the middle of the line",
        "with a deviation of 0.1 levels are between 0.43 and 0.57: the net never sees noise alone, where sampling begins",
        "by argument: three quarters of the sampler's steps are at levels that were never trained",
        argv=("--noise.logit-std", "0.1"),
    ),
    Case(
        "logits~divergence-turned",
        "distill/logits",
        "loss",
        "the divergence, arguments in the order of its formula KL(student, teacher)",
        "F.kl_div(a, b) is KL(b || a): the student is fitted to one class of the teacher, its doubts are not learnt",
        "by argument: the gradient is another, and vanishes where the student is sure",
        edits=(
            (
                'F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)',
                'F.kl_div(taught(batch["image"]), soft(logits), reduction="sum", log_target=True)',
            ),
        ),
    ),
    Case(
        "logits~control-cut-short",
        "distill/logits",
        "setting",
        "both stages with the same number of epochs, for a fair comparison",
        "an epoch of the control is 200 pictures: 20 epochs are 62 steps, the distilled student has 1,250",
        "by argument: the student alone is hardly trained, and the reported gain of the teacher is far too large",
        argv=("--alone.epochs", "20"),
    ),
    Case(
        "instruct~questions-scored-too",
        "vlm/instruct",
        "loss",
        "labels made from the ids: everything but the prefix",
        "the questions are scored with the answers: most of the loss is about text that no picture tells",
        "by argument: an answer is a tenth of the scored tokens, the rest teaches to ask questions",
        edits=(
            (
                'rows.nll(model(batch), batch["labels"])',
                'rows.nll(model(batch), batch["ids"].where(batch["segment"] > 0, rows.IGNORE))',
            ),
            (
                'rows.scored(batch["labels"])',
                'rows.scored(batch["ids"].where(batch["segment"] > 0, rows.IGNORE))',
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "ppo~relu-nets",
        "rl/ppo",
        "model",
        "ReLU instead of tanh in both nets",
        "a usual variant",
        "by argument: CartPole is learnt with either",
        edits=(
            (
                "(mlp(n_obs + memory, *widths, n) for n in (head.n, 1))",
                "(mlp(n_obs + memory, *widths, n, activation=nn.ReLU) for n in (head.n, 1))",
            ),
        ),
    ),
    Case(
        "sac~wide-and-slow",
        "rl/sac",
        "setting",
        "the nets and the rate of the targets of the paper",
        "settings of the recipe",
        "by argument: 256 units and a tau of 0.005 are SAC's usual values",
        argv=("--hidden-sizes", "256", "256", "--tau", "0.005"),
    ),
]
