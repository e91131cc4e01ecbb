"""`--data.val`: a fraction to hold out, or a file or folder of held-out samples. Draws the samples that are held out by their content."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from trainworthy.core.base.errors import UserError


def parse_share(value: str) -> float | None:
    """Return the fraction that is held out; None if `value` is empty or names data."""
    try:
        share = float(value)
    except ValueError:
        return None
    if not 0 < share < 1:
        raise UserError("--data.val is not a share", got=value, needed="more than 0 and less than 1, or a path",
                        next="--data.val 0.1, or --data.val FILE or FOLDER with held-out samples")  # fmt: skip
    return share


def parse_val(value: str) -> float | Path | None:
    """Return a fraction between 0 and 1, an existing path, or None if nothing was given (then the data's own split is
    used, else the recipe's)."""
    share = parse_share(value)
    if share or not value:
        return share
    if not Path(value).exists():
        raise UserError(f"there is no file or folder {value} of held-out samples", got="--data.val " + value,
                        needed="a path that exists, or a share such as 0.2")  # fmt: skip
    return Path(value).resolve()


def refuse_training_data(val: str | Path, train: str | Path) -> None:
    """Raise if `--data.val` names the very file or folder that the training samples are read from."""
    if Path(val).resolve() == Path(train).resolve() and Path(val).exists():
        raise UserError("--data.val names the training data", got=str(val), needed="samples that are not trained on",
                        cause="a score on them would say what was memorised",
                        next="--data.val FILE or FOLDER with others, or a share to hold out: --data.val 0.1")  # fmt: skip


def absolute(value: str, *packaged: str) -> str:
    """Return an existing path resolved, so that a run can be resumed from any folder. A share, and names of packaged data, stay."""
    return str(Path(value).resolve()) if value and value not in packaged and Path(value).exists() else value


def is_held_out(text: str, share: float) -> bool:
    """Return whether a text is among the `share` that is held out. The text alone decides: equal texts are in one split at every seed."""
    hashed, every = crc32(text.encode()), round(1 / share)
    return hashed % every == 0 if abs(every * share - 1) < 1e-9 else hashed % 1000 < 1000 * share


def hold_out(groups: Sequence[str], share: float) -> list[bool] | None:
    """Return whether each row is held out. Rows of one group stay together.

    `is_held_out` decides for each group. Where chance makes that less than half of the share or more than twice of it (few rows, one large
    group), groups are added in the order of their hashes up to the share. None if no whole groups make up about a share of the rows: a
    column that names one of five data sets does not say which rows belong together.
    """
    sizes, wanted = Counter(groups), share * len(groups)
    chosen = {g for g in sizes if is_held_out(g, share)}
    held = sum(sizes[g] for g in chosen)
    if not wanted / 2 <= held <= 2 * wanted:
        chosen, held = set(), 0
        for g in sorted(sizes, key=lambda g: (crc32(g.encode()), g)):
            if held + sizes[g] <= min(max(1, 1.5 * wanted), len(groups) - 1) and held < wanted:
                chosen.add(g)
                held += sizes[g]
        if held < wanted / 3:
            return None
    return [g in chosen for g in groups]
