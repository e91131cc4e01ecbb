"""distill/compress: which layers, which labels, recordings of one's own, and what transformers makes of the export."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from trainworthy.core.base.config import Loader
from trainworthy.core.base.errors import UserError
from trainworthy.core.data import loader
from trainworthy.recipes.distill.compress import Config, evenly, make_student
from trainworthy.recipes.distill.data import transcripts
from trainworthy.recipes.distill.gates import compress as gates
from trainworthy.recipes.shared import speech, whisper
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizerFast

from tests.distill.planted_compress import WHOLE
from tests.helpers.commands import read

FEW = 24


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings with transcripts, one of them wrong, and one that is silent."""
    root, lines = tmp_path_factory.mktemp("recordings"), ["file_name,transcription"]
    for i, text in enumerate(speech.sentences(FEW)):
        soundfile.write(root / f"{i}.wav", speech.say(text), speech.RATE)
        lines.append(f"{i}.wav,{text if i != 7 else 'Nothing of the kind was said.'}")
    soundfile.write(root / "silent.wav", np.zeros(2 * speech.RATE), speech.RATE)
    (root / "metadata.csv").write_text("\n".join([*lines, "silent.wav,Hello."]) + "\n")
    return root


@pytest.mark.parametrize(("layers", "kept", "which"), [(4, 2, [0, 3]), (32, 2, [0, 31]), (12, 4, [0, 4, 7, 11]), (4, 1, [0]),
                                                       (3, 3, [0, 1, 2])])  # fmt: skip
def test_layers_are_spaced_evenly(layers: int, kept: int, which: list[int]):
    assert evenly(layers, kept) == which


def test_more_layers_than_the_teacher_has(launch):
    done = launch("check", "distill/compress", "--data.sentences", "60", "--decoder", "5", "--only", "schema")
    assert done.returncode == 2, done.shown
    assert "more layers than its teacher" in done.stderr
    assert "1 to 4" in done.stderr


def test_a_side_that_lost_layers_must_train(fork, launch):
    fork((WHOLE, '    whole = ("model.encoder",)\n'), recipe="distill/compress")
    asked = ("check", "mine.py", "--data.sentences", "60", "--only", "copied")
    (found,) = launch(*asked, code=3).verdicts()
    assert "the encoder lacks 2 of 4 layers and is frozen" in found["cause"], found
    launch(*asked, "--encoder", "0", code=0)  # whole: as Distil-Whisper freezes it


def test_a_student_with_every_layer_is_its_teacher():
    teacher = whisper.load("tiny.en", 6)
    student, start = make_student(Config(encoder=0, decoder=4), teacher)
    ours, theirs = student.model.state_dict(), teacher.model.state_dict()
    assert ours.keys() == theirs.keys() == start.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert not any(p.requires_grad for p in student.model.model.encoder.parameters())
    assert (
        ours["model.decoder.layers.1.fc1.weight"].data_ptr() != theirs["model.decoder.layers.1.fc1.weight"].data_ptr()
    )


def test_labels_are_filtered_and_what_is_held_out_is_not(spoken: Path):
    """Recordings of one's own, read by one thread or four."""
    source = transcripts.load(transcripts.Source(path=str(spoken)))
    learn, held_out, told = source.split(0.1)
    assert source.left_out == {"silent": 1}
    assert source.spoken[7] == "Nothing of the kind was said."
    assert 7 not in learn
    assert held_out == [0, 5, 10, 15, 20]
    assert all(source.wrong[i] <= 0.1 for i in learn)
    assert "1 silent" in told["labels"]
    assert 7 in source.split(9.0)[0]
    with pytest.raises(UserError, match=r"too few recordings(?s:.*)--data\.max-wer"):
        source.split(-1.0)
    data = transcripts.Spoken(source, learn, whisper.load("tiny.en", 6))
    keys = [[(0, i) for i in range(s, s + 4)] for s in (0, 4, 8)]
    one, four = (
        list(loader.batches(data, keys, seed=0, settings=Loader(threads=n, window=8), device=torch.device("cpu")))
        for n in (0, 4)
    )
    assert all(
        torch.equal(a["mel"], b["mel"]) and torch.equal(a["ids"], b["ids"]) for a, b in zip(one, four, strict=True)
    )


def test_nothing_but_silence(tmp_path: Path):
    soundfile.write(tmp_path / "a.wav", np.zeros(2 * speech.RATE), speech.RATE)
    (tmp_path / "metadata.csv").write_text("file_name,transcription\na.wav,Hello.\n")
    with pytest.raises(UserError, match=r"no recording can be heard(?s:.*)1 silent"):
        transcripts.load(transcripts.Source(path=str(tmp_path)))


def test_a_few_files_that_are_no_audio_are_left_out_and_named(spoken: Path, tmp_path: Path, launch):
    """As in distill/whisper."""
    folder = shutil.copytree(spoken, tmp_path / "recordings")
    for name in ("3.wav", "7.wav"):
        (folder / name).write_bytes(b"RIFF")
    command = ("check", "distill/compress", "--data.path", str(folder), "--only", "schema")
    done = launch(*command)
    assert done.returncode == 2, done.shown
    assert "3.wav cannot be read as audio" in done.stderr
    assert "(--data.max-bad)" in done.stderr
    done = launch(*command, "--data.max-bad", "0.1")
    assert done.returncode == 0, done.shown
    assert "1 cannot be read (3.wav, line 5), 1 cannot be read (7.wav, line 9)" in " ".join(done.stdout.split()), (
        done.shown
    )


@pytest.mark.verify
def test_recordings_of_ones_own_and_the_export(spoken: Path, launch):
    """A folder trains; transformers alone writes words with what is exported, on the short canvas."""
    done = launch("run", "distill/compress", "--data.path", str(spoken), "--gates.no-enabled", "--run.no-tensorboard",
                  "--train.epochs", "2", "--loader.threads", "4")  # fmt: skip
    assert done.returncode == 0, done.shown
    summary = read(done.folder() / "summary.json")
    assert {"wer", "wer_to_teacher", "gigaflop", "million_parameters"} <= summary["metrics"].keys()
    assert "the teacher on the same canvas" in summary["baselines"]
    assert summary["figures"]
    export = done.folder() / "export"
    model = WhisperForConditionalGeneration.from_pretrained(export, dtype=torch.float32)
    tokenizer, extract = (kind.from_pretrained(export) for kind in (WhisperTokenizerFast, WhisperFeatureExtractor))
    wave, _ = soundfile.read(spoken / "3.wav", dtype="float32")
    mel = extract(np.interp(np.arange(0, len(wave), speech.RATE / 16_000), np.arange(len(wave)), wave), sampling_rate=16_000,
                  return_tensors="pt").input_features  # fmt: skip
    assert mel.shape == (1, 80, 600)
    assert (len(model.model.encoder.layers), len(model.model.decoder.layers)) == (2, 2)
    ids = model.generate(mel.float(), max_new_tokens=12)
    assert tokenizer.batch_decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(("layers", "even", "spaced"), [
    ([0, 3], [0, 3], True), ([0, 2], [0, 3], True), ([1, 3], [0, 3], True), ([0, 2, 4, 6, 8, 10], [0, 2, 4, 7, 9, 11], True),
    ([0, 1], [0, 3], False), ([0, 1, 2], [0, 2, 3], False), ([0, None], [0, 3], False), ([2, 3], [0, 3], False),
    ([3, 0], [0, 3], False), ([0, 1, 2], [0, 1, 2], True), ([0], [0], True), ([0, 5, 6, 7], [0, 4, 7, 11], False),
])  # fmt: skip
def test_layers_next_to_evenly_spaced_ones(layers: list[int | None], even: list[int], spaced: bool):
    assert gates._spaced(layers, even) is spaced
