"""Forks, settings and own data that are wrong, and healthy variants, from outside: the open half of the sixth set.

The half is the first byte of the id's SHA-256, modulo 2. The other half is held out in sixth_set_heldout.py. The author of the set had not read
the gates. Run by `python -m tests.helpers.set_run --set sixth`.
"""

from pathlib import Path

from tests.helpers.set_cases import Case, lines, rows_of_docstrings


def template_in_the_rows(root: Path) -> tuple[str, ...]:
    """Rows of a tool that applied the chat template already; the recipe applies it again."""
    rows = [
        {
            "prompt": f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n",
            "completion": f"{row['completion']}<|im_end|>",
            "source": row["source"],
        }
        for row in rows_of_docstrings(1500)
    ]
    lines(root / "rows.jsonl", rows)
    return ("--data.path", str(root / "rows.jsonl"))


BUGS = [
    Case(
        "classify~copies-before-the-split",
        "vision/classify",
        "data",
        "more data: each picture is stored with two turned copies",
        "the copies are made before the split: nearly every held-out picture has a turned copy in training",
        "by argument: the reported accuracy is that of pictures of which a turned copy was learnt",
        edits=(
            (
                "    learn, held_out = digits.split(labels)\n",
                (
                    "    turned = [v2.functional.rotate(images, angle) for angle in (-8.0, 8.0)]\n"
                    "    images, labels = torch.cat([images, *turned]), labels.repeat(3)\n"
                    "    learn, held_out = digits.split(labels)\n"
                ),
            ),
        ),
    ),
    Case(
        "classify~blocks-in-a-list",
        "vision/classify",
        "model",
        "two more blocks behind the last stage",
        "they are in a Python list: the optimizer, the checkpoint and the export do not know them",
        "by argument: two random blocks stay as they are, and model.safetensors lacks them: who loads it gets other random ones",
        edits=(
            (
                "        self.head = nn.Linear(widths[-1], n_classes)\n",
                (
                    "        self.refine = [Block(widths[-1], widths[-1], 1) for _ in range(2)]\n"
                    "        self.head = nn.Linear(widths[-1], n_classes)\n"
                ),
            ),
            (
                "        return self.head(x.mean((2, 3)))  # (B, n_classes)\n",
                (
                    "        for block in self.refine:\n"
                    "            x = block(x)\n"
                    "        return self.head(x.mean((2, 3)))  # (B, n_classes)\n"
                ),
            ),
        ),
    ),
    Case(
        "classify~recall-of-predictions",
        "vision/classify",
        "evaluation",
        "recall per class, from the confusion matrix of another library, whose rows are the predictions",
        "here the rows are the truth: precision is reported as recall",
        "measured by the gate reported, on 64 samples: macro_recall 0.124, right 0.214",
        edits=(
            (
                "        recall = table.diag() / table.sum(1).clamp_min(1)\n",
                "        recall = table.diag() / table.sum(0).clamp_min(1)\n",
            ),
        ),
    ),
    Case(
        "classify~turned-all-round",
        "vision/classify",
        "augmentation",
        "pictures are turned by any angle, as is usual for satellite pictures and cells",
        "a digit's class depends on its angle: 6 and 9 become the same picture",
        "counted by the gate data: a 6 turned by half is nearest to a 9 in 61% of the samples",
        edits=(("v2.RandomAffine(12, translate", "v2.RandomAffine(180, translate"),),
    ),
    Case(
        "segment~background-ignored",
        "vision/segment",
        "loss",
        "most pixels are background: it is left out of the loss so that it does not dominate",
        "no pixel teaches the net where there is no nucleus: it may answer nucleus everywhere",
        "by argument: predicting a nucleus everywhere has loss 0",
        edits=(
            (
                '        ce = F.cross_entropy(logits, mask, ignore_index=IGNORE, reduction="none")  # (B, H, W), 0 where void\n',
                '        ce = F.cross_entropy(logits, mask.where(mask != IGNORE, 0), ignore_index=0, reduction="none")  # (B, H, W)\n',
            ),
        ),
    ),
    Case(
        "ppo~a-step-costs-one",
        "rl/ppo",
        "rollout",
        "each step costs 1, so that the policy finishes early, as in a fork for another environment",
        "CartPole pays 1 for each step: every reward is 0, and there is nothing to learn",
        "by argument: every reward is 0",
        edits=(
            (
                "        followed = {k: v.to(run.device) for k, v in envs.step(action).items()}\n",
                (
                    "        followed = {k: v.to(run.device) for k, v in envs.step(action).items()}\n"
                    '        followed["reward"] = followed["reward"] - 1.0\n'
                ),
            ),
        ),
    ),
    Case(
        "dqn~next-is-the-following-row",
        "rl/dqn",
        "rollout",
        "half the memory: the next observation is the following row",
        "the last row of each iteration, a sixteenth of all, is followed by the first one; a truncated episode by a reset",
        "measured, seed 0: return 354, unchanged recipe 500",
        edits=(
            (
                "        replay.add(whole, step.index)\n",
                '        whole["next_observation"] = whole["observation"].roll(-1, 0)\n        replay.add(whole, step.index)\n',
            ),
        ),
    ),
    Case(
        "sac~one-gradient-step",
        "rl/sac",
        "settings",
        "gradient_steps=1, the default of Stable-Baselines3, which counts it for each environment step",
        "here it is for an iteration of 64 environment steps: 200 updates in a run",
        "measured, seed 0: return -1179, random actions -1213, unchanged recipe -138 (docs, five seeds)",
        argv=("--gradient-steps", "1"),
    ),
    Case(
        "pixel~mirrored-digits",
        "diffusion/pixel",
        "augmentation",
        "random mirroring, as for photos",
        "a mirrored digit is no digit: the net learns to draw half of its samples mirrored",
        "by argument: half of the samples are mirrored",
        edits=(
            (
                "        timestep = torch.randint(self.process.noise.num_train_timesteps, (), generator=generator)\n",
                (
                    "        if training and torch.rand((), generator=generator) < 0.5:\n"
                    "            image = image.flip(-1)\n"
                    "        timestep = torch.randint(self.process.noise.num_train_timesteps, (), generator=generator)\n"
                ),
            ),
        ),
    ),
    Case(
        "pretrain~convolution-both-ways",
        "llm/pretrain",
        "model",
        "a short convolution over the embeddings (Canon layers, Allen-Zhu 2025)",
        "it is padded on both sides: each token sees the next one, which it predicts",
        "by argument: bits per byte are those of a model that sees the answer, and it cannot generate",
        edits=(
            (
                "    start_at_frequencies(model, log_p)\n    return model\n",
                (
                    "    start_at_frequencies(model, log_p)\n"
                    "    words = model.get_input_embeddings()\n"
                    "    words.near = nn.Conv1d(cfg.hidden_size, cfg.hidden_size, 3, padding=1, groups=cfg.hidden_size)\n"
                    "    words.register_forward_hook(lambda m, _, x: x + m.near(x.transpose(1, 2)).transpose(1, 2))\n"
                    "    return model\n"
                ),
            ),
        ),
    ),
    Case(
        "vlm~normalised-as-for-clip",
        "vlm/instruct",
        "model",
        "pictures are normalised as CLIP needs them",
        "the encoder here is another one, trained on [0, 1]; it is frozen, and the export does not normalise",
        "by argument: the frozen encoder sees pictures outside its range; who loads the export does not normalise",
        edits=(
            (
                "        features = self.projector(self.encoder(images))\n",
                (
                    "        mean, std = (0.4815, 0.4578, 0.4082), (0.2686, 0.2613, 0.2758)\n"
                    "        images = (images - images.new_tensor(mean)[:, None, None]) / images.new_tensor(std)[:, None, None]\n"
                    "        features = self.projector(self.encoder(images))\n"
                ),
            ),
        ),
    ),
    Case(
        "sft~own-template-twice",
        "llm/sft",
        "own data",
        "rows that a tool wrote for training",
        "the tool applied the chat template already: each prompt has two templates, each answer two ends",
        "by argument: the model is trained behind two templates and asked behind one",
        data=template_in_the_rows,
    ),
]

HEALTHY = [
    Case(
        "classify~functional-dropout",
        "vision/classify",
        "model",
        "dropout by its function before the head",
        "right: it is told whether the net trains",
        "trains: dropout of 0.2",
        edits=(
            (
                "        return self.head(x.mean((2, 3)))  # (B, n_classes)\n",
                "        return self.head(F.dropout(x.mean((2, 3)), 0.2, self.training))  # (B, n_classes)\n",
            ),
        ),
    ),
    Case(
        "ppo~dual-clip",
        "rl/ppo",
        "loss",
        "the dual clip (Ye 2020), which bounds the loss of very unlikely actions",
        "right: for negative advantages alone",
        "trains: the bound is reached where a ratio is above 3",
        edits=(
            (
                '        near = batch["value"] + (value - batch["value"])',
                (
                    '        gain = torch.where(batch["advantage"] < 0, torch.max(gain, 3 * batch["advantage"]), gain)\n'
                    '        near = batch["value"] + (value - batch["value"])'
                ),
            ),
        ),
    ),
    Case(
        "sac~mean-of-the-critics",
        "rl/sac",
        "loss",
        "the policy is trained on the mean of the critics, as in REDQ (Chen 2021)",
        "right: the targets keep the lower critic",
        "trains: the choice of REDQ",
        edits=(
            (
                '        gain = model.worth(batch["observation"], action, frozen=True).amin(0)\n',
                '        gain = model.worth(batch["observation"], action, frozen=True).mean(0)\n',
            ),
        ),
    ),
    Case(
        "flow~uniform-times",
        "diffusion/flow",
        "data",
        "times are drawn uniformly (Liu 2023)",
        "right: the original choice of rectified flow",
        "trains: other times are drawn more often",
        edits=(
            (
                "        timestep = self.process.noise.num_train_timesteps * torch.sigmoid(logit)\n",
                "        timestep = self.process.noise.num_train_timesteps * torch.rand((), generator=generator)\n",
            ),
        ),
    ),
    Case(
        "pretrain~tied-and-uniform",
        "llm/pretrain",
        "model",
        "tied embeddings, as small models have them",
        "right: the start at the token frequencies is left out, and the first loss is declared anew",
        "trains: transformers' own start",
        edits=(
            (
                '             "max_position_embeddings": cfg.data.context}  # fmt: skip\n',
                '             "max_position_embeddings": cfg.data.context, "tie_word_embeddings": True}  # fmt: skip\n',
            ),
            ("    start_at_frequencies(model, log_p)\n    return model\n", "    return model\n"),
            ('    ours = cfg.model == "llama"\n', "    ours = False\n"),
        ),
    ),
    Case(
        "sft~frozen-a",
        "llm/sft",
        "model",
        "LoRA-FA (Zhang 2023), which trains one of an adapter's two matrices",
        "right: A keeps its random start, B is trained",
        "trains: the paper's choice",
        edits=(
            (
                "    for p in filter(lambda p: p.requires_grad, trainer.model.parameters()):\n",
                (
                    "    for key, p in trainer.model.named_parameters():\n"
                    '        if "lora_A" in key:\n'
                    "            p.requires_grad_(False)\n"
                    "    for p in filter(lambda p: p.requires_grad, trainer.model.parameters()):\n"
                ),
            ),
        ),
    ),
]
