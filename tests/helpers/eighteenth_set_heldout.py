"""Forks and settings that are wrong, and healthy variants, from outside: the half of the eighteenth set that is held out.

The half is the last hex digit of the id's SHA-256, modulo 2: odd here; the other is in eighteenth_set.py. Run by
`python -m tests.helpers.set_run --set eighteenth --half heldout`.
"""

import json
from pathlib import Path

from tests.helpers.ninth_set import russian
from tests.helpers.set_cases import Case, distinct, lines, mask_folders, preferences, rows_of_docstrings, scenes


def unannotated(folder: Path) -> tuple[str, ...]:
    pictures, masks = scenes(500)
    blank = [m * 0 if i % 5 != 4 and i % 3 == 0 else m for i, m in enumerate(masks)]
    mask_folders(folder, pictures, blank)
    return ("--data.path", str(folder))


def mojibake(folder: Path) -> tuple[str, ...]:
    given = russian(folder)
    for file in folder.rglob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        lines(file, [{k: v.encode().decode("latin-1") for k, v in row.items()} for row in rows])
    return given


def rate_limited(folder: Path) -> tuple[str, ...]:
    rows = [{"prompt": row["prompt"], "completion": row["completion"]} for row in rows_of_docstrings(1500)]
    for row in rows[::10] + rows[3::10] + rows[6::10]:
        row["completion"] = "Error: rate limit exceeded, please try again in 20 s."
    lines(folder / "generated.jsonl", rows)
    return ("--data.path", str(folder / "generated.jsonl"))


def llama_factory(folder: Path) -> tuple[str, ...]:
    rows = [{"conversations": [{"from": "human", "value": row["prompt"]}], "chosen": {"from": "gpt", "value": row["chosen"]},
             "rejected": {"from": "gpt", "value": row["rejected"]}} for row in distinct(preferences(2500))]  # fmt: skip
    lines(folder / "preferences.jsonl", rows)
    return ("--data.path", str(folder / "preferences.jsonl"))


DOCK = """class Dock(gymnasium.Env):
    \"\"\"A ship drifts on a line; thrust left, none or right. The cost is its distance from the dock.\"\"\"

    observation_space = Box(-numpy.inf, numpy.inf, (2,), numpy.float32)
    action_space = Discrete(3)

    def __init__(self):
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.speed = self.np_random.uniform(-1, 1, 2)
        return self.seen(), {}

    def seen(self):
        return numpy.array([self.place, self.speed], numpy.float32)

    def step(self, action):
        self.speed = 0.95 * self.speed + 0.1 * (int(action) - 1)
        self.place += 0.1 * self.speed
        self.steps += 1
        return self.seen(), -abs(float(self.place)), False, self.steps >= 100, {}


gymnasium.register("Dock-v0", Dock)


"""


BUGS = [
    Case(
        "classify~average-without-ramp",
        "vision/classify",
        "average",
        "the plain average of the papers with timm's usual decay",
        "1,890 steps with a decay of 0.9999 and no ramp: four fifths of what is evaluated and exported are the initial weights",
        "by argument: 0.9999^1890 = 0.83",
        edits=(
            (
                "# ---------------------------------------------------------------------------------------------------------------- stage\n",
                "class Average(core.Ema):\n"
                '    """The plain average of the papers."""\n'
                "\n"
                "    @torch.no_grad()\n"
                "    def update(self, trained: nn.Module) -> None:\n"
                "        for mine, theirs in zip(self.model.parameters(), trained.parameters(), strict=True):\n"
                "            mine.lerp_(theirs, 1 - self.decay)\n"
                "\n"
                "\n"
                "# ---------------------------------------------------------------------------------------------------------------- stage\n",
            ),
            (
                "ema = core.Ema(model, cfg.ema) if cfg.ema else None",
                "ema = Average(model, cfg.ema) if cfg.ema else None",
            ),
        ),
        argv=(
            "--ema",
            "0.9999",
        ),
    ),
    Case(
        "classify~cutmix-by-its-draw",
        "vision/classify",
        "labels",
        "CutMix as in the paper, whose rectangles may leave the picture",
        "the rectangle is cut off at the border, but the share of the labels is the one that was drawn",
        "by argument: many targets give up to half of their mass to a digit of which a corner is seen",
        edits=(
            (
                "# ---------------------------------------------------------------------------------------------------------------- model\n",
                "class CutMix(mixing.Mixed):\n"
                '    """Rectangles around a random centre (Yun 2019)."""\n'
                "\n"
                "    def get(self, index: int, generator: torch.Generator | None) -> dict:\n"
                "        if generator is None:\n"
                "            return super().get(index, generator)\n"
                "        own = self.data.get(index, generator)\n"
                "        other = self.data.get(int(torch.randint(len(self), (), generator=generator)), generator)\n"
                "        lam = 0.5 + 0.5 * torch.rand((), generator=generator)\n"
                '        image, side = own["image"].clone(), own["image"].shape[-1]\n'
                "        half = int(side * (1 - lam).sqrt()) // 2\n"
                "        y, x = torch.randint(side, (2,), generator=generator).tolist()\n"
                "        rows, columns = slice(max(0, y - half), y + half), slice(max(0, x - half), x + half)\n"
                '        image[:, rows, columns] = other["image"][:, rows, columns]\n'
                '        return {**own, "image": image, "label2": other["label"], "lam": lam}\n'
                "\n"
                "\n"
                "# ---------------------------------------------------------------------------------------------------------------- model\n",
            ),
            (
                "train_data, val_data = mixing.Mixed(train_data, cfg.mix, near), mixing.Mixed(val_data, cfg.mix)",
                "train_data, val_data = CutMix(train_data, cfg.mix, near), CutMix(val_data, cfg.mix)",
            ),
        ),
        argv=(
            "--mix.cutmix",
            "1.0",
        ),
    ),
    Case(
        "segment~own-unannotated-are-empty",
        "vision/segment",
        "own data",
        "masks of an annotation tool, exported for every picture",
        "a third of the training pictures was not annotated yet: the tool writes a mask of zeros for them",
        "by argument: every third picture teaches that digits are background",
        data=unannotated,
    ),
    Case(
        "detect~centreness-left-out",
        "vision/detect",
        "loss",
        "classes and boxes alone: the third term stays near 0.6 and only blurs the log",
        "the scores are still multiplied by the centreness, which nothing trains now",
        "by argument: boxes of the border rank as high as those of the middle",
        edits=(
            (
                '        return model(batch["image"], boxes.targets(batch))\n',
                '        terms = model(batch["image"], boxes.targets(batch))\n'
                '        return {k: v for k, v in terms.items() if k != "bbox_ctrness"}\n',
            ),
        ),
    ),
    Case(
        "pretrain~own-mojibake",
        "llm/pretrain",
        "own data",
        "Russian stories, read from an export without its encoding",
        "UTF-8 that was read as Latin-1 and written as UTF-8 again: every letter is two others, of four bytes",
        "by argument: the model writes what nobody can read; the bits per byte are halved by the doubled bytes",
        argv=(
            "--data.vocabulary",
            "512",
            "--train.epochs",
            "8",
        ),
        data=mojibake,
    ),
    Case(
        "sft~pads-masked-by-their-id",
        "llm/sft",
        "labels",
        "padding masked in the labels, as in many collators",
        "the pad token of this tokenizer is the token that ends a turn: no answer's end is scored",
        "by argument: the model never learns to stop",
        edits=(
            (
                "    for split in data.values():\n        split.collator = trainer.data_collator\n",
                "    def collator(examples: list[dict]) -> dict:\n"
                "        batch = trainer.data_collator(examples)\n"
                '        batch["labels"][batch["input_ids"] == tokenizer.pad_token_id] = pairs.IGNORED\n'
                "        return batch\n"
                "\n"
                "    for split in data.values():\n"
                "        split.collator = collator\n",
            ),
        ),
    ),
    Case(
        "sft~own-rate-limit-answers",
        "llm/sft",
        "own data",
        "answers generated through a service",
        "three in ten answers are the service's error message, the same for all",
        "by argument: the model answers three in ten questions with an error, or the likeliest ones of them",
        argv=(
            "--train.epochs",
            "1",
        ),
        data=rate_limited,
    ),
    Case(
        "ppo~own-counter-not-reset",
        "rl/ppo",
        "own environment",
        "an own environment with a limit of 100 steps, registered in the fork",
        "reset() does not set the counter back: every episode after the first has one step",
        "by argument: training sees hardly anything but first steps from a random start",
        edits=(
            (
                "import torch\nfrom gymnasium.spaces import Box, Discrete\n",
                "import gymnasium\nimport numpy\nimport torch\nfrom gymnasium.spaces import Box, Discrete\n",
            ),
            (
                '@dataclass\nclass Config(core.Config):\n    """Settings of rl/ppo.',
                DOCK + '@dataclass\nclass Config(core.Config):\n    """Settings of rl/ppo.',
            ),
        ),
        argv=(
            "--env",
            "Dock-v0",
            "--gamma",
            "0.97",
        ),
    ),
    Case(
        "dqn~one-minibatch-for-all-updates",
        "rl/dqn",
        "data",
        "the draws of an iteration made at once",
        "the index is 0 for all updates of an iteration: 32 steps on one minibatch",
        "by argument: a thirty-second part of the samples, each fitted 32 times",
        edits=(
            (
                "rows = {k: v[i % at_once] for k, v in drawn.items()}",
                "rows = {k: v[i // cfg.gradient_steps] for k, v in drawn.items()}",
            ),
        ),
    ),
    Case(
        "dqn~no-target-network",
        "rl/dqn",
        "targets",
        "one net less to keep in mind",
        "the policy is its own target: targets move with every update, and double DQN is plain maximisation",
        "by argument: values chase themselves and run away",
        edits=(
            (
                "minibatches(cfg, run, policy, target.net, replay, step.index, progress)",
                "minibatches(cfg, run, policy, policy, replay, step.index, progress)",
            ),
        ),
    ),
    Case(
        "sac~maximum-of-the-critics",
        "rl/sac",
        "targets",
        "the better of both critics' opinions",
        "the larger value instead of the lower one: errors upwards are fed back into the targets",
        "by argument: overestimation, the reason for which there are two critics",
        edits=(
            (
                'value = target.worth(steps["next_observation"], action).amin(0) * target.rewards.rms',
                'value = target.worth(steps["next_observation"], action).amax(0) * target.rewards.rms',
            ),
        ),
    ),
    Case(
        "latent~average-by-another-name",
        "diffusion/latent",
        "average",
        "a clearer name in the checkpoint",
        'the loop asks for "ema" in the state: the average is never updated, but evaluated and exported',
        "by argument: the samples are those of the untrained net",
        edits=(
            (
                '        state={"ema": ema} if ema else {},\n',
                '        state={"average": ema} if ema else {},\n',
            ),
        ),
    ),
    Case(
        "whisper~frames-grouped-by-phase",
        "distill/whisper",
        "model",
        "the five frames of a step brought into the row of frames",
        "a transpose too many: first all first frames of the steps, then all second ones",
        "by argument: frame 1 of 50 is due where frame 1 of the tenth step stands",
        edits=(
            (
                "unflatten(-1, (5, -1)).flatten(1, 2)  # (B, 5 T / 2, d)",
                "unflatten(-1, (5, -1)).transpose(1, 2).flatten(1, 2)  # (B, 5 T / 2, d)",
            ),
        ),
    ),
    Case(
        "instruct~blue-for-red",
        "vlm/instruct",
        "data",
        "training pictures read by OpenCV",
        "their channels are in the order BGR, those of the evaluation and of every user in RGB",
        "by argument: the questions about colours are answered with red for blue",
        edits=(
            (
                'rows.nll(model(batch), batch["labels"])',
                'rows.nll(model({**batch, "image": batch["image"].flip(-3)}), batch["labels"])',
            ),
        ),
    ),
]
HEALTHY = [
    Case(
        "classify~small-vit",
        "vision/classify",
        "architecture",
        "a small vision transformer of transformers, made from its config class",
        "patches of four pixels, four layers, a head of zeros",
        "by argument: 49 tokens of 64 channels are enough for digits",
        edits=(
            (
                "# ---------------------------------------------------------------------------------------------------------------- stage\n",
                "class SmallViT(nn.Module):\n"
                '    """A ViT with patches of 4 x 4 pixels. Images come in as [0, 1]."""\n'
                "\n"
                "    def __init__(self, mean: Tensor, std: Tensor, n_classes: int):\n"
                "        from transformers import ViTConfig, ViTForImageClassification\n"
                "\n"
                "        super().__init__()\n"
                '        self.register_buffer("mean", mean.view(-1, 1, 1))\n'
                '        self.register_buffer("std", std.view(-1, 1, 1))\n'
                "        self.net = ViTForImageClassification(ViTConfig(\n"
                "            hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, image_size=28, patch_size=4,\n"
                "            num_channels=len(mean), num_labels=n_classes))\n"
                "        nn.init.zeros_(self.net.classifier.weight)\n"
                "        nn.init.zeros_(self.net.classifier.bias)\n"
                "\n"
                "    def forward(self, images: Tensor) -> Tensor:\n"
                "        return self.net((images - self.mean) / self.std).logits\n"
                "\n"
                "\n"
                "# ---------------------------------------------------------------------------------------------------------------- stage\n",
            ),
            (
                "    model = ResNet(mean, std, cfg.widths, len(classes))\n",
                "    model = SmallViT(mean, std, len(classes))\n",
            ),
        ),
        argv=(
            "--optim.lr",
            "1e-3",
        ),
    ),
    Case(
        "classify~mish-and-average-pooling",
        "vision/classify",
        "architecture",
        "ResNet-D: strides by average pooling, with Mish instead of ReLU",
        "both branches of a block halve the map in the same way",
        "by argument: He 2019 and Misra 2019",
        edits=(
            (
                "        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)\n",
                "        halve = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()\n"
                "        self.conv1 = nn.Sequential(halve, nn.Conv2d(n_in, n_out, 3, 1, 1, bias=False))\n",
            ),
            (
                "        self.shortcut = nn.Identity() if same else nn.Conv2d(n_in, n_out, 1, stride, bias=False)\n",
                "        self.shortcut = nn.Identity() if same else nn.Sequential(halve, nn.Conv2d(n_in, n_out, 1, 1, bias=False))\n",
            ),
            (
                "        h = F.relu(self.norm1(self.conv1(x)))\n        return F.relu(self.shortcut(x) + self.norm2(self.conv2(h)))\n",
                "        h = F.mish(self.norm1(self.conv1(x)))\n        return F.mish(self.shortcut(x) + self.norm2(self.conv2(h)))\n",
            ),
        ),
    ),
    Case(
        "detect~blurred-and-grey",
        "vision/detect",
        "augmentation",
        "some pictures blurred, some without colour, besides the recipe's own augmentation",
        "boxes stay where they are; the digits' shapes remain",
        "by argument: usual augmentation",
        edits=(
            (
                "    steps: list[nn.Module] = [v2.RandomPhotometricDistort()]\n",
                "    steps: list[nn.Module] = [v2.RandomPhotometricDistort(), v2.RandomApply([v2.GaussianBlur(3)], 0.2), v2.RandomGrayscale(0.1)]\n",
            ),
        ),
    ),
    Case(
        "reward~own-llama-factory",
        "llm/reward",
        "own data",
        "preferences in LLaMA-Factory's form",
        "a conversation before the answers, both answers as one turn each",
        "by argument: the packaged pairs in another form",
        argv=(
            "--train.epochs",
            "0.4",
        ),
        data=llama_factory,
    ),
    Case(
        "dqn~expected-sarsa",
        "rl/dqn",
        "targets",
        "expected SARSA: the value of a policy that explores as the final one does",
        "a mixture of the best value and the mean with the final probability of a random action",
        "by argument: van Seijen 2009; four hundredths of the mean",
        edits=(
            (
                '    return rows["earned"] + rows["counts"] * (worth.gather(-1, best).squeeze(-1) * target.returns.rms)\n',
                "    random = cfg.exploration_final_eps\n"
                "    value = (1 - random) * worth.gather(-1, best).squeeze(-1) + random * worth.mean(-1)\n"
                '    return rows["earned"] + rows["counts"] * (value * target.returns.rms)\n',
            ),
        ),
    ),
    Case(
        "latent~as-stable-diffusion",
        "diffusion/latent",
        "setting",
        "noise prediction, scaled linear betas and equal weights, as in Stable Diffusion",
        "settings of the recipe",
        "by argument: Rombach 2022",
        argv=(
            "--noise.prediction-type",
            "epsilon",
            "--noise.beta-schedule",
            "scaled_linear",
            "--noise.snr-gamma",
            "inf",
        ),
    ),
    Case(
        "logits~elastic-and-nadam",
        "distill/logits",
        "augmentation",
        "elastic distortions after the affine ones, and NAdam",
        "teacher and student see the same distorted digit",
        "by argument: Simard 2003; the distortions keep digits readable",
        edits=(
            (
                "from torch.nn import functional as F\n",
                "from torch.nn import functional as F\nfrom torchvision.transforms import v2\n",
            ),
            (
                "    train_data.augment = augment if cfg.augment else None\n",
                "    train_data.augment = v2.Compose([augment, v2.ElasticTransform(alpha=15.0, sigma=4.0)]) if cfg.augment else None\n",
            ),
            (
                '        optimizers={"main": core.make_optimizer(model, cfg.optim)},\n',
                '        optimizers={"main": torch.optim.NAdam(model.parameters(), lr=cfg.optim.lr)},\n',
            ),
        ),
        argv=(
            "--optim.lr",
            "5e-3",
        ),
    ),
    Case(
        "instruct~linear-projector",
        "vlm/instruct",
        "architecture",
        "a projector of one layer, as in the first LLaVA",
        "the norms around it stay",
        "by argument: Liu 2023; the language model is trained, too",
        edits=(
            (
                "        self.layers = nn.Sequential(nn.Linear(n_in, width), nn.GELU(), nn.Linear(width, n_out))\n",
                "        self.layers = nn.Linear(n_in, n_out)\n",
            ),
        ),
    ),
]
