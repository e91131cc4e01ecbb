"""The core's own arithmetic: streams, cuts, schedules, groups, checkpoints, metrics, settings."""

import copy
import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainworthy.core.base import config, seeds
from trainworthy.core.base.config import Optim
from trainworthy.core.base.errors import Stop, UserError
from trainworthy.core.data import inventory, loader
from trainworthy.core.loop import checkpoint, optim
from trainworthy.core.loop.weights import load_into
from trainworthy.core.monitoring.metrics import MetricsTracker, read_rows
from trainworthy.core.recipe import loading
from trainworthy.core.recipe.stage import Data, Field, View


# ------------------------------------------------------------------------------------------------------- order of samples
def test_every_sample_once_an_epoch_and_another_order_each_epoch():
    stream = loader.Stream(10, seed=3)
    first, second = stream.keys(0, 10), stream.keys(10, 20)
    assert sorted(i for _, i in first) == sorted(i for _, i in second) == list(range(10))
    assert [i for _, i in first] != [i for _, i in second]
    assert {e for e, _ in first} == {0}
    assert {e for e, _ in second} == {1}


def test_a_stream_is_the_same_wherever_it_is_entered():
    whole = loader.Stream(7, seed=1).keys(0, 40)
    for start in (0, 5, 13, 29):
        assert loader.Stream(7, seed=1).keys(start, 40) == whole[start:]


def test_an_order_that_is_too_short_is_refused():
    """It would never fill an epoch."""
    with pytest.raises(UserError, match="another length"):
        loader.Stream(7, seed=1, order=lambda *parts: torch.arange(6)).keys(0, 40)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("sizes", [1, 2, 3])
def test_cuts_hold_every_sample_exactly_once(world: int, sizes: int):
    keys = [(0, i) for i in range(13)]
    got = [k for r in range(world) for m in loader.micro_batches(keys, rank=r, world=world, sizes=sizes) for k in m]
    assert sorted(got) == keys


def test_seeds_are_unrelated_and_global_draws_follow_the_sample():
    assert len({seeds.derive(0, "sample", e, i) for e in range(50) for i in range(50)}) == 2500
    seeds.seed_sample(0, "sample", 1, 2)
    a = torch.rand(3)
    torch.rand(100)
    seeds.seed_sample(0, "sample", 1, 2)
    assert torch.equal(a, torch.rand(3))


# ------------------------------------------------------------------------------------------------------ schedule, groups
@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_schedules(name: str):
    settings = Optim(schedule=name, warmup=0.1, decay=0.2)
    rates = [optim.schedule(s, 100, settings) for s in range(100)]
    assert 0 < rates[0] <= 0.1  # a step at rate zero would train nothing
    assert max(rates) == pytest.approx(1.0)
    assert rates[:10] == sorted(rates[:10])
    if name == "constant":
        assert rates[-1] == 1.0
    else:
        assert 0 < rates[-1] < 0.06
        assert rates[60:] == sorted(rates[60:], reverse=True)
    if name == "wsd":
        assert rates[10:80] == [1.0] * 70
    kept = [optim.schedule(s, 100, replace(settings, min_lr_ratio=0.1)) for s in range(100)]
    assert kept[:10] == rates[:10]
    assert kept[10:] == pytest.approx([0.1 + 0.9 * r for r in rates[10:]])


def test_norms_and_biases_do_not_decay():
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(4, 8), nn.Flatten(), nn.Linear(8, 2))
    groups = {g["name"]: g for g in optim.make_optimizer(net, Optim(weight_decay=0.1)).param_groups}
    assert groups["decay"]["weight_decay"] == 0.1
    assert groups["no_decay"]["weight_decay"] == 0
    assert {p.ndim for p in groups["decay"]["params"]} == {2, 4}
    assert {p.ndim for p in groups["no_decay"]["params"]} == {1}
    with pytest.raises(UserError, match="nothing to train"):
        optim.make_optimizer(net.requires_grad_(False), Optim())


def muon(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    blocks = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    net = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 4), "blocks": blocks, "head": torch.nn.Linear(4, 3)})
    return net, optim.make_optimizer(net, Optim(name="muon", lr=0.01, weight_decay=0.0))


def steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer, n: int) -> list[torch.Tensor]:
    for _ in range(n):
        optimizer.zero_grad()
        net["head"](net["blocks"](net["embed"](torch.arange(3)))).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def test_muon_takes_the_matrices_of_numbered_layers_and_adamw_the_rest():
    net, optimizer = muon(0)
    inside = {id(p) for g in optimizer.param_groups if g["name"].endswith(".muon") for p in g["params"]}
    assert [n for n, p in net.named_parameters() if id(p) in inside] == ["blocks.0.weight", "blocks.1.weight"]
    before = [p.detach().clone() for p in net.parameters()]
    after = steps(net, optimizer, 1)
    moved = {n: (b - a).float() for (n, _), a, b in zip(net.named_parameters(), before, after, strict=True)}
    assert moved["head.weight"].abs().max() == pytest.approx(0.01, rel=1e-3)  # AdamW's first step is the rate
    # Orthogonalised: the second direction counts for more than in the gradient.
    gradient, update = (torch.linalg.svdvals(m) for m in (net["blocks"][0].weight.grad, moved["blocks.0.weight"]))
    assert gradient[1] / gradient[0] < 0.5 < update[1] / update[0]


def test_muon_goes_on_bitwise_from_its_state():
    net, optimizer = muon(0)
    steps(net, optimizer, 3)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    straight = steps(net, optimizer, 3)
    net, optimizer = muon(1)
    net.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(steps(net, optimizer, 3), straight, strict=True))
    optim.set_rates(optimizer, 0.0)  # the schedule reaches both
    assert all(torch.equal(a, b) for a, b in zip(steps(net, optimizer, 1), straight, strict=True))


# ----------------------------------------------------------------------------------------------------------- checkpoints
def _net() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight  # tied
    return net


def test_checkpoints_keep_two_complete_ones_and_pass_over_damage(tmp_path: Path):
    store = checkpoint.Checkpoints(tmp_path / "stage", keep=2)
    net = _net()
    for step in (1, 2, 3):
        with torch.no_grad():
            net[0].weight.fill_(step)
        store.save(step, net, {"x": torch.tensor(step)}, {"note": step})
    store.close()
    assert [p.name for p in store.steps()] == ["step-2", "step-3"]
    assert (tmp_path / "stage" / "latest").resolve().name == "step-3"
    tensors, state, info = store.load(store.newest())
    assert (state["x"].item(), info) == (3, {"step": 3, "note": 3})
    fresh = _net()
    load_into(fresh, tensors, where="here")
    assert fresh[1].weight.mean() == 3
    assert fresh[0].weight is fresh[1].weight
    (tmp_path / "stage" / "step-3" / "state.pt").write_bytes(b"half")
    assert store.newest().name == "step-2"
    assert "state.pt does not match" in store.survey()[1]["step-3"]
    (tmp_path / "stage" / "step-2" / "manifest.json").unlink()
    assert store.newest() is None


def test_a_snapshot_is_taken_before_training_goes_on(tmp_path: Path):
    store = checkpoint.Checkpoints(tmp_path / "stage")
    gate = threading.Event()
    store._writer.submit(gate.wait)  # the writer is busy while the weights move on
    net = _net()
    with torch.no_grad():
        net[0].weight.fill_(1.0)
    store.save(1, net, {}, {})
    with torch.no_grad():
        net[0].weight.fill_(2.0)
    gate.set()
    store.close()
    assert store.load(store.newest())[0]["0.weight"].mean() == 1.0


def test_a_full_disk_stops_with_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = checkpoint.Checkpoints(tmp_path / "run" / "checkpoints" / "stage")
    store.save(1, _net(), {}, {})
    store.wait()

    def full(*_args: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_weights", full)
    store.save(2, _net(), {}, {})
    with pytest.raises(Stop, match="the disk is full") as stopped:
        store.close()
    assert stopped.value.exit_code == 4
    assert store.newest().name == "step-1"
    assert not list(store.folder.glob(".writing*"))


def test_a_full_disk_is_named_though_torch_hides_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch's writer says that a position is unexpected. Removing the unfinished file makes room again."""
    store = checkpoint.Checkpoints(tmp_path / "run" / "checkpoints" / "stage")
    store.save(1, _net(), {}, {})
    store.wait()

    def hidden(*_args: object, **_more: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    def free(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=2**40 * (not list(store.folder.glob(".writing*"))))

    monkeypatch.setattr(checkpoint, "save_weights", hidden)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", free)
    store.save(2, _net(), {}, {})
    with pytest.raises(Stop, match="the disk is full"):
        store.close()


def test_a_pickle_in_a_checkpoint_is_refused(tmp_path: Path):
    store = checkpoint.Checkpoints(tmp_path / "stage")
    store.save(1, _net(), {"evil": Path("x")}, {})
    store.close()
    with pytest.raises(Exception, match=r"weights_only|Unsupported"):
        store.load(store.newest())


def test_weights_of_another_model_are_refused():
    with pytest.raises(UserError, match="not those of this model"):
        load_into(nn.Linear(2, 2), {"other": torch.zeros(1)}, where="a file")


# --------------------------------------------------------------------------------------------------------------- metrics
def test_metrics_tracker_writes_the_same_tags_everywhere(tmp_path: Path):
    tracker = MetricsTracker(tmp_path, run_name="name", use_tensorboard=True)
    tracker.log_step(step=1, loss=torch.tensor(2.5), lr=0.1)
    tracker.log_step(step=2, loss=math.nan, lr=0.1)
    tracker.log_epoch(epoch=1, train={"loss": 2.0}, val={"accuracy": 0.5}, extra={"global_step": 2, "lr": 0.1})
    tracker.close()
    tracker.close()
    steps, epochs = (read_rows(tmp_path / f"{n}_metrics.jsonl") for n in ("step", "epoch"))
    assert steps == [{"step": 1, "step/loss": 2.5, "step/lr": 0.1}, {"step": 2, "step/loss": "nan", "step/lr": 0.1}]
    assert epochs == [{"step": 2, "epoch": 1, "train/loss": 2.0, "val/accuracy": 0.5, "global_step": 2, "lr": 0.1}]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tb" / "name")).Reload()
    assert {"step/loss", "step/lr", "train/loss", "val/accuracy"} <= set(board.Tags()["scalars"])
    assert board.Scalars("val/accuracy")[0].value == 0.5


def test_tensorboard_shows_a_resumed_run_once(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for values in ({1: 1.0, 2: 2.0, 3: 3.0}, {3: 30.0, 4: 40.0}):
        tracker = MetricsTracker(tmp_path)
        tracker.truncate(after_step=min(values) - 1)
        for step, value in values.items():
            tracker.log_step(step=step, loss=value)
        tracker.close()
    scalars = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("step/loss")
    assert [(s.step, s.value) for s in scalars] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_metrics_survive_a_kill_in_the_middle_of_a_row(tmp_path: Path):
    tracker = MetricsTracker(tmp_path, use_tensorboard=False)
    for step in (1, 2, 3):
        tracker.log_step(step=step, loss=step)
    tracker.close()
    path = tmp_path / "step_metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "step/lo')
    assert [r["step"] for r in read_rows(path)] == [1, 2, 3]
    again = MetricsTracker(tmp_path, use_tensorboard=False)
    again.truncate(after_step=2)
    again.log_step(step=3, loss=30)
    again.close()
    assert [json.loads(line)["step/loss"] for line in path.read_text().splitlines()] == [1, 2, 30]


# -------------------------------------------------------------------------------------------------------------- settings
def test_settings_round_trip_through_json():
    from trainworthy.recipes.vision.classify import Config

    cfg = Config(optim=Optim(clip=math.inf, betas=(0.8, 0.9)))
    plain = json.loads(json.dumps(config.to_dict(cfg), allow_nan=False))
    assert config.from_dict(Config, plain, where="here") == cfg
    with pytest.raises(UserError, match=r"unknown setting optim.lrr(.|\n)*lr"):
        config.from_dict(Config, {"optim": {"lrr": 1}}, where="here")
    with pytest.raises(UserError, match="wrong type"):
        config.from_dict(Config, {"train": {"accumulate": True}}, where="here")


# ------------------------------------------------------------------------------------------------------------------ data
class Points(Data):
    """Random points with a class, some of them copied from elsewhere."""

    def __init__(self, x: torch.Tensor, y: list[int]):
        self.x, self.y = x, y
        self.fields = {"x": Field("input"), "y": Field("target", classes=("a", "b"))}

    def __len__(self) -> int:
        return len(self.y)

    def get(self, index: int, generator: torch.Generator | None) -> dict:
        noise = torch.zeros(()) if generator is None else torch.rand((), generator=generator)
        return {"x": self.x[index] + noise, "y": self.y[index]}


def test_overlap_counts_exact_and_near_copies():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 50, generator=draw)
    other = torch.randn(10, 50, generator=draw)
    other[0], other[1] = x[7], x[9] * 2 + 0.01 * torch.randn(50, generator=draw)
    train, val = (inventory.scan(n, Points(v, [0, 1] * (len(v) // 2))) for n, v in (("train", x), ("val", other)))
    found = inventory.overlap(train, val)
    assert (found["exact"], found["near"], found["exact_pairs"]) == (1, 2, [(0, 7)])
    assert {v for v, _ in found["near_pairs"]} == {0, 1}


def test_views_swap_blank_and_fix_draws():
    data = Points(torch.arange(8.0)[:, None], [0, 1] * 4)
    assert View(data, [3, 5]).get(1, None)["x"].item() == 5
    assert View(data, [3, 5], blank=("x",)).get(1, None)["x"].item() == 0
    swapped = View(data, [3, 4], swap=[1, 0]).get(0, None)
    assert (swapped["x"].item(), swapped["y"]) == (4, 1)
    frozen = View(data, [3], draws=0)
    assert frozen.get(0, None)["x"].item() == frozen.get(0, None)["x"].item() != 3
    assert frozen.get(0, None)["x"] == loader.Keyed(View(data, [3]), 0)[(0, 0)]["x"]


def test_a_log_file_gets_a_line_per_hundred_steps_unless_something_was_said(capsys, monkeypatch):
    from trainworthy.core.base import console as module

    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    shown = module.Console()
    for step in range(1, 451):
        now[0] += 0.2  # 20 s for a hundred steps
        if step == 330:
            shown.say("epoch 1")
        shown.tick(step, lambda step=step: f"loss {step}")
    said = [f"  step     {n}  loss {n}" for n in (100, 200, 300, 400)]
    assert capsys.readouterr().out.splitlines() == [*said[:3], "epoch 1", said[3]]


def test_a_verdict_stands_for_one_recipe_with_its_settings_and_data():
    loaded = loading.load("vision/classify")
    cfg = loaded.module.tiny()
    proved = loading.fingerprint(loaded, cfg, "data")
    assert proved == loading.fingerprint(loaded, replace(cfg, run=replace(cfg.run, out=Path("elsewhere"))), "data")
    others = (replace(cfg, optim=replace(cfg.optim, lr=0.002)), "data"), (cfg, "other data")
    assert proved not in [loading.fingerprint(loaded, *other) for other in others]


def test_adamw_and_clip_are_torchs_bit_for_bit():
    """By their kernels on the CPU; a parameter without a gradient, a step that a scaler forbids and hooks are as in torch's own."""
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    mine = optim.make_optimizer(ours, Optim(lr=1e-2, weight_decay=0.1))
    known = torch.optim.AdamW(
        optim.decay_groups(dict(theirs.named_parameters()), 0.1), lr=1e-2, betas=Optim().betas, fused=True
    )
    asked = []
    mine.register_step_pre_hook(lambda *_: asked.append(1))
    for step in range(6):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = None if step in (0, 3) and p is ours[2].bias else 10 ** (step - 3) * torch.randn_like(p)
            q.grad = None if p.grad is None else p.grad.clone()
        norm = optim.clip([p.grad for p in ours.parameters() if p.grad is not None], 0.5)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
        for o in (mine, known):
            o.found_inf = torch.tensor(1.0) if step == 4 else None
            o.param_groups[0]["maximize"] = step == 5  # set by somebody else
            o.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q), step
            assert p.grad is None or torch.equal(p.grad, q.grad), step
            assert all(torch.equal(v, known.state[q][k]) for k, v in mine.state[p].items()), step
    assert len(asked) == 6
