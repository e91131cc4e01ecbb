"""Sine waves with two LSTM cells, after pytorch/examples time_sequence_prediction (Adam instead of LBFGS)."""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim


class Sequence(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.hidden = hidden
        self.lstm1 = nn.LSTMCell(1, hidden)
        self.lstm2 = nn.LSTMCell(hidden, hidden)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t = torch.zeros(input.size(0), self.hidden)
        c_t = torch.zeros(input.size(0), self.hidden)
        h_t2 = torch.zeros(input.size(0), self.hidden)
        c_t2 = torch.zeros(input.size(0), self.hidden)

        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for i in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        outputs = torch.cat(outputs, dim=1)
        return outputs


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=250, help="steps to run")
    opt = parser.parse_args()
    np.random.seed(0)
    torch.manual_seed(0)
    # generate 60 waves of 100 points
    T, L, N = 8, 100, 60
    x = np.empty((N, L), "int64")
    x[:] = np.array(range(L)) + np.random.randint(-4 * T, 4 * T, N).reshape(N, 1)
    data = np.sin(x / 1.0 / T).astype("float32")
    input = torch.from_numpy(data[3:, :-1])
    target = torch.from_numpy(data[3:, 1:])
    test_input = torch.from_numpy(data[:3, :-1])
    test_target = torch.from_numpy(data[:3, 1:])
    seq = Sequence()
    criterion = nn.MSELoss()
    optimizer = optim.Adam(seq.parameters(), lr=0.01)
    for i in range(opt.steps):
        optimizer.zero_grad()
        out = seq(input)
        loss = criterion(out, target)
        loss.backward()
        optimizer.step()
        if i % 25 == 24:
            # begin to predict, no need to track gradient here
            with torch.no_grad():
                future = 100
                pred = seq(test_input, future=future)
                test_loss = criterion(pred[:, :-future], test_target)
                # the waves go on: compare the free run with what they would be
                true = np.sin((x[:3, -1:] + 1 + np.arange(future)) / T)
                free = float(((pred[:, -future:].numpy() - true) ** 2).mean())
            print("STEP:", i, "loss:", loss.item(), "test loss:", test_loss.item(), "free run mse:", free)
