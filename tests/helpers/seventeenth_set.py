"""Forks and settings that are wrong, and healthy variants, from outside: the open half of the seventeenth set.

The half is the last hex digit of the id's SHA-256, modulo 2: even here. The other half is held out in seventeenth_set_heldout.py. The author
of the set had read the recipes, not the gates. Run by `python -m tests.helpers.set_run --set seventeenth`.
"""

from pathlib import Path

from tests.helpers.set_cases import Case, coco, lines, rows_of_docstrings


def alpaca_with_inputs(folder: Path) -> tuple[str, ...]:
    rows = [{"instruction": f"Name the function of the module {row['source']} that is described.", "input": row["prompt"],
             "output": row["completion"]} for row in rows_of_docstrings(1200)]  # fmt: skip
    lines(folder / "alpaca.jsonl", rows)
    return ("--data.path", str(folder / "alpaca.jsonl"), "--data.columns", "prompt=instruction,completion=output")


def scattered_ids(folder: Path) -> tuple[str, ...]:
    from trainworthy.recipes.vision.data import boxes

    found = boxes.load(boxes.Source(path="digits", scenes=1600))
    ids = [3 + 7 * i for i in range(10)]
    coco(folder, "train", found.learn, found, ids=ids)
    coco(folder, "val", found.held_out[:200], found, ids=ids)
    return ("--data.path", str(folder))


def three_formats(folder: Path) -> tuple[str, ...]:
    rows: list[dict] = []
    for i, row in enumerate(rows_of_docstrings(1500)):
        described, name = row["prompt"], row["completion"]
        if i % 3 == 0:
            rows.append({"instruction": "Name the function.", "input": described, "output": name})
        elif i % 3 == 1:
            turns = [{"from": "human", "value": described}, {"from": "gpt", "value": name}]
            rows.append({"conversations": turns})
        else:
            turns = [{"role": "system", "content": "You name functions."}, {"role": "user", "content": described}]
            rows.append({"messages": [*turns, {"role": "assistant", "content": name}]})
    lines(folder / "rows.jsonl", rows)
    return ("--data.path", str(folder / "rows.jsonl"))


BUGS = [
    Case(
        "classify~half-of-the-digits",
        "vision/classify",
        "data",
        "half of the training pictures, to try a change faster; the line was left in",
        "the pictures are in order of their classes: the first half has no five, six, seven, eight or nine",
        "by argument: five of ten classes are never seen in training, accuracy about a half",
        edits=(
            (
                '    embedded, n, eps = cfg.data.path == "digits"',
                '    learn = learn[: len(learn) // 2]\n    embedded, n, eps = cfg.data.path == "digits"',
            ),
        ),
    ),
    Case(
        "segment~void-becomes-object",
        "vision/segment",
        "labels",
        "masks made binary, as files with 0 and 255 need it",
        "void is 255, too: pixels that other windows score, and padding, become nuclei",
        "by argument: three quarters of each evaluation window are void; the IoU counts them as nuclei that were missed",
        edits=(
            (
                "# ---------------------------------------------------------------------------------------------------------------- model\n",
                "class Binary(masks.Windows):\n"
                '    """Masks of 0 and 1."""\n'
                "\n"
                "    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:\n"
                "        sample = super().get(index, generator)\n"
                '        return {**sample, "mask": (sample["mask"] > 0).long()}\n'
                "\n"
                "\n"
                "# ---------------------------------------------------------------------------------------------------------------- model\n",
            ),
            (
                "    train_data = masks.Windows(",
                "    train_data = Binary(",
            ),
            (
                "    val_data = masks.Windows(",
                "    val_data = Binary(",
            ),
        ),
    ),
    Case(
        "detect~zeros-not-in-the-truth",
        "vision/detect",
        "metric",
        "label 0 is the background in torchvision",
        "here the background is -1 and 0 is a class: its objects are left out of the truth",
        "by argument: the printed mAP is that of nine of ten classes",
        edits=(
            (
                'real = batch["labels"][j] >= 0',
                'real = batch["labels"][j] > 0',
            ),
        ),
    ),
    Case(
        "sft~own-input-not-mapped",
        "llm/sft",
        "own data",
        "an Alpaca file, its columns named by hand",
        "prompt=instruction leaves the column `input` unread: the model sees the module's name, not the description",
        "by argument: the description decides the answer; without it only the module's vocabulary can be learnt",
        argv=(
            "--train.epochs",
            "1",
        ),
        data=alpaca_with_inputs,
    ),
    Case(
        "ppo~divided-by-the-variance",
        "rl/ppo",
        "normalisation",
        "observations scaled by the running statistics",
        "by the variance instead of its root: an angle of 0.05 becomes 10 and is cut off there",
        "by argument: of the pole's angle and the cart's place little more than the sign is left, or they are a hundredth of what they should be",
        edits=(
            (
                "self.observations.mean) / self.observations.std)",
                "self.observations.mean) / self.observations.var)",
            ),
        ),
    ),
    Case(
        "dqn~time-limit-is-a-fall",
        "rl/dqn",
        "returns",
        "one flag for the end of an episode, as in gym before 0.26",
        "after a truncation nothing is bootstrapped: a pole that stands until the limit is worth as much as one that falls",
        "by argument: the better the policy, the more of its states look like the last one of an episode",
        edits=(
            (
                'counts = cfg.gamma ** (last + 1) * ~steps["terminated"][last, n]',
                "counts = cfg.gamma ** (last + 1) * ~done[last, n]",
            ),
        ),
    ),
    Case(
        "sac~logarithm-for-the-temperature",
        "rl/sac",
        "returns",
        "the temperature read from its parameter",
        "the parameter is its logarithm, -1.6 at the start: in the targets the entropy costs, and eight times as much as it should earn",
        "by argument: the critics learn values of another objective than the policy's, and it grows as the temperature falls",
        edits=(
            (
                "value = value - policy.log_temperature.exp() * log_prob",
                "value = value - policy.log_temperature * log_prob",
            ),
        ),
    ),
    Case(
        "rlhf~first-prompts-in-every-rollout",
        "rl/rlhf",
        "data",
        "the stream of prompts begun anew inside of the loop",
        "every rollout has the same 64 prompts and the same random numbers; all others are never asked",
        "by argument: the policy is fitted to 64 prompts, one continuation of each; less is left for held-out ones",
        edits=(
            (
                "stream.keys(iteration * cfg.rollout_batch_size, (iteration + 1) * cfg.rollout_batch_size)",
                "stream.keys(0, cfg.rollout_batch_size)",
            ),
        ),
    ),
    Case(
        "flow~path-of-constant-variance",
        "diffusion/flow",
        "noise",
        "a signal level that keeps the variance, as in the diffusion recipe",
        "the path is an arc, but the target, noise - picture, is the direction of the straight line, and samplers walk that",
        "by argument: at the same timestep the net has seen inputs of another scale than the sampler gives it",
        edits=(
            (
                "# ---------------------------------------------------------------------------------------------------------------- model\n",
                "class Arc(Process):\n"
                '    """A path on which the variance stays."""\n'
                "\n"
                "    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:\n"
                "        s = t / self.noise.num_train_timesteps\n"
                "        return (1 - s**2).sqrt(), s\n"
                "\n"
                "\n"
                "# ---------------------------------------------------------------------------------------------------------------- model\n",
            ),
            (
                "process, n, sampling = Process(cfg.noise)",
                "process, n, sampling = Arc(cfg.noise)",
            ),
        ),
    ),
    Case(
        "pixel~label-in-place-of-the-condition",
        "diffusion/pixel",
        "loss",
        "the class is in the batch as `label`, too",
        "the label is never dropped: the entry for no class is not trained, and guidance subtracts what it predicts",
        "by argument: samples are guided away from an untrained prediction",
        edits=(
            (
                'prediction = model(batch["noisy"], t, batch["condition"])',
                'prediction = model(batch["noisy"], t, batch["label"])',
            ),
        ),
    ),
    Case(
        "logits~hot-without-its-square",
        "distill/logits",
        "loss",
        "a temperature of 8, to see more of what the teacher thinks of other classes",
        "without T^2 the gradient of the divergence is a sixty-fourth: the 200 labels decide",
        "by argument: the student is hardly better than the one without a teacher",
        edits=(
            (
                'terms["kl"] = weight * temperature**2 * kl',
                'terms["kl"] = weight * kl',
            ),
        ),
        argv=(
            "--temperature",
            "8",
        ),
    ),
    Case(
        "instruct~positions-run-on",
        "vlm/instruct",
        "model",
        "the call of the language model written out, with its mask",
        "without position_ids a question's positions follow those of the one before it: it is learnt at other positions than it is asked at",
        "by argument: an export is asked one question at a time, at positions where it has seen only the first kind",
        edits=(
            (
                "        return rows.answer(self.language, self.embedded(batch), batch)\n",
                "        words = self.embedded(batch)\n"
                '        mask = rows.seen(batch["segment"], words.dtype)\n'
                "        return self.language(inputs_embeds=words, attention_mask=mask, use_cache=False).logits\n",
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "segment~noise-and-sharpness",
        "vision/segment",
        "augmentation",
        "a little noise and random sharpness on the training windows",
        "both change the picture alone, and the mask stays as it is",
        "by argument: weak photometric augmentation",
        edits=(
            (
                "    return v2.Compose(steps)\n",
                "    return v2.Compose([*steps, v2.GaussianNoise(0.0, 0.03), v2.RandomAdjustSharpness(2.0)])\n",
            ),
        ),
    ),
    Case(
        "detect~own-scattered-ids",
        "vision/detect",
        "own data",
        "COCO's JSON with category ids that have gaps",
        "a format that the documentation names; ids need not count from 1",
        "by argument: 1,600 of the recipe's own scenes, read from files; three times as many epochs",
        argv=(
            "--train.epochs",
            "12",
        ),
        data=scattered_ids,
    ),
    Case(
        "sft~own-three-formats",
        "llm/sft",
        "own data",
        "one file of Alpaca, ShareGPT and OpenAI rows",
        "the documentation says that a file may mix formats",
        "by argument: the recipe's own pairs, 1,500 of them, once",
        argv=(
            "--train.epochs",
            "1",
        ),
        data=three_formats,
    ),
    Case(
        "reward~adapters-in-attention",
        "llm/reward",
        "setting",
        "adapters in the attention layers alone, of a higher rank",
        "settings of the recipe, the usual choice of LoRA's paper",
        "by argument: Hu 2021 adapts queries and values alone",
        argv=(
            "--lora-target-modules",
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "--lora-rank",
            "16",
        ),
    ),
    Case(
        "sac~deviation-through-tanh",
        "rl/sac",
        "model",
        "the log deviation squashed into its range by tanh, as in CleanRL",
        "the same range, but smooth at its ends",
        "by argument: SpinningUp and CleanRL do one or the other",
        edits=(
            (
                "log_std = log_std.clamp(-5, 2)",
                "log_std = -5 + 3.5 * (log_std.tanh() + 1)",
            ),
        ),
    ),
    Case(
        "rlhf~rewards-alone-narrower-clip",
        "rl/rlhf",
        "setting",
        "lambda 1, a narrower clip, no clip of the value",
        "settings of the recipe",
        "by argument: with 24 tokens and one reward lambda 1 has little more variance; others use it",
        argv=(
            "--gae-lambda",
            "1.0",
            "--clip-range",
            "0.1",
            "--clip-range-vf",
            "inf",
        ),
    ),
    Case(
        "flow~class-embedding-faster",
        "diffusion/flow",
        "optimiser",
        "three times the rate for the embedding of the classes",
        "a group per part of the net, all parts are in one",
        "by argument: eleven rows, each of which is read in a tenth of the samples",
        edits=(
            (
                '        optimizers={"main": core.make_optimizer(model, cfg.optim)},\n',
                '        optimizers={"main": core.make_optimizer(model, cfg.optim, rates)},\n',
            ),
            (
                '    thing = "digit" if cfg.data.path == "digits" else "class"\n',
                "    parts = [name for name, part in model.named_children() if any(True for _ in part.parameters())]\n"
                '    rates = {name: cfg.optim.lr * (3 if name == "class_embedding" else 1) for name in parts}\n'
                '    thing = "digit" if cfg.data.path == "digits" else "class"\n',
            ),
        ),
    ),
    Case(
        "compress~jensen-shannon",
        "distill/compress",
        "loss",
        "the Jensen-Shannon divergence in place of KL",
        "symmetric and bounded, zero only where both agree; the cross-entropy remains",
        "by argument: Wen 2023 compares such divergences",
        edits=(
            (
                '        kl = F.kl_div(soft, hard, reduction="sum", log_target=True)\n',
                "        middle = torch.logaddexp(soft, hard) - torch.log(torch.tensor(2.0))\n"
                '        kl = sum(F.kl_div(middle, one, reduction="sum", log_target=True) for one in (soft, hard)) / 2\n',
            ),
        ),
    ),
]
