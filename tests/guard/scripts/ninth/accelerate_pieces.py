"""Roles of names in Python code as token classification with word pieces: Accelerate, gradient accumulation, labels of -100."""

import io
import keyword
import os
import random
import tokenize

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

SEED = 0
set_seed(SEED)

ROLES = ["other", "keyword", "call", "attribute", "argument", "name"]
NUM_EPOCHS, BATCH_SIZE, ACCUMULATION_STEPS, LR = 5, 8, 2, 3e-3
CLS, SEP, PAD, UNK = 0, 1, 2, 3


def read_words(module):
    """Words of a file and their roles: one sentence is one statement."""
    with open(os.path.join(os.path.dirname(os.__file__), module + ".py"), encoding="utf8") as f:
        tokens = list(tokenize.generate_tokens(io.StringIO(f.read()).readline))
    sentence = []
    for before, tok, after in zip(tokens, tokens[1:], tokens[2:]):
        if tok.type == tokenize.NEWLINE:
            if 4 <= len(sentence) <= 24:
                yield sentence
            sentence = []
        elif tok.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
            role = "other"
            if tok.type == tokenize.NAME:
                role = "attribute" if before.string == "." else "argument" if after.string == "=" else "name"
                role = "call" if after.string == "(" else role
                role = "keyword" if keyword.iskeyword(tok.string) else role
            sentence.append((tok.string, ROLES.index(role)))


def pieces_of(word):
    """Pieces of at most three characters; the later ones begin with ##."""
    parts = [word[i : i + 3] for i in range(0, len(word), 3)]
    return [parts[0]] + ["##" + p for p in parts[1:]]


sentences = [s for m in ["argparse", "shutil", "pickle", "mailbox"] for s in read_words(m)]
random.shuffle(sentences)
sentences = sentences[:1600]
train_sentences, eval_sentences = sentences[:1200], sentences[1200:]
all_pieces = sorted({p for s in train_sentences for w, _ in s for p in pieces_of(w)})
vocab = {p: i + 4 for i, p in enumerate(all_pieces)}


def tokenize_and_align(sentence):
    ids, word_ids = [CLS], [None]
    for k, (word, _) in enumerate(sentence):
        for piece in pieces_of(word):
            ids.append(vocab.get(piece, UNK))
            word_ids.append(k)
    ids, word_ids = ids + [SEP], word_ids + [None]
    labels, previous = [], None
    for k in word_ids:
        labels.append(-100 if k is None or k == previous else sentence[k][1])
        previous = k
    return torch.tensor(ids), torch.tensor(labels)


def collate_fn(batch):
    ids, labels = zip(*[tokenize_and_align(s) for s in batch])
    return pad_sequence(ids, True, PAD), pad_sequence(labels, True, -100)


class Tagger(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(len(vocab) + 4, dim)
        self.position = nn.Embedding(128, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.classifier = nn.Linear(dim, len(ROLES))

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.size(1)))
        return self.classifier(self.encoder(x, src_key_padding_mask=ids == PAD))


accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION_STEPS, cpu=True)
train_dataloader = DataLoader(train_sentences, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate_fn)
eval_dataloader = DataLoader(eval_sentences, batch_size=50, collate_fn=collate_fn)
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
num_training_steps = len(train_dataloader) // ACCUMULATION_STEPS * NUM_EPOCHS
lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_training_steps // 10, num_training_steps)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
loss_fct = nn.CrossEntropyLoss(ignore_index=-100)

for epoch in range(NUM_EPOCHS):
    model.train()
    total_loss = 0.0
    for ids, labels in train_dataloader:
        with accelerator.accumulate(model):
            logits = model(ids)
            loss = loss_fct(logits.flatten(0, 1), labels.flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        total_loss += loss.item()
    model.eval()
    right, count = 0, 0
    for ids, labels in eval_dataloader:
        with torch.no_grad():
            predictions = model(ids).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        keep = labels != -100
        right += (predictions[keep] == labels[keep]).sum().item()
        count += keep.sum().item()
    accelerator.print(f"epoch {epoch}: loss {total_loss / len(train_dataloader):.4f} accuracy {right / count:.4f}")

print(f"FINAL error={1 - right / count:.4f}")
