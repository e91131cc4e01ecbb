"""MAML on sinusoids after cbfinn/maml and dragen1860/MAML-Pytorch: inner steps by hand, one meta update for a batch of tasks."""

import argparse
from copy import deepcopy

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F


class Learner(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.vars = nn.ParameterList()
        for n_in, n_out in ((1, hidden), (hidden, hidden), (hidden, 1)):
            w = nn.Parameter(torch.ones(n_out, n_in))
            nn.init.kaiming_normal_(w)
            self.vars.append(w)
            self.vars.append(nn.Parameter(torch.zeros(n_out)))

    def forward(self, x, vars=None):
        vars = self.vars if vars is None else vars
        x = F.relu(F.linear(x, vars[0], vars[1]))
        x = F.relu(F.linear(x, vars[2], vars[3]))
        return F.linear(x, vars[4], vars[5])


class Sinusoid:
    """Tasks y = a sin(x + p); support and query points belong to one task."""

    def __init__(self, k_spt, k_qry, seed):
        self.k_spt, self.k_qry = k_spt, k_qry
        self.rng = np.random.default_rng(seed)

    def sample_task(self):
        return self.rng.uniform(0.1, 5.0), self.rng.uniform(0, np.pi)

    def sample_points(self, task, k):
        amplitude, phase = task
        x = self.rng.uniform(-5, 5, (k, 1))
        return torch.FloatTensor(x), torch.FloatTensor(amplitude * np.sin(x + phase))

    def next(self, n_tasks):
        spt, qry = [], []
        for _ in range(n_tasks):
            task = self.sample_task()
            spt.append(self.sample_points(task, self.k_spt))
            qry.append(self.sample_points(task, self.k_qry))
        x_spt, y_spt = map(torch.stack, zip(*spt))
        x_qry, y_qry = map(torch.stack, zip(*qry))
        return x_spt, y_spt, x_qry, y_qry


class Meta(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.update_lr = args.update_lr
        self.update_step_test = args.update_step_test
        self.net = Learner(40)
        self.meta_optim = optim.Adam(self.net.parameters(), lr=args.meta_lr)

    def forward(self, x_spt, y_spt, x_qry, y_qry):
        task_num = x_spt.size(0)
        losses_q = 0
        for i in range(task_num):
            loss = F.mse_loss(self.net(x_spt[i]), y_spt[i])
            grad = torch.autograd.grad(loss, list(self.net.parameters()), create_graph=True)
            fast_weights = [p - self.update_lr * g for g, p in zip(grad, self.net.parameters())]
            losses_q = losses_q + F.mse_loss(self.net(x_qry[i], fast_weights), y_qry[i])
        loss_q = losses_q / task_num
        self.meta_optim.zero_grad()
        loss_q.backward()
        self.meta_optim.step()
        return loss_q.item()

    def finetunning(self, x_spt, y_spt, x_qry, y_qry):
        net = deepcopy(self.net)
        fast_weights = list(net.parameters())
        for _ in range(self.update_step_test):
            loss = F.mse_loss(net(x_spt, fast_weights), y_spt)
            grad = torch.autograd.grad(loss, fast_weights)
            fast_weights = [p - self.update_lr * g for g, p in zip(grad, fast_weights)]
        with torch.no_grad():
            return F.mse_loss(net(x_qry, fast_weights), y_qry).item()


def main(args):
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    maml = Meta(args)
    db_train = Sinusoid(args.k_spt, args.k_qry, args.seed)
    for step in range(args.epoch):
        loss = maml(*db_train.next(args.task_num))
        if step % 200 == 0:
            print("step:", step, "\ttraining loss:", round(loss, 3))
    test = Sinusoid(args.k_spt, 100, 999).next(200)
    losses = [maml.finetunning(*one) for one in zip(*test)]
    print("Test loss:", np.mean(losses))
    print(f"FINAL mse={np.mean(losses):.4f}")


if __name__ == "__main__":
    argparser = argparse.ArgumentParser()
    argparser.add_argument("--epoch", type=int, default=700)
    argparser.add_argument("--k_spt", type=int, default=10)
    argparser.add_argument("--k_qry", type=int, default=10)
    argparser.add_argument("--task_num", type=int, default=4)
    argparser.add_argument("--meta_lr", type=float, default=3e-3)
    argparser.add_argument("--update_lr", type=float, default=0.01)
    argparser.add_argument("--update_step_test", type=int, default=5)
    argparser.add_argument("--seed", type=int, default=0)
    main(argparser.parse_args())
