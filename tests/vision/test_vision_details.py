"""Details of the vision recipes that were wrong in silence: paths in COCO's JSON, score cuts, weight decay, tables of classes."""

import json

import pytest
import torch
from torch import nn
from torchvision import models
from trainworthy.core.base.config import Optim
from trainworthy.core.loop import optim
from trainworthy.core.report.sections import matrix
from trainworthy.recipes.vision.data import boxes
from trainworthy.recipes.vision.gates import boxes as gates
from trainworthy.recipes.vision.models.detectors import MIN_SCORES

from tests.helpers.commands import read
from tests.helpers.pictures import write_coco

QUICK = ("--data.scenes", "40", "--train.epochs", "0.4", "--gates.no-enabled", "--run.no-tensorboard")
TABLES = ("layer_scale", "class_token", "pos_embedding", "logit_scale", "relative_position_bias_table", "rel_pos")


@pytest.mark.parametrize("name", ["../../secret.png", "/etc/secret.png"])
def test_a_file_name_that_leaves_the_data_folder_is_refused(launch, tmp_path, name):
    folder = write_coco(tmp_path / "coco")
    file = folder / "annotations" / "instances_train.json"
    listed = json.loads(file.read_text())
    listed["images"][0]["file_name"] = name
    file.write_text(json.dumps(listed))
    done = launch("data", "vision/detect", "--data.path", str(folder))
    assert done.returncode == 2, done.shown
    assert "outside of the data folder" in done.stderr
    assert name in done.stderr


def test_a_file_name_that_stays_inside_is_read(tmp_path):
    folder = write_coco(tmp_path / "coco")
    file = folder / "annotations" / "instances_train.json"
    listed = json.loads(file.read_text())
    for one in listed["images"]:
        one["file_name"] = f"../train/{one['file_name']}"
    file.write_text(json.dumps(listed))
    assert len(boxes.load(boxes.Source(str(folder))).pictures) == 10


@pytest.mark.verify
def test_retinanet_keeps_boxes_from_torchvisions_score_on(launch):
    done = launch("run", "vision/detect", *QUICK, "--model", "retinanet")
    assert done.returncode == 0, done.shown
    assert read(done.folder() / "export" / "config.json")["score_thresh"] == MIN_SCORES["retinanet"] == 0.05


@pytest.mark.parametrize("name", ["convnext_tiny", "vit_b_16", "swin_t", "swin_v2_t", "maxvit_t"])
def test_tables_tokens_and_scales_do_not_decay(name):
    sized = {"input_size": (224, 224)} if name == "maxvit_t" else {}
    with torch.device("meta"):
        net = models.get_model(name, weights=None, **sized)
    groups = {g["name"]: {id(p) for p in g["params"]} for g in optim.make_optimizer(net, Optim()).param_groups}
    tables = [n for n, p in net.named_parameters() if any(t in n for t in TABLES) and id(p) in groups["decay"]]
    assert not tables
    kinds = (nn.Linear, nn.Conv2d)
    weights = {id(m.weight) for m in net.modules() if isinstance(m, kinds)}
    assert weights <= groups["decay"]


def test_a_picture_lies_on_the_canvas_as_torchvisions_transform_has_it():
    """The shorter side's size, the longer one's limit, and zeros around it behind the normalisation."""
    from torchvision.models.detection.transform import GeneralizedRCNNTransform

    draw = torch.Generator().manual_seed(0)
    pictures = [
        torch.randint(256, (3, *size), generator=draw, dtype=torch.uint8) for size in ((60, 80), (90, 40), (30, 200))
    ]
    sizes = [tuple(p.shape[1:]) for p in pictures]
    none = [torch.zeros(0, 4)] * 2 + [torch.tensor([[0.0, 0.0, 10.0, 10.0]])]
    labels = [torch.zeros(len(b), dtype=torch.long) for b in none]
    data = boxes.Boxed(boxes.Annotated(pictures, sizes, none, labels, ("a",), [], [], {}), range(3), side=160)
    data.shorter, data.fill = 96, (0.485, 0.456, 0.406)
    theirs = GeneralizedRCNNTransform(96, 160, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (theirs.image_mean, theirs.image_std))
    for i, picture in enumerate(pictures):
        seen, _ = theirs([picture.float() / 255])
        h, w = data.resized(*sizes[i])
        assert max(abs(a - b) for a, b in zip(seen.image_sizes[0], (h, w), strict=True)) <= 1
        normalised = (data.get(i, None)["image"] - mean) / std
        assert normalised[:, h:].abs().max() < 1e-6 if h < 160 else True
        assert normalised[:, :, w:].abs().max() < 1e-6 if w < 160 else True


def test_matrices_of_other_modules_decay():
    class Conv1D(nn.Module):  # as GPT-2 has it
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(4))

    net = nn.Sequential(Conv1D(), nn.LayerNorm((2, 4)), nn.Embedding(5, 4))
    decay, rest = (g["params"] for g in optim.make_optimizer(net, Optim()).param_groups)
    assert [tuple(p.shape) for p in decay] == [(3, 4), (5, 4)]
    assert [tuple(p.shape) for p in rest] == [(4,), (2, 4), (2, 4)]


def test_a_table_of_a_thousand_classes_is_a_small_page():
    values = (50 * torch.eye(1000)).long()
    values[7, 9] = 3
    names = [f"class {i}" for i in range(1000)]
    page = matrix({"values": values.tolist(), "rows": names, "columns": names, "axes": ("truth", "prediction")})
    assert len(page) < 500_000
    assert "class 7" in page
    assert "The 40 of 1,000" in page


def test_pictures_that_are_mirrored_alone_are_seen_at_every_seed():
    """Power of the gate `boxes`: half of the pictures mirrored, their boxes not, at 20 of 20 seeds."""
    empty = boxes.Annotated([], [], [], [], ("a", "b"), [], [], {})
    other = gates.painted(empty, 96, gates.PAINTED, 1)
    data = boxes.Boxed(other, range(len(other.pictures)), side=96)
    batch = data.collate([data.get(i, None) for i in range(len(data))])
    assert not gates._compare_rectangles(batch, list(range(len(data))), "boxes", 96)[0]
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        images = batch["image"].clone()
        for i, flip in enumerate((torch.rand(len(data), generator=generator) < 0.5).tolist()):
            wide = round(float(batch["scale"][i][0] * batch["size"][i][1]))
            if flip:
                images[i, :, :, :wide] = images[i, :, :, :wide].flip(-1)
        fault, _ = gates._compare_rectangles({**batch, "image": images}, list(range(len(data))), "boxes", 96)
        assert "not mirrored with their picture" in fault, seed


@pytest.mark.parametrize(("dark", "bright"), [(0.205, 0.58), (0.16, 0.84), (0.1, 0.5)])
def test_a_painted_rectangle_in_a_thin_grey_frame(dark: float, bright: float):
    """A frame of 0.45, as RandomAffine fills, around a picture that was darkened before."""
    image = torch.full((1, 3, 96, 96), 0.45)
    image[..., 2:, 3:] = dark
    image[..., 30:60, 20:50] = bright
    for box, due in (([20.0, 30.0, 50.0, 60.0], True), ([46.0, 30.0, 76.0, 60.0], False)):
        batch = {"image": image, "boxes": torch.tensor([[box]]), "labels": torch.zeros(1, 1), "scale": torch.ones(1, 2),
                 "size": torch.full((1, 2), 96.0)}  # fmt: skip
        assert (not gates._compare_rectangles(batch, [0], "boxes", 96)[0]) == due
