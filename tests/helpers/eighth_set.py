"""Silent bugs of one or two lines in the recipes, and healthy forks: the open half of the eighth set.

The half is the first byte of the id's SHA-256, modulo 2. The other half is held out in eighth_set_heldout.py. The author of the set had read the
recipes, not the gates. Run by `python -m tests.helpers.set_run --set eighth`.
"""

from tests.helpers.set_cases import Case

BUGS = [
    Case(
        "classify~inputs-normalised-by-the-batch",
        "vision/classify",
        "preprocessing",
        "pictures are standardised where they are, without stored statistics",
        "by the statistics of the batch: an answer depends on the other pictures, and a single picture is another input",
        "by argument: the export answers differently for one picture and for many",
        edits=(
            (
                "        x = (images - self.mean) / self.std  # (B, C, H, W)\n",
                "        x = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)  # (B, C, H, W)\n",
            ),
        ),
    ),
    Case(
        "pixel~noise-of-each-picture-fixed",
        "diffusion/pixel",
        "augmentation",
        "noise is drawn by the index, so that runs are comparable",
        (
            "in training, too: each picture has one timestep and one noise for the whole run, and the s"
            "ame ones are without a class"
        ),
        "by argument: 4,000 pairs instead of new ones in each pass",
        edits=(
            (
                "        generator = generator or pictures.fixed_draws(self.split, index)\n",
                "        generator = pictures.fixed_draws(self.split, index)\n",
            ),
        ),
    ),
    Case(
        "flow~direction-turned",
        "diffusion/flow",
        "loss",
        "the direction leads from noise to data, as in papers where t = 1 is data",
        "the sampler integrates from noise with the other sign: it moves away from every picture",
        "by argument: samples diverge from the data",
        edits=(
            (
                '        target = process.target(batch["image"], batch["noise"], t)\n',
                '        target = process.target(batch["noise"], batch["image"], t)\n',
            ),
        ),
    ),
    Case(
        "latent~kl-mean-in-a-sum",
        "diffusion/latent",
        "reduction",
        "the divergence as a mean over the batch, as in most implementations",
        "the other terms are sums, which core divides by the samples: the divergence is divided by the batch twice",
        "by argument: at 64 pictures its weight is a 64th, and depends on the batch's size",
        edits=(
            (
                "cfg.vae.kl * posterior.kl().sum() / math.prod(shape)",
                "cfg.vae.kl * posterior.kl().mean() / math.prod(shape)",
            ),
        ),
    ),
    Case(
        "text~null-is-the-last-caption",
        "diffusion/text",
        "sampling",
        "the empty caption is the last one: its index is one less than their number",
        "the captions are counted without the empty one: guidance leads away from the last real caption",
        "by argument: the unconditional half of guidance is a caption of a digit",
        edits=(
            (
                '        how = {"null": val_data.null, "guidance_scale"',
                '        how = {"null": len(found.captions) - 1, "guidance_scale"',
            ),
        ),
    ),
    Case(
        "ppo~gamma-and-lambda-exchanged",
        "rl/ppo",
        "loss",
        "gae is called as elsewhere, with lambda first",
        "gamma is 0.95 and lambda 0.997: rewards of twenty steps are seen instead of 333",
        "by argument: the critic's values are those of a shorter horizon",
        edits=(
            (
                'rollout["terminated"], done, cfg.gamma, cfg.gae_lambda)',
                'rollout["terminated"], done, cfg.gae_lambda, cfg.gamma)',
            ),
        ),
    ),
    Case(
        "rlhf~reward-at-the-padded-end",
        "rl/rlhf",
        "mask",
        "the reward is of the whole completion: it is added to the last place",
        "where a completion ended before, that place is padding: its reward is masked away",
        "by argument: completions that end by themselves earn nothing",
        edits=(
            (
                "    last = valid.sum(1) - 1\n",
                "    last = torch.full((len(valid),), valid.shape[1] - 1, device=valid.device)\n",
            ),
        ),
    ),
    Case(
        "pretrain~exported-in-half",
        "llm/pretrain",
        "export",
        "a file of half the size",
        "`bfloat16()` changes the model itself: what is evaluated and trained after the export is rounded",
        "by argument: the model in memory has 8 bits of mantissa from then on",
        edits=(
            (
                ("        model.save_pretrained(folder)\n        tokenizer.save_pretrained(folder)\n"),
                ("        model.bfloat16().save_pretrained(folder)\n        tokenizer.save_pretrained(folder)\n"),
            ),
        ),
    ),
    Case(
        "align~language-thawed",
        "vlm/instruct",
        "trained parameters",
        "the language model learns in the first stage, too",
        "at the projector's rate of 2e-3, before the projector says anything",
        "by argument: LLaVA freezes it, and a random projector damages it",
        edits=(
            (
                '    return make_stage(cfg, run, "align", model, {"projector": cfg.optim.lr}, start, fresh)\n',
                (
                    '    rates = {"projector": cfg.optim.lr, "language": cfg.optim.lr}\n'
                    '    return make_stage(cfg, run, "align", model, rates, start, fresh)\n'
                ),
            ),
        ),
    ),
    Case(
        "whisper~attention-over-padding",
        "distill/whisper",
        "mask",
        "plain attention, which is faster",
        "the mask is left out: features of a short recording depend on the longest one in its batch",
        "by argument: another answer alone and in a batch",
        edits=(
            (
                "F.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None])",
                "F.scaled_dot_product_attention(q, k, v)",
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "classify~frozen-stem",
        "vision/classify",
        "model",
        "the stem stays as it is initialised (random features)",
        "right: it is frozen before the optimiser is made, and declared",
        "trains: the blocks have 99% of the parameters",
        edits=(
            (
                "    ema = core.Ema(model, cfg.ema) if cfg.ema else None\n",
                ("    model.stem.requires_grad_(False)\n    ema = core.Ema(model, cfg.ema) if cfg.ema else None\n"),
            ),
            (
                "loss_floor=balanced.floor, new_parameters=fresh)",
                'loss_floor=balanced.floor, new_parameters=fresh, frozen=("stem.",))',
            ),
        ),
    ),
    Case(
        "segment~quarter-turns",
        "vision/segment",
        "augmentation",
        "half of the windows are turned by 90 degrees",
        "right: picture and mask together; cells have no up",
        "trains: a usual augmentation for microscopes",
        edits=(
            (
                "        steps += [] if cfg.upright else [v2.RandomVerticalFlip()]\n",
                (
                    "        steps += [] if cfg.upright else [v2.RandomVerticalFlip(), v2.RandomApply([v2.Rando"
                    "mRotation((90, 90))], 0.5)]\n"
                ),
            ),
        ),
    ),
    Case(
        "ppo~normalised-over-the-rollout",
        "rl/ppo",
        "loss",
        "advantages are normalised over the rollout (Spinning Up), not in each minibatch",
        "right: mean and deviation of all processes",
        "trains: the same but for the sample of a minibatch",
        edits=(
            (
                '            everyone = run.gather(batch["advantage"])  # the minibatch over all processes\n',
                '            everyone = run.gather(rows["advantage"])  # the rollout over all processes\n',
            ),
        ),
        source="https://spinningup.openai.com/en/latest/algorithms/ppo.html",
    ),
    Case(
        "pixel~dpm-solver",
        "diffusion/pixel",
        "sampling",
        "samples by DPM-Solver++ instead of DDIM, in training and in the export",
        "right: both use the same scheduler",
        "trains: the recipe compares both already",
        edits=(
            (
                'noise: Tensor, scale: float, sampler: str = "ddim") -> Tensor:',
                'noise: Tensor, scale: float, sampler: str = "dpm++") -> Tensor:',
            ),
            (
                "        pictures.save_pipeline(folder, (ema.model if ema else model).eval().cpu(), process.sampler())\n",
                '        pictures.save_pipeline(folder, (ema.model if ema else model).eval().cpu(), process.sampler("dpm++"))\n',
            ),
        ),
    ),
]
