"""vision/classify --model FOLDER: image classifiers of transformers (and timm's), with their weights and a new head."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe import loading
from trainworthy.core.session import stages
from trainworthy.recipes.vision.models import hub_nets, use_export

t = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
SQUARE = {"size": {"height": 32, "width": 32}}
NETS = {
    "resnet": lambda: (t.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"),
                       t.ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=0.875)),
    "vit": lambda: (t.ViTConfig(intermediate_size=64, **SMALL), t.ViTImageProcessor(**SQUARE)),
    "swin": lambda: (t.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4),
                     t.ViTImageProcessor(**SQUARE)),
    "dinov2": lambda: (t.Dinov2Config(**SMALL), t.BitImageProcessor(size={"shortest_edge": 36}, crop_size=SQUARE["size"])),
}  # fmt: skip


def write(name: str, folder: Path) -> Path:
    config, processor = NETS[name]()
    config.num_labels = 7
    torch.manual_seed(0)
    t.AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", NETS)
def test_a_net_keeps_its_weights_and_gets_a_head_at_zero(name, tmp_path):
    folder = str(write(name, tmp_path))
    assert hub_nets.named(folder)
    prepare = hub_nets.preprocessing(folder, "DEFAULT")
    assert (prepare.crop, prepare.resize) == (32, {"resnet": 37, "dinov2": 36}.get(name, 32))
    start = hub_nets.classifier(folder, "DEFAULT", ("a", "b", "c"), prepare)
    known = t.AutoModelForImageClassification.from_pretrained(folder).state_dict()
    head = [n for n in known if known[n].shape[:1] == (7,)]
    assert set(start.fresh) == {f"net.{n}" for n in head}
    for key, value in start.model.state_dict().items():
        own = key.removeprefix("net.")
        assert torch.equal(value, torch.zeros_like(value) if own in head else known[own]), key
    images = torch.rand(2, 3, 48, 48)
    assert not start.model.eval()(images[..., :32, :32]).any()
    larger = hub_nets.preprocessing(folder, "DEFAULT", 48)
    assert larger.crop == 48
    assert hub_nets.classifier(folder, "DEFAULT", ("a", "b"), larger).model(images).shape == (2, 2)


def test_what_does_not_fit_is_refused(tmp_path):
    folder = str(write("vit", tmp_path))
    with pytest.raises(UserError, match="a multiple of its patches of 8"):
        hub_nets.classifier(folder, "DEFAULT", ("a", "b"), hub_nets.preprocessing(folder, "DEFAULT", 36))
    with pytest.raises(UserError, match="DEFAULT"):
        hub_nets.preprocessing(folder, "IMAGENET1K_V1")
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match="preprocessor_config"):
        hub_nets.preprocessing(folder, "DEFAULT")
    hub_nets.preprocessing(folder, "none")


def test_its_export_is_read_by_from_pretrained(tmp_path):
    folder = write("vit", tmp_path / "vit")
    recipe = loading.load("vision/classify")
    words = ["--model", str(folder), "--weights", "DEFAULT", "--image-size", "48", "--loader.workers", "0"]
    cfg, _ = config.parse(recipe.module, words, prog="vision/classify")
    stage = stages.specs(recipe, cfg)[0].build(Run(cfg, Accelerator(cpu=True), rehearsal=Rehearsal(steps=1)), None)
    with torch.no_grad():
        torch.nn.init.normal_(stage.model.net.classifier.weight)
    picture = stage.data["val"].images[0]
    (tmp_path / "export").mkdir()
    stage.export(tmp_path / "export")
    read = use_export.answer(use_export.load(str(tmp_path / "export")), {"picture": picture})
    here = stage.model.eval()(stage.data["val"].get(0, None)["image"][None])[0]
    assert set(read) == {"model.pt2", "transformers"}
    assert here.any()
    for way, there in read.items():
        assert torch.allclose(there, here, atol=1e-5), way
    processor = t.AutoImageProcessor.from_pretrained(tmp_path / "export")
    net = t.AutoModelForImageClassification.from_pretrained(tmp_path / "export").eval()
    colours = picture.expand(3, -1, -1).permute(1, 2, 0).numpy()
    with torch.no_grad():
        theirs = net(**processor(colours, return_tensors="pt"), interpolate_pos_encoding=True).logits[0]
    assert theirs.argmax() == here.argmax()  # Pillow resizes 8-bit pictures, torchvision fractions
    assert torch.allclose(theirs, here, atol=0.05 * here.abs().max().item()), (theirs, here)


def test_a_net_of_timm_has_the_classes_of_the_data_and_their_names(tmp_path):
    """Its configuration kept the number and the names of the classes that the weights were trained on."""
    known = {"num_classes": 5, "label_names": list("vwxyz"), "architecture": "resnet10t", "model_type": "timm_wrapper",
             "pretrained_cfg": {"num_classes": 5, "mean": [0.5] * 3}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(known))
    config = hub_nets._configuration(str(tmp_path), ("a", "b", "c"))
    assert (config.num_labels, config.id2label) == (3, {0: "a", 1: "b", 2: "c"})
    assert config.to_dict()["label_names"] == ["a", "b", "c"]
    if importlib.util.find_spec("timm") is None:
        with pytest.raises(UserError, match="needs another package"):
            hub_nets.classifier(str(tmp_path), "none", ("a", "b", "c"), hub_nets.preprocessing(str(tmp_path), "none"))
