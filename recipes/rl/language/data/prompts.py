"""Prompts that a language model continues: beginnings of prose or your own, as left-padded tokens."""

from dataclasses import astuple, dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from trainworthy.core.base import seeds
from trainworthy.core.data.validation_split import absolute
from trainworthy.recipes.llm.data import documents, prose

from trainworthy import core

SHORTEST, LONGEST = 3, 8  # words of a beginning


@dataclass
class Source:
    """Where the prompts come from."""

    path: str = "prose"
    """`prose` (beginnings of the texts of the running Python), or a file, folder or `hub:owner/name` as llm/pretrain reads texts:
    each is a prompt."""
    column: str = "prompt"
    """Column with the prompt, for tables."""
    tokens: int = 24
    """Longest prompt in tokens; longer ones are left out, counted and named."""
    held_out: int = 256
    """Largest number of validation prompts."""
    chat: bool = False
    """Use the tokenizer's chat template."""
    max_bad: float = 0.01
    """Largest share of prompts that are empty, invalid UTF-8 or too long."""
    val: str = ""
    """Validation prompts: a file or folder like `path`, or a share of the prompts (`0.1`); empty: the data set's own split, else
    0.05."""

    def __post_init__(self):
        if self.path != "prose" and not self.path.startswith("hub:"):
            self.path = str(Path(self.path).resolve())  # resumable from any folder
        self.val = absolute(self.val)


class Prompts(core.Data):
    """Prompts as tokens (P,), their mask, and one number in [0, 1) for each token that may be sampled after them (T,)."""

    def __init__(self, texts: list[str], ids: list[list[int]], *, width: int, new_tokens: int, tokenizer: Any):
        self.texts, self.ids, self.width, self.new_tokens, self.tokenizer = texts, ids, width, new_tokens, tokenizer
        self.fields = {"prompt": core.Field("source"), "input_ids": core.Field("input", low=0, high=len(tokenizer) - 1)}

    def __len__(self) -> int:
        return len(self.ids)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor | str]:
        generator = generator or torch.Generator().manual_seed(seeds.derive("held out", index))
        ids, mask = torch.full((self.width,), self.tokenizer.pad_token_id), torch.zeros(self.width, dtype=torch.bool)
        n = len(self.ids[index])
        ids[self.width - n :], mask[self.width - n :] = torch.tensor(self.ids[index]), True
        draws = torch.rand(self.new_tokens, generator=generator)
        return {"input_ids": ids, "mask": mask, "draws": draws, "prompt": self.texts[index]}


def read(source: Source, tokenizer: Any, new_tokens: int) -> dict[str, Prompts]:
    """Return {"prompts": training prompts, "val": validation prompts}. Read once per process."""
    return {**_read(astuple(source), tokenizer, new_tokens)}


@cache
def _read(settings: tuple, tokenizer: Any, new_tokens: int) -> dict[str, Prompts]:
    source = Source(*settings)
    if source.path == "prose":
        train, val, _, notes = prose.load()
        train, val = (list(dict.fromkeys(beginning(t) for t in some)) for some in (train, val))
        val = [t for t in val if t not in {*train}]
    else:
        train, val, notes = documents.load(source.path, source.column, source.max_bad, source.val)
    found = {}
    for name, texts in (("prompts", train), ("val", val)):
        ids = [encode(source, tokenizer, t) for t in texts]
        fits = [i for i, row in enumerate(ids) if len(row) <= source.tokens]
        if len(fits) < len(ids):
            long = next(t for t, row in zip(texts, ids, strict=True) if len(row) > source.tokens)
            if source.path != "prose" and len(ids) - len(fits) > source.max_bad * len(ids):
                raise core.UserError(f"--data.path {source.path}: {len(ids) - len(fits)} of {len(ids)} prompts are too long",
                                     got=f"{max(map(len, ids))} tokens, e.g. {long[:60]!r}", needed=f"at most {source.tokens}",
                                     next="--data.tokens N, or --data.max-bad SHARE to leave them out")  # fmt: skip
            notes = {
                **notes,
                f"too long, {name}": f"{len(ids) - len(fits)} of {len(ids)} prompts left out, e.g. {long[:60]!r}",
            }
        others = fits[source.held_out : 2 * source.held_out] if name == "val" else []  # no setting is chosen on these
        fits = fits[: source.held_out] if name == "val" else fits
        if not fits:
            raise core.UserError(f"--data.path {source.path}: no prompts to {'evaluate on' if name == 'val' else 'learn from'}",
                                 needed="texts of a few words")  # fmt: skip
        for split, some in ((name, fits), ("test", others)):
            if some:
                found[split] = Prompts([texts[i] for i in some], [ids[i] for i in some], width=source.tokens,
                                       new_tokens=new_tokens, tokenizer=tokenizer)  # fmt: skip
    found["prompts"].notes = notes
    return found


def beginning(text: str) -> str:
    """Return the first three to eight words of a text; the text determines how many. Underlines of headings are no words."""
    words = (w for w in text.split() if any(c.isalnum() for c in w))
    return " ".join(islice(words, SHORTEST + crc32(text.encode()) % (LONGEST - SHORTEST + 1)))


def encode(source: Source, tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a prompt: with the tokenizer's BOS token if it has one, or as chat turns."""
    if source.chat:
        if tokenizer.chat_template is None:
            raise core.UserError(
                "--data.chat: the tokenizer has no chat template", needed="an instruct model's tokenizer"
            )
        turns = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return begin + tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
