"""Batches that a loop makes of the step's: what still counts as the step's samples, and what is another batch."""

from types import SimpleNamespace

import pytest
import torch
from trainworthy.core.gates.causes.perturbed import Perturbed
from trainworthy.core.gates.causes.prepared import cut_rows, joined, prepared_batches
from trainworthy.core.recipe.stage import Field

UPDATE = "        run.update(stage, step.batches)\n"
MIXUP = (
    'logits = model(batch["image"])\n        return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, '
    'reduction="sum")}\n',
    'logits = model(F.dropout(batch["image"], 0.1, model.training))\n'
    '        ce = lambda y: F.cross_entropy(logits, y, label_smoothing=cfg.label_smoothing, reduction="none")\n'
    '        if "lam" not in batch:\n            return {"ce": ce(batch["label"]).sum()}\n'
    '        return {"ce": (batch["lam"] * ce(batch["label"]) + (1 - batch["lam"]) * ce(batch["other"])).sum()}\n',
)
LOOP = """        made = []
        for b in step.batches:  # Zhang 2018: one share for the batch
            order, lam = torch.randperm(len(b["label"])), torch.distributions.Beta(0.2, 0.2).sample()
            image = lam * b["image"] + (1 - lam) * b["image"][order]
            made.append({"image": image, "label": b["label"], "other": b["label"][order], "lam": lam.expand(len(order))})
        run.update(stage, made)
"""


def batches() -> list[dict]:
    draws = torch.Generator().manual_seed(0)
    return [{"image": torch.rand(n, 1, 4, 4, generator=draws), "label": torch.arange(n) + n} for n in (4, 2)]


def prepared(given: list[dict], used: list[dict]) -> bool:
    fields = {"image": Field("input"), "label": Field("target", classes=[str(c) for c in range(10)])}
    data = {"train": SimpleNamespace(fields=fields)}
    run = SimpleNamespace(current=SimpleNamespace(batches=given), used_batches=used)
    return bool(prepared_batches(run, SimpleNamespace(data=data)))


def mixed(batch: dict) -> dict:
    """Soft targets, as torchvision's MixUp makes them."""
    hard = torch.nn.functional.one_hot(batch["label"], 10).float()
    return {
        "image": 0.7 * batch["image"] + 0.3 * batch["image"].roll(1, 0),
        "label": 0.7 * hard + 0.3 * hard.roll(1, 0),
    }


@pytest.mark.parametrize(
    ("made", "own"),
    [
        (lambda b: {**b, "image": b["image"].flip(-1)}, True),
        (lambda b: {**b, "image": b["image"][..., 1:], "lam": torch.ones(len(b["label"]))}, True),
        (mixed, True),
        (lambda b: b, False),
        (lambda b: {**b, "label": b["label"].roll(1)}, False),
        (lambda b: {**b, "image": b["image"].roll(1, 0)}, False),
        (lambda b: {**b, "label": mixed(b)["label"].roll(2, 0)}, False),
        (lambda b: {k: v[1:] for k, v in b.items()}, False),
        (lambda b: {"image": b["image"]}, False),
    ],
    ids=[
        "mirrored",
        "cropped",
        "mixed",
        "given",
        "labels-rolled",
        "images-rolled",
        "soft-labels-rolled",
        "samples-lost",
        "no-labels",
    ],
)
def test_batches_that_a_loop_makes_are_those_of_the_step_if_each_sample_keeps_its_target(made, own: bool):
    given = batches()
    assert prepared(given, [made(b) for b in given]) == own
    assert not prepared(given, given[:1])


def test_a_made_batch_is_cut_and_joined_by_rows():
    whole = joined(batches()) | {"share": 0.5}
    parts = cut_rows(whole, [1, 5])
    assert [len(p["label"]) for p in parts] == [1, 5]
    assert [p["share"] for p in parts] == [0.5, 0.5]
    assert torch.equal(joined(parts)["image"], whole["image"])


def test_mixup_in_the_loop_is_quiet(launch, fork):
    """It was stopped twice: the gradient is not that of the given batch, and one share is drawn for each micro-batch. The dropout draws after
    the loop has drawn."""
    fork(MIXUP, (UPDATE, LOOP))
    done = launch("check", "mine.py", "--only", "wiring,accumulation", code=0)
    assert "the batch that the loop makes" in done.verdicts()[1]["measured"], done.shown


@pytest.mark.parametrize(
    "change", ['"label": b["label"].roll(1)', '"image": b["image"].roll(1, 0)'], ids=["labels", "images"]
)
def test_a_loop_that_shifts_targets_and_inputs_is_stopped(change: str, launch, fork):
    fork((UPDATE, f"        run.update(stage, [{{**b, {change}}} for b in step.batches])\n"))
    done = launch("check", "mine.py", "--only", "wiring", code=3)
    assert "direction" in done.verdicts()[0]["measured"], done.shown


def test_the_same_draws_at_every_step_are_stopped(launch, fork):
    """A generator that the loop seeds: the same units are dropped at every step."""
    fork((MIXUP[0], MIXUP[1].replace("0.1, model", "0.5, model")), (UPDATE, "        torch.manual_seed(0)\n" + UPDATE))
    launch("check", "mine.py", "--only", "wiring", code=3)


SAM = """        model, optimizer = stage.model, stage.optimizers["main"]
        weights = list(model.parameters())

        def gradients():
            optimizer.zero_grad()
            for b in step.batches:
                (stage.loss(model, b)["ce"] / sum(len(b["label"]) for b in step.batches)).backward()

        gradients()
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        moves = [0.05 * p.grad / norm for p in weights]
        torch._foreach_add_([p.data for p in weights], moves)
        gradients()
        torch._foreach_sub_([p.data for p in weights], moves)
        torch.nn.utils.clip_grad_norm_(weights, cfg.optim.clip)
        optimizer.step()
"""


def test_gradients_at_weights_that_the_loop_sets_back(launch, fork) -> None:
    fork((UPDATE, SAM))
    (wiring,) = launch("check", "mine.py", "--only", "wiring").verdicts()
    assert wiring["verdict"] == "pass", wiring


@pytest.mark.parametrize(("share", "back"), [(1.0, True), (0.5, False), (0.0, False)])
def test_weights_that_are_set_back_are_the_first_ones(share: float, back: bool) -> None:
    one, seen = torch.nn.Linear(8, 8), Perturbed()
    trained, away = dict(one.named_parameters()), 0.05 * torch.randn(8, 8)
    seen.forward(trained)
    one.weight.data += away
    seen.forward(trained)
    there = one.weight.detach().clone()
    one.weight.data -= share * away
    assert seen.set_back(trained) == back
    if back:
        with seen.again(trained):
            assert torch.equal(one.weight, there)
        assert torch.allclose(one.weight, there - away)
    seen.stepped()
    assert not seen.set_back(trained)
