"""Gate on the export: a fresh process reads pictures and questions with it, and computes what the trained model computes."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.processes import agreed
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.checks.exported import query
from trainworthy.core.gates.gate import GateContext, fetch, pick
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.recipes.llm.gates.fresh_export import BIGGEST, EXACT, ROUGH
from trainworthy.recipes.vlm.data import questions, rows
from trainworthy.recipes.vlm.models import export_reader

READER = Path(export_reader.__file__)
SAMPLES = 4
ALIKE = 5e-4  # relative difference of the embeddings that two programs compute


def first_answers(batch: dict[str, Tensor], features: int) -> list[tuple[dict[str, Any], Tensor]]:
    """Return of each row its first question as the reader takes it, and where its answer's tokens are predicted, (T,) bool."""
    found, number = [], rows.numbered(batch["labels"])
    for b in range(len(number)):
        before, scored = questions.prompt(batch, b, 1, number[b]), number[b] == 1
        ids = [*batch["ids"][b, before].tolist(), *batch["ids"][b, scored].tolist()]
        images = batch["image"][b] if batch["image"].ndim == 5 else batch["image"][b][None]
        used = int((batch["ids"][b, before] == rows.IMAGE).sum()) // features
        found.append(({"ids": ids, "images": images[:used].cpu(), "scored": int(scored.sum())}, scored.roll(-1, 0)))
    return found


@gate(
    "exported",
    rows="C18 X1",
    title="the export, loaded in a fresh process, answers as the trained model does",
    reads="model export optimizers state loss counts train",
)
def exported(context: GateContext) -> Finding:
    """Exports the rehearsed model, whose weights have moved. A process that imports nothing of this project loads vision.pt2 and the language
    model, and reads the stored pictures of a few training samples. Its log-probabilities of the first answer are compared, relative to what
    the rehearsal changed."""
    run, stage, _ = rehearsed(context)
    data = stage.data["train"]
    if data.varied:
        raise Skip("a model of the hub is exported whole, with its own processor")
    if sum(p.numel() for p in stage.model.parameters()) > BIGGEST:
        raise Skip("the model is too large to be saved and loaded before each run")
    batch = fetch(data, pick(data, min(SAMPLES, len(data)), context.cfg.run.seed), None, run.device)
    samples = first_answers(batch, data.features)

    def compare() -> Finding | None:
        ours, before = (
            _log_probs(run, net, batch, samples) for net in (stage.eval_model, context.look()[1].eval_model)
        )
        least, limit = EXACT if run.precision == "fp32" and run.device.type == "cpu" else ROUGH
        needed = f"at most {limit:.0%} of the change by training"
        with tempfile.TemporaryDirectory() as name:
            stage.export(Path(name))
            try:
                found = query(READER, Path(name), [sample for sample, _ in samples])
            except RuntimeError as error:
                return Finding(False, f"the export cannot be read in a fresh process: {error}", needed,
                               "vision.pt2 or language/ is missing, or the words have other numbers")  # fmt: skip
        theirs, change = torch.cat(found["log-probabilities"]), (ours - before).norm()
        if theirs.shape == ours.shape and change < least * before.norm():
            return None
        gap = ((theirs - ours).norm() / change).item() if theirs.shape == ours.shape else float("inf")
        return Finding(
            gap <= limit, f"log-probabilities of {len(ours)} tokens of answers differ by {gap:.1%} of the change by training", needed,
            "pictures are scaled or normalised in the model's own code, which vision.pt2 does not contain: put it into the exported module\n"
            "export() writes another part than the trained one: the projector or the language model of an earlier stage, or a copy\n"
            "adapters are not merged into the exported language model",
            evidence={"gap": gap}, cause=_which(run, stage.eval_model, samples, found["embeddings"]) if gap > limit else "",
        )  # fmt: skip

    found = agreed(run.accelerator, compare() if run.rank == 0 else None)
    if found is None:
        raise Skip("the rehearsal hardly changed the answers")
    return found


def _log_probs(
    run: Run, model: nn.Module, batch: dict[str, Tensor], samples: list[tuple[dict[str, Any], Tensor]]
) -> Tensor:
    """Return the model's own log-probabilities of the same tokens, (tokens, vocabulary)."""
    with evaluating(model), torch.no_grad(), run.autocast():
        logits = model(batch)
    return torch.cat([logits[b, where] for b, (_, where) in enumerate(samples)]).float().log_softmax(-1).cpu()


def _which(run: Run, model: nn.Module, samples: list[tuple[dict[str, Any], Tensor]], theirs: list[Tensor]) -> str:
    """Return which part of the export differs: the one for pictures, or what is around it."""
    images = torch.cat([sample["images"] for sample, _ in samples])
    if not len(images):
        return ""
    with evaluating(model), torch.no_grad(), run.autocast():
        ours = model.projector(model.encoder(images.to(run.device))).float().cpu()
    if (torch.cat(theirs) - ours).norm() > ALIKE * ours.norm():
        return "vision.pt2 holds another encoder or projector than the trained one, such as that of an earlier stage"
    return "encoder and projector are exported as trained: the model's own code changes pictures before them, or the language model is another"
