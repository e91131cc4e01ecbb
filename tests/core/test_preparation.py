"""Data are prepared once per process, however often the gates build a stage."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from trainworthy.core.base import config
from trainworthy.core.recipe import loading
from trainworthy.core.recipe.stage import Stage
from trainworthy.core.session import stages
from trainworthy.recipes.diffusion.data import pictures
from trainworthy.recipes.llm.data import chats, packing
from trainworthy.recipes.vision.data import encoded

from tests.helpers import language


def twice(recipe: str, settings: list[str], calls: list) -> tuple[Stage, Stage, int, int]:
    """Two builds of a recipe's stage, and the number of `calls` that each made."""
    known = loading.load(recipe)
    cfg, _ = config.parse(known.module, settings, prog=recipe)
    (spec,), accelerator, counts, found = stages.specs(known, cfg), Accelerator(cpu=True), [], []
    for _ in range(2):
        calls.clear()
        found.append(spec.untrained(accelerator))
        counts.append(len(calls))
    return *found, *counts


def noted(calls: list, own: Any) -> Any:
    def call(*args: Any, **how: Any) -> Any:
        calls.append(args)
        return own(*args, **how)

    return call


def conversations(folder: Path, n: int = 200) -> Path:
    rows = [
        {"messages": [{"role": role, "content": f"{text} {i * i}"} for role, text in
                      (("user", "what is"), ("assistant", "it is"), ("user", "and then"), ("assistant", "then"))]}
        for i in range(n)
    ]  # fmt: skip
    file = folder / "talks.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_conversations_are_rendered_and_counted_once(tmp_path, monkeypatch):
    language.write(tmp_path / "net")
    calls: list = []
    for name in ("rows", "example", "given"):
        monkeypatch.setattr(chats.Chat, name, noted(calls, getattr(chats.Chat, name)))
    words = ["--model", str(tmp_path / "net"), "--data.path", str(conversations(tmp_path)), "--data.max-length", "256"]
    first, again, before, after = twice("llm/sft", words, calls)
    assert before > 200
    assert after < 20  # what the template is, and two ends of a prompt
    for split, data in first.data.items():
        assert data.rows == again.data[split].rows
        assert data.notes == again.data[split].notes
        batch, other = (stage.data[split].collate([stage.data[split].get(i, None) for i in range(4)])
                        for stage in (first, again))  # fmt: skip
        assert torch.equal(batch["input_ids"], other["input_ids"])
    again.data["train"].rows[0]["prompt"] = "changed by one build"
    assert first.data["train"].rows[0]["prompt"] != "changed by one build"


def test_pictures_are_decoded_once(tmp_path, monkeypatch):
    draws = torch.Generator().manual_seed(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(10):
            values = torch.randint(256, (24, 20, 3), generator=draws, dtype=torch.uint8)
            Image.fromarray(values.numpy()).save(tmp_path / name / f"{i}.png")
    calls: list = []
    monkeypatch.setattr(encoded, "decode", noted(calls, encoded.decode))
    first = pictures.read(pictures.Source(path=str(tmp_path), image_size=16))
    assert len(calls) == 20
    again = pictures.read(pictures.Source(path=str(tmp_path), image_size=16))
    assert len(calls) == 20
    assert torch.equal(first.images, again.images)
    assert pictures.read(pictures.Source(path=str(tmp_path), image_size=8)).images.shape[-1] == 8


@pytest.mark.parametrize("stride", [16, 31])
def test_rows_of_documents_are_packed_once(stride, monkeypatch):
    calls: list = []
    monkeypatch.setattr(packing, "best_fit", noted(calls, packing.best_fit))
    lengths = tuple(range(3, 80))
    windows, rows = packing._laid_out(lengths, 32, stride)
    assert packing._laid_out(lengths, 32, stride) == (windows, rows)
    assert len(calls) == 1
    assert windows == packing.windows(list(lengths), 32, stride)
