"""Rows of a file or of a data set on the hub, as they are in it. Files may be packed (`.gz`)."""

import codecs
import csv
import gzip
import io
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from trainworthy.recipes.llm.data import formats
from trainworthy.recipes.shared import hub, mds, other_recipes

from trainworthy import core

VALIDATION = ("validation", "val", "test")
TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
LINES = (".jsonl", ".json")
WRAPPERS = ("data", "train", "rows", "examples", "instances", "items")
"""Keys under which an object holds the list of all rows."""


def kind(file: Path) -> str:
    """The suffix of a file, without `.gz`."""
    return Path(file.name.removesuffix(".gz")).suffix


def text_of(file: Path) -> str:
    """The text of a file in UTF-8 (or UTF-16 that says so), unpacked. ValueError: it is neither."""
    data = file.read_bytes()
    if file.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError) as error:
            raise ValueError(f"not whole, or not packed by gzip: {error}") from None
    if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return data.decode("utf-16")
    return data.decode("utf-8-sig")


def halves(value: Any) -> bool:
    """Return whether a text in a JSON value has half of a character: `\\ud83d` alone, as programs write that cut texts."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


@cache
def tables(path: str, setting: str) -> dict[str, list[dict[str, Any]]]:
    """Splits of a file, or of a data set on the hub as `datasets` reads it."""
    if path.startswith("hub:"):
        found = hub.tables(path)
        held_out = [k for k in VALIDATION if k in found][:1]
        return {split: list(_plain(found[split])) for split in ("train", *held_out)}
    file = Path(path)
    mds.refuse(file, needed=f"a {', '.join((*LINES, *TABLES))} file (also .gz), or hub:owner/name")
    if not file.is_file() or kind(file) not in (*LINES, *TABLES):
        problem = (
            "a file of this kind is not read"
            if file.is_file()
            else "a folder, not a file"
            if file.is_dir()
            else "no such file"
        )
        inside = sorted(p.name for p in file.iterdir()) if file.is_dir() else []
        usable = [name for name in inside if kind(Path(name)) in (*LINES, *TABLES)]
        raise core.UserError(
            f"{setting} {path}: {problem}", got=", ".join(inside[:5]) + ", ..." * (len(inside) > 5),
            needed=f"a {', '.join((*LINES, *TABLES))} file (also .gz), or hub:owner/name",
            cause="" if usable else other_recipes.that_read(file, "texts"),
            next=f"{setting} {file / usable[0]}" if len(usable) == 1 else "")  # fmt: skip
    if not file.stat().st_size:
        raise core.UserError(f"{setting} {path} is empty", needed="one pair at least", cause="a download that failed")
    try:
        if kind(file) not in LINES:
            return {"train": _table(file)}
        found = lines(file)
        return {"train": formats.Rows(map(_row, found), found.lines)}
    except ValueError as error:  # no UTF-8, no JSON
        raise hub.unreadable(file, error, setting) from None


def _row(value: Any) -> dict[str, Any]:
    """A row, or what is counted with the bad ones in its place."""
    if isinstance(value, formats.Unread):
        return value
    if isinstance(value, dict):
        return value
    return formats.Unread(f"a row is {type(value).__name__}, not an object with columns", repr(value)[:60])


def cells(file: Path) -> list[Any]:
    """Rows of a table in text. Cells stay texts: `007`, `NA` and `None` are answers; an empty one is None. ValueError: no table."""
    text = text_of(file)
    separator = "\t" if kind(file) == ".tsv" else max(",;\t", key=text.partition("\n")[0].count)
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        head, *rows = [row for row in reader if row] or [[]]
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None
    if twice := sorted({name for name in head if head.count(name) > 1}):
        raise ValueError(f"several columns are called {', '.join(map(repr, twice))}")
    more = f"more cells than the {len(head)} columns: quote texts with {separator!r} in them"
    return [
        formats.Unread(more, repr(row[-1])[:60])
        if len(row) > len(head)
        else {k: v or None for k, v in zip(head, [*row, *[""] * (len(head) - len(row))], strict=True)}
        for row in rows
    ]


def _table(file: Path) -> list[Any]:
    import datasets

    if kind(file) != ".parquet":
        return cells(file)
    datasets.disable_progress_bars()
    try:
        return list(_plain(datasets.load_dataset("parquet", data_files={"train": str(file)})["train"]))
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(str(error.__cause__ or error)) from error


def lines(file: Path) -> formats.Rows:
    """Values of a JSON file, as they are in it: one a line, one list, or one object with a list of rows. (A table would give each row
    the keys of all, and takes no column of two types.) ValueError: no line is JSON."""
    text = text_of(file)
    if kind(file) == ".json" or text.lstrip()[:1] == "[":
        try:
            return formats.Rows(_read(one, text) for one in _unwrapped(json.loads(text)))
        except json.JSONDecodeError:
            if text.lstrip()[:1] == "[":
                raise  # else one object a line
    rows: list[Any] = []
    wrong = []
    numbered = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    for i, line in numbered:
        try:
            rows.append(_read(json.loads(line), line))
        except json.JSONDecodeError as error:
            seen = f"{error.msg} at column {error.colno}"
            wrong.append(f"line {i}: {seen}")
            rows.append(formats.Unread("not JSON", seen))
    if wrong and len(wrong) == len(rows):
        raise ValueError(wrong[0])
    return formats.Rows(rows, [i for i, _ in numbered])


def _read(value: Any, text: str) -> Any:
    """The value of a JSON text, or what is counted with the bad rows in its place."""
    if ("\\ud" in text or "\\uD" in text) and halves(value):
        return formats.Unread("a text has half of a character (a lone surrogate)", repr(value)[:60])
    return value


def _unwrapped(value: Any) -> list[Any]:
    """The rows of a whole JSON file: `[...]`, `{"data": [...]}`, or a single one."""
    if isinstance(value, dict):
        found = [value[k] for k in WRAPPERS if isinstance(value.get(k), list)]
        return found[0] if len(found) == 1 else [value]
    return value if isinstance(value, list) else [value]


def _plain(table: Any) -> Iterator[dict[str, Any]]:
    """Rows of a table. What a column holds as a struct (in parquet, tool calls with their arguments) has in every row each key of
    any row: those without a value are left off, or a call would be learnt with arguments that nobody gave."""

    def own(value: Any, kind: Any) -> Any:
        if isinstance(kind, dict) and isinstance(value, dict):
            return {k: own(v, kind.get(k)) for k, v in value.items() if v is not None}
        if isinstance(value, list):
            return [own(v, getattr(kind, "feature", None)) for v in value]
        return value

    for row in table:
        yield {k: own(v, table.features[k]) for k, v in row.items()}
