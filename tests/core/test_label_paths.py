"""Labels on the training path and on the evaluation path: they must be equal, but for a task that every draw makes anew."""

from types import SimpleNamespace

import pytest
import torch
from trainworthy.core.gates.checks.data import _paths_differ
from trainworthy.core.recipe.stage import Data, Field


class Turned(Data):
    """Pictures with their class, and the way in which a copy was turned."""

    def __init__(self, redraws: str, share: float):
        super().__init__()
        names = tuple("0123")
        self.fields = {"x": Field("input"), "y": Field("target", classes=names), "turn": Field("target", classes=names)}
        self.redraws, self.share = redraws, share

    def __len__(self) -> int:
        return 256

    def get(self, index: int, generator: torch.Generator | None) -> dict:
        sample = {
            "x": torch.rand(4, generator=torch.Generator().manual_seed(index)),
            "y": torch.tensor(index % 4),
            "turn": torch.tensor(index // 4 % 4),
        }
        if generator is not None and torch.rand((), generator=generator) < self.share:
            for name in self.redraws.split():
                sample[name] = torch.randint(4, (), generator=generator)
        return sample


@pytest.mark.parametrize(
    ("redraws", "share", "found"),
    [("", 1.0, []), ("turn", 1.0, []), ("y turn", 1.0, ["y", "turn"]), ("turn", 0.1, ["turn"])],
)
def test_a_label_that_every_draw_makes_anew_is_a_task_of_its_own(redraws: str, share: float, found: list[str]):
    accelerator = SimpleNamespace(num_processes=1)
    run = SimpleNamespace(
        device=torch.device("cpu"),
        accelerator=accelerator,
        cfg=SimpleNamespace(train=SimpleNamespace(batch_size=32, accumulate=1)),
    )
    faults = _paths_differ(run, SimpleNamespace(data={"train": Turned(redraws, share)}), 0)
    assert [fault.split("'")[1] for fault, _ in faults] == found
