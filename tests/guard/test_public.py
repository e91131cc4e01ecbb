"""Shapes of public scripts that were stopped although they are healthy."""

import re

import pytest
from trainworthy.core.base.errors import UserError

from tests.guard.guarding import STEPS, guard

DPO = """
import copy, torch
from torch import nn
from torch.nn.functional import logsigmoid
torch.manual_seed(0)
rms = nn.RMSNorm(16)
policy = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), rms, nn.Linear(16, 32))
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=4e-8)
data = torch.utils.data.TensorDataset(torch.randint(32, (256, 2, 8)))

def score(net, x):
    flat = x.flatten(0, 1)
    return net(flat)[:, :-1].log_softmax(-1).gather(2, flat[:, 1:, None]).sum((1, 2)).view(-1, 2)

for (x,) in torch.utils.data.DataLoader(data, 8, shuffle=True):
    with torch.no_grad():
        asked = score(reference, x)
    a, b = (score(policy, x) - asked).unbind(1)
    loss = -logsigmoid(0.1 * (a - b)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

TWO_SCORES = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
torch.manual_seed(0)
x = torch.randint(10, (600, 4))
y = (x.sum(1) > 18).long()
train, test = torch.utils.data.TensorDataset(x[:500], y[:500]), torch.utils.data.TensorDataset(x[500:], y[500:])
model = nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(4):
    model.train()
    for a, b in torch.utils.data.DataLoader(train, 25, shuffle=True):
        optimizer.zero_grad()
        cross_entropy(model(a), b).backward()
        optimizer.step()
    model.eval()
    for name, data in (("train", train), ("test", test)):
        with torch.no_grad():
            hits = sum(int((model(a).argmax(1) == b).sum()) for a, b in torch.utils.data.DataLoader(data, 50))
        print(name, hits / len(data))
"""


@pytest.mark.parametrize(
    "source", [DPO, TWO_SCORES], ids=["reference-beside-each-step", "score-on-training-samples-too"]
)
def test_quiet(source: str, tmp_path):
    verdicts, printed, _ = guard(source, tmp_path, interventions=False)
    assert not [v for v in verdicts.values() if v.blocks], printed


def test_one_score_on_the_training_samples_is_stopped(tmp_path):
    source = TWO_SCORES.replace("(10, (600, 4))", "(10, (600, 8))").replace("Linear(32, 32)", "Linear(64, 32)")
    source = source.replace("> 18", "> 36").replace('(("train", train), ("test", test))', '(("test", train),)')
    verdicts, printed, _ = guard(source, tmp_path, interventions=False)
    assert verdicts["samples"].blocks, printed


def test_updates_lost_to_rounding_everywhere_are_stopped(tmp_path):
    verdicts, printed, _ = guard(DPO.replace("4e-8", "4e-12"), tmp_path, interventions=False)
    assert verdicts["wiring"].blocks, printed


def test_a_missing_file_is_not_blamed_on_the_rehearsal(tmp_path):
    source = "import torch\ntorch.save({}, 'begin.pt')\nopen('rows.csv')\n"
    with pytest.raises(UserError) as error:
        guard(source, tmp_path, interventions=False)
    assert "rows.csv" in str(error.value)
    assert "opens files in C" not in str(error.value)


def test_a_letter_of_an_error_is_not_taken_for_a_written_folder(tmp_path):
    source = "import os\nos.makedirs('o')\nopen('o/a', 'w').close()\nraise AttributeError('TPU')\n"
    with pytest.raises(UserError) as error:
        guard(source, tmp_path, interventions=False)
    assert "TPU" in str(error.value)
    assert "opens files in C" not in str(error.value)


def test_an_error_in_a_worker_is_named(tmp_path):
    source = """
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        raise ValueError("row is broken")
next(iter(torch.utils.data.DataLoader(Rows(), 2, num_workers=1)))
"""
    with pytest.raises(UserError) as error:
        guard(source, tmp_path, interventions=False)
    assert "ValueError: row is broken" in str(error.value)


CACHE = """
import os, torch
from torch.nn.functional import cross_entropy
cache = os.environ["HF_DATASETS_CACHE"]
os.makedirs(cache, exist_ok=True)
os.makedirs("logs/one")
assert os.statvfs(cache).f_namemax and os.statvfs("logs/one").f_namemax
open(os.path.join(cache, "rows"), "w").close()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in torch.utils.data.DataLoader([(torch.randn(4), i % 2) for i in range(64)], 8, shuffle=True):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def test_a_cache_folder_may_be_new(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    verdicts, printed, _ = guard(CACHE, tmp_path / "here", interventions=False)
    assert verdicts["finite"].verdict == "pass", printed
    assert (tmp_path / "cache" / "rows").exists()
    assert not (tmp_path / "here" / "logs").exists()


TOKENIZER = (
    """
import importlib.util, os, torch
assert importlib.util.find_spec("tokenizers")  # as libraries do that ask what is installed
from tokenizers import Tokenizer, models
"""
    + STEPS
    + """
os.makedirs("logs")
Tokenizer(models.WordLevel({"a": 0}, "a")).save("logs/tokenizer.json")
assert Tokenizer.from_file("logs/tokenizer.json").get_vocab_size() == 1
"""
)


def test_a_library_that_was_looked_up_before_its_import_is_redirected(launch, tmp_path):
    """In a process of its own: where tokenizers was imported before, nothing is looked up."""
    pytest.importorskip("tokenizers")
    (tmp_path / "train.py").write_text(TOKENIZER)
    done = launch("guard", "train.py", "--seconds", "1", "--no-interventions")
    assert done.returncode == 0, done.shown
    assert not (tmp_path / "logs").exists()


SCHEDULERS = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, StepLR


def main():
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    restarts = CosineAnnealingWarmRestarts(optimizer, 4)
    scheduler = StepLR(optimizer, 1, 0.1)
    best = 0.0
    for epoch in range(8):
        loader = torch.utils.data.DataLoader(data, 16, shuffle=True)
        for i, (a, b) in enumerate(loader):
            (cross_entropy(model(a), b) / 2).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
            restarts.step(epoch + i / len(loader))
        with torch.no_grad():
            accuracy = (model(x).argmax(1) == data.tensors[1]).float().mean().item()
        if accuracy < best - 0.5:
            scheduler.step()
        best = max(best, accuracy)


main()
"""


def test_schedulers_that_wait_or_are_told_the_epoch(tmp_path):
    """A step() in a branch that is not reached is not missing, and one that is told the epoch may be called at every micro-batch. The
    function that made the optimiser has returned when it is judged."""
    verdicts, output, _ = guard(SCHEDULERS, tmp_path, **{"--only": "schedule,wiring,gradients"})
    assert [v.verdict for v in verdicts.values() if v.id in ("schedule", "wiring", "gradients")] == ["pass"] * 3, output
    never = re.sub(r"(scheduler|restarts)\.step\(.*\)", "pass", SCHEDULERS)
    assert "was never stepped" in guard(never, tmp_path, **{"--only": "schedule"})[1]
