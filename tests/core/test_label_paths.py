"""Labels on the training path and on the evaluation path: they must be equal, but for a task that every draw makes anew."""

from types import SimpleNamespace

import pytest
import torch
from trainworthy.core.data import inventory
from trainworthy.core.gates.checks.data import _paths_differ, _splits_differ
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


@pytest.mark.parametrize(("distinct", "factor", "found"), [(2, 1.0, False), (40, 1.0, True), (2, 255.0, True)])
def test_a_few_pictures_of_one_colour_have_any_mean(distinct: int, factor: float, found: bool):
    """Two different pictures in validation: their mean says nothing. Bytes where training has 0 to 1 are another scale all the same."""

    def scan(name: str, mean: float, std: float, low: float, high: float, count: int) -> inventory.Scan:
        facts = {"role": "input", "mean": [mean], "std": [std], "min": low, "max": high, "levels": 256}
        return inventory.Scan(name, 90, list(range(90)), hashes=[i % count for i in range(90)], fields={"x": facts})

    scans = {
        "train": scan("train", 0.5, 0.29, 0.0, 1.0, 22),
        "val": scan("val", 0.9 * factor, 0.04 * factor, 0.0, factor, distinct),
    }
    stage = SimpleNamespace(data={"train": SimpleNamespace(fields={"x": Field("input")})})
    assert bool(_splits_differ(scans, stage)) == found  # type: ignore[arg-type]
