"""The shape of pytorch/examples time_sequence_prediction: LBFGS with a closure over all data, double precision."""

import numpy as np
import torch
from torch import nn, optim

np.random.seed(0), torch.manual_seed(0)
data = np.sin((np.arange(60)[None] + np.random.randint(-20, 20, 20)[:, None]) / 5.0)
input, target = torch.from_numpy(data[3:, :-1]), torch.from_numpy(data[3:, 1:])
test_input, test_target = torch.from_numpy(data[:3, :-1]), torch.from_numpy(data[:3, 1:])


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.linear = nn.LSTMCell(1, 16), nn.Linear(16, 1)

    def forward(self, input):
        outputs, h, c = (
            [],
            torch.zeros(len(input), 16, dtype=torch.double),
            torch.zeros(len(input), 16, dtype=torch.double),
        )
        for t in input.split(1, dim=1):
            h, c = self.lstm1(t, (h, c))
            outputs.append(self.linear(h))
        return torch.cat(outputs, dim=1)


seq = Sequence().double()
criterion = nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=8)
for i in range(8):
    print("STEP:", i)

    def closure():
        optimizer.zero_grad()
        loss = criterion(seq(input), target)
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        print("test loss:", criterion(seq(test_input), test_target).item())
