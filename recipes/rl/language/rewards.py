"""Rewards of texts: their sources, required outputs, and probes that find a useless or misleading one.

A reward is a function `reward(prompts, completions) -> list of numbers`, one per completion. `PROBES` test it before training
with texts of different lengths, the empty text, and scrambled texts.
"""

import importlib
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
from trainworthy.recipes.shared import hub

Reward = Callable[[list[str], list[str]], list[float]]
FEWEST = 6  # words of a sentence
EXPLAINED = 0.9  # share of a reward's variance that length alone may explain
SAME = 1e-6
TIMES = 3  # texts are turned to nonsense


# -------------------------------------------------------------------------------------------------------------- rewards
def sentence(prompts: list[str], completions: list[str]) -> list[float]:
    """1 for a completion that comes to an end: its last sign is a full stop, and it says six different words or more."""
    return [float(bool(re.search(r"\w[\"')`*]*\.$", c.rstrip())) and len({*words(c)}) >= FEWEST) for c in completions]


def the(prompts: list[str], completions: list[str]) -> list[float]:
    """How often " the" is said. It has a hole that every text of nothing else falls into."""
    return [float(c.count(" the")) for c in completions]


def longer(prompts: list[str], completions: list[str]) -> list[float]:
    """The number of words: longer is better, and nothing else counts."""
    return [float(len(c.split())) for c in completions]


def ceiling(reward: Reward) -> float:
    """The most that it can say; `inf` where nobody knows."""
    return 1.0 if reward is sentence else math.inf


def words(text: str) -> list[str]:
    """Lower-case words of letters."""
    return re.findall(r"[a-z]+", text.lower())


@cache
def load(name: str, setting: str = "--reward") -> Reward:
    """`module:function`, or a folder with a sequence classifier of one label (what llm/reward exports)."""
    if Path(name).is_dir():
        return Model(hub.locate(name, setting, packaged="module:function"))
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{setting} {name} cannot be found", got=f"{type(error).__name__}: {error}",
                        needed="module:function, or the folder of a reward model",
                        cause="a name with a slip, or a module that is not on PYTHONPATH") from None  # fmt: skip
    if not callable(found):
        raise UserError(
            f"{setting} {name} is not a function", got=type(found).__name__, needed="reward(prompts, completions)"
        )
    return found


def nets(reward: Reward) -> dict[str, nn.Module]:
    """What of it core can hold still."""
    return {"reward": reward.net} if isinstance(reward, Model) else {}


class Model:
    """A reward model: the one number that a sequence classifier says of a prompt and its completion, in the turns of its chat
    template where its tokenizer has one (as llm/reward shows them), else one after the other."""

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
    """(B,) of what the reward says; what it must not say is told with the text it was asked about."""
    try:
        said = reward(prompts, completions)
    except Exception as error:
        raise UserError("the reward function raised", got=f"{type(error).__name__}: {error}",
                        needed="a number for any text, the empty one too") from error  # fmt: skip
    said = [float(v) for v in (said.tolist() if hasattr(said, "tolist") else said)]
    if len(said) != len(completions):
        raise UserError("the reward function answers a wrong number of times", got=f"{len(said)} rewards",
                        needed=f"{len(completions)}, one for each completion")  # fmt: skip
    if bad := [i for i, v in enumerate(said) if not math.isfinite(v)]:
        raise UserError("the reward function returns something that is not a number", got=f"{said[bad[0]]} for {completions[bad[0]]!r}",
                        needed="finite numbers", cause="a division by zero or a logarithm of nothing")  # fmt: skip
    return torch.tensor(said)


# --------------------------------------------------------------------------------------------------------------- probes
@dataclass
class Sample:
    """Texts to ask about, of different lengths."""

    prompts: list[str]
    completions: list[str]


@dataclass
class Probe:
    """One thing that a reward must not do."""

    id: str
    judge: Callable[[Reward, Sample], str]
    """Empty, or what is wrong."""


def answers(reward: Reward, sample: Sample) -> str:
    """A finite number for each, whatever is asked."""
    try:
        ask(reward, [*sample.prompts, sample.prompts[0]], [*sample.completions, ""])
        ask(reward, sample.prompts[:1], [""])
    except UserError as error:
        return "; ".join(" ".join(line.split()) for line in str(error).splitlines()[:2])
    return ""


def repeats(reward: Reward, sample: Sample) -> str:
    """The same again, and the same where every other text is asked about: a text's reward is its own."""
    first, again = (ask(reward, sample.prompts, sample.completions) for _ in range(2))
    if not torch.equal(first, again):
        return "the same texts get other rewards when asked again"
    gap = max(
        (first[k::5] - ask(reward, sample.prompts[k::5], sample.completions[k::5])).abs().max().item() for k in range(5)
    )
    return (
        f"a text's reward depends on the other texts of its batch, by up to {gap:.2g}"
        if gap > 1e-3 * spread(first)
        else ""
    )


def constant(reward: Reward, sample: Sample) -> str:
    """Not all alike: where every text earns the same, nothing can be learnt."""
    said = ask(reward, sample.prompts, sample.completions)
    return f"constant: {len(said)} texts all get {said[0]:g}" if said.max() - said.min() <= SAME * spread(said) else ""


def empty(reward: Reward, sample: Sample) -> str:
    """An empty answer earns less than a good one: no more than nine in ten of the texts."""
    said = ask(reward, sample.prompts, sample.completions)
    nothing = ask(reward, sample.prompts, [""] * len(said)).mean()
    best = said.max() > said.min() and nothing >= said.quantile(0.9) and nothing > said.min()
    return f"an empty answer gets {nothing:g}, nine in ten texts no more than {said.quantile(0.9):g}" if best else ""


def length(reward: Reward, sample: Sample) -> str:
    """Something but the length counts: other signs in the places of a text's own get another reward, and no fit by length does."""
    said = ask(reward, sample.prompts, sample.completions).double()
    if said.max() - said.min() <= SAME * spread(said):
        return ""
    draws, signs = random.Random(0), [s for c in sample.completions for s in c if not s.isspace()]
    turned = [
        ask(reward, sample.prompts, [nonsense(c, signs, draws) for c in sample.completions]).double()
        for _ in range(TIMES)
    ]
    gap = max((said - t).abs().max().item() for t in turned)
    sizes = np.array([[len(c), len(c.split())] for c in sample.completions], dtype=float)
    sizes /= sizes.max(0).clip(1)
    columns = np.stack([np.ones(len(sizes)), *sizes.T, *(sizes**2).T, sizes[:, 0] * sizes[:, 1]], 1)
    fit = columns @ np.linalg.lstsq(columns, said.numpy(), rcond=None)[0]
    share = 1 - np.square(said.numpy() - fit).sum() / max(np.square(said.numpy() - said.numpy().mean()).sum(), 1e-12)
    if gap <= SAME * spread(said):
        return "only the length counts: every text of one length gets the same reward"
    return f"only the length counts: it explains {share:.0%} of the rewards" if share > EXPLAINED else ""


def nonsense(text: str, signs: list[str], draws: random.Random) -> str:
    """The same number of characters and words, all but the spaces drawn from `signs`."""
    return "".join(s if s.isspace() else draws.choice(signs) for s in text)


def spread(said: torch.Tensor) -> float:
    return max(1.0, said.abs().max().item())


PROBES = [Probe(f.__name__, f) for f in (answers, repeats, constant, empty, length)]
"""In this order: the first that fails names what is wrong."""


def fault(reward: Reward, sample: Sample) -> str:
    """What the first probe that fails says; empty: nothing is wrong."""
    return next((said for probe in PROBES if (said := probe.judge(reward, sample))), "")


def of_nothing(reward: Reward, prompts: list[str]) -> float:
    """What an empty answer gets on average; 0 where the reward cannot be asked, which `answers` tells."""
    try:
        return ask(reward, prompts, [""] * len(prompts)).mean().item()
    except UserError:
        return 0.0
