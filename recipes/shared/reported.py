"""Gate on the numbers of a classifier's evaluation: each equals its definition."""

from collections.abc import Callable

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Finding
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


def reported(more: Callable[[Tensor, Tensor], dict[str, float]] = lambda images, logits: {}) -> Gate:
    """Return the gate. `more` defines further numbers, from images (N, C, H, W) and the model's logits (N, classes)."""
    title = "every number that the evaluation reports equals its definition"

    @gate("reported", rows="C12", title=title, reads="data model evaluate train")
    def check(context: GateContext) -> Finding:
        """Evaluates the overfit model on held-out samples, and computes each number again from the answers to each sample alone."""
        run, stage, _ = overfitted(context)
        data, seed = stage.data["val"], context.cfg.run.seed
        indices = pick(data, min(stage.expect.at_most(SAMPLES), len(data)), seed)
        got = run.measure(stage, View(data, indices))
        images, logits, labels = [], [], []
        with evaluating(stage.eval_model), run.autocast():
            for i in indices:
                one = fetch(data, [i], None, run.device)
                images.append(one["image"])
                logits.append(stage.eval_model(one["image"]).float())
                labels.append(one["label"])
            answers = torch.cat(logits)
            due = numbers(answers, torch.cat(labels), list(data.fields["label"].classes)) | more(
                torch.cat(images), answers
            )
        # Else one sample near a boundary may change its class
        exact = run.precision == "fp32" and run.device.type == "cpu"
        near, due = NEAR if exact else COARSE, {k: v for k, v in due.items() if k in got and (exact or "/" not in k)}
        gaps = {k: abs(got[k] - v) / max(1.0, abs(v)) for k, v in due.items()}
        wrong = [k for k, gap in gaps.items() if not gap <= near]
        turned = [k for k in wrong if abs(got[k] - (1 - due[k])) <= near]
        differences = [f"{k} is {got[k]:.4f}, by its definition {due[k]:.4f}" for k in wrong]
        known = sorted(k for k in due if "/" not in k)
        return Finding(
            not wrong, "; ".join(differences) or f"{len(indices)} held-out samples: {', '.join(known)} within {max(gaps.values(), default=0):.0e}",
            f"within {near:g}", "the evaluation counts other samples than it should, averages over batches, or compares with another target\n"
            "samples of a batch change each other's answers", evidence={"got": got, "due": due},
            cause=f"{turned[0]} is 1 minus its definition: a comparison is inverted" if turned else "",
        )  # fmt: skip

    return check
