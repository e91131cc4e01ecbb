"""vision/classify and vision/segment on kinds of nets of transformers, by random weights from their configuration classes."""

from pathlib import Path

import pytest
import torch
import transformers as t
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.vision.gates import pictures
from trainworthy.recipes.vision.models import hub_nets
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CLASSES = ("a", "b", "c")
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def pvt() -> t.PvtConfig:
    """Its file has a number of classes of its own."""
    return t.PvtConfig(
        image_size=64, depths=[1] * 4, hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 2, 2, 4], num_labels=1000
    )


def clip() -> t.CLIPConfig:
    """Its picture size is in the configuration of its vision tower."""
    return t.CLIPConfig(
        vision_config={**TINY, "image_size": 64, "patch_size": 8}, text_config={**TINY, "vocab_size": 50}
    )


def maskformer() -> t.MaskFormerConfig:
    """The last norm of its backbone is after all layers that it reads."""
    swin = t.MaskFormerSwinConfig(image_size=64, embed_dim=16, depths=[1] * 4, num_heads=[1, 2, 4, 8], window_size=4,
                                  out_features=[f"stage{i}" for i in range(1, 5)])  # fmt: skip
    detr = t.DetrConfig(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
                        encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=8)  # fmt: skip
    return t.MaskFormerConfig(fpn_feature_size=32, mask_feature_size=32, backbone_config=swin, decoder_config=detr)


def mobilenet() -> t.MobileNetV2Config:
    """Its last convolution is for the classifier."""
    return t.MobileNetV2Config(depth_multiplier=0.25, min_depth=8, finegrained_output=False)


def trained(net: torch.nn.Module, fresh: tuple[str, ...], images: torch.Tensor) -> list[str]:
    """Parameters that train and get no gradient, with a head that is no longer at zero."""
    for name, parameter in net.named_parameters():
        if name in fresh:
            torch.nn.init.normal_(parameter)
    net.train()(images).softmax(1)[:, 0].square().sum().backward()
    return [n for n, p in net.named_parameters() if p.requires_grad and p.grad is None]


@pytest.mark.parametrize("kind", [pvt, clip])
@pytest.mark.parametrize("side", [0, 32])
def test_classifiers_answer_for_the_users_classes_at_the_size_that_was_chosen(kind, side: int, tmp_path: Path):
    kind().save_pretrained(tmp_path)
    prepare = hub_nets.preprocessing(str(tmp_path), "none", side)
    assert prepare.crop == (side or 64)
    start = hub_nets.classifier(str(tmp_path), "none", CLASSES, prepare)
    images = torch.rand(2, 3, prepare.crop, prepare.crop)
    assert torch.equal(start.model.eval()(images), torch.zeros(2, 3))
    assert trained(start.model, start.fresh, images) == []


@pytest.mark.parametrize("kind", [maskformer, mobilenet])
def test_what_a_segmenter_does_not_use_is_frozen(kind, tmp_path: Path):
    kind().save_pretrained(tmp_path)
    start = hub_nets.segmenter(str(tmp_path), "none", CLASSES)
    images = torch.rand(2, 3, 64, 96)
    assert torch.allclose(start.model.eval()(images).softmax(1), torch.tensor(1 / 3))
    assert trained(start.model, start.fresh, images) == []
    assert [n for n, p in start.model.named_parameters() if not p.requires_grad]


def test_a_classifier_of_something_else_is_refused(tmp_path: Path):
    """ImageGPT reads pictures as ids."""
    t.ImageGPTConfig(n_embd=32, n_layer=1, n_head=2, vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="does not read pictures"):
        hub_nets.classifier(str(tmp_path), "none", CLASSES, hub_nets.preprocessing(str(tmp_path), "none", 32))


def test_the_first_input_is_that_of_the_first_layer_that_gets_one(tmp_path: Path):
    """Swin's table of relative positions is a layer with weights that gets nothing."""
    t.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4
    ).save_pretrained(tmp_path)
    start = hub_nets.classifier(str(tmp_path), "none", CLASSES, hub_nets.preprocessing(str(tmp_path), "none", 32))
    assert pictures._first_input(start.model, torch.rand(2, 3, 32, 32)).shape == (2, 3, 32, 32)


def eomt(side: int) -> t.EomtConfig:
    """Its positions are of one picture size."""
    return t.EomtConfig(image_size=side, patch_size=8, num_blocks=1, num_upscale_blocks=1, num_queries=8, hidden_size=32,
                        num_hidden_layers=2, num_attention_heads=2)  # fmt: skip


def test_a_segmenter_of_one_picture_size_is_built_for_the_window(tmp_path: Path):
    config = eomt(32)
    config.save_pretrained(tmp_path)
    start = hub_nets.segmenter(str(tmp_path), "none", CLASSES, 64)
    assert start.model(torch.rand(2, 3, 64, 64)).shape == (2, len(CLASSES), 64, 64)
    t.EomtForUniversalSegmentation(config).save_pretrained(tmp_path)
    t.SegformerImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    hub_nets.segmenter(str(tmp_path), "DEFAULT", CLASSES, 32)
    with pytest.raises(UserError, match="does not read windows of 64 pixels") as caught:
        hub_nets.segmenter(str(tmp_path), "DEFAULT", CLASSES, 64)
    assert "--window 32" in str(caught.value)


def test_eomt_of_dinov3_is_a_segmenter(tmp_path: Path):
    t.EomtDinov3Config(
        image_size=64, patch_size=8, num_blocks=1, num_upscale_blocks=1, num_queries=8, **TINY
    ).save_pretrained(tmp_path)
    start = hub_nets.segmenter(str(tmp_path), "none", CLASSES, 64)
    assert not trained(start.model, start[2], torch.rand(2, 3, 64, 64))


CLASSIFIERS = [
    "bit",
    "clip",
    "cvt",
    "data2vec-vision",
    "efficientnet",
    "focalnet",
    "hgnet_v2",
    "hiera",
    "ijepa",
    "mobilenet_v1",
    "mobilenet_v2",
    "mobilevit",
    "mobilevitv2",
    "poolformer",
    "pvt",
    "pvt_v2",
    "regnet",
    "resnet",
    "segformer",
    "siglip",
    "swiftformer",
    "swinv2",
    "textnet",
    "vit",
    "vit_msn",
]
SMALL = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64}


@pytest.mark.verify
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_every_classifier_starts_even_and_trains_whole(kind: str, tmp_path: Path):
    """At the sizes of its own configuration where these are lists: three classes are equally likely, then every parameter gets a gradient."""
    config = CONFIG_MAPPING[kind]()
    for part in (config, getattr(config, "vision_config", None)):
        for name, size in SMALL.items():
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, size)
        if getattr(part, "patch_size", None) in (14, 32):
            part.patch_size = 8
    config.save_pretrained(tmp_path)
    prepare = hub_nets.preprocessing(str(tmp_path), "none", 0)
    start = hub_nets.classifier(str(tmp_path), "none", CLASSES, prepare)
    images = torch.rand(2, 3, prepare.crop, prepare.crop)
    with torch.no_grad():
        assert start.model.eval()(images).abs().max() == 0
    assert not trained(start.model, start.fresh, images)


def test_a_net_that_reads_patches_is_refused(tmp_path: Path):
    t.Siglip2Config(
        vision_config={**TINY, "num_patches": 16, "patch_size": 4}, text_config={**TINY, "vocab_size": 50}
    ).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="does not read pictures"):
        hub_nets.classifier(str(tmp_path), "none", CLASSES, hub_nets.preprocessing(str(tmp_path), "none", 32))


def test_a_model_that_is_no_classifier_is_not_called_texts(tmp_path: Path):
    t.DINOv3ViTConfig(**TINY).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="does not classify pictures") as caught:
        hub_nets.classifier(str(tmp_path), "none", CLASSES, hub_nets.preprocessing(str(tmp_path), "none", 32))
    assert "texts in" not in str(caught.value)
