"""Compress Whisper to fewer layers and a shorter input window (Distil-Whisper, Gandhi 2023, arXiv:2311.00430).

tiny  Whisper tiny.en, two of its four encoder and of its four decoder layers, synthesised sentences; two CPU cores.
full  Distil-Whisper's recipe: medium.en's whole encoder, frozen, 2 of 24 decoder layers; `--data.path FOLDER`. The same code
path.

The student starts from evenly spaced layers of the teacher. Labels are the teacher's transcripts, only where they are accurate.
Cross-entropy and KL divergence count text and end token only. The divergence is a sum over the vocabulary, times T squared. The
teacher is frozen, in eval mode, and gets the student's input. Held-out recordings are scored by the true words, not by the
teacher's. The report shows speed and size next to the word error rate.
"""

import copy
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from trainworthy.core.base.config import Loader, Optim, Train
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.distill.data import recordings, transcripts
from trainworthy.recipes.distill.evaluation import pictures
from trainworthy.recipes.distill.gates import compress as gates
from trainworthy.recipes.shared import whisper
from transformers import WhisperForConditionalGeneration

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(core.Config):
    """Settings of distill/compress."""

    data: transcripts.Source = field(default_factory=transcripts.Source)
    SEARCH_RANGES = "temperature=1:4 ce=0.1:2 kl=0.1:2"
    encoder: int = 2
    """Encoder layers of the student; 0: all of the teacher's, frozen (then the sound is encoded once for both)."""
    decoder: int = 2
    """Decoder layers of the student."""
    temperature: float = 2.0
    """Temperature that softens both distributions in the KL divergence."""
    ce: float = 1.0
    """Coefficient of the cross-entropy with the teacher's words."""
    kl: float = 0.8
    """Coefficient of the KL divergence between student and teacher."""


def tiny() -> Config:
    """Whisper tiny.en and synthesised speech on two CPU cores."""
    return Config(train=Train(epochs=2, batch_size=8, eval_batch_size=25), optim=Optim(lr=3e-4, warmup=0.1))


def full() -> Config:
    """Distil-Whisper's own recipe on your own recordings, with the full window; an accelerator, bf16."""
    return Config(
        data=transcripts.Source(path="recordings", teacher="openai/whisper-medium.en", seconds=30),
        encoder=0,
        decoder=2,
        train=Train(epochs=20, batch_size=256, precision="bf16", eval_batch_size=32),
        optim=Optim(lr=1e-4, warmup=0.01, schedule="linear"),
        loader=Loader(threads=16, window=512),
    )


# ---------------------------------------------------------------------------------------------------------------- model
LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.")
TIMED = 12  # recordings for timing


def evenly(layers: int, kept: int) -> list[int]:
    """Return which of the teacher's layers are kept, first and last among them: 2 of 4 are 0 and 3, 4 of 12 are 0, 4, 7 and 11."""
    if not 1 <= kept <= layers:
        raise core.UserError("the student has more layers than its teacher, or none", got=kept, needed=f"1 to {layers}")
    return [round(i * (layers - 1) / max(1, kept - 1)) for i in range(kept)]


def make_student(cfg: Config, teacher: whisper.Whisper) -> tuple[whisper.Whisper, dict[str, Tensor]]:
    """Return (a Whisper with some of the teacher's layers, its initial weights)."""
    config = copy.deepcopy(teacher.model.config)
    kept = {"encoder": evenly(config.encoder_layers, cfg.encoder or config.encoder_layers),
            "decoder": evenly(config.decoder_layers, cfg.decoder)}  # fmt: skip
    config.encoder_layers, config.decoder_layers = len(kept["encoder"]), len(kept["decoder"])
    # The teacher's own parameters: they never change, and a copy for each build would stay in memory with it
    model, theirs = WhisperForConditionalGeneration(config), teacher.model.state_dict(keep_vars=True)

    def origin(name: str) -> str:
        return LAYER.sub(lambda m: f"{m[1]}.layers.{kept[m[1]][int(m[2])]}.", name)

    start = {name: theirs[origin(name)] for name in model.state_dict()}
    model.load_state_dict(start)
    model.generation_config = copy.deepcopy(teacher.model.generation_config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen(cfg)))
    return replace(teacher, model=model), start


def frozen(cfg: Config) -> tuple[str, ...]:
    """Return the prefixes of parameters that stay the teacher's: positions, the vocabulary (over half of tiny.en's parameters), and the
    encoder if none of its layers is dropped."""
    whole = () if cfg.encoder else ("model.encoder",)
    return (
        "model.encoder.embed_positions",
        "model.decoder.embed_positions",
        "model.decoder.embed_tokens",
        "proj_out",
        *whole,
    )


def price(one: whisper.Whisper) -> dict[str, float]:
    """Return floating-point operations in 10^9 for a recording that fills the window and ten words, and parameters in 10^6."""
    config, device = one.model.config, one.model.device
    mel = torch.zeros(1, config.num_mel_bins, 2 * one.frames, device=device)
    ids = torch.full((1, len(one.prompt) + 10), one.end, device=device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        one.logits(one.encode(mel), ids)
    return {"gigaflop": counter.get_total_flops() / 1e9, "million_parameters": one.model.num_parameters() / 1e6}


def clock(one: whisper.Whisper, waves: list, device: torch.device) -> list[float]:
    """Return milliseconds of each step from sound to words and in total, one recording at a time; the fastest of three rounds. On a CPU, CPU
    time of this process, which other programs do not change."""
    one.model.to(device).eval()

    def now() -> float:
        if device.type == "cpu":
            return time.process_time()
        torch.accelerator.synchronize()
        return time.perf_counter()

    def of(wave) -> torch.Tensor:
        times = [now()]
        mel = one.mel([wave])
        times.append(now())
        features = one.encode(mel).float()
        times.append(now())
        one.generate(features)
        return 1000 * torch.tensor([*times, now()], dtype=torch.double).diff()

    with torch.no_grad():
        rounds = [sum(map(of, waves)) / len(waves) for _ in range(3)]
    best = min(rounds, key=torch.sum)
    return [*best.tolist(), best.sum().item()]


# ---------------------------------------------------------------------------------------------------------------- stage
def compress(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    teacher = whisper.load(cfg.data.teacher, cfg.data.seconds)
    tested = recordings.test_source(cfg.data)
    with run.accelerator.local_main_process_first():  # one process makes the transcripts, the others wait
        source, further = transcripts.load(cfg.data), tested and transcripts.load(*tested)
    learn, held_out, notes = source.split(cfg.data.max_wer)
    data = {"train": transcripts.Spoken(source, learn, teacher), "val": transcripts.Spoken(source, held_out, teacher)}
    if further:
        data["test"] = transcripts.Spoken(further, list(range(len(further.spoken))), teacher)
    data["train"].notes = notes
    length = data["train"].longest + 8  # a decoder that loops is cut off there
    student, start = make_student(cfg, teacher)
    model, temperature, cost = student.model, cfg.temperature, price(student)

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        ids, place = batch["ids"], torch.arange(1, batch["ids"].shape[1], device=batch["ids"].device)
        # Scored tokens: text and its end, no prompt, no padding.
        scored = (place >= len(teacher.prompt)) & (place < batch["words"][:, None])  # (B, L - 1)
        with torch.no_grad():
            heard = teacher.encode(batch["mel"])
            theirs = teacher.logits(heard, ids[:, :-1])[scored].float()  # (words, vocabulary)
        own = replace(student, model=model)
        ours = own.logits(own.encode(batch["mel"]) if cfg.encoder else heard, ids[:, :-1])[scored].float()
        soft, hard = ((logits / temperature).log_softmax(-1) for logits in (ours, theirs))
        kl = F.kl_div(soft, hard, reduction="sum", log_target=True)
        return {
            "ce": cfg.ce * F.cross_entropy(ours, ids[:, 1:][scored], reduction="sum"),
            "kl": cfg.kl * temperature**2 * kl,  # T^2 keeps the gradient's size at any temperature
        }

    def write(model: nn.Module, data: core.Data) -> list[str]:
        """Return a model's transcripts of every recording."""
        own, rows = replace(student, model=model), []
        for batch in run.batches(data):
            ids = own.generate(own.encode(batch["mel"]).float(), at_most=length - len(own.prompt))
            rows.append(F.pad(ids, (0, length - ids.shape[1]), value=own.end))
        return [own.text(row) for row in run.gather(torch.cat(rows)).tolist()]

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        wrote = write(model, data)
        truth, teachers = ([data.peek(i, key) for i in range(len(data))] for key in ("truth", "text"))
        return {
            "wer": whisper.word_error_rate(truth, wrote),
            "wer_to_teacher": whisper.word_error_rate(teachers, wrote),
            **cost,
        }

    def baselines() -> dict[str, dict[str, float]]:
        n, val = len(data["val"]), data["val"]
        others = View(val, range(n), swap=[(i + 1) % n for i in range(n)])  # no sample keeps its own input
        theirs = {"wer": source.teachers(held_out), "wer_to_teacher": 0.0}
        untrained = copy.deepcopy(model)
        untrained.load_state_dict(start)
        return {"the teacher on the same canvas": theirs | price(teacher),
                "its layers, as they were copied": evaluate(untrained, val),
                "this model, input of another recording": evaluate(model, others)}  # fmt: skip

    def preview(batch: dict) -> list[core.Tile]:
        spectrograms = [pictures.shaded(mel.T, 2, mel.min().item(), mel.max().item()) for mel in batch["mel"].float()]
        return [core.Tile(teacher.text(ids), p) for ids, p in zip(batch["ids"].tolist(), spectrograms, strict=True)]

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        own = replace(student, model=model)
        return [core.Tile(h, score=max(0.0, 1 - whisper.word_error_rate([t], [h])))
                for t, h in zip(batch["truth"], own.write(own.encode(batch["mel"])), strict=True)]  # fmt: skip

    def figures(model: nn.Module, data: core.Data) -> dict[str, core.Matrix]:
        """Return the cost of a recording from sound to words, and the speed-up over the published window."""
        waves = [source.wave(data.which[i]) for i in range(min(TIMED, len(data)))]
        whole = whisper.load(cfg.data.teacher, whisper.CANVAS)
        known = {f"teacher, {whisper.CANVAS} s": whole, f"teacher, {cfg.data.seconds} s": teacher,
                 f"student, {cfg.data.seconds} s": replace(student, model=model)}  # fmt: skip
        rows = torch.tensor([clock(one, waves, run.device) for one in known.values()])
        rows = torch.cat([rows, rows[:1, 3:] / rows[:, 3:]], 1)
        columns = ("spectrogram", "encoder", "words", "in all", "times as fast")
        return {
            "Milliseconds for a recording": core.Matrix(rows, rows=list(known), columns=columns, axes=("who", "what"))
        }

    def export(folder: Path) -> None:
        """Save what transformers loads: model, tokenizer, and a feature extractor for this window."""
        whisper.save(replace(student, model=model), folder)
        teacher.extract.save_pretrained(folder)

    def goal(batch: dict) -> float:
        """Return the word error rate of a student that equals its labels."""
        return whisper.word_error_rate(batch["truth"], batch["text"]) + 1e-9

    return core.Stage(
        name="compress",
        model=model,
        optimizers={"main": core.make_optimizer(model, cfg.optim)},
        data=data,
        frozen_modules={"teacher": teacher.model},
        shard_units=whisper.units,
        loss=loss,
        counts=lambda batch: {"*": (batch["words"] - len(teacher.prompt)).sum()},
        evaluate=evaluate,
        metric=core.Metric("wer", "which words were spoken?", floor=1.0, ceiling=0.0, higher_is_better=False),
        # Answers are decoded token by token, and the teacher runs at every step.
        expect=core.Expect(loss_floor=0.1, overfit_metric=goal, overfit_steps=40, gate_batch_size=4, frozen=frozen(cfg)),
        pretrained=start,
        baselines=baselines,
        upper_bounds=("the teacher on the same canvas",),
        preview=preview,
        predict=predict,
        figures=figures,
        export=export,
        gates=gates.ALL,
    )  # fmt: skip


STAGES = [compress]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """The loop; the gates rehearse this very function."""
    for step in run.steps(stage):
        run.update(stage, step.batches)
        if step.due(cfg.train.eval_every):
            run.evaluate(stage)


if __name__ == "__main__":
    core.main(__file__)
