"""COCO's JSON: reading its lists of pictures and boxes, and refusing what is in another format or scale."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from trainworthy.core import UserError
from trainworthy.recipes.shared import mds
from trainworthy.recipes.vision.data.encoded import describe_error
from trainworthy.recipes.vision.data.pictures import VALIDATION

LAYOUT = ("FOLDER/annotations/instances_train*.json with pictures in FOLDER/train*/ (the same for val), or FOLDER/train/*.json "
          "among its pictures, or one FOLDER/*.json")  # fmt: skip
SLACK = 1.0  # pixels that a box may exceed the image by, because of rounding


class Listed(NamedTuple):
    """The contents of a JSON file."""

    file: Path
    pictures: list[Path]
    sizes: list[tuple[int, int]]
    """(H, W) of each image, from the file."""
    of: Tensor
    """Image of each box, (N,)."""
    boxes: Tensor
    """Boxes as in the file, (N, 4) float64."""
    categories: Tensor
    """Category ids as in the file, (N,)."""
    names: dict[int, str]
    crowds: int


def read_lists(root: Path) -> list[Listed]:
    """Return the JSON files of train and val, or the only one."""

    def of(*splits: str) -> Path | None:
        patterns = [p.format(s) for s in splits for p in
                    ("annotations/instances_{}*.json", "annotations/{}*.json", "{}*.json", "{}*/*.json")]  # fmt: skip
        return next((f for p in patterns for f in sorted(root.glob(p))), None)

    train, val = of("train"), of(*VALIDATION)
    if train and val:
        test = of("test")
        lists = [read_list(root, train, "train"), read_list(root, val, next(v for v in VALIDATION if of(v) == val))]
        lists += [read_list(root, test, "test")] if test and test != val else []
        return [one for i, one in enumerate(lists) if i < 2 or len(one.boxes)]  # COCO's own test list has no boxes
    only = [f for p in ("annotations/*.json", "*.json", "images/*.json", "train*/*.json") for f in sorted(root.glob(p))]
    labels = next(iter(sorted(root.glob("labels/**/*.txt")) or sorted(root.glob("*/labels/*.txt"))), None)
    if not only and labels:
        raise UserError(f"the boxes in {root} are in YOLO's layout", got=f"{labels.relative_to(root)} and others: class, centre and size, as "
                        "shares of the picture's", needed=LAYOUT, cause="exported for YOLO",
                        next="export them as COCO's JSON: x = (cx - w / 2) * width, y = (cy - h / 2) * height, w * width, h * height")  # fmt: skip
    if not only:
        raise UserError(f"no annotations in {root}", got=", ".join(sorted(p.name for p in root.iterdir())[:5]) or "nothing",
                        needed=LAYOUT, cause="the path stops one folder too early or too late")  # fmt: skip
    return [read_list(root, only[0], "train")]


def read_list(root: Path, file: Path, split: str) -> Listed:
    """Read one JSON file and resolve its references."""
    at: list[str] = []
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
        pictures = {p["id"]: (p["file_name"], (int(p["height"]), int(p["width"]))) for p in _each(found, "images", at)}
        names = {int(c["id"]): str(c["name"]) for c in _each(found, "categories", at)}
        entries = [(a["image_id"], int(a["category_id"]), [float(v) for v in a["bbox"]], a.get("iscrowd", 0))
                   for a in _each(found, "annotations", at)]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        mds.refuse(file, needed="COCO's JSON with pictures as files", pictures=True)
        problem = f"no {error}" if isinstance(error, KeyError) else describe_error(error)
        problem = f"{at[-1]}: {problem}" if at else problem
        raise UserError(f"cannot read {file}", got=problem, needed="COCO: images (id, file_name, width, height), annotations "
                        "(image_id, category_id, bbox), categories (id, name)") from None  # fmt: skip
    whole = [e for e in entries if not e[3]]
    orphans = {e[0] for e in whole} - pictures.keys()
    strange = Counter(e[1] for e in whole if e[1] not in names)
    if len(pictures) < len(found["images"]) or orphans:
        got = (
            f"{len(orphans):,} ids of pictures that are not listed, e.g. {min(orphans, key=str)}"
            if orphans
            else "an id twice"
        )
        raise UserError(
            f"the pictures of {file} do not belong to its boxes", got=got, needed="one entry in images for each id"
        )
    if strange:
        raise UserError(f"{strange.total():,} of {len(whole):,} boxes of {file} have a category that the file does not list",
                        got=", ".join(f"{k} ({n:,} times)" for k, n in strange.most_common(5)),
                        needed=", ".join(f"{i} {names[i]}" for i in sorted(names)[:5]) + (", ..." if len(names) > 5 else ""),
                        cause="ids that count from 0 in one place and from 1 in another, or a class removed from the list only",
                        next="list it under categories, or remove its boxes")  # fmt: skip
    if any(len(e[2]) != 4 for e in whole):
        raise UserError(
            f"boxes of {file} are not boxes", got=next(e[2] for e in whole if len(e[2]) != 4), needed="[x, y, w, h]"
        )
    places = [file.parent, *sorted(p for p in root.glob(f"{split}*") if p.is_dir()), *sorted(root.glob(f"images/{split}*")),
              root / "images", root, *_only_folder(root)]  # fmt: skip
    below = [p for p in places if _inside(root, p)]

    def allowed(name: str) -> list[Path]:
        """Return where the picture may be: a name that does not climb stays below its place."""
        if not os.path.isabs(name) and ".." not in name:
            return [p / name for p in below]
        return [p / name for p in places if _inside(root, p / name)]

    beyond = [name for name, _ in pictures.values() if not allowed(name)]
    if beyond:
        raise UserError(f"{len(beyond):,} of {len(pictures):,} pictures of {file} lie outside of the data folder", got=beyond[0],
                        needed=f"a file_name below {root}", cause="written on another machine, or by somebody else's tool",
                        next="write file_name relative to the folder of the pictures")  # fmt: skip

    files = [next((p for p in allowed(name) if p.is_file()), None) for name, _ in pictures.values()]
    if files and not any(files):
        tried = dict.fromkeys(str(p.relative_to(root)) for p in below if p.is_dir())
        raise UserError(f"none of the {len(files):,} pictures that {file} lists is there", got=f"{next(iter(pictures.values()))[0]} is in none of "
                        f"{', '.join(tried)} (below {root})", needed=LAYOUT, cause="the pictures are in another folder, or have other names",
                        next=f"move them to {root / 'images'}, or write their folder into each file_name")  # fmt: skip
    usual = Counter(p.parent for p in files if p).most_common(1)  # where a missing picture is looked for first
    files = [p or (usual[0][0] / Path(name).name if usual else allowed(name)[-1])
             for p, (name, _) in zip(files, pictures.values(), strict=True)]  # fmt: skip
    place = {key: i for i, key in enumerate(pictures)}
    return Listed(file, files, [s for _, s in pictures.values()],
                  torch.tensor([place[e[0]] for e in whole], dtype=torch.long),
                  torch.tensor([e[2] for e in whole], dtype=torch.float64).view(-1, 4),
                  torch.tensor([e[1] for e in whole], dtype=torch.long), names, len(entries) - len(whole))  # fmt: skip


def _only_folder(root: Path) -> list[Path]:
    """Return the only folder of pictures, whatever its name, if none is called after a split (whose pictures may have equal names)."""
    folders = [p for p in root.iterdir() if p.is_dir() and p.name != "annotations" and not p.name.startswith(".")]
    return folders if len(folders) == 1 and not folders[0].name.startswith(("train", *VALIDATION)) else []


def _each(found: dict, key: str, at: list[str]) -> Iterator[dict]:
    """Yield the entries of a list. While one is read, its place is the last in `at`, for the message."""
    for i, entry in enumerate(found[key]):
        at.append(f"{key}[{i}]" + (f" (id {entry['id']})" if isinstance(entry, dict) and "id" in entry else ""))
        yield entry
        at.clear()


def of_each(values: Tensor, of: Tensor, n: int) -> list[Tensor]:
    """Return the rows of `values` that belong to each of `n` pictures, in their order; `of` is the picture of each row."""
    order = of.argsort(stable=True)
    return list(values[order].split(of.bincount(minlength=n).tolist()))


def _inside(root: Path, path: Path) -> bool:
    """Return whether `path` is below `root` by its name. Where links inside point to is the user's own choice."""
    return Path(os.path.normpath(path)).is_relative_to(os.path.normpath(root))


def checked(one: Listed, notes: dict[str, str], *, max_bad: float) -> tuple[Tensor, Tensor]:
    """Return (boxes that are kept, xyxy float32; which ones). Boxes in another format or scale raise UserError; they are not repaired."""
    x, y, w, h = one.boxes.unbind(1)
    high, wide = torch.tensor(one.sizes, dtype=torch.float64).view(-1, 2)[one.of].unbind(1)
    n, name = max(1, len(x)), lambda bad: _named(one, bad)
    if len(x) and not one.boxes.isfinite().all():
        odd = name(~one.boxes.isfinite().all(1))
        raise UserError(f"boxes of {one.file} are not finite", got=odd, needed="[x, y, w, h]")
    if len(x) and one.boxes.max() <= 1 and min(high.min(), wide.min()) > 2:
        raise UserError(f"boxes of {one.file} are in normalised coordinates", got=f"no value above {one.boxes.max():g}, "
                        f"e.g. {name(w > -1)}", needed="[x, y, w, h] in pixels",
                        cause="written by a tool that divides by the picture's size (YOLO's format: centres, too)",
                        next="multiply x and w by the picture's width, y and h by its height")  # fmt: skip
    empty = (w <= 0) | (h <= 0)
    outside = ~empty & ((x < -SLACK) | (y < -SLACK) | (x + w > wide + SLACK) | (y + h > high + SLACK))
    corners = (w > x) & (h > y) & (w <= wide + SLACK) & (h <= high + SLACK)
    if (empty | outside).sum() / n > max_bad and corners.double().mean() > 0.99:
        raise UserError(f"boxes of {one.file} are xyxy", needed="[x, y, w, h], as COCO has it",
                        got=f"read as x, y, w, h, {int(outside.sum()):,} of {n:,} reach outside their pictures, e.g. "
                        f"{name(outside | empty)}; read as two corners, none",
                        cause="two corners were written, where COCO has a corner and a size",
                        next="subtract: w = x2 - x1, h = y2 - y1")  # fmt: skip
    for bad, what, cause in ((empty, "no area", "corners in the wrong order, clipped away, or a point for a box"),
                             (outside, "parts outside their pictures", "the pictures were resized or cropped and the boxes not, "
                              "or x and y are exchanged")):  # fmt: skip
        if bad.sum() / n > max_bad:
            share = math.ceil(100 * max(int(empty.sum()), int(outside.sum())) / n) / 100
            # Most boxes: the rest is no data set
            accepted = f", or accept them: --data.max-bad {share:.2f}" * (share < 0.5)
            raise UserError(f"{int(bad.sum()):,} of {n:,} boxes of {one.file} have {what}", got=name(bad),
                            needed=f"at most {max_bad:.1%}", cause=cause, next=f"correct them{accepted}")  # fmt: skip
        if bad.any():
            notes[f"boxes with {what} in {one.file.name}"] = f"{int(bad.sum()):,} of {n:,}: {name(bad)}"
    xyxy = torch.stack([x, y, x + w, y + h], 1).clamp_min(0)
    xyxy = torch.minimum(xyxy, torch.stack([wide, high, wide, high], 1))
    kept = ~empty & (xyxy[:, 2:] > xyxy[:, :2]).all(1)
    return xyxy[kept].float(), kept


def _named(one: Listed, bad: Tensor) -> str:
    """Return the first faulty box, with its image."""
    i = int(bad.nonzero()[0])
    (h, w), box = one.sizes[one.of[i]], ", ".join(f"{v:g}" for v in one.boxes[i].tolist())
    return f"[{box}] on {one.pictures[one.of[i]].name} ({w}x{h})"
