"""Pretrains a tiny BERT with masked language modelling, from scratch (model and masking here, data in mlm_data.py)."""

import math

import torch
import torch.nn as nn
from mlm_data import CLS, MASK, PAD, UNK, WordTokenizer, pad_collate, sentences
from torch.utils.data import DataLoader

config = {
    "seed": 0,
    "dim": 48,
    "heads": 4,
    "layers": 2,
    "dropout": 0.0,
    "batch_size": 32,
    "epochs": 3,
    "lr": 0.003,
    "warmup": 20,
    "mlm_probability": 0.15,
}


class BertEmbeddings(nn.Module):
    def __init__(self, vocab_size, dim, max_len=32):
        super().__init__()
        self.word = nn.Embedding(vocab_size, dim, padding_idx=PAD)
        self.position = nn.Embedding(max_len, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids):
        positions = torch.arange(ids.size(1))[None]
        return self.norm(self.word(ids) + self.position(positions))


class BertForMaskedLM(nn.Module):
    def __init__(self, vocab_size, dim, heads, layers, dropout):
        super().__init__()
        self.embeddings = BertEmbeddings(vocab_size, dim)
        layer = nn.TransformerEncoderLayer(
            dim, heads, 4 * dim, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.05)

    def forward(self, ids):
        hidden = self.encoder(self.embeddings(ids), src_key_padding_mask=ids == PAD)
        return self.head(hidden) @ self.embeddings.word.weight.t() + self.bias


def mask_tokens(inputs, vocab_size, probability, generator=None):
    labels = inputs.clone()
    special = (inputs == PAD) | (inputs == CLS) | (inputs == UNK)
    matrix = torch.full(labels.shape, probability).masked_fill(special, 0.0)
    masked = torch.bernoulli(matrix, generator=generator).bool()
    labels[~masked] = -100
    replaced = torch.bernoulli(torch.full(labels.shape, 0.8), generator=generator).bool() & masked
    inputs[replaced] = MASK
    randomised = torch.bernoulli(torch.full(labels.shape, 0.5), generator=generator).bool() & masked & ~replaced
    inputs[randomised] = torch.randint(4, vocab_size, labels.shape, generator=generator)[randomised]
    return inputs, labels


def evaluate(model, loader, vocab_size):
    model.eval()
    generator = torch.Generator().manual_seed(123)
    correct = total = loss_sum = 0
    with torch.no_grad():
        for ids in loader:
            inputs, labels = mask_tokens(ids.clone(), vocab_size, config["mlm_probability"], generator)
            logits, chosen = model(inputs), labels != -100
            loss_sum += nn.functional.cross_entropy(logits[chosen], labels[chosen], reduction="sum").item()
            correct += (logits[chosen].argmax(-1) == labels[chosen]).sum().item()
            total += chosen.sum().item()
    return loss_sum / total, correct / total


def train():
    torch.manual_seed(config["seed"])
    texts = sentences()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(5)).tolist()
    texts = [texts[i] for i in order][:1800]
    train_texts, val_texts = texts[:1500], texts[1500:]
    tokenizer = WordTokenizer(train_texts)
    train_loader = DataLoader(
        [tokenizer.encode(t) for t in train_texts], config["batch_size"], shuffle=True, collate_fn=pad_collate
    )
    val_loader = DataLoader([tokenizer.encode(t) for t in val_texts], 64, collate_fn=pad_collate)
    model = BertForMaskedLM(len(tokenizer), config["dim"], config["heads"], config["layers"], config["dropout"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=0.01)
    total = config["epochs"] * len(train_loader)

    def rate(step):
        if step < config["warmup"]:
            return (step + 1) / config["warmup"]
        return max(0.05, (total - step) / (total - config["warmup"]))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    criterion = nn.CrossEntropyLoss()  # -100 is ignored
    for epoch in range(config["epochs"]):
        model.train()
        for ids in train_loader:
            inputs, labels = mask_tokens(ids, len(tokenizer), config["mlm_probability"])
            logits = model(inputs)
            loss = criterion(logits.view(-1, len(tokenizer)), labels.view(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        val_loss, val_acc = evaluate(model, val_loader, len(tokenizer))
        print(
            f"epoch {epoch}: train {loss.item():.3f} val {val_loss:.3f} ppl {math.exp(val_loss):.1f} acc {val_acc:.3f}"
        )
    return model, val_loader, len(tokenizer)


if __name__ == "__main__":
    KEPT = train()
    print(f"FINAL val_loss={evaluate(*KEPT)[0]:.4f}")
