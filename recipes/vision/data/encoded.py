"""Pictures as they are stored, in files or rows of tables, and how one is read: (3, H, W) of 0-255."""

import io
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from trainworthy.core import UserError
from trainworthy.core.base import seeds

NOT_A_PICTURE = "not a picture"
WINDOW = 8  # row groups that are shuffled together when streaming


def decode(image: Image.Image) -> Tensor:
    """Return an image as (3, H, W) in 0-255: uint8, or float32 for 16 bits. Raises ValueError if its white level is unknown."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        values = torch.from_numpy(np.asarray(image).astype(np.float32)) / 257
        if not 0 <= values.min() <= values.max() <= 255:
            raise ValueError(f"values from {257 * values.min():.0f} to {257 * values.max():.0f}, beyond 16 bits")
        return values.expand(3, *values.shape)
    if image.mode == "F":
        raise ValueError("a floating-point picture does not state its range")
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


class Pictures:
    """Images that are decoded when read: `[i]` is one, `[rows]` with a tensor of indices is a subset."""

    def __init__(self, encoded: "Encoded", rows: Tensor, digests: Sequence[str] | None = None):
        self.encoded, self.rows, self.digests = encoded, rows, digests

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: "int | Tensor") -> "Tensor | Pictures":
        if isinstance(index, Tensor):
            return Pictures(self.encoded, self.rows[index], self.digests)
        row = int(self.rows[index])
        try:
            return decode(Image.open(io.BytesIO(self.encoded.read(row))))
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"cannot read the picture {self.encoded.name(row)}", got=describe_error(error), needed="a picture",
                            cause="changed or removed since the data set was checked, or streamed, which is not checked before",
                            next="start again, without --data.streaming: what cannot be read is left out") from None  # fmt: skip

    def digest(self, index: int) -> str | None:
        """Return the hash of one image's file, if it was computed when the set was checked."""
        return self.digests and self.digests[int(self.rows[index])]

    def class_of(self, index: int) -> str | None:
        """Return the name of the image's class folder, or None if images are not files."""
        return self.encoded.class_of(int(self.rows[index]))

    def name(self, index: int) -> str:
        return self.encoded.name(int(self.rows[index]))

    def near(self, index: int) -> range:
        """Return the indices of the images in the row group of `index`."""
        group = self.encoded.group(int(self.rows[index]))
        ends = torch.tensor(self.encoded.starts[group : group + 2])  # the last group has no next one
        first, *last = torch.searchsorted(self.rows, ends).tolist()
        return range(first, last[0] if last else len(self))

    def order(self, *parts: int | str) -> Tensor:
        """Return a permutation that reads each row group once: groups in random order, rows shuffled within `WINDOW` groups at a time."""
        group = torch.bucketize(self.rows, torch.tensor(self.encoded.starts), right=True) - 1
        present = group.unique()
        drawn = present[seeds.permutation(len(present), *parts, "groups")]
        windows = [torch.isin(group, some).nonzero().flatten() for some in drawn.split(WINDOW)]
        return torch.cat([w[seeds.permutation(len(w), *parts, i)] for i, w in enumerate(windows)])


class Encoded:
    """Encoded images by row."""

    key: str
    """Key of this source in the cache."""

    def read(self, row: int) -> bytes:
        raise NotImplementedError

    def name(self, row: int) -> str:
        """Return the name of an image for messages."""
        raise NotImplementedError

    def stamp(self, row: int) -> str:
        """Return a string that changes with the image, if `key` does not."""
        return ""

    def class_of(self, row: int) -> str | None:
        return None


class Files(Encoded):
    """Image files below `root`."""

    def __init__(self, root: Path, paths: list[Path]):
        self.root, self.paths, self.key = root, paths, str(root)

    def read(self, row: int) -> bytes:
        return self.paths[row].read_bytes()

    def name(self, row: int) -> str:
        return display_path(self.paths[row], self.root)

    def class_of(self, row: int) -> str:
        path = self.paths[row]
        if not path.is_relative_to(self.root):  # --data.val is another folder
            return path.parent.name
        return path.relative_to(self.root).parts[int((self.root / "train").is_dir())]

    def stamp(self, row: int) -> str:
        found = self.paths[row].stat()
        return f"{found.st_size} {found.st_mtime_ns}"


class Decoded(Encoded):
    """Files below `root`, decoded when read; the last two stay in memory."""

    kind = ""
    """Distinguishes its cached survey from others of the same folder."""
    beside = ""
    """Appended to the image's name in messages."""
    needed = "a picture"

    def __init__(self, root: Path, files: list):
        self.root, self.files, self.key = root, files, f"{self.kind} {root}"
        self.read = lru_cache(2)(self._read)

    def __len__(self) -> int:
        return len(self.files)

    def __getstate__(self) -> dict:
        return {k: v for k, v in vars(self).items() if k != "read"}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["root"], state["files"])

    def _read(self, row: int):
        raise NotImplementedError

    def __getitem__(self, row: int):
        try:
            return self.read(row)
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"cannot read the picture {self.name(row)}{self.beside}", got=describe_error(error), needed=self.needed,
                            cause="changed or removed since the data set was checked",
                            next="start again: what cannot be read is left out") from None  # fmt: skip


class Rows(Encoded):
    """A column of a `datasets.Dataset` on disk (Arrow, random access)."""

    def __init__(self, data, column: str, key: str):
        self.data, self.column, self.key = data, column, key

    def read(self, row: int) -> bytes:
        value = self.data[row][self.column]
        return value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()

    def name(self, row: int) -> str:
        return f"row {row:,}"


class Grouped(Encoded):
    """Encoded images in groups that are read together."""

    starts: list[int]
    """First row of each group."""

    def group(self, row: int) -> int:
        return bisect_right(self.starts, row) - 1


class RowGroups(Grouped):
    """A column of parquet files on any file system that fsspec reads. It reads one row group at a time and copies nothing to this disk."""

    def __init__(self, urls: list[str], column: str):
        import pyarrow.parquet as pq

        self.column, self.groups, self.starts, n = column, [], [], 0
        for url in urls:
            with opened(url) as file:
                metadata = pq.read_metadata(file)
            for i in range(metadata.num_row_groups):
                self.groups.append((url, metadata, i))
                self.starts.append(n)
                n += metadata.row_group(i).num_rows
        self._table = lru_cache(WINDOW)(self._read_group)

    def _read_group(self, group: int):
        import pyarrow.parquet as pq

        url, metadata, i = self.groups[group]
        with opened(url) as file:  # opened each time: a handle must not be shared with a forked worker
            return pq.ParquetFile(file, metadata=metadata).read_row_group(i, columns=[self.column], use_threads=False)

    def read(self, row: int) -> bytes:
        group = self.group(row)
        return self._table(group)[self.column][row - self.starts[group]]["bytes"].as_py()

    def name(self, row: int) -> str:
        group = self.group(row)
        return f"{self.groups[group][0]}, row group {self.groups[group][2]}, row {row - self.starts[group]}"


def display_path(path: Path, root: Path) -> str:
    """Return a file's path for messages: relative to the data folder if it is inside."""
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def opened(url: str):
    import fsspec

    return fsspec.open(url).open()


def describe_error(error: BaseException) -> str:
    if isinstance(error, UnidentifiedImageError):
        return NOT_A_PICTURE
    return (str(error) or type(error).__name__).splitlines()[0][:200]
