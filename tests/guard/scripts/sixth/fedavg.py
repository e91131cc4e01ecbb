"""Federated averaging after AshwinRJ/Federated-Learning-PyTorch: each round, copies of one model train on their clients' digits."""

import copy

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

SEED = 0
np.random.seed(SEED)
torch.manual_seed(SEED)


class DatasetSplit(Dataset):
    def __init__(self, dataset, idxs):
        self.dataset, self.idxs = dataset, [int(i) for i in idxs]

    def __len__(self):
        return len(self.idxs)

    def __getitem__(self, item):
        image, label = self.dataset[self.idxs[item]]
        return image, label


class LocalUpdate:
    def __init__(self, dataset, idxs, local_ep, lr):
        self.loader = DataLoader(DatasetSplit(dataset, idxs), batch_size=10, shuffle=True)
        self.local_ep, self.lr, self.criterion = local_ep, lr, nn.NLLLoss()

    def update_weights(self, model):
        model.train()
        epoch_loss = []
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.5)
        for _ in range(self.local_ep):
            batch_loss = []
            for images, labels in self.loader:
                model.zero_grad()
                log_probs = model(images)
                loss = self.criterion(log_probs, labels)
                loss.backward()
                optimizer.step()
                batch_loss.append(loss.item())
            epoch_loss.append(sum(batch_loss) / len(batch_loss))
        return model.state_dict(), sum(epoch_loss) / len(epoch_loss)


def average_weights(w):
    w_avg = copy.deepcopy(w[0])
    for key in w_avg.keys():
        for i in range(1, len(w)):
            w_avg[key] += w[i][key]
        w_avg[key] = torch.div(w_avg[key], len(w))
    return w_avg


def test_inference(model, test_dataset):
    model.eval()
    total, correct = 0.0, 0.0
    for images, labels in DataLoader(test_dataset, batch_size=128, shuffle=False):
        outputs = model(images)
        _, pred_labels = torch.max(outputs, 1)
        correct += torch.sum(torch.eq(pred_labels, labels)).item()
        total += len(labels)
    return correct / total


def sort_and_partition(labels, num_users, shards=2):
    order = np.argsort(labels, kind="stable").reshape(num_users * shards, -1)
    pick = np.random.permutation(len(order)).reshape(num_users, shards)
    return {i: np.concatenate([order[j] for j in pick[i]]) for i in range(num_users)}


x, y = load_digits(return_X_y=True)
order = np.random.permutation(len(x))
x, y = torch.tensor(x[order] / 16, dtype=torch.float32), torch.tensor(y[order])
train_dataset, test_dataset = TensorDataset(x[:1440], y[:1440]), TensorDataset(x[1440:], y[1440:])
num_users, frac, epochs = 12, 0.5, 12
user_groups = sort_and_partition(y[:1440].numpy(), num_users)
global_model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 10), nn.LogSoftmax(dim=1))
for epoch in range(epochs):
    local_weights, local_losses = [], []
    idxs_users = np.random.choice(range(num_users), int(frac * num_users), replace=False)
    for idx in idxs_users:
        local_model = LocalUpdate(train_dataset, user_groups[idx], local_ep=2, lr=0.05)
        w, loss = local_model.update_weights(model=copy.deepcopy(global_model))
        local_weights.append(copy.deepcopy(w))
        local_losses.append(loss)
    global_model.load_state_dict(average_weights(local_weights))
    print(
        f"Round {epoch}: loss {sum(local_losses) / len(local_losses):.3f}, test accuracy {test_inference(global_model, test_dataset):.3f}"
    )
print(f"FINAL acc={test_inference(global_model, test_dataset):.4f}")
