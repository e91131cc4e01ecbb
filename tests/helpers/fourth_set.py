"""Forks, settings and own data that are wrong, and healthy variants, from outside: the open half of the fourth set.

The half is the first byte of the id's SHA-256, modulo 2. The other half is held out in fourth_set_heldout.py. The authors of the set had not read the
gates. Run by `python -m tests.helpers.set_run --set fourth`.
"""

import csv
import json
from pathlib import Path

import torch
from trainworthy.recipes.vision.data import boxes

from tests.helpers.set_cases import Case, digits, distinct, lines, picture, preferences, rows_of_docstrings


def frames_of_one_video(root: Path) -> tuple[str, ...]:
    """Class folders: 20 digits of each class, each in ten frames that hardly differ; there is no val folder, so frames are split at random."""
    images, labels = digits()
    generator = torch.Generator().manual_seed(0)
    for label in range(10):
        for i in (labels == label).nonzero().flatten().tolist()[:20]:
            for k in range(10):
                moved = images[i].roll((k % 3 - 1, k // 3 - 1), (0, 1)).float()
                noisy = moved + 6 * torch.randn(moved.shape, generator=generator)
                picture(noisy.clamp(0, 255).byte(), root / str(label) / f"video{i:05}_{k:03}.png")
    return ("--data.path", str(root))


def boxes_of_thumbnails(root: Path) -> tuple[str, ...]:
    """COCO's JSON; every second training picture's boxes were drawn on a thumbnail of half its size."""
    found = boxes.load(boxes.Source(scenes=600))
    for split, rows in (("train", found.learn), ("val", found.held_out[:150])):
        images, annotations = [], []
        for n, row in enumerate(rows):
            shown = found.pictures[row]
            picture(shown, root / split / f"{n:05}.png")
            images.append({"id": n, "file_name": f"{n:05}.png", "height": shown.shape[1], "width": shown.shape[2]})
            scale = 0.5 if split == "train" and n % 2 else 1.0
            for (x0, y0, x1, y1), label in zip(found.boxes[row].tolist(), found.labels[row].tolist(), strict=True):
                box = [scale * x0, scale * y0, scale * (x1 - x0), scale * (y1 - y0)]
                annotations.append(
                    {
                        "id": len(annotations),
                        "image_id": n,
                        "category_id": label,
                        "bbox": box,
                        "area": box[2] * box[3],
                        "iscrowd": 0,
                    }
                )
        names = [{"id": c, "name": str(c)} for c in range(10)]
        file = root / "annotations" / f"instances_{split}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"images": images, "annotations": annotations, "categories": names}))
    return ("--data.path", str(root))


def names_of_eight_letters(root: Path) -> tuple[str, ...]:
    """Pairs out of a data base whose column holds eight characters."""
    lines(root / "rows.jsonl", [{**r, "completion": r["completion"][:8]} for r in rows_of_docstrings(3000)])
    return ("--data.path", str(root / "rows.jsonl"))


def rejected_that_were_cut(root: Path) -> tuple[str, ...]:
    """Preferences; the other model's answers had been sampled with a limit of a few tokens."""
    long = [r for r in distinct(preferences(4000)) if len(r["rejected"]) > 24]
    lines(root / "rows.jsonl", [{**r, "rejected": r["rejected"][:20].rstrip()} for r in long])
    return ("--data.path", str(root / "rows.jsonl"))


def preferences_in_csv(root: Path) -> tuple[str, ...]:
    """Preferences in a CSV file with one's own names of columns."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / "votes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "winner", "loser", "source"])
        writer.writeheader()
        for r in distinct(preferences(4000)):
            writer.writerow(
                {"question": r["prompt"], "winner": r["chosen"], "loser": r["rejected"], "source": r["source"]}
            )
    return ("--data.path", str(root / "votes.csv"), "--data.columns", "prompt=question,chosen=winner,rejected=loser")


BUGS = [
    Case(
        "classify~own-frames-of-one-video",
        "vision/classify",
        "own data",
        "frames of short videos, sorted into a folder for each class",
        "ten frames of each video, split at random: every held-out frame has near copies in training",
        "by argument: 200 digits are known, accuracy on held-out frames says nothing about other digits (160 pictures give 0.875, third set)",
        argv=("--train.epochs", "12", "--train.batch-size", "32", "--no-augment", "--image-size", "32"),
        data=frames_of_one_video,
    ),
    Case(
        "segment~elastic-drawn-twice",
        "vision/segment",
        "data",
        "elastic distortion, as U-Net's paper has it",
        "picture and mask are distorted by two draws: outlines are some pixels apart",
        "measured, 3 epochs, seed 0: IoU 0.571, unchanged recipe 0.857",
        edits=(
            (
                "    steps += [v2.RandomCrop(cfg.window, pad_if_needed=True, fill=outside)]\n",
                "    steps += [v2.RandomCrop(cfg.window, pad_if_needed=True, fill=outside), Elastic()]\n",
            ),
            (
                "class Double(nn.Sequential):\n",
                (
                    "class Elastic(nn.Module):\n"
                    '    """Elastic distortion (Simard 2003): the picture smoothly, the mask by the nearest pixel."""\n'
                    "\n"
                    "    def __init__(self):\n"
                    "        super().__init__()\n"
                    "        self.image = v2.ElasticTransform(300.0, 5.0)\n"
                    "        self.mask = v2.ElasticTransform(300.0, 5.0, interpolation=v2.InterpolationMode.NEAREST)\n"
                    "\n"
                    "    def forward(self, image, mask):\n"
                    "        return self.image(image), self.mask(mask)\n"
                    "\n"
                    "\n"
                    "class Double(nn.Sequential):\n"
                ),
            ),
        ),
    ),
    Case(
        "segment~easy-pixels-kept",
        "vision/segment",
        "loss",
        "online hard examples (Shrivastava 2016): a quarter of a window's pixels is scored, the hard ones",
        "sorted the other way: the easiest quarter is scored, and what is wrong has no gradient from the cross-entropy",
        "measured, 3 epochs, seed 0, without Dice: IoU 0.000; unchanged recipe 0.857 (with Dice)",
        edits=(
            (
                '        terms = {"ce": (ce * (1 - (-ce).exp()) ** cfg.focal if cfg.focal else ce).sum()}',
                (
                    "        ranked = ce.detach().flatten(1).sort(1).values\n"
                    "        ce = ce * (ce <= ranked[:, ranked.shape[1] // 4, None, None])\n"
                    '        terms = {"ce": (ce * (1 - (-ce).exp()) ** cfg.focal if cfg.focal else ce).sum()}'
                ),
            ),
        ),
        argv=("--dice", "0"),
    ),
    Case(
        "detect~frozen-from-scratch",
        "vision/detect",
        "model",
        "the backbone is frozen first, as in a fine-tuning tutorial",
        "there are no pretrained weights here: the head reads features of a random net",
        "by argument: no weight of the backbone moves from a random start; the small head cannot make up for it",
        edits=(
            (
                "    kind = detectors.KINDS[cfg.model]\n",
                (
                    "    net.backbone.requires_grad_(False)  # train the head first\n"
                    "    kind = detectors.KINDS[cfg.model]\n"
                ),
            ),
        ),
    ),
    Case(
        "detect~own-boxes-of-thumbnails",
        "vision/detect",
        "own data",
        "two people drew boxes, one of them on thumbnails",
        "the boxes of every second training picture are in units of half its size",
        "by argument: half of the training boxes cover another place, where there is no digit",
        argv=("--train.epochs", "4"),
        data=boxes_of_thumbnails,
    ),
    Case(
        "flow~time-of-one",
        "diffusion/flow",
        "loss",
        "time between 0 and 1, as in the JAX code this comes from",
        "the net learns at times of 0 to 1 and is sampled at times of 0 to 1000",
        "by argument: at sampling nearly all times lie far outside of those in training, and those in training hardly differ from each other",
        edits=(
            (
                '        prediction = model(batch["noisy"], t, batch["condition"]).sample.float()\n',
                '        prediction = model(batch["noisy"], t / process.noise.num_train_timesteps, batch["condition"]).sample.float()\n',
            ),
        ),
    ),
    Case(
        "pixel~average-of-timm",
        "diffusion/pixel",
        "EMA",
        "timm's average of the weights in place of the recipe's",
        "its decay of 0.9999 has no ramp: after 1,500 steps 86% of the average are untrained weights, which are sampled and exported",
        "by argument: 0.9999^1500 = 0.86 of the sampled and exported weights are untrained",
        edits=(
            ("from dataclasses import dataclass, field\n", "import copy\nfrom dataclasses import dataclass, field\n"),
            (
                "    ema = core.Ema(model, cfg.ema) if cfg.ema else None\n",
                "    ema = Average(model) if cfg.ema else None\n",
            ),
            (
                "def make_model(cfg: Config, channels: int, n_classes: int) -> nn.Module:\n",
                (
                    "class Average:\n"
                    '    """timm\'s ModelEma."""\n'
                    "\n"
                    "    def __init__(self, model: nn.Module, decay: float = 0.9999):\n"
                    "        self.model, self.decay = copy.deepcopy(model).requires_grad_(False).eval(), decay\n"
                    "\n"
                    "    @torch.no_grad()\n"
                    "    def update(self, model: nn.Module) -> None:\n"
                    "        for mine, theirs in zip(self.model.state_dict().values(), model.state_dict().values(), strict=True):\n"
                    "            mine.copy_(self.decay * mine + (1.0 - self.decay) * theirs)\n"
                    "\n"
                    "    def state_dict(self) -> dict:\n"
                    "        return self.model.state_dict()\n"
                    "\n"
                    "    def load_state_dict(self, state: dict) -> None:\n"
                    "        self.model.load_state_dict(state)\n"
                    "\n"
                    "\n"
                    "def make_model(cfg: Config, channels: int, n_classes: int) -> nn.Module:\n"
                ),
            ),
        ),
    ),
    Case(
        "pixel~keep-prob",
        "diffusion/pixel",
        "settings",
        "a tenth without a condition, as in code that names the share that keeps it",
        "nine of ten samples have no condition: the class is hardly learnt",
        "by argument: a tenth of the samples teach the condition, a tenth as many as meant",
        argv=("--conditioning-dropout-prob", "0.9"),
    ),
    Case(
        "latent~factor-of-stable-diffusion",
        "diffusion/latent",
        "data",
        "the scaling factor that everybody uses",
        "0.18215 is that of another autoencoder; latents are decoded by this one's own factors",
        "by argument: the process is made for a deviation of 1, and the decoder divides by another factor than was multiplied by",
        edits=(
            (
                "    z = pipeline.scaled(latents.measured(vae, middles[learn]), middles)\n",
                "    latents.measured(vae, middles[learn])\n    z = 0.18215 * middles\n",
            ),
        ),
    ),
    Case(
        "text~captions-sorted",
        "diffusion/text",
        "data",
        "captions are encoded in sorted order, so that a cache file is stable",
        "rows of the table are asked for by the old numbers: a caption is read as another one",
        "by argument: training goes on as ever, rows of a table are in any order; held-out and exported captions ask for other digits",
        edits=(
            (
                "    words = parts.read(found.captions, run.device)\n",
                "    words = parts.read(tuple(sorted(found.captions)), run.device)\n",
            ),
        ),
    ),
    Case(
        "ppo~ends-handled-once",
        "rl/ppo",
        "rollout",
        "a clean-up: the recursion stops at the end of an episode, so the bootstrapping need not look at it again",
        "a terminated episode is worth what the critic says of its last state: falling costs nothing",
        "measured, 60 rollouts, seed 0: return 9; the best possible, 500, with another variant of the recipe at as many rollouts",
        edits=(
            (
                "    delta, goes_on = reward + gamma * next_value * ~terminated - value, gamma * lam * ~done\n",
                "    delta, goes_on = reward + gamma * next_value - value, gamma * lam * ~done\n",
            ),
        ),
    ),
    Case(
        "sac~mean-is-done",
        "rl/sac",
        "rollout",
        "the returns of training become those of evaluation: the mean action is taken",
        "the drawn action is still what is stored: the critic learns effects of actions that were not taken",
        "measured, 80 iterations, seed 0: return -1175, unchanged recipe -665",
        edits=(
            (
                "        followed = {k: v.to(run.device) for k, v in envs.step(action).items()}\n",
                (
                    "        taken = policy(observation) if iteration else action\n"
                    "        followed = {k: v.to(run.device) for k, v in envs.step(taken).items()}\n"
                ),
            ),
        ),
    ),
    Case(
        "sac~polyak",
        "rl/sac",
        "target",
        "a polyak of 0.995, from Spinning Up",
        "there it is the share of the target that is kept; tau is the share that is taken: the target is the critic itself",
        "measured, 80 iterations, seed 0: return -1442, unchanged recipe -665",
        argv=("--tau", "0.995"),
    ),
    Case(
        "rlhf~reference-follows",
        "rl/rlhf",
        "reference",
        "the penalty holds each iteration near the one before, as a trust region would",
        "the reference is copied from the policy: no KL to the start is ever measured, and nothing holds the policy near it",
        "by argument: the KL that is measured is that of one iteration; any distance from the start is free, and the reported KL is near 0",
        edits=(
            (
                '        controller.update(metrics["kl"])\n',
                (
                    '        controller.update(metrics["kl"])\n'
                    '        stage.frozen_modules["reference"].load_state_dict(policy.state_dict())\n'
                ),
            ),
        ),
    ),
    Case(
        "sft~own-varchar",
        "llm/sft",
        "own data",
        "pairs out of a data base",
        "its column holds eight characters: longer names are cut, in training and in validation",
        "63% of the names are cut (counted): by argument: longer names are never given, and the metric does not miss them",
        argv=("--train.epochs", "0.4"),
        data=names_of_eight_letters,
    ),
    Case(
        "dpo~own-rejected-cut",
        "llm/dpo",
        "own data",
        "answers of a weaker model as the rejected ones",
        "they were sampled with a short limit and break off: what is learnt is that a sentence ends",
        "by argument: the end of an answer alone gives an accuracy of nearly 1, which says nothing about content",
        argv=("--train.epochs", "0.1"),
        data=rejected_that_were_cut,
    ),
    Case(
        "instruct~projector-renamed",
        "vlm/instruct",
        "model",
        "weights of stage one, by LLaVA's name of the projector",
        "no key fits, strict is off: the language model is tuned behind a random projector",
        "by argument: stage one is lost; LLaVA's issue 808",
        edits=(
            (
                "        model.load_state_dict(previous.model.state_dict())\n",
                (
                    '        trained = {k.replace("projector.", "mm_projector."): v for k, v in previous.model.state_dict().items()}\n'
                    "        model.load_state_dict(trained, strict=False)\n"
                ),
            ),
        ),
    ),
    Case(
        "logits~teacher-in-zero-one",
        "distill/logits",
        "teacher",
        "student and teacher get the same picture (a clean-up)",
        "the teacher reads pictures in -1 to 1, and gets 0 to 1",
        "by argument: ink is 0 to 1 where the teacher knows -1 to 1, the ground is grey: its labels get worse",
        edits=(("        return teacher.logits(images * 2 - 1)\n", "        return teacher.logits(images)\n"),),
    ),
    Case(
        "compress~encoder-frozen",
        "distill/compress",
        "model",
        "a frozen encoder, as Distil-Whisper has it",
        "there the encoder is whole; here half of its layers are gone, and the others never learn to do without",
        "by argument: two layers of four without adaptation; the report's line `its layers, as they were copied` tells what that is worth",
        edits=(
            (
                '    whole = () if cfg.encoder else ("model.encoder",)\n',
                '    whole = ("model.encoder",)\n',
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "classify~sgd",
        "vision/classify",
        "optimiser",
        "SGD with momentum, no smoothing",
        "a usual rate for it",
        "by argument: 0.1 with Nesterov momentum is usual for residual nets with GroupNorm",
        argv=("--optim.name", "sgd", "--optim.lr", "0.1", "--label-smoothing", "0", "--train.batch-size", "128"),
    ),
    Case(
        "classify~erasing",
        "vision/classify",
        "data",
        "random erasing (Zhong 2020) behind the recipe's own augmentation",
        "small rectangles, in a third of the pictures",
        "by argument: at most 8% of a picture in a third of the pictures",
        edits=(
            (
                (
                    "        return None, v2.RandomAffine(12, translate=(0.1, 0.1), scale=(0.85, 1.15), shear=10,\n"
                    "                                     interpolation=v2.InterpolationMode.BILINEAR)  # fmt: skip\n"
                ),
                (
                    "        affine = v2.RandomAffine(12, translate=(0.1, 0.1), scale=(0.85, 1.15), shear=10,\n"
                    "                                 interpolation=v2.InterpolationMode.BILINEAR)  # fmt: skip\n"
                    "        return None, v2.Compose([affine, v2.RandomErasing(0.33, (0.02, 0.08))])\n"
                ),
            ),
        ),
    ),
    Case(
        "segment~silu",
        "vision/segment",
        "model",
        "SiLU instead of a leaky ReLU, a wider net, a smaller batch",
        "another smooth activation",
        "by argument: another smooth activation, twice the width",
        edits=(("nn.LeakyReLU(0.1)]", "nn.SiLU()]"),),
        argv=("--widths", "12", "24", "48", "--train.batch-size", "8", "--optim.lr", "5e-3"),
    ),
    Case(
        "detect~larger-batch",
        "vision/detect",
        "settings",
        "a larger batch, a higher rate, a stricter suppression",
        "the rate grows with the root of the batch",
        "by argument: the rate follows the root of the batch",
        argv=("--train.batch-size", "32", "--optim.lr", "4e-3", "--nms-thresh", "0.5", "--optim.schedule", "linear"),
    ),
    Case(
        "latent~faster-average",
        "diffusion/latent",
        "settings",
        "a shorter average for a short run, smaller batches in stage two",
        "the last 200 steps are averaged",
        "by argument: the schedule ends at zero, so the last weights are the average",
        argv=("--ema", "0.995", "--latent.batch-size", "32", "--latent.lr", "1.5e-3"),
    ),
    Case(
        "pretrain~accumulated",
        "llm/pretrain",
        "settings",
        "twice the batch in four parts, a stable rate with a decay at the end",
        "half as many steps at a higher rate",
        "by argument: the rate follows the root of the batch; half as many steps",
        argv=("--train.batch-size", "16", "--train.accumulate", "4", "--optim.schedule", "wsd", "--optim.lr", "3e-3"),
    ),
    Case(
        "dpo~ipo",
        "llm/dpo",
        "loss",
        "IPO",
        "offered by the recipe",
        "by argument: a published loss that the recipe offers",
        argv=("--loss", "ipo", "--optim.lr", "3e-4"),
    ),
    Case(
        "reward~own-table",
        "llm/reward",
        "own data",
        "votes in a spreadsheet",
        "right pairs under other names",
        "by argument: the recipe's own pairs, fewer",
        argv=("--train.epochs", "0.2"),
        data=preferences_in_csv,
    ),
    Case(
        "instruct~wider-projector",
        "vlm/instruct",
        "settings",
        "a wider projector, larger batches",
        "the rate is higher with them",
        "by argument: twice the width and batch, rates a little higher",
        argv=("--projector-width", "512", "--train.batch-size", "32", "--language-lr", "7e-4"),
    ),
    Case(
        "logits~larger-student",
        "distill/logits",
        "settings",
        "a student of the teacher's size, a softer target",
        "offered by the recipe",
        "by argument: a larger student, a usual temperature",
        argv=("--widths", "16", "32", "64", "--temperature", "4", "--optim.lr", "5e-3"),
    ),
]
