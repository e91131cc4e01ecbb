"""Forks, settings and own data that are wrong, and healthy variants, from outside: the half of the fourth set that is held out.

The half is the first byte of the id's SHA-256, modulo 2. Nobody who works on gates reads it.
Run by `python -m tests.helpers.set_run --set fourth --half heldout`.
"""

from pathlib import Path

from torch.nn import functional
from trainworthy.recipes.llm.data import prose

from tests.helpers.set_cases import Case, digits, distinct, lines, mask_folders, picture, preferences, scenes


def masks_of_padded_pictures(root: Path) -> tuple[str, ...]:
    """Scenes with masks; the tool that masks were drawn in had padded its pictures by 7 pixels left and above."""
    pictures, masks = scenes(400)
    mask_folders(root, pictures, [functional.pad(m, (7, 0, 7, 0))[: m.shape[0], : m.shape[1]] for m in masks])
    return ("--data.path", str(root))


def reward_by_substring(root: Path) -> tuple[str, ...]:
    """A file with a reward function that looks for the answer anywhere in the text, and gives a share for every digit of it."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "rewards.py").write_text(
        "def contains(completions, answer, **_):\n"
        "    return [float(a in c) + 0.2 * sum(d in c for d in a) for c, a in zip(completions, answer)]\n"
    )
    return ("--reward", f"{root / 'rewards.py'}:contains")


def crawled_twice(root: Path) -> tuple[str, ...]:
    """Documents; every one was crawled three times, with another address and date above it."""
    texts, *_ = prose.load()
    rows = [
        {"text": f"https://mirror{k}.example.org/{i:05}.html, read on 2024-0{3 * k + 1}-1{i % 9}\n\n{text}"}
        for k in range(3)
        for i, text in enumerate(texts[::4])
    ]
    lines(root / "crawl.jsonl", rows)
    return ("--data.path", str(root / "crawl.jsonl"))


def scores_as_text(root: Path) -> tuple[str, ...]:
    """Preferences from ratings of 1 to 10 that were compared as texts: "10" is below "9"."""
    ranked = []
    for i, row in enumerate(distinct(preferences(4000))):
        better = 10 if i % 5 < 2 else 2 + i * 7 % 8
        worse = 1 + i * 3 % (better - 1)
        if str(better) < str(worse):
            row = {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
        ranked.append(row)
    lines(root / "rows.jsonl", ranked)
    return ("--data.path", str(root / "rows.jsonl"))


def imbalanced_in_all_formats(root: Path) -> tuple[str, ...]:
    """Class folders of 40 to 300 digits, as PNG, JPEG, BMP, GIF and WebP, grey or in colour, some a little larger."""
    images, labels = digits()
    kinds = ("png", "jpg", "bmp", "gif", "webp")
    for label in range(10):
        mine = (labels == label).nonzero().flatten().tolist()
        for k, i in enumerate(mine[: (300, 250, 200, 150, 120, 100, 80, 60, 50, 40)[label]]):
            image = images[i].expand(3, 28, 28) if k % 2 else images[i]
            picture(
                functional.pad(image, (2, 2, 2, 2)) if k % 7 == 0 else image, root / str(label) / f"{i}.{kinds[k % 5]}"
            )
    return ("--data.path", str(root))


BUGS = [
    Case(
        "classify~mixup-labels-drawn-again",
        "vision/classify",
        "labels",
        "mixup, written into the loss as in a notebook",
        "the partner's labels come from a second permutation: half of the target belongs to a picture that is not in the mix",
        "measured, 3 epochs, seed 0: accuracy 0.197, unchanged recipe 0.693 (mixup itself makes short runs slower, too)",
        edits=(
            (
                (
                    '        logits = model(batch["image"])\n'
                    '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}\n'
                ),
                (
                    '        image, label, share = batch["image"], batch["label"], 1.0\n'
                    "        if model.training:  # mixup (Zhang 2018)\n"
                    "            share = torch.distributions.Beta(1.0, 1.0).sample().item()\n"
                    "            image = share * image + (1 - share) * image[torch.randperm(len(image))]\n"
                    "        logits, other = model(image), label[torch.randperm(len(label))]\n"
                    '        how = {"label_smoothing": cfg.label_smoothing, "reduction": "sum"}\n'
                    "        ce = share * F.cross_entropy(logits, label, **how) + (1 - share) * F.cross_entropy(logits, other, **how)\n"
                    '        return {"ce": ce}\n'
                ),
            ),
        ),
    ),
    Case(
        "classify~inverted-in-training",
        "vision/classify",
        "data",
        "dark digits on light paper, as the pictures of one's own will be",
        "the inversion is part of the training transform alone: evaluation and test show light digits on dark ground",
        "by argument: evaluation shows what training never did; measured in no run",
        edits=(
            (
                (
                    "        return None, v2.RandomAffine(12, translate=(0.1, 0.1), scale=(0.85, 1.15), shear=10,\n"
                    "                                     interpolation=v2.InterpolationMode.BILINEAR)  # fmt: skip\n"
                ),
                (
                    "        affine = v2.RandomAffine(12, translate=(0.1, 0.1), scale=(0.85, 1.15), shear=10,\n"
                    "                                 interpolation=v2.InterpolationMode.BILINEAR)  # fmt: skip\n"
                    "        return None, v2.Compose([affine, v2.RandomInvert(1.0)])\n"
                ),
            ),
        ),
    ),
    Case(
        "classify~half-turns",
        "vision/classify",
        "data",
        "more augmentation, from a repository for satellite pictures",
        "digits are turned by any angle: a 6 is a 9 then",
        "measured, 3 epochs, seed 0: accuracy 0.256, unchanged recipe 0.693; by argument: a 6 and a 9 cannot be told apart",
        edits=(("v2.RandomAffine(12, translate", "v2.RandomAffine(180, translate"),),
    ),
    Case(
        "classify~keep-prob-of-tf1",
        "vision/classify",
        "model",
        "dropout before the head, ported from TensorFlow 1",
        "its second argument was the share to keep; here it is the share to drop: a tenth of the features is left",
        "measured, 3 epochs, seed 0: accuracy 0.264, unchanged recipe 0.693; six of 64 features are left in each pass",
        edits=(
            (
                "        return self.head(x.mean((2, 3)))  # (B, n_classes)\n",
                "        return self.head(F.dropout(x.mean((2, 3)), 0.9, self.training))  # (B, n_classes)\n",
            ),
        ),
    ),
    Case(
        "classify~export-normalises-again",
        "vision/classify",
        "export",
        "the exported program takes raw pictures, so that the app need not know the statistics",
        "the net normalises inside already: the program does it twice, and nothing that was measured holds for it",
        "by argument: the export is worse than what was measured; the run itself refuses it at its end (measured, 5 steps)",
        edits=(
            (
                (
                    '            core.save_export(folder, net, config | {"architecture": "ResNet", "widths": cfg.widths}, '
                    "torch.zeros(2, *shape))  # fmt: skip\n"
                ),
                (
                    "            raw = nn.Sequential(v2.Normalize(net.mean.flatten().tolist(), net.std.flatten().tolist()), net)\n"
                    '            config |= {"architecture": "ResNet", "widths": cfg.widths}\n'
                    "            core.save_export(folder, raw, config, torch.zeros(2, *shape), weights=net)\n"
                ),
            ),
        ),
    ),
    Case(
        "segment~own-masks-padded",
        "vision/segment",
        "own data",
        "masks from a tool that pads its pictures",
        "every mask lies 7 pixels right of and below its object, in training and in validation",
        "by argument: strokes are 3 to 6 pixels wide, a mask that is 7 off does not cover them; the metric has the same shift",
        argv=("--train.epochs", "8", "--upright"),
        data=masks_of_padded_pictures,
    ),
    Case(
        "flow~betas-turned",
        "diffusion/flow",
        "optimiser",
        "Adam's betas, given by hand",
        "in the wrong order: a first moment over a thousand steps, a second over ten",
        "by argument: a mean of the gradient over a thousand steps lags behind all of the run, and its size is divided by that of the last ten",
        argv=("--optim.betas", "0.999", "0.9"),
    ),
    Case(
        "pixel~random-flip",
        "diffusion/pixel",
        "data",
        "the option random_flip of a public training script",
        "half of the digits that it learns are mirrored, and half of those it draws",
        "by argument: mirrored digits are drawn in half of the samples; only 0, 1 and 8 survive that",
        edits=(
            (
                "        image, label = self.images[index], self.labels[index]\n",
                (
                    "        image, label = self.images[index], self.labels[index]\n"
                    "        if training and torch.rand((), generator=generator) < 0.5:  # random_flip\n"
                    "            image = image.flip(-1)\n"
                ),
            ),
        ),
    ),
    Case(
        "pixel~scheduler-by-default",
        "diffusion/pixel",
        "export",
        "the pipeline is saved with a plain DDIM scheduler, as in a tutorial",
        "it takes the net's velocity for noise, and has another schedule: whoever loads the pipeline gets noise",
        "by argument: the sampler of the export is another one than that which was measured",
        edits=(
            (
                "import torch\nfrom torch import Tensor, nn\n",
                "import torch\nfrom diffusers import DDIMScheduler\nfrom torch import Tensor, nn\n",
            ),
            (
                "        pictures.save_pipeline(folder, (ema.model if ema else model).eval().cpu(), process.sampler())\n",
                "        pictures.save_pipeline(folder, (ema.model if ema else model).eval().cpu(), DDIMScheduler())\n",
            ),
        ),
    ),
    Case(
        "ppo~environments-first",
        "rl/ppo",
        "rollout",
        "rollouts are flattened with environments first, as in Stable-Baselines3",
        "only the advantages are: they belong to other observations and actions",
        "by argument: an advantage says nothing about the action that it is multiplied by",
        edits=(
            (
                '    rows = {k: rollout[k].flatten(0, 1) for k in ("observation", "action", "log_prob", "advantage")}\n',
                (
                    '    rows = {k: rollout[k].flatten(0, 1) for k in ("observation", "action", "log_prob")}\n'
                    '    rows["advantage"] = rollout["advantage"].swapaxes(0, 1).flatten()\n'
                ),
            ),
        ),
    ),
    Case(
        "dqn~whole-division",
        "rl/dqn",
        "schedule",
        "progress of the run, ported from Python 2",
        "whole division: progress is 0 for all of the run, every action of training is random",
        "measured, 120 iterations, seed 0: return 75, unchanged recipe 498",
        edits=(
            (
                "        progress = step.index / run.total_steps(stage)\n",
                "        progress = step.index // run.total_steps(stage)\n",
            ),
        ),
    ),
    Case(
        "dqn~buffer-in-episodes",
        "rl/dqn",
        "settings",
        "a buffer of 200 episodes, as the code before counted them",
        "the setting counts transitions: a rollout and a half is remembered",
        "measured, 120 iterations, seed 0: return 312, no episode solved; unchanged recipe 498",
        argv=("--buffer-size", "200"),
    ),
    Case(
        "grpo~reward-by-substring",
        "rl/grpo",
        "own reward",
        "a reward of one's own that does not depend on the format",
        "the answer may stand anywhere, and each of its digits earns a share: many digits pay, a right sum is not needed",
        "by argument: a wrong answer with the right digits earns 0.4 to 0.6 of the reward",
        data=reward_by_substring,
    ),
    Case(
        "pretrain~nats-for-bits",
        "llm/pretrain",
        "evaluation",
        "the metric, written again",
        "the division by ln 2 is lost: nats per byte are reported as bits, 31% too few",
        "by argument: every number of bits is ln 2 = 0.69 of the true one, below that of any baseline that is counted in bits",
        edits=(
            ('            "bits_per_byte": nll / math.log(2) / size,\n', '            "bits_per_byte": nll / size,\n'),
        ),
    ),
    Case(
        "pretrain~embeddings-in-no-group",
        "llm/pretrain",
        "optimiser",
        "own groups: decay for matrices, none for norms (minGPT)",
        "the lists miss embedding and head: both stay as they were drawn",
        "by argument: neither embedding nor head learns: words keep their random places; the fork starts (measured: 2 steps)",
        edits=(
            (
                '        optimizers={"main": core.make_optimizer(model, cfg.optim)},\n',
                '        optimizers={"main": grouped(cfg, model)},\n',
            ),
            (
                "# ---------------------------------------------------------------------------------------------------------------- stage\n",
                (
                    "def grouped(cfg: Config, model: nn.Module) -> torch.optim.Optimizer:\n"
                    '    """AdamW with decay for the matrices of the blocks."""\n'
                    "    named = dict(model.named_parameters())\n"
                    '    decayed = [p for n, p in named.items() if n.endswith("_proj.weight")]\n'
                    '    others = [p for n, p in named.items() if "norm" in n]\n'
                    '    groups = [{"params": decayed, "weight_decay": cfg.optim.weight_decay}, {"params": others, "weight_decay": 0.0}]\n'
                    "    return torch.optim.AdamW(groups, lr=cfg.optim.lr, betas=cfg.optim.betas)\n"
                    "\n"
                    "\n"
                    "# ---------------------------------------------------------------------------------------------------------------- stage\n"
                ),
            ),
        ),
    ),
    Case(
        "pretrain~own-crawled-twice",
        "llm/pretrain",
        "own data",
        "pages of a crawl",
        "each was read three times, with another address and date above it: what is held out is also learnt from",
        "by argument: two of three copies of a held-out page are in training; bits per byte are of learning by heart",
        data=crawled_twice,
    ),
    Case(
        "sft~metric-of-forced-answers",
        "llm/sft",
        "evaluation",
        "generating is slow: answers are read off the logits, as compute_metrics of the Trainer sees them",
        "each token is predicted behind the true ones, and every answer has the true length: the metric is far too good",
        "by argument: at teacher forcing no error follows from another one, and no answer is too long",
        edits=(
            (
                '                both = zip(generate(model, batch["prompt"], before), map(chat.reply, batch["completion"]), strict=True)\n',
                (
                    "                answered = forced(model, batch, before)\n"
                    '                both = zip(answered, map(chat.reply, batch["completion"]), strict=True)\n'
                ),
            ),
            (
                "    def scores(model: nn.Module, data: core.Data, before: list[dict] = (), *, answers: bool = True) -> dict[str, float]:\n",
                (
                    "    def forced(model: nn.Module, batch: dict, before: list[dict] = ()) -> list[tuple[str, bool]]:\n"
                    '        """(answer, did it stop by itself?) to each prompt, from one pass over the batch."""\n'
                    "        batch = to_device(pairs.behind(before, batch, chat), run.device) if before else batch\n"
                    '        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits\n'
                    '        best, asked = logits.argmax(-1)[:, :-1], batch["labels"][:, 1:] != pairs.IGNORED\n'
                    "        rows = [row[own].tolist() for row, own in zip(best, asked, strict=True)]\n"
                    "        return [(chat.reply(tokenizer.decode(ids, skip_special_tokens=True)), ids[-1] in chat.ends) for ids in rows]\n"
                    "\n"
                    "    def scores(model: nn.Module, data: core.Data, before: list[dict] = (), *, answers: bool = True) -> dict[str, float]:\n"
                ),
            ),
        ),
    ),
    Case(
        "reward~own-scores-as-text",
        "llm/reward",
        "own data",
        "pairs from ratings of 1 to 10 in a CSV file",
        "ratings were compared as texts: an answer with a 10 loses against all but a 1",
        "27% of the pairs are turned (counted), in training and in validation: by argument: as many labels are wrong",
        argv=("--train.epochs", "0.2"),
        data=scores_as_text,
    ),
    Case(
        "whisper~speed-without-target",
        "distill/whisper",
        "data",
        "speed perturbation (Ko 2015)",
        "the envelope is stretched, the teacher's features are not: they belong to other moments, and the last to no sound",
        "by argument: at 3 s a word is up to half a second away from its features",
        edits=(
            (
                "        (envelope, heard), ids = got, self.ids[i]\n",
                (
                    "        (envelope, heard), ids = got, self.ids[i]\n"
                    "        if generator is not None:\n"
                    "            rate, spoken = 0.85 + 0.3 * torch.rand((), generator=generator).item(), int(envelope.any(-1).sum())\n"
                    "            size = min(len(envelope), round(spoken / rate))\n"
                    '            other = F.interpolate(envelope[:spoken].mT[None], size=size, mode="linear")[0].mT\n'
                    "            envelope = F.pad(other, (0, 0, 0, len(envelope) - size))\n"
                ),
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "classify~own-formats",
        "vision/classify",
        "own data",
        "pictures of one's own, in many formats, of some classes few",
        "labels are right; classes have 40 to 300 pictures",
        "by argument: JPEG, GIF and WebP keep digits readable; 32 pixels as in the third set's small folder",
        argv=("--train.epochs", "30", "--train.batch-size", "32", "--no-augment", "--image-size", "32"),
        data=imbalanced_in_all_formats,
    ),
    Case(
        "flow~direction-too",
        "diffusion/flow",
        "loss",
        "a term for the velocity's direction (Yao 2024)",
        "its weight is small, and it is least where the mean square is",
        "by argument: the term is least at the same velocity; its weight is a tenth",
        edits=(
            (
                '        return {"mse": error.sum()}\n',
                (
                    "        apart = 1 - torch.nn.functional.cosine_similarity(prediction.flatten(1), target.flatten(1))  # (B,)\n"
                    '        return {"mse": error.sum(), "direction": 0.1 * apart.sum()}\n'
                ),
            ),
        ),
    ),
    Case(
        "pixel~attention",
        "diffusion/pixel",
        "settings",
        "attention at the lowest resolution, a larger batch",
        "offered by the recipe",
        "by argument: offered by the recipe; the rate follows the root of the batch",
        argv=("--attention", "--train.batch-size", "128", "--optim.lr", "3e-3"),
    ),
    Case(
        "ppo~own-groups",
        "rl/ppo",
        "optimiser",
        "a higher rate for the critic, with plain Adam",
        "every parameter is in one of the two groups",
        "measured, 60 rollouts, seed 0: return 500, the best possible",
        edits=(
            (
                '        optimizers={"main": core.make_optimizer(policy, cfg.optim)},\n',
                '        optimizers={"main": adam(cfg, policy)},\n',
            ),
            (
                "# ---------------------------------------------------------------------------------------------------------------- stage\n",
                (
                    "def adam(cfg: Config, policy: Policy) -> torch.optim.Optimizer:\n"
                    '    """Adam; the critic learns at twice the rate."""\n'
                    "    critic = list(policy.critic.parameters())\n"
                    "    known = {id(p) for p in critic}\n"
                    "    others = [p for p in policy.parameters() if id(p) not in known]\n"
                    '    groups = [{"params": others, "lr": cfg.optim.lr}, {"params": critic, "lr": 2 * cfg.optim.lr}]\n'
                    "    return torch.optim.Adam(groups, lr=cfg.optim.lr, eps=1e-5)\n"
                    "\n"
                    "\n"
                    "# ---------------------------------------------------------------------------------------------------------------- stage\n"
                ),
            ),
        ),
    ),
    Case(
        "dqn~wider-exploration",
        "rl/dqn",
        "settings",
        "more exploration, a larger net",
        "one action in ten stays random, as in DQN's paper",
        "by argument: DQN's own value; actions in evaluation are greedy",
        argv=("--exploration-final-eps", "0.1", "--exploration-fraction", "0.3", "--hidden-sizes", "256", "256"),
    ),
    Case(
        "sac~noisier-actions",
        "rl/sac",
        "rollout",
        "some noise on top of the policy's own",
        "what was done is what is stored, and learning is off-policy",
        "by argument: off-policy, and the stored action is the one that was taken",
        edits=(
            (
                "        followed = {k: v.to(run.device) for k, v in envs.step(action).items()}\n",
                (
                    "        action = (action + 0.1 * noise[t].roll(1, 0).to(run.device)).clamp(-1, 1)\n"
                    "        followed = {k: v.to(run.device) for k, v in envs.step(action).items()}\n"
                ),
            ),
        ),
    ),
    Case(
        "sft~noisy-embeddings",
        "llm/sft",
        "settings",
        "NEFTune, packed, judged by ROUGE-L",
        "offered by the recipe",
        "by argument: NEFTune's own value",
        argv=("--neftune-noise-alpha", "5", "--packing", "--metric", "rouge,f1"),
    ),
    Case(
        "compress~three-layers",
        "distill/compress",
        "settings",
        "a larger student",
        "three of four layers are kept on either side",
        "by argument: more layers are kept",
        argv=("--encoder", "3", "--decoder", "3"),
    ),
]
