"""Forks and settings that are wrong, and healthy variants, from outside: the open half of the eighteenth set.

The half is the last hex digit of the id's SHA-256, modulo 2: even here. The other half is held out in eighteenth_set_heldout.py. The author
of the set had read the recipes, not the gates. Run by `python -m tests.helpers.set_run --set eighteenth`.
"""

import json
from collections import Counter
from pathlib import Path

import torch

from tests.helpers.set_cases import Case, lines, mask_folders, rows_of_docstrings, scenes


def void_outlines(folder: Path) -> tuple[str, ...]:
    pictures, masks = scenes(500)
    outlined = []
    for mask in masks:
        m = mask.long()
        edge = torch.zeros_like(m, dtype=torch.bool)
        edge[1:] |= m[1:] != m[:-1]
        edge[:, 1:] |= m[:, 1:] != m[:, :-1]
        outlined.append(m.masked_fill(edge, 255).to(torch.uint8))
    mask_folders(folder, pictures, outlined)
    return ("--data.path", str(folder))


def packages(folder: Path) -> tuple[str, ...]:
    rows = rows_of_docstrings(100_000)
    first = [row["source"].split(".")[0] for row in rows]
    common = [name for name, _ in Counter(first).most_common(6)]
    chosen = [{"prompt": f"Which package has a function for this? {row['prompt']}", "completion": name}
              for row, name in zip(rows, first, strict=True) if name in common]  # fmt: skip
    lines(folder / "packages.jsonl", chosen[:1600])
    return ("--data.path", str(folder / "packages.jsonl"))


def brief_reward(folder: Path) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(
        "def brief(prompts, completions, answer, **_):\n    return [float(len(text.strip()) <= 4) for text in completions]\n"
    )
    return ("--reward", f"exact=1,{folder / 'rewards.py'}:brief=0.1")


def stablelm(folder: Path) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config = {"model_type": "stablelm", "architectures": ["StableLmForCausalLM"], "vocab_size": 2048, **sizes}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256, "use_qkv_bias": True}))
    return ("--model", str(folder))


BUGS = [
    Case(
        "segment~features-tiled",
        "vision/segment",
        "model",
        "the map doubled by repeat instead of interpolate",
        "torch's repeat is numpy's tile: four copies of the whole map side by side, not every pixel four times",
        "by argument: what the coarse levels see reaches wrong places",
        edits=(
            (
                "F.interpolate(x, scale_factor=2.0)",
                "x.repeat(1, 1, 2, 2)",
            ),
        ),
    ),
    Case(
        "pretrain~shifted-twice",
        "llm/pretrain",
        "labels",
        "targets as in nanoGPT, y = x[1:]",
        "the labels are shifted once more below: each token predicts the next but one",
        "by argument: the exported model skips every other token; the perplexity is that of a harder question",
        edits=(
            (
                '        logits, labels = out.logits[:, :-1].float(), batch["labels"][:, 1:]',
                '        targets = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)\n'
                "        logits, labels = out.logits[:, :-1].float(), targets[:, 1:]",
            ),
        ),
    ),
    Case(
        "dpo~margin-without-the-reference",
        "llm/dpo",
        "metric",
        "the margin of the policy is what users see",
        "without the reference: the printed accuracy is the likelihood's, which the untrained model has, too",
        "by argument: the accuracy counts what the pretrained model preferred already",
        edits=(
            (
                "        margin = (chosen - ref_chosen) - (rejected - ref_rejected)\n",
                "        margin = chosen - rejected\n",
            ),
        ),
    ),
    Case(
        "dpo~rejected-without-its-end",
        "llm/dpo",
        "data",
        "rejected answers came from samples with a length limit",
        "they have no end token, all chosen ones have: the end alone tells the two sides from each other",
        "by argument: the margin grows by making ends likelier, not by the answer's content",
        edits=(
            (
                "# ----------------------------------------------------------------------------------------------------------------- data\n",
                "# ----------------------------------------------------------------------------------------------------------------- data\n"
                "class Sampled(preferences.Preferences):\n"
                '    """Rejected answers as they were sampled."""\n'
                "\n"
                "    def row(self, sample: dict[str, str]) -> dict[str, list[int]]:\n"
                "        row = super().row(sample)\n"
                '        return {**row, "rejected_ids": row["rejected_ids"][:-1]}\n'
                "\n"
                "\n",
            ),
            (
                "data[name] = preferences.Preferences(kept, chat)",
                "data[name] = Sampled(kept, chat)",
            ),
        ),
    ),
    Case(
        "reward~adapters-alone-trained",
        "llm/reward",
        "optimiser",
        "loralib's mark_only_lora_as_trainable",
        "the new head is frozen at zero: every answer has the same reward",
        "by argument: no gradient passes a head of zeros",
        edits=(
            (
                '    model = loading.adapted(loading.attend(model, cfg.attention, run.device), cfg, head="score")\n',
                '    model = loading.adapted(loading.attend(model, cfg.attention, run.device), cfg, head="score")\n'
                "    for name, p in model.named_parameters():\n"
                '        p.requires_grad_("lora_" in name)\n',
            ),
        ),
    ),
    Case(
        "sac~target-follows-once-an-iteration",
        "rl/sac",
        "loop",
        "the target moved after the updates, one level further left",
        "once in 32 updates by a hundredth: after 200 iterations the target is a mixture with its initial weights",
        "by argument: 0.99^200 = 0.13, and the values of 100 iterations ago in between",
        edits=(
            (
                "            run.update(stage, run.micro_batches(minibatch))\n            target.follow(policy, cfg.tau)\n",
                "            run.update(stage, run.micro_batches(minibatch))\n        target.follow(policy, cfg.tau)\n",
            ),
        ),
    ),
    Case(
        "grpo~samples-run-past-their-line",
        "rl/grpo",
        "sampling",
        "a line that seemed to be undone a few lines below",
        "training answers do not end with their line: they go on with further sums, whose last number is scored",
        "by argument: the right answer is followed by other numbers, and earns nothing",
        edits=(
            (
                "    model.generation_config.eos_token_id = asker.ends  # the trainer ends answers where the model declares their end\n",
                "",
            ),
        ),
    ),
    Case(
        "text~decoded-unscaled",
        "diffusion/text",
        "sampling",
        "the decoder called as in a tutorial",
        "latents are not divided by the scaling factor before they are decoded",
        "by argument: the evaluated pictures are not those of the exported pipeline; the printed agreement is wrong",
        edits=(
            (
                "return pipeline.decode(vae, pipeline.sample(model, process.sampler(sampler), captions, noise, **how)).clamp(",
                "return vae.decode(pipeline.sample(model, process.sampler(sampler), captions, noise, **how)).sample.clamp(",
            ),
        ),
    ),
    Case(
        "flow~square-of-the-mean",
        "diffusion/flow",
        "loss",
        "mean and square in the other order",
        "the square of a picture's mean error: only its mean brightness is trained",
        "by argument: any pattern of zero mean costs nothing",
        edits=(
            (
                "error = (prediction - target).square().mean((1, 2, 3))",
                "error = (prediction - target).mean((1, 2, 3)).square()",
            ),
        ),
    ),
    Case(
        "logits~teacher-in-order-of-names",
        "distill/logits",
        "labels",
        "a teacher whose classes are the folders zero, one, two, ... in alphabetical order",
        "its outputs are taken as they come: eight, five, four, ... stand where 0, 1, 2, ... are expected",
        "by argument: the teacher contradicts nine of ten labels",
        edits=(
            (
                "        return teacher.logits(images * 2 - 1)\n",
                "        return teacher.logits(images * 2 - 1)[:, [8, 5, 4, 9, 1, 7, 6, 3, 2, 0]]\n",
            ),
        ),
    ),
]
HEALTHY = [
    Case(
        "segment~hardest-third",
        "vision/segment",
        "loss",
        "online hard example mining: the cross-entropy of each window's hardest third of pixels",
        "the mean over those pixels; the Dice loss sees all",
        "by argument: DeepLab's bootstrapped loss",
        edits=(
            (
                '        terms = {"ce": (ce * (1 - (-ce).exp()) ** cfg.focal if cfg.focal else ce).sum()}\n',
                '        terms = {"ce": 3 * ce.flatten(1).topk(ce[0].numel() // 3).values.sum()}\n',
            ),
        ),
    ),
    Case(
        "segment~own-void-outlines",
        "vision/segment",
        "own data",
        "own masks whose outlines are void, as in Pascal VOC",
        "255 where two classes meet; nobody scores it",
        "by argument: the inside of every digit is labelled",
        data=void_outlines,
    ),
    Case(
        "pretrain~own-stablelm",
        "llm/pretrain",
        "own model",
        "a StableLM by its config.json",
        "LayerNorm, biases of queries, rotary positions on a quarter of the channels; a causal model",
        "by argument: about as large as the recipe's Llama",
        data=stablelm,
    ),
    Case(
        "sft~own-labels-of-six-kinds",
        "llm/sft",
        "own data",
        "a classification: six different answers, of unequal frequency",
        "prompts are all different, and name what decides the answer",
        "by argument: names of packages follow from words of the description",
        argv=(
            "--train.epochs",
            "1",
            "--metric",
            "exact",
        ),
        data=packages,
    ),
    Case(
        "dpo~apo-zero",
        "llm/dpo",
        "setting",
        "APO-zero with a smaller beta",
        "settings of the recipe",
        "by argument: D'Oosterlinck 2024",
        argv=(
            "--loss",
            "apo_zero",
            "--beta",
            "0.05",
        ),
    ),
    Case(
        "ppo~penalty-on-kl",
        "rl/ppo",
        "loss",
        "the other PPO of the paper: a penalty on the divergence instead of clipping",
        "the estimate has the old policy's samples and its expectation",
        "by argument: Schulman 2017, section 4, with a fixed coefficient",
        edits=(
            (
                '        ratio = (policy.head.log_prob(outputs, batch["action"]) - batch["log_prob"]).exp()\n',
                '        log_ratio = policy.head.log_prob(outputs, batch["action"]) - batch["log_prob"]\n        ratio = log_ratio.exp()\n',
            ),
            (
                "        gain = torch.min(\n"
                '            ratio * batch["advantage"], ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range) * batch["advantage"]\n'
                "        )\n",
                '        gain = ratio * batch["advantage"] - 3.0 * (ratio - 1 - log_ratio)\n',
            ),
        ),
    ),
    Case(
        "sac~dropout-critics",
        "rl/sac",
        "architecture",
        "DroQ: critics with a little dropout and layer norm",
        "norms without weights, so that the policy's loss trains nothing of the critics",
        "by argument: Hiraoka 2022",
        edits=(
            (
                "# ---------------------------------------------------------------------------------------------------------------- stage\n",
                "def critic(*sizes: int) -> Layers:\n"
                '    """An `mlp` with dropout and layer norm before each activation."""\n'
                "    layers: list[nn.Module] = []\n"
                "    for layer in mlp(*sizes, activation=nn.ReLU):\n"
                "        if isinstance(layer, nn.ReLU):\n"
                "            layers += [nn.Dropout(0.01), nn.LayerNorm(layers[-1].out_features, elementwise_affine=False)]\n"
                "        layers.append(layer)\n"
                "    return Layers(*layers)\n"
                "\n"
                "\n"
                "# ---------------------------------------------------------------------------------------------------------------- stage\n",
            ),
            (
                "Side(mlp(n_obs + n_act, *widths, 1, activation=nn.ReLU) for _ in range(2))",
                "Side(critic(n_obs + n_act, *widths, 1) for _ in range(2))",
            ),
            (
                "import Running, Side, built_again, mlp",
                "import Layers, Running, Side, built_again, mlp",
            ),
        ),
    ),
    Case(
        "grpo~own-reward-for-brevity",
        "rl/grpo",
        "reward",
        "a small own reward for short answers beside the exact one",
        "no sum has more than three digits: a right answer can earn both",
        "by argument: a tenth of the exact reward",
        data=brief_reward,
    ),
]
