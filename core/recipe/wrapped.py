"""`Wrapped`: a data set made from another one."""

from typing import Any

import torch
from torch import Tensor
from trainworthy.core.recipe.stage import Data


class Wrapped(Data):
    """A data set with the samples, the order and the batches of another one, for subclasses that change a part of it."""

    def __init__(self, data: Data):
        self.data, self.fields = data, data.fields

    def __len__(self) -> int:
        return len(self.data)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        return self.data.get(index, generator)

    def order(self, *parts: int | str) -> Tensor:
        return self.data.order(*parts)

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return self.data.collate(samples)
