"""The check of names in a script's source: exchanged arguments, results and splits are found; orders that are meant are not."""

from pathlib import Path

import pytest
from trainworthy.guard.checks import names

from tests.conftest import patched
from tests.guard.guarding import guard

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]

TRAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from sklearn.metrics import r2_score

mean, std = (0.5,), (0.2,)
train_transform = transforms.Compose([transforms.RandomCrop(28, 4), transforms.ToTensor(), transforms.Normalize(mean, std)])
val_transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])


class Pairs(Dataset):
    def __init__(self, root, transform):
        self.rows, self.transform = list(root), transform

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        image, label = self.rows[i]
        return image, label


def weighted(pred, target, scale=1.0):
    return (scale * (1 + target) * (pred - target) ** 2).mean()


def overlap(pred, target):
    p, t = pred.flatten(), target.flatten()
    both = (p * t).sum()
    return 2 * both / (p.sum() + t.sum())


def moments(x):
    mu, logvar = x.chunk(2)
    return mu, logvar


def evaluate(model, loader):
    return sum(float(model(image).mean()) for image, label in loader)


train_set, val_set = Pairs(range(9), train_transform), Pairs(range(9), val_transform)
train_loader, val_loader = DataLoader(train_set, 4, shuffle=True), DataLoader(val_set, 4)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
for epoch in range(3):
    for image, label in train_loader:
        noisy_image = image + torch.randn_like(image)
        pred, target = model(noisy_image), label.float()
        mu, logvar = moments(pred)
        loss = weighted(pred, target) - overlap(pred, target)
        loss.backward()
        optimizer.step()
    val_score = evaluate(model, val_loader)
    print("val", val_score, r2_score(target, pred))
"""

BUGS = {
    "arguments": (
        "loss = weighted(pred, target)",
        "loss = weighted(target, pred)",
        "exchanged: pass them in the order",
    ),
    "results": ("mu, logvar = moments(pred)", "logvar, mu = moments(pred)", "each holds the other's values"),
    "keywords": (
        "lr=args.lr, weight_decay=args.weight_decay",
        "lr=args.weight_decay, weight_decay=args.lr",
        "`lr` and",
    ),
    "normalize": (
        "val_transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])",
        "val_transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(std, mean)])",
        "Normalize() takes mean before",
    ),
    "metric": ("r2_score(target, pred)", "r2_score(pred, target)", "r2_score() takes true values before"),
    "metric of a module": (
        'print("val", val_score, r2_score(target, pred))',
        'from sklearn import metrics\n    print("val", metrics.recall_score(pred, target), val_score)',
        "recall_score() takes true values before",
    ),
    "batches": (
        "for image, label in train_loader:",
        "for label, image in train_loader:",
        "each holds the other's values",
    ),
    "transform": (
        "Pairs(range(9), val_transform)\n",
        "0\nval_set = Pairs(range(9), train_transform)\n",
        "`val_transform` is meant",
    ),
    "evaluation": (
        "val_score = evaluate(model, val_loader)",
        "val_score = evaluate(model, train_loader)",
        "`val_loader` is meant",
    ),
    "printed": (
        'val_score = evaluate(model, val_loader)\n    print("val", val_score,',
        'print("val", evaluate(model, train_loader),',
        "`val_loader` is meant",
    ),
    "input": ("model(noisy_image)", "model(image)", "`noisy_image` is meant in the later lines"),
}
HEALTHY = {
    "as it is": [],
    "a symmetric function": [("overlap(pred, target)\n        loss.", "overlap(target, pred)\n        loss.")],
    "a score of another library": [("from sklearn.metrics import", "from torchmetrics.functional import"),
                                   ("r2_score(target, pred)", "r2_score(pred, target)")],
    "both orders": [("loss = weighted(pred, target)", "loss = weighted(pred, target) + weighted(target, pred)")],
    "by keyword": [("loss = weighted(pred, target)", "loss = weighted(target=target, pred=pred)")],
    "score of the training set": [
        ("    val_score", "    train_score = evaluate(model, train_loader)\n    val_score")
    ],
    "a split by sampler": [
        ("val_loader = DataLoader(train_set, 4, shuffle=True), DataLoader(val_set, 4)",
         "val_loader = DataLoader(train_set, 4, sampler=val_set), DataLoader(train_set, 4, sampler=val_set)"),
    ],
    "a function of another file": [("def weighted(pred, target, scale=1.0)", "def unused(pred, target, scale=1.0)"),
                                   ("loss = weighted(pred, target)", "loss = weighted(target, pred)")],
    "training statistics for the validation": [
        ("    val_score", "    train_stats, val_stats = model.stats()\n    val_norm = scale(train_stats)\n    val_score")
    ],
    "a split that is not used": [
        ("    val_score", "    x_train, y_train, x_val, y_val = data()\n    val_pred = model(x_train)\n    val_score")
    ],
    "two layers of one size": [
        ("def moments(x)", "class Heads(nn.Module):\n    def __init__(self, features, latent):\n        super().__init__()\n"
                           "        self.mean = nn.Linear(64, latent)\n        self.logvar = nn.Linear(64, latent)\n\n\ndef moments(x)")
    ],
    "a classifier of neighbours": [
        ("    val_score", "    y_train, y_val, x_train, x_val = data()\n    val_pred = knn(x_train, y_train, x_val)\n    val_score")
    ],
}  # fmt: skip


def checked(folder: Path, source: str, **modules: str) -> dict:
    for name, text in {"train": source, **modules}.items():
        (folder / f"{name}.py").write_text(text)
    return names.check(folder / "train.py")


@pytest.mark.parametrize("name", BUGS)
def test_names_in_the_wrong_place(tmp_path, name):
    old, new, words = BUGS[name]
    found = checked(tmp_path, patched(TRAIN, (old, new)))
    assert words in found["cause"], found
    assert "line " in found["measured"]
    assert "train.py" in found["measured"]


@pytest.mark.parametrize("name", HEALTHY)
def test_orders_that_are_meant(tmp_path, name):
    found = checked(tmp_path, patched(TRAIN, *HEALTHY[name]))
    assert not found["cause"], found


def test_functions_of_the_scripts_own_modules(tmp_path):
    source = patched(TRAIN, ("import torch\n", "import torch\nfrom losses import weighted\n"),
                     (TRAIN[TRAIN.index("def weighted") : TRAIN.index("def overlap")], ""),
                     ("loss = weighted(pred, target)", "loss = weighted(target, pred)"))  # fmt: skip
    assert not checked(tmp_path, source)["cause"]  # no such file
    module = "def weighted(pred, target):\n    return (target * (pred - target) ** 2).mean()\n"
    assert "exchanged" in checked(tmp_path, source, losses=module)["cause"]


CACHED = """
import torch
from torch.utils.data import DataLoader

train_loader = DataLoader(data, batch_size=32, shuffle=True)
steady_loader = DataLoader(data, batch_size=32, shuffle=False)


def soft_targets(teacher, loader):
    kept = []
    with torch.no_grad():
        for x, y in loader:
            kept.append(teacher(x))
    return kept


def train(student, loader, teacher_logits):
    for i, (x, y) in enumerate(loader):
        loss = kd(student(x), teacher_logits[i], y)
        loss.backward()


cached = soft_targets(teacher, train_loader)
train(student, train_loader, cached)
"""
FLAT = """
import torch
from torch.utils.data import DataLoader

train_loader = DataLoader(data, batch_size=32, shuffle=True)
outputs, losses = [], []
for x, y in train_loader:
    outputs.append(teacher(x))
outputs = torch.cat(outputs)
for epoch in range(3):
    for i, (x, y) in enumerate(train_loader):
        loss = kd(student(x), outputs[i * 32 : (i + 1) * 32])
        loss.backward()
        losses.append(loss.item())
        if losses[i] > 5:
            print(losses[i])
"""


@pytest.mark.parametrize(
    ("source", "changes", "wrong"),
    [
        (CACHED, [], True),
        (CACHED, [("soft_targets(teacher, train_loader)", "soft_targets(teacher, steady_loader)")], True),
        (CACHED, [("train(student, train_loader", "train(student, steady_loader")], False),
        (CACHED, [("shuffle=True", "shuffle=True, generator=seeded")], False),
        (CACHED, [("enumerate(loader)", "enumerate(zip(loader, order))")], False),
        (CACHED, [("teacher_logits[i]", "teacher_logits[y]")], False),
        (FLAT, [], True),
        (FLAT, [("outputs[i * 32 : (i + 1) * 32]", "outputs[y]")], False),
        (FLAT, [("outputs[i * 32 : (i + 1) * 32]", "teacher(x)")], False),
    ],
)
def test_results_kept_by_the_number_of_a_batch(tmp_path, source, changes, wrong):
    """A loader that is shuffled has another order in each pass."""
    found = checked(tmp_path, patched(source, *changes))
    assert bool(found["cause"]) == wrong, found
    assert not wrong or "which is shuffled" in found["measured"]


def test_modules_of_a_package(tmp_path):
    """`python -m pkg.train` finds its modules from the folder above the package."""
    source = "from pkg.losses import weighted\nfrom .more import scaled\nloss = {}(target, pred)\n"
    package = tmp_path / "pkg"
    package.mkdir()
    for name, text in {"__init__": "", "losses": "def weighted(pred, target):\n    return pred / target\n",
                       "more": "def scaled(pred, target):\n    return pred / target\n"}.items():  # fmt: skip
        (package / f"{name}.py").write_text(text)
    for name in ("weighted", "scaled"):
        found = checked(package, source.format(name))
        assert "exchanged" in found["cause"], found
        assert "of pkg/train.py" in found["measured"] or "of train.py" in found["measured"]


def test_functions_that_the_script_does_not_use(tmp_path):
    """A fault in a part of a library that this script never names does not stop it."""
    module = "def weighted(pred, target):\n    return pred / target\n\n\ndef other(pred, target):\n    return weighted(target, pred)\n"
    source = "import losses\n\n\ndef main():\n    print(losses.weighted(pred, target))\n\n\nmain()\n"
    assert not checked(tmp_path, source, losses=module)["cause"]
    assert "exchanged" in checked(tmp_path, source.replace("losses.weighted(", "losses.other("), losses=module)["cause"]


CLASSES = """
class Vae:
    def __init__(self, hidden, latent):
        self.net = Body(hidden, latent)
        self.back = Body(latent, hidden)

    def sample(self, mu, logvar):
        return mu + 2 * logvar

    def forward(self, x):
        mu, logvar = self.net(x)
        return self.sample(mu, logvar)


class Body:
    def __init__(self, hidden, latent):
        self.sizes = hidden, latent


vae = Vae(8, 2)


class Loss:
    def forward(self, logits, labels):
        return (labels * logits).logsumexp(0) + labels


criterion = Loss().to(device)
loss = criterion(logits, labels)
"""


def test_methods_and_objects(tmp_path):
    assert not checked(tmp_path, CLASSES)["cause"]
    for old, new in (
        ("criterion(logits, labels)", "criterion(labels, logits)"),
        ("sample(mu, logvar)\n\n\n", "sample(logvar, mu)\n\n\n"),
    ):
        assert "exchanged" in checked(tmp_path, patched(CLASSES, (old, new)))["cause"]
    other = patched(
        CLASSES, ("criterion(logits, labels)", "criterion(labels, logits)"), ("loss =", "criterion = make()\nloss =")
    )
    assert not checked(tmp_path, other)["cause"]  # another one, perhaps


def test_values_that_are_never_read_are_told(tmp_path):
    found = checked(
        tmp_path, patched(TRAIN, ("        loss.backward()", "        penalty = loss.pow(2)\n        loss.backward()"))
    )
    assert not found["cause"]
    assert "never read: penalty (line" in found["measured"]


@pytest.mark.parametrize("folder", [SCRIPTS, ROOT / "recipes", ROOT / "examples"], ids=lambda p: p.name)
def test_healthy_scripts_raise_no_alarm(folder):
    found = {str(p.relative_to(ROOT)): names.check(p) for p in sorted(folder.rglob("*.py"))}
    assert len(found) > 3
    assert not {n: f["measured"] for n, f in found.items() if f.get("cause")}


def test_the_check_is_part_of_guard(tmp_path):
    source = (SCRIPTS / "plain_sgd.py").read_text()
    source += "\n\ndef scaled(pred, target):\n    return pred / target\n\n\npred, target = 1.0, 2.0\nprint(scaled(target, pred))\n"
    verdicts, printed, _ = guard(source, tmp_path, interventions=False)
    assert verdicts["names"].blocks, printed
    assert "`target` and `pred` are exchanged" in printed


@pytest.mark.parametrize(("line", "wrong"), [("loss =+ aux", True), ("self.total =+ f(x)", True), ("loss = +aux", False),
                                             ("x=+y", False), ("sign =+ 1", False), ("loss += aux", False)])  # fmt: skip
def test_a_sum_that_replaces(tmp_path, line, wrong):
    script = tmp_path / "train.py"
    script.write_text(
        f"def train(self, loss, aux, f, x, y):\n    {line}\n    return loss\n\n\nprint(train(1, 2, 3, 4, 5, 6))\n"
    )
    assert bool(names.check(script).get("cause")) == wrong


@pytest.mark.parametrize(("start", "test", "wrong"), [
    ("best_loss = 0.0", "loss < best_loss", True), ("best_loss, at = 0, 1", "best_loss > loss", True),
    ("best_loss = -float('inf')", "loss < best_loss", True), ("best_loss = 1e9", "loss > best_loss", True),
    ("best_loss = float('inf')", "loss < best_loss", False), ("best_loss = -math.inf", "loss > best_loss", True),
    ("best_loss = 0.0", "loss > best_loss", True), ("best_loss = -math.inf", "-loss > best_loss", False),
    ("best_loss = None", "loss < best_loss", False),
    ("best_loss = 10", "loss < best_loss", False)])  # fmt: skip
def test_a_best_value_that_nothing_beats(tmp_path, start, test, wrong):
    script = tmp_path / "train.py"
    script.write_text(
        f"import math\n\n{start}\nfor loss in (0.5, 0.4):\n    if {test}:\n        best_loss = loss\n        print('saved', math.pi)\n"
    )
    assert bool(names.check(script).get("cause")) == wrong


def test_a_score_that_is_to_fall_from_0_or_begins_again_for_each_fold(tmp_path):
    """A log-likelihood or a change may be below 0, and a second start leaves open which of them holds."""
    for lines in ("best = 0\nfor delta in (-1, -2):\n    if delta < best:\n        best = delta\n",
                  "best_loss = 0\nbest_loss = 9\nfor loss in (1, 2):\n    if loss < best_loss:\n        best_loss = loss\n"):  # fmt: skip
        (tmp_path / "train.py").write_text(lines + "print(1)\n")
        assert not names.check(tmp_path / "train.py").get("cause"), lines
