"""Click prediction after rixwew/pytorch-fm: DeepFM over categorical fields, early stopping on AUC."""

import argparse

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, Dataset, random_split


class ClickDataset(Dataset):
    """Honest synthetic clicks: fields have latent vectors whose inner products decide."""

    def __init__(self, n=6000):
        rng = np.random.default_rng(21)
        self.field_dims = np.array([60, 40, 12, 7, 24, 5])
        latent = [rng.normal(size=(d, 4)) * 0.55 for d in self.field_dims]
        linear = [rng.normal(size=d) * 0.3 for d in self.field_dims]
        self.items = np.stack([rng.integers(0, d, n) for d in self.field_dims], axis=1)
        v = np.stack([latent[f][self.items[:, f]] for f in range(6)], axis=1)
        logit = 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(1) + sum(linear[f][self.items[:, f]] for f in range(6))
        self.targets = (rng.random(n) < 1 / (1 + np.exp(-1.5 * logit + 0.5))).astype(np.float32)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.items[index], self.targets[index]


class FeaturesLinear(torch.nn.Module):
    def __init__(self, field_dims, output_dim=1):
        super().__init__()
        self.fc = torch.nn.Embedding(int(sum(field_dims)), output_dim)
        self.bias = torch.nn.Parameter(torch.zeros((output_dim,)))
        self.offsets = np.array((0, *np.cumsum(field_dims)[:-1]), dtype=np.int64)

    def forward(self, x):
        x = x + x.new_tensor(self.offsets).unsqueeze(0)
        return torch.sum(self.fc(x), dim=1) + self.bias


class FeaturesEmbedding(torch.nn.Module):
    def __init__(self, field_dims, embed_dim):
        super().__init__()
        self.embedding = torch.nn.Embedding(int(sum(field_dims)), embed_dim)
        self.offsets = np.array((0, *np.cumsum(field_dims)[:-1]), dtype=np.int64)
        torch.nn.init.normal_(self.embedding.weight.data, std=0.1)

    def forward(self, x):
        index = x + x.new_tensor(self.offsets).unsqueeze(0)
        return self.embedding(index)


class FactorizationMachine(torch.nn.Module):
    def forward(self, x):
        square_of_sum = torch.sum(x, dim=1) ** 2
        sum_of_square = torch.sum(x**2, dim=1)
        ix = square_of_sum - sum_of_square
        return 0.5 * torch.sum(ix, dim=1, keepdim=True)


class MultiLayerPerceptron(torch.nn.Module):
    def __init__(self, input_dim, embed_dims, dropout):
        super().__init__()
        layers = []
        for embed_dim in embed_dims:
            layers += [torch.nn.Linear(input_dim, embed_dim), torch.nn.BatchNorm1d(embed_dim)]
            layers += [torch.nn.ReLU(), torch.nn.Dropout(p=dropout)]
            input_dim = embed_dim
        self.mlp = torch.nn.Sequential(*layers, torch.nn.Linear(input_dim, 1))

    def forward(self, x):
        return self.mlp(x)


class DeepFactorizationMachineModel(torch.nn.Module):
    def __init__(self, field_dims, embed_dim, mlp_dims, dropout):
        super().__init__()
        self.linear = FeaturesLinear(field_dims)
        self.fm = FactorizationMachine()
        self.embedding = FeaturesEmbedding(field_dims, embed_dim)
        self.embed_output_dim = len(field_dims) * embed_dim
        self.mlp = MultiLayerPerceptron(self.embed_output_dim, mlp_dims, dropout)

    def forward(self, x):
        embed_x = self.embedding(x)
        x = self.linear(x) + self.fm(embed_x) + self.mlp(embed_x.view(-1, self.embed_output_dim))
        return torch.sigmoid(x.squeeze(1))


class EarlyStopper:
    def __init__(self, num_trials, save_path):
        self.num_trials, self.save_path = num_trials, save_path
        self.trial_counter, self.best_accuracy = 0, 0

    def is_continuable(self, model, accuracy):
        if accuracy > self.best_accuracy:
            self.best_accuracy = accuracy
            self.trial_counter = 0
            torch.save(model.state_dict(), self.save_path)
            return True
        self.trial_counter += 1
        return self.trial_counter < self.num_trials


def train(model, optimizer, data_loader, criterion):
    model.train()
    total_loss = 0
    for fields, target in data_loader:
        y = model(fields)
        loss = criterion(y, target.float())
        model.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    return total_loss / len(data_loader)


def test(model, data_loader):
    model.eval()
    targets, predicts = [], []
    with torch.no_grad():
        for fields, target in data_loader:
            y = model(fields)
            targets.extend(target.tolist())
            predicts.extend(y.tolist())
    return roc_auc_score(targets, predicts)


def main(args):
    torch.manual_seed(args.seed)
    dataset = ClickDataset()
    train_dataset, valid_dataset, test_dataset = random_split(
        dataset, (4200, 800, 1000), generator=torch.Generator().manual_seed(42)
    )
    train_data_loader = DataLoader(train_dataset, batch_size=args.batch_size, shuffle=True)
    valid_data_loader = DataLoader(valid_dataset, batch_size=256)
    test_data_loader = DataLoader(test_dataset, batch_size=256)
    model = DeepFactorizationMachineModel(dataset.field_dims, embed_dim=8, mlp_dims=(16, 16), dropout=0.2)
    criterion = torch.nn.BCELoss()
    optimizer = torch.optim.Adam(params=model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    early_stopper = EarlyStopper(num_trials=3, save_path="dfm.pt")
    for epoch_i in range(args.epoch):
        loss = train(model, optimizer, train_data_loader, criterion)
        auc = test(model, valid_data_loader)
        print(f"epoch: {epoch_i} loss: {loss:.4f} validation: auc: {auc:.4f}")
        if not early_stopper.is_continuable(model, auc):
            print(f"validation: best auc: {early_stopper.best_accuracy:.4f}")
            break
    model.load_state_dict(torch.load(early_stopper.save_path))
    print(f"FINAL auc={test(model, test_data_loader):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epoch", type=int, default=10)
    parser.add_argument("--learning_rate", type=float, default=0.008)
    parser.add_argument("--batch_size", type=int, default=100)
    parser.add_argument("--weight_decay", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
