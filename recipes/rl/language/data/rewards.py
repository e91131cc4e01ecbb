"""Rewards of texts: their sources, what they must return, and probes that find useless or exploitable ones.

A reward is a function `reward(prompts, completions) -> list of numbers`, one per completion. `PROBES` test it before training with texts
of different lengths, the empty text, and scrambled texts.
"""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.shared import functions, hub

Reward = Callable[[list[str], list[str]], list[float]]
FEWEST = 6  # words in a sentence
EXPLAINED = 0.9  # share of a reward's variance that length alone may explain
SAME = 1e-6
TIMES = 3  # times that texts are scrambled


# -------------------------------------------------------------------------------------------------------------- rewards
def sentence(prompts: list[str], completions: list[str]) -> list[float]:
    """1 for a completion that ends: its last character is a full stop, and it has at least six different words."""
    return [float(bool(re.search(r"\w[\"')`*]*\.$", c.rstrip())) and len({*words(c)}) >= FEWEST) for c in completions]


def the(prompts: list[str], completions: list[str]) -> list[float]:
    """The number of " the". It is exploited by repeating that word."""
    return [float(c.count(" the")) for c in completions]


def longer(prompts: list[str], completions: list[str]) -> list[float]:
    """The number of words; only length counts."""
    return [float(len(c.split())) for c in completions]


OWN = {f.__name__: f for f in (sentence, the, longer)}


def ceiling(reward: Reward) -> float:
    """Its highest possible value; `inf` if unknown."""
    return 1.0 if reward is sentence else math.inf


def words(text: str) -> list[str]:
    """Return the lower-case words of letters."""
    return re.findall(r"[a-z]+", text.lower())


@cache
def load(name: str, setting: str = "--reward") -> Reward:
    """Load one of `OWN` by name, `module:function`, or a folder with a sequence classifier of one label (as llm/reward
    exports)."""
    short = name.removeprefix("trainworthy.recipes.rl.language.rewards:")  # older args.json have the prefix
    if short in OWN:
        return OWN[short]
    if Path(name).is_dir():
        return Model(hub.locate(name, setting, packaged="module:function"))
    return functions.imported(
        name, setting, "sentence, module:function, file.py:function, or the folder of a reward model"
    )


def nets(reward: Reward) -> dict[str, nn.Module]:
    """Return its modules, so that core can keep them frozen."""
    return {"reward": reward.net} if isinstance(reward, Model) else {}


class Model:
    """A reward model: the output of a sequence classifier for a prompt and its completion, in the chat template's turns if its tokenizer has
    one (as in llm/reward), else concatenated."""

    def __init__(self, folder: str):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.net = (
            AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        )
        if self.net.config.num_labels != 1:
            raise UserError(
                f"--reward {folder} is not a reward model", got=f"{self.net.config.num_labels} labels", needed="one"
            )
        self.net.config.pad_token_id = self.tokenizer.pad_token_id

    @torch.no_grad()
    def __call__(self, prompts: list[str], completions: list[str]) -> list[float]:
        texts = [self._shown(p, c) for p, c in zip(prompts, completions, strict=True)]
        plain = self.tokenizer.chat_template is None  # a template brings its own special tokens
        batch = self.tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=plain).to(self.net.device)
        return self.net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].tolist()

    def _shown(self, prompt: str, completion: str) -> str:
        if self.tokenizer.chat_template is None:
            return prompt + completion
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return self.tokenizer.apply_chat_template(turns, tokenize=False)


def ask(reward: Reward, prompts: list[str], completions: list[str]) -> torch.Tensor:
    """Return the rewards (B,). Raises UserError with the text for values that are not finite numbers."""
    try:
        rewards = reward(prompts, completions)
    except Exception as error:
        raise UserError("the reward function raised", got=f"{type(error).__name__}: {error}",
                        needed="a number for any text, the empty one too") from error  # fmt: skip
    rewards = [float(v) for v in (rewards.tolist() if hasattr(rewards, "tolist") else rewards)]
    if len(rewards) != len(completions):
        raise UserError("the reward function returns a wrong number of rewards", got=f"{len(rewards)} rewards",
                        needed=f"{len(completions)}, one for each completion")  # fmt: skip
    if bad := [i for i, v in enumerate(rewards) if not math.isfinite(v)]:
        raise UserError("the reward function returns something that is not a number", got=f"{rewards[bad[0]]} for {completions[bad[0]]!r}",
                        needed="finite numbers", cause="a division by zero or a logarithm of zero")  # fmt: skip
    return torch.tensor(rewards)


# --------------------------------------------------------------------------------------------------------------- probes
@dataclass
class Sample:
    """Texts of different lengths for the probes."""

    prompts: list[str]
    completions: list[str]


@dataclass
class Probe:
    """A property that a reward must have."""

    id: str
    check: Callable[[Reward, Sample], str]
    """Return what is wrong, or ""."""


def answers(reward: Reward, sample: Sample) -> str:
    """A finite number for each text."""
    try:
        ask(reward, [*sample.prompts, sample.prompts[0]], [*sample.completions, ""])
        ask(reward, sample.prompts[:1], [""])
    except UserError as error:
        return "; ".join(" ".join(line.split()) for line in str(error).splitlines()[:2])
    return ""


def repeats(reward: Reward, sample: Sample) -> str:
    """The same reward again, also among other texts: it depends on its own text only."""
    first, again = (ask(reward, sample.prompts, sample.completions) for _ in range(2))
    if not torch.equal(first, again):
        return "the same texts get other rewards at a second call"
    gap = max(
        (first[k::5] - ask(reward, sample.prompts[k::5], sample.completions[k::5])).abs().max().item() for k in range(5)
    )
    return (
        f"a text's reward depends on the other texts of its batch, by up to {gap:.2g}"
        if gap > 1e-3 * spread(first)
        else ""
    )


def constant(reward: Reward, sample: Sample) -> str:
    """Different rewards for different texts: if all are equal, nothing can be learnt."""
    rewards = ask(reward, sample.prompts, sample.completions)
    return (
        f"constant: all {len(rewards)} texts get {rewards[0]:g}"
        if rewards.max() - rewards.min() <= SAME * spread(rewards)
        else ""
    )


def empty(reward: Reward, sample: Sample) -> str:
    """An empty answer has a lower reward than at least 10% of the texts."""
    rewards = ask(reward, sample.prompts, sample.completions)
    nothing = ask(reward, sample.prompts, [""] * len(rewards)).mean()
    best = rewards.max() > rewards.min() and nothing >= rewards.quantile(0.9) and nothing > rewards.min()
    return (
        f"an empty answer gets {nothing:g}, and nine in ten texts get at most {rewards.quantile(0.9):g}" if best else ""
    )


def length(reward: Reward, sample: Sample) -> str:
    """Not only length counts: the same length with other characters gives another reward, and no fit by length explains it."""
    rewards = ask(reward, sample.prompts, sample.completions).double()
    if rewards.max() - rewards.min() <= SAME * spread(rewards):
        return ""
    draws, signs = random.Random(0), [s for c in sample.completions for s in c if not s.isspace()]
    turned = [
        ask(reward, sample.prompts, [nonsense(c, signs, draws) for c in sample.completions]).double()
        for _ in range(TIMES)
    ]
    gap = max((rewards - t).abs().max().item() for t in turned)
    sizes = np.array([[len(c), len(c.split())] for c in sample.completions], dtype=float)
    sizes /= sizes.max(0).clip(1)
    columns = np.stack([np.ones(len(sizes)), *sizes.T, *(sizes**2).T, sizes[:, 0] * sizes[:, 1]], 1)
    fit = columns @ np.linalg.lstsq(columns, rewards.numpy(), rcond=None)[0]
    share = 1 - np.square(rewards.numpy() - fit).sum() / max(
        np.square(rewards.numpy() - rewards.numpy().mean()).sum(), 1e-12
    )
    if gap <= SAME * spread(rewards):
        return "only the length counts: all texts of one length get the same reward"
    return f"only the length counts: it explains {share:.0%} of the rewards' variance" if share > EXPLAINED else ""


def nonsense(text: str, signs: list[str], draws: random.Random) -> str:
    """Return a text with the same number of characters and words, all characters but spaces drawn from `signs`."""
    return "".join(s if s.isspace() else draws.choice(signs) for s in text)


def spread(rewards: torch.Tensor) -> float:
    return max(1.0, rewards.abs().max().item())


PROBES = [Probe(f.__name__, f) for f in (answers, repeats, constant, empty, length)]
"""In this order: the first that fails names the fault."""


def fault(reward: Reward, sample: Sample) -> str:
    """Return the result of the first probe that fails, or ""."""
    return next((found for probe in PROBES if (found := probe.check(reward, sample))), "")


def of_nothing(reward: Reward, prompts: list[str]) -> float:
    """Return the mean reward of an empty answer; 0 if the reward raises, which `answers` reports."""
    try:
        return ask(reward, prompts, [""] * len(prompts)).mean().item()
    except UserError:
        return 0.0
