"""What `names` reads in a script's source of lines that do nothing, or not what they say."""

from pathlib import Path

import pytest
from trainworthy.guard.checks import names

LOOP = """
import argparse
import random

import numpy as np
import torch
from sklearn.model_selection import KFold, TimeSeriesSplit, train_test_split

parser = argparse.ArgumentParser()
parser.add_argument("--shuffle", type=bool, default=True)
parser.add_argument("--mode", default="train")
args = parser.parse_args()
torch.manual_seed(0)
images, labels = np.zeros((9, 2)), np.zeros(9)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = torch.nn.Parameter(torch.zeros(2))
        self.head = torch.nn.Linear(2, 2)

    def forward(self, x):
        x = x + self.positions
        return self.head(x)


def train(net, optimizer, x, y):
    net.train()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()


X_train, X_val, y_train, y_val = train_test_split(images, labels)
folds = KFold(3, shuffle=args.shuffle)
for fold, (rows, held_out) in enumerate(folds.split(images)):
    net = Net()
    for p in net.head.parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda epoch, k=k: k**epoch for k in (0.9,)])
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    order = np.random.permutation(len(images))
    images, labels = images[order], labels[order]
    if args.mode == "train" or args.mode == "debug":
        train(net, optimizer, images[rows], labels[rows])
"""
ZERO, FREEZE, GROUP = "    optimizer.zero_grad()\n", "        p.requires_grad = False\n", '        group["lr"] = 1e-3\n'
ORDER = "    order = np.random.permutation(len(images))\n    images, labels = images[order], labels[order]\n"
SPLIT = "X_train, X_val, y_train, y_val ="
MODE, MADE = 'args.mode == "train" or args.mode == "debug"', "    net = Net()\n"
CASES = {
    "a method without its call": (ZERO, "    optimizer.zero_grad\n", "`optimizer.zero_grad()` is meant"),
    "another attribute": (ZERO, "    optimizer.state\n    optimizer.zero_grad()\n", ""),
    "compared": (FREEZE, "        p.requires_grad == False\n", "`p.requires_grad = False` is meant"),
    "a sum that is dropped": (
        "        x = x + self.positions\n",
        "        x + self.positions\n",
        "`x = x + self.positions` is meant",
    ),
    "a sum that may raise": (
        "        x = x + self.positions\n",
        "        with torch.no_grad():\n            x + self.positions\n",
        "",
    ),
    "misspelt": (FREEZE, "        p.require_grad = False\n", "`requires_grad` is meant"),
    "an attribute that is read": (FREEZE, "        p.require_grad = False\n        print(p.require_grad)\n", ""),
    "a rate as an attribute": (GROUP, "        optimizer.lr = 1e-3\n", "for group in optimizer.param_groups"),
    "a rate among the defaults": (
        GROUP,
        '        optimizer.defaults["lr"] = 1e-3\n',
        "for group in optimizer.param_groups",
    ),
    "a rate of the options": (GROUP, '        group["lr"] = args.lr = 1e-3\n', ""),
    "a replaced seed": ("torch.manual_seed(0)\n", "torch.manual_seed = 0\n", "`torch.manual_seed(0)` is meant"),
    "a seed of a name": ("torch.manual_seed(0)\n", "args.seed = 0\n", ""),
    "always true": (MODE, 'args.mode == "train" or "debug"', "`args.mode == 'debug'` is meant"),
    "a default text": (MODE, 'args.mode or "debug"', ""),
    "functions of the last turn": ("[lambda epoch, k=k: k", "[lambda epoch: k", "keeps each of them"),
    "functions of another name": ("[lambda epoch, k=k: k**epoch", "[lambda epoch: 0.9**epoch", ""),
    "one net for all folds": (
        f"for fold, (rows, held_out) in enumerate(folds.split(images)):\n{MADE}",
        "net = Net()\nfor fold, (rows, held_out) in enumerate(folds.split(images)):\n",
        "make it and its optimiser inside the loop",
    ),
    "one net that begins anew": (
        f"for fold, (rows, held_out) in enumerate(folds.split(images)):\n{MADE}",
        "net = Net()\nfor fold, (rows, held_out) in enumerate(folds.split(images)):\n    net.load_state_dict(Net().state_dict())\n",
        "",
    ),
    "one net that follows the time": (
        f"folds = KFold(3, shuffle=args.shuffle)\nfor fold, (rows, held_out) in enumerate(folds.split(images)):\n{MADE}",
        "folds = TimeSeriesSplit(3)\nnet = Net()\nfor fold, (rows, held_out) in enumerate(folds.split(images)):\n",
        "",
    ),
    "two orders": (
        ORDER,
        "    np.random.shuffle(images)\n    np.random.shuffle(labels)\n",
        "index both by one permutation",
    ),
    "two orders of one seed": (
        ORDER,
        "    np.random.seed(0)\n    np.random.shuffle(images)\n    np.random.seed(0)\n    np.random.shuffle(labels)\n",
        "",
    ),
    "two orders of two generators": (
        ORDER,
        "    random.Random(0).shuffle(images)\n    random.Random(0).shuffle(labels)\n",
        "",
    ),
    "parts in another order": (SPLIT, "X_train, y_train, X_val, y_val =", "X_train, X_test, y_train, y_test"),
}


def fault(tmp_path: Path, text: str, *argv: str) -> str:
    """Return the cause that `names` gives; empty if it is quiet."""
    (tmp_path / "train.py").write_text(text)
    return names.check(tmp_path / "train.py", list(argv))["cause"]


def test_the_script_itself_is_quiet(tmp_path: Path):
    assert not fault(tmp_path, LOOP)


@pytest.mark.parametrize("case", CASES)
def test_lines_without_effect(tmp_path: Path, case: str):
    old, new, cause = CASES[case]
    assert LOOP.count(old) == 1
    found = fault(tmp_path, LOOP.replace(old, new))
    assert cause in found if cause else not found


def test_a_flag_that_is_switched_off_with_a_text(tmp_path: Path):
    for argv in (("--shuffle", "False"), ("--mode", "x", "--shuffle=0")):
        assert "BooleanOptionalAction" in fault(tmp_path, LOOP, *argv)
    for argv in (("--shuffle", "True"), ("--mode", "False"), ()):
        assert not fault(tmp_path, LOOP, *argv)


EPOCHS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.LSTM(4, 4, 1, batch_first=True)
        self.blocks = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        self.quiet = nn.Sequential(*[nn.ReLU()] * 2)
        self.steps = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.heads = nn.ModuleList([nn.Linear(4, 4)] * 2)

    def forward(self, x):
        x = self.blocks(self.rows(x)[0][:, -1])
        for step in self.steps:
            x = step(x)
        return sum(head(x) for head in self.heads)


def evaluate(net, loader, criterion):
    net.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for x, y in loader:
            correct += (net(x).argmax(1) == y).sum().item()
            total += len(y)
    return correct / total


def first_long(texts):
    seen = 0
    for text in texts:
        seen += 1
        if len(text) < 9:
            continue
        return seen


def main(loader, val_loader):
    net, criterion = Block(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    by_class = [[] for _ in range(4)]
    for epoch in range(3):
        correct = 0
        for x, y in loader:
            optimizer.zero_grad()
            output = net(x)
            loss = criterion(output, y)
            loss.backward()
            optimizer.step()
            correct += (output.argmax(1) == y).sum().item()
            by_class[0].append(loss.item())
        print(epoch, correct / len(loader.dataset), first_long(["a"]))
        val_total = 0.0
        for x, y in val_loader:
            val_loss = criterion(net(x), y)
            val_total += val_loss.item()
        print(val_total / len(val_loader), evaluate(net, val_loader, criterion))


main(*[None] * 2)
"""
ZEROS, HITS, RETURN = (
    "        for x, y in loader:\n            correct +=",
    "        correct = 0\n",
    "    return correct / total\n",
)
LOOPS = {
    "a return in the first turn": (RETURN, "        " + RETURN, "the return belongs after the loop"),
    "a break left over": (
        "            by_class[0].append(loss.item())\n",
        "            by_class[0].append(loss.item())\n            break\n",
        "is the break left over from a trial?",
    ),
    "a break on a condition": (
        "            by_class[0].append(loss.item())\n",
        "            if loss.item() < 0.1:\n                break\n            by_class[0].append(loss.item())\n",
        "",
    ),
    "zero in each turn": (
        ZEROS,
        ZEROS.replace("            correct +=", "            correct = 0\n            correct +="),
        "belongs before the loop",
    ),
    "never zero again": (
        "    for epoch in range(3):\n        correct = 0\n",
        "    correct = 0\n    for epoch in range(3):\n",
        "belongs inside the loop",
    ),
    "steps of all epochs": (
        "    for epoch in range(3):\n        correct = 0\n        for x, y in loader:\n",
        "    step = 0\n    for epoch in range(3):\n        correct = 0\n        for x, y in loader:\n            step += 1\n",
        "",
    ),
    "the loss of training": ("val_total += val_loss.item()", "val_total += loss.item()", "`val_loss` is meant"),
    "an iterator for all epochs": (
        "    for epoch in range(3):\n        correct = 0\n        for x, y in loader:\n",
        "    batches = iter(loader)\n    for epoch in range(3):\n        correct = 0\n        for x, y in batches:\n",
        "from the second time on it is empty",
    ),
    "an iterator for each epoch": (
        "    for epoch in range(3):\n        correct = 0\n        for x, y in loader:\n",
        "    for epoch in range(3):\n        correct = 0\n        batches = iter(loader)\n        for x, y in batches:\n",
        "",
    ),
    "one layer three times": (
        "[nn.Linear(4, 4) for _ in range(3)]",
        "[nn.Linear(4, 4)] * 3",
        "one layer for each is meant",
    ),
    "one layer two times": (
        "[nn.Linear(4, 4) for _ in range(2)]",
        "[nn.Linear(4, 4)] * 2",
        "one layer for each is meant",
    ),
    "one list four times": ("[[] for _ in range(4)]", "[[]] * 4", "[[] for _ in range(...)]"),
    "zeros four times": ("[[] for _ in range(4)]", "[0] * 4", ""),
    "bias for batch_first": (
        "nn.LSTM(4, 4, 1, batch_first=True)",
        "nn.LSTM(4, 4, 1, True)",
        "batch_first=True is meant",
    ),
    "bias and batch_first": ("nn.LSTM(4, 4, 1, batch_first=True)", "nn.LSTM(4, 4, 1, True, True)", ""),
    "decay for momentum": ("0.1, 0.9)", "0.1, 1e-4)", "weight_decay=0.0001 is meant"),
}


def test_the_loops_are_quiet(tmp_path: Path):
    assert not fault(tmp_path, EPOCHS)


@pytest.mark.parametrize("case", LOOPS)
def test_turns_of_a_loop(tmp_path: Path, case: str):
    old, new, cause = LOOPS[case]
    assert EPOCHS.count(old) == 1
    found = fault(tmp_path, EPOCHS.replace(old, new))
    assert cause in found if cause else not found


def test_an_option_that_nothing_reads(tmp_path: Path):
    script = LOOP.replace(
        'parser.add_argument("--mode"',
        'parser.add_argument("--label-smoothing", type=float)\nparser.add_argument("--mode"',
    )
    assert "pass its value" in fault(tmp_path, script, "--label-smoothing", "0.1")
    assert not fault(tmp_path, script)  # its default has no effect either
    read = script.replace(
        "nn.functional.cross_entropy(net(x), y)",
        "nn.functional.cross_entropy(net(x), y, label_smoothing=args.label_smoothing)",
    )
    assert not fault(tmp_path, read, "--label-smoothing", "0.1")
    given = script.replace("X_train, X_val", "create_optimizer(args)\nX_train, X_val")
    assert not fault(tmp_path, given, "--label-smoothing", "0.1")  # a library may read it


@pytest.mark.parametrize(
    ("grouping", "labels", "found"),
    [
        ('train_sampling_strategy="group_by_length"', "", True),
        ('train_sampling_strategy="random"', "", False),
        ("group_by_length=True", ", out.label_ids", False),
    ],
)
def test_predictions_of_rows_that_are_grouped_by_length(tmp_path: Path, grouping: str, labels: str, found: bool):
    script = f"""
from transformers import Trainer, TrainingArguments

trainer = Trainer(None, TrainingArguments("out", {grouping}), train_dataset=[], eval_dataset=[])
trainer.train()
out = trainer.predict([])
print(out.predictions{labels})
"""
    assert bool(fault(tmp_path, script)) == found
