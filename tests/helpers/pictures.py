"""Small sets of real pictures on disk: the embedded digits as files of many kinds, and in the hub's layout."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from trainworthy.recipes.shared import digits, nuclei


def chosen(per_class: int, classes: int = 10) -> list[tuple[Image.Image, int]]:
    """The first `per_class` digits of each class, grey, 28x28."""
    images, labels = digits.load()
    rows = [i for c in range(classes) for i in (labels == c).nonzero().flatten()[:per_class].tolist()]
    return [(Image.fromarray(images[i, 0].numpy()), int(labels[i])) for i in rows]


def varied(image: Image.Image, i: int) -> Image.Image:
    """The same picture in one of six sizes and modes."""
    side = 28 + 2 * (i % 5)
    image = image.resize((side, side + i % 3))
    kinds = [
        lambda: image,
        lambda: image.convert("RGB"),
        lambda: Image.merge("RGBA", (image, image, image, Image.new("L", image.size, 255))),
        lambda: image.convert("P"),
        lambda: Image.fromarray(np.asarray(image).astype(np.uint16) * 257),
        lambda: image.convert("LA"),
    ]
    return kinds[i % 6]()


def write_folder(root: Path, *, per_class: int = 40, held_out: int = 10, splits: Sequence[str] = ("train", "val"),
                 classes: int = 10) -> Path:  # fmt: skip
    """train/<digit>/*.png and val/<digit>/*.jpg, or one folder of classes where `splits` is ("",)."""
    seen: dict[int, int] = {}
    for i, (image, label) in enumerate(chosen(per_class, classes)):
        seen[label] = seen.get(label, 0) + 1
        split = splits[-1] if seen[label] <= held_out else splits[0]
        folder = root / split / f"digit {label}"
        folder.mkdir(parents=True, exist_ok=True)
        if i % 7 == 6:
            image.save(folder / f"{i}.jpg", quality=95)
        else:
            varied(image, i).save(folder / f"{i}.png")
    return root


def encoded(image: Image.Image) -> bytes:
    """PNG bytes."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def write_hub(
    root: Path, *, per_class: int = 40, held_out: int = 10, wrong: int | None = None, group: int = 40
) -> Path:
    """data/train-*.parquet and data/validation-*.parquet with the features `image` and `label`; `wrong` is put into one label."""
    import datasets
    import pyarrow.parquet as pq

    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=list(digits.CLASSES)))
    rows: dict[str, list[dict]] = {"train": [], "validation": []}
    seen: dict[int, int] = {}
    for i, (image, label) in enumerate(chosen(per_class)):
        seen[label] = seen.get(label, 0) + 1
        split = "validation" if seen[label] <= held_out else "train"
        rows[split].append({"image": {"bytes": encoded(varied(image, i)), "path": f"{i}.png"}, "label": label})
    (root / "data").mkdir(parents=True)
    order = torch.randperm(len(rows["train"]), generator=torch.Generator().manual_seed(0)).tolist()
    rows["train"] = [rows["train"][i] for i in order]
    if wrong is not None:
        rows["train"][3]["label"] = wrong
    for split, found in rows.items():
        shards = [found[0::2], found[1::2]] if split == "train" else [found]
        for i, shard in enumerate(shards):
            import pyarrow as pa

            table = pa.table({"image": [r["image"] for r in shard], "label": [r["label"] for r in shard]},
                             schema=features.arrow_schema)  # fmt: skip
            pq.write_table(table, root / "data" / f"{split}-{i:05d}-of-{len(shards):05d}.parquet", row_group_size=group)
    return root


def write_masks(
    root: Path, *, n: int = 8, split: bool = True, classes: Sequence[str] = nuclei.CLASSES, side: int = 64
) -> Path:
    """images/ and masks/ (in train/ and val/, if `split`) with `n` pieces of the nuclei's picture, of many kinds, from `side`
    pixels on; `classes` in classes.txt."""
    picture, mask = (t.numpy() for t in nuclei.load())
    for i in range(n):
        part = root / ("train" if i < n - n // 4 else "val") if split else root
        for name in ("images", "masks"):
            (part / name).mkdir(parents=True, exist_ok=True)
        top, left = 64 * (i // 7), 64 * (i % 7)
        piece = slice(top, top + side + 4 * (i % 3)), slice(left, left + side + 8 * (i % 2))
        grey, ids = Image.fromarray(picture[piece]), Image.fromarray(mask[piece])
        kinds = [grey, grey.convert("RGB"), Image.fromarray(picture[piece].astype(np.uint16) * 257)]
        kinds[i % 3].save(part / "images" / f"{i:02}.png")
        if i % 2:
            ids = ids.convert("P")
            ids.putpalette([0, 0, 0, 255, 0, 0])
        ids.save(part / "masks" / f"{i:02}.png")
    if classes:
        (root / "classes.txt").write_text("\n".join(classes) + "\n")
    return root


def write_coco(root: Path, *, n: int = 10, layout: str = "annotations") -> Path:
    """`n` scenes of pasted digits with COCO's JSON: `annotations` (instances_train.json and _val.json), `beside` (each split's JSON
    among its pictures) or `single` (one JSON for all); category ids with gaps, a crowd, a last picture without any object."""
    from trainworthy.recipes.vision.data import pasted

    parts = {"": range(n)} if layout == "single" else {"train": range(n - n // 4), "val": range(n - n // 4, n)}
    for split, rows in parts.items():
        folder = root / (split or "images")
        folder.mkdir(parents=True, exist_ok=True)
        listed: dict[str, list] = {"images": [], "annotations": []}
        listed["categories"] = [{"id": 10 + 3 * c, "name": f"digit {c}"} for c in range(10)]
        for i in rows:
            scene = pasted.scene("train", i)
            if i == n - 1:
                scene = scene._replace(items=())
            Image.fromarray(pasted.render("train", scene).permute(1, 2, 0).numpy()).save(folder / f"{i:02}.png")
            listed["images"].append({"id": 100 + i, "file_name": f"{i:02}.png", "width": 96, "height": 96})
            for one in scene.items:
                x0, y0, x1, y1 = one.box
                listed["annotations"].append({"id": len(listed["annotations"]), "image_id": 100 + i, "iscrowd": 0,
                                              "category_id": 10 + 3 * one.digit, "bbox": [x0, y0, x1 - x0, y1 - y0]})  # fmt: skip
        crowd = {"id": 9999, "image_id": 100 + rows[0], "iscrowd": 1, "category_id": 10, "bbox": [0, 0, 50, 50]}
        listed["annotations"].append(crowd)
        file = {"annotations": root / "annotations" / f"instances_{split}.json", "beside": folder / "_annotations.coco.json",
                "single": root / "annotations.json"}[layout]  # fmt: skip
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(listed))
    return root


def write_coloured(root: Path, *, per_class: int = 60, held_out: int = 20, noise: float = 60.0) -> Path:
    """train/ and val/ of three classes that differ in their colour alone, on noise: 40x40 pixels, PNG."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(("cold", "mild", "warm")):
        for i in range(per_class):
            picture = rng.normal(110, noise, (40, 40, 3)) + rng.normal(0, 15, 3)
            picture[..., label] += 45
            folder = root / ("val" if i < held_out else "train") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    return root
