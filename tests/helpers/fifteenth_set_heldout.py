"""Healthy forks, settings and own data that must not be stopped, from outside: the held-out half of the fifteenth set. Do not tune
gates on these.

The half is the last hex digit of the id's SHA-256, modulo 2.
"""

import gettext
from pathlib import Path

from tests.helpers.set_cases import Case, class_folders, lines

GERMAN = Path("/usr/share/locale/de/LC_MESSAGES")
INSTRUCTION = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] + '\n\n' }}"
    "{% elif m['role'] == 'user' %}{{ '### Instruction:\n' + m['content'] + '\n\n' }}"
    "{% else %}{{ '### Response:\n' + m['content'] + eos_token + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)


def twenty_to_one(root: Path) -> tuple[str, ...]:
    """Ten classes; seven have 200 pictures, one 20, two 10."""
    class_folders(root, 200, {7: 10, 8: 10, 9: 20})
    return ("--data.path", str(root))


def german_messages(root: Path) -> tuple[str, ...]:
    """German messages of installed programs, a document each: no two begin alike."""
    found: dict[str, str] = {}
    for file in sorted(GERMAN.glob("*.mo")):
        try:
            with file.open("rb") as opened:
                known = gettext.GNUTranslations(opened)._catalog
        except (OSError, UnicodeDecodeError):
            continue
        for text in (text for key, text in known.items() if key):  # the entry of "" is the header
            flat = " ".join(text.split())
            if len(flat) > 80 and "%" not in flat:
                found.setdefault(flat[:25].lower(), flat)
    lines(root / "meldungen.jsonl", [{"text": text} for text in found.values()][:5000])
    return ("--data.path", str(root / "meldungen.jsonl"))


def instruction_template(root: Path) -> tuple[str, ...]:
    """A chat template in Alpaca's style."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "alpaca.jinja").write_text(INSTRUCTION)
    return ("--chat-template", str(root / "alpaca.jinja"))


BUGS: list[Case] = []

HEALTHY = [
    Case(
        "segment~focal-in-bf16",
        "vision/segment",
        "settings",
        "focal loss without Dice, in bf16 with two micro-batches",
        "right: two classes of unequal size, the usual gamma of 2",
        "by argument: Lin 2017",
        argv=(
            "--dice",
            "0",
            "--focal",
            "2",
            "--train.precision",
            "bf16",
            "--train.accumulate",
            "2",
            "--optim.lr",
            "5e-3",
        ),
    ),
    Case(
        "pretrain~longer-context",
        "llm/pretrain",
        "settings",
        "twice the context, half the rows, no z-loss, half the rate",
        "right: the same tokens in a batch",
        "by argument: usual values",
        argv=(
            "--data.context",
            "256",
            "--data.stride",
            "128",
            "--z-loss",
            "0",
            "--train.batch-size",
            "4",
            "--optim.lr",
            "1e-3",
        ),
    ),
    Case(
        "pretrain~bf16-and-wsd",
        "llm/pretrain",
        "settings",
        "bf16, four micro-batches, warmup-stable-decay to a tenth of the rate, another seed",
        "right: the usual settings of an accelerator",
        "by argument: usual values",
        argv=(
            "--train.precision",
            "bf16",
            "--train.batch-size",
            "16",
            "--train.accumulate",
            "4",
            "--optim.schedule",
            "wsd",
            "--optim.min-lr-ratio",
            "0.1",
            "--run.seed",
            "11",
        ),
    ),
    Case(
        "pretrain~smaller-and-unpacked",
        "llm/pretrain",
        "settings",
        "two layers of 64 with normalised queries and keys, each document in a row of its own",
        "right: a smaller net, and packing off",
        "by argument: usual values",
        argv=(
            "--data.no-packing",
            "--qk-norm",
            "--hidden-size",
            "64",
            "--num-hidden-layers",
            "2",
            "--num-attention-heads",
            "2",
            "--optim.lr",
            "3e-3",
        ),
    ),
    Case(
        "sft~instruction-template",
        "llm/sft",
        "settings",
        "Alpaca's prompt in place of ChatML, adapters of rank 16 on queries and values with dropout, as in the first LoRA scripts",
        "right: the template ends each answer with the tokenizer's end token and has a generation prompt",
        "by argument: the same turns in other words",
        argv=(
            "--lora-rank",
            "16",
            "--lora-alpha",
            "32",
            "--lora-dropout",
            "0.05",
            "--lora-target-modules",
            "q_proj",
            "v_proj",
            "--optim.schedule",
            "linear",
        ),
        data=instruction_template,
    ),
    Case(
        "dqn~cartpole-of-the-zoo",
        "rl/dqn",
        "settings",
        "the tuned values of rl-baselines3-zoo for CartPole: plain DQN, 128 updates after every 256 steps, 256-256",
        "right: these solve CartPole in 50,000 steps",
        "by argument: known results of the zoo",
        argv=(
            "--no-double",
            "--no-dueling",
            "--num-steps",
            "32",
            "--gradient-steps",
            "128",
            "--train.batch-size",
            "64",
            "--optim.lr",
            "2.3e-3",
            "--optim.schedule",
            "constant",
            "--target-update-interval",
            "128",
            "--exploration-fraction",
            "0.16",
            "--hidden-sizes",
            "256",
            "256",
            "--train.epochs",
            "195",
        ),
        source="https://github.com/DLR-RM/rl-baselines3-zoo",
    ),
    Case(
        "sac~one-environment",
        "rl/sac",
        "settings",
        "one environment and one update per step as in the paper, smaller nets, a slower target, larger batches",
        "right: usual values for Pendulum",
        "by argument: Haarnoja 2018",
        argv=(
            "--num-envs",
            "1",
            "--num-steps",
            "64",
            "--gradient-steps",
            "64",
            "--hidden-sizes",
            "64",
            "64",
            "--tau",
            "0.005",
            "--train.batch-size",
            "256",
            "--optim.schedule",
            "constant",
        ),
    ),
    Case(
        "pixel~as-ddpm",
        "diffusion/pixel",
        "settings",
        "noise prediction with linear betas, equal weights, a constant rate and a faster average, as in Ho 2020",
        "right: the objective of DDPM",
        "by argument: Ho 2020",
        argv=(
            "--noise.prediction-type",
            "epsilon",
            "--noise.beta-schedule",
            "linear",
            "--noise.snr-gamma",
            "inf",
            "--optim.schedule",
            "constant",
            "--optim.lr",
            "1e-3",
            "--ema",
            "0.995",
        ),
    ),
    Case(
        "logits~hot-with-more-labels",
        "distill/logits",
        "settings",
        "temperature 4, a fifth of the labels, more weight on them, a wider student and smaller batches",
        "right: Hinton's values",
        "by argument: Hinton 2015",
        argv=(
            "--temperature",
            "4",
            "--weight",
            "0.7",
            "--labelled",
            "0.2",
            "--widths",
            "16",
            "32",
            "--train.batch-size",
            "32",
            "--optim.lr",
            "5e-3",
            "--alone.epochs",
            "100",
        ),
    ),
    Case(
        "classify~perceptron",
        "vision/classify",
        "model",
        "a plain perceptron with dropout in place of the ResNet, with torch's own initial values",
        "right: such a net is right on about 95% of MNIST-5k",
        "by argument: a textbook's first net",
        edits=(
            (
                "def make_model(cfg: Config, train_data: Images",
                "class Perceptron(nn.Module):\n"
                '    """Two hidden layers: images (B, C, H, W) in [0, 1] -> (B, n_classes)."""\n\n'
                "    def __init__(self, mean: Tensor, std: Tensor, n_pixels: int, n_classes: int):\n"
                "        super().__init__()\n"
                '        self.register_buffer("mean", mean.view(-1, 1, 1))\n'
                '        self.register_buffer("std", std.view(-1, 1, 1))\n'
                "        self.layers = nn.Sequential(\n"
                "            nn.Flatten(), nn.Linear(n_pixels, 256), nn.ReLU(), nn.Dropout(0.2),\n"
                "            nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, n_classes),\n"
                "        )\n\n"
                "    def forward(self, images: Tensor) -> Tensor:\n"
                "        return self.layers((images - self.mean) / self.std)\n\n\n"
                "def make_model(cfg: Config, train_data: Images",
            ),
            (
                "    model = ResNet(mean, std, cfg.widths, len(classes))\n",
                '    model = Perceptron(mean, std, train_data.get(0, None)["image"].numel(), len(classes))\n',
            ),
        ),
        argv=("--optim.lr", "1e-3"),
    ),
    Case(
        "classify~batch-norm-one-cycle",
        "vision/classify",
        "model",
        "batch norm in place of GroupNorm, SGD with momentum and a one-cycle schedule: He's ResNet with Smith's schedule",
        "right: batches of 128; the linear schedule with a warm-up of 0.3 is one cycle",
        "by argument: the usual recipe for CIFAR",
        edits=(
            ("self.norm1 = nn.GroupNorm(8, n_out)", "self.norm1 = nn.BatchNorm2d(n_out)"),
            ("self.norm2 = nn.GroupNorm(8, n_out)", "self.norm2 = nn.BatchNorm2d(n_out)"),
            ("self.norm = nn.GroupNorm(8, widths[0])", "self.norm = nn.BatchNorm2d(widths[0])"),
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
            "--optim.warmup",
            "0.3",
            "--train.batch-size",
            "128",
        ),
    ),
    Case(
        "classify~rand-augment",
        "vision/classify",
        "augmentation",
        "RandAugment and random erasing in place of the affine changes",
        "right: two changes of magnitude 5, and a quarter of the pictures with a hole; a digit stays readable",
        "by argument: Cubuk 2020, Zhong 2020",
        edits=(
            (
                "        return None, v2.RandomAffine(12, translate=(0.1, 0.1), scale=(0.85, 1.15), shear=10,\n"
                "                                     interpolation=v2.InterpolationMode.BILINEAR)  # fmt: skip\n",
                "        return None, v2.Compose([v2.RandAugment(num_ops=2, magnitude=5), v2.RandomErasing(p=0.25, scale=(0.02, 0.1))])\n",
            ),
        ),
    ),
    Case(
        "classify~stochastic-weight-averaging",
        "vision/classify",
        "optimisation",
        "torch's AveragedModel over the last quarter of the run at a constant rate; before, the weights themselves",
        "right: GroupNorm has no statistics to be updated",
        "by argument: Izmailov 2018",
        edits=(
            (
                "from torch.nn import functional as F\n",
                "from torch.nn import functional as F\nfrom torch.optim.swa_utils import AveragedModel\n",
            ),
            ("    ema = core.Ema(model, cfg.ema) if cfg.ema else None\n", "    swa = AveragedModel(model)\n"),
            ("        net, shape = ema.model if ema else model, tuple(", "        net, shape = swa.module, tuple("),
            ("        ema_model=ema.model if ema else None,\n", "        ema_model=swa.module,\n"),
            ('        state={"ema": ema} if ema else {},\n', '        state={"swa": swa},\n'),
            (
                '        if cfg.ema:\n            stage.state["ema"].update(stage.model)\n',
                '        swa = stage.state["swa"]\n'
                "        if step.index < 0.75 * run.total_steps(stage):\n"
                "            swa.module.load_state_dict(stage.model.state_dict())\n"
                "        else:\n"
                "            swa.update_parameters(stage.model)\n",
            ),
        ),
        argv=("--optim.schedule", "constant", "--optim.lr", "2e-3"),
    ),
    Case(
        "pretrain~tied-embeddings",
        "llm/pretrain",
        "model",
        "one matrix for embedding and head, from transformers' own initial values",
        "right: without the start at the token frequencies, and the expectation is that of a uniform start",
        "by argument: Press & Wolf 2017, as GPT-2 and SmolLM",
        edits=(
            (
                '"max_position_embeddings": cfg.data.context}',
                '"max_position_embeddings": cfg.data.context, "tie_word_embeddings": True}',
            ),
            ("    start_at_frequencies(model, log_p)\n    return model\n", "    return model\n"),
            ('    ours = cfg.model == "llama"\n', "    ours = False  # it does not start at the token frequencies\n"),
        ),
    ),
    Case(
        "pretrain~grouped-queries-and-rope-base",
        "llm/pretrain",
        "model",
        "half as many heads for keys and values, and a base of 500,000 for the rotary positions, as Llama 3",
        "right: both are settings of the architecture",
        "by argument: Llama 3",
        edits=(
            ('"num_key_value_heads": heads,', '"num_key_value_heads": heads // 2,'),
            (
                '"max_position_embeddings": cfg.data.context}',
                '"max_position_embeddings": cfg.data.context,\n'
                '             "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}',
            ),
        ),
    ),
    Case(
        "dqn~layer-norm-and-priorities",
        "rl/dqn",
        "model",
        "LayerNorm in the body, three-step returns and prioritised replay, as in Rainbow and later agents",
        "right: usual values",
        "by argument: Hessel 2018",
        edits=(
            (
                "        self.body = Layers(mlp(n_obs, *widths, activation=nn.ReLU), nn.ReLU())\n",
                "        self.body = nn.Sequential(\n"
                "            nn.Linear(n_obs, widths[0]), nn.LayerNorm(widths[0]), nn.ReLU(),\n"
                "            nn.Linear(widths[0], widths[1]), nn.LayerNorm(widths[1]), nn.ReLU(),\n"
                "        )\n",
            ),
        ),
        argv=("--n-step", "3", "--prioritized-replay-alpha", "0.6"),
    ),
    Case(
        "logits~features-too",
        "distill/logits",
        "loss",
        "a small loss on the direction of the features, through a projection that is trained with the student",
        "right: the teacher's features are constant, and the term is at most 0.2 of a loss of several nats",
        "by argument: Romero 2015",
        edits=(
            (
                "    before = control and copy.deepcopy(control.eval_model)\n",
                "    before = control and copy.deepcopy(control.eval_model)\n"
                "    if weight:\n"
                "        model.project = nn.Linear(cfg.widths[-1], 64)  # to the teacher's features\n\n"
                "    def features(model: nn.Module, images: Tensor) -> Tensor:\n"
                "        x = (images - model.mean) / model.std\n"
                "        return model.project(model.blocks(F.relu(model.norm(model.stem(x)))).mean((2, 3)))\n",
            ),
            (
                '            terms["kl"] = weight * temperature**2 * kl\n',
                '            terms["kl"] = weight * temperature**2 * kl\n'
                '            wanted = teacher.features(batch["image"] * 2 - 1)\n'
                '            terms["feature"] = 0.1 * (1 - F.cosine_similarity(features(model, batch["image"]), wanted)).sum()\n',
            ),
        ),
        argv=("--alone.epochs", "100"),
    ),
    Case(
        "classify~own-twenty-to-one",
        "vision/classify",
        "own data",
        "ten classes of which three have 10 to 20 pictures and the others 200, balanced by the sampler",
        "right: every class is in both splits",
        "by argument: real collections look so",
        argv=("--balance.by", "sampler", "--image-size", "32", "--train.epochs", "10", "--train.batch-size", "32"),
        data=twenty_to_one,
    ),
    Case(
        "pretrain~own-german",
        "llm/pretrain",
        "own data",
        "German messages of programs, each a document of a sentence or more",
        "right: valid UTF-8, no two documents begin alike",
        "by argument: the same kind of text as English prose",
        argv=("--data.vocabulary", "1024"),
        data=german_messages,
    ),
]
