"""Forks and settings that are wrong, and healthy variants, from outside: the held-out half of the seventeenth set.

Nothing is developed on it. The other half is in seventeenth_set.py. The author of the set had read the recipes, not the gates. Run by
`python -m tests.helpers.set_run --set seventeenth --half heldout`.
"""

import io
import json
import tarfile
from pathlib import Path

import torch
from PIL import Image

from tests.helpers.set_cases import Case, coco, digits, distinct, lines, preferences


def boxes_as_corners(folder: Path) -> tuple[str, ...]:
    from trainworthy.recipes.vision.data import boxes

    found = boxes.load(boxes.Source(path="digits", scenes=600))
    coco(folder, "train", found.learn, found, ids=list(range(1, 11)), corners=True)
    coco(folder, "val", found.held_out[:100], found, ids=list(range(1, 11)), corners=True)
    return ("--data.path", str(folder))


def bert_as_it_is(folder: Path) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
    rest = {"max_position_embeddings": 128, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 2048, **sizes, **rest}
    (folder / "config.json").write_text(json.dumps(config))
    return ("--model", str(folder))


def prompt_in_answers(folder: Path) -> tuple[str, ...]:
    rows = [{"prompt": row["prompt"], **{k: f"{row['prompt']} {row[k]}" for k in ("chosen", "rejected")}}
            for row in distinct(preferences(600))]  # fmt: skip
    lines(folder / "pairs.jsonl", rows)
    return ("--data.path", str(folder / "pairs.jsonl"))


def shards(folder: Path) -> tuple[str, ...]:
    """Digits as WebDataset packs them, 500 to a file, in a random order: KEY.png with KEY.json."""
    images, labels = digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))[:4000].tolist()
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(8):
        name = f"train-{n:04}.tar" if n < 6 else f"val-{n - 6:04}.tar"
        with tarfile.open(folder / name, "w") as shard:
            for i in order[n * 500 : (n + 1) * 500]:
                stream = io.BytesIO()
                Image.fromarray(images[i].numpy()).save(stream, "PNG")
                text = json.dumps({"label": int(labels[i])}).encode()
                for end, content in (("png", stream.getvalue()), ("json", text)):
                    member = tarfile.TarInfo(f"{i:06}.{end}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))
    return ("--data.path", str(folder))


def small_olmo(folder: Path) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "vocab_size": 2048, **sizes}
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4, "max_position_embeddings": 256}))
    return ("--model", str(folder))


BUGS = [
    Case(
        "classify~tokens-by-view",
        "vision/classify",
        "model",
        "the map as tokens, as for attention pooling later",
        "a view instead of a transpose: a token holds places of some channels, not the channels of one place",
        "by argument: the mean over such tokens mixes sixteen channels that have nothing in common",
        edits=(
            (
                "return self.head(x.mean((2, 3)))",
                "return self.head(x.flatten(1).unflatten(1, (-1, x.shape[1])).mean(1))",
            ),
        ),
    ),
    Case(
        "segment~unfolded-by-view",
        "vision/segment",
        "model",
        "the output unfolded without a special function",
        "a view is not pixel_shuffle: the four channels of a class are put below one another instead of between one another",
        "by argument: a pixel's answer is taken from another place of the picture, a convolution cannot learn that",
        edits=(
            (
                "return F.pixel_shuffle(self.head(x), self.fold)",
                "return self.head(x).flatten(1).unflatten(1, (-1, *images.shape[-2:]))",
            ),
        ),
        argv=(
            "--fold",
            "2",
        ),
    ),
    Case(
        "detect~own-boxes-by-corners",
        "vision/detect",
        "own data",
        "own pictures; the boxes were written as the labelling tool had them",
        "boxes are [x0, y0, x1, y1], COCO's are [x, y, width, height]: each reaches from its object far to the right and down",
        "by argument: boxes are several times too large, what is learnt are not the objects",
        argv=(
            "--train.epochs",
            "4",
        ),
        data=boxes_as_corners,
    ),
    Case(
        "detect~thin-boxes-sanitised",
        "vision/detect",
        "augmentation",
        "degenerate boxes dropped, with the number of another project",
        "min_size=20 is a large part of the digits here: they remain in the picture and are background",
        "by argument: narrow and small digits are taught to be nothing, in the evaluation they count",
        edits=(
            (
                "v2.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[2])",
                "v2.SanitizeBoundingBoxes(min_size=20, labels_getter=lambda sample: sample[2])",
            ),
        ),
    ),
    Case(
        "pretrain~own-bert-unchanged",
        "llm/pretrain",
        "own model",
        "an encoder's config.json as the architecture",
        "without is_decoder BERT's attention goes both ways: each token sees the one that it predicts",
        "by argument: the loss falls to nearly nothing and the model cannot write",
        argv=("--data.no-packing",),
        data=bert_as_it_is,
    ),
    Case(
        "pretrain~context-scored-twice",
        "llm/pretrain",
        "metric",
        "labels of the evaluation made as for training: all but the first token",
        "windows of a long document overlap: the tokens that are there as context are scored a second time, with hardly any context",
        "by argument: bits per byte are too many, tokens with little context count double",
        edits=(
            (
                "# ---------------------------------------------------------------------------------------------------------------- model\n",
                "class Rows(Packed):\n"
                '    """Rows in which all tokens but the first of each window are scored."""\n'
                "\n"
                "    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor | str]:\n"
                "        sample = super().get(index, generator)\n"
                "        used = sum(self.windows[i].end - self.windows[i].start for i in self.rows[index])\n"
                '        labels = sample["input_ids"].masked_fill(sample["position_ids"] == 0, IGNORED)\n'
                "        labels[used:] = IGNORED\n"
                "        size = torch.tensor(int(self.sizes[labels[labels != IGNORED].numpy()].sum()))\n"
                '        return {**sample, "labels": labels, "bytes": size}\n'
                "\n"
                "\n"
                "# ---------------------------------------------------------------------------------------------------------------- model\n",
            ),
            (
                "    val_data = Packed(corpus.val",
                "    val_data = Rows(corpus.val",
            ),
        ),
    ),
    Case(
        "sft~answer-without-its-first-token",
        "llm/sft",
        "metric",
        "a begin token taken off each generated answer",
        "the tokenizer has no such token: the first token of every answer is lost before it is scored",
        "by argument: token F1 falls by the share of first words; most names here have two or three",
        edits=(
            (
                "return [(chat.reply(tokenizer.decode(ids)), ended)",
                "return [(chat.reply(tokenizer.decode(ids[1:])), ended)",
            ),
        ),
    ),
    Case(
        "dpo~own-prompt-in-both-answers",
        "llm/dpo",
        "own data",
        "a file whose chosen and rejected are whole texts, with a column for the prompt",
        "the prompt is asked and then stands at the beginning of both answers again",
        "by argument: the model is asked to repeat its prompt first; the repeated part is half of each answer and prefers nothing",
        argv=(
            "--train.epochs",
            "1",
        ),
        data=prompt_in_answers,
    ),
    Case(
        "reward~all-weights-at-the-adapters-rate",
        "llm/reward",
        "setting",
        "no adapters: all weights are trained",
        "2e-3 is the rate of adapters; it is a hundred times too high for pretrained weights",
        "by argument: what was pretrained is destroyed in the first steps of the warm-up",
        argv=(
            "--lora-rank",
            "0",
        ),
    ),
    Case(
        "reward~prompt-cut-off",
        "llm/reward",
        "data",
        "the answers alone, as for a classifier of style, to make rows shorter",
        "the model never sees what was asked, and the same answers are right for one prompt and wrong for another",
        "by argument: the pairs are two answers of one module; without the prompt there is little to prefer",
        edits=(
            (
                "def read(cfg: Config, chat: pairs.Chat)",
                "class Answers(preferences.Whole):\n"
                '    """Answers without their prompts."""\n'
                "\n"
                "    def row(self, sample: dict[str, str]) -> dict[str, list[int]]:\n"
                "        row = super().row(sample)\n"
                '        n = row.pop("prompt_length")[0]\n'
                '        return {k: v[n:] for k, v in row.items()} | {"prompt_length": [0]}\n'
                "\n"
                "\n"
                "def read(cfg: Config, chat: pairs.Chat)",
            ),
            (
                "data[name] = preferences.Whole(kept, chat)",
                "data[name] = Answers(kept, chat)",
            ),
        ),
    ),
    Case(
        "ppo~ratio-clipped-around-zero",
        "rl/ppo",
        "loss",
        "the clipping written as for the value below it",
        "a ratio is near 1, not near 0: the clipped gain is a fifth of the advantage, and good actions have no gradient",
        "by argument: for a positive advantage the minimum is always the constant; only bad actions teach",
        edits=(
            (
                "ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range)",
                "ratio.clamp(-cfg.clip_range, cfg.clip_range)",
            ),
        ),
    ),
    Case(
        "compress~sound-of-the-teacher-for-both",
        "distill/compress",
        "model",
        "the sound encoded once for both, as for a frozen encoder",
        "the student has an encoder of its own: it is never trained, and its decoder learns to read the teacher's",
        "by argument: in the evaluation the decoder gets two layers' features instead of four layers'",
        edits=(
            (
                'own.logits(own.encode(batch["mel"]) if cfg.encoder else heard, ids[:, :-1])',
                "own.logits(heard, ids[:, :-1])",
            ),
        ),
    ),
]

HEALTHY = [
    Case(
        "classify~perspective-and-blur",
        "vision/classify",
        "augmentation",
        "more augmentation of the digits: perspective and a little blur",
        "torchvision's transforms on the training path, before the affine one",
        "by argument: a distorted digit is read by people",
        edits=(
            (
                "        return None, v2.RandomAffine(12, translate",
                "        return None, v2.Compose([v2.RandomPerspective(0.2), v2.GaussianBlur(3, (0.1, 0.8)), v2.RandomAffine(12, translate",
            ),
            (
                "interpolation=v2.InterpolationMode.BILINEAR)  # fmt: skip\n    fit = (hub_nets",
                "interpolation=v2.InterpolationMode.BILINEAR)])  # fmt: skip\n    fit = (hub_nets",
            ),
        ),
    ),
    Case(
        "classify~regnet-from-scratch",
        "vision/classify",
        "model",
        "a RegNet of torchvision from scratch, at 32 pixels, without mirroring",
        "settings of the recipe",
        "by argument: a residual net with batch norm on a batch of 64",
        argv=(
            "--model",
            "regnet_y_400mf",
            "--image-size",
            "32",
            "--no-augment",
        ),
    ),
    Case(
        "classify~own-webdataset",
        "vision/classify",
        "own data",
        "digits in tar files, as WebDataset packs them",
        "a format that the documentation names; classes in random order",
        "by argument: 3,000 digits to learn from, 1,000 held out",
        data=shards,
    ),
    Case(
        "pretrain~own-olmo",
        "llm/pretrain",
        "own model",
        "an OLMo 2 by its config.json",
        "norms behind the blocks and on queries and keys; a causal model with rotary positions",
        "by argument: about as large as the recipe's Llama",
        data=small_olmo,
    ),
    Case(
        "ppo~recurrent",
        "rl/ppo",
        "setting",
        "a recurrent policy on CartPole",
        "a setting of the recipe; minibatches hold whole rollouts",
        "by argument: the observation is sufficient already, the memory does not harm",
        argv=(
            "--rnn-hidden-size",
            "32",
        ),
    ),
    Case(
        "dqn~acrobot-three-steps",
        "rl/dqn",
        "setting",
        "another environment of gymnasium, with three-step returns",
        "settings of the recipe",
        "by argument: Acrobot is learnt by DQN in some tens of thousands of steps",
        argv=(
            "--env",
            "Acrobot-v1",
            "--n-step",
            "3",
        ),
    ),
    Case(
        "logits~teacher-of-two-views",
        "distill/logits",
        "loss",
        "the teacher's answer averaged over the picture and the picture moved by one pixel",
        "a teacher of two views is at least as good as one of one",
        "by argument: test-time augmentation of the teacher",
        edits=(
            (
                "        return soft(answers(images))\n",
                "        return soft((answers(images) + answers(images.roll(1, -1))) / 2)\n",
            ),
        ),
    ),
    Case(
        "instruct~adapters",
        "vlm/instruct",
        "setting",
        "adapters on the language model instead of all its weights",
        "a setting of the recipe, at a rate for adapters",
        "by argument: rank 32 is half of the small model's width or more",
        argv=(
            "--lora-rank",
            "32",
            "--language-lr",
            "2e-3",
        ),
    ),
]
