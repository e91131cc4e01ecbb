"""Forks, settings and own data that are wrong, and healthy variants, from outside: the held-out half.

The first score on it is recorded before anything is mended. Read it afterwards only. The open half is third_set.py.
"""

import random
from pathlib import Path

from tests.helpers.set_cases import Case, class_folders, lines, preferences


def half_exchanged(root: Path) -> tuple[str, ...]:
    """Preferences; half of the rows have their answers exchanged."""
    rows = preferences(3000)
    draw = random.Random(0)
    wrong = [{**r, "chosen": r["rejected"], "rejected": r["chosen"]} if draw.random() < 0.5 else r for r in rows]
    lines(root / "rows.jsonl", wrong)
    return ("--data.path", str(root / "rows.jsonl"))


def imbalanced(root: Path) -> tuple[str, ...]:
    """Class folders of 400 digits each, 50 of three classes."""
    class_folders(root, 400, fewer={2: 50, 5: 50, 8: 50})
    return ("--data.path", str(root))


BUGS = [
    Case(
        "segment~picture-moved-alone",
        "vision/segment",
        "data",
        "small shifts of the picture as a further augmentation",
        "the shift moves the whole picture by up to a tenth of its side, the mask stays where it was",
        "by argument: a tenth of the picture's side is more than a nucleus",
        edits=(
            (
                "    outside = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORE}\n",
                (
                    "    outside = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORE}\n"
                    "    shift = v2.RandomAffine(0, translate=(0.1, 0.1))\n"
                    "    steps.append(v2.Lambda(lambda x: tv_tensors.Image(shift(x.as_subclass(torch.Tensor))), tv_tensors.Image))\n"
                ),
            ),
        ),
    ),
    Case(
        "pixel~pictures-from-zero-to-one",
        "diffusion/pixel",
        "data",
        "images in [0, 1], as everybody's own loader has them",
        "the net learns images in [0, 1] and its samples are read as [-1, 1]: grey where they should be black",
        "by argument: the background of every sample is grey: half of the range is never used",
        edits=(
            (
                "        image, label = self.images[index], self.labels[index]\n",
                "        image, label = self.images[index] / 2 + 0.5, self.labels[index]\n",
            ),
        ),
    ),
    Case(
        "pixel~offset-not-in-target",
        "diffusion/pixel",
        "data",
        "offset noise, for darker and brighter samples",
        "the offset is added to what the net sees but not to the noise it must predict",
        "by argument: 0.5 of offset to 1 of noise is taken for picture content: the brightness of samples drifts",
        edits=(
            (
                "        noisy = self.process.add(image[None], noise[None], timestep[None])[0]\n",
                (
                    "        offset = 0.5 * torch.randn(len(image), 1, 1, generator=generator)\n"
                    "        noisy = self.process.add(image[None], (noise + offset)[None], timestep[None])[0]\n"
                ),
            ),
        ),
    ),
    Case(
        "latent~sorted-for-the-cache",
        "diffusion/latent",
        "data",
        "images sorted by class before encoding, for a more even cache",
        "the order is not undone: latent i belongs to another image than label i",
        "by argument: a latent's label is right once in ten",
        edits=(
            (
                ("    middles = latents.cached(vae, images)\n    z ="),
                ("    middles = latents.cached(vae, images[labels.argsort(stable=True)])\n    z ="),
            ),
        ),
    ),
    Case(
        "dpo~rows-cut-in-the-collator",
        "llm/dpo",
        "data",
        "names are short: a limit on memory, set where TRL's documentation sets it",
        "the collator cuts rows from the end, where the answers are: many pairs are compared by what both begin with, or by nothing",
        "75% of pairs have no answer token left, and 2% of all answer tokens (counted on 300): by argument: a pair without tokens has no gradient",
        edits=(("        max_length=None,  # what is too long is left out, never cut\n", "        max_length=24,\n"),),
    ),
    Case(
        "reward~both-orders",
        "llm/reward",
        "data",
        "each pair in both orders, so that the model has no habit of position, as for judges that read both",
        "a pair and its exchange cancel: each answer is preferred as often as it is not, and nothing can be learnt",
        "by argument: the loss's gradients of a pair and its exchange cancel where rewards are equal, as at the start",
        edits=(
            (
                "        data[name] = preferences.Whole(kept, chat)\n",
                (
                    '        if name == "train":\n'
                    '            kept = [one for r in kept for one in (r, {**r, "chosen": r["rejected"], "rejected": r["chosen"]})]\n'
                    "        data[name] = preferences.Whole(kept, chat)\n"
                ),
            ),
        ),
    ),
    Case(
        "sac~short-horizon",
        "rl/sac",
        "settings",
        "rewards come at every step, so a short horizon seems enough",
        "at a discount of 0.5 two steps count: swinging up needs dozens",
        "measured, 60 iterations, seed 0: return -1428 at 40 and -1438 at 60; unchanged -888 at 40; random actions earn -1213",
        argv=("--gamma", "0.5"),
    ),
    Case(
        "grpo~cold-sampling",
        "rl/grpo",
        "settings",
        "better answers are sampled at a low temperature",
        "all answers of a group are the same, so nearly no group has a gradient",
        "by argument: at temperature 0.05 eight answers are nearly always the same: equal rewards, no gradient",
        argv=("--temperature", "0.05"),
    ),
    Case(
        "rlhf~reward-at-last-column",
        "rl/rlhf",
        "data",
        "a completion is as long as the tensor (a clean-up)",
        "completions that end early get no reward: it falls on their padding",
        "by argument: only completions that never end are paid: ending is unlearnt",
        edits=(("    last = valid.sum(1) - 1\n", "    last = torch.full_like(valid.sum(1), valid.shape[1] - 1)\n"),),
    ),
    Case(
        "instruct~mirrored",
        "vlm/instruct",
        "data",
        "mirroring as augmentation",
        "half of the pictures are mirrored while questions ask for what is left",
        "by argument: two of four kinds of questions ask for the left one; mirrored, the label is another item's in most scenes of two or more",
        edits=(
            (
                '        return {"answer": rows.nll(model(batch), batch["labels"])}\n',
                (
                    '        turned = torch.rand(len(batch["image"]), device=batch["image"].device) < 0.5\n'
                    '        image = batch["image"]\n'
                    "        if model.training:\n"
                    "            image = torch.where(turned[:, None, None, None], image.flip(-1), image)\n"
                    '        return {"answer": rows.nll(model({**batch, "image": image}), batch["labels"])}\n'
                ),
            ),
        ),
    ),
    Case(
        "logits~teacher-reads-zero-to-one",
        "distill/logits",
        "data",
        "the images are in [0, 1] already (a clean-up)",
        "the teacher reads [-1, 1]: it sees washed-out images, and its answers are worse",
        "by argument: the teacher's contrast is halved around another mean",
        edits=(("        return teacher.logits(images * 2 - 1)\n", "        return teacher.logits(images)\n"),),
    ),
    Case(
        "reward~own-half-exchanged",
        "llm/reward",
        "own data",
        "chosen and rejected by the position on the screen, which was random",
        "half of the pairs have their answers exchanged",
        "by argument: preferences say nothing on average",
        argv=("--train.epochs", "0.2"),
        data=half_exchanged,
    ),
]

HEALTHY = [
    Case(
        "classify~with-sgd",
        "vision/classify",
        "settings",
        "SGD with momentum",
        "SGD at 50 times the rate of AdamW",
        "measured, 4 epochs, seed 0: it learns as the unchanged recipe does (0.71 at epoch 2; both)",
        argv=("--optim.name", "sgd", "--optim.lr", "0.05"),
    ),
    Case(
        "classify~big-batch-bf16",
        "vision/classify",
        "settings",
        "fewer, larger steps in bf16",
        "twice the rate for four times the batch",
        "by argument: usual scaling of the rate; bf16 autocast with fp32 weights",
        argv=("--train.batch-size", "256", "--optim.lr", "6e-3", "--train.precision", "bf16"),
    ),
    Case(
        "classify~with-erasing",
        "vision/classify",
        "data",
        "random erasing behind the affine augmentation",
        "a fourth of the images lose a small square",
        "by argument: torchvision's own augmentation at small areas",
        edits=(
            (
                (
                    "        return None, v2.RandomAffine(12, translate=(0.1, 0.1), scale=(0.85, 1.15), shear=10,\n"
                    "                                     interpolation=v2.InterpolationMode.BILINEAR)  # fmt: skip\n"
                ),
                (
                    "        smooth = v2.InterpolationMode.BILINEAR\n"
                    "        moved = v2.RandomAffine(12, translate=(0.1, 0.1), scale=(0.85, 1.15), shear=10, interpolation=smooth)\n"
                    "        return None, v2.Compose([moved, v2.RandomErasing(p=0.25, scale=(0.02, 0.1))])\n"
                ),
            ),
        ),
    ),
    Case(
        "classify~own-imbalanced",
        "vision/classify",
        "own data",
        "classes as often as they occur",
        "three classes have an eighth of the others' pictures",
        "by argument: rare classes have 40 pictures to learn from",
        argv=("--train.epochs", "20", "--no-augment", "--image-size", "32"),
        data=imbalanced,
    ),
    Case(
        "segment~focal-bf16",
        "vision/segment",
        "settings",
        "a focal loss, and bf16",
        "both are settings of the recipe",
        "by argument: both are offered by the recipe",
        argv=("--focal", "1.0", "--train.precision", "bf16"),
    ),
    Case(
        "pixel~predicts-noise",
        "diffusion/pixel",
        "settings",
        "the older objective",
        "epsilon with min-SNR weights, as Ho 2020 and Hang 2023",
        "by argument: Ho 2020's objective",
        argv=("--noise.prediction-type", "epsilon", "--ema", "0.995"),
    ),
    Case(
        "pretrain~warm-stable-decay",
        "llm/pretrain",
        "settings",
        "warm-up, stable rate, decay, and normalised queries",
        "both are usual for language models",
        "by argument: usual for language models",
        argv=("--optim.schedule", "wsd", "--qk-norm", "--train.accumulate", "2"),
    ),
    Case(
        "ppo~acrobot",
        "rl/ppo",
        "settings",
        "another environment",
        "Acrobot with the preset's settings",
        "by argument: PPO solves it in 100,000 steps in public benchmarks",
        argv=("--env", "Acrobot-v1"),
    ),
    Case(
        "logits~hotter-student",
        "distill/logits",
        "settings",
        "a higher temperature, more weight on labels",
        "both within what Hinton 2015 used",
        "by argument: within Hinton 2015's range; the student has the teacher's shape",
        argv=("--temperature", "4", "--weight", "0.8", "--widths", "16", "32", "64"),
    ),
]
