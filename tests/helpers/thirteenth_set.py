"""Healthy forks, settings and own data: the open half of the thirteenth set.

The half is the first byte of the id's SHA-256, modulo 2; the parity of its last hex digit is the same. The other half is held out in
thirteenth_set_heldout.py. The author of the set had read the recipes, not the gates. Run by
`python -m tests.helpers.set_run --set thirteenth`.
"""

import random
from pathlib import Path

import numpy
from PIL import Image, ImageDraw

from tests.helpers.set_cases import Case, lines, rows_of_docstrings


def grey_textures(root: Path) -> tuple[str, ...]:
    """160 plain, 70 striped and 40 dotted surfaces as grey PNG files of 24 to 96 pixels, with noise and uneven light."""
    draws, noise = random.Random(0), numpy.random.default_rng(0)
    for name, count in (("plain", 160), ("striped", 70), ("dotted", 40)):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            width, height = draws.randint(24, 96), draws.randint(24, 96)
            back = draws.uniform(70, 180) + numpy.linspace(-1, 1, width)[None] * draws.uniform(-25, 25)
            drawn = Image.fromarray((back + noise.normal(0, 8, (height, width))).clip(0, 255).astype("uint8"))
            pen, tone = ImageDraw.Draw(drawn), draws.choice((20, 235))
            gap = max(5, min(width, height) // draws.randint(4, 7))
            for x in range(draws.randrange(gap), width, gap):
                if name == "striped":
                    pen.line((x, 0, x, height), fill=tone, width=max(2, gap // 3))
                for y in range(draws.randrange(gap), height, gap) if name == "dotted" else ():
                    pen.ellipse((x, y, x + gap // 2, y + gap // 2), fill=tone)
            drawn.save(root / name / f"{name}_{i:03}.png")
    return ("--data.path", str(root))


def sentences(root: Path) -> tuple[str, ...]:
    """JSON lines: a sentence in `body`, next to an id, a nested entry, an empty one and a number that nothing reads."""
    rows = [
        {
            "id": i,
            "body": row["prompt"],
            "meta": {"module": row["source"], "tags": ["doc", "python"]},
            "lang": None,
            "quality": round(0.5 + 0.5 * (i % 7) / 7, 3),
        }
        for i, row in enumerate(rows_of_docstrings(5000))
    ]
    lines(root / "sentences.jsonl", rows)
    return ("--data.path", str(root / "sentences.jsonl"))


TANK = '''
class MixingTank(gymnasium.Env):
    """Hold the level (mm) and the temperature (K) of a tank by a hot and a cold valve of different range; every deviation costs."""

    observation_space = gymnasium.spaces.Box(0.0, 1000.0, (4,), "float32")
    action_space = gymnasium.spaces.Box(numpy.float32([0, 0]), numpy.float32([4, 2]), dtype="float32")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level, self.heat = self.np_random.uniform(200, 900), self.np_random.uniform(285, 340)
        self.goal = self.np_random.uniform((300, 300), (800, 340))
        return self.seen(), {}

    def seen(self):
        return numpy.array([self.level, self.heat, *self.goal], "float32")

    def step(self, action):
        hot, cold = (10 * float(flow) for flow in action)
        self.heat += (hot * (350 - self.heat) + cold * (280 - self.heat)) / max(self.level, 50.0)
        self.level = min(1000.0, 0.95 * self.level + hot + cold)
        off = abs(self.level - self.goal[0]) / 100 + abs(self.heat - self.goal[1]) / 10
        return self.seen(), -float(off), False, False, {}


if "MixingTank-v0" not in gymnasium.registry:
    gymnasium.register("MixingTank-v0", MixingTank, max_episode_steps=60)


'''

BUGS: list[Case] = []

HEALTHY = [
    Case(
        "classify~additive-margin",
        "vision/classify",
        "loss",
        "additive margin softmax (Wang 2018), a loss of face recognition: cosines times 16, a margin of 0.2 for the true class in training",
        "right: the margin is in the loss alone, the answer is the largest cosine; its first value depends on random cosines and is not declared",
        "measured without gates: accuracy 0.965 after 4 epochs",
        edits=(
            (
                "        self.head = nn.Linear(widths[-1], n_classes)\n"
                "        nn.init.zeros_(self.head.weight)  # every class equally likely: the first loss is ln N, no first steps lost\n"
                "        nn.init.zeros_(self.head.bias)\n",
                "        self.head = nn.Linear(widths[-1], n_classes, bias=False)  # a direction for each class\n",
            ),
            (
                "        return self.head(x.mean((2, 3)))  # (B, n_classes)\n",
                "        return SCALE * F.linear(F.normalize(x.mean((2, 3)), dim=1), F.normalize(self.head.weight, dim=1))\n",
            ),
            (
                "class ResNet(nn.Module):\n",
                'SCALE, MARGIN = 16.0, 0.2\n"""Of additive margin softmax (Wang 2018)."""\n\n\nclass ResNet(nn.Module):\n',
            ),
            (
                '        logits = model(batch["image"])\n'
                '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}\n',
                '        logits = model(batch["image"]) - SCALE * MARGIN * F.one_hot(batch["label"], n)\n'
                '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}\n',
            ),
            ("core.Expect(initial_loss=balanced.first_loss, loss_floor", "core.Expect(loss_floor"),
        ),
        argv=("--label-smoothing", "0"),
        source="https://arxiv.org/abs/1801.05599",
    ),
    Case(
        "classify~own-grey-textures",
        "vision/classify",
        "own data",
        "grey PNG files of many sizes: three classes of 160, 70 and 40 pictures, class weights",
        "right: 270 valid files in class folders, no split of their own; the imbalance is met by --balance.by weights",
        "measured without gates: accuracy 0.870, mean recall 0.708 after 20 epochs",
        data=grey_textures,
        argv=("--train.epochs", "30", "--train.batch-size", "16", "--image-size", "32", "--balance.by", "weights"),
    ),
    Case(
        "classify~square-root-sampling",
        "vision/classify",
        "sampler",
        "square-root sampling of a long-tailed set (Mahajan 2018): repeats, so that a class is drawn by the root of its size",
        "right: every training sample is there once or more, and repeats get new draws; made as the recipe's own sampler is",
        "measured without gates: accuracy 0.869 after 12 epochs",
        edits=(
            (
                "# ---------------------------------------------------------------------------------------------------------------- stage\n",
                "class Rooted(balancing.Even):\n"
                '    """`data` with each class as often as the root of its size demands; none becomes rarer."""\n'
                "\n"
                "    def __init__(self, data: core.Data, labels: Tensor):\n"
                "        self.data, self.fields, self.notes = data, data.fields, data.notes\n"
                "        own = [(labels == c).nonzero().flatten() for c in labels.unique().tolist()]\n"
                "        most = max(map(len, own))\n"
                "        times = [round((most * len(i)) ** 0.5) for i in own]\n"
                "        self.places = torch.cat([i[torch.arange(k) % len(i)] for i, k in zip(own, times, strict=True)]).tolist()\n"
                "\n\n"
                "# ---------------------------------------------------------------------------------------------------------------- stage\n",
            ),
            (
                "    train_data = balancing.repeated(cfg.balance, train_data, labels[learn])\n",
                "    train_data = Rooted(train_data, labels[learn])\n",
            ),
        ),
        argv=("--balance.ratio", "20"),
        source="https://arxiv.org/abs/1805.00932",
    ),
    Case(
        "classify~auxiliary-rotation",
        "vision/classify",
        "auxiliary head",
        "a second head names the quarter turn of a turned copy (Gidaris 2018; as in S4L, Zhai 2019)",
        "right: the turn is drawn in the sample and fixed in evaluation, both fields are declared, the first loss is ln 10 + 0.5 ln 4",
        "measured without gates: accuracy 0.866 after 4 epochs",
        edits=(
            (
                '        return {"image": image, "label": self.labels[index]}\n',
                "        turn = index % 4 if generator is None else int(torch.randint(4, (), generator=generator))\n"
                '        turned = {"turned": image.rot90(turn, (-2, -1)), "turn": torch.tensor(turn)}\n'
                '        return {"image": image, "label": self.labels[index], **turned}\n',
            ),
            (
                '"label": core.Field("target", classes=classes)}\n',
                '"label": core.Field("target", classes=classes)}\n'
                '        self.fields["turned"] = core.Field("input", low=0.0, high=1.0)\n'
                '        self.fields["turn"] = core.Field("target", classes=("0", "90", "180", "270"))\n',
            ),
            (
                "        nn.init.zeros_(self.head.bias)\n"
                "\n"
                "    def forward(self, images: Tensor) -> Tensor:\n"
                "        x = (images - self.mean) / self.std  # (B, C, H, W)\n",
                "        nn.init.zeros_(self.head.bias)\n"
                "        self.turn = nn.Linear(widths[-1], 4)\n"
                "        nn.init.zeros_(self.turn.weight)\n"
                "        nn.init.zeros_(self.turn.bias)\n"
                "\n"
                "    def forward(self, images: Tensor) -> Tensor:\n"
                "        return self.head(self.features(images))  # (B, n_classes)\n"
                "\n"
                "    def features(self, images: Tensor) -> Tensor:\n"
                "        x = (images - self.mean) / self.std  # (B, C, H, W)\n",
            ),
            ("        return self.head(x.mean((2, 3)))  # (B, n_classes)\n", "        return x.mean((2, 3))\n"),
            (
                '        logits = model(batch["image"])\n'
                '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}\n',
                '        logits = model(batch["image"])\n'
                '        turn = F.cross_entropy(model.turn(model.features(batch["turned"])), batch["turn"], reduction="sum")\n'
                '        ce = F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")\n'
                '        return {"ce": ce, "turn": 0.5 * turn}\n',
            ),
            (
                "core.Expect(initial_loss=balanced.first_loss,",
                "core.Expect(initial_loss=balanced.first_loss + 0.5 * math.log(4),",
            ),
            ("from pathlib import Path\n\nimport torch\n", "from pathlib import Path\nimport math\n\nimport torch\n"),
        ),
        source="https://arxiv.org/abs/1905.03670",
    ),
    Case(
        "classify~fixed-gabor-stem",
        "vision/classify",
        "frozen layer",
        "the first layer is a fixed bank of Gabor filters (as in VOneNet, Dapello 2020); SGD with Nesterov momentum, linear decay",
        "right: the stem needs no gradient, is in no optimiser, and is declared as frozen on purpose",
        "measured without gates: accuracy 0.854 after 2 epochs",
        edits=(
            (
                "class ResNet(nn.Module):\n",
                "def gabor(n: int, channels: int) -> Tensor:\n"
                '    """`n` filters (n, channels, 5, 5) of norm 1: n / 2 directions in two phases each."""\n'
                '    y, x = torch.meshgrid(torch.arange(-2.0, 3), torch.arange(-2.0, 3), indexing="ij")\n'
                "    angle, phase = torch.arange(n) // 2 * (2 * math.pi / n), torch.arange(n) % 2 * (math.pi / 2)\n"
                "    along = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]\n"
                "    wave = torch.exp(-(x.square() + y.square()) / 4) * torch.cos(1.6 * along + phase[:, None, None])\n"
                "    wave = wave - wave.mean((1, 2), keepdim=True)\n"
                "    wave = wave / wave.flatten(1).norm(dim=1)[:, None, None]\n"
                "    return (wave[:, None] / channels**0.5).repeat(1, channels, 1, 1)\n"
                "\n\n"
                "class ResNet(nn.Module):\n",
            ),
            (
                "        self.stem = nn.Conv2d(len(mean), widths[0], 5, 2, 2, bias=False)\n",
                "        self.stem = nn.Conv2d(len(mean), widths[0], 5, 2, 2, bias=False)\n"
                "        self.stem.weight = nn.Parameter(gabor(widths[0], len(mean)), requires_grad=False)\n",
            ),
            ("new_parameters=fresh)\n", 'new_parameters=fresh, frozen=("stem",))\n'),
            ("from pathlib import Path\n\nimport torch\n", "from pathlib import Path\nimport math\n\nimport torch\n"),
        ),
        argv=(
            "--optim.name",
            "sgd",
            "--optim.lr",
            "0.1",
            "--optim.weight-decay",
            "5e-4",
            "--optim.schedule",
            "linear",
        ),
        source="https://arxiv.org/abs/2006.08498",
    ),
    Case(
        "segment~two-scales",
        "vision/segment",
        "auxiliary head",
        "deep supervision (Lee 2015; nnU-Net, Isensee 2021): a second head on the features of half the resolution, with half the weight",
        "right: its logits are enlarged to the mask, void is ignored, it has its own count; 0.5 ln n is added to the first loss",
        "measured without gates: IoU of nuclei 0.892 after 10 epochs",
        edits=(
            (
                "        nn.init.zeros_(self.head.bias)\n"
                "\n"
                "    def forward(self, images: Tensor) -> Tensor:\n"
                "        x = (images - self.mean) / self.std  # (B, C, H, W)\n",
                "        nn.init.zeros_(self.head.bias)\n"
                "        self.coarse = nn.Conv2d(widths[1], n_classes * fold**2, 1)\n"
                "        nn.init.zeros_(self.coarse.weight)\n"
                "        nn.init.zeros_(self.coarse.bias)\n"
                "\n"
                "    def forward(self, images: Tensor) -> Tensor:\n"
                "        return self.both(images)[0]\n"
                "\n"
                "    def both(self, images: Tensor) -> tuple[Tensor, Tensor]:\n"
                '        """Logits (B, n_classes, H, W) of the last features, and of those of half the resolution."""\n'
                "        x = (images - self.mean) / self.std  # (B, C, H, W)\n",
            ),
            (
                "        for block, fine in zip(self.up, reversed(seen[:-1]), strict=True):\n"
                "            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), fine], 1))\n"
                "        return F.pixel_shuffle(self.head(x), self.fold)  # (B, n_classes, H, W)\n",
                "        for block, fine in zip(self.up, reversed(seen[:-1]), strict=True):\n"
                "            half, x = x, block(torch.cat([F.interpolate(x, scale_factor=2.0), fine], 1))\n"
                "        coarse = F.interpolate(self.coarse(half), scale_factor=2.0)\n"
                "        return F.pixel_shuffle(self.head(x), self.fold), F.pixel_shuffle(coarse, self.fold)\n",
            ),
            (
                '        return {"ce": pixels.sum(), "dice": (pixels > 0).sum()}\n',
                '        return {"ce": pixels.sum(), "coarse": pixels.sum(), "dice": (pixels > 0).sum()}\n',
            ),
            (
                '        logits, mask = model(batch["image"]).float(), batch["mask"]  # (B, n, H, W), (B, H, W)\n',
                '        (logits, coarse), mask = model.both(batch["image"]), batch["mask"]  # (B, n, H, W) twice, (B, H, W)\n',
            ),
            (
                '        terms = {"ce": (ce * (1 - (-ce).exp()) ** cfg.focal if cfg.focal else ce).sum()}\n',
                '        terms = {"ce": (ce * (1 - (-ce).exp()) ** cfg.focal if cfg.focal else ce).sum()}\n'
                '        terms["coarse"] = 0.5 * F.cross_entropy(coarse, mask, ignore_index=IGNORE, reduction="sum")\n',
            ),
            (
                '            b["mask"], mask_expectations.unsure(b["mask"], n), n, **of_terms\n        ),\n',
                '            b["mask"], mask_expectations.unsure(b["mask"], n), n, **of_terms\n'
                "        )\n"
                "        + 0.5 * math.log(n),\n"
                "        floor_known=False,\n",
            ),
        ),
        source="https://arxiv.org/abs/1904.08128",
    ),
    Case(
        "pixel~clean-prediction",
        "diffusion/pixel",
        "parameterisation",
        "the net predicts the picture (x0-prediction, Salimans & Ho 2022) with min-SNR weights of this type",
        "right: target, weight, implied picture and the samplers' prediction_type `sample` are changed together",
        "measured without gates: agreement 0.54 after 4 epochs (chance 0.1)",
        edits=(
            (
                "# ----------------------------------------------------------------------------------------------------------------- data\n",
                "class Clean(Process):\n"
                '    """The noise process for a net that predicts the picture."""\n'
                "\n"
                "    def __init__(self, noise: Noise):\n"
                "        steps, betas = noise.num_train_timesteps, noise.beta_schedule\n"
                "        super().__init__(\n"
                "            noise,\n"
                "            scheduler=DDPMScheduler(\n"
                "                num_train_timesteps=steps,\n"
                "                beta_schedule=betas,\n"
                '                prediction_type="sample",\n'
                '                timestep_spacing="trailing",\n'
                "            ),\n"
                "        )\n"
                "        signal = self.scheduler.alphas_cumprod.double()\n"
                '        self.weight = noise.weights("picture", signal / (1 - signal)).float()\n'
                "\n"
                "    def target(self, image: Tensor, noise: Tensor, t: Tensor) -> Tensor:\n"
                "        return image\n"
                "\n"
                "    def clean(self, prediction: Tensor, noisy: Tensor, t: Tensor) -> Tensor:\n"
                "        return prediction.clamp(-self.bound, self.bound)\n"
                "\n\n"
                "# ----------------------------------------------------------------------------------------------------------------- data\n",
            ),
            (
                "    process, n, sampling = Process(cfg.noise), len(classes), cfg.sampling\n",
                "    process, n, sampling = Clean(cfg.noise), len(classes), cfg.sampling\n",
            ),
            (
                "import torch\nfrom torch import Tensor, nn\n",
                "import torch\nfrom diffusers import DDPMScheduler\nfrom torch import Tensor, nn\n",
            ),
        ),
        source="https://arxiv.org/abs/2202.00512",
    ),
    Case(
        "pixel~p2-weights",
        "diffusion/pixel",
        "loss weights",
        "perception-prioritised weights (Choi 2022), 1 / (1 + SNR), of the noise's error; linear betas",
        "right: the weights replace those of the process, so that loss and expected first loss agree",
        "measured without gates: agreement 0.28 after 3 epochs (chance 0.1), 0.89 of a picture denoised in one step",
        edits=(
            (
                "    process, n, sampling = Process(cfg.noise), len(classes), cfg.sampling\n",
                "    process, n, sampling = Process(cfg.noise), len(classes), cfg.sampling\n"
                "    process.weight = 1 / (1 + (process.alpha / process.sigma).square())  # P2: k = 1, gamma = 1\n",
            ),
        ),
        argv=("--noise.prediction-type", "epsilon", "--noise.beta-schedule", "linear", "--noise.snr-gamma", "inf"),
        source="https://arxiv.org/abs/2204.00227",
    ),
    Case(
        "pixel~perturbed-input",
        "diffusion/pixel",
        "regulariser",
        "input perturbation (Ning 2023): in training the net reads a picture with a little more noise than it has to name",
        "right: the published 0.1, drawn in the sample, in training alone; the target is the noise without it",
        "measured without gates: agreement 0.20 after 3 epochs (chance 0.1), 0.90 of a picture denoised in one step",
        edits=(
            (
                "        noisy = self.process.add(image[None], noise[None], timestep[None])[0]\n",
                "        seen = noise + 0.1 * torch.randn(image.shape, generator=generator) if training else noise\n"
                "        noisy = self.process.add(image[None], seen[None], timestep[None])[0]\n",
            ),
        ),
        argv=("--noise.prediction-type", "epsilon", "--noise.beta-schedule", "linear", "--noise.snr-gamma", "inf"),
        source="https://arxiv.org/abs/2301.11706",
    ),
    Case(
        "flow~mode-with-heavy-tails",
        "diffusion/flow",
        "noise levels",
        "mode sampling with heavy tails (Esser 2024, equation 20) instead of logit-normal levels, scale 1.29",
        "right: one uniform draw per sample, mapped to (0, 1] by the published function",
        "measured without gates: agreement 0.66 after 2 epochs",
        edits=(
            (
                "        logit = self.process.noise.logit_mean + self.process.noise.logit_std * torch.randn((), generator=generator)\n"
                "        timestep = self.process.noise.num_train_timesteps * torch.sigmoid(logit)\n",
                "        u = torch.rand((), generator=generator)\n"
                "        level = 1 - u - 1.29 * (torch.cos(torch.pi / 2 * u).square() - 1 + u)\n"
                "        timestep = self.process.noise.num_train_timesteps * level\n",
            ),
        ),
        source="https://arxiv.org/abs/2403.03206",
    ),
    Case(
        "ppo~simple-policy",
        "rl/ppo",
        "loss",
        "simple policy optimisation (Xie 2024): a quadratic penalty on the ratio instead of the clipped objective",
        "right: the published objective with the same epsilon; on-policy, where the ratio is 1, its gradient is PPO's",
        "measured without gates: return 499 after 20 rollouts",
        edits=(
            (
                "        gain = torch.min(\n"
                '            ratio * batch["advantage"], ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range) * batch["advantage"]\n'
                "        )\n",
                '        gain = ratio * batch["advantage"] - batch["advantage"].abs() * (ratio - 1).square() / (2 * cfg.clip_range)\n',
            ),
        ),
        source="https://arxiv.org/abs/2401.16025",
    ),
    Case(
        "sac~own-mixing-tank",
        "rl/sac",
        "own environment",
        "level and temperature of a tank by two valves: raw units of hundreds, actions of unequal range, every reward below zero",
        "right: a gymnasium environment that draws from its own generator alone, with a time limit and no end before it",
        "measured without gates: return -64 after 20 iterations, -45 after 60",
        edits=(
            ("\nfrom trainworthy import core\n", f"\nfrom trainworthy import core\n\n{TANK.rstrip()}\n"),
            (
                "import torch\nfrom gymnasium.spaces import Box\n",
                "import gymnasium\nimport numpy\nimport torch\nfrom gymnasium.spaces import Box\n",
            ),
        ),
        argv=("--env", "MixingTank-v0"),
    ),
    Case(
        "pretrain~lamb",
        "llm/pretrain",
        "optimiser",
        "LAMB (You 2020) written in the file: Adam's update, scaled to the norm of each tensor",
        "right: decay for matrices alone, all state in `state`, rates from the groups, as torch's optimisers do",
        "measured without gates: 2.40 bits per byte after 200 steps",
        edits=(
            (
                "# ---------------------------------------------------------------------------------------------------------------- stage\n",
                "class Lamb(torch.optim.Optimizer):\n"
                '    """Adam whose update of each tensor has the norm of the tensor (You 2020)."""\n'
                "\n"
                "    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float = 1e-6):\n"
                '        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})\n'
                "\n"
                "    @torch.no_grad()\n"
                "    def step(self, closure=None):\n"
                "        for group in self.param_groups:\n"
                '            one, two = group["betas"]\n'
                '            for p in group["params"]:\n'
                "                if p.grad is None:\n"
                "                    continue\n"
                "                state = self.state[p]\n"
                "                if not state:\n"
                '                    state["step"] = torch.zeros(())\n'
                '                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)\n'
                '                state["step"] += 1\n'
                '                state["exp_avg"].lerp_(p.grad, 1 - one)\n'
                '                state["exp_avg_sq"].mul_(two).addcmul_(p.grad, p.grad, value=1 - two)\n'
                '                mean = state["exp_avg"] / (1 - one ** state["step"].item())\n'
                '                square = state["exp_avg_sq"] / (1 - two ** state["step"].item())\n'
                '                update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * p\n'
                "                size, length = p.norm(), update.norm()\n"
                "                trust = torch.where((size > 0) & (length > 0), (size / length).clamp(max=10.0), torch.ones_like(size))\n"
                '                p.sub_(group["lr"] * trust * update)\n'
                "\n\n"
                "# ---------------------------------------------------------------------------------------------------------------- stage\n",
            ),
            (
                '        optimizers={"main": core.make_optimizer(model, cfg.optim)},\n',
                '        optimizers={"main": Lamb(groups, cfg.optim.lr, cfg.optim.betas)},\n',
            ),
            (
                "    return core.Stage(\n",
                "    groups = [\n"
                '        {"name": "decay", "params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": cfg.optim.weight_decay},\n'
                '        {"name": "no_decay", "params": [p for p in model.parameters() if p.ndim < 2]},\n'
                "    ]\n"
                "    return core.Stage(\n",
            ),
        ),
        argv=("--optim.lr", "1e-2"),
        source="https://arxiv.org/abs/1904.00962",
    ),
    Case(
        "pretrain~own-json-lines",
        "llm/pretrain",
        "own data",
        "JSON lines of one sentence each in `body`, with an id, nested and empty entries; rows of 64 tokens, 1,024 tokens",
        "right: the column is named, the other entries are not read; texts of 3 to 40 words, many to a row",
        "measured without gates: 2.12 bits per byte after 200 steps",
        data=sentences,
        argv=(
            "--data.column",
            "body",
            "--data.vocabulary",
            "1024",
            "--data.context",
            "64",
            "--data.stride",
            "32",
            "--train.epochs",
            "6",
        ),
    ),
]
