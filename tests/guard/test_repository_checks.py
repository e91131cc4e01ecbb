"""Checks that were wrong on popular public repositories, or missed a fault of theirs: codes returned with their samples, lengths of schedules,
ignored classes, contrastive scores, decoders."""

from tests.conftest import patched
from tests.guard.guarding import guard

CODE = """
import torch
from torch import nn

torch.manual_seed(0)

class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.spread, self.back = nn.Linear(20, 32), nn.Linear(32, 6), nn.Linear(32, 6), nn.Linear(6, 20)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.exp(0.5 * spread) * torch.randn_like(mean)
        return self.back(z), mean, spread, z

model = Vae()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(400, 20))
for epoch in range(3):
    for (x,) in torch.utils.data.DataLoader(data, 20, shuffle=True):
        made, mean, spread, z = model(x)
        divergence = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
        loss = (((made - x) ** 2).sum() + 0.002 * divergence) / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_a_sample_of_the_code_that_a_model_returns_is_no_variance(tmp_path):
    verdicts, printed, _ = guard(CODE, tmp_path, interventions=False)
    assert verdicts["direction"].verdict == "pass", printed
    broken = patched(CODE, ("spread.exp())", "spread)"))
    verdicts, printed, _ = guard(broken, tmp_path, interventions=False)
    assert "no gradient for the variance" in verdicts["direction"].measured, printed


PACE = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(160, 4)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), 8, shuffle=True)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
for epoch in range(0, 0 + 200):
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    scheduler.step()
"""


def test_a_number_of_epochs_may_be_a_multiple_of_the_length_of_an_epoch(tmp_path):
    verdicts, printed, _ = guard(PACE, tmp_path, interventions=False)
    assert not verdicts["schedule"].blocks, printed
    for length in ("10 * len(loader)", "len(loader)"):
        broken = patched(PACE, ("T_max=200", f"T_max={length}"))
        verdicts, printed, _ = guard(broken, tmp_path, interventions=False)
        assert verdicts["schedule"].blocks, printed


TWO_HEADS = """
import torch
from torch import nn

torch.manual_seed(0)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        words = torch.randint(4, 60, (10,))
        hidden = torch.rand(10) < 0.3
        return words.masked_fill(hidden, 3), words.masked_fill(~hidden, 0), torch.randint(2, ())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.word, self.pair = nn.Embedding(60, 16), nn.Linear(16, 60), nn.Linear(16, 2)

    def forward(self, x):
        h = self.embed(x)
        return self.pair(h.mean(1)).log_softmax(-1), self.word(h).log_softmax(-1)


model, criterion = Net(), nn.NLLLoss(ignore_index=0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, hidden, follows in torch.utils.data.DataLoader(Rows(), 16, shuffle=True):
    pair, word = model(x)
    loss = nn.functional.nll_loss(pair, follows) + criterion(word.transpose(1, 2), hidden)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_loss_of_two_classes_that_ignores_one(tmp_path):
    verdicts, printed, _ = guard(TWO_HEADS, tmp_path, interventions=False)
    assert verdicts["targets"].verdict == "pass", printed
    broken = patched(TWO_HEADS, ("nn.functional.nll_loss(pair, follows)", "criterion(pair, follows)"))
    verdicts, printed, _ = guard(broken, tmp_path, interventions=False)
    assert "ignores class 0" in verdicts["targets"].measured, printed


VIEWS = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
rows = torch.randn(256, 12)


def scores(z):
    z = F.normalize(z, dim=1)
    all_pairs, n = z @ z.t(), len(z)
    same = torch.arange(n // 2).repeat(2)
    same, alone = same[None] == same[:, None], torch.eye(n, dtype=torch.bool)
    positive = all_pairs[same & ~alone].view(n, 1)
    return torch.cat([positive, all_pairs[~same].view(n, -1)], 1) / 0.1, torch.zeros(n, dtype=torch.long)


model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(rows, torch.zeros(256, dtype=torch.long))
for epoch in range(20):
    for x, _ in torch.utils.data.DataLoader(data, 32, shuffle=True):
        views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
        loss = F.cross_entropy(*scores(model(views)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_views_of_eight_repeated_samples_cannot_be_told_apart(tmp_path):
    verdicts, printed, _ = guard(VIEWS, tmp_path)
    assert not [v for v in verdicts.values() if v.blocks], printed
    assert "repetitions" in verdicts["overfit"].reason, printed


DECODER = """
import torch
from torch import nn

torch.manual_seed(0)
source = torch.randint(3, 40, (400, 8))
target = torch.cat([torch.full((400, 1), 1), source.flip(1), torch.full((400, 1), 2)], 1)


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(40, 32), nn.Embedding(16, 32)
        self.body = nn.Transformer(32, 2, 1, 1, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 40)

    def read(self, x):
        return self.embed(x) + self.place(torch.arange(x.shape[1]))

    def forward(self, src_seq, trg_seq):
        mask = nn.Transformer.generate_square_subsequent_mask(trg_seq.shape[1])
        return self.head(self.body(self.read(src_seq), self.read(trg_seq), tgt_mask=mask))


model = Translator()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(source, target)
for epoch in range(4):
    for src, trg in torch.utils.data.DataLoader(data, 25, shuffle=True):
        out = model(src, trg[:, :-1])
        loss = nn.functional.cross_entropy(out.reshape(-1, 40), trg[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_a_decoder_must_not_see_the_tokens_that_follow(tmp_path):
    verdicts, printed, _ = guard(DECODER, tmp_path, interventions=False)
    assert not [v for v in verdicts.values() if v.blocks], printed
    assert "only later tokens" in verdicts["dependency"].measured, printed
    broken = patched(DECODER, ("tgt_mask=mask", "tgt_mask=None"))
    verdicts, printed, _ = guard(broken, tmp_path, interventions=False)
    assert verdicts["dependency"].blocks, printed
    smoothed = (
        "loss = nn.functional.cross_entropy(out.reshape(-1, 40), trg[:, 1:].reshape(-1))",
        "gold, logs = trg[:, 1:].reshape(-1), out.reshape(-1, 40).log_softmax(1)\n"
        "        smooth = torch.full_like(logs, 0.1 / 39).scatter(1, gold[:, None], 0.9)\n"
        "        loss = -(smooth * logs).sum(1).mean()",
    )
    for source, wrong in ((DECODER, False), (broken, True)):
        verdicts, printed, _ = guard(patched(source, smoothed), tmp_path, interventions=False)
        assert verdicts["dependency"].blocks == wrong, printed


def test_a_scheduler_may_be_stepped_in_another_module(tmp_path):
    (tmp_path / "loop.py").write_text(
        "def after(epoch, scheduler):\n    if epoch >= 100:  # constant before\n        scheduler.step()\n"
    )
    later = patched(PACE, ("import torch\nfrom torch", "import torch\nfrom loop import after\nfrom torch"),
                    ("    scheduler.step()", "    after(epoch, scheduler)"))  # fmt: skip
    verdicts, printed, _ = guard(later, tmp_path, interventions=False)
    assert not verdicts["schedule"].blocks, printed
    never = patched(later, ("    after(epoch, scheduler)", "    after(epoch, loader)"))
    (tmp_path / "loop.py").write_text("def after(epoch, rate):\n    pass\n")
    verdicts, printed, _ = guard(never, tmp_path, interventions=False)
    assert "never stepped" in verdicts["schedule"].measured, printed
