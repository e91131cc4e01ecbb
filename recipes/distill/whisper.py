"""Distil Whisper's encoder into a net that reads a low-cost sensor: 16 band energies, 20 times per second.

tiny  Whisper tiny.en and 440 synthesised sentences; two CPU cores, about two minutes (teacher features made once: one more).
full  any Whisper by its hub name, on `--data.path FOLDER` of your own recordings with transcripts. The same code path.

The student learns features first, then words through the frozen decoder (W1). The loss has magnitude and direction, without
padding (W2). The output starts at the teacher's mean and scale (W3). Upsampling from 20 to 50 frames per second is learnt (W4).
Student and teacher share one vocabulary (W5). Only recordings that the teacher transcribes correctly are used (W6).
"""

import copy
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base.config import Loader, Optim, Phase, Train
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.distill.data import recordings
from trainworthy.recipes.distill.evaluation import pictures
from trainworthy.recipes.distill.evaluation.measures import Measures, speech
from trainworthy.recipes.distill.gates import whisper as gates
from trainworthy.recipes.distill.models import ctc, fallbacks, heads
from trainworthy.recipes.distill.models.heads import reader
from trainworthy.recipes.shared import whisper

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of distill/whisper."""

    data: recordings.Source = field(default_factory=recordings.Source)
    SEARCH_RANGES = "mse=0.1:10 cosine=0.1:10"
    features: Phase = field(default_factory=Phase)
    task: Phase = field(default_factory=Phase)
    width: int = 128
    """Channels of the student: a multiple of 32, the width of an attention head."""
    depth: int = 4
    """Blocks of the student, each a convolution, attention and a two-layer net."""
    mse: float = 1.0
    """Coefficient of the mean squared error (magnitude)."""
    cosine: float = 1.0
    """Coefficient of 1 - cosine similarity (direction)."""
    cross_attention: Phase = field(default_factory=Phase)
    head: Phase = field(default_factory=Phase)
    ramp: float = 0.0
    """Fraction (0 to 1) of the second stage over which the word loss is phased in, next to the first stage's terms; 0: only the
    word loss."""
    decoder: Literal["whisper", "ctc"] = "whisper"
    """What turns features into words in the second stage: Whisper's frozen decoder, or a letter head (CTC) trained with the
    student."""
    no_repeat_ngram_size: int = 0
    """Length of n-grams that the decoder must not repeat; 0: no limit."""


def tiny() -> Config:
    """Whisper tiny.en and synthesised speech on two CPU cores."""
    return Config(
        features=Phase(epochs=8, batch_size=16, lr=2e-3, eval_every=2, hand_on="best"),
        task=Phase(epochs=2, batch_size=8, lr=5e-4, eval_every=0.5),
        cross_attention=Phase(epochs=2, batch_size=8, lr=5e-4, eval_every=0.5),
        head=Phase(epochs=2, batch_size=8, lr=5e-4, eval_every=0.5),
        train=Train(eval_batch_size=25),
        optim=Optim(warmup=0.1),
    )


def full() -> Config:
    """Whisper base.en on your own recordings, with its full window; an accelerator, bf16."""
    return Config(
        data=recordings.Source(path="recordings", teacher="openai/whisper-base.en", seconds=30),
        width=384,
        depth=8,
        features=Phase(epochs=60, batch_size=64, lr=1e-3, hand_on="best"),
        task=Phase(epochs=20, batch_size=64, lr=2e-4),
        cross_attention=Phase(epochs=10, batch_size=64, lr=2e-4),
        head=Phase(epochs=10, batch_size=64, lr=2e-4),
        train=Train(precision="bf16", eval_batch_size=32),
        loader=Loader(threads=16),
    )


# ----------------------------------------------------------------------------------------------------------------- data
class Heard(core.Data):
    """Envelopes (20 x seconds, 16) with the teacher's features (50 x seconds, width) and the spoken words as ids."""

    def __init__(self, source: recordings.Recordings, which: list[int], teacher: whisper.Whisper):
        self.source, self.which = source, which
        self.ids = [teacher.ids(text) for text in source.texts]
        self.shape = (teacher.frames, teacher.width), max(map(len, self.ids)), teacher.end
        self.fields = {"envelope": core.Field("input"), "features": core.Field("target", computed=True), "ids": core.Field("target"),
                       "text": core.Field("group")}  # fmt: skip

    def __len__(self) -> int:
        return len(self.which)

    def get(self, index: int, generator: torch.Generator | None) -> dict:
        return self.make(index, self.read(index), generator)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        # Two files per sample if the sensor has arrays: --loader.threads reads ahead.
        return self.source.read(self.which[index])

    def make(self, index: int, got: tuple[Tensor, Tensor], generator: torch.Generator | None) -> dict:
        i, (canvas, length, end) = self.which[index], self.shape
        (envelope, heard), ids = got, self.ids[i]
        features = torch.zeros(canvas)
        features[: len(heard)] = heard
        # the end token is a label once; `words` separates it from padding
        padded = torch.tensor(ids + [end] * (length - len(ids)))
        return {"envelope": envelope, "features": features, "span": torch.tensor(len(heard)), "ids": padded,
                "words": torch.tensor(len(ids)), "text": self.source.texts[i]}  # fmt: skip

    def collate(self, samples: list[dict]) -> dict:
        batch = super().collate(samples)
        longest = int(batch["envelope"].any(-1).sum(1).max())  # no more padding than this batch needs
        batch["envelope"] = batch["envelope"][:, : max(2, longest + longest % 2)]
        return batch


def prepare(cfg: Config, run: core.Run) -> tuple[whisper.Whisper, dict[str, Heard], Measures]:
    """Return what both stages share: the frozen teacher, its data, and the student's metrics."""
    if cfg.width % 32:
        raise core.UserError(
            "the student is not cut into heads of 32", got=f"--width {cfg.width}", needed="a multiple of 32"
        )
    teacher = replace(whisper.load(cfg.data.teacher, cfg.data.seconds), no_repeat_ngram_size=cfg.no_repeat_ngram_size)
    tested = recordings.test_source(cfg.data)
    with run.accelerator.local_main_process_first():  # one process makes the data, the others wait
        source, further = recordings.load(cfg.data), tested and recordings.load(*tested)
    learn, held_out = ((source.held_out == k).nonzero()[:, 0].tolist() for k in (False, True))
    data = {"train": Heard(source, learn, teacher), "val": Heard(source, held_out, teacher)}
    if further:
        data["test"] = Heard(further, list(range(len(further.texts))), teacher)
    data["train"].notes = source.story
    return teacher, data, Measures(run, teacher, source.mean, source.std)


# ---------------------------------------------------------------------------------------------------------------- model
class Block(nn.Module):
    """A convolution over time, attention over the whole recording and a two-layer net, each with a residual connection."""

    def __init__(self, d: int, kernel: int = 5):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.conv = nn.Conv1d(d, d, kernel, padding=kernel // 2)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        """Map (B, T, d), with (B, T) bool for frames inside the recording, to (B, T, d)."""
        x = x + F.gelu(self.conv((self.norms[0](x) * there[..., None]).mT).mT)
        q, k, v = self.qkv(self.norms[1](x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)  # heads of 32
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None])
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[2](x))))


class Student(nn.Module):
    """Envelopes (B, T, 16) at 20 frames per second -> encoder features (B, frames, width) at 50. A row of zeros is padding. After the last
    frame the features are the teacher's mean there."""

    def __init__(self, d: int, depth: int, ears: tuple[Tensor, Tensor], mean: Tensor, std: Tensor, rest: Tensor):
        super().__init__()
        for name, value in (("ears_mean", ears[0]), ("ears_std", ears[1]), ("rest", rest)):
            self.register_buffer(name, value.clone())
        self.stem = nn.Conv1d(len(ears[0]), d, 5, padding=2)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.upsample = nn.Linear(2 * d, 5 * d)  # two frames of 50 ms are five of 20 ms
        self.final = nn.Conv1d(d, len(std), 3, padding=1)
        self.offset, self.scale = nn.Parameter(mean.clone()), nn.Parameter(std.clone())

    def forward(self, envelope: Tensor) -> Tensor:
        there = envelope.any(-1)  # (B, T)
        x = (envelope - self.ears_mean) / self.ears_std * there[..., None]
        x = F.gelu(self.stem(x.mT).mT)
        x = x + sinusoids(x.shape[1], x.shape[2], x.device)
        # Attention to nothing gives NaN, so an empty recording attends to its padding.
        seen = there | ~there.any(-1, keepdim=True)
        for block in self.blocks:
            x = block(x, seen)
        x = (self.norms[0](x) * there[..., None]).unflatten(1, (-1, 2)).flatten(2)  # (B, T / 2, 2 d)
        x = F.gelu(self.upsample(x)).unflatten(-1, (5, -1)).flatten(1, 2)  # (B, 5 T / 2, d)
        place = torch.arange(x.shape[1], device=x.device)
        ended = (place >= 2.5 * there.sum(1, keepdim=True))[..., None]  # (B, 5 T / 2, 1)
        # Zeros after the recording's end, as beyond the window.
        x = self.final((self.norms[1](x) * ~ended).mT).mT.float()
        speech = self.offset[: x.shape[1]] + self.scale * x
        start = torch.where(ended, self.rest[: x.shape[1]], speech)
        return torch.cat([start, self.rest[x.shape[1] :].expand(x.shape[0], -1, -1)], 1)


def sinusoids(length: int, d: int, device: torch.device) -> Tensor:
    """Return sines and cosines of the frame's index, (length, d) (Vaswani 2017)."""
    angle = torch.arange(length, device=device)[:, None] / 10_000 ** (torch.arange(0, d, 2, device=device) / d)
    return torch.cat([angle.sin(), angle.cos()], 1)


# --------------------------------------------------------------------------------------------------------------- stages
def alike(cfg: Config, ours: Tensor, batch: dict) -> dict[str, Tensor]:
    """Return the differences between student's and teacher's features during speech, in magnitude and in direction."""
    ours, theirs, mask = ours.float(), batch["features"], speech(batch)
    return {
        "mse": cfg.mse * ((ours - theirs).square().mean(-1) * mask).sum(),
        "cosine": cfg.cosine * ((1 - F.cosine_similarity(ours, theirs, -1)) * mask).sum(),
    }


def features(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """Stage one: the teacher's features, frame by frame."""
    teacher, data, measures = prepare(cfg, run)
    source, mean = data["train"].source, measures.mean
    model = Student(cfg.width, cfg.depth, (source.ears_mean, source.ears_std), mean, measures.std, source.rest)

    def baselines() -> dict[str, dict[str, float]]:
        placed = measures.likeness(lambda envelope: mean.to(envelope.device).expand(len(envelope), -1, -1), data["val"])
        return {"the teacher's mean at each place": placed}

    return core.Stage(
        name="features",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data=data,
        frozen_modules={"teacher": teacher.model},
        loss=lambda model, batch: alike(cfg, model(batch["envelope"]), batch),
        evaluate=measures.likeness,
        metric=core.Metric("centred_cosine", "does the student hear what the teacher hears?", floor=0.0, ceiling=1.0),
        counts=lambda batch: {"*": batch["span"].sum()},
        expect=core.Expect(loss_floor=0.3, overfit_metric=0.8, unused_fields=("ids",)),  # measured after 120 steps
        baselines=baselines,
        preview=lambda batch: pictures.preview(batch, teacher),
        figures=lambda model, data: pictures.side_by_side(model, data, measures.mean),
        gates=gates.FEATURES,
    )


def task(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """Stage two: the words, through the teacher's frozen decoder. Only the student trains."""
    teacher, data, measures = prepare(cfg, run)
    if cfg.decoder == "ctc":
        return ctc.task(cfg, run, previous, measures)
    model = heads.taught(previous)
    before = copy.deepcopy(model).to(run.device)

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        ids, place = batch["ids"], torch.arange(batch["ids"].shape[1], device=batch["ids"].device)
        # text and end token: no prompt, no padding
        scored = (place >= len(teacher.prompt)) & (place < batch["words"][:, None])
        canvas = model(batch["envelope"])
        logits = reader(model, teacher).logits(canvas, ids[:, :-1]).float()  # (B, L - 1, vocabulary)
        wrong = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
        ce = (wrong * scored[:, 1:]).sum()
        return {"ce": ce} if not cfg.ramp else {"ce": ce * run.progress(cfg.ramp), **alike(cfg, canvas, batch)}

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        words = measures.words(lambda batch: model(batch["envelope"]), data, reader(model, teacher))
        return {**words, **measures.likeness(model, data)}

    def teachers(batch: dict) -> Tensor:
        """Return the teacher's own features during speech, and the student's after it."""
        return torch.where(speech(batch)[..., None] > 0, batch["features"], model(batch["envelope"]))

    def baselines() -> dict[str, dict[str, float]]:
        n, val = len(data["val"]), data["val"]
        others = View(val, range(n), swap=[(i + 1) % n for i in range(n)])  # no sample keeps its own input
        return {"the teacher's own features": measures.words(teachers, val), f"after the stage {previous.name}":
                evaluate(before, val), "this model, input of another recording": evaluate(model, others)}  # fmt: skip

    return core.Stage(
        name="task",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data=data,
        frozen_modules={"teacher": teacher.model},
        loss=loss,
        evaluate=evaluate,
        metric=core.Metric("wer", "which words were spoken?", floor=1.0, ceiling=0.0, higher_is_better=False),
        counts=lambda batch: {"ce": (batch["words"] - len(teacher.prompt)).sum(), "*": batch["span"].sum()},
        # Answers are decoded token by token.
        expect=core.Expect(
            overfit_metric=0.05, overfit_steps=20, gate_batch_size=8, loss_may_rise="a ramp" if cfg.ramp else ""
        ),
        baselines=baselines,
        upper_bounds=("the teacher's own features",),
        preview=lambda batch: pictures.preview(batch, teacher),
        predict=lambda model, batch: pictures.transcripts(model, batch, reader(model, teacher)),
        figures=lambda model, data: pictures.side_by_side(model, data, measures.mean),
        export=lambda folder: heads.export(folder, model, teacher, cfg, data["val"].source),
        gates=gates.TASK,
        monitors=[gates.repetition, gates.ladder("cross-attention")],
    )


STAGES = [features, task]
# `resume RUN --fallback NAME`, when the report recommends it (W7)
FALLBACKS = [fallbacks.cross_attention(task), fallbacks.head(task)]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop of either stage; the gates rehearse this very function."""
    for step in run.steps(stage):
        run.update(stage, step.batches)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)


if __name__ == "__main__":
    core.main(__file__)
