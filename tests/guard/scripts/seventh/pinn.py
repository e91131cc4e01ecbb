"""A physics-informed network after maziarraissi/PINNs and its PyTorch ports: heat equation from boundary and initial values."""

import numpy as np
import torch
from torch import nn

SEED = 0
np.random.seed(SEED)
torch.manual_seed(SEED)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALPHA = 0.2


def exact(x, t):
    return np.exp(-ALPHA * np.pi**2 * t) * np.sin(np.pi * x)


class DNN(nn.Module):
    def __init__(self, layers):
        super().__init__()
        modules = []
        for i in range(len(layers) - 2):
            modules += [nn.Linear(layers[i], layers[i + 1]), nn.Tanh()]
        self.layers = nn.Sequential(*modules, nn.Linear(layers[-2], layers[-1]))

    def forward(self, x):
        return self.layers(x)


class PhysicsInformedNN:
    def __init__(self, X_u, u, X_f, layers, lb, ub):
        self.lb = torch.tensor(lb).float().to(device)
        self.ub = torch.tensor(ub).float().to(device)
        self.x_u = torch.tensor(X_u[:, 0:1], requires_grad=True).float().to(device)
        self.t_u = torch.tensor(X_u[:, 1:2], requires_grad=True).float().to(device)
        self.x_f = torch.tensor(X_f[:, 0:1], requires_grad=True).float().to(device)
        self.t_f = torch.tensor(X_f[:, 1:2], requires_grad=True).float().to(device)
        self.u = torch.tensor(u[:, None]).float().to(device)
        self.dnn = DNN(layers).to(device)
        self.optimizer = torch.optim.Adam(self.dnn.parameters(), lr=5e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=250, gamma=0.5)

    def net_u(self, x, t):
        X = torch.cat([x, t], dim=1)
        return self.dnn(2.0 * (X - self.lb) / (self.ub - self.lb) - 1.0)

    def net_f(self, x, t):
        u = self.net_u(x, t)
        u_t = torch.autograd.grad(u, t, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, grad_outputs=torch.ones_like(u_x), retain_graph=True, create_graph=True)[0]
        return u_t - ALPHA * u_xx

    def train(self, n_iter):
        self.dnn.train()
        for it in range(n_iter):
            u_pred = self.net_u(self.x_u, self.t_u)
            f_pred = self.net_f(self.x_f, self.t_f)
            loss_u = torch.mean((self.u - u_pred) ** 2)
            loss_f = torch.mean(f_pred**2)
            loss = loss_u + loss_f
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            if it % 200 == 0:
                print(f"It: {it}, Loss: {loss.item():.3e}, Loss_u: {loss_u.item():.3e}, Loss_f: {loss_f.item():.3e}")

    def predict(self, X):
        x = torch.tensor(X[:, 0:1]).float().to(device)
        t = torch.tensor(X[:, 1:2]).float().to(device)
        self.dnn.eval()
        with torch.no_grad():
            return self.net_u(x, t).cpu().numpy()[:, 0]


lb, ub = np.array([0.0, 0.0]), np.array([1.0, 1.0])
x0 = np.random.rand(50)
tb = np.random.rand(50)
initial = np.stack([x0, np.zeros(50)], axis=1)
left, right = np.stack([np.zeros(50), tb], axis=1), np.stack([np.ones(50), tb], axis=1)
X_u = np.vstack([initial, left, right])
u = np.hstack([exact(x0, 0.0), np.zeros(100)])
X_f = np.vstack([lb + (ub - lb) * np.random.rand(300, 2), X_u])
model = PhysicsInformedNN(X_u, u, X_f, [2, 20, 20, 20, 1], lb, ub)
model.train(800)

grid = np.stack(np.meshgrid(np.linspace(0, 1, 41), np.linspace(0, 1, 41)), axis=-1).reshape(-1, 2)
truth = exact(grid[:, 0], grid[:, 1])
error_u = np.linalg.norm(truth - model.predict(grid), 2) / np.linalg.norm(truth, 2)
print(f"Error u: {error_u:e}")
print(f"FINAL rel_l2={error_u:.5f}")
