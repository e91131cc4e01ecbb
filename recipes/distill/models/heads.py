"""Decoders that are trained together with the student."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from trainworthy.recipes.distill.data import recordings
from trainworthy.recipes.shared import whisper

from trainworthy import core


class Opened(nn.Module):
    """A student and the Whisper that learns to read it. `forward` returns the student's features."""

    def __init__(self, student: nn.Module, head: nn.Module):
        super().__init__()
        self.student, self.head = student, head

    def forward(self, envelope: Tensor) -> Tensor:
        """Map (B, T, channels) to the encoder's features (B, frames, width)."""
        return self.student(envelope)


def taught(previous: core.Stage | None) -> nn.Module:
    """Return the student that the first stage hands to the second."""
    if previous is None:
        raise core.UserError("task has no student to start from", needed="STAGES = [features, task], --features.epochs above 0",
                             cause="from features without sense the decoder writes its own words, whatever it hears")  # fmt: skip
    return previous.eval_model


def reader(model: Callable[[Tensor], Tensor], teacher: whisper.Whisper) -> whisper.Whisper:
    """Return the Whisper that reads the features of `model`: the teacher, or the decoder trained with it."""
    return replace(teacher, model=model.head) if isinstance(model, Opened) else teacher


def sensed(source: recordings.Recordings) -> str:
    """Return what an exported program reads."""
    shape = f"float32 (B, {source.length}, {len(source.ears_mean)})"
    return (
        f"{shape}: {source.sensor} at {recordings.FPS} frames a second, zeros after the end (of sound: recordings.py)"
    )


def export(
    folder: Path, model: nn.Module, teacher: whisper.Whisper, cfg: core.Config, source: recordings.Recordings
) -> None:
    """Save the student (model.safetensors, and model.pt2, which runs without this project) and the Whisper whose encoder it replaces."""
    student = model.student if isinstance(model, Opened) else model
    output = f"float32 (B, {teacher.frames}, {teacher.width}): encoder_outputs of whisper/"
    config = {"architecture": "Student", "width": cfg.width, "depth": cfg.depth, "teacher": cfg.data.teacher,
              "input": sensed(source), "output": output}  # fmt: skip
    core.save_export(folder, student, config, torch.stack([source.read(i)[0] for i in range(2)]))
    whisper.save(reader(model, teacher), folder / "whisper")
