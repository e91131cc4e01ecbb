"""What a sampling loop takes a net's output for, against what the net is trained on (guard/measures/models/sampling.py)."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainworthy.guard.measures.models.sampling import NOISE, SAMPLE, Sampling

T = 60
BAR = torch.cumprod(1 - torch.linspace(1e-3, 0.15, T), 0)


class Net(nn.Module):
    """(N, 32) and times (N,) -> (N, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(33, 64), nn.SiLU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([x, t.float()[:, None] / T], 1))


def seen(trained: str, sampled: str, *, steps: int = 40) -> Sampling:
    """Record a training and a sampling loop: each by `noise`, `sample` or `v`."""
    torch.manual_seed(0)
    one, net, data = Sampling(), Net(), torch.randn(256, 32).sign()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(steps):
        x0, t = data[torch.randint(256, (64,))], torch.randint(T, (64,))
        noise, a = torch.randn_like(x0), BAR[t].sqrt()[:, None]
        one.drew(noise)
        s = (1 - a**2).sqrt()
        x = a * x0 + s * noise
        one.call(net, (x, t, torch.zeros(64, dtype=torch.long)), {})  # a class condition
        out = net(x, t)
        target = {"noise": noise, "sample": x0, "v": a * noise - s * x0, "flow": noise - x0}[trained]
        one.compared(out, target)
        optimizer.zero_grad()
        F.mse_loss(out, target).backward()
        optimizer.step()
    average = copy.deepcopy(net)
    with torch.no_grad():
        x = torch.randn(64, 32)
        one.drew(x)
        for i in reversed(range(T)):
            t, a = torch.full((64,), i), BAR[i].sqrt()
            one.call(average, (x, t), {})
            out, s = average(x, t), (1 - BAR[i]).sqrt()
            one.gave(average, out)
            x0 = {"noise": (x - s * out) / a, "sample": out, "v": a * x - s * out}[sampled].clamp(-1, 1)
            eps, last = (x - a * x0) / s, BAR[i - 1] if i else torch.ones(())
            draw = torch.randn_like(x)
            one.drew(draw)
            x = last.sqrt() * x0 + (1 - last).clamp_min(0).sqrt() * (0.9 * eps + 0.4 * draw)
    return one


@pytest.mark.parametrize("trained", ["noise", "sample", "v"])
@pytest.mark.parametrize("sampled", ["noise", "sample", "v"])
def test_a_sampler_of_another_kind_of_net(trained: str, sampled: str):
    """Signs tell noise and sample from each other; a velocity is neither of the two."""
    one = seen(trained, sampled)
    fault = one.fault({})
    assert (fault is not None) == ((trained, sampled) in {("noise", "sample"), ("sample", "noise"), ("sample", "v")}), (
        one.targets,
        one.signs,
    )
    if fault:
        assert {"noise": NOISE, "sample": SAMPLE}[trained] in fault[0]


def test_two_outputs_a_step_say_nothing():
    """Guidance: the weight of one of the two is negative."""
    one = seen("sample", "noise")
    one.guided = True
    assert one.fault({}) is None


def flow(*, trained: int = 1, unit: float = 1.0, guided: bool = True, steps: int = 40) -> Sampling:
    """Record a flow: `trained`: the sign of the target; `unit`: of the times that the sampling loop tells the net."""
    torch.manual_seed(0)
    one, net, data = Sampling(), Net(), torch.randn(256, 32).sign()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(steps):
        x1, t = data[torch.randint(256, (64,))], torch.rand(64)
        x0 = torch.randn_like(x1)
        one.drew(x0)
        x, target = (1 - t[:, None]) * x0 + t[:, None] * x1, trained * (x1 - x0)
        one.call(net, (x, t * T, torch.zeros(64, dtype=torch.long)), {})
        out = net(x, t * T)
        one.compared(out, target)
        optimizer.zero_grad()
        F.mse_loss(out, target).backward()
        optimizer.step()
    with torch.no_grad():
        x = torch.randn(64, 32)
        one.drew(x)
        for i in range(20):
            t, outs = torch.full((64,), unit * T * (i + 0.5) / 20), []
            for shift in (0.0, 0.3)[: 1 + guided]:
                one.call(net, (x, t, torch.zeros(64, dtype=torch.long)), {})
                outs.append(net(x, t + shift))
                one.gave(net, outs[-1])
            x = x + (outs[-1] + 2 * (outs[0] - outs[-1])) / 20
    return one


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(
    ("how", "words"),
    [({}, ""), ({"trained": -1}, "the velocity from sample to noise"), ({"unit": 20.0}, "the sampling loop from")],
    ids=["as it is", "turned", "numbers of steps"],
)
def test_the_way_and_the_times_of_a_flow(how: dict, words: str, guided: bool):
    one = flow(**how, guided=guided)
    fault = one.fault({})
    assert (fault is not None) == bool(words), (fault, one.targets, one.signs, one.paired)
    assert not words or words in fault[0]
