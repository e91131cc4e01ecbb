"""The second stage without a decoder: a linear layer of letters on the student's features, trained with it by CTC (Graves 2006), decoded
greedily.

There is no language model, so nothing is written that was not heard, and the vocabulary is letters, digits, space and apostrophe. The
usual failure is that all frames stay blank: CTC learns blanks first, and with a low learning rate or fewer frames than letters it learns
nothing else. So the share of blanks is measured and monitored.
"""

import itertools
from pathlib import Path

import jiwer
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.checks.learning import OVERFIT_SAMPLES, overfitted
from trainworthy.core.gates.gate import GateContext, fetch, pick
from trainworthy.core.loop.run import evaluating
from trainworthy.core.monitoring.monitors import monitor
from trainworthy.core.recipe.stage import View, rows
from trainworthy.recipes.distill.evaluation.measures import Measures
from trainworthy.recipes.distill.models import heads
from trainworthy.recipes.shared import whisper

from trainworthy import core

LETTERS = " 'abcdefghijklmnopqrstuvwxyz0123456789"
BLANK = 0  # class 0; letter i of LETTERS is class i + 1
EMPTY, BLANKS = 0.05, 0.95  # largest shares of transcripts without a letter, and of blank frames


def spell(text: str) -> list[int]:
    """Return the classes of a transcript, normalised as Whisper does. Other characters are left out."""
    return [LETTERS.index(c) + 1 for c in whisper.normalise(text) if c in LETTERS]


def read(best: list[int]) -> str:
    """Return the text of the best class of each frame: repeats collapsed, then blanks removed."""
    once = [c for i, c in enumerate(best) if i == 0 or c != best[i - 1]]
    return "".join(LETTERS[c - 1] for c in once if c != BLANK).strip()


class Speller(nn.Module):
    """A student with a layer of letters. `forward` returns the student's features."""

    def __init__(self, student: nn.Module, width: int):
        super().__init__()
        self.student, self.norm, self.letters = student, nn.LayerNorm(width), nn.Linear(width, 1 + len(LETTERS))

    def forward(self, envelope: Tensor) -> Tensor:
        """Map (B, T, channels) to the encoder's features (B, frames, width)."""
        return self.student(envelope)

    def spelt(self, envelope: Tensor) -> Tensor:
        """Map (B, T, channels) to log-probabilities (B, frames, classes), 50 frames per second."""
        return self.letters(self.norm(self(envelope).float())).log_softmax(-1)


class Spelt(core.Data):
    """Training data with their letters, padded with blanks."""

    def __init__(self, data: core.Data):
        self.data, self.notes = data, data.notes
        self.spelt = [spell(data.source.texts[i]) for i in data.which]
        self.fields = {**data.fields, "letters": core.Field("target")}
        self.longest = max(len(spell(text)) for text in data.source.texts)
        for i in data.which:
            fits(data.source.texts[i], int(data.source.spans[i]))

    def __len__(self) -> int:
        return len(self.data)

    def get(self, index: int, generator: torch.Generator | None) -> dict:
        return self.make(index, self.read(index), generator)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data.read(index)

    def make(self, index: int, got: tuple[Tensor, Tensor], generator: torch.Generator | None) -> dict:
        letters = torch.tensor(self.spelt[index])
        return {**self.data.make(index, got, generator), "letters": F.pad(letters, (0, self.longest - len(letters)))}

    def collate(self, samples: list[dict]) -> dict:
        return self.data.collate(samples)


def fits(text: str, frames: int) -> None:
    """Raise UserError if CTC cannot align a transcript with that many frames."""
    needs = fewest(spell(text))
    if not 0 < needs <= frames:
        raise core.UserError(
            "a recording cannot be spelt", got=f"'{text}': {needs} classes in {frames} frames",
            needed="at least one letter, and a frame of 20 ms for each and between two equal ones",
            cause="a transcript of another recording, or no English", next="--decoder whisper, or leave it out",
        )  # fmt: skip


def fewest(letters: list[int]) -> int:
    """Return the frames that CTC needs: one per letter, and a blank between two equal letters."""
    return len(letters) + sum(a == b for a, b in itertools.pairwise(letters))


def task(cfg: core.Config, run: core.Run, previous: core.Stage, measures: Measures) -> core.Stage:
    """Train student and letters together, starting from the first stage."""
    data = {name: Spelt(one) for name, one in previous.data.items()}
    model = Speller(heads.taught(previous), measures.teacher.width)
    return core.Stage(
        name="task",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data=data,
        shard_units=lambda model: [*rows(model), *model.children()],
        loss=loss,
        evaluate=lambda model, data: {**words(run, model, data), **measures.likeness(model, data)},
        metric=core.Metric("wer", "which words were spoken?", floor=1.0, ceiling=0.0, higher_is_better=False),
        counts=lambda batch: {"ctc": (batch["letters"] != BLANK).sum()},
        expect=core.Expect(overfit_metric=0.05, overfit_steps=200),
        baselines=lambda: baselines(run, model, data["val"]),
        preview=previous.preview,
        predict=tiles,
        export=lambda folder: export(folder, model, data["val"], cfg),
        gates=[spelling, blanks],
        monitors=[silent],
    )  # fmt: skip


def loss(model: Speller, batch: dict) -> dict[str, Tensor]:
    """Return the sum of the negative log-probabilities of the letters, over all alignments with the frames of speech."""
    count = (batch["letters"] != BLANK).sum(1)
    logs = model.spelt(batch["envelope"]).transpose(0, 1)  # (frames, B, classes)
    return {"ctc": F.ctc_loss(logs, batch["letters"], batch["span"], count, blank=BLANK, reduction="sum")}


def greedy(model: Speller, batch: dict) -> Tensor:
    """Return the best class of each frame, (B, frames); blank outside speech."""
    best = model.spelt(batch["envelope"]).argmax(-1)
    return best * (torch.arange(best.shape[1], device=best.device) < batch["span"][:, None])


def words(run: core.Run, model: Speller, data: core.Data) -> dict[str, float]:
    """Return word and letter error rates, and the shares of blank frames, of transcripts without a letter and of different transcripts."""
    texts, best, spans = [], [], []
    for batch in run.batches(data):
        best.append(greedy(model, batch))
        texts.append(batch["letters"])
        spans.append(batch["span"])
    texts, best, spans = (run.gather(torch.cat(rows)) for rows in (texts, best, spans))
    heard = [read(row) for row in best.tolist()]
    texts = ["".join(LETTERS[c - 1] for c in row if c != BLANK) for row in texts.tolist()]
    return {"wer": whisper.word_error_rate(texts, heard), "cer": jiwer.cer(texts, heard),
            "blank": 1 - (best != BLANK).sum().item() / spans.sum().item(),
            "empty": sum(not h for h in heard) / len(heard), "different": len(set(heard)) / len(set(texts))}  # fmt: skip


def baselines(run: core.Run, model: Speller, val: core.Data) -> dict[str, dict[str, float]]:
    """Return the scores with another recording's input."""
    others = View(val, range(len(val)), swap=[(i + 1) % len(val) for i in range(len(val))])
    return {"this model, input of another recording": words(run, model, others)}


def tiles(model: Speller, batch: dict) -> list[core.Tile]:
    """Return what is read from each recording, and the share that is correct."""
    heard = [read(row) for row in greedy(model, batch).tolist()]
    return [core.Tile(h or "(blank)", score=max(0.0, 1 - whisper.word_error_rate([t], [h])))
            for t, h in zip(batch["text"], heard, strict=True)]  # fmt: skip


class Program(nn.Module):
    """The exported program: envelopes to log-probabilities."""

    def __init__(self, speller: Speller):
        super().__init__()
        self.speller = speller

    def forward(self, envelope: Tensor) -> Tensor:
        """Map (B, rows, channels) to (B, frames, classes)."""
        return self.speller.spelt(envelope)


def export(folder: Path, model: Speller, data: Spelt, cfg: core.Config) -> None:
    """Write the weights, the alphabet, and a program from envelopes to log-probabilities."""
    config = {"architecture": "Speller", "width": cfg.width, "depth": cfg.depth, "classes": ["blank", *LETTERS],
              "input": heads.sensed(data.data.source), "output": "(B, frames, classes) log-probabilities, 50 a second"}  # fmt: skip
    example = torch.stack([data.read(i)[0] for i in range(2)])
    core.save_export(folder, Program(model), config, example, weights=model)


# --------------------------------------------------------------------------------------------------- what must be proved
@gate("spelling", rows="W5", title="words and letters convert both ways", reads="data")
def spelling(context: GateContext) -> Finding:
    """Encodes and decodes every transcript of both splits, with one frame per letter and a blank between equal ones."""
    _, stage = context.look()
    wrong, n = [], 0
    for data in stage.data.values():
        for i in range(len(data)):
            sample, n = data.get(i, None), n + 1
            letters = [c for c in sample["letters"].tolist() if c != BLANK]
            frames = [c for k, c in enumerate(letters) for c in ([BLANK] if k and c == letters[k - 1] else []) + [c]]
            if whisper.word_error_rate([sample["text"]], [read(frames)]) or max(letters) > len(LETTERS):
                wrong.append(f"'{sample['text']}' comes back as '{read(frames)}'")
    return Finding(
        not wrong, f"{len(wrong)} of {n} transcripts: {wrong[0]}" if wrong else f"{n} transcripts there and back",
        "every transcript comes back as it was", "letters that the alphabet has not got (accents, another script), or another "
        "blank than the loss has", evidence={"wrong": wrong[:20]},
    )  # fmt: skip


@gate(
    "blanks",
    rows="W1",
    title="eight recordings are transcribed, not left blank",
    reads="model data loss counts optimizers",
)
def blanks(context: GateContext) -> Finding:
    """Measures the share of blank frames after eight recordings were memorised, and what is read from them."""
    run, stage, _ = overfitted(context)
    data, seed = stage.data["train"], context.cfg.run.seed
    batch = fetch(data, pick(data, OVERFIT_SAMPLES, seed), seed, run.device)
    with evaluating(stage.model):
        best = greedy(stage.model, batch)
    heard = [read(row) for row in best.tolist()]
    share = 1 - (best != BLANK).sum().item() / batch["span"].sum().item()
    most = 1 - 0.5 * (batch["letters"] != BLANK).sum().item() / batch["span"].sum().item()
    different = len({h for h in heard if h})
    return Finding(
        share <= most and different >= len(heard) - 1,
        f"{share:.0%} of the frames blank, {different} different transcripts of {len(heard)}",
        f"at most {most:.0%} (half of the letters), {len(heard) - 1} different ones",
        "everything is blank: what CTC learns first, and all it learns where the rate is too low or the letters start far off\n"
        "the blank of the loss is not that of the decoding\nthe frames given to the loss are fewer than the letters",
        evidence={"blank": share, "heard": heard},
    )  # fmt: skip


@monitor("blanks-stay", rows="W1", title="held-out recordings are transcribed, not left blank")
def silent(history: list[dict[str, float]]) -> Finding:
    """Measures the shares of transcripts without a letter and of blank frames at the last evaluation."""
    empty, blank = history[-1]["val/empty"], history[-1]["val/blank"]
    return Finding(
        empty <= EMPTY and blank <= BLANKS,
        f"{empty:.0%} of the transcripts empty, {blank:.0%} of the frames blank",
        f"at most {EMPTY:.0%}, and {BLANKS:.0%}",
        "CTC learns blanks first: more steps of --task.epochs, or a higher --task.lr\n"
        "a first stage that did not learn to hear", evidence={"blank": [row["val/blank"] for row in history]},
    )  # fmt: skip
