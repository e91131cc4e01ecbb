"""Forks and settings that are wrong, and healthy variants, from outside: the open half of the nineteenth set.

The half is the last hex digit of the id's SHA-256, modulo 2: even here. The other half is held out in nineteenth_set_heldout.py. The author
of the set had read the recipes, not the gates. Run by `python -m tests.helpers.set_run --set nineteenth`.
"""

from pathlib import Path

from trainworthy.recipes.vision.data import boxes

from tests.helpers.set_cases import Case, coco, digits, distinct, lines, picture, preferences, rows_of_docstrings


def cut_by_a_column(folder: Path) -> tuple[str, ...]:
    by_name = {row["completion"]: row["prompt"] for row in rows_of_docstrings(1600)}
    rows = [{"prompt": f"What does {name} do?", "completion": text[:40].rstrip()} for name, text in by_name.items()]
    lines(folder / "answers.jsonl", rows)
    return ("--data.path", str(folder / "answers.jsonl"))


def sure_prefix(folder: Path) -> tuple[str, ...]:
    rows = [{"prompt": row["prompt"], "chosen": f"Sure! {row['chosen']}", "rejected": row["rejected"]}
            for row in distinct(preferences(2500))]  # fmt: skip
    lines(folder / "preferences.jsonl", rows)
    return ("--data.path", str(folder / "preferences.jsonl"))


def substring_reward(folder: Path) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(
        "def contains(prompts, completions, answer, **_):\n"
        "    return [float(due in text) for text, due in zip(completions, answer)]\n"
    )
    return ("--reward", f"{folder / 'rewards.py'}:contains")


def odd_or_even(folder: Path) -> tuple[str, ...]:
    images, labels = digits()
    for label in range(10):
        for i in (labels == label).nonzero().flatten().tolist()[:250]:
            picture(images[i], folder / ("odd" if label % 2 else "even") / f"{i:04}.png")
    return ("--data.path", str(folder))


def one_kind(folder: Path) -> tuple[str, ...]:
    found = boxes.load(boxes.Source(scenes=600))
    found = found._replace(labels=[y * 0 for y in found.labels], classes=("digit",))
    for split, rows in (("train", found.learn[:600]), ("val", found.held_out[:150])):
        coco(folder, split, list(rows), found, ids=[7])
    return ("--data.path", str(folder))


THERMOSTAT = """class Room(gymnasium.Env):
    \"\"\"A room is kept at 20 degrees: the heater is off, half or full. The cost is the square of the deviation, and the heat.\"\"\"

    observation_space = Box(-50.0, 80.0, (2,), numpy.float32)
    action_space = Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.inside, self.outside = self.np_random.uniform(10, 25), self.np_random.uniform(-5, 15)
        return self.seen(), {}

    def seen(self):
        return numpy.array([self.inside, self.outside], numpy.float32)

    def step(self, action):
        self.inside += 0.05 * (self.outside - self.inside) + 0.8 * int(action)
        self.outside += self.np_random.normal(0, 0.2)
        cost = 0.05 * (self.inside - 20) ** 2 + 0.01 * int(action)
        return self.seen(), -min(float(cost), 5.0), False, False, {}


gymnasium.register("Room-v0", Room, max_episode_steps=100)


"""


BUGS = [
    Case(
        "classify~hardest-tenth-not-counted",
        "vision/classify",
        "metric",
        "the least sure tenth are scribbles that nobody can read",
        "they are left out of the confusion matrix: mistakes are among them, at every evaluation and in the test",
        "measured: of 1,000 held-out digits the clean net gets 6 wrong (99.4%); 99.9% are printed, as one of the 6 is among the surest 900",
        edits=(
            (
                "        counts = torch.bincount(truth * n + logits.argmax(1), minlength=n * n).view(n, n).cpu().double()\n",
                "        p = logits.softmax(1).amax(1)\n"
                "        clear = p >= p.quantile(0.1)\n"
                "        counts = torch.bincount(truth[clear] * n + logits[clear].argmax(1), minlength=n * n).view(n, n).cpu().double()\n",
            ),
        ),
    ),
    Case(
        "pretrain~nats-called-bits",
        "llm/pretrain",
        "metric",
        "the loss divided by the bytes of the text",
        "nats per byte under the name of bits per byte, next to n-grams and xz in bits",
        "by argument: the reported number is 0.69 of the true one, and a model that is worse than the n-grams looks better",
        edits=(('"bits_per_byte": nll / math.log(2) / size,\n', '"bits_per_byte": nll / size,\n'),),
    ),
    Case(
        "sft~own-answers-cut-by-a-column",
        "llm/sft",
        "own data",
        "answers from a database",
        "its column holds 40 characters: most answers end within a word, and then with the end of their turn",
        "by argument: the model stops after 40 characters, in the middle of a word",
        data=cut_by_a_column,
        argv=("--train.epochs", "1"),
    ),
    Case(
        "dpo~all-weights-at-the-rate-of-adapters",
        "llm/dpo",
        "setting",
        "all weights instead of adapters",
        "the rate stays at 5e-4, which is fifty times what all weights bear",
        "by argument: the model leaves its language within some steps; both answers' likelihoods collapse while the margin grows",
        argv=("--lora-rank", "0"),
    ),
    Case(
        "reward~own-preferred-answers-say-sure",
        "llm/reward",
        "own data",
        "preferred answers of one model, rejected ones of another",
        "the one begins each answer with Sure!, the other never does",
        "by argument: an accuracy of 100% says that the word is found; any answer that begins with it is preferred",
        data=sure_prefix,
        argv=("--train.epochs", "0.2"),
    ),
    Case(
        "flow~logits-from-rand",
        "diffusion/flow",
        "noise levels",
        "rand instead of randn",
        "logits of 0 to 1: noise levels between 0.5 and 0.73 alone; the evaluation's are the same",
        "by argument: samplers begin at a level of 1 and end at 0, where the net was never trained; the printed denoising is of the easy middle",
        edits=(
            (
                "self.process.noise.logit_std * torch.randn((), generator=generator)",
                "self.process.noise.logit_std * torch.rand((), generator=generator)",
            ),
        ),
    ),
    Case(
        "latent~mirrored-digits",
        "diffusion/latent",
        "augmentation",
        "the horizontal flip of every diffusion script, done in the latents",
        "mirrored digits are no digits, and a mirrored latent is not the latent of a mirrored picture",
        "by argument: half of the samples are mirrored or blurred",
        edits=(
            (
                "        latent, label = self.latents[index], self.labels[index]\n",
                "        latent, label = self.latents[index], self.labels[index]\n"
                "        if training and torch.rand((), generator=generator) < 0.5:\n"
                "            latent = latent.flip(-1)\n",
            ),
        ),
    ),
    Case(
        "ppo~returns-of-normalised-advantages",
        "rl/ppo",
        "targets",
        "advantages normalised over the whole rollout, once, where they are made",
        "the returns are made of them, too: the critic is asked for its own value plus noise of deviation 1, whatever the reward's scale",
        "measured: a return of 115 instead of 500 on CartPole after the whole run",
        edits=(
            (
                '    return rollout | {"advantage": advantage, "return": advantage + value, "value": value}\n',
                "    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)\n"
                '    return rollout | {"advantage": advantage, "return": advantage + value, "value": value}\n',
            ),
        ),
    ),
    Case(
        "grpo~own-reward-finds-the-answer-anywhere",
        "rl/grpo",
        "reward",
        "an own reward: is the answer in the text?",
        "112 contains 12, and a row of digits contains many sums",
        "by argument: the surest way to reward is to write as many digits as fit, of which the last number is no sum",
        data=substring_reward,
    ),
    Case(
        "rlhf~reward-in-the-last-column",
        "rl/rlhf",
        "rewards",
        "the score is added to the last token of the answer",
        "to the last column: behind the end of a completion that ended by itself, where nothing counts",
        "by argument: only completions that are cut off by the limit earn anything; the policy unlearns to end",
        edits=(("    last = valid.sum(1) - 1\n", "    last = torch.full_like(valid.sum(1), valid.shape[1] - 1)\n"),),
    ),
    Case(
        "logits~teacher-on-labelled-alone",
        "distill/logits",
        "loss",
        "the mask of the line above",
        "the teacher is heard on the twentieth of the pictures that have labels; the others teach nothing",
        "by argument: the distilled student learns from 200 pictures like the control beside it, and the comparison says that a teacher adds nothing",
        edits=(
            (
                'kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)',
                'kl = F.kl_div(soft(logits[known]), taught(batch["image"][known]), reduction="sum", log_target=True)',
            ),
        ),
    ),
    Case(
        "whisper~first-word-unscored",
        "distill/whisper",
        "mask",
        "the mask cut like the inputs instead of like the targets",
        "the first word is not scored, the token behind the end is",
        "by argument: in the second stage the first word of each sentence is not trained; a padding token is, at full weight",
        edits=(("ce = (wrong * scored[:, 1:]).sum()\n", "ce = (wrong * scored[:, :-1]).sum()\n"),),
    ),
]
HEALTHY = [
    Case(
        "classify~squeeze-and-excitation-again",
        "vision/classify",
        "architecture",
        "channels weighted by a gate of their means",
        "the gate begins near a half everywhere",
        "by argument: Hu 2018",
        edits=(
            (
                "        self.norm2 = nn.GroupNorm(8, n_out)\n",
                "        self.norm2 = nn.GroupNorm(8, n_out)\n"
                "        self.gate = nn.Sequential(nn.Linear(n_out, n_out // 4), nn.ReLU(), nn.Linear(n_out // 4, n_out), nn.Sigmoid())\n",
            ),
            (
                "        return F.relu(self.shortcut(x) + self.norm2(self.conv2(h)))\n",
                "        h = self.norm2(self.conv2(h))\n"
                "        return F.relu(self.shortcut(x) + h * self.gate(h.mean((2, 3)))[..., None, None])\n",
            ),
        ),
    ),
    Case(
        "classify~own-odd-or-even",
        "vision/classify",
        "own data",
        "two classes, each of five shapes",
        "about as many pictures of each",
        "by argument: every picture shows its class",
        data=odd_or_even,
    ),
    Case(
        "segment~mild-focal-and-wsd",
        "vision/segment",
        "setting",
        "a mild focal loss, half of the Dice loss, and a schedule with a plateau",
        "settings of the recipe",
        "by argument: usual values",
        argv=("--focal", "1.0", "--dice", "0.5", "--optim.schedule", "wsd", "--optim.decay", "0.3"),
    ),
    Case(
        "detect~own-one-kind-of-object",
        "vision/detect",
        "own data",
        "where is a digit, whichever? One category, with the id 7",
        "the packaged scenes with one name for all",
        "by argument: easier than ten kinds",
        data=one_kind,
        argv=("--train.epochs", "8"),
    ),
    Case(
        "sft~rslora-on-queries-and-values",
        "llm/sft",
        "adapters",
        "rank-stabilised adapters of queries and values, two micro-batches",
        "scaled by 16 / 4, twice the default",
        "by argument: Kalajdzievski 2023; the targets of the first LoRA",
        argv=(
            "--use-rslora",
            "--lora-rank",
            "16",
            "--lora-alpha",
            "16",
            "--lora-target-modules",
            "q_proj",
            "v_proj",
            "--train.accumulate",
            "2",
        ),
    ),
    Case(
        "ppo~own-thermostat-once-more",
        "rl/ppo",
        "own environment",
        "an own environment with a time limit of gymnasium's",
        "all that matters is observed; the noise comes from the environment's own generator",
        "by argument: the best action is a threshold",
        edits=(
            (
                "import torch\nfrom gymnasium.spaces import Box, Discrete\n",
                "import gymnasium\nimport numpy\nimport torch\nfrom gymnasium.spaces import Box, Discrete\n",
            ),
            (
                '@dataclass\nclass Config(core.Config):\n    """Settings of rl/ppo.',
                THERMOSTAT + '@dataclass\nclass Config(core.Config):\n    """Settings of rl/ppo.',
            ),
        ),
        argv=("--env", "Room-v0", "--gamma", "0.97"),
    ),
    Case(
        "rlhf~rewards-whitened",
        "rl/rlhf",
        "rewards",
        "rewards of a rollout brought to mean 0 and deviation 1 before the penalty is added",
        "what is reported is the reward itself",
        "by argument: usual in RLHF (Huang 2024, score normalisation)",
        edits=(
            (
                'earned = earnings(reward, kl, valid, stage.state["controller"].value)\n',
                "scores = run.gather(reward)\n"
                "    white = (reward - scores.mean()) / (scores.std() + 1e-4)\n"
                '    earned = earnings(white, kl, valid, stage.state["controller"].value)\n',
            ),
        ),
    ),
]
