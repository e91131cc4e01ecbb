"""Reading a digit row by row with an LSTM and attention over the rows, as in the row-MNIST tutorials."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

SEED = 0
torch.manual_seed(SEED)

images, targets = load_digits(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(
    images.reshape(-1, 8, 8).astype("float32") / 16, targets, test_size=0.25, random_state=1
)
train_loader = DataLoader(
    TensorDataset(torch.from_numpy(X_train), torch.from_numpy(y_train)), batch_size=50, shuffle=True
)
test_loader = DataLoader(TensorDataset(torch.from_numpy(X_test), torch.from_numpy(y_test)), batch_size=50)


class RNN(nn.Module):
    def __init__(self, input_size=8, hidden_size=48, num_layers=1, num_classes=10):
        super().__init__()
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.lstm = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)
        self.attn = nn.Linear(hidden_size, 1)
        self.fc = nn.Linear(hidden_size, num_classes)

    def forward(self, x):
        # x: (batch, rows, columns)
        out, (h_n, c_n) = self.lstm(x)
        scores = self.attn(torch.tanh(out))
        weights = F.softmax(scores, dim=1)
        context = (weights * out).sum(dim=1)
        return self.fc(context)


model = RNN()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

for epoch in range(14):
    model.train()
    epoch_loss = 0.0
    for rows, labels in train_loader:
        outputs = model(rows)
        loss = criterion(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        epoch_loss += loss.item()
    print(f"Epoch [{epoch + 1}/14], Loss: {epoch_loss / len(train_loader):.4f}")

model.eval()
with torch.no_grad():
    correct = total = 0
    for rows, labels in test_loader:
        _, predicted = torch.max(model(rows), 1)
        total += labels.size(0)
        correct += (predicted == labels).sum().item()
print(f"FINAL accuracy={correct / total:.4f}")
