"""Forks and settings that are wrong, and healthy variants, from outside: the held-out half of the sixteenth set.

Nothing is developed on it. The other half is in sixteenth_set.py. The author of the set had read the recipes, not the gates. Run by
`python -m tests.helpers.set_run --set sixteenth --half heldout`.
"""

from tests.helpers.set_cases import Case

BUGS = [
    Case(
        "classify~momentum-of-slim",
        "vision/classify",
        "model",
        "batch norm with the numbers of a TensorFlow net: decay 0.9997, epsilon 0.001",
        "a momentum of 0.0003 suits half a million steps; after 1,860 of them the running statistics are half those of the start",
        "by argument: evaluations normalise with statistics that no batch had, and the net was never trained with them",
        edits=(
            (
                "        self.norm1 = nn.GroupNorm(8, n_out)\n",
                "        self.norm1 = nn.BatchNorm2d(n_out, eps=1e-3, momentum=1 - 0.9997)\n",
            ),
            (
                "        self.norm2 = nn.GroupNorm(8, n_out)\n",
                "        self.norm2 = nn.BatchNorm2d(n_out, eps=1e-3, momentum=1 - 0.9997)\n",
            ),
        ),
    ),
    Case(
        "classify~last-batch-not-evaluated",
        "vision/classify",
        "metric",
        "the evaluation leaves out the smaller last batch, as a loader with drop_last does",
        "held-out pictures are in order of their classes: no nine and only some of the eights are evaluated",
        "by argument: 768 of 1,000 pictures are evaluated, and the accuracy says nothing about two classes",
        edits=(
            (
                "        for batch in run.batches(data):\n",
                "        batches = list(run.batches(data))\n        for batch in batches[:-1] or batches:\n",
            ),
        ),
    ),
    Case(
        "segment~mask-enlarged-linearly",
        "vision/segment",
        "augmentation",
        "random enlarging of the training windows, picture and mask in one call",
        "the mask is interpolated linearly and cut to whole numbers: a rim of every nucleus becomes background",
        "by argument: the net learns nuclei that are smaller by half a pixel and more all round, IoU falls",
        edits=(
            (
                "# ---------------------------------------------------------------------------------------------------------------- model\n",
                "class Enlarged(masks.Windows):\n"
                '    """Training windows, their middle enlarged by up to a half."""\n\n'
                "    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:\n"
                "        sample = super().get(index, generator)\n"
                "        if generator is None or self.augment is None:\n"
                "            return sample\n"
                "        factor = 1 + 0.5 * torch.rand((), generator=generator).item()\n"
                '        both = torch.cat([sample["image"], sample["mask"][None].float()])\n'
                '        both = F.interpolate(both[None], scale_factor=factor, mode="bilinear")[0]\n'
                "        at = (both.shape[-1] - self.window) // 2\n"
                "        both = both[:, at : at + self.window, at : at + self.window]\n"
                '        return {"image": both[:-1], "mask": both[-1].long()}\n\n\n'
                "# ---------------------------------------------------------------------------------------------------------------- model\n",
            ),
            (
                "    train_data = masks.Windows(data, data.learn,",
                "    train_data = Enlarged(data, data.learn,",
            ),
        ),
    ),
    Case(
        "detect~offsets-exchanged",
        "vision/detect",
        "boxes",
        "SSD's expansion: the picture at a random place of a larger frame",
        "boxes are moved by (top, left, top, left); their order is x, y, x, y",
        "by argument: a box lies beside its object by as much as the two offsets differ, on average a sixth of the picture",
        edits=(
            (
                "def augmentation(cfg: Config) -> nn.Module:\n",
                "class Expand(nn.Module):\n"
                '    """The picture at a random place of a grey frame that is half as large again."""\n\n'
                "    def forward(self, image, found, labels):\n"
                "        h, w = image.shape[-2:]\n"
                "        top, left = int(torch.randint(h // 2, ())), int(torch.randint(w // 2, ()))\n"
                "        image = v2.functional.pad(image, [left, top, w // 2 - left, h // 2 - top], fill=0.45)\n"
                "        moved = found.as_subclass(Tensor) + torch.tensor([top, left, top, left], dtype=found.dtype)\n"
                "        return image, boxes.canonical(moved, tuple(image.shape[-2:])), labels\n\n\n"
                "def augmentation(cfg: Config) -> nn.Module:\n",
            ),
            (
                "    steps: list[nn.Module] = [v2.RandomPhotometricDistort()]\n",
                "    steps: list[nn.Module] = [v2.RandomPhotometricDistort(), Expand()]\n",
            ),
        ),
    ),
    Case(
        "pretrain~position-ids-by-default",
        "llm/pretrain",
        "packing",
        "the call of the model as in most examples: ids alone",
        "without position_ids positions run through the row, and each document attends to those before it in its row",
        "by argument: the context of a document is foreign text, in training and in evaluation",
        edits=(
            (
                'model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)',
                'model(input_ids=batch["input_ids"], use_cache=False)',
            ),
        ),
    ),
    Case(
        "pretrain~bytes-of-all-inputs",
        "llm/pretrain",
        "metric",
        "bits per byte, with the bytes looked up in the table of the tokens' sizes",
        "bytes of every input are counted, also of those that are context only and are scored in another window",
        "by argument: windows overlap by half, so bytes of long documents count twice and the result is far too low",
        edits=(
            (
                'to_double(batch["bytes"])], 1))  # (B, 6)',
                'to_double(token_bytes.to(run.device)[batch["input_ids"]].sum(1))], 1))  # (B, 6)',
            ),
            (
                "    log_p = ngrams.frequencies(corpus.train, len(corpus.sizes))  # (V,)\n",
                "    log_p = ngrams.frequencies(corpus.train, len(corpus.sizes))  # (V,)\n"
                "    token_bytes = torch.as_tensor(corpus.sizes).long()\n",
            ),
        ),
    ),
    Case(
        "sft~padded-right-in-generation",
        "llm/sft",
        "evaluation",
        "an own copy of the generation, to change its settings later",
        "prompts are padded on the right: all but the longest go on behind padding",
        "by argument: the answers to shorter prompts begin behind padding, the metric falls though the model is the same",
        edits=(
            (
                "def make_trainer(cfg: Config, run: core.Run, path: str):\n",
                "def answered(model: nn.Module, prompts: list[list[int]], pad: int, ends: list[int], most: int):\n"
                '    """(tokens of the answer without its end, did it end by itself?) to each prompt, greedily."""\n'
                "    width, device = max(map(len, prompts)), next(model.parameters()).device\n"
                "    ids = torch.tensor([p + [pad] * (width - len(p)) for p in prompts], device=device)\n"
                "    mask = torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in prompts], device=device)\n"
                "    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False,\n"
                "                         eos_token_id=ends, pad_token_id=pad)[:, width:].tolist()  # fmt: skip\n"
                "    at = [next((i for i, token in enumerate(row) if token in ends), None) for row in out]\n"
                "    return [(row[:end], end is not None) for row, end in zip(out, at, strict=True)]\n\n\n"
                "def make_trainer(cfg: Config, run: core.Run, path: str):\n",
            ),
            (
                "loading.generate(model, inputs, pad=tokenizer.pad_token_id, ends=chat.ends, most=longest)",
                "answered(model, inputs, tokenizer.pad_token_id, chat.ends, longest)",
            ),
        ),
    ),
    Case(
        "ppo~truncation-is-an-end",
        "rl/ppo",
        "returns",
        "one flag for the end of an episode, as gym had it before version 0.26",
        "a truncated episode is not bootstrapped: at the time limit the value is taken as zero",
        "by argument: the longest episodes look bad at their end, the critic cannot know when that comes",
        edits=(
            (
                'next_value, rollout["terminated"], done, cfg.gamma, cfg.gae_lambda)',
                "next_value, done, done, cfg.gamma, cfg.gae_lambda)",
            ),
        ),
    ),
    Case(
        "ppo~done-of-the-step-before",
        "rl/ppo",
        "returns",
        "the flag of the end as CleanRL stores it: with the observation that follows",
        "the array is read one step off: the sum over later steps crosses the end of an episode, and stops one step after it",
        "by argument: the step that lets the pole fall gets the advantage of the next episode's first steps",
        edits=(("gamma * lam * ~done\n", "gamma * lam * ~done.roll(1, 0)\n"),),
    ),
    Case(
        "dqn~last-action-never-drawn",
        "rl/dqn",
        "exploration",
        "random actions, 0 to n - 1",
        "the upper bound of torch.randint is exclusive already: the last action is never drawn at random",
        "by argument: the first 1,000 transitions know one of two actions only",
        edits=(("torch.randint(policy.n_actions, (length", "torch.randint(policy.n_actions - 1, (length"),),
    ),
    Case(
        "sac~drawn-without-gradient",
        "rl/sac",
        "loss",
        "the action of the policy's loss, as drawn with sample() instead of rsample()",
        "the critics' value of the action has no gradient for the policy: the entropy alone is maximised",
        "by argument: the policy never learns which actions are good",
        edits=(
            (
                'gain = model.worth(batch["observation"], action, frozen=True).amin(0)',
                'gain = model.worth(batch["observation"], action.detach(), frozen=True).amin(0)',
            ),
        ),
    ),
    Case(
        "sac~torques-in-the-buffer",
        "rl/sac",
        "replay",
        "the buffer holds actions as the environment takes them, for plots",
        "the critics learn from actions in [-2, 2] and are asked for the policy's in [-1, 1]",
        "by argument: targets and the policy's loss read the critics at half of the action that is meant",
        edits=(
            (
                '        steps.append({"observation": observation, "action": action, **followed})\n',
                "        torque = action * torch.tensor(envs.high, device=run.device)\n"
                '        steps.append({"observation": observation, "action": torque, **followed})\n',
            ),
        ),
    ),
    Case(
        "pixel~levels-of-the-sampler",
        "diffusion/pixel",
        "timesteps",
        "a random timestep, its bound taken from the wrong setting",
        "the number of sampling steps, 25, stands for the 1,000 of training: only the least noisy levels are drawn",
        "by argument: the net never sees the levels at which a sample is made; the loss looks excellent",
        edits=(
            (
                "torch.randint(self.process.noise.num_train_timesteps, (), generator=generator)",
                "torch.randint(Sampling().num_inference_steps, (), generator=generator)",
            ),
        ),
    ),
    Case(
        "pixel~one-noise-for-all",
        "diffusion/pixel",
        "evaluation",
        "the evaluation's draws from one fixed seed",
        "the seed does not depend on the picture: every sample starts from the same noise, every picture has one timestep",
        "by argument: 200 samples are ten different ones, and `denoised` is that of a single level",
        edits=(
            (
                "generator = generator or pictures.fixed_draws(self.split, index)",
                "generator = generator or pictures.fixed_draws(self.split, 0)",
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "classify~own-plain-loop",
        "vision/classify",
        "loop",
        "the loop in plain torch, to add own logging",
        "zero_grad, backward, clip and step in their order, the mean over the batch: what run.update does in one process",
        "by argument: the same gradient as the recipe's",
        edits=(
            (
                "    for step in run.steps(stage):\n        run.update(stage, step.batches)\n",
                '    optimizer = stage.optimizers["main"]\n'
                "    for step in run.steps(stage):\n"
                "        optimizer.zero_grad()\n"
                '        count = sum(len(batch["label"]) for batch in step.batches)\n'
                "        for batch in step.batches:\n"
                '            (stage.loss(stage.model, batch)["ce"] / count).backward()\n'
                "        nn.utils.clip_grad_norm_(stage.model.parameters(), cfg.optim.clip)\n"
                "        optimizer.step()\n",
            ),
        ),
    ),
    Case(
        "classify~layer-scale",
        "vision/classify",
        "model",
        "LayerScale (Touvron 2021) on the residual branch",
        "the branch starts small and its size is learnt for each channel",
        "by argument: a usual part of residual nets",
        edits=(
            (
                "        same = stride == 1 and n_in == n_out\n",
                "        self.gamma = nn.Parameter(torch.full((n_out, 1, 1), 0.1))\n        same = stride == 1 and n_in == n_out\n",
            ),
            (
                "return F.relu(self.shortcut(x) + self.norm2(self.conv2(h)))",
                "return F.relu(self.shortcut(x) + self.gamma * self.norm2(self.conv2(h)))",
            ),
        ),
    ),
    Case(
        "segment~average-pooling",
        "vision/segment",
        "model",
        "averages instead of maxima on the way down",
        "a usual variant of the U-Net",
        "by argument: the resolution and the receptive field are the same",
        edits=(("F.max_pool2d(x, 2)", "F.avg_pool2d(x, 2)"),),
    ),
    Case(
        "detect~crops",
        "vision/detect",
        "setting",
        "SSD's crops and shrinking",
        "a setting of the recipe",
        "by argument: objects keep their labels and are seen at more sizes",
        argv=("--crop",),
    ),
    Case(
        "pretrain~six-heads",
        "llm/pretrain",
        "setting",
        "a wider net with a lower rate",
        "a setting of the recipe",
        "by argument: a wider Llama with heads of the same size",
        argv=("--hidden-size", "192", "--num-attention-heads", "6", "--optim.lr", "1.5e-3"),
    ),
    Case(
        "sft~rank-and-dropout",
        "llm/sft",
        "setting",
        "LoRA with rank 16 and dropout, at half of the rate",
        "settings of the recipe",
        "by argument: usual values",
        argv=("--lora-rank", "16", "--lora-dropout", "0.05", "--optim.lr", "5e-4"),
    ),
    Case(
        "dqn~three-steps-by-priority",
        "rl/dqn",
        "setting",
        "two parts of Rainbow: three-step returns and prioritised replay",
        "settings of the recipe",
        "by argument: both are usual on CartPole",
        argv=("--n-step", "3", "--prioritized-replay-alpha", "0.5"),
    ),
    Case(
        "pixel~wider-and-more-dropped",
        "diffusion/pixel",
        "setting",
        "a wider UNet, and a class dropped for one sample in five",
        "settings of the recipe",
        "by argument: usual values",
        argv=("--conditioning-dropout-prob", "0.2", "--widths", "24", "48"),
    ),
    Case(
        "flow~wider-levels",
        "diffusion/flow",
        "setting",
        "levels spread wider, weaker guidance, a linear decay of the rate",
        "settings of the recipe",
        "by argument: usual values",
        argv=("--noise.logit-std", "1.3", "--sampling.guidance-scale", "1.5", "--optim.schedule", "linear"),
    ),
    Case(
        "logits~both-directions",
        "distill/logits",
        "loss",
        "the symmetric divergence: half of either direction (Jeffreys)",
        "both directions have their lowest value where the student equals the teacher",
        "by argument: the same optimum, and no class of the teacher is left out",
        edits=(
            (
                '            kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)\n',
                '            ours, theirs = soft(logits), taught(batch["image"])\n'
                '            kl = 0.5 * F.kl_div(ours, theirs, reduction="sum", log_target=True)\n'
                '            kl = kl + 0.5 * F.kl_div(theirs, ours, reduction="sum", log_target=True)\n',
            ),
        ),
    ),
]
