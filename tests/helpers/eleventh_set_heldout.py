"""Healthy forks, settings and own data: the held-out half of the eleventh set (see eleventh_set.py)."""

from tests.helpers.set_cases import Case

BUGS: list[Case] = []

HEALTHY = [
    Case(
        "classify~focal-loss",
        "vision/classify",
        "loss",
        "focal loss (Lin 2017) instead of the smoothed cross-entropy",
        "right: a gamma of 2, a sum over the batch",
        "by argument: published for classifiers (Mukhoti 2020)",
        edits=(
            (
                '        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}\n'
                "\n"
                "    def mixed_loss",
                '        ce = F.cross_entropy(logits, batch["label"], reduction="none")\n'
                '        return {"focal": ((1 - (-ce).exp()) ** 2 * ce).sum()}\n'
                "\n"
                "    def mixed_loss",
            ),
        ),
        argv=("--label-smoothing", "0"),
        source="https://arxiv.org/abs/2002.09437",
    ),
    Case(
        "classify~stochastic-depth",
        "vision/classify",
        "model",
        "stochastic depth (Huang 2016) by torchvision's module",
        "right: a tenth of the residual branches is left out, in training only",
        "by argument: torchvision's ConvNeXt and EfficientNet train with it",
        edits=(
            (
                "        same = stride == 1 and n_in == n_out\n",
                '        self.drop = StochasticDepth(0.1, "row")\n        same = stride == 1 and n_in == n_out\n',
            ),
            (
                "        return F.relu(self.shortcut(x) + self.norm2(self.conv2(h)))\n",
                "        return F.relu(self.shortcut(x) + self.drop(self.norm2(self.conv2(h))))\n",
            ),
            (
                "from torch.nn import functional as F\nfrom torchvision.transforms import v2\n",
                "from torch.nn import functional as F\nfrom torchvision.ops import StochasticDepth\nfrom torchvision.transforms import v2\n",
            ),
        ),
    ),
    Case(
        "segment~instance-norm-and-transposed",
        "vision/segment",
        "model",
        "instance norm and transposed convolutions, as in nnU-Net",
        "right: each window has its own statistics, in training and evaluation",
        "by argument: nnU-Net's defaults",
        edits=(
            ("nn.GroupNorm(4, n_out), nn.LeakyReLU(0.1)", "nn.InstanceNorm2d(n_out, affine=True), nn.LeakyReLU(0.1)"),
            (
                "        self.up = nn.ModuleList([Double(a + b, a) for a, b in reversed(pairs[1:])])\n",
                "        self.larger = nn.ModuleList([nn.ConvTranspose2d(b, b, 2, 2) for _, b in reversed(pairs[1:])])\n"
                "        self.up = nn.ModuleList([Double(a + b, a) for a, b in reversed(pairs[1:])])\n",
            ),
            (
                "        for block, fine in zip(self.up, reversed(seen[:-1]), strict=True):\n"
                "            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), fine], 1))\n",
                "        for larger, block, fine in zip(self.larger, self.up, reversed(seen[:-1]), strict=True):\n"
                "            x = block(torch.cat([larger(x), fine], 1))\n",
            ),
        ),
    ),
    Case(
        "detect~boxes-count-twice",
        "vision/detect",
        "loss",
        "weights of the terms: boxes count twice, centerness half",
        "right: every term keeps its form",
        "by argument: usual weights of detectors",
        edits=(
            (
                '        return model(batch["image"], boxes.targets(batch))\n',
                '        weights = {"bbox_regression": 2.0, "bbox_ctrness": 0.5}\n'
                '        terms = model(batch["image"], boxes.targets(batch))\n'
                "        return {name: weights.get(name, 1.0) * value for name, value in terms.items()}\n",
            ),
        ),
    ),
    Case(
        "pixel~offset-noise",
        "diffusion/pixel",
        "data",
        "offset noise (Guttenberg 2023): a tenth of each channel's noise is the same at every pixel",
        "right: drawn from the sample's generator, and the target is that noise",
        "by argument: used for Stable Diffusion's fine-tuning at this size",
        edits=(
            (
                "        noise = torch.randn(image.shape, generator=generator)\n",
                "        noise = torch.randn(image.shape, generator=generator)\n"
                "        if training:\n"
                "            noise = noise + 0.1 * torch.randn(len(image), 1, 1, generator=generator)\n",
            ),
        ),
        source="https://www.crosslabs.org/blog/diffusion-with-offset-noise",
    ),
    Case(
        "pixel~scale-shift-and-dropout",
        "diffusion/pixel",
        "model",
        "timesteps scale and shift the features (ADM, Dhariwal 2021), with dropout",
        "right: diffusers' own options; the last layer starts at zero",
        "by argument: the published net",
        edits=(
            (
                "    return nets.unet(channels, n_classes, cfg.data.image_size, cfg.widths, cfg.layers, cfg.attention)\n",
                "    model = UNet2DModel(\n"
                "        sample_size=cfg.data.image_size, in_channels=channels, out_channels=channels, block_out_channels=cfg.widths,\n"
                '        layers_per_block=cfg.layers, norm_num_groups=8, add_attention=False, resnet_time_scale_shift="scale_shift",\n'
                '        dropout=0.1, num_class_embeds=n_classes + 1, down_block_types=("DownBlock2D",) * len(cfg.widths),\n'
                '        up_block_types=("UpBlock2D",) * len(cfg.widths),\n'
                "    )  # fmt: skip\n"
                "    nn.init.zeros_(model.conv_out.weight)\n"
                "    nn.init.zeros_(model.conv_out.bias)\n"
                "    return model\n",
            ),
            ("import torch\nfrom torch import Tensor, nn\n", "import torch\nfrom diffusers import UNet2DModel\nfrom torch import Tensor, nn\n"),
        ),
    ),
    Case(
        "flow~mode-timesteps",
        "diffusion/flow",
        "timesteps",
        "levels by mode sampling with heavy tails (Esser 2024) instead of logit-normal ones",
        "right: the published formula with a scale of 0.8; pure noise and no noise are drawn as well",
        "by argument: one of the paper's choices",
        edits=(
            (
                "        logit = self.process.noise.logit_mean + self.process.noise.logit_std * torch.randn((), generator=generator)\n"
                "        timestep = self.process.noise.num_train_timesteps * torch.sigmoid(logit)\n",
                "        u = torch.rand((), generator=generator)\n"
                "        level = 1 - u - 0.8 * ((torch.pi * u / 2).cos().square() - 1 + u)\n"
                "        timestep = self.process.noise.num_train_timesteps * level\n",
            ),
        ),
        source="https://arxiv.org/abs/2403.03206",
    ),
    Case(
        "ppo~stops-at-a-kl",
        "rl/ppo",
        "loop",
        "no further pass over a rollout once the policy has moved by 0.015 nats (Spinning Up)",
        "right: measured after each pass over the rollout",
        "by argument: a usual safeguard; the number of updates falls in some iterations",
        edits=(
            (
                "        for minibatch in minibatches(cfg, run, policy, envs, rollout, step.index):\n"
                "            run.update(stage, run.micro_batches(minibatch))\n",
                "        of_a_pass = cfg.num_steps * cfg.num_envs // cfg.train.batch_size\n"
                "        for n, minibatch in enumerate(minibatches(cfg, run, policy, envs, rollout, step.index), 1):\n"
                "            run.update(stage, run.micro_batches(minibatch))\n"
                "            with run.autocast():\n"
                '                if n % of_a_pass == 0 and moved(cfg, run, policy, rollout)["approx_kl"] > 0.015:\n'
                "                    break\n",
            ),
        ),
    ),
    Case(
        "dqn~nadam-and-exponential-exploration",
        "rl/dqn",
        "optimiser",
        "NAdam of torch, and random actions that become rarer exponentially",
        "right: the same rate, and the same share of random actions at the end",
        "by argument: both are usual",
        edits=(
            (
                "    return 1 - (1 - cfg.exploration_final_eps) * min(progress / max(cfg.exploration_fraction, 1e-9), 1)\n",
                "    return max(cfg.exploration_final_eps, 0.02 ** (progress / max(cfg.exploration_fraction, 1e-9)))\n",
            ),
            (
                '        optimizers={"main": core.make_optimizer(policy, cfg.optim)},\n',
                '        optimizers={"main": torch.optim.NAdam(policy.parameters(), lr=cfg.optim.lr)},\n',
            ),
        ),
    ),
    Case(
        "dqn~plain-with-odd-batch",
        "rl/dqn",
        "settings",
        "the plain algorithm: one network's maximum, no dueling, no clipping; five environments, batches of 97",
        "settings that the page offers",
        "by argument: Mnih 2015 trains so",
        argv=("--no-double", "--no-dueling", "--optim.clip", "inf", "--num-envs", "5", "--train.batch-size", "97"),
    ),
    Case(
        "sac~fixed-temperature",
        "rl/sac",
        "loss",
        "a fixed temperature, as in the first paper (Haarnoja 2018)",
        "right: the temperature is a buffer, its term is gone",
        "by argument: rewards are relative to their scale, and 0.2 is CleanRL's value",
        edits=(
            (
                "        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))\n",
                '        self.register_buffer("log_temperature", torch.tensor(math.log(temperature)))\n',
            ),
            ("        surplus = -log_prob.detach() - cfg.target_entropy * n_act\n", ""),
            ('            "temperature": (model.log_temperature * surplus).sum(),\n', ""),
            ('environments.expect(cfg.env, "critic", "temperature")', 'environments.expect(cfg.env, "critic")'),
        ),
    ),
    Case(
        "sac~two-optimisers",
        "rl/sac",
        "optimiser",
        "an optimiser for the critics and one for policy and temperature, at a third of the rate",
        "right: every parameter is in one of them",
        "by argument: CleanRL's rates are 1e-3 and 3e-4",
        edits=(
            (
                '        optimizers={"main": core.make_optimizer(policy, cfg.optim)},\n',
                "        optimizers={\n"
                '            "critics": torch.optim.Adam(policy.critics.parameters(), lr=cfg.optim.lr),\n'
                '            "policy": torch.optim.Adam([*policy.actor.parameters(), policy.log_temperature], lr=cfg.optim.lr / 3),\n'
                "        },\n",
            ),
        ),
    ),
    Case(
        "grpo~gspo",
        "rl/grpo",
        "loss",
        "GSPO (Zheng 2025): one ratio for a whole answer",
        "right: TRL's own options for it",
        "by argument: published",
        edits=(
            (
                '        loss_type="dapo",  # a mean over all tokens of an iteration: independent of the micro-batches\n',
                '        loss_type="grpo",\n        importance_sampling_level="sequence",\n',
            ),
        ),
        source="https://arxiv.org/abs/2507.18071",
    ),
]  # fmt: skip
