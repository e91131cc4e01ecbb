"""Gate on the numbers of a classifier's evaluation: each equals its definition."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.checks.learning import overfitted
from trainworthy.core.gates.gate import Gate, GateContext, fetch, pick
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import View

SAMPLES = 64
# Difference from the definition, relative to the number (at least to 1); on accelerators, in 16 bits
NEAR, COARSE = (1e-3, 5e-2)


def numbers(logits: Tensor, labels: Tensor, names: list[str]) -> dict[str, float]:
    """Return what a classifier's evaluation may report, of logits (N, classes) and labels (N,), sample by sample."""
    rows = list(zip(logits.double().cpu(), labels.tolist(), strict=True))
    right = [(label, int(row.argmax()) == label) for row, label in rows]
    recall = {c: [hit for label, hit in right if label == c] for c in sorted({label for label, _ in right})}
    recall = {c: sum(hits) / len(hits) for c, hits in recall.items()}
    return {
        "accuracy": sum(hit for _, hit in right) / len(right),
        "nll": sum((row.logsumexp(0) - row[label]).item() for row, label in rows) / len(rows),
        "macro_recall": sum(recall.values()) / len(recall),
        **{f"recall/{names[c]}": share for c, share in recall.items()},
    }


def precisions(logits: Tensor, labels: Tensor, names: list[str]) -> dict[str, float]:
    """Return what an evaluation reports that divides by a class's predictions where recall divides by its samples."""
    predicted, found = logits.argmax(1).cpu(), {}
    labels = labels.cpu()
    for c in labels.unique().tolist():
        mine = predicted == c
        found[f"recall/{names[c]}"] = ((labels == c) & mine).sum().item() / max(1, int(mine.sum()))
    return found | {"macro_recall": sum(found.values()) / len(found)}


@contextlib.contextmanager
def asked(net: nn.Module) -> Iterator[list[tuple]]:
    """Collect the arguments of every call of the net."""
    found: list[tuple] = []
    hook = net.register_forward_pre_hook(lambda _, args, more: found.append((*args, *more.values())), with_kwargs=True)
    with hook:
        yield found


def other_inputs(calls: list[tuple], images: Tensor) -> str:
    """Return why the net's answers to `images` (N, ...) are not those that an evaluation scored; "" if they are."""
    if any(len(args) != 1 or not isinstance(args[0], Tensor) for args in calls):
        return "the net has several inputs"
    content = lambda image: image.detach().float().cpu().numpy().tobytes()  # noqa: E731
    known = {content(image) for image in images}
    if any(content(row) not in known for args in calls for row in args[0]):
        return "the evaluation asks the net about other pictures than the samples, such as their mirror images"
    return "" if calls else "the evaluation does not call the net"


def reported(more: Callable[[Tensor, Tensor], dict[str, float]] = lambda images, logits: {}) -> Gate:
    """Return the gate. `more` defines further numbers, from images (N, C, H, W) and the model's logits (N, classes)."""
    title = "every number that the evaluation reports equals its definition"

    @gate("reported", rows="C12", title=title, reads="data model evaluate train")
    def check(context: GateContext) -> Finding:
        """Evaluates the overfit model on held-out samples, and computes each number again from the answers to each sample alone. Skips
        an evaluation that has no such answers (averages over several views, another rule than the largest logit)."""
        run, stage, _ = overfitted(context)
        data, seed = stage.data["val"], context.cfg.run.seed
        classes = list(data.fields["label"].classes) if "label" in data.fields else []
        indices = pick(data, min(stage.expect.at_most(SAMPLES), len(data)), seed)
        with asked(stage.eval_model) as calls:
            got = run.measure(stage, View(data, indices))
        singles = [fetch(data, [i], None, run.device) for i in indices]
        if not classes or not all("image" in one and _is_class(one.get("label")) for one in singles):
            raise Skip("samples are not single pictures with one class each")
        images, labels = torch.cat([one["image"] for one in singles]), torch.cat([one["label"] for one in singles])
        if why := other_inputs(calls, images):
            raise Skip(why)
        with evaluating(stage.eval_model), run.autocast():
            answers = torch.cat([stage.eval_model(one["image"]).float() for one in singles])
            due = numbers(answers, labels, classes) | more(images, answers)
        # Else one sample near a boundary may change its class
        exact = run.precision == "fp32" and run.device.type == "cpu"
        near, due = NEAR if exact else COARSE, {k: v for k, v in due.items() if k in got and (exact or "/" not in k)}
        if not due:
            raise Skip(
                "the evaluation reports none of the numbers that this check computes again (accuracy, nll, macro_recall, recall/CLASS)"
            )
        gaps = {k: _gap(k, got[k], v) for k, v in due.items()}
        wrong = [k for k, gap in gaps.items() if not gap <= near]
        turned = [k for k in wrong if abs(got[k] - (1 - due[k])) <= near]
        if "accuracy" in wrong and not turned and not {"accuracy", "macro_recall"} & (gaps.keys() - wrong):
            raise Skip("the evaluation decides by another rule than the largest logit, or scores other samples")
        differences = [f"{k} is {got[k]:.4f}, by its definition {due[k]:.4f}" for k in wrong[:3]]
        differences += [f"{len(wrong) - 3} more"] * (len(wrong) > 3)
        known = sorted(k for k in due if "/" not in k)
        return Finding(
            not wrong, "; ".join(differences) or f"{len(indices)} held-out samples: {', '.join(known)} within {max(gaps.values(), default=0):.0e}",
            f"within {near:g}", "the evaluation counts other samples than it should, averages over batches, or compares with another target\n"
            "a table is read along its other axis, or an entry further\n"
            "samples of a batch change each other's answers", evidence={"got": got, "due": due},
            cause=f"{turned[0]} is 1 minus its definition: a comparison is inverted" if turned
            else _doubled(wrong, got, answers, labels, near)
            or (_exchanged(wrong, got, precisions(answers, labels, classes), near) if wrong else ""),
        )  # fmt: skip

    return check


def _doubled(wrong: list[str], got: dict[str, float], logits: Tensor, labels: Tensor, near: float) -> str:
    """Return that the reported nll is that of probabilities, if it is; else ""."""
    nll = -logits.softmax(1).log_softmax(1).gather(1, labels[:, None].to(logits.device)).mean().item()
    if wrong != ["nll"] or _gap("nll", got["nll"], nll) > near:
        return ""
    return "nll is that of a second softmax: the evaluation passes probabilities to a cross-entropy, which takes logits"


def _exchanged(wrong: list[str], got: dict[str, float], precision: dict[str, float], near: float) -> str:
    """Return that every wrong number is a precision; empty if one is not."""
    if any(_gap(k, got[k], precision[k]) > near if k in precision else True for k in wrong):
        return ""
    return f"{wrong[0]} is a precision: it divides by the predictions of a class, not by its samples (the table's other axis)"


def _is_class(label: object) -> bool:
    return isinstance(label, Tensor) and label.shape == (1,) and not label.is_floating_point()


def _gap(name: str, got: float, due: float) -> float:
    """Return the difference relative to the number (at least to 1). A share may be reported in percent."""
    gap = abs(got - due) / max(1.0, abs(due))
    return gap if name == "nll" else min(gap, abs(got / 100 - due))
