"""The code in a card, run on pictures by someone who has the export alone. The recipe's own evaluation is what it must equal."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from trainworthy.recipes.vision.data import boxes, masks, pictures
from trainworthy.recipes.vision.evaluation import detection, segmentation
from trainworthy.recipes.vision.models import use_export, zoo

from tests.helpers.cards import printed
from tests.helpers.commands import environment, execute, read
from tests.helpers.pictures import write_coco, write_folder, write_masks
from trainworthy import core

QUICK = ("--gates.no-enabled", "--run.no-tensorboard", "--loader.workers", "0")


def told(run: Path, files: list[Path], cwd: Path) -> list[dict]:
    """What `python export/use.py` says of pictures."""
    done = execute(sys.executable, run / "export" / "use.py", *files, cwd=cwd, code=0, env=environment(PYTHONPATH=""))
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_classify(launch, tmp_path: Path):
    """Every held-out picture, of many sizes and kinds: the reported accuracy and likelihood; the card prints the same."""
    root = write_folder(tmp_path / "own", per_class=12, held_out=4, classes=3)
    done = launch("run", "vision/classify", "--data.path", str(root), "--train.epochs", "4", *QUICK, code=0)
    run, found = done.folder(), pictures.load(pictures.Source(str(root)))
    files = [found.images.encoded.paths[int(found.images.rows[i])] for i in found.held_out]
    said = told(run, files, tmp_path)
    truth = [found.classes[y] for y in found.labels[found.held_out]]
    metrics = read(run / "summary.json")["metrics"]
    assert np.mean([s["class"] == y for s, y in zip(said, truth, strict=True)]) == pytest.approx(metrics["accuracy"])
    likely = [s["probabilities"][y] for s, y in zip(said, truth, strict=True)]
    assert -np.log(likely).mean() == pytest.approx(metrics["nll"], rel=1e-4)
    ranked = sorted(said[0]["probabilities"].items(), key=lambda one: -one[1])
    assert printed(run, tmp_path, **{"picture.jpg": str(files[0])}).splitlines() == [
        f"{p:.4f} {name}" for name, p in ranked
    ]


@pytest.mark.parametrize(
    "more",
    [pytest.param((), marks=pytest.mark.verify), ("--resize", "50", "--window", "32", "--step", "20")],
    ids=["own-size", "resized"],
)
def test_segment(more: tuple[str, ...], launch, tmp_path: Path):
    """Whole pictures, larger than a window: masks as large as they are, and the reported IoU, to the last pixel."""
    root = write_masks(tmp_path / "own", side=90)
    done = launch("run", "vision/segment", "--data.path", str(root), "--train.epochs", "6", *more, *QUICK, code=0)
    run, data = done.folder(), masks.load(masks.Source(str(root)))
    files = [data.pairs.files[i][0] for i in data.held_out]
    said = told(run, files, tmp_path)
    total = torch.zeros(2, 2, dtype=torch.long)
    for row, one in zip(data.held_out, said, strict=True):
        mask = torch.from_numpy(np.array(Image.open(tmp_path / one["mask"])))
        assert tuple(mask.shape) == data.sizes[row]
        total += segmentation.counted(data.pairs[row][1], mask, 2)
    metrics = read(run / "summary.json")["metrics"]
    scores = segmentation.scores(total, data.classes)
    assert 0 < scores["iou"] < 1
    assert {k: v for k, v in metrics.items() if k in scores} == pytest.approx(scores, abs=1e-9)
    shown = printed(run, tmp_path, **{"picture.jpg": str(files[0])})
    assert shown.splitlines() == [f"{said[0]['shares'].get(c, 0):.4f} of the pixels: {c}" for c in data.classes]
    first = (tmp_path / said[0]["mask"], tmp_path / "mask.png")
    assert np.array_equal(*(np.array(Image.open(file)) for file in first))


def test_the_program_of_the_unet_takes_pictures_of_any_size(launch, tmp_path: Path):
    """Height and width are multiples of what the net halves; the answer is the net's own."""
    from trainworthy.recipes.vision.segment import UNet

    root = write_masks(tmp_path / "own")
    done = launch("run", "vision/segment", "--data.path", str(root), "--train.epochs", "1", *QUICK, code=0)
    export = done.folder() / "export"
    net: nn.Module = UNet(torch.zeros(3), torch.ones(3), (8, 16, 32), 2)
    net.load_state_dict(load_file(export / "model.safetensors"))
    program = torch.export.load(export / "model.pt2").module()
    for size in ((1, 3, 64, 64), (3, 3, 128, 96), (1, 3, 100, 260)):
        images = torch.rand(size, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(program(images), net.eval()(images), atol=1e-5)


@pytest.mark.parametrize(
    "model", ["fcos", *(pytest.param(m, marks=pytest.mark.verify) for m in ("retinanet", "faster-rcnn"))]
)
def test_detect(model: str, launch, tmp_path: Path):
    """Boxes of every held-out picture in its own pixels: the reported mAP; the card prints the same boxes."""
    root = write_coco(tmp_path / "own", n=16)
    done = launch("run", "vision/detect", "--data.path", str(root), "--model", model, "--train.epochs", "30", "--train.batch-size", "4",
                  "--score-thresh", "0.05", *QUICK, code=0)  # fmt: skip
    run, data = done.folder(), boxes.load(boxes.Source(str(root)))
    files = [data.pictures.files[i] for i in data.held_out]
    said = told(run, files, tmp_path)
    found = [
        [i, data.classes.index(o["class"]), o["score"], *o["box"]] for i, one in enumerate(said) for o in one["objects"]
    ]
    scores = detection.scores(torch.tensor(found), detection.listed(data, data.held_out), len(files), data.classes)
    metrics = read(run / "summary.json")["metrics"]
    assert metrics["map"] > 0
    assert {k: metrics[k] for k in scores} == pytest.approx(scores, abs=1e-6)
    lines = [f"{o['score']:.4f} {o['class']}: {' '.join(f'{x:.1f}' for x in o['box'])}" for o in said[0]["objects"]]
    assert printed(run, tmp_path, **{"picture.jpg": str(files[0])}).splitlines() == lines


def test_a_net_of_torchvision_with_two_stages_answers_from_its_export_as_the_recipe_does(tmp_path: Path):
    """Faster R-CNN on a feature pyramid, with fixed norms as from COCO's weights: the boxes of the reader are the model's."""
    torch.manual_seed(0)
    limits = {"score_thresh": 0.0, "nms_thresh": 0.6, "detections_per_img": 20}
    model = zoo.detector("faster-rcnn", "mobilenet_v3_large_320_fpn", "none", 3, limits).model
    model.limits.detections_per_img = 20
    zoo._replace(model.net, nn.BatchNorm2d, lambda norm: zoo.frozen(norm, 1e-3))
    program, facts = model.eval().exported((2, 3, 96, 96))
    config = {"backbone": "mobilenet_v3_large_320_fpn", "num_classes": 4, "classes": ["a", "b", "c"], "image_size": 96, "shorter": 0,
              "fill": [], **limits, **facts}  # fmt: skip
    core.save_export(tmp_path, program, config, torch.zeros(2, 3, 96, 96), weights=model.net)
    picture = torch.randint(0, 256, (3, 96, 96), generator=torch.Generator().manual_seed(1))
    said = use_export.detect(*use_export.open_export(str(tmp_path)), picture)
    with torch.no_grad():
        wanted = model(picture[None] / 255)[0]
    assert len(said) == len(wanted["labels"]) > 3
    assert [name for name, *_ in said] == ["abc"[i] for i in wanted["labels"].tolist()]
    assert [score for _, score, _ in said] == pytest.approx(wanted["scores"].tolist(), abs=1e-5)
    assert torch.allclose(torch.tensor([box for *_, box in said]), wanted["boxes"], atol=1e-2)


def test_predict_answers_pictures_and_names_a_damaged_one(launch, tmp_path: Path):
    """The run's own export answers each file of a folder; a damaged one does not end the others."""
    root = write_folder(tmp_path / "own", per_class=12, held_out=4, classes=3)
    started = launch("run", "vision/classify", "--data.path", str(root), "--train.epochs", "1", *QUICK, code=0)
    run = started.folder()
    new = tmp_path / "new"
    new.mkdir()
    files = sorted(p for p in (root / "val").rglob("*") if p.is_file())[:3]
    for file in files:
        (new / file.name).write_bytes(file.read_bytes())
    (new / ".hidden").write_text("")
    assert f"next   trainworthy predict {run.relative_to(tmp_path)} FILE" in started.stdout
    done = launch("predict", str(run), "new", "--out", "said.jsonl", code=0)
    found = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [f["class"] for f in found] == [t["class"] for t in told(run, files, tmp_path)]
    (new / "a.jpg").write_bytes(files[0].read_bytes()[:40])
    done = launch("predict", str(run), "new", str(files[0]), code=2)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(one)[1] for one in lines] == ["class", "class", "class", "error", "class"], done.shown
    assert "no such file" in launch("predict", str(run), "none.jpg", code=2).stderr
