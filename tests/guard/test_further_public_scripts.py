"""What ten public scripts and two bugs in each showed: losses that only attract, soft updates with exchanged sides, norms of the script's own,
candidates beside texts, targets of a loss that the script writes out on log-probabilities."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainworthy.guard.measures.data import token_pairs
from trainworthy.guard.measures.losses import supervision
from trainworthy.guard.measures.losses.attraction import Attraction
from trainworthy.guard.measures.losses.targets import fits
from trainworthy.guard.measures.models.pulled import Pulled, probe
from trainworthy.guard.measures.models.statistics import has_statistics

from tests.guard.guarding import guard

DRAW = torch.Generator().manual_seed(0)


# ---------------------------------------------------------------------------------------------------- two embeddings
@pytest.mark.parametrize(
    ("stops", "crossed", "repels", "cause"),
    [
        (True, True, False, ""),  # SimSiam
        (False, True, False, "stop-gradient is missing"),
        (True, False, False, "each view predicts itself"),
        (False, True, True, ""),  # another term pushes apart
    ],
)
def test_a_loss_that_only_attracts(stops, crossed, repels, cause):
    torch.manual_seed(0)
    seen, encoder = Attraction(), nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    predictor = nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 8))
    for _ in range(8):
        z1, z2 = encoder(torch.randn(16, 6)), encoder(torch.randn(16, 6))
        p1, p2 = predictor(z1), predictor(z2)
        y1, y2 = (z1.detach(), z2.detach()) if stops else (z1, z2)
        total = torch.zeros(())
        for p, y in ((p1, y2), (p2, y1)) if crossed else ((p1, y1), (p2, y2)):
            similarity = F.cosine_similarity(p, y)
            seen.compared(p, y, similarity)
            total = total - similarity.mean() / 2
        seen.look(total + z1.std(0).mean() if repels else total)
    found = seen.fault()
    assert cause in found[1] if cause else found is None


# ------------------------------------------------------------------------------------------------------- soft updates
@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("tau", [0.005, 1.0])
def test_trained_weights_that_follow_a_copy(exchanged, tau):
    torch.manual_seed(0)
    trained, target, seen = nn.Linear(4, 8), nn.Linear(4, 8), Pulled()
    trained, target = (nn.Sequential(x, nn.Linear(8, 2)) for x in (trained, target))
    rows = list(trained.parameters())
    start = {id(p): p.detach().clone() for p in target.parameters()}
    for _ in range(8):
        last = probe(rows)
        sides = (trained, target) if exchanged else (target, trained)
        for a, b in zip(*(m.parameters() for m in sides), strict=True):
            a.data.copy_(tau * b.data + (1 - tau) * a.data)
        seen.between(rows, last, probe(rows), [trained, target])
        for p in rows:
            p.data.add_(0.1 * torch.randn_like(p))
    found = seen.fault(lambda p: not torch.equal(p, start[id(p)]))
    assert (found is not None) == exchanged
    assert seen.fault(lambda _: True) is None  # the copy moves, too


# -------------------------------------------------------------------------------------------------------------- norms
class BatchNorm(nn.Module):
    """As the flows of many repositories have it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))


class RunningMean(BatchNorm):
    """Scales observations, in training and in evaluation."""


def test_norms_of_the_scripts_own_have_statistics():
    assert has_statistics(BatchNorm())
    assert has_statistics(nn.BatchNorm1d(4))
    others = nn.BatchNorm1d(4, track_running_stats=False), nn.LayerNorm(4), nn.InstanceNorm1d(4), RunningMean()
    assert not any(map(has_statistics, others))


FLOW = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class BatchNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))

    def forward(self, x):
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean, var = x.mean(0), x.var(0)
            self.running_mean.mul_(0.9).add_(0.1 * mean.detach())
            self.running_var.mul_(0.9).add_(0.1 * var.detach())
        return (x - mean) / (var + 1e-5).sqrt() * self.scale + self.shift


torch.manual_seed(0)
x = torch.randn(320, 8)
data = TensorDataset(x, (x[:, :2].sum(1) > 0).long())
model = nn.Sequential(nn.Linear(8, 16), BatchNorm(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(4):
    #HERE
    for a, b in DataLoader(data, 32, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(a).argmax(1) == b).sum().item() for a, b in DataLoader(data, 64))
    print(f"accuracy {right / len(data):.4f}")
"""


@pytest.mark.parametrize("missing", [True, False])
def test_a_flow_that_trains_on_in_eval_mode(tmp_path, missing):
    source = FLOW.replace("#HERE", "pass" if missing else "model.train()")
    verdicts, printed, _ = guard(source, tmp_path, **{"--only": "modes"})
    assert verdicts["modes"].blocks == missing, printed
    assert ("model.train() is missing at the start of the epoch" in printed) == missing


# ------------------------------------------------------------------------------------------------------------- tokens
def test_candidates_of_an_evaluation_are_no_texts():
    """A recommender ranks random items behind each sequence: their order is no language."""
    following = torch.randint(0, 50, (50, 3), generator=DRAW)

    def sequence():
        row = [int(torch.randint(50, (), generator=DRAW))]
        while len(row) < 20:
            row.append(int(following[row[-1], torch.randint(3, (), generator=DRAW)]))
        return torch.tensor(row)

    def random(n):
        return torch.randint(0, 50, (n,), generator=DRAW)

    train = [(sequence(), random(20)) for _ in range(400)]
    assert token_pairs.check(train, [[(sequence(), random(31), random(31)) for _ in range(100)]], float("inf")) is None
    renumbered = torch.randperm(50, generator=DRAW)
    other = [(renumbered[sequence()], random(31), random(31)) for _ in range(100)]
    assert token_pairs.check(train, [other], float("inf"))


@pytest.mark.parametrize("ignored", [True, False])
def test_one_number_for_all_that_is_not_masked(ignored):
    rows = []
    for _ in range(6):
        items = torch.randint(1, 40, (16, 20), generator=DRAW)
        masked = torch.rand(items.shape, generator=DRAW) < 0.15
        ids, target = torch.where(masked, 40, items), torch.where(masked, items, 0).flatten()
        scored = target != (0 if ignored else -100)
        rows.append({"unmasked": supervision.unmasked(ids, target, scored)})
    found = supervision.unmasked_scored(rows)
    assert found is None if ignored else "the target is 0" in found[0]


def test_tags_of_tokens_are_no_mask():
    """Most tokens of a text have the tag O; the others are of many words."""
    rows = []
    for _ in range(6):
        ids = torch.randint(1, 40, (16, 20), generator=DRAW)
        target = torch.where(torch.rand(ids.shape, generator=DRAW) < 0.15, ids % 5 + 1, 0).flatten()
        rows.append({"unmasked": supervision.unmasked(ids, target, torch.ones_like(target, dtype=torch.bool))})
    assert supervision.unmasked_scored(rows) is None


def test_answers_alone_are_enough_to_see_the_shift():
    ids = torch.randint(0, 40, (16, 20), generator=DRAW)
    target = ids.clone()
    target[:, :14] = -100
    assert fits(ids, target, 0, -100)
    assert not fits(ids, target, 1, -100)
    target[:, :18] = -100  # 32 tokens
    assert not fits(ids, target, 0, -100)


PREFERENCES = """
import torch
from torch import nn
from torch.nn import functional as F


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(30, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 30)

    def forward(self, ids):
        return self.head(self.cell(self.embed(ids))[0])


def score(model, ids):
    logits, labels = #HERE
    chosen = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return chosen[:, 8:].sum(1)


torch.manual_seed(0)
model, reference = Language(), Language()
reference.load_state_dict(model.state_dict())
reference.requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
prompts = torch.randint(0, 30, (256, 9))
good, bad = torch.cat([prompts, prompts.flip(1)], 1), torch.cat([prompts, torch.randint(0, 30, (256, 9))], 1)
for step in range(60):
    rows = torch.randint(0, 256, (16,))
    if step % 20 == 10:
        model.eval()
        with torch.no_grad():
            for part in torch.arange(64).split(16):
                margin = [score(m, good[part]) - score(m, bad[part]) for m in (model, reference)]
        model.train()
    ours = score(model, good[rows]) - score(model, bad[rows])
    with torch.no_grad():
        theirs = score(reference, good[rows]) - score(reference, bad[rows])
    optimizer.zero_grad()
    loss = -F.logsigmoid(0.5 * (ours - theirs)).mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
"""


@pytest.mark.parametrize("copies", [True, False])
def test_preferences_scored_at_their_own_tokens(tmp_path, copies):
    """The reference beside the policy in an evaluation is no average that was forgotten."""
    source = PREFERENCES.replace("#HERE", "model(ids), ids" if copies else "model(ids)[:, :-1], ids[:, 1:]")
    verdicts, printed, _ = guard(source, tmp_path, **{"--only": "targets,evaluated"})
    assert verdicts["targets"].blocks == copies, printed
    assert ("every target is the token that the model sees at the same position" in printed) == copies
    assert not verdicts["evaluated"].blocks, printed


# ------------------------------------------------------------------------------------------------------- dead models
TWO_FIELDS = """
import torch
from torch import nn

torch.manual_seed(0)
make = lambda: nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1), nn.ReLU())
coarse, fine = make(), make()
nn.init.constant_(fine[4].bias, 2.0)
nn.init.constant_(coarse[4].bias, #HERE)
optimizer = torch.optim.Adam([*coarse.parameters(), *fine.parameters()], 1e-3)
for step in range(60):
    x = torch.rand(64, 3)
    y = x.sum(1, keepdim=True)
    loss = (coarse(x) - y).square().mean() + (fine(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
"""


@pytest.mark.parametrize("dead", [True, False])
def test_one_of_two_equal_models_is_dead(tmp_path, dead):
    source = TWO_FIELDS.replace("#HERE", "-9.0" if dead else "2.0")
    verdicts, printed, _ = guard(source, tmp_path, **{"--only": "wiring"})
    assert verdicts["wiring"].blocks == dead, printed
    assert ("exactly zero" in printed) == dead
