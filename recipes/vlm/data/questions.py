"""Images with questions as a data set, and the scoring of answers."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.llm.evaluation import metrics
from trainworthy.recipes.vlm.data import turns
from trainworthy.recipes.vlm.data.conversations import Conversations, SingleQuestions
from trainworthy.recipes.vlm.data.rows import FILL, IGNORE, IMAGE, Question, chain, numbered, pack, right, together

from trainworthy import core

EVERY = (
    # samples up to which the tokens of each are counted before training; of larger data sets, only those that may be too long
    20_000
)
REMEMBERED = 8192  # rows that are kept in memory; others are made again when needed
SEEN = 2000  # samples of a large data set that are checked before training


class Source(Protocol):
    """Images with questions."""

    kinds: tuple[str, ...]
    """Names of the kinds of questions."""

    def __len__(self) -> int: ...

    def questions(self, index: int) -> list[Question]: ...

    def image(self, index: int) -> Tensor:
        """Return the image of all these questions; Conversations and SingleQuestions have `images` and `system` instead."""


def verdicts(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return (correct, kind, pair) of each question of the batch, (N, 3); pair -1 for none."""
    rows = torch.stack([right(logits, batch).long(), batch["kind"], batch["pair"]], -1).flatten(0, 1)
    return rows[rows[:, 1] >= 0]


def surprise(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of -log p over each row's scored tokens, and their number, (B, 2)."""
    scored = labels[:, 1:] != IGNORE
    each = F.cross_entropy(logits[:, :-1][scored].float(), labels[:, 1:][scored], reduction="none")
    return torch.stack(
        [torch.zeros(scored.shape, device=each.device).masked_scatter(scored, each).sum(1), scored.sum(1)], 1
    )


def score(rows: Tensor, kinds: Sequence[str]) -> dict[str, float]:
    """Return the accuracy, overall and by kind, and the share of counterfactual pairs with both answers correct."""
    hit, kind, pair = rows.unbind(1)
    found = {"accuracy": to_double(hit).mean().item()}
    if (pair >= 0).any():
        _, place, size = pair[pair >= 0].unique(return_inverse=True, return_counts=True)
        both = torch.zeros(len(size), device=rows.device).scatter_add_(0, place, hit[pair >= 0].float())[size == 2] == 2
        found |= {"pairs": to_double(both).mean().item()} if len(both) else {}
    return found | {
        f"accuracy/{name}": to_double(hit[kind == k]).mean().item() for k, name in enumerate(kinds) if (kind == k).any()
    }


@functools.lru_cache(8)  # a source never changes, and gates build a stage dozens of times
def majority(source: Source) -> tuple[str, ...]:
    """Return the most common answer to each kind of question."""
    counts = [Counter() for _ in source.kinds]
    for one in (a for i in range(len(source)) for a in source.questions(i)):
        counts[one.kind][one.answer] += 1
    return tuple(c.most_common(1)[0][0] if c else "" for c in counts)


@functools.lru_cache(8)
def blindly(source: Source, guess: tuple[str, ...], metric: str = "accuracy") -> float:
    """Return the score of answering `guess[kind]` without the image: accuracy, or the mean of another metric over up to SEEN answers."""
    pairs = [a for i in range(len(source)) for a in source.questions(i)]
    if metric == "accuracy":
        return sum(a.answer == guess[a.kind] for a in pairs) / len(pairs)
    some = pairs[:: -(-len(pairs) // SEEN)]
    return sum(metrics.score(metric)(guess[a.kind], a.answer) for a in some) / len(some)


# ------------------------------------------------------------------------------------------------------------------ data
class Questions(core.Data):
    """Images (3, side, side) in [0, 1] with their questions; for conversations (P, 3, side, side), where P is the largest number of images
    and missing ones are zeros. A sample that is too long is left out whole and counted: cutting would remove image places or answers."""

    varied = False
    """Whether the number of an image's features depends on its size."""

    def __init__(self, source: Source, tokenizer: Any, *, features: int, side: int, longest: int):
        self.source, self.tokenizer, self.side, self.features = source, tokenizer, side, features
        self.chat, self.talks = turns.chat(tokenizer), isinstance(source, (Conversations, SingleQuestions))
        self.end = self.chat.form.end if self.chat else tokenizer.eos_token
        self.ends = self.chat.ends if self.chat else [tokenizer.eos_token_id]
        self.fields = {"image": core.Field("input", low=0.0, high=1.0), "labels": core.Field("target")}
        self.keep(longest)

    def row(self, index: int) -> dict[str, Tensor]:
        """Return the tokens of a sample: in the turns of the tokenizer's chat template if it has one, else questions and answers in lines."""
        if self.chat and self.talks:
            return turns.chained(self.chat, self.features, self.source.system(index), self.source.questions(index))
        if self.chat:
            return turns.packed(self.chat, self.features, self.source.questions(index))
        start = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        if self.talks:
            return chain(self.tokenizer, start, self.features, self.source.system(index), self.source.questions(index))
        return pack(self.tokenizer, [*start, *[IMAGE] * self.features], self.source.questions(index))

    def wanted(self, index: int) -> list[str]:
        """Return the text of each answer of a sample as it must be scored, with its end."""
        pairs = self.source.questions(index)
        if not self.chat:
            return [f" {one.answer}{self.end}" for one in pairs]
        if self.talks:
            return [text for text, scored in turns.rendered(self.chat, self.source.system(index), pairs) if scored]
        return [turns.rendered(self.chat, "", [turns.placed(one)])[1][0] for one in pairs]

    def at_most(self, index: int) -> float:
        """Return an upper bound of a sample's tokens without tokenising: a token stands for at least one byte."""
        pairs = self.source.questions(index)
        texts = [
            self.source.system(index) if self.talks else "",
            *(text for a in pairs for text in (a.question, a.answer)),
        ]
        pictures = self.source.count(index) if self.talks else 1
        return sum(len(t.encode()) for t in texts) + self.frame * (1 + len(pairs)) + self.features * pictures

    @functools.cached_property
    def frame(self) -> int:
        """Largest number of tokens around a question and its answer."""
        one = Question(0, "a", "a")
        return 8 + sum(len(text.encode()) for text, _ in turns.rendered(self.chat, "a", [one])) if self.chat else 8

    def keep(self, longest: int) -> None:
        """Find the samples that fit. Rows are made when needed; of a large data set only samples that may be too long are tokenised here."""
        self.made = functools.lru_cache(REMEMBERED)(self.row)
        self.longest_answer = functools.cache(lambda: longest_answer(self))  # copies share it
        n, lengths = len(self.source), {}
        for i in range(n):
            if n <= EVERY or self.at_most(i) > longest:
                lengths[i] = len(self.made(i)["ids"])
        out = [i for i, length in lengths.items() if length > longest]
        left = set(out)
        self.kept = [i for i in range(n) if i not in left]
        self.most = max((len(self.source.questions(i)) for i in self.kept), default=0)
        self.notes = {}
        for name, called in (("note", "without a picture"), ("unopened", "pictures"), ("left_out", "lines")):
            if getattr(self.source, name, ""):
                self.notes[called] = getattr(self.source, name)
        if out:
            self.notes["over-long"] = f"{len(out):,} of {n:,} samples are longer than {longest} tokens and left out"
        if not self.kept:
            least = self.made(min(out, key=lengths.__getitem__))["ids"]
            measured = f"{len(out):,} samples of more than {longest} tokens, {int((least == IMAGE).sum())} of the shortest its pictures'"
            raise UserError("no sample fits", got=measured, needed=f"--data.max-length of at least {len(least)}",
                            cause="cutting them would cut the picture or the answer, so they are left out")  # fmt: skip

    @property
    def rows(self) -> "Rows":
        """Return the tokens of each sample, made when read."""
        return Rows(self)

    def texts(self, ids: Sequence[int]) -> str:
        """Return an answer without its end token and without what a template puts around every answer."""
        ids = [t for t in ids if t not in self.ends]
        return (
            self.chat.reply(self.tokenizer.decode(ids))
            if self.chat
            else self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        )

    def __len__(self) -> int:
        return len(self.kept)

    def pictures(self, index: int) -> int:
        """Return the number of images of a sample."""
        return self.source.count(self.kept[index]) if self.talks else 1

    def places(self, index: int) -> int:
        """Return the number of features of its images."""
        return self.features * self.pictures(index)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {**self.seen(index), **self.rows[index], **self.scoring(index)}

    def scoring(self, index: int) -> dict[str, Tensor]:
        """Return `kind` and `pair` of each answer, (Q,) each; -1 for no question."""
        pairs = self.source.questions(self.kept[index])
        spare = [-1] * (self.most - len(pairs))
        return {
            "kind": torch.tensor([a.kind for a in pairs] + spare),
            "pair": torch.tensor([a.pair for a in pairs] + spare),
        }

    def seen(self, index: int) -> dict[str, Tensor]:
        """Return its images and their number."""
        n, i = self.pictures(index), self.kept[index]
        images = [self.fitted(image) for image in (self.source.images(i) if self.talks else [self.source.image(i)])]
        image = (
            images[0] if self.most_pictures == 1 else F.pad(torch.stack(images), (0,) * 7 + (self.most_pictures - n,))
        )
        return {"image": image, "pictures": torch.tensor(n)}

    @functools.cached_property
    def most_pictures(self) -> int:
        """The same for all samples."""
        return max(map(self.pictures, range(len(self))))

    def fitted(self, image: Tensor) -> Tensor:
        """Map 0-255 of any size to (3, side, side) in [0, 1]."""
        image = image.float() / 255
        if image.shape[1:] == (self.side, self.side):
            return image
        return F.interpolate(image[None], size=(self.side, self.side), mode="bicubic", antialias=True)[0].clamp(0, 1)

    def peek(self, index: int, key: str) -> Any:
        # reading a row reads no image
        return self.rows[index][key] if key in self.rows[index] else super().peek(index, key)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        stacked = {k: torch.stack([s[k] for s in samples]) for k in ("image", "pictures", "kind", "pair")}
        return {**stacked, **together(samples)}

    def images_of(self, batch: dict[str, Tensor]) -> list[Tensor | None]:
        """Return the first image of each sample, (3, side, side) in [0, 1]."""
        return [*(batch["image"] if batch["image"].ndim == 4 else batch["image"][:, 0])]

    def copy(self) -> "Questions":
        """The same rows as copies: changing one does not change the other."""
        other = object.__new__(type(self))
        fields = {k: dataclasses.replace(f) for k, f in self.fields.items()}
        other.__dict__ |= {**self.__dict__, "fields": fields, "notes": dict(self.notes)}
        return other


class Rows(Sequence):
    """The rows of a data set as a sequence."""

    def __init__(self, data: Questions):
        self.data = data

    def __len__(self) -> int:
        return len(self.data.kept)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self.data.made(i) for i in self.data.kept[index]]
        return self.data.made(self.data.kept[index])


# ------------------------------------------------------------------------------------------------------------- generation
class Prompts(NamedTuple):
    """Questions of a batch, each in its own row that ends where the answer starts."""

    batch: dict[str, Tensor]
    """Padded on the left: every row ends where its answer starts."""
    answers: list[list[int]]
    """Scored tokens of each."""
    rows: list[int]
    """Row of the batch of each."""


def prompts(batch: dict[str, Tensor]) -> Prompts | None:
    """Return the questions of a batch for generation. A question before an image of its conversation is asked without that image. In a
    processor's batch, whose images cannot be separated, such a question is left out."""
    number, prompt_rows, answers, rows, counts = numbered(batch["labels"]), [], [], [], []
    for b in range(len(number)):
        for q in range(1, int(number[b].max()) + 1):
            before = prompt(batch, b, q, number[b])
            places = batch["ids"][b] == IMAGE
            masked, every = int((places & before).sum()), int(places.sum())
            if masked != every and "pictures" not in batch:
                continue
            prompt_rows.append({k: batch[k][b, before] for k in FILL})
            answers.append(batch["labels"][b, number[b] == q].tolist())
            rows.append(b)
            counts.append(masked * int(batch["pictures"][b]) // max(1, every) if "pictures" in batch else 0)
    if not prompt_rows:
        return None
    width = max(len(one["ids"]) for one in prompt_rows)
    left = {
        k: torch.stack([F.pad(one[k], (width - len(one[k]), 0), value=value) for one in prompt_rows])
        for k, value in FILL.items()
    }
    rest = {k: v[torch.tensor(rows, device=v.device)] for k, v in batch.items() if k not in FILL}
    if "pictures" in batch:
        rest["pictures"] = torch.tensor(counts, device=batch["pictures"].device)
    return Prompts({**rest, **left}, answers, rows)


def prompt(batch: dict[str, Tensor], row: int, question: int, number: Tensor) -> Tensor:
    """Return the tokens before an answer that its question sees, (T,)."""
    first = int((number == question).nonzero()[0])
    segment = batch["segment"][row]
    before = torch.arange(len(number), device=number.device) < first
    return before & ((segment == 0) | (segment == segment[first]))


def longest_answer(data: Questions) -> int:
    """Return the tokens of the longest answer with its end, over up to SEEN samples."""
    found = 0
    for i in data.representative(min(SEEN, len(data))):
        number = numbered(data.rows[i]["labels"])
        found = max([found, *(int((number == q).sum()) for q in range(1, int(number.max()) + 1))])
    return found
