"""Bugs of detection, planted in a fork of vision/detect; the words were fixed before the gates were run."""

from tests.helpers.plant import Plant

DETECT = "vision/detect"
DATA = """train_data = boxes.Boxed(data, data.learn, side=cfg.image_size, augment=augmentation(cfg) if cfg.augment else None)
    val_data = boxes.Boxed(data, data.held_out, side=cfg.image_size)
"""
MIRROR = "steps.append(v2.RandomHorizontalFlip())\n"
LOSS = 'return model(batch["image"], boxes.targets(batch))\n'
OWN = 'own = boxes.to_own(predicted["boxes"], batch["scale"][j], batch["size"][j])\n'
SAID = 'predicted["labels"][:, None], predicted["scores"]'
LIMITS = '{"score_thresh": cfg.score_thresh, "nms_thresh": cfg.nms_thresh,'
FIT = "detectors.fit(seen, cfg.anchors)"
STATISTICS = "pixels.mean(1).tolist(), pixels.std(1).tolist()"


FEW = ("--data.scenes", "200")  # enough for every gate named here, and read in a second


def bug(
    id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], argv: tuple[str, ...] = (), **more
) -> Plant:
    return Plant(id, gate, row, old, new, words, recipe=DETECT, argv=(*FEW, *argv), **more)


def boxes_as(value: str, key: str = "boxes") -> str:
    """Both data sets, their boxes `b` (M, 4) changed after reading."""
    body = f"""class Own(boxes.Boxed):
        def get(self, index, generator):
            sample = super().get(index, generator)
            b = sample["{key}"]
            return {{**sample, "{key}": {value}}}

    """
    return body + DATA.replace("boxes.Boxed(", "Own(")


PLANTS = [
    bug("det-normalised-boxes", "boxes", "V3", DATA, boxes_as("b / self.side"), ("normalised", "expects pixels"),
        harm="loss exactly 0.000, mAP 0"),
    bug("det-xywh-as-xyxy", "boxes", "V3", DATA, boxes_as("torch.cat([b[:, :2], b[:, 2:] - b[:, :2]], 1)"),
        ("are xywh, read as xyxy", "COCO"), harm="mAP 0.007"),
    bug("det-xyxy-as-xywh", "boxes", "V3", DATA, boxes_as("torch.cat([b[:, :2], b[:, :2] + b[:, 2:]], 1)"),
        ("are xyxy, converted as if they were xywh",), harm="mAP 0.156, but 0.993 when scored with the same bug"),
    bug("det-boxes-not-resized", "boxes", "V3", DATA, boxes_as('sample["truth"].clone()'),
        ("were not resized with their picture",), source="VIS-06 EfficientDet.Pytorch#98",
        harm="overfit sees 1.00 through the same pipeline, 0.001 in the pictures' own pixels"),
    bug("det-boxes-mixed-like-pictures", "boxes", "V3", DATA, """class Own(boxes.Boxed):
        def get(self, index, generator):
            own = super().get(index, generator)
            if generator is None:
                return own
            other = super().get(int(torch.randint(len(self), (), generator=generator)), generator)
            share = 0.5 + 0.5 * torch.rand((), generator=generator)
            mixed = {k: torch.cat([share * own[k], (1 - share) * other[k]]) for k in ("boxes", "truth")}
            mixed["labels"] = torch.cat([own["labels"], other["labels"]])
            return {**own, **mixed, "image": share * own["image"] + (1 - share) * other["image"]}

    """ + DATA.replace("train_data = boxes.Boxed(", "train_data = Own("), ("do not match their rectangle",),
        source="VIS-08 MultimediaTechLab/YOLO#105", harm="every mixed picture's boxes are somewhere else"),
    bug("det-mirrored-apart", "boxes", "V3", MIRROR,
        "steps.append(v2.Lambda(lambda x: x.flip(-1) if torch.rand(()) < 0.5 else x, boxes.tv_tensors.Image))\n",
        ("not mirrored with their picture", "one transform"), argv=("--hflip",), harm="half of the boxes are elsewhere"),
    bug("det-half-scale", "boxes", "V3", DATA, boxes_as("b / 2"), ("2.00 times as large",), source="VIS-06 NVIDIA/DIGITS#1770",
        harm="the picture enlarged, its boxes not"),
    bug("det-class-offset-scored", "precision", "V3", SAID, SAID.replace('[:, None], predicted["s', '[:, None] + 1, predicted["s'),
        ("off by one",), source="VIS-07 PaddlePaddle/PaddleDetection PR#1457", harm="mAP 0 for a good net"),
    bug("det-first-class-for-background", "precision", "V3", 'real = batch["labels"][j] >= 0', 'real = batch["labels"][j] > 0',
        ("are left out of the truth", "taken for the background"), harm="a mean over nine of ten classes"),
    bug("det-scored-on-canvas", "precision", "V3", OWN, 'own = predicted["boxes"]\n', ("boxes on the canvas as boxes on the picture",),
        harm="right only where nothing is resized"),
    bug("det-scored-as-xywh", "precision", "V3", OWN, OWN.rstrip() + "\n                own[:, 2:] -= own[:, :2]\n",
        ("truth as prediction", "format"), harm="mAP near 0 for a good net"),
    bug("det-truth-scored", "precision", "V3", OWN, 'own = batch["truth"][j][: len(predicted["boxes"])]\n',
        ("boxes moved off their objects have map",), harm="mAP 1 for any net"),
    bug("det-class-offset-learnt", "own-pixels", "V3", LOSS,
        'return model(batch["image"], [{**t, "labels": (t["labels"] + 1) % len(classes)} for t in boxes.targets(batch)])\n',
        ("off by one",), source="VIS-07 supervisely-ecosystem/RT-DETRv2 PR#52", harm="mAP 0 with a falling loss"),
    bug("det-boxes-of-pixel-centres", "formula", "V3", LOSS,
        'return model(batch["image"], [{**t, "boxes": t["boxes"] - 0.5} for t in boxes.targets(batch)])\n',
        ("half a pixel",), harm="every box half a pixel up and left: precision at high overlap is lost"),
    bug("det-canvas-learnt", "own-pixels", "V3", DATA, boxes_as("b * 0.8, \"truth\": sample[\"truth\"] * 0.8"),
        ("read independently of the recipe",), harm="1.00 through its own pipeline, useless outside of it"),
    bug("det-no-nms", "suppression", "V4", LIMITS, LIMITS.replace("cfg.nms_thresh", "1.0"), ("NMS does nothing",),
        harm="every object several times"),
    bug("det-score-too-high", "suppression", "V4", LIMITS, LIMITS.replace("cfg.score_thresh", "0.97"),
        ("have no box above the score",), harm="nothing is found, and mAP 0 looks like a net that does not learn"),
    bug("det-score-too-low", "suppression", "V4", LIMITS, LIMITS.replace("cfg.score_thresh", "0.0"),
        ("have the maximum of 100 boxes",), harm="a hundred boxes on every picture"),
    bug("det-anchors-turned", "anchor-matching", "V4", FIT, FIT + ".flip(1)", ("widths and heights of the anchors are exchanged",),
        argv=("--model", "retinanet"), harm="tall digits get wide anchors"),
    bug("det-anchors-of-others", "anchor-matching", "V4", FIT, FIT + " * 4", ("anchors were made for another data set",),
        argv=("--model", "retinanet"), harm="no anchor matches, nothing is learnt"),
    bug("det-statistics-of-255", "scale", "V1", STATISTICS, "[123.7, 116.3, 103.5], [58.4, 57.1, 57.4]", ("0-255",),
        harm="the net sees next to nothing"),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS if p.id not in ("det-boxes-not-resized", "det-scored-on-canvas")]
