"""Healthy forks, settings and own data: the open half of the eleventh set.

The half is the first byte of the id's SHA-256, modulo 2. The other half is held out in eleventh_set_heldout.py. The author of the set had read the
recipes, not the gates. Run by `python -m tests.helpers.set_run --set eleventh`.
"""

import ast
import inspect
import json
import random
from importlib import import_module
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from trainworthy.recipes.llm.data import prose
from trainworthy.recipes.shared import photos

from tests.helpers.set_cases import Case, lines, rows_of_docstrings, scenes


def cut(draws: random.Random, split: str, width: int, height: int) -> Image.Image:
    """A random piece of a real photo."""
    photo = Image.fromarray(draws.choice(photos.load(split)))
    x, y = draws.randrange(photo.width - width), draws.randrange(photo.height - height)
    return photo.crop((x, y, x + width, y + height))


def ripeness(root: Path) -> tuple[str, ...]:
    """180 green and 60 red fruits as JPEG files of 40 to 90 pixels, one on a photo each; a few are saved in two places of one class."""
    draws = random.Random(0)
    for name, count, colour in (("not ripe", 180, (90, 150, 50)), ("ripe", 60, (190, 60, 45))):
        for i in range(count):
            width, height = draws.randint(40, 90), draws.randint(40, 90)
            shown = cut(draws, "train", width, height)
            side = draws.uniform(0.4, 0.7) * min(width, height)
            x, y = draws.uniform(0, width - side), draws.uniform(0, height - side)
            tint = tuple(int(c + draws.gauss(0, 18)) for c in colour)
            ImageDraw.Draw(shown).ellipse((x, y, x + side, y + side * draws.uniform(0.8, 1)), fill=tint)
            (root / name).mkdir(parents=True, exist_ok=True)
            shown.save(root / name / f"IMG_{i:04}.jpg", quality=draws.randint(70, 95))
            if i % 40 == 7:
                shown.save(root / name / f"IMG_{i:04} (1).jpg", quality=60)
    return ("--data.path", str(root))


def palette_masks(root: Path) -> tuple[str, ...]:
    """36 JPEG pictures of different sizes with palette masks of three classes; four pictures show background alone."""
    pictures, masks = scenes(32)
    draws = random.Random(0)
    classes = torch.tensor([0, *(1 if d in (0, 6, 8, 9) else 2 for d in range(10)), *[0] * 244, 255])
    pairs = []
    for i, (image, mask) in enumerate(zip(pictures, masks, strict=True)):
        height, width = image.shape[1] - 3 * (i % 4), image.shape[2] - 2 * (i % 5)
        marked = classes[mask[:height, :width].long()].byte()
        pairs.append(
            (Image.fromarray(image[:, :height, :width].permute(1, 2, 0).numpy()), Image.fromarray(marked.numpy()))
        )
    for i in range(4):
        pairs.append((cut(draws, "train", 70 + 5 * i, 64), Image.new("L", (70 + 5 * i, 64))))
    for i, (image, mask) in enumerate(pairs):
        split = root / ("val" if i % 5 == 4 else "train")
        for folder in ("images", "masks"):
            (split / folder).mkdir(parents=True, exist_ok=True)
        image.save(split / "images" / f"{i:03}.jpg", quality=92)
        indexed = mask.convert("P")
        indexed.putdata(list(mask.getdata()))
        indexed.putpalette(
            [0, 0, 0, 220, 20, 60, 0, 120, 255, *[90] * 756, 224, 224, 192]
        )  # shorter: 255 would be cut to 2 bits
        indexed.save(split / "masks" / f"{i:03}.png")
    (root / "classes.txt").write_text("background\nround\nother")
    return ("--data.path", str(root))


def negative_reward(root: Path) -> tuple[str, ...]:
    """An own reward below zero: the share of long words, and half a point for a text that does not end."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "rewards.py").write_text(
        "def plain(prompts, completions):\n"
        '    """Plain language: few long words, and an end."""\n'
        "    scores = []\n"
        "    for text in completions:\n"
        "        words = text.split()\n"
        "        long = sum(len(word) > 8 for word in words) / max(1, len(words))\n"
        "        scores.append(-2 * long - 0.5 * (not text.rstrip().endswith('.')) - 0.5 * (len(words) < 4))\n"
        "    return scores\n"
    )
    return ("--reward", f"{root / 'rewards.py'}:plain")


def mixed_folder(root: Path) -> tuple[str, ...]:
    """A folder of notes (.md), of two lines to many pages, and source code (.txt), in subfolders."""
    for i, text in enumerate(prose.load()[0][::4]):
        (root / "notes" / str(i % 7)).mkdir(parents=True, exist_ok=True)
        (root / "notes" / str(i % 7) / f"{i:04}.md").write_text(text)
    (root / "code").mkdir()
    for name in ("argparse", "ast", "calendar", "cmd", "csv", "dis", "doctest", "enum", "fractions", "ftplib", "gettext", "heapq", "inspect",
                 "mailbox", "pdb", "pickle", "plistlib", "shutil", "smtplib", "statistics", "tarfile", "textwrap", "trace", "zipfile"):  # fmt: skip
        tree = ast.parse(inspect.getsource(import_module(name)))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                node.body = node.body[1:] or [ast.Pass()]
        (root / "code" / f"{name}.txt").write_text(ast.unparse(tree))
    return ("--data.path", str(root))


def extraction(root: Path) -> tuple[str, ...]:
    """900 sentences with a JSON object to extract from each; five rows are there twice."""
    rows = [
        {
            "prompt": f"Name the function as JSON: {row['prompt']}",
            "completion": json.dumps({"function": row["completion"], "words": len(row["prompt"].split())}),
            "source": row["source"],
        }
        for row in rows_of_docstrings(900)
    ]
    lines(root / "rows.jsonl", [*rows, *rows[100:900:160]])
    return ("--data.path", str(root / "rows.jsonl"))


THERMOSTAT = '''
class Thermostat(gymnasium.Env):
    """Keep a room at 294 K with a heater of three levels; every degree off and every unit of heat costs."""

    observation_space = gymnasium.spaces.Box(200.0, 400.0, (2,), "float32")
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.room, self.outside = self.np_random.uniform(280, 302), self.np_random.uniform(268, 286)
        return self.seen(), {}

    def seen(self):
        return numpy.array([self.room, self.outside], "float32")

    def step(self, action):
        self.outside += self.np_random.normal(0, 0.2)
        self.room += 0.05 * (self.outside - self.room) + 0.8 * int(action)
        return self.seen(), -abs(self.room - 294.0) - 0.1 * int(action), False, False, {}


if "Thermostat-v0" not in gymnasium.registry:
    gymnasium.register("Thermostat-v0", Thermostat, max_episode_steps=100)


'''

BUGS: list[Case] = []

HEALTHY = [
    Case(
        "classify~warm-restarts",
        "vision/classify",
        "schedule",
        "cosine with warm restarts (SGDR, Loshchilov 2017), three cycles",
        "right: the loop sets the rate from the step, so a resume goes on with it; the own schedule is declared",
        "by argument: rates between the recipe's peak and a fiftieth of it",
        edits=(
            (
                "    for step in run.steps(stage):\n        run.update(stage, step.batches)\n",
                "    cycle = max(1, run.total_steps(stage) // 3)\n"
                "    for step in run.steps(stage):\n"
                "        share = step.index % cycle / cycle\n"
                '        for group in stage.optimizers["main"].param_groups:\n'
                '            group["lr"] = cfg.optim.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))\n'
                "        run.update(stage, step.batches)\n",
            ),
            ("from pathlib import Path\n\nimport torch\n", "from pathlib import Path\nimport math\n\nimport torch\n"),
            (
                "new_parameters=fresh)\n",
                'new_parameters=fresh, schedule="warm restarts, set in the loop")\n',
            ),
        ),
        source="https://arxiv.org/abs/1608.03983",
    ),
    Case(
        "classify~own-ripeness",
        "vision/classify",
        "own data",
        "two classes by colour, three quarters of one, photos as backgrounds",
        "right: 240 JPEG files of different sizes, seven of them saved twice",
        "by argument: the colours are far from each other, and no augmentation changes the hue",
        data=ripeness,
        argv=("--train.epochs", "20", "--train.batch-size", "16", "--image-size", "32"),
    ),
    Case(
        "classify~normalise-as-a-layer",
        "vision/classify",
        "refactoring",
        "the normalisation is a layer of its own in front of the net, the loss an object of torch",
        "the same computation",
        "the same weights and numbers as the recipe's",
        edits=(
            (
                "class ResNet(nn.Module):\n"
                '    """Stride-2 stem, one block per width, global average pooling. It owns its normalisation: images come in as [0, 1]."""\n'
                "\n"
                "    def __init__(self, mean: Tensor, std: Tensor, widths: tuple[int, ...], n_classes: int):\n"
                "        super().__init__()\n"
                '        self.register_buffer("mean", mean.view(-1, 1, 1))\n'
                '        self.register_buffer("std", std.view(-1, 1, 1))\n'
                "        self.stem = nn.Conv2d(len(mean), widths[0], 5, 2, 2, bias=False)\n",
                "class Normalise(nn.Module):\n"
                '    """[0, 1] to mean 0 and deviation 1."""\n'
                "\n"
                "    def __init__(self, mean: Tensor, std: Tensor):\n"
                "        super().__init__()\n"
                '        self.register_buffer("mean", mean.view(-1, 1, 1))\n'
                '        self.register_buffer("std", std.view(-1, 1, 1))\n'
                "\n"
                "    def forward(self, images: Tensor) -> Tensor:\n"
                "        return (images - self.mean) / self.std\n"
                "\n"
                "\n"
                "class ResNet(nn.Module):\n"
                '    """Stride-2 stem, one block per width, global average pooling. Images come in normalised."""\n'
                "\n"
                "    def __init__(self, channels: int, widths: tuple[int, ...], n_classes: int):\n"
                "        super().__init__()\n"
                "        self.stem = nn.Conv2d(channels, widths[0], 5, 2, 2, bias=False)\n",
            ),
            (
                "    def forward(self, images: Tensor) -> Tensor:\n"
                "        x = (images - self.mean) / self.std  # (B, C, H, W)\n"
                "        x = self.blocks(F.relu(self.norm(self.stem(x))))",
                "    def forward(self, x: Tensor) -> Tensor:\n        x = self.blocks(F.relu(self.norm(self.stem(x))))",
            ),
            (
                "    model = ResNet(mean, std, cfg.widths, len(classes))\n",
                "    model = nn.Sequential(Normalise(mean, std), ResNet(len(mean), cfg.widths, len(classes)))\n",
            ),
            (
                "    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:\n"
                '        logits = model(batch["image"])\n'
                '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}\n',
                '    criterion = nn.CrossEntropyLoss(label_smoothing=cfg.label_smoothing, reduction="sum")\n'
                "\n"
                "    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:\n"
                '        return {"ce": criterion(model(batch["image"]), batch["label"])}\n',
            ),
        ),
    ),
    Case(
        "segment~tversky",
        "vision/segment",
        "loss",
        "Tversky loss (Salehi 2017) instead of Dice: a missed pixel costs more than a wrong one",
        "right: 0.3 for false and 0.7 for missed pixels, over the classes that occur; its first value is no longer declared",
        "by argument: at 0.5 and 0.5 it is the Dice loss",
        edits=(
            (
                "        return ((1 - 2 * both / (predicted + truth).clamp_min(1)) * (truth > 0)).sum()\n",
                "        weighed = both + 0.3 * (predicted - both) + 0.7 * (truth - both)\n"
                "        return ((1 - both / weighed.clamp_min(0.5)) * (truth > 0)).sum()\n",
            ),
            (
                "        initial_loss=lambda b: mask_expectations.answered(\n"
                '            b["mask"], mask_expectations.unsure(b["mask"], n), n, **of_terms\n'
                "        ),\n",
                "",
            ),
        ),
        source="https://arxiv.org/abs/1706.05721",
    ),
    Case(
        "segment~own-palette-masks",
        "vision/segment",
        "own data",
        "JPEG pictures with masks of an annotation tool: palette PNG files of three classes",
        "right: 36 pictures of different sizes; some show background alone, outlines are void",
        "by argument: the packaged scenes with two groups of digits",
        data=palette_masks,
        argv=("--train.epochs", "80", "--train.batch-size", "4", "--window", "48", "--step", "24", "--upright"),
    ),
    Case(
        "flow~contrastive",
        "diffusion/flow",
        "loss",
        "contrastive flow matching (Stoica 2025): away from the velocity of another sample of the batch",
        "right: the published weight of 0.05 and a declared dependence on the batch; the first loss is no longer declared",
        "by argument: the published change of one line",
        edits=(
            (
                '        return {"mse": error.sum()}\n',
                "        others = (prediction - target.roll(1, 0)).square().mean((1, 2, 3))\n"
                '        return {"mse": error.sum(), "contrast": -0.05 * others.sum()}\n',
            ),
            (
                "expect=core.Expect(initial_loss=process.initial_loss, ",
                'expect=core.Expect(batch_dependence="a contrastive term", ',
            ),
        ),
        source="https://arxiv.org/abs/2506.05350",
    ),
    Case(
        "latent~edges-too",
        "diffusion/latent",
        "loss",
        "a third term for sharp pictures: the absolute error of differences between neighbours",
        "right: a weight of 0.2, and the first loss counts it",
        "by argument: its minimum is that of the other terms",
        edits=(
            (
                '        wrong = (back - batch["target"]).flatten(1)\n        return {\n',
                '        wrong = (back - batch["target"]).flatten(1)\n'
                '        edges = (slopes(back) - slopes(batch["target"])).abs().mean(1)\n'
                "        return {\n"
                '            "edges": 0.2 * edges.sum(),\n',
            ),
            (
                '        return (batch["target"].square().mean() + cfg.vae.l1 * batch["target"].abs().mean()).item()\n',
                '        edges = 0.2 * slopes(batch["target"]).abs().mean()\n'
                '        return (batch["target"].square().mean() + cfg.vae.l1 * batch["target"].abs().mean() + edges).item()\n',
            ),
            (
                "def autoencoder(cfg: Config, run: core.Run,",
                "def slopes(x: Tensor) -> Tensor:\n"
                '    """Differences of neighbours down and to the right, (B, n)."""\n'
                "    return torch.cat([x.diff(dim=2).flatten(1), x.diff(dim=3).flatten(1)], 1)\n"
                "\n"
                "\n"
                "def autoencoder(cfg: Config, run: core.Run,",
            ),
        ),
    ),
    Case(
        "text~no-average",
        "diffusion/text",
        "settings",
        "no average of the weights, equal weights of all timesteps, more empty captions, no clipping, micro-batches",
        "settings that the page offers",
        "by argument: the average gave no gain with a schedule that ends at zero",
        argv=(
            "--ema",
            "0",
            "--noise.snr-gamma",
            "inf",
            "--conditioning-dropout-prob",
            "0.2",
            "--optim.clip",
            "inf",
            "--train.accumulate",
            "2",
            "--optim.schedule",
            "wsd",
        ),
    ),
    Case(
        "ppo~shared-trunk",
        "rl/ppo",
        "model",
        "policy and value share their hidden layers, as in many libraries",
        "right: two linear heads on one trunk",
        "by argument: the usual net for small environments; vf_coef is 0.5",
        edits=(
            (
                "        self.actor, self.critic = (mlp(n_obs + memory, *widths, n) for n in (head.n, 1))\n",
                "        self.trunk = nn.Sequential(mlp(n_obs + memory, *widths), nn.Tanh())\n"
                "        self.actor, self.critic = (mlp(widths[-1], n) for n in (head.n, 1))\n",
            ),
            (
                "        return self.head(self.actor(x)), self.critic(x).squeeze(-1), *self.memory.carried(x)\n",
                "        h = self.trunk(x)\n"
                "        return self.head(self.actor(h)), self.critic(h).squeeze(-1), *self.memory.carried(x)\n",
            ),
            (
                "        return self.head(self.actor(self.memory(observation, self.scaled)))\n",
                "        return self.head(self.actor(self.trunk(self.memory(observation, self.scaled))))\n",
            ),
            (
                "        return self.critic(self.memory(observation, self.scaled)).squeeze(-1) * self.returns.rms\n",
                "        return self.critic(self.trunk(self.memory(observation, self.scaled))).squeeze(-1) * self.returns.rms\n",
            ),
        ),
    ),
    Case(
        "ppo~own-thermostat",
        "rl/ppo",
        "own environment",
        "an own process: negative costs, observations around 290, no terminal state",
        "right: seeded by reset, a time limit of 100 steps, no reward threshold",
        "by argument: one number decides the action",
        edits=(
            (
                "import torch\nfrom gymnasium.spaces import Box, Discrete\n",
                "import gymnasium\nimport numpy\nimport torch\nfrom gymnasium.spaces import Box, Discrete\n",
            ),
            ("@dataclass\nclass Config(core.Config):\n", THERMOSTAT + "@dataclass\nclass Config(core.Config):\n"),
        ),
        argv=("--env", "Thermostat-v0", "--gamma", "0.95"),
    ),
    Case(
        "rlhf~own-negative-reward",
        "rl/rlhf",
        "reward",
        "an own reward for plain language, never above 0",
        "right: a share of long words and points for a missing end, -3 to 0",
        "by argument: short words and full stops are in reach of the model",
        data=negative_reward,
    ),
    Case(
        "pretrain~own-mixed-folder",
        "llm/pretrain",
        "own data",
        "a folder of notes and source code in subfolders, of two lines to many pages",
        "right: a context that is no power of two",
        "by argument: the packaged texts and code of the standard library without its docstrings",
        data=mixed_folder,
        argv=("--data.context", "200", "--data.stride", "100", "--train.epochs", "2"),
    ),
    Case(
        "sft~own-extraction",
        "llm/sft",
        "own data",
        "answers are JSON objects; batches of three; adapters on the attention alone",
        "right: 900 rows, five of them twice, all with their source",
        "by argument: a short answer of a fixed form",
        data=extraction,
        argv=(
            "--train.epochs",
            "1",
            "--train.batch-size",
            "3",
            "--lora-rank",
            "16",
            "--lora-target-modules",
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
        ),
    ),
    Case(
        "dpo~hinge-on-attention",
        "llm/dpo",
        "settings",
        "hinge loss (SLiC), adapters on the attention alone, a weaker penalty",
        "settings that the page offers",
        "by argument: offered by TRL with this beta",
        argv=(
            "--loss",
            "hinge",
            "--beta",
            "0.05",
            "--lora-rank",
            "16",
            "--lora-target-modules",
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
        ),
    ),
    Case(
        "reward~adapter-dropout-odd-batch",
        "llm/reward",
        "settings",
        "dropout in front of the adapters, batches of five, the loss selects",
        "settings that the page offers",
        "by argument: a dropout of 0.05 is peft's usual one",
        argv=("--lora-dropout", "0.05", "--train.batch-size", "5", "--metric", "nll", "--optim.schedule", "linear"),
    ),
    Case(
        "instruct~deeper-projector-with-dropout",
        "vlm/instruct",
        "model",
        "three layers in the projector, with dropout",
        "right: dropout in training only",
        "by argument: a tenth of the units",
        edits=(
            (
                "nn.Sequential(nn.Linear(n_in, width), nn.GELU(), nn.Linear(width, n_out))\n",
                "nn.Sequential(\n"
                "            nn.Linear(n_in, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.GELU(), nn.Linear(width, n_out)\n"
                "        )\n",
            ),
        ),
    ),
    Case(
        "whisper~smooth-l1",
        "distill/whisper",
        "loss",
        "smooth L1 of the features instead of the square: Whisper has a few very large channels",
        "right: over the frames of speech, like the square",
        "by argument: half of the square near zero, linear beyond 1",
        edits=(
            (
                "(ours - theirs).square().mean(-1)",
                'F.smooth_l1_loss(ours, theirs, reduction="none").mean(-1)',
            ),
        ),
    ),
    Case(
        "logits~decoupled",
        "distill/logits",
        "loss",
        "decoupled distillation (Zhao 2022): the classes beside the teacher's first count twice",
        "right: the divergence of the first class against the rest, and twice that among the rest; the first loss is no longer declared",
        "by argument: both parts are 0 where the student equals the teacher",
        edits=(
            (
                '            kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)\n',
                '            (first, rest), (first_of_teacher, rest_of_teacher) = decoupled(soft(logits), taught(batch["image"]))\n'
                '            kl = F.kl_div(first, first_of_teacher, reduction="sum", log_target=True)\n'
                '            kl = kl + 2 * F.kl_div(rest, rest_of_teacher, reduction="sum", log_target=True)\n',
            ),
            (
                "    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:\n",
                "    def decoupled(ours: Tensor, theirs: Tensor) -> list[tuple[Tensor, Tensor]]:\n"
                '        """(log-probabilities of the teacher\'s first class and of any other, those of the others among themselves) of both."""\n'
                "        best = theirs.argmax(1, keepdim=True)\n"
                "        other = torch.ones_like(theirs, dtype=torch.bool).scatter(1, best, False)\n"
                "        parts = []\n"
                "        for log_p in (ours, theirs):\n"
                "            rest = log_p[other].view(len(log_p), -1)\n"
                "            whole = rest.logsumexp(1, keepdim=True)\n"
                "            parts.append((torch.cat([log_p.gather(1, best), whole], 1), rest - whole))\n"
                "        return parts\n"
                "\n"
                "    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:\n",
            ),
            (
                "expect=core.Expect(initial_loss=first_loss, ",
                "expect=core.Expect(initial_loss=None if weight else first_loss, ",
            ),
        ),
        source="https://arxiv.org/abs/2203.08679",
    ),
    Case(
        "compress~frozen-encoder",
        "distill/compress",
        "settings",
        "Distil-Whisper's own setting: the whole encoder, frozen; two layers of the decoder; half of the labels' loss",
        "settings that the page offers",
        "by argument: the published recipe",
        argv=(
            "--encoder",
            "0",
            "--decoder",
            "2",
            "--temperature",
            "1",
            "--ce",
            "0.5",
            "--kl",
            "1",
            "--optim.schedule",
            "linear",
        ),
    ),
]
