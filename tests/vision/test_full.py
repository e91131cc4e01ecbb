"""vision/classify on people's own pictures: folders, the hub's layout, torchvision's nets, averages, mixing; bad data."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop.ema import Ema
from trainworthy.core.loop.optim import layer_rates
from trainworthy.recipes.vision.classify import Images
from trainworthy.recipes.vision.data import mixing, pictures
from trainworthy.recipes.vision.models import zoo

from tests.core.test_life import _stop_at
from tests.helpers.commands import (
    QUICK,
    assert_same_run,
    final_weights,
    holds,
    losses,
    read,
    run_folder,
    same,
    trainworthy,
)
from tests.helpers.pictures import write_folder, write_hub

NET = ("--preset", "full", "--model", "shufflenet_v2_x0_5", "--weights", "none", "--train.precision", "fp32",
       "--optim.layer-decay", "1", "--optim.lr", "3e-3", "--image-size", "64", "--train.batch-size", "32",
       "--loader.workers", "0", "--loader.eval-workers", "0", "--run.no-tensorboard", "--run.threads", "1")  # fmt: skip
SMALL = ("--preset", "tiny", "--image-size", "28", "--loader.workers", "0", "--run.no-tensorboard")
BARE = ("--gates.no-enabled",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """train/ and val/ with 30 and 10 real pictures of each of ten classes, of many kinds."""
    return write_folder(tmp_path_factory.mktemp("data") / "folder")


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """The same pictures as parquet files."""
    return write_hub(tmp_path_factory.mktemp("data") / "hub")


@pytest.fixture(scope="module", autouse=True)
def own_caches(tmp_path_factory):
    """The hub's cache is this module's own, and nothing goes to the network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        yield


# ----------------------------------------------------------------------------------------------------------- the whole way
@pytest.mark.verify
def test_full_proves_itself_on_a_folder(launch, folder):
    """Every gate, with a batch-norm net, mixing, an average of the weights: nothing cries wolf, in bounded time."""
    done = launch("check", "vision/classify", *NET, "--data.path", str(folder), timeout=550)
    assert done.returncode == 0, done.shown
    verdicts = {v["id"]: v["verdict"] for v in done.verdicts()}
    assert {k for k, v in verdicts.items() if v == "fail"} == set(), done.shown
    assert {"overfit", "dependency", "accumulation", "evaluation", "resume"} <= {
        k for k, v in verdicts.items() if v == "pass"
    }
    assert "converted to RGB" in done.stdout


def test_full_learns_and_exports_for_torchvision(launch, folder):
    """A short run is clearly above chance; the export is torchvision's own state dict and gives the reported answers."""
    done = launch("run", "vision/classify", *NET, *BARE, "--data.path", str(folder), "--train.epochs", "10", "--mix.mixup", "0",
                  "--mix.cutmix", "0", "--no-augment", "--ema", "0.9", timeout=550)  # fmt: skip
    assert done.returncode == 0, done.shown
    out = done.folder()
    summary, config = read(out / "summary.json"), read(out / "export" / "config.json")
    assert summary["reported"]["accuracy"] > 0.5, done.shown
    from torchvision import models

    net = models.get_model(config["architecture"], num_classes=config["num_classes"])
    net.load_state_dict(load_file(out / "export" / "model.safetensors"))
    p = config["preprocessing"]
    found = pictures.load(pictures.Source(str(folder)))
    fit = zoo.Preprocessing(p["resize"], p["crop"], zoo.v2.InterpolationMode(p["interpolation"]), p["mean"], p["std"])
    images = torch.stack([fit(found.images[int(i)].float() / 255) for i in found.held_out])
    mean, std = (torch.tensor(p[k]).view(-1, 1, 1) for k in ("mean", "std"))
    with torch.no_grad():
        logits = net.eval()((images - mean) / std)
        program = torch.export.load(out / "export" / "model.pt2").module()(images)
    right = (logits.argmax(1) == found.labels[found.held_out]).float().mean().item()
    assert right == pytest.approx(summary["reported"]["accuracy"], abs=1e-6)
    assert torch.allclose(program, logits, atol=1e-3)
    raw = final_weights(out)  # the average is what was exported, not the raw weights
    assert not torch.equal(raw["net.fc.weight"], net.fc.weight)
    assert "converted to RGB" in (out / "card.md").read_text()


@pytest.mark.verify
def test_the_hubs_layout_over_two_processes(hub, tmp_path):
    """Parquet files and a batch-norm net over two processes: evaluated with one set of statistics, exit 0."""
    argv = ("run", "vision/classify", *NET, *BARE, "--data.path", hub, "--train.epochs", "1", "--image-size", "32")
    two = trainworthy(*argv, "-n", 2, cwd=tmp_path)
    assert two.returncode == 0, two.stderr
    assert len(losses(run_folder(tmp_path))) == 10


def test_streaming_reads_the_same_pictures(hub):
    """By row group or copied: one data set; the order is a permutation that depends on its parts alone."""
    copied, streamed = (
        pictures.load(pictures.Source(str(hub))),
        pictures.load(pictures.Source(str(hub), streaming=True)),
    )
    assert copied.classes == streamed.classes
    assert torch.equal(copied.labels, streamed.labels)
    assert torch.equal(copied.learn, streamed.learn)
    for i in (0, 7, 150, 299, 399):
        assert torch.equal(copied.images[i], streamed.images[i])
    train = streamed.images[streamed.learn]
    order = train.order(0, "order", 1)
    assert sorted(order.tolist()) == list(range(len(train)))
    assert torch.equal(order, train.order(0, "order", 1))
    assert not torch.equal(order, train.order(0, "order", 2))


@pytest.mark.verify
def test_streaming_resumes_bitwise(launch, hub, tmp_path):
    """A streamed run with an average of the weights, stopped by a signal and resumed, is the run that was not."""
    argv = ("run", "vision/classify", *SMALL, *BARE, "--data.path", hub, "--data.streaming", "--ema", "0.99", "--mix.mixup", "0.2",
            "--train.batch-size", "8", "--train.epochs", "2", "--run.save-every", "0.8")  # fmt: skip
    straight = trainworthy(*argv, cwd=tmp_path)
    assert straight.returncode == 0, straight.stderr
    whole = run_folder(tmp_path)
    (tmp_path / "again").mkdir()
    code, folder, said = _stop_at(tmp_path / "again", 30, *argv)
    assert code == 5, said
    resumed = trainworthy("resume", folder, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(folder, whole)
    exported = [load_file(f / "export" / "model.safetensors") for f in (folder, whole)]
    assert same(*exported)


# ------------------------------------------------------------------------------------------------------------- the parts
def test_every_kind_of_picture_reads_alike(folder):
    """Grey, palette, alpha, 16 bits, JPEG: the same digit within what the format loses."""
    found = pictures.load(pictures.Source(str(folder)))
    assert found.classes == tuple(f"digit {i}" for i in range(10))
    for i in range(0, len(found.labels), 29):
        image = found.images[i].float()
        assert image.shape[0] == 3
        assert 0 <= image.min() < 30
        assert 200 < image.max() <= 255


def test_sixteen_bits_are_kept(tmp_path):
    """A 16-bit picture is scaled, not cut; alpha is laid on white."""
    deep = Image.fromarray((torch.arange(16).view(4, 4) * 4369).numpy().astype("uint16"))
    values = pictures.decode(deep)[0] / 255
    assert values.flatten().tolist() == pytest.approx([i / 15 for i in range(16)], abs=1e-6)
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert pictures.decode(clear).min() == 255
    for unknown in (Image.new("F", (2, 2)), Image.new("I", (2, 2), 70_000)):  # nothing says what white is
        with pytest.raises(ValueError, match=r"range|beyond 16 bits"):
            pictures.decode(unknown)


def test_own_split_is_stratified_and_not_the_seeds(tmp_path):
    """One folder of classes: a fifth of each is held out, copies of a picture stay on one side."""
    root = write_folder(tmp_path / "one", per_class=20, splits=("",))
    for i in range(5):
        shutil.copy(
            root / "digit 3" / sorted(p.name for p in (root / "digit 3").iterdir())[0],
            root / "digit 3" / f"copy{i}.png",
        )
    found = pictures.load(pictures.Source(str(root)))
    held = torch.bincount(found.labels[found.held_out], minlength=10)
    assert all(3 <= n <= 9 for n in held.tolist())
    names = [found.images.encoded.name(int(r)) for r in found.images.rows]
    sides = {i in set(found.held_out.tolist()) for i, n in enumerate(names) if "copy" in n}
    assert len(sides) == 1


def test_mixtures_live_in_the_sample():
    """The same key gives the same mixture; the own class keeps the larger share; the floor is the entropy of the targets."""
    pixels = torch.rand(10, 3, 8, 8) * 255
    mixed = mixing.Mixed(Images(pixels, torch.arange(10), tuple("0123456789")), mixing.Mix(mixup=0.2, cutmix=1.0))
    draw = lambda i, s: mixed.get(i, torch.default_generator.manual_seed(s))  # noqa: E731
    samples = [draw(i % 10, i) for i in range(50)]
    assert all(torch.equal(draw(i % 10, i)["image"], s["image"]) for i, s in enumerate(samples))
    batch = mixed.collate(samples)
    assert batch["lam"].min() >= 0.5
    assert torch.equal(batch["label"], torch.arange(50) % 10)
    for s in samples:  # a mixture lies between its two pictures, in the share that lam says
        own, other = pixels[s["label"]] / 255, pixels[s["label2"]] / 255
        assert s["image"].mean() == pytest.approx(
            (s["lam"] * own.mean() + (1 - s["lam"]) * other.mean()).item(), abs=0.12
        )
    target = mixing.soft(batch, 10) * 0.9 + 0.01
    best = torch.nn.functional.cross_entropy(target.log(), mixing.soft(batch, 10), label_smoothing=0.1)
    assert mixing.floor(batch, 10, 0.1) == pytest.approx(best.item(), abs=1e-5)
    plain = mixed.get(3, None)
    assert plain["lam"] == 1
    assert plain["label2"] == 3


def test_average_is_ramped_and_restored():
    """After n updates towards a constant the average is where the ramp says; its state comes back; integers are copied."""
    net = torch.nn.BatchNorm1d(2)
    ema = Ema(net, 0.9)
    with torch.no_grad():
        net.weight.fill_(2.0)
        net.num_batches_tracked += 5
    left = 1.0
    for n in range(40):
        ema.update(net)
        left *= min(0.9, (1 + n) / (10 + n))
    assert ema.model.weight[0].item() == pytest.approx(2 - left, abs=1e-6)
    assert ema.model.num_batches_tracked == 5
    again = Ema(torch.nn.BatchNorm1d(2), 0.9)
    again.load_state_dict(ema.state_dict())
    assert again.updates == 40
    assert torch.equal(again.model.weight, ema.model.weight)


def test_average_moves_tied_weights_once():
    net = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)])
    net[1].weight = net[0].weight
    ema = Ema(net, 0.9)
    before = net[0].weight.detach().clone()
    with torch.no_grad():
        net[0].weight += 1
    ema.update(net)
    assert torch.allclose(ema.model[0].weight, before + 0.9)  # the first decay is 0.1


@pytest.mark.parametrize("model", ["resnet18", "vit_b_16", "convnext_tiny", "mobilenet_v3_small", "densenet121"])
def test_layers_are_the_models_own(model):
    """Rates rise from the stem to the head, which learns at the full rate; every parameter has a layer."""
    with torch.device("meta"):
        names = [n for n, _ in zoo.models.get_model(model, weights=None).named_parameters()]
    rates = layer_rates(names, 0.5)
    values = list(rates.values())
    assert values == sorted(values)
    assert values[-1] == 1
    assert 5 <= len(rates) <= 20


def test_weights_are_loaded_and_the_head_is_new(tmp_path, monkeypatch):
    """From a file in torch's own cache: every tensor but the head's; a file of another net is refused; no network is an error."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub" / "checkpoints" / Path(zoo.find("resnet18", "DEFAULT").url).name
    file.parent.mkdir(parents=True)
    theirs = zoo.models.get_model("resnet18", weights=None)
    torch.save(theirs.state_dict(), file)
    fit = zoo.preprocessing("resnet18", "DEFAULT")
    assert (fit.resize, fit.crop) == (256, 224)
    start = zoo.build("resnet18", "DEFAULT", 5, fit)
    assert torch.equal(start.model.net.layer4[1].conv2.weight, theirs.layer4[1].conv2.weight)
    assert start.fresh == ("net.fc.weight", "net.fc.bias")
    assert start.model(torch.rand(2, 3, 64, 64)).abs().max() == 0
    torch.save(zoo.models.get_model("resnet34", weights=None).state_dict(), file)
    with pytest.raises(zoo.UserError, match="do not fit"):
        zoo.build("resnet18", "DEFAULT", 5, fit)


def trained(root: Path, model: str) -> Path:
    """Weights of `model` with statistics of some data, in torch's own cache under `root`."""
    file = root / "hub" / "checkpoints" / Path(zoo.find(model, "DEFAULT").url).name
    file.parent.mkdir(parents=True)
    net = zoo.models.get_model(model, weights=None).train()
    with torch.no_grad():
        for _ in range(3):
            net(torch.rand(4, 3, 64, 64))
    torch.save(net.state_dict(), file)
    return file


@pytest.mark.verify
@pytest.mark.parametrize("norm", ["own", "frozen"])
def test_trained_norms_stay_or_are_frozen(launch, folder, tmp_path, norm):
    """The real command: the file's statistics are in the net; frozen ones stand still through the rehearsal, and the gate knows."""
    trained(tmp_path / "torch", "shufflenet_v2_x0_5")
    done = launch("check", "vision/classify", *NET, "--data.path", str(folder), "--weights", "DEFAULT", "--norm", norm,
                  "--optim.lr", "5e-4", "--only", "init,wiring,batch-norm,evaluation",
                  TORCH_HOME=str(tmp_path / "torch"))  # fmt: skip
    assert done.returncode == 0, done.shown
    said = {v["id"]: v for v in done.verdicts()}
    assert {v["verdict"] for v in said.values()} == {"pass"}, done.shown
    assert ("fixed statistics" in said["batch-norm"]["measured"]) == (norm == "frozen"), done.shown


def test_norms_are_exchanged_whole():
    """Every layer of the one kind gives way; frozen ones answer in train mode as the net does in eval mode."""
    run = type("Run", (), {"world": 1, "device": torch.device("cpu")})()
    kinds = lambda m: {type(x).__name__ for x in m.modules() if "Norm" in type(x).__name__}  # noqa: E731
    make = lambda: zoo.models.get_model("shufflenet_v2_x0_5", weights=None, num_classes=3)  # noqa: E731
    many = type("Run", (), {"world": 2, "device": torch.device("cuda")})()
    assert kinds(zoo.normed(zoo.Start(make()), "own", many).model) == {"SyncBatchNorm"}
    group = zoo.normed(zoo.Start(make()), "group", run).model
    assert kinds(group) == {"GroupNorm"}
    assert all(
        m.num_channels // m.num_groups >= 4 or m.num_groups == 1 for m in group.modules() if hasattr(m, "num_groups")
    )
    net = make().train()
    net(torch.rand(4, 3, 64, 64))
    x = torch.rand(2, 3, 64, 64)
    plain = net.eval()(x)
    still = zoo.normed(zoo.Start(net, {}), "frozen", run).model.train()
    assert kinds(still) == {"FrozenBatchNorm2d"}
    assert torch.allclose(still(x), plain, atol=1e-4)
    again = make()  # torchvision's own class reads what is exported, and answers alike
    again.load_state_dict(dict(still.state_dict()))
    assert torch.allclose(again.eval()(x), plain, atol=1e-4)


@pytest.mark.parametrize(("argv", "words"), [
    (("--norm", "frozen"), ("no statistics to keep", "--weights")),
    (("--norm", "layer"), ("--norm", "frozen")),
    (("--model", "squeezenet1_0", "--image-size", "8", "--data.path", "data"), ("too small for squeezenet1_0", "--image-size")),
])  # fmt: skip
def test_norms_and_sizes_that_cannot_be(launch, tmp_path, argv, words):
    write_folder(tmp_path / "data", per_class=4, held_out=1)
    refused(launch("run", "vision/classify", *argv), *words)


def test_evaluation_reads_the_same_pictures_whatever_was_drawn_before(folder):
    """V2: every held-out picture twice, with other global draws between, backwards the second time: bit for bit."""
    found = pictures.load(pictures.Source(str(folder)))
    data = Images(
        found.images[found.held_out], found.labels[found.held_out], found.classes, augment=torch.nn.Dropout(0.5)
    )
    data.fit = zoo.preprocessing("resnet18", "none", 32)
    first = [data.get(i, None)["image"] for i in range(len(data))]
    torch.manual_seed(7)
    again = [data.get(i, None)["image"] for i in reversed(range(len(data)))]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))


def test_a_net_that_computes_its_widths_is_built():
    start = zoo.build("regnet_y_400mf", "none", 3, zoo.preprocessing("regnet_y_400mf", "none", 64))
    assert len(start.fresh) == 2


def test_no_network_is_one_message(launch, folder, tmp_path):
    """Weights that cannot be fetched: exit 2, what to do, nothing left behind."""
    done = launch("run", "vision/classify", *NET, "--weights", "DEFAULT", "--data.path", str(folder),
                  TORCH_HOME=str(tmp_path / "none"), https_proxy="http://127.0.0.1:9")  # fmt: skip
    assert done.returncode == 2, done.shown
    assert "cannot get the weights shufflenet_v2_x0_5" in done.stderr
    assert "--weights none" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


# -------------------------------------------------------------------------------------------------------------- bad data
def refused(done, *words: str) -> None:
    """Exit 2, one message with these words, no traceback, no run folder."""
    assert done.returncode == 2, done.shown
    assert not [w for w in words if w not in done.stderr], done.stderr
    assert "Traceback" not in done.stderr
    assert not (done.cwd / "runs").exists()


def test_missing_or_empty_folder(launch, tmp_path):
    refused(
        launch("run", "vision/classify", *SMALL, "--data.path", "nowhere"),
        "there is no data folder nowhere",
        "needed",
        "next",
    )
    (tmp_path / "empty" / "train").mkdir(parents=True)
    refused(launch("run", "vision/classify", *SMALL, "--data.path", "empty"), "no picture in", "train/<class>")


def test_one_class_only(launch, tmp_path):
    write_folder(tmp_path / "data", per_class=4, held_out=1, classes=1)
    refused(launch("run", "vision/classify", *SMALL, "--data.path", "data"), "one class only", "digit 0", "two or more")


@pytest.mark.parametrize("wrong", [-1, 12])
def test_label_out_of_range(launch, tmp_path, wrong):
    write_hub(tmp_path / "data", per_class=6, held_out=2, wrong=wrong)
    refused(launch("run", "vision/classify", *SMALL, "--data.path", "data"), "labels", "no class", str(wrong), "0 to 9")


def damage(root: Path) -> list[Path]:
    """A JPEG cut in half, a text file called png, an empty file."""
    folder = root / "train" / "digit 1"
    cut = folder / "cut.jpg"
    Image.effect_noise((64, 64), 80).convert("RGB").save(cut)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    text, empty = folder / "notes.png", folder / "empty.png"
    text.write_text("not a picture at all")
    empty.touch()
    return [cut, text, empty]


def test_damaged_files_are_counted_named_and_left_out(launch, tmp_path):
    """Below the limit the run goes on and says so, in the data report and on the card; above it is exit 2."""
    root = write_folder(tmp_path / "data", per_class=12, held_out=4)
    bad = damage(root)
    refused(
        launch("run", "vision/classify", *SMALL, "--data.path", "data"),
        "too many pictures",
        "3 of 123",
        "cut.jpg",
        "--data.max-bad 0.03",
    )
    done = launch(
        "run", "vision/classify", *SMALL, *BARE, "--data.path", "data", "--data.max-bad", "0.03", "--train.epochs", "1"
    )
    assert done.returncode == 0, done.shown
    told = json.loads((done.folder() / "data.json").read_text())["splits"]["train"]["notes"]["left out"]
    assert all(p.name in told for p in bad), told
    assert "3 of 123" in (done.folder() / "card.md").read_text()
    assert "left out: 3 of 123" in done.stdout


def test_files_of_another_kind_are_no_damaged_pictures(tmp_path):
    """A Thumbs.db in each of three class folders was 2.4% of damaged pictures, above the limit of 1%. A truncated picture still counts."""
    root = write_folder(tmp_path / "data", per_class=30, held_out=10, classes=3)
    for folder in (root / "train").iterdir():
        (folder / "Thumbs.db").write_bytes(b"x" * 100)
    (next((root / "train").iterdir()) / "labels.csv").write_text("a,b")
    found = pictures.load(pictures.Source(str(root)))
    assert len(found.labels) == sum(p.suffix in (".png", ".jpg") for p in root.rglob("*.*"))
    holds(found.notes["other files"], f"{sum(1 for _ in (root / 'train').iterdir()) + 1}: ", "Thumbs.db", "labels.csv")
    pictures._load.cache_clear()
    some = next(next((root / "train").iterdir()).glob("*.png"))
    for i in range(3):
        some.with_name(f"cut{i}.png").write_bytes(some.read_bytes()[:60])
    with pytest.raises(UserError, match="too many pictures"):
        pictures.load(pictures.Source(str(root)))


def test_the_same_picture_in_both_splits(launch, tmp_path):
    root = write_folder(tmp_path / "data", per_class=12, held_out=4)
    shutil.copy(next((root / "train" / "digit 2").glob("*.png")), root / "val" / "digit 2" / "again.png")
    done = launch("check", "vision/classify", *SMALL, "--data.path", "data", "--only", "leakage")
    assert done.returncode == 3, done.shown
    assert "1 exact" in done.stdout


def test_a_class_in_one_split_only(launch, tmp_path):
    root = write_folder(tmp_path / "data", per_class=12, held_out=4)
    shutil.rmtree(root / "val" / "digit 7")
    done = launch("check", "vision/classify", *SMALL, "--data.path", "data", "--only", "data")
    assert done.returncode == 3, done.shown
    assert "val: no sample of class digit 7" in done.stdout


def test_values_that_use_a_sliver_of_their_range(launch, tmp_path):
    """Twelve bits in a sixteen-bit file: nothing is guessed, the data gate says that the pictures are nearly black."""
    root = write_folder(tmp_path / "data", per_class=12, held_out=4)
    for file in root.rglob("*.*"):
        with Image.open(file) as image:
            grey = np.asarray(image.convert("L")).astype(np.uint16) * 16
        file.unlink()
        Image.fromarray(grey).save(file.with_suffix(".png"))
    done = launch("check", "vision/classify", *SMALL, "--data.path", "data", "--only", "data")
    assert done.returncode == 3, done.shown
    assert "of its declared range" in done.stdout


def test_what_a_worker_cannot_read_is_one_message(launch, fork):
    """Told by the process that trains, without the worker's traceback."""
    line = "        image = self.images[index].float() / 255\n"
    told = 'core.UserError("cannot read 7.png", next="look")'
    fork((line, f"        if torch.utils.data.get_worker_info():\n            raise {told}\n{line}"))
    done = launch("run", "mine.py", *QUICK, "--loader.workers", "1")
    assert done.returncode == 2, done.shown
    assert done.stderr.startswith("error: cannot read 7.png\n  next:")
    assert "Traceback" not in done.stderr


def test_an_unreadable_data_set_file(launch, tmp_path):
    root = write_hub(tmp_path / "data", per_class=6, held_out=2)
    file = next((root / "data").glob("train-00001*"))
    file.write_bytes(file.read_bytes()[:200])
    refused(launch("run", "vision/classify", *SMALL, "--data.path", "data"), "cannot read the data set", "damaged")
    refused(
        launch("run", "vision/classify", *SMALL, "--data.path", "data", "--data.streaming"), "cannot read the data set"
    )


def test_unknown_names_get_the_nearest(launch, folder):
    refused(launch("run", "vision/classify", *SMALL, "--data.path", str(folder), "--model", "resnet19"), "resnet18")
    refused(
        launch("run", "vision/classify", *NET, "--data.path", str(folder), "--weights", "IMAGENET1K_V9"),
        "IMAGENET1K_V1",
    )


def test_a_size_that_a_net_cannot_take():
    with pytest.raises(zoo.UserError, match="multiple of their patches"):
        zoo.build("vit_b_16", "none", 5, zoo.preprocessing("vit_b_16", "none", 30))
    with pytest.raises(zoo.UserError, match="number of pixels"):
        zoo.preprocessing("resnet18", "none", -4)
