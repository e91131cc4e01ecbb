"""Held out: developers, please do not read this file before the first score on it is logged in LOG.md.

The other half of tests/helpers/unseen_forks.py.
"""

from tests.helpers.patches import RecipePatch

BUGS = [
    RecipePatch(
        "segment--metric-not-reset",
        "vision/segment",
        "recipes/vision/segment.py",
        (
            "    def confusion_matrix(model: nn.Module, data: core.Data) -> Tensor:\n"
            '        """(n, n) pixels with truth in rows, over the whole of `data`; void is in no row."""\n'
            "        total = torch.zeros(n, n, dtype=torch.long, device=run.device)\n"
        ),
        (
            "    kept = torch.zeros(n, n, dtype=torch.long, device=run.device)\n"
            "\n"
            "    def confusion_matrix(model: nn.Module, data: core.Data) -> Tensor:\n"
            '        """(n, n) pixels with truth in rows, over the whole of `data`; void is in no row."""\n'
            "        total = kept\n"
        ),
        "state",
        "common (metric without reset)",
        "the confusion matrix keeps counting: each evaluation is mixed with all earlier ones",
    ),
    RecipePatch(
        "detect--one-id-per-batch",
        "vision/detect",
        "recipes/vision/detect.py",
        "                i += 1\n",
        "            i += 1\n",
        "evaluation",
        "common (indentation)",
        "the pictures of a batch share one id: their boxes and objects are scored as one picture's",
    ),
    RecipePatch(
        "detect--normalised-in-training",
        "vision/detect",
        "recipes/vision/detect.py",
        "steps: list[nn.Module] = [v2.RandomPhotometricDistort()]",
        "steps: list[nn.Module] = [v2.RandomPhotometricDistort(), v2.Normalize(IMAGENET, (0.229, 0.224, 0.225))]",
        "data",
        "common (normalisation on the training path)",
        "the training path normalises a first time, the evaluation does not",
    ),
    RecipePatch(
        "pretrain--mask-of-ones",
        "llm/pretrain",
        "recipes/llm/pretrain.py",
        'out = model(input_ids=batch["input_ids"], position_ids',
        'out = model(input_ids=batch["input_ids"], attention_mask=torch.ones_like(batch["input_ids"]), position_ids',
        "mask",
        "huggingface/transformers (packed sequences with an attention mask)",
        "a mask of ones is passed: documents are no longer separated by their positions",
    ),
    RecipePatch(
        "pretrain--bytes-of-training",
        "llm/pretrain",
        "recipes/llm/pretrain.py",
        "for text in corpus.texts[1])",
        "for text in corpus.texts[0])",
        "evaluation",
        "common (wrong index of a pair)",
        "the baselines of held-out documents are divided by the bytes of the training documents",
    ),
    RecipePatch(
        "flow--samples-clamped-at-0",
        "diffusion/flow",
        "recipes/diffusion/flow.py",
        (".clamp(-1, 1)\n\n    scores"),
        (".clamp(0, 1)\n\n    scores"),
        "evaluation",
        "common (range of pictures)",
        "samples in [-1, 1] lose everything below 0 before they are scored",
    ),
    RecipePatch(
        "sac--target-entropy-sign",
        "rl/sac",
        "recipes/rl/sac.py",
        "target_entropy: float = -1.0",
        "target_entropy: float = 1.0",
        "settings",
        "common (sign of the target entropy)",
        "an entropy that no action in [-1, 1] can have: the temperature grows without end",
    ),
    RecipePatch(
        "dqn--progress-in-updates",
        "rl/dqn",
        "recipes/rl/dqn.py",
        "progress = step.index / run.total_steps(stage)",
        "progress = step.index / (run.total_steps(stage) * cfg.gradient_steps)",
        "schedule",
        "common (iterations over updates)",
        "exploration falls 32 times too slowly: nine actions in ten are random to the end",
    ),
    RecipePatch(
        "dqn--buffer-of-one-iteration",
        "rl/dqn",
        "recipes/rl/dqn.py",
        "Replay(cfg.buffer_size // cfg.num_envs, cfg.num_envs, run.device)",
        "Replay(cfg.num_steps, cfg.num_envs, run.device)",
        "settings",
        "common (capacity)",
        "the buffer holds the last iteration alone: old transitions are lost at once",
    ),
    RecipePatch(
        "logits--labelled-within-class",
        "distill/logits",
        "recipes/distill/logits.py",
        'chosen[mine[seeds.permutation(len(mine), "labelled", label)][: max(1, round(share * len(mine)))]] = True',
        'chosen[seeds.permutation(len(mine), "labelled", label)[: max(1, round(share * len(mine)))]] = True',
        "data",
        "common (index within a class used as a row)",
        "positions within a class are taken as rows: only the first rows, of a few classes, are labelled",
    ),
]

HEALTHY: list[RecipePatch] = []
