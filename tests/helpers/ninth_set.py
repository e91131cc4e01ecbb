"""Healthy forks, settings and own data: the open half of the ninth set.

The half is the first byte of the id's SHA-256, modulo 2. The other half is held out in ninth_set_heldout.py. The author of the set had read the
recipes, not the gates. Run by `python -m tests.helpers.set_run --set ninth`.
"""

import random
from pathlib import Path

import torch

from tests.helpers.set_cases import Case, lines, mask_folders, scenes


def grey_masks(root: Path) -> tuple[str, ...]:
    """Thirty grey pictures of different sizes with masks of two classes: background, digit; outlines are void."""
    pictures, masks = scenes(30)
    grey, marked = [], []
    for i, (image, mask) in enumerate(zip(pictures, masks, strict=True)):
        height, width = image.shape[1] - i % 5, image.shape[2] - i % 7
        grey.append(image.float().mean(0).byte()[:height, :width])
        marked.append(torch.where((mask > 0) & (mask < 255), torch.ones_like(mask), mask)[:height, :width])
    mask_folders(root, grey, marked)
    (root / "classes.txt").write_text("background\ndigit")
    return ("--data.path", str(root))


def russian(root: Path) -> tuple[str, ...]:
    """600 short Russian stories of six to twelve sentences, from lists of words."""
    who = [
        "Мальчик",
        "Девочка",
        "Старик",
        "Соседка",
        "Учитель",
        "Врач",
        "Рыбак",
        "Художник",
        "Повар",
        "Почтальон",
        "Кошка",
        "Собака",
    ]
    did = [
        "нашёл",
        "увидел",
        "купил",
        "потерял",
        "вспомнил",
        "нарисовал",
        "спрятал",
        "принёс",
        "показал",
        "забыл",
        "описал",
        "починил",
    ]
    what = [
        "старую лодку",
        "красный мяч",
        "письмо от брата",
        "карту острова",
        "новую книгу",
        "ключ от дома",
        "часы деда",
        "корзину яблок",
        "странный камень",
    ]
    when = [
        "утром",
        "вечером",
        "после дождя",
        "в воскресенье",
        "до обеда",
        "прошлой зимой",
        "накануне праздника",
        "поздно ночью",
    ]
    draws = random.Random(0)

    def sentence() -> str:
        return f"{draws.choice(who)} {draws.choice(did)} {draws.choice(what)} {draws.choice(when)}."

    rows = [{"text": " ".join(sentence() for _ in range(draws.randint(6, 12)))} for _ in range(600)]
    lines(root / "stories.jsonl", rows)
    return ("--data.path", str(root / "stories.jsonl"))


BUGS: list[Case] = []

HEALTHY = [
    Case(
        "classify~squeeze-and-excitation",
        "vision/classify",
        "model",
        "blocks weigh their channels (Hu 2018)",
        "right: on the residual branch, before the sum",
        "trains: a common part of residual nets",
        edits=(
            (
                "        same = stride == 1 and n_in == n_out\n",
                (
                    "        self.squeeze, self.excite = nn.Conv2d(n_out, n_out // 4, 1), nn.Conv2d(n_out // 4, n_out, 1)"
                    "\n"
                    "        same = stride == 1 and n_in == n_out\n"
                ),
            ),
            (
                "        return F.relu(self.shortcut(x) + self.norm2(self.conv2(h)))\n",
                (
                    "        h = self.norm2(self.conv2(h))\n"
                    "        gate = self.excite(F.relu(self.squeeze(h.mean((2, 3), keepdim=True)))).sigmoid()\n"
                    "        return F.relu(self.shortcut(x) + gate * h)\n"
                ),
            ),
        ),
    ),
    Case(
        "classify~confidence-penalty",
        "vision/classify",
        "loss",
        "a tenth of the prediction's entropy is subtracted (Pereyra 2017)",
        "right: a term of its own; the first loss and its floor are declared anew",
        "trains: close to label smoothing",
        edits=(
            (
                (
                    '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, r'
                    'eduction="sum")}\n'
                    "\n"
                    "    def mixed"
                ),
                (
                    "        log_p = logits.log_softmax(1)\n"
                    "        penalty = 0.1 * (log_p.exp() * log_p).sum()\n"
                    '        return {"ce": F.cross_entropy(logits, batch["label"], reduction="sum"), "penalty": penalty}\n'
                    "\n"
                    "    def mixed"
                ),
            ),
            (
                "    expect = core.Expect(initial_loss=balanced.first_loss, loss_floor=balanced.floor, new_parameters=fresh)\n",
                "    expect = core.Expect(initial_loss=0.9 * math.log(n), loss_floor=-0.1, new_parameters=fresh)\n",
            ),
            ("from dataclasses import dataclass, field\n", ("import math\nfrom dataclasses import dataclass, field\n")),
        ),
        argv=(
            "--label-smoothing",
            "0",
        ),
        source="https://arxiv.org/abs/1701.06548",
    ),
    Case(
        "segment~squares-in-dice",
        "vision/segment",
        "loss",
        "the Dice loss of V-Net (Milletari 2016), with squares in its denominator",
        "right: the truth's square is the truth",
        "trains: the paper's own form",
        edits=(
            (
                "        predicted = (p * scored[:, None]).flatten(2).sum(2)  # (B, n)\n",
                "        predicted = (p.square() * scored[:, None]).flatten(2).sum(2)  # (B, n)\n",
            ),
        ),
        source="https://arxiv.org/abs/1606.04797",
    ),
    Case(
        "segment~own-grey-thirty",
        "vision/segment",
        "own data",
        "thirty grey pictures of different sizes with two classes and void outlines",
        "right: as docs/own-data.md says",
        "trains: bright digits on photos",
        argv=(
            "--train.epochs",
            "60",
            "--train.batch-size",
            "4",
            "--window",
            "48",
            "--step",
            "24",
        ),
        data=grey_masks,
    ),
    Case(
        "detect~two-stages-with-sgd",
        "vision/detect",
        "settings",
        "Faster R-CNN with SGD, as in torchvision's references, and no augmentation",
        "right: a rate of 0.02 for 16 pictures",
        "by argument: torchvision's own reference",
        argv=(
            "--model",
            "faster-rcnn",
            "--optim.name",
            "sgd",
            "--optim.lr",
            "0.02",
            "--no-augment",
        ),
    ),
    Case(
        "pixel~zero-terminal-snr",
        "diffusion/pixel",
        "schedule",
        "Stable Diffusion's schedule, rescaled to end in pure noise (Lin 2023)",
        "right: predicts the velocity, and samples begin at the last step",
        "trains: the paper's own set of four changes",
        edits=(
            (
                "    process, n, sampling = Process(cfg.noise), len(classes), cfg.sampling\n",
                (
                    '    scheduler = DDPMScheduler(num_train_timesteps=cfg.noise.num_train_timesteps, beta_schedule="scal'
                    'ed_linear", beta_start=0.00085,\n'
                    '                              beta_end=0.012, prediction_type="v_prediction", timestep_spacing="trai'
                    'ling", rescale_betas_zero_snr=True)\n'
                    "    process, n, sampling = Process(cfg.noise, scheduler=scheduler), len(classes), cfg.sampling\n"
                ),
            ),
            (
                ("import torch\nfrom torch import Tensor, nn\n"),
                ("import torch\nfrom diffusers import DDPMScheduler\nfrom torch import Tensor, nn\n"),
            ),
        ),
        source="https://arxiv.org/abs/2305.08891",
    ),
    Case(
        "pretrain~muon",
        "llm/pretrain",
        "settings",
        "Muon, with warmup, stable rate and decay, in two micro-batches",
        "right: its updates have the size of AdamW's",
        "trains: as fast as AdamW or faster",
        argv=(
            "--optim.name",
            "muon",
            "--optim.schedule",
            "wsd",
            "--train.accumulate",
            "2",
        ),
    ),
    Case(
        "pretrain~squared-relu",
        "llm/pretrain",
        "model",
        "squared ReLU in the gated layers (Primer, So 2021)",
        "right: one word in the net's configuration",
        "trains: as well as SiLU at this size",
        edits=(
            (
                '             "max_position_embeddings": cfg.data.context}  # fmt: skip\n',
                '             "max_position_embeddings": cfg.data.context, "hidden_act": "relu2"}  # fmt: skip\n',
            ),
        ),
        source="https://arxiv.org/abs/2109.08668",
    ),
    Case(
        "pretrain~own-russian",
        "llm/pretrain",
        "own data",
        "600 Russian stories in a JSONL file, a small vocabulary",
        "right: bytes are counted, not letters",
        "trains: lists of words, easily predicted",
        argv=(
            "--data.vocabulary",
            "512",
            "--train.epochs",
            "8",
        ),
        data=russian,
    ),
    Case(
        "sac~layer-norm-critics",
        "rl/sac",
        "model",
        "LayerNorm in the critics (DroQ, Hiraoka 2022; SimBa)",
        "right: without affine weights, so that nothing of it trains through the policy's term",
        "trains: steadier critics",
        edits=(
            (
                "class Policy(nn.Module):\n",
                (
                    "def normed(*sizes: int) -> Layers:\n"
                    '    """Linear layers with plain LayerNorm and ReLU in between."""\n'
                    "    layers, width = [], 0\n"
                    "    for layer in mlp(*sizes, activation=nn.ReLU):\n"
                    "        layers += [layer] if isinstance(layer, nn.Linear) else [nn.LayerNorm(width, elementwise_affi"
                    "ne=False), layer]\n"
                    '        width = getattr(layer, "out_features", 0)\n'
                    "    return Layers(*layers)\n"
                    "\n"
                    "\n"
                    "class Policy(nn.Module):\n"
                ),
            ),
            (
                "Side(mlp(n_obs + n_act, *widths, 1, activation=nn.ReLU) for _ in range(2))",
                "Side(normed(n_obs + n_act, *widths, 1) for _ in range(2))",
            ),
            ("import Running, Side, built_again, mlp\n", "import Layers, Running, Side, built_again, mlp\n"),
        ),
    ),
    Case(
        "grpo~clip-higher",
        "rl/grpo",
        "loss",
        "a wider upper clip (DAPO, Yu 2025) and two updates on each batch of answers",
        "right: epsilon_high is TRL's own argument",
        "trains: the default of several libraries",
        edits=(("        epsilon=cfg.epsilon,\n", ("        epsilon=cfg.epsilon,\n        epsilon_high=0.28,\n")),),
        argv=(
            "--num-iterations",
            "2",
        ),
        source="https://arxiv.org/abs/2503.14476",
    ),
    Case(
        "rlhf~rewards-alone",
        "rl/rlhf",
        "settings",
        "estimates from the rewards alone, a weaker penalty, two passes, a cooler sampling",
        "right: the temperature is also that of the log-probabilities",
        "trains: completions have 24 tokens and one reward",
        argv=(
            "--gae-lambda",
            "1",
            "--init-kl-coef",
            "0.05",
            "--update-epochs",
            "2",
            "--temperature",
            "0.9",
        ),
    ),
    Case(
        "instruct~rms-norm",
        "vlm/instruct",
        "model",
        "RMSNorm instead of LayerNorm in the projector",
        "right: outputs still have the norm of word embeddings",
        "trains: as language models do",
        edits=(
            ("        self.norm = nn.LayerNorm(n_in)\n", "        self.norm = nn.RMSNorm(n_in)\n"),
            (
                "        self.out = nn.LayerNorm(n_out, elementwise_affine=False)\n",
                "        self.out = nn.RMSNorm(n_out, elementwise_affine=False)\n",
            ),
        ),
    ),
    Case(
        "logits~every-label-with-sgd",
        "distill/logits",
        "settings",
        "every label is known and counts half; SGD, a temperature of 3",
        "right: Hinton's own mixture",
        "trains: the usual recipe for small residual nets",
        argv=(
            "--labelled",
            "1",
            "--weight",
            "0.5",
            "--temperature",
            "3",
            "--optim.name",
            "sgd",
            "--optim.lr",
            "0.05",
        ),
    ),
    Case(
        "whisper~gated-layers",
        "distill/whisper",
        "model",
        "SwiGLU in the student's blocks (Shazeer 2020)",
        "right: the up projection has both halves",
        "trains: as well as GELU",
        edits=(
            (
                "        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)\n",
                "        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(2 * d, d)\n",
            ),
            (
                "        return x + self.down(F.gelu(self.up(self.norms[2](x))))\n",
                (
                    "        gate, value = self.up(self.norms[2](x)).chunk(2, -1)\n"
                    "        return x + self.down(F.silu(gate) * value)\n"
                ),
            ),
        ),
    ),
]
