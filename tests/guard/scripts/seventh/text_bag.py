"""Text classification after PyTorch's AG_NEWS tutorial: an EmbeddingBag with offsets, on sentences of the standard library's docs."""

import importlib
import inspect
import random
import re
import time
from collections import Counter

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataset import random_split

SEED = 0
torch.manual_seed(SEED)
random.seed(SEED)
GROUPS = {
    "numbers": ["decimal", "fractions", "statistics", "random", "math", "cmath", "numbers"],
    "processes": ["subprocess", "threading", "asyncio", "concurrent.futures", "multiprocessing.pool", "sched", "queue"],
    "network": ["http.client", "smtplib", "urllib.request", "imaplib", "ftplib", "socket", "ssl", "socketserver"],
    "files": ["shutil", "tarfile", "zipfile", "pathlib", "os", "tempfile", "glob", "fileinput"],
    "text": ["argparse", "string", "textwrap", "difflib", "csv", "json", "re", "configparser", "optparse"],
}
EPOCHS, LR, BATCH_SIZE = 10, 5, 64


def read_docs(name):
    module = importlib.import_module(name)
    objects = [module, *(o for _, o in sorted(vars(module).items(), key=lambda item: item[0]))]
    objects += [m for o in objects if inspect.isclass(o) for _, m in sorted(vars(o).items(), key=lambda item: item[0])]
    for o in objects:
        doc = getattr(o, "__doc__", None)
        if isinstance(doc, str) and o not in (None, int, float, str):
            yield from re.split(r"\.\s|\n\s*\n", doc)


def dataset():
    rows = {}
    for label, modules in enumerate(GROUPS.values()):
        for name in modules:
            for text in read_docs(name):
                text = " ".join(text.split())
                if len(text.split()) >= 5:
                    rows.setdefault(text, label)
    return [(label, text) for text, label in rows.items()]


def tokenizer(text):
    return re.findall(r"[a-z]+", text.lower())


def build_vocab(rows, min_freq=2):
    counter = Counter(token for _, text in rows for token in tokenizer(text))
    return {"<unk>": 0, **{w: i + 1 for i, w in enumerate(sorted(w for w, n in counter.items() if n >= min_freq))}}


def make_collate(vocab):
    def collate_batch(batch):
        label_list, text_list, offsets = [], [], [0]
        for _label, _text in batch:
            label_list.append(_label)
            processed_text = torch.tensor([vocab.get(t, 0) for t in tokenizer(_text)], dtype=torch.int64)
            text_list.append(processed_text)
            offsets.append(processed_text.size(0))
        offsets = torch.tensor(offsets[:-1]).cumsum(dim=0)
        return torch.tensor(label_list, dtype=torch.int64), torch.cat(text_list), offsets

    return collate_batch


class TextClassificationModel(nn.Module):
    def __init__(self, vocab_size, embed_dim, num_class):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim, sparse=False)
        self.fc = nn.Linear(embed_dim, num_class)
        self.init_weights()

    def init_weights(self):
        initrange = 0.5
        self.embedding.weight.data.uniform_(-initrange, initrange)
        self.fc.weight.data.uniform_(-initrange, initrange)
        self.fc.bias.data.zero_()

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))


rows = dataset()
random.Random(8).shuffle(rows)
train_rows, test_rows = rows[: int(0.8 * len(rows))], rows[int(0.8 * len(rows)) :]
vocab = build_vocab(train_rows)
num_train = int(len(train_rows) * 0.95)
split_train_, split_valid_ = random_split(train_rows, [num_train, len(train_rows) - num_train])
train_dataloader = DataLoader(split_train_, batch_size=BATCH_SIZE, shuffle=True, collate_fn=make_collate(vocab))
valid_dataloader = DataLoader(split_valid_, batch_size=BATCH_SIZE, collate_fn=make_collate(vocab))
test_dataloader = DataLoader(test_rows, batch_size=BATCH_SIZE, collate_fn=make_collate(vocab))
model = TextClassificationModel(len(vocab), 32, len(GROUPS))
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1.0, gamma=0.3)
total_accu = None


def train(dataloader):
    model.train()
    total_acc, total_count = 0, 0
    for label, text, offsets in dataloader:
        optimizer.zero_grad()
        predicted_label = model(text, offsets)
        loss = criterion(predicted_label, label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        total_acc += (predicted_label.argmax(1) == label).sum().item()
        total_count += label.size(0)
    return total_acc / total_count


def evaluate(dataloader):
    model.eval()
    total_acc, total_count = 0, 0
    with torch.no_grad():
        for label, text, offsets in dataloader:
            total_acc += (model(text, offsets).argmax(1) == label).sum().item()
            total_count += label.size(0)
    return total_acc / total_count


for epoch in range(1, EPOCHS + 1):
    epoch_start_time = time.time()
    train_acc = train(train_dataloader)
    accu_val = evaluate(valid_dataloader)
    if total_accu is not None and total_accu > accu_val:
        scheduler.step()
    else:
        total_accu = accu_val
    print(
        f"| end of epoch {epoch:3d} | time: {time.time() - epoch_start_time:5.2f}s | train {train_acc:.3f} | valid {accu_val:.3f}"
    )
print(f"FINAL test_acc={evaluate(test_dataloader):.4f}")
