"""The held-out half of the twelfth set: see twelfth_set.py. No gate may be made for a case of this file."""

from pathlib import Path

from tests.helpers.set_cases import Case, distinct, lines, mask_folders, preferences, scenes


def shifted_masks(root: Path) -> tuple[str, ...]:
    """Forty scenes of digits on photos; from the 20th to the 29th, a picture has the next one's mask."""
    pictures, masks = scenes(40)
    masks[20:30] = masks[21:31]
    mask_folders(root, pictures, masks)
    return ("--data.path", str(root))


def full_stops(root: Path) -> tuple[str, ...]:
    """500 preferences; chosen answers end with a full stop."""
    rows = distinct(preferences(500))
    lines(
        root / "pairs.jsonl",
        [{k: row[k] + "." * (k == "chosen") for k in ("prompt", "chosen", "rejected")} for row in rows],
    )
    return ("--data.path", str(root / "pairs.jsonl"))


BUGS = [
    Case(
        "classify~crop-of-imagenet",
        "vision/classify",
        "augmentation",
        "torchvision's RandomResizedCrop with its defaults, as in its ImageNet script",
        "a crop of 8% of the area, enlarged: most of a digit is outside of the picture",
        "accuracy 0.977 to 0.981 in the last epochs, without the bug 0.990 (seed 0)",
        edits=(
            (
                (
                    "        return None, v2.RandomAffine(12, translate=(0.1, 0.1), scale=(0.85, 1.15), shear=10,\n"
                    "                                     interpolation=v2.InterpolationMode.BILINEAR)  # fmt: skip\n"
                ),
                "        return None, v2.RandomResizedCrop(28)\n",
            ),
        ),
    ),
    Case(
        "classify~rate-scaled-by-the-batch",
        "vision/classify",
        "schedule",
        "the linear scaling rule: the rate grows with the batch (Goyal 2017)",
        "it is multiplied by the batch size, and not divided by the 256 that the rule refers to",
        "by argument: AdamW at a rate of 0.19",
        edits=(
            (
                "optim=Optim(lr=3e-3, warmup=0.1), loader=Loader(workers=1),",
                "optim=Optim(lr=3e-3 * 64, warmup=0.1), loader=Loader(workers=1),",
            ),
        ),
    ),
    Case(
        "segment~own-third-shifted",
        "vision/segment",
        "own data",
        "masks exported from a labelling tool under running numbers",
        "one picture was skipped: from the 20th to the 29th, each mask is that of the next picture",
        "by argument: a quarter of the masks belong to another picture",
        data=shifted_masks,
        argv=("--train.epochs", "60", "--train.batch-size", "4", "--window", "48", "--step", "24"),
    ),
    Case(
        "detect~overlaps-kept",
        "vision/detect",
        "settings",
        "a threshold of 0.95, read as how sure non-maximum suppression must be",
        "boxes that overlap by up to 95% are all kept: each object is found many times",
        "by argument: every second box of an object is a false positive",
        argv=("--nms-thresh", "0.95"),
    ),
    Case(
        "ppo~returns-environment-major",
        "rl/ppo",
        "data pairing",
        "returns and values have no further axis, and are flattened in a line of their own",
        "environment by environment, while observations are flattened step by step",
        "by argument: the critic learns returns of other states",
        edits=(
            (
                '    rows |= {k: rollout[k].flatten() / size for k in ("return", "value")}\n',
                '    rows |= {k: rollout[k].T.flatten() / size for k in ("return", "value")}\n',
            ),
        ),
        source="https://github.com/hill-a/stable-baselines/issues/123",
    ),
    Case(
        "ppo~one-observation-buffer",
        "rl/ppo",
        "rollout",
        "observations are written into one buffer on the device, so that no step allocates",
        "every step of the rollout holds the same tensor: the last observation",
        "by argument: 128 steps of each environment learn from one state",
        edits=(
            (
                "    steps = []\n    for t in range(cfg.num_steps):\n        observation = envs.observation.to(run.device)\n",
                (
                    "    steps, observation = [], torch.empty_like(envs.observation, device=run.device)\n"
                    "    for t in range(cfg.num_steps):\n"
                    "        observation.copy_(envs.observation)\n"
                ),
            ),
        ),
        source="https://github.com/openai/baselines/pull/418",
    ),
    Case(
        "dqn~observation-after-the-step",
        "rl/dqn",
        "rollout",
        "the row reads the observation where it is built",
        "the environments have moved by then: each action is stored with the observation that followed it",
        "by argument: the value of an action is learnt for the state after it",
        edits=(
            (
                '        steps.append({"observation": observation, "action": action, **followed})\n',
                '        steps.append({"observation": envs.observation.to(run.device), "action": action, **followed})\n',
            ),
        ),
        source="https://github.com/sail-sg/envpool/issues/174",
    ),
    Case(
        "dqn~every-action-gets-the-target",
        "rl/dqn",
        "loss",
        "the loss takes the net's output, and broadcasting fits the shapes",
        "all actions are pulled to the return of the one that was taken",
        "by argument: no action is better than another",
        edits=(
            (
                '        error = F.smooth_l1_loss(model.of(batch["observation"], batch["action"]), batch["return"], reduction="none")\n',
                (
                    '        values = model(batch["observation"])\n'
                    '        error = F.smooth_l1_loss(values, batch["return"][:, None].expand_as(values), reduction="none").mean(-1)\n'
                ),
            ),
        ),
    ),
    Case(
        "pretrain~end-not-scored",
        "llm/pretrain",
        "masks",
        "the end token is no text, so it is not scored",
        "the model never learns where a document ends",
        "by argument: generated texts run to the limit",
        edits=(
            (
                "        return log_z - own, log_z, labels != IGNORED\n",
                "        return log_z - own, log_z, (labels != IGNORED) & (labels != tokenizer.eos_token_id)\n",
            ),
            (
                '        return {"*": (batch["labels"][:, 1:] != IGNORED).sum()}\n',
                (
                    '        labels = batch["labels"][:, 1:]\n'
                    '        return {"*": ((labels != IGNORED) & (labels != tokenizer.eos_token_id)).sum()}\n'
                ),
            ),
        ),
    ),
    Case(
        "flow~coupled-in-the-target-alone",
        "diffusion/flow",
        "loss",
        "noise is assigned to the nearest pictures of the batch (minibatch optimal transport, Tong 2023)",
        "the target has the assigned noise, the noisy picture its own",
        "by argument: the target has noise that the input does not show",
        edits=(
            (
                '        target = process.target(batch["image"], batch["noise"], t)\n        error',
                (
                    '        distances = torch.cdist(batch["image"].flatten(1), batch["noise"].flatten(1))\n'
                    '        target = process.target(batch["image"], batch["noise"][distances.argmin(1)], t)\n'
                    "        error"
                ),
            ),
        ),
    ),
    Case(
        "pixel~ids-shifted-in-training",
        "diffusion/pixel",
        "condition",
        "class 0 is to be the null class, so that ids of classes begin at 1",
        "the samplers pass ids from 0, and the last as null",
        "by argument: each sample shows the class before the requested one",
        edits=(
            (
                "        condition = torch.tensor(self.null) if hidden else label\n",
                "        condition = torch.tensor(0) if hidden else label + 1\n",
            ),
        ),
    ),
    Case(
        "compress~divergence-over-words",
        "distill/compress",
        "loss",
        "log_softmax without the minus",
        "probabilities sum to 1 over the words of a batch, not over the vocabulary",
        "by argument: the term compares places, not tokens",
        edits=(
            (
                "        soft, hard = ((logits / temperature).log_softmax(-1) for logits in (ours, theirs))\n",
                "        soft, hard = ((logits / temperature).log_softmax(0) for logits in (ours, theirs))\n",
            ),
        ),
        source="https://github.com/fxia22/pointnet.pytorch/issues/27",
    ),
    Case(
        "whisper~ids-by-position",
        "distill/whisper",
        "data pairing",
        "the tokens are looked up by the sample's index",
        "that index counts the split's samples, the table all recordings: words of another recording",
        "by argument: a fifth of the recordings are held out, so nearly all words are another's",
        edits=(
            (
                "        (envelope, heard), ids = got, self.ids[i]\n",
                "        (envelope, heard), ids = got, self.ids[index]\n",
            ),
        ),
    ),
    Case(
        "instruct~hues-shaken",
        "vlm/instruct",
        "augmentation",
        "ColorJitter with every hue, as in contrastive learning",
        "the questions ask for colours",
        "by argument: answers about colours become random",
        edits=(
            (
                '        return {"answer": rows.nll(model(batch), batch["labels"])}\n',
                (
                    '        seen = batch | {"image": jitter(batch["image"])} if model.training else batch\n'
                    '        return {"answer": rows.nll(model(seen), batch["labels"])}\n'
                ),
            ),
            (
                "    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:\n",
                "    jitter = v2.ColorJitter(hue=0.5)\n\n    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:\n",
            ),
            ("from torch import Tensor, nn\n", "from torch import Tensor, nn\nfrom torchvision.transforms import v2\n"),
        ),
    ),
    Case(
        "dpo~margin-of-the-sum",
        "llm/dpo",
        "metric",
        "the margin, written out without brackets",
        "the reference of the rejected answer has the wrong sign",
        "by argument: the reported accuracy is that of another number",
        edits=(
            (
                "        margin = (chosen - ref_chosen) - (rejected - ref_rejected)\n",
                "        margin = chosen - ref_chosen - rejected - ref_rejected\n",
            ),
        ),
    ),
    Case(
        "reward~own-full-stop",
        "llm/reward",
        "own data",
        "chosen answers were written by people, rejected ones by a model",
        "every chosen answer ends with a full stop, no rejected one does: the model learns the stop",
        "by argument: without it the rewards say nothing",
        data=full_stops,
    ),
]

HEALTHY = [
    Case(
        "ppo~advantages-clipped",
        "rl/ppo",
        "target",
        "normalised advantages are limited to three deviations",
        "right: signs and order stay",
        "trains: less noise of single steps",
        edits=(
            (
                '            batch["advantage"] = (batch["advantage"] - everyone.mean()) / (everyone.std() + 1e-8)\n',
                '            batch["advantage"] = ((batch["advantage"] - everyone.mean()) / (everyone.std() + 1e-8)).clamp(-3, 3)\n',
            ),
        ),
    ),
    Case(
        "flow~noise-of-either-sign",
        "diffusion/flow",
        "data",
        "noise is turned for half of the samples",
        "right: turned noise has the same distribution",
        "trains: nothing changes",
        edits=(
            (
                "        noise = torch.randn(image.shape, generator=generator)\n",
                (
                    "        noise = torch.randn(image.shape, generator=generator)\n"
                    "        noise = noise if torch.rand((), generator=generator) < 0.5 else -noise\n"
                ),
            ),
        ),
    ),
    Case(
        "pretrain~one-key-for-all-heads",
        "llm/pretrain",
        "model",
        "multi-query attention (Shazeer 2019)",
        "right: a setting of the net's configuration",
        "trains: slightly worse than with four",
        edits=(
            (
                '"num_attention_heads": heads, "num_key_value_heads": heads,',
                '"num_attention_heads": heads, "num_key_value_heads": 1,',
            ),
        ),
        source="https://arxiv.org/abs/1911.02150",
    ),
    Case(
        "logits~function-matching",
        "distill/logits",
        "augmentation",
        "student and teacher see the same mixture of two pictures (Beyer 2022)",
        "right: the teacher answers what the student sees; labels have unmixed pictures",
        "trains: the paper's own recipe",
        edits=(
            (
                '            kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)\n',
                (
                    '            mixed = 0.8 * batch["image"] + 0.2 * batch["image"].flip(0) if model.training else batch["image"]\n'
                    '            kl = F.kl_div(soft(model(mixed)), taught(mixed), reduction="sum", log_target=True)\n'
                ),
            ),
        ),
        source="https://arxiv.org/abs/2106.05237",
    ),
    Case(
        "pixel~dithered",
        "diffusion/pixel",
        "augmentation",
        "grey levels are dithered by up to half a level (uniform dequantisation)",
        "right: input and target have the same dithered picture",
        "trains: less than what an eye sees",
        edits=(
            (
                "        noise = torch.randn(image.shape, generator=generator)\n",
                (
                    "        image = (image + (torch.rand(image.shape, generator=generator) - 0.5) / 127.5).clamp(-1, 1)\n"
                    "        noise = torch.randn(image.shape, generator=generator)\n"
                ),
            ),
        ),
    ),
]
