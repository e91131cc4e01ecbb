"""The verdict of a profile: right on planted bottlenecks, and through the real command."""

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trainworthy.core.commands import profile
from trainworthy.core.monitoring import bottlenecks, module_times
from trainworthy.core.monitoring.bottlenecks import Settings

from tests.helpers.commands import holds, trainworthy

TINY = ("--train.batch-size", "16", "--gates.no-enabled", "--run.no-tensorboard", "--steps", "4")


def profiled(step: Callable[[], None], waited: float = 0.0) -> dict:
    """The verdict on a planted step."""
    watch = profile.Watch(3, torch.device("cpu"), None)
    for n in range(1, profile.WARM + 8):
        step()
        watch.waited += waited
        if watch(None, n):
            break
    return profile.find_bottleneck(watch.measured())


def test_planted_bottlenecks_get_their_names():
    """Sizes are such that the right share is far ahead on any processor."""
    square, flat, few = torch.randn(768, 768), torch.randn(4_000_000), torch.randn(4)

    def tiny() -> None:
        x = few
        for _ in range(2000):
            x = x + 1

    def traffic() -> None:
        for _ in range(4):
            flat.add(1.0)

    product = profiled(lambda: [square @ square for _ in range(4)])
    assert (product["verdict"], "--train.compile" in product["try"]) == ("compute-bound", True)
    small = profiled(tiny)
    assert (small["verdict"], "--train.batch-size" in small["try"]) == ("overhead-bound", True)
    moved = profiled(traffic)
    assert (moved["verdict"], "--train.compile" in moved["try"]) == ("memory-bound", True)
    slow = profiled(lambda: time.sleep(0.02), waited=0.02)
    assert (slow["verdict"], "--loader.workers" in slow["try"]) == ("input-bound", True)


def test_a_backward_operation_belongs_to_the_module_of_its_forward():
    """The second layer is nine times as wide, so it has most of the time; together the bars are all that the profiler saw."""
    net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 2304))
    sgd, x, on = torch.optim.SGD(net.parameters(), lr=1e-9), torch.randn(128, 256), True
    with module_times.marked({"model": net}, lambda: on), torch.profiler.profile() as seen:
        for _ in range(4):
            sgd.zero_grad()
            net(x).square().sum().backward()
            sgd.step()
    bars = dict(module_times.of_events(seen.events(), on_device=False))
    forward = sum(e.cpu_time_total for e in seen.events() if e.name.startswith("trainworthy::module::model.*")) / 1e6
    assert (
        sum(v for k, v in bars.items() if k.startswith("model.*")) > 1.5 * forward
    )  # the backward pass costs more than the forward
    assert sum(bars.values()) == pytest.approx(sum(e.self_cpu_time_total for e in seen.events()) / 1e6)
    assert bars["(optimiser)"] > 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_exchange_counts_where_no_computation_hides_it():
    """Two exchanges of 100 us overlap for 20 us, and 50 us of computation runs beside them: 180 - 50 us are left."""

    def event(name: str, start: float, end: float, *, is_async: bool = False) -> SimpleNamespace:
        return SimpleNamespace(name=name, is_async=is_async, time_range=SimpleNamespace(start=start, end=end))

    seen = [event("gloo:all_reduce", 100, 200, is_async=True), event("gloo:all_reduce", 180, 280, is_async=True),
            event("aten::mm", 150, 200), event("aten::addmm", 400, 500), event("c10d::allreduce_", 100, 101)]  # fmt: skip
    found = bottlenecks.exchange_on_cpu(seen)
    assert (found.calls, found.kind) == (2, "communication")
    assert found.seconds == pytest.approx(130e-6)
    assert bottlenecks.exchange_on_cpu(seen[2:]) is None


def test_settings_that_are_used_up_are_not_advised():
    said = bottlenecks.to_try("overhead", Settings(num_envs=16, own_samples=True, compile=True), "cpu")
    assert said == "--num-envs 32 (now 16: more samples for each call of the policy); a larger --train.batch-size"
    assert "--loader.workers 4 (now 2" in bottlenecks.to_try("input", Settings(workers=2), "cpu")
    assert "--train.precision bf16" in bottlenecks.to_try("compute", Settings(), "cuda")
    assert "bf16" not in bottlenecks.to_try("compute", Settings(), "cpu") + bottlenecks.to_try(
        "memory", Settings(precision="bf16"), "cuda"
    )


def test_model_flops_count_the_backward_pass_of_products_and_convolutions():
    """A convolution and its two gradients: three times the forward's FLOPs (the profiler's own count has the forward alone)."""
    net, x = torch.nn.Conv2d(8, 16, 3, padding=1, bias=False), torch.randn(4, 8, 16, 16, requires_grad=True)
    watch = profile.Watch(2, torch.device("cpu"), None)
    for n in range(1, profile.WARM + 6):
        net(x).sum().backward()
        if watch(None, n):
            break
    assert watch.measured().flops == 3 * 2 * 4 * 16 * 8 * 9 * 16 * 16


@pytest.mark.verify
@pytest.mark.parametrize(("planted", "verdict"), [
    ("x = torch.zeros(4)\n        for _ in range(8000):\n            x = x + 1", "overhead-bound"),
    ("x = torch.zeros(1024, 1024)\n        for _ in range(8):\n            x @ x", "compute-bound"),
    ("x = torch.zeros(8_000_000)\n        for _ in range(24):\n            x.add(1.0)", "memory-bound"),
])  # fmt: skip
def test_planted_bottlenecks_are_named_by_the_real_command(planted: str, verdict: str, fork, tmp_path: Path):
    """In the training loop of a fork, where a user would plant them."""
    line = "        run.update(stage, step.batches)\n"
    path = fork((line, f"        {planted}\n{line}"))
    done = trainworthy("profile", path, *TINY, "--json", cwd=tmp_path, code=0)
    (found,) = json.loads(done.stdout)
    assert found["verdict"] == verdict, (found["shares"], found["operations"][:4])


@pytest.mark.verify
def test_exchange_between_two_processes_is_named(fork, tmp_path: Path):
    line = "        run.update(stage, step.batches)\n"
    path = fork(
        (
            line,
            f"        x = torch.zeros(8_000_000)\n        for _ in range(4):\n            torch.distributed.all_reduce(x)\n{line}",
        )
    )
    done = trainworthy("profile", path, *TINY, "-n", "2", "--json", cwd=tmp_path, code=0)
    (found,) = json.loads(done.stdout)
    assert found["verdict"] == "communication-bound", (found["shares"], found["operations"][:4])
    assert "fewer processes" in found["try"]


def test_a_slow_loader_is_said_with_the_setting_to_try(fork, tmp_path: Path):
    path = fork(("        image = self.images[index].float() / 255\n",
                 "        import time\n        time.sleep(0.005)\n        image = self.images[index].float() / 255\n"))  # fmt: skip
    done = trainworthy("profile", path, *TINY, "--json", cwd=tmp_path, code=0)
    (found,) = json.loads(done.stdout)
    assert found["verdict"] == "input-bound", found
    assert found["waited"] > 8 * 0.005  # half of what the samples slept
    assert "--loader.workers" in found["try"]
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    (trace,) = tmp_path.glob("runs/*/checks/*/trace.json.gz")
    assert trace.stat().st_size > 1000
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any(e.get("name") == "trainworthy::wait_for_data" for e in events)
    assert json.loads((trace.parent / "profile.json").read_text())[0]["verdict"] == "input-bound"
    memory = json.loads((trace.parent / "memory.json").read_text())["cpu"]
    assert memory["peak_bytes"] == max(b for _, b in memory["timeline"]) > 10_000
    assert found["flops"] > 1e6  # forward and backward of a small net
    assert 0 < found["flops"] / found["step"] < 1.5 * found["attainable"]
    assert found["operations"][0]["seconds"] >= found["operations"][1]["seconds"]
    names = [one["name"] for one in found["modules"]]
    assert "model.blocks.*.conv1 Conv2d" in names, names
    assert {"(waiting for data)", "(optimiser)"} <= set(names)
    assert sum(one["seconds"] for one in found["modules"]) <= 1.05 * 4 * found["profiled"]
    assert 0 <= found["idle"] < 1
    assert "gpuGetDeviceCount" not in done.stderr
    again = trainworthy(
        "profile", trace.parent, "--steps", 2, cwd=tmp_path, code=0
    )  # a run folder: its recipe, its settings
    holds(again.stdout, "input-bound: ", "try first")
