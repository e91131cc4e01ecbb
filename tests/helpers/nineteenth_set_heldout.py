"""Forks and settings that are wrong, and healthy variants, from outside: the half of the nineteenth set that is held out.

The half is the last hex digit of the id's SHA-256, modulo 2: odd here; the other is in nineteenth_set.py. Run by
`python -m tests.helpers.set_run --set nineteenth --half heldout`.
"""

import json
from pathlib import Path

import torch
from torch.nn import functional as F
from trainworthy.recipes.vision.data import boxes
from trainworthy.recipes.vlm.data.scenes import NAMES, Scenes

from tests.helpers.set_cases import (
    Case,
    coco,
    digits,
    distinct,
    lines,
    mask_folders,
    picture,
    preferences,
    rows_of_docstrings,
    scenes,
)


def missing_picture(folder: Path) -> tuple[str, ...]:
    images, labels = digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(29)).tolist()
    names, pictures = order[:2400], [i for k, i in enumerate(order[:2400]) if k != 900]  # one file could not be opened
    for k, i in enumerate(pictures):
        picture(images[i], folder / "train" / str(int(labels[names[k]])) / f"{k:05}.png")
    for k, i in enumerate(order[2400:3000]):
        picture(images[i], folder / "val" / str(int(labels[i])) / f"{k:05}.png")
    return ("--data.path", str(folder))


def smoothed_masks(folder: Path) -> tuple[str, ...]:
    pictures, masks = scenes(500)
    larger = {"scale_factor": 1.5, "mode": "bilinear", "align_corners": False}
    pictures = [F.interpolate(p[None].float(), **larger)[0].round().to(torch.uint8) for p in pictures]
    masks = [
        F.interpolate(m.where(m != 255, 0)[None, None].float(), **larger)[0, 0].round().to(torch.uint8) for m in masks
    ]
    mask_folders(folder, pictures, masks)
    return ("--data.path", str(folder))


def older_ids(folder: Path) -> tuple[str, ...]:
    found = boxes.load(boxes.Source(scenes=600))
    for split, rows in (("train", found.learn[:600]), ("val", found.held_out[:150])):
        coco(folder, split, list(rows), found, ids=list(range(1, 11)))
    file = folder / "val.json"
    val = json.loads(file.read_text())
    val["annotations"] = [{**a, "category_id": (a["category_id"] + 2) % 10 + 1} for a in val["annotations"]]
    file.write_text(json.dumps(val))
    return ("--data.path", str(folder))


def keep_probabilities(folder: Path) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"vocab_size": 2048, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    (folder / "config.json").write_text(json.dumps(config | {"embd_pdrop": 0.9, "attn_pdrop": 0.9, "resid_pdrop": 0.9}))
    return ("--model", str(folder))


def prompts_in_answers(folder: Path) -> tuple[str, ...]:
    rows = [{"prompt": row["prompt"], **{k: f"{row['prompt']}\n\n{row[k]}" for k in ("chosen", "rejected")}}
            for row in distinct(preferences(2500))]  # fmt: skip
    lines(folder / "preferences.jsonl", rows)
    return ("--data.path", str(folder / "preferences.jsonl"))


def first_choice(folder: Path) -> tuple[str, ...]:
    for split, n in (("train", 900), ("val", 150)):
        shown, rows = Scenes(split, n), []
        for i in range(len(shown)):
            picture(shown.image(i), folder / split / f"{i:05}.png")
            right = shown.questions(i)[1].answer
            wrong = [name for name in NAMES if name != right][i % (len(NAMES) - 1)]
            rows.append(
                {"image": f"{split}/{i:05}.png", "question": f"left colour ? one {right} two {wrong}", "answer": "one"}
            )
        lines(folder / f"{split}.jsonl", rows)
    return ("--data.path", str(folder))


def gpt_neox(folder: Path) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], **sizes}
    (folder / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 256, "use_parallel_residual": True})
    )
    return ("--model", str(folder))


def alpaca(folder: Path) -> tuple[str, ...]:
    rows = [{"instruction": "Name the Python function that does this.", "input": row["prompt"], "output": row["completion"]}
            for row in rows_of_docstrings(1600)]  # fmt: skip
    lines(folder / "alpaca.jsonl", rows)
    return ("--data.path", str(folder / "alpaca.jsonl"))


def swapped_votes(folder: Path) -> tuple[str, ...]:
    rows = [{k: row[k] for k in ("prompt", "chosen", "rejected")} for row in distinct(preferences(2500))]
    for row in rows[::12]:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    lines(folder / "votes.jsonl", rows)
    return ("--data.path", str(folder / "votes.jsonl"))


def nearness_reward(folder: Path) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(
        "import re\n\n\n"
        "def near(prompts, completions, answer, **_):\n"
        "    last = [(re.findall(r'\\d+', text) or ['0'])[-1] for text in completions]\n"
        "    return [1 / (1 + abs(int(n) - int(due)) / 5) for n, due in zip(last, answer)]\n"
    )
    return ("--reward", f"exact=1,{folder / 'rewards.py'}:near=0.3")


GLIDER = """class Glider(gymnasium.Env):
    \"\"\"A glider on a line is to hover over a beacon; thrust left, none or right. The cost is its distance.\"\"\"

    observation_space = Box(-numpy.inf, numpy.inf, (2,), numpy.float32)
    action_space = Discrete(3)
    thrust = {"0": -1.0, "1": 0.0, "2": 1.0}  # as in the settings file

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.speed = self.np_random.uniform(-1, 1, 2)
        return self.seen(), {}

    def seen(self):
        return numpy.array([self.place, self.speed], numpy.float32)

    def step(self, action):
        self.speed = 0.95 * self.speed + 0.1 * self.thrust.get(action, 0.0)
        self.place += 0.1 * self.speed
        return self.seen(), -abs(float(self.place)), False, False, {}


gymnasium.register("Glider-v0", Glider, max_episode_steps=100)


"""


BUGS = [
    Case(
        "classify~own-one-picture-was-skipped",
        "vision/classify",
        "own data",
        "a list of labels is sorted into class folders by the order of the files that could be opened",
        "one picture could not be opened, its label stayed in the list: every later picture has its predecessor's label",
        "by argument: three in five training labels are of a random other picture, held-out labels are right: far below the 99% of clean labels",
        data=missing_picture,
    ),
    Case(
        "classify~raw-weights-exported",
        "vision/classify",
        "export",
        "the average is for the evaluation",
        "the report is about the average, the exported net is the raw one, which a constant rate leaves in motion",
        "by argument: the exported net has not the reported accuracy: at a constant rate of 3e-3 single weights swing around their average",
        edits=(("net, shape = ema.model if ema else model, tuple(", "net, shape = model, tuple("),),
        argv=("--ema", "0.999", "--optim.schedule", "constant"),
    ),
    Case(
        "segment~own-masks-were-smoothed",
        "vision/segment",
        "own data",
        "pictures and masks enlarged by the same call, with bilinear interpolation",
        "class numbers are averaged: the rim of an 8 is labelled as 7, 6, 5, ... 0, in training and validation",
        "by argument: rims are a large part of strokes three pixels wide; the net learns, and the IoU rewards, digits that are not there",
        data=smoothed_masks,
    ),
    Case(
        "detect~own-held-out-ids-of-an-older-list",
        "vision/detect",
        "own data",
        "the held-out pictures were annotated first, by an older list of categories; the list in the file is the new one",
        "their category ids mean other digits than those of the training file: every held-out label is wrong",
        "by argument: the reported mAP is near 0 for a detector that works, and the best checkpoint is the worst",
        data=older_ids,
        argv=("--train.epochs", "8"),
    ),
    Case(
        "pretrain~own-config-of-keep-probabilities",
        "llm/pretrain",
        "own model",
        "a GPT-2 whose sizes and dropout were taken from a TensorFlow script, where 0.9 is what is kept",
        "nine of ten activations are dropped at every place",
        "by argument: with a tenth of embeddings, attention and branches little more than the unigram is learnt",
        data=keep_probabilities,
    ),
    Case(
        "dpo~own-answers-begin-with-their-prompt",
        "llm/dpo",
        "own data",
        "answers as the sampling script logged them, and the prompts in a column of their own",
        "the log has the whole text: each answer repeats its prompt, and stands behind it once more",
        "by argument: the policy is trained to repeat the question, and never in the context in which it is used",
        data=prompts_in_answers,
        argv=("--train.epochs", "0.1"),
    ),
    Case(
        "pixel~dropped-to-class-zero",
        "diffusion/pixel",
        "condition",
        "a dropped class is 0",
        "0 is a digit: a tenth of all pictures teach that zeros look like anything, and the index that guidance uses is never trained",
        "by argument: guidance at a scale of 2 moves away from an untrained embedding, and half of what is labelled 0 in training is no 0",
        edits=(
            (
                "condition = torch.tensor(self.null) if hidden else label",
                "condition = torch.zeros_like(label) if hidden else label",
            ),
        ),
    ),
    Case(
        "text~exported-with-the-scheduler-of-training",
        "diffusion/text",
        "export",
        "the scheduler at hand",
        "a DDPM scheduler that clips the picture to [-1, 1] at every step: these are latents with a deviation of 1",
        "by argument: a user's pictures are not those that were scored; a third of all latent values is outside of that range",
        edits=(
            (
                "stable.save(folder, parts, ema.model if ema else model, process.sampler(), cfg.lora_rank)",
                "stable.save(folder, parts, ema.model if ema else model, process.scheduler, cfg.lora_rank)",
            ),
        ),
    ),
    Case(
        "ppo~own-thrust-by-a-string",
        "rl/ppo",
        "own environment",
        "an own environment whose table of thrusts came from a JSON file",
        "its keys are texts, actions are numbers: get() finds none and returns 0, so that no action has an effect",
        "by argument: the return is that of drifting, for any policy",
        edits=(
            (
                "import torch\nfrom gymnasium.spaces import Box, Discrete\n",
                "import gymnasium\nimport numpy\nimport torch\nfrom gymnasium.spaces import Box, Discrete\n",
            ),
            (
                '@dataclass\nclass Config(core.Config):\n    """Settings of rl/ppo.',
                GLIDER + '@dataclass\nclass Config(core.Config):\n    """Settings of rl/ppo.',
            ),
        ),
        argv=("--env", "Glider-v0", "--gamma", "0.97"),
    ),
    Case(
        "dqn~target-interval-of-another-library",
        "rl/dqn",
        "setting",
        "10,000 updates between two copies, Stable-Baselines' default",
        "a run has 10,240 updates: the target network is the untrained net until the last iterations",
        "measured: a return of 9.4 instead of 500 on CartPole after the whole run",
        argv=("--target-update-interval", "10000"),
    ),
    Case(
        "sac~entropy-of-nearly-no-choice",
        "rl/sac",
        "setting",
        "more exploration: 1.0 was refused as more than ln 2, so a little less",
        "the sign is the mistake: a density with 0.6 of at most 0.69 nats is nearly uniform, and the temperature grows until the policy has it",
        "by argument: actions are drawn almost evenly whatever their values; the critics learn what random play is worth, and mean actions stay weak",
        argv=("--target-entropy", "0.6"),
    ),
    Case(
        "instruct~own-right-choice-is-always-first",
        "vlm/instruct",
        "own data",
        "questions with two choices, made from annotations",
        "nobody shuffled them: the right one is always the first",
        "by argument: the model answers one without a look at the picture, with a reported accuracy of 100%",
        data=first_choice,
    ),
    Case(
        "compress~teacher-hears-through-the-student",
        "distill/compress",
        "teacher",
        "the sound is encoded once for both, as with a whole encoder",
        "the teacher's decoder reads the features of the student's damaged encoder: its distributions are about a garbled sound",
        "by argument: the divergence teaches to repeat what a decoder makes of noise, and excuses the encoder from hearing",
        edits=(
            (
                'heard = teacher.encode(batch["mel"])\n',
                'heard = (replace(student, model=model) if cfg.encoder else teacher).encode(batch["mel"])\n',
            ),
        ),
    ),
    Case(
        "whisper~time-masks-read-as-padding",
        "distill/whisper",
        "augmentation",
        "SpecAugment: a stretch of the envelope is set to zero",
        "a row of zeros is padding here: nothing attends there, and the recording ends as many frames too early, with its last word cut off",
        "by argument: the features of the end of every sentence are never learnt",
        edits=(
            (
                "        features = torch.zeros(canvas)\n",
                "        if generator is not None:\n"
                "            begin, envelope = int(torch.randint(max(1, len(heard) * 2 // 5 - 10), (), generator=generator)), envelope.clone()\n"
                "            envelope[begin : begin + 10] = 0\n"
                "        features = torch.zeros(canvas)\n",
            ),
        ),
    ),
]
HEALTHY = [
    Case(
        "pretrain~own-gpt-neox",
        "llm/pretrain",
        "own model",
        "a GPT-NeoX by its config.json",
        "parallel residual branches, rotary positions on a quarter of the channels; a causal model",
        "by argument: about as large as the recipe's Llama",
        data=gpt_neox,
    ),
    Case(
        "sft~own-alpaca-with-inputs",
        "llm/sft",
        "own data",
        "the packaged pairs in Alpaca's form",
        "one instruction for all rows, the sentence as its input",
        "by argument: the recipe's task with a longer prompt",
        data=alpaca,
        argv=("--train.epochs", "1"),
    ),
    Case(
        "dpo~robust-to-swapped-votes",
        "llm/dpo",
        "loss",
        "votes of which one in twelve is a slip, and the loss that reckons with it",
        "robust DPO with its assumed share at 0.1",
        "by argument: Chowdhury 2024; the others outvote the slips",
        data=swapped_votes,
        argv=("--loss", "robust", "--label-smoothing", "0.1", "--train.epochs", "0.1"),
    ),
    Case(
        "reward~centred-with-dropout",
        "llm/reward",
        "setting",
        "rewards centred at zero, a little dropout in front of the adapters",
        "settings of the recipe",
        "by argument: Eisenstein 2023, Hu 2021",
        argv=("--center-rewards-coefficient", "0.01", "--lora-dropout", "0.05"),
    ),
    Case(
        "pixel~pseudo-huber-again",
        "diffusion/pixel",
        "loss",
        "the pseudo-Huber loss of improved consistency training",
        "quadratic near zero and linear far away, its minimum where the square's is for small errors",
        "by argument: Song & Dhariwal 2023",
        edits=(
            (
                "        error = (prediction - target).square().mean((1, 2, 3))  # (B,)\n",
                "        error = 2 * (((prediction - target).square() + 1).sqrt() - 1).mean((1, 2, 3))  # (B,)\n",
            ),
        ),
    ),
    Case(
        "flow~uniform-levels",
        "diffusion/flow",
        "noise levels",
        "noise levels drawn evenly, two micro-batches",
        "as in the first rectified flow",
        "by argument: Liu 2022",
        edits=(
            (
                "        logit = self.process.noise.logit_mean + self.process.noise.logit_std * torch.randn((), generator=generator)\n"
                "        timestep = self.process.noise.num_train_timesteps * torch.sigmoid(logit)\n",
                "        level = torch.rand((), generator=generator).clamp(1e-3, 1 - 1e-3)\n"
                "        timestep = self.process.noise.num_train_timesteps * level\n",
            ),
        ),
        argv=("--train.accumulate", "2"),
    ),
    Case(
        "dqn~three-steps-by-priority-by-another",
        "rl/dqn",
        "setting",
        "three-step returns and prioritised replay",
        "settings of the recipe",
        "by argument: two parts of Rainbow (Hessel 2018)",
        argv=("--n-step", "3", "--prioritized-replay-alpha", "0.6"),
    ),
    Case(
        "sac~three-critics-again",
        "rl/sac",
        "architecture",
        "the lowest of three critics",
        "a little more cautious than with two",
        "by argument: Chen 2021 (REDQ) takes the lowest of more",
        edits=(
            (
                "Side(mlp(n_obs + n_act, *widths, 1, activation=nn.ReLU) for _ in range(2))",
                "Side(mlp(n_obs + n_act, *widths, 1, activation=nn.ReLU) for _ in range(3))",
            ),
        ),
    ),
    Case(
        "grpo~own-reward-for-nearness",
        "rl/grpo",
        "reward",
        "a small own reward for numbers near the sum beside the exact one",
        "highest where the exact one is",
        "by argument: the right answer alone earns both in full",
        data=nearness_reward,
    ),
    Case(
        "logits~warmer-teacher-wider-student",
        "distill/logits",
        "setting",
        "a temperature of four and a student twice as wide",
        "settings of the recipe",
        "by argument: Hinton 2015 uses up to twenty",
        argv=("--temperature", "4", "--widths", "16", "32", "64"),
    ),
    Case(
        "whisper~time-masks-at-the-mean",
        "distill/whisper",
        "augmentation",
        "SpecAugment: a stretch of the envelope is set to the mean",
        "no row of it is zero, so that it is not taken for padding",
        "by argument: Park 2019; the target is what the teacher heard",
        edits=(
            (
                "        features = torch.zeros(canvas)\n",
                "        if generator is not None:\n"
                "            begin, envelope = int(torch.randint(max(1, len(heard) * 2 // 5 - 4), (), generator=generator)), envelope.clone()\n"
                "            envelope[begin : begin + 4] = self.source.ears_mean\n"
                "        features = torch.zeros(canvas)\n",
            ),
        ),
    ),
]
