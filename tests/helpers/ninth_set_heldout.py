"""Healthy forks, settings and own data: the held-out half of the ninth set (see ninth_set.py)."""

import random
from pathlib import Path

import torch

from tests.helpers.set_cases import Case, digits, lines, picture


def odd_sizes(root: Path) -> tuple[str, ...]:
    """Grey digits on canvases of 28 to 60 pixels, no two sides alike, in four classes of 120 and 40 with Russian names."""
    images, labels = digits()
    draws = torch.Generator().manual_seed(0)
    for label, name in enumerate(("ноль", "один", "два", "три")):
        mine = (labels == label).nonzero().flatten().tolist()
        for i in mine[: 120 if label < 2 else 40]:
            height, width = (28 + torch.randint(33, (2,), generator=draws)).tolist()
            canvas = torch.zeros(height, width, dtype=torch.uint8)
            y, x = ((torch.tensor([height, width]) - 28) // 2).tolist()
            canvas[y : y + 28, x : x + 28] = images[i]
            picture(canvas, root / name / f"{i}.png")
    return ("--data.path", str(root))


def spanish_captions(root: Path) -> tuple[str, ...]:
    """300 digits with captions in Spanish and Japanese in metadata.jsonl."""
    images, labels = digits()
    names = ["cero", "uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve"]
    phrases = ("la cifra {} escrita a mano", "un {} dibujado con lápiz", "手書きの数字「{}」")
    rows = []
    for i in range(300):
        picture(images[i], root / f"{i:03}.png")
        rows.append({"file_name": f"{i:03}.png", "text": phrases[i % 3].format(names[int(labels[i])])})
    lines(root / "metadata.jsonl", rows)
    return ("--data.path", str(root), "--data.captions", "metadata.jsonl")


def german(root: Path) -> tuple[str, ...]:
    """240 conversations in German, `messages` with a system turn; every third one goes on with a second question."""
    draws = random.Random(0)
    who = ["Anna", "Jörg", "Käthe", "Özlem", "Bernd", "Sören", "Lärke", "Günther", "Mia", "Björn"]
    what = [
        "Äpfel",
        "Bücher",
        "Briefmarken",
        "Schlüssel",
        "Kekse",
        "Münzen",
        "Stühle",
        "Nüsse",
        "Blumentöpfe",
        "Kerzen",
    ]
    rows = []
    for i in range(240):
        name, thing, a, b = draws.choice(who), draws.choice(what), draws.randint(11, 98), draws.randint(2, 99)
        turns = [
            {"role": "system", "content": "Du antwortest kurz und auf Deutsch."},
            {"role": "user", "content": f"{name} hat {a} {thing} und bekommt {b} dazu. Wie viele sind es?"},
            {"role": "assistant", "content": f"Es sind {a + b} {thing}, denn {a} + {b} = {a + b}."},
        ]
        if i % 3 == 0:
            turns += [
                {"role": "user", "content": f"Und wenn {name} die Hälfte von {2 * b} verschenkt?"},
                {"role": "assistant", "content": f"Dann bleiben {a} {thing} übrig."},
            ]
        rows.append({"messages": turns})
    lines(root / "gespräche.jsonl", rows)
    return ("--data.path", str(root / "gespräche.jsonl"))


BUGS: list[Case] = []

HEALTHY = [
    Case(
        "classify~lion",
        "vision/classify",
        "optimiser",
        "Lion (Chen 2023), written by hand",
        "right: a tenth of AdamW's rate and ten times its decay, as the paper says",
        "trains: sign updates of 3e-4 suit a net of 80,000 weights",
        edits=(
            (
                "class ResNet(nn.Module):\n",
                (
                    "class Lion(torch.optim.Optimizer):\n"
                    '    """The sign of an interpolated momentum (Chen 2023)."""\n'
                    "\n"
                    "    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: fl"
                    "oat = 0.0):\n"
                    '        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})\n'
                    "\n"
                    "    @torch.no_grad()\n"
                    "    def step(self, closure=None):\n"
                    "        for group in self.param_groups:\n"
                    '            for p in (p for p in group["params"] if p.grad is not None):\n'
                    '                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))\n'
                    '                p.mul_(1 - group["lr"] * group["weight_decay"])\n'
                    '                p.sub_(group["lr"] * m.lerp(p.grad, 1 - group["betas"][0]).sign())\n'
                    '                m.lerp_(p.grad, 1 - group["betas"][1])\n'
                    "\n"
                    "\n"
                    "class ResNet(nn.Module):\n"
                ),
            ),
            (
                '        optimizers={"main": core.make_optimizer(model, cfg.optim)},\n',
                '        optimizers={"main": Lion(model.parameters(), lr=cfg.optim.lr / 10, weight_decay=1e-3)},\n',
            ),
        ),
        source="https://arxiv.org/abs/2302.06675",
    ),
    Case(
        "classify~gradient-noise",
        "vision/classify",
        "optimiser",
        "a little noise on every gradient (Neelakantan 2015)",
        "right: by hooks on the parameters, small next to the gradient",
        "trains: the noise's norm over 80,000 weights is 0.3, gradients are clipped at 1",
        edits=(
            (
                "    ema = core.Ema(model, cfg.ema) if cfg.ema else None\n",
                (
                    "    for p in model.parameters():\n"
                    "        p.register_hook(lambda g: g + 1e-3 * torch.randn_like(g))\n"
                    "    ema = core.Ema(model, cfg.ema) if cfg.ema else None\n"
                ),
            ),
        ),
        source="https://arxiv.org/abs/1511.06807",
    ),
    Case(
        "classify~own-odd-sizes",
        "vision/classify",
        "own data",
        "320 grey pictures of four classes with Russian names; no two of one size",
        "right: resized and cropped like the evaluation",
        "trains: digits 0 to 3",
        argv=(
            "--train.epochs",
            "40",
            "--train.batch-size",
            "16",
            "--no-augment",
            "--image-size",
            "32",
            "--balance.by",
            "weights",
        ),
        data=odd_sizes,
    ),
    Case(
        "pixel~power-average",
        "diffusion/pixel",
        "state",
        "the average of EDM2 (Karras 2024): its length grows with the run",
        "right: the decay is (1 - 1 / n) ** 7.94 at update n",
        "trains: about an eighth of the run is averaged",
        edits=(
            (
                '            stage.state["ema"].update(stage.model)\n',
                (
                    '            average = stage.state["ema"]\n'
                    "            average.decay = (1 - 1 / (average.updates + 1)) ** 7.94\n"
                    "            average.update(stage.model)\n"
                ),
            ),
        ),
        source="https://arxiv.org/abs/2312.02696",
    ),
    Case(
        "flow~attention-and-adafactor",
        "diffusion/flow",
        "settings",
        "a wider net with attention, Adafactor, micro-batches",
        "right: Adafactor's usual rate",
        "trains: less memory, about the same curve",
        argv=(
            "--attention",
            "--widths",
            "24",
            "48",
            "--optim.name",
            "adafactor",
            "--optim.lr",
            "5e-3",
            "--train.accumulate",
            "2",
        ),
    ),
    Case(
        "latent~charbonnier",
        "diffusion/latent",
        "loss",
        "a smooth absolute error (Charbonnier) in the autoencoder",
        "right: differs from the absolute error by 0.001 at most",
        "trains: usual in image restoration",
        edits=(
            (
                '            "l1": cfg.vae.l1 * wrong.abs().mean(1).sum(),\n',
                '            "l1": cfg.vae.l1 * (wrong.square() + 1e-6).sqrt().mean(1).sum(),\n',
            ),
        ),
    ),
    Case(
        "text~own-spanish-captions",
        "diffusion/text",
        "own data",
        "300 pictures with captions in Spanish and Japanese, without a classifier",
        "right: metadata.jsonl as the hub has it",
        "trains: digits and their names",
        argv=(
            "--train.epochs",
            "60",
            "--train.eval-every",
            "20",
        ),
        data=spanish_captions,
    ),
    Case(
        "sft~own-german",
        "llm/sft",
        "own data",
        "240 conversations in German with a system turn, some of two questions; DoRA on queries and values",
        "right: `messages` as docs/own-data.md says",
        "trains: one form of answer",
        argv=(
            "--train.epochs",
            "3",
            "--use-dora",
            "--lora-rank",
            "4",
            "--lora-target-modules",
            "q_proj",
            "v_proj",
        ),
        data=german,
    ),
    Case(
        "dpo~robust-and-stable-rank",
        "llm/dpo",
        "settings",
        "robust DPO (Chowdhury 2024) with rsLoRA on queries and values, a linear schedule",
        "right: a tenth of the pairs may be swapped",
        "trains: a scaled and shifted DPO loss",
        argv=(
            "--loss",
            "robust",
            "--label-smoothing",
            "0.1",
            "--use-rslora",
            "--lora-target-modules",
            "q_proj",
            "v_proj",
            "--optim.schedule",
            "linear",
        ),
    ),
    Case(
        "ppo~layer-norm",
        "rl/ppo",
        "model",
        "LayerNorm and SiLU in policy and critic instead of tanh",
        "right: behind every hidden layer, not behind the last",
        "trains: usual since 2023",
        edits=(
            (
                "class Policy(nn.Module):\n",
                (
                    "def normed(*sizes: int) -> nn.Sequential:\n"
                    '    """Linear layers with LayerNorm and SiLU in between."""\n'
                    "    layers, width = [], 0\n"
                    "    for layer in mlp(*sizes, activation=nn.SiLU):\n"
                    "        layers += [layer] if isinstance(layer, nn.Linear) else [nn.LayerNorm(width), layer]\n"
                    '        width = getattr(layer, "out_features", 0)\n'
                    "    return nn.Sequential(*layers)\n"
                    "\n"
                    "\n"
                    "class Policy(nn.Module):\n"
                ),
            ),
            (
                "(mlp(n_obs + memory, *widths, n) for n in (head.n, 1))",
                "(normed(n_obs + memory, *widths, n) for n in (head.n, 1))",
            ),
        ),
    ),
    Case(
        "ppo~simple-policy-optimisation",
        "rl/ppo",
        "loss",
        "SPO (Xie 2024): a parabola holds the ratio instead of a clip",
        "right: its gradient is zero at a ratio of 1 + clip_range in the advantage's direction",
        "trains: the paper's replacement of PPO's clip",
        edits=(
            (
                (
                    "        gain = torch.min(\n"
                    '            ratio * batch["advantage"], ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range) * batch['
                    '"advantage"]\n'
                    "        )\n"
                ),
                (
                    '        far = batch["advantage"].abs() / (2 * cfg.clip_range) * (ratio - 1).square()\n'
                    '        gain = ratio * batch["advantage"] - far\n'
                ),
            ),
        ),
        source="https://arxiv.org/abs/2401.16025",
    ),
    Case(
        "ppo~scaled-rewards",
        "rl/ppo",
        "data",
        "rewards are multiplied by 0.1 while training, as in many configurations",
        "right: values and returns are relative to their own scale; evaluations play the environment itself",
        "trains: the same but for the unit",
        edits=(
            (
                '        steps.append({"observation": observation, "action": action, "log_prob": log_prob, **followed})\n',
                (
                    '        followed["reward"] = 0.1 * followed["reward"]\n'
                    '        steps.append({"observation": observation, "action": action, "log_prob": log_prob, **followed'
                    "})\n"
                ),
            ),
        ),
    ),
    Case(
        "dqn~minimum-of-both",
        "rl/dqn",
        "loss",
        "targets take the lower of both networks' values (clipped double Q, Fujimoto 2018)",
        "right: the online network selects, the lower value counts",
        "trains: a little more careful than double DQN",
        edits=(
            (
                '    worth = target(rows["following"])\n',
                '    worth = torch.minimum(target(rows["following"]), policy(rows["following"]))\n',
            ),
        ),
        source="https://arxiv.org/abs/1802.09477",
    ),
    Case(
        "sac~huber-critics",
        "rl/sac",
        "loss",
        "the critics' error by Huber's loss instead of the square",
        "right: half the square near zero, and a sum over samples and critics",
        "trains: usual against outliers",
        edits=(
            (
                '            "critic": 0.5 * error.square().sum(),\n',
                '            "critic": F.huber_loss(error, torch.zeros_like(error), reduction="sum"),\n',
            ),
        ),
    ),
]
