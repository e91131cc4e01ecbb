"""Lengths of token rows in a memory estimate: those of the data, or the largest that the settings allow."""

from typing import Any

import torch
from torch import Tensor
from trainworthy.core.recipe.stage import Data
from trainworthy.core.recipe.wrapped import Wrapped


class Longest(Wrapped):
    """A text data set of which every sequence is `length` tokens long: its last token is repeated."""

    def __init__(self, data: Data, length: int):
        self.__dict__.update(vars(data))
        super().__init__(data)
        self.length = length

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.data.collate(samples)
        for name in [k for k in batch if k.endswith("input_ids")]:
            width = batch[name].shape[1]
            for k, v in batch.items():
                if isinstance(v, Tensor) and v.dim() == 2 and v.shape[1] == width < self.length:
                    batch[k] = torch.cat([v, v[:, -1:].expand(-1, self.length - width)], 1)
        return batch


def tokens(data: Data, micro: int) -> int:
    """Positions of a sample in a micro-batch, with its padding; 0 if it has no `input_ids`."""
    generator = torch.Generator().manual_seed(0)
    batch = data.collate([data.get(i % len(data), generator) for i in range(micro)])
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    return 0 if not isinstance(ids, Tensor) else -(-ids.numel() // micro)
