"""A second set of recipe bugs that nobody designed a check for, as a colleague plants them when forking; the open half.

The half is the first byte of the id's SHA-256, modulo 2. The other half is held out in unseen_forks_heldout.py.
"""

from tests.helpers.patches import RecipePatch

BUGS = [
    RecipePatch(
        "segment--dice-axis",
        "vision/segment",
        "recipes/vision/segment.py",
        "cfg.dice * dice(logits.softmax(1), mask)",
        "cfg.dice * dice(logits.softmax(2), mask)",
        "loss",
        "common (wrong axis)",
        "the Dice term's probabilities sum to 1 over the rows of the picture instead of over the classes",
    ),
    RecipePatch(
        "sft--rate-of-whole-model",
        "llm/sft",
        "recipes/llm/sft.py",
        "optim=Optim(lr=1e-3, warmup=0.05, weight_decay=0.0)",
        "optim=Optim(lr=1e-5, warmup=0.05, weight_decay=0.0)",
        "settings",
        "common (rate of full fine-tuning for LoRA)",
        "the adapters train at the rate of a whole model, a hundredth of theirs",
    ),
    RecipePatch(
        "flow--uniform-logits",
        "diffusion/flow",
        "recipes/diffusion/flow.py",
        "self.process.noise.logit_std * torch.randn((), generator=generator)",
        "self.process.noise.logit_std * torch.rand((), generator=generator)",
        "data",
        "common (rand for randn)",
        "noise levels come from 0.5 to 0.73 alone: the ends of the line are never trained",
    ),
    RecipePatch(
        "pixel--clip-sample",
        "diffusion/pixel",
        "recipes/diffusion/models/noise.py",
        "DDIMScheduler.from_config(self.scheduler.config, clip_sample=False)",
        "DDIMScheduler.from_config(self.scheduler.config)",
        "sampler",
        "huggingface/diffusers (default of clip_sample)",
        "the sampler clips the picture and keeps the noise of the unclipped one: guided samples are spoilt",
    ),
    RecipePatch(
        "sac--target-once-an-iteration",
        "rl/sac",
        "recipes/rl/sac.py",
        "            target.follow(policy, cfg.tau)\n",
        "        target.follow(policy, cfg.tau)\n",
        "schedule",
        "common (indentation)",
        "the targets follow once per iteration of 32 updates: they lag by thousands of updates",
    ),
    RecipePatch(
        "instruct--language-left-out",
        "vlm/instruct",
        "recipes/vlm/instruct.py",
        'rates = {"projector": cfg.optim.lr, "language": cfg.language_lr}',
        'rates = {"projector": cfg.optim.lr}',
        "model",
        "common (parameter groups)",
        "stage two trains the projector alone: the language model stays frozen",
    ),
]

HEALTHY: list[RecipePatch] = []
