"""Pictures with questions as a data set, and how answers are judged."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

import core
from core.errors import UserError
from recipes.vlm.rows import IMAGE, Asked, pack, right, together


class Source(Protocol):
    """Pictures with questions."""

    kinds: tuple[str, ...]
    """Names of the sorts of questions."""

    def __len__(self) -> int: ...

    def asked(self, index: int) -> list[Asked]: ...

    def image(self, index: int) -> Tensor: ...


def verdicts(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """(N, 3): for each question of the batch whether it is answered right, its kind, its pair (-1: none)."""
    rows = torch.stack([right(logits, batch).long(), batch["kind"], batch["pair"]], -1).flatten(0, 1)
    return rows[rows[:, 1] >= 0]


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
    """Pictures (3, side, side) in [0, 1] with their questions. A sample that does not fit is left out whole and counted: cutting it
    would cut the picture's places or an answer."""

    def __init__(self, source: Source, tokenizer: Any, *, features: int, side: int, longest: int):
        self.source, self.tokenizer, self.side = source, tokenizer, side
        self.fields = {"image": core.Field("input", low=0.0, high=1.0), "labels": core.Field("target")}
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        prefix = [*start, *[IMAGE] * features]
        rows = [pack(tokenizer, prefix, source.asked(i)) for i in range(len(source))]
        self.kept = [i for i, row in enumerate(rows) if len(row["ids"]) <= longest]
        self.rows = [rows[i] for i in self.kept]
        self.most = max((len(source.asked(i)) for i in self.kept), default=0)
        out, self.notes = len(rows) - len(self.kept), {}
        if out:
            self.notes = {
                "over-long": f"{out:,} of {len(rows):,} samples are longer than {longest} tokens and left out"
            }
        if not self.kept:
            raise UserError("no sample fits", needed=f"--data.longest of at least {min(len(r['ids']) for r in rows)}",
                            got=f"{out:,} samples of more than {longest} tokens, {features} of them the picture's",
                            cause="cutting them would cut the picture or the answer, so they are left out")  # fmt: skip

    def __len__(self) -> int:
        return len(self.kept)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        asked = self.source.asked(self.kept[index])
        spare = [-1] * (self.most - len(asked))
        image = self.source.image(self.kept[index]).float() / 255
        if image.shape[1:] != (self.side, self.side):
            image = F.interpolate(image[None], size=(self.side, self.side), mode="bicubic", antialias=True)[0].clamp(
                0, 1
            )
        return {"image": image, **self.rows[index], "kind": torch.tensor([a.kind for a in asked] + spare),
                "pair": torch.tensor([a.pair for a in asked] + spare)}  # fmt: skip

    def peek(self, index: int, key: str) -> Any:
        return self.rows[index][key] if key in self.rows[index] else super().peek(index, key)  # a row costs no picture

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        stacked = {k: torch.stack([s[k] for s in samples]) for k in ("image", "kind", "pair")}
        return {**stacked, **together(samples)}

    def copy(self) -> "Questions":
        """The same rows; what is changed in one does not change the other."""
        other = object.__new__(type(self))
        fields = {k: dataclasses.replace(f) for k, f in self.fields.items()}
        other.__dict__ |= {**self.__dict__, "fields": fields, "notes": dict(self.notes)}
        return other
