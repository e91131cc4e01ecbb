"""Forks, settings and own data that are wrong, and healthy variants, from outside: the open half of the fourteenth set.

The half is the last hex digit of the id's SHA-256, modulo 2; the parity of its first byte is the same. The other half is held out in
fourteenth_set_heldout.py. The author of the set had read the recipes, not the gates. Run by
`python -m tests.helpers.set_run --set fourteenth`.
"""

import random
from pathlib import Path

import torch
from PIL import Image

from tests.helpers.set_cases import Case, digits, lines, rows_of_docstrings


def joined_by_a_separator(root: Path) -> tuple[str, ...]:
    """Rows of ten sentences each, with `<|endoftext|>` between them as the raw files of TinyStories have it."""
    sentences = [row["prompt"] for row in rows_of_docstrings(5000)]
    lines(
        root / "stories.jsonl",
        [{"text": "\n<|endoftext|>\n".join(sentences[i : i + 10])} for i in range(0, len(sentences), 10)],
    )
    return ("--data.path", str(root / "stories.jsonl"))


def alpaca_with_text(root: Path) -> tuple[str, ...]:
    """Rows as in tatsu-lab/alpaca: `instruction`, `output`, and `text`, which is the whole formatted example with its answer."""
    rows = [
        {
            "instruction": row["prompt"],
            "input": "",
            "output": row["completion"],
            "text": f"### Instruction:\n{row['prompt']}\n\n### Response:\n{row['completion']}",
        }
        for row in rows_of_docstrings(1500)
    ]
    lines(root / "alpaca.jsonl", rows)
    return ("--data.path", str(root / "alpaca.jsonl"), "--data.columns", "prompt=text,completion=output")


def answers_through_pandas(root: Path) -> tuple[str, ...]:
    """Rows of a table in which one answer in four was missing; `astype(str)` wrote it as `nan`."""
    rows = rows_of_docstrings(1500)
    draws = random.Random(0)
    for row in rows:
        row["completion"] = "nan" if draws.random() < 0.25 else row["completion"]
    lines(root / "rows.jsonl", rows)
    return ("--data.path", str(root / "rows.jsonl"))


def names_of_all_scripts(root: Path) -> tuple[str, ...]:
    """train/ and val/ with three classes of 150, 90 and 60 tinted digits of 20 to 60 pixels, JPEG and PNG, named in three scripts."""
    images, labels = digits()
    draws = random.Random(0)
    for label, name, count in ((3, "à gauche", 150), (5, "日本", 90), (8, "Ñandú", 60)):
        mine = (labels == label).nonzero().flatten().tolist()
        for k, i in enumerate(mine[:count]):
            side, tint = draws.randint(20, 60), [draws.uniform(0.5, 1.0) for _ in range(3)]
            shaded = torch.stack([images[i] * t for t in tint]).byte().permute(1, 2, 0).contiguous().numpy()
            folder = root / ("val" if k % 5 == 4 else "train") / name
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{i:04}.{'jpg' if k % 2 else 'png'}"
            Image.fromarray(shaded).resize((side, side), Image.Resampling.BILINEAR).save(file)
    return ("--data.path", str(root))


LOSS = (
    '        logits = model(batch["image"])\n'
    '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}\n'
)
BUILD = "    balanced = balancing.build("
ROLL = '            batch["advantage"] = (batch["advantage"] - everyone.mean()) / (everyone.std() + 1e-8)\n'
FLOW_LOSS = (
    '        prediction = model(batch["noisy"], t, batch["condition"]).sample.float()\n'
    '        target = process.target(batch["image"], batch["noise"], t)\n'
)
SOFT = "        return (logits.float() / temperature).log_softmax(1)\n"

BUGS = [
    Case(
        "classify~attention-over-samples",
        "vision/classify",
        "model",
        "self-attention over the places of the last feature map, before they are averaged",
        "nn.MultiheadAttention without batch_first takes (length, batch, channels): it attends over the pictures of a batch, not over a picture",
        "by argument: an answer depends on the other pictures of the batch; validation batches hold one or two classes",
        edits=(
            (
                "        self.head = nn.Linear(widths[-1], n_classes)\n",
                "        self.attend = nn.MultiheadAttention(widths[-1], 4)\n"
                "        self.head = nn.Linear(widths[-1], n_classes)\n",
            ),
            (
                "        return self.head(x.mean((2, 3)))  # (B, n_classes)\n",
                "        x = x.flatten(2).transpose(1, 2)  # (B, h * w, widths[-1])\n"
                "        x = x + self.attend(x, x, x, need_weights=False)[0]\n"
                "        return self.head(x.mean(1))  # (B, n_classes)\n",
            ),
        ),
    ),
    Case(
        "classify~balanced-twice",
        "vision/classify",
        "sampler",
        "classes of unequal size: repetition of the small ones, and class weights in the loss",
        "both correct the same imbalance: the smallest class weighs twenty times as much as the largest",
        "by argument: the smallest class weighs twenty times the largest, the accuracy of large classes falls",
        edits=(
            (
                BUILD,
                "    weight = 1 / torch.bincount(labels[learn], minlength=n)\n    weight = weight / weight.mean()\n"
                + BUILD,
            ),
            (
                LOSS,
                '        label = batch["label"]\n'
                '        each = F.cross_entropy(model(batch["image"]), label, label_smoothing=cfg.label_smoothing, reduction="none")\n'
                '        return {"ce": (weight[label] * each).sum()}\n',
            ),
        ),
        argv=("--balance.by", "sampler", "--balance.ratio", "20"),
    ),
    Case(
        "classify~best-by-largest-loss",
        "vision/classify",
        "metric",
        "the checkpoint is chosen by the validation loss, with patience",
        "higher_is_better keeps its default: the evaluation with the largest loss is the best one",
        "by argument: the first evaluation stays the best, and patience ends the run five epochs later",
        edits=(
            ("from dataclasses import dataclass, field\n", "import math\nfrom dataclasses import dataclass, field\n"),
            (
                'core.Metric("accuracy", question, floor=1 / n, ceiling=1.0, best_known=best_known)',
                'core.Metric("nll", question, floor=math.log(n), ceiling=0.0)',
            ),
        ),
        argv=("--train.patience", "5", "--run.export", "best"),
    ),
    Case(
        "segment~logit-above-one-half",
        "vision/segment",
        "metric",
        "one threshold for the object, which can be moved later, instead of the larger of two logits",
        "the threshold of a probability is applied to a logit",
        "measured without gates: IoU 0.8915 against 0.8965 after 10 epochs, recall of nuclei 0.924 against 0.953",
        edits=(
            (
                '            total += segmentation.scored(batch, model(batch["image"]), n)\n',
                '            answer = (model(batch["image"])[:, 1] > 0.5).long()\n'
                '            total += segmentation.counted(batch["mask"], answer, n)\n',
            ),
        ),
    ),
    Case(
        "pretrain~own-separators-as-text",
        "llm/pretrain",
        "own data",
        "a file of stories as TinyStories ships it, cut into rows of ten stories",
        "the separator <|endoftext|> is text to the tokenizer: thirteen bytes that are easily predicted, and stories that are one document",
        "by argument: bits per byte count thirteen bytes between stories that cost nothing",
        data=joined_by_a_separator,
        argv=("--train.epochs", "6"),
    ),
    Case(
        "sft~own-column-text",
        "llm/sft",
        "own data",
        "the columns of tatsu-lab/alpaca: `text` is taken for the prompt",
        "`text` is the whole example: the prompt ends with the answer",
        "by argument: the answer is copied from the prompt, in validation too",
        data=alpaca_with_text,
        source="https://huggingface.co/datasets/tatsu-lab/alpaca",
    ),
    Case(
        "sft~own-nan",
        "llm/sft",
        "own data",
        "a table with missing answers, written by pandas as text",
        "one answer in four is the word nan",
        "by argument: the model says nan to one prompt in four",
        data=answers_through_pandas,
    ),
    Case(
        "ppo~rewards-standardised",
        "rl/ppo",
        "reward",
        "rewards of mean 0 and deviation 1 in each rollout, so that one rate fits every environment",
        "their mean is what an episode earns by lasting: a reward of 1 for every step becomes 0",
        "measured without gates: return 10 against 205 after 8 iterations",
        edits=(
            (
                '    done = rollout["terminated"] | rollout["truncated"]\n',
                '    reward = rollout["reward"]\n'
                '    rollout["reward"] = (reward - reward.mean()) / (reward.std() + 1e-8)\n'
                '    done = rollout["terminated"] | rollout["truncated"]\n',
            ),
        ),
    ),
    Case(
        "ppo~mirrored-without-the-action",
        "rl/ppo",
        "augmentation",
        "the cart-pole is symmetric: every minibatch holds its mirror image too",
        "the observations are mirrored, the actions are not: left and right get the same advantage",
        "measured without gates: return 61 against 500 after 25 iterations",
        edits=(
            (
                ROLL,
                ROLL + "            batch = {k: torch.cat([v, v]) for k, v in batch.items()}\n"
                '            batch["observation"][len(own) :] *= -1\n',
            ),
        ),
    ),
    Case(
        "dqn~remembers-the-greedy-action",
        "rl/dqn",
        "buffer",
        "names changed while exploration was rewritten",
        "the buffer gets the greedy action, the environment another one when it explores",
        "not visible on CartPole (return 256 against 200 after 120 iterations); by argument: values are those of actions that were not taken",
        edits=(
            (
                '        steps.append({"observation": observation, "action": action, **followed})\n',
                '        steps.append({"observation": observation, "action": greedy, **followed})\n',
            ),
        ),
    ),
    Case(
        "logits~normalised-over-the-batch",
        "distill/logits",
        "loss",
        "standardised logits (Sun 2024) for both nets, so that their scales need not agree",
        "mean and deviation are over the batch, not over the classes of a picture",
        "by argument: the student's own scores are compared with nothing but the batch, and its answer is their largest",
        edits=(
            (
                SOFT,
                "        z = logits.float()\n"
                "        z = (z - z.mean(0)) / (z.std(0) + 1e-6)\n"
                "        return (z / temperature).log_softmax(1)\n",
            ),
        ),
        source="https://arxiv.org/abs/2403.01427",
    ),
    Case(
        "logits~teacher-on-negatives",
        "distill/logits",
        "augmentation",
        "stronger augmentation, since the teacher labels every picture: half of them are inverted",
        "the teacher has never seen a negative: half of its answers are noise",
        "by argument: half of the training pictures have answers of a net outside its range",
        edits=(
            (
                "from torch.nn import functional as F\n",
                "from torch.nn import functional as F\nfrom torchvision.transforms import v2\n",
            ),
            (
                "    train_data.augment = augment if cfg.augment else None\n",
                "    train_data.augment = v2.Compose([augment, v2.RandomInvert()]) if cfg.augment else None\n",
            ),
        ),
    ),
    Case(
        "flow~labels-left-behind",
        "diffusion/flow",
        "loss",
        "minibatch optimal transport (Tong 2023): each noise gets the nearest picture of the batch",
        "the pictures are put in another order, their classes are not",
        "measured without gates: agreement 0.12 after 3 epochs, chance is 0.10",
        edits=(
            (
                "from torch import Tensor, nn\n",
                "from scipy.optimize import linear_sum_assignment\nfrom torch import Tensor, nn\n",
            ),
            (
                FLOW_LOSS,
                '        cost = torch.cdist(batch["noise"].flatten(1), batch["image"].flatten(1)).square()\n'
                '        image = batch["image"][linear_sum_assignment(cost.cpu())[1]]\n'
                '        prediction = model(process.add(image, batch["noise"], t), t, batch["condition"]).sample.float()\n'
                '        target = process.target(image, batch["noise"], t)\n',
            ),
        ),
        source="https://github.com/atong01/conditional-flow-matching",
    ),
    Case(
        "pixel~loss-on-ink",
        "diffusion/pixel",
        "loss",
        "a masked loss, so that the net learns the strokes and not the empty page",
        "nothing says what the page is: samples have no background",
        "measured without gates: agreement 0.315 against 0.680 after 3 epochs, pictures too bright by 0.49",
        edits=(
            (
                "        error = (prediction - target).square().mean((1, 2, 3))  # (B,)\n",
                '        ink = (batch["image"] > -0.9).float()\n'
                "        error = ((prediction - target).square() * ink).sum((1, 2, 3)) / ink.sum((1, 2, 3)).clamp_min(1)  # (B,)\n",
            ),
        ),
    ),
    Case(
        "flow~rand-for-randn",
        "diffusion/flow",
        "noise",
        "the data set is written anew",
        "noise is uniform in 0 to 1: training and evaluation agree, the exported pipeline starts from normal noise",
        "by argument: the exported pipeline starts from another noise than the net has seen",
        edits=(
            (
                "        noise = torch.randn(image.shape, generator=generator)\n",
                "        noise = torch.rand(image.shape, generator=generator)\n",
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "classify~own-foreign-names",
        "vision/classify",
        "own data",
        "three classes of unequal size named in three scripts, tinted pictures of many sizes, JPEG and PNG, a validation folder",
        "right: valid files, and every class is in both splits",
        "by argument: the same pictures in another form",
        data=names_of_all_scripts,
        argv=("--train.epochs", "30", "--train.batch-size", "16", "--image-size", "32"),
    ),
    Case(
        "pretrain~vocabulary-rounded-up",
        "llm/pretrain",
        "model",
        "the embedding has a multiple of 64 rows, as in nanoGPT: faster on an accelerator",
        "right: the 48 rows behind the tokenizer's 2,000 are never a target, and begin with a frequency near 0",
        "by argument: rows that are never a target cost nothing",
        edits=(
            ('"vocab_size": len(tokenizer),', '"vocab_size": 64 * math.ceil(len(tokenizer) / 64),'),
            (
                "    head[:, 0] = log_p / math.sqrt(embedding.shape[1] / 2)\n",
                "    log_p = F.pad(log_p, (0, len(head) - len(log_p)), value=-20.0)\n"
                "    head[:, 0] = log_p / math.sqrt(embedding.shape[1] / 2)\n",
            ),
        ),
        argv=("--data.vocabulary", "2000"),
        source="https://github.com/karpathy/nanoGPT",
    ),
    Case(
        "ppo~mirrored-too",
        "rl/ppo",
        "augmentation",
        "the cart-pole is symmetric: every minibatch holds its mirror image too (Mittal 2024)",
        "right: observation and action are mirrored, with the advantage and the log-probability of the original",
        "measured without gates: return 500 after 25 iterations, as the recipe",
        edits=(
            (
                ROLL,
                ROLL + "            batch = {k: torch.cat([v, v]) for k, v in batch.items()}\n"
                '            batch["observation"][len(own) :] *= -1\n'
                '            batch["action"][len(own) :] = 1 - batch["action"][len(own) :]\n',
            ),
        ),
        source="https://arxiv.org/abs/2403.04359",
    ),
    Case(
        "ppo~huber-value",
        "rl/ppo",
        "loss",
        "a Huber loss for the value, without clipping it",
        "right: the same minimum, less weight for far returns",
        "measured without gates: return 500 after 25 iterations, as the recipe",
        edits=(
            (
                '        near = batch["value"] + (value - batch["value"]).clamp(-cfg.clip_range_vf, cfg.clip_range_vf)\n'
                '        error = torch.max((value - batch["return"]).square(), (near - batch["return"]).square())\n',
                '        error = 2 * nn.functional.smooth_l1_loss(value, batch["return"], reduction="none")\n',
            ),
        ),
        argv=("--clip-range-vf", "inf"),
    ),
    Case(
        "dqn~replay-in-half",
        "rl/dqn",
        "buffer",
        "half of the memory: the buffer keeps observations in half precision",
        "right: three decimal digits are enough for positions and angles",
        "by argument: half precision keeps three digits",
        edits=(
            (
                "        replay.add(whole, step.index)\n",
                '        replay.add({k: v.half().float() if "observation" in k else v for k, v in whole.items()}, step.index)\n',
            ),
        ),
    ),
    Case(
        "flow~minibatch-transport",
        "diffusion/flow",
        "loss",
        "minibatch optimal transport (Tong 2023): each picture gets the nearest noise of the batch",
        "right: the noises are put in another order, pictures and classes stay together; the levels are those of the pictures",
        "by argument: a published method",
        edits=(
            (
                "from torch import Tensor, nn\n",
                "from scipy.optimize import linear_sum_assignment\nfrom torch import Tensor, nn\n",
            ),
            (
                FLOW_LOSS,
                '        cost = torch.cdist(batch["image"].flatten(1), batch["noise"].flatten(1)).square()\n'
                '        noise = batch["noise"][linear_sum_assignment(cost.cpu())[1]]\n'
                '        prediction = model(process.add(batch["image"], noise, t), t, batch["condition"]).sample.float()\n'
                '        target = process.target(batch["image"], noise, t)\n',
            ),
        ),
        source="https://arxiv.org/abs/2302.00482",
    ),
]
