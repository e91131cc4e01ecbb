"""The half of the seventh set that is held out: its misses are counted, never mended. See seventh_set.py."""

from tests.helpers.set_cases import Case

BUGS = [
    Case(
        "classify~bytes-overflow",
        "vision/classify",
        "augmentation",
        "training pictures are brightened by up to 40 of 255 levels",
        "the pictures are bytes: what rises above 255 starts again at 0, so that bright strokes turn black",
        "by argument: every stroke of level 216 to 255 may turn black",
        edits=(
            (
                "        image = self.images[index].float() / 255\n",
                (
                    "        image = self.images[index]\n"
                    "        if generator is not None:\n"
                    "            image = image + torch.randint(40, (), generator=generator).to(image.dtype)\n"
                    "        image = image.float() / 255\n"
                ),
            ),
        ),
        source="https://github.com/tensorpack/tensorpack/issues/614",
    ),
    Case(
        "classify~test-chooses",
        "vision/classify",
        "data",
        "the validation pictures are MNIST's own test pictures, as in published tables",
        (
            "the same pictures are the test split: the best checkpoint and every setting are chosen on what is "
            "reported at the end"
        ),
        "by argument: validation and test are the same 1,000 pictures",
        edits=(("digits.CLASSES, learn, held_out, test=test)", "digits.CLASSES, learn, test, test=test)"),),
        source="https://github.com/titu1994/LSTM-FCN/issues/7",
    ),
    Case(
        "detect~demo-threshold",
        "vision/detect",
        "settings",
        "boxes below a score of 0.5 are dropped, as in a demo",
        "average precision needs the boxes of low scores too: most of its curve is cut off",
        "reported by the source: mAP 0.548 fell to 0.413",
        argv=(
            "--score-thresh",
            "0.5",
        ),
        source="https://github.com/eriklindernoren/PyTorch-YOLOv3/pull/608",
    ),
    Case(
        "flow~noise-drawn-again",
        "diffusion/flow",
        "loss",
        "the noise is drawn in the loss, as in most training scripts",
        "the noisy picture was made with other noise: nothing in the input tells the target's noise",
        "by argument: the best prediction is minus the picture",
        edits=(
            (
                '        target = process.target(batch["image"], batch["noise"], t)\n',
                '        target = process.target(batch["image"], torch.randn_like(batch["image"]), t)\n',
            ),
        ),
        source="https://github.com/modelscope/DiffSynth-Studio/issues/1175",
    ),
    Case(
        "pixel~no-dropout-with-guidance",
        "diffusion/pixel",
        "settings",
        "no condition is dropped, so that every step trains the conditional net",
        "samples are guided still: their unconditional half is the embedding of a class that never occurred",
        "by argument: guidance of 2 subtracts the output of an untrained embedding",
        argv=(
            "--conditioning-dropout-prob",
            "0",
        ),
        source="https://github.com/NVlabs/Sana/issues/188",
    ),
    Case(
        "pixel~raw-weights-exported",
        "diffusion/pixel",
        "export",
        "the net that was trained is exported",
        "the average of its weights was evaluated: other weights are exported than were measured",
        "by argument: the exported net is not the measured one",
        edits=(
            (
                "(ema.model if ema else model).eval().cpu(), process.sampler())",
                "model.eval().cpu(), process.sampler())",
            ),
        ),
        source="https://github.com/lightly-ai/lightly-train/pull/375",
    ),
    Case(
        "ppo~gain-normalised-in-part",
        "rl/ppo",
        "loss",
        "advantages are normalised in the loss",
        "the unclipped gain is computed before that: the lower of two numbers of different scales is taken",
        "by argument: large raw advantages make the clipped gain the lower one, whatever the ratio",
        edits=(
            (
                (
                    '            everyone = run.gather(batch["advantage"])  # the minibatch over all processes\n'
                    '            batch["advantage"] = (batch["advantage"] - everyone.mean()) / (everyone.std() + 1e-8)\n'
                ),
                "",
            ),
            (
                (
                    "        gain = torch.min(\n"
                    '            ratio * batch["advantage"], ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range) * batch["advantage"]\n'
                    "        )\n"
                ),
                (
                    '        advantage = batch["advantage"]\n'
                    "        unclipped = ratio * advantage\n"
                    "        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)\n"
                    "        gain = torch.min(unclipped, ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range) * advantage)\n"
                ),
            ),
        ),
        source="https://github.com/pytorch/rl/pull/1033",
    ),
    Case(
        "ppo~first-to-finish",
        "rl/ppo",
        "evaluation",
        "twice as many episodes run as are needed, and those count that finish first",
        (
            "episodes that finish first are the short ones: where each step pays 1, the return is reported too "
            "low, elsewhere too high"
        ),
        "by argument: the shorter half of the episodes is scored",
        edits=(
            (
                '        returns = [play(b["seed"], player(act, model))[0] for b in run.batches(data)]\n',
                (
                    "        returns = []\n"
                    "        for b in run.batches(data):\n"
                    '            returned, seen = play(b["seed"], player(act, model))\n'
                    "            finished = torch.tensor([len(one) for one in seen]).argsort()\n"
                    "            returns.append(returned[finished[: max(1, len(seen) // 2)]])\n"
                ),
            ),
        ),
        source="https://github.com/chainer/chainerrl/issues/368",
    ),
    Case(
        "dqn~weights-inverted",
        "rl/dqn",
        "rollout",
        "prioritised replay with importance weights",
        "the exponent's sign is lost: what is drawn more often also weighs more",
        "by argument: the bias of prioritised replay is squared instead of corrected",
        edits=(("likelier ** -(cfg.prioritized_replay_beta", "likelier ** (cfg.prioritized_replay_beta"),),
        argv=(
            "--prioritized-replay-alpha",
            "0.6",
        ),
        source="https://github.com/takoika/PrioritizedExperienceReplay/issues/1",
    ),
    Case(
        "dqn~exploration-never-falls",
        "rl/dqn",
        "schedule",
        "the exploration schedule is logged",
        "acting reads its initial value: all actions of the run are random",
        "by argument: the policy never acts in training",
        edits=(("envs, step.index, epsilon(cfg, progress))\n", "envs, step.index, epsilon(cfg, 0.0))\n"),),
        source="https://github.com/ooples/AiDotNet/pull/2121",
    ),
    Case(
        "sac~log-prob-without-gradient",
        "rl/sac",
        "loss",
        "the log-probability is a reward of the policy, so it is detached",
        "nothing raises the entropy: the temperature grows without effect",
        "by argument: the entropy bonus has no gradient",
        edits=(("exp() * log_prob - gain).sum()", "exp() * log_prob.detach() - gain).sum()"),),
        source="https://github.com/facebookresearch/ReAgent/pull/358",
    ),
    Case(
        "logits~teacher-of-the-clean-picture",
        "distill/logits",
        "data",
        "the teacher's answers are those to the pictures as they are, which could be computed once",
        "the student reads the augmented picture: it is asked for the answer to another one",
        "by argument: student and teacher see different pictures in training",
        edits=(
            (
                '        return {**super().get(index, generator), "known": self.known[index]}\n',
                (
                    "        clean = self.images[index].float() / 255\n"
                    '        return {**super().get(index, generator), "known": self.known[index], "clean": clean}\n'
                ),
            ),
            ('F.kl_div(soft(logits), taught(batch["image"])', 'F.kl_div(soft(logits), taught(batch["clean"])'),
        ),
        source="https://github.com/haitongli/knowledge-distillation-pytorch/issues/23",
    ),
    Case(
        "logits~probabilities-for-log",
        "distill/logits",
        "loss",
        "kl_div of two distributions",
        "torch's function takes log-probabilities as its first argument, here it gets probabilities",
        "by argument: the loss is linear in the student's probability, so that only the teacher's first class counts",
        edits=(
            ('F.kl_div(soft(logits), taught(batch["image"])', 'F.kl_div(soft(logits).exp(), taught(batch["image"])'),
        ),
        source="https://github.com/microsoft/ProDA/issues/20",
    ),
    Case(
        "instruct~adapters-never-thawed",
        "vlm/instruct",
        "model",
        "adapters on the language model, all of whose weights are frozen",
        "the adapters are frozen with it",
        "by argument: only the projector is trained",
        edits=(
            (
                '        adapted = not cfg.lora_rank or not key.startswith("language.") or ".lora_" in key\n',
                '        adapted = not cfg.lora_rank or not key.startswith("language.")\n',
            ),
        ),
        argv=(
            "--lora-rank",
            "8",
        ),
        source="https://github.com/LLaVA-VL/LLaVA-NeXT/pull/512",
    ),
    Case(
        "pretrain~bits-of-each-row",
        "llm/pretrain",
        "evaluation",
        "the mean over the rows of an evaluation",
        "rows hold different numbers of bytes: a short last row counts as much as a full one",
        "by argument: bits per byte are all bits over all bytes",
        edits=(
            (
                "        nll, log_z, tokens, far, there, size = run.gather(torch.cat(rows)).sum(0).tolist()\n",
                (
                    "        each = run.gather(torch.cat(rows))\n"
                    "        nll, log_z, tokens, far, there, _ = each.sum(0).tolist()\n"
                ),
            ),
            (
                '            "bits_per_byte": nll / math.log(2) / size,\n',
                '            "bits_per_byte": (each[:, 0] / each[:, 5].clamp_min(1)).mean().item() / math.log(2),\n',
            ),
        ),
        source="https://github.com/huggingface/transformers/issues/41898",
    ),
    Case(
        "sft~asked-without-system",
        "llm/sft",
        "evaluation",
        "held-out prompts are asked as a user would ask them",
        "training has a system turn before each prompt, evaluation leaves it to the template's own",
        "by argument: the model is measured behind a prompt that it was not trained on",
        edits=(
            (
                "        inputs = [chat.ask(chat.turns(p, before), p) for p in prompts]\n",
                '        inputs = [chat.ask([t for t in chat.turns(p, before) if t["role"] != "system"], p) for p in prompts]\n',
            ),
        ),
        source="https://github.com/QwenLM/Qwen-VL/issues/246",
    ),
    Case(
        "reward~pad-is-the-end-exported",
        "llm/reward",
        "export",
        "the end token is the pad of the exported model, as for models without a pad",
        "answers end with that token: the loaded model takes it for padding and reads the reward one token early",
        "by argument: the reward is read at another token than in training",
        edits=(
            (
                "                net = hosted.built(lambda: whole(Path(adapter)))\n",
                (
                    "                net = hosted.built(lambda: whole(Path(adapter)))\n"
                    "                net.config.pad_token_id = tokenizer.eos_token_id\n"
                ),
            ),
            (
                ("        tokenizer.save_pretrained(folder)\n        loading.name_base(folder, path)\n"),
                (
                    "        tokenizer.pad_token = tokenizer.eos_token\n"
                    "        tokenizer.save_pretrained(folder)\n"
                    "        loading.name_base(folder, path)\n"
                ),
            ),
        ),
        source="https://github.com/RLHFlow/RLHF-Reward-Modeling/issues/49",
    ),
]

HEALTHY = [
    Case(
        "pixel~input-perturbation",
        "diffusion/pixel",
        "data",
        "input perturbation (Ning 2023): training pictures get a little more noise than their target says",
        "right: in training alone",
        "trains: 0.1, as in the paper",
        edits=(
            (
                "        noisy = self.process.add(image[None], noise[None], timestep[None])[0]\n",
                (
                    "        more = 0.1 * torch.randn(image.shape, generator=generator) if training else 0.0\n"
                    "        noisy = self.process.add(image[None], (noise + more)[None], timestep[None])[0]\n"
                ),
            ),
        ),
        source="https://github.com/huggingface/diffusers/issues/3293",
    ),
    Case(
        "ppo~entropy-annealed",
        "rl/ppo",
        "schedule",
        "the entropy bonus falls to a tenth over the run",
        "right: exploration matters early",
        "trains: as in several tuned settings",
        edits=(
            (
                '            "entropy": -cfg.ent_coef * policy',
                '            "entropy": -cfg.ent_coef * (1 - 0.9 * run.progress(1.0)) * policy',
            ),
        ),
        source="https://github.com/DLR-RM/rl-baselines3-zoo",
    ),
    Case(
        "pretrain~slower-head",
        "llm/pretrain",
        "settings",
        "the output layer trains at a quarter of the rate",
        "right: the start at the frequencies is a good one",
        "trains: rates by module are usual",
        edits=(
            (
                '        optimizers={"main": core.make_optimizer(model, cfg.optim)},\n',
                (
                    '        optimizers={"main": core.make_optimizer(model, cfg.optim, {"model": cfg.optim.lr, "lm_head": cfg.optim.lr / 4})},\n'
                ),
            ),
        ),
        source="https://github.com/KellerJordan/modded-nanogpt",
    ),
    Case(
        "sft~lora-plus",
        "llm/sft",
        "settings",
        "LoRA+ (Hayou 2024): B trains at a higher rate than A",
        "right: two groups of one optimizer",
        "trains: the paper's choice, with a ratio of 4",
        edits=(
            (
                "    trainer.optimizer = core.make_optimizer(trainer.model, cfg.optim)\n",
                (
                    "    own = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}\n"
                    '    sides = {side: [p for name, p in own.items() if side in name] for side in ("lora_A", "lora_B")}\n'
                    '    rates = {"lora_A": cfg.optim.lr, "lora_B": 4 * cfg.optim.lr}\n'
                    "    trainer.optimizer = torch.optim.AdamW(\n"
                    '        [{"params": sides[side], "lr": rates[side], "weight_decay": 0.0, "name": side} for side in sides]\n'
                    "    )\n"
                ),
            ),
        ),
        source="https://arxiv.org/abs/2402.12354",
    ),
]
