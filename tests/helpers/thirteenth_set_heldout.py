"""Healthy forks, settings and own data: the held-out half of the thirteenth set (see thirteenth_set.py)."""

from tests.helpers.set_cases import Case

GRID = '''
class Grid(gymnasium.Env):
    """Walk to the goal on 5 x 5 cells, around two pits, seen from above as a picture; the only reward is at the goal."""

    observation_space = gymnasium.spaces.Box(0, 255, (5, 5, 3), "uint8")
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        cells = self.np_random.choice(25, 4, replace=False)
        self.place, self.goal, *self.pits = (divmod(int(c), 5) for c in cells)
        self.time = 0
        return self.picture(), {}

    def picture(self):
        shot = numpy.zeros((5, 5, 3), "uint8")
        shot[*self.place, 0] = 255
        shot[*self.goal, 1] = 255
        for pit in self.pits:
            shot[*pit, 2] = 255
        return shot

    def step(self, action):
        self.time += 1
        down, right = ((-1, 0), (1, 0), (0, -1), (0, 1))[int(action)]
        self.place = (min(4, max(0, self.place[0] + down)), min(4, max(0, self.place[1] + right)))
        won, lost = self.place == self.goal, self.place in self.pits
        return self.picture(), (1 - 0.9 * self.time / 40) * won, won or lost, False, {}


if "Grid-v0" not in gymnasium.registry:
    gymnasium.register("Grid-v0", Grid, max_episode_steps=40)


'''

CRANE = '''
class Crane(gymnasium.Env):
    """Hold a crane above a moving mark: places as one-hot vectors, 60 sensors that mean nothing, costs of hundreds, actions -2 to 2."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (100,), "float32")
    action_space = gymnasium.spaces.Discrete(5, start=-2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.mark = (int(c) for c in self.np_random.integers(20, size=2))
        return self.seen(), {}

    def seen(self):
        places = numpy.zeros(40, "float32")
        places[[self.place, 20 + self.mark]] = 1
        return numpy.concatenate([places, self.np_random.random(60, "float32")])

    def step(self, action):
        self.place = min(19, max(0, self.place + int(action)))
        cost = 100.0 * abs(self.place - self.mark) + 10.0 * abs(int(action))
        if self.np_random.random() < 0.1:
            self.mark = min(19, max(0, self.mark + int(self.np_random.integers(-3, 4))))
        return self.seen(), -cost, False, False, {}


if "Crane-v0" not in gymnasium.registry:
    gymnasium.register("Crane-v0", Crane, max_episode_steps=30)


'''

BUGS: list[Case] = []

HEALTHY = [
    Case(
        "classify~convmixer",
        "vision/classify",
        "architecture",
        "ConvMixer (Trockman 2022) written in the file: patches of 2, depthwise and pointwise convolutions, batch norm",
        "right: the published block; it owns its normalisation and starts at equal scores, as the recipe's net does",
        "measured without gates: accuracy 0.948 after 2 epochs",
        edits=(
            (
                "def make_model(cfg: Config,",
                "class Residual(nn.Sequential):\n"
                "    def forward(self, x: Tensor) -> Tensor:\n"
                "        return x + super().forward(x)\n"
                "\n\n"
                "class ConvMixer(nn.Module):\n"
                '    """Depthwise 5x5 and pointwise convolutions on patches of 2x2: images (B, C, H, W) in [0, 1] -> (B, n_classes)."""\n'
                "\n"
                "    def __init__(self, mean: Tensor, std: Tensor, width: int, depth: int, n_classes: int):\n"
                "        super().__init__()\n"
                '        self.register_buffer("mean", mean.view(-1, 1, 1))\n'
                '        self.register_buffer("std", std.view(-1, 1, 1))\n'
                "        after = lambda: (nn.GELU(), nn.BatchNorm2d(width))  # noqa: E731\n"
                "        self.stem = nn.Sequential(nn.Conv2d(len(mean), width, 2, 2), *after())\n"
                "        self.blocks = nn.Sequential(\n"
                "            *[\n"
                "                nn.Sequential(\n"
                '                    Residual(nn.Conv2d(width, width, 5, groups=width, padding="same"), *after()),\n'
                "                    nn.Conv2d(width, width, 1),\n"
                "                    *after(),\n"
                "                )\n"
                "                for _ in range(depth)\n"
                "            ]\n"
                "        )\n"
                "        self.head = nn.Linear(width, n_classes)\n"
                "        nn.init.zeros_(self.head.weight)\n"
                "        nn.init.zeros_(self.head.bias)\n"
                "\n"
                "    def forward(self, images: Tensor) -> Tensor:\n"
                "        return self.head(self.blocks(self.stem((images - self.mean) / self.std)).mean((2, 3)))\n"
                "\n\n"
                "def make_model(cfg: Config,",
            ),
            (
                "    model = ResNet(mean, std, cfg.widths, len(classes))\n",
                "    model = ConvMixer(mean, std, cfg.widths[-1], 4, len(classes))\n",
            ),
            (
                '{"architecture": "ResNet", "widths": cfg.widths}',
                '{"architecture": "ConvMixer", "width": cfg.widths[-1]}',
            ),
        ),
        source="https://arxiv.org/abs/2201.09792",
    ),
    Case(
        "segment~lovasz",
        "vision/segment",
        "loss",
        "Lovasz-softmax (Berman 2018) next to the cross-entropy, for the classes that occur in a window, instead of Dice",
        "right: a sum over (window, class) with the recipe's counts; the first value is not declared, the floor not known",
        "measured without gates: IoU of nuclei 0.896 after 10 epochs",
        edits=(
            (
                '            terms["dice"] = cfg.dice * dice(logits.softmax(1), mask)\n',
                '            terms["lovasz"] = cfg.dice * lovasz(logits.softmax(1), mask)\n',
            ),
            ('"dice": (pixels > 0).sum()}', '"lovasz": (pixels > 0).sum()}'),
            (
                "    def dice(p: Tensor, mask: Tensor) -> Tensor:\n"
                '        """1 - Dice, summed over the classes that occur in each window: a window\'s value does not depend on the rest '
                'of the batch."""\n'
                "        scored, truth = mask != IGNORE, present(mask)\n"
                "        own = p.gather(1, mask.where(scored, 0)[:, None])[:, 0] * scored  # (B, H, W) probability of the true class\n"
                "        both = torch.zeros_like(truth, dtype=p.dtype).scatter_add(1, mask.where(scored, 0).flatten(1), own.flatten(1))\n"
                "        predicted = (p * scored[:, None]).flatten(2).sum(2)  # (B, n)\n"
                "        return ((1 - 2 * both / (predicted + truth).clamp_min(1)) * (truth > 0)).sum()\n",
                "    def lovasz(p: Tensor, mask: Tensor) -> Tensor:\n"
                '        """Lovasz extension of 1 - IoU, summed over the classes that occur in each window."""\n'
                "        total = p.new_zeros(())\n"
                "        for q, ids in zip(p, mask, strict=True):  # (n, H, W), (H, W)\n"
                "            scored = ids != IGNORE\n"
                "            for c in ids[scored].unique().tolist():\n"
                "                truth = (ids[scored] == c).float()\n"
                "                wrong, order = (truth - q[c][scored]).abs().sort(descending=True)\n"
                "                truth = truth[order]\n"
                "                loss = 1 - (truth.sum() - truth.cumsum(0)) / (truth.sum() + (1 - truth).cumsum(0))\n"
                "                total = total + wrong @ torch.cat([loss[:1], loss.diff()])\n"
                "        return total\n",
            ),
            (
                "        initial_loss=lambda b: mask_expectations.answered(\n"
                '            b["mask"], mask_expectations.unsure(b["mask"], n), n, **of_terms\n'
                "        ),\n",
                "        floor_known=False,\n",
            ),
        ),
        source="https://arxiv.org/abs/1705.08790",
    ),
    Case(
        "flow~scale-shift-unet",
        "diffusion/flow",
        "architecture",
        "the blocks of ADM (Dhariwal 2021): scale and shift by time and class, residual up and down blocks, dropout 0.1",
        "right: diffusers' own blocks and configuration, so that the pipeline loads it; the first prediction is 0",
        "measured without gates: agreement 0.77 after 2 epochs",
        edits=(
            (
                "    return nets.unet(channels, n_classes, cfg.data.image_size, cfg.widths, cfg.layers, cfg.attention)\n",
                "    depth = len(cfg.widths)\n"
                "    model = UNet2DModel(\n"
                "        sample_size=cfg.data.image_size,\n"
                "        in_channels=channels,\n"
                "        out_channels=channels,\n"
                "        block_out_channels=cfg.widths,\n"
                "        layers_per_block=cfg.layers,\n"
                "        norm_num_groups=8,\n"
                "        add_attention=cfg.attention,\n"
                "        num_class_embeds=n_classes + 1,\n"
                '        resnet_time_scale_shift="scale_shift",\n'
                "        dropout=0.1,\n"
                '        down_block_types=("ResnetDownsampleBlock2D",) * depth,\n'
                '        up_block_types=("ResnetUpsampleBlock2D",) * depth,\n'
                "    )\n"
                "    nn.init.zeros_(model.conv_out.weight)\n"
                "    nn.init.zeros_(model.conv_out.bias)\n"
                "    return model\n",
            ),
            (
                "import torch\nfrom torch import Tensor, nn\n",
                "import torch\nfrom diffusers import UNet2DModel\nfrom torch import Tensor, nn\n",
            ),
            (
                "from trainworthy.recipes.diffusion.models import nets, pipeline, usage\n",
                "from trainworthy.recipes.diffusion.models import pipeline, usage\n",
            ),
        ),
        source="https://arxiv.org/abs/2105.05233",
    ),
    Case(
        "flow~power-function-ema",
        "diffusion/flow",
        "EMA",
        "a power-function EMA (Karras 2024): the weights' memory grows with the run, gamma 6.94",
        "right: the published decay (1 - 1/t)^(gamma + 1); the count of updates is in the checkpoint",
        "measured without gates: agreement 0.68 after 2 epochs",
        edits=(
            (
                "# ----------------------------------------------------------------------------------------------------------------- data\n",
                "class PowerEma(core.Ema):\n"
                '    """Average whose width is a fixed share of the run: sigma_rel 0.10 at this gamma (Karras 2024)."""\n'
                "\n"
                "    gamma = 6.94\n"
                "\n"
                "    @torch.no_grad()\n"
                "    def update(self, trained: nn.Module) -> None:\n"
                "        self.updates += 1\n"
                "        decay = (1 - 1 / self.updates) ** (self.gamma + 1)\n"
                "        for mine, new in zip(self.model.parameters(), trained.parameters(), strict=True):\n"
                "            mine.lerp_(new, 1 - decay)\n"
                "        for mine, new in zip(self.model.buffers(), trained.buffers(), strict=True):\n"
                "            mine.copy_(new)\n"
                "\n\n"
                "# ----------------------------------------------------------------------------------------------------------------- data\n",
            ),
            (
                "    ema = core.Ema(model, cfg.ema) if cfg.ema else None\n",
                "    ema = PowerEma(model, cfg.ema) if cfg.ema else None\n",
            ),
        ),
        source="https://arxiv.org/abs/2312.02696",
    ),
    Case(
        "ppo~own-grid",
        "rl/ppo",
        "own environment",
        "a grid seen as a 5 x 5 colour picture, with a sparse reward at the goal and pits that end an episode without one",
        "right: a gymnasium environment that draws from its own generator alone, with a time limit",
        "measured without gates: return 0.19 after 10 rollouts, 0.64 after 40",
        edits=(
            ("\nfrom trainworthy import core\n", f"\nfrom trainworthy import core\n\n{GRID.rstrip()}\n"),
            (
                "import torch\nfrom gymnasium.spaces import Box, Discrete\n",
                "import gymnasium\nimport numpy\nimport torch\nfrom gymnasium.spaces import Box, Discrete\n",
            ),
        ),
        argv=("--env", "Grid-v0"),
    ),
    Case(
        "ppo~early-stop",
        "rl/ppo",
        "loop",
        "up to ten passes, but no further one once the KL divergence exceeds 1.5 x 0.01 (as in Spinning Up and CleanRL)",
        "right: measured on the whole rollout after each pass, by the recipe's own estimate; nothing else depends on it",
        "measured without gates: return 500 after 20 rollouts",
        edits=(
            (
                "        for minibatch in minibatches(cfg, run, policy, envs, rollout, step.index):\n"
                "            run.update(stage, run.micro_batches(minibatch))\n"
                "        with run.autocast():\n",
                "        updates = cfg.num_steps * cfg.num_envs // cfg.train.batch_size  # of a pass\n"
                "        for i, minibatch in enumerate(minibatches(cfg, run, policy, envs, rollout, step.index), 1):\n"
                "            run.update(stage, run.micro_batches(minibatch))\n"
                "            if i % updates == 0:\n"
                "                with run.autocast():\n"
                '                    far = moved(cfg, run, policy, rollout)["approx_kl"].item()\n'
                "                if far > 1.5 * 0.01:\n"
                "                    break\n"
                "        with run.autocast():\n",
            ),
        ),
        argv=("--update-epochs", "10"),
        source="https://docs.cleanrl.dev/rl-algorithms/ppo/",
    ),
    Case(
        "dqn~munchausen-rl",
        "rl/dqn",
        "targets",
        "Munchausen DQN (Vieillard 2020): soft values and a bonus for the log-probability of the action that was taken",
        "right: the published target with alpha 0.9 and a bonus clipped at -1; the temperature of 0.3 is in units of the reward",
        "measured without gates: return 380 after 80 iterations",
        edits=(
            (
                '    worth = target(rows["following"])\n'
                '    best = (policy(rows["following"]) if cfg.double else worth).argmax(-1, keepdim=True)\n'
                '    return rows["earned"] + rows["counts"] * (worth.gather(-1, best).squeeze(-1) * target.returns.rms)\n',
                "    alpha, tau, lowest = 0.9, 0.3, -1.0\n"
                '    now = target(rows["observation"]) * target.returns.rms  # (B, n_actions), in units of the reward\n'
                '    worth = target(rows["following"]) * target.returns.rms\n'
                '    taken = (now / tau).log_softmax(-1).gather(-1, rows["action"][:, None]).squeeze(-1)\n'
                "    bonus = alpha * (tau * taken).clamp(lowest, 0)\n"
                "    log_p = (worth / tau).log_softmax(-1)\n"
                "    soft = (log_p.exp() * (worth - tau * log_p)).sum(-1)\n"
                '    return rows["earned"] + bonus + rows["counts"] * soft\n',
            ),
        ),
        source="https://arxiv.org/abs/2007.14430",
    ),
    Case(
        "dqn~own-negative-actions",
        "rl/dqn",
        "own environment",
        "100 numbers of which 60 are noise, rewards from -2,000 to 0, actions numbered -2 to 2",
        "right: a gymnasium environment that draws from its own generator alone, with a time limit and no end before it",
        "measured without gates: return -8,704 after 40 iterations, -6,838 after 80",
        edits=(
            ("\nfrom trainworthy import core\n", f"\nfrom trainworthy import core\n\n{CRANE.rstrip()}\n"),
            (
                "import torch\nfrom gymnasium.spaces import Discrete\n",
                "import gymnasium\nimport numpy\nimport torch\nfrom gymnasium.spaces import Discrete\n",
            ),
        ),
        argv=("--env", "Crane-v0", "--gamma", "0.9"),
    ),
    Case(
        "sac~redq",
        "rl/sac",
        "ensemble",
        "randomised ensembled double Q-learning (Chen 2021): five critics, the lower of two drawn ones in the target, their mean for the policy",
        "right: the pair is drawn once per minibatch from the same generator as the minibatch; every critic has the same target",
        "measured without gates: return -72 after 200 iterations (10 episodes); -1,337 after 50",
        edits=(
            ("activation=nn.ReLU) for _ in range(2))\n", "activation=nn.ReLU) for _ in range(5))\n"),
            (
                'def returns(cfg: Config, policy: "Policy", target: "Policy", steps: dict[str, Tensor], noise: Tensor) -> Tensor:\n',
                "def returns(\n"
                '    cfg: Config, policy: "Policy", target: "Policy", steps: dict[str, Tensor], noise: Tensor, pair: tuple[int, ...] = (0, 1)\n'
                ") -> Tensor:\n",
            ),
            (
                '    value = target.worth(steps["next_observation"], action).amin(0) * target.rewards.rms\n',
                '    value = target.worth(steps["next_observation"], action)[list(pair)].amin(0) * target.rewards.rms\n',
            ),
            ("    places, noises = [], []\n", "    places, noises, pairs = [], [], []\n"),
            (
                "        noises.append(torch.randn(2, size, policy.n_act, generator=draws)[:, mine].to(run.device))\n",
                "        noises.append(torch.randn(2, size, policy.n_act, generator=draws)[:, mine].to(run.device))\n"
                "        pairs.append(torch.randperm(5, generator=draws)[:2].tolist())\n",
            ),
            (
                "returns(cfg, policy, target, steps, following) / policy.rewards.rms\n",
                "returns(cfg, policy, target, steps, following, pairs[i]) / policy.rewards.rms\n",
            ),
            (
                '        gain = model.worth(batch["observation"], action, frozen=True).amin(0)\n',
                '        gain = model.worth(batch["observation"], action, frozen=True).mean(0)\n',
            ),
            (
                "        return self.worth(observation, self(observation)).amin(0) * self.rewards.rms\n",
                "        return self.worth(observation, self(observation)).mean(0) * self.rewards.rms\n",
            ),
        ),
        source="https://arxiv.org/abs/2101.05982",
    ),
    Case(
        "logits~regressed",
        "distill/logits",
        "loss",
        "regression of the teacher's logits (Ba & Caruana 2014; Kim 2021) instead of the divergence at a temperature",
        "right: a mean over classes, summed over samples; the first loss is that of zero logits, the floor is declared as not known",
        "measured without gates: accuracy 0.884 after 6 epochs of the second stage alone",
        edits=(
            (
                "        if weight > 0:  # a sum over classes; T^2 keeps the gradient's size at any temperature\n"
                '            kl = F.kl_div(soft(logits), taught(batch["image"]), reduction="sum", log_target=True)\n'
                '            terms["kl"] = weight * temperature**2 * kl\n',
                "        if weight > 0:\n"
                '            terms["mse"] = weight * (logits.float() - answers(batch["image"])).square().mean(1).sum()\n',
            ),
            (
                '        log_p = taught(batch["image"])\n'
                "        unsure = -(log_p.exp() * log_p).sum(1).mean().item()\n"
                "        return (1 - weight) * math.log(len(classes)) + weight * temperature**2 * (math.log(len(classes)) - unsure)\n",
                '        return (1 - weight) * math.log(len(classes)) + weight * answers(batch["image"]).square().mean().item()\n',
            ),
            (
                '        """Return the losses of uniform predictions: ln N, and T^2 (ln N - entropy of the softened teacher)."""\n',
                '        """Return the losses of zero logits: ln N, and the mean square of the teacher\'s logits."""\n',
            ),
            (
                "    def floor(batch: dict) -> float:\n"
                '        """The lowest loss that any student has: labels that the teacher contradicts leave more than 0."""\n'
                '        known, label = batch["known"], batch["label"]\n'
                '        return targets.least_loss(taught(batch["image"]), label, known, weight, temperature) if weight else 0.0\n'
                "\n",
                "",
            ),
            ("loss_floor=floor, overfit_metric=goal", "floor_known=not weight, overfit_metric=goal"),
        ),
        source="https://arxiv.org/abs/2105.08919",
    ),
    Case(
        "logits~patient-teacher",
        "distill/logits",
        "mixed batches",
        "function matching (Beyer 2022): pictures without a known label are mixed with others, for student and teacher alike",
        "right: mixtures have no label in the loss, and a picture with a known label is never mixed; drawn in the sample, in training alone",
        "measured without gates: accuracy 0.376 after 2 epochs of the second stage (chance 0.1)",
        edits=(
            (
                '        return {**super().get(index, generator), "known": self.known[index]}\n',
                '        sample = {**super().get(index, generator), "known": self.known[index]}\n'
                "        if generator is None or self.known[index]:\n"
                "            return sample\n"
                '        other = super().get(int(torch.randint(len(self), (), generator=generator)), generator)["image"]\n'
                "        share = torch.rand((), generator=generator)\n"
                '        return {**sample, "image": share * sample["image"] + (1 - share) * other}\n',
            ),
        ),
        source="https://arxiv.org/abs/2106.05237",
    ),
    Case(
        "pretrain~two-tokens",
        "llm/pretrain",
        "auxiliary head",
        "multi-token prediction (Gloeckle 2024): a residual layer before the same output layer predicts the token after the next",
        "right: its targets stay in the document, it has its own count, starts at the token frequencies, and is not exported",
        "measured without gates: 2.55 bits per byte after 200 steps",
        edits=(
            (
                "    start_at_frequencies(model, log_p)\n    return model\n",
                "    start_at_frequencies(model, log_p)\n"
                "    model.second = nn.Linear(cfg.hidden_size, cfg.hidden_size, bias=False)  # of the token after the next\n"
                "    nn.init.zeros_(model.second.weight)\n"
                "    return model\n",
            ),
            (
                "    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:\n"
                "        nll, log_z, scored = scores(model, batch)\n"
                '        terms = {"ce": nll[scored].sum()}\n',
                "    def within(batch: dict) -> Tensor:\n"
                '        """Whether the token two places later is a target of the same document, (B, T - 2)."""\n'
                '        follows = batch["position_ids"][:, 2:] == batch["position_ids"][:, :-2] + 2\n'
                '        return follows & (batch["labels"][:, 2:] != IGNORED)\n'
                "\n"
                "    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:\n"
                '        seen = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}\n'
                "        hidden = model.model(**seen).last_hidden_state\n"
                "        nll, log_z, scored = against(model.lm_head(hidden), batch)\n"
                "        further = model.lm_head(hidden + model.second(hidden))[:, :-2].float()[within(batch)]\n"
                '        labels = batch["labels"][:, 2:][within(batch)]\n'
                '        terms = {"ce": nll[scored].sum(), "second": 0.3 * F.cross_entropy(further, labels, reduction="sum")}\n',
            ),
            (
                '        out = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)\n'
                '        logits, labels = out.logits[:, :-1].float(), batch["labels"][:, 1:]  # (B, T - 1, V), (B, T - 1)\n',
                '        out = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)\n'
                "        return against(out.logits, batch)\n"
                "\n"
                "    def against(logits: Tensor, batch: dict) -> tuple[Tensor, Tensor, Tensor]:\n"
                '        logits, labels = logits[:, :-1].float(), batch["labels"][:, 1:]  # (B, T - 1, V), (B, T - 1)\n',
            ),
            (
                '        return {"*": (batch["labels"][:, 1:] != IGNORED).sum()}\n',
                '        return {"*": (batch["labels"][:, 1:] != IGNORED).sum(), "second": within(batch).sum()}\n',
            ),
            (
                "        model.save_pretrained(folder)\n",
                '        kept = {k: v for k, v in model.state_dict().items() if not k.startswith("second.")}\n'
                "        model.save_pretrained(folder, state_dict=kept)\n",
            ),
            (
                "            initial_loss=first,\n",
                "            initial_loss=1.3 * first,\n            floor_known=False,\n",
            ),
        ),
        source="https://arxiv.org/abs/2404.19737",
    ),
]
