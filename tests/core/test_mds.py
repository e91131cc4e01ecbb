"""Folders of MDS shards (mosaicml-streaming) are refused by their name, whatever a recipe's own reader would say of the files."""

import json
from pathlib import Path

import pytest
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.llm.data import files, plain_texts, streaming
from trainworthy.recipes.shared import mds
from trainworthy.recipes.vision.data import coco, mask_files, pictures
from trainworthy.recipes.vlm.data import folders


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """An index and one shard, as version 2 of the format has them."""
    columns = {
        "column_encodings": ["str"],
        "column_names": ["text"],
        "column_sizes": [None],
        "compression": None,
        "format": "mds",
    }
    shard = {
        **columns,
        "raw_data": {"basename": "shard.00000.mds", "bytes": 9, "hashes": {}},
        "samples": 1,
        "version": 2,
    }
    (tmp_path / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))
    (tmp_path / "shard.00000.mds").write_bytes(bytes(9))
    return tmp_path


@pytest.mark.parametrize("read", [
    lambda f: pictures._load(str(f), "", False, 0.01), lambda f: pictures._load(str(f), "", True, 0.01),
    lambda f: mask_files.matched(f, {}), lambda f: coco.read_list(f, f / "index.json", "train"),
    lambda f: plain_texts.splits(str(f), "text"), lambda f: plain_texts.splits(str(f / "index.json"), "text"),
    lambda f: plain_texts.splits(str(f / "shard.00000.mds"), "text"), lambda f: streaming.blocks(str(f), "text"),
    lambda f: files.tables(str(f), "--data.path"), lambda f: folders.parse(f / "train.jsonl"),
], ids=["pictures", "streamed-pictures", "masks", "boxes", "texts", "index", "shard", "streamed-texts", "pairs", "questions"])  # fmt: skip
def test_shards_are_named(read, shards: Path):
    with pytest.raises(UserError, match=r"MDS shards \(mosaicml-streaming\), which are not read") as error:
        read(shards)
    assert "streaming.LocalDataset" in str(error.value)


def test_splits_are_found_and_other_indices_are_not(shards: Path):
    (shards / "train").mkdir()
    (shards / "index.json").rename(shards / "train" / "index.json")
    with pytest.raises(UserError, match="train holds MDS"):
        mds.refuse(shards, needed="")
    for other in ("{}", "[]", "no json", json.dumps({"shards": [{"format": "csv"}]})):
        (shards / "train" / "index.json").write_text(other)
        mds.refuse(shards, needed="")
