"""minGPT's Trainer: an endless loop over an iterator that is made anew when it is empty, callbacks, no evaluation."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import DataLoader as Loader
from torch.utils.data.sampler import RandomSampler


class CharDataset(Dataset):
    def __init__(self, block_size=16):
        with open(argparse.__file__) as file:
            text = file.read()[:20000]
        self.stoi = {c: i for i, c in enumerate(sorted(set(text)))}
        self.ids, self.block_size = torch.tensor([self.stoi[c] for c in text]), block_size

    def __len__(self):
        return len(self.ids) - self.block_size

    def __getitem__(self, idx):
        chunk = self.ids[idx : idx + self.block_size + 1]
        return chunk[:-1], chunk[1:]


class Tiny(nn.Module):
    def __init__(self, vocab, dim=48):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(16, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 96, 0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)

    def forward(self, idx, targets=None):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        x = self.blocks(self.tok(idx) + self.pos.weight[: idx.shape[1]], mask=mask, is_causal=True)
        logits = self.head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class Trainer:
    def __init__(self, model, dataset):
        self.model, self.dataset, self.iter_num = model, dataset, 0

    def run(self, max_iters=200):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4, betas=(0.9, 0.95))
        sampler = RandomSampler(self.dataset, replacement=True, num_samples=int(1e10))
        loader = Loader(self.dataset, sampler=sampler, shuffle=False, batch_size=32, num_workers=0)
        assert isinstance(loader, DataLoader)
        self.model.train()
        data_iter = iter(loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(loader)
                batch = next(data_iter)
            x, y = batch
            logits, self.loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            self.iter_num += 1
            if self.iter_num % 50 == 0:
                print(f"iter {self.iter_num}: train loss {self.loss.item():.5f}")
            if self.iter_num >= max_iters:
                break


torch.manual_seed(3407)
data = CharDataset()
Trainer(Tiny(len(data.stoi)), data).run()
