"""A scheduler that lowers the rate when it is built and is never stepped: how its absence of steps is read from the script."""

import pytest
from trainworthy.guard.source.scheduler_calls import calls_of_step

from tests.conftest import patched
from tests.guard.guarding import guard

SOURCE = """
import argparse
import torch
from torch.optim import lr_scheduler
from torch.nn.functional import cross_entropy
torch.manual_seed(0)
args = argparse.Namespace(lr=1e-2, lradj="type3", epochs=4, warm=100)
x = torch.randn(640, 8)
data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), args.lr)
loader = torch.utils.data.DataLoader(data, 32, shuffle=True)
scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, epochs=args.epochs, steps_per_epoch=len(loader))
done = 0
for epoch in range(args.epochs):
    for a, b in loader:
        optimizer.zero_grad()
        cross_entropy(model(a), b).backward()
        optimizer.step()
        done += 1
        if args.lradj == "TST":
            scheduler.step()
    # end of an epoch
    with torch.no_grad():
        print("accuracy", (model(x).argmax(1) == data.tensors[1]).float().mean().item())
"""
BY_HAND = """    if args.lradj != "TST":
        for group in optimizer.param_groups:
            group["lr"] = args.lr * 0.9 ** epoch
"""
WARM = "scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 100)\n"


def swap(*changes: tuple[str, str]) -> str:
    return patched(SOURCE, *changes)


FAULTS = {
    "under an option": (SOURCE, "only if args.lradj == 'TST'"),
    "then by hand": (swap(("    # end of an epoch\n", BY_HAND)), "then the loop set"),
    "never": (
        swap(('        if args.lradj == "TST":\n            scheduler.step()\n', "")),
        "scheduler.step() is missing",
    ),
}
LINE = SOURCE[SOURCE.index("scheduler = ") : SOURCE.index("done = 0")]
HEALTHY = {
    "option is on": swap(('lradj="type3"', 'lradj="TST"')),
    "a cosine that an option leaves out": swap((LINE, WARM)),
    "stepped after some updates": swap(('if args.lradj == "TST"', "if done > args.warm")),
    "warm-up of the loop, then a cosine": swap(
        (LINE, WARM), ('if args.lradj == "TST"', "if done > args.warm"),
        ("    for a, b in loader:\n", "    for group in optimizer.param_groups:\n"
                                      "        group['lr'] = args.lr * min(1, 0.1 * 4 ** epoch)\n    for a, b in loader:\n")),
    "warm-up of another scheduler": swap(
        (LINE, "warm = lr_scheduler.LinearLR(optimizer, 0.05, total_iters=2)\n" + WARM),
        ('if args.lradj == "TST"', "if done > args.warm"), ("    # end of an epoch\n", "    warm.step()\n")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_rate_that_stays_where_the_scheduler_put_it(tmp_path, name):
    source, words = FAULTS[name]
    verdicts, printed, _ = guard(source, tmp_path, interventions=False, **{"--only": "schedule"})
    assert verdicts["schedule"].blocks, printed
    assert words in printed


@pytest.mark.parametrize("name", HEALTHY)
def test_a_scheduler_that_waits(tmp_path, name):
    verdicts, printed, _ = guard(HEALTHY[name], tmp_path, interventions=False, **{"--only": "schedule"})
    assert not verdicts["schedule"].blocks, printed


RETURNED = """
def build():
    model, optimizer = make()
    return model, optimizer, StepLR(optimizer, step_size=2)


def main():
    net, _, decay = build()
    for epoch in range(3):
        train(net)
        decay.step()
"""


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        ("", "", 1),
        ("        decay.step()\n", "", 0),
        ("decay.step()", "other.step()", 0),
        ("net, _, decay = build()", "decay = other()", 0),
        ("return model, optimizer, StepLR", "return StepLR", 0),  # of three names, none is surely the scheduler's
    ],
)
def test_the_steps_of_a_scheduler_that_a_function_returns(old: str, new: str, count: int, tmp_path):
    (tmp_path / "train.py").write_text(RETURNED.replace(old, new))
    assert len(calls_of_step(str(tmp_path / "train.py"), 4)) == count
