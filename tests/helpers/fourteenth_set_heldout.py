"""Forks, settings and own data that are wrong, and healthy variants, from outside: the held-out half of the fourteenth set.

Nothing is developed on it. The other half is in fourteenth_set.py. The author of the set had read the recipes, not the gates. Run by
`python -m tests.helpers.set_run --set fourteenth --half heldout`.
"""

import sysconfig
from pathlib import Path

from tests.helpers.set_cases import Case, lines, picture, rows_of_docstrings


def tiles_of_one_slide(root: Path) -> tuple[str, ...]:
    """Tiles of 96 pixels of the microscope picture, 48 apart, every fifth in val/: each shares half of its pixels with its neighbours."""
    from trainworthy.recipes.shared import nuclei

    whole, mask = nuclei.load()
    places = [(y, x) for y in range(0, 417, 48) for x in range(0, 417, 48)]
    for i, (y, x) in enumerate(places):
        split = root / ("val" if i % 5 == 4 else "train")
        picture(whole[y : y + 96, x : x + 96], split / "images" / f"{y:03}_{x:03}.png")
        picture(mask[y : y + 96, x : x + 96], split / "masks" / f"{y:03}_{x:03}.png")
    (root / "classes.txt").write_text("background\nnucleus")
    return ("--data.path", str(root))


def sources_of_python(root: Path) -> tuple[str, ...]:
    """150 modules of the standard library as text files: code instead of prose."""
    root.mkdir(parents=True, exist_ok=True)
    found = [p for p in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) if 2000 < p.stat().st_size < 40000]
    for path in found[:150]:
        (root / f"{path.stem}.txt").write_text(path.read_text(encoding="utf-8", errors="ignore"))
    return ("--data.path", str(root))


def conversations_of_two_turns(root: Path) -> tuple[str, ...]:
    """OpenAI's `messages`: a name for a sentence, then the same name in capitals."""
    rows = [
        {
            "messages": [
                {"role": "system", "content": "You name Python functions."},
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
                {"role": "user", "content": "And as a constant?"},
                {"role": "assistant", "content": row["completion"].upper()},
            ]
        }
        for row in rows_of_docstrings(1500)
    ]
    lines(root / "chats.jsonl", rows)
    return ("--data.path", str(root / "chats.jsonl"))


LOSS = (
    '        logits = model(batch["image"])\n'
    '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}\n'
)
BUILD = "    balanced = balancing.build("
STEPS = "    for step in run.steps(stage):\n        means = run.update(stage, step.batches)\n"
SOFT = "        return (logits.float() / temperature).log_softmax(1)\n"

BUGS = [
    Case(
        "classify~prior-divided-out-in-training",
        "vision/classify",
        "loss",
        "logit adjustment (Menon 2020) for classes of unequal size",
        "the logarithm of the prior is subtracted from the training logits, as for a correction after training; it is to be added",
        "by argument: small classes get a negative margin where they need a positive one",
        edits=(
            (BUILD, "    prior = torch.bincount(labels[learn], minlength=n) / len(learn)\n" + BUILD),
            (LOSS, LOSS.replace('model(batch["image"])\n', 'model(batch["image"]) - prior.log()\n')),
            ("core.Expect(initial_loss=balanced.first_loss, loss_floor", "core.Expect(loss_floor"),
        ),
        argv=("--balance.ratio", "20"),
        source="https://arxiv.org/abs/2007.07314",
    ),
    Case(
        "segment~own-overlapping-tiles",
        "vision/segment",
        "own data",
        "tiles of a large picture with half an overlap, so that no nucleus is only at a border",
        "the split is by tile: every held-out pixel is in a training tile too",
        "by argument: held-out pixels were trained on",
        data=tiles_of_one_slide,
    ),
    Case(
        "segment~eroded-and-not-grown",
        "vision/segment",
        "metric",
        "touching nuclei are separated by an erosion before they are scored, as before they are counted",
        "nothing grows them back: two pixels are missing all round each nucleus",
        "measured without gates: IoU 0.649 after 5 epochs (0.897 without the change after 10), recall of nuclei 0.653",
        edits=(
            (
                '            total += segmentation.scored(batch, model(batch["image"]), n)\n',
                '            answer = model(batch["image"]).argmax(1)\n'
                "            answer = (-F.max_pool2d(-answer[:, None].float(), 5, 1, 2))[:, 0].long()\n"
                '            total += segmentation.counted(batch["mask"], answer, n)\n',
            ),
        ),
    ),
    Case(
        "pretrain~bf16-weights",
        "llm/pretrain",
        "precision",
        "half of the memory: the model is made in bf16",
        "weights, moments and updates are bf16, without a copy in fp32: small updates are rounded away",
        "by argument: updates below 1/256 of a weight are rounded away",
        edits=(
            (
                "    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)\n",
                "    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)\n",
            ),
        ),
    ),
    Case(
        "pretrain~mask-given-to-packed-rows",
        "llm/pretrain",
        "model",
        "the library asks for an attention mask where the pad token is known",
        "with a mask transformers does not read the documents from the positions: documents of a row attend to each other",
        "by argument: tokens attend to other documents at equal positions",
        edits=(
            (
                '        out = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)\n',
                '        mask = (batch["input_ids"] != tokenizer.pad_token_id).long()\n'
                '        out = model(input_ids=batch["input_ids"], attention_mask=mask, position_ids=batch["position_ids"], use_cache=False)\n',
            ),
        ),
    ),
    Case(
        "pretrain~rates-of-nanogpt",
        "llm/pretrain",
        "schedule",
        "nanoGPT's get_lr with its constants, set in the loop",
        "its warmup of 2,000 and its decay over 600,000 steps are those of another run: this one ends in the warmup",
        "by argument: the rate of 1,410 steps rises to 70% of the peak and never falls",
        edits=(
            (
                "def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:\n",
                "def get_lr(it: int, peak: float, warmup_iters: int = 2000, lr_decay_iters: int = 600_000) -> float:\n"
                "    if it < warmup_iters:\n"
                "        return peak * (it + 1) / (warmup_iters + 1)\n"
                "    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))\n"
                "    return 0.1 * peak + 0.45 * peak * (1 + math.cos(math.pi * ratio))\n\n\n"
                "def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:\n",
            ),
            (
                STEPS,
                "    for step in run.steps(stage):\n"
                '        for group in stage.optimizers["main"].param_groups:\n'
                '            group["lr"] = get_lr(step.index, cfg.optim.lr)\n'
                "        means = run.update(stage, step.batches)\n",
            ),
        ),
        source="https://github.com/karpathy/nanoGPT",
    ),
    Case(
        "sft~unloaded-not-merged",
        "llm/sft",
        "export",
        "a whole model is exported, without adapters that a server has to know",
        "unload() takes the adapters away without merging them: the export is the untrained model",
        "by argument: what is exported is the untrained model",
        edits=(
            ("import contextlib\n", "import contextlib\nimport copy\n"),
            (
                "        loading.export(trainer.model, tokenizer, folder)\n",
                "        loading.export(copy.deepcopy(trainer.model).unload(), tokenizer, folder)\n",
            ),
            ('{"exported": adapter if cfg.lora_rank else whole}', '{"exported": whole}'),
        ),
    ),
    Case(
        "ppo~epsilon-in-the-rollout",
        "rl/ppo",
        "exploration",
        "more exploration: one action in ten is drawn at random",
        "the stored log-probability is that of the action that the policy would have taken",
        "not visible on CartPole (return 500 after 25 iterations, as the recipe); by argument: the ratio is that of another action",
        edits=(
            (
                "        action, log_prob = policy.sample(observation, noise[t])\n",
                "        action, log_prob = policy.sample(observation, noise[t])\n"
                "        stray = torch.rand(len(action), generator=draws) < 0.1\n"
                "        action = torch.where(stray, torch.randint(policy.head.n, action.shape, generator=draws), action)\n",
            ),
        ),
    ),
    Case(
        "dqn~observations-as-bytes",
        "rl/dqn",
        "buffer",
        "a quarter of the memory: the buffer keeps bytes, as those for Atari do",
        "positions and angles below 1 become 0, negative ones wrap",
        "measured without gates: return 23 against 200 after 120 iterations",
        edits=(
            (
                "        replay.add(whole, step.index)\n",
                '        replay.add({k: v.byte().float() if "observation" in k else v for k, v in whole.items()}, step.index)\n',
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "classify~logit-adjustment",
        "vision/classify",
        "loss",
        "logit adjustment (Menon 2020) for classes of unequal size, in training alone",
        "right: the logarithm of the prior is added to the training logits, the answer is without it; the first loss is not ln N and not declared",
        "by argument: a published method, for balanced accuracy",
        edits=(
            (BUILD, "    prior = torch.bincount(labels[learn], minlength=n) / len(learn)\n" + BUILD),
            (LOSS, LOSS.replace('model(batch["image"])\n', 'model(batch["image"]) + prior.log()\n')),
            ("core.Expect(initial_loss=balanced.first_loss, loss_floor", "core.Expect(loss_floor"),
        ),
        argv=("--balance.ratio", "20"),
        source="https://arxiv.org/abs/2007.07314",
    ),
    Case(
        "classify~coord-conv",
        "vision/classify",
        "model",
        "CoordConv (Liu 2018): the stem also reads the row and the column of each pixel",
        "right: two constant planes behind the normalised picture",
        "by argument: a published layer; a constant input hurts nothing",
        edits=(
            (
                "nn.Conv2d(len(mean), widths[0], 5, 2, 2, bias=False)",
                "nn.Conv2d(len(mean) + 2, widths[0], 5, 2, 2, bias=False)",
            ),
            (
                "        x = (images - self.mean) / self.std  # (B, C, H, W)\n",
                "        x = (images - self.mean) / self.std  # (B, C, H, W)\n"
                "        sides = [torch.linspace(-1, 1, s, device=x.device) for s in x.shape[2:]]\n"
                '        places = torch.stack(torch.meshgrid(*sides, indexing="ij"))\n'
                "        x = torch.cat([x, places.expand(len(x), -1, -1, -1)], 1)\n",
            ),
        ),
        source="https://arxiv.org/abs/1807.03247",
    ),
    Case(
        "segment~outline-weights",
        "vision/segment",
        "loss",
        "pixels at an outline weigh five times as much (Ronneberger 2015)",
        "right: the weights are in the sum and in its count",
        "by argument: the loss of the U-Net's paper",
        edits=(
            (
                "    def counts(batch: dict) -> dict[str, Tensor]:\n",
                "    def weights(mask: Tensor) -> Tensor:\n"
                '        """5 at an outline, 1 elsewhere, 0 where void: (B, H, W)."""\n'
                "        inside = (mask == 1).float()[:, None]\n"
                "        edge = F.max_pool2d(inside, 3, 1, 1) + F.max_pool2d(-inside, 3, 1, 1)\n"
                "        return (1 + 4 * edge[:, 0]) * (mask != IGNORE)\n\n"
                "    def counts(batch: dict) -> dict[str, Tensor]:\n",
            ),
            (
                '        return {"ce": pixels.sum(), "dice"',
                '        return {"ce": weights(batch["mask"]).sum(), "dice"',
            ),
            (
                '        terms = {"ce": (ce * (1 - (-ce).exp()) ** cfg.focal if cfg.focal else ce).sum()}\n',
                '        terms = {"ce": (weights(mask) * ce).sum()}\n',
            ),
        ),
        source="https://arxiv.org/abs/1505.04597",
    ),
    Case(
        "segment~dropout-at-the-bottom",
        "vision/segment",
        "model",
        "dropout of whole channels at the coarsest level",
        "right: it follows the mode of the net",
        "by argument: it is off in evaluation",
        edits=(
            (
                "        for block, fine in zip(self.up, reversed(seen[:-1]), strict=True):\n",
                "        x = F.dropout2d(x, 0.2, self.training)\n"
                "        for block, fine in zip(self.up, reversed(seen[:-1]), strict=True):\n",
            ),
        ),
    ),
    Case(
        "pretrain~cosine-to-a-tenth",
        "llm/pretrain",
        "schedule",
        "a schedule of one's own, set in the loop: warmup, then a cosine that ends at a tenth of the peak",
        "right: it spans the run's own steps",
        "by argument: the usual schedule of language models",
        edits=(
            (
                "def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:\n",
                "def get_lr(it: int, total: int, peak: float) -> float:\n"
                "    warmup = max(1, round(0.05 * total))\n"
                "    if it < warmup:\n"
                "        return peak * (it + 1) / (warmup + 1)\n"
                "    return 0.1 * peak + 0.45 * peak * (1 + math.cos(math.pi * (it - warmup) / max(1, total - warmup)))\n\n\n"
                "def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:\n",
            ),
            (
                STEPS,
                "    for step in run.steps(stage):\n"
                '        for group in stage.optimizers["main"].param_groups:\n'
                '            group["lr"] = get_lr(step.index, run.total_steps(stage), cfg.optim.lr)\n'
                "        means = run.update(stage, step.batches)\n",
            ),
        ),
    ),
    Case(
        "pretrain~own-python",
        "llm/pretrain",
        "own data",
        "source code instead of prose: 150 modules as text files",
        "right: indentation and long documents, nothing else is different",
        "by argument: text as any other",
        data=sources_of_python,
    ),
    Case(
        "sft~own-two-turns",
        "llm/sft",
        "own data",
        "conversations of two turns with a system prompt, in OpenAI's format",
        "right: both answers are scored, the second follows from the first",
        "by argument: the second answer is a function of the first",
        data=conversations_of_two_turns,
    ),
    Case(
        "sft~low-rank-dora",
        "llm/sft",
        "settings",
        "weight-decomposed adapters (Liu 2024) of a small rank with dropout, on the attention alone",
        "right: settings of the recipe",
        "by argument: a published adapter with usual settings",
        argv=(
            "--use-dora",
            "--lora-rank",
            "4",
            "--lora-dropout",
            "0.05",
            "--lora-target-modules",
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
        ),
        source="https://arxiv.org/abs/2402.09353",
    ),
    Case(
        "dqn~log-cosh",
        "rl/dqn",
        "loss",
        "log-cosh, which is smooth everywhere, instead of Huber's loss",
        "right: a square near 0, linear far away",
        "measured without gates: return 372 against 200 after 120 iterations",
        edits=(
            (
                '        error = F.smooth_l1_loss(model.of(batch["observation"], batch["action"]), batch["return"], reduction="none")\n',
                '        far = model.of(batch["observation"], batch["action"]) - batch["return"]\n'
                "        error = far + F.softplus(-2 * far) - 0.6931471805599453\n",
            ),
        ),
    ),
    Case(
        "logits~z-score-logits",
        "distill/logits",
        "loss",
        "standardised logits (Sun 2024) for both nets, so that their scales need not agree",
        "right: mean and deviation are those of one picture's classes",
        "by argument: a published method",
        edits=(
            (
                SOFT,
                "        z = logits.float()\n"
                "        z = (z - z.mean(1, keepdim=True)) / (z.std(1, keepdim=True) + 1e-6)\n"
                "        return (2 * z / temperature).log_softmax(1)\n",
            ),
        ),
        source="https://arxiv.org/abs/2403.01427",
    ),
]
