"""Habits of everyday scripts: one call evaluates the whole test set, batches are in order of length, the output goes to a log file."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler
from trainworthy.guard.checks import interventions, loss, progress, samples
from trainworthy.guard.measures.losses import targets
from trainworthy.guard.rehearsals import control, sandbox
from trainworthy.guard.rehearsals.control import Control, Plan
from trainworthy.guard.rehearsals.rehearsal import Outcome

from tests.guard.guarding import guard

NOTEBOOK = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(1200, 8)
y = (x[:, :4].sum(1) > 0).long()
train_x, train_y, test_x, test_y = x[:800], y[:800], x[800:], y[800:]
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(200):
    net.train()
    order = torch.randperm(800)
    for i in range(0, 800, 40):
        rows = order[i : i + 40]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(train_x[rows]), train_y[rows]).backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        accuracy = (net(test_x).argmax(1) == test_y).float().mean().item()
    print(f"epoch {epoch} acc {accuracy:.3f}")
"""
MODES = {"--only": "modes"}


def test_one_call_on_the_whole_test_set_is_an_evaluation(tmp_path):
    verdicts, output, _ = guard(NOTEBOOK, tmp_path / "right", **MODES)
    assert verdicts["modes"].verdict == "pass", output
    assert " 0 evaluations" not in output
    verdicts, output, _ = guard(NOTEBOOK.replace("    net.eval()\n", ""), tmp_path / "wrong", **MODES)
    assert verdicts["modes"].blocks, output
    assert "model.eval() is missing before the evaluation" in output


def test_the_accuracy_of_a_training_batch_is_no_evaluation(tmp_path):
    """A number to look at: the batch is scored in train mode, with dropout, every tenth step."""
    look = (
        "        optimizer.step()\n        if i % 400 == 0:\n            with torch.no_grad():\n"
        "                print('batch', net(train_x[rows]).argmax(1).eq(train_y[rows]).float().mean())\n"
    )
    source = NOTEBOOK.replace("        optimizer.step()\n", look)
    assert source != NOTEBOOK
    verdicts, output, _ = guard(source, tmp_path, **MODES)
    assert not verdicts["modes"].blocks, output


def packed(n: int = 20):
    """Inputs with their lengths, the longest first, and targets joined into one row, as for `ctc_loss`."""
    lengths = torch.arange(30, 30 - n, -1)
    counts = torch.arange(n) % 3 + 1
    return torch.arange(n).view(n, 1).expand(n, 30).clone(), lengths, torch.arange(n).repeat_interleave(counts), counts


def test_eight_samples_stay_in_order_of_length():
    x, lengths, _, _ = eight = control.same_eight(packed(), 20)
    assert bool((lengths.diff() <= 0).all())
    assert set(x[:, 0].tolist()) == set(range(8))
    assert lengths.tolist() == [30 - k for k in x[:, 0].tolist()]
    assert eight[2].tolist() == [k for k, m in zip(x[:, 0].tolist(), eight[3].tolist(), strict=True) for _ in range(m)]
    # without lengths the eight follow each other
    assert control.same_eight([torch.arange(20)], 20)[0].tolist() == [k % 8 for k in range(20)]


@pytest.mark.parametrize("steps", [40, 1000])
def test_a_rehearsal_is_as_long_as_its_setting(steps: int):
    """`--steps 1000` was cut after 400."""
    one = Control(Plan(steps=steps, seconds=0.0), print)
    ends = [n for n in range(1, 1100) if one.enough(SimpleNamespace(steps=n, backwards=n))]
    assert ends[0] == steps


def test_where_inputs_are_in_order_of_length_the_targets_are_exchanged():
    one = Control(Plan("others", target=2, inputs=[0, 1]), print)
    first, changed = packed(), 0
    for _ in range(4):
        x, lengths, targets, counts = one.intervene(1, first)
        assert bool((lengths.diff() <= 0).all())
        assert lengths.tolist() == [30 - k for k in x[:, 0].tolist()]
        owners = [int(part[0]) for part in targets.split(counts.tolist())]
        pairs = set(zip(x[:, 0].tolist(), owners, strict=True))
        assert len(pairs) == 8  # each of the eight has one partner
        changed += sum(a != b for a, b in pairs)
    assert changed > 16


def test_the_log_that_guard_prints_to_is_no_file_of_the_script(tmp_path):
    log = tmp_path / "guard.txt"
    kept = os.dup(1)
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            before = sandbox.snapshot(tmp_path)
            os.write(1, b"a line\n")
            (tmp_path / "other.txt").write_text("x")
            changed = sandbox.changed(before, sandbox.snapshot(tmp_path))
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert changed == [str(tmp_path / "other.txt")]


FOLDS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(600, 8)
y = (x[:, :4].sum(1) > 0).long()
for fold in range(40):
    held = torch.arange(600) % 5 == fold % 5
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for epoch in range(8):
        for a, b in DataLoader(TensorDataset(x[~held], y[~held]), 32, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(a), b).backward()
            optimizer.step()
        right = 0
        with torch.no_grad():
            for a, b in DataLoader(TensorDataset(x[held], y[held]), 60):
                right += (net(a).argmax(1) == b).sum().item()
        print(f"fold {fold} accuracy {right / int(held.sum()):.3f}")
"""


def test_short_folds_are_trainings_one_after_the_other(tmp_path):
    """Each fold has its own optimiser: eight samples are memorised in the first one."""
    verdicts, output, _ = guard(FOLDS, tmp_path / "right", **{"--only": "overfit,metric"})
    assert [verdicts[k].verdict for k in ("overfit", "metric")] == ["pass", "pass"], output


def test_optimisers_that_take_turns_are_not_successive():
    assert loss.successive([(0, 39), (40, 80), (81, 81)])
    assert loss.successive([(5, 9)])
    assert not loss.successive([(0, 78), (1, 79)])


def test_weights_within_a_line_search_have_not_moved():
    """A run whose weights are held may be stopped within a step of LBFGS, which moves them to and fro."""
    drawn = torch.zeros(4)
    p = torch.nn.Parameter(torch.ones(4))
    seen = SimpleNamespace(
        trainings={},
        leaves={id(p): (p, 1)},
        snap={id(p): (p, drawn)},
        losses=[],
        steps=1,
        passes=[],
        from_file=False,
        roots={},
        holding=True,
    )
    assert progress.facts(SimpleNamespace(**vars(seen), kept=[]))["moved"] > 1
    assert progress.facts(SimpleNamespace(**vars(seen), kept=[(p, drawn)]))["moved"] == 0


class Alternating(Sampler):
    """One half of the data in each epoch."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter(range(self.epoch % 2, 400, 2))

    def __len__(self):
        return 200


@pytest.mark.parametrize(
    ("sampler", "missing"),
    [
        (RandomSampler(range(10**6), replacement=True, num_samples=200), False),  # crops of one picture
        (RandomSampler(range(400), num_samples=64), False),  # an epoch is a number of samples
        (Alternating(), False),
        (RandomSampler(range(200)), True),
        (RandomSampler(range(200), replacement=True, num_samples=600), True),
    ],
)
def test_samples_that_later_epochs_draw_are_not_left_out(sampler, missing: bool):
    data = range(10**6) if getattr(sampler, "num_samples", 0) == 200 and sampler.replacement else range(400)
    one = SimpleNamespace(loader=DataLoader(data, 8, sampler=sampler))
    found = samples.never(SimpleNamespace(ranks=1, passes=[one]), [one])
    assert bool(found) == missing, found


def test_a_script_that_is_busy_when_its_time_is_over():
    assert "within its time" in progress.unsuitable(Outcome(late=True))
    assert "could not be followed" in progress.unsuitable(Outcome())


def test_a_model_that_only_just_answers_the_most_frequent_class_may_still_learn():
    """Seven of eight samples have one class: the loss falls to that of their frequencies before the input is used."""
    own = [0.68, 0.68, 0.68, 0.67, 0.66, 0.64, 0.61, 0.57, 0.53, 0.5, 0.47, 0.44, 0.42, 0.4, 0.39] + 20 * [0.37]
    rows = [{"counts": [28, 4]} for _ in own]
    facts = {"nll": own, "train_accuracy": [0.875] * len(own), "constant": targets.constant_losses(rows)}
    assert round(facts["constant"][0], 3) == 0.377
    assert "best constant" in interventions.overfit(facts, facts)["skip"]
    long = [*own, *15 * [0.372]]
    facts = {"nll": long, "train_accuracy": [0.875] * len(long), "constant": [0.377] * len(long)}
    assert interventions.overfit(facts, facts)["cause"]
    # a last batch of two samples of the frequent class has another loss
    rows[-1]["counts"] = [2, 0]
    assert targets.constant_losses(rows)[-1] < 0.15


def test_eight_samples_with_one_rare_label_get_more_of_them():
    x = torch.arange(40).float()[:, None]
    for places, rows in (([3, 12, 20], [0, 1, 2, 3, 4, 5, 12, 20]), ([3, 5, 20], None), ([3], None), ([], None)):
        y = torch.zeros(40, dtype=torch.int64)
        y[places] = 1
        assert control.varied([x, y], 1) == rows


def test_a_test_set_of_another_scale_in_a_loop_without_loaders(tmp_path):
    only = {"--only": "evaluated"}
    verdicts, output, _ = guard(NOTEBOOK, tmp_path / "right", **only)
    assert verdicts["evaluated"].verdict == "pass", output
    assert "inputs: mean" in output
    wrong = NOTEBOOK.replace("net(test_x)", "net(test_x * 0.25 + 2)")
    verdicts, output, _ = guard(wrong, tmp_path / "wrong", **only)
    assert verdicts["evaluated"].blocks, output


TAUGHT = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
net = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
student, teacher = net(), net()
optimizer = torch.optim.Adam(student.parameters(), 1e-3)
teacher.{mode}()
for epoch in range(8):
    student.train()
    for x, y in torch.utils.data.DataLoader(data, 16, shuffle=True):
        with torch.no_grad():
            goal = teacher(x).softmax(1)
        loss = nn.functional.cross_entropy(student(x), goal) + nn.functional.cross_entropy(student(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters()):
                old.lerp_(new, {follows})
"""


@pytest.mark.parametrize(("mode", "follows", "wrong"), [("train", 0, True), ("eval", 0, False), ("train", 0.01, False)])
def test_a_teacher_that_answers_with_dropout(mode: str, follows: float, wrong: bool, tmp_path) -> None:
    """A moving average in train mode is a mean teacher."""
    verdicts, output, _ = guard(TAUGHT.format(mode=mode, follows=follows), tmp_path, interventions=False)
    assert ("answers differ each time" in verdicts["modes"].remedy) == wrong, output


SAVED = """
import torch
from accelerate import Accelerator
from torch import nn

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
x = torch.randn(256, 8)
y = (x[:, :4].sum(1) > 0).long()
net = nn.Linear(8, 2)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
net, optimizer = accelerator.prepare(net, optimizer)
for epoch in range(20):
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(net(x), y))
    optimizer.step()
    accelerator.save_state("{folder}")
accelerator.load_state("{folder}")
print("accuracy", (net(x).argmax(1) == y).float().mean().item())
"""


@pytest.mark.parametrize("there", [False, True])
def test_states_that_accelerate_saves_are_held_back(tmp_path, there):
    """Accelerate imports `save_file` by name, before the sandbox: a rehearsal wrote over the user's own checkpoint."""
    folder = tmp_path / "state"
    if there:
        folder.mkdir()
        (folder / "model.safetensors").write_text("mine")
    verdicts, output, _ = guard(SAVED.format(folder=folder), tmp_path / "run")
    assert not any(v.blocks for v in verdicts.values()), output
    assert folder.exists() == there
    if there:
        assert [(p.name, p.read_text()) for p in folder.iterdir()] == [("model.safetensors", "mine")]
