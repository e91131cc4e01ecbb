"""The half of the sixth set that is held out: its misses are counted, never mended. See sixth_set.py."""

import textwrap
from pathlib import Path

from trainworthy.recipes.llm.data import prose

from tests.helpers.set_cases import Case, lines


def recrawled(root: Path) -> tuple[str, ...]:
    """A table of pages; each was crawled twice, the second time under another date and with lines of another length."""
    train, val, *_ = prose.load()
    rows = []
    for day, text in enumerate([*train, *val][::2]):
        rows.append({"text": f"Retrieved on day {day} of the first crawl\n\n{text}"})
        again = "\n\n".join(textwrap.fill(part, 100) for part in text.split("\n\n"))
        rows.append({"text": f"Page {7 * day + 3}, second crawl, checked by hand\n\n{again}"})
    lines(root / "pages.jsonl", rows)
    return ("--data.path", str(root / "pages.jsonl"), "--data.val", "0.1")


BUGS = [
    Case(
        "classify~average-without-buffers",
        "vision/classify",
        "loop",
        "an own average of the weights, as in many repositories, with batch norm",
        "it averages parameters alone: the averaged net has the running statistics of the first step",
        "measured by the gate overfit: accuracy 0.125 of the averaged net on 8 learnt samples, loss 0.500 of the trained one",
        edits=(
            (
                '            stage.state["ema"].update(stage.model)\n',
                (
                    "            with torch.no_grad():\n"
                    '                for mine, theirs in zip(stage.state["ema"].model.parameters(), stage.model.parameters(), strict=True):\n'
                    "                    mine.lerp_(theirs, 1 - cfg.ema)\n"
                ),
            ),
        ),
        argv=("--norm", "batch", "--ema", "0.99"),
    ),
    Case(
        "segment~tilted-apart",
        "vision/segment",
        "augmentation",
        "a random tilt of up to 15 degrees, for picture and mask",
        "the transform is called twice and draws two angles",
        "counted by the gate joint-transforms: in 17 of 32 windows the mask does not match its picture",
        edits=(
            (
                "def augmentation(cfg: Config) -> nn.Module:\n",
                (
                    "class Tilt(nn.Module):\n"
                    '    """A random tilt of up to 15 degrees."""\n\n'
                    "    def __init__(self):\n"
                    "        super().__init__()\n"
                    "        self.turn = v2.RandomRotation(15)\n\n"
                    "    def forward(self, image, mask):\n"
                    "        return self.turn(image), self.turn(mask)\n\n\n"
                    "def augmentation(cfg: Config) -> nn.Module:\n"
                ),
            ),
            ("    return v2.Compose(steps)\n", "    return v2.Compose([*steps, Tilt()])\n"),
        ),
    ),
    Case(
        "dqn~target-by-iterations",
        "rl/dqn",
        "loop",
        "the target network is copied in one place, at the end of an iteration",
        "the interval counts updates, of which an iteration has 32: the target is copied ten times in a run",
        "measured, seed 0: return 349, unchanged recipe 500",
        edits=(
            (
                (
                    "            if (step.index * cfg.gradient_steps + i) % cfg.target_update_interval == 0:\n"
                    "                target.follow(policy)\n"
                ),
                "        if step.index % cfg.target_update_interval == 0:\n            target.follow(policy)\n",
            ),
        ),
    ),
    Case(
        "sac~policy-loss-trains-critics",
        "rl/sac",
        "loss",
        "the policy's loss, as in the paper",
        "the critics are not frozen in it: each update raises their values at the policy's actions",
        "measured by the gate probe-constant: value 2.30 where 1 is right",
        edits=(
            (
                '        gain = model.worth(batch["observation"], action, frozen=True).amin(0)\n',
                '        gain = model.worth(batch["observation"], action).amin(0)\n',
            ),
        ),
    ),
    Case(
        "flow~time-in-the-loss-alone",
        "diffusion/flow",
        "loss",
        "flow matching's time is in [0, 1]",
        "the loss divides the time by 1,000, the sampler does not: it asks at times that were never trained",
        "by argument: the sampler asks the net at times 0 to 1,000, trained were 0 to 1",
        edits=(
            (
                '        prediction = model(batch["noisy"], t, batch["condition"]).sample.float()\n',
                (
                    '        prediction = model(batch["noisy"], t / process.noise.num_train_timesteps, batch["condition"]).sample.float()\n'
                ),
            ),
        ),
    ),
    Case(
        "pixel~noise-of-the-index",
        "diffusion/pixel",
        "data",
        "reproducible training: the noise depends on the sample's number",
        "a picture has the same noise at the same time step in every epoch: the net learns 4,000 pairs by rote",
        "by argument: 4,000 pairs of noise and time in place of a new one at each of 96,000 draws",
        edits=(
            (
                "        generator = generator or pictures.fixed_draws(self.split, index)\n",
                '        generator = pictures.fixed_draws("train" if training else self.split, index)\n',
            ),
        ),
    ),
    Case(
        "logits~teacher-is-the-truth",
        "distill/logits",
        "evaluation",
        "new pictures have no labels: the teacher's answers take their place",
        "accuracy and negative log-likelihood are those against the teacher, not against the labels",
        "by argument: the reported accuracy counts the teacher's errors as right",
        edits=(
            (
                '            truth.append(batch["label"])\n',
                '            truth.append(answers(batch["image"]).argmax(1))\n',
            ),
        ),
    ),
    Case(
        "logits~both-without-gradient",
        "distill/logits",
        "loss",
        "the teacher runs under no_grad, to save memory",
        "the student's divergence is under it as well: only the labels' tenth of the loss trains",
        "by argument: the student learns from 200 labelled pictures alone, as in the stage `alone`, at a tenth of the weight",
        edits=(
            (
                '            kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)\n',
                (
                    "            with torch.no_grad():\n"
                    '                kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)\n'
                ),
            ),
        ),
    ),
    Case(
        "pretrain~embeddings-tied",
        "llm/pretrain",
        "model",
        "tied embeddings, as small models have them",
        "the start of the head at the token frequencies erases the embeddings, which are now the same tensor",
        "by argument: all tokens start with one embedding, up to its length",
        edits=(
            (
                '             "max_position_embeddings": cfg.data.context}  # fmt: skip\n',
                '             "max_position_embeddings": cfg.data.context, "tie_word_embeddings": True}  # fmt: skip\n',
            ),
        ),
    ),
    Case(
        "pretrain~goldfish-in-the-result",
        "llm/pretrain",
        "loss",
        "the goldfish loss (Hans 2024) against learning by rote: every fourth token is left out",
        "it is left out of the evaluation too, which still divides by all bytes",
        "by argument: three quarters of the bits, all of the bytes: a result 25% too good",
        edits=(
            (
                "        return log_z - own, log_z, labels != IGNORED\n",
                "        return log_z - own, log_z, (labels != IGNORED) & (torch.arange(labels.shape[1], device=labels.device) % 4 != 3)\n",
            ),
            (
                '        return {"*": (batch["labels"][:, 1:] != IGNORED).sum()}\n',
                (
                    '        labels = batch["labels"][:, 1:]\n'
                    '        return {"*": ((labels != IGNORED) & (torch.arange(labels.shape[1], device=labels.device) % 4 != 3)).sum()}\n'
                ),
            ),
        ),
    ),
    Case(
        "pretrain~own-crawled-again",
        "llm/pretrain",
        "own data",
        "pages of a crawl, of which a tenth is held out",
        "each page was crawled twice, with another header and other lines: most held-out pages are also trained on",
        "by argument: nearly every held-out page was trained on, in other lines",
        data=recrawled,
    ),
    Case(
        "sft~frozen-b",
        "llm/sft",
        "model",
        "LoRA-FA (Zhang 2023), which trains one of an adapter's two matrices",
        "it trains B, not A: B starts at 0 and is frozen here, so that no adapter ever does anything",
        "by argument: B is 0, so the adapted model is the untrained one",
        edits=(
            (
                "    for p in filter(lambda p: p.requires_grad, trainer.model.parameters()):\n",
                (
                    "    for key, p in trainer.model.named_parameters():\n"
                    '        if "lora_B" in key:\n'
                    "            p.requires_grad_(False)\n"
                    "    for p in filter(lambda p: p.requires_grad, trainer.model.parameters()):\n"
                ),
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "classify~one-against-the-rest",
        "vision/classify",
        "loss",
        "binary cross-entropy for each class (Wightman 2021)",
        "right: the first loss and its floor are declared anew",
        "trains: the loss of `ResNet strikes back`",
        edits=(
            (
                '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}\n',
                (
                    '        target = F.one_hot(batch["label"], n).float()\n'
                    '        return {"ce": F.binary_cross_entropy_with_logits(logits, target, reduction="sum")}\n'
                ),
            ),
            (
                "    expect = core.Expect(initial_loss=balanced.first_loss, loss_floor=balanced.floor, new_parameters=fresh)\n",
                "    expect = core.Expect(initial_loss=n * 0.6931, loss_floor=0.0, new_parameters=fresh)\n",
            ),
        ),
        argv=("--label-smoothing", "0"),
    ),
    Case(
        "dqn~target-follows-softly",
        "rl/dqn",
        "loop",
        "the target network follows by 2% after each update (Lillicrap 2016)",
        "right: about as slow as a copy every 32 updates",
        "trains: the usual alternative",
        edits=(
            (
                (
                    "            if (step.index * cfg.gradient_steps + i) % cfg.target_update_interval == 0:\n"
                    "                target.follow(policy)\n"
                ),
                "            target.follow(policy, 0.02)\n",
            ),
        ),
    ),
]
