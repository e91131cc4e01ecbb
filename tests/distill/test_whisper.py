"""distill/whisper: training pairs from recordings of one's own, what is wrong with recordings, weights and tokenizers, the export."""

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.distill.data import recordings
from trainworthy.recipes.distill.evaluation import measures
from trainworthy.recipes.distill.gates import whisper as gates
from trainworthy.recipes.distill.models import ctc
from trainworthy.recipes.shared import speech, whisper
from transformers import WhisperConfig, WhisperForConditionalGeneration, WhisperTokenizerFast
from transformers.modeling_outputs import BaseModelOutput

from tests.distill.planted_whisper import BOTH, FASTER, FIRST, GOT
from tests.helpers.commands import equal_but_rounding, losses, read, run_folder

QUICK = ("--gates.no-enabled", "--run.no-tensorboard", "--features.epochs", "1", "--task.epochs", "1")
RATE = 16_000


def noise(seconds: float, loud: float = 0.1, rate: int = RATE) -> np.ndarray:
    return (loud * np.random.default_rng(0).standard_normal(int(seconds * rate))).astype(np.float32)


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Path]:
    """`recorded({name: (wave, rate, text)}, columns=...)`: a folder in the hub's audiofolder layout."""

    def write(
        files: dict[str, tuple[np.ndarray, int, str]], columns: tuple[str, str] = ("file_name", "transcription")
    ) -> Path:
        folder = tmp_path / "recordings"
        folder.mkdir()
        for name, (wave, rate, _) in files.items():
            soundfile.write(folder / name, wave, rate, subtype="FLOAT" if name.endswith(".wav") else None)
        with open(folder / "metadata.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(columns)
            rows.writerows((name, text) for name, (_, _, text) in files.items())
        return folder

    return write


# ---------------------------------------------------------------------------------------------------------- one's own
@pytest.fixture(scope="module")
def spoken() -> dict[str, tuple[np.ndarray, int, str]]:
    return {f"{i}.wav": (speech.say(t), speech.RATE, t) for i, t in enumerate(speech.sentences(24))}


def test_recordings_of_ones_own(recorded, spoken, launch):
    """A folder with transcripts trains both stages; what teaches nothing is counted; the export is heard by transformers alone."""
    folder = recorded({**spoken, "silent.wav": (noise(2, 1e-5), RATE, "Nothing."), "short.flac": (noise(0.1), RATE, "Oh."),
                         "long.wav": (noise(7), RATE, "A long story."), "empty.wav": (noise(0), 22_050, "Oh."),
                         "clipped.wav": (np.clip(noise(2, 0.8), -1, 1), RATE, "Loud."),
                         "broken.wav": (np.where(np.arange(2 * RATE) == 9, np.nan, noise(2)), RATE, "Nan.")})  # fmt: skip
    done = launch("run", "distill/whisper", "--data.path", str(folder), *QUICK)
    assert done.returncode == 0, done.shown
    said = json.dumps(read(done.folder() / "data.json"))
    for reason in (
        "1 silent",
        "2 shorter than 0.3 s",
        "1 longer than 6 s",
        "1 clipped",
        "1 not finite",
        "misheard by the",
    ):
        assert reason in said
    summary = read(done.folder() / "summary.json")
    assert {"wer", "different", "prior_phrase", "centred_cosine", "cosine", "magnitude_ratio"} <= summary[
        "metrics"
    ].keys()
    own = summary["baselines"]["the teacher's own features"]
    assert own["wer"] <= 0.1
    assert {
        "after the stage features",
        "this model, input of another recording",
        "this model, input zeroed",
    } <= summary["baselines"].keys()
    assert losses(done.folder())
    heard_by_the_library_alone(done.folder() / "export")


def heard_by_the_library_alone(export: Path) -> None:
    """model.pt2 makes features of one recording or three, and Whisper's own generate() reads them."""
    program = torch.export.load(export / "model.pt2").module()
    model = WhisperForConditionalGeneration.from_pretrained(export / "whisper", dtype=torch.float32)
    tokenizer = WhisperTokenizerFast.from_pretrained(export / "whisper")
    envelope = torch.zeros(3, 120, recordings.CHANNELS)
    envelope[:, :60] = recordings.envelope(noise(3))
    features = program(envelope)
    assert features.shape == (3, 300, 384)
    torch.testing.assert_close(program(envelope[:1]), features[:1])
    ids = model.generate(encoder_outputs=BaseModelOutput(features), max_new_tokens=8)
    assert len(tokenizer.batch_decode(ids, skip_special_tokens=True)) == 3
    names = load_file(export / "model.safetensors").keys()
    assert {"scale", "offset", "rest"} <= names
    assert "log-energies at 20 frames a second" in read(export / "config.json")["input"]


# ---------------------------------------------------------------------------------------------------------- bad input
def test_no_transcripts(recorded, launch):
    folder = recorded({"a.wav": (noise(1), RATE, "Hello.")})
    (folder / "metadata.csv").unlink()
    done = launch("check", "distill/whisper", "--data.path", str(folder), "--only", "schema")
    assert done.returncode == 2, done.shown
    assert "no transcripts in" in done.stderr
    assert "file_name and transcription" in done.stderr


def recordings_of(folder: Path) -> recordings.Recordings:
    return recordings.load(recordings.Source(path=str(folder)))


def test_wrong_columns(recorded):
    folder = recorded({"a.wav": (noise(1), RATE, "Hello.")}, columns=("path", "sentence"))
    with pytest.raises(
        UserError, match=r"lacks a column(?s:.*)path, sentence(?s:.*)file_name and transcription"
    ) as error:
        recordings_of(folder)
    assert "rename path to file_name, sentence to transcription" in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "train.tsv",
            "client_id\tpath\tsentence\n",
            ("save train.tsv as metadata.csv", "path to file_name, sentence to transcription"),
        ),
        (
            "a.jsonl",
            '{"audio_filepath": "a.wav", "text": "Hello."}\n',
            ("audio_filepath to file_name, text to transcription",),
        ),
        ("metadata.csv", "file_name,transcription\na.wav\n", ("line 2 of", "is not complete")),
    ],
)
def test_tables_of_other_tools_are_recognised(recorded, name, text, words):
    folder = recorded({"a.wav": (noise(1), RATE, "Hello.")})
    (folder / "metadata.csv").unlink()
    (folder / name).write_text(text)
    with pytest.raises(UserError) as error:
        recordings_of(folder)
    assert all(word in str(error.value) for word in words), error.value


def test_a_rate_below_what_the_teacher_hears(recorded):
    with pytest.raises(UserError, match=r"a\.wav has too low a rate(?s:.*)8,000(?s:.*)16,000 or more"):
        recordings_of(recorded({"a.wav": (noise(1, rate=8_000), 8_000, "Hello.")}))


def test_a_file_that_is_no_audio(recorded):
    folder = recorded({"a.wav": (noise(1), RATE, "Hello.")})
    (folder / "a.wav").write_text("hello")
    with pytest.raises(UserError, match=r"a\.wav cannot be read as audio"):
        recordings_of(folder)


def test_a_few_files_that_are_no_audio_are_left_out_and_named(recorded, spoken):
    """As bad samples of every other recipe are; each of a second reading would cost the teacher's pass over the first ones."""
    folder = recorded(spoken)
    for name in ("3.wav", "7.wav"):
        (folder / name).write_bytes(b"RIFF")
    found = recordings.load(recordings.Source(path=str(folder), max_bad=0.1))
    assert "1 cannot be read (3.wav, line 5), 1 cannot be read (7.wav, line 9)" in found.story["lessons"], found.story
    with pytest.raises(
        UserError, match=r"3\.wav cannot be read(?s:.*)7\.wav cannot be read(?s:.*)at most 5\.0% of 24 recordings"
    ):
        recordings.load(recordings.Source(path=str(folder), max_bad=0.05))


def test_a_file_that_is_not_there(recorded, launch):
    """Through the command: exit 2 and one message."""
    folder = recorded({f"{i}.wav": (noise(1), RATE, "Hello.") for i in range(3)})
    (folder / "1.wav").unlink()
    told_of(
        launch("check", "distill/whisper", "--data.path", str(folder), "--only", "schema"),
        "1 of 3 recordings of", "1.wav (line 3)",
    )  # fmt: skip


def told_of(done, *said: str) -> None:
    assert done.returncode == 2, done.shown
    assert "Traceback" not in done.stderr
    assert not [w for w in said if w not in done.stderr], done.stderr


def test_nothing_but_silence(recorded):
    folder = recorded({f"{i}.wav": (noise(1, 0.0), RATE, "Hello.") for i in range(12)})
    with pytest.raises(UserError, match=r"too few recordings are left(?s:.*)0 of 12: 12 silent"):
        recordings_of(folder)


def test_no_espeak(monkeypatch):
    speech._engine.cache_clear()
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(UserError, match=r"no speech can be made(?s:.*)--data\.path FOLDER"):
        speech.say("Hello.")
    speech._engine.cache_clear()


def test_the_other_vocabulary():
    """A multilingual model with the English tokenizer: refused with both sides' ids."""
    tokenizer = WhisperTokenizerFast(tokenizer_file=str(whisper.assets("tiny.en")["tokenizer.json"]))
    config = WhisperConfig(vocab_size=51_865, decoder_start_token_id=50_258, eos_token_id=50_257)
    with pytest.raises(UserError, match=r"do not belong together(?s:.*)51865(?s:.*)51,864"):
        whisper.agree(config, tokenizer, "tiny")


def test_a_tokenizer_that_lost_its_first_merge(tmp_path: Path):
    """Every text comes back from its ids, and yet ' the' is two of them."""
    rules = read(whisper.assets("tiny.en")["tokenizer.json"])
    assert rules["model"]["merges"].pop(0) == "\u0120 t"
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    tokenizer = WhisperTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(" the telephone", add_special_tokens=False)) == " the telephone"
    with pytest.raises(UserError, match=r"does not spell as its vocabulary does(?s:.*)as \[220, "):
        whisper.spells(tokenizer, "tiny.en")


@pytest.mark.verify
def test_a_multilingual_teacher(tmp_path: Path):
    """It is told language and task; transformers alone, which reads that in the export, writes the same words."""
    teacher = whisper.load("base", 6)
    assert teacher.tokenizer.convert_ids_to_tokens(teacher.prompt) == [
        "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"
    ]  # fmt: skip
    texts = speech.sentences(2)
    heard = teacher.hear([recordings.Recording(speech.say(t), speech.RATE, t, 0).at_16k() for t in texts])
    said = teacher.write(heard)
    assert whisper.word_error_rate(texts, said) <= 0.2
    whisper.save(teacher, tmp_path)
    model = WhisperForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    ids = model.generate(encoder_outputs=BaseModelOutput(heard), max_new_tokens=32)
    tokenizer = WhisperTokenizerFast.from_pretrained(tmp_path)
    assert [t.strip() for t in tokenizer.batch_decode(ids, skip_special_tokens=True)] == said


def test_a_teacher_without_its_files(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"--data\.teacher .*a file is missing(?s:.*)tokenizer\.json(?s:.*)model\.safetensors"
    ):
        whisper.load(str(tmp_path), 6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"d_model": 192},
            ("of another width: model.decoder.embed_positions.weight of (448, 384) for (448, 192)", "width 192"),
        ),
        ({"encoder_layers": 6}, ("30 missing: model.encoder.layers.4.", "6 and 4 layers")),
        ({"decoder_layers": 2}, ("48 too many: model.decoder.layers.2.", "4 and 2 layers")),
    ],
    ids=["width", "layers missing", "layers too many"],
)
def test_a_teacher_of_other_widths(change, said, teacher, launch):
    """Weights that are not those of config.json: random layers would teach."""
    config = read(teacher / "config.json")
    (teacher / "config.json").write_text(json.dumps(config | change))
    if change.keys() == {"d_model"}:  # one through the command
        told_of(launch("check", "distill/whisper", "--data.teacher", str(teacher), "--only", "schema"), *said)
    else:
        with pytest.raises(UserError) as refused:
            whisper.load(str(teacher), 6)
        assert all(words in str(refused.value) for words in said), refused.value
    (teacher / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny.en in the hub's layout."""
    folder = tmp_path_factory.mktemp("teacher")
    whisper.save(whisper.load("tiny.en", 6), folder)
    return folder


def test_the_second_stage_refuses_to_go_first(launch):
    told_of(launch("check", "distill/whisper", "--data.sentences", "60", "--features.epochs", "0", "--only", "schema"),
            "no student to start from", "--features.epochs above 0")  # fmt: skip


def test_a_width_that_is_not_cut_into_heads(launch):
    done = launch("check", "distill/whisper", "--width", "100", "--only", "schema")
    assert done.returncode == 2, done.shown
    assert "--width 100" in done.stderr
    assert "a multiple of 32" in done.stderr


def test_a_recording_that_is_clipped_or_empty():
    loud = np.clip(noise(2, 0.8), -1, 1)
    assert recordings.unfit(loud, 6) == "clipped"
    assert recordings.unfit(np.clip(noise(2, 0.3), -1, 1), 6) == ""
    assert recordings.unfit(noise(0), 6) == "shorter than 0.3 s"


# ---------------------------------------------------------------------------------------------------------- its parts
def test_no_two_sentences_share_three_of_their_parts():
    texts = speech.sentences(300)
    assert len(set(texts)) == 300
    chosen = [
        tuple(next(i for i, words in enumerate(slot) if words in t.lower() or words in t) for slot in speech.SLOTS)
        for t in texts
    ]
    for skipped in range(4):
        assert len({places[:skipped] + places[skipped + 1 :] for places in chosen}) == 300


def test_the_sensor_keeps_time():
    """A click at 1 s is loudest in frame 20 of the sensor, whatever stands around it."""
    wave = noise(3, 1e-4)
    wave[RATE : RATE + 80] += noise(0.005, 0.5)
    envelope = recordings.envelope(wave)
    assert envelope.shape == (60, recordings.CHANNELS)
    assert envelope.mean(1).argmax() == 20


@pytest.mark.parametrize(("new", "stopped"), [(FASTER, ["alignment"]), (BOTH, [])], ids=["input", "both"])
def test_another_speed_in_training_is_one_of_input_and_target(new: str, stopped: list[str], fork, launch):
    """Samples of any length may have another one in training, if their targets have it, too."""
    fork((GOT, new), recipe="distill/whisper")
    done = launch("check", "mine.py", *FIRST, "--only", "schema,alignment")
    assert [v["id"] for v in done.verdicts() if v["verdict"] == "fail"] == stopped, done.shown


@pytest.mark.verify
def test_two_processes_learn_what_one_does(launch, tmp_path: Path):
    """The same losses to rounding."""
    argv = ("run", "distill/whisper", "--data.sentences", "60", *QUICK)
    for name, more in (("one", ()), ("two", ("-n", "2"))):
        done = launch(*argv, "--run.out", name, *more, timeout=600)
        assert done.returncode == 0, done.shown
    one, two = (losses(run_folder(tmp_path, f"{name}/*/2*")) for name in ("one", "two"))
    equal_but_rounding(one, two)


def test_what_would_stand_there_twice():
    assert whisper.followed([5, 6, 7, 8, 5, 6, 7], 4) == [8]
    assert whisper.followed([5, 6, 5, 7, 5], 2) == [6, 7]
    assert whisper.followed([5, 6], 4) == []
    assert whisper.followed([1, 2, 1], 1) == [1, 2, 1]
    assert whisper.loops([1, 2, 3, 4, 9, 1, 2, 3, 4])
    assert not whisper.loops([1, 2, 3, 4, 1, 2, 3, 9])


def test_a_decoder_that_loops_is_told_and_can_be_kept_from_it():
    """Noise instead of features: what the decoder writes of it loops; with a limit no four ids stand there twice."""
    teacher = whisper.load("tiny.en", 6)
    noise = 3 * torch.randn(4, teacher.frames, teacher.width, generator=torch.Generator().manual_seed(0))
    free, kept = (replace(teacher, no_repeat_ngram_size=n).generate(noise, at_most=40)[:, 2:].tolist() for n in (0, 4))
    assert any(map(whisper.loops, free))
    bodies = [ids[: ids.index(teacher.end)] if teacher.end in ids else ids for ids in kept]
    assert not any(map(whisper.loops, bodies))


def test_the_monitor_of_repetition():
    found = [gates.repetition.check([{"val/repetition": share}]) for share in (0.02, 0.2)]
    assert [f.ok for f in found] == [True, False]
    assert "20.0% of the transcripts" in found[1].measured


# --------------------------------------------------------------------------------------------------------- the ladder
def test_a_decoder_that_does_not_listen_begins_alike():
    """W1: other ends make transcripts differ, the phrase in front of them gives it away."""
    assert (
        measures.commonest_opening(["The old man sees 1", "the old man sees 2", "The old man is 3", "A boy runs"])
        == 0.75
    )
    assert measures.commonest_opening(["one", "two", "three three three", ""]) == 0.25


def curve(rates: list[float], cosine: float = 0.3, different: float = 1.0, nats: float = 1.0) -> list[dict[str, float]]:
    return [{"val/wer": r, "val/centred_cosine": cosine, "val/different": different, "train/loss": nats} for r in rates]


FLAT = [1.20, 1.17, 1.01, 1.09]
"""Word error rate of a student that may use 24 of the 384 channels (seed 0): its decoder is deaf."""


# 123 recordings, 31 steps: with twice the epochs of the first stage and three times those of the second it falls to 0.01.
SHORT = [
    row | {"train/loss": n}
    for row, n in zip(curve([0.66, 0.38, 0.26, 0.26], 0.32), (2.85, 1.58, 0.95, 0.82), strict=True)
]


@pytest.mark.parametrize(
    ("history", "advised"),
    [
        (SHORT, False),
        (curve(FLAT, 0.08, 0.96, 2.5), True),
        (curve([0.74, 0.30, 0.28, 0.28]), True),
        (curve([1.31, 0.65, 0.36, 0.16], 0.36, 1.0, 0.8), False),  # width 32 without blocks: it is still learning
        (curve([0.07, 0.02, 0.01, 0.01], 0.28, 1.0, 0.1), False),  # the same at the end
        (curve(FLAT, 0.0, 0.02, 2.5), False),  # collapsed: the first stage has to be better
        (curve([0.5, 0.4, 0.4, 0.4], nats=0.05), False),  # memorised: more recordings are needed
        (curve([1.2, 1.2]), False),  # too early to say
    ],
    ids=["short", "deaf", "flat", "learning", "learnt", "collapsed", "by heart", "early"],
)
def test_a_rung_is_advised_where_the_curves_say_so(history, advised: bool):
    found = gates.ladder("head").check(history)
    assert (not found.ok) == advised
    assert found.ok or found.evidence["fallback"] == "head"


@pytest.mark.verify
def test_both_rungs_go_on_from_a_run_and_from_each_other(launch):
    """The run's page names the first, the first one's the second; the export is heard by transformers alone."""
    few = ("--data.sentences", "60", "--width", "32", "--depth", "1")
    fallbacks = [
        f"--{name}.{key}={value}"
        for name in ("cross-attention", "head")
        for key, value in (("epochs", 1), ("eval-every", 0.3))
    ]
    at = launch("run", "distill/whisper", *few, *QUICK, "--features.epochs", "4", "--task.eval-every", "0.3", "--task.lr", "1e-4",
                *fallbacks)  # fmt: skip
    assert at.returncode == 0, at.shown
    head = whisper.load("tiny.en", 6).model.state_dict()
    for name, moved in (("cross-attention", ".encoder_attn."), ("head", ".decoder.")):
        at = launch("resume", str(at.folder()), "--fallback", name)
        assert at.returncode == 0, at.shown
        summary = read(at.folder() / "summary.json")
        assert summary["stage"] == name.replace("-", "_")
        mine = WhisperForConditionalGeneration.from_pretrained(
            at.folder() / "export" / "whisper", dtype=torch.float32
        ).state_dict()
        changed = {k for k, t in mine.items() if not torch.equal(t, head[k].half().float())}
        assert changed
        assert all(moved in k or "proj_out" in k for k in changed), changed
        rates = read(at.folder() / "step_metrics.jsonl")[0]
        assert any(k.startswith("step/lr/head") for k in rates) == (name == "head")
    heard_by_the_library_alone(at.folder() / "export")


# --------------------------------------------------------------------------------------------------------- letters
def test_letters_there_and_back():
    text = "The young boy lost 3 letters, didn't he?"
    frames = [f for c in ctc.spell(text) for f in (ctc.BLANK, c, c)]
    assert whisper.word_error_rate([text], [ctc.read(frames)]) == 0
    assert ctc.read([0, 9, 9, 0, 9, 0]) == ctc.LETTERS[8] * 2
    assert ctc.fewest(ctc.spell("letter")) == 7


@pytest.mark.verify
def test_letters_that_stay_blank_are_told(launch):
    """CTC learns blanks first: a run that ends there says so. No fallback opens a decoder that nobody asks."""
    done = launch("run", "distill/whisper", "--data.sentences", "60", *QUICK, "--width", "32", "--depth", "1", "--decoder", "ctc",
                  "--task.batch-size", "3", "--task.lr", "2e-3")  # fmt: skip
    assert done.returncode == 0, done.shown
    assert "blanks-stay" in done.stdout
    metrics = read(done.folder() / "summary.json")["metrics"]
    assert metrics["blank"] > 0.95, metrics
    program = torch.export.load(done.folder() / "export" / "model.pt2").module()
    assert program(torch.zeros(3, 120, recordings.CHANNELS)).shape == (3, 300, 1 + len(ctc.LETTERS))
    refused = launch("resume", str(done.folder()), "--fallback", "head")
    assert (refused.returncode, "no decoder to open" in refused.stderr) == (2, True), refused.shown


def test_more_letters_than_frames():
    """A transcript of another recording, or one that is read much too fast: named, before anything is trained."""
    with pytest.raises(UserError, match=r"cannot be spelt(?s:.*)classes in 20 frames"):
        ctc.fits("a transcript that is far too long", 20)
    ctc.fits("short", 20)
