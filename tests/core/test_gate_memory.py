"""Memory of the gates, counted by bench/gate_memory.py through the real command."""

import contextlib
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainworthy.core.recipe.stage import Expect, Metric, Stage
from trainworthy.core.session.stages import copied

from tests.conftest import ROOT
from tests.helpers.commands import environment

gate = importlib.import_module("trainworthy.core.gates.gate")  # the package has a function of this name

SMALL = {
    "vision/classify": "--loader.workers 0 --ema 0.99 --widths 32 64 --train.max-steps 6",
    "rl/ppo": "--num-steps 32 --train.batch-size 64 --train.max-steps 6",
    "rl/dqn": "--gradient-steps 4 --train.max-steps 6",  # its replay buffer is most of what training holds
}
LARGE = {
    "rl/sac": "--gradient-steps 4 --train.max-steps 6",
    "rl/rlhf": "--stand-in {}/models",
    "diffusion/pixel": "--stand-in {}/models --train.batch-size 16 --train.epochs 0.02",
    "diffusion/text": "--stand-in {}/models",
    "distill/compress": "--stand-in {}/models",
}
"""Recipes whose gates held more than training at some time: two replay buffers, copies of gradients, a copy of the data or of the first weights
for each build."""
GATES = "wiring,accumulation,resume,ema,target-rate"
PEAK, LEFT, KEPT = 1.1, 0.02, 2.2
"""Highest gate over training; and, in units of the model's weights, what is alive at the start of training and before a gate.
Bytes are counted, so the same run gives the same numbers on every machine."""


def counted(folder: Path, words: str, gates: str) -> dict:
    """What the bench counts in a new process, with Python's collector off but where the code asks for it."""
    words = f"{words} --gates.no-remember --run.out {folder}/runs --only {gates} --json {folder}/found"
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "gate_memory.py"), *words.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads((folder / "found").read_text())


@pytest.mark.parametrize("recipe", SMALL)
def test_gates_take_as_much_memory_as_training_and_leave_none(recipe, tmp_path):
    found = counted(tmp_path, f"{recipe} {SMALL[recipe]}", GATES)
    worst = max(found["gates"], key=lambda name: found["gates"][name][1])
    assert found["gates"][worst][1] <= PEAK * found["training"], f"{worst}: {found['gates'][worst][1]:,} bytes"
    assert max(before for before, _ in found["gates"].values()) <= KEPT * found["weights"]
    assert found["start"] <= LEFT * found["weights"]


@pytest.mark.verify
@pytest.mark.parametrize("recipe", LARGE)
def test_gates_of_large_recipes_take_as_much_memory_as_training(recipe, tmp_path):
    found = counted(tmp_path, f"{recipe} {LARGE[recipe].format(tmp_path)}", f"schema,schedule,loader,{GATES}")
    worst = max(found["gates"], key=lambda name: found["gates"][name][1])
    assert found["gates"][worst][1] <= PEAK * found["training"], f"{worst}: {found['gates'][worst][1]:,} bytes"


def test_gates_divide_their_batches_like_a_run_of_small_ones(tmp_path):
    """A rehearsal takes 16 samples and the initial loss 256, where the run trains on 4 at a time and evaluates 4."""
    small = "--loader.workers 0 --widths 8 8 --train.batch-size 4 --train.eval-batch-size 4 --train.max-steps 6"
    found = counted(tmp_path, f"vision/classify {small}", "initial-loss,wiring,terms")
    worst = max(found["gates"], key=lambda name: found["gates"][name][1])
    assert found["gates"][worst][1] <= PEAK * found["training"], f"{worst}: {found['gates'][worst][1]:,} bytes"


def test_the_loss_of_a_divided_batch_has_the_gradient_of_the_whole():
    """Of samples with unequal numbers of counted entries, with dropout: each part's graph is made anew with the same draws."""
    torch.manual_seed(0)
    net, x, counted = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5)), torch.randn(10, 6), torch.arange(10) % 3
    stage = built()
    stage.model = net
    stage.loss = lambda model, batch: {"sum": (model(batch["x"]).square().sum(1) * batch["n"]).sum()}
    stage.counts = lambda batch: {"*": batch["n"].sum()}
    run = SimpleNamespace(autocast=contextlib.nullcontext)
    found = []
    for sizes in ([4, 3, 3], [10]):
        parts = [{"x": a, "n": b} for a, b in zip(x.split(sizes), counted.split(sizes), strict=True)]
        net.train(len(sizes) > 1)
        total = gate.total_loss(run, stage, *parts)
        (grad,) = torch.autograd.grad(total, net[0].weight)
        if len(sizes) > 1:  # with dropout: the loss that was read is the one whose gradient was taken
            step = 1e-3 * grad / grad.norm()
            torch.manual_seed(1)
            before = gate.total_loss(run, stage, *parts)
            (slope,) = torch.autograd.grad(before, net[0].weight)
            torch.manual_seed(1)
            with torch.no_grad():
                net[0].weight += step
                after = gate.total_loss(run, stage, *parts)
                net[0].weight -= step
            assert (after - before).item() == pytest.approx((slope * step).sum().item(), rel=0.05)
            net.eval()
            total = gate.total_loss(run, stage, *parts)
            (grad,) = torch.autograd.grad(total, net[0].weight)
        found.append((total.item(), grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-5)


# ------------------------------------------------------------------------------------------------------- frozen weights
def built(seed: int = 0) -> Stage:
    """A net of which one part is frozen, with a teacher."""
    torch.manual_seed(seed)
    net = nn.ModuleDict({"base": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    stage = Stage("one", net, {"main": torch.optim.SGD(net["head"].parameters(), 0.1)}, {}, lambda model, batch: {},
                  lambda model, data: {}, Metric("score", "?", 0.0, 1.0), frozen_modules={"teacher": nn.Linear(4, 4)},
                  expect=Expect(frozen=("base.",)))  # fmt: skip
    stage.pretrained = {"base.weight": net["base"].weight.detach().clone()}
    return stage


def places(stage: Stage) -> dict[str, int]:
    every = {**dict(stage.model.named_parameters()), **dict(stage.frozen_modules["teacher"].named_parameters())}
    return {n: p.data_ptr() for n, p in every.items()} | {"file": stage.pretrained["base.weight"].data_ptr()}


def test_frozen_weights_of_all_builds_are_in_memory_once():
    """What trains is not shared, and neither is a frozen weight that differs."""
    known: dict = {}
    first, again, other = built(), built(), built()
    with torch.no_grad():
        other.model["base"].bias += 1
    for stage in (first, again, other):
        gate.share(stage, known)
    same = {n for n, place in places(first).items() if place == places(again)[n]}
    assert same == {"base.weight", "base.bias", "weight", "bias", "file"}
    assert {n for n, place in places(first).items() if place == places(other)[n]} == same - {"base.bias"}
    assert places(first)["file"] != places(first)["base.weight"]  # a gate compares them
    assert not {*places(copied(first)).values()} & {places(first)[n] for n in ("base.weight", "base.bias")}


def test_what_a_gate_asked_for_is_on_the_host_while_another_stage_is_made(monkeypatch):
    """And on the device again afterwards, because the gate still reads it."""
    places: list[tuple[str, str]] = []
    monkeypatch.setattr(gate, "move", lambda stage, device: places.append((stage.name, device.type)))
    monkeypatch.setattr(gate, "HOST", torch.device("meta"))
    first, second = built(), built()
    second.name = "two"
    context = gate.GateContext(None, SimpleNamespace(device=torch.device("cpu")), None, None, Path(), {}, {})
    context.once("look", lambda: (None, first))
    places.clear()
    context.once("rehearsal", lambda: places.append(("two", "made")) or (None, second))
    assert places == [("one", "meta"), ("two", "made"), ("one", "cpu"), ("two", "cpu")]
    places.clear()
    context.put_away()
    context.once("look", lambda: (None, first))
    assert places == [("one", "meta"), ("two", "meta"), ("one", "cpu")]


def test_shared_weights_stay_where_they_are_and_can_be_given_memory_of_their_own(monkeypatch):
    known: dict = {}
    first, again = built(), built()
    for stage in (first, again):
        gate.share(stage, known)
    moved: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", lambda tensor, device: moved.append(tensor.data_ptr()) or tensor)
        gate.move(again, torch.device("meta"))
    assert {n for n, place in places(again).items() if place in moved} == {"head.weight", "head.bias"}
    third = built()
    gate.share(third, known)
    gate.unshare(third.model)
    with torch.no_grad():
        third.model["base"].weight.zero_()
    assert first.model["base"].weight.any()
