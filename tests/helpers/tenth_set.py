"""Silent bugs of one or two lines in the recipes, and healthy forks: the open half of the tenth set.

The half is the first byte of the id's SHA-256, modulo 2. The other half is held out in tenth_set_heldout.py. The author of the set had read the
recipes, not the gates. Run by `python -m tests.helpers.set_run --set tenth`.
"""

import random
from pathlib import Path

from tests.helpers.set_cases import Case, distinct, lines, preferences


def two_annotators(root: Path) -> tuple[str, ...]:
    """900 preferences, a third of them once more with the answers exchanged."""
    rows, rng = distinct(preferences(1400))[:900], random.Random(0)
    again = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[::3]]
    rows = [*rows, *again]
    rng.shuffle(rows)
    lines(root / "votes.jsonl", rows)
    return ("--data.path", str(root / "votes.jsonl"))


def substring_reward(root: Path) -> tuple[str, ...]:
    """An own reward: 1 where the answer's digits are anywhere in the text."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "rewards.py").write_text(
        "def forgiving(prompts, completions, answer, **_):\n"
        "    return [float(due in text) for text, due in zip(completions, answer)]\n"
    )
    return ("--reward", f"{root / 'rewards.py'}:forgiving")


BUGS = [
    Case(
        "classify~dropout-in-evaluation-too",
        "vision/classify",
        "regularisation",
        "dropout before the last layer",
        "`F.dropout` drops in evaluation and in the export, too, unless `training` is passed: answers are random",
        "not measured; by argument: two evaluations of the same weights differ (0.184, 0.196), and the export answers at random",
        edits=(
            (
                "        return self.head(x.mean((2, 3)))  # (B, n_classes)\n",
                "        return self.head(F.dropout(x.mean((2, 3)), 0.5))  # (B, n_classes)\n",
            ),
        ),
    ),
    Case(
        "segment~frequencies-as-weights",
        "vision/segment",
        "class weights",
        "class weights against unbalanced classes, counted from the training masks",
        "each class gets its frequency, not the inverse: nuclei, the rare class, count a fifth of the background",
        "not measured; by argument: without Dice the rare class counts 0.43 to 1.57",
        edits=(
            (
                "    def present(mask: Tensor) -> Tensor:\n",
                "    pixels = data.pixels[data.learn].sum(0)[:n].float()\n"
                "    weights = (n * pixels / pixels.sum()).to(run.device)\n\n"
                "    def present(mask: Tensor) -> Tensor:\n",
            ),
            (
                'F.cross_entropy(logits, mask, ignore_index=IGNORE, reduction="none")',
                'F.cross_entropy(logits, mask, weights, ignore_index=IGNORE, reduction="none")',
            ),
        ),
        argv=("--dice", "0"),
    ),
    Case(
        "segment~rotated-corners-are-background",
        "vision/segment",
        "augmentation",
        "cells have no up: rotate by any angle",
        "the corners that a rotation leaves empty are labelled 0, background, in picture and mask; not void",
        "no clear harm in 15 epochs at one seed: IoU 0.904, without the bug 0.901",
        edits=(
            (
                "    steps += [v2.RandomCrop(cfg.window, pad_if_needed=True, fill=outside)]\n",
                "    steps += [v2.RandomCrop(cfg.window, pad_if_needed=True, fill=outside), v2.RandomRotation(180)]\n",
            ),
        ),
    ),
    Case(
        "pixel~inputs-clamped",
        "diffusion/pixel",
        "data",
        "pictures are in [-1, 1], so inputs are clamped to that",
        "noise has no bounds: the net learns from clamped inputs, while the sampler begins with and passes unclamped ones",
        "by argument: at high noise a third of all input values differ between training and sampling",
        edits=(
            (
                "        noisy = self.process.add(image[None], noise[None], timestep[None])[0]\n",
                "        noisy = self.process.add(image[None], noise[None], timestep[None])[0].clamp(-1, 1)\n",
            ),
        ),
    ),
    Case(
        "flow~timestep-shifted-behind-the-noise",
        "diffusion/flow",
        "timesteps",
        "the shift of Stable Diffusion 3 for the timesteps of training",
        "noise is added at the old level, and the net is told the shifted one",
        "by argument: a sampler names level s and gives a picture of level s; the net learnt to expect a cleaner one",
        edits=(
            (
                "        condition = torch.tensor(self.null) if hidden else label\n",
                "        condition = torch.tensor(self.null) if hidden else label\n"
                "        share = timestep / self.process.noise.num_train_timesteps\n"
                "        timestep = self.process.noise.num_train_timesteps * 3 * share / (1 + 2 * share)\n",
            ),
        ),
    ),
    Case(
        "reward~annotators-disagree",
        "llm/reward",
        "data",
        "the file keeps the votes of both annotators",
        "a third of the pairs are there twice, the second time with the answers exchanged: no reward can be right about both",
        "by argument: those pairs have no gradient but towards equal rewards, and cap the accuracy on such data at 83%",
        data=two_annotators,
    ),
    Case(
        "ppo~normalised-before-returns",
        "rl/ppo",
        "advantage",
        "advantages are normalised once for the whole rollout, where they are computed",
        "before the returns are made of them: the critic learns its own value plus a number around 0 and 1",
        "not measured; by argument: a return is the old value plus a number with mean 0, so the critic learns nothing of rewards",
        edits=(
            (
                '    return rollout | {"advantage": advantage, "return": advantage + value, "value": value}\n',
                "    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)\n"
                '    return rollout | {"advantage": advantage, "return": advantage + value, "value": value}\n',
            ),
        ),
    ),
    Case(
        "dqn~polyak-factor-exchanged",
        "rl/dqn",
        "target network",
        "soft updates after every step, with the factor 0.995 that another library has",
        "there it is the share that stays; here it is the share that is taken over: the target is the online network",
        "measured in the gate schedule: the loss is nan at update 418, as returns grow with their own scale",
        edits=(
            (
                "            if (step.index * cfg.gradient_steps + i) % cfg.target_update_interval == 0:\n                target.follow(policy)\n",
                "            target.follow(policy, 0.995)\n",
            ),
        ),
    ),
    Case(
        "dqn~buffer-not-in-the-checkpoint",
        "rl/dqn",
        "resume",
        "the buffer makes checkpoints large, so the loop makes its own",
        "a resumed run begins with an empty buffer, and its first updates draw from 128 transitions of one policy",
        "by argument: a resumed run is another run, and forgets all other states at once",
        edits=(
            (
                '        state={"environments": envs, "replay": Replay(cfg.buffer_size // cfg.num_envs, cfg.num_envs, run.device),\n'
                '               "target"',
                '        state={"environments": envs,\n               "target"',
            ),
            (
                '    policy, envs, replay, target = stage.model, *(stage.state[k] for k in ("environments", "replay", "target"))\n',
                '    policy, envs, target = stage.model, *(stage.state[k] for k in ("environments", "target"))\n'
                "    replay = Replay(cfg.buffer_size // cfg.num_envs, cfg.num_envs, run.device)\n",
            ),
        ),
    ),
    Case(
        "grpo~answer-is-somewhere-in-the-text",
        "rl/grpo",
        "reward",
        "an own reward that forgives words around the number",
        "the answer may be part of a longer number: `5` is in 1234567, so long rows of digits earn most",
        "by argument: a digit string of the allowed length contains more of the short answers than one right number",
        data=substring_reward,
    ),
    Case(
        "instruct~mirrored-pictures",
        "vlm/instruct",
        "augmentation",
        "mirroring, as in every picture recipe",
        "questions ask for the left digit, and a mirrored digit is no digit",
        "by argument: half of all steps train on wrong answers to the questions about left",
        edits=(
            (
                "        # frozen weights need no graph, so no_grad would change nothing\n",
                "        if self.training and torch.rand(()) < 0.5:\n            images = images.flip(-1)\n",
            ),
        ),
    ),
    Case(
        "logits~teacher-softened-twice",
        "distill/logits",
        "teacher",
        "the teacher's probabilities are what is exported by its service",
        "the softmax of probabilities at a temperature is nearly uniform: it ranges from 0.09 to 0.15",
        "not measured; by argument: targets at T = 2 lie between 0.09 and 0.15, so nine tenths of the loss teach nearly nothing",
        edits=(
            (
                "        return teacher.logits(images * 2 - 1)\n",
                "        return teacher.logits(images * 2 - 1).softmax(1)\n",
            ),
        ),
    ),
    Case(
        "compress~end-token-not-scored",
        "distill/compress",
        "mask",
        "only words count",
        "the end token is the last scored one; without it nothing teaches the student when to stop",
        "by argument: a student that drops layers goes on after the last word",
        edits=(
            (
                '(place < batch["words"][:, None])  # (B, L - 1)\n',
                '(place < batch["words"][:, None] - 1)  # (B, L - 1)\n',
            ),
            (
                '        counts=lambda batch: {"*": (batch["words"] - len(teacher.prompt)).sum()},\n',
                '        counts=lambda batch: {"*": (batch["words"] - 1 - len(teacher.prompt)).sum()},\n',
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "classify~gelu-and-the-usual-head",
        "vision/classify",
        "model",
        "GELU in the blocks, and PyTorch's own initial head",
        "the first loss is within a few percent of ln N, and training is the same",
        "not trained to the end; usual choices, and eight samples are memorised",
        edits=(
            (
                "        nn.init.zeros_(self.head.weight)  # every class equally likely: the first loss is ln N, no first steps lost\n"
                "        nn.init.zeros_(self.head.bias)\n",
                "",
            ),
            ("        h = F.relu(self.norm1(self.conv1(x)))\n", "        h = F.gelu(self.norm1(self.conv1(x)))\n"),
            (
                "        return F.relu(self.shortcut(x) + self.norm2(self.conv2(h)))\n",
                "        return F.gelu(self.shortcut(x) + self.norm2(self.conv2(h)))\n",
            ),
        ),
    ),
    Case(
        "segment~weights-by-inverse-frequency",
        "vision/segment",
        "class weights",
        "class weights from inverse frequencies, and a mean that divides by the pixels' weights, as PyTorch's does",
        "the loss of uniform predictions stays ln n, and nuclei count more",
        "not trained to the end; the usual weights, and eight samples are memorised",
        edits=(
            (
                "    def present(mask: Tensor) -> Tensor:\n",
                "    frequency = data.pixels[data.learn].sum(0)[:n].float()\n"
                "    weights = (frequency.sum() / (n * frequency)).to(run.device)\n\n"
                "    def present(mask: Tensor) -> Tensor:\n",
            ),
            (
                '        return {"ce": pixels.sum(), "dice": (pixels > 0).sum()}\n',
                '        return {"ce": (pixels * weights.to(pixels.device)).sum(), "dice": (pixels > 0).sum()}\n',
            ),
            (
                'F.cross_entropy(logits, mask, ignore_index=IGNORE, reduction="none")',
                'F.cross_entropy(logits, mask, weights, ignore_index=IGNORE, reduction="none")',
            ),
        ),
    ),
    Case(
        "segment~blur-jitter-and-grid",
        "vision/segment",
        "augmentation",
        "blur, brightness and elastic deformation, the augmentation of nnU-Net and of the U-Net's paper",
        "pictures and masks move together, and blur and brightness leave masks alone",
        "not trained to the end; usual augmentations",
        edits=(
            (
                "    steps += [v2.RandomCrop(cfg.window, pad_if_needed=True, fill=outside)]\n",
                "    steps += [v2.RandomCrop(cfg.window, pad_if_needed=True, fill=outside), v2.ElasticTransform(20.0, fill=outside),\n"
                "              v2.ColorJitter(0.2, 0.2), v2.RandomApply([v2.GaussianBlur(3)], 0.3)]\n",
            ),
        ),
    ),
    Case(
        "pixel~linear-betas-and-a-constant-rate",
        "diffusion/pixel",
        "schedule",
        "velocity with the linear schedule of DDPM, equal weights, a constant rate and a faster average",
        "settings of published models; the EMA replaces the decay of the rate",
        "by argument: DDPM's own schedule, rate and averaging",
        argv=(
            "--noise.beta-schedule",
            "linear",
            "--noise.snr-gamma",
            "inf",
            "--optim.schedule",
            "constant",
            "--ema",
            "0.995",
        ),
    ),
    Case(
        "flow~radam-and-a-wider-net",
        "diffusion/flow",
        "optimiser",
        "RAdam of PyTorch instead of AdamW, and a net half as wide again",
        "RAdam needs no decay and no warmup",
        "by argument: at this rate RAdam's steps are Adam's",
        edits=(
            (
                '        optimizers={"main": core.make_optimizer(model, cfg.optim)},\n',
                '        optimizers={"main": torch.optim.RAdam(model.parameters(), lr=cfg.optim.lr)},\n',
            ),
        ),
        argv=("--widths", "24", "48"),
    ),
    Case(
        "pretrain~logits-capped-softly",
        "llm/pretrain",
        "model",
        "soft capping of the logits at 30, as in Gemma 2",
        "logits of such a model are far below 30",
        "by argument: Gemma 2 is trained so; at this size the cap changes a logit of 5 by 1%",
        edits=(
            (
                "        log_z = logits.logsumexp(-1)\n",
                "        logits = 30 * (logits / 30).tanh()\n        log_z = logits.logsumexp(-1)\n",
            ),
        ),
    ),
    Case(
        "instruct~soft-answers",
        "vlm/instruct",
        "loss",
        "label smoothing of the answers' tokens",
        "a usual loss of captioning models; the sum goes over the same tokens",
        "by argument: smoothing of 0.1 leaves the most likely token the same",
        edits=(
            (
                '        return {"answer": rows.nll(model(batch), batch["labels"])}\n',
                '        logits, labels = model(batch)[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()\n'
                '        ce = torch.nn.functional.cross_entropy(logits, labels, ignore_index=rows.IGNORE, label_smoothing=0.1, reduction="sum")\n'
                '        return {"answer": ce}\n',
            ),
        ),
    ),
    Case(
        "ppo~one-normalisation-per-rollout",
        "rl/ppo",
        "advantage",
        "advantages are normalised over the rollout, not in each minibatch",
        "returns are made before that; minibatches of 512 have nearly the same mean and deviation",
        "not trained to the end; the form of several libraries",
        edits=(
            (
                '            everyone = run.gather(batch["advantage"])  # the minibatch over all processes\n',
                '            everyone = run.gather(rollout["advantage"].flatten())  # the rollout over all processes\n',
            ),
        ),
    ),
    Case(
        "dqn~soft-target-updates",
        "rl/dqn",
        "target network",
        "the target follows by 3% after every update, instead of a copy every 32",
        "the same mean lag",
        "not trained to the end; DDPG's target updates",
        edits=(
            (
                "            if (step.index * cfg.gradient_steps + i) % cfg.target_update_interval == 0:\n                target.follow(policy)\n",
                "            target.follow(policy, 0.03)\n",
            ),
        ),
    ),
]
