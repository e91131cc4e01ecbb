"""Images with questions as a data set, and the scoring of answers."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.vlm.data.conversations import Apart, Talks
from trainworthy.recipes.vlm.data.rows import IGNORE, IMAGE, Asked, chain, pack, right, together

from trainworthy import core


class Source(Protocol):
    """Pictures with questions."""

    kinds: tuple[str, ...]
    """Names of the sorts of questions."""

    def __len__(self) -> int: ...

    def asked(self, index: int) -> list[Asked]: ...

    def image(self, index: int) -> Tensor:
        """The picture of all these questions; Talks and Apart have `images` and `system` instead."""


def verdicts(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """(N, 3): for each question of the batch whether it is answered right, its kind, its pair (-1: none)."""
    rows = torch.stack([right(logits, batch).long(), batch["kind"], batch["pair"]], -1).flatten(0, 1)
    return rows[rows[:, 1] >= 0]


def surprise(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, 2): -log p of each row's scored tokens, summed, and how many they are."""
    scored = labels[:, 1:] != IGNORE
    each = F.cross_entropy(logits[:, :-1][scored].float(), labels[:, 1:][scored], reduction="none")
    return torch.stack(
        [torch.zeros(scored.shape, device=each.device).masked_scatter(scored, each).sum(1), scored.sum(1)], 1
    )


def score(rows: Tensor, kinds: Sequence[str]) -> dict[str, float]:
    """Share of right answers, over all and by kind; of counterfactual pairs with both right."""
    hit, kind, pair = rows.unbind(1)
    found = {"accuracy": hit.double().mean().item()}
    if (pair >= 0).any():
        _, place, size = pair[pair >= 0].unique(return_inverse=True, return_counts=True)
        both = torch.zeros(len(size), device=rows.device).scatter_add_(0, place, hit[pair >= 0].float())[size == 2] == 2
        found |= {"pairs": both.double().mean().item()} if len(both) else {}
    return found | {
        f"accuracy/{name}": hit[kind == k].double().mean().item() for k, name in enumerate(kinds) if (kind == k).any()
    }


@functools.lru_cache(8)  # a source never changes, and gates build a stage dozens of times
def majority(source: Source) -> tuple[str, ...]:
    """The commonest answer to each kind of question."""
    counts = [Counter() for _ in source.kinds]
    for one in (a for i in range(len(source)) for a in source.asked(i)):
        counts[one.kind][one.answer] += 1
    return tuple(c.most_common(1)[0][0] if c else "" for c in counts)


@functools.lru_cache(8)
def blindly(source: Source, guess: tuple[str, ...]) -> float:
    """Share of right answers of who says `guess[kind]` and never looks."""
    asked = [a for i in range(len(source)) for a in source.asked(i)]
    return sum(a.answer == guess[a.kind] for a in asked) / len(asked)


# ------------------------------------------------------------------------------------------------------------------ data
class Questions(core.Data):
    """Pictures (3, side, side) in [0, 1], whatever their size was, with their questions; of conversations (P, 3, side, side), P the
    most that one has, filled up with zeros. A sample that does not fit is left out whole and counted: cutting it would cut a
    picture's places or an answer."""

    varied = False
    """Whether the number of a picture's features depends on its size."""

    def __init__(self, source: Source, tokenizer: Any, *, features: int, side: int, longest: int):
        self.source, self.tokenizer, self.side, self.features = source, tokenizer, side, features
        self.end, self.talks = tokenizer.eos_token, isinstance(source, (Talks, Apart))
        self.fields = {"image": core.Field("input", low=0.0, high=1.0), "labels": core.Field("target")}
        self.keep([self.row(i) for i in range(len(source))], longest)

    def row(self, index: int) -> dict[str, Tensor]:
        """The tokens of a sample of the source."""
        start = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        if self.talks:
            return chain(self.tokenizer, start, self.features, self.source.system(index), self.source.asked(index))
        return pack(self.tokenizer, [*start, *[IMAGE] * self.features], self.source.asked(index))

    def keep(self, rows: list[dict[str, Tensor]], longest: int) -> None:
        """The rows that fit."""
        self.kept = [i for i, row in enumerate(rows) if len(row["ids"]) <= longest]
        self.rows = [rows[i] for i in self.kept]
        self.most = max((len(self.source.asked(i)) for i in self.kept), default=0)
        out, self.notes = len(rows) - len(self.kept), {}
        if self.talks and self.source.note:
            self.notes["without a picture"] = self.source.note
        if out:
            self.notes["over-long"] = f"{out:,} of {len(rows):,} samples are longer than {longest} tokens and left out"
        if not self.kept:
            least = min((row["ids"] for row in rows), key=len)
            shown = f"{out:,} samples of more than {longest} tokens, {int((least == IMAGE).sum())} of the shortest its pictures'"
            raise UserError("no sample fits", got=shown, needed=f"--data.longest of at least {len(least)}",
                            cause="cutting them would cut the picture or the answer, so they are left out")  # fmt: skip

    def __len__(self) -> int:
        return len(self.kept)

    def pictures(self, index: int) -> int:
        """How many a sample has."""
        return len(self.source.sizes(self.kept[index])) if self.talks else 1

    def places(self, index: int) -> int:
        """How many features its pictures have."""
        return self.features * self.pictures(index)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {**self.seen(index), **self.rows[index], **self.judged(index)}

    def judged(self, index: int) -> dict[str, Tensor]:
        """(Q,) each, what an answer is counted under: `kind`, `pair`; -1 where there is no question."""
        asked = self.source.asked(self.kept[index])
        spare = [-1] * (self.most - len(asked))
        return {
            "kind": torch.tensor([a.kind for a in asked] + spare),
            "pair": torch.tensor([a.pair for a in asked] + spare),
        }

    def seen(self, index: int) -> dict[str, Tensor]:
        """Its pictures, and how many they are."""
        n, i = self.pictures(index), self.kept[index]
        images = [self.fitted(image) for image in (self.source.images(i) if self.talks else [self.source.image(i)])]
        image = (
            images[0] if self.most_pictures == 1 else F.pad(torch.stack(images), (0,) * 7 + (self.most_pictures - n,))
        )
        return {"image": image, "pictures": torch.tensor(n)}

    @functools.cached_property
    def most_pictures(self) -> int:
        """Of all samples."""
        return max(map(self.pictures, range(len(self))))

    def fitted(self, image: Tensor) -> Tensor:
        """0-255 of any size -> (3, side, side) in [0, 1]."""
        image = image.float() / 255
        if image.shape[1:] == (self.side, self.side):
            return image
        return F.interpolate(image[None], size=(self.side, self.side), mode="bicubic", antialias=True)[0].clamp(0, 1)

    def peek(self, index: int, key: str) -> Any:
        return self.rows[index][key] if key in self.rows[index] else super().peek(index, key)  # a row costs no picture

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        stacked = {k: torch.stack([s[k] for s in samples]) for k in ("image", "pictures", "kind", "pair")}
        return {**stacked, **together(samples)}

    def shown(self, batch: dict[str, Tensor]) -> list[Tensor | None]:
        """The first picture of each sample, (3, side, side) in [0, 1]."""
        return [*(batch["image"] if batch["image"].ndim == 4 else batch["image"][:, 0])]

    def copy(self) -> "Questions":
        """The same rows; what is changed in one does not change the other."""
        other = object.__new__(type(self))
        fields = {k: dataclasses.replace(f) for k, f in self.fields.items()}
        other.__dict__ |= {**self.__dict__, "fields": fields, "notes": dict(self.notes)}
        return other
