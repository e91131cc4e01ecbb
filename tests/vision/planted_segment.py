"""Bugs of semantic segmentation, planted in a fork of vision/segment; the words were fixed before the gates were run."""

from tests.helpers.plant import Plant

SEGMENT = "vision/segment"
CE = 'ce = F.cross_entropy(logits, mask, ignore_index=IGNORE, reduction="none")'
TOTAL = 'total += segmentation.scored(batch, model(batch["image"]), n)\n'
COUNTED = 'total += segmentation.counted(batch["mask"], model(batch["image"]).argmax(1), n)\n'  # at the size of the net's input
DATA = """train_data = masks.Windows(data, data.learn, **cut, augment=augmentation(cfg) if cfg.augment else None)
    val_data = masks.Windows(data, data.held_out, **cut)
"""
HEAD = "def segment(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:\n"
FLIP = "v2.RandomHorizontalFlip()]"
TOTAL_BEFORE = "        total = torch.zeros(n, n, dtype=torch.long, device=run.device)\n"
NOT_RESET = (
    "        confusion_matrix.total = getattr(confusion_matrix, 'total', torch.zeros(n, n, dtype=torch.long, device=run.device))\n"
    "        total = confusion_matrix.total\n"
)
EVALUATE = "return segmentation.scores(confusion_matrix(model, data), classes)\n"
NORMALISE = "x = (images - self.mean) / self.std"


def bug(id: str, gate: str, row: str, old: str, new: str, words: tuple[str, ...], **more) -> Plant:
    return Plant(id, gate, row, old, new, words, recipe=SEGMENT, **more)


def read_by(body: str) -> str:
    """Both data sets of another class, whose methods are `body`."""
    lines = "".join(f"        {line}\n" if line else "\n" for line in body.strip("\n").splitlines())
    return f"class Own(masks.Windows):\n{lines}\n    " + DATA.replace("masks.Windows(", "Own(")


def masks_as(value: str) -> str:
    """Both data sets, their masks changed after reading."""
    return read_by(f"""
def get(self, index, generator):
    sample = super().get(index, generator)
    mask = sample["mask"]
    return {{**sample, "mask": {value}}}
""")


BILINEAR = read_by("""
def whole(self, row, pair=None):
    picture, mask = self.pairs[row] if pair is None else pair
    both = (tv_tensors.Image(picture.float() / 255), tv_tensors.Image(mask[None].float()))
    image, mask = (v2.functional.resize(x, list(self.sizes[row])) for x in both)
    return image, tv_tensors.Mask(mask[0].to(torch.uint8))
""")

PLANTS = [
    bug("seg-ids-from-one", "labels", "V5", DATA, masks_as("torch.where(mask == IGNORE, mask, mask + 1)"),
        ("not class ids", "ids start at 1"), source="VIS-04 open-mmlab/mmsegmentation#1609", harm="loud: an index beyond the outputs"),
    bug("seg-zero-is-void", "labels", "V5", DATA, masks_as("torch.where((mask == 0) | (mask == IGNORE), IGNORE, mask - 1)"),
        ("shifted by -1",), source="VIS-04 tensorflow-deeplab-resnet#10",
        harm="the background is void, the nuclei are the background"),
    bug("seg-void-learnt", "scored", "V5", CE, 'ce = F.cross_entropy(logits, mask.clamp_max(n - 1), reduction="none")',
        ("learns from", "of void", "ignore_index"), source="VIS-04 train-DeepLab#19", harm="padding is learnt as the last class"),
    bug("seg-background-ignored", "scored", "V5", CE,
        'ce = F.cross_entropy(logits, mask.where(mask != IGNORE, 0), ignore_index=0, reduction="none")',
        ("ignores class 0", "ignore_index"), argv=("--dice", "0"), source="VIS-04 open-mmlab/mmsegmentation#1609",
        harm="everything becomes an object"),
    bug("seg-void-scored", "scored", "V5", TOTAL, COUNTED.replace('["mask"]', '["mask"].clamp_max(n - 1)'),
        ("truth as prediction", "ignore_index"), source="VIS-04 tensorflow-deeplab-resnet#10",
        harm="mIoU off by the share of void"),
    bug("seg-metric-off-by-one", "scored", "V5", TOTAL,
        COUNTED.replace('batch["mask"]', '(batch["mask"] - (batch["mask"] != IGNORE).int()).clamp_min(0)'),
        ("shifted by one",), harm="mIoU near 0 for a good net"),
    bug("seg-metric-not-reset", "evaluation", "C12", TOTAL_BEFORE, NOT_RESET, ("keeps something between its calls", "not reset"),
        before=("scored",), why="an evaluation of windows without an object adds to those before it",
        harm="each evaluation is mixed with all earlier ones"),
    bug("seg-scored-resized", "scored", "V5", TOTAL, COUNTED, ("at the net's size", "stored pixels"), argv=("--resize", "256"),
        harm="thin objects that vanish when a picture shrinks are not missed"),
    bug("seg-mean-over-pictures", "scored", "V5", EVALUATE,
        "each = [segmentation.scores(confusion_matrix(model, core.View(data, [i])), classes) for i in range(len(data))]\n"
        "        return {k: sum(e.get(k, 1.0) for e in each) / len(each) for k in each[0]}\n",
        ("all pixels together", "mean over pictures", "counted as 1"), harm="windows with hardly an object decide the result"),
    bug("seg-loss-clamped", "formula", "V5", CE, CE + ".clamp_max(0.7)", ("the loss is clamped", "get no gradient"),
        harm="pixels that are clearly wrong get no gradient from the cross-entropy"),
    bug("seg-dice-by-sigmoid", "formula", "V5", "dice(logits.softmax(1), mask)", "dice(logits.sigmoid(), mask)",
        ("dice", "a softmax is meant"), harm="classes no longer exclude each other in half of the loss; its start is the same"),
    bug("seg-dice-over-rows", "formula", "V5", "dice(logits.softmax(1), mask)", "dice(logits.softmax(2), mask)",
        ("dice", "the softmax runs over rows of the picture"), before=("scored",),
        why="the softmax of a row pulls at its void pixels", harm="the Dice term compares rows, not classes"),
    bug("seg-mirrored-apart", "joint-transforms", "V5", FLIP, "v2.Lambda(lambda x: v2.RandomHorizontalFlip()(x))]",
        ("does not match its picture", "different random draws"), harm="half of the masks are mirrored"),
    bug("seg-mask-behind", "joint-transforms", "V5", DATA, masks_as("mask.roll(10, -1)"), ("does not match its picture",),
        harm="every outline ten pixels off; both paths agree"),
    bug("seg-ids-interpolated", "joint-transforms", "V5", DATA, BILINEAR, ("interpolated", "nearest"), argv=("--resize", "384"),
        source="VIS-03 kornia/kornia PR#1630", harm="invented ids along every outline"),
    bug("seg-normalised-twice", "scale", "V1", NORMALISE, "x = ((images - self.mean) / self.std - self.mean) / self.std",
        ("normalised twice",), harm="hidden by GroupNorm here; ruins pretrained weights"),
    bug("seg-mask-transposed", "formula", "V5", CE, CE.replace("mask,", "mask.mT,"), ("pixels", "own class"),
        harm="rows and columns of the masks are exchanged in the cross-entropy alone; windows are square, so nothing fails"),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS if p.id not in ("seg-void-scored", "seg-mirrored-apart")]
