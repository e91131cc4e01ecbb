"""Keras-like: Model.compile(), Model.fit() with callbacks; a small CNN on the digits of scikit-learn."""

import copy
import csv

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn, optim


class Callback:
    def set_model(self, model):
        self.model = model

    def on_train_begin(self, logs=None):
        pass

    def on_epoch_begin(self, epoch, logs=None):
        pass

    def on_epoch_end(self, epoch, logs=None):
        pass

    def on_train_end(self, logs=None):
        pass


class EarlyStopping(Callback):
    def __init__(self, monitor="val_loss", mode="min", patience=4):
        self.monitor, self.patience = monitor, patience
        self.better = np.less if mode == "min" else np.greater
        self.best = np.inf if mode == "min" else -np.inf
        self.wait = 0

    def on_epoch_end(self, epoch, logs=None):
        if self.better(logs[self.monitor], self.best):
            self.best, self.wait = logs[self.monitor], 0
            self.weights = copy.deepcopy(self.model.network.state_dict())
        else:
            self.wait += 1
            self.model.stop_training = self.wait >= self.patience

    def on_train_end(self, logs=None):
        self.model.network.load_state_dict(self.weights)


class ReduceLR(Callback):
    def __init__(self, factor=0.5, patience=2, min_lr=1e-5):
        self.factor, self.patience, self.min_lr = factor, patience, min_lr
        self.best, self.wait = np.inf, 0

    def on_epoch_end(self, epoch, logs=None):
        if logs["val_loss"] < self.best - 1e-4:
            self.best, self.wait = logs["val_loss"], 0
            return
        self.wait += 1
        if self.wait > self.patience:
            for group in self.model.optimizer.param_groups:
                group["lr"] = max(group["lr"] * self.factor, self.min_lr)
            self.wait = 0


class CSVLogger(Callback):
    def __init__(self, filename):
        self.filename = filename

    def on_epoch_end(self, epoch, logs=None):
        with open(self.filename, "a", newline="") as f:
            csv.writer(f).writerow([epoch, *(f"{v:.4f}" for v in logs.values())])


class Model:
    def __init__(self, network):
        self.network = network
        self.stop_training = False

    def compile(self, optimizer, loss):
        self.optimizer, self.loss = optimizer, loss

    def _batches(self, x, y, batch_size, shuffle):
        index = np.random.permutation(len(x)) if shuffle else np.arange(len(x))
        for i in range(0, len(x), batch_size):
            part = index[i : i + batch_size]
            yield torch.from_numpy(x[part]), torch.from_numpy(y[part])

    def fit(self, x, y, validation_data, epochs=1, batch_size=32, callbacks=()):
        for callback in callbacks:
            callback.set_model(self)
            callback.on_train_begin()
        history = []
        for epoch in range(epochs):
            self.network.train()
            total, correct, seen = 0.0, 0, 0
            for xb, yb in self._batches(x, y, batch_size, shuffle=True):
                self.optimizer.zero_grad()
                out = self.network(xb)
                loss = self.loss(out, yb)
                loss.backward()
                self.optimizer.step()
                total += loss.item() * len(xb)
                correct += (out.argmax(1) == yb).sum().item()
                seen += len(xb)
            logs = {"loss": total / seen, "acc": correct / seen}
            logs["val_loss"], logs["val_acc"] = self.evaluate(*validation_data)
            history.append(logs)
            print(f"Epoch {epoch + 1}/{epochs} - " + " - ".join(f"{k}: {v:.4f}" for k, v in logs.items()))
            for callback in callbacks:
                callback.on_epoch_end(epoch, logs)
            if self.stop_training:
                break
        for callback in callbacks:
            callback.on_train_end()
        return history

    @torch.no_grad()
    def evaluate(self, x, y, batch_size=128):
        self.network.eval()
        total, correct = 0.0, 0
        for xb, yb in self._batches(x, y, batch_size, shuffle=False):
            out = self.network(xb)
            total += self.loss(out, yb).item() * len(xb)
            correct += (out.argmax(1) == yb).sum().item()
        return total / len(x), correct / len(x)


def build():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(64 * 16, 10),
    )


def load_data():
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 1, 8, 8).astype("float32")
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.3, random_state=42, stratify=y)
    x_train = x_train / 16.0
    x_test = x_test / 16.0
    return (x_train, y_train), (x_test, y_test)


if __name__ == "__main__":
    torch.manual_seed(42)
    np.random.seed(42)
    (x_train, y_train), (x_test, y_test) = load_data()
    n = len(x_train) * 4 // 5
    model = Model(build())
    model.compile(optimizer=optim.Adam(model.network.parameters(), lr=1e-3), loss=nn.CrossEntropyLoss())
    callbacks = [EarlyStopping(monitor="val_acc", mode="max"), ReduceLR(), CSVLogger("history.csv")]
    model.fit(
        x_train[:n],
        y_train[:n],
        validation_data=(x_train[n:], y_train[n:]),
        epochs=20,
        batch_size=32,
        callbacks=callbacks,
    )
    torch.save(model.network.state_dict(), "digits.pt")
    loss, acc = model.evaluate(x_test, y_test)
    print(f"Test loss: {loss:.4f} - test accuracy: {acc:.4f}")
