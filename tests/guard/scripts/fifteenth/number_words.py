"""Numbers in digits to English words ("347" to "three hundred forty seven"): GRU encoder and decoder, teacher forcing, packed sequences."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = 0
SMALL = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
         "seventeen eighteen nineteen").split()  # fmt: skip
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
PAD, BOS, EOS = 0, 1, 2
WORDS = ["<pad>", "<bos>", "<eos>", *SMALL, *TENS, "hundred", "thousand"]
WORD_ID = {w: i for i, w in enumerate(WORDS)}


def spell(n):
    if n < 20:
        return [SMALL[n]]
    if n < 100:
        return [TENS[n // 10 - 2]] + ([SMALL[n % 10]] if n % 10 else [])
    if n < 1000:
        return [SMALL[n // 100], "hundred"] + (spell(n % 100) if n % 100 else [])
    return spell(n // 1000) + ["thousand"] + (spell(n % 1000) if n % 1000 else [])


class Numbers(Dataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        n = self.numbers[i]
        source = torch.tensor([int(c) + 1 for c in str(n)])  # 0 is padding
        target = torch.tensor([BOS, *(WORD_ID[w] for w in spell(n)), EOS])
        return source, target


def collate(samples):
    sources, targets = zip(*samples)
    targets = pad_sequence(targets, batch_first=True, padding_value=PAD)
    return {
        "source": pad_sequence(sources, batch_first=True),
        "lengths": torch.tensor([len(s) for s in sources]),
        "decoder_in": targets[:, :-1],
        "decoder_out": targets[:, 1:],
    }


class Seq2Seq(nn.Module):
    def __init__(self, dim=96):
        super().__init__()
        self.source_emb = nn.Embedding(11, dim, padding_idx=0)
        self.target_emb = nn.Embedding(len(WORDS), dim, padding_idx=PAD)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, len(WORDS))

    def encode(self, source, lengths):
        packed = pack_padded_sequence(self.source_emb(source), lengths, batch_first=True, enforce_sorted=False)
        return self.encoder(packed)[1]

    def forward(self, source, lengths, decoder_in):
        states, _ = self.decoder(self.target_emb(decoder_in), self.encode(source, lengths))
        return self.out(states)


rng = random.Random(3)
numbers = rng.sample(range(10000), 5000)
train_set, val_set = Numbers(numbers[:4500]), Numbers(numbers[4500:])


def compute_loss(model, batch):
    logits = model(batch["source"], batch["lengths"], batch["decoder_in"])
    return nn.functional.cross_entropy(logits.transpose(1, 2), batch["decoder_out"], ignore_index=PAD)


def train_epoch(model, optimizer, loader):
    model.train()
    for batch in loader:
        loss = compute_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def exact_match(model, loader):
    """Greedy decoding, compared word by word up to the end."""
    model.eval()
    right = total = 0
    for batch in loader:
        hidden = model.encode(batch["source"], batch["lengths"])
        token = torch.full((len(batch["source"]), 1), BOS)
        done, good = torch.zeros(len(token), dtype=torch.bool), torch.ones(len(token), dtype=torch.bool)
        for t in range(batch["decoder_out"].shape[1]):
            states, hidden = model.decoder(model.target_emb(token), hidden)
            token = model.out(states).argmax(-1)
            good &= done | (token[:, 0] == batch["decoder_out"][:, t])
            done |= batch["decoder_out"][:, t] == EOS
        right += good.sum().item()
        total += len(good)
    return right / total


def make_script():
    model = Seq2Seq()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        train=train_set,
        val=val_set,
        batch_size=64,
        collate=collate,
        target="decoder_out",
        classes=len(WORDS),
        count=lambda batch: (batch["decoder_out"] != PAD).sum(),
        loss=compute_loss,
        metric=exact_match,
        floor=0.0,
        train_loop=train_epoch,
    )


def main():
    torch.manual_seed(SEED)
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    train_loader = DataLoader(train_set, 64, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(val_set, 256, collate_fn=collate)
    for epoch in range(10):
        train_epoch(model, optimizer, train_loader)
        print(epoch + 1, exact_match(model, val_loader))
    print(f"FINAL exact={exact_match(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
