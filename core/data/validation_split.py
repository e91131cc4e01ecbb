"""Parses `--data.val`: a fraction to hold out, or a file or folder of held-out samples."""

from pathlib import Path

from trainworthy.core.base.errors import UserError


def parse_val(value: str) -> float | Path | None:
    """Return a fraction between 0 and 1, an existing path, or None if nothing was given (then the data's own split is
    used, else the recipe's)."""
    if not value:
        return None
    try:
        share = float(value)
    except ValueError:
        path = Path(value)
        if not path.exists():
            raise UserError(f"there is no file or folder {value} of held-out samples", got="--data.val " + value,
                            needed="a path that exists, or a share such as 0.2") from None  # fmt: skip
        return path.resolve()
    if not 0 < share < 1:
        raise UserError("--data.val is not a share", got=value, needed="more than 0 and less than 1, or a path")
    return share


def absolute(value: str) -> str:
    """The same for args.json, with a resolved path, so that a run can be resumed from any folder."""
    return str(Path(value).resolve()) if value and Path(value).exists() else value
