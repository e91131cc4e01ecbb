"""Metrics of a student: similarity to the teacher's features, and the words that the frozen decoder reads from its features."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.core.base.doubles import to_double
from trainworthy.recipes.shared import whisper

from trainworthy import core


def speech(batch: dict) -> Tensor:
    """Return which frames are inside a recording, (B, frames) bool; later ones do not count."""
    return torch.arange(batch["features"].shape[1], device=batch["span"].device) < batch["span"][:, None]


@dataclass
class Measures:
    """Metrics over all processes."""

    run: core.Run
    teacher: whisper.Whisper
    mean: Tensor
    """Mean of the teacher's features at each position, (frames, width)."""
    std: Tensor
    """Standard deviation around that mean, (width,)."""

    def likeness(self, student: Callable[[Tensor], Tensor], data: core.Data) -> dict[str, float]:
        """Return the cosine to the teacher over the speech of `data`: raw, and with the teacher's mean at that position subtracted from both
        (the mean alone has a raw cosine of 0.7). Also the norm of the student's frames over the teacher's."""
        rows, mean = [], self.mean.to(self.run.device)
        for batch in self.run.batches(data):
            ours, theirs, mask = student(batch["envelope"]).float(), batch["features"], speech(batch)
            raw, centred = F.cosine_similarity(ours, theirs, -1), F.cosine_similarity(ours - mean, theirs - mean, -1)
            rows.append(
                torch.stack(
                    [(v * mask).sum(1) for v in (raw, centred, ours.norm(dim=-1), theirs.norm(dim=-1), mask)], 1
                )
            )
        raw, centred, ours, theirs, n = to_double(self.run.gather(torch.cat(rows))).sum(0).tolist()
        return {"centred_cosine": centred / n, "cosine": raw / n, "magnitude_ratio": ours / theirs}

    def words(
        self, canvas: Callable[[dict], Tensor], data: core.Data, by: whisper.Whisper | None = None
    ) -> dict[str, float]:
        """Return metrics of what the frozen decoder (or that of `by`) reads from the features: word error rate; share of different
        transcripts (1 if the decoder listens and every input differs); share that begins with the same three words (its prior, if it does
        not listen); and share that repeats four ids or does not end."""
        spoken, heard = [], []
        for batch in self.run.batches(data):
            length = batch["ids"].shape[1] + 8  # a decoder that loops is cut off there
            ids = (by or self.teacher).generate(canvas(batch).float(), at_most=length - len(self.teacher.prompt))
            heard.append(F.pad(ids, (0, length - ids.shape[1]), value=self.teacher.end))
            spoken.append(batch["ids"])
        spoken, ids = (self.run.gather(torch.cat(rows)).tolist() for rows in (spoken, heard))
        bodies = [row[len(self.teacher.prompt) :] for row in ids]
        endless = [self.teacher.end not in b or whisper.loops(b[: b.index(self.teacher.end)]) for b in bodies]
        spoken, heard = ([self.teacher.text(row) for row in rows] for rows in (spoken, ids))
        return {"wer": whisper.word_error_rate(spoken, heard), "different": len(set(heard)) / len(set(spoken)),
                "prior_phrase": commonest_opening(heard), "repetition": sum(endless) / len(endless)}  # fmt: skip


def commonest_opening(texts: list[str], words: int = 3) -> float:
    """Return the share of `texts` that begin with the most common three words."""
    return Counter(" ".join(text.lower().split()[:words]) for text in texts).most_common(1)[0][1] / len(texts)
