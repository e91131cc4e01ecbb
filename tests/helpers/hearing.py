"""A Whisper of 0.3 million parameters with random weights, and recordings of which it hears every word as their table says."""

import csv
from pathlib import Path

import numpy as np
import soundfile
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trainworthy.recipes.shared import whisper
from transformers import WhisperConfig, WhisperForConditionalGeneration, WhisperTokenizerFast

SECONDS = 2
"""Length of each recording and of the canvas: there is nothing after its end."""
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"]
TIMES = 1501  # entries after the last one: a timestamp for every 20 ms of 30 s


def tokenizer() -> WhisperTokenizerFast:
    """One token for each byte, and ` a`, which is the one word that is an entry."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*letters, "\u0120a", *SPECIAL]
    one = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(entries)}, merges=[("\u0120", "a")]))
    one.pre_tokenizer, one.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return WhisperTokenizerFast(tokenizer_object=one)


def model(words: WhisperTokenizerFast, mels: int = 80) -> WhisperForConditionalGeneration:
    """Two layers on each side; it writes small letters and nothing else, which depend on what it hears. `mels`: 128 in large-v3."""
    ids = {k: words.convert_tokens_to_ids(t) for k, t in zip(("end", "start", "plain"), SPECIAL, strict=True)}
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=ids["plain"] + 1 + TIMES, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=1,
        decoder_attention_heads=1, encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.2, bos_token_id=ids["end"],
        eos_token_id=ids["end"], pad_token_id=ids["end"], decoder_start_token_id=ids["start"], num_mel_bins=mels,
    )  # fmt: skip
    made = WhisperForConditionalGeneration(config)
    written = words.convert_tokens_to_ids([*"abcdefghijklmnopqrstuvwxyz", "\u0120a", "\u0120", SPECIAL[0]])
    with torch.no_grad():
        keep = torch.zeros(config.vocab_size, 1)
        keep[written] = 1
        keep[ids["start"]] = keep[ids["plain"]] = 0.1  # read at the start of every transcript, never written
        made.model.decoder.embed_tokens.weight.mul_(keep)
    made.generation_config.begin_suppress_tokens = [words.convert_tokens_to_ids("\u0120"), ids["end"]]
    return made


def write(home: Path, n: int = 30, mels: int = 80) -> Path:
    """whisper/ and recordings/ (chirps, each of other pitches) in a folder that exists."""
    words = tokenizer()
    model(words, mels).save_pretrained(home / "whisper")
    words.save_pretrained(home / "whisper")
    folder = home / "recordings"
    folder.mkdir()
    draws, time = np.random.default_rng(0), np.arange(SECONDS * whisper.RATE) / whisper.RATE
    for i in range(n):
        low, high, pace = draws.uniform(150, 600), draws.uniform(1000, 5000), draws.uniform(1, 4)
        wave = 0.2 * np.sin(2 * np.pi * low * time) + 0.2 * np.sin(2 * np.pi * high * time) * (
            np.sin(2 * np.pi * pace * time) > 0
        )
        wave += 0.02 * draws.standard_normal(len(time))
        soundfile.write(folder / f"{i:02}.wav", wave.astype(np.float32), whisper.RATE, subtype="FLOAT")
    teacher = whisper.load(str(home / "whisper"), SECONDS)
    waves = [soundfile.read(path, dtype="float32")[0] for path in sorted(folder.glob("*.wav"))]
    heard = teacher.write(teacher.hear(waves))
    with (folder / "metadata.csv").open("w", newline="") as file:
        rows = [
            (f"{i:02}.wav", f"{text} [{i}]") for i, text in enumerate(heard)
        ]  # brackets are no words; no two texts are equal
        csv.writer(file).writerows([("file_name", "transcription"), *rows])
    return home


def settings(home: Path) -> tuple[str, ...]:
    """distill/whisper and distill/compress on these."""
    return (
        "--data.path",
        str(home / "recordings"),
        "--data.teacher",
        str(home / "whisper"),
        "--data.seconds",
        str(SECONDS),
    )
