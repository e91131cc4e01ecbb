"""vision/segment: its windows, its scores, people's own folders, torchvision's nets; bad data."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F
from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.gates.checks import exported
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.recipes.shared import nuclei
from trainworthy.recipes.vision import classify, detect, segment
from trainworthy.recipes.vision.data import masks, pasted
from trainworthy.recipes.vision.data.masks import IGNORE
from trainworthy.recipes.vision.evaluation import mask_expectations, segmentation
from trainworthy.recipes.vision.gates import pictures
from trainworthy.recipes.vision.models import exporting, hub_nets, zoo

from tests.helpers.commands import read
from tests.helpers.pictures import write_masks
from trainworthy import core

NET = ("--preset", "full", "--model", "lraspp_mobilenet_v3_large", "--weights", "none", "--train.precision", "fp32", "--resize",
       "0", "--scale", "1", "--window", "64", "--step", "64", "--optim.layer-decay", "1", "--train.batch-size", "4",
       "--loader.workers", "0", "--loader.eval-workers", "0", "--run.no-tensorboard", "--run.threads", "1",
       "--gates.no-enabled")  # fmt: skip
SIZES = [((512, 170), 96, 32, 0), ((70, 65), 64, 64, 0), ((50, 200), 64, 20, 0), ((100, 80), 64, 64, 120)]


def load(root: Path) -> masks.Annotated:
    """Read anew: what a path holds is kept for a process."""
    masks._folder.cache_clear()
    return masks.load(masks.Source(str(root)))


# ---------------------------------------------------------------------------------------------------------------- windows
@pytest.mark.parametrize(("size", "window", "step", "resize"), SIZES)
def test_every_pixel_is_scored_once(size, window, step, resize):
    """Windows of whatever overlap: as many pixels of each class as the (resized) mask has, each where it lies."""
    mask = torch.randint(3, size, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    data = masks.Annotated([(mask[None], mask)], [size], torch.zeros(1, 256), ("a", "b", "c"), [0], [0], {})
    windows = masks.Windows(data, [0], window=window, step=step, resize=resize)
    whole = windows.whole(0)[1].long()
    seen = torch.full_like(whole, IGNORE)
    for i, (_, top, left, *_) in enumerate(windows.places):
        own = windows.get(i, None)["mask"]
        assert own.shape == (window, window)
        y, x = (own != IGNORE).nonzero(as_tuple=True)
        assert (seen[y + top, x + left] == IGNORE).all()
        seen[y + top, x + left] = own[y, x]
    assert torch.equal(seen, whole)


@pytest.mark.parametrize("resize", [40, 96, 230])
@pytest.mark.parametrize(("window", "step"), [(48, 48), (48, 20)])
def test_resized_pictures_are_scored_at_their_own_size(resize, window, step):
    """Each stored pixel once; where one window is the whole picture, as torch's own bilinear resizing of the logits says."""
    size = (96, 131)
    mask = torch.randint(3, size, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    mask[:5] = IGNORE
    data = masks.Annotated([(mask[None], mask)], [size], torch.zeros(1, 256), ("a", "b", "c"), [0], [0], {})
    windows = masks.Windows(data, [0], window=window, step=step, resize=resize)
    batch = windows.collate([windows.get(i, None) for i in range(len(windows))])
    logits = torch.randn(len(windows), 3, window, window, generator=torch.Generator().manual_seed(1))
    found = segmentation.scored(batch, logits, 3)
    assert found.sum(1).tolist() == [(mask == c).sum().item() for c in range(3)]
    one = masks.Windows(data, [0], window=333, step=333, resize=resize)
    h, w = one.sizes[0]
    logits = torch.randn(1, 3, 333, 333, generator=torch.Generator().manual_seed(1))
    said = F.interpolate(logits[..., :h, :w], size, mode="bilinear", align_corners=False).argmax(1)[0]
    batch = one.collate([one.get(0, None)])
    assert torch.equal(segmentation.scored(batch, logits, 3), segmentation.counted(mask, said, 3))
    assert "stored" not in one.get(0, torch.Generator().manual_seed(0))  # the loss is at the net's size


def test_thin_objects_that_vanish_in_the_net_are_missed(launch, tmp_path):
    """Lines of one pixel in pictures of 192 pixels that the net reads at 48: resized masks hold none, stored masks all. Through the real
    command, with pictures of two sizes."""
    for i in range(10):
        side = (192, 240)[i % 2]
        ids = np.zeros((side, 192), np.uint8)
        ids[:, 1:9:4] = 1  # columns that nearest neighbour from 192 to 48 leaves out
        for name, values in (("images", 40 + 3 * i + ids * 200), ("masks", ids)):
            (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.astype(np.uint8)).save(tmp_path / "data" / name / f"{i}.png")
    (tmp_path / "data" / "classes.txt").write_text("ground\nline\n")
    data = load(tmp_path / "data")
    assert not any((masks.Windows(data, [i], window=48, step=48, resize=48).whole(i)[1] == 1).any() for i in range(10))
    done = launch("run", "vision/segment", "--data.path", "data", "--resize", "48", "--window", "48", "--step", "48", "--train.epochs", "1",
                  "--gates.no-enabled", "--run.no-tensorboard")  # fmt: skip
    assert done.returncode in (0, 4), done.shown
    rows = [row for row in read(done.folder() / "epoch_metrics.jsonl") if "val/recall/line" in row]
    assert rows, "lines are in no resized mask and in all stored ones"
    assert rows[-1]["val/recall/line"] == 0.0


def test_the_nuclei_are_those_of_the_file():
    picture, mask = nuclei.load()
    assert picture.shape == mask.shape == (512, 512)
    assert mask.float().mean().item() == pytest.approx(0.1992, abs=1e-4)
    assert set(mask.unique().tolist()) == {0, 1}


def test_digits_on_photos_have_their_edges_void():
    """Where only the photo is, the mask is 0; inside its box a digit's own number; void is what is blended, and no class lost."""
    data = masks.load(masks.Source("digits", scenes=20))
    assert (len(data.learn), len(data.held_out), len(data.classes)) == (20, pasted.HELD_OUT, 11)
    for row in range(20):
        split, scene = data.pairs.scenes[row]
        picture, mask = data.pairs[row]
        bare = pasted.render(split, scene._replace(items=()))
        faint = (picture.int() - bare.int()).abs().amax(0) * (mask == 0)
        assert faint.max() <= 26  # a tenth of an ink of 255
        inside = torch.zeros_like(mask)
        for one in scene.items:
            x0, y0, x1, y1 = one.box
            inside[y0:y1, x0:x1] = one.digit + 1
            assert (mask[y0:y1, x0:x1] == one.digit + 1).any()
        solid = (mask > 0) & (mask != IGNORE)
        assert torch.equal(mask[solid], inside[solid])
    assert torch.equal(data.pixels[3], data.pairs[3][1].flatten().bincount(minlength=256))


def test_the_table_is_of_each_class():
    """Two classes, one that is never there: left out of the mean."""
    found = segmentation.table(torch.tensor([[6, 2, 0], [0, 8, 0], [0, 0, 0]]), ("a", "b", "c"))
    assert found.values[1].tolist() == [75, 75, 100]
    assert found.values[2].tolist() == [80, 100, 80]
    assert found.values[0].tolist() == [78, 88, 90]


# ------------------------------------------------------------------------------------------------------- what is expected
def test_scores_are_those_of_all_pixels():
    """From counts over everything; of two classes the object's is the binary Jaccard index, as scikit-learn counts it."""
    from sklearn.metrics import jaccard_score

    truth, said = (torch.randint(2, (500,), generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    confusion = torch.bincount(truth * 2 + said, minlength=4).view(2, 2)
    found = segmentation.scores(confusion, ("no", "yes"))
    assert found["iou"] == pytest.approx(jaccard_score(truth, said))
    assert found["miou"] == pytest.approx(jaccard_score(truth, said, average="macro"))
    nothing = segmentation.scores(
        torch.tensor([[9, 0], [0, 0]]), ("no", "yes")
    )  # no object anywhere, none said: all right
    assert nothing["iou"] == nothing["miou"] == 1


@pytest.mark.parametrize(("focal", "dice"), [(0.0, 1.0), (2.0, 0.5)])
def test_the_expected_loss_is_that_of_these_answers(focal, dice):
    """Against the recipe's own loss on logits that say so; void in a corner, a class that one window lacks."""
    mask = torch.zeros(2, 32, 32, dtype=torch.long)
    mask[0, 8:20, 8:20], mask[:, :4, :4] = 1, IGNORE
    cfg = segment.tiny()
    cfg.focal, cfg.dice = focal, dice
    run = Run(cfg, Accelerator(cpu=True), rehearsal=Rehearsal(steps=1))
    stage = segment.segment(cfg, run)
    for own in (mask_expectations.unsure(mask, 2), mask_expectations.sure_inside(mask, 1).clamp_max(1 - 1e-6)):
        truth = F.one_hot(mask.where(mask != IGNORE, 0), 2).permute(0, 3, 1, 2)
        logits = torch.where(truth == 1, own[:, None], 1 - own[:, None]).log()
        batch = {"image": torch.zeros(2, 1, 32, 32), "mask": mask}
        sums, counts = stage.loss(lambda images, logits=logits: logits, batch), stage.counts(batch)
        mean = sum(s / counts[t] for t, s in sums.items()).item()
        assert mask_expectations.answered(mask, own, 2, focal=focal, dice=dice) == pytest.approx(mean, rel=1e-4)


# ---------------------------------------------------------------------------------------------------------------- folders
def test_every_kind_of_picture_and_mask_reads_alike(tmp_path):
    """Grey, RGB and 16-bit pictures, grey and palette masks: the piece of the nuclei they were cut from."""
    found = load(write_masks(tmp_path / "data"))
    assert found.classes == nuclei.CLASSES
    assert (len(found.learn), len(found.held_out)) == (6, 2)
    picture, mask = nuclei.load()
    for i in range(6):
        image, ids = found.pairs[i]
        h, w = found.sizes[i]
        assert torch.equal(ids, mask[:h, 64 * i : 64 * i + w])
        assert image.shape == (3, h, w)
        assert (image[0].float() - picture[:h, 64 * i : 64 * i + w]).abs().max() < 1e-3


def test_own_split_and_no_names(tmp_path):
    """One folder: a fifth is held out, copies of a picture stay on one side; ids name themselves."""
    root = write_masks(tmp_path / "data", n=10, split=False, classes=())
    for name in ("images", "masks"):
        shutil.copy(root / name / "03.png", root / name / "copy.png")
    found = load(root)
    assert found.classes == ("0", "1")
    assert len(found.learn) + len(found.held_out) == 11
    assert ({3, 10} <= {*found.learn}) or ({3, 10} <= {*found.held_out})


def test_void_no_object_and_small_pictures_are_legal(tmp_path):
    """A mask of background alone, one with void, pictures smaller than a window: read, padded with void, said in the notes."""
    root = write_masks(tmp_path / "data")
    Image.fromarray(np.zeros((64, 64), np.uint8)).save(root / "train" / "masks" / "00.png")
    ids = np.array(Image.open(root / "train" / "masks" / "02.png"))
    ids[:8] = IGNORE
    Image.fromarray(ids).save(root / "train" / "masks" / "02.png")
    found = load(root)
    windows = masks.Windows(found, found.learn, window=96, step=96)
    assert len(windows) == 6
    assert "padded to 96 pixels, the padding void" in windows.notes
    assert windows.notes["samples"].startswith("windows of 96 x 96 pixels, 6 from 6 pictures")
    assert windows.notes["pixels"].endswith("void 2%")  # 8 rows of one of six pictures of 64 rows
    first, third = (windows.get(i, None)["mask"] for i in (0, 2))
    assert set(first.unique().tolist()) == {0, IGNORE}
    assert (third[:8] == IGNORE).all()
    assert (third != IGNORE).sum() == ids.size - 8 * ids.shape[1]


def test_a_class_that_is_never_found_is_named():
    """The monitor `forgotten`, of the segmenter and of vision/classify."""
    rows = [{"val/recall/nothing": 0.99, "val/recall/nucleus": 0.4}]
    assert pictures.forgotten.check(rows).ok
    found = pictures.forgotten.check([*rows, {"val/recall/nothing": 1.0, "val/recall/nucleus": 0.0}])
    assert not found.ok
    assert found.measured == "recall below 1%: nucleus"
    even, rare = (pictures.forgotten_class(uneven) for uneven in (False, True))
    found = even.check([{f"val/recall/{i}": float(i == 0) for i in range(10)}])
    assert found.measured == "recall below 1%: 1, 2, 3, 4, 5 and 4 more of 10 classes"
    assert found.remedy == pictures.ONE_CLASS
    never = [{"val/recall/a": 0.9, "val/recall/b": 0.8, "val/recall/c": 0.0}]
    assert "--balance.by" not in even.check(never).remedy
    assert "--balance.by" in rare.check(never).remedy
    for one, cfg in (
        (pictures.forgotten, segment.Config),
        (pictures.forgotten_box, detect.Config),
        (rare, classify.Config),
    ):
        settings = config.flat(config.to_dict(cfg()))
        named = re.findall(r"--([a-z.-]+)", one.check([{"val/recall/a": 0.0}]).remedy)
        assert named
        assert not [name for name in named if not any(key.replace("_", "-") == name for key in settings)], (
            named,
            settings,
        )


# --------------------------------------------------------------------------------------------------------------- bad data
def damaged(root: Path, what: str) -> Path:
    """A folder with one fault."""
    write_masks(root)
    mask = root / "train" / "masks" / "01.png"
    ids = np.array(Image.open(mask))
    match what:
        case "no mask":
            mask.unlink()
        case "another size":
            Image.fromarray(ids).resize((32, 32), Image.Resampling.NEAREST).save(mask)
        case "unexpected ids":
            ids[:3] = 7
            Image.fromarray(ids).save(mask)
        case "from one":
            for one in root.rglob("masks/*.png"):
                Image.fromarray(np.array(Image.open(one)) + 1).save(one)
        case "instances":
            Image.fromarray(ids.astype(np.uint16) * 1000).save(mask)
        case "colours":
            Image.fromarray(ids).convert("RGB").save(mask)
        case "colours everywhere":
            for one in root.rglob("masks/*.png"):
                Image.open(one).convert("RGB").save(one)
        case "JPEG":
            for one in root.rglob("masks/*.png"):
                Image.fromarray(np.array(Image.open(one)) * 9).save(one.with_suffix(".jpg"), quality=50)
                one.unlink()
        case "empty":
            shutil.rmtree(root / "train" / "images")
        case "one class":
            (root / "classes.txt").write_text("nothing\n")
            for one in root.rglob("masks/*.png"):
                Image.fromarray(np.zeros_like(np.array(Image.open(one)))).save(one)
    return root


FAULTS = {
    "no mask": ("1 of 6 pictures", "have no mask", "01.png", "mask of 0 everywhere"),
    "another size": ("not as large", "72x68", "32x32", "nearest"),
    "unexpected ids": ("ids that are not class ids", "7 (216 pixels)", "01.png", "0 to 1", "255 for void"),
    "from one": ("ids that are not class ids", "2 (", "count from 1"),
    "instances": ("cannot be read", "instance numbers"),
    "colours": ("cannot be read", "colours (RGB)", "class id"),
    "colours everywhere": ("cannot be read", "colours (RGB)", "in a format that", "remove or replace them"),
    "JPEG": ("ids that are not class ids", "JPEG changes the ids", "as PNG"),
    "empty": ("no picture in", "images", "needed"),
    "one class": ("has 1 classes", "2 to 255"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_one_message(tmp_path, what):
    with pytest.raises(UserError) as told:
        load(damaged(tmp_path / "data", what))
    assert not [w for w in FAULTS[what] if w not in str(told.value)], str(told.value)
    assert "--data.max-bad 1.00" not in str(told.value)  # no picture would be left


@pytest.mark.parametrize(("side", "anew"), [(180, False), (90, True)])
def test_numbers_of_objects_are_no_classes(tmp_path, side, anew):
    """The real numbers of 125 nuclei in pieces of the picture, as they are or counted anew in each: told, unless named."""
    numbers = np.asarray(Image.open(nuclei._file("mask2d.tif")))
    for i in range(4):
        piece = numbers[side * (i // 2) :, side * (i % 2) :][:side, :side]
        ids = np.unique(piece, return_inverse=True)[1].reshape(piece.shape) if anew else piece
        for name, values in (("images", (piece > 0) * 200), ("masks", ids)):
            (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.astype(np.uint8)).save(tmp_path / "data" / name / f"{i}.png")
    with pytest.raises(UserError, match="number objects") as told:
        load(tmp_path / "data")
    assert "instance masks" in str(told.value)
    (tmp_path / "data" / "classes.txt").write_text("\n".join(map(str, range(numbers.max() + 1))))
    assert len(load(tmp_path / "data").classes) == numbers.max() + 1


def test_classes_are_not_taken_for_numbers(tmp_path):
    """Five classes without names, several pieces of each, or a few pictures that show one each."""
    draw = np.random.default_rng(0)
    for i in range(6):
        for name in ("images", "masks"):
            (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
        values = draw.integers(0, 6, (8, 8)).repeat(8, 0).repeat(8, 1) if i < 3 else np.full((64, 64), i)
        Image.fromarray(values.astype(np.uint8)).save(tmp_path / "data" / "masks" / f"{i}.png")
        Image.fromarray((values * 40 + i).astype(np.uint8)).save(tmp_path / "data" / "images" / f"{i}.png")
    assert load(tmp_path / "data").classes == tuple("012345")


@pytest.mark.verify
@pytest.mark.parametrize(("argv", "words"), [
    (("--data.path", "nowhere"), ("there is no data folder nowhere", "images")),
    (("--window", "30"), ("--window does not fit", "a multiple of 4", "--window 32")),
    (("--scale", "2"), ("--scale has nothing to start from", "--resize")),
    (("--model", "deeplab"), ("unknown model 'deeplab'", "deeplabv3_resnet50", "segmentation net")),
])  # fmt: skip
def test_what_cannot_work_is_exit_2(launch, argv, words):
    done = launch("check", "vision/segment", *argv)
    assert done.returncode == 2, done.shown
    assert not [w for w in words if w not in done.stderr], done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.verify
@pytest.mark.parametrize("what", ["no mask", "another size", "unexpected ids"])
def test_a_fault_is_exit_2(launch, tmp_path, what):
    damaged(tmp_path / "data", what)
    done = launch("run", "vision/segment", "--data.path", "data")
    assert done.returncode == 2, done.shown
    assert "Traceback" not in done.stderr
    assert not [w for w in FAULTS[what] if w not in done.stderr], done.shown


# ------------------------------------------------------------------------------------------------------ torchvision's nets
def test_weights_are_loaded_and_the_head_is_new(tmp_path, monkeypatch):
    """From a file in torch's own cache, its auxiliary head left out; the answer is as large as the picture, all classes alike."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    name = "lraspp_mobilenet_v3_large"
    file = tmp_path / "hub" / "checkpoints" / Path(zoo.find(name, "DEFAULT", zoo.SEGMENTERS).url).name
    file.parent.mkdir(parents=True)
    theirs = zoo.models.get_model(name, weights=None, weights_backbone=None).state_dict()
    torch.save({**theirs, "aux_classifier.0.weight": torch.zeros(1)}, file)
    start = zoo.segmenter(name, "DEFAULT", 3)
    assert torch.equal(start.model.net.state_dict()["classifier.cbr.0.weight"], theirs["classifier.cbr.0.weight"])
    assert set(start.fresh) == {
        f"net.classifier.{k}_classifier.{p}" for k in ("low", "high") for p in ("weight", "bias")
    }
    out = start.model.eval()(torch.rand(1, 3, 64, 96))
    assert out.shape == (1, 3, 64, 96)
    assert out.abs().max() == 0


# ------------------------------------------------------------------------------------------------------ transformers' nets
def hub_folder(root: Path, kind: str, n: int = 5) -> Path:
    """A small random model with its preprocessor, as the hub lays them out."""
    import transformers as t

    if kind == "segformer":
        config = t.SegformerConfig(depths=[1] * 4, hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 2, 2, 4],
                                   decoder_hidden_size=32, num_labels=n)  # fmt: skip
        net = t.AutoModelForSemanticSegmentation.from_config(config)
    else:
        swin = t.SwinConfig(image_size=64, embed_dim=16, depths=[1] * 4, num_heads=[1, 2, 4, 8], window_size=4,
                            out_features=[f"stage{i}" for i in range(1, 5)])  # fmt: skip
        config = t.Mask2FormerConfig(backbone_config=swin, feature_size=32, mask_feature_size=32, hidden_dim=32,
                                     encoder_feedforward_dim=32, encoder_layers=1, num_attention_heads=2, dim_feedforward=32,
                                     decoder_layers=2, num_queries=8, num_labels=n)  # fmt: skip
        net = t.AutoModelForUniversalSegmentation.from_config(config)
    t.logging.disable_progress_bar()
    net.save_pretrained(root)
    t.SegformerImageProcessor(image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.2, 0.3]).save_pretrained(root)
    return root


@pytest.mark.parametrize("kind", ["segformer", pytest.param("mask2former", marks=pytest.mark.verify)])
def test_a_model_of_the_hub_keeps_its_weights_and_has_a_new_head(tmp_path, kind):
    """Every tensor but the head's is the file's; all classes alike at first; every parameter that trains has a gradient."""
    root = hub_folder(tmp_path / "net", kind)
    start = hub_nets.segmenter(str(root), "DEFAULT", ("a", "b", "c"))
    theirs, mine = type(start.model.net).from_pretrained(root).state_dict(), start.model.net.state_dict()
    head = {n.removeprefix("net.") for n in start.fresh}
    assert head
    assert all("classifier" in n or "class_predictor" in n or "empty_weight" in n for n in head)
    assert all(torch.equal(mine[k], v) for k, v in theirs.items() if k not in head)
    assert start.model.mean.flatten().tolist() == pytest.approx([0.4, 0.5, 0.6])
    images = torch.rand(2, 3, 64, 96)
    assert torch.allclose(start.model.eval()(images).softmax(1), torch.tensor(1 / 3))
    for name, parameter in start.model.named_parameters():
        if name in start.fresh:
            torch.nn.init.normal_(parameter)  # at zero nothing flows back yet
    start.model.train()(images).softmax(1)[:, 0].square().sum().backward()
    assert [n for n, p in start.model.named_parameters() if p.requires_grad and p.grad is None] == []
    with pytest.raises(UserError, match="DEFAULT"):
        hub_nets.segmenter(str(root), "IMAGENET1K_V1", ("a", "b"))


def test_masks_that_are_classified_become_classes():
    """One query says class 1 on the left, one class 0 on the right, one nothing anywhere."""
    classes = torch.tensor([[[0, 9, 0.0], [9, 0, 0], [0, 0, 9]]])
    masks_ = torch.full((1, 3, 4, 6), -9.0)
    masks_[0, 0, :, :3] = masks_[0, 1, :, 3:] = 9
    masks_[0, 2] = 9
    said = hub_nets.by_queries(classes, masks_).argmax(1)[0]
    assert torch.equal(said, torch.tensor([[1, 1, 1, 0, 0, 0]] * 4))


@pytest.mark.verify
@pytest.mark.parametrize("kind", ["segformer", "mask2former"])
def test_a_model_of_the_hub_through_gates_and_export(launch, tmp_path, kind):
    """The real command: what proves its parts; then a few steps, and from_pretrained reads the export and answers alike."""
    import transformers as t

    root, data = hub_folder(tmp_path / "net", kind), write_masks(tmp_path / "data", n=12)
    argv = (
        "vision/segment",
        *NET[:2],
        *NET[6:-1],
        "--model",
        str(root),
        "--weights",
        "DEFAULT",
        "--data.path",
        str(data),
    )
    only = "schema,initial-loss,init,wiring,batch-norm,dependency,labels,scored,joint-transforms"
    done = launch("check", *argv, "--only", only, timeout=550)
    assert done.returncode == 0, done.shown
    assert {v["id"]: v["verdict"] for v in done.verdicts()}["init"] == "pass"
    done = launch("run", *argv, "--gates.no-enabled", "--train.epochs", "2", timeout=550)
    assert done.returncode == 0, done.shown
    folder = done.folder() / "export"
    auto = t.AutoModelForSemanticSegmentation if kind == "segformer" else t.AutoModelForUniversalSegmentation
    net, config = auto.from_pretrained(folder).eval(), read(folder / "config.json")
    mean, std = (torch.tensor(config[k]).view(-1, 1, 1) for k in ("image_mean", "image_std"))
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        answer = hub_nets.Semantic(net, mean.flatten(), std.flatten())(images)
        program = torch.export.load(folder / "model.pt2").module()(images)
    assert torch.allclose(program, answer, atol=1e-3)


@pytest.mark.parametrize("what", ["lacking", "no pixels"])
def test_what_is_no_segmentation_model_is_exit_2(launch, tmp_path, what):
    import transformers as t

    if what == "lacking":
        (tmp_path / "net").mkdir()
        (tmp_path / "net" / "config.json").write_text("{}")
    else:
        config = t.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        t.ViTModel(config).save_pretrained(tmp_path / "net")
        t.ViTImageProcessor().save_pretrained(tmp_path / "net")
    done = launch("check", "vision/segment", "--model", "./net", "--weights", "DEFAULT", "--data.path", "nuclei")
    words = (
        ("a file is missing", "preprocessor_config.json")
        if what == "lacking"
        else ("does not answer for pixels", "vit")
    )
    assert done.returncode == 2, done.shown
    assert not [w for w in words if w not in done.stderr], done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.verify
def test_full_trains_and_exports_for_torchvision(launch, tmp_path):
    """A short run on a folder: the training loss falls; the export is torchvision's own state dict and the program answers like it.
    Its IoU is still 0 then, so this does not show that the net learns to segment."""
    root = write_masks(tmp_path / "data", n=24)
    done = launch(
        "run",
        "vision/segment",
        *NET,
        "--data.path",
        str(root),
        "--train.epochs",
        "4",
        "--optim.lr",
        "3e-3",
        timeout=550,
    )
    assert done.returncode == 0, done.shown
    out = done.folder()
    summary, config = read(out / "summary.json"), read(out / "export" / "config.json")
    assert summary["final"]["train/loss"] < 0.6, done.shown  # 1.2 untrained
    assert config["ignore_index"] == IGNORE
    net = zoo.models.get_model(
        config["architecture"], weights=None, weights_backbone=None, num_classes=config["num_classes"]
    ).eval()
    net.load_state_dict(load_file(out / "export" / "model.safetensors"))
    images = torch.rand(2, 3, 96, 130)  # of another size than the training windows
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.no_grad():
        logits = net((images - mean) / std)["out"]
        program = torch.export.load(out / "export" / "model.pt2").module()(images)
    assert torch.allclose(program, logits, atol=1e-3)


def test_names_of_classes_as_windows_writes_them(tmp_path: Path):
    """The mark at the start of the file was a part of the first class's name."""
    write_masks(tmp_path)
    (tmp_path / "classes.txt").write_bytes("background\r\nline\r\nblock\r\n".encode("utf-8-sig"))
    assert masks.load(masks.Source(path=str(tmp_path))).classes == ("background", "line", "block")
    with pytest.raises(UserError, match="names the training data"):
        masks.load(
            masks.Source(path=str(tmp_path), val=str(tmp_path / "train" if (tmp_path / "train").is_dir() else tmp_path))
        )


def test_a_metric_of_ones_own_is_no_metric_of_the_export():
    """`export` compares the answers, and does not score them by another metric than the stage's."""
    run, answers = SimpleNamespace(device="cpu"), [torch.eye(2)]
    for name, own, known in (("iou", "iou", True), ("miou", "miou", True), ("dice", "miou", False)):
        found = exporting.of_masks(run, ("background", "cell"), name)
        stage = SimpleNamespace(exported=replace(found, score=lambda *_: 1.0), metric=core.Metric(name, "?", floor=0.0, ceiling=1.0),
                                data={"val": None})  # fmt: skip
        assert found.metric == own
        assert bool(exported._scored(stage, {"val": [0]}, answers, answers)) is known


def test_tiles_that_overlap_across_the_splits_are_leakage(tmp_path: Path, launch):
    """Half of each held-out tile was trained on, and every gate passed."""
    picture, mask = nuclei.load()
    for i, (y, x) in enumerate((y, x) for y in range(0, 241, 48) for x in range(0, 241, 48)):
        split = tmp_path / "tiles" / ("val" if i % 5 == 4 else "train")
        for kind, whole in (("images", picture), ("masks", mask)):
            (split / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.asarray(whole[y : y + 96, x : x + 96], "uint8")).save(split / kind / f"{i}.png")
    (tmp_path / "tiles" / "classes.txt").write_text("background\nnucleus")
    done = launch("check", "vision/segment", "--data.path", "tiles", "--only", "leakage")
    assert done.returncode == 3, done.shown
    (found,) = done.verdicts()
    assert "share a part with one of" in found["measured"]
    assert "tiles of one picture that overlap" in found["cause"] + found["remedy"]
