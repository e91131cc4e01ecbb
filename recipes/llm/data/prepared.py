"""Rows, lengths and other results of rendering and tokenising, kept on this disk for later processes.

The key of a result is its content: the rows as they were read, the tokenizer with its template, the settings, this folder's code and
the libraries' versions. So nothing has to be deleted when data change, and a copy of a file elsewhere is found, too.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainworthy.core.data.assets import built

LEAST = 5000
"""Rows; fewer are prepared in seconds."""
CODE = sorted(Path(__file__).parent.glob("*.py"))
LIBRARIES = ("transformers", "tokenizers", "jinja2")


def kept(name: str, count: int, key: Callable[[], dict[str, Any]], make: Callable[[], Any]) -> Any:
    """Return what `make` returns (JSON values), made by the first process of all that asks for it; others wait and read it."""
    if count < LEAST:
        return make()

    def build(folder: Path) -> None:
        (folder / "found.json").write_text(json.dumps(make()))

    folder = built(name, key() | {"libraries": [version(one) for one in LIBRARIES]}, build, sources=CODE)
    return json.loads((folder / "found.json").read_text())


def of_texts(name: str, texts: Sequence[Any], known: Callable[[], Any], make: Callable[[], Any]) -> Any:
    """Return what `make` makes of the texts with what `known` names."""
    return kept(name, len(texts), lambda: {"texts": mark(texts), "known": known()}, make)


def mark(rows: Iterable[Any]) -> str:
    """Return a hash of rows in their order; of a row that could not be read, of what is wrong with it."""
    found = hashlib.blake2b(digest_size=16)
    for row in rows:
        found.update(json.dumps(row, default=repr).encode() + repr(getattr(row, "fault", "")).encode() + b"\0")
    return found.hexdigest()


@cache
def words(tokenizer: Any) -> str:
    """Return a hash of what a tokenizer does, with its chat template."""
    own = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    parts = (type(tokenizer).__name__, own, str(tokenizer.chat_template), str(tokenizer.special_tokens_map))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
