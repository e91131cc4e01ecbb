"""Texts to pretrain on: where they come from, and their tokens. A document is one text; it begins and ends with its own tokens."""

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from trainworthy.core.data.assets import built
from trainworthy.core.data.validation_split import absolute, hold_out, is_held_out, parse_share, refuse_training_data
from trainworthy.recipes.llm.data import formats, plain_texts, prose
from trainworthy.recipes.shared import hub

from trainworthy import core

PAD, BOS, EOS = SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>")
VALIDATION = ("validation", "val", "test")
# Each turn of a chat is a document, as the model has learnt what one is: no token is new to it when it is fine-tuned.
CHAT = (
    "{% for m in messages %}{{ bos_token + m['role'] + '\n' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)


SHORTEST = 16  # tokens of a row that two documents fit into
FEWEST = 8  # documents to learn from
READ = 2000  # documents in which separators are looked for
SEPARATOR = re.compile(r"<\|\w+\|>|</?s>|\[(?:SEP|EOS)\]")
LEAST = 32  # documents of a test set; of fewer there is none


@dataclass
class Source:
    """Where the texts come from, and how they are cut."""

    path: str = "prose"
    """`prose` (of the running Python), a folder of texts (.txt, .md, .rst; each file is a document), one such file (parts between
    empty lines), a .jsonl, .json, .csv or .parquet file, or `hub:owner/name`."""
    val: str = ""
    """Validation texts: a file or folder like `path`, or a share of the documents (`0.1`); empty: the data set's own split, else
    0.05."""
    test: bool = True
    """Keep documents for the test, on which no setting is chosen: of the packaged prose one section or module in twelve, of your own
    texts half of the held-out documents."""
    column: str = "text"
    """Of a table: the column with the text."""
    tokenizer: str = "train"
    """`train` a byte-level BPE on the training texts, or a folder or `owner/name` whose tokenizer is loaded."""
    vocabulary: int = 2048
    """Tokens of a trained tokenizer."""
    context: int = 128
    """Tokens of a row, the context of the model. Longer documents are cut into windows; every token is predicted once."""
    stride: int = 64
    """Distance between the starts of a longer document's validation windows: a token has at least context - stride tokens before it."""
    packing: bool = True
    """Put several documents into a row. `--data.no-packing` gives each document, or each window of a longer one, a row of its own:
    for architectures that mix the documents of a row (Mamba, RWKV, Jamba, OPT, ...)."""
    max_bad: float = 0.01
    """Share of documents that may be empty or no valid UTF-8; they are left out, counted and named."""
    streaming: bool = False
    """Read .jsonl or .parquet files (a file, a folder of them, or the hub) while they are trained on: nothing holds them all."""
    rows: int = 0
    """Streamed: rows of an epoch; 0: as many as the size of the files lets expect."""

    def __post_init__(self):
        if self.streaming and self.path == "prose":
            raise core.UserError(
                "--data.streaming reads files",
                got="the packaged prose",
                needed="--data.path FILE, FOLDER or hub:owner/name",
            )
        if self.streaming and self.val:
            raise core.UserError("--data.val is for texts that are read at once", got=f"--data.val {self.val} --data.streaming",
                                 needed="a validation split of the data set")  # fmt: skip
        if self.streaming and not self.packing:
            raise core.UserError(
                "--data.no-packing is for texts that are read at once", got="--data.streaming", needed="--data.packing"
            )
        if self.rows and not self.streaming:
            raise core.UserError("--data.rows is for streams", got=self.rows, needed="--data.streaming")
        if self.context < SHORTEST:
            raise core.UserError("--data.context is too short", got=self.context, needed=f">= {SHORTEST}")
        if not 1 <= self.stride < self.context:
            raise core.UserError(
                "--data.stride does not fit",
                got=self.stride,
                needed=f"1 to {self.context - 1}: below --data.context",
                next=f"--data.stride {self.context // 2}",
            )
        self.path = absolute(self.path, "prose")
        self.val = absolute(self.val)


class Corpus(NamedTuple):
    """The splits as tokens."""

    train: list[np.ndarray]
    """Of each document its tokens (n,), the first BOS, the last EOS."""
    val: list[np.ndarray]
    test: list[np.ndarray]
    texts: tuple[list[str], list[str]]
    """The documents as they were, of train and val."""
    tokenizer: Any
    sizes: np.ndarray
    """(V,) bytes of text that each token stands for; none for the special ones."""
    notes: dict[str, str]


def read(source: Source, load: Callable | None = None) -> Corpus:
    """The corpus, or the part of it that `load` finds (another function than the one below), tokenised once and cached."""
    kept = source.test and source.path == "prose"
    return _read(
        source.path, source.column, source.tokenizer, source.vocabulary, source.max_bad, load, source.val, kept
    )


def with_test(corpus: Corpus, source: Source) -> Corpus:
    """The corpus, half of its held-out documents as a test set, unless it has one. The side is that of the text, so that equal documents
    stay together. There is none of less than LEAST documents, or where `--data.val` names the held-out texts."""
    own = source.path == "prose" or (source.val and parse_share(source.val) is None)
    if own or not source.test or len(corpus.val) < 2 * LEAST:
        return corpus
    train, texts = corpus.texts
    sides = [sha256(text.encode()).digest()[0] % 2 == 0 for text in texts]
    val, test = ([row for row, side in zip(corpus.val, sides, strict=True) if side is of] for of in (True, False))
    if len(val) < LEAST or len(test) < LEAST:
        return corpus
    texts = [t for t, side in zip(texts, sides, strict=True) if side]
    return corpus._replace(val=val, test=test, texts=(train, texts))


@cache
def _read(
    path: str, column: str, name: str, vocabulary: int, max_bad: float, find: Callable | None, held: str, kept: bool
) -> Corpus:
    own, test = {"val": held} if find is None else {}, []
    if path == "prose":
        train, val, test, notes = prose.load(test=kept)
    else:
        train, val, notes = (find or load)(path, column, max_bad, **own)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loader workers are forked
    known = (
        name
        if name == "train"
        else hub.locate(name, "--data.tokenizer", packaged="train", needs=("tokenizer.json",), weights=False)
    )
    splits = {"train": train, "val": val} | ({"test": test} if test else {})
    mark = sha256("\0\0".join(map("\0".join, splits.values())).encode()).hexdigest()

    def build(folder: Path) -> None:
        tokenizer = trained(train, vocabulary) if name == "train" else loaded(known)
        tokenizer.save_pretrained(folder / "tokenizer")
        for split, documents in splits.items():
            rows = [tokens(tokenizer, text) for text in documents]
            np.save(folder / f"{split}.npy", np.concatenate(rows))
            np.save(folder / f"{split}-ends.npy", np.cumsum([len(row) for row in rows]))

    key = {"texts": mark, "tokenizer": known, "vocabulary": vocabulary}
    folder = built("corpus", key, build, sources=[__file__])
    tokenizer = loaded(str(folder / "tokenizer"))

    def split(of: str) -> list[np.ndarray]:
        return np.split(np.load(folder / f"{of}.npy", mmap_mode="r"), np.load(folder / f"{of}-ends.npy")[:-1])

    rows = {"test": [], **{of: split(of) for of in splits}}
    return Corpus(rows["train"], rows["val"], rows["test"], (train, val), tokenizer, sizes(tokenizer), notes)


# ------------------------------------------------------------------------------------------------------------- tokenizer
def trained(texts: list[str], vocabulary: int) -> Any:
    """A byte-level BPE (Sennrich 2016; GPT-2's split) of `texts`: no text is unknown to it, none comes back changed."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary < len(letters) + len(SPECIAL):
        raise core.UserError(
            "--data.vocabulary is too small",
            got=vocabulary,
            needed=f">= {len(letters) + len(SPECIAL)}: every byte is a token",
        )
    one = Tokenizer(models.BPE())
    one.pre_tokenizer, one.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=letters, special_tokens=[*SPECIAL], show_progress=False
    )
    one.train_from_iterator(texts, trainer)
    # Without a written unk_token, AutoTokenizer adds one beside a Qwen2 model: an id that the model does not have
    names = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": None}
    found = PreTrainedTokenizerFast(tokenizer_object=one, clean_up_tokenization_spaces=False, **names)
    found.chat_template = CHAT
    return found


def loaded(path: str) -> Any:
    """Return a tokenizer with a begin and an end token of a text; if it has only one of them, it is used as both."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(path)
    both = [t for t in (found.bos_token, found.eos_token) if t is not None]
    if not both:
        raise core.UserError(f"the tokenizer of {path} marks no end of a text", needed="an eos_token or a bos_token")
    found.bos_token, found.eos_token = both[0], both[-1]
    # Labels are made from lengths, so an eos that is meant stays one.
    found.pad_token = found.pad_token or found.eos_token
    return found


def tokens(tokenizer: Any, text: str) -> np.ndarray:
    """(n,) of one document: what begins a text, its own tokens, what ends it. A text that spells a special token has none."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return np.asarray([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id], dtype=np.int32)


def sizes(tokenizer: Any) -> np.ndarray:
    """Return the UTF-8 bytes of each token (V,), so that any part of a text can be counted in bytes."""
    from tokenizers import pre_tokenizers

    letters, special = {*pre_tokenizers.ByteLevel.alphabet()}, {*tokenizer.all_special_ids}
    found = np.zeros(len(tokenizer), dtype=np.int32)
    for token, i in tokenizer.get_vocab().items():
        if i not in special:
            plain = letters.issuperset(token)  # each letter stands for one byte
            found[i] = len(token) if plain else len(tokenizer.convert_tokens_to_string([token]).encode())
    return found


# ----------------------------------------------------------------------------------------------------------------- files
def load(path: str, column: str, max_bad: float, val: str = "") -> tuple[list[str], list[str], dict[str, str]]:
    """(train, val, notes): the splits that are there or that `val` names, else one document in twenty held out, the same whatever
    the run's seed."""
    splits, share = plain_texts.splits(path, column), parse_share(val)
    if share:
        splits = {"train": splits["train"]}
    elif val:
        refuse_training_data(val, path)
        splits = {"train": splits["train"], "val": plain_texts.splits(val, column)["train"]}
    notes: dict[str, str] = {}
    where = {"val": f"--data.val {val}"} if val and not share else {}
    each = [
        partial(plain_texts.checked, rows, where.get(name, f"--data.path {path}"), name, max_bad, notes)
        for name, rows in splits.items()
    ]
    kept = dict(zip(splits, formats.together(each), strict=True))
    refuse_separators(kept["train"], path)
    return *split_off(kept["train"], next((kept[k] for k in VALIDATION if k in kept), None), path, share or 0.05), notes


def refuse_separators(texts: list[str], path: str) -> None:
    """Raise UserError if most documents hold the token that separates texts in somebody's file: here it would be letters that are easily
    predicted, and several texts one document."""
    some = texts[:: -(-len(texts) // READ)]
    found = Counter(mark for text in some for mark in {*SEPARATOR.findall(text)})
    mark, n = found.most_common(1)[0] if found else ("", 0)
    if n > len(some) / 2:
        raise core.UserError(
            f"{mark} is in {n / len(some):.0%} of the documents of {path}", got=f"{n:,} of {len(some):,}",
            needed="documents without it: the recipe ends each with the tokenizer's own token, and a text that spells one is read as letters",
            cause="several texts in one document, joined by the separator of another program; or conversations, written with a template",
            next=f"split them at {mark}: a row or a file for each; conversations: llm/sft",
        )  # fmt: skip


def split_off(
    train: list[str], val: list[str] | None, path: str, share: float = 0.05, *, streamed: bool = False
) -> tuple[list[str], list[str]]:
    """Return (train, val): the existing validation documents, or that share of the training documents. Of a stream each document's own
    hash decides: how many come is not known."""
    if val is None:
        sides = None if streamed else hold_out(train, share)
        sides = sides or [is_held_out(text, share) for text in train]
        train, val = ([t for t, a in zip(train, sides, strict=True) if a is side] for side in (False, True))
    if len(train) < FEWEST or not val:
        raise core.UserError(f"--data.path {path}: too little to train on and to hold out", got=f"{len(train)} and {len(val)}",
                             needed="a few dozen documents",
                             next="cut the text into documents: empty lines in a file, or one file each")  # fmt: skip
    return train, val
