"""vision/detect: its scenes, boxes and scores, the three detectors, people's own COCO files; bad data."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torchvision.models import detection as torchvision_detection
from torchvision.models.detection.roi_heads import fastrcnn_loss
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.vision import detect
from trainworthy.recipes.vision.data import boxes, coco, pasted
from trainworthy.recipes.vision.evaluation import detection
from trainworthy.recipes.vision.gates import detect as detect_gates
from trainworthy.recipes.vision.models import detectors, zoo

from tests.helpers.commands import assert_refused, holds, read
from tests.helpers.pictures import write_coco

LIMITS = {"score_thresh": 0.2, "nms_thresh": 0.6, "detections_per_img": 100}
QUIET = ("--run.no-tensorboard", "--run.threads", "1", "--gates.no-enabled")
NET = ("--preset", "full", "--model", "faster-rcnn", "--backbone", "mobilenet_v3_large_320_fpn", "--weights", "none",
       "--train.precision", "fp32", "--image-size", "128", "--train.epochs", "1", "--train.batch-size", "4",
       "--loader.workers", "0", "--loader.eval-workers", "0", *QUIET)  # fmt: skip


def load(root: Path, max_bad: float = 0.01) -> boxes.Annotated:
    """Read anew: what a path holds is kept for a process."""
    boxes._coco.cache_clear()
    return boxes.load(boxes.Source(str(root), max_bad=max_bad))


# ----------------------------------------------------------------------------------------------------------------- scenes
def test_boxes_are_sorted_by_picture_as_one_by_one():
    """In one pass: with a comparison for each picture, COCO's 118,000 took minutes."""
    draws = torch.Generator().manual_seed(0)
    of = torch.randint(0, 50, (300,), generator=draws)
    boxes = torch.rand(300, 4, generator=draws)
    found = coco.of_each(boxes, of, 52)
    assert len(found) == 52
    assert all(torch.equal(mine, boxes[of == i]) for i, mine in enumerate(found))


def test_scenes_are_parted_and_their_boxes_are_exact():
    """Digits and photos of one side only; ink reaches each edge of its box and none lies outside of it."""
    for i in range(30):
        scene = pasted.scene("val", i)
        bare = pasted.render("val", scene._replace(items=()))
        for one in scene.items:
            alone = pasted.render("val", scene._replace(items=(one,)))
            changed = (alone != bare).any(0)
            rows, columns = changed.any(1).nonzero(), changed.any(0).nonzero()
            seen = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
            assert max(abs(a - b) for a, b in zip(seen, one.box, strict=True)) <= 1
    tiles = {s: {t.tobytes() for t in pasted.pool(s).tiles} for s in ("train", "val")}
    assert not tiles["train"] & tiles["val"]


def test_own_pixels_are_reached_again():
    """Onto the canvas and back, whatever the picture's size; rows that fill up are none."""
    data = detect_gates.painted(boxes.load(boxes.Source(scenes=8)), 96, 12, 3)
    seen = boxes.Boxed(data, range(12), side=96)
    for i in range(12):
        sample = seen.get(i, None)
        real = sample["labels"] >= 0
        assert torch.equal(sample["labels"][real], data.labels[i])
        assert (sample["boxes"][real] <= 96).all()
        own = boxes.to_own(sample["boxes"][real], sample["scale"], sample["size"])
        assert torch.allclose(own, data.boxes[i], atol=1e-3)


def test_scores_against_hand_counts():
    """One object found, one missed: recall 0.5 and a precision of 1 up to there; nothing to find and nothing found is right."""
    truth = torch.tensor([[0, 1, 10, 10, 50, 50], [1, 1, 10, 10, 50, 50.0]])
    found = torch.tensor([[0, 1, 0.9, 10, 10, 50, 50.0]])
    got = detection.scores(found, truth, 2, ("a", "b"))
    assert got["map"] == got["map_50"] == pytest.approx(51 / 101, abs=1e-3)  # COCO's 101 recalls, 0 to 0.5
    assert got["recall/b"] == 0.5
    assert detection.scores(found[:0], truth[:0], 2, ("a", "b"))["map"] == 1
    assert detection.scores(found, truth[:0], 2, ("a", "b"))["map"] == 0


# -------------------------------------------------------------------------------------------------------------- detectors
def small(kind: str, widths: tuple[int, ...] = (8, 16, 32)) -> detectors.Detector:
    torch.manual_seed(0)
    anchors = torch.tensor([[12.0, 24], [30, 32]])
    net = detectors.small(kind, detect.Backbone(widths), 3, anchors, stride=8, limits=LIMITS)
    return detectors.KINDS[kind](net, [0.5] * 3, [0.25] * 3)


def batch() -> tuple[torch.Tensor, list[dict]]:
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    known = {
        "boxes": torch.tensor([[4.0, 4, 40, 44], [30, 20, 60, 50]]),
        "labels": torch.tensor([2, 0]),
        "seed": torch.tensor(5),
    }
    return images, [known, {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long(), "seed": torch.tensor(6)}]


@pytest.mark.parametrize("kind", detectors.KINDS)
def test_the_sums_are_torchvisions_loss(kind: str):
    """Against the library's own forward in train mode, picture by picture where it averages over pictures; a picture without any
    object is legal; in eval mode the same numbers."""
    model, (images, targets) = small(kind), batch()
    model.net.transform.min_size, model.net.transform.max_size = (64,), 64
    model.net.transform.image_mean, model.net.transform.image_std = [0.5] * 3, [0.25] * 3
    model.net.transform.torch_choice = lambda sizes: sizes[0]  # it draws one of one size, and so moves the generator
    for chosen in (targets, targets[:1], targets[1:]):
        some = images[: len(chosen)]
        sums, n = model(some, chosen), float(model.counts(some.shape, chosen))
        theirs: dict[str, float] = {}
        for part in [range(len(chosen))] if kind == "fcos" else [[i] for i in range(len(chosen))]:
            torch.manual_seed(int(chosen[part[0]]["seed"]))
            given = [{**chosen[i], "labels": chosen[i]["labels"] + model.background} for i in part]
            for k, v in model.net([some[i] for i in part], copy.deepcopy(given)).items():
                theirs[k] = theirs.get(k, 0.0) + v.item() / (1 if kind == "fcos" else n)
        if kind != "fcos" or len(chosen) == 1:  # two pictures of which one is empty: that one counts as a location
            assert {k: v.item() / n for k, v in sums.items()} == pytest.approx(theirs, rel=1e-4)
        model.eval()
        again = model(some, chosen)
        model.train()
        assert again.keys() == sums.keys()
        if kind != "faster-rcnn":  # its proposals are fewer in eval mode
            assert all(torch.allclose(again[k], sums[k]) for k in sums)


def test_centerness_has_a_floor():
    """FCOS that answers perfectly has the loss that `lowest` says."""
    model, (images, targets) = small("fcos"), batch()
    shape, anchors = images.shape, model.anchors(images.shape)
    outputs = {k: v.clone() for k, v in model.ignorant(shape, 2).items()}
    outputs["cls_logits"].fill_(-30)
    for i, matched in enumerate(model.matches(shape, targets)):
        mine = matched >= 0
        sides = model.net.box_coder.encode(anchors[mine], targets[i]["boxes"][matched[mine]])
        outputs["cls_logits"][i, mine, targets[i]["labels"][matched[mine]]] = 30
        outputs["bbox_regression"][i, mine] = sides
        t = (sides.view(-1, 2, 2).min(1).values / sides.view(-1, 2, 2).max(1).values).prod(1).sqrt()
        outputs["bbox_ctrness"][i, mine, 0] = t.logit()
    mean = sum(model.sums(shape, outputs, targets).values()).item() / model.counts(shape, targets).item()
    assert mean == pytest.approx(model.lowest(shape, targets), rel=1e-3)


def test_the_second_stage_has_a_floor():
    """Faster R-CNN's boxes that are two pixels too wide and high: torchvision's own loss of them, as often as they are sampled."""
    model, (images, targets) = small("faster-rcnn"), batch()
    known = targets[0]["boxes"]
    said = model.net.roi_heads.box_coder.encode_single(known + torch.tensor([0, 0, 2.0, 2.0]), known)
    labels, logits = [torch.ones(2).long()], torch.tensor([[-30.0, 30.0]] * 2)
    _, boxes_ = fastrcnn_loss(logits, said.repeat(1, 2), labels, [torch.zeros(2, 4)])
    assert model.lowest(images.shape, targets[:1], off=2.0) == pytest.approx(0.25 * boxes_.item(), rel=1e-4)
    assert model.lowest(images.shape, targets, off=2.0) == pytest.approx(0.125 * boxes_.item(), rel=1e-4)
    assert model.lowest(images.shape, targets) == 0


def test_torchvisions_own_nets_are_taken_by_name():
    start = zoo.detector("faster-rcnn", "mobilenet_v3_large_320_fpn", "none", 3, LIMITS)
    assert start.model.limits.score_thresh == 0.2
    assert all("box_predictor" in n for n in start.fresh)
    with pytest.raises(UserError, match="resnet50_fpn"):
        zoo.detector("fcos", "resnet5_fpn", "none", 3, LIMITS)


# One of each kind; the weights of two were trained with norms that add nothing to the variance.
TRAINED = [("faster-rcnn", "mobilenet_v3_large_320_fpn"), ("fcos", "resnet50_fpn"), ("retinanet", "resnet50_fpn")]


def pretended(root: Path, kind: str, backbone: str) -> dict[str, torch.Tensor]:
    """Weights as torchvision has them (91 classes, statistics of some data), in torch's own cache under `root`."""
    name = f"{zoo.DETECTORS[kind]}_{backbone}"
    file = root / "hub" / "checkpoints" / Path(zoo.find(name, "DEFAULT", [name]).url).name
    file.parent.mkdir(parents=True)
    net = zoo.models.get_model(name, weights=None, weights_backbone=None, num_classes=91)
    state = {k: v for k, v in net.state_dict().items() if not k.endswith("num_batches_tracked")}
    draw = torch.Generator().manual_seed(0)
    for key, value in state.items():
        if key.endswith("running_mean"):
            value.normal_(0, 0.1, generator=draw)
        elif key.endswith("running_var"):
            value.uniform_(0.5, 2, generator=draw)
    torch.save(state, file)
    return state


@pytest.mark.parametrize(
    ("kind", "backbone"), [TRAINED[0], *(pytest.param(*t, marks=pytest.mark.verify) for t in TRAINED[1:])]
)
def test_trained_weights_answer_as_torchvisions_own(tmp_path: Path, monkeypatch, kind: str, backbone: str):
    """From a file in torch's cache: every tensor but the new head's, statistics frozen; the maps are those of torchvision's net."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    state = pretended(tmp_path, kind, backbone)
    start = zoo.detector(kind, backbone, "DEFAULT", 3, LIMITS)
    mine, net = start.model.net.state_dict(), start.model.net.train()
    head = {n.removeprefix("net.") for n in start.fresh}
    assert head
    assert all(("predictor" if kind == "faster-rcnn" else "classification_head") in n for n in head)
    assert mine.keys() == state.keys()
    assert all(torch.equal(mine[k], v) for k, v in state.items() if k not in head)
    assert {k.removeprefix("net.") for k in start.pretrained} == state.keys() - head
    assert not any(isinstance(m, nn.BatchNorm2d) for m in net.modules())
    assert not [n for n, _ in net.named_parameters() if ".bn" in n]
    theirs = zoo.models.get_model(
        f"{zoo.DETECTORS[kind]}_{backbone}", weights="DEFAULT"
    )  # the same file, by its own way
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        for level, found in net.backbone(x).items():
            assert torch.allclose(found, theirs.train().backbone(x)[level], rtol=1e-4, atol=1e-5)


@pytest.mark.verify
def test_trained_weights_go_through_the_gates(launch, tmp_path: Path):
    """The real command: weights arrive bit for bit, what is frozen stays, the rest trains."""
    pretended(tmp_path, *TRAINED[0])
    write_coco(tmp_path / "data")
    done = launch("check", "vision/detect", "--data.path", "data", *NET[:6], "--weights", "DEFAULT", *NET[8:-1], "--only",
                  "schema,init,wiring,batch-norm", timeout=500, TORCH_HOME=str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.shown
    said = {v["id"]: v["verdict"] for v in done.verdicts()}
    assert (said["init"], said["wiring"], said["batch-norm"]) == ("pass", "pass", "pass"), done.shown


def test_a_trained_net_keeps_its_norms():
    """Every batch norm stands as it came: the same answers, in either mode."""
    net = torchvision_detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3
    ).train()
    x = torch.rand(2, 3, 64, 64)
    for _ in range(2):
        net.backbone(x)
    plain = net.eval().backbone(x)["0"]
    zoo._replace(net, nn.BatchNorm2d, lambda norm: zoo.frozen(norm, 1e-5))
    assert torch.allclose(net.train().backbone(x)["0"], plain, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------------- COCO
@pytest.mark.parametrize("layout", ["annotations", "beside", "single"])
def test_coco_reads_alike_in_every_layout(tmp_path: Path, layout: str):
    """xywh in the file is xyxy in the pictures' own pixels; ids with gaps; a picture without an object; crowds left out."""
    found = load(write_coco(tmp_path / "data", layout=layout))
    assert found.classes == tuple(f"digit {c}" for c in range(10))
    assert len(found.learn) + len(found.held_out) == 10
    assert sum(not len(b) for b in found.boxes) == 1
    assert "pictures without any object" in found.notes
    assert "crowds left out" in found.notes
    scene = pasted.scene("train", 0)
    row = next(i for i, f in enumerate(found.pictures.files) if f.name == "00.png")
    assert torch.equal(found.boxes[row], torch.tensor([i.box for i in scene.items], dtype=torch.float32))
    assert found.labels[row].tolist() == [i.digit for i in scene.items]
    assert found.pictures[row].shape == (3, 96, 96)


def damaged(root: Path, what: str) -> Path:
    """A COCO folder with one fault."""
    write_coco(root)
    file = root / "annotations" / "instances_train.json"
    listed = json.loads(file.read_text())
    every = [a for a in listed["annotations"] if not a["iscrowd"]]
    match what:
        case "outside":
            for a in every[:4]:
                a["bbox"][0] += 70
        case "no area":
            every[0]["bbox"][2] = 0
        case "normalised":
            for a in every:
                a["bbox"] = [v / 96 for v in a["bbox"]]
        case "xyxy":
            for a in every:
                x, y, w, h = a["bbox"]
                a["bbox"] = [x, y, x + w, y + h]
        case "unlisted id":
            every[0]["category_id"] = 99
        case "no id":
            del listed["annotations"][3]["category_id"]
        case "missing picture":
            (root / "train" / "01.png").unlink()
        case "another size":
            Image.open(root / "train" / "01.png").resize((48, 48)).save(root / "train" / "01.png")
        case "another list":
            listed["categories"][0]["name"] = "zero"
        case "orphan":
            every[0]["image_id"] = 12345
        case "no boxes":
            listed["annotations"] = []
        case "no json":
            shutil.rmtree(root / "annotations")
        case "broken json":
            file.write_text(file.read_text()[:100])
            return root
        case "not COCO":
            del listed["categories"]
    if what != "no json":
        file.write_text(json.dumps(listed))
    return root


FAULTS = {
    "outside": ("parts outside their pictures", "96x96", "resized or cropped"),
    "no area": ("have no area", "00.png"),
    "normalised": ("normalised coordinates", "multiply"),
    "xyxy": ("are xyxy", "w = x2 - x1"),
    "unlisted id": ("category that the file does not list", "99 (1 times)"),
    "no id": ("annotations[3]", "no 'category_id'"),
    "missing picture": ("cannot be read", "train/01.png", "no such file"),
    "another size": ("not as large as the JSON says", "48x48", "96x96"),
    "another list": ("list other categories", "zero"),
    "orphan": ("do not belong", "12345"),
    "no boxes": ("has no box to learn from",),
    "no json": ("no annotations in", "instances_train"),
    "broken json": ("cannot read",),
    "not COCO": ("cannot read", "categories"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_one_message(tmp_path: Path, what: str):
    with pytest.raises(UserError) as told:
        load(damaged(tmp_path / "data", what))
    assert not [w for w in FAULTS[what] if w not in str(told.value)], str(told.value)


def test_pictures_may_be_in_one_folder_of_any_name_next_to_the_json(tmp_path: Path, launch):
    """The layout that docs/own-data.md names. With two such folders the pictures are missing, and the message says where they were sought.
    The data report names the category that no box has."""
    root = write_coco(tmp_path / "data", layout="single")
    (root / "images").rename(root / "my pictures")
    listed = json.loads((root / "annotations.json").read_text())
    listed["categories"].append({"id": 90, "name": "never used"})
    (root / "annotations.json").write_text(json.dumps(listed))
    done = launch("data", "vision/detect", "--data.path", "data", code=0)
    holds(done.stdout, "crowds left out: 1 regions", "train: boxes: digit 2 4", "digit 6, never used")
    (root / "others").mkdir()
    assert_refused(
        launch("data", "vision/detect", "--data.path", "data"), "none of the 10 pictures that", "move them to", "images"
    )


def test_what_may_be_bad_is_left_out_and_told(tmp_path: Path):
    """Under the limit: an empty box is dropped, one that reaches over the edge is cut there."""
    root = damaged(tmp_path / "a", "no area")
    found = load(root, max_bad=0.1)
    assert any("no area" in k for k in found.notes)
    found = load(damaged(tmp_path / "b", "outside"), max_bad=0.4)
    assert any("outside" in k for k in found.notes)
    assert max(b.max().item() for b in found.boxes if len(b)) <= 96


@pytest.mark.verify
@pytest.mark.parametrize(("argv", "words"), [
    (("--data.path", "nowhere"), ("there is no data folder nowhere", "annotations")),
    (("--image-size", "20"), ("does not fit the net's strides", "a multiple of 8", "--image-size 32")),
    (("--model", "yolo"), ("fcos", "retinanet", "faster-rcnn")),
    (("--backbone", "resnet50", "--image-size", "128"), ("unknown backbone", "resnet50_fpn")),
])  # fmt: skip
def test_what_cannot_work_is_exit_2(launch, argv, words):
    done = launch("run", "vision/detect", *argv)
    assert done.returncode == 2, done.shown
    assert "Traceback" not in done.stderr
    assert not [w for w in words if w not in done.stderr], done.shown


@pytest.mark.verify
@pytest.mark.parametrize("what", ["outside", "no area", "normalised", "unlisted id", "xyxy", "missing picture"])
def test_a_fault_is_exit_2(launch, tmp_path: Path, what: str):
    damaged(tmp_path / "data", what)
    done = launch("run", "vision/detect", "--data.path", "data")
    assert done.returncode == 2, done.shown
    assert "Traceback" not in done.stderr
    assert not [w for w in FAULTS[what] if w not in done.stderr], done.shown


@pytest.mark.parametrize(
    ("faulty", "words"), [(3, "correct them, or accept them: --data.max-bad 0.30"), (9, "correct them")]
)
def test_the_next_command_accepts_the_boxes_that_were_counted(faulty: int, words: str):
    """A share is at most 1, and nobody trains on a tenth of the boxes."""
    boxes = torch.tensor([[60.0, 5, 80 if i < faulty else 9, 9] for i in range(10)], dtype=torch.float64)
    one = coco.Listed(Path("a.json"), [Path("a.png")], [(96, 96)], torch.zeros(10, dtype=torch.long), boxes,
                      torch.ones(10, dtype=torch.long), {1: "one"}, 0)  # fmt: skip
    with pytest.raises(UserError, match=f"{faulty} of 10 boxes") as error:
        coco.checked(one, {}, max_bad=0.01)
    assert str(error.value).endswith(words)
    coco.checked(one, {}, max_bad=faulty / 10)


# ------------------------------------------------------------------------------------------------------------- whole runs
@pytest.mark.verify
def test_own_pictures_on_a_net_of_torchvision(launch, tmp_path: Path):
    """A COCO folder, a real net of torchvision, its export read back by torchvision."""
    write_coco(tmp_path / "data")
    done = launch("run", "vision/detect", "--data.path", "data", *NET)
    assert done.returncode == 0, done.shown
    folder = done.folder()
    config = read(folder / "export" / "config.json")
    assert config["num_classes"] == 11
    net = torchvision_detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=11
    )
    net.load_state_dict(load_file(folder / "export" / "model.safetensors"))


@pytest.mark.verify
@pytest.mark.parametrize("kind", ["fcos", "retinanet"])
def test_the_exported_program_answers_as_the_net_does(launch, kind: str):
    """Without this project: model.pt2 and torchvision's NMS; the weights with what the config says."""
    done = launch("run", "vision/detect", "--model", kind, "--data.scenes", "64", "--train.epochs", "2", *QUIET)
    assert done.returncode == 0, done.shown
    folder = done.folder() / "export"
    program = torch.export.load(folder / "model.pt2").module()
    images = torch.stack([pasted.render("val", pasted.scene("val", i)) for i in range(3)]).float() / 255
    where, score = program(images)
    config = read(folder / "config.json")
    anchors = torch.tensor(config.get("anchors", [[1.0, 2.0]]))
    assert where.shape == (3, 144 * len(anchors), 4)
    assert score.shape == (3, 144 * len(anchors), 10)
    net = detectors.small(kind, detect.Backbone((32, 64, 64)), 10, anchors, stride=8, limits=LIMITS)
    net.load_state_dict(load_file(folder / "model.safetensors"))
    model = detectors.KINDS[kind](net, config["mean"], config["std"]).eval()
    with torch.no_grad():
        raw = detectors.Raw(model, 96)(images)
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(raw, (where, score), strict=True))
        model.limits.score_thresh = 0.0  # after two epochs nothing is sure
        found = model(images)
    for boxes_, scores, own in zip(where, score, found, strict=True):  # the best box of all is the net's own
        best = int(scores.max(1).values.argmax())
        assert torch.allclose(own["scores"][0], scores.max(), atol=1e-4)
        assert torch.allclose(own["boxes"][0], boxes_[best].clamp(0, 96), atol=1e-2)


def test_labels_in_yolo_s_layout_and_the_training_list_as_validation_are_named(tmp_path: Path):
    (tmp_path / "labels" / "train").mkdir(parents=True)
    (tmp_path / "labels" / "train" / "a.txt").write_text("0 0.5 0.5 0.2 0.1\n")
    with pytest.raises(UserError, match="in YOLO's layout"):
        boxes.load(boxes.Source(path=str(tmp_path)))
    write_coco(tmp_path / "own")
    file = next((tmp_path / "own").rglob("*train*.json"))
    with pytest.raises(UserError, match="names the training data"):
        boxes.load(boxes.Source(path=str(tmp_path / "own"), val=str(file)))
