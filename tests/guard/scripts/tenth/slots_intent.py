"""Joint intent classification and slot filling (BIO tags) for a voice assistant; bidirectional LSTM over packed sequences."""

import calendar
import random
from zoneinfo import available_timezones

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

seed = 0
PAD_TAG = -100
CITIES = sorted(
    {
        tz.split("/")[-1].replace("_", " ")
        for tz in available_timezones()
        if tz.startswith(("Europe/", "America/", "Asia/"))
    }
)
CITIES = [c for c in CITIES if c.replace(" ", "").isalpha()]
SLOTS = {
    "date": [
        *calendar.day_name,
        "tomorrow",
        "today",
        "next week",
        *(f"{m} {d}" for m in calendar.month_name[1:] for d in (3, 12, 21)),
    ],
    "time": ["noon", "midnight", *(f"{h} {half}" for h in range(1, 13) for half in ("am", "pm")), "half past five"],
    "to": CITIES,
    "from": CITIES,
    "city": CITIES,
}
TEMPLATES = {
    "weather": ["what is the weather in {city} {date}", "will it rain in {city} {date}", "how cold does it get {date} in {city}", "{city} forecast for {date}"],
    "flight": ["book a flight from {from} to {to} {date}", "fly to {to} from {from}", "i need a ticket to {to} leaving {from} {date}", "{from} to {to} {date} please"],
    "cheapest": ["what is the cheapest flight from {from} to {to}", "lowest fare to {to} from {from} {date}", "{from} to {to} as cheap as you can"],
    "alarm": ["wake me up at {time} {date}", "set an alarm for {time}", "alarm {date} at {time}", "{time} alarm please"],
    "cancel": ["cancel the alarm at {time}", "cancel my flight to {to}", "forget the trip from {from} to {to}", "no alarm {date} please"],
    "time_in": ["what time is it in {city}", "local time of {city}", "tell me the time when it is {time} in {city}", "is {city} ahead of us {date}"],
}  # fmt: skip
FILLERS = ["um", "please", "hey", "so", "well", "could you", "now", "right"]
INTENTS = sorted(TEMPLATES)
TAGS = ["O"] + [f"{p}-{s}" for s in SLOTS for p in "BI"]


def make_sentence(rng):
    intent = rng.choice(INTENTS)
    words, tags = [], []
    for piece in rng.choice(TEMPLATES[intent]).split():
        if piece.startswith("{"):
            value = rng.choice(SLOTS[piece[1:-1]]).split()
            words += value
            tags += [f"B-{piece[1:-1]}"] + [f"I-{piece[1:-1]}"] * (len(value) - 1)
        else:
            words.append(piece)
            tags.append("O")
        if rng.random() < 0.15:
            filler = rng.choice(FILLERS).split()
            words, tags = words + filler, tags + ["O"] * len(filler)
    return words, tags, intent


def get_data():
    rng = random.Random(seed)
    data = [make_sentence(rng) for _ in range(1300)]
    train, test = data[:500], data[500:]
    vocab = {w: i + 2 for i, w in enumerate(sorted({w.lower() for words, _, _ in train for w in words}))}
    return encode(train, vocab), encode(test, vocab), len(vocab) + 2


def encode(sentences, vocab):
    rows = []
    for words, tags, intent in sentences:
        ids = [vocab.get(w.lower(), 1) for w in words]
        rows.append((torch.tensor(ids), torch.tensor([TAGS.index(t) for t in tags]), INTENTS.index(intent)))
    return rows


def collate(rows):
    ids, tags, intents = zip(*rows)
    lengths = torch.tensor([len(i) for i in ids])
    ids = pad_sequence(ids, batch_first=True)
    tags = pad_sequence(tags, batch_first=True, padding_value=PAD_TAG)
    return {"ids": ids, "lengths": lengths, "tags": tags, "intent": torch.tensor(intents)}


class JointModel(nn.Module):
    def __init__(self, vocab_size, dim=48, hidden=64):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim, padding_idx=0)
        self.drop = nn.Dropout(0.3)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True, bidirectional=True)
        self.slot_head = nn.Linear(2 * hidden, len(TAGS))
        self.intent_head = nn.Linear(2 * hidden, len(INTENTS))

    def forward(self, ids, lengths):
        emb = self.drop(self.embedding(ids))
        packed = pack_padded_sequence(emb, lengths, batch_first=True, enforce_sorted=False)
        out, (h, _) = self.lstm(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        sentence = torch.cat([h[0], h[1]], dim=1)
        return self.slot_head(self.drop(out)), self.intent_head(self.drop(sentence))


def compute_loss(model, batch):
    slot_logits, intent_logits = model(batch["ids"], batch["lengths"])
    loss = nn.functional.cross_entropy(slot_logits.flatten(0, 1), batch["tags"].flatten(), ignore_index=PAD_TAG)
    loss += nn.functional.cross_entropy(intent_logits, batch["intent"])
    return loss


def train_one_epoch(model, optimizer, loader):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = compute_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()


@torch.no_grad()
def exact_match(model, loader):
    """Share of sentences whose intent and tags are all right."""
    model.eval()
    right = total = 0
    for batch in loader:
        slots, intents = model(batch["ids"], batch["lengths"])
        slots_ok = ((slots.argmax(-1) == batch["tags"]) | (batch["tags"] == PAD_TAG)).all(1)
        right += (slots_ok & (intents.argmax(-1) == batch["intent"])).sum().item()
        total += len(batch["intent"])
    return right / total


def make_script():
    import trainworthy

    train, test, vocab_size = get_data()
    model = JointModel(vocab_size)
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=4e-3),
        train=DataLoader(train, batch_size=25, shuffle=True, collate_fn=collate),
        val=DataLoader(test, batch_size=100, collate_fn=collate),
        loss=compute_loss,
        metric=exact_match,
        train_loop=train_one_epoch,
        target="2",
        classes=INTENTS,
        floor=0.0,
    )


def main():
    torch.manual_seed(seed)
    train, test, vocab_size = get_data()
    train_loader = DataLoader(train, batch_size=25, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(test, batch_size=100, collate_fn=collate)
    model = JointModel(vocab_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(12):
        train_one_epoch(model, optimizer, train_loader)
        print(f"epoch {epoch}  exact match {exact_match(model, test_loader):.3f}")
    print(f"FINAL exact={exact_match(model, test_loader):.4f}")


if __name__ == "__main__":
    main()
