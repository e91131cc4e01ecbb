"""Texts in files and in data sets of the hub, read as they are; what has no text is counted and named."""

import codecs
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainworthy.recipes.llm.data import files, formats
from trainworthy.recipes.shared import hub, mds, other_recipes

from trainworthy import core

TABLES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
PLAIN = (".txt", ".md", ".rst")
READ = f"prose, a folder of {', '.join(PLAIN)} files, a {', '.join(TABLES)} file, or hub:owner/name"


class Unusable(str):
    """Why there is no text, in the place of a document's text. It has the `error` to raise if every document is like it."""

    error: core.UserError | None = None


def unusable(why: str, error: core.UserError | None = None) -> Unusable:
    """Return the reason why a row has no text."""
    found = Unusable(why)
    found.error = error
    return found


def splits(path: str, column: str) -> dict[str, list[tuple[str, str | None]]]:
    if not path.startswith("hub:"):
        mds.refuse(path, needed=READ)
    if path.startswith("hub:") or files.kind(Path(path)) in TABLES:
        return _table(path, column)
    return {"train": _files(Path(path))}


def checked(
    rows: Iterable[tuple[str, str | None]], where: str, split: str, max_bad: float, notes: dict[str, str]
) -> list[str]:
    """The texts of (place, text or what is wrong with it); too many bad ones are refused, some are counted."""
    good, bad, total = [], [], 0
    for place, text in rows:
        total += 1
        if wrong := problem(text):
            bad.append(f"{place} ({wrong})")
        else:
            good.append(text)
    if len(bad) > max_bad * total or not good:
        raise too_many(bad, f"{where}: {len(bad)} of {total} documents in {split}", max_bad)
    if bad:
        notes[f"left out of {split}"] = f"{len(bad)} of {total} documents: {', '.join(bad[:3])}"
    return good


def problem(text: str | None) -> str:
    """Return why a document cannot be used; empty if it can."""
    if isinstance(text, Unusable):
        return str(text)
    if text is None:
        return "no valid UTF-8"
    return "" if text.strip() else "empty: it has no token to predict"


def too_many(bad: list[str], what: str, max_bad: float) -> core.UserError:
    return core.UserError(f"{what} cannot be learnt from",
                          got=", ".join(bad[:3]) + " ..." * (len(bad) > 3) or "no documents",
                          needed=f"at most {max_bad:.1%} (--data.max-bad)",
                          cause="another encoding, empty rows or files, or the wrong column",
                          next="convert to UTF-8, or correct the files named")  # fmt: skip


def _files(path: Path) -> list[tuple[str, str | None]]:
    """Return (location, text) of a folder's files, or of the parts of one file that are separated by empty lines."""
    if not path.exists():
        raise core.UserError(f"--data.path {path}: no such file or folder", needed=READ)
    paths = sorted(p for p in path.rglob("*") if p.suffix in PLAIN) if path.is_dir() else [path]
    if not paths:
        found = sorted({p.suffix or p.name for p in path.rglob("*") if p.is_file()})
        tables = {*found} & {*TABLES}
        raise core.UserError(
            f"--data.path {path}: no texts in it", got=", ".join(found[:8]) or "nothing", needed=", ".join(PLAIN),
            cause="tables in a folder are a data set, hub:FOLDER" if tables else other_recipes.that_read(path, "texts"),
            next=f"--data.path hub:{path}" if tables else "")  # fmt: skip
    found: list[tuple[str, str | None]] = []
    for file in paths:
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            found.append((f"{file.name} at byte {error.start}", None))
            continue
        if path.is_dir():
            found.append((file.name, text))
        else:
            parts = [p for p in text.split("\n\n") if p.strip()] or [text]
            found += [(f"part {i} of {file.name}", part) for i, part in enumerate(parts)]
    return found


def _table(path: str, column: str) -> dict[str, list[tuple[str, str | None]]]:
    """Splits of a file or of a data set on the hub, as `datasets` reads them."""
    import datasets

    datasets.disable_progress_bars()
    if path.startswith("hub:"):
        splits = hub.tables(path)
    else:
        file = Path(path)
        if not file.is_file():
            raise core.UserError(
                f"--data.path {path}: no such file", needed=f"a {', '.join(TABLES)} file, a folder, or hub:owner/name"
            )
        if files.kind(file) in (".jsonl", ".json"):  # read plainly: what is wrong is then told by its line
            return {"train": _lines(file, column)}
        try:
            if files.kind(file) == ".csv":  # as texts: `NA` is one
                return {"train": _cells(file, column)}
            splits = datasets.load_dataset(TABLES[files.kind(file)], data_files={"train": str(file)})
        except (UnicodeDecodeError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            raise hub.unreadable(file, error) from None
    for name, rows in splits.items():
        has_column(rows.features, column, f"{name} of {path}")
    empty = unusable(f"{column}: nothing")
    return {
        name: [(f"row {i}", empty if row[column] is None else row[column]) for i, row in enumerate(rows, 1)]
        for name, rows in splits.items()
    }


def _cells(file: Path, column: str) -> list[tuple[str, str | None]]:
    """Rows of a table in text."""
    rows, empty = files.cells(file), unusable(f"{column}: nothing")
    names = [k for row in rows if not isinstance(row, formats.Unread) for k in row]
    has_column(dict.fromkeys(names, "string"), column, f"train of {file}")
    return [
        (f"row {i}", unusable(str(row.fault)) if isinstance(row, formats.Unread) else row[column] or empty)
        for i, row in enumerate(rows, 1)
    ]


def _lines(file: Path, column: str) -> list[tuple[str, str | None]]:
    """Rows of a JSON file: one object a line, or one list of objects. Raises UserError if no row has a text."""
    found: list[tuple[str, str | None]] = []
    content = file.read_bytes()
    if file.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError) as error:
            raise hub.unreadable(file, ValueError(f"not whole, or not packed by gzip: {error}")) from None
    content = content.removeprefix(codecs.BOM_UTF8)
    lines = [content] if content[:1] == b"[" else content.splitlines()
    for i, line in enumerate(lines, 1):
        found += [(f"line {i}", text) for _, text in parsed(line, f"line {i} of {file}", column)]
    if found and all(isinstance(text, Unusable) for _, text in found):
        raise found[0][1].error
    return found


def parsed(line: bytes, place: str, column: str) -> list[tuple[str, str | None]]:
    """(place, text) of a line's object, or of each in its list; `Unusable` or None (no UTF-8) where there is no text."""
    try:
        rows = json.loads(line.decode()) if line.strip() else []
    except UnicodeDecodeError:
        return [(place, None)]
    except json.JSONDecodeError as error:
        got = f"{error.msg} at column {error.colno}"
        fault = core.UserError(f"{place} is not JSON", got=got, needed="one object a line")
        return [(place, unusable(f"not JSON: {got}", fault))]
    found: list[tuple[str, str | None]] = []
    for row in rows if isinstance(rows, list) else [rows]:
        text = row.get(column) if isinstance(row, dict) else None
        if not isinstance(text, str):
            got = {k: type(v).__name__ for k, v in row.items()} if isinstance(row, dict) else {}
            kind = got.get(column, "missing") if got else type(row).__name__
            text = unusable(f"{column}: {kind}, not text", no_text(got, column, place))
        elif files.halves(text):
            text = unusable("half of a character (a lone surrogate)", no_text({}, column, place))
        found.append((place, text))
    return found


def has_column(columns: dict[str, Any], column: str, where: str) -> None:
    """Raise UserError unless the column contains text."""
    kind = columns.get(column)
    if getattr(kind, "dtype", kind) not in ("string", "large_string"):
        raise no_text(columns, column, where)


def no_text(columns: dict[str, Any], column: str, where: str) -> core.UserError:
    """Return the message for a table without text in that column. It lists the columns with their types."""
    got = ", ".join(f"{k} ({getattr(v, 'dtype', v)})" for k, v in columns.items()) or "no object"
    return core.UserError(
        f"{where} has no text in column '{column}'", got=got, needed=f"'{column}' (str)", next="--data.column NAME"
    )
