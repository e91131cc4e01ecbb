"""Input that was made up, planted in forks of vision/classify: where it came from tells the class, whatever the picture shows."""

from tests.helpers.plant import Plant
from tests.vision.planted_classify import STAGES, staged


def made_up(change: str, share: str = "", collate: str = "") -> str:
    """Every sample goes through `change` (statements on `sample`, `image`, `label`, `index`); `share` of the image is declared
    fabricated."""
    lines = "".join(f"        {line}\n" for line in change.splitlines())
    told = '    data.fields["image"].fabricated = lambda sample: sample["made_up"]\n' if share else ""
    return staged(
        "def changed(data: Images) -> None:\n    get, collate = data.get, data.collate\n\n"
        "    def read(index: int, generator):\n        sample = get(index, generator)\n"
        '        image, label = sample["image"], int(sample["label"])\n'
        + lines
        + '        return {**sample, "image": image' + (f', "made_up": {share}' if share else "") + "}\n\n"
        + f"    data.get = read\n{told}{collate}\n\nfor data in stage.data.values():\n    changed(data)"
    )  # fmt: skip


def cut(rows: str) -> str:
    """Pictures cut to `rows`, filled up to 28 by collate()."""
    return made_up(
        f"image = image[:, : {rows}]",
        collate='    data.collate = lambda rows: collate([{**r, "image": F.pad(r["image"], (0, 0, 0, 28 - r["image"].shape[1]))}\n'
        "                                         for r in rows])",
    )


UPSAMPLED = 'F.interpolate(image[None, :, ::2, ::2], scale_factor=2.0, mode="bilinear")[0]'

PLANTS = [
    Plant("upsampled-class", "fabricated", "C8", STAGES,
          made_up(f"coarse = label == 9\nimage = {UPSAMPLED} if coarse else image", "0.75 * coarse"),
          ("the class explains", "9: 75%", "were resampled"), source="DeGrave, Janizek & Lee 2021, doi 10.1038/s42256-021-00338-7",
          harm="the net learns the archive's resolution: nines from another archive are not found"),
    Plant("padded-by-class", "fabricated", "C8", STAGES,
          made_up("image[:, :label] = 0", "label / 28"), ("fabricated share alone gives", "padding"),
          source="Winkler et al. 2019, doi 10.1001/jamadermatol.2019.1735", harm="the number of blank rows is the answer"),
    Plant("two-archives", "fabricated", "C8", STAGES,
          made_up("wide = label % 2 == 1\nimage[:, :6] *= not wide", "6 / 28 * wide"),
          ("the class explains",), source="Zech et al. 2018, doi 10.1371/journal.pmed.1002683"),
    Plant("length-is-the-class", "fabricated", "C8", STAGES, cut("18 + label"), ("lengths alone give", "100%"),
          source="sentence length by label: Gururangan et al. 2018, arXiv 1803.02324",
          harm="right in the archive, chance anywhere else"),
]  # fmt: skip
RELATIVES = ("two-archives", "upsampled-class")
