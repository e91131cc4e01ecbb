"""Names MDS shards (mosaicml-streaming), which no recipe reads, before a reader takes them for something else."""

import json
from pathlib import Path

from trainworthy.core.base.errors import UserError

TABLE = "python -c \"import pandas, streaming; pandas.DataFrame(list(streaming.LocalDataset('{}'))).to_parquet('train.parquet')\""


def refuse(path: str | Path, *, needed: str, pictures: bool = False) -> None:
    """Raise UserError if `path` is a folder of MDS shards, one of its files, or a folder with such splits. `needed`: what the recipe reads;
    `pictures`: whether samples are pictures, which are no columns of a table."""
    given = Path(path)
    root = given if given.is_dir() else given.parent
    indices = [
        root / name / "index.json" for name in (("", "train", "val", "validation", "test") if given.is_dir() else ("",))
    ]
    if given.is_file() and given != indices[0] and given.suffix != ".mds":
        return
    for index in indices:
        columns = _columns(index)
        if columns:
            table = f"write each picture as a file; its rows: streaming.LocalDataset('{index.parent}')"
            raise UserError(
                f"{index.parent} holds MDS shards (mosaicml-streaming), which are not read", got=f"columns {', '.join(columns)}",
                needed=needed, next=table if pictures else TABLE.format(index.parent))  # fmt: skip


def _columns(index: Path) -> list[str]:
    """Return the columns of the shards that an index.json lists; empty if it is none of MDS."""
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["shards"]
        return [str(name) for name in shards[0]["column_names"]] if shards[0]["format"] == "mds" else []
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return []
