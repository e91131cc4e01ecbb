"""What `names` reads in a script's source of numbers that are made anew: in a batch, in a split, in another order of the classes."""

from pathlib import Path

import pytest
from trainworthy.guard.checks import names

SCRIPT = """
import numpy as np
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from sklearn.preprocessing import LabelEncoder

NAMES = ["O", "ARG", "CALL"]
label2id = {name: i for i, name in enumerate(NAMES)}
id2label = dict(enumerate(NAMES))
rows = {"train": Dataset.from_list([]), "test": Dataset.from_list([])}


def encode(batch):
    numbers = np.unique(batch["word"], return_inverse=True)[1]
    labels = [label2id[name] for name in batch["name"]]
    return {"numbers": numbers, "labels": labels}


def build_tokenizer(texts):
    return {word: i for i, word in enumerate(texts)}


tokenizer = build_tokenizer(rows["train"]["texts"])
train, test = rows["train"], rows["test"]
train = train.map(encode, batched=True)
features = test.map(encode, batched=True)
model = get_peft_model(teacher, LoraConfig())
for i, row in enumerate(test):
    print(id2label[0], row, features[i], tokenizer)
copy = make()
copy.load_state_dict(model.state_dict())
model = model.merge_and_unload()
print(model, copy, "end")
"""
FEATURES, COPY, LOOP = (
    "features = test.map(encode, batched=True)\n",
    "copy.load_state_dict(model.state_dict())",
    "for i, row in enumerate(test):\n",
)
TRAINED = ("copy = make()\n", "trainer.train()\ncopy = make()\n")
ROW = (
    '    numbers = np.unique(batch["word"], return_inverse=True)[1]\n',
    '    text = batch["text"][0]\n    numbers = [len(text) for _ in batch["text"]]\n',
)
LABELS = '    labels = [label2id[name] for name in batch["name"]]\n'


def fault(folder: Path, script: str) -> str:
    path = folder / "train.py"
    path.write_text(script)
    return names.check(path).get("cause", "")


def changed(*pairs: str) -> str:
    script = SCRIPT
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in script
        script = script.replace(old, new)
    return script


@pytest.mark.parametrize(
    ("pairs", "cause"),
    [
        (("dict(enumerate(NAMES))", "dict(enumerate(sorted(NAMES)))"), "the same number means two classes"),
        ((LABELS, LABELS.replace("[label2id[name] for name in batch", "np.unique(batch").replace('"] for', "").replace(
            '"name"]]', '"name"], return_inverse=True)[1]')), "where a batch lacks a class"),
        ((LABELS, '    labels = LabelEncoder().fit_transform(batch["name"])\n'), "where a batch lacks a class"),
        ((FEATURES, f'tokenizer = build_tokenizer(rows["test"]["texts"])\n{FEATURES}'), "other numbers for the same words"),
        ((LOOP, f"test = test.shuffle(seed=0)\n{LOOP}"), "shuffle before the features are made"),
        ((LOOP, "test = test.sort('word')\nfor row, one in zip(test, features):\n    i = 0\n"), "shuffle before the features"),
        (("merge_and_unload", "unload", *TRAINED), "merge_and_unload() is meant"),
        (ROW, "loop over the rows"),
        ((COPY, "copy.load_state_dict(model.state_dict(), assign=True)"), "both models hold the same tensors"),
    ],
)  # fmt: skip
def test_what_is_numbered_or_taken_anew(tmp_path: Path, pairs: tuple[str, ...], cause: str):
    assert cause in fault(tmp_path, changed(*pairs)), fault(tmp_path, changed(*pairs))


@pytest.mark.parametrize(
    "pairs",
    [
        (),
        ('["O", "ARG", "CALL"]', '["ARG", "CALL", "O"]', "dict(enumerate(NAMES))", "dict(enumerate(sorted(NAMES)))"),
        (FEATURES, f"test = test.shuffle(seed=0)\n{FEATURES}"),  # before the features are made
        (FEATURES, f"{FEATURES}test = test.shuffle(seed=0)\nfeatures = test.map(encode)\n"),
        (LOOP, "test = test.shuffle(seed=0)\nfor row in features:\n    i = 0\n"),
        (FEATURES, f'tokenizer = build_tokenizer(rows["train"]["titles"])\n{FEATURES}'),
        (FEATURES, f'test_tokenizer = build_tokenizer(rows["test"]["texts"])\n{FEATURES}'),
        ("tokenizer = build_tokenizer(", "tokenizer = load_tokenizer(", FEATURES, f'tokenizer = load_tokenizer("test")\n{FEATURES}'),
        (*ROW, "rows[\"train\"], rows[\"test\"]\n", "rows[\"train\"], rows[\"test\"]\nrows.map(encode, batched=True, batch_size=1)\n",
         "train = train.map(encode, batched=True)\n", "", "features = test.map(encode, batched=True)", "features = test.map(encode)"),
        (ROW[0], ROW[1] + "    print(batch[\"text\"])\n"),
        ("merge_and_unload()", "unload()  # the base\nmodel.merge_adapter()", *TRAINED),
        (LABELS, "    labels = np.unique(batch[\"name\"], return_inverse=True)[1]\n", "NAMES = [", "n_shot = 5\nprint(n_shot)\nNAMES = ["),
        ("merge_and_unload()", "unload()"),  # the weights that an adapter leaves behind at its start, for a training elsewhere
        ("merge_and_unload()", "unload()", "copy = make()\n", "trainer.train()\nmodel.save_pretrained('adapter')\ncopy = make()\n"),
        (COPY, "copy.load_state_dict(make().state_dict(), assign=True)", "print(model, copy", "print(copy"),
    ],
)  # fmt: skip
def test_what_is_no_fault(tmp_path: Path, pairs: tuple[str, ...]):
    assert not fault(tmp_path, changed(*pairs))


def test_vars_of_an_object_hides_no_variable(tmp_path: Path):
    bug = changed(COPY, "copy.load_state_dict(model.state_dict(), assign=True)")
    assert fault(tmp_path, f"{bug}print(vars(args))\n")
    assert not fault(tmp_path, f"{bug}print(vars())\n")


FACTORS = """
from torch import nn


class Factors(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.user, self.item, self.bias = nn.Embedding(n, 8), nn.Embedding(n, 8), nn.Embedding(n, 1)

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(-1) + self.bias(item).squeeze(-1)

    def scores(self, user):
        return self.user(user) @ self.item.weight.T + self.bias.weight.squeeze(-1)


model = Factors(9)
print(model(0, 1), model.scores(0))
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", False),
        (" + self.bias.weight.squeeze(-1)", "", True),
        ("self.user(user) @ self.item.weight.T + self.bias.weight.squeeze(-1)", "self.user(user)", False),  # features
        ("@ self.item.weight.T + self.bias.weight.squeeze(-1)", "@ self.item.weight.T + self.logits(user)", False),
    ],
)
def test_a_ranking_without_the_bias_that_trains(tmp_path: Path, old: str, new: str, found: bool):
    assert ("ranks by" in fault(tmp_path, FACTORS.replace(old, new))) == found


EPISODE = """
def episode(z, shot, query):
    prototypes = z[:, :shot].mean(1)
    queries = z[:, shot:].reshape(-1, 8)
    return queries @ prototypes.T


print(episode(0, 1, 2))
"""


@pytest.mark.parametrize(
    ("new", "found"),
    [
        ("z[:, shot:]", False),
        ("z[:, :query]", True),
        ("z[:, -query:]", False),
        ("other[:, :query]", False),
        ("z[:query]", False),
    ],
)
def test_queries_that_hold_their_support(tmp_path: Path, new: str, found: bool):
    assert ("hold the support set" in fault(tmp_path, EPISODE.replace("z[:, shot:]", new))) == found


EPOCHS = """
import torch


def train_epoch(seed):
    print(seed)


for epoch in range(9):
    torch.manual_seed(0)
    train_epoch(torch.randperm(9))
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", True),
        ("manual_seed(0)", "manual_seed(epoch)", False),
        ("for epoch in range(9)", "for fold in range(9)", False),
        ("manual_seed(0)", "set_rng_state(state)", False),
        ("train_epoch(torch", "sampled(torch", False),
    ],
)
def test_a_seed_that_is_set_in_each_epoch(tmp_path: Path, old: str, new: str, found: bool):
    assert ("set the seed once" in fault(tmp_path, EPOCHS.replace(old, new))) == found


PARTED = """
def forward(self, x):
    batch, _, channels = x.shape
    x = x.transpose(1, 2).reshape(batch * channels, -1)
    hidden = self.encoder(x)
    return self.head(hidden.flatten(1)).reshape(batch, channels, -1).transpose(1, 2)


print(forward)
"""
UNMERGED = ".reshape(batch, channels, -1).transpose(1, 2)"


@pytest.mark.parametrize(
    ("new", "found"),
    [
        (UNMERGED, False),
        (".reshape(batch, -1, channels)", True),
        (".view(batch, 24, 7 * channels)", True),  # heads of attention
        (".reshape(batch, -1, 24)", False),
        (" + y.reshape(batch, -1, channels)", False),  # of another tensor
        (".reshape(batch, -1)", False),
        (".reshape(batch, channels, 24).permute(0, 2, 1).reshape(batch, 24, channels)", False),
    ],
)
def test_rows_that_are_parted_in_another_order(tmp_path: Path, new: str, found: bool):
    assert ("are mixed" in fault(tmp_path, PARTED.replace(UNMERGED, new))) == found


HEADS = """
class Net:
    def forward(self, x):
        x = self.body(x)
        scores = self.cls(x).permute(0, 2, 3, 1).contiguous().view(len(x), -1, 11)
        return scores, self.reg(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4)


print(Net())
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", False),
        ("self.reg(x).permute(0, 2, 3, 1)", "self.reg(x)", True),
        ("self.reg(x).permute(0, 2, 3, 1)", "self.reg(x.mean((2, 3)))", False),
        ("self.reg(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4)", "self.reg(x).reshape(len(x), -1)", False),
        ("self.reg(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4)", "self.reg(x).reshape(len(x), 4, -1)", False),
    ],
)
def test_a_head_that_is_read_by_channels(tmp_path: Path, old: str, new: str, found: bool):
    assert ("permute first" in fault(tmp_path, HEADS.replace(old, new))) == found


KEPT = """
import torch
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        skip = self.down(x)
        x = self.up(skip)
        return self.out(torch.cat([x, skip], dim=1))


def loss(p, y):
    dice = (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)
    return nn.functional.cross_entropy(p, y) + 0.5 * (1 - dice.mean())


net, best, best_acc = Net(), float("inf"), 0.0
optimizer = torch.optim.Adam(net.parameters(), weight_decay=1e-4)
for epoch in range(3):
    val_loss, acc = evaluate(net, loss, optimizer)
    if val_loss < best:
        best = val_loss
    if acc > best_acc:
        best_acc = acc
"""


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("", "", ""),
        ('float("inf"), 0.0', '-float("inf"), 0.0', "that never happens"),
        ("val_loss < best&float('inf')", "val_loss > best&-float('inf')", "the highest `val_loss`"),
        ("acc > best_acc", "acc < best_acc", "the lowest `acc`"),
        (
            "val_loss < best&float('inf')&(p, y):",
            "val_loss > best&-float('inf')&(p, y, delta=0):",
            "the highest `val_loss`",
        ),
        ("val_loss < best&float('inf')&net, best", "val_loss > best&-float('inf')&delta, net, best", ""),  # an attack
        ("acc > best_acc&best_acc = acc", "acc < best_acc&best_acc, waited = acc, 0", "the lowest `acc`"),
        ("(1 - dice.mean())", "dice.mean()", "1 minus the score"),
        ("0.5 * (1 - dice.mean())", "1 - dice.mean()", ""),
        ("dice = (2 * (p * y).sum() + 1)", "dice = 1 - (2 * (p * y).sum() + 1)", ""),
        ("[x, skip], dim=1", "[x, x], dim=1", "joins `x` with itself"),
        ("[x, skip], dim=1", "[x, x], dim=-1", ""),  # rotary phases
        ("[x, skip], dim=1", "[x, x]", ""),  # guidance
        ("weight_decay=1e-4", "weight_decay=0.05", "AdamW is meant"),
        (
            "Adam(net.parameters(), weight_decay=1e-4",
            "RAdam(net.parameters(), weight_decay=0.05, decoupled_weight_decay=True",
            "",
        ),
        ("Adam(net.parameters(), weight_decay=1e-4", "AdamW(net.parameters(), weight_decay=0.05", ""),
    ],
)
def test_a_best_result_a_term_a_channel_and_a_decay(tmp_path: Path, old: str, new: str, cause: str):
    text = KEPT.replace('"inf"', "'inf'")
    for before, after in zip(old.split("&"), new.split("&"), strict=True):
        text = text.replace(before.replace('"inf"', "'inf'"), after)
    found = fault(tmp_path, text)
    path = tmp_path / "train.py"
    measured = names.check(path).get("measured", "")
    assert cause in f"{measured} {found}" if cause else not found, (measured, found)
