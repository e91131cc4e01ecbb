"""Captions that are packed as input and as target: a picture in front of them, or a shift by one, or neither."""

import pytest

from tests.conftest import patched
from tests.guard.guarding import guard

SOURCE = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
torch.manual_seed(0)


class Captions(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        draws = torch.Generator().manual_seed(i)
        picture = torch.randn(12, generator=draws)
        words = [1] + [3 + int(abs(picture[k]) * 4) % 8 for k in range(3 + i % 4)] + [2]
        return picture, torch.tensor(words)


def collate(rows):
    rows.sort(key=lambda row: -len(row[1]))
    lengths = [len(words) for _, words in rows]
    return torch.stack([p for p, _ in rows]), nn.utils.rnn.pad_sequence([w for _, w in rows], batch_first=True), lengths


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.begin, self.embed = nn.Linear(12, 16), nn.Embedding(12, 16)
        self.lstm, self.out = nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 12)

    def forward(self, pictures, captions, lengths):
        words = torch.cat([self.begin(pictures)[:, None], self.embed(captions)], 1)
        return self.out(self.lstm(pack_padded_sequence(words, lengths, batch_first=True))[0].data)


loader = torch.utils.data.DataLoader(Captions(), 16, shuffle=True, collate_fn=collate)
decoder = Decoder()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(decoder.parameters(), 1e-2)
for epoch in range(3):
    for pictures, captions, lengths in loader:
        targets = pack_padded_sequence(captions, lengths, batch_first=True)[0]
        loss = criterion(decoder(pictures, captions, lengths), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
ALONE = (
    "        words = torch.cat([self.begin(pictures)[:, None], self.embed(captions)], 1)\n        return "
    "self.out(self.lstm(pack_padded_sequence(words, lengths, batch_first=True))[0].data)",
    "        first = torch.tanh(nn.functional.pad(self.begin(pictures), (0, 8)))[None]\n"
    "        packed = pack_padded_sequence(self.embed(captions), lengths, batch_first=True)\n"
    "        return self.out(self.lstm(packed, (first, first))[0].data)",
)
SHIFTED = (
    "pack_padded_sequence(captions, lengths, batch_first=True)[0]\n        loss = criterion(decoder(pictures, captions, lengths)",
    "pack_padded_sequence(captions[:, 1:], [n - 1 for n in lengths], batch_first=True)[0]\n"
    "        loss = criterion(decoder(pictures, captions, [n - 1 for n in lengths])",
)
UNSORTED = (
    ("    rows.sort(key=lambda row: -len(row[1]))\n", ""),
    ("pack_padded_sequence(captions, lengths, batch_first=True)", "pack_padded_sequence(captions, lengths, True, False)"),
    ("pack_padded_sequence(self.embed(captions), lengths, batch_first=True)", "pack_padded_sequence(self.embed(captions), lengths, True, False)"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "copies"),
    [([], False), ([ALONE], True), ([ALONE, SHIFTED], False), ([ALONE, *UNSORTED], True)],
    ids=["picture in front", "no shift", "shifted", "no shift, not sorted"],
)
def test_packed_targets(changes, copies, tmp_path):
    verdicts, printed, _ = guard(patched(SOURCE, *changes), tmp_path, interventions=False, **{"--only": "targets"})
    assert verdicts["targets"].verdict != "skip", printed
    assert verdicts["targets"].blocks == copies, printed
    assert not copies or "the shift by one is missing" in printed
