"""Bugs that public projects had and fixed, ported to the recipes, and healthy forks: the open half of the seventh set.

Each case names its source. The half is the first byte of the id's SHA-256, modulo 2. The other half is held out in seventh_set_heldout.py. The
author of the set had not read the gates. Run by `python -m tests.helpers.set_run --set seventh`.
"""

from tests.helpers.set_cases import Case

BUGS = [
    Case(
        "segment~iou-of-each-window",
        "vision/segment",
        "evaluation",
        "the mean IoU of the windows, as many metric libraries compute it",
        (
            "a window without a nucleus counts 1 where none is predicted, and a small nucleus as much as a full "
            "window: another number is reported as IoU"
        ),
        "by argument: empty windows count as perfect",
        edits=(
            (
                (
                    "        return segmentation.scores(confusion_matrix(model, data), classes)\n"
                    "\n"
                    "    def confusion_matrix"
                ),
                (
                    "        found, each = segmentation.scores(confusion_matrix(model, data), classes), []\n"
                    "        for batch in run.batches(data):\n"
                    '            for mask, answer in zip(batch["mask"], model(batch["image"]).argmax(1), strict=True):\n'
                    '                each.append(segmentation.scores(segmentation.counted(mask, answer, n), classes)["iou"])\n'
                    '        return found | {"iou": sum(each) / len(each)}\n'
                    "\n"
                    "    def confusion_matrix"
                ),
            ),
        ),
        source="https://github.com/qubvel-org/segmentation_models.pytorch/issues/226",
    ),
    Case(
        "detect~anchors-turned",
        "vision/detect",
        "model",
        "RetinaNet; the anchors were stored as height and width",
        "they are read as width and height: tall digits get wide anchors",
        "by argument: digits are taller than wide, their anchors wider than tall",
        edits=(
            (
                "detectors.fit(seen, cfg.anchors), stride=stride",
                "detectors.fit(seen, cfg.anchors).flip(1), stride=stride",
            ),
        ),
        argv=(
            "--model",
            "retinanet",
        ),
        source="https://github.com/dbolya/yolact/issues/19",
    ),
    Case(
        "latent~factor-without-shift",
        "diffusion/latent",
        "data",
        "latents are scaled by the autoencoder's factor, as for Stable Diffusion 1.5",
        "this autoencoder also has a shift: training leaves it out, decoding adds it",
        "by argument: each sample's latents are moved by the shift",
        edits=(
            (
                "    z = pipeline.scaled(latents.measured(vae, middles[learn]), middles)\n",
                "    z = middles * latents.measured(vae, middles[learn]).config.scaling_factor\n",
            ),
        ),
        source="https://github.com/huggingface/diffusers/issues/8887",
    ),
    Case(
        "text~null-of-zeros",
        "diffusion/text",
        "model",
        "a dropped caption is an embedding of zeros",
        "the pipeline encodes the empty caption instead: the unconditional half of guidance was never trained on it",
        "by argument: the exported pipeline guides away from an input that it never saw in training",
        edits=(
            (
                "    words = parts.read(found.captions, run.device)\n",
                (
                    "    words = parts.read(found.captions, run.device)\n"
                    "    words = torch.cat([words[:-1], torch.zeros_like(words[-1:])])  # the last is that of a dropped caption\n"
                ),
            ),
        ),
        source="https://github.com/Nerogar/OneTrainer/issues/957",
    ),
    Case(
        "sac~rewards-by-sign",
        "rl/sac",
        "rollout",
        "rewards are clipped to their sign, as for Atari games",
        "Pendulum's rewards are costs: nearly every one becomes -1, and good and bad actions earn the same",
        "by argument: all rewards but exact zeros are -1",
        edits=(
            (
                "        followed = {k: v.to(run.device) for k, v in envs.step(action).items()}\n",
                (
                    "        followed = {k: v.to(run.device) for k, v in envs.step(action).items()}\n"
                    '        followed["reward"] = followed["reward"].sign()\n'
                ),
            ),
        ),
        source="https://github.com/openai/baselines/issues/44",
    ),
    Case(
        "grpo~temperature-in-sampling-alone",
        "rl/grpo",
        "rollout",
        "answers are sampled at a temperature of 0.7",
        (
            "log-probabilities of the loss are those at 1: the gradient is that of another policy than the one "
            "that answered"
        ),
        "by argument: sampled at 0.7, scored at 1",
        edits=(
            (
                "    model.generation_config.eos_token_id = ends  # the export keeps the model's own end tokens\n",
                (
                    "    model.generation_config.eos_token_id = ends  # the export keeps the model's own end tokens\n"
                    "    trainer.temperature = 1.0\n"
                ),
            ),
        ),
        argv=(
            "--temperature",
            "0.7",
        ),
        source="https://github.com/huggingface/trl/pull/3029",
    ),
    Case(
        "rlhf~kl-per-token",
        "rl/rlhf",
        "schedule",
        "the KL of a token is what controls the coefficient, as it is logged elsewhere",
        (
            "the target is that of a completion: the measured KL is always far below it, and the coefficient "
            "falls at every rollout"
        ),
        "by argument: 6 nats of a token are never reached; the penalty vanishes",
        edits=(
            (
                '        controller.update(metrics["kl"])\n',
                '        controller.update(metrics["kl"] / metrics["tokens"])\n',
            ),
        ),
        source="https://github.com/CarperAI/trlx/pull/441",
    ),
    Case(
        "logits~teacher-against-itself",
        "distill/logits",
        "loss",
        "the divergence, rewritten in several lines",
        "both of its sides are the teacher: it is 0 and trains nothing",
        "reported by the source: it stops distillation completely",
        edits=(
            (
                '            kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)\n',
                (
                    '            targets_log_p = taught(batch["image"])\n'
                    '            log_p = taught(batch["image"])\n'
                    '            kl = F.kl_div(log_p, targets_log_p, reduction="sum", log_target=True)\n'
                ),
            ),
        ),
        source="https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/66",
    ),
    Case(
        "compress~wer-of-each",
        "distill/compress",
        "evaluation",
        "the word error rate of each recording, and their mean",
        "an error in a short sentence counts more than one in a long one: another number is reported as word error rate",
        "by argument: the rate is errors over words of all recordings",
        edits=(
            (
                '            "wer": whisper.word_error_rate(truth, wrote),\n',
                (
                    '            "wer": sum(whisper.word_error_rate([t], [w]) for t, w in zip(truth, wrote, strict=True)) / len(truth),\n'
                ),
            ),
        ),
        source="https://github.com/SeanNaren/deepspeech.pytorch/pull/265",
    ),
    Case(
        "whisper~bands-shaken-in-evaluation",
        "distill/whisper",
        "augmentation",
        "each band's energy is changed by up to 30%, so that microphones matter less",
        "held-out recordings are changed too, and anew at each evaluation",
        "by argument: the reported rate is that of disturbed recordings",
        edits=(
            (
                "        (envelope, heard), ids = got, self.ids[i]\n",
                (
                    "        (envelope, heard), ids = got, self.ids[i]\n"
                    "        envelope = envelope * (0.7 + 0.6 * torch.rand(envelope.shape[-1]))\n"
                ),
            ),
        ),
        source="https://github.com/shuaijiang/Whisper-Finetune/pull/11",
    ),
    Case(
        "instruct~projector-of-stage-one-exported",
        "vlm/instruct",
        "export",
        "the projector is exported from the weights that the stage started from, as for adapters",
        "the projector was trained in this stage too: the exported language model meets the older one",
        "by argument: language model and projector of different stages",
        edits=(
            (
                "        net = copy.deepcopy(model).eval().cpu()\n",
                (
                    "        net = copy.deepcopy(model).eval().cpu()\n"
                    '        net.load_state_dict({k: v for k, v in start.items() if k.startswith("projector.")}, strict=False)\n'
                ),
            ),
        ),
        source="https://github.com/haotian-liu/LLaVA/issues/474",
    ),
]

HEALTHY = [
    Case(
        "classify~generalised-mean",
        "vision/classify",
        "model",
        "generalised-mean pooling (Radenovic 2018) instead of the mean",
        "right: features behind a ReLU are not negative",
        "trains: p of 3, as in the paper",
        edits=(
            (
                "        return self.head(x.mean((2, 3)))  # (B, n_classes)\n",
                "        return self.head(x.clamp_min(1e-6).pow(3).mean((2, 3)).pow(1 / 3))  # (B, n_classes)\n",
            ),
        ),
        source="https://arxiv.org/abs/1711.02512",
    ),
    Case(
        "detect~grey-pictures",
        "vision/detect",
        "augmentation",
        "a fifth of the training pictures are grey",
        "right: boxes and labels stay",
        "trains: a usual augmentation",
        edits=(("[v2.RandomPhotometricDistort()]", "[v2.RandomPhotometricDistort(), v2.RandomGrayscale(0.2)]"),),
        source="https://docs.pytorch.org/vision/stable/transforms.html",
    ),
    Case(
        "dqn~boltzmann",
        "rl/dqn",
        "rollout",
        "actions are drawn by their values (Boltzmann), besides the random ones",
        "right: a low temperature, relative to the return scale",
        "trains: greedy where values differ by more than a tenth",
        edits=(
            (
                "        greedy = policy(observation).argmax(-1)\n",
                (
                    "        gumbel = -(-torch.rand(envs.n, policy.n_actions, generator=draws).clamp_min(1e-20).log()).log()\n"
                    "        own = gumbel[envs.mine.start : envs.mine.stop].to(run.device)\n"
                    "        greedy = (policy(observation) + 0.02 * own).argmax(-1)\n"
                ),
            ),
        ),
        source="https://arxiv.org/abs/1705.10257",
    ),
    Case(
        "logits~squared-error",
        "distill/logits",
        "loss",
        "squared error of logits instead of the divergence (Kim 2021)",
        "right: first loss and floor are declared anew, the gate of the divergence is left out",
        "trains: the paper's loss",
        edits=(
            (
                (
                    '            kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)\n'
                    '            terms["kl"] = weight * temperature**2 * kl\n'
                ),
                '            terms["kl"] = weight * (logits.float() - answers(batch["image"])).square().mean(1).sum()\n',
            ),
            (
                (
                    '        log_p = taught(batch["image"])\n'
                    "        unsure = -(log_p.exp() * log_p).sum(1).mean().item()\n"
                    "        return (1 - weight) * math.log(len(classes)) + weight * temperature**2 * (math.log(len(classes)) - unsure)\n"
                ),
                (
                    '        return (1 - weight) * math.log(len(classes)) + weight * answers(batch["image"]).square().mean().item()\n'
                ),
            ),
            (
                (
                    '        known, label = batch["known"], batch["label"]\n'
                    '        return targets.least_loss(taught(batch["image"]), label, known, weight, temperature) if weight else 0.0\n'
                ),
                "        return 0.0\n",
            ),
            (
                "               *([targets.teacher(teacher), targets.divergence(teacher)] if weight else [])],\n",
                "               *([targets.teacher(teacher)] if weight else [])],\n",
            ),
        ),
        source="https://arxiv.org/abs/2105.08919",
    ),
]
