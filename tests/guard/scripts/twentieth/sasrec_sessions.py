"""Sequential recommendation from implicit feedback: SASRec on sessions, one hidden item among a hundred others."""

import argparse
import random
from collections import defaultdict

import numpy as np
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", default=64, type=int)
parser.add_argument("--lr", default=0.003, type=float)
parser.add_argument("--maxlen", default=20, type=int)
parser.add_argument("--hidden_units", default=48, type=int)
parser.add_argument("--num_blocks", default=2, type=int)
parser.add_argument("--num_epochs", default=15, type=int)
parser.add_argument("--num_heads", default=1, type=int)
parser.add_argument("--dropout_rate", default=0.1, type=float)
parser.add_argument("--l2_emb", default=0.0, type=float)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
random.seed(args.seed)
np.random.seed(args.seed)
torch.manual_seed(args.seed)


def simulate(usernum=900, itemnum=240, genres=12):
    """Sessions: a user stays in a genre for a while; within a series the next item mostly follows the last one."""
    rng = np.random.default_rng(5)
    per_genre = itemnum // genres
    User = defaultdict(list)
    for u in range(1, usernum + 1):
        genre, place = rng.integers(genres), rng.integers(per_genre)
        for _ in range(int(rng.integers(6, 30))):
            if rng.random() < 0.1:
                genre = (genre + rng.integers(1, 3)) % genres
                place = rng.integers(per_genre)
            place = (place + 1) % per_genre if rng.random() < 0.7 else rng.integers(per_genre)
            User[u].append(int(genre * per_genre + place + 1))
    return User, usernum, itemnum


def data_partition():
    User, usernum, itemnum = simulate()
    user_train, user_valid, user_test = {}, {}, {}
    for user in User:
        user_train[user] = User[user][:-2]
        user_valid[user] = [User[user][-2]]
        user_test[user] = [User[user][-1]]
    return [user_train, user_valid, user_test, usernum, itemnum]


def random_neq(left, right, s):
    t = np.random.randint(left, right)
    while t in s:
        t = np.random.randint(left, right)
    return t


class WarpSampler:
    """Batches of (user, sequence, next items, items that the user never had)."""

    def __init__(self, User, usernum, itemnum, batch_size=64, maxlen=20):
        self.User, self.usernum, self.itemnum = User, usernum, itemnum
        self.batch_size, self.maxlen = batch_size, maxlen

    def sample(self, uid):
        seq = np.zeros([self.maxlen], dtype=np.int64)
        pos = np.zeros([self.maxlen], dtype=np.int64)
        neg = np.zeros([self.maxlen], dtype=np.int64)
        nxt = self.User[uid][-1]
        idx = self.maxlen - 1

        ts = set(self.User[uid])
        for i in reversed(self.User[uid][:-1]):
            seq[idx] = i
            pos[idx] = nxt
            neg[idx] = random_neq(1, self.itemnum + 1, ts)
            nxt = i
            idx -= 1
            if idx == -1:
                break
        return uid, seq, pos, neg

    def next_batch(self):
        users = np.random.randint(1, self.usernum + 1, self.batch_size)
        return [np.array(x) for x in zip(*[self.sample(u) for u in users])]


class PointWiseFeedForward(torch.nn.Module):
    def __init__(self, hidden_units, dropout_rate):
        super().__init__()
        self.conv1 = torch.nn.Conv1d(hidden_units, hidden_units, kernel_size=1)
        self.dropout1 = torch.nn.Dropout(p=dropout_rate)
        self.relu = torch.nn.ReLU()
        self.conv2 = torch.nn.Conv1d(hidden_units, hidden_units, kernel_size=1)
        self.dropout2 = torch.nn.Dropout(p=dropout_rate)

    def forward(self, inputs):
        outputs = self.dropout2(self.conv2(self.relu(self.dropout1(self.conv1(inputs.transpose(-1, -2))))))
        return outputs.transpose(-1, -2)  # as Conv1D requires (N, C, Length)


class SASRec(torch.nn.Module):
    def __init__(self, user_num, item_num, args):
        super().__init__()
        self.item_emb = torch.nn.Embedding(item_num + 1, args.hidden_units, padding_idx=0)
        self.pos_emb = torch.nn.Embedding(args.maxlen + 1, args.hidden_units, padding_idx=0)
        self.emb_dropout = torch.nn.Dropout(p=args.dropout_rate)
        self.attention_layernorms = torch.nn.ModuleList()
        self.attention_layers = torch.nn.ModuleList()
        self.forward_layernorms = torch.nn.ModuleList()
        self.forward_layers = torch.nn.ModuleList()
        self.last_layernorm = torch.nn.LayerNorm(args.hidden_units, eps=1e-8)
        for _ in range(args.num_blocks):
            self.attention_layernorms.append(torch.nn.LayerNorm(args.hidden_units, eps=1e-8))
            self.attention_layers.append(
                torch.nn.MultiheadAttention(args.hidden_units, args.num_heads, args.dropout_rate)
            )
            self.forward_layernorms.append(torch.nn.LayerNorm(args.hidden_units, eps=1e-8))
            self.forward_layers.append(PointWiseFeedForward(args.hidden_units, args.dropout_rate))

    def log2feats(self, log_seqs):
        seqs = self.item_emb(torch.LongTensor(log_seqs))
        seqs *= self.item_emb.embedding_dim**0.5
        poss = np.tile(np.arange(1, log_seqs.shape[1] + 1), [log_seqs.shape[0], 1])
        poss *= log_seqs != 0
        seqs += self.pos_emb(torch.LongTensor(poss))
        seqs = self.emb_dropout(seqs)

        tl = seqs.shape[1]
        attention_mask = ~torch.tril(torch.ones((tl, tl), dtype=torch.bool))
        for i in range(len(self.attention_layers)):
            seqs = torch.transpose(seqs, 0, 1)
            Q = self.attention_layernorms[i](seqs)
            mha_outputs, _ = self.attention_layers[i](Q, seqs, seqs, attn_mask=attention_mask)
            seqs = Q + mha_outputs
            seqs = torch.transpose(seqs, 0, 1)
            seqs = self.forward_layernorms[i](seqs)
            seqs = seqs + self.forward_layers[i](seqs)
        return self.last_layernorm(seqs)

    def forward(self, user_ids, log_seqs, pos_seqs, neg_seqs):  # for training
        log_feats = self.log2feats(log_seqs)
        pos_embs = self.item_emb(torch.LongTensor(pos_seqs))
        neg_embs = self.item_emb(torch.LongTensor(neg_seqs))
        pos_logits = (log_feats * pos_embs).sum(dim=-1)
        neg_logits = (log_feats * neg_embs).sum(dim=-1)
        return pos_logits, neg_logits

    def predict(self, user_ids, log_seqs, item_indices):  # for inference
        log_feats = self.log2feats(log_seqs)
        final_feat = log_feats[:, -1, :]  # only use last QKV classifier, a waste
        item_embs = self.item_emb(torch.LongTensor(item_indices))
        return item_embs.matmul(final_feat.unsqueeze(-1)).squeeze(-1)


def evaluate(model, dataset, args, users=400):
    train, valid, test, usernum, itemnum = dataset
    NDCG, HT, valid_user = 0.0, 0.0, 0.0
    rng = np.random.default_rng(11)
    for u in range(1, users + 1):
        seq = np.zeros([args.maxlen], dtype=np.int64)
        idx = args.maxlen - 1
        seq[idx] = valid[u][0]
        idx -= 1
        for i in reversed(train[u]):
            seq[idx] = i
            idx -= 1
            if idx == -1:
                break
        rated = set(train[u]) | {0, test[u][0]}
        others = [t for t in range(1, itemnum + 1) if t not in rated]
        item_idx = [test[u][0], *rng.choice(others, 100, replace=False)]

        predictions = -model.predict(np.array([u]), np.array([seq]), np.array(item_idx))
        predictions = predictions[0]  # - for 1st argsort DESC
        rank = predictions.argsort().argsort()[0].item()
        valid_user += 1
        if rank < 10:
            NDCG += 1 / np.log2(rank + 2)
            HT += 1
    return NDCG / valid_user, HT / valid_user


dataset = data_partition()
[user_train, user_valid, user_test, usernum, itemnum] = dataset
num_batch = usernum // args.batch_size
print(f"average sequence length: {sum(len(user_train[u]) for u in user_train) / len(user_train):.2f}")

sampler = WarpSampler(user_train, usernum, itemnum, batch_size=args.batch_size, maxlen=args.maxlen)
model = SASRec(usernum, itemnum, args)
for _, param in model.named_parameters():
    if param.dim() > 1:
        torch.nn.init.xavier_normal_(param.data)
model.pos_emb.weight.data[0, :] = 0
model.item_emb.weight.data[0, :] = 0

bce_criterion = torch.nn.BCEWithLogitsLoss()
adam_optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98))

for epoch in range(1, args.num_epochs + 1):
    model.train()
    for _step in range(num_batch):
        u, seq, pos, neg = sampler.next_batch()
        pos_logits, neg_logits = model(u, seq, pos, neg)
        pos_labels, neg_labels = torch.ones(pos_logits.shape), torch.zeros(neg_logits.shape)
        adam_optimizer.zero_grad()
        indices = np.where(pos != 0)
        loss = bce_criterion(pos_logits[indices], pos_labels[indices])
        loss += bce_criterion(neg_logits[indices], neg_labels[indices])
        for param in model.item_emb.parameters():
            loss += args.l2_emb * torch.sum(param**2)
        loss.backward()
        adam_optimizer.step()
    if epoch % 5 == 0:
        model.eval()
        with torch.no_grad():
            ndcg, hr = evaluate(model, dataset, args)
        print(f"epoch {epoch}: loss {loss.item():.3f}, test (NDCG@10: {ndcg:.4f}, HR@10: {hr:.4f})")
print(f"FINAL ndcg10={ndcg:.4f}")
