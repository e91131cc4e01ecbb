"""What a type checker says of a user's script; `make types` reads it, nothing runs it. An ignore that is not needed is an error,
so each one holds that a wrong use is seen."""

from pathlib import Path

import torch
from torch import Tensor, nn

import trainworthy
from trainworthy import MetricsTracker, Script, check, core


def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
    return {"accuracy": float(len(data))}


def stage(net: nn.Module, data: dict[str, core.Data]) -> core.Stage:
    optimizers = {"main": torch.optim.AdamW(net.parameters())}
    loss = lambda model, batch: {"ce": model(batch["x"]).sum()}  # noqa: E731
    metric = core.Metric("accuracy", "which class?", floor=0.1, ceiling=1.0)
    core.Stage("one", net, optimizers, data, loss, evaluate)  # type: ignore[call-arg]  # without a metric
    return core.Stage("one", net, optimizers, data, loss, evaluate, metric)


def train(cfg: core.Config, run: core.Run, one: core.Stage) -> None:
    for step in run.steps(one):
        values: dict[str, Tensor] = run.update(one, step.batches)
        run.log("own", values)
        if step.due(cfg.train.eval_every):
            accuracy: float = run.evaluate(one)["accuracy"]
            run.log("own", {"accuracy": accuracy})
    run.update(one, "batches")  # type: ignore[arg-type]


def metrics(loss: Tensor) -> None:
    tracker = MetricsTracker(Path("out"))
    tracker.log_step(1, loss=loss, lr=1e-3)
    tracker.log_step(1, loss="low")  # type: ignore[arg-type]
    with trainworthy.watch("out") as seen:
        steps: int = seen.steps
        steps.nothing  # type: ignore[attr-defined]  # noqa: B018


def gates(script: Script) -> None:
    ok: bool = check(lambda: script, only="schema").ok
    check(lambda: script, only=3 if ok else 4)  # type: ignore[arg-type]
