"""Neural collaborative filtering in the shape of guoyang9/NCF. Users are files of Python's library, items are the words they use."""

import collections
import glob
import os
import re
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
import torch.utils.data as data

EPOCHS, BATCH, FACTORS, NUM_NG, TEST_NG, TOP_K = 4, 256, 16, 4, 99, 10


def load_all():
    lib = os.path.dirname(os.__file__)
    files = sorted(glob.glob(os.path.join(lib, "*.py")))[:160]
    sets = []
    for name in files:
        text = open(name, encoding="utf-8", errors="ignore").read()
        sets.append(set(re.findall(r"[a-z]{4,}", text)))
    count = collections.Counter(w for s in sets for w in s)
    words = [w for w, c in count.items() if 12 <= c <= 60]
    words = sorted(words, key=lambda w: (-count[w], w))[:500]
    index = {w: i for i, w in enumerate(words)}
    rng = np.random.RandomState(0)
    train_data, test_data, mat = [], [], set()
    for s in sets:
        items = sorted(index[w] for w in s if w in index)
        if len(items) < 8:
            continue
        u = len(test_data)
        gt = int(rng.choice(items))
        test_data.append((u, gt))
        for i in items:
            mat.add((u, i))
            if i != gt:
                train_data.append([u, i])
    user_num, item_num = len(test_data), len(words)
    rows = []
    for u, gt in test_data:
        rows.append([u, gt])
        drawn = 0
        while drawn < TEST_NG:
            j = rng.randint(item_num)
            if (u, j) not in mat:
                rows.append([u, j])
                drawn += 1
    return train_data, rows, user_num, item_num, mat


class NCFData(data.Dataset):
    def __init__(self, features, num_item, train_mat=None, num_ng=0, is_training=None):
        super().__init__()
        self.features_ps = features
        self.num_item = num_item
        self.train_mat = train_mat
        self.num_ng = num_ng
        self.is_training = is_training
        self.labels = [0 for _ in range(len(features))]

    def ng_sample(self):
        assert self.is_training, "no need to sampling when testing"
        self.features_ng = []
        for x in self.features_ps:
            u = x[0]
            for t in range(self.num_ng):
                j = np.random.randint(self.num_item)
                while (u, j) in self.train_mat:
                    j = np.random.randint(self.num_item)
                self.features_ng.append([u, j])
        labels_ps = [1 for _ in range(len(self.features_ps))]
        labels_ng = [0 for _ in range(len(self.features_ng))]
        self.features_fill = self.features_ps + self.features_ng
        self.labels_fill = labels_ps + labels_ng

    def __len__(self):
        return (self.num_ng + 1) * len(self.labels) if self.is_training else len(self.labels)

    def __getitem__(self, idx):
        features = self.features_fill if self.is_training else self.features_ps
        labels = self.labels_fill if self.is_training else self.labels
        return features[idx][0], features[idx][1], labels[idx]


class NCF(nn.Module):
    def __init__(self, user_num, item_num, factor_num, num_layers=2, dropout=0.0):
        super().__init__()
        self.embed_user_GMF = nn.Embedding(user_num, factor_num)
        self.embed_item_GMF = nn.Embedding(item_num, factor_num)
        width = factor_num * 2 ** (num_layers - 1)
        self.embed_user_MLP = nn.Embedding(user_num, width)
        self.embed_item_MLP = nn.Embedding(item_num, width)
        MLP_modules = []
        for i in range(num_layers):
            input_size = factor_num * (2 ** (num_layers - i))
            MLP_modules.append(nn.Dropout(p=dropout))
            MLP_modules.append(nn.Linear(input_size, input_size // 2))
            MLP_modules.append(nn.ReLU())
        self.MLP_layers = nn.Sequential(*MLP_modules)
        self.predict_layer = nn.Linear(factor_num * 2, 1)
        for m in (self.embed_user_GMF, self.embed_item_GMF, self.embed_user_MLP, self.embed_item_MLP):
            nn.init.normal_(m.weight, std=0.01)

    def forward(self, user, item):
        output_GMF = self.embed_user_GMF(user) * self.embed_item_GMF(item)
        interaction = torch.cat((self.embed_user_MLP(user), self.embed_item_MLP(item)), -1)
        output_MLP = self.MLP_layers(interaction)
        concat = torch.cat((output_GMF, output_MLP), -1)
        prediction = self.predict_layer(concat)
        return prediction.view(-1)


def metrics(model, test_loader, top_k):
    HR, NDCG = [], []
    for user, item, label in test_loader:
        predictions = model(user, item)
        _, indices = torch.topk(predictions, top_k)
        recommends = torch.take(item, indices).numpy().tolist()
        gt_item = item[0].item()
        if gt_item in recommends:
            HR.append(1)
            NDCG.append(np.reciprocal(np.log2(recommends.index(gt_item) + 2)))
        else:
            HR.append(0)
            NDCG.append(0)
    return np.mean(HR), np.mean(NDCG)


torch.manual_seed(0)
np.random.seed(0)
train_data, test_data, user_num, item_num, train_mat = load_all()
train_dataset = NCFData(train_data, item_num, train_mat, NUM_NG, True)
test_dataset = NCFData(test_data, item_num, train_mat, 0, False)
train_loader = data.DataLoader(train_dataset, batch_size=BATCH, shuffle=True, num_workers=2)
test_loader = data.DataLoader(test_dataset, batch_size=TEST_NG + 1, shuffle=False, num_workers=0)

model = NCF(user_num, item_num, FACTORS, dropout=0.1)
loss_function = nn.BCEWithLogitsLoss()
optimizer = optim.Adam(model.parameters(), lr=0.002)
best_hr = 0
print(user_num, "users", item_num, "items", len(train_data), "pairs", file=sys.stderr)
for epoch in range(EPOCHS):
    model.train()
    start_time = time.time()
    train_loader.dataset.ng_sample()
    for user, item, label in train_loader:
        label = label.float()
        model.zero_grad()
        prediction = model(user, item)
        loss = loss_function(prediction, label)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        HR, NDCG = metrics(model, test_loader, TOP_K)
    print(f"epoch {epoch:03d} {time.time() - start_time:.1f} s  HR: {HR:.3f}\tNDCG: {NDCG:.3f}")
    if HR > best_hr:
        best_hr, best_ndcg, best_epoch = HR, NDCG, epoch
        os.makedirs("models", exist_ok=True)
        torch.save(model, "models/NeuMF.pth")
print(f"End. Best epoch {best_epoch:03d}: HR = {best_hr:.3f}, NDCG = {best_ndcg:.3f}")
