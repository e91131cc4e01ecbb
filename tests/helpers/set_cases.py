"""What a case of the sets from outside is, and own data of a user, written as files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from torch import Tensor

ROOT = Path(__file__).parents[2]


class Case(NamedTuple):
    """A fork of a recipe as a user makes it: edits of the recipe's file, settings, own data, or several of them."""

    id: str
    recipe: str
    kind: str
    why: str
    """Why a person would write it."""
    cause: str
    """What is wrong; of a healthy variant, why it trains."""
    harm: str
    """Measured without gates, or `by argument: ...`; of a healthy variant, what was measured or why it trains."""
    edits: tuple[tuple[str, str], ...] = ()
    argv: tuple[str, ...] = ()
    data: Callable[[Path], tuple[str, ...]] | None = None
    """Writes files into a folder and returns the settings that name them."""
    source: str = ""
    """URL of the public project's report or change that the case was ported from."""

    @property
    def path(self) -> Path:
        return ROOT / "recipes" / f"{self.recipe}.py"


def edited(case: Case, text: str | None = None) -> str:
    """The text of the changed recipe, or of its fork `text`. Raises where an old text does not occur exactly once."""
    text = case.path.read_text() if text is None else text
    for old, new in case.edits:
        if (n := text.count(old)) != 1:
            raise ValueError(f"{case.id}: an old text occurs {n} times in {case.recipe}, needed: once")
        text = text.replace(old, new)
    return text


# ------------------------------------------------------------------------------------------------------------ own data
def digits() -> tuple[Tensor, Tensor]:
    """(images (5000, 28, 28) uint8, labels (5000,))."""
    from trainworthy.recipes.shared import digits

    images, labels = digits.load()
    return images[:, 0], labels


def picture(image: Tensor, file: Path) -> None:
    """Write an image (H, W) or (3, H, W) of 0-255; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((image if image.ndim == 2 else image.permute(1, 2, 0)).contiguous().numpy()).save(file)


def coco(root: Path, split: str, numbers: list[int], found, *, ids: list[int], corners: bool = False) -> None:
    """Write `root`/`split`/*.png and `split`.json: boxes as [x, y, width, height], or by their `corners`."""
    images, annotations = [], []
    for n, row in enumerate(numbers):
        picture(found.pictures[row], root / split / f"{n:04}.png")
        height, width = found.sizes[row]
        images.append({"id": n, "file_name": f"{n:04}.png", "height": height, "width": width})
        for box, label in zip(found.boxes[row].tolist(), found.labels[row].tolist(), strict=True):
            x0, y0, x1, y1 = box
            annotations.append({"id": len(annotations) + 1, "image_id": n, "category_id": ids[label], "iscrowd": 0,
                                "area": (x1 - x0) * (y1 - y0), "bbox": box if corners else [x0, y0, x1 - x0, y1 - y0]})  # fmt: skip
    names = [{"id": ids[i], "name": name} for i, name in enumerate(found.classes)]
    (root / f"{split}.json").write_text(json.dumps({"images": images, "annotations": annotations, "categories": names}))


def class_folders(root: Path, per_class: int, fewer: dict[int, int] | None = None) -> None:
    """`root`/<class>/<number>.png: `per_class` digits of each class, or as many as `fewer` says."""
    images, labels = digits()
    for label in range(10):
        mine = (labels == label).nonzero().flatten().tolist()
        for i in mine[: (fewer or {}).get(label, per_class)]:
            picture(images[i], root / str(label) / f"{i}.png")


def scenes(n: int) -> tuple[list[Tensor], list[Tensor]]:
    """(pictures (3, H, W), masks (H, W)) of `n` training scenes: digits on photos."""
    from trainworthy.recipes.vision.data import masks

    found = masks.load(masks.Source(path="digits", scenes=n))
    pairs = [found.pairs[i] for i in found.learn]
    return [p for p, _ in pairs], [m for _, m in pairs]


def mask_folders(root: Path, pictures: list[Tensor], masks: list[Tensor]) -> None:
    """`root`/train and `root`/val with images/ and masks/, every fifth pair in val; and classes.txt."""
    for i, (image, mask) in enumerate(zip(pictures, masks, strict=True)):
        split = root / ("val" if i % 5 == 4 else "train")
        picture(image, split / "images" / f"{i:04}.png")
        picture(mask, split / "masks" / f"{i:04}.png")
    (root / "classes.txt").write_text("\n".join(("background", *"0123456789")))


def rows_of_docstrings(n: int) -> list[dict[str, str]]:
    """`n` rows of `prompt` (a docstring's first sentence), `completion` (the function's name) and `source` (its module)."""
    from trainworthy.recipes.llm.data import docstrings

    train, _ = docstrings.load()
    return train[:: max(1, len(train) // n)][:n]


def preferences(n: int) -> list[dict[str, str]]:
    """`n` rows of `prompt`, `chosen`, `rejected` and `source`."""
    from trainworthy.recipes.llm.data import preferences

    train, _ = preferences.constructed()
    return train[:: max(1, len(train) // n)][:n]


def distinct(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Preferences whose prompt and chosen answer occur in no earlier one."""
    seen: set[str] = set()
    kept = []
    for row in rows:
        texts = {" ".join(row[k].lower().split()) for k in ("prompt", "chosen")}
        if not texts & seen:
            kept.append(row)
        seen |= texts
    return kept


def lines(file: Path, rows: list[dict[str, str]]) -> None:
    """Write a JSONL file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
