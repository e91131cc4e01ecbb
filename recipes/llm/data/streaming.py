"""Texts from .jsonl or .parquet files, on this disk or the hub, that are read during training and never held in memory at once.

The files, the tokenizer and the context determine every row of tokens, so that a resumed run continues bit for bit. Files are split into
blocks (row groups, or a megabyte of lines), and blocks are distributed over lanes. A lane is read in order, `ROWS` packed rows (a
stretch) at a time. The start of a stretch is known once the previous one was read; it is then stored in the cache, so that a resumed run
starts there. Without the cache it reads up to there again. Row i belongs to lane i % lanes, so each process reads lanes of its own.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache, cached_property, lru_cache
from hashlib import sha256
from itertools import chain, count
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from trainworthy.core.base import network, seeds
from trainworthy.core.data.assets import cache_dir
from trainworthy.core.data.validation_split import is_held_out
from trainworthy.recipes.llm.data import documents, packing, plain_texts
from trainworthy.recipes.llm.data.packing import Packed, best_fit, windows
from trainworthy.recipes.shared import hub, mds

from trainworthy import core

LANES = 8  # parallel lanes; a multiple of the usual numbers of processes
ROWS = 64  # rows of a stretch, which are shuffled and packed together
BLOCK = 1 << 20  # bytes of lines
SAMPLE = 4 << 20  # bytes of text that are read first: for the tokenizer, the frequencies and the validation set
SHARD = re.compile(r"(.*?)(\d+)-of-(\d+)([^/]*)", re.DOTALL)
FEW = 2  # bad documents that every block may have


class Block(NamedTuple):
    """A part of a file: bytes `start` to `end` of lines, or row group `start` of a parquet file."""

    url: str
    start: int
    end: int
    size: int
    """Bytes of the lines, or of the column before compression."""


class Cursor(NamedTuple):
    """The start of a stretch."""

    block: int = 0
    """Block of the lane; after the last one the first follows again."""
    document: int = 0
    window: int = 0


# ----------------------------------------------------------------------------------------------------------------- files
@cache
def blocks(path: str, column: str) -> dict[str, list[Block]]:
    """Return {split: its blocks, shuffled}. Only sizes and schemas are read."""
    if "://" not in path:
        mds.refuse(path, needed=plain_texts.READ)
    files = {"train": [path]} if Path(path).is_file() else _listed(path) if "://" not in path else _matching(path)
    if "train" not in files:
        raise core.UserError(f"--data.path {path} has no split to learn from", got=", ".join(files) or "no data files",
                             needed="train")  # fmt: skip
    held_out = next((split for split in documents.VALIDATION if split in files), None)
    found = {}
    for split in ("train", held_out) if held_out else ("train",):
        cut = [block for url in files[split] for block in _cut(url, column)]
        found[split] = [cut[i] for i in seeds.permutation(len(cut), "blocks", split)]
    return found


def _matching(path: str) -> dict[str, list[str]]:
    """Return {split: files} of an address that fsspec reads (s3://bucket/texts/*.jsonl)."""
    import fsspec

    try:
        system, _, found = fsspec.get_fs_token_paths(path)
        files = sorted(system.unstrip_protocol(one) for one in found if system.isfile(one))
    except Exception as error:
        if not isinstance(error, (OSError, ValueError, ImportError)) and not network.unreachable(error):
            raise
        files, reason = [], str(error).splitlines()[0]
    else:
        reason = "no file"
    if not files:
        raise core.UserError(f"--data.path {path} cannot be read", got=reason, needed="an address that fsspec reads, of a file or a pattern",
                             cause="no such files, no right to read them, or a package of that storage is missing (s3fs, gcsfs, "
                             "aiohttp)")  # fmt: skip
    return {"train": files}


def _listed(path: str) -> dict[str, list[str]]:
    """Return {split: files} of a folder or of a data set on the hub."""
    import datasets

    hub.ask(path)
    try:
        found = datasets.load_dataset_builder(*hub.named(path)).config.data_files
    except Exception as error:
        if not isinstance(error, (OSError, ValueError, datasets.exceptions.DatasetsError)) and not network.unreachable(
            error
        ):
            raise
        raise core.UserError(f"--data.path {path} cannot be streamed", got=str(error.__cause__ or error).splitlines()[0][:200],
                             needed="a .jsonl or .parquet file, a folder of them, or hub:owner/name",
                             cause="no such folder, no network, or a private data set") from None  # fmt: skip
    return {str(split): list(files) for split, files in (found or {}).items()}


def _cut(url: str, column: str) -> list[Block]:
    if url.endswith(".parquet"):
        groups = map(_rows(url, column).row_group, range(_rows(url, column).num_row_groups))
        sizes = [sum(g.column(i).total_uncompressed_size for i in range(g.num_columns) if g.column(i).path_in_schema == column)
                 for g in groups]  # fmt: skip
        return [Block(url, i, i + 1, size) for i, size in enumerate(sizes)]
    if not url.endswith((".jsonl", ".json")):
        raise core.UserError(f"{url} cannot be streamed", got=Path(url).suffix, needed=".jsonl or .parquet",
                             cause="a file that is packed has to be read from its beginning",
                             next="leave --data.streaming out")  # fmt: skip
    with _opened(url) as file:
        size = file.seek(0, 2)
    step = max(1, min(BLOCK, math.ceil(size / LANES)))
    return [Block(url, a, min(a + step, size), min(step, size - a)) for a in range(0, size, step)]


@cache
def _rows(url: str, column: str) -> Any:
    """Return the metadata of a parquet file that has the column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with _opened(url) as file:
            found = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise core.UserError(f"{url} cannot be read", got=str(error).splitlines()[0], needed="a parquet file",
                             cause="a damaged or unfinished download") from None  # fmt: skip
    plain_texts.has_column({f.name: str(f.type) for f in found.schema_arrow}, column, url)
    return found.metadata


def _opened(url: str) -> Any:
    import fsspec

    return fsspec.open(url, "rb").open()


def texts(block: Block, column: str) -> Iterator[tuple[str, str | None]]:
    """Yield (place, text or None if it is unreadable) of each document that starts in the block."""
    name = block.url.rsplit("/", 1)[-1]
    with _opened(block.url) as file:
        if block.url.endswith(".parquet"):
            yield from _of_rows(block, file, column, name)
            return
        file.seek(max(0, block.start - 1))
        if block.start:
            file.readline()  # it started in the previous block
        while (at := file.tell()) < block.end:
            found = plain_texts.parsed(file.readline(), f"the line at byte {at:,} of {name}", column)
            if not at and found and isinstance(found[0][1], plain_texts.Unusable):
                raise found[0][1].error  # another kind of file, or another column
            yield from found


def _of_rows(block: Block, file: Any, column: str, name: str) -> Iterator[tuple[str, str | None]]:
    import pyarrow.parquet as pq

    group = pq.ParquetFile(file, metadata=_rows(block.url, column))
    row = 0
    for part in group.iter_batches(256, row_groups=[block.start], columns=[column], use_threads=False):
        for value in part.column(0):
            try:
                text = value.as_py()
            except UnicodeDecodeError:
                text = None
            yield f"row {row} of row group {block.start} of {name}", text
            row += 1


# ----------------------------------------------------------------------------------------------------------------- lanes
class Lanes:
    """The blocks of a split. Each lane is an endless stream of documents, from which stretches of rows are packed."""

    def __init__(self, source: documents.Source, tokenizer: Any, sizes: np.ndarray):
        splits = blocks(source.path, source.column)
        self.source, self.tokenizer, self.sizes = source, tokenizer, sizes
        self.blocks, self.holds_out = splits["train"], len(splits) == 1
        self.n = min(LANES, len(self.blocks))
        self.lock = RLock()  # loader threads share a tokenizer
        # A document may span several stretches.
        self.tokens = lru_cache(2 * LANES)(lambda text: documents.tokens(tokenizer, text))
        self.stretch = lru_cache(3 * LANES)(self._stretch)
        self.starts = [[Cursor()] for _ in range(self.n)]
        self.going: dict[int, tuple] = {}  # by lane: (process, position), documents read ahead, the rest
        code = [Path(module.__file__).read_bytes() for module in (documents, packing, plain_texts)] + [
            Path(__file__).read_bytes()
        ]
        key = [tokenizer.backend_tokenizer.to_str(), tokenizer.bos_token_id, tokenizer.eos_token_id, source.context, source.column,
               *([*block, stamp(block.url)] for block in self.blocks)]  # fmt: skip
        mark = sha256(json.dumps(key).encode() + b"".join(code)).hexdigest()[:16]
        self.folder = cache_dir() / "streams" / mark

    @cached_property
    def share(self) -> float:
        """Return bytes of text per byte of a block."""
        found = sum(len((text or "").encode()) for _, text in texts(self.blocks[0], self.source.column))
        return found / self.blocks[0].size

    def documents(self, lane: int, start: Cursor) -> Iterator[tuple[int, int, str]]:
        """Yield (block, document in it, text) from a cursor on, endlessly. Bad documents are skipped; a block with too many raises
        UserError."""
        mine = self.blocks[lane :: self.n]
        last = start.block  # last block with usable text
        for b in count(start.block):
            bad, n = [], 0
            for d, (place, text) in enumerate(texts(mine[b % len(mine)], self.source.column)):
                n += 1
                if problem := plain_texts.problem(text):
                    bad.append(f"{place} ({problem})")
                elif not (self.holds_out and is_held_out(text, 0.05)):
                    last = b
                    if b > start.block or d >= start.document:
                        yield b, d, text
            if len(bad) > max(FEW, self.source.max_bad * n):
                raise plain_texts.too_many(
                    bad,
                    f"--data.path {self.source.path}: {len(bad)} of {n} documents in one block",
                    self.source.max_bad,
                )
            if b - last > len(mine):
                raise core.UserError(f"--data.path {self.source.path}: nothing to learn from in a lane of {len(mine)} blocks",
                                     needed="documents")  # fmt: skip

    def _stretch(self, lane: int, number: int) -> Packed:
        """Return `ROWS` rows of a lane: as many consecutive windows as fit."""
        context, start = self.source.context, self.start(lane, number)
        where, before, rest = self.going.pop(lane, (None, [], None))
        if where != (os.getpid(), start):  # a file opened before a fork shares its position with the other process
            before, rest = [], self.documents(lane, start)
        taken, rows, found, places, total = [], [], [], [], 0
        for b, d, text in chain(before, rest):
            row = self.tokens(text)
            first = start.window if (b, d) == start[:2] else 0
            some = windows([len(row)], context, context - 1)[first:]
            found += [w._replace(document=len(rows)) for w in some]
            places += [Cursor(b, d, first + i) for i in range(len(some))]
            taken.append((b, d, text))
            rows.append(row)
            total += sum(w.end - w.start for w in some)
            if total > ROWS * context:
                break
        lengths = [w.end - w.start for w in found]
        n = int(np.searchsorted(np.cumsum(lengths), ROWS * context, side="right"))
        while (over := len(best_fit(lengths[:n], context)) - ROWS) > 0:
            n -= over  # one window less is at most one row less
        self.note(lane, number + 1, places[n])
        self.going[lane] = (os.getpid(), places[n]), taken[found[n].document :] + before[len(taken) :], rest
        made = Packed(
            rows, context=context, stride=context - 1, tokenizer=self.tokenizer, sizes=self.sizes, some=found[:n]
        )
        made.rows += [[]] * (ROWS - len(made.rows))
        return made

    def start(self, lane: int, number: int) -> Cursor:
        """Return the start of a stretch: from the cache, or by reading everything before it."""
        known, file = self.starts[lane], self.folder / str(lane)
        if number >= len(known) and file.exists():
            for line in file.read_text().splitlines(keepends=True):
                place = line.split()
                if line.endswith("\n") and len(place) == 4 and int(place[0]) == len(known):
                    known.append(Cursor(*map(int, place[1:])))
        while number >= len(known):
            self._stretch(lane, len(known) - 1)
        return known[number]

    def note(self, lane: int, number: int, place: Cursor) -> None:
        """Cache values that follow from the files. Processes that write at the same time write the same values."""
        if number == len(self.starts[lane]):
            self.starts[lane].append(place)
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / str(lane)).open("a") as file:
                file.write(f"{number} {place.block} {place.document} {place.window}\n")


def stamp(url: str) -> list[int]:
    """Return a string that changes when a local file does; names on the hub contain the version."""
    if not Path(url).exists():
        return []
    found = Path(url).stat()
    return [found.st_size, found.st_mtime_ns]


@cache
def _lanes(path: str, column: str, context: int, max_bad: float, tokenizer: Any) -> Lanes:
    source = documents.Source(path=path, column=column, context=context, stride=1, max_bad=max_bad)
    return Lanes(source, tokenizer, documents.sizes(tokenizer))


# -------------------------------------------------------------------------------------------------------------- data set
def sample(path: str, column: str, max_bad: float) -> tuple[list[str], list[str], dict[str, str]]:
    """Return (train, val, notes) from the first documents of the first blocks, in the form of `documents.load`."""
    splits, notes = blocks(path, column), {}
    kept = {}
    for split, found in splits.items():
        rows, left = [], SAMPLE if split == "train" else SAMPLE // LANES
        most = left // max(1, min(LANES, len(found)))
        for block in found:
            size = 0
            for place, text in texts(block, column):
                rows.append((place, text))
                size += len((text or "").encode())
                if size >= most:
                    break
            left -= size
            if left <= 0:
                break
        kept[split] = plain_texts.checked(rows, f"--data.path {path}", split, max_bad, notes)
    train, *given = kept.values()
    return *documents.split_off(train, given[0] if given else None, path, streamed=True), notes


def absent(names: Iterable[str]) -> list[str]:
    """Return the names of missing shards: `train-00003-of-00005.parquet` belongs to five files, numbered from 0 or from 1."""
    there: dict[tuple[str, str, str], set[int]] = {}
    for m in filter(None, map(SHARD.fullmatch, names)):
        there.setdefault((m[1], m[3], m[4]), set()).add(int(m[2]))
    return [
        Path(f"{start}{i:0{len(n)}}-of-{n}{end}").name
        for (start, n, end), have in sorted(there.items())
        for i in sorted({k + (int(n) in have) for k in range(int(n))} - have)
    ]


def rows(corpus: documents.Corpus, source: documents.Source, **how: Any) -> Packed:
    """Training data: rows of the whole corpus, or of its stream."""
    if source.streaming:
        return Streamed(corpus, source, **how)
    return Packed(corpus.train, stride=source.context - 1, **how)


class Streamed(Packed):
    """`rows`: number of rows of a stream, 0: estimated from its size. `sample`: the documents for statistics and gates."""

    def __init__(self, corpus: documents.Corpus, source: documents.Source, **how: Any):
        super().__init__(corpus.train, stride=source.context - 1, **how)
        self.lanes = _lanes(source.path, source.column, source.context, source.max_bad, corpus.tokenizer)
        some, n = self.lanes.blocks, self.lanes.n
        expected = self.expected(corpus)
        self.total = max(1, (source.rows or expected) // n) * n
        self.notes = {
            "streamed": f"{self.total:,} rows of {source.context} an epoch; {expected:,} expected in {len(some):,} blocks of "
            f"{len({b.url for b in some}):,} files, {n} lanes; counted are {len(corpus.train):,} documents, the others are read "
            f"while they are trained on"
        }
        if lost := absent([b.url for b in some]):
            self.notes["missing"] = (
                f"{len(lost):,} of the files that the names of the others count: {', '.join(lost[:3])}{', ...' * (len(lost) > 3)}"
            )

    def expected(self, corpus: documents.Corpus) -> int:
        """Return the estimated number of rows of the whole stream, from its first documents."""
        size = sum(b.size for b in self.lanes.blocks) * self.lanes.share * (19 / 20 if self.lanes.holds_out else 1)
        tokens = sum(map(len, corpus.train)) / sum(len(text.encode()) for text in corpus.texts[0])
        return int(size * tokens / self.context)

    def among(self, documents: list[np.ndarray]) -> Packed:
        return Packed(documents, context=self.context, stride=self.stride, tokenizer=self.tokenizer, sizes=self.sizes)

    def __len__(self) -> int:
        return self.total

    def read(self, index: int) -> dict[str, Tensor | str]:
        lane, place = index % self.lanes.n, index // self.lanes.n
        with self.lanes.lock:
            return self.lanes.stretch(lane, place // ROWS).get(place % ROWS, None)

    def make(self, index: int, got: dict, generator: torch.Generator | None) -> dict[str, Tensor | str]:
        return got

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor | str]:
        return self.read(index)

    def order(self, *parts: int | str) -> Tensor:
        """Return the order of an epoch: stretches from all lanes in turn, rows shuffled within a stretch, each read once."""
        drawn, found = seeds.permutation(len(self), *parts), torch.empty(len(self), dtype=torch.long)
        for lane in range(self.lanes.n):
            mine = torch.arange(lane, len(self), self.lanes.n)
            stretch = torch.arange(len(mine)) // ROWS
            found[lane :: self.lanes.n] = mine[(stretch * len(self) + drawn[mine]).argsort()]
        return found

    def representative(self, count: int) -> range:
        """Return the first indices: later ones would need everything before them to be read."""
        return range(count)
